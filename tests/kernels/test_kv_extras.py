"""What layers give the GPU kernels (in the interpreter), against the computation block by block: 16-bit tokens, static scales."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig

from torchq import FP8KVCache
from torchq.kernels import kv_attention, kv_cache
from torchq.kernels.dispatch import Gpu

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
LLAMA, MISTRAL = LlamaConfig(**SIZES, sliding_window=None), MistralConfig(**SIZES, sliding_window=32)


def mask_of(kind: str, q: int, tokens: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.rand(2, 1, q, 80) < 0.8
    mask[..., 0] = True
    mask[..., tokens:] = False
    return mask if kind == "bool" else torch.randn(1, 4, q, 80).masked_fill(~mask[:1], -torch.inf)


def both_ways(config: LlamaConfig, q: int, tokens: int, sinks: int, recent: int, kind: str) -> None:
    """The layer's attention as a CPU computes it, and as the GPU path does."""
    torch.manual_seed(tokens)
    cache = FP8KVCache(config, 80, num_sink_tokens=sinks, num_recent_tokens=recent)
    layer = cache.layers[0]
    for count in (tokens - q, q):
        layer.update(torch.randn(2, 2, count, 64), torch.randn(2, 2, count, 64))
    query, mask, logits = torch.randn(2, 4, q, 64), mask_of(kind, q, tokens), torch.randn(4)
    expected = layer.attend(query, mask, 0.2, 3.0, logits)
    if sinks + recent >= tokens and config is LLAMA:  # all in 16 bits: nothing of the codes is read
        layer.key.codes.view(torch.uint8).fill_(0x38)
        layer.value.codes.view(torch.uint8).fill_(0x38)
    patched = pytest.MonkeyPatch()
    patched.setattr(kv_attention, "gpu_of", lambda device: Gpu("sm_90", 1))
    actual = layer.attend(query, mask, 0.2, 3.0, logits)
    patched.undo()
    assert (actual - expected).norm() < 1e-3 * expected.norm()  # float16 inside the kernel


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize(("sinks", "recent"), [(3, 5), (0, 5), (4, 0)])
def test_equals_the_blocks(kind: str, sinks: int, recent: int, apart: Callable[[Callable[[], None]], None]) -> None:
    def check() -> None:
        for tokens in (5, 70):
            for q in (1, 3):
                if tokens > q:
                    both_ways(LLAMA, q, tokens, sinks, recent, kind)

    apart(check)


def test_sliding_layers(apart: Callable[[Callable[[], None]], None]) -> None:
    def check() -> None:
        for tokens in (20, 32, 33, 70):
            both_ways(MISTRAL, 1, tokens, 4, 5, "none")

    apart(check)


@pytest.mark.parametrize("scale", [torch.tensor([0.01]), torch.tensor([0.01, 0.02])], ids=["of tensors", "of heads"])
def test_static_scales(scale: Tensor, apart: Callable[[Callable[[], None]], None]) -> None:
    def check() -> None:
        torch.manual_seed(0)
        query, *states = (torch.randn(2, heads, count, 64) for heads, count in ((4, 1), (2, 9), (2, 9), (2, 1), (2, 1)))
        results = []
        for gpu in (None, Gpu("sm_90", 1)):
            layer = FP8KVCache(LLAMA, 64, scales={0: (scale, 2 * scale)}).layers[0]
            patched = pytest.MonkeyPatch()
            for module in (kv_attention, kv_cache):
                patched.setattr(module, "gpu_of", lambda device, gpu=gpu: gpu)
            layer.update(*states[:2])
            layer.update(*states[2:])
            codes = [side.codes.view(torch.uint8) for side in (layer.key, layer.value)]
            results.append((layer.attend(query, None, 0.2), *codes))
            patched.undo()
        (expected, *codes), (actual, *gpu_codes) = results
        assert all(torch.equal(*pair) for pair in zip(codes, gpu_codes, strict=True))
        assert (actual - expected).norm() < 1e-3 * expected.norm()

    apart(check)
