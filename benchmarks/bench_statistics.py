"""What calibration gains from lower precision: sums over inputs that are rounded, and products in bfloat16, against float32.

``sums``: :class:`torchq.calibration.statistics.InputStatistics` of one micro-batch, exact and rounded, without and with drift.
``products``: ``F.linear`` in float32 and in bfloat16. ``python benchmarks/bench_statistics.py --save``
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import base_parser, print_table, save_results, time_side_by_side

from torchq.calibration.statistics import InputStatistics

TOKENS = 1024
FEATURES = (576, 1536, 4096)


@torch.no_grad()
def main() -> None:
    """Measure both."""
    arguments = base_parser(__doc__).parse_args()
    sums, products = [], []
    for k in FEATURES:
        x = torch.randn(TOKENS, k).bfloat16()
        for reference in (None, x + 0.1 * torch.randn_like(x)):
            exact, rounded = (InputStatistics(k, "cpu", exact=exact) for exact in (True, False))
            functions: dict[str, Callable[[], Any]] = {
                "exact": partial(exact.add, x, None, reference),
                "rounded": partial(rounded.add, x, None, reference),
            }
            sums.append({"features": k, "drift": reference is not None} | _medians(functions, arguments.seconds))
        w = torch.randn(k, k).bfloat16()
        functions = {str(dtype)[6:]: partial(F.linear, x.to(dtype), w.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
        products.append({"features": k} | _medians(functions, arguments.seconds))
    for title, rows in (("sums", sums), ("products", products)):
        columns = list(rows[0])
        cells = [[f"{v * 1e3:.2f} ms" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        gains = [f"{list(row.values())[-2] / list(row.values())[-1]:.1f}x" for row in rows]
        print_table(f"{title}, {TOKENS} tokens", [*columns, "gain"], [[*row, g] for row, g in zip(cells, gains, strict=True)])
    if arguments.save:
        save_results("statistics", {"tokens": TOKENS, "sums": sums, "products": products})


def _medians(functions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    return {name: timing.median for name, timing in time_side_by_side(functions, seconds=seconds).items()}


if __name__ == "__main__":
    main()
