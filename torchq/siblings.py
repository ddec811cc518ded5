"""Layers that read one tensor (q, k and v; gate and up), multiplied in one launch.

Their weights lie in one tensor of which each layer's are some rows, so that every layer still works alone: checkpoints, moves,
LoRA and single calls see no difference. The first of the siblings that is called with a tensor multiplies it by all of them; the
others find their part when they are called with that same tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchq import layouts
from torchq.linear import QuantLinear


class Siblings:
    """What layers that are multiplied in one launch share.

    Attributes:
        members: The layers.
        tensors: Their packed weights as one, in the order of the layout's buffers; None while they are apart.
    """

    def __init__(self, members: list[QuantLinear]) -> None:
        self.members = members
        self.tensors: tuple[Tensor | None, ...] | None = None
        self._results: tuple[Tensor, int, dict[QuantLinear, Tensor]] | None = None  # of a tensor, at its version

    def join(self) -> None:
        """Put the weights into one tensor, if all of them lie as a kernel reads them that can take one apart."""
        kinds = {layouts.layout_of(member._buffers) for member in self.members}
        layout = next(iter(kinds))
        if len(kinds) > 1 or layout not in (layouts.WORDS, layouts.FP8_WORDS):
            return
        if len({member._device for member in self.members}) > 1:
            return
        tensors: list[Tensor | None] = []
        for name in layout.buffers:
            parts = [member._buffers[name] for member in self.members]
            with torch.autocast(self.members[0]._device.type, enabled=False):  # which would cast scales
                wide = None if parts[0] is None else torch.cat([part for part in parts if part is not None], dim=1)
            tensors.append(wide)
            sizes = [member.out_features for member in self.members]
            for member, part in zip(self.members, [None] * len(parts) if wide is None else wide.split(sizes, dim=1), strict=True):
                member._buffers[name] = part
        self.tensors = tuple(tensors)

    def part(self) -> None:
        """Forget the common tensor: a member is about to leave it."""
        self.tensors = None
        self.clear()

    def clear(self) -> None:
        """Forget results that no member has asked for."""
        self._results = None

    def product(self, member: QuantLinear, x: Tensor) -> Tensor:
        """Return a member's [..., N] for x [..., K]."""
        version = 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
        found = self._results
        if found is None or found[0] is not x or found[1] != version or member not in found[2]:
            found = x, version, self._products(x)
        results = found[2]
        y = results.pop(member)
        self._results = found if results else None
        return y

    def _products(self, x: Tensor) -> dict[QuantLinear, Tensor]:
        assert self.tensors is not None
        biases = [member._parameters["bias"] for member in self.members]
        bias = None
        if any(part is not None for part in biases):
            sizes = [member.out_features for member in self.members]
            parts = [x.new_zeros(n) if part is None else part.to(x.dtype) for part, n in zip(biases, sizes, strict=True)]
            bias = torch.cat(parts)
        kernel, mine = self.members[0]._kernel()
        tensors = self.tensors + mine[len(self.tensors) :]
        y = kernel(x, tensors, bias)
        return dict(zip(self.members, y.split([member.out_features for member in self.members], dim=-1), strict=True))


def fuse_siblings_(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Let layers that read one tensor (q, k and v; gate and up) be multiplied in one launch where gradients are off.

    Which they are is measured, by one forward pass. It takes effect where weights lie in a GPU kernel's layout, at once or when
    the model moves to a GPU; copies and pickles of the model are not fused. Checkpoints are the same with and without.

    Args:
        model: A model with :class:`QuantLinear` layers.
        inputs: Keyword arguments of the model's forward; None: transformers' ``dummy_inputs``.

    Returns:
        Names of the layers that are fused, group by group.

    Raises:
        ValueError: If the model has no packed layer, or there are no inputs to call it with.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    if not layers:
        raise ValueError("model has no QuantLinear: quantize it first, or load a quantized checkpoint with load_pretrained")
    return join_siblings(model, find_siblings(model, layers, inputs))


def find_siblings(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Return groups of layers in one module that read one tensor; arguments as for :func:`fuse_siblings_`."""
    from torchq.calibration.packing import Batch
    from torchq.calibration.passes import eval_mode
    from torchq.calibration.stream import find_groups

    if inputs is None:
        inputs = getattr(model, "dummy_inputs", None)
        if inputs is None:
            raise ValueError(
                "fuse_siblings needs inputs to call the model with, which has no dummy_inputs: quantize with calibration data, "
                "or call torchq.fuse_siblings_(model, inputs={...}) afterwards"
            )
    device = next(tensor.device for tensor in (*model.parameters(), *model.buffers()))
    on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    found: dict[tuple[int, str], list[str]] = defaultdict(list)
    with eval_mode(model):
        for index, group in enumerate(find_groups(model, layers, Batch(on_device, None))):
            for name in group.names:
                found[index, name.rpartition(".")[0]].append(name)
    return [names for names in found.values() if len(names) > 1]


def join_siblings(model: nn.Module, groups: list[list[str]]) -> list[list[str]]:
    """Fuse the packed layers of each group whose schemes agree; return their names."""
    fused = []
    for names in groups:
        alike: dict[Any, list[str]] = defaultdict(list)
        for name in names:
            layer = model.get_submodule(name)
            if isinstance(layer, QuantLinear) and "input_scale" not in layer._buffers and layer.scheme.format != "nf4":
                alike[layer.scheme, layer.in_features, layer.scale_dtype].append(name)
        for some in alike.values():
            members = [model.get_submodule(name) for name in some]
            if len(members) > 1:
                siblings = Siblings([member for member in members if isinstance(member, QuantLinear)])
                for member in siblings.members:
                    member.siblings = siblings
                siblings.join()
                fused.append(some)
    return fused
