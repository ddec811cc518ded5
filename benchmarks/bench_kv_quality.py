"""What a quantized KV cache costs in quality: SmolLM2-135M (or another model) with FP8KVCache against the plain cache.

``kl``: KL divergence on text of which every token but the first is decoded from the stored cache (no prompt that attends to
itself in 16 bits), in float32, with the change of the top token, and by position: an error that grew with the context would
show.
``needle``: a number hidden in a long text, to be found by greedy decoding after a prompt of up to 4,000 tokens.
``python benchmarks/bench_kv_quality.py --save``
"""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import torch
from common import console, machine, print_table, save_results
from torch import Tensor
from transformers import DynamicCache

from torchq import FP8KVCache
from torchq.evaluation.divergence import cached_log_probs, english_text, token_windows
from torchq.testing import smollm2

KINDS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "fp8, rotated keys": {"rotate_keys": True},
    "int8": {"dtype": "int8"},
    "int8, keys not rotated": {"dtype": "int8", "rotate_keys": False},
    "int4": {"dtype": "int4"},
    "int4, keys not rotated": {"dtype": "int4", "rotate_keys": False},
    "keys int8, values fp8": {"key_dtype": "int8", "value_dtype": "fp8"},
    "keys 16 bits, values fp8": {"key_dtype": "16bit", "value_dtype": "fp8"},
    "keys 16 bits, values int8": {"key_dtype": "16bit", "value_dtype": "int8"},
    "keys int8, values int4": {"key_dtype": "int8", "value_dtype": "int4"},
}
CHUNK = 256


@torch.no_grad()
def divergence(model: Any, windows: list[Tensor], buckets: list[int]) -> dict[str, Any]:
    """KL to the plain cache by kind: mean, standard error (over positions), by position bucket, share of top tokens changed."""
    rows: dict[str, Any] = {name: {"kl": [], "flips": []} for name in KINDS}
    for window in windows:
        ids = window[None]
        base = cached_log_probs(model, ids, DynamicCache(config=model.config), CHUNK)
        for name, options in KINDS.items():
            other = cached_log_probs(model, ids, FP8KVCache(model.config, **options), CHUNK)
            rows[name]["kl"].append((base.exp() * (base - other)).sum(-1))
            rows[name]["flips"].append((base.argmax(-1) != other.argmax(-1)).float())
            del other
    results = {}
    for name, found in rows.items():
        kl = torch.stack(found["kl"])
        by_position = [kl[:, a:b].mean().item() for a, b in zip([0, *buckets[:-1]], buckets, strict=True)]
        flips = torch.stack(found["flips"]).mean().item()
        error = kl.std().item() / math.sqrt(kl.numel())
        results[name] = {"kl": kl.mean().item(), "standard_error": error, "flips": flips, "by_position": by_position}
        console.print(
            f"{name}: {kl.mean():.5f} +- {error:.5f}, flips {flips:.2%}, by position {[round(x, 5) for x in by_position]}"
        )
    return results


def needles(model: Any, tokenizer: Any, lengths: list[int], depths: list[float]) -> list[dict[str, Any]]:
    """Prompts with a number in them, ids [1, T], and the number."""
    filler = tokenizer(english_text(), return_tensors="pt").input_ids[0]
    prompts = []
    for length in lengths:
        for i, depth in enumerate(depths):
            number = str(48213 + 7919 * i)
            needle = tokenizer(f"\n\nThe secret number is {number}. Remember it.\n\n", add_special_tokens=False).input_ids
            question = tokenizer("\n\nWhat is the secret number? The secret number is", add_special_tokens=False).input_ids
            room = length - len(needle) - len(question)
            at = int(depth * room)
            start = 1000 * i
            hay = filler[start : start + room].tolist()
            ids = torch.tensor([hay[:at] + needle + hay[at:] + question])
            prompts.append({"ids": ids, "number": number, "length": length, "depth": depth})
    return prompts


@torch.no_grad()
def find_needles(model: Any, tokenizer: Any, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """How many numbers are found, and the mean log probability of the right one, by kind of cache.

    A prompt attends to itself in 16 bits whatever the cache, so it is computed once and then stored in each of them.
    """
    results: dict[str, Any] = {name: {"found": 0, "of": len(prompts), "log_probability": 0.0} for name in ["plain", *KINDS]}
    for prompt in prompts:
        base = DynamicCache(config=model.config)
        last = model(prompt["ids"], past_key_values=base, use_cache=True, logits_to_keep=1).logits[:, -1]
        target = tokenizer(" " + prompt["number"], add_special_tokens=False).input_ids
        for name, result in results.items():
            cache = copy.deepcopy(base) if name == "plain" else FP8KVCache(model.config, **KINDS[name])
            if name != "plain":
                for layer, full in zip(cache.layers, base.layers, strict=True):
                    layer.update(full.keys, full.values)
            logits, right = last, True
            for token in target:  # each later step reads what is stored
                result["log_probability"] += logits.float().log_softmax(-1)[0, token].item() / len(prompts)
                right = right and int(logits.argmax(-1)) == token
                logits = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[:, -1]
            result["found"] += right
        console.print(f"{prompt['length']} tokens, at {prompt['depth']}: {[r['found'] for r in results.values()]}")
    rows = [[name, f"{r['found']} of {r['of']}", f"{r['log_probability']:.3f}"] for name, r in results.items()]
    print_table("a number hidden in a text", ["cache", "found", "log probability"], rows)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of another model")
    parser.add_argument("--parts", nargs="+", default=["kl", "long", "needle"], choices=["kl", "long", "needle"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--name", default="kv_quality", help="of the file of results")
    parser.add_argument("--windows", type=int, default=2, help="of 1,000 tokens")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long text")
    parser.add_argument("--attention", default="torchq", help="attn_implementation")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1000, 4000])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    for name in KINDS.keys() - set(args.kinds):
        del KINDS[name]
    if args.model:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    else:
        model, tokenizer = smollm2()
    results: dict[str, Any] = {}
    model = model.eval().float()
    model.set_attn_implementation(args.attention)
    if "kl" in args.parts:
        windows = token_windows(tokenizer, english_text(), num_windows=args.windows, length=1000)
        results["kl"] = divergence(model, windows, [10, 100, 500, 1000])
        rows = [[name, f"{r['kl']:.5f}", f"{r['standard_error']:.5f}", f"{r['flips']:.2%}"] for name, r in results["kl"].items()]
        print_table(f"{args.windows * 1000} tokens", ["cache", "mean KL", "+-", "top token changed"], rows)
    if "long" in args.parts:
        window = token_windows(tokenizer, english_text(), num_windows=1, length=args.long, start=1)
        buckets = [args.long // 8, args.long // 4, args.long // 2, args.long]
        results["long"] = divergence(model, window, buckets) | {"buckets": buckets}
    if "needle" in args.parts:
        prompts = needles(model, tokenizer, args.lengths, [0.1, 0.3, 0.5, 0.7, 0.9])
        results["needle"] = find_needles(model, tokenizer, prompts)
    if args.save:
        save_results(
            args.name,
            {"settings": vars(args) | {"model": bool(args.model)}, "machine_now": machine(), "results": results},
        )


if __name__ == "__main__":
    main()
