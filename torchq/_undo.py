"""A log on disk of replaced modules: a failed ``quantize_`` gives the model back without having held it twice."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import torch
from torch import nn

from torchq.model_utils import set_module

_MISSING = object()


@dataclass(frozen=True)
class _Replaced:
    """One name under which a module was replaced; ``shell`` is a copy of the module whose weight is on the meta device."""

    model: nn.Module
    name: str
    module: weakref.ref[nn.Module]
    weight: weakref.ref[nn.Parameter]
    shell: nn.Module
    offset: int
    device: torch.device


class UndoLog:
    """Keeps replaced modules without keeping their weights in memory; rolls back unless :meth:`commit` was called.

    Args:
        enabled: If False, nothing is kept and nothing is rolled back.
        num_bytes: Bytes of weights that will be recorded; checked against the free space beforehand.

    Raises:
        ValueError: If the temporary folder has too little room; nothing has been changed then.
    """

    def __init__(self, *, enabled: bool, num_bytes: int) -> None:
        self.enabled = enabled
        self._committed = False
        self._replaced: list[_Replaced] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: list[tuple[nn.Module, str, nn.Module]] = []
        self._file: IO[bytes] | None = None
        if enabled and num_bytes > shutil.disk_usage(tempfile.gettempdir()).free:
            raise ValueError(
                f"undo=True keeps {num_bytes / 1e9:.1f} GB of replaced weights in {tempfile.gettempdir()}, which has less room; "
                "set TMPDIR to a larger disk, or undo=False"
            )

    def record(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Write a weight to the log just before the modules that hold it are replaced.

        Args:
            model: Where the modules are.
            modules: Name -> module; all have the same weight, and a module may have several names.
        """
        if not self.enabled:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="torchq-undo-")  # noqa: SIM115 - closed in __exit__
        weight = next(iter(modules.values())).weight
        assert isinstance(weight, nn.Parameter)
        offset = self._file.seek(0, 2)
        self._file.write(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        empty = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
        shells: dict[int, nn.Module] = {}
        for name, module in modules.items():
            if id(module) not in shells:
                shells[id(module)] = shell = copy.copy(module)
                shell._parameters = module._parameters | {"weight": empty}
            entry = _Replaced(model, name, weakref.ref(module), weakref.ref(weight), shells[id(module)], offset, weight.device)
            self._replaced.append(entry)

    def keep(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        """Remember modules by name that are about to be replaced; they stay in memory."""
        if self.enabled:
            self._kept += [(model, name, module) for name, module in modules.items()]

    def save_attribute(self, owner: Any, name: str) -> None:
        """Remember an attribute that is about to change."""
        self._attributes.append((owner, name, owner.__dict__.get(name, _MISSING)))

    def save_tensor(self, tensor: torch.Tensor) -> None:
        """Remember a small tensor that is about to be written to; it is kept in memory."""
        if self.enabled:
            self._tensors.append((tensor, tensor.detach().clone()))

    def commit(self) -> None:
        """Keep what was done: nothing is rolled back any more."""
        self._committed = True

    def __enter__(self) -> UndoLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if not self._committed:
                self._roll_back()
        finally:
            if self._file is not None:
                self._file.close()

    def _roll_back(self) -> None:
        for owner, name, value in reversed(self._attributes):
            if value is _MISSING:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = value
        with torch.no_grad():
            for tensor, saved in reversed(self._tensors):
                tensor.copy_(saved)
        for model, name, module in self._kept:
            set_module(model, name, module)
        weights: dict[int, nn.Parameter] = {}
        for entry in self._replaced:
            module = entry.module() or entry.shell  # where nobody else holds it, its copy takes its place
            weight = entry.weight()
            if weight is None:
                if entry.offset not in weights:
                    weights[entry.offset] = self._read_weight(entry)
                weight = weights[entry.offset]
            module._parameters["weight"] = weight
            set_module(entry.model, entry.name, module)

    def _read_weight(self, entry: _Replaced) -> nn.Parameter:
        assert self._file is not None
        empty = entry.shell._parameters["weight"]
        assert empty is not None
        self._file.seek(entry.offset)
        data = bytearray(self._file.read(empty.numel() * empty.element_size()))
        weight = torch.frombuffer(data, dtype=empty.dtype).view(empty.shape).to(entry.device)
        return nn.Parameter(weight, requires_grad=empty.requires_grad)
