"""Two choices of the CPU paths: the order of a float32 product's factors, and how an operator is registered.

``order``: ``F.linear(x, weight)`` against ``F.linear(weight, x).t()`` (kernels/linear.py). ``registration``: an empty operator by
``torch.library.custom_op`` against one by kernels/registration.py, called in a loop (warm) and after reading 40 MB (cold), as a
layer's operator is called after the weights of the layer before. ``python benchmarks/bench_cpu_choices.py --save``
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import base_parser, print_table, save_results, time_side_by_side
from torch import Tensor

from torchq.kernels.registration import register_op

SHAPES = [(4096, 4096), (4096, 14336), (512, 4096), (146, 14336)]  # (out_features, in_features): layers, and tiles of them
CALLS = 200


def empty(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Stand for an operator of a layer."""
    return x.new_empty(1)


@torch.no_grad()
def main() -> None:
    """Measure both."""
    parser = base_parser(__doc__)
    arguments = parser.parse_args()
    order = []
    for (n, k), dtype in ((shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)):
        weight = torch.randn(n, k).to(dtype)
        for tokens in (2, 4, 16, 64, 512):
            x = torch.randn(tokens, k).to(dtype)
            functions: dict[str, Callable[[], Any]] = {
                "x @ w.T": lambda x=x, weight=weight: F.linear(x, weight),
                "w @ x.T": lambda x=x, weight=weight: F.linear(weight, x).t(),
            }
            timings = time_side_by_side(functions, seconds=min(arguments.seconds, 0.3))
            medians = {name: timing.median for name, timing in timings.items()}
            gain = medians["x @ w.T"] / medians["w @ x.T"]
            order.append({"dtype": str(dtype)[6:], "out_features": n, "in_features": k, "tokens": tokens, "gain": gain} | medians)
    columns = ["dtype", "shape", "tokens", "gain of w @ x.T"]
    rows = [[r["dtype"], f"{r['out_features']} x {r['in_features']}", str(r["tokens"]), f"{r['gain']:.2f}x"] for r in order]
    print_table("order of the factors", columns, rows)
    registration = _time_registration()
    print_table(
        "one call, microseconds",
        ["how", "warm", "cold"],
        [[k, f"{v['warm']:.1f}", f"{v['cold']:.1f}"] for k, v in registration.items()],
    )
    if arguments.save:
        save_results("cpu_choices", {"order": order, "registration_us": registration})


def _time_registration() -> dict[str, dict[str, float]]:
    """Microseconds a call, median."""
    functions: dict[str, Callable[..., Any]] = {
        "custom_op": torch.library.custom_op("torchq_bench::custom", empty, mutates_args=())._opoverload,
        "register_op": register_op("torchq_bench::plain")(empty),
        "function": empty,
    }
    x, big = torch.randn(4), torch.ones(40 << 20, dtype=torch.uint8)
    result: dict[str, dict[str, float]] = {}
    for name, function in functions.items():
        samples: dict[str, list[float]] = {"warm": [], "cold": []}
        for kind in ("warm", "cold"):
            for _ in range(CALLS):
                if kind == "cold":
                    big.sum()
                begun = time.perf_counter()
                function(x, x, x, None)
                samples[kind].append(time.perf_counter() - begun)
        result[name] = {kind: statistics.median(values) * 1e6 for kind, values in samples.items()}
    return result


if __name__ == "__main__":
    main()
