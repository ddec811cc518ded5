"""Round-to-nearest: chunks change nothing, the error it reports is the true one, and its argument stays as it was."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization import quantize as ct_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from torchq import numerics
from torchq.algorithms import rtn
from torchq.algorithms.rtn import RTN, quantize_weight
from torchq.scheme import SCHEMES, QuantArgs, Scheme, resolve_scheme

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INT8_TENSOR = Scheme(QuantArgs(8, strategy="tensor"), QuantArgs(8, strategy="token", dynamic=True), "int8 tensor")
FP8_BLOCK = Scheme(QuantArgs(8, "float", strategy="block", block_structure=(16, 32)), name="fp8 block")
FP8_TENSOR = Scheme(QuantArgs(8, "float", strategy="tensor"), name="fp8 tensor")
CASES = [
    *(resolve_scheme(f"W{num_bits}A16{suffix}", 32) for num_bits in (2, 3, 4, 8) for suffix in ("", "_ASYM")),
    resolve_scheme("W4A16", -1),
    resolve_scheme("W4A16_ASYM", -1),
    SCHEMES["W8A8"],
    INT8_TENSOR,
    SCHEMES["FP8_DYNAMIC"],
    FP8_TENSOR,
    FP8_BLOCK,
    SCHEMES["NF4"],
]
IDS = [f"{scheme.name}-{scheme.weights.strategy}" for scheme in CASES]


def example(rows: int = 70, columns: int = 96, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05
    w[3] *= 20
    w[5, :32] = 0
    return w.to(dtype)


def same(first, second) -> bool:
    pairs = ((first.q.view(torch.uint8), second.q.view(torch.uint8)), (first.scale, second.scale))
    zero_points = first.zero_point is None and second.zero_point is None
    return all(torch.equal(a, b) for a, b in pairs) and (zero_points or torch.equal(first.zero_point, second.zero_point))


@pytest.mark.parametrize("scheme", CASES, ids=IDS)
@pytest.mark.parametrize("search", ["mse", "absmax"])
def test_chunks_change_nothing(search, scheme, monkeypatch):
    w = example(columns=90) if scheme is FP8_BLOCK else example()  # 70 and 90: ragged blocks
    expected, expected_error = quantize_weight(w, scheme, RTN(search))
    for values in (1, 96, 96 * 7 + 5, 96 * 40):
        monkeypatch.setattr(rtn, "_CHUNK_VALUES", values)
        found, error = quantize_weight(w, scheme, RTN(search))
        assert same(found, expected), values
        assert error == pytest.approx(expected_error, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", CASES, ids=IDS)
def test_relative_error_and_layout(scheme, dtype):
    w = example(columns=90, dtype=dtype) if scheme is FP8_BLOCK else example(dtype=dtype)
    quantized, error = quantize_weight(w, scheme)
    args = scheme.weights
    assert quantized.q.shape == w.shape and quantized.scheme is scheme
    assert quantized.scale.dtype == (torch.float32 if args.type == "nf" else dtype)
    assert quantized.q.dtype == (torch.float8_e4m3fn if args.type == "float" else torch.int8)
    assert tuple(quantized.scale.shape) == numerics.scale_shape((w.shape[0], w.shape[1]), args)
    assert (quantized.zero_point is None) == args.symmetric
    restored = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, args)
    expected = (restored.double() - w.double()).norm() / w.double().norm()
    assert error == pytest.approx(float(expected), rel=1e-5)
    assert 0 < error < 0.6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", CASES, ids=IDS)
def test_the_weight_is_left_alone(scheme, dtype):
    w = example(dtype=dtype)
    before = w.clone()
    for search in ("mse", "absmax"):
        quantize_weight(w, scheme, RTN(search))
        assert torch.equal(w, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8"])
def test_absmax_is_compressed_tensors_rule(name, dtype):
    scheme = SCHEMES[name] if name == "W8A8" else resolve_scheme(name, 32)
    w = example(dtype=dtype)
    w[5] = w[6]  # no group of zeros: compressed-tensors' zero point there is 0 / 0
    quantized, _ = quantize_weight(w, scheme, RTN("absmax"))
    args = scheme.weights
    ct_args = QuantizationArgs(
        num_bits=args.num_bits, symmetric=args.symmetric, strategy=args.strategy, group_size=args.group_size
    )
    groups = numerics.to_groups(w, args)
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), ct_args)
    assert torch.equal(quantized.scale, scale)
    assert args.symmetric or torch.equal(quantized.zero_point, zero_point)
    assert torch.equal(quantized.q, ct_quantize(w, scale, zero_point, ct_args, dtype=torch.int8))


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8"])
def test_search_beats_absmax(name):
    scheme = SCHEMES[name]
    w = example(64, 256)
    assert quantize_weight(w, scheme)[1] < 0.99 * quantize_weight(w, scheme, RTN("absmax"))[1]


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W3A16"])
def test_the_search_minimises_the_norm_it_is_asked_for(name):
    scheme, w, importance = resolve_scheme(name, 64), example(64, 256, torch.float32) ** 3, torch.linspace(0.1, 2, 256)
    norms = (2.0, 2.5, 3.0, 4.0)
    for weights in (None, importance):
        found = [quantize_weight(w, scheme, RTN(norm=norm), weights)[0] for norm in norms]
        wrong = [numerics.dequantize(f.q, f.scale, f.zero_point, scheme.weights) - w for f in found]
        for index, norm in enumerate(norms):
            errors = [float((e.abs() ** norm * (1 if weights is None else weights)).sum()) for e in wrong]
            assert errors[index] <= 1.005 * min(errors) and errors[index] < max(errors)
        by_default, _ = quantize_weight(w, scheme, importance=weights)
        assert same(by_default, found[2 if weights is None else 0])


def test_scales_are_positive_where_activations_are_quantized():
    assert (quantize_weight(example(), SCHEMES["W8A8"])[0].scale > 0).all()
    assert (quantize_weight(example(), resolve_scheme("W8A16", 32))[0].scale < 0).any()


@pytest.mark.parametrize("magnitude", [1e36, 1e-25, 1e-36])
def test_relative_error_of_huge_and_tiny_weights(magnitude):
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scheme = resolve_scheme("W4A16", 32)
    expected = quantize_weight(w, scheme)[1]
    assert quantize_weight((w.float() * magnitude).bfloat16(), scheme)[1] == pytest.approx(expected, rel=0.05)


def test_zeros_and_no_rows():
    for scheme in CASES:
        quantized, error = quantize_weight(torch.zeros(32, 96), scheme)
        assert error == 0.0
        assert (numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, scheme.weights) == 0).all()
    quantized, error = quantize_weight(torch.empty(0, 96), resolve_scheme("W4A16", 32))
    assert error == 0.0 and quantized.q.shape == (0, 96) and quantized.scale.shape == (0, 3)


def test_strides_do_not_matter():
    wide = example(96, 64, torch.float32)
    for scheme in CASES:
        assert same(quantize_weight(wide.t(), scheme)[0], quantize_weight(wide.t().contiguous(), scheme)[0])


def test_no_gradient_is_recorded():
    w = torch.nn.Parameter(example(dtype=torch.float32))
    quantized, _ = quantize_weight(w, resolve_scheme("W4A16", 32))
    assert not quantized.scale.requires_grad


def test_nf4_of_blocks_that_run_on_over_rows(monkeypatch):
    w = example(columns=91)  # an odd number of values
    expected, expected_error = quantize_weight(w, SCHEMES["NF4"])
    restored = numerics.dequantize(expected.q, expected.scale, None, SCHEMES["NF4"].weights)
    assert expected_error == pytest.approx(float((restored - w.float()).norm() / w.float().norm()), rel=1e-5)
    monkeypatch.setattr(rtn, "_CHUNK_VALUES", 200)
    found, error = quantize_weight(w, SCHEMES["NF4"])
    assert same(found, expected) and error == pytest.approx(expected_error, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found.nested, expected.nested, strict=True))


def test_unknown_search():
    with pytest.raises(ValueError, match="norm must be at least 1 and finite, or None, got 0"):
        RTN(norm=0)
    with pytest.raises(ValueError, match="scale_search must be 'mse' or 'absmax', got 'minmax'"):
        RTN("minmax")


def test_group_size_that_does_not_divide():
    with pytest.raises(ValueError, match="group_size=64 does not divide in_features=96"):
        quantize_weight(example(), resolve_scheme("W4A16", 64))
