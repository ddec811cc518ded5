"""A log on disk of replaced modules: a failed ``quantize_`` gives the model back without having held it twice."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from types import TracebackType
from typing import IO, Any

import torch
from torch import nn

_MISSING = object()


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
        self._modules: list[tuple[nn.Module, str, weakref.ref[nn.Module], nn.Module, int]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._offsets: dict[int, int] = {}
        self._file: IO[bytes] | None = None
        if enabled and num_bytes > shutil.disk_usage(tempfile.gettempdir()).free:
            raise ValueError(
                f"undo=True keeps {num_bytes / 1e9:.1f} GB of replaced weights in {tempfile.gettempdir()}, which has less room; "
                "set TMPDIR to a larger disk, or undo=False"
            )

    def record(self, model: nn.Module, name: str, module: nn.Module) -> None:
        """Write a module's weight to the log just before the module is replaced."""
        if not self.enabled:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="torchq-undo-")  # noqa: SIM115 - closed in __exit__
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if id(module) not in self._offsets:
            self._offsets[id(module)] = self._file.seek(0, 2)
            self._file.write(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        shell = copy.copy(module)
        shell._parameters = module._parameters.copy()
        shell._parameters["weight"] = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
        shell.__dict__["_torchq_device"] = weight.device
        self._modules.append((model, name, weakref.ref(module), shell, self._offsets[id(module)]))

    def save_attribute(self, owner: Any, name: str) -> None:
        """Remember an attribute that is about to change."""
        self._attributes.append((owner, name, owner.__dict__.get(name, _MISSING)))

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
        restored: dict[int, nn.Module] = {}
        for model, name, reference, shell, offset in self._modules:
            module = reference()
            if module is None:
                module = restored.setdefault(offset, shell)
                if module is shell:
                    self._read_weight(shell, offset)
            parent_name, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent_name), attribute, module)

    def _read_weight(self, shell: nn.Module, offset: int) -> None:
        assert self._file is not None
        empty = shell._parameters["weight"]
        assert empty is not None
        self._file.seek(offset)
        data = bytearray(self._file.read(empty.numel() * empty.element_size()))
        weight = torch.frombuffer(data, dtype=empty.dtype).view(empty.shape).to(shell.__dict__.pop("_torchq_device"))
        shell._parameters["weight"] = nn.Parameter(weight, requires_grad=empty.requires_grad)
