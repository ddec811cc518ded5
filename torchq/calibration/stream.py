"""Every micro-batch goes through the model once, and stops before each group of Linears until that group has been solved.

A Linear's statistics must come from the activations it will see: those of a model whose earlier layers are quantized already. So
each micro-batch's forward pass runs in a greenlet of its own, a function call that can be suspended. Hooks suspend it before each
*group* of Linears that read one tensor (q, k and v; gate and up). Once every micro-batch waits there, its inputs are summed, the
group is solved, its quantized weights are put in, and all micro-batches go on to the next group. It is the model's own forward
that runs: masks, rotary embeddings, cross attention and the order of layers are as they are, on any architecture, without
tracing, and each layer is computed once. What is in memory is what the suspended calls hold: the residual stream, and one layer's
intermediates, of all micro-batches.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from torchq.calibration.packing import Batch
from torchq.calibration.statistics import InputStatistics


@dataclass
class Group:
    """Linears that read one tensor, in the order of their calls.

    Attributes:
        names: Module names; the first is the leader, at which micro-batches wait.
        calls: How often the leader is called in one forward pass. The group is solved at its last call.
        train: Sums over the calibration tokens.
        holdout: Sums over the held-out tokens.
    """

    names: list[str]
    calls: int = 1
    train: InputStatistics | None = None
    holdout: InputStatistics | None = None


@dataclass
class _MicroBatch:
    """One suspended forward pass. ``waiting`` is the leader it waits at, or None when it has ended."""

    batch: Batch
    held_out: bool
    run: greenlet.greenlet
    waiting: str | None = None
    seen: dict[str, int] = field(default_factory=lambda: defaultdict(int))


@torch.no_grad()
def find_groups(model: nn.Module, layers: Mapping[str, nn.Module], batch: Batch) -> list[Group]:
    """Run one sequence through the model, and return the groups in the order of their (last) calls.

    Two calls belong to one group if they read the same memory: same address, shape, strides and dtype, not written to in
    between. Layers that this sequence does not reach are not in any group.

    Args:
        model: The model, in eval mode.
        layers: Name -> Linear.
        batch: Its first sequence is used.
    """
    calls: list[tuple[str, tuple[Any, ...]]] = []
    alive = []  # memory that is not freed is not reused for another tensor

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = _input_of(args, kwargs)
            alive.append(x)
            calls.append((name, (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)))

        return hook

    handles = [module.register_forward_pre_hook(watch(name), with_kwargs=True) for name, module in layers.items()]
    try:
        model(**_first_sequence(batch), **_no_cache(model))
    finally:
        for handle in handles:
            handle.remove()
    last = {name: index for index, (name, _) in enumerate(calls)}
    groups: dict[tuple[Any, ...], Group] = {}
    for index, (name, key) in enumerate(calls):
        if last[name] == index:
            groups.setdefault(key, Group([])).names.append(name)
    for group in groups.values():
        group.calls = sum(name == group.names[0] for name, _ in calls)
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
    device: torch.device | str | None = None,
    timings: dict[str, float] | None = None,
) -> list[str]:
    """Run all micro-batches through the model, calling ``solve`` for each group once its statistics are complete.

    Args:
        model: The model, in eval mode.
        layers: Name -> Linear, of every layer to be solved.
        groups: From :func:`find_groups`.
        train: Micro-batches whose tokens are summed.
        holdout: Micro-batches whose tokens are summed apart.
        solve: Called with a group and its statistics before any of its Linears runs for the last time. It may replace their
            ``weight`` parameters: what follows then runs on those.
        device: Where to sum; each layer's own device by default.
        timings: Seconds by part (``forward``, ``hessian``) are added here.

    Returns:
        Names of layers that no token reached.

    Raises:
        ValueError: If a layer's input is not finite; the message names the layer.
    """
    timings = {} if timings is None else timings
    leaders, order = _in_order(groups, layers)
    main = greenlet.getcurrent()
    current: dict[greenlet.greenlet, _MicroBatch] = {}

    def wait(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            micro_batch = current.get(greenlet.getcurrent())
            if micro_batch is not None:
                _switch_to(main, name, _input_of(args, kwargs))

        return hook

    def start(batch: Batch, held_out: bool) -> _MicroBatch:
        micro_batch = _MicroBatch(batch, held_out, greenlet.greenlet(lambda: model(**batch.inputs, **_no_cache(model))))
        current[micro_batch.run] = micro_batch
        return micro_batch

    handles = [layers[name].register_forward_pre_hook(wait(name), with_kwargs=True) for name in leaders]
    micro_batches = [start(batch, False) for batch in train] + [start(batch, True) for batch in holdout]
    inputs: dict[int, Tensor] = {}

    def go_on(index: int) -> None:
        micro_batch, begun = micro_batches[index], time.perf_counter()
        inputs.pop(index, None)
        result = micro_batch.run.switch()
        micro_batch.waiting = None
        if not micro_batch.run.dead:
            micro_batch.waiting, inputs[index] = result
        timings["forward"] = timings.get("forward", 0.0) + time.perf_counter() - begun

    unsolved = set(leaders)
    try:
        for index in range(len(micro_batches)):
            go_on(index)
        while inputs and unsolved:  # the rest of the model, a large output embedding say, need not run
            name = min((micro_batches[index].waiting or "" for index in inputs), key=order.__getitem__)
            here = [index for index in inputs if micro_batches[index].waiting == name]
            if name in unsolved:
                group, begun = leaders[name], time.perf_counter()
                for index in here:
                    _add(group, micro_batches[index], inputs[index], device)
                    micro_batches[index].seen[name] += 1
                timings["hessian"] = timings.get("hessian", 0.0) + time.perf_counter() - begun
                if all(micro_batches[index].seen[name] >= group.calls for index in here):
                    unsolved.discard(name)
                    _check_finite(group)
                    solve(group)
                    group.train = group.holdout = None
            for index in here if unsolved else ():
                go_on(index)
    finally:
        for handle in handles:
            handle.remove()
        for micro_batch in micro_batches:
            if not micro_batch.run.dead:
                micro_batch.run.throw(greenlet.GreenletExit)
    return sorted((name for leader in unsolved for name in leaders[leader].names), key=list(layers).index)


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


def _switch_to(main: greenlet.greenlet, name: str, x: Tensor) -> None:
    """Suspend this forward pass. PyTorch's modes belong to the thread: they must not leak from one pass into another."""
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled(x.device.type, False)
    try:
        main.switch((name, x))
    finally:
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled(x.device.type, autocast)


def _add(group: Group, micro_batch: _MicroBatch, x: Tensor, device: torch.device | str | None) -> None:
    statistics = group.holdout if micro_batch.held_out else group.train
    if statistics is None:
        statistics = InputStatistics(x.shape[-1], device or x.device)
        if micro_batch.held_out:
            group.holdout = statistics
        else:
            group.train = statistics
    mask = micro_batch.batch.mask
    if mask is not None and mask.numel() * x.shape[-1] != x.numel():
        mask = None  # not one vector per token (a pooled output, patches)
    statistics.add(x, mask)


def _check_finite(group: Group) -> None:
    for statistics in (group.train, group.holdout):
        if statistics is not None:
            statistics.finish()
            if not bool(torch.isfinite(statistics.H.diagonal()).all()):
                raise ValueError(
                    f"calibration: the input of {group.names[0]} holds NaN or inf; load the model in bfloat16 or float32 "
                    "(float16 overflows), or check that it computes sensible outputs before quantizing it"
                )


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor)
    return x


def _no_cache(model: nn.Module) -> dict[str, Any]:
    """``use_cache=False`` where the model's forward knows it: no key-value cache is built while calibrating."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _first_sequence(batch: Batch) -> dict[str, Any]:
    rows = next(v.shape[0] for v in batch.inputs.values() if isinstance(v, Tensor) and v.ndim)
    return {
        key: value[:1] if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows else value
        for key, value in batch.inputs.items()
    }


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode (no dropout), and back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
