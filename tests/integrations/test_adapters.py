"""PEFT's settings, several adapters and scripts written for other quantized models, on packed layers."""

from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from torchq import QuantConfig, QuantLinear, quantize_
from torchq.integrations.peft_adapter import save_adapter
from torchq.testing import tiny_llama
from torchq.training import prepare_for_training

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # PEFT's own
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),  # what PEFT 0.19 says of any model
]
IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def packed(dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    model = tiny_llama(dtype=dtype, **overrides)
    quantize_(model, QuantConfig("W4A16", group_size=32), progress=False)
    return model


def config(**settings: Any) -> LoraConfig:
    return LoraConfig(**({"r": 4, "target_modules": "all-linear"} | settings))


def adapted(seed: int = 0, **settings: Any) -> PeftModel:
    torch.manual_seed(seed)
    return get_peft_model(prepare_for_training(packed()), config(**settings))


def trained(model: Any, steps: int = 2) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model: Any, **kwargs: Any) -> Tensor:
    result: Tensor = model(input_ids=IDS, **kwargs).logits
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_dropout": 0.1},
        {"exclude_modules": ["down_proj"]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"layers_to_transform": [0], "target_modules": ["q_proj"]},
        {"layer_replication": [(0, 1), (0, 2)]},
        {"trainable_token_indices": [5, 6]},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_trained_adapters_are_saved_and_loaded(settings: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**settings)
    before = logits(model.eval())
    expected = logits(trained(model))
    assert not torch.equal(before, expected)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(prepare_for_training(packed()), tmp_path)
    assert torch.equal(logits(loaded.eval()), expected)


@pytest.mark.filterwarnings("ignore:.*means that merging LoRA weights won't be possible:peft.utils.warning.PeftWarning")
@pytest.mark.filterwarnings("ignore:.*invalid shape:peft.utils.warning.PeftWarning")
def test_lora_bias_is_saved_and_loaded(tmp_path: Path) -> None:
    model = trained(adapted(lora_bias=True))
    assert model.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].bias.abs().sum() > 0
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(prepare_for_training(packed()), tmp_path)
    assert torch.equal(logits(loaded.eval()), logits(model))


def test_adapters_load_without_memory_of_their_own_and_train_on(tmp_path: Path) -> None:
    model = trained(adapted())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(prepare_for_training(packed()), tmp_path, low_cpu_mem_usage=True, is_trainable=True)
    assert torch.equal(logits(loaded.eval()), logits(model))
    before = get_peft_model_state_dict(loaded)
    before = {name: tensor.clone() for name, tensor in before.items()}
    trained(loaded)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in get_peft_model_state_dict(loaded).items())


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 6]}, {"use_dora": True}])
def test_save_adapter_saves_what_peft_saves_and_lays_no_packed_weight_out(settings: dict[str, Any], tmp_path: Path) -> None:
    model = trained(adapted(**settings))
    with mock.patch.object(QuantLinear, "_save_to_state_dict", side_effect=AssertionError):
        save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def test_one_adapter_on_both_bases_has_the_same_parameters(tmp_path: Path) -> None:
    trained(adapted(use_rslora=True)).save_pretrained(tmp_path)
    on_packed = PeftModel.from_pretrained(prepare_for_training(packed()), tmp_path)
    on_float = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    ours, theirs = get_peft_model_state_dict(on_packed), get_peft_model_state_dict(on_float)
    assert ours.keys() == theirs.keys() and len(ours) == 28
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_adapters_come_and_go(tmp_path: Path) -> None:
    model = trained(adapted())
    first, base = logits(model), logits(packed())
    model.add_adapter("second", config(r=2, target_modules=["q_proj", "down_proj"]))
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    assert torch.equal(logits(model), base)
    second = logits(trained(model))
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    for names, expected in ((["default", "second"], (first, second)), (["__base__", "default"], (base, first))):
        mixed = logits(model, adapter_names=names)
        for row in range(2):
            torch.testing.assert_close(mixed[row], expected[row][row], rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    model.delete_adapter("second")
    assert torch.equal(logits(model), first)
    model.load_adapter(tmp_path / "second", "again")
    model.set_adapter("again")
    assert torch.equal(logits(model), second)
    model.add_weighted_adapter(["default", "again"], [1.0, 1.0], "both", combination_type="cat")
    model.set_adapter("both")
    sum_of_both = logits(model)
    model.base_model.set_adapter(["default", "again"])
    torch.testing.assert_close(sum_of_both, logits(model), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ what people's scripts also do


@pytest.mark.parametrize("order", ["before", "after"])
def test_prepare_model_for_kbit_training_is_harmless(order: str) -> None:
    model = packed(dtype=torch.bfloat16, attention_bias=True)
    before = {
        name: buffer.clone() for name, buffer in model.state_dict().items() if name.rpartition(".")[2].startswith("weight_")
    }
    steps = [peft.prepare_model_for_kbit_training, prepare_for_training]
    for step in steps if order == "before" else reversed(steps):
        model = step(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # what PEFT does to what is not packed
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    model = get_peft_model(model, config())
    start, end = (trained(model, steps)(input_ids=IDS, labels=IDS).loss.item() for steps in (0, 5))
    assert end < start - 0.1
    after = {name.replace("base_model.model.", "").replace(".base_layer", ""): t for name, t in model.state_dict().items()}
    assert len(before) == 42
    assert all(after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "norm"]),
    ],
    ids=["prompts", "norms"],
)
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_what_trains_beside_packed_layers_needs_no_adapters_in_them(prepared: bool, other: Any) -> None:
    model = prepare_for_training(packed()) if prepared else packed()
    model = get_peft_model(model, other)
    start, end = (trained(model, steps)(input_ids=IDS, labels=IDS).loss.item() for steps in (0, 20))
    assert end < start - 0.01


# ---------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("settings", [{"use_qalora": True}, {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}])
def test_variants_that_packed_layers_do_not_have_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"q_proj is packed and takes LoRA, rsLoRA and DoRA, but not .*{next(iter(settings))}"):
        adapted(**settings)


@pytest.mark.parametrize(
    ("targets", "message"),
    [(["q_proj"], r"Target module QuantLinear\(.* is not supported"), ("all-linear", "No `target_modules` passed")],
)
def test_what_peft_says_of_a_model_that_was_not_prepared(targets: Any, message: str) -> None:
    """docs/training.md explains these two messages, which are PEFT's: here to be seen when they change."""
    with pytest.raises(ValueError, match=message):
        get_peft_model(packed(), config(target_modules=targets))
