"""Write reference checkpoints in the compressed-tensors format with llm-compressor.

Versions used for the files in ``llmcompressor/``: llmcompressor 0.14.0.1,
compressed-tensors 0.19.0, transformers 5.17.0, torch 2.13.0 (CPU).

    python tests/golden/make_llmcompressor.py tests/golden/llmcompressor
    python tests/golden/make_llmcompressor.py OUT --only w4a16-g64 fp8-dynamic
    python tests/golden/make_llmcompressor.py OUT --model PATH_OF_A_REAL_MODEL --only w8a8

Without ``--model`` the source is a tiny random one-layer Llama (seed 0), which is written as
well, to ``OUT/original``.  Its weights are normal with some outliers, all-zero groups and rows
and one-sided rows, so that the corner cases of scales and zero points appear.  Everything is
round-to-nearest (``QuantizationModifier``) except ``gptq-w4a16-g64``; only that scheme and
``fp8-static`` look at data, which is random tokens.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot, reset_session
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)


def weight_only(bits, strategy, group_size=None, symmetric=True, type="int"):
    weights = QuantizationArgs(num_bits=bits, type=type, strategy=strategy, group_size=group_size, symmetric=symmetric)
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}


MIXED = {
    "FP8_DYNAMIC": [r"re:.*self_attn\.(q|k|v|o)_proj$"],
    "W4A16": [r"re:.*mlp\.(gate|up|down)_proj$"],
}

# folder name -> arguments of the modifier
SCHEMES = {
    "w4a16-g64": dict(config_groups=weight_only(4, "group", 64)),
    "w4a16-g64-fp16": dict(config_groups=weight_only(4, "group", 64)),
    "w4a16-g128": dict(scheme="W4A16"),
    "w4a16-asym-g64": dict(config_groups=weight_only(4, "group", 64, symmetric=False)),
    "w4a16-channel": dict(config_groups=weight_only(4, "channel")),
    "w4a16-asym-channel": dict(config_groups=weight_only(4, "channel", symmetric=False)),
    "w8a16-g128": dict(scheme="W8A16"),
    "w8a16-channel": dict(config_groups=weight_only(8, "channel")),
    "w3a16-g64": dict(config_groups=weight_only(3, "group", 64)),
    "w8a8": dict(scheme="W8A8"),
    "fp8-dynamic": dict(scheme="FP8_DYNAMIC"),
    "fp8-block": dict(scheme="FP8_BLOCK"),
    "fp8-static": dict(scheme="FP8"),
    "fp8-weight-only": dict(config_groups=weight_only(8, "channel", type="float")),
    "mixed-fp8-attn-w4a16-mlp": dict(scheme=MIXED),
    "gptq-w4a16-g64": dict(config_groups=weight_only(4, "group", 64), actorder="static"),
}
CALIBRATED = ("fp8-static", "gptq-w4a16-g64")


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.05)
                outliers = torch.randperm(parameter.numel())[:8]
                parameter.view(-1)[outliers] *= 20
            else:
                parameter.normal_(mean=1.0, std=0.1)
        attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
        attention.q_proj.weight[3] = 0  # a whole row: zero for every granularity
        attention.k_proj.weight[5, 64:] = 0  # one group of 64
        mlp.down_proj.weight[7, :128] = 0  # one group of 128
        attention.v_proj.weight[8:10].abs_()  # one-sided rows: the zero point at either end
        attention.v_proj.weight[10:12].abs_().neg_()
        mlp.up_proj.weight[16] += 0.3
    return model.to(torch.bfloat16).eval()


def random_tokens(model, samples=8, length=32):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (samples, length), generator=generator)
    return DataLoader([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids])


def save(model, folder):
    model.save_pretrained(folder)
    for extra in ("recipe.yaml", "generation_config.json"):
        (folder / extra).unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description="Write llm-compressor reference checkpoints.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="folder of a model to use instead of the tiny one")
    parser.add_argument("--only", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    args = parser.parse_args()
    torch.set_num_threads(1)

    source = args.model
    if source is None:  # oneshot wants a model that was loaded from a folder
        source = args.output / "original"
        save(tiny_model(), source)
    # asked for as soon as there is data, but not used on token ids
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel()))
    for name in args.only:
        dtype = torch.float16 if name.endswith("fp16") else torch.bfloat16
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        modifier = GPTQModifier if name.startswith("gptq") else QuantizationModifier
        recipe = modifier(targets=["Linear"], ignore=["lm_head"], **SCHEMES[name])
        data = {}
        if name in CALIBRATED:
            data = dict(dataset=random_tokens(model), tokenizer=tokenizer, pipeline="basic")
        reset_session()
        oneshot(model=model, recipe=recipe, **data)
        save(model, args.output / name)
        print(name)


if __name__ == "__main__":
    main()
