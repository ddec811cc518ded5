"""``quantization_config`` of a compressed-tensors checkpoint, to and from :class:`torchq.scheme.Scheme`.

Written for readers two or three minor versions behind: fields that readers forbid are never written, ``ignore`` holds
exact names (vLLM
knows no class names there), every group carries its ``format``. Source: compressed-tensors 0.15 to 0.20, vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchq.scheme import QuantArgs, Scheme

_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "group_size": None, "dynamic": False}
VERSION = "0.17.0"  # of the compressed-tensors format that is written


@dataclass(frozen=True)
class SchemeGroup:
    """One entry of ``config_groups``: which modules (names, ``re:`` patterns, class names) have which scheme."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True)
class ParsedConfig:
    """What a ``quantization_config`` says."""

    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...]
    kv_cache_strategy: str | None = None  # of static fp8 scales of keys and values

    def scheme_for(self, name: str, class_names: Iterable[str]) -> Scheme | None:
        """Return the scheme of a module by its checkpoint name, or None: exact name before pattern before class name."""
        classes = set(class_names)
        for pattern in self.ignore:
            if pattern == name or pattern in classes or (pattern.startswith("re:") and re.match(pattern[3:], name)):
                return None
        for rank in range(3):
            for group in self.groups:
                for target in group.targets:
                    is_pattern = target.startswith("re:")
                    found = (
                        target == name,
                        is_pattern and re.match(target[3:], name) is not None,
                        target in classes,
                    )[rank]
                    if found:
                        return group.scheme
        return None


def write_config(
    schemes: Mapping[str, Scheme], unquantized: Iterable[str], kv_cache_strategy: str | None = None
) -> dict[str, Any]:
    """Return the ``quantization_config`` block of config.json.

    Args:
        schemes: Checkpoint name of each quantized module -> its scheme.
        unquantized: Checkpoint names (or ``re:`` patterns) of the modules that readers would take for quantized ones.
        kv_cache_strategy: ``"tensor"`` or ``"attn_head"`` where keys and values have static fp8 scales.
    """
    by_settings: dict[tuple[QuantArgs, QuantArgs | None], list[str]] = {}
    for name, scheme in schemes.items():
        by_settings.setdefault((scheme.weights, scheme.input_activations), []).append(name)
    ordered = sorted(by_settings.items(), key=lambda item: -len(item[1]))
    groups, formats = {}, []
    for index, ((weights, activations), names) in enumerate(ordered):
        scheme = Scheme(weights, activations)
        # The largest group is "every Linear": class names have the lowest priority. vLLM's head is no Linear to it.
        targets = sorted(names) if index else ["Linear", *(name for name in names if name.split(".")[-1] == "lm_head")]
        formats.append(scheme.format)
        groups[f"group_{index}"] = {
            "targets": targets,
            "weights": _write_args(weights),
            "input_activations": None if activations is None else _write_args(activations),
            "output_activations": None,
            "format": scheme.format,
        }
    return {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": groups,
        "ignore": sorted(unquantized),
        "kv_cache_scheme": None if kv_cache_strategy is None else _KV_CACHE | {"strategy": kv_cache_strategy},
        "sparsity_config": {},
        "transform_config": {},
    }


def _write_args(args: QuantArgs) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_bits": args.num_bits,
        "type": args.type,
        "symmetric": args.symmetric,
        "strategy": args.strategy,
        "group_size": args.group_size,
        "dynamic": args.dynamic,
    }
    if args.block_structure is not None:
        fields["block_structure"] = list(args.block_structure)
    return fields


def read_config(config: Mapping[str, Any]) -> ParsedConfig:
    """Parse a ``quantization_config`` block, torchq's or llm-compressor's.

    Raises:
        ValueError: If it is not compressed-tensors, or is damaged.
        NotImplementedError: If it uses something torchq does not support, naming it.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be a JSON object, got {config!r}")
    method = config.get("quant_method")
    if method != "compressed-tensors":
        raise ValueError(f"quant_method must be 'compressed-tensors', got {method!r}")
    for key in ("transform_config", "sparsity_config"):
        settings = _object(config, key)
        if settings.get("config_groups") or settings.get("targets"):
            raise NotImplementedError(f"{key} in quantization_config is not supported")
    groups = []
    for group_name, group in _object(config, "config_groups").items():
        if not isinstance(group, Mapping) or not group.get("weights"):
            raise NotImplementedError(f"config_groups[{group_name!r}] quantizes no weights; torchq reads weight schemes only")
        if group.get("output_activations"):
            raise NotImplementedError(f"config_groups[{group_name!r}] quantizes output_activations, which is not supported")
        scheme = _read_scheme(group_name, group)
        declared = group.get("format") or config.get("format")
        if declared not in (None, scheme.format, "mixed-precision"):
            raise NotImplementedError(
                f"config_groups[{group_name!r}] is stored as format={declared!r}, torchq reads this scheme as {scheme.format!r}"
            )
        groups.append(SchemeGroup(_patterns(group, "targets"), scheme))
    if not groups:
        raise ValueError("quantization_config has no config_groups")
    return ParsedConfig(tuple(groups), _patterns(config, "ignore"), _read_kv_cache(_object(config, "kv_cache_scheme")))


def _read_kv_cache(fields: Mapping[str, Any]) -> str | None:
    """Strategy of a ``kv_cache_scheme``; other than static fp8 is an error, or the model would lose it in silence."""
    if not fields:
        return None
    strategy = fields.get("strategy") or "tensor"
    meant = {name: fields.get(name, default) for name, default in _KV_CACHE.items() if name != "strategy"}
    wanted = {name: default for name, default in _KV_CACHE.items() if name != "strategy"}
    if strategy not in ("tensor", "attn_head") or meant != wanted:
        different = {name: value for name, value in meant.items() if value != wanted[name]}
        raise NotImplementedError(
            "kv_cache_scheme in quantization_config must be static symmetric fp8 with strategy 'tensor' or 'attn_head', got "
            f"strategy={strategy!r}, {different}; set kv_cache_scheme to null in config.json to load the weights with a cache in "
            "16 bits (and drop the k_scale and v_scale tensors, if there are any)"
        )
    return str(strategy)


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} in quantization_config must be a JSON object, got {value!r}")
    return value


def _patterns(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError(f"{key} in quantization_config must be a list of names and patterns, got {value!r}")
    for pattern in value:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{key} in quantization_config: {pattern!r} is not a regular expression: {error}") from error
    return tuple(value)


def _read_scheme(group_name: str, group: Mapping[str, Any]) -> Scheme:
    """Parse one group; settings that make no sense are a ValueError, those that torchq cannot combine NotImplementedError."""
    activations = group.get("input_activations")
    try:
        arguments = _read_args(group["weights"]), _read_args(activations) if activations else None, _scheme_name(group)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"config_groups[{group_name!r}] is damaged: {error}") from error
    try:
        return Scheme(*arguments)
    except ValueError as error:
        raise NotImplementedError(f"config_groups[{group_name!r}] is not supported: {error}") from error


def _read_args(fields: Mapping[str, Any]) -> QuantArgs:
    num_bits, kind = fields.get("num_bits", 8), fields.get("type", "int")
    if kind not in ("int", "float"):
        raise ValueError(f"type must be 'int' or 'float', got {kind!r}")
    if kind == "float" and num_bits != 8:
        raise NotImplementedError(f"type='float' with num_bits={num_bits} is not supported yet")
    strategy, group_size = fields.get("strategy"), fields.get("group_size")
    if strategy in ("tensor_group", "attn_head") or fields.get("scale_dtype") == "torch.uint8":
        raise NotImplementedError(f"strategy={strategy!r} with scale_dtype={fields.get('scale_dtype')!r} is not supported yet")
    block = fields.get("block_structure")
    if isinstance(block, str):
        block = [int(size) for size in block.split("x")]
    return QuantArgs(
        num_bits=num_bits,
        type=kind,
        symmetric=fields.get("symmetric", True),
        strategy=strategy,
        group_size=group_size if strategy in (None, "group") else None,
        block_structure=None if block is None else (block[0], block[1]),
        dynamic=bool(fields.get("dynamic", False)),
    )


def _scheme_name(group: Mapping[str, Any]) -> str:
    """Name a scheme as a user would, e.g. W4A16 or FP8_DYNAMIC."""
    weights, activations = group["weights"], group.get("input_activations")
    if weights.get("type", "int") == "int":
        suffix = "" if weights.get("symmetric", True) else "_ASYM"
        if activations and activations.get("type", "int") == "float":
            return f"W{weights.get('num_bits', 8)}AFP8{suffix}"
        return f"W{weights.get('num_bits', 8)}A{'16' if not activations else activations.get('num_bits', 8)}{suffix}"
    if not activations:
        return "FP8_WEIGHT_ONLY"
    return "FP8_BLOCK" if weights.get("strategy") == "block" else "FP8_DYNAMIC" if activations.get("dynamic") else "FP8"
