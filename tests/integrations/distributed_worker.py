"""Trains a packed tiny Llama in the ways its arguments name, and writes what came of it to OUT/<way>.json.

    torchrun --standalone --nproc-per-node 2 distributed_worker.py OUT WAY...

Each rank takes its part of every batch, so the mean of the ranks' losses is that of one process with the whole batch.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from torchq import QuantConfig, QuantLinear, quantize_
from torchq.testing import tiny_llama
from torchq.training import prepare_for_training

TOKENS = 3 + (torch.arange(40)[:, None] + 5 * torch.arange(16)) % 20
BATCHES = TOKENS.split(8)


def build(scheme: str = "W4A16", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    model = tiny_llama(dtype=dtype)
    quantize_(model, QuantConfig(scheme, group_size=32 if scheme == "W4A16" else None), progress=False)
    torch.manual_seed(0)
    return get_peft_model(prepare_for_training(model), LoraConfig(r=4, target_modules="all-linear", **config)).train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


def loss_of(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def train(model: Any, rank: int = 0, world_size: int = 1, backward: Callable[[Tensor], None] = Tensor.backward,
          optimizer: Any = None) -> list[float]:  # fmt: skip
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for batch in BATCHES:
        loss = loss_of(model, batch.chunk(world_size)[rank])
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss) if world_size > 1 else loss.item())
    return losses


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def ddp(rank: int, **settings: Any) -> tuple[Any, dict[str, Any]]:
    model = build(**settings)
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    sent = [id(buffer) for buffer in wrapped.modules_buffers]
    packed = {id(buffer): name for name, buffer in model.named_buffers() if ".base_layer." in name}
    losses = train(wrapped, rank, dist.get_world_size())
    return model, {"losses": losses, "packed": len(packed), "sent": len(sent), "packed_sent": len(packed.keys() & sent)}


def fsdp2(rank: int, *, each: bool = False, **settings: Any) -> tuple[Any, dict[str, Any]]:
    model = build(**settings)
    for module in model.modules() if each else ():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            fully_shard(module)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, {"losses": train(model, rank, dist.get_world_size())} | what_is_sharded(model)


def what_is_sharded(model: nn.Module) -> dict[str, Any]:
    return {
        "whole_parameters": [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)],
        "sharded_buffers": [name for name, buffer in model.named_buffers() if isinstance(buffer, DTensor)],
        "packed_layers": sum(isinstance(module, QuantLinear) for module in model.modules()),
    }


def saved_adapters(model: Any, folder: Path, rank: int) -> dict[str, Any]:
    """Save the adapters of all shards as PEFT does those of one process."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    with torch.no_grad():
        return {"loss_when_saved": mean_over_ranks(loss_of(model.eval(), TOKENS[:8]))}


def accelerate(rank: int, **settings: Any) -> tuple[Any, dict[str, Any]]:
    accelerator = Accelerator(cpu=True)
    model = build(**settings)
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model))
    return model, {"losses": train(wrapped, rank, dist.get_world_size(), accelerator.backward, optimizer)}


def trainer(folder: Path, batch_size: int, model: Any) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", logging_steps=1, max_steps=5, learning_rate=1e-2, seed=0,
        per_device_train_batch_size=batch_size, save_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    run = Trainer(model=model, args=arguments, train_dataset=rows)
    run.train()
    if run.is_world_process_zero():
        run.save_model(str(folder))
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "W8A8": {"scheme": "W8A8"},
    "NF4": {"scheme": "NF4"},
    "dora": {"use_dora": True},
    "each": {},
}


def run(way: str, out: Path, rank: int) -> None:
    kind, setting = way.split("-")
    settings = SETTINGS[setting]
    if kind == "trainer":
        result: dict[str, Any] = {"losses": trainer(out / way, 4, build(**settings))}
    else:
        torch.manual_seed(rank)  # what ranks have in common must not depend on their random state
        extra = {"each": True} if setting == "each" else {}
        model, result = {"ddp": ddp, "fsdp2": fsdp2, "accelerate": accelerate}[kind](rank, **settings, **extra)
        if kind == "fsdp2":
            result |= saved_adapters(model, out / way, rank)
    if rank == 0:
        (out / f"{way}.json").write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        run(name, Path(sys.argv[1]), dist.get_rank())
    dist.destroy_process_group()
