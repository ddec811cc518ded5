"""Sums over the inputs of a layer: what scale searches and second-order rounding need to know of the calibration data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_MOST_INT8_TOKENS = 1 << 16  # whose products int32 can sum
_BLOCK = 128, 512  # least and most rows of H at a time: only blocks on and above the diagonal are multiplied


class InputStatistics:
    """Sums over the tokens that Linears reading one tensor have seen.

    Sums are float32, and so are products, but for those of drift: devices that multiply bfloat16 take it for them, and round
    to it once for each micro-batch. (H, which is factorised, would not stay positive definite.)

    Unless it must be exact, H is that of rounded inputs, and stays positive semidefinite: of TF32 on CUDA (16-bit
    inputs are that already; its gain is not yet measured), and on CPUs that multiply int8 of int8, with a scale for each
    channel of a micro-batch (docs/calibration.md has the gain). That adds noise of (absmax / root mean square)^2 / 193,548 to a
    channel's mean square: 0.03 % for an absmax of 8, an order below the least damping. Tokens far larger than the rest count
    exactly.

    Attributes:
        H: [K, K] float32, the sum (never a running mean) of x xT. Complete after :meth:`finish`.
        drift: [K, K] float32, the sum of (r - x) xT over the tokens whose input r in the model before quantization was given, or
            None if there are none.
        drift_H: [K, K] float32, the sum of x xT over these tokens, or None.
        drift_tokens: How many these are.
        low: [K] float32, the least value of each channel; 0 if none is negative.
        high: [K] float32, the greatest; 0 if none is positive.
        num_tokens: Tokens summed.

    Args:
        in_features: K.
        device: Where to sum.
        exact: Whether inputs count to their last bit. If not, they are rounded where the device multiplies that faster.
        sampled: How many tokens of each call of :meth:`add` are kept.
    """

    def __init__(self, in_features: int, device: torch.device | str, *, exact: bool = True, sampled: int = 0) -> None:
        self.exact, self.sampled = exact, sampled
        self._sample: list[Tensor] = []
        self.H = torch.zeros(in_features, in_features, device=device)
        self.drift: Tensor | None = None
        self.drift_H: Tensor | None = None
        self.low, self.high = torch.zeros(in_features, device=device), torch.zeros(in_features, device=device)
        self.num_tokens = self.drift_tokens = 0

    @torch.no_grad()
    def add(self, x: Tensor, mask: Tensor | None = None, reference: Tensor | None = None) -> None:
        """Add tokens.

        Args:
            x: [..., K] floating point.
            mask: bool of x's leading shape: which tokens count. None: all.
            reference: Of x's shape and dtype: the same tokens' inputs before quantization.
        """
        tokens = self._counted(x, mask)
        if tokens.shape[0] == 0:
            return
        H = self.H
        if reference is not None:
            H = self._add_drift(tokens, self._counted(reference, mask))
        k = H.shape[0]
        step = min(max(-(-k // 6), _BLOCK[0]), _BLOCK[1])
        # the upper triangle, by rows of blocks: not much more than half the work
        blocks = [slice(start, min(start + step, k)) for start in range(0, k, step)]
        if not self.exact and _multiplies_int8(tokens.device):
            for some in tokens.split(_MOST_INT8_TOKENS):
                _add_int8_products(H, some, blocks)
        else:
            with _tf32(tokens.device, self.exact):
                _add_products(H, tokens.float(), blocks)
        torch.maximum(self.high, tokens.amax(0).float(), out=self.high)
        torch.minimum(self.low, tokens.amin(0).float(), out=self.low)
        if self.sampled:
            self._sample.append(tokens[:: -(-tokens.shape[0] // self.sampled)].float())
        self.num_tokens += tokens.shape[0]

    def _add_drift(self, tokens: Tensor, reference: Tensor) -> Tensor:
        """Return where these tokens' products belong, to be added to H in the end."""
        if self.drift is None or self.drift_H is None:
            self.drift, self.drift_H = torch.zeros_like(self.H), torch.zeros_like(self.H)
        difference = reference.float() - tokens
        if multiplies_bfloat16(tokens.device):
            self.drift += difference.bfloat16().t() @ tokens.bfloat16()
        else:
            self.drift.addmm_(difference.t(), tokens.float())
        self.drift_tokens += tokens.shape[0]
        return self.drift_H

    def _counted(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The tokens that count, [tokens, K]."""
        tokens = x.reshape(-1, x.shape[-1])
        if mask is not None:
            tokens = tokens[mask.reshape(-1).to(tokens.device)]
        return tokens.to(self.H.device)

    def finish(self) -> None:
        """Complete H: its lower triangle, and the tokens with drift."""
        if self.drift_H is not None:
            _mirror(self.drift_H)
            self.H += self.drift_H
        _mirror(self.H)

    def rescale_(self, scale: Tensor) -> None:
        """Divide all inputs, as summed and sampled, by ``scale`` [K]."""
        outer = scale.reciprocal().unsqueeze(1) * scale.reciprocal()
        for matrix in (self.H, self.drift, self.drift_H):
            if matrix is not None:
                matrix *= outer
        self.low, self.high = self.low / scale, self.high / scale
        self._sample = [tokens / scale for tokens in self._sample]

    @property
    def absmax(self) -> Tensor:
        """Largest magnitude of each channel, [K]."""
        return torch.maximum(self.high, -self.low)

    @property
    def sample(self) -> Tensor:
        """The tokens that were kept, [T, K] float32."""
        return torch.cat(self._sample) if self._sample else self.low.new_zeros(0, len(self.low))

    @property
    def mean_square(self) -> Tensor:
        """E[x^2] of each channel, [K]."""
        return self.H.diagonal() / max(self.num_tokens, 1)


def _mirror(H: Tensor) -> None:
    """Fill the lower triangle from the upper one."""
    k, step = H.shape[0], _BLOCK[1]
    for start in range(0, k, step):
        stop = start + step
        H[start:stop, :start] = H[:start, start:stop].t()
        square = H[start:stop, start:stop]
        square.copy_(square.triu() + square.triu(1).t())


def _add_products(H: Tensor, x: Tensor, blocks: list[slice]) -> None:
    for block in blocks:
        H[block, block.start :].addmm_(x[:, block].t(), x[:, block.start :])


def _add_int8_products(H: Tensor, x: Tensor, blocks: list[slice]) -> None:
    """Of x [T, K] rounded to 8 bits; tokens with a value 8 times most tokens' largest count exactly."""
    largest = _largest(x, 1)
    massive = (largest > 8 * largest.median()).nonzero().squeeze(1)
    if len(massive):
        _add_products(H, x[massive].float(), blocks)
        x = x.index_fill(0, massive, 0.0)
    scale = _largest(x, 0).div_(127)
    codes = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    for block in blocks:
        product = torch._int_mm(codes[:, block].t(), codes[:, block.start :])
        H[block, block.start :].addcmul_(product * scale[block.start :], scale[block].unsqueeze(1))


def _largest(x: Tensor, dim: int) -> Tensor:
    """Largest magnitudes, float32, without a copy of x."""
    return torch.maximum(x.amax(dim), -x.amin(dim)).float()


@contextmanager
def _tf32(device: torch.device, exact: bool) -> Iterator[None]:
    """TF32 for float32 products on CUDA, unless they must be exact."""
    if exact or device.type != "cuda":
        yield
        return
    backend = torch.backends.cuda.matmul
    before, backend.fp32_precision = backend.fp32_precision, "tf32"
    try:
        yield
    finally:
        backend.fp32_precision = before


@cache
def _multiplies_int8(device: torch.device) -> bool:
    """Whether a CPU has instructions for it, and PyTorch the library that takes them (else its loop is slow)."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


@cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
