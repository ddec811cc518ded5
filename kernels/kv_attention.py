"""Attention over a quantized KV cache, read as it is stored: no 16-bit copy of the cache is made.

On GPUs few queries (decoding) go to a split-KV Triton kernel (:mod:`torchq.kernels.kv_cache_triton`). Everywhere else, and for
many queries, blocks of keys and values are decoded and multiplied one after the other, with softmax kept up as in FlashAttention
(Dao et al. 2022, arXiv:2205.14135). Storage: :mod:`torchq.kernels.kv_cache`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.kernels.dispatch import gpu_of
from torchq.kernels.kv_cache import MAX_KERNEL_DIM
from torchq.kernels.kv_extras import extra_part, mask_of_stored
from torchq.kernels.kv_products import ALL, Rows, Side, products_of, weighted_sums
from torchq.kernels.registration import register_op

_BLOCK_VALUES = 1 << 20  # keys or values decoded at a time: 2 MB in 16 bits
_BLOCK_SCORES = 1 << 22
_KERNEL_ROWS = 64  # queries times heads per key/value head, up to which the kernel for decoding is used


@register_op("torchq::kv_attention")
def kv_attention(
    query: Tensor,
    key_codes: Tensor,
    key_scale: Tensor | None,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor | None,
    value_zero: Tensor | None,
    extra_keys: Tensor | None,
    extra_values: Tensor | None,
    length: Tensor,
    mask: Tensor | None,
    mask_offset: Tensor,
    sinks: Tensor | None,
    key_format: str,
    value_format: str,
    scaling: float,
    softcap: float,
    window: int,
    num_first: int,
) -> Tensor:
    """Attention of the last q tokens of a cache over all tokens in it.

    Args:
        query: [B, Hq, q, D], Hq a multiple of H; query i is at position length - q + i.
        key_codes: The cache's keys, the q newest in it; this and the next five as in :mod:`torchq.kernels.kv_cache`.
        key_scale: Scales of keys, or None.
        key_zero: Zero points of keys, or None.
        value_codes: The cache's values.
        value_scale: Scales of values, or None.
        value_zero: Zero points of values, or None.
        extra_keys: [B, H, E, D], or None: the first ``num_first`` tokens and a ring of the last E - num_first ones, in 16 bits,
            to be read instead of what the cache has of them.
        extra_values: [B, H, E, Dv].
        length: How many tokens were stored, the q newest included, int64 [].
        mask: None (causal), or [B or 1, Hq or 1, q, L]: bool, True where a query may look, or floating point, added to scores.
        mask_offset: The position that the mask's first column stands for, int64 []; positions without a column are hidden.
        sinks: [Hq]: a logit per head that takes part in softmax's sum alone (gpt-oss), or None.
        key_format: One of ``torchq.kernels.kv_cache.FORMATS``.
        value_format: The same.
        scaling: Scores are scaling * q.k.
        softcap: c of c * tanh(score / c); 0: none.
        window: How many positions, its own included, a query looks back; 0: all.
        num_first: See ``extra_keys``.

    Returns:
        [B, Hq, q, Dv] in the dtype of ``query``; 0 where a query may look at nothing.
    """
    stored = (key_codes, key_scale, key_zero, value_codes, value_scale, value_zero)
    rows = query.shape[2] * (query.shape[1] // key_codes.shape[1])
    if gpu_of(query.device) is not None and rows <= _KERNEL_ROWS and query.shape[-1] <= MAX_KERNEL_DIM:
        from torchq.kernels.kv_cache_triton import attention_triton

        extra = None
        if extra_keys is not None:
            assert extra_values is not None
            options = (scaling, softcap, window, num_first)
            extra = extra_part(query, extra_keys, extra_values, length, mask, mask_offset, *options)
            sizes = (query.shape[2], key_codes.shape[2], extra_keys.shape[2])
            mask, mask_offset = mask_of_stored(*sizes, length, mask, mask_offset, num_first)
        return attention_triton(
            query,
            *stored,
            length,
            mask,
            mask_offset,
            scaling,
            softcap,
            window,
            sinks,
            key_format,
            value_format,
            extra=extra,
        )
    keys, values = Side(*stored[:3], key_format), Side(*stored[3:], value_format)
    extras = None
    if extra_keys is not None:
        assert extra_values is not None
        extras = Side(extra_keys, None, None, "16bit"), Side(extra_values.transpose(-1, -2), None, None, "16bit")
    looking = _Looking(int(length), mask, int(mask_offset), scaling, softcap, window)
    return attention_ref(query, keys, values, extras, num_first, looking, sinks)


@torch.library.register_fake("torchq::kv_attention")
def _(
    query,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    extra_keys,
    extra_values,
    length,
    mask,
    mask_offset,
    sinks,
    key_format,
    value_format,
    scaling,
    softcap,
    window,
    num_first,
):
    dim = value_codes.shape[2] * (2 if value_format == "int4" else 1)
    return query.new_empty(*query.shape[:3], dim)


@dataclass(frozen=True)
class _Looking:
    """What queries may look at, and how scores come from products; see :func:`kv_attention`."""

    length: int
    mask: Tensor | None
    mask_offset: int
    scaling: float
    softcap: float
    window: int

    def scores(self, products: Tensor, batch: slice, heads: slice, first: int, rep: int) -> Tensor:
        """Scores from products [b, h, rep * q, n] float32 with keys from position ``first`` on; -inf where hidden."""
        scores = products.mul_(self.scaling)
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        b, h, rows, n = products.shape
        q = rows // rep
        causal = self.mask is None and q > 1 and first + n > self.length - q + 1
        windowed = self.window > 0 and first <= self.length - 1 - self.window
        if not causal and not windowed and self.mask is None:
            return scores
        scores = scores.view(b, h, rep, q, n)
        if self.mask is not None:
            columns = slice(first - self.mask_offset, first - self.mask_offset + n)
            mask = self.mask if self.mask.shape[0] == 1 else self.mask[batch]
            mask = mask[..., columns].unsqueeze(2) if mask.shape[1] == 1 else mask[..., columns].unflatten(1, (-1, rep))[:, heads]
            scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
        if causal or windowed:
            newest = torch.arange(self.length - q, self.length, device=scores.device)[:, None]
            position = torch.arange(first, first + n, device=scores.device)
            if causal:
                scores.masked_fill_(position > newest, -torch.inf)
            if windowed:
                scores.masked_fill_(position <= newest - self.window, -torch.inf)
        return scores.view(b, h, rows, n)

    def positions(self, q: int) -> tuple[int, int]:
        """The first and the last but one of the positions that any of q queries may look at."""
        first, stop = 0, self.length
        if self.window:
            first = max(first, self.length - q + 1 - self.window)
        if self.mask is not None:
            first = max(first, self.mask_offset)
            stop = min(stop, self.mask_offset + self.mask.shape[-1])
        return first, stop


def attention_ref(
    query: Tensor,
    keys: Side,
    values: Side,
    extras: tuple[Side, Side] | None,
    num_first: int,
    looking: _Looking,
    sinks: Tensor | None,
) -> Tensor:
    """Do what :func:`kv_attention` does, block by block, in plain PyTorch, on any device."""
    b, hq, q, d = query.shape
    h = keys.codes.shape[1]
    rep = hq // h
    rows = Rows.of(query.reshape(b, h, rep * q, d), keys.kv_format)
    dim = values.codes.shape[2] * (2 if values.kv_format == "int4" else 1)
    out = query.new_empty(b, h, rep * q, dim)
    if out.numel() == 0:
        return out.view(b, hq, q, dim)
    stretches = list(_stretches(keys, values, extras, num_first, looking, q))
    longest = max((n for *_, n in stretches), default=1)
    narrow = rows.quantized is not None and values.kv_format == "int8"  # nothing is decoded
    for batch, heads in _head_blocks(b, h, longest * rep * q if narrow else longest * d):
        block = rows.at(batch, heads)
        state = _Softmax(block.rows, dim)
        step = max(1, min(_BLOCK_VALUES // d, _BLOCK_SCORES // (rep * q)))
        for key, value, slot, first, count in stretches:
            for start in range(0, count, step):
                slots = slice(slot + start, slot + min(count, start + step))
                products = products_of(block, key.at(batch, heads, slots, False))
                scores = looking.scores(products, batch, heads, first + start, rep)
                state.add(scores, value.at(batch, heads, slots, True))
        of_heads = None if sinks is None else sinks.view(h, rep, 1)[heads].expand(-1, -1, q).flatten(1)
        result = state.result(of_heads, looking.mask is not None)
        if batch == ALL and heads == ALL:
            return result.to(query.dtype).view(b, hq, q, dim)
        out[batch, heads] = result
    return out.view(b, hq, q, dim)


def _stretches(
    keys: Side, values: Side, extras: tuple[Side, Side] | None, num_first: int, looking: _Looking, q: int
) -> Iterator[tuple[Side, Side, int, int, int]]:
    """(Keys, values, first slot, its position, how many): stretches of slots whose positions follow on each other."""
    first, stop = looking.positions(q)
    in_ring = looking.length
    if extras is not None:
        ring = extras[0].codes.shape[2] - num_first
        in_ring = max(num_first, looking.length - ring)
        for slot, position, count in _ring(max(first, in_ring), stop, ring, num_first):
            yield *extras, slot, position, count
        if first < min(num_first, stop):
            yield *extras, first, first, min(num_first, stop) - first
        first, stop = max(first, num_first), min(stop, in_ring)
    slots = keys.codes.shape[2]
    for slot, position, count in _ring(max(first, looking.length - slots), stop, slots, 0):
        yield keys, values, slot, position, count


def _ring(first: int, stop: int, slots: int, base: int) -> Iterator[tuple[int, int, int]]:
    """(Slot, position, how many) of positions ``first`` to ``stop`` in a ring that starts at slot (and position) ``base``."""
    while first < stop:
        slot = (first - base) % slots
        count = min(stop - first, slots - slot)
        yield base + slot, first, count
        first += count


def _head_blocks(b: int, h: int, values_per_head: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and heads to take at a time."""
    most = max(1, _BLOCK_VALUES // max(1, values_per_head))
    if most >= b * h:
        yield ALL, ALL
        return
    if most >= h:
        for start in range(0, b, most // h):
            yield slice(start, min(b, start + most // h)), ALL
        return
    for sequence in range(b):
        for start in range(0, h, most):
            yield slice(sequence, sequence + 1), slice(start, start + most)


class _Softmax:
    """Softmax-weighted sums of values, over blocks of keys that come one after the other."""

    def __init__(self, rows: Tensor, dim: int) -> None:
        self.rows, self.dim = rows, dim
        self.most = self.total = self.sums = rows.new_empty(0)

    def add(self, scores: Tensor, values: Side) -> None:
        """Take a block: scores [b, h, rows, n], values [b, h, Dv, n]."""
        first = self.most.numel() == 0
        most = scores.amax(-1, keepdim=True)
        most = most if first else torch.maximum(most, self.most)
        shift = most.clamp_min(torch.finfo(most.dtype).min)  # where all is hidden
        weights = scores.sub_(shift).exp_()
        total, sums = weights.sum(-1, keepdim=True), weighted_sums(weights, values, self.rows.dtype)
        if not first:
            decay = (self.most - shift).exp_()
            total, sums = total.addcmul_(self.total, decay), sums.addcmul_(self.sums, decay)
        self.most, self.total, self.sums = most, total, sums

    def result(self, sinks: Tensor | None, masked: bool) -> Tensor:
        """[b, h, rows, Dv]; ``sinks``: [h, rows]; ``masked``: whether there may be rows that look at nothing."""
        if self.most.numel() == 0:
            return self.rows.new_zeros(*self.rows.shape[:3], self.dim)
        total = self.total
        if sinks is not None:
            total = total + (sinks.to(total.dtype)[None, :, :, None] - self.most).exp_()
        result = self.sums.div_(total)
        return result.masked_fill_(self.total == 0, 0) if masked else result
