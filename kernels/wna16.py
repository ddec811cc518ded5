"""Weight-only integer matmul: 16- or 32-bit activations times a packed 2- to 8-bit weight.

Shapes: M tokens, N out_features, K in_features, G = K / group_size. Packing (compressed-tensors ``pack-quantized``): a row of the
weight is one little-endian bit stream along K, code ``k`` in bits ``[k b, (k + 1) b)``, stored with ``2^(b-1)`` added;
zero points are packed the same way along N::

    int32 word, b = 4:   bits 31..28  27..24  ...  7..4  3..0
                         code  k+7     k+6    ...  k+1    k

Dequantization: ``w[n, k] = (q[n, k] - zero_point[n, k // group_size]) * scale[n, k // group_size]``, computed in scale's
dtype, then cast to the activations' dtype: the weight every reader of the format gets. The matmul accumulates as ``F.linear``.

A tile of rows is dequantized and multiplied at a time, on a CPU one that its caches hold. For 2 and 4 bits the codes of one byte
go to separate planes, which permutes K; permuting the activations' columns alike costs less than interleaving the weight.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.linear import in_stretches, input_grad, linear
from torchq.kernels.registration import register_op


def wna16_ref(
    x: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    """Compute what :func:`wna16` computes, in plain PyTorch, one whole weight at a time, on any device."""
    weight = dequantize_wna16(weight_packed, weight_scale, weight_zero_point, num_bits, group_size, x.shape[-1])
    return F.linear(x, weight.to(x.dtype), bias)


def dequantize_wna16(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    num_bits: int,
    group_size: int,
    in_features: int,
) -> Tensor:
    """Return the weight [N, K] in scale's dtype. Arguments as in :func:`wna16`; K = ``in_features``."""
    n, num_groups = weight_scale.shape
    codes = _unpack_rows(weight_packed, num_bits, in_features).to(weight_scale.dtype)
    groups = codes.view(n, num_groups, -1)
    if weight_zero_point is not None:
        zero_point = _unpack_rows(weight_zero_point.t(), num_bits, n).t().to(weight_scale.dtype)
        groups = groups - zero_point.unsqueeze(-1)
    return (groups * weight_scale.unsqueeze(-1)).view(n, in_features)


def _unpack_rows(packed: Tensor, num_bits: int, num_codes: int) -> Tensor:
    """[N, W] int32 -> signed codes [N, num_codes] int32: a literal reading of the bit stream."""
    start = torch.arange(num_codes, device=packed.device) * num_bits
    word, shift = start // 32, (start % 32).to(torch.int64)
    stream = packed.to(torch.int64) & 0xFFFFFFFF
    following = (word + 1).clamp_max(packed.shape[1] - 1)
    codes = (stream[:, word] >> shift) | (stream[:, following] << (32 - shift))
    return ((codes & ((1 << num_bits) - 1)) - (1 << (num_bits - 1))).to(torch.int32)


@register_op("torchq::wna16")
def wna16(
    x: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    """Multiply activations by the transpose of a packed integer weight.

    Args:
        x: Activations, [..., K], float16, bfloat16 or float32; any strides.
        weight_packed: [N, ceil(K num_bits / 32)] int32.
        weight_scale: [N, G] floating point, finite and nonzero; may be negative.
        weight_zero_point: [ceil(N num_bits / 32), G] int32, or None (symmetric).
        bias: [N] of x's dtype, or None.
        num_bits: 2 to 8.
        group_size: Weights along K that share a scale: K / G.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    _check_wna16_args(x, weight_packed, weight_scale, weight_zero_point, bias, num_bits, group_size)
    n, k = weight_packed.shape[0], x.shape[-1]
    weight_packed = weight_packed.contiguous()
    planes = {2: 4, 4: 2, 8: 1}.get(num_bits, 1)
    tokens = x.reshape(-1, k)
    if planes > 1 and group_size % planes == 0:
        tokens = tokens.unflatten(1, (k // planes, planes)).transpose(1, 2).reshape(-1, k)

    def part(tokens: Tensor, rows: slice) -> Tensor:
        scale = weight_scale[rows]
        zero_point = None
        if weight_zero_point is not None:
            words = weight_zero_point[rows.start * num_bits // 32 : -(-rows.stop * num_bits // 32)]
            zero_point = _unpack_rows(words.t(), num_bits, scale.shape[0]).t()
        codes = _unpack_planes(weight_packed[rows], num_bits, group_size, k)
        weight = _apply_scale(codes, scale, zero_point, x.dtype)
        return linear(tokens, weight, None if bias is None else bias[rows])

    y = in_stretches(tokens, n, 64, part)  # zero points of a tile start on a word
    return y.view(*x.shape[:-1], n)


def _unpack_planes(packed: Tensor, num_bits: int, group_size: int, k: int) -> Tensor:
    """Unpack a tile of rows to [N, P, G, S] int8: P planes, each with every P-th code of a row in order."""
    n, num_groups = packed.shape[0], k // group_size
    planes = {2: 4, 4: 2, 8: 1}.get(num_bits, 0)
    if planes == 0 or group_size % planes or (k * num_bits) % 8:
        codes = _unpack_rows(packed, num_bits, k)
        return codes.to(torch.int8).view(n, 1, num_groups, group_size)
    stream = packed.view(torch.uint8)[:, : k // planes]
    half = 1 << (num_bits - 1)
    if planes == 1:
        return (stream ^ half).view(torch.int8).view(n, 1, num_groups, group_size)
    codes = torch.empty(n, planes, k // planes, dtype=torch.int8, device=packed.device)
    mask = (1 << num_bits) - 1
    for plane in range(planes):
        target = codes[:, plane].view(torch.uint8)
        torch.bitwise_right_shift(stream, plane * num_bits, out=target) if plane else target.copy_(stream)
        if plane < planes - 1:
            target &= mask
    return codes.sub_(half).view(n, planes, num_groups, group_size // planes)


def _apply_scale(codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, P, G, S] int8 codes -> [N, P G S] weights of ``dtype``, rounded to scale's dtype first."""
    weight = codes.to(scale.dtype)
    if zero_point is not None:
        weight -= zero_point[:, None, :, None].to(scale.dtype)
    weight *= scale[:, None, :, None]
    return weight.flatten(1).to(dtype)


@torch.library.register_fake("torchq::wna16")
def _(x, weight_packed, weight_scale, weight_zero_point, bias, num_bits, group_size):
    return x.new_empty(*x.shape[:-1], weight_packed.shape[0])


@register_op("torchq::wna16_input_grad")
def wna16_input_grad(
    grad_y: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    num_bits: int,
    group_size: int,
) -> Tensor:
    """Return the gradient [..., K] of activations from that of outputs, grad_y [..., N]; the rest as for :func:`wna16`."""
    n, num_groups = weight_scale.shape
    zero_point = None if weight_zero_point is None else _unpack_rows(weight_zero_point.t(), num_bits, n).t()

    def part(grads: Tensor, columns: slice) -> Tensor:
        width = columns.stop - columns.start
        packed = weight_packed[:, columns.start * num_bits // 32 : -(-columns.stop * num_bits // 32)].contiguous()
        groups = slice(columns.start // group_size, -(-columns.stop // group_size))
        codes = _unpack_planes(packed, num_bits, min(group_size, width), width)
        zeros = None if zero_point is None else zero_point[:, groups]
        product = linear(grads, _apply_scale(codes, weight_scale[:, groups], zeros, grads.dtype).t())
        return product.unflatten(1, (codes.shape[1], -1)).transpose(1, 2).flatten(1)

    unit = 32 if num_groups == 1 else math.lcm(32, group_size)
    return input_grad(grad_y, num_groups * group_size, unit, part)


@torch.library.register_fake("torchq::wna16_input_grad")
def _(grad_y, weight_packed, weight_scale, weight_zero_point, num_bits, group_size):
    return grad_y.new_empty(*grad_y.shape[:-1], weight_scale.shape[1] * group_size)


def _check_wna16_args(
    x: Tensor,
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a 0-D tensor")
    if not 2 <= num_bits <= 8:
        raise ValueError(f"num_bits must be 2 to 8, got {num_bits}")
    n, k = weight_packed.shape[0], x.shape[-1]
    if weight_packed.dtype != torch.int32 or weight_packed.shape != (n, -(-k * num_bits // 32)):
        raise ValueError(
            f"weight_packed must be int32 [N, {-(-k * num_bits // 32)}] for {k} in_features at {num_bits} bits, "
            f"got {weight_packed.dtype} {list(weight_packed.shape)}"
        )
    if group_size <= 0 or k % group_size or weight_scale.shape != (n, k // group_size):
        raise ValueError(f"weight_scale must be [{n}, {k} / group_size={group_size}], got {list(weight_scale.shape)}")
    if not weight_scale.dtype.is_floating_point:
        raise ValueError(f"weight_scale must be floating point, got {weight_scale.dtype}")
    if weight_zero_point is not None:
        shape = (-(-n * num_bits // 32), k // group_size)
        if weight_zero_point.dtype != torch.int32 or weight_zero_point.shape != shape:
            got = f"{weight_zero_point.dtype} {list(weight_zero_point.shape)}"
            raise ValueError(f"weight_zero_point must be int32 {list(shape)}, packed along N, got {got}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} [{n}], as x, got {bias.dtype} {list(bias.shape)}")
