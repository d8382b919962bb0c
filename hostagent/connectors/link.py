"""The link to the agent for a connector that plans an engine's loads and saves (`vllm`). Engines
that name each block themselves have `block_link`.

Owns: the reader group's number, and how a chain is looked up, blocks are read into an engine's
memory and written from there. Must not know: engines; what is to be done comes from `planner` and
`loads`, the engine's memory is behind `EngineMemory`; when there is a connection (`agent_link`).

Work is bounded by those who ask for it (`planner`), and each piece by its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvcast.hostagent.client import (
    AsyncClient,
    Block,
    KvcastError,
    PutError,
)
from kvcast.hostagent.client.conversation import Ack, Prefix
from kvcast.hostagent.connectors.agent_link import (
    ARENA_SHARE,
    NOT_NEAR,
    SAVES_AT_ONCE,
    AgentLink,
    UnreachableError,
)
from kvcast.hostagent.connectors.checks import Checkers, Checks
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.loads import LoadTable, OpenLoad
from kvcast.hostagent.connectors.naming import NamespaceName, keys_of, places_of
from kvcast.hostagent.connectors.planner import Load, Lookup, Save
from kvcast.hostagent.connectors.weighing import Meter, Window
from kvcast.protocol.messages.local import MAX_KEYS, TIERS

PREFETCH_KEYS: Final = 16_384
"""Keys of one chain that are fetched ahead, at most."""
EXISTS_S: Final = 0.25
"""How long the question may take which parts of a block are there that is being saved."""
TURN_S: Final = 0.5
_HOME: Final[Ack] = "home"

_log = logging.getLogger("kvcast.connector")


class EngineMemory(Protocol):
    """The engine's blocks, by id, in parts: groups of layers of each. Bytes are opaque."""

    @property
    def part_bytes(self) -> Sequence[int]:
        """Size of each part of a block, in bytes."""

    @property
    def cache_group(self) -> Sequence[int]:
        """To which of the engine's cache groups each part belongs."""

    @property
    def null_block(self) -> int:
        """The id that stands for no block: there is nothing to read or to write."""

    def write(self, part: int, block_id: int, data: memoryview) -> None:
        """Copy `data`, shape (part_bytes[part],), format "B", into a block of the engine."""

    def read(self, part: int, block_id: int, room: memoryview) -> None:
        """Copy a part of a block of the engine into `room`, as for `write`."""

    def settle(self) -> None:
        """Wait until all copies that were begun have ended."""

    def use_arena(self, arena: memoryview) -> None:
        """`data` and `room` lie in there from now on; said before every transfer, so it must not
        take long. Shape (arena_bytes,), format "B"."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Times in seconds, sizes in bytes, as in `ConnectorOptions`."""

    socket: str
    name: str
    """Of this client, for the agent's log."""
    window_bytes: int = 64 << 20
    verify: bool = True
    ack: Ack = "home"
    weigh: bool = True
    """Whether a load may be cut short: then little is asked for at once on a slow link."""


class OpenSave:
    """A save whose parts are computed one after another. `soon` has a call made in the thread that
    saves; `computed` may be called in any."""

    def __init__(self, parts: int, soon: Callable[[Callable[[], None]], None]) -> None:
        self.parts = parts
        self.saved = 0
        """Blocks that are whole in the pool, from the first."""
        self._soon = soon
        self._lock = threading.Lock()
        self._event = asyncio.Event()
        self._computed: set[int] = set()
        self._waits: list[Callable[[], None]] = []

    def computed(self, parts: Iterable[int], ready: Callable[[], None]) -> None:
        """These parts' layers are computed; `ready` waits until their bytes are there."""
        with self._lock:
            self._computed.update(parts)
            self._waits.append(ready)
        self._soon(self._event.set)

    async def some_computed(self, left: set[int], last: int) -> set[int]:
        """Those of the parts `left` that are computed; waits for the first of them. `last`: the
        part that is to come with the last of the others."""
        while True:
            self._event.clear()
            with self._lock:
                some = self._computed & left
                if some != left:
                    some.discard(last)
                waits, self._waits = self._waits, []
            for ready in waits:
                ready()
            if some:
                return some
            await self._event.wait()


class Turns:
    """In which order loads ask for their parts: first come, first served, as many as `window` says
    at once. Who has waited for `TURN_S` asks all the same: what is under way may never come."""

    def __init__(self) -> None:
        self.window = Window()
        self._under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def begin(self, parts: int, most: int) -> None:
        """Wait until so many parts may be asked for, with at most `most` at once."""
        if self._waiting or (self._under_way and self._under_way + parts > most):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await asyncio.wait([turn], timeout=TURN_S)
            except asyncio.CancelledError:
                if turn.done():  # it had just come: the next one's
                    self._pass_on()
                raise
            finally:
                turn.cancel()
        self._under_way += parts

    def end(self, parts: int, _: object = None) -> None:
        """They have come, or are not waited for any more."""
        self._under_way -= parts
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break


class Link(AgentLink):
    """One worker's or scheduler's way to the pool."""

    def __init__(self, options: LinkOptions, counters: Counters) -> None:
        super().__init__(options.socket, options.name)
        self._options = options
        self._counters = counters
        self._saves: asyncio.Semaphore | None = None
        self._turns = Turns()
        self._checkers = Checkers()
        self._namespace_name: NamespaceName | None = None
        self._nodes: tuple[str, ...] = ()
        self._group = 0
        self._prefetches = False

    def use(
        self, namespace: NamespaceName, nodes: Sequence[str] = (), *, prefetch: bool = False
    ) -> None:
        """Which namespace is meant. `nodes`: those that read the same blocks at the same time, as a
        reader group; none or one: no group. `prefetch`: whether what is looked up is fetched, too;
        it would come twice where a group reads it."""
        self._namespace_name = namespace
        self._prefetches = prefetch
        self._nodes = tuple(dict.fromkeys(nodes)) if len(set(nodes)) > 1 else ()
        self._group = 0

    def prepare(self, memory: EngineMemory) -> None:
        """Say to an engine's memory where blocks lie, before there is anything to copy."""

        async def say() -> None:
            with contextlib.suppress(KvcastError, UnreachableError):
                memory.use_arena((await self._connected()).arena)

        self._do(say)

    def close(self, timeout_s: float = 2.0) -> None:
        """As `AgentLink.close`."""
        super().close(timeout_s)
        self._checkers.close()

    async def _ready(self) -> tuple[AsyncClient, int]:
        """A client, and the namespace's number."""
        client = await self._connected()
        name = self._namespace_name
        assert name is not None, "use() comes first"
        known = name in self._numbers
        number = await self._number(client, name)
        if self._nodes and not (known and self._group):
            self._group = await client.group(number, list(self._nodes))
        return client, number

    # --- lookups --------------------------------------------------------------------------------

    def look_up(
        self,
        lookup: Lookup,
        groups: int,
        probe: int,
        answered: Callable[[int | None], None],
        *,
        by_layers: bool = False,
    ) -> None:
        """Find out how many blocks of a chain the pool holds, and have the agent fetch what the
        engine lacks, the first layers of all blocks first if it will load `by_layers`. `probe`: the
        part whose presence stands for a block's. `answered` is called in the thread, with None
        where nobody said."""

        async def ask() -> None:
            held: int | None = None
            try:
                async with asyncio.timeout(lookup.left_s):
                    with self._remembered():
                        client, namespace = await self._ready()
                        keys = [keys_of(one, groups)[probe] for one in lookup.hashes]
                        held = await client.exists(namespace, keys, lookup.left_s)
            except (KvcastError, UnreachableError, TimeoutError) as error:
                _log.debug("a lookup has failed: %r", error)
            finally:
                answered(held)
            if held is not None and self._prefetches:
                until = held if lookup.prefetch_until is None else lookup.prefetch_until
                hashes = lookup.hashes[lookup.prefetch_from : min(held, until)]
                blocks = [keys_of(one, groups) for one in hashes]
                rows = zip(*blocks, strict=True) if by_layers else blocks
                keys = [key for row in rows for key in row]
                with contextlib.suppress(KvcastError, UnreachableError):
                    if lookup.awaited:
                        keys += await self._parts_of(lookup.hashes[held:], groups, probe)
                    await self._prefetch(keys[:PREFETCH_KEYS], lookup, groups)

        self._do(ask)

    def near(self, hashes: Sequence[bytes], groups: int, probe: int) -> int:
        """How many blocks of a chain this node's memory holds, from the first; 0 where that is not
        known just now. `probe` as in `look_up`. In any thread."""
        client, name = self._client, self._namespace_name
        number = self._numbers.get(name) if name is not None else None
        if client is None or number is None or not hashes:
            return 0
        return client.near(number, [keys_of(one, groups)[probe] for one in hashes])

    async def _parts_of(self, hashes: Sequence[bytes], groups: int, probe: int) -> list[bytes]:
        """Keys of blocks that are being saved layer by layer, as far as they are there. Those of
        earlier layers come first, so where a group of layers is missing, the next is, too."""
        client, namespace = await self._ready()
        there: list[bytes] = []
        chains = [keys_of(one, groups) for one in hashes]
        for group in range(groups):
            if group == probe:
                continue
            count = await client.exists(namespace, [keys[group] for keys in chains], EXISTS_S)
            if not count:
                break
            there += [keys[group] for keys in chains[:count]]
        return there

    async def _prefetch(self, keys: Sequence[bytes], lookup: Lookup, groups: int) -> None:
        """Have the agent fetch these; with several readers, as their group."""
        if keys:
            client, namespace = await self._ready()
            readers = lookup.readers
            prefix: Prefix = ()
            if client.of_prefixes(namespace):
                prefix = places_of(b"", lookup.hashes, 0, groups)
            if len(readers) < 2 or client.node_id not in readers:
                await client.prefetch(namespace, keys, prefix=prefix)
                return
            group = await client.group(namespace, list(readers))
            some = dict(enumerate(keys))
            asked, expected = await self._askers(client, namespace, some, readers)
            for theirs, expect in ((asked, False), (expected, True)):
                if theirs:
                    await client.prefetch(
                        *(namespace, list(theirs.values())),
                        group=group,
                        expect=expect,
                        prefix=prefix,
                    )

    def agree(self, facts: bytes, differs: Callable[[bytes], None]) -> None:
        """As `compare`, in the namespace that is used."""
        assert self._namespace_name is not None, "use() comes first"
        self.compare(self._namespace_name, facts, differs)

    # --- loads ----------------------------------------------------------------------------------

    def load(
        self,
        load: Load,
        table: LoadTable,
        memory: EngineMemory,
        ready: Callable[[], None] = lambda: None,
    ) -> OpenLoad:
        """Bring blocks into the engine's memory; the report is in `table`. `ready` is called before
        the first copy, and has the copies wait for what the engine had begun to do there."""
        opened = table.begin(load, len(memory.part_bytes), time.monotonic())

        async def bring() -> None:
            reason = "unavailable"
            try:
                async with asyncio.timeout_at(opened.deadline):
                    ready()
                    with self._remembered():
                        await self._bring(opened, memory, table.meter)
                reason = ""
            except TimeoutError:
                reason = "deadline"
            except (KvcastError, UnreachableError) as error:
                _log.debug("a load has failed: %r", error)
            finally:
                try:
                    memory.settle()
                finally:
                    self._counters.add_load_time(time.monotonic() - opened.started_at)
                    table.end(opened, reason)

        if not self._do(bring):
            table.end(opened, "unavailable")
        return opened

    async def _bring(self, opened: OpenLoad, memory: EngineMemory, meter: Meter) -> None:
        client, _ = await self._ready()
        memory.use_arena(client.arena)
        groups = opened.groups
        keys: dict[int, bytes] = {}
        under_way: set[asyncio.Task[None]] = set()
        for index, one in enumerate(opened.load.hashes):
            for group, key in enumerate(keys_of(one, groups)):
                part = index * groups + group
                if self._block_id(opened.load.block_ids, memory, part) == memory.null_block:
                    opened.write(part, lambda: None)
                else:
                    keys[part] = key
        parts = list(keys)
        if opened.load.by_layers:
            parts.sort(key=lambda part: part % groups)
        tiers = [0] * len(opened.load.hashes)
        room = self._window(client, memory)
        turns = self._turns if self._options.weigh else Turns()
        at = 0
        try:
            while at < len(parts) and not (opened.ended or opened.complete):
                # A group's ranks ask for each other, so they ask for as much.
                most = room
                if self._options.weigh and not self._nodes:
                    most = min(room, self._turns.window.parts)
                some = {part: keys[part] for part in parts[at : at + max(1, most // 2)]}
                at += len(some)
                await turns.begin(len(some), most)
                bring = self._bring_turn(opened, memory, meter, some, tiers)
                begun = asyncio.create_task(bring)
                begun.add_done_callback(functools.partial(turns.end, len(some)))
                under_way.add(begun)
                for task in [one for one in under_way if one.done()]:
                    under_way.remove(task)
                    task.result()
            await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()
            whole = opened.whole
            for tier in tiers[:whole]:
                self._counters.add("load_blocks", tier=TIERS[tier])
            self._counters.add("load_bytes", whole * sum(memory.part_bytes))

    async def _bring_turn(
        self,
        opened: OpenLoad,
        memory: EngineMemory,
        meter: Meter,
        some: dict[int, bytes],
        tiers: list[int],
    ) -> None:
        """Bring these parts, as far as they are still wanted."""
        bringing: list[asyncio.Task[None]] = []
        began = time.monotonic()
        try:
            wanted = {part: key for part, key in some.items() if part < opened.gap}
            if not wanted or opened.ended:
                return
            client, namespace = await self._ready()
            asked, expected = await self._askers(client, namespace, wanted, self._nodes)
            bringing = [
                asyncio.create_task(
                    self._bring_some(opened, memory, meter, theirs, tiers, expect=expect)
                )
                for theirs, expect in ((asked, False), (expected, True))
                if theirs
            ]
            await asyncio.gather(*bringing)
            self._turns.window.came(len(wanted), time.monotonic() - began)
        finally:
            for task in bringing:
                task.cancel()

    async def _askers(
        self, client: AsyncClient, namespace: int, some: dict[int, bytes], nodes: Sequence[str]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Which of these parts this node of a group asks for, and which it expects since another
        does.

        For a block asks the last of the group, since the first saves, and would not ask for what
        its agent still has. Nor would the node that is the block's home: then it is the last but
        one. Without a group this one asks for all.
        """
        if len(nodes) < 2:
            return some, {}
        homes: list[str] = []
        keys = list(some.values())
        for begin in range(0, len(keys), MAX_KEYS):
            homes += (await client.describe(namespace, keys[begin : begin + MAX_KEYS])).homes
        asked: dict[int, bytes] = {}
        expected: dict[int, bytes] = {}
        for (part, key), home in zip(some.items(), homes, strict=True):
            asker = nodes[-1] if nodes[-1] != home else nodes[-2]
            (asked if client.node_id == asker else expected)[part] = key
        return asked, expected

    async def _bring_some(
        self,
        opened: OpenLoad,
        memory: EngineMemory,
        meter: Meter,
        some: dict[int, bytes],
        tiers: list[int],
        *,
        expect: bool,
    ) -> None:
        """Bring these parts; note of each block the slowest tier."""
        client, namespace = await self._ready()
        parts, keys = list(some), list(some.values())
        left_s = max(opened.deadline - time.monotonic(), 0.001)
        groups = opened.groups
        blocks = range(min(parts) // groups, max(parts) // groups + 1)
        prefix = self._prefix_of(client, namespace, opened.load, blocks, groups)
        corrupt: list[bytes] = []

        def landed(place: int, block: Block, right: bool) -> None:
            if right:
                self._copy(opened, memory, parts[place], block)
            else:
                self._counters.add("corrupt_blocks")
                opened.missed(parts[place], "corrupt")
                corrupt.append(keys[place])

        async def drop_corrupt() -> None:
            while corrupt:
                await self._drop(client, namespace, corrupt.pop())

        checks = Checks(self._checkers, landed, verify=self._options.verify)
        arrivals = client.get_each(
            *(namespace, keys, left_s), group=self._group, expect=expect, prefix=prefix
        )
        async with contextlib.aclosing(arrivals):
            with contextlib.closing(checks):
                async for place, outcome in arrivals:
                    part = parts[place]
                    if outcome.block is None:
                        opened.missed(part, outcome.reason or outcome.status)
                        if outcome.reason == "corrupt":
                            corrupt.append(keys[place])
                    else:
                        index = part // opened.groups
                        tier = TIERS.index(outcome.block.tier)
                        tiers[index] = max(tiers[index], tier)
                        meter.came(time.monotonic(), 1 / opened.groups, near=tier < NOT_NEAR)
                        if outcome.block.size_bytes == memory.part_bytes[part % opened.groups]:
                            checks.add(place, outcome.block)
                        else:
                            outcome.block.release()
                            opened.missed(part, "wrong_size")
                    await drop_corrupt()
                    if opened.ended or opened.complete:
                        break
                checks.finish()
                await drop_corrupt()

    def _copy(self, opened: OpenLoad, memory: EngineMemory, part: int, block: Block) -> None:
        """Copy a block into the engine's memory."""
        block_id = self._block_id(opened.load.block_ids, memory, part)

        def write() -> None:
            memory.write(part % opened.groups, block_id, block.data)
            memory.settle()

        opened.write(part, write)

    async def _drop(self, client: AsyncClient, namespace: int, key: bytes) -> None:
        """Have a block forgotten whose bytes are wrong, so that it can be saved again."""
        with contextlib.suppress(KvcastError):
            await client.drop(namespace, [key])

    @staticmethod
    def _block_id(block_ids: Sequence[Sequence[int]], memory: EngineMemory, part: int) -> int:
        index, group = divmod(part, len(memory.part_bytes))
        return block_ids[memory.cache_group[group]][index]

    @staticmethod
    def _prefix_of(
        client: AsyncClient, namespace: int, of: Load | Save, blocks: range, groups: int
    ) -> Prefix:
        """What is to be said of the prefix that these of its blocks are of."""
        if not client.of_prefixes(namespace):
            return ()
        before = of.hashes[blocks.start - 1] if blocks.start else of.before
        hashes = of.hashes[blocks.start : blocks.stop]
        return places_of(before, hashes, of.first + blocks.start, groups)

    def _window(self, client: AsyncClient, memory: EngineMemory) -> int:
        """How many parts to have in the arena at once."""
        room_bytes = min(self._options.window_bytes, client.arena_bytes // ARENA_SHARE)
        return max(1, room_bytes // max(memory.part_bytes))

    # --- saves ----------------------------------------------------------------------------------

    def save(
        self, save: Save, memory: EngineMemory, probe: int, ended: Callable[[int], None]
    ) -> OpenSave:
        """Put blocks of the engine into the pool, each part once its layers are said to be computed
        (`OpenSave.computed`). `probe`: as in `look_up`. `ended` is called once the engine's memory
        is not needed any more, with how many blocks, from the first, the pool has taken."""
        due = time.monotonic() + save.left_s
        opened = OpenSave(len(memory.part_bytes), self._soon)

        async def put() -> None:
            if self._saves is None:
                self._saves = asyncio.Semaphore(SAVES_AT_ONCE)
            failed = ""
            try:
                async with asyncio.timeout_at(due), self._saves:
                    with self._remembered():
                        await self._put_computed(opened, save, memory, probe)
            except TimeoutError:
                failed = "deadline"
            except PutError as error:
                failed = min(error.failed.values(), default="unavailable")
            except KvcastError as error:
                failed = error.status or "unavailable"
            except UnreachableError:
                failed = "unavailable"
            finally:
                try:
                    memory.settle()
                finally:
                    ended(opened.saved)
            self._counters.add("save_blocks", opened.saved)
            self._counters.add("save_bytes", opened.saved * sum(memory.part_bytes))
            if failed:
                self._counters.add("save_failures", len(save.hashes) - opened.saved, reason=failed)

        if not self._do(put):
            ended(0)
        return opened

    async def _put_computed(
        self, opened: OpenSave, save: Save, memory: EngineMemory, probe: int
    ) -> None:
        """Put parts as their layers are computed. The part by which blocks are looked up comes when
        all others have reached their homes."""
        left = set(range(opened.parts))
        while left:
            some = await opened.some_computed(left, probe)
            whole = some == left
            left = left - some
            client, namespace = await self._ready()
            memory.use_arena(client.arena)
            window = max(1, self._window(client, memory) // max(1, len(some)))
            for begin in range(0, len(save.hashes), window):
                blocks = range(begin, min(begin + window, len(save.hashes)))
                for parts, ack in ((some - {probe}, _HOME), (some & {probe}, self._options.ack)):
                    await self._put(client, namespace, save, memory, blocks, parts, ack)
                if whole:
                    opened.saved = blocks.stop

    async def _put(
        self,
        client: AsyncClient,
        namespace: int,
        save: Save,
        memory: EngineMemory,
        blocks: range,
        parts: set[int],
        ack: Ack,
    ) -> None:
        """Write these parts of these blocks straight into the arena, and commit them."""
        groups = len(memory.part_bytes)
        sources: dict[bytes, tuple[int, int]] = {}
        for index in blocks:
            keys = keys_of(save.hashes[index], groups)
            for part in parts:
                block_id = self._block_id(save.block_ids, memory, index * groups + part)
                if block_id != memory.null_block:
                    sources[keys[part]] = (part, block_id)
        if sources:
            sizes = {key: memory.part_bytes[part] for key, (part, _) in sources.items()}
            prefix = self._prefix_of(client, namespace, save, blocks, groups)
            with await client.reserve(namespace, sizes, prefix=prefix) as room:
                for key, view in room.views.items():
                    part, block_id = sources[key]
                    memory.read(part, block_id, view)
                memory.settle()
                await client.commit(room, ack=ack)
