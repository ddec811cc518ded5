"""What the benchmark of LoRA steps counts and refuses; and, marked slow, a run of it on a tiny model."""

import argparse
import copy
import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torchq import RTN, QuantConfig, QuantLinear, prepare_for_training, quantize_, save_pretrained
from torchq.checkpoint.reader import dequantize_
from torchq.testing import tiny_llama

pytest.importorskip("peft")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CONFIG = QuantConfig("W4A16", group_size=32, algorithm=RTN(scale_search="absmax"))
KEPT: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    KEPT.clear()


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


def packed_llama(**sizes: int) -> Any:
    model = tiny_llama(dtype=torch.bfloat16, **sizes)
    quantize_(model, CONFIG, progress=False)
    return model


# ---------------------------------------------------------------------------------------------------------------- bytes


def test_peak_and_rest_of_a_function() -> None:
    def function() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(1 << 21, dtype=torch.uint8)
        del first
        KEPT.append(torch.empty(1 << 19, dtype=torch.uint8))
        del second

    trace = module("lora_memory").trace_memory(function)
    assert 0 <= trace.peak - (3 << 20) < 4096
    assert trace.left[0] == 1 << 19 and sum(trace.left) < (1 << 19) + 4096


def test_the_peak_sees_inside_of_an_op() -> None:
    """A packed layer's product dequantizes a tile at a time: those bytes are in no tensor that Python sees."""
    layer = packed_llama(hidden_size=512, intermediate_size=512, num_hidden_layers=1).model.layers[0].mlp.up_proj
    assert isinstance(layer, QuantLinear)
    x = torch.randn(128, 512, dtype=torch.bfloat16)
    trace = module("lora_memory").trace_memory(lambda: layer(x))
    assert trace.peak > 2 * 512 * 512 + 2 * 128 * 512


def test_saved_bytes() -> None:
    memory, x, w = module("lora_memory"), torch.randn(100), torch.randn(100, requires_grad=True)
    saved = memory.saved_bytes(lambda: ((x * w) ** 2).exp().sum(), memory.storages([w]))
    assert saved == 3 * 400  # x, the product and the result of exp; w is there anyway
    assert memory.saved_bytes(lambda: ((x * w) ** 2).exp().sum(), memory.storages([w, x])) == 2 * 400


def test_weights_by_part() -> None:
    memory, worker = module("lora_memory"), module("lora_worker")
    dense, tied = tiny_llama(dtype=torch.bfloat16), tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=True)
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    sizes = {"linear": 2 * 2 * per_layer, "embedding": 2 * 64 * 128, "head": 2 * 64 * 128, "adapters": 0}
    found = memory.weight_bytes(dense)
    assert {part: found[part] for part in sizes} == sizes
    assert memory.weight_bytes(tied)["head"] == 0
    packed = memory.weight_bytes(worker.add_adapters(prepare_for_training(packed_llama())))
    assert packed["embedding"] == sizes["embedding"] and packed["adapters"] > 0
    assert 2 * per_layer // 2 < packed["linear"] < 2 * per_layer  # 4 bits and scales


def test_what_is_kept_beside_the_model_is_found() -> None:
    memory, model = module("lora_memory"), packed_llama()
    known = memory.storages(tensor for _, tensor in memory.tensors_by_part(model))
    before = memory.unknown_tensors(known, 64 * 64 * 2)
    KEPT.append(model.model.layers[0].self_attn.q_proj.dequantize())
    assert sorted(memory.unknown_tensors(known, 64 * 64 * 2)) == sorted([*before, "torch.bfloat16 [64, 64]"])


# ------------------------------------------------------------------------------------------------------------- training


def new_training(model: Any) -> Any:
    worker = module("lora_worker")
    training = worker.Training(worker.add_adapters(prepare_for_training(model)), autocast=True)
    training.set_up((2, 8), False)
    return training


def test_a_step_updates_and_is_measured() -> None:
    training = new_training(packed_llama(num_hidden_layers=6))
    training.set_up((4, 16), False)
    before = [parameter.clone() for parameter in training.trained]
    losses = [training.step()["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    assert not all(map(torch.equal, before, training.trained))
    kept = training.measure()
    training.set_up((4, 16), True)
    recomputed = training.measure()
    assert recomputed["saved"] < kept["saved"] < kept["step_peak"]
    assert recomputed["step_peak"] < kept["step_peak"]
    assert kept["smallest_layer"] == 2 * 32 * 64 and kept["largest_left"] < kept["smallest_layer"]
    assert kept["optimizer"] == pytest.approx(2 * kept["weights"]["adapters"], rel=0.01)
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert kept["flops"] == 64 * (4 * 64 * 128 + 2 * per_layer + 5 * 4 * per_layer)


def test_a_dequantized_weight_that_stays_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, training = module("bench_qlora"), new_training(packed_llama())
    found = {"largest_left": 0, "smallest_layer": 4096, "unknown": []}
    bench.refuse_kept("W4A16", found)
    left_by_other_tests = Counter(training.measure()["unknown"])
    layer = training.model.get_base_model().model.layers[0].mlp.down_proj
    layer.register_forward_pre_hook(lambda *_: None if KEPT else KEPT.append(layer.base_layer.dequantize()))
    with pytest.raises(SystemExit, match="a step leaves a block of 16384 bytes; a dequantized weight"):
        bench.refuse_kept("W4A16", training.measure())
    unknown = list((Counter(training.measure()["unknown"]) - left_by_other_tests).elements())
    assert unknown == ["torch.bfloat16 [64, 128]"]
    with pytest.raises(SystemExit, match=r"between steps there are torch.bfloat16 \[64, 128\]; dequantized"):
        bench.refuse_kept("W4A16", found | {"unknown": unknown})


def test_wrong_gradients_are_refused() -> None:
    worker, model = module("lora_worker"), packed_llama()
    twin = copy.deepcopy(model)
    dequantize_(twin)
    ids = torch.randint(3, 128, (1, 32), generator=torch.Generator().manual_seed(0))
    results = []
    for some, autocast in ((prepare_for_training(model), True), (copy.deepcopy(twin), True), (twin.float(), False)):
        some = worker.add_adapters(some)
        worker.disturb_adapters(some)
        results.append(worker.gradients(some, ids, autocast))
    packed, low, exact = results
    assert worker.wrong(worker.errors(exact, {"packed": packed, "twin": low})) is None
    scaled = packed[0], packed[1] * 1.2
    assert "the gradient is off by 0.2" in worker.wrong(worker.errors(exact, {"packed": scaled, "twin": low}))
    assert "the loss is off by 0.0" in worker.wrong(worker.errors(exact, {"packed": (packed[0] * 1.05, packed[1]), "twin": low}))
    assert worker.wrong(worker.errors(exact, {"packed": (packed[0], packed[1] * float("nan")), "twin": low}))


# -------------------------------------------------------------------------------------------------------------- judging


def figures(seconds: float, peak: int, linear: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A contender's memory and timings."""
    timing = module("common").Timing(seconds, seconds, seconds, 3)
    memory = {"weights": {"linear": linear, "adapters": 2}, "optimizer": 4, "step_peak": peak, "flops": 5.0}
    return memory | {"step_growth": 3 * peak}, dict.fromkeys(("step", "forward", "backward", "optimizer", "cpu"), timing)


def test_verdicts() -> None:
    bench = module("bench_qlora")
    found = {"bf16": figures(1.0, 100, 400), bench.BITSANDBYTES: figures(2.0, 90, 100), "W4A16 g64": figures(1.7, 80, 120)}
    memory, timings = ({name: pair[index] for name, pair in found.items()} for index in (0, 1))
    rows = bench._rows("smollm2", bench.Setting(4, 256, True), memory, timings, rate=10.0)
    assert rows[2]["peak"] == 120 + 2 + 4 + 80 and rows[2]["system_peak"] == rows[2]["peak"] + 160
    assert rows[2]["of_limit"] == pytest.approx(0.5 / 1.7)
    lines = bench.verdicts(rows)
    assert [line[:4] for line in lines] == ["FAIL", "PASS", "FAIL", "PASS", "FAIL"]
    assert lines[2] == ("FAIL  W4A16 seconds, of bitsandbytes' <= 0.80: worst 0.85 at smollm2 4x256 recomputed; 1 of 1 miss it")
    without = bench._rows("smollm2", bench.Setting(4, 256, False), {"W4A16 g64": memory["W4A16 g64"]}, timings, rate=10.0)
    assert bench.verdicts(without) == []


def test_group_sizes() -> None:
    bench = module("bench_qlora")
    assert bench.group_size_for(tiny_llama(hidden_size=128, intermediate_size=256)) == 128
    assert bench.group_size_for(tiny_llama(hidden_size=96, intermediate_size=256)) == 32


@pytest.mark.slow
def test_contenders_in_processes_of_their_own(tmp_path: Path) -> None:
    bench = module("bench_qlora")
    tiny_llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    save_pretrained(packed_llama(), tmp_path / "packed")
    folders = {bench.BF16: tmp_path / "bf16", "W4A16 g32": tmp_path / "packed"}
    arguments = argparse.Namespace(threads=1, autocast=True, rounds=2, bnb_python=None)
    assert bench.wrong(bench.check("W4A16 g32", folders["W4A16 g32"], arguments)) is None
    problems: dict[str, str] = {}
    rows = bench.compare(
        "tiny", folders | {"W8A16 g32": tmp_path / "nothing"}, [bench.Setting(2, 8, True)], arguments, 1e9, problems
    )
    assert [row["contender"] for row in rows] == list(folders)
    assert rows[1]["of bf16"]["linear"] < 0.4 and rows[1]["step"]["rounds"] == 2
    assert list(problems) == ["tiny W8A16 g32"] and problems["tiny W8A16 g32"].startswith("failed: ")
