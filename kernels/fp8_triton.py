"""fp8 (e4m3) weights in words on GPUs: weight-only, or with activations rounded to fp8 where the GPU cannot multiply fp8 itself.

Shapes: M tokens, N out_features, K in_features, G = K / group_size (1 for scales per row, K / 128 for blocks of 128 columns).

    y[m, n] = sum_k x[m, k] * fp8(word)[n, k] * scale[k // group_size, n] + bias[n]

where x is rounded to fp8 and multiplied by its own scales first, if it has any (:func:`torchq.kernels.fp8.round_activations`).
Layout and kernels: :mod:`torchq.kernels.words_triton`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.fp8 import round_activations
from torchq.kernels.registration import register_op
from torchq.kernels.wna16_triton import check_words
from torchq.kernels.words_linear import input_grad_words, linear_words
from torchq.kernels.words_triton import dequantize_words_ref


def fp8_triton_ref(
    x: Tensor, words: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None, group_size: int, dynamic_group: int
) -> Tensor:
    """Compute what :func:`fp8_triton` computes, in plain PyTorch, on any device."""
    weight = dequantize_words_ref(words, scale, None, 8, group_size, x.shape[-1], x.dtype, fp8=True)
    return F.linear(_rounded(x, input_scale, dynamic_group), weight, bias)


def _rounded(x: Tensor, input_scale: Tensor | None, dynamic_group: int) -> Tensor:
    """Activations as a multiplication in fp8 would see them, in their own dtype."""
    return x if input_scale is None and dynamic_group < 0 else round_activations(x, input_scale, dynamic_group)


@register_op("torchq::fp8_triton")
def fp8_triton(
    x: Tensor, words: Tensor, scale: Tensor, input_scale: Tensor | None, bias: Tensor | None, group_size: int, dynamic_group: int
) -> Tensor:
    """Multiply activations, as they are or rounded to fp8, by the transpose of an fp8 weight in words.

    Args:
        x: Activations, [..., K], float16, bfloat16, float32 or float64; any strides.
        words: [K / 64, N, 16] int32: :func:`torchq.kernels.words_triton.pack_fp8` of the weight.
        scale: [G, N] floating point.
        input_scale: [1], the static activation scale, or None.
        bias: [N] of x's dtype, or None.
        group_size: Weights along K that share a scale, a multiple of 32 or K.
        dynamic_group: Activations per dynamic scale: 0 for a whole token, > 0 for groups along K, -1 for none.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: If a shape or dtype doesn't fit the above.
    """
    check_words(x, words, scale, None, bias, 8, group_size)
    if input_scale is not None and (input_scale.shape != (1,) or dynamic_group >= 0):
        raise ValueError(
            f"input_scale must be [1] with dynamic_group=-1 (static activations), got {list(input_scale.shape)} with "
            f"dynamic_group={dynamic_group}"
        )
    if dynamic_group > 0 and x.shape[-1] % dynamic_group:
        raise ValueError(f"dynamic_group must divide {x.shape[-1]} in_features, got {dynamic_group}")
    return linear_words(_rounded(x, input_scale, dynamic_group), words, scale, None, bias, 8, group_size, fp8=True)


@torch.library.register_fake("torchq::fp8_triton")
def _(x, words, scale, input_scale, bias, group_size, dynamic_group):
    return x.new_empty(*x.shape[:-1], words.shape[1])


@register_op("torchq::fp8_triton_input_grad")
def fp8_triton_input_grad(
    grad_y: Tensor, words: Tensor, scale: Tensor, input_scale: Tensor | None, group_size: int, dynamic_group: int
) -> Tensor:
    """Return the gradient [..., K] of activations, as if they were not rounded, from grad_y [..., N]; see :func:`fp8_triton`."""
    return input_grad_words(grad_y, words, scale, None, 8, group_size, fp8=True)


@torch.library.register_fake("torchq::fp8_triton_input_grad")
def _(grad_y, words, scale, input_scale, group_size, dynamic_group):
    return grad_y.new_empty(*grad_y.shape[:-1], scale.shape[0] * group_size)
