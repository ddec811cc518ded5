"""QuantReport: what happened to each parameter of the model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["quantized", "fake-quantized", "ignored", "skipped"]
FoldStatus = Literal["folded", "undone", "refused"]


@dataclass(frozen=True)
class LayerReport:
    """One module, or one bare parameter that is no Linear.

    Attributes:
        name: Module (or parameter) name.
        status: ``"quantized"``; ``"fake-quantized"``, which trains as if quantized, in as many bits as before; ``"ignored"``
            because the config says so; ``"skipped"`` because torchq cannot quantize it.
        scheme: Name of the scheme, or None.
        format: compressed-tensors format, ``"nf4"`` (for which there is none), or None.
        num_bits: Bits per code, or None.
        num_parameters: Values in the weight.
        bits_per_weight: Stored bits per value, scales and zero points included; 16 or 32 where not quantized.
        relative_error: ``|W - dequantized| / |W|`` (Frobenius), or None. After training, of the weight that was trained.
        output_error: ``|(T - dequantized) X| / |T X|`` on held-out calibration tokens X (on the calibration tokens if none are
            held out), of at most 128 rows; T is the weight, corrected for the drift of its input where GPTQ does so. None
            without calibration.
        dampening_frac: What GPTQ added to the Hessian's diagonal, as a multiple of its mean, or None.
        reason: Why it is not quantized, or a note.
        seconds: Time spent.
    """

    name: str
    status: Status
    num_parameters: int
    bits_per_weight: float
    scheme: str | None = None
    format: str | None = None
    num_bits: int | None = None
    relative_error: float | None = None
    output_error: float | None = None
    dampening_frac: float | None = None
    reason: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class FoldReport:
    """A norm or Linear whose channels AWQ or SmoothQuant could scale, with the weights that read them.

    Attributes:
        producer: Module name (or that of a parameter).
        consumers: Names of the weights.
        status: ``"folded"``; ``"undone"`` because it did not lower the error; ``"refused"`` because it would not be exact.
        spread: Largest scale over smallest, or None.
        error_before: Squared error of the weights' outputs on held-out tokens (calibration tokens if none are held out) without
            the fold, or None.
        error: The same with it, or None.
        reason: Why it is not folded.
    """

    producer: str
    consumers: list[str]
    status: FoldStatus
    spread: float | None = None
    error_before: float | None = None
    error: float | None = None
    reason: str | None = None


@dataclass
class QuantReport:
    """What :func:`torchq.quantize_` did; saved beside the checkpoint as ``quant_report.json``.

    Attributes:
        layers: One entry per layer, in module order, then parameters that are no Linear weights.
        num_parameters: Parameters of the model (shared ones once).
        scheme: Name of the default scheme.
        algorithm: What chose the codes.
        warnings: What a user should know: fallbacks, untied embeddings, parameters left in 16 bits.
        torchq_version: Version of torchq.
        seconds: Time spent.
        folds: What AWQ or SmoothQuant scaled, and what they did not and why.
        timings: Of a calibrated run: seconds by part (``forward``, ``hessian``, ``folds``, ``scales``, ``solve``,
            ``kv_cache``).
        kv_cache_strategy: Strategy of the static fp8 scales of keys and values (``"tensor"`` or ``"attn_head"``), or None.
        kv_cache_layers: How many layers have such scales.
    """

    scheme: str
    algorithm: str
    num_parameters: int
    layers: list[LayerReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    torchq_version: str = ""
    seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    folds: list[FoldReport] = field(default_factory=list)
    kv_cache_strategy: str | None = None
    kv_cache_layers: int = 0

    @property
    def quantized_fraction(self) -> float:
        """Share of the model's parameters that are quantized, 0 to 1."""
        quantized = sum(layer.num_parameters for layer in self.layers if layer.status == "quantized")
        return quantized / self.num_parameters if self.num_parameters else 0.0

    @property
    def mean_relative_error(self) -> float:
        """Mean relative error of the (fake-)quantized layers, weighted by their size."""
        pairs = [(x.relative_error, x.num_parameters) for x in self.layers if x.relative_error is not None]
        total = sum(size for _, size in pairs)
        return sum(error * size for error, size in pairs) / total if total else 0.0

    def describe_folds(self) -> str:
        """Return how many folds there are of each kind: ``"92 folded, 28 undone, 30 refused"``."""
        counts = Counter(fold.status for fold in self.folds)
        return ", ".join(f"{counts[status]} {status}" for status in ("folded", "undone", "refused") if counts[status])

    def describe_kv_cache(self) -> str:
        """Return how many layers have scales of keys and values, and how many: ``"static fp8 scales of 30 layers, ..."``."""
        each = "one per key-value head" if self.kv_cache_strategy == "attn_head" else "one per layer"
        return f"static fp8 scales of {self.kv_cache_layers} layers, {each} (strategy {self.kv_cache_strategy})"

    def summary(self) -> str:
        """Return a few lines for a terminal: counts, share, bits, error, what was left out and why, warnings."""
        quantized = [layer for layer in self.layers if layer.status == "quantized"]
        training = [layer for layer in self.layers if layer.status == "fake-quantized"]
        size = sum(layer.num_parameters for layer in quantized)
        bits = sum(layer.bits_per_weight * layer.num_parameters for layer in quantized) / size if size else 0.0
        lines = [
            f"{self.scheme} ({self.algorithm}): {len(quantized)} layers quantized, {self.quantized_fraction:.1%} of "
            f"{self.num_parameters:,} parameters at {bits:.2f} bits per weight, "
            f"mean relative error {self.mean_relative_error:.4f}, {self.seconds:.1f} s"
        ]
        if training:
            share = sum(layer.num_parameters for layer in training) / self.num_parameters
            described = f"{len(training)} fake-quantized for training ({share:.1%} of the parameters)"
            lines.append(f"  {described}, in 16 or 32 bits until convert_qat_")
        reasons: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for layer in self.layers:
            if layer.status in ("ignored", "skipped"):
                reason = f"{layer.status}: {layer.reason}"
                reasons[reason] += 1
                sizes[reason] += layer.num_parameters
        for reason, count in reasons.items():
            share = sizes[reason] / self.num_parameters if self.num_parameters else 0.0
            lines.append(f"  {count} {reason} ({share:.1%} of the parameters)")
        if self.folds:
            lines.append(f"  scales of channels: {self.describe_folds()}")
        if self.kv_cache_strategy is not None:
            lines.append(f"  keys and values: {self.describe_kv_cache()}")
        return "\n".join(lines + [f"  warning: {warning}" for warning in self.warnings])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return asdict(self) | {
            "quantized_fraction": self.quantized_fraction,
            "mean_relative_error": self.mean_relative_error,
        }

    def to_json(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> QuantReport:
        """Read what :meth:`to_dict` wrote."""
        keys: tuple[str, ...] = ("scheme", "algorithm", "num_parameters", "warnings", "torchq_version", "seconds", "timings")
        keys += ("kv_cache_strategy", "kv_cache_layers")
        fields = {key: data[key] for key in keys if key in data}
        folds = [FoldReport(**fold) for fold in data.get("folds", ())]
        return cls(layers=[LayerReport(**layer) for layer in data["layers"]], folds=folds, **fields)
