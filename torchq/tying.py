"""Weights that two modules share, when one of them is quantized."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq._undo import UndoLog
from torchq.model_utils import weight_of
from torchq.preflight import LayerPlan


def shared_parameters(model: nn.Module, todo: list[LayerPlan]) -> dict[str, str]:
    """Parameters (of embeddings, say) that are the weight of a layer to be quantized: the layer's -> the other's name."""
    plans = {id(weight_of(plan.module)): plan for plan in todo}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plan = plans.get(id(parameter))
        if plan is not None and name.rpartition(".")[0] not in plan.modules:
            shared[f"{plan.names[0]}.weight"] = name
    return shared


def untie(model: nn.Module, todo: list[LayerPlan], shared: dict[str, str], undo_log: UndoLog) -> list[str]:
    """Say which weights are separate now that one of them is quantized, and make transformers' records say so too."""
    names = {name for plan in todo for name in plan.names}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    broken = {
        target: source
        for target, source in tied.items()
        if target.rpartition(".")[0] in names or source.rpartition(".")[0] in names
    }
    if broken:
        undo_log.save_attribute(model, "all_tied_weights_keys")
        model.all_tied_weights_keys = {t: s for t, s in tied.items() if t not in broken}  # type: ignore[assignment]
        model_config: Any = getattr(model, "config", None)
        text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else None
        configs: tuple[Any, ...] = (model_config, text_config)  # vLLM reads the second
        for settings in configs:
            if getattr(settings, "tie_word_embeddings", False):
                undo_log.save_attribute(settings, "tie_word_embeddings")
                settings.tie_word_embeddings = False
    pairs = shared | broken
    if not pairs:
        return []
    listed = ", ".join(f"{target} from {source}" for target, source in pairs.items())
    return [f"untied {listed}: only the quantized layer changed, the other keeps its 16-bit weight"]
