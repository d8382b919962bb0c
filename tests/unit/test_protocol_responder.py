"""The home, one behaviour at a time, with readers played by hand.

Oracle: the frames, releases and counters that each scenario must lead to. Cannot see: sockets, and
whether readers are content (tests/property/test_protocol_network_property.py).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import BlockId, Frame, Offer, decode_offer, digest_of
from kvcast.protocol.responder import HeldBlock, Responder, ResponderConfig
from kvcast.protocol.responder.catchup import CatchUpConfig

BLOCK = BlockId(3, bytes(range(16)))
BYTES = random.Random(1).randbytes(wire.SEGMENT_BYTES + 1500)  # segments of 64 and 2 chunks
DIGEST = digest_of(BYTES)
FULL = wire.FULL_SEGMENT


class Held:
    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.digest = digest_of(data)
        self.holds = 0

    def release(self) -> None:
        self.holds -= 1
        assert self.holds >= 0


class Bench:
    """A home of one block."""

    def __init__(self, *, make_offer: Any = None, is_home: Any = None, **config: Any) -> None:
        self.held = Held(BYTES)
        self.core = Responder(
            ResponderConfig(**config), lookup=self.lookup, make_offer=make_offer, is_home=is_home
        )

    def lookup(self, block: BlockId) -> HeldBlock | None:
        if block != BLOCK:
            return None
        self.held.holds += 1
        return self.held

    def read(
        self,
        reader: int = 1,
        segment: int = 0,
        wanted: int = FULL,
        *,
        now: float = 0.0,
        block: BlockId = BLOCK,
        retry: bool = False,
        marked: bool = False,
        **rest: Any,
    ) -> None:
        flags = (wire.FLAG_RETRY if retry else 0) | (wire.FLAG_SHARED if marked else 0)
        if wanted != FULL:
            flags = wire.FLAG_PARTIAL
        frame = Frame(wire.OP_READ, *block, segment=segment, wanted=wanted, flags=flags, **rest)
        self.core.receive(now, reader, wire.decode(wire.encode(frame)))

    def send(self, budget: int = 1000, now: float = 0.0) -> list[tuple[int, Frame]]:
        return [
            (reader, wire.decode(wire.encode(frame)))
            for reader, frame in self.core.frames_to_send(now, budget)
        ]


def test_full_read_is_answered_by_all_chunks_and_the_last_says_so() -> None:
    bench = Bench()
    bench.read(reader=7, group=5, tag=99)
    frames = bench.send()
    assert [reader for reader, _ in frames] == [7] * 64
    assert [frame.chunk for _, frame in frames] == list(range(64))
    assert [frame.flags for _, frame in frames] == [0] * 63 + [wire.FLAG_LAST]
    assert b"".join(bytes(frame.payload) for _, frame in frames) == BYTES[:65536]
    assert {(f.group, f.tag, f.digest, f.size) for _, f in frames} == {(5, 99, DIGEST, len(BYTES))}
    assert bench.held.holds == 0
    assert bench.core.get_timer(0.0) is None


def test_short_segment_ends_with_a_padded_chunk() -> None:
    bench = Bench()
    bench.read(segment=1)
    frames = [frame for _, frame in bench.send()]
    assert [frame.chunk for frame in frames] == [0, 1]
    assert bytes(frames[1].payload) == BYTES[65536 + 1024 :] + bytes(2048 - 1500)
    assert bench.core.counters.payload_bytes == 1500


def test_partial_read_gets_only_what_it_wants() -> None:
    bench = Bench()
    bench.read(wanted=1 << 3 | 1 << 60, tag=4)
    frames = [frame for _, frame in bench.send()]
    assert [frame.chunk for frame in frames] == [3, 60]
    assert frames[0].flags == wire.FLAG_PARTIAL
    assert frames[1].flags == wire.FLAG_PARTIAL | wire.FLAG_LAST


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        ({"block": BlockId(3, bytes(16))}, wire.MISS_NOT_FOUND),
        ({"block": BlockId(4, BLOCK.key)}, wire.MISS_NOT_FOUND),
        ({"digest": DIGEST ^ 1}, wire.MISS_DIGEST_GONE),
        ({"segment": 2}, wire.MISS_NOT_FOUND),
        ({"segment": 1, "wanted": 0b100}, wire.MISS_NOT_FOUND),
    ],
)
def test_what_is_not_there_is_a_miss_with_a_reason(read: dict[str, Any], reason: int) -> None:
    bench = Bench()
    bench.read(tag=8, **read)
    ((reader, miss),) = bench.send()
    assert reader == 1
    assert (miss.op, miss.chunk, miss.tag) == (wire.OP_MISS, reason, 8)
    assert miss.digest == read.get("digest", 0)
    assert bool(miss.flags & wire.FLAG_PARTIAL) == ("wanted" in read)
    assert bench.held.holds == 0
    counters = bench.core.counters
    assert counters.misses == 1
    assert counters.misses_beyond == ("segment" in read)
    assert counters.misses_not_found + counters.misses_digest_gone == ("segment" not in read)


def test_read_that_went_astray_is_told_so() -> None:
    bench = Bench(is_home=lambda block: block.namespace == 3)
    bench.read(block=BlockId(4, bytes(16)))
    bench.read(block=BlockId(3, bytes(16)))
    assert [miss.chunk for _, miss in bench.send()] == [wire.MISS_NOT_HOME, wire.MISS_NOT_FOUND]


def test_pinned_copy_that_is_here_is_sent() -> None:
    bench = Bench()
    bench.read(segment=1, digest=DIGEST)
    assert len(bench.send()) == 2


def test_only_reads_are_answered() -> None:
    bench = Bench()
    bench.core.receive(0.0, 1, Frame(wire.OP_MISS, *BLOCK, chunk=1))
    assert bench.send() == []
    assert bench.core.counters.unexpected_op == 1


# --- taking turns, keeping pace -----------------------------------------------------------------


def test_readers_take_turns() -> None:
    bench = Bench(turn_frames=4)
    bench.read(reader=1)
    bench.read(reader=1, segment=1)
    bench.read(reader=2)
    assert [reader for reader, _ in bench.send(12)] == [1] * 4 + [2] * 4 + [1] * 4


def test_of_readers_of_one_block_the_one_furthest_behind_goes_first() -> None:
    bench = Bench(turn_frames=64)
    bench.read(reader=1, segment=1)
    bench.read(reader=2, segment=1)
    bench.read(reader=3, segment=0)
    assert [(reader, f.segment) for reader, f in bench.send(66)][::64] == [(3, 0), (1, 1)]


def test_being_behind_does_not_keep_others_waiting_for_ever() -> None:
    bench = Bench(turn_frames=4, max_bypass=2)
    bench.read(reader=1, segment=1)  # two chunks
    bench.read(reader=2)
    assert [reader for reader, _ in bench.send(14)] == [2] * 8 + [1] * 2 + [2] * 4


def test_pace_is_kept_and_the_timer_says_when_to_go_on() -> None:
    bench = Bench(rate_frames_per_s=1000, burst_frames=10, turn_frames=5)
    bench.read()
    assert len(bench.send(now=0.0)) == 10
    assert bench.send(now=0.0) == []
    sent = 10
    now = 0.0
    while (when := bench.core.get_timer(now)) is not None:
        assert when > now
        now = when
        sent += len(bench.send(now=now))
    assert sent == 64
    assert now == pytest.approx(0.054, abs=0.002)


def test_pace_can_be_changed() -> None:
    bench = Bench(rate_frames_per_s=10, burst_frames=1)
    bench.read()
    assert len(bench.send()) == 1
    bench.core.set_rate(0.0, 0)
    assert len(bench.send()) == 63


def test_budget_is_kept() -> None:
    bench = Bench()
    bench.read()
    bench.read(block=BlockId(9, bytes(16)))
    assert len(bench.send(3)) == 3
    assert bench.core.get_timer(0.0) == 0.0


# --- asked twice ----------------------------------------------------------------------------------


def test_what_waits_already_is_not_sent_twice_to_the_same_reader() -> None:
    bench = Bench()
    bench.read()
    bench.read(retry=True)
    bench.read(wanted=0b11)
    assert bench.core.counters.reads_collapsed == 2
    assert bench.held.holds == 1
    assert len(bench.send()) == 64
    bench.read(retry=True)  # it has gone out: this is another answer
    assert len(bench.send()) == 64


def test_a_groups_read_that_is_repeated_is_answered_by_the_end_of_what_went_out() -> None:
    bench = Bench(repeated_s=2.0)
    bench.read(group=5)
    assert len(bench.send()) == 64
    bench.read(group=5, retry=True, now=1.0)
    bench.read(group=5, retry=True, now=1.0)
    [(reader, last)] = bench.send(now=1.0)
    assert (reader, last.chunk, last.flags, last.group) == (1, 63, wire.FLAG_LAST, 5)
    counters = bench.core.counters
    assert (counters.reads_repeated, counters.reads_collapsed) == (1, 1)
    assert (counters.segments_full, counters.data_frames) == (1, 65)
    bench.read(group=5, wanted=FULL ^ 1 << 63, now=1.0)  # all of it was lost, after all
    assert len(bench.send(now=1.0)) == 63
    assert bench.held.holds == 0


@pytest.mark.parametrize(
    "repeat",
    [
        {"group": 5, "retry": True, "now": 2.1},  # too long ago
        {"group": 5, "now": 1.0},  # read anew
        {"group": 5, "retry": True, "now": 1.0, "reader": 2},  # another reader's first was lost
        {"retry": True, "now": 0.1},  # for itself alone
        {"group": 6, "retry": True, "now": 0.1, "reader": 2},  # in another group
        {"group": 5, "now": 0.1, "reader": 2},  # no switch has passed the answer on
    ],
)
def test_what_may_be_no_impatience_is_answered_in_full(repeat: dict[str, Any]) -> None:
    bench = Bench(repeated_s=2.0)
    bench.read(group=5)
    bench.send()
    bench.read(**repeat)
    assert len(bench.send(now=repeat["now"])) == 64
    assert bench.core.counters.reads_repeated == 0


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("reader", [1, 2])
def test_a_groups_read_that_crosses_the_answer_gets_the_end_of_it(reader: int, retry: bool) -> None:
    """A member is a moment late, or asks twice while the home gathers, and the switch, which has
    passed the answer on to all of the group, waits for it no more."""
    bench = Bench()
    bench.read(group=5, marked=True)
    assert len(bench.send()) == 64
    bench.read(group=5, reader=reader, retry=retry, marked=True, now=0.1)
    [(to, last)] = bench.send(now=0.1)
    assert (to, last.chunk, last.flags & ~wire.FLAG_SHARED) == (reader, 63, wire.FLAG_LAST)


def test_a_groups_read_that_never_arrived_is_answered_in_full_when_repeated() -> None:
    bench = Bench()
    bench.read(group=5, retry=True)
    assert len(bench.send()) == 64


def test_answers_to_groups_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcast.protocol.responder.responder._MOST_GROUP_ANSWERS", 1)
    bench = Bench()
    for segment in (0, 1):
        bench.read(segment=segment, group=5)
        bench.send()
    bench.read(segment=1, group=5, retry=True)
    assert len(bench.send()) == 1
    bench.read(segment=0, group=5, retry=True)  # forgotten
    assert len(bench.send()) == 64


def test_repair_of_what_has_gone_out_is_answered_before_the_rest() -> None:
    bench = Bench()
    bench.read()
    bench.send(10)
    bench.read(wanted=0b1 | 1 << 50)
    bench.read(wanted=0b10)
    chunks = [(frame.chunk, frame.flags) for _, frame in bench.send()]
    assert chunks[:2] == [(0, wire.FLAG_PARTIAL), (1, wire.FLAG_PARTIAL | wire.FLAG_LAST)]
    assert chunks[2:] == [(c, wire.FLAG_LAST if c == 63 else 0) for c in range(10, 64)]
    assert bench.held.holds == 0


def test_another_reader_gets_an_answer_of_its_own() -> None:
    bench = Bench()
    bench.read(reader=1)
    bench.read(reader=2, retry=True)
    assert sorted(reader for reader, _ in bench.send()) == [1] * 64 + [2] * 64


def test_new_copy_under_the_same_key_is_not_mixed_with_the_old() -> None:
    bench = Bench()
    old = bench.held
    bench.read(segment=1)
    bench.held = Held(bytes(len(BYTES)))
    bench.read(segment=1)
    frames = [frame for _, frame in bench.send()]
    assert [frame.digest for frame in frames] == [DIGEST] * 2 + [bench.held.digest] * 2
    assert (old.holds, bench.held.holds) == (0, 0)


# --- gathering --------------------------------------------------------------------------------


def test_answer_is_held_for_joiners_as_long_as_the_read_allows() -> None:
    bench = Bench(max_gather_ms=50)
    bench.read(gather=10, now=1.0)
    bench.read(gather=10, now=1.005)
    assert bench.send(now=1.009) == []
    assert bench.core.get_timer(1.0) == pytest.approx(1.010)
    assert len(bench.send(now=1.010)) == 64


def test_gathering_is_bounded_and_not_for_repairs() -> None:
    bench = Bench(max_gather_ms=50)
    bench.read(gather=255, now=1.0)
    assert bench.core.get_timer(1.0) == pytest.approx(1.050)
    bench.read(segment=1, wanted=1, gather=255, now=1.0)
    assert len(bench.send(now=1.0)) == 1


# --- bounds -----------------------------------------------------------------------------------


def test_a_reader_cannot_fill_the_queue_for_others() -> None:
    bench = Bench(max_jobs=3, max_jobs_per_reader=1)
    bench.read(reader=1)
    bench.read(reader=1, segment=1)
    bench.read(reader=2)
    bench.read(reader=3)
    bench.read(reader=4)
    assert bench.core.segments_waiting == 3
    frames = bench.send()
    misses = [(reader, frame.chunk) for reader, frame in frames if frame.op == wire.OP_MISS]
    assert misses == [(1, wire.MISS_OVERLOADED), (4, wire.MISS_OVERLOADED)]
    assert bench.core.counters.misses_overloaded == 2
    assert bench.held.holds == 0


class Shared(Bench):
    """A home of one block in every namespace."""

    def lookup(self, block: BlockId) -> HeldBlock | None:
        return super().lookup(BlockId(BLOCK.namespace, block.key))


def test_a_tenant_cannot_fill_the_queue_for_others() -> None:
    bench = Shared(max_jobs=128)

    def taken(namespace: int, reader: int) -> bool:
        before = bench.core.segments_waiting
        bench.read(reader=reader, block=BlockId(namespace, BLOCK.key))
        return bench.core.segments_waiting > before

    assert [taken(1, reader) for reader in range(130)] == [True] * 128 + [False] * 2
    assert [taken(2, reader) for reader in range(3)] == [True, True, False]
    many = [taken(namespace, 1) for namespace in range(3, 300)]
    assert bench.core.segments_waiting == 256
    assert many == [True] * 126 + [False] * 171
    bench.send(100_000)
    assert taken(2, 9), "what has gone out makes room"
    bench.core.close()
    assert bench.held.holds == 0


def test_misses_waiting_are_bounded() -> None:
    bench = Bench(max_replies=2)
    for _ in range(5):
        bench.read(block=BlockId(9, bytes(16)))
    assert len(bench.send()) == 2
    assert bench.core.counters.replies_dropped == 3


def test_reader_that_left_is_forgotten() -> None:
    bench = Bench()
    bench.read(reader=1)
    bench.read(reader=1, segment=1, gather=20)
    bench.read(reader=1, block=BlockId(9, bytes(16)))
    bench.read(reader=2, segment=1)
    bench.core.drop_reader(1)
    assert bench.held.holds == 1
    assert [reader for reader, _ in bench.send(now=1.0)] == [2, 2]
    assert bench.core.segments_waiting == 0


def test_close_releases_everything() -> None:
    bench = Bench()
    bench.read(reader=1, gather=20)
    bench.read(reader=2)
    bench.read(reader=3, wanted=1)
    bench.send(5)
    bench.core.close()
    assert bench.held.holds == 0
    assert bench.send(now=1.0) == []
    assert bench.core.get_timer(1.0) is None


# --- offers and heat --------------------------------------------------------------------------


def test_offer_precedes_the_first_segments_full_answer() -> None:
    offer = Offer(wire.OFFER_RDMA, 1, 2, 3, 4)
    bench = Bench(make_offer=lambda block, held: offer)
    bench.read(tag=6)
    frames = [frame for _, frame in bench.send()]
    assert [frame.op for frame in frames] == [wire.OP_OFFER] + [wire.OP_DATA] * 64
    assert decode_offer(frames[0].payload) == offer
    assert (frames[0].digest, frames[0].size, frames[0].tag) == (DIGEST, len(BYTES), 6)
    bench.read(segment=1)
    bench.read(wanted=1)
    assert all(frame.op == wire.OP_DATA for _, frame in bench.send())


def test_block_of_one_segment_is_not_offered() -> None:
    bench = Bench(make_offer=lambda block, held: Offer(1, 1, 2, 3, 4))
    bench.held = Held(b"small")
    bench.read()
    assert [frame.op for _, frame in bench.send()] == [wire.OP_DATA]


@pytest.mark.parametrize("looks_for_company", [{"gather": 20}, {"group": 7}])
def test_who_looks_for_company_is_offered_nothing(looks_for_company: dict[str, int]) -> None:
    bench = Bench(make_offer=lambda block, held: Offer(1, 1, 2, 3, 4))
    bench.read(**looks_for_company)
    assert [frame.op for _, frame in bench.send(now=0.1)] == [wire.OP_DATA] * 64


def test_a_block_that_another_is_about_to_read_is_called_shared_and_not_offered() -> None:
    asked: list[tuple[BlockId, int]] = []

    def is_awaited(_now: float, block: BlockId, reader: int) -> bool:
        asked.append((block, reader))
        return True

    bench = Bench(make_offer=lambda block, held: Offer(1, 1, 2, 3, 4))
    bench.core = Responder(
        ResponderConfig(),
        lookup=bench.lookup,
        make_offer=lambda block, held: Offer(1, 1, 2, 3, 4),
        is_awaited=is_awaited,
    )
    bench.read(reader=5)
    frames = [frame for _, frame in bench.send()]
    assert [frame.op for frame in frames] == [wire.OP_DATA] * 64
    assert all(frame.flags & wire.FLAG_SHARED for frame in frames)
    bench.read(reader=5, segment=1)
    bench.read(reader=5, wanted=1)
    assert not any(frame.flags & wire.FLAG_SHARED for _, frame in bench.send())
    assert asked == [(BLOCK, 5)], "the first segment tells"


def test_answers_make_room_for_what_leaves_another_way_over_the_same_link() -> None:
    bench = Bench(rate_frames_per_s=1000.0, burst_frames=64)
    bench.read()
    assert len(bench.send(now=0.0)) == 64
    bench.core.sent_otherwise(64 * 1024)
    bench.read()
    assert len(bench.send(now=0.064)) == 32, "half of the link is theirs all the same"
    assert len(bench.send(now=0.096)) == 16
    assert len(bench.send(now=0.128)) == 16, "all is paid for now"


def test_heat_counts_reads_and_distinct_readers_and_forgets_the_coldest() -> None:
    blocks = {BlockId(3, bytes([i]) * 16): Held(bytes([i])) for i in range(3)}

    def lookup(block: BlockId) -> HeldBlock | None:
        held = blocks[block]
        held.holds += 1
        return held

    responder = Responder(ResponderConfig(heat_blocks=2), lookup=lookup)
    first, second, third = blocks

    def read(block: BlockId, reader: int) -> None:
        responder.receive(0.0, reader, Frame(wire.OP_READ, *block, wanted=FULL))
        responder.frames_to_send(0.0, 100)

    for reader in (1, 1, 2):
        read(first, reader)
    read(second, 1)
    read(first, 3)
    read(third, 1)  # second was read longest ago
    heat = responder.take_heat(10)
    assert [(h.block, h.reads, h.readers, h.size) for h in heat] == [
        (first, 4, 3, 1),
        (third, 1, 1, 1),
    ]
    assert responder.take_heat(10) == []


def test_a_small_block_that_is_read_more_often_is_hotter_than_a_large_one() -> None:
    responder = Responder(ResponderConfig(), lookup=lambda _block: None)
    small, large = (BlockId(3, bytes([number]) * 16) for number in range(2))
    for _ in range(2):
        responder.note_heat(1, small, wire.SEGMENT_BYTES, 7)
    responder.note_heat(1, large, 8 * wire.SEGMENT_BYTES, 8, segments=8)
    assert [(h.block, h.reads) for h in responder.take_heat(1)] == [(small, 2)]


class Pair:
    """Two readers that ask, 5 ms apart, for the same small blocks of one home."""

    def __init__(self, **catch_up: Any) -> None:
        self.held = Held(BYTES[:1024])
        config = ResponderConfig(rate_frames_per_s=20, catch_up=CatchUpConfig(**catch_up))
        self.core = Responder(config, lookup=self.lookup)
        for number in range(10):
            now = 1.0 + number / 100
            self.read(now, 1, number)
            assert len(self.core.frames_to_send(now, 100)) == 1
        self.read(1.095, 2, 8)
        self.read(1.095, 2, 9)

    def lookup(self, _block: BlockId) -> HeldBlock:
        self.held.holds += 1
        return self.held

    def read(
        self,
        now: float,
        reader: int,
        number: int,
        flags: int = wire.FLAG_SHARED,
        gather: int = 0,
    ) -> None:
        block = BlockId(1, bytes([number] * 16))
        frame = Frame(wire.OP_READ, *block, wanted=FULL, flags=flags, gather=gather)
        self.core.receive(now, reader, wire.decode(wire.encode(frame)))

    def send(self, now: float) -> list[tuple[int, int]]:
        frames = self.core.frames_to_send(now, 100)
        return [(reader, frame.key[0]) for reader, frame in frames]


def test_new_answers_wait_for_a_reader_behind_and_are_shared_with_it() -> None:
    pair = Pair()
    assert pair.core.counters.reads_behind == 2
    assert pair.send(1.095) == [(2, 8), (2, 9)]  # those behind do not wait
    pair.read(1.1, 1, 10, gather=1)
    assert pair.core.counters.segments_held_back == 1
    assert pair.send(1.1) == []
    due = pair.core.get_timer(1.1)
    assert due is not None
    assert 1.105 <= due <= 1.12  # longer than the readers are apart
    pair.read(1.105, 2, 10)  # a switch would have let it wait
    assert pair.core.counters.reads_merged == 1
    assert pair.send(due) == [(1, 10)]
    assert pair.held.holds == 0


def test_readers_behind_go_before_what_nobody_has_had() -> None:
    pair = Pair(max_slowdown=0.0)
    pair.read(1.095, 1, 10)
    pair.read(1.095, 1, 11)
    assert pair.send(1.095) == [(2, 8), (2, 9), (1, 10), (1, 11)]


@pytest.mark.parametrize("flags", [0, wire.FLAG_SHARED | wire.FLAG_RETRY])
def test_reads_that_nobody_can_join_and_repeats_do_not_wait(flags: int) -> None:
    pair = Pair()
    pair.send(1.095)
    pair.read(1.1, 1, 10, flags)
    assert pair.send(1.1) == [(1, 10)]
    assert pair.core.counters.segments_held_back == 0


def test_reads_that_share_nothing_wait_only_if_many_were_behind() -> None:
    pair = Pair()
    pair.send(1.095)
    pair.read(1.1, 1, 10)
    assert pair.send(1.1) == [(1, 10)]
    for number in range(2, 8):
        pair.read(1.1, 2, number)
    assert pair.core.counters.reads_behind == 8
    pair.send(1.1)
    pair.read(1.101, 1, 11)
    assert pair.send(1.101) == []


# --- namespaces -------------------------------------------------------------------------------

LOUD = BlockId(BLOCK.namespace + 1, BLOCK.key)


def two_namespaces(weight_of_loud: float = 1.0, **config: Any) -> Responder:
    """A home of a block of each; the loud one's has had all that went out so far."""
    held = {block: Held(BYTES) for block in (BLOCK, LOUD)}

    def lookup(block: BlockId) -> HeldBlock:
        held[block].holds += 1
        return held[block]

    core = Responder(
        ResponderConfig(**config),
        lookup=lookup,
        weight_of=lambda number: weight_of_loud if number == LOUD.namespace else 1.0,
    )
    for reader in range(10, 20):
        for segment in (0, 1):
            core.receive(0.0, reader, Frame(wire.OP_READ, *LOUD, segment=segment, wanted=FULL))
    return core


def namespaces_sent(core: Responder, frames: int) -> list[int]:
    return [frame.namespace for _, frame in core.frames_to_send(0.0, frames)]


def test_a_namespace_that_asks_for_little_is_answered_before_one_that_asks_for_much() -> None:
    core = two_namespaces()
    core.receive(0.0, 1, Frame(wire.OP_READ, *BLOCK, segment=0, wanted=1, flags=wire.FLAG_PARTIAL))
    assert BLOCK.namespace in namespaces_sent(core, 16)  # what it has not had it has not saved
    namespaces_sent(core, 400)
    core.receive(0.0, 1, Frame(wire.OP_READ, *BLOCK, segment=0, wanted=FULL))
    assert namespaces_sent(core, 64) == [BLOCK.namespace] * 64


def test_namespaces_that_both_ask_for_much_share_by_weight_however_many_readers_each_has() -> None:
    for weight in (1.0, 3.0):
        core = two_namespaces(weight, saved_frames=1)
        core.receive(0.0, 1, Frame(wire.OP_READ, *BLOCK, segment=0, wanted=FULL))
        core.receive(0.0, 1, Frame(wire.OP_READ, *BLOCK, segment=1, wanted=FULL))
        sent = namespaces_sent(core, 96)
        assert abs(sent.count(LOUD.namespace) - 96 * weight / (1 + weight)) <= 2 * 8


def test_a_reader_of_two_namespaces_does_not_wait_for_itself() -> None:
    core = two_namespaces()
    namespaces_sent(core, 64)
    core.receive(0.0, 10, Frame(wire.OP_READ, *BLOCK, segment=0, wanted=FULL))
    assert BLOCK.namespace in namespaces_sent(core, 16)
