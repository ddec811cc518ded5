"""fp8 weights in words: the layout, and the kernels on it against float64 of the exact dequantized weight."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq import QuantArgs, QuantLinear, Scheme, layouts
from torchq.algorithms.rtn import quantize_weight
from torchq.kernels import fp8_triton, linear, words_triton
from torchq.kernels.dispatch import Tile
from torchq.scheme import resolve_scheme
from torchq.testing import assert_within_dtype_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
SCHEMES = {
    "channel": Scheme(QuantArgs(8, "float", strategy="channel")),
    "tensor": Scheme(QuantArgs(8, "float", strategy="tensor")),
    "block": Scheme(QuantArgs(8, "float", strategy="block", block_structure=(128, 128))),
    "dynamic": resolve_scheme("FP8_DYNAMIC"),
    "blocks of both": resolve_scheme("FP8_BLOCK"),
}


def all_values() -> Tensor:
    """Every finite e4m3 value, [2, 127]."""
    return torch.tensor([[*range(127)], [*range(128, 255)]], dtype=torch.uint8).view(FP8)


def random_weight(n: int, k: int, group_size: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """(words, scale [G, N], the exact weight in float64); among its values are all that e4m3 has."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 254, (n, k), generator=generator)
    weight = (codes + (codes >= 127)).to(torch.uint8).view(FP8)  # neither of the two NaNs
    signs = torch.randint(0, 2, (k // group_size, n), generator=generator) * 2 - 1
    scale = ((torch.rand(k // group_size, n, generator=generator) + 0.1) * signs / 128 / k**0.5).to(dtype)
    exact = (weight.double().unflatten(1, (-1, group_size)) * scale.t().double().unsqueeze(2)).flatten(1)
    return words_triton.pack_fp8(weight).to(DEVICE), scale.to(DEVICE), exact.to(DEVICE)


def random_tokens(m: int, k: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)


def assert_is_product(y: Tensor, x: Tensor, exact: Tensor) -> None:
    eager = torch.nn.functional.linear(x, exact.to(x.dtype))
    assert_within_dtype_error(y, x.double() @ exact.t(), eager, factor=1.0)


@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (5, 256)])
def test_words_give_the_bytes_back(shape: tuple[int, int]) -> None:
    weight = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)  # NaNs too
    assert torch.equal(words_triton.unpack_fp8(words_triton.pack_fp8(weight.view(FP8)), shape[1]).view(torch.uint8), weight)


def test_every_value_is_decoded_exactly(apart: Callable[[Callable[[], None]], None]) -> None:
    weight = torch.nn.functional.pad(all_values(), (0, 1))
    words, scale = words_triton.pack_fp8(weight).to(DEVICE), torch.ones(1, 2, dtype=torch.float16, device=DEVICE)

    def check() -> None:
        x = torch.eye(128, dtype=torch.float16, device=DEVICE)
        y = words_triton.matmul_words(x, words, scale, None, None, 8, 128, Tile(16, 32), 1, fp8=True)
        assert torch.equal(y.t(), weight.to(DEVICE).half())
        for dtype in (torch.float16, torch.float32):
            found = words_triton.dequantize_words(words, scale, None, 8, 128, 128, dtype, fp8=True)
            assert torch.equal(found, weight.to(DEVICE, dtype))

    apart(check)


@pytest.mark.parametrize("shape", [(33, 256, 256), (100, 576, 576), (64, 384, 128), (40, 320, 64)], ids=str)
def test_equals_float64(shape: tuple[int, int, int], apart: Callable[[Callable[[], None]], None]) -> None:
    words, scale, exact = random_weight(*shape)

    def check() -> None:
        for m in (0, 1, 2, 7, 17, 64, 300):
            x = random_tokens(m, shape[1])
            y = fp8_triton.fp8_triton(x, words, scale, None, None, shape[2], -1)
            assert y.shape == (m, shape[0])
            assert_is_product(y, x, exact)
        expected = fp8_triton.fp8_triton_ref(x, words, scale, None, None, shape[2], -1)
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
        shifted = words_triton.pack_fp8(words_triton.unpack_fp8(words, shape[1]).roll(1, 0))
        for wrong in ((shifted, scale), (words, scale.roll(1, 1)), (words ^ (1 << 23), scale)):
            with pytest.raises(AssertionError):
                assert_is_product(fp8_triton.fp8_triton(x[:7], *wrong, None, None, shape[2], -1), x[:7], exact)

    apart(check)


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [576, 64])
def test_bfloat16(group_size: int) -> None:
    """Its decode differs; the interpreter cannot multiply bfloat16."""
    words, scale, exact = random_weight(100, 576, group_size, torch.bfloat16)
    for m in (1, 17, 64, 100, 300):
        x = random_tokens(m, 576, torch.bfloat16)
        assert_is_product(fp8_triton.fp8_triton(x, words, scale, None, None, group_size, -1), x, exact)


def test_input_grad(apart: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "TILE_WEIGHTS", 1)
    words, scale, exact = random_weight(100, 576, 64)

    def check() -> None:
        grad_y = random_tokens(7, 100)
        grad_x = torch.ops.torchq.fp8_triton_input_grad(grad_y, words, scale, None, 64, -1)
        assert_within_dtype_error(grad_x, grad_y.double() @ exact, grad_y @ exact.half(), factor=1.0)

    apart(check)


def test_opcheck() -> None:
    words, scale, _ = random_weight(33, 256, 128)
    static = torch.tensor([0.01], device=DEVICE)
    for input_scale, dynamic_group in ((None, -1), (None, 0), (None, 128), (static, -1)):
        arguments = (random_tokens(3, 256), words, scale, input_scale, None, 128, dynamic_group)
        torch.library.opcheck(fp8_triton.fp8_triton, arguments)
    op = torch.ops.torchq.fp8_triton_input_grad.default
    torch.library.opcheck(op, (random_tokens(3, 33), words, scale, None, 128, -1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 300)}, r"words must be int32 \[5, N, 16\] for 300 in_features at 8 bits"),
        ({"input_scale": torch.ones(1), "dynamic_group": 0}, r"input_scale must be \[1\] with dynamic_group=-1"),
        ({"input_scale": torch.ones(2)}, r"input_scale must be \[1\] .* got \[2\]"),
        ({"dynamic_group": 100}, r"dynamic_group must divide 256 in_features, got 100"),
        ({"group_size": 48}, r"group_size must be a multiple of 32 that divides in_features=256"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "x": torch.zeros(3, 256), "words": torch.zeros(4, 33, 16, dtype=torch.int32), "scale": torch.zeros(2, 33),
        "input_scale": None, "bias": None, "group_size": 128, "dynamic_group": -1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        fp8_triton.fp8_triton(**(arguments | changes))


# ------------------------------------------------------------------------------------------------------------- QuantLinear


def quant_linear(name: str, n: int = 200, k: int = 256) -> QuantLinear:
    torch.manual_seed(0)
    source = nn.Linear(k, n).to(DEVICE, torch.float16)
    quantized, _ = quantize_weight(source.weight.detach(), SCHEMES[name])
    return QuantLinear.from_linear(source, quantized)


@pytest.mark.parametrize("name", SCHEMES)
def test_quant_linear_keeps_words_and_shows_the_checkpoint(
    name: str, monkeypatch: pytest.MonkeyPatch, apart: Callable[[Callable[[], None]], None]
) -> None:
    with monkeypatch.context() as context:
        context.setattr(layouts, "layout_for", lambda form, device: None)
        canonical = quant_linear(name)
        expected = canonical.state_dict()
    monkeypatch.setattr(layouts, "layout_for", lambda form, device: layouts.FP8_WORDS)
    layer = quant_linear(name)
    assert layer.is_native and "fp8_words" in layer._buffers and "weight" not in layer._buffers
    assert (layer.weight.dtype, layer.weight.shape) == (FP8, (200, 256)) and layer.scale_dtype == torch.float16
    for other in (layer, copy.deepcopy(layer), copy.deepcopy(layer).to(torch.float16)):
        state = other.state_dict()
        assert set(state) == set(expected)
        assert all(torch.equal(state[key].view(torch.int8), expected[key].view(torch.int8)) for key in expected)
        assert torch.equal(other.dequantize(), canonical.dequantize())
    layer.load_state_dict(expected)
    assert layer.is_native
    x = random_tokens(5, 256)

    def check() -> None:
        with torch.no_grad():
            y = layer(x)
            assert layer.bias is not None
            exact = x.double() @ layer.dequantize(torch.float64).t() + layer.bias.double()
        error = (y.double() - exact).norm() / exact.norm()
        assert error < (0.05 if SCHEMES[name].input_activations else 1e-3)
        torch.testing.assert_close(y, canonical(x).detach(), rtol=1e-2, atol=1e-2)
        grad = torch.autograd.grad(layer(x.requires_grad_()).sum(), x)[0]
        exact = torch.ones(5, 200, dtype=torch.float64, device=DEVICE) @ layer.dequantize(torch.float64)
        assert (grad.double() - exact).norm() < 1e-2 * exact.norm()

    apart(check)
    layer.unpack_native_()
    assert not layer.is_native and layer.weight.dtype == FP8 and "weight" in layer._buffers
    assert torch.equal(layer.state_dict()["weight"].view(torch.int8), expected["weight"].view(torch.int8))


def test_a_gpu_that_multiplies_fp8_keeps_the_checkpoints_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for capability, expected in (((9, 0), None), ((8, 0), layouts.FP8_WORDS)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        monkeypatch.setattr(layouts, "_is_old", lambda device: False)

        def chosen(name: str, n: int = 64, k: int = 256) -> layouts.Layout | None:
            return layouts.layout_for(layouts.Form(SCHEMES[name], n, k, torch.bfloat16), device)

        assert chosen("dynamic") is expected
        assert chosen("channel") is chosen("blocks of both") is chosen("dynamic", n=33) is layouts.FP8_WORDS
        assert chosen("block", k=320) is None  # ends within a block
