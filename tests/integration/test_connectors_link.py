"""The connectors' thread beside a pool of processes, with a piece of memory in an engine's place.

Oracle: the bytes of the other engine's memory. Cannot see: engines; `tests/engines` has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from agents_harness import running_agents
from hostagent_harness import MIB
from kvcast.hostagent.client import Client
from kvcast.hostagent.connectors import checks
from kvcast.hostagent.connectors.agent_link import TELL_S
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.link import Link, LinkOptions, Turns
from kvcast.hostagent.connectors.loads import Ended, LoadTable, OpenLoad
from kvcast.hostagent.connectors.naming import (
    HASHING_KEY,
    NamespaceName,
    hashing_facts,
    keys_of,
)
from kvcast.hostagent.connectors.planner import Load, Lookup, Save
from kvcast.hostagent.connectors.weighing import Weighed
from patience import PATIENCE_S
from pool_harness import running_pool

NAME = NamespaceName("tests", "model", "1", "layout")
PARTS = (5000, 3000, 70_000)
PROBE = 1
BLOCKS = 40


class Memory:
    """An engine's memory: each block's parts as bytes."""

    part_bytes = PARTS
    cache_group = (0, 0, 1)
    null_block = 0

    def __init__(self, seed: int | None) -> None:
        system = random.Random(seed)
        self.parts = [
            [bytearray(b"" if seed is None else system.randbytes(size)) for size in PARTS]
            for _ in range(BLOCKS)
        ]
        self.slow_s = 0.0

    def write(self, part: int, block_id: int, data: memoryview) -> None:
        assert block_id != self.null_block
        assert len(data) == PARTS[part]
        time.sleep(self.slow_s)
        self.parts[block_id][part][:] = data

    def read(self, part: int, block_id: int, room: memoryview) -> None:
        assert block_id != self.null_block
        room[:] = self.parts[block_id][part]

    def settle(self) -> None:
        pass

    def use_arena(self, arena: memoryview) -> None:
        self.arena = arena


def hashes(label: str, count: int) -> tuple[bytes, ...]:
    system = random.Random(label)
    return tuple(system.randbytes(32) for _ in range(count))


class Node:
    """A link of one node, and calls that wait."""

    def __init__(self, socket: Path | str, **options: Any) -> None:
        self.counters = Counters()
        self.link = Link(LinkOptions(str(socket), "test", **options), self.counters)
        self.link.use(NAME)
        self.table = LoadTable()

    def held(
        self, chain: tuple[bytes, ...], left_s: float = 10.0, *, awaited: bool = False
    ) -> int | None:
        answers: list[int | None] = []
        heard = threading.Event()

        def answered(held: int | None) -> None:
            answers.append(held)
            heard.set()

        lookup = Lookup("r", 1, chain, 0, left_s, awaited=awaited)
        self.link.look_up(lookup, len(PARTS), PROBE, answered)
        assert heard.wait(left_s + 10)
        return answers[0]

    def wait_for_part(self, chain: tuple[bytes, ...], part: int) -> None:
        """Wait until a part of all blocks can be found."""
        end = time.monotonic() + 60
        answers: list[int | None] = [None]
        heard = threading.Event()

        def answered(held: int | None) -> None:
            answers.append(held)
            heard.set()

        while answers[-1] != len(chain):
            assert time.monotonic() < end
            heard.clear()
            lookup = Lookup("r", 1, chain, 0, 10.0)
            self.link.look_up(lookup, len(PARTS), part, answered)
            assert heard.wait(20)

    def save(
        self,
        chain: tuple[bytes, ...],
        memory: Memory,
        ids: Any,
        left_s: float = 20.0,
        *,
        first: int = 0,
        before: bytes = b"",
    ) -> int:
        """How many blocks, from the first, the pool is said to have taken."""
        ended = threading.Event()
        taken: list[int] = []

        def end(blocks: int) -> None:
            taken.append(blocks)
            ended.set()

        save = Save(1, "r", first, chain, ids, left_s, before)
        saving = self.link.save(save, memory, PROBE, end)
        saving.computed(range(len(PARTS)), lambda: None)
        assert ended.wait(left_s + 10)
        return taken[0]

    def load(
        self,
        chain: tuple[bytes, ...],
        memory: Memory,
        ids: Any,
        left_s: float = 20.0,
        *,
        first: int = 0,
        before: bytes = b"",
    ) -> Ended:
        load = Load("r", 1, first, chain, ids, left_s, before=before)
        began = time.monotonic()
        self.link.load(load, self.table, memory)
        while not (reports := self.table.take(time.monotonic())):
            assert time.monotonic() < began + left_s + 10
            self.table.wait(0.05)
        return reports[0]


IDS = ((3, 4, 5, 6), (7, 8, 9, 10))
"""Four blocks, in each of the two cache groups."""


def of(memory: Memory, ids: Any = IDS) -> list[list[bytes]]:
    return [
        [bytes(memory.parts[ids[group][at]][part]) for part, group in enumerate((0, 0, 1))]
        for at in range(len(ids[0]))
    ]


@pytest.fixture(params=[0, 2], ids=["checks here", "checks in threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """By how many threads of a link blocks are checked, however small."""
    count: int = request.param
    monkeypatch.setattr(checks, "THREADS", count)
    monkeypatch.setattr(checks, "LEAST_BYTES", 0)
    return count


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(socket: Path | str, **options: Any) -> Node:
        made.append(Node(socket, **options))
        return made[-1]

    yield make
    for node in made:
        node.link.close()


async def test_what_one_saves_another_loads_elsewhere_in_its_memory(
    tmp_path: Path, nodes: Callable[..., Node], threads: int
) -> None:
    async with running_agents(tmp_path, 3) as pool:

        def play() -> None:
            one, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            chain, mine, theirs = hashes("a", 4), Memory(1), Memory(None)
            assert one.held(chain) == 0
            assert one.save(chain, mine, IDS) == 4
            assert other.held((*chain, *hashes("b", 3))) == 4
            elsewhere = ((30, 31, 32, 33), (20, 21, 22, 23))
            ended = other.load(chain, theirs, elsewhere)
            assert (ended.came, ended.reason) == (4, "")
            assert of(theirs, elsewhere) == of(mine)
            assert other.counters.take()["load_bytes"] == 4 * sum(PARTS)
            assert one.counters.take()["save_blocks"] == 4
            # A block that is out of a sliding window is neither saved nor loaded.
            window = ((3, 4, 5, 6), (0, 0, 9, 10))
            chain = hashes("window", 4)
            one.save(chain, mine, window)
            theirs = Memory(None)
            assert other.load(chain, theirs, window).came == 4
            assert theirs.parts[7][2] == b""
            assert theirs.parts[9][2] == mine.parts[9][2]

        await asyncio.to_thread(play)


async def test_an_engines_memory_hears_where_blocks_lie_before_there_is_any(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 1) as pool:

        def play() -> None:
            node, memory, other = nodes(pool.sockets["node-1"]), Memory(1), Memory(None)
            node.link.prepare(memory)
            assert node.link.node_id() == "node-1"  # by the same thread, and so afterwards
            arena = memory.arena
            node.save(hashes("a", 2), memory, IDS)
            node.load(hashes("a", 2), other, IDS)
            assert memory.arena is other.arena is arena
            assert bytes(memory.parts[IDS[1][1]][2]) in bytes(arena)

        await asyncio.to_thread(play)


async def test_parts_reach_the_pool_as_their_layers_are_computed_and_the_probe_last(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2) as pool:

        def play() -> None:
            one, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            chain, mine = hashes("a", 4), Memory(1)
            copied = threading.Event()
            saving = one.link.save(
                Save(1, "r", 0, chain, IDS, 60.0), mine, PROBE, lambda _: copied.set()
            )
            parts: list[int] = []
            for part, label in ((1, "the probe"), (0, "first"), (2, "last")):
                assert not copied.is_set(), label
                saving.computed([part], lambda part=part: parts.append(part))  # type: ignore[misc]
                if part == 0:
                    other.wait_for_part(chain, 0)
                    assert other.held(chain) == 0, "not before all of a block is there"
                    assert other.counters.take().get("load_bytes", 0) == 0
            assert copied.wait(60)
            assert parts == [1, 0, 2]
            assert other.held(chain) == 4
            theirs = Memory(None)
            assert other.load(chain, theirs, IDS).came == 4
            assert of(theirs) == of(mine)
            assert one.counters.take()["save_blocks"] == 4
            # A save that is never computed as a whole ends with its time, and is not found.
            chain = hashes("b", 4)
            copied.clear()
            one.link.save(
                Save(2, "r", 0, chain, IDS, 0.5), mine, PROBE, lambda _: copied.set()
            ).computed([0, PROBE], lambda: None)
            assert copied.wait(60)
            assert other.held(chain) == 0
            assert one.counters.take()["save_failures|reason=deadline"] == 4

        await asyncio.to_thread(play)


async def test_parts_are_fetched_while_another_engine_computes_the_rest(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2, replicas=0) as pool:

        def play() -> None:
            one, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            other.link.use(NAME, prefetch=True)
            chain, mine = hashes("a", 4), Memory(1)
            copied = threading.Event()
            saving = one.link.save(
                Save(1, "r", 0, chain, IDS, 60.0), mine, PROBE, lambda _: copied.set()
            )
            saving.computed([0], lambda: None)
            other.wait_for_part(chain, 0)
            assert other.held(chain, awaited=True) == 0
            end = time.monotonic() + 60
            with Client(str(pool.sockets["node-2"])) as client:
                namespace = client.namespace(NAME.tenant, NAME.model, NAME.version, NAME.layout)
                keys = [keys_of(block, len(PARTS))[0] for block in chain]
                while len(client.describe(namespace, keys).held) < 4:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            saving.computed(range(len(PARTS)), lambda: None)
            assert copied.wait(60)
            theirs = Memory(None)
            assert other.load(chain, theirs, IDS).came == 4
            assert of(theirs) == of(mine)

        await asyncio.to_thread(play)


async def test_a_load_by_layers_brings_the_first_layers_first_and_waits_no_longer_than_it_may(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):

        def play() -> None:
            one = nodes(pool.sockets["node-1"])
            other = nodes(pool.sockets["node-2"], window_bytes=4 * PARTS[0])
            chain, mine, theirs = hashes("a", 4), Memory(1), Memory(None)
            one.save(chain, mine, IDS)
            load = Load("r", 1, 0, chain, IDS, 60.0, by_layers=True)
            opened = other.link.load(load, other.table, theirs)
            for part, group in enumerate((0, 0, 1)):
                assert opened.wait_for(part, 60.0)
                for at, block_id in enumerate(IDS[group]):
                    assert theirs.parts[block_id][part] == mine.parts[block_id][part], (part, at)
            assert other.table.take(time.monotonic()) == []
            other.table.conclude(opened, "not_awaited")
            [ended] = other.table.take(time.monotonic())
            assert (ended.came, ended.reason) == (4, "")

            # What is missing costs no more than the time that a load has.
            pool.pause("node-2")
            began = time.monotonic()
            load = Load("r", 2, 0, hashes("b", 4), IDS, 0.5, by_layers=True)
            opened = other.link.load(load, other.table, theirs)
            assert opened.wait_for(0, 60.0)  # until it is stopped
            assert time.monotonic() - began < 30
            for part in (1, 2):
                assert opened.wait_for(part, 0.0)
            other.table.conclude(opened, "not_awaited")
            [ended] = other.table.take(time.monotonic())
            assert (ended.came, ended.reason) == (0, "deadline")
            pool.resume("node-2")

        await asyncio.to_thread(play)


@pytest.mark.parametrize("by_layers", [False, True])
async def test_what_is_fetched_ahead_comes_in_the_order_in_which_it_is_loaded(
    tmp_path: Path,
    nodes: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    by_layers: bool,
) -> None:
    async with running_agents(tmp_path, 1) as pool:
        node = nodes(pool.sockets["node-1"])
        chain = hashes("a", 4)
        await asyncio.to_thread(node.save, chain, Memory(1), IDS)
        node.link.use(NAME, prefetch=True)
        fetched: list[bytes] = []
        told = threading.Event()

        async def prefetch(keys: Any, *_: Any) -> None:
            fetched.extend(keys)
            told.set()

        monkeypatch.setattr(node.link, "_prefetch", prefetch)
        lookup = Lookup("r", 1, chain, 1, 10.0, prefetch_until=3)
        node.link.look_up(lookup, len(PARTS), PROBE, lambda _: None, by_layers=by_layers)
        assert await asyncio.to_thread(told.wait, 20)
        blocks = [keys_of(one, len(PARTS)) for one in chain[1:3]]
        by_block = [key for keys in blocks for key in keys]
        by_layer = [keys[part] for part in range(len(PARTS)) for keys in blocks]
        assert fetched == (by_layer if by_layers else by_block)


class Broken(Memory):
    """Of which copies fail."""

    def settle(self) -> None:
        raise RuntimeError("the device is lost")


async def test_a_save_that_breaks_off_lets_go_of_the_engines_memory(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 1) as pool:

        def play() -> None:
            node = nodes(pool.sockets["node-1"])
            assert node.save(hashes("a", 4), Broken(1), IDS) == 0
            assert node.held(hashes("a", 4)) == 0
            node.link.close()
            assert node.save(hashes("b", 4), Memory(1), IDS) == 0

        await asyncio.to_thread(play)


async def test_what_the_engine_had_begun_goes_before_what_is_loaded(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 1) as pool:

        def play() -> None:
            node = nodes(pool.sockets["node-1"])
            chain, theirs = hashes("a", 4), Memory(None)
            node.save(chain, Memory(1), IDS)
            written: list[bool] = []

            def ready() -> None:
                written.append(any(map(any, theirs.parts)))

            load = Load("r", 1, 0, chain, IDS, 60.0)
            node.link.load(load, node.table, theirs, ready)
            while not node.table.take(time.monotonic()):
                node.table.wait(1.0)
            assert written == [False]
            assert of(theirs) == of(Memory(1))

        await asyncio.to_thread(play)


async def test_a_prefix_comes_up_to_its_first_gap(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2) as pool:

        def play() -> None:
            one, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            chain, mine, theirs = hashes("a", 4), Memory(1), Memory(None)
            one.save(chain[:2], mine, tuple(ids[:2] for ids in IDS))
            ended = other.load(chain, theirs, IDS)
            assert (ended.came, ended.reason) == (2, "not_found")
            assert ended.bad_block_ids == {5, 6, 9, 10}
            assert of(theirs)[:2] == of(mine)[:2]

        await asyncio.to_thread(play)


async def test_more_than_the_arena_takes_at_once_goes_in_windows(
    tmp_path: Path, nodes: Callable[..., Node], threads: int
) -> None:
    async with running_agents(tmp_path, 2, arena_bytes=6 * MIB) as pool:

        def play() -> None:
            one = nodes(pool.sockets["node-1"], window_bytes=200_000)
            other = nodes(pool.sockets["node-2"], window_bytes=200_000)
            mine, theirs = Memory(1), Memory(None)
            ids = (tuple(range(1, 31)), tuple(range(1, 31)))
            chain = hashes("a", 30)
            one.save(chain, mine, ids)
            assert other.load(chain, theirs, ids).came == 30
            assert of(theirs, ids) == of(mine, ids)

        await asyncio.to_thread(play)


async def test_without_an_agent_everything_ends_and_its_return_is_noticed(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):
        node = nodes(pool.sockets["node-1"])
        chain, memory = hashes("a", 4), Memory(1)
        await asyncio.to_thread(node.save, chain, memory, IDS)
        await pool.kill("node-1")

        def without() -> None:
            # What the agent held can be looked up until its end is noticed.
            assert node.held(hashes("b", 4), 1.0) is None
            ended = node.load(chain, Memory(None), IDS, 1.0)
            assert ended.came == 0
            assert ended.reason in ("unavailable", "deadline")
            assert node.save(chain, memory, IDS, 1.0) == 0
            counts = node.counters.take()
            assert sum(n for name, n in counts.items() if name.startswith("save_failures")) == 4

        await asyncio.to_thread(without)
        await pool.restart("node-1")
        await pool.wait_programmed(30)
        await asyncio.sleep(1.2)  # after a connection that failed none is tried for a second
        assert await asyncio.to_thread(node.held, chain, 10.0) is not None


async def test_an_agent_that_hangs_costs_no_more_than_the_deadline(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):
        node = nodes(pool.sockets["node-1"])
        memory = Memory(1)
        await asyncio.to_thread(node.save, hashes("a", 4), memory, IDS)
        pool.pause("node-1")

        def hung() -> None:
            assert node.held(hashes("b", 4), 0.3) is None
            ended = node.load(hashes("c", 4), Memory(None), IDS, 0.5)
            assert (ended.came, ended.reason) == (0, "deadline")

        await asyncio.to_thread(hung)
        pool.resume("node-1")
        assert await asyncio.to_thread(node.held, hashes("a", 4), 10.0) == 4


async def test_a_load_of_which_nothing_is_wanted_any_more_ends_at_once(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):
        node = nodes(pool.sockets["node-1"])
        chain = hashes("a", 4)
        await asyncio.to_thread(node.save, chain, Memory(1), IDS)
        end = time.monotonic() + 10
        while node.link.near(chain, len(PARTS), PROBE) != 4:  # the index hears a moment later
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert node.link.near(hashes("b", 4), len(PARTS), PROBE) == 0
        pool.pause("node-1")

        def cut_short() -> None:
            opened = node.link.load(
                Load("r", 1, 0, hashes("b", 4), IDS, 600.0), node.table, Memory(None)
            )
            assert node.table.progress() == {"r": (1, 0)}
            assert node.table.take(time.monotonic()) == []
            node.table.cut(1, 0)
            [ended] = node.table.take(time.monotonic())
            assert (ended.came, ended.reason) == (0, "slower")
            assert opened.ended

        await asyncio.to_thread(cut_short)
        pool.resume("node-1")
        # Others' turns come all the same.
        ended = await asyncio.to_thread(node.load, chain, Memory(None), IDS)
        assert (ended.came, ended.reason) == (4, "")


@pytest.mark.parametrize("by_whom", ["scheduler", "link"])
async def test_of_a_load_that_ends_early_what_came_is_counted_and_no_more(
    tmp_path: Path, nodes: Callable[..., Node], by_whom: str
) -> None:
    async with running_agents(tmp_path, 1) as pool:
        node = nodes(pool.sockets["node-1"])
        chain = hashes("a", 4)
        await asyncio.to_thread(node.save, chain, Memory(1), IDS)
        node.counters.take()
        meter = node.table.meter
        begun = False

        def came(now: float, blocks: float, *, near: bool) -> None:
            nonlocal begun
            begun = True
            # Two turns are under way, and either may come first.
            if any(whole for _, whole in node.table.progress().values()):
                if by_whom == "link":
                    raise TimeoutError
                node.table.take(now + 600.0)

        node.table.meter = Mock(opened=meter.opened, closed=meter.closed, came=came)

        def load() -> OpenLoad:
            load = Load("r", 1, 0, chain, IDS, 60.0)
            opened = node.link.load(load, node.table, Memory(None))
            end = time.monotonic() + PATIENCE_S
            while node.link._tasks or not begun:
                assert time.monotonic() < end
                time.sleep(0.01)
            return opened

        opened = await asyncio.to_thread(load)
        whole = opened.whole
        assert 0 < whole < 4
        counts = node.counters.take()
        assert sum(n for name, n in counts.items() if name.startswith("load_blocks")) == whole
        assert counts["load_bytes"] == whole * sum(PARTS)


async def test_loads_on_a_slow_link_take_turns_and_on_a_dead_one_nobody_waits_for_ever() -> None:
    turns = Turns()
    order: list[int] = []

    async def load(number: int, *, comes: bool) -> None:
        await turns.begin(4, 8)
        order.append(number)
        if comes:
            turns.end(4)

    await load(1, comes=False)
    await load(2, comes=False)
    waiting = [asyncio.create_task(load(number, comes=False)) for number in (3, 4)]
    await asyncio.sleep(0)
    assert order == [1, 2]
    turns.end(4)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await waiting[0]
    assert order == [1, 2, 3]
    await waiting[1]  # after its patience
    assert order == [1, 2, 3, 4]
    cancelled = asyncio.create_task(load(5, comes=False))
    await asyncio.sleep(0)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    for _ in range(4):
        turns.end(4)
    await load(6, comes=True)
    assert order[-1] == 6


async def test_a_load_that_is_given_up_as_its_turn_comes_leaves_it_to_the_next() -> None:
    turns = Turns()
    await turns.begin(4, 4)
    first, second = (asyncio.create_task(turns.begin(4, 4)) for _ in range(2))
    await asyncio.sleep(0)
    turns.end(4)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert second.done(), "without its patience"


async def test_nothing_is_written_after_the_report(
    tmp_path: Path, nodes: Callable[..., Node], threads: int
) -> None:
    async with running_agents(tmp_path, 2) as pool:

        def play() -> None:
            node = nodes(pool.sockets["node-1"])
            chain, mine, theirs = hashes("a", 4), Memory(1), Memory(None)
            node.save(chain, mine, IDS)
            theirs.slow_s = 0.2
            ended = node.load(chain, theirs, IDS, 0.5)
            assert ended.reason == "deadline"
            before = of(theirs)
            time.sleep(0.8)
            assert of(theirs) == before
            assert before[: ended.came] == of(mine)[: ended.came]

        await asyncio.to_thread(play)


async def test_engines_that_hash_otherwise_are_told(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2) as pool:

        def play() -> list[bytes]:
            told: list[bytes] = []
            mine = hashing_facts("sha256", "1")
            first, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            end = time.monotonic() + 2 * PATIENCE_S
            with Client(str(pool.sockets["node-2"])) as client:
                number = client.namespace(NAME.tenant, NAME.model, NAME.version, NAME.layout)
                while not client.exists(number, [HASHING_KEY]) and time.monotonic() < end:
                    first.link.agree(mine, told.append)  # both leave a word where there is none
                    time.sleep(0.3)
            while not told and time.monotonic() < end:
                other.link.agree(mine, told.append)
                other.link.agree(hashing_facts("sha256", "2"), told.append)
                time.sleep(0.3)
            return told

        told = await asyncio.to_thread(play)
        assert set(told) == {hashing_facts("sha256", "1")}


async def test_ranks_that_hold_the_same_bytes_read_as_a_group(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 4, replicas=0, arena_bytes=64 * MIB) as (pool, _):

        def play() -> None:
            names = ["node-2", "node-3", "node-4"]
            writer, mine = nodes(pool.sockets["node-1"]), Memory(1)
            ids = (tuple(range(1, 31)), tuple(range(1, 31)))
            chain = hashes("group", 30)
            writer.save(chain, mine, ids)
            ranks = [nodes(pool.sockets[name]) for name in names]
            memories = [Memory(None) for _ in ranks]
            for rank in ranks:
                rank.link.use(NAME, names)
                assert rank.held(chain) == 30
            for rank, memory in zip(ranks, memories, strict=True):
                load = Load("r", 1, 0, chain, ids, 20.0)
                rank.link.load(load, rank.table, memory)
            for rank, memory in zip(ranks, memories, strict=True):
                while not (reports := rank.table.take(time.monotonic())):
                    rank.table.wait(0.1)
                assert (reports[0].came, reports[0].reason) == (30, "")
                assert of(memory, ids) == of(mine, ids)
            assert sum(rank.counters.take().get("load_blocks|tier=shared", 0) for rank in ranks) > 0

        await asyncio.to_thread(play)


async def test_bytes_that_changed_in_the_arena_are_not_loaded_and_make_room_for_right_ones(
    tmp_path: Path, nodes: Callable[..., Node], threads: int
) -> None:
    async with running_agents(tmp_path, 1, replicas=0) as pool:

        def play() -> None:
            node, mine, theirs = nodes(pool.sockets["node-1"]), Memory(1), Memory(None)
            chain = hashes("a", 4)
            node.save(chain, mine, IDS)
            with (tmp_path / "1.arena").open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
                at = arena.find(bytes(mine.parts[IDS[1][2]][2]))
                assert at >= 0
                arena[at + 100] ^= 1
            ended = node.load(chain, theirs, IDS)
            assert (ended.came, ended.reason) == (2, "corrupt")
            assert of(theirs)[:2] == of(mine)[:2]
            assert theirs.parts[IDS[1][2]][2] == b""
            node.save(chain[2:], mine, tuple(ids[2:] for ids in IDS))
            assert node.load(chain, theirs, IDS).came == 4
            assert of(theirs) == of(mine)

        await asyncio.to_thread(play)


async def test_an_agent_is_told_what_became_of_prefixes_also_of_what_it_could_not_be_told(
    tmp_path: Path,
) -> None:
    async with running_agents(tmp_path, 1) as pool:
        socket = pool.sockets["node-1"]

        def play() -> None:
            away = Node(tmp_path / "nobody.sock")
            node = Node(socket)
            with Client(str(socket)) as client:

                def told(count: int) -> dict[str, float]:
                    end = time.monotonic() + 30
                    while (stats := client.stats())["prefixes_whole_total"] < count:
                        assert time.monotonic() < end
                        time.sleep(0.05)
                    return stats

                for _ in range(3):
                    node.link.tell(Weighed(whole=2, part=1), (100.0, 0.0))
                node.link.tell(Weighed(), (200.0, 50.0))
                stats = told(6)
                assert stats["prefixes_part_total"] == 3
                assert stats["prefixes_load_tokens_per_s"] == 200.0
                assert stats["prefixes_compute_tokens_per_s"] == 50.0
                away.link.tell(Weighed(whole=1, computed=1), (0.0, 0.0))
                assert away.link.node_id() == ""  # nobody is there yet
                time.sleep(1.5 * TELL_S)
                (tmp_path / "nobody.sock").symlink_to(socket)
                end = time.monotonic() + 30
                while not away.link.node_id():  # it tries again a second later
                    assert time.monotonic() < end
                    time.sleep(0.05)
                away.link.tell(Weighed(whole=1), (0.0, 0.0))
                assert told(8)["prefixes_computed_total"] == 1
            for one in (node, away):
                one.link.close()

        await asyncio.to_thread(play)
