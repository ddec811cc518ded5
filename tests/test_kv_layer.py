"""What a quantized KV cache holds: its bytes, growth, memory on the way to attention, and what it refuses."""

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from torchq import FP8KVCache, kv_side
from torchq.kernels import kv_attention

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def config(head_dim: int = 64, layers: int = 1, **changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 50, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, "num_hidden_layers": layers, "head_dim": head_dim, **changes})


def states(
    tokens: int, seed: int = 0, b: int = 2, h: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, h, tokens, dim, generator=generator).to(dtype) for _ in "kv")  # type: ignore[return-value]


def contents(cache: FP8KVCache) -> list[Any]:
    """All tensors that layers hold, and lengths."""
    found: list[Any] = []
    for layer in cache.layers:
        found += [int(layer.length), layer.has_tokens]
        if layer.is_initialized:
            found += [t.clone().contiguous().view(torch.uint8) for t in layer._buffers()]
    return found


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------------------------- storage


@pytest.mark.parametrize("sliding", [None, 24])
@pytest.mark.parametrize("most", [None, 200])
@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_at_once_and_one_by_one_are_the_same_bytes(dtype: str, most: int | None, sliding: int | None) -> None:
    changes = {} if sliding is None else {"layer_types": ["sliding_attention"], "sliding_window": sliding}
    key, value = states(150)
    at_once, singly, chunks = (
        FP8KVCache(config(**changes), most, dtype=dtype, num_sink_tokens=2, num_recent_tokens=3) for _ in "abc"
    )
    at_once.update(key, value, 0)
    for i in range(150):
        singly.update(key[:, :, i : i + 1], value[:, :, i : i + 1], 0)
    for start, stop in [(0, 1), (1, 30), (30, 31), (31, 150)]:
        chunks.update(key[:, :, start:stop], value[:, :, start:stop], 0)
    newest = slice(150 - (sliding or 150), 150)
    for cache in (singly, chunks):
        for side in ("key", "value"):
            read = [getattr(c.layers[0], side) for c in (at_once, cache)]
            slots = [torch.arange(newest.start, newest.stop) % c.layers[0].slots for c in (at_once, cache)]
            a, b = (s.read(where, torch.float64) for s, where in zip(read, slots, strict=True))
            assert torch.equal(a, b)
        assert torch.equal(at_once.layers[0].extra_keys[:, :, :-1], cache.layers[0].extra_keys[:, :, :-1])
        assert torch.equal(at_once.layers[0].extra_values[:, :, :-1], cache.layers[0].extra_values[:, :, :-1])


@pytest.mark.parametrize("most", [256, None])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("dtype", "share"), [("fp8", 0.52), ("int8", 0.52), ("int4", 0.30)])
def test_its_size(dtype: str, share: float, head_dim: int, most: int | None) -> None:
    """Of what the plain cache takes in bfloat16, at as many tokens as it has room for."""
    plain, cache = DynamicCache(config=config(head_dim, 2)), FP8KVCache(config(head_dim, 2), most, dtype=dtype)
    for index in range(2):
        for start in (0, 128):
            plain.update(*states(128, start, dim=head_dim), index)
            cache.update(*states(128, start, dim=head_dim), index)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer._buffers())
    assert cache.nbytes == held <= share * sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)


def test_it_grows_by_128_tokens() -> None:
    cache = FP8KVCache(config())
    assert cache.nbytes == 0
    sizes = []
    for index in range(300):
        cache.update(*states(1, index), 0)
        sizes.append(cache.layers[0].slots)
    assert sizes == [128] * 128 + [256] * 128 + [384] * 44
    cache.reset()
    cache.update(*states(5), 0)
    assert cache.layers[0].slots == 384 and cache.get_seq_length() == 5  # memory stays


@pytest.mark.parametrize("most", [None, 100])
def test_sliding_layers_hold_their_window(most: int | None) -> None:
    cache = FP8KVCache(config(layer_types=["sliding_attention"], sliding_window=24), most)
    cache.update(*states(60), 0)
    for index in range(30):
        cache.update(*states(1, index), 0)
    assert cache.layers[0].slots == 24 and cache.get_seq_length() == 90
    assert cache.layers[0].get_max_length() == 24 and cache.is_sliding == [True]


@pytest.mark.parametrize("most", [None, 60])
def test_the_first_and_last_tokens_stay_in_16_bits(most: int | None) -> None:
    """Also after a crop those that are still there; what comes back into the recent ones was quantized."""
    cache = FP8KVCache(config(), most, dtype="int4", num_sink_tokens=3, num_recent_tokens=5)
    key, value = states(40)
    cache.update(key[:, :, :20], value[:, :, :20], 0)
    for i in range(20, 40):
        found = cache.update(key[:, :, i : i + 1], value[:, :, i : i + 1], 0)
    for side, (kept, exact) in enumerate(zip(found, (key, value), strict=True)):
        kept = kept[:, :, :40]
        tolerance = {"rtol": 0.02, "atol": 0.02} if side == 0 else {"rtol": 0.0, "atol": 0.0}  # keys: rotated and back
        for part in (slice(0, 3), slice(35, 40)):
            torch.testing.assert_close(kept[:, :, part], exact[:, :, part], **tolerance)
        assert (kept[:, :, 3:35] - exact[:, :, 3:35]).abs().amax() > 0.1
    cache.crop(-3)
    _, values = cache.update(key[:, :, 37:38], value[:, :, 37:38], 0)
    assert torch.equal(values[:, :, 35:38], value[:, :, 35:38]) and torch.equal(values[:, :, :3], value[:, :, :3])
    assert not torch.equal(values[:, :, 34], value[:, :, 34])


def test_keys_that_are_rotated_come_back_rotated_back() -> None:
    for dim in (64, 80, 96):
        x = states(3, dim=dim, dtype=torch.float64)[0]
        matrix = kv_side.hadamard(dim, torch.float64, x.device)
        assert torch.allclose(matrix @ matrix, torch.eye(dim & -dim, dtype=torch.float64)) and matrix.abs().unique().numel() < 3
        turned = kv_side.rotate(x, matrix)
        assert torch.allclose(kv_side.rotate(turned, matrix), x) and not torch.allclose(turned, x)


def test_a_deep_copy_is_apart() -> None:
    cache = FP8KVCache(config())
    cache.update(*states(5), 0)
    before, other = contents(cache), copy.deepcopy(cache)
    other.update(*states(1, 1), 0)
    assert same(contents(cache), before) and other.get_seq_length() == 6


# -------------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture(name="trace_memory")
def fixture_trace_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("lora_memory").trace_memory
    sys.modules.pop("lora_memory", None)


@pytest.mark.parametrize("most", [None, 4096])
@pytest.mark.parametrize("dtype", ["fp8", "int4"])
def test_memory_of_a_step(
    dtype: str, most: int | None, trace_memory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit keys and values of one layer at a time; none where torchq's attention reads what is stored."""
    monkeypatch.setattr(kv_side, "_BLOCK_VALUES", 1 << 14)
    monkeypatch.setattr(kv_attention, "_BLOCK_VALUES", 1 << 14)
    model = LlamaForCausalLM(config(layers=4, max_position_embeddings=8192)).to(torch.bfloat16).eval()
    cache = FP8KVCache(model.config, most, dtype=dtype)
    for index in range(4):
        cache.update(*states(4090, b=1), index)
    one_layer = 2 * 4096 * 2 * 64 * 2
    peaks = {}
    for implementation in ("sdpa", "torchq"):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            step = {"input_ids": torch.tensor([[3]]), CACHE: cache, "use_cache": True}
            model(**step)
            peaks[implementation] = trace_memory(lambda step=step: model(**step)).peak
    assert 0.9 * one_layer < peaks["sdpa"] < 1.35 * one_layer
    assert peaks["torchq"] < 0.25 * one_layer


# ------------------------------------------------------------------------------------------------------------------- refusals


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"config": "llama"}, TypeError, r"config must be the model's configuration \(model.config\), got str"),
    ({"max_cache_len": 0}, ValueError, r"max_cache_len must be a positive number of tokens, or None to grow, got 0"),
    ({"max_cache_len": 10.5}, ValueError, r"max_cache_len must be .* got 10.5"),
    ({"dtype": "fp4"}, ValueError, r"dtype must be one of \('fp8', 'int8', 'int4'\), got 'fp4'"),
    ({"dtype": "16bit"}, ValueError, r"dtype must be one of"),
    ({"key_dtype": "bf16"}, ValueError, r"key_dtype must be one of \('fp8', 'int8', 'int4', '16bit'\), got 'bf16'"),
    ({"value_dtype": ""}, ValueError, r"value_dtype must be one of .* got ''"),
    ({"num_sink_tokens": -1}, ValueError, r"num_sink_tokens must be a number of tokens, 0 or more, got -1"),
    ({"num_recent_tokens": 1.5}, ValueError, r"num_recent_tokens must be .* got 1.5"),
    (
        {"config": config(80), "dtype": "int4"},
        ValueError,
        r"'int4' needs a head_dim that 64 divides, got 80; use 'int8' or 'fp8'",
    ),
    ({"config": config(80), "value_dtype": "int4"}, ValueError, r"'int4' needs a head_dim that 64 divides, got 80"),
    ({"dtype": "int8", "scales": {}}, ValueError, r"scales are for dtype='fp8', got keys 'int8' and values 'int8'"),
    ({"scales": {}, "rotate_keys": True}, ValueError, r"scales are those of keys that are not rotated; leave rotate_keys=None"),
    ({"scales": {}}, ValueError, r"scales has none for layer 0"),
    (
        {"scales": {0: (torch.ones(1), torch.zeros(1))}},
        ValueError,
        r"scales\[0\] must be two tensors of positive, finite numbers",
    ),
    ({"scales": {0: (torch.ones(1), torch.tensor([torch.inf]))}}, ValueError, r"scales\[0\] must be two tensors"),
    ({"scales": {0: (torch.ones(1),)}}, ValueError, r"scales\[0\] must be two tensors"),
    ({"scales": {0: (1.0, 1.0)}}, ValueError, r"scales\[0\] must be two tensors"),
    ({"scales": {0: torch.ones(2)}}, ValueError, r"scales\[0\] must be two tensors"),
    ({"scales": {0: 0.1}}, ValueError, r"scales\[0\] must be two tensors"),
    ({"scales": [torch.ones(1)]}, TypeError, r"scales must be a model or a mapping"),
    ({"scales": torch.nn.Linear(2, 2)}, ValueError, r"scales: this model has none; quantize it with"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=range(len(BAD)))
def test_wrong_settings(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FP8KVCache(**{"config": config(), **arguments})


def test_layers_that_have_no_quantized_kind(tiny_decoder: Callable[..., Any]) -> None:
    from transformers import FalconH1Config

    with pytest.raises(NotImplementedError, match=r"layer 0 of FalconH1Config needs a LinearAttentionAndFullAttentionLayer"):
        FP8KVCache(FalconH1Config(num_hidden_layers=2))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("implementation", ["sdpa", "torchq"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_too_many_tokens_change_nothing(tiny_decoder: Callable[..., Any], kind: str, implementation: str, tokens: int) -> None:
    model = tiny_decoder(kind)
    model.set_attn_implementation(implementation)
    cache = FP8KVCache(model.config, 24, num_recent_tokens=2)
    ids = torch.randint(2, 120, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids[:, : 25 - tokens], **{CACHE: cache})
        before, message = (
            contents(cache),
            f"holds max_cache_len=24 tokens, {25 - tokens} of them taken, and cannot take {tokens} more",
        )
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids[:, :tokens], **{CACHE: cache})
        assert same(contents(cache), before)
        cache.reset()
        with pytest.raises(ValueError, match="0 of them taken, and cannot take 25 more"):
            model(input_ids=torch.cat([ids, ids[:, :1]], 1), **{CACHE: cache})
        model(input_ids=ids, **{CACHE: cache})


def test_another_batch_needs_a_reset() -> None:
    cache = FP8KVCache(config())
    cache.update(*states(4), 0)
    before = contents(cache)
    with pytest.raises(ValueError, match=r"holds 2 sequences of 2 heads, got keys \[3, 2, 1, 64\]; call reset\(\)"):
        cache.update(*states(1, b=3), 0)
    assert same(contents(cache), before)
    cache.reset()
    cache.update(*states(4, b=3), 0)
    assert cache.batch_size == 3 and cache.get_seq_length() == 4


def test_scales_of_other_heads() -> None:
    cache = FP8KVCache(config(), scales={0: (torch.ones(3), torch.ones(1))})
    with pytest.raises(ValueError, match="scales: a layer of 2 heads needs 1 or 2, got 3"):
        cache.update(*states(4), 0)


def test_crop_takes_the_number_of_tokens_to_remove() -> None:
    cache = FP8KVCache(config())
    cache.update(*states(4), 0)
    with pytest.raises(ValueError, match="crop takes a negative number, the tokens to remove, got 2"):
        cache.crop(2)
    sliding = FP8KVCache(config(layer_types=["sliding_attention"], sliding_window=24))
    sliding.update(*states(60), 0)
    with pytest.raises(RuntimeError, match=r"has already overwritten the tokens .* activate_past_recording\(\)"):
        sliding.crop(-1)
    assert sliding.get_seq_length() == 60


def test_generate_takes_no_second_kind_of_cache(tiny_decoder: Callable[..., Any]) -> None:
    model = tiny_decoder("llama")
    options = {CACHE: FP8KVCache(model.config), "cache_implementation": "static", "max_new_tokens": 2}
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(torch.tensor([[3, 4]]), **options)


def test_attention_that_reads_keys_itself() -> None:
    """Of a model that calls functions, or methods, on what the cache returns, before or in place of its attention."""
    model_config = config()
    model_config._attn_implementation = "torchq"
    cache = FP8KVCache(model_config)
    cache.update(*states(4), 0)
    key, value = cache.update(*states(1), 0)
    assert key.shape == (2, 2, 128, 64) and value.dtype == torch.bfloat16
    for attempt in (lambda: torch.matmul(torch.ones(2, 2, 1, 64), key), lambda: torch.cat([key, value], 2)):
        with pytest.raises(TypeError, match=r"this model's attention calls .* use model.set_attn_implementation\('sdpa'\)"):
            attempt()
    with pytest.raises(AttributeError, match=r"this model's attention calls transpose on .* use model.set_attn_implementation"):
        key.transpose(2, 3)


def test_a_model_without_exchangeable_attention_reads_16_bits() -> None:
    """transformers leaves it its own attention, also when told to use torchq's."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=128, n_layer=2, n_head=2, vocab_size=50)).eval()
    model.set_attn_implementation("torchq")
    ids, cache = torch.randint(2, 50, (1, 12)), FP8KVCache(model.config, key_dtype="16bit", value_dtype="16bit")
    with torch.no_grad():
        model(input_ids=ids[:, :8], **{CACHE: cache})
        found = model(input_ids=ids[:, 8:], **{CACHE: cache}).logits
        torch.testing.assert_close(found, model(input_ids=ids).logits[:, 8:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "torchq"])
def test_gradients(tiny_decoder: Callable[..., Any], implementation: str) -> None:
    """Those of the first call are right; later ones, which would lack a part, are an error."""
    model, ids = tiny_decoder("llama").train(), torch.arange(2, 14)[None]
    model.set_attn_implementation(implementation)
    weight = model.model.layers[0].self_attn.k_proj.weight
    expected = torch.autograd.grad(model(input_ids=ids, use_cache=False).logits.square().mean(), weight)[0]
    cache = FP8KVCache(model.config)
    found = torch.autograd.grad(model(input_ids=ids, **{CACHE: cache}).logits.square().mean(), weight)[0]
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match=r"passes no gradients .* train with use_cache=False"):
        model(input_ids=ids[:, :2], **{CACHE: cache}).logits.mean().backward()
