"""load_pretrained: a compressed-tensors checkpoint into packed QuantLinear modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchq.checkpoint.safetensors_io import DTYPES, read_header
from torchq.checkpoint.schema import read_config
from torchq.checkpoint.writer import INDEX_NAME, REPORT_NAME, WEIGHTS_NAME, quantization_config
from torchq.dequantize import dequantize_
from torchq.model_utils import flag_configs, strip_quantization_config
from torchq.report import QuantReport

_LISTED = 10


def load_pretrained(
    model: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    dequantize: bool = False,
    revision: str | None = None,
    token: str | None = None,
) -> nn.Module:
    """Load a compressed-tensors checkpoint, torchq's or llm-compressor's; its weights stay packed.

    The model is built on the meta device and filled from the files, so the 16-bit weights of quantized layers never exist.

    Args:
        model: A folder, or a hub id.
        device: Where to; the CPU by default.
        dtype: Compute dtype, of the unquantized parameters and activations; the checkpoint's own by default. Scales keep theirs.
        dequantize: Return a plain model with ordinary Linear layers instead.
        revision: Branch, tag or commit on the hub.
        token: Access token for the hub.

    Returns:
        The model, of the class that ``config.json`` names, in eval mode.

    Raises:
        FileNotFoundError: If the folder, a shard or config.json does not exist.
        ValueError: If the checkpoint is not quantized with compressed-tensors, a file is damaged, or tensors are missing,
            unexpected, or of a wrong shape.
        NotImplementedError: If it uses a format or scheme torchq does not support.
    """
    folder = _resolve(model, revision, token)
    raw_config = _read_json(folder / "config.json")
    settings = raw_config.get("quantization_config")
    if settings is None:
        raise ValueError(f"{folder}: config.json has no quantization_config; load the model with transformers instead")
    parsed = read_config(settings)
    header = read_headers(folder)

    import transformers

    from torchq.integrations.transformers import PackedLoadConfig

    model_class = _model_class(transformers, raw_config)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.quantization_config = PackedLoadConfig(parsed, header).__dict__
    loaded, info = model_class.from_pretrained(
        folder,
        config=config,
        dtype=dtype or "auto",
        device_map=None if device is None else {"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are an error, but one that names them
        local_files_only=True,
    )
    info["integer_keys"] = [name for name, parameter in loaded.named_parameters() if not parameter.is_floating_point()]
    _check_complete(folder, info)
    strip_quantization_config(loaded)
    loaded.config.quantization_config = quantization_config(loaded)
    flag_configs(loaded, True)
    if (folder / REPORT_NAME).exists():
        loaded.quant_report = _read_report(folder / REPORT_NAME)
    if dequantize:
        dequantize_(loaded)
    return loaded.eval()


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return checkpoint tensor name -> (shape, dtype) over all shards, after checking that every file is there and whole."""
    index_path = folder / INDEX_NAME
    files = [WEIGHTS_NAME]
    if index_path.exists():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ValueError(f"{index_path} has no weight_map from tensor to file names; download or save the checkpoint again")
        files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; download or save the checkpoint again")
    header = {}
    for file in files:
        for name, entry in read_header(folder / file).items():
            if entry["dtype"] not in DTYPES:
                raise NotImplementedError(f"{name} in {file} has dtype {entry['dtype']}, which is not supported")
            header[name] = (tuple(entry["shape"]), DTYPES[entry["dtype"]])
    return header


def _resolve(model: str | Path, revision: str | None, token: str | None) -> Path:
    folder = Path(model)
    if folder.is_dir():
        return folder
    if isinstance(model, Path) or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{model} is not a folder, nor a hub id of the form 'owner/name'")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    return Path(snapshot_download(model, revision=revision, token=token, allow_patterns=patterns))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} has no {path.name}; is it a checkpoint folder?")
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object; download or save the checkpoint again")
    return data


def _read_report(path: Path) -> QuantReport:
    try:
        return QuantReport.from_dict(_read_json(path))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report of this torchq version ({error!r}); remove it to load the model") from error


def _model_class(transformers: Any, config: dict[str, Any]) -> Any:
    names = config.get("architectures") or []
    for name in names:
        found = getattr(transformers, str(name), None)
        if config.get("model_type") in transformers.CONFIG_MAPPING and hasattr(found, "from_pretrained"):
            return found
    raise ValueError(
        f"config.json has model_type={config.get('model_type')!r} and architectures={names}, which transformers "
        f"{transformers.__version__} does not know; torchq runs no code from a checkpoint"
    )


def _check_complete(folder: Path, info: dict[str, Any]) -> None:
    problems = []
    for kind, title in (
        ("missing_keys", "missing from the checkpoint"),
        ("unexpected_keys", "in the checkpoint but not in the model"),
        ("mismatched_keys", "of another shape than the model's"),
        ("integer_keys", "of integers where the model has floating point"),
        ("error_msgs", "errors"),
    ):
        keys = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in info.get(kind) or ())
        if keys:
            more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
            problems.append(f"{len(keys)} tensors {title}: {', '.join(keys[:_LISTED])}{more}")
    if any(".experts." in key and key.endswith("_scale") for key in info.get("unexpected_keys") or ()):
        raise NotImplementedError(f"{folder} has quantized experts, which are not supported yet: " + "; ".join(problems))
    if problems:
        raise ValueError(f"{folder} does not fit its config.json: " + "; ".join(problems))
