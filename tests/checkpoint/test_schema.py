"""quantization_config: what is written is what compressed-tensors reads; what is read is understood, or refused by name."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from torchq import QuantArgs, Scheme
from torchq.checkpoint.schema import ParsedConfig, SchemeGroup, read_config, write_config
from torchq.scheme import SCHEMES, resolve_scheme

FP8_WEIGHT_ONLY = Scheme(QuantArgs(8, "float", strategy="channel"))
INT8_STATIC = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor", symmetric=False))
ALL = {
    **{name: scheme for name, scheme in SCHEMES.items() if scheme.format != "nf4"},  # which compressed-tensors does not have
    "W4A16-g32": resolve_scheme("W4A16", 32),
    "W4A16-channel": resolve_scheme("W4A16", -1),
    "FP8_WEIGHT_ONLY": FP8_WEIGHT_ONLY,
    "INT8_STATIC": INT8_STATIC,
}


def same(a: Scheme | None, b: Scheme | None) -> bool:
    return a is not None and b is not None and (a.weights, a.input_activations) == (b.weights, b.input_activations)


@pytest.mark.parametrize("name", ALL)
def test_every_scheme_is_written_and_read_back(name: str) -> None:
    config = json.loads(json.dumps(write_config({"a.b": ALL[name], "a.c": ALL[name]}, ["lm_head"])))
    parsed = read_config(config)
    assert same(parsed.scheme_for("a.b", {"Linear"}), ALL[name])
    assert parsed.scheme_for("lm_head", {"Linear"}) is None
    assert config["format"] == ALL[name].format == config["config_groups"]["group_0"]["format"]


@pytest.mark.parametrize("name", ALL)
def test_compressed_tensors_accepts_it_and_infers_the_same_format(name: str) -> None:
    """Readers forbid unknown fields inside a group, so validation is the test of every name in it."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    written = write_config({"a.b": ALL[name]}, ["lm_head"])
    config = quantization.QuantizationConfig.model_validate(written)
    group = config.config_groups["group_0"]
    scheme = ALL[name]
    weights, acts = scheme.weights, scheme.input_activations
    assert (group.weights.num_bits, group.weights.type, group.weights.symmetric) == (
        weights.num_bits, weights.type, weights.symmetric,
    )  # fmt: skip
    assert group.weights.strategy == weights.strategy and group.weights.group_size == weights.group_size
    assert group.weights.block_structure == (list(weights.block_structure) if weights.block_structure else None)
    assert (group.input_activations is None) == (acts is None)
    if acts is not None:
        assert group.input_activations.dynamic is acts.dynamic
        assert (group.input_activations.strategy, group.input_activations.group_size) == (acts.strategy, acts.group_size)
    assert group.format == scheme.format and config.ignore == ["lm_head"]
    assert config.quantization_status == "compressed"
    infer = pytest.importorskip("compressed_tensors.compressors.format").infer_module_format
    if name == "W4AFP8":  # left to itself it would unpack it, which vLLM does not read
        assert infer(nn.Linear, group.model_copy(update={"format": None})).value == "int-quantized"
        return
    assert str(infer(nn.Linear, group.model_copy(update={"format": None})).value) == scheme.format


def test_two_formats_are_mixed_precision_with_a_format_in_each_group() -> None:
    schemes = {"a.q": ALL["FP8_DYNAMIC"], "a.up": ALL["W4A16"], "a.down": ALL["W4A16"], "a.o": ALL["W8A16"]}
    config = write_config(schemes, ["a.k"])
    assert config["format"] == "mixed-precision"
    groups = list(config["config_groups"].values())
    assert [group["targets"] for group in groups] == [["Linear"], ["a.q"], ["a.o"]]
    assert [group["format"] for group in groups] == ["pack-quantized", "float-quantized", "pack-quantized"]
    parsed = read_config(config)
    assert all(same(parsed.scheme_for(name, {"Linear"}), scheme) for name, scheme in schemes.items())
    assert parsed.scheme_for("a.k", {"Linear"}) is None
    pytest.importorskip("compressed_tensors.quantization").QuantizationConfig.model_validate(config)


def test_one_format_in_two_groups_keeps_its_name() -> None:
    assert write_config({"a": ALL["W4A16"], "b": ALL["W8A16"]}, [])["format"] == "pack-quantized"


def test_schemes_that_differ_in_name_only_are_one_group() -> None:
    scheme = resolve_scheme("W4A16")
    config = write_config({"a": scheme, "b": Scheme(scheme.weights, name="mine")}, [])
    assert len(config["config_groups"]) == 1


def test_a_quantized_head_is_a_target_of_its_own() -> None:
    """vLLM's head is no Linear to it."""
    config = write_config({"lm_head": ALL["W8A16"], "a.b": ALL["W8A16"]}, [])
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    config = write_config({"lm_head": ALL["W8A16"], "a.b": ALL["W4A16"], "a.c": ALL["W4A16"]}, [])
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"], ["lm_head"]]


def test_nothing_that_readers_forbid_is_written() -> None:
    for scheme in ALL.values():
        config = write_config({"a": scheme}, [])
        group = config["config_groups"]["group_0"]
        assert group.keys() == {"targets", "weights", "input_activations", "output_activations", "format"}
        known = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "block_structure"}
        assert set(group["weights"]) <= known and set(group["input_activations"] or {}) <= known
        assert config["sparsity_config"] == {} == config["transform_config"]


# ---------------------------------------------------------------------------------------------------------------- matching


def group(scheme: str, *targets: str) -> SchemeGroup:
    return SchemeGroup(targets, SCHEMES[scheme])


def test_an_exact_name_goes_before_a_pattern_and_that_before_a_class() -> None:
    config = ParsedConfig(
        (group("W4A16", "Linear"), group("W8A16", "re:.*q_proj"), group("W8A8", "a.q_proj"), group("FP8_DYNAMIC", "re:.*proj")),
        ("a.k_proj", r"re:.*mlp\.gate$", "Special"),
    )
    found = {
        name: None if (scheme := config.scheme_for(name, {"Linear"})) is None else scheme.name
        for name in ("a.q_proj", "b.q_proj", "b.v_proj", "b.other", "a.k_proj", "a.mlp.gate", "a.mlp.gate_proj")
    }
    assert found == {
        "a.q_proj": "W8A8",
        "b.q_proj": "W8A16",
        "b.v_proj": "FP8_DYNAMIC",
        "b.other": "W4A16",
        "a.k_proj": None,
        "a.mlp.gate": None,
        "a.mlp.gate_proj": "FP8_DYNAMIC",
    }
    assert config.scheme_for("x", {"Linear", "Special"}) is None
    assert config.scheme_for("x", {"Embedding"}) is None


def test_matching_agrees_with_compressed_tensors(golden: Path) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    linear, names = nn.Linear(1, 1), ("lm_head", "a.q_proj", "a.gate", "a.gate_proj", "b", "Linear")
    for targets in (["Linear"], ["re:.*gate"], ["a.gate"], ["re:a", "Linear"], ["re:.*", "a.q_proj"], ["re:gate"]):
        config = ParsedConfig(tuple(SchemeGroup((t,), SCHEMES["W8A8"]) for t in targets), ())
        for name in names:
            theirs = match.match_targets(name, linear, targets)
            assert (config.scheme_for(name, {"Linear"}) is not None) == bool(theirs)


# ----------------------------------------------------------------------------------------------------------------- reading


def test_every_reference_is_read(golden: Path) -> None:
    found = {}
    for folder in sorted(golden.iterdir()):
        settings = json.loads((folder / "config.json").read_text()).get("quantization_config")
        if settings is not None:
            found[folder.name] = [scheme_group.scheme.name for scheme_group in read_config(settings).groups]
    assert found == {
        "fp8-block": ["FP8_BLOCK"],
        "fp8-dynamic": ["FP8_DYNAMIC"],
        "fp8-static": ["FP8"],
        "fp8-weight-only": ["FP8_WEIGHT_ONLY"],
        "gptq-w4a16-g64": ["W4A16"],
        "mixed-fp8-attn-w4a16-mlp": ["FP8_DYNAMIC", "W4A16"],
        "w3a16-g64": ["W3A16"],
        "w4a16-asym-channel": ["W4A16_ASYM"],
        "w4a16-asym-g64": ["W4A16_ASYM"],
        "w4a16-channel": ["W4A16"],
        "w4a16-g128": ["W4A16"],
        "w4a16-g64": ["W4A16"],
        "w4a16-g64-fp16": ["W4A16"],
        "w8a16-channel": ["W8A16"],
        "w8a16-g128": ["W8A16"],
        "w8a8": ["W8A8"],
    }


def config_with(
    weights: dict[str, Any] | None = None, activations: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    config = write_config({"a": SCHEMES["W4A16"]}, ["lm_head"])
    scheme_group = config["config_groups"]["group_0"]
    scheme_group["weights"] |= weights or {}
    if activations is not None:
        scheme_group["input_activations"] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True} | activations
    scheme_group.pop("format")
    config.pop("format")
    return config | fields


MX = {"group_size": 32, "type": "float", "scale_dtype": "torch.uint8"}
HEAD = {"num_bits": 8, "type": "float", "strategy": "attn_head", "group_size": None}
KV, R1 = {"num_bits": 8, "type": "float", "strategy": "tensor"}, {"config_groups": {"R1": {}}}
SPARSE = {"format": "sparse-24", "targets": ["Linear"]}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_with(FP4, format="nvfp4-pack-quantized"), "type='float' with num_bits=4 is not supported yet"),
        (config_with(MX | {"num_bits": 4}), "type='float' with num_bits=4"),
        (config_with(MX | {"num_bits": 8}), "scale_dtype='torch.uint8'"),
        (config_with(HEAD), "strategy='attn_head'"),
        (config_with({}, {"strategy": "token"}), r"config_groups\['group_0'\] is not supported: .*need num_bits=8"),
        (config_with({"num_bits": 8}, {"type": "float", "strategy": "token"}), "is not supported: weights of type='int'"),
        (config_with({"group_size": 64}, {"type": "float", "strategy": "token"}), "must be symmetric in groups of 128"),
        (config_with({}, {"type": "float", "strategy": "tensor"}), "must be dynamic with strategy='token'"),
        (config_with({"num_bits": 8}, {"strategy": "token"}), "is not supported: weights multiplied by quantized activations"),
        (config_with(kv_cache_scheme=KV | {"type": "int"}), r"strategy='tensor', \{'type': 'int'\}; set kv_cache_scheme to null"),
        (config_with(kv_cache_scheme=KV | {"num_bits": 4}), r"must be static symmetric fp8 .* got .*\{'num_bits': 4\}"),
        (config_with(kv_cache_scheme=KV | {"dynamic": True, "strategy": "token"}), r"strategy='token', \{'dynamic': True\}"),
        (config_with(kv_cache_scheme=KV | {"symmetric": False}), r"\{'symmetric': False\}"),
        (config_with(kv_cache_scheme=KV | {"strategy": "channel"}), r"got strategy='channel'"),
        (config_with(transform_config=R1), "transform_config in quantization_config is not supported"),
        (config_with(sparsity_config=SPARSE), "sparsity_config in quantization_config is not"),
        (config_with(format="int-quantized"), "stored as format='int-quantized', torchq reads this scheme as 'pack-quantized'"),
        (config_with(format="marlin-24"), "stored as format='marlin-24'"),
        (config_with(config_groups={"g": {"weights": None}}), r"config_groups\['g'\] quantizes no weights"),
        (config_with(config_groups={"W4A16": ["Linear"]}), r"config_groups\['W4A16'\] quantizes no weights"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        read_config(config)


def test_output_activations_are_not_supported() -> None:
    config = config_with()
    config["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}
    with pytest.raises(NotImplementedError, match="quantizes output_activations, which is not supported"):
        read_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_with(quant_method="gptq"), "quant_method must be 'compressed-tensors', got 'gptq'"),
        ({}, "quant_method must be 'compressed-tensors', got None"),
        (None, "quantization_config must be a JSON object, got None"),
        ([1], "quantization_config must be a JSON object"),
        (config_with(config_groups={}), "quantization_config has no config_groups"),
        (config_with(config_groups=["Linear"]), "config_groups in quantization_config must be a JSON object"),
        (config_with(ignore="lm_head"), "ignore in quantization_config must be a list of names and patterns, got 'lm_head'"),
        (config_with(ignore=[3]), "ignore in quantization_config must be a list"),
        (config_with(ignore=["re:("]), r"ignore in quantization_config: 're:\(' is not a regular expression"),
        (config_with(sparsity_config=[1]), "sparsity_config in quantization_config must be a JSON object"),
        (config_with({"num_bits": 17}), r"config_groups\['group_0'\] is damaged: num_bits must be 2 to 8"),
        (config_with({"type": "nf"}), r"config_groups\['group_0'\] is damaged: type must be 'int' or 'float', got 'nf'"),
        (config_with({"num_bits": "4"}), r"config_groups\['group_0'\] is damaged"),
        (config_with({"strategy": "rows"}), r"config_groups\['group_0'\] is damaged: strategy must be one of"),
        (config_with({"group_size": None}), r"config_groups\['group_0'\] is damaged: strategy='group' needs a group_size"),
        (config_with({"strategy": "block", "block_structure": "128by128"}), r"config_groups\['group_0'\] is damaged"),
    ],
)
def test_damaged_settings(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(config)


def test_defaults_and_spellings_that_other_writers_leave_out() -> None:
    weights: dict[str, Any] = {"num_bits": 4, "group_size": 128}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    assert same(read_config(config).groups[0].scheme, SCHEMES["W4A16"])
    weights["group_size"] = -1
    assert same(read_config(config).groups[0].scheme, ALL["W4A16-channel"])
    weights |= {"num_bits": 8, "type": "float", "group_size": None, "strategy": "block", "block_structure": "128x128"}
    assert read_config(config).groups[0].scheme.weights.block_structure == (128, 128)


def test_random_damage_is_never_a_crash() -> None:
    generator = random.Random(0)
    junk = [None, 0, -1, 2.5, "x", "", [], ["x"], {}, {"x": 1}, True]
    original = write_config({"a": SCHEMES["W4A16"], "b": SCHEMES["FP8_BLOCK"], "c": INT8_STATIC}, ["lm_head"])
    for _ in range(2000):
        config = copy.deepcopy(original)
        for _ in range(generator.randint(1, 3)):
            place: Any = config
            while True:
                key = generator.choice(list(place)) if isinstance(place, dict) else generator.randrange(len(place))
                if not isinstance(place[key], (dict, list)) or not place[key] or generator.random() < 0.3:
                    break
                place = place[key]
            place[key] = generator.choice(junk)
        try:
            parsed = read_config(config)
        except (ValueError, NotImplementedError) as error:
            assert str(error)
        else:
            parsed.scheme_for("a", {"Linear"})


@pytest.mark.parametrize("strategy", [None, "tensor", "attn_head"])
def test_kv_cache_scheme(strategy: str | None) -> None:
    config = write_config({"a": SCHEMES["W4A16"]}, [], strategy)
    assert (config["kv_cache_scheme"] is None) == (strategy is None)
    assert read_config(json.loads(json.dumps(config))).kv_cache_strategy == strategy
    llm_compressor = KV | {"strategy": strategy, "symmetric": True, "zp_dtype": None, "observer": None, "observer_kwargs": {}}
    if strategy is not None:
        assert read_config(config | {"kv_cache_scheme": llm_compressor}).kv_cache_strategy == strategy
    assert read_config(config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}).kv_cache_strategy == "tensor"  # inferred
