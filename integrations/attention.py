"""``attn_implementation="torchq"``: transformers' attention on a quantized KV cache, read as it is stored.

Registered when imported (``torchq.FP8KVCache`` does)::

    model.set_attn_implementation("torchq")
    model.generate(**inputs, past_key_values=FP8KVCache(model.config))

With any other cache, without one, and for the prompt, it is transformers' SDPA attention; where that cannot take a soft cap or
attention sinks, it is torchq's own on the keys and values as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function, sdpa_mask

from torchq.kernels.kv_attention import kv_attention
from torchq.kv_side import StoredStates

NAME = "torchq"


def torchq_attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, Hq, q, D], output [B, q, Hq, Dv] and no weights.

    Raises:
        NotImplementedError: For a position bias.
        RuntimeError: For gradients through a stored cache.
    """
    stored = isinstance(key, StoredStates)
    if not stored and not softcap and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("attn_implementation='torchq' has no position bias; use model.set_attn_implementation('eager')")
    if module.training and torch.is_grad_enabled() and query.requires_grad:
        raise RuntimeError(
            "attn_implementation='torchq' passes no gradients through a stored KV cache, a soft cap or attention sinks; "
            "train with use_cache=False and another implementation, or call model.eval()"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None and not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        attention_mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)  # encoders, cross attention
    if stored:
        out = key.layer.attend(query, attention_mask, scaling, softcap or 0.0, s_aux)
    else:
        out = _attend_16bit(query, key, value, attention_mask, scaling, softcap or 0.0, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _attend_16bit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention over keys and values [B, H, n, D] that no cache holds."""
    length = torch.full((), key.shape[2], device=key.device)
    value_t, start = value.transpose(2, 3).contiguous(), torch.zeros_like(length)
    stored = (key, None, None, value_t, None, None, None, None)
    return kv_attention(query, *stored, length, mask, start, sinks, "16bit", "16bit", scaling, softcap, 0, 0)


def torchq_mask(
    *,
    kv_length: int,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Make transformers' boolean mask, also where the first position is a tensor: in compiled code, for sliding layers.

    Its own function would decide by that tensor whether padding has to be made longer.
    """
    if attention_mask is not None and isinstance(kv_offset, Tensor):
        longer = torch.nn.functional.pad(attention_mask, (0, kv_length))
        mask_function, attention_mask = and_masks(mask_function, padding_mask_function(longer)), None
        kwargs["allow_is_causal_skip"] = False
    options = {"mask_function": mask_function, "attention_mask": attention_mask, **kwargs}
    return sdpa_mask(kv_length=kv_length, kv_offset=kv_offset, **options)


AttentionInterface.register(NAME, torchq_attention)
AttentionMaskInterface.register(NAME, torchq_mask)
