"""FP8KVCache: a KV cache of 8 or 4 bits that drops into ``generate``.

Imported with the first use of ``torchq.FP8KVCache``; it needs transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from torchq.integrations import attention
from torchq.kernels.kv_cache import FORMATS
from torchq.kv_layer import KVCacheLayer, LayerSettings
from torchq.kv_scales import is_usable, kv_scales
from torchq.kv_side import check_head_dim
from torchq.plan import layer_shape

DTYPES = FORMATS[:3]


class FP8KVCache(Cache):
    """A quantized KV cache: ``model.generate(..., past_key_values=FP8KVCache(model.config))``.

    With ``model.set_attn_implementation("torchq")`` attention reads the quantized bytes; with any other implementation the cache
    returns one layer's keys and values in 16 bits at a time. The first tokens (the prompt) attend to themselves in 16 bits;
    later ones read what is stored.

    Args:
        config: The model's configuration. Sliding-window and hybrid models get the layers they need.
        max_cache_len: Most tokens; memory is allocated for them at once, and the cache works with ``torch.compile`` and CUDA
            graphs. None: it grows. Compiled sliding-window models take a padded ``attention_mask`` with torchq's attention;
            with others ``generate`` makes their masks, outside of what is compiled.
        dtype: ``"fp8"`` (e4m3; the default), ``"int8"`` or ``"int4"`` (asymmetric, groups of 32 channels).
        key_dtype, value_dtype: Other than ``dtype`` for one of both; also ``"16bit"``: the model's dtype. Keys need more bits.
        scales: Static scales for ``"fp8"``: a model that has them (``quantize_(..., kv_cache="fp8")``, or loaded from a
            checkpoint with ``kv_cache_scheme``), or layer index -> (scale of keys, of values), float32 [1] or [H]. None: one per
            token and head, measured.
        rotate_keys: Whether keys are stored multiplied by a Hadamard matrix, which spreads outlier channels. None: for
            ``"int8"`` and ``"int4"`` keys; for fp8 it depends on the model which is better.
        num_sink_tokens: How many of the first tokens stay in 16 bits as well (not in sliding layers).
        num_recent_tokens: How many of the last ones do.

    Raises:
        ValueError, TypeError, NotImplementedError: If a setting is wrong or the model has layers that this cache cannot serve;
            the message names it.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int | None = None,
        *,
        dtype: str = "fp8",
        key_dtype: str | None = None,
        value_dtype: str | None = None,
        scales: nn.Module | Mapping[int, tuple[Tensor, Tensor]] | None = None,
        rotate_keys: bool | None = None,
        num_sink_tokens: int = 0,
        num_recent_tokens: int = 0,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be the model's configuration (model.config), got {type(config).__name__}")
        for name, value in (("num_sink_tokens", num_sink_tokens), ("num_recent_tokens", num_recent_tokens)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a number of tokens, 0 or more, got {value!r}")
        if max_cache_len is not None and (not isinstance(max_cache_len, int) or max_cache_len < 1):
            raise ValueError(f"max_cache_len must be a positive number of tokens, or None to grow, got {max_cache_len!r}")
        key_format, value_format = _as_format("key_dtype", key_dtype, dtype), _as_format("value_dtype", value_dtype, dtype)
        static = _as_scales(scales, key_format, value_format, rotate_keys)
        if rotate_keys is None:
            rotate_keys = key_format in ("int8", "int4")
        decoder = config.get_text_config(decoder=True)
        settings = LayerSettings(
            key_format,
            value_format,
            rotate_keys,
            max_cache_len,
            num_sink_tokens,
            num_recent_tokens,
            lambda: decoder._attn_implementation == attention.NAME,
        )
        self.settings = settings
        super().__init__(layers=_layers(decoder, settings, static))

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and scales, all layers."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, KVCacheLayer))

    def __repr__(self) -> str:
        settings = self.settings
        size = "grows" if settings.max_cache_len is None else f"max_cache_len={settings.max_cache_len}"
        return f"FP8KVCache({len(self.layers)} layers, keys {settings.key_format}, values {settings.value_format}, {size})"


def _as_format(name: str, value: str | None, dtype: str) -> str:
    """The format of keys or values: their own, or that of both."""
    name, value, allowed = ("dtype", dtype, DTYPES) if value is None else (name, value, FORMATS)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    return value


def _as_scales(
    scales: Any, key_format: str, value_format: str, rotate_keys: bool | None
) -> Mapping[int, tuple[Tensor, Tensor]] | None:
    """Static scales by layer, checked."""
    if scales is None:
        return None
    if (key_format, value_format) != ("fp8", "fp8"):
        raise ValueError(f"scales are for dtype='fp8', got keys {key_format!r} and values {value_format!r}; leave scales=None")
    if rotate_keys:
        raise ValueError("scales are those of keys that are not rotated; leave rotate_keys=None")
    if isinstance(scales, nn.Module):
        scales = kv_scales(scales)
        if not scales:
            raise ValueError(
                "scales: this model has none; quantize it with QuantConfig(..., kv_cache='fp8') and calibration data, "
                "or leave scales=None"
            )
    if not isinstance(scales, Mapping):
        raise TypeError(
            f"scales must be a model or a mapping of layers to (scale of keys, of values), got {type(scales).__name__}"
        )
    for layer, pair in scales.items():
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(s, Tensor) and is_usable(s) for s in pair)):
            raise ValueError(f"scales[{layer!r}] must be two tensors of positive, finite numbers (keys, values), got {pair!r}")
    return scales


def _layers(config: PreTrainedConfig, settings: LayerSettings, scales: Mapping[int, tuple[Tensor, Tensor]] | None) -> list[Any]:
    """A layer for each of those that transformers' own cache has for this model."""
    own = DynamicCache(config=config).layers
    if not own:
        raise ValueError(f"config: transformers has no KV cache for {type(config).__name__}")
    others = StaticCache(config, settings.max_cache_len).layers if settings.max_cache_len is not None else own
    configs = getattr(config, "per_layer_config", None) or [config] * len(own)  # new in transformers: heads may differ
    layers: list[Any] = []
    for index, (layer, other, of_layer) in enumerate(zip(own, others, configs, strict=False)):
        static = None if scales is None else scales.get(index)
        if type(layer) is DynamicLayer or type(layer) is DynamicSlidingWindowLayer:
            window = getattr(layer, "sliding_window", None)
            if "int4" in (settings.key_format, settings.value_format):
                shape = layer_shape(of_layer, window)
                check_head_dim(settings.key_format, shape.key_dim)
                check_head_dim(settings.value_format, shape.value_dim)
            if scales is not None and static is None:
                raise ValueError(f"scales has none for layer {index}")
            layers.append(KVCacheLayer(settings, window, static))
        elif type(layer) is LinearAttentionLayer or type(layer).__name__ == "DummyLayer":
            layers.append(other)  # no keys and values in there
        else:
            raise NotImplementedError(
                f"layer {index} of {type(config).__name__} needs a {type(layer).__name__}, of which there is no quantized kind; "
                "use transformers' own cache for this model"
            )
    return layers
