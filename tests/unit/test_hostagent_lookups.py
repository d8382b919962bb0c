"""Lookups, case by case: what homes are asked, what is answered, and what is left to the agent.

Oracle: which blocks lie where, as written here; the home's end is the compiled one. Cannot see:
sockets (`test_hostagent_conveyor_pool`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec
import pytest
from kvcast.bench.fuzz.courier import HOME, NAMESPACE, Stand, key_of
from kvcast.hostagent.core.shared_index import Region, SharedIndex
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.protocol.conveyor import COUNTED as REPLY_COUNTED
from kvcast.protocol.conveyor import GIVEN_HERE, NOT_HERE, REPLY, REQUEST, Givers
from kvcast.protocol.lane import Lane
from kvcast.protocol.lookups import LOOKUPS
from kvcast.protocol.messages.control import PoolMap
from kvcast.protocol.messages.questions import (
    ANSWER,
    ASK_AGENT,
    COUNTED,
    EXISTS,
    MAX_CHAIN,
    QUESTION,
)
from kvcast.protocol.messages.shared import REGION_BYTES, index_bytes
from kvcast.protocol.messages.wire import BlockId, bucket_of

READER = 1
OTHER = HOME + 1
_SLAB = 8192
_SLABS = 32


class Home:
    """A node that has some blocks, and what it says on its end of a conveyor."""

    def __init__(self, held: Sequence[int], *, knows_all: bool = True) -> None:
        size_bytes = _SLAB * _SLABS
        self._memory = memoryview(bytearray(size_bytes))
        store = Store(Allocator(size_bytes, _SLAB))
        index_memory = memoryview(bytearray(index_bytes(buckets_for(size_bytes))))
        shared = SharedIndex(Index(index_memory, size_bytes, 1), store, barrier=lambda: None)
        lane = Lane(index_memory, self._memory, max_chunk_bytes=1024)
        lane.use({NAMESPACE: None, 2: [HOME]}, b"")
        pins = memoryview(bytearray(REGION_BYTES))
        shared.join(Region(pins, size_bytes, lambda why: pytest.fail(why)))
        self._knows_all = ctypes.c_uint64(knows_all)
        self._kept = (lane, shared)
        self.givers = Givers(lane.address, pins, knows_all=ctypes.addressof(self._knows_all))
        number = self.givers.begin(READER)
        assert number is not None
        self.number = number
        for block in held:
            store.commit(store.reserve(BlockId(NAMESPACE, key_of(block)), 100), 1, home=True)

    def says(self, heard: bytes) -> bytes:
        self.givers.hear(self.number, heard)
        return self.givers.bytes_to_send(self.number, 1 << 20)


class Asking:
    """A stand whose clients ask how many blocks there are."""

    def __init__(self, homes: list[int] | None = None) -> None:
        self.stand = Stand()
        self.courier = self.stand.courier
        self.asked = 0
        if homes is not None:
            self.live_at([homes])
        self.conveyors = {HOME: self.courier.conveyor_stands(HOME)}
        self.conveyors[OTHER] = self.courier.conveyor_stands(OTHER)

    def live_at(self, homes: list[list[int]]) -> None:
        """A map says so: bucket i is at the homes of that place, again from the first."""
        known = self.stand
        known.new_map()
        held = known.core.pool
        assert held is not None
        known._epoch += 1
        other = msgspec.structs.replace(
            held.nodes[HOME],
            index=OTHER,
            node_id="node-3",
            ip="10.77.0.3",
            mac="02:6b:76:00:00:03",
            switch_port=3,
        )
        changed = PoolMap(
            *(
                known._epoch,
                [node for node in held.nodes.values() if node.index != OTHER] + [other],
            ),
            *([homes[n % len(homes)] for n in range(1024)], list(held.namespaces.values()), []),
        )
        known.core.control_message(known.now, changed)

    def ask(self, blocks: Sequence[int], deadline_ms: int = 1000) -> int:
        """The question's number."""
        self.asked += 1
        first, *rest = map(key_of, blocks)
        meaning = self.stand.meaning
        question = QUESTION.pack(EXISTS, NAMESPACE, deadline_ms, self.asked, first, meaning)
        assert self.says(question + b"".join(rest))
        return self.asked

    def says(self, question: bytes) -> bool:
        self.courier.prepare(self.stand.now)
        client = self.stand.numbers[0]
        return self.courier.lookups.hear(client, question, self.stand.now)

    def request_to(self, node: int) -> bytes:
        conveyor = self.conveyors[node]
        assert conveyor is not None
        return self.courier.requests_to_send(conveyor)

    def replies(self, node: int, data: bytes) -> None:
        conveyor = self.conveyors[node]
        assert conveyor is not None
        self.courier.brought(conveyor, data, self.stand.now)

    def converse(self, homes: dict[int, Home]) -> list[int]:
        """Have all homes answer until nothing is asked; how many keys each request named."""
        counts = []
        said = True
        while said:
            said = False
            for node, home in homes.items():
                request = self.request_to(node)
                if request:
                    said = True
                    counts.append((len(request) - REQUEST.size) // 16)
                    self.replies(node, home.says(request))
        return counts

    def answer(self) -> tuple[int, int, int]:
        """(status, whether the agent is to be asked of the rest, how many), of the one there is."""
        ((client, answer),) = self.courier.take_answers()
        assert client == self.stand.numbers[0]
        status, more, _, number, _, _, count, _ = ANSWER.unpack(answer)
        assert number == self.asked
        return status, more, count

    def pass_time(self, seconds: float) -> None:
        self.stand.now += seconds
        self.courier.lookups.expire(self.stand.now)


def test_a_prefix_goes_on_through_what_lies_here_and_at_home() -> None:
    asking = Asking()
    asking.stand.put(3)
    asking.ask(range(10))
    assert asking.converse({HOME: Home([0, 1, 2, 4, 5, 8])}) == [9]
    assert asking.answer() == (COUNTED, 0, 6)


def test_all_of_a_chain_may_be_there() -> None:
    asking = Asking()
    asking.ask(range(10))
    asking.converse({HOME: Home(range(10))})
    assert asking.answer() == (COUNTED, 0, 10)
    asking.stand.put(0)
    asking.ask([0])
    assert asking.answer() == (COUNTED, 0, 1)


def test_every_home_is_asked_of_its_own_and_the_first_gap_counts() -> None:
    blocks = list(range(12))
    asking = Asking()
    asking.live_at([[HOME], [OTHER]])
    mine = [n for n in blocks if bucket_of(key_of(n)) % 2 == 0]
    theirs = [n for n in blocks if n not in mine]
    assert mine
    assert theirs
    for gap in blocks:
        asking.ask(blocks)
        held = [n for n in blocks if n != gap]
        homes = {
            HOME: Home([n for n in held if n in mine]),
            OTHER: Home([n for n in held if n in theirs]),
        }
        assert asking.converse(homes) == [len(mine), len(theirs)]
        assert asking.answer() == (COUNTED, 0, gap)


def test_a_home_that_may_have_more_leaves_the_rest_to_the_agent() -> None:
    asking = Asking()
    asking.ask(range(4))
    asking.converse({HOME: Home([0, 1], knows_all=False)})
    assert asking.answer() == (COUNTED, 1, 2)
    asking.ask(range(4))
    asking.converse({HOME: Home([], knows_all=False)})
    assert asking.answer() == (ASK_AGENT, 0, 0)


def test_what_may_lie_here_below_dram_is_the_agents_to_count() -> None:
    asking = Asking()
    asking.stand.store.beyond = asking.stand.store.below  # type: ignore[assignment]
    asking.ask(range(4))
    asking.converse({HOME: Home([0, 1])})
    assert asking.answer() == (COUNTED, 1, 2)


def test_the_next_home_of_the_first_gap_is_asked_for_that_key() -> None:
    asking = Asking([HOME, OTHER])
    asking.ask(range(6))
    assert asking.converse({HOME: Home([0, 1, 3, 4, 5]), OTHER: Home([0, 1])}) == [6, 1]
    assert asking.answer() == (COUNTED, 0, 2)
    asking.ask(range(6))
    asking.converse({HOME: Home([0, 1, 3, 4, 5]), OTHER: Home([2])})
    assert asking.answer() == (COUNTED, 1, 3), "what is behind it is not known"
    asking.ask(range(3))
    asking.converse({HOME: Home([0, 1]), OTHER: Home([2])})
    assert asking.answer() == (COUNTED, 0, 3)
    asking.ask(range(3))
    asking.converse({HOME: Home([0, 1]), OTHER: Home([], knows_all=False)})
    assert asking.answer() == (COUNTED, 1, 2)


def test_without_a_conveyor_one_is_wished_for_and_the_agent_answers() -> None:
    asking = Asking()
    number = asking.conveyors[HOME]
    assert number is not None
    asking.courier.conveyor_gone(asking.stand.now - 100.0, number)
    asking.ask(range(4))
    assert asking.answer() == (ASK_AGENT, 0, 0)
    assert asking.courier.take_wish(asking.stand.now) == HOME


def test_one_that_has_something_else_to_bring_is_not_waited_for() -> None:
    asking = Asking()
    asking.ask(range(4))
    asking.ask(range(4))
    assert asking.answer() == (ASK_AGENT, 0, 0)
    asking.asked -= 1
    asking.converse({HOME: Home(range(4))})
    assert asking.answer() == (COUNTED, 0, 4)


def test_nothing_is_waited_for_beyond_the_deadline_and_what_is_late_is_nobodys() -> None:
    asking = Asking()
    asking.ask(range(4), deadline_ms=50)
    request = asking.request_to(HOME)
    asking.pass_time(0.049)
    assert not asking.courier.take_answers()
    asking.pass_time(0.002)
    assert asking.answer() == (ASK_AGENT, 0, 0)
    asking.replies(HOME, Home(range(4)).says(request))
    assert not asking.courier.take_answers()
    asking.ask(range(3))
    asking.converse({HOME: Home(range(3))})
    assert asking.answer() == (COUNTED, 0, 3)


def test_a_home_that_is_silent_loses_its_conveyor() -> None:
    asking = Asking()
    asking.ask(range(4), deadline_ms=60_000)
    asking.pass_time(1.01)
    assert asking.answer() == (ASK_AGENT, 0, 0)
    assert asking.courier.take_cut_off() == [asking.conveyors[HOME]]


def test_what_a_conveyor_was_to_bring_that_ends_is_the_agents() -> None:
    asking = Asking()
    asking.ask(range(4))
    number = asking.conveyors[HOME]
    assert number is not None
    asking.courier.conveyor_gone(asking.stand.now, number)
    asking.conveyors[HOME] = asking.courier.conveyor_stands(HOME)
    asking.pass_time(0.0)
    assert asking.answer() == (ASK_AGENT, 0, 0)


def _is_believed_nothing(counted: int, status: int = REPLY_COUNTED, of: int = 0) -> None:
    """The reply to a question about four keys, or to the one `of` numbers behind it."""
    asking = Asking()
    asking.ask(range(4))
    number, *_ = REQUEST.unpack_from(asking.request_to(HOME))
    asking.replies(HOME, REPLY.pack(number + of, 1, counted, status))
    asking.pass_time(0.0)
    assert asking.answer() == (ASK_AGENT, 0, 0)
    assert asking.courier.take_cut_off() == [asking.conveyors[HOME]]


@pytest.mark.parametrize("counted", [5, 1 << 31])
def test_a_home_that_holds_more_than_it_was_asked_about_is_believed_nothing(counted: int) -> None:
    _is_believed_nothing(counted)


def test_a_reply_to_another_question_or_of_no_kind_is_believed_nothing() -> None:
    _is_believed_nothing(2, of=1)
    _is_believed_nothing(2, status=GIVEN_HERE)


def test_as_many_are_in_flight_as_there_is_room_for() -> None:
    asking = Asking()
    asking.live_at([[HOME]])
    asking.courier.lookups.native.in_flight = LOOKUPS
    for lookup in asking.courier.lookups._kept[1]:
        lookup.open = 1
    asking.ask(range(4))
    assert asking.answer() == (ASK_AGENT, 0, 0)
    assert asking.courier.values()["courier_lookups_handed_over_total"] == 1


def test_a_namespace_that_means_something_else_is_not_looked_up() -> None:
    asking = Asking()
    asking.stand.meaning += 1
    asking.ask(range(4))
    assert asking.answer() == (ASK_AGENT, 0, 0)


@pytest.mark.parametrize("more", [-40, -1, 1, 15, 17, 16 * MAX_CHAIN])
def test_what_no_client_of_ours_says_is_an_offence(more: int) -> None:
    asking = Asking()
    question = QUESTION.pack(EXISTS, NAMESPACE, 1000, 1, key_of(0), asking.stand.meaning)
    assert not asking.says((question + bytes(max(more, 0)))[: len(question) + more])
    assert not asking.courier.take_answers()


def test_the_longest_chain_is_counted() -> None:
    asking = Asking()
    asking.ask([0] * MAX_CHAIN)
    assert asking.converse({HOME: Home([0])}) == [MAX_CHAIN]
    assert asking.answer() == (COUNTED, 0, MAX_CHAIN)


def test_a_client_that_has_gone_is_told_nothing() -> None:
    asking = Asking()
    asking.ask(range(4))
    request = asking.request_to(HOME)
    asking.courier.leave(asking.stand.numbers[0])
    asking.replies(HOME, Home(range(4)).says(request))
    assert not asking.courier.take_answers()
    assert asking.courier.lookups.native.in_flight == 0


# --- the home's end -------------------------------------------------------------------------------


def request(blocks: Sequence[int], *, namespace: int = NAMESPACE, count: int = -1) -> bytes:
    count = len(blocks) if count < 0 else count
    header = REQUEST.pack(7, bytes(16), 0, count, namespace, 1)
    return header + b"".join(map(key_of, blocks))


def test_a_home_hears_a_chain_in_pieces_between_other_requests() -> None:
    home = Home([0, 1, 2])
    missing = REQUEST.pack(8, key_of(9), 0, 0, NAMESPACE, 0)
    said = missing + request(range(5)) + missing
    heard = b"".join(home.says(said[at : at + 7]) for at in range(0, len(said), 7))
    nothing = REPLY.pack(8, 0, 0, NOT_HERE)
    assert heard == nothing + REPLY.pack(7, 1, 3, REPLY_COUNTED) + nothing
    assert home.givers.take_given() == ([], 0)


@pytest.mark.parametrize("namespace", [2, 3])
def test_a_home_counts_nothing_that_the_node_may_not_use(namespace: int) -> None:
    assert Home([0]).says(request([0], namespace=namespace)) == REPLY.pack(7, 0, 0, NOT_HERE)


@pytest.mark.parametrize(
    "said",
    [request([0], count=MAX_CHAIN + 1), REQUEST.pack(*(7, bytes(16), 0, 0, 1, 2))],
    ids=["too long a chain", "no kind"],
)
def test_a_request_that_there_is_not_ends_a_conveyor(said: bytes) -> None:
    home = Home([0])
    assert home.says(said) == b""
    assert home.givers.givers[home.number].gone
