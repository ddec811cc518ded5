"""prepare_for_training: LoRA on a packed model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from torch import nn


def prepare_for_training(
    model: nn.Module,
    *,
    merge: Literal["dithered", "same_grid", "new_scales", "float"] | None = None,
    merge_aware: bool = False,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """Make a packed model ready for PEFT's adapters, in place; call it in place of ``peft.prepare_model_for_kbit_training``.

    Every parameter is frozen (packed weights are no parameters), and each packed layer becomes a LoRA layer without adapters
    (:class:`torchq.integrations.peft.LoraQuantLinear`), to which ``peft.get_peft_model``, ``PeftModel.from_pretrained`` or a
    trainer that is given a ``peft_config`` add theirs. Nothing is cast to float32: adapters are float32 by PEFT's default.

    Args:
        model: A model that :func:`torchq.quantize_` quantized or :func:`torchq.load_pretrained` loaded.
        merge: What PEFT's merging makes of packed layers: ``"dithered"`` (the merged weight on the scales there are, each value
            rounded up or down at a threshold of its own, so that small changes survive on average), ``"same_grid"`` (to the
            nearest on them, where small changes are lost), ``"new_scales"`` (to the nearest, with scales searched anew) or
            ``"float"`` (ordinary 16-bit layers, which keep everything). None: dithered, and new scales where weights are not
            integers.
            :func:`torchq.integrations.peft_merge.merge_adapters` measures what was lost.
        merge_aware: Whether adapters are trained through the rounding of their dithered merge (straight-through estimator), so
            that the merged model is the trained one. Integer weights only; no dropout.
        gradient_checkpointing: Whether to turn it on (not reentrant). Trainers have their own switch.

    Returns:
        The same model.

    Raises:
        ImportError: If PEFT is not installed.
        ValueError: If nothing in the model is quantized, it has LoRA layers already, or the settings contradict each other.
    """
    if find_spec("peft") is None:
        raise ImportError("prepare_for_training needs PEFT: pip install peft")
    from torchq.integrations import peft

    return peft.prepare_for_training(model, merge=merge, merge_aware=merge_aware, gradient_checkpointing=gradient_checkpointing)
