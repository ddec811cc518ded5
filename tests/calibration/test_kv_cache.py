"""Static scales of the key-value cache, beside what a cache holds after the same forward passes."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from torchq import QuantConfig, quantize_
from torchq._undo import UndoLog
from torchq.calibration.data import Batches, CalibrationData, load_batches
from torchq.calibration.kv_cache import calibrate_kv_cache, find_cached_attention
from torchq.calibration.packing import Batch
from torchq.dequantize import dequantize_
from torchq.kv_scales import attention_with_scales, kv_cache_strategy, kv_scales, scale_of
from torchq.report import QuantReport
from torchq.testing import tiny_llama

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **SLIDING, head_dim=32),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**HEADS),
}


def build(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config).eval().to(dtype)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


def tokens(rows: int = 6, length: int = 24) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(0))


def padded(pad: int = 0, lengths: tuple[int, ...] = (24, 17, 9, 20)) -> list[dict[str, Tensor]]:
    """Batches of two rows; the first are padded on the right, the others on the left."""
    ids, batches = tokens(len(lengths)), []
    for first in range(0, len(lengths), 2):
        mask = torch.stack([torch.arange(24) < length for length in lengths[first : first + 2]])
        mask = mask if first == 0 else mask.flip(1)
        rows = torch.where(mask, ids[first : first + 2], pad)
        batches.append({"input_ids": rows, "attention_mask": mask.long()})
    return batches


def quantized(model: Any, data: Any, kv_cache: str = "fp8", scheme: str = "W8A8") -> Any:
    return quantize_(model, QuantConfig(scheme, algorithm="rtn", kv_cache=kv_cache), calibration=data, progress=False)


@torch.no_grad()
def cached(model: Any, batches: list[dict[str, Tensor]], *, padding: bool = False) -> dict[int, tuple[Tensor, Tensor]]:
    """layer_idx -> max|k| and max|v| [H] of what a DynamicCache holds, without layers that crop; of real tokens only."""
    largest: dict[int, tuple[Tensor, Tensor]] = {}
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # transformers < 5.24
    for batch in batches:
        cache = transformers.DynamicCache()
        model(**batch, **{argument: cache}, use_cache=True)
        counts = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool() | padding
        for index, layer in enumerate(cache.layers):
            pair = tuple(x.transpose(1, 2)[counts].abs().amax((0, 2)).float() for x in (layer.keys, layer.values))
            before = largest.get(index, pair)
            largest[index] = (torch.maximum(before[0], pair[0]), torch.maximum(before[1], pair[1]))
    return largest


# ------------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("kv_cache", ["fp8", "fp8_head"])
@pytest.mark.parametrize("name", CONFIGS)
def test_scales_are_of_what_a_cache_holds(name: str, kv_cache: str) -> None:
    """On rows with padding, in float32: max|x| / 448 of the quantized model's own cache, to the last bits (masks differ)."""
    model = build(CONFIGS[name]())
    data = padded()
    report = quantized(model, data, kv_cache)
    found, expected = kv_scales(model), cached(model, data)
    assert found.keys() == expected.keys() == {0, 1}
    heads = getattr(model.config, "num_key_value_heads", 4)
    for index, pair in expected.items():
        for scale, absmax in zip(found[index], pair, strict=True):
            assert scale.dtype == torch.float32 and len(absmax) == heads
            absmax = absmax if kv_cache == "fp8_head" else absmax.max()[None]
            torch.testing.assert_close(scale, absmax / 448, rtol=1e-5, atol=0)
    assert (report.kv_cache_strategy, report.kv_cache_layers) == ({"fp8": "tensor", "fp8_head": "attn_head"}[kv_cache], 2)


def test_scales_of_bfloat16_are_rounded_up() -> None:
    model = build(CONFIGS["llama"](), torch.bfloat16)
    data = [{"input_ids": row[None]} for row in tokens()]  # without padding, what is computed is the same bit for bit
    quantized(model, data, "fp8_head")
    for (name, module), (_, pair) in zip(attention_with_scales(model), sorted(cached(model, data).items()), strict=True):
        for kind, absmax in zip(("k_scale", "v_scale"), pair, strict=True):
            scale = module.get_buffer(kind)
            assert scale.dtype == torch.bfloat16 and scale.shape == (2, 1, 1), name
            exact = absmax.double() / 448
            below = torch.nextafter(scale, torch.zeros_like(scale)).double().flatten()
            assert bool((scale.double().flatten() >= exact).all()) and bool((below < exact).all())


def test_values_are_the_projections() -> None:
    """By hand, without any cache: values are v_proj's outputs; keys are k_proj's, rotated."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, data = tiny_llama(), [{"input_ids": row[None]} for row in tokens()]
    quantized(model, data, "fp8_head")
    seen: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
    for kind, outputs in seen.items():
        layer = model.model.layers[1].self_attn.get_submodule(kind)
        layer.register_forward_hook(lambda module, args, output, outputs=outputs: outputs.append(output))
    with torch.no_grad():
        for batch in data:
            model(**batch, use_cache=False)
        cos, sin = model.model.rotary_emb(seen["k_proj"][0], torch.arange(24)[None])
        keys = [k.view(1, 24, 2, 16).transpose(1, 2) for k in seen["k_proj"]]
        keys = [apply_rotary_pos_emb(k, k, cos, sin)[1] for k in keys]
    k_scale, v_scale = kv_scales(model)[1]
    torch.testing.assert_close(k_scale, torch.cat(keys).abs().amax((0, 2, 3)) / 448, rtol=1e-6, atol=0)
    values = torch.cat(seen["v_proj"]).view(-1, 2, 16)
    torch.testing.assert_close(v_scale, values.abs().amax((0, 2)) / 448, rtol=1e-6, atol=0)


def test_padding_does_not_count() -> None:
    model = tiny_llama()
    with torch.no_grad():
        alone = [cached(model, [{"input_ids": torch.tensor([[token]])}])[0][1].max() for token in range(3, 128)]
    loud = int(torch.stack(alone).argmax()) + 3
    data = [{k: torch.where(v == loud, 3, v) if k == "input_ids" else v for k, v in batch.items()} for batch in padded()]
    for batch in data:
        batch["input_ids"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], loud)
    quantized(model, data)
    without, with_padding = (cached(model, data, padding=padding)[0][1].max() / 448 for padding in (False, True))
    assert with_padding > 1.05 * without
    torch.testing.assert_close(kv_scales(model)[0][1][0], without, rtol=1e-5, atol=0)


def test_packed_documents_do_not_see_each_other() -> None:
    model = tiny_llama(max_position_embeddings=64)
    documents = [row[:10] for row in tokens(24)]
    data = CalibrationData([document.tolist() for document in documents], num_samples=4, max_length=60, packing=True)
    batches = load_batches(data, None, model)
    assert "position_ids" in batches.train[0].inputs
    rows = [row for batch in batches.train + batches.holdout for row in batch.inputs["input_ids"]]
    packed = [document for document in documents if any(document.tolist() == part.tolist() for r in rows for part in r.split(10))]
    assert len(packed) >= 20
    quantized(model, data, "fp8_head")
    expected = cached(model, [{"input_ids": document[None]} for document in packed])
    for index, pair in kv_scales(model).items():
        for scale, absmax in zip(pair, expected[index], strict=True):
            torch.testing.assert_close(scale, absmax / 448, rtol=1e-4, atol=0)


def test_held_out_sequences_count() -> None:
    model = tiny_llama()
    data = [{"input_ids": row[None]} for row in tokens()]
    quantized(model, CalibrationData(data, max_length=64, holdout=0.5), "fp8_head")
    expected = cached(model, data)
    torch.testing.assert_close(kv_scales(model)[1][0], expected[1][0] / 448, rtol=1e-6, atol=0)


def test_scales_come_after_smoothing_and_rounding() -> None:
    """SmoothQuant scales values where o_proj reads them: the scales are of the folded model."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[::5] *= 10
    before = cached(model, [{"input_ids": tokens()}])
    report = quantize_(model, QuantConfig("W8A8", kv_cache="fp8"), calibration=tokens(), progress=False)
    assert any("v_proj" in fold.producer and fold.status == "folded" for fold in report.folds)
    assert report.timings["kv_cache"] > 0
    after = cached(model, [{"input_ids": tokens()}])
    for index, pair in kv_scales(model).items():
        torch.testing.assert_close(pair[1][0], after[index][1].max() / 448, rtol=1e-5, atol=0)
    assert any(abs(before[i][1].max() / after[i][1].max() - 1) > 0.05 for i in (0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_covers_its_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    absmax = torch.exp(torch.empty(10_000).uniform_(-17, 11, generator=generator))
    absmax = torch.cat([absmax, torch.tensor([448.0, 1.0, 1e-7, 65504.0])])
    scale = scale_of(absmax, dtype)
    assert scale.dtype == dtype and bool((scale > 0).all()) and bool(torch.isfinite(scale).all())
    assert bool((448 * scale.double() >= absmax.double()).all())
    below = torch.nextafter(scale, torch.zeros_like(scale))
    assert bool((448 * below.double() < absmax.double()).all())
    assert scale_of(torch.zeros(2), dtype).tolist() == [1, 1]


# ---------------------------------------------------------------------------------------------------------- life of the scales


def test_nothing_else_changes() -> None:
    """The scales are beside the model: packed layers, logits and a second model without them are the same."""
    plain, model = tiny_llama(), tiny_llama()
    quantize_(plain, QuantConfig("W8A8"), calibration=tokens(), progress=False)
    quantize_(model, QuantConfig("W8A8", kv_cache="fp8"), calibration=tokens(), progress=False)
    assert torch.equal(plain(tokens()).logits, model(tokens()).logits)
    assert (
        kv_scales(plain) == {}
        and kv_cache_strategy(plain) is None
        and plain.config.quantization_config["kv_cache_scheme"] is None
    )
    extra = model.state_dict().keys() - plain.state_dict().keys()
    assert extra == {f"model.layers.{i}.self_attn.{kind}" for i in (0, 1) for kind in ("k_scale", "v_scale")}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config.use_cache is plain.config.use_cache is True


def test_copies_and_casts_keep_them_and_dequantize_drops_them() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    quantized(model, tokens(), "fp8_head")
    scales = kv_scales(model)
    for other in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float32), copy.deepcopy(model).to(torch.float16)):
        again = kv_scales(other)
        assert all(torch.equal(a, b) for i in scales for a, b in zip(scales[i], again[i], strict=True))
    scales[0][0].zero_()  # a copy
    assert bool((kv_scales(model)[0][0] > 0).all())
    dequantize_(model)
    assert kv_scales(model) == {} and not any("k_scale" in name for name in model.state_dict())
    quantized(model, tokens())  # and it can be quantized again
    assert kv_cache_strategy(model) == "tensor"


def test_a_scale_that_a_cast_lost_is_an_error() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    quantized(model, tokens())
    model.model.layers[1].self_attn.v_scale.fill_(1e-9)
    assert kv_scales(model)[1][1] > 0
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn has a k_scale or v_scale that is not positive and finite"):
        kv_scales(model.half())


def test_report() -> None:
    model = tiny_llama()
    report = quantized(model, tokens(), "fp8_head")
    assert "keys and values: static fp8 scales of 2 layers, one per key-value head (strategy attn_head)" in report.summary()
    again = type(report).from_dict(report.to_dict())
    assert (again.kv_cache_strategy, again.kv_cache_layers) == ("attn_head", 2)
    plain = quantize_(tiny_llama(), "W8A8", progress=False)
    assert "keys and values" not in plain.summary()


def test_keys_or_values_that_are_all_zero() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[16:] = 0  # the second head
    with pytest.warns(UserWarning, match=r"all that model\.layers\.1\.self_attn\.v_scale would scale is 0 .* the scale is 1"):
        report = quantized(model, tokens(), "fp8_head")
    v_scale = kv_scales(model)[1][1]
    assert v_scale[1] == 1 and 0 < v_scale[0] < 0.1
    assert "the scale is 1" in report.summary()


# ------------------------------------------------------------------------------------------------------------------- errors


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_calibration_data_is_needed() -> None:
    model = tiny_llama()
    before = state(model)
    with pytest.raises(
        ValueError, match=r"kv_cache='fp8' has static scales, which need calibration data: pass .* or set kv_cache=None"
    ):
        quantize_(model, QuantConfig("W8A8", kv_cache="fp8"))
    assert_untouched(model, before)


def test_training_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="qat=True does not support kv_cache='fp8'"):
        quantize_(tiny_llama(), QuantConfig("W8A8", kv_cache="fp8"), calibration=tokens(), qat=True)


MAMBA = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
T5 = {"vocab_size": 128, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0}
GEMMA3N = {
    "num_hidden_layers": 4,
    "intermediate_size": [128] * 4,
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "activation_sparsity_pattern": [0.0] * 4,
    "laurel_rank": 8,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 16,
}
REFUSED = {
    "no attention": (
        lambda: transformers.MambaConfig(**MAMBA),
        ValueError,
        "no attention layer of the model keeps keys and values",
    ),
    "an encoder": (lambda: transformers.BertConfig(**HEADS), ValueError, "no attention layer of the model keeps keys and values"),
    "cross attention": (lambda: transformers.T5Config(**T5), NotImplementedError, r"got several for layer 0 .*EncDecAttention"),
    "shared caches": (
        lambda: transformers.Gemma3nTextConfig(**(SIZES | GEMMA3N)),
        NotImplementedError,
        r"model\.layers\.2\.self_attn, model\.layers\.3\.self_attn keep no keys and values of their own",
    ),
    "latents": (
        lambda: transformers.DeepseekV3Config(**(SIZES | DEEPSEEK), n_routed_experts=4, first_k_dense_replace=2),
        NotImplementedError,
        "does not support multi-head latent attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_scales_to_measure(name: str) -> None:
    config, kind, message = REFUSED[name]
    model = build(config())
    before = state(model)
    with pytest.raises(kind, match=message) as raised:
        quantized(model, tokens())
    assert "set kv_cache=None to leave the cache in 16 bits" in str(raised.value)
    assert_untouched(model, before)


def test_a_model_that_is_none_of_transformers() -> None:
    model = nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 32))
    with pytest.raises(TypeError, match="kv_cache needs a transformers model, got Sequential"):
        find_cached_attention(model, Batch({"input_ids": tokens()}, None))


def test_attributes_of_the_same_name() -> None:
    model = tiny_llama()
    model.model.layers[0].self_attn.k_scale = 3.0
    with pytest.raises(ValueError, match=r"the model has model\.layers\.0\.self_attn\.k_scale already"):
        quantized(model, tokens())


def test_values_that_are_not_finite_leave_the_model_as_it_was() -> None:
    """Rounding to nearest looks at no activation: only the pass for the cache sees that they overflow."""
    model = tiny_llama(dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(2e4)
    before = state(model)
    with pytest.raises(ValueError, match=r"hold NaN or inf: model\.layers\.1\.self_attn \(v_scale\); use a dtype of wider range"):
        quantize_(model, QuantConfig("FP8_DYNAMIC", algorithm="rtn", kv_cache="fp8"), calibration=tokens(), progress=False)
    assert_untouched(model, before)


def test_a_failure_after_the_scales_were_set_takes_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = state(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr("torchq.quantize.describe_in_config", fail)
    with pytest.raises(RuntimeError, match="stop"):
        quantized(model, tokens())
    assert_untouched(model, before)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized(model, tokens())
    assert len(kv_scales(model)) == 2


@pytest.mark.parametrize(
    ("layers", "width", "message"),
    [
        ({0: "model.layers.0.self_attn"}, 20, r"model\.layers\.0\.self_attn keeps 24 tokens of rows of 20: what is padding"),
        (
            {0: "model.layers.0.self_attn", 5: "model.layers.1.self_attn"},
            24,
            r"no token reaches model\.layers\.1\.self_attn; use other calibration data",
        ),
    ],
)
def test_tokens_that_do_not_fit_or_arrive(layers: dict[int, str], width: int, message: str) -> None:
    model, report = tiny_llama(), QuantReport("W8A8", "RTN", 0)
    batches = Batches([Batch({"input_ids": tokens()}, torch.ones(6, width, dtype=torch.bool))], [], 6 * width)
    before = state(model)
    with UndoLog(enabled=True, num_bytes=0) as undo_log, pytest.raises(ValueError, match=message):
        calibrate_kv_cache(model, layers, batches, "fp8", undo_log, report)
    assert_untouched(model, before)


def test_only_layers_with_a_cache_get_scales() -> None:
    """A hybrid: three layers of linear attention to one that keeps keys and values."""
    linear = {
        f"linear_{name}": 16 if "dim" in name else 2
        for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config = transformers.Qwen3NextConfig(**(SIZES | {"num_hidden_layers": 4, "head_dim": 16} | linear | experts))
    model = build(config)
    quantized(model, tokens())
    assert [name for name, _ in attention_with_scales(model)] == ["model.layers.3.self_attn"] and list(kv_scales(model)) == [3]
