"""PEFT on packed models, through PEFT's own API: the same as PEFT on the dequantized model."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QuantConfig, dequantize_, load_pretrained, prepare_for_training, quantize_
from torchq.integrations.peft import LoraQuantLinear
from torchq.testing import sqnr_db, tiny_llama

peft = pytest.importorskip("peft")

SCHEMES = {
    "W4A16": QuantConfig("W4A16", group_size=32),
    "W8A8": QuantConfig("W8A8"),
    "FP8_DYNAMIC": QuantConfig("FP8_DYNAMIC"),
    "NF4": QuantConfig("NF4"),
}


def packed(scheme: str = "W4A16", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    model = tiny_llama(dtype=dtype)
    quantize_(model, SCHEMES[scheme])
    return prepare_for_training(model, **settings)


def config(**settings: Any) -> Any:
    return peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings))


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Give the adapters values (B starts at zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5 / 4)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


def ids(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(1))


def lora_layers(model: nn.Module) -> dict[str, LoraQuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraQuantLinear)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r".*layers\.1\..*(up|gate)_proj"},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        {"init_lora_weights": "gaussian"},
        {"exclude_modules": ["o_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_logits_and_gradients_are_those_of_peft_on_the_dequantized_model(settings: dict[str, Any]) -> None:
    model = tiny_llama()
    quantize_(model, SCHEMES["W4A16"])
    plain = copy.deepcopy(model)
    dequantize_(plain)
    ours = peft.get_peft_model(prepare_for_training(model), config(**settings))
    theirs = peft.get_peft_model(plain, config(**settings))
    randomize(ours)
    missing = theirs.load_state_dict(
        {name: value for name, value in ours.state_dict().items() if "lora_" in name}, strict=False
    ).unexpected_keys
    assert not missing
    results = []
    for wrapped in (ours.train(), theirs.train()):
        output = wrapped(ids(), labels=ids())
        output.loss.backward()
        grads = {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}
        results.append((output.logits, grads))
    (logits, grads), (expected_logits, expected_grads) = results
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert grads.keys() == expected_grads.keys() and grads
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_new_adapter_changes_nothing_and_training_it_lowers_the_loss(scheme: str) -> None:
    model = packed(scheme)
    with torch.no_grad():
        before = model.eval()(ids()).logits
    wrapped = peft.get_peft_model(model, config())
    assert torch.equal(wrapped(ids()).logits, before)
    assert {p.dtype for p in wrapped.parameters() if p.requires_grad} == {torch.float32}
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        loss = wrapped.train()(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    with wrapped.disable_adapter():
        assert torch.equal(wrapped.eval()(ids()).logits, before)


def test_peft_says_nothing_of_a_prepared_model() -> None:
    model = packed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)  # PEFT's own
        warnings.filterwarnings("ignore", message="You are trying to modify a model with PEFT for a second time")
        wrapped = peft.get_peft_model(model, config())
    assert len(lora_layers(wrapped)) == 14 and len(wrapped.targeted_module_names) == 14


def test_dropout_lora_bias_and_float16_take_the_paths_of_peft() -> None:
    model = packed(dtype=torch.float16)
    wrapped = peft.get_peft_model(model, config(lora_dropout=0.5))
    randomize(wrapped)
    torch.manual_seed(0)
    first = wrapped.train()(ids()).logits
    second = wrapped(ids()).logits
    assert not torch.equal(first, second)
    assert torch.equal(wrapped.eval()(ids()).logits, wrapped(ids()).logits)
    model = tiny_llama(attention_bias=True)
    quantize_(model, SCHEMES["W4A16"])
    wrapped = peft.get_peft_model(prepare_for_training(model), config(lora_bias=True, target_modules=["q_proj"]))
    with torch.no_grad():
        before = wrapped.eval()(ids()).logits
        for layer in lora_layers(wrapped).values():
            if layer.lora_B:
                layer.lora_B["default"].bias.fill_(0.5)
        assert not torch.equal(wrapped(ids()).logits, before)


def test_an_adapter_moves_between_the_packed_and_the_16_bit_base(tmp_path: Path) -> None:
    model = tiny_llama()
    original = copy.deepcopy(model)
    quantize_(model, SCHEMES["W4A16"])
    model.save_pretrained(tmp_path / "packed")
    wrapped = peft.get_peft_model(prepare_for_training(model), config())
    randomize(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    expected = wrapped.eval()(ids()).logits
    assert {file.name for file in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(file.stat().st_size for file in (tmp_path / "adapter").iterdir()) < 60_000

    again = prepare_for_training(load_pretrained(tmp_path / "packed"))
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(ids()).logits, expected, rtol=1e-5, atol=1e-5)
    on_float = peft.PeftModel.from_pretrained(original, tmp_path / "adapter").eval()
    assert sqnr_db(on_float(ids()).logits.detach(), expected.detach()) > 10
    trainable = peft.PeftModel.from_pretrained(packed(), tmp_path / "adapter", is_trainable=True)
    assert sum(p.requires_grad for p in trainable.parameters()) == 28


def test_several_adapters() -> None:
    wrapped = peft.get_peft_model(packed(), config(), adapter_name="first")
    wrapped.add_adapter("second", config(r=2, use_rslora=True))
    randomize(wrapped)
    wrapped.eval()
    outputs = {}
    for name in ("first", "second"):
        wrapped.set_adapter(name)
        outputs[name] = wrapped(ids()).logits
    assert not torch.allclose(outputs["first"], outputs["second"])
    mixed = wrapped(ids(), adapter_names=["first", "second"]).logits
    torch.testing.assert_close(mixed[0], outputs["first"][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[1], outputs["second"][1], rtol=1e-4, atol=1e-4)
    wrapped.base_model.set_adapter(["first", "second"])
    assert not torch.allclose(wrapped(ids()).logits, outputs["second"])
    wrapped.delete_adapter("second")
    wrapped.set_adapter("first")
    torch.testing.assert_close(wrapped(ids()).logits, outputs["first"])


def test_unload_gives_the_packed_model_back() -> None:
    model = packed()
    with torch.no_grad():
        before = model.eval()(ids()).logits
    wrapped = peft.get_peft_model(model, config(target_modules=["q_proj"]))
    randomize(wrapped)
    plain = wrapped.unload()
    assert not lora_layers(plain)
    assert sum(isinstance(module, torchq.QuantLinear) for module in plain.modules()) == 14
    assert torch.equal(plain.eval()(ids()).logits, before)


def test_gpt2_conv1d_layers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)).eval()
    quantize_(model, SCHEMES["W4A16"])
    plain = copy.deepcopy(model)
    dequantize_(plain)
    settings = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    ours = peft.get_peft_model(prepare_for_training(model), config(**settings)).eval()
    theirs = peft.get_peft_model(plain, config(**settings)).eval()
    randomize(ours)
    theirs.load_state_dict({name: value for name, value in ours.state_dict().items() if "lora_" in name}, strict=False)
    expected = theirs(ids()).logits
    torch.testing.assert_close(ours(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    for layer in lora_layers(ours).values():
        layer.merge_to = "float"
    merged = ours.merge_and_unload()
    torch.testing.assert_close(merged(ids()).logits, expected, rtol=1e-4, atol=1e-4)


def test_fused_siblings_and_adapters() -> None:
    model = tiny_llama()
    quantize_(model, QuantConfig("W4A16", group_size=32, fuse_siblings=True))
    wrapped = peft.get_peft_model(prepare_for_training(model), config())
    other = peft.get_peft_model(packed(), config())
    randomize(wrapped), randomize(other)
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(ids()).logits, other.eval()(ids()).logits, rtol=1e-4, atol=1e-4)
    wrapped.train()(ids(), labels=ids()).loss.backward()


# --------------------------------------------------------------------------------------------------------------------- errors


def test_a_model_that_is_not_quantized_or_prepared_twice() -> None:
    with pytest.raises(ValueError, match="nothing in the model is quantized; call quantize_ first, or use PEFT alone"):
        prepare_for_training(tiny_llama())
    model = packed()
    with pytest.raises(ValueError, match=r"has LoRA layers already .*call prepare_for_training once, before get_peft_model"):
        prepare_for_training(model)


def test_training_without_adapters_is_an_error_that_says_what_to_do() -> None:
    model = packed().train()
    with pytest.raises(ValueError, match=r"nothing in the model is trainable: .*get_peft_model"):
        model(ids(), labels=ids())
    with torch.no_grad():
        model(ids())
    model.eval()(ids())
    wrapped = peft.get_peft_model(model.train(), config())
    wrapped(ids(), labels=ids()).loss.backward()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
def test_initializations_that_change_the_base_weight(init: str) -> None:
    settings = {"init_lora_weights": init}
    if init == "loftq":
        pytest.importorskip("scipy", reason="PEFT asks for it")
        settings["loftq_config"] = peft.LoftQConfig(loftq_bits=4)  # type: ignore[assignment]
    with pytest.raises((ValueError, TypeError), match=r"would change the packed weight of .*init_from_quantization_error"):
        peft.get_peft_model(packed(), config(**settings))


def test_settings_that_contradict_each_other() -> None:
    model = tiny_llama()
    quantize_(model, SCHEMES["W4A16"])
    with pytest.raises(ValueError, match="merge_aware=True trains for a dithered merge: use merge='dithered', got merge='float'"):
        prepare_for_training(model, merge_aware=True, merge="float")
    with pytest.raises(ValueError, match="merge must be one of 'dithered', 'same_grid', 'new_scales', 'float', got 'nearest'"):
        prepare_for_training(model, merge="nearest")  # type: ignore[arg-type]
    assert not lora_layers(model)
    fp8 = tiny_llama()
    quantize_(fp8, "FP8_DYNAMIC")
    with pytest.raises(ValueError, match="q_proj: requantize='dithered' is for integer weights, got scheme FP8_DYNAMIC"):
        prepare_for_training(fp8, merge_aware=True)
    assert all(parameter.requires_grad for parameter in fp8.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora=True does not go with merge-aware training"),
        ({"lora_dropout": 0.1}, "no place for dropout; use LoraConfig\\(lora_dropout=0\\)"),
    ],
)
def test_what_merge_aware_training_cannot_do(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(packed(merge_aware=True), config(**settings)).train()(ids())


def test_half_and_requires_grad_on_a_packed_model_leave_integers_alone() -> None:
    wrapped = peft.get_peft_model(packed(), config())
    before = {name: value.clone() for name, value in wrapped.state_dict().items() if "weight_packed" in name}
    wrapped.half().requires_grad_(True)
    after = wrapped.state_dict()
    assert before and all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.is_floating_point() for parameter in wrapped.parameters())
