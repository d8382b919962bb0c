"""What the courier works on: its tables, as they lie in memory, and what their numbers mean.

Owns: limits, kinds of records, reasons, and the layouts that Python and compiled code share. Must
not know: what is done with them.
"""

from __future__ import annotations

from typing import Final

from kvcast.native.subset import I32, U8, U16, U32, U64, Ptr, Struct, indirect
from kvcast.protocol.conveyor import Taker
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.questions import MAX_MANY
from kvcast.protocol.placement import Table

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
"""All questions, records or landing places are in use, or enough is being read."""
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

NO_OBJECTION: Final = len(REASONS)
NO_READ: Final = (1 << 64) - 1
"""The round-trip time of what came without a READ."""


NOWHERE: Final = 0xFFFF_FFFF
"""It has no landing place, and its answer goes into no batch."""
SERIAL_BIT: Final = 1 << 63
ASKED_BITS: Final = 8
assert MAX_ASKED <= 1 << ASKED_BITS
HEADS_BITS: Final = 8
assert HEADS == 1 << HEADS_BITS

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

SPREAD, SPREAD_AGAIN, BY_LOW, BY_NAMESPACE = shared.MULTIPLIERS


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
    """An `AskedState`; `become` changes it, and nothing else does."""
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
    repairs: U64
    """How often chunks that were missing were asked for."""
    offered: U64
    """Whether the home has offered another way to the rest."""
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
    next: U32
    """The next that waits with the same, or follows the same; or the next of a batch that others
    follow."""
    first_joiner: U32
    """The first of those that wait with this one,"""
    first_follower: U32
    """and of those that follow it."""
    next_alike: U32
    """The next that is asked of a home and whose key has the same hash, plus 1."""
    last_follower: U32
    """Of those that follow it, while its batch is heard."""
    chunk_code: U32
    """How what it is answered is to be cut."""


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
    """How what homes send is to be cut,"""
    resident: Ptr[U8]
    """and by the last two bytes of a key, whether a switch may hold such a block, and it is read as
    a switch has it: by cells (code 0)."""
    reads_at_once: U64
    """While so many READs are out, no further block of a batch is read from a switch."""
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
    may_become: Ptr[U32]
    """TRANSITIONS: by state, a bit for each that may come after it."""
    impossible: U64
    """A change that cannot be: 1, the state before and that after, in a byte each; 0: none was."""


@indirect
def call_reset(address: U64, state: U64) -> I32:
    raise NotImplementedError


@indirect
def call_update(address: U64, state: U64, data: U64, size: U64) -> I32:
    raise NotImplementedError


@indirect
def call_digest(address: U64, state: U64) -> U64:
    raise NotImplementedError
