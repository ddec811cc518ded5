"""The step of a GPU session on the quantized KV cache: decoding, beside PyTorch's attention and transformers' quantized cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from common import console
from gpu_report import BASE_KV, print_kv_cache
from gpu_timing import Plan, limits_of, num_copies, time_runs
from torch import Tensor

from torchq.kernels.kv_cache import CODE_DTYPE, FORMATS, GROUP_SIZE, dequantize_stored
from torchq.kernels.kv_cache_triton import append_triton, attention_triton

if TYPE_CHECKING:
    from gpu_session import Session

BITS = {"fp8": 8, "int8": 8, "int4": 4}
MOST_TOKENS = 1 << 18  # of a batch, for what makes float32 copies of everything: the check, and transformers' cache


@dataclass(frozen=True)
class Sizes:
    """A layer's cache while decoding: B sequences of T tokens; H key/value heads, Hq query heads, head_dim D."""

    batch: int
    tokens: int
    heads: int = 8
    q_heads: int = 32
    dim: int = 128

    @property
    def label(self) -> str:
        """Name."""
        return f"B={self.batch} T={self.tokens}"


def all_sizes(plan: Plan) -> list[Sizes]:
    """Return what is timed."""
    if plan.dry:
        return [Sizes(1, 64, 1, 4, 64), Sizes(2, 96, 1, 4, 64)]
    lengths = (1024, 32768) if plan.quick else (1024, 8192, 32768)
    return [Sizes(batch, tokens) for batch in (1, 16, 64) for tokens in lengths]


@dataclass(frozen=True)
class Cache:
    """Codes, scales and zero points of keys, then of values, full to the last slot."""

    form: str
    keys: tuple[Tensor, Tensor | None, Tensor | None]
    values: tuple[Tensor, Tensor | None, Tensor | None]
    length: Tensor

    @property
    def nbytes(self) -> int:
        """Of all that attention reads."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values) if tensor is not None)

    def clone(self) -> Cache:
        """A copy elsewhere in memory."""
        keys, values = (tuple(None if t is None else t.clone() for t in side) for side in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def attend(self, query: Tensor) -> Tensor:
        """Decode a token."""
        arguments = (*self.keys, *self.values, self.length, None, self.length, query.shape[-1] ** -0.5, 0.0, 0, None)
        return attention_triton(query, *arguments, self.form, self.form)

    def append(self, key: Tensor, value: Tensor, start: Tensor) -> None:
        """Store tokens from a slot on."""
        append_triton(key, value, *self.keys, *self.values, start, self.form, self.form, False, True)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, T, D] that the codes stand for, float32."""
        sides = ((self.keys, False), (self.values, True))
        keys, values = (dequantize_stored(*side, self.form, torch.float32, transposed) for side, transposed in sides)
        return keys, values


def random_cache(form: str, sizes: Sizes, plan: Plan) -> Cache:
    """Return a cache of normal keys and values, appended in pieces; its length lies on the device."""
    shape = (sizes.batch, sizes.heads)
    dim = sizes.dim // 2 if form == "int4" else sizes.dim
    groups = sizes.dim // GROUP_SIZE if form == "int4" else 1
    sides = []
    for codes_shape in ((sizes.tokens, dim), (dim, sizes.tokens)):
        codes = torch.empty(*shape, *codes_shape, dtype=CODE_DTYPE.get(form, plan.dtype), device=plan.device)
        scale = zero = None
        if form != "16bit":
            scale = torch.empty(*shape, groups, sizes.tokens, dtype=torch.bfloat16, device=plan.device)
        if form == "int4":
            zero = torch.empty(*shape, groups, sizes.tokens, dtype=torch.uint8, device=plan.device)
        sides.append((codes, scale, zero))
    cache = Cache(form, *sides, torch.tensor(sizes.tokens, device=plan.device))
    for start in range(0, sizes.tokens, 1024):
        count = min(1024, sizes.tokens - start)
        key, value = (random_states(sizes, count, sizes.heads, plan, start + side) for side in (0, 1))
        cache.append(key, value, torch.tensor(start, device=plan.device))
    return cache


def random_states(sizes: Sizes, tokens: int, heads: int, plan: Plan, seed: int) -> Tensor:
    """Return normal keys, values or queries [B, heads, tokens, D]."""
    generator = torch.Generator(plan.device).manual_seed(seed)
    shape = (sizes.batch, heads, tokens, sizes.dim)
    return torch.randn(shape, generator=generator, device=plan.device, dtype=torch.float32).to(plan.dtype)


def check(cache: Cache, query: Tensor) -> float:
    """Return the relative error to PyTorch's attention in float32; ValueError above 1 %."""
    expected = F.scaled_dot_product_attention(query.float(), *cache.dense(), enable_gqa=True)
    error = float((cache.attend(query).float() - expected).norm() / expected.norm())
    if not error < 0.01:
        raise ValueError(f"{cache.form}: relative error {error:.4f}; a wrong result is not timed")
    return error


def transformers_cache(backend: str, sizes: Sizes, plan: Plan, query: Tensor) -> Callable[[], Tensor]:
    """Return a decoding step of transformers' cache: a token is stored, everything is dequantized, PyTorch attends."""
    from transformers import LlamaConfig, QuantizedCache

    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=sizes.q_heads, num_key_value_heads=sizes.heads)
    cache = QuantizedCache(backend, config)
    cache.update(*(random_states(sizes, sizes.tokens - 1, sizes.heads, plan, seed) for seed in (0, 1)), 0)
    key, value = (random_states(sizes, 1, sizes.heads, plan, seed) for seed in (2, 3))

    def step() -> Tensor:
        return F.scaled_dot_product_attention(query, *cache.update(key, value, 0), enable_gqa=True)

    step()
    return step


def lineup(session: Session, sizes: Sizes, record: dict[str, Any]) -> tuple[dict[str, tuple[Any, int]], dict[str, int]]:
    """Return prepared runs by name, and the bytes that each contender must read."""
    plan, timer, notes = session.plan, session.timer, record.setdefault("notes", {})
    query = random_states(sizes, 1, sizes.q_heads, plan, 5)
    runs, nbytes = {}, {}
    for form in FORMATS:
        cache = random_cache(form, sizes, plan)
        if sizes.batch * sizes.tokens <= MOST_TOKENS:
            record.setdefault("errors", {})[f"{form} {sizes.label}"] = check(cache, query)
        copies = [cache, *(cache.clone() for _ in range(num_copies(cache.nbytes, plan.rotate) - 1))]
        nbytes[form] = cache.nbytes
        runs[form] = timer.prepare([partial(copy.attend, query) for copy in copies]), len(copies)
        if form == "fp8":
            key, value = (random_states(sizes, 1, sizes.heads, plan, seed) for seed in (2, 3))
            nbytes["fp8, append"] = 2 * key.nbytes * 3 // 2
            calls = [partial(copy.append, key, value, cache.length - 1) for copy in copies]
            runs["fp8, append"] = timer.prepare(calls), len(copies)
    base = [cache.keys[0], cache.values[0].transpose(2, 3).contiguous()]  # of 16 bits
    pairs = [[tensor.clone() for tensor in base] for _ in range(num_copies(cache.nbytes, plan.rotate))]
    sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)
    nbytes[BASE_KV] = cache.nbytes
    runs[BASE_KV] = timer.prepare([partial(sdpa, query, *pair) for pair in pairs]), len(pairs)
    for backend in ("fp8", "quanto", "hqq"):
        name = f"transformers {backend}"
        if sizes.batch * sizes.tokens > MOST_TOKENS:
            notes[f"{name} {sizes.label}"] = "not timed: too large"
            continue
        try:
            step = transformers_cache(backend, sizes, plan, query)
            runs[name] = timer.prepare([step], graph=False), 1
            nbytes[name] = cache.nbytes * BITS.get(backend, 4) // 16
        except Exception as error:  # of another library: any
            notes[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return runs, nbytes


def time_kv_cache(session: Session, record: dict[str, Any]) -> None:
    """Time decoding over a quantized KV cache, by format, batch and length."""
    plan, limits = session.plan, limits_of(session)
    rows = record.setdefault("rows", [])
    for sizes in all_sizes(plan):
        if session.late(sizes.label):
            continue
        runs, nbytes = lineup(session, sizes, record)
        timings = time_runs(session.timer, runs, min(plan.rounds, 20))
        for name, timing in timings.items():
            row = {"contender": name, "batch": sizes.batch, "tokens": sizes.tokens, "bytes": nbytes[name]}
            row |= {"median_s": timing.median, "p10_s": timing.low, "p90_s": timing.high}
            row |= {"gbytes_per_second": nbytes[name] / timing.median / 1e9, "speedup": timings[BASE_KV].median / timing.median}
            rows.append(row | {"of_bandwidth": limits.seconds(nbytes[name]) / timing.median})
        del runs
        session.save()
    print_kv_cache(rows)
    for name, note in record.get("notes", {}).items():
        console.print(f"{name}: {note}", highlight=False, markup=False)
