"""The step of a GPU session on LoRA training: packed layers beside 16-bit ones and bitsandbytes', seconds and memory."""

from __future__ import annotations

import copy
import gc
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from common import console
from gpu_models import words_anywhere
from gpu_report import BASE_TRAINING, print_training
from gpu_timing import Plan, limits_of, time_runs
from torch import nn

from torchq import RTN, QuantConfig, prepare_for_training, quantize_
from torchq.checkpoint.reader import dequantize_
from torchq.scheme import resolve_scheme
from torchq.testing import tiny_llama

if TYPE_CHECKING:
    from gpu_session import Session
    from lora_worker import Training

SCHEMES = ("W4A16", "NF4")
BITSANDBYTES = "bitsandbytes"


def time_training(session: Session, record: dict[str, Any]) -> None:
    """Time LoRA steps of a large random Llama, with the memory they take."""
    if importlib.util.find_spec("peft") is None:
        session.skip("LoRA: peft is not installed")
        return
    notes = record.setdefault("notes", {})
    with words_anywhere(session.plan):
        lineup = prepare_lineup(session, record, notes)
        for recompute in (False, True):
            if not session.late(f"recompute={recompute}"):
                record.setdefault("rows", []).extend(time_lineup(session, lineup, recompute))
                session.save()
    print_training(record.get("rows", []))
    for name, note in notes.items():
        console.print(f"{name}: {note}", highlight=False, markup=False)


def prepare_lineup(session: Session, record: dict[str, Any], notes: dict[str, str]) -> dict[str, Training]:
    """Return the contenders, copies of one model; the first is what others are compared with."""
    plan, base = session.plan, random_llama(session.plan)
    lineup = {BASE_TRAINING: new_training(copy.deepcopy(base), plan)}
    for scheme in SCHEMES:
        if session.late(scheme):
            continue
        try:
            resolve_scheme(scheme)
        except NotImplementedError as error:
            notes[scheme] = str(error)
            continue
        record.setdefault("checks", {})[scheme] = check(scheme, plan)
        lineup[scheme] = new_training(prepare_for_training(packed(scheme, copy.deepcopy(base))), plan)
    if importlib.util.find_spec(BITSANDBYTES) is None:
        notes[BITSANDBYTES] = "not installed"
    elif not session.late(BITSANDBYTES):
        try:
            training = new_training(in_bitsandbytes(copy.deepcopy(base), plan.device), plan)
            training.set_up((1, 16), False)
            training.step()
            lineup[BITSANDBYTES] = training
        except Exception as error:  # of another library: any
            notes[BITSANDBYTES] = f"failed: {type(error).__name__}: {str(error)[:300]}"
    return lineup


def time_lineup(session: Session, lineup: dict[str, Training], recompute: bool) -> list[dict[str, Any]]:
    """Return each contender's seconds and bytes, with or without recomputing activations."""
    from lora_memory import weight_bytes
    from lora_worker import step_flops

    plan, limits, peaks = session.plan, limits_of(session), {}
    for name, training in lineup.items():
        training.set_up((2, 16) if plan.dry else (4, 1024), recompute)
        training.step()  # compiles, tunes, and makes the optimizer's state
        peaks[name] = step_peak(training)
    timings = time_runs(session.timer, {name: (training.step, 1) for name, training in lineup.items()}, 1 if plan.dry else 8)
    rows = []
    for name, timing in timings.items():
        model = lineup[name].model
        weights, limit = weight_bytes(model), limits.seconds(0, step_flops(model, lineup[name].ids.numel()))
        rows.append({"contender": name, "recompute": recompute, "weights": weights, "step_peak": peaks[name]})
        rows[-1] |= {"median_s": timing.median, "p10_s": timing.low, "p90_s": timing.high, "limit_s": limit}
    return rows


def step_peak(training: Training) -> int:
    """Most bytes of a step at a time, beyond those that stay."""
    from lora_memory import trace_memory

    if training.device == "cpu":
        return trace_memory(training.step).peak
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training.step()
    return torch.cuda.max_memory_allocated() - before


# ------------------------------------------------------------------------------------------------------------------- models


def random_llama(plan: Plan, layers: int = 8) -> nn.Module:
    """Return a Llama with layers of the 8B model's size."""
    if plan.dry:
        return tiny_llama(dtype=plan.dtype, hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device(plan.device):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=32000)).to(plan.dtype)


def packed(scheme: str, model: nn.Module) -> nn.Module:
    """Quantize a model in place, and return it."""
    quantize_(model, QuantConfig(scheme, algorithm=RTN(scale_search="absmax")), progress=False)
    return model


def in_bitsandbytes(model: nn.Module, device: str) -> nn.Module:
    """Replace the linear layers, but for the output embedding, by bitsandbytes' NF4 with double quantization."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            sizes = (module.in_features, module.out_features)
            layer = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=module.weight.dtype, quant_type="nf4")
            weight = bnb.nn.Params4bit(module.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True)
            layer.weight = weight
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.to(device))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what PEFT asks
    return model


def new_training(model: nn.Module, plan: Plan) -> Training:
    """Add adapters and an optimizer. A dry run is in float16, without autocast."""
    from lora_worker import Training, add_adapters

    return Training(add_adapters(model).to(plan.device), not plan.dry, plan.device)


# ------------------------------------------------------------------------------------------------------------------ checking


def check(scheme: str, plan: Plan) -> dict[str, float]:
    """Return errors of a packed model's loss and gradients; ValueError if they are twice its dequantized twin's."""
    from lora_worker import add_adapters, disturb_adapters, errors, gradients, wrong

    model = packed(scheme, random_llama(plan, layers=2))
    twins = copy.deepcopy(model), copy.deepcopy(model)
    for twin, dtype in zip(twins, (plan.dtype, torch.float32), strict=True):
        dequantize_(twin)
        twin.to(dtype)
    ids = torch.randint(3, 128, (1, 16 if plan.dry else 256), generator=torch.Generator().manual_seed(0)).to(plan.device)
    results = []
    for some in (prepare_for_training(model), *twins):
        some = add_adapters(some).to(plan.device)
        disturb_adapters(some)
        results.append(gradients(some, ids, autocast=not plan.dry and some.get_base_model().dtype != torch.float32))
    found = errors(results[2], {"packed": results[0], "twin": results[1]})
    if problem := wrong(found):
        raise ValueError(f"{scheme}: {problem}; a wrong result is not timed")
    return found
