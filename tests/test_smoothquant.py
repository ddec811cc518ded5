"""SmoothQuant against equation 4 written out, and what its search chooses from."""

import pytest
import torch

from torchq import numerics
from torchq.algorithms.smoothquant import SmoothQuant, round_activations, search_scale
from torchq.scheme import SCHEMES, QuantArgs, Scheme

INT8_STATIC = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor"))
ALL = {name: SCHEMES[name] for name in ("W8A8", "FP8_DYNAMIC", "FP8", "FP8_BLOCK")} | {"static int8": INT8_STATIC}
K = 128
COLUMNS = {"plain": torch.arange(K), "repeated heads": torch.arange(K).view(4, 32)[[0, 0, 1, 1]].flatten()}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens=100, outliers=(3, 50), size=50.0):
    x = random(tokens, K, seed=1)
    x[:, list(outliers)] *= size
    return x


def search(W, X, columns, scheme, settings):
    absmax = X.abs().amax(0)
    return search_scale(W, absmax, X, columns, int(columns.max()) + 1, scheme, settings)


def equation_4(W, X, columns, alpha):
    num_channels = int(columns.max()) + 1
    s = torch.empty(num_channels)
    for j in range(num_channels):
        mine = columns == j
        s[j] = X[:, mine].abs().max() ** alpha / W[:, mine].abs().max() ** (1 - alpha)
    return s / s.log().mean().exp()  # a common factor changes nothing


def literal_error(W, X, s, scheme):
    """Of rounded activations times rounded weights, float64."""
    weights, acts = scheme.weights, scheme.input_activations
    scaled, x = W * s, X / s
    scale, _ = numerics.choose_qparams(scaled, weights, "absmax", signed=False)
    W_hat = numerics.dequantize(numerics.quantize(scaled, scale, None, weights), scale, None, weights)
    limit = 127.0 if acts.type == "int" else 448.0
    groups = x.unflatten(1, (-1, 128)) if acts.strategy == "group" else x.unsqueeze(1)
    step = (groups.abs().amax(-1, keepdim=True) if acts.dynamic else groups.abs().max()) / limit
    codes = groups / step
    codes = codes.round() if acts.type == "int" else codes.to(torch.float8_e4m3fn).float()
    x_hat = (codes * step).flatten(1)
    return float((x_hat.double() @ W_hat.double().t() - X.double() @ W.double().t()).square().sum())


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS.keys())
@pytest.mark.parametrize("scheme", ALL.values(), ids=ALL.keys())
def test_a_given_alpha_is_equation_4(scheme, columns, alpha):
    W, X = random(64, K), inputs()
    s, ratio = search(W, X, columns, scheme, SmoothQuant(alpha=alpha))
    torch.testing.assert_close(s, equation_4(W, X, columns, alpha), rtol=1e-4, atol=0.0)
    before, after = (literal_error(W, X, scale, scheme) for scale in (torch.ones(K), s[columns]))
    assert ratio == pytest.approx(after / before, rel=1e-2)


@pytest.mark.parametrize("scheme", ALL.values(), ids=ALL.keys())
def test_the_search_takes_the_least_error(scheme):
    W, X, columns = random(64, K), inputs(), COLUMNS["plain"]
    s, ratio = search(W, X, columns, scheme, SmoothQuant())
    candidates = [torch.ones(K), *(equation_4(W, X, columns, alpha / 10) for alpha in range(3, 10))]
    errors = [literal_error(W, X, candidate, scheme) for candidate in candidates]
    assert literal_error(W, X, s, scheme) <= 1.001 * min(errors)
    assert any(torch.allclose(s, candidate, rtol=1e-4) for candidate in candidates)
    assert ratio == pytest.approx(min(errors) / errors[0], rel=1e-2)


def test_outliers_are_worth_it_in_int8():
    for scheme in (SCHEMES["W8A8"], INT8_STATIC):
        _, ratio = search(random(64, K), inputs(), COLUMNS["plain"], scheme, SmoothQuant())
        assert ratio < 0.1


def test_nothing_is_scaled_where_nothing_is_rounded():
    X = torch.randint(-127, 128, (50, K), generator=torch.Generator().manual_seed(0)).float()
    X[:, 0] = 127
    W = torch.eye(K) * 127.5  # compressed-tensors' scale: absmax / 127.5
    s, ratio = search(W, X, COLUMNS["plain"], SCHEMES["W8A8"], SmoothQuant())
    assert torch.equal(s, torch.ones(K)) and ratio == 1


@pytest.mark.parametrize("scheme", ALL.values(), ids=ALL.keys())
def test_zeros_are_no_trouble(scheme):
    W, X = random(64, K), inputs()
    X[:, [7, 9]], W[:, [9, 11]] = 0, 0
    for settings in (SmoothQuant(), SmoothQuant(alpha=0.5)):
        s, ratio = search(W, X, COLUMNS["plain"], scheme, settings)
        assert torch.isfinite(s).all() and (s > 0).all() and torch.equal(s[[7, 9]], torch.ones(2)) and ratio >= 0
    s, _ = search(W, torch.zeros(5, K), COLUMNS["plain"], scheme, SmoothQuant())
    assert torch.equal(s, torch.ones(K))


def test_the_largest_ratio():
    s, _ = search(random(64, K), inputs(size=1e4), COLUMNS["plain"], SCHEMES["W8A8"], SmoothQuant(alpha=1.0, max_ratio=9.0))
    assert s.max() == pytest.approx(3.0) and s.max() / s.min() <= 9.001  # it is as much above the mean as below


@pytest.mark.parametrize("strategy", ["token", "group"])
def test_dynamic_activations_are_rounded_as_the_packed_layer_rounds_them(strategy):
    scheme = SCHEMES["W8A8"] if strategy == "token" else SCHEMES["FP8_BLOCK"]
    x = inputs(tokens=5)
    rounded = round_activations(x, scheme.input_activations)
    groups = x.unsqueeze(1) if strategy == "token" else x.unflatten(1, (-1, 128))
    step = groups.abs().amax(-1, keepdim=True) / (127.0 if strategy == "token" else 448.0)
    codes = groups / step
    codes = codes.round() if strategy == "token" else codes.to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(rounded, (codes * step).flatten(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, "alpha must be between 0 and 1, or 'search', got -0.1"),
        ({"alpha": 1.5}, "alpha must be between 0 and 1, or 'search', got 1.5"),
        ({"alpha": "best"}, "alpha must be between 0 and 1, or 'search', got 'best'"),
        ({"alpha": True}, "alpha must be between 0 and 1, or 'search', got True"),
        ({"alpha": float("nan")}, "alpha must be between 0 and 1, or 'search', got nan"),
        ({"max_ratio": 0}, "max_ratio must be at least 1 and finite, got 0"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SmoothQuant(**settings)
