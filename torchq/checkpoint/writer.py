"""save_pretrained: a compressed-tensors checkpoint folder, written with bounded memory, whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.checkpoint.safetensors_io import ShardWriter
from torchq.checkpoint.schema import write_config
from torchq.fake_quant import FakeQuantLinear
from torchq.kv_scales import kv_cache_strategy
from torchq.linear import QuantLinear
from torchq.matching import class_names
from torchq.model_utils import list_names
from torchq.scheme import Scheme

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
REPORT_NAME = "quant_report.json"
_ROUTER_CLASS = re.compile(r"Router|Gating|Gate(?![a-z])")  # vLLM builds these as Linear layers


def save_pretrained(model: nn.Module, folder: str | Path, *, tokenizer: Any = None, max_shard_size: int | str = "5GB") -> None:
    """Save a quantized model as a compressed-tensors checkpoint that vLLM, transformers and torchq load.

    Writes safetensors shards (one layer in memory at a time), ``config.json``, ``generation_config.json``, the
    tokenizer's files and ``quant_report.json`` into a temporary folder beside ``folder``, then renames it: a crash leaves no
    half checkpoint. (An empty ``folder`` that exists, which may be a mount point or a link, is kept: there the temporary folder
    is inside, and ``config.json``, without which nothing loads, is moved last.)

    Args:
        model: A transformers model that :func:`torchq.quantize_` quantized.
        folder: Where to; must not exist, or be empty.
        tokenizer: Its files are saved too (chat template included).
        max_shard_size: Bytes per file, or a string such as ``"5GB"`` (10^9) or ``"5GiB"``.

    Raises:
        FileExistsError: If ``folder`` exists and is not empty.
        TypeError: If ``model`` is not a transformers model.
        ValueError: If nothing in it is quantized, or it is fake-quantized (:func:`torchq.convert_qat_` comes first), a layer's
            scheme has no checkpoint format (NF4), or ``max_shard_size`` is not a size.
    """
    target = Path(folder)
    limit = parse_size(max_shard_size)
    check_saveable(model, target)
    own_names = modules_with_own_names(model)
    if own_names:
        warnings.warn(
            f"{list_names(sorted(own_names))} are parts of larger tensors in the original checkpoint of this architecture, which "
            "quantized layers cannot be: they keep the names of the model, which torchq and transformers load, vLLM may not",
            stacklevel=2,
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    existed = target.exists()
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target if existed else target.parent))
    try:
        names = write_weights(model, staging, limit)
        _write_configs(model, names, staging)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        report = getattr(model, "quant_report", None)
        if report is not None:
            report.to_json(staging / REPORT_NAME)
        _publish(staging, target, existed)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _publish(staging: Path, target: Path, existed: bool) -> None:
    """Give the finished files their place: the folder itself is renamed, or moved into one that existed."""
    for file in staging.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    if not existed:
        staging.chmod(0o755)
        staging.rename(target)
        return
    moved = []
    try:
        for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
            file.rename(target / file.name)
            moved.append(target / file.name)
        staging.rmdir()
    except BaseException:
        for file in reversed(moved):
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
        raise


def check_saveable(model: nn.Module, target: Path) -> None:
    """Raise what :func:`save_pretrained` raises before it writes anything."""
    if not (hasattr(model, "config") and hasattr(model.config, "save_pretrained")):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}; save its state_dict() yourself")
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantLinear):
            raise ValueError(
                f"the model is fake-quantized for training ({name}); torchq.convert_qat_(model) packs it, which can then be "
                "saved (a run that goes on is saved by torch.save(model.state_dict(), ...))"
            )
    if not any(isinstance(module, QuantLinear) for module in model.modules()):
        raise ValueError("nothing in the model is quantized; call quantize_ first, or use model.save_pretrained")
    problem = missing_format({name: module.scheme for name, module in model.named_modules() if isinstance(module, QuantLinear)})
    if problem is not None:
        raise ValueError(problem)
    check_output_folder(target)


def missing_format(schemes: Mapping[str, Scheme]) -> str | None:
    """Say which layers (name -> scheme) have a scheme without a checkpoint format, and what to do; None if there are none."""
    names = [name for name, scheme in schemes.items() if scheme.format == "nf4"]
    if not names:
        return None
    return (
        f"scheme {schemes[names[0]].name} of {list_names(names)} has no checkpoint format that vLLM or compressed-tensors read: "
        "it is for training. To save such a model, train adapters and save those, or convert it with torchq.dequantize_(model) "
        "and then torchq.quantize_(model, 'W4A16')"
    )


def check_output_folder(target: Path) -> None:
    """Raise FileExistsError unless ``target`` does not exist or is an empty folder."""
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{target} exists and is not empty; choose another folder or remove it first")
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; choose another folder")


def parse_size(size: int | str) -> int:
    """Return a number of bytes from an int or a string such as ``"5GB"`` or ``"512MiB"``."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B\s*", str(size), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"max_shard_size must be a number of bytes or a string such as '5GB', got {size!r}")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


# ------------------------------------------------------------------------------------------------------------------- weights


def module_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (module name, its own tensors by full name) in module order, in the checkpoint's layout, ties left out.

    Tensors of one module at a time: where the layout in memory is another, a layer's canonical tensors are made here.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, module in model.named_modules():
        tensors: dict[str, Tensor] = {}
        module._save_to_state_dict(tensors, f"{name}." if name else "", keep_vars=False)
        kept = {key: value for key, value in tensors.items() if isinstance(value, Tensor) and key not in tied}
        if kept:
            yield name, kept


def planned_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """As :func:`module_tensors`, on the meta device: shapes and dtypes without converting or copying anything."""
    from torchq.linear import buffer_specs

    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = {key: p for key, p in module._parameters.items() if p is not None}
        if isinstance(module, QuantLinear):
            specs = buffer_specs(module.scheme, module.out_features, module.in_features, module.scale_dtype)
            planned = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in specs.items()}
        else:
            planned = {
                key: b for key, b in module._buffers.items() if b is not None and key not in module._non_persistent_buffers_set
            }
        planned |= own
        kept = {prefix + key: value.detach().to("meta") for key, value in planned.items() if prefix + key not in tied}
        if kept:
            yield name, kept


def checkpoint_names(model: nn.Module) -> dict[str, str]:
    """Return checkpoint tensor name -> model module name."""
    to_checkpoint = checkpoint_converter(model)
    return {key: name for name, tensors in planned_tensors(model) for key in to_checkpoint(tensors)}


def write_weights(model: nn.Module, folder: Path, max_shard_bytes: int) -> dict[str, str]:
    """Write the shards (and the index, if there are several). Returns :func:`checkpoint_names`."""
    to_checkpoint = checkpoint_converter(model)
    units = [(name, to_checkpoint(tensors)) for name, tensors in planned_tensors(model)]
    shards: list[dict[str, Tensor]] = [{}]
    shard_of: dict[str, int] = {}
    size = total = 0
    for name, tensors in units:  # a module's tensors stay in one file
        nbytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1].update(tensors)
        shard_of[name] = len(shards) - 1
        size, total = size + nbytes, total + nbytes
    files = [WEIGHTS_NAME]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        weight_map = {key: files[i] for i, shard in enumerate(shards) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    written: Iterator[tuple[int, dict[str, Tensor]]] = (
        (shard_of[name], to_checkpoint(own)) for name, own in module_tensors(model)
    )
    for shard, group in itertools.groupby(written, key=lambda item: item[0]):
        with ShardWriter(folder / files[shard], shards[shard]) as writer:
            for _, tensors in group:
                for key, tensor in tensors.items():
                    writer.write(key, tensor)
    return {key: name for name, tensors in units for key in tensors}


def checkpoint_converter(model: nn.Module) -> Any:
    """Return a function that gives a module's tensors the names (and for fused ones the split) of the original checkpoint.

    transformers 5 renames, merges and splits tensors while loading; readers expect what the model was published with.
    """
    if not hasattr(model, "all_tied_weights_keys"):  # not a transformers 5 model
        return dict
    from transformers.core_model_loading import revert_weight_conversion

    kept = modules_with_own_names(model)

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if next(iter(tensors)).rpartition(".")[0] in kept:
            return tensors
        return dict(revert_weight_conversion(model, tensors))

    return convert


def modules_with_own_names(model: nn.Module) -> set[str]:
    """Modules whose tensors cannot be given their original names one by one, and keep their own, which transformers loads too.

    They are those whose weights are parts of one tensor in the original checkpoint (q, k, v of a fused Wqkv), and quantized
    ones that transformers does more to than rename.
    """
    if not hasattr(model, "all_tied_weights_keys"):
        return set()
    from transformers.core_model_loading import revert_weight_conversion

    owners: dict[str, set[str]] = {}
    kept: set[str] = set()
    for name, module in model.named_modules():
        own: dict[str, Tensor] = {kind: p.detach().to("meta") for kind, p in module._parameters.items() if p is not None}
        if isinstance(module, QuantLinear):
            own["weight"] = torch.empty(module.out_features, module.in_features, device="meta")
        for kind, tensor in own.items():
            converted = revert_weight_conversion(model, {f"{name}.{kind}" if name else kind: tensor})
            for key in converted:
                owners.setdefault(key, set()).add(name)
            if isinstance(module, QuantLinear) and not any(value is tensor for value in converted.values()):
                kept.add(name)
    for names in owners.values():
        kept |= names if len(names) > 1 else set()
    return kept


# ------------------------------------------------------------------------------------------------------------------- configs


def _write_configs(model: Any, names: dict[str, str], folder: Path) -> None:
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = quantization_config(model, names)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)


def quantization_config(model: nn.Module, names: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model, with modules under the names of the checkpoint, and of the model if other.

    Args:
        model: A quantized model.
        names: :func:`checkpoint_names` of the model, if known.

    Raises:
        ValueError: If a layer's scheme has no checkpoint format.
    """
    names = checkpoint_names(model) if names is None else names
    module_name: dict[str, str] = {}  # model module -> checkpoint module
    for key, name in names.items():
        module_name.setdefault(name, key.rpartition(".")[0])
    to_checkpoint = checkpoint_converter(model)
    for target in getattr(model, "all_tied_weights_keys", None) or {}:  # has no tensor of its own in the files
        renamed = next(iter(to_checkpoint({target: torch.empty(0, device="meta")})))
        module_name.setdefault(target.rpartition(".")[0], renamed.rpartition(".")[0])
    schemes: dict[str, Scheme] = {}
    unquantized: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        spellings = {module_name.get(name, name), name}  # transformers' own loader looks for its modules' names
        if isinstance(module, QuantLinear):
            schemes |= dict.fromkeys(spellings, module.scheme)
        elif "Linear" in class_names(module) or _is_router(module):
            unquantized += spellings
    problem = missing_format(schemes)
    if problem is not None:
        raise ValueError(problem)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "expert" in name.lower():  # fused experts: vLLM looks each one up by name
            holder = name.rpartition(".")[0]
            stored = module_name.get(holder, holder)
            block = (stored if ".experts" in stored else holder).split(".experts")[0]
            pattern = rf"re:{re.escape(block)}\.experts(\..*)?$"
            if pattern not in unquantized:
                unquantized.append(pattern)
    return write_config(schemes, unquantized, kv_cache_strategy(model))


def _is_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return _ROUTER_CLASS.search(type(module).__name__) is not None and isinstance(weight, Tensor) and weight.ndim == 2
