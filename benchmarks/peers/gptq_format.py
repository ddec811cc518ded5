"""Reads GPTQModel's checkpoints: the GPTQ format, dequantized to float32 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def load_gptq(folder: Path) -> Any:
    """Load a GPTQ checkpoint as an ordinary float32 transformers model.

    Args:
        folder: With ``config.json`` (method ``gptq``, codes packed into int32) and safetensors files.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    del config.quantization_config
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    zero_offset = 0 if settings.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    for layer in layers:
        parts = {part: tensors.pop(f"{layer}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")}
        tensors[f"{layer}.weight"] = dequantize_gptq(**parts, bits=settings["bits"], zero_offset=zero_offset)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    wrong = [*unexpected, *(set(missing) - set(model.all_tied_weights_keys))]
    if wrong:
        raise ValueError(f"{folder} does not fit its config.json: {', '.join(sorted(wrong))}")
    return model.eval()


def dequantize_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, *, bits: int, zero_offset: int = 1
) -> Tensor:
    """Dequantize one weight: ``scale (q - zero)``, rounded to the scales' dtype as in all readers, torchq's among them.

    Args:
        qweight: [K bits / 32, N] int32, codes packed along K, the first in the lowest bits; bits is 2, 4 or 8.
        qzeros: [G, N bits / 32] int32, packed along N.
        scales: [G, N].
        g_idx: [K], the group of each input feature, or None for groups in order.
        bits: Bits per code.
        zero_offset: What the format took off the zero points: 1 in version 1, 0 in version 2.

    Returns:
        [N, K] float32.
    """
    codes = _unpack(qweight.t(), bits).t()
    zeros = (_unpack(qzeros, bits) + zero_offset) & (2**bits - 1)
    groups = g_idx.long() if g_idx is not None else torch.arange(codes.shape[0]) // (codes.shape[0] // scales.shape[0])
    return ((codes - zeros[groups]).to(scales.dtype) * scales[groups]).float().t().contiguous()


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """[R, C] int32 -> [R, C 32 / bits] int32 of unsigned codes."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)
