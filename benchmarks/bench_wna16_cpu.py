"""Weight-only layers on a CPU: where PyTorch's kernels for few tokens stop to win, and what training on packed weights costs.

``crossing``: the two ways of ``torchq::wna16_cpu`` against each other, ``F.linear`` and ``torchq::wna16`` on the checkpoint's
layout (``canonical``); the answer is ``MAX_NATIVE_TOKENS`` in ``kernels/wna16_cpu.py``. ``rows``: 8 bits with a scale per row, as
rows of int8 (``torchq::w8a16_cpu`` as it chooses, and both its ways; ``native`` is ``aten::_weight_int8pack_mm``) and as planes.
``training``: a layer's forward pass and the gradient of its input, against ``nn.Linear``'s.
``python benchmarks/bench_wna16_cpu.py --save``; with ``OMP_NUM_THREADS=1`` it is processor time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import Timing, base_parser, machine_limits, print_table, save_results, time_side_by_side
from torch import Tensor, nn

from torchq import QuantLinear
from torchq.algorithms.rtn import quantize_weight
from torchq.kernels import w8a16_cpu, wna16, wna16_cpu
from torchq.packing import pack_int32
from torchq.scheme import resolve_scheme

SIZE, GROUP_SIZE = 4096, 64
COPIES_BYTES = 200 << 20  # of each weight, cycled through: more than a last-level cache holds
LAYERS = [(192, 576), (576, 576), (1536, 576), (576, 1536), (2048, 2048), (4096, 4096)]  # (out_features, in_features)
CHOSEN = wna16_cpu.MAX_NATIVE_TOKENS, w8a16_cpu.MAX_NATIVE_TOKENS
Functions = dict[str, Callable[[Tensor], Tensor]]


def main() -> None:
    """Time 4- and 8-bit weights over numbers of tokens."""
    parser = base_parser(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512])
    parser.add_argument("--training-tokens", nargs="+", type=int, default=[128, 512, 1024])
    parser.add_argument("--parts", nargs="+", default=["crossing", "rows", "training"])
    arguments = parser.parse_args()
    if not wna16_cpu.is_available() or not w8a16_cpu.is_available():
        raise SystemExit("this PyTorch or processor packs integer weights in another way")
    results: dict[str, list[dict[str, Any]]] = {}
    if "crossing" in arguments.parts:
        tables = {f"{bits} bits, {SIZE} x {SIZE}": _crossing(bits) for bits in (4, 8)}
        results["crossing"] = [row for title, f in tables.items() for row in _time(title, f, SIZE, arguments)]
    if "rows" in arguments.parts:
        results["rows"] = []
        for n, k in ((4096, 4096), (1536, 576)):
            results["rows"] += _time(f"8 bits, a scale per row, {n} x {k}", _rows(n, k), k, arguments)
    wna16_cpu.MAX_NATIVE_TOKENS, w8a16_cpu.MAX_NATIVE_TOKENS = CHOSEN
    if "training" in arguments.parts:
        results["training"] = _training(arguments)
    if arguments.save:
        save_results("wna16_cpu", {"limits": machine_limits()} | results)


def _time(title: str, functions: Functions, k: int, arguments: Any) -> list[dict[str, Any]]:
    """Time functions of x side by side over numbers of tokens; print and return medians."""
    rows, results = [], []
    for tokens in arguments.tokens:
        x = torch.randn(tokens, k).bfloat16()
        _check(functions, x)
        timings = _side_by_side({name: _bind(f, x) for name, f in functions.items()}, arguments.seconds)
        rows.append([str(tokens), *(f"{timing.median * 1e3:.3f}" for timing in timings.values())])
        for name, t in timings.items():
            results.append({"weight": title, "tokens": tokens, "name": name})
            results[-1] |= {"median_s": t.median, "p10_s": t.low, "p90_s": t.high}
    print_table(f"{title}, milliseconds", ["tokens", *functions], rows)
    return results


def _side_by_side(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Timing]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    return time_side_by_side(functions, seconds=seconds, clock=clock)


def _crossing(num_bits: int) -> Functions:
    torch.manual_seed(0)
    half = 1 << (num_bits - 1)
    q = torch.randint(-half, half, (SIZE, SIZE), dtype=torch.int8)
    scale = (torch.rand(SIZE, SIZE // GROUP_SIZE) * 0.01 + 0.01).bfloat16()
    pairs = wna16_cpu.pack_scale_and_zero(scale, None, num_bits, GROUP_SIZE, GROUP_SIZE)
    words = pack_int32(q, num_bits)
    dense = _cycle(wna16.dequantize_wna16(words, scale, None, num_bits, GROUP_SIZE, SIZE))
    packed = _cycle(words)
    return {
        "F.linear": lambda x: F.linear(x, next(dense)),
        **_planes(q, pairs, num_bits, GROUP_SIZE),
        "canonical": lambda x: wna16.wna16(x, next(packed), scale, None, None, num_bits, GROUP_SIZE),
    }


def _planes(q: Tensor, pairs: Tensor, num_bits: int, group_size: int) -> Functions:
    planes = _cycle(wna16_cpu.pack_planes(q, num_bits))

    def by(limit: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            wna16_cpu.MAX_NATIVE_TOKENS = {1: limit, 2: limit}
            return wna16_cpu.wna16_cpu(x, next(planes), pairs, None, None, None, num_bits, group_size)

        return call

    return {"planes native": by(1 << 30), "planes tiled": by(0)}


def _rows(n: int, k: int) -> Functions:
    torch.manual_seed(0)
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    scale = (torch.rand(n) * 0.01 + 0.01).bfloat16()
    native_size = wna16_cpu.native_group_size(n, k, k)
    assert native_size is not None
    pairs = wna16_cpu.pack_scale_and_zero(scale.unsqueeze(1), None, 8, k, native_size)
    dense, rows = _cycle(q * scale.unsqueeze(1)), _cycle(q)

    def by(limit: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            w8a16_cpu.MAX_NATIVE_TOKENS = limit
            return w8a16_cpu.w8a16_cpu(x, next(rows), scale, None)

        return call

    by_rows = {"rows": by(CHOSEN[1]), "rows native": by(1 << 30), "rows tiled": by(0)}
    return {"F.linear": lambda x: F.linear(x, next(dense)), **by_rows, **_planes(q, pairs, 8, k)}


def _training(arguments: Any) -> list[dict[str, Any]]:
    """Time forward pass + gradient of the input, in bfloat16, of layers without a gradient of the weight."""
    schemes = {"W4A16 g32": ("W4A16", 32), "W4A16 g64": ("W4A16", 64), "W4A16 g128": ("W4A16", 128), "W8A16": ("W8A16", -1)}
    rows, results = [], []
    for (n, k), tokens in itertools.product(LAYERS, arguments.training_tokens):
        linear = nn.Linear(k, n, bias=False).bfloat16().requires_grad_(False)
        layers: dict[str, nn.Module] = {"nn.Linear": linear}
        for name, (scheme, group_size) in schemes.items():
            if k % group_size == 0:
                quantized, _ = quantize_weight(linear.weight, resolve_scheme(scheme, group_size))
                layers[name] = QuantLinear.from_linear(linear, quantized)
        x = torch.randn(tokens, k).bfloat16().requires_grad_()
        grad_y = torch.randn(tokens, n).bfloat16()
        timings = _side_by_side({name: _bind_training(f, x, grad_y) for name, f in layers.items()}, arguments.seconds)
        base = timings["nn.Linear"]
        ratios = [f"{timings[name].median / base.median:.2f}" if name in timings else "" for name in schemes]
        rows.append([f"{n} x {k}", str(tokens), f"{base.median * 1e3:.2f}", *ratios])
        for name, t in timings.items():
            results.append({"out_features": n, "in_features": k, "tokens": tokens, "name": name})
            results[-1] |= {"median_s": t.median, "p10_s": t.low, "p90_s": t.high}
    title = "forward + gradient of the input, times nn.Linear's (milliseconds)"
    print_table(title, ["out x in", "tokens", "nn.Linear", *schemes], rows)
    return results


def _bind_training(layer: nn.Module, x: Tensor, grad_y: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(layer(x), x, grad_y)


def _cycle(weight: Tensor) -> Iterator[Tensor]:
    return itertools.cycle([weight.clone() for _ in range(max(COPIES_BYTES // weight.nbytes, 1))])


def _bind(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: function(x)


def _check(functions: Functions, x: Tensor) -> None:
    expected = functions["F.linear"](x).float()
    for name, function in functions.items():
        error = ((function(x).float() - expected).norm() / expected.norm()).item()
        if not error < 0.01:
            raise SystemExit(f"{name}: relative error {error:.4f} at {x.shape[0]} tokens; nothing is timed")


if __name__ == "__main__":
    main()
