"""QuantizedWeight: a weight that an algorithm has quantized; and the tensors of which a quantized layer consists."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq import numerics
from torchq.kernels import nf4
from torchq.packing import packed_words
from torchq.scheme import Scheme


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight: what an algorithm returns and :meth:`QuantLinear.from_linear` packs.

    Attributes:
        q: Codes, [N, K] int8, or float8_e4m3fn values.
        scale: As :func:`torchq.numerics.scale_shape`, in the model's dtype, nonzero and finite. NF4: float32, what ``nested``
            stands for.
        zero_point: int8 of scale's shape, or None (symmetric).
        scheme: The scheme they follow.
        input_scale: [1], the scale of static activations, or None.
        input_zero_point: [1] int8, the zero point of static asymmetric activations, or None.
        nested: Of NF4 the scales as they are stored, from :func:`torchq.kernels.nf4.compress_absmax`; else None.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: Scheme
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None
    nested: tuple[Tensor, Tensor, Tensor] | None = None


def buffer_specs(
    scheme: Scheme, out_features: int, in_features: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of a layer's quantized tensors, as on disk (NF4: as in ``state_dict()``).

    ``dtype``: of the scales, but for NF4's, which are float32.
    """
    args, shape = scheme.weights, (out_features, in_features)
    scale = numerics.scale_shape(shape, args)
    if scheme.format == "nf4":
        return {
            "weight_packed": ((-(-out_features * in_features // 2),), torch.uint8),
            "weight_absmax": ((scale[0],), torch.uint8),
            "weight_nested_scale": ((-(-scale[0] // nf4.NESTED_BLOCK),), torch.float32),
            "weight_offset": ((), torch.float32),
        }
    if scheme.format == "pack-quantized":
        specs = {
            "weight_packed": ((out_features, packed_words(in_features, args.num_bits)), torch.int32),
            "weight_scale": (scale, dtype),
            "weight_shape": ((2,), torch.int64),
        }
        if not args.symmetric:
            specs["weight_zero_point"] = ((packed_words(out_features, args.num_bits), scale[1]), torch.int32)
        return specs
    specs = {
        "weight": (shape, torch.int8 if args.type == "int" else torch.float8_e4m3fn),
        "weight_scale": (scale, dtype),
    }
    acts = scheme.input_activations
    if acts is not None and not acts.dynamic:
        specs["input_scale"] = ((1,), dtype)
        if not acts.symmetric:
            specs["input_zero_point"] = ((1,), torch.int8)
    return specs
