"""Products with an NF4 weight: against float64 on the exactly dequantized weight, and against eager PyTorch's own error."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchq.kernels import linear, nf4
from torchq.kernels.nf4_linear import nf4_linear, nf4_linear_input_grad, nf4_linear_ref
from torchq.testing import assert_within_dtype_error

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [  # N, K, block_size: blocks that end with rows, within rows, and run over several of them
    (33, 128, 64),
    (100, 384, 128),
    (40, 160, 32),
    (70, 48, 64),
    (31, 33, 16),
    (5, 1001, 64),
    (300, 8, 1024),
    (1, 64, 64),
]
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make(n: int, k: int, block_size: int = 64) -> tuple[Tensor, Arguments]:
    """A random weight whose blocks differ in size: (what it is dequantized to, float32; arguments of the op after x)."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * torch.linspace(0.5, 2, n)[:, None] / k**0.5
    packed, absmax = nf4.nf4_quantize_ref(weight, block_size)
    tensors = packed, *nf4.compress_absmax(absmax)
    return nf4.dequantize_nf4_ref(*tensors, n, k, block_size, torch.float32), (*tensors, n, k, block_size)


def multiply(x: Tensor, arguments: Arguments, bias: Tensor | None = None) -> Tensor:
    return nf4_linear(x, *arguments[:4], bias, *arguments[4:])


def activations(tokens: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """At most twice the error of eager PyTorch on the dequantized weight; in float32 the order of the sums decides."""
    weight = weight.to(x.dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if x.dtype == torch.float64:
        torch.testing.assert_close(y, exact)
    else:
        assert_within_dtype_error(y, exact, F.linear(x, weight, bias), factor=10 if x.dtype == torch.float32 else 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight, arguments = make(*shape)
    bias = activations(1, shape[0], dtype, seed=5)[0]
    for tokens in (0, 1, 2, 17, 130) if shape[0] > 1 else (130,):  # eager's error on a few numbers is a matter of luck
        x = activations(tokens, shape[1], dtype)
        for added in (None, bias):
            y = multiply(x, arguments, added)
            assert y.shape == (tokens, shape[0]) and y.dtype == dtype
            check(y, x, weight, added)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_input_gradients(shape: tuple[int, int, int], parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    (n, k, _), (weight, arguments) = shape, make(*shape)
    monkeypatch.setattr(linear, "TILE_WEIGHTS", n * k // parts // 2)
    monkeypatch.setattr("torchq.kernels.nf4_linear._UNIT", 1)
    for tokens in (0, 1, 17, 130) if k > 8 else (130,):
        grad_y = activations(tokens, n, dtype)
        grad_x = nf4_linear_input_grad(grad_y, *arguments)
        assert grad_x.shape == (tokens, k) and grad_x.dtype == dtype
        check(grad_x, grad_y, weight.t())
    grad_y = activations(24, n, dtype)
    expected = nf4_linear_input_grad(grad_y, *arguments)
    assert torch.equal(nf4_linear_input_grad(grad_y.view(2, 3, 4, n), *arguments), expected.view(2, 3, 4, k))
    check(nf4_linear_input_grad(grad_y.t().contiguous().t(), *arguments), grad_y, weight.t())
    check(nf4_linear_input_grad(grad_y[:1].expand(24, n), *arguments), grad_y[:1].expand(24, n), weight.t())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_multiplies_by_the_dequantized_weight(shape: tuple[int, int, int]) -> None:
    weight, arguments = make(*shape)
    for dtype in DTYPES:
        x = activations(3, shape[1], dtype)
        y = nf4_linear_ref(x, *arguments[:4], None, *arguments[4:])
        assert torch.equal(y, F.linear(x, weight.to(dtype)))


def test_any_part_of_the_weight_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k, block_size in SHAPES:
        weight, arguments = make(n, k, block_size)
        monkeypatch.setattr(linear, "TILE_WEIGHTS", 1)  # a row at a time, a block of columns at a time
        monkeypatch.setattr("torchq.kernels.nf4_linear._UNIT", 1)
        monkeypatch.setattr(nf4, "_TILE_WEIGHTS", 1)
        x = torch.eye(k, dtype=torch.float64)
        assert torch.equal(multiply(x, arguments), weight.t().double())
        assert torch.equal(nf4_linear_input_grad(torch.eye(n, dtype=torch.float64), *arguments), weight.double())
        monkeypatch.undo()
        assert torch.equal(multiply(x, arguments), weight.t().double())
        assert torch.equal(nf4_linear_input_grad(torch.eye(n, dtype=torch.float64), *arguments), weight.double())


def test_shapes_and_strides_of_the_activations() -> None:
    weight, arguments = make(33, 128)
    x = activations(24, 128, torch.float32)
    expected = multiply(x, arguments)
    assert torch.equal(multiply(x.view(2, 3, 4, 128), arguments), expected.view(2, 3, 4, 33))
    assert torch.equal(multiply(x[0], arguments), multiply(x[:1], arguments)[0]) and multiply(x[0], arguments).shape == (33,)
    assert multiply(x[:0].view(2, 0, 128), arguments).shape == (2, 0, 33)
    check(multiply(x.t().contiguous().t(), arguments), x, weight)
    wide = activations(4, 256, torch.float32)
    check(multiply(wide[:, ::2], arguments), wide[:, ::2], weight)
    check(multiply(x[:1].expand(5, 128), arguments), x[:1].expand(5, 128), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_on_cuda(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DEVICE_TILE_WEIGHTS", 5000)
    for n, k, block_size in SHAPES:
        weight, arguments = make(n, k, block_size)
        given = tuple(argument.cuda() if isinstance(argument, Tensor) else argument for argument in arguments)
        bias = activations(1, n, dtype, seed=5)[0]
        for tokens in (0, 130):
            x, grad_y = activations(tokens, k, dtype), activations(tokens, n, dtype)
            check(multiply(x.cuda(), given, bias.cuda()).cpu(), x, weight, bias)
            check(nf4_linear_input_grad(grad_y.cuda(), *given).cpu(), grad_y, weight.t())


def test_arguments_are_left_alone() -> None:
    _, arguments = make(33, 128)
    given = (activations(3, 128, torch.bfloat16), activations(1, 33, torch.bfloat16)[0], *arguments[:4])
    before = [tensor.clone() for tensor in given]
    multiply(given[0], arguments, given[1])
    nf4_linear_input_grad(activations(3, 33, torch.bfloat16), *arguments)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_opcheck() -> None:
    for shape in ((33, 64), (5, 33)):
        _, arguments = make(*shape)
        for x in (activations(3, shape[1], torch.float32), activations(0, shape[1], torch.float32).view(2, 0, shape[1])):
            torch.library.opcheck(nf4_linear, (x, *arguments[:4], torch.randn(shape[0]), *arguments[4:]))
        torch.library.opcheck(nf4_linear_input_grad, (activations(3, shape[0], torch.float32), *arguments))


def test_compiled_twice_at_most() -> None:
    _, arguments = make(48, 64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: multiply(x * 2, arguments) + 1, fullgraph=True, backend=counter)
    for tokens in (7, 2, 16, 33, 130):
        x = activations(tokens, 64, torch.bfloat16)
        assert torch.equal(compiled(x), multiply(x * 2, arguments) + 1)
    assert counter.frame_count <= 2


def test_a_wrong_weight_is_noticed() -> None:
    weight, (packed, absmax, scale, offset, *sizes) = make(48, 512)
    x, grad_y = activations(64, 512, torch.float32), activations(64, 48, torch.float32)

    def run(*tensors: Tensor) -> None:
        check(multiply(x, (*tensors, *sizes)), x, weight)

    def run_back(*tensors: Tensor) -> None:
        check(nf4_linear_input_grad(grad_y, *tensors, *sizes), grad_y, weight.t())

    swapped = (packed >> 4) | (packed << 4)
    for function in (run, run_back):
        function(packed, absmax, scale, offset)
        for mutation in (
            (swapped, absmax, scale, offset),
            (packed.roll(1), absmax, scale, offset),
            (packed.roll(256), absmax, scale, offset),
            (packed, absmax.roll(1), scale, offset),
            (packed, absmax, scale.roll(1), offset),
            (packed, absmax, scale, offset * 1.01),
        ):
            with pytest.raises(AssertionError, match="max error"):
                function(*mutation)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.int8)}, r"x must be floating point with 16 or more bits, got torch.int8"),
        ({"x": torch.zeros(3, 64).to(torch.float8_e4m3fn)}, r"x must be floating point .* got torch.float8_e4m3fn"),
        ({"x": torch.zeros(())}, r"x must be \[..., 64\], got \[\]"),
        ({"x": torch.zeros(3, 63)}, r"x must be \[..., 64\], got \[3, 63\]"),
        ({"packed": torch.zeros(1056)}, r"packed must be torch\.uint8 \[1056\] for a weight \[33, 64\] in blocks of 64, got"),
        ({"absmax": torch.zeros(33)}, r"absmax must be torch\.uint8 \[33\]"),
        ({"nested_scale": torch.zeros(2)}, r"nested_scale must be torch\.float32 \[1\]"),
        ({"nested_offset": torch.zeros(1)}, r"nested_offset must be torch\.float32 \[\]"),
        ({"bias": torch.zeros(1)}, r"bias must be torch.float32 \[33\], as x, got torch.float32 \[1\]"),
        ({"bias": torch.zeros(33).half()}, r"bias must be torch.float32 \[33\], as x, got torch.float16 \[33\]"),
        ({"block_size": 48}, r"block_size must be a power of two, 16 or more, got 48"),
        ({"n": 32}, r"packed must be torch\.uint8 \[1024\] for a weight \[32, 64\]"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    _, arguments = make(33, 64)
    names = ("packed", "absmax", "nested_scale", "nested_offset", "n", "k", "block_size")
    given = {"x": torch.zeros(3, 64), "bias": None, **dict(zip(names, arguments, strict=True))}
    with pytest.raises(ValueError, match=message):
        nf4_linear(**(given | change))
