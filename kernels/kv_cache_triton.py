"""Quantize tokens into a KV cache, and attend to it, in Triton; ``kv_cache.py`` has the layouts and the ops that call this.

:func:`append_triton` is one launch for keys and values. :func:`attention_triton` is two: parts of the cache side by side
(``kv_attention_triton.py``), and their sum, always in one order. No launcher reads a number from the device: where tokens go, and
how many are stored, the kernels find out; the number of parts depends on sizes alone. So a CUDA graph holds for any length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchq.kernels.dispatch import gpu_of
from torchq.kernels.kv_attention_triton import LOWEST, attention_kernel
from torchq.kernels.kv_extras import Part
from torchq.kernels.words_triton import _on

_TILE_BYTES = 32 << 10  # of keys and values that a program has in shared memory, twice
_PROGRAMS_PER_PROCESSOR = 4  # that splits aim for, of two warps each
_MOST_SPLITS = 128
_REDUCE_BLOCK = 32  # channels of a program that adds parts: all parts are loaded at once
_PER_WORD = {"fp8": 4, "int8": 4, "int4": 4, "16bit": 2}  # tokens of values
_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["num_new", "splits"])
def reduce_kernel(
    parts_ptr, max_ptr, sum_ptr, sinks_ptr, out_ptr, H, rep, num_new, splits, total_rows,
    DV: tl.constexpr, HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK channels of a row, the sum of all its parts. Parts of nothing are not read. SPLITS: a power of two."""
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0).to(tl.int64) // (rep * num_new)
    row = tl.program_id(0) % (rep * num_new)
    q_head = head % H * rep + row % rep
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    indices = tl.arange(0, SPLITS)
    part = head * splits * total_rows + row + indices * total_rows
    m = tl.load(max_ptr + part, mask=indices < splits, other=LOWEST)
    top = tl.max(m, 0)
    weights = tl.exp2(m - top)
    denominator = tl.sum(tl.load(sum_ptr + part, mask=indices < splits, other=0.0) * weights, 0)
    if HAS_SINKS:
        denominator += tl.exp2(tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2E - top)
    mask = (m > LOWEST)[:, None] & (channels < DV)[None, :]
    parts = tl.load(parts_ptr + part[:, None] * DV + channels[None, :], mask=mask, other=0.0)
    acc = tl.sum(parts * weights[:, None], 0)
    out = tl.where(denominator > 0, acc / denominator, 0.0)  # nothing is allowed
    out_ptrs = out_ptr + ((head // H * H * rep + q_head) * num_new + row // rep) * DV + channels
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=channels < DV)


# --------------------------------------------------------------------------------------------------------------------- append


@triton.jit
def _round_up(x):
    """The least bfloat16 number, of 2^-100 or more, that is not below x >= 0; as float32."""
    bits = (tl.maximum(x, 2.0**-100).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    """The nearest integer, of two the even one, of |x| < 2^22; int32."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _round_e4m3(x):
    """The bits of the nearest float8_e4m3fn number, of two the even one, of |x| <= 448; int32. In integers on every GPU."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = _round(magnitude.to(tl.float32, bitcast=True) * 512.0)
    return tl.where(magnitude < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _append_wide(
    x, codes_ptrs, scale_ptrs, stride_c, channels, mask, mask_t, FORMAT: tl.constexpr, STATIC: tl.constexpr
):  # fmt: skip
    """Store tokens [T, D]: as they are, or in codes of 8 bits with one scale each (which is read if STATIC)."""
    ptrs = codes_ptrs[:, None] + channels[None, :] * stride_c
    if FORMAT == "16bit":
        tl.store(ptrs, x.to(codes_ptrs.dtype.element_ty), mask=mask)
    else:
        MOST: tl.constexpr = 448.0 if FORMAT == "fp8" else 127.0
        x = x.to(tl.float32)
        if STATIC:
            scale = tl.load(scale_ptrs, mask=mask_t, other=1.0).to(tl.float32)
        else:
            scale = _round_up(tl.div_rn(tl.max(tl.abs(x), 1), MOST))
            tl.store(scale_ptrs, scale.to(scale_ptrs.dtype.element_ty), mask=mask_t)
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        scaled = tl.minimum(tl.maximum(scaled, -MOST), MOST)
        codes = _round_e4m3(scaled) if FORMAT == "fp8" else _round(scaled)
        tl.store(ptrs, codes.to(tl.int8), mask=mask)


@triton.jit
def _quantize_groups(x, scale_ptrs, zero_ptrs, stride_sg, stride_zg, mask_t, COUNT: tl.constexpr):
    """Half of the channels, [T, C] -> codes of 4 bits, [T, C] int32; stores scales and zero points of its groups of 32."""
    GROUPS: tl.constexpr = x.shape[1] // 32
    x = x.to(tl.float32).reshape(x.shape[0], GROUPS, 32)
    low = tl.minimum(tl.min(x, 2), 0.0)
    scale = _round_up(tl.div_rn(tl.maximum(tl.max(x, 2), 0.0) - low, 15.0))
    zero = tl.minimum(_round(tl.minimum(tl.div_rn(-low, scale) * 16.0, 255.0)), 255)
    groups = tl.arange(0, GROUPS)
    mask = mask_t[:, None] & (groups < COUNT)[None, :]
    tl.store(scale_ptrs[:, None] + groups[None, :] * stride_sg, scale.to(scale_ptrs.dtype.element_ty), mask=mask)
    tl.store(zero_ptrs[:, None] + groups[None, :] * stride_zg, zero.to(tl.uint8), mask=mask)
    scaled = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], x.shape)) + (zero.to(tl.float32) * 0.0625)[:, :, None]
    codes = _round(tl.minimum(tl.maximum(scaled, 0.0), 15.0))
    return codes.reshape(x.shape[0], GROUPS * 32)


@triton.jit
def _append(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, token, slot, mask_t, stride_xt, stride_xc, stride_ct, stride_cc,
    stride_sg, stride_st, stride_zg, stride_zt, FORMAT: tl.constexpr, STATIC: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Quantize tokens of a head and store them in slots: keys or values, whose codes lie along channels or along slots."""
    x_ptrs = x_ptr + token[:, None] * stride_xt
    codes_ptrs = codes_ptr + slot * stride_ct
    scale_ptrs, zero_ptrs = scale_ptr + slot * stride_st, zero_ptr + slot * stride_zt
    if FORMAT == "int4":
        HALF: tl.constexpr = D // 2
        channels = tl.arange(0, triton.next_power_of_2(HALF))
        mask = mask_t[:, None] & (channels < HALF)[None, :]
        low = tl.load(x_ptrs + channels[None, :] * stride_xc, mask=mask, other=0.0)
        high = tl.load(x_ptrs + (channels + HALF)[None, :] * stride_xc, mask=mask, other=0.0)
        COUNT: tl.constexpr = HALF // 32
        low = _quantize_groups(low, scale_ptrs, zero_ptrs, stride_sg, stride_zg, mask_t, COUNT)
        scale_ptrs, zero_ptrs = scale_ptrs + COUNT * stride_sg, zero_ptrs + COUNT * stride_zg
        high = _quantize_groups(high, scale_ptrs, zero_ptrs, stride_sg, stride_zg, mask_t, COUNT)
        ptrs = codes_ptrs[:, None] + channels.to(tl.int64)[None, :] * stride_cc
        tl.store(ptrs, (low | (high << 4)).to(tl.uint8), mask=mask)
    else:
        channels = tl.arange(0, triton.next_power_of_2(D)).to(tl.int64)
        mask = mask_t[:, None] & (channels < D)[None, :]
        x = tl.load(x_ptrs + channels[None, :] * stride_xc, mask=mask, other=0.0)
        _append_wide(x, codes_ptrs, scale_ptrs, stride_cc, channels, mask, mask_t, FORMAT, STATIC)


@triton.jit(do_not_specialize=["num_new"])
def _append_kernel(
    key_ptr, value_ptr, k_ptr, ks_ptr, kz_ptr, v_ptr, vs_ptr, vz_ptr, start_ptr, H, num_new, R,
    stride_kb, stride_kh, stride_kt, stride_kc, stride_vb, stride_vh, stride_vt, stride_vc,
    stride_kcb, stride_kch, stride_kct, stride_vcb, stride_vch, stride_vcc,
    stride_ksb, stride_ksh, stride_ksg, stride_kst, stride_kzb, stride_kzh, stride_kzg, stride_kzt,
    stride_vsb, stride_vsh, stride_vsg, stride_vst, stride_vzb, stride_vzh, stride_vzg, stride_vzt,
    KEYS: tl.constexpr, VALUES: tl.constexpr, STATIC: tl.constexpr, WRAP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T tokens of a head, of the keys or of the values."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(start_ptr) + token
    mask_t = token < num_new
    if WRAP:
        mask_t = mask_t & (token >= num_new - R)  # of more than R tokens the last R
        slot = slot % R
    else:
        mask_t = mask_t & (slot < R)
    if tl.program_id(2) == 0:
        _append(
            key_ptr + b * stride_kb + h * stride_kh, k_ptr + b * stride_kcb + h * stride_kch,
            ks_ptr + b * stride_ksb + h * stride_ksh, kz_ptr + b * stride_kzb + h * stride_kzh, token, slot, mask_t,
            stride_kt, stride_kc, stride_kct, 1, stride_ksg, stride_kst, stride_kzg, stride_kzt, KEYS, STATIC, D,
        )  # fmt: skip
    else:
        _append(
            value_ptr + b * stride_vb + h * stride_vh, v_ptr + b * stride_vcb + h * stride_vch,
            vs_ptr + b * stride_vsb + h * stride_vsh, vz_ptr + b * stride_vzb + h * stride_vzh, token, slot, mask_t,
            stride_vt, stride_vc, 1, stride_vcc, stride_vsg, stride_vst, stride_vzg, stride_vzt, VALUES, STATIC, DV,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ launchers


def append_triton(
    key: Tensor,
    value: Tensor,
    key_codes: Tensor,
    key_scale: Tensor | None,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor | None,
    value_zero: Tensor | None,
    start: Tensor,
    key_format: str,
    value_format: str,
    static_scales: bool,
    wrap: bool,
) -> None:
    """Quantize tokens and store them behind the ``start`` that are stored.

    Args:
        key: [B, H, q, D], 16 or 32 bits, any strides.
        value: [B, H, q, DV], likewise.
        key_codes: [B, H, R, D], or [B, H, R, D / 2] uint8 of 4 bits; written, as all that follow up to ``start``.
        key_scale: [B, H, G, R], or None where keys have 16 bits.
        key_zero: [B, H, G, R] uint8 of 4 bits, else None.
        value_codes: [B, H, DV, R], or [B, H, DV / 2, R] uint8 of 4 bits.
        value_scale: As ``key_scale``.
        value_zero: As ``key_zero``.
        start: Tokens stored before, a 0-dim int64 tensor on the device.
        key_format: ``"fp8"``, ``"int8"``, ``"int4"`` or ``"16bit"``.
        value_format: Likewise.
        static_scales: Whether scales of 8 bits are given: read and not written.
        wrap: Whether token i goes to slot i mod R; else what is past the last slot is dropped.
    """
    batch, heads, num_new, head_dim = key.shape
    if num_new == 0:
        return
    block = 1 if num_new == 1 else 8 if num_new <= 8 else 32
    key_codes, value_codes = _bytes(key_codes, key_format), _bytes(value_codes, value_format)
    sides = [_or(key_codes, key_scale), _or(key_codes, key_zero), _or(value_codes, value_scale), _or(value_codes, value_zero)]
    with _on(key.device):
        _append_kernel[(batch * heads, triton.cdiv(num_new, block), 2)](
            key, value, key_codes, *sides[:2], value_codes, *sides[2:], start, heads, num_new, value_codes.shape[3],
            *key.stride(), *value.stride(), *key_codes.stride()[:3], *value_codes.stride()[:3],
            *sides[0].stride(), *sides[1].stride(), *sides[2].stride(), *sides[3].stride(),
            KEYS=key_format, VALUES=value_format, STATIC=static_scales, WRAP=wrap, D=head_dim, DV=value.shape[3],
            BLOCK_T=block, num_warps=1 if block == 1 else 4,
        )  # fmt: skip


def _bytes(codes: Tensor, format: str) -> Tensor:
    """Codes as the kernels take them: without a type that Triton would not load everywhere."""
    return codes.view(torch.int8) if format == "fp8" else codes


def _or(codes: Tensor, other: Tensor | None) -> Tensor:
    """A tensor, or any where there is none."""
    return codes if other is None else other


@dataclass(frozen=True)
class Tile:
    """N rows, BLOCK_T tokens, warps and stages of the pipeline of loads."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def tile_for(rows: int, slots: int, head_dim: int, value_dim: int, key_format: str, value_format: str, itemsize: int) -> Tile:
    """The tile for ``rows`` queries on each key/value head; ``itemsize``: bytes of 16-bit (or float32) elements.

    Two tiles of keys and values fit the 99 KB of shared memory of the smallest GPUs. With two warps the compiler keeps to
    mma.sync on every GPU (``benchmarks/static_kernels.py``); more rows than these would spill.
    """
    size = {"fp8": 1.0, "int8": 1.0, "int4": 0.5, "16bit": float(itemsize)}
    of_token = _padded(head_dim) * size[key_format] + _padded(value_dim) * size[value_format]
    tokens = 64
    while tokens > 32 and (tokens > slots or tokens * of_token > _TILE_BYTES):
        tokens //= 2
    stages = 3 if tokens * of_token <= _TILE_BYTES else 1
    few = rows <= 8 or "int4" in (key_format, value_format) or max(head_dim, value_dim) > 128
    return Tile(8 if few else 16, tokens, tokens // 32, stages)


def _padded(dim: int) -> int:
    return triton.next_power_of_2(dim)


def num_splits(device: torch.device, slots: int, programs: int, tile: Tile) -> int:
    """Into how many parts a cache of ``slots`` is split, where there would be ``programs`` without: all processors get some."""
    gpu = gpu_of(device)
    wanted = _PROGRAMS_PER_PROCESSOR * (gpu.num_processors if gpu is not None else 1)
    return max(1, min(_MOST_SPLITS, triton.cdiv(slots, tile.tokens), wanted // programs))


def attention_triton(
    query: Tensor,
    key_codes: Tensor,
    key_scale: Tensor | None,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor | None,
    value_zero: Tensor | None,
    length: Tensor,
    mask: Tensor | None,
    mask_offset: Tensor,
    scaling: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    key_format: str,
    value_format: str,
    splits: int = 0,
    extra: Part | None = None,
) -> Tensor:
    """Attend to the cache; return [B, Hq, q, DV] in query's dtype.

    Args:
        query: [B, Hq, q, D], any strides: the q newest tokens.
        key_codes: As :func:`append_triton` wrote them, like all that follow up to ``length``.
        key_scale: [B, H, G, R] or None.
        key_zero: [B, H, G, R] or None.
        value_codes: [B, H, DV, R], or [B, H, DV / 2, R] of 4 bits.
        value_scale: [B, H, G, R] or None.
        value_zero: [B, H, G, R] or None.
        length: Tokens stored, the q newest among them; 0-dim int64, on the device.
        mask: [B or 1, Hq or 1, q, L]: bool (True: allowed) or floating (added to scores); None: causal.
        mask_offset: Position of the mask's first column, 0-dim int64.
        scaling: Factor of scores, > 0.
        softcap: c of c tanh(score / c), or 0.
        window: How many positions up to its own a query may attend to, or 0.
        sinks: [Hq], logits that only join the denominator, or None.
        key_format: ``"fp8"``, ``"int8"``, ``"int4"`` or ``"16bit"``.
        value_format: Likewise.
        splits: Parts of the cache; 0: as :func:`num_splits` says.
        extra: One more part, of what is not in the cache.
    """
    (batch, q_heads, num_new, head_dim), (heads, slots) = query.shape, value_codes.shape[1::2]
    value_dim = value_codes.shape[2] * (2 if value_format == "int4" else 1)
    rep = q_heads // heads
    out = query.new_empty(batch, q_heads, num_new, value_dim)
    tile = tile_for(
        rep * num_new, slots, head_dim, value_dim, key_format, value_format, query.element_size()
    )  # fmt: skip
    blocks = triton.cdiv(rep * num_new, tile.rows)
    splits = splits or num_splits(query.device, slots, batch * heads * blocks, tile)
    rows = blocks * tile.rows
    parts = query.new_empty(batch * heads, splits, rows, value_dim, dtype=torch.float32)
    most, sums = parts.new_empty(2, batch * heads, splits, rows)
    keys = key_codes if key_format == "16bit" else _words(key_codes, key_format)
    values = _words(value_codes, value_format)
    sides = [_or(keys, key_scale), _or(keys, key_zero), _or(values, value_scale), _or(values, value_zero)]
    dtype = next((codes.dtype for codes in (key_codes, value_codes) if codes.dtype in _TRITON_TYPES), query.dtype)
    mask_kind, mask_or_any = "none", out
    if mask is not None:
        mask_kind = "bool" if mask.dtype == torch.bool else "float"
        mask_or_any = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).expand(batch, q_heads, -1, -1)
    fixed = constants(
        tile, head_dim, value_dim, key_format, value_format, dtype, keys, values, mask_kind,
        causal=mask is None and num_new > 1, window=window > 0, softcap=softcap > 0,
    )  # fmt: skip
    with _on(query.device):
        attention_kernel[(batch * heads, splits, blocks)](
            query, keys, sides[0], sides[1], values, sides[2], sides[3], length, mask_or_any, mask_offset, parts, most, sums,
            heads, rep, num_new, slots, mask_or_any.shape[3], splits, scaling, softcap, window,
            *query.stride(), *keys.stride()[:2], *values.stride()[:3],
            *sides[0].stride(), *sides[1].stride(), *sides[2].stride(), *sides[3].stride(), *mask_or_any.stride(),
            **fixed, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if extra is not None:
            parts, most, sums = _joined((parts, most, sums), extra)
            splits += 1
        reduce_kernel[(batch * heads * rep * num_new, triton.cdiv(value_dim, _REDUCE_BLOCK))](
            parts, most, sums, out if sinks is None else sinks, out, heads, rep, num_new, splits, rows,
            DV=value_dim, HAS_SINKS=sinks is not None, SPLITS=triton.next_power_of_2(splits),
            BLOCK=_REDUCE_BLOCK, num_warps=1 if splits <= 16 else 4,
        )  # fmt: skip
    return out


def _joined(parts: Sequence[Tensor], extra: Part) -> list[Tensor]:
    """One part more, filled up to as many rows."""
    return [
        torch.cat([part, torch.cat([more, part[:, :1, more.shape[2] :]], 2)], 1) for part, more in zip(parts, extra, strict=True)
    ]


def constants(
    tile: Tile,
    head_dim: int,
    value_dim: int,
    key_format: str,
    value_format: str,
    dtype: torch.dtype,
    keys: Tensor,
    values: Tensor,
    mask: str,
    *,
    causal: bool,
    window: bool,
    softcap: bool,
) -> dict[str, object]:
    """The attention kernel's constexpr arguments, for codes as :func:`_words` gives them."""
    slots = values.shape[3] * (_PER_WORD[value_format] if values.dtype == torch.int32 else 1)
    return {
        "STRIDE_KT": keys.stride(2),
        "D": head_dim,
        "DV": value_dim,
        "KEYS": key_format,
        "VALUES": value_format,
        "DTYPE": _TRITON_TYPES[dtype],
        "N": tile.rows,
        "BLOCK_T": tile.tokens,
        "MULTIPLE": math.gcd(slots, 16),
        "RAGGED": slots % tile.tokens != 0,
        "MASKED": slots < tile.tokens,
        "KEYS_ALIGNED": keys.dtype == torch.int32,
        "VALUES_ALIGNED": values.dtype == torch.int32,
        "CAUSAL": causal,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "MASK": mask,
    }


def _words(codes: Tensor, format: str) -> Tensor:
    """Codes as int32 words along their last dimension where they lie so; else as bytes, and 16 bits as they are."""
    codes = _bytes(codes, format)
    step = 4 // codes.element_size()
    where = (codes.storage_offset(), codes.shape[-1], *codes.stride()[:-1])
    if step > 1 and all(number % step == 0 for number in where) and codes.data_ptr() % 4 == 0:
        return codes.view(torch.int32)
    return codes.view(torch.uint8) if step == 4 else codes
