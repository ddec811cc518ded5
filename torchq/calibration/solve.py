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
from torchq.algorithms.gptq import GPTQ
from torchq.algorithms.rtn import RTN
from torchq.architectures import find_folds, with_overrides
from torchq.calibration.data import Batches
from torchq.calibration.packing import Batch
from torchq.calibration.passes import eval_mode
from torchq.calibration.rounding import Part, Rounded, Solved, Where, matrix_of, round_parts
from torchq.calibration.smoothing import Fold, Smoothing
from torchq.calibration.statistics import multiplies_bfloat16
from torchq.calibration.stream import Group, block_of, find_groups, first_sequence, num_tokens_of, stream
from torchq.config import QuantConfig
from torchq.matching import is_conv1d
from torchq.model_utils import list_names, weight_of
from torchq.preflight import LayerPlan
from torchq.report import FoldReport

_RESIDUALS = 4  # tensors of the residual stream's size that a suspended pass of transformers' decoders holds
_MOST_GROUPS = 8  # of a block: each costs another run of it, and with routed experts there may be hundreds
_PROBED_TOKENS = 32  # that show where a model can be folded
_SAMPLED_TOKENS = 512, 256  # kept of all, and of all held-out ones
_SHARE_OF_MEMORY = 0.5  # of what is left, which what passes hold may take


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

    @property
    def where(self) -> Where:
        return Where(self.device, self.config.observer, self.timings)


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
    return Outcome(timings, [] if run.smoothing is None else run.smoothing.report())


def _smoothing(run: _Run, batches: Batches) -> Smoothing | None:
    """Where the model can be folded, if any layer is to be scaled."""
    schemes = {name: plan.scheme for name, plan in run.plans.items() if plan.scheme is not None}
    if all(run.config.smoothing(scheme) is None for scheme in schemes.values()):
        return None
    begun = time.perf_counter()
    batch = _short(batches.train[0])
    try:
        found = with_overrides(run.model, find_folds(run.model, batch), run.config.folds, batch)
    except ValueError as error:
        raise ValueError(f"folds: {error}") from error
    run.timings["folds"] = time.perf_counter() - begun
    return Smoothing(run.model, found, schemes, run.undo_log)


def _short(batch: Batch) -> dict[str, Any]:
    """The first tokens of a micro-batch's first sequence: where a model can be folded shows in a few."""
    per_token = ("input_ids", "attention_mask", "position_ids", "decoder_input_ids")
    first = first_sequence(batch)
    return {name: value[:, :_PROBED_TOKENS] if name in per_token else value for name, value in first.items()}


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
    solved = round_parts(run.where, group, parts) if fold is None else _round_with(run, group, parts, fold)
    seconds = (time.perf_counter() - begun) / max(len(solved), 1)
    for one in solved:
        if run.config.propagate == "true_sequential":
            _install(run, one)
        run.pending.append((one.plan, replace(one.solved, seconds=seconds)))
    scales = run.timings.get("scales", 0.0) - scales
    run.timings["solve"] = run.timings.get("solve", 0.0) + time.perf_counter() - begun - scales


def _propose(run: _Run, group: Group, parts: list[Part]) -> Fold | None:
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
    weight = torch.cat([matrix_of(plan.module).to(run.device or part.device) for part in parts for plan in part.plans])
    return run.smoothing.propose(group, weight, scheme, settings)


def _round_with(run: _Run, group: Group, parts: list[Part], fold: Fold) -> list[Rounded]:
    """Round all layers of a group with and without a fold, and keep what has less error.

    Rounding to nearest does so with the sampled rows that errors are of; GPTQ with all, most of its work being the same for any.
    """
    assert run.smoothing is not None
    row_by_row = all(isinstance(part.recipe, RTN) and part.scheme.weights.strategy in ("group", "channel") for part in parts)
    results = [round_parts(run.where, group, parts, last=False, sampled=row_by_row)]
    _rescale(group, fold.columns)
    results.append(round_parts(run.where, group, parts, fold, sampled=row_by_row))
    before, error = (sum(one.error for one in result) for result in results)
    better = error < before
    (run.smoothing.accept if better else run.smoothing.reject)(fold, error, before)
    if not row_by_row:
        return results[better]
    if not better:
        _rescale(group, 1 / fold.columns)
    return round_parts(run.where, group, parts, fold if better else None)


def _rescale(group: Group, columns: Tensor) -> None:
    for statistics in (group.train, group.holdout):
        if statistics is not None:
            statistics.rescale_(columns)


def _alike(run: _Run, group: Group) -> list[Part]:
    """The layers of a group that are not solved yet, those of one scheme together."""
    solved = {id(plan) for plan, _ in run.pending}
    result: dict[Any, Part] = {}
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
            result.setdefault(key, Part([], plan.scheme, run.config.recipe(plan.scheme, True))).plans.append(plan)
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


def _install(run: _Run, rounded: Rounded) -> None:
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
    waits = [of_block and block_of(plan.names[0]) != run.block for plan, _ in run.pending]
    ready = [one for one, later in zip(run.pending, waits, strict=True) if not later]
    run.pending = [one for one, later in zip(run.pending, waits, strict=True) if later]
    for plan, solved in ready:
        for name in plan.modules:
            run.layers.pop(name, None)  # and with it the weight
        run.finish(plan, solved)


def _return_free_memory() -> None:
    """Give what forward passes have freed back to the system: glibc keeps blocks of up to 32 MB, and cannot reuse them all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
