"""What a config means for a model, and every check that comes before the first weight changes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from torchq.config import DEFAULT_IGNORE, QuantConfig
from torchq.fake_quant import FakeQuantLinear
from torchq.linear import QuantLinear
from torchq.matching import class_names, first_match, is_conv1d, matches
from torchq.model_utils import collapse, linear_shape, list_names, quantization_method, weight_of
from torchq.scheme import Scheme

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OTHER_QUANTIZERS = ("bitsandbytes", "gptqmodel", "auto_gptq", "awq", "hqq", "eetq", "aqlm", "optimum.quanto", "torchao")
_READS_WEIGHTS_OF: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("out_proj",),
    nn.TransformerEncoderLayer: ("linear1", "linear2"),  # its fast path, in eval mode without gradients
}


@dataclass
class LayerPlan:
    """One weight that will be quantized, or the reason why it will not.

    Attributes:
        names: Module names; several if one module, or one weight, is used more than once.
        module: The (first) module.
        scheme: How it is quantized, or None.
        reason: Why it is left as it is.
        ignored: Whether the config asked for that (False: torchq cannot quantize it).
    """

    names: list[str]
    module: nn.Module
    scheme: Scheme | None = None
    reason: str | None = None
    ignored: bool = True
    modules: dict[str, nn.Module] = field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------------------- plan


def plan_layers(model: nn.Module, config: QuantConfig) -> list[LayerPlan]:
    """Decide for every targeted module, and every fused 3-D expert parameter, what happens to it. Changes nothing.

    Raises:
        ValueError: If a pattern matches no module, nothing is left to quantize, or ``config.strict`` and something cannot be.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ValueError(f"{list_names(lazy)} are not initialized yet (lazy modules); run the model once before quantize_")
    if "Linear" in class_names(model):
        raise ValueError("model is a single Linear layer, which cannot be replaced in place; put it into an nn.Sequential")
    _check_patterns(modules, config)
    plans: dict[int, LayerPlan] = {}
    read_directly = _weights_read_directly(modules)
    output_embedding = _output_embedding(model) if config.ignore == DEFAULT_IGNORE else None
    default_scheme = config.resolve()
    for name, module in modules.items():
        target = first_match(config.targets, name, module)
        if target is None or not ("Linear" in class_names(module) or target == name or target in class_names(module)):
            continue
        plan = LayerPlan([name], module, default_scheme)
        override = first_match(config.overrides, name, module)
        if module is output_embedding or first_match(config.ignore, name, module) is not None:
            plan.scheme, plan.reason = None, "in ignore"
        elif override is not None:
            plan.scheme = config.resolve_override(override)
            plan.reason = None if plan.scheme else "in overrides"
        obstacle = read_directly.get(name) or _obstacle(module)
        if plan.scheme is not None and obstacle is not None:
            plan.scheme, plan.reason, plan.ignored = None, obstacle, False
        _add(plans, plan)
    result = list(plans.values()) + _expert_plans(model, config)
    unsupported = [plan for plan in result if not plan.scheme and not plan.ignored]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for plan in unsupported:
        by_reason[plan.reason or ""] += plan.names
    lines = "\n".join(f"  {reason}: {list_names(names)}" for reason, names in by_reason.items())
    if not any(plan.scheme for plan in result):
        raise ValueError(
            f"nothing to quantize: of {len(modules)} modules, none that targets={config.targets} matches is left after ignore "
            f"and overrides; print(model) shows the names" + (f". Not supported:\n{lines}" if lines else "")
        )
    if config.strict and unsupported:
        raise ValueError(f"strict=True and these cannot be quantized; ignore them or set strict=False:\n{lines}")
    return result


def _add(plans: dict[int, LayerPlan], plan: LayerPlan) -> None:
    """Add a plan, merged with that of the same module or the same weight."""
    weight = getattr(plan.module, "weight", None)
    key = id(weight) if isinstance(weight, Tensor) else id(plan.module)
    known = plans.setdefault(key, plan)
    if known is not plan:
        known.names += plan.names
        if plan.scheme is None:  # left alone under one name: the shared weight is left alone
            known.scheme, known.reason, known.ignored = None, plan.reason, plan.ignored
    known.modules[plan.names[0]] = plan.module


def _check_patterns(modules: dict[str, nn.Module], config: QuantConfig) -> None:
    for field_name, patterns in (
        ("targets", config.targets),
        ("ignore", config.ignore),
        ("overrides", config.overrides),
    ):
        if field_name == "ignore" and patterns == DEFAULT_IGNORE:
            continue
        for pattern in patterns:
            found = {name: module for name, module in modules.items() if matches(pattern, name, module)}
            if not found:
                linears = [name for name, module in modules.items() if "Linear" in class_names(module)]
                raise ValueError(
                    f"{field_name}: {pattern!r} matches no module of {type(modules['']).__name__}; give a class name "
                    f"('Linear'), an exact name or 're:<pattern>'. Linear layers: {list_names(linears)}"
                )
            if any("Linear" in class_names(module) for module in found.values()):
                continue
            for name, module in found.items():
                if any("Linear" in class_names(child) for child in module.modules()):
                    inside = re.escape(f"{name}.") if name else ""
                    raise ValueError(
                        f"{field_name}: {pattern!r} matches {name or 'the model'} ({type(module).__name__}), which contains "
                        f"Linear layers but is none, so it would have no effect; use 're:{inside}.*' to mean the layers in it"
                    )


def _output_embedding(model: nn.Module) -> nn.Module | None:
    """The layer that maps to the vocabulary, whatever its name, or a top-level ``lm_head``."""
    getter = getattr(model, "get_output_embeddings", None)
    try:
        found = getter() if callable(getter) else None
    except (AttributeError, NotImplementedError):
        found = None
    return found if isinstance(found, nn.Module) else getattr(model, "lm_head", None)


def _obstacle(module: nn.Module) -> str | None:
    """Why a module cannot be replaced by a QuantLinear, or None: it must compute what its weight says, and own that weight."""
    computes_linear = is_conv1d(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)
    if not computes_linear or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from others (parametrization, weight norm, pruning)"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    return None if weight.numel() else "its weight is empty"


def _weights_read_directly(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Layers whose parent reads their weight instead of calling them -> the reason to leave them alone."""
    return {
        f"{name}.{child}" if name else child: f"nn.{kind.__name__} reads its weight directly"
        for name, module in modules.items()
        for kind, children in _READS_WEIGHTS_OF.items()
        if isinstance(module, kind)
        for child in children
    }


def _expert_plans(model: nn.Module, config: QuantConfig) -> list[LayerPlan]:
    """Stacked matrices such as fused experts, [experts, ., .]: no nn.Linear, so they stay in 16 bits."""
    plans = []
    for name, parameter in model.named_parameters():
        owner_name = name.rpartition(".")[0]
        owner = model.get_submodule(owner_name)
        stacked = parameter.ndim == 3 and ("expert" in name.lower() or min(parameter.shape) > 1)
        if not stacked or isinstance(owner, (nn.modules.conv._ConvNd, ParametrizationList)):
            continue
        holder = nn.Module()
        holder.register_parameter("weight", parameter)
        plan = LayerPlan([name], holder, None, "3-D parameter (fused experts), not supported yet", False)
        if first_match(config.ignore, name, owner) or first_match(config.ignore, owner_name, owner):
            plan.reason, plan.ignored = "in ignore", True
        plans.append(plan)
    return plans


# ----------------------------------------------------------------------------------------------------------------- preflight


def check_not_quantized(model: nn.Module) -> None:
    """Raise a ValueError if a model is quantized already, by torchq or by another tool."""
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, FakeQuantLinear):
            raise ValueError(
                f"the model is fake-quantized for training already ({name}); torchq.convert_qat_(model) packs it, or start "
                "from the 16-bit model"
            )
        if isinstance(module, QuantLinear):
            raise ValueError(
                f"the model is already quantized by torchq ({name}); start from the 16-bit model, load the checkpoint with "
                "load_pretrained(..., dequantize=True), or call torchq.dequantize_(model)"
            )
        if kind.__module__.startswith(_OTHER_QUANTIZERS):
            raise ValueError(
                f"the model is already quantized: {name} is a {kind.__module__}.{kind.__name__}; load the 16-bit model instead"
            )
    method = quantization_method(model)
    if method not in (None, "gguf"):  # transformers dequantizes GGUF files while loading
        raise ValueError(
            f"the model is already quantized: its config says quant_method={method!r}; load the 16-bit model instead"
        )
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.startswith(_OTHER_QUANTIZERS):
            raise ValueError(
                f"the model is already quantized: {name} is a {type(parameter).__name__}; load the 16-bit model instead"
            )
    packed = [name for name, p in model.named_parameters() if p.ndim == 2 and not p.is_floating_point()]
    if packed:
        raise ValueError(f"the model is already quantized: {list_names(packed)} hold integers; load the 16-bit model instead")


def preflight(plans: list[LayerPlan], *, calibrated: bool = False) -> None:
    """Check every layer that will be quantized; one error per kind of problem lists all layers that have it. Changes nothing."""
    todo = [plan for plan in plans if plan.scheme is not None]
    _check_calibration(todo, calibrated)
    _check_group_sizes(todo)
    wrong = [f"{p.names[0]} ({weight_of(p.module).dtype})" for p in todo if weight_of(p.module).dtype not in _FLOAT_DTYPES]
    if wrong:
        raise ValueError(f"weights must be float16, bfloat16 or float32, got {list_names(wrong)}; cast the model first")
    meta = [plan.names[0] for plan in todo if weight_of(plan.module).is_meta]
    if meta:
        raise ValueError(f"{list_names(meta)} are on the meta device and hold no values; load the model onto a real device")
    broken = [plan.names[0] for plan in todo if not is_finite(weight_of(plan.module))]
    if broken:
        raise ValueError(f"weights hold NaN or inf: {list_names(broken)}; reload or repair the model, or add them to ignore")


def check_kv_cache(config: QuantConfig, *, calibrated: bool, qat: bool = False) -> None:
    """Check that there is data to measure keys and values on, and that training will not change them afterwards."""
    if config.kv_cache is None:
        return
    if qat:
        raise NotImplementedError(
            f"qat=True does not support kv_cache={config.kv_cache!r}: training changes keys and values after they were measured; "
            "set kv_cache=None"
        )
    if not calibrated:
        raise ValueError(
            f"kv_cache={config.kv_cache!r} has static scales, which need calibration data: pass quantize_(..., "
            "calibration=texts, tokenizer=tokenizer) (--calibration FILE on the command line), or set kv_cache=None"
        )


def check_trainable(plans: list[LayerPlan], config: QuantConfig) -> None:
    """Check what quantization-aware training asks for beyond :func:`preflight`. Changes nothing."""
    if config.fuse_siblings:
        raise NotImplementedError("qat=True does not support fuse_siblings=True; call fuse_siblings_(model) after convert_qat_")
    unknown, static = [], []
    for plan in plans:
        if plan.scheme is None:
            continue
        if plan.scheme.weights.type != "int" and plan.scheme.weights.num_bits != 8:
            unknown.append(f"{plan.names[0]} ({plan.scheme.name})")
        elif plan.scheme.needs_calibration:
            static.append(f"{plan.names[0]} ({plan.scheme.name})")
    if unknown:
        raise NotImplementedError(
            f"qat=True supports integer and fp8 weights, with dynamic activation scales or none, got {list_names(unknown)}"
        )
    if static:
        raise NotImplementedError(
            f"qat=True does not support static activation scales, got {list_names(static)}; use FP8_DYNAMIC or W8A8 (scales at "
            "run time)"
        )


def _check_calibration(todo: list[LayerPlan], calibrated: bool) -> None:
    static = [plan for plan in todo if plan.scheme is not None and plan.scheme.needs_calibration]
    if static and not calibrated:
        assert static[0].scheme is not None
        dynamic = "FP8_DYNAMIC" if static[0].scheme.weights.type == "float" else "W8A8"
        raise ValueError(
            f"scheme {static[0].scheme.name} has static activation scales, which need calibration data: pass "
            "quantize_(..., calibration=texts, tokenizer=tokenizer) (--calibration FILE on the command line), or use "
            f"{dynamic} (scales at run time)"
        )


def _check_group_sizes(todo: list[LayerPlan]) -> None:
    bad: dict[tuple[int, int], list[str]] = defaultdict(list)
    for plan in todo:
        assert plan.scheme is not None
        if plan.scheme.weights.type == "nf":  # whose blocks run on over the ends of rows
            continue
        group_size, (_, in_features) = plan.scheme.weights.group_size, linear_shape(plan.module)
        if group_size is not None and in_features % group_size:
            bad[group_size, in_features].append(plan.names[0])
        if plan.scheme.weights.block_structure and in_features % plan.scheme.weights.block_structure[1]:
            bad[plan.scheme.weights.block_structure[1], in_features].append(plan.names[0])
    if not bad:
        return
    common = 0
    for plan in todo:
        common = math.gcd(common, linear_shape(plan.module)[1])
    fitting = [str(size) for size in (256, 128, 64, 32, 16) if common % size == 0] + ["-1"]
    lines = []
    for (group_size, in_features), names in bad.items():
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        lines.append(f"group_size={group_size} does not divide in_features={in_features} of {names[0]}{more}")
    blocks = any(plan.scheme and plan.scheme.weights.block_structure for plan in todo)
    remedy = "use FP8_DYNAMIC" if blocks else f"use group_size={' or '.join(fitting)}"
    everything = "\n".join(f"  {name}: in_features={size}" for (_, size), names in bad.items() for name in collapse(names))
    raise ValueError(f"{'; '.join(lines)}; {remedy}, or add them to ignore. All layers it does not fit:\n{everything}")


def is_finite(weight: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor inf; without a copy of it."""
    low, high = weight.detach().aminmax() if weight.numel() else (weight.new_zeros(()), weight.new_zeros(()))
    return bool(torch.isfinite(low) & torch.isfinite(high))
