"""Calibrated quantization: statistics of each group of Linears -> their quantized weights, layer by layer through the model."""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq import numerics
from torchq._memory import available_memory
from torchq._undo import UndoLog
from torchq.algorithms.gptq import GPTQ, GroupSolver, SingularHessianError, output_error, sample_rows
from torchq.algorithms.rtn import RTN, quantize_weight
from torchq.calibration.data import Batches
from torchq.calibration.passes import eval_mode
from torchq.calibration.statistics import InputStatistics, multiplies_bfloat16
from torchq.calibration.stream import Group, block_of, find_groups, num_tokens_of, stream
from torchq.config import QuantConfig
from torchq.linear import QuantizedWeight
from torchq.matching import is_conv1d
from torchq.model_utils import list_names, weight_of
from torchq.preflight import LayerPlan

_RESIDUALS = 4  # tensors of the residual stream's size that a suspended pass of transformers' decoders holds
_MOST_GROUPS = 8  # of a block: each costs another run of it, and with routed experts there may be hundreds
_SHARE_OF_MEMORY = 0.5  # of what is left, which what passes hold may take


@dataclass(frozen=True)
class Solved:
    """What calibration found for one layer; errors as in :class:`torchq.report.LayerReport`."""

    quantized: QuantizedWeight
    relative_error: float
    output_error: float
    dampening_frac: float | None
    note: str | None
    seconds: float


@dataclass
class _Run:
    """What the parts of one run share."""

    model: nn.Module
    plans: dict[str, LayerPlan]
    layers: dict[str, nn.Module]
    config: QuantConfig
    device: torch.device | str | None
    undo_log: UndoLog
    finish: Callable[[LayerPlan, Solved], None]
    timings: dict[str, float]
    warn: Callable[[str], None]
    pending: list[tuple[LayerPlan, Solved]] = field(default_factory=list)
    block: str | None = None


@torch.no_grad()
def quantize_calibrated(
    model: nn.Module,
    plans: list[LayerPlan],
    batches: Batches,
    config: QuantConfig,
    *,
    device: torch.device | str | None,
    undo_log: UndoLog,
    finish: Callable[[LayerPlan, Solved], None],
    warn: Callable[[str], None],
) -> dict[str, float]:
    """Quantize layers on calibration data.

    Args:
        model: The model; the weights of solved layers are replaced by their dequantized ones while it runs.
        plans: The layers.
        batches: The data.
        config: Settings.
        device: Where to sum and solve; each layer's own device by default.
        undo_log: Records each weight before it is replaced.
        finish: Called once for each plan when no forward pass is inside the layer, to swap in the QuantLinear and report.
        warn: Called with what a user should know before the run.

    Returns:
        Seconds by part: ``forward``, ``hessian``, ``scales`` (their search), ``solve``.

    Raises:
        ValueError: If no token reaches a layer, an input is not finite, or a Hessian stays singular; the message names the layer.
    """
    by_name = {name: plan for plan in plans for name in plan.modules}
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # a module used under several names counts under its first
        if name in by_name and module is by_name[name].modules[name]:
            layers[name] = module
    timings: dict[str, float] = {}
    run = _Run(model, by_name, layers, config, device, undo_log, finish, timings, warn)
    training = {name: module.training for name, module in layers.items()}
    with eval_mode(model):
        begun = time.perf_counter()
        autocast = _autocast_dtype(config, layers)
        groups = find_groups(model, layers, batches.train[0], autocast=autocast)
        timings["forward"] = time.perf_counter() - begun
        drift_tokens = _drift_tokens(config, plans) if config.propagate == "true_sequential" else 0.0
        unreached = stream(
            model,
            layers,
            groups,
            batches.train,
            batches.holdout,
            lambda group: _solve_group(run, group),
            autocast=autocast,
            exact=config.calibration_dtype == "model",
            device=device,
            timings=timings,
            drift_tokens=drift_tokens,
            recompute=_recompute(run, groups, batches, drift_tokens),
        )
    _finish_pending(run)
    for name, mode in training.items():
        model.get_submodule(name).training = mode
    left = [name for name in unreached if by_name[name].modules]
    if left:
        raise ValueError(
            f"calibration: no token reaches {list_names(left)}; add them to ignore, quantize them with other data, or without "
            "any (calibration=None)"
        )
    return timings


def _solve_group(run: _Run, group: Group) -> None:
    _return_free_memory()
    begun, scales = time.perf_counter(), run.timings.get("scales", 0.0)
    assert group.train is not None
    if group.train.num_tokens == 0:
        raise ValueError(f"calibration: no token that counts reaches {list_names(group.names)} (all are padding)")
    block = block_of(group.names[0])
    if block != run.block or block is None:
        _finish_pending(run)
    run.block = block
    solver = None
    parts = _alike(run, group)
    for index, (plans, recipe) in enumerate(parts):
        weights = [_matrix(plan.module) for plan in plans]
        device = run.device or weights[0].device
        stacked = torch.cat([weight.to(device) for weight in weights])
        scheme = plans[0].scheme
        assert scheme is not None
        target, fraction, note = None, None, None
        if isinstance(recipe, GPTQ):
            solver = solver or GroupSolver(group.train, group.holdout, recipe, run.timings)
            try:
                solution = solver.solve(stacked, scheme, last=index == len(parts) - 1)
            except SingularHessianError as error:
                names = list_names(group.names)
                raise SingularHessianError(f"calibration: {names}: {error}; give more, or other, data") from error
            quantized, target = solution.quantized, solution.target
            fraction, note = solution.factor.dampening_frac, solution.factor.note
        else:
            quantized, _ = quantize_weight(stacked, scheme, recipe, group.train.mean_square)
        seconds = (time.perf_counter() - begun) / len(plans)
        sizes = [weight.shape[0] for weight in weights]
        targets = stacked.split(sizes) if target is None else target.split(sizes)
        for plan, weight, goal, part in zip(plans, weights, targets, _split(quantized, sizes), strict=True):
            solved = _judge(group, weight.to(device), goal, part, fraction, note, seconds)
            if run.config.propagate == "true_sequential":
                _install(run, plan, part)
            run.pending.append((plan, solved))
    scales = run.timings.get("scales", 0.0) - scales
    run.timings["solve"] = run.timings.get("solve", 0.0) + time.perf_counter() - begun - scales


def _alike(run: _Run, group: Group) -> list[tuple[list[LayerPlan], RTN | GPTQ]]:
    """The layers of a group that are not solved yet, those of one scheme together."""
    solved = {id(plan) for plan, _ in run.pending}
    result: dict[Any, tuple[list[LayerPlan], RTN | GPTQ]] = {}
    for name in group.names:
        plan = run.plans[name]
        if plan.modules and id(plan) not in solved and plan.scheme is not None:
            solved.add(id(plan))
            per_tensor = id(plan) if plan.scheme.weights.strategy in ("tensor", "block") else None
            key = (plan.scheme, weight_of(plan.module).dtype, per_tensor)
            result.setdefault(key, ([], run.config.recipe(plan.scheme, True)))[0].append(plan)
    return list(result.values())


def _drift_tokens(config: QuantConfig, plans: list[LayerPlan]) -> float:
    """What the recipes ask for; 8-bit weights leave no drift that would be worth a forward pass."""
    schemes = [plan.scheme for plan in plans if plan.scheme is not None and plan.scheme.weights.num_bits < 8]
    recipes = [config.recipe(scheme, True) for scheme in schemes]
    return max((recipe.drift_tokens for recipe in recipes if isinstance(recipe, GPTQ)), default=0.0)


def _recompute(run: _Run, groups: list[Group], batches: Batches, drift_tokens: float) -> bool:
    """Whether blocks are computed anew because what passes suspended inside them hold is too much; then with a warning."""
    if run.config.recompute is not None or not groups:
        return bool(run.config.recompute)
    trained, held_out = (sum(map(num_tokens_of, some)) for some in (batches.train, batches.holdout))
    twice = drift_tokens * trained + held_out if drift_tokens else 0.0
    blocks: dict[str | None, list[float]] = defaultdict(list)  # bytes per token that each group of a block reads
    for group in groups:
        blocks[block_of(group.names[0])].append(group.bytes_per_token)
    residual = max(sizes[0] for sizes in blocks.values())  # what the first group of a block reads is of that size
    widest = max(max(sizes) for sizes in blocks.values())
    needed = (trained + held_out) * (_RESIDUALS * residual + widest) + twice * _RESIDUALS * residual
    left, device = min(
        (
            (free, device)
            for device in {p.device for p in run.model.parameters()}
            if (free := available_memory(device)) is not None
        ),
        key=lambda pair: pair[0],
        default=(None, None),
    )
    if left is None or needed <= _SHARE_OF_MEMORY * left or max(map(len, blocks.values())) > _MOST_GROUPS:
        return False
    run.warn(
        f"calibration: {trained + held_out:,} tokens hold about {needed / 1e9:.1f} GB inside a layer, and {device} has "
        f"{left / 1e9:.1f} GB left: blocks are computed anew for each group of layers (recompute=True), which takes less memory "
        "and more than twice the time in forward passes; fewer calibration tokens, or recompute=False, do without"
    )
    return True


def _autocast_dtype(config: QuantConfig, layers: dict[str, nn.Module]) -> torch.dtype | None:
    """What the calibration forward is computed in, or None: what the model is in."""
    if config.calibration_dtype != "auto":
        return torch.bfloat16 if config.calibration_dtype == "bfloat16" else None
    weights = [weight_of(module) for module in layers.values()]
    faster = all(weight.dtype == torch.float32 and multiplies_bfloat16(weight.device) for weight in weights)
    return torch.bfloat16 if faster else None


def _judge(
    group: Group,
    weight: Tensor,
    target: Tensor,
    quantized: QuantizedWeight,
    fraction: float | None,
    note: str | None,
    seconds: float,
) -> Solved:
    statistics: InputStatistics | None = group.holdout if group.holdout is not None and group.holdout.num_tokens else group.train
    assert statistics is not None
    restored = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, quantized.scheme.weights).float()
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float32))
    relative = float(torch.linalg.vector_norm(restored - weight)) / norm if norm else 0.0
    rows = sample_rows(target)
    power = output_error(target[rows].float(), statistics.H)
    output = (max(output_error(restored[rows] - target[rows], statistics.H), 0.0) / power) ** 0.5 if power > 0 else 0.0
    return Solved(quantized, relative, output, fraction, note, seconds)


def _install(run: _Run, plan: LayerPlan, quantized: QuantizedWeight) -> None:
    """Put the dequantized weight in, which is what the packed layer will compute with."""
    run.undo_log.record(run.model, plan.modules)
    old = weight_of(plan.module)
    restored = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, quantized.scheme.weights, old.dtype)
    restored = (restored.t() if is_conv1d(plan.module) else restored).contiguous().to(old.device)
    parameter = nn.Parameter(restored, requires_grad=old.requires_grad)
    for module in plan.modules.values():
        module._parameters["weight"] = parameter


def _finish_pending(run: _Run) -> None:
    for plan, solved in run.pending:
        for name in plan.modules:
            run.layers.pop(name, None)  # and with it the weight
        run.finish(plan, solved)
    run.pending.clear()


def _split(quantized: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    """Undo the concatenation of rows."""
    if len(sizes) == 1:
        return [quantized]
    zeros = [None] * len(sizes) if quantized.zero_point is None else list(quantized.zero_point.split(sizes))
    parts = zip(quantized.q.split(sizes), quantized.scale.split(sizes), zeros, strict=True)
    return [QuantizedWeight(q.contiguous(), scale.contiguous(), zero, quantized.scheme) for q, scale, zero in parts]


def _matrix(module: nn.Module) -> Tensor:
    """A layer's weight as [N, K]."""
    weight = weight_of(module).detach()
    return weight.t() if is_conv1d(module) else weight


def _return_free_memory() -> None:
    """Give what forward passes have freed back to the system: glibc keeps blocks of up to 32 MB, and cannot reuse them all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
