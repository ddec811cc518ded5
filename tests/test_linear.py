"""QuantLinear as a module: forward, casts, moves, copies, state dicts, memory, torch.compile."""

import copy
import io
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchq import QuantArgs, QuantConfig, QuantLinear, Scheme, numerics, quantize_
from torchq.algorithms.rtn import quantize_weight
from torchq.kernels import linear, w8a8_int8_cpu, w8a16_cpu, wna16_cpu
from torchq.linear import buffer_specs
from torchq.packing import pack_int32
from torchq.scheme import resolve_scheme
from torchq.testing import assert_within_dtype_error, quant_linear, sqnr_db, tiny_llama

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INT8_TENSOR = QuantArgs(8, strategy="tensor")
FP8_TENSOR = QuantArgs(8, "float", strategy="tensor")

WEIGHT_ONLY = {
    **{f"W{bits}A16-g32": resolve_scheme(f"W{bits}A16", 32) for bits in range(2, 9)},
    **{f"W{bits}A16_ASYM-g32": resolve_scheme(f"W{bits}A16_ASYM", 32) for bits in (2, 3, 4, 8)},
    "W4A16-g64": resolve_scheme("W4A16", 64),
    "W4A16-channel": resolve_scheme("W4A16", -1),
    "W4A16_ASYM-channel": resolve_scheme("W4A16_ASYM", -1),
    "W8A16-channel": resolve_scheme("W8A16", -1),
    "FP8-weight-channel": Scheme(QuantArgs(8, "float", strategy="channel")),
    "FP8-weight-tensor": Scheme(FP8_TENSOR),
    "FP8-weight-block": Scheme(QuantArgs(8, "float", strategy="block", block_structure=(128, 128))),
    "NF4": resolve_scheme("NF4"),
    "NF4-b1024": resolve_scheme("NF4", 1024),  # four rows
}
QUANTIZED_ACTIVATIONS = {
    "W8A8": resolve_scheme("W8A8"),
    "W4AFP8": resolve_scheme("W4AFP8"),
    "FP8_DYNAMIC": resolve_scheme("FP8_DYNAMIC"),
    "FP8_BLOCK": resolve_scheme("FP8_BLOCK"),
    "FP8-static": resolve_scheme("FP8"),
    "W8A8-static": Scheme(QuantArgs(8, strategy="channel"), INT8_TENSOR),
    "W8A8-static-asym": Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor", symmetric=False)),
}
SCHEMES = WEIGHT_ONLY | QUANTIZED_ACTIVATIONS
SOME_SCHEMES = (
    "W4A16-g32",
    "W4A16_ASYM-g32",
    "W8A16-channel",
    "W3A16-g32",
    "W8A8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "FP8-static",
    "NF4",
)


@pytest.fixture(autouse=True)
def small_weights_are_laid_out_for_onednn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8_int8_cpu, "MIN_WEIGHTS", 1)


def make(
    name: str, dtype: torch.dtype = torch.bfloat16, shape: tuple[int, int] = (96, 256), bias: bool = True
) -> tuple[nn.Linear, QuantLinear]:
    """A random Linear of (N, K) = ``shape`` and the QuantLinear made of it."""
    return quant_linear(SCHEMES[name], shape=shape, dtype=dtype, bias=bias)


def tokens(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def snapshot(layer: QuantLinear) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}


def assert_same(layer: QuantLinear, expected: dict[str, Tensor], *, skip: tuple[str, ...] = ()) -> None:
    """The quantized tensors of ``layer`` are bit for bit ``expected``, in values, shapes and dtypes."""
    actual = layer.state_dict()
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if name in skip:
            continue
        found = actual[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        same_size_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
        assert torch.equal(found.cpu().view(same_size_int), tensor.view(same_size_int)), name


# ---------------------------------------------------------------------------------------------------------------- forward


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weight_only_forward_is_linear_with_the_dequantized_weight(name: str, dtype: torch.dtype) -> None:
    _, layer = make(name, dtype)
    weight, x = layer.dequantize(dtype), tokens(dtype, 5, 256)
    assert layer.bias is not None
    exact = x.double() @ weight.double().t() + layer.bias.double()
    eager = nn.functional.linear(x, weight, layer.bias)
    with torch.no_grad():
        y = layer(x)
    assert y.dtype == dtype and y.shape == (5, 96)
    assert_within_dtype_error(y, exact.detach(), eager.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED_ACTIVATIONS)
def test_forward_with_quantized_activations_is_close_to_the_dequantized_weight(name: str, dtype: torch.dtype) -> None:
    _, layer = make(name, dtype)
    x = tokens(dtype, 5, 256)
    assert layer.bias is not None
    exact = x.double() @ layer.dequantize().double().t() + layer.bias.double()
    with torch.no_grad():
        y = layer(x)
    assert y.dtype == dtype
    assert sqnr_db(exact.detach(), y) > 28


@pytest.mark.parametrize("name", ["W4A16-g32", "W4A16_ASYM-g32", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NF4"])
def test_any_number_of_leading_dimensions_and_any_floating_dtype(name: str) -> None:
    _, layer = make(name)
    x = tokens(torch.bfloat16, 2, 3, 256)
    with torch.no_grad():
        y = layer(x)
        assert y.shape == (2, 3, 96)
        assert layer(x[0, 0]).shape == (96,)
        assert layer(x[:0]).shape == (0, 3, 96)
        assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))
        for dtype in (torch.float16, torch.float32):
            other = layer(x.to(dtype))
            assert other.dtype == dtype
            assert sqnr_db(y.float(), other.float()) > 35


@pytest.mark.parametrize("name", ["W4A16-g32", "W8A16-g32", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NF4"])
def test_wrong_activations_are_an_error(name: str) -> None:
    _, layer = make(name)
    with pytest.raises(ValueError, match="256"):
        layer(tokens(torch.bfloat16, 2, 128))
    with pytest.raises(ValueError, match=r"x must be floating point with 16 or more bits, got torch\.int8"):
        layer(torch.ones(2, 256, dtype=torch.int8))


def test_negative_scales_are_dequantized_with_their_sign() -> None:
    linear, layer = make("W4A16-g32")
    assert (layer.canonical_tensors()["weight_scale"] < 0).any()
    assert sqnr_db(linear.weight.detach().float(), layer.dequantize().float()) > 19


@pytest.mark.parametrize(
    "name",
    ["W4A16-g32", "W4A16_ASYM-g32", "W3A16-g32", "W4A16-channel", "W8A16-g32", "W8A16-channel", "W6A16-g32", "W8A8",
     "W8A8-static-asym"],
)  # fmt: skip
def test_native_and_canonical_layouts_agree(name: str) -> None:
    if not (w8a8_int8_cpu if name.startswith("W8A8") else wna16_cpu).is_available():
        pytest.skip("this PyTorch or processor has no such layout")
    _, layer = make(name)
    assert layer.is_native
    before, weight = snapshot(layer), layer.dequantize()
    x = tokens(torch.float32, 300, 256)
    with torch.no_grad():
        native = layer(x)
        layer.unpack_native_()
        assert not layer.is_native
        canonical = layer(x)
    assert torch.equal(layer.dequantize(), weight)
    assert_same(layer, before)
    assert sqnr_db(canonical, native) > 100
    layer.pack_native_()
    assert layer.is_native
    assert_same(layer, before)
    layer.pack_native_()  # a second time changes nothing
    assert_same(layer, before)


# ------------------------------------------------------------------------------------------------------ casts and moves


@pytest.mark.parametrize("name", SCHEMES)
def test_casts_change_the_bias_and_nothing_else(name: str) -> None:
    _, layer = make(name)
    before, weight = snapshot(layer), layer.dequantize()
    for cast, dtype in (
        (layer.half, torch.float16),
        (layer.float, torch.float32),
        (layer.double, torch.float64),
        (lambda: layer.to(torch.float16), torch.float16),
        (lambda: layer.to("cpu", torch.float32), torch.float32),
        (layer.bfloat16, torch.bfloat16),
    ):
        assert cast() is layer
        assert_same(layer, before, skip=("bias",))
        assert layer.compute_dtype == dtype
        assert layer.bias is not None and layer.bias.dtype == dtype
        assert torch.equal(layer.dequantize(), weight)
        if layer.scheme.format in ("pack-quantized", "nf4"):
            assert layer.weight.dtype == dtype
        with torch.no_grad():
            assert layer(tokens(dtype, 2, 256)).dtype == dtype
    assert_same(layer, before)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_cast_to_every_dtype_is_an_error_and_changes_nothing(name: str) -> None:
    _, layer = make(name)
    before = snapshot(layer)
    with pytest.raises(TypeError, match=r"Module\.type\(dtype\) would convert packed integers.*use \.to\(dtype\)"):
        layer.type(torch.float16)
    assert_same(layer, before)


@pytest.mark.parametrize("name", SCHEMES)
def test_meta_and_back_through_to_empty(name: str) -> None:
    _, layer = make(name)
    before = snapshot(layer)
    layer.to("meta")
    assert all(buffer.is_meta for buffer in layer.buffers()) and layer.weight.is_meta
    meta = layer.state_dict()
    assert {key: (v.shape, v.dtype) for key, v in meta.items()} == {key: (v.shape, v.dtype) for key, v in before.items()}
    layer.to_empty(device="cpu")
    assert layer.weight.device.type == "cpu"
    layer.load_state_dict(before)
    assert_same(layer, before)


@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_share_memory(name: str) -> None:
    _, layer = make(name)
    before = snapshot(layer)
    layer.share_memory()
    assert all(buffer.is_shared() for buffer in layer.buffers())
    assert_same(layer, before)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_and_pickles_are_exact_and_independent(name: str, dtype: torch.dtype) -> None:
    _, layer = make(name, dtype)
    before, x = snapshot(layer), tokens(dtype, 3, 256)
    with torch.no_grad():
        y = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
        copy.copy(layer),
    ):
        assert_same(other, before)
        assert other.is_native == layer.is_native
        assert (other.compute_dtype, other.scheme) == (layer.compute_dtype, layer.scheme)
        assert other.weight.shape == (96, 256)
        with torch.no_grad():
            assert torch.equal(other(x), y)
    other = copy.deepcopy(layer)
    for buffer in other.buffers():
        if buffer.stride() != (0, 0):  # a placeholder
            buffer.zero_()
    assert_same(layer, before)


def test_a_pickle_holds_the_layout_of_the_checkpoint() -> None:
    _, layer = make("W4A16-g32")
    state = layer.__getstate__()
    assert {"weight_packed", "weight_scale", "weight_shape"} <= state["_buffers"].keys()
    assert "weight_planes" not in state["_buffers"] and "weight" not in state


# ------------------------------------------------------------------------------------------------------------ state dicts


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_loads_into_another_instance(name: str, assign: bool) -> None:
    _, layer = make(name)
    before = snapshot(layer)
    other = QuantLinear(256, 96, layer.scheme, device="meta" if assign else None)
    result = other.load_state_dict(before, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert_same(other, before)
    with torch.no_grad():
        assert torch.equal(other(tokens(torch.bfloat16, 2, 256)), layer(tokens(torch.bfloat16, 2, 256)))


@pytest.mark.parametrize("name", SCHEMES)
def test_names_shapes_and_dtypes_are_those_of_the_checkpoint(name: str) -> None:
    _, layer = make(name)
    state = layer.state_dict()
    assert isinstance(state.pop("bias"), Tensor)
    specs = buffer_specs(layer.scheme, 96, 256, torch.bfloat16)
    assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()} == specs


@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_missing_unexpected_and_misshapen_tensors_are_errors(name: str) -> None:
    _, layer = make(name)
    before = snapshot(layer)
    for key in before:
        rest = {k: v for k, v in before.items() if k != key}
        with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
            layer.load_state_dict(rest)
        assert_same(layer, before)
        assert layer.load_state_dict(rest, strict=False).missing_keys == [key]
        assert_same(layer, before)
        wrong = before | {key: torch.zeros(3, dtype=before[key].dtype)}
        with pytest.raises(RuntimeError, match=f"size mismatch for {key}"):
            layer.load_state_dict(wrong)
        assert_same(layer, before)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"weight_g_idx"'):
        layer.load_state_dict(before | {"weight_g_idx": torch.zeros(1)})
    assert_same(layer, before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_tensors_of_another_dtype_are_errors(name: str, assign: bool) -> None:
    """copy_ would truncate 16-bit weights to int8 codes, and round scales."""
    _, layer = make(name)
    before = snapshot(layer)
    for key in before.keys() - {"bias"}:
        with pytest.raises(RuntimeError, match=f"dtype mismatch for {key}: .*float64"):
            layer.load_state_dict(before | {key: before[key].double()}, assign=assign)
        assert_same(layer, before)


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC", "W4A16-g32"])
def test_a_16_bit_state_dict_does_not_load(name: str) -> None:
    linear, layer = make(name)
    before = snapshot(layer)
    with pytest.raises(RuntimeError):
        layer.load_state_dict(linear.state_dict())
    if "weight" in before:
        with pytest.raises(RuntimeError, match="dtype mismatch for weight"):
            layer.load_state_dict(linear.state_dict(), strict=False)
    assert_same(layer, before)


@pytest.mark.parametrize("name", ["W4A16-g32", "W8A16-channel"])
def test_a_state_dict_does_not_alias_the_native_layout_and_can_be_kept_with_vars(name: str) -> None:
    _, layer = make(name)
    state = layer.state_dict(keep_vars=True)
    assert state["bias"] is layer.bias
    before = snapshot(layer)
    state["weight_packed"].zero_()
    state["weight_scale"].zero_()
    if layer.is_native:
        assert_same(layer, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 256), (33, 100), (1, 1)])
def test_int8_with_a_scale_per_row_is_held_as_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if not w8a16_cpu.is_available():
        pytest.skip("PyTorch has no int8 kernel here")
    _, layer = make("W8A16-channel", dtype, shape, bias=False)
    quantized, _ = quantize_weight(make("W8A16-channel", dtype, shape)[0].weight.detach(), layer.scheme)
    assert torch.equal(layer._buffers["weight_rows"], quantized.q)
    state = snapshot(layer)
    assert torch.equal(state["weight_packed"], pack_int32(quantized.q, 8))
    assert torch.equal(state["weight_scale"], quantized.scale)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.float().half().to(dtype)):
        assert_same(other, state)
        assert torch.equal(other._buffers["weight_rows"], quantized.q)
        x = tokens(dtype, 3, shape[1])
        with torch.no_grad():
            assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("name", ["W8A16-g32", "W8A16_ASYM-g32", "W4A16-channel"])
def test_other_weights_are_not_held_as_rows(name: str) -> None:
    assert "weight_rows" not in make(name)[1]._buffers


# --------------------------------------------------------------------------------------------------- attributes, memory


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_only_parameter_is_the_bias_as_it_was(name: str, frozen: bool) -> None:
    linear, _ = make(name)
    linear.requires_grad_(not frozen)
    scheme = SCHEMES[name]
    quantized, _ = quantize_weight(linear.weight.detach(), scheme)
    if scheme.needs_calibration:
        quantized = replace(quantized, input_scale=torch.ones(1), input_zero_point=torch.ones(1, dtype=torch.int8))
    layer = QuantLinear.from_linear(linear.eval(), quantized)
    assert dict(layer.named_parameters()).keys() == {"bias"}
    assert layer.bias is linear.bias
    assert layer.bias is not None and layer.bias.requires_grad is not frozen
    assert not any(buffer.requires_grad for buffer in layer.buffers())
    assert not layer.weight.requires_grad
    assert not layer.training
    assert QuantLinear.from_linear(linear.train(), quantized).training


@pytest.mark.parametrize("name", SCHEMES)
def test_no_bias(name: str) -> None:
    linear, layer = make(name, bias=False)
    assert list(layer.parameters()) == [] and layer.bias is None
    assert "bias" not in layer.state_dict()
    with torch.no_grad():
        assert sqnr_db(linear(tokens(torch.bfloat16, 4, 256)).float(), layer(tokens(torch.bfloat16, 4, 256)).float()) > 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_placeholder_answers_questions_and_poisons_arithmetic(dtype: torch.dtype) -> None:
    _, layer = make("W4A16-g32", dtype)
    assert isinstance(layer.weight, Tensor)
    assert (layer.weight.dtype, layer.weight.shape, layer.weight.device.type) == (dtype, (96, 256), "cpu")
    assert layer.weight.untyped_storage().nbytes() == dtype.itemsize
    assert torch.isnan(tokens(dtype, 1, 256) @ layer.weight.t()).all()
    assert "weight" not in dict(layer.named_buffers()) and "weight" not in layer.state_dict()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_one_copy_of_the_weight_in_memory(name: str, dtype: torch.dtype) -> None:
    _, layer = make(name, dtype, shape=(128, 512), bias=False)
    storages = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in layer.buffers()}
    specs = buffer_specs(layer.scheme, 128, 512, dtype)
    on_disk = sum(math.prod(shape) * dt.itemsize for shape, dt in specs.values())
    allowed = on_disk
    if layer.is_native:  # nibbles, in one or two planes; scales as pairs, repeated if groups are larger; int8 zero points
        planes = 1 if layer.scheme.weights.num_bits <= 4 else 2
        group_size, scales = min(layer.scheme.weights.group_size or 512, 256), math.prod(specs["weight_scale"][0])
        allowed = 128 * 512 * planes // 2 + 4 * planes * 128 * (512 // group_size) + scales + 16
        allowed += 0 if layer.scheme.weights.symmetric else 2 * scales  # what rounding the kernel's zeros loses
    assert sum(storages.values()) <= allowed


def test_an_int8_weight_that_a_cpu_kernel_holds_leaves_a_placeholder_that_cannot_be_written_to() -> None:
    if not w8a8_int8_cpu.is_available():
        pytest.skip("this PyTorch or processor has no exact oneDNN int8 matmul")
    _, layer = make("W8A8")
    assert layer.is_native
    assert (layer.weight.dtype, layer.weight.shape, layer.weight.nbytes) == (torch.int8, (96, 256), 96 * 256)
    assert layer.weight.untyped_storage().nbytes() == 1
    with pytest.raises(RuntimeError, match="single memory location"):
        layer.weight.copy_(torch.ones(96, 256))
    assert layer.state_dict()["weight"].is_contiguous()
    assert layer.canonical_tensors()["weight"].untyped_storage().nbytes() == 96 * 256


# --------------------------------------------------------------------------------------------------------------- gradients


def assert_gradients(layer: QuantLinear, x: Tensor) -> None:
    """Those of the input and the bias equal what the dequantized weight in float64 gives, to rounding."""
    grad_y = torch.randn(*x.shape[:-1], layer.out_features, generator=torch.Generator().manual_seed(2)).to(x.dtype)
    grads = torch.autograd.grad(layer(x), (x, *layer.parameters()), grad_y)
    weight = layer.dequantize(x.dtype)
    assert grads[0].dtype == x.dtype and grads[0].shape == x.shape
    assert_within_dtype_error(grads[0], grad_y.double() @ weight.double(), grad_y @ weight.to(x.dtype))
    if layer.bias is not None:
        flat = grad_y.reshape(-1, layer.out_features)
        assert_within_dtype_error(grads[1], flat.double().sum(0), flat.sum(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_equal_those_of_the_dequantized_weight(name: str, dtype: torch.dtype) -> None:
    _, layer = make(name, dtype)
    for shape in ((5, 256), (1, 256), (0, 256), (2, 3, 256), (256,)):
        assert_gradients(layer, tokens(dtype, *shape).requires_grad_())
    assert_gradients(layer, tokens(dtype, 256, 5).requires_grad_().t())


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_do_not_depend_on_how_much_is_dequantized_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "TILE_WEIGHTS", 1)
    monkeypatch.setattr("torchq.kernels.nf4_linear._UNIT", 1)
    for shape in ((80, 256), (100, 384), (64, 512)):  # ends of 16 and 36 rows: two layouts of the CPU's kernels, and none
        _, layer = make(name, shape=shape, bias=False)
        assert_gradients(layer, tokens(torch.bfloat16, 5, shape[1]).requires_grad_())


def test_gradients_of_ragged_rows() -> None:
    for bits in (3, 4, 5):  # 40 columns end within a word
        scheme = resolve_scheme(f"W{bits}A16", -1)
        quantized, _ = quantize_weight(torch.randn(33, 40, generator=torch.Generator().manual_seed(0)), scheme)
        layer = QuantLinear.from_linear(nn.Linear(40, 33), quantized)
        assert_gradients(layer, tokens(torch.float32, 3, 40).requires_grad_())


@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_a_gradient_is_computed_only_where_it_is_wanted(name: str) -> None:
    _, layer = make(name)
    x = tokens(torch.bfloat16, 3, 256)
    with torch.no_grad():
        expected = layer(x)
    y = layer(x)  # the bias wants one
    assert torch.equal(y, expected) and y.requires_grad
    y.float().sum().backward()
    assert layer.bias is not None and layer.bias.grad is not None and x.grad is None
    assert {name for name, _ in layer.named_parameters()} == {"bias"}
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    x.requires_grad_()
    first = torch.autograd.grad((layer(x).float() ** 2).sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.float().sum().backward()


@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_nothing_of_the_size_of_the_weight_is_kept_for_the_backward_pass(name: str) -> None:
    _, layer = make(name)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in layer.buffers() if not tensor.is_mkldnn}
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(tokens(torch.bfloat16, 3, 256).requires_grad_())
    assert kept
    for tensor in kept:
        assert tensor is layer._onednn_weight or tensor.untyped_storage().data_ptr() in pointers


@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_autocast_multiplies_in_its_dtype_as_linear_does(name: str) -> None:
    _, layer = make(name)
    x = tokens(torch.float32, 3, 256).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert layer(x.double()).dtype == torch.float64
    assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x.bfloat16()))
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    first, second = make(name, shape=(256, 256))[1], make(name)[1]

    def both(x: Tensor) -> Tensor:
        return second(first(x).relu())

    grads = []
    for function in (both, lambda x: checkpoint(both, x, use_reentrant=reentrant)):
        x = tokens(torch.bfloat16, 3, 256).requires_grad_()
        function(x).float().sum().backward()
        grads.append((x.grad, first.bias.grad))
        first.bias.grad = second.bias.grad = None
    for expected, found in zip(*grads, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_a_training_step_compiles_into_one_graph(name: str) -> None:
    _, layer = make(name, shape=(256, 256))
    adapter = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)

    def loss_of(x: Tensor) -> Tensor:
        y = layer(x) + adapter(x)
        return (layer(y.relu()) ** 2).float().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    for m in (3, 5):
        x = tokens(torch.bfloat16, m, 256).requires_grad_()
        expected = torch.autograd.grad(loss_of(x), (x, adapter.weight, layer.bias))
        found = torch.autograd.grad(compiled(x), (x, adapter.weight, layer.bias))
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("scheme", "layout"), [("W4A16", "WORDS"), ("FP8_BLOCK", "FP8_WORDS")])
def test_triton_ops_are_registered_when_a_layer_needs_them(scheme: str, layout: str) -> None:
    code = f"""
import sys, torch, torchq
from torchq import layouts
assert "triton" not in sys.modules
layouts.layout_for = lambda form, device: layouts.{layout}
model = torch.nn.Sequential(torch.nn.Linear(256, 64))
torchq.quantize_(model, {scheme!r}, progress=False)
print(model[0]._chosen.forward, model[0]._chosen.input_grad)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    op = "wna16_triton" if layout == "WORDS" else "fp8_triton"
    assert done.stdout.split() == [f"torchq.{op}.default", f"torchq.{op}_input_grad.default"], done.stderr


def test_extra_repr_names_the_scheme() -> None:
    assert "scheme=W4A16, weight=int4 group 32" in repr(make("W4A16-g32")[1])
    assert "weight=int4 channel asymmetric" in repr(make("W4A16_ASYM-channel")[1])
    assert "scheme=NF4, weight=nf4 group 64" in repr(make("NF4")[1])
    assert "weight=int8 channel, activations=int8 token" in repr(make("W8A8")[1])


@pytest.mark.parametrize("shape", [(33, 40), (7, 5), (1, 1), (3, 1001)], ids=str)  # blocks run on over rows; odd numbers
def test_nf4_of_any_shape(shape: tuple[int, int]) -> None:
    for dtype in DTYPES:
        _, layer = make("NF4", dtype, shape)
        assert_gradients(layer, tokens(dtype, 64, shape[1]).requires_grad_())
        other = QuantLinear(shape[1], shape[0], layer.scheme, dtype=dtype)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(copy.deepcopy(other).dequantize(), layer.dequantize())


def test_nf4_tensors_are_those_of_bitsandbytes() -> None:
    golden = load_file(Path(__file__).parent / "golden" / "bitsandbytes" / "nf4.safetensors")
    cases = [name.removesuffix(".nested_scale") for name in golden if name.endswith(".nested_scale")]
    assert len(cases) == 5
    for name in cases:
        case = {key.removeprefix(f"{name}."): tensor for key, tensor in golden.items() if key.startswith(f"{name}.")}
        weight, block_size = case["weight"], int(case["block_size"])
        linear = nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
        linear.weight.data = weight
        quantized, _ = quantize_weight(weight, resolve_scheme("NF4", block_size))
        layer = QuantLinear.from_linear(linear, quantized)
        names = ("packed", "absmax", "nested_scale", "nested_offset")
        for tensor, key in zip(layer.state_dict().values(), names, strict=True):
            assert tensor.dtype == case[key].dtype and torch.equal(tensor, case[key]), (name, key)
        assert layer.compute_dtype == weight.dtype
        assert torch.equal(layer.dequantize(weight.dtype), case["dequantized"]), name
        x = torch.eye(weight.shape[1], dtype=weight.dtype)
        assert torch.equal(layer(x).t(), case["dequantized"]), name


@pytest.mark.parametrize("name", ["NF4", "NF4-b1024", "W4A16-g32", "W8A8", "FP8_BLOCK"])
def test_codes_and_scales_give_the_weight(name: str) -> None:
    _, layer = make(name, shape=(100, 256))
    q, scale, zero_point = layer.quantized_tensors()
    assert q.shape == (100, 256) and scale.dtype == layer.scale_dtype
    assert torch.equal(numerics.dequantize(q, scale, zero_point, layer.scheme.weights), layer.dequantize())


def test_from_linear_asks_for_the_input_scale_of_static_activations() -> None:
    linear, _ = make("W8A8")
    quantized, _ = quantize_weight(linear.weight.detach(), SCHEMES["FP8-static"])
    with pytest.raises(ValueError, match="input_scale is missing: scheme FP8 has static activations"):
        QuantLinear.from_linear(linear, quantized)


@pytest.mark.parametrize("shape", [(1, 32), (16, 32), (33, 96), (5, 64), (100, 32)])
@pytest.mark.parametrize("name", ["W4A16-g32", "W4A16_ASYM-g32", "W3A16-g32", "W8A16_ASYM-g32", "W8A8", "FP8_DYNAMIC", "NF4"])
def test_odd_sizes(name: str, shape: tuple[int, int]) -> None:
    linear, layer = make(name, torch.bfloat16, shape)
    before, x = snapshot(layer), tokens(torch.bfloat16, 3, shape[1])
    other = copy.deepcopy(layer)
    assert_same(other, before)
    exact = x.double() @ layer.dequantize().double().t() + linear.bias.detach().double()
    with torch.no_grad():
        assert sqnr_db(exact, layer(x)) > 28
        assert torch.equal(layer(x), other(x))


# ------------------------------------------------------------------------------------------------------------------ compile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_compiled_model_has_at_most_two_graphs(dtype: torch.dtype) -> None:
    """bfloat16 has the CPU kernel's layout, float32 the canonical one; the copy shows that no guard is on an identity."""
    model = tiny_llama(dtype=dtype, num_hidden_layers=1)
    quantize_(model, QuantConfig("W4A16", group_size=32, overrides={"re:.*down_proj": "W8A8", "re:.*o_proj": "FP8_DYNAMIC"}))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in (7, 12, 33, 128):
        ids = torch.arange(length)[None] % 128
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert len(graphs) <= 2


def test_aot_eager_compiles_every_format() -> None:
    layers = nn.Sequential(
        *(make(name, shape=(256, 256))[1] for name in ("W4A16-g32", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NF4"))
    )
    torch._dynamo.reset()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for length in (7, 12):
            x = tokens(torch.bfloat16, length, 256)
            torch.testing.assert_close(compiled(x), layers(x))


@pytest.mark.parametrize("name", SOME_SCHEMES)
def test_outputs_may_be_written_to_in_place(name: str) -> None:
    _, layer = make(name, torch.float32)
    x = tokens(torch.float32, 2, 3, 256).requires_grad_()
    y = layer(x)
    y += 1.0
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], layer.dequantize().sum(0), rtol=1e-4, atol=1e-4)
