"""Questions that have waited for long enough, and clients that wait no longer.

Owns: what follows from time, from a client that goes or gives up, and from Python's taking a block
over. Must not know: clocks.
"""

from __future__ import annotations

from typing import Final

from kvcast.native.subset import U64, native
from kvcast.protocol.conveyor import NODES, UNWANTED
from kvcast.protocol.courier.conveyed import cut_off, is_in_vain
from kvcast.protocol.courier.endings import answer_to, give_up, hand_over
from kvcast.protocol.courier.in_flight import asked_for, end_question, leave_other
from kvcast.protocol.courier.requests import ask_for_missing
from kvcast.protocol.courier.states import AskedState
from kvcast.protocol.courier.structures import (
    BATCHES,
    DEADLINE,
    GAP,
    GIVEN_UP,
    MAX_ASKED,
    MOST_REPAIRS,
    NOBODY,
    NOT_OFFERED,
    NOWHERE,
    SILENCE,
    YIELDED,
    Asked,
    Courier,
)

_NEVER_NS: Final = (1 << 63) - 1


@native
def _why_late(asked: Asked) -> U64:
    if asked.until_ns == asked.end_ns:
        return DEADLINE
    if asked.state == AskedState.UNOFFERED:
        return NOT_OFFERED
    return SILENCE if asked.state == AskedState.ASKED else GAP


@native
def _may_repair(asked: Asked, now_ns: U64) -> bool:
    """Whether what is missing of a first segment is asked for once more."""
    comes = asked.state in (AskedState.RECEIVING, AskedState.GAPPED)
    return comes and asked.repairs < MOST_REPAIRS and now_ns < asked.end_ns


@native
def expire(courier: Courier, now_ns: U64) -> U64:
    """Give up what has been waited for long enough, or ask for what is missing of it (`next_read`);
    when the next is, 0 = there is none."""
    if courier.in_flight == 0:
        courier.due_ns = 0
        return 0
    if now_ns < courier.due_ns:
        return 0 + courier.due_ns
    next_ns = 0 + _NEVER_NS
    for i in range(NODES):
        taker = courier.takers[i]
        if taker.count != 0 and taker.broken == 0:
            if taker.until_ns <= now_ns:
                cut_off(courier, taker)
            elif taker.until_ns < next_ns:
                next_ns = 0 + taker.until_ns
    for i in range(MAX_ASKED):
        asked = courier.asked[i]
        if asked.state != AskedState.FREE:
            if asked.until_ns <= now_ns and _may_repair(asked, now_ns):
                ask_for_missing(courier, asked, now_ns)
            if asked.until_ns > now_ns:
                if asked.until_ns < next_ns:
                    next_ns = 0 + asked.until_ns
            elif asked.state == AskedState.JOINED:
                leave_other(courier, i)
                hand_over(courier, i, DEADLINE)
                end_question(courier, i)
            else:
                give_up(courier, i, _why_late(asked))
    courier.due_ns = next_ns
    return next_ns if courier.in_flight != 0 else 0


@native
def yield_block(courier: Courier, namespace: U64, key: U64, rest_of_key: U64, now_ns: U64) -> bool:
    """Python fetches this block from now on. Whether its READ has been out in vain for half as long
    as it may: then the next is a repeat."""
    number = asked_for(courier, namespace, key, rest_of_key)
    if number == MAX_ASKED:
        return False
    asked = courier.asked[number]
    read = asked.state == AskedState.ASKED and asked.unread == 0
    overdue = read and asked.asked_ns + courier.patience_ns[asked.home] // 2 <= now_ns
    asked.asked_ns = 0  # said at once, and so not by the record
    give_up(courier, number, YIELDED)
    return overdue


@native
def yield_all(courier: Courier) -> None:
    """Python fetches everything from now on."""
    for i in range(MAX_ASKED):
        asked = courier.asked[i]
        if asked.state != AskedState.FREE and asked.state != AskedState.JOINED:
            give_up(courier, i, YIELDED)


@native
def leave(courier: Courier, client: U64) -> None:
    """A client is gone: nobody is told what it asked for, which ends."""
    for i in range(MAX_ASKED):
        asked = courier.asked[i]
        if asked.state != AskedState.FREE and asked.client == client:
            _leave_asked(courier, asked)
    for i in range(courier.answer_count):
        if courier.answers[i].client == client:
            courier.answers[i].client = NOBODY
    for i in range(BATCHES):
        batch = courier.batches[i]
        if batch.open != 0 and batch.client == client:
            batch.client = NOBODY
    _end_unwanted(courier)


@native
def unask(courier: Courier, client: U64, number: U64) -> None:
    """A client gives its question of that number up, if there is one: it is told ASK_AGENT, and
    what others do not wait for ends."""
    for i in range(MAX_ASKED):
        asked = courier.asked[i]
        if asked.state != AskedState.FREE and asked.client == client and asked.number == number:
            _leave_asked(courier, asked)
    _end_unwanted(courier)


@native
def _leave_asked(courier: Courier, asked: Asked) -> None:
    """A question's client waits for it no more."""
    answer_to(courier, asked)
    who = courier.clients[asked.client]
    who.asked -= 1
    who.promised_bytes -= asked.promised
    asked.client = NOBODY
    asked.batch = 0 + NOWHERE


@native
def _end_unwanted(courier: Courier) -> None:
    """End questions that nobody waits for: first those that wait with others, then those that
    follow others, which go on for them."""
    for turn in range(3):
        for i in range(MAX_ASKED):
            asked = courier.asked[i]
            if asked.state == AskedState.FREE or asked.client != NOBODY:
                continue
            if asked.state == AskedState.JOINED:
                leave_other(courier, i)
                hand_over(courier, i, GIVEN_UP)
                end_question(courier, i)
                continue
            alone = asked.first_joiner == NOWHERE and asked.first_follower == NOWHERE
            if alone and turn != 0 and (turn == 2 or asked.state == AskedState.FOLLOWING):
                give_up(courier, i, GIVEN_UP)
    for i in range(NODES):
        taker = courier.takers[i]
        if taker.broken == 0 and is_in_vain(courier, taker):
            cut_off(courier, taker)
            taker.broken = UNWANTED
