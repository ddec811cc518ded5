"""Packed 2- to 8-bit weights: against float64 on the exactly dequantized weight, and against eager PyTorch's own error."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from torchq import numerics
from torchq.kernels import linear
from torchq.kernels.wna16 import dequantize_wna16, wna16, wna16_ref
from torchq.packing import pack_int32, pack_zero_point
from torchq.scheme import QuantArgs
from torchq.testing import assert_within_dtype_error

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS = [0, 1, 2, 7, 16, 17, 64, 130]
SHAPES = [  # N, K, group_size
    (33, 33, 33),
    (100, 100, 50),
    (7, 100, 25),  # an odd group
    (1, 64, 32),
    (33, 576, 192),
    (100, 384, 128),
    (64, 576, 64),
    (40, 160, 160),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make(n, k, group_size, num_bits, symmetric, scale_dtype=torch.bfloat16, seed=0):
    """Random codes over the full range, scales of both signs, zero points: (dequantized weight, arguments of the op)."""
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (num_bits - 1)
    q = torch.randint(-half, half, (n, k), generator=generator).to(torch.int8)
    scale = (torch.rand(n, k // group_size, generator=generator) + 0.5) * 0.1 / half
    scale = (scale * (torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1)).to(scale_dtype)
    zero_point = None if symmetric else torch.randint(-half, half, scale.shape, generator=generator).to(torch.int8)
    args = QuantArgs(num_bits, symmetric=symmetric, group_size=group_size)
    weight = numerics.dequantize(q, scale, zero_point, args)
    packed_zero_point = None if zero_point is None else pack_zero_point(zero_point, num_bits)
    return weight, (pack_int32(q, num_bits), scale, packed_zero_point)


def activations(tokens, k, dtype, seed=0):
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(y, x, weight, bias=None):
    """At most twice the error of eager PyTorch on the dequantized weight; in float32 the order of the sums decides."""
    weight = weight.to(x.dtype)
    exact = x.double() @ weight.double().t()
    exact = exact if bias is None else exact + bias.double()
    assert_within_dtype_error(y, exact, F.linear(x, weight, bias), factor=10 if x.dtype == torch.float32 else 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_against_float64(num_bits, symmetric, dtype):
    for n, k, group_size in SHAPES:
        weight, arguments = make(n, k, group_size, num_bits, symmetric, dtype)
        bias = activations(1, n, dtype, seed=5)[0]
        for tokens in TOKENS if n > 1 else TOKENS[-2:]:  # eager's error on a few numbers is a matter of luck
            x = activations(tokens, k, dtype)
            for added in (None, bias):
                y = wna16(x, *arguments, added, num_bits, group_size)
                assert y.shape == (tokens, n) and y.dtype == dtype
                check(y, x, weight, added)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_reference_dequantizes_as_numerics_do(num_bits, symmetric):
    for scale_dtype in DTYPES:
        for n, k, group_size in SHAPES:
            weight, arguments = make(n, k, group_size, num_bits, symmetric, scale_dtype)
            assert torch.equal(dequantize_wna16(*arguments, num_bits, group_size, k), weight)
            x = activations(3, k, torch.float32)
            assert torch.equal(wna16_ref(x, *arguments, None, num_bits, group_size), F.linear(x, weight.float()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_bfloat16_scales_with_other_activations(num_bits, symmetric, dtype):
    weight, arguments = make(33, 192, 64, num_bits, symmetric)
    for tokens in (1, 17):
        x = activations(tokens, 192, dtype)
        check(wna16(x, *arguments, None, num_bits, 64), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_on_cuda(num_bits, symmetric, dtype):
    for n, k, group_size in SHAPES[:2] + SHAPES[4:]:
        weight, arguments = make(n, k, group_size, num_bits, symmetric, dtype)
        given = [None if argument is None else argument.cuda() for argument in arguments]
        bias = activations(1, n, dtype, seed=5)[0]
        for tokens in TOKENS:
            x = activations(tokens, k, dtype)
            check(wna16(x.cuda(), *given, bias.cuda(), num_bits, group_size).cpu(), x, weight, bias)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_row_tiles(num_bits, symmetric, monkeypatch):
    monkeypatch.setattr(linear, "TILE_WEIGHTS", 1)  # 64 rows at a time; 200 is no multiple
    weight, arguments = make(200, 96, 32, num_bits, symmetric, torch.float32)
    x, bias = activations(5, 96, torch.float32), activations(1, 200, torch.float32, seed=5)[0]
    check(wna16(x, *arguments, bias, num_bits, 32), x, weight, bias)


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
def test_shapes_and_strides_of_the_arguments(num_bits):
    weight, (packed, scale, zero_point) = make(33, 128, 32, num_bits, False, torch.float32)

    def op(x, packed=packed, scale=scale, zero_point=zero_point):
        return wna16(x, packed, scale, zero_point, None, num_bits, 32)

    x = activations(24, 128, torch.float32)
    expected = op(x)
    assert torch.equal(op(x.view(2, 3, 4, 128)), expected.view(2, 3, 4, 33))
    assert torch.equal(op(x[0]), op(x[:1])[0]) and op(x[0]).shape == (33,)
    assert op(x[:0].view(2, 0, 128)).shape == (2, 0, 33)
    check(op(x.t().contiguous().t()), x, weight)
    check(op(x[::3]), x[::3], weight)
    wide = activations(4, 256, torch.float32)
    check(op(wide[:, ::2]), wide[:, ::2], weight)
    check(op(x[:1].expand(5, 128)), x[:1].expand(5, 128), weight)
    transposed = [tensor.t().contiguous().t() for tensor in (packed, scale, zero_point)]
    assert torch.equal(op(x, *transposed), expected)
    sliced = [torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]] for tensor in (packed, scale, zero_point)]
    assert torch.equal(op(x, *sliced), expected)


def test_arguments_are_left_alone():
    _, arguments = make(33, 128, 32, 4, False)
    given = (activations(3, 128, torch.bfloat16), *arguments, activations(1, 33, torch.bfloat16)[0])
    before = [tensor.clone() for tensor in given]
    wna16(*given, 4, 32)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("num_bits", range(2, 9))
def test_opcheck(num_bits):
    for symmetric in (True, False):
        _, arguments = make(33, 64, 32, num_bits, symmetric, torch.float32)
        for x in (activations(3, 64, torch.float32), activations(0, 64, torch.float32).view(2, 0, 64)):
            torch.library.opcheck(wna16, (x, *arguments, torch.randn(33), num_bits, 32))


def test_compiled_twice_at_most():
    _, arguments = make(48, 64, 32, 4, False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: wna16(x * 2, *arguments, None, 4, 32) + 1, fullgraph=True, backend=counter)
    for tokens in (7, 2, 16, 33, 130):
        x = activations(tokens, 64, torch.bfloat16)
        assert torch.equal(compiled(x), wna16(x * 2, *arguments, None, 4, 32) + 1)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("num_bits", [2, 4, 5, 8])
def test_a_wrong_weight_is_noticed(num_bits):
    group_size = 32
    weight, (packed, scale, zero_point) = make(48, 128, group_size, num_bits, False)
    x = activations(64, 128, torch.float32)

    def run(packed=packed, scale=scale, zero_point=zero_point):
        check(wna16(x, packed, scale, zero_point, None, num_bits, group_size), x, weight)

    run()
    flipped = packed.clone()
    flipped[5, 1] ^= 1 << (num_bits - 1)  # the high bit of one code
    shifted_zero_point = zero_point.clone()
    shifted_zero_point[1, 2] ^= 1  # one zero point by one
    words = packed.view(48, 4, -1)
    swapped = torch.stack([words[:, 1], words[:, 0], words[:, 2], words[:, 3]], 1).flatten(1)
    for mutation in (
        {"packed": flipped},
        {"packed": swapped},
        {"packed": packed.roll(1, 0)},
        {"scale": scale.roll(1, 1)},
        {"scale": scale.roll(1, 0)},
        {"scale": -scale},
        {"zero_point": shifted_zero_point},
        {"zero_point": zero_point.roll(1, 1)},
        {"zero_point": None},
    ):
        with pytest.raises(AssertionError, match="max error"):
            run(**mutation)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.int8)}, r"x must be floating point with 16 or more bits, got torch.int8"),
        ({"x": torch.zeros(3, 64).to(torch.float8_e4m3fn)}, r"x must be floating point .* got torch.float8_e4m3fn"),
        ({"x": torch.zeros(())}, r"x must be \[..., K\], got a 0-D tensor"),
        ({"x": torch.zeros(3, 63)}, r"weight_scale must be \[33, 63 / group_size=32\], got \[33, 2\]"),
        ({"x": torch.zeros(3, 32)}, r"weight_packed must be int32 \[N, 4\] for 32 in_features at 4 bits, got .*\[33, 8\]"),
        ({"packed": torch.zeros(33, 8, dtype=torch.int64)}, r"weight_packed must be int32 .* got torch.int64 \[33, 8\]"),
        ({"packed": torch.zeros(33, dtype=torch.int32)}, r"weight_packed must be int32 \[N, 8\].* got torch.int32 \[33\]"),
        ({"scale": torch.ones(33)}, r"weight_scale must be \[33, 64 / group_size=32\], got \[33\]"),
        ({"scale": torch.ones(32, 2)}, r"weight_scale must be \[33, 64 / group_size=32\], got \[32, 2\]"),
        ({"scale": torch.ones(33, 2, dtype=torch.int32)}, r"weight_scale must be floating point, got torch.int32"),
        ({"zero_point": torch.zeros(4, 2, dtype=torch.int32)}, r"weight_zero_point must be int32 \[5, 2\].* got .*\[4, 2\]"),
        ({"zero_point": torch.zeros(5, 1, dtype=torch.int32)}, r"weight_zero_point must be int32 \[5, 2\].* got .*\[5, 1\]"),
        ({"zero_point": torch.zeros(5, 2, dtype=torch.int8)}, r"weight_zero_point must be int32 \[5, 2\].* got torch.int8"),
        ({"bias": torch.zeros(1)}, r"bias must be torch.float32 \[33\], as x, got torch.float32 \[1\]"),
        ({"bias": torch.zeros(33).half()}, r"bias must be torch.float32 \[33\], as x, got torch.float16 \[33\]"),
        ({"num_bits": 9}, r"num_bits must be 2 to 8, got 9"),
        ({"num_bits": 0}, r"num_bits must be 2 to 8, got 0"),
        ({"group_size": 64}, r"weight_scale must be \[33, 64 / group_size=64\], got \[33, 2\]"),
        ({"group_size": 0}, r"weight_scale must be \[33, 64 / group_size=0\], got \[33, 2\]"),
        ({"group_size": -1}, r"weight_scale must be \[33, 64 / group_size=-1\], got \[33, 2\]"),
    ],
)
def test_wrong_arguments(change, message):
    _, (packed, scale, zero_point) = make(33, 64, 32, 4, False)
    given = {"x": torch.zeros(3, 64), "packed": packed, "scale": scale, "zero_point": zero_point, "bias": None}
    given |= {"num_bits": 4, "group_size": 32} | change
    with pytest.raises(ValueError, match=message):
        wna16(*given.values())
