"""Siblings: layers that read one tensor are multiplied in one launch, and nothing else about them changes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq import QuantConfig, QuantLinear, fuse_siblings_, layouts, quantize_, warmup
from torchq.kernels import fp8_triton, wna16_triton, words_triton
from torchq.testing import tiny_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; products by the reference, since it is not the kernel that is tested here."""

    def layout_for(form: layouts.Form, device: torch.device) -> layouts.Layout | None:
        return next((layout for layout in (layouts.WORDS, layouts.FP8_WORDS) if layout.can_hold(form, device)), None)

    monkeypatch.setattr(layouts, "layout_for", layout_for)
    monkeypatch.setattr(wna16_triton, "linear_words", _multiply)
    monkeypatch.setattr(fp8_triton, "linear_words", _multiply)


def _multiply(
    x: Tensor, words: Tensor, scale: Tensor, zeros: Any, bias: Any, num_bits: int, group_size: int, **fp8: bool
) -> Tensor:
    weight = words_triton.dequantize_words_ref(words, scale, zeros, num_bits, group_size, x.shape[-1], x.dtype, **fp8)
    return nn.functional.linear(x, weight, bias)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the weight in each product."""
    found: list[int] = []

    def count(x: Tensor, words: Tensor, *args: Any, **fp8: bool) -> Tensor:
        found.append(words.shape[1])
        return _multiply(x, words, *args, **fp8)

    monkeypatch.setattr(wna16_triton, "linear_words", count)
    monkeypatch.setattr(fp8_triton, "linear_words", count)
    return found


def model_in(scheme: str = "W4A16_ASYM", **settings: Any) -> nn.Module:
    model = tiny_llama(attention_bias=True).to(DEVICE, torch.float16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator(DEVICE).manual_seed(len(name)))
    group_size = 32 if scheme.startswith("W") else None
    quantize_(model, QuantConfig(scheme, group_size=group_size, **settings))
    return model


IDS = torch.arange(3, 15, device=DEVICE).view(1, 12)


@pytest.mark.usefixtures("in_words")
@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W8A16", "FP8_DYNAMIC"])
def test_one_launch_and_the_same_logits(scheme: str, launches: list[int]) -> None:
    model = model_in(scheme)
    with torch.no_grad():
        expected = model(IDS).logits
    apart = list(launches)
    groups = fuse_siblings_(model)
    layers = [f"model.layers.{i}" for i in range(2)]
    attention, mlp = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
    assert groups == [
        [f"{layer}.{module}.{name}" for name in names]
        for layer in layers
        for module, names in (("self_attn", attention), ("mlp", mlp))
    ]
    launches.clear()
    with torch.no_grad():
        found = model(IDS).logits
    assert torch.equal(found, expected)
    assert (apart, launches) == ([64, 32, 32, 64, 128, 128, 64] * 2, [128, 64, 256, 64] * 2)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected)
    assert all(layer.siblings is None or layer.siblings._results is None for layer in packed(model).values())


def packed(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}


@pytest.mark.usefixtures("in_words")
def test_by_the_option_of_quantize_(launches: list[int]) -> None:
    model = model_in(fuse_siblings=True)
    launches.clear()
    with torch.no_grad():
        model(IDS)
    assert launches == [128, 64, 256, 64] * 2
    calibrated = tiny_llama().to(torch.float16)
    ids = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(0))
    quantize_(calibrated, QuantConfig("W4A16", group_size=32, fuse_siblings=True, algorithm="rtn"), calibration=ids)
    assert sum(layer.siblings is not None for layer in packed(calibrated).values()) == 10


@pytest.mark.usefixtures("in_words")
def test_checkpoint_copies_and_moves_do_not_see_it(launches: list[int]) -> None:
    model = model_in()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fuse_siblings_(model)
    with torch.no_grad():
        logits = model(IDS).logits

    def same(other: nn.Module) -> None:
        state = other.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
        with torch.no_grad():
            assert torch.equal(other(IDS).logits, logits)

    same(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(layer.siblings is None for layer in packed(other).values())
        same(other)
    assert sum(tensor.untyped_storage().nbytes() for tensor in unique_storages(model)) <= sum(
        tensor.untyped_storage().nbytes() for tensor in unique_storages(copy.deepcopy(model))
    )
    model.load_state_dict(expected)
    launches.clear()
    same(model)
    assert launches == [128, 64, 256, 64] * 2
    layer = model.get_submodule("model.layers.0.self_attn.k_proj")
    layer.unpack_native_()
    launches.clear()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-2, atol=1e-2)
    assert launches == [64, 32, 64, 256, 64, 128, 64, 256, 64]  # that attention's three apart, one of them by another kernel
    layer.pack_native_()
    launches.clear()
    same(model)
    assert launches == [128, 64, 256, 64] * 2


def unique_storages(model: nn.Module) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


@pytest.mark.usefixtures("in_words")
def test_a_sibling_called_alone_or_with_another_tensor_is_right(launches: list[int]) -> None:
    model = model_in()
    q, k, v = (model.get_submodule(f"model.layers.0.self_attn.{name}_proj") for name in "qkv")
    x, other = (torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(i)).to(DEVICE, torch.float16) for i in range(2))
    with torch.no_grad():
        expected = [layer(tensor) for layer in (q, k, v) for tensor in (x, other)]
        fuse_siblings_(model)
        assert all(torch.equal(y, z) for y, z in zip([f(t) for f in (q, k, v) for t in (x, other)], expected, strict=True))
        for _ in range(2):
            assert torch.equal(q(x), expected[0])  # a second call of one layer computes anew
        assert torch.equal(k(x), expected[2])
        x.copy_(other)  # the same tensor, but no longer the same values
        assert torch.equal(v(x), expected[5])


@pytest.mark.usefixtures("in_words")
def test_under_autocast_each_layer_multiplies_its_own_copy(launches: list[int]) -> None:
    model = model_in().float()
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected = model(IDS).logits
        fuse_siblings_(model)
        launches.clear()
        assert torch.equal(model(IDS).logits, expected)
    assert max(launches) <= 128 and len(launches) == 14


@pytest.mark.usefixtures("in_words")
def test_gradients_go_through_each_layer(launches: list[int]) -> None:
    model = model_in()
    embeddings = model.get_input_embeddings()(IDS).detach()
    grads = []
    for fuse in (False, True):
        if fuse:
            fuse_siblings_(model)
            launches.clear()
        inputs = embeddings.clone().requires_grad_()
        model(inputs_embeds=inputs).logits.float().logsumexp(-1).sum().backward()
        grads.append(inputs.grad)
    assert torch.equal(*grads) and launches == [64, 32, 32, 64, 128, 128, 64] * 2


@pytest.mark.usefixtures("in_words")
def test_compiles_into_one_graph(launches: list[int]) -> None:
    model = model_in()
    fuse_siblings_(model)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for length in (7, 2, 12):
            launches.clear()
            logits = compiled(IDS[:, :length], use_cache=False).logits
            assert launches == [128, 64, 256, 64] * 2
            assert torch.equal(logits, model(IDS[:, :length], use_cache=False).logits)
    assert len(graphs) <= 2


@pytest.mark.usefixtures("in_words")
def test_warmup_leaves_nothing_behind() -> None:
    model = model_in(fuse_siblings=True)
    assert warmup(model, [1, 3]) == 8
    assert all(layer.siblings is None or layer.siblings._results is None for layer in packed(model).values())


def test_on_a_cpu_it_changes_nothing() -> None:
    model = model_in()
    with torch.no_grad():
        expected = model(IDS).logits
        assert len(fuse_siblings_(model)) == 4
        assert torch.equal(model(IDS).logits, expected)
    if DEVICE == "cpu":
        assert all(layer.siblings.tensors is None for layer in packed(model).values() if layer.siblings)


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="model has no QuantLinear"):
        fuse_siblings_(tiny_llama())
    model = nn.Sequential(nn.Linear(64, 64))
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=r"fuse_siblings needs inputs .* no dummy_inputs: .*fuse_siblings_\(model, inputs="):
        quantize_(model, QuantConfig("W4A16", group_size=32, fuse_siblings=True))
    assert torch.equal(model[0].weight, before)
