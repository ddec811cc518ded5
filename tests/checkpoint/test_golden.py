"""Checkpoints that llm-compressor wrote: read exactly, written again exactly, and reproduced from the original weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from torchq import RTN, QuantArgs, QuantConfig, QuantLinear, Scheme, load_pretrained, quantize_, save_pretrained
from torchq.algorithms.rtn import quantize_weight
from torchq.checkpoint.schema import read_config
from torchq.scheme import resolve_scheme
from torchq.testing import sqnr_db

LAYERS = 7
IDS = torch.arange(3, 15)[None]
FP8_WEIGHT_ONLY = Scheme(QuantArgs(8, "float", strategy="channel"))

# folder -> how torchq makes the same from the original
CONFIGS: dict[str, dict[str, Any] | None] = {
    "w4a16-g64": {"scheme": "W4A16", "group_size": 64},
    "w4a16-g64-fp16": {"scheme": "W4A16", "group_size": 64},
    "w4a16-g128": {"scheme": "W4A16"},
    "w4a16-asym-g64": {"scheme": "W4A16_ASYM", "group_size": 64},
    "w4a16-channel": {"scheme": "W4A16", "group_size": -1},
    "w4a16-asym-channel": {"scheme": "W4A16_ASYM", "group_size": -1},
    "w8a16-g128": {"scheme": "W8A16"},
    "w8a16-channel": {"scheme": "W8A16", "group_size": -1},
    "w3a16-g64": {"scheme": "W3A16", "group_size": 64},
    "w8a8": {"scheme": "W8A8"},
    "fp8-dynamic": {"scheme": "FP8_DYNAMIC"},
    "fp8-block": {"scheme": "FP8_BLOCK"},
    "fp8-weight-only": {"scheme": FP8_WEIGHT_ONLY},
    "mixed-fp8-attn-w4a16-mlp": {"scheme": "W4A16", "overrides": {"re:.*self_attn": "FP8_DYNAMIC"}},
    "fp8-static": None,
    "gptq-w4a16-g64": None,
}


def quantized(model: torch.nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(actual[name], tensor), name


def dtype_of(slug: str) -> torch.dtype:
    return torch.float16 if slug.endswith("fp16") else torch.bfloat16


def test_every_reference_is_tested(golden: Path) -> None:
    assert CONFIGS.keys() | {"original"} == {folder.name for folder in golden.iterdir()}


@pytest.mark.parametrize("slug", CONFIGS)
def test_weights_are_those_that_compressed_tensors_reads(
    golden: Path, slug: str, decompress: Callable[[Path], dict[str, Tensor]]
) -> None:
    model, expected = load_pretrained(golden / slug), decompress(golden / slug)
    layers = quantized(model)
    assert len(layers) == LAYERS and layers.keys() == expected.keys()
    for name, layer in layers.items():
        weight = layer.dequantize()
        assert weight.dtype == expected[name].dtype == dtype_of(slug)
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("slug", CONFIGS)
def test_transformers_and_torchq_load_the_same_weights(golden: Path, slug: str) -> None:
    """transformers 5.24 loads asymmetric ones only with dequantize=True, and mixed ones only without."""
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if "asym" in slug else {}
    theirs = AutoModelForCausalLM.from_pretrained(golden / slug, dtype="auto", **options).eval()
    ours = load_pretrained(golden / slug)
    with torch.no_grad():
        expected = theirs(IDS).logits  # decompresses
        logits = ours(IDS).logits
    for name, layer in quantized(ours).items():
        assert torch.equal(layer.dequantize(), theirs.get_submodule(name).weight), name
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    acts = any(layer.scheme.input_activations is not None for layer in quantized(ours).values())
    assert sqnr_db(expected.float(), logits.float()) > (20 if acts else 35)


@pytest.mark.parametrize("slug", CONFIGS)
def test_the_state_dict_is_the_checkpoint(golden: Path, slug: str, read_tensors: Callable[[Path], dict[str, Tensor]]) -> None:
    model, expected = load_pretrained(golden / slug), read_tensors(golden / slug)
    state = dict(model.state_dict())
    assert torch.equal(state.pop("lm_head.weight"), state["model.embed_tokens.weight"])  # tied: in the file once
    assert_same_tensors(state, expected)


@pytest.mark.parametrize("slug", CONFIGS)
def test_what_was_loaded_is_saved_again_unchanged(
    golden: Path, slug: str, tmp_path: Path, read_tensors: Callable[[Path], dict[str, Tensor]]
) -> None:
    model = load_pretrained(golden / slug)
    save_pretrained(model, tmp_path / "out")
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(golden / slug))
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (golden / slug, tmp_path / "out"))
    old, new = (read_config(config.pop("quantization_config")) for config in (theirs, ours))
    for name in [*quantized(model), "lm_head"]:
        assert new.scheme_for(name, {"Linear"}) == old.scheme_for(name, {"Linear"})
    assert {key: value for key, value in ours.items() if key in theirs} == theirs | {
        "transformers_version": ours["transformers_version"]
    }
    again = load_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("slug", [slug for slug, config in CONFIGS.items() if config])
def test_rounding_with_absmax_scales_reproduces_llmcompressor(
    golden: Path, slug: str, read_tensors: Callable[[Path], dict[str, Tensor]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(golden / "original", dtype=dtype_of(slug))
    settings = CONFIGS[slug]
    assert settings is not None
    quantize_(model, QuantConfig(algorithm=RTN(scale_search="absmax"), **settings))
    state, expected = dict(model.state_dict()), read_tensors(golden / slug)
    state.pop("lm_head.weight")
    if "asym" in slug:  # groups of zeros have any zero point, llm-compressor's comes from 0 / 0: compare what it stands for
        reference = quantized(load_pretrained(golden / slug))
        for name, layer in quantized(model).items():
            assert torch.equal(layer.dequantize(), reference[name].dequantize())
            q, scale, zero_point = layer.quantized_tensors()
            expected_q, _, expected_zero_point = reference[name].quantized_tensors()
            assert zero_point is not None and expected_zero_point is not None
            zero = (layer.dequantize().unflatten(1, (scale.shape[1], -1)) == 0).all(-1)
            assert zero.sum() < zero.numel() / 100
            assert torch.equal(zero_point[~zero], expected_zero_point[~zero])
            groups, expected_groups = (t.unflatten(1, (scale.shape[1], -1)) for t in (q, expected_q))
            assert torch.equal(groups[~zero], expected_groups[~zero])
        state, expected = ({k: v for k, v in d.items() if not k.endswith(("_packed", "_point"))} for d in (state, expected))
    assert_same_tensors(state, expected)


def test_static_fp8_weights_are_reproduced_and_input_scales_read(
    golden: Path, read_tensors: Callable[[Path], dict[str, Tensor]]
) -> None:
    original = AutoModelForCausalLM.from_pretrained(golden / "original", dtype=torch.bfloat16)
    tensors, model = read_tensors(golden / "fp8-static"), load_pretrained(golden / "fp8-static")
    for name, layer in quantized(model).items():
        weight = original.get_submodule(name).weight.detach()
        made, _ = quantize_weight(weight, resolve_scheme("FP8"), RTN(scale_search="absmax"))
        assert torch.equal(made.q, tensors[f"{name}.weight"]) and torch.equal(made.scale, tensors[f"{name}.weight_scale"])
        assert layer.input_scale.shape == (1,)
        assert torch.equal(layer.input_scale, tensors[f"{name}.input_scale"])


@pytest.mark.parametrize("slug", CONFIGS)
def test_dequantized_on_loading(golden: Path, slug: str) -> None:
    packed, model = load_pretrained(golden / slug), load_pretrained(golden / slug, dequantize=True)
    assert not quantized(model) and not hasattr(model.config, "quantization_config")
    for name, layer in quantized(packed).items():
        linear = model.get_submodule(name)
        assert type(linear) is torch.nn.Linear and torch.equal(linear.weight, layer.dequantize())
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


def test_shapes_that_torchq_writes_are_shapes_that_llmcompressor_writes(golden: Path) -> None:
    """The zero points of an asymmetric layer are packed along out_features."""
    layer = quantized(load_pretrained(golden / "w4a16-asym-g64"))["model.layers.0.mlp.up_proj"]
    tensors = layer.canonical_tensors()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "weight_packed": (256, 16),
        "weight_scale": (256, 2),
        "weight_shape": (2,),
        "weight_zero_point": (32, 2),
    }
    assert tensors["weight_zero_point"].dtype == torch.int32 and tensors["weight_shape"].tolist() == [256, 128]
