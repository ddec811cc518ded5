"""How far a quantized language model is from its 16-bit original, on the same tokens.

KL(base || quantized) of the next-token distributions, the greedy token's flip rate, and both perplexities; softmax in
float32. One window of both models' logits is in memory at a time.

A forward pass of a whole window looks at keys and values that no cache has held. With ``cache``, windows come in pieces instead,
one token and then ``CACHED_TOKENS`` at a time, so that all tokens but the first read what the cache holds of those before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.model_utils import cache_argument

CACHED_TOKENS = 32
"""Tokens of a call with a cache. A quantized cache stores, and gives each of them, what it would if they came one by one."""


@dataclass(frozen=True)
class Divergence:
    """Divergence of a quantized model from its base.

    Attributes:
        num_tokens: Predicted tokens.
        mean_kl: Mean KL(base || quantized), nats per token.
        mean_kl_standard_error: Its standard error, taking tokens as independent.
        median_kl: Median over tokens.
        p99_kl: 99th percentile over tokens.
        flip_rate: Share of tokens whose greedy prediction differs, 0 to 1.
        base_perplexity: Perplexity of the base.
        perplexity: Perplexity of the quantized model.
    """

    num_tokens: int
    mean_kl: float
    mean_kl_standard_error: float
    median_kl: float
    p99_kl: float
    flip_rate: float
    base_perplexity: float
    perplexity: float


@torch.no_grad()
def measure_divergence(
    base: nn.Module, quantized: nn.Module, windows: Iterable[Tensor], *, cache: Callable[[], Any] | None = None
) -> Divergence:
    """Compare two causal language models with one vocabulary, or one model with two caches.

    Args:
        base: The original; returns an object with ``.logits`` [1, T, V].
        quantized: The quantized model.
        windows: Token ids, [T] int64 each, T >= 2; the first token of each is context only.
        cache: Makes a cache for the quantized model, e.g. ``lambda: FP8KVCache(model.config)``; the base then sees the same
            pieces with its own. None: a forward pass of each window, without caches.

    Raises:
        ValueError: If there are no windows, or the vocabularies differ.
    """
    kl, flips = [], 0
    nll = torch.zeros(2, dtype=torch.float64)
    for window in windows:
        ids = window.unsqueeze(0)
        base_log_probs = _log_probs(base, ids) if cache is None else cached_log_probs(base, ids, None)
        quantized_log_probs = _log_probs(quantized, ids) if cache is None else cached_log_probs(quantized, ids, cache())
        if base_log_probs.shape != quantized_log_probs.shape:
            raise ValueError(
                f"base and quantized must share a vocabulary, got {base_log_probs.shape[-1]} and {quantized_log_probs.shape[-1]}"
            )
        targets = window[1:].unsqueeze(1)
        kl.append((base_log_probs.exp() * (base_log_probs - quantized_log_probs)).sum(-1).clamp_min(0).double())
        flips += int((base_log_probs.argmax(-1) != quantized_log_probs.argmax(-1)).sum())
        nll[0] -= base_log_probs.gather(1, targets).double().sum()
        nll[1] -= quantized_log_probs.gather(1, targets).double().sum()
    if not kl:
        raise ValueError("windows is empty: give at least one window of two or more tokens")
    values = torch.cat(kl)
    count = values.numel()
    return Divergence(
        num_tokens=count,
        mean_kl=values.mean().item(),
        mean_kl_standard_error=values.std().item() / math.sqrt(count) if count > 1 else math.inf,
        median_kl=values.median().item(),
        p99_kl=values.quantile(0.99).item(),
        flip_rate=flips / count,
        base_perplexity=math.exp(nll[0].item() / count),
        perplexity=math.exp(nll[1].item() / count),
    )


def _log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """[T - 1, V] float32 log-probabilities of the tokens after the first."""
    return model(ids).logits[0, :-1].float().log_softmax(-1)


def cached_log_probs(model: nn.Module, ids: Tensor, cache: Any, num_tokens: int = CACHED_TOKENS) -> Tensor:
    """Return log-probabilities of the tokens after the first, decoded from a cache.

    Args:
        model: A causal language model.
        ids: Token ids, [1, T].
        cache: An empty cache; None: the model's own.
        num_tokens: Tokens of each call but the first, which has one.

    Returns:
        [T - 1, V] float32.
    """
    name, logits = cache_argument(model), []
    for piece in (ids[:, :1], *ids[:, 1:-1].split(num_tokens, dim=1)):
        if piece.numel():
            output = model(piece, use_cache=True, **{name: cache})
            cache = getattr(output, name)
            logits.append(output.logits[0].float())
    return torch.cat(logits).log_softmax(-1)


def english_text() -> str:
    """English prose that every Python carries: the help topics of pydoc (about 0.7 MB)."""
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def token_windows(tokenizer: Any, text: str, *, num_windows: int, length: int, start: int = 0) -> list[Tensor]:
    """Cut a text into windows of tokens, each starting with the BOS token if the tokenizer has one.

    Args:
        tokenizer: A transformers tokenizer.
        text: The text.
        num_windows: How many.
        length: Tokens per window, BOS included.
        start: Tokens of the text to skip.

    Raises:
        ValueError: If the text is too short.
    """
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    step = length - len(prefix)
    needed = start + num_windows * step
    ids = tokenizer(text[: needed * 12], add_special_tokens=False)["input_ids"]
    if len(ids) < needed:
        raise ValueError(f"the text has {len(ids)} tokens, {needed} are needed for num_windows={num_windows} of length={length}")
    return [torch.tensor(prefix + ids[begin : begin + step]) for begin in range(start, needed, step)]
