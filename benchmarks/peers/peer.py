"""What the peer scripts share: arguments, tokens, timing, and the JSON line they print.

Each script runs in the venv of its tool, so this file imports nothing but torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def run(
    package: str,
    recipes: Sequence[str],
    load: Callable[[argparse.Namespace], Any],
    quantize: Callable[[argparse.Namespace, Any], tuple[Any, dict[str, Any]]],
    save: Callable[[argparse.Namespace, Any], None],
) -> None:
    """Load, quantize and save as the command line asks, and print what it took as one line of JSON.

    Args:
        package: Distribution whose version goes into the line.
        recipes: Recipes that the tool knows.
        load: The arguments -> whatever ``quantize`` needs.
        quantize: The arguments and that -> what ``save`` needs, and further entries of the line.
        save: Writes the checkpoint into the folder ``arguments.output``.
    """
    arguments = parse(recipes)
    torch.set_num_threads(arguments.threads)
    loaded = load(arguments)
    loaded_bytes = peak_rss_bytes()
    started = time.perf_counter()
    quantized, details = quantize(arguments, loaded)
    quantize_seconds = time.perf_counter() - started
    peak_bytes = peak_rss_bytes()
    started = time.perf_counter()
    save(arguments, quantized)
    line = {
        "package": package,
        "version": importlib.metadata.version(package),
        "recipe": arguments.recipe,
        "quantize_seconds": quantize_seconds,
        "save_seconds": time.perf_counter() - started,
        "load_peak_rss_bytes": loaded_bytes,
        "quantize_peak_rss_bytes": peak_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    print("\n" + json.dumps(line | details), flush=True)


def parse(recipes: Sequence[str]) -> argparse.Namespace:
    """Return the arguments, with ``tokens`` read: lists of token ids."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="folder of a transformers model with its tokenizer")
    parser.add_argument("tokens", type=_read_tokens, help="JSON file: a list of lists of token ids to calibrate with")
    parser.add_argument("output", type=Path, help="folder to write the checkpoint to")
    parser.add_argument("--recipe", choices=list(recipes), default=recipes[0])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128, help="-1 for one scale per row")
    parser.add_argument("--activation-bits", type=int, default=16, choices=(8, 16), help="8: int8, a scale per token")
    parser.add_argument("--symmetric", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", default="auto", help="dtype to load the model in: auto, bfloat16, float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def load_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model and the tokenizer with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    return model.eval(), AutoTokenizer.from_pretrained(arguments.model)


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far, 0 where ``/proc`` does not say."""
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def _read_tokens(path: str) -> list[list[int]]:
    rows: list[list[int]] = json.loads(Path(path).read_text())
    return rows
