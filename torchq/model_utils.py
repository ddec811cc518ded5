"""Small questions and changes to a model that several parts need."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor, nn

from torchq.matching import is_conv1d

_LISTED_NAMES = 3  # names an error message spells out before it counts the rest


def weight_of(module: nn.Module) -> Tensor:
    """Return a Linear-like module's weight as it is stored ([N, K], or [K, N] in a Conv1D)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Return (out_features, in_features) of a Linear-like module."""
    rows, columns = weight_of(module).shape
    return (columns, rows) if is_conv1d(module) else (rows, columns)


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` where ``name`` is."""
    parent_name, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent_name), attribute, module)


def quantization_method(model: nn.Module) -> str | None:
    """Return ``quant_method`` of the model's config (an object or a dict), or None."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def cache_argument(model: nn.Module) -> str:
    """Return what the model's ``forward`` and ``generate`` call their KV cache; transformers is renaming it.

    ``"cache"`` where there is one; else the older ``"past_key_values"``, which all supported releases take.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def strip_quantization_config(model: nn.Module) -> None:
    """Remove every trace of another quantization from a (dequantized) model and its config."""
    model_config = getattr(model, "config", None)
    if hasattr(model_config, "quantization_config"):
        delattr(model_config, "quantization_config")
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in model.__dict__:
            delattr(model, name)
    flag_configs(model, False)


def flag_configs(model: nn.Module, packed: bool) -> None:
    """Tell transformers' attention where to find a dtype: in the config if ``packed``, else in the first nn.Linear it finds."""
    for module in model.modules():
        model_config: Any = getattr(module, "config", None)
        if hasattr(model_config, "model_type"):
            model_config.__dict__.pop("_is_quantized", None)
            if packed:
                model_config._is_quantized = True


def collapse(names: list[str]) -> list[str]:
    """Write names that differ in their first number as one: ``model.layers.{0-29}.mlp.up_proj``."""
    numbers: dict[tuple[str, str], list[int]] = {}
    result: dict[tuple[str, str], str] = {}
    for name in names:
        match = re.search(r"(?<=\.)\d+(?=\.|$)", name)
        key = (name[: match.start()], name[match.end() :]) if match else (name, "")
        if match:
            numbers.setdefault(key, []).append(int(match[0]))
        result[key] = name
    for (before, after), values in numbers.items():
        if len(values) > 1:
            runs: list[list[int]] = []
            for value in sorted(values):
                if runs and value == runs[-1][-1] + 1:
                    runs[-1].append(value)
                else:
                    runs.append([value])
            spans = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
            result[before, after] = f"{before}{{{spans}}}{after}"
    return list(result.values())


def list_names(names: list[str]) -> str:
    """Spell out the first few names and count the rest."""
    shown = ", ".join(names[:_LISTED_NAMES])
    return shown + (f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else "")
