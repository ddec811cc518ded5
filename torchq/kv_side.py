"""One side of a layer of a quantized KV cache, keys or values: reading, moving, and the rotation of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchq.kernels.kv_cache import GROUP_SIZE, dequantize_stored

if TYPE_CHECKING:
    from torchq.kv_layer import KVCacheLayer

_BLOCK_VALUES = 1 << 20  # dequantized at a time
_UNREADABLE = (
    "this model's attention calls {} on keys and values of a quantized KV cache itself, which only torchq's attention can do; "
    "use model.set_attn_implementation('sdpa'): the cache then returns 16-bit ones"
)


@dataclass
class Side:
    """Keys, or values (transposed), as :mod:`torchq.kernels.kv_cache` stores them; a static scale is [1, H, 1, 1]."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    kv_format: str
    transposed: bool
    static: bool = False

    def as_stored(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What attention takes: a static scale for each slot."""
        if not self.static or self.scale is None:
            return self.codes, self.scale, self.zero
        return self.codes, self.scale.expand(*self.codes.shape[:2], 1, self.codes.shape[-1 if self.transposed else 2]), self.zero

    def tensors(self) -> dict[str, Tensor]:
        """What grows, is reordered and counts as memory: all but static scales."""
        found = {"codes": self.codes, "scale": None if self.static else self.scale, "zero": self.zero}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def map(self, change: Callable[..., Tensor]) -> None:
        """Replace each tensor by ``change(tensor, dim=its dimension of slots)``."""
        for name, tensor in self.tensors().items():
            by_tokens = name == "codes" and not self.transposed
            setattr(self, name, _bytewise(tensor, partial(change, dim=2 if by_tokens else -1)))

    def read(self, slots: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize [B, H, n, D]."""

        def pick(tensor: Tensor | None, dim: int) -> Tensor | None:
            if tensor is None or (self.static and tensor is self.scale):
                return tensor
            if isinstance(slots, Tensor):
                return _bytewise(tensor, lambda t: t.index_select(dim, slots))
            return tensor.narrow(dim, slots.start, slots.stop - slots.start)

        codes = pick(self.codes, 3 if self.transposed else 2)
        assert codes is not None
        return dequantize_stored(codes, pick(self.scale, 3), pick(self.zero, 3), self.kv_format, dtype, self.transposed)

    def read_runs(self, runs: list[tuple[int, int]], dtype: torch.dtype) -> Tensor:
        """Dequantize the (first slot, how many) of ``runs`` into one tensor, without wide intermediates of its size."""
        if torch.compiler.is_compiling() and len(runs) == 1:
            return self.read(slice(runs[0][0], sum(runs[0])), dtype)
        b, h, *shape = self.codes.shape
        dim = shape[0 if self.transposed else 1] * (2 if self.kv_format == "int4" else 1)
        out = torch.empty(b, h, sum(n for _, n in runs), dim, dtype=dtype, device=self.codes.device)
        step, target = max(1, _BLOCK_VALUES // (b * h * dim)), 0
        for slot, count in runs:
            for start in range(slot, slot + count, step):
                stop = min(slot + count, start + step)
                out[:, :, target : target + stop - start] = self.read(slice(start, stop), dtype)
                target += stop - start
        return out


class StoredStates:
    """Stands for the keys or values of a layer on their way from ``update`` to torchq's attention, which reads them as stored."""

    def __init__(self, layer: KVCacheLayer, kind: str) -> None:
        self.layer, self.kind = layer, kind
        self.dtype, self.device, self.ndim = layer.dtype, layer.device, 4

    @property
    def shape(self) -> torch.Size:
        """[B, H, slots, D]."""
        codes = self.layer.key.codes
        return torch.Size((*codes.shape[:3], self.layer.head_dim if self.kind == "keys" else self.layer.value_dim))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Explain that only torchq's attention can read these."""
        raise TypeError(_UNREADABLE.format(getattr(func, "__name__", func)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_UNREADABLE.format(name))


def check_head_dim(kv_format: str, dim: int) -> None:
    """Raise ValueError if a format cannot hold heads of ``dim`` channels."""
    if kv_format == "int4" and dim % (2 * GROUP_SIZE):
        raise ValueError(f"dtype: 'int4' needs a head_dim that {2 * GROUP_SIZE} divides, got {dim}; use 'int8' or 'fp8'")


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stored: Tensor, new: Tensor) -> Tensor:
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "a quantized KV cache passes no gradients to the tokens it stores, except to those of its first call; train with "
            "use_cache=False, or give all tokens at once"
        )


def without_gradient(stored: Tensor, new: Tensor) -> Tensor:
    """Return ``stored``, which was read from a cache: where ``new`` tokens in it want gradients, the backward pass raises."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and new.requires_grad):
        return stored
    return _NoGradient.apply(stored, new)  # type: ignore[no-untyped-call]


def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal, symmetric Hadamard matrix of the largest power of two that divides ``dim``."""
    size = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(dtype)


def rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Multiply [..., D], in blocks, by an orthonormal, symmetric matrix (:func:`hadamard`'s); None: leave it.

    It spreads outlier channels over all, and leaves products of rotated queries and rotated keys what they were; twice is not at
    all (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456).
    """
    return x if rotation is None else (x.reshape(-1, len(rotation)) @ rotation.to(x.dtype)).view(x.shape)


def rotate_(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Do what :func:`rotate` does with [B, H, n, D] in place, without a second tensor of its size."""
    if rotation is None or torch.compiler.is_compiling():
        return rotate(x, rotation)
    for block in x.split(max(1, _BLOCK_VALUES // (x.shape[0] * x.shape[1] * x.shape[3])), 2):
        block.copy_(rotate(block, rotation))
    return x


def _bytewise(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an indexing operation to fp8 codes as bytes: not every device and release has it for them."""
    if tensor.dtype != torch.float8_e4m3fn:
        return change(tensor)
    return change(tensor.view(torch.uint8)).view(torch.float8_e4m3fn)
