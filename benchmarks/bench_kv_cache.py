"""Decoding with a quantized KV cache on a CPU: attention alone, at the shapes of SmolLM2-135M and Llama-3-8B, and bytes.

One step: store one token, then attend to all. Contenders: transformers' DynamicCache in bfloat16 with SDPA as transformers calls
it (``enable_gqa``) and as it is fastest (a group's queries as rows of one head), FP8KVCache as stored (``torchq`` attention), and
FP8KVCache that returns 16 bits to SDPA; ``attention only`` leaves storing out.
As many layers as exceed the last-level cache take turns, as in a model. Results are checked before they are timed.
``python benchmarks/bench_kv_cache.py --save``; with ``OMP_NUM_THREADS=1`` it is processor time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import base_parser, machine_limits, print_table, save_results, time_side_by_side
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torchq import FP8KVCache
from torchq.integrations.attention import torchq_attention

SHAPES = {"smollm2": (9, 3, 64), "llama8b": (32, 8, 128)}  # query heads, key/value heads, head_dim
KINDS = {
    "fp8": {},
    "int8": {"dtype": "int8"},
    "int8 keys, fp8 values": {"key_dtype": "int8", "value_dtype": "fp8"},
    "int4": {"dtype": "int4"},
}
PLAIN, GROUPED = "DynamicCache, bfloat16", "DynamicCache, grouped"
CACHES_BYTES = 160 << 20


def main() -> None:
    parser = base_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape, tokens in itertools.product(args.shapes, args.tokens):
        rows += measure(shape, tokens, args.seconds)
        show = [r for r in rows if r["shape"] == shape and r["tokens"] == tokens]
        print_table(
            f"{shape}, {tokens} tokens: microseconds per layer and step (times faster than DynamicCache)",
            ["cache", "store and attend", "", "attention only", "", "bytes of bfloat16's"],
            [[r["cache"], *speed(r, show[0], "step"), *speed(r, show[0], "attention"), f"{r['bytes_share']:.3f}"] for r in show],
        )
    if args.save:
        save_results("kv_cache", {"limits": machine_limits(), "results": rows})


def speed(row: dict[str, Any], base: dict[str, Any], what: str) -> list[str]:
    if what not in row:
        return ["", ""]
    return [f"{row[what]['median'] * 1e6:.0f}", f"{base[what]['median'] / row[what]['median']:.2f}x"]


@torch.no_grad()
def measure(shape: str, tokens: int, seconds: float) -> list[dict[str, Any]]:
    heads, kv_heads, dim = SHAPES[shape]
    num_layers = max(2, CACHES_BYTES // (4 * tokens * kv_heads * dim))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": num_layers, "head_dim": dim}
    sizes["hidden_size"] = heads * dim
    module = nn.Module().eval()
    module.num_key_value_groups, module.is_causal = heads // kv_heads, True
    keys, values = (torch.randn(1, kv_heads, tokens, dim).bfloat16() for _ in range(2))
    query = torch.randn(1, heads, 1, dim).bfloat16()
    new = (keys[:, :, :1].clone(), values[:, :, :1].clone())
    layers: dict[str, list[Any]] = {name: [DynamicLayer() for _ in range(num_layers)] for name in (PLAIN, GROUPED)}
    for name, options in KINDS.items():
        for attention in ("torchq", "sdpa"):
            if attention == "sdpa" and name != "fp8":
                continue
            cache = FP8KVCache(LlamaConfig(**sizes, attn_implementation=attention), **options)
            layers[name + ", returned in 16 bits" * (attention == "sdpa")] = cache.layers
    for group in layers.values():
        for layer in group:
            layer.update(keys[:, :, :-1], values[:, :, :-1])
    steps = {name: _step(name, module, query, new, group) for name, group in layers.items()}
    expected = steps[PLAIN]().float()
    for name, step in steps.items():
        error = ((step().float() - expected).norm() / expected.norm()).item()
        assert error < (0.15 if "int4" in name else 0.05), f"{name} is wrong by {error:.1%}"
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    timings = time_side_by_side(steps, seconds=seconds * len(steps), clock=clock)
    attends = {name: _attend(name, module, query, new, group) for name, group in layers.items() if "returned" not in name}
    alone = time_side_by_side(attends, seconds=seconds * len(attends), clock=clock)
    base = 4 * tokens * kv_heads * dim
    return [
        {
            "shape": shape,
            "tokens": tokens,
            "layers": num_layers,
            "cache": name,
            "step": vars(timings[name]),
            "bytes_share": getattr(layers[name][0], "nbytes", base) / base,
        }
        | ({"attention": vars(alone[name])} if name in alone else {})
        for name in steps
    ]


def grouped(module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: None) -> tuple[Tensor]:
    """SDPA of one token, with the queries of a group as rows of one head."""
    rows = query.view(query.shape[0], keys.shape[1], -1, query.shape[-1])
    return (F.scaled_dot_product_attention(rows, keys, values).view(query.shape).transpose(1, 2).contiguous(),)


def _step(name: str, module: nn.Module, query: Tensor, new: tuple[Tensor, Tensor], layers: list[Any]) -> Callable[[], Tensor]:
    """One token stored in the next layer, attended to, and dropped again."""
    turns = itertools.cycle(layers)
    attend = (
        grouped if name == GROUPED else sdpa_attention_forward if "bfloat16" in name or "16 bits" in name else torchq_attention
    )

    def step() -> Tensor:
        layer = next(turns)
        keys, values = layer.update(*new)
        out = attend(module, query, keys, values, None)[0]
        layer.crop(-1)
        return out

    return step


def _attend(name: str, module: nn.Module, query: Tensor, new: tuple[Tensor, Tensor], layers: list[Any]) -> Callable[[], Tensor]:
    """Attention to what the next layer holds, with nothing stored."""
    states = []
    for layer in layers:
        layer.update(*new)
        states.append((layer.keys, layer.values) if isinstance(layer, DynamicLayer) else layer)
    turns = itertools.cycle(states)

    def attend() -> Tensor:
        state = next(turns)
        if isinstance(state, tuple):
            return (grouped if name == GROUPED else sdpa_attention_forward)(module, query, *state, None)[0]
        return state.attend(query, None, query.shape[-1] ** -0.5).transpose(1, 2).contiguous()

    return attend


if __name__ == "__main__":
    main()
