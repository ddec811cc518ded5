"""The two ways of ``torchq::wna16_cpu`` against each other and ``F.linear``: where does PyTorch's int4 kernel stop to win?

The answer is ``MAX_NATIVE_TOKENS`` in ``kernels/wna16_cpu.py``. ``canonical`` is ``torchq::wna16`` on the checkpoint's layout.
``python benchmarks/bench_wna16_cpu.py --save``
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import base_parser, machine_limits, print_table, save_results, time_side_by_side
from torch import Tensor

from torchq.kernels import wna16, wna16_cpu
from torchq.packing import pack_int32

OUT_FEATURES = IN_FEATURES = 4096
GROUP_SIZE = 64
COPIES = 12  # of each weight, cycled through: more bytes than a last-level cache holds


def main() -> None:
    """Time 4- and 8-bit weights over numbers of tokens."""
    parser = base_parser(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256])
    arguments = parser.parse_args()
    if not wna16_cpu.is_available():
        raise SystemExit("this PyTorch or processor packs int4 weights in another way")
    results = []
    for num_bits in (4, 8):
        functions = _functions(num_bits)
        rows = []
        for tokens in arguments.tokens:
            x = torch.randn(tokens, IN_FEATURES).bfloat16()
            _check(functions, x)
            timings = time_side_by_side({k: _bind(f, x) for k, f in functions.items()}, seconds=arguments.seconds)
            rows.append([str(tokens), *(f"{timing.median * 1e3:.2f}" for timing in timings.values())])
            results += [
                {"num_bits": num_bits, "tokens": tokens, "name": name, "median_s": t.median, "p10_s": t.low, "p90_s": t.high}
                for name, t in timings.items()
            ]
        print_table(f"{num_bits} bits, {OUT_FEATURES} x {IN_FEATURES}, milliseconds", ["tokens", *functions], rows)
    if arguments.save:
        save_results("wna16_cpu", {"limits": machine_limits(), "results": results})


def _functions(num_bits: int) -> dict[str, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    half = 1 << (num_bits - 1)
    q = torch.randint(-half, half, (OUT_FEATURES, IN_FEATURES), dtype=torch.int8)
    scale = (torch.rand(OUT_FEATURES, IN_FEATURES // GROUP_SIZE) * 0.01 + 0.01).bfloat16()
    pairs = wna16_cpu.pack_scale_and_zero(scale, None, num_bits, GROUP_SIZE, GROUP_SIZE)
    words = pack_int32(q, num_bits)
    dense = _cycle(wna16.dequantize_wna16(words, scale, None, num_bits, GROUP_SIZE, IN_FEATURES))
    packed, planes = _cycle(words), _cycle(wna16_cpu.pack_planes(q, num_bits))

    def by(limit: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            wna16_cpu.MAX_NATIVE_TOKENS = {1: limit, 2: limit}
            return wna16_cpu.wna16_cpu(x, next(planes), pairs, None, None, None, num_bits, GROUP_SIZE)

        return call

    return {
        "F.linear": lambda x: F.linear(x, next(dense)),
        "native": by(1 << 30),
        "tiled": by(0),
        "canonical": lambda x: wna16.wna16(x, next(packed), scale, None, None, num_bits, GROUP_SIZE),
    }


def _cycle(weight: Tensor) -> Any:
    return itertools.cycle([weight.clone() for _ in range(COPIES)])


def _bind(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    return lambda: function(x)


def _check(functions: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> None:
    expected = functions["F.linear"](x).float()
    for name, function in functions.items():
        error = ((function(x).float() - expected).norm() / expected.norm()).item()
        if not error < 0.01:
            raise SystemExit(f"{name}: relative error {error:.4f} at {x.shape[0]} tokens; nothing is timed")


if __name__ == "__main__":
    main()
