"""What the compiler makes of the Triton kernels, without a GPU: registers, spills, shared memory, and instructions per weight.

Every kernel and tile of the dispatch table, and the kernels of the KV cache, are compiled for each architecture, and the machine
code is read. It must spill nothing but a value or two, fit the GPU's registers and shared memory, load weights 16 bytes at a
time, and issue no more instructions per weight than ``static_kernels.json`` records for this release of Triton (with 5 % to
spare); products must use tensor cores and keep what is decoded out of shared memory::

    python benchmarks/static_kernels.py             check against the record
    python benchmarks/static_kernels.py --record    write what is found into it, and print the table

The compiler and the disassembler are those in the triton package. For AMD kernels are compiled only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchq.kernels import kv_attention_triton, kv_cache_triton, nf4_triton, words_triton
from torchq.kernels.dispatch import TABLE, Tile

RECORD = Path(__file__).with_suffix(".json")
SLACK = 1.05  # instructions per weight may exceed the record by this factor
SHARED_MEMORY = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 99 << 10, "gfx942": 64 << 10}  # the least of each family
MOST_SPILLED = (
    16  # bytes: the compilers put one or two values aside as they like, at any tile; what a tile too large spills is more
)
# Instructions per weight of up to 4 bits that a record may not exceed, at 8 or 16 tokens in groups of 128 without zero points.
# (On sm_80 Triton 3.6 and 3.7 need 3.4 at most, 3.9 needs 3.9.)
MOST_INSTRUCTIONS = {"sm_80": 4.0, "sm_90": 3.2, "sm_100": 3.5}
MOST_INSTRUCTIONS_8_BITS = 6.0
MOST_INSTRUCTIONS_NF4 = 10.5  # to write a value; 12.4 is what a B200 can issue while it does, 15.8 an H200
MOST_INSTRUCTIONS_KV = 3.2  # per key or value of 8 bits, at up to 8 queries for each; 6.2 is what an H200 can issue per byte read
MMA = ("HMMA", "HGMMA", "UTCHMMA")
TYPES = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Case:
    """One compilation of the matmul kernel, of the one that dequantizes, or of the one that adds parts (``extra="reduce"``).

    Other extras of the matmul: ``"one row"`` (N = 1, which Triton makes a constant), ``"undivided"`` (K is not split: 16-bit
    output and a bias); of the one that dequantizes: ``"nf4"`` and ``"nf4 nested"``, blocks for groups.
    """

    architecture: str
    num_bits: int
    dtype: str
    tile: Tile
    group_size: int = 128
    has_zeros: bool = False
    ragged_k: bool = False
    dequantize: bool = False
    fp8: bool = False
    asm: bool = False
    extra: str = ""

    @property
    def name(self) -> str:
        """As in the record."""
        t = self.tile
        name = f"{self.architecture} w{self.num_bits} {self.dtype} {t.block_m}x{t.block_n} {t.num_warps}w {t.num_stages}s"
        name += f" g{self.group_size}" if self.group_size else " channel"
        return (
            name
            + " asym" * self.has_zeros
            + " ragged" * self.ragged_k
            + " dequantize" * self.dequantize
            + " fp8" * self.fp8
            + " asm" * self.asm
            + f" {self.extra}" * bool(self.extra)
        )

    @property
    def has_loop(self) -> bool:
        """Whether what is decoded is decoded in a loop."""
        return not self.dequantize

    @property
    def decoded(self) -> float:
        """Weights in a tile, per lane."""
        return self.tile.block_n * words_triton.block_size(self.num_bits) / (32 * self.tile.num_warps)


@dataclass(frozen=True)
class KvCase:
    """One compilation of a kernel of the KV cache, in bfloat16.

    ``rows`` queries attend to keys and values of ``head_dim``; extras: ``"causal"``, ``"mask"`` (boolean), ``"ragged"`` (slots
    that no tile divides), or, of another kernel, ``"append"`` (of one token), ``"append many"`` and ``"reduce"``.
    """

    architecture: str
    keys: str
    values: str
    rows: int = 8
    head_dim: int = 128
    extra: str = ""

    @property
    def name(self) -> str:
        """As in the record."""
        name = f"{self.architecture} kv {self.keys} {self.values} {self.rows} rows D={self.head_dim}"
        return name + f" {self.extra}" * bool(self.extra)

    @property
    def slots(self) -> int:
        """R."""
        return 8200 if self.extra == "ragged" else 8192

    @property
    def tile(self) -> kv_cache_triton.Tile:
        """That the launcher chooses."""
        dims = self.head_dim, self.head_dim
        return kv_cache_triton.tile_for(self.rows, self.slots, *dims, self.keys, self.values, 2)

    @property
    def has_loop(self) -> bool:
        """Whether it attends."""
        return not self.extra.startswith(("append", "reduce"))

    @property
    def decoded(self) -> float:
        """Keys and values in a tile, per lane; of other kernels, those of a token."""
        return 2 * self.head_dim * (self.tile.tokens / self.tile.num_warps if self.has_loop else 1) / 32


@dataclass(frozen=True)
class Measured:
    """What the machine code shows; the K loop's figures where there is one.

    Attributes:
        registers: Per thread.
        shared_memory: Bytes per program.
        spilled: Bytes of local memory per thread.
        instructions: In the K loop, issued per lane and weight.
        mma: The tensor core's instruction in the loop, or "".
        load_bits: Width of the loads of words.
        shared_stores: In the loop, per lane and weight: decoded weights that go through shared memory show here.
        store_bits: Width of the stores to memory.
    """

    registers: int
    shared_memory: int
    spilled: int
    instructions: float
    mma: str
    load_bits: int
    shared_stores: float
    store_bits: int = 0


def cases() -> list[Case]:
    """Every tile of the table with every kind of weight that it is for; float16, which is decoded alike, with the plainest."""
    forms = {"": ((128, False), (0, False)), "_fine": ((64, False), (32, False), (128, True), (32, True), (0, True))}
    found: dict[Case, None] = {}
    for architecture, kinds in TABLE.items():
        for kind, rows in kinds.items():
            bits, _, fine = kind.removeprefix("w").partition("_")
            for _, tile in rows:
                for group_size, has_zeros in forms["_fine" if fine else ""]:
                    found[Case(architecture, int(bits), "bfloat16", tile, group_size, has_zeros)] = None
                group_size, has_zeros = forms["_fine" if fine else ""][0]
                found[Case(architecture, int(bits), "bfloat16", tile, group_size, has_zeros, ragged_k=True)] = None
                if not fine:
                    found[Case(architecture, int(bits), "float16", tile)] = None
                if bits != "8" and not architecture.startswith("gfx"):
                    found[Case(architecture, int(bits), "bfloat16", tile, 64 if fine else 128, asm=True)] = None
                if kind == "w8":
                    for dtype, group_size in (("bfloat16", 0), ("bfloat16", 128), ("float16", 0)):
                        found[Case(architecture, 8, dtype, tile, group_size, fp8=True)] = None
            for group_size, has_zeros in forms["_fine" if fine else ""]:
                tile = Tile(0, words_triton.DEQUANTIZE_ROWS)
                found[Case(architecture, int(bits), "bfloat16", tile, group_size, has_zeros, dequantize=True)] = None
                if kind == "w8":
                    found[Case(architecture, 8, "bfloat16", tile, group_size, dequantize=True, fp8=True)] = None
        tile = kinds["w4"][0][1]
        for extra in ("one row", "undivided", "reduce"):
            found[Case(architecture, 4, "bfloat16", tile, extra=extra)] = None
        tile = Tile(0, nf4_triton.TILE // words_triton.block_size(4), nf4_triton.OPTIONS["num_warps"])
        for extra in ("nf4", "nf4 nested"):
            for block_size in (64, 32):
                found[Case(architecture, 4, "bfloat16", tile, block_size, dequantize=True, extra=extra)] = None
    return list(found)


def kv_cases() -> list[KvCase]:
    """All formats on all architectures, and of fp8 what else changes the code."""
    found = [KvCase("gfx942", form, form) for form in ("fp8", "int8", "int4", "16bit")]
    for architecture in ("sm_80", "sm_90", "sm_100"):
        for form in ("fp8", "int8", "int4", "16bit"):
            found += [KvCase(architecture, form, form, extra=extra) for extra in ("", "append", "append many")]
        found += [
            KvCase(architecture, "16bit", "fp8"),
            KvCase(architecture, "fp8", "int4"),
            KvCase(architecture, "int8", "int8", 16),
        ]
        found += [KvCase(architecture, "fp8", "fp8", rows, dim) for rows, dim in ((16, 128), (8, 64), (8, 256))]
        found += [KvCase(architecture, "fp8", "fp8", extra=extra) for extra in ("causal", "mask", "ragged", "reduce")]
    return found


def compile_kv_case(case: KvCase) -> Any:
    """Compile as the launcher would for a cache [1, 8, R, D] and its queries."""
    sizes = {"fp8": (torch.int8, 1), "int8": (torch.int8, 1), "int4": (torch.uint8, 2), "16bit": (torch.bfloat16, 1)}
    codes = {}
    for side, form in (("k", case.keys), ("v", case.values)):
        dtype, per_byte = sizes[form]
        shape = (case.slots, case.head_dim // per_byte) if side == "k" else (case.head_dim // per_byte, case.slots)
        codes[side] = torch.empty(1, 8, *shape, dtype=dtype, device="meta")
    pointers = {"ks_ptr": "*bf16", "vs_ptr": "*bf16", "kz_ptr": "*u8", "vz_ptr": "*u8", "length_ptr": "*i64", "start_ptr": "*i64"}
    pointers |= {"q_ptr": "*bf16", "key_ptr": "*bf16", "value_ptr": "*bf16", "mask_ptr": "*u8", "mask_offset_ptr": "*i64"}
    names = {torch.int8: "*i8", torch.uint8: "*u8", torch.int32: "*i32", torch.bfloat16: "*bf16"}
    ones = {"stride_kst", "stride_kzt", "stride_vst", "stride_vzt", "stride_qd", "stride_ml", "stride_kc", "stride_vc"}
    options = {"num_warps": case.tile.num_warps, "num_stages": case.tile.num_stages}
    constants: dict[str, Any]
    if case.extra == "reduce":
        kernel, options = kv_cache_triton.reduce_kernel, {"num_warps": 4}
        constants = {"DV": case.head_dim, "HAS_SINKS": True, "SPLITS": 128, "BLOCK": 32}
        pointers |= {"sinks_ptr": "*bf16", "out_ptr": "*bf16"}
    elif case.extra.startswith("append"):
        kernel, block = kv_cache_triton._append_kernel, 1 if case.extra == "append" else 32
        constants = {"KEYS": case.keys, "VALUES": case.values, "STATIC": False, "WRAP": True}
        constants |= {"D": case.head_dim, "DV": case.head_dim, "BLOCK_T": block}
        options = {"num_warps": 1 if block == 1 else 4}
    else:
        kernel = kv_attention_triton.attention_kernel
        codes["k"] = codes["k"] if case.keys == "16bit" else codes["k"].view(torch.int32)
        codes["v"] = codes["v"].view(torch.int32)
        dims, mask = (case.head_dim, case.head_dim), "bool" if case.extra == "mask" else "none"
        constants = kv_cache_triton.constants(
            case.tile, *dims, case.keys, case.values, torch.bfloat16, codes["k"], codes["v"], mask,
            causal=case.extra == "causal", window=False, softcap=False,
        )  # fmt: skip
    pointers |= {f"{side}_ptr": names[tensor.dtype] for side, tensor in codes.items()}
    constants |= {name: 1 for name in kernel.arg_names if name in ones}
    signature = {}
    for name in kernel.arg_names:
        kind = pointers.get(name, "*fp32") if name.endswith("_ptr") else "fp32" if name in ("scaling", "softcap") else "i32"
        signature[name] = "constexpr" if name in constants else kind
    aligned = {name for name in signature if name.endswith("_ptr") or name.startswith("stride")} - set(constants)
    aligned |= {"R"} & set(signature) if case.extra != "ragged" else set()
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target_of(case.architecture), options=options)


def compile_case(case: Case) -> Any:
    """Compile as the launcher would for sizes that are multiples of 16."""
    kernel = words_triton._dequantize_kernel if case.dequantize else words_triton._wna16_kernel
    kernel = words_triton._reduce_kernel if case.extra == "reduce" else kernel
    undivided = case.extra == "undivided"
    act = "*" + TYPES[case.dtype]
    pointers = {"x_ptr": act, "words_ptr": "*i32", "scale_ptr": act, "zero_ptr": "*i8" if case.has_zeros else act}
    pointers |= {"sums_ptr": "*fp32" if case.has_zeros else act, "bias_ptr": act, "weight_ptr": act}
    pointers |= {"y_ptr": act if undivided or case.extra == "reduce" else "*fp32", "parts_ptr": "*fp32"}
    constants = words_triton.constants(
        case.num_bits, case.group_size, case.tile, has_zeros=case.has_zeros, has_bias=undivided, ragged_k=case.ragged_k,
        fp8=case.fp8, asm=case.asm,
    )  # fmt: skip
    constants |= {"BLOCK": words_triton.REDUCE_BLOCK} | ({"N": 1} if case.extra == "one row" else {})
    options = {"num_warps": case.tile.num_warps, "num_stages": case.tile.num_stages}
    if case.extra.startswith("nf4"):
        kernel, nested = nf4_triton._dequantize_nf4_kernel, case.extra == "nf4 nested"
        pointers = dict.fromkeys((name for name in kernel.arg_names if name.endswith("_ptr")), "*fp32")
        pointers |= {"packed_ptr": "*u8", "absmax_ptr": "*u8" if nested else "*fp32", "weight_ptr": act}
        constants, options = nf4_triton.constants(case.group_size, nested=nested), nf4_triton.OPTIONS
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    multiples = {*pointers, "N", "K", "width", "stride_xm", "stride_wb", "stride_sg", "skip", "num_values", "num_bytes"}
    multiples -= set(kernel.do_not_specialize_on_alignment or ())
    aligned = [name for name in names if name not in constants and name in multiples]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target_of(case.architecture), options=options)


def target_of(architecture: str) -> GPUTarget:
    """What Triton compiles for."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def compile_and_measure(case: Case | KvCase) -> Measured | str | None:
    """What the machine code shows, None where it is not read (AMD), or why there is none."""
    try:
        compiled = compile_kv_case(case) if isinstance(case, KvCase) else compile_case(case)
    except Exception as error:  # of many kinds, from a compiler: any is a failed case
        return f"does not compile: {type(error).__name__}: {str(error)[:300]}"
    if not case.architecture.startswith("gfx"):
        return measure(compiled, case)
    used, limit = compiled.metadata.shared, SHARED_MEMORY[case.architecture]
    return f"{used} bytes of shared memory, at most {limit}" if used > limit else None


# ---------------------------------------------------------------------------------------------------------------- machine code


def measure(compiled: Any, case: Case | KvCase) -> Measured:
    """Read a compiled kernel."""
    resources, code = _disassemble(compiled.asm["cubin"])
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", resources)
    if usage is None:
        raise RuntimeError(f"{case.name}: cuobjdump does not say what the kernel uses: {resources[:200]}")
    registers, stack, local = map(int, usage.groups())
    loop = largest_loop(code) if case.has_loop else instructions_of(code)
    operations = Counter(instruction.partition(".")[0] for instruction in loop)
    mma = next((name for name in MMA if operations[name]), "")
    return Measured(
        registers, compiled.metadata.shared, stack + local, round(len(loop) / case.decoded, 3), mma, _width(loop, "LDG"),
        round(operations["STS"] / case.decoded, 3), _width(loop, "STG"),
    )  # fmt: skip


def _width(instructions: list[str], name: str) -> int:
    """Bits of the widest instruction whose name starts so."""
    found = [instruction.split()[0] for instruction in instructions if instruction.startswith(name)]
    return max((int(width[1]) if (width := re.search(r"\.(64|128|256)\b", one)) else 32 for one in found), default=0)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        return resources, _output(tools / "nvdisasm", "-c", file.name) or _output(tools / "cuobjdump", "-sass", file.name)


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False).stdout


def instructions_of(code: str) -> list[str]:
    """Instructions in order, without predicates and padding."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*)", code, re.MULTILINE)
    return [instruction.strip() for instruction in found if not instruction.startswith("NOP")]


def largest_loop(code: str) -> list[str]:
    """Instructions of the longest stretch that a branch at its end goes back over."""
    labels: dict[str, int] = {}
    best, passed = "", 0
    for line in code.splitlines(keepends=True):
        passed += len(line)
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = passed
        elif (back := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) and back[1] in labels:
            best = max(best, code[labels[back[1]] : passed], key=len)
    return instructions_of(best)


# ----------------------------------------------------------------------------------------------------------------------- check


def problems(case: Case | KvCase, found: Measured, recorded: dict[str, Any] | None) -> list[str]:
    """What is wrong with a compiled kernel."""
    threads = 32 * case.tile.num_warps
    rules = [
        (found.spilled <= MOST_SPILLED, f"spills {found.spilled} bytes"),
        (found.registers <= 255 and found.registers * threads <= 65536, f"{found.registers} registers x {threads} threads"),
        (found.shared_memory <= SHARED_MEMORY[case.architecture], f"{found.shared_memory} bytes of shared memory"),
        (found.load_bits >= 128, f"loads {found.load_bits} bits at a time"),
    ]
    if case.extra == "reduce" or (isinstance(case, KvCase) and not case.has_loop):
        return [f"{case.name}: {text}" for good, text in rules[:3] if not good]
    if case.has_loop:
        stored = f"stores {found.shared_stores} values per weight to shared memory"
        rules += [(found.mma != "", "no tensor core instruction in its loop"), (found.shared_stores < 0.2, stored)]
    if case.extra.startswith("nf4"):
        text = f"{found.instructions} instructions per value, at most {MOST_INSTRUCTIONS_NF4} allowed"
        rules += [(found.store_bits >= 128, f"stores {found.store_bits} bits at a time")]
        rules += [(found.instructions <= MOST_INSTRUCTIONS_NF4, text)]
    if recorded is None:
        rules.append((False, "not in the record: run with --record"))
    else:
        limit = SLACK * recorded["instructions"]
        rules.append((found.instructions <= limit, f"{found.instructions} instructions per weight, {limit:.2f} allowed"))
    if isinstance(case, KvCase):
        plain = case.rows <= 8 and case.head_dim == 128 and case.extra == "" and {case.keys, case.values} <= {"fp8", "int8"}
        text = f"{found.instructions} instructions per key or value, at most {MOST_INSTRUCTIONS_KV} allowed"
        rules.append((not plain or found.instructions <= MOST_INSTRUCTIONS_KV, text))
    elif case.tile.block_m in (8, 16) and case.group_size == 128 and not case.has_zeros and not case.ragged_k:
        most = MOST_INSTRUCTIONS[case.architecture] if case.num_bits <= 4 else MOST_INSTRUCTIONS_8_BITS
        rules.append((found.instructions <= most, f"{found.instructions} instructions per weight, at most {most} allowed"))
    return [f"{case.name}: {text}" for good, text in rules if not good]


def release() -> str:
    """Triton's, as in the record: ``3.9``."""
    return ".".join(triton.__version__.split(".")[:2])


def main() -> None:
    """Compile, check or record, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write what is found to the record")
    parser.add_argument("--quiet", action="store_true", help="print only what is wrong, and how many were compiled")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--only", default="", help="cases whose name matches this pattern")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known = record.setdefault(release(), {})
    wrong: list[str] = []
    chosen = [case for case in (*cases(), *kv_cases()) if re.search(arguments.only, case.name)]
    print(f"triton {triton.__version__}: {len(chosen)} kernels", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as pool:  # a compiler that aborts ends the run
        for case, found in zip(chosen, pool.map(compile_and_measure, chosen), strict=True):
            if isinstance(found, str):
                wrong.append(f"{case.name}: {found}")
                continue
            text = "compiles"
            if found is not None:
                if arguments.record:
                    known[case.name] = asdict(found)
                wrong += problems(case, found, known.get(case.name))
                text = " ".join(f"{key}={value}" for key, value in asdict(found).items())
            if not arguments.quiet:
                print(f"{case.name}: {text}", flush=True)
    if arguments.record:
        names = {case.name for case in (*cases(), *kv_cases())}
        record[release()] = {name: figures for name, figures in known.items() if name in names}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
