"""What nodes are asked for: by READs a block's first segment, or what it lacks; by conveyors the
rest, or the blocks that follow the first of a batch.

Owns: which READ leaves next, and what is put into a request. Must not know: how requests leave, or
what comes of them.
"""

from __future__ import annotations

from kvcast.native.linux import swap16
from kvcast.native.subset import U64, native, u16_at, u32_at, u64_at
from kvcast.protocol.conveyor import NODES, REQUESTS, ask_for
from kvcast.protocol.courier.endings import give_up
from kvcast.protocol.courier.in_flight import due_by, take_follower, wait_until
from kvcast.protocol.courier.permissions import taker_for
from kvcast.protocol.courier.states import AskedState, become
from kvcast.protocol.courier.structures import (
    ASKED_BITS,
    COMPANY,
    MAX_ASKED,
    NO_CONVEYOR,
    NOWHERE,
    SERIAL_BIT,
    Asked,
    Courier,
)
from kvcast.protocol.messages.offsets import (
    DIGEST_AT,
    FLAGS_AT,
    KEY_AT,
    NAMESPACE_AT,
    SEGMENT_AT,
    TAG_AT,
    WANTED_AT,
)
from kvcast.protocol.messages.wire import (
    FLAG_PARTIAL,
    FULL_SEGMENT,
    SEGMENT_BYTES,
    SEGMENT_INDEX_BITS,
)
from kvcast.protocol.placement import leave_copy


@native
def swap32(value: U64) -> U64:
    return (swap16(value & 0xFFFF) << 16) | swap16(value >> 16)


@native
def swap64(value: U64) -> U64:
    return (swap32(value & 0xFFFFFFFF) << 32) | swap32(value >> 32)


@native
def send_read(courier: Courier, asked: Asked) -> None:
    """Have a READ sent for what is missing."""
    asked.tag = courier.next_tag
    courier.next_tag += 1
    asked.unread = 1
    courier.unread += 1


@native
def ask_for_missing(courier: Courier, asked: Asked, now_ns: U64) -> None:
    """Ask for the chunks that are missing of a first segment."""
    asked.repairs += 1
    courier.repairs += 1
    become(courier, asked, AskedState.RECEIVING)
    wait_until(courier, asked, now_ns + courier.patience_ns[asked.home])
    send_read(courier, asked)


@native
def next_read(courier: Courier) -> bool:
    """Have the next READ that is to be sent lie at `read`; False if there is none."""
    if courier.unread == 0:
        return False
    for i in range(MAX_ASKED):
        asked = courier.asked[i]
        if asked.unread != 0:
            asked.unread = 0
            courier.unread -= 1
            if asked.state in (AskedState.ASKED, AskedState.RECEIVING, AskedState.GAPPED):
                flags = 0 + courier.read_flags
                digest = 0
                wanted = 0 + FULL_SEGMENT
                if asked.state != AskedState.ASKED:
                    landing = courier.landings[asked.landing]
                    flags |= FLAG_PARTIAL
                    digest += courier.table[0].copies[landing.copy].digest
                    wanted = 0 + landing.missing[0]
                segment = asked.chunk_code << SEGMENT_INDEX_BITS
                u16_at(courier.read + FLAGS_AT)[0] = swap16(flags)
                u16_at(courier.read + SEGMENT_AT)[0] = swap16(segment)
                u16_at(courier.read + NAMESPACE_AT)[0] = swap16(asked.namespace)
                u64_at(courier.read + KEY_AT)[0] = asked.key
                u64_at(courier.read + KEY_AT + 8)[0] = asked.rest_of_key
                u64_at(courier.read + DIGEST_AT)[0] = digest
                u64_at(courier.read + WANTED_AT)[0] = swap64(wanted)
                u32_at(courier.read + TAG_AT)[0] = swap32(asked.tag)
                courier.read_node = asked.home
                return True
    return False


@native
def ask_for_rest(courier: Courier, number: U64, now_ns: U64) -> None:
    """Have the rest of a block come by the conveyor. Nothing more of it comes as DATA."""
    asked = courier.asked[number]
    landing = courier.landings[asked.landing]
    landed = courier.table[0].copies[landing.copy]
    digest = swap64(landed.digest)
    place = taker_for(courier, asked.home)
    if not _ask_conveyor(courier, place, number, digest, SEGMENT_BYTES, now_ns):
        give_up(courier, number, NO_CONVEYOR)
        return
    leave_copy(courier.table[0], landing.copy)
    landed.serial = 0
    become(courier, asked, AskedState.CONVEYED)
    asked.until_ns = asked.end_ns
    ask_for_followers(courier, number, now_ns)


@native
def ask_for_followers(courier: Courier, number: U64, now_ns: U64) -> None:
    """Nobody shares what the first of a batch has brought: have the others come by the
    conveyor."""
    leader = courier.asked[number]
    if leader.first_follower == NOWHERE:
        return
    place = taker_for(courier, leader.home)
    while leader.first_follower != NOWHERE:
        i = take_follower(courier, leader)
        courier.next_serial += 1
        courier.asked[i].serial = SERIAL_BIT | (courier.next_serial << ASKED_BITS) | i
        if _ask_conveyor(courier, place, i, 0, 0, now_ns):
            become(courier, courier.asked[i], AskedState.ORDERED)
        else:
            give_up(courier, i, NO_CONVEYOR)


@native
def _ask_conveyor(
    courier: Courier, place: U64, number: U64, digest: U64, start: U64, now_ns: U64
) -> bool:
    """Ask that conveyor for a question's block, from a byte on; False where that cannot be."""
    if place == NODES:
        return False
    asked = courier.asked[number]
    taker = courier.takers[place]
    first = taker.count == 0
    wanted = taker.draft[0]
    wanted.number = asked.serial
    wanted.key = asked.key
    wanted.rest_of_key = asked.rest_of_key
    wanted.digest = digest
    wanted.start = start
    wanted.namespace = asked.namespace
    if not ask_for(taker):
        return False
    taker.expected[(taker.first + taker.count - 1) % REQUESTS].likely = asked.promised
    if first:
        taker.until_ns = now_ns + courier.silence_ns
        due_by(courier, 0 + taker.until_ns)
    courier.unsent = 1
    return True


@native
def follow_none(courier: Courier, number: U64) -> None:
    """What the first of a batch has brought was shared: READs are better for the others."""
    leader = courier.asked[number]
    while leader.first_follower != NOWHERE:
        give_up(courier, take_follower(courier, leader), COMPANY)
