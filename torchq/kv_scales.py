"""Static fp8 scales of a key-value cache: buffers ``k_scale`` and ``v_scale`` of the attention modules that fill it.

    stored code = round_e4m3(x / scale),  x ~ scale * code,  scale = max|x| / 448

They are named and shaped as compressed-tensors and vLLM read them: [1] for strategy ``"tensor"`` (one per layer), [H, 1, 1] for
``"attn_head"`` (one per key-value head). Layers do not use them: a cache does, and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchq.kernels.fp8 import FP8_MAX

SCALE_NAMES = ("k_scale", "v_scale")


def kv_scales(model: nn.Module) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the static scales of a model's key-value cache.

    Args:
        model: A model that ``quantize_(..., QuantConfig(kv_cache="fp8"))`` or :func:`torchq.load_pretrained` gave scales.

    Returns:
        layer_idx, as attention passes it to ``Cache.update``, -> (k_scale, v_scale): float32 copies, each [1], or [H] for one
        scale per key-value head, positive, on the device of the layer. Empty for a model without scales.

    Raises:
        ValueError: If a scale is not positive and finite: a cast to a narrower dtype lost it.
    """
    result = {}
    for name, module in attention_with_scales(model):
        pair = tuple(module._buffers[kind].detach().float().flatten() for kind in SCALE_NAMES)  # type: ignore[union-attr]
        if not all(is_usable(scale) for scale in pair):
            raise ValueError(
                f"{name} has a k_scale or v_scale that is not positive and finite; a cast to float16 may have lost it: load the "
                "checkpoint in that dtype instead (scales keep their own), or calibrate again"
            )
        result[int(module.layer_idx)] = (pair[0].clone(), pair[1].clone())  # type: ignore[arg-type]
    return dict(sorted(result.items()))


def attention_with_scales(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of every attention module that holds scales of its keys and values."""
    for name, module in model.named_modules():
        if hasattr(module, "layer_idx") and all(module._buffers.get(kind) is not None for kind in SCALE_NAMES):
            yield name, module


def kv_cache_strategy(model: nn.Module) -> str | None:
    """Return ``"tensor"`` or ``"attn_head"``, or None for a model without scales."""
    for _, module in attention_with_scales(model):
        scale = module._buffers["k_scale"]
        return "attn_head" if scale is not None and scale.ndim == 3 else "tensor"
    return None


def drop_kv_scales_(model: nn.Module) -> None:
    """Remove all scales, in place."""
    for _, module in list(attention_with_scales(model)):
        for kind in SCALE_NAMES:
            del module._buffers[kind]


def is_usable(scale: Tensor) -> bool:
    """Whether all scales are positive and finite."""
    return bool((torch.isfinite(scale) & (scale > 0)).all())


def scale_of(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp8 scale of values up to ``absmax``: absmax / 448, rounded up, and 1 where absmax is 0.

    Up, so that no value that was seen is beyond 448 scales. To nearest, a bfloat16 scale is at most 2^-9 too small, which fp8
    rounds away (values up to 464 scales round to 448); but a float16 one of values below 0.03 is subnormal and may be off by
    half, or 0, and NaN is what PyTorch makes of codes above 464. A range 2^-8 wider costs nothing: codes are floating point.

    Args:
        absmax: Any shape, finite, >= 0.
        dtype: dtype of the scale: float16, bfloat16 or float32.

    Returns:
        ``absmax``'s shape, ``dtype``, > 0; ``448 * scale >= absmax`` exactly.
    """
    exact = absmax.double() / FP8_MAX
    scale = exact.to(dtype)
    scale = torch.where(scale.double() < exact, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)
