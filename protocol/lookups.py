"""Lookups: how long a prefix of a chain is held, from a client's question to its answer, in
compiled code.

Owns: which questions are well-formed, which home is asked about which key, on which conveyor, and
what follows from the replies. Must not know: sockets, clocks, or what a home looks into
(`kvcast.protocol.conveyor`).

What this node's index has is known. Of the other keys all homes are asked at once, one request a
node: how many of theirs do they hold, counted from the first without a gap? The first gap of all is
the end of the prefix, unless another home of that key holds it. Those homes are asked one after the
other.

The answer says from which key on the agent must be asked: behind a gap that another home has
filled, and behind a key that may lie where compiled code does not look (a disk, an object store).
The client asks the agent for a whole question if there is no room for it, if there is no conveyor
or it has something else to bring, and if homes are silent. Nothing is kept of such a question.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from kvcast.native.subset import (
    U32,
    U64,
    Library,
    Ptr,
    Struct,
    bytes_at,
    copy,
    ctypes_of,
    native,
    size_of,
    u16_at,
    u64_at,
)
from kvcast.protocol.chains import NOBODY as NO_HOME
from kvcast.protocol.chains import choose_nodes, find_held
from kvcast.protocol.conveyor import COUNTED as REPLY_COUNTED
from kvcast.protocol.conveyor import NODES, NOT_HERE, Taker, ask_for_count, next_expected
from kvcast.protocol.courier import (
    MOST_HOMES,
    NOBODY,
    Courier,
    Question,
    begin_answer,
    bucket_of_key,
    cut_off,
    due_by,
    may_look_up,
    taker_for,
)
from kvcast.protocol.lane import NativeLane, may_be_counted, mixed_of
from kvcast.protocol.messages.questions import COUNTED, MAX_CHAIN, MAX_DEADLINE_MS
from kvcast.protocol.messages.wire import BUCKETS, KEY_BYTES

LOOKUPS: Final = 16
"""Questions in flight; more are the agent's to answer."""
_LOOKUP_BIT: Final = 1 << 62
_ASKED_BIT: Final = 1 << 63
"""What the courier asks conveyors for has this one."""
_NS_A_MS: Final = 1_000_000


class Part(Struct):
    """What of a question a conveyor was asked for."""

    number: U64
    """Of the request; 0 = nothing is waited for."""
    lookup: U64
    positions: U64
    """Where the places of its keys in the chain stand."""


class Lookup(Struct):
    """A question in flight."""

    open: U32
    client: U32
    number: U64
    namespace: U64
    keys: U64
    count: U64
    gap: U64
    """All before it are held, as far as there were replies;"""
    certain: U64
    """and whether it certainly is not, by those homes that were asked."""
    round: U64
    left: U64
    """Replies that are missing."""
    until_ns: U64


class Lookups(Struct):
    """All that lookups work on."""

    courier: Ptr[Courier]
    lane: Ptr[NativeLane]
    """Of which only the index matters."""
    knows_all: U64
    """Whether what neither the index nor the courier's filter has is certainly not on this node."""
    lookups: Ptr[Lookup]
    parts: Ptr[Part]
    """By taker."""
    homes: U64
    """By round and bucket, the node that is asked; `chains.NOBODY`: there is none."""
    held: U64
    """Room for a bit for each key,"""
    nodes: U64
    """and for a node."""
    in_flight: U64
    next_number: U64
    answered: U64
    handed_over: U64
    """Totals."""


@native
def idle_taker_for(s: Lookups, node: U64) -> U64:
    """The conveyor from a node that has nothing else to bring; NODES if there is none."""
    courier = s.courier[0]
    place = taker_for(courier, node)
    if place == NODES:
        courier.wished = node + 1
    elif courier.takers[place].count != 0:
        return 0 + NODES
    return place


@native
def hear_lookup(s: Lookups, client: U64, at: U64, length: U64, now_ns: U64) -> bool:
    """A client's question, in memory that nobody else writes; False: no client of ours says so."""
    if length < size_of(Question):
        return False
    q = Question.at(at)
    further = length - size_of(Question)
    count = 1 + further // KEY_BYTES
    if further % KEY_BYTES != 0 or count > MAX_CHAIN or q.deadline_ms > MAX_DEADLINE_MS:
        return False
    courier = s.courier[0]
    place = 0
    while place < LOOKUPS and s.lookups[place].open != 0:
        place += 1
    if place == LOOKUPS or not may_look_up(courier, q):
        s.handed_over += 1
        begin_answer(courier, client, q.number)
        return True
    lookup = s.lookups[place]
    lookup.open = 1
    lookup.client = client
    lookup.number = q.number
    lookup.namespace = q.namespace
    lookup.count = count
    lookup.round = 0
    lookup.left = 0
    lookup.until_ns = now_ns + courier.silence_ns
    if lookup.until_ns > now_ns + q.deadline_ms * _NS_A_MS:
        lookup.until_ns = now_ns + q.deadline_ms * _NS_A_MS
    s.in_flight += 1
    u64_at(lookup.keys)[0] = q.key
    u64_at(lookup.keys)[1] = q.rest_of_key
    copy(lookup.keys + KEY_BYTES, at + size_of(Question), further)
    if not _ask_first_homes(s, place, now_ns):
        _hand_lookup_over(s, place)
    elif lookup.left == 0:
        _settle_lookup(s, place, now_ns)
    return True


@native
def _ask_first_homes(s: Lookups, number: U64, now_ns: U64) -> bool:
    """Ask the first home of every key that is not here; False where one of them cannot be."""
    lookup = s.lookups[number]
    for i in range((lookup.count + 7) // 8):
        bytes_at(s.held)[i] = 0
    find_held(s.lane[0], lookup.namespace, lookup.keys, lookup.count, s.held)
    lookup.gap = choose_nodes(lookup.keys, lookup.count, s.held, s.homes, s.nodes)
    lookup.certain = 1
    nodes = u16_at(s.nodes)
    last = 0 + NO_HOME
    for i in range(lookup.gap):
        if nodes[i] != NO_HOME and nodes[i] != last:
            last = 0 + nodes[i]
            if idle_taker_for(s, last) == NODES:
                return False
    for i in range(lookup.gap):
        if nodes[i] != NO_HOME and not _ask_part(s, number, 0 + nodes[i], i, now_ns):
            return False
    return True


@native
def _ask_part(s: Lookups, number: U64, node: U64, first: U64, now_ns: U64) -> bool:
    """Ask a node about those keys from `first` on for which it was chosen, and have it chosen for
    none; False if it cannot be asked."""
    lookup = s.lookups[number]
    courier = s.courier[0]
    place = idle_taker_for(s, node)
    if place == NODES:
        return False
    part = s.parts[place]
    nodes = u16_at(s.nodes)
    positions = u16_at(part.positions)
    count = 0 + 0
    for i in range(first, lookup.gap):
        if nodes[i] == node:
            nodes[i] = NO_HOME
            positions[count] = i
            count += 1
    taker = courier.takers[place]
    name = _LOOKUP_BIT | s.next_number
    s.next_number += 1
    at = ask_for_count(taker, name, lookup.namespace, count)
    if at == 0:
        return False
    for i in range(count):
        key = u64_at(lookup.keys + positions[i] * KEY_BYTES)
        u64_at(at)[2 * i] = key[0]
        u64_at(at)[2 * i + 1] = key[1]
    taker.until_ns = now_ns + courier.silence_ns
    due_by(courier, 0 + taker.until_ns)
    courier.unsent = 1
    part.number = name
    part.lookup = number
    lookup.left += 1
    return True


@native
def is_right_count(count: U64, asked: U64) -> bool:
    """Whether a home may say that it holds so many of the keys that it was asked about."""
    return count <= asked


@native
def counted_came(s: Lookups, taker: Taker, place: U64, now_ns: U64) -> bool:
    """A reply's header is in `reply`; whether it is the turn of one to a lookup."""
    if taker.count == 0:
        return False
    expected = taker.expected[taker.first]
    name = 0 + expected.number
    if name & _LOOKUP_BIT == 0 or name & _ASKED_BIT != 0:
        return False
    reply = taker.reply[0]
    counted = reply.status == REPLY_COUNTED and is_right_count(reply.size, expected.likely)
    if reply.number != name or (not counted and reply.status != NOT_HERE):
        cut_off(s.courier[0], taker)
        return True
    asked = 0 + expected.likely
    next_expected(taker)
    part = s.parts[place]
    if part.number != name:
        return True
    part.number = 0
    number = 0 + part.lookup
    lookup = s.lookups[number]
    held = 0
    certain = 0
    if counted:
        held += reply.size
        certain += reply.digest
    if lookup.round != 0:
        if held != 0:
            lookup.gap += 1
        if held != 0 or certain == 0:
            lookup.certain = 0
    elif held < asked:
        gap = 0 + u16_at(part.positions)[held]
        if gap < lookup.gap:
            lookup.gap = gap
            lookup.certain = certain
    lookup.left -= 1
    if lookup.left == 0:
        _settle_lookup(s, number, now_ns)
    return True


@native
def _settle_lookup(s: Lookups, number: U64, now_ns: U64) -> None:
    """All who were asked have replied: ask the next home of the key at the gap, or answer."""
    lookup = s.lookups[number]
    courier = s.courier[0]
    if lookup.gap < lookup.count and lookup.certain != 0:
        lookup.round += 1
        key = u64_at(lookup.keys + lookup.gap * KEY_BYTES)
        at = lookup.round * BUCKETS + bucket_of_key(0 + key[1])
        if lookup.round == MOST_HOMES:
            lookup.certain = 0
        elif u16_at(s.homes)[at] != NO_HOME:
            node = 0 + u16_at(s.homes)[at]
            u16_at(s.nodes)[lookup.gap] = node
            lookup.gap += 1
            asked = _ask_part(s, number, node, lookup.gap - 1, now_ns)
            lookup.gap -= 1
            if asked:
                return
            lookup.certain = 0
    settled = lookup.gap == lookup.count
    if not settled and lookup.certain != 0 and s.knows_all != 0:
        key = u64_at(lookup.keys + lookup.gap * KEY_BYTES)
        mixed = mixed_of(0 + lookup.namespace, 0 + key[0], 0 + key[1])
        settled = not may_be_counted(0 + courier.below, 0 + courier.below_bits, mixed)
    if lookup.gap == 0 and not settled:
        _hand_lookup_over(s, number)
        return
    s.answered += 1
    if lookup.client != NOBODY:
        answer = courier.answers[begin_answer(courier, lookup.client, lookup.number)]
        answer.status = COUNTED
        answer.tier = 0 if settled else 1
        answer.size = lookup.gap
    _end_lookup(s, number)


@native
def _hand_lookup_over(s: Lookups, number: U64) -> None:
    """Let whoever asked ask the agent."""
    lookup = s.lookups[number]
    s.handed_over += 1
    if lookup.client != NOBODY:
        begin_answer(s.courier[0], lookup.client, lookup.number)
    for i in range(NODES):
        if s.parts[i].lookup == number:
            s.parts[i].number = 0
    _end_lookup(s, number)


@native
def _end_lookup(s: Lookups, number: U64) -> None:
    s.lookups[number].open = 0
    s.in_flight -= 1


@native
def expire_lookups(s: Lookups, now_ns: U64) -> U64:
    """Hand over what has been waited for long enough, or has lost a conveyor; when the next will
    have, 0 = there is none."""
    next_ns = 0
    if s.in_flight == 0:
        return 0
    for i in range(LOOKUPS):
        lookup = s.lookups[i]
        if lookup.open != 0:
            if _has_lost_part(s, i, now_ns) or lookup.until_ns <= now_ns:
                _hand_lookup_over(s, i)
            elif next_ns == 0 or lookup.until_ns < next_ns:
                next_ns = 0 + lookup.until_ns
    return next_ns


@native
def _has_lost_part(s: Lookups, number: U64, now_ns: U64) -> bool:
    """Whether a conveyor has ended that was to bring a reply: each has nothing in front of it. Who
    has been silent for too long is cut off."""
    for i in range(NODES):
        part = s.parts[i]
        if part.number != 0 and part.lookup == number:
            taker = s.courier[0].takers[i]
            if taker.count != 0 and taker.until_ns <= now_ns:
                cut_off(s.courier[0], taker)
            if taker.count == 0 or taker.expected[taker.first].number != part.number:
                return True
    return False


@native
def leave_lookups(s: Lookups, client: U64) -> None:
    """A client is gone."""
    for i in range(LOOKUPS):
        if s.lookups[i].open != 0 and s.lookups[i].client == client:
            s.lookups[i].client = 0 + NOBODY


# --- Python's side ----------------------------------------------------------------------------


class Compiled(NamedTuple):
    """Entry points for Python; structures are given by their addresses, times are nanoseconds."""

    hear_lookup: Callable[[int, int, int, int, int], bool]
    counted_came: Callable[[int, int, int, int], bool]
    expire_lookups: Callable[[int, int], int]
    leave_lookups: Callable[[int, int], None]


@cache
def compiled() -> Compiled:
    """The compiled functions; made, or read from the cache on disk, when first asked for."""
    functions = (hear_lookup, counted_came, expire_lookups, leave_lookups)
    library = Library(*functions)
    return Compiled(*(library.call(function) for function in functions))


def blank() -> Any:
    """Lookups without memory of their own: whoever makes them gives them their tables."""
    return ctypes_of(Lookups)()


assert ctypes.sizeof(ctypes_of(Part)) == 24
