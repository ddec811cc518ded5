"""Every micro-batch goes through the model once, and stops before each group of Linears until that group has been solved.

A Linear's statistics must come from the activations it will see: those of a model whose earlier layers are quantized already. So
each micro-batch's forward pass runs in a greenlet of its own, a function call that can be suspended. Hooks suspend it before each
*group* of Linears that read one tensor (q, k and v; gate and up). Once every micro-batch waits there, its inputs are summed, the
group is solved, its quantized weights are put in, and all micro-batches go on to the next group. It is the model's own forward
that runs: masks, rotary embeddings, cross attention and the order of layers are as they are, on any architecture, without
tracing, and each layer is computed once. What is in memory is what the suspended calls hold: the residual stream, and one layer's
intermediates, of all micro-batches.

A *reference* pass shows what a layer's input was before quantization. It runs one group ahead: once its micro-batch has arrived
at a group and the two inputs have been compared, it goes on through that group, whose weights are still the original ones, to
the next. So the model is there once, and of a layer's two wide inputs (an MLP's, say) at most one is alive. (Members of a group
that run later, such as the cross attention of further decoder layers, which reads what the first one's reads, are then
quantized.)

Where one layer's intermediates of all micro-batches are too much, passes are suspended before *blocks* instead, where they hold
little more than the residual stream, and a block is computed anew up to each of its groups, one micro-batch at a time.
"""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.calibration.packing import Batch
from torchq.calibration.passes import Pass, Passes, autocast_to, input_of, no_cache, reduced, without_cache
from torchq.calibration.statistics import InputStatistics


@dataclass
class Group:
    """Linears that read one tensor, in the order of their calls.

    Attributes:
        names: Module names; the first is the leader, at which micro-batches wait.
        calls: How often the leader is called in one forward pass. The group is solved at its last call.
        bytes_per_token: Of what the leader reads.
        train: Sums over the calibration tokens.
        holdout: Sums over the held-out tokens.
    """

    names: list[str]
    calls: int = 1
    bytes_per_token: float = 0.0
    train: InputStatistics | None = None
    holdout: InputStatistics | None = None


@torch.no_grad()
def find_groups(
    model: nn.Module, layers: Mapping[str, nn.Module], batch: Batch, *, autocast: torch.dtype | None = None
) -> list[Group]:
    """Run one sequence through the model, and return the groups in the order of their (last) calls.

    Two calls belong to one group if they read the same memory: same address, shape, strides and dtype, not written to in
    between. Layers that this sequence does not reach are not in any group.

    Args:
        model: The model, in eval mode.
        layers: Name -> Linear.
        batch: Its first sequence is used.
        autocast: As for :func:`stream`.
    """
    calls: list[tuple[str, tuple[Any, ...]]] = []
    alive = []  # memory that is not freed is not reused for another tensor

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(args, kwargs)
            alive.append(x)
            calls.append((name, (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)))

        return hook

    handles = [module.register_forward_pre_hook(watch(name), with_kwargs=True) for name, module in layers.items()]
    try:
        with reduced(model, autocast), autocast_to(model, autocast), no_cache(model):
            model(**first_sequence(batch), **without_cache(model), **few_logits(model))
    finally:
        for handle in handles:
            handle.remove()
    num_tokens = max(num_tokens_of(Batch(first_sequence(batch), None)), 1)
    last = {name: index for index, (name, _) in enumerate(calls)}
    groups: dict[tuple[Any, ...], Group] = {}
    for index, (name, key) in enumerate(calls):
        if last[name] == index:
            groups.setdefault(key, Group([])).names.append(name)
    for group in groups.values():
        mine = [x for (name, _), x in zip(calls, alive, strict=True) if name == group.names[0]]
        group.calls, group.bytes_per_token = len(mine), mine[-1].nbytes / num_tokens
    return list(groups.values())


@torch.no_grad()
def stream(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    groups: Sequence[Group],
    train: Sequence[Batch],
    holdout: Sequence[Batch],
    solve: Callable[[Group], None],
    *,
    drift_tokens: float = 0.0,
    recompute: bool = False,
    autocast: torch.dtype | None = None,
    exact: bool = True,
    sampled: tuple[int, int] = (0, 0),
    device: torch.device | str | None = None,
    timings: dict[str, float] | None = None,
) -> list[str]:
    """Run all micro-batches through the model, calling ``solve`` for each group once its statistics are complete.

    Args:
        model: The model, in eval mode.
        layers: Name -> Linear, of every layer to be solved. Not looked at once it runs: ``solve`` may empty it.
        groups: From :func:`find_groups`.
        train: Micro-batches whose tokens are summed.
        holdout: Micro-batches whose tokens are summed apart.
        solve: Called with a group and its statistics before any of its Linears runs for the last time. It may replace their
            ``weight`` parameters: what follows then runs on those.
        drift_tokens: Share of the micro-batches (if not 0: at least one, and all held-out ones) that run through the original
            weights as well, to sum the drift between the two. Where the two take different ways (routed experts), no drift is
            summed.
        recompute: Whether passes wait before blocks and compute a block anew for each of its groups: 2.5 times the
            forward time of a Llama (more where a block has more groups: routed experts), in less memory.
        autocast: What products are computed in (``torch.autocast``), or None: what the model is in.
        exact: As for :class:`InputStatistics`.
        sampled: How many tokens of each micro-batch, and of each held-out one, are kept beside the sums.
        device: Where to sum; each layer's own device by default.
        timings: Seconds by part (``forward``, ``hessian``) are added here.

    Returns:
        Names of layers that no token reached.

    Raises:
        ValueError: If a layer's input is not finite; the message names the layer.
    """
    timings = {} if timings is None else timings
    leaders, order = _in_order(groups, layers)
    names, last = list(layers), max(order.values())
    blocks = {block: model.get_submodule(block) for name in leaders if (block := block_of(name))} if recompute else {}

    def advance(one: Pass) -> None:
        """On to the next leader, where its input is summed."""
        with _timed(timings, "forward"):
            one.go_on()
        if one.waiting is None or one.waiting not in unsolved:
            return
        other, place = references.get(one), (order[one.waiting], one.visits[one.waiting])
        if other is not None:
            with _timed(timings, "forward"):
                while other.waiting is not None and (order[other.waiting], other.visits[other.waiting]) < place:
                    other.go_on()
        met = other is not None and (other.waiting, other.visits[one.waiting]) == (one.waiting, one.visits[one.waiting])
        with _timed(timings, "hessian"):
            statistics = _statistics(leaders[one.waiting], one, device, exact, sampled)
            _add(statistics, one, other.input if met and other is not None else None)
        at_the_end = order[one.waiting] == last and one.visits[one.waiting] >= leaders[one.waiting].calls
        one.rest()
        if met and other is not None and not at_the_end:  # past this group while its weights are the original ones
            with _timed(timings, "forward"):
                other.go_on()

    with Passes(model, {name: layers[name] for name in leaders}, blocks, autocast=autocast) as started:
        unsolved = started.unsolved
        passes = [started.start(batch, recompute=recompute) for batch in train]
        passes += [started.start(batch, True, recompute=recompute) for batch in holdout]
        references: dict[Pass, Pass] = {}
        for index, one in enumerate(passes):
            if drift_tokens and (one.held_out or math.ceil((index + 1) * drift_tokens) > math.ceil(index * drift_tokens)):
                references[one] = started.start(one.batch, one.held_out)
                references[one].go_on()
            advance(one)
        while unsolved and (waiting := [one.waiting for one in passes if one.waiting is not None]):
            name = min(waiting, key=order.__getitem__)
            here = [one for one in passes if one.waiting == name]
            if name in unsolved and all(one.visits[name] >= leaders[name].calls for one in here):
                unsolved.discard(name)
                group = leaders[name]
                _check_finite(group)
                solve(group)
                group.train = group.holdout = None
                torch.clear_autocast_cache()  # of weights in the other dtype, which are kept until the last pass has ended
            for one in here if unsolved else ():  # the rest of the model, a large output embedding say, need not run
                advance(one)
    return sorted((name for leader in unsolved for name in leaders[leader].names), key=names.index)


def _in_order(groups: Sequence[Group], layers: Mapping[str, nn.Module]) -> tuple[dict[str, Group], dict[str, tuple[int, int]]]:
    """Groups by their leader, and when each comes; layers in no group (other experts) come after the one before them."""
    leaders = {group.names[0]: group for group in groups}
    order = {name: (index, 0) for index, name in enumerate(leaders)}
    place = {name: index for index, group in enumerate(groups) for name in group.names}
    before = -1
    for position, name in enumerate(layers):
        if name in place:
            before = place[name]
        else:
            leaders[name], order[name] = Group([name]), (before, position + 1)
    return leaders, order


def block_of(name: str) -> str | None:
    """``model.layers.3`` for ``model.layers.3.mlp.up_proj``; None for layers outside numbered blocks."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return match[0] if match else None


def _statistics(
    group: Group, one: Pass, device: torch.device | str | None, exact: bool, sampled: tuple[int, int]
) -> InputStatistics:
    """Where the input that a pass waits with is summed."""
    assert one.input is not None
    name = "holdout" if one.held_out else "train"
    if getattr(group, name) is None:
        where, kept = device or one.input.device, sampled[one.held_out]
        setattr(group, name, InputStatistics(one.input.shape[-1], where, exact=exact, sampled=kept))
    statistics: InputStatistics = getattr(group, name)
    return statistics


def _add(statistics: InputStatistics, one: Pass, reference: Tensor | None) -> None:
    """Sum the input that a pass waits with."""
    x, mask = one.input, one.batch.mask
    assert x is not None
    if mask is not None and mask.numel() * x.shape[-1] != x.numel():
        mask = None  # not one vector per token (a pooled output, patches)
    if reference is not None and (reference.shape != x.shape or (x.ndim < 3 and x.shape[0] != num_tokens_of(one.batch))):
        reference = None  # of other tokens: those routed to an expert, say
    statistics.add(x, mask, reference)


def num_tokens_of(batch: Batch) -> int:
    """Tokens of a micro-batch, padding included."""
    return max((value.shape[:2].numel() for value in batch.inputs.values() if isinstance(value, Tensor)), default=0)


@contextmanager
def _timed(timings: dict[str, float], part: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    timings[part] = timings.get(part, 0.0) + time.perf_counter() - begun


def _check_finite(group: Group) -> None:
    for statistics in (group.train, group.holdout):
        if statistics is not None:
            statistics.finish()
            if not bool(torch.isfinite(statistics.H.diagonal()).all()):
                raise ValueError(
                    f"calibration: the input of {group.names[0]} holds NaN or inf; load the model in bfloat16 or float32 "
                    "(float16 overflows), or check that it computes sensible outputs before quantizing it"
                )


def few_logits(model: nn.Module) -> dict[str, Any]:
    """Return arguments that ask for the logits of one token, if there are such: all of them may be more than the model."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def first_sequence(batch: Batch) -> dict[str, Any]:
    """A batch's inputs, of its first sequence only."""
    rows = next(v.shape[0] for v in batch.inputs.values() if isinstance(v, Tensor) and v.ndim)
    return {
        key: value[:1] if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows else value
        for key, value in batch.inputs.items()
    }
