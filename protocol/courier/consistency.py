"""What must hold of a courier's tables at any time.

Owns: the look at all of them, in Python. Must not know: what happened.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Final

from kvcast.native.subset import ctypes_of
from kvcast.protocol.conveyor import NODES, REQUESTS, Expected, Taker
from kvcast.protocol.courier.library import compiled
from kvcast.protocol.courier.states import AskedState
from kvcast.protocol.courier.structures import (
    BATCHES,
    HEADS,
    LANDING_TAKEN,
    MAX_ASKED,
    NOWHERE,
    Asked,
    Batch,
    Client,
    Landing,
)
from kvcast.protocol.messages.wire import FLAG_SHARED
from kvcast.protocol.placement import Copy, Table

_NUMBERS: Final = frozenset(range(MAX_ASKED))
_HAS_LANDING: Final = (
    *(AskedState.RECEIVING, AskedState.GAPPED),
    *(AskedState.UNOFFERED, AskedState.CONVEYED),
)


def check(courier: Any, clients: Collection[int]) -> None:
    """Raise AssertionError where a `Courier`, which has these clients, contradicts itself."""
    if courier.impossible:
        _, before, after = courier.impossible.to_bytes(3, "big")
        change = f"{AskedState(before).name} cannot become {AskedState(after).name}"
        raise AssertionError(f"a question that is {change}")
    asked = _at(courier.asked, Asked, MAX_ASKED)
    free = (ctypes.c_uint32 * MAX_ASKED).from_address(courier.free)[: courier.free_count]
    in_use = sorted(_NUMBERS.difference(free))
    assert len(in_use) == MAX_ASKED - len(free) == courier.in_flight, f"in flight: {in_use}"
    for number in in_use:
        try:
            _check_asked(courier, asked, number)
        except AssertionError as error:
            state = AskedState(asked[number].state).name
            raise AssertionError(f"question {number}, {state}: {error}") from None
    mine = [asked[number] for number in in_use]
    unread = sum(each.unread for each in mine)
    assert unread == courier.unread, f"{courier.unread} READs are to be sent, not {unread}"
    taken = [each.landing for each in mine if each.landing != NOWHERE]
    assert len(set(taken)) == len(taken), f"landing places of two: {taken}"
    heads = (ctypes.c_uint32 * HEADS).from_address(courier.heads)[:]
    found = sorted(n for head in filter(None, heads) for n in _alike(asked, head))
    entered = [number for number in in_use if asked[number].state != AskedState.JOINED]
    assert found == entered, f"{found} are found by their keys, not {entered}"
    for client in clients:
        who = _at(courier.clients, Client, client + 1)[client]
        promised = [each.promised for each in mine if each.client == client]
        told = (who.asked, who.promised_bytes)
        assert told == (len(promised), sum(promised)), f"client {client}: {told}, not {promised}"
    batches = _at(courier.batches, Batch, BATCHES)
    for number, left in Counter(each.batch for each in mine if each.batch != NOWHERE).items():
        batch = batches[number]
        assert left <= batch.left * batch.open, f"batch {number} waits for {batch.left} of {left}"


def _check_asked(courier: Any, asked: Any, number: int) -> None:
    """The same of one question that is in use."""
    mine = asked[number]
    state = AskedState(mine.state)
    assert state != AskedState.FREE, "it is in use"
    assert courier.due_ns <= mine.until_ns <= mine.end_ns, "its time is overlooked"
    assert (mine.landing != NOWHERE) == (state in _HAS_LANDING), f"it lands at {mine.landing}"
    if state in _HAS_LANDING:
        landing = _at(courier.landings, Landing, courier.landing_count)[mine.landing]
        assert landing.state == LANDING_TAKEN, f"it lands where it is {landing.state}"
        copies = _at(courier.table, Table, 1)[0].copies
        serial = _at(copies, Copy, landing.copy + 1)[landing.copy].serial
        assert serial == (0 if state == AskedState.CONVEYED else mine.serial), "its copy is another"
    if state in (AskedState.JOINED, AskedState.FOLLOWING):
        other = asked[mine.leader]
        joined = state == AskedState.JOINED
        first = other.first_joiner if joined else other.first_follower
        assert number in _listed(asked, first), f"{mine.leader} does not know of it"
        blocks = {(each.namespace, each.key, each.rest_of_key) for each in (mine, other)}
        assert not joined or len(blocks) == 1, f"it waits for {blocks}"
        shared = other.flags & FLAG_SHARED  # then another home may have answered, and none follows
        assert joined or shared or mine.home == other.home, "it follows another home's"
    if state in (AskedState.ORDERED, AskedState.CONVEYED):
        coming = set[int]()
        for taker in _at(courier.takers, Taker, NODES):
            if taker.node == mine.home and not taker.broken:
                ring = _at(taker.expected, Expected, REQUESTS)
                coming.update(ring[(taker.first + n) % REQUESTS].number for n in range(taker.count))
        assert mine.serial in coming, "no conveyor is to bring it"
    if state != AskedState.JOINED:
        named = (mine.namespace, mine.key, mine.rest_of_key)
        found = compiled().asked_for(ctypes.addressof(courier), *named)
        assert found == number, f"{found} is found for its block"


def _at(address: int, kind: Any, count: int) -> Any:
    return (ctypes_of(kind) * count).from_address(address)


def _listed(asked: Any, number: int) -> Iterator[int]:
    while number != NOWHERE:
        yield number
        number = asked[number].next


def _alike(asked: Any, number: int) -> Iterator[int]:
    while number:
        yield number - 1
        number = asked[number - 1].next_alike
