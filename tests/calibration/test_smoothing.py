"""AWQ and SmoothQuant in whole models: folds change nothing but rounding, and are there only where they help."""

import copy
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn

from torchq import (
    AWQ,
    GPTQ,
    RTN,
    QuantArgs,
    QuantConfig,
    QuantLinear,
    Scheme,
    SmoothQuant,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from torchq.algorithms.gptq import GroupSolver
from torchq.calibration import solve
from torchq.calibration.data import CalibrationData
from torchq.calibration.smoothing import Smoothing
from torchq.folding import fold_
from torchq.testing import tiny_llama

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
LLM = SIZES | dict(num_key_value_heads=2)
T5 = dict(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0)
DEEPSEEK = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
                first_k_dense_replace=0, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                topk_group=1)  # fmt: skip
GEMMA4 = dict(head_dim=8, global_head_dim=8, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
              num_kv_shared_layers=2, vocab_size_per_layer_input=96, hidden_size_per_layer_input=16)  # fmt: skip
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLM)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLM)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**LLM, head_dim=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLM, head_dim=8)),
    "gemma4": lambda: hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**(LLM | GEMMA4))),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LLM)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**LLM)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**LLM, num_local_experts=4)),
    "deepseek": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES, **DEEPSEEK)),
    "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**SIZES, embedding_size=32)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
}
# folded at least, of AWQ in W8A16 and SmoothQuant in W8A8
FOLDED = {"llama": 4, "qwen2": 4, "gemma2": 4, "gemma3": 4, "gemma4": 6, "phi3": 4, "cohere": 3, "gpt2": 3, "opt": 4,
          "mixtral": 2, "deepseek": 6, "albert": 1, "t5": 8}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.* weights with .* stay in 16 bits")
STATIC = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor"), name="static int8")


def build(name, dtype=torch.float32, spread=0.7):
    """A tiny model whose norms and rows differ much in size, so that scales are worth it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().eval()
    generator = torch.Generator().manual_seed(0)
    offset = 1.0 if name in ("gemma2", "gemma3") else 0.0
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim > 1:
                axis = 1 if type(model.get_submodule(key.rpartition(".")[0])).__name__ == "Conv1D" else 0
                rows = torch.exp(spread * torch.randn(p.shape[axis], generator=generator))
                if p.ndim > 2 or re.search("embed|shared|wte|q_proj|k_proj|rout|gate.weight", key):
                    rows = torch.ones_like(rows)
                shape = [-1 if dim == axis else 1 for dim in range(p.ndim)]
                p.copy_(noise / p.shape[-1] ** 0.5 * rows.view(shape))
            else:
                p.copy_(torch.exp(spread * noise) - offset if key.endswith("weight") else 0.3 * noise)
    for module in model.modules():
        if module._parameters:
            module.to(dtype)  # buffers of rotary embeddings stay in float32
    return model


def ids(rows=8, length=24, seed=0):
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def data(**settings):
    return CalibrationData(ids(), **{"max_length": 24, "holdout": 0.25, "batch_tokens": 48} | settings)


@torch.no_grad()
def run(model):
    given = {"input_ids": ids(2, 12, seed=5)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids(2, 5, seed=6)
    return model(**given).logits.float()


def config(scheme, algorithm, **settings):
    sizes = {"group_size": 16} if scheme in ("W8A16", "W4A16") else {}
    return QuantConfig(scheme, algorithm=algorithm, calibration_dtype="model", **sizes, **settings)


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def folds_of(report, status):
    return [fold for fold in report.folds if fold.status == status]


@pytest.fixture
def accepted(monkeypatch):
    """The folds that were accepted."""
    found, accept = [], Smoothing.accept

    def watch(self, fold, error, before):
        found.append(fold)
        accept(self, fold, error, before)

    monkeypatch.setattr(Smoothing, "accept", watch)
    return found


def folded_by_hand(base, accepted):
    """The float32 model with these folds, and nothing rounded."""
    ideal = copy.deepcopy(base).float()
    for fold in accepted:
        fold_(ideal, fold.pair, fold.scale)
    return ideal


def assert_folded(model, base, accepted):
    """Of a float32 model: each weight is near the original one times its scales, or exactly that if it is not quantized."""
    ideal = folded_by_hand(base, accepted)
    assert distance(run(ideal), run(copy.deepcopy(base).float())) < 2e-5
    for key, expected in ideal.named_parameters():
        module = model.get_submodule(key.rpartition(".")[0])
        if key.endswith(".weight") and isinstance(module, QuantLinear):
            expected = expected.t() if module.transposed else expected
            worst = ((module.dequantize().float() - expected).norm(dim=1) / expected.norm(dim=1)).max()
            assert worst < 0.06, (key, worst)  # of 8 bits
        else:
            torch.testing.assert_close(model.get_parameter(key), expected, rtol=1e-6, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- nothing but rounding


@pytest.mark.parametrize(("scheme", "algorithm"), [("W8A16", AWQ()), ("W8A8", SmoothQuant())], ids=["awq", "smoothquant"])
@pytest.mark.parametrize("name", MODELS)
def test_folds_change_nothing_but_rounding(name, scheme, algorithm, accepted):
    base, errors = build(name), []
    for steps in ([GPTQ()], [algorithm, GPTQ()]):
        model = copy.deepcopy(base)
        report = quantize_(model, config(scheme, steps), calibration=data())
        errors.append(distance(run(model), run(base)))
    assert_folded(model, base, accepted)
    done = folds_of(report, "folded")
    assert len(done) == len(accepted) >= FOLDED[name] - (2 if scheme == "W8A16" else 0)
    assert max(fold.spread for fold in done) > 1.1
    assert all(fold.error < fold.error_before for fold in done)
    assert errors[1] < 2 * errors[0], errors
    norms = [key for key, p in base.named_parameters() if p.ndim == 1 and key.endswith(".weight")]
    changed = {key.removesuffix(".weight") for key in norms if not torch.equal(base.get_parameter(key), model.get_parameter(key))}
    assert changed == {fold.producer for fold in done if base.get_submodule(fold.producer).weight.ndim == 1}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "t5", "gemma4"])
def test_in_bfloat16(name, accepted):
    base = build(name, torch.bfloat16)
    model = copy.deepcopy(base)
    report = quantize_(model, config("W8A8", [SmoothQuant(), GPTQ()]), calibration=data())
    assert len(folds_of(report, "folded")) == len(accepted) >= FOLDED[name]
    ideal = folded_by_hand(base, accepted)
    assert distance(run(ideal), run(copy.deepcopy(base).float())) < 2e-5
    for key, p in model.named_parameters():
        if p.ndim == 1 and key.endswith("weight"):
            torch.testing.assert_close(p.float(), ideal.get_parameter(key), rtol=2**-7, atol=2**-7)
    assert distance(run(model), run(base)) < 0.5


def test_groups_that_no_scale_helps_say_so_and_keep_their_norms():
    base = tiny_llama()
    model = copy.deepcopy(base)
    report = quantize_(model, config("W8A16", [AWQ(duo_scaling=False, num_ratios=1, max_ratio=1.0)]), calibration=data())
    assert len(folds_of(report, "undone")) == 8 and not folds_of(report, "folded")
    assert {fold.reason for fold in folds_of(report, "undone")} == {"no scales lower the error"}
    assert all(torch.equal(p, base.get_parameter(key)) for key, p in model.named_parameters())
    plain = copy.deepcopy(base)
    quantize_(plain, config("W8A16", [RTN()]), calibration=data())
    assert all(torch.equal(tensor, plain.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_folds_that_do_not_help_on_other_tokens_are_undone(monkeypatch):
    """Alpha 0 makes the activations worse."""
    base = build("llama")
    model, plain = copy.deepcopy(base), copy.deepcopy(base)
    report = quantize_(model, config("W8A8", [SmoothQuant(alpha=0.0), GPTQ()]), calibration=data())
    undone = folds_of(report, "undone")
    assert len(undone) >= 4 and all(fold.error >= fold.error_before and fold.spread > 1.1 for fold in undone)
    assert {fold.reason for fold in undone} == {"the error on held-out tokens is not lower"}
    norms = [f"{fold.producer}.weight" for fold in undone if "norm" in fold.producer]
    assert norms and all(torch.equal(model.get_parameter(key), base.get_parameter(key)) for key in norms)

    rounded = solve.round_parts

    def worse(where, group, parts, fold=None, **options):
        result = rounded(where, group, parts, fold, **options)
        return result if fold is None else [replace(one, error=float("inf")) for one in result]

    monkeypatch.setattr(solve, "round_parts", worse)
    model = copy.deepcopy(base)
    report = quantize_(model, config("W8A8", [SmoothQuant(), GPTQ()]), calibration=data())
    quantize_(plain, config("W8A8", [GPTQ()]), calibration=data())
    assert not folds_of(report, "folded") and len(folds_of(report, "undone")) == 8
    assert all(torch.equal(tensor, plain.state_dict()[key]) for key, tensor in model.state_dict().items())


def test_the_report(tmp_path):
    model = build("llama")
    report = quantize_(model, config("W4A16", ["awq", "gptq"]), calibration=data())
    assert report.algorithm.startswith("AWQ, GPTQ, mse scales, held-out damping on 144 tokens")
    assert report.timings.keys() == {"forward", "hessian", "folds", "scales", "solve"}
    assert re.search(r"scales of channels: (\d+ folded, )?(\d+ undone, )?2 refused", report.summary())
    refused = folds_of(report, "refused")
    assert {fold.producer for fold in refused} == {f"model.layers.{i}.mlp.gate_proj" for i in range(2)}
    assert all(fold.reason and fold.error is None for fold in refused)
    assert type(report).from_dict(report.to_dict()).folds == report.folds


# ----------------------------------------------------------------------------------------------------------- 16-bit consumers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ignored", ["q_proj", "v_proj", "up_proj"])
def test_layers_in_ignore_are_scaled_by_powers_of_two(ignored, dtype, accepted):
    base = build("llama", dtype)
    model = copy.deepcopy(base)
    pattern = f"re:.*{ignored}"
    report = quantize_(model, config("W8A8", [SmoothQuant(), GPTQ()], ignore=[pattern, "lm_head"]), calibration=data())
    assert len(folds_of(report, "folded")) >= 6
    reading = [fold for fold in accepted if any(ignored in name for name in (*fold.others, fold.pair.producer.name))]
    assert reading and all(fold.effective.unique().numel() > 1 for fold in reading)
    for fold in reading:
        assert torch.equal(fold.effective.log2(), fold.effective.log2().round())
    if dtype == torch.float32:
        assert_folded(model, base, accepted)
    ideal = folded_by_hand(base, accepted)
    for key, p in model.named_parameters():
        if ignored in key:
            assert torch.equal(p.float(), ideal.get_parameter(key))  # to the last bit, also in bfloat16
    assert distance(run(model), run(base)) < 0.2


def test_routers_in_16_bits_are_multiplied(accepted):
    base = build("deepseek")
    model = copy.deepcopy(base)
    quantize_(model, config("W8A8", [SmoothQuant(), GPTQ()]), calibration=data())
    routed = [fold for fold in accepted if "model.layers.0.mlp.gate" in fold.others]
    assert len(routed) == 1 and "model.layers.0.mlp.experts.gate_up_proj" in routed[0].others
    assert routed[0].effective.unique().numel() > 1
    gate = base.model.layers[0].mlp.gate.weight * routed[0].effective
    assert torch.equal(model.model.layers[0].mlp.gate.weight, gate)


def test_several_schemes_in_a_group_are_not_scaled():
    model = build("llama")
    settings = config("W4A16", [AWQ(), GPTQ()], overrides={"re:.*q_proj": "W8A16"})
    report = quantize_(model, settings, calibration=data())
    refused = [fold for fold in folds_of(report, "refused") if fold.producer.endswith("input_layernorm")]
    assert len(refused) == 2 and all("have several schemes" in fold.reason for fold in refused)
    assert all(torch.equal(layer.input_layernorm.weight, other.input_layernorm.weight)
               for layer, other in zip(model.model.layers, build("llama").model.layers, strict=True))  # fmt: skip


def test_rows_that_share_a_scale_are_not_divided():
    model = build("llama")
    report = quantize_(model, config("FP8", [SmoothQuant()]), calibration=data())
    refused = {fold.producer: fold.reason for fold in folds_of(report, "refused")}
    for name in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"):
        assert refused[name] == f"the rows of {name} share scales, so that they cannot be divided once it is quantized"
    assert len(folds_of(report, "folded") + folds_of(report, "undone")) == 4


# --------------------------------------------------------------------------------------------------- models of other shapes


class Crossing(nn.Module):
    """No numbered blocks; the norm is read again after another layer has run."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.late = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(32, 16)

    def forward(self, x):
        h = self.norm(x)
        y = self.down(torch.relu(self.up(h)))
        return self.late(h) + y


class Twice(nn.Module):
    """One block of layers that runs twice, and two names for one Linear."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))])
        self.head = nn.Linear(32, 16)
        self.other = self.head

    def forward(self, x):
        for _ in range(2):
            x = x + self.layers[0](x)
        return self.head(x) + self.other(x)


def plain(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind().eval()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.weight.copy_(torch.exp(torch.randn(32)))
                if isinstance(module, nn.Linear):
                    module.weight.mul_(torch.exp(0.7 * torch.randn(module.out_features, 1)))
    return model


def sequential():
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


@pytest.mark.parametrize("propagate", ["true_sequential", "float"])
@pytest.mark.parametrize("kind", [Crossing, Twice, sequential])
def test_modules_without_a_config(kind, propagate):
    base, generator = plain(kind), torch.Generator().manual_seed(0)
    name = "input" if kind is sequential else "x"
    batches = [{name: torch.randn(4, 16, 32, generator=generator)} for _ in range(6)]
    errors = []
    for steps in ([GPTQ()], [SmoothQuant(), GPTQ()]):
        model = copy.deepcopy(base)
        report = quantize_(model, config("W8A8", steps, ignore=[], propagate=propagate), calibration=batches)
        x = torch.randn(50, 32, generator=torch.Generator().manual_seed(9))
        errors.append(distance(model(x), base(x)))
    assert len(folds_of(report, "folded")) == 2
    assert errors[1] < 1.2 * errors[0], errors


def test_a_tensor_that_is_read_in_two_groups_is_not_scaled():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.all, self.some = nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x):
            h = self.norm(x)
            return self.all(h)[:, ::2] + self.some(h[:, ::2])

    model = plain(Strided)
    batches = [{"x": torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(seed))} for seed in range(4)]
    report = quantize_(model, config("W8A8", [SmoothQuant()], ignore=[]), calibration=batches)
    assert {fold.status for fold in report.folds} == {"refused"}
    assert any("read it too, and are calibrated on other tokens" in fold.reason for fold in report.folds)
    assert torch.equal(model.norm.weight, plain(Strided).norm.weight)


# ------------------------------------------------------------------------------------------------------------ how it is run


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputing_gives_the_same_model(name):
    states, folds = [], []
    for recompute in (False, True):
        model = build(name)
        report = quantize_(model, config("W4A16", [AWQ(), GPTQ()], recompute=recompute), calibration=data())
        states.append(model.state_dict())
        folds.append(report.folds)
    assert folds[0] == folds[1] and folds_of(report, "folded")
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_the_inputs_of_the_16_bit_model(name, accepted):
    """The first group is the same either way."""
    base, groups = build(name), []
    for propagate in ("true_sequential", "float"):
        accepted.clear()
        model = copy.deepcopy(base)
        quantize_(model, config("W8A8", [SmoothQuant(), GPTQ()], propagate=propagate), calibration=data())
        assert_folded(model, base, accepted)
        groups.append((accepted[0].pair.producer.name, accepted[0].effective))
    assert groups[0][0] == groups[1][0] and torch.equal(groups[0][1], groups[1][1])


@contextmanager
def failing_at(monkeypatch, call, error):
    """Raise in the call-th solution of a group; yields what the model was like then."""
    calls, solved, seen = 0, GroupSolver.solve, {}

    def fail(self, *args, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            seen["state"] = {key: tensor.clone() for key, tensor in seen["model"].named_parameters()}
            raise error
        return solved(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(GroupSolver, "solve", fail)
        yield seen


FAILURES = [
    ("qwen2", "q_proj", 12, "true_sequential", RuntimeError("out of memory")),
    ("qwen2", "lm_head", 14, "float", KeyboardInterrupt()),
    ("llama", "v_proj", 12, "true_sequential", KeyboardInterrupt()),
    ("llama", "v_proj", 12, "float", RuntimeError("out of memory")),
    ("gpt2", "lm_head", 12, "true_sequential", RuntimeError("out of memory")),
    ("deepseek", "lm_head", 16, "true_sequential", KeyboardInterrupt()),
    ("t5", "lm_head", 32, "true_sequential", RuntimeError("out of memory")),
]


@pytest.mark.parametrize(("name", "ignored", "call", "propagate", "error"), FAILURES)
def test_a_failure_half_way_is_rolled_back(name, ignored, call, propagate, error, monkeypatch):
    base = build(name, torch.bfloat16)
    model = copy.deepcopy(base)
    vectors = {key: id(p) for key, p in model.named_parameters() if p.ndim == 1}
    settings = config("W8A8", [SmoothQuant(), GPTQ()], propagate=propagate, ignore=[f"re:.*{ignored}", "re:.*lm_head"])
    with failing_at(monkeypatch, call, error) as seen, pytest.raises(type(error)):
        seen["model"] = model
        quantize_(model, settings, calibration=data())
    changed = [key for key, tensor in seen["state"].items() if not torch.equal(tensor, base.get_parameter(key))]
    assert any(base.get_parameter(key).ndim == 1 for key in changed)  # folds had been carried out
    assert ignored != "v_proj" or any(ignored in key for key in changed)
    assert [type(module) for module in model.modules()] == [type(module) for module in base.modules()]
    assert {key: id(p) for key, p in model.named_parameters() if p.ndim == 1} == vectors
    assert all(torch.equal(p, base.get_parameter(key)) for key, p in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert quantize_(model, settings, calibration=data()).folds


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3"])
@pytest.mark.parametrize(("scheme", "algorithm"), [("W4A16", "awq"), ("W8A8", "smoothquant")])
def test_saved_and_loaded(name, scheme, algorithm, tmp_path):
    model = build(name, torch.bfloat16)
    report = quantize_(model, config(scheme, [algorithm, "gptq"]), calibration=data())
    assert folds_of(report, "folded")
    save_pretrained(model, tmp_path / "out")
    assert torch.equal(run(load_pretrained(tmp_path / "out")), run(model))
    if name == "gpt2":
        return  # transformers loads no compressed Conv1D
    theirs = type(model).from_pretrained(tmp_path / "out", dtype="auto").eval()
    logits = run(theirs)  # decompresses
    for key, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            assert torch.equal(theirs.get_submodule(key).weight, layer.dequantize()), key
    for key, p in model.named_parameters():
        assert torch.equal(theirs.get_parameter(key), p), key
    assert distance(logits, run(model)) < (0.05 if scheme == "W4A16" else 0.2)


# -------------------------------------------------------------------------------------------------------------- what it is for


def with_outlier(model, channel=5, size=100.0):
    """The same function; one channel of what the attention layers read is ``size`` times as large."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[channel] *= size
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight[:, channel] /= size
    return model


def test_smoothing_takes_a_planted_outlier_out():
    base, errors = tiny_llama(), {}
    assert distance(run(with_outlier(copy.deepcopy(base))), run(base)) < 1e-5
    for planted in (False, True):
        for steps in ((RTN(),), (SmoothQuant(), RTN())):
            model = with_outlier(copy.deepcopy(base)) if planted else copy.deepcopy(base)
            quantize_(model, config(STATIC, steps), calibration=data())
            errors[planted, len(steps)] = distance(run(model), run(base))
    assert errors[True, 1] > 3 * errors[False, 1], errors
    assert errors[True, 2] < 1.2 * errors[False, 1], errors


def test_awq_helps_where_a_few_channels_carry_the_activations():
    errors = {1: 0.0, 2: 0.0}
    for seed in range(2):
        base = tiny_llama(seed=seed, hidden_size=128, intermediate_size=256)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in base.model.layers:
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.weight.copy_(torch.exp(torch.randn(128, generator=generator)))
        for steps in ([GPTQ()], [AWQ(), GPTQ()]):
            model = copy.deepcopy(base)
            settings = QuantConfig("W4A16", group_size=-1, algorithm=steps)
            report = quantize_(model, settings, calibration=CalibrationData(ids(32, 48), max_length=48))
            errors[len(steps)] += distance(run(model), run(base))
        assert len(folds_of(report, "folded")) >= 4
    assert errors[2] < errors[1], errors


# ---------------------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("settings", "calibrated", "message"),
    [
        (("W8A8", "awq"), True, "algorithm='awq' is for weight-only schemes, got W8A8 for model.layers.0.*; use 'smoothquant'"),
        (("FP8", ["awq", "rtn"]), True, "algorithm='awq' is for weight-only schemes, got FP8"),
        (("W4A16", "smoothquant"), True, "algorithm='smoothquant' is for schemes that round activations, got W4A16 .*use 'awq'"),
        (("W4A16", "awq"), False, "algorithm='awq' needs calibration data: pass quantize_.*or use algorithm='rtn'"),
        (("W8A8", ["smoothquant", "gptq"]), False, "algorithm='smoothquant' needs calibration data"),
        ((STATIC, "smoothquant"), False, "scheme static int8 has static activation scales, which need calibration data"),
    ],
)
def test_bad_requests_change_nothing(settings, calibrated, message):
    base = build("llama")
    model = copy.deepcopy(base)
    with pytest.raises(ValueError, match=message):
        quantize_(model, config(*settings), calibration=data() if calibrated else None)
    assert all(torch.equal(p, base.get_parameter(key)) for key, p in model.named_parameters())
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
