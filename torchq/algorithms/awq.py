"""AWQ: scale the channels that large activations meet up before rounding, and back down in what makes these activations.

Lin et al., "AWQ: Activation-aware Weight Quantization" (arXiv 2306.00978). With x the input, H the sum of x xT, and s > 0,

    W x = (W diag(s)) (x / s):     the error of rounding W diag(s) is     tr(dW H dWT),   dW = Q(W diag(s)) diag(1/s) - W,

so a search needs H, which other algorithms need as well, and no forward pass: the paper runs the module once for each s on all
calibration tokens. Candidates are the paper's, ``s = a^r`` and (duo scaling) ``s = a^r / w^(1-r)`` with a the root mean square of
a channel's activations, w the mean magnitude of its weights relative to the largest in their group, and r from 0 to 1; s = 1 is
one of them. Clipping is the business of the scale search of the rounding that follows (``RTN(scale_search="mse")``, ``GPTQ``),
which minimises the error of each group weighted by the mean square of its inputs. Shapes: N out_features, K in_features, C
channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq import numerics
from torchq.algorithms.gptq import output_error, sample_rows
from torchq.algorithms.rtn import signed_scales
from torchq.folding import by_column
from torchq.scheme import QuantArgs, Scheme

_ROWS = 64  # of a weight, that candidates are judged by


@dataclass(frozen=True)
class AWQ:
    """Settings of AWQ; it is followed by an algorithm that rounds.

    Attributes:
        num_ratios: Values of r that are tried, evenly spaced in (0, 1].
        duo_scaling: Whether s looks at the weights too; None: both are tried.
        max_ratio: Largest scale over smallest, at least 1; scales are clamped to its square root around their geometric mean.
    """

    num_ratios: int = 10
    duo_scaling: bool | None = None
    max_ratio: float = 64.0

    def __post_init__(self) -> None:
        if not isinstance(self.num_ratios, int) or self.num_ratios < 1:
            raise ValueError(f"num_ratios must be a positive integer, got {self.num_ratios!r}")
        if self.duo_scaling not in (None, True, False):
            raise ValueError(f"duo_scaling must be True, False or None, got {self.duo_scaling!r}")
        if not 1 <= self.max_ratio < float("inf"):
            raise ValueError(f"max_ratio must be at least 1 and finite, got {self.max_ratio!r}")


@torch.no_grad()
def search_scale(
    weight: Tensor, H: Tensor, num_tokens: int, columns: Tensor, num_channels: int, scheme: Scheme, settings: AWQ
) -> tuple[Tensor, float]:
    """Return the candidate with the least error, and that error over the error of s = 1.

    Args:
        weight: [N, K], the rows of all Linears that read the tensor and are quantized.
        H: [K, K] float32, sum of x xT.
        num_tokens: Of that sum.
        columns: [K] int64: the channel that each column reads, -1 for none.
        num_channels: C.
        scheme: How the weight is quantized.
        settings: Settings.

    Returns:
        s [C] float32, positive, and the ratio, 1 for s = 1.
    """
    rows = weight[sample_rows(weight, _ROWS)].float()
    mean_square = H.diagonal() / max(num_tokens, 1)
    best, least, unscaled = torch.ones(num_channels, device=weight.device), float("inf"), None
    for candidate in _candidates(weight.float(), mean_square, columns, num_channels, scheme.weights, settings):
        error = _error(rows, H, mean_square, by_column(candidate, columns), scheme)
        unscaled = error if unscaled is None else unscaled
        if error < least:
            best, least = candidate, error
    return best, least / unscaled if unscaled else 1.0


def _candidates(
    W: Tensor, mean_square: Tensor, columns: Tensor, num_channels: int, args: QuantArgs, settings: AWQ
) -> Iterator[Tensor]:
    groups = numerics.to_groups(W.abs(), args)
    relative = numerics.from_groups(groups / groups.amax(-1, keepdim=True).clamp_min(1e-12), args, (W.shape[0], W.shape[1]))
    a = channel_mean(mean_square, columns, num_channels).sqrt()
    w = channel_mean(relative.mean(0), columns, num_channels)
    yield torch.ones_like(a)
    duos = (False, True) if settings.duo_scaling is None else (settings.duo_scaling,)
    for step in range(1, settings.num_ratios + 1):
        r = step / settings.num_ratios
        for duo in duos:
            if duo and r == 1:
                continue  # the same as without
            yield bounded(a**r / (w ** (1 - r) + 1e-4) if duo else a**r, settings.max_ratio)


def _error(rows: Tensor, H: Tensor, mean_square: Tensor, s: Tensor, scheme: Scheme) -> float:
    """tr(dW H dWT) of these rows scaled, rounded to nearest and scaled back."""
    scaled, args = rows * s, scheme.weights
    scale, zero_point = numerics.choose_qparams(
        scaled, args, "mse" if args.type == "int" else "absmax", signed=signed_scales(scheme), importance=mean_square / s**2
    )
    restored = numerics.dequantize(numerics.quantize(scaled, scale, zero_point, args), scale, zero_point, args)
    return output_error(restored / s - rows, H)


def channel_mean(values: Tensor, columns: Tensor, num_channels: int) -> Tensor:
    """The mean of values [K] over the columns that read each channel, [C]."""
    inside = columns >= 0
    total = values.new_zeros(num_channels).index_add_(0, columns[inside], values[inside])
    count = values.new_zeros(num_channels).index_add_(0, columns[inside], torch.ones_like(values[inside]))
    return total / count.clamp_min(1)


def bounded(s: Tensor, max_ratio: float) -> Tensor:
    """Positive scales around 1 whose largest is at most ``max_ratio`` times the smallest; 1 for channels that are always 0."""
    sound = torch.isfinite(s) & (s > 0)
    if not bool(sound.any()):
        return torch.ones_like(s)
    s = s / s[sound].log().mean().exp()
    return torch.where(sound, s.clamp(max_ratio**-0.5, max_ratio**0.5), 1.0)
