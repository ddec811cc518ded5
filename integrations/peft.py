"""PEFT: LoRA on packed layers, through PEFT's own API.

PEFT adds an adapter to whatever is a LoRA layer already. :func:`prepare_for_training` therefore wraps each packed layer in a LoRA
layer without adapters; after that ``get_peft_model``, ``PeftModel.from_pretrained``, TRL's trainers and the rest work as on any
model, for every way of naming targets (``"all-linear"`` included). Nothing of PEFT is patched or registered.

DoRA: arXiv 2402.09353. rsLoRA: arXiv 2312.03732. Merging: :mod:`torchq.integrations.peft_merge`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import torch
from peft import LoraConfig
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear, LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchq import layouts
from torchq.dequantize import to_linear
from torchq.linear import QuantLinear, buffer_specs
from torchq.lora import Adapter, Requantize, check_requantize, delta_weight, lora_linear, merged_linear, requantize
from torchq.model_utils import list_names, set_module, weight_of

MERGE = (*get_args(Requantize), "float")
_SECOND_TIME = r"You are trying to modify a model with PEFT for a second time"
_OTHER_VARIANTS = ("alora_invocation_tokens", "arrow_config", "use_bdlora", "use_qalora")  # PEFT 0.19 declares none of them
_WEIGHT_INITS = ("pissa", "olora", "corda", "loftq", "mica", "lora_ga")  # these change the base weight


class LoraQuantLinear(Linear):
    """A LoRA layer around a packed layer.

    Args:
        base_layer: The packed layer.
        merge_to: What merging makes of it: as :func:`torchq.lora.requantize`, or ``"float"``, an ordinary Linear in 16 bits.
        merge_aware: Whether to multiply by the weight that a dithered merge gives, also in training.

    Attributes:
        kept: After merging to integers, the share of the adapters' change of the weight that survived the rounding:
            ``<W_merged - W, delta> / <delta, delta>``. None before.
    """

    base_layer: Any  # the packed layer; or, while adapters are merged, what that made of it
    merged_adapters: list[str]

    def __init__(self, base_layer: QuantLinear, *, merge_to: str, merge_aware: bool = False) -> None:
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out, self.is_target_conv_1d_layer = False, False
        self.merge_to, self.merge_aware = merge_to, merge_aware
        self.kept: float | None = None
        self._unmerged: list[QuantLinear] = []  # a list, so that nn.Module does not take it for a child: [the layer] while merged

    def _get_in_out_features(self, module: QuantLinear) -> tuple[int, int]:
        return module.in_features, module.out_features

    # ----------------------------------------------------------------------------------------------------------- adapters

    def resolve_lora_variant(self, *, config: LoraConfig, **kwargs: Any) -> Any:
        """Return the variant that a config asks for: DoRA, or None for plain LoRA."""
        return _DoraVariant() if config.use_dora else None

    def update_layer(self, adapter_name: str, *args: Any, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter; called by PEFT."""
        name, init = kwargs.get("target_name") or "a layer", config.init_lora_weights
        declared = {field.name for field in fields(config) if field.metadata.get("is_lora_variant")} - {"use_dora"}
        others = sorted(field for field in declared.union(_OTHER_VARIANTS) if getattr(config, field, None))
        if others:
            raise ValueError(
                f"{name} is packed and takes LoRA, rsLoRA and DoRA, but not LoraConfig's {', '.join(others)}; leave it out"
            )
        if isinstance(init, str) and init.lower().startswith(_WEIGHT_INITS):
            raise ValueError(
                f"init_lora_weights={init!r} would change the packed weight of {name}; "
                "use init_lora_weights=True, then torchq.integrations.peft_merge.init_from_quantization_error(model, reference)"
            )
        if self.merge_aware and config.use_dora:
            raise ValueError("use_dora=True does not go with merge-aware training; use plain LoRA, or merge_aware=False")
        if not self.lora_A:
            self._active_adapter = adapter_name
        super().update_layer(adapter_name, *args, config=config, **kwargs)

    def adapters(self, names: Sequence[str] | None = None) -> list[Adapter]:
        """The factors of adapters, the active ones by default."""
        names = [name for name in (self.active_adapters if names is None else names) if name in self.lora_A]
        return [Adapter(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]) for name in names]

    # ------------------------------------------------------------------------------------------------------------ compute

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output with the active adapters', in the dtype of the packed layer's."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not names or args or any(v is not None for v in kwargs.values()):
            return super().forward(x, *args, **kwargs)
        adapters = self.adapters(names)
        dropouts = [self.lora_dropout[name] for name in names]
        drops = self.training and any(isinstance(dropout, nn.Dropout) for dropout in dropouts)
        if not all(self._is_plain(name, adapter) for name, adapter in zip(names, adapters, strict=True)):
            if self.merge_aware:
                raise ValueError("merge-aware training takes plain LoRA without lora_bias; use LoraConfig(lora_bias=False)")
            return super().forward(x, *args, **kwargs)
        if self.merge_aware:
            if drops:
                raise ValueError("merge-aware training has one weight and no place for dropout; use LoraConfig(lora_dropout=0)")
            return merged_linear(self.base_layer, x, adapters)
        if drops and len(names) > 1:
            return super().forward(x, *args, **kwargs)
        return lora_linear(self.base_layer, x, adapters, dropouts[0](x) if drops else None)

    def _is_plain(self, name: str, adapter: Adapter) -> bool:
        """Whether an adapter is two matrices that are all there (not sharded away until their own module is called)."""
        if isinstance(adapter.A, DTensor) or isinstance(adapter.B, DTensor):
            return False
        whole = adapter.A.shape[-1:] == (self.in_features,) and adapter.B.shape[:1] == (self.out_features,)
        return whole and name not in self.lora_variant and not self.lora_bias[name]

    # ------------------------------------------------------------------------------------------------------------ merging

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into a new base layer, as ``merge_to`` says; the old one is kept (packed) until they are unmerged.

        A merged weight that is not finite is an error whatever ``safe_merge`` is, and nothing has changed then.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        names = self.merged_adapters + names
        original = self._unmerged[0] if self._unmerged else self.base_layer
        weight = original.dequantize(torch.float32)
        delta = self._weight_with(weight, names).sub_(weight)
        merged: nn.Module
        if self.merge_to == "float":
            if not torch.isfinite(delta).all():
                raise ValueError("the merged weight holds NaN or inf: the adapter is broken (did the training diverge?)")
            merged, total = to_linear(original), weight.add_(delta)
            like = weight_of(merged)
            like.data = (total.t() if original.transposed else total).to(like.dtype).contiguous()
            self.kept = None
        else:
            merged = requantize(original, delta, self.merge_to)  # type: ignore[arg-type]
            change = merged.dequantize(torch.float32).sub_(weight)
            self.kept = (torch.sum(change * delta) / torch.sum(delta * delta).clamp_min(1e-30)).item()
            _warn_of_rounding()
        self._merge_bias(merged, names)
        self._unmerged, self.base_layer, self.merged_adapters = [original], merged, names

    def _weight_with(self, weight: Tensor, names: list[str]) -> Tensor:
        """The weight [N, K] float32 with adapters, as the forward pass has it. A new tensor."""
        delta = delta_weight(self.adapters(names))
        dora = [name for name in names if name in self.lora_variant]
        if not dora:
            return delta.add_(weight)
        if len(names) > 1:
            raise ValueError(f"adapters {', '.join(names)}: a DoRA adapter cannot be merged together with another one")
        magnitude = self.lora_magnitude_vector[names[0]].weight.float()
        total = delta.add_(weight)
        return total.mul_((magnitude / torch.linalg.norm(total, dim=1)).unsqueeze(1))

    def _merge_bias(self, merged: nn.Module, names: list[str]) -> None:
        added = [self.lora_B[name].bias * self.scaling[name] for name in names if self.lora_bias[name]]
        if not added:
            return
        bias = merged._parameters.get("bias")
        if bias is None:
            raise ValueError("lora_bias=True cannot be merged: the base layer has no bias; leave the adapter unmerged")
        merged.bias = nn.Parameter(bias + sum(added).to(bias.dtype), requires_grad=False)

    def unmerge(self) -> None:
        """Bring the base layer back as it was, bit for bit."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self.base_layer = self._unmerged.pop().to(self.base_layer.weight.device)
        self.merged_adapters, self.kept = [], None

    def __repr__(self) -> str:
        return super().__repr__().replace("lora.LoraQuantLinear", "LoraQuantLinear", 1)


def _warn_of_rounding() -> None:
    warnings.warn(
        "adapters are merged into packed weights: what they learned is rounded to the weights' grid, and a part of it may be "
        "lost; torchq.integrations.peft_merge.merge_adapters measures how much, merge='float' of prepare_for_training keeps all",
        stacklevel=4,
    )


class _DoraLayer(DoraLinearLayer):
    """DoRA's magnitudes on a packed weight, which is dequantized for its norms alone and not kept."""

    def update_layer(self, *, base_layer: QuantLinear, lora_A: Tensor, lora_B: Tensor, scaling: float, **kwargs: Any) -> None:
        """Start the magnitudes at the norms of the rows."""
        norm = self._norm(base_layer, lora_A, lora_B, scaling)
        self.weight = nn.Parameter(norm.to(lora_A.dtype), requires_grad=True)

    @staticmethod
    @torch.no_grad()
    def _norm(base_layer: QuantLinear, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """[N] float32, a constant for the gradient (section 4.3)."""
        weight = base_layer.dequantize(torch.float32)
        return torch.linalg.norm(weight.addmm_(b.float(), a.float(), alpha=scaling), dim=1)

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: QuantLinear,
        base_result: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return what is to be added to ``base_result`` (to the layer's output for x before dropout, if None)."""
        factor = self.weight / self._norm(base_layer, lora_A.weight, lora_B.weight, scaling).to(self.weight.dtype)
        base = base_layer(x) if base_result is None else base_result
        if base_layer.bias is not None:
            base = base - base_layer.bias
        return (factor - 1) * base + factor * (lora_B(lora_A(x)) * scaling)

    def __repr__(self) -> str:
        return super().__repr__().replace("_DoraLayer", "DoraLayer", 1)


class _DoraVariant(DoraLinearVariant):
    """PEFT's DoRA with :class:`_DoraLayer`; merging is :meth:`LoraQuantLinear.merge`'s."""

    @staticmethod
    def init(module: LoraQuantLinear, adapter_name: str, **kwargs: Any) -> None:
        """Add the magnitudes of an adapter."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        layer = _DoraLayer(fan_in_fan_out=False)
        layer.update_layer(
            base_layer=module.get_base_layer(),
            lora_A=module.lora_A[adapter_name].weight,
            lora_B=module.lora_B[adapter_name].weight,
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = layer


# ------------------------------------------------------------------------------------------------------------------- models


def prepare_for_training(
    model: nn.Module, *, merge: str | None = None, merge_aware: bool = False, gradient_checkpointing: bool = False
) -> nn.Module:
    """See :func:`torchq.prepare_for_training`."""
    if merge is not None and merge not in MERGE:
        raise ValueError(f"merge must be one of {', '.join(map(repr, MERGE))}, got {merge!r}")
    if merge_aware and merge not in (None, "dithered"):
        raise ValueError(f"merge_aware=True trains for a dithered merge: use merge='dithered', got merge={merge!r}")
    layers = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, QuantLinear)}
    wrapped = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    if wrapped:
        raise ValueError(
            f"the model has LoRA layers already ({list_names(wrapped)}); call prepare_for_training once, before get_peft_model"
        )
    if not layers:
        raise ValueError("nothing in the model is quantized; call quantize_ first, or use PEFT alone")
    if merge_aware:
        merge = "dithered"
    if merge is not None:
        for name, layer in layers.items():
            check_merge(name, layer, merge)
    model.requires_grad_(False)
    new = {
        id(layer): LoraQuantLinear(layer, merge_to=merge or default_merge(layer), merge_aware=merge_aware)
        for layer in layers.values()
    }
    for name, layer in layers.items():
        set_module(model, name, new[id(layer)].train(layer.training))
    _leave_buffers_out_of_ddp(model)
    warnings.filterwarnings("ignore", message=_SECOND_TIME)  # what PEFT says of LoRA layers without adapters
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # the older name
        enable({"use_reentrant": False})  # type: ignore[operator]
    model.register_forward_pre_hook(_AdapterCheck(), with_kwargs=True)
    return model


def default_merge(layer: QuantLinear) -> str:
    """How adapters of a layer are merged unless something else is asked for."""
    return "dithered" if layer.scheme.weights.type == "int" else "new_scales"


def check_merge(name: str, layer: QuantLinear, how: str) -> None:
    """Raise ValueError unless adapters of the layer can be merged in this way."""
    if how == "float":
        return
    try:
        check_requantize(how, layer.scheme)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class _AdapterCheck:
    """A forward pre-hook: is there anything to train? Asked until there is, then never again."""

    def __init__(self) -> None:
        self.passed = False

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self.passed or not (model.training and torch.is_grad_enabled()):
            return
        if any(kwargs.get(name) is not None for name in ("inputs_embeds", "past_key_values")):
            return  # learned prompts train what comes before the model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                "nothing in the model is trainable: its weights are packed and frozen; add an adapter first "
                "(model = peft.get_peft_model(model, peft.LoraConfig(target_modules='all-linear'))), or use model.eval() or "
                "torch.no_grad() to run it"
            )
        self.passed = True


def _leave_buffers_out_of_ddp(model: nn.Module) -> None:
    """Tell DistributedDataParallel not to send packed weights, which never change, from rank 0 to all others in each step.

    By every name that they have on some device: the model may yet move to another.
    """
    native = {buffer for layout in layouts.LAYOUTS for buffer in layout.buffers}
    names = [
        f"{prefix}{name}.base_layer.{buffer}"
        for name, module in model.named_modules()
        if isinstance(module, LoraQuantLinear)
        for buffer in native.union(buffer_specs(module.base_layer.scheme, 1, 1, torch.float32))
        for prefix in ("", "base_model.model.")
    ]
    model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]
