import copy
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from torchq.evaluation.divergence import measure_divergence
from torchq.testing import tiny_llama

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_quantize")


@pytest.fixture
def gptq_format(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers.gptq_format")


def _disturbed(model, size):
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return other


def test_evaluation_agrees_with_measure_divergence(bench):
    base = tiny_llama()
    models = {"near": _disturbed(base, 0.01), "far": _disturbed(base, 0.1), "same": base}
    windows = torch.randint(0, 128, (3, 90), generator=torch.Generator().manual_seed(1))
    qualities = bench.evaluate(base, models, windows.tolist())
    for name, quality in qualities.items():
        expected = measure_divergence(base, models[name], windows)
        assert quality.num_tokens == expected.num_tokens == 3 * 89
        assert quality.mean_kl == pytest.approx(expected.mean_kl, rel=1e-4)
        assert quality.mean_kl_standard_error == pytest.approx(expected.mean_kl_standard_error, rel=1e-4)
        assert quality.p99_kl == pytest.approx(expected.p99_kl, rel=1e-4)
        assert quality.flip_rate == pytest.approx(expected.flip_rate)
        assert quality.base_perplexity == pytest.approx(expected.base_perplexity, rel=1e-6)
        assert quality.perplexity_ratio == pytest.approx(expected.perplexity / expected.base_perplexity, rel=1e-5)
    assert qualities["far"].mean_kl > qualities["near"].mean_kl > qualities["same"].mean_kl == 0
    assert qualities["same"].perplexity_ratio == 1 and qualities["same"].perplexity_ratio_standard_error == 0


def test_standard_error_of_the_perplexity_ratio_is_of_the_paired_difference(bench):
    targets = torch.tensor([0, 1, 0, 1])
    base = torch.tensor([[0.0, 5.0], [0.0, 5.0], [5.0, 0.0], [5.0, 0.0]])  # its own losses differ widely
    figures = bench.compare_logits(base, base, targets)
    figures[:, 3] += torch.tensor([0.1, 0.3, 0.1, 0.3])
    quality = bench._summarise(figures)
    ratio = torch.tensor(0.2).exp().item()
    assert quality.perplexity_ratio == pytest.approx(ratio, rel=1e-6)
    assert quality.perplexity_ratio_standard_error == pytest.approx(ratio * 0.11547 / 2, rel=1e-4)


class _Tokenizer:
    bos_token_id = 7

    def __call__(self, text, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": list(range(100, 100 + len(text)))}


def test_windows_are_spread_and_start_with_bos(bench):
    text = "x" * 40
    assert bench.spread_windows(_Tokenizer(), text, 2, 5, every=3) == [[7, 100, 101, 102, 103], [7, 112, 113, 114, 115]]
    assert bench.spread_windows(_Tokenizer(), text, 2, 5) == [[7, 100, 101, 102, 103], [7, 120, 121, 122, 123]]
    with pytest.raises(SystemExit, match="the text has 40 tokens: too few for 4 windows of 5, 4 apart"):
        bench.spread_windows(_Tokenizer(), text, 4, 5, every=4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_gptq_format(gptq_format, bits, zero_offset):
    generator = torch.Generator().manual_seed(0)
    out_features, in_features, groups = 32, 64, 4
    codes = torch.randint(0, 2**bits, (in_features, out_features), generator=generator)
    zeros = torch.randint(zero_offset, 2**bits, (groups, out_features), generator=generator)
    scales = torch.rand(groups, out_features, generator=generator)
    g_idx = torch.randperm(in_features, generator=generator) % groups

    def pack(values):  # along the rows, the first value in the lowest bits, as AutoGPTQ does it
        packed = torch.zeros(len(values) * bits // 32, values.shape[1], dtype=torch.int64)
        for row, value in enumerate(values):
            packed[row * bits // 32] |= value << row * bits % 32
        return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)

    qzeros = pack((zeros - zero_offset).t()).t()
    weight = gptq_format.dequantize_gptq(pack(codes), qzeros, scales, g_idx, bits=bits, zero_offset=zero_offset)
    expected = torch.stack([(codes[k] - zeros[g_idx[k]]) * scales[g_idx[k]] for k in range(in_features)], dim=1)
    assert torch.equal(weight, expected)
    in_order = gptq_format.dequantize_gptq(pack(codes), qzeros, scales, None, bits=bits, zero_offset=zero_offset)
    assert torch.equal(in_order[:, 16:32], ((codes[16:32] - zeros[1]) * scales[1]).t())


@pytest.fixture
def model_folder(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | {"<s>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path / "model"
    tiny_llama(vocab_size=257, bos_token_id=256, dtype=torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_whole_benchmark(bench, model_folder, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    options = ["--model", str(model_folder), "--work", str(work), "--group-size", "32", "--samples", "8", "--length", "64"]
    options += ["--evaluation-tokens", "256", "--threads", "1", "--recipes", "torchq=rtn,gptq", "llmcompressor=gptq"]
    monkeypatch.setattr(sys, "argv", ["bench_quantize.py", *options])
    bench.main()
    printed = capsys.readouterr().out
    assert "llmcompressor: left out: no venv given" in printed and "torchq-gptq" in printed and "stdlib" in printed
    assert "where the time goes" in printed
    rows = json.loads((work / "calibration.json").read_text())
    assert len(rows) == 8 and {len(row) for row in rows} == {64} and {row[0] for row in rows} == {256}
    figures = json.loads((work / "torchq-gptq.json").read_text())["figures"]
    assert figures["quantize_seconds"] > 0 and figures["quantize_peak_rss_bytes"] > 1e8
    monkeypatch.setattr(bench, "_run", None)  # the second time, the checkpoints are there
    bench.main()
    assert "torchq-gptq" in capsys.readouterr().out


@pytest.mark.slow
def test_the_ablation(monkeypatch, model_folder, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    ablation, common = importlib.import_module("bench_ablation"), importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    options = [
        "--model",
        str(model_folder),
        "--group-size",
        "32",
        "--samples",
        "8",
        "--length",
        "64",
        "--evaluation-tokens",
        "256",
    ]
    monkeypatch.setattr(sys, "argv", ["bench_ablation.py", *options, "--threads", "1", "--save"])
    ablation.main()
    assert "no correction of drift" in capsys.readouterr().out
    results = json.loads(next(tmp_path.glob("*-ablation.json")).read_text())["results"]
    assert results.keys() == {recipe.name for recipe in ablation.RECIPES}
    kl = {name: result["quality"]["topics"]["mean_kl"] for name, result in results.items()}
    assert len(set(kl.values())) >= len(kl) - 1 and kl["default"] < kl["nearest rounding without data"]


def test_a_tool_that_fails_is_told(bench, model_folder, tmp_path, monkeypatch, capsys):
    options = ["--model", str(model_folder), "--samples", "2", "--length", "64", "--evaluation-tokens", "64"]
    options += ["--recipes", "autoround=light", "--peer", "autoround=false"]  # the program that does nothing, unsuccessfully
    monkeypatch.setattr(sys, "argv", ["bench_quantize.py", *options])
    with pytest.raises(SystemExit):
        bench.main()
    assert "autoround-light: failed: run with --work to keep its log" in capsys.readouterr().out
