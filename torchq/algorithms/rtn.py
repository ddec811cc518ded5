"""Round-to-nearest with a scale search: the data-free algorithm.

Each group's scale (and zero point) minimises the error of the group; symmetric weight-only groups use the full signed
range (:func:`torchq.numerics.choose_qparams`). ``RTN(scale_search="absmax")`` is compressed-tensors' own rule, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq import numerics
from torchq.kernels import nf4
from torchq.linear import QuantizedWeight
from torchq.scheme import Scheme

_CHUNK_VALUES = 1 << 24  # values rounded at a time, so that no float32 copy of a large layer is made
_NF4_VALUES = 1 << 20  # the same for NF4: in the caches that takes half the time


@dataclass(frozen=True)
class RTN:
    """Settings of round-to-nearest.

    Attributes:
        scale_search: ``"mse"`` (least error of each group) or ``"absmax"`` (compressed-tensors' rule).
        norm: The error is the sum of ``|error| ** norm``, at least 1. None: 2 where calibration data says how much each column
            counts, else 3: outputs suffer more from large weights that are clipped than squares say.
    """

    scale_search: numerics.ScaleSearch = "mse"
    norm: float | None = None

    def __post_init__(self) -> None:
        if self.scale_search not in ("mse", "absmax"):
            raise ValueError(f"scale_search must be 'mse' or 'absmax', got {self.scale_search!r}")
        if self.norm is not None and not 1 <= self.norm < float("inf"):
            raise ValueError(f"norm must be at least 1 and finite, or None, got {self.norm!r}")

    def norm_for(self, calibrated: bool) -> float:
        """The norm that counts; ``calibrated``: whether there is calibration data."""
        return self.norm if self.norm is not None else (2.0 if calibrated else 3.0)


def signed_scales(scheme: Scheme) -> bool:
    """Whether scales may be negative: weight-only kernels take them, int8 activation kernels are free to assume positive ones."""
    return scheme.input_activations is None


@torch.no_grad()
def quantize_weight(
    weight: Tensor,
    scheme: Scheme,
    settings: RTN | None = None,
    importance: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> tuple[QuantizedWeight, float]:
    """Quantize one weight.

    Args:
        weight: [N, K] finite, float16, bfloat16 or float32.
        scheme: How.
        settings: Scale search; ``RTN()`` by default.
        importance: [K], weight of each column's error in the search, such as the mean square of its inputs.
        scale_dtype: dtype of the scales; the weight's by default.

    Returns:
        The quantized weight and its relative error ``|W - dequantized| / |W|`` (Frobenius).
    """
    settings, args = settings or RTN(), scheme.weights
    if args.type == "nf":
        return _quantize_nf4(weight, scheme)
    signed = signed_scales(scheme)
    norm = settings.norm_for(importance is not None)
    scale, zero_point = numerics.choose_qparams(
        weight, args, settings.scale_search, scale_dtype, signed=signed, importance=importance, norm=norm
    )
    q = torch.empty(weight.shape, dtype=torch.int8 if args.type == "int" else torch.float8_e4m3fn, device=weight.device)
    quantized = QuantizedWeight(q, scale, zero_point, scheme)
    for chunk, codes, scales, zeros in _chunks(weight, quantized):
        if settings.scale_search == "mse":
            codes.copy_(numerics.quantize(chunk.float(), scales.float(), zeros, args))
        else:
            codes.copy_(numerics.quantize(chunk, scales, zeros, args))
    return quantized, relative_error(weight, quantized)


def _quantize_nf4(weight: Tensor, scheme: Scheme) -> tuple[QuantizedWeight, float]:
    """NF4 has one rule, bitsandbytes': absmax of each block, and the nearest level. Some blocks at a time."""
    size, flat = scheme.weights.group_size, weight.reshape(-1)
    assert size is not None
    step = max(min(_CHUNK_VALUES, _NF4_VALUES) // size, 1) * size
    parts = [nf4.nf4_quantize_ref(flat[start : start + step], size) for start in range(0, flat.numel(), step)]
    q = nf4.unpack_codes(torch.cat([packed for packed, _ in parts]), flat.numel()).view(weight.shape)
    nested = nf4.compress_absmax(torch.cat([absmax for _, absmax in parts]))
    quantized = QuantizedWeight(q, nf4.decompress_absmax(*nested)[:, None], None, scheme, nested=nested)
    return quantized, relative_error(weight, quantized)


def relative_error(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Return ``|W - dequantized| / |W|`` (Frobenius) of a weight [N, K]."""
    error = norm = 0.0
    for chunk, codes, scales, zeros in _chunks(weight, quantized):
        restored = numerics.dequantize(codes, scales, zeros, quantized.scheme.weights).float()
        error += torch.linalg.vector_norm(restored - chunk, dtype=torch.float64).item() ** 2
        norm += torch.linalg.vector_norm(chunk, dtype=torch.float64).item() ** 2
    return (error / norm) ** 0.5 if norm else 0.0


def _chunks(weight: Tensor, quantized: QuantizedWeight) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield ranges of rows with their codes, scales and zero points.

    They are of whole blocks where scales are per block. Blocks of NF4 run on over the ends of rows: there all is one row.
    """
    q, args = quantized.q, quantized.scheme.weights
    rows_per_scale = args.block_structure[0] if args.block_structure else 1
    step = -(-max(1, _CHUNK_VALUES // q.shape[1]) // rows_per_scale) * rows_per_scale
    if args.type == "nf":
        assert args.group_size is not None
        weight, q, rows_per_scale = weight.reshape(-1), q.view(-1), args.group_size
        step = max(min(_CHUNK_VALUES, _NF4_VALUES) // rows_per_scale, 1) * rows_per_scale
    for start in range(0, q.shape[0], step):
        rows = slice(start, min(start + step, q.shape[0]))
        scales = _rows(quantized.scale, rows, rows_per_scale)
        assert scales is not None
        chunk, codes = (part if part.ndim == 2 else part[None] for part in (weight[rows], q[rows]))
        yield chunk, codes, scales, _rows(quantized.zero_point, rows, rows_per_scale)


def _rows(tensor: Tensor | None, rows: slice, rows_per_scale: int) -> Tensor | None:
    """Return the scales or zero points of a range of weight rows."""
    if tensor is None or tensor.ndim == 1:
        return tensor
    return tensor[rows.start // rows_per_scale : -(-rows.stop // rows_per_scale)]
