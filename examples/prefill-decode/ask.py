#!/usr/bin/env python3
"""Prefill and decode apart: one engine computes the prompt, others go on from its blocks.

    ask.py --model NAME --prefill http://node-1:8000 \
        --decode http://node-2:8000 http://node-3:8000 --nodes node-2 node-3 --prompt-file FILE

All engines are asked at the same moment. The first computes the prompt and one token. The others
are told (`kv_transfer_params`, "kvcast") that the prompt is being computed elsewhere, and which
nodes wait for it: what the first has saved reaches all their agents while it computes the rest,
each block by one copy for all of them, and they answer. With two or more of them one prompt is
answered several times, as for best-of-N; with one it is the usual split.

The first needs `--max-num-batched-tokens` well below a prompt's length, else it computes and saves
a prompt as a whole; the others need the connector's option `await_s` (docs/engines.md). The
standard library is all that this needs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def complete(server: str, body: dict[str, Any]) -> dict[str, Any]:
    """One completion, and how long it took."""
    began = time.monotonic()
    request = urllib.request.Request(
        f"{server.rstrip('/')}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        [choice] = json.load(answer)["choices"]
    return {"server": server, "seconds": round(time.monotonic() - began, 3), "text": choice["text"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, nargs="+", metavar="URL")
    parser.add_argument("--nodes", required=True, nargs="+", help="of the decoding engines' agents")
    parser.add_argument("--prompt-file", required=True, type=Path, metavar="FILE")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    common = {
        "model": arguments.model,
        "prompt": arguments.prompt_file.read_text(encoding="utf-8"),
        "temperature": 0,
        "ignore_eos": True,
    }
    handover = {"kvcast": {"prefilling": True, "readers": arguments.nodes}}
    decoded = common | {"max_tokens": arguments.max_tokens, "kv_transfer_params": handover}
    asked = [(arguments.prefill, common | {"max_tokens": 1})]
    asked += [(server, decoded) for server in arguments.decode]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as together:
        for answer in together.map(lambda one: complete(*one), asked):
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
