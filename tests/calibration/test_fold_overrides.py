"""``QuantConfig(folds=...)``: pairs that a user asks for, or leaves out."""

import pytest
import torch

from torchq import QuantConfig, QuantLinear, quantize_
from torchq.report import FoldReport
from torchq.testing import tiny_llama

MLP = "model.layers.0.mlp"


def folds_of(folds: dict[str, list[str] | tuple[str, ...]]) -> list[FoldReport]:
    model = tiny_llama()
    ids = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(0))
    quantize_(model, QuantConfig("W4A16", group_size=32, algorithm="awq", folds=folds), calibration=ids)
    return model.quant_report.folds


def test_a_pair_of_ones_own_takes_the_place_of_what_was_found() -> None:
    own, found = folds_of({f"{MLP}.up_proj": [f"{MLP}.down_proj"]}), folds_of({})
    assert [(fold.producer, fold.consumers, fold.error) for fold in own] == [
        (fold.producer, fold.consumers, fold.error) for fold in found
    ]


@pytest.mark.parametrize("key", ["re:.*up_proj", f"{MLP}.up_proj"])
def test_pairs_are_left_out(key: str) -> None:
    refused = [fold.producer for fold in folds_of({key: ()}) if fold.reason == "left out by folds"]
    assert refused == ([f"{MLP}.up_proj"] if key == f"{MLP}.up_proj" else [f"model.layers.{i}.mlp.up_proj" for i in (0, 1)])


@pytest.mark.parametrize(
    ("folds", "message"),
    [
        ({f"{MLP}.gate_proj": [f"{MLP}.down_proj"]}, r"not linear \(the output changes by 0\.\d+, more than 1e-05\)"),
        ({"model.layers.0.input_layernorm": ["model.layers.0.self_attn.q_proj"]}, r"k_proj, self_attn\.v_proj reads it as well"),
        (
            {f"{MLP}.up_proj": [f"{MLP}.down"]},
            r"mlp\.down' is neither .*did you mean model\.layers\.0\.mlp\.down_proj",
        ),
        ({f"{MLP}.up": [f"{MLP}.down_proj"]}, r"folds: 'model\.layers\.0\.mlp\.up' is neither"),
        ({"re:nothing": ()}, r"folds: 're:nothing' is neither a module with a weight nor a parameter"),
    ],
)
def test_what_is_not_exact_or_not_there_is_an_error_before_anything_changes(folds: dict[str, list[str]], message: str) -> None:
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=message):
        quantize_(model, QuantConfig("W4A16", group_size=32, algorithm="awq", folds=folds), calibration=ids)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"folds: 're:.*' is a pattern, which takes no consumers"):
        QuantConfig("W4A16", folds={"re:.*": ["x"]})
    with pytest.raises(TypeError, match=r"folds\['a'\] must be a list of names or 're:' patterns, got 'b'"):
        QuantConfig("W4A16", folds={"a": "b"})
    with pytest.raises(TypeError, match="folds must map a producer"):
        QuantConfig("W4A16", folds=["a"])
