"""Write reference tensors of bitsandbytes' NF4: weights, what it makes of them, and what it reads back.

Versions used for the file in ``bitsandbytes/``: bitsandbytes 0.50.2, torch 2.13.0, on an x86 CPU with AVX-512.

    python tests/golden/make_bitsandbytes.py tests/golden/bitsandbytes

Weights are multiples of 2^-12, so that the mean of absmax does not depend on the order in which it is summed. Some blocks are
zero, some values lie halfway between two levels. ``dequantized`` is what bitsandbytes makes of the weight as one row: its AVX-512
code takes the wrong absmax where rows end within a block.
"""

import argparse
from importlib.metadata import version
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file

CASES = {  # name -> shape, block_size, dtype, double quantization
    "plain": ((16, 128), 64, torch.bfloat16, False),
    "nested": ((17, 512), 32, torch.bfloat16, True),
    "nested-one-block": ((1, 64), 64, torch.float32, True),
    "rows-within-blocks": ((7, 48), 64, torch.float32, False),
    "ragged": ((3, 500), 128, torch.float16, True),
    "odd": ((5, 33), 32, torch.float16, False),
    "odd-nested": ((9, 301), 64, torch.float32, True),
    "zero-tail": ((3, 31), 64, torch.bfloat16, False),
    "one": ((1, 1), 64, torch.float32, False),
    "large-blocks": ((3, 1500), 4096, torch.float32, True),
}


def make_weight(name, shape, dtype):
    generator = torch.Generator().manual_seed(len(name))
    flat = torch.randn(*shape, generator=generator).view(-1)
    flat[256:320] = 0
    if name == "zero-tail":
        flat[64:] = 0
    if name == "rows-within-blocks":  # absmax 1, and the 15 values between two levels
        levels = bnb.get_4bit_type("nf4", device="cpu")
        flat[0], flat[1:64] = 1, flat[1:64].clamp(-1, 1)
        flat = (flat * 4096).round() / 4096
        flat[1:16] = (levels[1:] + levels[:-1]) / 2
        return flat.view(shape).to(dtype)
    return ((flat * 4096).round() / 4096).view(shape).to(dtype)


def main():
    parser = argparse.ArgumentParser(description="Write bitsandbytes' NF4 reference tensors.")
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    tensors = {"dynamic_levels": bnb.create_dynamic_map(), "levels": bnb.get_4bit_type("nf4", device="cpu")}
    for name, (shape, block_size, dtype, nested) in CASES.items():
        weight = make_weight(name, shape, dtype)
        packed, state = bnb.quantize_4bit(weight, blocksize=block_size, quant_type="nf4", compress_statistics=nested)
        state.shape = torch.Size([1, weight.numel()])
        dequantized = bnb.dequantize_4bit(packed, state).view(shape)
        found = {"weight": weight, "packed": packed.view(-1), "absmax": state.absmax, "dequantized": dequantized}
        found["block_size"] = torch.tensor(block_size)
        if nested:
            found |= {"nested_scale": state.state2.absmax, "nested_offset": state.offset}
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in found.items()}
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "nf4.safetensors", {"bitsandbytes": version("bitsandbytes"), "torch": torch.__version__})


if __name__ == "__main__":
    main()
