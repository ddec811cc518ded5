"""QuantConfig: what to quantize, and how."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchq.algorithms.awq import AWQ
from torchq.algorithms.gptq import GPTQ
from torchq.algorithms.rtn import RTN
from torchq.algorithms.smoothquant import SmoothQuant
from torchq.calibration.observers import Observer
from torchq.scheme import Scheme, resolve_scheme

Algorithm = RTN | GPTQ | AWQ | SmoothQuant
_BY_NAME: dict[str, Callable[[], Algorithm]] = {"rtn": RTN, "gptq": GPTQ, "awq": AWQ, "smoothquant": SmoothQuant}
DEFAULT_IGNORE = ("lm_head",)
ALGORITHMS = ("auto", "rtn", "gptq", "awq", "smoothquant")
PROPAGATE = ("true_sequential", "float")
CALIBRATION_DTYPES = ("auto", "model", "bfloat16")
KV_CACHES = {"fp8": "tensor", "fp8_head": "attn_head"}  # -> strategy of the checkpoint format


@dataclass(frozen=True)
class QuantConfig:
    """Settings of :func:`torchq.quantize_`.

    ``targets``, ``ignore`` and the keys of ``overrides`` are class names (``"Linear"``, which includes transformers'
    ``Conv1D``), exact
    module names, or ``re:`` patterns matched from the start of the name (``re.match``), as in compressed-tensors. An entry that
    matches no module is an error.

    Attributes:
        scheme: A name (``"W4A16"``, ``"W8A8"``, ...) or a :class:`torchq.scheme.Scheme`.
        algorithm: ``"auto"`` (the best recipe for the scheme: where there is calibration data GPTQ for integer weights, after
            SmoothQuant for int8 activations; else RTN), ``"rtn"``, ``"gptq"``, ``"awq"``, ``"smoothquant"``, one of them with
            settings (:class:`RTN`, :class:`GPTQ`, :class:`AWQ`, :class:`SmoothQuant`), or a sequence of two: one that scales,
            one that rounds, such as ``[AWQ(), GPTQ()]``. One that scales is followed by RTN where nothing else is said; a scale
            that does not lower the error on held-out tokens is undone.
        group_size: Weights along in_features that share a scale; -1 for one group per row; None for the scheme's own.
        symmetric: Whether the weights go without zero points; None for the scheme's own.
        targets: Which modules to quantize.
        ignore: Which of them to leave in 16 bits. The default, ``("lm_head",)``, means the model's output embedding whatever its
            name, if it has one.
        overrides: Pattern -> scheme name, Scheme, or None (leave in 16 bits). The first matching one counts.
        kv_cache: ``"fp8"`` to measure static scales of keys and values on the calibration data, by which readers store them in
            fp8 (e4m3): one per layer for the keys and one for the values; ``"fp8_head"`` for one per key-value head
            (:mod:`torchq.kv_scales`). None: no scales, the cache stays in 16 bits.
        propagate: What a calibrated layer's inputs come from: ``"true_sequential"`` (a model in which every layer before it is
            quantized) or ``"float"`` (the 16-bit model).
        calibration_dtype: What the calibration's forward pass multiplies in: ``"bfloat16"`` (by ``torch.autocast``), ``"model"``
            (what the model is in; statistics are then exact as well), or ``"auto"``: bfloat16 for float32 models on devices that
            multiply it. Statistics are of rounded inputs where that is faster
            (:class:`torchq.calibration.statistics.InputStatistics`), and summed and solved in float32.
        folds: What AWQ and SmoothQuant may scale, where that should not be left to measurement: name of a norm or Linear -> names
            of all weights that read it (an error if that is not exact), or () for never. A key with () may be a ``re:`` pattern.
        observer: What static activation scales come from: ``"mse"`` (the range with the least squared error), ``"minmax"`` (the
            whole range of the calibration data), or the percentage of values, 50 to 100, that are not clipped.
        recompute: Whether calibration keeps no more than each block's input of all calibration tokens, and computes the block
            anew for each group of layers in it: the same result in less memory, for more than twice the forward work. None:
            only where one layer's intermediates of all tokens would take more than half of the memory that is left, and blocks
            have no more than 8 groups (no routed experts); a warning and the report say so.
        fuse_siblings: Whether layers that read one tensor (q, k and v; gate and up) are multiplied in one launch, on GPUs
            (:func:`torchq.fuse_siblings_`). Which they are is found by one forward pass: with the calibration data, or else with
            transformers' ``dummy_inputs``.
        strict: Raise if any parameter that holds a matrix of a targeted kind (a fused 3-D expert tensor, a subclass of Linear
            with a forward of its own) cannot be quantized, instead of leaving it in 16 bits and reporting it.

    Raises:
        ValueError, TypeError, NotImplementedError: If a setting is wrong; the message names it.
    """

    scheme: str | Scheme
    algorithm: str | Algorithm | Sequence[str | Algorithm] = "auto"
    group_size: int | None = None
    symmetric: bool | None = None
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    overrides: Mapping[str, str | Scheme | None] = field(default_factory=dict)
    kv_cache: str | None = None
    propagate: str = "true_sequential"
    calibration_dtype: str = "auto"
    folds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    observer: Observer = "mse"
    recompute: bool | None = None
    fuse_siblings: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("targets", "ignore"):
            object.__setattr__(self, name, _as_patterns(name, getattr(self, name)))
        if not self.targets:
            raise ValueError("targets is empty; use targets=('Linear',)")
        if not isinstance(self.overrides, Mapping):
            raise TypeError(
                f"overrides must map patterns to schemes or None, got {self.overrides!r}; write {{'lm_head': 'W8A16'}}"
            )
        _as_patterns("overrides", self.overrides)
        if self.kv_cache is not None and self.kv_cache not in KV_CACHES:
            raise ValueError(f"kv_cache must be None or one of {tuple(KV_CACHES)}, got {self.kv_cache!r}")
        object.__setattr__(self, "algorithm", _as_algorithm(self.algorithm))
        if self.propagate not in PROPAGATE:
            raise ValueError(f"propagate must be one of {PROPAGATE}, got {self.propagate!r}")
        if self.calibration_dtype not in CALIBRATION_DTYPES:
            raise ValueError(f"calibration_dtype must be one of {CALIBRATION_DTYPES}, got {self.calibration_dtype!r}")
        if not isinstance(self.folds, Mapping):
            raise TypeError(f"folds must map a producer to the names of its consumers, got {self.folds!r}")
        _as_patterns("folds", self.folds)
        consumers = {producer: _as_patterns(f"folds[{producer!r}]", names) for producer, names in self.folds.items()}
        if named := [producer for producer, names in consumers.items() if names and producer.startswith("re:")]:
            raise ValueError(f"folds: {named[0]!r} is a pattern, which takes no consumers; name the producer, or leave () to it")
        object.__setattr__(self, "folds", consumers)
        share = self.observer if isinstance(self.observer, (int, float)) and not isinstance(self.observer, bool) else None
        if self.observer not in ("mse", "minmax") and (share is None or not 50 <= share <= 100):
            raise ValueError(f"observer must be 'mse', 'minmax' or a percentage from 50 to 100, got {self.observer!r}")
        if self.recompute not in (None, True, False):
            raise ValueError(f"recompute must be True, False or None, got {self.recompute!r}")
        self.resolve()
        object.__setattr__(self, "overrides", dict(self.overrides))
        for pattern in self.overrides:
            try:
                self.resolve_override(pattern)
            except (ValueError, TypeError, NotImplementedError) as error:
                raise type(error)(f"overrides[{pattern!r}]: {error}") from error

    def resolve(self) -> Scheme:
        """Return the scheme with ``group_size`` and ``symmetric`` applied."""
        return resolve_scheme(self.scheme, self.group_size, self.symmetric)

    def resolve_override(self, pattern: str) -> Scheme | None:
        """Return the scheme of one override; ``group_size`` applies where it is given by name and has groups."""
        override = self.overrides[pattern]
        if override is None:
            return None
        scheme = resolve_scheme(override)
        if isinstance(override, str) and self.group_size is not None and scheme.weights.strategy == "group":
            scheme = resolve_scheme(override, self.group_size)
        return scheme

    def recipe(self, scheme: Scheme, calibrated: bool) -> RTN | GPTQ:
        """Return what rounds layers of ``scheme``; ``calibrated``: whether there is calibration data."""
        rounding = [step for step in self._steps if isinstance(step, (RTN, GPTQ))]
        if rounding:
            return rounding[0]
        weights = scheme.weights
        by_columns = weights.type == "int" and weights.strategy in ("group", "channel")
        return GPTQ() if self.algorithm == "auto" and calibrated and by_columns else RTN()

    def smoothing(self, scheme: Scheme, calibrated: bool = True) -> AWQ | SmoothQuant | None:
        """Return what scales layers of ``scheme`` before they are rounded, if anything does."""
        acts = scheme.input_activations
        if self.algorithm == "auto":
            return SmoothQuant() if calibrated and acts is not None and acts.type == "int" else None
        return next((step for step in self._steps if isinstance(step, (AWQ, SmoothQuant))), None)

    @property
    def _steps(self) -> tuple[Algorithm, ...]:
        return () if isinstance(self.algorithm, str) else tuple(self.algorithm)  # type: ignore[arg-type]


def _as_algorithm(value: Any) -> str | tuple[Algorithm, ...]:
    """``"auto"``, or the algorithms of a sequence in their order: at most one that scales, then at most one that rounds."""
    steps = list(value) if isinstance(value, (list, tuple)) else [value]
    found: list[Algorithm] = []
    for step in steps:
        name = step.lower() if isinstance(step, str) else None
        if name == "auto" and len(steps) == 1:
            return name
        if name is not None and name not in _BY_NAME:
            close = difflib.get_close_matches(name, ALGORITHMS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"algorithm={step!r} is unknown; {hint}supported: {ALGORITHMS}, RTN(...), GPTQ(...), AWQ(...), SmoothQuant(...), "
                "or [one that scales, one that rounds]"
            )
        if name is None and not isinstance(step, (RTN, GPTQ, AWQ, SmoothQuant)):
            got = type(step).__name__
            raise TypeError(
                f"algorithm must be one of {ALGORITHMS}, RTN(...), GPTQ(...), AWQ(...) or SmoothQuant(...), got {got}"
            )
        found.append(_BY_NAME[name]() if name is not None else step)
    kinds = ["scales" if isinstance(step, (AWQ, SmoothQuant)) else "rounds" for step in found]
    if kinds not in (["scales"], ["rounds"], ["scales", "rounds"]):
        raise ValueError(
            f"algorithm must be one that scales (AWQ, SmoothQuant), one that rounds (RTN, GPTQ), or one of each in this order, "
            f"got {[type(step).__name__ for step in found]}"
        )
    return tuple(found)


def _as_patterns(name: str, value: object) -> tuple[str, ...]:
    """Check a list of class names, module names and ``re:`` patterns."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        remedy = f"{name}=[{value!r}]" if isinstance(value, str) else f"{name}=[]"
        raise TypeError(f"{name} must be a list of names or 're:' patterns, got {value!r}; write {remedy}")
    patterns = tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{name} must hold strings, got {pattern!r}")
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}") from error
    return patterns
