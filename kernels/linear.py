"""``F.linear`` with the faster order of the factors, and the gradient of its input from a weight that is dequantized in parts."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, [M, N], for x [M, K], weight [N, K] and bias [N] or None; of any strides.

    On a CPU in float32 several tokens are multiplied transposed, weight @ x.T: that order is 1.0 to 2.3 times as fast
    (4096 x 4096 to 146 x 14336, M from 2 to 512, MKL on 2 cores of an AMD EPYC, benchmarks/bench_cpu_choices.py). In bfloat16 it
    is 0.3 to 1.5 times as fast.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[0] == 1:
        return F.linear(x, weight, bias)
    y = F.linear(weight, x).t()
    return y if bias is None else y.add_(bias)


TILE_WEIGHTS = 1 << 21  # weights dequantized at a time on a CPU: 4 MiB of bfloat16, which its last-level cache holds
DEVICE_TILE_WEIGHTS = 1 << 26  # elsewhere: large enough to fill a GPU, small enough not to matter beside the model


def stretches(size: int, other: int, unit: int, device: torch.device) -> Iterator[slice]:
    """Parts of ``size``, of whole units and like size, such that part x other weights are not too many to dequantize at once."""
    weights = TILE_WEIGHTS if device.type == "cpu" else DEVICE_TILE_WEIGHTS
    units = -(-size // unit)
    parts = -(-units // max(weights // max(other, 1) // unit, 1))
    step = -(-units // max(parts, 1)) * unit
    for start in range(0, size, max(step, 1)):
        yield slice(start, min(start + step, size))


def in_stretches(x: Tensor, size: int, unit: int, part: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Return a product [M, size] of x [M, J], some columns at a time, so that no sum is split.

    Args:
        x: The left factor.
        size: Columns of the product.
        unit: Columns at which a part may begin: multiples of this.
        part: (x, columns) -> [M, columns] of the product.
    """
    columns = list(stretches(size, x.shape[1], unit, x.device)) if x.shape[0] else []
    if len(columns) == 1:
        return part(x, columns[0]).to(x.dtype).contiguous()  # autocast reaches F.linear
    y = x.new_empty(x.shape[0], size)
    for stretch in columns:
        y[:, stretch] = part(x, stretch)
    return y


def input_grad(grad_y: Tensor, k: int, unit: int, part: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Return grad_y [..., N] @ weight [N, K], [..., K]. ``part``, ``unit``: as for :func:`in_stretches`."""
    grads = grad_y.reshape(-1, grad_y.shape[-1])
    return in_stretches(grads, k, unit, part).view(*grad_y.shape[:-1], k)
