"""transformers' own ``model.save_pretrained`` writes the checkpoint that ``torchq.save_pretrained`` writes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from torchq import QuantConfig, load_pretrained, quantize_, save_pretrained
from torchq.dequantize import dequantize_
from torchq.testing import tiny_llama

CONFIGS = [
    QuantConfig("W4A16", group_size=32),
    QuantConfig("W4A16_ASYM", group_size=32, ignore=["lm_head", "re:.*layers.0.*"]),
    QuantConfig("W8A8", overrides={"re:.*q_proj": "FP8_DYNAMIC"}),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.scheme)
@pytest.mark.parametrize("tied", [False, True])
def test_both_write_the_same_checkpoint(config, tied, tmp_path):
    model = tiny_llama(tie_word_embeddings=tied, dtype=torch.bfloat16)
    quantize_(model, config)
    save_pretrained(model, tmp_path / "torchq")
    model.save_pretrained(tmp_path / "model")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("torchq", "model"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name
    settings = [json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("torchq", "model")]
    assert settings[0] == settings[1]
    ids = torch.arange(9)[None]
    again = load_pretrained(tmp_path / "model")
    again.save_pretrained(tmp_path / "again")  # what was loaded can be saved the same way
    assert torch.equal(load_pretrained(tmp_path / "again")(ids).logits, again(ids).logits)


def test_config_says_so_only_while_the_model_is_quantized(monkeypatch):
    model = tiny_llama(dtype=torch.bfloat16)

    def fail(*_):
        raise RuntimeError("stop")

    monkeypatch.setattr("torchq.quantize._left_out_warnings", fail)
    with pytest.raises(RuntimeError, match="stop"):
        quantize_(model, CONFIGS[0])
    assert not hasattr(model.config, "quantization_config")
    monkeypatch.undo()
    quantize_(model, CONFIGS[0])
    assert model.config.quantization_config["quant_method"] == "compressed-tensors"
    dequantize_(model)
    assert not hasattr(model.config, "quantization_config")
