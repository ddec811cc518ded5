"""Calibrated quantization: statistics of each group of Linears -> their quantized weights, layer by layer through the model."""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchq import numerics
from torchq._memory import available_memory
from torchq._undo import UndoLog
from torchq.algorithms.gptq import GPTQ, GroupSolver, SingularHessianError, output_error, sample_rows
from torchq.algorithms.rtn import RTN, quantize_weight
from torchq.algorithms.smoothquant import round_activations
from torchq.architectures import find_folds
from torchq.calibration.data import Batches
from torchq.calibration.observers import static_qparams
from torchq.calibration.passes import eval_mode
from torchq.calibration.smoothing import Fold, Smoothing
from torchq.calibration.statistics import InputStatistics, multiplies_bfloat16
from torchq.calibration.stream import Group, block_of, find_groups, num_tokens_of, stream
from torchq.config import QuantConfig
from torchq.linear import QuantizedWeight
from torchq.matching import is_conv1d
from torchq.model_utils import list_names, weight_of
from torchq.preflight import LayerPlan
from torchq.report import FoldReport
from torchq.scheme import Scheme

_RESIDUALS = 4  # tensors of the residual stream's size that a suspended pass of transformers' decoders holds
_MOST_GROUPS = 8  # of a block: each costs another run of it, and with routed experts there may be hundreds
_SAMPLED_TOKENS = 512, 256  # kept of all, and of all held-out ones
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


@dataclass(frozen=True)
class Outcome:
    """Of a run: seconds by part (``forward``, ``hessian``, ``folds``, ``scales``, ``solve``), and what was folded."""

    timings: dict[str, float]
    folds: list[FoldReport]


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
    smoothing: Smoothing | None = None
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
) -> Outcome:
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
        Times and folds.

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
        run.smoothing = _smoothing(run, batches)
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
            sampled=_sampled(run, batches),
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
    return Outcome(timings, [] if run.smoothing is None else run.smoothing.reports)


def _smoothing(run: _Run, batches: Batches) -> Smoothing | None:
    """Where the model can be folded, if any layer is to be scaled."""
    schemes = {name: plan.scheme for name, plan in run.plans.items() if plan.scheme is not None}
    if all(run.config.smoothing(scheme) is None for scheme in schemes.values()):
        return None
    begun = time.perf_counter()
    found = find_folds(run.model, batches.train[0].inputs)
    run.timings["folds"] = time.perf_counter() - begun
    return Smoothing(run.model, found, schemes, run.undo_log)


def _sampled(run: _Run, batches: Batches) -> tuple[int, int]:
    """Tokens to keep of each micro-batch, and of each held-out one: for what is decided by rounded activations."""
    if all(plan.scheme is None or plan.scheme.input_activations is None for plan in run.plans.values()):
        return 0, 0
    return -(-_SAMPLED_TOKENS[0] // len(batches.train)), -(-_SAMPLED_TOKENS[1] // max(len(batches.holdout), 1))


def _solve_group(run: _Run, group: Group) -> None:
    _return_free_memory()
    begun, scales = time.perf_counter(), run.timings.get("scales", 0.0)
    assert group.train is not None
    if group.train.num_tokens == 0:
        raise ValueError(f"calibration: no token that counts reaches {list_names(group.names)} (all are padding)")
    block = block_of(group.names[0])
    if block != run.block or (block is None and run.smoothing is None):  # folds outside blocks may reach through the whole model
        _finish_pending(run, of_block=True)
    run.block = block
    parts = _alike(run, group)
    fold = _propose(run, group, parts)
    solved = _round(run, group, parts, None, last=fold is None)
    if fold is not None and run.smoothing is not None:
        for statistics in (group.train, group.holdout):
            if statistics is not None:
                statistics.rescale_(fold.columns)
        folded = _round(run, group, parts, fold, last=True)
        error, before = (sum(one.error for one in some) for some in (folded, solved))
        if error < before:
            run.smoothing.accept(fold, error, before)
            solved = folded
        else:
            run.smoothing.reject(fold, error, before)
    seconds = (time.perf_counter() - begun) / max(len(solved), 1)
    for one in solved:
        if run.config.propagate == "true_sequential":
            _install(run, one)
        run.pending.append((one.plan, replace(one.solved, seconds=seconds)))
    scales = run.timings.get("scales", 0.0) - scales
    run.timings["solve"] = run.timings.get("solve", 0.0) + time.perf_counter() - begun - scales


def _propose(run: _Run, group: Group, parts: list[_Part]) -> Fold | None:
    """Search scales for the group's inputs, if it is to be scaled and can be."""
    if run.smoothing is None or not parts:
        return None
    scheme = parts[0].scheme
    settings = run.config.smoothing(scheme)
    whole = sum(len(part.plans) for part in parts) == len(group.names)
    if settings is None:
        return None
    if not whole or any(part.scheme != scheme for part in parts):
        run.smoothing.refuse(group, f"{list_names(group.names)} have several schemes, or are in part quantized already")
        return None
    weight = torch.cat([_matrix(plan.module).to(run.device or part.device) for part in parts for plan in part.plans])
    return run.smoothing.propose(group, weight, scheme, settings)


@dataclass(frozen=True)
class _Part:
    """Layers of a group that are rounded together: of one scheme and dtype."""

    plans: list[LayerPlan]
    scheme: Scheme
    recipe: RTN | GPTQ

    @property
    def device(self) -> torch.device:
        return weight_of(self.plans[0].module).device


@dataclass(frozen=True)
class _Rounded:
    """A layer's result.

    Attributes:
        plan: The layer.
        solved: What is reported and packed.
        columns: [K], what its columns were multiplied by, or None.
        error: Summed squared error of its outputs, of rounded activations where they are rounded.
    """

    plan: LayerPlan
    solved: Solved
    columns: Tensor | None
    error: float


def _round(run: _Run, group: Group, parts: list[_Part], fold: Fold | None, *, last: bool) -> list[_Rounded]:
    """Round all layers of a group; with a fold, scaled, as the statistics are then. ``last``: drift is not needed again."""
    assert group.train is not None
    solver, rounded = None, []
    columns = None if fold is None else fold.columns
    for index, part in enumerate(parts):
        weights = [_matrix(plan.module) for plan in part.plans]
        dtype, device = weights[0].dtype, run.device or weights[0].device
        stacked = torch.cat([weight.to(device) for weight in weights])
        stacked = stacked if columns is None else stacked.float() * columns
        fraction, note, target = None, None, stacked
        if isinstance(part.recipe, GPTQ):
            solver = solver or GroupSolver(group.train, group.holdout, part.recipe, run.timings)
            try:
                ends = last and index == len(parts) - 1
                solution = solver.solve(stacked, part.scheme, scale_dtype=dtype, last=ends)
            except SingularHessianError as singular:
                names = list_names(group.names)
                raise SingularHessianError(f"calibration: {names}: {singular}; give more, or other, data") from singular
            quantized, target = solution.quantized, solution.target
            fraction, note = solution.factor.dampening_frac, solution.factor.note
        else:
            quantized, _ = quantize_weight(stacked, part.scheme, part.recipe, group.train.mean_square, dtype)
        sizes = [weight.shape[0] for weight in weights]
        pieces = zip(part.plans, stacked.split(sizes), target.split(sizes), _split(quantized, sizes), strict=True)
        static = _static(run, group, part.scheme)
        for plan, weight, goal, piece in pieces:
            solved, error = _judge(group, weight, goal, piece, static, columns, fraction, note)
            if static[0] is not None:
                smallest = torch.finfo(dtype).tiny  # of inputs that are all 0, the scale would be 0 in float16
                packed = replace(piece, input_scale=static[0].clamp_min(smallest).to(dtype), input_zero_point=static[1])
                solved = replace(solved, quantized=packed)
            rounded.append(_Rounded(plan, solved, columns, error))
    return rounded


def _static(run: _Run, group: Group, scheme: Scheme) -> tuple[Tensor | None, Tensor | None]:
    """Scale and zero point of a group's static activations, which its layers share (vLLM merges q, k, v and gate, up)."""
    acts, train = scheme.input_activations, group.train
    if acts is None or acts.dynamic or train is None:
        return None, None
    seen = [some for some in (train, group.holdout) if some is not None and some.num_tokens]
    low, high = (torch.stack([getattr(some, name) for some in seen]) for name in ("low", "high"))
    sample, num_tokens = torch.cat([some.sample for some in seen]), sum(some.num_tokens for some in seen)
    return static_qparams(acts, low, high, sample, run.config.observer, num_tokens)


def _alike(run: _Run, group: Group) -> list[_Part]:
    """The layers of a group that are not solved yet, those of one scheme together."""
    solved = {id(plan) for plan, _ in run.pending}
    result: dict[Any, _Part] = {}
    for name in group.names:
        plan = run.plans[name]
        if plan.modules and id(plan) not in solved and plan.scheme is not None:
            solved.add(id(plan))
            apart: Any = None
            if plan.scheme.weights.strategy == "block":
                apart = id(plan)
            elif plan.scheme.weights.strategy == "tensor":  # one scale for those that vLLM merges
                apart = name.rpartition(".")[0]
            key = (plan.scheme, weight_of(plan.module).dtype, apart)
            result.setdefault(key, _Part([], plan.scheme, run.config.recipe(plan.scheme, True))).plans.append(plan)
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
    static: tuple[Tensor | None, Tensor | None],
    columns: Tensor | None,
    fraction: float | None,
    note: str | None,
) -> tuple[Solved, float]:
    """(What to report of a layer, the summed squared error of its outputs)."""
    statistics: InputStatistics | None = group.holdout if group.holdout is not None and group.holdout.num_tokens else group.train
    assert statistics is not None
    restored = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, quantized.scheme.weights).float()
    back = 1.0 if columns is None else columns
    norm = float(torch.linalg.vector_norm(weight / back, dtype=torch.float32))
    relative = float(torch.linalg.vector_norm((restored - weight) / back)) / norm if norm else 0.0
    rows = sample_rows(target)
    some, goal = restored[rows], target[rows].float()
    power = output_error(goal, statistics.H)
    error = max(output_error(some - goal, statistics.H), 0.0)
    output = (error / power) ** 0.5 if power > 0 else 0.0
    acts = quantized.scheme.input_activations
    if acts is not None and len(statistics.sample):
        x = statistics.sample
        rounded = round_activations(x, acts, static[0], static[1])
        error = float((rounded @ some.t() - x @ goal.t()).square_().sum())
    return Solved(quantized, relative, output, fraction, note, 0.0), error


def _install(run: _Run, rounded: _Rounded) -> None:
    """Put the dequantized weight in, which is what the packed layer will compute with (on what the producer makes of a fold)."""
    plan, quantized = rounded.plan, rounded.solved.quantized
    run.undo_log.record(run.model, plan.modules)
    old = weight_of(plan.module)
    dtype = old.dtype if rounded.columns is None else torch.float32
    restored = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, quantized.scheme.weights, dtype)
    if rounded.columns is not None:
        restored = (restored / rounded.columns).to(old.dtype)
    restored = (restored.t() if is_conv1d(plan.module) else restored).contiguous().to(old.device)
    parameter = nn.Parameter(restored, requires_grad=old.requires_grad)
    for module in plan.modules.values():
        module._parameters["weight"] = parameter


def _finish_pending(run: _Run, *, of_block: bool = False) -> None:
    """Carry folds out, and swap packed layers in: all, or those of the block that passes have just left.

    Layers of later blocks that were solved with it (cross attention, which reads what that of the first decoder block reads)
    wait for the end of their own, whose folds may divide them.
    """
    if run.smoothing is not None:
        waiting = {name: solved.quantized for plan, solved in run.pending for name in plan.modules}
        changed = run.smoothing.apply(waiting)
        for index, (plan, solved) in enumerate(run.pending):
            new = next((changed[name] for name in plan.modules if name in changed), None)
            if new is not None:
                run.pending[index] = plan, replace(solved, quantized=new)
    left = [one for one in run.pending if of_block and block_of(one[0].names[0]) != run.block]
    for plan, solved in [one for one in run.pending if one not in left]:
        for name in plan.modules:
            run.layers.pop(name, None)  # and with it the weight
        run.finish(plan, solved)
    run.pending = left


def _split(quantized: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    """Undo the concatenation of rows."""
    if len(sizes) == 1:
        return [quantized]
    zeros = [None] * len(sizes) if quantized.zero_point is None else list(quantized.zero_point.split(sizes))
    scales = [quantized.scale] * len(sizes) if quantized.scale.ndim == 1 else quantized.scale.split(sizes)
    parts = zip(quantized.q.split(sizes), scales, zeros, strict=True)
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
