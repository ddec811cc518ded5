"""The columns of one block of GPTQ: round one, take its error to those after it, go on.

``reference`` is a loop of PyTorch calls for each column; on CUDA they would be thousands of launches for a weight, and the
kernel in ``gptq_triton.py`` does a block in one. Shapes: J columns of a block, N rows, G groups.
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
        V: [J, N] float32, the columns made up for the errors of all columns outside the block; may be overwritten.
        W: [J, N] float32, the columns.
        U: [J, J] float32: what an error of column i makes of column j; only entries above the diagonal count.
        scales: [G, N] float32.
        zeros: [G, N] float32, or None.
        groups: [J] int64, which group a column belongs to; on the CPU.
        args: Least and largest code.
        codes: [J, N] float32, contiguous, written: the codes.
        E: [J, N] float32, contiguous, written: W less what the codes stand for.
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
    V, U, E = block.V, block.U, block.E
    quant_min, quant_max = block.args.quant_min, block.args.quant_max
    columns = zip(block.W.unbind(0), block.codes.unbind(0), E.unbind(0), U.unsqueeze(2).unbind(0), strict=True)
    scales = block.scales.unbind(0)
    zeros = None if block.zeros is None else block.zeros.unbind(0)
    count, groups = V.shape[0], block.groups.tolist()
    for j, (w, code, error, u) in enumerate(columns):
        if j % INNER == 0:
            first, last = j, min(j + INNER, count)
            v = torch.addmm(V[first:last], U[:first, first:last].t(), E[:first]) if j else V[:last]
        s = scales[groups[j]]
        torch.div(v[j - first], s, out=code)
        if zeros is None:
            code.round_().clamp_(quant_min, quant_max)
            torch.addcmul(w, code, s, value=-1, out=error)
        else:
            z = zeros[groups[j]]
            code.add_(z).round_().clamp_(quant_min, quant_max)
            torch.addcmul(w, code - z, s, value=-1, out=error)
        if j + 1 < last:
            v[j + 1 - first :].addcmul_(u[j + 1 : last], error)
