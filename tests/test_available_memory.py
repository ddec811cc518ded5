"""How much memory is left: the smaller of the machine's and the container's; accelerators count what PyTorch can reuse."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from torchq import _memory
from torchq._memory import available_memory

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 1,000 bytes left, and the folder of its control group."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(_memory, "_CGROUP", tmp_path)
    return tmp_path


def test_without_a_limit_it_is_the_machines(machine: Path) -> None:
    assert available_memory(CPU) == 1000
    for name, text in (("memory.max", "max"), ("memory.current", "700"), ("memory.stat", "anon 600")):
        (machine / name).write_text(text + "\n")
    assert available_memory(CPU) == 1000


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_is_below_its_limit(machine: Path, version: int) -> None:
    names = ("memory.max", "memory.current", "memory.stat") if version == 2 else ()
    folder = machine if version == 2 else machine / "memory"
    folder.mkdir(exist_ok=True)
    names = names or ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    for name, text in zip(names, ("900", "700", f"anon 600\n{cache} 50\n"), strict=True):
        (folder / name).write_text(text)
    assert available_memory(CPU) == 250
    (folder / names[0]).write_text("600")  # lowered below what is in use
    assert available_memory(CPU) == 0
    (folder / names[0]).write_text("9223372036854771712")
    assert available_memory(CPU) == 1000


def test_here() -> None:
    assert 0 < available_memory(CPU) <= psutil.virtual_memory().total
    assert available_memory(torch.device("meta")) is None


def test_an_accelerator_counts_what_is_reserved_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda device: (1000, 9000), memory_reserved=lambda device: 500, memory_allocated=lambda device: 300
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert available_memory(torch.device("cuda", 0)) == 1200
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert available_memory(torch.device("mps")) is None
