"""Safetensors files written one tensor at a time, and checked before they are read.

The ``safetensors`` package writes a file from all of its tensors at once, which would hold a second copy of a shard;
here the header is planned from shapes, then each tensor is written where it belongs. Reading is left to the package.
Source: the format description of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors package's own limit
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class ShardWriter:
    """Write one safetensors file tensor by tensor, in any order.

    Args:
        path: The file; replaced if it exists.
        tensors: Name -> meta tensor (or any tensor) of the shape and dtype that will be written.

    Raises:
        ValueError: On leaving the context, if a tensor was not written; in :meth:`write`, if one does not fit the plan.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._pending = dict(tensors)
        # Largest items first keeps every tensor aligned to its item size, which readers rely on.
        order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._offsets, offset = {}, 0
        for name in order:
            tensor = tensors[name]
            self._offsets[name] = offset
            end = offset + tensor.numel() * tensor.dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]
            }  # fmt: skip
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, on any device."""
        planned = self._pending.pop(name, None)
        if planned is None or planned.shape != tensor.shape or planned.dtype != tensor.dtype:
            raise ValueError(f"{name} was not planned with shape {list(tensor.shape)} and {tensor.dtype}")
        self._file.seek(self._start + self._offsets[name])
        if tensor.numel():
            self._file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None and self._pending:
                raise ValueError(f"tensors planned but not written: {', '.join(list(self._pending)[:5])}")
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return name -> {"dtype", "shape", "data_offsets"} of a safetensors file, after checking that the file is whole.

    Raises:
        ValueError: If the file is truncated or not a safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{path.name} is truncated or not a safetensors file ({size} bytes); download or save it again")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        needed = 8 + length + max((_checked_end(name, entry) for name, entry in header.items()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is damaged, or not a safetensors file: {error}; download or save it again") from error
    if size < needed:
        raise ValueError(f"{path.name} is truncated: {size} bytes of {needed}; download or save it again")
    return header


def _checked_end(name: str, entry: dict[str, Any]) -> int:
    """Return where a tensor's data ends, after checking that it fits its shape and dtype."""
    begin, end = entry["data_offsets"]
    dtype = DTYPES.get(entry["dtype"])
    if not 0 <= begin <= end or (dtype is not None and math.prod(entry["shape"]) * dtype.itemsize != end - begin):
        raise ValueError(f"the size of {name} does not fit its shape")
    return int(end)
