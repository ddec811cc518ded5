"""What LoRA learns on a packed base, beside the same LoRA on the 16-bit base, and what each way of merging keeps of it.

The same adapters, data and steps for all, over several seeds; SmolLM2-135M, Python's help topics, held-out windows of them::

    python benchmarks/bench_lora_quality.py --save

Contenders: the 16-bit base; the packed base; the packed base, merge-aware. What was trained on the packed base is merged in every
way; with --recalibrate also to 16 bits and quantized again with GPTQ on the training text (the first seed only). With
--calibrate the base is quantized with GPTQ, on the training text, instead of to the nearest; with --init-from-error adapters
start at what quantizing lost.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
import warnings
from typing import Any

import torch
from common import console, machine, print_table, save_results
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from torchq import QuantConfig, prepare_for_training, quantize_
from torchq.evaluation.divergence import english_text, measure_divergence, token_windows
from torchq.integrations.peft_merge import init_from_quantization_error, merge_adapters
from torchq.testing import smollm2

KINDS = ("16-bit", "packed", "merge-aware")
MERGES = ("same_grid", "new_scales", "dithered", "float")


@torch.no_grad()
def loss_of(model: Any, windows: list[Tensor]) -> float:
    """Mean loss, nats per token."""
    training = model.training
    model.eval()
    losses = [model(batch, labels=batch).loss.item() for batch in torch.stack(windows).split(8)]
    model.train(training)
    return statistics.fmean(losses)


def packed_base(base: nn.Module, windows: list[Tensor], args: argparse.Namespace) -> nn.Module:
    """The quantized base, calibrated on 256 of the training windows where that is asked for."""
    model = copy.deepcopy(base)
    calibration = windows[:256] if args.calibrate else None
    quantize_(model, QuantConfig(args.scheme, group_size=args.group_size), calibration=calibration, progress=False)
    return model


def wrap(base: nn.Module, packed: nn.Module, kind: str, args: argparse.Namespace, seed: int) -> Any:
    """A model with a new adapter."""
    model = copy.deepcopy(base if kind == "16-bit" else packed)
    if kind != "16-bit":
        prepare_for_training(model, merge_aware=kind == "merge-aware")
    torch.manual_seed(seed)
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    if kind != "16-bit" and args.init_from_error:
        init_from_quantization_error(model, base)
    return model


def train(model: Any, windows: list[Tensor], args: argparse.Namespace, seed: int) -> tuple[list[float], float]:
    """(Losses by step, seconds)."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate, weight_decay=0.0)
    order, losses, started = random.Random(seed), [], time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1, (step + 1) / 10) * (1 - step / args.steps)
        ids = torch.stack(order.sample(windows, args.batch))
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, time.perf_counter() - started


def merges_of(model: Any, kind: str, held_out: list[Tensor], gain: float, before: float) -> dict[str, dict[str, float]]:
    """What each way of merging gives: held-out loss, share of the gain, and KL to the model with its adapters apart."""
    rows = {}
    for how in ("dithered",) if kind == "merge-aware" else MERGES:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="merged")
            merged, report = merge_adapters(copy.deepcopy(model), how, evaluation=held_out[:8])
        loss = loss_of(merged, held_out)
        assert report.adapter_to_merged is not None and report.adapter_to_base is not None
        kl, base_kl = report.adapter_to_merged.mean_kl, report.adapter_to_base.mean_kl
        rows[how] = {"loss": loss, "gain_kept": (before - loss) / gain, "kl": kl, "kl_of_base": base_kl}
    return rows


def recalibrated(model: Any, base: nn.Module, windows: list[Tensor], held_out: list[Tensor], args: argparse.Namespace) -> Any:
    """The adapters merged into the 16-bit base and quantized with GPTQ: (held-out loss, KL to the model with adapters)."""
    plain, _ = merge_adapters(copy.deepcopy(model), "float")
    quantize_(plain, QuantConfig(args.scheme, group_size=args.group_size), calibration=windows[:256], progress=False)
    return loss_of(plain, held_out), measure_divergence(model.eval(), plain, held_out[:8]).mean_kl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--calibrate", action="store_true", help="the packed base comes from GPTQ on the training text")
    parser.add_argument("--init-from-error", action="store_true", help="adapters start at what quantizing lost")
    parser.add_argument("--no-merge", action="store_true", help="only the curves")
    parser.add_argument("--recalibrate", action="store_true")
    parser.add_argument("--name", default="lora_quality", help="of the file of results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base, tokenizer = smollm2()
    windows = token_windows(tokenizer, english_text(), num_windows=112_000 // args.length, length=args.length)
    training, held_out = windows[:-64], windows[-32:]  # 32 windows between them belong to neither
    packed = packed_base(base, training, args)
    runs = []
    for seed in range(args.seeds):
        for kind in args.kinds:
            model = wrap(base, packed, kind, args, seed)
            before = loss_of(model, held_out)
            losses, seconds = train(model, training, args, seed)
            after = loss_of(model, held_out)
            run: dict[str, Any] = {
                "kind": kind,
                "seed": seed,
                "before": before,
                "after": after,
                "losses": losses,
                "seconds": seconds,
            }
            if kind != "16-bit" and not args.no_merge:
                run["merged"] = merges_of(model, kind, held_out, before - after, before)
            if kind == "packed" and seed == 0 and args.recalibrate:
                loss, kl = recalibrated(model, base, training, held_out, args)
                run["merged"]["float, then GPTQ"] = {"loss": loss, "gain_kept": (before - loss) / (before - after), "kl": kl}
            runs.append(run)
            console.print(
                f"seed {seed} {kind}: {before:.4f} -> {after:.4f}, {seconds / args.steps:.1f} s/step {run.get('merged', '')}"
            )
    report(runs, args)
    if args.save:
        save_results(args.name, {"settings": vars(args), "machine_now": machine(), "runs": runs})


def report(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    def over_seeds(kind: str, value: Any) -> str:
        values = [value(run) for run in runs if run["kind"] == kind]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.4f}{spread}"

    kinds = list(dict.fromkeys(run["kind"] for run in runs))
    rows = [[kind, over_seeds(kind, lambda run: run["before"]), over_seeds(kind, lambda run: run["after"])] for kind in kinds]
    print_table(f"held-out loss over {args.seeds} seeds", ["base", "before", f"after {args.steps} steps"], rows)
    if args.no_merge or "packed" not in kinds:
        return
    gain = statistics.fmean(run["before"] - run["after"] for run in runs if run["kind"] == "packed")
    rows = []
    for kind in [kind for kind in kinds if kind != "16-bit"]:
        for how in dict.fromkeys(how for run in runs if run["kind"] == kind for how in run["merged"]):
            found = [(run, run["merged"][how]) for run in runs if run["kind"] == kind and how in run["merged"]]
            kept = [merged["gain_kept"] for _, merged in found]
            of_plain = statistics.fmean(run["before"] - merged["loss"] for run, merged in found) / gain
            kl = statistics.fmean(merged["kl"] for _, merged in found)
            rows.append([f"{kind}: {how}", f"{statistics.fmean(kept):.1%}", f"{min(kept):.1%}", f"{of_plain:.1%}", f"{kl:.4f}"])
    columns = ["trained: merged", "gain kept", "least", "of plain LoRA's gain", "KL to the adapter model"]
    print_table("what merging keeps of the gain in held-out loss", columns, rows)


if __name__ == "__main__":
    main()
