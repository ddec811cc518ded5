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
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq import numerics
from torchq.algorithms.rtn import signed_scales
from torchq.calibration.statistics import InputStatistics, multiplies_bfloat16
from torchq.kernels.gptq import Block, rounding_of
from torchq.linear import QuantizedWeight
from torchq.scheme import Scheme

_CANDIDATES = (0.3, 0.1, 0.03, 0.01, 0.003)  # fractions of the mean diagonal that held-out error chooses from
_TOLERANCE = 1.05  # the most damping whose held-out error is at most this many times the least: other data differs more
_KEPT_FACTORS = 4096  # largest size of factors that are kept until damping is chosen; larger ones are computed again
_SAMPLED_ROWS = 128  # of a weight, for what held-out error decides
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
    drift_tokens: float = 0.125
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
    return _factor_of(_cholesky(_backwards(H, order), dampening_frac), order)


def column_order(H: Tensor, actorder: str | None) -> Tensor:
    """The order to round columns in, [K]."""
    diagonal = H.diagonal()
    return torch.argsort(diagonal, descending=True, stable=True) if actorder else torch.arange(len(H), device=H.device)


def _backwards(H: Tensor, order: Tensor) -> Tensor:
    """H in the order of columns, last row and column first: its lower Cholesky factor is R, rows and columns reversed."""
    last_first = order.flip(0)
    return H[last_first.unsqueeze(1), last_first]


@dataclass(frozen=True)
class _Cholesky:
    """The lower factor L of a damped matrix, the damping it took, and a remark if that was not the one asked for."""

    L: Tensor
    dampening_frac: float
    note: str | None


def _cholesky(H: Tensor, dampening_frac: float) -> _Cholesky:
    mean = float(H.diagonal().mean()) or 1.0
    ladder = ((torch.float32, 1), (torch.float32, 3), (torch.float32, 9), (torch.float64, 1), (torch.float64, 27))
    attempts = [(dtype, dampening_frac * factor) for dtype, factor in ladder]
    for dtype, fraction in attempts:
        damped = H.to(dtype, copy=True)
        damped.diagonal().add_(fraction * mean)
        L, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(torch.isfinite(L.diagonal()).all()):
            note = None
            if (dtype, fraction) != attempts[0]:
                note = f"Hessian factorised in {str(dtype)[6:]} with dampening_frac={fraction:.3g} for {dampening_frac:.3g}"
            return _Cholesky(L, fraction, note)
    tried = ", ".join(f"{str(dtype)[6:]} with {fraction:.3g}" for dtype, fraction in attempts)
    raise SingularHessianError(f"the Hessian stays singular: dampening_frac tried: {tried}")


def _factor_of(found: _Cholesky, order: Tensor) -> Factor:
    diagonal = found.L.diagonal()
    U = (found.L / diagonal).float().flip(0, 1)
    return Factor(U, diagonal.flip(0).float(), order, found.dampening_frac, found.note)


def round_columns(W: Tensor, U: Tensor, order: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme) -> Tensor:
    """Round a weight column by column.

    Args:
        W: [N, K] float32.
        U: [K, K], of the Hessian of its input, see :class:`Factor`.
        order: [K], of the columns.
        scale: [N, G] float32, nonzero.
        zero_point: [N, G] float32, or None.
        scheme: Integer weights, per group or channel.

    Returns:
        Codes, [N, K] int8.
    """
    columns = W.t()[order]
    E = torch.empty_like(columns)

    def made_up(block: slice) -> tuple[Tensor, Tensor]:
        return torch.addmm(columns[block], U[: block.start, block].t(), E[: block.start]), U[block, block]

    return _round_blocks(columns, E, made_up, order, scale, zero_point, scheme)


def refine_codes(
    W: Tensor, q: Tensor, scale: Tensor, zero_point: Tensor | None, H: Tensor, factor: Factor, scheme: Scheme
) -> Tensor:
    """One sweep of coordinate descent: each column's codes are set to the best for all others as they are.

    The best value of column j is w_j + sum_{i != j} (w_i - q_i) H_ij / H_jj: the same recursion as GPTQ's, with H / diag(H) for
    U, and with the errors that the columns after j have before their turn.

    Args:
        W: [N, K] float32.
        q: Codes, [N, K] int8.
        scale: [N, G] float32, nonzero.
        zero_point: [N, G] float32, or None.
        H: [K, K] float32, sum of x xT.
        factor: Of H: its damping and the order of columns.
        scheme: Integer weights, per group or channel.

    Returns:
        Codes, [N, K] int8; tr(dW H dWT) with the damped H is not larger than before.
    """
    order = factor.order
    columns = W.t()[order]
    E = columns - numerics.dequantize(q, scale, zero_point, scheme.weights).t()[order]
    damped = H.diagonal() + factor.dampening_frac * H.diagonal().mean()

    def made_up(block: slice) -> tuple[Tensor, Tensor]:
        now = order[block]
        U = H[order.unsqueeze(1), now] / damped[now]  # what an error of each column makes of those of the block
        inside = U[block].clone()
        U[block].tril_(-1)  # those of earlier columns come when they are rounded
        return torch.addmm(columns[block], U.t(), E), inside

    return _round_blocks(columns, E, made_up, order, scale, zero_point, scheme)


def _round_blocks(
    columns: Tensor,
    E: Tensor,
    made_up: Callable[[slice], tuple[Tensor, Tensor]],
    order: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    scheme: Scheme,
) -> Tensor:
    """Round columns [K, N] block by block.

    ``made_up`` gives those of a block, made up for the errors E [K, N], and what an error inside it makes of later columns.
    """
    args, (k, n) = scheme.weights, columns.shape
    groups = order.cpu() // (args.group_size or k)
    scales = scale.t().contiguous()
    zeros = None if zero_point is None else zero_point.t().contiguous()
    codes = torch.empty_like(columns)
    round_block = rounding_of(columns.device)
    for start in range(0, k, _BLOCK):
        block = slice(start, min(start + _BLOCK, k))
        V, U = made_up(block)
        round_block(Block(V, columns[block], U, scales, zeros, groups[block], args, codes[block], E[block]))
    result = torch.empty(n, k, dtype=torch.int8, device=columns.device)
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
    for group in range(num_groups):  # its lower triangle
        projected = codes[:, group] @ H[group * size : (group + 1) * size, group * size :]
        A[:, group:, group] = torch.linalg.vecdot(projected.view(n, -1, size), codes[:, group:])
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
        self._factor: Factor | None = None

    @torch.no_grad()
    def solve(self, weight: Tensor, scheme: Scheme, *, scale_dtype: torch.dtype | None = None, last: bool = False) -> Solution:
        """Quantize a weight [N, K], the rows of one Linear or of several.

        Args:
            weight: Any floating dtype.
            scheme: How.
            scale_dtype: dtype of the scales; the weight's by default.
            last: None follows, and what the drift was summed in can be freed.
        """
        args, settings = scheme.weights, self.settings
        importance = self.train.mean_square if settings.scale_search == "mse" else None
        W, strength = self._correct(weight.float())
        if last:
            for statistics in (self.train, self.holdout):
                if statistics is not None:
                    statistics.drift = statistics.drift_H = None
        begun = time.perf_counter()
        scale, zero_point = numerics.choose_qparams(
            W.to(weight.dtype),
            args,
            settings.scale_search,
            scale_dtype=scale_dtype,
            signed=signed_scales(scheme),
            importance=importance,
        )
        self.timings["scales"] = self.timings.get("scales", 0.0) + time.perf_counter() - begun
        s = scale.float().reshape(weight.shape[0], -1)
        z = None if zero_point is None else zero_point.float().reshape(weight.shape[0], -1)
        factor = self._choose_factor(s)
        q = round_columns(W, factor.U, factor.order, s, z, scheme)
        least = self._held_out_error(W, q, s, z, scheme)
        for sweep in range(settings.refine + 1):
            codes, fitted = q, s
            if sweep > 0:
                codes = refine_codes(W, q, s, z, self.train.H, factor, scheme)
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
        L = _cholesky(self.train.drift_H, fraction).L.float()
        if W.shape[0] > W.shape[1]:
            step = _product(W, torch.cholesky_solve(self.train.drift.t(), L).t())
        else:
            step = torch.cholesky_solve(_product(W, self.train.drift).t(), L).t()
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

    def _choose_factor(self, s: Tensor) -> Factor:
        if self._factor is None:  # else chosen by the first Linear of this input
            backwards = _backwards(self.train.H, self.order)
            fraction = self.settings.dampening_frac or (0.05 if self.holdout is None else None)
            found = self._choose_damping(backwards, s) if fraction is None else _cholesky(backwards, fraction)
            self._factor = _factor_of(found, self.order)
        return self._factor

    def _choose_damping(self, backwards: Tensor, s: Tensor) -> _Cholesky:
        """The factor with the most damping that has about the least error on held-out tokens.

        Nothing is rounded for it: what rounding leaves of a column, V - q, is as good as uniform in a step of its scale,
        whatever the damping, and the errors that GPTQ makes of these, E U = V - q, are the solution of a triangular system.
        """
        assert self.holdout is not None
        last_first, k = self.order.flip(0), len(self.order)
        some = s[sample_rows(s, _SAMPLED_ROWS // 2)].abs().repeat_interleave(k // s.shape[1], dim=1)[:, last_first]
        left = torch.rand(some.shape, generator=torch.Generator().manual_seed(0)).to(s.device).sub_(0.5).mul_(some)
        tried: list[tuple[float, float, _Cholesky | None]] = []  # of those that may be chosen
        for fraction in _CANDIDATES:
            found = _cholesky(backwards, fraction)
            L = found.L.float()
            E = torch.empty_like(left)
            E[:, last_first] = torch.linalg.solve_triangular(L, left * L.diagonal(), upper=False, left=False)
            error = output_error(E, self.holdout.H)
            tried.append((error, fraction, found if k <= _KEPT_FACTORS else None))
            least = min(one[0] for one in tried)
            tried = [one for one in tried if one[0] <= _TOLERANCE * least]
            if error > least:
                break  # and with less damping it rises further
        _, fraction, kept = tried[0]
        return kept or _cholesky(backwards, fraction)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Product in float32, of bfloat16 operands where the device multiplies those: for what is known to two digits only."""
    return (a.bfloat16() @ b.bfloat16()).float() if multiplies_bfloat16(a.device) else a @ b


def sample_rows(W: Tensor, most: int = _SAMPLED_ROWS) -> slice:
    """Rows that speak for a weight."""
    return slice(None, None, -(-W.shape[0] // most))


def output_error(dW: Tensor, H: Tensor) -> float:
    """Return tr(dW H dWT), the summed squared error of the outputs of a layer whose weight is off by dW [N, K]."""
    return float((dW @ H).mul_(dW).sum())
