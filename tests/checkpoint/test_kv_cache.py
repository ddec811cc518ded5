"""Scales of the key-value cache in checkpoints: torchq's, read by compressed-tensors, and llm-compressor's, read by torchq."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchq import QuantConfig, load_pretrained, quantize_, save_pretrained
from torchq.kv_scales import attention_with_scales, kv_cache_strategy, kv_scales
from torchq.testing import tiny_llama

STRATEGIES = {"fp8": "tensor", "fp8_head": "attn_head"}
# What llm-compressor 0.14 with compressed-tensors 0.19 writes.
LLM_COMPRESSOR = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": None,
    "observer_kwargs": {},
    "scale_dtype": None,
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}


def tokens() -> Tensor:
    return torch.randint(3, 128, (6, 24), generator=torch.Generator().manual_seed(0))


def quantized(kv_cache: str | None, model: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = tiny_llama(dtype=dtype) if model is None else model
    config = QuantConfig("W8A8", algorithm="rtn", kv_cache=kv_cache)
    quantize_(model, config, calibration=tokens() if kv_cache else None, progress=False)
    return model


def buffers(model: Any) -> dict[str, Tensor]:
    return {f"{name}.{kind}": module.get_buffer(kind) for name, module in attention_with_scales(model) for kind in KINDS}


KINDS = ("k_scale", "v_scale")


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys() and first
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and tensor.shape == second[name].shape and torch.equal(tensor, second[name]), (
            name
        )


@pytest.fixture(params=STRATEGIES)
def kv_cache(request: pytest.FixtureRequest) -> str:
    return request.param


# ---------------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("shards", ["5GB", "20KB"])
@pytest.mark.parametrize("by", ["torchq", "transformers"])
def test_round_trip(
    kv_cache: str, by: str, shards: str, tmp_path: Path, read_tensors: Callable[[Path], dict[str, Tensor]]
) -> None:
    model = quantized(kv_cache)
    if by == "torchq":
        save_pretrained(model, tmp_path / "out", max_shard_size=shards)
    else:
        model.save_pretrained(tmp_path / "out", max_shard_size=shards)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shards == "20KB")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    expected = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "dynamic": False}
    assert settings == expected | {"strategy": STRATEGIES[kv_cache]}
    stored = {name: tensor for name, tensor in read_tensors(tmp_path / "out").items() if name.endswith(KINDS)}
    shape = (1,) if kv_cache == "fp8" else (2, 1, 1)
    assert len(stored) == 4 and all(tensor.dtype == torch.bfloat16 and tensor.shape == shape for tensor in stored.values())
    assert_same(stored, buffers(model))
    loaded = load_pretrained(tmp_path / "out")
    assert_same(buffers(loaded), buffers(model))
    assert loaded.config.quantization_config["kv_cache_scheme"] == settings
    save_pretrained(loaded, tmp_path / "again")
    again = load_pretrained(tmp_path / "again")
    assert_same(buffers(again), buffers(model))
    assert torch.equal(loaded(tokens()).logits, again(tokens()).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_keep_their_dtype_whatever_the_model_is_loaded_in(kv_cache: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(kv_cache)
    model.model.layers[0].self_attn.v_scale.fill_(1e-10)  # 0 in float16
    save_pretrained(model, tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out", dtype=dtype)
    assert loaded.model.embed_tokens.weight.dtype == dtype
    assert_same(buffers(loaded), buffers(model))


def test_a_plain_model_out_of_it_has_none(kv_cache: str, tmp_path: Path) -> None:
    save_pretrained(quantized(kv_cache), tmp_path / "out")
    plain = load_pretrained(tmp_path / "out", dequantize=True)
    assert kv_scales(plain) == {}
    plain.save_pretrained(tmp_path / "plain")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]


def test_names_of_the_original_checkpoint(kv_cache: str, tmp_path: Path) -> None:
    """A multimodal model, which transformers loads and saves under other names than its modules have."""
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    text |= {"num_key_value_heads": 2, "vocab_size": 128, "sliding_window": 8, "max_position_embeddings": 256}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"patch_size": 8}, mm_tokens_per_image=4, image_token_index=127
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.Gemma3ForConditionalGeneration(config).eval().to(torch.bfloat16)
    ids = tokens().clamp(max=120)
    settings = QuantConfig("W8A8", algorithm="rtn", kv_cache=kv_cache, ignore=["lm_head", "re:.*vision_tower.*"])
    quantize_(model, settings, calibration=ids, progress=False)
    assert len(kv_scales(model)) == 2
    save_pretrained(model, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    layers = {name.rpartition(".self_attn.")[0] for name in weights if "language_model" in name and ".k_proj." in name}
    assert {name for name in weights if name.endswith(KINDS)} == {f"{x}.self_attn.{kind}" for x in layers for kind in KINDS}
    assert_same(buffers(load_pretrained(tmp_path / "out")), buffers(model))


# --------------------------------------------------------------------------------------------------------- compressed-tensors


def test_compressed_tensors_reads_it(kv_cache: str, tmp_path: Path) -> None:
    """Its own parser takes the settings, and its own initialisation makes parameters of the names, shapes and dtype of ours."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle")
    save_pretrained(quantized(kv_cache), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(settings)
    assert config.kv_cache_scheme.strategy == STRATEGIES[kv_cache] and config.kv_cache_scheme.dynamic is False
    plain = tiny_llama(dtype=torch.bfloat16)
    module = plain.model.layers[0].self_attn
    initialize = pytest.importorskip("compressed_tensors.quantization.lifecycle.initialize")
    modeling = pytest.importorskip("compressed_tensors.modeling")
    scheme = quantization.QuantizationScheme(targets=["re:.*self_attn$"], input_activations=config.kv_cache_scheme)
    modeling.initialize_hooked_kv_cache(plain, module)
    initialize.initialize_attn_qparams(module, scheme, force_zero_point=False)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    made = {name: parameter for name, parameter in module.named_parameters() if name in KINDS}
    assert made.keys() == set(KINDS) and lifecycle is not None
    for kind, parameter in made.items():
        stored = weights[f"model.layers.0.self_attn.{kind}"]
        assert (stored.shape, stored.dtype) == (parameter.shape, parameter.dtype)
    missing = module.load_state_dict({kind: weights[f"model.layers.0.self_attn.{kind}"] for kind in KINDS}, strict=False)
    assert not missing.unexpected_keys

    # What its quantized cache makes of a key is what the scales mean.
    key = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    scale = module.k_scale.detach()
    theirs = forward.fake_quantize(key, scale, None, scheme.input_activations)
    scale = scale.view(-1, 1, 1)
    ours = ((key / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.bfloat16) * scale).to(torch.bfloat16)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------- llm-compressor's checkpoints


@pytest.fixture
def foreign(tmp_path: Path, kv_cache: str) -> Path:
    """A checkpoint in llm-compressor's layout, by hand: its spelling of the scheme, scales that torchq did not measure."""
    save_pretrained(quantized(None), tmp_path / "out")
    path = tmp_path / "out"
    edit_config(path, lambda q: q.update(kv_cache_scheme=LLM_COMPRESSOR | {"strategy": STRATEGIES[kv_cache]}, version="0.19.0"))
    shape = (1,) if kv_cache == "fp8" else (2, 1, 1)
    scales = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) + 0.01
    names = [f"model.layers.{layer}.self_attn.{kind}" for layer in (0, 1) for kind in KINDS]
    edit_tensors(path, lambda tensors: tensors.update(zip(names, scales.clone().unbind(), strict=True)))
    return path


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def test_llm_compressor_checkpoint(foreign: Path, kv_cache: str, tmp_path: Path) -> None:
    loaded = load_pretrained(foreign)
    stored = {name: tensor for name, tensor in load_file(foreign / "model.safetensors").items() if name.endswith(KINDS)}
    assert_same(buffers(loaded), stored)
    assert kv_cache_strategy(loaded) == STRATEGIES[kv_cache]
    save_pretrained(loaded, tmp_path / "again")
    assert_same(buffers(load_pretrained(tmp_path / "again")), stored)


def test_zero_points_of_older_versions(foreign: Path) -> None:
    """Written for symmetric schemes too, in fp8: all 0, and dropped."""

    def add(tensors: dict[str, Tensor], value: float = 0.0) -> None:
        for name in [name for name in tensors if name.endswith(KINDS)]:
            tensors[name.replace("_scale", "_zero_point")] = torch.full(tensors[name].shape, value).to(torch.float8_e4m3fn)

    edit_tensors(foreign, add)
    loaded = load_pretrained(foreign)
    assert len(buffers(loaded)) == 4 and not any("zero_point" in name for name in loaded.state_dict())
    edit_tensors(foreign, lambda tensors: add(tensors, 2.0))
    with pytest.raises(
        ValueError, match=r"self_attn\.k_zero_point is not 0 in the checkpoint, although its kv_cache_scheme is symm"
    ):
        load_pretrained(foreign)


LAST = "model.layers.1.self_attn."


def drop_all(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(KINDS)]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_all, r"holds no k_scale and v_scale of this model's attention modules"),
        (lambda tensors: tensors.pop(LAST + "v_scale"), r"layers\.1\.self_attn have no k_scale and v_scale in the checkpoint"),
        (lambda tensors: tensors.update({LAST + "v_scale": torch.ones(3)}), r"v_scale is torch\.float32 \[3\] in the checkpoint"),
        (lambda tensors: tensors.update({LAST + "v_scale": tensors[LAST + "v_scale"].int()}), r"v_scale is torch\.int32 \["),
        (lambda tensors: tensors[LAST + "v_scale"].zero_(), r"layers\.1\.self_attn\.v_scale is not positive and finite"),
        (lambda tensors: tensors[LAST + "k_scale"].fill_(torch.nan), r"layers\.1\.self_attn\.k_scale is not positive and"),
    ],
)
def test_damaged_scales(foreign: Path, change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    edit_tensors(foreign, change)
    with pytest.raises(ValueError, match=message):
        load_pretrained(foreign)


def test_scales_without_a_scheme(foreign: Path) -> None:
    edit_config(foreign, lambda q: q.update(kv_cache_scheme=None))
    with pytest.raises(
        ValueError, match=r"4 tensors in the checkpoint but not in the model: model\.layers\.0\.self_attn\.k_scale"
    ):
        load_pretrained(foreign)


def test_other_schemes_are_refused(foreign: Path) -> None:
    edit_config(foreign, lambda q: q["kv_cache_scheme"].update(type="int"))
    with pytest.raises(
        NotImplementedError, match=r"must be static symmetric fp8 .* got .*'type': 'int'.*set kv_cache_scheme to null"
    ):
        load_pretrained(foreign)


def test_deepcopy_of_a_loaded_model(foreign: Path) -> None:
    loaded = load_pretrained(foreign)
    assert_same(buffers(copy.deepcopy(loaded)), buffers(loaded))
