"""Layouts of packed weights in memory: what a device's kernel reads, in place of the checkpoint's tensors.

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

from torchq.kernels import fp8, w8a16_cpu, wna16_cpu
from torchq.kernels.dispatch import gpu_of
from torchq.packing import pack_int32, pack_zero_point, unpack_int32, unpack_zero_point
from torchq.scheme import Scheme

Buffers = Mapping[str, Any]
Codes = tuple[Tensor, Tensor, Tensor | None]
"""Codes [N, K] int8, scales as on disk, zero points int8 of scales' shape or None."""


@dataclass(frozen=True)
class Form:
    """A weight's scheme, its N rows and K columns, and the dtype of its scales."""

    scheme: Scheme
    n: int
    k: int
    scale_dtype: torch.dtype

    @property
    def group_size(self) -> int:
        """Weights along K that share a scale."""
        weights = self.scheme.weights
        return weights.block_structure[1] if weights.block_structure else weights.group_size or self.k


@dataclass(frozen=True)
class Layout:
    """A layout of a weight.

    Attributes:
        op: Name of the operator that reads it.
        replaces: Names of the canonical tensors that it replaces.
        buffers: Names of its own tensors; the first is never None, the second holds the scales.
        can_hold: Whether a weight of a form can be laid out so, on a device.
        pack: (canonical tensors, form) -> its tensors, in the order of ``buffers``.
        unpack: (its tensors by name, form) -> the canonical tensors by name, as they were.
        codes: (its tensors by name, form) -> codes, scales and zero points, where there is a shorter way than by ``unpack``.
    """

    op: str
    replaces: tuple[str, ...]
    buffers: tuple[str, ...]
    can_hold: Callable[[Form, torch.device], bool]
    pack: Callable[[Buffers, Form], tuple[Tensor | None, ...]]
    unpack: Callable[[Buffers, Form], dict[str, Tensor]]
    codes: Callable[[Buffers, Form], Codes] | None = None


def layout_for(form: Form, device: torch.device) -> Layout | None:
    """The layout of a weight for a device's kernels, or None: they read the canonical tensors."""
    if device.type == "cuda" and (find_spec("triton") is None or _is_old(device)):
        return None
    candidates = {"cpu": (INT8_ROWS, PLANES), "cuda": (WORDS, FP8_WORDS)}.get(device.type, ())
    return next((layout for layout in candidates if layout.can_hold(form, device)), None)


@cache
def _is_old(device: torch.device) -> bool:
    """Whether a GPU is too old for the Triton kernels, which is said once."""
    if gpu_of(device) is not None:
        return False
    warnings.warn(
        f"{torch.cuda.get_device_name(device)} ({device}) is older than compute capability 8.0, which torchq's Triton kernels "
        "need: packed weights are dequantized for each product there, which is slow",
        stacklevel=3,
    )
    return True


def layout_of(buffers: Buffers) -> Layout | None:
    """The layout that these buffers are in, or None: the canonical one."""
    return next((layout for layout in LAYOUTS if layout.buffers[0] in buffers), None)


# --------------------------------------------------------------------------------------------- the format pack-quantized

PACKED = ("weight_packed", "weight_scale", "weight_zero_point")


def packed_tensors(q: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int) -> dict[str, Tensor]:
    """Codes [N, K] int8, scale [N, G], zero_point [N, G] int8 or None -> tensors by name, as on disk."""
    tensors = {"weight_packed": pack_int32(q, num_bits), "weight_scale": scale}
    if zero_point is not None:
        tensors["weight_zero_point"] = pack_zero_point(zero_point, num_bits)
    return tensors


def codes_of(tensors: Buffers, form: Form) -> Codes:
    """Invert :func:`packed_tensors`."""
    num_bits, scale, zeros = form.scheme.weights.num_bits, tensors["weight_scale"], tensors.get("weight_zero_point")
    q = unpack_int32(tensors["weight_packed"], num_bits, (form.n, form.k))
    return q, scale, None if zeros is None else unpack_zero_point(zeros, num_bits, (form.n, scale.shape[1]))


def _packed(codes: Callable[[Buffers, Form], Codes]) -> Callable[[Buffers, Form], dict[str, Tensor]]:
    return lambda buffers, form: packed_tensors(*codes(buffers, form), form.scheme.weights.num_bits)


# ------------------------------------------------------------------------------------------------------ torchq.kernels.wna16_cpu


def _can_hold_planes(form: Form, device: torch.device) -> bool:
    weights = form.scheme.weights
    if form.scheme.format != "pack-quantized" or form.scale_dtype != torch.bfloat16:
        return False
    if weights.num_bits > 4 and not weights.symmetric:
        return False
    return wna16_cpu.native_group_size(form.n, form.k, form.group_size) is not None and wna16_cpu.is_available()


def _pack_planes(tensors: Buffers, form: Form) -> tuple[Tensor | None, ...]:
    (q, scale, zero_point), num_bits = codes_of(tensors, form), form.scheme.weights.num_bits
    native_size = wna16_cpu.native_group_size(form.n, form.k, form.group_size)
    assert native_size is not None
    pairs = wna16_cpu.pack_scale_and_zero(scale, zero_point, num_bits, form.group_size, native_size)
    residual = None if zero_point is None else wna16_cpu.zero_residual(scale, zero_point)
    return wna16_cpu.pack_planes(q, num_bits), pairs, zero_point, residual


def _codes_of_planes(buffers: Buffers, form: Form) -> Codes:
    num_bits = form.scheme.weights.num_bits
    scale = wna16_cpu.scale_of(buffers["scale_and_zero"], num_bits, form.k // form.group_size)
    return wna16_cpu.unpack_planes(buffers["weight_planes"], num_bits), scale, buffers["native_zero_point"]


PLANES = Layout(
    "wna16_cpu",
    PACKED,
    ("weight_planes", "scale_and_zero", "native_zero_point", "native_zero_residual"),
    _can_hold_planes,
    _pack_planes,
    _packed(_codes_of_planes),
    _codes_of_planes,
)


# ------------------------------------------------------------------------------------------------------ torchq.kernels.w8a16_cpu


def _can_hold_int8_rows(form: Form, device: torch.device) -> bool:
    weights = form.scheme.weights
    if form.scheme.format != "pack-quantized" or weights.num_bits != 8 or not weights.symmetric:
        return False
    return form.group_size == form.k and w8a16_cpu.is_available()


def _pack_int8_rows(tensors: Buffers, form: Form) -> tuple[Tensor | None, ...]:
    q, scale, _ = codes_of(tensors, form)
    return q, scale.flatten()


def _codes_of_int8_rows(buffers: Buffers, form: Form) -> Codes:
    return buffers["weight_rows"], buffers["row_scale"].clone().unsqueeze(1), None


INT8_ROWS = Layout(
    "w8a16_cpu",
    PACKED,
    ("weight_rows", "row_scale"),
    _can_hold_int8_rows,
    _pack_int8_rows,
    _packed(_codes_of_int8_rows),
    _codes_of_int8_rows,
)


# --------------------------------------------------------------------------------------------------- torchq.kernels.words_triton


def _can_hold_words(form: Form, device: torch.device) -> bool:
    if form.scheme.format != "pack-quantized" or form.n == 0:
        return False
    from torchq.kernels import words_triton

    return words_triton.can_hold(form.scheme.weights.num_bits, form.group_size, form.k)


def _pack_words(tensors: Buffers, form: Form) -> tuple[Tensor | None, ...]:
    from torchq.kernels import words_triton

    q, scale, zeros = codes_of(tensors, form)
    words = words_triton.pack_words(q, form.scheme.weights.num_bits)
    return words, scale.t().contiguous(), None if zeros is None else zeros.t().contiguous()


def _codes_of_words(buffers: Buffers, form: Form) -> Codes:
    from torchq.kernels import words_triton

    num_bits, zeros = form.scheme.weights.num_bits, buffers["words_zero_point"]
    codes = words_triton.unpack_words(buffers["weight_words"], num_bits, form.k)
    zeros = None if zeros is None else zeros.t().contiguous()
    return codes, buffers["words_scale"].t().contiguous(), zeros


WORDS = Layout(
    "wna16_triton",
    PACKED,
    ("weight_words", "words_scale", "words_zero_point"),
    _can_hold_words,
    _pack_words,
    _packed(_codes_of_words),
    _codes_of_words,
)


# ------------------------------------------------------------------------------------------------------ torchq.kernels.fp8_triton


def _can_hold_fp8_words(form: Form, device: torch.device) -> bool:
    """Not where the GPU multiplies fp8 by fp8 itself: rounded activations and no blocks."""
    if form.scheme.weights.type != "float" or form.n == 0:
        return False
    from torchq.kernels import words_triton

    native = form.scheme.input_activations is not None and form.scheme.weights.strategy != "block"
    if native and fp8.has_scaled_mm(device, form.n, form.k):
        return False
    return form.k % form.group_size == 0 and words_triton.can_hold(8, form.group_size, form.k)


def _pack_fp8_words(tensors: Buffers, form: Form) -> tuple[Tensor | None, ...]:
    from torchq.kernels import words_triton

    scale, block = tensors["weight_scale"], form.scheme.weights.block_structure
    rows = scale.view(1, 1) if scale.ndim == 1 else scale  # [1] for a whole weight
    by_row = rows.repeat_interleave(block[0], 0)[: form.n] if block else rows.expand(form.n, 1)
    return words_triton.pack_fp8(tensors["weight"]), by_row.t().contiguous()


def _unpack_fp8_words(buffers: Buffers, form: Form) -> dict[str, Tensor]:
    from torchq.kernels import words_triton

    scale, weights = buffers["fp8_words_scale"].t(), form.scheme.weights
    step = weights.block_structure[0] if weights.block_structure else form.n if weights.strategy == "tensor" else 1
    scale = scale[::step].clone(memory_format=torch.contiguous_format)
    scale = scale.view(1) if weights.strategy == "tensor" else scale
    return {"weight": words_triton.unpack_fp8(buffers["fp8_words"], form.k), "weight_scale": scale}


FP8_WORDS = Layout(
    "fp8_triton",
    ("weight", "weight_scale"),
    ("fp8_words", "fp8_words_scale"),
    _can_hold_fp8_words,
    _pack_fp8_words,
    _unpack_fp8_words,
)

LAYOUTS = (INT8_ROWS, PLANES, WORDS, FP8_WORDS)
