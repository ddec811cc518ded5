"""The one definition of the maths: scales, zero points, quantize, dequantize. Pure functions on tensors.

Shapes: N out_features, K in_features, G groups per row. A weight is viewed as ``[R, G, S]``: R rows of G groups of S values
that share a scale (:func:`to_groups`). Integers: ``w = (q - zero_point) * scale``; fp8: ``w = q * scale``; NF4, which
:mod:`torchq.kernels.nf4` quantizes: ``w = LEVELS[q] * scale``. Symmetric integer
scales may be negative: the largest magnitude may then map to ``-2^(b-1)`` whatever its sign, which uses the full range.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchq.kernels import nf4
from torchq.scheme import QuantArgs

ScaleSearch = Literal["mse", "absmax"]

# Coarse grid of the scale search: multiples of the scale that just fits the largest magnitude. Fewer bits clip more.
_GRID_LOW = {2: 0.30, 3: 0.45, 4: 0.55, 5: 0.70, 6: 0.80, 7: 0.88, 8: 0.92}
_GRID_HIGH = 1.07
_GRID_POINTS = 9
_REFINE_STEPS = 2
_CHUNK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 25}  # values searched at a time: fits the L2 cache of a CPU core


# ---------------------------------------------------------------------------------------------------------------- grouping


def to_groups(weight: Tensor, args: QuantArgs) -> Tensor:
    """View a weight [N, K] as [R, G, S], groups of S values that share a scale.

    ``group``: [N, K / group_size, group_size]; ``channel``: [N, 1, K]; ``tensor``: [1, 1, N K]; ``block`` (zero-padded to whole
    blocks): [ceil(N / rows), ceil(K / columns), rows columns]. NF4 (zero-padded): [ceil(N K / group_size), 1, group_size].
    """
    n, k = weight.shape
    if args.type == "nf":
        assert args.group_size is not None
        return torch.nn.functional.pad(weight.reshape(-1), (0, -n * k % args.group_size)).view(-1, 1, args.group_size)
    if args.strategy == "group":
        assert args.group_size is not None
        if k % args.group_size:
            raise ValueError(f"group_size={args.group_size} does not divide in_features={k}")
        return weight.reshape(n, k // args.group_size, args.group_size)
    if args.strategy == "block":
        assert args.block_structure is not None
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        return blocks.transpose(1, 2).flatten(2)
    return weight.reshape(n, 1, k) if args.strategy == "channel" else weight.reshape(1, 1, n * k)


def from_groups(groups: Tensor, args: QuantArgs, shape: tuple[int, int]) -> Tensor:
    """Invert :func:`to_groups`: [R, G, S] -> [N, K] = ``shape``."""
    n, k = shape
    if args.type == "nf":
        return groups.reshape(-1)[: n * k].view(n, k)
    if args.strategy == "block":
        assert args.block_structure is not None
        rows, columns = args.block_structure
        blocks = groups.unflatten(2, (rows, columns)).transpose(1, 2)
        return blocks.reshape(groups.shape[0] * rows, groups.shape[1] * columns)[:n, :k].contiguous()
    return groups.reshape(n, k)


def scale_shape(shape: tuple[int, int], args: QuantArgs) -> tuple[int, ...]:
    """Return the shape of a weight's scales: [1] per tensor, [N, 1] per channel, [N, G], [blocks, blocks], or [B, 1] (NF4)."""
    n, k = shape
    if args.type == "nf":
        assert args.group_size is not None
        return -(-n * k // args.group_size), 1
    if args.strategy == "tensor":
        return (1,)
    if args.strategy == "block":
        assert args.block_structure is not None
        return -(-n // args.block_structure[0]), -(-k // args.block_structure[1])
    if args.strategy == "group":
        assert args.group_size is not None
        return n, k // args.group_size
    return n, 1


# ------------------------------------------------------------------------------------------------- quantize and dequantize


def quantize(weight: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantArgs) -> Tensor:
    """Round a weight to its codes, in the precision of ``weight`` and ``scale`` as given.

    Args:
        weight: [N, K] floating point. Pass float32 for exact rounding.
        scale: As :func:`scale_shape`; nonzero.
        zero_point: int8 of scale's shape, or None.
        args: Settings.

    Returns:
        [N, K] int8 codes in [-2^(b-1), 2^(b-1) - 1], or float8_e4m3fn values in [-448, 448].
    """
    _check_quantizes(args)
    groups = to_groups(weight, args)
    scaled = groups / scale.reshape(*groups.shape[:2], 1)
    if args.type == "float":
        return from_groups(cast_fp8(scaled), args, (weight.shape[0], weight.shape[1]))
    if zero_point is not None:
        scaled += zero_point.reshape(*groups.shape[:2], 1).to(scaled.dtype)
    codes = scaled.round_().clamp_(args.quant_min, args.quant_max).to(torch.int8)
    return from_groups(codes, args, (weight.shape[0], weight.shape[1]))


def _check_quantizes(args: QuantArgs) -> None:
    if args.type == "nf":
        raise ValueError("type='nf' is quantized by torchq.kernels.nf4; call torchq.algorithms.rtn.quantize_weight")


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantArgs, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``(q - zero_point) * scale``, of NF4 ``LEVELS[q] * scale``, in scale's dtype, as every reader of the format does.

    Args:
        q: Codes, [N, K] int8 or float8.
        scale: As :func:`scale_shape`.
        zero_point: int8 of scale's shape, or None.
        args: Settings.
        dtype: dtype of the result; scale's own by default. The product is rounded to scale's dtype first.

    Returns:
        [N, K].
    """
    groups = to_groups(q, args)
    groups = nf4.LEVELS.to(q.device)[groups.int()] if args.type == "nf" else groups.to(scale.dtype)
    if zero_point is not None:
        groups = groups - zero_point.reshape(*groups.shape[:2], 1).to(scale.dtype)
    weight = from_groups(groups * scale.reshape(*groups.shape[:2], 1), args, (q.shape[0], q.shape[1]))
    return weight if dtype is None else weight.to(dtype)


def cast_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Cast to fp8 with saturation: values beyond the largest finite one are clamped, never NaN (e4m3) or inf (e5m2)."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def quantize_dynamic(x: Tensor, args: QuantArgs, fp8_dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Quantize activations symmetrically with scales taken from themselves, in float32 (as vLLM does).

    Args:
        x: [..., K] floating point.
        args: ``strategy`` token (a scale per row), tensor, or group (a scale per ``group_size`` values).
        fp8_dtype: Which fp8, for ``type="float"``.

    Returns:
        The codes, [..., K] int8 or fp8, and the scales, float32: [..., 1], [1] or [..., K / group_size]. All-zero rows get
        scale 1 and codes 0.
    """
    limit = float(args.quant_max) if args.type == "int" else torch.finfo(fp8_dtype).max
    x = x.float()
    if args.strategy == "tensor" and x.numel() == 0:
        groups, absmax = x, x.new_zeros(())
    else:
        groups = x.unflatten(-1, (-1, args.group_size)) if args.strategy == "group" else x.unsqueeze(-2)
        absmax = groups.abs().amax() if args.strategy == "tensor" else groups.abs().amax(-1, keepdim=True)
    scale = torch.where(absmax > 0, absmax / limit, 1.0).clamp_min_(torch.finfo(torch.float32).tiny)
    scaled = (groups / scale).reshape(x.shape)
    q = (
        scaled.round_().clamp_(args.quant_min, args.quant_max).to(torch.int8)
        if args.type == "int"
        else cast_fp8(scaled, fp8_dtype)
    )
    return q, scale.reshape(1) if args.strategy == "tensor" else scale.flatten(-2)


# ------------------------------------------------------------------------------------------------------ scales, zero points


def choose_qparams(
    weight: Tensor,
    args: QuantArgs,
    search: ScaleSearch = "mse",
    scale_dtype: torch.dtype | None = None,
    signed: bool = True,
    importance: Tensor | None = None,
    norm: float = 2.0,
) -> tuple[Tensor, Tensor | None]:
    """Choose scales and zero points for a weight.

    Args:
        weight: [N, K] finite floating point.
        args: Settings.
        search: ``"mse"`` searches the scale (and zero point) that minimises the error (``norm``) of each group, symmetric ones
            with the full signed range; scales may be negative. ``"absmax"`` is compressed-tensors' own rule, bit for bit:
            absmax / ((2^b - 1) / 2), or (max - min) / (2^b - 1), or absmax / 448, computed in the weight's dtype.
        scale_dtype: dtype of the scales; the weight's by default.
        signed: Whether the search may make symmetric integer scales negative.
        importance: [K], not negative: the search weights the error of column k by ``importance[k]``. With the mean
            square of the k-th input it is the expected error of the layer's output, were inputs uncorrelated. None: all alike.
        norm: What the search minimises is the sum of ``|error| ** norm``: of more than 2, large errors (of weights that the
            scale clips) count for more.

    Returns:
        Scales as :func:`scale_shape`, finite and nonzero also after rounding to ``scale_dtype``, and zero points (int8, same
        shape; None if symmetric).
    """
    _check_quantizes(args)
    scale_dtype = scale_dtype or weight.dtype
    groups = to_groups(weight, args)
    shape = scale_shape((weight.shape[0], weight.shape[1]), args)
    if search == "absmax" or args.type == "float":
        scale, zero_point = _absmax_qparams(groups, args)
    else:
        weights = None if importance is None else _column_weights(importance, args, weight.shape[0])
        scale, zero_point = _search_qparams(groups, args, signed, scale_dtype, weights, norm)
    scale = _representable(scale, scale_dtype, _reach(args, zero_point)).reshape(shape)
    return scale, None if zero_point is None else zero_point.to(torch.int8).reshape(shape)


def _absmax_qparams(groups: Tensor, args: QuantArgs) -> tuple[Tensor, Tensor | None]:
    """compressed-tensors' rule, in groups' dtype. [R, G, S] -> scale [R, G], zero point [R, G] or None."""
    low, high = groups.aminmax(dim=-1)
    low, high = low.clamp_max(0), high.clamp_min(0)
    if args.symmetric:
        absmax = torch.maximum(low.abs(), high.abs())
        limit = torch.finfo(torch.float8_e4m3fn).max if args.type == "float" else (2**args.num_bits - 1) / 2
        return absmax / limit, None
    levels = 2**args.num_bits - 1
    scale = (high - low) / levels
    overflow = ~torch.isfinite(scale)  # max - min can exceed the dtype
    scale = torch.where(overflow, high / levels - low / levels, scale)
    zero_point = args.quant_min - low / torch.where(scale == 0, 1, scale)
    return scale, zero_point.clamp(args.quant_min, args.quant_max).round()


def _reach(args: QuantArgs, zero_point: Tensor | None) -> float | Tensor:
    """Largest magnitude of ``q - zero_point``."""
    if args.type == "float":
        return torch.finfo(torch.float8_e4m3fn).max
    if zero_point is None:
        return float(-args.quant_min)
    return torch.maximum(zero_point - args.quant_min, args.quant_max - zero_point).float()


def _representable(scale: Tensor, dtype: torch.dtype, reach: float | Tensor) -> Tensor:
    """Round scales to ``dtype`` so that none is 0 there, nor ``reach`` times it inf.

    Zeros (all-zero groups) become eps, as in compressed-tensors.
    """
    info = torch.finfo(dtype)
    limit = torch.as_tensor(info.max * (1 - info.eps) / reach, dtype=torch.float32, device=scale.device)
    rounded = scale.float().clamp(-limit, limit).to(dtype)
    smallest = torch.where(scale < 0, -info.smallest_normal, info.smallest_normal).to(dtype)
    rounded = torch.where((rounded == 0) & (scale != 0), smallest, rounded)
    return torch.where(scale == 0, info.eps, rounded)


def _column_weights(importance: Tensor, args: QuantArgs, rows: int) -> Tensor:
    """[K] -> square roots [G, S] (one row of groups), of mean 1 and at least 1e-2, so that no column counts for nothing."""
    relative = importance.float() / importance.float().mean().clamp_min(torch.finfo(torch.float32).tiny)
    root = relative.clamp_min(1e-4).sqrt()
    if args.strategy == "tensor":
        return root.repeat(rows)[None]
    return root.view(-1, args.group_size) if args.strategy == "group" and args.group_size else root[None]


def representable_scale(scale: Tensor, like: Tensor, args: QuantArgs) -> Tensor:
    """Round new float32 scales to the dtype and shape of ``like``, so that none is 0 there nor overflows."""
    reach = _reach(args, None) if args.symmetric else float(args.quant_max - args.quant_min)
    return _representable(scale, like.dtype, reach).reshape(like.shape)


def _search_qparams(
    groups: Tensor, args: QuantArgs, signed: bool, scale_dtype: torch.dtype, weights: Tensor | None, norm: float
) -> tuple[Tensor, Tensor | None]:
    """Search scales for least error in float32, a cache-sized chunk of groups at a time."""
    rows, num_groups, size = groups.shape
    flat = groups.reshape(rows * num_groups, size)
    scale = torch.empty(flat.shape[0], device=flat.device, dtype=torch.float32)
    zero_point = None if args.symmetric else torch.empty_like(scale)
    step = max(1, _CHUNK_VALUES.get(flat.device.type, 1 << 22) // size)
    for start in range(0, flat.shape[0], step):
        chunk = flat[start : start + step]
        root = None
        if weights is not None:
            root = weights[torch.arange(start, start + chunk.shape[0], device=weights.device) % num_groups]
        found_scale, found_zero_point = _search_chunk(_GroupSearch(chunk, args, signed, scale_dtype, root, norm))
        scale[start : start + step] = found_scale
        if zero_point is not None and found_zero_point is not None:
            zero_point[start : start + step] = found_zero_point
    return scale.reshape(rows, num_groups), None if zero_point is None else zero_point.reshape(rows, num_groups)


def _search_chunk(search: _GroupSearch) -> tuple[Tensor, Tensor | None]:
    """Grid search, local refinement, closed-form refit -> scale [B], zero point [B] (float32) or None.

    The first candidate is compressed-tensors' rule and each step keeps the better of old and new, so the result is never
    worse than that rule.
    """
    args, signed = search.args, search.signed
    scale, zero_point = (None if t is None else t.float() for t in _absmax_qparams(search.w, args))
    assert scale is not None
    search.consider(scale / search.base, zero_point)
    points = [*torch.linspace(_GRID_LOW[args.num_bits], 1.0, _GRID_POINTS).tolist(), (1 + _GRID_HIGH) / 2, _GRID_HIGH]
    for point in points:
        for sign in (1.0, -1.0) if args.symmetric and signed else (1.0,):
            factor = torch.full_like(search.base, sign * point)
            search.consider(factor, search.centred_zero_point(factor))
    step = points[1] - points[0]
    for _ in range(_REFINE_STEPS):
        step /= 2
        centre, zero_point = search.factor, search.zero_point
        for offset in (-step, step):
            factor = centre + offset * centre.sign()
            search.consider(factor, search.centred_zero_point(factor))
            if zero_point is not None:
                search.consider(factor, zero_point)
    if search.zero_point is not None:
        centre, zero_point = search.factor, search.zero_point
        for shift in (-1, 1):
            search.consider(centre, (zero_point + shift).clamp_(args.quant_min, args.quant_max))
    search.consider(search.least_squares_factor(), search.zero_point)
    return torch.where(search.is_zero, 0.0, search.factor * search.base), search.zero_point


class _GroupSearch:
    """The best scale (and zero point) found so far for each group of w [B, S], by the error of the scale as stored.

    ``root`` [B, S], squared, weights the ``|error| ** norm`` of each value; None: all alike.

    Scales are multiples, ``factor`` [B], of ``base`` [B], the scale that just fits the group's largest magnitude. Buffers of
    the size of w are reused from candidate to candidate.
    """

    def __init__(
        self, w: Tensor, args: QuantArgs, signed: bool, dtype: torch.dtype, root: Tensor | None = None, norm: float = 2.0
    ) -> None:
        self.w, self.args, self.signed, self.dtype, self.root, self.norm = w, args, signed, dtype, root, norm
        w = w.float().contiguous()  # the order of a sum, and so a tie, must not depend on strides
        low, high = w.aminmax(dim=-1)
        if args.symmetric:
            extreme = torch.where(-low >= high, low, high)
            if not signed:
                extreme = -extreme.abs()
            base = extreme / args.quant_min  # the largest magnitude maps to -2^(b-1): a negative scale where it is positive
        else:
            low, high = low.clamp_max(0), high.clamp_min(0)
            levels = args.quant_max - args.quant_min
            base = high / levels - low / levels  # not (high - low) / levels, which can overflow
        self.is_zero = base == 0
        self.base = torch.where(self.is_zero, 1.0, base)
        self.u = w / self.base[:, None]
        self.middle = (low / self.base + high / self.base) / 2
        self.scaled, self.codes = torch.empty_like(self.u), torch.empty_like(self.u)
        self.error = torch.full_like(base, float("inf"))
        self.factor = torch.ones_like(base)
        self.zero_point = None if args.symmetric else torch.zeros_like(base)

    def centred_zero_point(self, factor: Tensor) -> Tensor | None:
        """The zero point that puts the middle of a group's range at the middle of the codes; None if symmetric."""
        if self.args.symmetric:
            return None
        centre = (self.args.quant_min + self.args.quant_max) / 2
        return (centre - self.middle / factor).round_().clamp_(self.args.quant_min, self.args.quant_max)

    def consider(self, factor: Tensor, zero_point: Tensor | None) -> None:
        """Keep a candidate where it has less error."""
        if self.dtype != torch.float32:
            factor = _representable(factor * self.base, self.dtype, _reach(self.args, zero_point)).float() / self.base
        self._round(factor, zero_point)
        self.codes -= self.scaled
        error = self._power() * factor.abs().pow(self.norm)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.factor = torch.where(better, factor, self.factor)
        if zero_point is not None and self.zero_point is not None:
            self.zero_point = torch.where(better, zero_point, self.zero_point)

    def _power(self) -> Tensor:
        """The sum of each group's weighted ``|codes| ** norm`` [B]; overwrites ``codes``."""
        if self.norm == 3:  # without powers of floats, which are slow
            squares = torch.mul(self.codes, self.codes, out=self.scaled)
            self.codes.abs_()
        else:
            squares = self.codes if self.norm == 2 else self.codes.abs_().pow_(self.norm / 2)
        if self.root is not None:
            self.codes *= self.root
            if self.norm == 3:
                squares *= self.root
        return torch.linalg.vecdot(squares, self.codes)

    def least_squares_factor(self) -> Tensor:
        """The factor that fits the codes of the best candidate best: <u, q - zero_point> / <q - zero_point, q - zero_point>."""
        self._round(self.factor, self.zero_point)
        if self.zero_point is not None:
            self.codes -= self.zero_point[:, None]
        u = self.u
        if self.root is not None:
            u, self.codes = u * self.root, self.codes.mul_(self.root)
        power = torch.linalg.vecdot(self.codes, self.codes)
        fitted = torch.linalg.vecdot(u, self.codes) / power
        return torch.where((power > 0) & (fitted != 0), fitted, self.factor)

    def _round(self, factor: Tensor, zero_point: Tensor | None) -> None:
        """Fill ``scaled`` with u / factor + zero_point, and ``codes`` with that rounded and clamped."""
        torch.mul(self.u, (1.0 / factor)[:, None], out=self.scaled)
        if zero_point is not None:
            self.scaled += zero_point[:, None]
        torch.round(self.scaled, out=self.codes)
        self.codes.clamp_(self.args.quant_min, self.args.quant_max)
