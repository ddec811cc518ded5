"""What each part of calibrated quantization is worth: the default recipe, and the same with one part changed.

One model, one set of calibration tokens, the same evaluation tokens of other texts for all, as in ``bench_quantize.py``::

    python benchmarks/bench_ablation.py --save

Seconds are of quantizing, one recipe after the other in one process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_quantize import Quality, add_options, evaluate, load_float32, prepare
from common import console, machine, print_table, save_results
from transformers import AutoModelForCausalLM

from torchq import GPTQ, RTN, QuantConfig, quantize_, save_pretrained
from torchq.algorithms import gptq
from torchq.calibration.data import CalibrationData
from torchq.calibration.statistics import InputStatistics


@dataclass(frozen=True)
class Recipe:
    """One row: what differs from the default, and how."""

    name: str
    algorithm: GPTQ | RTN
    propagate: str = "true_sequential"
    symmetric: bool = True
    calibrated: bool = True
    change: Callable[[], AbstractContextManager[Any]] = nullcontext


def constant(name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Another value for one of GPTQ's constants."""
    return lambda: mock.patch.object(gptq, name, value)


def unweighted() -> AbstractContextManager[Any]:
    """Scale searches that don't look at the inputs."""
    return mock.patch.object(InputStatistics, "mean_square", None)


RECIPES = (
    Recipe("default", GPTQ()),
    Recipe("scales: absmax", GPTQ(scale_search="absmax")),
    Recipe("scales: least error, not weighted by inputs", GPTQ(), change=unweighted),
    Recipe("scales: positive only", GPTQ(), change=constant("signed_scales", lambda scheme: False)),
    Recipe("asymmetric (4.31 bits, not 4.25)", GPTQ(), symmetric=False),
    Recipe("columns in their own order", GPTQ(actorder=None)),
    Recipe("damping 0.01", GPTQ(dampening_frac=0.01)),
    Recipe("damping of least held-out error", GPTQ(), change=constant("_TOLERANCE", 1.0)),
    Recipe("no refit of scales", GPTQ(refit=False)),
    Recipe("2 sweeps of coordinate descent", GPTQ(refine=2)),
    Recipe("no correction of drift", GPTQ(drift_tokens=0)),
    Recipe("drift of all tokens", GPTQ(drift_tokens=1)),
    Recipe("inputs of the 16-bit model", GPTQ(), propagate="float"),
    Recipe("nearest rounding, weighted scales", RTN()),
    Recipe("nearest rounding without data", RTN(), calibrated=False),
)


def main() -> None:
    """Quantize with every recipe, evaluate, and print one table."""
    arguments = _parse()
    recipes = [recipe for recipe in RECIPES if not arguments.only or any(part in recipe.name for part in arguments.only)]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder, rows, windows = prepare(arguments, work)
        seconds = {recipe.name: _quantize(arguments, recipe, folder, rows, work / recipe.name) for recipe in recipes}
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        models = {recipe.name: load_float32(work / recipe.name) for recipe in recipes}
        quality = {text: evaluate(base, models, ids) for text, ids in windows.items()}
    table = []
    for recipe in recipes:
        cells = [_cell(quality[text][recipe.name]) for text in quality]
        table.append([recipe.name, f"{seconds[recipe.name]:.0f}", *(cell for pair in cells for cell in pair)])
    columns = ["recipe", "s", *(column for text in quality for column in (f"KL, {text}", "flips"))]
    data = f"{arguments.samples} x {arguments.length} tokens, {arguments.threads} threads of {machine()['processor']}"
    print_table(f"{folder.name}, W{arguments.bits}A16, groups of {arguments.group_size}, {data}", columns, table)
    if arguments.save:
        results = {}
        for recipe in recipes:
            figures = {text: asdict(quality[text][recipe.name]) for text in quality}
            results[recipe.name] = {"seconds": seconds[recipe.name], "quality": figures}
        names = ("bits", "group_size", "dtype", "threads", "samples", "length")
        save_results("ablation", {"model": folder.name} | {n: getattr(arguments, n) for n in names} | {"results": results})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--only", nargs="+", help="parts of the names of recipes to run; all by default")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    return arguments


def _quantize(arguments: argparse.Namespace, recipe: Recipe, folder: Path, rows: list[list[int]], output: Path) -> float:
    """Quantize with one recipe into a checkpoint; return the seconds."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=arguments.dtype).eval()
    config = QuantConfig(
        f"W{arguments.bits}A16",
        group_size=arguments.group_size,
        symmetric=recipe.symmetric,
        algorithm=recipe.algorithm,
        propagate=recipe.propagate,
    )
    data = CalibrationData(rows, num_samples=len(rows), max_length=arguments.length) if recipe.calibrated else None
    started = time.perf_counter()
    with recipe.change():
        quantize_(model, config, calibration=data, progress=False)
    seconds = time.perf_counter() - started
    console.print(f"{recipe.name}: {seconds:.0f} s")
    save_pretrained(model, output)
    return seconds


def _cell(quality: Quality) -> tuple[str, str]:
    return f"{quality.mean_kl:.4f} ± {quality.mean_kl_standard_error:.4f}", f"{quality.flip_rate:.1%}"


if __name__ == "__main__":
    main()
