"""Puts that go home in compiled code: from a client's question to the home's verdict.

Owns: which rooms a client may have put by a question, what is said on the connection between two
agents on which blocks are pushed, what a home takes of it, and the client's answer. Must not know:
sockets, clocks, sessions, or what follows from a put (`kvcast.hostagent.core.pushing` does).

A *room* is a part of the arena that a client was given for a block, or ahead, and has written. The
client says by a question on its courier's socket that a room of its own is a block, or that many
are; here each is pushed to the nodes that are to be waited for (the block's home; all of its homes;
or none, where this node is the home or enough), and when they have it, the client is answered, and
if it had the room ahead, given the one for its next put.
What is not taken, or does not come to its end, is answered by ASK_AGENT: the room is the client's
as before, and it asks the agent to put it in the other way.

On a connection (agreed on by `bulk.BulkConvey`) go, from whoever pushes, a header of fixed length,
the block's bytes, and their digest, which so is made while the home reads; and back a verdict for
each, in their order. Numbers are in the order of x86-64, which both ends are.

A home takes what it has a landing place for (`kvcast.protocol.courier`), of a namespace that the
other may use and that means the same to both, of a bucket of its own, and what it has not yet. It
says so when the bytes are there and have their digest. Python hears of both ends' work before it
does anything else; what it has not heard of when the process dies, the next one reads where the
entries lie, if that memory outlives it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

from kvcast.native.subset import (
    U16,
    U32,
    U64,
    Inline,
    Library,
    Ptr,
    Struct,
    address_of,
    ctypes_of,
    native,
    size_of,
    u64_at,
)
from kvcast.protocol.courier import (
    BATCHES,
    LANDING_BOOKED,
    LANDING_FREE,
    LANDING_PUSHED,
    LEAST_PART,
    MAX_ASKED,
    MOST_HOMES,
    Answer,
    Courier,
    Landing,
    Question,
    answer_in,
    answered_one,
    asked_for,
    begin_answer,
    begin_batch,
    bucket_of_key,
    call_digest,
    call_reset,
    call_update,
    check_of,
    may_be_here,
    may_look_up,
    meaning_in_force,
)
from kvcast.protocol.lane import NativeLane, may_use
from kvcast.protocol.messages.questions import (
    ACK_BY_DEFAULT,
    ACK_HOME,
    ACK_REPLICAS,
    ANSWER,
    MAX_MANY,
    PUT,
    PUT_HOME,
    PUT_QUESTION,
    ROOM,
)
from kvcast.protocol.messages.shared import WORD_BYTES

NODES: Final = 64
"""Nodes that one pushes blocks to, and that push blocks to it; others go by calls."""
ROOMS: Final = 512
"""Rooms that clients have, of all together."""
PUSHES: Final = 128
"""Blocks on one connection without a verdict."""
VERDICTS_AT_ONCE: Final = 32
"""Where more blocks follow at once, so many wait for their verdicts to leave together."""
SCARCE: Final = 8
"""With so few landing places left for blocks like those that come, Python had better make more."""
ENDED: Final = 256
"""Puts whose end Python has not heard of; a question that might be one more is the agent's."""
LANDED: Final = 256
"""The same of blocks that were pushed here."""
MOST_UNWANTED: Final = 64 << 20
"""So much of a block that is not wanted is read and thrown away; more ends the connection."""
NOBODY: Final = 0xFFFF_FFFF
NOWHERE: Final = 0xFFFF_FFFF

# Why a put was not taken, or not to its end: the place of its counter.
CLOSED: Final = 0
NOT_READABLE: Final = 1
NO_ROOM: Final = 2
"""The client has no such room."""
NO_HOME: Final = 3
FULL: Final = 4
HERE: Final = 5
"""The block lies here, is being fetched, or is being put."""
NO_CONNECTION: Final = 6
NOT_TAKEN: Final = 7
"""Its home does not take it."""
CUT_OFF: Final = 8
"""The connection has ended, or has stood still."""
REASONS: Final = (
    *("closed", "not_readable", "no_room", "no_home", "full"),
    *("here", "no_connection", "not_taken", "cut_off"),
)
_TAKEN: Final = len(REASONS)
"""None of them: its home has it."""

# Verdicts.
HAS_IT: Final = 1
HAS_IT_NOT: Final = 2

# States of a room.
ROOM_GIVEN: Final = 1
"""The client may write it, and say that it is a block."""
ROOM_PUSHED: Final = 2
"""It has said so: nobody may use it for anything else."""
ROOM_ENDED: Final = 3
"""Python's, which hears of it."""
ROOM_SPARE: Final = 4
"""The client is given it with the answer to its next put."""
TICKETS: Final = 2048

DIGEST_BYTES: Final = 8
_TICKET_WORD: Final = PUT_QUESTION.size // WORD_BYTES - 1
_ROOM_BYTES: Final = ROOM.size


class Push(Struct):
    """What is said before a block's bytes."""

    number: U64
    key: U64
    rest_of_key: U64
    """The key in two halves, as they lie in memory."""
    meaning: U64
    """What the namespace means to whoever pushes."""
    parent: U64
    rest_of_parent: U64
    """The key of the block before it in its prefix; 0: there is none, or it is not known."""
    size: U32
    depth: U32
    """How many blocks are before it."""
    namespace: U16
    behind: U16
    """How many more come at once, that were put together with it."""
    padding: U32


class Verdict(Struct):
    """What became of a block."""

    number: U64
    status: U64


class Room(Struct):
    """A room of a client."""

    state: U32
    client: U32
    """NOBODY: it has gone, while its block is pushed."""
    namespace: U32
    node_count: U32
    """To so many nodes it is pushed:"""
    nodes: Annotated[Ptr[U32], Inline(MOST_HOMES)]
    waits: U64
    """so many have not said yet what becomes of it;"""
    why: U64
    """`_TAKEN`, or why one of them has it not."""
    batch: U32
    """The batch that its answer goes into, NOWHERE = none,"""
    place: U32
    """and where in it."""
    ticket: U64
    size: U64
    offset: U64
    address: U64
    named: U64
    """Whether it is for a block that `push` names, and was not given ahead."""
    number: U64
    """Of the client's question."""
    asked_ns: U64
    push: Annotated[Ptr[Push], Inline(1)]
    digest: Annotated[Ptr[U64], Inline(1)]
    """0: it is not made yet."""


class Sending(Struct):
    """A room on its way to a node."""

    room: U64
    push_left: U64
    """So many bytes of the header have not left,"""
    left: U64
    """of the block's,"""
    digest_left: U64
    """and of the digest's."""


class Putter(Struct):
    """A client, by its number in the courier."""

    next_room: U64
    """Which room it is given with the answer to its next put; NOWHERE = none."""


class Pusher(Struct):
    """Our end of a connection on which we push."""

    node: U32
    """NOBODY: it is free, or closed."""
    broken: U32
    """Python is to close it."""
    sendings: Annotated[Ptr[Sending], Inline(PUSHES)]
    first: U64
    """The first of them that has no verdict,"""
    count: U64
    """of so many;"""
    sent: U64
    """of which so many have left whole."""
    namespace: U64
    """Of all of them: what several namespaces want at once goes by calls, which take turns."""
    until_ns: U64
    """By then something must move, if any are there."""
    verdict: Annotated[Ptr[Verdict], Inline(1)]
    heard: U64
    """Bytes of it that have come."""


class Receiver(Struct):
    """Our end of a connection on which another node pushes."""

    node: U32
    """NOBODY: it is free, or closed."""
    broken: U32
    push: Annotated[Ptr[Push], Inline(1)]
    digest: Annotated[Ptr[U64], Inline(1)]
    """Of what has come, as the other says."""
    taking: U64
    """Whether a block's bytes come next, and its digest, and no header."""
    landing: U64
    """Where they go; NOWHERE = nobody wants them."""
    since_ns: U64
    """When something came last."""
    verdicts: Annotated[Ptr[Verdict], Inline(PUSHES)]
    verdict_count: U64
    """Those that have not left."""


class Ended(Struct):
    """A put that has ended, for Python."""

    room: U32
    why: U32
    """`_TAKEN`, or a reason."""
    namespace: U32
    node_count: U32
    nodes: Annotated[Ptr[U32], Inline(MOST_HOMES)]
    """Those that have it."""
    key: U64
    rest_of_key: U64
    digest: U64
    elapsed_ns: U64
    offset: U64
    """Where the block lies,"""
    size: U64
    check: U64
    """and of all of it, once it is whole, if they have it (`ended_proves`)."""


class Landed(Struct):
    """A block that was pushed here, for Python."""

    landing: U32
    node: U32
    size: U32
    namespace: U32
    key: U64
    rest_of_key: U64
    parent: U64
    rest_of_parent: U64
    digest: U64
    depth: U32
    padding: U32
    offset: U64
    """Where it lies,"""
    room: U64
    """in so large a room,"""
    check: U64
    """and of all of it, once it is whole (`landed_proves`)."""


class Pushing(Struct):
    """All that this works on."""

    courier: Ptr[Courier]
    lane: Ptr[NativeLane]
    """Who may use which namespace."""
    rooms: Ptr[Room]
    putters: Ptr[Putter]
    by_ticket: Ptr[U32]
    """Where a room with such a ticket stands, as like as not."""
    pushers: Ptr[Pusher]
    receivers: Ptr[Receiver]
    mine: Ptr[U32]
    """By bucket, whether this node is one of its homes,"""
    homes: Ptr[U32]
    """and which nodes are, `MOST_HOMES` each; NOBODY: there is none more."""
    me: U64
    """This node."""
    open: U64
    """Whether clients may put so."""
    default_ack: U64
    """What is waited for where they do not say."""
    takes: U64
    """Whether blocks are taken."""
    serial: U64
    in_flight: U64
    """Rooms that are pushed;"""
    batched: U64
    """so many of them with others, whose answers go together."""
    unsent: U64
    """Whether any pusher has something that was not tried to be sent yet."""
    cut: U64
    """Whether any connection is broken, and not closed yet."""
    wished: U64
    """A node that there had better be a connection to, plus 1."""
    silence_ns: U64
    ended: Ptr[Ended]
    ended_count: U64
    landed: Ptr[Landed]
    landed_count: U64
    knows_all: Ptr[U64]
    """Whether what the index has not is certainly not on this node: no more, once a block was put
    of which Python, and so the index, does not know."""
    scarce: U64
    """Whether there are few landing places left."""
    wrong: U64
    """Blocks that came with other bytes than their digest's."""
    counters: Ptr[U64]
    """By reason, the puts that were handed over."""
    draft: Annotated[Ptr[Question], Inline(1)]


# --- questions --------------------------------------------------------------------------------


@native
def is_put(at: U64, length: U64) -> bool:
    """Whether a message is of the form of a put that a client of ours says."""
    first = (_TICKET_WORD + 1) * WORD_BYTES
    if length < first or (length - first) % _ROOM_BYTES != 0:
        return False
    q = Question.at(at)
    few = (length - first) // _ROOM_BYTES < MAX_MANY
    return few and q.kind == PUT and q.deadline_ms <= ACK_REPLICAS


@native
def is_ones_room(room: Room, client: U64, ticket: U64) -> bool:
    """Whether a room is this client's, by that ticket."""
    return room.state == ROOM_GIVEN and room.client == client and room.ticket == ticket


@native
def _room_of(p: Pushing, client: U64, ticket: U64) -> U64:
    """A client's room by its ticket; NOWHERE if it has none."""
    place = 0 + p.by_ticket[ticket % TICKETS]
    if is_ones_room(p.rooms[place], client, ticket):
        return place
    for i in range(ROOMS):
        if is_ones_room(p.rooms[i], client, ticket):
            return i
    return 0 + NOWHERE


@native
def is_for(room: Room, q: Question) -> bool:
    """Whether a room may be put as this block."""
    if room.namespace != q.namespace:
        return False
    push = room.push[0]
    return room.named == 0 or (push.key == q.key and push.rest_of_key == q.rest_of_key)


@native
def _pusher_to(p: Pushing, node: U64) -> U64:
    """The connection to a node; NODES if there is none."""
    for i in range(NODES):
        if p.pushers[i].node == node and p.pushers[i].broken == 0:
            return i
    return 0 + NODES


@native
def _is_being_put(p: Pushing, q: Question) -> bool:
    """Whether a room with the same block is pushed now."""
    left = 0 + p.in_flight
    for number in range(NODES):
        if left == 0:
            return False
        pusher = p.pushers[number]
        for i in range(pusher.count):
            room = p.rooms[pusher.sendings[(pusher.first + i) % PUSHES].room]
            push = room.push[0]
            same = push.key == q.key and push.rest_of_key == q.rest_of_key
            if same and room.namespace == q.namespace:
                return True
    return False


@native
def is_waited_for(p: Pushing, ack: U64, place: U64, node: U64) -> bool:
    """Whether a node that is one of a block's homes, the first at place 0, is to have it before
    a client is answered."""
    if node == NOBODY or node == p.me:
        return False
    return ack == ACK_REPLICAS or (ack == ACK_HOME and place == 0)


@native
def _objection_to_put(p: Pushing, q: Question, place: U64, ack: U64) -> U64:
    """Why a put is not taken; _TAKEN if it is."""
    courier = p.courier[0]
    if p.open == 0:
        return CLOSED
    if not may_look_up(courier, q):
        return NOT_READABLE
    if place == NOWHERE or not is_for(p.rooms[place], q):
        return NO_ROOM
    if p.ended_count + p.in_flight >= ENDED:
        return FULL
    bucket = bucket_of_key(q.rest_of_key)
    homes = bucket * MOST_HOMES
    if p.homes[homes] == NOBODY:
        return NO_HOME
    if courier.fetching[bucket] != 0 or may_be_here(courier, q) or _is_being_put(p, q):
        return HERE
    if asked_for(courier, q.namespace, q.key, q.rest_of_key) != MAX_ASKED:
        return HERE
    for i in range(MOST_HOMES):
        node = 0 + p.homes[homes + i]
        if is_waited_for(p, ack, i, node):
            number = _pusher_to(p, node)
            if number == NODES:
                p.wished = node + 1
                return NO_CONNECTION
            pusher = p.pushers[number]
            other = pusher.count != 0 and pusher.namespace != q.namespace
            if pusher.count == PUSHES or other:
                return FULL
    return _TAKEN


@native
def hear_put(p: Pushing, client: U64, at: U64, length: U64, now_ns: U64) -> bool:
    """A client says that rooms of its own are blocks, in memory that nobody else writes; False if
    it says no such thing."""
    if not is_put(at, length):
        return False
    courier = p.courier[0]
    q = Question.at(at)
    first = (_TICKET_WORD + 1) * WORD_BYTES
    further = at + first
    count = 1
    if length > first:
        count += (length - first) // _ROOM_BYTES
    batch = 0 + NOWHERE
    if count > 1:
        if courier.batches_open == BATCHES:
            p.counters[FULL] += count
            begin_answer(courier, client, q.number)
            return True
        batch = begin_batch(courier, client, count, q.number)
    ack = 0 + q.deadline_ms
    if ack == ACK_BY_DEFAULT:
        ack = 0 + p.default_ack
    ticket = 0 + u64_at(at)[_TICKET_WORD]
    for i in range(count):
        if i != 0:
            q.key = u64_at(further)[0]
            q.rest_of_key = u64_at(further)[1]
            ticket = 0 + u64_at(further)[2]
            further += _ROOM_BYTES
        place = _room_of(p, client, ticket)
        why = _objection_to_put(p, q, place, ack)
        if why == _TAKEN:
            room = p.rooms[place]
            room.batch = batch
            room.place = i
            room.push[0].behind = count - 1 - i
            _put_room(p, q, place, ack, now_ns)
        else:
            p.counters[why] += 1
            if batch == NOWHERE:
                begin_answer(courier, client, q.number)
            else:
                answered_one(courier, batch)
    return True


@native
def _put_room(p: Pushing, q: Question, place: U64, ack: U64, now_ns: U64) -> None:
    """Have a room pushed to whoever is waited for, as this block; there is a way to each."""
    courier = p.courier[0]
    room = p.rooms[place]
    room.state = ROOM_PUSHED
    room.number = q.number
    room.asked_ns = now_ns
    room.digest[0] = 0
    room.why = 0 + _TAKEN
    push = room.push[0]
    push.number = p.serial
    p.serial += 1
    push.key = q.key
    push.rest_of_key = q.rest_of_key
    push.meaning = meaning_in_force(courier, q.namespace)
    push.size = room.size
    push.namespace = q.namespace
    push.padding = 0
    p.in_flight += 1
    if room.batch != NOWHERE:
        p.batched += 1
    count = 0
    homes = bucket_of_key(q.rest_of_key) * MOST_HOMES
    for i in range(MOST_HOMES):
        node = 0 + p.homes[homes + i]
        if is_waited_for(p, ack, i, node):
            room.nodes[count] = node
            count += 1
            _push_to(p, p.pushers[_pusher_to(p, node)], place, now_ns)
    room.node_count = count
    room.waits = count
    if count == 0:
        _make_digest(p, room)
        _put_ended(p, place, now_ns)


@native
def _push_to(p: Pushing, pusher: Pusher, place: U64, now_ns: U64) -> None:
    """Have a room leave on a connection, which has room for it."""
    room = p.rooms[place]
    sending = pusher.sendings[(pusher.first + pusher.count) % PUSHES]
    sending.room = place
    sending.push_left = size_of(Push)
    sending.left = room.size
    sending.digest_left = 0 + DIGEST_BYTES
    if pusher.count == 0:
        pusher.until_ns = now_ns + p.silence_ns
    pusher.count += 1
    pusher.namespace = room.namespace
    p.unsent = 1


# --- pushing ----------------------------------------------------------------------------------


@native
def leaves_next(pusher: Pusher, after: U64) -> U64:
    """Where that stands which is to leave next, `after` so many others; PUSHES if there is
    none."""
    if pusher.broken != 0 or pusher.sent + after >= pusher.count:
        return 0 + PUSHES
    return (pusher.first + pusher.sent + after) % PUSHES


@native
def has_left(p: Pushing, pusher: Pusher, size: U64, now_ns: U64) -> None:
    """So many more bytes have left, of headers, of blocks and of their digests, as they follow each
    other."""
    pusher.until_ns = now_ns + p.silence_ns
    while size != 0:
        sending = pusher.sendings[(pusher.first + pusher.sent) % PUSHES]
        if sending.push_left + sending.left == 0:
            some = _less_of(size, 0 + sending.digest_left)
            sending.digest_left -= some
            size -= some
            if sending.digest_left == 0:
                pusher.sent += 1
            continue
        some = _less_of(size, 0 + sending.push_left)
        sending.push_left -= some
        size -= some
        some = _less_of(size, 0 + sending.left)
        sending.left -= some
        size -= some
        room = p.rooms[sending.room]
        if sending.push_left + sending.left == 0 and room.digest[0] == 0:
            _make_digest(p, room)


@native
def _less_of(one: U64, other: U64) -> U64:
    return one if one < other else other


@native
def _make_digest(p: Pushing, room: Room) -> None:
    courier = p.courier[0]
    call_reset(courier.reset, courier.state)
    call_update(courier.update, courier.state, room.address, room.size)
    room.digest[0] = _digest_or_1(call_digest(courier.digest, courier.state))


@native
def _digest_or_1(digest: U64) -> U64:
    return 1 if digest == 0 else digest


@native
def is_verdict(p: Pushing, pusher: Pusher) -> bool:
    """Whether a verdict is on what waits for one, and of a form that there is."""
    verdict = pusher.verdict[0]
    if pusher.sent == 0:
        return False
    room = p.rooms[pusher.sendings[pusher.first].room]
    if room.push[0].number != verdict.number:
        return False
    return verdict.status == HAS_IT or verdict.status == HAS_IT_NOT


@native
def verdict_came(p: Pushing, pusher: Pusher, now_ns: U64) -> None:
    """A verdict is in `verdict`."""
    if not is_verdict(p, pusher):
        end_pusher(p, pusher, now_ns)
        return
    pusher.sent -= 1
    pusher.until_ns = now_ns + p.silence_ns
    why = 0 + _TAKEN
    if pusher.verdict[0].status != HAS_IT:
        why = 0 + NOT_TAKEN
    _first_ended(p, pusher, why, now_ns)


@native
def end_pusher(p: Pushing, pusher: Pusher, now_ns: U64) -> None:
    """A connection is over: Python closes it, and the agent is to be asked for what went on it."""
    pusher.broken = 1
    p.cut = 1
    while pusher.count != 0:
        _first_ended(p, pusher, CUT_OFF, now_ns)
    pusher.sent = 0


@native
def _first_ended(p: Pushing, pusher: Pusher, why: U64, now_ns: U64) -> None:
    """The first room on a connection is pushed there no more."""
    place = 0 + pusher.sendings[pusher.first].room
    pusher.first = (pusher.first + 1) % PUSHES
    pusher.count -= 1
    room = p.rooms[place]
    if why != _TAKEN:
        room.why = why
    room.waits -= 1
    if room.waits == 0:
        _put_ended(p, place, now_ns)


@native
def _put_ended(p: Pushing, place: U64, now_ns: U64) -> None:
    """A room is pushed no more. If all that were waited for have the block, the client has the room
    no more, but the next one, if it is for a block like that."""
    room = p.rooms[place]
    courier = p.courier[0]
    why = 0 + room.why
    p.in_flight -= 1
    if why != _TAKEN:
        p.counters[why] += 1
    at = 0
    if room.batch != NOWHERE:
        p.batched -= 1
        at += answer_in(courier, room.batch, room.place)
        answered_one(courier, room.batch)
    elif room.client != NOBODY:
        at += address_of(courier.answers[begin_answer(courier, room.client, room.number)])
    if why != _TAKEN and room.client != NOBODY:
        room.state = ROOM_GIVEN
        return
    room.state = ROOM_ENDED
    ended = p.ended[p.ended_count]
    p.ended_count += 1
    p.knows_all[0] = 0
    ended.room = place
    ended.why = why
    ended.namespace = room.namespace
    ended.node_count = room.node_count
    for i in range(room.node_count):
        ended.nodes[i] = room.nodes[i]
    ended.key = room.push[0].key
    ended.rest_of_key = room.push[0].rest_of_key
    ended.digest = room.digest[0]
    ended.elapsed_ns = now_ns - room.asked_ns
    ended.offset = room.offset
    ended.size = room.size
    ended.check = 0
    if why == _TAKEN:
        ended.check = _check_of_ended(ended)
    if room.client == NOBODY:
        return
    answer = Answer.at(at)
    answer.status = PUT_HOME
    answer.size = room.node_count + p.mine[bucket_of_key(room.push[0].rest_of_key)]
    answer.digest = room.digest[0]
    putter = p.putters[room.client]
    if putter.next_room != NOWHERE and room.named == 0:
        following = p.rooms[putter.next_room]
        if following.namespace == room.namespace and following.size == room.size:
            answer.handle = following.ticket
            answer.offset = following.offset
            following.state = ROOM_GIVEN
            putter.next_room = 0 + NOWHERE


@native
def _check_of_ended(ended: Ended) -> U64:
    return check_of(
        0 + ended.namespace,
        0 + ended.key,
        0 + ended.rest_of_key,
        0 + ended.offset,
        0 + ended.size,
        0 + ended.digest,
    )


@native
def ended_proves(ended: Ended) -> bool:
    """Whether an entry that another process has left says that a block was put."""
    return ended.check == _check_of_ended(ended)


@native
def expire_pushes(p: Pushing, now_ns: U64) -> None:
    """End the connections on which nothing has moved for too long."""
    if p.in_flight != 0:
        for i in range(NODES):
            pusher = p.pushers[i]
            late = pusher.count != 0 and pusher.until_ns <= now_ns
            if late and pusher.broken == 0:
                end_pusher(p, pusher, now_ns)


@native
def leave_puts(p: Pushing, client: U64) -> None:
    """A client is gone: nobody is told what becomes of its rooms that are pushed."""
    for i in range(ROOMS):
        if p.rooms[i].state == ROOM_PUSHED and p.rooms[i].client == client:
            p.rooms[i].client = NOBODY
    p.putters[client].next_room = NOWHERE


# --- a home's end -----------------------------------------------------------------------------


@native
def may_push(p: Pushing, receiver: Receiver, namespace: U64) -> bool:
    """Whether whoever pushes may use the namespace."""
    return may_use(p.lane[0], namespace, receiver.node)


@native
def means_the_same(courier: Courier, push: Push) -> bool:
    """Whether a namespace means to us what it means to whoever pushes."""
    return push.meaning != 0 and push.meaning == meaning_in_force(courier, push.namespace)


@native
def is_ours(p: Pushing, push: Push) -> bool:
    """Whether this node is one of the block's homes."""
    return p.mine[bucket_of_key(push.rest_of_key)] != 0


@native
def has_digest(receiver: Receiver, digest: U64) -> bool:
    """Whether what has come is what the other says."""
    return receiver.digest[0] == digest


@native
def _is_taken_here(p: Pushing, receiver: Receiver) -> bool:
    """Whether a block is one that is taken here, if there is a landing place."""
    courier = p.courier[0]
    push = receiver.push[0]
    if p.takes == 0 or p.landed_count + NODES >= LANDED:
        return False
    if not may_push(p, receiver, push.namespace) or not means_the_same(courier, push):
        return False
    if not is_ours(p, push) or courier.fetching[bucket_of_key(push.rest_of_key)] != 0:
        return False
    q = p.draft[0]
    q.namespace = push.namespace
    q.key = push.key
    q.rest_of_key = push.rest_of_key
    q.meaning = push.meaning
    return may_look_up(courier, q) and not may_be_here(courier, q)


@native
def _may_land(landing: Landing, push: Push) -> bool:
    """Whether a block may land there, of which it takes a good part."""
    if landing.state != LANDING_FREE or landing.namespace != push.namespace:
        return False
    return push.size <= landing.size and push.size > landing.size // LEAST_PART


@native
def is_push(receiver: Receiver) -> bool:
    """Whether a header is of a form that there is, and there is room for a verdict on it."""
    push = receiver.push[0]
    return push.size != 0 and push.padding == 0 and receiver.verdict_count < PUSHES


@native
def push_came(p: Pushing, receiver: Receiver) -> None:
    """A header is in `push`: where the bytes behind it go."""
    courier = p.courier[0]
    push = receiver.push[0]
    receiver.landing = 0 + NOWHERE
    receiver.taking = 1
    if not is_push(receiver):
        receiver.broken = 1
        p.cut = 1
        return
    if _is_taken_here(p, receiver):
        free = 0
        for i in range(courier.landing_count):
            landing = courier.landings[i]
            if _may_land(landing, push):
                free += 1
                if receiver.landing == NOWHERE:
                    landing.state = LANDING_PUSHED
                    receiver.landing = i
        if free <= SCARCE:
            p.scarce = 1
        if push.behind != 0 and free <= push.behind and courier.wanted_places <= push.behind:
            courier.wanted_places = 1 + push.behind
    if receiver.landing == NOWHERE and push.size > MOST_UNWANTED:
        receiver.broken = 1
        p.cut = 1


@native
def push_landed(p: Pushing, receiver: Receiver, digest: U64) -> None:
    """All bytes of a block are there, which have this digest, and so is what their digest should
    be."""
    push = receiver.push[0]
    verdict = receiver.verdicts[receiver.verdict_count]
    receiver.verdict_count += 1
    verdict.number = push.number
    verdict.status = HAS_IT_NOT
    receiver.taking = 0
    if receiver.landing == NOWHERE:
        return
    place = 0 + receiver.landing
    receiver.landing = 0 + NOWHERE
    landing = p.courier[0].landings[place]
    if not has_digest(receiver, _digest_or_1(digest)):
        landing.state = LANDING_FREE
        p.wrong += 1
        return
    verdict.status = HAS_IT
    landing.state = LANDING_BOOKED
    landed = p.landed[p.landed_count]
    p.landed_count += 1
    p.knows_all[0] = 0
    landed.landing = place
    landed.node = receiver.node
    landed.size = push.size
    landed.namespace = push.namespace
    landed.key = push.key
    landed.rest_of_key = push.rest_of_key
    landed.parent = push.parent
    landed.rest_of_parent = push.rest_of_parent
    landed.depth = push.depth
    landed.digest = receiver.digest[0]
    landed.offset = landing.offset
    landed.room = landing.size
    landed.check = _check_of_landed(landed)


@native
def _check_of_landed(landed: Landed) -> U64:
    return check_of(
        0 + landed.namespace,
        0 + landed.key,
        0 + landed.rest_of_key,
        0 + landed.offset,
        landed.room + (landed.size << 32),
        0 + landed.digest,
    )


@native
def landed_proves(landed: Landed) -> bool:
    """As `ended_proves`, of a block that was pushed here."""
    return landed.check == _check_of_landed(landed)


@native
def lands_at(p: Pushing, receiver: Receiver) -> U64:
    """The address that a block's first byte goes to; 0: nobody wants it."""
    if receiver.landing == NOWHERE:
        return 0
    return 0 + p.courier[0].landings[receiver.landing].address


@native
def withdraw(p: Pushing, place: U64) -> None:
    """A landing place is needed otherwise: what comes there is thrown away, and not taken."""
    for i in range(NODES):
        receiver = p.receivers[i]
        if receiver.node != NOBODY and receiver.landing == place:
            receiver.landing = 0 + NOWHERE
    p.courier[0].landings[place].state = LANDING_FREE


# --- Python's side ----------------------------------------------------------------------------

PUSH: Final = struct.Struct("<Q16sQ16sIIHHI")
"""A `Push`, as it is on the wire;"""
DIGEST: Final = struct.Struct("<Q")
"""what follows the bytes;"""
VERDICT: Final = struct.Struct("<QQ")
"""and a `Verdict`."""
assert PUSH.size == ctypes.sizeof(ctypes_of(Push))
assert VERDICT.size == ctypes.sizeof(ctypes_of(Verdict))
assert DIGEST.size == DIGEST_BYTES
assert ANSWER.size == ctypes.sizeof(ctypes_of(Answer)) - WORD_BYTES
_ENDED: Final = struct.Struct(f"=IIII{4 * MOST_HOMES}s16s5Q")
_LANDED: Final = struct.Struct("=IIII16s16sQII3Q")
assert _ENDED.size == ctypes.sizeof(ctypes_of(Ended))
assert _LANDED.size == ctypes.sizeof(ctypes_of(Landed))


class PutEnded(NamedTuple):
    """An `Ended`, for Python."""

    room: int
    why: int
    namespace: int
    node_count: int
    all_nodes: bytes
    key: bytes
    digest: int
    elapsed_ns: int
    offset: int
    size_bytes: int
    check: int

    @property
    def is_taken(self) -> bool:
        """Whether those have the block that were waited for."""
        return self.why == _TAKEN

    @property
    def nodes(self) -> tuple[int, ...]:
        """These."""
        return struct.unpack_from(f"={self.node_count}I", self.all_nodes)


class PushLanded(NamedTuple):
    """A `Landed`, for Python."""

    landing: int
    node: int
    size_bytes: int
    namespace: int
    key: bytes
    parent: bytes
    digest: int
    depth: int
    padding: int
    offset: int
    room_bytes: int
    check: int


class Compiled(NamedTuple):
    """Entry points for Python; structures are given by their addresses."""

    hear_put: Callable[[int, int, int, int, int], bool]
    leaves_next: Callable[[int, int], int]
    has_left: Callable[[int, int, int, int], None]
    verdict_came: Callable[[int, int, int], None]
    end_pusher: Callable[[int, int, int], None]
    expire_pushes: Callable[[int, int], None]
    leave_puts: Callable[[int, int], None]
    push_came: Callable[[int, int], None]
    push_landed: Callable[[int, int, int], None]
    lands_at: Callable[[int, int], int]
    withdraw: Callable[[int, int], None]
    ended_proves: Callable[[int], bool]
    landed_proves: Callable[[int], bool]


@cache
def compiled() -> Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    functions = (
        *(hear_put, leaves_next, has_left, verdict_came, end_pusher, expire_pushes),
        *(leave_puts, push_came, push_landed, lands_at, withdraw),
        *(ended_proves, landed_proves),
    )
    library = Library(*functions)
    return Compiled(*(library.call(function) for function in functions))


def take_ended(array: Any, count: int) -> list[PutEnded]:
    """The first of these records."""
    return [PutEnded._make(each) for each in _records(array, _ENDED, count)]


def take_landed(array: Any, count: int) -> list[PushLanded]:
    """The same of these."""
    return [PushLanded._make(each) for each in _records(array, _LANDED, count)]


def _records(array: Any, form: struct.Struct, count: int) -> Iterator[tuple[Any, ...]]:
    return form.iter_unpack(bytes(memoryview(array).cast("B")[: count * form.size]))
