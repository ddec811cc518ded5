"""Runs in vLLM's interpreter, for the fixture ``serve``: a JSON request per line of stdin, a JSON answer per line of stdout."""

import json
import os
import sys
import traceback

answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # vLLM and the libraries below it print to stdout as well

import torch  # noqa: E402
import vllm._custom_ops  # noqa: E402, F401  # registers torch.ops._C
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402


def generate(folder, prompts, max_tokens, num_logprobs, adapter):
    """Load a checkpoint in its own dtype and continue the prompts greedily, past the end-of-text token.

    With the folder of an adapter: once without and once with it, one after the other in the answer.
    """
    llm = None
    lora = {} if adapter is None else {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1}
    try:
        llm = LLM(
            model=folder,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=len(prompts),
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=256 << 20,
            enable_prefix_caching=False,
            seed=0,
            **lora,
        )
        params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=num_logprobs, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        if adapter is not None:
            outputs += llm.generate(prompts, params, use_tqdm=False, lora_request=LoRARequest("adapter", 1, adapter))
        return [completion(output, num_logprobs) for output in outputs]
    finally:
        llm = None
        cleanup_dist_env_and_memory()


def completion(output, num_logprobs):
    """What one prompt gave; ``logprobs`` is a list per position of [token, logprob], the likeliest token first."""
    by_rank = [sorted(position.items(), key=lambda item: item[1].rank) for position in output.outputs[0].logprobs]
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(output.outputs[0].token_ids),
        "text": output.outputs[0].text,
        "logprobs": [[(token, entry.logprob) for token, entry in position[:num_logprobs]] for position in by_rank],
    }


print(json.dumps({"has_int4_kernel": hasattr(torch.ops._C, "cpu_gemm_wna16")}), file=answers)
for line in sys.stdin:
    try:
        answer = {"completions": generate(**json.loads(line))}
    except Exception:  # whatever it is goes back to the test that asked, which fails with it
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers)
