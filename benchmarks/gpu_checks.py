"""The steps of a GPU session that check kernels: tests, results against float64, and first calls.

Checks of kernels run in several processes beside each other: compiling is most of their time, and an illegal access takes down
one process only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from common import console
from gpu_timing import KINDS, NF4, Kind, Plan, Weight, random_nf4, random_tokens, random_weight
from torch import Tensor

from torchq.kernels import gptq, gptq_triton, words_triton
from torchq.kernels.dispatch import Tile, tile_for
from torchq.scheme import QuantArgs

if TYPE_CHECKING:
    from gpu_session import Session

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MARK = "mark." + "gpu"
TEST_SECONDS = 120.0


def environment(**changes: str) -> dict[str, str]:
    """Return the variables for a process that imports torchq and what is in this folder."""
    paths = [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **changes}


# ------------------------------------------------------------------------------------------------------------------- tests


def run_tests(session: Session, record: dict[str, Any]) -> None:
    """Run the tests marked gpu, in a process with a time limit of its own."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]
    files = [path for path in files if path.stem == "test_wna16_triton"] if session.plan.dry else files
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None and not session.plan.dry:
        command += ["-n", "8"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        limit = min(TEST_SECONDS, max(60.0, session.seconds_left()))
        try:
            command += [f"--junitxml={report}", *map(str, files)]
            done = subprocess.run(command, cwd=ROOT, env=environment(), timeout=limit, check=False)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"tests took more than {limit:.0f} s") from error
        record |= {"exit_status": done.returncode, **(_read_report(report) if report.exists() else {})}
    if done.returncode:
        raise AssertionError(f"pytest ended with status {done.returncode}: {', '.join(record.get('failures', {}))}")


def _read_report(path: Path) -> dict[str, Any]:
    cases = list(ElementTree.parse(path).iter("testcase"))
    failures = {}
    for case in cases:
        for bad in (*case.iter("failure"), *case.iter("error")):
            failures[f"{case.get('classname')}::{case.get('name')}"] = (bad.get("message") or "")[:500]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"cases": len(cases), "skipped_cases": skipped, "failures": failures}


# ------------------------------------------------------------------------------------------------------------- correctness


@dataclass(frozen=True)
class Check:
    """A check for a worker: a function of this module, and what it takes."""

    function: str
    plan: Plan
    dtype: torch.dtype
    kind: Kind | None = None


def check_kernels(session: Session, record: dict[str, Any]) -> None:
    """Compare each kernel with float64 of the exact weight, in every dtype, and beyond 2^31 elements."""
    plan, results = session.plan, record.setdefault("results", [])
    checks = [Check("check_kind", plan, dtype, kind) for dtype in plan.dtypes for kind in KINDS]
    checks += [Check(name, plan, plan.dtype) for name in ("check_nf4", "far_words", "far_rows", "far_results", "far_nf4")]
    outcomes = session.workers.run(run_check, checks, max(60.0, session.seconds_left()))
    for check, outcome in zip(checks, outcomes, strict=True):
        title = " ".join(filter(None, [check.function, check.kind and check.kind.name, str(check.dtype)[6:]]))
        if outcome.error is not None:
            results.append({"what": title, "ok": False, "error": outcome.error})
        elif isinstance(outcome.value, str):
            session.skip(f"{title}: {outcome.value}")
        else:
            results += [{"what": f"{title} {what}", **figures} for what, figures in outcome.value.items()]
            worst = max(figures["error"] / (figures["limit"] or 1.0) for figures in outcome.value.values())
            console.print(f"{title}: {len(outcome.value)} results, errors up to {worst:.2f} of what is allowed", highlight=False)
    wrong = [result for result in results if not result["ok"]]
    for result in wrong:
        console.print(f"WRONG {result}", highlight=False, markup=False, soft_wrap=True)
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(results)} results are wrong, first {wrong[0]['what']}: {wrong[0]['error']}")


def run_check(check: Check) -> dict[str, Any] | str:
    """Run a check in a worker: what was found by what was checked, or why it was not."""
    function: Callable[[Check], dict[str, Any] | str] = globals()[check.function]
    try:
        with torch.no_grad():
            return function(check)
    finally:
        if check.plan.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def compare(y: Tensor, x: Tensor, exact: Tensor) -> dict[str, Any]:
    """Return y's error against x times the exact weight [N, K] in float64, and the limit: what plain PyTorch is off by."""
    expected = x.double() @ exact.t()
    eager = F.linear(x, exact.to(x.dtype)).double()
    error = float((y.double() - expected).abs().max())
    tiny = float(expected.abs().max()) * torch.finfo(x.dtype).eps / 2
    limit = float((eager - expected).abs().max()) + tiny
    return {"error": error, "limit": limit, "ok": error <= limit}


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN, so that what a kernel leaves out shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def check_kind(check: Check) -> dict[str, Any]:
    """All sizes of the table, odd and even shapes, and dequantizing, which is bit for bit."""
    kind, plan, dtype, found = check.kind, check.plan, check.dtype, {}
    assert kind is not None
    shapes = [(99, 9 * kind.group_size or 1000), (4096, 4096)]  # the first one ends within a block if groups are small
    tokens = (1, 7, 16, 17, 64, 65, 128, 300, 1024)
    if plan.dry:
        shapes, tokens = [(33, 3 * kind.group_size or 300)], (1, 17, 200)
    for n, k in shapes:
        weight = random_weight(kind, n, k, dtype, plan.device)
        exact = weight.dequantize(torch.float64)
        for m in tokens:
            x = random_tokens(m, k, dtype, plan.device)
            with poisoned():
                y = weight.multiply(x)
            found[f"{n}x{k} M={m}"] = compare(y, x, exact)
        with poisoned():
            dense = weight.dequantize_by_kernel(dtype)
        found[f"{n}x{k} dequantize"] = _compare_bits(dense, weight.dequantize(dtype))
    return found


def check_nf4(check: Check) -> dict[str, Any]:
    """Weights of odd and even shapes, with absmax in float32 and in 8 bits, into all dtypes: bit for bit."""
    found = {}
    for n, k in [(33, 301)] if check.plan.dry else [(99, 1001), (99, 1008), (4096, 4096)]:
        for name, nested in NF4.items():
            weight = random_nf4(nested, n, k, check.plan.device)
            for dtype in (*check.plan.dtypes, torch.float32):
                expected = weight.dequantize(dtype)
                for what, rows in (("all rows", slice(None)), ("some rows", slice(7, 30))):
                    with poisoned():
                        dense = weight.dequantize_by_kernel(dtype, rows)
                    found[f"{name} {n}x{k} {str(dtype)[6:]}, {what}"] = _compare_bits(dense, expected[rows])
    return found


def _compare_bits(dense: Tensor, expected: Tensor) -> dict[str, Any]:
    different = int((dense != expected).sum())
    return {"error": float(different), "limit": 0.0, "ok": different == 0}


def _without_memory(check: Check, gigabytes: float) -> str | None:
    if check.plan.device != "cuda" or (free := torch.cuda.mem_get_info()[0] / 1e9) > gigabytes:
        return None
    return f"needs {gigabytes:.0f} GB, {free:.0f} are free"


def _tiled(weight: Weight, x: Tensor, splits: int) -> Tensor:
    kind = words_triton.kind_of(weight.num_bits, weight.group_size, weight.zero_point is not None)
    tile = tile_for(x.device, kind, min(x.shape[0], 64)) or Tile(16, 64)
    with poisoned():
        arguments = (x, *weight.tensors, None, weight.num_bits, weight.group_size, tile, splits)
        return words_triton.matmul_words(*arguments, fp8=weight.fp8)


def far_words(check: Check) -> dict[str, Any] | str:
    """More words than ``plan.far``; dequantized, that is many more weights."""
    if missing := _without_memory(check, 60):
        return missing
    plan, kind = check.plan, KINDS[0]
    blocks = 4 if plan.dry else 512
    n, k = plan.far // (16 * blocks) + 128, blocks * words_triton.block_size(kind.num_bits)
    weight = random_weight(kind, n, k, check.dtype, plan.device)
    assert weight.words.numel() > plan.far
    x, found = random_tokens(3, k, check.dtype, plan.device), {}
    ends = {"first": slice(0, 64), "last": slice(n - 64, n)}
    results = {"op": weight.multiply(x)} | {f"splits {splits}": _tiled(weight, x, splits) for splits in (1, 4)}
    dense = weight.dequantize_by_kernel(check.dtype)
    part = weight.dequantize_by_kernel(check.dtype, ends["last"])
    for name, rows in ends.items():
        exact, expected = weight.dequantize(torch.float64, rows), weight.dequantize(check.dtype, rows)
        found |= {f"{what}, {name} rows": compare(y[:, rows], x, exact) for what, y in results.items()}
        for what, weights in (("all", dense[rows]), ("stretch", part if name == "last" else None)):
            if weights is not None:
                found[f"dequantize {what}, {name} rows"] = _compare_bits(weights, expected)
    return found


def far_rows(check: Check) -> dict[str, Any] | str:
    """Activations more than ``plan.far`` elements apart, with a stride that 32 bits still hold."""
    if missing := _without_memory(check, 6):
        return missing
    plan, stride = check.plan, check.plan.far // 2 + 64
    weight = random_weight(KINDS[0], 96, 256, check.dtype, plan.device)
    x = torch.empty(2 * stride + 256, dtype=check.dtype, device=plan.device).as_strided((3, 256), (stride, 1))
    x.copy_(random_tokens(3, 256, check.dtype, plan.device))
    exact = weight.dequantize(torch.float64)
    return {f"splits {splits}": compare(_tiled(weight, x, splits), x, exact) for splits in (1, 2)}


def far_results(check: Check) -> dict[str, Any] | str:
    """More results than ``plan.far``, and more parts of them."""
    if missing := _without_memory(check, 40):
        return missing
    plan, n = check.plan, 96 if check.plan.dry else (1 << 18) + 128
    m, k = plan.far // n + 8, 256
    weight = random_weight(KINDS[0], n, k, check.dtype, plan.device)
    x, rows, found = random_tokens(m, k, check.dtype, plan.device), slice(n - 64, n), {}
    exact = weight.dequantize(torch.float64, rows)
    for name, multiply in {"splits 1": 1, "splits 2": 2, "op": None}.items():
        y = weight.multiply(x) if multiply is None else _tiled(weight, x, multiply)
        for end, tokens in (("first", slice(0, 8)), ("last", slice(m - 8, m))):
            found[f"{name}, {end} tokens"] = compare(y[tokens, rows], x[tokens], exact)
        del y
    return found


def far_nf4(check: Check) -> dict[str, Any] | str:
    """More dequantized values than ``plan.far``."""
    if missing := _without_memory(check, 12):
        return missing
    k, found = 256 * 64, {}
    n = check.plan.far // k + 8
    for name, nested in NF4.items():
        weight = random_nf4(nested, n, k, check.plan.device)
        dense = weight.dequantize_by_kernel(check.dtype)
        for end, rows in (("first", slice(0, 2)), ("last", slice(n - 2, n))):
            expected = weight.dequantize(check.dtype, rows)
            found[f"{name} all, {end} rows"] = _compare_bits(dense[rows], expected)
            found[f"{name} stretch, {end} rows"] = _compare_bits(weight.dequantize_by_kernel(check.dtype, rows), expected)
        del dense
    return found


# ------------------------------------------------------------------------------------------------------------- first calls


@triton.jit
def _nothing(pointer, SIZE: tl.constexpr):
    tl.store(pointer + tl.arange(0, SIZE), 0.0)


def time_first_calls(session: Session, record: dict[str, Any]) -> None:
    """Time the first call of each kernel in a new process: with nothing compiled, and with Triton's cache on disk."""
    code = f"import gpu_checks; gpu_checks.print_first_calls({session.plan.device!r}, {str(session.plan.dtype)[6:]!r})"
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold",) if session.plan.dry else ("cold", "cached"):
            if session.late(f"first calls, {name}"):
                continue
            command = [sys.executable, "-c", code]
            variables = environment(TRITON_CACHE_DIR=cache)
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=90, check=False)
            if done.returncode:
                raise RuntimeError(f"first calls, {name}: exit status {done.returncode}: {done.stderr[-2000:]}")
            record[name] = json.loads(done.stdout.splitlines()[-1])
            record[f"{name}_startup"] = record[name].pop("startup")
            texts = (f"{what} {seconds:.2f}" for what, seconds in record[name].items())
            console.print(f"{name}: Triton's own start {record[f'{name}_startup']:.2f} s; {', '.join(texts)} s", highlight=False)


def gptq_block(n: int, device: str, zeros: bool = False) -> gptq.Block:
    """Return 128 random columns of GPTQ, of n rows."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    W = randn(128, n)
    z = torch.randint(-7, 8, (4, n), generator=generator, device=device).float() if zeros else None
    scales, groups = 0.2 + 0.1 * randn(4, n).abs(), torch.arange(128) // 32
    V, U = W + 0.1 * randn(128, n), 0.05 * randn(128, 128)
    return gptq.Block(V, W, U, scales, z, groups, QuantArgs(4), torch.empty_like(W), torch.empty_like(W))


def print_first_calls(device: str, dtype_name: str) -> None:
    """Print seconds of first calls as JSON; CUDA, the matmul library and Triton's own start come before."""
    dtype, found = getattr(torch, dtype_name), {}
    started = torch.randn(64, 64, device=device) @ torch.randn(64, 64, device=device)
    _timed(found, "startup", lambda: _nothing[(1,)](started, SIZE=64), device)
    n, k = (64, 256) if device == "cpu" else (4096, 4096)
    for kind in KINDS:
        weight = random_weight(kind, n, k, dtype, device)
        for m in (1, 64) if kind.everywhere else (1,):
            x = random_tokens(m, k, dtype, device)
            _timed(found, f"{kind.name} M={m}", partial(weight.multiply, x), device)
        if kind.everywhere:
            _timed(found, f"dequantize {kind.name}", partial(weight.dequantize_by_kernel, dtype), device)
    for name, nested in NF4.items():
        _timed(found, f"dequantize {name}", partial(random_nf4(nested, n, k, device).dequantize_by_kernel, dtype), device)
    block = gptq_block(n, device)
    _timed(found, "gptq", partial(gptq_triton.launch, block), device)
    print(json.dumps(found))


def _timed(found: dict[str, float], name: str, call: Callable[[], Any], device: str) -> None:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    found[name] = time.perf_counter() - started
