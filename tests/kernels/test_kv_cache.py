"""Appending to a quantized KV cache: its bytes against arithmetic written from the description, and where they go."""

import numpy as np
import pytest
import torch
from torch import Tensor

from torchq.kernels.kv_cache import append_ref, dequantize_kv, kv_append, quantize_kv

QUANTIZED = ("fp8", "int8", "int4")
FORMATS = (*QUANTIZED, "16bit")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random, with a channel of large ones, some tokens of small ones and one of zeros."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 20
    x[..., ::3, :] *= 1e-3
    x[..., -1, :] = 0
    return x.to(dtype)


def storage(
    kv_format: str, b: int, h: int, slots: int, dim: int, transposed: bool, dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    """Codes, scale and zero, all bytes 0x55: what is not written stays that."""
    width, groups = (dim // 2, dim // 32) if kv_format == "int4" else (dim, 1)
    code = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8, "16bit": dtype}[kv_format]
    kinds = [
        ((width, slots) if transposed else (slots, width), code),
        ((groups, slots), torch.bfloat16),
        ((groups, slots), torch.uint8),
    ]
    made = [poisoned(b, h, *shape, dtype=kind) for shape, kind in kinds]
    return [made[0], None if kv_format == "16bit" else made[1], made[2] if kv_format == "int4" else None]


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(torch.uint8).fill_(0x55)
    return tensor


def raw(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous().view(torch.uint8)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or torch.equal(raw(a), raw(b)))


def round_up_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The smallest bfloat16 that is not below, in float32; at least 2^-100."""
    x = np.maximum(x.astype(np.float32), np.float32(2.0**-100))
    down = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    up = (down.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    return np.where(down == x, down, up)


def expected(x: Tensor, kv_format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(Codes [..., D] as numbers, scale [..., G], zero [..., G]) in float32 NumPy, of the description's formulas."""
    array = x.float().numpy()
    if kv_format == "int4":
        groups = array.reshape(*array.shape[:-1], -1, 32)
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = round_up_to_bfloat16((high - low) / np.float32(15))
        zero = np.clip(np.rint(-low / scale * np.float32(16)), 0, 255)
        codes = np.clip(np.rint(groups / scale[..., None] + zero[..., None] / np.float32(16)), 0, 15)
        return codes.reshape(array.shape), scale, zero
    most = np.float32({"fp8": 448, "int8": 127}[kv_format])
    scale = round_up_to_bfloat16(np.abs(array).max(-1, keepdims=True) / most)
    codes = np.clip(array / scale, -most, most)
    if kv_format == "int8":
        return np.rint(codes), scale, None
    return nearest_e4m3(codes), scale, None


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Of the 3 mantissa bits, exponents -6 to 8 and subnormal numbers; ties to the even code."""
    exponent = np.clip(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6, 8).astype(np.float32)
    step = np.exp2(exponent - 3)
    return np.rint(x / step) * step


# ------------------------------------------------------------------------------------------------------------------ numerics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_format", QUANTIZED)
def test_codes_scales_and_zeros(kv_format: str, dtype: torch.dtype) -> None:
    x = values(2, 3, 20, 64, dtype=dtype)
    found = quantize_kv(x, kv_format)
    codes, scale, zero = expected(x, kv_format)
    numbers = found.codes.float() if kv_format != "int4" else torch.cat([found.codes & 15, found.codes >> 4], -1).float()
    assert np.array_equal(numbers.numpy(), codes)
    assert found.scale is not None and found.scale.dtype == torch.bfloat16 and np.array_equal(found.scale.float().numpy(), scale)
    assert (found.zero is None) == (zero is None) and (found.zero is None or np.array_equal(found.zero.numpy(), zero))


@pytest.mark.parametrize(("kv_format", "worst"), [("fp8", 1 / 16), ("int8", 0.505 / 127), ("int4", 0.52 / 15)])
def test_the_error_is_that_of_rounding(kv_format: str, worst: float) -> None:
    """Of a value for fp8 (or of the smallest, subnormal ones), of the largest in a token (int8), of a group's range (int4)."""
    x = values(2, 3, 20, 64)
    back = dequantize_kv(*quantize_kv(x, kv_format), kv_format, torch.float64)
    if kv_format == "fp8":
        unit = torch.maximum(x.abs(), x.abs().amax(-1, keepdim=True) * (2.0**-6 / 448 * 1.01))
    elif kv_format == "int8":
        unit = x.abs().amax(-1, keepdim=True)
    else:
        groups = x.unflatten(-1, (-1, 32))
        unit = (
            (groups.amax(-1, keepdim=True).clamp_min(0) - groups.amin(-1, keepdim=True).clamp_max(0))
            .expand_as(groups)
            .flatten(-2)
        )
    assert ((back - x).abs() <= worst * unit * 1.01).all()
    assert not back[..., -1, :].any()


@pytest.mark.parametrize("kv_format", QUANTIZED)
def test_values_that_are_no_numbers_do_not_crash(kv_format: str) -> None:
    x = values(1, 1, 4, 64)
    x[0, 0, 0, 0], x[0, 0, 1, 0] = torch.nan, torch.inf
    found = quantize_kv(x, kv_format)
    clean = quantize_kv(x[:, :, 2:], kv_format)
    assert same(found.codes[:, :, 2:], clean.codes)


def test_static_scales_clamp() -> None:
    x = torch.tensor([[1.0, -2, 1000, -1000]]).repeat(1, 16)
    codes = quantize_kv(x, "fp8", torch.tensor([[0.5]]))
    assert codes.scale is None and codes.codes.float()[0, :4].tolist() == [2, -4, 448, -448]


# ----------------------------------------------------------------------------------------------------------------- appending


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("op", [kv_append, append_ref])
def test_tokens_go_where_their_position_says(op, key_format: str, value_format: str) -> None:
    """Appended in pieces of several sizes, over the ring's end and larger than the ring."""
    slots, start = 13, 0
    keys, stored = storage(key_format, 2, 3, slots, 64, False), storage(value_format, 2, 3, slots, 128, True)
    key, value = values(2, 3, 60, 64), values(2, 3, 60, 128, seed=1)
    for size in (5, 1, 1, 9, 13, 1, 25, 3):
        piece = slice(start, start + size)
        op(key[:, :, piece], value[:, :, piece], *keys, *stored, torch.tensor(start), key_format, value_format, False, True)
        start += size
        check_ring(key[:, :, :start], keys, key_format, slots, False)
        check_ring(value[:, :, :start], stored, value_format, slots, True)


def check_ring(x: Tensor, stored: list[Tensor | None], kv_format: str, slots: int, transposed: bool) -> None:
    """That slot p % R holds position p of the newest R, and the others what was there."""
    length = x.shape[2]
    new, empty = quantize_kv(x, kv_format), storage(kv_format, 2, 3, slots, x.shape[3], transposed)
    for part, (tensor, fresh, before) in enumerate(zip(stored, new, empty, strict=True)):
        for slot in range(slots if tensor is not None else 0):
            by_tokens = part == 0 and not transposed
            place = (slice(None), slice(None), slot) if by_tokens else (..., slot)
            position = max((p for p in range(length) if p % slots == slot), default=None)
            assert same(tensor[place], before[place] if position is None else fresh[:, :, position]), (part, slot, position)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_by_one_and_at_once_are_the_same_bytes(kv_format: str, dtype: torch.dtype) -> None:
    key, value = values(2, 3, 20, 64, dtype=dtype), values(2, 3, 20, 64, seed=1, dtype=dtype)
    at_once, singly = (
        [*storage(kv_format, 2, 3, 24, 64, False, dtype), *storage(kv_format, 2, 3, 24, 64, True, dtype)] for _ in "ab"
    )
    kv_append(key, value, *at_once, torch.tensor(0), kv_format, kv_format, False, False)
    for i in range(20):
        kv_append(key[:, :, i : i + 1], value[:, :, i : i + 1], *singly, torch.tensor(i), kv_format, kv_format, False, False)
    assert all(map(same, at_once, singly))


def test_inputs_and_storage_need_not_be_contiguous() -> None:
    key = values(2, 4, 9, 64).transpose(1, 2).contiguous().transpose(1, 2)
    value = values(2, 4, 9, 256)[..., ::4]
    for kv_format in FORMATS:
        plain = [*storage(kv_format, 2, 4, 16, 64, False), *storage(kv_format, 2, 4, 16, 64, True)]
        larger = [*storage(kv_format, 3, 8, 16, 64, False), *storage(kv_format, 3, 8, 16, 64, True)]
        part = [None if t is None else t[1:, ::2] for t in larger]
        kv_append(key.contiguous(), value.contiguous(), *plain, torch.tensor(3), kv_format, kv_format, False, False)
        kv_append(key, value, *part, torch.tensor(3), kv_format, kv_format, False, False)
        assert all(map(same, plain, part))
        assert all(same(t[:1], poisoned(*t[:1].shape, dtype=t.dtype)) for t in larger if t is not None)


def test_static_scales_are_read_only() -> None:
    scale = torch.tensor([0.5, 2.0, 1.0]).view(1, 3, 1, 1).expand(2, 3, 1, 16)
    keys, stored = storage("fp8", 2, 3, 16, 64, False), storage("fp8", 2, 3, 16, 64, True)
    keys[1], stored[1] = scale, scale * 1
    key, value = values(2, 3, 5, 64), values(2, 3, 5, 64, seed=1)
    kv_append(key, value, *keys, *stored, torch.tensor(2), "fp8", "fp8", True, False)
    wanted = (key / scale[..., :1]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert same(keys[0][:, :, 2:7], wanted) and scale[0, :, 0, 0].tolist() == [0.5, 2, 1]
    assert same(stored[0][..., 2:7].transpose(2, 3), (value / scale[..., :1]).clamp(-448, 448).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_too_many_tokens_write_nothing(kv_format: str) -> None:
    stored = [*storage(kv_format, 1, 2, 16, 64, False), *storage(kv_format, 1, 2, 16, 64, True)]
    before = [None if t is None else t.clone() for t in stored]
    with pytest.raises(
        ValueError, match=r"holds max_cache_len=16 tokens, 12 of them taken, and cannot take 5 more; nothing was written"
    ):
        kv_append(values(1, 2, 5, 64), values(1, 2, 5, 64), *stored, torch.tensor(12), kv_format, kv_format, False, False)
    assert all(map(same, stored, before))
    kv_append(values(1, 2, 4, 64), values(1, 2, 4, 64), *stored, torch.tensor(12), kv_format, kv_format, False, False)
    assert not same(stored[0], before[0])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_no_tokens(kv_format: str) -> None:
    stored = [*storage(kv_format, 1, 2, 16, 64, False), *storage(kv_format, 1, 2, 16, 64, True)]
    before = [None if t is None else t.clone() for t in stored]
    kv_append(
        values(1, 2, 1, 64)[:, :, :0], values(1, 2, 1, 64)[:, :, :0], *stored, torch.tensor(3), kv_format, kv_format, False, True
    )
    assert all(map(same, stored, before))


@pytest.mark.parametrize("formats", [("fp8", "fp8"), ("int4", "int8"), ("16bit", "int4")])
def test_opcheck(formats: tuple[str, str]) -> None:
    stored = [*storage(formats[0], 1, 2, 16, 64, False), *storage(formats[1], 1, 2, 16, 64, True)]
    stored = [None if t is None else torch.zeros_like(t) for t in stored]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    checks = checks[1:] if "fp8" in formats else checks  # PyTorch has no allclose for fp8 tensors, which the first needs
    arguments = (values(1, 2, 5, 64), values(1, 2, 5, 64, seed=1), *stored, torch.tensor(14), *formats, False, True)
    torch.library.opcheck(kv_append, arguments, test_utils=checks)
