"""quantize_: match modules -> plan -> check everything -> quantize layer by layer -> swap -> report."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchq._progress import progress_bar
from torchq._undo import UndoLog
from torchq._version import __version__
from torchq.algorithms.awq import AWQ
from torchq.algorithms.gptq import GPTQ
from torchq.algorithms.rtn import RTN, quantize_weight
from torchq.algorithms.smoothquant import SmoothQuant
from torchq.checkpoint.writer import missing_format, quantization_config
from torchq.config import QuantConfig
from torchq.fake_quant import fake_layers
from torchq.linear import QuantizedWeight, QuantLinear, buffer_specs
from torchq.matching import is_conv1d
from torchq.model_utils import (
    flag_configs,
    list_names,
    quantization_method,
    set_module,
    strip_quantization_config,
    weight_of,
)
from torchq.preflight import LayerPlan, check_kv_cache, check_not_quantized, check_trainable, plan_layers, preflight
from torchq.report import LayerReport, QuantReport
from torchq.scheme import Scheme
from torchq.siblings import find_siblings, join_siblings
from torchq.tying import shared_parameters, untie


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
    qat: bool = False,
) -> QuantReport:
    """Quantize a model in place: its targeted Linear layers become packed :class:`~torchq.linear.QuantLinear` modules.

    Every layer is checked before the first weight is touched, and one error lists all that is wrong. Layers are then
    quantized and swapped one at a time, so memory never exceeds the model and the work on one layer (about eight times its
    16-bit weight). A call that fails leaves the model as it was.

    Args:
        model: Any ``nn.Module``, typically a Hugging Face model, in float16, bfloat16 or float32.
        config: A scheme name such as ``"W4A16"``, a Scheme, or a :class:`~torchq.config.QuantConfig`.
        calibration: Texts, chats, token ids, batches, a file or a dataset, for algorithms that look at activations; anything
            that :func:`torchq.calibration.data.load_batches` takes, or a :class:`torchq.calibration.data.CalibrationData` that
            also says how much of it. None: data-free.
        tokenizer: Makes tokens of texts and chats.
        device: Where to compute, e.g. ``"cuda"``; each layer's own device by default. Results return to the layer's device.
        resume: Not supported yet; must be None.
        progress: Whether to show a progress bar on a terminal.
        undo: Whether to keep the replaced weights in a temporary file (as large as they are, in ``tempfile.gettempdir()``) until
            the call has succeeded, so that an interruption or an out-of-memory error half way can be undone. Without it,
            such a failure leaves the layers done so far quantized; wrong input is found before anything changes either way.
        qat: Quantization-aware training: the layers become :class:`~torchq.fake_quant.FakeQuantLinear` modules instead, which
            train as if quantized; :func:`torchq.convert_qat_` then packs them. Without data they train the weights they have,
            with data new Parameters that start from what the algorithm chose: make optimizers afterwards.

    Returns:
        A report on every layer. It is also kept as ``model.quant_report``.

    Raises:
        ValueError: If a pattern matches nothing, a layer cannot hold the scheme, the model is quantized already, a weight is not
            finite, nothing would be quantized, an algorithm or ``kv_cache`` lacks calibration data, or the data is unusable.
        TypeError: If ``model`` or ``config`` is of a wrong type.
        NotImplementedError: If the scheme or the algorithm is not supported yet, or not with ``qat``.
    """
    config = _as_config(config)
    if isinstance(model, str):
        raise NotImplementedError(
            "model must be a loaded nn.Module: streaming from a folder or hub id is not supported yet; load it with "
            "transformers first, or use `torchq quantize MODEL -o OUT`"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if resume is not None:
        raise NotImplementedError("resume is not supported yet; leave resume=None")
    started = time.perf_counter()
    check_not_quantized(model)
    check_kv_cache(config, calibrated=calibration is not None, qat=qat)
    plans = plan_layers(model, config)
    if qat:
        check_trainable(plans, config)
    preflight(plans, calibrated=calibration is not None)
    todo = [plan for plan in plans if plan.scheme is not None]
    recipes = {id(plan): config.recipe(plan.scheme, calibration is not None) for plan in todo if plan.scheme is not None}
    _check_recipes(todo, recipes, config, calibration)
    batches = None
    if calibration is not None:
        from torchq.calibration.data import load_batches

        batches = load_batches(calibration, tokenizer, model)
    cached: dict[int, str] = {}
    if config.kv_cache is not None and batches is not None:
        from torchq.calibration.kv_cache import calibrate_kv_cache, find_cached_attention

        cached = find_cached_attention(model, batches.train[0])
    siblings: list[list[str]] = []
    if config.fuse_siblings:
        layers = {name: module for plan in todo for name, module in plan.modules.items()}
        siblings = find_siblings(model, layers, None if batches is None else batches.train[0].inputs)
    report = QuantReport(
        scheme=config.resolve().name,
        algorithm=("QAT from " if qat else "") + _describe(todo, recipes, config, batches),
        num_parameters=0,
        torchq_version=__version__,
    )
    announced: list[str] = []  # warnings that a user should see before the run
    calibrated = [plan for plan in todo if batches is not None and _uses_data(plan, recipes[id(plan)], config)]
    replaced = calibrated if qat else todo  # those whose weights will be others
    shared = shared_parameters(model, replaced)
    with UndoLog(enabled=undo, num_bytes=sum(weight_of(plan.module).nbytes for plan in replaced)) as undo_log:
        entries = {}
        with progress_bar("Quantizing", len(todo), progress) as advance:
            for plan in todo:
                if not any(plan is other for other in calibrated):
                    entries[plan.names[0]] = _quantize_layer(model, plan, recipes[id(plan)], device, undo_log, qat)
                    advance()
            if batches is not None and calibrated:
                from torchq.calibration.rounding import Solved
                from torchq.calibration.solve import quantize_calibrated

                def finish(plan: LayerPlan, solved: Solved) -> None:
                    undo = undo_log if config.propagate == "float" else None  # else recorded when its weight was replaced
                    errors = solved.relative_error, solved.seconds
                    entry = _swap(model, plan, solved.quantized, *errors, undo, qat=qat, calibrated=True)
                    entries[entry.name] = replace(entry, output_error=solved.output_error, dampening_frac=solved.dampening_frac)
                    if solved.note is not None:
                        report.warnings.append(f"{plan.names[0]}: {solved.note}")
                    advance(f"{entry.name}: output error {solved.output_error:.1%}")

                def announce(message: str) -> None:
                    warnings.warn(message, stacklevel=3)
                    announced.append(message)

                outcome = quantize_calibrated(
                    model,
                    calibrated,
                    batches,
                    config,
                    device=device,
                    undo_log=undo_log,
                    finish=finish,
                    warn=announce,
                )
                report.timings, report.folds = outcome.timings, outcome.folds
        report.warnings += untie(model, replaced, shared, undo_log)
        if config.kv_cache is not None and batches is not None:
            calibrate_kv_cache(model, cached, batches, config.kv_cache, undo_log, report)
        if not qat:
            describe_in_config(model, undo_log)
        report.layers = [entries.get(plan.names[0]) or _left_out(plan) for plan in plans]
        report.layers += other_parameters(model, plans)
        report.num_parameters = sum(layer.num_parameters for layer in report.layers)
        report.seconds = time.perf_counter() - started
        report.warnings += _left_out_warnings(report)
        for message in report.warnings:  # an error where warnings are errors
            warnings.warn(message, stacklevel=2)
        report.warnings += announced
        undo_log.commit()
    mark_quantized(model, report)
    if siblings:
        join_siblings(model, siblings)
    return report


def _as_config(config: str | Scheme | QuantConfig) -> QuantConfig:
    if isinstance(config, QuantConfig):
        return config
    if isinstance(config, (str, Scheme)):
        return QuantConfig(config)
    raise TypeError(f"config must be a scheme name, a Scheme or a QuantConfig, got {type(config).__name__}")


# ------------------------------------------------------------------------------------------------------------------ quantize


def _check_recipes(todo: list[LayerPlan], recipes: dict[int, RTN | GPTQ], config: QuantConfig, calibration: Any) -> None:
    """Check that each layer's algorithm has the data it needs and knows the layer's scheme."""
    for plan in todo:
        assert plan.scheme is not None
        smoothing = config.smoothing(plan.scheme, calibration is not None)
        if smoothing is None:
            continue
        name = type(smoothing).__name__.lower()
        if plan.scheme.weights.type == "nf":
            raise NotImplementedError(
                f"algorithm={name!r} does not support scheme {plan.scheme.name} ({plan.names[0]}); use algorithm='rtn' or 'auto'"
            )
        if calibration is None:
            raise ValueError(
                f"algorithm={name!r} needs calibration data: pass quantize_(..., calibration=texts, tokenizer=tokenizer) "
                "(--calibration FILE on the command line), or use algorithm='rtn'"
            )
        if isinstance(smoothing, SmoothQuant) and plan.scheme.input_activations is None:
            raise ValueError(
                f"algorithm='smoothquant' is for schemes that round activations, got {plan.scheme.name} for {plan.names[0]}; use "
                "'awq' or 'gptq'"
            )
        if isinstance(smoothing, AWQ) and plan.scheme.input_activations is not None:
            raise ValueError(
                f"algorithm='awq' is for weight-only schemes, got {plan.scheme.name} for {plan.names[0]}; use 'smoothquant'"
            )
    gptq = [plan for plan in todo if isinstance(recipes[id(plan)], GPTQ)]
    if gptq and calibration is None:
        raise ValueError(
            "algorithm='gptq' needs calibration data: pass quantize_(..., calibration=texts, tokenizer=tokenizer) "
            "(--calibration FILE on the command line), or use algorithm='rtn'"
        )
    for plan in gptq:
        assert plan.scheme is not None
        if plan.scheme.weights.type != "int" or plan.scheme.weights.strategy not in ("group", "channel"):
            raise NotImplementedError(
                f"algorithm='gptq' supports integer weights per group or channel, got scheme {plan.scheme.name} for "
                f"{plan.names[0]}; use algorithm='auto', which rounds such layers to nearest"
            )


def _uses_data(plan: LayerPlan, recipe: RTN | GPTQ, config: QuantConfig) -> bool:
    """Whether calibration data would change a layer's result."""
    assert plan.scheme is not None
    if plan.scheme.needs_calibration or config.smoothing(plan.scheme) is not None:
        return True
    return isinstance(recipe, GPTQ) or (recipe.scale_search == "mse" and plan.scheme.weights.type == "int")


def _describe(todo: list[LayerPlan], recipes: dict[int, RTN | GPTQ], config: QuantConfig, batches: Any) -> str:
    """Name the algorithms of a report, and the data of those that look at it."""
    names = []
    for plan in todo:
        assert plan.scheme is not None
        recipe = recipes[id(plan)]
        search: str = recipe.scale_search if plan.scheme.weights.type == "int" else "absmax"
        norm = recipe.norm_for(batches is not None) if isinstance(recipe, RTN) else 2
        if search == "mse" and norm != 2:
            search = f"|error|^{norm:g}"
        name = f"RTN, {search} scales"
        if isinstance(recipe, GPTQ):
            damping = "held-out" if recipe.dampening_frac is None else f"{recipe.dampening_frac:g}"
            name = f"GPTQ, {search} scales, {damping} damping"
        smoothing = config.smoothing(plan.scheme, batches is not None)
        if smoothing is not None:
            name = f"{type(smoothing).__name__}, {name}"
        if batches is not None and _uses_data(plan, recipe, config):
            name += f" on {batches.num_tokens:,} tokens"
        if name not in names:
            names.append(name)
    return "; ".join(names)


def _quantize_layer(
    model: nn.Module, plan: LayerPlan, recipe: RTN | GPTQ, device: torch.device | str | None, undo_log: UndoLog, qat: bool
) -> LayerReport:
    """Quantize one weight without data and swap in QuantLinear (or FakeQuantLinear) wherever it is used."""
    assert plan.scheme is not None and isinstance(recipe, RTN)
    started = time.perf_counter()
    weight = weight_of(plan.module).detach()
    matrix = weight.t().contiguous() if is_conv1d(plan.module) else weight
    quantized, relative_error = quantize_weight(matrix.to(device or weight.device), plan.scheme, recipe)
    del matrix, weight
    return _swap(model, plan, quantized, relative_error, time.perf_counter() - started, undo_log, qat=qat)


def _swap(
    model: nn.Module,
    plan: LayerPlan,
    quantized: QuantizedWeight,
    relative_error: float,
    seconds: float,
    undo_log: UndoLog | None,
    *,
    qat: bool,
    calibrated: bool = False,
) -> LayerReport:
    """Put QuantLinears (or FakeQuantLinears) in a layer's place, and report on it.

    What is replaced is recorded first, unless ``undo_log`` is None.
    """
    started = time.perf_counter()
    replacements: Mapping[str, nn.Module] = (
        fake_layers(plan.modules, quantized, rounded=calibrated) if qat else packed_layers(plan, quantized)
    )
    if undo_log is not None and qat and not calibrated:
        undo_log.keep(model, plan.modules)  # their weight lives on
    elif undo_log is not None:
        undo_log.record(model, plan.modules)
    for name, replacement in replacements.items():
        set_module(model, name, replacement)
    plan.module = replacements[plan.names[0]]
    plan.modules.clear()  # lets go of the weight
    entry = packed_report(plan, quantized, relative_error, seconds + time.perf_counter() - started)
    if qat:
        bits = weight_of(plan.module).element_size() * 8
        entry = replace(entry, status="fake-quantized", format=None, bits_per_weight=bits)
    return entry


def packed_layers(plan: LayerPlan, quantized: QuantizedWeight) -> dict[str, QuantLinear]:
    """Return QuantLinears for a plan's modules, by name; one for each module, on its device."""
    home = weight_of(plan.module).device
    made: dict[int, QuantLinear] = {}
    for module in plan.modules.values():
        if id(module) not in made:
            made[id(module)] = QuantLinear.from_linear(module, quantized).to(home)
    return {name: made[id(module)] for name, module in plan.modules.items()}


def packed_report(plan: LayerPlan, quantized: QuantizedWeight, relative_error: float, seconds: float) -> LayerReport:
    """Return the report on a packed layer."""
    assert plan.scheme is not None
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
        seconds=seconds,
    )


# -------------------------------------------------------------------------------------------------------------------- report


def _left_out(plan: LayerPlan) -> LayerReport:
    weight = getattr(plan.module, "weight", None)
    numel, bits = (weight.numel(), weight.element_size() * 8) if isinstance(weight, Tensor) else (0, 0)
    return LayerReport(plan.names[0], "ignored" if plan.ignored else "skipped", numel, bits, reason=plan.reason)


def other_parameters(model: nn.Module, plans: list[LayerPlan]) -> list[LayerReport]:
    """Account for every other parameter: matrices (embeddings) by name, vectors (norms, biases) as one entry."""
    planned = {id(getattr(plan.module, name, None)) for plan in plans for name in ("weight", "weight_scale_log2")}
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
        f"{len(skipped)} weights with {share:.1%} of the parameters stay in 16 bits: {list_names([x.name for x in skipped])} "
        f"({'; '.join(reasons)}); strict=True makes this an error"
    ]


def describe_in_config(model: nn.Module, undo_log: UndoLog) -> None:
    """Put the checkpoint's ``quantization_config`` into a transformers model's config: its own ``save_pretrained`` writes it.

    Where there is no checkpoint format it refuses to write anything, but adapters.
    """
    if quantization_method(model) == "gguf":  # what a GGUF file left behind would block saving
        strip_quantization_config(model)
    model_config: Any = getattr(model, "config", None)
    if model_config is not None and hasattr(model, "all_tied_weights_keys"):
        layers = {name: module.scheme for name, module in model.named_modules() if isinstance(module, QuantLinear)}
        problem = missing_format(layers)
        if problem is not None:
            from torchq.integrations.transformers import refuse_to_save

            undo_log.save_attribute(model, "hf_quantizer")
            refuse_to_save(model, problem)
            return
        undo_log.save_attribute(model_config, "quantization_config")
        model_config.quantization_config = quantization_config(model)


def mark_quantized(model: nn.Module, report: QuantReport) -> None:
    """Keep the report on the model."""
    flag_configs(model, True)
    model.quant_report = report  # type: ignore[assignment]
