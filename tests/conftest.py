"""Where there is no GPU, Triton kernels run in its interpreter and tests marked ``gpu`` are skipped.

One thread: the tests' matrices are small, and threads that wait for each other beside any other load cost a multiple.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # before torchq.kernels is imported: triton.jit reads it as it decorates
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _decoder_config(kind: str, **changes: Any) -> Any:
    """A small configuration; hybrid and sliding models look back 16 tokens."""
    import transformers

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 120,
        "max_position_embeddings": 512,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    hybrid = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    name, extra = {
        "llama": ("Llama", heads),
        "mqa": ("Llama", {**heads, "num_key_value_heads": 1}),
        "qwen3": ("Qwen3", heads),
        "mistral": ("Mistral", {**heads, "sliding_window": 16}),
        "phi3": ("Phi3", {"num_attention_heads": 2, "num_key_value_heads": 2}),
        "gpt_neox": ("GPTNeoX", {"num_attention_heads": 2}),
        "gemma2": ("Gemma2", {**heads, **hybrid}),
        "gemma3": ("Gemma3Text", {**heads, **hybrid}),
        "gpt_oss": ("GptOss", {**heads, **hybrid, "num_local_experts": 2, "num_experts_per_tok": 1}),
    }[kind]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return getattr(transformers, f"{name}Config")(**{**sizes, **extra, **special, **changes})


@pytest.fixture(scope="session")
def tiny_decoder() -> Callable[..., Any]:
    """A function that makes a model of random weights: ``tiny_decoder("gemma3", seed=1, head_dim=64)``."""

    def make(kind: str, seed: int = 0, **changes: Any) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_decoder_config(kind, **changes)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(5)  # attention that is far from uniform
        model.generation_config.eos_token_id = None
        return model

    return make
