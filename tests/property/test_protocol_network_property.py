"""Requesters and homes over a network that loses, repeats, reorders, delays and damages.

Oracle: the bytes that the homes hold, and the deadline. Invariants 1, 2, 4 and 6 of
docs/architecture.md. Cannot see: the real switch program (a model of its pending interest table
stands for it) and the adapters. A failure prints the parameters; the seed in them repeats it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvcast.hostagent.flags import options_of, parse
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import BlockId, Frame
from kvcast.protocol.requester import (
    BulkCopy,
    Fetched,
    Missed,
    MissReason,
    OfferReceived,
    RequesterConfig,
    TryBulk,
)
from kvcast.protocol.responder import ResponderConfig
from kvcast.protocol.responder.catchup import CatchUpConfig
from protocol_network import (
    CoalescingSwitch,
    Delivery,
    Faults,
    Network,
    PlainSwitch,
    Reader,
    Room,
    block_id,
    content,
    number_of,
)
from seeds import seeds

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.one_of(st.sampled_from([1, 1024, 65_536, 65_537, 131_072]), st.integers(1, 300_000))
FAULTS = st.builds(
    Faults,
    loss=st.sampled_from([0.0, 0.01, 0.1, 0.3]),
    duplication=st.sampled_from([0.0, 0.05]),
    corruption=st.sampled_from([0.0, 0.002, 0.02]),
    delay_s=st.sampled_from([0.0001, 0.001]),
    jitter_s=st.sampled_from([0.0, 0.0005, 0.01]),
)
CHUNKINGS = st.sampled_from(wire.CHUNKINGS)
FLIPPED = Faults(loss=0.1, duplication=0.05, corruption=0.02, delay_s=0.0001, jitter_s=0.0)
"""Of one seed's DATA, a flag is flipped that says that it is from the switch's memory."""
IN_ORDER = Faults(jitter_s=0.0)
"""Where DATA overtakes the LAST chunk of its answer before the switch, joiners lose it."""
HOME_A, HOME_B, READER = 1, 2, 10


def middle(coalescing: bool) -> CoalescingSwitch | PlainSwitch:
    return CoalescingSwitch() if coalescing else PlainSwitch()


@settings(max_examples=60, deadline=None)
@given(SEEDS, SIZES, FAULTS, st.booleans(), st.integers(1, 5), st.booleans(), CHUNKINGS)
@example(2, 65_537, FLIPPED, False, 2, False, wire.CHUNKINGS[1])
def test_every_fetch_ends_in_the_right_bytes_or_a_miss(
    seed: int,
    size: int,
    faults: Faults,
    coalescing: bool,
    readers: int,
    size_known: bool,
    chunking: wire.Chunking,
) -> None:
    network = Network(seed, faults=faults, middle=middle(coalescing))
    copies = [content(seed, size), content(seed + 1, size)]
    block = block_id(seed)
    for index, home in enumerate((HOME_A, HOME_B)):
        network.add_responder(home).put(block, copies[index])
    for index in range(readers):
        reader = network.add_reader(READER + index)
        homes = [HOME_A, HOME_B] if index % 2 else [HOME_B, HOME_A]
        expect_size = size if size_known else None
        network.fetch(reader, block, homes, within_s=20, expect_size=expect_size, chunking=chunking)
    network.run()
    network.check_at_rest()
    for reader in network.readers.values():
        (end,) = reader.ends.values()
        if isinstance(end, Fetched):
            assert end.buffer.tobytes() in copies
            assert end.digest == wire.digest_of(end.buffer)
        else:
            # A try fails with a probability of 0.02 at 1 % loss, and of 0.2 at 10 %; a home is
            # left after four in a row, and one fetch in some hundred then misses.
            assert faults.corruption or faults.loss >= 0.1, end


@settings(max_examples=30, deadline=None)
@given(SEEDS, SIZES, CHUNKINGS)
def test_a_home_that_sends_no_large_chunks_is_asked_for_small_ones(
    seed: int, size: int, chunking: wire.Chunking
) -> None:
    network = Network(seed, responder=ResponderConfig(max_chunk_bytes=wire.CHUNK_BYTES))
    data = content(seed, size)
    network.add_responder(HOME_A).put(block_id(seed), data)
    reader = network.add_reader(READER)
    network.fetch(reader, block_id(seed), [HOME_A], within_s=20, chunking=chunking)
    network.run()
    (end,) = reader.ends.values()
    assert isinstance(end, Fetched)
    assert end.buffer == data
    too_large = chunking is not wire.CELLS
    assert reader.core.counters.chunks_reduced == too_large
    assert network.responders[HOME_A].counters.misses_chunk_size == too_large
    network.fetch(reader, block_id(seed), [HOME_A], within_s=20, chunking=chunking)
    network.run()
    assert reader.core.counters.chunks_reduced == too_large, "it is known now"


class NarrowSwitch(PlainSwitch):
    """Drops DATA that does not fit an MTU of 1500, without a word."""

    def cross(self, now: float, source: int, destination: int, frame: Frame) -> list[Delivery]:
        if frame.op == wire.OP_DATA and wire.chunking_of(frame.segment).mtu_bytes > 1500:
            return []
        return super().cross(now, source, destination, frame)


def test_where_large_chunks_vanish_small_ones_are_asked_for_next() -> None:
    network = Network(1, middle=NarrowSwitch())
    data = content(1, 200_000)
    network.add_responder(HOME_A).put(block_id(1), data)
    reader = network.add_reader(READER)
    ends = []
    for _ in range(2):
        network.fetch(reader, block_id(1), [HOME_A], within_s=20, chunking=wire.CHUNKINGS[3])
        network.run()
        ends.append(reader.ends.popitem()[1])
    assert isinstance(ends[0], Missed)
    assert ends[0].reason is MissReason.UNREACHABLE
    assert isinstance(ends[1], Fetched)
    assert ends[1].buffer == data


@settings(max_examples=30, deadline=None)
@given(SEEDS, SIZES, st.booleans(), st.integers(1, 8), st.booleans())
def test_without_faults_every_fetch_succeeds_and_nothing_is_asked_twice(
    seed: int, size: int, coalescing: bool, blocks: int, size_known: bool
) -> None:
    network = Network(seed, middle=middle(coalescing))
    store = network.add_responder(HOME_A)
    reader = network.add_reader(READER)
    for number in range(blocks):
        store.put(block_id(number), content(number, size))
        expect_size = size if size_known else None
        network.fetch(reader, block_id(number), [HOME_A], within_s=20, expect_size=expect_size)
    network.run()
    network.check_at_rest()
    for end in reader.ends.values():
        assert isinstance(end, Fetched)
        assert end.buffer == content(number_of(end.block), size)
        assert end.report.retries == 0
    counters = network.responders[HOME_A].counters
    assert counters.payload_bytes == blocks * size
    assert counters.segments_full == counters.reads == blocks * wire.CELLS.segments_of(size)


@settings(max_examples=40, deadline=None)
@given(SEEDS, SIZES, st.sampled_from(["digest", "bytes", "size"]), st.booleans())
def test_a_lying_home_costs_time_but_never_bytes(
    seed: int, size: int, lie: str, coalescing: bool
) -> None:
    network = Network(seed, middle=middle(coalescing))
    block = block_id(seed)
    truth = content(seed, size)
    lies = {
        "digest": (truth, wire.digest_of(truth) ^ 0xFF or 1),
        "bytes": (bytes([truth[0] ^ 1]) + truth[1:], wire.digest_of(truth)),
        "size": (truth + b"x", wire.digest_of(truth)),
    }
    network.add_responder(HOME_A).put(block, *lies[lie])
    network.add_responder(HOME_B).put(block, truth)
    for index in range(3):
        homes = [HOME_A, HOME_B]
        network.fetch(network.add_reader(READER + index), block, homes, within_s=20)
    network.run()
    network.check_at_rest()
    for reader in network.readers.values():
        (end,) = reader.ends.values()
        assert isinstance(end, Fetched)
        assert end.buffer == truth
        assert reader.core.counters.corrupt_blocks >= 1


@settings(max_examples=30, deadline=None)
@given(SEEDS, SIZES, st.booleans())
def test_a_lie_with_no_honest_home_ends_as_corrupt(seed: int, size: int, coalescing: bool) -> None:
    network = Network(seed, middle=middle(coalescing))
    block = block_id(seed)
    network.add_responder(HOME_A).put(block, content(seed, size), 42)
    reader = network.add_reader(READER)
    network.fetch(reader, block, [HOME_A], within_s=20)
    network.run()
    network.check_at_rest()
    (end,) = reader.ends.values()
    assert isinstance(end, Missed)
    assert end.reason is MissReason.CORRUPT
    assert network.responders[HOME_A].counters.payload_bytes == size * (
        1 + reader.core.config.max_restarts
    )


HOSTILE = st.builds(
    Frame,
    st.sampled_from([wire.OP_DATA, wire.OP_MISS, wire.OP_OFFER, wire.OP_READ]),
    st.just(1),
    st.just(block_id(7).key),
    segment=st.integers(0, 3),
    flags=st.integers(0, 0x3F),
    group=st.just(0),
    digest=st.one_of(st.integers(0, 3), st.just(wire.digest_of(content(7, 150_000)))),
    size=st.sampled_from([0, 1, 149_999, 150_000, 150_001, 1 << 20, 0xFFFFFFFF]),
    chunk=st.integers(0, 70),
    gather=st.sampled_from([0, 255]),
    wanted=st.sampled_from([0, 1, wire.FULL_SEGMENT, 0xF0]),
    tag=st.integers(0, 5),
    payload=st.sampled_from([b"", bytes(24), bytes(1024), bytes(1025)]),
)


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    st.lists(
        st.tuples(HOSTILE, st.sampled_from([HOME_A, HOME_B, 99]), st.floats(0, 0.02)),
        max_size=40,
    ),
)
def test_hostile_frames_neither_crash_nor_deliver_wrong_bytes(
    seed: int, hostile: list[tuple[Frame, int, float]]
) -> None:
    network = Network(seed)
    block = block_id(7)
    truth = content(7, 150_000)
    for home in (HOME_A, HOME_B):
        network.add_responder(home).put(block, truth)
    reader = network.add_reader(READER)

    def inject(frame: Frame, source: int) -> None:
        try:
            arriving = wire.decode(wire.encode(frame))
        except wire.WireError:
            return
        responder = network.responders[HOME_A]
        network.received[reader.core] += 1
        network.received[responder] += arriving.op == wire.OP_READ
        reader.core.receive(network.now, source, arriving)
        network.after_reader(reader)
        responder.receive(network.now, source, arriving)
        network.wake_responder(HOME_A)

    for frame, source, when in hostile:
        network.at(when, lambda f=frame, s=source: inject(f, s))  # type: ignore[misc]
    network.fetch(reader, block, [HOME_A, HOME_B], within_s=20)
    network.run()
    network.check_at_rest()
    (end,) = reader.ends.values()
    if isinstance(end, Fetched):
        assert end.buffer == truth
    if all(source == 99 for _, source, _ in hostile):
        assert isinstance(end, Fetched)


@settings(max_examples=30, deadline=None)
@given(SEEDS, SIZES, st.integers(2, 12))
def test_readers_at_once_cost_the_home_one_answer_a_segment(
    seed: int, size: int, readers: int
) -> None:
    switch = CoalescingSwitch()
    network = Network(seed, faults=IN_ORDER, middle=switch)
    block = block_id(seed)
    network.add_responder(HOME_A).put(block, content(seed, size))
    for index in range(readers):
        reader = network.add_reader(READER + index)
        network.at(
            network.rng.random() * 0.0005,
            lambda reader=reader: network.fetch(reader, block, [HOME_A], within_s=20),  # type: ignore[misc]
        )
    network.run()
    network.check_at_rest()
    assert network.responders[HOME_A].counters.payload_bytes == size
    for reader in network.readers.values():
        (end,) = reader.ends.values()
        assert isinstance(end, Fetched)
        assert end.buffer == content(seed, size)
        assert end.report.tier == "shared"


def copies_read_apart(seed: int, readers: int, apart_s: float, catch_up: CatchUpConfig) -> float:
    """Copies of each block that the home sends to readers that begin within `apart_s`. A copy
    takes 133 µs."""
    blocks = 320
    network = Network(
        seed,
        faults=replace(IN_ORDER, delay_s=0.001),
        middle=CoalescingSwitch(lease_s=4.0),
        responder=ResponderConfig(rate_frames_per_s=15_000, burst_frames=16, catch_up=catch_up),
    )
    store = network.add_responder(HOME_A)
    for number in range(blocks):
        store.put(block_id(number), content(number, 2048))

    def begin(reader: Reader) -> None:
        for number in range(blocks):
            network.fetch(reader, block_id(number), [HOME_A], within_s=60)

    for index in range(readers):
        reader = network.add_reader(READER + index)
        network.at(index * apart_s / readers, lambda reader=reader: begin(reader))  # type: ignore[misc]
    network.run()
    network.check_at_rest()
    for reader in network.readers.values():
        for end in reader.ends.values():
            assert isinstance(end, Fetched)
            assert end.buffer == content(number_of(end.block), 2048)
    return network.responders[HOME_A].counters.payload_bytes / (blocks * 2048)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_readers_a_moment_apart_come_to_share_answers(seed: int) -> None:
    alone = copies_read_apart(seed, 2, 0.018, CatchUpConfig(max_hold_s=0.0))
    copies = copies_read_apart(seed, 2, 0.018, CatchUpConfig())
    assert alone > 1.9
    assert copies - 1 < (alone - 1) / 2  # it takes some of the 40 windows to bring them together


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 10), st.sampled_from([0.002, 0.02, 0.1]))
@pytest.mark.slow
def test_the_home_sends_a_segment_once_a_window_and_loss(
    seed: int, readers: int, loss: float
) -> None:
    """Every full answer is for a window that the switch opened or a READ that it let through
    as a retry; chunks beyond are those of PARTIAL READs, which only losses cause."""
    switch = CoalescingSwitch()
    network = Network(seed, faults=replace(IN_ORDER, loss=loss), middle=switch)
    block = block_id(seed)
    size = 150_000
    network.add_responder(HOME_A).put(block, content(seed, size))
    for index in range(readers):
        network.fetch(network.add_reader(READER + index), block, [HOME_A], within_s=20)
    network.run()
    network.check_at_rest()
    counters = network.responders[HOME_A].counters
    assert counters.segments_full <= switch.count("new") + switch.count("retry")
    assert switch.count("retry") + switch.count("partial") <= network.lost * readers
    repairs = sum(reader.core.counters.reads_partial for reader in network.readers.values())
    if not network.lost:
        assert counters.payload_bytes == size
        assert repairs == 0


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 6))
def test_queues_stay_within_their_bounds_under_a_storm(seed: int, readers: int) -> None:
    """Small bounds everywhere: what does not fit is refused, said, and asked for again."""
    config = RequesterConfig(max_fetches=8, credit_segments=4, window_initial=4, window_max=4)
    responder = ResponderConfig(
        rate_frames_per_s=200_000, burst_frames=16, max_jobs=6, max_jobs_per_reader=3, max_replies=4
    )
    network = Network(seed, requester=config, responder=responder)
    store = network.add_responder(HOME_A)
    for number in range(12):
        store.put(block_id(number), content(number, 100_000))
    for index in range(readers):
        reader = network.add_reader(READER + index)
        for number in range(12):
            network.fetch(reader, block_id(number), [HOME_A], within_s=30)
            assert reader.core.segments_in_flight <= config.credit_segments
            assert reader.core.fetches_in_flight <= config.max_fetches
    network.run()
    network.check_at_rest()
    for reader in network.readers.values():
        reasons = [end.reason for end in reader.ends.values() if isinstance(end, Missed)]
        assert reasons.count(MissReason.QUEUE_FULL) == 4
        for end in reader.ends.values():
            if isinstance(end, Fetched):
                assert end.buffer == content(number_of(end.block), 100_000)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.floats(0.0, 0.01), st.booleans())
def test_a_home_that_dies_is_replaced_by_its_replica(
    seed: int, dies_at: float, coalescing: bool
) -> None:
    network = Network(seed, middle=middle(coalescing))
    block = block_id(seed)
    truth = content(seed, 250_000)
    for home in (HOME_A, HOME_B):
        network.add_responder(home).put(block, truth)
    reader = network.add_reader(READER)
    network.at(dies_at, lambda: network.down.add(HOME_A))
    network.fetch(reader, block, [HOME_A, HOME_B], within_s=20)
    network.run()
    network.check_at_rest()
    (end,) = reader.ends.values()
    assert isinstance(end, Fetched)
    assert end.buffer == truth


@settings(max_examples=30, deadline=None)
@given(SEEDS, SIZES, st.integers(2, 8), st.floats(0, 0.02), st.sampled_from([0.0, 0.002, 0.02]))
def test_a_reader_groups_members_get_what_one_of_them_asks_for(
    seed: int, size: int, members: int, apart_s: float, loss: float
) -> None:
    """One rank reads, at any time before or after the others begin to expect the block."""
    group = 7
    switch = CoalescingSwitch(groups={group: set(range(READER, READER + members))})
    network = Network(seed, faults=replace(IN_ORDER, loss=loss), middle=switch)
    block = block_id(seed)
    truth = content(seed, size)
    network.add_responder(HOME_A).put(block, truth)

    def begin(reader: Reader, expect: bool) -> None:
        network.fetch(reader, block, [HOME_A], within_s=20, group=group, expect=expect)

    for index in range(members):
        reader = network.add_reader(READER + index)
        when = apart_s if index == 0 else 0.0
        network.at(when, lambda r=reader, e=index > 0: begin(r, e))  # type: ignore[misc]
    network.run()
    network.check_at_rest()
    for reader in network.readers.values():
        (end,) = reader.ends.values()
        assert isinstance(end, Fetched)
        assert end.buffer == truth
        if reader.index != READER and not network.lost:
            assert end.report.reads == 0
            assert end.report.tier == "shared"
    if not network.lost:
        assert network.responders[HOME_A].counters.payload_bytes == size


GROUP = 7
GROUP_BLOCK_BYTES = 512 * 1024


AGENT_FLAGS = [
    *("--node-id=n", "--controller=127.0.0.1:1", "--ip=10.0.0.1", "--mac=02:00:00:00:00:01"),
    *("--transport=udp", "--switch-port=1", "--socket=s"),
]
PATIENT = ["--rto-initial=3", "--rto-min=3", "--expect-wait=0.25"]


def group_of_four(seed: int, delay_s: float, *flags: str) -> Network:
    """Four readers that are a group, and a home with three blocks; a frame takes so long. Their
    agents have these flags."""
    agent = options_of(parse([*AGENT_FLAGS, *flags])).agent
    ranks = range(READER, READER + 4)
    switch = CoalescingSwitch(groups={GROUP: set(ranks)})
    network = Network(
        seed,
        faults=replace(IN_ORDER, delay_s=delay_s),
        middle=switch,
        requester=agent.requester,
        responder=agent.responder,
    )
    store = network.add_responder(HOME_A)
    for number in range(3):
        store.put(block_id(number), content(number, GROUP_BLOCK_BYTES))
    for index in ranks:
        network.add_reader(index)
    return network


def all_get_all(network: Network) -> None:
    """Run to the end: every fetch brings its block."""
    network.run()
    network.check_at_rest()
    for reader in network.readers.values():
        assert all(isinstance(end, Fetched) for end in reader.ends.values())


@pytest.mark.parametrize("seed", seeds(8, quick=2))
def test_a_reader_group_that_is_impatient_costs_its_home_no_second_copy(seed: int) -> None:
    """Answers take longer than readers wait, as on a machine that has much to do: READs are
    repeated while the answers to the first ones are on their way."""
    network = group_of_four(seed, 0.12)
    for number in range(3):
        for reader in network.readers.values():
            network.fetch(
                reader,
                block_id(number),
                [HOME_A],
                within_s=20,
                group=GROUP,
                expect=reader.index != READER,
                expect_waits=20,
            )
    all_get_all(network)
    counters = network.responders[HOME_A].counters
    assert counters.reads_retry > 8, "it was not impatient"
    assert counters.payload_bytes <= 1.05 * 3 * GROUP_BLOCK_BYTES


@pytest.mark.parametrize(
    ("late_s", "delay_s", "flags", "copies"),
    [(0.05, 0.03, [], 1.01), (0.09, 0.03, [], 1.15), (0.6, 0.5, PATIENT, 1.05)],
)
def test_members_of_a_group_that_ask_while_the_answer_is_on_its_way_cost_no_second_copy(
    late_s: float, delay_s: float, flags: list[str], copies: float
) -> None:
    """Each asks a moment after the one before it, some when the switch has passed the answer on and
    it has not arrived at them. Who begins to ask when part of the answer is past gets that part.
    Slow links with queues take long, and agents are told to wait longer there."""
    network = group_of_four(1, delay_s, *flags)
    for number in range(3):
        for reader in network.readers.values():
            network.at(
                (reader.index - READER) * late_s,
                partial(
                    network.fetch,
                    reader,
                    block_id(number),
                    [HOME_A],
                    within_s=20,
                    group=GROUP,
                    gather_ms=60,
                ),
            )
    all_get_all(network)
    assert network.responders[HOME_A].counters.payload_bytes <= copies * 3 * GROUP_BLOCK_BYTES


@pytest.mark.parametrize("seed", range(5))
def test_one_lost_read_is_asked_for_again_by_few_of_those_who_wait(seed: int) -> None:
    """All wait for the answer to one READ, which is lost behind the switch: the first to lose
    patience asks again, and the answer comes before the others do."""
    switch = CoalescingSwitch(lease_s=1.0)
    network = Network(seed, faults=IN_ORDER, middle=switch)
    block = block_id(seed)
    network.add_responder(HOME_A).put(block, content(seed, 60_000))
    network.down.add(HOME_A)
    network.at(0.05, lambda: network.down.discard(HOME_A))
    for index in range(8):
        network.fetch(network.add_reader(READER + index), block, [HOME_A], within_s=20)
    network.run()
    network.check_at_rest()
    assert all(
        isinstance(end, Fetched)
        for reader in network.readers.values()
        for end in reader.ends.values()
    )
    assert 1 <= switch.count("retry") <= 3
    assert network.responders[HOME_A].counters.payload_bytes <= 3 * 60_000


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 4])
def test_readers_that_begin_at_different_times_fall_into_step(blocks: int) -> None:
    """Eight readers begin within a tenth of the time that the home needs to send the blocks once.
    Had they kept their distance, each would have cost the home a copy."""
    size = 2 << 20
    copies = []
    for seed in range(4):
        responder = ResponderConfig(rate_frames_per_s=100_000, burst_frames=32)
        network = Network(seed, faults=IN_ORDER, middle=CoalescingSwitch(), responder=responder)
        store = network.add_responder(HOME_A)
        names = [block_id(number) for number in range(blocks)]
        for number, name in enumerate(names):
            store.put(name, content(number, size))

        def begin(reader: Reader, network: Network = network) -> None:
            for number in range(blocks):
                network.fetch(reader, block_id(number), [HOME_A], within_s=60, expect_size=size)

        whole_s = blocks * size / wire.CHUNK_BYTES / responder.rate_frames_per_s
        for index in range(8):
            reader = network.add_reader(READER + index)
            when = network.rng.random() * whole_s / 10
            network.at(when, lambda r=reader, begin=begin: begin(r))  # type: ignore[misc]
        network.run()
        network.check_at_rest()
        copies.append(network.responders[HOME_A].counters.payload_bytes / (blocks * size))
    assert sum(copies) / len(copies) < 1.5, copies


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(SEEDS, FAULTS, st.booleans(), st.booleans())
def test_everything_at_once(seed: int, faults: Faults, coalescing: bool, offers: bool) -> None:
    """Blocks of many sizes, evicted and replaced while they are read, readers that give up, homes
    that go and come back, little memory, and a bulk way that works half of the time."""
    config = RequesterConfig(
        max_fetches=6,
        credit_segments=6,
        window_initial=3,
        bulk_available=True,
        usable_offer_kinds=frozenset({wire.OFFER_TCP}) if offers else frozenset(),
        expect_wait_s=0.005,
    )
    responder = ResponderConfig(rate_frames_per_s=50_000, burst_frames=16, max_jobs=12)
    network = Network(
        seed, faults=faults, middle=middle(coalescing), requester=config, responder=responder
    )
    rng = random.Random(seed)
    homes = [HOME_A, HOME_B]
    copies: dict[BlockId, set[bytes]] = {block_id(n): set() for n in range(6)}

    def put(home: int, block: BlockId) -> None:
        data = content(rng.getrandbits(32), rng.choice([1, 5000, 65_536, 150_000, 200_001]))
        copies[block].add(data)
        network.stores[home].put(block, data)

    def evict(home: int, block: BlockId) -> None:
        network.stores[home].blocks.pop(block, None)

    def bulk(reader: Reader, event: TryBulk | OfferReceived) -> None:
        held = network.stores[event.home].blocks.get(event.block)
        copy = None
        if held is not None and rng.random() < 0.5:
            copy = BulkCopy(Room(memoryview(bytearray(held.data))), held.digest)
        network.at(
            network.now + rng.random() * 0.05, lambda: network.bulk_done(reader, event, copy)
        )

    def begin(reader: Reader) -> None:
        block = block_id(rng.randrange(6))
        if block in reader.under_way.values():
            return
        rng.shuffle(homes)
        expect = rng.random() < 0.2
        fetch_id = network.fetch(
            reader, block, homes, within_s=rng.choice([0.01, 0.5, 5.0]), expect=expect
        )
        if rng.random() < 0.1:
            network.at(network.now + rng.random() * 0.02, lambda: network.cancel(reader, fetch_id))

    network.on_bulk = bulk
    for home in homes:
        network.add_responder(home, offers=offers)
        for block in copies:
            put(home, block)
    for index in range(3):
        reader = network.add_reader(READER + index)
        reader.arena.limit = 500_000
        for _ in range(10):
            network.at(rng.random() * 0.2, lambda r=reader: begin(r))  # type: ignore[misc]
    for _ in range(8):
        action = rng.choice([put, evict])
        home, block = rng.choice(homes), block_id(rng.randrange(6))
        network.at(rng.random() * 0.2, lambda a=action, h=home, b=block: a(h, b))  # type: ignore[misc]
    network.at(0.05, lambda: network.down.add(HOME_A))
    network.at(0.15, lambda: network.down.discard(HOME_A))
    network.run()
    network.check_at_rest()
    for reader in network.readers.values():
        for end in reader.ends.values():
            if isinstance(end, Fetched):
                assert end.buffer.tobytes() in copies[end.block]
