"""The link to the agent for engines that name each block and its memory themselves: vLLM's tier,
LMCache, SGLang. Where the connector plans for the engine, it is `link`.

Owns: how blocks are asked about, read into an engine's memory and written from there, one by one,
and that each such task is reported once, within its time. Must not know: engines; what a key or a
place in memory means there.

What a chain's beginning would take to load is weighed against computing it (`weighing`), where the
operator has said what that takes: engines that name their blocks themselves do not tell how fast
they compute, or what else they have to do, and their loads cannot be cut short.

Every task ends by its deadline, and none waits for another's. While the pool does not answer it is
left alone (`health`), and beyond a bound tasks are refused at once (`transfers.Allowance`): both
are reported as any other end, with their reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from kvcast.hostagent.client import AsyncClient, Block, KvcastError, PutError
from kvcast.hostagent.client.conversation import Prefix
from kvcast.hostagent.connectors.agent_link import (
    ARENA_SHARE,
    NOT_NEAR,
    SAVES_AT_ONCE,
    AgentLink,
    UnreachableError,
)
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.health import Health
from kvcast.hostagent.connectors.naming import NamespaceName
from kvcast.hostagent.connectors.options import StoreOptions
from kvcast.hostagent.connectors.transfers import (
    BUSY,
    CAME,
    CLOSED,
    DEADLINE,
    FAILED,
    LEFT_ALONE,
    NOT_HELD,
    POOL_FAILED,
    SLOWER,
    THERE,
    UNAVAILABLE,
    Allowance,
    Transfer,
)
from kvcast.hostagent.connectors.weighing import (
    MEMORY_TOKENS,
    PROBE_BLOCKS,
    Meter,
    Verdict,
    Weighed,
    Weighing,
)
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.messages.local import TIERS

MOST_TASKS: Final = 1024
"""Questions, loads, and saves, of each kind, that may be under way."""
GAPS: Final = 4
"""Missing blocks of a chain behind which the rest of it is still asked about; after so many, what
is left counts as not held. The pool counts prefixes, and mostly a chain has one gap: its end."""
MISSING_KEPT: Final = 65_536
"""Blocks that could not be had, of which the last are remembered."""
PREFETCH_KEYS: Final = 4096
"""Keys of one question that are fetched ahead, at most."""
CORRUPT: Final = "corrupt"
WRONG_SIZE: Final = "wrong_size"

K = TypeVar("K")

_log = logging.getLogger("kvcast.connector")


@dataclass(frozen=True, slots=True)
class Named:
    """A block's name in the pool: its namespace, and its key of 16 bytes. `chain`: what it is part
    of, where one question is about several prefixes (see `GAPS`). `request`: whose that is, where
    one question is of several requests; none of a request's chains is of use without the others."""

    namespace: NamespaceName
    key: bytes
    chain: str = field(default="", compare=False)
    request: str = field(default="", compare=False)


@dataclass(slots=True)
class _Promised:
    """By the answer to one question, so far."""

    blocks: int = 0
    """That are not in this node's memory."""
    probing: set[str] = field(default_factory=set)
    """Requests of which a few blocks are loaded to see how fast they come."""


Room: TypeAlias = memoryview | tuple[memoryview, ...]
"""A block's place in the engine's memory, in one piece or several that follow each other in the
block: each contiguous, format "B", shape (size in bytes,)."""
Done: TypeAlias = Callable[[Transfer], None]
"""Called once when a transfer was reported, in any thread; it must not block."""


class BlockLink(AgentLink):
    """An adapter's way to the pool. Its methods do not wait, and may be called in any thread."""

    def __init__(self, options: StoreOptions, name: str, counters: Counters) -> None:
        super().__init__(options.agent_socket, name)
        self._options = options
        self._counters = counters
        self._health = Health()
        self._missing: BoundedMap[Named, float] = BoundedMap(MISSING_KEPT)
        """Until when blocks that could not be had count as not held."""
        self._open: set[Transfer] = set()
        self._state_lock = threading.Lock()
        self._questions = Allowance(MOST_TASKS, MOST_TASKS)
        self._loads = Allowance(MOST_TASKS, options.waiting_bytes)
        self._saves = Allowance(MOST_TASKS, options.waiting_bytes)
        self._saving: asyncio.Semaphore | None = None
        self._weighing: Weighing | None = None
        self._meter = Meter()
        self._loading = 0
        """Blocks of the loads that are under way."""

    def weigh(self, block_tokens: int) -> None:
        """Blocks are of so many tokens: from now on what they take to load is measured, and weighed
        if the operator has said what computing takes."""
        weighing, rate = Weighing(block_tokens), self._options.prefill_tokens_per_s
        if rate:
            weighing.computed(MEMORY_TOKENS, MEMORY_TOKENS / rate)
        with self._state_lock:
            self._weighing = weighing

    @property
    def well(self) -> bool:
        """Whether the pool is not being left alone."""
        with self._state_lock:
            return self._health.well

    @property
    def under_way(self) -> dict[str, int]:
        """How many questions, loads and saves there are."""
        return {
            "questions": self._questions.count,
            "loads": self._loads.count,
            "saves": self._saves.count,
        }

    # --- questions ------------------------------------------------------------------------------

    def find(self, names: Sequence[Named], done: Done, prefix: Prefix = ()) -> Transfer:
        """Which of these blocks the pool holds: a transfer of nothing, in whose outcomes `CAME`
        stands for one that is held, and worth loading. `prefix`: as in a client's calls, of blocks
        that are all of one namespace; so in `load` and `save`."""

        def counted(transfer: Transfer) -> None:
            told = (CAME, NOT_HELD, FAILED, SLOWER)
            failed = [one for one in transfer.outcomes if one not in told]
            if failed:
                self._counters.add("lookups_failed", reason=failed[0])
            for reason in (NOT_HELD, FAILED, SLOWER):
                self._counters.add("miss_blocks", transfer.outcomes.count(reason), reason=reason)
            done(transfer)

        now = time.monotonic()
        self._counters.add("lookups")
        transfer = Transfer(len(names), 0, now + self._options.lookup_s, counted)
        with self._state_lock:
            for index, name in enumerate(names):
                if self._missing.get(name, 0.0) > now:
                    transfer.settle(index, FAILED)

        async def ask() -> None:
            promised = _Promised()
            for (namespace, _), indices in _grouped(names, lambda one: (one.namespace, one.chain)):
                wanted = [at for at in indices if not transfer.is_settled(at)]
                client = await self._connected()
                number = await self._number(client, namespace)
                keys = [names[at].key for at in wanted]
                found = await self._held(client, number, keys, transfer.deadline, GAPS)
                near = client.near(number, keys[: _prefix(found)])
                request = names[indices[0]].request
                worth = self._worth(found, near, request, promised)
                for place, (at, is_held) in enumerate(zip(wanted, found, strict=True)):
                    worthwhile = CAME if place < worth else SLOWER
                    transfer.settle(at, worthwhile if is_held else NOT_HELD)
                held = [key for key, one in zip(keys[:worth], found, strict=False) if one]
                if self._options.prefetch and held:  # the answer does not wait for it
                    self._do(functools.partial(self._prefetch, namespace, held, prefix))

        self._run_task(self._questions, transfer, ask)
        return transfer

    async def _held(
        self, client: AsyncClient, number: int, keys: list[bytes], deadline: float, gaps: int
    ) -> list[bool]:
        held = [False] * len(keys)
        at = passed = 0
        while at < len(keys) and passed <= gaps:
            left_s = max(deadline - time.monotonic(), 0.001)
            count = await client.exists(number, keys[at:], left_s)
            held[at : at + count] = [True] * count
            at += count + 1
            passed += 1
        return held

    def _worth(self, found: list[bool], near: int, request: str, promised: _Promised) -> int:
        """Before which of a chain's blocks, as far as they are `found`, loading is worth it. `near`
        of them, from the first, are in this node's memory."""
        held = _prefix(found)
        if not held:
            return len(found)
        taken = held
        with self._state_lock:
            if self._weighing is not None and near < held:
                now, far = time.monotonic(), held - near
                wait = self._loading + promised.blocks
                verdict = self._weighing.take(now, far, wait, 0, self._options.load_s)
                if verdict.why == "probe":
                    promised.probing.add(request)
                elif not verdict.blocks and request in promised.probing:
                    verdict = Verdict(min(far, PROBE_BLOCKS), "probe")
                promised.blocks += verdict.blocks
                taken = near + verdict.blocks
                self._counters.add("weighed", verdict=verdict.why)
            paces = self._weighing.paces if self._weighing is not None else (0.0, 0.0)
        weighed = Weighed.of(held, taken)
        self._counters.add("prefixes", outcome=weighed.outcome)
        self.tell(weighed, paces)
        return taken if taken < held else len(found)

    async def _prefetch(self, namespace: NamespaceName, keys: list[bytes], prefix: Prefix) -> None:
        with contextlib.suppress(KvcastError, UnreachableError):
            client = await self._connected()
            number = await self._number(client, namespace)
            said = prefix if client.of_prefixes(number) else ()
            keys = keys[:PREFETCH_KEYS]
            await client.prefetch(number, keys, self._options.load_s, prefix=said)

    # --- loads ----------------------------------------------------------------------------------

    def load(
        self, names: Sequence[Named], rooms: Sequence[Room], done: Done, prefix: Prefix = ()
    ) -> Transfer:
        """Bring blocks into the engine's memory, which is not written to once it was reported."""
        began = time.monotonic()

        def counted(transfer: Transfer) -> None:
            now = time.monotonic()
            self._counters.add_load_time(now - began)
            reasons = [one for one in transfer.outcomes if one != CAME]
            self._meter.closed()
            with self._state_lock:
                self._learn(now, transfer.outcomes)
                for name, outcome in zip(names, transfer.outcomes, strict=True):
                    if outcome not in (CAME, BUSY, LEFT_ALONE, CLOSED):
                        self._missing[name] = now + self._options.retry_s
            for reason in set(reasons):
                self._counters.add("miss_blocks", reasons.count(reason), reason=reason)
            if reasons:
                self._counters.add("failed_loads", reason=reasons[0])
            done(transfer)

        self._counters.add("loads")
        self._meter.opened(began)
        with self._state_lock:
            self._loading += len(names)
        size_bytes = sum(map(_size, rooms))
        transfer = Transfer(len(names), size_bytes, began + self._options.load_s, counted)

        async def bring() -> None:
            async for client, number, indices in self._by_namespace(names):
                for some in self._windows(client, indices, rooms):
                    await self._bring(client, number, names, rooms, some, transfer, prefix)

        self._run_task(self._loads, transfer, bring)
        return transfer

    def _learn(self, now: float, outcomes: Sequence[str]) -> None:
        """A load has ended so. With the state's lock."""
        self._loading -= len(outcomes)
        pace = self._meter.take(now)
        if self._weighing is None:
            return
        if pace is not None:
            self._weighing.heard(pace)
        asked = [one for one in outcomes if one not in (BUSY, LEFT_ALONE, CLOSED)]
        if asked:
            self._weighing.ended(len(asked), asked.count(CAME))

    async def _bring(
        self,
        client: AsyncClient,
        number: int,
        names: Sequence[Named],
        rooms: Sequence[Room],
        some: list[int],
        transfer: Transfer,
        prefix: Prefix,
    ) -> None:
        keys = [names[at].key for at in some]
        left_s = max(transfer.deadline - time.monotonic(), 0.001)
        bad: list[bytes] = []
        said = prefix if client.of_prefixes(number) else ()
        arriving = client.get_each(number, keys, left_s, prefix=said)
        async with contextlib.aclosing(arriving) as arrivals:
            async for place, outcome in arrivals:
                at = some[place]
                if outcome.block is None:
                    reason = outcome.reason or outcome.status
                    transfer.settle(at, reason)
                else:
                    reason = self._take(outcome.block, rooms[at], transfer, at)
                if reason in (CORRUPT, WRONG_SIZE):
                    bad.append(keys[place])
                if transfer.reported:
                    break
        if bad:  # forgotten, so that they can be saved again
            with contextlib.suppress(KvcastError):
                await client.drop(number, bad)

    def _take(self, block: Block, room: Room, transfer: Transfer, at: int) -> str:
        """Copy a block into the engine's memory; why not, else ""."""
        with block:
            reason = _wrong(block, room, self._options.verify)
            if reason == CORRUPT:
                self._counters.add("corrupt_blocks")
            if not reason and not transfer.copy(functools.partial(_scatter, block.data, room)):
                return DEADLINE
            transfer.settle(at, reason or CAME)
            if not reason:
                near = TIERS.index(block.tier) < NOT_NEAR
                self._meter.came(time.monotonic(), 1, near=near)
                self._counters.add("load_blocks", tier=block.tier)
                self._counters.add("load_bytes", block.size_bytes)
            return reason

    # --- saves ----------------------------------------------------------------------------------

    def save(
        self, names: Sequence[Named], rooms: Sequence[Room], done: Done, prefix: Prefix = ()
    ) -> Transfer:
        """Put blocks into the pool, each whole or not at all, from the engine's memory, which is
        not read once it was reported. What the pool holds of them, from the first without a gap, is
        left as it is."""

        def counted(transfer: Transfer) -> None:
            outcomes = transfer.outcomes
            for reason in set(outcomes) - {CAME, THERE}:
                self._counters.add("save_failures", outcomes.count(reason), reason=reason)
            with self._state_lock:
                for name, came in zip(names, transfer.came, strict=True):
                    if came:
                        self._missing.pop(name, None)
            done(transfer)

        size_bytes = sum(map(_size, rooms))
        due = time.monotonic() + self._options.save_s
        transfer = Transfer(len(names), size_bytes, due, counted)

        async def put() -> None:
            if self._saving is None:
                self._saving = asyncio.Semaphore(SAVES_AT_ONCE)
            async with self._saving:
                async for client, number, indices in self._by_namespace(names):
                    keys = [names[at].key for at in indices]
                    held = await self._held(client, number, keys, transfer.deadline, gaps=0)
                    for at, is_held in zip(indices, held, strict=True):
                        if is_held:
                            transfer.settle(at, THERE)
                    left = [at for at in indices if not transfer.is_settled(at)]
                    for some in self._windows(client, left, rooms):
                        await self._put(client, number, names, rooms, some, transfer, prefix)

        self._run_task(self._saves, transfer, put)
        return transfer

    async def _put(
        self,
        client: AsyncClient,
        number: int,
        names: Sequence[Named],
        rooms: Sequence[Room],
        some: list[int],
        transfer: Transfer,
        prefix: Prefix,
    ) -> None:
        """Write blocks straight into the arena, and commit them."""
        first = {names[at].key: at for at in reversed(some)}
        sizes = {key: _size(rooms[at]) for key, at in first.items()}
        failed: dict[bytes, str] = {}
        said = prefix if client.of_prefixes(number) else ()
        with await client.reserve(number, sizes, prefix=said) as reservation:
            for key, view in reservation.views.items():
                room = rooms[first[key]]
                if not transfer.copy(functools.partial(_gather, room, view)):
                    return  # what was reserved is given back
            try:
                await client.commit(reservation, ack=self._options.ack)
            except PutError as error:
                failed = error.failed
        for at in some:
            key = names[at].key
            transfer.settle(at, failed.get(key, CAME))
            if key not in failed and first[key] == at:
                self._counters.add("save_blocks")
                self._counters.add("save_bytes", _size(rooms[at]))

    # --- forgetting -----------------------------------------------------------------------------

    def forget(self, names: Sequence[Named], done: Done) -> Transfer:
        """Have the pool forget blocks: a transfer of nothing, in whose outcomes `CAME` stands for
        one that its homes were asked to forget."""
        due = time.monotonic() + self._options.save_s
        transfer = Transfer(len(names), 0, due, done)

        async def drop() -> None:
            async for client, number, indices in self._by_namespace(names):
                await client.drop(number, [names[at].key for at in indices])
                for at in indices:
                    transfer.settle(at, CAME)

        self._run_task(self._questions, transfer, drop)
        return transfer

    async def _by_namespace(
        self, names: Sequence[Named]
    ) -> AsyncIterator[tuple[AsyncClient, int, list[int]]]:
        """A client, each namespace's number, and the positions of its names."""
        for namespace, indices in _grouped(names, lambda name: name.namespace):
            client = await self._connected()
            yield client, await self._number(client, namespace), indices

    # --- tasks ----------------------------------------------------------------------------------

    def _run_task(
        self,
        allowance: Allowance,
        transfer: Transfer,
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Do `work` until the transfer's deadline, and report the transfer; at once where the pool
        is left alone or too much is under way."""
        with self._state_lock:
            if not allowance.take(transfer.size_bytes):
                refused = BUSY
            elif not self._health.may_ask(time.monotonic()):  # what is refused must ask nothing
                allowance.give(transfer.size_bytes)
                refused = LEFT_ALONE
            else:
                refused = ""
                self._open.add(transfer)
        if refused:
            transfer.end(refused)
            return

        async def run() -> None:
            reason = UNAVAILABLE
            try:
                async with asyncio.timeout_at(transfer.deadline):
                    with self._remembered():
                        await work()
                reason = NOT_HELD
            except TimeoutError:
                reason = DEADLINE
            except asyncio.CancelledError:
                reason = CLOSED
                raise
            except KvcastError as error:
                reason = error.status or UNAVAILABLE
                _log.debug("a task has failed: %r", error)
            except UnreachableError as error:
                _log.debug("a task has failed: %r", error)
            finally:
                self._finish(allowance, transfer, reason)

        if not self._do(run):
            self._finish(allowance, transfer, CLOSED)

    def _finish(self, allowance: Allowance, transfer: Transfer, reason: str) -> None:
        allowance.give(transfer.size_bytes)
        with self._state_lock:
            self._open.discard(transfer)
            if reason in POOL_FAILED:
                self._health.failed(time.monotonic())
            elif reason != CLOSED:
                self._health.succeeded()
        transfer.end(reason)

    def end_due(self) -> None:
        """Report what is over its deadline, in case the link's thread has not come to it."""
        now = time.monotonic()
        with self._state_lock:
            due = [one for one in self._open if now >= one.deadline]
        for transfer in due:
            transfer.end(DEADLINE)

    def close(self, timeout_s: float = 2.0) -> None:
        """As `AgentLink.close`; whatever is under way is reported."""
        super().close(timeout_s)
        with self._state_lock:
            left = list(self._open)
        for transfer in left:
            transfer.end(CLOSED)

    def _windows(
        self, client: AsyncClient, indices: Sequence[int], rooms: Sequence[Room]
    ) -> Iterator[list[int]]:
        """As many blocks at once as a task may have in the arena."""
        most_bytes = min(self._options.window_bytes, client.arena_bytes // ARENA_SHARE)
        some: list[int] = []
        total_bytes = 0
        for at in indices:
            if some and total_bytes + _size(rooms[at]) > most_bytes:
                yield some
                some, total_bytes = [], 0
            some.append(at)
            total_bytes += _size(rooms[at])
        if some:
            yield some


def _grouped(names: Sequence[Named], by: Callable[[Named], K]) -> list[tuple[K, list[int]]]:
    """Positions in `names`, by what `by` says of them, in order."""
    groups: dict[K, list[int]] = {}
    for at, name in enumerate(names):
        groups.setdefault(by(name), []).append(at)
    return list(groups.items())


def _prefix(found: list[bool]) -> int:
    """How many there are before the first that is not."""
    return found.index(False) if False in found else len(found)


def _wrong(block: Block, room: Room, verify: bool) -> str:
    """What is wrong with a block, else ""."""
    if block.size_bytes != _size(room):
        return WRONG_SIZE
    return CORRUPT if verify and not block.verify() else ""


def _pieces(room: Room) -> tuple[memoryview, ...]:
    return room if isinstance(room, tuple) else (room,)


def _size(room: Room) -> int:
    return sum(map(len, _pieces(room)))


def _beside(data: memoryview, room: Room) -> Iterator[tuple[memoryview, memoryview]]:
    """The pieces of a block's room in the engine's memory, each with its part of the block."""
    at = 0
    for piece in _pieces(room):
        yield piece, data[at : at + len(piece)]
        at += len(piece)


def _scatter(data: memoryview, room: Room) -> None:
    """Copy a block into the engine's memory."""
    for piece, part in _beside(data, room):
        piece[:] = part


def _gather(room: Room, data: memoryview) -> None:
    """Copy the engine's memory into a block."""
    for piece, part in _beside(data, room):
        part[:] = piece
