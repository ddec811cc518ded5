import pytest
import torch
from torch import nn

from torchq.folding import (
    Consumer,
    FoldPair,
    Producer,
    column_scale,
    divide_producer_,
    fold_,
    multiply_consumer_,
    weight_and_bias,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scales(size, seed=1):
    return torch.exp(random(size, seed=seed))


def holding(**parameters):
    """A module with one submodule ``m`` that holds these parameters."""
    model = nn.Module()
    model.m = nn.Module()
    for name, value in parameters.items():
        model.m.register_parameter(name, nn.Parameter(value))
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "offset"), [("norm", 0.0), ("offset_norm", 1.0)])
def test_rounding_a_norm_costs_nothing(kind, offset, dtype):
    model = holding(weight=random(64).to(dtype), bias=random(64, seed=2).to(dtype))
    before, bias = model.m.weight.double() + offset, model.m.bias.detach().float().clone()
    scale = scales(64)
    effective = divide_producer_(model, Producer("m", kind, 64), scale)
    after = model.m.weight.double() + offset
    torch.testing.assert_close(after * effective, before, rtol=1e-6, atol=0.0)
    assert model.m.weight.dtype == dtype
    rounding = torch.finfo(dtype).eps * (1 + offset * (before.abs() + scale) / before.abs())  # of the weight, as seen in the gain
    assert ((effective / scale - 1).abs() <= 2 * rounding).all()
    assert torch.equal(model.m.bias, (bias / effective).to(dtype))
    assert dtype == torch.float32 or not torch.allclose(effective, scale, rtol=1e-5)


def test_a_channel_that_would_round_to_zero_stays():
    model = holding(weight=torch.tensor([-0.9375, 0.0]).bfloat16(), bias=torch.ones(2).bfloat16())
    effective = divide_producer_(model, Producer("m", "offset_norm", 2), torch.tensor([1000.0, 2.0]))  # gain 1/16 -> 6e-5
    assert effective.tolist() == [1.0, 2.0]
    assert model.m.weight.tolist() == [-0.9375, -0.5]
    assert model.m.bias.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_linear_are_divided_and_no_others(dtype):
    model = holding(weight=random(8, 5).to(dtype), bias=random(8, seed=2).to(dtype))
    weight, bias = model.m.weight.detach().float().clone(), model.m.bias.detach().float().clone()
    rows, scale = torch.tensor([1, 4, 5]), scales(3)
    assert torch.equal(divide_producer_(model, Producer("m", "linear", 3, rows=rows), scale), scale)
    weight[rows] /= scale[:, None]
    bias[rows] /= scale
    assert torch.equal(model.m.weight, weight.to(dtype))
    assert torch.equal(model.m.bias, bias.to(dtype))


def test_channels_may_be_on_any_axis():
    model = holding(weight=random(4, 6))
    before, scale = model.m.weight.clone(), scales(6)
    divide_producer_(model, Producer("m", "linear", 6, axis=1), scale)
    assert torch.equal(model.m.weight, before / scale)

    model = holding(experts=random(3, 4, 6))
    before, scale = model.m.experts.clone(), scales(4)
    multiply_consumer_(model, Consumer("m.experts", axis=1), scale)
    assert torch.equal(model.m.experts, before * scale[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_multiplied_by_the_channels_they_read(dtype):
    model = holding(weight=random(3, 5).to(dtype))
    before, scale = model.m.weight.detach().float().clone(), torch.tensor([2.5, 3.3])
    consumer = Consumer("m", channels=torch.tensor([1, 0, 0, -1, 1]))
    assert torch.equal(column_scale(consumer, scale), torch.tensor([3.3, 2.5, 2.5, 1.0, 3.3]))
    multiply_consumer_(model, consumer, scale)
    assert torch.equal(model.m.weight, (before * torch.tensor([3.3, 2.5, 2.5, 1.0, 3.3])).to(dtype))


def test_a_16_bit_norm_and_its_consumer_compute_what_they_did():
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16))
    with torch.no_grad():
        model[0].weight.copy_(random(32))
    model[0].bfloat16()  # the norm alone: the consumer's own rounding is not what this is about
    pair = FoldPair(Producer("0", "norm", 32), (Consumer("1"),), error=0.0)
    x = random(4, 32, seed=3)

    def output():
        norm = model[0]
        y = nn.functional.layer_norm(x, (32,), norm.weight.float(), norm.bias.float())
        return model[1](y)

    before = output()
    effective = fold_(model, pair, scales(32))
    torch.testing.assert_close(output(), before, rtol=1e-5, atol=1e-5)
    assert not torch.equal(effective, scales(32))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"scale must have shape \(4,\) for 0, got \(3,\)"),
        (torch.tensor([1.0, 0.0, 1.0, 1.0]), "scale must be positive and finite for 0, got values from 0"),
        (torch.tensor([1.0, float("inf"), 1.0, 1.0]), "scale must be positive and finite for 0, got values from 1.0 to inf"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), "scale must be positive and finite for 0"),
    ],
)
def test_bad_scales_are_refused(scale, message):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=message):
        fold_(model, FoldPair(Producer("0", "norm", 4), (Consumer("1"),), error=0.0), scale)
    assert (model[0].weight == 1).all()


def test_nothing_is_changed_if_a_consumer_is_missing():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="'2' is neither a module with a weight nor a parameter of the Sequential"):
        fold_(model, FoldPair(Producer("0", "norm", 4), (Consumer("1"), Consumer("2")), error=0.0), torch.full((4,), 2.0))
    assert (model[0].weight == 1).all()


def test_names_of_modules_and_of_parameters():
    model = holding(weight=random(2, 2), experts=random(2, 2, 2))
    assert weight_and_bias(model, "m")[0] is model.m.weight
    assert weight_and_bias(model, "m.experts") == (model.m.experts, None)
    with pytest.raises(ValueError, match=r"did you mean m\?"):
        weight_and_bias(model, "mm")
