"""What nodes answer to READs: DATA, OFFER and MISS.

Owns: who is heard, the landing place that a first DATA gets, whether a first segment is all or has
a rest, and the look at a whole block's digest. Must not know: how frames are checked and put in
their place (`kvcast.protocol.placement`).
"""

from __future__ import annotations

from typing import Final

from kvcast.native.linux import swap16
from kvcast.native.subset import (
    U64,
    address_of,
    bytes_at,
    copy,
    native,
    size_of,
    u16_at,
    u32_at,
    u64_at,
)
from kvcast.protocol.courier.endings import give_block, give_up, hand_over
from kvcast.protocol.courier.in_flight import (
    asked_for,
    bucket_of_key,
    end_question,
    take_joiner,
    wait_until,
)
from kvcast.protocol.courier.permissions import may_take, take_landing
from kvcast.protocol.courier.requests import (
    ask_for_followers,
    ask_for_rest,
    follow_none,
    swap32,
    swap64,
)
from kvcast.protocol.courier.states import AskedState, become, has_copy, is_conveyed
from kvcast.protocol.courier.structures import (
    ASKED_BITS,
    COMPANY,
    FULL,
    HELD_BYTES,
    LANDING_BOOKED,
    LANDING_FREE,
    MAX_ASKED,
    MISSED,
    MOST_HOMES,
    NO_LANDING,
    NOWHERE,
    SERIAL_BIT,
    WRONG_DIGEST,
    Asked,
    Courier,
    Landing,
    call_digest,
    call_reset,
    call_update,
)
from kvcast.protocol.messages.offsets import (
    DIGEST_AT,
    FLAGS_AT,
    KEY_AT,
    NAMESPACE_AT,
    OP_AT,
    SEGMENT_AT,
    SIZE_AT,
    TAG_AT,
)
from kvcast.protocol.messages.wire import (
    BUCKETS,
    CHUNK_BYTES,
    FLAG_RESIDENT,
    FLAG_SHARED,
    OP_DATA,
    OP_MISS,
    OP_OFFER,
    OP_READ,
    SEGMENT_BYTES,
    SEGMENT_INDEX_BITS,
)
from kvcast.protocol.placement import (
    ARRIVALS,
    Arrival,
    enter_copy,
    find_copy,
    leave_copy,
    put_frame,
)

_ALL: Final = (1 << 64) - 1


@native
def is_asked(asked: Asked, source: U64) -> bool:
    """Whether a question is one to this node."""
    return asked.home == source


@native
def is_home(courier: Courier, rest_of_key: U64, node: U64) -> bool:
    """Whether that other node is one of a block's homes."""
    at = bucket_of_key(rest_of_key)
    while at < MOST_HOMES * BUCKETS and u16_at(courier.all_homes)[at] != node:
        at += BUCKETS
    return at < MOST_HOMES * BUCKETS


@native
def is_right(wanted: U64, digest: U64) -> bool:
    """Whether bytes are those of the copy that was sent."""
    return wanted == digest


@native
def frame_came(courier: Courier, at: U64, length: U64, source: U64, now_ns: U64) -> bool:
    """A well-formed frame at which `place` has stopped; whether it was for the courier."""
    namespace = swap16(u16_at(at + NAMESPACE_AT)[0])
    key = u64_at(at + KEY_AT)[0]
    number = asked_for(courier, namespace, key, u64_at(at + KEY_AT + 8)[0])
    op = bytes_at(at)[OP_AT]
    if number == MAX_ASKED or op == OP_READ:  # which somebody asks of us
        return False
    courier.frames += 1
    asked = courier.asked[number]
    if is_asked(asked, source):
        _answered(courier, number, at, length, now_ns)
    elif asked.state == AskedState.ASKED and is_home(courier, asked.rest_of_key, source):
        _answered_elsewhere(courier, number, at, length, source, now_ns)
    return True


@native
def _answered_elsewhere(
    courier: Courier, number: U64, at: U64, length: U64, source: U64, now_ns: U64
) -> None:
    """Another home of a question's block says something. A switch joins READs of a block whichever
    of its homes they ask, and gives the answer of the one that it has passed on to all."""
    if swap16(u16_at(at + FLAGS_AT)[0]) & FLAG_SHARED == 0:
        return
    op = bytes_at(at)[OP_AT]
    if op == OP_DATA:
        asked = courier.asked[number]
        home = 0 + asked.home
        asked.home = source
        _answered(courier, number, at, length, now_ns)
        if asked.state == AskedState.ASKED:  # it was not taken
            asked.home = home
    elif op == OP_MISS:
        give_up(courier, number, MISSED)


@native
def _answered(courier: Courier, number: U64, at: U64, length: U64, now_ns: U64) -> None:
    """The home of a question says something of its block. Of a copy that is chosen all DATA goes
    the short way, and what comes here is of another."""
    asked = courier.asked[number]
    op = bytes_at(at)[OP_AT]
    if op == OP_MISS and (
        u32_at(at + TAG_AT)[0] == swap32(asked.tag)
        or swap16(u16_at(at + FLAGS_AT)[0]) & FLAG_SHARED != 0  # under the tag of who asked first
    ):
        give_up(courier, number, MISSED)
    if op == OP_OFFER and not is_conveyed(asked):
        asked.offered = 1
        if asked.state == AskedState.UNOFFERED:
            ask_for_rest(courier, number, now_ns)
    if op != OP_DATA or asked.state != AskedState.ASKED:
        return
    t = courier.table[0]
    segment = swap16(u16_at(at + SEGMENT_AT)[0])
    size = swap32(u32_at(at + SIZE_AT)[0])
    if segment >> SEGMENT_INDEX_BITS != asked.chunk_code:
        return  # asked for at another time
    place = 0 + courier.landing_count
    if find_copy(t, at) == 0:
        place = take_landing(courier, asked, size)
    if place == courier.landing_count:
        give_up(courier, number, NO_LANDING)
        return
    landing = courier.landings[place]
    landing.source = asked.home
    chunk_bytes = CHUNK_BYTES << asked.chunk_code
    first = size
    if first > SEGMENT_BYTES:
        first = 0 + SEGMENT_BYTES
    chunks = (first + chunk_bytes - 1) // chunk_bytes
    landing.missing[0] = _ALL
    if chunks < 64:
        landing.missing[0] = (1 << chunks) - 1
    courier.next_serial += 1
    entered = t.copies[landing.copy]
    entered.serial = SERIAL_BIT | (courier.next_serial << ASKED_BITS) | number
    entered.key = asked.key
    entered.rest_of_key = asked.rest_of_key
    entered.digest = u64_at(at + DIGEST_AT)[0]
    entered.namespace = u16_at(at + NAMESPACE_AT)[0]
    entered.size = size
    entered.source_count = 1
    entered.chunk_code = asked.chunk_code
    enter_copy(t, landing.copy)
    become(courier, asked, AskedState.RECEIVING)
    asked.serial = entered.serial
    asked.began_ns = now_ns
    if t.arrival_count == ARRIVALS:  # of which none is kept for so long
        give_up(courier, number, FULL)
        return
    courier.frames -= 1  # it is counted with what has been put in its place
    put_frame(t, landing.copy, at, length, asked.home)
    came(courier, now_ns)


@native
def came(courier: Courier, now_ns: U64) -> None:
    """Take what has been put in place for the courier; what is left of `arrivals` is Python's."""
    t = courier.table[0]
    kept = 0
    for i in range(t.arrival_count):
        arrival = t.arrivals[i]
        if arrival.serial & SERIAL_BIT:
            courier.frames += arrival.frames
            number = arrival.serial & ((1 << ASKED_BITS) - 1)
            asked = courier.asked[number]
            if has_copy(asked) and asked.serial == arrival.serial:
                asked.flags |= arrival.flags
                asked.frames += arrival.frames
                if asked.state == AskedState.UNOFFERED:
                    continue
                if arrival.missing == 0:
                    if arrival.segment == 0:
                        _first_is_there(courier, number, now_ns)
                elif arrival.last != 0:
                    become(courier, asked, AskedState.GAPPED)
                    wait_until(courier, asked, now_ns + courier.reorder_ns)
                elif asked.state == AskedState.RECEIVING and arrival.added != 0:
                    wait_until(courier, asked, now_ns + courier.patience_ns[asked.home])
        else:
            if kept != i:
                copy(
                    address_of(t.arrivals) + kept * size_of(Arrival),
                    address_of(arrival),
                    size_of(Arrival),
                )
            kept += 1
    t.arrival_count = kept


@native
def _first_is_there(courier: Courier, number: U64, now_ns: U64) -> None:
    """The first segment of a block has come: all of it, or so much that it is known whether it is
    shared."""
    asked = courier.asked[number]
    landing = courier.landings[asked.landing]
    landed = courier.table[0].copies[landing.copy]
    if landed.size <= SEGMENT_BYTES:
        call_reset(courier.reset, courier.state)
        call_update(courier.update, courier.state, landing.address, landed.size)
        whole_came(courier, number, call_digest(courier.digest, courier.state), now_ns)
    elif asked.flags & (FLAG_SHARED | FLAG_RESIDENT):
        give_up(courier, number, COMPANY)
    elif asked.offered != 0:
        ask_for_rest(courier, number, now_ns)
    else:
        become(courier, asked, AskedState.UNOFFERED)
        wait_until(courier, asked, now_ns + courier.reorder_ns)


@native
def has_another(courier: Courier, landing: Landing) -> bool:
    """Whether there is a free landing place like this one."""
    for i in range(courier.landing_count):
        other = courier.landings[i]
        free = other.state == LANDING_FREE and other.namespace == landing.namespace
        if free and other.size == landing.size:
            return True
    return False


@native
def whole_came(courier: Courier, number: U64, digest: U64, now_ns: U64) -> None:
    """All of a block has come, and has this digest."""
    t = courier.table[0]
    asked = courier.asked[number]
    landing = courier.landings[asked.landing]
    landed = t.copies[landing.copy]
    wanted = swap64(landed.digest)
    if digest == 0:
        digest = 1
    if not is_right(wanted, digest):
        give_up(courier, number, WRONG_DIGEST)
        return
    if has_copy(asked):
        leave_copy(t, landing.copy)
        landed.serial = 0
    if asked.flags & (FLAG_SHARED | FLAG_RESIDENT):
        follow_none(courier, number)
    else:
        ask_for_followers(courier, number, now_ns)
    landing.state = LANDING_BOOKED
    courier.landed += 1
    if landing.size > SEGMENT_BYTES and not has_another(courier, landing):
        courier.landed += courier.enough_landed
    tier = 0
    if asked.flags & FLAG_RESIDENT:
        tier = 2
    elif asked.flags & FLAG_SHARED:
        tier = 1
    give_block(courier, number, number, tier, digest, now_ns)
    while asked.first_joiner != NOWHERE:
        i = take_joiner(courier, asked)
        if may_take(courier, courier.asked[i], 0 + landing.size):
            give_block(courier, i, number, tier, digest, now_ns)
        else:
            hand_over(courier, i, HELD_BYTES)
        end_question(courier, i)
    end_question(courier, number)
