"""convert_qat_: what ``quantize_(model, config, qat=True)`` made trainable becomes packed."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

from torch import nn

from torchq._progress import progress_bar
from torchq._undo import UndoLog
from torchq._version import __version__
from torchq.algorithms.rtn import relative_error
from torchq.fake_quant import FakeQuantLinear
from torchq.linear import QuantLinear
from torchq.model_utils import list_names, set_module
from torchq.preflight import LayerPlan, is_finite
from torchq.quantize import (
    describe_in_config,
    mark_quantized,
    other_parameters,
    packed_layers,
    packed_report,
)
from torchq.report import LayerReport, QuantReport
from torchq.tying import shared_parameters, untie


def convert_qat_(model: nn.Module, *, progress: bool = True) -> QuantReport:
    """Pack a fake-quantized model in place: its FakeQuantLinear layers become :class:`~torchq.linear.QuantLinear` modules.

    The weights that the packed layers compute with are those of the training's forward pass, bit for bit. All layers are made
    before the first is replaced, in memory beside the weights that were trained; a call that fails leaves the model as it was.

    Args:
        model: What ``quantize_(model, config, qat=True)`` left, trained or not.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        A report on every layer, as :func:`torchq.quantize_` returns. It is also kept as ``model.quant_report``.

    Raises:
        ValueError: If nothing in the model is fake-quantized, or a weight or scale is not finite.
    """
    started = time.perf_counter()
    plans = _plans(model)
    _check_finite(plans)
    packed: dict[str, QuantLinear] = {}
    entries: dict[str, LayerReport] = {}
    with progress_bar("Packing", len(plans), progress) as advance:
        for plan in plans:
            begun, source = time.perf_counter(), plan.module
            assert isinstance(source, FakeQuantLinear)
            quantized = source.quantized_weight()
            error = relative_error(source.matrix, quantized)
            packed |= packed_layers(plan, quantized)
            entries[plan.names[0]] = packed_report(plan, quantized, error, time.perf_counter() - begun)
            advance()
    shared = shared_parameters(model, plans)
    with UndoLog(enabled=True, num_bytes=0) as undo_log:
        undo_log.keep(model, {name: module for plan in plans for name, module in plan.modules.items()})
        for name, layer in packed.items():
            set_module(model, name, layer)
        untied = untie(model, plans, shared, undo_log)
        describe_in_config(model, undo_log)
        report = _report(model, entries)
        report.warnings += untied
        report.seconds = time.perf_counter() - started
        for message in untied:  # an error where warnings are errors
            warnings.warn(message, stacklevel=2)
        undo_log.commit()
    mark_quantized(model, report)
    return report


def _plans(model: nn.Module) -> list[LayerPlan]:
    """The fake-quantized layers, those of one weight together."""
    plans: dict[int, LayerPlan] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FakeQuantLinear):
            plan = plans.setdefault(id(module.weight), LayerPlan([], module, module.scheme))
            plan.names.append(name)
            plan.modules[name] = module
    if "" in {name for plan in plans.values() for name in plan.names}:
        raise ValueError("model is a single FakeQuantLinear, which cannot be replaced in place; pass the module that holds it")
    if not plans:
        raise ValueError("nothing in the model is fake-quantized; call quantize_(model, config, qat=True) first, then train")
    return list(plans.values())


def _check_finite(plans: list[LayerPlan]) -> None:
    broken = []
    for plan in plans:
        assert isinstance(plan.module, FakeQuantLinear)
        if not (is_finite(plan.module.weight) and is_finite(plan.module.weight_scale_log2)):
            broken.append(plan.names[0])
    if broken:
        raise ValueError(
            f"weights or scales hold NaN or inf: {list_names(broken)}; the training diverged: load an earlier state of it, or "
            "lower the learning rate"
        )


def _report(model: nn.Module, entries: dict[str, LayerReport]) -> QuantReport:
    """The report of ``quantize_`` with new entries for the packed layers; a new one, where only parts of the model have one."""
    before = getattr(model, "quant_report", None)
    if isinstance(before, QuantReport):
        layers = [entries.get(layer.name, layer) for layer in before.layers]
        report = replace(before, layers=layers, warnings=list(before.warnings), torchq_version=__version__)
    else:
        schemes = sorted({entry.scheme or "" for entry in entries.values()})
        report = QuantReport(", ".join(schemes), "QAT", 0, torchq_version=__version__)
        report.layers = [*entries.values(), *other_parameters(model, [])]
    report.num_parameters = sum(layer.num_parameters for layer in report.layers)
    return report
