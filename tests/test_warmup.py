"""Every kind of layer runs once for each number of tokens."""

import pytest
import torch
from torch import nn

from torchq import QuantConfig, QuantLinear, quantize_, warmup
from torchq.testing import tiny_llama


def test_each_kind_of_layer_runs_once_for_each_count() -> None:
    model = tiny_llama()
    quantize_(model, QuantConfig("W4A16", group_size=32))
    seen: list[tuple[int, int, int]] = []
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            layer.register_forward_hook(lambda m, args, y: seen.append((m.in_features, m.out_features, args[0].shape[0])))
    sizes = {(m.in_features, m.out_features) for m in model.modules() if isinstance(m, QuantLinear)}
    assert warmup(model, [1, 7]) == 2 * len(sizes) == len(seen)
    assert set(seen) == {(*size, count) for size in sizes for count in (1, 7)}


def test_bad_requests() -> None:
    with pytest.raises(ValueError, match=r"token_counts must be positive, got \[1, 0\]"):
        warmup(nn.Linear(2, 2), [1, 0])
    with pytest.raises(ValueError, match="model has no QuantLinear: quantize it first"):
        warmup(nn.Linear(2, 2))
    assert torch.is_grad_enabled()
