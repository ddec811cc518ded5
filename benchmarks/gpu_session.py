"""Everything that is to be checked and measured on a GPU, in one run of at most 8 minutes.

Tests marked ``gpu``; kernels against float64 and beyond 2^31 elements; first calls; every kernel beside ``F.linear`` and other
libraries, with the roofline; graphs, ``torch.compile``, a small model and calibration; LoRA steps; the KV cache; the search for
tiles, which ends with an entry for the dispatch table. Results are written to ``<machine>-<date>-gpu_session.json`` after every
step::

    python benchmarks/gpu_session.py                    everything
    python benchmarks/gpu_session.py --quick            in 3 minutes, at fewer sizes
    python benchmarks/gpu_session.py --only time,tiles  some steps
    python benchmarks/gpu_session.py --dry-run          every step at tiny sizes, without a GPU
    python benchmarks/gpu_session.py --report FILE      the tables of an earlier run

A step is a function that takes the session and a dictionary for what it finds; :func:`all_steps` names it. It asks
:meth:`Session.late` before each part, which skips what there is no time for, and says so. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("torchq") is None:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT))

import common  # noqa: E402
from common import console  # noqa: E402

if TYPE_CHECKING:
    from gpu_timing import Plan, Timer

MINUTES = {False: 8.0, True: 3.0}  # by --quick
LOST = "BrokenProcessPool"
Record = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A step: what it runs, and the share of the time that earlier steps leave for it."""

    function: Callable[[Session, Record], None]
    share: float


def all_steps() -> dict[str, Step]:
    """Return the steps in order. Imported only now: Triton decides as it is imported whether it interprets."""
    import gpu_checks
    import gpu_kv_cache
    import gpu_models
    import gpu_tiles
    import gpu_timing
    import gpu_training

    return {
        "limits": Step(gpu_timing.measure_limits, 0.03),
        "tests": Step(gpu_checks.run_tests, 0.16),
        "correct": Step(gpu_checks.check_kernels, 0.10),
        "first_call": Step(gpu_checks.time_first_calls, 0.08),
        "time": Step(time_kernels, 0.14),
        "dequantize": Step(time_dequantize, 0.02),
        "capture": Step(gpu_models.check_capture, 0.02),
        "model": Step(gpu_models.check_model, 0.08),
        "calibration": Step(gpu_models.check_calibration, 0.05),
        "training": Step(gpu_training.time_training, 0.10),
        "kv_cache": Step(gpu_kv_cache.time_kv_cache, 0.08),
        "tiles": Step(gpu_tiles.search_tiles, 0.14),
    }


# ----------------------------------------------------------------------------------------------------------------- workers


@dataclass(frozen=True)
class Outcome:
    """What a job returned, or what went wrong."""

    value: Any
    error: str | None


def guarded(function: Callable[[Any], Any], job: Any) -> Outcome:
    """Return the outcome of a job. A worker whose GPU context is lost ends: all that it did from now on would fail."""
    try:
        return Outcome(function(job), None)
    except Exception as error:  # a job's failure is its outcome: other jobs and steps go on
        outcome = Outcome(None, f"{type(error).__name__}: {str(error)[-1500:]}")
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception:  # the context is lost, by whatever error
            print(outcome.error, file=sys.stderr, flush=True)
            os._exit(1)
    return outcome


class Workers:
    """Processes that compile and check beside each other, started when first needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[[Any], Any], jobs: Sequence[Any], seconds: float = 120.0) -> list[Outcome]:
        """Return the outcomes of jobs, in order. Those that a dying worker took along run again, the last one first."""
        outcomes = self._run(function, jobs, seconds)
        for _ in range(2):
            lost = [index for index, outcome in enumerate(outcomes) if (outcome.error or "").startswith(LOST)]
            again = self._run(function, [jobs[index] for index in reversed(lost)], seconds) if lost else []
            for index, outcome in zip(reversed(lost), again, strict=True):
                outcomes[index] = outcome
        return outcomes

    def _run(self, function: Callable[[Any], Any], jobs: Sequence[Any], seconds: float) -> list[Outcome]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.count, mp_context=multiprocessing.get_context("spawn"))
        futures = [self._pool.submit(guarded, function, job) for job in jobs]
        wait(futures, timeout=seconds)
        outcomes = [_outcome(future, seconds) for future in futures]
        if any(
            outcome.error is not None and outcome.error.startswith(("BrokenProcessPool", "TimeoutError")) for outcome in outcomes
        ):
            self.stop()
        return outcomes

    def stop(self) -> None:
        """End the processes, also those that hang."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            self._pool = None


def _outcome(future: Future[Outcome], seconds: float) -> Outcome:
    if not future.done():
        return Outcome(None, f"TimeoutError: no result in {seconds:.0f} s")
    error = future.exception()
    return future.result() if error is None else Outcome(None, f"{type(error).__name__}: {error}")


# ----------------------------------------------------------------------------------------------------------------- session


@dataclass
class Session:
    """One run: what it covers, what it has found, and when it must end.

    Attributes:
        plan: Sizes.
        timer: How runs are timed.
        minutes: After which everything that is left is skipped.
        write: Writes all records.
        records: What each step found, by name.
        workers: Processes for what need not be alone on the machine.
        clock: Seconds.
    """

    plan: Plan
    timer: Timer
    minutes: float
    write: Callable[[dict[str, Record]], None]
    records: dict[str, Record] = field(default_factory=dict)
    workers: Workers = field(default_factory=partial(Workers, 1))
    clock: Callable[[], float] = time.monotonic
    _step: str = ""
    _step_end: float = 0.0

    def run(self, steps: Mapping[str, Step]) -> bool:
        """Run steps, each whatever became of those before; return whether all succeeded."""
        seconds, total = 60 * self.minutes, sum(step.share for step in steps.values())
        end, left = self.clock() + seconds, total
        try:
            for name, step in steps.items():
                left -= step.share
                self._step, self._step_end = name, end - left / total * seconds
                self._run_step(name, step, end)
                self.save()
        finally:
            self.workers.stop()
        return not self.failures()

    def _run_step(self, name: str, step: Step, end: float) -> None:
        record, started = self.records.setdefault(name, {}), self.clock()
        if started >= end:
            self.skip("the whole step")
            return
        console.rule(f"{name}: {(step.function.__doc__ or name).splitlines()[0]}")
        record["clocks"] = [clocks()]
        try:
            step.function(self, record)
        except Exception as error:  # on record, shown at the end, and the exit status; further steps still run
            record["error"] = traceback.format_exc()
            console.print(f"{name} FAILED: {type(error).__name__}: {error}", style="bold red", markup=False, soft_wrap=True)
        record["seconds"] = self.clock() - started
        record["clocks"].append(clocks())
        console.print(f"{name}: {record['seconds']:.0f} s, {end - self.clock():.0f} s left", highlight=False)

    def seconds_left(self) -> float:
        """Until the current step should end."""
        return self._step_end - self.clock()

    def late(self, what: str) -> bool:
        """Whether there is no time for a part of the current step, which is then on record as skipped."""
        if self.seconds_left() > 0:
            return False
        self.skip(what)
        return True

    def skip(self, what: str) -> None:
        """Put on record that something is not done."""
        self.records.setdefault(self._step, {}).setdefault("skipped", []).append(what)
        console.print(f"skipped: {what}", highlight=False, markup=False)

    def save(self) -> None:
        """Write what has been found so far."""
        self.write(self.records)

    def failures(self) -> dict[str, str]:
        """The last line of each failed step's error."""
        return {name: record["error"].strip().splitlines()[-1] for name, record in self.records.items() if "error" in record}


def clocks() -> str | None:
    """What nvidia-smi says of clocks (MHz), power (W) and temperature; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# ------------------------------------------------------------------------------------------------------------ steps of timing


def time_kernels(session: Session, record: Record) -> None:
    """Time every kernel beside F.linear, at all shapes and numbers of tokens."""
    from gpu_contenders import Lineup
    from gpu_report import BASE, print_roofline, roofline_row
    from gpu_timing import limits_of, random_tokens, time_runs

    plan, limits = session.plan, limits_of(session)
    rows, notes = record.setdefault("rows", []), record.setdefault("notes", {})
    lineup = Lineup(plan, notes)
    for shape in plan.shapes:
        if session.late(shape.label):
            continue
        contenders = lineup.contenders(shape)
        for m in plan.tokens:
            if session.late(f"{shape.label} M={m}"):
                continue
            x = random_tokens(m, shape.k, plan.dtype, plan.device)
            timings = time_runs(session.timer, lineup.runs(session.timer, contenders, x), plan.rounds)
            for name, timing in timings.items():
                rows.append(roofline_row(name, shape, m, contenders[name].nbytes, timing, timings[BASE], limits))
        del contenders
        print_roofline(shape, rows)
        session.save()
    for name, note in notes.items():
        console.print(f"{name}: {note}", highlight=False, markup=False)
    if lineup.broken:
        raise AssertionError(f"did not work: {', '.join(lineup.broken)}")


def time_dequantize(session: Session, record: Record) -> None:
    """Time the kernels that dequantize, by the share of bandwidth they reach."""
    from gpu_timing import KINDS, NF4, limits_of, num_copies, random_nf4, random_weight, time_runs

    plan, limits, rows = session.plan, limits_of(session), record.setdefault("rows", [])
    for shape in plan.few:
        makers = {kind.name: partial(random_weight, kind, shape.n, shape.k, plan.dtype, plan.device) for kind in KINDS}
        makers |= {name: partial(random_nf4, nested, shape.n, shape.k, plan.device) for name, nested in NF4.items()}
        for name, make in makers.items():
            if session.late(f"{name} {shape.label}"):
                continue
            weight = make()
            copies = [weight, *(weight.clone() for _ in range(num_copies(weight.nbytes, plan.rotate) - 1))]
            calls = [partial(copy.dequantize_by_kernel, plan.dtype) for copy in copies]
            timing = time_runs(session.timer, {"": (session.timer.prepare(calls), len(calls))}, plan.rounds)[""]
            moved = weight.nbytes + 2 * shape.k * shape.n
            row = {"kernel": name, "shape": shape.name, "median_s": timing.median, "p10_s": timing.low, "p90_s": timing.high}
            rows.append(row | {"of_bandwidth": limits.seconds(moved) / timing.median})
            console.print(
                f"{name} {shape.label}: {timing.median * 1e6:.1f} µs, {rows[-1]['of_bandwidth']:.0%} of bandwidth",
                highlight=False,
            )


# ----------------------------------------------------------------------------------------------------------------- the run


def summarise(records: Mapping[str, Record]) -> None:
    """Print what the end of the output must show: the overview, the proposal, targets, what was skipped and what failed."""
    from gpu_report import print_kv_cache, print_overview, print_training, print_verdicts
    from gpu_tiles import print_proposal

    console.rule("summary")
    for kernel in ("w4 g128", "w8 g128"):
        print_overview(records.get("time", {}).get("rows", []), kernel)
    print_training(records.get("training", {}).get("rows", []))
    print_kv_cache(records.get("kv_cache", {}).get("rows", []))
    print_proposal(records.get("tiles", {}))
    print_verdicts(records)
    for name, record in records.items():
        skipped = record.get("skipped", [])
        if skipped:
            shown = "; ".join(skipped[:6]) + ("; ..." if len(skipped) > 6 else "")
            console.print(f"skipped in {name} ({len(skipped)}): {shown}", highlight=False, markup=False, soft_wrap=True)
    for name, record in records.items():
        if "error" in record:
            console.print(f"FAILED {name}:\n{record['error'][-1500:]}", highlight=False, markup=False, soft_wrap=True)


def versions() -> dict[str, str]:
    """Return versions of what decides a result, and the commit if there is one."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("torch", "triton", "transformers")}
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found | {"commit": done.stdout.strip() or "unknown"}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, numbers of tokens and tiles")
    parser.add_argument("--only", metavar="STEP[,STEP]", default="", help="run these steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--minutes", type=float, help="after which the rest is skipped; default 8, with --quick 3")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for results; default: $OUT, or benchmarks/results")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the tables of an earlier run, and do nothing else")
    return parser.parse_args(arguments)


def out_folder(options: argparse.Namespace) -> Path:
    """Return where results go; those of a dry run mean nothing and go to a temporary folder unless told otherwise."""
    if options.out is not None:
        return options.out
    if options.dry_run:
        return Path(tempfile.mkdtemp(prefix="gpu_session-"))
    return Path(os.environ["OUT"]) if os.environ.get("OUT") else common.RESULTS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the steps that the options name."""
    options = parse(arguments)
    if options.report is not None:
        summarise(json.loads(options.report.read_text(encoding="utf-8"))["steps"])
        return
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --dry-run goes through every step without one")
    if options.dry_run and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    from gpu_timing import GpuTimer, PlainTimer, plan_for

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    steps = all_steps()
    chosen = [name for name in options.only.split(",") if name]
    if unknown := set(chosen) - set(steps):
        raise SystemExit(f"no step {', '.join(sorted(unknown))}; there are {', '.join(steps)}")
    plan = plan_for(quick=options.quick, dry=options.dry_run)
    minutes = options.minutes or MINUTES[options.quick]
    common.RESULTS = out_folder(options)
    common.RESULTS.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(60 * (minutes + 1.5), exit=True)  # a kernel that never ends
    about = {"versions": versions(), "options": {"quick": options.quick, "only": chosen, "minutes": minutes}}
    name = "gpu_session_dry_run" if options.dry_run else "gpu_session"
    session = Session(
        plan,
        PlainTimer() if plan.device == "cpu" else GpuTimer(),
        minutes,
        lambda records: _write(name, about | {"steps": records}, plan.device),
        workers=Workers(plan.processes),
    )
    console.print(about, highlight=False)
    succeeded = session.run({name: step for name, step in steps.items() if not chosen or name in chosen})
    faulthandler.cancel_dump_traceback_later()
    summarise(session.records)
    console.print(f"everything measured is in {common.RESULTS}", highlight=False, soft_wrap=True)
    raise SystemExit(0 if succeeded else 1)


def _write(name: str, payload: dict[str, Any], device: str) -> None:
    with console.capture():  # which file is said once, not after every step
        common.save_results(name, payload, device)


if __name__ == "__main__":
    main()
