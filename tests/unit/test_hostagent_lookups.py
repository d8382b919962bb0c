"""Lookups, case by case: what homes are asked, what is answered, and what is left to the agent.

Oracle: which blocks lie where, as written here; the home's end is the compiled one. Cannot see:
sockets (`test_hostagent_conveyor_pool`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from unittest import mock

import pytest
from asking import OTHER, Asking, Home, counted_of
from kvcast.bench.fuzz.courier import HOME, NAMESPACE, Stand, key_of
from kvcast.hostagent.core.ssd import SsdRules, SsdTier
from kvcast.hostagent.tiers.ssd.layout import cut_of, open_formatted
from kvcast.protocol.conveyor import COUNTED as REPLY_COUNTED
from kvcast.protocol.conveyor import GIVEN_HERE, NOT_HERE, REPLY, REQUEST, Givers
from kvcast.protocol.lookups import LOOKUPS
from kvcast.protocol.messages.questions import (
    ASK_AGENT,
    COUNTED,
    EXISTS,
    MAX_CHAIN,
    QUESTION,
)
from kvcast.protocol.messages.shared import REGION_BYTES
from kvcast.protocol.messages.wire import BlockId, bucket_of
from kvcast.simulation.disk import SimDisk


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


def test_a_home_whose_filter_has_not_the_next_key_is_certain_that_it_has_it_not() -> None:
    asking = Asking()
    asking.ask(range(4))
    asking.converse({HOME: Home([0, 1], below=[0, 3])})
    assert asking.answer() == (COUNTED, 0, 2)
    asking.ask(range(4))
    asking.converse({HOME: Home([0, 1], below=[2])})
    assert asking.answer() == (COUNTED, 1, 2), "it may lie on its disk"
    asking.ask(range(2))
    asking.converse({HOME: Home([0, 1], below=[0, 1])})
    assert asking.answer() == (COUNTED, 0, 2)


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_the_filter_of_this_node_has_is_the_agents_to_count(*, is_counted: bool) -> None:
    asking = Asking()
    asking.courier.use_below(counted_of([5, 7]))
    below = mock.Mock(is_counted=is_counted)
    asking.stand.store.below = below
    asking.ask(range(4))
    asking.converse({HOME: Home([0, 1])})
    assert asking.answer() == (COUNTED, 0 if is_counted else 1, 2)
    asking.ask([0, 1, 5, 6])
    asking.converse({HOME: Home([0, 1])})
    assert asking.answer() == (COUNTED, 1, 2), "it may lie on the disk here"


def test_a_home_with_a_disk_is_certain_of_what_cannot_lie_there() -> None:
    home = Stand()
    disk = SimDisk(random.Random(1))
    formatted = open_formatted(disk, cut_of("node", 1 << 19, 4096, 1 << 17), 7)
    tier = SsdTier(SsdRules(), home.store, home.memory, [formatted], epoch_s=1e9)
    home.core.use_tiers([tier])
    tier._table.filter.add(BlockId(NAMESPACE, key_of(1)))  # as if that had gone there
    assert home.core.lane is not None
    pins = memoryview(bytearray(REGION_BYTES))
    known = home.courier.lookups.knows_all_at
    givers = Givers(home.core.lane.address, pins, knows_all=known)
    number = givers.begin(HOME)
    assert number is not None
    asking = Asking()
    for block, answer in ((1, (ASK_AGENT, 0, 0)), (2, (COUNTED, 0, 0))):
        home.courier.prepare(home.now)
        asking.ask([block])
        givers.hear(number, asking.request_to(HOME))
        asking.replies(HOME, givers.bytes_to_send(number, 1 << 20))
        assert asking.answer() == answer, block


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
