import copy
import math

import pytest
import torch

from torchq import FP8KVCache
from torchq.evaluation import divergence
from torchq.evaluation.divergence import english_text, measure_divergence, token_windows
from torchq.model_utils import cache_argument
from torchq.testing import tiny_llama


def _windows(count=3, length=17):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 128, (length,), generator=generator) for _ in range(count)]


def test_a_model_does_not_diverge_from_itself():
    model = tiny_llama()
    result = measure_divergence(model, model, _windows())
    assert result.num_tokens == 3 * 16
    assert result.mean_kl == 0 and result.p99_kl == 0 and result.flip_rate == 0
    assert result.perplexity == result.base_perplexity


@torch.no_grad()
def test_figures_equal_a_literal_computation():
    base = tiny_llama()
    other = copy.deepcopy(base)
    for parameter in other.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    windows = _windows()
    kl, flips, nll = [], [], []
    for ids in windows:
        p = base(ids[None]).logits[0].double().softmax(-1)
        q = other(ids[None]).logits[0].double().softmax(-1)
        for t in range(len(ids) - 1):
            kl.append((p[t] * (p[t] / q[t]).log()).sum().item())
            flips.append(p[t].argmax() != q[t].argmax())
            nll.append(-q[t, ids[t + 1]].log().item())
    result = measure_divergence(base, other, windows)
    assert result.mean_kl == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert result.median_kl == pytest.approx(torch.tensor(kl).median().item(), rel=1e-3)
    assert result.mean_kl_standard_error == pytest.approx(torch.tensor(kl).std().item() / math.sqrt(len(kl)), rel=1e-3)
    assert result.flip_rate == pytest.approx(sum(map(float, flips)) / len(flips))
    assert result.perplexity == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-5)
    assert result.flip_rate > 0 and result.mean_kl > 0


def test_with_its_own_cache_a_model_does_not_diverge_from_itself():
    model, windows = tiny_llama(), _windows(2, 100)
    plain = measure_divergence(model, model, windows)
    cached = measure_divergence(model, model, windows, cache=lambda: None)
    assert cached.mean_kl == 0 and cached.num_tokens == plain.num_tokens == 2 * 99
    assert cached.perplexity == pytest.approx(plain.perplexity, rel=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "torchq"])
def test_a_cache_is_in_use_whatever_the_pieces(implementation, monkeypatch):
    model, windows, caches = tiny_llama(head_dim=64), _windows(2, 100), []

    def new_cache():
        caches.append(FP8KVCache(model.config, dtype="int4"))
        return caches[-1]

    model.set_attn_implementation(implementation)
    in_pieces = measure_divergence(model, model, windows, cache=new_cache)
    monkeypatch.setattr(divergence, "CACHED_TOKENS", 1)
    one_by_one = measure_divergence(model, model, windows, cache=new_cache)
    assert len(caches) == 4 and all(cache.get_seq_length() == 99 for cache in caches)
    assert in_pieces.mean_kl == pytest.approx(one_by_one.mean_kl, rel=1e-3) and in_pieces.flip_rate == one_by_one.flip_rate
    assert 1e-3 < in_pieces.mean_kl < 0.2


@torch.no_grad()
def test_a_caches_figures_equal_a_literal_computation():
    model, (ids,) = tiny_llama(head_dim=64), _windows(1, 50)
    cache, rows = FP8KVCache(model.config, dtype="int8"), []
    for token in ids[:-1]:
        rows.append(model(token[None, None], use_cache=True, **{cache_argument(model): cache}).logits[0, 0].double().softmax(-1))
    p, q = model(ids[None]).logits[0, :-1].double().softmax(-1), torch.stack(rows)
    result = measure_divergence(model, model, [ids], cache=lambda: FP8KVCache(model.config, dtype="int8"))
    assert result.mean_kl == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-2)


def test_bad_input_is_named():
    model = tiny_llama()
    with pytest.raises(ValueError, match="windows is empty"):
        measure_divergence(model, model, [])
    with pytest.raises(ValueError, match="must share a vocabulary, got 128 and 64"):
        measure_divergence(model, tiny_llama(vocab_size=64), [torch.tensor([1, 2, 3])])


class _Tokenizer:
    bos_token_id = 7

    def __call__(self, text, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [ord(character) % 100 for character in text]}


def test_windows_start_with_bos_and_do_not_overlap():
    text = english_text()
    windows = token_windows(_Tokenizer(), text, num_windows=3, length=5, start=2)
    assert [window.tolist() for window in windows] == [
        [7] + [ord(c) % 100 for c in text[begin : begin + 4]] for begin in (2, 6, 10)
    ]
    with pytest.raises(ValueError, match="the text has 3 tokens, 8 are needed for num_windows=2 of length=5"):
        token_windows(_Tokenizer(), "abc", num_windows=2, length=5)


def test_english_text_is_prose():
    text = english_text()
    assert len(text) > 300_000 and " the " in text
