"""Plays a workload's requests on a running pool, and checks every byte of every block it gets.

Owns: when a request starts, how many are in flight, what is counted. Must not know: how the pool
came to be, or what a report looks like.

Definitions, used by every report:
- gets: blocks asked for by `get` calls; misses: those of them that came back empty although the
  pool had said that they exist; wrong_bytes: bytes that differ from what the key demands.
- hits: gets by where they came from (local, switch, shared, home, bulk), and `miss`.
- fetch_ms: what an engine waited for one `get` call (all blocks of its prefix together) that was
  not answered from the node's own memory alone.
- home_egress_ratio: payload bytes that all homes sent to answer reads (DATA over UDP, and bulk
  answers over TCP), divided by the bytes of the distinct blocks that at least one node fetched
  from elsewhere. 1 means that each byte left its home once; below 1, the switch's memory
  answered some; N, that every one of N readers cost its home a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcast.hostagent.client import AgentGoneError, AsyncClient, KvcastError, PutError
from kvcast.service.statistics import ratio, summary
from kvcast.workloads import content
from kvcast.workloads.generators import Request

TIERS = ("local", "switch", "shared", "home", "bulk", "miss")

EGRESS_COUNTERS = ("payload_bytes_sent_udp_total", "payload_bytes_sent_bulk_get_total")
"""The agents' counters (kvcast.hostagent.core.metrics) whose sum is what homes sent to readers."""

_RECONNECT_S = 0.5
_GRACE_S = 4.5
"""A little less than the client library waits beyond a get's deadline."""


class Turn(NamedTuple):
    """What one request came to. Times are seconds since the replay's start."""

    nodes: tuple[int, ...]
    """Those that took part."""
    started_s: float
    ended_s: float
    wanted: int
    """Blocks that a pool which loses nothing would have held for it, over all of its ranks."""
    came: int
    missed: int
    """Blocks that the pool said it had and that did not come."""
    failed: bool
    """It ended in an error of the local agent."""


@dataclass(frozen=True)
class ReplayOptions:
    """How requests are played."""

    block_bytes: int = 16 * 1024
    """Size of every block."""
    deadline_s: float = 15.0
    """How long one get may take before its blocks count as misses."""
    in_flight: int = 64
    """Requests in flight at most, over all nodes; later ones wait, and are counted as late."""
    budget_s: float = 60.0
    """No request starts later than this after the first."""
    sample_s: float = 0.5
    """Period of the samples of the homes' sent bytes."""
    gather: bool = True
    """Whether gets let homes gather, as the workload's do; where no switch joins reads, that would
    only make them wait."""
    reader_groups: bool = True
    """Whether the ranks of one engine name their reader group, and all but the first wait for what
    the first asks for; else each asks for itself, at the same time. The answer to a group goes to
    all of its members, to those as well that hold the block: as writers, or as its home."""
    namespace_tag: str = "bench"
    """Goes into the namespaces' names, so that two replays on one pool can be kept apart."""


@dataclass
class Tally:
    """What one replay counted. See the module's text for the words."""

    gets: int = 0
    misses: int = 0
    wrong_bytes: int = 0
    put_blocks: int = 0
    put_failures: int = 0
    failed_requests: int = 0
    """Requests that ended in an error of the local agent (it was down, or it refused)."""
    requests: int = 0
    skipped_requests: int = 0
    """Requests that the time budget left no room for."""
    late_requests: int = 0
    """Requests that started more than 50 ms late because too many were in flight."""
    hits: Counter[str] = field(default_factory=Counter)
    miss_reasons: Counter[str] = field(default_factory=Counter)
    fetch_ms: list[float] = field(default_factory=list)
    fetches: list[tuple[int, int, float]] = field(default_factory=list)
    """Of each of `fetch_ms`: the request's number, the node, and when it began (of
    time.monotonic)."""
    fetched: set[tuple[str, bytes]] = field(default_factory=set)
    """Distinct blocks that came from elsewhere."""
    done: set[int] = field(default_factory=set)
    """Numbers of the requests that ran to their end."""
    turns: list[Turn] = field(default_factory=list)
    """Every request that was not skipped, as it ended."""
    overdue: list[tuple[int, float]] = field(default_factory=list)
    """Gets that the agent left without an answer for `_GRACE_S` after their deadline: the node's
    index, and when the get began (of time.monotonic)."""
    egress_bytes: float = 0.0
    egress_samples: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the start, bytes that homes sent until then)."""
    seconds: float = 0.0

    def report(self, block_bytes: int) -> dict[str, Any]:
        """The numbers as plain data."""
        distinct = len(self.fetched) * block_bytes
        return {
            "requests": self.requests,
            "skipped_requests": self.skipped_requests,
            "failed_requests": self.failed_requests,
            "late_requests": self.late_requests,
            "gets": self.gets,
            "misses": self.misses,
            "wrong_bytes": self.wrong_bytes,
            "put_blocks": self.put_blocks,
            "put_failures": self.put_failures,
            "hits": {tier: self.hits[tier] for tier in TIERS},
            "miss_reasons": dict(self.miss_reasons),
            "fetch_ms": summary(self.fetch_ms),
            "fetches": len(self.fetch_ms),
            "distinct_blocks_fetched": len(self.fetched),
            "distinct_bytes_fetched": distinct,
            "home_egress_bytes": int(self.egress_bytes),
            "home_egress_ratio": ratio(self.egress_bytes, distinct),
            "seconds": round(self.seconds, 2),
            "egress_samples": [[round(t, 2), int(b)] for t, b in self.egress_samples],
        }


class IdealPool:
    """What a pool that loses nothing would hold, of the last `remembered` blocks (None = of all)
    that requests have written."""

    def __init__(self, remembered: int | None = None) -> None:
        self._remembered = remembered
        self._written: dict[tuple[str, bytes], None] = {}

    def reads(self, request: Request) -> int:
        """The blocks that the next request would read, over all ranks: the longest prefix of its
        keys that requests before it have written."""
        blocks = [(request.namespace, key) for key in request.keys]
        known = next((n for n, b in enumerate(blocks) if b not in self._written), len(blocks))
        if request.writes:
            self._written.update(dict.fromkeys(blocks))
            while self._remembered is not None and len(self._written) > self._remembered:
                del self._written[next(iter(self._written))]
        return known * max(1, len(request.group))


def ideal_reads(requests: Sequence[Request]) -> dict[int, int]:
    """By request, the blocks that it would read, over all ranks, of a pool that loses nothing."""
    ideal = IdealPool()
    return {request.number: ideal.reads(request) for request in requests}


class NodeLink:
    """The bench's connection to one node's agent, made again after it broke, once in half a second.

    Meanwhile whoever wants it waits, or, if `patient` is False, fails at once.
    """

    def __init__(self, socket_path: Path, *, patient: bool = True) -> None:
        self._path = socket_path
        self._patient = patient
        self._client: AsyncClient | None = None
        self._lock = asyncio.Lock()
        self._not_before = 0.0

    async def client(self) -> AsyncClient:
        """The connected client; KvcastError if the agent cannot be reached."""
        async with self._lock:
            if self._client is not None and self._client.connected:
                return self._client
            await self.close()
            wait_s = self._not_before - time.monotonic()
            if wait_s > 0:
                if not self._patient:
                    raise AgentGoneError(f"{self._path}: was not there a moment ago")
                await asyncio.sleep(wait_s)
            self._not_before = time.monotonic() + _RECONNECT_S
            self._client = await AsyncClient.connect(str(self._path), name="bench")
            return self._client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(KvcastError, OSError):
                await client.close()


@contextlib.asynccontextmanager
async def links_to(
    sockets: Sequence[Path], *, patient: bool = True
) -> AsyncIterator[list[NodeLink]]:
    """Links to the agents behind these sockets, closed at the end."""
    links = [NodeLink(path, patient=patient) for path in sockets]
    try:
        yield links
    finally:
        for link in links:
            await link.close()


class EgressMeter:
    """Bytes that all homes sent to readers, over restarts of agents.

    An agent that does not answer counts with what it said last; after a restart its counters
    begin at 0 again, and what it sends counts on top.
    """

    def __init__(self, links: Sequence[NodeLink]) -> None:
        self._links = links
        self._before_restart = [0.0] * len(links)
        self._last = [0.0] * len(links)

    async def read(self) -> float:
        """The sum over all agents, now."""
        await asyncio.gather(*(self._ask(index) for index in range(len(self._links))))
        return sum(self._before_restart) + sum(self._last)

    def by_node(self) -> list[float]:
        """What each agent had sent at the last `read`."""
        return [a + b for a, b in zip(self._before_restart, self._last, strict=True)]

    async def _ask(self, index: int) -> None:
        try:
            counters = await (await self._links[index].client()).stats()
        except (KvcastError, OSError):
            return
        sent = sum(counters[name] for name in EGRESS_COUNTERS)
        if sent < self._last[index]:
            self._before_restart[index] += self._last[index]
        self._last[index] = sent


@dataclass
class Reads:
    """What one request has read so far, over all of its ranks."""

    came: int = 0
    missed: int = 0


class Player:
    """Plays one request after the other, or many at once, and counts in `tally`, for which another
    may be set at any time."""

    def __init__(
        self, links: Sequence[NodeLink], node_ids: Sequence[str], options: ReplayOptions
    ) -> None:
        self.tally = Tally()
        self._links = list(links)
        self._node_ids = list(node_ids)
        self._options = options
        self._namespaces: dict[str, int] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}

    def namespace(self, name: str) -> int:
        """The number of a namespace that was prepared."""
        return self._namespaces[name]

    @property
    def namespaces(self) -> list[int]:
        """The numbers of all that were prepared, in this order."""
        return list(self._namespaces.values())

    async def prepare(self, requests: Iterable[Request]) -> None:
        """Have the namespaces and reader groups of these requests made, as an engine's would be."""
        layout = f"{self._options.block_bytes} bytes"
        for request in requests:
            if request.namespace not in self._namespaces:
                client = await self._links[0].client()
                self._namespaces[request.namespace] = await client.namespace(
                    "bench", request.namespace, self._options.namespace_tag, layout
                )
            place = (request.namespace, request.group)
            named = self._options.reader_groups and len(request.group) > 1
            if named and place not in self._groups:
                client = await self._links[0].client()
                members = [self._node_ids[node] for node in request.group]
                self._groups[place] = await client.group(
                    self._namespaces[request.namespace], members
                )

    async def play(self, request: Request, reads: Reads) -> None:
        """Look up the longest prefix, get it on every rank, put what was not there; `reads` counts
        what came, also where an error of the local agent (KvcastError, OSError) ends it."""
        namespace = self._namespaces[request.namespace]
        client = await self._links[request.node].client()
        keys = list(request.keys)
        known = await client.exists(namespace, keys)
        if known:
            ranks = request.group or (request.node,)
            group = self._groups.get((request.namespace, request.group), 0)
            got = await asyncio.gather(
                *(
                    self._fetch(
                        request, rank, keys[:known], group, reads, expect=group != 0 and place > 0
                    )
                    for place, rank in enumerate(ranks)
                )
            )
            known = got[0]
        if request.writes and known < len(keys):
            await self._write(client, namespace, keys[known:])

    async def _fetch(
        self,
        request: Request,
        node: int,
        keys: list[bytes],
        group: int,
        reads: Reads,
        *,
        expect: bool,
    ) -> int:
        """Get and check blocks on one node; how many came, counted from the first without a gap."""
        client = await self._links[node].client()
        namespace = self._namespaces[request.namespace]
        began = time.monotonic()
        try:
            outcomes = await client.get_outcomes(
                namespace,
                keys,
                deadline_s=self._options.deadline_s,
                gather_ms=request.gather_ms if self._options.gather else 0,
                group=group,
                expect=expect,
            )
        finally:
            waited_ms = (time.monotonic() - began) * 1e3
            if waited_ms > 1e3 * (self._options.deadline_s + _GRACE_S):
                self.tally.overdue.append((node, began))
        remote, prefix, whole = False, 0, True
        for key, outcome in zip(keys, outcomes, strict=True):
            self.tally.gets += 1
            block = outcome.block
            if block is None:
                self.tally.misses += 1
                reads.missed += 1
                self.tally.hits["miss"] += 1
                self.tally.miss_reasons[outcome.reason or outcome.status] += 1
                remote, whole = True, False
                continue
            with block:
                self.tally.wrong_bytes += content.wrong_bytes(
                    key, self._options.block_bytes, block.data
                )
                self.tally.hits[block.tier] += 1
                reads.came += 1
            if block.tier != "local":
                remote = True
                self.tally.fetched.add((request.namespace, key))
            prefix += whole
        if remote:
            self.tally.fetch_ms.append(waited_ms)
            self.tally.fetches.append((request.number, node, began))
        return prefix

    async def _write(self, client: AsyncClient, namespace: int, keys: list[bytes]) -> None:
        """Put blocks, a bounded number of bytes at a time."""
        batch = max(1, (4 << 20) // self._options.block_bytes)
        for first in range(0, len(keys), batch):
            part = keys[first : first + batch]
            size = self._options.block_bytes
            self.tally.put_blocks += len(part)
            try:
                await client.put(namespace, {key: content.block_bytes(key, size) for key in part})
            except PutError as error:
                self.tally.put_failures += len(error.failed)


class Replay:
    """One replay of a list of requests on a pool."""

    def __init__(
        self,
        requests: Sequence[Request],
        links: Sequence[NodeLink],
        node_ids: Sequence[str],
        options: ReplayOptions,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._requests = list(requests)
        self._options = options
        self._on_progress = on_progress
        self._player = Player(links, node_ids, options)
        self._ended: dict[int, asyncio.Event] = {r.number: asyncio.Event() for r in self._requests}
        self._slots = asyncio.Semaphore(options.in_flight)
        self._started_at = 0.0
        self._finished = 0
        self._marks: list[tuple[int, asyncio.Event]] = []
        self._meter = EgressMeter(links)
        self._wanted = ideal_reads(self._requests)

    @property
    def tally(self) -> Tally:
        """What was counted so far."""
        return self._player.tally

    async def run(self) -> Tally:
        """Play all requests; returns when every one has ended or was skipped."""
        # Namespaces and reader groups exist before the clock starts.
        await self._player.prepare(self._requests)
        before = await self._meter.read()
        self._started_at = time.monotonic()
        sampler = asyncio.create_task(self._sample(before))
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in self._requests:
                    await self._sleep_until(request.time_s)
                    if self.elapsed() > self._options.budget_s:
                        self._skip(request)
                        continue
                    await self._slots.acquire()
                    tasks.create_task(self._play(request))
        finally:
            self.tally.seconds = self.elapsed()
            sampler.cancel()
            await asyncio.wait([sampler])
        self.tally.egress_bytes = await self._meter.read() - before
        self.tally.egress_samples.append((self.elapsed(), self.tally.egress_bytes))
        return self.tally

    async def _sample(self, before: float) -> None:
        while True:
            sent = await self._meter.read() - before
            self.tally.egress_samples.append((self.elapsed(), sent))
            await asyncio.sleep(self._options.sample_s)

    def when_ended(self, count: int) -> asyncio.Event:
        """Set once so many requests have ended, or were skipped."""
        event = asyncio.Event()
        self._marks.append((count, event))
        return event

    def elapsed(self) -> float:
        """Seconds since the first request could start; not before it has."""
        return time.monotonic() - self._started_at

    async def _sleep_until(self, elapsed_s: float) -> None:
        wait_s = min(elapsed_s, self._options.budget_s + 0.01) - self.elapsed()
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def _skip(self, request: Request) -> None:
        self.tally.skipped_requests += 1
        self._end(request)

    def _end(self, request: Request) -> None:
        self._ended[request.number].set()
        self._finished += 1
        for count, event in self._marks:
            if self._finished >= count:
                event.set()
        self._on_progress(self._finished, len(self._requests))

    async def _play(self, request: Request) -> None:
        started_s, failed, reads = self.elapsed(), False, Reads()
        try:
            if self.elapsed() > request.time_s + 0.05:
                self.tally.late_requests += 1
            if request.after is not None and request.after in self._ended:
                await self._ended[request.after].wait()
            if request.jitter_s:
                await asyncio.sleep(request.jitter_s)
            self.tally.requests += 1
            started_s = self.elapsed()
            await self._player.play(request, reads)
            self.tally.done.add(request.number)
        except (KvcastError, OSError):
            failed = True
            self.tally.failed_requests += 1
        finally:
            number = request.number
            self.tally.turns.append(
                Turn(
                    request.group or (request.node,),
                    started_s,
                    self.elapsed(),
                    self._wanted[number],
                    reads.came,
                    reads.missed,
                    failed,
                )
            )
            self._slots.release()
            self._end(request)
