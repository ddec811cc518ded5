"""QuantLinear against F.linear in bfloat16 and float32, at the shapes of Llama-3-8B and SmolLM2-135M.

Every comparison runs side by side on as many copies of the weights as exceed the last-level cache, as in a model, where each
layer's weight comes from memory. Refuses to time a layer whose result is wrong. ``python benchmarks/bench_linear.py --save``
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import base_parser, console, machine_limits, print_table, save_results, time_side_by_side
from torch import Tensor, nn

from torchq import QuantConfig, QuantLinear, quantize_

SHAPES = {  # (out_features, in_features)
    "llama8b": [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)],
    "smollm2": [(576, 576), (192, 576), (1536, 576), (576, 1536)],
}
SCHEMES = {
    "W4A16": QuantConfig("W4A16", group_size=64, ignore=()),
    "W4A16_ASYM": QuantConfig("W4A16_ASYM", group_size=64, ignore=()),
    "W8A16": QuantConfig("W8A16", group_size=64, ignore=()),
    "W8A8": QuantConfig("W8A8", ignore=()),
    "FP8_DYNAMIC": QuantConfig("FP8_DYNAMIC", ignore=()),
}
CACHE_BYTES = 192 << 20  # of weights to cycle through, more than a last-level cache holds


def main() -> None:
    """Run the comparisons that the arguments name."""
    parser = base_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama8b", "smollm2"], choices=list(SHAPES))
    parser.add_argument("--schemes", nargs="+", default=["W4A16", "W8A8"], choices=list(SCHEMES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    arguments = parser.parse_args()
    limits = machine_limits(arguments.device)
    console.print({name: f"{value / 1e9:.1f} G/s" for name, value in limits.items()})
    shapes = [shape for name in arguments.shapes for shape in SHAPES[name]]
    results = []
    for dtype_name, (n, k) in itertools.product(arguments.dtypes, shapes):
        dtype = getattr(torch, dtype_name)
        layers = {scheme: _quantized_copies(scheme, n, k, dtype, arguments.device) for scheme in arguments.schemes}
        dense = _dense_copies(n, k, dtype, arguments.device)
        rows = []
        for m in arguments.tokens:
            x = torch.randn(m, k, device=arguments.device).to(dtype)
            for scheme, copies in layers.items():
                _check(scheme, copies[0], x)
            functions: dict[str, Callable[[], Any]] = {"F.linear": _cycle([_call_dense(weight, x) for weight in dense])}
            functions |= {scheme: _cycle([_call(layer, x) for layer in copies]) for scheme, copies in layers.items()}
            timings = time_side_by_side(functions, seconds=arguments.seconds, device=arguments.device)
            base = timings["F.linear"].median
            row = [str(m), f"{base * 1e3:.3f}"]
            for name, timing in timings.items():
                bound = _bound(name, layers.get(name), n, k, m, dtype, limits)
                results.append(
                    {"dtype": dtype_name, "out_features": n, "in_features": k, "tokens": m, "name": name}
                    | {"median_s": timing.median, "p10_s": timing.low, "p90_s": timing.high, "rounds": timing.rounds}
                    | {"speedup": base / timing.median, "limit_s": bound}
                )
                if name != "F.linear":
                    row += [f"{timing.median * 1e3:.3f}", f"{base / timing.median:.2f}x", f"{bound / timing.median:.0%}"]
            rows.append(row)
        columns = ["tokens", f"{dtype_name} ms"]
        for scheme in layers:
            columns += [f"{scheme} ms", "speed-up", "of limit"]
        print_table(f"{n} x {k}, {dtype_name} activations", columns, rows)
    if arguments.save:
        save_results("linear", {"limits": limits, "results": results}, arguments.device)


def _dense_copies(n: int, k: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    weight = (torch.randn(n, k) * 0.02).to(dtype).to(device)
    return [weight.clone() for _ in range(_num_copies(weight.nbytes))]


def _quantized_copies(scheme: str, n: int, k: int, dtype: torch.dtype, device: str) -> list[QuantLinear]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n, bias=False))
    nn.init.normal_(model[0].weight, std=0.02)
    quantize_(model.to(dtype), SCHEMES[scheme], progress=False)
    layer = model[0].to(device)
    nbytes = sum(buffer.nbytes for buffer in layer.buffers())
    return [copy.deepcopy(layer) for _ in range(_num_copies(nbytes))]


def _num_copies(nbytes: int) -> int:
    return max(1, min(64, -(-CACHE_BYTES // nbytes)))


def _call(layer: QuantLinear, x: Tensor) -> Callable[[], Tensor]:
    return lambda: layer(x)


def _call_dense(weight: Tensor, x: Tensor) -> Callable[[], Tensor]:
    return lambda: F.linear(x, weight)


@torch.no_grad()
def _check(scheme: str, layer: QuantLinear, x: Tensor) -> None:
    """Compare with float64 on the dequantized weight; quantized activations add about 1 % of error."""
    exact = F.linear(x.double(), layer.dequantize().double())
    error = ((layer(x).double() - exact).norm() / exact.norm()).item()
    limit = 0.05 if layer.scheme.input_activations is not None else 0.01
    if not error < limit:
        raise SystemExit(f"{scheme}: relative error {error:.4f} at M={x.shape[0]} is above {limit}; nothing is timed")


def _cycle(functions: list[Callable[[], Any]]) -> Callable[[], Any]:
    iterator = itertools.cycle(functions)

    @torch.no_grad()
    def call() -> Any:
        return next(iterator)()

    return call


def _bound(
    name: str, copies: list[QuantLinear] | None, n: int, k: int, m: int, dtype: torch.dtype, limits: dict[str, float]
) -> float:
    """The larger of the time to read the weight and the time to multiply, at the machine's measured rates."""
    nbytes = n * k * dtype.itemsize if copies is None else sum(buffer.nbytes for buffer in copies[0].buffers())
    rate = limits["float32_flops_per_second"] if dtype == torch.float32 else limits["bfloat16_flops_per_second"]
    if name == "W8A8":
        rate = limits["int8_ops_per_second"]
    return max(nbytes / limits["read_bytes_per_second"], 2 * m * n * k / rate)


if __name__ == "__main__":
    main()
