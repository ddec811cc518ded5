"""quantize_ on calibration data: any architecture, saved and loaded; what it reports and refuses; nothing lost on failure."""

import copy
import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from torchq import GPTQ, RTN, QuantConfig, QuantLinear, load_pretrained, quantize_, save_pretrained
from torchq.algorithms.gptq import GroupSolver
from torchq.calibration import solve
from torchq.calibration.data import CalibrationData
from torchq.calibration.stream import block_of
from torchq.testing import tiny_llama

COMMON = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
LLM = COMMON | dict(num_key_value_heads=2)
T5 = dict(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=128, decoder_start_token_id=0)
MODELS: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLM)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLM, head_dim=16, tie_word_embeddings=True)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**LLM, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    ),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LLM)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**COMMON, ffn_dim=128, word_embed_proj_dim=32)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**COMMON)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**COMMON)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
}
W4 = QuantConfig("W4A16", group_size=32, algorithm="gptq")


def build(name: str, dtype: torch.dtype) -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        return MODELS[name]().eval()
    finally:
        torch.set_default_dtype(default)


def ids(rows: int = 8, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def data(**settings: Any) -> CalibrationData:
    return CalibrationData(ids(), **{"max_length": 24, "holdout": 0.25} | settings)


def run(model: nn.Module) -> Tensor:
    given: dict[str, Tensor] = {"input_ids": ids(2, 12, seed=5)}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids(2, 5, seed=6)
    with torch.no_grad():
        return model(**given).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_architectures_are_calibrated_saved_and_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(name, dtype)
    base = copy.deepcopy(model)
    report = quantize_(model, W4, calibration=data(batch_tokens=48))
    quantized = [layer for layer in report.layers if layer.status == "quantized"]
    assert quantized and all(layer.output_error is not None and 0 < layer.output_error < 0.5 for layer in quantized)
    assert all(layer.dampening_frac is not None for layer in quantized)
    assert report.algorithm.startswith("GPTQ, mse scales, held-out damping on 144 tokens")
    assert report.timings.keys() == {"forward", "hessian", "scales", "solve"}
    logits = run(model)
    error = ((logits - run(base)).float().norm() / run(base).float().norm()).item()
    assert error < 0.5
    save_pretrained(model, tmp_path / "out")
    assert torch.equal(run(load_pretrained(tmp_path / "out")), logits)


@pytest.mark.parametrize("name", MODELS)
def test_float32_models_are_calibrated_in_bfloat16(name: str) -> None:
    """Other codes here and there, as good ones; the model stays in float32."""
    states, errors = {}, {}
    logits = run(build(name, torch.float32))
    for dtype in ("model", "bfloat16"):
        model = build(name, torch.float32)
        quantize_(model, dataclasses.replace(W4, calibration_dtype=dtype), calibration=data(batch_tokens=48))
        assert {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} == {torch.float32}
        states[dtype], errors[dtype] = model.state_dict(), (run(model) - logits).norm().item()
        assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    packed = [key for key in states["model"] if key.endswith("weight_packed")]
    assert packed and not all(torch.equal(states["model"][key], states["bfloat16"][key]) for key in packed)
    assert errors["bfloat16"] < 1.3 * errors["model"]


def test_less_divergence_than_without_data() -> None:
    """On the calibration distribution, where a random model has nothing else to be good at."""
    base = tiny_llama(hidden_size=128, intermediate_size=256)
    torch.manual_seed(1)
    for parameter in base.parameters():  # a random model's activations are white; give them structure
        if parameter.ndim == 2:
            parameter.data *= torch.rand(parameter.shape[1]).pow(2) * 3
    errors = {}
    for name, config, calibration in (
        ("none", QuantConfig("W3A16", group_size=32), None),
        ("weighted", QuantConfig("W3A16", group_size=32, algorithm="rtn"), data()),
        ("gptq", QuantConfig("W3A16", group_size=32), CalibrationData(ids(64), max_length=24)),
    ):
        model = copy.deepcopy(base)
        quantize_(model, config, calibration=calibration)
        errors[name] = (run(model) - run(base)).square().mean().item()
    assert errors["gptq"] < errors["weighted"] < errors["none"], errors


def test_auto_takes_gptq_for_integers_with_data_and_rounds_the_rest() -> None:
    model = tiny_llama()
    config = QuantConfig("W4A16", group_size=32, overrides={"re:.*down_proj": "FP8_DYNAMIC", "re:.*0.*o_proj": "W8A8"})
    report = quantize_(model, config, calibration=data())
    by_name = {layer.name: layer for layer in report.layers if layer.status == "quantized"}
    assert by_name["model.layers.0.mlp.down_proj"].output_error is None
    assert by_name["model.layers.0.self_attn.o_proj"].dampening_frac is not None
    assert by_name["model.layers.0.self_attn.q_proj"].dampening_frac is not None
    gptq = "GPTQ, mse scales, held-out damping on 144 tokens"
    assert report.algorithm == f"{gptq}; SmoothQuant, {gptq}; RTN, absmax scales"
    assert any("model.layers.0.self_attn.o_proj" in fold.consumers and fold.status != "refused" for fold in report.folds)
    assert not any("q_proj" in name for fold in report.folds if fold.status == "folded" for name in fold.consumers)


def test_the_scales_of_rtn_look_at_the_data() -> None:
    plain, weighted = tiny_llama(), tiny_llama()
    quantize_(plain, QuantConfig("W4A16", group_size=32, algorithm="rtn"))
    report = quantize_(weighted, QuantConfig("W4A16", group_size=32, algorithm="rtn"), calibration=data())
    assert report.algorithm == "RTN, mse scales on 144 tokens"
    assert not torch.equal(plain.state_dict()["model.layers.0.mlp.up_proj.weight_scale"],
                           weighted.state_dict()["model.layers.0.mlp.up_proj.weight_scale"])  # fmt: skip
    absmax = tiny_llama()
    report = quantize_(absmax, QuantConfig("W4A16", group_size=32, algorithm=RTN("absmax")), calibration=data())
    assert report.algorithm == "RTN, absmax scales" and report.layers[0].output_error is None


def test_true_sequential_looks_at_quantized_layers_and_float_does_not() -> None:
    """The first group sees the same inputs; the last does not."""
    states = {}
    for propagate in ("true_sequential", "float"):
        model = tiny_llama()
        config = QuantConfig("W3A16", group_size=32, algorithm=GPTQ(dampening_frac=0.05), propagate=propagate)
        quantize_(model, config, calibration=data())
        states[propagate] = model.state_dict()
    first, last = "model.layers.0.self_attn.q_proj.weight_packed", "model.layers.1.mlp.down_proj.weight_packed"
    assert torch.equal(states["float"][first], states["true_sequential"][first])
    assert not torch.equal(states["float"][last], states["true_sequential"][last])


def test_layers_make_up_for_drift_where_asked_and_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    solve = GroupSolver.solve

    def watch(self: GroupSolver, weight: Tensor, scheme: Any, **options: Any) -> Any:
        solution = solve(self, weight, scheme, **options)
        seen.append(solution.drift_strength)
        return solution

    monkeypatch.setattr(GroupSolver, "solve", watch)
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("W4A16", {}, True),
        ("W4A16", {"algorithm": GPTQ(drift_tokens=0.01)}, True),
        ("W4A16", {"algorithm": GPTQ(drift_tokens=0)}, False),
        ("W4A16", {"propagate": "float"}, False),
        ("W8A16", {}, False),
    ]
    for scheme, settings, corrected in cases:
        seen.clear()
        quantize_(tiny_llama(), QuantConfig(scheme, group_size=32, **settings), calibration=data(batch_tokens=48))
        assert len(seen) == 8 and (seen[0] == 0 if corrected else seen[0] is None)  # nothing before the first layer
        assert all(strength is not None and 0 <= strength <= 1 for strength in seen) == corrected
        assert not corrected or max(strength or 0 for strength in seen) > 0


def test_the_same_call_gives_the_same_codes_and_a_model_in_training_mode_comes_back_so() -> None:
    models = [tiny_llama(attention_dropout=0.5).train() for _ in range(2)]
    for model in models:
        quantize_(model, W4, calibration=data())
        assert model.training and all(module.training for module in model.modules())
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "t5"])
def test_recomputing_blocks_gives_the_same_model_and_is_chosen_where_memory_is_short(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = []
    for recompute, left in ((False, 0), (None, 1 << 40), (None, None), (True, 1 << 40)):
        monkeypatch.setattr(solve, "available_memory", lambda device, left=left: left)
        model = build(name, torch.bfloat16)
        quantize_(model, dataclasses.replace(W4, recompute=recompute), calibration=data())
        codes.append({key: value for key, value in model.state_dict().items() if "packed" in key or "scale" in key})
    monkeypatch.setattr(solve, "available_memory", lambda device: 100_000)
    model = build(name, torch.bfloat16)
    monkeypatch.setattr(solve, "_MOST_GROUPS", 0)
    quantize_(build(name, torch.bfloat16), W4, calibration=data())  # as with many routed experts: not chosen
    monkeypatch.undo()
    monkeypatch.setattr(solve, "available_memory", lambda device: 100_000)
    with pytest.warns(UserWarning, match=r"[\d,]+ tokens hold about 0\.\d GB inside a layer, and cpu has 0\.0 GB left"):
        report = quantize_(model, W4, calibration=data())
    assert any("recompute=True" in message for message in report.warnings)
    codes.append({key: value for key, value in model.state_dict().items() if "packed" in key or "scale" in key})
    for other in codes[1:]:
        assert other.keys() == codes[0].keys() and all(torch.equal(other[key], value) for key, value in codes[0].items())


def test_a_quantized_head_is_calibrated_too() -> None:
    model = tiny_llama()
    report = quantize_(model, QuantConfig("W4A16", group_size=32, ignore=[]), calibration=data())
    head = next(layer for layer in report.layers if layer.name == "lm_head")
    assert head.status == "quantized" and head.dampening_frac is not None
    assert isinstance(model.lm_head, QuantLinear)


@pytest.mark.parametrize("undo", [True, False])
@pytest.mark.parametrize("propagate", ["true_sequential", "float"])
def test_a_failure_half_way_leaves_the_model_as_it_was(propagate: str, undo: bool) -> None:
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = run(model)
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = float("nan")
    config = QuantConfig("W4A16", group_size=32, algorithm="gptq", propagate=propagate)
    with pytest.raises(ValueError, match=r"the input of model\.layers\.1\.mlp\.gate_proj holds NaN or inf"):
        quantize_(model, config, calibration=data(), undo=undo)
    if undo:
        model.model.layers[1].post_attention_layernorm.weight.data.copy_(before["model.layers.1.post_attention_layernorm.weight"])
        assert not any(isinstance(module, QuantLinear) for module in model.modules())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(run(model), logits)
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_that_no_token_reaches_are_named_and_nothing_has_changed() -> None:
    model = tiny_llama()
    model.extra = nn.Linear(64, 64)
    with pytest.raises(ValueError, match="no token reaches extra; add them to ignore, quantize them with other data"):
        quantize_(model, W4, calibration=data())
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_bad_requests() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"algorithm='gptq' needs calibration data: pass quantize_\(\.\.\., calibration=texts"):
        quantize_(model, W4)
    with pytest.raises(
        NotImplementedError, match="algorithm='gptq' supports integer weights per group or channel, got scheme FP8_"
    ):
        quantize_(model, QuantConfig("FP8_DYNAMIC", algorithm="gptq"), calibration=data())
    with pytest.raises(ValueError, match="propagate must be one of"):
        QuantConfig("W4A16", propagate="sideways")
    with pytest.raises(
        TypeError,
        match=r"algorithm must be one of .*AWQ\(\.\.\.\) or SmoothQuant\(\.\.\.\), got int",
    ):
        QuantConfig("W4A16", algorithm=3)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


def test_a_weight_used_by_two_layers_is_solved_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    model = Tied()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(
            model, QuantConfig("W4A16", group_size=32, ignore=[]), calibration=[{"x": torch.randn(64, 32)} for _ in range(2)]
        )
    assert torch.equal(model.first.dequantize(), model.second.dequantize())


def test_blocks_by_name() -> None:
    assert block_of("model.layers.3.mlp.up_proj") == "model.layers.3"
    assert block_of("encoder.block.0.layer.1.DenseReluDense.wi") == "encoder.block.0"
    assert block_of("transformer.h.11.attn.c_attn") == "transformer.h.11"
    assert block_of("0.weight") == "0"
    assert block_of("lm_head") is None


def test_the_progress_bar_shows_the_current_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    quantize_(build("llama", torch.bfloat16), W4, calibration=data())
    assert re.search(r"layers\.\d\.\S+: output error \d+\.\d%", capsys.readouterr().err)
