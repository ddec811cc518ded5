"""quantize_: which modules it replaces, what it reports, what it refuses, and that a refused call changes nothing."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import torchq
from torchq import RTN, QuantArgs, QuantConfig, QuantLinear, Scheme, quantize_
from torchq.testing import sqnr_db, tiny_llama

W4 = QuantConfig("W4A16", group_size=32)
LINEARS = 14  # of tiny_llama, without lm_head
IDS = torch.arange(3, 15)[None]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Check that modules and parameters are the same objects afterwards, with the same values, flags and config."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.state_dict(keep_vars=True).items()}
    config = str(getattr(model, "config", None))
    yield
    assert dict(model.named_modules(remove_duplicate=False)) == modules
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys() and all(after[name] is parameters[name] for name in after)
    for name, tensor in model.state_dict(keep_vars=True).items():
        value, requires_grad = values[name]
        assert tensor.requires_grad is requires_grad
        assert tensor.is_meta or torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(value)), name
    assert str(getattr(model, "config", None)) == config
    assert not hasattr(model, "quant_report")


def quantized(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def schemes(model: nn.Module) -> dict[str, str]:
    return {name: module.scheme.name for name, module in quantized(model).items()}


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits.float()


def mlp(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(k, n) for k, n in pairwise(sizes))).to(dtype)


# --------------------------------------------------------------------------------------------------------- what it does

FP8_WEIGHT_ONLY = Scheme(QuantArgs(8, "float", strategy="channel"), name="FP8_WEIGHT_ONLY")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("scheme", "group_size", "least"),
    [
        ("W2A16", 32, -1), ("W3A16", 32, 3), ("W4A16", 32, 8), ("W4A16", 64, 6), ("W4A16", -1, 6), ("W4A16_ASYM", 32, 8),
        ("W4A16_ASYM", -1, 6), ("W5A16", 32, 14), ("W6A16", 32, 20), ("W8A16", 32, 30), ("W8A16", -1, 28), ("W8A8", None, 20),
        ("FP8_DYNAMIC", None, 15), (FP8_WEIGHT_ONLY, None, 18),
    ],
)  # fmt: skip
def test_every_linear_but_the_head_is_quantized(
    scheme: str | Scheme, group_size: int | None, least: float, dtype: torch.dtype
) -> None:
    model = tiny_llama(dtype=dtype)
    before = logits(model)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    report = quantize_(model, QuantConfig(scheme, group_size=group_size))
    assert len(quantized(model)) == LINEARS
    assert model.model.embed_tokens.weight is embedding and model.lm_head.weight is head
    assert model.quant_report is report and report.warnings == []
    assert sqnr_db(before, logits(model)) > least
    assert all(layer.scale_dtype == dtype for layer in quantized(model).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nf4(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype, hidden_size=72, num_attention_heads=4, head_dim=18)  # blocks of 64 run on over rows
    before = logits(model)
    report = quantize_(model, QuantConfig("NF4", ignore=["lm_head", "re:.*k_proj"]))
    assert report.algorithm == "RTN, absmax scales" and report.warnings == []
    assert sqnr_db(before, logits(model)) > 10
    layers = quantized(model)
    assert len(layers) == LINEARS - 2 and {layer.compute_dtype for layer in layers.values()} == {dtype}
    for entry in report.layers:
        if entry.status == "quantized":
            layer = layers[entry.name]
            assert (entry.scheme, entry.format, entry.num_bits) == ("NF4", "nf4", 4)
            bits = sum(tensor.nbytes for tensor in layer.canonical_tensors().values()) * 8
            assert entry.bits_per_weight == pytest.approx(bits / layer.dequantize().numel())
            assert entry.relative_error is not None and 0.05 < entry.relative_error < 0.15


def test_bits_per_weight_of_nf4() -> None:
    report = quantize_(mlp(1024, 1024), "NF4")
    assert report.layers[0].bits_per_weight == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-4)  # 4.127


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "smoothquant"])
@pytest.mark.parametrize("calibration", [None, [torch.arange(3, 19)] * 4], ids=["no data", "data"])
def test_algorithms_that_nf4_does_not_have(algorithm: str, calibration: Any) -> None:
    model = tiny_llama()
    config = QuantConfig("W4A16", group_size=32, algorithm=algorithm, overrides={"re:.*down_proj": "NF4"})
    message = "needs calibration data|for schemes that round|supports integer weights.*got scheme NF4|does not support scheme NF4"
    with unchanged(model), pytest.raises((ValueError, NotImplementedError), match=message):
        quantize_(model, config, calibration=calibration)
    config = QuantConfig("NF4", algorithm=algorithm)
    message = "algorithm='gptq' (needs|supports integer weights)|does not support scheme NF4 .*use algorithm='rtn' or 'auto'"
    with unchanged(model), pytest.raises((ValueError, NotImplementedError), match=message):
        quantize_(model, config, calibration=calibration)


def test_nf4_takes_no_notice_of_calibration_data() -> None:
    model, plain = tiny_llama(), tiny_llama()
    quantize_(plain, "NF4")
    report = quantize_(model, "NF4", calibration=[IDS[0]] * 8)
    assert report.algorithm == "RTN, absmax scales" and torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_nf4_beside_calibrated_layers(scheme: str) -> None:
    model = tiny_llama()
    before = logits(model)
    group_size = 32 if scheme == "W4A16" else None
    overrides = {"re:.*(q_proj|down_proj)": "NF4", "re:.*k_proj": None}
    quantize_(model, QuantConfig(scheme, group_size=group_size, overrides=overrides), calibration=[IDS[0] + i for i in range(8)])
    assert set(schemes(model).values()) == {scheme, "NF4"} and sqnr_db(before, logits(model)) > 8


def test_nf4_siblings_are_not_fused() -> None:
    model = tiny_llama()
    quantize_(model, QuantConfig("NF4", fuse_siblings=True))
    assert torchq.fuse_siblings_(model) == [] and all(layer.siblings is None for layer in quantized(model).values())


def test_block_scales_need_whole_blocks_of_columns_only() -> None:
    model = mlp(256, 200, 128)
    with pytest.raises(ValueError, match=r"group_size=128 does not divide in_features=200 of 1; use FP8_DYNAMIC, or add them"):
        quantize_(model, "FP8_BLOCK")
    quantize_(model, QuantConfig("FP8_BLOCK", ignore=["1"]))
    assert quantized(model)["0"].weight_scale.shape == (2, 2)


def test_a_name_a_scheme_and_a_config_mean_the_same() -> None:
    outputs = []
    for config in ("w8a16", torchq.scheme.SCHEMES["W8A16"], QuantConfig("W8A16"), QuantConfig("W8A16", algorithm="rtn")):
        model = tiny_llama(hidden_size=128)
        quantize_(model, config)
        outputs.append(logits(model))
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_settings_of_the_rounding_are_used() -> None:
    errors = {}
    for recipe in (RTN(norm=2), RTN(), RTN("absmax")):
        report = quantize_(tiny_llama(), QuantConfig("W4A16", group_size=32, algorithm=recipe))
        errors[report.algorithm] = report.mean_relative_error
    assert errors.keys() == {"RTN, mse scales", "RTN, |error|^3 scales", "RTN, absmax scales"}
    assert errors["RTN, mse scales"] < errors["RTN, |error|^3 scales"] < errors["RTN, absmax scales"]


def test_only_what_is_quantized_changes() -> None:
    model = tiny_llama(attention_bias=True)
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "q_proj" in name)
    kept = {name: parameter for name, parameter in model.named_parameters() if "proj.weight" not in name}
    values = {name: parameter.clone() for name, parameter in kept.items()}
    quantize_(model, W4)
    after = dict(model.named_parameters())
    assert after.keys() == kept.keys()
    for name, parameter in after.items():
        assert parameter is kept[name] and torch.equal(parameter, values[name])
        assert parameter.requires_grad == ("norm" in name or "q_proj.bias" in name)
    assert all(module.training for module in model.modules())
    assert model.config.to_dict()["quantization_config"]["quant_method"] == "compressed-tensors"


def test_the_device_to_compute_on() -> None:
    model, other = tiny_llama(), tiny_llama()
    quantize_(model, W4)
    quantize_(other, W4, device="cpu", progress=False)
    assert torch.equal(logits(model), logits(other))


def test_the_progress_bar_of_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quantize_(tiny_llama(), W4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    quantize_(tiny_llama(), W4)
    quantize_(tiny_llama(), W4, progress=False)
    assert capsys.readouterr().out == ""


def test_a_part_of_a_model() -> None:
    model = tiny_llama()
    quantize_(model.model.layers[1], W4)
    assert quantized(model).keys() == {name for name in quantized(model) if name.startswith("model.layers.1.")}
    assert len(quantized(model)) == LINEARS // 2


# --------------------------------------------------------------------------------------------- targets, ignore, overrides


def test_targets_by_class_name_and_pattern() -> None:
    model = tiny_llama()
    quantize_(model, QuantConfig("W4A16", group_size=32, targets=["re:.*mlp", "model.layers.0.self_attn.q_proj"]))
    assert len(quantized(model)) == 7
    assert "model.layers.0.self_attn.q_proj" in quantized(model)


def test_ignore_by_name_pattern_and_class() -> None:
    class Adapter(nn.Linear):
        pass

    model = tiny_llama()
    model.model.layers[1].mlp.up_proj = Adapter(64, 128, bias=False)
    ignore = ["lm_head", "re:.*self_attn", "model.layers.0.mlp.down_proj", "Adapter"]
    report = quantize_(model, QuantConfig("W4A16", group_size=32, ignore=ignore))
    assert quantized(model).keys() == {
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.down_proj",
    }
    assert {x.reason for x in report.layers if x.status == "ignored"} == {"in ignore", "not targeted", "norm weights and biases"}


def test_a_pattern_is_matched_from_the_start_and_not_to_the_end() -> None:
    """re.match, as in compressed-tensors: a router's pattern without a $ also means gate_proj."""
    model = tiny_llama()
    quantize_(model, QuantConfig("W4A16", group_size=32, ignore=["lm_head", "re:.*mlp.gate"]))
    assert not any("gate_proj" in name for name in quantized(model))
    with pytest.raises(ValueError, match="matches no module"):
        quantize_(tiny_llama(), QuantConfig("W4A16", ignore=["re:mlp"]))


def test_a_list_of_ones_own_replaces_the_default_ignore() -> None:
    model = tiny_llama()
    quantize_(model, QuantConfig("W4A16", group_size=32, ignore=["re:.*down_proj"]))
    assert "lm_head" in quantized(model)


def test_overrides_first_match_wins_and_none_leaves_alone() -> None:
    model = tiny_llama()
    overrides = {
        "model.layers.0.self_attn.v_proj": "W8A16",
        "re:.*v_proj": "FP8_DYNAMIC",
        "re:.*o_proj": None,
        "re:.*down_proj": Scheme(QuantArgs(8, group_size=16)),
    }
    report = quantize_(model, QuantConfig("W4A16", group_size=32, overrides=overrides))
    found = schemes(model)
    assert found["model.layers.0.self_attn.v_proj"] == "W8A16"
    assert found["model.layers.1.self_attn.v_proj"] == "FP8_DYNAMIC"
    assert found["model.layers.1.mlp.down_proj"] == "custom"
    assert not any(name.endswith("o_proj") for name in found)
    # group_size goes with the schemes given by name, not with a Scheme, which has its own
    assert quantized(model)["model.layers.0.self_attn.v_proj"].scheme.weights.group_size == 32
    assert quantized(model)["model.layers.1.mlp.down_proj"].scheme.weights.group_size == 16
    assert [x.reason for x in report.layers if x.name.endswith("o_proj")] == ["in overrides"] * 2


def test_ignore_goes_before_overrides() -> None:
    model = tiny_llama()
    quantize_(model, QuantConfig("W4A16", group_size=32, ignore=["re:.*q_proj", "lm_head"], overrides={"re:.*q_proj": "W8A16"}))
    assert not any("q_proj" in name for name in quantized(model))


@pytest.mark.parametrize("settings", [{"targets": ["Lin"]}, {"ignore": ["lm_haed"]}, {"overrides": {"re:.*w_proj": "W8A16"}}])
def test_a_pattern_that_matches_nothing_is_an_error(settings: dict[str, Any]) -> None:
    model = tiny_llama()
    (field, patterns), = settings.items()  # fmt: skip
    message = rf"{field}: {re.escape(repr(next(iter(patterns))))} matches no module of LlamaForCausalLM.*'re:<pattern>'.*q_proj"
    with unchanged(model), pytest.raises(ValueError, match=message):
        quantize_(model, QuantConfig("W4A16", group_size=32, **settings))


@pytest.mark.parametrize(
    ("settings", "name", "kind"),
    [
        ({"ignore": ["lm_head", "model.layers.0"]}, "model.layers.0", "LlamaDecoderLayer"),
        ({"ignore": ["lm_head", "LlamaMLP"]}, "model.layers.0.mlp", "LlamaMLP"),
        ({"overrides": {"model.layers.1.self_attn": "W8A16"}}, "model.layers.1.self_attn", "LlamaAttention"),
        ({"targets": ["Linear", "re:.*mlp$"]}, "model.layers.0.mlp", "LlamaMLP"),
        ({"ignore": ["LlamaForCausalLM"]}, "the model", "LlamaForCausalLM"),
    ],
)
def test_a_pattern_that_matches_only_containers_is_an_error(settings: dict[str, Any], name: str, kind: str) -> None:
    """It reads as if the layers inside were meant, and would do nothing."""
    model = tiny_llama()
    message = rf"matches {re.escape(name)} \({kind}\), which contains Linear layers but is none.*'re:"
    with unchanged(model), pytest.raises(ValueError, match=message):
        quantize_(model, QuantConfig("W4A16", group_size=32, **settings))


def test_an_ignore_pattern_for_modules_without_layers_is_fine() -> None:
    """Recipes ignore routers, which are no nn.Linear in transformers."""
    model = tiny_llama()
    quantize_(model, QuantConfig("W4A16", group_size=32, ignore=["lm_head", "re:.*norm", "Embedding", "model.rotary_emb"]))
    assert len(quantized(model)) == LINEARS


def test_nothing_to_quantize_is_an_error() -> None:
    model = tiny_llama()
    with unchanged(model), pytest.raises(ValueError, match=r"nothing to quantize: of \d+ modules, none that targets="):
        quantize_(model, QuantConfig("W4A16", ignore=["Linear"]))
    with pytest.raises(ValueError, match="targets: 'Linear' matches no module of ReLU"):
        quantize_(nn.ReLU(), "W8A8")


# ------------------------------------------------------------------------------------------------ shared modules and weights


def test_a_module_used_twice_is_quantized_once_and_stays_one() -> None:
    model = mlp(64, 64, 64)
    model.add_module("again", model[0])
    report = quantize_(model, "W8A8")
    assert model.again is model[0] and isinstance(model[0], QuantLinear)
    assert [layer.name for layer in report.layers if layer.status == "quantized"] == ["0", "1"]
    assert report.layers[0].reason == "also used as again"
    assert report.num_parameters == 2 * (64 * 64 + 64)


def test_two_linears_with_one_weight_are_quantized_alike() -> None:
    model = mlp(64, 64, 64)
    model[1].weight = model[0].weight
    expected = torchq.algorithms.rtn.quantize_weight(model[0].weight.detach(), torchq.scheme.SCHEMES["W8A8"])[0].q
    biases = [model[0].bias, model[1].bias]
    report = quantize_(model, "W8A8")
    assert model[0] is not model[1]
    assert [model[0].bias, model[1].bias] == biases
    assert torch.equal(model[0].weight, expected) and torch.equal(model[1].weight, expected)
    assert report.num_parameters == 64 * 64 + 128


def test_a_weight_ignored_under_one_of_its_names_is_left_alone() -> None:
    model = mlp(64, 64, 64, 64)
    model[1].weight = model[0].weight
    report = quantize_(model, QuantConfig("W8A8", ignore=["1"]))
    assert quantized(model).keys() == {"2"}
    assert model[1].weight is model[0].weight
    assert report.layers[0].reason == "in ignore"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_tied_head_is_left_alone_by_default(dtype: torch.dtype) -> None:
    model = tiny_llama(tie_word_embeddings=True, dtype=dtype)
    quantize_(model, W4)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantizing_a_tied_head_unties_it(dtype: torch.dtype) -> None:
    model = tiny_llama(tie_word_embeddings=True, dtype=dtype)
    embedding = model.model.embed_tokens.weight
    before = embedding.clone()
    with pytest.warns(UserWarning, match=r"untied lm_head\.weight from model\.embed_tokens\.weight: only the quantized layer"):
        report = quantize_(model, QuantConfig("W4A16", group_size=32, ignore=()))
    assert isinstance(model.lm_head, QuantLinear)
    assert model.model.embed_tokens.weight is embedding and torch.equal(embedding, before)
    assert model.config.tie_word_embeddings is False
    assert "lm_head.weight" not in model.all_tied_weights_keys
    entries = {layer.name: layer for layer in report.layers}
    assert entries["lm_head"].status == "quantized" and entries["model.embed_tokens.weight"].status == "ignored"
    assert report.num_parameters == sum(layer.num_parameters for layer in report.layers)
    assert report.quantized_fraction < 0.92


def test_a_plain_module_that_shares_a_weight_with_an_embedding_says_so() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)})
    model["head"].weight = model["embed"].weight
    with pytest.warns(UserWarning, match=r"untied head\.weight from embed\.weight"):
        quantize_(model, "W8A8")
    assert isinstance(model["head"], QuantLinear)


def test_the_head_is_found_whatever_its_name() -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    settings = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**settings))
    quantize_(model, W4)
    assert "embed_out" not in quantized(model) and len(quantized(model)) == 4


# ------------------------------------------------------------------------------------------- modules it cannot replace


def test_multihead_attention_and_the_fast_path_of_an_encoder_layer() -> None:
    """Both read the weights of their children without calling them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.Linear(64, 64)).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        before = model(x)
        with pytest.warns(UserWarning, match=r"3 weights with .*nn\.MultiheadAttention reads.*nn\.TransformerEncoderLayer reads"):
            report = quantize_(model, W4)
        assert sqnr_db(before, model(x)) > 10
    assert quantized(model).keys() == {"1"}
    assert [layer.status for layer in report.layers].count("skipped") == 3


def test_a_decoder_layer_calls_its_linears() -> None:
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        before = model(x, x)
        with pytest.warns(UserWarning, match="nn.MultiheadAttention"):
            quantize_(model, W4)
        assert quantized(model).keys() == {"linear1", "linear2"}
        assert sqnr_db(before, model(x, x)) > 10


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def make_own_forward(model: nn.Sequential) -> None:
    model[0] = OwnForward(64, 64)


def make_replaced_forward(model: nn.Sequential) -> None:
    model[0].forward = lambda x: x


def make_parametrized(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def make_pruned(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)


def make_empty(model: nn.Sequential) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0] = nn.Linear(64, 0)


def make_subclassed_weight(model: nn.Sequential) -> None:
    model[0].weight = type("Sharded", (nn.Parameter,), {})(torch.zeros(64, 64))


UNSUPPORTED = [
    (make_own_forward, "OwnForward has a forward of its own"),
    (make_replaced_forward, "Linear has a forward of its own"),
    (make_parametrized, "its weight is computed from others"),
    (make_pruned, "its weight is computed from others"),
    (make_empty, "its weight is empty"),
    (make_subclassed_weight, "its weight is a Sharded"),
]


@pytest.mark.parametrize(("make", "reason"), UNSUPPORTED)
def test_what_is_no_plain_linear_is_left_alone_with_a_reason(make: Any, reason: str) -> None:
    model = mlp(64, 64, 64)
    make(model)
    module = model[0]
    with unchanged_child(model, 0), pytest.warns(UserWarning, match=rf"1 weights with .* stay in 16 bits: 0 \(.*{reason}"):
        report = quantize_(model, "W8A8")
    assert model[0] is module and isinstance(model[1], QuantLinear)
    assert (report.layers[0].status, report.layers[0].name) == ("skipped", "0")


@contextmanager
def unchanged_child(model: nn.Sequential, index: int) -> Iterator[None]:
    state = dict(model[index].__dict__)
    yield
    assert dict(model[index].__dict__) == state


@pytest.mark.parametrize(("make", "reason"), UNSUPPORTED)
def test_strict_makes_it_an_error_unless_ignored(make: Any, reason: str) -> None:
    model = mlp(64, 64, 64)
    make(model)
    with pytest.raises(ValueError, match=rf"strict=True and these cannot be quantized.*\n  {reason}.*: 0$"):
        quantize_(model, QuantConfig("W8A8", strict=True))
    assert not quantized(model)
    quantize_(model, QuantConfig("W8A8", strict=True, ignore=["0"]))
    assert quantized(model).keys() == {"1"}


def test_the_error_gives_reasons_when_nothing_is_left() -> None:
    with pytest.raises(
        ValueError, match=r"nothing to quantize.*Not supported:\n  OwnForward has a forward of its own: 0, 1, 2 and 1 more"
    ):
        quantize_(nn.Sequential(*(OwnForward(64, 64) for _ in range(4))), "W8A8")


def test_a_lone_linear_cannot_be_replaced_in_place() -> None:
    with pytest.raises(ValueError, match=r"model is a single Linear layer.*nn\.Sequential"):
        quantize_(nn.Linear(64, 64), "W8A8")


def test_hooks_stay() -> None:
    model = mlp(64, 64)
    calls = []
    handles = [
        model[0].register_forward_pre_hook(lambda module, args: calls.append("pre")),
        model[0].register_forward_hook(lambda module, args, kwargs, output: calls.append("post"), with_kwargs=True),
    ]
    quantize_(model, "W8A8")
    model(torch.ones(1, 64))
    assert calls == ["pre", "post"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 64))
    assert calls == ["pre", "post"]


# ----------------------------------------------------------------------------------------------------------- 3-D experts


def tiny_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, vocab_size=128, num_experts=4, num_experts_per_tok=2)  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).eval()


def test_fused_experts_are_reported_with_their_share() -> None:
    model = tiny_moe()
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    share = experts / sum(p.numel() for p in model.parameters())
    assert share > 0.6
    with pytest.warns(UserWarning, match=rf"4 weights with {share:.1%} of the parameters stay in 16 bits: .*gate_up_proj.*3-D"):
        report = quantize_(model, W4)
    skipped = [layer for layer in report.layers if layer.status == "skipped"]
    assert sum(layer.num_parameters for layer in skipped) == experts
    assert report.quantized_fraction < 0.25
    assert sum(layer.num_parameters for layer in report.layers) == sum(p.numel() for p in tiny_moe().parameters())
    assert logits(model).isfinite().all()


def test_strict_refuses_fused_experts_before_anything_changes() -> None:
    model = tiny_moe()
    with (
        unchanged(model),
        pytest.raises(ValueError, match=r"strict=True.*\n  3-D parameter \(fused experts\), not supported yet: "),
    ):
        quantize_(model, QuantConfig("W4A16", group_size=32, strict=True))
    quantize_(model, QuantConfig("W4A16", group_size=32, strict=True, ignore=["lm_head", "re:.*mlp.experts"]))
    assert len(quantized(model)) == 8


def test_stacked_matrices_are_reported_whatever_their_name() -> None:
    model = mlp(64, 64)
    model.moe = nn.Module()
    model.moe.w1 = nn.Parameter(torch.zeros(4, 64, 64))
    model.conv, model.position = nn.Conv1d(8, 8, 3), nn.Module()
    model.position.embedding = nn.Parameter(torch.zeros(1, 16, 64))
    with pytest.warns(UserWarning, match="1 weights with .*moe.w1"):
        report = quantize_(model, "W8A8")
    assert [layer.name for layer in report.layers if layer.status == "skipped"] == ["moe.w1"]


# ------------------------------------------------------------------------------------------------------------------ errors


def test_one_error_lists_all_layers_that_a_group_size_does_not_fit() -> None:
    model = tiny_llama(hidden_size=96, intermediate_size=160, num_attention_heads=4, head_dim=24)
    with unchanged(model), pytest.raises(ValueError, match="does not divide") as caught:
        quantize_(model, QuantConfig("W4A16", group_size=64))
    message = str(caught.value)
    assert "group_size=64 does not divide in_features=96 of model.layers.0.self_attn.q_proj (and 11 more)" in message
    assert "group_size=64 does not divide in_features=160 of model.layers.0.mlp.down_proj (and 1 more)" in message
    assert "use group_size=32 or 16 or -1, or add them to ignore" in message
    assert "\n  model.layers.{0-1}.mlp.down_proj: in_features=160" in message and message.count("\n  model.layers.") == 7
    for size in (32, 16, -1):
        quantize_(tiny_llama(hidden_size=96, intermediate_size=160, head_dim=24), QuantConfig("W4A16", group_size=size))


def test_the_sizes_that_the_error_offers_also_fit_the_layers_that_were_fine() -> None:
    model = mlp(128, 96, 64)
    with pytest.raises(ValueError, match="use group_size=32 or 16 or -1"):
        quantize_(model, QuantConfig("W4A16", group_size=64))


@pytest.mark.parametrize(
    ("scheme", "error", "message"),
    [
        ("W4A61", ValueError, r"scheme='W4A61' is unknown; did you mean 'W4A16'\?"),
        ("NVFP4", NotImplementedError, "scheme='NVFP4' is not supported yet; supported: W2A16"),
        (4, TypeError, "config must be a scheme name, a Scheme or a QuantConfig, got int"),
        ({"scheme": "W4A16"}, TypeError, "config must be a scheme name, a Scheme or a QuantConfig, got dict"),
        ("FP8", ValueError, "scheme FP8 has static activation scales, which need calibration data.*use FP8_DYNAMIC"),
    ],
)
def test_schemes_that_cannot_be(scheme: Any, error: type[Exception], message: str) -> None:
    model = tiny_llama()
    with unchanged(model), pytest.raises(error, match=message):
        quantize_(model, scheme)


def test_what_is_not_supported_yet() -> None:
    model = tiny_llama()
    with unchanged(model), pytest.raises(NotImplementedError, match=r"resume is not supported yet"):
        quantize_(model, W4, resume="folder")
    with pytest.raises(NotImplementedError, match=r"model must be a loaded nn\.Module.*load it with transformers first"):
        quantize_("owner/model", W4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got dict"):
        quantize_({}, W4)  # type: ignore[arg-type]


def test_already_quantized_by_torchq() -> None:
    model = tiny_llama()
    quantize_(model, W4)
    before, report = logits(model), model.quant_report
    with pytest.raises(ValueError, match=r"already quantized by torchq \(model\.layers\.0\.self_attn\.q_proj\).*dequantize=True"):
        quantize_(model, W4)
    assert torch.equal(logits(model), before) and model.quant_report is report


@pytest.mark.parametrize("package", ["bitsandbytes.nn.modules", "gptqmodel.nn_modules.qlinear", "awq.modules.linear", "hqq.core"])
def test_already_quantized_by_others(package: str) -> None:
    model = tiny_llama()
    kind = type("QLinear", (nn.Linear,), {"__module__": package})
    model.model.layers[0].mlp.up_proj = kind(64, 128)
    with (
        unchanged(model),
        pytest.raises(ValueError, match=rf"already quantized: model\.layers\.0\.mlp\.up_proj is a {package}\.QLinear"),
    ):
        quantize_(model, W4)


def test_weights_of_another_quantizer_are_recognised_by_their_class() -> None:
    model = mlp(64, 64)
    model[0].weight = type("Int4Tensor", (nn.Parameter,), {"__module__": "torchao.quantization"})(torch.zeros(64, 64))
    with pytest.raises(ValueError, match=r"already quantized: 0\.weight is a Int4Tensor"):
        quantize_(model, "W8A8")


@pytest.mark.parametrize("as_object", [False, True])
def test_a_config_that_says_the_model_is_quantized(as_object: bool) -> None:
    from transformers import GPTQConfig

    model = tiny_llama()
    model.config.quantization_config = GPTQConfig(bits=4) if as_object else {"quant_method": "gptq", "bits": 4}
    with unchanged(model), pytest.raises(ValueError, match="already quantized: its config says quant_method='gptq'"):
        quantize_(model, W4)


def test_a_dequantized_gguf_model_is_fine() -> None:
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "gguf"}
    quantize_(model, W4)
    assert model.config.quantization_config["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_that_are_not_finite_are_named(value: float, dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    with unchanged(model), pytest.raises(ValueError, match=r"NaN or inf: model\.layers\.1\.mlp\.up_proj; reload or repair"):
        quantize_(model, W4)
    quantize_(model, QuantConfig("W4A16", group_size=32, ignore=["lm_head", "re:.*1.mlp.up_proj"]))


def test_integer_and_double_and_lazy_and_meta_weights() -> None:
    model = mlp(64, 64)
    model[0].weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    with unchanged(model), pytest.raises(ValueError, match=r"already quantized: 0\.weight hold integers"):
        quantize_(model, "W8A8")
    model = mlp(64, 64).double()
    with unchanged(model), pytest.raises(ValueError, match=r"must be float16, bfloat16 or float32, got 0 \(torch\.float64\)"):
        quantize_(model, "W8A8")
    model = nn.Sequential(nn.LazyLinear(64))
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias are not initialized yet.*run the model once"):
        quantize_(model, "W8A8")
    model = mlp(64, 64).to("meta")
    with unchanged(model), pytest.raises(ValueError, match="0 are on the meta device and hold no values"):
        quantize_(model, "W8A8")


def test_all_zero_and_denormal_weights() -> None:
    for scheme in ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC"):
        model = mlp(128, 128, dtype=torch.bfloat16)
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].weight[5] = 1e-38
        report = quantize_(model, scheme)
        assert report.layers[0].relative_error is not None and report.layers[0].relative_error <= 1
        with torch.no_grad():
            assert model(torch.ones(1, 128, dtype=torch.bfloat16)).isfinite().all()


# ------------------------------------------------------------------------------------------------- T5 reads weight.dtype


def tiny_t5(**settings: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    settings = dict(d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, vocab_size=128, decoder_start_token_id=0) | settings
    return T5ForConditionalGeneration(T5Config(**settings)).eval()


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_t5_casts_to_the_dtype_of_a_weight(scheme: str) -> None:
    model = tiny_t5()
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    with torch.no_grad():
        before = model(**inputs).logits
        quantize_(model, QuantConfig(scheme, group_size=32 if scheme == "W4A16" else None))
        assert sqnr_db(before, model(**inputs).logits) > 10


def test_a_model_that_casts_to_an_fp8_weight_is_told_what_to_do() -> None:
    model = tiny_t5()
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    quantize_(model, "FP8_DYNAMIC")
    with pytest.raises(
        ValueError, match=r"float8_e4m3fn; where the model casts to this layer's weight\.dtype, add the layer to ignore"
    ):
        model(**inputs)
    model = tiny_t5()
    quantize_(model, QuantConfig("FP8_DYNAMIC", ignore=["lm_head", "re:.*\\.wo$"]))
    with torch.no_grad():
        assert model(**inputs).logits.isfinite().all()


def test_flash_attention_asks_the_config_for_the_dtype() -> None:
    """It would look for an nn.Linear, of which a quantized attention has none."""
    from transformers.integrations.flash_attention import get_target_dtype

    model = tiny_llama(dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    quantize_(model, W4)
    assert get_target_dtype(torch.zeros(1), model.model.layers[0].self_attn) == torch.bfloat16
