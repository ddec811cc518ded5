"""One block of a model, cut open at its weights, to measure how its tensors depend on each other.

In a *cut* run a product with a weight (``x W^T``: of a Linear, a Conv1D, a router, experts stacked in one parameter) is not
computed: ``x`` is noted down, and noise, the same in each run, takes the product's place. What a norm or a Linear makes then
reaches other weights only through what lies *between* weights: reshapes, attention, activations, residual sums. So how each ``x``
reacts to the channels of one producer is a property of the block's code, not of its weights, and a run costs next to nothing.
Noise also makes "is it zero?" a safe question: trained weights have dead channels, noise has none.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchq.calibration.passes import eval_mode, no_cache, without_cache
from torchq.folding import ProducerKind
from torchq.matching import is_conv1d
from torchq.model_utils import linear_shape

OUTPUT = "the block's output"  # stands among the names of readers

_MOST_SEEDS = 16  # other noise routes tokens to other experts: how often to try before an expert counts as unreachable
_NUM_TOKENS = 32  # of the default batch
_ZERO_GAIN: dict[ProducerKind, float] = {"norm": 0.0, "offset_norm": -1.0}  # the weight at which the output is zero
_FIRST_OPERAND = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.baddbmm: 1,
    torch.ops.aten._grouped_mm: 0,
}

Call = tuple[tuple[Any, ...], dict[str, Any]]
Trace = list[tuple[str, Tensor]]  # what was read, by whom, in order; at the end the block's outputs


@dataclass(frozen=True)
class Reader:
    """A weight that is multiplied with an activation: [..., K] -> [..., N].

    Attributes:
        in_axis: Dimension of the parameter that runs over the K input channels.
        out_axis: Dimension of the parameter that runs over the N output channels.
        num_outputs: N.
    """

    in_axis: int
    out_axis: int
    num_outputs: int


class Block:
    """A float32 copy of a block and the arguments it was called with.

    Args:
        module: The block. Its parameters are copied, so that they can be changed.
        call: ``(args, kwargs)`` of a call of it, from :func:`record`.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        # Parameters go from the model's dtype to float32 at once: no second copy of the block in 16 bits.
        memo: dict[int, Any] = {id(p): nn.Parameter(_float32(p.detach()), requires_grad=False) for p in module.parameters()}
        memo |= {id(buffer): _float32(buffer) for buffer in module.buffers()}
        self.module = copy.deepcopy(module, memo).eval()
        self._call = _mapped(_float32, call)
        self.owners = self._owners()
        self.readers: dict[str, Reader] = {}  # filled by runs that are cut
        self._noise: dict[tuple[Any, ...], Tensor] = {}
        self.unreached = self._reach_all()
        self.output = self.run()

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        """Run the block as it is; returns its outputs, and what it put into containers it was given (keys and values, say)."""
        args, kwargs = call = _mapped(_copy, self._call)
        given = {id(x) for x in _leaves(call)}
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # with TF32 every pair would look inexact
        try:
            output = self.module(*args, **kwargs)
        finally:
            torch.set_float32_matmul_precision(precision)
        return [x for x in _leaves((output, args, kwargs)) if isinstance(x, Tensor) and id(x) not in given]

    def cut(self, producer: str | None = None, code: Tensor | None = None) -> Trace:
        """Run the block cut at its weights, with what ``producer`` makes multiplied by ``code`` [N].

        Args:
            producer: A reader or a norm. A norm's output becomes noise, too: a weight of zero does not hide its channel.
            code: [N] float32, on any device.
        """
        trace: Trace = []
        for seed in range(self.num_seeds):
            with _Cut(self, seed, producer, code) as cut:
                outputs = self.run()
            trace += cut.trace + [(OUTPUT, x) for x in outputs]
        return trace

    def noise(self, key: tuple[Any, ...], shape: torch.Size, like: Tensor) -> Tensor:
        """Return the same standard normal noise for the same key and shape."""
        key = (*key, shape)
        if key not in self._noise:
            generator = torch.Generator().manual_seed(len(self._noise))
            self._noise[key] = torch.randn(shape, generator=generator).to(like.device, like.dtype)
        return self._noise[key]

    def _linears(self) -> dict[str, nn.Module]:
        return {name: m for name, m in self.module.named_modules() if isinstance(m, nn.Linear) or is_conv1d(m)}

    def _owners(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Address -> name and parameter. A weight goes by its module's name, a Linear's rather than that of a tied embedding."""
        linears, owners = self._linears(), dict[int, tuple[str, nn.Parameter]]()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owner, address = name.removesuffix(".weight"), parameter.untyped_storage().data_ptr()
            if address not in owners or (owner in linears and owners[address][0] not in linears):
                owners[address] = owner, parameter
        return owners

    def _reach_all(self) -> dict[str, int]:
        """Add seeds until tokens go to all experts and no ReLU hides a column; returns Linears left out: name -> in_features."""
        linears, missing = self._linears(), dict[str, int]()
        for self.num_seeds in range(1, _MOST_SEEDS + 1):
            columns = nonzero_columns(self.cut())
            reached = {id(parameter) for name, parameter in self.owners.values() if name in self.readers}
            missing = {name: linear_shape(m)[1] for name, m in linears.items() if id(m.weight) not in reached}
            if not missing and all(bool(column.all()) for column in columns.values()):
                break
        return missing

    @torch.no_grad()
    def norm_kinds(self) -> dict[str, ProducerKind]:
        """Modules that end in a product with a vector, and how their weight enters: tried out, with the bias set to zero."""
        calls: dict[str, Call] = {}
        names = [name for name, module in self.module.named_modules() if _may_be_norm(module)]
        handles = []
        for name in names:

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor) and output.shape[-1:] == module.weight.shape and bool(output.any()):
                    calls.setdefault(name, (args, kwargs))

            handles.append(self.module.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        self.run()
        for handle in handles:
            handle.remove()
        kinds: dict[str, ProducerKind] = {}
        for name, (args, kwargs) in calls.items():
            module = self.module.get_submodule(name)
            for kind, value in _ZERO_GAIN.items():
                weights = {key: torch.full_like(p, value if key == "weight" else 0.0) for key, p in module.named_parameters()}
                if not bool(torch.func.functional_call(module, weights, args, kwargs).any()):
                    kinds[name] = kind
                    break
        return kinds


@dataclass
class _Cut(TorchDispatchMode):
    """Returns noise for each product with a weight of the block, and notes what was multiplied."""

    block: Block
    seed: int
    producer: str | None
    code: Tensor | None
    trace: Trace = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle: Any = None
        self.norm_calls = 0

    def __enter__(self) -> _Cut:
        if self.producer is not None and self.producer not in self.block.readers:
            self.handle = self.block.module.get_submodule(self.producer).register_forward_hook(self._after_norm)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.handle is not None:
            self.handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FIRST_OPERAND.get(func.overloadpacket)
        found = None if first is None else self._reader(args[first + 1])
        if first is None or found is None:
            return func(*args, **(kwargs or {}))
        name, reader = found
        x = args[first]
        self.block.readers.setdefault(name, reader)
        self.trace.append((name, x.clone()))
        noise = self.block.noise((self.seed, len(self.trace)), torch.Size([*x.shape[:-1], reader.num_outputs]), x)
        return self._coded(noise) if name == self.producer else noise.clone()  # what follows may write to it

    def _after_norm(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.norm_calls += 1
        return self._coded(self.block.noise((self.seed, "norm", self.norm_calls), output.shape, output))

    def _coded(self, noise: Tensor) -> Tensor:
        assert self.code is not None
        return noise * self.code.to(noise.device)

    def _reader(self, operand: Tensor) -> tuple[str, Reader] | None:
        """Which parameter a matrix [..., K, N] is a view of; None if of none, or of a part of its channels."""
        name, parameter = self.block.owners.get(operand.untyped_storage().data_ptr(), (None, None))
        if name is None or parameter is None:
            return None
        axes = []
        for dim in (-2, -1):
            size_and_stride = operand.shape[dim], operand.stride(dim)
            axes += [a for a in range(parameter.ndim) if (parameter.shape[a], parameter.stride(a)) == size_and_stride][-1:]
        return (name, Reader(axes[0], axes[1], operand.shape[-1])) if len(set(axes)) == 2 else None


def channel_maps(block: Block, producer: str, size: int) -> list[dict[str, Tensor]]:
    """Which of a producer's channels switches off which columns of which readers.

    Switched off (times 0) are channels whose index has a 1 (or a 0) in one bit. A column that is a multiple of one channel
    survives exactly one of the two, and the survivors spell its index. A column that is a multiple of two channels survives
    neither where their bits differ; there the highest such bit tells the two apart, and the other bits of each are asked for
    among the channels on its side.

    Args:
        block: Cut open.
        producer: A reader or a norm.
        size: N, the producer's channels.

    Returns:
        Two dicts, reader -> [K] int64 channel, -1 for columns that do not depend on one: the lower of two channels, and the
        higher for those readers where it is another one.
    """
    base = nonzero_columns(block.cut(producer, torch.ones(size)))

    def alive(on: Tensor) -> Tensor:
        """Which columns of all readers, one after the other, are not zero when these channels [N] are on."""
        columns = nonzero_columns(block.cut(producer, on.float()))
        return torch.cat([columns.get(name, torch.ones_like(column)) for name, column in base.items()])

    depends = torch.cat(list(base.values())) & ~alive(torch.zeros(size))
    if not depends.any():
        return [{}, {}]
    bits = [(torch.arange(size) >> bit) & 1 for bit in range(max(size - 1, 1).bit_length())]
    with_one, with_zero = [alive(bit) for bit in bits], [alive(1 - bit) for bit in bits]
    lower = _number(with_one)
    upper = lower.clone()
    highest = torch.full_like(lower, -1)
    for index, (one, zero) in enumerate(zip(with_one, with_zero, strict=True)):
        highest[~one & ~zero & depends] = index
    for top in highest[highest >= 0].unique().tolist():
        for side, channel in enumerate((lower, upper)):
            off = [(bits[top] == side) & (bit == 1) for bit in bits]
            channel[highest == top] = _number([~alive(~rows) for rows in off])[highest == top]
    result: list[dict[str, Tensor]] = [{}, {}]
    widths = [len(column) for column in base.values()]
    for name, low, high, mine in zip(base, *(x.split(widths) for x in (lower, upper, depends)), strict=True):
        for maps, channel in zip(result, (low, high), strict=True):
            if mine.any() and (maps is result[0] or not torch.equal(low[mine], high[mine])):
                maps[name] = torch.where(mine, channel.clamp(max=size - 1), -1)  # more than two channels: any number may come out
    return result


def _number(bits: list[Tensor]) -> Tensor:
    """Numbers from their bits, the lowest first."""
    return torch.stack([bit.long() << index for index, bit in enumerate(bits)]).sum(0)


def nonzero_columns(trace: Trace) -> dict[str, Tensor]:
    """Return reader -> [K] bool, on the CPU: whether a column is not zero for all tokens, in all calls."""
    result: dict[str, Tensor] = {}
    for name, x in trace:
        if name != OUTPUT:
            column = x.reshape(-1, x.shape[-1]).ne(0).any(0).cpu()
            result[name] = result[name] | column if name in result else column
    return result


@torch.no_grad()
def record(model: nn.Module, blocks: Mapping[str, nn.Module], batch: Mapping[str, Any] | None) -> dict[str, Call]:
    """Run the model once, and return the arguments of the first call of each block that runs.

    Args:
        model: Runs in its own dtype, in eval mode and without a cache.
        blocks: Name -> module.
        batch: Keyword arguments of the model's forward; by default one sequence of random token ids.

    Raises:
        ValueError: If there is no batch, and no configuration that says how to make one.
    """
    calls: dict[str, Call] = {}
    handles = []
    for name, module in blocks.items():

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            if name not in calls:  # a copy, since blocks may write to what they are given
                calls[name] = _mapped(_copy, (args, kwargs))

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with eval_mode(model), no_cache(model):
            model(**without_cache(model) | (_random_batch(model) if batch is None else dict(batch)))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _random_batch(model: nn.Module) -> dict[str, Tensor]:
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab_size = getattr(text_config, "vocab_size", None)
    if vocab_size is None:
        raise ValueError(
            f"batch must be given for a {type(model).__name__}, which has no config.vocab_size to draw token ids from"
        )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, _NUM_TOKENS), generator=generator).to(next(model.parameters()).device)
    batch = {"input_ids": ids}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        batch["decoder_input_ids"] = ids
    return batch


def _may_be_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return parameters.keys() in ({"weight"}, {"weight", "bias"}) and all(p.ndim == 1 for p in parameters.values())


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree_map`` into new containers, also of kinds that PyTorch takes for leaves (transformers' ``KVSharingDict``)."""

    def at(leaf: Any) -> Any:
        if not isinstance(leaf, MutableMapping):
            return function(leaf)
        result = copy.copy(leaf)
        for key, value in leaf.items():
            result[key] = _mapped(function, value)
        return result

    return tree_map(at, tree)


def _leaves(tree: Any) -> Iterator[Any]:
    """``tree_leaves``, also of such containers."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, MutableMapping):
            yield from _leaves(list(leaf.values()))
        else:
            yield leaf


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _float32(x: Any) -> Any:
    """A copy of a tensor, in float32 if it is in 16 bits; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().to(torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype, copy=True)
