"""QuantConfig: what it accepts, and an error that names the parameter for the rest."""

import dataclasses

import pytest

from torchq import QuantConfig
from torchq.algorithms.gptq import GPTQ
from torchq.algorithms.rtn import RTN
from torchq.scheme import SCHEMES, QuantArgs, Scheme


def test_defaults():
    config = QuantConfig("W4A16")
    assert config.targets == ("Linear",) and config.ignore == ("lm_head",) and config.overrides == {}
    assert config.resolve() == SCHEMES["W4A16"] and config.recipe(config.resolve(), False) == RTN()


def test_lists_become_tuples():
    config = QuantConfig("W4A16", targets=["Linear", "re:.*fc"], ignore=(name for name in ("lm_head", "re:.*gate$")))
    assert config.targets == ("Linear", "re:.*fc") and config.ignore == ("lm_head", "re:.*gate$")
    assert QuantConfig("W4A16", ignore=[]).ignore == ()


@pytest.mark.parametrize("name", ["targets", "ignore"])
def test_a_string_is_not_a_list(name):
    with pytest.raises(TypeError, match=rf"{name} must be a list of names.*got 'lm_head'; write {name}=\['lm_head'\]"):
        QuantConfig("W4A16", **{name: "lm_head"})


@pytest.mark.parametrize("name", ["targets", "ignore"])
@pytest.mark.parametrize("value", [None, 3])
def test_patterns_must_be_a_list(name, value):
    with pytest.raises(TypeError, match=rf"{name} must be a list of names or 're:' patterns, got {value}; write {name}=\[\]"):
        QuantConfig("W4A16", **{name: value})


@pytest.mark.parametrize("name", ["targets", "ignore"])
def test_patterns_must_be_strings(name):
    with pytest.raises(TypeError, match=f"{name} must hold strings, got 3"):
        QuantConfig("W4A16", **{name: ["Linear", 3]})


@pytest.mark.parametrize("name", ["targets", "ignore", "overrides"])
def test_invalid_regular_expression(name):
    value = {"re:(": "W8A16"} if name == "overrides" else ["re:("]
    with pytest.raises(ValueError, match=rf"{name}: 're:\(' is not a regular expression: missing \)"):
        QuantConfig("W4A16", **{name: value})


def test_no_targets():
    with pytest.raises(ValueError, match=r"targets is empty; use targets=\('Linear',\)"):
        QuantConfig("W4A16", targets=[])


@pytest.mark.parametrize("value", ["lm_head", ["lm_head"], None, 5])
def test_overrides_must_be_a_mapping(value):
    with pytest.raises(TypeError, match=r"overrides must map patterns to schemes or None, got .*write \{'lm_head': 'W8A16'\}"):
        QuantConfig("W4A16", overrides=value)


def test_override_keys_must_be_strings():
    with pytest.raises(TypeError, match="overrides must hold strings, got 3"):
        QuantConfig("W4A16", overrides={3: "W8A16"})


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("W3", ValueError, r"overrides\['re:.\*down'\]: scheme='W3' is unknown"),
        ("NVFP4", NotImplementedError, r"overrides\['re:.\*down'\]: scheme='NVFP4' is not supported yet; supported:"),
        (4, TypeError, r"overrides\['re:.\*down'\]: scheme must be a name or a torchq.scheme.Scheme, got int"),
    ],
)
def test_wrong_scheme_in_overrides(value, error, message):
    with pytest.raises(error, match=message):
        QuantConfig("W4A16", overrides={"lm_head": "W8A16", "re:.*down": value})


def test_group_size_and_symmetric():
    assert QuantConfig("w4a16", group_size=64, symmetric=False).resolve().weights == QuantArgs(4, symmetric=False, group_size=64)
    assert QuantConfig("W4A16", group_size=-1).resolve().weights == QuantArgs(4, strategy="channel")
    scheme = Scheme(QuantArgs(5, group_size=32))
    assert QuantConfig(scheme).resolve() == scheme
    assert QuantConfig(scheme, group_size=64).resolve().weights == QuantArgs(5, group_size=64)


def test_group_size_of_overrides():
    own = Scheme(QuantArgs(8, group_size=32))
    overrides = {"a": "W8A16", "b": "FP8_DYNAMIC", "c": None, "d": own, "e": "w3a16_asym"}
    config = QuantConfig("W4A16", group_size=64, overrides=overrides)
    assert config.resolve_override("a").weights == QuantArgs(8, group_size=64)
    assert config.resolve_override("b") == SCHEMES["FP8_DYNAMIC"]  # has no groups
    assert config.resolve_override("c") is None
    assert config.resolve_override("d") == own  # a Scheme keeps its own
    assert config.resolve_override("e").weights == QuantArgs(3, symmetric=False, group_size=64)
    assert QuantConfig("W4A16", overrides=overrides).resolve_override("a") == SCHEMES["W8A16"]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"scheme": "W4A61"}, ValueError, r"scheme='W4A61' is unknown; did you mean 'W4A16'\?"),
        ({"scheme": "mxfp4"}, NotImplementedError, r"scheme='mxfp4' is not supported yet; supported: W2A16"),
        ({"scheme": None}, TypeError, r"scheme must be a name or a torchq.scheme.Scheme, got NoneType"),
        ({"group_size": 0}, ValueError, r"group_size must be positive"),
        ({"group_size": "64"}, TypeError, r"group_size must be an integer, got '64'"),
        ({"scheme": "W8A8", "group_size": 64}, ValueError, r"group_size=64 does not apply to scheme W8A8"),
        ({"scheme": "FP8", "symmetric": False}, ValueError, r"type='float' is always symmetric"),
        ({"recompute": "yes"}, ValueError, r"recompute must be True, False or None, got 'yes'"),
        ({"algorithm": "hqq"}, ValueError, r"algorithm='hqq' is unknown; supported: .*'rtn', 'gptq', .*\), RTN\(...\), GPTQ"),
        ({"algorithm": "smoothqant"}, ValueError, r"algorithm='smoothqant' is unknown; did you mean 'smoothquant'\?"),
        ({"algorithm": ["gptq", "awq"]}, ValueError, r"one of each in this order, got \['GPTQ', 'AWQ'\]"),
        ({"algorithm": ["awq", "smoothquant"]}, ValueError, r"one of each in this order, got \['AWQ', 'SmoothQuant'\]"),
        ({"algorithm": []}, ValueError, r"one of each in this order, got \[\]"),
        ({"algorithm": ["auto", "gptq"]}, ValueError, r"algorithm='auto' is unknown; .*one that scales, one that rounds"),
        ({"calibration_dtype": "int8"}, ValueError, r"calibration_dtype must be one of .*'bfloat16'\), got 'int8'"),
        ({"propagate": "both"}, ValueError, r"propagate must be one of \('true_sequential', 'float'\), got 'both'"),
        (
            {"algorithm": None},
            TypeError,
            r"algorithm must be one of .*AWQ\(...\) or SmoothQuant\(...\), got NoneType",
        ),
        ({"kv_cache": "int8"}, ValueError, r"kv_cache must be None or one of \('fp8', 'fp8_head'\), got 'int8'"),
    ],
)
def test_wrong_settings(kwargs, error, message):
    with pytest.raises(error, match=message):
        QuantConfig(**{"scheme": "W4A16", **kwargs})


@pytest.mark.parametrize(
    ("algorithm", "scheme", "calibrated", "expected"),
    [
        ("auto", "W4A16", False, RTN()),
        ("auto", "W4A16", True, GPTQ()),
        ("auto", "W8A8", True, GPTQ()),
        ("auto", "FP8_DYNAMIC", True, RTN()),
        ("rtn", "W4A16", True, RTN()),
        ("RTN", "W4A16", False, RTN()),
        ("GPTQ", "W4A16", True, GPTQ()),
        (RTN("absmax"), "W4A16", True, RTN("absmax")),
        (GPTQ(0.1), "W4A16", True, GPTQ(0.1)),
    ],
)
def test_algorithm(algorithm, scheme, calibrated, expected):
    config = QuantConfig(scheme, algorithm=algorithm)
    assert config.recipe(config.resolve(), calibrated) == expected


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantConfig("W4A16").group_size = 32


def test_changing_the_callers_dict_later_changes_nothing():
    overrides = {"lm_head": "W8A16"}
    config = QuantConfig("W4A16", overrides=overrides)
    overrides["lm_head"] = "nonsense"
    assert config.overrides == {"lm_head": "W8A16"}
