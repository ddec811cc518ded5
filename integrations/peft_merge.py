"""PEFT: merge adapters into packed weights and say what the rounding lost; start adapters at the quantization error.

Starting at the error: the best rank-r approximation of ``W - dequantize(Q(W))``, from its singular value decomposition, as
LoftQ's last step (arXiv 2310.08659) and PiSSA's (arXiv 2404.02948, section 3) for a quantized base.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from torchq.dequantize import dequantize_, to_linear
from torchq.evaluation.divergence import Divergence, english_text, measure_divergence, token_windows
from torchq.integrations.peft import MERGE, LoraQuantLinear, check_merge
from torchq.linear import QuantLinear
from torchq.model_utils import list_names, strip_quantization_config

_FOLDED = 0.9  # a base this far from the reference (relative) was not made from it


# -------------------------------------------------------------------------------------------------------------------- merging


@dataclass(frozen=True)
class MergeReport:
    """What merging kept of adapters.

    Attributes:
        requantize: How: ``"dithered"``, ``"same_grid"``, ``"new_scales"`` or ``"float"``.
        adapter_to_merged: Divergence of the merged model from the model with adapters: what was lost. None if not measured.
        adapter_to_base: Divergence of the base without adapters from it: what there was to lose. None if not measured.
        layers: Layer -> share of the weight's change that survived the rounding (1: all; float layers are not listed).
    """

    requantize: str
    adapter_to_merged: Divergence | None
    adapter_to_base: Divergence | None
    layers: Mapping[str, float] = field(repr=False)

    @property
    def kept(self) -> float | None:
        """Share of the adapters' effect that is left, by mean KL: ``1 - KL(adapter || merged) / KL(adapter || base)``."""
        if self.adapter_to_merged is None or self.adapter_to_base is None:
            return None
        there_was = self.adapter_to_base.mean_kl
        return 1 - self.adapter_to_merged.mean_kl / there_was if there_was > 0 else math.nan

    def summary(self) -> str:
        """Return one line for people."""
        if self.adapter_to_merged is None or self.adapter_to_base is None or self.kept is None:
            share = sum(self.layers.values()) / len(self.layers) if self.layers else 1.0
            return f"merged ({self.requantize}): {share:.0%} of the weights' change survived; KL not measured"
        lost, there_was = self.adapter_to_merged, self.adapter_to_base
        return (
            f"merged ({self.requantize}): KL to the model with adapters {lost.mean_kl:.4f} (the base without them: "
            f"{there_was.mean_kl:.4f}), perplexity {lost.base_perplexity:.3f} -> {lost.perplexity:.3f} "
            f"(base: {there_was.perplexity:.3f})"
        )


def merge_adapters(
    model: PeftModel,
    requantize: str | None = None,
    *,
    evaluation: Iterable[Tensor] | None = None,
    tokenizer: Any = None,
    min_kept: float = 0.9,
) -> tuple[nn.Module, MergeReport]:
    """Merge a model's active adapters into its (packed) weights, measure what that lost, and return the plain model.

    Args:
        model: A PeftModel whose packed layers :func:`torchq.prepare_for_training` wrapped.
        requantize: ``"dithered"``, ``"same_grid"`` or ``"new_scales"``: how merged weights are rounded
            (:func:`torchq.lora.requantize`). ``"float"``: the whole model becomes an ordinary 16-bit one (quantize it again with
            calibration data for the best packed result). None: what ``prepare_for_training`` was told.
        evaluation: Token ids, [T] int64 each, T >= 2, on which the divergences are measured. None: 4,000 tokens of English prose
            if there is a tokenizer, else nothing is measured.
        tokenizer: For the text, if ``evaluation`` is None.
        min_kept: Warn if less of the adapters' effect is left than this share (:attr:`MergeReport.kept`).

    Returns:
        ``(model, report)``: the base model, with merged layers in place of those with adapters; ``save_pretrained`` saves it.

    Raises:
        ValueError: If ``requantize`` is unknown or impossible for a layer, no packed layer has an active adapter, or a merged
            weight is not finite. The model is as it was then.
    """
    layers = _layers_to_merge(model, requantize)
    if evaluation is None and tokenizer is not None:
        evaluation = token_windows(tokenizer, english_text(), num_windows=8, length=512, start=20_000)
    windows = None if evaluation is None else list(evaluation)
    before = {name: layer.merge_to for name, layer in layers.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="adapters are merged into packed weights")  # the report says it
            for layer in layers.values():
                layer.merge_to = requantize or layer.merge_to
            model.merge_adapter()
        how = " and ".join(sorted({layer.merge_to for layer in layers.values()}))
        report = _measure(model, layers, how, windows)
    except BaseException:
        for name, layer in layers.items():
            layer.merge_to = before[name]
            if layer.merged:
                layer.unmerge()
        raise
    merged = model.unload()
    if how == "float":
        if any(isinstance(module, QuantLinear) for module in merged.modules()):
            dequantize_(merged)
        strip_quantization_config(merged)
        merged.__dict__.pop("quant_report", None)
    kept = report.kept
    if kept is not None and kept < min_kept:
        warnings.warn(
            f"{report.summary()}: {max(kept, 0):.0%} of what the adapters changed is left; merge to 'float' and quantize again "
            "with calibration data, train with merge_aware=True, or serve base and adapter apart",
            stacklevel=2,
        )
    quant_report = getattr(merged, "quant_report", None)
    if quant_report is not None:
        quant_report.warnings.append(report.summary())
    return merged, report


def _layers_to_merge(model: PeftModel, requantize: str | None) -> dict[str, LoraQuantLinear]:
    if requantize is not None and requantize not in MERGE:
        raise ValueError(f"requantize must be one of {', '.join(map(repr, MERGE))}, got {requantize!r}")
    if not isinstance(model, PeftModel):
        raise ValueError(f"model must be a PeftModel, got {type(model).__name__}; there is nothing to merge without adapters")
    found = {name: module for name, module in model.named_modules() if isinstance(module, LoraQuantLinear)}
    layers = {name: layer for name, layer in found.items() if layer.adapters() and not layer.disable_adapters}
    if not layers:
        raise ValueError(f"no packed layer has an active adapter (active: {model.active_adapters}); call model.set_adapter first")
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(f"{list_names(merged)} are merged already; call model.unmerge_adapter() first")
    for name, layer in layers.items():
        check_merge(name, layer.base_layer, requantize or layer.merge_to)
    if requantize not in (None, "dithered") and any(layer.merge_aware for layer in layers.values()):
        warnings.warn(f"the adapters were trained for a dithered merge, requantize={requantize!r} is another model", stacklevel=3)
    return layers


def _measure(model: PeftModel, layers: dict[str, LoraQuantLinear], how: str, windows: list[Tensor] | None) -> MergeReport:
    kept = {name: layer.kept for name, layer in layers.items() if layer.kept is not None}
    if windows is None:
        return MergeReport(how, None, None, kept)
    training = model.training
    model.eval()
    with_adapters = _View(model, layers, "adapters")
    lost = measure_divergence(with_adapters, _View(model, layers, "merged"), windows)
    there_was = measure_divergence(with_adapters, _View(model, layers, "base"), windows)
    model.train(training)
    return MergeReport(how, lost, there_was, kept)


class _View(nn.Module):
    """A merged model as it is, with its adapters apart, or without them."""

    def __init__(self, model: PeftModel, layers: dict[str, LoraQuantLinear], state: str) -> None:
        super().__init__()
        self._model, self._layers, self._state = [model], layers, state  # a list: not a child

    def forward(self, ids: Tensor) -> Any:
        model = self._model[0]
        ids = ids.to(model.device)
        if self._state == "merged":
            return model(ids)
        with _apart(self._layers.values()):
            if self._state == "adapters":
                return model(ids)
            with model.disable_adapter():
                return model(ids)


@contextmanager
def _apart(layers: Iterable[LoraQuantLinear]) -> Iterator[None]:
    """Merged layers with their original base and their adapters, for a while."""
    merged = [(layer, layer.base_layer, layer.merged_adapters) for layer in layers]
    try:
        for layer, _, _ in merged:
            layer.base_layer, layer.merged_adapters = layer._unmerged[0], []
        yield
    finally:
        for layer, base, names in merged:
            layer.base_layer, layer.merged_adapters = base, names


# ------------------------------------------------------------------------------------------------------------------ starting


@torch.no_grad()
def init_from_quantization_error(
    model: PeftModel, reference: nn.Module | str | Path, *, adapter_name: str = "default"
) -> dict[str, tuple[float, float]]:
    """Start an adapter at the best approximation of what quantizing the weights lost, in place of zero.

    ``scaling * B @ A`` becomes the rank-r part of ``W - dequantize(Q(W))`` with the largest singular values, shared evenly
    between A and B. DoRA's magnitudes start at the norms of the sum.

    Args:
        model: A PeftModel on a packed base (:func:`torchq.prepare_for_training`), before training.
        reference: The 16-bit model that was quantized, or a folder with its safetensors, of which one tensor is read at a time.
        adapter_name: Which adapter.

    Returns:
        Layer -> relative error of the weight, ``|W - effective| / |W|``, before and after.

    Raises:
        ValueError: If no packed layer has the adapter, the reference lacks a layer or has it in another shape, or a packed weight
            is not the reference's (AWQ and SmoothQuant move scales between layers). Nothing has changed then.
    """
    base = model.get_base_model()
    layers = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, LoraQuantLinear) and adapter_name in module.lora_A
    }
    if not layers:
        raise ValueError(f"no packed layer has an adapter {adapter_name!r}; adapters: {', '.join(model.peft_config)}")
    weights = _reference_weights(reference)
    missing = [name for name in layers if name not in weights]
    if missing:
        raise ValueError(f"the reference has no weight for {list_names(missing)}; is it the model that was quantized?")
    factors, errors = {}, {}
    for name, layer in layers.items():
        weight = weights[name]().float()
        packed = layer.base_layer.dequantize(torch.float32)
        if layer.base_layer.transposed:
            weight = weight.t()
        if weight.shape != packed.shape:
            raise ValueError(f"{name} is {list(packed.shape)}, in the reference {list(weight.shape)}")
        weight = weight.to(packed.device)
        error, norm = weight - packed, torch.linalg.norm(weight).item()
        before = torch.linalg.norm(error).item() / max(norm, 1e-30)
        if before > _FOLDED:
            raise ValueError(
                f"{name} is {before:.0%} away from the reference: it was not made from that weight, or AWQ or SmoothQuant has "
                "moved scales into it"
            )
        rank = layer.r[adapter_name]
        u, s, vh = torch.linalg.svd(error, full_matrices=False)
        root = s[:rank].sqrt()
        b, a = u[:, :rank] * root, root.unsqueeze(1) * vh[:rank]
        errors[name] = before, torch.linalg.norm(error - b @ a).item() / max(norm, 1e-30)
        factors[name] = a, b / layer.scaling[adapter_name]
    for name, (a, b) in factors.items():
        layer = layers[name]
        layer.lora_A[adapter_name].weight.copy_(a)
        layer.lora_B[adapter_name].weight.copy_(b)
        if adapter_name in layer.lora_variant:
            layer.lora_variant[adapter_name].init(layer, adapter_name)
    return errors


def _reference_weights(reference: nn.Module | str | Path) -> dict[str, Any]:
    """Layer -> a function that returns its weight."""
    if isinstance(reference, nn.Module):
        modules = {
            name: to_linear(module) if isinstance(module, QuantLinear) else module for name, module in reference.named_modules()
        }
        return {
            name: (lambda m=m: m.weight.detach()) for name, m in modules.items() if isinstance(getattr(m, "weight", None), Tensor)
        }
    from safetensors import safe_open

    folder = Path(reference)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"reference={str(reference)!r} is no folder with safetensors; give the 16-bit model or its folder")

    def read(file: Path, name: str) -> Tensor:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(name)

    weights = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dict
                if name.endswith(".weight"):
                    weights[name.removesuffix(".weight")] = lambda file=file, name=name: read(file, name)
    return weights
