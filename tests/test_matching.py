"""What a pattern means: class names, exact names, and re: patterns, as in compressed-tensors."""

import pytest
from torch import nn

from torchq.matching import class_names, first_match, is_conv1d, matches
from torchq.testing import tiny_llama


class Special(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("Linear", "a.b", True),
        ("Special", "a.b", True),
        ("Module", "a.b", False),
        ("object", "a.b", False),
        ("linear", "a.b", False),
        ("a.b", "a.b", True),
        ("a", "a.b", False),
        ("b", "a.b", False),
        ("re:a", "a.b", True),
        ("re:b", "a.b", False),
        ("re:.*b", "a.b", True),
        ("re:.*b$", "a.bc", False),
        (r"re:a\.b$", "axb", False),
        ("re:Linear", "a.b", False),
        ("re:.*mlp.gate", "layers.0.mlp.gate", True),
        ("re:.*mlp.gate", "layers.0.mlp.gate_proj", True),
        ("re:.*mlp.gate$", "layers.0.mlp.gate_proj", False),
    ],
)
def test_matches(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name, Special(2, 2)) is expected


def test_conv1d_is_a_linear() -> None:
    from transformers.pytorch_utils import Conv1D

    assert is_conv1d(Conv1D(4, 4)) and class_names(Conv1D(4, 4)) == {"Conv1D", "Linear"}
    assert not is_conv1d(nn.Conv1d(4, 4, 1)) and "Linear" not in class_names(nn.Conv1d(4, 4, 1))
    assert not is_conv1d(type("Conv1D", (nn.Module,), {})())


def test_first_match_keeps_the_order() -> None:
    patterns = ["re:.*x", "Linear", "a.b"]
    assert first_match(patterns, "a.b", nn.Linear(2, 2)) == "Linear"
    assert first_match(patterns, "a.x", nn.Linear(2, 2)) == "re:.*x"
    assert first_match(patterns, "a.b", nn.ReLU()) == "a.b"
    assert first_match([], "a.b", nn.ReLU()) is None


def test_patterns_mean_what_they_mean_to_compressed_tensors() -> None:
    match_named_modules = pytest.importorskip("compressed_tensors.utils.match").match_named_modules
    model = tiny_llama()
    for patterns in (
        ["Linear"],
        ["re:.*mlp"],
        ["re:.*gate"],
        ["re:model.layers.1"],
        ["lm_head"],
        ["LlamaMLP"],
        ["re:layers"],
        ["re:.*q_proj$"],
    ):
        theirs = {name for name, _ in match_named_modules(model, patterns)}
        ours = {name for name, module in model.named_modules() if first_match(patterns, name, module)}
        assert ours == theirs, patterns
