"""The columns of one block of GPTQ: round one, take its error to those after it, go on.

``reference`` is a loop of PyTorch calls for each column; on CUDA they would be thousands of launches for a weight, and the
kernel in ``gptq_triton.py`` does a block in one. Shapes: J columns of a block, B weights that are rounded at once (each with a
factor of its own), N rows, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.scheme import QuantArgs

INNER = 16  # columns between two matmuls with the errors of the block


@dataclass(frozen=True)
class Block:
    """What rounding a block of columns takes and gives.

    Attributes:
        V: [J, B, N] float32, the columns made up for the errors of all blocks before; may be overwritten.
        W: [J, N] float32, the columns.
        U: [B, J, J] float32, the block on the diagonal of each factor (unit upper triangular).
        scales: [G, N] float32.
        zeros: [G, N] float32, or None.
        groups: [J] int64, which group a column belongs to; on the CPU.
        args: Least and largest code.
        codes: [J, B, N] float32, contiguous, written: the codes.
        E: [J, B, N] float32, contiguous, written: W less what the codes stand for.
    """

    V: Tensor
    W: Tensor
    U: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    args: QuantArgs
    codes: Tensor
    E: Tensor


def rounding_of(device: torch.device) -> Callable[[Block], None]:
    """Return the Triton kernel's launcher for CUDA, else :func:`reference`."""
    if device.type == "cuda":
        from torchq.kernels.gptq_triton import launch

        return launch
    return reference


def reference(block: Block) -> None:
    """Round the columns of a block by a loop of PyTorch calls."""
    V, W, U, scales, zeros, codes, E = block.V, block.W, block.U, block.scales, block.zeros, block.codes, block.E
    quant_min, quant_max = block.args.quant_min, block.args.quant_max
    count, index = V.shape[0], block.groups.tolist()
    spread = U.permute(1, 2, 0).unsqueeze(3)  # [j, i, B, 1]
    for first in range(0, count, INNER):
        last = min(first + INNER, count)
        v = make_up(V[first:last], U[:, :first, first:last], E[:first])
        for j in range(first, last):
            s, code, error = scales[index[j]], codes[j], E[j]
            torch.div(v[j - first], s, out=code)
            if zeros is None:
                code.round_().clamp_(quant_min, quant_max)
                torch.addcmul(W[j], code, s, value=-1, out=error)
            else:
                z = zeros[index[j]]
                code.add_(z).round_().clamp_(quant_min, quant_max)
                torch.addcmul(W[j], code - z, s, value=-1, out=error)
            if j + 1 < last:
                v[j + 1 - first :].addcmul_(spread[j, j + 1 : last], error)


def make_up(V: Tensor, U: Tensor, E: Tensor) -> Tensor:
    """V + UT E for each of the batch: V [J, B, N], U [B, I, J], E [I, B, N]."""
    return torch.baddbmm(V.transpose(0, 1), U.transpose(1, 2), E.transpose(0, 1)).transpose(0, 1)
