"""Schemes: how the weights and the input activations of a layer are quantized.

The words are compressed-tensors' (``num_bits``, ``strategy``, ``group_size`` ...), so that nothing is translated on the
way to a checkpoint. Everything is validated when a ``QuantArgs`` or ``Scheme`` is made.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

Strategy = Literal["tensor", "channel", "group", "block", "token"]
NumberType = Literal["int", "float", "nf"]
STRATEGIES = ("tensor", "channel", "group", "block", "token")


@dataclass(frozen=True)
class QuantArgs:
    """Settings of one quantized tensor (a weight, or the activations that enter a layer).

    Attributes:
        num_bits: Bits per value: 2 to 8 for ``type="int"``, 8 for ``type="float"`` (e4m3), 4 for ``type="nf"``.
        type: ``"int"``, ``"float"``, or ``"nf"`` (NormalFloat with double quantization, as QLoRA and bitsandbytes have it).
        symmetric: Without (True) or with (False, integers only) a zero point.
        strategy: What shares a scale: the whole ``"tensor"``, one output ``"channel"`` (a row of the weight), a ``"group"`` of
            ``group_size`` values along in_features, a 2-D ``"block"``, or one ``"token"`` (activations). Inferred if None:
            ``group_size`` None -> tensor, -1 -> channel, > 0 -> group.
        group_size: Values along in_features that share a scale (``strategy="group"``); -1 means one group per channel. For
            ``type="nf"``: neighbours in the weight as one row-major sequence, without regard to rows.
        block_structure: Rows and columns of a block (``strategy="block"``).
        dynamic: Whether the scales are computed at run time from the values themselves (activations only).

    Raises:
        ValueError: If the settings contradict each other or no format can hold them.
        TypeError: If a number is not an integer.
    """

    num_bits: int = 8
    type: NumberType = "int"
    symmetric: bool = True
    strategy: Strategy | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.type not in ("int", "float", "nf"):
            raise ValueError(f"type must be 'int', 'float' or 'nf', got {self.type!r}")
        for name in ("num_bits", "group_size"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (name == "group_size" and value is None):
                raise TypeError(f"{name} must be an integer, got {value!r}")
        if self.group_size is not None and self.group_size != -1 and self.group_size <= 0:
            raise ValueError(f"group_size must be positive, or -1 for one group per channel, got {self.group_size}")
        if self.strategy is None:
            inferred: Strategy = "tensor" if self.group_size is None else "channel" if self.group_size == -1 else "group"
            object.__setattr__(self, "strategy", inferred)
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if self.strategy == "group" and self.group_size == -1:
            object.__setattr__(self, "strategy", "channel")
        if self.strategy != "group" and self.group_size not in (None, -1):
            raise ValueError(f"group_size={self.group_size} needs strategy='group', got strategy={self.strategy!r}")
        if self.strategy != "group":
            object.__setattr__(self, "group_size", None)
        elif self.group_size is None:
            raise ValueError("strategy='group' needs a group_size, for example 128")
        if (self.block_structure is not None) != (self.strategy == "block"):
            raise ValueError(
                "block_structure=(rows, columns) and strategy='block' go together, "
                f"got block_structure={self.block_structure!r} and strategy={self.strategy!r}"
            )
        if self.block_structure is not None:
            block = self.block_structure
            if isinstance(block, (tuple, list)) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block):
                object.__setattr__(self, "block_structure", tuple(block))
            else:
                raise ValueError(f"block_structure must be two positive integers (rows, columns), got {block!r}")
        if self.type == "int" and not 2 <= self.num_bits <= 8:
            raise ValueError(f"num_bits must be 2 to 8 for type='int', got {self.num_bits}")
        if self.type == "float" and self.num_bits != 8:
            raise ValueError(f"num_bits must be 8 for type='float' (fp8 e4m3), got {self.num_bits}")
        if self.type == "float" and not self.symmetric:
            raise ValueError("type='float' is always symmetric; leave symmetric=True")
        if self.strategy == "token" and not self.dynamic:
            raise ValueError("strategy='token' has one scale per run-time token: set dynamic=True")
        if self.type == "nf":
            self._check_nf()

    def _check_nf(self) -> None:
        """What bitsandbytes' format holds, and no more."""
        if self.num_bits != 4:
            raise ValueError(f"num_bits must be 4 for type='nf' (NF4), got {self.num_bits}")
        if not self.symmetric:
            raise ValueError("type='nf' is always symmetric; leave symmetric=True")
        size = self.group_size or 0
        if self.strategy != "group" or size < 16 or size & (size - 1):
            got = f"strategy={self.strategy!r}" if self.strategy != "group" else size
            raise ValueError(f"group_size must be a power of two, 16 or more, for type='nf' (NF4's blocks), got {got}; use 64")

    @property
    def quant_min(self) -> int:
        """Smallest integer code, -2^(num_bits - 1)."""
        return -(1 << (self.num_bits - 1))

    @property
    def quant_max(self) -> int:
        """Largest integer code, 2^(num_bits - 1) - 1."""
        return (1 << (self.num_bits - 1)) - 1


@dataclass(frozen=True)
class Scheme:
    """How one kind of layer is quantized.

    Attributes:
        weights: Settings of the weight.
        input_activations: Settings of the activations, or None for weight-only quantization.
        name: What to call it in reports.
        format: compressed-tensors format of the tensors on disk, or ``"nf4"``, which is none; follows from the rest, see
            :func:`format_of`.

    Raises:
        ValueError: If no compressed-tensors format that vLLM reads can hold the combination.
        NotImplementedError: If the kernels cannot compute it yet.
    """

    weights: QuantArgs
    input_activations: QuantArgs | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        if self.weights.dynamic or self.weights.strategy == "token":
            raise ValueError("weights are quantized once: use dynamic=False and a strategy other than 'token'")
        acts = self.input_activations
        if acts is not None and "nf" in (self.weights.type, acts.type):
            raise ValueError("type='nf' is for weights alone; leave input_activations=None")
        if acts is not None and self.rounds_packed:
            self._check_packed_activations(acts)
        elif acts is not None:
            if self.weights.type != acts.type:
                raise ValueError(
                    f"weights of type={self.weights.type!r} with input_activations of type={acts.type!r} are not supported; "
                    "supported: int8 weights with int8 activations, fp8 weights with fp8 activations, int4 weights with fp8 "
                    "activations, or weight-only"
                )
            if acts.num_bits != 8 or self.weights.num_bits != 8:
                raise ValueError(
                    f"quantized activations need num_bits=8 for weights and activations, got {self.weights.num_bits} and "
                    f"{acts.num_bits}; leave input_activations=None for weight-only quantization"
                )
            if acts.strategy in ("channel", "block") or (acts.type == "int" and acts.strategy == "group"):
                raise ValueError(f"input_activations cannot use strategy={acts.strategy!r}; use 'token' or 'tensor'")
            if not acts.dynamic and acts.strategy != "tensor":
                raise ValueError("static input_activations need strategy='tensor' (one scale, found by calibration)")
            if acts.dynamic and (acts.strategy == "tensor" or not acts.symmetric):
                symmetry = "symmetric" if acts.symmetric else "asymmetric"
                raise NotImplementedError(
                    f"dynamic {symmetry} input_activations with strategy={acts.strategy!r} are not supported yet; supported: "
                    "dynamic and symmetric per 'token' (or 'group' with fp8 blocks), or static per 'tensor'"
                )
            if acts.strategy == "group" and self.weights.strategy != "block":
                raise ValueError("input_activations in groups need weights with strategy='block'")
            if not self.weights.symmetric or (self.weights.strategy == "group"):
                raise ValueError(
                    "weights multiplied by quantized activations must be symmetric with strategy='channel', 'tensor' or 'block'"
                )
        if self.weights.type == "int" and acts is None and self.weights.strategy not in ("group", "channel"):
            raise ValueError(f"integer weight-only schemes need strategy='group' or 'channel', got {self.weights.strategy!r}")
        if self.weights.type == "int" and self.weights.strategy == "block":
            raise ValueError("strategy='block' is for fp8 weights; use 'group' or 'channel' for integers")
        if self.weights.type == "float" and self.weights.strategy == "group":
            raise ValueError("fp8 weights need strategy='tensor', 'channel' or 'block'; vLLM reads no fp8 groups")

    def _check_packed_activations(self, acts: QuantArgs) -> None:
        """VLLM's kernel takes these alone."""
        weights = self.weights
        if not (weights.symmetric and weights.strategy == "group" and weights.group_size == 128):
            raise ValueError("int4 weights with fp8 activations must be symmetric in groups of 128")
        if not (acts.dynamic and acts.strategy == "token"):
            raise ValueError("fp8 activations of int4 weights must be dynamic with strategy='token'")

    @property
    def rounds_packed(self) -> bool:
        """Whether activations are rounded to fp8 that meet packed int4 weights (W4AFP8)."""
        acts = self.input_activations
        return acts is not None and acts.type == "float" and self.weights.type == "int" and self.weights.num_bits == 4

    @property
    def format(self) -> str:
        """compressed-tensors format of this scheme's tensors on disk; ``"nf4"``: there is none, and nothing saves it."""
        return format_of(self)

    @property
    def needs_calibration(self) -> bool:
        """Whether the activation scales must come from calibration data."""
        return self.input_activations is not None and not self.input_activations.dynamic

    def describe(self) -> str:
        """Return name, weights and activations in a line, for the ``repr`` of layers."""
        args, acts = self.weights, self.input_activations
        grid = f"{args.type}{args.num_bits} {args.strategy}" + (f" {args.group_size}" if args.group_size else "")
        symmetry = "" if args.symmetric else " asymmetric"
        activations = "" if acts is None else f", activations={acts.type}{acts.num_bits} {acts.strategy}"
        return f"scheme={self.name}, weight={grid}{symmetry}{activations}"


def format_of(scheme: Scheme) -> str:
    """Return the compressed-tensors format: ``pack-quantized``, ``int-``, ``float-`` or ``naive-quantized``; or ``nf4``.

    vLLM asserts on int8 weight-only checkpoints in any format but ``pack-quantized``. compressed-tensors and vLLM have no NF4:
    ``nf4`` names bitsandbytes' tensors, which a model can be trained on and not be saved in.
    """
    if scheme.weights.type == "nf":
        return "nf4"
    if scheme.weights.type == "int":
        return "pack-quantized" if scheme.input_activations is None or scheme.rounds_packed else "int-quantized"
    return "naive-quantized" if scheme.input_activations is None else "float-quantized"


def _named_schemes() -> dict[str, Scheme]:
    schemes = {}
    for num_bits in range(2, 9):
        for suffix, symmetric in (("", True), ("_ASYM", False)):
            name = f"W{num_bits}A16{suffix}"
            schemes[name] = Scheme(QuantArgs(num_bits, symmetric=symmetric, group_size=128), name=name)
    int8_token = QuantArgs(8, strategy="token", dynamic=True)
    fp8_token = QuantArgs(8, "float", strategy="token", dynamic=True)
    fp8_channel = QuantArgs(8, "float", strategy="channel")
    fp8_tensor = QuantArgs(8, "float", strategy="tensor")
    fp8_block = QuantArgs(8, "float", strategy="block", block_structure=(128, 128))
    fp8_group = QuantArgs(8, "float", strategy="group", group_size=128, dynamic=True)
    return schemes | {
        "W8A8": Scheme(QuantArgs(8, strategy="channel"), int8_token, "W8A8"),
        "W4AFP8": Scheme(QuantArgs(4, group_size=128), fp8_token, "W4AFP8"),
        "FP8": Scheme(fp8_tensor, fp8_tensor, "FP8"),
        "FP8_DYNAMIC": Scheme(fp8_channel, fp8_token, "FP8_DYNAMIC"),
        "FP8_BLOCK": Scheme(fp8_block, fp8_group, "FP8_BLOCK"),
        "NF4": Scheme(QuantArgs(4, "nf", group_size=64), name="NF4"),
    }


SCHEMES: dict[str, Scheme] = _named_schemes()
"""The named schemes. Group schemes have group_size 128 (NF4: 64) unless ``QuantConfig(group_size=...)`` says otherwise."""

PLANNED_SCHEMES = ("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8")


def resolve_scheme(scheme: str | Scheme, group_size: int | None = None, symmetric: bool | None = None) -> Scheme:
    """Return the :class:`Scheme` for a name (case-insensitive), with ``group_size`` and ``symmetric`` applied to its weights.

    Args:
        scheme: A name such as ``"W4A16"``, or a Scheme.
        group_size: Replaces the weights' group size; -1 means one group per channel. None keeps the scheme's own.
        symmetric: Replaces the weights' symmetry. None keeps the scheme's own.

    Raises:
        ValueError: If the name is unknown, or the scheme takes no group size or no zero points.
        NotImplementedError: If the scheme is known but not supported yet.
        TypeError: If ``scheme`` is neither a name nor a Scheme.
    """
    if isinstance(scheme, str):
        name = scheme.upper()
        if name in PLANNED_SCHEMES:
            raise NotImplementedError(f"scheme={scheme!r} is not supported yet; supported: {', '.join(SCHEMES)}")
        if name not in SCHEMES:
            close = difflib.get_close_matches(name, SCHEMES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"scheme={scheme!r} is unknown; {hint}known schemes: {', '.join(SCHEMES)}")
        scheme = SCHEMES[name]
    elif not isinstance(scheme, Scheme):
        raise TypeError(f"scheme must be a name or a torchq.scheme.Scheme, got {type(scheme).__name__}")
    weights = scheme.weights
    if group_size is not None:
        if weights.strategy not in ("group", "channel") or weights.type == "float" or scheme.input_activations is not None:
            raise ValueError(f"group_size={group_size} does not apply to scheme {scheme.name}; leave group_size=None")
        strategy: Strategy = "channel" if group_size == -1 else "group"
        weights = replace(weights, strategy=strategy, group_size=group_size)
    if symmetric is not None:
        weights = replace(weights, symmetric=symmetric)
    return replace(scheme, weights=weights)
