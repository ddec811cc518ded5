"""Names and loading of a QuantLinear whose weight another layout has replaced."""

from unittest import mock

import pytest
import torch
from torch import nn

from torchq import QuantConfig, QuantLinear, quantize_
from torchq.kernels import wna16_cpu


def native_layer() -> tuple[QuantLinear, dict[str, torch.Tensor]]:
    if not wna16_cpu.is_available():
        pytest.skip("this PyTorch has no 4-bit product for CPUs, so nothing replaces the checkpoint's tensors")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16))
    quantize_(model, QuantConfig("W4A16_ASYM", group_size=32))
    layer = model[0]
    assert isinstance(layer, QuantLinear) and layer.is_native
    return layer, {name: tensor.clone() for name, tensor in layer.state_dict().items()}


def test_checkpoint_tensors_are_attributes_in_any_layout() -> None:
    layer, state = native_layer()
    assert {"weight_packed", "weight_scale", "weight_zero_point"} <= state.keys()
    for name, expected in state.items():
        assert torch.equal(getattr(layer, name), expected)
    for name in ("weight_nothing", "weight_g_idx"):
        with pytest.raises(AttributeError, match=name):
            getattr(layer, name)


def test_a_state_dict_without_the_weight_leaves_the_layout_alone() -> None:
    layer, state = native_layer()
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    before = layer(x)
    with mock.patch.object(QuantLinear, "unpack_native_", side_effect=AssertionError):
        result = layer.load_state_dict({"bias": state["bias"] + 1, "other": state["bias"]}, strict=False)
    assert result.missing_keys and set(result.missing_keys) == state.keys() - {"bias"}
    assert result.unexpected_keys == ["other"]
    assert torch.allclose(layer(x), before + 1, atol=0.05)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_packed"):
        layer.load_state_dict({"bias": state["bias"]})
    layer.load_state_dict(state)
    assert torch.equal(layer(x), before) and layer.is_native
