"""Prefetches: an engine's node is told what to fetch from the pool before its engine asks.

Owns: who is told, how many at once, and what the answers teach. Must not know: how blocks are
fetched (the agent does), or how engines are chosen.

An agent answers how many of the keys, from the first on, the pool holds, and the router learns from
that. Blocks that it believed in the pool, and that are not there, leave its index. The others count
as lying on that node from now on, as long as what is expected counts (`core.index`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import msgspec
from kvcast.routing.core.router import Choice, Prompt, Router
from kvcast.routing.engines import UNANSWERED, Engines
from kvcast.routing.options import EngineAddress

MAX_AT_ONCE: Final = 256
"""Prefetches on their way to agents; beyond, one is dropped: it is a hint."""
KEYS_A_HINT: Final = 256
"""As many as an agent takes at once; a longer prefix is told in several hints."""
MAX_HINTS: Final = 16
"""For one request; what lies beyond is fetched when its engine asks."""
TIMEOUT_S: Final = 2.0


class _Held(msgspec.Struct):
    held: int


class Prefetches:
    """Sends prefetches in the background."""

    def __init__(self, router: Router, engines: Engines) -> None:
        self._router = router
        self._engines = engines
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()

    def send(self, choice: Choice, prompt: Prompt) -> None:
        """Tell the chosen engine's agent, if it has one and the pool's keys are known."""
        address = self._engines.address(choice.engine)
        if not choice.prefetch or address.agent is None:
            return
        blocks: list[int] = []
        keys: list[str] = []
        for place in choice.prefetch[: KEYS_A_HINT * MAX_HINTS]:
            key = self._engines.pool_key(prompt.chain[place])
            if key is None:
                break
            blocks.append(prompt.chain[place])
            keys.append(key.hex())
        if not keys:
            self.counts["prefetches_without_keys_total"] += 1
            return
        if len(self._tasks) >= MAX_AT_ONCE:
            self.counts["prefetches_dropped_total"] += 1
            return
        task = asyncio.create_task(self._post(address, keys, blocks))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _post(self, address: EngineAddress, keys: list[str], blocks: list[int]) -> None:
        assert address.agent is not None
        held = 0
        try:
            for first in range(0, len(keys), KEYS_A_HINT):
                part = keys[first : first + KEYS_A_HINT]
                found = await self._hint(address.agent, address.namespace, part)
                held += found
                if found < len(part):
                    break
        except UNANSWERED:
            self.counts["prefetches_failed_total"] += 1
            return
        self.counts["prefetches_total"] += 1
        now = asyncio.get_running_loop().time()
        self._router.fetched(address.name, blocks[:held], now)
        if held < len(blocks):
            self._router.unpooled(blocks[max(0, held) :])

    async def _hint(self, agent: str, namespace: int, keys: list[str]) -> int:
        body = {"namespace": namespace, "keys": keys}
        async with asyncio.timeout(TIMEOUT_S):
            async with self._engines.session.post(
                f"{agent}/v1/prefetch", json=body, ssl=self._engines.agents_tls()
            ) as answer:
                if answer.status != 200:
                    raise ValueError(f"the agent answered {answer.status}")
                return msgspec.json.decode(await answer.content.read(65536), type=_Held).held
