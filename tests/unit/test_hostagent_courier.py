"""The courier, case by case: what it takes, what it hands over and why, and what is booked.

Oracle: the bytes of blocks, the counters and the store's pins, as written here. Cannot see: sockets
and the wait (`test_hostagent_courier_pool`), and orders of events that nobody thought of
(`test_courier_property`).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from kvcast.bench.fuzz.courier import (
    BLOCKS,
    HOME,
    HOME_IP,
    LARGE,
    NAMESPACE,
    Stand,
    content_of,
    frame_of,
    key_of,
    offer_of,
)
from kvcast.hostagent.core import courier as couriers
from kvcast.hostagent.core.courier import (
    CONVEYOR_PAUSE_S,
    FEW,
    FEW_SHARE,
    MAX_SIZES,
    OTHER_SIZE_MAX_S,
    OTHER_SIZES,
    PATIENCE_S,
    QUOTA_SHARE,
    REORDER_S,
    SILENCE_S,
    SIZES,
    STOCK,
    given_lately,
)
from kvcast.hostagent.core.spread import BUSY_PERCENT
from kvcast.hostagent.core.store import StoreRules
from kvcast.hostagent.tiers.counting_filter import CountingFilter
from kvcast.hostagent.tiers.ledger import HANDLE, LEDGER_BYTES, MOMENT_BYTES, Ledger, Row
from kvcast.native.subset import Library
from kvcast.protocol.conveyor import GATHER_BYTES, GIVEN_HERE, REPLY
from kvcast.protocol.courier import (
    BATCHES,
    CLIENT_OFFENDS,
    LANDINGS,
    MAX_ASKED_A_CLIENT,
    MOST_REPAIRS,
    NOBODY,
    REASONS,
    RECORDS,
    AskedState,
    become,
)
from kvcast.protocol.messages import local
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    Loads,
    Registered,
)
from kvcast.protocol.messages.questions import GET, MAX_MANY, QUESTION, RELEASE
from kvcast.protocol.messages.wire import (
    CELLS,
    CHUNKINGS,
    FLAG_LAST,
    FLAG_PARTIAL,
    FLAG_RESIDENT,
    FLAG_RETRY,
    FLAG_SHARED,
    FULL_SEGMENT,
    OP_READ,
    SEGMENT_BYTES,
    BlockId,
    bucket_of,
    chunking_of,
    decode,
    digest_of,
)


def block_of(number: int) -> BlockId:
    return BlockId(NAMESPACE, key_of(number))


def reasons(stand: Stand) -> dict[str, int]:
    values = stand.courier.values()
    found = {why: int(values[f"courier_handed_over_{why}_total"]) for why in REASONS}
    return {why: count for why, count in found.items() if count}


@pytest.fixture
def stand() -> Stand:
    """With blocks of the size of block 1 (30 KB) expected."""
    made = Stand()
    made.fetch(1)
    made.bring(1)
    requester = made.core.requester
    requester.was_read(0.0, HOME, 0.001, chunks=1, shared=False, resident=False)
    assert requester.rto_s(HOME) == PATIENCE_S
    made.pass_time(0.001)
    return made


def test_a_block_comes_by_one_read_and_its_client_holds_it(stand: Stand) -> None:
    stand.ask(0, 2)
    (datagram,) = stand.reads
    read = decode(datagram)
    assert (read.op, read.block, read.wanted, read.flags) == (
        OP_READ,
        block_of(2),
        FULL_SEGMENT,
        0,
    )
    assert not stand.held[0]
    stand.bring(2)
    (handle,) = stand.held[0]
    copy = stand.store.peek(block_of(2))
    assert copy is not None
    assert (copy.pins, copy.size_bytes, copy.home) == (1, len(content_of(2)), False)
    assert copy.cell, "it is in the index for everybody"
    metrics = stand.core.metrics
    assert metrics.hits_home_total == 1
    assert metrics.payload_bytes_received_udp_total == len(content_of(1)) + len(content_of(2))
    assert metrics.by_namespace.of(NAMESPACE).hits["home"] == 1
    stand.give_back(0, handle)
    assert copy.pins == 0
    stand.end()


def test_clients_that_ask_for_one_block_get_it_by_one_read(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.ask(1, 2)
    stand.ask(1, 2)
    assert len(stand.reads) == 1
    stand.bring(2)
    copy = stand.store.peek(block_of(2))
    assert copy is not None
    assert copy.pins == 3
    assert [len(held) for held in stand.held] == [1, 2]
    assert stand.core.metrics.gets_joined_total == 2
    stand.end()


def test_what_lies_here_or_is_being_fetched_is_the_agents_to_answer(stand: Stand) -> None:
    stand.ask(0, 1)
    stand.fetch(3)
    stand.ask(0, 3)
    assert reasons(stand) == {"here": 2}
    assert not stand.reads
    stand.bring(3)
    stand.ask(0, 6)
    assert len(stand.reads) == 1, "what has been fetched is not in the way any more"
    stand.end()


def test_what_may_lie_below_dram_is_the_agents_to_answer_as_long_as_it_may(stand: Stand) -> None:
    below = CountingFilter()
    stand.courier.use_below(below)
    below.add(block_of(2))
    stand.ask(0, 2)
    assert reasons(stand) == {"below": 1}
    assert not stand.reads
    stand.begin_conveyor()
    stand.ask_many(1, [2, 3])
    assert reasons(stand) == {"below": 2}
    assert [decode(read).block for read in stand.reads] == [block_of(3)]
    stand.bring(3)
    below.remove(block_of(2))
    stand.ask(0, 2)
    stand.bring(2)
    assert reasons(stand) == {"below": 2}
    assert [len(held) for held in stand.held] == [1, 1]
    stand.end()


def test_a_fetch_of_the_agents_takes_a_question_over(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.receive(frame_of(2, 0))
    stand.fetch(2)
    assert reasons(stand) == {"yielded": 1}
    stand.bring(2)
    copy = stand.store.peek(block_of(2))
    assert copy is not None
    assert copy.pins == 0
    stand.end()


LAST = -(-len(content_of(2)) // 1024) - 1
"""The last chunk of block 2."""


def _handed_over(stand: Stand, why: str) -> None:
    """The question about block 2 was, and the agent can fetch it."""
    assert reasons(stand) == {why: 1}
    assert stand.handed_over == 1
    assert stand.store.peek(block_of(2)) is None
    stand.fetch(2)
    stand.bring(2)
    assert stand.store.peek(block_of(2)) is not None
    stand.end()


def test_silence_is_handed_over(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.pass_time(PATIENCE_S - 0.001)
    assert not reasons(stand)
    stand.pass_time(0.002)
    _handed_over(stand, "silence")


def test_chunks_that_are_lost_are_asked_for_alone(stand: Stand) -> None:
    before = stand.core.requester.counters.reads
    stand.ask(0, 2)
    lost = {3, 7}
    for chunk in range(LAST + 1):
        if chunk not in lost:
            stand.receive(frame_of(2, chunk, flags=FLAG_LAST * (chunk == LAST)))
    assert len(stand.reads) == 1
    stand.pass_time(REORDER_S + 0.0001)
    read, repair = map(decode, stand.reads)
    assert (repair.op, repair.block, repair.flags) == (OP_READ, block_of(2), FLAG_PARTIAL)
    assert repair.wanted == sum(1 << chunk for chunk in lost)
    assert repair.digest == digest_of(content_of(2)), "of another copy they would be of no use"
    assert repair.tag != read.tag
    stand.receive(frame_of(2, 3, flags=FLAG_PARTIAL))
    assert not stand.given
    stand.receive(frame_of(2, 7, flags=FLAG_PARTIAL | FLAG_LAST))
    assert (stand.given, stand.handed_over) == (1, 0)
    counters = stand.core.requester.counters
    assert (counters.reads, counters.reads_partial) == (before + 2, 1)
    stand.end()


def test_what_is_asked_for_after_a_repair_is_asked_for_whole(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.receive(frame_of(2, 0))
    stand.pass_time(PATIENCE_S + 0.001)
    assert decode(stand.reads[-1]).flags == FLAG_PARTIAL
    stand.ask(0, 3)
    read = decode(stand.reads[-1])
    assert (read.block, read.flags, read.digest) == (block_of(3), 0, 0)
    assert read.wanted == FULL_SEGMENT
    stand.bring(2)
    stand.bring(3)
    assert stand.given == 2
    stand.end()


def test_an_answer_whose_end_is_lost_time_and_again_is_handed_over(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.receive(frame_of(2, 0))
    stand.receive(frame_of(2, LAST, flags=FLAG_LAST))
    stand.pass_time(REORDER_S + 0.0001)
    for repairs in range(1, MOST_REPAIRS + 1):
        assert len(stand.reads) == 1 + repairs
        assert not reasons(stand)
        stand.pass_time(PATIENCE_S + 0.001)
    assert len(stand.reads) == 1 + MOST_REPAIRS
    _handed_over(stand, "gap")


def test_what_keeps_coming_is_waited_for_however_slow_it_is(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.ask(1, 2)
    for chunk in range(LAST + 1):
        stand.pass_time(0.9 * PATIENCE_S)
        if stand.now > 0.9:  # their deadline is a second
            break
        stand.receive(frame_of(2, chunk))
    assert chunk > 10
    assert not reasons(stand)
    for chunk in range(LAST + 1):
        stand.receive(frame_of(2, chunk, flags=FLAG_LAST * (chunk == LAST)))
    assert len(stand.reads) == 1
    assert stand.given == 2
    stand.end()


def test_nothing_is_waited_for_beyond_a_clients_deadline(stand: Stand) -> None:
    stand.ask(0, 2, deadline_ms=70)
    stand.pass_time(0.04)
    stand.receive(frame_of(2, 0))
    stand.pass_time(0.031)
    assert len(stand.reads) == 1
    _handed_over(stand, "deadline")


@pytest.mark.parametrize("deadline_ms", [0, 5])
def test_a_home_is_not_left_alone_for_a_deadline_shorter_than_its_answer_takes(
    stand: Stand, deadline_ms: int
) -> None:
    stand.ask(0, 2, deadline_ms=deadline_ms)
    stand.pass_time(0.006)
    assert reasons(stand) == {"deadline": 1}
    unsolicited = stand.core.requester.counters.unsolicited
    before = bytes(stand.memory)
    stand.bring(2)
    assert bytes(stand.memory) == before, "nobody waits for that any more"
    assert stand.core.requester.counters.unsolicited == unsolicited + LAST + 1
    stand.ask(0, 3)
    stand.bring(3)
    assert (stand.given, reasons(stand)) == (1, {"deadline": 1})
    stand.end()


@pytest.mark.parametrize(("deadline_ms", "flags"), [(20, 0), (30, FLAG_RETRY)])
def test_a_read_that_was_out_for_long_at_the_deadline_is_repeated(
    stand: Stand, deadline_ms: int, flags: int
) -> None:
    """A switch may hold the first; nothing is to be repeated while its answer is likely to come."""
    stand.ask(0, 2, deadline_ms=deadline_ms)
    stand.pass_time(deadline_ms / 1000 + 0.001)
    assert reasons(stand) == {"deadline": 1}
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), flags)]
    stand.bring(2)
    stand.end()


def test_who_waits_with_another_waits_until_its_own_deadline(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.ask(1, 2, deadline_ms=5)
    stand.pass_time(0.006)
    assert reasons(stand) == {"deadline": 1}
    stand.bring(2)
    assert stand.given == 1
    stand.end()


def test_a_home_is_waited_for_as_long_as_the_requester_does(stand: Stand) -> None:
    requester = stand.core.requester
    for _ in range(8):
        requester.was_read(stand.now, HOME, 0.3, chunks=1, shared=False, resident=False)
    assert requester.rto_s(HOME) > 4 * PATIENCE_S
    stand.fetch(3)
    stand.bring(3)  # which is when it is looked
    patience_s = requester.rto_s(HOME)
    stand.ask(0, 2)
    stand.pass_time(patience_s - 0.001)
    assert not reasons(stand)
    stand.pass_time(0.002)
    _handed_over(stand, "silence")


def test_what_is_on_its_way_comes_though_another_answer_does_not(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.pass_time(PATIENCE_S * 0.8)
    stand.ask(1, 3)
    stand.receive(frame_of(3, 0))
    stand.pass_time(PATIENCE_S * 0.4)
    stand.pass_time(0.001)  # by now nobody asks that home any more
    assert reasons(stand) == {"silence": 1}
    stand.bring(3)
    assert stand.given == 1
    assert len(stand.reads) == 2
    stand.end()


def test_a_miss_is_handed_over(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.miss(2)
    _handed_over(stand, "missed")


def test_a_miss_that_a_switch_gives_to_all_who_wait_has_the_tag_of_the_first(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.miss(2, another=1)
    assert not reasons(stand), "the answer to an older READ"
    stand.miss(2, another=1, flags=FLAG_SHARED)
    _handed_over(stand, "missed")


def test_what_a_switch_shares_of_another_home_is_taken(stand: Stand) -> None:
    stand.new_map(homes=(HOME, HOME + 1))
    stand.pass_time(0.001)
    stand.ask(0, 2)
    for chunk in range(LAST + 1):  # of a READ that is over
        stand.receive(frame_of(2, chunk, flags=FLAG_LAST * (chunk == LAST)), HOME_IP + 1)
    assert stand.given == 0
    for chunk in range(LAST + 1):
        flags = FLAG_SHARED | FLAG_LAST * (chunk == LAST)
        stand.receive(frame_of(2, chunk, flags=flags), HOME_IP + 1)
    assert stand.given == 1
    assert not reasons(stand)
    stand.end()


def test_of_another_home_what_was_asked_for_at_another_time_changes_nothing(stand: Stand) -> None:
    stand.new_map(homes=(HOME, HOME + 1))
    stand.pass_time(0.001)
    stand.ask(0, 2)
    stand.receive(frame_of(2, 0, code=1, flags=FLAG_SHARED), HOME_IP + 1)
    stand.bring(2)
    assert stand.given == 1, "the home that was asked is heard"
    assert not reasons(stand)
    stand.end()


def test_a_miss_of_another_home_that_a_switch_shares_is_handed_over(stand: Stand) -> None:
    stand.new_map(homes=(HOME, HOME + 1))
    stand.pass_time(0.001)
    stand.ask(0, 2)
    stand.miss(2, home=HOME_IP + 1)
    assert not reasons(stand), "the answer to another READ"
    stand.miss(2, home=HOME_IP + 1, flags=FLAG_SHARED)
    _handed_over(stand, "missed")


def test_bytes_that_are_not_the_digests_are_handed_over(stand: Stand) -> None:
    stand.ask(0, 2)
    for chunk in range(LAST + 1):
        spoil = 1 if chunk == 3 else 0
        stand.receive(frame_of(2, chunk, spoil=spoil, flags=FLAG_LAST * (chunk == LAST)))
    _handed_over(stand, "wrong_digest")


def test_a_home_that_was_silent_is_left_alone_for_a_while(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.pass_time(PATIENCE_S + 0.001)
    stand.ask(0, 3)
    assert reasons(stand) == {"silence": 1, "no_home": 1}
    stand.pass_time(stand.core.requester.config.suspect_s)
    stand.ask(0, 3)
    assert len(stand.reads) == 2
    stand.end()


def test_what_the_requester_asks_again_says_that_it_is_a_repeat(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.pass_time(PATIENCE_S + 0.001)
    reads = stand.core.reads
    reads.prefetch(stand.now, NAMESPACE, [key_of(2), key_of(3)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), FLAG_RETRY)]
    stand.bring(2)
    stand.bring(3)
    stand.end()


def test_what_waited_for_a_probe_says_that_it_is_a_repeat_too(stand: Stand) -> None:
    requester = stand.core.requester
    before = requester.counters.reads
    stand.ask(0, 3)
    stand.pass_time(PATIENCE_S + 0.001)
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2), key_of(3)], stand.now + 0.5)
    sent = [frame for _, frame in requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), 0)]
    for chunk in range(LAST + 1):  # others wait for it, too: the other block is to be read as well
        stand.receive(frame_of(2, chunk, flags=FLAG_SHARED | FLAG_LAST * (chunk == LAST)))
    assert (requester.counters.reads, requester.counters.reads_retry) == (before + 2, 1)
    stand.bring(3)
    stand.end()


def test_a_read_after_one_that_was_answered_is_no_repeat(stand: Stand) -> None:
    """Nor where one before that was not: no switch holds that back any more."""
    stand.ask(0, 2)
    stand.pass_time(PATIENCE_S + 0.001)
    stand.pass_time(stand.core.requester.config.suspect_s)
    stand.ask(0, 2)
    stand.bring(2)
    assert stand.given == 1
    stand.store.drop(block_of(2))
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), 0)]
    stand.bring(2)
    stand.end()


@pytest.mark.parametrize(("after_s", "flags"), [(1.9, FLAG_RETRY), (2.1, 0)])
def test_a_read_long_after_one_that_was_not_answered_is_no_repeat(
    stand: Stand, after_s: float, flags: int
) -> None:
    """By then the switch holds nothing back, and a repeat would bring the block a second time where
    another node asks for it at this moment."""
    stand.core.registered(Registered(CONTROL_PROTOCOL_VERSION, 0, 3.0, 0, read_lease_s=2.0))
    stand.ask(0, 2)
    stand.pass_time(PATIENCE_S + 0.001)
    stand.pass_time(after_s)
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), flags)]
    stand.bring(2)
    stand.end()


@pytest.mark.parametrize(
    ("late", "flags"),
    [("all", 0), ("a miss", 0), ("the first chunk", FLAG_RETRY), ("nothing", FLAG_RETRY)],
)
def test_a_read_after_one_whose_answer_was_late_is_no_repeat(
    stand: Stand, late: str, flags: int
) -> None:
    """A repeat is never held back, so its home would send the block once more for nothing."""
    stand.ask(0, 2)
    stand.pass_time(PATIENCE_S + 0.001)
    if late == "all":
        stand.bring(2)
    elif late == "a miss":
        stand.miss(2)
    elif late == "the first chunk":
        stand.receive(frame_of(2, 0))
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), flags)]
    stand.bring(2)
    stand.end()


@pytest.mark.parametrize(("waited_s", "flags"), [(0.45, 0), (0.55, FLAG_RETRY)])
def test_a_read_that_was_out_for_long_when_the_agent_took_over_is_repeated(
    stand: Stand, waited_s: float, flags: int
) -> None:
    """A switch may hold the first, and would hold back another that does not say what it is."""
    stand.ask(0, 2)
    stand.pass_time(waited_s * PATIENCE_S)
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), flags)]
    stand.bring(2)
    stand.end()


@pytest.mark.parametrize(("waited_s", "flags"), [(0.45, 0), (0.55, FLAG_RETRY)])
def test_a_read_that_was_out_for_long_when_another_map_came_is_repeated(
    stand: Stand, waited_s: float, flags: int
) -> None:
    stand.ask(0, 2)
    stand.pass_time(waited_s * PATIENCE_S)
    stand.new_map()
    stand.pass_time(0.0)
    assert reasons(stand) == {"yielded": 1}
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), flags)]
    stand.bring(2)
    stand.end()


def test_that_the_agent_took_a_read_over_is_no_reason_to_repeat_two(stand: Stand) -> None:
    """The agent's READ is a repeat, and its answer says nothing of a third."""
    stand.ask(0, 2)
    stand.pass_time(0.55 * PATIENCE_S)
    reads, requester = stand.core.reads, stand.core.requester
    for flags in (FLAG_RETRY, 0):
        reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
        sent = [frame for _, frame in requester.frames_to_send()]
        assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), flags)]
        stand.bring(2)
        stand.store.drop(block_of(2))
    stand.end()


def test_late_chunks_after_a_question_was_handed_over_are_written_nowhere(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.receive(frame_of(2, 0))
    for _ in range(MOST_REPAIRS + 1):
        stand.pass_time(PATIENCE_S + 0.001)
    assert reasons(stand) == {"gap": 1}
    stand.ask(0, 3)
    stand.receive(frame_of(3, 0))
    before = bytes(stand.memory)
    stand.receive(frame_of(2, 1))
    assert bytes(stand.memory) == before
    stand.bring(3)
    assert stand.given == 1
    stand.end()


def test_data_of_another_node_or_copy_is_not_taken(stand: Stand) -> None:
    stand.ask(0, 2)
    for chunk in range(LAST + 1):
        stand.receive(frame_of(2, chunk, spoil=1), HOME_IP + 1)
    stand.receive(frame_of(2, 0))
    stand.receive(frame_of(2, 1, spoil=2))
    assert stand.given == 0
    stand.bring(2)
    assert stand.given == 1
    stand.end()


def test_a_block_of_another_size_is_handed_over_and_the_next_is_expected(stand: Stand) -> None:
    stand.ask(0, 5)  # 9 KB
    stand.bring(5)
    assert reasons(stand) == {"no_landing": 1}
    stand.fetch(5)
    stand.bring(5)
    for block in (11, 2):  # 9 KB, too; and as the first ones were
        stand.ask(0, block)
        stand.bring(block)
    assert stand.given == 2
    assert reasons(stand) == {"no_landing": 1}
    stand.end()


def learn(stand: Stand, size_bytes: int) -> None:
    stand.courier.learn(stand.now, block_of(0), size_bytes)
    stand.courier.prepare(stand.now)


def sizes_with_places(stand: Stand) -> list[int]:
    return sorted({copy.size_bytes for copy in stand.courier._places.values()})


def test_of_many_sizes_the_last_have_landing_places() -> None:
    stand = Stand()
    sizes = [100 * 3**power for power in range(SIZES + 2)]
    for size_bytes in sizes:
        learn(stand, size_bytes)
    assert sizes_with_places(stand) == sizes[2:]
    learn(stand, sizes[2])  # it is the one used last, now
    learn(stand, sizes[0])
    assert sizes_with_places(stand) == [sizes[0], sizes[2], *sizes[4:]]
    stand.end()


def test_a_landing_place_has_a_bit_for_each_chunk_whatever_it_was_for_before() -> None:
    stand = Stand()
    courier = stand.courier
    for size_bytes in (100, 5 * SEGMENT_BYTES, 100):
        learn(stand, size_bytes)
        assert any(copy.size_bytes == size_bytes for copy in courier._places.values())
        for number, copy in courier._places.items():
            bitmap = courier._missing[number]
            assert len(bitmap) >= CELLS.segments_of(copy.size_bytes)
            assert courier._landings[number].missing == ctypes.addressof(bitmap)
        courier.give_room_back()
    stand.end()


def test_of_many_namespaces_the_last_have_landing_places() -> None:
    stand = Stand()
    for namespace in range(MAX_SIZES + 3):
        stand.courier.learn(stand.now, BlockId(namespace, key_of(0)), 5000)
        stand.courier.prepare(stand.now)
    having = {copy.block.namespace for copy in stand.courier._places.values()}
    assert having == set(range(3, MAX_SIZES + 3))
    assert len(stand.courier._places) == LANDINGS
    stand.end()


def test_a_size_that_comes_takes_the_room_of_one_that_does_not() -> None:
    stand = Stand()
    most_bytes = stand.store.allocator.capacity_bytes // 2
    for size_bytes in (400_000, 200_000, 400_000):
        learn(stand, size_bytes)
        assert stand.courier.ready_bytes <= most_bytes
        of_size = [c for c in stand.courier._places.values() if c.size_bytes == size_bytes]
        assert of_size
        assert sum(c.reserved_bytes for c in of_size) > most_bytes // 2
    stand.end()


def test_of_the_last_size_there_are_a_few_though_they_take_more_than_all_may() -> None:
    stand = Stand()
    stand.courier._most_bytes = 0
    share_bytes = stand.store.allocator.capacity_bytes // FEW_SHARE
    sizes = [share_bytes // (2 * FEW), share_bytes - share_bytes // 4, 2 * share_bytes]
    for size_bytes, count in zip(sizes, (FEW, 1, 0), strict=True):
        stand.courier.give_room_back()
        learn(stand, size_bytes)
        assert len(stand.courier._places) == count
        assert all(copy.size_bytes == size_bytes for copy in stand.courier._places.values())
        assert stand.courier.ready_bytes <= share_bytes
    stand.end()


def test_a_namespace_whose_blocks_keep_coming_in_other_sizes_is_left_alone_for_a_while(
    stand: Stand,
) -> None:
    sizes = [30_000, *(100 * 3**power for power in range(SIZES))]
    for count in range(OTHER_SIZES + 4):
        learn(stand, sizes[count % len(sizes)])
    stand.courier.give_room_back()
    stand.courier.prepare(stand.now)
    assert not sizes_with_places(stand)
    stand.now += OTHER_SIZE_MAX_S
    stand.courier.prepare(stand.now)
    assert 30_000 in sizes_with_places(stand)
    for block in (2, 3, 7, 8):
        stand.ask(0, block)
        stand.bring(block)
    assert stand.given == 4
    stand.end()


def test_what_turns_out_larger_than_a_client_may_hold_is_handed_over(stand: Stand) -> None:
    session = stand.sessions[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session), "may_be_given", lambda _self: (0, 25_000))
        stand.leave(0)
        stand.leave(0)  # both are new now
        learn(stand, 30_000)
        learn(stand, 10_000)  # so much is likely
        stand.ask(0, 2)
        stand.ask(1, 11)
        stand.bring(2)
        assert reasons(stand) == {"no_landing": 1}
        stand.bring(11)
    assert stand.given == 1
    stand.end()


def test_where_a_large_block_was_fetched_a_conveyor_is_wished_for() -> None:
    stand = Stand()
    stand.pass_time(0.001)  # it knows the map
    stand.expect_large()
    assert stand.courier.take_wish(stand.now) == HOME
    stand.begin_conveyor()
    stand.expect_large()
    assert stand.courier.take_wish(stand.now) is None
    stand.end_conveyor()
    stand.now += 2 * CONVEYOR_PAUSE_S
    stand.expect_large()
    assert stand.courier.take_wish(stand.now) == HOME
    stand.end()


def test_landing_places_are_bounded_and_a_question_without_one_is_handed_over(
    stand: Stand,
) -> None:
    for number in range(MAX_ASKED_A_CLIENT + 1):
        stand.say(
            0,
            QUESTION.pack(
                *(GET, NAMESPACE, 1000, 100 + number),
                (number + 100 << 10).to_bytes(16, "big"),
                stand.meaning,
            ),
        )
    assert len(stand.reads) == MAX_ASKED_A_CLIENT
    assert STOCK == MAX_ASKED_A_CLIENT
    assert reasons(stand) == {"full": 1}
    stand.ask(1, 2)
    assert reasons(stand) == {"full": 1, "no_landing": 1}
    stand.pass_time(PATIENCE_S + 0.001)
    stand.end()


def test_landing_places_take_little_of_a_quota(stand: Stand) -> None:
    def landing_bytes() -> int:
        held = stand.store.namespace_bytes(NAMESPACE)
        return held - sum(
            copy.reserved_bytes
            for block in stand.store.blocks()
            if (copy := stand.store.peek(block)) is not None
        )

    assert landing_bytes() == STOCK * stand.store.allocator.extent_bytes(30_000)
    for quota_bytes in (0, 8 << 20, 64 * 1024):
        stand.courier.give_room_back()
        stand.store.configure({NAMESPACE: StoreRules(quota_bytes=quota_bytes)})
        stand.pass_time(0.2)
        most = quota_bytes // QUOTA_SHARE if quota_bytes else 1 << 30
        assert landing_bytes() <= most
    assert not landing_bytes(), "of a small quota nothing"
    stand.ask(0, 2)
    assert reasons(stand) == {"no_landing": 1}
    stand.end()


def test_a_client_is_given_half_of_its_share_at_most(stand: Stand) -> None:
    held, most = stand.sessions[0].may_be_given()
    assert held == 0
    assert most == stand.store.allocator.capacity_bytes // 4
    number = 0
    while "held_bytes" not in reasons(stand):
        number += 1
        block = 2 + number
        stand.say(
            0,
            QUESTION.pack(
                *(GET, NAMESPACE, 1000, 100 + number),
                key_of(block % 12),
                stand.meaning,
            ),
        )
        stand.bring(block % 12)
        stand.store.drop(block_of(block % 12))
        assert number < 40
    assert stand.sessions[0].may_be_given()[0] <= most
    for handle in list(stand.held[0]):
        stand.give_back(0, handle)
    stand.ask(0, 2)
    stand.bring(2)
    assert len(stand.held[0]) == 1
    stand.end()


def test_a_block_that_was_put_meanwhile_stays_and_the_reader_keeps_what_it_was_given(
    stand: Stand,
) -> None:
    stand.ask(0, 2)
    stand.put(2)
    put = stand.store.peek(block_of(2))
    stand.bring(2)
    assert stand.store.peek(block_of(2)) is put
    assert stand.store.counters.duplicates == 1
    (handle,) = stand.held[0]
    assert put is not None
    assert stand.held[0][handle][1] != put.offset
    stand.give_back(0, handle)
    stand.end()


def test_a_client_that_goes_leaves_nothing_behind(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.ask(1, 3)
    stand.bring(3)
    stand.leave(1)
    stand.leave(0)
    assert not stand.courier.in_flight
    stand.bring(2)
    assert stand.store.peek(block_of(2)) is None
    assert reasons(stand) == {"given_up": 1}
    stand.end()


def test_what_is_given_up_ends_and_its_home_is_asked_for_the_next(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.receive(frame_of(2, 0))
    stand.give_up(0)
    assert not stand.courier.in_flight
    assert (stand.handed_over, reasons(stand)) == (1, {"given_up": 1})
    before = bytes(stand.memory)
    stand.receive(frame_of(2, 1))
    assert bytes(stand.memory) == before
    stand.ask(0, 3)
    stand.bring(3)
    assert stand.given == 1
    stand.end()


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_gives_up_comes_for_the_other(stand: Stand, first: int) -> None:
    stand.ask(0, 2)
    stand.ask(1, 2)
    stand.give_up(first)
    assert stand.courier.in_flight == 2 - first, "who asked first is who it comes for"
    stand.bring(2)
    assert [len(held) for held in stand.held] == [first, 1 - first]
    copy = stand.store.peek(block_of(2))
    assert copy is not None
    assert copy.pins == 1
    stand.end()


def test_what_all_give_up_ends_whoever_is_first(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.ask(1, 2)
    stand.give_up(0)
    stand.give_up(1)
    assert not stand.courier.in_flight
    stand.end()


@pytest.mark.parametrize(("waited_s", "flags"), [(0.02, 0), (0.03, FLAG_RETRY)])
def test_a_read_that_was_out_for_long_when_it_was_given_up_is_repeated(
    stand: Stand, waited_s: float, flags: int
) -> None:
    stand.ask(0, 2)
    stand.pass_time(waited_s)
    stand.give_up(0)
    stand.core.reads.prefetch(stand.now, NAMESPACE, [key_of(2)], stand.now + 0.5)
    sent = [frame for _, frame in stand.core.requester.frames_to_send()]
    assert [(frame.key, frame.flags) for frame in sent] == [(key_of(2), flags)]
    stand.bring(2)
    stand.end()


def test_an_answer_that_others_got_too_is_one_of_the_shared_tier(stand: Stand) -> None:
    stand.ask(0, 2)
    for chunk in range(LAST + 1):
        stand.receive(frame_of(2, chunk, flags=FLAG_SHARED | (FLAG_LAST if chunk == LAST else 0)))
    assert stand.given == 1
    assert stand.core.metrics.hits_shared_total == 1
    stand.end()


def test_while_most_answers_are_shared_the_courier_is_closed(stand: Stand) -> None:
    for number in (2, 3, 7, 8, 9):
        stand.ask(0, number)
        last = -(-len(content_of(number)) // 1024) - 1
        for chunk in range(last + 1):
            flags = FLAG_SHARED | (FLAG_LAST if chunk == last else 0)
            stand.receive(frame_of(number, chunk, flags=flags))
    assert reasons(stand).get("closed", 0) > 0
    stand.pass_time(stand.core.requester.config.sharing_memory_s + 0.1)
    stand.ask(1, 1)
    stand.store.drop(block_of(1))
    stand.ask(1, 1)
    assert decode(stand.reads[-1]).block == block_of(1)
    stand.end()


def test_a_block_that_a_switch_holds_is_read_as_the_switch_has_it(stand: Stand) -> None:
    stand.new_map(chunking=CHUNKINGS[3])
    stand.pass_time(0.001)
    stand.fetch(1)
    stand.bring(1)  # there are landing places for its size again
    stand.hold([2])
    for number, code in ((2, CELLS.code), (3, 3)):
        before = stand.core.requester.counters.data
        stand.ask(0, number)
        assert chunking_of(decode(stand.reads[-1]).segment).code == code
        stand.receive(frame_of(number, 0, code=3 - code))
        assert stand.courier.in_flight == 1, "what is cut otherwise is no answer"
        stand.bring(number, flags=0 if code else FLAG_RESIDENT)
        chunks = CHUNKINGS[code].chunks_of(len(content_of(number)), 0)
        assert stand.core.requester.counters.data == before + chunks
    assert stand.given == 2
    assert (stand.core.metrics.hits_switch_total, stand.core.metrics.hits_home_total) == (1, 1)
    stand.hold([])
    stand.store.drop(block_of(2))
    stand.ask(0, 2)
    assert chunking_of(decode(stand.reads[-1]).segment).code == 3, "it is not there any more"
    stand.end()


def test_what_is_lost_of_a_block_that_a_switch_holds_is_asked_for_as_the_switch_has_it(
    stand: Stand,
) -> None:
    stand.new_map(chunking=CHUNKINGS[3])
    stand.pass_time(0.001)
    stand.fetch(1)
    stand.bring(1)
    stand.hold([2])
    stand.ask(0, 2)
    lost, last = 5, CELLS.chunks_of(len(content_of(2)), 0) - 1
    for chunk in set(range(last + 1)) - {lost}:
        flags = FLAG_RESIDENT | (FLAG_LAST if chunk == last else 0)
        stand.receive(frame_of(2, chunk, flags=flags))
    stand.pass_time(2 * REORDER_S)
    repair = decode(stand.reads[-1])
    assert (repair.wanted, chunking_of(repair.segment)) == (1 << lost, CELLS)
    stand.receive(frame_of(2, lost, flags=FLAG_RESIDENT | FLAG_LAST))
    assert stand.given == 1
    stand.end()


def test_a_large_block_that_a_switch_holds_is_the_requesters_to_ask_for(large: Stand) -> None:
    large.hold([12])
    large.ask(0, 12)
    large.ask_many(1, [12, 12])
    assert reasons(large) == {"no_home": 3}
    large.end()


def test_wrong_bytes_of_a_switch_are_not_given(stand: Stand) -> None:
    stand.hold([2])
    stand.ask(0, 2)
    last = CELLS.chunks_of(len(content_of(2)), 0) - 1
    for chunk in range(last + 1):
        flags = FLAG_RESIDENT | (FLAG_LAST if chunk == last else 0)
        stand.receive(frame_of(2, chunk, spoil=chunk == 3, flags=flags))
    assert (stand.given, reasons(stand)) == (0, {"wrong_digest": 1})
    stand.end()


def test_a_question_about_a_block_that_a_switch_takes_is_handed_over_alone(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.ask(1, 3)
    stand.hold([2])
    stand.pass_time(0.001)
    assert reasons(stand) == {"yielded": 1}
    stand.bring(3)
    assert stand.given == 1
    stand.end()


def test_a_home_that_becomes_busy_is_asked_no_more_and_what_it_sends_is_taken(stand: Stand) -> None:
    stand.core.control_message(stand.now, Loads([(HOME, 10)]))
    stand.pass_time(0.001)
    stand.ask(0, 2)
    stand.core.control_message(stand.now, Loads([(HOME, BUSY_PERCENT - 1)]))
    stand.pass_time(0.001)
    stand.ask(0, 3)
    stand.core.control_message(stand.now, Loads([(HOME, BUSY_PERCENT)]))
    stand.pass_time(0.001)
    stand.ask(0, 4)
    assert reasons(stand) == {"no_home": 1}
    stand.bring(2)
    stand.bring(3)
    assert len(stand.held[0]) == 2
    stand.end()


def test_a_namespace_that_means_another_thing_is_not_looked_up(stand: Stand) -> None:
    old = stand.meaning
    stand.ask(0, 2)
    stand.new_map(version="another")
    stand.settle()
    stand.pass_time(0.001)
    assert reasons(stand) == {"yielded": 1}
    stand.say(0, QUESTION.pack(GET, NAMESPACE, 1000, 77, key_of(3), old))
    assert reasons(stand) == {"yielded": 1, "not_readable": 1}
    stand.end()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"x",
        QUESTION.pack(GET, NAMESPACE, 1, 1, key_of(1), 0)[:-1],
        QUESTION.pack(GET, NAMESPACE, 1, 1, key_of(1), 0) + b"x",
        QUESTION.pack(3, NAMESPACE, 1, 1, key_of(1), 0),
        QUESTION.pack(GET, NAMESPACE, 3_600_001, 1, key_of(1), 0),
    ],
)
def test_what_is_no_question_is_an_offence(stand: Stand, message: bytes) -> None:
    stand.say(0, message)
    assert stand.courier.state_of(stand.numbers[0]) == CLIENT_OFFENDS
    assert not stand.reads
    stand.end()


def test_a_handle_that_is_not_the_clients_is_counted(stand: Stand) -> None:
    stand.ask(0, 2)
    stand.bring(2)
    (handle,) = stand.held[0]
    stand.say(1, QUESTION.pack(RELEASE, 0, 0, handle, bytes(16), 0))
    assert stand.core.metrics.local_unknown_handles_total == 1
    copy = stand.store.peek(block_of(2))
    assert copy is not None
    assert copy.pins == 1
    stand.end()


def test_the_requester_learns_of_reads_by_the_courier(stand: Stand) -> None:
    counters = stand.core.requester.counters
    reads, data = counters.reads, counters.data
    stand.ask(0, 2)
    stand.now += 0.004
    stand.bring(2)
    assert counters.reads == reads + 1
    assert counters.data == data + -(-len(content_of(2)) // 1024)
    assert stand.core.requester.rto_s(HOME) > 0
    stand.end()


# --- the state of a question ------------------------------------------------------------------


def test_a_change_that_cannot_be_is_counted_and_found(stand: Stand) -> None:
    stand.ask(0, 2)
    (question,) = (each for each in stand.courier._asked if each.state)
    assert question.state == AskedState.ASKED
    library = Library(become)
    change = library.call(become)
    change(stand.courier.address, ctypes.addressof(question), AskedState.ORDERED)
    with pytest.raises(AssertionError, match="ASKED cannot become ORDERED"):
        stand.courier.check()
    stand.courier.prepare(stand.now)
    assert stand.courier.values()["courier_impossible_total"] == 1
    with pytest.raises(AssertionError, match="has changed as it cannot"):
        stand.courier.check()


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("state", AskedState.JOINED, "does not know of it"),
        ("state", AskedState.GAPPED, "it lands at"),
        ("state", AskedState.FREE, "it is in use"),
        ("landing", 0, "it lands at 0"),
        ("unread", 1, "0 READs are to be sent, not 1"),
        ("until_ns", 1 << 60, "its time is overlooked"),
        ("key", 7, "is found for its block"),
        ("client", 1, "client 0"),
        ("promised", 1, "client 0"),
        ("batch", 3, "batch 3 waits for 0 of 1"),
    ],
)
def test_what_contradicts_itself_is_found(
    stand: Stand, field: str, value: int, complaint: str
) -> None:
    stand.ask(0, 2)
    (question,) = (each for each in stand.courier._asked if each.state)
    is_found(stand, question, field, value, complaint)


def is_found(stand: Stand, where: Any, field: str, value: int, complaint: str) -> None:
    """A contradiction is found, and is none any more afterwards."""
    before = getattr(where, field)
    setattr(where, field, value)
    with pytest.raises(AssertionError, match=complaint):
        stand.courier.check()
    setattr(where, field, before)
    stand.courier.check()


def questions(stand: Stand, state: AskedState) -> list[Any]:
    stand.courier.check()
    return [each for each in stand.courier._asked if each.state == state]


def test_contradictions_of_what_is_being_received_are_found(stand: Stand) -> None:
    for block in (2, 3):
        stand.ask(0, block)
        stand.receive(frame_of(block, 0))
    one, other = questions(stand, AskedState.RECEIVING)
    is_found(stand, stand.courier._landings[one.landing], "state", 1, "it lands where")
    is_found(stand, one, "serial", one.serial + 1, "its copy is another")
    is_found(stand, one, "serial", other.serial, "its copy is another")
    is_found(stand, one, "next_alike", 200, "are found by their keys")
    is_found(stand, stand.courier._courier, "in_flight", 3, "in flight")
    stand.end()


def test_contradictions_of_what_waits_with_others_are_found(many: Stand) -> None:
    many.ask(0, 2)
    many.ask(1, 2)
    (joined,) = questions(many, AskedState.JOINED)
    is_found(many, joined, "key", 7, "it waits for")
    many.ask_many(0, [3, 4])
    (follower, *_) = questions(many, AskedState.FOLLOWING)
    is_found(many, follower, "home", HOME + 1, "it follows another home's")
    many.end()


def test_contradictions_of_what_conveyors_are_to_bring_are_found(large: Stand) -> None:
    large.ask(0, 12)
    probe(large, 12)
    large.ask(0, 13)
    probe(large, 13)
    conveyed, other = questions(large, AskedState.CONVEYED)
    is_found(large, conveyed, "serial", conveyed.serial + 1, "no conveyor is to bring it")
    is_found(large, conveyed, "landing", other.landing, "landing places of two")
    for _ in range(2):
        large.reply()
    large.end()


def test_a_read_that_was_still_to_be_sent_for_a_question_that_was_given_up_is_not(
    stand: Stand,
) -> None:
    stand.ask(0, 2)
    stand.receive(frame_of(2, 0))
    stand.now += PATIENCE_S + 0.001
    stand.courier.expire(stand.now)
    (question,) = questions(stand, AskedState.RECEIVING)
    assert question.unread, "what is missing is to be asked for"
    stand.give_up(0)
    assert not stand.courier.reads_to_send()
    stand.ask(0, 2)
    stand.bring(2)
    assert stand.given == 1
    stand.end()


# --- blocks of more than one segment ----------------------------------------------------------


@pytest.fixture
def large() -> Stand:
    """With large blocks expected, and a conveyor from their home."""
    made = Stand()
    made.expect_large()
    made.begin_conveyor()
    return made


def probe(stand: Stand, block: int) -> None:
    """The home sends the first segment, which nobody shares, and an OFFER."""
    stand.receive(offer_of(block))
    stand.bring(block)


def test_a_large_block_comes_by_a_read_and_the_conveyor(large: Stand) -> None:
    large.ask(0, 12)
    large.ask(1, 12)
    probe(large, 12)
    assert [wanted.start for wanted in large.wanted] == [SEGMENT_BYTES]
    assert not large.given
    large.reply(pieces=5)
    assert large.given == 2
    metrics = large.core.metrics
    size_bytes = len(content_of(12))
    assert metrics.payload_bytes_received_udp_total == SEGMENT_BYTES
    assert metrics.payload_bytes_received_bulk_get_total == size_bytes - SEGMENT_BYTES
    copy = large.store.peek(block_of(12))
    assert copy is not None
    assert (copy.pins, copy.size_bytes, copy.home) == (2, size_bytes, False)
    large.end()


@pytest.mark.parametrize("places", [1, 2])
def test_python_is_to_hear_at_once_of_the_block_that_takes_the_last_large_place(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(couriers, "FEW", places)
    stand = Stand()
    stand.courier._most_bytes = 0
    stand.expect_large()
    stand.begin_conveyor()
    hurries: list[bool] = []
    native, book = stand.courier._courier, stand.courier.book

    def booked(now: float) -> bool:
        if native.landed:
            hurries.append(native.landed >= native.enough_landed)
        return book(now)

    monkeypatch.setattr(stand.courier, "book", booked)
    stand.ask(0, 12)
    probe(stand, 12)
    stand.reply(pieces=2)
    assert stand.given == 1
    assert hurries == [places == 1]
    stand.end()


def test_several_blocks_follow_each_other_on_a_conveyor(large: Stand) -> None:
    for block in (12, 13, 14):
        large.ask(0, block)
    for block in (12, 13, 14):
        probe(large, block)
    assert len(large.wanted) == 3
    for _ in range(3):
        large.reply(pieces=2)
    assert large.given == 3
    large.end()


def test_without_a_conveyor_one_is_wished_for_once_in_a_while() -> None:
    stand = Stand()
    stand.expect_large()
    stand.ask(0, 12)
    assert not stand.reads
    assert reasons(stand) == {"no_conveyor": 1}
    assert stand.courier.take_wish(stand.now) == HOME
    assert stand.courier.take_wish(stand.now) is None
    stand.courier.conveyor_failed(stand.now, HOME)
    for count, pause_s in enumerate((CONVEYOR_PAUSE_S, 2 * CONVEYOR_PAUSE_S), 2):
        stand.now += 0.9 * pause_s
        stand.ask(0, 12)
        assert stand.courier.take_wish(stand.now) is None
        stand.now += 0.2 * pause_s
        stand.ask(0, 12)
        assert stand.courier.take_wish(stand.now) == HOME, count
        stand.courier.conveyor_failed(stand.now, HOME)
    stand.end()


def test_a_large_block_that_others_read_too_is_the_agents(large: Stand) -> None:
    large.ask(0, 12)
    large.receive(offer_of(12))
    for chunk in range(64):
        flags = FLAG_SHARED | (FLAG_LAST if chunk == 63 else 0)
        large.receive(frame_of(12, chunk, flags=flags))
    assert reasons(large) == {"company": 1}
    assert not large.wanted
    large.end()


def test_an_offer_is_waited_for_a_moment(large: Stand) -> None:
    large.ask(0, 12)
    large.bring(12)
    assert not large.wanted
    large.receive(offer_of(12))
    assert len(large.wanted) == 1
    large.reply()
    large.ask(0, 13)
    large.bring(13)
    large.pass_time(REORDER_S)
    assert reasons(large) == {"not_offered": 1}
    assert large.conveyor is None, "nothing is asked by a conveyor of who offers no other way"
    large.end()


@pytest.mark.parametrize("offered", [True, False])
def test_a_large_block_goes_on_when_late_chunks_of_its_first_segment_are_there(
    large: Stand, offered: bool
) -> None:
    large.ask(0, 12)
    if offered:
        large.receive(offer_of(12))
    for chunk in (0, 63, 63, *range(1, 63)):
        large.receive(frame_of(12, chunk, flags=FLAG_LAST if chunk == 63 else 0))
    assert len(large.wanted) == offered
    if not offered:
        large.receive(offer_of(12))
    large.reply()
    assert large.given == 1
    assert not large.core.requester.counters.reads_partial
    large.end()


def two_on_a_conveyor(stand: Stand) -> None:
    for block in (12, 13):
        stand.ask(0, block)
        probe(stand, block)


@pytest.mark.parametrize(("spoil", "why"), [(1, "wrong_digest"), (4, "missed")])
def test_bytes_that_are_not_the_digests_and_none_at_all_are_handed_over(
    large: Stand, spoil: int, why: str
) -> None:
    two_on_a_conveyor(large)
    large.reply(spoil=spoil, pieces=3)
    assert not large.given
    assert reasons(large) == {why: 1}
    large.reply()
    assert large.given == 1, "the next block is not meant"
    large.end()


def test_what_the_home_says_to_read_is_handed_over_and_read_without_a_probe(large: Stand) -> None:
    two_on_a_conveyor(large)
    large.reply(spoil=7)
    assert reasons(large) == {"company": 1}
    met = [n for n in (12, 13) if large.core.requester.has_met(large.now, BlockId(1, key_of(n)))]
    assert len(met) == 1
    large.reply()
    assert large.given == 1, "the next block is not meant"
    large.end()


@pytest.mark.parametrize("spoil", [2, 3])
def test_the_end_of_another_copy_than_the_one_begun_is_handed_over(
    large: Stand, spoil: int
) -> None:
    two_on_a_conveyor(large)
    large.reply(spoil=spoil, pieces=3)
    assert reasons(large) == {"missed": 1}
    large.reply()
    assert large.given == 1, "the next block is not meant"
    large.end()


@pytest.mark.parametrize("spoil", [5, 6])
def test_a_reply_that_answers_no_request_ends_a_conveyor(large: Stand, spoil: int) -> None:
    two_on_a_conveyor(large)
    large.reply(spoil=spoil, pieces=3)
    assert not large.given
    assert reasons(large) == {"cut_off": 2}
    assert large.conveyor is None
    large.end()


def test_bytes_that_nobody_has_asked_for_end_a_conveyor(large: Stand) -> None:
    large.brought(b"x")
    assert large.conveyor is None
    large.end()


def test_a_conveyor_that_falls_silent_ends_with_all_that_it_was_to_bring(large: Stand) -> None:
    large.ask(0, 12, deadline_ms=5000)
    large.ask(1, 13, deadline_ms=5000)
    probe(large, 12)
    probe(large, 13)
    large.pass_time(SILENCE_S * 0.9)
    large.brought(REPLY.pack(large.wanted[0].number, large.wanted[0].digest, 180_000 - 12, 1))
    large.pass_time(SILENCE_S * 0.9)
    assert not reasons(large)
    large.pass_time(SILENCE_S * 0.2)
    assert reasons(large) == {"cut_off": 2}
    assert large.conveyor is None
    large.end()


def test_what_is_given_up_goes_nowhere_while_it_still_comes(large: Stand) -> None:
    large.ask(0, 12, deadline_ms=100)
    probe(large, 12)
    (wanted,) = large.wanted
    header = REPLY.pack(wanted.number, wanted.digest, len(content_of(12)), 1)
    rest = content_of(12)[SEGMENT_BYTES:]
    large.brought(header + rest[:1000])
    large.pass_time(0.11)
    assert reasons(large) == {"deadline": 1}
    before = bytes(large.memory)
    large.brought(rest[1000:])
    assert bytes(large.memory) == before
    large.ask(0, 13)
    probe(large, 13)
    large.wanted.pop(0)
    large.reply()
    assert large.given == 1, "the conveyor goes on with what was asked for next"
    large.end()


def test_what_is_coming_for_a_client_that_goes_is_thrown_away(large: Stand) -> None:
    large.ask(0, 12)
    probe(large, 12)
    large.leave(0)
    assert large.conveyor is not None, "so little is not worth another connection"
    before = bytes(large.memory)
    large.reply()
    assert bytes(large.memory) == before
    assert large.store.peek(block_of(12)) is None
    large.ask(0, 13)
    probe(large, 13)
    large.reply()
    assert large.given == 1
    large.end()


@pytest.mark.parametrize("begun", [False, True])
def test_a_conveyor_is_closed_that_brings_much_for_nobody(large: Stand, begun: bool) -> None:
    blocks = range(LARGE, BLOCKS)
    assert sum(len(content_of(block)) for block in blocks) - SEGMENT_BYTES > GATHER_BYTES
    large.ask_many(0, blocks)
    probe(large, LARGE)
    assert len(large.wanted) == len(blocks)
    if begun:
        wanted, content = large.wanted[0], content_of(LARGE)
        header = REPLY.pack(wanted.number, wanted.digest, len(content), GIVEN_HERE)
        large.brought(header + content[wanted.start :][:1000])
    large.give_up(0)
    assert large.conveyor is None
    assert reasons(large) == {"given_up": len(blocks)}
    large.end()


def test_a_conveyor_that_was_closed_since_nobody_waited_is_made_anew_at_once(large: Stand) -> None:
    large.ask_many(0, range(LARGE, BLOCKS))
    probe(large, LARGE)
    large.give_up(0)
    assert large.conveyor is None
    large.ask(0, 12)
    assert reasons(large)["no_conveyor"] == 1
    assert large.courier.take_wish(large.now) == HOME
    large.end()


def test_a_conveyor_stays_that_brings_something_that_another_waits_for(large: Stand) -> None:
    large.ask_many(0, range(LARGE, BLOCKS))
    large.ask(1, 14)
    probe(large, LARGE)
    large.give_up(0)
    assert reasons(large) == {"given_up": BLOCKS - LARGE - 1}
    while large.wanted:
        large.reply()
    assert [len(held) for held in large.held] == [0, 1]
    large.end()


def test_a_first_that_others_follow_goes_on_for_them(large: Stand) -> None:
    large.ask_many(0, range(LARGE, BLOCKS))
    large.ask(1, 14)
    large.give_up(0)
    assert reasons(large) == {"given_up": BLOCKS - LARGE - 2}
    probe(large, LARGE)
    while large.wanted:
        large.reply()
    assert [len(held) for held in large.held] == [0, 1]
    large.end()


def test_a_fetch_of_the_agents_takes_a_large_block_over(large: Stand) -> None:
    large.ask(0, 12)
    probe(large, 12)
    large.fetch(12)
    assert reasons(large) == {"yielded": 1}
    large.reply()
    assert not large.given
    large.end()


def test_a_client_is_promised_no_more_than_it_may_hold(large: Stand) -> None:
    session = large.sessions[0]
    held_bytes, _ = session.may_be_given()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session), "may_be_given", lambda _self: (held_bytes, 400_000))
        large.leave(0)
        large.ask(1, 12)
        large.ask(1, 13)
        large.ask(1, 14)
    assert reasons(large) == {"held_bytes": 1}
    large.end()


# --- several blocks in one question -----------------------------------------------------------

SMALL = (1, 2, 3, 7, 8, 9)
"""Blocks of about one size."""


@pytest.fixture
def many(stand: Stand) -> Stand:
    """With blocks of one size expected, none here, and a conveyor from their home."""
    stand.store.drop(block_of(1))
    stand.begin_conveyor()
    return stand


def test_of_many_blocks_the_first_is_read_and_the_others_come_by_the_conveyor(many: Stand) -> None:
    many.ask_many(0, SMALL)
    (read,) = map(decode, many.reads)
    assert read.key == key_of(1)
    assert not many.wanted
    many.bring(1)
    assert [wanted.key for wanted in many.wanted] == list(map(key_of, SMALL[1:]))
    assert {(wanted.start, wanted.digest) for wanted in many.wanted} == {(0, 0)}
    for _ in SMALL[1:]:
        assert not many.given, "one message answers them all"
        many.reply(pieces=3)
    assert many.given == len(SMALL)
    assert [block for block, _, _ in many.held[0].values()] == list(SMALL)
    metrics = many.core.metrics
    assert metrics.gets_total == len(SMALL)
    sizes = [len(content_of(number)) for number in SMALL]
    assert metrics.payload_bytes_received_udp_total == 2 * sizes[0]  # once to know the size
    assert metrics.payload_bytes_received_bulk_get_total == sum(sizes[1:])
    many.end()


def test_of_many_blocks_that_a_switch_holds_each_is_read(many: Stand) -> None:
    many.end_conveyor()
    many.hold(SMALL)
    many.ask_many(0, (*SMALL, SMALL[1]))
    assert [decode(read).key for read in many.reads] == list(map(key_of, SMALL))
    for number in reversed(SMALL):
        assert not many.given, "one message answers them all"
        many.bring(number, flags=FLAG_RESIDENT)
    assert [block for block, _, _ in many.held[0].values()] == [*SMALL, SMALL[1]]
    assert many.core.metrics.hits_switch_total == len(SMALL) + 1
    many.end()


def test_what_a_switch_holds_neither_leads_nor_follows_in_a_batch(many: Stand) -> None:
    others = [number for number in SMALL if number != 1]
    assert bucket_of(key_of(7)) == bucket_of(key_of(1))
    many.hold([1])
    many.ask_many(0, SMALL)
    assert [decode(read).key for read in many.reads] == list(map(key_of, [1, 2]))
    many.bring(1, flags=FLAG_RESIDENT)
    assert not many.wanted, "what the first of the others finds out is not known"
    many.bring(2)
    assert [wanted.key for wanted in many.wanted] == list(map(key_of, others[1:]))
    for _ in others[1:]:
        many.reply()
    assert many.given == len(SMALL)
    many.end()


def test_blocks_that_nobody_is_asked_for_keep_no_others_from_the_courier(many: Stand) -> None:
    many.courier._homes[bucket_of(key_of(2))] = NOBODY
    many.ask_many(0, SMALL)
    assert [decode(read).key for read in many.reads] == [key_of(1)]
    assert reasons(many) == {"no_home": 2}
    many.end()


@pytest.mark.parametrize("held", [SMALL[:-1], SMALL[1:], (), SMALL[1:-1]])
def test_without_a_conveyor_the_agent_reads_all_of_a_batch_that_no_switch_holds_all_of(
    stand: Stand, held: tuple[int, ...]
) -> None:
    """The client asks the agent for what the courier leaves when all that it took has come."""
    stand.store.drop(block_of(1))
    stand.hold(held)
    stand.ask_many(0, SMALL)
    assert not stand.reads
    assert reasons(stand) == {"no_conveyor": len(SMALL)}
    assert stand.courier.take_wish(stand.now) == HOME
    stand.end()


@pytest.mark.parametrize("flags", [None, FLAG_RESIDENT, FLAG_RESIDENT | FLAG_LAST])
@pytest.mark.parametrize(
    ("credit", "window", "most"), [(2, 64, 2), (64, 5, 5), (64, 64, MAX_ASKED_A_CLIENT)]
)
def test_no_more_of_many_are_read_from_a_switch_than_there_is_credit_for(
    stand: Stand, credit: int, window: int, most: int, flags: int | None
) -> None:
    """`flags`: of what has come of a block that is being read already; None: nothing has."""
    held = range(100, 120)
    stand.ask_many(0, held)
    assert reasons(stand) == {"no_landing": len(held)}
    requester = stand.core.requester
    requester.config = replace(requester.config, credit_segments=credit)
    requester._asker.switch.window.size = window
    stand.hold([*held, 2])
    stand.pass_time(0.001)
    stand.ask(1, 2)
    if flags is not None:
        stand.receive(frame_of(2, 3, flags=flags))
    stand.ask_many(0, held)
    assert len(stand.reads) == most
    assert reasons(stand) == {"no_landing": len(held), "full": len(held) + 1 - most}
    stand.end()


@pytest.mark.parametrize("held", [True, False])
def test_of_what_a_switch_holds_fewer_are_read_at_once_after_a_silence(
    stand: Stand, held: bool
) -> None:
    switch = stand.core.requester._asker.switch
    window = switch.window
    initial = window.size
    stand.hold([2, 3] if held else [])
    stand.ask(0, 2)
    stand.bring(2, flags=FLAG_RESIDENT if held else 0)
    before = window.size
    assert before == (initial + 1 if held else initial)
    assert (switch.rtt.srtt_s is not None) == held
    stand.ask(0, 3)
    stand.pass_time(0.4)
    assert reasons(stand)["silence"] == 1
    assert window.size == (before / 2 if held else before)
    stand.end()


def test_what_is_shared_is_read_by_the_agent_but_for_the_first(many: Stand) -> None:
    many.ask_many(0, SMALL)
    last = -(-len(content_of(1)) // 1024) - 1
    for chunk in range(last + 1):
        flags = FLAG_SHARED | (FLAG_LAST if chunk == last else 0)
        many.receive(frame_of(1, chunk, flags=flags))
    assert many.given == 1
    assert reasons(many) == {"company": len(SMALL) - 1}
    many.end()


def test_what_follows_a_block_that_does_not_come_is_handed_over_with_it(many: Stand) -> None:
    many.ask_many(0, SMALL)
    many.miss(1)
    assert reasons(many) == {"missed": len(SMALL)}
    assert many.handed_over == len(SMALL)
    many.end()


def test_a_read_of_what_followed_a_block_that_did_not_come_is_no_repeat(many: Stand) -> None:
    """No READ of it has been sent, and one that says so is never held back by a switch."""
    many.ask_many(0, SMALL)
    many.pass_time(PATIENCE_S + 0.001)
    assert reasons(many) == {"silence": len(SMALL)}
    requester = many.core.requester
    sent = []
    for number, flags in ((2, 0), (1, FLAG_RETRY)):
        many.core.reads.prefetch(many.now, NAMESPACE, [key_of(number)], many.now + 0.5)
        sent += [(frame.key, frame.flags) for _, frame in requester.frames_to_send()]
        assert sent[-1:] == [(key_of(number), flags)]
        many.bring(number)
    assert len(sent) == 2
    many.end()


def test_of_a_batch_whose_first_block_was_damaged_no_other_counts_as_damaged(many: Stand) -> None:
    many.ask_many(0, SMALL)
    last = -(-len(content_of(1)) // 1024) - 1
    for chunk in range(last + 1):
        many.receive(frame_of(1, chunk, spoil=chunk == 0, flags=FLAG_LAST * (chunk == last)))
    assert reasons(many) == {"wrong_digest": len(SMALL)}
    assert many.core.requester.counters.corrupt_blocks == 1
    many.end()


def test_what_does_not_come_is_handed_over_and_the_others_are_given(many: Stand) -> None:
    many.put(3)
    many.ask_many(0, (1, 2, 3, 7, 5, 8))
    many.bring(1)
    many.reply()
    many.reply(spoil=4)  # 7: its home has not got it
    many.reply()  # 5: it is of another size
    many.reply(spoil=1)  # 8: other bytes
    assert [block for block, _, _ in many.held[0].values()] == [1, 2]
    assert reasons(many) == {"here": 1, "missed": 1, "no_landing": 1, "wrong_digest": 1}
    many.end()


def test_a_block_that_is_asked_for_twice_in_a_batch_comes_once(many: Stand) -> None:
    many.ask_many(0, (1, 2, 2, 1))
    many.ask(1, 2)
    many.bring(1)
    assert len(many.wanted) == 1
    many.reply()
    assert [block for block, _, _ in many.held[0].values()] == [1, 2, 2, 1]
    assert [block for block, _, _ in many.held[1].values()] == [2]
    many.end()


def test_where_many_come_there_is_soon_room_for_many() -> None:
    stand = Stand()
    stand.fetch(5)
    stand.bring(5)
    stand.store.drop(block_of(5))
    stand.begin_conveyor()
    unknown = [100 + number for number in range(STOCK + 4)]
    stand.ask_many(0, unknown)
    assert reasons(stand) == {"no_landing": len(unknown)}
    stand.ask_many(0, unknown)
    assert reasons(stand) == {"no_landing": len(unknown)}
    assert len(stand.reads) == 1
    stand.end()


def test_a_client_that_goes_takes_its_batch_along(many: Stand) -> None:
    for _ in range(2 * BATCHES):
        many.ask_many(0, SMALL[:3])
        many.leave(0)
    many.bring(1)
    while many.wanted:
        many.reply()
    many.end()
    assert not many.courier._courier.batches_open


def test_so_many_blocks_and_batches_are_asked_for_at_once_and_no_more(many: Stand) -> None:
    many.ask_many(0, [100] * (MAX_MANY + 1))
    assert many.courier.state_of(many.numbers[0]) == CLIENT_OFFENDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(many.sessions[0]), "may_be_given", lambda _self: (0, 1 << 40))
        many.leave(0)
        many.leave(0)  # both are new now
        for _ in range(BATCHES + 1):
            many.ask_many(0, [1, 2])
    assert reasons(many) == {"full": 2}
    many.end()


def test_a_conveyor_that_ends_hands_a_batch_over(many: Stand) -> None:
    many.ask_many(0, SMALL)
    many.bring(1)
    many.reply()
    many.end_conveyor()
    assert many.given == 2
    assert reasons(many) == {"cut_off": len(SMALL) - 2}
    many.end()


# --- for the agent that comes after ---------------------------------------------------------------


def given_in_the_moment(stand: Stand) -> tuple[memoryview, int]:
    """A ledger in which the courier says what it gave, and Python has written nothing; and which
    handle that was."""
    ledger = memoryview(bytearray(stand.ledger_memory))
    book = stand.courier.book

    def look(now: float) -> bool:
        if stand.courier.unbooked:
            ledger[:] = stand.ledger_memory
        return book(now)

    with mock.patch.object(stand.courier, "book", look):
        stand.ask(0, 2)
        stand.bring(2)
    (handle,) = stand.held[0]
    return ledger, handle


def test_what_was_given_in_the_moment_of_death_is_found_once(stand: Stand) -> None:
    memory, handle = given_in_the_moment(stand)
    copy = stand.store.peek(block_of(2))
    assert copy is not None
    (found,) = given_lately(Ledger(memory))
    session, room_bytes = stand.sessions[0].number, copy.reserved_bytes
    row = Row(session, handle, block_of(2), copy.offset, room_bytes, copy.digest, HANDLE)
    assert stand.store.allocator.extent_bytes(found.size_bytes) == room_bytes
    assert found._replace(size_bytes=room_bytes) == row
    assert not list(given_lately(Ledger(memory)))
    booked = Ledger(memoryview(bytearray(stand.ledger_memory)))
    assert not list(given_lately(booked))
    assert [row for _, row in booked.found()] == [row]


@pytest.mark.parametrize("word", [1, 3, 4, 7, 12, 13, 14])
def test_a_record_at_which_its_writer_died_says_nothing(stand: Stand, word: int) -> None:
    memory, _ = given_in_the_moment(stand)
    at = LEDGER_BYTES - MOMENT_BYTES + 8 * word
    assert any(memory[at : at + 8])
    memory[at : at + 8] = bytes(8)
    assert not list(given_lately(Ledger(memory)))


def test_without_rows_for_what_it_may_give_the_courier_is_closed(stand: Stand) -> None:
    ledger = stand.core.ledger
    assert ledger is not None
    row = Row(9, 1, block_of(1), 0, 1, 5, HANDLE)
    rows = [ledger.write(row) for _ in range(ledger.free_rows - 2 * RECORDS + 1)]
    stand.ask(0, 2)
    assert reasons(stand) == {"closed": 1}
    ledger.strike(rows[0])
    stand.ask(0, 2)
    stand.bring(2)
    assert len(stand.held[0]) == 1


def test_others_leave_rows_for_what_is_on_its_way_by_the_courier(stand: Stand) -> None:
    stand.ask(0, 2)
    ledger = stand.core.ledger
    assert ledger is not None
    row = Row(9, 1, block_of(1), 0, 1, 5, HANDLE)
    rows = [ledger.write(row) for _ in range(ledger.free_rows - RECORDS + 1)]
    ledger.strike(rows[0])
    keys = [key_of(1000 + number) for number in range(RECORDS)]
    stand.sessions[1].handle(stand.now, local.Alloc(1, NAMESPACE, keys, [1] * RECORDS))
    assert not stand.sessions[1]._tickets
    stand.bring(2)
    assert len(stand.held[0]) == 1
