"""How questions end: their block is given, or the agent is to be asked.

Owns: answers and batches of them; the records of which Python hears, with the check that proves
them whole; that whoever waits with a question, or follows it, ends with it, and that its landing
place is free again. Must not know: what ends a question, and when.
"""

from __future__ import annotations

from kvcast.native.subset import U64, address_of, native, size_of
from kvcast.protocol.conveyor import NODES
from kvcast.protocol.courier.in_flight import end_question, leave_leader, take_joiner
from kvcast.protocol.courier.permissions import taker_for
from kvcast.protocol.courier.states import AskedState, has_copy, is_conveyed
from kvcast.protocol.courier.structures import (
    BY_LOW,
    BY_NAMESPACE,
    FAILED,
    JOINED,
    LANDED,
    LANDING_FREE,
    NO_READ,
    NOBODY,
    NOWHERE,
    SPREAD,
    SPREAD_AGAIN,
    Answer,
    Asked,
    Courier,
    Record,
)
from kvcast.protocol.messages.questions import ASK_AGENT, GIVEN
from kvcast.protocol.messages.shared import WORD_BYTES
from kvcast.protocol.placement import leave_copy


@native
def begin_answer(courier: Courier, client: U64, number: U64) -> U64:
    """Begin an answer: ASK_AGENT, unless it is changed. There is room: the caller of `hear` and
    `came` sends them after each call."""
    at = 0 + courier.answer_count
    answer = courier.answers[at]
    courier.answer_count += 1
    answer.client = client
    _blank(answer, number)
    return at


@native
def _blank(answer: Answer, number: U64) -> None:
    """Have an answer say that the agent is to be asked. Its `client` is not touched: in a batch
    there is none."""
    answer.status = ASK_AGENT
    answer.tier = 0
    answer.padding = 0
    answer.number = number
    answer.handle = 0
    answer.offset = 0
    answer.size = 0
    answer.digest = 0


@native
def answer_to(courier: Courier, asked: Asked) -> U64:
    """Where the answer to a question stands, which says ASK_AGENT unless it is changed; 0: nobody
    hears it."""
    at = 0
    if asked.batch != NOWHERE:
        at += answer_in(courier, asked.batch, asked.place)
        answered_one(courier, asked.batch)
    elif asked.client != NOBODY:
        at += address_of(courier.answers[begin_answer(courier, asked.client, asked.number)])
    return at


@native
def begin_record(courier: Courier, kind: U64, client: U64) -> U64:
    """Begin a record; there is room."""
    at = 0 + courier.record_count
    record = courier.records[at]
    courier.record_count += 1
    record.kind = kind
    record.client = client
    return at


@native
def begin_batch(courier: Courier, client: U64, count: U64, number: U64) -> U64:
    """Begin the answers to a client's question for many blocks, of which there are `BATCHES` at
    most: each says ASK_AGENT, unless it is changed."""
    at = 0
    while courier.batches[at].open != 0:
        at += 1
    batch = courier.batches[at]
    batch.open = 1
    batch.leaders = 0 + NOWHERE
    batch.client = client
    batch.count = count
    batch.left = count
    courier.batches_open += 1
    for place in range(count):
        _blank(Answer.at(answer_in(courier, at, place)), number)
    return at


@native
def answer_in(courier: Courier, number: U64, place: U64) -> U64:
    """The address of an answer in a batch, as an `Answer` of which `client` is another's."""
    size = size_of(Answer) - WORD_BYTES
    return courier.batches[number].answers + place * size - WORD_BYTES


@native
def answered_one(courier: Courier, number: U64) -> None:
    """One more answer of a batch stands."""
    batch = courier.batches[number]
    batch.left -= 1
    if batch.left == 0:
        courier.batches_full = 1


@native
def give_block(courier: Courier, number: U64, of: U64, tier: U64, digest: U64, now_ns: U64) -> None:
    """Let whoever asked a question have the block that the question `of` has brought."""
    asked = courier.asked[number]
    brought = courier.asked[of]
    landing = courier.landings[brought.landing]
    client = 0 + asked.client
    handle = 0
    session = 0
    if client != NOBODY:
        who = courier.clients[client]
        session = 0 + who.session
        who.asked -= 1
        who.promised_bytes -= asked.promised
        who.given_bytes += landing.size
        handle = 0 + who.next_handle
        who.next_handle += 1
        answer = Answer.at(answer_to(courier, asked))
        answer.status = GIVEN
        answer.tier = tier
        answer.handle = handle
        answer.offset = landing.offset
        answer.size = courier.table[0].copies[landing.copy].size
        answer.digest = digest
    record = courier.records[begin_record(courier, LANDED if number == of else JOINED, client)]
    record.handle = handle
    record.key = asked.key
    record.rest_of_key = asked.rest_of_key
    record.namespace = asked.namespace
    record.landing = brought.landing
    record.home = brought.home
    record.flags = brought.flags
    record.size = courier.table[0].copies[landing.copy].size
    record.digest = digest
    record.elapsed_ns = now_ns - asked.asked_ns
    record.rtt_ns = 0 + NO_READ
    if brought.frames != 0:
        record.rtt_ns = brought.began_ns - brought.asked_ns
    record.offset = landing.offset
    record.room = landing.size
    record.session = session
    record.check = _check_of(record)
    courier.in_flight -= 1


@native
def check_of(
    namespace: U64, key: U64, rest_of_key: U64, offset: U64, room: U64, digest: U64
) -> U64:
    """Of a record that says that a block lies there: not 0."""
    named = key + rest_of_key * BY_LOW + namespace * BY_NAMESPACE
    lies = offset * BY_LOW + room
    return ((named ^ digest) * SPREAD + lies) * SPREAD_AGAIN | 1


@native
def _check_of(record: Record) -> U64:
    held = record.session * BY_NAMESPACE + record.handle
    block = check_of(
        0 + record.namespace,
        0 + record.key,
        0 + record.rest_of_key,
        0 + record.offset,
        0 + record.room,
        0 + record.digest,
    )
    return block + held * BY_LOW


@native
def proves_itself(record: Record) -> bool:
    """Whether a record that another process has left says what was given to a client: one at which
    it died says nothing, and no client was told."""
    given = record.kind == LANDED or record.kind == JOINED
    return given and record.handle != 0 and record.check == _check_of(record)


@native
def hand_over(courier: Courier, number: U64, why: U64) -> None:
    """Let whoever asked a question ask the agent."""
    asked = courier.asked[number]
    courier.counters[why] += 1
    courier.in_flight -= 1
    if asked.client != NOBODY:
        courier.clients[asked.client].asked -= 1
        courier.clients[asked.client].promised_bytes -= asked.promised
    answer_to(courier, asked)


@native
def give_up(courier: Courier, number: U64, why: U64) -> None:
    """End a question that is asked of a home, and those that wait with it: the agent is to be
    asked."""
    asked = courier.asked[number]
    if has_copy(asked):
        landing = courier.landings[asked.landing]
        leave_copy(courier.table[0], landing.copy)
        courier.table[0].copies[landing.copy].serial = 0
    elif is_conveyed(asked):
        # What is still coming of it is thrown away: the landing place may be another's at once.
        place = taker_for(courier, asked.home)
        if place < NODES:
            taker = courier.takers[place]
            if taker.taking != 0 and taker.expected[taker.first].number == asked.serial:
                taker.block = 0
    if asked.landing != NOWHERE:
        courier.landings[asked.landing].state = LANDING_FREE
    if asked.state == AskedState.FOLLOWING:
        leave_leader(courier, number)
    else:  # somebody was asked for it
        record = courier.records[begin_record(courier, FAILED, asked.client)]
        record.flags = why
        record.namespace = asked.namespace
        record.key = asked.key
        record.rest_of_key = asked.rest_of_key
        record.home = asked.home
        record.read_ns = 0
        if asked.state == AskedState.ASKED and asked.unread == 0:
            record.read_ns = asked.asked_ns
    hand_over(courier, number, why)
    while asked.first_joiner != NOWHERE:
        joiner = take_joiner(courier, asked)
        hand_over(courier, joiner, why)
        end_question(courier, joiner)
    follower = 0 + asked.first_follower
    asked.first_follower = 0 + NOWHERE
    end_question(courier, number)
    while follower != NOWHERE:
        following = 0 + courier.asked[follower].next
        give_up(courier, follower, why)
        follower = following


@native
def close_batch(courier: Courier, number: U64) -> None:
    """The answers of a batch have been sent, or nobody hears them."""
    courier.batches[number].open = 0
    courier.batches_open -= 1
