"""AutoRound: its light recipe (50 steps) and its default one (200). Arguments: see ``peer.py``."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from auto_round import AutoRound
from peer import load_model, run

RECIPES = {"light": {"iters": 50, "lr": 5e-3}, "default": {"iters": 200}}
BATCH_SIZE = 8


def quantize(arguments: argparse.Namespace, loaded: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
    """Quantize all Linear layers but the output embedding."""
    model, tokenizer = loaded
    tokens = torch.tensor(arguments.tokens)
    rounding = AutoRound(
        model,
        tokenizer,
        scheme=f"W{arguments.bits}A16",
        group_size=arguments.group_size,
        sym=arguments.symmetric,
        dataset=list(tokens.split(BATCH_SIZE)),
        nsamples=tokens.shape[0],
        seqlen=tokens.shape[1],
        batch_size=BATCH_SIZE,
        device_map="cpu",
        **RECIPES[arguments.recipe],
    )
    rounding.quantize()
    return rounding, {}


def save(arguments: argparse.Namespace, rounding: Any) -> None:
    """Write a compressed-tensors checkpoint."""
    rounding.save_quantized(str(arguments.output), format="llm_compressor")


if __name__ == "__main__":
    run("auto-round", list(RECIPES), load_model, quantize, save)
