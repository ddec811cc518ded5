"""Compile what a model's kernels need before the first request, or before a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchq.linear import QuantLinear


@torch.no_grad()
def warmup(model: nn.Module, token_counts: Iterable[int] = (1, 8, 9, 16, 17, 32, 33, 128, 512)) -> int:
    """Run each kind of packed layer once for each number of tokens; return how many runs that were.

    Triton compiles a kernel when it is first launched, which takes its time and must not happen while a CUDA graph is
    captured. Layers that differ in neither sizes, scheme, bias, dtype nor device share their kernels and run once.

    Args:
        model: A model with :class:`QuantLinear` layers, on the device where it will run.
        token_counts: Numbers of tokens (batch times sequence) that the model will see; the defaults are the ends of
            every tile's range in the dispatch table, and one above all of them.

    Raises:
        ValueError: If the model has no packed layer, or a count is not positive.
    """
    counts = list(token_counts)
    if any(count < 1 for count in counts):
        raise ValueError(f"token_counts must be positive, got {counts}")
    kinds: dict[Any, QuantLinear] = {}
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            device = next(buffer.device for buffer in layer.buffers())
            sizes = (layer.in_features, layer.out_features, layer.bias is None)
            kinds.setdefault((*sizes, layer.scheme, layer.compute_dtype, layer.scale_dtype, device), layer)
    if not kinds:
        raise ValueError("model has no QuantLinear: quantize it first, or load a quantized checkpoint with load_pretrained")
    for layer in kinds.values():
        device = next(buffer.device for buffer in layer.buffers())
        for count in counts:
            layer(torch.zeros(count, layer.in_features, dtype=layer.compute_dtype, device=device))
            if layer.siblings is not None:
                layer.siblings.clear()
    return len(kinds) * len(counts)
