"""What a short quantization-aware training is worth: KL to the 16-bit model before and after, from nearest rounding and GPTQ.

The student learns the 16-bit model's logits (KL, all tokens of each sequence), in float32 with
``torch.autocast`` in bfloat16. It is packed by ``convert_qat_`` and evaluated packed, in float32, on other texts::

    python benchmarks/bench_qat.py --bits 3 --save
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
from bench_quantize import add_options, evaluate, prepare
from common import console, print_table, save_results
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from torchq import GPTQ, QuantConfig, convert_qat_, quantize_
from torchq.calibration.data import CalibrationData

LOGGED_STEPS = 10  # between lines of the log


def main() -> None:
    """Quantize by nearest rounding, by GPTQ and by training; evaluate each, and print one table."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows, windows = prepare(arguments, Path(temporary))
        base = _load(folder)
        models: dict[str, nn.Module] = {}
        results: dict[str, dict[str, Any]] = {}
        for way, (make, qat) in WAYS.items():
            if way in arguments.ways:
                started = time.perf_counter()
                models[way] = make(arguments, folder, rows, qat=qat)
                losses = _train(arguments, base, models[way], rows) if qat else []
                results[way] = {"seconds": time.perf_counter() - started, "losses": losses, "quality": {}}
                console.print(f"{way}: {results[way]['seconds']:.0f} s")
        for text, ids in windows.items():
            for way, quality in evaluate(base, models, ids).items():
                results[way]["quality"][text] = asdict(quality)
    table = []
    for way, result in results.items():
        cells = [f"{q['mean_kl']:.4f} ± {q['mean_kl_standard_error']:.4f}" for q in result["quality"].values()]
        flips = [f"{q['flip_rate']:.1%}" for q in result["quality"].values()]
        table.append([way, f"{result['seconds']:.0f}", *(cell for pair in zip(cells, flips, strict=True) for cell in pair)])
    columns = ["", "s", *(column for text in windows for column in (f"KL, {text}", "flips"))]
    print_table(f"{folder.name}, W{arguments.bits}A16, groups of {arguments.group_size}", columns, table)
    if arguments.save:
        names = ("bits", "group_size", "symmetric", "threads", "samples", "length", "evaluation_tokens")
        settings = {name: getattr(arguments, name) for name in (*names, "steps", "batch", "rate", "scale_rate")}
        name = f"qat_w{arguments.bits}_g{arguments.group_size}" + ("" if arguments.symmetric else "_asym")
        save_results(name, {"model": folder.name} | settings | {"results": results})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(bits=3, samples=100, length=256)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--symmetric", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=2, help="sequences per step")
    parser.add_argument("--rate", type=float, default=1e-4, help="AdamW's first learning rate, of weights; falls to 0")
    parser.add_argument("--scale-rate", type=float, default=1e-3, help="the same of the logarithms of scales")
    return parser.parse_args()


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _config(arguments: argparse.Namespace, algorithm: Any) -> QuantConfig:
    scheme = f"W{arguments.bits}A16"
    return QuantConfig(scheme, group_size=arguments.group_size, symmetric=arguments.symmetric, algorithm=algorithm)


def _rtn(arguments: argparse.Namespace, folder: Path, rows: list[list[int]], *, qat: bool = False) -> Any:
    model = _load(folder)
    quantize_(model, _config(arguments, "rtn"), qat=qat, progress=False)
    return model


def _gptq(arguments: argparse.Namespace, folder: Path, rows: list[list[int]], *, qat: bool = False) -> Any:
    model = _load(folder)
    data = CalibrationData(rows, num_samples=len(rows), max_length=arguments.length)
    quantize_(model, _config(arguments, GPTQ()), calibration=data, qat=qat, progress=False)
    return model


WAYS = {"rtn": (_rtn, False), "rtn, qat": (_rtn, True), "gptq": (_gptq, False), "gptq, qat": (_gptq, True)}


def _train(arguments: argparse.Namespace, base: nn.Module, model: nn.Module, rows: list[list[int]]) -> list[float]:
    """Train a fake-quantized model and pack it; return the loss of each step."""
    scales = [parameter for name, parameter in model.named_parameters() if name.endswith("weight_scale_log2")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("weight_scale_log2")]
    groups = [{"params": others, "lr": arguments.rate}, {"params": scales, "lr": arguments.scale_rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / arguments.steps)
    losses: list[float] = []
    for batch in _batches(torch.tensor(rows), arguments.batch, arguments.steps):
        loss = _divergence(base, model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        losses.append(float(loss.detach()))
        if len(losses) % LOGGED_STEPS == 0:
            console.print(f"step {len(losses)}: KL {sum(losses[-LOGGED_STEPS:]) / LOGGED_STEPS:.4f}")
    convert_qat_(model, progress=False)
    return losses


def _batches(ids: Tensor, size: int, steps: int) -> Iterator[Tensor]:
    """Yield sequences [size, T] in a random order, epoch after epoch."""
    generator = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(ids), generator=generator).split(size):
            if steps == 0:
                return
            yield ids[rows]
            steps -= 1


def _divergence(base: nn.Module, model: nn.Module, ids: Tensor) -> Tensor:
    """KL(base || model), nats per token."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = base(ids).logits
        logits = model(ids).logits
    wanted, logits = wanted.float().log_softmax(-1), logits.float().log_softmax(-1)
    return F.kl_div(logits.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean")


if __name__ == "__main__":
    main()
