"""Folds in a calibrated run: which group of Linears may be scaled, by what, and how it is carried out.

A group is solved while forward passes wait before it: what they will read has been computed by the producer as it was. So the
scaled weights go into the model scaled back, which leaves its function as it is; the producer is divided, and the packed layers
are swapped in, once no pass is inside the block (:mod:`torchq.calibration.solve`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchq._undo import UndoLog
from torchq.algorithms import awq, smoothquant
from torchq.algorithms.awq import AWQ
from torchq.algorithms.smoothquant import SmoothQuant
from torchq.architectures import Folds
from torchq.calibration.stream import Group
from torchq.folding import (
    FoldPair,
    Producer,
    column_scale,
    divide_producer_,
    effective_scale,
    multiply_consumer_,
    weight_and_bias,
)
from torchq.linear import QuantizedWeight
from torchq.model_utils import list_names
from torchq.report import FoldReport, FoldStatus
from torchq.scheme import Scheme


@dataclass(eq=False)
class Fold:
    """A fold that a group may take.

    Attributes:
        pair: Where.
        scale: [C] float32: what the producer is asked to be divided by.
        effective: [C] float32: what that really divides by, in the dtype of the producer.
        columns: [K] float32: ``effective`` for each column of the group's weights.
        others: Consumers that are not quantized.
    """

    pair: FoldPair
    scale: Tensor
    effective: Tensor
    columns: Tensor
    others: tuple[str, ...]


class Smoothing:
    """The folds of one run.

    Args:
        model: The model.
        found: Where it can be folded.
        quantized: Names of the layers that are quantized in this run, and their schemes.
        undo_log: Records what is changed.
    """

    def __init__(self, model: nn.Module, found: Folds, quantized: Mapping[str, Scheme], undo_log: UndoLog) -> None:
        self.model, self.quantized, self.undo_log = model, quantized, undo_log
        self.reports: list[FoldReport] = [
            FoldReport(refused.producer, list(refused.consumers), "refused", reason=refused.reason) for refused in found.refused
        ]
        self._pairs: dict[str, list[FoldPair]] = {}
        for pair in found.pairs:
            for consumer in pair.consumers:
                self._pairs.setdefault(consumer.name, []).append(pair)
        self._waiting: list[Fold] = []

    def propose(self, group: Group, weight: Tensor, scheme: Scheme, settings: AWQ | SmoothQuant) -> Fold | None:
        """Search the scales of a group.

        Args:
            group: With its statistics.
            weight: [N, K], the rows of its Linears.
            scheme: Theirs.
            settings: How to search.
        """
        pair = self._pair_of(group)
        if pair is None:
            return None
        others = tuple(consumer.name for consumer in pair.consumers if consumer.name not in group.names)
        if reason := self._obstacle(pair, others):
            self._report(pair, "refused", reason=reason)
            return None
        first = next(consumer for consumer in pair.consumers if consumer.name in group.names)
        k, c = weight.shape[1], pair.num_channels
        columns = first.channels if first.channels is not None else torch.arange(k)
        columns, train = columns.to(weight.device), group.train
        assert train is not None
        if isinstance(settings, AWQ):
            s, _ = awq.search_scale(weight, train.H, train.num_tokens, columns, c, scheme, settings)
        else:
            judging = train if group.holdout is None or not len(group.holdout.sample) else group.holdout
            # of the tokens that say how large channels are, none is clipped: by them, the largest alpha would be best
            s, _ = smoothquant.search_scale(weight, train.absmax, judging.sample, columns, c, scheme, settings)
        if others or (pair.producer.kind == "linear" and pair.producer.name not in self.quantized):
            s = torch.exp2(s.log2().round())  # 16-bit matrices take powers of two without rounding
        if bool((s == s[0]).all()):
            self._report(pair, "undone", reason="no scales lower the error")
            return None
        effective = effective_scale(self.model, pair.producer, s).to(weight.device)
        return Fold(pair, s, effective, column_scale(first, effective), others)

    def refuse(self, group: Group, reason: str) -> None:
        """Report why a group's scales are not searched."""
        pair = self._pair_of(group)
        if pair is not None:
            self._report(pair, "refused", reason=reason)

    def accept(self, fold: Fold, error: float, before: float) -> None:
        """Carry a fold out at :meth:`apply`; errors of the group's outputs with and without."""
        self._waiting.append(fold)
        self._report(fold.pair, "folded", fold, error, before)

    def reject(self, fold: Fold, error: float, before: float) -> None:
        """Forget a fold that did not help."""
        self._report(fold.pair, "undone", fold, error, before, "the error on held-out tokens is not lower")

    def report(self) -> list[FoldReport]:
        """What became of every pair, once the run is over."""
        known = {report.producer for report in self.reports}
        pairs = {id(pair): pair for pairs in self._pairs.values() for pair in pairs}
        for pair in pairs.values():
            if pair.producer.name not in known:
                self._report(pair, "undone", reason="no layer that reads it is calibrated")
        return self.reports

    def apply(self, pending: dict[str, QuantizedWeight]) -> dict[str, QuantizedWeight]:
        """Divide producers, and multiply consumers that stay in 16 bits.

        Args:
            pending: Name -> weight of layers that are quantized but not swapped in yet.

        Returns:
            Those among them that are other than before.
        """
        changed = {}
        for fold in self._waiting:
            producer = fold.pair.producer
            weight, bias = weight_and_bias(self.model, producer.name)
            if producer.name in pending:
                pending[producer.name] = changed[producer.name] = divided(pending[producer.name], producer, fold.effective)
                if bias is not None:
                    self.undo_log.save_tensor(bias)
                    _divide_bias(bias, producer, fold.effective)
            else:
                for tensor in (weight, bias):
                    if tensor is not None:
                        self.undo_log.save_tensor(tensor)
                divide_producer_(self.model, producer, fold.scale)
            for consumer in fold.pair.consumers:
                if consumer.name in fold.others:
                    self.undo_log.save_tensor(weight_and_bias(self.model, consumer.name)[0])
                    multiply_consumer_(self.model, consumer, fold.effective)
        self._waiting.clear()
        return changed

    def _pair_of(self, group: Group) -> FoldPair | None:
        """The pair whose tensor this group reads: all its layers are consumers, by one map of channels."""
        for pair in self._pairs.get(group.names[0], ()):
            mine = [consumer for consumer in pair.consumers if consumer.name in group.names]
            if len(mine) == len(set(group.names)) and all(_same(mine[0].channels, one.channels) for one in mine):
                return pair
        return None

    def _obstacle(self, pair: FoldPair, others: tuple[str, ...]) -> str | None:
        if also := [name for name in others if name in self.quantized]:
            return f"{list_names(also)} read it too, and are calibrated on other tokens"
        scheme = self.quantized.get(pair.producer.name)
        if scheme is None:
            return None
        if scheme.weights.strategy not in ("group", "channel"):
            return f"the rows of {pair.producer.name} share scales, so that they cannot be divided once it is quantized"
        if weight_and_bias(self.model, pair.producer.name)[0].dtype == torch.float16:
            return f"the scales of {pair.producer.name} are float16, and divided might be too small for it"
        return None

    def _report(
        self,
        pair: FoldPair,
        status: FoldStatus,
        fold: Fold | None = None,
        error: float | None = None,
        before: float | None = None,
        reason: str | None = None,
    ) -> None:
        spread = None if fold is None else float(fold.effective.max() / fold.effective.min())
        names = [consumer.name for consumer in pair.consumers]
        self.reports.append(FoldReport(pair.producer.name, names, status, spread, before, error, reason))


def divided(quantized: QuantizedWeight, producer: Producer, scale: Tensor) -> QuantizedWeight:
    """A quantized producer with its rows divided by ``scale`` [C]: codes stay, their scales are divided and rounded once."""
    factor = torch.ones(quantized.scale.shape[0], device=quantized.scale.device)
    factor[slice(None) if producer.rows is None else producer.rows.to(factor.device)] = scale.to(factor.device)
    scales = (quantized.scale.float() / factor.unsqueeze(1)).to(quantized.scale.dtype)
    return replace(quantized, scale=scales)


@torch.no_grad()
def _divide_bias(bias: Tensor, producer: Producer, scale: Tensor) -> None:
    rows = slice(None) if producer.rows is None else producer.rows.to(bias.device)
    bias[rows] = (bias[rows].float() / scale.to(bias.device)).to(bias.dtype)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
