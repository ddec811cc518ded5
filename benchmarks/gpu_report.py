"""What a GPU session's figures mean: the roofline, the tables, and which targets are met. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common import Timing, console, print_table
from gpu_timing import Limits, Shape

BASE = "F.linear"
BASE_TRAINING = "16 bits"
BASE_KV = "SDPA"
LARGE = 4096 * 28672  # weights of a layer from which on the targets for few tokens hold
Row = dict[str, Any]


def roofline_row(name: str, shape: Shape, m: int, nbytes: int, timing: Timing, base: Timing, limits: Limits) -> Row:
    """Return a timing beside what limits it; ``nbytes`` of the weight. Activations and results are of 16 bits."""
    moved = nbytes + 2 * m * (shape.k + shape.n)
    limit = limits.seconds(moved, 2.0 * m * shape.k * shape.n)
    return {
        "kernel": name,
        "shape": shape.name,
        "k": shape.k,
        "n": shape.n,
        "m": m,
        "median_s": timing.median,
        "p10_s": timing.low,
        "p90_s": timing.high,
        "rounds": timing.rounds,
        "limit_s": limit,
        "of_limit": limit / timing.median,
        "of_bandwidth": moved / limits.bytes_per_second / timing.median,
        "gbytes_per_second": moved / timing.median / 1e9,
        "speedup": base.median / timing.median,
    }


def print_roofline(shape: Shape, rows: Iterable[Row]) -> None:
    """Print the timings at a shape."""
    lines = [
        [
            str(row["m"]),
            row["kernel"],
            f"{row['median_s'] * 1e6:.1f}",
            f"{row['p10_s'] * 1e6:.1f}–{row['p90_s'] * 1e6:.1f}",
            f"{row['of_limit']:.0%}",
            f"{row['speedup']:.2f}x",
            f"{row['gbytes_per_second']:.0f}",
        ]
        for row in rows
        if row["shape"] == shape.name
    ]
    print_table(shape.label, ["tokens", "kernel", "µs", "p10–p90", "of limit", f"x {BASE}", "GB/s"], lines)


def print_overview(rows: list[Row], kernel: str) -> None:
    """Print one kernel at all shapes: times F.linear, and the share of the limit."""
    mine = [row for row in rows if row["kernel"] == kernel]
    if not mine:
        return
    tokens = sorted({row["m"] for row in mine})
    found = {(row["shape"], row["m"]): f"{row['speedup']:.2f} {row['of_limit']:.0%}" for row in mine}
    shapes = dict.fromkeys(row["shape"] for row in mine)
    lines = [[shape, *(found.get((shape, m), "–") for m in tokens)] for shape in shapes]
    print_table(f"{kernel}: times {BASE}, share of the limit", ["", *(f"M={m}" for m in tokens)], lines)


def print_training(rows: list[Row]) -> None:
    """Print seconds and bytes of LoRA steps."""
    bases = {row["recompute"]: row["median_s"] for row in rows if row["contender"] == BASE_TRAINING}
    lines = [
        [
            f"{row['contender']}{' recomputed' if row['recompute'] else ''}",
            f"{row['weights']['linear'] / 1e6:.0f}",
            f"{sum(row['weights'].values()) / 1e6:.0f}",
            f"{row['step_peak'] / 1e6:.0f}",
            f"{row['median_s'] * 1e3:.1f}",
            f"{row['p10_s'] * 1e3:.1f}–{row['p90_s'] * 1e3:.1f}",
            f"{row['limit_s'] / row['median_s']:.0%}",
            f"{row['median_s'] / bases[row['recompute']]:.2f}x",
        ]
        for row in rows
    ]
    columns = ["a LoRA step", "linear, MB", "weights, MB", "+ step, MB", "ms", "p10–p90", "of limit", f"x {BASE_TRAINING}"]
    if lines:
        print_table("LoRA on 8B layers", columns, lines)


def print_kv_cache(rows: list[Row]) -> None:
    """Print what decoding over a KV cache takes; bandwidth counts what must be read."""
    lines = [
        [
            f"B={row['batch']} T={row['tokens']}",
            row["contender"],
            f"{row['median_s'] * 1e6:.1f}",
            f"{row['p10_s'] * 1e6:.1f}–{row['p90_s'] * 1e6:.1f}",
            f"{row['gbytes_per_second']:.0f}",
            f"{row['of_bandwidth']:.0%}",
            f"{row['speedup']:.2f}x",
        ]
        for row in rows
    ]
    if lines:
        columns = ["cache", "contender", "µs", "p10–p90", "GB/s", "of bandwidth", f"x {BASE_KV} in 16 bits"]
        print_table("decoding a token, one layer", columns, lines)


# ----------------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Verdict:
    """A target and the worst figure found; ``met`` None: not measured."""

    target: str
    met: bool | None
    worst: str

    @property
    def line(self) -> str:
        """As printed."""
        return f"{ {True: 'PASS', False: 'FAIL', None: '  --'}[self.met] }  {self.target}: {self.worst}"


def verdicts(records: Mapping[str, Any]) -> list[Verdict]:
    """Judge a session's records by the targets."""
    rows: list[Row] = records.get("time", {}).get("rows", [])
    dequantize: list[Row] = records.get("dequantize", {}).get("rows", [])
    calls = records.get("first_call", {}).get("cold", {})
    ours = [row for row in rows if row["kernel"].startswith("w")]
    large = [row for row in ours if row["k"] * row["n"] >= LARGE]
    w4, w8 = ([row for row in large if row["kernel"] == name] for name in ("w4 g128", "w8 g128"))
    all_w8 = [row for row in ours if row["kernel"] == "w8 g128"]
    return [
        _at_least("w4 g128 from 4096x28672 on, M <= 16, x F.linear", 2.6, "speedup", [r for r in w4 if r["m"] <= 16]),
        _at_least("w4 g128 from 4096x28672 on, M <= 16, of bandwidth", 0.75, "of_bandwidth", [r for r in w4 if r["m"] <= 16]),
        _at_least("w4 g128 from 4096x28672 on, M = 64, x F.linear", 1.5, "speedup", [r for r in w4 if r["m"] == 64]),
        _at_least("w8 g128 from 4096x28672 on, M <= 16, x F.linear", 1.6, "speedup", [r for r in w8 if r["m"] <= 16]),
        _at_least("w8 g128, M <= 64, x F.linear", 1.0, "speedup", [r for r in all_w8 if r["m"] <= 64]),
        _at_least("all kinds, any M, x F.linear", 0.97, "speedup", ours),
        _at_least("dequantize, of bandwidth", 0.75, "of_bandwidth", dequantize),
        _first_calls(calls),
    ]


def _at_least(target: str, least: float, figure: str, rows: list[Row]) -> Verdict:
    target = f"{target} >= {least:g}"
    if not rows:
        return Verdict(target, None, "not measured")
    worst = min(rows, key=lambda row: row[figure])
    missed = sum(not row[figure] >= least for row in rows)
    where = f"{worst['kernel']} {worst['shape']}" + (f" M={worst['m']}" if "m" in worst else "")
    return Verdict(target, missed == 0, f"worst {worst[figure]:.2f} at {where}; {missed} of {len(rows)} miss it")


def _first_calls(calls: Mapping[str, float]) -> Verdict:
    target = "first call of each kernel < 1 s"
    if not calls:
        return Verdict(target, None, "not measured")
    slowest = max(calls, key=lambda name: calls[name])
    return Verdict(target, calls[slowest] < 1.0, f"slowest {calls[slowest]:.2f} s: {slowest}")


def print_verdicts(records: Mapping[str, Any]) -> None:
    """Print the targets and what became of them."""
    console.print("\nTargets", highlight=False)
    for verdict in verdicts(records):
        console.print(verdict.line, highlight=False, soft_wrap=True)
