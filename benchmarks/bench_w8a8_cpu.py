"""Ways to multiply int8 activations by an int8 weight on a CPU, beside bfloat16 ``F.linear``: which should W8A8 take?

``plain`` is ``torchq::w8a8_int8`` and ``blocked`` is ``torchq::w8a8_int8_cpu``; they also quantize the activations and scale the
sums. The others are the matmul alone: ``torch._int_mm`` as x @ weight.T and transposed, weight @ x.T, and oneDNN's linear on a
weight laid out for it beforehand. The answer is ``MIN_WEIGHTS`` in ``kernels/w8a8_int8_cpu.py``.
``python benchmarks/bench_w8a8_cpu.py --save``
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import base_parser, machine_limits, print_table, save_results, time_side_by_side
from torch import Tensor

from torchq.kernels.w8a8_int8 import w8a8_int8
from torchq.kernels.w8a8_int8_cpu import pack_weight, w8a8_int8_cpu

SHAPES = [(14336, 4096), (4096, 14336), (4096, 4096), (2048, 4096), (1024, 4096), (1536, 576)]  # (out_features, in_features)
CACHE_BYTES = 192 << 20  # of weights to cycle through, more than a last-level cache holds


@torch.no_grad()
def main() -> None:
    """Time every way over numbers of tokens."""
    parser = base_parser(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 256, 512])
    arguments = parser.parse_args()
    results = []
    for n, k in SHAPES:
        torch.manual_seed(0)
        copies = min(64, -(-CACHE_BYTES // (n * k)))
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        scale = torch.rand(n, 1).bfloat16()
        dense = _cycle([weight.bfloat16() for _ in range(-(-copies // 2))])
        plain = _cycle([weight.clone() for _ in range(copies)])
        blocked = _cycle([pack_weight(weight) for _ in range(copies)])
        rows = []
        for tokens in arguments.tokens:
            x = torch.randn(tokens, k).bfloat16()
            x_q = torch.randint(-127, 128, (tokens, k), dtype=torch.int8)
            matmuls: dict[str, Callable[[], Tensor]] = {
                "x @ w.T": lambda x_q=x_q, plain=plain: torch._int_mm(x_q, next(plain).t()),
                "w @ x.T": lambda x_q=x_q, plain=plain: torch._int_mm(next(plain), x_q.t()).t(),
                "oneDNN": _onednn(x_q, blocked, n),
            }
            expected = (x_q.double() @ weight.double().t()).float()
            for name, function in matmuls.items():
                if not torch.equal(function().float(), expected):
                    raise SystemExit(f"{name}: wrong sums at {tokens} tokens; nothing is timed")
            functions: dict[str, Callable[[], Any]] = {
                "F.linear": lambda x=x, dense=dense: F.linear(x, next(dense)),
                "plain": lambda x=x, plain=plain, scale=scale: w8a8_int8(x, next(plain), scale, None, None, None),
                "blocked": lambda x=x, blocked=blocked, scale=scale: w8a8_int8_cpu(x, next(blocked), scale, None, None, None),
                **matmuls,
            }
            timings = time_side_by_side(functions, seconds=arguments.seconds)
            base = timings["F.linear"].median
            rows.append([str(tokens), *(f"{t.median * 1e3:.2f} ({base / t.median:.2f}x)" for t in timings.values())])
            results += [
                {"out_features": n, "in_features": k, "tokens": tokens, "name": name}
                | {"median_s": t.median, "p10_s": t.low, "p90_s": t.high, "speedup": base / t.median}
                for name, t in timings.items()
            ]
        print_table(f"int8, {n} x {k}, milliseconds", ["tokens", *functions], rows)
    if arguments.save:
        save_results("w8a8_cpu", {"limits": machine_limits(), "results": results})


def _cycle(weights: list[Tensor]) -> Any:
    return itertools.cycle(weights)


def _onednn(x_q: Tensor, blocked: Any, n: int) -> Callable[[], Tensor]:
    """Unsigned activations with a zero point of 128: oneDNN has fast kernels for these only."""
    unsigned = x_q.view(torch.uint8) ^ 0x80
    ones, zeros = torch.ones(n), torch.zeros(n, dtype=torch.int32)
    op = torch.ops.onednn.qlinear_pointwise.default
    return lambda: op(unsigned, 1.0, 128, next(blocked), ones, zeros, None, 1.0, 0, torch.float32, "none", [], "none")


if __name__ == "__main__":
    main()
