"""Round-to-nearest with a scale search: the data-free algorithm.

Each group's scale (and zero point) minimises the squared error of the group; symmetric weight-only groups use the full signed
range (:func:`torchq.numerics.choose_qparams`). ``RTN(scale_search="absmax")`` is compressed-tensors' own rule, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq import numerics
from torchq.linear import QuantizedWeight
from torchq.scheme import Scheme

_CHUNK_VALUES = 1 << 24  # values rounded at a time, so that no float32 copy of a large layer is made


@dataclass(frozen=True)
class RTN:
    """Settings of round-to-nearest.

    Attributes:
        scale_search: ``"mse"`` (least squared error of each group) or ``"absmax"`` (compressed-tensors' rule).
    """

    scale_search: numerics.ScaleSearch = "mse"

    def __post_init__(self) -> None:
        if self.scale_search not in ("mse", "absmax"):
            raise ValueError(f"scale_search must be 'mse' or 'absmax', got {self.scale_search!r}")


@torch.no_grad()
def quantize_weight(weight: Tensor, scheme: Scheme, settings: RTN | None = None) -> tuple[QuantizedWeight, float]:
    """Quantize one weight.

    Args:
        weight: [N, K] finite, float16, bfloat16 or float32.
        scheme: How.
        settings: Scale search; ``RTN()`` by default.

    Returns:
        The quantized weight (scales in the weight's dtype) and its relative error ``|W - dequantized| / |W|`` (Frobenius).
    """
    settings, args = settings or RTN(), scheme.weights
    # Negative scales are for weight-only kernels: int8 activation kernels are free to assume positive ones.
    signed = scheme.input_activations is None
    scale, zero_point = numerics.choose_qparams(weight, args, settings.scale_search, signed=signed)
    q = torch.empty(weight.shape, dtype=torch.int8 if args.type == "int" else torch.float8_e4m3fn, device=weight.device)
    error = norm = 0.0
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    rows_per_scale = args.block_structure[0] if args.block_structure else 1
    step = -(-step // rows_per_scale) * rows_per_scale
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        scales, zeros = _rows(scale, rows, rows_per_scale), _rows(zero_point, rows, rows_per_scale)
        assert scales is not None
        chunk = weight[rows]
        if settings.scale_search == "mse":
            q[rows] = numerics.quantize(chunk.float(), scales.float(), zeros, args)
        else:
            q[rows] = numerics.quantize(chunk, scales, zeros, args)
        restored = numerics.dequantize(q[rows], scales, zeros, args).float()
        error += torch.linalg.vector_norm(restored - chunk, dtype=torch.float64).item() ** 2
        norm += torch.linalg.vector_norm(chunk, dtype=torch.float64).item() ** 2
    relative_error = (error / norm) ** 0.5 if norm else 0.0
    return QuantizedWeight(q, scale, zero_point, scheme), relative_error


def _rows(tensor: Tensor | None, rows: slice, rows_per_scale: int) -> Tensor | None:
    """Return the scales or zero points of a range of weight rows."""
    if tensor is None or tensor.ndim == 1:
        return tensor
    return tensor[rows.start // rows_per_scale : -(-rows.stop // rows_per_scale)]
