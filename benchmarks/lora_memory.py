"""Bytes of a training step: what its model holds, what it keeps for the backward pass, its peak, and what it leaves behind.

Runs in the venvs of other tools too, so this file imports nothing but torch.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

PARTS = ("linear", "embedding", "head", "other", "adapters")


def tensors_by_part(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Part, tensor) of all parameters and buffers, and of what bitsandbytes keeps beside its parameters."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    for name, module in model.named_modules():
        if "lora_" in name:
            part = "adapters"
        elif isinstance(module, nn.Embedding):
            part = "embedding"
        elif module is head:
            part = "head"
        else:
            part = "linear" if hasattr(module, "in_features") else "other"
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                yield part, tensor
                yield from ((part, extra) for extra in _quant_state(tensor))


def _quant_state(tensor: Tensor) -> list[Tensor]:
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return []
    found = [state.absmax, state.code, state.offset]
    found += [] if state.state2 is None else [state.state2.absmax, state.state2.code]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def weight_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the model's storages by part; one that two parts share counts for the first."""
    sizes, seen = dict.fromkeys(PARTS, 0), set()
    for part, tensor in tensors_by_part(model):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[part] += storage.nbytes()
    return sizes


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of tensors' storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def saved_bytes(forward: Callable[[], Any], known: set[int]) -> int:
    """Bytes of the storages that a forward pass keeps for the backward pass, without those at ``known`` addresses."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that holds its own graph would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes.values())


@dataclass(frozen=True)
class Trace:
    """What a function allocated through PyTorch's CPU allocator, inside of ops included.

    Attributes:
        peak: Most bytes at a time, beyond what there was before.
        left: Sizes of the blocks that are still there.
    """

    peak: int
    left: list[int]


def trace_memory(function: Callable[[], Any]) -> Trace:
    """Run a function under PyTorch's profiler. Scratch memory that oneDNN allocates itself is not in it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    allocations: list[tuple[int, int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    now, peak, blocks = 0, 0, {}
    for _, address, size in sorted(allocations, key=lambda allocation: allocation[0]):
        if size > 0:
            blocks[address] = size
        elif blocks.pop(address, None) is None:
            continue  # was there before
        now += size
        peak = max(peak, now)
    return Trace(peak, sorted(blocks.values(), reverse=True))


def unknown_tensors(known: set[int], least: int) -> list[str]:
    """Tensors alive in Python on a storage of at least so many bytes that is at none of the ``known`` addresses."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        real = type(thing) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(thing)  # not what torch.compile left
        if real and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes() >= least and storage.data_ptr() not in known:
                found[storage.data_ptr()] = f"{thing.dtype} {list(thing.shape)}"
    return list(found.values())


# ---------------------------------------------------------------------------------------------------- the process's own memory


def resident_bytes(field: str = "VmRSS") -> int:
    """Resident memory, a field of ``/proc/self/status``: ``VmRSS`` now, ``VmHWM`` at most since :func:`reset_peak`."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("resident memory is read from /proc/self/status, which this system lacks")
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Give free memory back to the system, and start ``VmHWM`` again from what is left."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
