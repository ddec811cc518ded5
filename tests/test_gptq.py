"""GPTQ against a literal transcription of the paper, and by what it is for."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from torchq import GPTQ, QuantArgs, Scheme, numerics
from torchq.algorithms import gptq
from torchq.algorithms.gptq import (
    GroupSolver,
    SingularHessianError,
    factorize,
    output_error,
    refine_codes,
    refit_scales,
    round_columns,
)
from torchq.algorithms.rtn import RTN, quantize_weight, relative_error
from torchq.calibration.statistics import InputStatistics
from torchq.kernels import gptq as kernel
from torchq.scheme import resolve_scheme

SCHEMES = {
    "W4-g32": resolve_scheme("W4A16", 32),
    "W4-asym-g32": resolve_scheme("W4A16_ASYM", 32),
    "W3-g64": resolve_scheme("W3A16", 64),
    "W4-channel": resolve_scheme("W4A16", -1),
    "W8A8": resolve_scheme("W8A8"),
}


def correlated_inputs(tokens: int, k: int, seed: int = 0) -> Tensor:
    """Inputs with a power-law spectrum and a few large channels, as those of a language model."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=torch.Generator().manual_seed(99)) * torch.arange(1, k + 1).float().pow(-0.5)
    x = torch.randn(tokens, k, generator=generator) @ mixing.t()
    x[:, ::37] *= 6
    return x


def statistics(x: Tensor, reference: Tensor | None = None) -> InputStatistics:
    result = InputStatistics(x.shape[1], "cpu")
    result.add(x, None, reference)
    result.finish()
    return result


def weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(1)) * 0.05


def literal_gptq(
    W: Tensor, H: Tensor, order: Tensor, damping: float, scale: Tensor, zero: Tensor | None, args: QuantArgs
) -> Tensor:
    """Algorithm 1 of arXiv 2210.17323, one column at a time, in float64, without lazy blocks."""
    W, H = W.double()[:, order].clone(), H.double()[order][:, order].clone()
    H += torch.eye(len(H), dtype=torch.float64) * damping * H.diagonal().mean()
    Hinv = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    group_size = args.group_size or W.shape[1]
    Q = torch.zeros_like(W)
    for i in range(W.shape[1]):
        group = int(order[i]) // group_size
        s = scale[:, group].double()
        z = torch.zeros_like(s) if zero is None else zero[:, group].double()
        Q[:, i] = torch.clamp(torch.round(W[:, i] / s + z), args.quant_min, args.quant_max)
        error = (W[:, i] - (Q[:, i] - z) * s) / Hinv[i, i]
        W[:, i:] -= error[:, None] * Hinv[i, i:][None]
    result = torch.empty_like(Q)
    result[:, order] = Q
    return result.to(torch.int8)


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("name", SCHEMES)
def test_gives_the_codes_of_the_paper(name, actorder):
    scheme, k = SCHEMES[name], 320
    W, stats = weight(24, k), statistics(correlated_inputs(1000, k))
    scale, zero = numerics.choose_qparams(W, scheme.weights, importance=stats.mean_square)
    factor = factorize(stats.H, 0.02, actorder)
    zero = None if zero is None else zero.float()
    q = round_columns(W, factor.U, factor.order, scale, zero, scheme)
    expected = literal_gptq(W, stats.H, factor.order, 0.02, scale, zero, scheme.weights)
    different = (q != expected).float().mean()
    assert different < 2e-3  # a value halfway between two codes may go either way in float32, and with it a few after it
    restored, literal = (numerics.dequantize(c, scale, None if zero is None else zero, scheme.weights) - W for c in (q, expected))
    assert output_error(restored, stats.H) == pytest.approx(output_error(literal, stats.H), rel=1e-3)
    assert (factor.order == torch.arange(k)).all() == (actorder is None)


@pytest.mark.parametrize("name", SCHEMES)
def test_with_an_identity_hessian_it_is_round_to_nearest(name):
    scheme = SCHEMES[name]
    W, stats = weight(40, 192), InputStatistics(192, "cpu")
    stats.H += torch.eye(192)
    stats.num_tokens = 1
    solved = GroupSolver(stats, None, GPTQ(dampening_frac=0.01, refit=False)).solve(W, scheme).quantized
    rounded, _ = quantize_weight(W, scheme, importance=torch.ones(192))
    assert torch.equal(solved.q, rounded.q) and torch.equal(solved.scale, rounded.scale)


@pytest.mark.parametrize("name", SCHEMES)
def test_less_output_error_than_round_to_nearest_on_other_tokens(name):
    scheme, k = SCHEMES[name], 256
    W, train, other = weight(64, k), statistics(correlated_inputs(4000, k)), statistics(correlated_inputs(4000, k, seed=7))
    solved = GroupSolver(train, None, GPTQ()).solve(W, scheme).quantized
    errors = []
    for quantized in (solved, quantize_weight(W, scheme)[0], quantize_weight(W, scheme, importance=train.mean_square)[0]):
        restored = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, scheme.weights)
        errors.append(output_error(restored - W, other.H))
    assert errors[0] < 0.7 * errors[2] and errors[2] < errors[1]


def drifted(tokens: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs of a quantized model, and those of the model before: half of what is lost can be told from what is left."""
    r = correlated_inputs(tokens, k, seed)
    mixing = torch.randn(k, k, generator=torch.Generator().manual_seed(42)) * 0.1 / k**0.5
    return r + r @ mixing + 0.05 * torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed + 1)), r


@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_makes_up_for_the_drift_of_its_input(name):
    scheme, k = SCHEMES[name], 128
    W, (x, r) = weight(64, k), drifted(1000, k, seed=20)
    train, holdout = statistics(*drifted(4000, k, seed=10)), statistics(*drifted(500, k, seed=15))
    errors = {}
    for share in (0.0, 1.0):
        solution = GroupSolver(train, holdout, GPTQ(drift_tokens=share)).solve(W, scheme)
        solved = solution.quantized
        Q = numerics.dequantize(solved.q, solved.scale, solved.zero_point, scheme.weights)
        errors[share] = (x @ Q.t() - r @ W.t()).square().mean().item()
        assert (solution.drift_strength is None) == (share == 0)
        assert torch.equal(solution.target, W) == (share == 0)
    assert errors[1.0] < 0.8 * errors[0.0]
    assert solution.drift_strength is not None and solution.drift_strength > 0.8
    x, r = drifted(4000, k, seed=10)
    H = x.t() @ x
    ridge = 4 * k / 4000 * H.diagonal().mean() * torch.eye(k)
    expected = torch.linalg.solve(H + ridge, x.t() @ (r - x) @ W.t()).t() * solution.drift_strength
    assert (solution.target - W - expected).norm() < 0.05 * expected.norm()  # drift is summed from bfloat16 products


def test_drift_that_held_out_tokens_do_not_show_is_not_corrected():
    scheme, k = SCHEMES["W4-g32"], 128
    x, other = correlated_inputs(300, k), correlated_inputs(300, k, seed=5)
    noise = torch.randn(300, k, generator=torch.Generator().manual_seed(6))
    train, holdout = statistics(x, x + noise @ torch.eye(k)), statistics(other, other - 0.5 * other)
    train.drift = -holdout.drift  # the other way round
    solution = GroupSolver(train, holdout, GPTQ()).solve(weight(16, k), scheme)
    assert solution.drift_strength == 0 and torch.equal(solution.target, weight(16, k))
    assert GroupSolver(train, None, GPTQ()).solve(weight(16, k), scheme).drift_strength == 0.5


@pytest.mark.parametrize("name", SCHEMES)
def test_a_refining_sweep_lowers_the_error_until_no_single_code_can(name):
    scheme, k = SCHEMES[name], 160 if "64" not in name else 192
    W, H = weight(16, k), statistics(correlated_inputs(600, k)).H
    scale, zero = numerics.choose_qparams(W, scheme.weights)
    zero = None if zero is None else zero.float()
    q, factor = numerics.quantize(W, scale, zero, scheme.weights), factorize(H, 0.01)
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(k)

    def error(codes: Tensor) -> float:
        return output_error(numerics.dequantize(codes, scale, zero, scheme.weights) - W, damped)

    errors = [error(q)]
    for _ in range(30):
        q = refine_codes(W, q, scale, zero, H, factor, scheme)
        errors.append(error(q))
    assert errors[1] < 0.9 * errors[0] and all(b <= a * (1 + 1e-5) for a, b in pairwise(errors))
    for row, column, step in ((0, 3, 1), (7, 100, -1), (15, k - 1, 1)):
        other = q.clone()
        other[row, column] = (other[row, column] + step).clamp(scheme.weights.quant_min, scheme.weights.quant_max)
        assert error(other) >= errors[-1] * (1 - 1e-6)


def test_refined_codes_are_kept_only_where_they_win():
    scheme, k = SCHEMES["W3-g64"], 256
    W, train, other = weight(48, k), statistics(correlated_inputs(1000, k)), statistics(correlated_inputs(1000, k, seed=7))
    errors = []
    for sweeps in (0, 1, 3):
        solved = GroupSolver(train, other, GPTQ(refine=sweeps)).solve(W, scheme).quantized
        errors.append(output_error(numerics.dequantize(solved.q, solved.scale, None, scheme.weights) - W, other.H))
    assert errors[2] <= errors[1] < errors[0]
    white = statistics(torch.randn(4000, k, generator=torch.Generator().manual_seed(5)))  # nothing like train
    few = statistics(correlated_inputs(40, k))
    plain, refined = (GroupSolver(few, white, GPTQ(dampening_frac=0.003, refine=n)).solve(W, scheme).quantized for n in (0, 2))
    assert torch.equal(plain.q, refined.q)


def test_blocks_of_columns_change_nothing(monkeypatch):
    scheme, k = SCHEMES["W4-g32"], 160
    W, stats = weight(8, k), statistics(correlated_inputs(500, k))
    scale, _ = numerics.choose_qparams(W, scheme.weights)
    factor = factorize(stats.H, 0.05)
    expected = round_columns(W, factor.U, factor.order, scale, None, scheme)
    for block, inner in ((1, 1), (7, 3), (160, 160), (64, 16)):
        monkeypatch.setattr(gptq, "_BLOCK", block)
        monkeypatch.setattr(kernel, "INNER", inner)
        assert (round_columns(W, factor.U, factor.order, scale, None, scheme) != expected).float().mean() < 0.01


def test_the_factor_is_that_of_the_damped_hessian():
    H = statistics(correlated_inputs(300, 64)).H
    factor = factorize(H, 0.01)
    permuted = H[factor.order][:, factor.order] + 0.01 * H.diagonal().mean() * torch.eye(64)
    assert (factor.U.tril(-1) == 0).all() and (factor.U.diagonal() == 1).all()
    D = torch.linalg.solve_triangular(factor.U, torch.linalg.solve_triangular(factor.U, permuted, upper=True).t(), upper=True)
    assert torch.allclose(D, D.diagonal().diag(), atol=1e-3 * float(D.diagonal().max()))
    diagonal = H.diagonal()[factor.order]
    assert (diagonal.diff() <= 0).all()


def test_damping_is_chosen_by_held_out_error():
    """Few tokens: little damping fits noise. The choice is the most damping that is about as good as the best of all."""
    scheme, k = SCHEMES["W4-g32"], 256
    W, train, holdout = weight(48, k), statistics(correlated_inputs(200, k)), statistics(correlated_inputs(4000, k, seed=3))
    factor = GroupSolver(train, holdout, GPTQ()).solve(W, scheme).factor
    errors = {}
    for fraction in gptq._CANDIDATES:
        solved = GroupSolver(train, holdout, GPTQ(dampening_frac=fraction, refit=False)).solve(W, scheme).quantized
        restored = numerics.dequantize(solved.q, solved.scale, None, scheme.weights)
        errors[fraction] = output_error(restored - W, holdout.H)
    good = [fraction for fraction, error in errors.items() if error <= gptq._TOLERANCE * min(errors.values())]
    assert factor.dampening_frac == max(good) and len(good) < len(errors)
    assert GroupSolver(train, None, GPTQ()).solve(W, scheme).factor.dampening_frac == 0.05


@pytest.mark.parametrize("name", SCHEMES)
def test_refitted_scales_are_the_best_for_the_codes(name):
    """No step away from them, in any group of any row, lowers the error."""
    scheme, k = SCHEMES[name], 192
    W, H = weight(12, k), statistics(correlated_inputs(600, k)).H
    scale, zero = numerics.choose_qparams(W, scheme.weights)
    q = numerics.quantize(W, scale, zero, scheme.weights)
    z = None if zero is None else zero.float()
    fitted = refit_scales(W, q, scale, z, H, dampening_frac=1e-6)

    def error(scales: Tensor) -> float:
        return output_error(numerics.dequantize(q, scales, zero, scheme.weights) - W, H)

    assert error(fitted) < error(scale)
    for row in range(0, 12, 5):
        for group in range(scale.shape[1]):
            for step in (-0.01, 0.01):
                other = fitted.clone()
                other[row, group] *= 1 + step
                assert error(other) > error(fitted) * (1 - 1e-6)
    kept = refit_scales(W, torch.zeros_like(q) if zero is None else zero.repeat_interleave(k // zero.shape[1], 1), scale, z, H)
    assert torch.allclose(kept, scale)  # codes that say nothing leave scales alone


def test_refitting_is_kept_only_where_it_wins_on_held_out_tokens():
    scheme, k = SCHEMES["W4-g32"], 256
    W, train = weight(48, k), statistics(correlated_inputs(40, k))
    other = statistics(torch.randn(4000, k, generator=torch.Generator().manual_seed(5)))  # nothing like train
    plain = GroupSolver(train, other, GPTQ(dampening_frac=0.003, refit=False)).solve(W, scheme).quantized
    gated = GroupSolver(train, other, GPTQ(dampening_frac=0.003)).solve(W, scheme).quantized
    ungated = GroupSolver(train, None, GPTQ(dampening_frac=0.003)).solve(W, scheme).quantized
    assert torch.equal(gated.scale, plain.scale) and not torch.equal(ungated.scale, plain.scale)
    assert torch.equal(gated.q, ungated.q)


def test_dead_columns_and_fewer_tokens_than_columns():
    scheme, k = SCHEMES["W4-g32"], 128
    x = correlated_inputs(20, k)
    x[:, 5] = 0
    x[:, 64:96] = 0  # a whole group
    W, stats = weight(16, k), statistics(x)
    solved = GroupSolver(stats, None, GPTQ()).solve(W, scheme).quantized
    assert torch.isfinite(solved.scale).all() and (solved.scale != 0).all() and relative_error(W, solved) < 0.3
    solved = GroupSolver(stats, None, GPTQ(refit=False)).solve(W, scheme).quantized
    nearest = torch.round(W[:, 5] / solved.scale[:, 0]).clamp(-8, 7)
    assert torch.equal(solved.q[:, 5].float(), nearest)  # no error reaches a column that no input has


def test_no_inputs_at_all_is_round_to_nearest():
    scheme = SCHEMES["W4-g32"]
    W, stats = weight(8, 64), InputStatistics(64, "cpu")
    solved = GroupSolver(stats, None, GPTQ()).solve(W, scheme).quantized
    assert torch.equal(solved.q, quantize_weight(W, scheme, RTN(norm=2))[0].q)


def test_a_hessian_that_needs_more_damping_is_noted():
    H = torch.eye(32)
    H[0, 1] = H[1, 0] = 1.02  # not positive definite
    factor = factorize(H, 0.01)
    assert factor.dampening_frac > 0.01
    assert factor.note is not None and "dampening_frac=0.03 for 0.01" in factor.note
    assert factorize(torch.eye(32), 0.01).note is None


def test_a_hessian_that_stays_singular_is_an_error():
    H = torch.eye(8)
    H[0, 1] = H[1, 0] = 100.0
    message = r"stays singular: dampening_frac tried: float32 with 0\.01, .*float64 with 0\.27"
    with pytest.raises(SingularHessianError, match=message):
        factorize(H, 0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dampening_frac": 0}, "dampening_frac must be positive and finite, or None, got 0"),
        ({"dampening_frac": float("nan")}, "dampening_frac must be positive"),
        ({"actorder": "group"}, "actorder must be 'static' or None, got 'group'"),
        ({"drift_tokens": 1.5}, "drift_tokens must be between 0 and 1, got 1.5"),
        ({"refine": -1}, "refine must be a number of sweeps, 0 or more, got -1"),
        ({"refine": 0.5}, "refine must be a number of sweeps"),
        ({"scale_search": "best"}, "scale_search must be 'mse' or 'absmax', got 'best'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        GPTQ(**settings)


def test_positive_scales_where_activations_are_quantized():
    W, stats = weight(16, 64), statistics(correlated_inputs(200, 64))
    scheme = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="token", dynamic=True))
    assert (GroupSolver(stats, None, GPTQ()).solve(W, scheme).quantized.scale > 0).all()
    signed = GroupSolver(stats, None, GPTQ()).solve(W, SCHEMES["W4-g32"]).quantized
    assert (signed.scale < 0).any()
