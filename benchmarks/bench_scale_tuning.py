"""What gradient descent on the scales gains after GPTQ, codes frozen: a trial, on which the library's choice not to do it rests.

``blocks``: one transformer block after the other, its output from the quantized model's inputs against the 16-bit block's output
from the 16-bit inputs; a block keeps its new scales if the error on held-out sequences falls. ``model``: all scales at once,
against the 16-bit model's logits (KL). For decoders of Llama's form::

    python benchmarks/bench_scale_tuning.py --epochs 2 --save
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_quantize import Quality, add_options, evaluate, prepare
from common import console, print_table, save_results
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from torchq import GPTQ, QuantConfig, QuantLinear, quantize_
from torchq.calibration.data import CalibrationData

HELD_OUT = 4  # sequences
BATCH_SIZE = {"blocks": 4, "model": 2}


class TunableLinear(nn.Module):
    """A quantized layer whose scales are trained: scale (1 + change), codes as they are."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        codes, scale, zero_point = layer.quantized_tensors()
        if zero_point is not None:
            raise SystemExit("symmetric weights only")
        self.codes, self.scale = codes.view(*scale.shape, -1), scale.float()
        self.change = nn.Parameter(torch.zeros_like(self.scale))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N]."""
        weight = self.codes.float() * (self.scale * (1 + self.change)).unsqueeze(2)
        return F.linear(x, weight.flatten(1))


def main() -> None:
    """Quantize, tune a copy of the scales in each way, evaluate, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--ways", nargs="+", default=["blocks", "model"], choices=["blocks", "model"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3, help="Adam's first learning rate, of relative changes; falls to 0")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows, windows = prepare(arguments, Path(temporary))
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        started = time.perf_counter()
        model = _quantized(arguments, folder, rows)
    results: dict[str, Any] = {"untuned": _figures(base, model, windows, time.perf_counter() - started)}
    for way in arguments.ways:
        for layer in _tunable(model):
            nn.init.zeros_(layer.change)
        started = time.perf_counter()
        (_tune_blocks if way == "blocks" else _tune_model)(arguments, base, model, torch.tensor(rows))
        results[way] = _figures(base, model, windows, time.perf_counter() - started)
    table = []
    for name, result in results.items():
        cells = [f"{q['mean_kl']:.4f} ± {q['mean_kl_standard_error']:.4f}" for q in result["quality"].values()]
        table.append([name, f"{result['seconds']:.0f}", *cells])
    print_table(f"{folder.name}, groups of {arguments.group_size}", ["scales", "s", *(f"KL, {text}" for text in windows)], table)
    if arguments.save:
        names = ("bits", "group_size", "dtype", "threads", "samples", "length", "epochs", "rate")
        settings = {name: getattr(arguments, name) for name in names}
        save_results("scale_tuning", {"model": folder.name} | settings | {"results": results})


def _quantized(arguments: argparse.Namespace, folder: Path, rows: list[list[int]]) -> nn.Module:
    """The model in float32 with TunableLinears."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=arguments.dtype).eval()
    config = QuantConfig(f"W{arguments.bits}A16", group_size=arguments.group_size, algorithm=GPTQ())
    quantize_(
        model, config, calibration=CalibrationData(rows, num_samples=len(rows), max_length=arguments.length), progress=False
    )
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, TunableLinear(layer))
    model.float()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in _tunable(model):
        layer.change.requires_grad_(True)
    return model


def _tunable(module: nn.Module) -> list[TunableLinear]:
    return [layer for layer in module.modules() if isinstance(layer, TunableLinear)]


def _figures(base: nn.Module, model: nn.Module, windows: dict[str, list[list[int]]], seconds: float) -> dict[str, Any]:
    quality: dict[str, Quality] = {text: evaluate(base, {"": model}, ids)[""] for text, ids in windows.items()}
    console.print({text: round(one.mean_kl, 4) for text, one in quality.items()})
    return {"seconds": seconds, "quality": {text: asdict(one) for text, one in quality.items()}}


def _steps(arguments: argparse.Namespace, parameters: list[nn.Parameter], count: int, size: int) -> Iterator[Tensor]:
    """Indices of the sequences of each step; after the caller's backward pass the parameters move."""
    optimizer = torch.optim.Adam(parameters, lr=arguments.rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    batches = [
        batch
        for _ in range(arguments.epochs)
        for batch in (torch.randperm(count - HELD_OUT, generator=generator) + HELD_OUT).split(size)
    ]
    for index, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * (1 - index / len(batches))
        yield batch
        optimizer.step()
        optimizer.zero_grad()


def _bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _tune_blocks(arguments: argparse.Namespace, base: Any, model: Any, ids: Tensor) -> None:
    """One block after the other, on its output."""
    size = BATCH_SIZE["blocks"]
    with torch.no_grad():
        original = base.model.embed_tokens(ids).bfloat16()
        rotary = base.model.rotary_emb(original, torch.arange(ids.shape[1])[None])
    now = original

    def run(block: nn.Module, x: Tensor) -> Tensor:
        with _bfloat16():
            return block(x, position_embeddings=rotary, attention_mask=None)

    for index, (block, wanted_block) in enumerate(zip(model.model.layers, base.model.layers, strict=True)):
        with torch.no_grad():
            wanted = torch.cat([run(wanted_block, x) for x in original.split(size)])

        def error(rows: Tensor, block: nn.Module = block, x: Tensor = now, y: Tensor = wanted, x0: Tensor = original) -> Tensor:
            off = (run(block, x[rows]) - y[rows]).float()[:, 1:]  # without the first token, whose activations are huge
            return off.square().sum() / (y[rows] - x0[rows]).float()[:, 1:].square().sum()

        held_out = torch.arange(HELD_OUT)
        with torch.no_grad():
            before = float(error(held_out))
        for batch in _steps(arguments, [layer.change for layer in _tunable(block)], len(ids), size):
            error(batch).backward()
        with torch.no_grad():
            after = float(error(held_out))
            for layer in _tunable(block) if after > before else ():
                nn.init.zeros_(layer.change)
            now = torch.cat([run(block, x) for x in now.split(size)])
        console.print(f"block {index}: held-out error {before:.5f} -> {after:.5f}")
        original = wanted


def _tune_model(arguments: argparse.Namespace, base: Any, model: Any, ids: Tensor) -> None:
    """All scales, on the logits."""
    for batch in _steps(arguments, [layer.change for layer in _tunable(model)], len(ids), BATCH_SIZE["model"]):
        with _bfloat16():
            with torch.no_grad():
                wanted = base(ids[batch]).logits
            logits = model(ids[batch]).logits
        wanted, logits = wanted.float().log_softmax(-1), logits.float().log_softmax(-1)
        loss = F.kl_div(logits, wanted, log_target=True, reduction="sum") / ids[batch].numel()
        loss.backward()
        console.print(f"KL {float(loss.detach()):.4f}")


if __name__ == "__main__":
    main()
