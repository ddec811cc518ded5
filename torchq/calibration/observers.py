"""The scale of static activations, from what calibration has seen of a tensor."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchq.numerics import cast_fp8
from torchq.scheme import QuantArgs

Observer = Literal["mse", "minmax"] | float
"""``"minmax"``: no value of the calibration data is clipped; ``"mse"``: the range, at most that, with the least squared error of
a sample of tokens and of the extremes of all; a number: the percentage of the sample's values, 50 to 100, that are kept."""

_SHRINK = 24  # ranges that "mse" tries, from the whole one down to a quarter
_SMALLEST = torch.finfo(torch.float32).tiny


@torch.no_grad()
def static_qparams(
    args: QuantArgs, low: Tensor, high: Tensor, sample: Tensor, observer: Observer = "mse", num_tokens: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Choose the scale of a tensor's activations.

    Args:
        args: Of static activations: int8, symmetric or not, or fp8.
        low: The least value seen, or those of each channel.
        high: The greatest.
        sample: [T, K] some of its tokens.
        observer: How.
        num_tokens: That ``low`` and ``high`` are of; T by default.

    Returns:
        Scale [1] float32 and zero point [1] int8 (None if symmetric).
    """
    least, most = low.float().amin().clamp_max(0), high.float().amax().clamp_min(0)
    if isinstance(observer, (int, float)) and sample.numel():
        share = (100 - float(observer)) / 100
        ordered = sample.flatten().abs().sort().values if args.symmetric else sample.flatten().sort().values
        inside = ordered[round((len(ordered) - 1) * (1 - share))]
        outside = -inside if args.symmetric else ordered[round((len(ordered) - 1) * share)]
        least, most = torch.maximum(least, outside.clamp_max(0)), torch.minimum(most, inside.clamp_min(0))
    if observer != "mse" or not sample.numel():
        return _qparams(args, least, most)
    best, fewest = _qparams(args, least, most), float("inf")
    extremes = torch.stack([low.float().flatten(), high.float().flatten()])  # few, or none, of which the sample has
    weight = len(sample) / max(num_tokens or 0, len(sample))  # one token of the sample speaks for several
    for step in range(_SHRINK):
        share = 1 - 0.75 * step / _SHRINK
        scale, zero_point = _qparams(args, least * share, most * share)
        error = float((fake_quantize(sample, args, scale, zero_point) - sample).square_().sum())
        error += weight * float((fake_quantize(extremes, args, scale, zero_point) - extremes).square_().sum())
        if error < fewest:
            best, fewest = (scale, zero_point), error
    return best


def _qparams(args: QuantArgs, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scale, and the zero point, that take [low, high] in, which holds 0."""
    if not args.symmetric:
        scale = ((high - low) / (args.quant_max - args.quant_min)).clamp_min(_SMALLEST)
        zero_point = (args.quant_min - low / scale).round().clamp(args.quant_min, args.quant_max)
        return scale.reshape(1), zero_point.to(torch.int8).reshape(1)
    limit = float(args.quant_max) if args.type == "int" else torch.finfo(torch.float8_e4m3fn).max
    return (torch.maximum(-low, high) / limit).clamp_min(_SMALLEST).reshape(1), None


def fake_quantize(x: Tensor, args: QuantArgs, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Round float32 activations to what a static scale makes of them."""
    if args.type == "float":
        return cast_fp8(x / scale).float() * scale
    offset = 0.0 if zero_point is None else zero_point.float()
    codes = (x / scale).round_().add_(offset).clamp_(args.quant_min, args.quant_max)
    return codes.sub_(offset).mul_(scale)
