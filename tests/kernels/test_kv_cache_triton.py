"""Triton kernels of the KV cache, in the interpreter: codes bit for bit, attention against float64 of what the codes stand for.

The bound of attention is what its roundings to float16 may cost: probabilities times the values' scales, and the output, each by
2^-11 of itself; queries are float16 already. What float32 adds, and probabilities below float16's normal range, is far less:
2^-13 is granted for it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from torchq.kernels import kv_cache_triton as kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("fp8", "int8", "int4", "16bit")
MOST = {"fp8": 448.0, "int8": 127.0}
Apart = Callable[[Callable[[], None]], None]


# ------------------------------------------------------------------------------------------------------ the contract, plainly


def round_up(x: Tensor) -> Tensor:
    """To bfloat16, from below; at least 2^-100."""
    x = x.clamp_min(2.0**-100)
    near = x.bfloat16()
    above = torch.nextafter(near, torch.tensor(math.inf, dtype=torch.bfloat16, device=x.device))
    return torch.where(near.float() < x, above, near).float()


def quantize(x: Tensor, form: str, static: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes [..., q, D], scale [..., q, G] and zero points of tokens [..., q, D]."""
    x = x.float()
    if form == "16bit":
        return x, None, None
    if form == "int4":
        groups = x.unflatten(-1, (-1, 32))
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scale = round_up((high - low) / 15)
        zero = (-low / scale * 16).round().clamp(0, 255)
        codes = (groups / scale.unsqueeze(-1) + zero.unsqueeze(-1) / 16).round().clamp(0, 15)
        return codes.flatten(-2), scale, zero
    scale = round_up(x.abs().amax(-1, keepdim=True) / MOST[form]) if static is None else static.expand(*x.shape[:-1], 1)
    codes = (x / scale).clamp(-MOST[form], MOST[form])
    return (codes.to(torch.float8_e4m3fn).float() if form == "fp8" else codes.round()), scale, None


@dataclass
class Side:
    """Keys, or values (transposed), of a cache; what is not stored is random bits or NaN."""

    form: str
    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    values: bool

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.codes, self.scale, self.zero

    def plain_codes(self) -> Tensor:
        """[B, H, R, D] float32."""
        codes = self.codes.transpose(2, 3) if self.values else self.codes
        return (torch.cat((codes & 15, codes >> 4), -1) if self.form == "int4" else codes).float()

    def exact(self) -> Tensor:
        """[B, H, R, D] float64: what the codes stand for."""
        codes = self.plain_codes().double()
        if self.scale is None:
            return codes
        scale = self.scale.transpose(2, 3).double().unsqueeze(-1)
        zero = 0 if self.zero is None else self.zero.transpose(2, 3).double().unsqueeze(-1) / 16
        return ((codes.unflatten(-1, (scale.shape[3], -1)) - zero) * scale).flatten(-2)


def new_side(
    form: str, shape: tuple[int, int, int, int], values: bool, dtype: torch.dtype, pad: int = 0, static: Tensor | None = None
) -> Side:
    """A cache of shape [B, H, R, D] that holds nothing; ``pad``: elements between rows, and before the first."""
    b, h, r, d = shape
    types = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8, "16bit": dtype}
    rows, columns = (d // 2 if form == "int4" else d), r
    rows, columns = (rows, columns) if values else (columns, rows)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (b, h, rows, columns + pad), generator=generator, dtype=torch.uint8)
    codes = torch.full(bits.shape, math.nan, dtype=dtype) if form == "16bit" else bits.view(types[form])
    groups = d // 32 if form == "int4" else 1
    scale = None if form == "16bit" else torch.full((b, h, groups, r), math.nan, dtype=torch.bfloat16)
    if static is not None and form in MOST:
        scale = static.to(DEVICE).view(1, -1, 1, 1).expand(b, h, 1, r)
    zero = torch.randint(0, 256, (b, h, groups, r), generator=generator, dtype=torch.uint8) if form == "int4" else None
    tensors = [tensor if tensor is None else tensor.to(DEVICE) for tensor in (codes, scale, zero)]
    return Side(form, tensors[0][..., pad:], tensors[1], tensors[2], values)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, length: int, mask: Tensor | None = None, mask_offset: int = 0,
    scaling: float = 1.0, softcap: float = 0.0, window: int = 0, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The contract in float64: the output [B, Hq, q, DV], and the same of the values' magnitudes."""
    (b, hq, q, _), (h, r) = query.shape, keys.shape[1:3]
    slot, t = torch.arange(r, device=DEVICE), length - q + torch.arange(q, device=DEVICE)
    p = (length - 1) - ((length - 1 - slot) % r)
    keys, values = (x.masked_fill((p < 0).unsqueeze(1), 0).repeat_interleave(hq // h, 1) for x in (keys, values))
    s = query.double() @ keys.transpose(2, 3) * scaling
    s = softcap * torch.tanh(s / softcap) if softcap else s
    allowed = (p >= 0).expand(b, hq, q, r)
    if mask is None:
        allowed = allowed & (p <= t.unsqueeze(1))
    if window:
        allowed = allowed & (p > t.unsqueeze(1) - window)
    if mask is not None:
        column = p - mask_offset
        entries = mask.expand(b, hq, -1, -1)[..., column.clamp(0, mask.shape[3] - 1)]
        allowed = allowed & (column >= 0) & (column < mask.shape[3])
        allowed, s = (allowed & entries, s) if mask.dtype == torch.bool else (allowed, s + entries.double())
    s = s.masked_fill(~allowed, -math.inf)
    top = s.amax(-1, keepdim=True).clamp_min(-1e9)
    weights = torch.exp(s - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double().view(1, -1, 1, 1) - top)
    weights = torch.where(total > 0, weights / total, 0.0)
    return weights @ values, weights @ values.abs()


# ----------------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A cache, what is stored in it, and queries."""

    keys: str = "fp8"
    values: str = "fp8"
    batch: int = 1
    heads: int = 2
    rep: int = 4
    dim: int = 64
    value_dim: int = 0  # 0: the same
    slots: int = 128
    length: int = 100
    q: int = 1
    wrap: bool = False
    pad: int = 0
    static: bool = False
    splits: int = 0
    dtype: torch.dtype = torch.float16
    spread: float = 0.0  # of values' sizes, in powers of two; of keys' a tenth
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Filled:
    """A case's tensors."""

    query: Tensor
    keys: Side
    values: Side


def fill(case: Case) -> Filled:
    """Append random tokens in three goes, the last of them the newest q."""
    generator = torch.Generator().manual_seed(0)
    b, h, value_dim = case.batch, case.heads, case.value_dim or case.dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sizes = torch.exp2(case.spread * (torch.rand(b, h, case.length, 2, generator=generator) - 0.5))
    key, value = (
        normal(b, h, case.length, case.dim) * sizes[..., :1] ** 0.1,
        normal(b, h, case.length, value_dim) * sizes[..., 1:],
    )
    key[..., 3] *= 4  # a channel that sticks out
    static = torch.tensor([0.03, 0.05] * h)[:h] if case.static else None
    keys = new_side(case.keys, (b, h, case.slots, case.dim), False, case.dtype, case.pad, static)
    values = new_side(case.values, (b, h, case.slots, value_dim), True, case.dtype, case.pad, static)
    stops = sorted({0, case.length // 3, case.length - case.q, case.length})
    key, value = key.to(DEVICE, case.dtype), value.to(DEVICE, case.dtype)
    for start, stop in pairwise(stops):
        at = torch.tensor(start, device=DEVICE)
        some = key[:, :, start:stop], value[:, :, start:stop]
        kv.append_triton(*some, *keys.tensors, *values.tensors, at, case.keys, case.values, case.static, case.wrap)
    query = normal(b, case.q, h * case.rep, case.dim).half().to(DEVICE, case.dtype).transpose(1, 2)
    return Filled(query, keys, values)


def run(case: Case, filled: Filled, **changes: Any) -> Tensor:
    """The kernel's output."""
    options = {"mask": None, "mask_offset": 0, "scaling": case.dim**-0.5, "softcap": 0.0, "window": 0, "sinks": None}
    options |= case.options
    length, options["mask_offset"] = (torch.tensor(number, device=DEVICE) for number in (case.length, options["mask_offset"]))
    arguments = (filled.query, *filled.keys.tensors, *filled.values.tensors, length)
    return kv.attention_triton(
        *arguments, **options, key_format=case.keys, value_format=case.values, splits=changes.get("splits", case.splits)
    )


def excess(case: Case, filled: Filled, out: Tensor) -> float:
    """The largest error, by the bound."""
    options = {"scaling": case.dim**-0.5} | case.options
    exact, size = attend(filled.query, filled.keys.exact(), filled.values.exact(), case.length, **options)
    assert out.shape == exact.shape and out.dtype == case.dtype and out.isfinite().all()
    bound = 2.0**-11 * (size + exact.abs()) + 2.0**-13 * size + 2.0**-25
    return float(((out.double() - exact).abs() / bound).max())


def check(case: Case) -> None:
    filled = fill(case)
    assert excess(case, filled, run(case, filled)) <= 1


def random_mask(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7).to(DEVICE)


WRAPPED = Case(slots=64, length=150, wrap=True, q=5)
CASES = {
    **{f"{form} q={q}": Case(form, form, q=q) for form in FORMATS for q in (1, 5)},
    "int8 and fp8": Case("int8", "fp8", value_dim=32),
    "16bit and int4": Case("16bit", "int4", dim=32, value_dim=64, q=2),
    "fp8 and 16bit": Case("fp8", "16bit", value_dim=128),
    "int4 and int8": Case("int4", "int8", dim=128, value_dim=80),
    **{f"{form} GQA {rep}": Case(form, form, rep=rep, heads=1, batch=2, q=2) for form in ("int8", "int4") for rep in (1, 8)},
    "28 rows": Case(rep=7, q=4, heads=1),
    **{f"{form} D={dim}": Case(form, form, dim=dim, heads=1) for form in ("fp8", "16bit") for dim in (80, 96, 128, 256)},
    **{f"int4 D={dim}": Case("int4", "int4", dim=dim, heads=1) for dim in (128, 192, 256)},
    **{f"{form} wrapped": replace(WRAPPED, keys=form, values=form) for form in FORMATS},
    "wrapped, R=70": replace(WRAPPED, slots=70),
    "wrapped, window": replace(WRAPPED, options={"window": 23}),
    "window": Case(q=5, options={"window": 23}, slots=256, length=200, splits=2),
    "window before the first tile": Case(length=128, options={"window": 3}),
    "length 1": Case(length=1),
    "as many as slots": Case(length=128, q=3),
    "R=20": Case(slots=20, length=17, q=2),
    "R=100": Case("int4", "int4", slots=100, length=99),
    **{f"{form} R=101": Case(form, form, slots=101, length=101, heads=1) for form in FORMATS},
    **{f"{form} R=21": Case(form, form, slots=21, length=20, heads=1) for form in ("int8", "16bit")},
    "between rows": Case("int8", "int4", pad=3),
    "between words": Case("int4", "int8", pad=4),
    "bool mask": Case(batch=2, q=3, options={"mask": random_mask(2, 1, 3, 100)}),
    "mask of some": Case(q=3, options={"mask": random_mask(1, 8, 3, 60), "mask_offset": 30}),
    "mask past the end": Case("int4", "int4", q=3, options={"mask": random_mask(1, 1, 3, 120), "mask_offset": -10}),
    "mask, wrapped": replace(WRAPPED, options={"mask": random_mask(1, 1, 5, 80), "mask_offset": 70, "window": 40}),
    "float mask": Case(q=2, options={"mask": torch.randn(1, 8, 100, 2, device=DEVICE).half().transpose(2, 3), "softcap": 5.0}),
    "sinks": Case(batch=2, options={"sinks": torch.linspace(-3, 6, 8, device=DEVICE)}),
    "softcap": Case("int8", "int8", q=2, options={"softcap": 2.0, "scaling": 1.0}),
    "static fp8": Case(static=True, q=2),
    "static int8 keys": Case("int8", "16bit", static=True, wrap=True, slots=64, length=90),
    "splits": Case("int8", "int4", slots=512, length=300, splits=4),
    "splits of nothing": Case(slots=512, length=3, splits=8),
    "float32": Case("fp8", "16bit", dtype=torch.float32),
    "float32 keys, R=30": Case("16bit", "int8", dtype=torch.float32, slots=30, length=30, dim=32),
    **{f"{form}, values of all sizes": Case(form, form, spread=60, dtype=torch.float32) for form in ("fp8", "int8", "int4")},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str, apart: Apart) -> None:
    apart(lambda: check(CASES[name]))


def test_a_wrong_code_scale_or_slot_shows(apart: Apart) -> None:
    def body() -> None:
        for form in ("fp8", "int8", "int4"):
            case = Case(form, form, length=40, slots=64, heads=1, q=2)
            filled = fill(case)
            out = run(case, filled)
            assert excess(case, filled, out) <= 1
            for side in (filled.keys, filled.values):
                for tensor in (tensor for tensor in side.tensors if tensor is not None):
                    kept, raw = tensor.clone(), tensor.view(torch.uint8)
                    raw.copy_(raw.roll(1, 3 if tensor is not side.codes or side.values else 2))
                    assert excess(case, filled, out) > 1
                    tensor.copy_(kept)

    apart(body)


def test_rows_that_may_see_nothing_are_zero(apart: Apart) -> None:
    def body() -> None:
        mask = random_mask(1, 1, 3, 100)
        mask[:, :, 1] = False
        for sinks in (None, torch.zeros(8, device=DEVICE)):
            case = Case(q=3, splits=2, options={"mask": mask, "sinks": sinks})
            filled = fill(case)
            out = run(case, filled)
            assert not out[:, :, 1].any() and out[:, :, 0].any() and excess(case, filled, out) <= 1
        floating = torch.zeros(1, 1, 3, 100, dtype=torch.float16, device=DEVICE).masked_fill(~mask, -math.inf)
        case = Case(q=3, options={"mask": floating})
        assert not run(case, fill(case))[:, :, 1].any()

    apart(body)


def test_splits_agree_and_repeat(apart: Apart) -> None:
    def body() -> None:
        case = Case("int8", "fp8", slots=256, length=256, q=2)
        filled = fill(case)
        outs = [run(case, filled, splits=splits) for splits in (1, 2, 3, 4, 4)]
        assert torch.equal(outs[3], outs[4])
        assert all(excess(case, filled, out) <= 1 for out in outs)

    apart(body)


def test_queries_of_any_size(apart: Apart) -> None:
    def body() -> None:
        for form in FORMATS:
            case = Case(form, form, dtype=torch.float32, heads=1)
            filled = fill(case)
            expected = run(case, filled)
            filled.query *= 2.0**40
            found = run(replace(case, options={"scaling": case.dim**-0.5 * 2.0**-40}), filled)
            assert torch.equal(found, expected)
            filled.query *= 2.0**-40
            filled.query[:, 0] = 0
            assert excess(case, filled, run(case, filled)) <= 1

    apart(body)


@pytest.mark.gpu
@pytest.mark.parametrize("q", [1, 5])
@pytest.mark.parametrize("form", FORMATS)
def test_bfloat16(form: str, q: int) -> None:
    """The interpreter cannot multiply it, and truncates to it; probabilities and outputs are rounded to it: 2^-8 of 2^-11."""
    case = Case(form, form, q=q, dtype=torch.bfloat16)
    filled = fill(case)
    assert excess(case, filled, run(case, filled)) <= 8


# ---------------------------------------------------------------------------------------------------------------------- append


def stored(side: Side, slots: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes, scale and zero points of some slots, tokens first."""
    scale, zero = (None if x is None else x[..., slots].transpose(2, 3).float() for x in (side.scale, side.zero))
    return side.plain_codes()[:, :, slots], scale, zero


def assert_stored(side: Side, tokens: Tensor, slots: Tensor, static: Tensor | None = None) -> None:
    expected = quantize(tokens.contiguous(), side.form, static)
    for found, exact in zip(stored(side, slots), expected, strict=True):
        assert (found is None) == (exact is None)
        assert found is None or exact is None or torch.equal(found, exact)


def tokens_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random tokens, of which some are zero or of one sign; or multiples of half a code, so that many are ties."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 10, (*shape[:3], 1), generator=generator))
    if kind == "ties":
        x = torch.randint(-254, 255, shape, generator=generator) / 2
        x[..., 0] = 127
        x[..., 1] = -448 / 3
    x[:, :, 0], x[:, :, 1], x[:, :, 2] = 0, x[:, :, 1].abs(), -x[:, :, 2].abs()
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_the_formulas(form: str, kind: str, apart: Apart) -> None:
    def body() -> None:
        for dtype, dims in ((torch.float16, (64, 128)), (torch.float32, (192, 64))):
            x = tokens_of(kind, (2, 2, 40, sum(dims)), dtype)
            key, value = x.split(dims, 3)
            keys, values = (
                new_side(form, (2, 2, 48, dim), is_value, dtype) for dim, is_value in zip(dims, (False, True), strict=True)
            )
            before = [[None if t is None else t.clone() for t in side.tensors] for side in (keys, values)]
            kv.append_triton(key, value, *keys.tensors, *values.tensors, torch.tensor(5, device=DEVICE), form, form, False, False)
            slots, rest = torch.arange(5, 45), torch.tensor([0, 1, 2, 3, 4, 45, 46, 47])
            for side, tokens, kept in ((keys, key, before[0]), (values, value, before[1])):
                assert_stored(side, tokens, slots)
                for dim, new, old in zip((3 if side.values else 2, 3, 3), side.tensors, kept, strict=True):
                    if new is not None and old is not None:  # other slots are as they were, NaN and all
                        pair = [t.index_select(dim, rest.to(DEVICE)).contiguous().view(torch.uint8) for t in (new, old)]
                        assert torch.equal(*pair)

    apart(body)


def test_every_e4m3_tie_and_its_neighbours(apart: Apart) -> None:
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, ties, torch.nextafter(ties, values[1:]), torch.nextafter(ties, values[:-1])))
    x = torch.cat((x, -x, torch.zeros(1024 - 2 * len(x)))).view(1, 1, 8, 128).to(DEVICE)

    def body() -> None:
        one = torch.ones(1)
        keys, values = (new_side("fp8", (1, 1, 8, 128), side, torch.float32, static=one) for side in (False, True))
        kv.append_triton(x, x, *keys.tensors, *values.tensors, torch.tensor(0, device=DEVICE), "fp8", "fp8", True, False)
        for side in (keys, values):
            assert torch.equal(side.plain_codes(), x.to(torch.float8_e4m3fn).float())

    apart(body)


def test_the_ring_and_the_end(apart: Apart) -> None:
    def body() -> None:
        x = tokens_of("random", (1, 2, 50, 128), torch.float16)
        for start, q, wrap in ((0, 1, True), (30, 1, True), (30, 10, True), (7, 50, True), (28, 8, False), (32, 1, False)):
            keys, values = (new_side(form, (1, 2, 32, 64), form == "fp8", torch.float16) for form in ("int4", "fp8"))
            tokens = x[:, :, :q].transpose(2, 3).contiguous().transpose(2, 3)
            key, value = tokens[..., :64], tokens[..., 64:]
            at = torch.tensor(start, device=DEVICE)
            fresh = keys.codes.clone()
            kv.append_triton(key, value, *keys.tensors, *values.tensors, at, "int4", "fp8", False, wrap)
            positions = torch.arange(start, start + q)
            kept = positions >= start + q - 32 if wrap else positions < 32
            for side, mine in ((keys, key), (values, value)):
                assert_stored(side, mine[:, :, kept.to(DEVICE)], positions[kept] % 32)
            others = torch.ones(32, dtype=torch.bool).index_fill(0, positions[kept] % 32, False)
            assert torch.equal(keys.codes[:, :, others.to(DEVICE)], fresh[:, :, others.to(DEVICE)])
        kv.append_triton(key[:, :, :0], value[:, :, :0], *keys.tensors, *values.tensors, at, "int4", "fp8", False, True)

    apart(body)


def test_static_scales_are_read(apart: Apart) -> None:
    def body() -> None:
        x, static = tokens_of("random", (2, 2, 12, 64), torch.float16), torch.tensor([0.02, 0.3])
        keys = new_side("int8", (2, 2, 16, 64), False, torch.float16, static=static)
        values = new_side("fp8", (2, 2, 16, 64), True, torch.float16, static=static)
        kv.append_triton(x, x, *keys.tensors, *values.tensors, torch.tensor(3, device=DEVICE), "int8", "fp8", True, True)
        for side in (keys, values):
            assert_stored(side, x, torch.arange(3, 15), static.to(DEVICE).view(1, 2, 1, 1))

    apart(body)
