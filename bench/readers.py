"""Readers that go through the same blocks, and never read one that another reads just then.

Owns: the loop, and what came of it; every byte is compared with what its key demands. Must not
know: the pool, or what is measured. So nothing coalesces, and every byte of every read leaves some
node once more.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvcast.hostagent.client import AsyncClient, KvcastError
from kvcast.protocol.messages.local import LOCAL_TIER
from kvcast.workloads import content

GET_DEADLINE_S: Final = 60.0


@dataclass
class Readers:
    """Readers of blocks of one namespace, all of `size_bytes`, and what they have got."""

    namespace: int
    size_bytes: int
    times_s: list[float] = field(default_factory=list)
    """How long each block took that came over the network,"""
    got_bytes: int = 0
    """and the bytes of these blocks."""
    local_bytes: int = 0
    """Of blocks that the reader's node held."""
    misses: int = 0
    wrong_bytes: int = 0
    errors: list[str] = field(default_factory=list)
    _reading: set[bytes] = field(default_factory=set)
    """What some reader reads at this moment."""

    async def read(self, client: AsyncClient, order: list[bytes], pause_s: float = 0.0) -> None:
        """One reader: get one block after the other, again and again, until cancelled."""
        waiting = deque(order)
        while True:
            # With a pause of 0, too: what lies on this node, or fails at once, waits for nothing.
            await asyncio.sleep(pause_s)
            while waiting[0] in self._reading:
                waiting.rotate(-1)
            key = waiting[0]
            waiting.rotate(-1)
            self._reading.add(key)
            begun = time.perf_counter()
            try:
                (block,) = await client.get(self.namespace, [key], GET_DEADLINE_S)
            except KvcastError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            finally:
                self._reading.discard(key)
            took_s = time.perf_counter() - begun
            if block is None:
                self.misses += 1
                continue
            with block:
                self.wrong_bytes += content.wrong_bytes(key, self.size_bytes, block.data)
                if block.tier == LOCAL_TIER:
                    self.local_bytes += self.size_bytes
                else:
                    self.times_s.append(took_s)
                    self.got_bytes += self.size_bytes


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel readers; raises what one of them ended by before."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
