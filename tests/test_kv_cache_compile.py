"""``torch.compile`` of a model with a quantized KV cache of fixed size: one graph for the prompt, one for all steps after it."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from transformers import LlamaForCausalLM

from torchq import FP8KVCache

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
SETTINGS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "some in 16 bits": {"dtype": "int8", "num_sink_tokens": 3, "num_recent_tokens": 4},
    "mixed": {"key_dtype": "int8", "value_dtype": "int4"},
    "static scales": {"scales": {i: (torch.tensor([0.05]), torch.tensor([0.02, 0.03])) for i in range(2)}},
}


IN_BRIEF = [
    ("llama", "sdpa", "some in 16 bits"),
    ("llama", "torchq", "static scales"),
    ("gemma3", "sdpa", "static scales"),
    ("gemma3", "torchq", "some in 16 bits"),
]
CASES = [
    pytest.param(*case, marks=() if case in IN_BRIEF else pytest.mark.slow)
    for case in itertools.product(("llama", "gemma3"), ("sdpa", "torchq"), SETTINGS)
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> tuple[Callable[..., Any], list[Any]]:
    """The function, compiled as one graph, and the graphs."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        run = lookup_backend(backend)(graph, inputs)
        graphs.append(graph)  # not where the backend has the graph made once more
        return run

    return torch.compile(function, fullgraph=True, backend=counting), graphs


def run(forward: Callable[..., Any], cache: FP8KVCache, padded: bool, steps: int = 20) -> Tensor:
    """Logits of a prompt of 20 tokens and of those after it, one by one."""
    ids = torch.randint(2, 120, (2, 64), generator=torch.Generator().manual_seed(0))
    mask, found = torch.ones(2, 64, dtype=torch.long), []
    mask[0, :7] = 0
    with torch.no_grad():
        for start, stop in [(0, 20), *((i, i + 1) for i in range(20, 20 + steps))]:
            position = torch.arange(start, stop).expand(2, -1)
            inputs = {"input_ids": ids[:, start:stop], "position_ids": position, "attention_mask": mask if padded else None}
            found.append(forward(**inputs, **{CACHE: cache}, use_cache=True).logits)
    return torch.cat(found, 1)[:, 7:]


@pytest.mark.parametrize(("kind", "implementation", "name"), CASES)
def test_two_graphs(tiny_decoder: Callable[..., Any], kind: str, implementation: str, name: str) -> None:
    settings = SETTINGS[name]
    model = tiny_decoder(kind, head_dim=64).double()  # where no rounding decides about a code
    model.set_attn_implementation(implementation)
    forward, graphs = compiled(model.forward)
    padded = kind == "llama" or implementation == "torchq"  # else transformers' masks depend on how many tokens there are
    cache = FP8KVCache(model.config, 64, **settings)
    found, expected = run(forward, cache, padded), run(model.forward, FP8KVCache(model.config, 64, **settings), padded)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2
    assert not [node for graph in graphs for node in graph.graph.nodes if str(node.target) in ("item", "tolist", "cpu")]


def test_a_cache_is_used_again(tiny_decoder: Callable[..., Any]) -> None:
    """The first prompt allocates memory; those after it have one more graph, which is the last."""
    model = tiny_decoder("llama", num_hidden_layers=1)
    model.set_attn_implementation("torchq")
    forward, graphs = compiled(model.forward, "eager")
    cache, expected = FP8KVCache(model.config, 64), run(model.forward, FP8KVCache(model.config, 64), True, 3)
    for count in (2, 3, 3):
        torch.testing.assert_close(run(forward, cache, True, 3), expected, rtol=1e-5, atol=1e-4)
        assert len(graphs) == count and cache.get_seq_length() == 23
        cache.reset()


@pytest.mark.parametrize("implementation", ["torchq", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_generate_with_a_compiled_model(tiny_decoder: Callable[..., Any], implementation: str) -> None:
    """Which makes masks outside, with padding for either attention."""
    model = tiny_decoder("gemma3", head_dim=64)
    model.set_attn_implementation(implementation)
    ids = torch.randint(2, 120, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(ids, **options, **{CACHE: FP8KVCache(model.config, 64, dtype="int8")})
    model.forward, graphs = compiled(model.forward, "eager")
    found = model.generate(ids, **options, **{CACHE: FP8KVCache(model.config, 64, dtype="int8")})
    assert torch.equal(found, expected) and len(graphs) == 2


def test_a_compiled_model_checks_the_length_too(tiny_decoder: Callable[..., Any]) -> None:
    model = tiny_decoder("llama", num_hidden_layers=1)
    model.set_attn_implementation("torchq")
    forward, _ = compiled(model.forward, "eager")
    cache = FP8KVCache(model.config, 64)
    run(forward, cache, True, 44)
    before = [t.clone().view(torch.uint8) for t in cache.layers[0]._buffers()]
    with pytest.raises(ValueError, match="holds max_cache_len=64 tokens, 64 of them taken, and cannot take 1 more"):
        run_step(forward, cache)
    assert all(torch.equal(t.view(torch.uint8), old) for t, old in zip(cache.layers[0]._buffers(), before, strict=True))
    assert cache.get_seq_length() == 64


def run_step(forward: Callable[..., Any], cache: FP8KVCache) -> None:
    inputs = {"input_ids": torch.tensor([[3], [4]]), "position_ids": torch.tensor([[64], [64]])}
    with torch.no_grad():
        forward(**inputs, attention_mask=torch.ones(2, 64, dtype=torch.long), **{CACHE: cache}, use_cache=True)


@pytest.mark.slow
def test_with_inductor(tiny_decoder: Callable[..., Any]) -> None:
    model = tiny_decoder("gemma3", head_dim=64)
    model.set_attn_implementation("torchq")
    forward, graphs = compiled(model.forward, "inductor")
    found = run(forward, FP8KVCache(model.config, 64, dtype="int8"), True)
    expected = run(model.forward, FP8KVCache(model.config, 64, dtype="int8"), True)
    assert (found - expected).norm() < 1e-3 * expected.norm()  # some codes are rounded the other way
    assert len(graphs) == 2
