import json
import subprocess
import sys

import pytest
import torch

from torchq import QuantLinear, __version__, load_pretrained
from torchq.cli import main
from torchq.kv_scales import kv_scales
from torchq.testing import tiny_llama


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    tiny_llama().bfloat16().save_pretrained(path)
    return path


def run(monkeypatch, capsys, *arguments):
    """Run the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["torchq", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    captured = capsys.readouterr()
    return stopped.value.code or 0, captured.out, captured.err


def test_quantize_writes_a_checkpoint_and_a_table(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    code, stdout, _ = run(monkeypatch, capsys, "quantize", folder, "-o", out, "--scheme", "w4a16", "--group-size", 32)
    assert code == 0
    assert "q_proj" in stdout and "quantized" in stdout and "lm_head" in stdout
    model = load_pretrained(out)
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (out / "quant_report.json").exists()


def test_options_reach_the_config(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    options = ["--scheme", "W8A8", "--ignore", "re:.*down_proj", "--ignore", "lm_head", "--max-shard-size", "100KB"]
    options += ["--override", "re:.*q_proj=none", "--override", "re:.*k_proj=FP8_DYNAMIC"]
    code, _, _ = run(monkeypatch, capsys, "quantize", folder, "-o", out, *options)
    assert code == 0
    layer = load_pretrained(out).model.layers[0]
    assert layer.self_attn.v_proj.scheme.name == "W8A8" and layer.self_attn.k_proj.scheme.weights.type == "float"
    assert type(layer.self_attn.q_proj) is torch.nn.Linear and type(layer.mlp.down_proj) is torch.nn.Linear
    assert len(list(out.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("options", [["--scheme", "nf4"], ["--override", "re:.*q_proj=NF4"]])
def test_nf4_is_refused_before_anything_is_loaded(options, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    code, _, stderr = run(monkeypatch, capsys, "quantize", tmp_path / "no-model", "-o", out, *options)
    assert code == 2 and not out.exists()
    assert "scheme NF4 of" in stderr and "has no checkpoint format" in stderr and "torchq.dequantize_(model)" in stderr


def test_calibrates_on_a_file(folder, tmp_path, monkeypatch, capsys):
    out, file = tmp_path / "out", tmp_path / "data.jsonl"
    records = [{"input_ids": [(7 * row + step * step) % 125 + 3 for step in range(32)]} for row in range(8)]
    file.write_text("\n".join(map(json.dumps, records)))
    options = ["--group-size", 32, "--calibration", file, "--num-samples", 6, "--max-length", 32]
    code, stdout, _ = run(monkeypatch, capsys, "quantize", folder, "-o", out, *options)
    assert code == 0 and "GPTQ" in stdout
    report = json.loads((out / "quant_report.json").read_text())
    assert report["algorithm"] == "GPTQ, mse scales, held-out damping on 160 tokens"
    assert report["layers"][0]["output_error"] > 0 and report["timings"].keys() == {"forward", "hessian", "scales", "solve"}
    assert load_pretrained(out).quant_report.layers[0].dampening_frac == report["layers"][0]["dampening_frac"]


def test_kv_cache(folder, tmp_path, monkeypatch, capsys):
    out, file = tmp_path / "out", tmp_path / "data.jsonl"
    records = [{"input_ids": [(7 * row + step * step) % 125 + 3 for step in range(32)]} for row in range(8)]
    file.write_text("\n".join(map(json.dumps, records)))
    options = ["--scheme", "W8A8", "--calibration", file, "--max-length", 32, "--kv-cache", "fp8_head"]
    code, stdout, _ = run(monkeypatch, capsys, "quantize", folder, "-o", out, *options)
    assert code == 0 and "keys and values: static fp8 scales of 2 layers, one per key-value head" in " ".join(stdout.split())
    assert kv_scales(load_pretrained(out))[1][0].shape == (2,)
    code, _, stderr = run(monkeypatch, capsys, "quantize", tmp_path / "no-model", "-o", tmp_path / "b", "--kv-cache", "fp8")
    assert code == 2 and "kv_cache='fp8' has static scales, which need calibration data" in stderr  # before anything is loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calibration", "no/such.jsonl"), "--calibration no/such.jsonl does not exist"),
        (("--scheme", "W8A8", "--algorithm", "gptq"), "algorithm='gptq' needs calibration data"),
        (("--scheme", "W4A17"), "did you mean 'W4A16'?"),
        (("--scheme", "NVFP4"), "not supported yet"),
        (("--scheme", "FP8"), "FP8_DYNAMIC"),
        (("--group-size", "48"), "group_size=48 does not divide in_features=64"),
        (("--ignore", "head"), "'head' matches no module"),
        (("--override", "q_proj"), "--override must look like PATTERN=SCHEME"),
        (("--dtype", "int8"), "--dtype must be auto"),
        (("--max-shard-size", "huge"), "max_shard_size must be"),
    ],
)
def test_bad_arguments_exit_with_2_and_write_nothing(arguments, message, folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    code, _, stderr = run(monkeypatch, capsys, "quantize", folder, "-o", out, *arguments)
    assert code == 2 and message in " ".join(stderr.split()) and "Traceback" not in stderr
    assert not out.exists()


def test_output_that_is_not_empty_is_refused_before_loading(folder, monkeypatch, capsys):
    code, _, stderr = run(monkeypatch, capsys, "quantize", "no/such-model", "-o", folder)
    assert code == 2 and "exists and is not empty" in " ".join(stderr.split())


def test_failure_exits_with_1(folder, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("torchq.checkpoint.writer.write_weights", fail)
    code, _, stderr = run(monkeypatch, capsys, "quantize", folder, "-o", tmp_path / "out", "--group-size", 32)
    assert code == 1 and "No space left on device" in stderr
    assert not (tmp_path / "out").exists()


def test_version_and_unknown_option(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version")[:2] == (0, f"torchq {__version__}\n")
    assert run(monkeypatch, capsys, "quantize", "--nope")[0] == 2


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "torchq", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"torchq {__version__}"


def test_demo_runs_the_main_job_on_a_real_model(tmp_path, monkeypatch, capsys):
    out, figures = tmp_path / "checkpoints", tmp_path / "demo.json"
    code, stdout, _ = run(monkeypatch, capsys, "demo", "-o", out, "--tokens", 512, "--json", figures)
    assert code == 0 and "W4A16 g64" in stdout and "tokens/s" in stdout
    rows = {row["name"]: row for row in json.loads(figures.read_text())}
    assert list(rows) == ["bfloat16", "W4A16 g64", "W8A8"]
    w4, w8 = rows["W4A16 g64"], rows["W8A8"]
    assert w4["num_bytes"] < 0.45 * rows["bfloat16"]["num_bytes"] and w4["num_bytes"] < w8["num_bytes"]
    assert 0 < w8["divergence"]["mean_kl"] < 0.15 < w4["divergence"]["mean_kl"] < 0.6
    assert w8["divergence"]["flip_rate"] < w4["divergence"]["flip_rate"] < 0.5
    assert all(row["text"] for row in rows.values())
    assert load_pretrained(out / "W8A8").config.model_type == "llama"


@pytest.mark.slow
def test_demo_with_a_quantized_cache(tmp_path, monkeypatch, capsys):
    figures = tmp_path / "demo.json"
    code, stdout, _ = run(monkeypatch, capsys, "demo", "--tokens", 512, "--kv-cache", "int8", "--json", figures)
    text = " ".join(stdout.split())
    assert (
        code == 0 and "22.5 KiB in 16 bits, 11.6 KiB in int8" in text and "then 32 at a time, which read what is stored" in text
    )
    rows = {row["name"]: row for row in json.loads(figures.read_text())}
    assert list(rows) == ["bfloat16", "bfloat16, int8 cache", "W4A16 g64, int8 cache", "W8A8, int8 cache"]
    kl = [row["divergence"]["mean_kl"] for row in rows.values()]
    assert 0 < kl[0] < 0.01 and kl[1] < 0.01 < kl[3] < kl[2]
    assert all(row["text"] for row in rows.values())


def test_demo_refuses_an_unknown_cache_before_anything_is_loaded(monkeypatch, capsys):
    code, _, stderr = run(monkeypatch, capsys, "demo", "--model", "no/such-model", "--kv-cache", "fp4")
    assert code == 2 and "kv_cache must be one of ('fp8', 'int8', 'int4'), or None for 16 bits, got 'fp4'" in " ".join(
        stderr.split()
    )
