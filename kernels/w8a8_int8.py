"""W8A8 int8 matmul: int8 activations, quantized here, times int8 weights.

Shapes: M tokens, N out_features, K in_features. With x_q = clamp(round(x / x_scale) + x_zero_point, -128, 127),

    y[m, n] = (sum_k x_q[m, k] * weight[n, k] - x_zero_point * sum_k weight[n, k]) * weight_scale[n] * x_scale[m] + bias[n]

The sums are exact in int32 (up to K = 65793); the rest is float32, rounded once to the activations' dtype. Dynamic scales are
absmax / 127 of each token, at least 2^-126, so that a token of zeros stays one. Static ones are given.

CPU and CUDA: ``torch._int_mm`` (VNNI / AMX, or cuBLAS where the shape allows it), else a floating-point matmul that is exact.
On CPUs ``torch._int_mm`` lays its second matrix out anew in every call: for several tokens that should be the activations and not
the weight, so the product is computed transposed. Large weights go to :mod:`torchq.kernels.w8a8_int8_cpu`
(benchmarks/bench_w8a8_cpu.py).
"""

import functools

import torch
from torch import Tensor

from torchq.kernels.linear import input_grad, linear
from torchq.kernels.registration import register_op

_INT8_MAX = 127.0
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_CPU_ELEMENTS = 1 << 17  # activations quantized at a time on a CPU: a float32 copy that stays in the cache
_CPU_TOKENS = 512  # tokens at a time on a CPU: bounds the int32 and float32 sums in memory
_EXACT_COLUMNS = 1 << 10  # this many products of int8 sum up to 2^24 at most: exact in float32


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
    acc = (x_q.double() @ weight.double().t()).to(torch.int32)
    y = _epilogue(acc, x.dtype, x_scale, weight, weight_scale, input_zero_point, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def quantize_activations(tokens: Tensor, input_scale: Tensor | None, input_zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize tokens [M, K] to int8: (codes [M, K], scales float32 [M, 1] dynamic or [1] static)."""
    step = max(1, _CPU_ELEMENTS // max(1, tokens.shape[1]))
    if tokens.device.type != "cpu" or tokens.shape[0] <= step:
        return _quantize(tokens, input_scale, input_zero_point)
    codes = torch.empty(tokens.shape, dtype=torch.int8)
    scales = []
    for part, out in zip(tokens.split(step), codes.split(step), strict=True):
        part_codes, scale = _quantize(part, input_scale, input_zero_point)
        out.copy_(part_codes)
        scales.append(scale)
    return codes, torch.cat(scales) if input_scale is None else scales[0]


def _quantize(tokens: Tensor, input_scale: Tensor | None, input_zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    if input_scale is None:  # a NaN stays, and makes the whole token NaN
        scale = tokens.abs().amax(dim=1, keepdim=True).float().div_(_INT8_MAX).clamp_min_(_SMALLEST_SCALE)
        return (tokens / scale).round_().to(torch.int8), scale
    scale = input_scale.float().reshape(1)
    codes = (tokens / scale).round_()
    if input_zero_point is not None:
        codes += input_zero_point
    return codes.clamp_(-128, 127).to(torch.int8), scale


def _epilogue(
    acc: Tensor,
    dtype: torch.dtype,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    if input_zero_point is not None:
        acc = acc - input_zero_point.to(torch.int32) * weight.sum(dim=1, dtype=torch.int32)
    y = acc * weight_scale.float().reshape(1, -1)
    y *= x_scale
    if bias is not None:
        y += bias
    return y.to(dtype).contiguous()  # cast first: transposing a matrix is fast within one dtype


@register_op("torchq::w8a8_int8")
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
    check_w8a8_int8_args(x, weight, tuple(weight.shape), weight_scale, input_scale, input_zero_point, bias)
    tokens = x.reshape(-1, x.shape[-1])
    if x.device.type != "cpu" or tokens.shape[0] <= _CPU_TOKENS:
        y = _scaled_mm(tokens, weight, weight_scale, input_scale, input_zero_point, bias)
    else:
        y = x.new_empty(tokens.shape[0], weight.shape[0])
        for part, out in zip(tokens.split(_CPU_TOKENS), y.split(_CPU_TOKENS), strict=True):
            out.copy_(_scaled_mm(part, weight, weight_scale, input_scale, input_zero_point, bias))
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("torchq::w8a8_int8")
def _(x, weight, weight_scale, input_scale, input_zero_point, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@register_op("torchq::w8a8_int8_input_grad")
def w8a8_int8_input_grad(
    grad_y: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, input_zero_point: Tensor | None
) -> Tensor:
    """Return the gradient [..., K] of activations, as if they were not rounded, from grad_y [..., N]; see :func:`w8a8_int8`."""
    scale = weight_scale.reshape(-1, 1)

    def part(grads: Tensor, columns: slice) -> Tensor:
        return linear(grads, (weight[:, columns].to(scale.dtype) * scale).to(grads.dtype).t())

    return input_grad(grad_y, weight.shape[1], 1, part)


@torch.library.register_fake("torchq::w8a8_int8_input_grad")
def _(grad_y, weight, weight_scale, input_scale, input_zero_point):
    return grad_y.new_empty(*grad_y.shape[:-1], weight.shape[1])


def _scaled_mm(
    tokens: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    x_q, x_scale = quantize_activations(tokens, input_scale, input_zero_point)
    acc = _int_mm(x_q, weight)
    return _epilogue(acc, tokens.dtype, x_scale, weight, weight_scale, input_zero_point, bias)


def _int_mm(x_q: Tensor, weight: Tensor) -> Tensor:
    """[M, K] int8 @ [N, K].T int8 -> [M, N] int32, exact; of any strides."""
    (m, k), n = x_q.shape, weight.shape[0]
    if m == 0 or n == 0 or k == 0:
        return torch.zeros(m, n, dtype=torch.int32, device=x_q.device)
    if x_q.device.type == "cpu":
        return _cpu_int_mm(x_q, weight) if k > 1 and _int_mm_is_exact() else _float_mm(x_q, weight)
    if x_q.device.type == "cuda" and k % 8 == 0 and n % 8 == 0:  # cuBLAS wants more than 16 rows
        padded = torch.nn.functional.pad(x_q, (0, 0, 0, max(0, 17 - m)))
        return torch._int_mm(padded, weight.t())[:m]
    return (x_q.double() @ weight.double().t()).to(torch.int32)


def _cpu_int_mm(x_q: Tensor, weight: Tensor) -> Tensor:
    return torch._int_mm(x_q, weight.t()) if x_q.shape[0] == 1 else torch._int_mm(weight, x_q.t()).t()


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether ``torch._int_mm`` is exact on this CPU (probed once): without VNNI its sums of two products saturate at 16 bits.

    ``torch._int_mm`` also returns garbage for K = 1, on any CPU.
    """
    x_q = torch.tensor([127, -128, 127], dtype=torch.int8).repeat(6)[:, None].expand(18, 64).contiguous()
    weight = torch.tensor([127, -128], dtype=torch.int8).repeat(16)[:, None].expand(32, 64).contiguous()
    expected = _float_mm(x_q, weight)
    return all(torch.equal(_cpu_int_mm(x_q[:m], weight), expected[:m]) for m in (1, 18))


def _float_mm(x_q: Tensor, weight: Tensor) -> Tensor:
    acc = torch.zeros(x_q.shape[0], weight.shape[0], dtype=torch.int32)
    for x_part, weight_part in zip(x_q.split(_EXACT_COLUMNS, 1), weight.split(_EXACT_COLUMNS, 1), strict=True):
        acc += (x_part.float() @ weight_part.float().t()).to(torch.int32)
    return acc


def check_w8a8_int8_args(
    x: Tensor,
    weight: Tensor,
    weight_shape: tuple[int, ...],
    weight_scale: Tensor,
    input_scale: Tensor | None,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Raise ValueError for arguments that do not fit a weight of shape ``weight_shape``, [N, K]."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a 0-D tensor")
    if weight.dtype != torch.int8 or len(weight_shape) != 2 or weight_shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be int8 [N, {x.shape[-1]}], got {weight.dtype} {list(weight_shape)}")
    n = weight_shape[0]
    if weight_scale.shape not in ((n, 1), (1,)):
        raise ValueError(f"weight_scale must be [{n}, 1] or [1], got {list(weight_scale.shape)}")
    if input_zero_point is not None and input_scale is None:
        raise ValueError("input_zero_point needs input_scale: dynamic activations are symmetric")
    for name, tensor in (("input_scale", input_scale), ("input_zero_point", input_zero_point)):
        if tensor is not None and tensor.shape != (1,):
            raise ValueError(f"{name} must be [1], got {list(tensor.shape)}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], got {list(bias.shape)}")
