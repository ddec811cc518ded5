"""Rows of int8 with a scale each: both ways to multiply with them against float64."""

import pytest
import torch
import torch.nn.functional as F

from torchq.kernels import linear
from torchq.kernels import w8a16_cpu as module
from torchq.kernels.w8a16_cpu import is_available, w8a16_cpu, w8a16_cpu_input_grad, w8a16_cpu_ref
from torchq.testing import assert_within_dtype_error

needs_kernel = pytest.mark.skipif(not is_available(), reason="PyTorch has no int8 kernel here, or another one")
FIT = [(4, 16), (8, 48), (64, 96), (100, 256), (576, 192)]  # what PyTorch's kernel reads
OTHER = [(1, 1), (3, 16), (5, 33), (64, 24), (33, 100)]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["native", "tiled"])
def path(request, monkeypatch):
    """Both ways to multiply, whatever the number of tokens."""
    monkeypatch.setattr(module, "MAX_NATIVE_TOKENS", 1 << 30 if request.param == "native" else -1)
    return request.param


@pytest.fixture
def native_calls(monkeypatch):
    """Sizes of what PyTorch's kernel was called with, which reads whole vectors at aligned addresses."""
    is_available()  # its probe is none of them
    calls, original = [], torch._weight_int8pack_mm

    def kernel(x, weight, scale):
        assert x.is_contiguous() and weight.is_contiguous() and x.data_ptr() % 32 == weight.data_ptr() % 16 == 0
        assert weight.shape[0] % 4 == weight.shape[1] % 16 == 0
        calls.append((x.shape[0], *weight.shape))
        return original(x, weight, scale)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", kernel)
    return calls


def activations(tokens, k, dtype=torch.bfloat16, seed=0):
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(n, k, scale_dtype=torch.bfloat16):
    """(dequantized weight, codes, scales, a few of them negative)."""
    generator = torch.Generator().manual_seed(n * k)
    q = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    scale = (torch.rand(n, generator=generator) * 0.01 + 0.001).to(scale_dtype)
    scale[::3] *= -1
    return q.to(scale_dtype) * scale[:, None], q, scale


def check(y, x, weight, bias=None):
    """At most twice the error of eager PyTorch on the dequantized weight; in float32 the order of the sums decides."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    if y.numel():
        assert_within_dtype_error(y, exact, F.linear(x, weight.to(x.dtype), bias), factor=10 if x.dtype == torch.float32 else 2)


# -------------------------------------------------------------------------------------------------------------------- probe


@pytest.fixture
def fresh_probe():
    is_available.cache_clear()
    yield
    is_available.cache_clear()


@pytest.mark.usefixtures("fresh_probe")
def test_probe_without_the_kernel(monkeypatch):
    monkeypatch.delattr(torch, "_weight_int8pack_mm")
    assert not is_available()


@needs_kernel
@pytest.mark.usefixtures("fresh_probe")
@pytest.mark.parametrize("change", ["scale", "order", "one token"])
def test_probe_of_another_meaning(change, monkeypatch):
    original = torch._weight_int8pack_mm

    def other(x, weight, scale):
        if change == "one token" and x.shape[0] > 1:
            return original(x, weight, scale)
        return original(x, weight.flip(1) if change == "order" else weight, scale if change == "order" else scale * 2)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", other)
    assert not is_available()


# ----------------------------------------------------------------------------------------------------------------------- op


@pytest.mark.parametrize(("n", "k"), FIT + OTHER)
def test_against_float64(n, k, path, native_calls):
    weight, q, scale = make(n, k)
    for tokens in (0, 1, 2, 3, 5, 16, 17, 200):
        x, bias = activations(tokens, k), activations(1, n, seed=5)[0]
        native_calls.clear()
        y, biased = w8a16_cpu(x, q, scale, None), w8a16_cpu(x, q, scale, bias)
        assert y.shape == biased.shape == (tokens, n) and y.dtype == biased.dtype == torch.bfloat16
        check(y, x, weight)
        if path == "native" and (n, k) in FIT and tokens and is_available():
            assert native_calls == [(tokens, n, k)] * 2
            assert torch.equal(biased, y + bias)  # PyTorch's kernel takes no bias
        else:
            assert not native_calls
            check(biased, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(scale_dtype, dtype):
    for n, k in (FIT[2], OTHER[2]):
        weight, q, scale = make(n, k, scale_dtype)
        for x_dtype in {dtype, torch.bfloat16}:
            for tokens in (1, 7, 100):
                x, bias = activations(tokens, k, x_dtype), activations(1, n, x_dtype, seed=5)[0]
                check(w8a16_cpu(x, q, scale, bias), x, weight.to(x_dtype), bias)


@pytest.mark.parametrize("tile", [1 << 19, 1])
@pytest.mark.parametrize(("n", "k"), FIT + OTHER)
def test_the_identity_gives_the_dequantized_weight_back(n, k, tile, path, monkeypatch):
    monkeypatch.setattr(linear, "TILE_WEIGHTS", tile)
    weight, q, scale = make(n, k)
    for dtype in (torch.bfloat16, torch.float32):
        eye = torch.eye(k, dtype=dtype)
        assert torch.equal(w8a16_cpu(eye, q, scale, None), weight.t().to(dtype))
        assert torch.equal(w8a16_cpu_ref(eye, q, scale, None), weight.t().to(dtype))
        assert torch.equal(w8a16_cpu_input_grad(torch.eye(n, dtype=dtype), q, scale), weight.to(dtype))


@needs_kernel
def test_the_kernel_is_for_few_tokens_in_bfloat16(native_calls):
    _, q, scale = make(64, 96)
    w8a16_cpu(activations(module.MAX_NATIVE_TOKENS, 96), q, scale, None)
    assert native_calls.pop() == (module.MAX_NATIVE_TOKENS, 64, 96)
    w8a16_cpu(activations(module.MAX_NATIVE_TOKENS + 1, 96), q, scale, None)
    w8a16_cpu(activations(1, 96, torch.float32), q, scale, None)
    w8a16_cpu(activations(1, 96), q, scale.float(), None)
    assert not native_calls


@pytest.mark.usefixtures("native_calls")
def test_addresses_that_are_not_aligned(path):
    weight, q, scale = make(64, 96)
    for offset in (1, 8, 16):
        x = activations(1, 3 * 96 + offset)[0, offset:].view(3, 96)
        shifted = torch.empty(64 * 96 + offset, dtype=torch.int8)[offset:].view(64, 96).copy_(q)
        check(w8a16_cpu(x, q, scale, None), x, weight)
        check(w8a16_cpu(x, shifted, scale, None), x, weight)


def test_shapes_and_strides(path):
    weight, q, scale = make(80, 128)
    x, wide = activations(24, 128), activations(4, 256)
    assert torch.equal(w8a16_cpu(x.view(2, 3, 4, 128), q, scale, None), w8a16_cpu(x, q, scale, None).view(2, 3, 4, 80))
    assert w8a16_cpu(x[0], q, scale, None).shape == (80,) and w8a16_cpu(x[:0].view(2, 0, 128), q, scale, None).shape == (2, 0, 80)
    for view in (x.t().contiguous().t(), x[::3], wide[:, ::2], wide[:, 1:129], x[:1].expand(5, 128)):
        check(w8a16_cpu(view, q, scale, None), view, weight)
    for q_view, scale_view in ((q.t().contiguous().t(), scale), (q, scale.repeat_interleave(2)[::2])):
        check(w8a16_cpu(x, q_view, scale_view, None), x, weight)


@pytest.mark.parametrize("tile", [1 << 19, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_input_grad(dtype, tile, monkeypatch):
    monkeypatch.setattr(linear, "TILE_WEIGHTS", tile)
    for n, k in ((64, 96), (33, 100)):
        weight, q, scale = make(n, k)
        for shape in ((5, n), (0, n), (2, 3, n), (n,)):
            grad_y = activations(1, torch.Size(shape).numel(), dtype).view(shape)
            grad_x = w8a16_cpu_input_grad(grad_y, q, scale)
            assert grad_x.shape == (*shape[:-1], k) and grad_x.dtype == dtype
            check(grad_x.view(-1, k), grad_y.view(-1, n), weight.to(dtype).t())


def test_arguments_are_left_alone(path):
    _, q, scale = make(80, 128)
    given = (activations(3, 128), q, scale, activations(1, 80)[0])
    before = [tensor.clone() for tensor in given]
    w8a16_cpu(*given)
    w8a16_cpu_input_grad(activations(3, 80), q, scale)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_opcheck():
    _, q, scale = make(64, 96)
    for x in (activations(3, 96), activations(40, 96), activations(0, 96).view(2, 0, 96), activations(2, 96, torch.float32)):
        torch.library.opcheck(w8a16_cpu, (x, q, scale, torch.randn(64, dtype=x.dtype)))
    for grad_y in (activations(3, 64), activations(6, 64, torch.float32).view(2, 3, 64)):
        torch.library.opcheck(w8a16_cpu_input_grad, (grad_y, q, scale))


def test_a_wrong_weight_is_noticed(path):
    weight, q, scale = make(64, 96)
    x = activations(8, 96)
    flipped = q.clone()
    flipped[3, 5] ^= 0x40
    check(w8a16_cpu(x, q, scale, None), x, weight)
    for other_q, other_scale in ((flipped, scale), (q.roll(1, 0), scale), (q, scale.roll(1, 0))):
        with pytest.raises(AssertionError, match="max error"):
            check(w8a16_cpu(x, other_q, other_scale, None), x, weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.int8)}, r"x must be floating point with 16 or more bits, got torch.int8"),
        ({"x": torch.zeros(())}, r"x must be \[..., 64\] for weight_rows \[48, 64\], got \[\]"),
        ({"x": torch.zeros(3, 32)}, r"x must be \[..., 64\] for weight_rows \[48, 64\], got \[3, 32\]"),
        ({"q": torch.zeros(48, 64)}, r"weight_rows must be int8 \[N, K\], got torch.float32 \[48, 64\]"),
        ({"q": torch.zeros(48, dtype=torch.int8)}, r"weight_rows must be int8 \[N, K\], got torch.int8 \[48\]"),
        ({"scale": torch.zeros(48, 1)}, r"row_scale must be floating point \[48\], got torch.float32 \[48, 1\]"),
        ({"scale": torch.zeros(48, dtype=torch.int8)}, r"row_scale must be floating point \[48\], got torch.int8 \[48\]"),
        ({"bias": torch.zeros(1)}, r"bias must be torch.float32 \[48\], as x, got torch.float32 \[1\]"),
        ({"bias": torch.zeros(48).half()}, r"bias must be torch.float32 \[48\], as x, got torch.float16 \[48\]"),
    ],
)
def test_wrong_arguments(change, message):
    _, q, scale = make(48, 64)
    given = {"x": torch.zeros(3, 64), "q": q, "scale": scale, "bias": None} | change
    with pytest.raises(ValueError, match=message):
        w8a16_cpu(*given.values())
