"""The courier: gets of blocks that other nodes hold, from a client's question to its answer, in
compiled code.

Owns: which questions are well-formed; the READ for a block, the landing place that its first DATA
gets, its digest; the client's answer; and what Python hears of it afterwards. Must not know:
sockets, clocks, sessions, or why Python allows what it allows.

A block of more than one segment is read so far that it is known whether anybody shares it, by its
first segment. If nobody does, and its home has offered another way, the rest comes by the conveyor
(`kvcast.protocol.conveyor`), into the same landing place, of one of the nodes that there is a
conveyor from. If somebody does, READs are better, and the agent's.

Python says beforehand what the courier may do: which home each bucket is asked at, if any, which
namespaces may be looked up (the index in shared memory says so), how much a client may hold, and
*landing places*, room for a block of one size in one namespace each. A question that the courier
does not take, or not to its end (another size, silence, MISS, a wrong digest), is answered
by `ASK_AGENT`: the client then asks by the socket, as for any other block, and all decisions are
the requester's. The courier keeps nothing of such a question; so what has begun to come is waited
for as long as more does, and chunks that are lost are asked for again here, `MOST_REPAIRS` times.

What has happened stands in *records*, which Python takes before it does anything else. So nothing
that the courier has given to a client is ever unknown to the code that might evict it. A record is
whole before the client is told; where the records lie in memory that outlives the process, the
agent that comes after reads there what this one had not taken yet.

A question that is asked while another client's is in flight for the same block waits for the same
answer. What lies here already, or may lie below DRAM, and what Python is fetching, is Python's to
answer.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from kvcast.native.linux import swap16
from kvcast.native.subset import (
    I32,
    U16,
    U32,
    U64,
    Library,
    Ptr,
    Struct,
    address_of,
    bytes_at,
    copy,
    ctypes_of,
    indirect,
    native,
    size_of,
    u16_at,
    u32_at,
    u64_at,
)
from kvcast.protocol.conveyor import (
    GATHER_BYTES,
    GIVEN_HERE,
    NODES,
    NOT_HERE,
    READ_IT,
    REQUESTS,
    UNWANTED,
    Expected,
    Reply,
    Taker,
    ask_for,
    next_expected,
)
from kvcast.protocol.lane import may_be_counted, mixed_of
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.questions import (
    ANSWER,
    ASK_AGENT,
    GET,
    GET_MANY,
    GIVEN,
    MAX_DEADLINE_MS,
    MAX_MANY,
    QUESTION,
    RELEASE,
)
from kvcast.protocol.messages.shared import WORD_BYTES
from kvcast.protocol.messages.wire import (
    BUCKETS,
    CHUNK_BYTES,
    FLAG_PARTIAL,
    FLAG_RESIDENT,
    FLAG_SHARED,
    FULL_SEGMENT,
    KEY_BYTES,
    KVCAST,
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
    Copy,
    Table,
    enter_copy,
    find_copy,
    leave_copy,
    put_frame,
)

MAX_ASKED: Final = 256
"""Questions in flight; more are the agent's to answer."""
MAX_ASKED_A_CLIENT: Final = 16
BATCHES: Final = 16
"""Questions for many blocks in flight."""
HEADS: Final = 256
LANDINGS: Final = 256
MOST_HOMES: Final = 8
"""Of one block; what further ones say or hold is the agent's to find out."""
MOST_REPAIRS: Final = 3
"""READs for chunks that are missing, of one question."""
LEAST_PART: Final = 2
"""A block takes more than this part of its landing place: a half."""
RECORDS: Final = 1024
"""What Python has not taken yet, at most; a question that might need more is the agent's."""
RECORDS_ENOUGH: Final = 640
"""From so many on Python takes them before anything else happens."""
assert RECORDS >= RECORDS_ENOUGH + MAX_ASKED + MAX_MANY
ANSWERS: Final = 512
NOBODY: Final = 0xFFFF_FFFF

# Why a question was not taken, or not to its end: the place of its counter.
CLOSED: Final = 0
NOT_READABLE: Final = 1
NO_HOME: Final = 2
FULL: Final = 3
"""All questions, records or landing places are in use."""
HELD_BYTES: Final = 4
"""The client holds as much as the courier may give it."""
HERE: Final = 5
"""It lies here, or is being fetched."""
NO_LANDING: Final = 6
"""Blocks of that namespace, or of the size that came, are not expected."""
SILENCE: Final = 7
GAP: Final = 8
MISSED: Final = 9
WRONG_DIGEST: Final = 10
YIELDED: Final = 11
"""Python took it over."""
NO_CONVEYOR: Final = 12
"""It is of more than one segment, and there is none from its home, or it carries enough."""
COMPANY: Final = 13
"""It is of more than one segment, and others read it, too; or they want it, its home says."""
NOT_OFFERED: Final = 14
"""Its home has not offered another way to the rest."""
CUT_OFF: Final = 15
"""The conveyor has stopped, or has brought what it should not."""
DEADLINE: Final = 16
"""The client waits no longer, which says nothing of the home."""
GIVEN_UP: Final = 17
"""Its client has given it up, and nobody else waits for it."""
BELOW: Final = 18
"""It may lie on this node's disk, or in another of the tiers below DRAM."""
REASONS: Final = (
    *("closed", "not_readable", "no_home", "full", "held_bytes", "here", "no_landing"),
    *("silence", "gap", "missed", "wrong_digest", "yielded"),
    *("no_conveyor", "company", "not_offered", "cut_off", "deadline"),
    *("given_up", "below"),
)

# What `hear` returns.
NOTHING: Final = 0
SEND_READ: Final = 1
OFFENCE: Final = 2

# Records.
LANDED: Final = 1
JOINED: Final = 2
"""One more client has the block of the LANDED before it."""
RELEASED: Final = 3
FAILED: Final = 4

_NO_OBJECTION: Final = len(REASONS)
_NS_A_MS: Final = 1_000_000
_NEVER_NS: Final = (1 << 63) - 1
NO_READ: Final = (1 << 64) - 1
"""The round-trip time of what came without a READ."""
_ALL: Final = (1 << 64) - 1
_NAMESPACE_AT: Final = KVCAST.offset_of("namespace")
_OP_AT: Final = KVCAST.offset_of("op")
_FLAGS_AT: Final = KVCAST.offset_of("flags")
_WANTED_AT: Final = KVCAST.offset_of("wanted")
_KEY_AT: Final = KVCAST.offset_of("key")
_DIGEST_AT: Final = KVCAST.offset_of("digest")
_SIZE_AT: Final = KVCAST.offset_of("size")
_SEGMENT_AT: Final = KVCAST.offset_of("segment")
_TAG_AT: Final = KVCAST.offset_of("tag")

_FREE: Final = 0
_ASKED: Final = 1
_RECEIVING: Final = 2
_WITH_ANOTHER: Final = 3
_ON_CONVEYOR: Final = 4
"""Its first segment is there, and the rest was asked for."""
_FOLLOWS: Final = 5
"""It waits for what the first of its batch from the same home finds out."""
_NOWHERE: Final = 0xFFFF_FFFF
"""It has no landing place, and its answer goes into no batch."""
_SERIAL_BIT: Final = 1 << 63
_ASKED_BITS: Final = 8
assert MAX_ASKED <= 1 << _ASKED_BITS
_HEADS_BITS: Final = 8
assert HEADS == 1 << _HEADS_BITS

LANDING_FREE: Final = 1
LANDING_TAKEN: Final = 2
LANDING_BOOKED: Final = 3
"""A block has landed there: Python's, from the record on."""
LANDING_PUSHED: Final = 4
"""A block is pushed there (`kvcast.protocol.pushing`)."""

CLIENT_HERE: Final = 1
CLIENT_GONE: Final = 2
"""It has hung up, or does not read its answers."""
CLIENT_OFFENDS: Final = 3
"""It has said what no client of ours says."""

_TAGS_WORD: Final = shared.TAGS_OFFSET // shared.WORD_BYTES
_NAMESPACES_WORD: Final = shared.NAMESPACES_OFFSET // shared.WORD_BYTES
_SPREAD, _SPREAD_AGAIN, _BY_LOW, _BY_NAMESPACE = shared.MULTIPLIERS


class Question(Struct):
    """As `QUESTION`; the key in two halves, as they lie in memory."""

    kind: U16
    namespace: U16
    deadline_ms: U32
    number: U64
    key: U64
    rest_of_key: U64
    meaning: U64


class Answer(Struct):
    """As `ANSWER`, and in front of it the client it is for."""

    client: U64
    status: U16
    tier: U16
    padding: U32
    number: U64
    handle: U64
    offset: U64
    size: U64
    digest: U64


class Batch(Struct):
    """A question for many blocks."""

    open: U32
    client: U32
    left: U64
    """Answers that are missing."""
    leaders: U64
    """The first of its questions that others follow."""
    count: U64
    answers: U64
    """Where they lie, as they are sent."""


class Landing(Struct):
    """Room for a block."""

    state: U32
    copy: U32
    """Its number in the placement's table; where its bytes go stands there."""
    namespace: U32
    size: U32
    offset: U64
    missing: Ptr[U64]
    """By segment, the chunks that have not arrived: none but those of the first come as DATA. The
    copy's `missing` points here,"""
    source: U32
    """and its `sources` here."""
    likely: U32
    """Whether the namespace's last block was of about this size."""
    address: U64


class Asked(Struct):
    """A question in flight."""

    state: U32
    client: U32
    number: U64
    key: U64
    rest_of_key: U64
    namespace: U32
    home: U32
    landing: U32
    tag: U32
    flags: U32
    """Of all DATA that came."""
    frames: U32
    serial: U64
    asked_ns: U64
    began_ns: U64
    """When the first DATA came."""
    until_ns: U64
    end_ns: U64
    """When the client's deadline is."""
    gap: U64
    """Whether the answer has ended and chunks are missing,"""
    repairs: U64
    """and how often those were asked for."""
    offered: U64
    """Whether the home has offered another way to the rest,"""
    waits: U64
    """and whether it is waited for that: the first segment is there."""
    promised: U64
    """What the client may be given for it: what is likely, until its landing place is known."""
    batch: U32
    """The batch that its answer goes into,"""
    place: U32
    """and where in it."""
    leader: U32
    """Which it follows, or waits with."""
    unread: U32
    """Its READ is still to be sent."""
    joined: U32
    """Whether it waits with another,"""
    next: U32
    """and which is the next that does; or that follows the same; or the next of a batch that
    others follow."""
    first_joiner: U32
    """The first of those that wait with this one,"""
    first_follower: U32
    """and of those that follow it."""
    next_alike: U32
    """The next that is asked of a home and whose key has the same hash, plus 1."""
    last_follower: U32
    """Of those that follow it, while its batch is heard."""


class Record(Struct):
    """What Python is to hear."""

    kind: U32
    client: U32
    handle: U64
    key: U64
    rest_of_key: U64
    namespace: U32
    landing: U32
    home: U32
    flags: U32
    """FAILED: why."""
    size: U64
    digest: U64
    elapsed_ns: U64
    rtt_ns: U64
    read_ns: U64
    """FAILED: when its READ left, if nothing has been heard since, and `yield_block` was not asked;
    else 0."""
    offset: U64
    """LANDED, JOINED: where the block lies,"""
    room: U64
    """in so large a room,"""
    session: U64
    """and whose the handle is."""
    check: U64
    """Of such a record, once it is whole (`proves_itself`)."""


class Client(Struct):
    """A client of the courier."""

    state: U32
    asked: U32
    session: U64
    """Its number to whoever is told of it by an agent that comes after."""
    next_handle: U64
    held_bytes: U64
    """What its session says that it holds,"""
    given_bytes: U64
    """and what the courier has given it since,"""
    promised_bytes: U64
    """and may give it for what it has asked."""
    max_bytes: U64


class Courier(Struct):
    """All that the courier works on."""

    table: Ptr[Table]
    open: U64
    chunk_code: U64
    patience_ns: Ptr[U64]
    """By node, how long nothing may come from it of what it is asked for."""
    reorder_ns: U64
    next_tag: U64
    next_serial: U64
    in_flight: U64
    landings: Ptr[Landing]
    landing_count: U64
    takers: Ptr[Taker]
    """The conveyors' ends here, NODES of them."""
    cut: U64
    """Whether any of them is broken, and not closed yet."""
    unsent: U64
    """Whether any of them has requests that have not left."""
    wished: U64
    """A node that there had better be a conveyor from, plus 1."""
    silence_ns: U64
    """How long a conveyor may bring nothing."""
    asked: Ptr[Asked]
    free: Ptr[U32]
    """The numbers of those that are free,"""
    free_count: U64
    """so many."""
    heads: Ptr[U32]
    """By hash of a key, a question that is asked of a home, plus 1; 0 = there is none."""
    due_ns: U64
    """Nothing has been waited for long enough before; 0: see."""
    landing_hint: U64
    """Where the next free landing place may be."""
    clients: Ptr[Client]
    records: Ptr[Record]
    record_count: U64
    landed: U64
    """Of them, those that have used up a landing place; from `enough_landed` on Python had better
    take them."""
    enough_landed: U64
    answers: Ptr[Answer]
    answer_count: U64
    batches: Ptr[Batch]
    batches_open: U64
    batches_full: U64
    """Some have all their answers."""
    wanted_places: U64
    """For so many blocks at once there were too few landing places."""
    unread: U64
    """READs that are still to be sent."""
    homes: Ptr[U32]
    """By bucket, the node that is asked; NOBODY = the courier asks nobody."""
    all_homes: U64
    """By number, and of each by bucket, the other nodes that are homes, as `Lookups.homes`."""
    fetching: Ptr[U32]
    """By bucket, how many blocks Python is fetching."""
    index: Ptr[U64]
    """The index in shared memory, by words."""
    index_bits: U64
    """It has 2^that buckets."""
    below: U64
    """2^`below_bits` counters of what lies below DRAM (`hostagent.tiers.counting_filter`),"""
    below_bits: U64
    """0: there is nothing below."""
    read: U64
    """Where the READ lies; what is asked for, and how, is put in."""
    read_flags: U64
    """Those of every READ."""
    read_node: U64
    """The node that it is for."""
    state: U64
    reset: U64
    update: U64
    digest: U64
    frames: U64
    """Answers that came for the courier's questions."""
    repairs: U64
    """READs for chunks that were missing."""
    counters: Ptr[U64]
    """By reason, the questions that were handed over."""


@indirect
def call_reset(address: U64, state: U64) -> I32:
    raise NotImplementedError


@indirect
def call_update(address: U64, state: U64, data: U64, size: U64) -> I32:
    raise NotImplementedError


@indirect
def call_digest(address: U64, state: U64) -> U64:
    raise NotImplementedError


@native
def _swap32(value: U64) -> U64:
    return (swap16(value & 0xFFFF) << 16) | swap16(value >> 16)


@native
def _swap64(value: U64) -> U64:
    return (_swap32(value & 0xFFFFFFFF) << 32) | _swap32(value >> 32)


# --- what Python allows -----------------------------------------------------------------------


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
            mixed = mixed * _SPREAD_AGAIN
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
def bucket_of_key(rest_of_key: U64) -> U64:
    """The bucket that a key is in: the low bits of its last two bytes."""
    return swap16(rest_of_key >> 48) % BUCKETS


@native
def _room_for(courier: Courier, namespace: U64, count: U64) -> U64:
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
            waits = asked.state == _ASKED or asked.state == _FOLLOWS
            if asked.state == _ON_CONVEYOR and asked.landing == _NOWHERE:
                waits = True
            if waits and asked.namespace == namespace:
                wanted += 1
    if spare >= wanted + count:
        return largest if likely == 0 else likely
    if count > 1 and count > courier.wanted_places:
        courier.wanted_places = count
    return 0


@native
def taker_for(courier: Courier, node: U64) -> U64:
    """The conveyor from a node; NODES if there is none."""
    for i in range(NODES):
        taker = courier.takers[i]
        if taker.node == node and taker.broken == 0:
            return i
    return 0 + NODES


@native
def _may_take(courier: Courier, asked: Asked, size: U64) -> bool:
    """Whether a question's client may be given so much for it."""
    if asked.client == NOBODY:
        return True
    who = courier.clients[asked.client]
    return may_be_given(who, who.promised_bytes - asked.promised + size)


@native
def _take_landing(courier: Courier, asked: Asked, size: U64) -> U64:
    """Take a free landing place for a question's block of that size, which takes a good part of it
    and which the client may be given; `landing_count` if there is none."""
    for step in range(courier.landing_count):
        i = (courier.landing_hint + step) % courier.landing_count
        landing = courier.landings[i]
        free = landing.state == LANDING_FREE
        fits = size <= landing.size and size > landing.size // LEAST_PART
        right = free and fits and landing.namespace == asked.namespace
        if right and _may_take(courier, asked, 0 + landing.size):
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


# --- questions --------------------------------------------------------------------------------


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
def _answer_to(courier: Courier, asked: Asked) -> U64:
    """Where the answer to a question stands, which says ASK_AGENT unless it is changed; 0: nobody
    hears it."""
    at = 0
    if asked.batch != _NOWHERE:
        at += answer_in(courier, asked.batch, asked.place)
        answered_one(courier, asked.batch)
    elif asked.client != NOBODY:
        at += address_of(courier.answers[begin_answer(courier, asked.client, asked.number)])
    return at


@native
def _record(courier: Courier, kind: U64, client: U64) -> U64:
    """Begin a record; there is room."""
    at = 0 + courier.record_count
    record = courier.records[at]
    courier.record_count += 1
    record.kind = kind
    record.client = client
    return at


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
    return ((key + rest_of_key * _BY_LOW) * _SPREAD) >> (64 - _HEADS_BITS)


@native
def _over(courier: Courier, number: U64) -> None:
    """A question was answered, or handed over; nobody waits with it any more."""
    asked = courier.asked[number]
    asked.state = _FREE
    courier.free[courier.free_count] = number
    courier.free_count += 1
    if asked.joined == 0:
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
def may_be_given(who: Client, bytes_more: U64) -> bool:
    """Whether a client may hold so much more."""
    return who.held_bytes + who.given_bytes + bytes_more <= who.max_bytes


@native
def may_hear(courier: Courier) -> bool:
    """Whether there is room for what any message may leave for Python, besides what is in flight;
    else Python takes the records first."""
    return courier.record_count + courier.in_flight + MAX_MANY <= RECORDS


@native
def hear(courier: Courier, client: U64, at: U64, length: U64, now_ns: U64) -> U32:
    """What a client says, in memory that nobody else writes: NOTHING, SEND_READ (it lies at
    `read`, for `read_node`), or OFFENCE."""
    if not is_question(at, length):
        return OFFENCE
    q = Question.at(at)
    if q.kind == RELEASE:
        courier.records[_record(courier, RELEASED, client)].handle = q.number
        further = at + size_of(Question)
        for i in range((length - size_of(Question)) // WORD_BYTES):
            handle = u64_at(further)[i]
            courier.records[_record(courier, RELEASED, client)].handle = handle
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
        room += _room_for(courier, q.namespace, 1)
    why = _objection(courier, who, q, other, room)
    if why != _NO_OBJECTION:
        courier.counters[why] += 1
        begin_answer(courier, client, q.number)
        return NOTHING
    number = _begin(courier, client, q, room, now_ns)
    if other < MAX_ASKED:
        _join(courier, number, other)
        return NOTHING
    _ask_first(courier, number)
    next_read(courier)
    return SEND_READ


@native
def _join(courier: Courier, number: U64, other: U64) -> None:
    """Let a question wait for another's answer."""
    asked = courier.asked[number]
    with_it = courier.asked[other]
    asked.state = _WITH_ANOTHER
    asked.joined = 1
    asked.leader = other
    asked.next = with_it.first_joiner
    with_it.first_joiner = number


@native
def _ask_first(courier: Courier, number: U64) -> None:
    """Have a block's home asked, by a READ."""
    asked = courier.asked[number]
    _enter(courier, number)
    asked.state = _ASKED
    asked.home = courier.homes[bucket_of_key(asked.rest_of_key)]
    _wait_until(courier, asked, asked.asked_ns + courier.patience_ns[asked.home])
    _send_read(courier, asked)


@native
def _send_read(courier: Courier, asked: Asked) -> None:
    """Have a READ sent for what is missing."""
    asked.tag = courier.next_tag
    courier.next_tag += 1
    asked.unread = 1
    courier.unread += 1


@native
def _wait_until(courier: Courier, asked: Asked, until_ns: U64) -> None:
    """Wait for something so long, but not beyond the client's deadline."""
    asked.until_ns = until_ns
    if until_ns > asked.end_ns:
        asked.until_ns = asked.end_ns
    due_by(courier, 0 + asked.until_ns)


@native
def _ask_for_missing(courier: Courier, asked: Asked, now_ns: U64) -> None:
    """Ask for the chunks that are missing of a first segment."""
    asked.repairs += 1
    courier.repairs += 1
    asked.gap = 0
    _wait_until(courier, asked, now_ns + courier.patience_ns[asked.home])
    _send_read(courier, asked)


@native
def _enter(courier: Courier, number: U64) -> None:
    """A question is one that is asked of a home."""
    asked = courier.asked[number]
    head = _hash_of(0 + asked.key, 0 + asked.rest_of_key)
    asked.next_alike = courier.heads[head]
    courier.heads[head] = number + 1


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
            if asked.state == _ASKED or asked.state == _RECEIVING:
                flags = 0 + courier.read_flags
                digest = 0
                wanted = 0 + FULL_SEGMENT
                if asked.state == _RECEIVING:
                    landing = courier.landings[asked.landing]
                    flags |= FLAG_PARTIAL
                    digest += courier.table[0].copies[landing.copy].digest
                    wanted = 0 + landing.missing[0]
                u16_at(courier.read + _FLAGS_AT)[0] = swap16(flags)
                u16_at(courier.read + _NAMESPACE_AT)[0] = swap16(asked.namespace)
                u64_at(courier.read + _KEY_AT)[0] = asked.key
                u64_at(courier.read + _KEY_AT + 8)[0] = asked.rest_of_key
                u64_at(courier.read + _DIGEST_AT)[0] = digest
                u64_at(courier.read + _WANTED_AT)[0] = _swap64(wanted)
                u32_at(courier.read + _TAG_AT)[0] = _swap32(asked.tag)
                courier.read_node = asked.home
                return True
    return False


@native
def _hear_many(courier: Courier, client: U64, at: U64, length: U64, now_ns: U64) -> None:
    """A question for many blocks. Of those from one home the first is asked for by a READ, and the
    others by the conveyor, once it is known that nobody shares the first."""
    q = Question.at(at)
    who = courier.clients[client]
    count = 1 + (length - size_of(Question)) // KEY_BYTES
    room = _room_for(courier, q.namespace, count)
    why = _objection_to_many(courier, who, q, count, room)
    if why != _NO_OBJECTION:
        courier.counters[why] += count
        begin_answer(courier, client, q.number)
        return
    number = begin_batch(courier, client, count, 0 + q.number)
    batch = courier.batches[number]
    keys = at + size_of(Question)
    for i in range(count):
        if i != 0:
            q.key = u64_at(keys)[0]
            q.rest_of_key = u64_at(keys)[1]
            keys += KEY_BYTES
        other = asked_for(courier, q.namespace, q.key, q.rest_of_key)
        home = courier.homes[bucket_of_key(q.rest_of_key)]
        why = 0 + _NO_OBJECTION
        if other == MAX_ASKED:
            if home == NOBODY:
                why = 0 + NO_HOME
            elif courier.fetching[bucket_of_key(q.rest_of_key)] != 0 or may_be_here(courier, q):
                why = 0 + HERE
            elif may_be_below(courier, q):
                why = 0 + BELOW
            elif taker_for(courier, home) == NODES:
                courier.wished = home + 1
                why = 0 + NO_CONVEYOR
        if why != _NO_OBJECTION:
            courier.counters[why] += 1
            answered_one(courier, number)
            continue
        mine = _begin(courier, client, q, room, now_ns)
        asked = courier.asked[mine]
        asked.batch = number
        asked.place = i
        if other < MAX_ASKED:
            _join(courier, mine, other)
            continue
        leader = 0 + batch.leaders
        while leader != _NOWHERE and courier.asked[leader].home != home:
            leader = 0 + courier.asked[leader].next
        if leader == _NOWHERE:
            _ask_first(courier, mine)
            asked.next = batch.leaders
            batch.leaders = mine
        else:
            _enter(courier, mine)
            asked.state = _FOLLOWS
            asked.home = home
            asked.leader = leader
            asked.next = 0 + _NOWHERE
            led_by = courier.asked[leader]
            if led_by.first_follower == _NOWHERE:
                led_by.first_follower = mine
            else:
                courier.asked[led_by.last_follower].next = mine
            led_by.last_follower = mine


@native
def begin_batch(courier: Courier, client: U64, count: U64, number: U64) -> U64:
    """Begin the answers to a client's question for many blocks, of which there are `BATCHES` at
    most: each says ASK_AGENT, unless it is changed."""
    at = 0
    while courier.batches[at].open != 0:
        at += 1
    batch = courier.batches[at]
    batch.open = 1
    batch.leaders = 0 + _NOWHERE
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
def _begin(courier: Courier, client: U64, q: Question, room: U64, now_ns: U64) -> U64:
    """Enter a question, for one block; there is room. Its state is the caller's to set."""
    courier.free_count -= 1
    number = 0 + courier.free[courier.free_count]
    asked = courier.asked[number]
    who = courier.clients[client]
    asked.joined = 0
    asked.first_joiner = 0 + _NOWHERE
    asked.first_follower = 0 + _NOWHERE
    asked.batch = 0 + _NOWHERE
    asked.landing = 0 + _NOWHERE
    asked.unread = 0
    asked.serial = 0
    asked.client = client
    asked.number = q.number
    asked.key = q.key
    asked.rest_of_key = q.rest_of_key
    asked.namespace = q.namespace
    asked.flags = 0
    asked.frames = 0
    asked.gap = 0
    asked.repairs = 0
    asked.offered = 0
    asked.waits = 0
    asked.promised = room
    asked.began_ns = 0
    asked.asked_ns = now_ns
    asked.end_ns = now_ns + q.deadline_ms * _NS_A_MS
    _wait_until(courier, asked, 0 + asked.end_ns)
    courier.in_flight += 1
    who.asked += 1
    who.promised_bytes += room
    return number


@native
def _objection_to_many(courier: Courier, who: Client, q: Question, count: U64, room: U64) -> U64:
    """As `_objection`, to a batch of so many."""
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
    return _NO_OBJECTION


@native
def _objection(courier: Courier, who: Client, q: Question, other: U64, room: U64) -> U64:
    """Why the courier does not take a question; _NO_OBJECTION if it does. `other` as `asked_for`
    says, `room` as `_room_for`."""
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
        return _NO_OBJECTION
    bucket = bucket_of_key(q.rest_of_key)
    if courier.homes[bucket] == NOBODY:
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
    return _NO_OBJECTION


# --- answers ----------------------------------------------------------------------------------


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
    namespace = swap16(u16_at(at + _NAMESPACE_AT)[0])
    key = u64_at(at + _KEY_AT)[0]
    number = asked_for(courier, namespace, key, u64_at(at + _KEY_AT + 8)[0])
    op = bytes_at(at)[_OP_AT]
    if number == MAX_ASKED or op == OP_READ:  # which somebody asks of us
        return False
    courier.frames += 1
    asked = courier.asked[number]
    if is_asked(asked, source):
        _answered(courier, number, at, length, now_ns)
    elif asked.state == _ASKED and is_home(courier, asked.rest_of_key, source):
        _answered_elsewhere(courier, number, at, length, source, now_ns)
    return True


@native
def _answered_elsewhere(
    courier: Courier, number: U64, at: U64, length: U64, source: U64, now_ns: U64
) -> None:
    """Another home of a question's block says something. A switch joins READs of a block whichever
    of its homes they ask, and gives the answer of the one that it has passed on to all."""
    if swap16(u16_at(at + _FLAGS_AT)[0]) & FLAG_SHARED == 0:
        return
    op = bytes_at(at)[_OP_AT]
    if op == OP_DATA:
        courier.asked[number].home = source
        _answered(courier, number, at, length, now_ns)
    elif op == OP_MISS:
        give_up(courier, number, MISSED)


@native
def _answered(courier: Courier, number: U64, at: U64, length: U64, now_ns: U64) -> None:
    """The home of a question says something of its block. Of a copy that is chosen all DATA goes
    the short way, and what comes here is of another."""
    asked = courier.asked[number]
    op = bytes_at(at)[_OP_AT]
    if op == OP_MISS and (
        u32_at(at + _TAG_AT)[0] == _swap32(asked.tag)
        or swap16(u16_at(at + _FLAGS_AT)[0]) & FLAG_SHARED != 0  # under the tag of who asked first
    ):
        give_up(courier, number, MISSED)
    if op == OP_OFFER and asked.state != _ON_CONVEYOR:
        asked.offered = 1
        if asked.waits != 0:
            _ask_for_rest(courier, number, now_ns)
    if op != OP_DATA or asked.state != _ASKED:
        return
    t = courier.table[0]
    segment = swap16(u16_at(at + _SEGMENT_AT)[0])
    size = _swap32(u32_at(at + _SIZE_AT)[0])
    if segment >> SEGMENT_INDEX_BITS != courier.chunk_code:
        return  # asked for at another time
    place = 0 + courier.landing_count
    if find_copy(t, at) == 0:
        place = _take_landing(courier, asked, size)
    if place == courier.landing_count:
        give_up(courier, number, NO_LANDING)
        return
    landing = courier.landings[place]
    landing.source = asked.home
    chunk_bytes = CHUNK_BYTES << courier.chunk_code
    first = size
    if first > SEGMENT_BYTES:
        first = 0 + SEGMENT_BYTES
    chunks = (first + chunk_bytes - 1) // chunk_bytes
    landing.missing[0] = _ALL
    if chunks < 64:
        landing.missing[0] = (1 << chunks) - 1
    courier.next_serial += 1
    entered = t.copies[landing.copy]
    entered.serial = _SERIAL_BIT | (courier.next_serial << _ASKED_BITS) | number
    entered.key = asked.key
    entered.rest_of_key = asked.rest_of_key
    entered.digest = u64_at(at + _DIGEST_AT)[0]
    entered.namespace = u16_at(at + _NAMESPACE_AT)[0]
    entered.size = size
    entered.source_count = 1
    entered.chunk_code = courier.chunk_code
    enter_copy(t, landing.copy)
    asked.state = _RECEIVING
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
        if arrival.serial & _SERIAL_BIT:
            courier.frames += arrival.frames
            number = arrival.serial & ((1 << _ASKED_BITS) - 1)
            asked = courier.asked[number]
            if asked.state == _RECEIVING and asked.serial == arrival.serial:
                asked.flags |= arrival.flags
                asked.frames += arrival.frames
                if arrival.missing == 0:
                    if arrival.segment == 0 and asked.waits == 0:
                        _first_is_there(courier, number, now_ns)
                elif arrival.last != 0:
                    asked.gap = 1
                    _wait_until(courier, asked, now_ns + courier.reorder_ns)
                elif asked.gap == 0 and arrival.added != 0:
                    _wait_until(courier, asked, now_ns + courier.patience_ns[asked.home])
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
        _whole(courier, number, call_digest(courier.digest, courier.state), now_ns)
    elif asked.flags & (FLAG_SHARED | FLAG_RESIDENT):
        give_up(courier, number, COMPANY)
    elif asked.offered != 0:
        _ask_for_rest(courier, number, now_ns)
    else:
        asked.waits = 1
        _wait_until(courier, asked, now_ns + courier.reorder_ns)


@native
def _ask_for_rest(courier: Courier, number: U64, now_ns: U64) -> None:
    """Have the rest of a block come by the conveyor. Nothing more of it comes as DATA."""
    asked = courier.asked[number]
    landing = courier.landings[asked.landing]
    landed = courier.table[0].copies[landing.copy]
    digest = _swap64(landed.digest)
    place = taker_for(courier, asked.home)
    if not _ask_conveyor(courier, place, number, digest, SEGMENT_BYTES, now_ns):
        give_up(courier, number, NO_CONVEYOR)
        return
    leave_copy(courier.table[0], landing.copy)
    landed.serial = 0
    asked.until_ns = asked.end_ns
    _ask_for_followers(courier, number, now_ns)


@native
def _ask_for_followers(courier: Courier, number: U64, now_ns: U64) -> None:
    """Nobody shares what the first of a batch has brought: have the others come by the
    conveyor."""
    leader = courier.asked[number]
    if leader.first_follower == _NOWHERE:
        return
    place = taker_for(courier, leader.home)
    while leader.first_follower != _NOWHERE:
        i = _take_follower(courier, leader)
        courier.next_serial += 1
        courier.asked[i].serial = _SERIAL_BIT | (courier.next_serial << _ASKED_BITS) | i
        if not _ask_conveyor(courier, place, i, 0, 0, now_ns):
            give_up(courier, i, NO_CONVEYOR)


@native
def _ask_conveyor(
    courier: Courier, place: U64, number: U64, digest: U64, start: U64, now_ns: U64
) -> bool:
    """Have a question's block come by that conveyor, from a byte on; False where that cannot be."""
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
    asked.state = _ON_CONVEYOR
    return True


@native
def _take_follower(courier: Courier, leader: Asked) -> U64:
    """The first of those that follow a question, which follows it no more."""
    number = 0 + leader.first_follower
    leader.first_follower = courier.asked[number].next
    return number


@native
def _follow_none(courier: Courier, number: U64) -> None:
    """What the first of a batch has brought was shared: READs are better for the others."""
    leader = courier.asked[number]
    while leader.first_follower != _NOWHERE:
        give_up(courier, _take_follower(courier, leader), COMPANY)


@native
def _whole(courier: Courier, number: U64, digest: U64, now_ns: U64) -> None:
    """All of a block has come, and has this digest."""
    t = courier.table[0]
    asked = courier.asked[number]
    landing = courier.landings[asked.landing]
    landed = t.copies[landing.copy]
    wanted = _swap64(landed.digest)
    if asked.state == _RECEIVING:
        leave_copy(t, landing.copy)
        landed.serial = 0
    if digest == 0:
        digest = 1
    if not is_right(wanted, digest):
        asked.state = _ASKED  # its copy has left the table
        landing.state = LANDING_FREE
        give_up(courier, number, WRONG_DIGEST)
        return
    if asked.flags & (FLAG_SHARED | FLAG_RESIDENT):
        _follow_none(courier, number)
    else:
        _ask_for_followers(courier, number, now_ns)
    landing.state = LANDING_BOOKED
    courier.landed += 1
    tier = 0
    if asked.flags & FLAG_RESIDENT:
        tier = 2
    elif asked.flags & FLAG_SHARED:
        tier = 1
    _give(courier, number, number, tier, digest, now_ns)
    while asked.first_joiner != _NOWHERE:
        i = _take_joiner(courier, asked)
        if _may_take(courier, courier.asked[i], 0 + landing.size):
            _give(courier, i, number, tier, digest, now_ns)
        else:
            _hand_over(courier, i, HELD_BYTES)
        _over(courier, i)
    _over(courier, number)


@native
def _take_joiner(courier: Courier, with_it: Asked) -> U64:
    """The first of those that wait with a question, which waits no more."""
    number = 0 + with_it.first_joiner
    with_it.first_joiner = courier.asked[number].next
    return number


@native
def _give(courier: Courier, number: U64, of: U64, tier: U64, digest: U64, now_ns: U64) -> None:
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
        answer = Answer.at(_answer_to(courier, asked))
        answer.status = GIVEN
        answer.tier = tier
        answer.handle = handle
        answer.offset = landing.offset
        answer.size = courier.table[0].copies[landing.copy].size
        answer.digest = digest
    record = courier.records[_record(courier, LANDED if number == of else JOINED, client)]
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
    named = key + rest_of_key * _BY_LOW + namespace * _BY_NAMESPACE
    lies = offset * _BY_LOW + room
    return ((named ^ digest) * _SPREAD + lies) * _SPREAD_AGAIN | 1


@native
def _check_of(record: Record) -> U64:
    held = record.session * _BY_NAMESPACE + record.handle
    block = check_of(
        0 + record.namespace,
        0 + record.key,
        0 + record.rest_of_key,
        0 + record.offset,
        0 + record.room,
        0 + record.digest,
    )
    return block + held * _BY_LOW


@native
def proves_itself(record: Record) -> bool:
    """Whether a record that another process has left says what was given to a client: one at which
    it died says nothing, and no client was told."""
    given = record.kind == LANDED or record.kind == JOINED
    return given and record.handle != 0 and record.check == _check_of(record)


# --- the conveyor -----------------------------------------------------------------------------


@native
def _of_expected(courier: Courier, taker: Taker) -> U64:
    """The question that the first of what a conveyor is to bring is for; MAX_ASKED if it was given
    up."""
    return _asked_of(courier, taker.expected[taker.first])


@native
def _asked_of(courier: Courier, expected: Expected) -> U64:
    serial = 0 + expected.number
    number = serial & ((1 << _ASKED_BITS) - 1)
    asked = courier.asked[number]
    if asked.state == _ON_CONVEYOR and asked.serial == serial:
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
    return reply.size == landed.size and reply.digest == _swap64(landed.digest)


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
    if number < MAX_ASKED and courier.asked[number].landing == _NOWHERE:
        asked = courier.asked[number]
        place = _take_landing(courier, asked, 0 + reply.size)
        if place == courier.landing_count:
            give_up(courier, number, NO_LANDING)
            return
        landing = courier.landings[place]
        of = courier.table[0].copies[landing.copy]
        of.size = reply.size
        of.digest = _swap64(reply.digest)
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
        _whole(courier, number, digest, now_ns)


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


# --- the end ----------------------------------------------------------------------------------


@native
def _hand_over(courier: Courier, number: U64, why: U64) -> None:
    """Let whoever asked a question ask the agent."""
    asked = courier.asked[number]
    courier.counters[why] += 1
    courier.in_flight -= 1
    if asked.client != NOBODY:
        courier.clients[asked.client].asked -= 1
        courier.clients[asked.client].promised_bytes -= asked.promised
    _answer_to(courier, asked)


@native
def give_up(courier: Courier, number: U64, why: U64) -> None:
    """End a question that is asked of a home, and those that wait with it: the agent is to be
    asked."""
    asked = courier.asked[number]
    if asked.state == _RECEIVING:
        landing = courier.landings[asked.landing]
        leave_copy(courier.table[0], landing.copy)
        courier.table[0].copies[landing.copy].serial = 0
        landing.state = LANDING_FREE
    elif asked.state == _ON_CONVEYOR:
        # What is still coming of it is thrown away: the landing place may be another's at once.
        place = taker_for(courier, asked.home)
        if place < NODES:
            taker = courier.takers[place]
            if taker.taking != 0 and taker.expected[taker.first].number == asked.serial:
                taker.block = 0
        if asked.landing != _NOWHERE:
            courier.landings[asked.landing].state = LANDING_FREE
    elif asked.state == _FOLLOWS:
        _leave_leader(courier, number)
    if asked.state != _FOLLOWS:  # nobody was asked for that
        record = courier.records[_record(courier, FAILED, asked.client)]
        record.flags = why
        record.namespace = asked.namespace
        record.key = asked.key
        record.rest_of_key = asked.rest_of_key
        record.home = asked.home
        record.read_ns = 0
        if asked.state == _ASKED and asked.unread == 0:
            record.read_ns = asked.asked_ns
    asked.state = _ASKED
    _hand_over(courier, number, why)
    while asked.first_joiner != _NOWHERE:
        joiner = _take_joiner(courier, asked)
        _hand_over(courier, joiner, why)
        _over(courier, joiner)
    follower = 0 + asked.first_follower
    asked.first_follower = 0 + _NOWHERE
    _over(courier, number)
    while follower != _NOWHERE:
        following = 0 + courier.asked[follower].next
        give_up(courier, follower, why)
        follower = following


@native
def _leave_leader(courier: Courier, number: U64) -> None:
    """A question follows no other any more."""
    leader = courier.asked[courier.asked[number].leader]
    leader.first_follower = _without(courier, leader.first_follower, number)


@native
def _leave_other(courier: Courier, number: U64) -> None:
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
    while at != _NOWHERE:
        other = courier.asked[at]
        if other.next == number:
            other.next = after
        at = 0 + other.next
    return first


@native
def _why_late(asked: Asked) -> U64:
    if asked.until_ns == asked.end_ns:
        return DEADLINE
    if asked.waits != 0:
        return NOT_OFFERED
    return GAP if asked.state == _RECEIVING else SILENCE


@native
def _may_repair(asked: Asked, now_ns: U64) -> bool:
    """Whether what is missing of a first segment is asked for once more."""
    comes = asked.state == _RECEIVING and asked.waits == 0
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
        if asked.state != _FREE:
            if asked.until_ns <= now_ns and _may_repair(asked, now_ns):
                _ask_for_missing(courier, asked, now_ns)
            if asked.until_ns > now_ns:
                if asked.until_ns < next_ns:
                    next_ns = 0 + asked.until_ns
            elif asked.state == _WITH_ANOTHER:
                _leave_other(courier, i)
                _hand_over(courier, i, DEADLINE)
                _over(courier, i)
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
    read = asked.state == _ASKED and asked.unread == 0
    overdue = read and asked.asked_ns + courier.patience_ns[asked.home] // 2 <= now_ns
    asked.asked_ns = 0  # said at once, and so not by the record
    give_up(courier, number, YIELDED)
    return overdue


@native
def yield_all(courier: Courier) -> None:
    """Python fetches everything from now on."""
    for i in range(MAX_ASKED):
        asked = courier.asked[i]
        if asked.state != _FREE and asked.state != _WITH_ANOTHER:
            give_up(courier, i, YIELDED)


@native
def leave(courier: Courier, client: U64) -> None:
    """A client is gone: nobody is told what it asked for, which ends."""
    for i in range(MAX_ASKED):
        asked = courier.asked[i]
        if asked.state != _FREE and asked.client == client:
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
        if asked.state != _FREE and asked.client == client and asked.number == number:
            _leave_asked(courier, asked)
    _end_unwanted(courier)


@native
def _leave_asked(courier: Courier, asked: Asked) -> None:
    """A question's client waits for it no more."""
    _answer_to(courier, asked)
    who = courier.clients[asked.client]
    who.asked -= 1
    who.promised_bytes -= asked.promised
    asked.client = NOBODY
    asked.batch = 0 + _NOWHERE


@native
def _end_unwanted(courier: Courier) -> None:
    """End questions that nobody waits for: first those that wait with others, then those that
    follow others, which go on for them."""
    for turn in range(3):
        for i in range(MAX_ASKED):
            asked = courier.asked[i]
            if asked.state == _FREE or asked.client != NOBODY:
                continue
            if asked.state == _WITH_ANOTHER:
                _leave_other(courier, i)
                _hand_over(courier, i, GIVEN_UP)
                _over(courier, i)
                continue
            alone = asked.first_joiner == _NOWHERE and asked.first_follower == _NOWHERE
            if alone and turn != 0 and (turn == 2 or asked.state == _FOLLOWS):
                give_up(courier, i, GIVEN_UP)
    for i in range(NODES):
        taker = courier.takers[i]
        if taker.broken == 0 and is_in_vain(courier, taker):
            cut_off(courier, taker)
            taker.broken = UNWANTED


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


@native
def close_batch(courier: Courier, number: U64) -> None:
    """The answers of a batch have been sent, or nobody hears them."""
    courier.batches[number].open = 0
    courier.batches_open -= 1


# --- Python's side ----------------------------------------------------------------------------

assert QUESTION.size == ctypes.sizeof(ctypes_of(Question))
assert ANSWER.size == ctypes.sizeof(ctypes_of(Answer)) - shared.WORD_BYTES
RECORD: Final = struct.Struct("=IIQ16sIIII9Q")
assert RECORD.size == ctypes.sizeof(ctypes_of(Record))


class Told(NamedTuple):
    """A `Record`, for Python."""

    kind: int
    client: int
    handle: int
    key: bytes
    namespace: int
    landing: int
    home: int
    flags: int
    size_bytes: int
    digest: int
    elapsed_ns: int
    rtt_ns: int
    read_ns: int
    offset: int
    room_bytes: int
    session: int
    check: int


class Compiled(NamedTuple):
    """Entry points for Python; `Courier`s are given by their addresses, times are nanoseconds."""

    hear: Callable[[int, int, int, int, int], int]
    frame_came: Callable[[int, int, int, int, int], bool]
    came: Callable[[int, int], None]
    expire: Callable[[int, int], int]
    yield_block: Callable[[int, int, int, int, int], bool]
    yield_all: Callable[[int], None]
    leave: Callable[[int, int], None]
    unask: Callable[[int, int, int], None]
    reply_came: Callable[[int, int], None]
    block_came: Callable[[int, int, int, int], None]
    progressed: Callable[[int, int, int], None]
    cut_off: Callable[[int, int], None]
    next_read: Callable[[int], bool]
    close_batch: Callable[[int, int], None]
    proves_itself: Callable[[int], bool]


@cache
def compiled() -> Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    functions = (
        *(hear, frame_came, came, expire, yield_block, yield_all, leave, unask),
        *(reply_came, block_came, progressed, cut_off, next_read, close_batch, proves_itself),
    )
    library = Library(*functions)
    return Compiled(*(library.call(function) for function in functions))


def fits(size_bytes: int, room_bytes: int) -> bool:
    """Whether a block of that size may land in such a place."""
    return room_bytes // LEAST_PART < size_bytes <= room_bytes


def blank() -> Any:
    """A courier without memory of its own: whoever makes one gives it its tables."""
    return ctypes_of(Courier)()
