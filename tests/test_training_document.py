"""The code of docs/training.md runs, block by block, on a tiny model."""

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from torchq import QuantLinear
from torchq.testing import tiny_llama

DOCUMENT = Path(__file__).parents[1] / "docs" / "training.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
START, *OTHERS = BLOCKS

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def tiny_tokenizer() -> Any:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(124))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the first block leaves, with data: all that the other blocks know."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, dtype: tiny_llama(dtype=dtype))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tiny_tokenizer())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    tokens = 3 + (torch.arange(8)[:, None] + 5 * torch.arange(16)) % 20
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in tokens.split(2)]
    known = {
        "rows": [{"input_ids": ids, "labels": ids} for ids in tokens],
        "loader": torch.utils.data.DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        "batch": batches[0],
        "dataset": Dataset.from_dict({"text": [" ".join(f"w{index}" for index in ids.tolist()) for ids in tokens]}),
    }
    torch.manual_seed(0)
    exec(START, known)
    return known


def test_the_first_block_leaves_a_packed_model_with_adapters(names: dict[str, Any], tmp_path: Path) -> None:
    model = names["model"]
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 14
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 28
    assert (tmp_path / "base" / "model.safetensors").is_file()


@pytest.mark.parametrize("block", OTHERS, ids=lambda block: str(BLOCKS.index(block)))
def test_block(block: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "torch.distributed" in block:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in world.items():
            monkeypatch.setenv(name, value)
        if "dist.init_process_group" not in block:  # it goes on where the block before it ended
            names["dist"] = dist
            dist.init_process_group("gloo")
    try:
        exec(block, names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_document_has_the_blocks_that_this_test_knows() -> None:
    assert len(BLOCKS) == 10
    assert sum("torch.distributed" in block for block in BLOCKS) == 2
