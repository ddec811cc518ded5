"""The layers of one group, rounded by the algorithm that each asks for, and judged by the errors of their outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchq import numerics
from torchq.algorithms.gptq import GPTQ, GroupSolver, SingularHessianError, Solution, output_error, sample_rows
from torchq.algorithms.rtn import RTN, quantize_weight
from torchq.algorithms.smoothquant import round_activations
from torchq.calibration.observers import Observer, static_qparams
from torchq.calibration.smoothing import Fold
from torchq.calibration.statistics import InputStatistics
from torchq.calibration.stream import Group
from torchq.linear import QuantizedWeight
from torchq.matching import is_conv1d
from torchq.model_utils import list_names, weight_of
from torchq.preflight import LayerPlan
from torchq.scheme import Scheme


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
class Part:
    """Layers of a group that are rounded together: of one scheme and dtype."""

    plans: list[LayerPlan]
    scheme: Scheme
    recipe: RTN | GPTQ

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return weight_of(self.plans[0].module).device


@dataclass(frozen=True)
class Rounded:
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


@dataclass(frozen=True)
class Where:
    """What rounding takes from its run: where to compute (None: where each layer is), the observer, and timings to add to."""

    device: torch.device | str | None
    observer: Observer
    timings: dict[str, float]


def round_parts(
    where: Where, group: Group, parts: list[Part], fold: Fold | None = None, *, last: bool = True, sampled: bool = False
) -> list[Rounded]:
    """Round all layers of a group.

    Args:
        where: From the run.
        group: With its statistics: of scaled inputs with a fold.
        parts: Its layers.
        fold: Whose scales the weights are multiplied by first.
        last: Whether drift is not needed again.
        sampled: Whether to round no more rows than errors are judged by.
    """
    assert group.train is not None
    solver, rounded = None, []
    columns = None if fold is None else fold.columns
    for index, part in enumerate(parts):
        weights = [matrix_of(plan.module) for plan in part.plans]
        weights = [weight[sample_rows(weight)] for weight in weights] if sampled else weights
        dtype, device = weights[0].dtype, where.device or weights[0].device
        stacked = torch.cat([weight.to(device) for weight in weights])
        stacked = stacked if columns is None else stacked.float() * columns
        fraction, note, target = None, None, stacked
        static = _static_qparams(group, part.scheme, where.observer)
        if isinstance(part.recipe, GPTQ):
            noise, ends = _rounding_noise(part.scheme, group.train.sample, static[0]), last and index == len(parts) - 1
            with _noisy(group, noise):
                if solver is None or noise:
                    solver = GroupSolver(group.train, group.holdout, part.recipe, where.timings)
                solution = _solve(solver, group, stacked, part.scheme, dtype, last=ends)
            quantized, target = solution.quantized, solution.target
            fraction, note = solution.factor.dampening_frac, solution.factor.note
        else:
            quantized, _ = quantize_weight(stacked, part.scheme, part.recipe, group.train.mean_square, dtype)
        sizes = [weight.shape[0] for weight in weights]
        pieces = zip(part.plans, stacked.split(sizes), target.split(sizes), _split(quantized, sizes), strict=True)
        for plan, weight, goal, piece in pieces:
            solved, error = _judge(group, weight, goal, piece, static, columns, fraction, note)
            if static[0] is not None:
                smallest = torch.finfo(dtype).tiny  # of inputs that are all 0, the scale would be 0 in float16
                packed = replace(piece, input_scale=static[0].clamp_min(smallest).to(dtype), input_zero_point=static[1])
                solved = replace(solved, quantized=packed)
            rounded.append(Rounded(plan, solved, columns, error))
    return rounded


def _solve(
    solver: GroupSolver, group: Group, weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype, *, last: bool
) -> Solution:
    try:
        return solver.solve(weight, scheme, scale_dtype=scale_dtype, last=last)
    except SingularHessianError as error:
        names = list_names(group.names)
        raise SingularHessianError(f"calibration: {names}: {error}; give more, or other, data") from error


def _rounding_noise(scheme: Scheme, sample: Tensor, static: Tensor | None) -> float:
    """The mean square of what rounding to int8 adds to each activation: step^2 / 12, independent of the activations."""
    acts = scheme.input_activations
    if acts is None or acts.type != "int" or not len(sample):
        return 0.0
    step = sample.abs().amax(1) / acts.quant_max if static is None else static
    return float(step.square().mean()) / 12


@contextmanager
def _noisy(group: Group, noise: float) -> Iterator[None]:
    """Let H be that of rounded activations: H + tokens noise I."""
    changed = []
    for statistics in (group.train, group.holdout):
        if statistics is not None and noise:
            diagonal = statistics.H.diagonal()
            changed.append((diagonal, diagonal.clone()))
            diagonal += noise * statistics.num_tokens
    try:
        yield
    finally:
        for diagonal, before in changed:
            diagonal.copy_(before)


def _static_qparams(group: Group, scheme: Scheme, observer: Observer) -> tuple[Tensor | None, Tensor | None]:
    """Scale and zero point of a group's static activations, which its layers share (vLLM merges q, k, v and gate, up)."""
    acts, train = scheme.input_activations, group.train
    if acts is None or acts.dynamic or train is None:
        return None, None
    seen = [some for some in (train, group.holdout) if some is not None and some.num_tokens]
    low, high = (torch.stack([getattr(some, name) for some in seen]) for name in ("low", "high"))
    sample, num_tokens = torch.cat([some.sample for some in seen]), sum(some.num_tokens for some in seen)
    return static_qparams(acts, low, high, sample, observer, num_tokens)


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


def _split(quantized: QuantizedWeight, sizes: list[int]) -> list[QuantizedWeight]:
    """Undo the concatenation of rows."""
    if len(sizes) == 1:
        return [quantized]
    zeros = [None] * len(sizes) if quantized.zero_point is None else list(quantized.zero_point.split(sizes))
    scales = [quantized.scale] * len(sizes) if quantized.scale.ndim == 1 else quantized.scale.split(sizes)
    parts = zip(quantized.q.split(sizes), scales, zeros, strict=True)
    return [QuantizedWeight(q.contiguous(), scale.contiguous(), zero, quantized.scheme) for q, scale, zero in parts]


def matrix_of(module: nn.Module) -> Tensor:
    """A layer's weight as [N, K]."""
    weight = weight_of(module).detach()
    return weight.t() if is_conv1d(module) else weight
