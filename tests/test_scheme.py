"""Schemes: named ones, overrides, and an error that names the parameter for everything no format or kernel can hold."""

import dataclasses

import pytest

from torchq.scheme import PLANNED_SCHEMES, SCHEMES, QuantArgs, Scheme, format_of, resolve_scheme

INT8_TOKEN = QuantArgs(8, strategy="token", dynamic=True)
FP8_TOKEN = QuantArgs(8, "float", strategy="token", dynamic=True)
NF = {"num_bits": 4, "type": "nf"}
FP8_BLOCK = QuantArgs(8, "float", strategy="block", block_structure=(128, 128))


# --------------------------------------------------------------------------------------------------------------- QuantArgs


@pytest.mark.parametrize(
    ("kwargs", "strategy", "group_size"),
    [
        ({}, "tensor", None),
        ({"group_size": -1}, "channel", None),
        ({"group_size": 128}, "group", 128),
        ({"strategy": "group", "group_size": -1}, "channel", None),
        ({"strategy": "group", "group_size": 64}, "group", 64),
        ({"strategy": "channel"}, "channel", None),
        ({"strategy": "channel", "group_size": -1}, "channel", None),
        ({"strategy": "token", "dynamic": True}, "token", None),
    ],
)
def test_strategy_is_inferred_and_group_size_normalized(kwargs, strategy, group_size):
    args = QuantArgs(8, **kwargs)
    assert (args.strategy, args.group_size) == (strategy, group_size)
    assert dataclasses.replace(args) == args and hash(dataclasses.replace(args)) == hash(args)


def test_equal_settings_are_equal_however_written():
    assert QuantArgs(4, group_size=-1) == QuantArgs(4, strategy="channel") == QuantArgs(4, strategy="group", group_size=-1)
    assert QuantArgs(8, "float", strategy="block", block_structure=[128, 128]) == FP8_BLOCK


@pytest.mark.parametrize("num_bits", range(2, 9))
def test_range_of_codes(num_bits):
    args = QuantArgs(num_bits)
    assert (args.quant_min, args.quant_max) == (-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"type": "INT"}, r"type must be 'int', 'float' or 'nf', got 'INT'"),
        ({"type": None}, r"type must be 'int', 'float' or 'nf', got None"),
        ({"type": "nf", "group_size": 64}, r"num_bits must be 4 for type='nf' \(NF4\), got 8"),
        (
            {**NF, "group_size": 48},
            r"group_size must be a power of two, 16 or more, for type='nf' \(NF4's blocks\), got 48; use 64",
        ),
        ({**NF, "group_size": 8}, r"group_size must be a power of two, 16 or more, for type='nf' .* got 8; use 64"),
        ({**NF, "group_size": -1}, r"group_size must be a power of two, .* got strategy='channel'; use 64"),
        (NF, r"group_size must be a power of two, .* got strategy='tensor'; use 64"),
        ({**NF, "group_size": 64, "symmetric": False}, r"type='nf' is always symmetric; leave symmetric=True"),
        ({"group_size": 0}, r"group_size must be positive, or -1 for one group per channel, got 0"),
        ({"group_size": -2}, r"group_size must be positive, or -1 for one group per channel, got -2"),
        ({"strategy": "row"}, r"strategy must be one of tensor, channel, group, block, token, got 'row'"),
        ({"strategy": "channel", "group_size": 64}, r"group_size=64 needs strategy='group', got strategy='channel'"),
        ({"strategy": "tensor", "group_size": 64}, r"group_size=64 needs strategy='group', got strategy='tensor'"),
        ({"strategy": "group"}, r"strategy='group' needs a group_size, for example 128"),
        ({"strategy": "block"}, r"block_structure.*and strategy='block' go together, got block_structure=None"),
        (
            {"strategy": "channel", "block_structure": (1, 2)},
            r"go together, got block_structure=\(1, 2\) and strategy='channel'",
        ),
        ({"strategy": "block", "block_structure": (0, 128)}, r"block_structure must be two positive integers.*got \(0, 128\)"),
        ({"strategy": "block", "block_structure": (128,)}, r"block_structure must be two positive integers.*got \(128,\)"),
        ({"strategy": "block", "block_structure": (1, 2, 3)}, r"block_structure must be two positive integers.*got \(1, 2, 3\)"),
        ({"strategy": "block", "block_structure": "128x128"}, r"block_structure must be two positive integers.*got '128x128'"),
        ({"strategy": "block", "block_structure": 128}, r"block_structure must be two positive integers.*got 128"),
        (
            {"strategy": "block", "block_structure": (128, 1.5)},
            r"block_structure must be two positive integers.*got \(128, 1.5\)",
        ),
        ({"num_bits": 1}, r"num_bits must be 2 to 8 for type='int', got 1"),
        ({"num_bits": 9}, r"num_bits must be 2 to 8 for type='int', got 9"),
        ({"num_bits": 4, "type": "float"}, r"num_bits must be 8 for type='float' \(fp8 e4m3\), got 4"),
        ({"type": "float", "symmetric": False}, r"type='float' is always symmetric; leave symmetric=True"),
        ({"strategy": "token"}, r"strategy='token' has one scale per run-time token: set dynamic=True"),
    ],
)
def test_wrong_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        QuantArgs(**{"num_bits": 8, **kwargs})


@pytest.mark.parametrize(("name", "value"), [("num_bits", "4"), ("num_bits", 4.0), ("group_size", "128"), ("group_size", 64.0)])
def test_numbers_must_be_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got {value!r}"):
        QuantArgs(**{name: value})


def test_num_bits_is_required_to_be_given():
    with pytest.raises(TypeError, match="num_bits must be an integer, got None"):
        QuantArgs(None)


# ------------------------------------------------------------------------------------------------------------------ Scheme


@pytest.mark.parametrize(
    ("weights", "activations", "message"),
    [
        (INT8_TOKEN, None, r"weights are quantized once: use dynamic=False"),
        (QuantArgs(8, dynamic=True, strategy="channel"), None, r"weights are quantized once: use dynamic=False"),
        (QuantArgs(8, strategy="channel"), FP8_TOKEN, r"type='int' with input_activations of type='float' are not supported"),
        (QuantArgs(8, "float", strategy="channel"), INT8_TOKEN, r"type='float' with input_activations of type='int'"),
        (QuantArgs(4, strategy="channel"), INT8_TOKEN, r"need num_bits=8 for weights and activations, got 4 and 8"),
        (
            QuantArgs(8, strategy="channel"),
            QuantArgs(4, strategy="token", dynamic=True),
            r"need num_bits=8 for weights and activations, got 8 and 4",
        ),
        (QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="channel"), r"input_activations cannot use strategy='channel'"),
        (QuantArgs(8, strategy="channel"), QuantArgs(8, group_size=32, dynamic=True), r"cannot use strategy='group'"),
        (FP8_BLOCK, dataclasses.replace(FP8_BLOCK, dynamic=True), r"input_activations cannot use strategy='block'"),
        (FP8_BLOCK, QuantArgs(8, "float", group_size=128), r"static input_activations need strategy='tensor'"),
        (
            QuantArgs(8, "float", strategy="channel"),
            QuantArgs(8, "float", group_size=128, dynamic=True),
            r"input_activations in groups need weights with strategy='block'",
        ),
        (QuantArgs(8, group_size=32), INT8_TOKEN, r"weights multiplied by quantized activations must be symmetric"),
        (QuantArgs(8, symmetric=False, group_size=-1), INT8_TOKEN, r"weights multiplied by quantized activations must be"),
        (QuantArgs(8), None, r"integer weight-only schemes need strategy='group' or 'channel', got 'tensor'"),
        (QuantArgs(8, strategy="block", block_structure=(2, 2)), None, r"need strategy='group' or 'channel', got 'block'"),
        (
            QuantArgs(8, strategy="block", block_structure=(2, 2)),
            INT8_TOKEN,
            r"strategy='block' is for fp8 weights; use 'group' or 'channel' for integers",
        ),
        (QuantArgs(4, "nf", group_size=64), INT8_TOKEN, r"type='nf' is for weights alone; leave input_activations=None"),
        (QuantArgs(8, strategy="channel"), QuantArgs(4, "nf", group_size=64), r"type='nf' is for weights alone"),
        (QuantArgs(4, "nf", group_size=64, dynamic=True), None, r"weights are quantized once: use dynamic=False"),
        (QuantArgs(8, "float", group_size=128), None, r"fp8 weights need strategy='tensor', 'channel' or 'block'"),
    ],
)
def test_wrong_combinations(weights, activations, message):
    with pytest.raises(ValueError, match=message):
        Scheme(weights, activations)


@pytest.mark.parametrize(
    ("activations", "message"),
    [
        (
            QuantArgs(8, dynamic=True),
            r"dynamic symmetric input_activations with strategy='tensor' are not supported yet; supported:",
        ),
        (
            QuantArgs(8, symmetric=False, strategy="token", dynamic=True),
            r"dynamic asymmetric input_activations with strategy='token'",
        ),
    ],
)
def test_activations_that_the_kernels_would_compute_otherwise(activations, message):
    with pytest.raises(NotImplementedError, match=message):
        Scheme(QuantArgs(8, strategy="channel"), activations)


@pytest.mark.parametrize(
    ("weights", "activations", "expected"),
    [
        (QuantArgs(4, group_size=128), None, "pack-quantized"),
        (QuantArgs(8, group_size=-1), None, "pack-quantized"),
        (QuantArgs(8, strategy="channel"), INT8_TOKEN, "int-quantized"),
        (QuantArgs(8, strategy="tensor"), INT8_TOKEN, "int-quantized"),
        (QuantArgs(8, strategy="channel"), QuantArgs(8, symmetric=False), "int-quantized"),
        (QuantArgs(8, "float"), None, "naive-quantized"),
        (QuantArgs(4, "nf", group_size=64), None, "nf4"),
        (QuantArgs(8, "float"), QuantArgs(8, "float"), "float-quantized"),
        (FP8_BLOCK, FP8_TOKEN, "float-quantized"),
        (FP8_BLOCK, QuantArgs(8, "float", group_size=128, dynamic=True), "float-quantized"),
    ],
)
def test_format(weights, activations, expected):
    scheme = Scheme(weights, activations)
    assert scheme.format == format_of(scheme) == expected
    assert scheme.needs_calibration == (activations is not None and not activations.dynamic)


# ------------------------------------------------------------------------------------------------------------ named schemes


def test_named_schemes():
    for name, scheme in SCHEMES.items():
        assert scheme.name == name and resolve_scheme(name) == scheme
    assert SCHEMES["W4A16"].weights == QuantArgs(4, group_size=128)
    assert SCHEMES["NF4"] == Scheme(QuantArgs(4, "nf", strategy="group", group_size=64), name="NF4")
    assert SCHEMES["W3A16_ASYM"].weights == QuantArgs(3, symmetric=False, group_size=128)
    assert SCHEMES["W8A8"] == Scheme(QuantArgs(8, strategy="channel"), INT8_TOKEN, "W8A8")
    assert SCHEMES["FP8_DYNAMIC"] == Scheme(QuantArgs(8, "float", strategy="channel"), FP8_TOKEN, "FP8_DYNAMIC")
    assert SCHEMES["FP8"].needs_calibration and not SCHEMES["FP8_BLOCK"].needs_calibration
    assert not set(SCHEMES) & set(PLANNED_SCHEMES)


@pytest.mark.parametrize("name", ["w4a16", "W4a16_Asym", "fp8_dynamic", "w8a8"])
def test_names_are_case_insensitive(name):
    assert resolve_scheme(name) == SCHEMES[name.upper()]


@pytest.mark.parametrize(
    ("name", "close"), [("W4A61", "W4A16"), ("fp8-dynamic", "FP8_DYNAMIC"), ("W4A16ASYM", "W4A16_ASYM"), ("W8A", "W8A8")]
)
def test_unknown_name_with_a_close_one(name, close):
    with pytest.raises(
        ValueError, match=f"scheme='{name}' is unknown; did you mean '{close}'. known schemes: W2A16, .*FP8_BLOCK"
    ):
        resolve_scheme(name)


@pytest.mark.parametrize("name", ["", "quantize", "nf5", "W16"])
def test_unknown_name_without_a_close_one(name):
    with pytest.raises(ValueError, match=f"scheme='{name}' is unknown; .*known schemes: W2A16, .*FP8_BLOCK"):
        resolve_scheme(name)


@pytest.mark.parametrize("name", [*PLANNED_SCHEMES, "nvfp4"])
def test_planned_schemes(name):
    with pytest.raises(NotImplementedError, match=f"scheme='{name}' is not supported yet; supported: W2A16, .*FP8_BLOCK"):
        resolve_scheme(name)


@pytest.mark.parametrize("scheme", [None, 4, QuantArgs(4, group_size=32)])
def test_a_scheme_must_be_a_name_or_a_scheme(scheme):
    with pytest.raises(TypeError, match=f"scheme must be a name or a torchq.scheme.Scheme, got {type(scheme).__name__}"):
        resolve_scheme(scheme)


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_group_size_override(name):
    weights = SCHEMES[name].weights
    assert resolve_scheme(name, 64).weights == dataclasses.replace(weights, group_size=64)
    assert resolve_scheme(name, -1).weights == QuantArgs(weights.num_bits, symmetric=weights.symmetric, strategy="channel")
    channel = resolve_scheme(name, -1)
    assert resolve_scheme(channel, 32).weights == dataclasses.replace(weights, group_size=32)  # and back to groups
    assert resolve_scheme(name).weights == weights


def test_block_size_of_nf4():
    assert resolve_scheme("nf4", 128) == Scheme(QuantArgs(4, "nf", group_size=128), name="NF4")
    for group_size in (-1, 100):
        with pytest.raises(ValueError, match=r"group_size must be a power of two, 16 or more, for type='nf'"):
            resolve_scheme("NF4", group_size)
    with pytest.raises(ValueError, match="type='nf' is always symmetric; leave symmetric=True"):
        resolve_scheme("NF4", symmetric=False)


def test_symmetric_override():
    assert resolve_scheme("W4A16", symmetric=False).weights == SCHEMES["W4A16_ASYM"].weights
    assert resolve_scheme("W4A16_ASYM", 64, True).weights == QuantArgs(4, group_size=64)
    assert resolve_scheme("FP8", symmetric=True) == SCHEMES["FP8"]
    with pytest.raises(ValueError, match="type='float' is always symmetric"):
        resolve_scheme("FP8", symmetric=False)
    with pytest.raises(ValueError, match="weights multiplied by quantized activations must be symmetric"):
        resolve_scheme("W8A8", symmetric=False)


@pytest.mark.parametrize("name", ["W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"])
def test_group_size_does_not_apply(name):
    with pytest.raises(ValueError, match=f"group_size=64 does not apply to scheme {name}; leave group_size=None"):
        resolve_scheme(name, 64)


@pytest.mark.parametrize("group_size", [0, -2])
def test_wrong_group_size(group_size):
    with pytest.raises(ValueError, match=f"group_size must be positive, or -1 for one group per channel, got {group_size}"):
        resolve_scheme("W4A16", group_size)
