"""Matmul with an NF4 weight that is dequantized for each product (QLoRA, arXiv 2305.14314, eq. 5); see ``nf4.py``.

Shapes: M tokens, N out_features, K in_features, B = ceil(N K / block_size) blocks.

    y[m, n] = sum_k x[m, k] * w[n, k] + bias[n]        w = LEVELS[code] * absmax in float32, rounded once to x's dtype

as bitsandbytes computes it. Rows of the weight are dequantized and multiplied a part at a time, so that no more of it exists than
a CPU's last-level cache holds. For gradients of x the parts are columns, so that no sum is split::

    y [M, N] = x [M, K] @ w.T      w   | rows 0.. |   each part of w         grad_x [M, K] = grad_y [M, N] @ w      w   | | | | |
                                       | rows r.. |   gives columns of y                                          columns 0.. c..

Where blocks do not end with rows, and on GPUs, whose kernel writes rows, the parts are rows there too, summed in float32.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.linear import linear, stretches
from torchq.kernels.nf4 import check_nf4_args, decode, decompress_absmax, dequantize_nf4_ref, dequantize_rows
from torchq.kernels.registration import register_op

_UNIT = 512  # rows or columns


def nf4_linear_ref(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_scale: Tensor,
    nested_offset: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    block_size: int,
) -> Tensor:
    """Compute what :func:`nf4_linear` computes, in plain PyTorch, one whole weight at a time, on any device."""
    tensors = packed, absmax, nested_scale, nested_offset
    weight = dequantize_nf4_ref(*tensors, n, k, block_size, x.dtype)
    return F.linear(x, weight, bias)


@register_op("torchq::nf4_linear")
def nf4_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_scale: Tensor,
    nested_offset: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    block_size: int,
) -> Tensor:
    """Multiply activations by the transpose of an NF4 weight.

    Args:
        x: Activations, [..., K], floating point of 16 or more bits; any strides.
        packed: [ceil(N K / 2)] uint8, two codes to a byte.
        absmax: [B] uint8, absmax as codes of 8 bits.
        nested_scale: [ceil(B / 256)] float32.
        nested_offset: [] float32.
        bias: [N] of x's dtype, or None.
        n: N.
        k: K.
        block_size: Weights that share an absmax.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    tensors = packed, absmax, nested_scale, nested_offset
    _check_nf4_linear_args(x, tensors, bias, n, k, block_size)
    tokens = x.reshape(-1, k)

    def part(rows: slice) -> Tensor:
        weight = _rows(tensors, n, k, block_size, x.dtype, rows)
        return linear(tokens, weight, None if bias is None else bias[rows])

    return _in_parts(tokens, n, list(_parts(n, k, 1, x.device)), part).view(*x.shape[:-1], n)


def _in_parts(x: Tensor, size: int, parts: list[slice], part: Callable[[slice], Tensor]) -> Tensor:
    """A product [M, size] of x [M, J], put together of its columns."""
    if len(parts) == 1 and x.shape[0]:
        return part(parts[0]).to(x.dtype).contiguous()  # autocast reaches F.linear
    y = x.new_empty(x.shape[0], size)
    for columns in parts if x.shape[0] else ():
        y[:, columns] = part(columns)
    return y


def _parts(size: int, other: int, unit: int, device: torch.device) -> Iterator[slice]:
    """As ``stretches``; on a CPU twice as large and of 512 rows or columns at least, where products are at their fastest.

    In training steps of 512 tokens that is worth 2 % (4096 x 4096) to 4 % (4096 x 14336; one core of an AMD EPYC).
    """
    return (
        stretches(size, other // 2, math.lcm(_UNIT, unit), device) if device.type == "cpu" else stretches(size, other, 1, device)
    )


def _rows(tensors: tuple[Tensor, ...], n: int, k: int, block_size: int, dtype: torch.dtype, rows: slice) -> Tensor:
    """Some rows of the weight. Of a float64 one too: that is float32's."""
    packed, absmax, nested_scale, offset = tensors
    stored = torch.float32 if dtype == torch.float64 else dtype
    return dequantize_rows(packed, absmax, nested_scale, offset, n, k, block_size, stored, rows).to(dtype)


@torch.library.register_fake("torchq::nf4_linear")
def _(x, packed, absmax, nested_scale, nested_offset, bias, n, k, block_size):
    return x.new_empty(*x.shape[:-1], n)


@register_op("torchq::nf4_linear_input_grad")
def nf4_linear_input_grad(
    grad_y: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested_scale: Tensor,
    nested_offset: Tensor,
    n: int,
    k: int,
    block_size: int,
) -> Tensor:
    """Return the gradient [..., K] of activations from that of outputs, grad_y [..., N]; the rest as for :func:`nf4_linear`."""
    tensors = packed, absmax, nested_scale, nested_offset
    if grad_y.device.type != "cpu" or k % block_size:
        return _input_grad_by_rows(grad_y, tensors, n, k, block_size)
    codes, scales = packed.view(n, -1), decompress_absmax(absmax, nested_scale, nested_offset).view(n, -1)
    grads = grad_y.reshape(-1, n)

    def part(columns: slice) -> Tensor:
        weight = grads.new_empty(n, columns.stop - columns.start)
        blocks = slice(columns.start // block_size, columns.stop // block_size)
        decode(codes[:, columns.start // 2 : columns.stop // 2], scales[:, blocks], weight)
        return linear(grads, weight.t())

    return _in_parts(grads, k, list(_parts(k, n, block_size, grads.device)), part).view(*grad_y.shape[:-1], k)


def _input_grad_by_rows(grad_y: Tensor, tensors: tuple[Tensor, ...], n: int, k: int, block_size: int) -> Tensor:
    grads = grad_y.reshape(-1, n)
    grad_x, total = grad_y.new_zeros(grads.shape[0], k), None
    for rows in _parts(n, k, 1, grads.device) if grads.numel() and k else ():
        product = linear(grads[:, rows], _rows(tensors, n, k, block_size, grads.dtype, rows).t())
        wide = torch.promote_types(product.dtype, torch.float32)
        total = product if total is None else total.to(wide).add_(product)
    if total is not None:
        grad_x.copy_(total)
    return grad_x.view(*grad_y.shape[:-1], k)


@torch.library.register_fake("torchq::nf4_linear_input_grad")
def _(grad_y, packed, absmax, nested_scale, nested_offset, n, k, block_size):
    return grad_y.new_empty(*grad_y.shape[:-1], k)


def _check_nf4_linear_args(x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, n: int, k: int, block_size: int) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x must be [..., {k}], got {list(x.shape)}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} [{n}], as x, got {bias.dtype} {list(bias.shape)}")
    packed, absmax, nested_scale, offset = tensors
    check_nf4_args(packed, absmax, nested_scale, offset, n, k, block_size, torch.float32)
