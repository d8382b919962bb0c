"""vLLM's OpenAI server as a benchmark sees it: started, asked for one stream at a time, ended.

Owns: its process, what users say on its command line. Must not know: what it is asked for, or who
chooses among several.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from kvcast.bench.engines.engine import START_S, EngineError
from kvcast.topologies.part import Part

_POLL_S: Final = 0.5
MODEL: Final = "model"
"""What the model is called in requests."""
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Streamed:
    """An answer: seconds until its first token, and tokens of the prompt, in all and cached."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Server:
    """Where a server listens, and the socket on which it tells its KV events."""

    url: str
    events: str

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        python: Path,
        folder: Path,
        name: str,
        address: tuple[str, int],
        model: Path,
        *flags: str,
        transfer: dict[str, Any],
        processor: int | None = None,
    ) -> AsyncIterator[Server]:
        """A server on that address, with the connector said in `transfer`; ends with the block.
        `processor`: the one that it computes on, and no other; None: any."""
        host, port = address
        events = f"ipc://{folder / name}.events"
        part = Part(
            name,
            [
                *(() if processor is None else ("taskset", "--cpu-list", str(processor))),
                *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(model), "--served-model-name", MODEL),
                *("--host", host, "--port", str(port), "--enforce-eager"),
                "--enable-prompt-tokens-details",
                *("--kv-transfer-config", json.dumps(transfer)),
                "--kv-events-config",
                json.dumps(
                    {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
                ),
                *flags,
            ],
            log_path=folder / f"{name}.log",
            environment={**os.environ, **_ENVIRONMENT},
            announces=False,
        )
        try:
            await part.start()
            server = cls(f"http://{host}:{port}", events)
            await server._wait(part)
            yield server
        finally:
            await part.stop()

    async def _wait(self, part: Part) -> None:
        end = time.monotonic() + START_S
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                if not part.running or time.monotonic() > end:
                    raise EngineError(str(part.failure("does not answer")))
                await asyncio.sleep(_POLL_S)


async def stream(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], max_tokens: int
) -> Streamed:
    """Ask a server, or a router in front of some; EngineError for an answer that is none."""
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    first_s: float | None = None
    usage: dict[str, Any] = {}
    tokens: list[int] = []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise EngineError(f"{answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            text = line.removeprefix(b"data: ").strip()
            if not text.startswith(b"{"):
                continue
            event = json.loads(text)
            if "error" in event:
                raise EngineError(f"an answer broke off: {event['error']}")
            for choice in event.get("choices", ()):
                if new := choice.get("token_ids"):
                    first_s = time.monotonic() - began if first_s is None else first_s
                    tokens += new
            usage = event.get("usage") or usage
    if first_s is None or "prompt_tokens" not in usage:
        raise EngineError("an answer without a token, or without its usage")
    details = usage.get("prompt_tokens_details") or {}
    return Streamed(
        first_s, usage["prompt_tokens"], details.get("cached_tokens") or 0, tuple(tokens)
    )
