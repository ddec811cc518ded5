"""Memory and seconds of a LoRA training step: packed models against bitsandbytes' NF4 and against 16-bit weights, side by side.

One model and one batch for all; LoRA of rank 16 on all linear layers but the output embedding, AdamW, with activations kept and
recomputed (gradient checkpointing). bitsandbytes quantizes to NF4 with double quantization and computes in bfloat16; it takes
part as it is, and "prepared" by PEFT's ``prepare_model_for_kbit_training`` as QLoRA's recipe has it: embedding, head and norms in
float32. It has an interpreter of its own, with ``pip install bitsandbytes peft transformers accelerate``, and is left out
without one::

    python benchmarks/bench_qlora.py --bnb-python VENV/bin/python --save

Each contender runs in a process of its own, and all take turns. Before that, torchq's loss and gradients are compared with those
of the dequantized model in float32. A step's bytes are PyTorch's allocations, inside of ops too, beyond what stays: weights,
adapters and the optimizer's state. The system's peak has the growth of the process's resident memory in their place, and with it
oneDNN's scratch memory and what the heap does not give back. The limit of the time is that of the products with weights, at the
rate of a large bfloat16 matmul; "cpu" is processor time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import Timing, _summarise, base_parser, console, machine, machine_limits, print_table, save_results
from lora_worker import wrong
from torch import nn

from torchq import RTN, QuantConfig, quantize_, save_pretrained
from torchq.scheme import resolve_scheme
from torchq.testing import smollm2

WORKER = Path(__file__).with_name("lora_worker.py")
BF16, BITSANDBYTES, PREPARED = "bf16", "bnb NF4", "bnb NF4 prepared"
KINDS = {BF16: "bf16", BITSANDBYTES: "bitsandbytes", PREPARED: "bitsandbytes_prepared"}  # others: torchq
SCHEMES = ("W4A16", "W8A16", "NF4")
GROUP_SIZES = (128, 64, 32)
MODELS = ("smollm2", "llama1b")
JUDGED = ("W4A16", "NF4")  # the 4-bit ones


@dataclass(frozen=True)
class Setting:
    """A batch, rows x tokens, and whether activations are recomputed."""

    rows: int
    tokens: int
    checkpointing: bool

    @property
    def label(self) -> str:
        """As printed."""
        return f"{self.rows}x{self.tokens}{' recomputed' if self.checkpointing else ''}"


class Worker:
    """A contender's process."""

    def __init__(self, kind: str, python: str, folder: Path, arguments: argparse.Namespace) -> None:
        command = [
            os.path.abspath(shutil.which(python) or python),
            str(WORKER),
            str(folder),
            "--kind",
            kind,
            "--threads",
            str(arguments.threads),
        ]
        command += ["--autocast" if arguments.autocast else "--no-autocast"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )

    def ask(self, what: str, setting: Setting) -> dict[str, Any]:
        """Return the answer; RuntimeError with the end of its output if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"do": what, "batch": [setting.rows, setting.tokens], "checkpointing": setting.checkpointing}
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(" | ".join(self._log.read().strip().splitlines()[-3:]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()


@contextmanager
def started(kind: str, python: str, folder: Path, arguments: argparse.Namespace) -> Iterator[Worker]:
    """A worker, ended at the end of the block."""
    worker = Worker(kind, python, folder, arguments)
    try:
        yield worker
    finally:
        worker.close()


def main() -> None:
    """Compare, print one table and what became of the targets."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    settings = [Setting(*batch, recompute) for batch in arguments.batches for recompute in (False, True)]
    rate = machine_limits()["bfloat16_flops_per_second"]
    rows: list[dict[str, Any]] = []
    checks, problems = {}, {}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as temporary:
            folders = prepare(name, arguments, Path(temporary), problems)
            for contender, folder in folders.items():
                if contender not in KINDS:
                    checks[f"{name} {contender}"] = check(contender, folder, arguments)
            rows += compare(name, folders, settings, arguments, rate, problems)
    _print(rows, arguments)
    for name, problem in problems.items():
        console.print(f"{name}: {problem}", highlight=False, markup=False, soft_wrap=True)
    for line in verdicts(rows):
        console.print(line, highlight=False, soft_wrap=True)
    if arguments.save:
        options = {name: getattr(arguments, name) for name in ("threads", "autocast", "layers", "rounds")}
        payload = {"settings": options, "bf16_flops_per_second": rate, "checks": checks, "left_out": problems, "results": rows}
        save_results("qlora", payload)
    if any(problem.startswith("failed") for problem in problems.values()):
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    parser = base_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=16, help="of the random Llama: 16 make a billion parameters")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--batches", nargs="+", type=_batch, default=[(4, 256), (1, 512)], metavar="ROWSxTOKENS")
    parser.add_argument("--bnb-python", metavar="PATH", help="interpreter of a venv with bitsandbytes, peft and transformers")
    parser.add_argument(
        "--autocast", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 autocast, as trainers do"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def _batch(text: str) -> tuple[int, int]:
    rows, _, tokens = text.partition("x")
    return int(rows), int(tokens)


# ------------------------------------------------------------------------------------------------------------------- models


def prepare(name: str, arguments: argparse.Namespace, work: Path, problems: dict[str, str]) -> dict[str, Path]:
    """Write the model and its packed versions into ``work``; return each contender's folder."""
    console.print(f"preparing {name}")
    model = base_model(name, arguments.layers)
    folders = {BF16: work / "bf16"}
    model.save_pretrained(folders[BF16])
    if arguments.bnb_python is None:
        problems[BITSANDBYTES] = "left out: no interpreter given (--bnb-python VENV/bin/python)"
    else:
        folders[BITSANDBYTES] = folders[PREPARED] = folders[BF16]
    for scheme in arguments.schemes:
        try:
            resolve_scheme(scheme)
        except (NotImplementedError, ValueError) as error:
            problems[scheme] = f"left out: {error}"
            continue
        if scheme == "NF4":  # has no checkpoint format: the worker quantizes
            folders[scheme] = folders[BF16]
            continue
        group_size = group_size_for(model)
        packed = type(model).from_pretrained(folders[BF16], dtype=torch.bfloat16)
        quantize_(packed, QuantConfig(scheme, group_size=group_size, algorithm=RTN(scale_search="absmax")), progress=False)
        contender = f"{scheme} g{group_size}"
        folders[contender] = work / scheme
        save_pretrained(packed, folders[contender])
    return folders


def base_model(name: str, layers: int) -> Any:
    """Return a model in bfloat16."""
    if name == "smollm2":
        return smollm2()[0]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "vocab_size": 32000}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=2048, tie_word_embeddings=False)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def group_size_for(model: nn.Module) -> int:
    """The largest group size that divides the columns of all linear layers."""
    columns = {module.in_features for module in model.modules() if isinstance(module, nn.Linear)}
    return next(size for size in GROUP_SIZES if all(k % size == 0 for k in columns))


def kind_of(contender: str) -> str:
    """The worker's kind of a contender."""
    return KINDS.get(contender, "torchq_nf4" if contender == "NF4" else "torchq")


def check(contender: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return errors of a packed model's loss and gradients; ends the program if they are wrong."""
    with started(kind_of(contender), sys.executable, folder, arguments) as worker:
        found = worker.ask("check", Setting(1, 64, False))
    if problem := wrong(found):
        raise SystemExit(f"{contender}: {problem}; nothing is timed")
    return found


# ------------------------------------------------------------------------------------------------------------------ measuring


def compare(
    model: str,
    folders: Mapping[str, Path],
    settings: list[Setting],
    arguments: argparse.Namespace,
    rate: float,
    problems: dict[str, str],
) -> list[dict[str, Any]]:
    """Start all contenders, and return their figures at each setting."""
    rows = []
    with ExitStack() as stack:
        workers = {}
        for name, folder in folders.items():
            kind = kind_of(name)
            python = arguments.bnb_python if kind.startswith("bitsandbytes") else sys.executable
            workers[name] = stack.enter_context(started(kind, python, folder, arguments))
        for setting in settings:
            console.print(f"{model} {setting.label}")
            memory = {}
            for name in list(workers):
                try:
                    memory[name] = workers[name].ask("measure", setting)
                except RuntimeError as error:
                    problems[f"{model} {name}"] = f"failed: {error}"
                    del workers[name]
                    continue
                if name not in KINDS:
                    refuse_kept(name, memory[name])
            rows += _rows(model, setting, memory, time_in_turns(workers, setting, arguments.rounds), rate)
    return rows


def refuse_kept(name: str, memory: Mapping[str, Any]) -> None:
    """End the program if something as large as a dequantized layer stays between steps."""
    if memory["largest_left"] >= memory["smallest_layer"]:
        raise SystemExit(f"{name}: a step leaves a block of {memory['largest_left']} bytes; a dequantized weight?")
    if memory["unknown"]:
        raise SystemExit(f"{name}: between steps there are {', '.join(memory['unknown'][:5])}; dequantized weights?")


def time_in_turns(workers: Mapping[str, Worker], setting: Setting, rounds: int) -> dict[str, dict[str, Timing]]:
    """Return seconds of steps and their parts; each round goes through all workers in a new order."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name, worker in shuffle.sample(list(workers.items()), len(workers)):
            samples[name].append(worker.ask("step", setting))
    parts = ("step", "forward", "backward", "optimizer", "cpu")
    return {name: {part: _summarise([step[part] for step in steps]) for part in parts} for name, steps in samples.items()}


def _rows(
    model: str, setting: Setting, memory: Mapping[str, Any], timings: Mapping[str, dict[str, Timing]], rate: float
) -> list[dict[str, Any]]:
    rows = []
    for name, found in memory.items():
        weights = sum(size for part, size in found["weights"].items() if part != "adapters")
        held = weights + found["weights"]["adapters"] + found["optimizer"]
        rows.append(
            {"model": model, "contender": name, **asdict(setting), "label": setting.label}
            | found
            | {
                "all_weights": weights,
                "peak": held + found["step_peak"],
                "system_peak": held + found["step_growth"],
                "limit_s": found["flops"] / rate,
            }
            | {"of_limit": found["flops"] / rate / timings[name]["step"].median}
            | {part: asdict(timing) for part, timing in timings[name].items()}
        )
    for row in rows:
        for other in (BF16, BITSANDBYTES):
            base = next((base for base in rows if base["contender"] == other), None)
            if base is not None:
                row[f"of {other}"] = {
                    "step": row["step"]["median"] / base["step"]["median"],
                    "peak": row["peak"] / base["peak"],
                    "system_peak": row["system_peak"] / base["system_peak"],
                    "linear": row["weights"]["linear"] / base["weights"]["linear"],
                    "all_weights": row["all_weights"] / base["all_weights"],
                }
    return rows


# ------------------------------------------------------------------------------------------------------------------- judging


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Lines that say which targets the 4-bit schemes meet, each with its worst figure."""
    lines = []
    for scheme in JUDGED:
        mine = [row for row in rows if row["contender"].startswith(scheme)]
        for target, other, figure, most in (
            ("peak of tensors, of bitsandbytes'", BITSANDBYTES, "peak", 1.0),
            ("peak by the system, of bitsandbytes'", BITSANDBYTES, "system_peak", 1.0),
            ("seconds, of bitsandbytes'", BITSANDBYTES, "step", 0.8),
            ("linear weights, of bf16", BF16, "linear", 1 / 3),
            ("seconds, of bf16", BF16, "step", 1.3),
        ):
            lines += _verdict(
                f"{scheme} {target}", [(row, row[f"of {other}"][figure]) for row in mine if f"of {other}" in row], most
            )
    return lines


def _verdict(target: str, found: list[tuple[dict[str, Any], float]], most: float) -> list[str]:
    if not found:
        return []
    row, worst = max(found, key=lambda pair: pair[1])
    missed = sum(value > most for _, value in found)
    where = f"{row['model']} {row['label']}"
    return [
        f"{'FAIL' if missed else 'PASS'}  {target} <= {most:.2f}: worst {worst:.2f} at {where}; {missed} of {len(found)} miss it"
    ]


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the figures of all contenders, below the name of each case."""
    lines, last = [], ""
    for row in rows:
        case, step = f"{row['model']} {row['label']}", row["step"]
        if case != last:
            lines.append([case] + [""] * 12)
        ratios = [row.get(f"of {other}", {}).get("step") for other in (BF16, BITSANDBYTES)]
        sizes = [row["weights"]["linear"]] + [row[name] for name in ("all_weights", "saved", "step_peak", "peak", "system_peak")]
        lines.append(
            [f"  {row['contender']}", *(f"{size / 1e6:.0f}" for size in sizes)]
            + [
                f"{step['median']:.3g}",
                f"{step['low']:.3g}–{step['high']:.3g}",
                f"{row['cpu']['median']:.3g}",
                f"{row['of_limit']:.0%}",
            ]
            + ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        )
        last = case
    columns = ["MB and seconds", "linear", "weights", "saved", "+ step", "peak", "system", "s", "10–90 %", "cpu", "of limit"]
    title = f"a LoRA step, {arguments.threads} threads of {machine()['processor']}{', autocast' if arguments.autocast else ''}"
    print_table(title, [*columns, "/bf16", "/bnb"], lines)


if __name__ == "__main__":
    main()
