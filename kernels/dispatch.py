"""Which tile a kernel uses for how many tokens, on which GPU: a table, read at the first call on a device. No tuning at run time.

An architecture is ``sm_80`` (all of compute capability 8), ``sm_90``, ``sm_100`` (all newer ones) or ``gfx942`` (any AMD GPU).
None of the entries has been timed on a GPU yet: they are what static counts of instructions, registers and shared memory suggest
(``benchmarks/static_kernels.py``, docs/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

_MOST_SPLITS = 16
_PROGRAMS_PER_PROCESSOR = 2  # that split-K aims for


@dataclass(frozen=True)
class Tile:
    """A kernel's tile: BLOCK_M tokens, BLOCK_N rows of the weight, warps, and stages of the pipeline of loads."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 4


Row = tuple[int, Tile]  # up to how many tokens, which tile

# Kinds: weights of 2, 4 and 8 bits, and the same with groups of fewer than 128 or with zero points (fine), which take more
# registers. Entries are the largest tiles that do not spill.
_WIDE = ((8, Tile(8, 256, 4, 3)), (16, Tile(16, 256, 4, 3)), (32, Tile(32, 128)), (128, Tile(64, 128)))
_TWO_BITS = ((8, Tile(8, 128)), (16, Tile(16, 128)), (32, Tile(32, 128)), (128, Tile(64, 64, 4, 3)))
_FINE = ((8, Tile(8, 128)), (16, Tile(16, 128)), (128, Tile(32, 64)))
_TWO_BITS_FINE = ((64, Tile(16, 128)),)
_TWO_WARPS = ((8, Tile(8, 64, 2)), (16, Tile(16, 64, 2)), (128, Tile(32, 64, 2, 3)))
_TWO_WARPS_FINE = ((8, Tile(8, 64, 2, 3)), (16, Tile(16, 64, 2, 3)), (128, Tile(32, 64, 2, 2)))
_TWO_STAGES = ((16, Tile(16, 128, 4, 2)), (32, Tile(32, 128, 4, 2)), (128, Tile(64, 128, 4, 2)))  # Triton 3.6 fails at more
_AMPERE: dict[str, tuple[Row, ...]] = {
    "w2": _TWO_BITS,
    "w4": _WIDE,
    "w8": _WIDE,
    "w2_fine": _TWO_BITS_FINE,
    "w4_fine": _FINE,
    "w8_fine": _FINE,
}
TABLE: dict[str, dict[str, tuple[Row, ...]]] = {
    "sm_80": _AMPERE,
    "sm_90": _AMPERE,
    # With two warps the compiler keeps to mma.sync; with four, decoded weights would go through tensor memory.
    "sm_100": {
        "w2": _TWO_WARPS,
        "w4": _TWO_WARPS,
        "w8": _TWO_WARPS,
        "w2_fine": _TWO_WARPS_FINE[1:],  # of 8 tokens would spill
        "w4_fine": _TWO_WARPS_FINE,
        "w8_fine": _TWO_WARPS_FINE,
    },
    "gfx942": dict.fromkeys(_AMPERE, _TWO_STAGES),
}

ASM: frozenset[str] = frozenset()
"""Architectures that decode with inline assembly: none, until a GPU has run it. It takes a fifth less instructions per weight."""


@dataclass(frozen=True)
class Gpu:
    """What dispatch needs to know of a device."""

    architecture: str
    num_processors: int


@cache
def gpu_of(device: torch.device) -> Gpu | None:
    """The device as dispatch sees it; None where the Triton kernels do not run: CPUs, and GPUs older than sm_80."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu("gfx942", properties.multi_processor_count)
    if properties.major < 8:
        return None
    name = "sm_80" if properties.major == 8 else "sm_90" if properties.major == 9 else "sm_100"
    return Gpu(name, properties.multi_processor_count)


def tile_for(device: torch.device, kind: str, num_tokens: int) -> Tile | None:
    """The tile for a kind of weight, or None: dequantize and multiply."""
    gpu = gpu_of(device)
    rows = TABLE[gpu.architecture if gpu is not None else "sm_80"][kind]
    return next((tile for most, tile in rows if num_tokens <= most), None)


def uses_asm(device: torch.device) -> bool:
    """Whether kernels on a device decode with inline assembly."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.architecture in ASM


def num_splits(device: torch.device, tile: Tile, num_tokens: int, out_features: int, num_blocks: int) -> int:
    """Into how many parts K is split, so that there are programs for all of the GPU's processors: a power of two."""
    gpu = gpu_of(device)
    programs = -(-num_tokens // tile.block_m) * -(-out_features // tile.block_n)
    wanted = _PROGRAMS_PER_PROCESSOR * (gpu.num_processors if gpu is not None else 1)
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * programs <= wanted and 2 * splits <= num_blocks:
        splits *= 2
    return splits
