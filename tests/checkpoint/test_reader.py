"""load_pretrained: what it returns, and one clear error for everything a checkpoint can be damaged by."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchq import QuantConfig, QuantLinear, load_pretrained, quantize_, save_pretrained
from torchq.dequantize import dequantize_
from torchq.testing import sqnr_db, tiny_llama

IDS = torch.arange(3, 15)[None]
UP = "model.layers.0.mlp.up_proj"
MIXED = {"re:.*down_proj": "W8A8", "re:.*o_proj": "FP8_DYNAMIC", "re:.*v_proj": "W4A16_ASYM", "re:.*k_proj": None}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def make(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    tiny_llama(dtype=torch.bfloat16).save_pretrained(folder / "original")  # loaded again: .to(dtype) rounds rotary buffers
    model = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=torch.bfloat16)
    quantize_(model, QuantConfig("W4A16", group_size=32, **settings))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("saved")
    model = make(folder, overrides=MIXED)
    save_pretrained(model, folder / "one")
    save_pretrained(model, folder / "many", max_shard_size="20KB")
    yield model, folder


@pytest.fixture
def one(saved: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of a one-file checkpoint, to be damaged."""
    return Path(shutil.copytree(saved[1] / "one", tmp_path / "one"))


@pytest.fixture
def many(saved: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of a sharded checkpoint, to be damaged."""
    return Path(shutil.copytree(saved[1] / "many", tmp_path / "many"))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# ----------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", ["one", "many"])
def test_the_loaded_model_is_the_saved_one(saved: tuple[Any, Path], name: str) -> None:
    model, folder = saved
    loaded = load_pretrained(folder / name)
    assert type(loaded) is type(model) and not loaded.training
    expected, state = model.state_dict(), loaded.state_dict()
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert state[key].dtype == tensor.dtype and torch.equal(state[key], tensor), key
    assert torch.equal(logits(loaded), logits(model))
    for key, module in model.named_modules():
        if isinstance(module, QuantLinear):
            other = loaded.get_submodule(key)
            assert (other.scheme.weights, other.scheme.input_activations) == (
                module.scheme.weights,
                module.scheme.input_activations,
            )
            assert (other.is_native, other.compute_dtype) == (module.is_native, module.compute_dtype)
    assert loaded.quant_report == model.quant_report


def test_no_trace_of_the_loader_is_left(saved: tuple[Any, Path]) -> None:
    loaded = load_pretrained(saved[1] / "one")
    assert loaded.config.quantization_config == saved[0].config.quantization_config  # as quantize_ leaves it
    assert not getattr(loaded, "is_quantized", False)
    assert not hasattr(loaded, "hf_quantizer") and not hasattr(loaded, "quantization_method")
    loaded.float()
    assert loaded.config.to_dict().keys() == saved[0].config.to_dict().keys()


def test_a_path_a_string_and_a_device(saved: tuple[Any, Path]) -> None:
    expected = logits(saved[0])
    assert torch.equal(logits(load_pretrained(str(saved[1] / "one"))), expected)
    assert torch.equal(logits(load_pretrained(saved[1] / "one", device="cpu")), expected)
    assert torch.equal(logits(load_pretrained(saved[1] / "one", device=torch.device("cpu"))), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_another_dtype_is_for_activations_and_unquantized_weights(saved: tuple[Any, Path], dtype: torch.dtype) -> None:
    model, folder = saved
    loaded = load_pretrained(folder / "one", dtype=dtype)
    assert loaded.dtype == dtype and logits(loaded).dtype == dtype
    for name, module in loaded.named_modules():
        if isinstance(module, QuantLinear):
            assert module.compute_dtype == dtype and module.scale_dtype == torch.bfloat16
            assert torch.equal(module.dequantize(), model.get_submodule(name).dequantize())
    assert all(parameter.dtype == dtype for parameter in loaded.parameters())
    assert sqnr_db(logits(model).float(), logits(loaded).float()) > 25


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32], ids=str)
def test_dequantized(saved: tuple[Any, Path], dtype: torch.dtype | None) -> None:
    model, folder = saved
    plain = load_pretrained(folder / "one", dequantize=True, dtype=dtype)
    assert not any(isinstance(module, QuantLinear) for module in plain.modules())
    assert not hasattr(plain.config, "quantization_config") and not hasattr(plain, "quant_report")
    assert not hasattr(plain.config, "_is_quantized") and not plain.training
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            linear = plain.get_submodule(name)
            assert type(linear) is torch.nn.Linear
            assert torch.equal(linear.weight, module.dequantize(dtype or torch.bfloat16))
    assert sqnr_db(logits(model).float(), logits(plain).float()) > 20


def test_a_dequantized_model_is_saved_by_transformers_and_quantized_again(saved: tuple[Any, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = load_pretrained(saved[1] / "one", dequantize=True)
    plain.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")), logits(plain))
    report = quantize_(plain, "W8A8")
    assert len([layer for layer in report.layers if layer.status == "quantized"]) == 14


def test_dequantize_in_place(saved: tuple[Any, Path]) -> None:
    loaded = load_pretrained(saved[1] / "one")
    before = {name: module.dequantize() for name, module in loaded.named_modules() if isinstance(module, QuantLinear)}
    dequantize_(loaded)
    assert all(torch.equal(loaded.get_submodule(name).weight, weight) for name, weight in before.items())
    assert not any(p.requires_grad for name, p in loaded.named_parameters() if name.removesuffix(".weight") in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_untied_head(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_llama(tie_word_embeddings=True, dtype=dtype).save_pretrained(tmp_path / "original")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=dtype)
    embedding = model.model.embed_tokens.weight.clone()
    with pytest.warns(UserWarning, match="untied"):
        quantize_(model, QuantConfig("W4A16", group_size=32, ignore=()))
    save_pretrained(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["quantization_config"]["ignore"] == []
    loaded = load_pretrained(tmp_path / "out")
    assert isinstance(loaded.lm_head, QuantLinear)
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    assert torch.equal(logits(loaded), logits(model))
    plain = load_pretrained(tmp_path / "out", dequantize=True)
    assert plain.lm_head.weight is not plain.model.embed_tokens.weight


@pytest.mark.parametrize("ignored_name", ["lm_head", "language_model.lm_head"])
def test_a_tied_head_is_tied_whatever_the_ignore_list_calls_it(tmp_path: Path, ignored_name: str) -> None:
    model = tiny_llama(tie_word_embeddings=True, dtype=torch.bfloat16)
    quantize_(model, QuantConfig("W4A16", group_size=32))
    save_pretrained(model, tmp_path / "out")
    edit_config(tmp_path / "out", lambda config: config["quantization_config"].update(ignore=[ignored_name]))
    loaded = load_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


# ------------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_no_such_folder(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"{name} is not a folder, nor a hub id of the form 'owner/name'"):
        load_pretrained(name)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_pretrained(Path("owner/name"))


def test_missing_files(one: Path, many: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; is it a checkpoint folder\?"):
        load_pretrained(tmp_path)
    (one / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model\.safetensors; download or save the checkpoint again"):
        load_pretrained(one)
    shards = sorted(many.glob("model-*"))
    assert len(shards) > 3
    shards[1].unlink()
    shards[2].unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks {shards[1].name}, {shards[2].name}; download"):
        load_pretrained(many)


@pytest.mark.parametrize("fraction", [0, 0.0001, 0.01, 0.3, 0.9, 0.99999])
def test_truncated_files(one: Path, many: Path, fraction: float) -> None:
    for file in (one / "model.safetensors", sorted(many.glob("model-*"))[2]):
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * fraction)])
        with pytest.raises(ValueError, match=rf"{file.name} is truncated"):
            load_pretrained(file.parent)


def test_damaged_json(one: Path, many: Path) -> None:
    text = (one / "config.json").read_text()
    for damaged in (text[:-20], "", "{", '{"a": }', "\x00\x01"):
        (one / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
            load_pretrained(one)
    (one / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_pretrained(one)
    (one / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"config\.json holds no JSON object"):
        load_pretrained(one)
    (one / "config.json").write_text(text)
    index = many / "model.safetensors.index.json"
    for damaged, message in (
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {"a": "b.safetensors"}}', r"lacks b\.safetensors"),
    ):
        index.write_text(damaged)
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load_pretrained(many)
    report = one / "quant_report.json"
    for damaged, message in (("{", "not valid JSON"), ("{}", "is not a report of this torchq version"), ("[]", "no JSON object")):
        report.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            load_pretrained(one)
    report.unlink()
    assert not hasattr(load_pretrained(one), "quant_report")


def test_no_quantization_config(one: Path, saved: tuple[Any, Path]) -> None:
    with pytest.raises(ValueError, match=r"config\.json has no quantization_config; load the model with transformers instead"):
        load_pretrained(saved[1] / "original")
    edit_config(one, lambda config: config.update(quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(ValueError, match="quant_method must be 'compressed-tensors', got 'gptq'"):
        load_pretrained(one)
    edit_config(one, lambda config: config.update(quantization_config={"quant_method": "compressed-tensors"}))
    with pytest.raises(ValueError, match="no config_groups"):
        load_pretrained(one)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["FancyForCausalLM"]},
        {"architectures": []},
        {"architectures": None},
        {"architectures": ["Tensor"]},
        {"model_type": "fancy"},
        {"model_type": None},
        {"model_type": "fancy", "auto_map": {"AutoConfig": "configuration_fancy.FancyConfig"}},
    ],
)
def test_unknown_architectures(one: Path, change: dict[str, Any]) -> None:
    """Never a question on the terminal whether to run the checkpoint's own code."""
    edit_config(one, lambda config: config.update(change))
    (one / "configuration_fancy.py").write_text("raise SystemExit('ran code from a checkpoint')")
    with pytest.raises(
        ValueError, match=r"config\.json has model_type=.* and architectures=.*torchq runs no code from a checkpoint"
    ):
        load_pretrained(one)


def test_a_known_architecture_needs_no_code_of_the_checkpoint(one: Path, saved: tuple[Any, Path]) -> None:
    edit_config(one, lambda config: config.update(auto_map={"AutoConfig": "configuration_fancy.FancyConfig"}))
    (one / "configuration_fancy.py").write_text("raise SystemExit('ran code from a checkpoint')")
    assert torch.equal(logits(load_pretrained(one)), logits(saved[0]))


@pytest.mark.parametrize(
    "name",
    [f"{UP}.weight_packed", f"{UP}.weight_scale", f"{UP}.weight_shape", "model.layers.0.self_attn.v_proj.weight_zero_point",
     "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight_scale", "model.layers.0.self_attn.o_proj.weight",
     "model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"],
)  # fmt: skip
def test_missing_tensors(one: Path, name: str) -> None:
    edit_tensors(one, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"one does not fit its config\.json: 1 tensors missing from the checkpoint: {name}$"):
        load_pretrained(one)


@pytest.mark.parametrize("name", [f"{UP}.weight_g_idx", f"{UP}.weight", f"{UP}.bias", "model.layers.9.mlp.up_proj.weight", "x"])
def test_extra_tensors(one: Path, name: str) -> None:
    edit_tensors(one, lambda tensors: tensors.update({name: torch.zeros(3, dtype=torch.bfloat16)}))
    with pytest.raises(ValueError, match=rf"1 tensors in the checkpoint but not in the model: {name}$"):
        load_pretrained(one)


def test_a_missing_layer_lists_ten_names_and_counts_the_rest(one: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            del tensors[name]

    edit_tensors(one, drop)
    with pytest.raises(ValueError, match=r"\d\d tensors missing from the checkpoint: (model\.layers\.1\.\S+ ?){10}and \d+ more"):
        load_pretrained(one)


@pytest.mark.parametrize(
    "name",
    [
        f"{UP}.weight_packed",
        f"{UP}.weight_scale",
        f"{UP}.weight_shape",
        "model.layers.0.self_attn.v_proj.weight_zero_point",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.weight_scale",
        "model.layers.0.self_attn.o_proj.weight",
    ],
)
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_quantized_tensors_that_do_not_fit_the_scheme(one: Path, name: str, change: str) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.cat([tensors[name]] * 2) if change == "shape" else tensors[name].to(torch.int16)

    edit_tensors(one, damage)
    with pytest.raises(ValueError, match=rf"{name} is torch\.\w+ \[.*\] in the checkpoint, but scheme .* need torch\.\w+ \[.*\]"):
        load_pretrained(one)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight", "model.embed_tokens.weight"]
)
def test_other_tensors_of_a_wrong_shape(one: Path, name: str) -> None:
    edit_tensors(one, lambda tensors: tensors.update({name: torch.cat([tensors[name]] * 2)}))
    with pytest.raises(ValueError, match=rf"1 tensors of another shape than the model's: {name}$"):
        load_pretrained(one)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantized_weight_that_no_scheme_covers(one: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(one, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(
        ValueError, match=rf"{name} is torch\.\w+ in the checkpoint, but quantization_config has no scheme for it"
    ):
        load_pretrained(one)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_other_tensors_that_hold_integers(one: Path, name: str) -> None:
    edit_tensors(one, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ValueError, match=rf"1 tensors of integers where the model has floating point: {name}"):
        load_pretrained(one)


def test_a_scheme_that_does_not_fit_the_weights(one: Path) -> None:
    groups = "quantization_config"
    edit_config(one, lambda config: config[groups]["config_groups"]["group_0"]["weights"].update(num_bits=8))
    with pytest.raises(
        ValueError, match=r"weight_packed is torch\.int32 \[64, 8\] .* need torch\.int32 \[64, 16\]; config\.json does not"
    ):
        load_pretrained(one)


def test_a_group_size_that_does_not_divide(one: Path) -> None:
    edit_config(one, lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=48))
    with pytest.raises(ValueError, match=r"weight_scale is torch\.bfloat16 \[64, 2\]"):
        load_pretrained(one)


def test_a_dtype_that_safetensors_has_and_torchq_does_not(one: Path) -> None:
    edit_tensors(one, lambda tensors: tensors.update({"x": torch.zeros(3, dtype=torch.uint16)}))
    with pytest.raises(NotImplementedError, match=r"x in model\.safetensors has dtype U16, which is not supported"):
        load_pretrained(one)


def test_formats_that_are_not_supported(one: Path) -> None:
    edit_config(one, lambda config: config["quantization_config"].update(kv_cache_scheme={"num_bits": 8, "type": "int"}))
    with pytest.raises(NotImplementedError, match="kv_cache_scheme"):
        load_pretrained(one)


def test_weights_that_are_not_quantized_although_the_config_says_so(one: Path, saved: tuple[Any, Path]) -> None:
    """compressed-tensors' loaders accept a plain weight where a scheme matches; so does torchq, and it stays a Linear."""
    weight = load_file(saved[1] / "original" / "model.safetensors")[f"{UP}.weight"]

    def replace(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(UP)]:
            del tensors[name]
        tensors[f"{UP}.weight"] = weight

    edit_tensors(one, replace)
    loaded = load_pretrained(one)
    assert type(loaded.get_submodule(UP)) is torch.nn.Linear and torch.equal(loaded.get_submodule(UP).weight, weight)
