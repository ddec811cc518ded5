"""Words: the layout of 2-, 4- and 8-bit weights on GPUs, and the kernels that multiply by them, decoding in registers.

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
bits), and for 8 bits ``0x4B000000 | code`` is 2^23 + code in float32. The bits of an fp8 (e4m3) value, moved to the places of
float16's or bfloat16's exponent, are the value times 2^-8 or 2^-120. Then, with the weights as the left operand,

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

from torchq.kernels.dispatch import Tile

NUM_BITS = (2, 4, 8)  # that share this form
WORDS = 16  # of a block in each row
SLICE = 32  # columns of a slice
REDUCE_BLOCK = 1024  # outputs of one program of the kernel that adds parts
DEQUANTIZE_ROWS = 64  # of a weight, in one program of the kernel that dequantizes


def block_size(num_bits: int) -> int:
    """Columns of a block."""
    return 32 * WORDS // num_bits


def can_hold(num_bits: int, group_size: int, in_features: int) -> bool:
    """Whether this layout can hold a weight: 2, 4 or 8 bits; groups of a multiple of 32, or one per row."""
    return num_bits in NUM_BITS and (group_size % SLICE == 0 or group_size == in_features)


def kind_of(num_bits: int, group_size: int, has_zeros: bool) -> str:
    """The weight's kind in the dispatch table: ``w4``, or ``w4_fine`` where groups are small or have zero points."""
    return f"w{num_bits}_fine" if has_zeros or group_size < 128 else f"w{num_bits}"


# ------------------------------------------------------------------------------------------------------------------- layout


def pack_words(q: Tensor, num_bits: int) -> Tensor:
    """Codes [N, K] int8 -> words [K / block, N, 16] int32, K padded to whole blocks."""
    (n, k), block = q.shape, block_size(num_bits)
    blocks = -(-k // block)
    codes = F.pad(q, (0, blocks * block - k)) + (1 << (num_bits - 1))  # wraps for 8 bits
    codes = codes.view(n, blocks, 16 // num_bits, WORDS, 2).permute(1, 0, 3, 2, 4)  # [blocks, N, 16, J, 2]
    words = torch.zeros(blocks, n, WORDS, dtype=torch.int32, device=q.device)
    for j in range(codes.shape[3]):
        for h in range(2):
            words |= (codes[..., j, h].to(torch.int32) & ((1 << num_bits) - 1)) << (num_bits * j + 16 * h)
    return words


def unpack_words(words: Tensor, num_bits: int, in_features: int) -> Tensor:
    """Words [K / block, N, 16] int32 -> codes [N, K] int8. The inverse of :func:`pack_words`, bit for bit."""
    blocks, n, _ = words.shape
    mask, half = (1 << num_bits) - 1, 1 << (num_bits - 1)
    codes = torch.empty(n, blocks, 16 // num_bits, WORDS, 2, dtype=torch.int8, device=words.device)
    for j in range(codes.shape[2]):
        for h in range(2):
            codes[:, :, j, :, h] = (((words >> (num_bits * j + 16 * h)) & mask) - half).to(torch.int8).transpose(0, 1)
    return codes.view(n, blocks * block_size(num_bits))[:, :in_features].contiguous()


def pack_fp8(weight: Tensor) -> Tensor:
    """Weight [N, K] float8_e4m3fn -> words [K / 64, N, 16] int32 of its bytes as they are."""
    return pack_words(weight.view(torch.int8) ^ -128, 8)  # to which 128 is added again


def unpack_fp8(words: Tensor, in_features: int) -> Tensor:
    """Words [K / 64, N, 16] int32 -> weight [N, K] float8_e4m3fn. The inverse of :func:`pack_fp8`, bit for bit."""
    return (unpack_words(words, 8, in_features) ^ -128).view(torch.float8_e4m3fn)


# ------------------------------------------------------------------------------------------------------------------ reference


def dequantize_words_ref(
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    num_bits: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
    *,
    fp8: bool = False,
) -> Tensor:
    """Return the weight [N, K] in ``dtype``, rounded to scale's dtype first, as every reader of the format computes it."""
    codes = unpack_fp8(words, in_features) if fp8 else unpack_words(words, num_bits, in_features)
    values = codes.to(scale.dtype).unflatten(1, (-1, group_size))
    if zero_point is not None:
        values = values - zero_point.t().unsqueeze(2).to(scale.dtype)
    return (values * scale.t().unsqueeze(2)).flatten(1).to(dtype)


# -------------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _decode(words, j: tl.constexpr, NUM_BITS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Slice j of words [BLOCK_N, 16] -> [BLOCK_N, 32] DTYPE: codes less 2^(NUM_BITS - 1), or fp8 (for float16 times 2^-8)."""
    if FP8:
        code = words >> (8 * j)  # a sign, 4 bits of exponent, 3 of mantissa: moved to where they belong in DTYPE
        exponent: tl.constexpr = 4 if tl.bfloat16 == DTYPE else 7
        low, high = _halves(((code << 8) & -0x7FFF8000) | ((code << exponent) & (0x7F007F << exponent)))
        weight = _join(low, high, DTYPE)
        return weight * 1.329227995784916e36 if tl.bfloat16 == DTYPE else weight  # 2^120
    elif tl.bfloat16 == DTYPE and NUM_BITS == 8:
        low = ((words >> (8 * j)) & 0xFF) | 0x4B000000
        high = ((words >> (8 * j + 16)) & 0xFF) | 0x4B000000
        both = tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)) - 8388736.0
        return both.reshape(words.shape[0], 2 * words.shape[1]).to(tl.bfloat16)
    else:
        offset: tl.constexpr = (128.0 if tl.bfloat16 == DTYPE else 1024.0) + (1 << (NUM_BITS - 1))
        mask: tl.constexpr = ((1 << NUM_BITS) - 1) * 0x10001
        magic: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
        if ASM:  # (word >> shift & mask) | magic in two instructions and its halves in none; compilers take up to six
            low, high = tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; shr.u32 t, $2, {NUM_BITS * j}; lop3.b32 t, t, {mask}, {magic}, 0xEA; mov.b32 {{$0, $1}}, t; }}",
                "=h,=h,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            low, high = _halves(((words >> (NUM_BITS * j)) & mask) | magic)
        return (_join(low, high, DTYPE) - offset).to(DTYPE)


@triton.jit
def _halves(pair):
    """The two 16-bit numbers in each word."""
    return (pair & 0xFFFF).to(tl.int16), (pair >> 16).to(tl.int16)


@triton.jit
def _join(low, high, DTYPE: tl.constexpr):
    """Bits of even and odd columns, [BLOCK_N, 16] int16 each -> [BLOCK_N, 32] DTYPE."""
    both = tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))
    return both.reshape(low.shape[0], 2 * low.shape[1])


@triton.jit(do_not_specialize=["M", "num_blocks", "splits"])
def _wna16_kernel(
    x_ptr, words_ptr, scale_ptr, zero_ptr, sums_ptr, bias_ptr, y_ptr,
    M, N, K, num_blocks, splits, stride_xm, stride_wb, stride_sg,
    NUM_BITS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr, GROUP_SIZE: tl.constexpr, SLICES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, RAGGED_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens, BLOCK_N rows, every ``splits``-th block of columns. GROUP_SIZE 0: one group per row."""
    BLOCK_K: tl.constexpr = 512 // NUM_BITS
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    FACTOR: tl.constexpr = 256.0 if FP8 and tl.float16 == x_dtype else 1.0  # of weights that are decoded to less
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    n64 = tl.zeros((), tl.int64) + N  # which is a constant where it is 1
    stride_wb = tl.zeros((), tl.int64) + stride_wb
    stride_sg = tl.zeros((), tl.int64) + stride_sg
    offs_k = tl.arange(0, 32)
    mask_m = offs_m < M
    rows = tl.minimum(offs_n, N - 1)  # past the end the last one is computed again, and not stored
    x_ptrs = x_ptr + offs_m[None, :] * stride_xm + offs_k[:, None]
    words_ptrs = words_ptr + rows[:, None] * 16 + tl.arange(0, 16)[None, :]

    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(split, num_blocks, splits):
        words = tl.load(words_ptrs + block * stride_wb, eviction_policy="evict_first")
        for first in tl.static_range(0, 16 // NUM_BITS, SLICES):  # the slices of one group
            part = acc if GROUP_SIZE == 0 else tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for j in tl.static_range(first, first + SLICES):
                weight = _decode(words, j, NUM_BITS, FP8, ASM, x_dtype)
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
                scale = tl.load(scale_ptr + group * stride_sg + rows).to(tl.float32) * FACTOR
                if HAS_ZEROS:
                    zero = tl.load(zero_ptr + group * stride_sg + rows).to(tl.float32)
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
        acc *= (tl.load(scale_ptr + rows).to(tl.float32) * FACTOR)[:, None]
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


@triton.jit(do_not_specialize=["first_row", "num_rows", "first_block"])
def _dequantize_kernel(
    words_ptr, scale_ptr, zero_ptr, weight_ptr, first_row, num_rows, first_block, K, width, stride_wb, stride_sg,
    NUM_BITS: tl.constexpr, FP8: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one block of BLOCK_N rows; ``width`` columns come out. GROUP_SIZE 0: one group per row."""
    BLOCK_K: tl.constexpr = 512 // NUM_BITS
    CODE: tl.constexpr = (1 << NUM_BITS) - 1
    scale_dtype: tl.constexpr = scale_ptr.dtype.element_ty
    out_block = tl.program_id(0).to(tl.int64)
    block = first_block + out_block
    out_rows = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_n = first_row + out_rows
    offs_k = tl.arange(0, 32)
    mask_n = out_rows < num_rows
    words_ptrs = words_ptr + block * stride_wb + offs_n[:, None] * 16 + tl.arange(0, 16)[None, :]
    words = tl.load(words_ptrs, mask=mask_n[:, None], other=0, eviction_policy="evict_first")
    for j in tl.static_range(16 // NUM_BITS):
        start = block * BLOCK_K + 32 * j
        group = tl.minimum(start, K - 1) // GROUP_SIZE if GROUP_SIZE else start * 0
        scale = tl.load(scale_ptr + group * stride_sg + offs_n, mask=mask_n, other=0.0)
        low = (words >> (NUM_BITS * j)) & CODE
        high = (words >> (NUM_BITS * j + 16)) & CODE
        codes = tl.join(low, high).reshape(BLOCK_N, 32)
        if FP8:
            values = (((codes & 0x80) << 24) | ((codes & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        else:
            codes -= 1 << (NUM_BITS - 1)
            if HAS_ZEROS:
                codes -= tl.load(zero_ptr + group * stride_sg + offs_n, mask=mask_n, other=0).to(tl.int32)[:, None]
            values = codes.to(tl.float32)
        weight = (values * scale.to(tl.float32)[:, None]).to(scale_dtype)
        columns = out_block * BLOCK_K + 32 * j + offs_k
        weight_ptrs = weight_ptr + out_rows[:, None] * width + columns[None, :]
        out = weight.to(weight_ptr.dtype.element_ty)
        tl.store(weight_ptrs, out, mask=mask_n[:, None] & (columns < width)[None, :])


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
    *,
    fp8: bool = False,
    asm: bool = False,
) -> Tensor:
    """Launch the kernel on tokens [M, K], rows contiguous; return [M, N] of their dtype.

    Args:
        x: Activations, [M, K], 16 bits.
        words: [K / block, N, 16] int32. Of its strides, and those of scale, the first is free: it may be some of a tensor's rows.
        scale: [G, N].
        zero_point: [G, N] int8 with scale's strides, or None.
        bias: [N] of x's dtype, or None.
        num_bits: 2, 4 or 8.
        group_size: A multiple of 32, or K.
        tile: From the dispatch table.
        splits: Parts of K.
        fp8: Whether codes are the bits of float8_e4m3fn values (``num_bits`` is 8).
        asm: Whether to decode with inline assembly (NVIDIA's GPUs only; the interpreter cannot).
    """
    (m, k), (num_blocks, n, _) = x.shape, words.shape
    group_size = 0 if group_size == k else group_size
    sums = x  # any pointer
    if zero_point is not None:
        sums = x.unflatten(1, (-1, group_size or k)).sum(2, dtype=torch.float32).t().contiguous()
    y = x.new_empty(m, n)
    parts = y if splits == 1 else x.new_empty(splits, m, n, dtype=torch.float32)
    ragged = k % block_size(num_bits) != 0
    fixed = constants(
        num_bits, group_size, tile, has_zeros=zero_point is not None, has_bias=bias is not None and splits == 1, ragged_k=ragged,
        fp8=fp8, asm=asm,
    )  # fmt: skip
    zeros, bias_or_any = scale if zero_point is None else zero_point, y if bias is None else bias
    with _on(x.device):
        _wna16_kernel[(triton.cdiv(m, tile.block_m), triton.cdiv(n, tile.block_n), splits)](
            x, words, scale, zeros, sums, bias_or_any, parts, m, n, k, num_blocks, splits, x.stride(0),
            words.stride(0), scale.stride(0), **fixed, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if splits > 1:
            _reduce_kernel[(triton.cdiv(m * n, REDUCE_BLOCK),)](
                parts, y if bias is None else bias, y, m, n, splits, HAS_BIAS=bias is not None, BLOCK=REDUCE_BLOCK
            )  # fmt: skip
    return y


def constants(
    num_bits: int,
    group_size: int,
    tile: Tile,
    *,
    has_zeros: bool,
    has_bias: bool,
    ragged_k: bool,
    fp8: bool = False,
    asm: bool = False,
) -> dict[str, object]:
    """The matmul kernel's constexpr arguments; ``group_size`` 0: one group per row."""
    return {
        "NUM_BITS": num_bits,
        "FP8": fp8,
        "ASM": asm,
        "GROUP_SIZE": group_size,
        "SLICES": math.gcd(group_size, block_size(num_bits)) // SLICE if group_size else 16 // num_bits,
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
    columns: slice = slice(None),
    *,
    fp8: bool = False,
) -> Tensor:
    """As :func:`dequantize_words_ref`, of some rows and columns (from a block's first on), in one launch of a Triton kernel."""
    block = block_size(num_bits)
    first, stop, _ = rows.indices(words.shape[1])
    left, right, _ = columns.indices(in_features)
    weight = torch.empty(stop - first, right - left, dtype=dtype, device=words.device)
    with _on(words.device):
        _dequantize_kernel[(triton.cdiv(right - left, block), triton.cdiv(stop - first, DEQUANTIZE_ROWS))](
            words, scale, scale if zero_point is None else zero_point, weight, first, stop - first, left // block,
            in_features, right - left, words.stride(0), scale.stride(0),
            NUM_BITS=num_bits,
            FP8=fp8,
            GROUP_SIZE=0 if group_size == in_features else group_size,
            HAS_ZEROS=zero_point is not None,
            BLOCK_N=DEQUANTIZE_ROWS,
            num_warps=4,
        )  # fmt: skip
    return weight


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
