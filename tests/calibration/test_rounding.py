"""What rounding activations does to the statistics that GPTQ sees."""

import copy

import torch

from torchq import QuantArgs, Scheme
from torchq.calibration.rounding import _noisy, _rounding_noise
from torchq.calibration.statistics import InputStatistics
from torchq.calibration.stream import Group
from torchq.scheme import resolve_scheme

STATIC = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor"))


def statistics(seed: int) -> tuple[InputStatistics, torch.Tensor]:
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.01, 3, 32)
    found = InputStatistics(32, "cpu", sampled=4096)
    found.add(x)
    found.finish()
    return found, x


def test_hessian_is_that_of_rounded_activations() -> None:
    """But for the chance in it: independent noise of the mean square that rounding really adds."""
    train, x = statistics(0)
    holdout, _ = statistics(1)
    step = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / step).round() * step
    group, before = Group(["a"], train=train, holdout=holdout), copy.deepcopy(train.H)
    noise = _rounding_noise(resolve_scheme("W8A8"), train.sample, None)
    assert abs(noise - float((rounded - x).square().mean())) < 0.05 * noise
    with _noisy(group, noise):
        added = train.H.diagonal() - before.diagonal()
        torch.testing.assert_close(added, torch.full((32,), noise * 4096), rtol=1e-2, atol=1e-2)
        assert float(holdout.H.diagonal()[0]) > 0.9 * noise * 4096
    assert torch.equal(train.H, before)


def test_only_int8_activations_add_noise() -> None:
    x = statistics(0)[0].sample
    assert _rounding_noise(STATIC, x, torch.tensor([0.12])) == torch.tensor(0.12).square().item() / 12
    for name in ("W4A16", "FP8_DYNAMIC", "W4AFP8"):
        assert _rounding_noise(resolve_scheme(name), x, None) == 0.0
    assert _rounding_noise(resolve_scheme("W8A8"), x[:0], None) == 0.0
