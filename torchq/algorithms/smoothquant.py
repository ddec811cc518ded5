"""SmoothQuant: move the range of activation channels into the weights that read them, so that both can be rounded to 8 bits.

Xiao et al., "SmoothQuant" (arXiv 2211.10438). With x the input, W all weights that read it and 0 <= alpha <= 1,

    W x = (W diag(s)) (x / s),      s_j = max|x_j|^alpha / max_i|W_ij|^(1 - alpha)        (eq. 4)

One s serves all Linears that read x. ``alpha="search"`` takes for each tensor the alpha, or s = 1, with the least error of
rounded activations times rounded weights on a sample of calibration tokens. Shapes: N out_features, K in_features, C channels, T
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq import numerics
from torchq.algorithms.awq import bounded
from torchq.algorithms.gptq import sample_rows
from torchq.algorithms.rtn import signed_scales
from torchq.calibration.observers import fake_quantize, static_qparams
from torchq.folding import by_column
from torchq.scheme import QuantArgs, Scheme

_ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_ROWS = 256  # of a weight, that candidates are judged by


@dataclass(frozen=True)
class SmoothQuant:
    """Settings of SmoothQuant; it is followed by an algorithm that rounds.

    Attributes:
        alpha: How much of the range goes into the weights, 0 to 1, or ``"search"``.
        max_ratio: Largest scale over smallest, at least 1; scales are clamped to its square root around their geometric mean.
    """

    alpha: float | str = "search"
    max_ratio: float = 1e6

    def __post_init__(self) -> None:
        number = isinstance(self.alpha, (int, float)) and not isinstance(self.alpha, bool)
        if self.alpha != "search" and not (number and 0 <= float(self.alpha) <= 1):
            raise ValueError(f"alpha must be between 0 and 1, or 'search', got {self.alpha!r}")
        if not 1 <= self.max_ratio < float("inf"):
            raise ValueError(f"max_ratio must be at least 1 and finite, got {self.max_ratio!r}")


@torch.no_grad()
def search_scale(
    weight: Tensor,
    absmax: Tensor,
    sample: Tensor,
    columns: Tensor,
    num_channels: int,
    scheme: Scheme,
    settings: SmoothQuant,
) -> tuple[Tensor, float]:
    """Return the scales, and their error over the error without.

    Args:
        weight: [N, K], the rows of all Linears that read the tensor and are quantized.
        absmax: [K] float32, the largest magnitude of each column's activations.
        sample: [T, K], some tokens.
        columns: [K] int64: the channel that each column reads, -1 for none.
        num_channels: C.
        scheme: How weight and activations are quantized.
        settings: Settings.

    Returns:
        s [C] float32, positive, and the ratio, 1 for s = 1.
    """
    rows, x = weight[sample_rows(weight, _ROWS)].float(), sample.float()
    a = _channel_max(absmax, columns, num_channels)
    w = _channel_max(weight.abs().amax(0).float(), columns, num_channels)
    exact = x @ rows.t()
    unscaled = _rounded_error(x, rows, exact, absmax, torch.ones_like(absmax), scheme)
    best, least = torch.ones_like(a), unscaled if settings.alpha == "search" else float("inf")
    for alpha in _ALPHAS if settings.alpha == "search" else (float(settings.alpha),):
        s = bounded(a**alpha / w.clamp_min(1e-5) ** (1 - alpha), settings.max_ratio)
        error = _rounded_error(x, rows, exact, absmax, by_column(s, columns), scheme)
        if error < least:
            best, least = s, error
    return best, least / unscaled if unscaled else 1.0


def _rounded_error(x: Tensor, rows: Tensor, exact: Tensor, absmax: Tensor, s: Tensor, scheme: Scheme) -> float:
    """Squared error of Q(x / s) Q(rows diag(s))T, both rounded to nearest, against ``exact``."""
    args, acts = scheme.weights, scheme.input_activations
    assert acts is not None
    scaled, largest = rows * s, (absmax / s).amax()
    scale, _ = numerics.choose_qparams(scaled, args, "absmax", signed=signed_scales(scheme))
    weight = numerics.dequantize(numerics.quantize(scaled, scale, None, args), scale, None, args)
    static = None if acts.dynamic else static_qparams(acts, -largest, largest, x, "minmax")[0]
    return float((round_activations(x / s, acts, static) @ weight.t()).sub_(exact).square_().sum())


def round_activations(x: Tensor, acts: QuantArgs, scale: Tensor | None = None, zero_point: Tensor | None = None) -> Tensor:
    """Activations [T, K] float32 rounded: by scales of their own, or by a static one."""
    if not acts.dynamic:
        assert scale is not None
        return fake_quantize(x, acts, scale, zero_point)
    codes, own = numerics.quantize_dynamic(x, acts)
    if own.numel() == 1:
        return codes.float() * own
    return (codes.float().unflatten(-1, (own.shape[-1], -1)) * own.unsqueeze(-1)).flatten(-2)


def _channel_max(values: Tensor, columns: Tensor, num_channels: int) -> Tensor:
    """The largest of values [K] among the columns that read each channel, [C]."""
    inside = columns >= 0
    return values.new_zeros(num_channels).scatter_reduce_(0, columns[inside], values[inside], "amax")
