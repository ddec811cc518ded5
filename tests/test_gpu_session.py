"""The GPU session's bookkeeping, limits, targets and proposals; and, marked slow, every step of it in a dry run."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from torchq.kernels import dispatch, nf4, words_triton
from torchq.kernels.dispatch import Tile

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STEPS = ["limits", "tests", "correct", "first_call", "time", "dequantize", "capture", "model", "calibration", "training"]
STEPS += ["kv_cache", "tiles"]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


# ----------------------------------------------------------------------------------------------------------------- session


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def new_session(**changes: Any) -> Any:
    settings = {"plan": None, "timer": None, "minutes": 1.0, "write": lambda records: None, "clock": Clock()}
    return module("gpu_session").Session(**(settings | changes))


def step(function: Any, share: float = 0.5) -> Any:
    return module("gpu_session").Step(function, share)


def test_a_failing_step_is_on_record_and_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    def bad(session: Any, record: dict[str, Any]) -> None:
        """Fail."""
        record["half"] = 1
        raise ValueError("what went wrong")

    def good(session: Any, record: dict[str, Any]) -> None:
        """Succeed."""
        record["found"] = 2

    session = new_session()
    assert session.run({"bad": step(bad), "good": step(good)}) is False
    assert session.records["bad"]["half"] == 1 and "in bad" in session.records["bad"]["error"]
    assert session.records["good"]["found"] == 2 and "error" not in session.records["good"]
    assert session.failures() == {"bad": "ValueError: what went wrong"}
    assert "bad FAILED: ValueError: what went wrong" in capsys.readouterr().out


def test_records_are_written_after_every_step() -> None:
    written = []

    def good(session: Any, record: dict[str, Any]) -> None:
        """Succeed."""
        record["found"] = len(written)

    session = new_session(write=lambda records: written.append(json.dumps(records)))
    assert session.run({"one": step(good), "two": step(good)}) is True
    one, two = map(json.loads, written)
    assert set(one) == {"one"} and set(two) == {"one", "two"} and two["two"]["found"] == 1


def test_what_there_is_no_time_for_is_skipped_and_listed() -> None:
    clock, done = Clock(), []

    def parts(session: Any, record: dict[str, Any]) -> None:
        """Take 10 seconds for each part."""
        for part in range(5):
            if not session.late(f"part {part}"):
                done.append(part)
                clock.now += 10

    session = new_session(clock=clock)
    assert session.run({"first": step(parts), "second": step(parts), "third": step(parts, 0.0)}) is True
    assert done == [0, 1, 2, 0, 1, 2]  # the first step leaves the second one its half of the minute
    assert session.records["first"]["skipped"] == ["part 3", "part 4"]
    assert session.records["second"]["skipped"] == ["part 3", "part 4"]
    assert session.records["third"]["skipped"] == ["the whole step"]


def test_time_that_a_step_leaves_is_for_the_next() -> None:
    left = []
    session = new_session()
    session.run({name: step(lambda session, record: left.append(session.seconds_left()), 1.0) for name in "abcd"})
    assert left == [15, 30, 45, 60]


def test_workers_run_again_what_a_dying_one_took_along(monkeypatch: pytest.MonkeyPatch) -> None:
    session, ran = module("gpu_session"), []

    def run(self: Any, function: Any, jobs: list[int], seconds: float) -> list[Any]:
        ran.append(list(jobs))
        dead = False
        outcomes = []
        for job in jobs:
            dead = dead or job == 2
            outcomes.append(session.Outcome(None, session.LOST) if dead else session.Outcome(job, None))
        return outcomes

    monkeypatch.setattr(session.Workers, "_run", run)
    outcomes = session.Workers(1).run(None, [0, 1, 2, 3, 4])
    assert ran == [[0, 1, 2, 3, 4], [4, 3, 2], [2]]
    assert [outcome.value for outcome in outcomes] == [0, 1, None, 3, 4] and outcomes[2].error == session.LOST


def test_an_error_in_a_worker_is_the_outcome() -> None:
    session = module("gpu_session")
    assert session.guarded(lambda job: job + 1, 1) == session.Outcome(2, None)
    outcome = session.guarded(lambda job: job / 0, 1)
    assert outcome.value is None and outcome.error == "ZeroDivisionError: division by zero"


def test_steps_have_titles_and_share_the_time() -> None:
    steps = module("gpu_session").all_steps()
    assert list(steps) == STEPS
    assert all(step.function.__doc__ for step in steps.values())
    assert sum(step.share for step in steps.values()) == pytest.approx(1)


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    session = module("gpu_session")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert session.out_folder(session.parse([])) == tmp_path
    assert session.out_folder(session.parse(["--out", "here"])) == Path("here")
    assert session.out_folder(session.parse(["--dry-run"])) not in (tmp_path, session.common.RESULTS)
    monkeypatch.delenv("OUT")
    assert session.out_folder(session.parse([])) == session.common.RESULTS
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="no GPU here"):
            session.main([])
        with pytest.raises(SystemExit, match="no step nonsense; there are limits, tests"):
            session.main(["--dry-run", "--only", "limits,nonsense"])


# --------------------------------------------------------------------------------------------------------- limits and targets


def timing(microseconds: float) -> Any:
    return module("common").Timing(microseconds * 1e-6, microseconds * 0.9e-6, microseconds * 1.2e-6, 50)


def test_limits() -> None:
    limits = module("gpu_timing").Limits(4e12, 8e14)
    assert limits.seconds(8e6) == pytest.approx(2e-6)
    assert limits.seconds(8e6, 8e9) == pytest.approx(10e-6)  # whichever takes longer
    assert limits.seconds(8e6, 8e8) == pytest.approx(2e-6)


def roofline_row(name: str = "w4 g128", m: int = 1, microseconds: float = 20.0, shape: Any = None) -> dict[str, Any]:
    shape = shape or module("gpu_timing").GATE_UP_8B
    limits = module("gpu_timing").Limits(4e12, 8e14)
    nbytes = shape.n * shape.k // 2 + shape.n * shape.k // 64  # 4 bits, and 16 for 128
    return module("gpu_report").roofline_row(name, shape, m, nbytes, timing(microseconds), timing(60.0), limits)


def test_a_row_of_the_roofline() -> None:
    row = roofline_row()
    moved = 4096 * 28672 // 2 + 4096 * 28672 // 64 + 2 * (4096 + 28672)
    assert row["limit_s"] == pytest.approx(moved / 4e12) and row["of_limit"] == pytest.approx(moved / 4e12 / 20e-6)
    assert row["of_bandwidth"] == row["of_limit"] and row["speedup"] == pytest.approx(3)
    assert row["gbytes_per_second"] == pytest.approx(moved / 20e-6 / 1e9)
    many = roofline_row(m=1024, microseconds=400)
    assert many["limit_s"] == pytest.approx(2 * 1024 * 4096 * 28672 / 8e14)
    assert many["of_bandwidth"] < many["of_limit"] < 1


def test_verdicts() -> None:
    report, timing = module("gpu_report"), module("gpu_timing")
    assert [verdict.met for verdict in report.verdicts({})] == [None] * 8
    rows = [roofline_row(m=1), roofline_row(m=16, microseconds=20.3), roofline_row(m=64, microseconds=45)]
    rows += [roofline_row("w8 g128", m=1, microseconds=30), roofline_row("w8 g128", 64, 50, timing.QKV_8B)]
    rows += [roofline_row("tinygemm", microseconds=1000), roofline_row("F.linear", microseconds=1000)]
    records = {"time": {"rows": rows}, "first_call": {"cold": {"a": 0.3, "b": 0.8}}}
    records["dequantize"] = {"rows": [{"kernel": "w4 g128", "shape": "8B down", "of_bandwidth": 0.8}]}
    met = [verdict.met for verdict in report.verdicts(records)]
    assert met == [True, True, False, True, True, True, True, True]  # 1.33 times F.linear at M = 64
    rows.append(roofline_row("w2 g64", m=512, microseconds=70))
    records["first_call"]["cold"]["c"] = 1.2
    verdicts = report.verdicts(records)
    assert [verdict.met for verdict in verdicts] == [True, True, False, True, True, False, True, False]
    assert verdicts[5].line == (
        "FAIL  all kinds, any M, x F.linear >= 0.97: worst 0.86 at w2 g64 8B gate_up M=512; 1 of 6 miss it"
    )
    assert "slowest 1.20 s: c" in verdicts[7].line and report.verdicts({})[0].line.startswith("  --  w4 g128 from")


def test_the_tables_print(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    timing, report = module("gpu_timing"), module("gpu_report")
    rows = [roofline_row(m=1), roofline_row(m=16, microseconds=21)]
    report.print_roofline(timing.GATE_UP_8B, rows)
    printed = capsys.readouterr().out
    assert "8B gate_up 4096x28672" in printed and "18.0–24.0" in printed and "3.00x" in printed
    steps = {"time": {"rows": rows, "skipped": ["8B down"]}, "tiles": {"error": "Traceback\nValueError: no"}}
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"steps": steps}))
    module("gpu_session").main(["--report", str(file)])
    printed = capsys.readouterr().out
    assert "w4 g128: times F.linear" in printed and "skipped in time (1): 8B down" in printed and "ValueError: no" in printed


# --------------------------------------------------------------------------------------------------------------- proposals


def trials(m: int, seconds: dict[Tile | None, float], kind: str = "w4", splits: int = 1, formula: bool = True) -> Iterator[dict]:
    for index, shape in enumerate(("8B gate_up", "8B down")):
        for tile, value in seconds.items():
            yield {
                "kind": kind, "m": m, "shape": shape, "k": 4096, "n": 4096, "splits": splits, "formula": formula, "asm": False,
                "tile": None if tile is None else [tile.block_m, tile.block_n, tile.num_warps, tile.num_stages],
                "seconds": value * (1 + index),
            }  # fmt: skip


SMALL, WIDE, TALL = Tile(16, 32, 2), Tile(16, 128), Tile(64, 128, 8, 3)


def measured() -> list[dict[str, Any]]:
    rows = [*trials(1, {SMALL: 10, WIDE: 11}), *trials(16, {SMALL: 10.1, WIDE: 10})]
    rows += [*trials(64, {WIDE: 30, TALL: 20, None: 70}), *trials(128, {TALL: 60, None: 61})]
    return [*rows, *trials(256, {TALL: 140, None: 100}), *trials(512, {TALL: 100, None: 130})]


def test_the_table_ends_where_dequantizing_wins() -> None:
    tiles, rows = module("gpu_tiles"), measured()
    assert tiles.best_tile(rows, "w4", 16) == WIDE and tiles.best_tile(rows, "w4", 2) is None
    # at 16 the tile of the row before is slower by less than 2 %; what wins again beyond the threshold does not count
    assert tiles.propose_rows(rows, "w4") == [(16, SMALL), (128, TALL)]
    assert tiles.crossover(rows, "w4") == (128, 256)
    assert tiles.propose_rows(rows, "w8") == [] and tiles.crossover(rows, "w8") == (0, None)


def test_a_tile_that_failed_at_one_shape_is_not_proposed() -> None:
    rows = [row for row in measured() if row["tile"] != [16, 32, 2, 4] or row["shape"] == "8B down"]
    assert module("gpu_tiles").propose_rows(rows, "w4") == [(16, WIDE), (128, TALL)]


def test_between_the_threshold_and_the_next_size_more_is_measured() -> None:
    tiles, timing = module("gpu_tiles"), module("gpu_timing")
    plan = timing.plan_for(dry=True)
    found = tiles._between(plan, tiles.KINDS[0], measured())
    assert sorted({trial.m for trial in found}) == [160, 192, 224]
    assert {trial.tile for trial in found} == {TALL, None} and {trial.shape for trial in found} == set(plan.tile_shapes)
    assert tiles._between(plan, tiles.KINDS[1], measured()) == []


def test_the_proposed_entry_can_be_pasted() -> None:
    tiles = module("gpu_tiles")
    entry = {"w4": [(16, SMALL), (128, TALL)], "w8": [(64, WIDE)]}
    code = tiles.table_code("sm_90", entry)
    assert eval("{" + code + "}", {"Tile": Tile}) == {"sm_90": {kind: tuple(rows) for kind, rows in entry.items()}}
    assert "(16, Tile(16, 32, 2))" in code and "(128, Tile(64, 128, 8, 3))" in code and "(64, Tile(16, 128))" in code


def test_the_report_keeps_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    tiles, record = module("gpu_tiles"), {}
    rows = [*measured(), *trials(1, {WIDE: 10}, "w4_fine")]
    tiles.report(rows, {"w4 M=1": "OutOfResources: shared memory"}, module("gpu_timing").plan_for(dry=True), record)
    gpu = dispatch.gpu_of(torch.device("cpu"))
    assert gpu is None
    entry = eval("{" + record["table"] + "}", {"Tile": Tile})["sm_80"]
    assert entry["w4"] == ((16, SMALL), (128, TALL)) and entry["w8"] == dispatch.TABLE["sm_80"]["w8"]
    printed = capsys.readouterr().out
    assert "w4: tiles win up to 128 tokens, dequantizing wins at 256" in printed and "w8: no tile was timed" in printed
    assert "failed: w4 M=1: OutOfResources" in printed
    assert entry["w4_fine"] == ((1, WIDE),)
    tiles.print_proposal(json.loads(json.dumps(record)))
    assert record["table"] in capsys.readouterr().out


def test_programs_per_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = module("gpu_tiles")
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: dispatch.Gpu("sm_90", 128))
    rows = []  # 32 programs at each shape: 2 for each processor need 8 splits
    for splits, seconds in ((2, 30), (4, 20), (8, 15), (16, 12), (32, 14)):
        rows += trials(1, {WIDE: seconds}, splits=splits, formula=splits == 8)
    ratios = tiles.propose_programs(rows, torch.device("cuda"))
    assert min(ratios, key=lambda aim: ratios[aim]) == 4 and ratios[4] == pytest.approx(1)
    assert ratios[2] == pytest.approx(15 / 12) and ratios[1] == pytest.approx(20 / 12)
    assert dispatch._PROGRAMS_PER_PROCESSOR == 2


def test_first_tiles() -> None:
    tiles = module("gpu_tiles")
    table_tile = Tile(16, 128, 4, 5)
    found = tiles.first_tiles(1, table_tile, quick=False)
    assert found[0] == table_tile and len(found) == len(set(found)) and {tile.block_m for tile in found} == {16, 8}
    assert {tile.block_m for tile in tiles.first_tiles(64, None, quick=False)} == {64, 32}
    assert {tile.block_m for tile in tiles.first_tiles(1024, None, quick=False)} == {128, 64}
    quick = tiles.first_tiles(16, None, quick=True)
    assert {tile.block_m for tile in quick} == {16} and len(quick) < len(tiles.first_tiles(16, None, quick=False))


# ------------------------------------------------------------------------------------------------------------------ timing


def test_time_is_per_call_and_runs_alternate() -> None:
    timing, ran = module("gpu_timing"), []

    class Timer:
        def sample(self, run: Any) -> Any:
            run()
            return lambda: 6.0

        def wait(self) -> None:
            ran.append("wait")

    runs = {"a": (lambda: ran.append("a"), 2), "b": (lambda: ran.append("b"), 3)}
    found = timing.time_runs(Timer(), runs, 5)
    assert found["a"].median == 3 and found["b"].median == 2 and found["a"].rounds == 5
    assert ran[:3] == ["a", "b", "wait"] and all(set(ran[i : i + 2]) == {"a", "b"} for i in range(3, 13, 2))


def test_graphs_are_captured_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA: in which order what is called."""
    timing, log = module("gpu_timing"), []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def elapsed_time(self, end: Any) -> float:
            return 3.0

    graph = SimpleNamespace(
        capture_begin=lambda: log.append("begin"), capture_end=lambda: log.append("end"), replay=lambda: log.append("replay")
    )
    fakes = {"Stream": Stream, "Event": Event, "CUDAGraph": lambda: graph, "current_stream": Stream}
    fakes |= {"stream": lambda stream: nullcontext(), "synchronize": lambda: log.append("synchronize")}
    fakes |= {"memory_reserved": lambda: 40 << 30, "memory_allocated": lambda: 0, "empty_cache": lambda: log.append("empty")}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    timer, calls = timing.GpuTimer(), [lambda: log.append("first"), lambda: log.append("second")]
    run = timer.prepare(calls)
    assert log == ["empty", "first", "first", "synchronize", "begin", "first", "second", "end"]
    log.clear()
    assert timer.sample(run)() == 3e-3 and log == ["record", "replay", "record"]
    log.clear()
    timer.prepare(calls, graph=False)()
    assert log == ["empty", "first", "first", "synchronize", "first", "second"]


def test_the_plans_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = module("gpu_timing")
    for cache, rotate in ((60 << 20, 240 << 20), (40 << 20, 200 << 20)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i, cache=cache: SimpleNamespace(L2_cache_size=cache))
        plan, quick = timing.plan_for(), timing.plan_for(quick=True)
        assert plan.rotate == rotate and plan.rounds >= 50 and plan.launches >= 20 and plan.far == 2**31
        assert plan.tokens == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) and len(plan.shapes) == 7
        assert set(quick.tokens) <= set(plan.tokens) and set(quick.shapes) < set(plan.shapes)
        assert plan.device == "cuda" and plan.dtypes == (torch.float16, torch.bfloat16) and not plan.dry
    assert timing.num_copies(30 << 20, 240 << 20) * 30 > 240 and timing.num_copies(900 << 20, 240 << 20) == 1


@pytest.mark.parametrize("size", [(33, 1000), (16, 1152)], ids=str)
def test_random_weights_are_what_the_layout_says(size: tuple[int, int]) -> None:
    timing, (n, k) = module("gpu_timing"), size
    for kind in timing.KINDS:
        if kind.group_size and k % kind.group_size:
            continue
        weight = timing.random_weight(kind, n, k, torch.float16, "cpu")
        codes = words_triton.unpack_words(weight.words, kind.num_bits, k)
        assert torch.equal(words_triton.pack_words(codes, kind.num_bits), weight.words)
        assert torch.equal(weight.dequantize(torch.float16), weight.dequantize(torch.float64).half())
        assert torch.equal(weight.dequantize(torch.float64, slice(3, 9)), weight.dequantize(torch.float64)[3:9])
        copy = weight.clone()
        assert torch.equal(copy.words, weight.words) and copy.words.data_ptr() != weight.words.data_ptr()
        assert (weight.zero_point is not None) == kind.has_zeros and weight.nbytes >= n * k * kind.num_bits // 8


def test_random_nf4_weights_are_what_the_op_takes() -> None:
    timing = module("gpu_timing")
    for nested in timing.NF4.values():
        for n, k in ((5, 33), (4, 16384)):
            weight = timing.random_nf4(nested, n, k, "cpu")
            dense = nf4.dequantize_nf4(*weight.tensors, n, k, 64, torch.float32)
            assert torch.equal(weight.dequantize(torch.float32), dense) and 0.1 < dense.std() * k**0.5 < 2
            assert weight.nbytes == sum(tensor.nbytes for tensor in weight.tensors if tensor is not None)
            copy = weight.clone()
            assert torch.equal(copy.dequantize(torch.float32), dense) and copy.packed.data_ptr() != weight.packed.data_ptr()
        assert torch.equal(weight.dequantize(torch.float32, slice(1, 3)), dense[1:3])


def test_what_cannot_take_part_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders, timing = module("gpu_contenders"), module("gpu_timing")
    plan, notes = timing.plan_for(dry=True), {}

    def broken(shape: Any, plan: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(contenders, "PEERS", {"no_such_library": broken, "json": broken})
    lineup = contenders.Lineup(plan, notes)
    assert set(lineup.contenders(timing.TINY[1])) == {"F.linear", "w4 g128", "w8 g128", "fp8 row", "tinygemm"}
    assert notes == {"no_such_library": "not installed", "json": "failed: RuntimeError: no such kernel"}
    monkeypatch.setattr(contenders, "dense", broken)
    assert "F.linear" not in lineup.contenders(timing.TINY[0]) and lineup.broken == ["F.linear"]


def test_tinygemm_takes_its_arguments_so() -> None:
    """On a GPU, as far as shapes tell."""
    plan = replace(module("gpu_timing").plan_for(dry=True), device="cuda", dtype=torch.bfloat16)
    with FakeTensorMode():
        contender = module("gpu_contenders").tinygemm(module("gpu_timing").TINY[0], plan)
        y = contender.calls[0](torch.empty(3, 256, dtype=torch.bfloat16, device="cuda"))
    assert y.shape == (3, 64) and contender.nbytes == 64 * 256 // 2 + 2 * 64 * 2 * 2


def test_a_wrong_result_is_not_timed() -> None:
    timing = module("gpu_timing")
    x, weight = torch.randn(3, 64), torch.randn(8, 64)
    timing.check_close(x @ weight.t(), x, weight)
    for wrong in (1.02 * (x @ weight.t()), x @ weight.t() * float("nan")):
        with pytest.raises(ValueError, match="a wrong result is not timed"):
            timing.check_close(wrong, x, weight)


def test_errors_are_compared_with_what_plain_pytorch_is_off_by() -> None:
    checks = module("gpu_checks")
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).half()
    exact = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).double() / 16
    right = (x.double() @ exact.t()).half()
    assert checks.compare(right, x, exact)["ok"]
    assert not checks.compare(right * 1.01, x, exact)["ok"]
    assert not checks.compare(right * float("nan"), x, exact)["ok"]
    with checks.poisoned():
        assert torch.empty(3).isnan().all() and torch.zeros(1).new_empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_dry_run_goes_through_every_step(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command = [sys.executable, str(BENCHMARKS / "gpu_session.py"), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = json.loads(next(tmp_path.glob("*-gpu_session_dry_run.json")).read_text())["steps"]
    assert list(steps) == STEPS
    has_peft = importlib.util.find_spec("peft") is not None
    skipped = {name: record["skipped"] for name, record in steps.items() if "skipped" in record}
    assert skipped == ({} if has_peft else {"training": ["LoRA: peft is not installed"]})
    assert not any("error" in record for record in steps.values())
    if has_peft:
        rows = {(row["contender"], row["recompute"]): row for row in steps["training"]["rows"]}
        assert set(rows) >= {(name, recompute) for name in ("16 bits", "W4A16") for recompute in (False, True)}
        assert 3 * rows["W4A16", False]["weights"]["linear"] < rows["16 bits", False]["weights"]["linear"]
    assert all(result["ok"] for result in steps["correct"]["results"])
    assert {row["kernel"] for row in steps["time"]["rows"]} >= {"F.linear", "w4 g128", "w8 g128", "w2 g64"}
    assert {row["kernel"] for row in steps["dequantize"]["rows"]} >= {"w4 g128", "nf4", "nf4 nested"}
    rows = {(row["contender"], row["batch"]) for row in steps["kv_cache"]["rows"]}
    assert rows >= {(name, batch) for name in ("fp8", "int8", "int4", "16bit", "fp8, append", "SDPA") for batch in (1, 2)}
    assert max(steps["kv_cache"]["errors"].values()) < 0.002
    assert "Tile(" in steps["tiles"]["table"] and steps["model"]["compile_graphs"] <= 3
    assert "Proposed entry" in done.stdout and "Targets" in done.stdout
