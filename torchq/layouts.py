"""Layouts of packed integer weights in memory: what a device's kernel reads, in place of the checkpoint's tensors.

A layout replaces the canonical tensors (never two copies of a weight), and gives them back bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from torchq.kernels import wna16_cpu
from torchq.kernels.dispatch import gpu_of
from torchq.scheme import QuantArgs

Buffers = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """A layout of weights of the format pack-quantized. N out_features, K in_features, G groups of S weights.

    Attributes:
        buffers: Names of its tensors; the first is never None.
        can_hold: (N, K, weights, S, scale's dtype) -> whether a weight can be laid out so.
        pack: (codes [N, K] int8, scale [N, G], zero_point [N, G] int8 or None, num_bits, S) -> tensors, in the order of
            ``buffers``.
        unpack: (buffers, num_bits, K, G) -> codes, scale, zero_point as they were.
    """

    buffers: tuple[str, ...]
    can_hold: Callable[[int, int, QuantArgs, int, torch.dtype], bool]
    pack: Callable[[Tensor, Tensor, Tensor | None, int, int], tuple[Tensor | None, ...]]
    unpack: Callable[[Buffers, int, int, int], tuple[Tensor, Tensor, Tensor | None]]


def layout_for(device: torch.device) -> Layout | None:
    """The layout of a device's kernels, or None: they read the canonical tensors."""
    if device.type == "cpu":
        return PLANES
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    if gpu_of(device) is None:
        _warn_of_old_gpu(device)
        return None
    return WORDS


@cache
def _warn_of_old_gpu(device: torch.device) -> None:
    warnings.warn(
        f"{torch.cuda.get_device_name(device)} ({device}) is older than compute capability 8.0, which torchq's Triton kernels "
        "need: packed weights are dequantized for each product there, which is slow",
        stacklevel=2,
    )


def layout_of(buffers: Buffers) -> Layout | None:
    """The layout that these buffers are in, or None: the canonical one."""
    return next((layout for layout in (PLANES, WORDS) if layout.buffers[0] in buffers), None)


# ------------------------------------------------------------------------------------------------------ torchq.kernels.wna16_cpu


def _can_hold_planes(n: int, k: int, args: QuantArgs, group_size: int, dtype: torch.dtype) -> bool:
    if dtype != torch.bfloat16 or (args.num_bits > 4 and not args.symmetric):
        return False
    return wna16_cpu.native_group_size(n, k, group_size) is not None and wna16_cpu.is_available()


def _pack_planes(
    q: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, group_size: int
) -> tuple[Tensor | None, ...]:
    native_size = wna16_cpu.native_group_size(q.shape[0], q.shape[1], group_size)
    assert native_size is not None
    pairs = wna16_cpu.pack_scale_and_zero(scale, zero_point, num_bits, group_size, native_size)
    residual = None if zero_point is None else wna16_cpu.zero_residual(scale, zero_point)
    return wna16_cpu.pack_planes(q, num_bits), pairs, zero_point, residual


def _unpack_planes(buffers: Buffers, num_bits: int, k: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor | None]:
    scale = wna16_cpu.scale_of(buffers["scale_and_zero"], num_bits, num_groups)
    return wna16_cpu.unpack_planes(buffers["weight_planes"], num_bits), scale, buffers["native_zero_point"]


PLANES = Layout(
    ("weight_planes", "scale_and_zero", "native_zero_point", "native_zero_residual"),
    _can_hold_planes,
    _pack_planes,
    _unpack_planes,
)


# --------------------------------------------------------------------------------------------------- torchq.kernels.wna16_triton


def _can_hold_words(n: int, k: int, args: QuantArgs, group_size: int, dtype: torch.dtype) -> bool:
    from torchq.kernels import wna16_triton

    return n > 0 and wna16_triton.can_hold(args.num_bits, group_size, k)


def _pack_words(q: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, group_size: int) -> tuple[Tensor | None, ...]:
    from torchq.kernels import wna16_triton

    zeros = None if zero_point is None else zero_point.t().contiguous()
    return wna16_triton.pack_words(q, num_bits), scale.t().contiguous(), zeros


def _unpack_words(buffers: Buffers, num_bits: int, k: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor | None]:
    from torchq.kernels import wna16_triton

    zeros = buffers["words_zero_point"]
    codes = wna16_triton.unpack_words(buffers["weight_words"], num_bits, k)
    return codes, buffers["words_scale"].t().contiguous(), None if zeros is None else zeros.t().contiguous()


WORDS = Layout(("weight_words", "words_scale", "words_zero_point"), _can_hold_words, _pack_words, _unpack_words)
