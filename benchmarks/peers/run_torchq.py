"""torchq itself, through the same door as its peers. Arguments: see ``peer.py``.

A recipe is the name of an algorithm, or of two, one after the other (``awq_gptq``), or ``gptq_recompute``: GPTQ in less memory.
"""

from __future__ import annotations

import argparse
from typing import Any

from peer import load_model, run

from torchq import QuantConfig, quantize_, save_pretrained

RECIPES = ("rtn", "gptq", "gptq_recompute", "auto", "awq", "awq_gptq", "smoothquant", "smoothquant_gptq")


def quantize(arguments: argparse.Namespace, loaded: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """Quantize all Linear layers but the output embedding."""
    model, tokenizer = loaded
    weight_only = arguments.activation_bits == 16
    config = QuantConfig(
        f"W{arguments.bits}A{arguments.activation_bits}",
        group_size=arguments.group_size if weight_only else None,
        symmetric=arguments.symmetric if weight_only else None,
        algorithm=arguments.recipe.removesuffix("_recompute").split("_"),
        recompute=True if arguments.recipe.endswith("_recompute") else None,
    )
    operations = _operations(arguments, model) if arguments.recipe != "rtn" else {}
    report = quantize_(model, config, calibration=_calibration(arguments), tokenizer=tokenizer, progress=False)
    return loaded, {"algorithm": report.algorithm, "timings": dict(report.timings or {}), "operations": operations}


def _operations(arguments: argparse.Namespace, model: Any) -> dict[str, float]:
    """Floating-point operations of the matrix products that the parts of a calibrated run cannot do without.

    Forward: the Linears, of all tokens and of those that run through the original weights, without attention. Hessian: half a
    product for each group of Linears, a whole one for drift. Solve: the factors of each Hessian (six at most), one for drift,
    the correction of drift, the errors of all columns, the refit of scales.
    """
    import torch

    from torchq import GPTQ
    from torchq.calibration.packing import Batch
    from torchq.calibration.stream import find_groups

    layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and not name.endswith("lm_head")}
    groups = find_groups(model, layers, Batch({"input_ids": torch.tensor([arguments.tokens[0][:8]])}, None))
    tokens = sum(map(len, arguments.tokens))
    drift = tokens * (GPTQ().drift_tokens * 15 / 16 + 1 / 16)  # and all held-out ones
    forward = sum(2.0 * layer.weight.numel() * (tokens + drift) for layer in layers.values())
    hessian = solve = 0.0
    for group in groups:
        k = layers[group.names[0]].in_features
        n = sum(layers[name].out_features for name in group.names)
        hessian += k * k * (tokens + 2 * drift)
        solve += 7 * k**3 / 3 + n * k * k * (2 + 1 + 4) + min(n, k) * k * k * 2
    return {"forward": forward, "hessian": hessian, "solve": solve}


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
