"""NF4: 4-bit NormalFloat with a float32 absmax per block, and its double quantization (QLoRA, arXiv 2305.14314, section 3).

Shapes: N out_features, K in_features, B = ceil(N K / block_size) blocks. A weight [N, K] is one row-major sequence, which blocks
cut without regard to rows. In each block of ``block_size`` values

    code = the nearest of 16 levels to w / absmax, halves to the lower one        w' = LEVELS[code] * absmax

The levels lie in [-1, 1]: quantiles of a normal distribution, exactly 0 among them. Values 2i and 2i + 1 share byte i::

    byte i:   bits 7..4: code of value 2i      bits 3..0: code of value 2i + 1      (the last code of an odd number is 7, level 0)

Double quantization keeps absmax as 8-bit codes: with offset = mean(absmax), in each group of 256 blocks

    absmax' = DYNAMIC_LEVELS[code] * nested_scale + offset

where nested_scale is the group's largest ``|absmax - offset|``. That is 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits per weight.

All of it is bit for bit what bitsandbytes 0.50 computes on a CPU with AVX2 (tests/golden/bitsandbytes), which says more than the
paper: blocks are multiplied by 1 / absmax, but the last block, if it is not full, is divided by it; absmax' is rounded twice; and
its code is the nearest one after rounding to a grid of 65536 steps, which on CUDA bitsandbytes does not do.

CPU: two values for each byte are looked up at once, a cache-sized stretch at a time. CUDA: ``nf4_triton.py``.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.dispatch import gpu_of
from torchq.kernels.registration import register_op

NESTED_BLOCK = 256  # absmax values that share a nested_scale
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TILE_WEIGHTS = 1 << 19  # decoded at a time outside the Triton kernel: 2 MiB of float32, and as much of indices
_LANES = 64  # parts of a tile that threads can share
_GRID_STEPS = 65535.0
_ZERO = 7  # the code of level 0
_SMALLEST_ABSMAX = 1e-38  # that is divided by

LEVELS = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    dtype=torch.float32, device="cpu",
)  # fmt: skip


def _dynamic_levels() -> Tensor:
    """The 256 levels of the dynamic 8-bit type (arXiv 1511.04561), ascending: 0, 1, and 2^i of each sign in decade i, 0 <= i < 7.

    Each operation rounds to float32, as the vector instructions of x86 CPUs do that bitsandbytes makes its table with.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.float().double()

    low, one, *decades = rounded(
        torch.tensor([0.1, 1.0, *(10.0 ** (i - 6) for i in range(7))], dtype=torch.float64, device="cpu")
    )
    magnitudes = []
    for i, decade in enumerate(decades):
        count, edge = 1 << i, torch.arange((1 << i) + 1, dtype=torch.float64, device="cpu")
        step = rounded((one - low) / count)
        edges = rounded(torch.where(2 * edge < count, low + step * edge, one - step * (count - edge)))
        magnitudes.append(rounded(rounded(edges[1:] + edges[:-1]) / 2 * decade))
    positive = torch.cat(magnitudes)
    return torch.cat([-positive.flip(0), torch.zeros_like(one)[None], positive, one[None]]).float()


DYNAMIC_LEVELS = _dynamic_levels()


# ----------------------------------------------------------------------------------------------------------------- quantize


def nf4_quantize_ref(weight: Tensor, block_size: int = 64) -> tuple[Tensor, Tensor]:
    """Quantize a weight to NF4, to the nearest level.

    Args:
        weight: [N, K], or of any other shape; float16, bfloat16 or float32, finite.
        block_size: Values that share an absmax: a power of two, 16 or more.

    Returns:
        packed: [ceil(N K / 2)] uint8.
        absmax: [B] float32. Of a block of zeros 0, or 1e-38 if it is the last block and not full.

    Raises:
        ValueError: If the dtype or ``block_size`` doesn't fit the above.
    """
    if weight.dtype not in DTYPES:
        raise ValueError(f"weight must be float16, bfloat16 or float32, got {weight.dtype}")
    _check_block_size(block_size)
    count = weight.numel()
    blocks = F.pad(weight.reshape(-1).float(), (0, -count % block_size)).view(-1, block_size)
    absmax = blocks.abs().amax(1)
    normalized = blocks * (1.0 / absmax.clamp(min=_SMALLEST_ABSMAX)).unsqueeze(1)
    if count % block_size:
        absmax[-1].clamp_(min=_SMALLEST_ABSMAX)
        normalized[-1] = blocks[-1] / absmax[-1]
    return pack_codes(_nearest(normalized.clamp_(-1, 1).view(-1)[:count], LEVELS)), absmax


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes 0 to 15, [N, K] or of any other shape, uint8 or int8: [ceil(N K / 2)] uint8."""
    flat = codes.reshape(-1).view(torch.uint8)
    flat = F.pad(flat, (0, flat.numel() % 2), value=_ZERO)
    return flat[0::2] << 4 | flat[1::2]


def unpack_codes(packed: Tensor, count: int) -> Tensor:
    """Invert :func:`pack_codes`: [count] int8."""
    return torch.stack([packed >> 4, packed & 15], 1).view(-1)[:count].view(torch.int8)


def compress_absmax(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize absmax to 8 bits: double quantization.

    Args:
        absmax: [B] float32, from :func:`nf4_quantize_ref`; B > 0.

    Returns:
        codes: [B] uint8.
        nested_scale: [ceil(B / 256)] float32.
        nested_offset: [] float32, the mean. In which order it is summed, and so its last bits, is up to the device.

    Raises:
        ValueError: If the shape or dtype doesn't fit the above.
    """
    if absmax.dtype != torch.float32 or absmax.ndim != 1 or absmax.numel() == 0:
        raise ValueError(f"absmax must be float32 [B] with B > 0, got {absmax.dtype} {list(absmax.shape)}")
    offset = absmax.mean()
    groups = F.pad(absmax - offset, (0, -absmax.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    scale = groups.abs().amax(1)
    normalized = (groups * (1.0 / scale).unsqueeze(1)).clamp_(-1, 1)
    normalized = torch.where(scale.unsqueeze(1) == 0, -1.0, normalized)  # code 0
    steps = ((normalized + 1) * 0.5 * _GRID_STEPS + 0.5).to(torch.int32)
    codes = _nearest(2.0 * steps / _GRID_STEPS - 1.0, DYNAMIC_LEVELS)
    return codes.view(-1)[: absmax.numel()].clone(), scale, offset


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """The codes, uint8, of the nearest levels; halfway between two it is the lower one."""
    levels = levels.to(values.device)
    return torch.bucketize(values, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)


# ---------------------------------------------------------------------------------------------------------------- reference


def dequantize_nf4_ref(
    packed: Tensor,
    absmax: Tensor,
    nested_scale: Tensor | None,
    nested_offset: Tensor | None,
    n: int,
    k: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what :func:`dequantize_nf4` computes, in plain PyTorch, one whole weight at a time, on any device."""
    codes = unpack_codes(packed, n * k)
    if nested_scale is not None and nested_offset is not None:
        absmax = decompress_absmax(absmax, nested_scale, nested_offset)
    values = LEVELS.to(packed.device)[codes.int()] * absmax.repeat_interleave(block_size)[: n * k]
    return values.view(n, k).to(dtype)


def decompress_absmax(codes: Tensor, nested_scale: Tensor, nested_offset: Tensor, first: int = 0) -> Tensor:
    """Codes, uint8, of some blocks from the block ``first`` on -> their absmax, float32, rounded after each operation."""
    skip, end = first % NESTED_BLOCK, first + codes.numel()
    scales = nested_scale[first // NESTED_BLOCK : -(-end // NESTED_BLOCK)]
    values = F.pad(DYNAMIC_LEVELS.to(codes.device).index_select(0, codes.int()), (skip, -end % NESTED_BLOCK))
    values.view(-1, NESTED_BLOCK).mul_(scales[:, None]).add_(nested_offset)
    return values[skip : skip + codes.numel()]


# -------------------------------------------------------------------------------------------------------------- rows of it


def dequantize_rows(
    packed: Tensor,
    absmax: Tensor,
    nested_scale: Tensor | None,
    nested_offset: Tensor | None,
    n: int,
    k: int,
    block_size: int,
    dtype: torch.dtype,
    rows: slice = slice(None),
) -> Tensor:
    """As :func:`dequantize_nf4`, of some rows; beside the result it takes a few MiB. Arguments are not checked."""
    if _has_triton(packed.device):
        from torchq.kernels.nf4_triton import dequantize_nf4_triton

        return dequantize_nf4_triton(packed, absmax, nested_scale, nested_offset, n, k, block_size, dtype, rows)
    first, stop, _ = rows.indices(n)
    weight = packed.new_empty(stop - first, k, dtype=dtype)
    flat, start, end = weight.view(-1), first * k, stop * k
    block = start // block_size
    scales = absmax[block : -(-end // block_size)]
    if nested_scale is not None and nested_offset is not None:
        scales = decompress_absmax(scales, nested_scale, nested_offset, block)
    whole, stop_whole = -(-start // block_size), end // block_size
    if whole < stop_whole:
        codes = packed[whole * block_size // 2 : stop_whole * block_size // 2].view(-1, block_size // 2)
        target = flat[whole * block_size - start : stop_whole * block_size - start].view(-1, block_size)
        decode(codes, scales[whole - block : stop_whole - block, None], target)
    for a, b in ((start, min(whole * block_size, end)), (max(whole, stop_whole) * block_size, end)):  # in blocks cut by rows
        if a < b:
            values = _pairs(packed.device)[packed[a // 2 : (b + 1) // 2].int()].view(torch.float32)
            flat[a - start : b - start] = values[a % 2 :][: b - a] * scales[a // block_size - block]
    return weight


def decode(packed: Tensor, scales: Tensor, weight: Tensor) -> None:
    """Fill a matrix of whole blocks, some rows at a time.

    Args:
        packed: [R, C / 2] uint8.
        scales: [R, C / block_size] float32, absmax.
        weight: [R, C], to be filled.
    """
    (rows, columns), blocks = weight.shape, scales.shape[1]
    step = min(max(_TILE_WEIGHTS // columns, 1), rows)
    index = torch.empty(step, columns // 2, dtype=torch.int64, device=packed.device)
    values, pairs = torch.empty_like(index), _pairs(packed.device)
    for part, scale, target in zip(packed.split(step), scales.unsqueeze(2).split(step), weight.split(step), strict=True):
        if part.shape[0] < step:
            index, values = index[: part.shape[0]], values[: part.shape[0]]
        index.copy_(part)
        lanes = _LANES if index.numel() % _LANES == 0 else 1  # a row of a gather is one thread's work
        torch.gather(pairs.expand(lanes, 256), 1, index.view(lanes, -1), out=values.view(lanes, -1))
        tile = values.view(torch.float32)
        tile.view(-1, blocks, columns // blocks).mul_(scale)
        target.copy_(tile)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Byte -> its two levels, as one number: [256] int64, which one look-up gives faster than two float32."""
    byte = torch.arange(256, device="cpu")
    return LEVELS[torch.stack([byte >> 4, byte & 15], 1)].view(torch.int64).view(-1).to(device)


@cache
def _has_triton(device: torch.device) -> bool:
    return gpu_of(device) is not None and find_spec("triton") is not None


# ----------------------------------------------------------------------------------------------------------------------- op


@register_op("torchq::dequantize_nf4")
def dequantize_nf4(
    packed: Tensor,
    absmax: Tensor,
    nested_scale: Tensor | None,
    nested_offset: Tensor | None,
    n: int,
    k: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize an NF4 weight.

    Args:
        packed: [ceil(N K / 2)] uint8, from :func:`nf4_quantize_ref`.
        absmax: [B] float32, or uint8 codes from :func:`compress_absmax`.
        nested_scale: [ceil(B / 256)] float32 if absmax is codes, else None.
        nested_offset: [] float32 if absmax is codes, else None.
        n: N.
        k: K.
        block_size: Values that share an absmax.
        dtype: float16, bfloat16 or float32: products are float32, and rounded once.

    Returns:
        [N, K] of ``dtype``.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    check_nf4_args(packed, absmax, nested_scale, nested_offset, n, k, block_size, dtype)
    return dequantize_rows(packed, absmax, nested_scale, nested_offset, n, k, block_size, dtype)


@torch.library.register_fake("torchq::dequantize_nf4")
def _(packed, absmax, nested_scale, nested_offset, n, k, block_size, dtype):
    return packed.new_empty(n, k, dtype=dtype)


def check_nf4_args(
    packed: Tensor,
    absmax: Tensor,
    nested_scale: Tensor | None,
    nested_offset: Tensor | None,
    n: int,
    k: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Raise a ValueError if these are no arguments for :func:`dequantize_nf4`."""
    _check_block_size(block_size)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    if n < 0 or k < 0:
        raise ValueError(f"n and k must not be negative, got {n} and {k}")
    if (nested_scale is None) != (nested_offset is None):
        raise ValueError("nested_scale and nested_offset must both be given, or neither")
    blocks = -(-n * k // block_size)
    required: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]
    required = {"packed": (packed, torch.uint8, (-(-n * k // 2),))}
    required["absmax"] = (absmax, torch.float32 if nested_scale is None else torch.uint8, (blocks,))
    if nested_scale is not None and nested_offset is not None:
        required["nested_scale"] = (nested_scale, torch.float32, (-(-blocks // NESTED_BLOCK),))
        required["nested_offset"] = (nested_offset, torch.float32, ())
    for name, (tensor, wanted, shape) in required.items():
        if tensor.dtype != wanted or tensor.shape != shape:
            got, size = f"{tensor.dtype} {list(tensor.shape)}", f"[{n}, {k}] in blocks of {block_size}"
            raise ValueError(f"{name} must be {wanted} {list(shape)} for a weight {size}, got {got}")
        if tensor.device != packed.device:
            raise ValueError(
                f"{name} is on {tensor.device}, packed on {packed.device}: move one of them, .to({str(packed.device)!r})"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _check_block_size(block_size: int) -> None:
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, 16 or more, got {block_size}")
