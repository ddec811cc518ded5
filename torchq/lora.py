"""Low-rank adapters on a packed weight: the product, its gradients, and merging by requantization. Plain tensors; no PEFT.

Shapes: M tokens, N out_features, K in_features, r rank. An adapter adds ``scaling * B @ A`` to a weight W [N, K], with A [r, K]
and B [N, r] (LoRA, arXiv 2106.09685, equation 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchq import numerics
from torchq.algorithms.rtn import quantize_weight
from torchq.kernels import fp8
from torchq.linear import QuantizedWeight, QuantLinear, own
from torchq.scheme import Scheme

Requantize = Literal["dithered", "same_grid", "new_scales"]
DITHER_STEPS = 1 << 13  # a code of up to 8 bits and a threshold of as many steps add up exactly in float32


class Adapter(NamedTuple):
    """One adapter: ``A`` [r, K] and ``B`` [N, r], floating point, and the factor of their product."""

    A: Tensor
    B: Tensor
    scaling: float


def lora_linear(layer: QuantLinear, x: Tensor, adapters: Sequence[Adapter], adapter_x: Tensor | None = None) -> Tensor:
    """Return ``layer(x) + sum(scaling * (x @ A.T) @ B.T)``, with one copy of x kept for the backward pass.

    Everything is computed in x's dtype (autocast's under autocast), whatever the dtype of A and B is: so it is under autocast.

    Args:
        layer: The packed layer; frozen, except for its bias.
        x: [..., K].
        adapters: At least one.
        adapter_x: [..., K], what the adapters see in place of x: x after dropout. None: x.

    Returns:
        [..., N] of x's dtype.
    """
    x, bias = layer.cast_inputs(x)
    if adapter_x is not None:
        adapter_x = adapter_x.to(x.dtype)
    kernel, tensors = layer._kernel()
    scalings = tuple(adapter.scaling for adapter in adapters)
    factors = [factor for adapter in adapters for factor in (adapter.A, adapter.B)]
    return _LoraLinear.apply(x, adapter_x, bias, kernel, scalings, *tensors, *factors)  # type: ignore[no-untyped-call]


class _LoraLinear(torch.autograd.Function):
    """Keeps the packed weight, x, A, B and x @ A.T: nothing as wide as the output, and no 32-bit copy of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adapter_x: Tensor | None, bias: Tensor | None, kernel: Any, scalings: tuple[float, ...], *rest: Any
    ) -> Tensor:
        split = len(rest) - 2 * len(scalings)
        tensors, factors = rest[:split], rest[split:]
        y = own(kernel(x, tensors, bias))
        rows, seen = y.view(-1, y.shape[-1]), x if adapter_x is None else adapter_x
        tokens = seen.reshape(-1, seen.shape[-1])
        hidden = []
        for a, b, scaling in zip(factors[::2], factors[1::2], scalings, strict=True):
            hidden.append(F.linear(tokens, a.to(x.dtype)))
            rows.addmm_(hidden[-1], b.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(seen, *tensors, *factors, *hidden)
        ctx.kernel, ctx.scalings, ctx.split, ctx.shares_x = kernel, scalings, split, adapter_x is None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kernel, scalings, count = ctx.kernel, ctx.scalings, len(ctx.scalings)
        seen, *saved = ctx.saved_tensors
        tensors, factors, hidden = saved[: ctx.split], saved[ctx.split : -count], saved[-count:]
        needs_x, needs_adapter_x, needs_bias = ctx.needs_input_grad[:3]
        needs_factors = ctx.needs_input_grad[-2 * count :]
        grad_x = kernel.input_grad(grad_y, *tensors, *kernel.settings) if needs_x else None
        grad_seen = grad_x if ctx.shares_x else torch.zeros_like(seen) if needs_adapter_x else None
        grads, tokens = grad_y.reshape(-1, grad_y.shape[-1]), seen.reshape(-1, seen.shape[-1])
        grad_factors: list[Tensor | None] = []
        for i, (a, b, scaling) in enumerate(zip(factors[::2], factors[1::2], scalings, strict=True)):
            grad_hidden = (grads @ b.to(grads.dtype)).mul_(scaling)
            grad_factors.append((grad_hidden.t() @ tokens).to(a.dtype) if needs_factors[2 * i] else None)
            grad_factors.append((grads.t() @ hidden[i]).mul_(scaling).to(b.dtype) if needs_factors[2 * i + 1] else None)
            if grad_seen is not None:
                grad_seen.view(tokens.shape).addmm_(grad_hidden, a.to(grads.dtype))
        grad_bias = grads.sum(0) if needs_bias else None
        none = (None,) * (2 + ctx.split)
        return grad_x, None if ctx.shares_x else grad_seen, grad_bias, *none, *grad_factors


# ------------------------------------------------------------------------------------------------------------------- merging


def delta_weight(adapters: Sequence[Adapter]) -> Tensor:
    """Return what adapters add to a weight, [N, K] float32."""
    first, *others = adapters
    delta = (first.B.float() @ first.A.float()).mul_(first.scaling)
    for adapter in others:
        delta.addmm_(adapter.B.float(), adapter.A.float(), alpha=adapter.scaling)
    return delta


@torch.no_grad()
def requantize(layer: QuantLinear, delta: Tensor, how: Requantize) -> QuantLinear:
    """Return a layer like ``layer`` whose weight is changed by ``delta`` and quantized by the same scheme.

    Changes by adapters are far smaller than the steps of a 4-bit grid, and the weight lies in the middle of them: rounded to the
    nearest, the sum is mostly the weight again. Dithered, each value is rounded up or down at a threshold of its own, spread
    evenly over the step: the share of weights that move by a step is the size of the change, which so survives on average.

    Args:
        layer: What it is like: scheme, dtypes, bias (the same Parameter), static activation scales.
        delta: [N, K] float32, finite.
        how: ``"dithered"``: to the layer's own scales and zero points, with :func:`dither` (integer weights). ``"same_grid"``: to
            the nearest on them. ``"new_scales"``: to the nearest, with scales searched anew (:class:`torchq.RTN`).

    Raises:
        ValueError: If ``how`` is unknown, or does not suit the scheme, or ``delta`` is not finite.
    """
    check_requantize(how, layer.scheme)
    if not torch.isfinite(delta).all():
        raise ValueError("the merged weight holds NaN or inf: the adapter is broken (did the training diverge?)")
    if how == "new_scales":
        weight = layer.dequantize(torch.float32).add_(delta)
        quantized, _ = quantize_weight(weight, layer.scheme, scale_dtype=layer.scale_dtype)
    else:
        quantized = QuantizedWeight(*_on_grid(layer, delta, how == "dithered"), layer.scheme)
    static = layer._buffers.get("input_scale"), layer._buffers.get("input_zero_point")
    quantized = replace(quantized, input_scale=static[0], input_zero_point=static[1])
    merged = QuantLinear.from_linear(layer, quantized)
    merged.compute_dtype, merged.transposed = layer.compute_dtype, layer.transposed
    return merged


def check_requantize(how: str, scheme: Scheme) -> None:
    """Raise ValueError unless weights of ``scheme`` can be requantized in this way."""
    if how not in get_args(Requantize):
        raise ValueError(f"requantize must be one of {', '.join(map(repr, get_args(Requantize)))}, got {how!r}")
    if how == "dithered" and scheme.weights.type != "int":
        raise ValueError(f"requantize='dithered' is for integer weights, got scheme {scheme.name}; use 'new_scales'")
    if how == "same_grid" and scheme.weights.type not in ("int", "float"):
        raise ValueError(f"requantize='same_grid' is not possible for scheme {scheme.name}, whose grid follows its values")


def dither(n: int, k: int, device: torch.device) -> Tensor:
    """Return [N, K] int16, odd numbers of ``DITHER_STEPS``: frac(row sqrt(2) + column golden ratio), rounded.

    They are spread evenly along rows and along columns, and the same on every device.
    """
    half = DITHER_STEPS // 2
    rows = (torch.arange(n, dtype=torch.float64) * math.sqrt(2) % 1 * half).to(torch.int16) * 2
    columns = (torch.arange(k, dtype=torch.float64) * ((math.sqrt(5) - 1) / 2) % 1 * half).to(torch.int16) * 2 + 1
    return (rows.to(device).unsqueeze(1) + columns.to(device)).bitwise_and_(DITHER_STEPS - 1)


def _on_grid(layer: QuantLinear, delta: Tensor, dithered: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(Codes [N, K], scales, zero points or None) of a layer's weight changed by ``delta`` [N, K] float32, on its own grid."""
    q, scale, zero_point = layer.quantized_tensors()
    args, (n, k) = layer.scheme.weights, q.shape
    if args.type == "float":
        weight = numerics.dequantize(q, scale, zero_point, args).float().add_(delta)
        return numerics.quantize(weight, scale.float(), zero_point, args), scale, zero_point
    steps = numerics.to_groups(delta, args)
    steps = numerics.from_groups(steps / scale.float().reshape(*steps.shape[:2], 1), args, (n, k)).add_(q)
    codes = steps.add_(dither(n, k, q.device), alpha=1 / DITHER_STEPS).floor_() if dithered else steps.round_()
    return codes.clamp_(args.quant_min, args.quant_max).to(torch.int8), scale, zero_point


def merged_linear(layer: QuantLinear, x: Tensor, adapters: Sequence[Adapter]) -> Tensor:
    """Return what ``layer`` returns once adapters are merged into it, dithered, with gradients for the adapters.

    The forward pass multiplies by ``Q(W + sum(scaling * B @ A))``, Q as :func:`requantize` with ``"dithered"``; the backward
    pass takes Q for the identity (the straight-through estimator, arXiv 1308.3432). The quantized sum is computed in each pass
    and not kept.

    Args:
        layer: The packed layer; frozen, except for its bias.
        x: [..., K].
        adapters: At least one.

    Returns:
        [..., N] of x's dtype.
    """
    x, bias = layer.cast_inputs(x)
    scalings = tuple(adapter.scaling for adapter in adapters)
    factors = [factor for adapter in adapters for factor in (adapter.A, adapter.B)]
    return _MergedLinear.apply(x, bias, layer, scalings, *factors)  # type: ignore[no-untyped-call]


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, layer: QuantLinear, scalings: tuple[float, ...], *factors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *factors)
        ctx.layer, ctx.scalings = layer, scalings
        return own(_product(layer, x, _merged_codes(layer, scalings, factors), bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, *factors = ctx.saved_tensors
        needs_x, needs_bias = ctx.needs_input_grad[:2]
        grads, tokens = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = None
        if needs_x:
            q, scale, zero_point = _merged_codes(ctx.layer, ctx.scalings, factors)
            weight = numerics.dequantize(q, scale, zero_point, ctx.layer.scheme.weights, grads.dtype)
            grad_x = (grads @ weight).view(x.shape)
        grad_factors = []
        for a, b, scaling in zip(factors[::2], factors[1::2], ctx.scalings, strict=True):
            grad_hidden = (grads @ b.to(grads.dtype)).mul_(scaling)
            grad_factors += [(grad_hidden.t() @ tokens).to(a.dtype)]
            grad_factors += [(grads.t() @ F.linear(tokens, a.to(tokens.dtype))).mul_(scaling).to(b.dtype)]
        return grad_x, grads.sum(0) if needs_bias else None, None, None, *grad_factors


def _merged_codes(
    layer: QuantLinear, scalings: Sequence[float], factors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    adapters = [Adapter(a, b, s) for a, b, s in zip(factors[::2], factors[1::2], scalings, strict=True)]
    return _on_grid(layer, delta_weight(adapters), dithered=True)


def _product(layer: QuantLinear, x: Tensor, weight: tuple[Tensor, Tensor, Tensor | None], bias: Tensor | None) -> Tensor:
    """Activations times a weight on ``layer``'s grid, by the ops that multiply the merged layer."""
    q, scale, zero_point = weight
    args, acts = layer.scheme.weights, layer.scheme.input_activations
    static = layer._buffers.get("input_scale")
    if layer.scheme.format == "int-quantized":
        return torch.ops.torchq.w8a8_int8(x, q, scale, static, layer._buffers.get("input_zero_point"), bias)
    if acts is not None and layer.scheme.format == "float-quantized":
        group = acts.group_size or 0 if acts.dynamic else -1
        return torch.ops.torchq.fp8_linear(x, q, scale, static, bias, group, *(args.block_structure or (0, 0)))
    x = x if acts is None else fp8.round_activations(x, None, 0)
    return F.linear(x, numerics.dequantize(q, scale, zero_point, args, x.dtype), bias)
