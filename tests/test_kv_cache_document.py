"""The code of docs/kv_cache.md runs, block by block, on a tiny model; its table of memory is what torchq.plan says."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from torchq.evaluation import divergence
from torchq.plan import kv_bytes_per_token, tokens_that_fit
from torchq.testing import tiny_llama

TEXT = (Path(__file__).parents[1] / "docs" / "kv_cache.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
START, *OTHERS = BLOCKS
WORDS = ["The", "sky", "is", "blue", "because", "But", "at", "sunset"]

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


def tiny_tokenizer() -> Any:
    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, *(f"w{index}" for index in range(124 - len(WORDS)))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=["input_ids", "attention_mask"], **special)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first block leaves, with data: all that the other blocks know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, dtype: tiny_llama(dtype=dtype, head_dim=64))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tiny_tokenizer())
    monkeypatch.setattr(divergence, "english_text", lambda: " ".join(f"w{index % 90}" for index in range(400)))
    known: dict[str, Any] = {"texts": [" ".join(f"w{(row * 7 + word) % 90}" for word in range(40)) for row in range(8)]}
    torch.manual_seed(0)
    exec(START, known)
    return known


def test_the_first_block_stores_all_tokens_but_the_last(names: dict[str, Any]) -> None:
    assert names["cache"].get_seq_length() == names["output"].shape[1] - 1 > 5
    assert names["cache"].settings.reads_stored()


@pytest.mark.parametrize("block", OTHERS, ids=lambda block: str(BLOCKS.index(block)))
def test_block(block: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # the default takes half a minute
    exec(block, names)


def test_the_document_has_the_blocks_that_this_test_knows() -> None:
    assert len(BLOCKS) == 7


FORMATS = ("16bit", "fp8", "fp8_static", "int4")
CONFIGS = {
    "Llama-3-70B": transformers.LlamaConfig(num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128),
    "Llama-3-8B": transformers.LlamaConfig(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "Qwen2.5-7B": transformers.Qwen2Config(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4),
    "Gemma-3-27B": transformers.Gemma3TextConfig(
        num_hidden_layers=62, num_attention_heads=32, num_key_value_heads=16, head_dim=128, sliding_window=1024
    ),
    "SmolLM2-135M": transformers.LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_table_of_memory(name: str) -> None:
    config = CONFIGS[name]
    size = [f"{kv_bytes_per_token(config, kv_cache) / 1024:.1f}".removesuffix(".0") for kv_cache in FORMATS]
    fit = [f"{tokens_that_fit(config, 16e9, kv_cache=kv_cache):,}" for kv_cache in ("16bit", "int8", "int4")]
    row = f"| {name} | {' | '.join(size + fit)} |"
    assert row in TEXT.splitlines(), row
