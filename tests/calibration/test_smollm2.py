"""On a real model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from torchq import QuantArgs, QuantConfig, SmoothQuant, numerics, quantize_
from torchq.algorithms.gptq import GPTQ, GroupSolver, Solution, output_error
from torchq.algorithms.rtn import RTN, quantize_weight
from torchq.architectures import find_folds
from torchq.calibration.data import CalibrationData
from torchq.evaluation.divergence import english_text, token_windows
from torchq.folding import fold_
from torchq.scheme import Scheme
from torchq.sources import demo_model_path, load_source


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_less_output_error_than_nearest_rounding_in_every_layer(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On held-out tokens, group by group of Linears; nearest rounding with scales of least error, and without data."""
    model, tokenizer = load_source(demo_model_path(), dtype=torch.bfloat16)
    found: list[tuple[float, float, float]] = []
    solve = GroupSolver.solve

    def compare(self: GroupSolver, weight: Tensor, of: Scheme, **options: bool) -> Solution:
        solution = solve(self, weight, of, **options)
        nearest, _ = quantize_weight(solution.target, of, RTN(), self.train.mean_square)
        plain, _ = quantize_weight(solution.target, of, RTN())
        assert self.holdout is not None
        errors = []
        for quantized in (solution.quantized, nearest, plain):
            restored = numerics.dequantize(quantized.q, quantized.scale, quantized.zero_point, of.weights).float()
            errors.append(output_error(restored - solution.target, self.holdout.H))
        found.append((errors[0], errors[1], errors[2]))
        return solution

    monkeypatch.setattr(GroupSolver, "solve", compare)
    data = CalibrationData(english_text(), num_samples=16, max_length=256)
    report = quantize_(model, QuantConfig(scheme, group_size=64), calibration=data, tokenizer=tokenizer, progress=False)
    assert len(found) == 30 * 4 and sum(layer.status == "quantized" for layer in report.layers) == 210
    assert all(gptq < nearest and gptq < plain for gptq, nearest, plain in found)
    ratios = torch.tensor(found)
    assert (ratios[:, 0] / ratios[:, 1]).median() < 0.7


def plant_outliers(model: Any) -> None:
    """Make one channel of what every norm gives 100 times as large, and the weights that read it as much smaller."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            channel = int(torch.randint(norm.weight.numel(), (1,), generator=generator))
            norm.weight[channel] *= 100
            for reader in readers:
                reader.weight[:, channel] /= 100


@pytest.mark.slow
@torch.no_grad()
def test_smoothquant_takes_planted_outliers_out() -> None:
    """One static scale for each tensor of activations: without smoothing an outlier leaves the others few of the 255 steps."""
    base, tokenizer = load_source(demo_model_path(), dtype=torch.float32)
    text = english_text()
    calibration = CalibrationData(text[: len(text) // 2], num_samples=16, max_length=256)
    windows = token_windows(tokenizer, text[len(text) // 2 :], num_windows=4, length=256)
    expected = [base(ids[None]).logits[0].log_softmax(-1) for ids in windows]
    static = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor"))

    def mean_kl(algorithm: Any, planted: bool) -> float:
        model = copy.deepcopy(base)
        if planted:
            plant_outliers(model)
        config = QuantConfig(static, algorithm=algorithm)
        quantize_(model, config, calibration=calibration, tokenizer=tokenizer, progress=False)
        pairs = zip(windows, expected, strict=True)
        return sum(float((p.exp() * (p - model(ids[None]).logits[0].log_softmax(-1))).sum(-1).mean()) for ids, p in pairs) / 4

    smoothed, clean = mean_kl([SmoothQuant(), GPTQ()], True), mean_kl([SmoothQuant(), GPTQ()], False)
    assert smoothed < 1.2 * clean, (smoothed, clean)
    ruined, plain = mean_kl("gptq", True), mean_kl("gptq", False)
    assert ruined > 3 * plain and plain > 2 * clean, (ruined, plain, clean)


@pytest.mark.slow
@torch.no_grad()
def test_every_block_folds_exactly() -> None:
    model, _ = load_source(demo_model_path(), dtype=torch.float32)
    ids = torch.randint(100, 1000, (1, 32), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    folds = find_folds(model)
    assert len(folds.pairs) == 30 * 4 and {refused.producer.split(".")[-1] for refused in folds.refused} == {"gate_proj"}
    generator = torch.Generator().manual_seed(0)
    for pair in folds.pairs:
        fold_(model, pair, 0.5 + 1.5 * torch.rand(pair.num_channels, generator=generator))
    assert (model(ids).logits - before).norm() < 1e-5 * before.norm()
