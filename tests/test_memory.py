"""Peak memory of quantizing, saving and loading, each in a process of its own.

The model has 304 MB in bfloat16, its largest layer 2.1 MB. Glibc would keep freed blocks of this size for later, which adds a
random amount: a fixed threshold makes it give them back, so that the resident size is what is in use.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MB = 1_000_000
LAYER = 2048 * 512 * 2  # bytes of the largest layer in bfloat16
# Work on one layer: float32 copies of the weight, of the scaled and of the restored weight and of their difference (2 layers
# each), int8 codes (1/2), and int32 codes on the way to the packed layout (2, or 6 where 8 bits are split into two planes).
WORK = 16 * LAYER
SLACK = 16 * MB  # pools of the allocators, Python objects, code that is loaded when first used

SCRIPT = """
import gc, json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from torchq import RTN, QuantConfig, load_pretrained, quantize_, save_pretrained

torch.set_num_threads(1)
scheme, folder = sys.argv[1:]


def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))


def peak(function):
    gc.collect()
    base = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    result = function()
    return status("VmHWM") - base, result


def size(model):
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def config(layers):
    return LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=8,
                       num_key_value_heads=8, vocab_size=1024, tie_word_embeddings=False)


def quantize(model):
    quantize_(model, QuantConfig(scheme, algorithm=RTN(scale_search="absmax")))


quantize(LlamaForCausalLM(config(1)).bfloat16())  # loads what is loaded when first used
with torch.device("meta"):
    model = LlamaForCausalLM(config(36)).bfloat16()
model = model.to_empty(device="cpu")
for parameter in model.parameters():
    parameter.data.uniform_(-0.05, 0.05)
found = {"model": size(model)}
found["quantizing"], _ = peak(lambda: quantize(model))
found["quantized"] = size(model)
found["saving"], _ = peak(lambda: save_pretrained(model, folder, max_shard_size="50MB"))
del model, parameter
found["loading"], model = peak(lambda: load_pretrained(folder))
found["loaded"] = size(model)
print(json.dumps(found))
"""


def measure(scheme: str, folder: Path) -> dict[str, Any]:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, scheme, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "scheme", ["W4A16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC"))]
)
def test_peak_memory(scheme: str, tmp_path: Path) -> None:
    found = measure(scheme, tmp_path / "out")
    assert found["model"] == pytest.approx(304 * MB, rel=0.01)
    # A second copy of the packed weights would be 80 MB or more, the replaced ones 302 MB.
    assert found["quantizing"] < WORK + SLACK
    # A layer in the checkpoint's layout, and what makes it of the layout in memory.
    assert found["saving"] < WORK / 2 + SLACK
    assert found["loaded"] == pytest.approx(found["quantized"], rel=0.01)
    # The files are mapped, and stay so until the last tensor in them is gone; packed layers may be laid out anew.
    assert found["loading"] < 2 * found["loaded"] + WORK + SLACK
    if scheme.startswith("W4A16"):
        assert found["loading"] < 0.75 * found["model"]
