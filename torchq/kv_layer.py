"""One layer of a quantized KV cache: what :class:`torchq.FP8KVCache` has for each attention layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from torchq.kernels.kv_attention import kv_attention
from torchq.kernels.kv_cache import CODE_DTYPE, GROUP_SIZE, dequantize_kv, kv_append, quantize_kv
from torchq.kernels.kv_extras import positions_of
from torchq.kv_side import Side, StoredStates, check_head_dim, hadamard, rotate, rotate_, without_gradient

GROWTH = 128
"""Slots by which a cache without max_cache_len grows: copying it that often is 2 % of what attention reads."""


@dataclass(frozen=True)
class LayerSettings:
    """How a layer stores keys and values; see :class:`torchq.FP8KVCache`."""

    key_format: str
    value_format: str
    rotate_keys: bool
    max_cache_len: int | None
    num_sink_tokens: int
    num_recent_tokens: int
    reads_stored: Callable[[], bool]  # whether the model's attention takes StoredStates


class KVCacheLayer(CacheLayerMixin):
    """Quantized keys and values of one attention layer.

    The first tokens attend to themselves in 16 bits. What comes later reads what is stored, its own keys and values included.

    Args:
        settings: How to store.
        sliding_window: How many tokens the layer's attention looks back, its own included; None: all.
        static_scales: Of keys and of values, float32 [1] or [H], or None: measured per token and head.
    """

    def __init__(
        self, settings: LayerSettings, sliding_window: int | None = None, static_scales: tuple[Tensor, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.settings, self.sliding_window, self.static_scales = settings, sliding_window, static_scales
        self.is_sliding = sliding_window is not None
        self.is_compileable = settings.max_cache_len is not None
        self.record_past = False
        self.has_tokens = False
        self.length = torch.tensor(0)  # on the cache's device: compiled code and GPU kernels read it there
        self._known_length: int | None = 0  # the same on the host, where it is known
        self._uncropped = 0  # tokens stored since the last crop, while recording

    # ------------------------------------------------------------------------------------------------------------- storage

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys [B, H, q, D] and values [B, H, q, Dv], without storing them."""
        self.batch_size, self.num_heads, tokens, self.head_dim = key_states.shape
        self.value_dim, self.dtype, self.device = value_states.shape[-1], key_states.dtype, key_states.device
        most, window = self.settings.max_cache_len, self.sliding_window
        if most is None:
            self.slots = GROWTH * max(1, -(-tokens // GROWTH))
            self.slots = self.slots if window is None else min(self.slots, window)
        else:
            self.slots = most if window is None else min(most, window)
        self.wraps = window is not None and (most is None or window < most)
        scales = self.static_scales or (None, None)
        self.key = self._new_side(self.settings.key_format, self.head_dim, scales[0], False)
        self.value = self._new_side(self.settings.value_format, self.value_dim, scales[1], True)
        self.rotation = hadamard(self.head_dim, self.dtype, self.device) if self.settings.rotate_keys else None
        self.num_first = 0 if self.wraps else self.settings.num_sink_tokens
        self.num_recent = min(self.settings.num_recent_tokens, max(0, (self.sliding_window or self.slots) - self.num_first))
        self.extra_keys = self.extra_values = None
        if self.num_first or self.num_recent:
            extra = self.num_first + self.num_recent + 1  # one that is never read, for what belongs to none
            self.extra_keys = key_states.new_zeros(self.batch_size, self.num_heads, extra, self.head_dim)
            self.extra_values = value_states.new_zeros(self.batch_size, self.num_heads, extra, self.value_dim)
        self.length = self.length.to(self.device)
        self._zero = torch.zeros_like(self.length)
        if self.is_compileable and not torch.compiler.is_compiling():
            for tensor in (self.length, *self._buffers()):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _new_side(self, kv_format: str, dim: int, static_scale: Tensor | None, transposed: bool) -> Side:
        def new(channels: int, dtype: torch.dtype, by_tokens: bool) -> Tensor:
            last = (self.slots, channels) if by_tokens else (channels, self.slots)
            try:
                return torch.zeros(self.batch_size, self.num_heads, *last, dtype=dtype, device=self.device)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ValueError(f"dtype: {self.device} has no {dtype} for a KV cache ({error}); use dtype='int8'") from error

        if kv_format == "16bit":
            return Side(new(dim, self.dtype, not transposed), None, None, kv_format, transposed)
        check_head_dim(kv_format, dim)
        codes = new(dim // 2 if kv_format == "int4" else dim, CODE_DTYPE[kv_format], not transposed)
        if static_scale is not None:
            if static_scale.numel() not in (1, self.num_heads):
                raise ValueError(
                    f"scales: a layer of {self.num_heads} heads needs 1 or {self.num_heads}, got {static_scale.numel()}"
                )
            scale = static_scale.to(self.device, torch.float32).reshape(1, -1, 1, 1)
            return Side(codes, scale.expand(-1, self.num_heads, -1, -1).contiguous(), None, kv_format, transposed, True)
        groups = dim // GROUP_SIZE if kv_format == "int4" else 1
        zero = new(groups, torch.uint8, False) if kv_format == "int4" else None
        return Side(codes, new(groups, torch.bfloat16, False), zero, kv_format, transposed)

    def _buffers(self) -> Iterator[Tensor]:
        for side in (self.key, self.value):
            yield from side.tensors().values()
        if self.extra_keys is not None and self.extra_values is not None:
            yield from (self.extra_keys, self.extra_values)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in self._buffers()) if self.is_initialized else 0

    def _reserve(self, tokens: int) -> None:
        """Make room for more tokens, or raise before anything is written."""
        if torch.compiler.is_compiling():
            self._known_length = None  # from now on only the tensor is right; on a CPU the operator checks
            return
        if self._known_length is None:
            self._known_length = int(self.length)
        stored = self._known_length
        if (most := self.settings.max_cache_len) is not None:
            if stored + tokens > most:  # sliding layers too: they would otherwise have tokens that the others have not
                raise ValueError(
                    f"the KV cache holds max_cache_len={most} tokens, {stored} of them taken, and cannot take {tokens} "
                    "more; nothing was written. Make the cache longer (max_cache_len=...), or let it grow (max_cache_len=None)"
                )
            return
        needed = stored + tokens
        if self.sliding_window is not None and self.has_tokens:
            kept = max(0, self.sliding_window - 1) + tokens + (self._uncropped if self.record_past else 0)
            needed = min(needed, kept)
        elif self.sliding_window is not None and not self.record_past:
            needed = min(needed, self.sliding_window)
        if needed > self.slots:
            self._grow(GROWTH * -(-needed // GROWTH), stored)

    def _grow(self, slots: int, stored: int) -> None:
        """Move to more slots: position p goes to slot p % slots."""
        old, kept = self.slots, min(stored, self.slots)

        def larger(tensor: Tensor, *, dim: int) -> Tensor:
            shape = list(tensor.shape)
            shape[dim] = slots
            new = tensor.new_zeros(shape)
            position = stored - kept
            while position < stored:
                source, target = position % old, position % slots
                count = min(stored - position, old - source, slots - target)
                new.narrow(dim, target, count).copy_(tensor.narrow(dim, source, count))
                position += count
            return new

        for side in (self.key, self.value):
            side.map(larger)
        self.slots = slots

    # -------------------------------------------------------------------------------------------------------------- update

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store keys [B, H, q, D] and values [B, H, q, Dv]; return all that attention needs, in 16 bits or as stored.

        Raises:
            ValueError: If they do not fit into ``max_cache_len``, or are of another shape; nothing is stored then.
        """
        if self.is_initialized and not self.has_tokens and key_states.shape[0] != self.batch_size:
            self.is_initialized = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[:2] != (self.batch_size, self.num_heads):
            raise ValueError(
                f"the KV cache holds {self.batch_size} sequences of {self.num_heads} heads, got keys {list(key_states.shape)}; "
                "call reset() before another batch"
            )
        tokens = key_states.shape[2]
        self._reserve(tokens)
        first = not self.has_tokens
        past = None
        if self.wraps and self.is_compileable and not first and tokens > 1:
            past = self._past(tokens)
        rotated = rotate(key_states, self.rotation)
        self._append(rotated.detach(), value_states.detach())
        if first:
            return key_states, value_states
        self._mask_offset = self._offset(tokens)
        if past is None and self.settings.reads_stored():
            return StoredStates(self, "keys"), StoredStates(self, "values")
        keys, values = self._read(tokens) if past is None else self._with_past(past, rotated.detach(), value_states.detach())
        return without_gradient(keys, key_states), without_gradient(values, value_states)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        tokens = keys.shape[2]
        formats = (self.settings.key_format, self.settings.value_format)
        sides = (side_part for side in (self.key, self.value) for side_part in (side.codes, side.scale, side.zero))
        kv_append(keys, values, *sides, self.length, *formats, self.key.static, self.wraps)
        if self.extra_keys is not None and self.extra_values is not None:
            position = self.length + torch.arange(tokens, device=self.device)
            unused = self.num_first + self.num_recent
            for part in (slice(0, self.num_first), slice(max(0, tokens - self.num_recent), tokens)):
                if (here := position[part]).numel():
                    recent = part.stop == tokens and self.num_recent > 0
                    slot = torch.where(here < self.num_first, here, self._recent_slot(here) if recent else unused)
                    self.extra_keys.index_copy_(2, slot, keys[:, :, part])
                    self.extra_values.index_copy_(2, slot, values[:, :, part])
        self.length.add_(tokens)
        self.has_tokens = True
        if not torch.compiler.is_compiling() and self._known_length is not None:
            self._known_length += tokens
            self._uncropped += tokens

    def _recent_slot(self, position: Tensor) -> Tensor:
        return self.num_first + (position - self.num_first) % max(1, self.num_recent)

    def _offset(self, tokens: int) -> Tensor:
        """The position of the first column of a mask for the newest ``tokens``."""
        if not self.wraps:
            return self._zero
        seen = self.slots if self.is_compileable else self._window - 1 + tokens
        return (self.length - seen).clamp_min_(0)

    @property
    def _window(self) -> int:
        return self.sliding_window or 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """(Length, first position) of the keys that the next update returns."""
        if not self.has_tokens:
            return query_length, 0
        if self.is_compileable:
            if not self.wraps:
                return self.slots, 0
            seen = self.slots if query_length == 1 else self._window - 1 + query_length
            offset = (self.length + (query_length - seen)).clamp_min(0)
            return seen, offset if torch.compiler.is_compiling() else int(offset)
        stored = self._host_length()
        past = min(stored, self._window - 1) if self.is_sliding else stored
        return past + query_length, stored - past

    def _host_length(self) -> int:
        if self._known_length is None:
            self._known_length = int(self.length)
        return self._known_length

    # ---------------------------------------------------------------------------------------------------- reading in 16 bits

    def _read(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values in 16 bits, in order, of the positions that get_mask_sizes gave for the last ``tokens``."""
        sides = (self.key, self.value)
        if self.is_compileable:
            if self.wraps:
                slots = (self._mask_offset + torch.arange(self.slots, device=self.device)) % self.slots
                keys, values = (side.read(slots, self.dtype) for side in sides)
            else:
                keys, values = (side.read_runs([(0, self.slots)], self.dtype) for side in sides)
        else:
            stop = self._host_length()
            first = max(0, stop - (self._window - 1 + tokens)) if self.is_sliding else 0
            runs: list[tuple[int, int]] = []
            position = first
            while position < stop:
                slot = position % self.slots
                runs.append((slot, min(stop - position, self.slots - slot)))
                position += runs[-1][1]
            keys, values = (side.read_runs(runs, self.dtype) for side in sides)
        if self.extra_keys is not None and self.extra_values is not None:
            self._overlay(keys, values)
        return rotate_(keys, self.rotation), values

    def _overlay(self, keys: Tensor, values: Tensor) -> None:
        """Put the first and the most recent tokens over what was dequantized of them.

        A slot that is not filled yet belongs to a position still to come, which every mask hides.
        """
        assert self.extra_keys is not None and self.extra_values is not None
        slot, position, filled = positions_of(self.length, self.num_first + self.num_recent, self.num_first)
        position = torch.where(filled, position, slot) - self._mask_offset
        if not self.is_compileable:  # no columns for positions to come
            kept = (position >= 0) & (position < keys.shape[2])
            slot, position = slot[kept], position[kept]
        keys.index_copy_(2, position, self.extra_keys.index_select(2, slot))
        values.index_copy_(2, position, self.extra_values.index_select(2, slot))

    def _past(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """The window of a static sliding layer, before ``tokens`` more overwrite it: (first position, keys, values)."""
        first = (self.length - (self._window - 1)).clamp_min(0)
        slot = (first + torch.arange(self._window - 1, device=self.device)) % self.slots
        return first, self.key.read(slot, self.dtype), self.value.read(slot, self.dtype)

    def _with_past(self, past: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The window and new tokens after it, as they are stored, in 16 bits."""
        first, *sides = past
        tokens = keys.shape[2]
        position = self.length - tokens - first + torch.arange(tokens, device=self.device)
        results = []
        for old, new, side in zip(sides, (keys, values), (self.key, self.value), strict=True):
            codes = quantize_kv(new, side.kv_format, side.scale if side.static else None)
            scale = side.scale if side.static else codes.scale
            stored = dequantize_kv(codes.codes, scale, codes.zero, side.kv_format, self.dtype)
            room = old.new_zeros(*old.shape[:2], tokens, old.shape[3])
            results.append(torch.cat([old, room], 2).index_copy(2, position, stored))
        if self.extra_keys is not None:
            self._mask_offset = first
            self._overlay(*results)
        return rotate_(results[0], self.rotation), results[1]

    # ------------------------------------------------------------------------------------------------- attention as stored

    def attend(
        self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention [B, Hq, q, Dv] of the newest tokens' queries [B, Hq, q, D], see :mod:`torchq.kernels.kv_attention`."""
        extras = (self.extra_keys, self.extra_values)
        if extras[0] is not None and extras[1] is not None:
            extras = extras[0][:, :, :-1], extras[1][:, :, :-1]
        looking = (self.length, mask, self._mask_offset, sinks)
        options = (self.settings.key_format, self.settings.value_format, scaling, softcap, self._window, self.num_first)
        stored = (*self.key.as_stored(), *self.value.as_stored())
        return kv_attention(rotate(query, self.rotation), *stored, *extras, *looking, *options)

    # ----------------------------------------------------------------------------------------- what generation does to caches

    def get_seq_length(self) -> Any:
        """Tokens stored in all: an int, of a static cache a tensor."""
        if not self.is_initialized:
            return 0
        return self.length if self.is_compileable else self._host_length()

    def get_max_length(self) -> int:
        """Most tokens that are kept; -1: as many as come."""
        if self.sliding_window is not None and not self.is_compileable:
            return self.sliding_window
        return -1 if self.settings.max_cache_len is None else min(self.settings.max_cache_len, self.sliding_window or 1 << 62)

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can restore what was before: a sliding layer overwrites what would come back into its window."""
        if self.record_past or not self.is_sliding:
            return True
        if not self.is_initialized:  # a fixed size of no more than the window never wraps
            return self.settings.max_cache_len is not None and self.settings.max_cache_len <= self._window
        return not self.wraps or self._host_length() <= self.slots

    def activate_past_recording(self) -> None:
        """Keep what a sliding layer would drop, until the next crop (assisted decoding)."""
        if self.is_sliding and self.is_compileable:
            return
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens (a negative number, as in transformers)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number, the tokens to remove, got {tokens_to_remove}")
        self._uncropped = 0
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        removed = min(-tokens_to_remove, self._host_length())
        if not self.is_croppable:
            raise RuntimeError(
                "crop: this sliding layer has already overwritten the tokens that would come back into its window; call "
                "activate_past_recording() on the cache before its first use (a cache with max_cache_len cannot)"
            )
        if self.num_recent:
            self._refill(removed)
        self.length.sub_(removed)
        if self._known_length is not None:
            self._known_length -= removed

    def _refill(self, removed: int) -> None:
        """Have the 16-bit ring hold, for the removed tokens, those that come back into it, as they were stored."""
        assert self.extra_keys is not None and self.extra_values is not None
        position = self.length - removed - self.num_recent + torch.arange(min(removed, self.num_recent), device=self.device)
        unused = self.num_first + self.num_recent
        slot = torch.where(position < self.num_first, unused, self._recent_slot(position))
        source = position.clamp_min(0) % self.slots
        self.extra_keys.index_copy_(2, slot, self.key.read(source, self.dtype))
        self.extra_values.index_copy_(2, slot, self.value.read(source, self.dtype))

    def reset(self) -> None:
        """Forget all tokens; memory stays allocated."""
        self.length.zero_()
        self._known_length, self._uncropped, self.has_tokens = 0, 0, False

    def _map_sequences(self, change: Callable[[Tensor], Tensor], in_place: bool) -> None:
        def keep(tensor: Tensor, *, dim: int = 0) -> Tensor:
            return tensor.copy_(change(tensor)) if in_place else change(tensor)

        if not self.is_initialized:
            return
        for side in (self.key, self.value):
            side.map(keep)
        if self.extra_keys is not None and self.extra_values is not None:
            self.extra_keys, self.extra_values = keep(self.extra_keys), keep(self.extra_values)
        self.batch_size = self.key.codes.shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each sequence what sequence ``beam_idx[i]`` has (beam search)."""
        self._map_sequences(lambda t: t.index_select(0, beam_idx.to(t.device)), in_place=self.is_compileable)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence ``repeats`` times."""
        self._map_sequences(lambda t: t.repeat_interleave(repeats, dim=0), in_place=False)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self._map_sequences(lambda t: t[indices, ...], in_place=False)
