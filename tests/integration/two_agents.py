"""A pool of two agents, each a process with its own event loop, and a client beside each.

Owns: the pool, whose keys are all at home at HOME, and the bytes of each block. Must not know: how
blocks get from one to the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Self, TypeVar

from kvcast.bench.incast import home_keys
from kvcast.bench.stores.links import HOLDER_SIDE, READER_SIDE, STAR, LoopbackLink
from kvcast.bench.stores.servers import make_pool
from kvcast.hostagent.client import Client, UnavailableError
from kvcast.topologies.pool import Pool

HOME, OTHER = (STAR.hosts[side].node_id for side in (HOLDER_SIDE, READER_SIDE))
PATIENCE_S = 20.0
ARENA_BYTES = 128 << 20
"""Whatever one test puts has room."""


def on_a_pool(
    test: Callable[[Pool, list[bytes]], Coroutine[Any, Any, None]],
    *,
    arena_of_disks: str = "",
    polls: bool = False,
) -> Callable[[], None]:
    """Run a test on a pool of two agents; its keys are at home at HOME. `arena_of_disks`: both have
    a disk, and an arena of that size above it. `polls`: they never sleep."""

    async def within() -> None:
        pool = make_pool(LoopbackLink(), ARENA_BYTES, polls=polls)
        with tempfile.TemporaryDirectory() as folder:
            if arena_of_disks:
                flags = f"--arena-bytes={arena_of_disks}", "--ssd-bytes=256m"
                disks = {node: (*flags, f"--ssd={folder}/{node}") for node in (HOME, OTHER)}
                pool.options = replace(pool.options, node_flags=disks)
            async with pool:
                await test(pool, home_keys(pool, HOME, 40, test.__name__))

    def run() -> None:
        asyncio.run(asyncio.wait_for(within(), 100.0))

    run.__name__ = test.__name__
    return run


def content_of(key: bytes, size_bytes: int) -> bytes:
    return random.Random(key).randbytes(size_bytes)


def _namespace_of(client: Client) -> int:
    """An agent that has just begun may not have found the controller yet."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return client.namespace("t", "m", "1", "bytes")
        except UnavailableError:
            assert time.monotonic() < until
            time.sleep(0.02)


class TwoClients:
    """A client beside the home of every block, and one beside the other agent."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.home, self.other = (Client(str(pool.sockets[node])) for node in (HOME, OTHER))
        self.namespace, other = map(_namespace_of, (self.home, self.other))
        assert other == self.namespace

    @classmethod
    def warm(cls, pool: Pool, keys: list[bytes], size_bytes: int) -> Self:
        """Both, after some blocks of that size."""
        made = cls(pool)
        for key in keys:
            made.put_and_look(key, size_bytes)
        return made

    def put(self, key: bytes, size_bytes: int) -> None:
        """Put a block where the test puts."""
        raise NotImplementedError

    def look(self, key: bytes, size_bytes: int) -> None:
        """See that it is where it should be."""
        raise NotImplementedError

    def put_and_look(self, key: bytes, size_bytes: int) -> None:
        """Both."""
        self.put(key, size_bytes)
        self.look(key, size_bytes)

    def wait_for_the_disk(self) -> None:
        """Until the home's has taken what was to leave its arena: else that is evicted."""
        until = time.monotonic() + PATIENCE_S
        while self.home.stats()["ssd_writes_waiting"]:
            assert time.monotonic() < until
            time.sleep(0.01)

    def close(self) -> None:
        self.home.close()
        self.other.close()


Clients = TypeVar("Clients", bound=TwoClients)


def on_clients(
    kind: Callable[[Pool], Clients], *, arena_of_disks: str = "", polls: bool = False
) -> Callable[[Callable[[Clients, list[bytes]], None]], Callable[[], None]]:
    """Run a test that waits on such clients of a pool, in a thread; keys, and disks, as for
    `on_a_pool`."""

    def decorate(test: Callable[[Clients, list[bytes]], None]) -> Callable[[], None]:
        async def on_pool(pool: Pool, keys: list[bytes]) -> None:
            def play() -> None:
                with contextlib.closing(kind(pool)) as clients:
                    test(clients, keys)

            await asyncio.to_thread(play)

        on_pool.__name__ = test.__name__
        return on_a_pool(on_pool, arena_of_disks=arena_of_disks, polls=polls)

    return decorate
