"""How much memory is left, on the CPU or on an accelerator."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (  # limit, use, and statistics in which page cache that can be dropped has this name: of versions 2 and 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device, those that PyTorch holds without using them included; None if unknown.

    On the CPU a container's limit counts too.
    """
    if device.type == "cpu":
        free = int(psutil.virtual_memory().available)
        limit = _left_in_cgroup()
        return free if limit is None else min(free, limit)
    module = torch.get_device_module(device) if device.type != "meta" else None
    if module is None or not hasattr(module, "mem_get_info"):
        return None
    free = int(module.mem_get_info(device)[0])
    return free + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def _left_in_cgroup() -> int | None:
    """Bytes below the limit of the control group that this process sees as the root's; None without a limit."""
    for limit, used, statistics, cache in _CGROUP_FILES:
        try:
            most, now = ((_CGROUP / name).read_text().strip() for name in (limit, used))
            droppable = dict(line.split() for line in (_CGROUP / statistics).read_text().splitlines()).get(cache, "0")
        except (OSError, ValueError):
            continue
        return None if most == "max" else max(int(most) - int(now) + int(droppable), 0)
    return None
