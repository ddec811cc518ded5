"""GPTQ: round column by column, and let the columns that are left make up for the error.

Frantar et al., "GPTQ" (arXiv 2210.17323), in the LDL form of Chen et al., "Geometry of LLM quantization" (arXiv 2507.18553): with
H = R RT (R upper triangular) and U = R / diag(R), column j is rounded from

    v_j = w_j + sum_{i < j} (w_i - q_i) U_ij        and adds        R_jj^2 (v_j - q_j)^2        to the output error,

which gives the same codes as the paper's inverse and second Cholesky at a quarter of the work. Scales are those of the original
groups ("static groups"), so the order of the columns needs no g_idx. Shapes: N out_features, K in_features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchq import numerics
from torchq.algorithms.rtn import signed_scales
from torchq.calibration.statistics import InputStatistics
from torchq.linear import QuantizedWeight
from torchq.scheme import Scheme

_CANDIDATES = (0.003, 0.01, 0.03, 0.1, 0.3)  # fractions of the mean diagonal that held-out error chooses from
_TOLERANCE = 1.05  # the most damping whose held-out error is at most this many times the least: other data differs more
_SAMPLED_ROWS = 128  # of a weight, for that choice
_BLOCK, _INNER = 128, 16  # columns between two matmuls with all earlier errors, and with those of the block


@dataclass(frozen=True)
class GPTQ:
    """Settings of GPTQ.

    Attributes:
        dampening_frac: Multiple of the Hessian's mean diagonal added to its diagonal. None: for each layer the largest of
            five, 0.003 to 0.3, with about the least error on held-out tokens (0.05 where none are held out).
        actorder: ``"static"`` (columns in order of falling diagonal of the Hessian) or None (as they come). Codes are stored in
            their original order either way.
        scale_search: ``"mse"`` (error of each group weighted by the mean square of its inputs) or ``"absmax"``.
        refit: Whether scales are fitted once more to the codes found, for each layer where that lowers the error on held-out
            tokens (on the calibration tokens where none are held out).
    """

    dampening_frac: float | None = None
    actorder: str | None = "static"
    scale_search: numerics.ScaleSearch = "mse"
    refit: bool = True

    def __post_init__(self) -> None:
        if self.dampening_frac is not None and not 0 < self.dampening_frac < float("inf"):
            raise ValueError(f"dampening_frac must be positive and finite, or None, got {self.dampening_frac!r}")
        if self.actorder not in ("static", None):
            raise ValueError(f"actorder must be 'static' or None, got {self.actorder!r}")
        if self.scale_search not in ("mse", "absmax"):
            raise ValueError(f"scale_search must be 'mse' or 'absmax', got {self.scale_search!r}")


@dataclass(frozen=True)
class Factor:
    """A factorised Hessian. H[order][:, order] + lam I = R RT, U = R / diag(R) [K, K]; lam = dampening_frac mean(diag H)."""

    U: Tensor
    order: Tensor
    dampening_frac: float
    note: str | None


class SingularHessianError(ValueError):
    """A Hessian that no damping makes positive definite."""


def factorize(H: Tensor, dampening_frac: float, actorder: str | None = "static") -> Factor:
    """Factorise a Hessian [K, K] float32, with more damping, then in float64, where the first attempt fails.

    Raises:
        SingularHessianError: If all attempts fail; the message says which.
    """
    diagonal = H.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True) if actorder else torch.arange(len(H), device=H.device)
    mean = float(diagonal.mean()) or 1.0
    flipped = H[order][:, order].flip(0, 1)
    ladder = ((torch.float32, 1), (torch.float32, 3), (torch.float32, 9), (torch.float64, 1), (torch.float64, 27))
    attempts = [(dtype, dampening_frac * factor) for dtype, factor in ladder]
    for dtype, fraction in attempts:
        damped = flipped.to(dtype).clone()
        damped.diagonal().add_(fraction * mean)
        L, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(L.diagonal()).all()):
            note = None
            if (dtype, fraction) != attempts[0]:
                note = f"Hessian factorised in {str(dtype)[6:]} with dampening_frac={fraction:.3g} for {dampening_frac:.3g}"
            R = L.flip(0, 1)
            return Factor((R / R.diagonal()).float(), order, fraction, note)
    tried = ", ".join(f"{str(dtype)[6:]} with {fraction:.3g}" for dtype, fraction in attempts)
    raise SingularHessianError(f"the Hessian stays singular: dampening_frac tried: {tried}")


def round_columns(W: Tensor, factor: Factor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme) -> Tensor:
    """Round a weight column by column.

    Args:
        W: [N, K] float32.
        factor: Of the Hessian of its input.
        scale: [N, G] float32, nonzero.
        zero_point: [N, G] float32, or None.
        scheme: Integer weights, per group or channel.

    Returns:
        Codes, [N, K] int8.
    """
    args, U, order = scheme.weights, factor.U, factor.order
    (n, k), group_size = W.shape, scheme.weights.group_size or W.shape[1]
    groups = (order // group_size).tolist()
    scales = scale.t().contiguous()  # rows [N] of contiguous memory from here on: column j of W is W[j]
    zeros = None if zero_point is None else zero_point.t().contiguous()
    W = W.t()[order]
    E, codes = torch.empty_like(W), torch.empty_like(W)
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        V = torch.addmm(W[start:stop], U[:start, start:stop].t(), E[:start])
        for first in range(start, stop, _INNER):
            last = min(first + _INNER, stop)
            v = torch.addmm(V[first - start : last - start], U[start:first, first:last].t(), E[start:first])
            for j in range(first, last):
                s, code, error = scales[groups[j]], codes[j], E[j]
                torch.div(v[j - first], s, out=code)
                if zeros is None:
                    code.round_().clamp_(args.quant_min, args.quant_max)
                    torch.addcmul(W[j], code, s, value=-1, out=error)
                else:
                    z = zeros[groups[j]]
                    code.add_(z).round_().clamp_(args.quant_min, args.quant_max)
                    torch.addcmul(W[j], code - z, s, value=-1, out=error)
                if j + 1 < last:
                    v[j + 1 - first :].addcmul_(U[j, j + 1 : last, None], error)
    result = torch.empty(n, k, dtype=torch.int8, device=W.device)
    result[:, order] = codes.t().to(torch.int8)
    return result


def refit_scales(
    W: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None, H: Tensor, dampening_frac: float = 1e-3
) -> Tensor:
    """Return the scales that fit given codes best: those that minimise tr(dW H dWT), dW = dequantized - W.

    For each row, with c_g its codes less zero points in group g and zeros elsewhere, that is the linear system
    sum_h (c_g H c_hT) s_h = c_g H wT. Its diagonal is damped towards the scales as they are, which also keeps groups whose codes
    are all zero; a scale that would change its sign stays.

    Args:
        W: [N, K] float32.
        q: Codes, [N, K] int8.
        scale: [N, G] float32.
        zero_point: [N, G] float32, or None.
        H: [K, K] float32, sum of x xT.
        dampening_frac: Added to H's diagonal and to the system's, as a multiple of the mean diagonal.
    """
    n, num_groups = scale.shape
    codes = q.float().view(n, num_groups, -1)
    if zero_point is not None:
        codes = codes - zero_point.unsqueeze(2)
    size, lam = codes.shape[2], dampening_frac * H.diagonal().mean()
    A = torch.empty(n, num_groups, num_groups, device=W.device)
    for group in range(num_groups):
        projected = codes[:, group] @ H[group * size : (group + 1) * size]
        A[:, group] = torch.linalg.vecdot(projected.view(n, num_groups, size), codes)
    diagonal = A.diagonal(dim1=1, dim2=2)
    diagonal += lam * torch.linalg.vecdot(codes, codes)
    b = torch.linalg.vecdot((W @ H + lam * W).view(n, num_groups, size), codes)
    mean = diagonal.mean(dim=1, keepdim=True)
    ridge = torch.where(mean > 0, 1e-3 * mean, 1.0)
    diagonal += ridge
    b += ridge * scale
    L, info = torch.linalg.cholesky_ex(A)
    fitted = torch.cholesky_solve(b.unsqueeze(2), L).squeeze(2)
    sound = (info == 0).unsqueeze(1) & (fitted.sign() == scale.sign()) & torch.isfinite(fitted)
    return torch.where(sound, fitted, scale)


class GroupSolver:
    """Solves the Linears that read one tensor; factors of its Hessian are kept between them.

    Args:
        train: Statistics of the input.
        holdout: Statistics of other tokens, to choose the damping, or None.
        settings: Settings.
    """

    def __init__(self, train: InputStatistics, holdout: InputStatistics | None, settings: GPTQ) -> None:
        self.train, self.holdout, self.settings = train, holdout, settings
        self._factors: dict[float, Factor] = {}

    @torch.no_grad()
    def solve(self, weight: Tensor, scheme: Scheme) -> tuple[QuantizedWeight, Factor]:
        """Quantize a weight [N, K], the rows of one Linear or of several.

        Returns:
            The quantized weight and the factor used.
        """
        args, settings = scheme.weights, self.settings
        importance = self.train.mean_square if settings.scale_search == "mse" else None
        scale, zero_point = numerics.choose_qparams(
            weight, args, settings.scale_search, signed=signed_scales(scheme), importance=importance
        )
        W, s = weight.float(), scale.float().reshape(weight.shape[0], -1)
        z = None if zero_point is None else zero_point.float().reshape(weight.shape[0], -1)
        factor = self._choose_factor(W, s, z, scheme)
        q = round_columns(W, factor, s, z, scheme)
        quantized = QuantizedWeight(q, scale, zero_point, scheme)
        if settings.refit:
            fitted = numerics.representable_scale(refit_scales(W, q, s, z, self.train.H, factor.dampening_frac), scale, args)
            refitted = replace(quantized, scale=fitted)
            if self._judged_error(W, refitted) < self._judged_error(W, quantized):
                quantized = refitted
        return quantized, factor

    def _judged_error(self, W: Tensor, quantized: QuantizedWeight) -> float:
        held_out = self.holdout is not None and self.holdout.num_tokens
        H = self.holdout.H if self.holdout is not None and held_out else self.train.H
        args = quantized.scheme.weights
        return output_error(numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, args).float() - W, H)

    def _factor(self, fraction: float) -> Factor:
        if fraction not in self._factors:
            self._factors[fraction] = factorize(self.train.H, fraction, self.settings.actorder)
        return self._factors[fraction]

    def _choose_factor(self, W: Tensor, s: Tensor, z: Tensor | None, scheme: Scheme) -> Factor:
        if self.settings.dampening_frac is not None:
            return self._factor(self.settings.dampening_frac)
        if self.holdout is None or self.holdout.num_tokens == 0:
            return self._factor(0.05)
        if len(self._factors) == 1:  # chosen by the first Linear of this input
            return next(iter(self._factors.values()))
        step = -(-W.shape[0] // _SAMPLED_ROWS)
        W, s, z = W[::step], s[::step], None if z is None else z[::step]
        tried: list[tuple[float, Factor]] = []
        for fraction in _CANDIDATES:
            factor = factorize(self.train.H, fraction, self.settings.actorder)
            q = round_columns(W, factor, s, z, scheme)
            tried.append((output_error(numerics.dequantize(q, s, z, scheme.weights) - W, self.holdout.H), factor))
        limit = _TOLERANCE * min(error for error, _ in tried)
        best = next(factor for error, factor in reversed(tried) if error <= limit)
        self._factors = {best.dampening_frac: best}
        return best


def output_error(dW: Tensor, H: Tensor) -> float:
    """Return tr(dW H dWT), the summed squared error of the outputs of a layer whose weight is off by dW [N, K]."""
    return float(torch.einsum("nk,nk->", dW @ H, dW))
