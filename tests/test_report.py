"""QuantReport: shares, errors, text and JSON."""

import json
from pathlib import Path

import pytest
import torch

from torchq import QuantConfig, QuantReport, quantize_
from torchq.report import LayerReport
from torchq.testing import tiny_llama


def report_of(**settings: object) -> tuple[torch.nn.Module, QuantReport]:
    model = tiny_llama()
    return model, quantize_(model, QuantConfig("W4A16", group_size=32, **settings))  # type: ignore[arg-type]


def test_every_parameter_is_in_it_once() -> None:
    total = sum(parameter.numel() for parameter in tiny_llama().parameters())
    _, report = report_of(overrides={"re:.*v_proj": None, "re:.*o_proj": "W8A8"})
    assert report.num_parameters == total == sum(layer.num_parameters for layer in report.layers)
    names = [layer.name for layer in report.layers]
    assert len(names) == len(set(names))
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["lm_head"].status == "ignored" and by_name["lm_head"].reason == "in ignore"
    assert by_name["model.embed_tokens.weight"].reason == "not targeted"
    assert by_name["(vectors)"].num_parameters == 5 * 64
    assert by_name["model.layers.0.self_attn.v_proj"].reason == "in overrides"
    assert report.quantized_fraction == pytest.approx((total - 2 * 128 * 64 - 5 * 64 - 2 * 32 * 64) / total)


def test_numbers_of_a_layer() -> None:
    original = tiny_llama().model.layers[0].self_attn
    model, report = report_of(overrides={"re:.*o_proj": "W8A8"})
    by_name = {layer.name: layer for layer in report.layers}
    q_proj, o_proj = by_name["model.layers.0.self_attn.q_proj"], by_name["model.layers.0.self_attn.o_proj"]
    assert (q_proj.scheme, q_proj.format, q_proj.num_bits, q_proj.num_parameters) == ("W4A16", "pack-quantized", 4, 64 * 64)
    assert q_proj.bits_per_weight == 4 + 32 / 32  # float32 scales of 32 weights
    assert o_proj.bits_per_weight == 8 + 32 / 64
    assert q_proj.seconds > 0
    for entry, name in ((q_proj, "q_proj"), (o_proj, "o_proj")):
        weight = original.get_submodule(name).weight.detach()
        restored = model.get_submodule(f"model.layers.0.self_attn.{name}").dequantize()
        assert entry.relative_error == pytest.approx(float((weight - restored).norm() / weight.norm()), rel=1e-4)


def test_asymmetric_layers_store_more() -> None:
    model = tiny_llama()
    report = quantize_(model, QuantConfig("W4A16_ASYM", group_size=32))
    assert report.layers[0].bits_per_weight == 4 + 32 / 32 + 4 / 32


def test_summary_says_what_was_left_out_and_why() -> None:
    _, report = report_of(ignore=["lm_head", "re:.*down_proj"])
    report.warnings.append("mind the gap")
    lines = report.summary().splitlines()
    assert lines[0].startswith(
        "W4A16 (RTN, |error|^3 scales): 12 layers quantized, 63.4% of 90,432 parameters at 5.00 bits per weight"
    )
    assert "  3 ignored: in ignore (27.2% of the parameters)" in lines
    assert "  1 ignored: not targeted (9.1% of the parameters)" in lines
    assert lines[-1] == "  warning: mind the gap"


def test_json_round_trip(tmp_path: Path) -> None:
    _, report = report_of()
    path = tmp_path / "report.json"
    report.to_json(path)
    data = json.loads(path.read_text())
    assert data["quantized_fraction"] == report.quantized_fraction
    assert QuantReport.from_dict(data) == report


def test_an_empty_report() -> None:
    report = QuantReport("W4A16", "RTN", 0)
    assert report.quantized_fraction == 0 and report.mean_relative_error == 0
    assert "0 layers quantized" in report.summary()
    report.layers.append(LayerReport("x", "ignored", 0, 0))
    assert "1 ignored" in report.summary()
