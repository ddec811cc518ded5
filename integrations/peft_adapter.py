"""PEFT: save an adapter with a sketch of the weights it was trained on, and load it only where it fits.

An adapter fits the layers it was trained on, quantized in any way. It does not fit another model's; nor the 16-bit original of
a base whose scales AWQ or SmoothQuant has moved between layers, since its inputs are other ones there. Names and shapes do not
tell.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from torchq._version import __version__
from torchq.checkpoint.safetensors_io import read_header
from torchq.integrations.peft import LoraQuantLinear, prepare_for_training
from torchq.linear import QuantLinear
from torchq.matching import is_conv1d
from torchq.model_utils import linear_shape, list_names

BASE_NAME = "torchq_base.json"
_NUM_SUMS = 8  # per layer
_OTHER_WEIGHTS = 0.7  # relative distance of sketches: other weights give about 1.4, a quantization of the same ones its own error
_OTHER_QUANTIZATION = 0.02


def save_adapter(model: PeftModel, folder: str | Path) -> None:
    """Save a model's adapters as PEFT does, with a sketch of the base that :func:`load_adapter` compares: ``torchq_base.json``.

    Args:
        model: The model.
        folder: Where to.

    Raises:
        ValueError: If adapters are merged: there is no base to describe then.
    """
    layers = {name: module for name, module in model.get_base_model().named_modules() if isinstance(module, LoraQuantLinear)}
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(f"adapters are merged into {list_names(merged)}; call model.unmerge_adapter() first")
    targeted = {name: layer for name, layer in layers.items() if layer.lora_A}
    model.save_pretrained(folder, state_dict=_tensors_without_packed_weights(model))
    report = getattr(model.get_base_model(), "quant_report", None)
    base = {
        "torchq_version": __version__,
        "schemes": sorted({layer.base_layer.scheme.name for layer in targeted.values()}),
        "merge_aware": any(layer.merge_aware for layer in targeted.values()),
        "scales_moved": any(fold.status == "folded" for fold in getattr(report, "folds", ())),
        "sketch": {name: sketch(layer.base_layer) for name, layer in targeted.items()},
    }
    (Path(folder) / BASE_NAME).write_text(json.dumps(base, indent=1) + "\n", encoding="utf-8")


def _tensors_without_packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """What PEFT looks for adapters in; ``state_dict()`` would also make the checkpoint's tensors of each packed layer."""
    packed = {id(buffer) for module in model.modules() if isinstance(module, QuantLinear) for buffer in module.buffers()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in packed}
    return dict(model.named_parameters(remove_duplicate=False)) | buffers


def load_adapter(model: nn.Module, folder: str | Path, *, adapter_name: str = "default", is_trainable: bool = False) -> PeftModel:
    """Load an adapter onto a packed or a 16-bit model after checking that it fits.

    Args:
        model: The base; a packed one is prepared (:func:`torchq.prepare_for_training`) if it is not. Or a PeftModel, which gets
            one more adapter.
        folder: With ``adapter_config.json`` and ``adapter_model.safetensors``; :func:`save_adapter`'s or PEFT's (then only names
            and shapes can be checked).
        adapter_name: What to call it.
        is_trainable: Whether it is to be trained.

    Raises:
        FileNotFoundError: If ``folder`` holds no adapter.
        ValueError: If the adapter was made for another base: layers that the model lacks, other shapes, other weights.
    """
    folder, wrapped = Path(folder), model if isinstance(model, PeftModel) else None
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}; is it the folder of an adapter?")
    check_adapter(model if wrapped is None else wrapped.get_base_model(), folder)
    if wrapped is not None:
        wrapped.load_adapter(str(folder), adapter_name, is_trainable=is_trainable)
        return wrapped
    packed = [module for module in model.modules() if isinstance(module, QuantLinear)]
    if packed and not any(isinstance(module, LoraQuantLinear) for module in model.modules()):
        prepare_for_training(model)
    return PeftModel.from_pretrained(model, str(folder), adapter_name=adapter_name, is_trainable=is_trainable)


def check_adapter(model: nn.Module, folder: Path) -> None:
    """Raise ValueError unless the adapter in ``folder`` fits ``model``; warn if it was trained on another quantization of it."""
    modules = dict(model.named_modules())
    missing, misshapen = [], []
    for key, entry in read_header(folder / "adapter_model.safetensors").items():
        name, _, factor = key.removeprefix("base_model.model.").rpartition(".lora_")
        if factor not in ("A.weight", "B.weight"):
            continue
        module = _base(modules.get(name))
        if module is None:
            missing.append(name)
            continue
        n, k = (module.out_features, module.in_features) if isinstance(module, QuantLinear) else linear_shape(module)
        size, expected = (entry["shape"][1], k) if factor == "A.weight" else (entry["shape"][0], n)
        if size != expected:
            misshapen.append(f"{name} (lora_{factor}: {size}, the layer has {expected})")
    if missing or misshapen:
        problems = [f"{len(set(missing))} layers that the model lacks: {list_names(sorted(set(missing)))}"] if missing else []
        problems += [f"{len(misshapen)} of other sizes: {list_names(misshapen)}"] if misshapen else []
        raise ValueError(f"{folder} is an adapter for another model: {'; '.join(problems)}")
    if (folder / BASE_NAME).is_file():
        _check_base(modules, folder)


def _check_base(modules: Mapping[str, nn.Module], folder: Path) -> None:
    try:
        base = json.loads((folder / BASE_NAME).read_text(encoding="utf-8"))
        sketches, schemes = base["sketch"], ", ".join(base["schemes"])
        merge_aware, scales_moved = base["merge_aware"], base["scales_moved"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / BASE_NAME} is damaged ({error!r}); remove it to load the adapter unchecked") from error
    distances = {name: _distance(sketches[name], modules[name]) for name in sketches if name in modules}
    mean = sum(distances.values()) / max(len(distances), 1)
    if mean > _OTHER_WEIGHTS:
        raise ValueError(
            f"{folder} was trained on other weights than the model's ({mean:.0%} apart); load the base it belongs to"
        )
    if mean > _OTHER_QUANTIZATION:
        what = f"the weights are {mean:.1%} from those that {folder} was trained on ({schemes})"
        if scales_moved:
            raise ValueError(f"{what}, and AWQ or SmoothQuant had moved scales between those: load the base it was trained on")
        if merge_aware:
            raise ValueError(
                f"{what}; an adapter trained with merge_aware=True is for that very grid: load the base it was trained on"
            )
        warnings.warn(f"{what}: another quantization of the same model", stacklevel=4)


def sketch(module: nn.Module) -> list[float]:
    """Return signed sums over a layer's weight, which tell weights apart: the same for the same weight, near for a rounded."""
    weight = _weight(module)
    n, k = weight.shape
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(2, (k,), generator=generator).mul_(2).sub_(1).float()
    rows = torch.randint(2, (_NUM_SUMS, n), generator=generator).mul_(2).sub_(1).float()
    return (rows @ (weight.float() @ columns.to(weight.device)).cpu()).tolist()


def _weight(module: nn.Module) -> Tensor:
    if isinstance(module, QuantLinear):
        return module.dequantize(torch.float32)
    weight: Any = module.weight
    return weight.detach().t() if is_conv1d(module) else weight.detach()


def _distance(expected: list[float], module: nn.Module) -> float:
    layer = _base(module)
    assert layer is not None
    before, now = torch.tensor(expected), torch.tensor(sketch(layer))
    return (torch.linalg.norm(now - before) / torch.linalg.norm(before).clamp_min(1e-30)).item()


def _base(module: nn.Module | None) -> nn.Module | None:
    """The layer itself, without its adapters."""
    base = getattr(module, "base_layer", module)
    return base if isinstance(base, nn.Module) and (isinstance(base, QuantLinear) or hasattr(base, "weight")) else None
