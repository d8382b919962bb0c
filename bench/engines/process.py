"""One engine in a process of its own, told what to do by lines of JSON.

Runs in the engines' environment: `python -m kvcast.bench.engines.process OPTIONS`, a JSON object of
vLLM's engine arguments. Each line on the standard input is {"prompts": [[token, …], …],
"max_tokens": N}, with "handover" and "salt" where they are to be said; each is answered by a line
on what was the standard output: the tokens and their log-probabilities, how many of the prompt's
tokens were cached, and how long it took. {"stats": true} asks for the connector's totals;
{"hashes": [token, …]} for the prompt's block hashes, in hexadecimal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 8,
    "block_size": 32,
    "max_model_len": 4096,
    "dtype": "float32",
    "disable_log_stats": False,
}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    os.environ |= ENVIRONMENT
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    _hide_llvmlite()
    options = DEFAULTS | _shared_accelerator() | json.loads(sys.argv[1])
    if transfer := options.pop("kv_transfer_config", None):
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = LLM(**options)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("stats"):
            print(json.dumps(_stats(engine)), file=out, flush=True)
            continue
        if "hashes" in order:
            print(json.dumps(_hashes(order["hashes"], options["block_size"])), file=out, flush=True)
            continue
        began = time.monotonic()
        answers = engine.generate(
            [
                {"prompt_token_ids": prompt}
                | ({"cache_salt": order["salt"]} if order.get("salt") else {})
                for prompt in order["prompts"]
            ],
            SamplingParams(
                max_tokens=order.get("max_tokens", 8),
                temperature=0.0,
                logprobs=3,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"kvcast": order.get("handover", {})}},
            ),
            use_tqdm=False,
        )
        print(
            json.dumps(
                {
                    "seconds": time.monotonic() - began,
                    "answers": [_answer(answer) for answer in answers],
                }
            ),
            file=out,
            flush=True,
        )


def _shared_accelerator() -> dict[str, Any]:
    """What lets several engines be on one accelerator: vLLM's default is to take nearly all of its
    memory, or not to start."""
    import torch

    return {"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}


def _hide_llvmlite() -> None:
    """vLLM's search for kernels asks every object of every module for its attributes, and llvmlite
    (some connectors bring numba) has one that answers with anything."""
    from vllm.triton_utils import dispatcher

    search = dispatcher._rebind_kernels

    def searched(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if "llvmlite" in name}
        try:
            search(overrides)
        finally:
            sys.modules |= hidden

    dispatcher._rebind_kernels = searched


def _answer(answer: Any) -> dict[str, Any]:
    [best] = answer.outputs
    return {
        "tokens": list(best.token_ids),
        "logprobs": [
            {str(token): one.logprob for token, one in sorted(step.items())}
            for step in best.logprobs
        ],
        "cached": answer.num_cached_tokens,
        "finish": best.finish_reason,
    }


def _hashes(tokens: list[int], block_tokens: int) -> dict[str, list[str]]:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    parent, hashes = None, []
    for begin in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        parent = hash_block_tokens(
            get_hash_fn_by_name("sha256"), parent, tokens[begin : begin + block_tokens]
        )
        hashes.append(parent.hex())
    return {"hashes": hashes}


def _stats(engine: Any) -> dict[str, float]:
    """The connector's counts, from vLLM's own metrics."""
    return {
        metric.name
        + "".join(
            f"|{key}={value}"
            for key, value in sorted(metric.labels.items())
            if key not in ("model_name", "engine")
        ): metric.value
        for metric in engine.get_metrics()
        if "kvcast" in metric.name and hasattr(metric, "value")
    }


if __name__ == "__main__":
    main()
