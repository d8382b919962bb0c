"""What compiled code does with a card for shared answers: orders of WRITEs, and completions.

The card is a stand-in (`landing_card`): functions that a driver would have, called by the compiled
code. Oracle: the layout of `infiniband/verbs.h` as the stand-in reads it, byte by byte, and a plain
model of what came. Cannot see: whether real drivers have that layout (tests/rdma).
"""

from __future__ import annotations

import random

import pytest
from kvcast.protocol.messages import roce, wire
from kvcast.protocol.messages.wire import Frame
from kvcast.protocol.placement import Arrived
from landing_card import BLOCK, CHUNK, DIGEST, HOME, HOME_IP, SIZE, Card, Reader

PLACE = roce.Place.of(7, 0x1234, 99)


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.mark.parametrize("seed", range(6))
def test_each_chunk_is_ordered_from_and_to_its_place(card: Card, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randrange(1, 64 * CHUNK + 1)
    count = -(-size // CHUNK)
    wanted = sorted(rng.sample(range(count), rng.randrange(1, count + 1)))
    bits = sum(1 << chunk for chunk in wanted)
    base = 0x7000_0000_0000
    first, low = PLACE.immediate(0), PLACE.address_low(0)
    assert card.code.send(card.address, base, size, bits, first, low) == 0
    assert [order[2:] for order in card.posted] == [
        (
            PLACE.immediate(chunk),
            roce.ZONE_ADDRESS | PLACE.address_low(chunk),
            base + chunk * CHUNK,
            min(CHUNK, size - chunk * CHUNK),
        )
        for chunk in wanted
    ]
    flags = [order[1] for order in card.posted]
    signaled, solicited = 2, 4
    ends_segment = wanted[-1] == count - 1
    assert flags[-1] == (signaled | solicited if ends_segment else signaled)
    assert not any(flags[:-1])
    assert [order[0] for order in card.posted] == list(range(1, len(wanted) + 1))
    assert card.queue.number == len(wanted)
    # The orders are a chain again, for the next segment.
    assert card.code.send(card.address, base, 64 * CHUNK, (1 << 64) - 1, first, low) == 0
    assert len(card.posted) == len(wanted) + 64


def test_all_that_has_come_is_noted_and_room_made_for_as_much(card: Card) -> None:
    card.landing.claim(PLACE, "owner")
    card.landing.await_end(PLACE, (1 << 40) - 1, 1 << 39)
    card.completions.extend((0, PLACE.immediate(chunk)) for chunk in range(40))
    assert card.code.take(card.address) == 40
    assert card.allowed == 40
    assert card.landing.take_told() == ["owner"]
    assert card.landing.take(PLACE) == (1 << 40) - 1
    assert card.code.take(card.address) == 0


def test_a_completion_that_failed_breaks_the_pair(card: Card) -> None:
    card.landing.claim(PLACE, "owner")
    card.completions.extend([(0, PLACE.immediate(0)), (5, 0), (0, PLACE.immediate(1))])
    assert card.code.take(card.address) == -5
    assert card.landing.peek(PLACE) == 0


@pytest.mark.parametrize("code", [12, -12])
def test_a_driver_that_refuses_says_why(card: Card, code: int) -> None:
    """By an error's number, as some do, or by its negative."""
    card.refuses = code
    assert card.code.send(card.address, 4096, 10, 1, PLACE.immediate(0), 0) == code
    card.completions.append((0, PLACE.immediate(0)))
    assert card.code.take(card.address) == -1012
    card.refuses = 0
    assert card.code.take(card.address) == -1012, "it is broken for good"


# --- whole segments -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_segment_that_is_there_at_its_answer_s_end_needs_no_python(card: Card, seed: int) -> None:
    reader = Reader(card, seed)
    order = list(range(4))
    reader.rng.shuffle(order)
    for index in order:
        card.landing.claim(reader.place(index), index)
        reader.land(index, reader.missing[index])
        reader.written(index)
    assert reader.frames == []
    assert [arrived.segment for arrived in reader.arrived] == order
    for arrived in reader.arrived:
        whole = reader.missing[arrived.segment]
        assert arrived == Arrived(
            *(reader.serial, whole, 0, arrived.segment, HOME),
            flags=wire.FLAG_WRITE | wire.FLAG_SHARED,
            tag=reader.place(arrived.segment).tag,
            frames=whole.bit_count(),
            last=arrived.last,
        )
        assert arrived.ends_anew
    assert reader.buffer == reader.data


def test_only_what_is_missing_is_put_in_its_place(card: Card) -> None:
    """What came by DATA meanwhile stays as it is, whatever lies in the slot there."""
    reader = Reader(card, 1)
    card.landing.claim(reader.place(1), 1)
    by_data = Frame(
        wire.OP_DATA,
        *BLOCK,
        roce.SHARED_CHUNKING.number(1),
        digest=DIGEST,
        size=SIZE,
        chunk=5,
        payload=b"d" * CHUNK,
    )
    reader.placement.put(reader.number, wire.encode(by_data), HOME)
    reader.land(1, reader.missing[1])
    reader.written(1)
    (arrived,) = reader.arrived
    assert arrived.added == reader.missing[1] & ~(1 << 5)
    start = roce.SHARED_CHUNKING.start_of(1) + 5 * CHUNK
    expected = bytearray(reader.data)
    expected[start : start + CHUNK] = b"d" * CHUNK
    size = roce.SHARED_CHUNKING.bytes_of(SIZE, 1)
    assert reader.segment(1) == expected[start - 5 * CHUNK : start - 5 * CHUNK + size]


@pytest.mark.parametrize(
    "why", ["a chunk lacks", "no claim", "another tag", "another copy", "another node", "no card"]
)
def test_all_else_python_decides(card: Card, why: str) -> None:
    """And nothing is put anywhere."""
    reader = Reader(card, 2)
    if why != "no claim":
        card.landing.claim(reader.place(1), 1)
    lacks = 1 << 17 if why == "a chunk lacks" else 0
    reader.land(1, reader.missing[1] & ~lacks)
    fields = {
        "another tag": {"tag": reader.place(1).tag ^ 1},
        "another copy": {"digest": DIGEST + 1},
        "another node": {"sender": HOME_IP + 1},
    }.get(why, {})
    if why == "another node":
        reader.placement.know({HOME_IP: HOME, HOME_IP + 1: HOME + 1})
    if why == "no card":
        reader.placement.use_landing(0, 0)
    reader.written(1, **fields)
    assert reader.arrived == []
    assert len(reader.frames) == 1
    assert not any(reader.buffer)


def test_a_broken_pair_puts_nothing_in_its_place(card: Card) -> None:
    reader = Reader(card, 3)
    card.landing.claim(reader.place(1), 1)
    reader.land(1, reader.missing[1])
    card.completions.append((5, 0))
    reader.written(1)
    assert len(reader.frames) == 1
    assert not any(reader.buffer)
