"""Blocks that must be there, whatever moves: what a drain, a join or a takeover is judged by.

Owns: which blocks those are, who reads them while something moves, what was found. Must not know:
how anything is moved (faults.py).

The load's blocks are evicted all the time, so none of them must be there. These are in a namespace
of their own that is assured of its room, in every agent's DRAM. Before something moves, fresh ones
are put, and count once all of their homes have acknowledged them. While it moves, every node reads
some of them, over and over; no get may fail. When it has moved, blocks that nobody has read yet
must be where they belong, in the DRAM of each of their homes, and every node must get them. Every
byte is compared.

Not judged: a get of a node that was dead or stopped meanwhile; and where a block lies, if an agent
was away for so long since it was put that the controller may have counted it as dead: what was lost
with it is copied only where there is room to spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from kvcast.bench.hostile_bytes import BLOCK_BYTES
from kvcast.bench.replay import NodeLink
from kvcast.controller.core.placement import place
from kvcast.hostagent.client import Block, KvcastError, PutError
from kvcast.protocol.messages.wire import bucket_of
from kvcast.topologies.pool import Pool, PoolError
from kvcast.topologies.star import Host
from kvcast.workloads import content

ASSURED_BYTES = 2 << 20
_READ_MEANWHILE = 24
_READ_AFTERWARDS = 12
"""At each look, of blocks that nobody has read yet."""
_LOOKS = 2
_HELD = 4
_PUT_TRIES = 10
_DEADLINE_S = 15.0
"""Longer than anything is stopped, on a machine that has too much to do."""
_READ_EVERY_S = 0.02
_SETTLED_WITHIN_S = 180.0
_MAP_WITHIN_S = 30.0
_POLL_S = 0.2
_REPORTED = 20
"""More finds than this are counted, and not told one by one."""


class Witness:
    """See the module's text.

    `links` are patient ones, for nobody else. `undisturbed(node_id, since)`: whether that agent
    has run since then (of time.monotonic). `lapsed(since)`: whether an agent's lease may have run
    out since then.
    """

    def __init__(
        self,
        pool: Pool,
        links: Sequence[NodeLink],
        hosts: Sequence[Host],
        seed: int,
        undisturbed: Callable[[str, float], bool],
        lapsed: Callable[[float], bool],
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Gets, blocks put, and looks at where blocks lie, with those that could not be judged."""
        self.failed_gets: list[str] = []
        self.lost: list[str] = []
        self.wrong_bytes = 0
        self.moving = False
        """Whether something moves, or is about to."""
        self._pool = pool
        self._links = dict(zip((host.node_id for host in hosts), links, strict=True))
        self._rng = random.Random(f"witness/{seed}")
        self._undisturbed = undisturbed
        self._lapsed = lapsed
        self._namespace = 0
        self._serial = itertools.count()

    async def prepare(self) -> None:
        """Have the namespace made, and its room assured."""
        client = await next(iter(self._links.values())).client()
        self._namespace = await client.namespace(
            "bench", "witness", "bench", f"{BLOCK_BYTES} bytes"
        )
        # What is left of former blocks at nodes that were away goes first, by its age.
        settings = {"policy": "lru", "assured_bytes": {"dram": ASSURED_BYTES}}
        body = {"namespace": self._namespace, "settings": settings}
        await self._pool.http("PATCH", "/v1/namespaces", body)

    @contextlib.asynccontextmanager
    async def while_moving(self, what: str) -> AsyncIterator[Watched]:
        """Fresh blocks, read by every node until the end; `what` moves, in words."""
        self.moving = True
        try:
            async with self._watched(what) as watched:
                yield watched
        finally:
            self.moving = False

    @contextlib.asynccontextmanager
    async def _watched(self, what: str) -> AsyncIterator[Watched]:
        await self.settled()
        began = time.monotonic()
        keys = await self._put(_READ_MEANWHILE + _LOOKS * _READ_AFTERWARDS + _HELD)
        watched = Watched(self, what, began, keys)
        stop = asyncio.Event()
        readers = [
            asyncio.create_task(self._read(node, what, watched.meanwhile, stop))
            for node in self._links
        ]
        try:
            yield watched
        finally:
            stop.set()
            await asyncio.gather(*readers)
            watched.let_go()
            await self._forget(keys)

    async def settled(self, node: str = "", *, placed: bool = True) -> set[str]:
        """Wait until nothing is to be handed over, and that node holds buckets, or does not; the
        nodes that do. PoolError where it takes too long."""
        until = time.monotonic() + _SETTLED_WITHIN_S
        while True:
            try:
                status = await self._pool.status()
            except (OSError, PoolError) as error:  # it is stopped, or has too much to do
                status = {"settled": False, "nodes": [], "error": str(error)}
            homes = {each["node_id"] for each in status["nodes"] if each["placed"]}
            if status["settled"] and (not node or (node in homes) == placed):
                return homes
            if time.monotonic() > until:
                raise PoolError(f"not settled after {_SETTLED_WITHIN_S:g} s: {_left(status)}")
            await asyncio.sleep(_POLL_S)

    # --- what is done with blocks ---------------------------------------------------------------

    async def _put(self, count: int) -> list[bytes]:
        """So many blocks that all of their homes have acknowledged."""
        keys: list[bytes] = []
        for _ in range(_PUT_TRIES):
            for node in self._rng.sample(list(self._links), len(self._links)):
                share = -(-count // len(self._links))
                # Nobody else's, whatever the seed.
                fresh = [self._rng.randbytes(16) for _ in range(min(share, count - len(keys)))]
                failed: set[bytes] = set()
                try:
                    async with asyncio.timeout(_DEADLINE_S):
                        client = await self._links[node].client()
                    blocks = {key: content.block_bytes(key, BLOCK_BYTES) for key in fresh}
                    await client.put(self._namespace, blocks, ack="replicas")
                except PutError as error:
                    failed = set(error.failed)
                except (KvcastError, OSError, TimeoutError):
                    failed = set(fresh)  # the agent is stopped
                keys += [key for key in fresh if key not in failed]
                if len(keys) == count:
                    self.counts["blocks put"] += count
                    return keys
        raise PoolError(f"only {len(keys)} of {count} blocks could be put at all of their homes")

    async def _forget(self, keys: Sequence[bytes]) -> None:
        """So that no node holds more than it is assured of."""
        for link in self._links.values():
            with contextlib.suppress(KvcastError, OSError, TimeoutError):
                async with asyncio.timeout(_DEADLINE_S):
                    await _drop(link, self._namespace, keys)

    async def _read(self, node: str, what: str, keys: Sequence[bytes], stop: asyncio.Event) -> None:
        rng = random.Random(self._rng.random())
        while not stop.is_set():
            for key in rng.sample(keys, len(keys)):
                if stop.is_set():
                    return
                await self.read(node, what, [key])
                await asyncio.sleep(_READ_EVERY_S)

    async def read(self, node: str, what: str, keys: Sequence[bytes]) -> None:
        """One get at a node that must not fail, unless the node was away."""
        since = time.monotonic()
        if not self._undisturbed(node, since):
            return
        problem = ""
        try:
            client = await self._links[node].client()
            outcomes = await client.get_outcomes(self._namespace, keys, deadline_s=_DEADLINE_S)
        except (KvcastError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome.block is None:
                    problem = f"{outcome.status} {outcome.reason}, {key.hex()}"
                else:
                    with outcome.block as block:
                        self.wrong_bytes += content.wrong_bytes(key, BLOCK_BYTES, block.data)
        self.counts["gets"] += 1
        if problem and self._undisturbed(node, since):
            self._find(self.failed_gets, f"{what}: a get at {node}: {problem}")

    async def held_by(self, node: str, keys: Sequence[bytes]) -> set[bytes] | None:
        """Which of these blocks a node has in its DRAM; None where it was away."""
        since = time.monotonic()
        try:
            client = await self._links[node].client()
            described = await client.describe(self._namespace, keys)
        except (KvcastError, OSError):
            if self._undisturbed(node, since):
                raise
            return None
        return {held.key for held in described.held}

    async def has_map(self, node: str) -> None:
        """Wait until an agent that has just started knows the pool. PoolError if it never does."""
        until = time.monotonic() + _MAP_WITHIN_S
        while (await (await self._links[node].client()).describe()).epoch == 0:
            if time.monotonic() > until:
                raise PoolError(f"{node} has no map of the pool after {_MAP_WITHIN_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def counters(self, node: str) -> dict[str, float]:
        """What an agent counts."""
        return await (await self._links[node].client()).stats()

    def _find(self, where: list[str], what: str) -> None:
        where.append(what)
        del where[_REPORTED:]

    async def where_they_belong(self, what: str, since: float, keys: Sequence[bytes]) -> None:
        """Every block is held by each of its homes, and every node gets it."""
        homes = place(await self.settled(), self._pool.options.replicas + 1)
        held = {node: await self.held_by(node, keys) for node in self._links}
        self.counts["looks"] += 1
        if self._lapsed(since):
            self.counts["looks not judged"] += 1
        else:
            for key in keys:
                for node in homes[bucket_of(key)]:
                    has = held.get(node)
                    if has is not None and key not in has:
                        self._find(self.lost, f"{what}: {node} lacks {key.hex()}, and is its home")
        await asyncio.gather(*(self.read(node, what, keys) for node in self._links))

    async def hold(self, node: str, keys: Sequence[bytes]) -> list[tuple[bytes, Block]]:
        """Those of these blocks that can be had there now, not to be released yet."""
        client = await self._links[node].client()
        blocks = await client.get(self._namespace, keys, deadline_s=_DEADLINE_S)
        return [(key, block) for key, block in zip(keys, blocks, strict=True) if block is not None]

    def lacks(self, what: str, node: str, keys: set[bytes]) -> None:
        """A node had these blocks, and has them no more."""
        if keys:
            self._find(self.lost, f"{what}: {len(keys)} blocks that {node} held are gone")


class Watched:
    """The blocks of one move."""

    def __init__(self, witness: Witness, what: str, began: float, keys: list[bytes]) -> None:
        self.meanwhile = keys[:_READ_MEANWHILE]
        self._held_keys = keys[_READ_MEANWHILE : _READ_MEANWHILE + _HELD]
        self._unread = keys[_READ_MEANWHILE + _HELD :]
        self._witness = witness
        self._what = what
        self._began = began
        self._holds: list[tuple[bytes, Block]] = []

    async def look(self) -> None:
        """Blocks that nobody has read yet are where they belong, and everybody gets them."""
        keys, self._unread = self._unread[:_READ_AFTERWARDS], self._unread[_READ_AFTERWARDS:]
        assert keys
        await self._witness.where_they_belong(self._what, self._began, keys)

    @contextlib.asynccontextmanager
    async def kept_by(self, node: str) -> AsyncIterator[None]:
        """What a node has, it has at the end, too; what a client holds of it keeps its bytes."""
        witness = self._witness
        before = await witness.held_by(node, self._unread)
        self._holds = await witness.hold(node, self._held_keys)
        yield
        after = await witness.held_by(node, self._unread)
        if before is not None and after is not None:
            witness.lacks(self._what, node, before - after)
        for key, block in self._holds:
            witness.wrong_bytes += content.wrong_bytes(key, BLOCK_BYTES, block.data)
            witness.counts["blocks held over a takeover"] += 1

    def let_go(self) -> None:
        """Release what is held."""
        for _, block in self._holds:
            block.release()
        self._holds = []


async def _drop(link: NodeLink, namespace: int, keys: Sequence[bytes]) -> None:
    await (await link.client()).drop(namespace, keys)


def _left(status: dict[str, object]) -> str:
    """What a controller's status says of what is still handed over."""
    nodes = status["nodes"]
    assert isinstance(nodes, list)
    return str(status.get("error", "")) + "; ".join(
        f"{node['node_id']} (placed {node['placed']}, alive {node['alive']}): {node['handover']}"
        for node in nodes
    )
