"""LoRA training steps of one model, on request: lines of JSON in, lines of JSON out. Started by ``bench_qlora.py``.

Runs in the venv of bitsandbytes too, so this file imports torchq only for models that it has packed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lora_memory import (
    reset_peak,
    resident_bytes,
    saved_bytes,
    storages,
    tensors_by_part,
    trace_memory,
    unknown_tensors,
    weight_bytes,
)
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

KINDS = ("bf16", "bitsandbytes", "bitsandbytes_prepared", "torchq", "torchq_nf4")
RANK, ALPHA = 16, 32


def main() -> None:
    """Load a model and answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of the 16-bit model, or of the packed one")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    training = Training(add_adapters(load(arguments.kind, arguments.folder)), arguments.autocast)
    for line in sys.stdin:
        request = json.loads(line)
        training.set_up(tuple(request["batch"]), request["checkpointing"])
        if request["do"] == "step":
            answer: dict[str, Any] = training.step()
        elif request["do"] == "check":
            answer = check(training, arguments.kind, arguments.folder)
        else:
            answer = training.measure()
        print(json.dumps(answer), file=answers, flush=True)


# ------------------------------------------------------------------------------------------------------------------- models


def load(kind: str, folder: str) -> nn.Module:
    """Return the base model on the CPU, its 16-bit weights in bfloat16."""
    if kind.startswith("torchq"):
        from torchq import prepare_for_training

        return prepare_for_training(packed_model(kind, folder))
    if kind == "bf16":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"})
    if kind == "bitsandbytes_prepared":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return model


def packed_model(kind: str, folder: str) -> nn.Module:
    """Return torchq's model: from its own folder, or for NF4, which has no checkpoint format, quantized from the 16-bit one."""
    from torchq import load_pretrained, quantize_

    if kind == "torchq":
        return load_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_(model, "NF4", progress=False)
    return model


def add_adapters(model: nn.Module) -> nn.Module:
    """Return the model with LoRA on all linear layers but the output embedding; float32, as PEFT makes adapters."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def disturb_adapters(model: nn.Module) -> None:
    """Move the adapters' second factors away from zero, so that there is a gradient for all factors."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.01 * torch.randn(parameter.shape, generator=generator))


def gradients(model: nn.Module, ids: Tensor, autocast: bool) -> tuple[Tensor, Tensor]:
    """Return the loss and the adapters' gradients in one vector, both float64."""
    with torch.autocast(ids.device.type, torch.bfloat16) if autocast else nullcontext():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = torch.cat([parameter.grad.double().flatten() for parameter in trained])  # type: ignore[union-attr]
    model.zero_grad()
    return loss.detach().double(), flat


# ------------------------------------------------------------------------------------------------------------------ training


class Training:
    """A model with adapters, AdamW, and a batch of random tokens.

    Args:
        model: What :func:`add_adapters` returned.
        autocast: Whether to run it under bfloat16 autocast.
        device: Where it is.
    """

    def __init__(self, model: nn.Module, autocast: bool, device: str = "cpu") -> None:
        self.model, self.autocast, self.device = model, autocast, device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        self.ids = torch.zeros(0, 0, dtype=torch.long)

    def set_up(self, batch: tuple[int, int], checkpointing: bool) -> None:
        """Set the size of the batch, and whether activations are computed again in the backward pass."""
        base = self.model.get_base_model()
        if tuple(self.ids.shape) != batch:
            generator = torch.Generator().manual_seed(2)
            self.ids = torch.randint(base.config.vocab_size, batch, generator=generator).to(self.device)
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            base.gradient_checkpointing_disable()

    def forward(self) -> Tensor:
        """Return the loss."""
        with torch.autocast(self.device, torch.bfloat16) if self.autocast else nullcontext():
            return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss

    def step(self, update: bool = True) -> dict[str, float]:
        """Make a step, without ``update`` but for the optimizer's part; return seconds (``cpu``: of all threads) and the loss."""
        started, processor = time.perf_counter(), time.process_time()
        loss = self.forward()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if update:
            self.optimizer.step()
        self.optimizer.zero_grad()
        parts = {"forward": forward - started, "backward": backward - forward, "optimizer": time.perf_counter() - backward}
        processor = time.process_time() - processor
        return parts | {"step": sum(parts.values()), "cpu": processor, "loss": loss.item()}

    def known(self) -> set[int]:
        """Addresses of what may be there between steps."""
        states = [value for state in self.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return storages([tensor for _, tensor in tensors_by_part(self.model)] + states + [self.ids])

    def measure(self) -> dict[str, Any]:
        """Return bytes, of weights by part and of a step."""
        sizes = dequantized_sizes(self.model)
        first = trace_memory(lambda: self.step(update=False))  # whatever a first pass caches is among what it leaves
        self.step()
        saved = saved_bytes(self.forward, self.known())
        peak = trace_memory(self.step).peak
        reset_peak()
        before = resident_bytes()
        self.step()
        growth = resident_bytes("VmHWM") - before
        unknown = unknown_tensors(self.known(), min(sizes))
        moments = sum(value.nbytes for state in self.optimizer.state.values() for value in state.values())
        return {
            "weights": weight_bytes(self.model),
            "optimizer": moments,
            "saved": saved,
            "step_peak": peak,
            "step_growth": growth,
            "largest_left": max(first.left, default=0),
            "smallest_layer": min(sizes),
            "unknown": unknown,
            "flops": step_flops(self.model, self.ids.numel()),
        }


def _layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name -> (out_features, in_features) of the layers with adapters."""
    return {name: (m.out_features, m.in_features) for name, m in model.named_modules() if hasattr(m, "lora_A") and m.lora_A}


def dequantized_sizes(model: nn.Module) -> list[int]:
    """Bytes that the weight of each layer with adapters has in 16 bits."""
    return [2 * n * k for n, k in _layers(model).values()]


def step_flops(model: nn.Module, tokens: int) -> float:
    """Operations that no step does without: products with weights, forward and, but in the first block, of gradients."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    total = 4.0 * head.out_features * head.in_features
    for name, (n, k) in _layers(model).items():
        total += (2 if ".layers.0." in name else 4) * n * k
    return total * tokens


# ------------------------------------------------------------------------------------------------------------------ checking


def check(training: Training, kind: str, folder: str) -> dict[str, float]:
    """Return the errors of a packed model and of its dequantized twin in bfloat16; see :func:`errors`."""
    from torchq import dequantize_

    disturb_adapters(training.model)
    packed = gradients(training.model, training.ids, training.autocast)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        twin = add_adapters(dequantize_(packed_model(kind, folder)).to(dtype))
        disturb_adapters(twin)
        found[dtype] = gradients(twin, training.ids, training.autocast and dtype == torch.bfloat16)
    return errors(found[torch.float32], {"packed": packed, "twin": found[torch.bfloat16]})


def errors(exact: tuple[Tensor, Tensor], found: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Relative errors of losses and gradients, by ``<name>_loss`` and ``<name>_gradient``."""
    result = {}
    for name, values in found.items():
        for what, value, right in zip(("loss", "gradient"), values, exact, strict=True):
            result[f"{name}_{what}"] = ((value - right).norm() / right.norm()).item()
    return result


def wrong(found: Mapping[str, float]) -> str | None:
    """What is wrong with a packed model, by its :func:`errors`: they may be twice those of the twin in the same 16 bits."""
    for what, tiny in (("loss", 2**-8), ("gradient", 0.0)):
        if not found[f"packed_{what}"] <= 2 * found[f"twin_{what}"] + tiny:
            return f"the {what} is off by {found[f'packed_{what}']:.4f}, the dequantized model's by {found[f'twin_{what}']:.4f}"
    return None


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
