"""A training step through one NF4 layer (forward, and the gradient of its input) against nn.Linear in bfloat16.

Beside bitsandbytes' Linear4bit where that is installed. Everything runs side by side. Refuses to time a layer whose result is
wrong. ``python benchmarks/bench_nf4_linear.py --save``

``--processor-time`` counts one thread's processor time, which can be compared on a machine that does other work too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

import torch
from common import base_parser, console, print_table, save_results, time_side_by_side
from torch import Tensor, nn

from torchq import quantize_

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (576, 1536)]  # (out_features, in_features): Llama-3-8B, SmolLM2-135M
TOKENS = [512, 1024, 2048]


def main() -> None:
    """Time a step over shapes and numbers of tokens."""
    parser = base_parser(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--processor-time", action="store_true", help="of one thread, on a CPU")
    arguments = parser.parse_args()
    device, results, rows = arguments.device, [], []
    if arguments.processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if arguments.processor_time else time.perf_counter
    for n, k in SHAPES:
        layers = _layers(n, k, device)
        for m in arguments.tokens:
            x = torch.randn(m, k, device=device).bfloat16().requires_grad_()
            grad_y = torch.randn(m, n, device=device).bfloat16()
            _check(layers, x, grad_y)
            forward = {name: _forward(layer, x) for name, layer in layers.items()}
            step = {name: _step(layer, x, grad_y) for name, layer in layers.items()}
            row = [f"{n} x {k}", str(m)]
            for part, functions in (("forward", forward), ("forward and backward", step)):
                timings = time_side_by_side(functions, seconds=arguments.seconds, device=device, clock=clock)
                base = timings["nn.Linear"].median
                for name, timing in timings.items():
                    results.append(
                        {"out_features": n, "in_features": k, "tokens": m, "part": part, "name": name}
                        | {"median_s": timing.median, "p10_s": timing.low, "p90_s": timing.high, "rounds": timing.rounds}
                        | {"speedup": base / timing.median}
                    )
                    row.append(
                        f"{timing.median * 1e3:.2f}" + ("" if timing.median == base else f" ({base / timing.median:.2f}x)")
                    )
            rows.append(row)
    columns = ["shape", "tokens", *(f"{name} {part}" for part in ("forward", "step") for name in layers)]
    print_table("NF4 in blocks of 64, double quantization, bfloat16, milliseconds", columns, rows)
    if arguments.save:
        peers = {"bitsandbytes": version("bitsandbytes")} if "bitsandbytes" in layers else {}
        save_results("nf4_linear", {"clock": clock.__name__, "peers": peers, "results": results}, device)


def _layers(n: int, k: int, device: str) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(linear.weight, std=0.02)
    linear.requires_grad_(False)
    layers: dict[str, nn.Module] = {"nn.Linear": linear}
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
    model[0].load_state_dict(linear.state_dict())
    quantize_(model, "NF4", progress=False)
    layers["torchq"] = model[0]
    if find_spec("bitsandbytes") is None:
        console.print("bitsandbytes is not installed: without it")
    else:
        import bitsandbytes as bnb

        layers["bitsandbytes"] = peer = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        peer.weight = bnb.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type="nf4")
    return {name: layer.to(device).train() for name, layer in layers.items()}


def _forward(layer: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: layer(x)


def _step(layer: nn.Module, x: Tensor, grad_y: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.autograd.grad(layer(x), x, grad_y)[0]


def _check(layers: dict[str, nn.Module], x: Tensor, grad_y: Tensor) -> None:
    """Compare with what the 16-bit layer gives: NF4 has about 9 % of error, its two implementations next to none between them."""
    expected = {name: (layer(x).float(), _step(layer, x, grad_y)().float()) for name, layer in layers.items()}
    for name, pair in expected.items():
        for found, exact, same in zip(pair, expected["nn.Linear"], expected["torchq"], strict=True):
            error, difference = (((found - other).norm() / other.norm()).item() for other in (exact, same))
            if not error < 0.12 or (name == "bitsandbytes" and not difference < 0.01):
                raise SystemExit(f"{name}: relative error {error:.4f} at {x.shape[0]} tokens; nothing is timed")


if __name__ == "__main__":
    main()
