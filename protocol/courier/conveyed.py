"""What conveyors bring: replies, and the bytes of blocks.

Owns: which reply is for which question, where its bytes go, and when a conveyor is left. Must not
know: how its bytes are received (`kvcast.hostagent.network.conveyor`).
"""

from __future__ import annotations

from kvcast.native.subset import U64, native
from kvcast.protocol.conveyor import (
    GATHER_BYTES,
    GIVEN_HERE,
    NOT_HERE,
    READ_IT,
    REQUESTS,
    Expected,
    Reply,
    Taker,
    next_expected,
)
from kvcast.protocol.courier.arrivals import whole_came
from kvcast.protocol.courier.endings import give_up
from kvcast.protocol.courier.permissions import take_landing
from kvcast.protocol.courier.requests import swap64
from kvcast.protocol.courier.states import AskedState, become, is_conveyed
from kvcast.protocol.courier.structures import (
    ASKED_BITS,
    COMPANY,
    CUT_OFF,
    MAX_ASKED,
    MISSED,
    NO_LANDING,
    Courier,
)
from kvcast.protocol.placement import Copy


@native
def _of_expected(courier: Courier, taker: Taker) -> U64:
    """The question that the first of what a conveyor is to bring is for; MAX_ASKED if it was given
    up."""
    return _asked_of(courier, taker.expected[taker.first])


@native
def _asked_of(courier: Courier, expected: Expected) -> U64:
    serial = 0 + expected.number
    number = serial & ((1 << ASKED_BITS) - 1)
    asked = courier.asked[number]
    if is_conveyed(asked) and asked.serial == serial:
        return number
    return 0 + MAX_ASKED


@native
def is_reply(taker: Taker) -> bool:
    """Whether a reply is to the request whose turn it is, and of a form that there is."""
    reply = taker.reply[0]
    expected = taker.expected[taker.first]
    if taker.count == 0 or reply.number != expected.number:
        return False
    if reply.status == GIVEN_HERE:
        return reply.size > expected.start
    return reply.status == NOT_HERE or reply.status == READ_IT


@native
def is_of(landed: Copy, reply: Reply) -> bool:
    """Whether what comes is of the copy whose first segment is there."""
    return reply.size == landed.size and reply.digest == swap64(landed.digest)


@native
def reply_came(courier: Courier, taker: Taker) -> None:
    """A reply's header is in `reply`: where the bytes of the block go."""
    if not is_reply(taker):
        cut_off(courier, taker)
        return
    reply = taker.reply[0]
    number = _of_expected(courier, taker)
    if reply.status != GIVEN_HERE:
        next_expected(taker)
        if number < MAX_ASKED:
            give_up(courier, number, COMPANY if reply.status == READ_IT else MISSED)
        return
    taker.taking = 1
    taker.block = 0
    taker.size = reply.size
    taker.there = taker.expected[taker.first].start
    if number < MAX_ASKED and courier.asked[number].state == AskedState.ORDERED:
        asked = courier.asked[number]
        place = take_landing(courier, asked, 0 + reply.size)
        if place == courier.landing_count:
            give_up(courier, number, NO_LANDING)
            return
        landing = courier.landings[place]
        of = courier.table[0].copies[landing.copy]
        of.size = reply.size
        of.digest = swap64(reply.digest)
        become(courier, asked, AskedState.CONVEYED)
        taker.block = landing.address
    elif number < MAX_ASKED:
        landing = courier.landings[courier.asked[number].landing]
        if is_of(courier.table[0].copies[landing.copy], reply):
            taker.block = landing.address
        else:
            give_up(courier, number, MISSED)


@native
def block_came(courier: Courier, taker: Taker, digest: U64, now_ns: U64) -> None:
    """All bytes of a block are there; they have this digest, if anybody wants them."""
    number = _of_expected(courier, taker)
    wanted = taker.block != 0
    next_expected(taker)
    if wanted and number < MAX_ASKED:
        whole_came(courier, number, digest, now_ns)


@native
def progressed(courier: Courier, taker: Taker, now_ns: U64) -> None:
    """Bytes have come."""
    taker.until_ns = now_ns + courier.silence_ns


@native
def cut_off(courier: Courier, taker: Taker) -> None:
    """A conveyor is over: Python is to close it, and the agent to be asked for what it was to
    bring."""
    taker.broken = 1
    taker.block = 0
    courier.cut = 1
    while taker.count != 0:
        number = _of_expected(courier, taker)
        next_expected(taker)
        if number < MAX_ASKED:
            give_up(courier, number, CUT_OFF)


@native
def is_in_vain(courier: Courier, taker: Taker) -> bool:
    """Whether a conveyor brings nothing that anybody waits for, and more than its home may have
    sent already: then another is the shorter way to what is asked for next."""
    left = 0
    for i in range(taker.count):
        expected = taker.expected[(taker.first + i) % REQUESTS]
        if _asked_of(courier, expected) != MAX_ASKED:
            return False
        if i == 0 and taker.taking != 0:
            left += taker.size - taker.there
        elif expected.likely > expected.start:
            left += expected.likely - expected.start
    return left > GATHER_BYTES
