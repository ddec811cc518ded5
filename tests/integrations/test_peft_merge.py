"""Merging adapters into packed weights, what it loses, and adapters that start at the quantization error."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq import QuantConfig, QuantLinear, load_pretrained, prepare_for_training, quantize_, save_pretrained
from torchq.integrations.peft import LoraQuantLinear
from torchq.integrations.peft_merge import init_from_quantization_error, merge_adapters
from torchq.testing import tiny_llama

peft = pytest.importorskip("peft")

W4 = QuantConfig("W4A16", group_size=32)


def ids(count: int = 4) -> list[Tensor]:
    return list(torch.randint(3, 128, (count, 24), generator=torch.Generator().manual_seed(1)))


def adapted(config: QuantConfig | str = W4, strength: float = 0.02, prepare: dict[str, Any] | None = None, **lora: Any) -> Any:
    model = tiny_llama(attention_bias=True)
    quantize_(model, config)
    wrapped = peft.get_peft_model(
        prepare_for_training(model, **(prepare or {})),
        peft.LoraConfig(**({"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | lora)),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=generator).mul_(strength)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + strength * torch.randn(parameter.shape, generator=generator))
    return wrapped.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.stack(ids())).logits


def quiet_merge(model: Any) -> None:
    with pytest.warns(UserWarning, match="adapters are merged into packed weights: .*merge_adapters measures how much"):
        model.merge_adapter()


@pytest.mark.parametrize(
    "lora", [{}, {"use_dora": True}, {"use_rslora": True}, {"lora_bias": True, "target_modules": ["q_proj"]}]
)
def test_merging_to_float_is_exact_and_unmerging_gives_every_bit_back(lora: dict[str, Any]) -> None:
    model = adapted(prepare={"merge": "float"}, **lora)
    before, state = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    model.merge_adapter()
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    after = model.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(value, after[name]) for name, value in state.items())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("how", ["dithered", "same_grid", "new_scales"])
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_merging_and_unmerging_packed_layers(scheme: str, how: str) -> None:
    model = adapted(W4 if scheme == "W4A16" else "W8A8", strength=0.1, prepare={"merge": how})
    before = logits(model)
    quiet_merge(model)
    assert not torch.equal(logits(model), before)
    merged = [module for module in model.modules() if isinstance(module, LoraQuantLinear) and module.merged]
    assert len(merged) == 14 and all(isinstance(layer.base_layer, QuantLinear) for layer in merged)
    with model.disable_adapter():  # PEFT unmerges for it
        base = logits(model)
    model.unmerge_adapter() if any(layer.merged for layer in merged) else None
    assert torch.equal(logits(model), before)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_a_second_adapter_is_merged_with_the_first_one_into_the_original_weight() -> None:
    model = adapted(prepare={"merge": "float"})
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.second" in name:
                parameter.normal_().mul_(0.05)
    model.base_model.set_adapter(["default", "second"])
    expected = logits(model)
    model.merge_adapter(adapter_names=["default"])
    with pytest.warns(UserWarning, match="additionally merging second"):
        model.merge_adapter(adapter_names=["second"])
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_merge_and_unload_of_peft_gives_a_packed_model_that_saves_and_loads(tmp_path: Path) -> None:
    model = adapted()
    with pytest.warns(UserWarning, match="adapters are merged into packed weights"):
        merged = model.merge_and_unload()
    assert not any(isinstance(module, LoraQuantLinear) for module in merged.modules())
    expected = logits(merged)
    save_pretrained(merged, tmp_path / "merged")
    assert torch.equal(logits(load_pretrained(tmp_path / "merged")), expected)


def test_the_report_says_what_was_lost() -> None:
    kept = {}
    for how in ("float", "dithered", "same_grid"):
        model = adapted(strength=0.01)
        expected = logits(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*of what the adapters changed is left")
            merged, report = merge_adapters(model, how, evaluation=ids())
        assert report.requantize == how and report.adapter_to_merged is not None and report.adapter_to_base is not None
        assert report.adapter_to_base.mean_kl > 0
        kept[how] = report.kept
        if how == "float":
            assert not any(isinstance(module, QuantLinear) for module in merged.modules())
            assert not hasattr(merged.config, "quantization_config")
            torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
        else:
            assert len(report.layers) == 14
            assert report.summary() in merged.quant_report.warnings
    assert kept["float"] > 0.999
    assert kept["same_grid"] < 0.2  # changes of a hundredth: smaller than half a step almost everywhere
    weights = {how: merge_adapters(adapted(strength=0.01), how)[1].layers for how in ("dithered", "same_grid")}
    mean = {how: sum(layers.values()) / len(layers) for how, layers in weights.items()}
    assert mean["same_grid"] < 0.1 < 0.7 < mean["dithered"] < 1.3


def test_a_loss_beyond_the_limit_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"\d+% of what the adapters changed is left; merge to 'float' and quantize again"):
        merge_adapters(adapted(strength=0.01), "same_grid", evaluation=ids())


def test_merge_aware_training_is_training_of_the_merged_model(tmp_path: Path) -> None:
    model = adapted(prepare={"merge_aware": True}, strength=0.1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch, losses = torch.stack(ids()), []
    for _ in range(15):
        loss = model.train()(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    expected = logits(model.eval())
    merged, report = merge_adapters(model, evaluation=ids())
    assert report.requantize == "dithered" and report.kept is not None and report.kept > 0.9999
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="were trained for a dithered merge, requantize='new_scales' is another model"):
        merge_adapters(adapted(prepare={"merge_aware": True}), "new_scales")


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
@pytest.mark.parametrize("from_folder", [False, True])
def test_adapters_that_start_at_the_quantization_error(from_folder: bool, lora: dict[str, Any], tmp_path: Path) -> None:
    original = tiny_llama()
    original.save_pretrained(tmp_path)
    model = copy.deepcopy(original)
    quantize_(model, QuantConfig("W3A16", group_size=64))
    base = logits(model)
    wrapped = peft.get_peft_model(
        prepare_for_training(model), peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", **lora)
    ).eval()
    errors = init_from_quantization_error(wrapped, tmp_path if from_folder else original)
    assert len(errors) == 14 and all(after < 0.75 * before for before, after in errors.values())
    wanted = logits(original)
    assert torch.linalg.norm(logits(wrapped) - wanted) < 0.8 * torch.linalg.norm(base - wanted)


def test_bad_input_changes_nothing() -> None:
    model = adapted()
    before = logits(model)
    with pytest.raises(ValueError, match="requantize must be one of 'dithered', 'same_grid', 'new_scales', 'float', got 'nf4'"):
        merge_adapters(model, "nf4")
    with pytest.raises(ValueError, match="model must be a PeftModel, got LlamaForCausalLM; there is nothing to merge"):
        merge_adapters(model.get_base_model())
    fp8 = adapted("FP8_DYNAMIC")
    with pytest.raises(ValueError, match="q_proj: requantize='dithered' is for integer weights, got scheme FP8_DYNAMIC"):
        merge_adapters(fp8, "dithered")
    broken = adapted()
    broken.base_model.model.model.layers[1].mlp.down_proj.lora_A["default"].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="the merged weight holds NaN or inf: the adapter is broken"):
        merge_adapters(broken)
    assert not any(module.merged for module in broken.modules() if isinstance(module, LoraQuantLinear))
    with pytest.raises(ValueError, match="a DoRA adapter cannot be merged together with another one"):
        two = adapted(use_dora=True)
        two.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
        two.merge_adapter(adapter_names=["default", "second"])
    with pytest.raises(ValueError, match="the reference has no weight for"):
        init_from_quantization_error(model, tiny_llama(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"is \d+% away from the reference: it was not made from that weight, or AWQ"):
        init_from_quantization_error(model, tiny_llama(seed=3))
    with pytest.raises(ValueError, match="no packed layer has an adapter 'other'; adapters: default"):
        init_from_quantization_error(model, tiny_llama(), adapter_name="other")
    assert torch.equal(logits(model), before)
    quiet_merge(model)
    with pytest.raises(ValueError, match=r"are merged already; call model\.unmerge_adapter"):
        merge_adapters(model)
