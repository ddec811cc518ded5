"""transformers: load a compressed-tensors checkpoint into packed QuantLinear modules through transformers' own loader.

The loader's renaming, splitting, tying, buffers and device maps are transformers'; torchq takes part as a quantizer
under the method
name ``"torchq"`` (``"compressed-tensors"`` belongs to transformers' own, which decompresses). Registered when imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torchq.checkpoint.kv_cache import place_kv_scales, settle_kv_scales
from torchq.checkpoint.schema import ParsedConfig
from torchq.checkpoint.writer import checkpoint_converter
from torchq.linear import QuantLinear, buffer_specs
from torchq.matching import class_names, is_conv1d
from torchq.model_utils import set_module

METHOD = "torchq"


@register_quantization_config(METHOD)
class PackedLoadConfig(QuantizationConfigMixin):
    """What the loader needs to know of a checkpoint: schemes by checkpoint name, and what each file holds.

    Args:
        parsed: The checkpoint's ``quantization_config``.
        header: Checkpoint tensor name -> (shape, dtype).
        quant_method: Always ``"torchq"``.
    """

    def __init__(
        self, parsed: ParsedConfig, header: dict[str, tuple[tuple[int, ...], torch.dtype]], quant_method: str = METHOD
    ) -> None:
        self.quant_method = quant_method
        self.parsed, self.header = parsed, header

    def to_dict(self) -> dict[str, Any]:
        """Return what transformers may log."""
        return {"quant_method": METHOD}


@register_quantizer(METHOD)
class PackedLoader(HfQuantizer):
    """Swap QuantLinear modules in before the weights are loaded, and settle their layout afterwards."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        config: PackedLoadConfig = self.quantization_config
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        # Pattern -> float32, for the layers that a model keeps in it.
        dtype_plan: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)  # type: ignore[operator]
        self._names = _checkpoint_module_names(model, config.header)
        for name, checkpoint_name in self._names.items():
            module = model.get_submodule(name)
            scheme = config.parsed.scheme_for(checkpoint_name, class_names(module))
            scale = config.header.get(f"{checkpoint_name}.weight_scale")
            _, stored = config.header.get(f"{checkpoint_name}.weight", (None, None))
            plain = stored is not None and stored.is_floating_point and stored.itemsize > 1
            if scheme is None or (scale is None and plain):
                if not plain and stored is not None:
                    raise ValueError(
                        f"{checkpoint_name}.weight is {stored} in the checkpoint, but quantization_config has no scheme for it; "
                        "config.json does not belong to these weights"
                    )
                continue
            if scale is None and f"{name}.weight" in tied:  # the embedding's weight is its own, whatever `ignore` calls it
                continue
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            out_features, in_features = weight.shape[::-1] if is_conv1d(module) else weight.shape
            _check_shapes(checkpoint_name, config, scheme, (out_features, in_features))
            dtype = next(
                (dtype for pattern, dtype in dtype_plan.items() if re.search(pattern.replace("*", ".*"), f"{name}.weight")),
                weight.dtype,
            )
            packed = QuantLinear(in_features, out_features, scheme, bias=False, dtype=dtype, device="meta")
            if scale is not None and scale[1] != dtype:
                for buffer_name in ("weight_scale", "input_scale"):
                    buffer = packed._buffers.get(buffer_name)
                    if buffer is not None:
                        packed._buffers[buffer_name] = buffer.to(scale[1])
            packed.register_parameter("bias", module._parameters["bias"])
            packed.requires_grad_(False)
            packed.transposed = is_conv1d(module)
            set_module(model, name, packed)
        self._kv_scales = place_kv_scales(model, config.parsed.kv_cache_strategy, config.header)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        wrong = [name for name, parameter in model.named_parameters() if parameter.shape != self._shapes.get(name)]
        if wrong:  # transformers 5.17 lets these pass where there is a quantizer
            raise ValueError(f"{len(wrong)} tensors of another shape than the model's: {', '.join(wrong)}")
        header = self.quantization_config.header
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear):
                for buffer_name, buffer in module._buffers.items():  # "keep in float32" patterns cast these too, exactly
                    stored = header.get(f"{self._names[name]}.{buffer_name}")
                    if stored is not None and buffer is not None:
                        module._buffers[buffer_name] = buffer.to(stored[1])
                module._set_placeholder()
                module.pack_native_()
        settle_kv_scales(model, self._kv_scales)
        return model

    def is_serializable(self) -> bool:
        """Saving goes through :func:`torchq.save_pretrained`."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether transformers' Trainer may train it."""
        return False


class RecordingCache(DynamicCache):
    """A cache that looks at what attention gives it to keep, returns it, and keeps nothing.

    Args:
        config: The model's, which says what layers there are.
        record: Called with layer_idx and the new keys and values, each [B, H, T, head_dim].
    """

    def __init__(self, config: PreTrainedConfig, record: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__(config=config)
        self._record = record

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Look at keys and values, and return them as they are."""
        self._record(layer_idx, key_states, value_states)
        return key_states, value_states


def refuse_to_save(model: PreTrainedModel, reason: str) -> None:
    """Let ``model.save_pretrained`` raise ``ValueError(reason)`` before it writes anything, unless all it writes is adapters."""
    model.hf_quantizer = Unsaveable(reason)


class Unsaveable(HfQuantizer):
    """What tells transformers that a model cannot be saved.

    Attributes:
        reason: Why not, and what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(_NoConfig(reason))

    def is_serializable(self) -> bool:
        """Saving is refused, with the reason."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether transformers' Trainer may train it, with adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile it."""
        return True


class _NoConfig:
    """transformers asks a quantizer that cannot save for its method, to name it in an error: the error is raised here."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @property
    def quant_method(self) -> str:
        raise ValueError(self.reason)


def _checkpoint_module_names(model: nn.Module, header: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, str]:
    """Model name -> checkpoint name of every Linear-like module: the original checkpoint's, or the model's own if stored so."""
    names = {}
    to_checkpoint = checkpoint_converter(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or is_conv1d(module):
            assert isinstance(module.weight, torch.Tensor)
            converted = next(iter(to_checkpoint({f"{name}.weight": module.weight}))).rpartition(".")[0]
            own = f"{name}.weight_scale" in header and f"{converted}.weight_scale" not in header
            names[name] = name if own else converted
    return names


def _check_shapes(name: str, config: PackedLoadConfig, scheme: Any, shape: tuple[int, int]) -> None:
    """Compare a layer's tensors on disk with what the model and the scheme call for."""
    for buffer_name, (expected, dtype) in buffer_specs(scheme, *shape, torch.float32).items():
        found = config.header.get(f"{name}.{buffer_name}")
        if found is None:
            continue  # reported as missing by the caller
        wrong_dtype = found[1] != dtype and not (dtype == torch.float32 and found[1].is_floating_point)
        if tuple(found[0]) != tuple(expected) or wrong_dtype:
            raise ValueError(
                f"{name}.{buffer_name} is {found[1]} {list(found[0])} in the checkpoint, but scheme {scheme.name} and the "
                f"model's {shape[0]}x{shape[1]} layer need {dtype} {list(expected)}; config.json does not belong to these weights"
            )
