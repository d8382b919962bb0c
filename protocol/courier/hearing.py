"""What clients say: questions for one block or many, and blocks that they give back.

Owns: the way from a message to questions that wait for a home, for others, or for nothing. Must
not know: which questions are allowed (`permissions`), or what homes answer.
"""

from __future__ import annotations

from typing import Final

from kvcast.native.subset import U32, U64, native, size_of, u64_at
from kvcast.protocol.courier.endings import answered_one, begin_answer, begin_batch, begin_record
from kvcast.protocol.courier.in_flight import (
    asked_for,
    begin_question,
    bucket_of_key,
    enter_question,
    join_question,
    may_be_resident,
    wait_until,
)
from kvcast.protocol.courier.permissions import (
    may_be_below,
    may_be_here,
    objection,
    objection_to_many,
    reads_out,
    room_for,
)
from kvcast.protocol.courier.requests import next_read, send_read
from kvcast.protocol.courier.states import AskedState, become
from kvcast.protocol.courier.structures import (
    BELOW,
    FULL,
    HERE,
    MAX_ASKED,
    NO_HOME,
    NO_OBJECTION,
    NOBODY,
    NOTHING,
    NOWHERE,
    OFFENCE,
    RELEASED,
    SEND_READ,
    Courier,
    Question,
)
from kvcast.protocol.messages.questions import GET, GET_MANY, MAX_DEADLINE_MS, MAX_MANY, RELEASE
from kvcast.protocol.messages.shared import WORD_BYTES
from kvcast.protocol.messages.wire import CELLS, KEY_BYTES, SEGMENT_BYTES

_CELLS: Final = CELLS.code


@native
def is_question(at: U64, length: U64) -> bool:
    """Whether a message is of a form that a client of ours says."""
    if length < size_of(Question):
        return False
    q = Question.at(at)
    if length != size_of(Question):
        more = length - size_of(Question)
        if q.kind == RELEASE:
            return more % WORD_BYTES == 0 and more // WORD_BYTES < MAX_MANY
        fits = more % KEY_BYTES == 0 and more // KEY_BYTES < MAX_MANY
        return fits and q.kind == GET_MANY and q.deadline_ms <= MAX_DEADLINE_MS
    return q.kind == RELEASE or (q.kind == GET and q.deadline_ms <= MAX_DEADLINE_MS)


@native
def hear(courier: Courier, client: U64, at: U64, length: U64, now_ns: U64) -> U32:
    """What a client says, in memory that nobody else writes: NOTHING, SEND_READ (it lies at
    `read`, for `read_node`), or OFFENCE."""
    if not is_question(at, length):
        return OFFENCE
    q = Question.at(at)
    if q.kind == RELEASE:
        courier.records[begin_record(courier, RELEASED, client)].handle = q.number
        further = at + size_of(Question)
        for i in range((length - size_of(Question)) // WORD_BYTES):
            handle = u64_at(further)[i]
            courier.records[begin_record(courier, RELEASED, client)].handle = handle
        return NOTHING
    if q.kind == GET_MANY:
        _hear_many(courier, client, at, length, now_ns)
        return SEND_READ if next_read(courier) else NOTHING
    who = courier.clients[client]
    other = asked_for(courier, q.namespace, q.key, q.rest_of_key)
    room = 0
    if other < MAX_ASKED:
        room += courier.asked[other].promised
    else:
        room += room_for(courier, q.namespace, 1)
    why = objection(courier, who, q, other, room)
    if why != NO_OBJECTION:
        courier.counters[why] += 1
        begin_answer(courier, client, q.number)
        return NOTHING
    number = begin_question(courier, client, q, room, now_ns)
    if other < MAX_ASKED:
        join_question(courier, number, other)
        return NOTHING
    _ask_first(courier, number)
    next_read(courier)
    return SEND_READ


@native
def _ask_first(courier: Courier, number: U64) -> None:
    """Have a block's home asked, by a READ."""
    asked = courier.asked[number]
    enter_question(courier, number)
    become(courier, asked, AskedState.ASKED)
    bucket = bucket_of_key(asked.rest_of_key)
    asked.home = courier.homes[bucket]
    asked.chunk_code = courier.chunk_code
    if may_be_resident(courier, asked.rest_of_key) != 0:
        asked.chunk_code = 0 + _CELLS
    wait_until(courier, asked, asked.asked_ns + courier.patience_ns[asked.home])
    send_read(courier, asked)


@native
def _hear_many(courier: Courier, client: U64, at: U64, length: U64, now_ns: U64) -> None:
    """A question for many blocks. Of those from one home the first is asked for by a READ, and the
    others by the conveyor, once it is known that nobody shares the first. What a switch may hold is
    asked for by a READ each."""
    q = Question.at(at)
    who = courier.clients[client]
    count = 1 + (length - size_of(Question)) // KEY_BYTES
    room = room_for(courier, q.namespace, count)
    why = objection_to_many(courier, who, at, count, room)
    if why != NO_OBJECTION:
        courier.counters[why] += count
        begin_answer(courier, client, q.number)
        return
    number = begin_batch(courier, client, count, 0 + q.number)
    batch = courier.batches[number]
    keys = at + size_of(Question)
    reads = reads_out(courier)
    for i in range(count):
        if i != 0:
            q.key = u64_at(keys)[0]
            q.rest_of_key = u64_at(keys)[1]
            keys += KEY_BYTES
        other = asked_for(courier, q.namespace, q.key, q.rest_of_key)
        bucket = bucket_of_key(q.rest_of_key)
        home = courier.homes[bucket]
        resident = may_be_resident(courier, q.rest_of_key) != 0
        why = 0 + NO_OBJECTION
        if other == MAX_ASKED:
            if home == NOBODY or (resident and room > SEGMENT_BYTES):
                why = 0 + NO_HOME
            elif courier.fetching[bucket] != 0 or may_be_here(courier, q):
                why = 0 + HERE
            elif may_be_below(courier, q):
                why = 0 + BELOW
            elif resident and reads >= courier.reads_at_once:
                why = 0 + FULL
        if why != NO_OBJECTION:
            courier.counters[why] += 1
            answered_one(courier, number)
            continue
        mine = begin_question(courier, client, q, room, now_ns)
        asked = courier.asked[mine]
        asked.batch = number
        asked.place = i
        if other < MAX_ASKED:
            join_question(courier, mine, other)
            continue
        if resident:
            reads += 1
            _ask_first(courier, mine)
            continue
        leader = 0 + batch.leaders
        while leader != NOWHERE and courier.asked[leader].home != home:
            leader = 0 + courier.asked[leader].next
        if leader == NOWHERE:
            _ask_first(courier, mine)
            asked.next = batch.leaders
            batch.leaders = mine
        else:
            enter_question(courier, mine)
            become(courier, asked, AskedState.FOLLOWING)
            asked.home = home
            asked.leader = leader
            asked.next = 0 + NOWHERE
            led_by = courier.asked[leader]
            if led_by.first_follower == NOWHERE:
                led_by.first_follower = mine
            else:
                courier.asked[led_by.last_follower].next = mine
            led_by.last_follower = mine
