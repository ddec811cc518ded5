"""quantize_: match modules -> plan -> check everything -> quantize layer by layer -> swap -> report."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from torchq._undo import UndoLog
from torchq._version import __version__
from torchq.algorithms.rtn import quantize_weight
from torchq.config import DEFAULT_IGNORE, QuantConfig
from torchq.linear import QuantLinear, buffer_specs
from torchq.matching import class_names, first_match, is_conv1d, matches
from torchq.report import LayerReport, QuantReport
from torchq.scheme import Scheme

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OTHER_QUANTIZERS = ("bitsandbytes", "gptqmodel", "auto_gptq", "awq", "hqq", "eetq", "aqlm", "optimum.quanto", "torchao")
_READS_WEIGHTS_OF: dict[type[nn.Module], tuple[str, ...]] = {
    nn.MultiheadAttention: ("out_proj",),
    nn.TransformerEncoderLayer: ("linear1", "linear2"),  # its fast path, in eval mode without gradients
}
_LISTED_NAMES = 3  # names an error message spells out before it counts the rest


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


def quantize_(
    model: nn.Module,
    config: str | Scheme | QuantConfig,
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    resume: str | None = None,
    progress: bool = True,
    undo: bool = True,
) -> QuantReport:
    """Quantize a model in place: its targeted Linear layers become packed :class:`~torchq.linear.QuantLinear` modules.

    Every layer is checked before the first weight is touched, and one error lists all that is wrong. Layers are then
    quantized and swapped one at a time, so memory never exceeds the model and one layer. A call that fails leaves the model
    as it was.

    Args:
        model: Any ``nn.Module``, typically a Hugging Face model, in float16, bfloat16 or float32.
        config: A scheme name such as ``"W4A16"``, a Scheme, or a :class:`~torchq.config.QuantConfig`.
        calibration: Not supported yet; must be None.
        tokenizer: Goes with ``calibration``.
        device: Where to compute, e.g. ``"cuda"``; each layer's own device by default. Results return to the layer's device.
        resume: Not supported yet; must be None.
        progress: Whether to show a progress bar on a terminal.
        undo: Whether to keep the replaced weights in a temporary file (as large as they are, in ``tempfile.gettempdir()``) until
            the call has succeeded, so that an interruption or an out-of-memory error half way can be undone. Without it,
            such a failure leaves the layers done so far quantized; wrong input is found before anything changes either way.

    Returns:
        A report on every layer. It is also kept as ``model.quant_report``.

    Raises:
        ValueError: If a pattern matches nothing, a layer cannot hold the scheme, the model is quantized already, a weight is not
            finite, or nothing would be quantized.
        TypeError: If ``model`` or ``config`` is of a wrong type.
        NotImplementedError: If the scheme or the algorithm is not supported yet.
    """
    config = _as_config(config)
    if isinstance(model, str):
        raise NotImplementedError(
            "model must be a loaded nn.Module: streaming from a folder or hub id is not supported yet; load it with "
            "transformers first, or use `torchq quantize MODEL -o OUT`"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for name, value in (("calibration", calibration), ("resume", resume)):
        if value is not None:
            raise NotImplementedError(f"{name} is not supported yet; leave {name}=None (data-free quantization)")
    started = time.perf_counter()
    check_not_quantized(model)
    plans = plan_layers(model, config)
    preflight(plans)
    report = QuantReport(
        scheme=config.resolve().name,
        algorithm=f"RTN, {config.rtn.scale_search} scales",
        num_parameters=0,
        torchq_version=__version__,
    )
    todo = [plan for plan in plans if plan.scheme is not None]
    shared = _shared_parameters(model, todo)
    with UndoLog(enabled=undo, num_bytes=sum(_weight(plan.module).nbytes for plan in todo)) as undo_log:
        entries = {}
        with _progress_bar("Quantizing", len(todo), progress) as advance:
            for plan in todo:
                entries[plan.names[0]] = _quantize_layer(model, plan, config, device, undo_log)
                advance()
        report.warnings += _untie(model, todo, shared, undo_log)
        undo_log.commit()
    report.layers = [entries.get(plan.names[0]) or _left_out(plan) for plan in plans]
    report.layers += _other_parameters(model, plans)
    report.num_parameters = sum(layer.num_parameters for layer in report.layers)
    report.seconds = time.perf_counter() - started
    report.warnings += _left_out_warnings(report)
    _mark_quantized(model, report)
    for message in report.warnings:
        warnings.warn(message, stacklevel=2)
    return report


def _as_config(config: str | Scheme | QuantConfig) -> QuantConfig:
    if isinstance(config, QuantConfig):
        return config
    if isinstance(config, (str, Scheme)):
        return QuantConfig(config)
    raise TypeError(f"config must be a scheme name, a Scheme or a QuantConfig, got {type(config).__name__}")


# --------------------------------------------------------------------------------------------------------------------- plan


def plan_layers(model: nn.Module, config: QuantConfig) -> list[LayerPlan]:
    """Decide for every targeted module, and every fused 3-D expert parameter, what happens to it. Changes nothing.

    Raises:
        ValueError: If a pattern matches no module, nothing is left to quantize, or ``config.strict`` and something cannot be.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise ValueError(f"{_names(lazy)} are not initialized yet (lazy modules); run the model once before quantize_")
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
    lines = "\n".join(f"  {reason}: {_names(names)}" for reason, names in by_reason.items())
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
                    f"('Linear'), an exact name or 're:<pattern>'. Linear layers: {_names(linears)}"
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
        if isinstance(module, QuantLinear):
            raise ValueError(
                f"the model is already quantized by torchq ({name}); start from the 16-bit model, or load the checkpoint with "
                "load_pretrained(..., dequantize=True)"
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
        raise ValueError(f"the model is already quantized: {_names(packed)} hold integers; load the 16-bit model instead")


def quantization_method(model: nn.Module) -> str | None:
    """Return ``quant_method`` of the model's config (an object or a dict), or None."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def preflight(plans: list[LayerPlan]) -> None:
    """Check every layer that will be quantized; one error per kind of problem lists all layers that have it. Changes nothing."""
    todo = [plan for plan in plans if plan.scheme is not None]
    _check_calibration(todo)
    _check_group_sizes(todo)
    wrong = [f"{p.names[0]} ({_weight(p.module).dtype})" for p in todo if _weight(p.module).dtype not in _FLOAT_DTYPES]
    if wrong:
        raise ValueError(f"weights must be float16, bfloat16 or float32, got {_names(wrong)}; cast the model first")
    meta = [plan.names[0] for plan in todo if _weight(plan.module).is_meta]
    if meta:
        raise ValueError(f"{_names(meta)} are on the meta device and hold no values; load the model onto a real device")
    broken = [plan.names[0] for plan in todo if not _is_finite(_weight(plan.module))]
    if broken:
        raise ValueError(f"weights hold NaN or inf: {_names(broken)}; reload or repair the model, or add them to ignore")


def _check_calibration(todo: list[LayerPlan]) -> None:
    static = [plan for plan in todo if plan.scheme is not None and plan.scheme.needs_calibration]
    if static:
        assert static[0].scheme is not None
        raise ValueError(
            f"scheme {static[0].scheme.name} has static activation scales, which need calibration data, and calibration is not "
            "supported yet; use FP8_DYNAMIC (scales at run time) instead"
        )


def _check_group_sizes(todo: list[LayerPlan]) -> None:
    bad: dict[tuple[int, int], list[str]] = defaultdict(list)
    for plan in todo:
        assert plan.scheme is not None
        group_size, (_, in_features) = plan.scheme.weights.group_size, _shape(plan.module)
        if group_size is not None and in_features % group_size:
            bad[group_size, in_features].append(plan.names[0])
        if plan.scheme.weights.block_structure and in_features % plan.scheme.weights.block_structure[1]:
            bad[plan.scheme.weights.block_structure[1], in_features].append(plan.names[0])
    if not bad:
        return
    common = 0
    for plan in todo:
        common = math.gcd(common, _shape(plan.module)[1])
    fitting = [str(size) for size in (256, 128, 64, 32, 16) if common % size == 0] + ["-1"]
    lines = []
    for (group_size, in_features), names in bad.items():
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        lines.append(f"group_size={group_size} does not divide in_features={in_features} of {names[0]}{more}")
    blocks = any(plan.scheme and plan.scheme.weights.block_structure for plan in todo)
    remedy = "use FP8_DYNAMIC" if blocks else f"use group_size={' or '.join(fitting)}"
    everything = "\n".join(f"  {name}: in_features={size}" for (_, size), names in bad.items() for name in collapse(names))
    raise ValueError(f"{'; '.join(lines)}; {remedy}, or add them to ignore. All layers it does not fit:\n{everything}")


def _is_finite(weight: Tensor) -> bool:
    low, high = weight.detach().aminmax() if weight.numel() else (weight.new_zeros(()), weight.new_zeros(()))
    return bool(torch.isfinite(low) & torch.isfinite(high))


# ------------------------------------------------------------------------------------------------------------------ quantize


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _shape(module: nn.Module) -> tuple[int, int]:
    """(out_features, in_features)."""
    rows, columns = _weight(module).shape
    return (columns, rows) if is_conv1d(module) else (rows, columns)


def _quantize_layer(
    model: nn.Module, plan: LayerPlan, config: QuantConfig, device: torch.device | str | None, undo_log: UndoLog
) -> LayerReport:
    """Quantize one weight and swap in QuantLinear wherever it is used."""
    assert plan.scheme is not None
    started = time.perf_counter()
    weight = _weight(plan.module).detach()
    home = weight.device
    matrix = weight.t().contiguous() if is_conv1d(plan.module) else weight
    quantized, relative_error = quantize_weight(matrix.to(device or home), plan.scheme, config.rtn)
    del matrix
    replacements: dict[int, QuantLinear] = {}
    for module in plan.modules.values():
        if id(module) not in replacements:
            replacements[id(module)] = QuantLinear.from_linear(module, quantized).to(home)
    undo_log.record(model, plan.modules)
    for name, module in plan.modules.items():
        set_module(model, name, replacements[id(module)])
    plan.module = replacements[id(plan.module)]
    plan.modules.clear()  # lets go of the weight
    out_features, in_features = quantized.q.shape
    specs = buffer_specs(plan.scheme, out_features, in_features, quantized.scale.dtype)
    bits = sum(math.prod(shape) * dtype.itemsize * 8 for name, (shape, dtype) in specs.items() if name != "weight_shape")
    return LayerReport(
        name=plan.names[0],
        status="quantized",
        num_parameters=quantized.q.numel(),
        bits_per_weight=bits / quantized.q.numel(),
        scheme=plan.scheme.name,
        format=plan.scheme.format,
        num_bits=plan.scheme.weights.num_bits,
        relative_error=relative_error,
        reason=f"also used as {', '.join(plan.names[1:])}" if len(plan.names) > 1 else None,
        seconds=time.perf_counter() - started,
    )


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` where ``name`` is."""
    parent_name, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent_name), attribute, module)


def _shared_parameters(model: nn.Module, todo: list[LayerPlan]) -> dict[str, str]:
    """Parameters (of embeddings, say) that are the weight of a layer to be quantized: the layer's -> the other's name."""
    plans = {id(_weight(plan.module)): plan for plan in todo}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plan = plans.get(id(parameter))
        if plan is not None and name.rpartition(".")[0] not in plan.modules:
            shared[f"{plan.names[0]}.weight"] = name
    return shared


def _untie(model: nn.Module, todo: list[LayerPlan], shared: dict[str, str], undo_log: UndoLog) -> list[str]:
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


# -------------------------------------------------------------------------------------------------------------------- report


def _left_out(plan: LayerPlan) -> LayerReport:
    weight = getattr(plan.module, "weight", None)
    numel, bits = (weight.numel(), weight.element_size() * 8) if isinstance(weight, Tensor) else (0, 0)
    return LayerReport(plan.names[0], "ignored" if plan.ignored else "skipped", numel, bits, reason=plan.reason)


def _other_parameters(model: nn.Module, plans: list[LayerPlan]) -> list[LayerReport]:
    """Account for every other parameter: matrices (embeddings) by name, vectors (norms, biases) as one entry."""
    planned = {id(getattr(plan.module, "weight", None)) for plan in plans if plan.scheme is None}
    entries, vectors, bits = [], 0, 0
    for name, parameter in model.named_parameters():
        if id(parameter) in planned:
            continue
        if parameter.ndim >= 2:
            size = parameter.element_size() * 8
            entries.append(LayerReport(name, "ignored", parameter.numel(), size, reason="not targeted"))
        else:
            vectors += parameter.numel()
            bits += parameter.nbytes * 8
    if vectors:
        entries.append(LayerReport("(vectors)", "ignored", vectors, bits / vectors, reason="norm weights and biases"))
    return entries


def _left_out_warnings(report: QuantReport) -> list[str]:
    skipped = [layer for layer in report.layers if layer.status == "skipped"]
    if not skipped:
        return []
    share = sum(layer.num_parameters for layer in skipped) / max(report.num_parameters, 1)
    reasons = sorted({layer.reason or "" for layer in skipped})
    return [
        f"{len(skipped)} weights with {share:.1%} of the parameters stay in 16 bits: {_names([x.name for x in skipped])} "
        f"({'; '.join(reasons)}); strict=True makes this an error"
    ]


def _mark_quantized(model: nn.Module, report: QuantReport) -> None:
    """Keep the report on the model, and drop what a GGUF file left behind (it would block saving)."""
    if quantization_method(model) == "gguf":
        strip_quantization_config(model)
    flag_configs(model, True)
    model.quant_report = report  # type: ignore[assignment]


def strip_quantization_config(model: nn.Module) -> None:
    """Remove every trace of another quantization from a (dequantized) model and its config."""
    model_config = getattr(model, "config", None)
    if hasattr(model_config, "quantization_config"):
        delattr(model_config, "quantization_config")
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in model.__dict__:
            delattr(model, name)
    flag_configs(model, False)


def flag_configs(model: nn.Module, packed: bool) -> None:
    """Tell transformers' attention where to find a dtype: in the config if ``packed``, else in the first nn.Linear it finds."""
    for module in model.modules():
        model_config: Any = getattr(module, "config", None)
        if hasattr(model_config, "model_type"):
            model_config.__dict__.pop("_is_quantized", None)
            if packed:
                model_config._is_quantized = True


def collapse(names: list[str]) -> list[str]:
    """Write names that differ in their first number as one: ``model.layers.{0-29}.mlp.up_proj``."""
    numbers: dict[tuple[str, str], list[int]] = {}
    result: dict[tuple[str, str], str] = {}
    for name in names:
        match = re.search(r"(?<=\.)\d+(?=\.|$)", name)
        key = (name[: match.start()], name[match.end() :]) if match else (name, "")
        if match:
            numbers.setdefault(key, []).append(int(match[0]))
        result[key] = name
    for (before, after), values in numbers.items():
        if len(values) > 1:
            runs: list[list[int]] = []
            for value in sorted(values):
                if runs and value == runs[-1][-1] + 1:
                    runs[-1].append(value)
                else:
                    runs.append([value])
            spans = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
            result[before, after] = f"{before}{{{spans}}}{after}"
    return list(result.values())


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_LISTED_NAMES])
    return shown + (f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else "")


@contextmanager
def _progress_bar(title: str, total: int, enabled: bool) -> Iterator[Any]:
    """Yield a function that advances a progress bar by one; shows nothing where stderr is no terminal."""
    import sys

    if not (enabled and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
