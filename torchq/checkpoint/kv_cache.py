"""Static scales of the key-value cache out of a checkpoint: buffers for them before the weights are loaded, checks afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchq.checkpoint.writer import checkpoint_converter
from torchq.kv_scales import SCALE_NAMES, is_usable
from torchq.model_utils import list_names

# Written by older llm-compressor versions for symmetric schemes too: all 0.
_ZERO_POINT_NAMES = ("k_zero_point", "v_zero_point")

Header = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def place_kv_scales(model: nn.Module, strategy: str | None, header: Header) -> dict[str, torch.dtype]:
    """Register empty buffers for the scales that a checkpoint holds on the model's attention modules.

    Args:
        model: On the meta device.
        strategy: Of the checkpoint's ``kv_cache_scheme``; None: it has none, and nothing is done.
        header: Checkpoint tensor name -> (shape, dtype).

    Returns:
        Full name of each buffer -> dtype on disk.

    Raises:
        ValueError: If a layer lacks scales that others have, all do, or one is of a wrong shape or dtype.
    """
    if strategy is None:
        return {}
    placed: dict[str, torch.dtype] = {}
    kinds: set[type[nn.Module]] = set()
    without: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "layer_idx", None), int):
            continue
        stored = {
            kind: key for kind in SCALE_NAMES + _ZERO_POINT_NAMES if (key := _stored(model, name, kind, header)) is not None
        }
        if any(kind not in stored for kind in SCALE_NAMES):
            without.append((name, module))
            continue
        kinds.add(type(module))
        _check_shapes(strategy, {stored[kind]: header[stored[kind]] for kind in SCALE_NAMES})
        for kind, key in stored.items():
            shape, dtype = header[key]
            module.register_buffer(kind, torch.empty(shape, dtype=dtype, device="meta"))
            placed[f"{name}.{kind}"] = dtype
    if not placed:
        raise ValueError(
            "quantization_config has a kv_cache_scheme, but the checkpoint holds no k_scale and v_scale of this model's "
            "attention modules; config.json does not belong to these weights, or set kv_cache_scheme to null"
        )
    lacking = [name for name, module in without if type(module) in kinds]
    if lacking:
        raise ValueError(
            f"{list_names(lacking)} have no k_scale and v_scale in the checkpoint, other layers do; download or save it again"
        )
    return placed


def settle_kv_scales(model: nn.Module, placed: Mapping[str, torch.dtype]) -> None:
    """Check the values that were loaded, undo casts, and remove zero points, which are 0.

    Args:
        model: With the loaded tensors.
        placed: From :func:`place_kv_scales`.

    Raises:
        ValueError: If a scale is not positive and finite, or a zero point not 0.
    """
    for full_name, dtype in placed.items():
        name, _, kind = full_name.rpartition(".")
        module = model.get_submodule(name)
        tensor = module._buffers[kind]
        if tensor is None or tensor.is_meta:
            continue  # reported as missing by the caller
        if kind in SCALE_NAMES:
            module._buffers[kind] = tensor.to(dtype)
            if not is_usable(tensor.float()):
                raise ValueError(f"{full_name} is not positive and finite in the checkpoint; download or save it again")
            continue
        if bool(tensor.float().any()):
            raise ValueError(f"{full_name} is not 0 in the checkpoint, although its kv_cache_scheme is symmetric")
        del module._buffers[kind]


def _stored(model: nn.Module, name: str, kind: str, header: Header) -> str | None:
    """Name of a tensor in the checkpoint, the original one or the model's own; None if it is not there."""
    own = f"{name}.{kind}"
    if own in header:
        return own
    renamed: dict[str, Tensor] = checkpoint_converter(model)({own: torch.empty(1, device="meta")})
    return next((key for key in renamed if key in header), None)


def _check_shapes(strategy: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    shapes = [shape for shape, _ in tensors.values()]
    for name, (shape, dtype) in tensors.items():
        per_head = len(shape) == 3 and shape[0] > 0 and shape[1:] == (1, 1)
        fits = per_head if strategy == "attn_head" else shape == (1,)
        if not fits or shape != shapes[0] or not dtype.is_floating_point:
            wanted = "[heads, 1, 1]" if strategy == "attn_head" else "[1]"
            raise ValueError(
                f"{name} is {dtype} {list(shape)} in the checkpoint, but kv_cache_scheme with strategy={strategy!r} needs "
                f"floating point {wanted}, the same for keys and values; config.json does not belong to these weights"
            )
