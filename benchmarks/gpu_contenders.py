"""The kernels that a GPU session times side by side: torchq's, PyTorch's own, and other libraries' where they are installed.

A kernel is added by one function that returns a :class:`Contender`, named in :func:`makers`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import KINDS, Call, Kind, Plan, Run, Shape, Timer, check_close, num_copies, random_weight
from torch import Tensor, nn


@dataclass(frozen=True)
class Contender:
    """A kernel on its weights.

    Attributes:
        calls: What multiplies tokens [M, K], one for each copy of the weight.
        nbytes: Of one copy.
        most_tokens: Beyond which it is not timed.
        reference: The weight [N, K] it must agree with, if its result is to be checked.
    """

    calls: list[Call]
    nbytes: int
    most_tokens: int = 1 << 30
    reference: Tensor | None = None


def makers(shape: Shape, plan: Plan) -> dict[str, Callable[[Shape, Plan], Contender]]:
    """Name -> what makes the contenders at a shape; the first one is what the others are compared with."""
    kinds = [kind for kind in KINDS if kind.everywhere or shape in plan.few]
    return {"F.linear": dense, **{kind.name: partial(packed, kind) for kind in kinds}, "tinygemm": tinygemm, **PEERS}


def dense(shape: Shape, plan: Plan) -> Contender:
    """Return PyTorch's own product, in 16 bits."""
    weight = (torch.randn(shape.n, shape.k, device=plan.device) * 0.02).to(plan.dtype)
    copies = [weight.clone() for _ in range(num_copies(weight.nbytes, plan.rotate))]
    return Contender([_with(F.linear, copy) for copy in copies], weight.nbytes)


def packed(kind: Kind, shape: Shape, plan: Plan) -> Contender:
    """Return the op on words, with the tile and splits that dispatch gives it."""
    weight = random_weight(kind, shape.n, shape.k, plan.dtype, plan.device)
    copies = [weight, *(weight.clone() for _ in range(num_copies(weight.nbytes, plan.rotate) - 1))]
    return Contender([copy.multiply for copy in copies], weight.nbytes, reference=weight.dequantize(plan.dtype))


def tinygemm(shape: Shape, plan: Plan) -> Contender:
    """Return PyTorch's 4-bit kernel, groups of 128; made for few tokens, many take it milliseconds."""
    ops, (n, k) = torch.ops.aten, (shape.n, shape.k)
    if plan.device == "cpu":
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
        weight, multiply = ops._convert_weight_to_int4pack_for_cpu(codes, 8), ops._weight_int4pack_mm_for_cpu
    else:
        pairs = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=plan.device)
        weight, multiply = ops._convert_weight_to_int4pack(pairs, 8), ops._weight_int4pack_mm
    scales = (torch.randn(k // 128, n, 2, device=plan.device) * 0.02).to(plan.dtype)
    nbytes = weight.nbytes + scales.nbytes
    copies = [weight.clone() for _ in range(num_copies(nbytes, plan.rotate))]
    return Contender([_with(multiply, copy, 128, scales) for copy in copies], nbytes, most_tokens=64)


def gemlite(shape: Shape, plan: Plan) -> Contender:
    """Return gemlite's 4-bit layer, groups of 128."""
    from gemlite.helper import A16W4_HQQ_INT

    codes = torch.randint(0, 16, (shape.n, shape.k), dtype=torch.uint8, device=plan.device)
    scales = torch.rand(shape.n * shape.k // 128, 1, device=plan.device).to(plan.dtype) / 8 / shape.k**0.5
    zeros, nbytes = torch.full_like(scales, 8), shape.n * shape.k // 2 + 2 * scales.nbytes
    make = A16W4_HQQ_INT(device=plan.device, dtype=plan.dtype).from_weights
    return Contender([make(codes, scales, zeros) for _ in range(num_copies(nbytes, plan.rotate))], nbytes)


def torchao(shape: Shape, plan: Plan) -> Contender:
    """Return torchao's 8-bit weight-only layer (its 4-bit one on CUDA is tinygemm)."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = nn.Linear(shape.k, shape.n, bias=False, device=plan.device, dtype=plan.dtype)
    nbytes = shape.n * shape.k
    layers = []
    for _ in range(num_copies(nbytes, plan.rotate)):
        layer = nn.Sequential(nn.Linear(shape.k, shape.n, bias=False, device="meta"))
        layer[0].weight = nn.Parameter(linear.weight.detach().clone())
        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
        layers.append(layer)
    return Contender(layers, nbytes)


def bitsandbytes(shape: Shape, plan: Plan) -> Contender:
    """Return bitsandbytes' NF4 product, blocks of 64."""
    import bitsandbytes as bnb

    weight = (torch.randn(shape.n, shape.k, device=plan.device) * 0.02).to(plan.dtype)
    nbytes = shape.n * shape.k // 2 + shape.n * shape.k // 64 * 4
    copies = [bnb.functional.quantize_4bit(weight, 64, quant_type="nf4") for _ in range(num_copies(nbytes, plan.rotate))]
    return Contender([_with(bnb.matmul_4bit, codes.t(), state) for codes, state in copies], nbytes)


PEERS: dict[str, Callable[[Shape, Plan], Contender]] = {
    "gemlite": gemlite,
    "torchao": torchao,
    "bitsandbytes": bitsandbytes,
}
PEER_SECONDS = 40.0  # that a peer may take to prepare, tuning included, before it is left out


def _with(function: Callable[..., Tensor], *arguments: Any) -> Call:
    return lambda x: function(x, *arguments)


class Lineup:
    """Makes the contenders of each shape, and keeps note of those that cannot take part."""

    def __init__(self, plan: Plan, notes: dict[str, str]) -> None:
        self.plan, self.notes = plan, notes
        self.broken: list[str] = []  # kernels here that failed
        self._spent: dict[str, float] = {}

    def contenders(self, shape: Shape) -> dict[str, Contender]:
        """Return those that can be made."""
        found = {}
        for name, make in makers(shape, self.plan).items():
            if name in PEERS and importlib.util.find_spec(name) is None:
                self.notes[name] = "not installed"
            elif name not in self.notes:
                made = self._guarded(name, partial(make, shape, self.plan))
                found |= {} if made is None else {name: made}
        return found

    def runs(self, timer: Timer, contenders: Mapping[str, Contender], x: Tensor) -> dict[str, tuple[Run, int]]:
        """Return prepared runs, with their numbers of calls; results of those with a reference have been checked."""
        found = {}
        for name, contender in contenders.items():
            if name not in self.notes and x.shape[0] <= contender.most_tokens:
                run = self._guarded(name, partial(_prepare, timer, contender, x, self.plan.launches))
                found |= {} if run is None else {name: run}
        return found

    def _guarded(self, name: str, make: Callable[[], Any]) -> Any:
        """What fails, or takes long elsewhere, is a note; kernels here are to work all the same, see ``broken``."""
        ours = name not in PEERS and name != "tinygemm"
        started = time.perf_counter()
        try:
            made = make()
        except Exception as error:  # of other libraries: any; ours end the step once the rest has been timed
            self.notes[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
            self.broken += [name] * ours
            return None
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - started
        if self._spent[name] > PEER_SECONDS and not ours:
            self.notes[name] = f"left out after {self._spent[name]:.0f} s of preparing"
        return made


@torch.no_grad()
def _prepare(timer: Timer, contender: Contender, x: Tensor, launches: int) -> tuple[Run, int]:
    if contender.reference is not None:
        check_close(contender.calls[0](x), x, contender.reference)
    calls = [partial(call, x) for call in contender.calls]
    calls *= -(-launches // len(calls))
    return timer.prepare(calls), len(calls)
