"""The order of the factors does not change the product."""

import pytest
import torch
import torch.nn.functional as F

from torchq.kernels.linear import linear
from torchq.testing import assert_within_dtype_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
def test_is_the_product(with_bias, dtype):
    torch.manual_seed(0)
    for m, n, k in [(0, 5, 8), (1, 1, 1), (1, 33, 64), (7, 33, 100), (64, 128, 576), (5, 0, 8)]:
        x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        bias = torch.randn(n).to(dtype) if with_bias else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        for y in (linear(x, weight, bias), linear(x.t().contiguous().t(), weight.t().contiguous().t(), bias)):
            assert y.shape == (m, n) and y.dtype == dtype
            if y.numel():
                assert_within_dtype_error(y, exact, F.linear(x, weight, bias))
