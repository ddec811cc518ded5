"""vLLM serves what was trained: the packed base with the adapter on top, and the merged checkpoint."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from torchq import QuantConfig, prepare_for_training, quantize_, save_pretrained
from torchq.integrations.peft_merge import merge_adapters
from torchq.testing import smollm2

pytestmark = pytest.mark.vllm

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colors are",
]
MAX_TOKENS, NUM_LOGPROBS = 8, 20


@torch.no_grad()
def mean_difference(model: Any, completions: list[dict[str, Any]]) -> float:
    """Mean |logprob - vLLM's| over vLLM's likeliest tokens, given the tokens that it chose before."""
    differences: list[Tensor] = []
    for completion in completions:
        ids = torch.tensor([completion["prompt"] + completion["tokens"]])
        ours = model(ids).logits[0, -MAX_TOKENS - 1 : -1].float().log_softmax(-1)
        for position, entries in enumerate(completion["logprobs"]):
            tokens, theirs = zip(*entries, strict=True)
            differences.append((ours[position, list(tokens)] - torch.tensor(theirs)).abs())
    return torch.cat(differences).mean().item()


def test_base_with_adapter_and_merged_model(vllm_process: Any, tmp_path: Path) -> None:
    if not vllm_process.has_int4_kernel:
        pytest.skip("vLLM's int4 kernel for CPUs (cpu_gemm_wna16) needs AVX-512, which this machine lacks")
    base, tokenizer = smollm2()
    quantize_(base, QuantConfig("W4A16", group_size=64), progress=False)
    save_pretrained(base, tmp_path / "base", tokenizer=tokenizer)
    model = peft.get_peft_model(
        prepare_for_training(base), peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=generator).mul_(0.2)
    model.save_pretrained(tmp_path / "adapter")
    settings = {"max_tokens": MAX_TOKENS, "num_logprobs": NUM_LOGPROBS}
    served = vllm_process.generate(tmp_path / "base", PROMPTS, adapter=tmp_path / "adapter", **settings)
    without, with_adapter = served[: len(PROMPTS)], served[len(PROMPTS) :]
    with model.disable_adapter():
        noise = mean_difference(model, without)
        effect = mean_difference(model, with_adapter)
    adapted = mean_difference(model, with_adapter)
    print(f"vLLM - torchq: base {noise:.4f}, with the adapter {adapted:.4f}; the adapter's own effect {effect:.4f}")
    assert effect > 5 * noise, "the adapter must matter"
    assert adapted < 2 * noise

    merged, report = merge_adapters(copy.deepcopy(model))
    save_pretrained(merged, tmp_path / "merged", tokenizer=tokenizer)
    difference = mean_difference(merged, vllm_process.generate(tmp_path / "merged", PROMPTS, **settings))
    print(f"merged: vLLM - torchq {difference:.4f}; {report.summary()}")
    assert difference < 2 * noise
