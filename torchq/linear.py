"""QuantLinear: a linear layer on packed weights.

Its buffers carry the names and shapes of the checkpoint, so ``state_dict()`` is the checkpoint. Where a kernel wants another
layout, that layout replaces the canonical one in memory, and ``state_dict``, pickling, ``deepcopy``, ``dequantize`` and moves to
other devices give the canonical one back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable

from torchq import layouts, numerics
from torchq.kernels import fp8, nf4, nf4_linear, w8a8_int8, w8a8_int8_cpu, wna16, wna16_cpu
from torchq.matching import is_conv1d
from torchq.model_utils import weight_of
from torchq.quantized_weight import QuantizedWeight, buffer_specs
from torchq.scheme import Scheme

if TYPE_CHECKING:
    from torchq.siblings import Siblings

__all__ = ["QuantLinear", "QuantizedWeight", "buffer_specs"]

_SAME_SIZE_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# Named so that importing them, which registers ops, is a use.
_KERNEL_MODULES = (wna16, wna16_cpu, w8a8_int8, w8a8_int8_cpu, nf4_linear)
_OPS = torch.ops.torchq
NF4 = ("weight_packed", "weight_absmax", "weight_nested_scale", "weight_offset")


def own(y: Tensor) -> Tensor:
    """``y``, which may be a view of another tensor that nobody has, as one that is no view: callers may write to it in place."""
    return torch.ops.aten._unsafe_view.default(y, y.shape)


class _Linear(torch.autograd.Function):
    """The product where gradients are asked for. All it keeps for the backward pass is the packed weight, which is there anyway.

    Rounded activations: the straight-through estimator, which takes the gradient as if they were not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kernel: _Kernel, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.kernel = kernel
        return own(kernel(x, tensors, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        kernel, tensors = ctx.kernel, ctx.saved_tensors
        grad_x = kernel.input_grad(grad_y, *tensors, *kernel.settings) if ctx.needs_input_grad[0] else None
        grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None, *(None for _ in tensors)


class _Kernel(NamedTuple):
    """Two ops on a weight: ``forward(x, *tensors, bias, *settings)`` and ``input_grad(grad_y, *tensors, *settings)``.

    ``names``: of the tensors among the layer's buffers.
    """

    forward: OpOverload
    input_grad: OpOverload
    names: tuple[str, ...]
    settings: tuple[int, ...] = ()
    rounds: bool = False  # activations to fp8 first

    def __call__(self, x: Tensor, tensors: Iterable[Tensor | None], bias: Tensor | None) -> Tensor:
        """Multiply."""
        x = fp8.round_activations(x, None, 0) if self.rounds else x
        y: Tensor = self.forward(x, *tensors, bias, *self.settings)
        return y


def _kernel_named(op: str, names: tuple[str, ...], settings: tuple[int, ...] = (), rounds: bool = False) -> _Kernel:
    if op.endswith("_triton"):
        import_module(f"torchq.kernels.{op}")  # registers it, and imports triton
    return _Kernel(getattr(_OPS, op).default, getattr(_OPS, f"{op}_input_grad").default, names, settings, rounds)


class QuantLinear(nn.Module):
    """``y = x @ dequantize(weight).T + bias`` on packed weights, with the activations quantized too if the scheme says so.

    Buffers, by ``scheme.format`` (N out_features, K in_features, G groups):
        pack-quantized: ``weight_packed`` [N, ceil(K num_bits / 32)] int32, ``weight_scale`` [N, G], ``weight_shape`` [2]
            int64 and, if asymmetric, ``weight_zero_point`` [ceil(N num_bits / 32), G] int32.
        int-quantized: ``weight`` [N, K] int8, ``weight_scale`` [N, 1] or [1]; static activations: ``input_scale`` [1].
        float-quantized, naive-quantized: the same with ``weight`` float8_e4m3fn; block scales
            [ceil(N / rows), ceil(K / columns)].
        nf4 (:mod:`torchq.kernels.nf4`; B blocks; no compressed-tensors format, so nothing saves it): ``weight_packed``
            [ceil(N K / 2)] uint8, ``weight_absmax`` [B] uint8, ``weight_nested_scale`` [ceil(B / 256)] float32,
            ``weight_offset`` [] float32.

    Packed layers have no weight matrix, but model code reads ``weight.dtype``, ``.device`` and ``.shape``: there ``weight`` is a
    placeholder, one NaN expanded to [N, K]. So it is, one int8 zero, where a CPU kernel holds an int8 weight; ask
    :meth:`canonical_tensors`. Casting the module (``.to(dtype)``, ``.half()``) changes ``compute_dtype`` and the bias, never the
    quantized tensors.

    Args:
        in_features: K.
        out_features: N.
        scheme: How it is quantized.
        bias: Whether there is a bias.
        dtype: dtype of the scales and the bias, and the first ``compute_dtype``.
        device: Where the (uninitialised) buffers go.

    Attributes:
        compute_dtype: dtype the layer expects of activations; other floating dtypes work too.
    """

    weight: Tensor
    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        *,
        bias: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.compute_dtype = dtype
        self._onednn_weight: Tensor | None = None  # no buffer: it is opaque, and PyTorch's in-place operations corrupt it
        self.siblings: Siblings | None = None  # that are multiplied in one launch with it
        self.transposed = False  # whether it replaced a Conv1D, whose weight is [K, N]
        for name, (shape, buffer_dtype) in buffer_specs(scheme, out_features, in_features, dtype).items():
            self.register_buffer(name, torch.empty(shape, dtype=buffer_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)
        self._set_placeholder()
        self._chosen = self._choose_kernel()

    @classmethod
    def from_linear(cls, linear: nn.Module, quantized_weight: QuantizedWeight) -> QuantLinear:
        """Return a QuantLinear with ``linear``'s bias (the same Parameter), hooks and training mode, and the given weight."""
        qw, scheme = quantized_weight, quantized_weight.scheme
        out_features, in_features = qw.q.shape
        dtype = weight_of(linear).dtype if scheme.format == "nf4" else qw.scale.dtype
        module = cls(in_features, out_features, scheme, bias=False, dtype=dtype, device="meta")
        tensors: dict[str, Tensor | None] = {"weight_scale": qw.scale.contiguous()}
        if scheme.format == "nf4":
            assert qw.nested is not None
            tensors = dict(zip(NF4, (nf4.pack_codes(qw.q), *qw.nested), strict=True))
        elif scheme.format == "pack-quantized":
            tensors |= layouts.packed_tensors(qw.q, qw.scale.contiguous(), qw.zero_point, scheme.weights.num_bits)
            tensors["weight_shape"] = torch.tensor([out_features, in_features], device=qw.q.device)
        else:
            tensors["weight"] = qw.q.contiguous()
            static = ("input_scale", "input_zero_point")
            tensors |= {name: getattr(qw, name) for name in static if name in module._buffers}
        for name, tensor in tensors.items():
            if tensor is None:
                raise ValueError(f"{name} is missing: scheme {scheme.name} has static activations")
            module._buffers[name] = tensor
        module.register_parameter("bias", linear._parameters.get("bias"))
        module.transposed = is_conv1d(linear) or getattr(linear, "transposed", False)  # as a FakeQuantLinear says
        module.train(linear.training)
        for name in HOOKS:
            module.__dict__[name] = linear.__dict__[name]
        module._set_placeholder()
        module.pack_native_()
        return module

    # ------------------------------------------------------------------------------------------------------------- compute

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] for activations x [..., K], in x's dtype; under ``torch.autocast`` in its dtype, as nn.Linear."""
        given = x
        x, bias = self.cast_inputs(x)
        siblings = self.siblings  # who know a tensor by its identity
        if siblings is not None and siblings.tensors is not None and x is given and not torch.is_grad_enabled():
            return siblings.product(self, x)
        kernel, tensors = self._kernel()
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            return _Linear.apply(x, bias, kernel, *tensors)  # type: ignore[no-untyped-call]
        return kernel(x, tensors, bias)

    def cast_inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return x in the dtype to compute in (autocast's under ``torch.autocast``), and the bias in it."""
        device = x.device.type
        if not x.is_meta and torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        bias: Tensor | None = self._parameters["bias"]
        return x, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)

    def _kernel(self) -> tuple[_Kernel, tuple[Tensor | None, ...]]:
        """What multiplies by the weight as it lies in memory, and its tensors."""
        kernel, get = self._chosen, self._buffers.get  # the dict: attribute look-ups of a Module cost microseconds
        tensors = tuple([get(name) for name in kernel.names])
        return kernel, tensors if self._onednn_weight is None else (self._onednn_weight, *tensors)

    def _choose_kernel(self) -> _Kernel:
        """The kernel for the layout in memory."""
        scheme, args = self.scheme, self.scheme.weights
        acts, layout = scheme.input_activations, layouts.layout_of(self._buffers)
        if scheme.format == "nf4":
            return _kernel_named("nf4_linear", NF4, (self.out_features, self.in_features, args.group_size or 0))
        if scheme.format == "pack-quantized":
            op, names = ("wna16", layouts.PACKED) if layout is None else (layout.op, layout.buffers)
            settings = () if layout is layouts.INT8_ROWS else (args.num_bits, args.group_size or self.in_features)
            return _kernel_named(op, names, settings, acts is not None)
        if args.type == "int":
            names = "weight_scale", "input_scale", "input_zero_point"
            if self._onednn_weight is not None:
                return _kernel_named("w8a8_int8_cpu", names)
            return _kernel_named("w8a8_int8", ("weight", *names))
        dynamic_group = -1 if acts is None or not acts.dynamic else acts.group_size or 0
        rows, columns = args.block_structure or (0, 0)
        if layout is not None:
            return _kernel_named(layout.op, (*layout.buffers, "input_scale"), (columns or self.in_features, dynamic_group))
        return _kernel_named("fp8_linear", ("weight", "weight_scale", "input_scale"), (dynamic_group, rows, columns))

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight, [N, K], in ``dtype`` (default: the scales' dtype, in which every reader computes it)."""
        if self.scheme.format == "nf4":
            tensors, size = [self._buffers[name] for name in NF4], self.scheme.weights.group_size
            stored = dtype if dtype in nf4.DTYPES else torch.float32
            weight = nf4.dequantize_nf4(*tensors, self.out_features, self.in_features, size, stored)
            return weight if dtype is None else weight.to(dtype)
        q, scale, zero_point = self.quantized_tensors()
        return numerics.dequantize(q, scale, zero_point, self.scheme.weights, dtype)

    def quantized_tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (codes [N, K] int8 or fp8, scales as on disk (NF4: dequantized), zero points int8 of scales' shape or None)."""
        layout = layouts.layout_of(self._buffers)
        if layout is not None and layout.codes is not None:
            return layout.codes(self._buffers, self._form)
        tensors = self.canonical_tensors()
        if self.scheme.format == "pack-quantized":
            return layouts.codes_of(tensors, self._form)
        if self.scheme.format == "nf4":
            packed, absmax, nested_scale, offset = (tensors[name] for name in NF4)
            q = nf4.unpack_codes(packed, self.out_features * self.in_features).view(self.out_features, self.in_features)
            return q, nf4.decompress_absmax(absmax, nested_scale, offset)[:, None], None
        return tensors["weight"], tensors["weight_scale"], None

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales, in memory and on disk."""
        layout = layouts.layout_of(self._buffers)
        own = "weight_nested_scale" if self.scheme.format == "nf4" else "weight_scale"
        scale = self._buffers[own if layout is None else layout.buffers[1]]
        assert scale is not None
        return scale.dtype

    @property
    def _form(self) -> layouts.Form:
        return layouts.Form(self.scheme, self.out_features, self.in_features, self.scale_dtype)

    # -------------------------------------------------------------------------------------------------------------- layout

    @property
    def is_native(self) -> bool:
        """Whether the weight is in memory in a kernel's layout (:mod:`torchq.layouts`, ``torchq.kernels.w8a8_int8_cpu``)."""
        return self._onednn_weight is not None or layouts.layout_of(self._buffers) is not None

    def canonical_tensors(self) -> dict[str, Tensor]:
        """Return the quantized tensors as on disk, by name. New tensors where the layout in memory is another."""
        buffers = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        if self._onednn_weight is not None:
            return buffers | {"weight": w8a8_int8_cpu.unpack_weight(self._onednn_weight)}
        layout = layouts.layout_of(buffers)
        if layout is None:
            return buffers
        others = {name: tensor for name, tensor in buffers.items() if name not in layout.buffers}
        return layout.unpack(self._buffers, self._form) | others

    def pack_native_(self) -> None:
        """Move to the layout of the device's kernel where it can hold this weight and is of use."""
        if not self.is_native:
            self._lay_out()
        self._chosen = self._choose_kernel()

    def _lay_out(self) -> None:
        form = self._form
        layout = layouts.layout_for(form, self._device)
        if layout is not None:
            tensors = layout.pack(self._buffers, form)
            for name in layout.replaces:
                self._buffers.pop(name, None)
            for name, tensor in zip(layout.buffers, tensors, strict=True):
                self.register_buffer(name, tensor, persistent=False)
            self._set_placeholder()
            if self.siblings is not None:
                self.siblings.join()
            return
        if self._device.type != "cpu" or self.scheme.format != "int-quantized" or not w8a8_int8_cpu.is_of_use(self.weight):
            return
        if not self.weight.is_shared():  # the other layout could not be shared with other processes
            self._onednn_weight = w8a8_int8_cpu.pack_weight(self.weight)
            self.register_buffer("weight", torch.zeros(1, 1, dtype=torch.int8).expand_as(self.weight), persistent=False)

    def unpack_native_(self) -> None:
        """Move back to the canonical layout. The inverse of :meth:`pack_native_`, bit for bit."""
        if not self.is_native:
            return
        if self.siblings is not None:
            self.siblings.part()
        tensors, layout = self.canonical_tensors(), layouts.layout_of(self._buffers)
        self._onednn_weight = None
        for name in layout.buffers if layout is not None else ():
            self._buffers.pop(name, None)
        self._non_persistent_buffers_set.clear()
        self._buffers.update(tensors)
        if "weight" in tensors:
            self.__dict__.pop("weight", None)  # the placeholder
        self._chosen = self._choose_kernel()

    def _set_placeholder(self) -> None:
        """Give layers without one a ``weight`` that answers questions about dtype, device and shape, and poisons arithmetic."""
        if "weight" in self._buffers:
            return
        dtype = fp8.FP8 if self.scheme.weights.type == "float" else self.compute_dtype
        nan = torch.full((1, 1), float("nan"), device=self._device).to(dtype)
        placeholder = nan.expand(self.out_features, self.in_features)
        placeholder._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers: do not draw random weights
        self.__dict__["weight"] = placeholder

    # ---------------------------------------------------------------------------------------------------------- nn.Module

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """The checkpoint's tensors have their names as attributes also while another layout has replaced them (new tensors)."""
        layout = layouts.layout_of(self.__dict__.get("_buffers", {}))
        if layout is not None and name in layout.replaces:
            tensors = layout.unpack(self._buffers, self._form)
            if name in tensors:
                return tensors[name]
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Move, share or cast: quantized tensors pass ``fn`` as integers, so that no cast can change a bit of them."""
        if fn(torch.empty(0, dtype=torch.int32)).dtype != torch.int32:
            raise TypeError(
                f"Module.type(dtype) would convert packed integers too ({self.extra_repr()}); use .to(dtype), .half() or .float()"
            )
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self._device))
        layout = layouts.layout_for(self._form, probe.device)
        moves = self.siblings is not None and probe.device != self._device  # its common tensor stays
        if self._onednn_weight is not None or moves or layout is not layouts.layout_of(self._buffers):
            self.unpack_native_()
        dtypes = {name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None}
        for name, dtype in dtypes.items():
            self._buffers[name] = self._buffers[name].view(_SAME_SIZE_INT[dtype.itemsize])  # type: ignore[union-attr]
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, dtype in dtypes.items():
                self._buffers[name] = self._buffers[name].view(dtype)  # type: ignore[union-attr]
        if probe.dtype.is_floating_point and probe.dtype.itemsize > 1:
            self.compute_dtype = probe.dtype
        self._set_placeholder()
        self.pack_native_()
        return self

    @property
    def _device(self) -> torch.device:
        return next(buffer for buffer in self._buffers.values() if buffer is not None).device

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_native:
            destination.update({prefix + name: tensor for name, tensor in self.canonical_tensors().items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        kept = self._buffers.keys() - self._non_persistent_buffers_set
        absent = buffer_specs(self.scheme, self.out_features, self.in_features, self.compute_dtype).keys() - kept
        if absent and not any(prefix + name in state_dict for name in absent):  # adapters alone, say: nothing to lay out anew
            missing_keys += [prefix + name for name in sorted(absent)] if strict else []
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
            return
        self.unpack_native_()
        wrong = []  # nn.Module would convert: truncate 16-bit weights to int8 codes, round scales
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if buffer is not None and isinstance(loaded, Tensor) and loaded.dtype != buffer.dtype:
                wrong.append(f"dtype mismatch for {prefix}{name}: {loaded.dtype} in the state dict, {buffer.dtype} in the layer")
        if wrong:
            error_msgs += wrong
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._set_placeholder()
        self.pack_native_()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle and copy the canonical layout: a kernel's own differs between devices."""
        state = self.__dict__.copy()
        state.pop("weight", None)
        tensors = dict(self.canonical_tensors())
        state["_fp8_buffers"] = {name: t.dtype for name, t in tensors.items() if t.dtype.itemsize == 1 and t.is_floating_point()}
        for name in state["_fp8_buffers"]:  # plain pickle cannot hold fp8 storages
            tensors[name] = tensors[name].view(torch.int8)
        state["_buffers"] = tensors
        state["_non_persistent_buffers_set"] = set()
        state["_onednn_weight"] = state["siblings"] = state["_chosen"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        fp8_buffers = state.pop("_fp8_buffers")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in fp8_buffers.items():
            self._buffers[name] = self._buffers[name].view(dtype)  # type: ignore[union-attr]
        self._set_placeholder()
        self.pack_native_()

    def extra_repr(self) -> str:
        """Return sizes, scheme and format for ``print(model)``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.scheme.describe()}"
