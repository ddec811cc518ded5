"""Weight-only integer matmul on GPUs: 16-bit activations times 2-, 4- or 8-bit weights in words.

Shapes: M tokens, N out_features, K in_features, G = K / group_size.

    y[m, n] = sum_k x[m, k] w[n, k] + bias[n]
    w[n, k] = (code[n, k] - zero_point[k // group_size, n]) * scale[k // group_size, n]

Layout and kernels: :mod:`torchq.kernels.words_triton`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.registration import register_op
from torchq.kernels.words_linear import input_grad_words, linear_words
from torchq.kernels.words_triton import NUM_BITS, SLICE, WORDS, block_size, can_hold, dequantize_words_ref


def wna16_triton_ref(
    x: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int, group_size: int
) -> Tensor:
    """Compute what :func:`wna16_triton` computes, in plain PyTorch, on any device."""
    weight = dequantize_words_ref(words, scale, zero_point, num_bits, group_size, x.shape[-1], x.dtype)
    return F.linear(x, weight, bias)


@register_op("torchq::wna16_triton")
def wna16_triton(
    x: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int, group_size: int
) -> Tensor:
    """Multiply activations by the transpose of a weight in words.

    Few tokens are multiplied by weights decoded in registers; for many the weight is dequantized, a stretch of rows at a time,
    and multiplied by the library's kernel, as wider activations always are.

    Args:
        x: Activations, [..., K], float16, bfloat16, float32 or float64; any strides.
        words: [K / block, N, 16] int32, from :func:`pack_words`.
        scale: [G, N] floating point, finite and nonzero; may be negative.
        zero_point: [G, N] int8, or None (symmetric).
        bias: [N] of x's dtype, or None.
        num_bits: 2, 4 or 8.
        group_size: Weights along K that share a scale, a multiple of 32 or K.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    check_words(x, words, scale, zero_point, bias, num_bits, group_size)
    return linear_words(x, words, scale, zero_point, bias, num_bits, group_size)


@torch.library.register_fake("torchq::wna16_triton")
def _(x, words, scale, zero_point, bias, num_bits, group_size):
    return x.new_empty(*x.shape[:-1], words.shape[1])


@register_op("torchq::wna16_triton_input_grad")
def wna16_triton_input_grad(
    grad_y: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, group_size: int
) -> Tensor:
    """Return the gradient [..., K] of activations from that of outputs, grad_y [..., N]; the rest as for :func:`wna16_triton`."""
    return input_grad_words(grad_y, words, scale, zero_point, num_bits, group_size)


@torch.library.register_fake("torchq::wna16_triton_input_grad")
def _(grad_y, words, scale, zero_point, num_bits, group_size):
    return grad_y.new_empty(*grad_y.shape[:-1], scale.shape[0] * group_size)


def check_words(
    x: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, num_bits: int, group_size: int
) -> None:
    """Raise ValueError for arguments that do not fit together."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"x must be floating point with 16 or more bits, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError("x must be [..., K], got a 0-D tensor")
    if num_bits not in NUM_BITS:
        raise ValueError(f"num_bits must be one of {NUM_BITS}, got {num_bits}")
    k = x.shape[-1]
    blocks = -(-k // block_size(num_bits))
    if words.dtype != torch.int32 or words.ndim != 3 or words.shape[0] != blocks or words.shape[2] != WORDS:
        got = f"{words.dtype} {list(words.shape)}"
        raise ValueError(f"words must be int32 [{blocks}, N, {WORDS}] for {k} in_features at {num_bits} bits, got {got}")
    n = words.shape[1]
    if group_size <= 0 or k % group_size or not can_hold(num_bits, group_size, k):
        raise ValueError(f"group_size must be a multiple of {SLICE} that divides in_features={k}, or {k}, got {group_size}")
    if scale.shape != (k // group_size, n) or not scale.dtype.is_floating_point:
        raise ValueError(f"scale must be floating point [{k // group_size}, {n}], got {scale.dtype} {list(scale.shape)}")
    if zero_point is not None and (zero_point.shape != scale.shape or zero_point.dtype != torch.int8):
        raise ValueError(f"zero_point must be int8 {list(scale.shape)}, got {zero_point.dtype} {list(zero_point.shape)}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} [{n}], as x, got {bias.dtype} {list(bias.shape)}")
    for name, tensor in (("words", words), ("scale", scale), ("zero_point", zero_point), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}: move one of them, .to({str(x.device)!r})")
    for name, tensor in (("words", words), ("scale", scale), ("zero_point", zero_point)):
        if tensor is not None and tensor.numel() and not tensor[0].is_contiguous():
            raise ValueError(f"{name} must be contiguous but for its first dimension, got strides {tensor.stride()}")
    if zero_point is not None and zero_point.stride(0) != scale.stride(0):
        raise ValueError(f"zero_point must have the strides of scale, {scale.stride()}, got {zero_point.stride()}")
