"""``F.linear`` with the faster order of the factors."""

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
