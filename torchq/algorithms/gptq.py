"""GPTQ: round column by column, and let the columns that are left make up for the error.

Frantar et al., "GPTQ" (arXiv 2210.17323), in the LDL form of Chen et al., "Geometry of LLM quantization" (arXiv 2507.18553): with
H = R RT (R upper triangular) and U = R / diag(R), column j is rounded from

    v_j = w_j + sum_{i < j} (w_i - q_i) U_ij        and adds        R_jj^2 (v_j - q_j)^2        to the output error,

which gives the same codes as the paper's inverse and second Cholesky at a quarter of the work. Scales are those of the original
groups ("static groups"), so the order of the columns needs no g_idx. Shapes: N out_features, K in_features, G groups.

*Drift.* A layer of a quantized model gets an input x that is off by d = r - x from the input r that it had before. What is
rounded is therefore not W but the weight whose output from x is closest to W r,

    T = W + alpha W C (H + lam I)^-1,        C = sum of d xT,

the asymmetric calibration of GPTAQ (arXiv 2504.02692) and Qronos (arXiv 2505.11695) as one product before plain GPTQ, with alpha
fitted to held-out tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchq import numerics
from torchq.algorithms.rtn import signed_scales
from torchq.calibration.statistics import InputStatistics
from torchq.kernels.gptq import Block, make_up, rounding_of
from torchq.linear import QuantizedWeight
from torchq.scheme import Scheme

_CANDIDATES = (0.003, 0.01, 0.03, 0.1, 0.3)  # fractions of the mean diagonal that held-out error chooses from
_TOLERANCE = 1.05  # the most damping whose held-out error is at most this many times the least: other data differs more
_SAMPLED_ROWS = 128  # of a weight, for what held-out error decides
_BATCHED = 2**23  # elements of the factors that are tried at once
_DRIFT_DAMPING = 4.0  # lam in the correction of drift: this times K / tokens, from 0.01 to 1, times the mean diagonal
_DRIFT_STRENGTH = 0.5  # alpha where no tokens are held out
_BLOCK = 128  # columns between two matmuls with all earlier errors


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
        drift_tokens: Share of the calibration tokens, 0 to 1, that go through the original weights as well, so that layers make
            up for the errors of those before them (with ``propagate="true_sequential"`` and weights of fewer than 8 bits). 0:
            they don't.
        refine: Sweeps of coordinate descent over the codes, each followed by a refit of the scales if ``refit``, for each layer
            as long as that lowers the error on held-out tokens.
    """

    dampening_frac: float | None = None
    actorder: str | None = "static"
    scale_search: numerics.ScaleSearch = "mse"
    refit: bool = True
    drift_tokens: float = 0.25
    refine: int = 0

    def __post_init__(self) -> None:
        if self.dampening_frac is not None and not 0 < self.dampening_frac < float("inf"):
            raise ValueError(f"dampening_frac must be positive and finite, or None, got {self.dampening_frac!r}")
        if not 0 <= self.drift_tokens <= 1:
            raise ValueError(f"drift_tokens must be between 0 and 1, got {self.drift_tokens!r}")
        if not isinstance(self.refine, int) or self.refine < 0:
            raise ValueError(f"refine must be a number of sweeps, 0 or more, got {self.refine!r}")
        if self.actorder not in ("static", None):
            raise ValueError(f"actorder must be 'static' or None, got {self.actorder!r}")
        if self.scale_search not in ("mse", "absmax"):
            raise ValueError(f"scale_search must be 'mse' or 'absmax', got {self.scale_search!r}")


@dataclass(frozen=True)
class Factor:
    """A factorised Hessian: H[order][:, order] + lam I = R RT, U = R / diag(R) [K, K], lam = dampening_frac mean(diag H)."""

    U: Tensor
    diagonal: Tensor
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
    order = column_order(H, actorder)
    return _factorize_in_order(H[order.unsqueeze(1), order].flip(0, 1), order, dampening_frac)


def column_order(H: Tensor, actorder: str | None) -> Tensor:
    """The order to round columns in, [K]."""
    diagonal = H.diagonal()
    return torch.argsort(diagonal, descending=True, stable=True) if actorder else torch.arange(len(H), device=H.device)


def _factorize_in_order(flipped: Tensor, order: Tensor, dampening_frac: float) -> Factor:
    """``flipped``: H in the order of columns, last row and column first."""
    mean = float(flipped.diagonal().mean()) or 1.0
    ladder = ((torch.float32, 1), (torch.float32, 3), (torch.float32, 9), (torch.float64, 1), (torch.float64, 27))
    attempts = [(dtype, dampening_frac * factor) for dtype, factor in ladder]
    for dtype, fraction in attempts:
        damped = flipped.to(dtype, copy=True)
        damped.diagonal().add_(fraction * mean)
        L, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(L.diagonal()).all()):
            note = None
            if (dtype, fraction) != attempts[0]:
                note = f"Hessian factorised in {str(dtype)[6:]} with dampening_frac={fraction:.3g} for {dampening_frac:.3g}"
            diagonal = L.diagonal().clone()
            return Factor((L / diagonal).flip(0, 1).float(), diagonal.flip(0).float(), order, fraction, note)
    tried = ", ".join(f"{str(dtype)[6:]} with {fraction:.3g}" for dtype, fraction in attempts)
    raise SingularHessianError(f"the Hessian stays singular: dampening_frac tried: {tried}")


def round_columns(W: Tensor, U: Tensor, order: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme) -> Tensor:
    """Round a weight column by column.

    Args:
        W: [N, K] float32.
        U: Of the Hessian of its input, see :class:`Factor`: [K, K], or [B, K, K] for the results of several.
        order: [K], of the columns.
        scale: [N, G] float32, nonzero.
        zero_point: [N, G] float32, or None.
        scheme: Integer weights, per group or channel.

    Returns:
        Codes, [N, K] or [B, N, K] int8.
    """
    args, (n, k), batches = scheme.weights, W.shape, U.shape[:-2]
    batch = batches.numel()
    groups = order.cpu() // (args.group_size or k)
    scales = scale.t().contiguous()  # rows [N] of contiguous memory from here on: column j of W is W[j]
    zeros = None if zero_point is None else zero_point.t().contiguous()
    W, U = W.t()[order], U.view(batch, k, k)
    E, codes = (torch.empty(k, batch, n, device=W.device) for _ in range(2))
    round_block = rounding_of(W.device)
    for start in range(0, k, _BLOCK):
        block = slice(start, min(start + _BLOCK, k))
        V = make_up(W[block].unsqueeze(1).expand(-1, batch, n), U[:, :start, block], E[:start])
        diagonal = U[:, block, block]
        round_block(Block(V, W[block], diagonal, scales, zeros, groups[block], args, codes[block], E[block]))
    result = torch.empty(batch, n, k, dtype=torch.int8, device=W.device)
    result[:, :, order] = codes.permute(1, 2, 0).to(torch.int8)
    return result.view(*batches, n, k)


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


def refine_codes(
    W: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None, H: Tensor, dampening_frac: float, scheme: Scheme
) -> Tensor:
    """One sweep of coordinate descent: each column's codes are set to the best for all others as they are.

    Args:
        W: [N, K] float32.
        q: Codes, [N, K] int8.
        scale: [N, G] float32, nonzero.
        zero_point: [N, G] float32, or None.
        H: [K, K] float32, sum of x xT.
        dampening_frac: Added to H's diagonal, as a multiple of its mean.
        scheme: Integer weights, per group or channel.

    Returns:
        Codes, [N, K] int8; tr(dW H dWT) with the damped H is not larger than before.
    """
    args, k = scheme.weights, W.shape[1]
    spread = torch.arange(k, device=W.device) // (args.group_size or k)
    scales = scale.t()[spread]
    zeros = torch.zeros(1, 1, device=W.device).expand(k, 1) if zero_point is None else zero_point.t()[spread]
    W, codes = W.t(), q.t().float()
    damping = dampening_frac * H.diagonal().mean()
    diagonal = H.diagonal() + damping
    E = W - (codes - zeros) * scales
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        F = torch.addmm(E[start:stop], H[start:stop], E, beta=float(damping))  # the block's rows of the damped H times E
        for j in range(start, stop):
            old = codes[j].clone()
            wanted = old + F[j - start] / (diagonal[j] * scales[j])
            torch.clamp(wanted.round_(), args.quant_min, args.quant_max, out=codes[j])
            step = (old - codes[j]).mul_(scales[j])  # of E's row j
            E[j] += step
            F[j + 1 - start :].addcmul_(H[j + 1 : stop, j, None], step)
    return codes.t().to(torch.int8)


@dataclass(frozen=True)
class Solution:
    """A quantized weight and how it came about.

    Attributes:
        quantized: The weight.
        target: [N, K] float32, what was rounded: the weight given, corrected for drift.
        factor: The factor used.
        drift_strength: alpha, or None without drift.
    """

    quantized: QuantizedWeight
    target: Tensor
    factor: Factor
    drift_strength: float | None


class GroupSolver:
    """Solves the Linears that read one tensor; the factor of its Hessian is kept between them.

    Args:
        train: Statistics of the input.
        holdout: Statistics of other tokens, for what is decided by them, or None.
        settings: Settings.
        timings: Seconds of scale searches (``scales``) are added here.
    """

    def __init__(
        self,
        train: InputStatistics,
        holdout: InputStatistics | None,
        settings: GPTQ,
        timings: dict[str, float] | None = None,
    ) -> None:
        self.train, self.settings = train, settings
        self.timings = {} if timings is None else timings
        self.holdout = holdout if holdout is not None and holdout.num_tokens else None
        self.order = column_order(train.H, settings.actorder)
        self._flipped = train.H[self.order.unsqueeze(1), self.order].flip(0, 1)
        self._factor: Factor | None = None

    @torch.no_grad()
    def solve(self, weight: Tensor, scheme: Scheme) -> Solution:
        """Quantize a weight [N, K], the rows of one Linear or of several."""
        args, settings = scheme.weights, self.settings
        importance = self.train.mean_square if settings.scale_search == "mse" else None
        W, strength = self._correct(weight.float())
        begun = time.perf_counter()
        scale, zero_point = numerics.choose_qparams(
            W.to(weight.dtype), args, settings.scale_search, signed=signed_scales(scheme), importance=importance
        )
        self.timings["scales"] = self.timings.get("scales", 0.0) + time.perf_counter() - begun
        s = scale.float().reshape(weight.shape[0], -1)
        z = None if zero_point is None else zero_point.float().reshape(weight.shape[0], -1)
        factor = self._choose_factor(W, s, z, scheme)
        q = round_columns(W, factor.U, factor.order, s, z, scheme)
        least = self._held_out_error(W, q, s, z, scheme)
        for sweep in range(settings.refine + 1):
            codes, fitted = q, s
            if sweep > 0:
                codes = refine_codes(W, q, s, z, self.train.H, factor.dampening_frac, scheme)
            if settings.refit:
                fitted = refit_scales(W, codes, s, z, self.train.H, factor.dampening_frac)
                fitted = numerics.representable_scale(fitted, scale, args).float()
            error = self._held_out_error(W, codes, fitted, z, scheme)
            if error < least:
                q, s, least = codes, fitted, error
            elif sweep > 0:
                break
        quantized = QuantizedWeight(q, s.to(scale.dtype).reshape(scale.shape), zero_point, scheme)
        return Solution(quantized, W, factor, strength)

    def _correct(self, W: Tensor) -> tuple[Tensor, float | None]:
        """Return the weight that makes up for drift in its input, and alpha."""
        if self.train.drift is None or self.train.drift_H is None or not self.settings.drift_tokens:
            return W, None
        fraction = min(max(_DRIFT_DAMPING * W.shape[1] / self.train.drift_tokens, 0.01), 1.0)
        factor = factorize(self.train.drift_H, fraction, None)
        R, step = factor.U * factor.diagonal, W @ self.train.drift  # times the inverse of R RT
        step = torch.linalg.solve_triangular(R.t(), step, upper=False, left=False)
        step = torch.linalg.solve_triangular(R, step, upper=True, left=False)
        strength = _DRIFT_STRENGTH
        if self.holdout is not None and self.holdout.drift is not None and self.holdout.drift_H is not None:
            some, wanted = step[sample_rows(step)], W[sample_rows(W)] @ self.holdout.drift
            power = output_error(some, self.holdout.drift_H)
            strength = min(max(float(torch.linalg.vecdot(wanted, some).sum()) / power, 0.0), 1.0) if power > 0 else 0.0
        return W + strength * step, strength

    def _held_out_error(self, W: Tensor, q: Tensor, s: Tensor, z: Tensor | None, scheme: Scheme) -> float:
        """Of a sample of rows; on the calibration tokens where none are held out."""
        rows = sample_rows(W)
        restored = numerics.dequantize(q[rows], s[rows], None if z is None else z[rows], scheme.weights)
        return output_error(restored.float() - W[rows], (self.holdout or self.train).H)

    def _choose_factor(self, W: Tensor, s: Tensor, z: Tensor | None, scheme: Scheme) -> Factor:
        if self._factor is None:  # else chosen by the first Linear of this input
            fixed = self.settings.dampening_frac or (0.05 if self.holdout is None else None)
            if fixed is not None:
                self._factor = _factorize_in_order(self._flipped, self.order, fixed)
            else:
                rows = sample_rows(W)
                self._factor = self._try_factors(W[rows], s[rows], None if z is None else z[rows], scheme)
        return self._factor

    def _try_factors(self, W: Tensor, s: Tensor, z: Tensor | None, scheme: Scheme) -> Factor:
        """The one of the most damping with about the least error on held-out tokens."""
        assert self.holdout is not None
        tried: list[tuple[float, Factor]] = []
        at_once = max(_BATCHED // self.train.H.numel(), 1)
        for begin in range(0, len(_CANDIDATES), at_once):
            some = _CANDIDATES[begin : begin + at_once]
            U = self._flipped.new_empty(len(some), *self._flipped.shape)
            factors = []
            for fraction, place in zip(some, U, strict=True):
                factor = _factorize_in_order(self._flipped, self.order, fraction)
                factors.append(replace(factor, U=place.copy_(factor.U)))
            codes = round_columns(W, U, self.order, s, z, scheme)
            for factor, q in zip(factors, codes, strict=True):
                error = output_error(numerics.dequantize(q, s, z, scheme.weights) - W, self.holdout.H)
                tried.append((error, factor))
        limit = _TOLERANCE * min(error for error, _ in tried)
        best = next(factor for error, factor in reversed(tried) if error <= limit)
        return replace(best, U=best.U.clone())  # and not the memory of all


def sample_rows(W: Tensor) -> slice:
    """Rows that speak for a weight."""
    return slice(None, None, -(-W.shape[0] // _SAMPLED_ROWS))


def output_error(dW: Tensor, H: Tensor) -> float:
    """Return tr(dW H dWT), the summed squared error of the outputs of a layer whose weight is off by dW [N, K]."""
    return float(torch.einsum("nk,nk->", dW @ H, dW))
