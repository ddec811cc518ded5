"""vLLM stores keys and values in fp8 by the scales of a torchq checkpoint: those that it holds, and they matter.

vLLM 0.32 does so on CPUs with AVX-512. With a scale per head its layers hold all of them, but its CPU kernel takes the largest of
a layer, so outputs are those of ``kv_cache="fp8"``.

Measured, mean |difference| of the logprobs of 125 tokens to the same weights with a 16-bit cache: W4A16 0.17 (0.09 with the same
rounding of keys and values in PyTorch, where nothing else differs); W8A8 0.27, no more than W8A8 makes of any change
(test_agreement.py); with values that all round to 0, 8.0.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchq import QuantConfig, load_pretrained, quantize_, save_pretrained
from torchq.calibration.data import CalibrationData
from torchq.evaluation.divergence import english_text
from torchq.kv_scales import kv_scales
from torchq.testing import smollm2

pytestmark = pytest.mark.vllm

CASES = {
    "W8A8": QuantConfig("W8A8", algorithm="rtn"),
    "W8A8-fp8": QuantConfig("W8A8", algorithm="rtn", kv_cache="fp8"),
    "W8A8-fp8_head": QuantConfig("W8A8", algorithm="rtn", kv_cache="fp8_head"),
    "W4A16": QuantConfig("W4A16", group_size=64, algorithm="rtn"),
    "W4A16-fp8": QuantConfig("W4A16", group_size=64, algorithm="rtn", kv_cache="fp8"),
}
PROMPT = english_text()[20_000:20_600]

# What each checkpoint's attention layers hold after loading, the logprob of each token of a prompt, and greedy tokens after it.
SERVE = """
import json, sys
import torch
import vllm._custom_ops
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

def scales(model):
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "_k_scale")}
    return {
        name: [layer.kv_cache_dtype, layer._k_scale.flatten().tolist(), layer._v_scale.flatten().tolist()]
        for name, layer in layers.items()
    }

answers = {"has_int4_kernel": hasattr(torch.ops._C, "cpu_gemm_wna16")}
prompt = sys.argv[1]
for folder in sys.argv[2:]:
    if "W4A16" in folder and not answers["has_int4_kernel"]:
        continue
    llm = LLM(
        model=folder, enforce_eager=True, max_model_len=512, max_num_seqs=2, max_num_batched_tokens=512, seed=0,
        kv_cache_memory_bytes=128 << 20, enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    logprobs = [entry[token].logprob for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])]
    answers[folder] = [llm.apply_model(scales)[0], logprobs, list(output.outputs[0].token_ids), output.outputs[0].text]
    del llm
    cleanup_dist_env_and_memory()
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All cases, and one whose scales of values are a million times too large: codes below 2^-10 round to 0."""
    folder = tmp_path_factory.mktemp("kv")
    for name, config in CASES.items():
        model, tokenizer = smollm2()
        data = CalibrationData(english_text(), num_samples=8, max_length=128)
        quantize_(model, config, calibration=data, tokenizer=tokenizer, progress=False)
        save_pretrained(model, folder / name, tokenizer=tokenizer)
    shutil.copytree(folder / "W8A8-fp8", folder / "W8A8-absurd")
    file = folder / "W8A8-absurd" / "model.safetensors"
    tensors = {name: tensor * 1e6 if name.endswith("v_scale") else tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    return {name: folder / name for name in [*CASES, "W8A8-absurd"]}


@pytest.fixture(scope="module")
def served(checkpoints: dict[str, Path], vllm_python: str, vllm_environment: dict[str, str]) -> dict[str, Any]:
    """Name -> (layers' scales, logprobs of the prompt's tokens, greedy tokens, text); W4A16 only where vLLM has its kernel."""
    import subprocess

    env = vllm_environment | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # to look into the model
    command = [vllm_python, "-c", SERVE, PROMPT, *map(str, checkpoints.values())]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    answers = json.loads(result.stdout.partition("ANSWERS")[2])
    if not answers.pop("has_int4_kernel"):
        answers |= {"W4A16": None, "W4A16-fp8": None}
    return {Path(folder).name: answer for folder, answer in answers.items()}


def difference(first: Any, second: Any) -> float:
    """Mean difference of the logprobs of the prompt's tokens, in nats."""
    return (torch.tensor(first[1]) - torch.tensor(second[1])).abs().mean().item()


@pytest.mark.parametrize("name", ["W8A8-fp8", "W8A8-fp8_head", "W4A16-fp8", "W8A8-absurd"])
def test_vllm_holds_the_scales(name: str, checkpoints: dict[str, Path], served: dict[str, Any]) -> None:
    if served[name] is None:
        pytest.skip("vLLM's int4 kernel for CPUs (cpu_gemm_wna16) needs AVX-512, which this machine lacks")
    ours, theirs = kv_scales(load_pretrained(checkpoints[name])), served[name][0]
    assert len(ours) == len(theirs) == 30
    for index, (k_scale, v_scale) in ours.items():
        dtype, *pair = theirs[f"model.layers.{index}.self_attn.attn"]
        assert dtype.startswith("fp8")
        assert pair == [k_scale.tolist(), v_scale.tolist()], index


def test_vllm_keeps_16_bits_without_them(served: dict[str, Any]) -> None:
    assert all(dtype == "auto" for dtype, *_ in served["W8A8"][0].values())


def test_fp8_costs_little_and_wrong_scales_ruin_it(served: dict[str, Any]) -> None:
    base, fp8, head, absurd = (served[name] for name in ("W8A8", "W8A8-fp8", "W8A8-fp8_head", "W8A8-absurd"))
    cost, damage = difference(fp8, base), difference(absurd, base)
    print(f"mean difference of logprobs to a 16-bit cache: fp8 {cost:.4f}, v_scale x 10^6 {damage:.4f}; {fp8[3]!r}")
    assert 0 < cost < 0.5 < 4 * cost < damage
    assert fp8[2] != absurd[2]
    assert difference(head, fp8) == 0 and head[2] == fp8[2]


def test_w4a16(served: dict[str, Any]) -> None:
    if served["W4A16-fp8"] is None:
        pytest.skip("vLLM's int4 kernel for CPUs (cpu_gemm_wna16) needs AVX-512, which this machine lacks")
    cost = difference(served["W4A16-fp8"], served["W4A16"])
    print(f"mean difference of logprobs to a 16-bit cache: {cost:.4f}; {served['W4A16-fp8'][3]!r}")
    assert 0 < cost < 0.5
