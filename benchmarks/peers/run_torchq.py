"""torchq itself, through the same door as its peers: a recipe is the name of an algorithm. Arguments: see ``peer.py``."""

from __future__ import annotations

import argparse
from typing import Any

from peer import load_model, run

from torchq import QuantConfig, quantize_, save_pretrained

RECIPES = ("rtn", "gptq", "awq", "auto")


def quantize(arguments: argparse.Namespace, loaded: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """Quantize all Linear layers but the output embedding."""
    model, tokenizer = loaded
    config = QuantConfig(
        f"W{arguments.bits}A16",
        group_size=arguments.group_size,
        symmetric=arguments.symmetric,
        algorithm=arguments.recipe,
    )
    report = quantize_(model, config, calibration=_calibration(arguments), tokenizer=tokenizer, progress=False)
    return loaded, {"algorithm": report.algorithm, "timings": dict(getattr(report, "timings", None) or {})}


def _calibration(arguments: argparse.Namespace) -> Any:
    if arguments.recipe == "rtn":
        return None
    from torchq.calibration.data import CalibrationData

    longest = max(len(row) for row in arguments.tokens)
    return CalibrationData(arguments.tokens, num_samples=len(arguments.tokens), max_length=longest)


def save(arguments: argparse.Namespace, loaded: tuple[Any, Any]) -> None:
    """Write a compressed-tensors checkpoint."""
    model, tokenizer = loaded
    save_pretrained(model, arguments.output, tokenizer=tokenizer)


if __name__ == "__main__":
    run("torchq-llm", RECIPES, load_model, quantize, save)
