"""FakeQuantLinear: a linear layer that trains with the rounding it will have once it is packed (quantization-aware training).

LSQ, learned step sizes (arXiv 1902.08153). With codes q(W) = clamp(round(W / s) + z, q_min, q_max) a layer multiplies by
W' = (q - z) s. Its gradient goes straight through the rounding (section 2.1): dW'/dW is 1 where W / s + z is within
[q_min, q_max], else 0, and (eq. 3, here with a zero point)

    dW'/ds = q - (W / s + z)   within,      q - z   elsewhere,

summed over the weights that share a scale and multiplied by 1 / sqrt(their number * q_max) (section 2.2). For fp8 the same
with fp8 values for q, z = 0 and q_max = 448.

**What is learned of a scale** is the logarithm of its change, s = s_0 2^c, with c = 0 at the start. So no scale reaches zero or
changes its sign (those of weight-only layers may be negative, :mod:`torchq.numerics`); a step of Adam is a relative change,
whatever the bits and the size of the weights, so that one learning rate suits all layers; and weight decay draws scales to where
they began, not to zero. The forward pass takes them as they will be stored, rounded to the dtype of the model.

**Zero points** stay as they were at the start. Stored ones are integers, of which gradients know little: within the range W' does
not depend on z at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchq import numerics
from torchq.linear import HOOKS, QuantizedWeight
from torchq.matching import is_conv1d
from torchq.model_utils import linear_shape, weight_of
from torchq.scheme import QuantArgs, Scheme

_MOST_DOUBLINGS = 64.0  # of a scale; more, after a step gone wrong, would leave float32
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class _Product(torch.autograd.Function):
    """The product with the fake-quantized weight. It keeps the weight, the scales and the (rounded) input, nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        change: Tensor,
        start: Tensor,
        zero_point: Tensor | None,
        scheme: Scheme,
        transposed: bool,
    ) -> Tensor:
        if scheme.input_activations is not None:
            x = _round_activations(x, scheme.input_activations)
        ctx.save_for_backward(x, weight, change, start, zero_point)
        ctx.scheme, ctx.transposed = scheme, transposed
        matrix = weight.t() if transposed else weight
        rounded = _fake_quantize(matrix, _scales(start, change, scheme.weights), zero_point, scheme.weights)
        return F.linear(x, rounded.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, change, start, zero_point = ctx.saved_tensors
        args, matrix = ctx.scheme.weights, weight.t() if ctx.transposed else weight
        scale = _scales(start, change, args)
        for_x, for_bias, for_weight, for_change = ctx.needs_input_grad[:4]
        grad_x = grad_bias = grad_weight = grad_change = None
        if for_x:  # rounded activations: straight through, since a dynamic scale clips none
            grad_x = grad_y @ _fake_quantize(matrix, scale, zero_point, args).to(grad_y.dtype)
        grads = grad_y.reshape(-1, grad_y.shape[-1])
        if for_bias:
            grad_bias = grads.sum(0)
        if for_weight or for_change:
            grad = grads.t() @ x.reshape(-1, x.shape[-1])
            grad_weight, grad_change = _lsq_gradients(grad, matrix, scale, zero_point, args)
            grad_weight = (grad_weight.t() if ctx.transposed else grad_weight).to(weight.dtype)
        return grad_x, grad_bias, grad_weight, grad_change, None, None, None, None


def _scales(start: Tensor, change: Tensor, args: QuantArgs) -> Tensor:
    """The scales ``start * 2 ** change``, in start's dtype, in which they are stored."""
    factor = torch.exp2(change.float().clamp(-_MOST_DOUBLINGS, _MOST_DOUBLINGS))
    return numerics.representable_scale(start.float() * factor, start, args)


def _fake_quantize(matrix: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantArgs) -> Tensor:
    """[N, K] rounded to its codes and back, in scale's dtype."""
    codes = numerics.quantize(matrix.float(), scale.float(), zero_point, args)
    return numerics.dequantize(codes, scale, zero_point, args)


def _round_activations(x: Tensor, args: QuantArgs) -> Tensor:
    """Activations [..., K] rounded with scales taken from themselves and multiplied by them again, in their own dtype."""
    codes, scale = numerics.quantize_dynamic(x, args)
    groups = codes.float().unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)
    return groups.flatten(-2).to(x.dtype)


def _lsq_gradients(
    grad: Tensor, matrix: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantArgs
) -> tuple[Tensor, Tensor]:
    """The gradients of the weight [N, K] and of the logarithms of the scales' changes, from that of the rounded weight [N, K]."""
    step = scale.float()
    groups = numerics.to_groups(matrix.float(), args)
    step = step.reshape(*groups.shape[:2], 1)
    scaled = groups / step
    if args.type == "float":
        low, high, zero = -_FP8_MAX, _FP8_MAX, torch.zeros_like(step)
        codes = numerics.cast_fp8(scaled).float()
    else:
        low, high = float(args.quant_min), float(args.quant_max)
        zero = torch.zeros_like(step) if zero_point is None else zero_point.reshape(step.shape).float()
        scaled = scaled + zero
        codes = scaled.round().clamp(low, high)
    within = (scaled >= low) & (scaled <= high)
    grads = numerics.to_groups(grad.float(), args)
    by_step = (grads * (codes - torch.where(within, scaled, zero))).sum(-1, keepdim=True)
    by_change = by_step * step * (math.log(2) / math.sqrt(groups.shape[-1] * high))
    return numerics.from_groups(grads * within, args, (matrix.shape[0], matrix.shape[1])), by_change.reshape(scale.shape)


class FakeQuantLinear(nn.Module):
    """``y = round(x) @ fake_quantized_weight().T + bias``: trains what :func:`torchq.convert_qat_` packs, bit for bit.

    Parameters: ``weight``, the Linear's own, [N, K], or [K, N] of a Conv1D; ``weight_scale_log2``, float32 of
    :func:`torchq.numerics.scale_shape`, what is learned of the scales: ``weight_scale = weight_scale_start * 2 **
    weight_scale_log2``; ``bias``. Buffers: ``weight_scale_start``, in the dtype in which scales are stored, and
    ``weight_zero_point``, int8 of the same shape, or None. They all are in ``state_dict()``, which a run resumes from.

    Activations are rounded too if the scheme says so, with scales of their own as in the packed layer.

    Args:
        linear: What to train: an ``nn.Linear`` or a transformers ``Conv1D``. Its weight, bias, hooks and training mode are taken
            over.
        start: Its scheme (without static activations), the scales to start from, in the model's dtype, and zero points.
    """

    weight: nn.Parameter
    weight_scale_log2: nn.Parameter
    weight_scale_start: Tensor
    weight_zero_point: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Module, start: QuantizedWeight) -> None:
        super().__init__()
        self.out_features, self.in_features = linear_shape(linear)
        self.scheme, self.transposed = start.scheme, is_conv1d(linear)
        self.register_parameter("weight", linear._parameters["weight"])
        self.register_parameter("bias", linear._parameters.get("bias"))
        self.register_parameter("weight_scale_log2", nn.Parameter(torch.zeros_like(start.scale, dtype=torch.float32)))
        self.register_buffer("weight_scale_start", start.scale)
        self.register_buffer("weight_zero_point", start.zero_point)
        self.train(linear.training)
        for name in HOOKS:
            self.__dict__[name] = linear.__dict__[name]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] for activations x [..., K], in x's dtype; under ``torch.autocast`` in its dtype, as nn.Linear."""
        device = x.device.type
        if not x.is_meta and torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(  # type: ignore[no-untyped-call]
            x,
            bias,
            self.weight,
            self.weight_scale_log2,
            self.weight_scale_start,
            self.weight_zero_point,
            self.scheme,
            self.transposed,
        )

    @property
    def weight_scale(self) -> Tensor:
        """The scales as they would be stored now, without a gradient."""
        return _scales(self.weight_scale_start, self.weight_scale_log2.detach(), self.scheme.weights)

    @torch.no_grad()
    def quantized_weight(self) -> QuantizedWeight:
        """Return the codes and scales that :func:`torchq.convert_qat_` packs."""
        scale = self.weight_scale
        codes = numerics.quantize(self.matrix.float(), scale.float(), self.weight_zero_point, self.scheme.weights)
        return QuantizedWeight(codes, scale, self.weight_zero_point, self.scheme)

    @torch.no_grad()
    def fake_quantized_weight(self) -> Tensor:
        """Return the weight that activations are multiplied by, [N, K], in the scales' dtype; without a gradient."""
        return _fake_quantize(self.matrix, self.weight_scale, self.weight_zero_point, self.scheme.weights)

    @property
    def matrix(self) -> Tensor:
        """The weight that is trained, [N, K] whatever its layout, without a gradient."""
        return self.weight.detach().t() if self.transposed else self.weight.detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FakeQuantLinear:
        """Move or cast; what is learned of the scales stays float32, as small steps need it."""
        learned = {id(self.weight_scale_log2), id(self.weight_scale_log2.grad)}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in learned and moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return sizes, scheme and format for ``print(model)``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.scheme.describe()}"


def fake_layers(modules: Mapping[str, nn.Module], start: QuantizedWeight, *, rounded: bool) -> dict[str, FakeQuantLinear]:
    """Return FakeQuantLinears that start from a quantized weight, by name.

    Args:
        modules: Linear-like modules by name, all of one weight; they share one set of scales.
        start: What they start from.
        rounded: Whether they train a new weight, the dequantized one, whose codes are those of ``start``: not nearest ones. Else
            they train the modules' own weight, the same Parameter.
    """
    own = weight_of(next(iter(modules.values())))
    scale, zero_point = (None if t is None else t.to(own.device) for t in (start.scale, start.zero_point))
    assert scale is not None
    start = QuantizedWeight(start.q, scale, zero_point, start.scheme)
    weight: nn.Parameter | None = None
    if rounded:
        matrix = numerics.dequantize(start.q.to(own.device), scale, zero_point, start.scheme.weights, own.dtype)
        matrix = matrix.t().contiguous() if is_conv1d(next(iter(modules.values()))) else matrix
        weight = nn.Parameter(matrix, requires_grad=own.requires_grad)
    made: dict[int, FakeQuantLinear] = {}
    learned: nn.Parameter | None = None
    for module in modules.values():
        if id(module) not in made:
            layer = FakeQuantLinear(module, start)
            layer.weight = layer.weight if weight is None else weight
            layer.weight_scale_log2 = learned = layer.weight_scale_log2 if learned is None else learned
            made[id(module)] = layer
    return {name: made[id(module)] for name, module in modules.items()}
