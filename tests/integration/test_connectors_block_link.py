"""The link of adapters whose engines name each block, beside a pool of processes.

Oracle: the bytes that were saved. Cannot see: engines; `tests/engines` has their classes.
"""

from __future__ import annotations

import asyncio
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from agents_harness import running_agents
from hostagent_harness import MIB
from kvcast.hostagent.client import Client
from kvcast.hostagent.connectors.block_link import GAPS, BlockLink, Named, Room, _Promised
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.health import FIRST_PAUSE_S
from kvcast.hostagent.connectors.naming import NamespaceName, key_of
from kvcast.hostagent.connectors.options import StoreOptions
from kvcast.hostagent.connectors.transfers import (
    BUSY,
    CAME,
    CLOSED,
    LEFT_ALONE,
    SLOWER,
    THERE,
    Transfer,
)
from kvcast.hostagent.connectors.weighing import PROBE_BLOCKS, Pace
from pool_harness import running_pool

NAME = NamespaceName("tests", "model", "1", "layout")
OTHER = NamespaceName("tests", "model", "1", "other layout")
SIZE = 40_000


def names(label: str, count: int, namespace: NamespaceName = NAME) -> list[Named]:
    return [Named(namespace, key_of(label.encode(), bytes([at]))) for at in range(count)]


def rooms(count: int, seed: object = None, size: int = SIZE) -> list[memoryview]:
    system = random.Random(f"{seed}")
    return [
        memoryview(bytearray(size if seed is None else system.randbytes(size)))
        for _ in range(count)
    ]


class Node:
    """A link of one node, and calls that wait."""

    def __init__(self, socket: Path | str, **options: Any) -> None:
        self.counters = Counters()
        self.link = BlockLink(StoreOptions(socket=str(socket), **options), "test", self.counters)
        self.reports = 0

    def _done(self, transfer: Transfer) -> None:
        self.reports += 1

    def _wait(self, transfer: Transfer) -> list[str]:
        assert transfer.wait(30)
        assert self.reports == 1
        self.reports = 0
        return list(transfer.outcomes)

    def find(self, wanted: Sequence[Named]) -> list[str]:
        return self._wait(self.link.find(wanted, self._done))

    def load(self, wanted: Sequence[Named], places: Sequence[Room]) -> list[str]:
        return self._wait(self.link.load(wanted, places, self._done))

    def forget(self, wanted: Sequence[Named]) -> list[str]:
        return self._wait(self.link.forget(wanted, self._done))

    def save(self, wanted: Sequence[Named], places: Sequence[Room]) -> list[str]:
        return self._wait(self.link.save(wanted, places, self._done))


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(socket: Path | str, **options: Any) -> Node:
        made.append(Node(socket, **({"lookup_s": 5.0, "load_s": 10.0} | options)))
        return made[-1]

    yield make
    for node in made:
        node.link.close()


async def test_blocks_come_one_by_one_whatever_is_missing_between_them(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 3) as pool:

        def play() -> None:
            one, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            wanted, mine = names("a", 6), rooms(6, "mine")
            kept = [0, 1, 3, 5]
            assert one.find(wanted) == ["not_held"] * 6
            assert one.save([wanted[at] for at in kept], [mine[at] for at in kept]) == [CAME] * 4
            there = [CAME if at in kept else "not_held" for at in range(6)]
            assert other.find(wanted) == there
            theirs = rooms(6)
            came = other.load(wanted, theirs)
            assert [at for at, outcome in enumerate(came) if outcome == CAME] == kept
            for at in range(6):
                assert theirs[at] == (mine[at] if at in kept else bytes(SIZE))
            # What could not be had is not promised for a while, and comes when it is saved.
            assert other.find(wanted)[2] == "failed_of_late"
            assert other.save(wanted, mine) == [THERE] * 2 + [CAME] * 4
            assert other.find(wanted) == [CAME] * 6
            counts = other.counters.take()
            assert counts["load_bytes"] == 4 * SIZE
            assert counts["miss_blocks|reason=not_found"] == 2
            assert counts["miss_blocks|reason=failed_of_late"] == 2
            assert one.counters.take()["save_blocks"] == 4

        await asyncio.to_thread(play)


async def test_one_chains_end_does_not_end_another(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2) as pool:

        def play() -> None:
            node = nodes(pool.sockets["node-1"])
            chains = [
                [Named(NAME, key_of(chain.encode(), bytes([at])), chain) for at in range(3 * GAPS)]
                for chain in "ab"
            ]
            for chain in chains:
                assert node.save(chain[:3], rooms(3, "mine")) == [CAME] * 3
            found = node.find([*chains[0], *chains[1]])
            assert found == 2 * [*[CAME] * 3, *["not_held"] * (3 * GAPS - 3)]
            # Behind so many gaps nothing is looked for, which costs hits, and nothing else.
            assert node.save(chains[0][-1:], rooms(1, "mine")) == [CAME]
            assert node.find(chains[0][3:])[-1] == "not_held"
            assert node.find(chains[0][-1 - GAPS :])[-1] == CAME

        await asyncio.to_thread(play)


async def test_namespaces_and_sizes_are_never_mixed(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2) as pool:

        def play() -> None:
            one, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            mine, theirs = rooms(2, "mine"), rooms(2, "theirs")
            both = [names("a", 1)[0], names("a", 1, OTHER)[0]]
            assert one.save(both[:1], mine[:1]) == [CAME]
            assert other.find(both) == [CAME, "not_held"]
            assert other.save(both[1:], theirs[:1]) == [CAME]
            got = rooms(2)
            assert other.load(both, got) == [CAME, CAME]
            assert [bytes(one) for one in got] == [bytes(mine[0]), bytes(theirs[0])]
            # A block of another size than the engine has room for is no block of this engine's.
            assert one.load(both[:1], rooms(1, size=SIZE - 1)) == ["wrong_size"]

        await asyncio.to_thread(play)


async def test_a_block_may_lie_in_pieces_which_need_not_be_cut_alike(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2) as pool:

        def play() -> None:
            one, other = nodes(pool.sockets["node-1"]), nodes(pool.sockets["node-2"])
            [name], pieces = names("a", 1), (rooms(1, "x", 100)[0], rooms(1, "y", SIZE)[0])
            assert one.save([name], [pieces]) == [CAME]
            got = (*rooms(2, size=60), rooms(1, size=SIZE - 20)[0])
            assert other.load([name], [got]) == [CAME]
            assert b"".join(got) == b"".join(pieces)
            assert other.load([name], [got[:2]]) == ["wrong_size"]

        await asyncio.to_thread(play)


async def test_a_name_that_is_given_twice_is_saved_once_and_loaded_twice(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2, arena_bytes=6 * MIB) as pool:

        def play() -> None:
            node = nodes(pool.sockets["node-1"], window_bytes=100_000)
            [name], mine = names("a", 1), rooms(2, "mine")
            many, much = names("b", 30), rooms(30, "much")  # in windows
            assert node.save([name, name], mine) == [CAME, CAME]
            assert node.save(many, much) == [CAME] * 30
            got = rooms(2)
            assert node.load([name, name], got) == [CAME, CAME]
            assert got == [mine[0], mine[0]]
            got = rooms(30)
            assert node.load(many, got) == [CAME] * 30
            assert got == much
            assert node.counters.take()["save_blocks"] == 31
            assert node.forget(many[:GAPS]) == [CAME] * GAPS
            assert node.find(many[: GAPS + 1]) == ["not_held"] * GAPS + [CAME]

        await asyncio.to_thread(play)


async def test_a_save_that_fails_is_reported_and_nothing_of_it_is_found(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 2, arena_bytes=6 * MIB) as pool:

        def play() -> None:
            node = nodes(pool.sockets["node-1"])
            wanted = names("a", 3)
            large = [*rooms(1, "a"), *rooms(1, "large", 16 * MIB), *rooms(1, "b")]
            outcomes = node.save(wanted, large)
            assert (outcomes[0], outcomes[2]) == (CAME, CAME)
            assert outcomes[1] not in (CAME, "not_held")
            assert node.find(wanted) == [CAME, "not_held", CAME]
            [(name, count)] = [
                one for one in node.counters.take().items() if one[0].startswith("save_failures")
            ]
            assert (name.partition("=")[2], count) == (outcomes[1], 1)

        await asyncio.to_thread(play)


async def test_bytes_that_changed_are_not_loaded_and_can_be_saved_anew(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 1, replicas=0) as pool:

        def play() -> None:
            node, wanted, mine = nodes(pool.sockets["node-1"]), names("a", 3), rooms(3, "mine")
            assert node.save(wanted, mine) == [CAME] * 3
            with (tmp_path / "1.arena").open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
                at = arena.find(bytes(mine[1]))
                assert at >= 0
                arena[at + 7] ^= 1
            got = rooms(3)
            assert node.load(wanted, got) == [CAME, "corrupt", CAME]
            assert bytes(got[1]) == bytes(SIZE)
            assert node.save(wanted, mine) == [THERE, CAME, CAME]
            assert node.load(wanted, got) == [CAME] * 3
            assert got == mine

        await asyncio.to_thread(play)


async def hasty_beside_blocks(
    nodes: Callable[..., Node], socket: Path, wait_s: float
) -> tuple[Node, list[Named], list[memoryview]]:
    """A node that waits for nothing longer, and blocks that it finds."""
    node = nodes(socket, lookup_s=wait_s, load_s=wait_s, save_s=wait_s, retry_s=0.0)
    wanted, mine = names("a", 3), rooms(3, "mine")
    assert await asyncio.to_thread(nodes(socket).save, wanted, mine) == [CAME] * 3
    await asyncio.to_thread(wait_until_found, node, wanted)
    return node, wanted, mine


def wait_until_found(node: Node, wanted: Sequence[Named]) -> None:
    end = time.monotonic() + 60
    while node.find(wanted) != [CAME] * len(wanted):
        assert time.monotonic() < end
        time.sleep(0.1)


async def test_a_pool_that_hangs_costs_its_deadlines_and_is_then_left_alone(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):
        node, wanted, mine = await hasty_beside_blocks(nodes, pool.sockets["node-1"], 0.4)
        pool.pause("node-1")

        def hung() -> None:
            began = time.monotonic()
            fresh = names("b", 3)
            assert node.find(fresh) == ["deadline"] * 3
            assert node.load(fresh, rooms(3)) == ["deadline"] * 3
            assert node.save(fresh, mine) == ["deadline"] * 3
            assert time.monotonic() - began < 20
            assert not node.link.well
            assert node.find(fresh) == [LEFT_ALONE] * 3
            assert node.load(fresh, rooms(3)) == [LEFT_ALONE] * 3
            assert node.link.under_way == {"questions": 0, "loads": 0, "saves": 0}

        await asyncio.to_thread(hung)
        pool.resume("node-1")

        def comes_back() -> None:
            wait_until_found(node, wanted)
            assert node.link.well

        await asyncio.to_thread(comes_back)


async def test_what_ends_while_it_is_copied_writes_and_reads_nothing_more(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):
        node, _, _ = await hasty_beside_blocks(nodes, pool.sockets["node-1"], 0.5)
        pool.pause("node-1")

        def hung() -> None:
            later, places = names("later", 2), rooms(2, "later")
            assert node.save(later, places) == ["deadline"] * 2
            for place in places:  # the engine uses its memory for something else
                place[:] = bytes(SIZE)

        await asyncio.to_thread(hung)
        pool.resume("node-1")
        await asyncio.sleep(1.0)

        def after() -> None:
            got = rooms(2)
            outcomes = node.load(names("later", 2), got)
            assert CAME not in outcomes or rooms(2, "later") == got

        await asyncio.to_thread(after)


async def test_beyond_the_bound_and_after_the_end_tasks_are_refused_at_once(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):
        node = nodes(pool.sockets["node-1"], save_s=30.0, waiting_bytes=3 * SIZE)
        assert await asyncio.to_thread(node.find, names("a", 1)) == ["not_held"]
        pool.pause("node-1")

        def play() -> None:
            reported = threading.Event()
            under_way = node.link.save(names("a", 2), rooms(2, "a"), lambda _: reported.set())
            assert node.save(names("b", 2), rooms(2, "b")) == [BUSY] * 2
            assert not under_way.reported
            node.link.close()
            assert reported.wait(5)
            assert list(under_way.outcomes) == [CLOSED] * 2
            assert node.save(names("c", 1), rooms(1, "c")) == [CLOSED]

        await asyncio.to_thread(play)
        pool.resume("node-1")


async def test_what_is_refused_as_too_much_is_not_the_question_whether_the_pool_is_back(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_pool(tmp_path, 2) as (pool, _):
        limits = {"save_s": 60.0, "waiting_bytes": 3 * SIZE, "lookup_s": 0.3}
        node = nodes(pool.sockets["node-1"], **limits)
        assert await asyncio.to_thread(node.find, names("a", 1)) == ["not_held"]
        pool.pause("node-1")

        def play() -> None:
            node.link.save(names("a", 2), rooms(2, "a"), lambda _: None)
            while node.link.well:
                assert node.find(names("a", 1)) == ["deadline"]
            time.sleep(2 * FIRST_PAUSE_S)
            assert node.save(names("b", 2), rooms(2, "b")) == [BUSY] * 2
            assert node.find(names("a", 1)) == ["deadline"], "it was asked"
            assert node.find(names("a", 1)) == [LEFT_ALONE]
            node.link.close()

        await asyncio.to_thread(play)
        pool.resume("node-1")


async def test_what_is_computed_sooner_counts_as_not_held_and_can_be_saved(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 3) as pool:

        def play() -> None:
            one = nodes(pool.sockets["node-1"])
            hasty = nodes(pool.sockets["node-2"], prefetch=False, prefill_tokens_per_s=1e9)
            patient = nodes(pool.sockets["node-2"], prefetch=False, prefill_tokens_per_s=1e-6)
            first, second = names("first", 60), names("second", 60)
            for wanted in (first, second):
                assert one.save(wanted, rooms(60, wanted)) == [CAME] * 60
            for node in (hasty, patient):
                node.link.weigh(16)
                assert node.find(first) == [CAME] * 60  # what a load takes is not known yet
                assert node.load(first, rooms(60)) == [CAME] * 60
            found = hasty.find(second)
            near = found.index(SLOWER)  # its own agent has these
            assert found == [CAME] * near + [SLOWER] * (60 - near)
            counts = hasty.counters.take()
            assert counts["miss_blocks|reason=slower"] == 60 - near
            assert counts["weighed|verdict=slower"] == 1
            assert counts["prefixes|outcome=whole"] == 1
            assert counts[f"prefixes|outcome={'part' if near else 'computed'}"] == 1
            assert hasty.save(second, rooms(60, second)) == [THERE] * 60
            assert hasty.find(first) == [CAME] * 60  # its own agent has those by now
            assert patient.find(second) == [CAME] * 60
            with Client(str(pool.sockets["node-2"])) as client:
                end = time.monotonic() + 30
                while (told := client.stats())["prefixes_whole_total"] < 4:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            assert told["prefixes_compute_tokens_per_s"] > 0

        await asyncio.to_thread(play)


async def test_a_chain_behind_a_gap_is_weighed_up_to_the_gap(
    tmp_path: Path, nodes: Callable[..., Node]
) -> None:
    async with running_agents(tmp_path, 1) as pool:

        def play() -> None:
            node = nodes(pool.sockets["node-1"], prefill_tokens_per_s=1e9)
            node.link.weigh(16)
            wanted = names("a", 5)
            assert node.find(wanted) == ["not_held"] * 5
            kept = [0, 1, 3, 4]
            node.save([wanted[at] for at in kept], rooms(4, "a"))
            there = [CAME if at in kept else "not_held" for at in range(5)]
            assert node.find(wanted) == there
            assert node.counters.take()["prefixes|outcome=whole"] == 1

        await asyncio.to_thread(play)


def weighing_link(load_block_s: float) -> tuple[BlockLink, Counters]:
    """One whose engine computes a block in a millisecond, and that tells nobody."""
    counters = Counters()
    link = BlockLink(StoreOptions(socket="", prefill_tokens_per_s=16_000.0), "test", counters)
    link.tell = Mock()  # type: ignore[method-assign]
    link.weigh(16)
    assert link._weighing is not None
    link._weighing.heard(Pace(100, 100 * load_block_s))
    return link, counters


def test_all_chains_of_a_request_are_probed_or_none() -> None:
    link, counters = weighing_link(0.1)
    assert link._weighing is not None
    link._weighing.loads = False  # and nothing was tried since
    promised, found = _Promised(), [True] * 20
    requests = ["a", "a", "b", "a"]
    worth = [link._worth(found, 0, request, promised) for request in requests]
    assert worth == [PROBE_BLOCKS, PROBE_BLOCKS, 0, PROBE_BLOCKS]
    assert link._worth(found, 18, "a", promised) == 20
    assert link._worth(found, 0, "a", _Promised()) == 0
    counts = counters.take()
    assert (counts["weighed|verdict=probe"], counts["weighed|verdict=slower"]) == (4, 2)


def test_a_chain_comes_after_those_that_the_same_question_was_promised() -> None:
    link, _ = weighing_link(0.0004)
    promised, found = _Promised(), [True] * 20
    assert [link._worth(found, 0, "a", promised) for _ in range(3)] == [20, 20, 0]
