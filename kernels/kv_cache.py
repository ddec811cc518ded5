"""A quantized KV cache's storage: formats of keys and values, and appending tokens to them.

Shapes: B sequences, H key/value heads, R slots, q new tokens, D head_dim, G scales per token and head.

* keys: codes [B, H, R, D]; values: codes [B, H, D, R], transposed, so that a kernel reads both along the slots or channels that
  its dot products sum over.
* ``"fp8"`` (e4m3) and ``"int8"`` (-127..127): x = scale * code. ``"int4"`` (0..15, groups of 32 channels, two channels in a byte:
  d in the low half, d + D/2 in the high one): x = scale * (code - zero / 16). ``"16bit"``: the tensor itself.
* scale: bfloat16 [B, H, G, R], rounded up, so that nothing is clipped; or static, float32, one number for all slots. zero: uint8
  of scale's shape.

Position p (counted over all tokens) is in slot p % R.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchq.kernels.dispatch import gpu_of
from torchq.kernels.fp8 import FP8_MAX, decode_fp8
from torchq.kernels.registration import register_op

FORMATS = ("fp8", "int8", "int4", "16bit")
GROUP_SIZE = 32
MAX_CODE = {"fp8": FP8_MAX, "int8": 127.0}
CODE_DTYPE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
MIN_SCALE = 2.0**-100
MAX_KERNEL_DIM = 256
"""Most channels of a head for the Triton kernels."""


class Codes(NamedTuple):
    """What keys or values were quantized to, tokens before channels: codes [..., D or D/2], scale and zero [..., G]."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None


def quantize_kv(x: Tensor, kv_format: str, static_scale: Tensor | None = None) -> Codes:
    """Quantize the last dimension of ``x`` [..., D], per token and head.

    Args:
        x: Keys or values, floating point.
        kv_format: One of ``FORMATS``.
        static_scale: Broadcastable to [..., 1]: used instead of one per token (``"fp8"`` and ``"int8"``).
    """
    if kv_format == "16bit":
        return Codes(x, None, None)
    x = x.float()
    if kv_format == "int4":
        return _quantize_int4(x)
    most = MAX_CODE[kv_format]
    scale = _as_scale(x.abs().amax(-1, keepdim=True).div_(most)) if static_scale is None else static_scale
    scaled = x.div(scale).clamp_(-most, most)
    codes = scaled.to(torch.float8_e4m3fn) if kv_format == "fp8" else scaled.round_().to(torch.int8)
    return Codes(codes, scale if static_scale is None else None, None)


def _quantize_int4(x: Tensor) -> Codes:
    groups = x.unflatten(-1, (-1, GROUP_SIZE))
    low, high = groups.amin(-1, keepdim=True).clamp_max_(0), groups.amax(-1, keepdim=True).clamp_min_(0)
    scale = _as_scale((high - low) / 15)
    zero = (-low / scale.float() * 16).round_().clamp_(0, 255)
    codes = (groups / scale.float() + zero / 16).round_().clamp_(0, 15).to(torch.uint8).flatten(-2)
    low_half, high_half = codes.chunk(2, -1)
    return Codes(low_half | high_half << 4, scale.squeeze(-1), zero.to(torch.uint8).squeeze(-1))


def _as_scale(scale: Tensor) -> Tensor:
    """Round up to bfloat16."""
    bits = scale.clamp_min_(MIN_SCALE).view(torch.int32)
    return bits.add_(0xFFFF).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def dequantize_kv(codes: Tensor, scale: Tensor | None, zero: Tensor | None, kv_format: str, dtype: torch.dtype) -> Tensor:
    """Return [..., D] in ``dtype``: the inverse of :func:`quantize_kv`, to rounding."""
    if kv_format == "16bit":
        return codes.to(dtype)
    assert scale is not None
    wide = torch.float32 if dtype != torch.float64 else dtype
    if kv_format == "int4":
        assert zero is not None
        halves = torch.cat([codes & 15, codes >> 4], -1).to(wide).unflatten(-1, (-1, GROUP_SIZE))
        zero = zero.unsqueeze(-1).to(wide) / 16
        return ((halves - zero) * scale.unsqueeze(-1).to(wide)).flatten(-2).to(dtype)
    values = decode_fp8(codes, torch.float32).to(wide) if kv_format == "fp8" else codes.to(wide)
    return (values * scale.to(wide)).to(dtype)


def dequantize_stored(
    codes: Tensor, scale: Tensor | None, zero: Tensor | None, kv_format: str, dtype: torch.dtype, transposed: bool
) -> Tensor:
    """Return [B, H, n, D] in ``dtype`` of keys, or of values (``transposed``), as a cache holds them."""
    scale, zero = (None if t is None else t.transpose(-1, -2) for t in (scale, zero))
    return dequantize_kv(codes.transpose(-1, -2) if transposed else codes, scale, zero, kv_format, dtype)


@register_op("torchq::kv_append", mutates_args=["key_codes", "key_scale", "key_zero", "value_codes", "value_scale", "value_zero"])
def kv_append(
    key: Tensor,
    value: Tensor,
    key_codes: Tensor,
    key_scale: Tensor | None,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor | None,
    value_zero: Tensor | None,
    start: Tensor,
    key_format: str,
    value_format: str,
    static_scales: bool,
    wrap: bool,
) -> None:
    """Quantize keys and values of new tokens and write them into a cache, in place.

    Args:
        key: [B, H, q, D], floating point, any strides.
        value: [B, H, q, Dv].
        key_codes: The cache's keys; this and the next five as the module's docstring says.
        key_scale: Scales of keys, or None.
        key_zero: Zero points of keys, or None.
        value_codes: The cache's values.
        value_scale: Scales of values, or None.
        value_zero: Zero points of values, or None.
        start: How many tokens were stored before, int64 [], on the cache's device: token i is position start + i.
        key_format: One of ``FORMATS``.
        value_format: The same.
        static_scales: Whether scales are given and not measured.
        wrap: Whether tokens may overwrite those R positions before them; of more than R the last R are stored.

    Raises:
        ValueError: If the tokens do not fit and ``wrap`` is False; nothing is written then. On a GPU, where the length is not
            known without waiting for it, tokens that do not fit are left out instead.
    """
    arguments = (key, value, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, start)
    if gpu_of(key.device) is not None and max(key.shape[-1], value.shape[-1]) <= MAX_KERNEL_DIM:
        from torchq.kernels.kv_cache_triton import append_triton

        if static_scales and key_scale is not None and value_scale is not None:
            key_scale, value_scale = (s.expand(*key.shape[:2], 1, key_codes.shape[2]) for s in (key_scale, value_scale))
            arguments = (key, value, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, start)
        append_triton(*arguments, key_format, value_format, static_scales, wrap)
    else:
        append_ref(*arguments, key_format, value_format, static_scales, wrap)


@torch.library.register_fake("torchq::kv_append")
def _(
    key,
    value,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    start,
    key_format,
    value_format,
    static_scales,
    wrap,
):
    return None


def append_ref(
    key: Tensor,
    value: Tensor,
    key_codes: Tensor,
    key_scale: Tensor | None,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor | None,
    value_zero: Tensor | None,
    start: Tensor,
    key_format: str,
    value_format: str,
    static_scales: bool,
    wrap: bool,
) -> None:
    """Do what :func:`kv_append` does, in plain PyTorch, on any device."""
    slots, q, first = key_codes.shape[2], key.shape[2], int(start)
    if not wrap and first + q > slots:
        raise ValueError(
            f"the KV cache holds max_cache_len={slots} tokens, {first} of them taken, and cannot take {q} more; nothing was "
            "written. Make the cache longer (max_cache_len=...), or let it grow (max_cache_len=None)"
        )
    if q > slots:
        key, value, first, q = key[:, :, -slots:], value[:, :, -slots:], first + q - slots, slots
    static = [None if not static_scales or s is None else s[..., :1] for s in (key_scale, value_scale)]
    if key_format == value_format and key.shape == value.shape and static == [None, None]:
        both = quantize_kv(torch.stack([key, value]), key_format)  # in half the calls
        new = [Codes(both.codes[side], *(None if t is None else t[side] for t in (both.scale, both.zero))) for side in (0, 1)]
    else:
        new = [quantize_kv(key, key_format, static[0]), quantize_kv(value, value_format, static[1])]
    for source, slot, count in _runs(first % slots, q, slots):
        tokens, places = slice(source, source + count), slice(slot, slot + count)
        key_codes[:, :, places].copy_(new[0].codes[:, :, tokens])
        value_codes[..., places].copy_(new[1].codes[:, :, tokens].transpose(-1, -2))
        for stored, side, part in ((key_scale, 0, 1), (key_zero, 0, 2), (value_scale, 1, 1), (value_zero, 1, 2)):
            fresh = new[side][part]
            if stored is not None and fresh is not None:
                stored[..., places].copy_(fresh[:, :, tokens].transpose(-1, -2))


def _runs(slot: int, count: int, slots: int) -> list[tuple[int, int, int]]:
    """(First token, its slot, how many) of the stretches of a ring that ``count`` tokens from ``slot`` on fill."""
    ahead = min(count, slots - slot)
    return [(0, slot, ahead)] + ([(ahead, 0, count - ahead)] if count > ahead else [])
