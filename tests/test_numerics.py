"""The maths: compressed-tensors' rule bit for bit, and a scale search that is never worse than it."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization import dequantize as ct_dequantize
from compressed_tensors.quantization import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp

from torchq import numerics
from torchq.kernels import nf4
from torchq.numerics import cast_fp8, choose_qparams, dequantize, from_groups, quantize, quantize_dynamic, scale_shape, to_groups
from torchq.scheme import QuantArgs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8S = [torch.float8_e4m3fn, torch.float8_e5m2]
INT_STRATEGIES = [{"group_size": 32}, {"group_size": -1}, {"strategy": "tensor"}]
FP8_STRATEGIES = [
    {"strategy": "tensor"},
    {"strategy": "channel"},
    {"strategy": "block", "block_structure": (16, 32)},
    {"strategy": "block", "block_structure": (7, 50)},  # ragged in both directions
    {"strategy": "block", "block_structure": (128, 128)},  # larger than the weight
]
ZERO_GROUPS = [0, 5, 6, 7]  # rows of special_weight with a group of zeros


def special_weight(dtype: torch.dtype, magnitude: float = 1.0) -> torch.Tensor:
    """Random rows, and rows of zeros, of one value, of one sign, and with one value that is not zero."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(40, 96, generator=generator) * magnitude / 4
    w[0] = 0
    w[1], w[2] = magnitude, -magnitude
    w[3], w[4] = w[3].abs(), -w[4].abs()
    w[5, :32] = 0
    w[6] = 0
    w[6, 7] = magnitude
    w[7] = 0
    w[7, 40] = -magnitude
    w[8, 3], w[9, 3] = magnitude, -magnitude  # outliers
    return w.clamp(-magnitude, magnitude).to(dtype)


def ct_args(args: QuantArgs) -> QuantizationArgs:
    fields = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic")
    block = None if args.block_structure is None else list(args.block_structure)
    return QuantizationArgs(**{name: getattr(args, name) for name in fields}, block_structure=block)


def ct_reference(w: torch.Tensor, args: QuantArgs) -> tuple[torch.Tensor, ...]:
    """Scales, zero points, codes and dequantized weight, all computed by compressed-tensors."""
    groups = to_groups(w, args)
    shape = scale_shape((w.shape[0], w.shape[1]), args)
    low, high = groups.amin(-1).reshape(shape), groups.amax(-1).reshape(shape)
    scale, zero_point = calculate_qparams(low, high, ct_args(args))
    dtype = torch.int8 if args.type == "int" else torch.float8_e4m3fn
    q = ct_quantize(w, scale, zero_point, ct_args(args), dtype=dtype)
    return scale, zero_point, q, ct_dequantize(q, scale, zero_point, ct_args(args))


def squared_errors(w: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, args: QuantArgs) -> torch.Tensor:
    """Squared error of each group [R, G] with exact arithmetic on the stored scales."""
    q = quantize(w.float(), scale.float(), zero_point, args)
    restored = dequantize(q, scale.double(), zero_point, args)
    return (to_groups(restored, args) - to_groups(w.double(), args)).square().sum(-1)


# ---------------------------------------------------------------------------------------------------------------- grouping


@pytest.mark.parametrize("kwargs", [*INT_STRATEGIES, *FP8_STRATEGIES])
def test_groups_round_trip_and_match_the_scale_shape(kwargs):
    args = QuantArgs(8, "float" if "block_structure" in kwargs else "int", **kwargs)
    w = torch.arange(40 * 96, dtype=torch.float32).reshape(40, 96)
    groups = to_groups(w, args)
    assert torch.equal(from_groups(groups, args, (40, 96)), w)
    assert groups.shape[0] * groups.shape[1] == torch.Size(scale_shape((40, 96), args)).numel()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "channel"}, (300, 1)),
        ({"group_size": 64}, (300, 3)),
        ({"strategy": "block", "block_structure": (128, 128)}, (3, 2)),
    ],
)
def test_scale_shape(kwargs, expected):
    args = QuantArgs(8, "float" if "block_structure" in kwargs else "int", **kwargs)
    assert scale_shape((300, 192), args) == expected


def test_group_size_that_does_not_divide():
    with pytest.raises(ValueError, match="group_size=32 does not divide in_features=48"):
        choose_qparams(torch.randn(4, 48), QuantArgs(4, group_size=32))


# ------------------------------------------------------------------------------------------------- against compressed-tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kwargs", INT_STRATEGIES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_absmax_integers_equal_compressed_tensors(num_bits, symmetric, kwargs, dtype):
    args = QuantArgs(num_bits, symmetric=symmetric, **kwargs)
    w = special_weight(dtype)
    scale, zero_point = choose_qparams(w, args, "absmax")
    q = quantize(w, scale, zero_point, args)
    restored = dequantize(q, scale, zero_point, args)
    ct_scale, ct_zero_point, ct_q, ct_restored = ct_reference(w, args)
    assert torch.equal(scale, ct_scale) and scale.dtype == dtype
    assert torch.equal(restored, ct_restored)
    if zero_point is None:
        assert torch.equal(q, ct_q)
    else:  # the zero point of a group of zeros is 0 / 0 there; it dequantizes to zeros either way
        defined = to_groups(w, args).abs().amax(-1).reshape(scale.shape) > 0
        assert torch.equal(zero_point[defined], ct_zero_point[defined])
        expanded = defined.unsqueeze(-1).expand(*to_groups(q, args).shape).reshape(q.shape)
        assert torch.equal(q[expanded], ct_q[expanded])
    assert torch.equal(dequantize(ct_q, ct_scale, None if symmetric else ct_zero_point, args), ct_restored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kwargs", FP8_STRATEGIES)
@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_fp8_equals_compressed_tensors(search, kwargs, dtype):
    args = QuantArgs(8, "float", **kwargs)
    w = special_weight(dtype)
    scale, zero_point = choose_qparams(w, args, search)
    q = quantize(w, scale, zero_point, args)
    ct_scale, _, ct_q, ct_restored = ct_reference(w, args)
    assert zero_point is None and torch.equal(scale, ct_scale)
    assert torch.equal(q.view(torch.uint8), ct_q.view(torch.uint8))
    assert torch.equal(dequantize(q, scale, None, args), ct_restored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_searched_codes_mean_the_same_to_compressed_tensors(symmetric, dtype):
    args = QuantArgs(4, symmetric=symmetric, group_size=32)
    w = special_weight(dtype)
    scale, zero_point = choose_qparams(w, args)
    q = quantize(w.float(), scale.float(), zero_point, args)
    assert torch.equal(dequantize(q, scale, zero_point, args), ct_dequantize(q, scale, zero_point, ct_args(args)))


def test_dequantize_rounds_to_the_scales_dtype_first():
    args = QuantArgs(8, group_size=32)
    q = torch.randint(-128, 128, (4, 32), dtype=torch.int8)
    scale = (torch.rand(4, 1) + 0.1).bfloat16()
    expected = (q.bfloat16() * scale).float()
    assert torch.equal(dequantize(q, scale, None, args, torch.float32), expected)
    assert not torch.equal(expected, q.float() * scale.float())


# ------------------------------------------------------------------------------------------------------- extreme values


def extreme_magnitudes(dtype: torch.dtype) -> list[float]:
    info = torch.finfo(dtype)
    values = [info.max, 0.7 * info.max, 0.1 * info.max, 1e-3, info.smallest_normal, info.smallest_normal / 50]
    return values if dtype == torch.float16 else [*values, 1e30, 1e-30]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("search", ["absmax", "mse"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_huge_and_tiny_values_stay_finite(symmetric, search, dtype):
    for magnitude in extreme_magnitudes(dtype):
        w = special_weight(dtype, magnitude)
        assert torch.isfinite(w).all()
        for num_bits in range(2, 9):
            for kwargs in INT_STRATEGIES:
                args = QuantArgs(num_bits, symmetric=symmetric, **kwargs)
                scale, zero_point = choose_qparams(w, args, search)
                case = (magnitude, args)
                assert torch.isfinite(scale).all() and (scale != 0).all(), case
                q = quantize(w.float(), scale.float(), zero_point, args)
                for codes in (q, q if zero_point is None else zero_point):
                    assert int(codes.min()) >= args.quant_min and int(codes.max()) <= args.quant_max, case
                restored = dequantize(q, scale, zero_point, args)
                assert torch.isfinite(restored).all(), case
                assert (restored.double() - w.double()).norm() <= w.double().norm(), case
                zeros = to_groups(w, args).abs().amax(-1) == 0
                assert (to_groups(restored, args)[zeros] == 0).all(), case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kwargs", FP8_STRATEGIES)
def test_huge_and_tiny_values_in_fp8(kwargs, dtype):
    args = QuantArgs(8, "float", **kwargs)
    for magnitude in extreme_magnitudes(dtype):
        w = special_weight(dtype, magnitude)
        scale, _ = choose_qparams(w, args)
        assert torch.isfinite(scale).all() and (scale != 0).all(), magnitude
        for given in (w, w.float()):
            q = quantize(given, scale.to(given.dtype), None, args)
            assert torch.isfinite(q.float()).all(), magnitude
            assert torch.isfinite(dequantize(q, scale, None, args)).all(), magnitude


def test_max_minus_min_beyond_float16():
    args = QuantArgs(4, symmetric=False, group_size=32)
    w = torch.linspace(-40000, 40000, 32).half()[None]
    for search in ("absmax", "mse"):
        scale, zero_point = choose_qparams(w, args, search)
        restored = dequantize(quantize(w.float(), scale.float(), zero_point, args), scale, zero_point, args)
        assert (restored.float() - w.float()).norm() <= 0.07 * w.float().norm(), search


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_scales_stored_in_another_dtype(scale_dtype):
    args = QuantArgs(4, group_size=32)
    for magnitude in (1e30, 1.0, 1e-9, 1e-30):
        scale, _ = choose_qparams(special_weight(torch.float32, magnitude), args, scale_dtype=scale_dtype)
        assert scale.dtype == scale_dtype and torch.isfinite(scale).all() and (scale != 0).all()


@pytest.mark.parametrize("fp8", FP8S)
def test_fp8_cast_saturates(fp8):
    limit = torch.finfo(fp8).max
    x = torch.tensor([1e30, -1e30, float("inf"), -float("inf"), 449.0, 470.0, limit, -limit, 1e6, 0.0, -0.0, 1e-30])
    for dtype in DTYPES:
        cast = cast_fp8(x.to(dtype), fp8).float()
        assert torch.isfinite(cast).all() and cast.abs().max() == limit
    exact = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    exact = exact[torch.isfinite(exact)]
    assert torch.equal(cast_fp8(exact, fp8).float(), exact)


# ------------------------------------------------------------------------------------------------- dynamic activations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kwargs", [{"strategy": "token"}, {"strategy": "tensor"}, {"group_size": 16}])
@pytest.mark.parametrize("kind", ["int", *FP8S])
def test_quantize_dynamic(kind, kwargs, dtype):
    args = QuantArgs(8, "int" if kind == "int" else "float", dynamic=True, **kwargs)
    fp8 = torch.float8_e4m3fn if kind == "int" else kind
    limit = 127.0 if kind == "int" else torch.finfo(kind).max
    base = torch.randn(3, 10, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    base[1, 4] = 0
    base[2, 5, :16] = 0
    for x in (base, base.transpose(0, 1), base[:, ::2], base[..., ::2], base[:1, :1].expand(4, 3, 96), base[0, 0], base[:0]):
        q, scale = quantize_dynamic(x, args, fp8)
        assert q.shape == x.shape and q.dtype == (torch.int8 if kind == "int" else kind) and scale.dtype == torch.float32
        if args.strategy == "tensor":
            expected = x.float().abs().amax().reshape(1) / limit if x.numel() else torch.ones(1)
            expanded = scale.expand(x.shape)
        else:
            size = args.group_size or x.shape[-1]
            absmax = x.float().unflatten(-1, (x.shape[-1] // size, size)).abs().amax(-1)
            expected = torch.where(absmax > 0, absmax / limit, 1.0)
            expanded = scale.repeat_interleave(size, -1)
        assert torch.equal(scale, expected)
        scaled = x.float() / expanded
        codes = scaled.round().clamp(-128, 127).to(torch.int8) if kind == "int" else scaled.clamp(-limit, limit).to(kind)
        assert torch.equal(q.float(), codes.float())


def test_quantize_dynamic_agrees_with_compressed_tensors_in_fp8():
    args = QuantArgs(8, "float", strategy="token", dynamic=True)
    x = torch.randn(2, 5, 64)
    scale, _ = compute_dynamic_scales_and_zp(x, ct_args(args), torch.nn.Identity())
    assert torch.equal(quantize_dynamic(x, args)[1], scale)


@pytest.mark.parametrize("kwargs", [{"strategy": "token"}, {"strategy": "tensor"}, {"group_size": 16}])
@pytest.mark.parametrize("magnitude", [3e38, 1e-38, 1e-44])
def test_quantize_dynamic_of_extreme_activations(magnitude, kwargs):
    for kind in ("int", "float"):
        args = QuantArgs(8, kind, dynamic=True, **kwargs)
        q, scale = quantize_dynamic(torch.full((2, 64), magnitude), args)
        assert torch.isfinite(scale).all() and (scale > 0).all() and torch.isfinite(q.float()).all()


# -------------------------------------------------------------------------------------------------------------- search


def realistic(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "normal":
        w = torch.randn(shape, generator=generator)
    elif kind == "uniform":
        w = torch.rand(shape, generator=generator) - 0.5
    elif kind == "positive":
        w = torch.rand(shape, generator=generator)
    else:  # heavy tails
        w = torch.randn(shape, generator=generator) / torch.rand(shape, generator=generator).sqrt()
    return (w * 0.05).to(dtype)


@pytest.mark.parametrize("kind", ["normal", "uniform", "positive", "heavy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_search_is_never_worse_than_absmax(num_bits, dtype, kind):
    for group_size in (8, 32, -1):
        w = realistic((96, 128), dtype, kind)
        for symmetric, signed in ((True, True), (True, False), (False, True)):
            args = QuantArgs(num_bits, symmetric=symmetric, group_size=group_size)
            ours = squared_errors(w, *choose_qparams(w, args, "mse", signed=signed), args)
            theirs = squared_errors(w, *choose_qparams(w, args, "absmax"), args)
            assert (ours <= theirs * (1 + 1e-4) + 1e-12).all(), (group_size, symmetric, signed, float((ours / theirs).max()))
            assert ours.sum() < 0.99 * theirs.sum(), (group_size, symmetric, signed)


def test_search_knows_that_scales_are_stored_rounded():
    """8 bits, bfloat16: the best float32 scale, rounded to bfloat16 afterwards, clips or wastes half a step at the edge."""
    args = QuantArgs(8, group_size=32)
    w = realistic((256, 128), torch.float32, "uniform")
    stored = squared_errors(w, *choose_qparams(w, args, scale_dtype=torch.bfloat16), args).sum()
    exact_scale, _ = choose_qparams(w, args)
    rounded_afterwards = squared_errors(w, exact_scale.bfloat16(), None, args).sum()
    assert stored < 0.98 * rounded_afterwards


def brute_force(w: torch.Tensor, args: QuantArgs, signed: bool) -> torch.Tensor:
    """Least squared error of each row over a dense grid of scales (and all zero points)."""
    w = w.double()
    low, high = w.amin(-1).clamp_max(0), w.amax(-1).clamp_min(0)
    factors = torch.linspace(0.1, 1.4, 1500, dtype=torch.float64)
    if args.symmetric:
        base = torch.maximum(-low, high) / -args.quant_min
        factors = torch.cat([factors, -factors]) if signed else factors
        zero_points = [0]
    else:
        base = (high - low) / (2**args.num_bits - 1)
        zero_points = list(range(args.quant_min, args.quant_max + 1))
    scale = (base[:, None] * factors).unsqueeze(-1)
    rounded = (w[:, None] / scale).round()
    best = torch.full_like(base, float("inf"))
    for zero_point in zero_points:
        codes = (rounded + zero_point).clamp(args.quant_min, args.quant_max) - zero_point
        best = torch.minimum(best, (codes * scale - w[:, None]).square().sum(-1).amin(-1))
    return best


ALLOWED = {  # (group_size, symmetric): {num_bits: total error over that of the best of a dense grid}
    (16, True): {2: 1.02, 3: 1.06, 4: 1.08},
    (32, True): {2: 1.01, 3: 1.02, 4: 1.05, 5: 1.05, 6: 1.06, 7: 1.12, 8: 1.18},
    (128, True): {4: 1.01, 8: 1.08},
    (16, False): {2: 1.04, 3: 1.04, 4: 1.06},
    (32, False): {4: 1.03},
    (128, False): {4: 1.01},
}


@pytest.mark.parametrize(
    ("group_size", "symmetric", "num_bits", "allowed"),
    [(*key, num_bits, allowed) for key, by_width in ALLOWED.items() for num_bits, allowed in by_width.items()],
)
def test_search_is_close_to_brute_force(group_size, symmetric, num_bits, allowed):
    args = QuantArgs(num_bits, symmetric=symmetric, group_size=group_size)
    w = realistic((2048 // group_size, group_size), torch.float32, "normal")
    for signed in (True, False) if symmetric else (True,):
        ours, best = squared_errors(w, *choose_qparams(w, args, signed=signed), args).sum(), brute_force(w, args, signed).sum()
        assert ours <= allowed * best, (signed, float(ours / best))


def test_search_uses_the_full_signed_range():
    args = QuantArgs(4, group_size=32)
    w = realistic((64, 128), torch.float32, "normal")
    scale, _ = choose_qparams(w, args)
    assert 0.3 < float((scale < 0).float().mean()) < 0.7
    q = quantize(w, scale, None, args)
    assert int(q.min()) == -8
    unsigned, _ = choose_qparams(w, args, signed=False)
    assert (unsigned > 0).all()
    assert squared_errors(w, scale, None, args).sum() < 0.95 * squared_errors(w, unsigned, None, args).sum()


@pytest.mark.parametrize("num_bits", range(2, 9))
def test_unsigned_search_never_turns_negative(num_bits):
    for kind in ("normal", "positive", "heavy"):
        for w in (realistic((32, 64), torch.bfloat16, kind), -realistic((32, 64), torch.bfloat16, kind)):
            assert (choose_qparams(w, QuantArgs(num_bits, group_size=16), signed=False)[0] > 0).all()


@pytest.mark.parametrize("num_bits", range(2, 9))
def test_asymmetric_search(num_bits):
    args = QuantArgs(num_bits, symmetric=False, group_size=32)
    for w in (special_weight(torch.bfloat16), special_weight(torch.bfloat16) + 3, special_weight(torch.bfloat16) - 3):
        scale, zero_point = choose_qparams(w, args)
        assert zero_point is not None and zero_point.dtype == torch.int8 and zero_point.shape == scale.shape
        assert int(zero_point.min()) >= args.quant_min and int(zero_point.max()) <= args.quant_max
        restored = dequantize(quantize(torch.zeros_like(w).float(), scale.float(), zero_point, args), scale, zero_point, args)
        assert (restored == 0).all()  # zero is exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bits", range(2, 9))
def test_constant_groups_are_nearly_exact(num_bits, dtype):
    w = torch.tensor([[0.0], [0.3], [-0.3], [0.02], [-7.0]]).expand(5, 64).to(dtype)
    for symmetric in (True, False):
        args = QuantArgs(num_bits, symmetric=symmetric, group_size=32)
        scale, zero_point = choose_qparams(w, args)
        restored = dequantize(quantize(w.float(), scale.float(), zero_point, args), scale, zero_point, args)
        assert torch.isfinite(scale).all() and (scale != 0).all()
        tolerance = torch.finfo(dtype).eps * w.float().abs() + torch.finfo(dtype).smallest_normal * 2**-9
        assert ((restored.float() - w.float()).abs() <= tolerance).all(), symmetric


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 48, -1])
def test_chunks_do_not_change_the_search(symmetric, group_size, monkeypatch):
    args = QuantArgs(4, symmetric=symmetric, group_size=group_size)
    w = realistic((12, 96), torch.bfloat16, "heavy")
    expected = choose_qparams(w, args)
    for values in (97, 500, 96 * 7):
        monkeypatch.setitem(numerics._CHUNK_VALUES, "cpu", values)
        found = choose_qparams(w, args)
        assert torch.equal(found[0], expected[0]), values
        assert symmetric or torch.equal(found[1], expected[1]), values


def test_search_is_deterministic_and_leaves_the_weight_alone():
    for dtype in DTYPES:
        for symmetric in (True, False):
            w = special_weight(dtype)
            before = w.clone()
            args = QuantArgs(4, symmetric=symmetric, group_size=32)
            first, second = choose_qparams(w, args), choose_qparams(w, args)
            q = quantize(w, *first, args)
            dequantize(q, *first, args)
            assert torch.equal(first[0], second[0]) and torch.equal(w, before)
            assert symmetric or torch.equal(first[1], second[1])


def test_strides_and_empty_weights():
    args = QuantArgs(4, group_size=32)
    wide = realistic((128, 64), torch.float32, "normal")
    assert torch.equal(choose_qparams(wide.t(), args)[0], choose_qparams(wide.t().contiguous(), args)[0])
    scale, _ = choose_qparams(wide[:0], args)
    assert scale.shape == (0, 2) and quantize(wide[:0], scale, None, args).shape == (0, 64)


def test_nf4_is_dequantized_here_and_quantized_elsewhere():
    args = QuantArgs(4, "nf", group_size=16)
    q = torch.arange(16, dtype=torch.int8).repeat(3)[:42].view(6, 7)  # the third block is not full
    scale = torch.tensor([1.0, 2.0, 4.0])[:, None]
    assert scale_shape((6, 7), args) == (3, 1)
    weight = dequantize(q, scale, None, args)
    expected = torch.cat([nf4.LEVELS, nf4.LEVELS * 2, nf4.LEVELS[:10] * 4])
    assert torch.equal(weight.flatten(), expected) and weight.shape == (6, 7)
    assert dequantize(q, scale, None, args, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(from_groups(to_groups(weight, args), args, (6, 7)), weight)
    for call in (lambda: quantize(weight, scale, None, args), lambda: choose_qparams(weight, args)):
        with pytest.raises(ValueError, match=r"type='nf' is quantized by torchq\.kernels\.nf4; call torchq\.algorithms\.rtn"):
            call()
