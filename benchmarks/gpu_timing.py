"""What a GPU session measures with: sizes, weights, timers, and the GPU's limits."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from common import Timing, _summarise, console
from torch import Tensor

from torchq.kernels import fp8_triton, nf4, nf4_triton, wna16_triton, words_triton

if TYPE_CHECKING:
    from gpu_session import Session

_UNUSED_BYTES = 16 << 30  # of memory that the allocator may keep for later
Call = Callable[[Tensor], Tensor]
Run = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A layer: K in_features, N out_features."""

    name: str
    k: int
    n: int

    @property
    def label(self) -> str:
        """Name and size."""
        return f"{self.name} {self.k}x{self.n}"


@dataclass(frozen=True)
class Kind:
    """A form of weights; ``group_size`` 0: one group per row."""

    name: str
    num_bits: int
    group_size: int
    has_zeros: bool = False
    everywhere: bool = False  # timed at all shapes, not just at a few
    fp8: bool = False

    @property
    def in_table(self) -> str:
        """Its name in the dispatch table."""
        return words_triton.kind_of(self.num_bits, self.group_size or 1 << 20, self.has_zeros)


KINDS = (
    Kind("w4 g128", 4, 128, everywhere=True),
    Kind("w8 g128", 8, 128, everywhere=True),
    Kind("fp8 row", 8, 0, everywhere=True, fp8=True),
    Kind("w4 g32 asym", 4, 32, has_zeros=True),
    Kind("w4 row", 4, 0),
    Kind("w2 g64", 2, 64),
)
GATE_UP_8B, DOWN_8B, QKV_8B = Shape("8B gate_up", 4096, 28672), Shape("8B down", 14336, 4096), Shape("8B qkv", 4096, 6144)
GATE_UP_70B, DOWN_70B = Shape("70B gate_up", 8192, 57344), Shape("70B down", 28672, 8192)
SHAPES = (GATE_UP_8B, GATE_UP_70B, DOWN_8B, QKV_8B, Shape("8B o", 4096, 4096), Shape("32B gate_up", 5120, 51200), DOWN_70B)
TINY = Shape("tiny", 256, 64), Shape("small", 512, 96)


@dataclass(frozen=True)
class Plan:
    """What a run covers.

    Attributes:
        device: ``"cuda"``, or ``"cpu"`` for a dry run.
        dtype: Of activations where there is one: bfloat16, or float16 in a dry run.
        dtypes: Those that are checked.
        shapes: For kinds that are timed everywhere.
        few: Shapes for the others.
        tokens: Numbers of tokens that are timed.
        rounds: Samples of each timing.
        launches: Kernels in a sample, at least.
        rotate: Bytes of weights that a sample goes through, at least: several times the cache.
        far: Offsets, in elements, that checks go beyond.
        processes: That compile and check beside each other.
        backend: Of ``torch.compile``.
        quick: Whether fewer things are tried.
        dry: Whether this is only to see that everything runs.
        tile_tokens: Numbers of tokens that tiles are tried for.
        tile_shapes: At which shapes.
    """

    device: str
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Shape, ...]
    few: tuple[Shape, ...]
    tokens: tuple[int, ...]
    rounds: int
    launches: int
    rotate: int
    far: int
    processes: int
    backend: str
    quick: bool
    dry: bool
    tile_tokens: tuple[int, ...]
    tile_shapes: tuple[Shape, ...]


def plan_for(*, quick: bool = False, dry: bool = False) -> Plan:
    """Return what a run covers; a dry one tiny sizes on the CPU, in float16: Triton's interpreter cannot multiply bfloat16."""
    if dry:
        return Plan(
            "cpu", torch.float16, (torch.float16,), TINY, TINY[:1], (1, 17, 200), 2, 2, 1 << 14, 1 << 12, 1, "eager",
            quick, True, (1, 32, 64), TINY,
        )  # fmt: skip
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    common = ("cuda", torch.bfloat16, (torch.float16, torch.bfloat16))
    rest = (20, max(4 * cache, 200 << 20), 1 << 31, max(1, min(12, (os.cpu_count() or 1) - 2)))
    if quick:
        shapes, few, tokens = (GATE_UP_8B, GATE_UP_70B, QKV_8B), (GATE_UP_8B,), (1, 16, 64, 128, 256, 1024)
        return Plan(*common, shapes, few, tokens, 20, *rest, "eager", True, False, (1, 16, 64, 256), (GATE_UP_8B, QKV_8B))
    tokens, few = tuple(1 << power for power in range(11)), (GATE_UP_8B, DOWN_8B)
    tile_tokens = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
    return Plan(
        *common, SHAPES, few, tokens, 50, *rest, "inductor", False, False, tile_tokens, (GATE_UP_8B, DOWN_8B, QKV_8B)
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Weight:
    """A weight in words; ``group_size`` as the op takes it."""

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    num_bits: int
    group_size: int
    k: int
    fp8: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What every kernel on words takes."""
        return self.words, self.scale, self.zero_point

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def clone(self) -> Weight:
        """A copy elsewhere in memory."""
        zeros = None if self.zero_point is None else self.zero_point.clone()
        return replace(self, words=self.words.clone(), scale=self.scale.clone(), zero_point=zeros)

    def multiply(self, x: Tensor) -> Tensor:
        """The op: what a layer calls."""
        if self.fp8:
            return fp8_triton.fp8_triton(x, self.words, self.scale, None, None, self.group_size, -1)
        return wna16_triton.wna16_triton(x, *self.tensors, None, self.num_bits, self.group_size)

    def dequantize(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Some rows in plain PyTorch, [rows, K]; in float64 exact."""
        zeros = None if self.zero_point is None else self.zero_point[:, rows]
        scale = self.scale[:, rows].to(dtype) if dtype == torch.float64 else self.scale[:, rows]
        words = self.words[:, rows].contiguous()
        return words_triton.dequantize_words_ref(
            words, scale, zeros, self.num_bits, self.group_size, self.k, dtype, fp8=self.fp8
        )  # fmt: skip

    def dequantize_by_kernel(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Some rows by the Triton kernel."""
        arguments = (*self.tensors, self.num_bits, self.group_size, self.k, dtype, rows)
        return words_triton.dequantize_words(*arguments, fp8=self.fp8)


def random_weight(kind: Kind, n: int, k: int, dtype: torch.dtype, device: str, seed: int = 0) -> Weight:
    """Return random codes, scales of both signs, and zero points if the kind has them."""
    generator = torch.Generator(device).manual_seed(seed)
    bits, group_size = kind.num_bits, kind.group_size or k
    blocks, half, groups = -(-k // words_triton.block_size(bits)), 1 << (bits - 1), k // group_size

    def integers(low: int, high: int, shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=of)

    words = integers(-(1 << 31), 1 << 31, (blocks, n, 16), torch.int32)
    if kind.fp8:
        words &= ~0x01010101  # no NaN
    if k % words_triton.block_size(bits):  # columns past K hold code 0
        words = words_triton.pack_words(words_triton.unpack_words(words, bits, k), bits)
    signs = integers(0, 2, (groups, n), torch.int8) * 2 - 1
    scale = (torch.rand(groups, n, generator=generator, device=device) + 0.1) * signs / half / k**0.5
    zero_point = integers(-half, half, (groups, n), torch.int8) if kind.has_zeros else None
    return Weight(words, scale.to(dtype), zero_point, bits, group_size, k, kind.fp8)


@dataclass(frozen=True)
class Nf4Weight:
    """A weight in NF4, in blocks of 64; ``nested``: None, or scale and offset of absmax."""

    packed: Tensor
    absmax: Tensor
    nested: tuple[Tensor, Tensor] | None
    n: int
    k: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """As every function of NF4 takes them."""
        return self.packed, self.absmax, *(self.nested or (None, None))

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def clone(self) -> Nf4Weight:
        """A copy elsewhere in memory."""
        nested = None if self.nested is None else (self.nested[0].clone(), self.nested[1].clone())
        return Nf4Weight(self.packed.clone(), self.absmax.clone(), nested, self.n, self.k)

    def dequantize(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Some rows in plain PyTorch; the first one must begin with a group of 256 blocks."""
        first, stop, _ = rows.indices(self.n)
        packed, absmax, scale, offset = self.tensors
        packed, absmax = packed[first * self.k // 2 : -(-stop * self.k // 2)], absmax[first * self.k // 64 :]
        scale = None if scale is None else scale[first * self.k // 64 // nf4.NESTED_BLOCK :]
        return nf4.dequantize_nf4_ref(packed, absmax, scale, offset, stop - first, self.k, 64, dtype)

    def dequantize_by_kernel(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Some rows by the Triton kernel."""
        return nf4_triton.dequantize_nf4_triton(*self.tensors, self.n, self.k, 64, dtype, rows)


NF4 = {"nf4": False, "nf4 nested": True}  # name -> whether absmax is quantized


def random_nf4(nested: bool, n: int, k: int, device: str, seed: int = 0) -> Nf4Weight:
    """Return random codes, and absmax of a normal weight's size."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks = -(-n * k // 64)

    def integers(count: int) -> Tensor:
        return torch.randint(0, 256, (count,), generator=generator, device=device, dtype=torch.uint8)

    def absmax(count: int) -> Tensor:
        return (torch.rand(count, generator=generator, device=device) + 2) / k**0.5

    packed = integers(-(-n * k // 2))
    if not nested:
        return Nf4Weight(packed, absmax(blocks), None, n, k)
    return Nf4Weight(packed, integers(blocks), (absmax(-(-blocks // nf4.NESTED_BLOCK)) / 4, absmax(1).sum()), n, k)


def random_tokens(m: int, k: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Return normal activations, [m, k]."""
    return torch.randn(m, k, generator=torch.Generator(device).manual_seed(seed + m), device=device).to(dtype)


def num_copies(nbytes: int, rotate: int) -> int:
    """How many copies of a weight together exceed ``rotate`` bytes."""
    return rotate // nbytes + 1


# ------------------------------------------------------------------------------------------------------------------ timers


class Timer(Protocol):
    """Runs calls many times and says how long each took."""

    def prepare(self, calls: Sequence[Run], *, graph: bool = True) -> Run:
        """Return a function that makes all calls, after having made the first one; ``graph``: as one CUDA graph."""

    def sample(self, run: Run) -> Callable[[], float]:
        """Make a run, and return what gives its seconds once :meth:`wait` has returned."""

    def wait(self) -> None:
        """Wait until all runs are done."""


class GpuTimer:
    """CUDA graphs and events."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def prepare(self, calls: Sequence[Run], *, graph: bool = True) -> Run:
        """As the protocol says."""
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _UNUSED_BYTES:  # of graphs that are gone
            torch.cuda.empty_cache()
        captured = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for _ in range(2):  # kernels are compiled and loaded, and libraries make their workspaces, before a capture
                calls[0]()
            torch.cuda.synchronize()
            if graph:  # not torch.cuda.graph: that gives all cached memory back each time, which takes longer than the timing
                gc.disable()
                captured.capture_begin()
                try:
                    for call in calls:
                        call()
                finally:
                    captured.capture_end()
                    gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return partial(_replay, captured, calls) if graph else partial(_call_all, calls)

    def sample(self, run: Run) -> Callable[[], float]:
        """As the protocol says."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def wait(self) -> None:
        """As the protocol says."""
        torch.cuda.synchronize()


class PlainTimer:
    """The wall clock, where there is no GPU."""

    def prepare(self, calls: Sequence[Run], *, graph: bool = True) -> Run:
        """As the protocol says."""
        with torch.no_grad():
            calls[0]()
        return partial(_call_all, calls)

    def sample(self, run: Run) -> Callable[[], float]:
        """As the protocol says."""
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        return lambda: seconds

    def wait(self) -> None:
        """As the protocol says."""


@torch.no_grad()
def _call_all(calls: Sequence[Run]) -> None:
    for call in calls:
        call()


def _replay(graph: Any, calls: Sequence[Run]) -> None:
    """A graph holds addresses only: its calls keep the tensors alive."""
    graph.replay()


def time_runs(timer: Timer, runs: Mapping[str, tuple[Run, int]], rounds: int) -> dict[str, Timing]:
    """Return seconds per call of prepared runs, given with their numbers of calls: in rounds, each in a new order."""
    samples: dict[str, list[Callable[[], float]]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for run, _ in runs.values():
        timer.sample(run)
    timer.wait()
    for _ in range(rounds):
        for name, (run, _) in shuffle.sample(list(runs.items()), len(runs)):
            samples[name].append(timer.sample(run))
    timer.wait()
    return {name: _summarise([seconds() / runs[name][1] for seconds in values]) for name, values in samples.items()}


def check_close(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless y is x times the weight's transpose within 1 %: what is wrong is not worth timing."""
    expected = F.linear(x, weight)
    error = float((y - expected).float().norm() / expected.float().norm())
    if not error < 0.01:
        raise ValueError(f"relative error {error:.4f} at M={x.shape[0]}; a wrong result is not timed")


def time_call(timer: Timer, call: Run, rounds: int, *, graph: bool = True, launches: int = 1) -> Timing:
    """Return seconds per call of one function."""
    return time_runs(timer, {"": (timer.prepare([call] * launches, graph=graph), launches)}, rounds)[""]


# ------------------------------------------------------------------------------------------------------------------ limits


@dataclass(frozen=True)
class Limits:
    """What the GPU did at best: bytes/s from and to memory, flop/s of a large 16-bit matmul."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: float, flops: float = 0.0) -> float:
        """The least time that moving bytes and multiplying take, at the same time."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_limits(session: Session, record: dict[str, Any]) -> None:
    """Measure the limits of the GPU: reading, copying and multiplying."""
    plan, timer = session.plan, session.timer
    size, width = (1 << 16, 64) if plan.dry else (1 << 30, 8192)
    rounds = min(plan.rounds, 20)
    big = torch.ones(size, dtype=torch.float32, device=plan.device)
    copy = torch.empty_like(big)
    record["read_bytes_per_second"] = big.nbytes / time_call(timer, big.sum, rounds).low
    record["copy_bytes_per_second"] = 2 * big.nbytes / time_call(timer, partial(copy.copy_, big), rounds).low
    del big, copy
    a, b = (random_tokens(width, width, plan.dtype, plan.device, seed) for seed in (0, 1))
    matmul = time_call(timer, partial(torch.matmul, a, b), rounds, launches=5)
    record["flops_per_second"] = 2 * width**3 / matmul.low
    record["bytes_per_second"] = max(record["read_bytes_per_second"], record["copy_bytes_per_second"])
    console.print(
        f"reads {record['read_bytes_per_second'] / 1e12:.2f} TB/s, copies {record['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
        f"multiplies {record['flops_per_second'] / 1e12:.0f} TFLOP/s"
    )


def limits_of(session: Session) -> Limits:
    """The measured limits; they are measured first if they have not been."""
    record = session.records.setdefault("limits", {})
    if "bytes_per_second" not in record:
        measure_limits(session, record)
    return Limits(record["bytes_per_second"], record["flops_per_second"])
