"""Two processes train a packed model as one does with both their batches: DDP, FSDP2, accelerate and Trainer, on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open

from torchq import QuantConfig, quantize_
from torchq.testing import tiny_llama
from torchq.training import prepare_for_training

WORKER = Path(__file__).with_name("distributed_worker.py")
ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("distributed_worker", WORKER)
assert spec is not None and spec.loader is not None
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

# Half a batch may take another kernel, and another sum another way to round activations to 8 bits.
TOLERANCES = {"float32": 1e-5, "NF4": 1e-5, "each": 1e-5, "dora": 1e-5, "bfloat16": 5e-3, "W8A8": 5e-3}


@pytest.fixture
def train_on_two(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def launch(*ways: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]  # a free port of its own
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*command, str(WORKER), str(tmp_path), *ways], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return {way: json.loads((tmp_path / f"{way}.json").read_text()) for way in ways}

    return launch


def assert_as_one_process(way: str, result: dict[str, Any]) -> None:
    setting = way.partition("-")[2]
    expected = worker.train(worker.build(**worker.SETTINGS[setting]))
    assert len(expected) == 5 and expected[-1] < 0.7 * expected[0]
    assert result["losses"] == pytest.approx(expected, rel=TOLERANCES[setting])


def check_ddp(way: str, result: dict[str, Any]) -> None:
    assert_as_one_process(way, result)
    assert result["packed"] >= 28 and result["packed_sent"] == 0
    assert result["sent"] == 2  # the rotary frequencies


def check_fsdp2(way: str, result: dict[str, Any], folder: Path) -> None:
    assert_as_one_process(way, result)
    assert result["whole_parameters"] == []  # adapters, embeddings, norms and head are sharded
    assert result["sharded_buffers"] == [] and result["packed_layers"] == 14  # packed weights are whole on each rank
    with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
    assert len(names) == (42 if way.endswith("dora") else 28) and all("lora_" in name for name in names)
    settings = worker.SETTINGS[way.partition("-")[2]]
    model = tiny_llama(dtype=settings.get("dtype", torch.float32))
    quantize_(model, QuantConfig("W4A16", group_size=32), progress=False)
    alone = PeftModel.from_pretrained(prepare_for_training(model), folder)
    with torch.no_grad():
        loss = worker.loss_of(alone.eval(), worker.TOKENS[:8]).item()
    assert loss == pytest.approx(result["loss_when_saved"], rel=1e-6)


def test_ddp_and_fsdp2_train_as_one_process_and_leave_packed_weights_where_they_are(train_on_two: Any, tmp_path: Path) -> None:
    results = train_on_two("ddp-float32", "fsdp2-bfloat16")
    check_ddp("ddp-float32", results["ddp-float32"])
    check_fsdp2("fsdp2-bfloat16", results["fsdp2-bfloat16"], tmp_path / "fsdp2-bfloat16")


@pytest.mark.slow
def test_ddp_of_other_dtypes_and_schemes(train_on_two: Any) -> None:
    for way, result in train_on_two("ddp-bfloat16", "ddp-W8A8", "ddp-NF4").items():
        check_ddp(way, result)


@pytest.mark.slow
def test_fsdp2_of_other_dtypes_and_adapters(train_on_two: Any, tmp_path: Path) -> None:
    for way, result in train_on_two("fsdp2-float32", "fsdp2-each", "fsdp2-dora").items():
        check_fsdp2(way, result, tmp_path / way)


@pytest.mark.slow
def test_accelerate_and_trainer(train_on_two: Any, tmp_path: Path) -> None:
    results = train_on_two("accelerate-float32", "trainer-float32")
    assert_as_one_process("accelerate-float32", results["accelerate-float32"])
    expected = worker.trainer(tmp_path / "one", 8, worker.build())
    assert results["trainer-float32"]["losses"] == pytest.approx(expected, rel=1e-5)
    files = [{file.name for file in (tmp_path / name).glob("*.safetensors")} for name in ("one", "trainer-float32")]
    assert files == [{"adapter_model.safetensors"}] * 2


def test_no_layout_of_a_device_is_sent_by_ddp() -> None:
    model = worker.build(dtype=torch.bfloat16)
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    prefix = "base_model.model.model.layers.0.mlp.up_proj.base_layer."
    names = {name for name, _ in layer.named_buffers()}
    layer.unpack_native_()
    names |= {name for name, _ in layer.named_buffers()} | {"weight_words", "words_scale", "fp8_words"}
    assert {prefix + name for name in names} <= ignored
