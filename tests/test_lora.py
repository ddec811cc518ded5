"""Adapters on packed layers: products and gradients against float64, merging, and training through the merge."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchq import QuantArgs, QuantLinear, Scheme
from torchq.kernels import w8a8_int8_cpu
from torchq.lora import DITHER_STEPS, Adapter, delta_weight, dither, lora_linear, merged_linear, requantize
from torchq.scheme import resolve_scheme
from torchq.testing import assert_within_dtype_error, quant_linear, sqnr_db

INT8_TENSOR = QuantArgs(8, strategy="tensor")
WEIGHT_ONLY = {
    **{f"W{bits}A16": resolve_scheme(f"W{bits}A16", 32) for bits in (2, 3, 4, 8)},
    "W4A16_ASYM": resolve_scheme("W4A16_ASYM", 64),
    "W8A16-channel": resolve_scheme("W8A16", -1),
    "FP8-weight": Scheme(QuantArgs(8, "float", strategy="channel")),
    "NF4": resolve_scheme("NF4"),
}
SCHEMES = WEIGHT_ONLY | {
    **{name: resolve_scheme(name) for name in ("W8A8", "W4AFP8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8")},
    "W8A8-static-asym": Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor", symmetric=False)),
}
INTEGER = [name for name, scheme in SCHEMES.items() if scheme.weights.type == "int"]
N, K, R = 96, 256, 8


@pytest.fixture(autouse=True)
def small_weights_are_laid_out_for_onednn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w8a8_int8_cpu, "MIN_WEIGHTS", 1)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def adapter(seed: int = 2, scaling: float = 2.0) -> Adapter:
    a, b = random(seed, R, K) / K**0.5, random(seed + 100, N, R) / R**0.5
    return Adapter(a.requires_grad_(), b.requires_grad_(), scaling)


def exact(layer: QuantLinear, x: Tensor, grad_y: Tensor, adapters: list[Adapter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of plain PyTorch on the dequantized weight, in ``dtype``."""
    x = x.detach().to(dtype).requires_grad_()
    weight = layer.dequantize().to(dtype)
    factors = [(item.A.detach().to(dtype).requires_grad_(), item.B.detach().to(dtype).requires_grad_()) for item in adapters]
    bias = None if layer.bias is None else layer.bias.detach().to(dtype).requires_grad_()
    y = torch.nn.functional.linear(x, weight, bias)
    for item, (a, b) in zip(adapters, factors, strict=True):
        y = y + (x @ a.t()) @ b.t() * item.scaling
    y.backward(grad_y.to(dtype))
    results = {"y": y.detach(), "x": x.grad} | ({} if bias is None else {"bias": bias.grad})
    for i, (a, b) in enumerate(factors):
        results |= {f"A{i}": a.grad, f"B{i}": b.grad}
    assert all(value is not None for value in results.values())
    return results  # type: ignore[return-value]


def ours(layer: QuantLinear, x: Tensor, grad_y: Tensor, adapters: list[Adapter], product: Any = lora_linear) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    leaves = [x, *([] if layer.bias is None else [layer.bias]), *(f for item in adapters for f in (item.A, item.B))]
    for leaf in leaves:
        leaf.grad = None
    y = product(layer, x, adapters)
    y.backward(grad_y)
    names = ["x", *([] if layer.bias is None else ["bias"]), *(f"{f}{i}" for i in range(len(adapters)) for f in "AB")]
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("name", SCHEMES)
def test_outputs_and_gradients_are_those_of_the_dequantized_weight(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    _, layer = quant_linear(SCHEMES[name], dtype=dtype)
    x, grad_y = random(3, num_tokens, K, dtype=dtype), random(4, num_tokens, N, dtype=dtype)
    adapters = [adapter()]
    found, reference = ours(layer, x, grad_y, adapters), exact(layer, x, grad_y, adapters, torch.float64)
    low = exact(layer, x, grad_y, adapters, dtype)
    assert found.keys() == reference.keys()
    for key, value in found.items():
        if key == "y" and name not in WEIGHT_ONLY:  # activations are rounded, which is another function
            assert num_tokens == 0 or sqnr_db(reference[key], value) > 28
        else:
            assert_within_dtype_error(value.to(dtype), reference[key], low[key].to(dtype), factor=3)


@pytest.mark.parametrize("name", ["W4A16", "W8A8"])
def test_strided_inputs_several_adapters_and_no_bias(name: str) -> None:
    _, layer = quant_linear(SCHEMES[name], dtype=torch.float32, bias=False)
    x, grad_y = random(3, K, 5, 2).permute(2, 1, 0), random(4, N, 5, 2).permute(2, 1, 0)
    adapters = [adapter(2), adapter(5, 0.5)]
    found, reference = ours(layer, x, grad_y, adapters), exact(layer, x, grad_y, adapters, torch.float64)
    for key in ("x", "A0", "B0", "A1", "B1"):
        torch.testing.assert_close(found[key].double(), reference[key], rtol=1e-4, atol=1e-4)
    assert found["y"].shape == (2, 5, N)


def test_what_adapters_see_may_be_another_tensor_as_after_dropout() -> None:
    _, layer = quant_linear(SCHEMES["W4A16"], dtype=torch.float32)
    item, x, other = adapter(), random(3, 5, K).requires_grad_(), random(6, 5, K).requires_grad_()
    y = lora_linear(layer, x, [item], other)
    y.sum().backward()
    ones = torch.ones(5, N)
    torch.testing.assert_close(y, layer(x) + (other @ item.A.t()) @ item.B.t() * item.scaling)
    torch.testing.assert_close(x.grad, ones @ layer.dequantize())
    torch.testing.assert_close(other.grad, (ones @ item.B) @ item.A * item.scaling)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    _, layer = quant_linear(SCHEMES["W4A16"], dtype=torch.float32)
    layer.requires_grad_(False)
    item = adapter()
    item.A.requires_grad_(False)
    x = random(3, 5, K)
    lora_linear(layer, x, [item]).sum().backward()
    assert item.A.grad is None and item.B.grad is not None and x.grad is None
    assert layer.bias is not None and layer.bias.grad is None
    assert not lora_linear(layer, x, [Adapter(item.A, item.B.detach(), 1.0)]).requires_grad


@pytest.mark.parametrize("product", [lora_linear, merged_linear])
def test_autocast_computes_in_its_dtype_and_gradients_keep_theirs(product: Any) -> None:
    _, layer = quant_linear(SCHEMES["W4A16"], dtype=torch.float32)
    item, x, grad_y = adapter(), random(3, 5, K), random(4, 5, N)
    with torch.autocast("cpu", torch.bfloat16):
        y = product(layer, x, [item])
    assert y.dtype == torch.bfloat16
    y.backward(grad_y.bfloat16())
    assert item.A.grad is not None and item.A.grad.dtype == torch.float32
    plain = ours(layer, x, grad_y, [adapter()], product)
    assert sqnr_db(plain["A0"], item.A.grad) > 35
    assert sqnr_db(plain["y"], y) > 35


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("product", [lora_linear, merged_linear])
def test_gradient_checkpointing_changes_nothing(product: Any, reentrant: bool) -> None:
    _, layer = quant_linear(SCHEMES["W4A16"], dtype=torch.float32)
    x, grad_y, adapters = random(3, 5, K), random(4, 5, N), [adapter()]
    plain = ours(layer, x, grad_y, adapters, product)

    def checkpointed(layer: QuantLinear, x: Tensor, adapters: list[Adapter]) -> Tensor:
        return checkpoint(product, layer, x, adapters, use_reentrant=reentrant)

    if reentrant:  # which sees tensors only where they are arguments
        plain.pop("A0"), plain.pop("B0"), plain.pop("bias")
    again = ours(layer, x, grad_y, adapters, checkpointed)
    for key, value in plain.items():
        assert torch.equal(value, again[key]), key


@pytest.mark.parametrize("product", [lora_linear, merged_linear])
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A8"])
def test_a_training_step_compiles_into_one_graph(name: str, product: Any) -> None:
    _, layer = quant_linear(SCHEMES[name], dtype=torch.float32)
    x, grad_y, adapters = random(3, 5, K), random(4, 5, N), [adapter()]
    plain = ours(layer, x, grad_y, adapters, product)
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    for key, value in ours(layer, x, grad_y, adapters, compiled).items():
        torch.testing.assert_close(value, plain[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("product", [lora_linear, merged_linear])
def test_the_backward_pass_keeps_one_copy_of_x_and_nothing_as_wide_as_the_output_or_the_weight(product: Any) -> None:
    _, layer = quant_linear(SCHEMES["W4A16"], dtype=torch.bfloat16, shape=(1024, K))
    a, b = random(2, R, K).requires_grad_(), random(3, 1024, R).requires_grad_()
    x = random(4, 128, K, dtype=torch.bfloat16).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        product(layer, x, [Adapter(a, b, 1.0)])
    own = {t.untyped_storage().data_ptr() for t in (x, a, b, *(t for t in layer._buffers.values() if t is not None))}
    extra = sum(t.nbytes for t in saved if t.untyped_storage().data_ptr() not in own)
    assert extra <= 128 * R * 2  # x @ A.T, in bfloat16


# -------------------------------------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("how", ["dithered", "same_grid", "new_scales"])
@pytest.mark.parametrize("name", INTEGER)
def test_no_change_is_no_change(name: str, how: str) -> None:
    _, layer = quant_linear(SCHEMES[name])
    merged = requantize(layer, torch.zeros(N, K), how)  # type: ignore[arg-type]
    if how == "new_scales":  # searched again: may find others
        assert sqnr_db(layer.dequantize(), merged.dequantize()) > 15
        return
    before, after = layer.state_dict(), merged.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


@pytest.mark.parametrize("name", INTEGER)
def test_merged_weights_are_on_the_grid_and_near_the_sum(name: str) -> None:
    scheme = SCHEMES[name]
    _, layer = quant_linear(scheme, dtype=torch.float32)
    delta = delta_weight([adapter(scaling=0.5)]).detach()
    _, scale, _ = layer.quantized_tensors()
    step = scale.abs().repeat_interleave(K // scale.shape[1], 1)
    target = layer.dequantize() + delta
    for how, limit in (("same_grid", 0.5), ("dithered", 1.0)):
        merged = requantize(layer, delta, how)  # type: ignore[arg-type]
        q, merged_scale, _ = merged.quantized_tensors()
        assert torch.equal(merged_scale, scale)
        inside = (q > scheme.weights.quant_min) & (q < scheme.weights.quant_max)
        assert ((merged.dequantize() - target).abs() / step)[inside].max() <= limit * 1.001


def test_a_dither_keeps_small_changes_on_average_and_rounding_to_the_nearest_keeps_none() -> None:
    _, layer = quant_linear(SCHEMES["W4A16"], dtype=torch.float32, shape=(512, 1024))
    _, scale, _ = layer.quantized_tensors()
    step = scale.repeat_interleave(32, 1)
    delta = 0.02 * step * random(7, 1, 1024).sign()  # a fiftieth of a step
    weight = layer.dequantize()

    def kept(how: str) -> float:
        change = requantize(layer, delta, how).dequantize() - weight  # type: ignore[arg-type]
        return (torch.sum(change * delta) / torch.sum(delta * delta)).item()

    assert kept("same_grid") == 0
    assert 0.9 < kept("dithered") < 1.05  # codes at the ends of the range cannot go further


def test_the_dither_is_even_along_rows_and_columns_and_leaves_room_for_any_code() -> None:
    steps = dither(300, 700, torch.device("cpu"))
    assert torch.equal(steps, dither(300, 700, torch.device("cpu")))
    values = steps.float() / DITHER_STEPS
    assert values.min() > 0 and values.max() < 1
    assert torch.equal((values + 127).floor(), torch.full_like(values, 127))
    assert torch.equal((values - 128).floor(), torch.full_like(values, -128))
    for lines in (values, values.t()):
        assert (lines.mean(1) - 0.5).abs().max() < 0.01
        assert (lines.sort(1).values - torch.linspace(0, 1, lines.shape[1])).abs().max() < 0.02


def test_merging_says_what_it_cannot_do() -> None:
    _, layer = quant_linear(SCHEMES["FP8_DYNAMIC"])
    with pytest.raises(
        ValueError, match="requantize='dithered' is for integer weights, got scheme FP8_DYNAMIC; use 'new_scales'"
    ):
        requantize(layer, torch.zeros(N, K), "dithered")
    with pytest.raises(ValueError, match="must be one of 'dithered', 'same_grid', 'new_scales', got 'nearest'"):
        requantize(layer, torch.zeros(N, K), "nearest")  # type: ignore[arg-type]
    _, nf4 = quant_linear(SCHEMES["NF4"])
    with pytest.raises(ValueError, match="requantize='same_grid' is not possible for scheme NF4, whose grid follows its values"):
        requantize(nf4, torch.zeros(N, K), "same_grid")
    with pytest.raises(ValueError, match="holds NaN or inf"):
        requantize(layer, torch.full((N, K), float("nan")), "new_scales")


@pytest.mark.parametrize("name", [*INTEGER, "FP8_DYNAMIC", "NF4"])
def test_a_merged_layer_keeps_bias_dtypes_and_static_scales(name: str) -> None:
    _, layer = quant_linear(SCHEMES[name], dtype=torch.float16)
    merged = requantize(layer.to(torch.bfloat16), delta_weight([adapter()]).detach(), "new_scales")
    assert merged.bias is layer.bias and merged.compute_dtype == torch.bfloat16
    assert merged.scale_dtype == layer.scale_dtype
    for static in ("input_scale", "input_zero_point"):
        assert (static in merged._buffers) == (static in layer._buffers)


@pytest.mark.parametrize("name", INTEGER)
def test_training_through_the_merge_is_training_the_merged_layer(name: str) -> None:
    _, layer = quant_linear(SCHEMES[name], dtype=torch.float32)
    item, x, grad_y = adapter(), random(3, 9, K), random(4, 9, N)
    merged = requantize(layer, delta_weight([item]).detach(), "dithered")
    found = ours(layer, x, grad_y, [item], merged_linear)
    with torch.no_grad():
        torch.testing.assert_close(found["y"], merged(x), rtol=1e-5, atol=1e-4)
    weight = merged.dequantize()
    torch.testing.assert_close(found["x"], grad_y @ weight, rtol=1e-5, atol=1e-4)
    # the straight-through estimator: the gradients of the weight's change, as if it were not rounded
    grad_weight = grad_y.t() @ x
    torch.testing.assert_close(found["A0"], item.scaling * item.B.t() @ grad_weight, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found["B0"], item.scaling * grad_weight @ item.A.t(), rtol=1e-4, atol=1e-3)
