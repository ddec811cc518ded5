"""The search of AWQ against a loop over the paper's candidates, with errors of outputs in float64."""

import pytest
import torch

from torchq import numerics
from torchq.algorithms.awq import AWQ, bounded, by_column, channel_mean, search_scale
from torchq.scheme import QuantArgs, Scheme

SCHEMES = {
    "W4-g32": Scheme(QuantArgs(4, group_size=32)),
    "W4-channel": Scheme(QuantArgs(4, strategy="channel")),
    "W4-g32-asym": Scheme(QuantArgs(4, group_size=32, symmetric=False)),
    "W3-channel-asym": Scheme(QuantArgs(3, strategy="channel", symmetric=False)),
    "FP8-channel": Scheme(QuantArgs(8, "float", strategy="channel")),
}
K = 64
COLUMNS = {
    "plain": torch.arange(K),
    "repeated heads": torch.arange(K).view(4, 16)[[0, 0, 2, 2]].flatten() % 32,  # GQA: 2 heads of 16 that 4 read
    "in part": torch.where(torch.arange(K) < 48, torch.arange(K), -1),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens=200, k=K, seed=1, spread=1.0):
    """Tokens with channels of different sizes, of which neighbours go together."""
    x = random(tokens, k, seed=seed)
    x = x + 0.5 * x.roll(1, dims=1)
    return x * torch.exp(spread * random(k, seed=seed + 1))


def weight(n=24, k=K, seed=0):
    W = random(n, k, seed=seed)
    return W * torch.exp(0.5 * random(1, k, seed=seed + 7))


def search(W, X, columns, scheme, settings=None):
    num_channels = int(columns.max()) + 1
    return search_scale(W, X.t() @ X, len(X), columns, num_channels, scheme, settings or AWQ())


def literal(W, X, columns, scheme, settings):
    """All candidates s [C], s = 1 first, and the squared error of the outputs of each, float64."""
    num_channels, k = int(columns.max()) + 1, W.shape[1]
    size = scheme.weights.group_size or k
    a, w = torch.ones(num_channels), torch.ones(num_channels)
    for channel in range(num_channels):
        mine = [column for column in range(k) if columns[column] == channel]
        if mine:
            a[channel] = sum(X[:, column].double().square().mean() for column in mine) / len(mine)
            a[channel] = a[channel].sqrt()
            relative = []
            for column in mine:
                group = W[:, column // size * size : (column // size + 1) * size].abs()
                relative += (W[:, column].abs() / group.amax(1)).tolist()
            w[channel] = sum(relative) / len(relative)
    candidates = [torch.ones(num_channels)]
    for step in range(1, settings.num_ratios + 1):
        r = step / settings.num_ratios
        if settings.duo_scaling is not True or r == 1:
            candidates.append(a**r)
        if settings.duo_scaling is not False and r < 1:
            candidates.append(a**r / (w ** (1 - r) + 1e-4))
    limit = settings.max_ratio**0.5
    scales = [(s / s.log().mean().exp()).clamp(1 / limit, limit) for s in candidates]
    errors = []
    for s in scales:
        columnwise = torch.tensor([1.0 if c < 0 else float(s[c]) for c in columns])
        scaled = W * columnwise
        importance = X.square().mean(0) / columnwise**2
        search = "mse" if scheme.weights.type == "int" else "absmax"
        scale, zero = numerics.choose_qparams(scaled, scheme.weights, search, importance=importance)
        q = numerics.quantize(scaled, scale, zero, scheme.weights)
        restored = numerics.dequantize(q, scale, zero, scheme.weights).double() / columnwise.double()
        errors.append(float((X.double() @ (restored - W.double()).t()).square().sum()))
    return scales, errors


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS.keys())
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_it_finds_the_best_of_the_papers_candidates(scheme, columns):
    for settings in (AWQ(), AWQ(num_ratios=5, duo_scaling=False), AWQ(num_ratios=7, duo_scaling=True, max_ratio=3.0)):
        W, X = weight(), inputs()
        s, ratio = search(W, X, columns, scheme, settings)
        candidates, errors = literal(W, X, columns, scheme, settings)
        best = min(range(len(errors)), key=errors.__getitem__)
        torch.testing.assert_close(s, candidates[best], rtol=1e-4, atol=0.0)
        assert ratio == pytest.approx(errors[best] / errors[0], rel=1e-3)
        assert ratio <= 1


def test_outputs_are_better_with_it_where_channels_differ():
    _, ratio = search(weight(), inputs(spread=2.0), COLUMNS["plain"], SCHEMES["W4-channel"])
    assert ratio < 0.5


def test_nothing_is_scaled_where_that_is_best():
    W = torch.randint(-8, 8, (24, K), generator=torch.Generator().manual_seed(0)).float()
    W[:, ::32] = -8  # the scale of each group is 1, and no weight is rounded
    s, ratio = search(W, inputs(spread=2.0), COLUMNS["plain"], SCHEMES["W4-g32"])
    assert torch.equal(s, torch.ones(K)) and ratio == 1


def test_all_channels_alike_are_not_scaled_by_activations():
    X = torch.eye(K).repeat(3, 1)
    s, _ = search(weight(), X, COLUMNS["plain"], SCHEMES["W4-g32"], AWQ(duo_scaling=False))
    torch.testing.assert_close(s, torch.ones(K))


@pytest.mark.parametrize("max_ratio", [1.0, 2.0, 16.0])
def test_no_scale_is_more_than_the_largest_ratio_times_another(max_ratio):
    s, _ = search(weight(), inputs(spread=3.0), COLUMNS["plain"], SCHEMES["W4-channel"], AWQ(max_ratio=max_ratio))
    assert s.max() / s.min() <= max_ratio * 1.0001
    assert s.max() == pytest.approx(max_ratio**0.5)  # it is as much above the mean as below


def test_channels_that_are_always_zero_are_not_scaled():
    X = inputs(spread=2.0)
    X[:, [3, 17, 40]] = 0
    for scheme in SCHEMES.values():
        s, ratio = search(weight(), X, COLUMNS["plain"], scheme)
        assert torch.equal(s[[3, 17, 40]], torch.ones(3)) and torch.isfinite(s).all() and (s > 0).all() and ratio <= 1
    s, ratio = search(weight(), torch.zeros(10, K), COLUMNS["plain"], SCHEMES["W4-g32"])
    assert torch.equal(s, torch.ones(K)) and ratio == 1


def test_weights_that_are_zero_are_no_trouble():
    W = weight()
    W[:, 5], W[3], W[:, 32:] = 0, 0, 0
    s, ratio = search(W, inputs(), COLUMNS["plain"], SCHEMES["W4-g32"])
    assert torch.isfinite(s).all() and (s > 0).all() and ratio <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights(dtype):
    W, X = weight().to(dtype), inputs()
    assert torch.equal(search(W, X, COLUMNS["plain"], SCHEMES["W4-g32"])[0],
                       search(W.float(), X, COLUMNS["plain"], SCHEMES["W4-g32"])[0])  # fmt: skip


def test_channels_and_columns():
    columns = torch.tensor([1, 0, -1, 1])
    assert by_column(torch.tensor([2.0, 3.0]), columns).tolist() == [3, 2, 1, 3]
    assert channel_mean(torch.tensor([1.0, 5.0, 7.0, 3.0]), columns, 3).tolist() == [5, 2, 0]
    assert bounded(torch.tensor([0.0, float("inf"), float("nan")]), 4.0).tolist() == [1, 1, 1]
    torch.testing.assert_close(bounded(torch.tensor([1.0, 100.0, 0.0]), 4.0), torch.tensor([0.5, 2.0, 1.0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_ratios": 0}, "num_ratios must be a positive integer, got 0"),
        ({"num_ratios": 2.5}, "num_ratios must be a positive integer, got 2.5"),
        ({"duo_scaling": "both"}, "duo_scaling must be True, False or None, got 'both'"),
        ({"max_ratio": 0.5}, "max_ratio must be at least 1 and finite, got 0.5"),
        ({"max_ratio": float("inf")}, "max_ratio must be at least 1 and finite, got inf"),
        ({"max_ratio": float("nan")}, "max_ratio must be at least 1 and finite, got nan"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        AWQ(**settings)
