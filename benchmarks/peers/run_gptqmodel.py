"""GPTQModel: GPTQ as it comes, and with its scale search. Arguments: see ``peer.py``; ``gptq_format.py`` reads the result."""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its own choice, one on two cores, fails in release 7.7

from gptqmodel import GPTQModel, QuantizeConfig
from peer import run

RECIPES = {"gptq": {}, "gptq_mse": {"mse": 2.4}}


def load(arguments: argparse.Namespace) -> Any:
    """Load the model with GPTQModel, which takes its settings there."""
    settings = QuantizeConfig(
        bits=arguments.bits, group_size=arguments.group_size, sym=arguments.symmetric, **RECIPES[arguments.recipe]
    )
    return GPTQModel.load(str(arguments.model), settings, device="cpu", dtype=arguments.dtype)


def quantize(arguments: argparse.Namespace, model: Any) -> tuple[Any, dict[str, Any]]:
    """Quantize all Linear layers but the output embedding."""
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in arguments.tokens], batch_size=1)
    return model, {}


def save(arguments: argparse.Namespace, model: Any) -> None:
    """Write a checkpoint in the GPTQ format."""
    model.save(str(arguments.output))


if __name__ == "__main__":
    run("gptqmodel", list(RECIPES), load, quantize, save)
