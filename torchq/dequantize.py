"""dequantize_: packed layers back to ordinary ones."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from torchq.kv_scales import drop_kv_scales_
from torchq.linear import HOOKS, QuantLinear
from torchq.model_utils import set_module, strip_quantization_config

Model = TypeVar("Model", bound=nn.Module)


def dequantize_(model: Model, dtype: torch.dtype | None = None) -> Model:
    """Replace every :class:`~torchq.linear.QuantLinear` of a model by an ordinary layer, in place.

    One layer at a time becomes an ``nn.Linear`` (transformers' ``Conv1D`` where it was one) with the dequantized weight, frozen
    as packed weights are (``requires_grad_()`` to train it), and with the layer's bias (the same Parameter, if that is of
    ``dtype`` too), hooks and training mode. A layer with several names stays one. What said that the model is quantized goes:
    ``quant_report``, the config's ``quantization_config`` and flags, static scales of the key-value cache (which
    :func:`torchq.kv_scales.kv_scales` returns before): plain checkpoints have no place for them. Embeddings that quantizing
    untied stay so.

    Args:
        model: A model with packed layers; also one whose adapters hold them.
        dtype: dtype of the weights; each layer's ``compute_dtype`` by default.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no packed layer, or is one itself.
    """
    layers = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, QuantLinear)}
    if not layers:
        raise ValueError("model has no QuantLinear: there is nothing to dequantize")
    if "" in layers:
        raise ValueError("model is a single QuantLinear, which cannot be replaced in place; use its dequantize(), or to_linear()")
    plain: dict[int, nn.Module] = {}
    for name, layer in layers.items():
        if id(layer) not in plain:
            plain[id(layer)] = to_linear(layer, dtype)
            if layer.siblings is not None:
                layer.siblings.part()
        set_module(model, name, plain[id(layer)])
    drop_kv_scales_(model)
    for module in model.modules():
        if module is model or "quant_report" in module.__dict__:  # also the model inside of PEFT's
            strip_quantization_config(module)
            module.__dict__.pop("quant_report", None)
    return model


def to_linear(layer: QuantLinear, dtype: torch.dtype | None = None) -> nn.Module:
    """Return an ordinary Linear (transformers' Conv1D where it replaced one) with the weight that a QuantLinear stands for.

    Args:
        layer: The layer, which stays as it is; hooks are shared, and the bias if that is of ``dtype`` too.
        dtype: dtype of the weight; the layer's ``compute_dtype`` by default.
    """
    weight = layer.dequantize(dtype or layer.compute_dtype)
    if layer.transposed:
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            linear: nn.Module = Conv1D(layer.out_features, layer.in_features)
        weight = weight.t().contiguous()
    else:
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    bias = layer.bias
    if bias is not None and bias.dtype != weight.dtype:
        bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=bias.requires_grad)
    linear.register_parameter("bias", bias)
    for name in HOOKS:
        linear.__dict__[name] = layer.__dict__[name]
    return linear.train(layer.training)
