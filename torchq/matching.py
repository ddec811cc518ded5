"""Which modules a config means: class names, exact names, and ``re:`` patterns, as in compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn


def class_names(module: nn.Module) -> set[str]:
    """Names a module answers to as a class: those of its MRO, and ``Linear`` for transformers' ``Conv1D``."""
    names = {base.__name__ for base in type(module).__mro__} - {"object", "Module"}
    return names | {"Linear"} if is_conv1d(module) else names


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D (GPT-2): a Linear with a transposed weight, [K, N]."""
    return any(base.__name__ == "Conv1D" and base.__module__ == "transformers.pytorch_utils" for base in type(module).__mro__)


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether ``pattern`` means this module: ``re:`` (from the start of the name), the exact name, or a class name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or pattern in class_names(module)


def first_match(patterns: Iterable[str], name: str, module: nn.Module) -> str | None:
    """Return the first pattern that means this module, or None."""
    return next((pattern for pattern in patterns if matches(pattern, name, module)), None)
