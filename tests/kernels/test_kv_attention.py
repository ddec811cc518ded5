"""Attention over a quantized KV cache against float64, written from its description."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from torchq.kernels import kv_attention as module
from torchq.kernels import kv_products
from torchq.kernels.kv_attention import kv_attention
from torchq.kernels.kv_cache import kv_append
from torchq.testing import assert_within_dtype_error

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


@dataclass
class Storage:
    """Codes, scale and zero of keys or values with room for ``slots`` tokens."""

    kv_format: str
    transposed: bool
    tensors: tuple[Tensor, Tensor | None, Tensor | None]

    @classmethod
    def empty(
        cls,
        kv_format: str,
        b: int,
        h: int,
        slots: int,
        dim: int,
        transposed: bool,
        dtype: torch.dtype,
        static: Tensor | None = None,
    ) -> "Storage":
        width, groups = (dim // 2, dim // 32) if kv_format == "int4" else (dim, 1)
        codes = torch.zeros(b, h, *((width, slots) if transposed else (slots, width))).to(CODES.get(kv_format, dtype))
        if kv_format == "16bit":
            return cls(kv_format, transposed, (codes, None, None))
        if static is not None:
            return cls(kv_format, transposed, (codes, static.view(1, -1, 1, 1).expand(b, h, 1, slots), None))
        zero = torch.zeros(b, h, groups, slots, dtype=torch.uint8) if kv_format == "int4" else None
        return cls(kv_format, transposed, (codes, torch.zeros(b, h, groups, slots, dtype=torch.bfloat16), zero))

    def exact(self, slot: int) -> Tensor:
        """What a slot holds, [B, H, D] float64."""
        codes, scale, zero = self.tensors
        code = codes[..., slot] if self.transposed else codes[:, :, slot]
        if scale is None:
            return code.double()
        scale = scale[..., slot].double()
        if zero is None:
            return code.double() * scale
        channels = torch.cat([code % 16, code // 16], -1).double()
        return (channels - (zero[..., slot] / 16.0).repeat_interleave(32, -1)) * scale.repeat_interleave(32, -1)


@dataclass
class Cache:
    """A cache that tokens were appended to, as arguments of ``kv_attention`` and for :func:`exact_attention`."""

    keys: Storage
    values: Storage
    length: int
    num_first: int = 0
    extra_keys: Tensor | None = None
    extra_values: Tensor | None = None
    stored: tuple[Tensor | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.stored = (*self.keys.tensors, *self.values.tensors)

    @classmethod
    def filled(
        cls,
        key_format: str,
        value_format: str,
        length: int,
        slots: int,
        *,
        b: int = 2,
        h: int = 2,
        dim: int = 64,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        static: Tensor | None = None,
        num_first: int = 0,
        num_recent: int = 0,
        seed: int = 0,
    ) -> "Cache":
        """Filled in pieces of several sizes."""
        g = torch.Generator().manual_seed(seed)
        value_dim = value_dim or dim
        key = (torch.randn(b, h, length, dim, generator=g) * torch.linspace(0.3, 3, dim)).to(dtype)
        value = torch.randn(b, h, length, value_dim, generator=g).to(dtype)
        keys = Storage.empty(key_format, b, h, slots, dim, False, dtype, static)
        values = Storage.empty(value_format, b, h, slots, value_dim, True, dtype, static)
        start = 0
        for size in [min(7, length), 1, 1, max(0, length - 9)]:
            piece = slice(start, min(length, start + size))
            arguments = (*keys.tensors, *values.tensors, torch.tensor(start))
            kv_append(
                key[:, :, piece], value[:, :, piece], *arguments, key_format, value_format, static is not None, length > slots
            )
            start = piece.stop
        found = cls(keys, values, length, num_first)
        if num_first or num_recent:
            held = {p: p for p in range(min(num_first, length))}
            held.update({p: num_first + (p - num_first) % num_recent for p in range(max(num_first, length - num_recent), length)})
            found.extra_keys = torch.zeros(b, h, num_first + num_recent, dim, dtype=dtype)
            found.extra_values = torch.zeros(b, h, num_first + num_recent, value_dim, dtype=dtype)
            for position, slot in held.items():
                found.extra_keys[:, :, slot], found.extra_values[:, :, slot] = key[:, :, position], value[:, :, position]
        return found

    def exact(self, position: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values [B, H, D] of a position in float64, or None where they are gone."""
        slots = self.values.tensors[0].shape[-1]
        if self.extra_keys is not None and self.extra_values is not None:
            ring = self.extra_keys.shape[2] - self.num_first
            slot = None
            if position < self.num_first:
                slot = position
            elif position >= self.length - ring:
                slot = self.num_first + (position - self.num_first) % ring
            if slot is not None:
                return self.extra_keys[:, :, slot].double(), self.extra_values[:, :, slot].double()
        if position < self.length - slots:
            return None
        return self.keys.exact(position % slots), self.values.exact(position % slots)


def exact_attention(
    query: Tensor,
    cache: Cache,
    mask: Tensor | None = None,
    mask_offset: int = 0,
    scaling: float = 0.125,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention in float64 (or with every step rounded to ``dtype``, as an eager implementation would)."""
    b, hq, q, _ = query.shape
    rep = hq // cache.keys.tensors[0].shape[1]
    positions = [p for p in range(cache.length) if cache.exact(p) is not None]
    pairs = [cache.exact(p) for p in positions]
    key = torch.stack([pair[0] for pair in pairs if pair], 2).repeat_interleave(rep, 1).to(dtype)
    value = torch.stack([pair[1] for pair in pairs if pair], 2).repeat_interleave(rep, 1).to(dtype)
    scores = query.to(dtype) @ key.transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.double()
    at, position = torch.arange(cache.length - q, cache.length)[:, None], torch.tensor(positions)
    if mask is None:
        scores = scores.masked_fill(position > at, -math.inf)
    else:
        column = position - mask_offset
        entries = mask.expand(b, hq, q, -1)[..., column.clamp(0, mask.shape[-1] - 1)]
        scores = scores.masked_fill(~entries, -math.inf) if mask.dtype == torch.bool else scores + entries
        scores = scores.masked_fill((column < 0) | (column >= mask.shape[-1]), -math.inf)
    if window:
        scores = scores.masked_fill(position <= at - window, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(b, -1, q, 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0)[..., : len(positions)]
    return (weights.to(dtype) @ value).to(torch.float64 if dtype == torch.float64 else query.dtype)


FORMATS = ("fp8", "int8", "int4", "16bit")


def attend(
    query: Tensor,
    cache: Cache,
    mask: Tensor | None = None,
    mask_offset: int = 0,
    scaling: float = 0.125,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """The op, with the arguments of ``exact_attention``."""
    looking = (torch.tensor(cache.length), mask, torch.tensor(mask_offset), sinks)
    options = (cache.keys.kv_format, cache.values.kv_format, scaling, softcap, window, cache.num_first)
    return kv_attention(query, *cache.stored, cache.extra_keys, cache.extra_values, *looking, *options)


def check(query: Tensor, cache: Cache, **options: Any) -> None:
    """That the op is as exact as its dtype lets it be."""
    result, exact = attend(query, cache, **options), exact_attention(query, cache, **options)
    assert result.shape == exact.shape and result.dtype == query.dtype
    if query.dtype == torch.float32:
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=2e-6)
    else:
        assert_within_dtype_error(result, exact, exact_attention(query, cache, dtype=query.dtype, **options))


def queries(q: int = 1, b: int = 2, heads: int = 4, dim: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(b, heads, q, dim, generator=torch.Generator().manual_seed(q + heads + dim)).to(dtype)


@pytest.fixture(params=["as usual", "blocks of few", "blocks", "no int8 kernels"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of keys, and of sequences and heads, forced small; a processor without kernels for int8."""
    if request.param.startswith("blocks"):
        size = 1 << (8 if request.param == "blocks of few" else 11)
        monkeypatch.setattr(module, "_BLOCK_VALUES", size)
        monkeypatch.setattr(module, "_BLOCK_SCORES", size)
    elif request.param == "no int8 kernels":
        monkeypatch.setattr(kv_products, "_has_int8_kernels", lambda: False)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("key_format", FORMATS)
def test_formats(key_format: str, value_format: str, ways: None) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check(queries(3, dtype=dtype), Cache.filled(key_format, value_format, 50, 64, dtype=dtype))


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads(dim: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    for key_format, value_format in [("fp8", "fp8"), ("int8", "int8"), ("int4", "int4"), ("16bit", "int8")]:
        if dim % 64 == 0 or "int4" not in (key_format, value_format):
            cache = Cache.filled(key_format, value_format, 33, 40, h=kv_heads, dim=dim, dtype=dtype)
            check(queries(2, heads=heads, dim=dim, dtype=dtype), cache)


def test_keys_and_values_of_different_dimensions() -> None:
    for value_format in ("int4", "int8", "fp8"):
        check(queries(2, dim=96), Cache.filled("int8", value_format, 33, 40, dim=96, value_dim=64))


@pytest.mark.parametrize(
    ("length", "slots", "q"), [(1, 64, 1), (64, 64, 5), (100, 32, 1), (96, 32, 1), (310, 333, 300), (37, 48, 37)]
)
@pytest.mark.parametrize("key_format", ["fp8", "int8"])
def test_lengths(length: int, slots: int, q: int, key_format: str, ways: None) -> None:
    """Fewer tokens than slots, as many, and more: a ring; one query, some, and as many as there are tokens."""
    check(queries(q), Cache.filled(key_format, "int8", length, slots))


@pytest.mark.parametrize(
    ("length", "slots", "q", "window"), [(50, 64, 1, 20), (50, 64, 6, 20), (100, 37, 1, 30), (100, 37, 5, 30), (9, 64, 3, 20)]
)
def test_a_window(length: int, slots: int, q: int, window: int, ways: None) -> None:
    check(queries(q), Cache.filled("int8", "fp8", length, slots), window=window)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_and_sinks(softcap: float, with_sinks: bool, dtype: torch.dtype, ways: None) -> None:
    sinks = torch.tensor([2.0, -1.0, 0.0, 5.0], dtype=dtype) if with_sinks else None
    cache = Cache.filled("fp8", "int8", 45, 64, dtype=dtype)
    check(queries(4, dtype=dtype), cache, softcap=softcap, sinks=sinks, scaling=0.3)


MASKS = {"of all": (1, 1), "of sequences": (2, 1), "of heads": (1, 4), "of both": (2, 4)}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize(
    ("length", "slots", "offset", "columns"), [(50, 64, 0, 50), (50, 64, 0, 64), (100, 37, 63, 37), (50, 64, 20, 25)]
)
def test_masks(shape: tuple[int, int], kind: torch.dtype, length: int, slots: int, offset: int, columns: int, ways: None) -> None:
    """Masks with more columns than there are tokens, with fewer, and of the positions that a ring still has."""
    g = torch.Generator().manual_seed(columns)
    mask = torch.rand(*shape, 3, columns, generator=g)
    mask = mask < 0.6 if kind == torch.bool else mask.masked_fill(mask < 0.3, -torch.inf)
    check(queries(3), Cache.filled("int8", "int4", length, slots), mask=mask, mask_offset=offset)


def test_masks_need_not_be_contiguous(ways: None) -> None:
    mask = (torch.rand(64, 2, 1, 3, generator=torch.Generator().manual_seed(0)) < 0.6).permute(1, 2, 3, 0)
    check(queries(3), Cache.filled("fp8", "fp8", 50, 64), mask=mask)


def test_left_padding_and_rows_that_see_nothing(ways: None) -> None:
    """A sequence whose first tokens are padding; its queries at padding see nothing and get 0."""
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    mask[1, ..., :5] = False
    for sinks in (None, torch.randn(4)):
        cache = Cache.filled("int8", "int8", 12, 16)
        check(queries(12), cache, mask=mask, sinks=sinks)
        result = attend(queries(12), cache, mask=mask, sinks=sinks)
        assert not result[1, :, :5].any() and result[0].any(-1).all()


def test_a_mask_of_the_lowest_number_is_no_nan(ways: None) -> None:
    mask = torch.full((2, 1, 3, 50), torch.finfo(torch.float32).min)
    assert attend(queries(3), Cache.filled("int8", "fp8", 50, 64), mask=mask).isfinite().all()
    mask[0, 0, 1, :20] = 0
    result = attend(queries(3), Cache.filled("int8", "fp8", 50, 64), mask=mask)
    assert result.isfinite().all()
    exact = exact_attention(queries(3), Cache.filled("int8", "fp8", 50, 64), mask=mask)
    torch.testing.assert_close(result[0, :, 1].double(), exact[0, :, 1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("num_first", "num_recent"), [(4, 0), (0, 7), (4, 7)])
@pytest.mark.parametrize(("length", "q", "window"), [(50, 1, 0), (50, 9, 0), (50, 1, 10), (6, 2, 0), (9, 9, 0), (3, 3, 0)])
def test_tokens_in_16_bits(num_first: int, num_recent: int, length: int, q: int, window: int, ways: None) -> None:
    cache = Cache.filled("int4", "int8", length, 64, num_first=num_first, num_recent=num_recent)
    check(queries(q), cache, window=window)
    mask = torch.rand(2, 1, q, 64, generator=torch.Generator().manual_seed(0)) < 0.8
    check(queries(q), cache, window=window, mask=mask)


@pytest.mark.parametrize("scale", [torch.tensor([0.05]), torch.tensor([0.02, 0.1])], ids=["one", "of heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_scales(scale: Tensor, dtype: torch.dtype, ways: None) -> None:
    scale = scale.expand(2) if len(scale) == 1 else scale
    check(queries(3, dtype=dtype), Cache.filled("fp8", "fp8", 50, 64, dtype=dtype, static=scale))


@pytest.mark.parametrize("slots", [1, 13, 50, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_slots_that_16_does_not_divide(slots: int, dtype: torch.dtype) -> None:
    for value_format in ("int8", "fp8"):
        check(queries(1, dtype=dtype), Cache.filled("int8", value_format, slots, slots, dtype=dtype))


def test_tiny_and_large_scales() -> None:
    """Keys and values of 1e-8 times and 1e3 times those of the other cases, in bfloat16."""
    for factor in (1e-8, 1e3):
        cache = Cache.filled("fp8", "fp8", 50, 64, dtype=torch.bfloat16)
        cache.keys.tensors[1].mul_(factor)
        cache.values.tensors[1].mul_(factor)
        check(queries(2, dtype=torch.bfloat16), cache, scaling=0.125 / factor)


def test_scores_far_from_0() -> None:
    """Softmax subtracts the largest, also where it comes in a later block."""
    check(queries(2) * 300, Cache.filled("int8", "int8", 50, 64))


def test_storage_may_be_a_part_of_a_larger_one(ways: None) -> None:
    for formats in (("int8", "int8"), ("fp8", "fp8"), ("int4", "int4")):
        whole = Cache.filled(*formats, 50, 64, b=4, h=4)
        part = Cache.filled(*formats, 50, 64)
        part.stored = tuple(None if t is None else t[1:3, ::2] for t in whole.stored)
        for side, tensors in ((part.keys, part.stored[:3]), (part.values, part.stored[3:])):
            side.tensors = tensors
        check(queries(2), part)


def test_queries_need_not_be_contiguous(ways: None) -> None:
    query = queries(4, b=3, heads=2, dim=64).permute(2, 0, 1, 3)[:2]
    query = query.transpose(1, 2)[:, :, :3].repeat_interleave(2, 1)[..., :64]
    cache = Cache.filled("int8", "fp8", 50, 64)
    torch.testing.assert_close(attend(query, cache), attend(query.contiguous(), cache))


def test_there_is_nothing_stored() -> None:
    cache = Cache.filled("fp8", "fp8", 0, 64)
    assert attend(queries(0), cache).shape == (2, 4, 0, 64)


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("int4", "int8"), ("16bit", "16bit")])
def test_opcheck(formats: tuple[str, str]) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    checks = checks[1:] if "fp8" in formats else checks  # PyTorch has no allclose for fp8 tensors, which the first needs
    cache = Cache.filled(*formats, 20, 32, num_first=2, num_recent=3)
    looking = (torch.tensor(20), torch.ones(1, 1, 2, 20, dtype=torch.bool), torch.tensor(0), torch.randn(4))
    arguments = (queries(2), *cache.stored, cache.extra_keys, cache.extra_values, *looking)
    torch.library.opcheck(kv_attention, (*arguments, *formats, 0.1, 4.0, 8, 2), test_utils=checks)
    cache = Cache.filled(*formats, 20, 32)
    arguments = (queries(2), *cache.stored, None, None, torch.tensor(20), None, torch.tensor(0), None)
    torch.library.opcheck(kv_attention, (*arguments, *formats, 0.1, 0.0, 0, 0), test_utils=checks)
