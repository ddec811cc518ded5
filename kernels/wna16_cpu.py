"""Weight-only integer matmul in the memory layout of PyTorch's CPU int4 kernel (``aten::_weight_int4pack_mm_for_cpu``).

Shapes: M tokens, N out_features, K in_features, S = K values per native group (32, 64, 128 or 256). A weight of up to 4 bits
is one plane of nibbles ``q + 8``; one of 5 to 8 bits is two, one after the other along K: ``q + 128 = 16 high + low``, so that
one call on the activations written twice sums both. P planes hold blocks of 64 rows, K-major, rows n and n + 32 in one byte
(the last block, of 16, 32 or 48 rows, pairs rows 2n and 2n + 1)::

    byte [block, k, j]:   bits 7..4: row 64 block + 32 + j     bits 3..0: row 64 block + j     (0 <= j < 32, 0 <= k < P K)

This layout is private to PyTorch and depends on the processor: :func:`is_available` probes it once, and it never leaves
memory; checkpoints, pickles and other devices get the canonical words back. Few tokens: PyTorch's kernel. More: a cache-sized
tile is dequantized and multiplied at a time.

Source of the layout: pytorch/aten/src/ATen/native/cpu/int4mm_kernel.cpp.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.linear import in_stretches, input_grad, linear
from torchq.kernels.registration import register_op

_BLOCK_ROWS = 64
_NATIVE_GROUP_SIZES = (256, 128, 64, 32)
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F  # of eight bytes

MAX_NATIVE_TOKENS = {1: 60, 2: 28}
"""Most tokens for which PyTorch's kernel beats dequantize + matmul, by number of planes (benchmarks/bench_wna16_cpu.py)."""


def wna16_cpu_ref(
    x: Tensor,
    weight_planes: Tensor,
    scale_and_zero: Tensor,
    zero_point: Tensor | None,
    residual: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    """Compute what :func:`wna16_cpu` computes from one whole dequantized weight."""
    scale = scale_of(scale_and_zero, num_bits, x.shape[-1] // group_size)
    weight = _dequantize_rows(unpack_planes(weight_planes, num_bits), scale, zero_point)
    return F.linear(x, weight.to(x.dtype), bias)


def _dequantize_rows(q: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Codes [N, K] int8, scale and zero_point [N, G] -> [N, K] of scale's dtype."""
    groups = q.unflatten(1, (scale.shape[1], -1)).to(scale.dtype)
    if zero_point is not None:
        groups = groups - zero_point.unsqueeze(-1).to(scale.dtype)
    return (groups * scale.unsqueeze(-1)).flatten(1)


# ------------------------------------------------------------------------------------------------------------------- layout


@functools.cache
def is_available() -> bool:
    """Whether this PyTorch and processor use the layout described above (probed once on a small weight)."""
    if not hasattr(torch, "_convert_weight_to_int4pack_for_cpu") or not hasattr(torch, "_weight_int4pack_mm_for_cpu"):
        return False
    rows = torch.arange(80, dtype=torch.int32)
    q = torch.arange(80 * 32, dtype=torch.int32).mul_(7).bitwise_and_(15).reshape(80, 32)
    planes = torch._convert_weight_to_int4pack_for_cpu(q, 1)
    if not torch.equal(_unpack_nibbles(planes), q.to(torch.uint8)):
        return False
    scale, zero = 1 << rows % 3, rows % 7  # small integers: exact in bfloat16
    pairs = torch.stack([scale, zero], 1)[None].bfloat16()
    y = torch._weight_int4pack_mm_for_cpu(torch.eye(32, dtype=torch.bfloat16), planes, 32, pairs)
    return torch.equal(y.t(), ((q - 8) * scale[:, None] + zero[:, None]).bfloat16())


def native_group_size(out_features: int, in_features: int, group_size: int) -> int | None:
    """Return the kernel's group size for a weight (it divides ``group_size``), or None if the layout cannot hold it."""
    if out_features % 16 or in_features % 32 or out_features == 0:
        return None
    return next((size for size in _NATIVE_GROUP_SIZES if group_size % size == 0), None)


def pack_planes(q: Tensor, num_bits: int) -> Tensor:
    """Lay out signed codes q, [N, K] int8, as P nibble planes: [N, P K / 2] uint8 (P = 2 for more than 4 bits)."""
    if num_bits <= 4:
        return torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32).add_(8), 1)
    unsigned = q.to(torch.int32).add_(128)
    return torch._convert_weight_to_int4pack_for_cpu(torch.cat([unsigned >> 4, unsigned & 15], dim=1), 1)


def unpack_planes(weight_planes: Tensor, num_bits: int) -> Tensor:
    """Invert :func:`pack_planes`: [N, P K / 2] uint8 -> [N, K] int8."""
    nibbles = _unpack_nibbles(weight_planes)
    if num_bits <= 4:
        return nibbles.view(torch.int8).sub_(8)
    high, low = nibbles.chunk(2, dim=1)
    return ((high << 4) | low).bitwise_xor_(128).view(torch.int8)


def _unpack_nibbles(planes: Tensor) -> Tensor:
    """[N, K / 2] uint8 in the kernel's order -> nibbles [N, K] uint8."""
    n, k = planes.shape[0], planes.shape[1] * 2
    full = n // _BLOCK_ROWS * _BLOCK_ROWS
    stream = planes.reshape(-1)
    blocks = stream[: full * k // 2].view(full // _BLOCK_ROWS, k, 32)
    nibbles = torch.empty(n, k, dtype=torch.uint8)
    halves = nibbles[:full].view(full // _BLOCK_ROWS, 2, 32, k)
    halves[:, 0] = (blocks & 15).transpose(1, 2)
    halves[:, 1] = (blocks >> 4).transpose(1, 2)
    tail = stream[full * k // 2 :].view(k, (n - full) // 2).t()
    nibbles[full::2], nibbles[full + 1 :: 2] = tail & 15, tail >> 4
    return nibbles


def pack_scale_and_zero(scale: Tensor, zero_point: Tensor | None, num_bits: int, group_size: int, native_size: int) -> Tensor:
    """Lay out scales as the kernel wants them: [P K / S, N, 2], pairs (scale, zero) with w = (nibble - 8) scale + zero.

    The kernel's zero, ``-zero_point * scale``, is rounded to scale's dtype: :func:`zero_residual` is what that loses.

    Args:
        scale: [N, G].
        zero_point: [N, G] int8, or None; None for more than 4 bits.
        num_bits: 2 to 8.
        group_size: Weights per scale.
        native_size: S, divides ``group_size``; scales are repeated where it is smaller.
    """
    if num_bits > 4 and zero_point is not None:
        raise ValueError("two planes hold symmetric weights only: the zero of 5 to 8 bits does not fit 16 bits")
    zero = torch.zeros_like(scale) if zero_point is None else (-zero_point.float() * scale.float()).to(scale.dtype)
    pairs = torch.stack([scale, zero], -1).transpose(0, 1).repeat_interleave(group_size // native_size, dim=0)
    if num_bits <= 4:
        return pairs.contiguous()
    high = torch.stack([pairs[..., 0] * 16, pairs[..., 1]], -1)  # q = 16 (high - 8) + (low - 8) + 8
    low = torch.stack([pairs[..., 0], pairs[..., 0] * 8], -1)
    return torch.cat([high, low])


def zero_residual(scale: Tensor, zero_point: Tensor) -> Tensor:
    """What rounding ``-zero_point * scale`` to scale's dtype loses, [G, N] of that dtype (exact: 4 bits times 8)."""
    zero = -zero_point.float() * scale.float()
    return (zero - zero.to(scale.dtype).float()).to(scale.dtype).t().contiguous()


def scale_of(scale_and_zero: Tensor, num_bits: int, num_groups: int) -> Tensor:
    """Return the canonical scales, [N, G], from :func:`pack_scale_and_zero`'s layout, bit for bit."""
    return _scales_by_group(scale_and_zero, num_bits, num_groups).t().contiguous()


def _scales_by_group(scale_and_zero: Tensor, num_bits: int, num_groups: int) -> Tensor:
    """[G, N], a view of the last plane's scales."""
    per_plane = scale_and_zero.shape[0] // _num_planes(num_bits)
    return scale_and_zero.select(2, 0)[-per_plane :: per_plane // num_groups]


def _num_planes(num_bits: int) -> int:
    return 1 if num_bits <= 4 else 2


# ----------------------------------------------------------------------------------------------------------------------- op


@register_op("torchq::wna16_cpu", "CPU")
def wna16_cpu(
    x: Tensor,
    weight_planes: Tensor,
    scale_and_zero: Tensor,
    zero_point: Tensor | None,
    residual: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    """Multiply activations by the transpose of a weight in the CPU kernel's layout.

    Args:
        x: Activations, [..., K], float16, bfloat16 or float32; any strides.
        weight_planes: [N, P K / 2] uint8 from :func:`pack_planes`.
        scale_and_zero: [P K / S, N, 2] bfloat16 from :func:`pack_scale_and_zero`.
        zero_point: [N, G] int8, or None (symmetric).
        residual: [G, N] of scale's dtype from :func:`zero_residual`, or None (symmetric).
        bias: [N] of x's dtype, or None.
        num_bits: 2 to 8.
        group_size: Weights along K that share a scale: K / G.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    _check_wna16_cpu_args(x, weight_planes, scale_and_zero, zero_point, residual, bias, num_bits, group_size)
    n, k = weight_planes.shape[0], x.shape[-1]
    tokens = x.reshape(-1, k)
    few = tokens.shape[0] <= MAX_NATIVE_TOKENS[_num_planes(num_bits)]
    if few and x.dtype == scale_and_zero.dtype:
        native_size = weight_planes.shape[1] * 2 // scale_and_zero.shape[0]
        tokens = tokens.contiguous() if num_bits <= 4 else torch.cat([tokens, tokens], dim=1)
        y = torch._weight_int4pack_mm_for_cpu(tokens, weight_planes, native_size, scale_and_zero)
        if residual is not None:
            y += tokens.unflatten(1, (-1, group_size)).sum(-1) @ residual
        if bias is not None:
            y += bias
    else:
        scale = _scales_by_group(scale_and_zero, num_bits, k // group_size)
        y = _tiled_matmul(tokens, weight_planes, scale, zero_point, bias, num_bits)
    return y.view(*x.shape[:-1], n)


@torch.library.register_fake("torchq::wna16_cpu")
def _(x, weight_planes, scale_and_zero, zero_point, residual, bias, num_bits, group_size):
    return x.new_empty(*x.shape[:-1], weight_planes.shape[0])


@register_op("torchq::wna16_cpu_input_grad", "CPU")
def wna16_cpu_input_grad(
    grad_y: Tensor,
    weight_planes: Tensor,
    scale_and_zero: Tensor,
    zero_point: Tensor | None,
    residual: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    """Return the gradient [..., K] of activations from that of outputs, grad_y [..., N]; the rest as for :func:`wna16_cpu`."""
    n, k = weight_planes.shape[0], weight_planes.shape[1] * 2 // _num_planes(num_bits)
    scale = _scales_by_group(scale_and_zero, num_bits, k // group_size)
    zeros = None if zero_point is None else zero_point.t()
    blocks, tail = _blocks(weight_planes, num_bits)
    rest = None
    if tail.start < n:
        q = unpack_planes(weight_planes[tail], num_bits)
        rest = _dequantize_rows(q, scale[:, tail].t(), None if zero_point is None else zero_point[tail]).to(grad_y.dtype)

    def part(grads: Tensor, columns: slice) -> Tensor:
        groups = slice(columns.start // group_size, -(-columns.stop // group_size))
        tile = blocks[:, :, columns]
        weight = _dequantize_blocks(tile, scale[groups, : tail.start], None if zeros is None else zeros[groups, : tail.start])
        weight = weight.to(grads.dtype)
        if rest is not None:
            weight = torch.cat([weight, rest[:, columns].t()], 1)
        return linear(grads, weight)

    return input_grad(grad_y, k, 32 if group_size == k else group_size, part)


@torch.library.register_fake("torchq::wna16_cpu_input_grad")
def _(grad_y, weight_planes, scale_and_zero, zero_point, residual, num_bits, group_size):
    return grad_y.new_empty(*grad_y.shape[:-1], weight_planes.shape[1] * 2 // _num_planes(num_bits))


def _blocks(weight_planes: Tensor, num_bits: int) -> tuple[Tensor, slice]:
    """(Whole blocks of rows [B, P, K, 32], the rows that are left)."""
    n, num_planes = weight_planes.shape[0], _num_planes(num_bits)
    whole = n // _BLOCK_ROWS * _BLOCK_ROWS
    blocks = weight_planes[:whole].view(whole // _BLOCK_ROWS, num_planes, weight_planes.shape[1] * 2 // num_planes, 32)
    return blocks, slice(whole, n)


def _tiled_matmul(
    tokens: Tensor,
    weight_planes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
) -> Tensor:
    """Tokens [M, K] @ weight.T, a few blocks of rows at a time. scale [G, N], zero_point [N, G] or None."""
    n = weight_planes.shape[0]
    blocks, tail = _blocks(weight_planes, num_bits)

    def whole_blocks(x: Tensor, rows: slice) -> Tensor:
        tile = blocks[rows.start // _BLOCK_ROWS : rows.stop // _BLOCK_ROWS]
        zeros = None if zero_point is None else zero_point[rows].t()
        weight = _dequantize_blocks(tile, scale[:, rows], zeros).to(x.dtype)
        return linear(x, weight.t(), None if bias is None else bias[rows])

    y = in_stretches(tokens, tail.start, _BLOCK_ROWS, whole_blocks)
    if tail.start == n:
        return y
    q = unpack_planes(weight_planes[tail], num_bits)
    zeros = None if zero_point is None else zero_point[tail]
    weight = _dequantize_rows(q, scale[:, tail].t(), zeros).to(tokens.dtype)
    return torch.cat([y, linear(tokens, weight, None if bias is None else bias[tail]).to(y.dtype)], 1)


def _dequantize_blocks(blocks: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """[B, P, K, 32] uint8, scale and zero_point [G, 64 B] -> the transposed weight [K, 64 B] in scale's dtype.

    Eight bytes at a time, codes are put where their weight belongs while they are bytes; whatever follows runs over long rows.
    """
    num_blocks, num_planes, k, lanes = blocks.shape
    num_groups, n = scale.shape
    codes = torch.empty(k, num_blocks, 2, lanes // 8, dtype=torch.int64)
    first, second = codes.unbind(2)  # rows 0 to 31 of each block, and the others
    words = blocks.view(torch.int64).permute(1, 2, 0, 3)  # [P, K, B, 4]
    if num_planes == 1:
        torch.bitwise_and(words[0], _LOW_NIBBLES, out=first)
        torch.bitwise_and(words[0] >> 4, _LOW_NIBBLES, out=second)
        offset = 8
    else:
        high, low = words
        torch.bitwise_or((high & _LOW_NIBBLES) << 4, low & _LOW_NIBBLES, out=first)
        torch.bitwise_or(high & ~_LOW_NIBBLES, (low >> 4) & _LOW_NIBBLES, out=second)
        offset = -128  # in two's complement the same as 128
    signed = codes.view(torch.int8).view(num_groups, k // num_groups, n)
    signed -= offset if zero_point is None else (zero_point + offset).unsqueeze(1)
    weight = signed.to(scale.dtype)
    weight *= scale.contiguous().unsqueeze(1)  # of the strides that they have among pairs it would be twice as slow
    return weight.view(k, n)


def _check_wna16_cpu_args(
    x: Tensor,
    weight_planes: Tensor,
    scale_and_zero: Tensor,
    zero_point: Tensor | None,
    residual: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a 0-D tensor")
    n, k, num_planes = weight_planes.shape[0], x.shape[-1], _num_planes(num_bits)
    if weight_planes.dtype != torch.uint8 or weight_planes.ndim != 2:
        raise ValueError(f"weight_planes must be uint8 [N, P K / 2], got {weight_planes.dtype} {list(weight_planes.shape)}")
    if weight_planes.shape[1] * 2 != k * num_planes:
        columns = weight_planes.shape[1] * 2 // num_planes
        raise ValueError(f"weight_planes holds {columns} columns at {num_bits} bits, x has {k}")
    if group_size <= 0 or k % group_size:
        raise ValueError(f"group_size must divide {k} in_features, got {group_size}")
    native_groups = scale_and_zero.shape[0]
    if scale_and_zero.shape != (native_groups, n, 2) or native_groups == 0 or native_groups % (num_planes * (k // group_size)):
        raise ValueError(
            f"scale_and_zero must be [a multiple of {num_planes * (k // group_size)}, {n}, 2] for group_size={group_size}, "
            f"got {list(scale_and_zero.shape)}"
        )
    if zero_point is not None and (zero_point.dtype != torch.int8 or zero_point.shape != (n, k // group_size)):
        got = f"{zero_point.dtype} {list(zero_point.shape)}"
        raise ValueError(f"zero_point must be int8 [{n}, {k // group_size}], got {got}")
    if (residual is None) != (zero_point is None):
        raise ValueError("zero_point and residual go together")
    if residual is not None and (residual.dtype != scale_and_zero.dtype or residual.shape != (k // group_size, n)):
        got = f"{residual.dtype} {list(residual.shape)}"
        raise ValueError(f"residual must be {scale_and_zero.dtype} [{k // group_size}, {n}], got {got}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} [{n}], as x, got {bias.dtype} {list(bias.shape)}")
