"""The CPU kernel's layout: there and back bit for bit, and both ways to multiply with it against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from torchq import numerics
from torchq.algorithms.rtn import quantize_weight
from torchq.kernels import linear
from torchq.kernels import wna16_cpu as module
from torchq.kernels.wna16_cpu import (
    is_available,
    native_group_size,
    pack_planes,
    pack_scale_and_zero,
    scale_of,
    unpack_planes,
    wna16_cpu,
    wna16_cpu_ref,
    zero_residual,
)
from torchq.scheme import QuantArgs, Scheme
from torchq.testing import assert_within_dtype_error

needs_layout = pytest.mark.skipif(not is_available(), reason="PyTorch packs int4 weights in another order on this processor")
TOKENS = [0, 1, 2, 7, 16, 17, 64, 200]  # 200 is beyond the native kernel's range
SHAPES = [(16, 32, 32), (48, 576, 64), (64, 96, 96), (80, 256, 256), (112, 512, 128), (576, 192, 192), (64, 1024, 1024)]
WIDTHS = [(num_bits, True) for num_bits in range(2, 9)] + [(num_bits, False) for num_bits in range(2, 5)]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["native", "tiled"])
def path(request, monkeypatch):
    """Both ways to multiply, whatever the number of tokens."""
    limit = 1 << 30 if request.param == "native" else -1
    monkeypatch.setattr(module, "MAX_NATIVE_TOKENS", {1: limit, 2: limit})
    return request.param


def activations(tokens, k, dtype=torch.bfloat16, seed=0):
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lay_out(q, scale, zero_point, num_bits, group_size):
    """Arguments of the op after x."""
    size = native_group_size(q.shape[0], q.shape[1], group_size)
    residual = None if zero_point is None else zero_residual(scale, zero_point)
    return pack_planes(q, num_bits), pack_scale_and_zero(scale, zero_point, num_bits, group_size, size), zero_point, residual


def make(n, k, group_size, num_bits, symmetric, seed=0):
    """A quantized Gaussian weight: (dequantized weight, arguments of the op after x)."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    args = QuantArgs(num_bits, symmetric=symmetric, group_size=group_size)
    quantized, _ = quantize_weight(w.bfloat16(), Scheme(args))
    weight = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, args)
    return weight, lay_out(quantized.q, quantized.scale, quantized.zero_point, num_bits, group_size)


def exact_and_eager(x, weight, bias=None):
    weight = weight.to(x.dtype)
    exact = x.double() @ weight.double().t()
    return exact if bias is None else exact + bias.double(), F.linear(x, weight, bias)


def check(y, x, weight, bias=None):
    """At most twice the error of eager PyTorch on the dequantized weight; in float32 the order of the sums decides."""
    assert_within_dtype_error(y, *exact_and_eager(x, weight, bias), factor=10 if x.dtype == torch.float32 else 2)


# ------------------------------------------------------------------------------------------------------------------- layout


@needs_layout
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_codes_round_trip(num_bits):
    half = 1 << (num_bits - 1)
    for n in (16, 32, 48, 64, 80, 96, 112, 128, 144, 576):
        q = torch.randint(-half, half, (n, 96), generator=torch.Generator().manual_seed(n)).to(torch.int8)
        planes = pack_planes(q, num_bits)
        assert planes.dtype == torch.uint8 and planes.shape == (n, 48 if num_bits <= 4 else 96)
        assert torch.equal(unpack_planes(planes, num_bits), q), n


@needs_layout
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_scales_round_trip(num_bits):
    scale = torch.randn(48, 6, generator=torch.Generator().manual_seed(0)).bfloat16() * 1e-3
    scale[0] = torch.finfo(torch.bfloat16).smallest_normal
    for group_size, native_size in ((32, 32), (64, 32), (64, 64), (256, 64), (512, 256)):
        pairs = pack_scale_and_zero(scale, None, num_bits, group_size, native_size)
        assert pairs.is_contiguous()
        assert torch.equal(scale_of(pairs, num_bits, 6), scale)


@pytest.mark.parametrize(
    ("n", "k", "group_size", "expected"),
    [
        (64, 128, 128, 128),
        (64, 192, 192, 64),
        (64, 96, 96, 32),
        (64, 512, 512, 256),
        (64, 128, 32, 32),
        (16, 32, 32, 32),
        (24, 128, 128, None),  # rows
        (64, 48, 16, None),  # columns
        (64, 160, 16, None),  # groups too small
        (64, 160, 40, None),
        (0, 128, 128, None),
    ],
)
def test_native_group_size(n, k, group_size, expected):
    assert native_group_size(n, k, group_size) == expected


def test_zeros_of_wide_codes_do_not_fit():
    for num_bits in range(5, 9):
        with pytest.raises(ValueError, match="two planes hold symmetric weights only"):
            pack_scale_and_zero(torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.int8), num_bits, 32, 32)


@pytest.fixture
def fresh_probe():
    is_available.cache_clear()
    yield
    is_available.cache_clear()


@pytest.mark.usefixtures("fresh_probe")
def test_probe_without_the_kernel(monkeypatch):
    monkeypatch.delattr(torch, "_convert_weight_to_int4pack_for_cpu")
    assert not is_available()


@pytest.mark.usefixtures("fresh_probe")
@pytest.mark.parametrize("change", ["roll", "flip", "swap nibbles"])
def test_probe_of_another_layout(change, monkeypatch):
    def other(q, _):
        packed = (q[:, ::2] | (q[:, 1::2] << 4)).to(torch.uint8)
        if change == "roll":
            return packed.roll(1, 0)
        return packed.flip(1) if change == "flip" else (packed << 4) | (packed >> 4)

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack_for_cpu", other)
    assert not is_available()


@needs_layout
@pytest.mark.usefixtures("fresh_probe")
@pytest.mark.parametrize("change", ["scale", "zero", "order"])
def test_probe_of_another_meaning_of_the_scales(change, monkeypatch):
    original = torch._weight_int4pack_mm_for_cpu

    def other(x, planes, group_size, pairs):
        scale, zero = pairs.unbind(-1)
        pairs = {"scale": (scale * 2, zero), "zero": (scale, -zero), "order": (zero, scale)}[change]
        return original(x, planes, group_size, torch.stack(pairs, -1))

    monkeypatch.setattr(torch, "_weight_int4pack_mm_for_cpu", other)
    assert not is_available()


@needs_layout
@pytest.mark.usefixtures("fresh_probe")
def test_probe_runs_once(monkeypatch):
    assert is_available()
    monkeypatch.delattr(torch, "_convert_weight_to_int4pack_for_cpu")
    assert is_available()


# ----------------------------------------------------------------------------------------------------------------------- op


@needs_layout
@pytest.mark.parametrize(("num_bits", "symmetric"), WIDTHS)
def test_against_float64(num_bits, symmetric, path):
    for n, k, group_size in SHAPES:
        weight, arguments = make(n, k, group_size, num_bits, symmetric)
        for tokens in TOKENS:
            x, bias = activations(tokens, k), activations(1, n, seed=5)[0]
            y = wna16_cpu(x, *arguments, None, num_bits, group_size)
            biased = wna16_cpu(x, *arguments, bias, num_bits, group_size)
            assert y.shape == biased.shape == (tokens, n) and y.dtype == biased.dtype == torch.bfloat16
            check(y, x, weight)
            if path == "native":  # PyTorch's kernel takes no bias
                assert torch.equal(biased, y + bias)
            else:
                check(biased, x, weight, bias)


@needs_layout
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_bits", "symmetric"), WIDTHS)
def test_other_activations(num_bits, symmetric, dtype):
    for n, k, group_size in SHAPES[:4]:
        weight, arguments = make(n, k, group_size, num_bits, symmetric)
        for tokens in (0, 1, 7, 200):
            x, bias = activations(tokens, k, dtype), activations(1, n, dtype, seed=5)[0]
            check(wna16_cpu(x, *arguments, bias, num_bits, group_size), x, weight, bias)


@needs_layout
@pytest.mark.parametrize(("num_bits", "symmetric"), WIDTHS)
def test_the_tiled_weight_is_the_dequantized_one(num_bits, symmetric, monkeypatch):
    """The identity as activations gives the weight back, bit for bit."""
    monkeypatch.setattr(module, "MAX_NATIVE_TOKENS", {1: -1, 2: -1})
    for tile in (1 << 19, 1):
        monkeypatch.setattr(linear, "TILE_WEIGHTS", tile)
        for n, k, group_size in SHAPES[:6]:
            weight, arguments = make(n, k, group_size, num_bits, symmetric)
            for dtype in (torch.float32, torch.bfloat16):
                y = wna16_cpu(torch.eye(k, dtype=dtype), *arguments, None, num_bits, group_size)
                assert torch.equal(y, weight.t().to(dtype)), (n, k)
            reference = wna16_cpu_ref(torch.eye(k), *arguments, None, num_bits, group_size)
            assert torch.equal(reference, weight.t().float())


@needs_layout
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_the_native_weight_is_the_dequantized_one(num_bits, monkeypatch):
    monkeypatch.setattr(module, "MAX_NATIVE_TOKENS", {1: 1 << 30, 2: 1 << 30})
    for n, k, group_size in SHAPES[:6]:
        weight, arguments = make(n, k, group_size, num_bits, True)
        y = wna16_cpu(torch.eye(k, dtype=torch.bfloat16), *arguments, None, num_bits, group_size)
        assert torch.equal(y, weight.t()), (n, k)


@needs_layout
def test_the_native_path_is_taken_for_few_tokens(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_tiled_matmul", lambda tokens, *_: calls.append(tokens.shape[0]) or tokens.new_zeros(0))
    _, arguments = make(16, 32, 32, 4, True)
    for tokens, limit in ((96, 96), (1, 1)):
        monkeypatch.setattr(module, "MAX_NATIVE_TOKENS", {1: limit, 2: limit})
        wna16_cpu(activations(tokens, 32), *arguments, None, 4, 32)
        assert not calls
    with pytest.raises(RuntimeError):
        wna16_cpu(activations(2, 32), *arguments, None, 4, 32)
    assert calls == [2]


@needs_layout
@pytest.mark.parametrize("num_bits", [2, 4, 6, 8])
def test_shapes_and_strides_of_the_activations(num_bits, path):
    weight, arguments = make(80, 128, 32, num_bits, True)

    def op(x):
        return wna16_cpu(x, *arguments, None, num_bits, 32)

    x = activations(24, 128)
    assert torch.equal(op(x.view(2, 3, 4, 128)), op(x).view(2, 3, 4, 80))
    assert torch.equal(op(x[0]), op(x[:1])[0]) and op(x[0]).shape == (80,)
    assert op(x[:0].view(2, 0, 128)).shape == (2, 0, 80)
    wide = activations(4, 256)
    for view in (x.t().contiguous().t(), x[::3], wide[:, ::2], wide[:, 1:129], x[:1].expand(5, 128)):
        assert torch.equal(op(view), op(view.clone(memory_format=torch.contiguous_format)))
        check(op(view), view, weight)


@needs_layout
def test_arguments_are_left_alone(path):
    _, arguments = make(80, 128, 32, 4, False)
    given = (activations(3, 128), *arguments, activations(1, 80)[0])
    before = [tensor.clone() for tensor in given]
    wna16_cpu(*given, 4, 32)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@needs_layout
@pytest.mark.parametrize(("num_bits", "symmetric"), WIDTHS)
def test_opcheck(num_bits, symmetric):
    _, arguments = make(48, 64, 32, num_bits, symmetric)
    for x in (activations(3, 64), activations(0, 64).view(2, 0, 64), activations(2, 64, torch.float32)):
        torch.library.opcheck(wna16_cpu, (x, *arguments, torch.randn(48, dtype=x.dtype), num_bits, 32))


@needs_layout
def test_compiled_twice_at_most():
    _, arguments = make(48, 64, 32, 4, False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: wna16_cpu(x * 2, *arguments, None, 4, 32) + 1, fullgraph=True, backend=counter)
    for tokens in (7, 2, 16, 96, 97, 130):
        x = activations(tokens, 64)
        assert torch.equal(compiled(x), wna16_cpu(x * 2, *arguments, None, 4, 32) + 1)
    assert counter.frame_count <= 2


@needs_layout
@pytest.mark.parametrize("num_bits", [4, 8])
def test_a_wrong_weight_is_noticed(num_bits, path):
    weight, (planes, pairs, zero_point, residual) = make(80, 128, 32, num_bits, num_bits == 8)
    x = activations(64, 128)

    def run(planes=planes, pairs=pairs, zero_point=zero_point):
        check(wna16_cpu(x, planes, pairs, zero_point, None if zero_point is None else residual, None, num_bits, 32), x, weight)

    run()
    flipped = planes.clone()
    flipped[3, 5] ^= 0x80  # the high bit of one code
    swapped = planes.clone()
    swapped[0], swapped[1] = planes[1], planes[0]
    mutations = [{"planes": flipped}, {"planes": swapped}, {"pairs": pairs.roll(1, 0)}, {"pairs": pairs.roll(1, 1)}]
    if zero_point is not None:
        shifted = zero_point.clone()
        shifted[1, 2] += 1
        if path == "native":  # reads the zeros of the pairs
            other = pairs.clone()
            other[2, 1, 1] -= pairs[2, 1, 0]
            mutations.append({"pairs": other})
        else:
            mutations += [{"zero_point": shifted}, {"zero_point": zero_point.roll(1, 1)}, {"zero_point": None}]
    for mutation in mutations:
        with pytest.raises(AssertionError, match="max error"):
            run(**mutation)


# ------------------------------------------------------------------------------------------- rounded zeros (asymmetric, native)


@needs_layout
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("num_bits", [2, 3, 4])
def test_rounded_zeros_cost_little_on_ordinary_weights(num_bits, group_size):
    """Root mean square error, in units of eager's: the maximum is a matter of luck."""
    n, k = 256, 1024
    weight, arguments = make(n, k, group_size, num_bits, False)
    for shift in (0.0, 1.0):
        x = (activations(32, k, torch.float32) + shift).bfloat16()
        exact, eager = exact_and_eager(x, weight)
        native = wna16_cpu(x, *arguments, None, num_bits, group_size)
        assert (native.double() - exact).norm() <= 1.9 * (eager.double() - exact).norm(), shift


@needs_layout
def test_rounded_zeros_are_bounded_on_any_weight():
    """One outlier per group and activations of one sign: the worst case without the residuals."""
    n, k, group_size, num_bits = 64, 1024, 128, 4
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(0)
    zero_point = torch.full((n, k // group_size), -7, dtype=torch.int8)
    scale = (torch.rand(n, k // group_size, generator=generator) + 0.5).bfloat16()
    q = torch.randint(-half, half, (n, k), generator=generator).to(torch.int8)
    args = QuantArgs(num_bits, symmetric=False, group_size=group_size)
    exact_weight = numerics.dequantize(q, scale.double(), zero_point, args)
    x = activations(8, k).abs()
    y = wna16_cpu(x, *lay_out(q, scale, zero_point, num_bits, group_size), None, num_bits, group_size)
    check(y, x, exact_weight.bfloat16())


# -------------------------------------------------------------------------------------------------------------- wrong input


@needs_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # native, tiled
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.int8)}, r"x must be floating point with 16 or more bits, got torch.int8"),
        ({"x": torch.zeros(())}, r"x must be \[..., K\], got a 0-D tensor"),
        ({"x": torch.zeros(3, 32)}, r"weight_planes holds 64 columns at 4 bits, x has 32"),
        (
            {"planes": torch.zeros(48, 32, dtype=torch.int8)},
            r"weight_planes must be uint8 \[N, P K / 2\], got torch.int8 \[48, 32\]",
        ),
        ({"planes": torch.zeros(48, dtype=torch.uint8)}, r"weight_planes must be uint8 \[N, P K / 2\], got torch.uint8 \[48\]"),
        (
            {"pairs": torch.zeros(1, 48, 2)},
            r"scale_and_zero must be \[a multiple of 2, 48, 2\] for group_size=32, got \[1, 48, 2\]",
        ),
        (
            {"pairs": torch.zeros(2, 47, 2)},
            r"scale_and_zero must be \[a multiple of 2, 48, 2\] for group_size=32, got \[2, 47, 2\]",
        ),
        ({"pairs": torch.zeros(0, 48, 2)}, r"scale_and_zero must be .* got \[0, 48, 2\]"),
        ({"zero_point": torch.zeros(48, 1, dtype=torch.int8)}, r"zero_point must be int8 \[48, 2\], got torch.int8 \[48, 1\]"),
        ({"zero_point": torch.zeros(48, 2)}, r"zero_point must be int8 \[48, 2\], got torch.float32 \[48, 2\]"),
        ({"residual": None}, "zero_point and residual go together"),
        ({"residual": torch.zeros(2, 48)}, r"residual must be torch.bfloat16 \[2, 48\], got torch.float32 \[2, 48\]"),
        ({"residual": torch.zeros(48, 2).bfloat16()}, r"residual must be torch.bfloat16 \[2, 48\], got torch.bfloat16 \[48, 2\]"),
        ({"bias": torch.zeros(1)}, r"bias must be .* \[48\], as x, got .* \[1\]"),
        ({"bias": torch.zeros(48).half()}, r"bias must be .* \[48\], as x, got torch.float16 \[48\]"),
        ({"num_bits": 8}, r"weight_planes holds 32 columns at 8 bits, x has 64"),
        ({"group_size": 0}, r"group_size must divide 64 in_features, got 0"),
        ({"group_size": 48}, r"group_size must divide 64 in_features, got 48"),
        ({"group_size": 16}, r"scale_and_zero must be \[a multiple of 4, 48, 2\] for group_size=16"),
    ],
)
def test_wrong_arguments(change, message, dtype):
    _, (planes, pairs, zero_point, residual) = make(48, 64, 32, 4, False)
    given = {"x": torch.zeros(3, 64, dtype=dtype), "planes": planes, "pairs": pairs, "zero_point": zero_point}
    given |= {"residual": residual, "bias": None}
    given |= {"num_bits": 4, "group_size": 32} | change
    with pytest.raises(ValueError, match=message):
        wna16_cpu(*given.values())
