"""Per-channel scales that are divided out of the module that makes a tensor, and multiplied into the weights that read it.

With ``x`` the tensor of C channels and ``s > 0``, ``(x / s) (W diag(s))^T = x W^T``: nothing that the model computes changes, but
activations and weights become easier or harder to quantize (AWQ, SmoothQuant). ``torchq.architectures`` finds where a model
allows it; this file does it. All arithmetic is in float32, rounded once to the parameter's dtype.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

ProducerKind = Literal["norm", "offset_norm", "linear"]


@dataclass(frozen=True, eq=False)
class Producer:
    """What makes a tensor, and can take ``1 / s`` per channel.

    Attributes:
        name: Of a module with a ``weight`` (and perhaps a ``bias``), or of a bare parameter (experts stacked in one tensor, who
            then share the scales).
        kind: ``"norm"``: the output is ``x * weight (+ bias)``; ``"offset_norm"``: ``x * (1 + weight)``, as in Gemma;
            ``"linear"``: the channels are rows of a matrix.
        num_channels: C.
        axis: The dimension of ``weight`` that runs over output channels: 0, in a Conv1D 1.
        rows: [C] int64, ascending: where on that axis the channels are (the v part of a fused qkv); None if they are all of it.
    """

    name: str
    kind: ProducerKind
    num_channels: int
    axis: int = 0
    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Consumer:
    """A weight that reads the tensor, and can take ``s``.

    Attributes:
        name: Of a module with a ``weight``, or of a bare parameter (experts stacked in one tensor).
        axis: The dimension of ``weight`` that runs over input channels: 1, in a Conv1D 0, in stacked experts 1 or 2.
        channels: [K] int64: which of the producer's channels each column reads, -1 for none of them; None if column k reads
            channel k.
    """

    name: str
    axis: int = 1
    channels: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FoldPair:
    """A producer and *all* weights that read its channels.

    Attributes:
        producer: Takes ``1 / s``.
        consumers: Take ``s``, in the order in which they run.
        error: Largest relative change of the block's float32 output under random scales in [0.5, 2], as measured.
    """

    producer: Producer
    consumers: tuple[Consumer, ...]
    error: float

    @property
    def num_channels(self) -> int:
        """C: how many scales the pair takes."""
        return self.producer.num_channels


def fold_(model: nn.Module, pair: FoldPair, scale: Tensor) -> Tensor:
    """Divide a producer's channels by ``scale``, and multiply the columns that read them.

    Args:
        model: Holds the modules that the pair names; changed in place.
        pair: From ``torchq.architectures``.
        scale: [C], positive and finite.

    Returns:
        [C] float32: what the consumers were multiplied by; see :func:`divide_producer_`.

    Raises:
        ValueError: If ``scale`` is not as above, or a name is not in the model. Nothing has been changed then.
    """
    for consumer in pair.consumers:
        weight_and_bias(model, consumer.name)
    effective = divide_producer_(model, pair.producer, scale)
    for consumer in pair.consumers:
        multiply_consumer_(model, consumer, effective)
    return effective


@torch.no_grad()
def divide_producer_(model: nn.Module, producer: Producer, scale: Tensor) -> Tensor:
    """Divide a producer's channels, weight and bias, by ``scale``.

    A norm's weight is rounded first, and the scale that this really divides by is what comes back: multiplied into the consumers,
    it undoes the rounding of a 16-bit norm as well. (A channel whose new gain would round to zero stays as it is: scale 1.) The
    matrix of a ``"linear"`` is rounded once more, as any change of a 16-bit matrix is.

    Args:
        model: Holds the producer; changed in place.
        producer: What to divide.
        scale: [C], positive and finite.

    Returns:
        [C] float32, on the weight's device: the scale to multiply the consumers by.

    Raises:
        ValueError: If ``scale`` is not as above, or the producer is not in the model.
    """
    weight, bias = weight_and_bias(model, producer.name)
    scale = _checked(scale, producer).to(weight.device, torch.float32)
    if producer.kind == "linear":
        divisor = scale
        if producer.rows is not None:
            divisor = scale.new_ones(weight.shape[producer.axis])
            divisor[producer.rows.to(weight.device)] = scale
        weight.div_(_along(divisor, weight, producer.axis))
        if bias is not None:
            bias.div_(divisor)
        return scale
    divided, effective = _divided_norm(weight, producer, scale)
    weight.copy_(divided)
    if bias is not None:
        bias.div_(effective)
    return effective


@torch.no_grad()
def effective_scale(model: nn.Module, producer: Producer, scale: Tensor) -> Tensor:
    """Return what :func:`divide_producer_` would return, without dividing."""
    weight, _ = weight_and_bias(model, producer.name)
    scale = _checked(scale, producer).to(weight.device, torch.float32)
    return scale if producer.kind == "linear" else _divided_norm(weight, producer, scale)[1]


def _divided_norm(weight: Tensor, producer: Producer, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(The norm's new weight, what it really divides by)."""
    offset = 1.0 if producer.kind == "offset_norm" else 0.0
    gain = weight.float() + offset
    divided = (gain / scale - offset).to(weight.dtype)
    divided_gain = divided.float() + offset
    lost = divided_gain == 0
    return torch.where(lost, weight, divided), torch.where(lost, 1.0, gain / divided_gain)


@torch.no_grad()
def multiply_consumer_(model: nn.Module, consumer: Consumer, scale: Tensor) -> None:
    """Multiply the columns of a consumer by the scales of the channels they read.

    Args:
        model: Holds the consumer; changed in place.
        consumer: What to multiply.
        scale: [C], as :func:`divide_producer_` returned it.

    Raises:
        ValueError: If the consumer is not in the model.
    """
    weight, _ = weight_and_bias(model, consumer.name)
    weight.mul_(_along(column_scale(consumer, scale).to(weight.device), weight, consumer.axis))


def column_scale(consumer: Consumer, scale: Tensor) -> Tensor:
    """Return [K]: the scale [C] of the channel that each column of a consumer reads, 1 for columns that read another tensor."""
    return scale if consumer.channels is None else by_column(scale, consumer.channels.to(scale.device))


def by_column(scale: Tensor, channels: Tensor) -> Tensor:
    """Scales of channels [C], and the channel of each column [K], -1 for none -> scales of columns [K], 1 where there is none."""
    return torch.cat([scale, scale.new_ones(1)])[channels]  # -1 is the one at the end


def weight_and_bias(model: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Return ``weight`` and ``bias`` of the module called ``name``, or the bare parameter of that name and None.

    Raises:
        ValueError: If there is neither.
    """
    module = _submodule(model, name)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, Tensor):
        return weight, bias if isinstance(bias, Tensor) else None
    holder, _, leaf = name.rpartition(".")
    parameter = getattr(_submodule(model, holder), leaf, None)
    if isinstance(parameter, Tensor):
        return parameter, None
    known = [other for other, m in model.named_modules() if isinstance(getattr(m, "weight", None), Tensor)]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"{name!r} is neither a module with a weight nor a parameter of the {type(model).__name__}{hint}")


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _checked(scale: Tensor, producer: Producer) -> Tensor:
    if scale.shape != (producer.num_channels,):
        raise ValueError(f"scale must have shape ({producer.num_channels},) for {producer.name}, got {tuple(scale.shape)}")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(f"scale must be positive and finite for {producer.name}, got values from {scale.min()} to {scale.max()}")
    return scale


def _along(vector: Tensor, weight: Tensor, axis: int) -> Tensor:
    """View a vector so that it broadcasts along one dimension of a weight."""
    return vector.view([-1 if dim == axis else 1 for dim in range(weight.ndim)])
