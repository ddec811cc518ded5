"""fp8 (e4m3) matmul: fp8 weights, with activations rounded to fp8 (dynamic or static) or left as they are.

Shapes: M tokens, N out_features, K in_features. With x_q = fp8(clamp(x / x_scale, -448, 448)) and weights per tensor or channel,

    y[m, n] = x_scale[m] * weight_scale[n] * sum_k x_q[m, k] * weight[n, k] + bias[n]

Block weights (one scale per 128 x 128) are dequantized to scale's dtype, and each group of 128 activations has its own scale.
Dynamic scales are absmax / 448; a token or group of zeros has scale 1. fp8 values are exact in bfloat16 and float16.

CPU: the weight is decoded with integer operations, a cache-sized tile at a time: PyTorch's own fp8 cast and
``_scaled_mm`` are many times slower there. CUDA: ``torch._scaled_mm`` on processors with fp8 (sm_89 and newer), else
dequantize + matmul.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.linear import input_grad, linear
from torchq.kernels.registration import register_op

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_TILE_BYTES = 1 << 22  # of decoded weights at a time on a CPU, whose last-level cache holds them


def fp8_linear_ref(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_group: int,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """Compute what :func:`fp8_linear` computes with one whole dequantized weight and plain casts, on any device."""
    tokens = x.reshape(-1, x.shape[-1])
    w = weight.to(torch.float32)
    if block_rows:
        expanded = weight_scale.float().repeat_interleave(block_rows, 0)[: w.shape[0]]
        scale = expanded.repeat_interleave(block_columns, 1)[:, : w.shape[1]]
    else:
        scale = weight_scale.float().reshape(-1, 1)
    activations = tokens.float()
    if input_scale is not None or dynamic_group >= 0:
        x_q, x_scale = quantize_activations(tokens, input_scale, dynamic_group)
        activations = (x_q.float().unflatten(1, (x_scale.shape[-1], -1)) * x_scale.unsqueeze(-1)).flatten(1)
    y = F.linear(activations, w * scale, None if bias is None else bias.float())
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def quantize_activations(tokens: Tensor, input_scale: Tensor | None, dynamic_group: int) -> tuple[Tensor, Tensor]:
    """Quantize tokens [M, K] to fp8: (values [M, K], scales float32 [M, 1], [M, K / dynamic_group], or [1, 1] static)."""
    values = tokens.float()
    groups = values.unflatten(1, (-1, dynamic_group)) if dynamic_group > 0 else values.unsqueeze(1)
    if input_scale is None:
        scale = groups.abs().amax(dim=-1).div_(FP8_MAX)
        scale = torch.where(scale == 0, 1.0, scale)
    else:
        scale = input_scale.float().reshape(1, 1)
    return (groups / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).flatten(1).to(FP8), scale


def round_activations(x: Tensor, input_scale: Tensor | None, dynamic_group: int) -> Tensor:
    """Activations [..., K] rounded to fp8 and multiplied by their scales again, in their own dtype."""
    values, scale = quantize_activations(x.reshape(-1, x.shape[-1]), input_scale, dynamic_group)
    scaled = values.float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)
    return scaled.to(x.dtype).view(x.shape)


@register_op("torchq::fp8_linear")
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_group: int,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """Multiply activations, as they are or rounded to fp8, by the transpose of an fp8 weight.

    Args:
        x: Activations, [..., K], float16, bfloat16 or float32; any strides.
        weight: [N, K] float8_e4m3fn.
        weight_scale: [1] (tensor), [N, 1] (channel) or [ceil(N / block_rows), ceil(K / block_columns)] (block).
        input_scale: [1], the static activation scale, or None.
        bias: [N] of x's dtype, or None.
        dynamic_group: Activations per dynamic scale: 0 for a whole token, > 0 for groups along K, -1 for none (weight-only if
            ``input_scale`` is None too).
        block_rows: Rows of a weight block, 0 unless scales are per block.
        block_columns: Columns of a weight block, 0 unless scales are per block.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    _check_fp8_args(x, weight, weight_scale, input_scale, bias, dynamic_group, block_rows, block_columns)
    tokens = x.reshape(-1, x.shape[-1])
    quantized = input_scale is not None or dynamic_group >= 0
    x_scale: Tensor | None = None
    if quantized:
        tokens, x_scale = quantize_activations(tokens, input_scale, dynamic_group)
    if x_scale is not None and not block_rows and tokens.numel() and has_scaled_mm(x.device, *weight.shape):
        y = _scaled_mm(tokens, x_scale, weight, weight_scale, x.dtype)
        y = y if bias is None else y + bias
    else:
        y = _tiled_matmul(tokens, x_scale, weight, weight_scale, bias, block_rows, block_columns, x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("torchq::fp8_linear")
def _(x, weight, weight_scale, input_scale, bias, dynamic_group, block_rows, block_columns):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@register_op("torchq::fp8_linear_input_grad")
def fp8_linear_input_grad(
    grad_y: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    dynamic_group: int,
    block_rows: int,
    block_columns: int,
) -> Tensor:
    """Return the gradient [..., K] of activations, as if they were not rounded, from grad_y [..., N]; see :func:`fp8_linear`."""
    n, k = weight.shape
    by_row = weight_scale.repeat_interleave(block_rows, 0)[:n] if block_rows else weight_scale.reshape(-1, 1)

    def part(grads: Tensor, columns: slice) -> Tensor:
        scale = by_row
        if block_rows:
            blocks = slice(columns.start // block_columns, -(-columns.stop // block_columns))
            scale = by_row[:, blocks].repeat_interleave(block_columns, 1)[:, : columns.stop - columns.start]
        return linear(grads, (decode_fp8(weight[:, columns], scale.dtype) * scale).to(grads.dtype).t())

    return input_grad(grad_y, k, block_columns or 1, part)


@torch.library.register_fake("torchq::fp8_linear_input_grad")
def _(grad_y, weight, weight_scale, input_scale, dynamic_group, block_rows, block_columns):
    return grad_y.new_empty(*grad_y.shape[:-1], weight.shape[1])


def has_scaled_mm(device: torch.device, n: int, k: int) -> bool:
    """Whether a device multiplies fp8 by fp8, with a weight [N, K]."""
    if device.type != "cuda" or n % 16 or k % 16:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def _scaled_mm(tokens: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Row-wise scaled fp8 matmul. torch wants both scales per row or both per tensor, and bfloat16 out for rows."""
    rows = x_scale.expand(tokens.shape[0], 1).contiguous()
    columns = weight_scale.float().reshape(1, -1).expand(1, weight.shape[0]).contiguous()
    return torch._scaled_mm(tokens, weight.t(), rows, columns, out_dtype=torch.bfloat16).to(dtype)


def _tiled_matmul(
    tokens: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    block_rows: int,
    block_columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Decode the weight a tile of rows at a time and multiply; scales on the output where they are per row.

    Sums of unscaled fp8 values overflow float16: there a CPU, whose float16 matmul is slow anyway, computes in float32, and
    other devices scale the operands.
    """
    (m, k), n = tokens.shape, weight.shape[0]
    on_cpu = tokens.device.type == "cpu"
    compute = torch.float32 if dtype == torch.float16 and on_cpu else dtype
    per_row = compute != torch.float16 and x_scale is not None and x_scale.shape[1] == 1
    if x_scale is None or per_row:
        values = tokens.to(compute)
    else:
        values = (tokens.float().unflatten(1, (x_scale.shape[1], -1)) * x_scale.unsqueeze(-1)).flatten(1).to(compute)
    y = torch.empty(m, n, dtype=dtype, device=tokens.device)
    step = max(1, _TILE_BYTES // (compute.itemsize * max(k, 1)))
    if block_rows:
        step = max(1, step // block_rows) * block_rows
    if not on_cpu:
        step = n
    for start in range(0, n, max(step, 1)):
        rows = slice(start, min(start + step, n))
        tile = decode_fp8(weight[rows], compute)
        if block_rows:
            scale = weight_scale[start // block_rows : -(-rows.stop // block_rows)].repeat_interleave(block_rows, 0)
            tile *= scale[: rows.stop - start].repeat_interleave(block_columns, 1)[:, :k].to(compute)
            acc = linear(values, tile).float()
        else:
            scale = weight_scale if weight_scale.numel() == 1 else weight_scale[rows]
            if compute == torch.float16:
                acc = linear(values, tile.mul_(scale.to(compute).reshape(-1, 1))).float()
            else:
                acc = linear(values, tile).float() * scale.float().reshape(1, -1)
        if per_row and x_scale is not None:
            acc *= x_scale
        if bias is not None:
            acc += bias[rows]
        y[:, rows] = acc
    return y


def decode_fp8(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return e4m3 values in ``dtype`` (bfloat16, float16 or float32), exactly. NaN codes are not expected (they read +-480).

    On a CPU: the sign goes to bit 15 and the other bits to where bfloat16 has the low exponent bits and the mantissa, which
    is the value times 2^-120.
    """
    if weight.device.type != "cpu":
        return weight.to(dtype)
    bits = weight.view(torch.int8).to(torch.int16)
    bits = torch.bitwise_left_shift(bits, 4).bitwise_and_(-0x7810)  # 0x87F0: sign, 4 exponent bits, 3 mantissa bits
    if dtype == torch.float32:
        return bits.view(torch.bfloat16).to(dtype).mul_(2.0**120)
    return bits.view(torch.bfloat16).mul_(2.0**120).to(dtype)


def _check_fp8_args(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    dynamic_group: int,
    block_rows: int,
    block_columns: int,
) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"x must be floating point with 16 or more bits, got {x.dtype}; where the model casts to this layer's "
            "weight.dtype, add the layer to ignore"
        )
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a 0-D tensor")
    k = x.shape[-1]
    if weight.dtype != FP8 or weight.ndim != 2 or weight.shape[1] != k:
        raise ValueError(f"weight must be {FP8} [N, {k}], got {weight.dtype} {list(weight.shape)}")
    n = weight.shape[0]
    if (block_rows > 0) != (block_columns > 0):
        raise ValueError(f"block_rows and block_columns go together, got {block_rows} and {block_columns}")
    shapes = [(-(-n // block_rows), -(-k // block_columns))] if block_rows else [(n, 1), (1,)]
    if weight_scale.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"weight_scale must be {expected}, got {list(weight_scale.shape)}")
    if input_scale is not None and (input_scale.shape != (1,) or dynamic_group >= 0):
        raise ValueError(
            f"input_scale must be [1] with dynamic_group=-1 (static activations), got {list(input_scale.shape)} with "
            f"dynamic_group={dynamic_group}"
        )
    if dynamic_group > 0 and k % dynamic_group:
        raise ValueError(f"dynamic_group must divide {k} in_features, got {dynamic_group}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], got {list(bias.shape)}")
