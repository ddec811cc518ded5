"""Where a model keeps keys and values, and how large they are: the static scales of an fp8 key-value cache.

Attention is handed a cache that looks at what it is given to keep and keeps nothing. It is handed to the attention modules alone,
not to the model, whose masks are then those of a forward pass without a cache: with one, transformers would let packed documents
see each other.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchq._undo import UndoLog
from torchq.calibration.data import Batches
from torchq.calibration.packing import Batch
from torchq.calibration.passes import eval_mode, no_cache, without_cache
from torchq.calibration.stream import few_logits, first_sequence
from torchq.config import KV_CACHES
from torchq.kv_scales import SCALE_NAMES, scale_of
from torchq.model_utils import list_names
from torchq.report import QuantReport

_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past")  # names that transformers 5.17 to 5.24 use
_PROBED_TOKENS = 32
_REMEDY = "set kv_cache=None to leave the cache in 16 bits"

Record = Callable[[nn.Module, int, Tensor, Tensor], None]


@torch.no_grad()
def find_cached_attention(model: nn.Module, batch: Batch) -> dict[int, str]:
    """Return layer_idx -> name of the module that keeps its keys and values under it, by a forward pass of a few tokens.

    Args:
        model: A transformers model.
        batch: Up to 32 tokens of its first sequence are used.

    Raises:
        TypeError: If it is not a transformers model.
        ValueError: If no module keeps keys and values in a cache, or one has attributes of the names of the scales.
        NotImplementedError: If layers share a cache, one layer has two (cross attention), or it holds latents, or anything but
            [B, H, T, head_dim].
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TypeError(f"kv_cache needs a transformers model, got {type(model).__name__}; {_REMEDY}")
    if getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None:  # type: ignore[union-attr,operator]
        raise NotImplementedError(
            "kv_cache does not support multi-head latent attention (kv_lora_rank in the config): what it keeps are no keys and "
            f"values, and vLLM stores both parts by one scale; {_REMEDY}"
        )
    per_token = ("input_ids", "attention_mask", "position_ids", "decoder_input_ids", "decoder_attention_mask")
    inputs = {k: v[:, :_PROBED_TOKENS] if k in per_token else v for k, v in first_sequence(batch).items()}
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, list[nn.Module]] = defaultdict(list)
    flat: list[str] = []

    def record(module: nn.Module, layer_idx: int, key: Tensor, value: Tensor) -> None:
        if not any(module is other for other in found[layer_idx]):
            found[layer_idx].append(module)
        if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
            flat.append(f"{names[id(module)]} ({list(key.shape)}, {list(value.shape)})")

    candidates = [module for module in model.modules() if _cache_argument(module) is not None]
    with _watched(candidates, model, record, everywhere=False) as ran, eval_mode(model):
        model(**_placed(model, inputs), **_asking_for_cache(model))
    _check(found, ran, names)
    if flat:
        raise NotImplementedError(
            f"kv_cache needs keys and values [batch, heads, tokens, head_dim], got {list_names(flat)}; {_REMEDY}"
        )
    return {layer_idx: names[id(modules[0])] for layer_idx, modules in sorted(found.items())}


def _check(found: dict[int, list[nn.Module]], ran: list[nn.Module], names: dict[int, str]) -> None:
    """Check that every layer has one cache of its own, and can be told by its ``layer_idx``."""
    if not found:
        raise ValueError(
            "kv_cache: no attention layer of the model keeps keys and values in a cache: there is none, or it takes "
            f"no transformers Cache or has no layer_idx; {_REMEDY}"
        )
    storing = [module for modules in found.values() for module in modules]
    twice = [f"layer {index} ({', '.join(names[id(m)] for m in modules)})" for index, modules in found.items() if modules[1:]]
    if twice:
        raise NotImplementedError(
            f"kv_cache supports one cache per layer, got several for {list_names(twice)} (self and cross attention); {_REMEDY}"
        )
    wrong = [names[id(m[0])] for index, m in found.items() if getattr(m[0], "layer_idx", None) != index]
    if wrong:
        raise NotImplementedError(
            f"kv_cache needs attention that keeps its keys and values under its own layer_idx, which {list_names(wrong)} do not "
            f"(one module used for several layers?); {_REMEDY}"
        )
    kinds = {type(module) for module in storing}
    sharing = [names[id(m)] for m in ran if type(m) in kinds and not any(m is other for other in storing)]
    if sharing:
        raise NotImplementedError(
            f"kv_cache does not support layers that read the cache of another layer: {list_names(sharing)} keep no keys and "
            f"values of their own, and readers would give them a scale of 1; {_REMEDY}"
        )
    taken = [f"{names[id(m)]}.{kind}" for m in storing for kind in SCALE_NAMES if hasattr(m, kind)]
    if taken:
        raise ValueError(f"kv_cache: the model has {list_names(taken)} already; start from one without, or {_REMEDY}")


@torch.no_grad()
def calibrate_kv_cache(
    model: nn.Module, layers: dict[int, str], batches: Batches, kv_cache: str, undo_log: UndoLog, report: QuantReport
) -> None:
    """Give attention modules the scales of all they keep of the calibration tokens, held-out ones too: they decide nothing here.

    Args:
        model: The quantized model, which computes what a served one will: its own dtype, without autocast.
        layers: From :func:`find_cached_attention`.
        batches: The data; padding does not count.
        kv_cache: ``"fp8"`` or ``"fp8_head"``.
        undo_log: Records what is changed.
        report: Gets the number of layers, the strategy, the seconds, and a warning about keys or values that are all 0.

    Raises:
        ValueError: If keys or values hold NaN or inf, or no token reaches a layer; the message names it. Nothing is changed then.
    """
    begun = time.perf_counter()
    largest = _absmax(model, layers, batches.train + batches.holdout)
    left = [name for index, name in layers.items() if index not in largest]
    if left:
        raise ValueError(f"kv_cache: no token reaches {list_names(left)}; use other calibration data, or {_REMEDY}")
    broken = [f"{layers[index]} ({kind})" for index, pair in largest.items() for kind, absmax in _named(pair) if _broken(absmax)]
    if broken:
        raise ValueError(
            f"kv_cache: keys or values hold NaN or inf: {list_names(broken)}; use a dtype of wider range (float16 overflows), or "
            f"{_REMEDY}"
        )
    strategy, dtype = KV_CACHES[kv_cache], next(p.dtype for p in model.parameters() if p.is_floating_point())
    empty = []
    for index, name in layers.items():
        module = model.get_submodule(name)
        undo_log.save_attribute(module, "_buffers")
        module._buffers = dict(module._buffers)
        for kind, absmax in _named(largest[index]):
            absmax = absmax.view(-1, 1, 1) if strategy == "attn_head" else absmax.amax(0, keepdim=True)
            if not bool(absmax.all()):
                empty.append(f"{name}.{kind}")
            module.register_buffer(kind, scale_of(absmax, dtype))
    if empty:
        report.warnings.append(
            f"kv_cache: all that {list_names(empty)} would scale is 0 in the calibration data (of a head, where there is a scale "
            "for each), so the scale is 1: exact for 0, fine up to 448"
        )
    report.kv_cache_strategy, report.kv_cache_layers = strategy, len(layers)
    report.timings["kv_cache"] = time.perf_counter() - begun


def _named(pair: tuple[Tensor, Tensor]) -> list[tuple[str, Tensor]]:
    return list(zip(SCALE_NAMES, pair, strict=True))


def _broken(absmax: Tensor) -> bool:
    return not bool(torch.isfinite(absmax).all())


def _absmax(model: nn.Module, layers: dict[int, str], batches: list[Batch]) -> dict[int, tuple[Tensor, Tensor]]:
    """layer_idx -> the largest |key| and |value| of each head, [H] float32; layers that no token reaches are left out."""
    largest: dict[int, tuple[Tensor, Tensor]] = {}
    mask: Tensor | None = None

    def record(module: nn.Module, layer_idx: int, key: Tensor, value: Tensor) -> None:
        if mask is not None and (key.shape[0], key.shape[2]) != tuple(mask.shape):
            raise ValueError(
                f"kv_cache: {layers[layer_idx]} keeps {key.shape[2]} tokens of rows of {mask.shape[1]}: what is padding cannot "
                "be told; calibrate with rows of one length (packing=True, or a list of batches)"
            )
        pair = _largest(key, mask), _largest(value, mask)
        if layer_idx in largest:
            pair = tuple(map(torch.maximum, largest[layer_idx], pair))  # type: ignore[assignment]
        largest[layer_idx] = pair

    modules = [model.get_submodule(name) for name in layers.values()]
    with _watched(modules, model, record, everywhere=True), eval_mode(model), no_cache(model):
        for batch in batches:
            mask = batch.mask
            model(**_placed(model, batch.inputs), **without_cache(model), **few_logits(model))
    return largest


def _largest(x: Tensor, mask: Tensor | None) -> Tensor:
    """max|x| over tokens that count and channels: [B, H, T, D] -> [H] float32. NaN stays NaN."""
    size = x.abs().amax(-1)
    if mask is not None:  # replaced rather than multiplied: padding that sees nothing may be NaN
        size = size.masked_fill(~mask.to(size.device).unsqueeze(1), 0)
    return size.amax((0, 2)).float()


# ------------------------------------------------------------------------------------------------------- watching the caches


def _asking_for_cache(model: nn.Module) -> dict[str, Any]:
    return few_logits(model) | ({"use_cache": True} if "use_cache" in inspect.signature(model.forward).parameters else {})


def _placed(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device  # where the input embedding is
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


@contextmanager
def _watched(modules: list[nn.Module], model: Any, record: Record, *, everywhere: bool) -> Iterator[list[nn.Module]]:
    """Hand modules a cache, or (not ``everywhere``) only those that the model hands one.

    ``record`` is called with what each keeps, and the innermost module that runs. Yields those that ran with a cache.
    """
    from torchq.integrations.transformers import RecordingCache

    running: list[nn.Module] = []
    ran: list[nn.Module] = []
    cache = RecordingCache(model.config, lambda index, key, value: record(running[-1], index, key, value))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        running.append(module)
        given, args, kwargs = _with_cache(module, args, kwargs, cache, everywhere)
        if given and not any(module is other for other in ran):
            ran.append(module)
        return args, kwargs

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop()

    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _cache_argument(module: nn.Module) -> str | None:
    """Name of the argument by which a layer takes its cache; None for other modules."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return None
    accepted = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in accepted), None)


def _with_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache: Any, everywhere: bool
) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
    """Whether there is a cache (or ``everywhere``), and the arguments with ``cache`` in its place."""
    name = _cache_argument(module)
    assert name is not None
    position = list(inspect.signature(type(module).forward).parameters).index(name) - 1  # of self
    if position < len(args):
        given = everywhere or args[position] is not None
        return given, (*args[:position], cache if given else None, *args[position + 1 :]), kwargs
    given = everywhere or any(kwargs.get(key) is not None for key in _CACHE_ARGUMENTS)
    others = {key: value for key, value in kwargs.items() if key not in _CACHE_ARGUMENTS}  # an older name may stand for it
    return given, args, others | {name: cache if given else None}
