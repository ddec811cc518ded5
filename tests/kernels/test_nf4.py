"""NF4 against bitsandbytes' own tensors, bit for bit, and the Triton kernel and the CPU's path against the reference.

Without a GPU the kernel runs in Triton's interpreter, each case in a process of its own: an access out of bounds ends that one.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from torchq.kernels import nf4, nf4_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GOLDEN = Path(__file__).parents[1] / "golden" / "bitsandbytes" / "nf4.safetensors"
with safe_open(GOLDEN, "pt") as file:
    CASES = sorted({name.rpartition(".")[0] for name in file.keys()} - {""})  # noqa: SIM118 (it is no dictionary)
SHAPES = [(64, 256), (7, 48), (5, 33), (3, 1001), (1, 1), (300, 128), (2, 8256)]
ROWS = (slice(None), slice(1, None), slice(2, 5), slice(1, 2), slice(0, 0))
Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, int, torch.dtype]


def arguments(n: int, k: int, block_size: int = 64, nested: bool = False, dtype: torch.dtype = torch.float16) -> Arguments:
    """Of the op, for a random weight; the values of absmax differ in size."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) * torch.linspace(0.5, 2, n)[:, None]
    packed, absmax = nf4.nf4_quantize_ref(weight.to(DEVICE), block_size)
    if not nested:
        return packed, absmax, None, None, n, k, block_size, dtype
    return packed, *nf4.compress_absmax(absmax), n, k, block_size, dtype


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ------------------------------------------------------------------------------------------------------------- bitsandbytes


def test_the_tables_are_those_of_bitsandbytes() -> None:
    golden = load_file(GOLDEN)
    assert same_bits(nf4.LEVELS, golden["levels"]) and same_bits(nf4.DYNAMIC_LEVELS, golden["dynamic_levels"])


def test_the_tables_do_not_depend_on_the_processor() -> None:
    """As bitsandbytes' own does: by an ulp, on a CPU without AVX2."""
    code = "from torchq.kernels import nf4; print(nf4.DYNAMIC_LEVELS.view(nf4.torch.int32).tolist())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(nf4.DYNAMIC_LEVELS.view(torch.int32).tolist())


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """Quantized as bitsandbytes does, and what it has quantized read as it does; on the CPU: elsewhere sums differ."""
    golden = {key.removeprefix(f"{name}."): value for key, value in load_file(GOLDEN).items() if key.startswith(f"{name}.")}
    weight, block_size = golden["weight"], int(golden["block_size"])
    packed, absmax = nf4.nf4_quantize_ref(weight, block_size)
    assert same_bits(packed, golden["packed"])
    nested = (golden.get("nested_scale"), golden.get("nested_offset"))
    if nested[0] is None:
        assert same_bits(absmax, golden["absmax"])
    else:
        for ours, theirs in zip(nf4.compress_absmax(absmax), (golden["absmax"], *nested), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    read = (golden["packed"], golden["absmax"], *nested, *weight.shape, block_size, weight.dtype)
    assert torch.equal(nf4.dequantize_nf4_ref(*read), golden["dequantized"])
    assert torch.equal(nf4.dequantize_nf4(*read), golden["dequantized"])


# ----------------------------------------------------------------------------------------------------------------- quantize


def test_the_nearest_level_and_halves_to_the_lower() -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    packed, absmax = nf4.nf4_quantize_ref(weight)
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1, 64)
    normalized = weight.view(-1, 64).double() / absmax.double()[:, None]
    distance = (normalized[..., None] - nf4.LEVELS.double()).abs()
    assert torch.equal(codes.long(), distance.argmin(-1))
    ties = torch.cat([(nf4.LEVELS[1:] + nf4.LEVELS[:-1]) / 2, torch.ones(1)])
    packed, _ = nf4.nf4_quantize_ref(ties[None], 16)
    assert packed.tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_double_quantization_is_within_half_a_step() -> None:
    absmax = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    codes, scale, offset = nf4.compress_absmax(absmax)
    assert codes.shape == (1000,) and scale.shape == (4,) and offset.shape == ()
    error = (nf4.decompress_absmax(codes, scale, offset) - absmax).abs()
    assert error.max() < 0.0075 * scale.max() and error.mean() < 0.0035 * scale.max()  # levels are 0.014 apart at most
    part = nf4.decompress_absmax(codes[300:600], scale, offset, 300)
    assert torch.equal(part, nf4.decompress_absmax(codes, scale, offset)[300:600])


def test_absmax_that_is_all_the_same() -> None:
    codes, scale, offset = nf4.compress_absmax(torch.full((5,), 0.25))
    assert codes.tolist() == [0] * 5 and scale.item() == 0
    assert nf4.decompress_absmax(codes, scale, offset).tolist() == [0.25] * 5


# -------------------------------------------------------------------------------------------------------------- dequantize


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_the_kernel_is_the_reference(block_size: int, nested: bool, apart: Callable[[Callable[[], None]], None]) -> None:
    def check() -> None:
        for n, k in SHAPES:
            for dtype in (torch.float16, torch.float32):
                of = arguments(n, k, block_size, nested, dtype)
                expected = nf4.dequantize_nf4_ref(*of)
                for rows in ROWS if dtype == torch.float16 and n > 4 else ROWS[:1]:
                    assert torch.equal(nf4_triton.dequantize_nf4_triton(*of, rows), expected[rows])

    apart(check)


@pytest.mark.gpu
def test_the_kernel_in_bfloat16() -> None:
    """Which the interpreter does not round as a GPU does."""
    for n, k in SHAPES:
        for nested in (False, True):
            of = arguments(n, k, 64, nested, torch.bfloat16)
            assert torch.equal(nf4.dequantize_nf4(*of), nf4.dequantize_nf4_ref(*of))


@pytest.mark.parametrize("dtype", nf4.DTYPES, ids=str)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_without_triton(monkeypatch: pytest.MonkeyPatch, nested: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(nf4, "_has_triton", lambda device: False)
    monkeypatch.setattr(nf4, "_TILE_WEIGHTS", 1024)
    for block_size in (16, 64, 4096):
        for n, k in SHAPES:
            of = arguments(n, k, block_size, nested, dtype)
            expected = nf4.dequantize_nf4_ref(*of)
            assert torch.equal(nf4.dequantize_nf4(*of), expected)
            for rows in ROWS if n > 4 else ():
                assert torch.equal(nf4.dequantize_rows(*of, rows), expected[rows])


@pytest.mark.parametrize("kernel", [nf4.dequantize_rows, nf4_triton.dequantize_nf4_triton])
def test_every_output_is_written(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor], apart: Callable[[Callable[[], None]], None]
) -> None:
    def check() -> None:
        empty = Tensor.new_empty

        def poisoned(self: Tensor, *shape: Any, **options: Any) -> Tensor:
            result = empty(self, *shape, **options)
            return result.fill_(float("nan")) if result.is_floating_point() else result

        monkeypatch.setattr(Tensor, "new_empty", poisoned)
        for n, k in SHAPES:
            of = arguments(n, k, nested=True)
            rows = slice(n // 2, n)
            assert torch.equal(kernel(*of, rows), nf4.dequantize_nf4_ref(*of)[rows])

    apart(check)


def test_nothing_beyond_the_rows_is_written(monkeypatch: pytest.MonkeyPatch, apart: Callable[[Callable[[], None]], None]) -> None:
    """They start and end within a byte, a stretch and a block."""

    def check() -> None:
        of = arguments(9, 33)
        expected = nf4.dequantize_nf4_ref(*of)[3:6]
        around = torch.full((32 + expected.numel() + 32,), 7.0, dtype=torch.float16, device=DEVICE)
        inside, empty = around[32:-32].view(3, 33), Tensor.new_empty

        def between(self: Tensor, *shape: Any, **options: Any) -> Tensor:
            return inside if shape == (3, 33) else empty(self, *shape, **options)

        monkeypatch.setattr(Tensor, "new_empty", between)
        for kernel in (nf4.dequantize_rows, nf4_triton.dequantize_nf4_triton):
            inside.fill_(7.0)
            assert kernel(*of, slice(3, 6)).data_ptr() == inside.data_ptr()
            assert torch.equal(inside, expected) and (around[:32] == 7).all() and (around[-32:] == 7).all()

    apart(check)


def test_with_triton_the_op_launches_the_kernel(
    monkeypatch: pytest.MonkeyPatch, apart: Callable[[Callable[[], None]], None]
) -> None:
    launch, launched = nf4_triton.dequantize_nf4_triton, []
    monkeypatch.setattr(nf4, "_has_triton", lambda device: True)
    monkeypatch.setattr(nf4_triton, "dequantize_nf4_triton", lambda *of: launched.append(of) or launch(*of))

    def check() -> None:
        of = arguments(5, 33, nested=True)
        assert torch.equal(nf4.dequantize_nf4(*of), nf4.dequantize_nf4_ref(*of)) and len(launched) == 1

    apart(check)


def test_mutations_are_noticed(apart: Callable[[Callable[[], None]], None]) -> None:
    def check() -> None:
        packed, codes, scale, offset, *rest = arguments(40, 512, nested=True)
        expected = nf4.dequantize_nf4_ref(packed, codes, scale, offset, *rest)
        assert torch.equal(nf4_triton.dequantize_nf4_triton(packed, codes, scale, offset, *rest), expected)
        swapped = (packed >> 4) | (packed << 4)
        wrong = [(swapped, codes, scale, offset), (packed, codes.roll(1), scale, offset), (packed, codes, scale.roll(1), offset)]
        wrong += [(packed.roll(1), codes, scale, offset), (packed, codes, scale, offset * 1.01)]
        for tensors in wrong:
            assert not torch.equal(nf4_triton.dequantize_nf4_triton(*tensors, *rest), expected)
        packed, absmax, *rest = arguments(40, 512)
        expected = nf4.dequantize_nf4_ref(packed, absmax, *rest)
        assert not torch.equal(nf4_triton.dequantize_nf4_triton(packed, absmax.roll(1), *rest), expected)

    apart(check)


# ---------------------------------------------------------------------------------------------------------------------- op


def test_opcheck() -> None:
    for nested in (False, True):
        torch.library.opcheck(nf4.dequantize_nf4, arguments(5, 33, nested=nested))


def test_compiles_into_one_graph() -> None:
    packed, codes, scale, offset, *rest = arguments(32, 128, nested=True)

    def function(x: Tensor) -> Tensor:
        return x @ torch.ops.torchq.dequantize_nf4(packed, codes, scale, offset, *rest).t()

    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)], ids=str)
def test_empty_weights(shape: tuple[int, int], apart: Callable[[Callable[[], None]], None]) -> None:
    packed, absmax = nf4.nf4_quantize_ref(torch.zeros(shape))
    assert packed.numel() == 0 and absmax.numel() == 0
    assert nf4.dequantize_nf4(packed, absmax, None, None, *shape, 64, torch.float16).shape == shape
    apart(lambda: nf4_triton.dequantize_nf4_triton(packed, absmax, None, None, *shape, 64, torch.float16))


def test_import_does_not_need_triton() -> None:
    code = "import sys; from torchq.kernels import nf4; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


PLAIN = dict(
    zip(("packed", "absmax", "nested_scale", "nested_offset", "n", "k", "block_size", "dtype"), arguments(9, 96), strict=True)
)
NESTED = {**PLAIN, "absmax": torch.zeros(14, dtype=torch.uint8), "nested_scale": torch.zeros(1), "nested_offset": torch.zeros(())}
SIZE = r"for a weight \[9, 96\] in blocks of 64"


@pytest.mark.parametrize(
    ("of", "changes", "message"),
    [
        (PLAIN, {"packed": torch.zeros(432)}, rf"packed must be torch\.uint8 \[432\] {SIZE}, got torch\.float32 \[432\]"),
        (PLAIN, {"packed": torch.zeros(431, dtype=torch.uint8)}, r"packed must be .* got torch\.uint8 \[431\]"),
        (PLAIN, {"packed": torch.zeros(864, dtype=torch.uint8)[::2]}, r"packed must be contiguous, got strides \(2,\)"),
        (PLAIN, {"absmax": torch.zeros(13)}, rf"absmax must be torch\.float32 \[14\] {SIZE}, got torch\.float32 \[13\]"),
        (PLAIN, {"absmax": torch.zeros(14, dtype=torch.uint8)}, r"absmax must be torch\.float32"),
        (PLAIN, {"nested_scale": torch.zeros(1)}, r"nested_scale and nested_offset must both be given, or neither"),
        (PLAIN, {"block_size": 48}, r"block_size must be a power of two, 16 or more, got 48"),
        (PLAIN, {"block_size": 8}, r"block_size must be a power of two, 16 or more, got 8"),
        (PLAIN, {"dtype": torch.float64}, r"dtype must be float16, bfloat16 or float32, got torch\.float64"),
        (PLAIN, {"n": -9, "k": -96}, r"n and k must not be negative, got -9 and -96"),
        (NESTED, {"absmax": torch.zeros(14)}, r"absmax must be torch\.uint8 \[14\]"),
        (NESTED, {"nested_scale": torch.zeros(2)}, r"nested_scale must be torch\.float32 \[1\]"),
        (NESTED, {"nested_offset": torch.zeros(1)}, r"nested_offset must be torch\.float32 \[\]"),
    ],
)
def test_errors_name_the_argument(of: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    on_device = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in (of | changes).items()}
    with pytest.raises(ValueError, match=message):
        nf4.dequantize_nf4(**on_device)


def test_tensors_on_two_devices() -> None:
    with pytest.raises(ValueError, match=r"absmax is on meta, packed on \w+(:0)?: move one of them, \.to\('\w+(:0)?'\)"):
        nf4.check_nf4_args(**(PLAIN | {"absmax": torch.zeros(14, device="meta")}))


def test_errors_of_quantizing() -> None:
    with pytest.raises(ValueError, match=r"weight must be float16, bfloat16 or float32, got torch\.float64"):
        nf4.nf4_quantize_ref(torch.zeros(2, 64, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"block_size must be a power of two, 16 or more, got 0"):
        nf4.nf4_quantize_ref(torch.zeros(2, 64), 0)
    with pytest.raises(ValueError, match=r"absmax must be float32 \[B\] with B > 0, got torch\.float32 \[0\]"):
        nf4.compress_absmax(torch.zeros(0))
