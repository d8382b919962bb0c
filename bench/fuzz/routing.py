"""What the router takes from engines and clients: KV events, and requests with their prompts.

Owns: these entry points. Must not know: how inputs are found (`engine`), or HTTP and ZeroMQ, whose
libraries carry the bytes here.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from kvcast.bench.fuzz.engine import Harness
from kvcast.bench.fuzz.shapes import spoil_json, spoil_tree
from kvcast.bench.fuzz.targets import FunctionHarness, entry_point
from kvcast.bench.hostile_bytes import mutate
from kvcast.routing import prompts
from kvcast.routing.core import kv_events
from kvcast.routing.core.router import Router

_STORED: Final[dict[str, Any]] = {
    "type": "BlockStored",
    "block_hashes": [1, b"x" * 32],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": "l",
    "extra_keys": [["l"], None],
}
_REMOVED: Final[dict[str, Any]] = {
    "type": "BlockRemoved",
    "block_hashes": [1],
    "medium": "CPU",
}
_MAPS: Final = {"ts": 1.0, "events": [_STORED, _REMOVED, {"type": "AllBlocksCleared"}]}
_ARRAYS: Final = [1.0, [list(_STORED.values()), list(_REMOVED.values()), ["AllBlocksCleared"]], 0]


def _spoil_batch(data: bytes, rng: random.Random) -> bytes:
    """A batch with its tree changed, or at times its bytes."""
    if rng.random() < 0.3:
        return mutate(data, rng)
    try:
        return msgspec.msgpack.encode(spoil_tree(msgspec.msgpack.decode(data), rng))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return mutate(data, rng)


@entry_point("kv-events", "an engine's KV events, as the router takes them", kv_events)
def _kv_events() -> Harness:
    router = Router()
    router.add_engine("engine")
    events = kv_events.EngineEvents(router, "engine", max_blocks=1000)

    def hear(data: bytes) -> None:
        events.heard(events.next_sequence, data)

    corpus = [msgspec.msgpack.encode(batch) for batch in (_MAPS, _ARRAYS)]
    return FunctionHarness(hear, corpus, (kv_events.EventError,), _spoil_batch)


_CHAT: Final = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s" * 80},
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
    ],
    "tools": [{"type": "function"}],
    "cache_salt": "x",
}
_COMPLETIONS: Final[Sequence[dict[str, Any]]] = (
    {"model": "m", "prompt": "p" * 100},
    {"model": "m", "prompt": [1, 2, 3, 4, 5]},
    {"model": "m", "prompt": ["a", "b"]},
)


@entry_point("route-request", "a request to the router, and how its prompt is named", prompts)
def _route_request() -> Harness:
    async def tokenize(question: dict[str, Any]) -> Sequence[int] | None:
        return list(repr(question).encode("utf-8", "surrogatepass"))

    named = [prompts.Prompts(tokenize), prompts.Prompts(None)]
    names = prompts.Names(block_tokens=4)

    def name(data: bytes) -> None:
        body = prompts.body_of(data)
        for each in named:
            asyncio.run(each.named(body, names))

    corpus = [json.dumps(body).encode() for body in (_CHAT, *_COMPLETIONS)]
    return FunctionHarness(name, corpus, (prompts.PromptError,), spoil_json)
