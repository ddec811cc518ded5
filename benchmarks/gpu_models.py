"""The steps of a GPU session on graphs, a small model, and calibration."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from common import console
from gpu_checks import gptq_block
from gpu_timing import KINDS, Kind, Plan, random_tokens, random_weight, time_call
from torch import Tensor, nn

from torchq import QuantConfig, QuantLinear, fuse_siblings_, layouts, quantize_
from torchq.calibration.statistics import InputStatistics
from torchq.kernels import gptq, gptq_triton, words_triton
from torchq.kernels.dispatch import gpu_of, num_splits, tile_for
from torchq.testing import tiny_llama

if TYPE_CHECKING:
    from gpu_session import Session

# ------------------------------------------------------------------------------------------------------- graphs and models


def check_capture(session: Session, record: dict[str, Any]) -> None:
    """Capture the op in CUDA graphs, and compare replays on new tokens with plain calls."""
    plan, results = session.plan, record.setdefault("results", [])
    n, k = (64, 256) if plan.dry else (4096, 4096)
    for kind in KINDS[:3]:
        weight = random_weight(kind, n, k, plan.dtype, plan.device)
        for m in (1, 17) if plan.dry else (1, 16, 64, 300):
            splits = _describe_splits(plan, kind, m, n, k)
            x, new = (random_tokens(m, k, plan.dtype, plan.device, seed) for seed in (0, 1))
            y, expected = replayed(session, weight.multiply, x, new), weight.multiply(new)
            found = {"what": f"{kind.name} M={m}, {splits}", "equal": torch.equal(y, expected), "error": _relative(y, expected)}
            console.print(found, highlight=False)
            results.append(found)
    if not max(found["error"] for found in results) < 0.005:
        raise AssertionError("a replay differs from a plain call")


def _describe_splits(plan: Plan, kind: Kind, m: int, n: int, k: int) -> str:
    device = torch.device(plan.device)
    tile = tile_for(device, kind.in_table, m)
    if tile is None:
        return "dequantized"
    return f"{num_splits(device, tile, m, n, k // words_triton.block_size(kind.num_bits))} splits"


@torch.no_grad()
def replayed(session: Session, function: Callable[[Tensor], Tensor], x: Tensor, new: Tensor) -> Tensor:
    """Capture a function of x, and return what a replay makes of new values."""
    static, result = x.clone(), {}

    def call() -> None:
        result["y"] = function(static)

    replay = session.timer.prepare([call])
    static.copy_(new)
    replay()
    session.timer.wait()
    return result["y"]


def words_anywhere(plan: Plan) -> AbstractContextManager[Any]:
    """In a dry run, layers on the CPU hold words too."""

    def layout_for(form: layouts.Form, device: torch.device) -> layouts.Layout | None:
        return next((layout for layout in (layouts.WORDS, layouts.FP8_WORDS) if layout.can_hold(form, device)), None)

    return mock.patch.object(layouts, "layout_for", layout_for) if plan.dry else nullcontext()


def check_model(session: Session, record: dict[str, Any]) -> None:
    """Run a small packed model: against its dequantized twin, in a CUDA graph, compiled, and generating."""
    plan = session.plan
    sizes = {} if plan.dry else {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    with words_anywhere(plan), torch.no_grad():
        model = tiny_llama(dtype=plan.dtype, **sizes)
        twin = copy.deepcopy(model).to(plan.device)
        quantize_(model, QuantConfig("W4A16", group_size=32), progress=False)
        model.to(plan.device)
        for name, layer in model.named_modules():
            if isinstance(layer, QuantLinear):
                assert "weight_words" in layer._buffers, f"{name} is not in words"
                twin.get_submodule(name).weight.copy_(layer.dequantize())
        ids, new = (torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(i)).to(plan.device) for i in (0, 1))

        def logits(ids: Tensor) -> Tensor:
            return model(input_ids=ids, use_cache=False).logits

        record["error_to_twin"] = _relative(logits(new), twin(input_ids=new, use_cache=False).logits)
        for name, part in {
            "graph": lambda: _check_graph(session, logits, ids, new),
            "compile": lambda: _check_compile(plan, logits),
            "siblings": lambda: _check_siblings(session, model, ids, new),
            "generate": lambda: _check_generate(plan, model, twin, ids),
        }.items():
            if not session.late(f"model: {name}"):
                record |= part()
    console.print({name: value for name, value in record.items() if name != "clocks"}, highlight=False)
    errors = [record.get(f"{name}_error", 0) for name in ("graph", "compile", "siblings")]
    if not max(record["error_to_twin"], *errors) < 0.05:
        raise AssertionError(f"the model's results differ: {record}")


def _check_graph(session: Session, logits: Callable[[Tensor], Tensor], ids: Tensor, new: Tensor) -> dict[str, Any]:
    return {"graph_error": _relative(replayed(session, logits, ids, new), logits(new))}


def _check_compile(plan: Plan, logits: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """One graph for all numbers of tokens, but for the first one and M = 1."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, errors, started = CompileCounterWithBackend(plan.backend), [], time.perf_counter()
    compiled = torch.compile(logits, fullgraph=True, backend=counter)
    for m in (7, 2, 33, 1) if plan.dry else (7, 2, 33, 1, 128, 1, 64, 200):
        ids = torch.randint(3, 128, (1, m), device=plan.device)
        errors.append(_relative(compiled(ids), logits(ids)))
    seconds = time.perf_counter() - started
    torch._dynamo.reset()
    return {"compile_graphs": counter.frame_count, "compile_error": max(errors), "compile_seconds": seconds}


def _check_siblings(session: Session, model: nn.Module, ids: Tensor, new: Tensor) -> dict[str, Any]:
    """One token at a time, with q, k, v and gate, up apart and in one launch: seconds of plain calls and of a CUDA graph."""
    fused, found, token = copy.deepcopy(model), {}, ids[:, :1]
    fuse_siblings_(fused)

    def logits(some: nn.Module, ids: Tensor) -> Tensor:
        return some(input_ids=ids, use_cache=False).logits

    found["siblings_error"] = _relative(logits(fused, new), logits(model, new))
    assert torch.equal(replayed(session, partial(logits, fused), ids, new), logits(fused, new))
    for name, some in (("apart", model), ("fused", fused)):
        for graph in (False, True):
            timing = time_call(session.timer, partial(logits, some, token), min(session.plan.rounds, 11), graph=graph)
            found[f"{name}{'_graph' * graph}_s"] = timing.median
    return found


def _check_generate(plan: Plan, model: nn.Module, twin: nn.Module, ids: Tensor) -> dict[str, Any]:
    count = 3 if plan.dry else 32
    settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "attention_mask": torch.ones_like(ids)}
    tokens, expected = (some.generate(ids, **settings)[0, ids.shape[1] :] for some in (model, twin))
    assert len(tokens) == count
    return {"generated": len(tokens), "generated_as_twin": int((tokens == expected).cumprod(0).sum())}


def _relative(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


# ------------------------------------------------------------------------------------------------------------- calibration


def check_calibration(session: Session, record: dict[str, Any]) -> None:
    """Compare the GPTQ kernel with the loop, sums in TF32 with exact ones, and quantize a small model with calibration."""
    record["gptq"] = _check_gptq(session)
    console.print(f"gptq: {record['gptq']}", highlight=False)
    record["statistics"] = _check_statistics(session)
    console.print(f"statistics: {record['statistics']}", highlight=False)
    if importlib.util.find_spec("greenlet") is None:
        session.skip("quantize_ with calibration: greenlet is not installed")
    elif not session.late("quantize_ with calibration"):
        record["quantize"] = _check_quantize(session.plan)
        console.print(f"quantize_: {record['quantize']}", highlight=False)
    if not max(found["different_rows"] for found in record["gptq"].values()) < 0.02:
        raise AssertionError(f"the GPTQ kernel and the loop differ: {record['gptq']}")


def _check_gptq(session: Session) -> dict[str, Any]:
    """Values between two codes may go either way, and with them what follows in that row; errors of other rows are equal."""
    plan, found = session.plan, {}
    for zeros in (False, True):
        results, seconds = [], {}
        for function in (gptq.reference, gptq_triton.launch):
            block = gptq_block(32 if plan.dry else 4096, plan.device, zeros)
            function(block)
            results.append((block.codes.clone(), block.E.clone()))
            call = partial(function, block)  # again on what is now in V: as fast
            seconds[function.__name__] = time_call(session.timer, call, min(plan.rounds, 11), graph=False).median
        different = (results[0][0] != results[1][0]).any(0)
        off = (results[0][1] - results[1][1])[:, ~different].abs().max()
        figures = {"different_rows": float(different.float().mean()), "max_error_elsewhere": float(off)}
        found["asymmetric" if zeros else "symmetric"] = figures | {f"{name}_s": value for name, value in seconds.items()}
    return found


def _check_statistics(session: Session) -> dict[str, Any]:
    plan, found = session.plan, {}
    tokens, k = (64, 128) if plan.dry else (8192, 4096)
    for dtype in (torch.float32, plan.dtype):
        x = (random_tokens(tokens, k, torch.float32, plan.device) * torch.linspace(0.1, 3, k, device=plan.device)).to(dtype)
        expected = x.double().t() @ x.double()
        for exact in (True, False):
            statistics = InputStatistics(k, plan.device, exact=exact)
            statistics.add(x)
            statistics.finish()
            error = _relative(statistics.H, expected)
            timing = time_call(session.timer, partial(statistics.add, x), min(plan.rounds, 11), graph=False)
            name = f"{str(dtype)[6:]} {'exact' if exact else 'rounded'}"
            found[name] = {"relative_error": error, "seconds": timing.median, "flops_per_second": tokens * k**2 / timing.median}
    return found


def _check_quantize(plan: Plan) -> dict[str, Any]:
    started = time.perf_counter()
    model = tiny_llama(dtype=torch.float32 if plan.dry else plan.dtype).to(plan.device)
    ids = torch.randint(3, 128, (16, 64), generator=torch.Generator().manual_seed(0))
    report = quantize_(model, QuantConfig("W4A16", group_size=32, algorithm="gptq"), calibration=ids, progress=False)
    errors = [layer.output_error for layer in report.layers if layer.output_error is not None]
    result = model(input_ids=ids[:1].to(plan.device)).logits
    assert errors and bool(torch.isfinite(result).all())
    figures = {"seconds": time.perf_counter() - started, "layers": len(errors), "largest_output_error": max(errors)}
    words = all("weight_words" in layer._buffers for layer in model.modules() if isinstance(layer, QuantLinear))
    return figures | {"in_words": words, "expected_in_words": gpu_of(torch.device(plan.device)) is not None}
