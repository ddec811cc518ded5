"""Weight-only int8 matmul with one scale per row, in rows as PyTorch's CPU kernel reads them (``aten::_weight_int8pack_mm``).

Shapes: M tokens, N out_features, K in_features. The weight is as plain as can be, so nothing about it depends on the processor::

    weight_rows [N, K] int8        row_scale [N]        y[m, n] = row_scale[n] * sum_k weight_rows[n, k] x[m, k]

Few tokens in bfloat16: PyTorch's kernel, which multiplies in float32 by the exact products of codes and scales. More, and other
dtypes: a cache-sized tile is dequantized and multiplied at a time.

Source of the kernel: pytorch/aten/src/ATen/native/cpu/int8mm_kernel.cpp.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.linear import in_stretches, input_grad, linear
from torchq.kernels.registration import register_op

MAX_NATIVE_TOKENS = 20
"""Most tokens for which PyTorch's kernel beats dequantize + matmul (benchmarks/bench_wna16_cpu.py)."""

_BLOCK_ROWS, _BLOCK_COLUMNS = 4, 16  # the kernel reads past the end of other sizes
_ALIGNMENT = 32  # bytes: it loads whole vectors from aligned addresses only
_MAX_WEIGHTS = (1 << 31) - 1  # its offsets have 32 bits


def w8a16_cpu_ref(x: Tensor, weight_rows: Tensor, row_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute what :func:`w8a16_cpu` computes from one whole dequantized weight."""
    return F.linear(x, (weight_rows * row_scale.unsqueeze(1)).to(x.dtype), bias)


@functools.cache
def is_available() -> bool:
    """Whether this PyTorch has the kernel and it computes the formula above (probed once on a small weight)."""
    if not hasattr(torch, "_weight_int8pack_mm"):
        return False
    n, k = 2 * _BLOCK_ROWS, 4 * _BLOCK_COLUMNS
    q = torch.arange(n * k, dtype=torch.int32).mul_(37).remainder_(251).sub_(125).to(torch.int8).view(n, k)
    scale = 1 << torch.arange(n) % 3
    eye = torch.eye(k, dtype=torch.bfloat16)
    expected = (q * scale[:, None]).t().bfloat16()
    products = [torch._weight_int8pack_mm(x, q, scale.bfloat16()) for x in (eye, eye[:1], eye[:3])]
    return all(torch.equal(y, expected[: y.shape[0]]) for y in products)


# ----------------------------------------------------------------------------------------------------------------------- op


@register_op("torchq::w8a16_cpu", "CPU")
def w8a16_cpu(x: Tensor, weight_rows: Tensor, row_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply activations by the transpose of an int8 weight with a scale per row.

    Args:
        x: Activations, [..., K], float16, bfloat16, float32 or float64; any strides.
        weight_rows: Codes, [N, K] int8.
        row_scale: [N] floating point.
        bias: [N] of x's dtype, or None.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    _check_w8a16_cpu_args(x, weight_rows, row_scale, bias)
    n, k = weight_rows.shape
    tokens = x.reshape(-1, k)
    if 0 < tokens.shape[0] <= MAX_NATIVE_TOKENS and x.dtype == torch.bfloat16 and _kernel_reads(weight_rows, row_scale):
        tokens = tokens.contiguous()
        y = torch._weight_int8pack_mm(tokens if _is_aligned(tokens) else tokens.clone(), weight_rows, row_scale)
        if bias is not None:
            y += bias
    else:

        def part(x: Tensor, rows: slice) -> Tensor:
            weight = weight_rows[rows] * row_scale[rows].unsqueeze(1)
            return linear(x, weight.to(x.dtype), None if bias is None else bias[rows])

        y = in_stretches(tokens, n, 1, part)
    return y.view(*x.shape[:-1], n)


@torch.library.register_fake("torchq::w8a16_cpu")
def _(x, weight_rows, row_scale, bias):
    return x.new_empty(*x.shape[:-1], weight_rows.shape[0])


@register_op("torchq::w8a16_cpu_input_grad", "CPU")
def w8a16_cpu_input_grad(grad_y: Tensor, weight_rows: Tensor, row_scale: Tensor) -> Tensor:
    """Return the gradient [..., K] of activations from that of outputs, grad_y [..., N]; the rest as for :func:`w8a16_cpu`."""

    def part(grads: Tensor, columns: slice) -> Tensor:
        weight = weight_rows[:, columns] * row_scale.unsqueeze(1)
        return linear(grads, weight.to(grads.dtype).t())

    return input_grad(grad_y, weight_rows.shape[1], 1, part)


@torch.library.register_fake("torchq::w8a16_cpu_input_grad")
def _(grad_y, weight_rows, row_scale):
    return grad_y.new_empty(*grad_y.shape[:-1], weight_rows.shape[1])


def _kernel_reads(weight_rows: Tensor, row_scale: Tensor) -> bool:
    """Whether PyTorch's kernel can multiply by this weight."""
    n, k = weight_rows.shape
    if n % _BLOCK_ROWS or k % _BLOCK_COLUMNS or not 0 < n * k <= _MAX_WEIGHTS or row_scale.dtype != torch.bfloat16:
        return False
    return is_available() and weight_rows.is_contiguous() and row_scale.is_contiguous() and _is_aligned(weight_rows)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % _ALIGNMENT == 0


def _check_w8a16_cpu_args(x: Tensor, weight_rows: Tensor, row_scale: Tensor, bias: Tensor | None) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
    if weight_rows.dtype != torch.int8 or weight_rows.ndim != 2:
        raise ValueError(f"weight_rows must be int8 [N, K], got {weight_rows.dtype} {list(weight_rows.shape)}")
    n, k = weight_rows.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x must be [..., {k}] for weight_rows {list(weight_rows.shape)}, got {list(x.shape)}")
    if row_scale.shape != (n,) or not row_scale.is_floating_point():
        raise ValueError(f"row_scale must be floating point [{n}], got {row_scale.dtype} {list(row_scale.shape)}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} [{n}], as x, got {bias.dtype} {list(bias.shape)}")
