"""Sums over the inputs of a layer: what scale searches and second-order rounding need to know of the calibration data."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 512  # columns of H at a time: only blocks on and above the diagonal are multiplied


class InputStatistics:
    """Sums over the tokens that Linears reading one tensor have seen.

    Attributes:
        H: [K, K] float32, the sum (never a running mean) of x xT. The lower triangle is filled by :meth:`finish`.
        absmax: [K] float32, largest magnitude of each channel.
        num_tokens: Tokens summed.
    """

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        self.H = torch.zeros(in_features, in_features, device=device)
        self.absmax = torch.zeros(in_features, device=device)
        self.num_tokens = 0

    @torch.no_grad()
    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add tokens.

        Args:
            x: [..., K] floating point.
            mask: bool of x's leading shape: which tokens count. None: all.
        """
        tokens = x.reshape(-1, x.shape[-1])
        if mask is not None:
            tokens = tokens[mask.reshape(-1).to(tokens.device)]
        tokens = tokens.to(self.H.device, torch.float32)
        if tokens.shape[0] == 0:
            return
        k = self.H.shape[0]
        for start in range(0, k, _BLOCK):  # the upper triangle, by rows of blocks: half the work
            rows = slice(start, start + _BLOCK)
            self.H[rows, start:].addmm_(tokens[:, rows].t(), tokens[:, start:])
        torch.maximum(self.absmax, tokens.abs().amax(0), out=self.absmax)
        self.num_tokens += tokens.shape[0]

    def finish(self) -> None:
        """Fill the lower triangle of H from the upper one."""
        k = self.H.shape[0]
        for start in range(_BLOCK, k, _BLOCK):
            self.H[start : start + _BLOCK, :start] = self.H[:start, start : start + _BLOCK].t()

    @property
    def mean_square(self) -> Tensor:
        """E[x^2] of each channel, [K]."""
        return self.H.diagonal() / max(self.num_tokens, 1)
