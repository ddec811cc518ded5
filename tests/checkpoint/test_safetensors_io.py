"""Safetensors files written tensor by tensor read like any other, and damaged ones are recognised before they are used."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchq.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES, ShardWriter, read_header


def example(dtype: torch.dtype, *shape: int) -> Tensor:
    data = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if dtype == torch.bool:
        data &= 1
    return data.view(dtype).reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    flat = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def write(path: Path, tensors: dict[str, Tensor], order: list[str] | None = None) -> None:
    with ShardWriter(path, {name: tensor.to("meta") for name, tensor in tensors.items()}) as writer:
        for name in order or list(tensors):
            writer.write(name, tensors[name])


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_and_shape_is_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (3,), (5, 7), (2, 3, 5), (0,), (4, 0)]
    tensors = {f"t{i}.{'x' * i}": example(dtype, *shape) for i, shape in enumerate(shapes)}
    write(tmp_path / "a.safetensors", tensors)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())


def test_any_order_and_mixed_dtypes_keep_every_tensor_aligned(tmp_path: Path) -> None:
    """Odd numbers of bytes would shift what follows; safetensors readers view the file in place."""
    path = tmp_path / "a.safetensors"
    tensors = {f"{i}": example(dtype, 2 * i + 1) for i, dtype in enumerate(DTYPE_NAMES)}
    names = list(tensors)
    random.Random(0).shuffle(names)
    write(path, tensors, names)
    loaded = load_file(path)
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    header, start = read_header(path), 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert start % 8 == 0
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        assert entry["data_offsets"][0] == end  # no holes
        assert (start + entry["data_offsets"][0]) % DTYPES[entry["dtype"]].itemsize == 0
        end = entry["data_offsets"][1]
    assert path.stat().st_size == start + end
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_views_and_parameters_are_written_as_what_they_show(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    tensors = {"t": base.t(), "slice": base[::2, 1:3], "expanded": base[:1].expand(3, 8), "p": torch.nn.Parameter(base)}
    write(tmp_path / "a.safetensors", tensors)
    loaded = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_no_tensors(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {})
    assert load_file(tmp_path / "a.safetensors") == {} == read_header(tmp_path / "a.safetensors")


def test_names_that_need_escaping(tmp_path: Path) -> None:
    tensors = {'quote"backslash\\ñ\n': torch.ones(2)}
    write(tmp_path / "a.safetensors", tensors)
    assert load_file(tmp_path / "a.safetensors").keys() == tensors.keys() == read_header(tmp_path / "a.safetensors").keys()


def test_what_was_not_planned_is_an_error(tmp_path: Path) -> None:
    plan = {"a": torch.empty(2, 3, device="meta")}
    for name, tensor in {"b": torch.ones(2, 3), "a": torch.ones(3, 2)}.items():
        with pytest.raises(ValueError, match=rf"{name} was not planned with shape \[\d, \d\] and torch\.float32"):  # noqa: SIM117
            with ShardWriter(tmp_path / "a.safetensors", plan) as writer:
                writer.write(name, tensor)
    with pytest.raises(ValueError, match=r"a was not planned with shape \[2, 3\] and torch\.float16"):  # noqa: SIM117
        with ShardWriter(tmp_path / "a.safetensors", plan) as writer:
            writer.write("a", torch.ones(2, 3).half())
    with pytest.raises(ValueError, match="a was not planned"):  # noqa: SIM117
        with ShardWriter(tmp_path / "a.safetensors", plan) as writer:
            writer.write("a", torch.ones(2, 3))
            writer.write("a", torch.ones(2, 3))


def test_what_was_planned_and_not_written_is_an_error_unless_another_error_came_first(tmp_path: Path) -> None:
    plan = {f"t{i}": torch.empty(2, device="meta") for i in range(7)}
    with pytest.raises(ValueError, match=r"tensors planned but not written: t0, t1, t2, t3, t4$"):
        ShardWriter(tmp_path / "a.safetensors", plan).__exit__(None, None, None)
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path / "a.safetensors", plan):
        raise KeyboardInterrupt


# ----------------------------------------------------------------------------------------------------------------- reading


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.int8), "c": torch.zeros(0)}, path)
    return path


def test_headers_of_the_safetensors_package(whole: Path) -> None:
    header = read_header(whole)
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} == {
        "a": ("F32", [3, 5]), "b": ("I8", [7]), "c": ("F32", [0]),
    }  # fmt: skip


def test_truncation_is_found_at_every_length(whole: Path) -> None:
    data = whole.read_bytes()
    for length in range(len(data)):
        whole.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"whole\.safetensors is truncated.*(download|save) "):
            read_header(whole)
    whole.write_bytes(data)
    read_header(whole)


def with_header(path: Path, text: bytes) -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(60))
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe{}",
        b"[]",
        b"3",
        b"null",
        b'{"a": 3}',
        b'{"a": []}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_damaged_headers(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged, or not a safetensors file"):
        read_header(with_header(tmp_path / "x.safetensors", header))


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for data in (b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", bytes(range(256)), b"\xff" * 64):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="not a safetensors file"):
            read_header(path)


def test_random_damage_to_a_header_is_never_a_crash(whole: Path) -> None:
    data, generator = whole.read_bytes(), random.Random(0)
    length = int.from_bytes(data[:8], "little")
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(8 + length)] = generator.randrange(256)
        whole.write_bytes(damaged)
        try:
            header = read_header(whole)
        except ValueError:
            continue
        json.dumps(header)
