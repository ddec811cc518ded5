"""The first and the most recent tokens of a KV cache, kept in 16 bits, beside the GPU kernel that reads what is quantized.

Few tokens, so plain PyTorch does: their share of the softmax is one more part for the kernel's reduction
(:mod:`torchq.kernels.kv_cache_triton`), and a mask keeps the kernel from what it has of them. Lengths stay on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LOG2E = 1.4426950408889634


class Part(NamedTuple):
    """A part of the softmax: values weighted by 2^(score - most) [B * H, 1, rows, Dv]; most, the weights' sum [B * H, 1, rows].

    Row i * rep + r: query i of the r-th head of a group. Scores are in units of log2.
    """

    parts: Tensor
    most: Tensor
    sums: Tensor


def extra_part(
    query: Tensor,
    extra_keys: Tensor,
    extra_values: Tensor,
    length: Tensor,
    mask: Tensor | None,
    mask_offset: Tensor,
    scaling: float,
    softcap: float,
    window: int,
    num_first: int,
) -> Part:
    """Attention to the 16-bit tokens; the arguments are those of :func:`torchq.kernels.kv_attention.kv_attention`."""
    batch, q_heads, q, _ = query.shape
    heads, extra = extra_keys.shape[1:3]
    rows = query.float().view(batch, heads, q_heads // heads, q, -1)
    scores = torch.einsum("bhrqd,bhed->bhrqe", rows, extra_keys.float()) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    _, position, allowed = positions_of(length, extra, num_first)
    newest = (length - q + torch.arange(q, device=query.device))[:, None]
    allowed = allowed & (position > newest - window) if window else allowed.expand(q, -1)
    if mask is None:
        allowed = allowed & (position <= newest)
    else:
        column = position - mask_offset
        allowed = allowed & (column >= 0) & (column < mask.shape[-1])
        entries = mask.index_select(3, column.clamp(0, mask.shape[-1] - 1))
        entries = entries.expand(-1, q_heads, -1, -1).unflatten(1, (heads, -1))
        if mask.dtype == torch.bool:
            allowed = allowed & entries
        else:
            scores = scores + entries
    scores = (scores * _LOG2E).masked_fill(~allowed, -torch.inf)
    most = scores.amax(-1).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp2(scores - most.unsqueeze(-1))
    parts = torch.einsum("bhrqe,bhed->bhqrd", weights, extra_values.float())
    by_row = [t.transpose(2, 3).reshape(batch * heads, 1, -1) for t in (most, weights.sum(-1))]
    return Part(parts.reshape(batch * heads, 1, -1, parts.shape[-1]), *by_row)


def mask_of_stored(
    q: int, slots: int, extra: int, length: Tensor, mask: Tensor | None, mask_offset: Tensor, num_first: int
) -> tuple[Tensor, Tensor]:
    """A mask [B or 1, Hq or 1, q, L] that hides what :func:`extra_part` reads, and the position of its first column."""
    if mask is None:
        mask_offset = (length - slots).clamp_min(0)
        newest = (length - q + torch.arange(q, device=length.device))[:, None]
    columns = slots if mask is None else mask.shape[-1]
    position = mask_offset + torch.arange(columns, device=length.device)
    stored = (position >= num_first) & (position < length - (extra - num_first))
    if mask is None:
        return (stored & (position <= newest))[None, None], mask_offset
    return (mask & stored if mask.dtype == torch.bool else mask.masked_fill(~stored, -torch.inf)), mask_offset


def positions_of(length: Tensor, extra: int, num_first: int) -> tuple[Tensor, Tensor, Tensor]:
    """(Slots, their positions, whether there is a token there yet) of 16-bit tokens: the first ones, then a ring."""
    slot = torch.arange(extra, device=length.device)
    newest = length - 1
    recent = newest - (newest - slot) % max(1, extra - num_first)
    return slot, torch.where(slot < num_first, slot, recent), slot <= newest
