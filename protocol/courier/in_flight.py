"""The questions in flight: which there are, found by their blocks, and which wait for others.

Owns: the free numbers, the index by key, the lists of those that wait with a question or follow
it, and the time until which one waits. Must not know: what is waited for.
"""

from __future__ import annotations

from typing import Final

from kvcast.native.linux import swap16
from kvcast.native.subset import U64, native
from kvcast.protocol.courier.states import AskedState, become
from kvcast.protocol.courier.structures import (
    BY_LOW,
    HEADS_BITS,
    MAX_ASKED,
    NOWHERE,
    SPREAD,
    Asked,
    Courier,
    Question,
)
from kvcast.protocol.messages.wire import BUCKETS

_NS_A_MS: Final = 1_000_000


@native
def bucket_of_key(rest_of_key: U64) -> U64:
    """The bucket that a key is in: the low bits of its last two bytes."""
    return swap16(rest_of_key >> 48) % BUCKETS


@native
def may_be_resident(courier: Courier, rest_of_key: U64) -> U64:
    """Whether a switch may hold that block."""
    return courier.resident[rest_of_key >> 48]


@native
def asked_for(courier: Courier, namespace: U64, key: U64, rest_of_key: U64) -> U64:
    """The question about a block that is asked of a home; MAX_ASKED if there is none."""
    at = 0 + courier.heads[_hash_of(key, rest_of_key)]
    while at != 0:
        asked = courier.asked[at - 1]
        same_key = asked.key == key and asked.rest_of_key == rest_of_key
        if same_key and asked.namespace == namespace:
            return at - 1
        at = 0 + asked.next_alike
    return 0 + MAX_ASKED


@native
def _hash_of(key: U64, rest_of_key: U64) -> U64:
    return ((key + rest_of_key * BY_LOW) * SPREAD) >> (64 - HEADS_BITS)


@native
def end_question(courier: Courier, number: U64) -> None:
    """A question was answered, or handed over; nobody waits with it any more."""
    asked = courier.asked[number]
    joined = asked.state == AskedState.JOINED
    become(courier, asked, AskedState.FREE)
    courier.unread -= asked.unread
    asked.unread = 0
    courier.free[courier.free_count] = number
    courier.free_count += 1
    if not joined:
        head = _hash_of(0 + asked.key, 0 + asked.rest_of_key)
        if courier.heads[head] == number + 1:
            courier.heads[head] = asked.next_alike
        else:
            at = 0 + courier.heads[head]
            while at != 0:
                other = courier.asked[at - 1]
                if other.next_alike == number + 1:
                    other.next_alike = asked.next_alike
                at = 0 + other.next_alike


@native
def due_by(courier: Courier, until_ns: U64) -> None:
    """Something is waited for until then."""
    if until_ns < courier.due_ns:
        courier.due_ns = until_ns


@native
def join_question(courier: Courier, number: U64, other: U64) -> None:
    """Let a question wait for another's answer."""
    asked = courier.asked[number]
    with_it = courier.asked[other]
    become(courier, asked, AskedState.JOINED)
    asked.leader = other
    asked.next = with_it.first_joiner
    with_it.first_joiner = number


@native
def wait_until(courier: Courier, asked: Asked, until_ns: U64) -> None:
    """Wait for something so long, but not beyond the client's deadline."""
    asked.until_ns = until_ns
    if until_ns > asked.end_ns:
        asked.until_ns = asked.end_ns
    due_by(courier, 0 + asked.until_ns)


@native
def enter_question(courier: Courier, number: U64) -> None:
    """A question is one that is asked of a home."""
    asked = courier.asked[number]
    head = _hash_of(0 + asked.key, 0 + asked.rest_of_key)
    asked.next_alike = courier.heads[head]
    courier.heads[head] = number + 1


@native
def begin_question(courier: Courier, client: U64, q: Question, room: U64, now_ns: U64) -> U64:
    """Enter a question, for one block; there is room. Its state is the caller's to set."""
    courier.free_count -= 1
    number = 0 + courier.free[courier.free_count]
    asked = courier.asked[number]
    who = courier.clients[client]
    asked.first_joiner = 0 + NOWHERE
    asked.first_follower = 0 + NOWHERE
    asked.batch = 0 + NOWHERE
    asked.landing = 0 + NOWHERE
    asked.serial = 0
    asked.client = client
    asked.number = q.number
    asked.key = q.key
    asked.rest_of_key = q.rest_of_key
    asked.namespace = q.namespace
    asked.flags = 0
    asked.frames = 0
    asked.repairs = 0
    asked.offered = 0
    asked.promised = room
    asked.began_ns = 0
    asked.asked_ns = now_ns
    asked.end_ns = now_ns + q.deadline_ms * _NS_A_MS
    wait_until(courier, asked, 0 + asked.end_ns)
    courier.in_flight += 1
    who.asked += 1
    who.promised_bytes += room
    return number


@native
def take_follower(courier: Courier, leader: Asked) -> U64:
    """The first of those that follow a question, which follows it no more."""
    number = 0 + leader.first_follower
    leader.first_follower = courier.asked[number].next
    return number


@native
def take_joiner(courier: Courier, with_it: Asked) -> U64:
    """The first of those that wait with a question, which waits no more."""
    number = 0 + with_it.first_joiner
    with_it.first_joiner = courier.asked[number].next
    return number


@native
def leave_leader(courier: Courier, number: U64) -> None:
    """A question follows no other any more."""
    leader = courier.asked[courier.asked[number].leader]
    leader.first_follower = _without(courier, leader.first_follower, number)


@native
def leave_other(courier: Courier, number: U64) -> None:
    """A question waits with no other any more."""
    with_it = courier.asked[courier.asked[number].leader]
    with_it.first_joiner = _without(courier, with_it.first_joiner, number)


@native
def _without(courier: Courier, first: U64, number: U64) -> U64:
    """Take a question out of a list of them; which is the first then."""
    after = 0 + courier.asked[number].next
    if first == number:
        return after
    at = 0 + first
    while at != NOWHERE:
        other = courier.asked[at]
        if other.next == number:
            other.next = after
        at = 0 + other.next
    return first
