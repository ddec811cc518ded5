"""The Triton kernel of GPTQ's column loop against the loop of PyTorch calls; without a GPU, in Triton's interpreter."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from torchq import GPTQ, QuantArgs, numerics
from torchq.algorithms import gptq as algorithm
from torchq.kernels import gptq, gptq_triton
from torchq.scheme import resolve_scheme

W4 = QuantArgs(4)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def block(columns: int, n: int, zeros: bool, num_groups: int = 3) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(columns + n)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    W = randn(columns, n)
    V = W + 0.1 * randn(columns, n)
    big = randn(columns + 5, columns + 9) * 0.3
    U = big[2 : 2 + columns, 4 : 4 + columns]  # a view into larger factors; below the diagonal nothing may be read
    scales = (0.2 + randn(num_groups, n).abs() * 0.1) * torch.where(randn(num_groups, n) > 0, 1, -1)
    z = torch.randint(-7, 8, (num_groups, n), generator=generator).float() if zeros else None
    groups = torch.randint(0, num_groups, (columns,), generator=generator)
    return tuple(x.to(DEVICE) if isinstance(x, Tensor) and x is not groups else x for x in (V, W, U, scales, z, groups))


def both(arguments: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
    results = []
    for function in (gptq.reference, gptq_triton.launch):
        codes, E = torch.full_like(arguments[0], 77), torch.full_like(arguments[0], 77)
        function(gptq.Block(arguments[0].clone(), *arguments[1:], W4, codes, E))
        results.append((codes, E))
    return results


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("columns", "n"), [(1, 1), (16, 33), (128, 40), (40, 7), (128, 64)])
def test_the_kernel_is_the_loop(columns: int, n: int, zeros: bool) -> None:
    (codes, E), (kernel_codes, kernel_E) = both(block(columns, n, zeros))
    different = (codes != kernel_codes).any(0)  # a value between two codes may go either way, and with it what follows
    assert different.float().mean() < 0.02
    same = ~different
    assert torch.allclose(E[:, same], kernel_E[:, same], atol=1e-4)
    assert codes.unique().numel() <= 16 and codes.min() >= -8 and codes.max() <= 7


def test_a_wrong_factor_is_seen() -> None:
    arguments = block(64, 32, False)
    (codes, _), (kernel_codes, _) = both(arguments)
    assert torch.equal(codes, kernel_codes)
    arguments[2][3, 4] += 1.0
    assert not torch.equal(both(arguments)[1][0], codes)


def test_halves_go_to_the_even_code() -> None:
    W = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5, 7.5, 100.0, -100.0]], device=DEVICE)
    U, scales = torch.ones(1, 1, device=DEVICE), torch.ones(1, 10, device=DEVICE)
    for codes, _ in both((W.clone(), W, U, scales, None, torch.zeros(1, dtype=torch.int64))):
        assert codes.flatten().tolist() == [0, 2, 2, 0, -2, -2, 6, 7, 7, -8]


def test_a_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through round_columns, with several blocks and groups out of order."""
    scheme, k = resolve_scheme("W4A16", 32), 288
    x = torch.randn(500, k, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, k)
    W = torch.randn(20, k, generator=torch.Generator().manual_seed(1), device="cpu").to(DEVICE)
    factor = algorithm.factorize((x.t() @ x).to(DEVICE), 0.01)
    scale, _ = numerics.choose_qparams(W, scheme.weights)
    results = []
    for function in (gptq.reference, gptq_triton.launch):
        monkeypatch.setattr(algorithm, "rounding_of", lambda device, function=function: function)
        results.append(algorithm.round_columns(W, factor.U, factor.order, scale, None, scheme))
    assert (results[0] != results[1]).float().mean() < 5e-3
    assert GPTQ().actorder == "static" and not torch.equal(factor.order, torch.arange(k, device=DEVICE))


def test_it_compiles_for_gpus_without_spilling() -> None:
    """Ahead of time, in a process without the interpreter: registers and local memory as cuobjdump tells them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    for line in lines:
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", line))
        assert int(usage["REG"]) <= 128 and usage["STACK"] == usage["LOCAL"] == "0", line


COMPILE = """
import subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torchq.kernels.gptq_triton import BLOCK_J, _round_kernel as kernel

constants = {"QUANT_MIN": -8.0, "QUANT_MAX": 7.0, "BLOCK_J": BLOCK_J, "BLOCK_N": 32}
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for zeros in (False, True):
    constants["HAS_ZEROS"] = zeros
    kinds = {True: "*fp32", False: "i32"}
    signature = {name: "constexpr" if name in constants else kinds[name.endswith("_ptr")] for name in kernel.arg_names}
    signature["group_ptr"] = "*i32"
    for capability in (80, 90, 100):
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
        print(next(line for line in usage.splitlines() if "REG:" in line).strip())
"""
