"""W8A8 int8 matmul with the weight in the memory layout of oneDNN's matmul (``onednn::qlinear_pointwise``).

The mathematics are those of :mod:`torchq.kernels.w8a8_int8`, and so is every bit of the sums. ``torch._int_mm`` lays its weight
out anew in every call; here it lies ready, in an opaque oneDNN tensor: it has no storage and cannot be viewed, pickled or moved,
so it never leaves memory. :func:`unpack_weight` gives the int8 codes back bit for bit.

oneDNN is fast for unsigned activations only: codes are passed as x_q + 128 with 128 as their zero point.
"""

import functools

import torch
from torch import Tensor

from torchq.kernels.registration import register_op
from torchq.kernels.w8a8_int8 import check_w8a8_int8_args, quantize_activations, w8a8_int8_ref

MIN_WEIGHTS = 1 << 23
"""Fewest weights laid out for oneDNN, which is faster than ``torch._int_mm`` for several tokens and slower for one: smaller
layers gain little for several (benchmarks/bench_w8a8_cpu.py)."""

_MAX_IN_FEATURES = 65793  # largest K for which sums of 255 * 128 fit in int32
_OUTPUT_ELEMENTS = 1 << 20  # float32 sums at a time, 4 MiB: larger ones are fresh pages of the system in every call


@functools.cache
def is_available() -> bool:
    """Whether this PyTorch and processor have an exact oneDNN matmul (probed once): without VNNI its sums saturate."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    x_q = torch.tensor([127, -128, 127], dtype=torch.int8).repeat(6)[:, None].expand(18, 65).contiguous()
    weight = torch.tensor([127, -128, 127], dtype=torch.int8).repeat(11)[:, None].expand(33, 65).contiguous()
    expected = x_q.float() @ weight.float().t()  # 65 products: exact
    try:
        packed = pack_weight(weight)
        sums = [_matmul(_unsigned(x_q[:m].clone()), packed, torch.ones(33), 0) for m in (1, 18)]
        return torch.equal(unpack_weight(packed), weight) and all(torch.equal(y, expected[: y.shape[0]]) for y in sums)
    except (RuntimeError, NotImplementedError):  # oneDNN lacks a kernel for this processor
        return False


def is_of_use(weight: Tensor) -> bool:
    """Whether a weight, [N, K] int8 on the CPU, should be laid out for oneDNN: a large one, whose sums fit in int32."""
    return weight.numel() >= MIN_WEIGHTS and weight.shape[1] <= _MAX_IN_FEATURES and is_available()


def pack_weight(weight: Tensor) -> Tensor:
    """Lay out a weight, [N, K] int8 on the CPU, for oneDNN: an opaque tensor of shape [K, N]."""
    return torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)


@register_op("torchq::w8a8_int8_cpu_unpack")  # an op, so that torch.compile does not look inside
def unpack_weight(weight_blocked: Tensor) -> Tensor:
    """Invert :func:`pack_weight`: [N, K] int8, bit for bit."""
    return weight_blocked.to_dense().t().contiguous()


@torch.library.register_fake("torchq::w8a8_int8_cpu_unpack")
def _(weight_blocked):
    return torch.empty(weight_blocked.shape[1], weight_blocked.shape[0], dtype=torch.int8, device="cpu")


def w8a8_int8_cpu_ref(
    x: Tensor,
    weight_blocked: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Compute what :func:`w8a8_int8_cpu` computes, with the integer matmul in float64 (exact)."""
    weight = unpack_weight(weight_blocked)
    return w8a8_int8_ref(x, weight, weight_scale, input_scale, input_zero_point, bias)


@register_op("torchq::w8a8_int8_cpu")  # for all devices: to the dispatcher an opaque tensor is not on the CPU
def w8a8_int8_cpu(
    x: Tensor,
    weight_blocked: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    input_zero_point: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Quantize activations to int8 and multiply them by the transpose of an int8 weight in oneDNN's layout.

    Args:
        x: Activations, [..., K], float16, bfloat16 or float32; any strides.
        weight_blocked: [K, N] int8, opaque, from :func:`pack_weight`; 1 <= K <= 65793.
        weight_scale: [N, 1] or [1] floating point.
        input_scale: [1] floating point for static activations, None for dynamic ones (a scale per token).
        input_zero_point: [1] int8 for asymmetric static activations, or None.
        bias: [N], or None.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    k, n = weight_blocked.shape
    check_w8a8_int8_args(x, weight_blocked, (n, k), weight_scale, input_scale, input_zero_point, bias)
    tokens = x.reshape(-1, k)
    y = x.new_empty(*x.shape[:-1], n)
    if y.numel() == 0:
        return y
    rows_of_y = y.view(-1, n)
    channel_scale = weight_scale.float().flatten().expand(n).contiguous()
    zero_point = 0 if input_zero_point is None else int(input_zero_point)
    step = max(16, _OUTPUT_ELEMENTS // n)
    for start in range(0, tokens.shape[0], step):
        rows = slice(start, start + step)
        x_q, x_scale = quantize_activations(tokens[rows], input_scale, input_zero_point)
        scaled = _matmul(_unsigned(x_q), weight_blocked, channel_scale, zero_point)
        if bias is None:
            torch.mul(scaled, x_scale, out=rows_of_y[rows])
        else:
            rows_of_y[rows] = scaled.mul_(x_scale).add_(bias)
    return y


@torch.library.register_fake("torchq::w8a8_int8_cpu")
def _(x, weight_blocked, weight_scale, input_scale, input_zero_point, bias):
    return x.new_empty(*x.shape[:-1], weight_blocked.shape[1])


@register_op("torchq::w8a8_int8_cpu_input_grad")
def w8a8_int8_cpu_input_grad(
    grad_y: Tensor, weight_blocked: Tensor, weight_scale: Tensor, input_scale: Tensor | None, input_zero_point: Tensor | None
) -> Tensor:
    """Return the gradient [..., K] of activations, as if they were not rounded, from grad_y [..., N]."""
    weight = unpack_weight(weight_blocked)
    return torch.ops.torchq.w8a8_int8_input_grad.default(grad_y, weight, weight_scale, input_scale, input_zero_point)


@torch.library.register_fake("torchq::w8a8_int8_cpu_input_grad")
def _(grad_y, weight_blocked, weight_scale, input_scale, input_zero_point):
    return grad_y.new_empty(*grad_y.shape[:-1], weight_blocked.shape[0])


def _unsigned(x_q: Tensor) -> Tensor:
    """Codes int8 -> codes + 128, uint8, in the same memory."""
    return x_q.view(torch.uint8).bitwise_xor_(0x80)


def _matmul(unsigned: Tensor, weight_blocked: Tensor, channel_scale: Tensor, zero_point: int) -> Tensor:
    """[M, K] uint8 codes + 128, K x N weight -> float32 (sums of (codes - zero_point) weight, exact in int32) channel_scale."""
    weight_zero_points = torch.zeros(channel_scale.shape[0], dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise.default(
        unsigned,
        1.0,
        128 + zero_point,
        weight_blocked,
        channel_scale,
        weight_zero_points,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "none",
    )
