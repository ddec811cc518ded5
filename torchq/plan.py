"""Arithmetic of memory: what the keys and values of a model take, and how many tokens fit.

    bytes per token = sum over layers of H (s(D) + s(Dv)),    s(D) = 2 D in 16 bits, D + 2 in 8, D / 2 + 3 D / 32 in 4

H key/value heads, D channels of a key, Dv of a value; scales as :mod:`torchq.kernels.kv_cache` stores them. No model is built:
the layers are those of transformers' own cache for a configuration, heads and channels what the configuration says. (A model may
do otherwise in its code: MiMo-V2-Flash has twice the heads in sliding layers.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchq.kernels.kv_cache import GROUP_SIZE
from torchq.kv_side import check_head_dim

KV_FORMATS = ("16bit", "fp8", "fp8_static", "int8", "int4")
"""What ``kv_cache`` may be. ``"fp8_static"``: scales from a checkpoint, which no token adds to."""

_COUNTED = "layers of full, sliding and linear attention are"


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores: heads, channels of keys and of values, and how many tokens it keeps at most."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None

    def bytes_per_token(self, key_format: str, value_format: str) -> int:
        """Of one sequence, scales and zero points included."""
        return self.heads * (_side_bytes(key_format, self.key_dim) + _side_bytes(value_format, self.value_dim))


def kv_bytes_per_token(config: Any, kv_cache: str | tuple[str, str] = "16bit") -> float:
    """Return the bytes that one more token of one sequence takes in all layers that keep every token.

    Layers with a sliding window count nothing here (their windows are full, in the end); see :func:`kv_cache_bytes`.

    Args:
        config: A model's configuration, of transformers (``AutoConfig.from_pretrained`` reads one without the weights).
        kv_cache: One of ``KV_FORMATS``, or two: of keys and of values.

    Raises:
        ValueError, TypeError, NotImplementedError: If a format is unknown or does not suit the heads, or the model keeps
            something else than keys and values of tokens; the message names it.
    """
    formats = _as_formats(kv_cache)
    return float(sum(layer.bytes_per_token(*formats) for layer in _layers(config, formats) if layer.window is None))


def kv_cache_bytes(config: Any, tokens: int, batch: int = 1, kv_cache: str | tuple[str, str] = "16bit") -> int:
    """Return the bytes of keys, values and their scales.

    That is ``FP8KVCache(config, max_cache_len=tokens).nbytes``. A cache that grows has room for up to 127 tokens more. Neither
    16-bit copies of first and recent tokens count, nor the states of linear-attention layers, which no token adds to.

    Args:
        config: See :func:`kv_bytes_per_token`.
        tokens: Of each sequence, prompt included.
        batch: Sequences, those of beam search included.
        kv_cache: See :func:`kv_bytes_per_token`.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`kv_bytes_per_token`, or if a number is too small.
    """
    _check_at_least(0, tokens=tokens)
    _check_at_least(1, batch=batch)
    formats = _as_formats(kv_cache)
    return batch * sum(layer.bytes_per_token(*formats) * _kept(layer, tokens) for layer in _layers(config, formats))


def tokens_that_fit(config: Any, num_bytes: float, batch: int = 1, kv_cache: str | tuple[str, str] = "16bit") -> int | None:
    """Return the most tokens of each sequence whose keys and values fit into ``num_bytes``; None: any number does.

    Args:
        config: See :func:`kv_bytes_per_token`.
        num_bytes: What is left beside weights and activations.
        batch: Sequences that share it.
        kv_cache: See :func:`kv_bytes_per_token`.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`kv_cache_bytes`.
    """
    _check_at_least(0, num_bytes=num_bytes)
    _check_at_least(1, batch=batch)
    formats = _as_formats(kv_cache)
    layers = _layers(config, formats)
    tokens, left = 0, num_bytes / batch
    for window in sorted({layer.window for layer in layers if layer.window is not None}):  # where another layer stops growing
        growing = sum(layer.bytes_per_token(*formats) for layer in layers if layer.window is None or layer.window > tokens)
        if growing * (window - tokens) > left:
            return tokens + int(left // growing)
        tokens, left = window, left - growing * (window - tokens)
    growing = sum(layer.bytes_per_token(*formats) for layer in layers if layer.window is None)
    return tokens + int(left // growing) if growing else None


def _kept(layer: LayerShape, tokens: int) -> int:
    return tokens if layer.window is None else min(tokens, layer.window)


def _as_formats(kv_cache: str | tuple[str, str]) -> tuple[str, str]:
    formats = (kv_cache, kv_cache) if isinstance(kv_cache, str) else tuple(kv_cache)
    if len(formats) != 2 or not set(formats) <= set(KV_FORMATS):
        raise ValueError(f"kv_cache must be one of {KV_FORMATS}, or a pair of them (keys, values), got {kv_cache!r}")
    return formats


def _check_at_least(least: int, **numbers: float) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} must be {least} or more, got {number!r}")


def _side_bytes(kv_format: str, dim: int) -> int:
    """Bytes of one token and head, scales and zero points included."""
    if kv_format == "int4":
        return dim // 2 + 3 * (dim // GROUP_SIZE)
    return {"16bit": 2 * dim, "fp8": dim + 2, "int8": dim + 2, "fp8_static": dim}[kv_format]


def _layers(config: Any, formats: tuple[str, str]) -> list[LayerShape]:
    """The layers that keep keys and values: those that transformers' own cache has for this model."""
    from transformers import DynamicCache, PreTrainedConfig
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a model's configuration (model.config), got {type(config).__name__}")
    decoder = config.get_text_config(decoder=True)
    try:
        own = DynamicCache(config=decoder).layers
    except KeyError as error:  # of a kind that comes with the model's code
        raise NotImplementedError(f"{type(config).__name__} has layers of {error}, which is not counted; {_COUNTED}") from error
    each = getattr(decoder, "per_layer_config", None) or [decoder] * len(own)  # heads may differ between layers
    layers = []
    for index, cached in enumerate(own):
        plain = type(cached) is DynamicLayer or type(cached) is DynamicSlidingWindowLayer
        if plain or (isinstance(cached, DynamicLayer) and isinstance(cached, LinearAttentionLayer)):
            layer = layer_shape(each[index], getattr(cached, "sliding_window", None))
            for kv_format, dim in zip(formats, (layer.key_dim, layer.value_dim), strict=True):
                check_head_dim(kv_format, dim)
            layers.append(layer)
        elif isinstance(cached, DynamicLayer):
            raise NotImplementedError(
                f"layer {index} of {type(config).__name__} keeps more than keys and values ({type(cached).__name__}), which is "
                f"not counted; {_COUNTED}"
            )
    return layers


def layer_shape(config: Any, window: int | None) -> LayerShape:
    """Heads and channels, by the names that configurations have for them."""
    latent = getattr(config, "kv_lora_rank", None)
    if latent:  # multi-head latent attention: transformers keeps latents for all heads, and the part that rotary embeddings turn
        return LayerShape(1, latent, config.qk_rope_head_dim, window)

    def setting(name: str) -> Any:
        own = getattr(config, f"swa_{name}", None) if window is not None else None  # of sliding layers (Inkling)
        return own or getattr(config, name, None)

    heads, head_dim = setting("num_attention_heads"), setting("head_dim")
    if not heads:
        raise ValueError(f"config: {type(config).__name__} has no num_attention_heads, so there are no keys and values to count")
    head_dim = head_dim or config.hidden_size // heads
    heads = setting("num_key_value_heads") or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1  # Falcon, GPT-BigCode
    return LayerShape(heads, head_dim, getattr(config, "v_head_dim", None) or head_dim, window)
