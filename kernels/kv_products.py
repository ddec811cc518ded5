"""Products of queries with quantized keys, and sums of quantized values, in PyTorch: for :mod:`torchq.kernels.kv_attention`.

On CPUs with AVX-512 few bfloat16 queries are multiplied by int8 codes as they are; fp8 becomes bfloat16 by moving bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels import w8a16_cpu
from torchq.kernels.kv_cache import dequantize_stored

_PACK_ROWS, _PACK_COLUMNS, _PACK_ALIGNMENT = 4, 16, 32  # what PyTorch's int8 kernel reads, see kernels/w8a16_cpu.py
ALL = slice(None)
_UP = 2.0**60  # keeps products with codes that are 2^-120 of their values away from the smallest numbers of bfloat16


@dataclass(frozen=True)
class Side:
    """Keys (or values, transposed) of some sequences and heads, in their format."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    kv_format: str

    def at(self, batch: slice, heads: slice, slots: slice, transposed: bool) -> Side:
        """Those of some slots: codes [b, h, n, D], or [b, h, D, n]."""
        first, count = slots.start, slots.stop - slots.start
        codes, scale, zero = _take(self.codes, batch, heads), _take(self.scale, batch, heads), _take(self.zero, batch, heads)
        assert codes is not None
        if count < codes.shape[3 if transposed else 2]:
            codes = codes.narrow(3 if transposed else 2, first, count)
            scale, zero = (None if t is None else t.narrow(3, first, count) for t in (scale, zero))
        return Side(codes, scale, zero, self.kv_format)


def _take(tensor: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """Some sequences and heads; the tensor itself if it is all of them (each step saved counts for few tokens)."""
    if tensor is None or (batch == ALL and heads == ALL):
        return tensor
    return tensor[batch, heads]


@dataclass(frozen=True)
class Rows:
    """Queries [b, h, rows, D]; for fast products with int8 also as the sum of two int8 tensors, ``unit`` * (128 * high + low)."""

    rows: Tensor
    quantized: Tensor | None = None  # [b, h, 2 * rows, D]: high, low
    unit: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, key_format: str) -> Rows:
        """Prepare rows for keys of a format."""
        if key_format != "int8" or rows.dtype != torch.bfloat16 or not _int8_is_fast(rows):
            return cls(rows)
        wide = rows.float()
        unit = wide.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(127.0 * 128)
        whole = wide.div_(unit).round_()
        high = (whole / 128).round_()
        return cls(rows, torch.cat([high, whole.sub_(high, alpha=128)], 2).to(torch.int8), unit)

    def at(self, batch: slice, heads: slice) -> Rows:
        """Those of some sequences and heads."""
        if batch == ALL and heads == ALL:
            return self
        quantized, unit = (None if t is None else t[batch, heads] for t in (self.quantized, self.unit))
        return Rows(self.rows[batch, heads], quantized, unit)


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 stays, also float16 on a GPU; everything else is computed in float32 (float64)."""
    narrow = dtype == torch.bfloat16 or (dtype == torch.float16 and device.type != "cpu")
    return dtype if narrow or dtype == torch.float64 else torch.float32


def products_of(rows: Rows, keys: Side) -> Tensor:
    """Inner products [b, h, rows, n] of queries with keys, float32 (float64)."""
    dtype = _compute_dtype(rows.rows.dtype, rows.rows.device)
    if rows.quantized is not None and keys.kv_format == "int8":
        return _int8_products(rows, keys)
    if keys.kv_format == "fp8" and keys.codes.device.type == "cpu" and dtype == torch.bfloat16:
        assert keys.scale is not None
        return _wide_products(rows.rows * _UP, _small_fp8(keys.codes)).mul_(keys.scale * _UP)
    stored = (keys.codes, keys.scale, keys.zero, keys.kv_format)
    return _wide_products(rows.rows.to(dtype), dequantize_stored(*stored, dtype, transposed=False))


def _wide_products(rows: Tensor, keys: Tensor) -> Tensor:
    """Products of tensors of one dtype, in no less than float32.

    A CPU rounds sums of bfloat16 products to bfloat16, which is too little for scores. What was lost comes from a second product,
    from which the first is subtracted before it is rounded.
    """
    flat, keys_t = rows.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    sums = torch.bmm(flat, keys_t)
    if sums.dtype in (torch.bfloat16, torch.float16):
        sums = sums.float().add_(torch.baddbmm(sums, flat, keys_t, beta=-1))
    return sums.view(*rows.shape[:3], -1)


def weighted_sums(weights: Tensor, values: Side, query_dtype: torch.dtype) -> Tensor:
    """Sums [b, h, rows, Dv] of values weighted by ``weights`` [b, h, rows, n]."""
    cpu_bfloat16 = query_dtype == torch.bfloat16 and weights.device.type == "cpu"
    if values.kv_format == "int8" and cpu_bfloat16 and _int8_is_fast(weights) and values.codes.shape[2] % _PACK_ROWS == 0:
        assert values.scale is not None
        return _int8_sums((weights * values.scale).to(torch.bfloat16), values.codes)
    if values.kv_format == "fp8" and cpu_bfloat16:
        assert values.scale is not None
        weighted, up = (weights * values.scale * _UP).to(torch.bfloat16), _UP
        decoded = _small_fp8(values.codes).transpose(-1, -2)
    else:
        dtype = _compute_dtype(query_dtype, weights.device)
        weighted, up = weights.to(dtype), 1.0
        decoded = dequantize_stored(values.codes, values.scale, values.zero, values.kv_format, dtype, transposed=True)
    sums = torch.bmm(weighted.flatten(0, 1), decoded.flatten(0, 1))
    return sums.to(weights.dtype).mul_(up).view(*weights.shape[:3], -1)


def _small_fp8(codes: Tensor) -> Tensor:
    """e4m3 values times 2^-120, in bfloat16: their bits moved to where bfloat16 has them (:func:`torchq.kernels.fp8.decode_fp8`).

    Processors may take those below 2^-6 (of at most 448) for 0, an error of less than 2^-14 of a token's largest value.
    """
    return codes.view(torch.int8).to(torch.int16).mul_(16).bitwise_and_(-0x7810).view(torch.bfloat16)


def _int8_is_fast(rows: Tensor) -> bool:
    """Whether PyTorch has faster kernels for products of these [b, h, rows, ...] with int8 than for those in 16 bits."""
    return rows.device.type == "cpu" and rows.shape[2] <= w8a16_cpu.MAX_NATIVE_TOKENS and _has_int8_kernels()


@functools.cache
def _has_int8_kernels() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and w8a16_cpu.is_available()


def _int8_products(rows: Rows, keys: Side) -> Tensor:
    """Products with int8 keys: exact, but for the queries' having 15 bits."""
    assert rows.quantized is not None and rows.unit is not None and keys.scale is not None
    b, h, twice, _ = rows.quantized.shape
    sums = torch.empty(b * h, twice, keys.codes.shape[2], dtype=torch.int32)
    keys_t = keys.codes.flatten(0, 1).transpose(1, 2)
    for row, head, out in zip(rows.quantized.flatten(0, 1).unbind(), keys_t.unbind(), sums.unbind(), strict=True):
        torch._int_mm(row, head, out=out)
    high, low = sums.view(b, h, 2, twice // 2, -1).unbind(2)
    return torch.add(low, high, alpha=128).mul(keys.scale.float()).mul_(rows.unit)


def _int8_sums(weights: Tensor, codes: Tensor) -> Tensor:
    """Sums [b, h, rows, D] of int8 codes [b, h, D, n] weighted by bfloat16 weights [b, h, rows, n]."""
    dim, n = codes.shape[2:]
    padded = -(-n // _PACK_COLUMNS) * _PACK_COLUMNS
    sums = []
    copy = codes.new_zeros(dim, padded) if n != padded else None
    weights = weights if n == padded else F.pad(weights, (0, padded - n))
    for row, head in zip(weights.flatten(0, 1).unbind(), codes.flatten(0, 1).unbind(), strict=True):
        if copy is not None:
            copy[:, :n] = head
            head = copy
        elif not head.is_contiguous() or head.data_ptr() % _PACK_ALIGNMENT:
            head = head.clone(memory_format=torch.contiguous_format)
        row = row if row.data_ptr() % _PACK_ALIGNMENT == 0 else row.clone()
        sums.append(torch._weight_int8pack_mm(row, head, _ones(dim)))
    return torch.stack(sums).float().view(*weights.shape[:3], dim)


@functools.cache
def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
