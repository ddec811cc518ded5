"""NF4 dequantized on GPUs: the kernel behind ``torchq::dequantize_nf4``; see ``nf4.py``. On a GPU not yet measured.

A program writes TILE neighbouring values, in any rows: stretches of SPAN values, each of which lies in one block::

    packed   | 16 bytes |  ->  codes of 32 values  ->  levels, from a table of 16 in shared memory (no two of them in one bank)
    absmax   one per stretch; from its 8-bit code if it has one
    weight   | 8 x 16 bits | 8 x 16 bits | ...  -> stores of 16 bytes

The first stretch starts with a block, so that loads and stores are aligned for weights of usual sizes; what of it comes before
the first row is not stored.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchq.kernels.nf4 import DYNAMIC_LEVELS, LEVELS, NESTED_BLOCK

TILE = 8192  # values of one program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # fused, the two operations on absmax would round once
_SPAN = 64  # values that share a load of absmax, at most


@triton.jit(do_not_specialize=["first_block"], do_not_specialize_on_alignment=["absmax_ptr", "nested_scale_ptr"])
def _dequantize_nf4_kernel(
    packed_ptr, absmax_ptr, nested_scale_ptr, nested_offset_ptr, levels_ptr, dynamic_levels_ptr, weight_ptr,
    skip, first_block, num_values, num_bytes,
    BLOCK_SIZE: tl.constexpr, NESTED: tl.constexpr, NESTED_BLOCK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: TILE values, of which the first ``skip`` of all are not stored."""
    SPANS: tl.constexpr = TILE // SPAN
    tile = tl.program_id(0).to(tl.int64)
    offs_bytes = tile * (TILE // 2) + tl.arange(0, TILE // 2)
    packed = tl.load(packed_ptr + offs_bytes, mask=offs_bytes < num_bytes, other=0, eviction_policy="evict_first").to(tl.int32)
    codes = tl.join(packed >> 4, packed & 15).reshape(TILE)
    levels = tl.gather(tl.load(levels_ptr + tl.arange(0, 16)), codes, 0).reshape(SPANS, SPAN)

    spans = tile * SPANS + tl.arange(0, SPANS)
    mask_spans = spans * SPAN < num_values
    block = spans * SPAN // BLOCK_SIZE
    absmax = tl.load(absmax_ptr + block, mask=mask_spans, other=0)
    if NESTED:
        nested_scale = tl.load(nested_scale_ptr + (first_block + block) // NESTED_BLOCK, mask=mask_spans, other=0.0)
        absmax = tl.load(dynamic_levels_ptr + absmax.to(tl.int32)) * nested_scale + tl.load(nested_offset_ptr)

    offs = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    weight = (levels * absmax[:, None]).to(weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + (offs - skip), weight, mask=(offs >= skip) & (offs < num_values))


def dequantize_nf4_triton(
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
    """As :func:`torchq.kernels.nf4.dequantize_rows`, in one launch."""
    first, stop, _ = rows.indices(n)
    weight = packed.new_empty(stop - first, k, dtype=dtype)
    first_block, skip = divmod(first * k, block_size)
    num_values = stop * k - first_block * block_size
    levels, dynamic_levels = _tables(packed.device)
    nested_scale = levels if nested_scale is None else nested_scale[first_block // NESTED_BLOCK :]  # or any pointer
    with torch.cuda.device(packed.device) if packed.device.type == "cuda" else nullcontext():
        _dequantize_nf4_kernel[(triton.cdiv(num_values, TILE),)](
            packed[first_block * block_size // 2 :], absmax[first_block:], nested_scale,
            levels if nested_offset is None else nested_offset, levels, dynamic_levels, weight,
            skip, first_block % NESTED_BLOCK, num_values, triton.cdiv(num_values, 2),
            **constants(block_size, nested=nested_offset is not None), **OPTIONS,
        )  # fmt: skip
    return weight


def constants(block_size: int, *, nested: bool) -> dict[str, object]:
    """The kernel's constexpr arguments."""
    span = min(block_size, _SPAN)
    return {"BLOCK_SIZE": block_size, "NESTED": nested, "NESTED_BLOCK": NESTED_BLOCK, "SPAN": span, "TILE": TILE}


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    return LEVELS.to(device), DYNAMIC_LEVELS.to(device)
