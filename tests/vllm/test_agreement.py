"""vLLM computes from torchq's checkpoints what torchq computes, up to the rounding of 16-bit arithmetic.

How far may they be apart? torchq, vLLM and eager PyTorch evaluate the same function in the same dtype and round in different
places, so each is compared with a reference that does not round: float32 on the exactly dequantized weights, activations
fake-quantized where the scheme says so, plain PyTorch. Eager PyTorch in the checkpoint's dtype then shows how much noise that
dtype makes, on the same tokens: the mean |logprob - reference| over the 20 likeliest tokens of every position.

* bfloat16: nine of ten of these logits are above 16, where a unit in the last place is 2^-3 or more. Rounding them costs 0.03
  in the mean, and the roundings of 30 blocks before as much again: measured 0.07 (W4A16, groups of 64) to 0.08 (channels).
* float16 has three bits more: measured 0.008, an eighth. A fault shows there first.
* W8A8: rounding activations to int8 is a step function, which turns a difference in the last bit into one of a whole step, 210
  times over. Measured 0.38, and nearly as much in float32, where changing the embeddings by 1e-7 of themselves moves logprobs
  by 0.29. No arithmetic could agree better on this model; with one block in W8A8 the noise is 0.14.

vLLM's error is another draw of the same noise: over 28 sound checkpoints it was 0.86 to 1.11 times eager's. NOISE_FACTOR leaves
four times that spread. The least fault tested, one scale tensor of 210 off by 5 % (in float16), makes it 4.
"""

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from torchq import QuantArgs, QuantConfig, QuantLinear, Scheme, load_pretrained, numerics, quantize_, save_pretrained
from torchq.calibration.data import CalibrationData
from torchq.evaluation.divergence import english_text
from torchq.model_utils import set_module
from torchq.testing import smollm2

pytestmark = pytest.mark.vllm

NOISE_FACTOR = 1.5
MAX_TOKENS, NUM_LOGPROBS = 24, 20
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colors are",
    "The while statement is used for repeated execution as long as",
    CHAT.format("What is the largest planet in the solar system?"),
    CHAT.format("Explain gravity in one sentence."),
]


STATIC = Scheme(QuantArgs(8, strategy="channel"), QuantArgs(8, strategy="tensor"), "W8A8-static")


@dataclass(frozen=True)
class Case:
    """A checkpoint: how it is quantized, from a model of which dtype, how it is saved."""

    config: QuantConfig
    dtype: torch.dtype = torch.bfloat16
    int4: bool = True  # whether vLLM needs its int4 kernel
    calibrated: bool = False
    save: dict[str, Any] = field(default_factory=dict)


CASES = {
    "W4A16-g64": Case(QuantConfig("W4A16", group_size=64)),
    "W4A16_ASYM-g64": Case(QuantConfig("W4A16_ASYM", group_size=64)),
    "W4A16-channel": Case(QuantConfig("W4A16", group_size=-1)),
    "W8A8": Case(QuantConfig("W8A8"), int4=False),
    "W4A16-g64-float16": Case(QuantConfig("W4A16", group_size=64), torch.float16),
    "FP8_DYNAMIC": Case(QuantConfig("FP8_DYNAMIC"), int4=False),
    "W4A16-g32-and-head-sharded": Case(QuantConfig("W4A16", group_size=32, ignore=()), save={"max_shard_size": "40MB"}),
    "W4A16-g64-but-first-block": Case(QuantConfig("W4A16", group_size=64, ignore=["lm_head", r"re:.*layers\.0\..*"])),
    "W8A8-last-block": Case(QuantConfig("W8A8", ignore=["lm_head", r"re:.*layers\.(?!29\.)"]), int4=False),
    "W8A8-attention-W4A16-mlp": Case(QuantConfig("W4A16", group_size=64, overrides={"re:.*self_attn.*": "W8A8"})),
    "W4A16-g64-awq": Case(QuantConfig("W4A16", group_size=64, algorithm="awq"), calibrated=True),
    "W8A8-smoothed": Case(QuantConfig("W8A8"), int4=False, calibrated=True),
    "W8A8-static": Case(QuantConfig(STATIC), int4=False, calibrated=True),
    "four-schemes": Case(
        QuantConfig(
            "W4A16",
            group_size=64,
            overrides={
                r"re:.*layers\.[0-4]\.": "W8A8",
                r"re:.*layers\.5\.": QuantConfig("W4A16_ASYM", group_size=-1).resolve(),
                r"re:.*layers\.6\.mlp": None,
            },
        )
    ),
}


# ------------------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Callable[[str], Path]:
    """``build(name)`` writes the checkpoint of a case, once, and returns its folder."""
    original, tokenizer = smollm2()
    folder = tmp_path_factory.mktemp("checkpoints")

    def build(name: str) -> Path:
        if not (folder / name).exists():
            case = CASES[name]
            model = copy.deepcopy(original).to(case.dtype)
            data = CalibrationData(english_text(), num_samples=8, max_length=64) if case.calibrated else None
            quantize_(model, case.config, calibration=data, tokenizer=tokenizer, progress=False)
            save_pretrained(model, folder / name, tokenizer=tokenizer, **case.save)
        return folder / name

    return build


@pytest.fixture
def serve(vllm_process, request) -> Callable[[Path], list[dict[str, Any]]]:
    """``serve(folder)`` has vLLM continue PROMPTS with a checkpoint of the kind that the test's parameter ``name`` says."""
    if CASES[request.node.callspec.params["name"]].int4 and not vllm_process.has_int4_kernel:
        pytest.skip("vLLM's int4 kernel for CPUs (cpu_gemm_wna16) needs AVX-512, which this machine lacks")

    def serve(folder: Path) -> list[dict[str, Any]]:
        return vllm_process.generate(folder, PROMPTS, max_tokens=MAX_TOKENS, num_logprobs=NUM_LOGPROBS)

    return serve


# ------------------------------------------------------------------------------------------------------------------ reference


class ReferenceLinear(nn.Module):
    """What a QuantLinear stands for, in plain PyTorch: exact in float32, and in 16 bits rounded where eager PyTorch rounds."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        q, scale, zero_point = layer.quantized_tensors()
        self.exact = numerics.dequantize(q, scale.float(), zero_point, layer.scheme.weights)  # no parameter: casts pass it by
        self.activations, self.input_scale = layer.scheme.input_activations, layer._buffers.get("input_scale")
        assert layer.bias is None, "SmolLM2 has no biases"

    def forward(self, x: Tensor) -> Tensor:
        if self.activations is None:
            return nn.functional.linear(x, self.exact.to(x.dtype))
        largest, x32 = x.float().abs().amax(-1, keepdim=True), x.float()
        if self.input_scale is not None:
            low, high = (-128, 127) if self.activations.type == "int" else (-448, 448)
            largest = self.input_scale.float() * high
            x32 = torch.minimum(torch.maximum(x32, self.input_scale.float() * low), largest)
        if self.activations.type == "int":
            x32 = torch.round(x32 / (largest / 127)) * (largest / 127)
        else:
            x32 = (x32 / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)
        return nn.functional.linear(x32, self.exact).to(x.dtype)  # kernels sum in int32 or float32 and round once


def reference_model(folder: Path) -> nn.Module:
    """A checkpoint in float32 on ReferenceLinear layers."""
    model = load_pretrained(folder, dtype=torch.float32)
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            set_module(model, name, ReferenceLinear(module))
    return model


@torch.no_grad()
def logprobs_at_tokens(model: nn.Module, completions: list[dict[str, Any]]) -> Tensor:
    """Logprobs [prompts, MAX_TOKENS, vocabulary] where vLLM chose its tokens, given vLLM's tokens before."""
    rows = [completion["prompt"] + completion["tokens"] for completion in completions]
    longest = max(map(len, rows))
    logits = model(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).logits  # causal: the padding has no effect
    ends = [len(row) - 1 for row in rows]
    return torch.stack([logits[i, end - MAX_TOKENS : end].float().log_softmax(-1) for i, end in enumerate(ends)])


@torch.no_grad()
def generate(model: Any, completions: list[dict[str, Any]]) -> Tensor:
    """Tokens [prompts, MAX_TOKENS] of ``model.generate`` after the same prompts, past the end-of-text token."""
    model.generation_config.eos_token_id = None
    prompts = [completion["prompt"] for completion in completions]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0)[:, longest:]


# ----------------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Agreement:
    """How logprobs and tokens compare with what a checkpoint means. Errors are those of logprobs, in nats."""

    noise: float  # mean error of eager PyTorch
    error: float  # mean error
    first: float  # the same at the first token of each prompt
    first_max: float  # the largest of them
    tokens: Tensor  # [prompts, MAX_TOKENS]
    best: Tensor  # the reference's choice after the same tokens
    eager_best: Tensor  # eager PyTorch's
    clear: Tensor  # where the reference prefers its choice by more than the noise there, bool

    def __str__(self) -> str:
        same, eager_same = (int((tokens == self.best).sum()) for tokens in (self.tokens, self.eager_best))
        wrong = int((self.clear & (self.tokens != self.best)).sum())
        return (
            f"error {self.error:.4f} = {self.error / self.noise:.2f} x eager's {self.noise:.4f}, of first tokens "
            f"{self.first:.4f} (max {self.first_max:.3f}); of {self.tokens.numel()} tokens {same} are the reference's "
            f"(eager's: {eager_same}); {int(self.clear.sum())} are clear and {wrong} of them wrong"
        )

    def faults(self) -> list[str]:
        """What does not agree."""
        differing, eager_differing = (int((tokens != self.best).sum()) for tokens in (self.tokens, self.eager_best))
        checks = {  # eager PyTorch's figures, with room for the scatter of means of 8 x 20 values, their maxima, and small counts
            "logprobs": self.error <= NOISE_FACTOR * self.noise,
            "first token's logprobs": self.first <= 2 * self.noise and self.first_max <= 12 * self.noise,
            "clear tokens": bool((self.tokens == self.best)[self.clear].all()),
            "tokens": differing <= 2 * eager_differing + 4,
        }
        return [name for name, holds in checks.items() if not holds]


def compare(folder: Path, dtype: torch.dtype, completions: list[dict[str, Any]]) -> Agreement:
    """Compare vLLM's completions with the checkpoint in ``folder``."""
    tokens = torch.tensor([completion["tokens"] for completion in completions])
    top, vllm = top_logprobs(completions)
    model = reference_model(folder)
    reference = logprobs_at_tokens(model, completions)
    eager = logprobs_at_tokens(model.to(dtype), completions)
    expected = reference.gather(-1, top)
    noise, error = (eager.gather(-1, top) - expected).abs(), (vllm - expected).abs()

    # Two logprobs cannot change places while each is off by less than half of what they are apart. Some positions are noisier
    # than others (up to 2 nats), and at some eager PyTorch is lucky: there, twice its root mean square stands for its error.
    margin = -reference.topk(2).values.diff().squeeze(-1)
    clear = margin > 2 * noise.amax(-1).clamp(min=2 * float(noise.square().mean().sqrt()))
    return Agreement(
        noise=float(noise.mean()),
        error=float(error.mean()),
        first=float(error[:, 0].mean()),
        first_max=float(error[:, 0].max()),
        tokens=tokens,
        best=reference.argmax(-1),
        eager_best=eager.argmax(-1),
        clear=clear,
    )


def top_logprobs(completions: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return vLLM's likeliest tokens and their logprobs, [prompts, MAX_TOKENS, NUM_LOGPROBS]."""
    positions = [completion["logprobs"] for completion in completions]
    tokens = torch.tensor([[[token for token, _ in position] for position in row] for row in positions])
    return tokens, torch.tensor([[[logprob for _, logprob in position] for position in row] for row in positions])


@pytest.mark.parametrize("name", CASES)
def test_vllm_agrees_with_torchq(name, build, serve):
    folder = build(name)
    completions = serve(folder)
    agreement = compare(folder, CASES[name].dtype, completions)
    print(f"{name}: {agreement}")
    assert agreement.faults() == [], agreement
    assert agreement.clear.sum() >= MAX_TOKENS, "too few tokens to compare"

    packed = load_pretrained(folder)
    top, vllm = top_logprobs(completions)
    difference = (logprobs_at_tokens(packed, completions).gather(-1, top) - vllm).abs()
    mean, first = float(difference.mean()), difference[:, 0]
    print(f"vLLM - torchq {mean:.4f} (max {difference.max():.3f}), of first tokens {first.mean():.4f} (max {first.max():.3f})")
    assert mean <= NOISE_FACTOR * 2**0.5 * agreement.noise, mean  # two errors of that size, independent of each other

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [completion["prompt"] for completion in completions] == tokenizer(PROMPTS)["input_ids"]
    texts = tokenizer.batch_decode(agreement.tokens, skip_special_tokens=True)
    assert [completion["text"] for completion in completions] == texts

    if CASES[name].dtype == torch.float16:
        return  # generate() takes a minute: torchq's fast int4 kernel for CPUs is one for bfloat16
    common = (generate(packed, completions) == agreement.tokens).int().cumprod(1).sum(1)
    print(f"vLLM's texts are those of generate() for {common.tolist()} tokens")
    for prompt, position in enumerate(common.tolist()):
        assert position == MAX_TOKENS or not agreement.clear[prompt, position], f"{PROMPTS[prompt]!r}, token {position}"


# -------------------------------------------------------------------------------------------------------------------- damage


def swap_nibbles(tensor: Tensor) -> Tensor:
    codes = tensor.contiguous().view(torch.uint8)
    return ((codes >> 4) | (codes << 4)).view(tensor.dtype)


def next_group(scale: Tensor) -> Tensor:
    return scale.roll(1, dims=1)


def next_row(scale: Tensor) -> Tensor:
    return scale.roll(1, dims=0)


def five_percent(scale: Tensor) -> Tensor:
    return scale * 1.05


ONE = "model.layers.15.mlp.up_proj."
DAMAGE = [
    ("W4A16-g64", swap_nibbles, "weight_packed"),
    ("W4A16-g64", swap_nibbles, ONE + "weight_packed"),
    ("W4A16-g64", next_group, ONE + "weight_scale"),
    ("W4A16-g64", five_percent, "weight_scale"),
    ("W4A16-g64-float16", five_percent, ONE + "weight_scale"),
    ("W4A16_ASYM-g64", swap_nibbles, ONE + "weight_zero_point"),
    ("W4A16-channel", next_row, ONE + "weight_scale"),
    ("W8A8", swap_nibbles, ONE + "weight"),
    ("W8A8-last-block", five_percent, "weight_scale"),
]


@pytest.mark.parametrize(("name", "change", "tensors"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_checkpoint_disagrees(name, change, tensors, build, serve, tmp_path):
    damaged = shutil.copytree(build(name), tmp_path / "damaged")
    state = load_file(damaged / "model.safetensors")
    changed = {key: change(tensor) for key, tensor in state.items() if key.endswith(tensors)}
    assert changed and all(not torch.equal(state[key], tensor) for key, tensor in changed.items())
    save_file(state | changed, damaged / "model.safetensors", metadata={"format": "pt"})
    agreement = compare(build(name), CASES[name].dtype, serve(damaged))
    print(f"{name}, {change.__name__} of {tensors}: {agreement}")
    assert "logprobs" in agreement.faults()
