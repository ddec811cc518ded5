"""Which per-channel scales a model lets fold, found by measurement and not by tables of names.

A *fold pair* is a producer of C channels, a norm or rows of a Linear, and every weight that reads them. Of each producer in a
block it is asked:

1. *Which column of which weight reads which channel?* With the block cut at its weights (``torchq.probing``), channels are
   switched off by the bits of their index. A column that reads channel c is zero when c is off, and only then, whatever else goes
   on (attention whose q and k are switched off as well), so ``2 log2(C)`` runs give the whole map: repeated heads, interleaved or
   fused projections, slices. Where a column is a product of two channels (gate and up in one matrix), further runs that switch
   off one side tell the two apart.
2. *Is it linear, and does nothing else read it?* Each channel is scaled by a power of two. Consumers must see exactly that (no
   GELU on the way; ReLU passes), other weights and the block's output nothing at all (no residual, no forgotten router).
3. *Is the block's output the same?* It must be, uncut and in float32, under a fold by random scales.

Steps 1 and 2 are about the block's code and are done once for blocks that are built alike; step 3 is done for each block. What
fails is listed with the reason. Only blocks are searched (``model.layers.3``; the whole module where there are none), since
scales between blocks would have to pass the residual stream; :func:`check_fold` takes any pair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from torchq.calibration.stream import block_of
from torchq.folding import Consumer, FoldPair, Producer, ProducerKind, column_scale, fold_, weight_and_bias
from torchq.model_utils import list_names
from torchq.probing import Block, channel_maps, nonzero_columns, record

_TOLERANCE = 1e-5  # of float32 sums in another order; a wrong fold by scales in [0.5, 2] is off by orders of magnitude more
_MAX_EXPONENT = 10  # probes scale by up to 2^10: beyond what some models clamp their projections to
_NUM_SCALED_PROBES = 3  # a column mapped to a wrong channel passes one with probability 1/21
_NOT_MEASURED = float("nan")


@dataclass(frozen=True)
class Refused:
    """A producer whose channels cannot be scaled, or not together with these consumers.

    Attributes:
        producer: Module or parameter name; of a block that did not run, its name.
        consumers: Names of weights that depend on it channel by channel.
        reason: What was measured.
        error: Relative change of the block's float32 output under this fold; None if there is nothing to fold.
    """

    producer: str
    consumers: tuple[str, ...]
    reason: str
    error: float | None = None


@dataclass
class Folds:
    """What :func:`find_folds` found.

    Attributes:
        pairs: Exact ones, in the order in which blocks and consumers run.
        refused: Norms that are in no pair, and Linears on whose channels weights depend in a way that no scale passes.
    """

    pairs: list[FoldPair] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def find_folds(model: nn.Module, batch: Mapping[str, Any] | None = None) -> Folds:
    """Return the exact fold pairs within each block of a model, and what was refused.

    The model runs once; then one block at a time is copied to float32 and measured. The model is not changed.

    Args:
        model: Any module whose parameters hold values. Its blocks are its numbered submodules, or, without any, itself.
        batch: Keyword arguments of its forward, of several tokens (with one, attention depends on values only). By default 32
            random token ids.

    Raises:
        ValueError: If there is neither a batch nor a ``config.vocab_size``.
    """
    names = list(dict.fromkeys(inside for name, _ in model.named_modules() if (inside := block_of(name)))) or [""]
    calls = record(model, {name: model.get_submodule(name) for name in names}, batch)
    shared = _shared_parameters(model)
    known: dict[Any, list[_Candidate]] = {}
    folds = Folds()
    for name in names:
        if name not in calls:
            folds.refused.append(Refused(name, (), "the block did not run in this batch"))
            continue
        for result in _results_of(Block(model.get_submodule(name), calls[name]), name, known, shared):
            if isinstance(result, FoldPair):
                folds.pairs.append(result)
            else:
                folds.refused.append(result)
    return folds


def _results_of(
    block: Block, name: str, known: dict[Any, list[_Candidate]], shared: Mapping[str, set[str]]
) -> list[FoldPair | Refused]:
    """Judge all candidates of a block. ``known`` holds those of other blocks, by how they are built."""
    structure = _structure(block.module)
    if structure not in known:
        known[structure] = _candidates(block)
    return [_judged(block, candidate, name, shared) for candidate in known[structure]]


def check_fold(model: nn.Module, producer: str, consumers: Sequence[str], batch: Mapping[str, Any] | None = None) -> FoldPair:
    """Return the fold pair of these modules, if folding it changes nothing.

    Measured in the block that holds them all, or else in the smallest module that does (for a final norm and ``lm_head``, a
    float32 copy of the whole model).

    Args:
        model: As for :func:`find_folds`.
        producer: Module or parameter name.
        consumers: Module or parameter names of all that reads the producer.
        batch: As for :func:`find_folds`.

    Raises:
        ValueError: If a name is not in the model, or the fold is not exact: with the reason and the error measured.
    """
    for name in (producer, *consumers):
        weight_and_bias(model, name)
    holder = _holder_of(model, [producer, *consumers])
    calls = record(model, {holder: model.get_submodule(holder)}, batch)
    refusal = f"{producer} cannot be folded into {list_names(list(consumers))}: "
    if holder not in calls:
        raise ValueError(refusal + f"{holder} did not run in this batch; give a batch that it runs in")
    block = Block(model.get_submodule(holder), calls[holder])
    inside = [name[len(holder) + 1 if holder else 0 :] for name in (producer, *consumers)]
    kind = _producers(block).get(inside[0])
    if kind is None:
        raise ValueError(refusal + f"it is neither a norm nor a matrix that is multiplied in {holder or 'the model'}")
    shared = _shared_parameters(model)
    requested = [_requested(block, candidate, inside[1:]) for candidate in _candidates_of(block, inside[0], kind)]
    results = [_judged(block, candidate, holder, shared) for candidate in requested]
    for result in results:
        if isinstance(result, FoldPair):
            return result
    best = min((r for r in results if isinstance(r, Refused)), key=lambda r: float("inf") if r.error is None else r.error)
    measured = "" if best.error is None else f" (the output changes by {best.error:.2g}, more than {_TOLERANCE:g})"
    raise ValueError(refusal + best.reason + measured)


def with_overrides(
    model: nn.Module, found: Folds, overrides: Mapping[str, Sequence[str]], batch: Mapping[str, Any] | None = None
) -> Folds:
    """Return what was found, with the pairs that a user asks for.

    Args:
        model: As for :func:`find_folds`.
        found: From there.
        overrides: Name of a producer (or a ``re:`` pattern) -> its consumers, or () for no pair.
        batch: As for :func:`find_folds`.

    Raises:
        ValueError: If a key matches no module with a weight, or a pair is not exact.
    """
    pairs, refused = list(found.pairs), list(found.refused)
    for producer, consumers in overrides.items():
        if consumers:
            requested = check_fold(model, producer, consumers, batch)
            pairs = [pair for pair in pairs if pair.producer.name != producer] + [requested]
            continue
        pattern = re.compile(producer[3:] if producer.startswith("re:") else re.escape(producer) + "$")
        names = {pair.producer.name for pair in pairs} | {one.producer for one in refused}
        left_out = {name for name in names if pattern.match(name)}
        if not left_out:
            weight_and_bias(model, producer)  # its error says what is there
            continue
        refused += [
            Refused(pair.producer.name, tuple(consumer.name for consumer in pair.consumers), "left out by folds")
            for pair in pairs
            if pair.producer.name in left_out
        ]
        pairs = [pair for pair in pairs if pair.producer.name not in left_out]
    return Folds(pairs, refused)


@dataclass(frozen=True)
class _Candidate:
    """A pair, with names as within its block, and what speaks against it, if anything."""

    pair: FoldPair
    reason: str | None


def _candidates(block: Block) -> list[_Candidate]:
    """All candidates of a block, in the order in which their consumers run; Linears that no weight depends on are left out."""
    order = {name: index for index, name in enumerate(block.readers)}
    found: list[_Candidate] = []
    measured: dict[Any, tuple[str, list[_Candidate]]] = {}  # experts are built alike: one of them is measured for all
    for name, kind in _producers(block).items():
        expert = (block_of(name) if kind == "linear" else None) or ""
        key = name.removeprefix(expert), _structure(block.module.get_submodule(expert)) if expert else None
        if key in measured:
            twin, candidates = measured[key]
            candidates = [
                _Candidate(_renamed(c.pair, twin, expert), c.reason and c.reason.replace(twin, expert)) for c in candidates
            ]
        else:
            candidates = _candidates_of(block, name, kind)
            if {block_of(consumer.name) for c in candidates for consumer in c.pair.consumers} <= {expert}:
                measured[key] = expert, candidates
        found += [c for c in candidates if c.pair.consumers or kind != "linear"]
    return sorted(found, key=lambda c: order[c.pair.consumers[0].name] if c.pair.consumers else len(order))


def _renamed(pair: FoldPair, old: str, new: str) -> FoldPair:
    """The pair with another beginning of all names."""
    producer = replace(pair.producer, name=new + pair.producer.name.removeprefix(old))
    consumers = tuple(replace(consumer, name=new + consumer.name.removeprefix(old)) for consumer in pair.consumers)
    return replace(pair, producer=producer, consumers=consumers)


def _producers(block: Block) -> dict[str, ProducerKind]:
    return block.norm_kinds() | dict.fromkeys(block.readers, "linear")


def _candidates_of(block: Block, name: str, kind: ProducerKind) -> list[_Candidate]:
    """The pairs that a producer may be in: one for a norm; for a fused Linear as many as it has parts that are read apart."""
    reader = block.readers.get(name)
    size = weight_and_bias(block.module, name)[0].numel() if reader is None else reader.num_outputs
    axis = 0 if reader is None else reader.out_axis
    pairs = []
    for maps in channel_maps(block, name, size):
        while maps:
            part, columns = _take_part(maps, torch.full((size,), kind != "linear"))  # a norm has all its channels scaled
            producer = Producer(name, kind, int(part.sum()), axis, None if part.all() else part.nonzero().flatten())
            consumers = tuple(_consumer(block, consumer, part, column) for consumer, column in columns.items())
            pairs.append(FoldPair(producer, consumers, _NOT_MEASURED))
    if not pairs:
        pair = FoldPair(Producer(name, kind, size, axis), (), _NOT_MEASURED)
        return [_Candidate(pair, "no weight reads its channels one by one")]
    return [_Candidate(pair, _objection(block, pair, size)) for pair in pairs]


def _take_part(maps: dict[str, Tensor], part: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Remove from ``maps`` readers that share channels; returns the channels [N] bool, at least ``part``, and these readers."""
    taken: dict[str, Tensor] = {}
    sharing = [name for name in maps] if part.all() else [next(iter(maps))]
    while sharing:
        for name in sharing:
            taken[name] = maps.pop(name)
            part[taken[name][taken[name] >= 0]] = True
        sharing = [name for name, column in maps.items() if bool(part[column[column >= 0]].any())]
    return part, taken


def _consumer(block: Block, name: str, part: Tensor, column: Tensor) -> Consumer:
    """A consumer whose columns read these channels of the producer, counted among those of ``part`` ([N] bool)."""
    channels = torch.where(column < 0, -1, (part.cumsum(0) - 1)[column])
    identity = torch.equal(channels, torch.arange(int(part.sum())))
    return Consumer(name, block.readers[name].in_axis, None if identity else channels)


def _objection(block: Block, pair: FoldPair, size: int) -> str | None:
    """What is wrong with a pair as far as the block's code goes: its weights are noise here (step 2 above)."""
    producer, consumers = pair.producer, {consumer.name: consumer for consumer in pair.consumers}
    for name, num_inputs in block.unreached.items():
        if num_inputs == producer.num_channels:
            return f"{name}, which no token of this batch reaches, may read it as well"
    before = block.cut(producer.name, torch.ones(size))
    if zero := [name for name, alive in nonzero_columns(before).items() if name in consumers and not alive.all()]:
        return f"{list_names(zero)} reads columns that are zero for all tokens; give a longer batch"
    generator = torch.Generator().manual_seed(0)
    for _ in range(_NUM_SCALED_PROBES):
        scale = 2.0 ** torch.randint(-_MAX_EXPONENT, _MAX_EXPONENT + 1, (producer.num_channels,), generator=generator)
        code = torch.ones(size)
        code[slice(None) if producer.rows is None else producer.rows] = scale
        after = block.cut(producer.name, code)
        if [(name, x.shape) for name, x in before] != [(name, x.shape) for name, x in after]:
            return "what the block computes depends on it"
        wrong = []
        for (name, x), (_, y) in zip(before, after, strict=True):
            factor = column_scale(consumers[name], scale).to(y.device) if name in consumers else 1.0
            if x.numel() and not torch.allclose(y / factor, x.float(), rtol=0.0, atol=_TOLERANCE * float(x.float().abs().max())):
                wrong.append(name)
        if crooked := [name for name in dict.fromkeys(wrong) if name in consumers]:
            return f"{list_names(crooked)} reads it through a function that is not linear"
        if wrong:
            return f"{list_names(list(dict.fromkeys(wrong)))} depends on it as well"
    return None


def _judged(block: Block, candidate: _Candidate, prefix: str, shared: Mapping[str, set[str]]) -> FoldPair | Refused:
    """Fold by random scales and compare the block's output (step 3 above); the result has names as in the model."""
    start = prefix + "." if prefix else ""
    error = _fold_error(block, candidate.pair) if candidate.pair.consumers else None
    pair, reason = _renamed(candidate.pair, "", start), candidate.reason
    names = [pair.producer.name, *(consumer.name for consumer in pair.consumers)]
    outside = {other for name in names for other in shared.get(name, ()) if not other.startswith(start)}
    if reason is None and outside:
        reason = f"its parameters are also those of {list_names(sorted(outside))}"
    if reason is None and error is not None and error > _TOLERANCE:
        reason = "the block's output changes"
    if reason is None and error is not None:
        return replace(pair, error=error)
    rows = pair.producer.rows
    where = "" if rows is None else f"of channels {int(rows[0])} to {int(rows[-1])}: "
    return Refused(pair.producer.name, tuple(names[1:]), f"{where}{reason}", error)


def _fold_error(block: Block, pair: FoldPair) -> float:
    """Largest relative change of a vector of the block's output under a fold by random scales in [0.5, 2]."""
    names = [pair.producer.name, *(consumer.name for consumer in pair.consumers)]
    saved = [(p, p.clone()) for name in names for p in weight_and_bias(block.module, name) if p is not None]
    before = block.output
    try:
        fold_(block.module, pair, 0.5 + 1.5 * torch.rand(pair.num_channels, generator=torch.Generator().manual_seed(0)))
        after = block.run()
    finally:
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)
    if [x.shape for x in before] != [x.shape for x in after]:
        return float("inf")
    errors = []
    for x, y in zip(before, after, strict=True):
        if not x.numel():
            continue
        x, y = x.float().reshape(-1, *x.shape[-1:]), y.float().reshape(-1, *y.shape[-1:])
        errors.append(float(((y - x).norm(dim=-1) / x.norm(dim=-1).clamp(min=torch.finfo(x.dtype).tiny)).max()))
    return max((float("inf") if math.isnan(error) else error for error in errors), default=float("inf"))


def _requested(block: Block, candidate: _Candidate, names: Sequence[str]) -> _Candidate:
    """The candidate with the consumers that a user names (where no columns were measured: in order), and objections."""
    pair = candidate.pair
    measured = {consumer.name: consumer for consumer in pair.consumers}
    consumers: list[Consumer] = []
    problems = [candidate.reason] if candidate.reason else []
    for name in names:
        reader = block.readers.get(name)
        if name in measured:
            consumers.append(measured[name])
            continue
        problems.append(f"{name} does not read its channels one by one")
        if reader is not None and weight_and_bias(block.module, name)[0].shape[reader.in_axis] == pair.num_channels:
            consumers.append(Consumer(name, reader.in_axis))
    if missing := [name for name in measured if name not in names]:
        problems.append(f"{list_names(missing)} reads it as well")
    return _Candidate(replace(pair, consumers=tuple(consumers)), "; ".join(problems) or None)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """What blocks that are built alike have in common: classes, shapes, and switches such as the kind of attention."""
    return tuple(
        (name, type(m), tuple(p.shape for p in m._parameters.values() if p is not None), _switches(m))
        for name, m in module.named_modules()
    )


def _switches(module: nn.Module) -> tuple[Any, ...]:
    return tuple((key, value) for key, value in vars(module).items() if value is None or isinstance(value, (bool, str)))


def _shared_parameters(model: nn.Module) -> dict[str, set[str]]:
    """Module (or bare parameter) name -> the other names under which a parameter of it is in the model."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name.removesuffix(".weight").removesuffix(".bias"))
    return {name: group - {name} for group in names.values() if len(group) > 1 for name in group}


def _holder_of(model: nn.Module, names: Sequence[str]) -> str:
    """The block that holds all of these, or else the smallest module that does and is more than a container."""
    blocks = {block_of(name) for name in names}
    block = blocks.pop()
    if block and not blocks:
        return block
    paths = [name.split(".")[:-1] for name in names]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    while common and isinstance(model.get_submodule(".".join(common)), (nn.ModuleList, nn.ModuleDict)):
        common.pop()
    return ".".join(common)
