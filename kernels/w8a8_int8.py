"""W8A8 int8 matmul: int8 activations, quantized here, times int8 weights.

Shapes: M tokens, N out_features, K in_features. With x_q = clamp(round(x / x_scale) + x_zero_point, -128, 127),

    y[m, n] = x_scale[m] * weight_scale[n] * (sum_k x_q[m, k] * weight[n, k] - x_zero_point * sum_k weight[n, k]) + bias[n]

The sum is exact in int32; the rest is float32, rounded once to the activations' dtype. Dynamic scales are absmax / 127 of each
token; a token of zeros has scale 1. Static ones are given.

CPU and CUDA: ``torch._int_mm`` (VNNI / AMX, or cuBLAS where the shape allows it; exact float32 matmul elsewhere).
"""

import torch
from torch import Tensor

_INT8_MAX = 127.0


def w8a8_int8_ref(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Compute what :func:`w8a8_int8` computes, with the integer matmul in float64 (exact), on any device."""
    x_q, x_scale = quantize_activations(x.reshape(-1, x.shape[-1]), input_scale, input_zero_point)
    acc = (x_q.double() @ weight.double().t()).float()
    return _epilogue(acc, x, x_scale, weight, weight_scale, input_zero_point, bias)


def quantize_activations(tokens: Tensor, input_scale: Tensor | None, input_zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize tokens [M, K] to int8: (codes [M, K], scales float32 [M, 1] dynamic or [1] static)."""
    values = tokens.float()
    if input_scale is None:
        scale = values.abs().amax(dim=1, keepdim=True).div_(_INT8_MAX)
        scale = torch.where(scale > 0, scale, 1.0)
    else:
        scale = input_scale.float().reshape(1)
    codes = torch.round(values / scale)
    if input_zero_point is not None:
        codes += input_zero_point.float()
    return codes.clamp_(-128, 127).to(torch.int8), scale


def _epilogue(
    acc: Tensor,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    if input_zero_point is not None:
        acc = acc - input_zero_point.float() * weight.sum(dim=1, dtype=torch.int32).float()
    acc = acc * x_scale
    acc *= weight_scale.float().reshape(1, -1)
    if bias is not None:
        acc += bias
    return acc.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("torchq::w8a8_int8", mutates_args=())
def w8a8_int8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Quantize activations to int8 and multiply them by the transpose of an int8 weight.

    Args:
        x: Activations, [..., K], float16, bfloat16 or float32; any strides.
        weight: [N, K] int8.
        weight_scale: [N, 1] or [1] floating point.
        input_scale: [1] floating point for static activations, None for dynamic ones (a scale per token).
        input_zero_point: [1] int8 for asymmetric static activations, or None.
        bias: [N], or None.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    _check_w8a8_int8_args(x, weight)
    x_q, x_scale = quantize_activations(x.reshape(-1, x.shape[-1]), input_scale, input_zero_point)
    acc = _int_mm(x_q, weight).float()
    return _epilogue(acc, x, x_scale, weight, weight_scale, input_zero_point, bias)


@w8a8_int8.register_fake
def _(x, weight, weight_scale, input_scale, input_zero_point, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _int_mm(x_q: Tensor, weight: Tensor) -> Tensor:
    """[M, K] int8 @ [N, K].T int8 -> [M, N] int32, exact."""
    (m, k), n = x_q.shape, weight.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=torch.int32, device=x_q.device)
    if x_q.device.type == "cpu":
        return torch._int_mm(x_q, weight.t())
    if x_q.device.type == "cuda" and k % 8 == 0 and n % 8 == 0:  # cuBLAS wants more than 16 rows
        padded = torch.nn.functional.pad(x_q, (0, 0, 0, max(0, 17 - m)))
        return torch._int_mm(padded, weight.t())[:m]
    return (x_q.double() @ weight.double().t()).to(torch.int32)


def _check_w8a8_int8_args(x: Tensor, weight: Tensor) -> None:
    if weight.dtype != torch.int8 or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be int8 [N, {x.shape[-1]}], got {weight.dtype} {list(weight.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
