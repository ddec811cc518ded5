"""W8A8 is exact: bit for bit what 64-bit integer arithmetic gives, then one rounding."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from torchq.kernels import w8a8_int8 as module
from torchq.kernels.w8a8_int8 import quantize_activations, w8a8_int8, w8a8_int8_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS = [0, 1, 2, 7, 16, 17, 64, 130]
SHAPES = [(33, 100), (16, 32), (7, 33), (100, 576), (1, 1), (24, 2048)]
MODES = ["dynamic", "static", "static asymmetric"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["int_mm", "float"])
def matmul(request, monkeypatch):
    """torch._int_mm where it is exact, and what stands in for it elsewhere."""
    if request.param == "float":
        monkeypatch.setattr(module, "_int_mm_is_exact", lambda: False)
    return request.param


def activations(tokens, k, dtype, seed=0):
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)) * 3
    if tokens > 1:
        x[1] = 0
    return x.to(dtype)


def make(n, k, dtype, mode="dynamic", per_tensor=False, seed=0):
    """Arguments of the op between x and bias."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    scale = (torch.rand((1,) if per_tensor else (n, 1), generator=generator) * 0.01 + 1e-3).to(dtype)
    input_scale = None if mode == "dynamic" else torch.tensor([0.03]).to(dtype)
    zero_point = torch.tensor([-77], dtype=torch.int8) if mode == "static asymmetric" else None
    return weight, scale, input_scale, zero_point


def by_integers(x, weight, weight_scale, input_scale, zero_point, bias):
    """The definition, in int64."""
    values = x.float()
    if input_scale is None:
        scale = values.abs().amax(-1, keepdim=True) / 127
        scale[scale == 0] = 1
    else:
        scale = input_scale.float()
    shift = 0 if zero_point is None else int(zero_point)
    codes = ((values / scale).round() + shift).clamp(-128, 127).long()
    y = ((codes - shift) @ weight.long().t()).float() * weight_scale.float().reshape(1, -1) * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("per_tensor", [True, False])
def test_equals_integer_arithmetic(per_tensor, mode, dtype, matmul):
    for n, k in SHAPES:
        arguments = make(n, k, dtype, mode, per_tensor)
        for tokens in TOKENS:
            x, bias = activations(tokens, k, dtype), activations(1, n, dtype, seed=5)[0]
            for added in (None, bias):
                y = w8a8_int8(x, *arguments, added)
                assert y.shape == (tokens, n) and y.dtype == dtype
                assert torch.equal(y, by_integers(x, *arguments, added)), (n, k, tokens)
                assert torch.equal(y, w8a8_int8_ref(x, *arguments, added)), (n, k, tokens)


@pytest.mark.parametrize("mode", MODES)
def test_more_tokens_than_are_processed_at_a_time(mode, matmul, monkeypatch):
    n, k = 33, 96
    arguments, bias = make(n, k, torch.bfloat16, mode), activations(1, n, torch.bfloat16, seed=5)[0]
    x = activations(1100, k, torch.bfloat16)
    for elements in (1, k * 7, 1 << 17):
        monkeypatch.setattr(module, "_CPU_ELEMENTS", elements)
        y = w8a8_int8(x, *arguments, bias)
        assert y.is_contiguous()
        assert torch.equal(y, by_integers(x, *arguments, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_on_cuda(mode, dtype):
    for n, k in SHAPES:
        given = [None if argument is None else argument.cuda() for argument in make(n, k, dtype, mode)]
        bias = activations(1, n, dtype, seed=5)[0].cuda()
        for tokens in TOKENS:
            x = activations(tokens, k, dtype).cuda()
            assert torch.equal(w8a8_int8(x, *given, bias), w8a8_int8_ref(x, *given, bias)), (n, k, tokens)


@pytest.mark.parametrize("mode", MODES)
def test_largest_codes(mode, matmul):
    """Sums beyond 2^24, and saturating instructions: all codes at the ends of the range."""
    n, k = 8, 8192
    _, scale, input_scale, zero_point = make(n, k, torch.float32, mode)
    for sign in (1.0, -1.0):
        x = torch.full((3, k), 100.0) * sign
        x[1, ::2] *= -1
        for value in (-128, 127):
            weight = torch.full((n, k), value, dtype=torch.int8)
            weight[1, 1::2] = 1
            weight[2, ::3] = -value - 1
            weight[3, 0] = value - 1 if value > 0 else value + 1
            arguments = (weight, scale, input_scale, zero_point, None)
            assert torch.equal(w8a8_int8(x, *arguments), by_integers(x, *arguments)), (sign, value)


def test_every_product(matmul):
    """K = 1, for which torch._int_mm returns garbage."""
    values = torch.arange(-128, 128, dtype=torch.int8)
    one = torch.ones(1)
    y = w8a8_int8(values.float()[:, None], values[:, None], one, one, None, None)
    assert torch.equal(y, (values.long()[:, None] * values.long()[None]).float())


def test_saturating_int_mm_is_not_used(monkeypatch):
    """Processors without VNNI sum two products in 16 bits, which saturate."""

    def saturating(x_q, weight):
        products = x_q.int().unsqueeze(-1) * weight.int().unsqueeze(0)
        return products.unflatten(1, (-1, 2)).sum(2).clamp(-(1 << 15), (1 << 15) - 1).sum(1, dtype=torch.int32)

    arguments = make(16, 64, torch.float32)
    x = activations(7, 64, torch.float32)
    module._int_mm_is_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not module._int_mm_is_exact()
    assert torch.equal(w8a8_int8(x, *arguments, None), by_integers(x, *arguments, None))
    module._int_mm_is_exact.cache_clear()


def test_other_dtypes_of_scales_and_bias():
    weight, scale, _, _ = make(33, 64, torch.bfloat16)
    x, bias = activations(5, 64, torch.float16), torch.randn(33)
    assert torch.equal(w8a8_int8(x, weight, scale, None, None, bias), by_integers(x, weight, scale, None, None, bias))
    x = activations(5, 64, torch.float64)
    assert torch.equal(w8a8_int8(x, weight, scale, None, None, None), by_integers(x, weight, scale, None, None, None))


@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_strides(mode):
    arguments = make(33, 64, torch.float32, mode)

    def op(x, weight=arguments[0]):
        return w8a8_int8(x, weight, *arguments[1:], None)

    x = activations(24, 64, torch.float32)
    assert torch.equal(op(x.view(2, 3, 4, 64)), op(x).view(2, 3, 4, 33))
    assert torch.equal(op(x[0]), op(x[:1])[0]) and op(x[0]).shape == (33,)
    assert op(x[:0].view(2, 0, 64)).shape == (2, 0, 33)
    wide = activations(4, 128, torch.float32)
    for view in (x.t().contiguous().t(), x[::3], wide[:, ::2], wide[:, 3:67], x[:1].expand(5, 64)):
        assert torch.equal(op(view), op(view.clone(memory_format=torch.contiguous_format)))
    assert torch.equal(op(x, arguments[0].t().contiguous().t()), op(x))
    assert torch.equal(op(x, torch.cat([arguments[0]] * 2, 1)[:, :64]), op(x))


def test_arguments_are_left_alone():
    arguments = make(33, 64, torch.bfloat16, "static asymmetric")
    given = (activations(3, 64, torch.bfloat16), *arguments, activations(1, 33, torch.bfloat16)[0])
    before = [tensor.clone() for tensor in given]
    w8a8_int8(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_scales(dtype):
    x = activations(5, 96, dtype)
    codes, scale = quantize_activations(x, None, None)
    assert scale.shape == (5, 1) and scale.dtype == torch.float32 and (scale > 0).all() and not codes[1].any()
    assert (codes[[0, 2, 3, 4]].int().abs().amax(1) == 127).all()
    assert ((codes.float() * scale - x.float()).abs() <= 0.5001 * scale).all()


def test_bad_tokens_stay_bad_and_alone():
    """NaN and inf must not become ordinary numbers, nor reach the other tokens."""
    weight, scale, _, _ = make(16, 64, torch.float32)
    x = activations(6, 64, torch.float32)
    expected = w8a8_int8(x, weight, scale, None, None, None)
    x[2, 3], x[4, 5] = float("nan"), float("inf")
    y = w8a8_int8(x, weight, scale, None, None, None)
    assert torch.isnan(y[2]).all() and not torch.isfinite(y[4]).any()
    assert torch.equal(y[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode):
    arguments = make(33, 64, torch.bfloat16, mode)
    for x in (activations(3, 64, torch.bfloat16), activations(0, 64, torch.bfloat16).view(2, 0, 64)):
        torch.library.opcheck(w8a8_int8, (x, *arguments, torch.randn(33).bfloat16()))


def test_compiled_twice_at_most():
    arguments = make(48, 64, torch.bfloat16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: w8a8_int8(x * 2, *arguments, None) + 1, fullgraph=True, backend=counter)
    for tokens in (7, 2, 16, 33, 130):
        x = activations(tokens, 64, torch.bfloat16)
        assert torch.equal(compiled(x), w8a8_int8(x * 2, *arguments, None) + 1)
    assert counter.frame_count <= 2


def test_a_wrong_weight_is_noticed():
    weight, scale, input_scale, zero_point = make(33, 64, torch.float32, "static asymmetric")
    x = activations(64, 64, torch.float32)
    expected = w8a8_int8(x, weight, scale, input_scale, zero_point, None)
    other = weight.clone()
    other[5, 7] ^= 1  # the lowest bit of one code
    for arguments in (
        (other, scale, input_scale, zero_point),
        (weight.roll(1, 0), scale, input_scale, zero_point),
        (weight, scale.roll(1, 0), input_scale, zero_point),
        (weight, scale, input_scale * 1.01, zero_point),
        (weight, scale, input_scale, zero_point + 1),
        (weight, scale, input_scale, None),
        (weight, scale, None, None),
    ):
        assert not torch.equal(w8a8_int8(x, *arguments, None), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.int8)}, r"x must be floating point with 16 or more bits, got torch.int8"),
        ({"x": torch.zeros(())}, r"x must be \[..., K\], got a 0-D tensor"),
        ({"x": torch.zeros(3, 63)}, r"weight must be int8 \[N, 63\], got torch.int8 \[33, 64\]"),
        ({"weight": torch.zeros(33, 64)}, r"weight must be int8 \[N, 64\], got torch.float32 \[33, 64\]"),
        ({"weight": torch.zeros(64, dtype=torch.int8)}, r"weight must be int8 \[N, 64\], got torch.int8 \[64\]"),
        ({"weight_scale": torch.ones(33)}, r"weight_scale must be \[33, 1\] or \[1\], got \[33\]"),
        ({"weight_scale": torch.ones(33, 2)}, r"weight_scale must be \[33, 1\] or \[1\], got \[33, 2\]"),
        ({"weight_scale": torch.ones(())}, r"weight_scale must be \[33, 1\] or \[1\], got \[\]"),
        ({"input_scale": torch.ones(3, 1)}, r"input_scale must be \[1\], got \[3, 1\]"),
        ({"input_zero_point": torch.zeros(2, dtype=torch.int8)}, r"input_zero_point must be \[1\], got \[2\]"),
        ({"input_scale": None}, r"input_zero_point needs input_scale: dynamic activations are symmetric"),
        ({"bias": torch.zeros(1)}, r"bias must be \[33\], got \[1\]"),
    ],
)
def test_wrong_arguments(change, message):
    names = ("weight", "weight_scale", "input_scale", "input_zero_point")
    given = {"x": torch.zeros(3, 64), **dict(zip(names, make(33, 64, torch.float32, "static asymmetric"), strict=True))}
    given |= {"bias": None} | change
    with pytest.raises(ValueError, match=message):
        w8a8_int8(*given.values())
