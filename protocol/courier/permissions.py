"""What Python allows: which questions are taken, and what clients may be given.

Owns: the objections to a question, and the choice of a landing place. Must not know: what is done
with a question that is taken.
"""

from __future__ import annotations

from typing import Final

from kvcast.native.subset import U64, native, size_of, u64_at
from kvcast.protocol.conveyor import NODES
from kvcast.protocol.courier.in_flight import bucket_of_key, may_be_resident
from kvcast.protocol.courier.states import AskedState
from kvcast.protocol.courier.structures import (
    BATCHES,
    BELOW,
    CLOSED,
    FULL,
    HELD_BYTES,
    HERE,
    LANDING_FREE,
    LANDING_TAKEN,
    LEAST_PART,
    MAX_ASKED,
    MAX_ASKED_A_CLIENT,
    NO_CONVEYOR,
    NO_HOME,
    NO_LANDING,
    NO_OBJECTION,
    NOBODY,
    NOT_READABLE,
    RECORDS,
    RECORDS_ENOUGH,
    SPREAD_AGAIN,
    Asked,
    Client,
    Courier,
    Question,
)
from kvcast.protocol.lane import may_be_counted, mixed_of
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.questions import MAX_MANY
from kvcast.protocol.messages.wire import SEGMENT_BYTES

_TAGS_WORD: Final = shared.TAGS_OFFSET // shared.WORD_BYTES
_NAMESPACES_WORD: Final = shared.NAMESPACES_OFFSET // shared.WORD_BYTES


@native
def may_look_up(courier: Courier, q: Question) -> bool:
    """Whether clients may look a namespace's blocks up, and it means what this one was told."""
    at = _NAMESPACES_WORD + 2 * q.namespace
    if courier.index[at + 1] != 1:
        return False
    return q.meaning == 0 or q.meaning == courier.index[at]


@native
def meaning_in_force(courier: Courier, namespace: U64) -> U64:
    """What a namespace means to us; 0: nothing."""
    return 0 + courier.index[_NAMESPACES_WORD + 2 * namespace]


@native
def _mixed_of(q: Question) -> U64:
    return mixed_of(0 + q.namespace, 0 + q.key, 0 + q.rest_of_key)


@native
def may_be_here(courier: Courier, q: Question) -> bool:
    """Whether one of the block's two buckets in the index has its tag."""
    tag = 0 + q.rest_of_key
    if tag == 0:
        tag = 1
    mixed = _mixed_of(q)
    for again in range(2):
        if again == 1:
            mixed = mixed * SPREAD_AGAIN
        first = _TAGS_WORD + (mixed >> (64 - courier.index_bits)) * shared.SLOTS_A_BUCKET
        for slot in range(shared.SLOTS_A_BUCKET):
            if courier.index[first + slot] == tag:
                return True
    return False


@native
def may_be_below(courier: Courier, q: Question) -> bool:
    """Whether neither of the block's two counters says that it is not below DRAM."""
    return may_be_counted(0 + courier.below, 0 + courier.below_bits, _mixed_of(q))


@native
def room_for(courier: Courier, namespace: U64, count: U64) -> U64:
    """How much a block of the namespace is likely to take, if so many landing places are free that
    its questions do not need; else 0."""
    spare = 0
    wanted = 0
    largest = 0
    likely = 0
    for i in range(courier.landing_count):
        landing = courier.landings[i]
        if landing.state == LANDING_FREE and landing.namespace == namespace:
            spare += 1
            if landing.size > largest:
                largest = 0 + landing.size
            if landing.likely != 0:
                likely = 0 + landing.size
    if courier.in_flight != 0:
        for i in range(MAX_ASKED):
            asked = courier.asked[i]
            waits = asked.state in (AskedState.ASKED, AskedState.FOLLOWING, AskedState.ORDERED)
            if waits and asked.namespace == namespace:
                wanted += 1
    if spare >= wanted + count:
        return largest if likely == 0 else likely
    if count > 1 and count > courier.wanted_places:
        courier.wanted_places = count
    return 0


@native
def reads_out(courier: Courier) -> U64:
    """Questions whose first segment is being read."""
    count = 0
    if courier.in_flight != 0:
        for i in range(MAX_ASKED):
            state = 0 + courier.asked[i].state
            if state in (AskedState.ASKED, AskedState.RECEIVING, AskedState.GAPPED):
                count += 1
    return count


@native
def taker_for(courier: Courier, node: U64) -> U64:
    """The conveyor from a node; NODES if there is none."""
    for i in range(NODES):
        taker = courier.takers[i]
        if taker.node == node and taker.broken == 0:
            return i
    return 0 + NODES


@native
def may_take(courier: Courier, asked: Asked, size: U64) -> bool:
    """Whether a question's client may be given so much for it."""
    if asked.client == NOBODY:
        return True
    who = courier.clients[asked.client]
    return may_be_given(who, who.promised_bytes - asked.promised + size)


@native
def take_landing(courier: Courier, asked: Asked, size: U64) -> U64:
    """Take a free landing place for a question's block of that size, which takes a good part of it
    and which the client may be given; `landing_count` if there is none."""
    for step in range(courier.landing_count):
        i = (courier.landing_hint + step) % courier.landing_count
        landing = courier.landings[i]
        free = landing.state == LANDING_FREE
        fits = size <= landing.size and size > landing.size // LEAST_PART
        right = free and fits and landing.namespace == asked.namespace
        if right and may_take(courier, asked, 0 + landing.size):
            courier.landing_hint = i + 1
            if asked.client != NOBODY:
                who = courier.clients[asked.client]
                who.promised_bytes += landing.size
                who.promised_bytes -= asked.promised
            asked.promised = landing.size
            asked.landing = i
            landing.state = LANDING_TAKEN
            return i
    return 0 + courier.landing_count


@native
def may_be_given(who: Client, bytes_more: U64) -> bool:
    """Whether a client may hold so much more."""
    return who.held_bytes + who.given_bytes + bytes_more <= who.max_bytes


@native
def may_hear(courier: Courier) -> bool:
    """Whether there is room for what any message may leave for Python, besides what is in flight;
    else Python takes the records first."""
    return courier.record_count + courier.in_flight + MAX_MANY <= RECORDS


@native
def objection_to_many(courier: Courier, who: Client, at: U64, count: U64, room: U64) -> U64:
    """As `objection`, to the question at `at` for so many blocks."""
    q = Question.at(at)
    if courier.open == 0:
        return CLOSED
    if not may_look_up(courier, q):
        return NOT_READABLE
    if who.asked + count > MAX_MANY or courier.in_flight + count > MAX_ASKED:
        return FULL
    if courier.record_count + courier.in_flight + count >= RECORDS_ENOUGH:
        return FULL
    if courier.batches_open == BATCHES:
        return FULL
    if room == 0:
        return NO_LANDING
    if not may_be_given(who, who.promised_bytes + count * room):
        return HELD_BYTES
    # Where some home has no conveyor, the agent reads all: what the courier left to it would be
    # asked for only when everything else has come.
    further = u64_at(at + size_of(Question))  # two words a key
    has_one = 0 + NOBODY
    for i in range(count):
        rest_of_key = 0 + q.rest_of_key
        if i != 0:
            rest_of_key = further[2 * i - 1]
        home = courier.homes[bucket_of_key(rest_of_key)]
        if home != NOBODY and home != has_one and may_be_resident(courier, rest_of_key) == 0:
            if taker_for(courier, home) == NODES:
                courier.wished = home + 1
                return NO_CONVEYOR
            has_one = 0 + home
    return NO_OBJECTION


@native
def objection(courier: Courier, who: Client, q: Question, other: U64, room: U64) -> U64:
    """Why the courier does not take a question; NO_OBJECTION if it does. `other` as `asked_for`
    says, `room` as `room_for`."""
    if courier.open == 0:
        return CLOSED
    if not may_look_up(courier, q):
        return NOT_READABLE
    if who.asked >= MAX_ASKED_A_CLIENT or courier.in_flight >= MAX_ASKED:
        return FULL
    if courier.record_count + courier.in_flight >= RECORDS_ENOUGH:
        return FULL
    if not may_be_given(who, who.promised_bytes + room):
        return HELD_BYTES
    if other < MAX_ASKED:
        return NO_OBJECTION
    bucket = bucket_of_key(q.rest_of_key)
    if courier.homes[bucket] == NOBODY:
        return NO_HOME
    if room > SEGMENT_BYTES and may_be_resident(courier, q.rest_of_key) != 0:
        return NO_HOME
    if courier.fetching[bucket] != 0 or may_be_here(courier, q):
        return HERE
    if may_be_below(courier, q):
        return BELOW
    if room == 0:
        return NO_LANDING
    if room > SEGMENT_BYTES and taker_for(courier, courier.homes[bucket]) == NODES:
        courier.wished = courier.homes[bucket] + 1
        return NO_CONVEYOR
    return NO_OBJECTION
