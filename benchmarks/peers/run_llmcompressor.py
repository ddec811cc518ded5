"""llm-compressor: round-to-nearest, GPTQ, GPTQ with importance-weighted scales, AWQ, SmoothQuant before GPTQ.

Arguments: see ``peer.py``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from peer import load_model, run

RECIPES = ("rtn", "gptq", "gptq_imatrix_mse", "awq", "smoothquant_gptq")


def quantize(arguments: argparse.Namespace, loaded: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """Quantize all Linear layers but the output embedding."""
    model, _ = loaded
    options: dict[str, Any] = {}
    if arguments.recipe != "rtn":
        rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in arguments.tokens]
        options = {
            "dataset": Dataset.from_list(rows),
            "num_calibration_samples": len(rows),
            "max_seq_length": max(len(row) for row in arguments.tokens),
            "shuffle_calibration_samples": False,
        }
    oneshot(model=model, recipe=recipe_of(arguments), **options)
    return loaded, {}


def recipe_of(arguments: argparse.Namespace) -> list[Any]:
    """Return the modifiers of a recipe."""
    grouped = arguments.group_size > 0
    weights = QuantizationArgs(
        num_bits=arguments.bits,
        type="int",
        symmetric=arguments.symmetric,
        strategy="group" if grouped else "channel",
        group_size=arguments.group_size if grouped else None,
        **({"observer": "imatrix_mse"} if arguments.recipe == "gptq_imatrix_mse" else {}),
    )
    acts = None
    if arguments.activation_bits == 8:
        acts = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=acts)
    settings = {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    if arguments.recipe.startswith("gptq"):
        return [GPTQModifier(**settings)]
    if arguments.recipe == "smoothquant_gptq":
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

        return [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(**settings)]
    if arguments.recipe == "awq":
        from llmcompressor.modifiers.transform.awq import AWQModifier
        from llmcompressor.pipelines.cache import IntermediatesCache

        if not torch.accelerator.is_available():  # release 0.14 pins memory even so, which PyTorch refuses
            IntermediatesCache.pin_memory = lambda *_, **__: None
        return [AWQModifier(), QuantizationModifier(**settings)]
    return [QuantizationModifier(**settings)]


def save(arguments: argparse.Namespace, loaded: tuple[Any, Any]) -> None:
    """Write a compressed-tensors checkpoint."""
    model, tokenizer = loaded
    model.save_pretrained(arguments.output, save_compressed=True)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    run("llmcompressor", RECIPES, load_model, quantize, save)
