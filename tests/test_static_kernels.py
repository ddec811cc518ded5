"""Reading machine code, and what of it is wrong; a few kernels are compiled here, all by `make static-kernels`."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def static() -> ModuleType:
    spec = importlib.util.spec_from_file_location("static_kernels", BENCHMARKS / "static_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["static_kernels"] = module
    spec.loader.exec_module(module)
    return module


CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 LDG.E R4, [R2.64] ;
        /*0020*/                   BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], [R2.64] ;
        /*0040*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0050*/                   NOP ;
        /*0060*/               @P1 BRA P2, `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
        /*0090*/                   NOP;
"""


def test_the_largest_loop_is_found(static: ModuleType) -> None:
    loop = static.largest_loop(CODE)
    assert static._width(loop, "LDG") == 128 and static._width(static.instructions_of(CODE)[:2], "LDG") == 32
    assert static._width(loop, "STG") == 0
    assert [instruction.partition(" ")[0] for instruction in loop] == ["LDGSTS.E.BYPASS.128", "HMMA.16816.F32", "BRA"]
    assert len(static.instructions_of(CODE)) == 8
    assert static.largest_loop("no loop") == []


def test_each_rule_can_fail(static: ModuleType) -> None:
    case = static.Case("sm_90", 4, "bfloat16", static.Tile(16, 128))
    good = static.Measured(120, 40_000, 0, 3.1, "HGMMA", 128, 0.01)
    record = {"instructions": 3.0}
    assert static.problems(case, good, record) == []
    changes: list[tuple[dict[str, Any], str]] = [
        ({"spilled": 24}, "spills 24 bytes"),
        ({"registers": 256}, "256 registers"),
        ({"shared_memory": 240 << 10}, "bytes of shared memory"),
        ({"mma": ""}, "no tensor core instruction"),
        ({"load_bits": 64}, "loads 64 bits"),
        ({"shared_stores": 0.5}, "to shared memory"),
        ({"instructions": 3.2}, r"3.2 instructions per weight, 3.15 allowed"),
    ]
    for change, message in changes:
        (found,) = static.problems(case, dataclasses.replace(good, **change), record)
        assert message in found and found.startswith("sm_90 w4 bfloat16 16x128")
    assert "not in the record" in static.problems(case, good, None)[0]
    slow = dataclasses.replace(good, instructions=3.6)
    assert "at most 3.2 allowed" in static.problems(case, slow, {"instructions": 3.6})[0]
    nf4 = dataclasses.replace(case, tile=static.Tile(0, 64), dequantize=True, extra="nf4 nested")
    assert static.problems(nf4, dataclasses.replace(good, mma="", store_bits=128), record) == []
    assert "stores 64 bits" in static.problems(nf4, dataclasses.replace(good, store_bits=64), record)[0]
    slow = dataclasses.replace(good, store_bits=128, instructions=10.6)
    assert "at most 10.5 allowed" in static.problems(nf4, slow, {"instructions": 10.6})[0]
    kv = static.KvCase("sm_80", "int8", "fp8")
    assert static.problems(kv, good, record) == []
    slow = dataclasses.replace(good, instructions=3.21)
    assert "at most 3.2 allowed" in static.problems(kv, slow, {"instructions": 3.2})[0]
    assert static.problems(dataclasses.replace(kv, rows=16), slow, {"instructions": 3.2}) == []
    assert "no tensor core" in static.problems(kv, dataclasses.replace(good, mma=""), record)[0]
    append = dataclasses.replace(kv, extra="append")
    assert static.problems(append, dataclasses.replace(good, mma="", load_bits=16, instructions=80), None) == []
    assert "spills" in static.problems(append, dataclasses.replace(good, spilled=24), None)[0]
    dequantize = dataclasses.replace(case, dequantize=True)
    assert static.problems(dequantize, dataclasses.replace(good, mma="", shared_stores=1.0), record) == []


def test_every_entry_of_the_table_is_a_case(static: ModuleType) -> None:
    cases = static.cases()
    assert len({case.name for case in cases}) == len(cases)
    for architecture, kinds in static.TABLE.items():
        for kind, rows in kinds.items():
            bits, fine = int(kind[1]), kind.endswith("_fine")
            for _, tile in rows:
                mine = [c for c in cases if (c.architecture, c.num_bits, c.tile) == (architecture, bits, tile)]
                assert {static.words_triton.kind_of(bits, c.group_size or 1 << 20, c.has_zeros) for c in mine} >= {kind}
                assert any(c.ragged_k for c in mine) and (fine or {c.dtype for c in mine} == {"float16", "bfloat16"})


def test_every_format_of_the_kv_cache_is_a_case(static: ModuleType) -> None:
    cases = static.kv_cases()
    assert len({case.name for case in cases}) == len(cases)
    for architecture in ("sm_80", "sm_90", "sm_100"):
        mine = [case for case in cases if case.architecture == architecture]
        assert {case.keys for case in mine if case.has_loop} == {"fp8", "int8", "int4", "16bit"}
        assert {"", "append", "append many", "reduce"} <= {case.extra for case in mine}


def test_some_kernels_compile_to_what_is_recorded(static: ModuleType) -> None:
    if static.release() not in json.loads(static.RECORD.read_text()):
        pytest.skip(f"triton {static.release()} is not in the record")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    some = ["sm_90 w4 bfloat16 (8x256|64x128) .* g128", "sm_80 w8 .* 16x256 .* channel", "sm_100 w4 .* 32x64 .* g32 asym"]
    some += ["sm_90 w4 .* 16x256 .* g128 asm", "sm_80 w8 bfloat16 16x256 .* channel fp8", "sm_90 .* g64 dequantize nf4 nested"]
    some += ["sm_90 kv fp8 fp8 8 rows D=128( append)?", "sm_80 kv int8 int8 8 rows D=128"]
    only = f"^({'|'.join(some)}|.*w4 .* g64 dequantize|.*(one row|undivided|reduce))$"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "static_kernels.py"), "--jobs", "1", "--only", only],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 1 + 14
