"""Words: the layout, and the kernels on it against float64 of the exact dequantized weight."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq import QuantConfig, layouts, numerics, quantize_, warmup
from torchq.kernels import dispatch, linear, wna16_triton, words_triton
from torchq.kernels.dispatch import Tile
from torchq.linear import QuantizedWeight, QuantLinear
from torchq.scheme import resolve_scheme
from torchq.testing import assert_within_dtype_error, tiny_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = Tile(16, 32, num_stages=2)
Apart = Callable[[Callable[[], None]], None]
SHAPES = [(33, 256, 32), (100, 576, 64), (64, 384, 128), (40, 320, 320), (49, 288, 96), (32, 1024, 512)]


@dataclass
class Weight:
    """A random weight in words, and its exact values."""

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    num_bits: int
    group_size: int
    exact: Tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.words, self.scale, self.zero_point


def random_weight(
    n: int, k: int, group_size: int, num_bits: int = 4, zeros: bool = False, dtype: torch.dtype = torch.float16
) -> Weight:
    generator = torch.Generator().manual_seed(n + k)
    half, groups = 1 << (num_bits - 1), k // group_size
    q = torch.randint(-half, half, (n, k), generator=generator).to(torch.int8)
    signs = torch.randint(0, 2, (groups, n), generator=generator) * 2 - 1
    scale = ((torch.rand(groups, n, generator=generator) + 0.1) * signs / half / k**0.5).to(dtype)
    zero_point = torch.randint(-half, half, (groups, n), generator=generator).to(torch.int8) if zeros else None
    exact = q.double().unflatten(1, (groups, group_size))
    exact = exact if zero_point is None else exact - zero_point.t().double().unsqueeze(2)
    exact = (exact * scale.t().double().unsqueeze(2)).flatten(1)
    words = words_triton.pack_words(q, num_bits)
    on_device = [tensor if tensor is None else tensor.to(DEVICE) for tensor in (words, scale, zero_point, exact)]
    return Weight(on_device[0], on_device[1], on_device[2], num_bits, group_size, on_device[3])


def random_tokens(m: int, k: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(DEVICE, dtype)


def multiply(x: Tensor, weight: Weight, bias: Tensor | None = None, tile: Tile = TILE, splits: int = 1) -> Tensor:
    return words_triton.matmul_words(x, *weight.arguments, bias, weight.num_bits, weight.group_size, tile, splits)


def assert_is_product(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    exact = x.double() @ weight.exact.t()
    eager = torch.nn.functional.linear(x, weight.exact.to(x.dtype), bias)
    assert_within_dtype_error(y, exact if bias is None else exact + bias.double(), eager, factor=1.0)


# ------------------------------------------------------------------------------------------------------------------- layout


@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_column_32j_2r_h_is_in_word_r(num_bits: int) -> None:
    block = words_triton.block_size(num_bits)
    half = 1 << (num_bits - 1)
    q = torch.full((3, 2 * block), -half, dtype=torch.int8)
    for j, r, h in ((0, 0, 0), (16 // num_bits - 1, 15, 1), (1, 7, 0)):
        codes = q.clone()
        codes[2, block + 32 * j + 2 * r + h] = -half + 1
        words = words_triton.pack_words(codes, num_bits)
        assert words.shape == (2, 3, 16) and words.dtype == torch.int32
        expected = torch.zeros_like(words)
        expected[1, 2, r] = 1 << (num_bits * j + 16 * h)
        assert torch.equal(words, expected)


@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (5, 256), (64, 576), (0, 64)])
def test_words_give_the_codes_back(num_bits: int, shape: tuple[int, int]) -> None:
    half = 1 << (num_bits - 1)
    q = torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    words = words_triton.pack_words(q, num_bits)
    assert torch.equal(words_triton.unpack_words(words, num_bits, shape[1]), q)
    assert words.numel() * 32 // num_bits >= q.numel()


# ------------------------------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_equals_float64(num_bits: int, shape: tuple[int, int, int], zeros: bool, apart: Apart) -> None:
    weight = random_weight(*shape, num_bits, zeros)
    bias = torch.linspace(-1, 1, shape[0], device=DEVICE).half()

    def check() -> None:
        for m, splits, with_bias in ((1, 1, True), (7, 2, True), (17, 1, False)):
            x = random_tokens(m, shape[1])
            b = bias if with_bias else None
            assert_is_product(multiply(x, weight, b, splits=splits), x, weight, b)

    apart(check)


@pytest.mark.parametrize("m", [0, 1, 2, 7, 16, 17, 64, 300])
def test_all_token_counts_through_the_op(m: int, apart: Apart) -> None:
    """With the table's own tiles; many tokens go through a dequantized weight."""
    weight = random_weight(100, 576, 64)

    def check() -> None:
        x = random_tokens(m, 576)
        y = wna16_triton.wna16_triton(x, *weight.arguments, None, 4, 64)
        assert y.shape == (m, 100) and y.dtype == torch.float16
        torch.testing.assert_close(y, wna16_triton.wna16_triton_ref(x, *weight.arguments, None, 4, 64), rtol=1e-2, atol=1e-2)
        if m:
            assert_is_product(y, x, weight)

    apart(check)


@pytest.mark.parametrize("tile", [Tile(8, 32), Tile(16, 16), Tile(32, 64), Tile(64, 128, 8)], ids=str)
def test_tiles_and_splits_make_no_difference_but_rounding(tile: Tile, apart: Apart) -> None:
    weight = random_weight(100, 1152, 64, zeros=True)

    def check() -> None:
        x = random_tokens(40, 1152)
        for splits in (1, 4, 8):
            y = multiply(x, weight, tile=tile, splits=splits)
            assert_is_product(y, x, weight)
            assert torch.equal(y, multiply(x, weight, tile=tile, splits=splits))  # always in one order

    apart(check)


@pytest.mark.gpu
@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16(num_bits: int, shape: tuple[int, int, int]) -> None:
    """Its decode differs; the interpreter cannot multiply bfloat16."""
    for zeros in (False, True):
        weight = random_weight(*shape, num_bits, zeros, torch.bfloat16)
        for m in (1, 17, 64, 100):
            x = random_tokens(m, shape[1], torch.bfloat16)
            y = wna16_triton.wna16_triton(x, *weight.arguments, None, num_bits, shape[2])
            assert_is_product(y, x, weight)


@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantize_is_bit_exact(num_bits: int, shape: tuple[int, int, int], apart: Apart) -> None:
    def check() -> None:
        for zeros in (False, True):
            weight = random_weight(*shape, num_bits, zeros)
            arguments = (*weight.arguments, num_bits, shape[2], shape[1], torch.float16)
            expected = words_triton.dequantize_words_ref(*arguments)
            assert torch.equal(expected, weight.exact.half())
            assert torch.equal(words_triton.dequantize_words(*arguments), expected)
            assert torch.equal(words_triton.dequantize_words(*arguments, slice(7, 30)), expected[7:30])

    apart(check)


def test_biases_of_any_strides_and_one_output(apart: Apart) -> None:
    bias = torch.linspace(-1, 1, 66, device=DEVICE).half()[::2]

    def check() -> None:
        for n, b in ((33, bias), (33, bias[:1].expand(33)), (1, bias[:1]), (1, None)):
            weight = random_weight(n, 256, 32, zeros=True)
            for m in (3, 200):
                x = random_tokens(m, 256)
                assert_is_product(wna16_triton.wna16_triton(x, *weight.arguments, b, 4, 32), x, weight, b)

    apart(check)


def test_autocast_does_not_change_the_dtype(apart: Apart) -> None:
    weight = random_weight(33, 256, 32)

    def check() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            for m, dtype in ((3, torch.float16), (200, torch.float16), (3, torch.float32), (3, torch.float64)):
                y = wna16_triton.wna16_triton(random_tokens(m, 256, dtype), *weight.arguments, None, 4, 32)
                assert y.dtype == dtype

    apart(check)


def test_many_rows_are_dequantized_in_stretches(monkeypatch: pytest.MonkeyPatch, apart: Apart) -> None:
    monkeypatch.setattr(linear, "TILE_WEIGHTS", 128 * 256)
    monkeypatch.setattr(linear, "DEVICE_TILE_WEIGHTS", 128 * 256)
    weight, x = random_weight(300, 256, 32), random_tokens(300, 256)
    bias = torch.linspace(-1, 1, 300, device=DEVICE).half()
    apart(lambda: assert_is_product(wna16_triton.wna16_triton(x, *weight.arguments, bias, 4, 32), x, weight, bias))


def test_float32_activations(apart: Apart) -> None:
    weight, x = random_weight(33, 256, 32), random_tokens(5, 256, torch.float32)

    def check() -> None:
        y = wna16_triton.wna16_triton(x, *weight.arguments, None, 4, 32)
        exact = x.double() @ weight.exact.half().double().t()  # the weight in the dtype of its scales
        assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-5)

    apart(check)


def test_activations_of_any_strides_and_leading_shape(apart: Apart) -> None:
    weight = random_weight(33, 256, 32)
    wide = random_tokens(6, 512)
    views = [wide[:, ::2], wide[::2, :256], wide.t().contiguous().t()[:, :256], wide[:, :256].view(2, 3, 256), wide[0, :256]]

    def check() -> None:
        for x in views:
            y = wna16_triton.wna16_triton(x, *weight.arguments, None, 4, 32)
            assert y.shape == (*x.shape[:-1], 33)
            assert_is_product(y.reshape(-1, 33), x.reshape(-1, 256), weight)

    apart(check)


def test_rows_more_than_2_31_elements_apart(apart: Apart) -> None:
    """Of which only the pages that are touched exist."""
    weight, stride = random_weight(33, 256, 32), (1 << 30) + 64  # the stride itself is 32 bits, twice it is not
    x = torch.empty(2 * stride + 256, dtype=torch.float16, device=DEVICE).as_strided((3, 256), (stride, 1))
    x.copy_(random_tokens(3, 256))
    apart(lambda: assert_is_product(multiply(x, weight), x, weight))


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch, apart: Apart) -> None:
    weight, x = random_weight(100, 576, 64), random_tokens(17, 576)

    def check() -> None:
        empty = Tensor.new_empty

        def poisoned(self: Tensor, *shape: Any, **options: Any) -> Tensor:
            result = empty(self, *shape, **options)
            return result.fill_(float("nan")) if result.is_floating_point() else result

        monkeypatch.setattr(Tensor, "new_empty", poisoned)
        for splits in (1, 4):
            assert_is_product(multiply(x, weight, splits=splits), x, weight)

    apart(check)


def test_mutations_are_noticed(apart: Apart) -> None:
    weight, x = random_weight(33, 256, 32, zeros=True), random_tokens(7, 256)

    def wrong(**changes: Tensor) -> Tensor:
        other = copy.copy(weight)
        other.__dict__.update(changes)
        return multiply(x, other)

    def check() -> None:
        assert weight.zero_point is not None
        assert_is_product(multiply(x, weight), x, weight)
        words = weight.words.clone()
        words[1, 5, 3] ^= 1 << 23
        codes = words_triton.unpack_words(weight.words, 4, 256)
        swapped = words_triton.pack_words(torch.cat([codes[:, 32:64], codes[:, :32], codes[:, 64:]], 1), 4)
        half = torch.zeros(7, 33, dtype=torch.float16)
        for column, values in zip(x.t(), weight.exact.half().t(), strict=True):
            half = half + torch.outer(column, values)
        results = [wrong(words=words), wrong(scale=weight.scale.roll(1, 0)), wrong(words=swapped), half]
        results += [wrong(zero_point=weight.zero_point + 1), wrong(scale=weight.scale * 1.01)]
        for result in results:
            with pytest.raises(AssertionError):
                assert_is_product(result, x, weight)

    apart(check)


@pytest.mark.gpu
@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_inline_assembly_gives_the_same_bits(num_bits: int) -> None:
    weight = random_weight(100, 576, 64, num_bits, zeros=True)
    for dtype in (torch.float16, torch.bfloat16):
        x = random_tokens(17, 576, dtype)
        arguments = (x, *weight.arguments, None, num_bits, 64, TILE, 2)
        assert torch.equal(words_triton.matmul_words(*arguments, asm=True), words_triton.matmul_words(*arguments))


@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_input_grad(num_bits: int, monkeypatch: pytest.MonkeyPatch, apart: Apart) -> None:
    monkeypatch.setattr(linear, "TILE_WEIGHTS", 1)  # a block of columns at a time
    monkeypatch.setattr(linear, "DEVICE_TILE_WEIGHTS", 1)

    def check() -> None:
        for shape, zeros in zip(SHAPES, (False, True) * 3, strict=True):
            weight = random_weight(*shape, num_bits, zeros)
            for grad_y in (random_tokens(7, shape[0]), random_tokens(0, shape[0]), random_tokens(shape[0], 2).t()):
                grad_x = torch.ops.torchq.wna16_triton_input_grad(grad_y, *weight.arguments, num_bits, shape[2])
                assert grad_x.shape == (grad_y.shape[0], shape[1])
                assert_within_dtype_error(grad_x, grad_y.double() @ weight.exact, grad_y @ weight.exact.half(), factor=1.0)

    apart(check)


def test_rows_of_a_tensor_that_holds_more(apart: Apart) -> None:
    weight = random_weight(100, 576, 64, zeros=True)
    rows = slice(30, 65)
    some = copy.copy(weight)
    some.words, some.scale, some.exact = weight.words[:, rows], weight.scale[:, rows], weight.exact[rows]
    some.zero_point = weight.zero_point[:, rows]

    def check() -> None:
        for m in (3, 200):
            x = random_tokens(m, 576)
            assert_is_product(wna16_triton.wna16_triton(x, *some.arguments, None, 4, 64), x, some)

    apart(check)


# ---------------------------------------------------------------------------------------------------------------------- op


def test_opcheck() -> None:
    weight = random_weight(33, 256, 32, zeros=True)
    bias = torch.zeros(33, dtype=torch.float16, device=DEVICE)
    for m in (3, 300):
        torch.library.opcheck(wna16_triton.wna16_triton, (random_tokens(m, 256), *weight.arguments, bias, 4, 32))
    op = torch.ops.torchq.wna16_triton_input_grad.default
    torch.library.opcheck(op, (random_tokens(3, 33), *weight.arguments, 4, 32))


def test_compiles_into_one_graph_for_all_token_counts() -> None:
    weight, graphs = random_weight(33, 256, 32), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(x: Tensor) -> Tensor:
        return torch.ops.torchq.wna16_triton(x, *weight.arguments, None, 4, 32).relu()

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for m in (7, 2, 33, 1, 128, 1, 64):
        x = random_tokens(m, 256)
        assert torch.equal(compiled(x), function(x))
    assert len(graphs) <= 3  # the first size, one for all others, and M = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 256, dtype=torch.int32)}, r"x must be floating point with 16 or more bits, got torch\.int32"),
        ({"x": torch.zeros(())}, r"x must be \[\.\.\., K\]"),
        ({"x": torch.zeros(3, 300)}, r"words must be int32 \[3, N, 16\] for 300 in_features at 4 bits"),
        ({"words": torch.zeros(2, 33, 16)}, r"words must be int32 .* got torch\.float32 \[2, 33, 16\]"),
        ({"num_bits": 3}, r"num_bits must be one of \(2, 4, 8\), got 3"),
        ({"group_size": 48}, r"group_size must be a multiple of 32 that divides in_features=256, or 256, got 48"),
        ({"group_size": 0}, r"group_size must be"),
        ({"scale": torch.zeros(33, 8)}, r"scale must be floating point \[8, 33\], got torch\.float32 \[33, 8\]"),
        ({"zero_point": torch.zeros(8, 33)}, r"zero_point must be int8 \[8, 33\]"),
        ({"bias": torch.zeros(32)}, r"bias must be torch\.float32 \[33\]"),
        ({"scale": torch.zeros(33, 8).t()}, r"scale must be contiguous but for its first dimension, got strides \(1, 8\)"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "x": torch.zeros(3, 256), "words": torch.zeros(2, 33, 16, dtype=torch.int32), "scale": torch.zeros(8, 33),
        "zero_point": None, "bias": None, "num_bits": 4, "group_size": 32,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        wna16_triton.wna16_triton(**(arguments | changes))


def test_tensors_on_several_devices() -> None:
    words = torch.zeros(2, 33, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"scale is on meta, x on cpu: move one of them, \.to\('cpu'\)"):
        wna16_triton.check_words(torch.zeros(3, 256), words, torch.zeros(8, 33, device="meta"), None, None, 4, 32)


# ------------------------------------------------------------------------------------------------------------- QuantLinear


@pytest.fixture
def in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def layout_for(form: layouts.Form, device: torch.device) -> layouts.Layout | None:
        return layouts.WORDS if layouts.WORDS.can_hold(form, device) else None

    monkeypatch.setattr(layouts, "layout_for", layout_for)


def quant_linear(scheme_name: str, n: int = 48, k: int = 256, group_size: int | None = None) -> QuantLinear:
    torch.manual_seed(0)
    linear, scheme = nn.Linear(k, n).to(DEVICE, torch.float16), resolve_scheme(scheme_name, group_size)
    scale, zero_point = numerics.choose_qparams(linear.weight.detach(), scheme.weights)
    q = numerics.quantize(linear.weight.detach(), scale, zero_point, scheme.weights)
    return QuantLinear.from_linear(linear, QuantizedWeight(q, scale, zero_point, scheme))


@pytest.mark.usefixtures("in_words")
@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 32), ("W4A16", -1), ("W4A16_ASYM", 64), ("W8A16", None)])
def test_quant_linear_keeps_words_and_shows_the_checkpoint(
    scheme: str, group_size: int | None, monkeypatch: pytest.MonkeyPatch, apart: Apart
) -> None:
    layer = quant_linear(scheme, group_size=group_size)
    assert layer.is_native and "weight_words" in layer._buffers and "weight_packed" not in layer._buffers
    assert layer.scale_dtype == torch.float16
    with monkeypatch.context() as context:
        context.setattr(layouts, "layout_for", lambda form, device: None)
        canonical = quant_linear(scheme, group_size=group_size)
    assert not canonical.is_native
    expected = canonical.state_dict()
    for other in (layer, copy.deepcopy(layer), copy.deepcopy(layer).to(torch.float16)):
        state = other.state_dict()
        assert list(state) == list(expected) or set(state) == set(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert torch.equal(other.dequantize(), canonical.dequantize())
    layer.load_state_dict(expected)
    assert layer.is_native
    x = random_tokens(3, 256)

    def check() -> None:
        with torch.no_grad():
            y, bias = layer(x), layer.bias
        exact = x.double() @ layer.dequantize(torch.float64).t() + bias.double()
        assert_within_dtype_error(y, exact, canonical(x).detach(), factor=1.0)

    apart(check)
    layer.unpack_native_()
    assert all(torch.equal(layer.state_dict()[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("in_words")
def test_a_whole_model_in_words(apart: Apart) -> None:
    """Its logits, generation, one graph for all token counts, and its export."""
    model = tiny_llama().to(DEVICE, torch.float16).eval()
    quantize_(model, QuantConfig("W4A16", group_size=32))
    layers = [layer for layer in model.modules() if isinstance(layer, QuantLinear)]
    assert layers and all("weight_words" in layer._buffers for layer in layers)
    dequantized = tiny_llama().to(DEVICE, torch.float16).eval()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            dequantized.get_submodule(name).weight.data = layer.dequantize()
    ids = torch.arange(3, 15, device=DEVICE).view(1, 12)

    @torch.no_grad()
    def check() -> None:
        expected = dequantized(ids).logits.float()
        assert (model(ids).logits.float() - expected).abs().max() < 0.02 * expected.abs().max()
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 16)
        graphs = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for length in (7, 2, 12, 5):
            logits = compiled(ids[:, :length], use_cache=False).logits
            assert torch.equal(logits, model(ids[:, :length], use_cache=False).logits)
        assert len(graphs) <= 2
        assert warmup(model, [1]) == 4
        stack = nn.Sequential(*[layer for layer in layers if layer.in_features == layer.out_features][:2])
        exported = torch.export.export(stack, (torch.zeros(3, 64, dtype=torch.float16, device=DEVICE),))
        x = random_tokens(3, 64)
        assert "wna16_triton" in str(exported.graph) and torch.equal(exported.module()(x), stack(x))

    apart(check)


@pytest.mark.usefixtures("in_words")
def test_what_words_cannot_hold_stays_as_it_is() -> None:
    assert not quant_linear("W3A16", group_size=32).is_native
    assert not quant_linear("W4A16", group_size=16).is_native


# ---------------------------------------------------------------------------------------------------------------- dispatch


def test_every_kind_has_tiles_for_few_tokens_and_none_for_many() -> None:
    for kinds in dispatch.TABLE.values():
        assert set(kinds) == {"w2", "w4", "w8", "w2_fine", "w4_fine", "w8_fine"}
        for rows in kinds.values():
            counts = [most for most, _ in rows]
            assert counts == sorted(counts)
            assert all(tile.block_m in (8, 16, 32, 64, 128) for _, tile in rows)
    assert [words_triton.kind_of(*form) for form in ((4, 128, False), (4, 64, False), (8, 576, True))] == [
        "w4",
        "w4_fine",
        "w8_fine",
    ]
    device = torch.device("cpu")
    assert dispatch.tile_for(device, "w4", 1) == dispatch.TABLE["sm_80"]["w4"][0][1]
    assert dispatch.tile_for(device, "w4", 100_000) is None


def test_splits_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: dispatch.Gpu("sm_90", 132))
    device, tile = torch.device("cuda"), Tile(16, 128)
    assert dispatch.num_splits(device, tile, 1, 4096, 32) == 8  # 32 programs of 264
    assert dispatch.num_splits(device, tile, 1, 28672, 32) == 1
    assert dispatch.num_splits(device, tile, 1, 128, 1000) == 16
    assert dispatch.num_splits(device, tile, 1, 128, 3) == 2
    assert dispatch.num_splits(device, tile, 64, 4096, 32) == 2


def test_gpus_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Properties:
        major: int
        minor: int = 0
        multi_processor_count: int = 100

    for major, name in ((8, "sm_80"), (9, "sm_90"), (10, "sm_100"), (12, "sm_100"), (7, None)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, major=major: Properties(major))
        gpu = dispatch.gpu_of.__wrapped__(torch.device("cuda"))
        assert (None if gpu is None else gpu.architecture) == name
    assert dispatch.gpu_of.__wrapped__(torch.device("cpu")) is None


def test_an_old_gpu_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "gpu_of", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    device, form = torch.device("cuda", 0), layouts.Form(resolve_scheme("W4A16"), 64, 256, torch.float16)
    with pytest.warns(UserWarning, match=r"Tesla T4 \(cuda:0\) is older than compute capability 8\.0"):
        assert layouts.layout_for(form, device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layouts.layout_for(form, device) is None
    layouts._is_old.cache_clear()
