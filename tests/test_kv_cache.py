"""Generation with a quantized KV cache: with ``"16bit"`` keys and values it is that of transformers' own cache, in every mode."""

import copy
import inspect
from collections.abc import Callable
from functools import cache as memoize
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from torchq import FP8KVCache

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
PLAIN = {"key_dtype": "16bit", "value_dtype": "16bit"}
EXTRAS = {"num_sink_tokens": 3, "num_recent_tokens": 5}
ONLY_EAGER = ("gemma2", "gpt_oss")  # of transformers' own: soft caps and sinks
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 40},  # around the windows of 16 tokens more than twice
    "beam": {"max_new_tokens": 20, "num_beams": 3},
    "several": {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 3},
    "chunks": {"max_new_tokens": 6, "prefill_chunk_size": 6},
    "large chunks": {"max_new_tokens": 6, "prefill_chunk_size": 19},
    "assisted": {"max_new_tokens": 30},
    "lookup": {"max_new_tokens": 20, "prompt_lookup_num_tokens": 4},
}


@pytest.fixture(scope="module")
def model_of(tiny_decoder: Callable[..., Any]) -> Callable[..., Any]:
    return memoize(tiny_decoder)


def own(kind: str) -> str:
    return "eager" if kind in ONLY_EAGER else "sdpa"


def prompt(length: int = 20, padded: bool = True) -> dict[str, Tensor]:
    """Two sequences, the first with 7 tokens of padding; or one without."""
    ids = torch.randint(2, 120, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    ids[0, :7], mask[0, :7] = 0, 0
    rows = slice(None) if padded else slice(1, 2)
    return {"input_ids": ids[rows], "attention_mask": mask[rows]}


def generate(model: Any, cache: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Sequences, and the scores of each step."""
    found = model.generate(
        **inputs, **{CACHE: cache}, do_sample=False, output_scores=True, return_dict_in_generate=True, **options
    )
    return found.sequences, torch.stack(found.scores)


def forward(model: Any, cache: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **{CACHE: cache}, use_cache=True, **options).logits


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-4)


def perturbed(model: Any) -> Any:
    """An assistant that guesses some tokens right."""
    assistant = copy.deepcopy(model)
    for index, parameter in enumerate(assistant.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.data.add_(noise * parameter.data.std(), alpha=0.1)
    return assistant


# ----------------------------------------------------------------------------------------------------------- 16 bits: the same

COMBINATIONS = [("own", None, EXTRAS), ("own", 80, {}), ("torchq", None, {}), ("torchq", 80, EXTRAS)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_mode_is_that_of_transformers_cache(model_of: Callable[..., Any], kind: str, mode: str) -> None:
    model, options, inputs = model_of(kind), MODES[mode], prompt(padded=mode not in ("assisted", "lookup"))
    if mode == "assisted":
        if kind == "gemma3" and CACHE == "past_key_values":
            pytest.skip("with transformers' own cache this fails in releases as old as this one")
        options = {**options, "assistant_model": perturbed(model)}
    if mode == "lookup":
        inputs = {name: tensor.repeat(1, 2) for name, tensor in inputs.items()}
    if mode.endswith("chunks"):
        inputs = prompt(57)
    model.set_attn_implementation("sdpa")
    expected = generate(model, DynamicCache(config=model.config), inputs, **options)
    for name, most, extras in COMBINATIONS:
        if most and kind == "gemma3" and mode in ("assisted", "lookup"):
            continue  # see test_assisted_decoding_takes_no_static_sliding_layers
        model.set_attn_implementation("sdpa" if name == "own" else name)
        assert_same(generate(model, FP8KVCache(model.config, most, **PLAIN, **extras), inputs, **options), expected)


@pytest.mark.parametrize("kind", ["mqa", "qwen3", "mistral", "phi3", "gpt_neox", "gemma2", "gpt_oss"])
def test_every_architecture_generates_as_with_transformers_cache(model_of: Callable[..., Any], kind: str) -> None:
    model, options = model_of(kind), MODES["greedy"]
    model.set_attn_implementation(own(kind))
    expected = generate(model, DynamicCache(config=model.config), prompt(), **options)
    for name, most, extras in COMBINATIONS:
        model.set_attn_implementation(own(kind) if name == "own" else name)
        assert_same(generate(model, FP8KVCache(model.config, most, **PLAIN, **extras), prompt(), **options), expected)


def test_heads_may_differ_between_layers(model_of: Callable[..., Any]) -> None:
    """Gemma 4: global layers have larger heads, and the last layers read what others have stored."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config = transformers.Gemma4TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        global_head_dim=64, num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size=120,
        vocab_size_per_layer_input=120,
        sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    expected = generate(model, DynamicCache(config=config), prompt(), max_new_tokens=20)
    for name, most, extras in COMBINATIONS:
        model.set_attn_implementation("sdpa" if name == "own" else name)
        assert_same(generate(model, FP8KVCache(model.config, most, **PLAIN, **extras), prompt(), max_new_tokens=20), expected)
    with pytest.raises(ValueError, match=r"'int4' needs a head_dim that 64 divides, got 32"):
        FP8KVCache(config, dtype="int4")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_eager_attention(model_of: Callable[..., Any], kind: str) -> None:
    """Which gets floating-point masks."""
    model = model_of(kind)
    model.set_attn_implementation("eager")
    expected = generate(model, DynamicCache(config=model.config), prompt(), max_new_tokens=20)
    for most in (None, 48):
        assert_same(generate(model, FP8KVCache(model.config, most, **PLAIN), prompt(), max_new_tokens=20), expected)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_assisted_decoding_takes_no_static_sliding_layers(model_of: Callable[..., Any], kind: str) -> None:
    """Neither does it with transformers' own static cache: what such a layer overwrote is gone."""
    model = model_of(kind)
    with pytest.raises((ValueError, RuntimeError), match=r"can be cropped|has already overwritten the tokens"):
        generate(model, FP8KVCache(model.config, 80, **PLAIN), prompt(padded=False), **MODES["lookup"])
    generate(model, FP8KVCache(model.config, 16, **PLAIN), prompt(8, padded=False), max_new_tokens=6, prompt_lookup_num_tokens=2)


# ------------------------------------------------------------------------------------------------------ more than one generation


@pytest.mark.parametrize("implementation", ["sdpa", "torchq"])
@pytest.mark.parametrize("most", [None, 80])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_conversation_goes_on(model_of: Callable[..., Any], kind: str, most: int | None, implementation: str) -> None:
    """Generate, add a turn, generate on the same cache; then the same after reset, with another number of sequences."""
    model = model_of(kind)
    model.set_attn_implementation(implementation)
    cache = FP8KVCache(model.config, most, **PLAIN, **EXTRAS)
    for inputs in (prompt(), {name: tensor.repeat(2, 1)[:3] for name, tensor in prompt(11).items()}):
        plain = DynamicCache(config=model.config)
        for _ in range(2):
            expected = generate(model, plain, inputs, max_new_tokens=12)
            assert_same(generate(model, cache, inputs, max_new_tokens=12), expected)
            turn = prompt(9)["input_ids"][:1].expand(len(expected[0]), -1)
            ids, mask = torch.cat([expected[0], turn], 1), inputs["attention_mask"]
            inputs = {
                "input_ids": ids,
                "attention_mask": torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1),
            }
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("implementation", ["sdpa", "torchq"])
@pytest.mark.parametrize("most", [None, 80])
def test_a_prompt_is_computed_once_for_several(model_of: Callable[..., Any], most: int | None, implementation: str) -> None:
    """A deep copy for each continuation."""
    model = model_of("gemma3")
    model.set_attn_implementation(implementation)
    prefix = FP8KVCache(model.config, most, **PLAIN)
    ids = prompt(padded=False)["input_ids"]
    forward(model, prefix, ids)
    for seed in (1, 2):
        more = torch.cat([ids, torch.randint(2, 120, (1, 4), generator=torch.Generator().manual_seed(seed))], 1)
        inputs = {"input_ids": more, "attention_mask": torch.ones_like(more)}
        expected = generate(model, DynamicCache(config=model.config), inputs, max_new_tokens=8)
        assert_same(generate(model, copy.deepcopy(prefix), inputs, max_new_tokens=8), expected)
    assert prefix.get_seq_length() == 20


@pytest.mark.parametrize("implementation", ["sdpa", "torchq"])
@pytest.mark.parametrize("most", [None, 64])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_crop_and_change_of_sequences(model_of: Callable[..., Any], kind: str, most: int | None, implementation: str) -> None:
    model, ids = model_of(kind), torch.randint(2, 120, (2, 48), generator=torch.Generator().manual_seed(5))
    model.set_attn_implementation(implementation)
    length = 14 if most and kind == "gemma3" else 30  # a static sliding layer must not have overwritten anything
    cache = FP8KVCache(model.config, most, **PLAIN, **EXTRAS)
    if not most:
        cache.activate_past_recording()
    forward(model, cache, ids[:, :length])
    cache.crop(-6)
    cache.crop(0)
    assert cache.get_seq_length() == length - 6 and cache.is_croppable
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    later = ids[:, 40:].flip(0)
    expected = forward(model, None, torch.cat([ids[:, : length - 6].flip(0), later], 1))[:, length - 6 :]
    found = torch.cat(
        [forward(model, cache, later[:, :3]), *(forward(model, cache, later[:, i : i + 1]) for i in range(3, 8))], 1
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    if most is None or kind == "llama":
        cache.crop(-1000)
        assert cache.get_seq_length() == 0


# ------------------------------------------------------------------------------------------------------------ quantized


QUANTIZED: list[dict[str, Any]] = [
    {"dtype": "fp8"},
    {"dtype": "int8"},
    {"dtype": "int4"},
    {"key_dtype": "int8", "value_dtype": "int4", **EXTRAS},
    {"key_dtype": "16bit", "rotate_keys": True},
    {"scales": {i: (torch.tensor([0.05]), torch.tensor([0.02, 0.03])) for i in range(2)}},
]


@pytest.mark.parametrize("settings", QUANTIZED, ids=lambda s: "-".join(map(str, s)))
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_both_paths_and_both_kinds_of_cache_agree(tiny_decoder: Callable[..., Any], kind: str, settings: dict[str, Any]) -> None:
    """Dequantized for SDPA and read by torchq's attention, growing and static, with padding, in chunks and one by one."""
    model, inputs = tiny_decoder(kind, head_dim=64).double(), prompt(60)  # where no rounding decides about a code
    results = {}
    for implementation in ("sdpa", "torchq"):
        model.set_attn_implementation(implementation)
        for most in (None, 64):
            cache, parts = FP8KVCache(model.config, most, **settings), []
            for start, stop in [(0, 20), (20, 25), (25, 47), *((i, i + 1) for i in range(47, 60))]:
                mask = inputs["attention_mask"][:, :stop]
                position = (mask.cumsum(1) - 1).clamp_min(0)[:, start:]
                parts.append(
                    forward(model, cache, inputs["input_ids"][:, start:stop], attention_mask=mask, position_ids=position)
                )
            results[implementation, most] = torch.cat(parts, 1)[:, 7:]
    expected = results.pop(("sdpa", None))
    for result in results.values():
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    model.set_attn_implementation("sdpa")
    mask = inputs["attention_mask"]
    exact = forward(model, None, inputs["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))[:, 7:]
    error = (expected - exact).norm() / exact.norm()
    assert (
        (error < 1e-4)
        if settings.get("key_dtype") == "16bit" and settings.get("value_dtype") == "16bit"
        else (1e-4 < error < 0.4)
    )


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("implementation", ["sdpa", "torchq"])
def test_padding_changes_nothing(tiny_decoder: Callable[..., Any], dtype: str, implementation: str) -> None:
    """A padded sequence generates what it does alone. In float64: no rounding decides about a code."""
    model = tiny_decoder("gemma3", head_dim=64).double()
    model.set_attn_implementation(implementation)
    inputs = prompt()
    alone = {name: tensor[:1, 7:] for name, tensor in inputs.items()}
    for most in (None, 64):
        found = generate(model, FP8KVCache(model.config, most, dtype=dtype), inputs, max_new_tokens=20)
        expected = generate(model, FP8KVCache(model.config, most, dtype=dtype), alone, max_new_tokens=20)
        assert torch.equal(found[0][:1, 7:], expected[0])
        torch.testing.assert_close(found[1][:, :1], expected[1], rtol=1e-4, atol=1e-4)


def test_an_encoder_with_a_soft_cap_looks_both_ways() -> None:
    from transformers import AutoModelForSeq2SeqLM, T5GemmaConfig, T5GemmaModuleConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    parts = {
        part: T5GemmaModuleConfig(**sizes, num_key_value_heads=1, vocab_size=200, sliding_window=8)
        for part in ("encoder", "decoder")
    }
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(T5GemmaConfig(**parts, vocab_size=200)).eval()
    ids = torch.randint(3, 200, (2, 12))
    logits = []
    for implementation in ("eager", "torchq"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(model(input_ids=ids, decoder_input_ids=ids[:, :5], use_cache=False).logits)
    torch.testing.assert_close(*logits)
