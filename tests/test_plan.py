"""The arithmetic of keys and values, beside what caches hold."""

import math
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from torchq import FP8KVCache
from torchq.model_utils import cache_argument
from torchq.plan import KV_FORMATS, kv_bytes_per_token, kv_cache_bytes, tokens_that_fit

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, head_dim=64),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=40, layer_types=LAYERS),
    "phi3": lambda: transformers.Phi3Config(**{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2}),
}
DTYPES = {  # of keys and values, by what the plan calls it
    "16bit": {"key_dtype": "16bit", "value_dtype": "16bit"},
    "fp8": {"dtype": "fp8"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int4"},
    ("16bit", "int4"): {"key_dtype": "16bit", "value_dtype": "int4"},
}


def llama_70b() -> Any:
    return transformers.LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192
    )


@torch.no_grad()
def fill(config: Any, cache: Any, tokens: int, batch: int = 2) -> Any:
    """Run a bfloat16 model of ``config`` over some tokens, then single ones."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(0))
    for piece in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        model(piece, use_cache=True, **{cache_argument(model): cache})
    return cache


def test_llama_3_70b():
    config = llama_70b()
    assert kv_bytes_per_token(config) == 320 * 1024
    assert kv_cache_bytes(config, 8192) == 2.5 * 1024**3
    assert tokens_that_fit(config, 35e9) == 106_811
    assert kv_bytes_per_token(config, "fp8") == kv_bytes_per_token(config, "int8") == 162.5 * 1024
    assert kv_bytes_per_token(config, "fp8_static") == 160 * 1024
    assert kv_bytes_per_token(config, "int4") == 95 * 1024
    assert kv_bytes_per_token(config, ("16bit", "int8")) == (160 + 81.25) * 1024


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kv_cache", DTYPES, ids=str)
def test_equals_what_a_quantized_cache_allocates(name, kv_cache):
    config = CONFIGS[name]()
    static = fill(config, FP8KVCache(config, 100, **DTYPES[kv_cache]), 50)
    assert static.nbytes == kv_cache_bytes(config, 100, 2, kv_cache)
    growing = fill(config, FP8KVCache(config, **DTYPES[kv_cache]), 256)
    assert growing.nbytes == kv_cache_bytes(config, 256, 2, kv_cache)


def test_equals_what_a_cache_with_static_scales_allocates():
    config = CONFIGS["llama"]()
    scales = {layer: (torch.ones(1), torch.ones(2)) for layer in range(3)}
    assert fill(config, FP8KVCache(config, 100, scales=scales), 50).nbytes == kv_cache_bytes(config, 100, 2, "fp8_static")


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_what_transformers_caches_hold(name):
    config = CONFIGS[name]()
    static = fill(config, StaticCache(config, 100), 50)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in static.layers) == kv_cache_bytes(config, 100, 2)
    growing = fill(config, DynamicCache(config=config), 60)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in growing.layers)
    one_less = 2 * 2 * (2 * 64 * 2 * 2) if name == "gemma3" else 0  # it keeps a window without the newest token
    assert held == kv_cache_bytes(config, 60, 2) - one_less


@pytest.mark.parametrize("kv_cache", KV_FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_more_token_does_not_fit(name, kv_cache):
    config = CONFIGS[name]()
    for tokens in (0, 1, 39, 40, 41, 1000):
        room = kv_cache_bytes(config, tokens, 3, kv_cache)
        assert tokens_that_fit(config, room, 3, kv_cache) == tokens
        assert tokens_that_fit(config, math.nextafter(kv_cache_bytes(config, tokens + 1, 3, kv_cache), 0), 3, kv_cache) == tokens


def test_sliding_layers_count_up_to_their_window():
    config = CONFIGS["gemma3"]()
    token_and_layer = 2 * 2 * 64 * 2
    assert kv_bytes_per_token(config) == token_and_layer
    assert kv_cache_bytes(config, 30) == 3 * 30 * token_and_layer
    assert kv_cache_bytes(config, 100) == (100 + 2 * 40) * token_and_layer
    config.layer_types = ["sliding_attention"] * 3
    assert kv_bytes_per_token(config) == 0
    assert tokens_that_fit(config, 3 * 40 * token_and_layer) is None
    assert tokens_that_fit(config, 3 * 39 * token_and_layer) == 39


def test_architectures():
    falcon = transformers.FalconConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2, multi_query=True)
    assert kv_bytes_per_token(falcon, "int8") == 2 * 2 * (64 + 2)
    neox = transformers.GPTNeoXConfig(hidden_size=128, num_attention_heads=2, num_hidden_layers=2)
    assert kv_bytes_per_token(neox) == 2 * 2 * 2 * 64 * 2
    latents = transformers.DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64)
    assert kv_bytes_per_token(latents) == 2 * (512 + 64) * 2  # as transformers keeps them, for all heads at once
    hybrid = transformers.Qwen3NextConfig(num_hidden_layers=8, num_key_value_heads=2, head_dim=256)
    assert kv_bytes_per_token(hybrid) == 2 * 2 * 2 * 256 * 2  # two of eight layers are no linear attention
    both = transformers.FalconH1Config(num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4, head_dim=64)
    assert kv_bytes_per_token(both) == 2 * 2 * 2 * 64 * 2  # the states beside them do not grow
    vision = transformers.Gemma3Config(text_config=CONFIGS["gemma3"]().to_dict())
    assert kv_bytes_per_token(vision) == kv_bytes_per_token(CONFIGS["gemma3"]())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: kv_bytes_per_token(llama_70b(), "fp4"), ValueError, "kv_cache must be one of .*'int4'.*got 'fp4'"),
        (lambda: kv_bytes_per_token(llama_70b(), ("fp8",)), ValueError, "or a pair of them"),
        (lambda: kv_bytes_per_token({"num_hidden_layers": 2}), TypeError, "config must be a model's configuration.*got dict"),
        (lambda: kv_cache_bytes(llama_70b(), -1), ValueError, "tokens must be 0 or more, got -1"),
        (lambda: tokens_that_fit(llama_70b(), 1e9, batch=0), ValueError, "batch must be 1 or more, got 0"),
        (lambda: kv_bytes_per_token(transformers.LlamaConfig(head_dim=80), "int4"), ValueError, "'int4' needs a head_dim"),
        (lambda: kv_bytes_per_token(transformers.RwkvConfig()), ValueError, "RwkvConfig has no num_attention_heads"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_is_not_counted_is_an_error(monkeypatch):
    class Other(transformers.cache_utils.DynamicLayer):
        pass

    monkeypatch.setitem(transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Other)
    with pytest.raises(NotImplementedError, match=r"layer 0 of LlamaConfig keeps more than keys and values \(Other\)"):
        kv_bytes_per_token(llama_70b())
    monkeypatch.delitem(transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention")
    with pytest.raises(NotImplementedError, match="LlamaConfig has layers of 'full_attention', which is not counted"):
        kv_bytes_per_token(llama_70b())
