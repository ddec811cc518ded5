"""Models of many architectures: quantized, run, saved, and loaded again by torchq and by transformers itself."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torchq import QuantConfig, QuantLinear, load_pretrained, quantize_, save_pretrained
from torchq.testing import sqnr_db

IDS = torch.arange(3, 15)[None]
TEXT = {"input_ids": IDS}
SEQ2SEQ = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
PIXELS = {"pixel_values": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
SOUND = {
    "input_features": torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(0)),
    "decoder_input_ids": IDS[:, :5],
}

COMMON = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
LLM = COMMON | dict(num_key_value_heads=2)
ONE_LAYER = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4)
BART = ONE_LAYER | dict(d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=128, bos_token_id=1, eos_token_id=2,
                        pad_token_id=0, decoder_start_token_id=1)  # fmt: skip
T5 = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=128, decoder_start_token_id=0)
VISION = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8)

# name -> (model class, config, input, layers that are quantized)
MODELS: dict[str, tuple[str, Callable[[], Any], dict[str, Tensor], int]] = {
    "llama": ("LlamaForCausalLM", lambda: hf.LlamaConfig(**LLM, attention_bias=True), TEXT, 14),
    "llama-classifier": ("LlamaForSequenceClassification", lambda: hf.LlamaConfig(**LLM, num_labels=3), TEXT, 15),
    "llama-base": ("LlamaModel", lambda: hf.LlamaConfig(**LLM), TEXT, 14),
    "qwen3": ("Qwen3ForCausalLM", lambda: hf.Qwen3Config(**LLM, head_dim=16, tie_word_embeddings=True), TEXT, 14),
    "gemma3": ("Gemma3ForCausalLM", lambda: hf.Gemma3TextConfig(**LLM, head_dim=16, sliding_window=8), TEXT, 14),
    "phi3": ("Phi3ForCausalLM", lambda: hf.Phi3Config(**LLM), TEXT, 8),
    "gpt2": ("GPT2LMHeadModel", lambda: hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64), TEXT, 8),
    "opt": ("OPTForCausalLM", lambda: hf.OPTConfig(**COMMON, ffn_dim=128, word_embed_proj_dim=32), TEXT, 14),
    "gpt-neox": ("GPTNeoXForCausalLM", lambda: hf.GPTNeoXConfig(**COMMON), TEXT, 8),
    "bert-mlm": ("BertForMaskedLM", lambda: hf.BertConfig(**COMMON), TEXT, 13),
    "bert-classifier": ("BertForSequenceClassification", lambda: hf.BertConfig(**COMMON, num_labels=3), TEXT, 14),
    "albert": ("AlbertForMaskedLM", lambda: hf.AlbertConfig(**COMMON, embedding_size=32), TEXT, 8),
    "t5": ("T5ForConditionalGeneration", lambda: hf.T5Config(**T5), SEQ2SEQ, 32),
    "t5-gated-untied": (
        "T5ForConditionalGeneration",
        lambda: hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        SEQ2SEQ,
        36,
    ),
    "bart": ("BartForConditionalGeneration", lambda: hf.BartConfig(**BART, max_position_embeddings=64), SEQ2SEQ, 16),
    "whisper": (
        "WhisperForConditionalGeneration",
        lambda: hf.WhisperConfig(**BART, num_mel_bins=16, max_source_positions=20, max_target_positions=20),
        SOUND,
        16,
    ),
    "vit": ("ViTForImageClassification", lambda: hf.ViTConfig(**VISION, num_labels=5), PIXELS, 7),
    "clip-vision": ("CLIPVisionModel", lambda: hf.CLIPVisionConfig(**VISION), PIXELS, 6),
    "mixtral": ("MixtralForCausalLM", lambda: hf.MixtralConfig(**LLM, num_local_experts=4), TEXT, 8),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        lambda: hf.Qwen3MoeConfig(**LLM, head_dim=16, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2),
        TEXT,
        8,
    ),
}
EXPERTS = ("mixtral", "qwen3-moe")


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tiny random model, built in ``dtype``: casting it afterwards would round rotary buffers that loading does not."""
    kind, config, _, _ = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(hf, kind)._from_config(config(), dtype=dtype).eval()


@torch.no_grad()
def run(model: Any, name: str) -> Tensor:
    output = model(**{key: x.to(model.dtype) if x.is_floating_point() else x for key, x in MODELS[name][2].items()})
    return output.logits if hasattr(output, "logits") else output[0]


def quantize(model: Any, config: QuantConfig, *, experts: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if experts:
            warnings.filterwarnings("ignore", message=".*stay in 16 bits.*")
        return quantize_(model, config)


def quantized(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def shapes_on_disk(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 - no dict
    return shapes


def unquantized_names(folder: Path) -> set[str]:
    """The names that the tensors of a quantized checkpoint had before."""
    names = set()
    for name in shapes_on_disk(folder):
        module, _, kind = name.rpartition(".")
        quantized = kind in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        names.add(f"{module}.weight" if quantized else name)
    return names


def assert_same_state(model: nn.Module, expected: nn.Module) -> None:
    state, expected_state = model.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name


# ------------------------------------------------------------------------------------------------------ one after the other


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8"])
@pytest.mark.parametrize("name", MODELS)
def test_quantize_run_save_load(name: str, scheme: str, tmp_path: Path) -> None:
    model = build(name)
    before, num_parameters = run(model, name), sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "original")
    report = quantize(model, QuantConfig(scheme, group_size=32 if "A16" in scheme else None), experts=name in EXPERTS)
    assert len(quantized(model)) == MODELS[name][3]
    assert report.num_parameters == num_parameters == sum(layer.num_parameters for layer in report.layers)
    assert any(layer.status == "skipped" for layer in report.layers) == (name in EXPERTS)
    after = run(model, name)
    assert sqnr_db(before.float(), after.float()) > 8

    save_pretrained(model, tmp_path / "out")
    assert unquantized_names(tmp_path / "out") == set(shapes_on_disk(tmp_path / "original"))
    loaded = load_pretrained(tmp_path / "out")
    assert type(loaded) is type(model)
    assert_same_state(loaded, model)
    assert torch.equal(run(loaded, name), after)

    plain = load_pretrained(tmp_path / "out", dequantize=True)
    assert not quantized(plain) and not hasattr(plain.config, "quantization_config")
    for key, layer in quantized(model).items():
        module = plain.get_submodule(key)
        assert type(module) is (Conv1D if name == "gpt2" else nn.Linear)
        weight = module.weight.t() if name == "gpt2" else module.weight
        assert torch.equal(weight, layer.dequantize())
    assert sqnr_db(after.float(), run(plain, name).float()) > (35 if "A16" in scheme else 15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-mlm", "t5", "whisper", "qwen3"])
def test_other_dtypes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path / "original")
    model = getattr(hf, MODELS[name][0]).from_pretrained(tmp_path / "original", dtype=dtype).eval()
    before = run(model, name)
    quantize(model, QuantConfig("W4A16", group_size=32))
    after = run(model, name)
    assert after.dtype == before.dtype == dtype and sqnr_db(before.float(), after.float()) > 8
    save_pretrained(model, tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out")
    assert_same_state(loaded, model)
    assert torch.equal(run(loaded, name), after)
    for key, layer in quantized(model).items():
        other = quantized(loaded)[key]
        assert (other.compute_dtype, other.scale_dtype) == (layer.compute_dtype, layer.scale_dtype)


def test_fp8_on_several_architectures(tmp_path: Path) -> None:
    for name in ("phi3", "gpt2", "bert-classifier", "vit"):
        model = build(name)
        before = run(model, name)
        quantize(model, QuantConfig("FP8_DYNAMIC"))
        assert sqnr_db(before.float(), run(model, name).float()) > 15
        save_pretrained(model, tmp_path / name)
        assert torch.equal(run(load_pretrained(tmp_path / name), name), run(model, name))


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC"])
def test_t5_keeps_wo_in_float32(scheme: str, tmp_path: Path) -> None:
    """transformers keeps it in float32 in a float16 model: so must scales, activations, and what is dequantized."""
    build("t5").save_pretrained(tmp_path / "original")
    model = hf.T5ForConditionalGeneration.from_pretrained(tmp_path / "original", dtype=torch.float16).eval()
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    quantize(model, QuantConfig(scheme, group_size=32 if scheme == "W4A16" else None))
    save_pretrained(model, tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out")
    assert_same_state(loaded, model)
    for key, layer in quantized(loaded).items():
        dtype = torch.float32 if key.endswith(".wo") else torch.float16
        assert layer.scale_dtype == layer.compute_dtype == dtype, key
    if scheme != "FP8_DYNAMIC":  # there T5 casts to weight.dtype
        assert torch.equal(run(loaded, "t5"), run(model, "t5"))
    for options in ({}, {"dtype": torch.float16}):
        plain = load_pretrained(tmp_path / "out", dequantize=True, **options)
        assert plain.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
        assert plain.encoder.block[0].layer[0].SelfAttention.q.weight.dtype == torch.float16
        assert run(plain, "t5").isfinite().all()


def test_generate_and_memory_footprint(tmp_path: Path) -> None:
    model = build("llama")
    full = model.get_memory_footprint()
    quantize(model, QuantConfig("W4A16", group_size=32))
    assert model.get_memory_footprint() < 0.55 * full  # the embeddings stay in 16 bits
    tokens = model.generate(IDS, max_new_tokens=5, do_sample=False)
    save_pretrained(model, tmp_path / "out")
    assert torch.equal(load_pretrained(tmp_path / "out").generate(IDS, max_new_tokens=5, do_sample=False), tokens)
    assert tokens.shape[1] > IDS.shape[1]


# ------------------------------------------------------------------------------------------------- transformers' own loader


DEQUANTIZES_WHILE_LOADING = hasattr(hf.integrations.compressed_tensors, "CompressedTensorsDequantize")
THEIRS = ["llama", "llama-classifier", "qwen3", "phi3", "opt", "gpt-neox", "bert-mlm", "t5", "whisper", "vit", *EXPERTS]


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("name", THEIRS)
def test_transformers_reads_what_torchq_writes(name: str, dequantize: bool, tmp_path: Path) -> None:
    """Where it can: with an integer scheme, transformers takes every expert for a packed one."""
    if name == "t5" and not (dequantize and DEQUANTIZES_WHILE_LOADING):
        pytest.skip("transformers' T5 initializes tied embeddings anew, and reads the weights of compressed layers for that")
    model = build(name)
    scheme = QuantConfig("FP8_DYNAMIC") if name in EXPERTS else QuantConfig("W4A16", group_size=32)
    quantize(model, scheme, experts=name in EXPERTS)
    save_pretrained(model, tmp_path / "out")
    options = {"quantization_config": hf.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    kind = getattr(hf, MODELS[name][0])
    theirs, info = kind.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits = run(theirs.eval(), name)
    for key, layer in quantized(model).items():
        assert torch.equal(theirs.get_submodule(key).weight, layer.dequantize()), key
    for key, parameter in model.named_parameters():
        assert torch.equal(theirs.get_parameter(key), parameter), key
    assert sqnr_db(logits.float(), run(model, name).float()) > (20 if name in EXPERTS else 35)


@pytest.mark.parametrize("overrides", [{"re:.*self_attn": "FP8_DYNAMIC"}, {"re:.*down_proj": "W8A16", "re:.*o_proj": None}])
def test_transformers_reads_mixed_schemes(overrides: dict[str, Any], tmp_path: Path) -> None:
    model = build("llama")
    quantize(model, QuantConfig("W4A16", group_size=32, overrides=overrides))
    save_pretrained(model, tmp_path / "out")
    theirs = hf.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    run(theirs, "llama")
    for key, layer in quantized(model).items():
        assert torch.equal(theirs.get_submodule(key).weight, layer.dequantize()), key


# --------------------------------------------------------------------------------------------------- vision-language models

LM = {key: value for key, value in LLM.items() if not key.endswith("_token_id")}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
VLMS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**LM), vision_config=hf.CLIPVisionConfig(**VISION), image_token_index=5
        ),
    ),
    "gemma3-vl": (
        "Gemma3ForConditionalGeneration",
        lambda: hf.Gemma3Config(text_config=LM | {"head_dim": 16}, vision_config=VISION, mm_tokens_per_image=4),
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        lambda: hf.Qwen2_5_VLConfig(
            text_config=LM | {"rope_parameters": MROPE},
            vision_config=dict(depth=1, hidden_size=64, out_hidden_size=64, num_heads=4, patch_size=8, intermediate_size=128),
        ),
    ),
}


@pytest.fixture(params=VLMS)
def vlm(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A vision-language model, whose checkpoint has other names than its modules, and the folder it was loaded from."""
    kind, config = VLMS[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(hf, kind)._from_config(config(), dtype=torch.bfloat16).save_pretrained(tmp_path / "original")
    model = getattr(hf, kind).from_pretrained(tmp_path / "original", dtype=torch.bfloat16).eval()
    assert not set(shapes_on_disk(tmp_path / "original")) <= model.state_dict().keys()
    return model


@pytest.mark.filterwarnings("ignore:.*nn.MultiheadAttention reads its weight directly.*")
def test_vision_language_models_keep_the_names_of_their_checkpoint(vlm: Any, tmp_path: Path) -> None:
    quantize_(vlm, QuantConfig("W4A16", group_size=32, overrides={"re:.*v_proj": None}))
    save_pretrained(vlm, tmp_path / "out")
    original = shapes_on_disk(tmp_path / "original")
    assert unquantized_names(tmp_path / "out") == original.keys()
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    ignore, packed = set(settings["ignore"]), {n for n in shapes_on_disk(tmp_path / "out") if n.endswith(".weight_packed")}
    modules = {name.removesuffix(".weight") for name in original if name.endswith(".weight")}
    matrices = {name for name in modules if len(original[f"{name}.weight"]) == 2 and "embed" not in name}
    left = {name for name in matrices if f"{name}.weight_packed" not in packed}
    assert left and left <= ignore
    linears = {name for name, module in vlm.named_modules() if isinstance(module, nn.Linear)}
    assert ignore - left <= linears  # and their names in transformers, where those are others

    loaded = load_pretrained(tmp_path / "out")
    assert_same_state(loaded, vlm)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, vlm(input_ids=IDS).logits)
    save_pretrained(loaded, tmp_path / "again")
    assert shapes_on_disk(tmp_path / "again") == shapes_on_disk(tmp_path / "out")
    again, first = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("again", "out"))
    assert again["quantization_config"] == first["quantization_config"]

    for dequantize in (False, True):
        if type(vlm).__name__.startswith("Gemma3") and not (dequantize and DEQUANTIZES_WHILE_LOADING):
            continue  # transformers initializes the tied head anew, and reads the weights of compressed layers for that
        options = {"quantization_config": hf.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
        theirs = type(vlm).from_pretrained(tmp_path / "out", dtype="auto", **options)
        with torch.no_grad():
            theirs(input_ids=IDS)
        for key, layer in quantized(vlm).items():
            assert torch.equal(theirs.get_submodule(key).weight, layer.dequantize()), key


@pytest.mark.filterwarnings("ignore:.*nn.MultiheadAttention reads its weight directly.*")
def test_a_vision_language_model_made_from_a_config(tmp_path: Path) -> None:
    """It has no record of the names it was loaded with; its tied head is in no file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.Gemma3ForConditionalGeneration._from_config(VLMS["gemma3-vl"][1](), dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "original")
    quantize_(model, QuantConfig("W4A16", group_size=32))
    save_pretrained(model, tmp_path / "out")
    assert unquantized_names(tmp_path / "out") == shapes_on_disk(tmp_path / "original").keys()
    loaded = load_pretrained(tmp_path / "out")
    assert_same_state(loaded, model)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


@pytest.mark.filterwarnings("ignore:.*nn.MultiheadAttention reads its weight directly.*")
def test_an_untied_vision_language_model(vlm: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="untied.*")
        quantize_(vlm, QuantConfig("W4A16", group_size=32, ignore=()))
    assert not any(getattr(config, "tie_word_embeddings", False) for config in (vlm.config, vlm.config.get_text_config()))
    save_pretrained(vlm, tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out")
    assert isinstance(loaded.get_output_embeddings(), QuantLinear)
    assert_same_state(loaded, vlm)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, vlm(input_ids=IDS).logits)


# ----------------------------------------------------------------------------------------------------------------- experts


def test_quantized_experts_are_refused_by_name(tmp_path: Path) -> None:
    """As llm-compressor writes them: one matrix per expert."""
    from safetensors.torch import load_file, save_file

    model = build("qwen3-moe")
    quantize(model, QuantConfig("W8A8"), experts=True)
    save_pretrained(model, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors[name]
        tensors[name] = weight.sign().to(torch.int8)
        tensors[name + "_scale"] = weight.abs().mean(1, keepdim=True)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NotImplementedError, match="has quantized experts, which are not supported yet"):
        load_pretrained(tmp_path / "out")


def test_the_report_of_a_mixture_of_experts_names_every_expert_tensor() -> None:
    for name in EXPERTS:
        model = build(name)
        with pytest.warns(UserWarning, match=r"4 weights with \d\d\.\d% of the parameters stay in 16 bits"):
            report = quantize_(model, QuantConfig("W8A8"))
        skipped = {layer.name for layer in report.layers if layer.status == "skipped"}
        assert skipped == {key for key, p in model.named_parameters() if p.ndim == 3}
        assert not any("router" in key or key.endswith("gate") for key in quantized(model))


# ---------------------------------------------------------------------------------------------------------- fused originals


@pytest.mark.skipif(not hasattr(hf, "NomicBertModel"), reason="this transformers has no NomicBert")
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_layers_that_are_one_tensor_in_the_original_checkpoint(scheme: str, tmp_path: Path) -> None:
    """q, k and v are one Wqkv there, which three quantized layers cannot become; they keep the names of the model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf.NomicBertModel._from_config(hf.NomicBertConfig(**COMMON), dtype=torch.bfloat16).save_pretrained(tmp_path / "original")
    assert any("Wqkv" in name for name in shapes_on_disk(tmp_path / "original"))
    for ignore in ([], ["re:.*q_proj"], ["re:.*(q|k|v)_proj"]):
        model = hf.NomicBertModel.from_pretrained(tmp_path / "original", dtype=torch.bfloat16).eval()
        quantize(model, QuantConfig(scheme, group_size=32 if scheme == "W4A16" else None, ignore=ignore))
        folder = tmp_path / f"out{len(str(ignore))}"
        with pytest.warns(UserWarning, match=r"k_proj.* are parts of larger tensors in the original checkpoint"):
            save_pretrained(model, folder)
        loaded = load_pretrained(folder)
        assert_same_state(loaded, model)
        with torch.no_grad():
            assert torch.equal(loaded(IDS)[0], model(IDS)[0])
        theirs = hf.NomicBertModel.from_pretrained(folder, dtype="auto").eval()
        with torch.no_grad():
            theirs(IDS)
        for key, layer in quantized(model).items():
            assert torch.equal(theirs.get_submodule(key).weight, layer.dequantize()), key
