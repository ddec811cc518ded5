"""Weight-only integer matmul on GPUs: 16-bit activations times 2-, 4- or 8-bit weights, decoded in registers.

Shapes: M tokens, N out_features, K in_features, G = K / group_size. With b = ``num_bits``, a *block* is the 512 / b columns of
one row that fill 16 words, in J = 16 / b slices of 32 columns. Layout of the words (*pair-planar*): [K / block, N, 16] int32;
column 32 j + 2 r + h of a block (slice j, 0 <= r < 16, h in {0, 1}) is in word r::

    b = 4:  bits  31..28    27..24    23..20    19..16    15..12    11..8     7..4      3..0
            j, h   3, 1      2, 1      1, 1      0, 1      3, 0      2, 0      1, 0      0, 0

so one shift and one mask give two neighbours along K in the halves of a register, which is what a tensor core's operand holds:
a slice of the weight needs no exchange between threads, and the activations beside it are 32 neighbouring columns. The words of a
block's rows lie together: whatever the tile, a program reads one stretch of memory per block. Codes are stored with 2^(b-1)
added; columns past K hold that, code 0. Scales and zero points lie transposed, [G, N].

Decode, without a conversion: for float16 ``0x6400 | code`` is 1024 + code; for bfloat16 ``0x4300 | code`` is 128 + code (up to 4
bits), and for 8 bits ``0x4B000000 | code`` is 2^23 + code in float32. Then, with the weights as the left operand,

    y[m, n] = sum_g scale[g, n] (sum_{k in g} (code[n, k] - 2^(b-1)) x[m, k]  -  zero_point[g, n] sum_{k in g} x[m, k])

in float32: scales touch sums and not weights, which is both less work and more exact than rounding each weight to 16 bits.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from torchq.kernels.dispatch import Tile, num_splits, tile_for
from torchq.kernels.registration import register_op

NUM_BITS = (2, 4, 8)  # that share this form
_WORDS = 16  # of a block in each row
_SLICE = 32  # columns of a slice
REDUCE_BLOCK = 1024  # outputs of one program of the kernel that adds parts
DEQUANTIZE_ROWS = 64  # of a weight, in one program of the kernel that dequantizes
_DEQUANTIZED_WEIGHTS = 1 << 26  # weights dequantized at a time for many tokens: 128 MiB


def block_size(num_bits: int) -> int:
    """Columns of a block."""
    return 32 * _WORDS // num_bits


def can_hold(num_bits: int, group_size: int, in_features: int) -> bool:
    """Whether this layout can hold a weight: 2, 4 or 8 bits; groups of a multiple of 32, or one per row."""
    return num_bits in NUM_BITS and (group_size % _SLICE == 0 or group_size == in_features)


def kind_of(num_bits: int, group_size: int, has_zeros: bool) -> str:
    """The weight's kind in the dispatch table: ``w4``, or ``w4_fine`` where groups are small or have zero points."""
    return f"w{num_bits}_fine" if has_zeros or group_size < 128 else f"w{num_bits}"


# ------------------------------------------------------------------------------------------------------------------- layout


def pack_words(q: Tensor, num_bits: int) -> Tensor:
    """Codes [N, K] int8 -> words [K / block, N, 16] int32, K padded to whole blocks."""
    (n, k), block = q.shape, block_size(num_bits)
    blocks = -(-k // block)
    codes = F.pad(q, (0, blocks * block - k)) + (1 << (num_bits - 1))  # wraps for 8 bits
    codes = codes.view(n, blocks, 16 // num_bits, _WORDS, 2).permute(1, 0, 3, 2, 4)  # [blocks, N, 16, J, 2]
    words = torch.zeros(blocks, n, _WORDS, dtype=torch.int32, device=q.device)
    for j in range(codes.shape[3]):
        for h in range(2):
            words |= (codes[..., j, h].to(torch.int32) & ((1 << num_bits) - 1)) << (num_bits * j + 16 * h)
    return words


def unpack_words(words: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Words [K / block, N, 16] int32 -> codes [N, K] int8. The inverse of :func:`pack_words`, bit for bit."""
    blocks, n, _ = words.shape
    mask, half = (1 << num_bits) - 1, 1 << (num_bits - 1)
    codes = torch.empty(n, blocks, 16 // num_bits, _WORDS, 2, dtype=torch.int8, device=words.device)
    for j in range(codes.shape[2]):
        for h in range(2):
            codes[:, :, j, :, h] = (((words >> (num_bits * j + 16 * h)) & mask) - half).to(torch.int8).transpose(0, 1)
    return codes.view(n, blocks * block_size(num_bits))[:, :in_features].contiguous()


# ------------------------------------------------------------------------------------------------------------------ reference


def wna16_triton_ref(
    x: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int, group_size: int
) -> Tensor:
    """Compute what :func:`wna16_triton` computes, in plain PyTorch, on any device."""
    weight = dequantize_words_ref(words, scale, zero_point, num_bits, group_size, x.shape[-1], x.dtype)
    return F.linear(x, weight, bias)


def dequantize_words_ref(
    words: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, group_size: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Return the weight [N, K] in ``dtype``, rounded to scale's dtype first, as every reader of the format computes it."""
    codes = unpack_words(words, num_bits, in_features).to(scale.dtype).unflatten(1, (-1, group_size))
    if zero_point is not None:
        codes = codes - zero_point.t().unsqueeze(2).to(scale.dtype)
    return (codes * scale.t().unsqueeze(2)).flatten(1).to(dtype)


# -------------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _decode(words, j: tl.constexpr, NUM_BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Slice j of words [BLOCK_N, 16]: codes less 2^(NUM_BITS - 1), [BLOCK_N, 32] DTYPE."""
    if tl.bfloat16 == DTYPE and NUM_BITS == 8:
        low = ((words >> (8 * j)) & 0xFF) | 0x4B000000
        high = ((words >> (8 * j + 16)) & 0xFF) | 0x4B000000
        both = tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)) - 8388736.0
        return both.reshape(words.shape[0], 2 * words.shape[1]).to(tl.bfloat16)
    else:
        mask: tl.constexpr = ((1 << NUM_BITS) - 1) * 0x10001
        magic: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
        offset: tl.constexpr = (128.0 if tl.bfloat16 == DTYPE else 1024.0) + (1 << (NUM_BITS - 1))
        pair = ((words >> (NUM_BITS * j)) & mask) | magic
        low = (pair & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        return (tl.join(low, high).reshape(words.shape[0], 2 * words.shape[1]) - offset).to(DTYPE)


@triton.jit(do_not_specialize=["M", "num_blocks", "splits"])
def _wna16_kernel(
    x_ptr, words_ptr, scale_ptr, zero_ptr, sums_ptr, bias_ptr, y_ptr,
    M, N, K, num_blocks, splits, stride_xm,
    NUM_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, SLICES: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    RAGGED_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens, BLOCK_N rows, every ``splits``-th block of columns. GROUP_SIZE 0: one group per row."""
    BLOCK_K: tl.constexpr = 512 // NUM_BITS
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    n64 = tl.zeros((), tl.int64) + N  # which is a constant where it is 1
    offs_k = tl.arange(0, 32)
    mask_m = offs_m < M
    rows = tl.minimum(offs_n, N - 1)  # past the end the last one is computed again, and not stored
    x_ptrs = x_ptr + offs_m[None, :] * stride_xm + offs_k[:, None]
    words_ptrs = words_ptr + rows[:, None] * 16 + tl.arange(0, 16)[None, :]

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(split, num_blocks, splits):
        words = tl.load(words_ptrs + block * n64 * 16, eviction_policy="evict_first")
        for first in tl.static_range(0, 16 // NUM_BITS, SLICES):  # the slices of one group
            part = acc if GROUP_SIZE == 0 else tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for j in tl.static_range(first, first + SLICES):
                weight = _decode(words, j, NUM_BITS, x_dtype)
                column = block * BLOCK_K + 32 * j
                mask = mask_m[None, :]
                if RAGGED_K:
                    mask = mask & (column + offs_k < K)[:, None]
                x = tl.load(x_ptrs + column, mask=mask, other=0.0, eviction_policy="evict_last")
                part = tl.dot(weight, x, part)
            if GROUP_SIZE == 0:
                acc = part
            else:
                start = block * BLOCK_K + 32 * first
                group = start // GROUP_SIZE
                if RAGGED_K:  # past the last group x is 0
                    group = tl.minimum(group, (K - 1) // GROUP_SIZE)
                scale = tl.load(scale_ptr + group * n64 + rows).to(tl.float32)
                if HAS_ZEROS:
                    zero = tl.load(zero_ptr + group * n64 + rows).to(tl.float32)
                    counts = mask_m
                    if RAGGED_K or GROUP_SIZE > 32 * SLICES:  # once for each group
                        counts = counts & (start == group * GROUP_SIZE) & (start < K)
                    sums = tl.load(sums_ptr + group * M + offs_m, mask=counts, other=0.0)
                    part -= zero[:, None] * sums[None, :]
                acc += part * scale[:, None]
    if GROUP_SIZE == 0:
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + rows).to(tl.float32)
            sums = tl.load(sums_ptr + offs_m, mask=mask_m & (split == 0), other=0.0)
            acc -= zero[:, None] * sums[None, :]
        acc *= tl.load(scale_ptr + rows).to(tl.float32)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    y_ptrs = y_ptr + split * M * n64 + offs_m[None, :] * n64 + offs_n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m[None, :] & (offs_n < N)[:, None])


@triton.jit(do_not_specialize=["M", "splits"])
def _reduce_kernel(
    parts_ptr, bias_ptr, y_ptr, M, N, splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the parts [splits, M, N], always in one order, and add the bias."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = M.to(tl.int64) * N
    mask = offs < size
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        acc += tl.load(parts_ptr + split * size + offs, mask=mask, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _dequantize_kernel(
    words_ptr, scale_ptr, zero_ptr, weight_ptr, first_row, num_rows, N, K,
    NUM_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one block of BLOCK_N rows. GROUP_SIZE 0: one group per row."""
    BLOCK_K: tl.constexpr = 512 // NUM_BITS
    CODE: tl.constexpr = (1 << NUM_BITS) - 1
    scale_dtype: tl.constexpr = scale_ptr.dtype.element_ty
    block = tl.program_id(0).to(tl.int64)
    out_rows = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_n = first_row + out_rows
    offs_k = tl.arange(0, 32)
    mask_n = out_rows < num_rows
    words_ptrs = words_ptr + (block * N + offs_n)[:, None] * 16 + tl.arange(0, 16)[None, :]
    words = tl.load(words_ptrs, mask=mask_n[:, None], other=0, eviction_policy="evict_first")
    for j in tl.static_range(16 // NUM_BITS):
        start = block * BLOCK_K + 32 * j
        group = tl.minimum(start, K - 1) // GROUP_SIZE if GROUP_SIZE else start * 0
        scale = tl.load(scale_ptr + group * N + offs_n, mask=mask_n, other=0.0)
        low = (words >> (NUM_BITS * j)) & CODE
        high = (words >> (NUM_BITS * j + 16)) & CODE
        codes = tl.join(low, high).reshape(BLOCK_N, 32) - (1 << (NUM_BITS - 1))
        if HAS_ZEROS:
            codes -= tl.load(zero_ptr + group * N + offs_n, mask=mask_n, other=0).to(tl.int32)[:, None]
        weight = (codes.to(tl.float32) * scale.to(tl.float32)[:, None]).to(scale_dtype)
        weight_ptrs = weight_ptr + out_rows[:, None] * K + (start + offs_k)[None, :]
        out = weight.to(weight_ptr.dtype.element_ty)
        tl.store(weight_ptrs, out, mask=mask_n[:, None] & (start + offs_k < K)[None, :])


# ------------------------------------------------------------------------------------------------------------------- launchers


def matmul_words(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    tile: Tile,
    splits: int,
) -> Tensor:
    """Launch the kernel on tokens [M, K], rows contiguous; return [M, N] of their dtype."""
    (m, k), (num_blocks, n, _) = x.shape, words.shape
    group_size = 0 if group_size == k else group_size
    sums = x  # any pointer
    if zero_point is not None:
        sums = x.unflatten(1, (-1, group_size or k)).sum(2, dtype=torch.float32).t().contiguous()
    y = x.new_empty(m, n)
    parts = y if splits == 1 else x.new_empty(splits, m, n, dtype=torch.float32)
    ragged = k % block_size(num_bits) != 0
    fixed = constants(
        num_bits, group_size, tile, has_zeros=zero_point is not None, has_bias=bias is not None and splits == 1, ragged_k=ragged
    )
    zeros, bias_or_any = scale if zero_point is None else zero_point, y if bias is None else bias
    with _on(x.device):
        _wna16_kernel[(triton.cdiv(m, tile.block_m), triton.cdiv(n, tile.block_n), splits)](
            x, words, scale, zeros, sums, bias_or_any, parts, m, n, k, num_blocks, splits, x.stride(0), **fixed,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if splits > 1:
            _reduce_kernel[(triton.cdiv(m * n, REDUCE_BLOCK),)](
                parts, y if bias is None else bias, y, m, n, splits, HAS_BIAS=bias is not None, BLOCK=REDUCE_BLOCK
            )  # fmt: skip
    return y


def constants(
    num_bits: int, group_size: int, tile: Tile, *, has_zeros: bool, has_bias: bool, ragged_k: bool
) -> dict[str, object]:
    """The matmul kernel's constexpr arguments; ``group_size`` 0: one group per row."""
    return {
        "NUM_BITS": num_bits,
        "GROUP_SIZE": group_size,
        "SLICES": math.gcd(group_size, block_size(num_bits)) // _SLICE if group_size else 16 // num_bits,
        "HAS_ZEROS": has_zeros,
        "HAS_BIAS": has_bias,
        "RAGGED_K": ragged_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


def dequantize_words(
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    num_bits: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
    rows: slice = slice(None),
) -> Tensor:
    """As :func:`dequantize_words_ref`, of some rows, in one launch of a Triton kernel."""
    num_blocks, n, _ = words.shape
    first, stop, _ = rows.indices(n)
    weight = torch.empty(stop - first, in_features, dtype=dtype, device=words.device)
    with _on(words.device):
        _dequantize_kernel[(num_blocks, triton.cdiv(stop - first, DEQUANTIZE_ROWS))](
            words, scale, scale if zero_point is None else zero_point, weight, first, stop - first, n, in_features,
            NUM_BITS=num_bits,
            GROUP_SIZE=0 if group_size == in_features else group_size,
            HAS_ZEROS=zero_point is not None,
            BLOCK_N=DEQUANTIZE_ROWS,
            num_warps=4,
        )  # fmt: skip
    return weight


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


# ------------------------------------------------------------------------------------------------------------------------- op


@register_op("torchq::wna16_triton")
def wna16_triton(
    x: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int, group_size: int
) -> Tensor:
    """Multiply activations by the transpose of a weight in words.

    Few tokens are multiplied by weights decoded in registers; for many the weight is dequantized, a stretch of rows at a time,
    and multiplied by the library's kernel, as wider activations always are.

    Args:
        x: Activations, [..., K], float16, bfloat16, float32 or float64; any strides.
        words: [K / block, N, 16] int32, from :func:`pack_words`.
        scale: [G, N] floating point, finite and nonzero; may be negative.
        zero_point: [G, N] int8, or None (symmetric).
        bias: [N] of x's dtype, or None.
        num_bits: 2, 4 or 8.
        group_size: Weights along K that share a scale, a multiple of 32 or K.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    _check_args(x, words, scale, zero_point, bias, num_bits, group_size)
    k, n = x.shape[-1], words.shape[1]
    bias = None if bias is None else bias.contiguous()
    tokens = x.reshape(-1, k)
    if tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    m = tokens.shape[0]
    if m == 0 or n == 0:
        return x.new_empty(*x.shape[:-1], n)
    tile = None if x.dtype.itemsize > 2 else tile_for(x.device, kind_of(num_bits, group_size, zero_point is not None), m)
    if tile is not None:
        splits = num_splits(x.device, tile, m, n, words.shape[0])
        y = matmul_words(tokens, words, scale, zero_point, bias, num_bits, group_size, tile, splits)
    else:
        y = _dequantize_and_multiply(tokens, words, scale, zero_point, bias, num_bits, group_size)
    return y.view(*x.shape[:-1], n).to(x.dtype)  # autocast reaches F.linear


def _dequantize_and_multiply(
    x: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int, group_size: int
) -> Tensor:
    k, n = x.shape[1], words.shape[1]
    step = max(_DEQUANTIZED_WEIGHTS // k // 128 * 128, 128)
    y = x.new_empty(x.shape[0], n)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        weight = dequantize_words(words, scale, zero_point, num_bits, group_size, k, x.dtype, rows)
        part = F.linear(x, weight, None if bias is None else bias[rows])
        if step >= n:
            return part
        y[:, rows] = part
    return y


@torch.library.register_fake("torchq::wna16_triton")
def _(x, words, scale, zero_point, bias, num_bits, group_size):
    return x.new_empty(*x.shape[:-1], words.shape[1])


def _check_args(
    x: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int, group_size: int
) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a 0-D tensor")
    if num_bits not in NUM_BITS:
        raise ValueError(f"num_bits must be one of {NUM_BITS}, got {num_bits}")
    k = x.shape[-1]
    blocks = -(-k // block_size(num_bits))
    if words.dtype != torch.int32 or words.ndim != 3 or words.shape[0] != blocks or words.shape[2] != _WORDS:
        got = f"{words.dtype} {list(words.shape)}"
        raise ValueError(f"words must be int32 [{blocks}, N, {_WORDS}] for {k} in_features at {num_bits} bits, got {got}")
    n = words.shape[1]
    if group_size <= 0 or k % group_size or not can_hold(num_bits, group_size, k):
        raise ValueError(f"group_size must be a multiple of {_SLICE} that divides in_features={k}, or {k}, got {group_size}")
    if scale.shape != (k // group_size, n) or not scale.dtype.is_floating_point:
        raise ValueError(f"scale must be floating point [{k // group_size}, {n}], got {scale.dtype} {list(scale.shape)}")
    if zero_point is not None and (zero_point.shape != scale.shape or zero_point.dtype != torch.int8):
        raise ValueError(f"zero_point must be int8 {list(scale.shape)}, got {zero_point.dtype} {list(zero_point.shape)}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} [{n}], as x, got {bias.dtype} {list(bias.shape)}")
    for name, tensor in (("words", words), ("scale", scale), ("zero_point", zero_point), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}: move one of them, .to({str(x.device)!r})")
        if tensor is not None and name != "bias" and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
