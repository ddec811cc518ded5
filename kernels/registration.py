"""Registering an operator ``torchq::<name>``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def register_op(
    name: str, dispatch_key: str = "CompositeExplicitAutograd", mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Return a decorator that makes an annotated function the operator ``name``.

    ``torch.library.custom_op`` does the same in more layers of Python: about 100 µs more in each call when a layer's weights have
    pushed the interpreter out of the caches, as they do in a model (2 cores of an AMD EPYC, benchmarks/bench_cpu_choices.py).
    It has no autograd kernel: who wants gradients wraps it (:class:`torchq.QuantLinear` does).

    Args:
        name: ``"torchq::<op>"``.
        dispatch_key: Devices: one of PyTorch's dispatch keys, such as ``"CPU"``; the default is all.
        mutates_args: Names of the tensors that it writes to.
    """

    def register(function: Callable[..., Any]) -> torch._ops.OpOverload:
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates_args))
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, dispatch_key, function)
        namespace, _, stem = name.partition("::")
        op = getattr(getattr(torch.ops, namespace), stem).default
        op.__doc__ = function.__doc__
        return op

    return register
