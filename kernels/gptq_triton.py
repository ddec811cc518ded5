"""The columns of one block of GPTQ in one Triton kernel; see ``gptq.py``. On a GPU not yet measured."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from torchq.kernels.gptq import Block

BLOCK_J = 128  # the most columns of a block


@triton.jit
def _round_kernel(
    v_ptr,
    w_ptr,
    u_ptr,
    scale_ptr,
    zero_ptr,
    group_ptr,
    code_ptr,
    error_ptr,
    count,
    n,
    v_stride_j,
    u_stride_j,
    u_stride_i,
    QUANT_MIN: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: all columns of the block, for BLOCK_N rows; V stays in registers."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_J)
    inside = rows < n
    place = columns[:, None] * v_stride_j + rows[None, :]
    v = tl.load(v_ptr + place, mask=(columns < count)[:, None] & inside[None, :], other=0.0)
    for j in range(count):
        now = tl.sum(tl.where((columns == j)[:, None], v, 0.0), axis=0)
        group = tl.load(group_ptr + j).to(tl.int64)
        s = tl.load(scale_ptr + group * n + rows, mask=inside, other=1.0)
        w = tl.load(w_ptr + j * n + rows, mask=inside, other=0.0)
        code = tl.div_rn(now, s)
        z = tl.zeros_like(code)
        if HAS_ZEROS:
            z = tl.load(zero_ptr + group * n + rows, mask=inside, other=0.0)
            code += z
        code = tl.minimum(tl.maximum(code, QUANT_MIN), QUANT_MAX)
        code = (code + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest integer, halves to even
        error = w - (code - z) * s
        out = j * n + rows
        tl.store(code_ptr + out, code, mask=inside)
        tl.store(error_ptr + out, error, mask=inside)
        u = tl.load(u_ptr + j * u_stride_j + columns * u_stride_i, mask=columns < count, other=0.0)
        v += tl.where(columns > j, u, 0.0)[:, None] * error[None, :]


def launch(block: Block, *, block_n: int = 32) -> None:
    """As :func:`torchq.kernels.gptq.reference`, in one launch of a Triton kernel; at most ``BLOCK_J`` columns."""
    V, U, codes, E, zeros = block.V, block.U, block.codes, block.E, block.zeros
    count, n = V.shape
    assert count <= BLOCK_J and V.stride(1) == 1
    W, scales = block.W.contiguous(), block.scales.contiguous()
    assert codes.is_contiguous() and E.is_contiguous()
    device = V.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _round_kernel[(triton.cdiv(n, block_n),)](
            V,
            W,
            U,
            scales,
            scales if zeros is None else zeros.contiguous(),
            block.groups.to(device, torch.int32),
            codes,
            E,
            count,
            n,
            V.stride(0),
            U.stride(0),
            U.stride(1),
            QUANT_MIN=float(block.args.quant_min),
            QUANT_MAX=float(block.args.quant_max),
            HAS_ZEROS=zeros is not None,
            BLOCK_J=BLOCK_J,
            BLOCK_N=block_n,
            num_warps=4,
        )
