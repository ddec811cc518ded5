"""Adapters are loaded only where they fit."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchq import AWQ, QuantConfig, prepare_for_training, quantize_
from torchq.integrations.peft_adapter import BASE_NAME, load_adapter, save_adapter
from torchq.testing import tiny_llama

peft = pytest.importorskip("peft")

W4 = QuantConfig("W4A16", group_size=32)


def ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))


def trained(model: Any, **settings: Any) -> Any:
    wrapped = peft.get_peft_model(
        prepare_for_training(model, **settings), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.05)
    return wrapped.eval()


def packed(config: QuantConfig = W4, **overrides: Any) -> Any:
    model = tiny_llama(**overrides)
    quantize_(model, config)
    return model


def test_it_loads_on_the_same_base_and_twice(tmp_path: Path) -> None:
    wrapped = trained(packed())
    expected = wrapped(ids()).logits
    save_adapter(wrapped, tmp_path)
    again = load_adapter(packed(), tmp_path)
    assert torch.equal(again.eval()(ids()).logits, expected)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    load_adapter(again, tmp_path, adapter_name="second")
    again.set_adapter("second")
    assert torch.equal(again(ids()).logits, expected)
    trainable = load_adapter(prepare_for_training(packed()), tmp_path, is_trainable=True)
    assert sum(parameter.requires_grad for parameter in trainable.parameters()) == 28


def test_it_loads_on_the_16_bit_model_and_on_another_quantization_with_a_word(tmp_path: Path) -> None:
    save_adapter(trained(packed()), tmp_path)
    for model in (tiny_llama(), packed(QuantConfig("W8A16", group_size=32))):
        with pytest.warns(
            UserWarning, match=r"the weights are \d+.\d% from those .* \(W4A16\): another quantization of the same"
        ):
            load_adapter(model, tmp_path)


def test_an_adapter_of_peft_alone_is_checked_for_names_and_shapes(tmp_path: Path) -> None:
    trained(packed()).save_pretrained(tmp_path)
    assert not (tmp_path / BASE_NAME).exists()
    load_adapter(packed(), tmp_path)
    with pytest.raises(
        ValueError,
        match=r"is an adapter for another model: 18 of other sizes: .*gate_proj \(lora_A.weight: 64, the layer has 96\)",
    ):
        load_adapter(packed(hidden_size=96, num_attention_heads=6), tmp_path)


def test_other_weights_layers_and_shapes_are_errors(tmp_path: Path) -> None:
    save_adapter(trained(packed()), tmp_path)
    with pytest.raises(ValueError, match=r"was trained on other weights than the model's \(\d+% apart\)"):
        load_adapter(packed(seed=1), tmp_path)
    with pytest.raises(ValueError, match=r"7 layers that the model lacks: model.layers.1.mlp.down_proj"):
        load_adapter(packed(num_hidden_layers=1), tmp_path)
    with pytest.raises(ValueError, match="of other sizes"):
        load_adapter(tiny_llama(intermediate_size=96), tmp_path)


def test_a_base_whose_scales_were_moved_is_told_from_the_original(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():  # outlier channels, so that AWQ finds something to move
        for layer in model.model.layers:
            layer.input_layernorm.weight[::7] *= 30
            layer.post_attention_layernorm.weight[::5] *= 30
    original = copy.deepcopy(model)
    batches = [torch.randint(3, 128, (64,), generator=torch.Generator().manual_seed(i)) for i in range(16)]
    report = quantize_(model, QuantConfig("W4A16", group_size=32, algorithm=AWQ()), calibration=batches)
    assert report.folds
    save_adapter(trained(model), tmp_path)
    sketches = json.loads((tmp_path / BASE_NAME).read_text())["sketch"]
    assert len(sketches) == 14
    with pytest.raises(ValueError, match="AWQ or SmoothQuant had moved scales between those: load the base it was trained on"):
        load_adapter(original, tmp_path)


def test_merge_aware_adapters_are_for_their_own_grid(tmp_path: Path) -> None:
    save_adapter(trained(packed(), merge_aware=True), tmp_path)
    with pytest.raises(ValueError, match="trained with merge_aware=True is for that very grid"):
        load_adapter(tiny_llama(), tmp_path)


def test_no_adapter_damage_and_merged_adapters(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config.json; is it the folder of an adapter\?"):
        load_adapter(packed(), tmp_path)
    wrapped = trained(packed())
    save_adapter(wrapped, tmp_path)
    (tmp_path / BASE_NAME).write_text("{}")
    with pytest.raises(ValueError, match=r"is damaged .*; remove it to load the adapter unchecked"):
        load_adapter(packed(), tmp_path)
    wrapped.merge_adapter()
    with pytest.raises(ValueError, match=r"adapters are merged into .*call model.unmerge_adapter"):
        save_adapter(wrapped, tmp_path / "merged")
