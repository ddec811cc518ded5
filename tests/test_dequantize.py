"""dequantize_: ordinary layers with the weights that packed ones stand for, and nothing that says otherwise."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torchq
from torchq import QuantConfig, QuantLinear, dequantize_, quantize_
from torchq.dequantize import to_linear
from torchq.siblings import Siblings
from torchq.testing import tiny_llama

IDS = torch.arange(3, 15)[None]
CONFIGS = {
    "NF4": QuantConfig("NF4"),
    "W4A16": QuantConfig("W4A16", group_size=32),
    "W8A8": QuantConfig("W8A8", overrides={"re:.*q_proj": "FP8_DYNAMIC", "re:.*o_proj": "NF4"}),
}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def packed(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_packed_layer_becomes_a_linear(name: str, dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype, attention_bias=True)
    config = copy.deepcopy(model.config)
    quantize_(model, CONFIGS[name])
    model.train()
    layers, expected = packed(model), logits(model)
    weights = {key: layer.dequantize(dtype) for key, layer in layers.items()}
    biases = {key: layer.bias for key, layer in layers.items()}
    assert dequantize_(model) is model
    assert not packed(model) and len(layers) == 14
    for key, weight in weights.items():
        linear = model.get_submodule(key)
        assert type(linear) is nn.Linear and linear.training and not linear.weight.requires_grad
        assert linear.weight.dtype == dtype and torch.equal(linear.weight, weight)
        assert (linear.in_features, linear.out_features) == weight.shape[::-1] and linear.bias is biases[key]
    if name != "W8A8":  # whose activations were rounded
        torch.testing.assert_close(logits(model), expected, rtol=0.05, atol=0.05 if dtype == torch.bfloat16 else 1e-5)
    assert not hasattr(model, "quant_report") and str(model.config) == str(config)
    assert "_is_quantized" not in model.config.__dict__
    quantize_(model, "W8A8")  # it can be quantized once more


def test_another_dtype() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False)).bfloat16()
    quantize_(model, "NF4")
    bias = model[0].bias
    assert bias is not None
    bias.requires_grad_(False)
    weight = packed(model)["0"].dequantize()  # float32
    dequantize_(model, torch.float32)
    assert torch.equal(model[0].weight, weight)
    assert model[0].bias.dtype == torch.float32 and not model[0].bias.requires_grad and torch.equal(model[0].bias, bias.float())
    assert model(torch.ones(2, 64)).dtype == torch.float32


def test_compute_dtype_is_the_default() -> None:
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    quantize_(model, QuantConfig("W4A16", group_size=32))
    dequantize_(model.half())
    assert model[0].weight.dtype == model[0].bias.dtype == torch.float16


def test_layers_of_several_names_stay_one() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(64, 64))})
    quantize_(model, "NF4")
    assert model["a"] is model["b"][0]
    dequantize_(model)
    assert type(model["a"]) is nn.Linear and model["a"] is model["b"][0] and model["a"] is not model["b"][1]


def test_conv1d_is_conv1d_again() -> None:
    from transformers.pytorch_utils import Conv1D

    for scheme in ("NF4", "W8A8"):
        model = nn.Sequential(Conv1D(48, 96))
        before = model[0].weight.detach().clone()
        quantize_(model, scheme)
        x, layer = torch.randn(5, 96), model[0]
        assert layer.transposed and torch.equal(to_linear(layer).weight.t(), layer.dequantize())
        expected = nn.functional.linear(x, layer.dequantize(), layer.bias)
        dequantize_(model)
        assert type(model[0]) is Conv1D and model[0].weight.shape == (96, 48) and model[0].weight.is_contiguous()
        torch.testing.assert_close(model[0](x), expected)
        assert (model[0].weight - before).norm() < 0.2 * before.norm()


def test_hooks_are_kept() -> None:
    model, seen = nn.Sequential(nn.Linear(64, 32)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(type(module)))
    handle = model[0].register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs)))
    quantize_(model, "NF4")
    dequantize_(model)
    model(torch.ones(2, 64))
    assert seen == [1, nn.Linear]
    handle.remove()
    model(torch.ones(2, 64))
    assert seen == [1, nn.Linear, nn.Linear]


def test_siblings_are_parted() -> None:
    model = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)])
    quantize_(model, QuantConfig("W4A16", group_size=32))
    members = list(packed(model).values())
    siblings = Siblings(members)
    for member in members:
        member.siblings = siblings
    siblings.tensors = (torch.zeros(1),)  # as where a GPU's kernel can take one apart
    dequantize_(model)
    assert siblings.tensors is None and not packed(model)


def test_inside_of_another_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_llama()

    wrapper = Wrapper()
    quantize_(wrapper.inner, QuantConfig("W4A16", group_size=32))
    dequantize_(wrapper)
    assert not hasattr(wrapper.inner, "quant_report") and not hasattr(wrapper.inner.config, "quantization_config")


def test_what_cannot_be_dequantized() -> None:
    with pytest.raises(ValueError, match="model has no QuantLinear: there is nothing to dequantize"):
        dequantize_(tiny_llama())
    model = nn.Sequential(nn.Linear(64, 32))
    quantize_(model, "NF4")
    with pytest.raises(ValueError, match="model is a single QuantLinear, which cannot be replaced in place"):
        dequantize_(model[0])
    assert isinstance(model[0], QuantLinear)


# --------------------------------------------------------------------------------------- NF4 has no checkpoint format

REFUSAL = (
    r"scheme NF4 of model\.layers\.0\.self_attn\.o_proj, model\.layers\.1\.self_attn\.o_proj has no checkpoint format .* "
    r"train adapters and save those, or convert it with torchq\.dequantize_\(model\) and then torchq\.quantize_\(model, 'W4A16'\)"
)


def mixed(**overrides: Any) -> Any:
    """A model with some layers in NF4 and some that could be saved."""
    model = tiny_llama(dtype=torch.bfloat16, **overrides)
    quantize_(model, QuantConfig("W4A16", group_size=32, overrides={"re:.*o_proj": "NF4"}))
    return model


def test_neither_torchq_nor_transformers_saves_it(tmp_path: Any) -> None:
    model = mixed()
    for other in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=REFUSAL):
            torchq.save_pretrained(other, tmp_path / "out")
        with pytest.raises(ValueError, match=REFUSAL):
            other.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert not hasattr(model.config, "quantization_config")
    config = copy.deepcopy(model.config)
    config.save_pretrained(tmp_path / "config")  # nothing in it is of NF4
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 14)


def test_the_remedy(tmp_path: Any) -> None:
    model = mixed()
    quantize_(dequantize_(model), QuantConfig("W4A16", group_size=32))
    torchq.save_pretrained(model, tmp_path / "torchq")
    model.save_pretrained(tmp_path / "model")
    for name in ("torchq", "model"):
        loaded = torchq.load_pretrained(tmp_path / name).state_dict()
        assert loaded.keys() == model.state_dict().keys()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())


def test_adapters_are_saved(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(mixed(), peft.LoraConfig(target_modules=["lm_head"]))
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() and not (tmp_path / "out" / "model.safetensors").exists()


def test_adapters_that_transformers_holds_are_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """``model.add_adapter``, which asks for a newer PEFT than is tested with here: what it leaves on a model stands in for it."""
    model, config = mixed(), Mock()
    monkeypatch.setattr(model, "_hf_peft_config_loaded", True)
    monkeypatch.setattr(model, "peft_config", {"default": config}, raising=False)
    monkeypatch.setattr(model, "active_adapters", lambda: ["default"])
    monkeypatch.setattr(model, "get_adapter_state_dict", lambda **_: {"lora_A": torch.ones(2)})
    model.save_pretrained(tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "adapter_model.safetensors")) == {"base_model.model.lora_A"}
    config.save_pretrained.assert_called_once()


def test_a_failed_call_leaves_transformers_free_to_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = tiny_llama()
    monkeypatch.setattr("torchq.quantize._left_out_warnings", lambda report: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize_(model, "NF4")
    assert "hf_quantizer" not in model.__dict__
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
