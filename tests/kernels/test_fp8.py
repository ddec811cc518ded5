"""fp8: exact decoding, and the matmul against float64 on exactly dequantized weights and activations."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from torchq import numerics
from torchq.kernels import fp8 as module
from torchq.kernels.fp8 import FP8, decode_fp8, fp8_linear, fp8_linear_ref, quantize_activations
from torchq.scheme import QuantArgs
from torchq.testing import assert_within_dtype_error

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS = [0, 1, 2, 7, 16, 17, 64, 130]
SHAPES = [(33, 100), (16, 64), (100, 576), (1, 33), (130, 96)]
WEIGHTS = {
    "tensor": QuantArgs(8, "float", strategy="tensor"),
    "channel": QuantArgs(8, "float", strategy="channel"),
    "block": QuantArgs(8, "float", strategy="block", block_structure=(128, 128)),
    "small block": QuantArgs(8, "float", strategy="block", block_structure=(32, 24)),
}
ACTIVATIONS = ["none", "token", "static", "group"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def activations(tokens, k, dtype, seed=0):
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed))
    if tokens > 1:
        x[1] = 0
    return x.to(dtype)


class Case:
    """An fp8 weight and what the op is called with."""

    def __init__(self, n, k, weights, kind, scale_dtype):
        args = WEIGHTS[weights]
        w = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.05
        self.scale, _ = numerics.choose_qparams(w, args, scale_dtype=scale_dtype)
        self.weight = numerics.quantize(w, self.scale.float(), None, args)
        self.dequantized = numerics.dequantize(self.weight, self.scale.double(), None, args)
        self.input_scale = torch.tensor([0.01]).to(scale_dtype) if kind == "static" else None
        self.group = {"none": -1, "token": 0, "static": -1, "group": 32}[kind]
        self.blocks = args.block_structure or (0, 0)
        self.quantized = kind != "none"

    def arguments(self, bias=None):
        return self.weight, self.scale, self.input_scale, bias, self.group, *self.blocks

    def exact_and_eager(self, x, bias=None):
        """In float64 on exactly dequantized operands, and in x's dtype on the same ones rounded to it."""
        values = x.double().reshape(-1, x.shape[-1])
        if self.quantized:
            q, scale = quantize_activations(values.to(x.dtype), self.input_scale, self.group)
            values = (q.double().unflatten(1, (scale.shape[1], -1)) * scale.double().unsqueeze(-1)).flatten(1)
        exact = values @ self.dequantized.t()
        exact = exact if bias is None else exact + bias.double()
        eager = F.linear(values.to(x.dtype), self.dequantized.to(x.dtype), bias)
        shape = (*x.shape[:-1], self.weight.shape[0])
        return exact.view(shape), eager.view(shape)

    def check(self, x, bias=None, device="cpu"):
        given = [argument.to(device) if isinstance(argument, torch.Tensor) else argument for argument in self.arguments(bias)]
        y = fp8_linear(x.to(device), *given).cpu()
        assert y.shape == (*x.shape[:-1], self.weight.shape[0]) and y.dtype == x.dtype
        # In float32 the order of the sums and a handful of roundings decide, not the precision of the operands.
        assert_within_dtype_error(y, *self.exact_and_eager(x, bias), factor=10 if x.dtype == torch.float32 else 2)
        return y


# ----------------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_is_exact(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    codes = codes[~torch.isnan(codes.float())]
    assert codes.numel() == 254
    decoded = decode_fp8(codes.view(2, 127), dtype)
    assert decoded.dtype == dtype and torch.equal(decoded.view(-1), codes.to(dtype))
    assert torch.equal(torch.signbit(decoded.view(-1)), codes.view(torch.uint8) >= 128)  # minus zero too


def test_decoding_of_a_strided_tile():
    weight = torch.arange(254, dtype=torch.uint8).clamp_max(126).view(2, 127).view(FP8)
    assert torch.equal(decode_fp8(weight[:, 3:50], torch.float32), weight[:, 3:50].float())


def test_decoding_leaves_the_weight_alone():
    weight = torch.randn(8, 16).to(FP8)
    before = weight.clone()
    for dtype in DTYPES:
        decode_fp8(weight, dtype)
    assert torch.equal(weight.view(torch.uint8), before.view(torch.uint8))


# -------------------------------------------------------------------------------------------------------------- activations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [0, 16, 96])
def test_dynamic_activations(group, dtype):
    x = activations(5, 96, dtype)
    q, scale = quantize_activations(x, None, group)
    expected, expected_scale = numerics.quantize_dynamic(x, QuantArgs(8, "float", group_size=group or 96, dynamic=True))
    assert torch.equal(q.float(), expected.float()) and torch.equal(scale, expected_scale)
    assert (scale[1] == 1).all() and (q[1].float() == 0).all()


def test_static_activations_saturate():
    q, scale = quantize_activations(torch.tensor([[1e4, -1e4, 0.5, 3.0]]), torch.tensor([0.5]), -1)
    assert torch.equal(q.float(), torch.tensor([[448.0, -448.0, 1.0, 6.0]])) and scale.item() == 0.5


# ----------------------------------------------------------------------------------------------------------------------- op


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_against_float64(weights, kind, dtype):
    for n, k in SHAPES:
        if kind == "group" and k % 32:
            continue
        case = Case(n, k, weights, kind, dtype)
        for tokens in TOKENS if n > 1 else TOKENS[-2:]:  # eager's error on a few numbers is a matter of luck
            case.check(activations(tokens, k, dtype))
            case.check(activations(tokens, k, dtype), activations(1, n, dtype, seed=5)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_on_cuda(weights, kind):
    for n, k in ((16, 64), (33, 96), (128, 576)):
        case = Case(n, k, weights, kind, torch.bfloat16)
        for tokens in TOKENS:
            bias = activations(1, n, torch.bfloat16, seed=5)[0]
            case.check(activations(tokens, k, torch.bfloat16), bias, "cuda")


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_reference(weights, kind):
    for n, k in ((16, 64), (130, 96)):
        case = Case(n, k, weights, kind, torch.float32)
        x, bias = activations(17, k, torch.float32), torch.randn(n)
        assert_within_dtype_error(fp8_linear_ref(x, *case.arguments(bias)), *case.exact_and_eager(x, bias), factor=10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["none", "token", "group"])
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_bfloat16_scales_with_other_activations(weights, kind, dtype):
    case = Case(33, 96, weights, kind, torch.bfloat16)
    for tokens in (1, 17):
        case.check(activations(tokens, 96, dtype))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_row_tiles(weights, kind, monkeypatch):
    monkeypatch.setattr(module, "_TILE_BYTES", 4 * 96 * 40)  # 40 rows, or one block, at a time
    case = Case(300, 96, weights, kind, torch.float32)
    case.check(activations(5, 96, torch.float32), torch.randn(300))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_float16_does_not_overflow(weights, kind):
    """Codes go up to 448, so sums of unscaled ones exceed float16 long before the result does."""
    case = Case(16, 2048, weights, kind, torch.float16)
    case.weight = case.weight.float().abs().to(FP8)
    case.dequantized = case.dequantized.abs()
    x = torch.full((3, 2048), 20.0, dtype=torch.float16)
    x[1] = 3
    if kind == "static":
        case.input_scale = torch.tensor([20 / 448]).half()
    assert torch.isfinite(case.check(x)).all()


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("weights", ["channel", "block"])
def test_shapes_and_strides(weights, kind):
    case = Case(33, 96, weights, kind, torch.float32)
    x = activations(24, 96, torch.float32)
    y = case.check(x)
    assert torch.equal(case.check(x.view(2, 3, 4, 96)), y.view(2, 3, 4, 33))
    assert case.check(x[0]).shape == (33,)
    assert case.check(x[:0].view(2, 0, 96)).shape == (2, 0, 33)
    wide = activations(4, 192, torch.float32)
    for view in (x.t().contiguous().t(), x[::3], wide[:, ::2], x[:1].expand(5, 96)):
        case.check(view)
    case.weight = case.weight.t().contiguous().t()
    assert torch.equal(case.check(x), y)
    case.scale = case.scale.t().contiguous().t()
    assert torch.equal(case.check(x), y)


def test_arguments_are_left_alone():
    for kind in ACTIVATIONS:
        case = Case(33, 96, "small block", kind, torch.bfloat16)
        x, bias = activations(3, 96, torch.bfloat16), activations(1, 33, torch.bfloat16)[0]
        given = [tensor for tensor in (x, bias, case.weight, case.scale, case.input_scale) if tensor is not None]
        before = [tensor.clone() for tensor in given]
        fp8_linear(x, *case.arguments(bias))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(given, before, strict=True))


def test_nan_stays_nan_and_alone():
    for weights, kind in (("channel", "none"), ("channel", "token"), ("block", "group"), ("tensor", "static")):
        case = Case(16, 96, weights, kind, torch.float32)
        x = activations(4, 96, torch.float32)
        expected = fp8_linear(x, *case.arguments())
        x[2, 3] = float("nan")
        y = fp8_linear(x, *case.arguments())
        assert torch.isnan(y[2]).all() and torch.allclose(y[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_opcheck(weights, kind):
    case = Case(33, 96, weights, kind, torch.float32)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # test_schema knows no fp8
    for x in (activations(3, 96, torch.float32), activations(0, 96, torch.float32).view(2, 0, 96)):
        torch.library.opcheck(fp8_linear, (x, *case.arguments(torch.randn(33))), test_utils=tests)


@pytest.mark.parametrize("kind", ["none", "token"])
def test_compiled_twice_at_most(kind):
    case = Case(48, 64, "channel", kind, torch.bfloat16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: fp8_linear(x * 2, *case.arguments()) + 1, fullgraph=True, backend=counter)
    for tokens in (7, 2, 16, 33, 130):
        x = activations(tokens, 64, torch.bfloat16)
        assert torch.equal(compiled(x), fp8_linear(x * 2, *case.arguments()) + 1)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("weights", ["channel", "small block"])
def test_a_wrong_weight_is_noticed(weights):
    for kind in ("none", "token"):
        case = Case(64, 96, weights, kind, torch.bfloat16)
        x = activations(64, 96, torch.bfloat16)
        case.check(x)
        right_weight, right_scale = case.weight, case.scale
        flipped = right_weight.view(torch.uint8).clone()
        flipped[5, 7] ^= 0x80  # one sign
        mutations = [(flipped.view(FP8), right_scale), (right_weight.view(torch.uint8).roll(1, 1).view(FP8), right_scale)]
        mutations += [(right_weight, right_scale.roll(1, 0)), (right_weight, right_scale * 1.02)]
        for case.weight, case.scale in mutations:
            with pytest.raises(AssertionError, match="max error"):
                case.check(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.int8)}, r"x must be floating point .* got torch.int8; where the model casts"),
        ({"x": torch.zeros(3, 64).to(FP8)}, r"x must be floating point .* got torch.float8_e4m3fn; .*add the layer to ignore"),
        ({"x": torch.zeros(())}, r"x must be \[..., K\], got a 0-D tensor"),
        ({"x": torch.zeros(3, 63)}, r"weight must be torch.float8_e4m3fn \[N, 63\], got torch.float8_e4m3fn \[33, 64\]"),
        ({"weight": torch.zeros(33, 64)}, r"weight must be torch.float8_e4m3fn \[N, 64\], got torch.float32"),
        ({"weight": torch.zeros(33, 64).to(torch.float8_e5m2)}, r"weight must be torch.float8_e4m3fn .* got torch.float8_e5m2"),
        ({"weight_scale": torch.ones(33)}, r"weight_scale must be \[33, 1\] or \[1\], got \[33\]"),
        ({"weight_scale": torch.ones(())}, r"weight_scale must be \[33, 1\] or \[1\], got \[\]"),
        ({"block_rows": 32, "block_columns": 32}, r"weight_scale must be \[2, 2\], got \[33, 1\]"),
        ({"block_rows": 32}, r"block_rows and block_columns go together, got 32 and 0"),
        ({"input_scale": torch.ones(3, 1)}, r"input_scale must be \[1\] with dynamic_group=-1 .* got \[3, 1\]"),
        (
            {"input_scale": torch.ones(1), "dynamic_group": 0},
            r"input_scale must be \[1\] with dynamic_group=-1 .*dynamic_group=0",
        ),
        ({"dynamic_group": 48}, r"dynamic_group must divide 64 in_features, got 48"),
        ({"bias": torch.zeros(1)}, r"bias must be \[33\], got \[1\]"),
    ],
)
def test_wrong_arguments(change, message):
    weight = torch.zeros(33, 64).to(FP8)
    given = {"x": torch.zeros(3, 64), "weight": weight, "weight_scale": torch.ones(33, 1), "input_scale": None, "bias": None}
    given |= {"dynamic_group": -1, "block_rows": 0, "block_columns": 0} | change
    with pytest.raises(ValueError, match=message):
        fp8_linear(*given.values())
