"""On a real model."""

import pytest
import torch
from torch import Tensor

from torchq import QuantConfig, numerics, quantize_
from torchq.algorithms.gptq import GroupSolver, Solution, output_error
from torchq.algorithms.rtn import RTN, quantize_weight
from torchq.calibration.data import CalibrationData
from torchq.evaluation.divergence import english_text
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
