"""Products with weights in words (:mod:`torchq.kernels.words_triton`), by the number of tokens, and gradients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from torchq.kernels.dispatch import num_splits, tile_for, uses_asm
from torchq.kernels.linear import input_grad, stretches
from torchq.kernels.words_triton import block_size, dequantize_words, kind_of, matmul_words


def linear_words(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    *,
    fp8: bool = False,
) -> Tensor:
    """[..., K] -> [..., N]: few 16-bit tokens by the kernel that decodes in registers, others with a dequantized weight."""
    k, n = x.shape[-1], words.shape[1]
    bias = None if bias is None else bias.contiguous()
    tokens = x.reshape(-1, k)
    if tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    m = tokens.shape[0]
    if m == 0 or n == 0:
        return x.new_empty(*x.shape[:-1], n)
    tile = None if x.dtype.itemsize > 2 else tile_for(x.device, kind_of(num_bits, group_size, zero_point is not None), m)
    if tile is not None:
        splits = num_splits(x.device, tile, m, n, words.shape[0])
        arguments = (tokens, words, scale, zero_point, bias, num_bits, group_size, tile, splits)
        y = matmul_words(*arguments, fp8=fp8, asm=uses_asm(x.device))
    else:
        y = dequantize_and_multiply(tokens, words, scale, zero_point, bias, num_bits, group_size, fp8=fp8)
    return y.view(*x.shape[:-1], n).to(x.dtype)  # autocast reaches F.linear


def dequantize_and_multiply(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bias: Tensor | None,
    num_bits: int,
    group_size: int,
    *,
    fp8: bool = False,
) -> Tensor:
    """Tokens [M, K] -> [M, N], some rows of the weight at a time."""
    k, n = x.shape[1], words.shape[1]
    y = x.new_empty(x.shape[0], n)
    for rows in stretches(n, k, 128, x.device):
        weight = dequantize_words(words, scale, zero_point, num_bits, group_size, k, x.dtype, rows, fp8=fp8)
        part = F.linear(x, weight, None if bias is None else bias[rows])
        if part.shape[1] == n:
            return part
        y[:, rows] = part
    return y


def input_grad_words(
    grad_y: Tensor, words: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, group_size: int, *, fp8: bool = False
) -> Tensor:
    """grad_y [..., N] @ weight: [..., K]."""
    k = scale.shape[0] * group_size

    def part(grads: Tensor, columns: slice) -> Tensor:
        arguments = (words, scale, zero_point, num_bits, group_size, k, grads.dtype)
        return grads @ dequantize_words(*arguments, columns=columns, fp8=fp8)

    return input_grad(grad_y, k, block_size(num_bits), part)
