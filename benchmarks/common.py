"""What every benchmark here shares: timing side by side, the machine's limits, tables and result files."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
console = Console(width=150)


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 10th and 90th percentile of the timed rounds."""

    median: float
    low: float
    high: float
    rounds: int


def time_side_by_side(
    functions: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = 1.0,
    min_rounds: int = 7,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time functions in rounds, each in a new order: a drift of the machine's speed and what ran just before meet all alike.

    Args:
        functions: What to time, by name. Each is called once beforehand.
        seconds: Time to spend in all.
        min_rounds: Rounds to run at least.
        device: ``"cuda"`` to wait for the device around each call.
        clock: What to time with; ``time.process_time`` where the machine does other work beside one thread of this.
    """
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    synchronize()
    shuffle = random.Random(0)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds or len(next(iter(samples.values()))) < min_rounds:
        for name, function in shuffle.sample(list(functions.items()), len(functions)):
            started = clock()
            function()
            synchronize()
            samples[name].append(clock() - started)
    return {name: _summarise(values) for name, values in samples.items()}


def _summarise(values: list[float]) -> Timing:
    deciles = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return Timing(statistics.median(values), deciles[0], deciles[-1], len(values))


def machine_limits(device: str = "cpu") -> dict[str, float]:
    """Measure what bounds a matmul here: bytes/s of a read from memory, and multiply-add rates of large square matmuls."""
    big = torch.ones(64 << 20, dtype=torch.float32, device=device)  # 256 MiB: beyond every cache
    read = time_side_by_side({"read": big.sum}, seconds=1.0, device=device)["read"]
    limits = {"read_bytes_per_second": big.nbytes / read.low}
    size = 2048
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size, device=device).to(dtype)
        timing = time_side_by_side({"mm": lambda a=a: a @ a}, seconds=1.0, device=device)["mm"]
        limits[f"{str(dtype).removeprefix('torch.')}_flops_per_second"] = 2 * size**3 / timing.low
    a8 = torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device)
    timing = time_side_by_side({"mm": lambda: torch._int_mm(a8, a8.t())}, seconds=1.0, device=device)["mm"]
    limits["int8_ops_per_second"] = 2 * size**3 / timing.low
    return limits


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe the machine without naming it."""
    description: dict[str, Any] = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.startswith("cuda"):
        description["gpu"] = torch.cuda.get_device_name(device)
    return description


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far (``getrusage`` would count its parent's, from before ``exec``)."""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit("peak memory is read from /proc/self/status, which this system lacks")
    return int(found[1]) * 1024


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table with its first column to the left."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def save_results(benchmark: str, payload: dict[str, Any], device: str = "cpu") -> Path:
    """Write a run to ``results/<machine>-<date>-<benchmark>.json``."""
    details = machine(device)
    slug = re.sub(r"[^a-z0-9]+", "-", details.get("gpu", details["processor"]).lower()).strip("-")
    date = datetime.date.today().isoformat()
    path = RESULTS / f"{slug}-{details['threads']}threads-{date}-{benchmark}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"benchmark": benchmark, "date": date, "machine": details} | payload, indent=1) + "\n")
    console.print(f"saved results/{path.name}")
    return path


def base_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with what all benchmarks take: ``--seconds``, ``--device``, ``--save``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=1.0, help="time to spend on each comparison")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/<machine>-<date>-<benchmark>.json")
    return parser
