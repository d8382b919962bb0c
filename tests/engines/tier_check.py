"""vLLM's own TieringOffloadingManager with kvcast below it: runs in the engines' environment.

`python tier_check.py SCENARIO ARGUMENT…`: prints "right", or fails. The engine's side is
played by hand: what a worker copies between an accelerator and the offload region, this writes
into, and reads from, the region.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

from vllm.plugins import load_general_plugins
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

CHUNK = 64 << 10
CHUNKS = 24
WAIT_S = 30.0


def config(socket: str, *, dtype: str = "bfloat16", tp_size: int = 1, **tier: Any) -> Any:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=CHUNK // tp_size,
        enable_kv_cache_events=True,
        extra_config={
            "cpu_bytes_to_use": CHUNK * CHUNKS,
            "secondary_tiers": [{"type": "kvcast", "socket": socket, "lookup_s": 2.0} | tier],
        },
        engine_id=f"kvcast-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig("a/model", dtype),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, tp_size, tp_size, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBNHC",
    )


class Engine:
    """A scheduler's manager, and the requests that come to it."""

    def __init__(self, socket: str, **options: Any) -> None:
        self.spec = TieringOffloadingSpec(config(socket, **options))
        self.manager = self.spec.get_manager()
        self.rows = self.manager.primary_tier.get_kv_memoryview().cast("B")
        [self.tier] = self.manager.secondary_tiers
        self.requests = 0
        self.longest_s = 0.0

    def request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"request {self.requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        began = time.monotonic()
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def settle(self) -> None:
        end = time.monotonic() + WAIT_S
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "jobs never end"
            self.step()
            time.sleep(0.002)

    def store(self, keys: Sequence[OffloadKey], seed: str) -> None:
        """What a request has computed goes to the region, and on to the pool."""
        context = self.request()
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        for key, chunk in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            at = int(chunk) * CHUNK
            self.rows[at : at + CHUNK] = content(key, seed)
        if out.keys_to_store:
            self.manager.complete_store(out.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()

    def hits(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> int:
        """How many of the chain are there in the end, as vLLM's scheduler asks."""
        mine = context or self.request()
        end = time.monotonic() + WAIT_S
        while True:
            count, wait = 0, False
            began = time.monotonic()
            for key in keys:
                result = self.manager.lookup(key, mine)
                if result is LookupResult.MISS:
                    break
                wait |= result is not LookupResult.HIT
                count += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if not wait:
                if context is None:
                    self.manager.on_request_finished(mine)
                return count
            assert time.monotonic() < end, "a lookup never ends"
            self.step()
            time.sleep(0.002)

    def holds(self, keys: Sequence[OffloadKey], seed: str) -> bool:
        """Whether the region holds these bytes for these keys."""
        context = self.request()
        spec = self.manager.prepare_load(keys, context)
        rows = [self.rows[int(c) * CHUNK : int(c) * CHUNK + CHUNK] for c in spec.chunk_ids]
        right = [bytes(row) for row in rows] == [content(key, seed) for key in keys]
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        return right

    def counts(self) -> dict[str, float]:
        stats = self.manager.get_stats()
        assert stats is not None
        return {
            name.removeprefix("vllm:kvcast_").removesuffix("_total"): sum(
                values.values() if name.startswith("vllm:kvcast") else [0]
            )
            for name, values in stats.data["data"].items()
            if name.startswith("vllm:kvcast")
        }

    def close(self) -> None:
        self.rows.release()
        self.manager.shutdown()


def content(key: bytes, seed: str) -> bytes:
    return random.Random(key + seed.encode()).randbytes(CHUNK)


def chain(label: str, count: int) -> list[OffloadKey]:
    return [
        make_offload_key(hashlib.sha256(f"{label} {at}".encode()).digest(), 0)
        for at in range(count)
    ]


def shared(one: str, other: str) -> None:
    """What one engine computes another finds, whole, and as far as it goes."""
    here, there = Engine(one), Engine(other)
    keys = chain("a", 10)
    here.store(keys[:8], "mine")
    events = list(here.manager.take_events())
    assert any(set(event.keys) == set(keys[:8]) for event in events if event.ownership == "kvcast")
    assert there.hits(keys) == 8
    assert there.holds(keys[:8], "mine")
    assert there.hits(chain("never", 3)) == 0
    # More than the region holds: what it threw out comes back from the pool.
    for label in "bcd":
        here.store(chain(label, 12), "mine")
    assert here.hits(keys) == 8
    assert here.holds(keys[:8], "mine")
    assert there.counts()["load_blocks"] == 8
    assert here.counts()["save_blocks"] == 8 + 36
    assert not there.tier._found, "requests that are gone are forgotten"
    here.close()
    there.close()


def apart(one: str, other: str) -> None:
    """Another type, another number of ranks, another version: nothing is found."""
    keys = chain("a", 4)
    # First, since a second tenant gives namespaces secrets, and empties those that had none.
    tenant = Engine(other, tenant="another")
    assert tenant.hits(keys) == 0
    here = Engine(one)
    here.store(keys, "mine")
    assert tenant.hits(keys) == 0
    tenant.close()
    others: list[dict[str, Any]] = [
        {"dtype": "float16"},
        {"tp_size": 2},
        {"version": "2"},
        {"revision": "main"},
        {"model": "b"},
    ]
    for options in others:
        there = Engine(other, **options)
        assert there.hits(keys) == 0, options
        there.store(keys, "theirs")
        there.close()
    same = Engine(other)
    assert same.hits(keys) == 4
    assert same.holds(keys, "mine")
    same.close()
    # Who makes its hashes from another seed finds nothing, and is told so.
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvcast.connector").addHandler(handler)
    kv_cache_utils._NONE_HASH_SEED = "another"
    stranger = Engine(other)
    end = time.monotonic() + WAIT_S
    while not any("from another seed" in one for one in said):
        assert time.monotonic() < end, said
        time.sleep(0.05)
    stranger.close()
    here.close()


def hung(one: str, other: str, pid: str) -> None:
    """An agent that hangs: lookups, stores and loads end by their deadlines, and no call waits."""
    import signal

    keys = chain("a", 16)
    writer = Engine(one)
    writer.store(keys, "mine")
    writer.close()
    here = Engine(other, lookup_s=0.3, load_s=0.5, save_s=0.5, prefetch=False)
    context = here.request()
    # The pool promises, and then cannot keep it, but for what this node itself holds.
    end = time.monotonic() + WAIT_S
    while LookupResult.RETRY in [here.manager.lookup(key, context) for key in keys]:
        assert time.monotonic() < end
        here.tier.on_schedule_end(None)
        time.sleep(0.002)
    os.kill(int(pid), signal.SIGSTOP)
    try:
        began = time.monotonic()
        here.longest_s = 0.0
        assert here.hits(keys, context) < len(keys)
        assert here.hits(keys, context) < len(keys), "a promise that was broken is not repeated"
        here.store(chain("e", 4), "mine")
        assert here.hits(chain("f", 4)) == 0
        for _ in range(5):
            here.hits(chain(f"g{_}", 4))
        assert time.monotonic() - began < 10.0
        assert here.longest_s < 0.25, here.longest_s
        here.manager.on_request_finished(context)
        here.manager.reset_cache()  # which waits for all jobs
    finally:
        os.kill(int(pid), signal.SIGCONT)
    end = time.monotonic() + WAIT_S
    while here.hits(keys) < len(keys):
        assert time.monotonic() < end, "the pool is never asked again"
        time.sleep(0.2)
    assert here.holds(keys, "mine")
    counts = here.counts()
    assert counts["lookups_failed"] > 0
    assert counts["save_failures"] == 4
    here.close()


def gone() -> None:
    """No agent at all: the engine starts, and computes."""
    here = Engine("/nonexistent/agent.sock")
    keys = chain("a", 4)
    here.store(keys, "mine")
    assert here.hits(keys) == 4, "vLLM's own region"
    assert here.hits(chain("b", 4)) == 0
    here.close()


if __name__ == "__main__":
    load_general_plugins()
    load_general_plugins()  # as vLLM may
    scenarios: dict[str, Any] = {"shared": shared, "apart": apart, "hung": hung, "gone": gone}
    scenarios[sys.argv[1]](*sys.argv[2:])
    print("right")
