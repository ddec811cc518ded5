"""Forward passes that can be suspended: each runs in a greenlet of its own and waits before the layers it is told to."""

from __future__ import annotations

import contextvars
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from torchq.calibration.packing import Batch


@dataclass(frozen=True)
class _Stop:
    """Where a greenlet waits: before a leader, or before a block."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Passes:
    """The forward passes of a run; a context manager, which on leaving removes its hooks and ends the passes that still wait.

    Args:
        model: The model, in eval mode.
        leaders: Name -> module that passes wait before.
        blocks: Name -> module, of the blocks that recomputing passes wait before.
        autocast: What products are computed in (``torch.autocast``), or None: what the model is in.
    """

    def __init__(
        self,
        model: nn.Module,
        leaders: Mapping[str, nn.Module],
        blocks: Mapping[str, nn.Module] | None = None,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.leaders, self.blocks = model, leaders, blocks or {}
        self.autocast, self.device = autocast, device_of(model)
        self.inside: dict[str, set[str]] = {}  # block -> leaders in it; one module may be in several
        for name, block in self.blocks.items():
            modules = set(block.modules())
            self.inside[name] = {leader for leader, module in leaders.items() if module in modules}
        self.unsolved = set(leaders)
        self._main = greenlet.getcurrent()
        self._running: set[greenlet.greenlet] = set()
        self._recomputing: set[greenlet.greenlet] = set()
        self._going_through: dict[greenlet.greenlet, str] = {}  # recomputing passes in a block that they no longer wait in
        self._undo = ExitStack()

    def __enter__(self) -> Passes:
        self._undo.enter_context(reduced(self.model, self.autocast))
        self._undo.enter_context(no_cache(self.model))
        for name, module in self.leaders.items():
            self._undo.callback(module.register_forward_pre_hook(self._at_leader(name), with_kwargs=True).remove)
        for name, module in self.blocks.items():
            before = module.register_forward_pre_hook(self._at_block(name), with_kwargs=True, prepend=True)  # others change args
            self._undo.callback(before.remove)
            self._undo.callback(module.register_forward_hook(self._after_block(name)).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.close()
        for run in list(self._running):
            self.end(run)

    def start(self, batch: Batch, held_out: bool = False, *, recompute: bool = False) -> Pass:
        """Return a pass through the model, which has not begun yet. ``recompute``: see :class:`RecomputingPass`."""
        run = self.greenlet_of(partial(self.model, **batch.inputs, **without_cache(self.model)))
        if recompute:
            self._recomputing.add(run)
        return (RecomputingPass if recompute else Pass)(self, batch, held_out, run)

    def greenlet_of(self, function: Callable[[], Any]) -> greenlet.greenlet:
        """A suspended call."""

        def call() -> None:
            with autocast_to(self.model, self.autocast):
                function()

        run = greenlet.greenlet(call, self._main)
        run.gr_context = contextvars.copy_context()
        self._running.add(run)
        return run

    def resume(self, run: greenlet.greenlet) -> _Stop | None:
        """Let a greenlet run to where it waits next; None if it ends."""
        stop: _Stop = self._switch(run.switch)
        if run.dead:
            self._forget(run)
            return None
        return stop

    def end(self, run: greenlet.greenlet) -> None:
        """End a greenlet where it waits, and free what it holds."""
        if not run.dead:
            self._switch(partial(run.throw, greenlet.GreenletExit))
        self._forget(run)

    def _forget(self, run: greenlet.greenlet) -> None:
        self._running.discard(run)
        self._recomputing.discard(run)
        self._going_through.pop(run, None)

    def _at_leader(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current = greenlet.getcurrent()
            if current in self._running and current not in self._going_through:
                self._switch(partial(self._main.switch, _Stop(name, args, kwargs)))

        return hook

    def _at_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current = greenlet.getcurrent()
            if current in self._recomputing and current not in self._going_through:
                self._switch(partial(self._main.switch, _Stop(name, args, kwargs)))
                self._going_through[current] = name

        return hook

    def _after_block(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._going_through.get(greenlet.getcurrent()) == name:
                del self._going_through[greenlet.getcurrent()]

        return hook

    def _switch(self, to: Callable[[], Any]) -> Any:
        """Switch to another greenlet. PyTorch's modes belong to the thread: on return they are what they were."""
        device = self.device
        grad, enabled = torch.is_grad_enabled(), torch.is_autocast_enabled(device)
        dtype, cache = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
        try:
            return to()
        finally:
            torch.set_grad_enabled(grad)
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(cache)


@dataclass(eq=False)
class Pass:
    """A forward pass.

    Attributes:
        passes: All of them.
        batch: Its micro-batch.
        held_out: Whether that is held out.
        run: The suspended call.
        waiting: The leader it waits before; None before it has begun and after it has ended.
        input: What that leader is going to read, or None.
        visits: Leader -> how often it has waited there.
    """

    passes: Passes
    batch: Batch
    held_out: bool
    run: greenlet.greenlet
    waiting: str | None = None
    input: Tensor | None = None
    visits: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def go_on(self) -> None:
        """Run to the next leader, or to the end."""
        self.waiting = self.input = None
        self._arrive(self.passes.resume(self.run))

    def rest(self) -> None:
        """Called once ``input`` has been looked at: what can be recomputed may be freed."""

    def _arrive(self, stop: _Stop | None) -> None:
        if stop is not None:
            self.waiting, self.input = stop.name, input_of(stop.args, stop.kwargs)
            self.visits[stop.name] += 1


@dataclass(eq=False)
class RecomputingPass(Pass):
    """A pass that waits before blocks, holding no more than their inputs, and computes a block anew up to each leader in it.

    When all leaders of the block have been solved, or none is left that this micro-batch reaches, it goes through the block for
    good. Leaders outside blocks it waits before like any pass.
    """

    _block: _Stop | None = None
    _again: greenlet.greenlet | None = None  # going through the block once more
    _visits_before: dict[str, int] = field(default_factory=dict)

    def go_on(self) -> None:
        """Run to the next leader, in this block or after it, or to the end."""
        self.waiting = self.input = None
        while True:
            stop = self._in_block() if self._block is not None else None
            if stop is None:
                self._block = None
                stop = self.passes.resume(self.run)
                if stop is not None and stop.name in self.passes.blocks:
                    self._block, self._visits_before = stop, dict(self.visits)
                    continue
            self._arrive(stop)
            return

    def rest(self) -> None:
        """Free what was computed inside the block."""
        self.input = None
        if self._again is not None:
            self.passes.end(self._again)
            self._again = None

    def _in_block(self) -> _Stop | None:
        """Go to the next leader of the block where this pass has not waited yet; None if there is none."""
        assert self._block is not None
        name, passes = self._block.name, self.passes
        if passes.unsolved.isdisjoint(passes.inside[name]):
            return None
        self.rest()
        args, kwargs = _copied(self._block.args), _copied(self._block.kwargs)  # some blocks write to their input
        self._again = again = passes.greenlet_of(partial(passes.blocks[name], *args, **kwargs))
        if self.run.gr_context is not None:
            again.gr_context = self.run.gr_context.copy()
        seen = defaultdict(int, self._visits_before)
        while (stop := passes.resume(again)) is not None:
            seen[stop.name] += 1
            if seen[stop.name] > self.visits[stop.name]:
                return stop
        self._again = None
        return None


def _copied(value: Any) -> Any:
    """Copies of floating-point tensors, also inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a Linear called with these arguments reads."""
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor)
    return x


def autocast_to(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """``torch.autocast``, or nothing for None."""
    return nullcontext() if dtype is None else torch.autocast(device_of(model), dtype)


@contextmanager
def reduced(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Let what autocast leaves in float32, embeddings and norms, give its dtype as well, as in a model of that dtype."""

    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return output.to(dtype) if isinstance(output, Tensor) and output.dtype == torch.float32 else output

    handles = []
    for module in model.modules() if dtype is not None else ():
        if module._parameters and not any(True for _ in module.children()):
            handles.append(module.register_forward_hook(cast))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def device_of(model: nn.Module) -> str:
    """Type of the device that the model's first parameter is on."""
    return next(model.parameters()).device.type


@contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Turn key-value caches off in the configurations of all submodules: some models' forward passes the argument on unseen."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def without_cache(model: nn.Module) -> dict[str, Any]:
    """``use_cache=False`` where the model's forward names it: not every configuration counts."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


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
