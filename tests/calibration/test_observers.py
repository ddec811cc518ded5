"""Scales of static activations: of given values by hand, and of a model from what hooks see in it."""

import copy
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

from torchq import QuantArgs, QuantConfig, QuantLinear, Scheme, load_pretrained, quantize_, save_pretrained
from torchq.calibration.data import CalibrationData
from torchq.calibration.observers import fake_quantize, static_qparams
from torchq.testing import tiny_llama

INT8, ASYM, FP8 = (
    QuantArgs(8, strategy="tensor"), QuantArgs(8, strategy="tensor", symmetric=False), QuantArgs(8, "float", strategy="tensor")
)  # fmt: skip
KINDS = {"int8": INT8, "int8-asym": ASYM, "fp8": FP8}
STATIC_INT8 = Scheme(QuantArgs(8, strategy="channel"), INT8, name="static int8")
STATIC_ASYM = Scheme(QuantArgs(8, strategy="channel"), ASYM, name="static asymmetric int8")
SCHEMES = {"fp8": "FP8", "int8": STATIC_INT8, "int8-asym": STATIC_ASYM}
PREFIX = "model.layers.0."
MERGED = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qparams(x, args, observer):
    return static_qparams(args, x.amin(0), x.amax(0), x, observer)


def squared_error(x, args, observer):
    return float((fake_quantize(x.clone(), args, *qparams(x, args, observer)) - x).square().sum())


# --------------------------------------------------------------------------------------------------------- of given values


def test_the_whole_range_by_hand():
    x = torch.tensor([[-3.0, 1.0], [2.0, 0.5]])
    for args, limit in ((INT8, 127.0), (FP8, 448.0)):
        scale, zero = qparams(x, args, "minmax")
        assert scale.tolist() == [torch.tensor(3.0).div(limit).item()] and zero is None
    scale, zero = qparams(x, ASYM, "minmax")  # [-3, 2] in 255 steps; -3 is code -128
    assert scale.item() == pytest.approx(5 / 255) and zero.tolist() == [-128 + 153] and zero.dtype == torch.int8
    assert fake_quantize(x.clone(), ASYM, scale, zero).tolist()[0][0] == pytest.approx(-3.0)


@pytest.mark.parametrize(
    ("low", "high", "scale", "zero"),
    [(0.0, 2.55, 0.01, -128), (-2.55, 0.0, 0.01, 127), (1.0, 2.55, 0.01, -128), (-2.55, -1.0, 0.01, 127), (-1.28, 1.27, 0.01, 0)],
)
def test_the_range_of_an_asymmetric_scale_holds_zero(low, high, scale, zero):
    found, point = static_qparams(ASYM, torch.tensor([low]), torch.tensor([high]), torch.empty(0, 1), "minmax")
    assert found.item() == pytest.approx(scale) and point.item() == zero


@pytest.mark.parametrize("args", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("power", [1, 3])
def test_mse_never_has_more_error_than_minmax(args, power):
    for seed in range(5):
        x = random(200, 16, seed=seed) ** power + (2.0 if seed % 2 else 0.0)
        assert squared_error(x, args, "mse") <= squared_error(x, args, "minmax")
    x = random(2000, 64)
    if args.type == "int":  # more of fp8's values are small ones
        assert squared_error(x, args, "mse") < squared_error(x, args, "minmax")
    assert qparams(x, args, "mse")[0] <= qparams(x, args, "minmax")[0]


@pytest.mark.parametrize("args", KINDS.values(), ids=KINDS.keys())
def test_a_percentage_clips_that_much(args):
    x = random(1000, 10)
    for percentage in (90, 99.0, 99.9):
        scale, zero = qparams(x, args, percentage)
        low, high = (-127, 127) if args.symmetric else (-128 - zero.item(), 127 - zero.item())
        limit = 448.0 if args.type == "float" else high
        reach = scale.item() * limit
        outside = (x.abs() > reach * (1 + 1e-6)) if args.symmetric else (x > reach * 1.01) | (x < scale.item() * low * 1.01)
        share = (100 - percentage) / 100 * (1 if args.symmetric else 2)  # of each side
        assert outside.float().mean() == pytest.approx(share, rel=0.15, abs=2e-4)
    whole = qparams(x, args, 100)
    assert torch.equal(whole[0], qparams(x, args, "minmax")[0])


@pytest.mark.parametrize("args", KINDS.values(), ids=KINDS.keys())
def test_one_outlier_is_clipped_by_percentage_and_not_by_minmax(args):
    x = random(500, 16)
    x[17, 3] = 1000.0
    assert fake_quantize(x.clone(), args, *qparams(x, args, "minmax"))[17, 3] == pytest.approx(1000, rel=0.01)
    assert fake_quantize(x.clone(), args, *qparams(x, args, 99.9))[17, 3] < 10
    assert fake_quantize(x.clone(), args, *qparams(x, args, "mse"))[17, 3] > 200  # it counts for more than all the others


@pytest.mark.parametrize("observer", ["mse", "minmax", 99.9])
@pytest.mark.parametrize("args", KINDS.values(), ids=KINDS.keys())
def test_zeros_only(args, observer):
    x = torch.zeros(10, 4)
    scale, zero = qparams(x, args, observer)
    assert scale > 0 and torch.equal(fake_quantize(x, args, scale, zero), x)
    assert torch.isfinite(fake_quantize(torch.ones(1, 4), args, scale, zero)).all()


def test_values_that_the_sample_lacks_count_for_minmax():
    x = random(50, 8)
    for observer, expected in (("minmax", 20.0), ("mse", 20.0), (99.0, 3.0)):
        scale, _ = static_qparams(INT8, torch.full((8,), -20.0), torch.full((8,), 1.0), x, observer)
        assert scale.item() * 127 <= expected * 1.001
        assert observer != "minmax" or scale.item() == pytest.approx(20 / 127)


def test_extremes_that_the_sample_lacks_count_for_mse_as_what_they_are_among_all_tokens():
    x, low, high = random(100, 8), torch.full((8,), -3.0), torch.tensor([9.0] + [3.0] * 7)
    reach = [static_qparams(INT8, low, high, x, "mse", num_tokens)[0].item() * 127 for num_tokens in (None, 100, 10**7)]
    assert reach[0] == reach[1] == pytest.approx(9.0, rel=0.05)
    assert reach[2] < 4.5


# ------------------------------------------------------------------------------------------------------------- of a model


def ids(rows=8, length=24):
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(0))


def data():
    return CalibrationData(ids(), max_length=24, holdout=0.25)


@torch.no_grad()
def ranges(model):
    """Name -> least and greatest input value of each Linear, of all calibration tokens."""
    found = {}

    def watch(name):
        return lambda module, args: found.update({name: (args[0].min().item(), args[0].max().item())})

    handles = [m.register_forward_pre_hook(watch(name)) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    model(ids())
    for handle in handles:
        handle.remove()
    return found


def layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def quantized(kind, observer="minmax", dtype=torch.float32, **settings):
    model = tiny_llama(dtype=dtype)
    base = copy.deepcopy(model)
    config = QuantConfig(
        SCHEMES[kind], observer=observer, propagate="float", calibration_dtype="model", algorithm="rtn", **settings
    )
    report = quantize_(model, config, calibration=data())
    assert report.warnings == []
    return base, model


@pytest.mark.parametrize("kind", SCHEMES)
def test_input_scales_are_those_of_what_hooks_see(kind):
    base, model = quantized(kind)
    seen = ranges(base)
    assert len(layers(model)) == 14
    for name, layer in layers(model).items():
        low, high = seen[name]
        tensors = layer.canonical_tensors()
        assert tensors["input_scale"].shape == (1,)
        if kind == "int8-asym":
            scale = (high - low) / 255
            assert tensors["input_zero_point"].item() == round(-128 - low / tensors["input_scale"].item())
        else:
            scale = max(high, -low) / (448 if kind == "fp8" else 127)
            assert "input_zero_point" not in tensors
        assert tensors["input_scale"].item() == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize("observer", ["mse", "minmax", 99.5])
@pytest.mark.parametrize("kind", SCHEMES)
def test_layers_that_vllm_merges_share_their_scales(kind, observer):
    _, model = quantized(kind, observer)
    names = ["input_scale"] + (["weight_scale"] if kind == "fp8" else [])
    if kind == "int8-asym":
        names.append("input_zero_point")
    for group in MERGED:
        for name in names:
            first, *others = (model.get_submodule(PREFIX + layer).canonical_tensors()[name] for layer in group)
            assert all(torch.equal(first, other) for other in others)


def test_a_weight_scale_per_tensor_is_that_of_all_merged_layers():
    base, model = quantized("fp8")
    for group in (
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ):
        largest = max(base.get_submodule(PREFIX + name).weight.abs().max().item() for name in group)
        for name in group:
            assert model.get_submodule(PREFIX + name).weight_scale.item() == pytest.approx(largest / 448, rel=1e-6)


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_packed_layer_computes_what_the_reference_does(kind):
    _, model = quantized(kind)
    args = {"fp8": FP8, "int8": INT8, "int8-asym": ASYM}[kind]
    x = 2 * random(5, 64)  # beyond what calibration has seen, too
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"):
        layer = model.get_submodule(PREFIX + name)
        tensors = layer.canonical_tensors()
        rounded = fake_quantize(x.clone(), args, tensors["input_scale"], tensors.get("input_zero_point"))
        expected = rounded.double() @ layer.dequantize().double().t()
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SCHEMES)
def test_saved_and_loaded(kind, dtype, tmp_path):
    _, model = quantized(kind, "mse", dtype)
    with torch.no_grad():
        logits = model(ids(2)).logits
    save_pretrained(model, tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out")
    for name, layer in layers(model).items():
        theirs = layers(loaded)[name].canonical_tensors()
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in layer.canonical_tensors().items())
        assert theirs["input_scale"].dtype == dtype
    loaded.model.rotary_emb = model.model.rotary_emb  # tiny_llama has it in bfloat16
    with torch.no_grad():
        assert torch.equal(loaded(ids(2)).logits, logits)
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        reference(ids(1, 4))  # decompresses
    for name, layer in layers(model).items():
        assert torch.equal(reference.get_submodule(name).weight, layer.dequantize()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", SCHEMES)
def test_inputs_that_are_always_zero(kind, dtype):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.a(x) + self.b(0 * x)

    model = Half().to(dtype)
    batches = [{"x": random(2, 8, 16, seed=seed).to(dtype)} for seed in range(3)]
    with torch.no_grad():
        expected = model(batches[0]["x"]).float()
        quantize_(model, QuantConfig(SCHEMES[kind], ignore=[], algorithm="rtn"), calibration=batches)
        y = model(batches[0]["x"]).float()
    assert torch.isfinite(y).all() and (y - expected).norm() < 0.1 * expected.norm()
    assert model.b.input_scale > 0


def test_static_schemes_need_calibration_data():
    model = tiny_llama()
    for kind, dynamic in (("fp8", "FP8_DYNAMIC"), ("int8", "W8A8"), ("int8-asym", "W8A8")):
        message = (
            rf"static activation scales, which need calibration data: pass quantize_\(.*or use {dynamic} \(scales at run time\)"
        )
        with pytest.raises(ValueError, match=message):
            quantize_(model, SCHEMES[kind])
    assert not layers(model)


@pytest.mark.parametrize("observer", ["best", 49, 100.5, True, None, float("nan")])
def test_wrong_observers(observer):
    with pytest.raises(ValueError, match="observer must be 'mse', 'minmax' or a percentage from 50 to 100, got"):
        QuantConfig("FP8", observer=observer)


def test_static_scales_cost_little():
    base, errors = tiny_llama(), {}
    with torch.no_grad():
        logits = base(ids()).logits
        for kind in SCHEMES:
            for observer in ("mse", "minmax"):
                model = quantized(kind, observer)[1]
                errors[kind, observer] = ((model(ids()).logits - logits).norm() / logits.norm()).item()
    assert all(error < 0.2 for error in errors.values()), errors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantized("fp8", 99.99)
