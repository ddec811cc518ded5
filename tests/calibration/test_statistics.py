"""Sums over inputs."""

import pytest
import torch

from torchq.calibration import statistics as module
from torchq.calibration.statistics import InputStatistics


def test_sums_are_those_of_all_tokens_that_count(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", (8, 16))
    x = torch.randn(5, 7, 40, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.3
    statistics = InputStatistics(40, "cpu")
    for part, kept in zip(x.split(2), mask.split(2), strict=True):
        statistics.add(part, kept)
    statistics.finish()
    tokens = x[mask].double()
    assert torch.allclose(statistics.H.double(), tokens.t() @ tokens, atol=1e-4)
    assert torch.equal(statistics.H, statistics.H.t())
    assert torch.equal(statistics.absmax.double(), tokens.abs().amax(0))
    assert statistics.num_tokens == len(tokens)
    assert torch.allclose(statistics.mean_square.double(), tokens.square().mean(0), atol=1e-5)


def test_bfloat16_inputs_are_summed_exactly_and_nothing_is_an_empty_sum():
    x = torch.randn(64, 24).bfloat16()
    statistics = InputStatistics(24, "cpu")
    statistics.add(x[:0])
    statistics.add(x, torch.zeros(64, dtype=torch.bool))
    assert statistics.num_tokens == 0 and not statistics.H.any() and not statistics.mean_square.any()
    statistics.add(x)
    statistics.finish()
    assert torch.allclose(statistics.H.double(), x.double().t() @ x.double(), atol=1e-4)


def test_a_sum_and_not_a_mean():
    statistics = InputStatistics(2, "cpu")
    for value in (1.0, 2.0, 3.0):
        statistics.add(torch.full((1, 2), value))
    statistics.finish()
    assert torch.equal(statistics.H, torch.full((2, 2), 14.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drift_is_summed_over_the_tokens_whose_reference_is_known(dtype):
    x, r = torch.randn(3, 6, 40).to(dtype), torch.randn(3, 6, 40).to(dtype)
    mask = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    statistics = InputStatistics(40, "cpu")
    statistics.add(x[:1], mask[:1])
    statistics.add(x[1:], mask[1:], r[1:])
    statistics.finish()
    X, known, R = x[mask].double(), x[1:][mask[1:]].double(), r[1:][mask[1:]].double()
    assert torch.allclose(statistics.H.double(), X.t() @ X, atol=1e-4)
    assert torch.allclose(statistics.drift_H.double(), known.t() @ known, atol=1e-4)
    atol = 0.3 if module.multiplies_bfloat16(x.device) else 1e-4
    assert torch.allclose(statistics.drift.double(), (R - known).t() @ known, rtol=2e-2, atol=atol)
    assert (statistics.num_tokens, statistics.drift_tokens) == (len(X), len(known))
    assert torch.equal(statistics.H, statistics.H.t()) and torch.equal(statistics.drift_H, statistics.drift_H.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_inputs_give_almost_the_same_sums(dtype, monkeypatch):
    """Channels of any size, one of zeros, massive tokens, more tokens than int32 can sum at once; no loss of definiteness."""
    monkeypatch.setattr(module, "_MOST_INT8_TOKENS", 100)
    monkeypatch.setattr(module, "_multiplies_int8", lambda device: True)
    x = (torch.randn(6, 64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 96)).to(dtype)
    x[:, :, 7] = 0
    x[0, 0, 3], x[0, 0, 50] = 900, -3000
    reference = torch.randn(2, 64, 96).to(dtype)
    exact, rounded = InputStatistics(96, "cpu"), InputStatistics(96, "cpu", exact=False)
    for statistics in (exact, rounded):
        statistics.add(x[:4])
        statistics.add(x[4:], None, reference)
        statistics.finish()
    size = exact.H.diagonal().sqrt()
    relative = (exact.H - rounded.H) / size.clamp_min(1e-9) / size.clamp_min(1e-9).unsqueeze(1)
    assert 0 < relative.abs().max() < 3e-3 and not rounded.H[7].any()
    assert torch.linalg.eigvalsh(rounded.H.double()).min() > -1e-4 * rounded.H.diagonal().mean()
    assert torch.equal(exact.absmax, rounded.absmax) and torch.equal(exact.drift, rounded.drift)
    tokens = x.reshape(-1, 96)[:, [3, 50]].double()
    assert torch.allclose(rounded.H[3, 50].double(), tokens[:, 0] @ tokens[:, 1], rtol=1e-3)  # the massive token's, mostly


def test_what_is_not_finite_stays_so_in_rounded_sums(monkeypatch):
    monkeypatch.setattr(module, "_multiplies_int8", lambda device: True)
    for value in (float("nan"), float("inf")):
        x = torch.randn(64, 16)
        x[5, 3] = value
        statistics = InputStatistics(16, "cpu", exact=False)
        statistics.add(x)
        statistics.finish()
        assert not torch.isfinite(statistics.H[3, 3])
