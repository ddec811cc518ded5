"""The search for tiles: what is tried for each kind of weight and number of tokens, and the dispatch table it comes to.

The rows that functions here take and give are plain dictionaries, as in the session's JSON: kind, m, shape, k, n, tile (a list;
None: dequantize and multiply), splits, formula (whether dispatch would choose these splits), asm (decoded with it), seconds.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from common import console
from gpu_timing import Kind, Plan, Run, Shape, Weight, check_close, num_copies, random_tokens, random_weight, time_runs
from torch import Tensor

from torchq.kernels import dispatch, words_linear, words_triton
from torchq.kernels.dispatch import Tile

if TYPE_CHECKING:
    from gpu_session import Session

Row = dict[str, Any]
KINDS = (Kind("w4", 4, 128), Kind("w8", 8, 128), Kind("w2", 2, 128), Kind("w4_fine", 4, 32, has_zeros=True))
# by the table's keys, and a form that takes the tiles of w4: whether it wants others
WIDTHS = ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8))  # rows of the weight and warps of a tile
STAGES = (2, 3, 5, 6)  # beside the table's
SPLITS = (0.5, 2, 4)  # times what dispatch chooses
PER_PROCESSOR = (1, 2, 3, 4, 6, 8)  # programs that split-K could aim for
SAME = 1.02  # a row of the table is dropped if its neighbour's tile is slower by no more than this factor
ROUNDS, LAUNCHES = 11, 10


@dataclass(frozen=True)
class Trial:
    """Something to time: a tile with its splits at a shape, or (None) dequantizing and multiplying."""

    m: int
    shape: Shape
    tile: Tile | None
    splits: int
    formula: bool = True
    asm: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        what = "dequantize" if self.tile is None else f"{self.tile} / {self.splits}"
        return f"M={self.m} {self.shape.name} {what}" + " asm" * self.asm


# ----------------------------------------------------------------------------------------------------------------- choices


def first_tiles(m: int, table_tile: Tile | None, quick: bool) -> list[Tile]:
    """Return tiles to try for m tokens: those that hold them, or half of them (8 tokens at least), and the table's."""
    height = min(max(16, 1 << (m - 1).bit_length()), 128)
    heights = (height,) if quick or m == 16 else (height, height // 2)
    widths = [width for width in WIDTHS if not quick or width in ((32, 2), (64, 4), (128, 4), (128, 8))]
    tiles = [] if table_tile is None else [table_tile]
    for block_m in heights:
        for block_n, warps in widths:
            sums = block_m * block_n // (32 * warps)  # that a lane keeps: too few and decoding is repeated, more would spill
            if 8 <= sums <= 64 and (block_m <= 32 or warps >= 4):
                tiles.append(Tile(block_m, block_n, warps))
    return list(dict.fromkeys(tiles))


def splits_of(device: torch.device, tile: Tile, m: int, shape: Shape, num_bits: int, per_processor: int | None = None) -> int:
    """Return what dispatch chooses; ``per_processor``: if it aimed for so many programs."""
    blocks = -(-shape.k // words_triton.block_size(num_bits))
    aim = dispatch._PROGRAMS_PER_PROCESSOR if per_processor is None else per_processor
    with mock.patch.object(dispatch, "_PROGRAMS_PER_PROCESSOR", aim):
        return dispatch.num_splits(device, tile, m, shape.n, blocks)


def scores(rows: Iterable[Row], kind: str, m: int) -> dict[Tile | None, float]:
    """Return the geometric mean of each tile's seconds over shapes, with dispatch's splits; only tiles timed at all shapes."""
    seconds: dict[Tile | None, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == kind and row["m"] == m and row["formula"] and not row["asm"]:
            seconds[None if row["tile"] is None else Tile(*row["tile"])][row["shape"]] = row["seconds"]
    most = max((len(values) for values in seconds.values()), default=0)
    return {tile: _geometric_mean(values.values()) for tile, values in seconds.items() if len(values) == most}


def best_tile(rows: Iterable[Row], kind: str, m: int) -> Tile | None:
    """Return the fastest tile; None if none was timed."""
    tiles = {tile: score for tile, score in scores(rows, kind, m).items() if tile is not None}
    return min(tiles, key=lambda tile: tiles[tile]) if tiles else None


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


# --------------------------------------------------------------------------------------------------------------- proposals


def propose_rows(rows: list[Row], kind: str) -> list[tuple[int, Tile]]:
    """Return the table's entry for a kind: tiles, up to the number of tokens from which dequantizing wins."""
    found: list[tuple[int, Tile]] = []
    for m in sorted({row["m"] for row in rows if row["kind"] == kind}):
        score, tile = scores(rows, kind, m), best_tile(rows, kind, m)
        if tile is None:
            continue
        if score.get(None, math.inf) < score[tile]:
            break
        if found and score.get(found[-1][1], math.inf) <= SAME * score[tile]:
            found[-1] = (m, found[-1][1])
        else:
            found.append((m, tile))
    return found


def crossover(rows: list[Row], kind: str) -> tuple[int, int | None]:
    """Return the largest number of tokens at which a tile still wins (0: none), and the next one measured (None: none)."""
    last = propose_rows(rows, kind)[-1:]
    most = last[0][0] if last else 0
    compared = {row["m"] for row in rows if row["kind"] == kind and row["tile"] is None and row["m"] > most}
    return most, min(compared, default=None)


def propose_programs(rows: list[Row], device: torch.device) -> dict[int, float]:
    """Return, for numbers of programs per processor that split-K could aim for, the time compared with the best splits'."""
    tried: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["tile"] is not None and not row["asm"]:
            key = (row["kind"], row["m"], Shape(row["shape"], row["k"], row["n"]), Tile(*row["tile"]))
            tried[key][row["splits"]] = row["seconds"]
    ratios: dict[int, list[float]] = defaultdict(list)
    for (kind, m, shape, tile), seconds in tried.items():
        if len(seconds) < 2:
            continue
        for aim in PER_PROCESSOR:
            splits = splits_of(device, tile, m, shape, int(kind[1]), aim)
            nearest = min(seconds, key=lambda measured: abs(math.log2(measured / splits)))
            ratios[aim].append(seconds[nearest] / min(seconds.values()))
    return {aim: _geometric_mean(values) for aim, values in ratios.items()}


def tile_code(tile: Tile) -> str:
    """Return a tile as written in the table."""
    values, defaults = list(astuple(tile)), Tile(0, 0)
    if tile.num_stages == defaults.num_stages:
        values.pop()
        if tile.num_warps == defaults.num_warps:
            values.pop()
    return f"Tile({', '.join(map(str, values))})"


def table_code(architecture: str, kinds: Mapping[str, Iterable[tuple[int, Tile]]]) -> str:
    """Return an entry of dispatch.TABLE, ready to paste."""
    lines = [f'    "{architecture}": {{']
    for kind, rows in kinds.items():
        lines += [f'        "{kind}": (', *(f"            ({most}, {tile_code(tile)})," for most, tile in rows), "        ),"]
    return "\n".join([*lines, "    },"])


# ------------------------------------------------------------------------------------------------------------------ search


@dataclass
class Bed:
    """A weight to try tiles on: copies beyond the cache, and what it stands for."""

    shape: Shape
    copies: list[Weight]
    reference: Tensor

    @staticmethod
    def of(kind: Kind, shape: Shape, plan: Plan) -> Bed:
        """Make one."""
        weight = random_weight(kind, shape.n, shape.k, plan.dtype, plan.device)
        copies = [weight, *(weight.clone() for _ in range(num_copies(weight.nbytes, plan.rotate) - 1))]
        return Bed(shape, copies, weight.dequantize(plan.dtype))


def search_tiles(session: Session, record: dict[str, Any]) -> None:
    """Try tiles, stages and splits for each kind, and propose the dispatch table."""
    rows: list[Row] = record.setdefault("rows", [])
    failed: dict[str, str] = record.setdefault("failed", {})
    try:
        for kind in KINDS[: 1 if session.plan.dry else None]:
            if not session.late(f"tiles for {kind.name}"):
                _search_kind(session, kind, rows, failed)
    finally:
        report(rows, failed, session.plan, record)


def _search_kind(session: Session, kind: Kind, rows: list[Row], failed: dict[str, str]) -> None:
    beds = {shape: Bed.of(kind, shape, session.plan) for shape in session.plan.tile_shapes}
    for name, choose in (
        ("tiles", _widths),
        ("stages", _stages),
        ("splits", _splits),
        ("asm", _assembly),
        ("crossover", _between),
    ):
        if session.late(f"{name} for {kind.name}"):
            continue
        started, before = time.monotonic(), len(rows)
        trials = _compiled(session, kind, choose(session.plan, kind, rows), failed)
        _measure(session, kind, beds, trials, rows, failed)
        console.print(f"{kind.name}: {name}: {len(rows) - before} timings in {time.monotonic() - started:.0f} s")
        session.save()


def _widths(plan: Plan, kind: Kind, rows: list[Row]) -> list[Trial]:
    device, trials = torch.device(plan.device), []
    for m in plan.tile_tokens:
        tiles = first_tiles(m, dispatch.tile_for(device, kind.in_table, m), plan.quick)
        for shape in plan.tile_shapes:
            chosen = tiles[:2] if plan.dry else tiles
            trials += [Trial(m, shape, tile, splits_of(device, tile, m, shape, kind.num_bits)) for tile in chosen]
            trials += [Trial(m, shape, None, 0)] if m >= 32 else []
    return trials


def _stages(plan: Plan, kind: Kind, rows: list[Row]) -> list[Trial]:
    device, trials = torch.device(plan.device), []
    for m in plan.tile_tokens:
        best = best_tile(rows, kind.name, m)
        if best is None:
            continue
        for stages in STAGES[1:3] if plan.quick or plan.dry else STAGES:
            tile = replace(best, num_stages=stages)
            trials += [Trial(m, shape, tile, splits_of(device, tile, m, shape, kind.num_bits)) for shape in plan.tile_shapes]
    return trials


def _splits(plan: Plan, kind: Kind, rows: list[Row]) -> list[Trial]:
    device, trials = torch.device(plan.device), []
    for m in plan.tile_tokens:
        tile = best_tile(rows, kind.name, m)
        if tile is None or m > 128:
            continue
        for shape in plan.tile_shapes:
            usual = splits_of(device, tile, m, shape, kind.num_bits)
            blocks = shape.k // words_triton.block_size(kind.num_bits)
            others = {int(usual * factor) for factor in SPLITS} - {0, usual}
            trials += [Trial(m, shape, tile, splits, False) for splits in sorted(others) if splits <= min(blocks, 32)]
    return trials


def _assembly(plan: Plan, kind: Kind, rows: list[Row]) -> list[Trial]:
    """The best tiles, decoding with inline assembly."""
    device, trials = torch.device(plan.device), []
    for m in plan.tile_tokens if device.type == "cuda" else ():  # the interpreter has no assembly
        tile = best_tile(rows, kind.name, m)
        for shape in plan.tile_shapes if tile is not None else ():
            splits = splits_of(device, tile, m, shape, kind.num_bits)
            trials += [Trial(m, shape, tile, splits, asm=asm) for asm in (False, True)]  # side by side
    return trials


def asm_ratios(rows: list[Row]) -> dict[str, float]:
    """Return, by kind, the time with inline assembly over that without, where both were timed."""
    timed: dict[tuple[Any, ...], dict[bool, float]] = defaultdict(dict)
    for row in rows:
        if row["tile"] is not None:
            timed[row["kind"], row["m"], row["shape"], tuple(row["tile"]), row["splits"]][row["asm"]] = row["seconds"]
    ratios: dict[str, list[float]] = defaultdict(list)
    for (kind, *_), seconds in timed.items():
        if len(seconds) == 2:
            ratios[kind].append(seconds[True] / seconds[False])
    return {kind: _geometric_mean(values) for kind, values in ratios.items()}


def _between(plan: Plan, kind: Kind, rows: list[Row]) -> list[Trial]:
    """Between the last number of tokens where a tile wins and the next, with the tiles of both."""
    device, (low, high) = torch.device(plan.device), crossover(rows, kind.name)
    if high is None or low == 0:
        return []
    trials = []
    for m in sorted({low + (high - low) * quarter // 4 // 16 * 16 for quarter in (1, 2, 3)} - {low, high}):
        tiles = {best_tile(rows, kind.name, low), best_tile(rows, kind.name, high)} - {None}
        for shape in plan.tile_shapes:
            trials += [Trial(m, shape, t, splits_of(device, t, m, shape, kind.num_bits)) for t in tiles if t is not None]
            trials.append(Trial(m, shape, None, 0))
    return trials


@dataclass(frozen=True)
class Job:
    """What the compiler needs to know of a trial."""

    kind: Kind
    tile: Tile
    splits: int
    plan: Plan
    asm: bool = False


def compile_job(job: Job) -> float:
    """Run a tile once on a small weight, which leaves it compiled in Triton's cache; return the seconds."""
    started = time.perf_counter()
    k = 2 * max(words_triton.block_size(job.kind.num_bits), job.kind.group_size)
    weight = random_weight(job.kind, job.tile.block_n, k, job.plan.dtype, job.plan.device)
    _multiply(weight, job.tile, job.splits, random_tokens(1, k, job.plan.dtype, job.plan.device), job.asm)
    if job.plan.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _compiled(session: Session, kind: Kind, trials: list[Trial], failed: dict[str, str]) -> list[Trial]:
    """Compile in other processes, beside each other; return the trials that did."""
    jobs = [Job(kind, trial.tile, trial.splits, session.plan, trial.asm) for trial in trials if trial.tile is not None]
    jobs, seconds = list(dict.fromkeys(jobs)), max(30.0, session.seconds_left())
    errors = {job: outcome.error for job, outcome in zip(jobs, session.workers.run(compile_job, jobs, seconds), strict=True)}
    failed |= {f"{kind.name} {job.tile} / {job.splits}": error for job, error in errors.items() if error is not None}
    return [t for t in trials if t.tile is None or errors[Job(kind, t.tile, t.splits, session.plan, t.asm)] is None]


def _multiply(weight: Weight, tile: Tile | None, splits: int, x: Tensor, asm: bool = False) -> Tensor:
    arguments = (x, *weight.tensors, None, weight.num_bits, weight.group_size)
    if tile is None:
        return words_linear.dequantize_and_multiply(*arguments)
    return words_triton.matmul_words(*arguments, tile, splits, asm=asm)


def _measure(
    session: Session, kind: Kind, beds: dict[Shape, Bed], trials: list[Trial], rows: list[Row], failed: dict[str, str]
) -> None:
    """Time trials, those of one shape and number of tokens side by side."""
    plan, timer = session.plan, session.timer
    points: dict[tuple[int, Shape], list[Trial]] = defaultdict(list)
    for trial in trials:
        points[trial.m, trial.shape].append(trial)
    for (m, shape), some in points.items():
        if session.late(f"{len(some)} trials of {kind.name} M={m} {shape.name}"):
            continue
        x, runs = random_tokens(m, shape.k, plan.dtype, plan.device), {}
        for trial in some:
            try:
                runs[trial] = _prepare(session, beds[shape], trial, x)
            except Exception as error:  # a tile that does not work is a result
                failed[f"{kind.name} {trial.name}"] = f"{type(error).__name__}: {str(error)[:300]}"
        timings = time_runs(timer, {str(index): run for index, run in enumerate(runs.values())}, 2 if plan.dry else ROUNDS)
        for trial, timing in zip(runs, timings.values(), strict=True):
            tile = None if trial.tile is None else list(astuple(trial.tile))
            row = {"kind": kind.name, "m": m, "shape": shape.name, "k": shape.k, "n": shape.n, "tile": tile}
            row |= {"splits": trial.splits, "formula": trial.formula, "asm": trial.asm}
            rows.append(row | {"seconds": timing.median, "p10_s": timing.low, "p90_s": timing.high})


def _prepare(session: Session, bed: Bed, trial: Trial, x: Tensor) -> tuple[Run, int]:
    check_close(_multiply(bed.copies[0], trial.tile, trial.splits, x, trial.asm), x, bed.reference)
    calls = [partial(_multiply, weight, trial.tile, trial.splits, x, trial.asm) for weight in bed.copies]
    calls *= -(-min(LAUNCHES, session.plan.launches) // len(calls))
    return session.timer.prepare(calls), len(calls)


def report(rows: list[Row], failed: dict[str, str], plan: Plan, record: dict[str, Any]) -> None:
    """Print and record what the timings propose."""
    device = torch.device(plan.device)
    gpu = dispatch.gpu_of(device)
    architecture = "sm_80" if gpu is None else gpu.architecture
    entries: dict[str, Iterable[tuple[int, Tile]]] = dict(dispatch.TABLE[architecture])
    for kind in KINDS:
        proposed, (low, high) = propose_rows(rows, kind.name), crossover(rows, kind.name)
        if not proposed:
            console.print(f"{kind.name}: no tile was timed: the table's entry is as it was", highlight=False)
            continue
        entries[kind.name] = proposed
        after = "dequantizing was never faster" if high is None else f"dequantizing wins at {high}"
        console.print(f"{kind.name}: tiles win up to {low} tokens, {after}", highlight=False)
        _print_scores(rows, kind.name)
    record |= {
        "table": table_code(architecture, entries),
        "programs_per_processor": propose_programs(rows, device),
        "asm": asm_ratios(rows),
    }
    for name, error in failed.items():
        console.print(f"failed: {name}: {error.splitlines()[-1]}", highlight=False, markup=False, soft_wrap=True)


def _print_scores(rows: list[Row], kind: str) -> None:
    for m in sorted({row["m"] for row in rows if row["kind"] == kind}):
        ranked = sorted(scores(rows, kind, m).items(), key=lambda item: item[1])
        texts = [f"{'dequantize' if tile is None else tile_code(tile)} {score * 1e6:.1f}" for tile, score in ranked[:4]]
        console.print(f"  M={m}: {', '.join(texts)} µs", highlight=False, soft_wrap=True)


def print_proposal(record: Mapping[str, Any]) -> None:
    """Print the proposed table, ready to paste."""
    if "table" not in record:
        return
    console.print("\nProposed entry of kernels/dispatch.py's TABLE", highlight=False)
    console.print(record["table"], highlight=False, soft_wrap=True, markup=False)
    ratios = ", ".join(f"{aim}: {float(ratio):.3f}" for aim, ratio in record["programs_per_processor"].items())
    console.print(f"programs per processor that split-K aims for, time against the best splits: {ratios}", highlight=False)
    for kind, ratio in record["asm"].items():
        console.print(f"{kind}: time with inline assembly over that without: {ratio:.3f}", highlight=False)
