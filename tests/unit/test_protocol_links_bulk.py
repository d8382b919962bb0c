"""The bulk link's two ends, put before each other and before liars, without a network.

Oracle: a service that is a dict, and outcomes, times and bytes written out here. Cannot see: TLS,
sockets, and what the agents' own cores make of a request (`test_hostagent_core`).
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import pytest
from kvcast.hostagent.core.metrics import Metrics
from kvcast.protocol.chains import bits_of, count_of, keys_of
from kvcast.protocol.links import departures
from kvcast.protocol.links.bulk import (
    EVICTED,
    UNREACHABLE,
    UNWANTED,
    BulkCall,
    BulkOptions,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.bulk_callee import BulkCallee
from kvcast.protocol.links.bulk_caller import (
    MAX_SKIPPED_BYTES,
    OVERDUE_S,
    BulkCaller,
    BulkConnection,
    Complete,
    Connect,
)
from kvcast.protocol.links.bulk_request import RequestEvent, RequestState
from kvcast.protocol.links.departures import LATELY_S, Departures
from kvcast.protocol.links.stream import LinkStream
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    MAX_BULK_BLOCKS,
    MAX_BULK_BYTES,
    MAX_FOLLOWING_BYTES,
    BlockHeader,
    BulkBlocks,
    BulkDone,
    BulkDrop,
    BulkExists,
    BulkGet,
    BulkGo,
    BulkHeld,
    BulkHello,
    BulkPut,
    BulkTaken,
    CalleeMessage,
    CallerMessage,
    PutHeader,
    WantedBlock,
)
from kvcast.protocol.messages.control import NodeInfo
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import BlockId, digest_of

OPTIONS = BulkOptions(
    connections_per_peer=2, queue_per_peer=3, connect_timeout_s=2.0, idle_s=60.0,
    transfer_timeout_s=30.0,
)  # fmt: skip
NODE = NodeInfo(2, "node-2", "10.0.0.2", "02:00:00:00:00:02", 2, 20000, "host-2", 7000)
DATA = bytes(range(256)) * 40
DIGEST = digest_of(DATA)


FOREIGN = 9
"""A namespace that the caller may not use."""


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Copy(NamedTuple):
    """A block's copy, on either side."""

    block: BlockId
    data: bytearray
    digest: int = DIGEST
    parent: bytes = b""
    depth: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.data)


@dataclass
class Service:
    """Holds what it is given. `out`: what it has given out and did not get back."""

    held: dict[bytes, Copy] = field(default_factory=dict)
    out: list[bytes] = field(default_factory=list)
    aborted: list[bytes] = field(default_factory=list)
    below: dict[bytes, Copy] = field(default_factory=dict)
    """What `bring` brings, when `brought` is called: as many at once as `at_once`."""
    brought: Callable[[], None] | None = None
    met: set[bytes] = field(default_factory=set)
    """What several want,"""
    waiting: list[bytes] = field(default_factory=list)
    """and what was asked for and is still to be given."""
    at_once: int = 1

    def bring(self, now: float, get: BulkGet, then: Callable[[float], None]) -> bool:
        keys = [block.key for block in get.blocks if block.key in self.below][: self.at_once]

        def come() -> None:
            self.held.update({key: self.below.pop(key) for key in keys})
            then(now)

        self.brought = come if keys else None
        return bool(keys)

    def is_below(self, _namespace: int, block: WantedBlock) -> bool:
        return block.key in self.below

    def asks(self, _now: float, _caller: str, get: BulkGet) -> None:
        self.waiting += [block.key for block in get.blocks]

    def is_met(self, _now: float, _namespace: int, block: WantedBlock) -> bool:
        return block.key in self.met

    def told(self, _now: float, _caller: str, _namespace: int, block: WantedBlock) -> None:
        self.waiting.remove(block.key)

    def leaves(self, _now: float, _caller: str, _namespace: int, block: WantedBlock) -> None:
        self.waiting.remove(block.key)

    def convey(self, _caller: str, _convey: bulk.BulkConvey) -> str:
        return bulk.DONE

    def view(self, copy: Copy) -> memoryview:
        return memoryview(copy.data)

    def refuse_put(self, _caller: str, put: BulkPut) -> str | None:
        return bulk.FORBIDDEN if put.namespace == FOREIGN else None

    def begin_put(self, put: BulkPut, block: PutHeader) -> Copy | str:
        if block.key in self.held:
            return bulk.HELD
        self.out.append(block.key)
        return Copy(BlockId(put.namespace, block.key), bytearray(block.size_bytes), block.digest)

    def end_put(self, put: BulkPut, block: PutHeader, copy: Copy, digest: int) -> str:
        self.out.remove(block.key)
        if digest != block.digest:
            return bulk.WRONG_DIGEST
        self.held[block.key] = copy
        return bulk.DONE

    def abort_put(self, copy: Copy) -> None:
        self.out.remove(copy.block.key)
        self.aborted.append(copy.block.key)

    def refuse_get(self, _caller: str, get: BulkGet) -> str | None:
        return bulk.FORBIDDEN if get.namespace == FOREIGN else None

    def get(self, _caller: str, _namespace: int, block: WantedBlock) -> Copy | str:
        if block.key not in self.held:
            return bulk.NOT_FOUND
        self.out.append(block.key)
        return self.held[block.key]

    def end_get(self, copy: Copy) -> None:
        self.out.remove(copy.block.key)

    def drop(self, _caller: str, drop: BulkDrop) -> BulkDone:
        return BulkDone(bulk.DONE, sum(self.held.pop(k, None) is not None for k in drop.keys))

    def exists(self, _caller: str, exists: BulkExists) -> BulkHeld:
        return _held(self.held, exists.keys)


def _held(held: Iterable[bytes], chain: bytes) -> BulkHeld:
    bits = bits_of(k in held for k in keys_of(chain))
    return BulkHeld(bits.to_bytes(-(-count_of(chain) // 8), "little"))


class Caller:
    """The caller under test, its calls' outcomes, and the connections that it wants."""

    def __init__(
        self,
        options: BulkOptions = OPTIONS,
        weight_of: Callable[[int], float] = lambda _namespace: 1.0,
    ) -> None:
        self.metrics = Metrics()
        self.core = BulkCaller(
            "node-1", options, self.metrics, lambda copy: memoryview(copy.data), weight_of
        )
        self.core.use_nodes(0.0, {2: NODE})
        self.outcomes: list[tuple[str, str]] = []
        self.wanted: list[BulkConnection] = []
        self.room = bytearray(len(DATA))
        self.rooms: dict[str, bytearray] = {}

    def act(self) -> None:
        for instruction in self.core.instructions():
            match instruction:
                case Complete(call=call, outcome=outcome):
                    call.ended(0.0, outcome)
                case Connect(connection=connection):
                    self.wanted.append(connection)
        self.core.check()

    def ask(self, now: float, *calls: BulkCall) -> None:
        self.core.ask(now, *calls)
        self.act()

    def connected(self, now: float = 0.0) -> BulkConnection:
        """The connection that was asked for first, made."""
        connection = self.wanted.pop(0)
        connection.connected(now)
        return connection

    def _done(self, name: str) -> Callable[[float, str], None]:
        return lambda _now, outcome: self.outcomes.append((name, outcome))

    def put(
        self, name: str, *, number: int = 1, held: bool = True, at_once: bool = False,
        namespace: int = 1, data: bytes = DATA,
    ) -> PutCall:  # fmt: skip
        copy = Copy(BlockId(namespace, key(number)), bytearray(data), digest_of(data))
        return PutCall(2, copy, 3, 9, 100.0, lambda: held, self._done(name), at_once)

    def get(self, name: str, *, number: int = 1, deadline: float = 100.0) -> GetCall:
        def begin(size_bytes: int, _digest: int) -> memoryview | None:
            return memoryview(self.room) if size_bytes == len(self.room) else None

        return GetCall(2, BlockId(1, key(number)), 0, deadline, begin, self._done(name))

    def get_any(
        self, name: str, number: int, *, start: bytes = b"", most: int = 1 << 30,
        namespace: int = 1,
    ) -> GetCall:  # fmt: skip
        """A get of a block of whatever size up to `most`, to `rooms[name]`, which begins so."""

        def begin(size_bytes: int, _digest: int) -> memoryview | None:
            if size_bytes > most:
                return None
            self.rooms[name] = bytearray(start).ljust(size_bytes, b"?")
            return memoryview(self.rooms[name])

        block = BlockId(namespace, key(number))
        return GetCall(2, block, 0, 100.0, begin, self._done(name), len(start))

    def exists(self, name: str, keys: list[bytes]) -> ExistsCall:
        def answer(bits: int) -> None:
            self.outcomes.append((name, f"{bits:b}"))

        return ExistsCall(2, 1, b"".join(keys), 100.0, answer, self._done(name))

    def drop(self, name: str, deadline: float = 100.0) -> DropCall:
        return DropCall(2, 1, [key(1)], deadline, self._done(name))


def serve(service: Service, certified: str | None = None, now: float = 0.0) -> BulkCallee[Copy]:
    return BulkCallee(now, service, OPTIONS, Metrics(), certified)


def deliver(link: LinkStream[CallerMessage] | LinkStream[CalleeMessage], data: bytes, now: float,
            direct: bool) -> None:  # fmt: skip
    """Bytes come; straight to where they belong, if `direct`."""
    while data:
        room = link.destination() if direct else None
        if room is None:
            link.received(now, data)
            return
        size = min(len(room), len(data))
        room[:size] = data[:size]
        link.filled(now, size)
        data = data[size:]


def converse(
    caller: Caller, connection: BulkConnection, callee: BulkCallee[Copy], *, piece: int = 1 << 20,
    direct: bool = False, now: float = 0.0, at_most: int = 1000,
) -> None:  # fmt: skip
    """Carry bytes both ways until nobody has anything to say."""
    moved = True
    while moved:
        moved = False
        for source, sink in ((connection, callee), (callee, connection)):
            while not sink.closed and (data := source.bytes_to_send(now, at_most)):
                moved = True
                for at in range(0, len(data), piece):
                    deliver(sink, data[at : at + piece], now, direct)
                source.check()
                sink.check()
        caller.act()


def said(*messages: CallerMessage | CalleeMessage) -> bytes:
    codec = MessageCodec[CallerMessage](CallerMessage)
    return b"".join(codec.encode(message) for message in messages)


def heard(link: LinkStream[CallerMessage], now: float = 0.0) -> list[CalleeMessage]:
    """What a callee has to say, as messages; none of its blocks' bytes."""
    codec = MessageCodec[CalleeMessage](CalleeMessage)
    messages: list[CalleeMessage] = []
    while not link.sending_block and (data := link.bytes_to_send(now, 1000)):
        messages += codec.feed(data)
    return messages


HELLO = BulkHello(BULK_PROTOCOL_VERSION, "node-1")
PUT = BulkPut(1, 3, 9, [PutHeader(key(1), len(DATA), DIGEST)])
GET = BulkGet(1, [WantedBlock(key(1))])
GO = BulkGo([bulk.WANTED])
BLOCK = BulkBlocks([BlockHeader(bulk.DONE, len(DATA), DIGEST)])


def test_a_connection_that_became_a_conveyor_is_given_away_once() -> None:
    service = Service()
    callee = serve(service)
    callee.received(0.0, said(HELLO, bulk.BulkConvey(bulk.CONVEYOR_VERSION)))
    assert not callee.conveys, "its answer is yet to be sent"
    assert heard(callee) == [BulkDone(bulk.DONE)]
    assert callee.conveys == "node-1"
    callee.end(0.0)
    assert not callee.conveys


# --- both ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_every_call_gets_its_answer_however_the_bytes_are_cut(piece: int, direct: bool) -> None:
    caller, service = Caller(), Service()
    callee = serve(service)
    keys = [key(1), key(2)]
    caller.ask(0.0, caller.put("put"))
    connection = caller.connected()
    converse(caller, connection, callee, piece=piece, direct=direct)
    assert bytes(service.held[key(1)].data) == DATA
    for call in (
        caller.put("again"),
        caller.exists("which", keys),
        caller.get("get"),
        caller.get("absent", number=2),
        caller.drop("drop"),
        caller.exists("then", keys),
    ):
        caller.ask(0.0, call)
        converse(caller, connection, callee, piece=piece, direct=direct)
    assert caller.outcomes == [
        ("put", "done"),
        ("again", "held"),
        ("which", "1"),
        ("which", "done"),
        ("get", "done"),
        ("absent", "not_found"),
        ("drop", "done"),
        ("then", "0"),
        ("then", "done"),
    ]
    assert bytes(caller.room) == DATA
    assert caller.wanted == [], "one connection was enough"
    assert service.out == []
    assert caller.metrics.payload_bytes_sent_bulk_put_total == len(DATA)


# --- the caller -------------------------------------------------------------------------------


def test_calls_beyond_the_connections_wait_and_beyond_the_queue_fail() -> None:
    caller = Caller()
    for n in range(6):
        caller.ask(0.0, caller.exists(f"call {n}", [key(1)]))
    assert len(caller.wanted) == 2
    assert caller.outcomes == [("call 5", UNREACHABLE)]
    connection = caller.connected()
    callee = serve(Service())
    converse(caller, connection, callee)
    done = [name for name, outcome in caller.outcomes if outcome == "done"]
    assert done == ["call 0", "call 2", "call 3", "call 4"]
    assert len(caller.wanted) == 1  # the other is still being made
    assert caller.metrics.bulk_failures_total == 1


def test_a_put_that_was_evicted_lets_the_next_call_go_on() -> None:
    caller = Caller(BulkOptions(connections_per_peer=1))
    caller.ask(0.0, caller.exists("first", []))
    caller.ask(0.0, caller.put("gone", held=False))
    caller.ask(0.0, caller.exists("last", []))
    converse(caller, caller.connected(), serve(Service()))
    assert [each for each in caller.outcomes if each[1] != "0"] == [
        ("first", "done"),
        ("gone", EVICTED),
        ("last", "done"),
    ]


def test_a_kept_connection_that_died_is_replaced_in_the_end_by_a_fresh_one() -> None:
    caller = Caller()
    for name in ("a", "b"):
        caller.ask(0.0, caller.drop(name))
    kept = [caller.connected() for _ in range(2)]
    for connection in kept:
        converse(caller, connection, serve(Service()))
    caller.ask(1.0, caller.drop("c"))
    assert caller.wanted == []
    for connection in reversed(kept):  # each is tried, and says that it was closed
        assert connection.calls
        connection.lost(1.0)
        caller.act()
    assert caller.outcomes == [("a", "done"), ("b", "done")]
    fresh = caller.connected(1.0)
    fresh.lost(1.0)
    caller.act()
    assert caller.outcomes[2:] == [("c", UNREACHABLE)]
    assert caller.wanted == []


def test_a_call_is_not_made_twice_once_it_was_answered() -> None:
    caller, service = Caller(), Service()
    caller.ask(0.0, caller.drop("first"))
    connection = caller.connected()
    converse(caller, connection, serve(service))
    caller.ask(0.0, caller.put("put"))
    connection.bytes_to_send(0.0, 1000)
    connection.received(0.0, said(GO))
    connection.lost(0.0)
    caller.act()
    assert caller.outcomes[-1] == ("put", UNREACHABLE)
    assert caller.wanted == []


def test_a_connection_without_a_call_is_closed_before_the_callee_does() -> None:
    caller = Caller()
    caller.ask(0.0, caller.drop("call"))
    connection = caller.connected()
    converse(caller, connection, serve(Service()), now=5.0)
    assert connection.get_timer() == 5.0 + OPTIONS.idle_s / 2
    connection.handle_timer(5.0 + OPTIONS.idle_s / 2)
    caller.act()
    assert connection.closed
    caller.ask(50.0, caller.drop("later"))
    assert len(caller.wanted) == 1


def test_a_connect_that_hangs_ends_in_time() -> None:
    caller = Caller()
    caller.ask(10.0, caller.drop("patient"))
    caller.ask(10.0, caller.drop("hasty", deadline=10.5))
    patient, hasty = caller.wanted
    assert (patient.get_timer(), hasty.get_timer()) == (12.0, 10.5)
    for connection in (hasty, patient):
        connection.handle_timer(12.0)
        caller.act()
        assert connection.closed
    assert caller.outcomes == [("hasty", UNREACHABLE), ("patient", UNREACHABLE)]
    patient.connected(12.5)  # too late: nothing is said
    assert patient.bytes_to_send(12.5, 1000) == b""


def test_a_callee_that_does_not_answer_is_left_at_the_deadline() -> None:
    caller = Caller()
    caller.ask(0.0, caller.get("get", deadline=7.0))
    connection = caller.connected(1.0)
    connection.bytes_to_send(1.0, 1000)
    connection.received(1.0, said(BLOCK) + DATA[:100])
    silent_at = 1.0 + OPTIONS.silence_s
    assert connection.get_timer() == silent_at
    connection.received(silent_at, DATA[100:200])
    connection.received(6.0, DATA[200:300])
    assert connection.get_timer() == 7.0, "a trickle does not put the deadline off"
    connection.handle_timer(6.9)
    assert not connection.closed
    connection.handle_timer(7.0)
    caller.act()
    assert connection.closed
    assert connection.destination() is None, "nobody may write to a block that was given up"
    assert caller.outcomes == [("get", UNREACHABLE)]


def test_a_call_whose_turn_comes_too_late_is_not_made() -> None:
    caller = Caller(BulkOptions(connections_per_peer=1))
    caller.ask(0.0, caller.drop("first"))
    caller.ask(0.0, caller.drop("second", deadline=1.0))
    converse(caller, caller.connected(), serve(Service()), now=1.0)
    assert caller.outcomes == [("first", "done"), ("second", UNREACHABLE)]


@pytest.mark.parametrize(
    "answer",
    [
        said(BulkHeld(b"")),
        said(BLOCK),
        said(BulkGo([])),
        said(BulkGo([bulk.WANTED, bulk.WANTED])),
        said(BulkTaken([bulk.DONE])),
        said(GO, BulkTaken([bulk.DONE, bulk.DONE])),
        said(GO, BulkDone(bulk.DONE)),
        said(GO, GO),
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\0\0\0\1\x80",
    ],
)
def test_an_answer_that_cannot_be_ends_the_connection_and_the_call(answer: bytes) -> None:
    caller = Caller()
    caller.ask(0.0, caller.put("put"))
    connection = caller.connected()
    connection.received(0.0, answer)
    while connection.bytes_to_send(0.0, 1 << 20):  # what comes during a block is looked at after it
        pass
    caller.act()
    assert connection.closed
    assert connection.problem
    assert caller.outcomes == [("put", UNREACHABLE)]
    assert caller.metrics.bulk_protocol_errors_total == 1


def test_what_cannot_happen_to_a_request_is_a_fault_of_ours_and_found_at_once() -> None:
    caller = Caller()
    caller.ask(0.0, caller.put("put", at_once=True))
    connection = caller.connected()
    assert connection.state is RequestState.FOLLOWED
    with pytest.raises(AssertionError, match=r"GO in RequestState\.FOLLOWED"):
        connection._happen(RequestEvent.GO)
    converse(caller, connection, serve(Service()))
    assert connection.state is RequestState.IDLE
    assert caller.outcomes == [("put", "done")]


def test_an_answer_to_no_question_is_not_kept_for_the_next_one() -> None:
    """A callee that sends a second answer would have it taken for the next call's."""
    caller = Caller()
    caller.ask(0.0, caller.drop("first"))
    connection = caller.connected()
    converse(caller, connection, serve(Service()))
    connection.received(0.0, said(BulkDone(bulk.DONE)))
    caller.act()
    assert connection.closed
    caller.ask(0.0, caller.put("second"))
    assert len(caller.wanted) == 1
    assert caller.outcomes == [("first", "done")]


@pytest.mark.parametrize(("piece", "direct"), [(1 << 20, False), (7, True)])
def test_a_block_for_which_there_is_no_room_is_read_and_thrown_away(
    piece: int, direct: bool
) -> None:
    caller, service = Caller(), Service()
    for number in range(1, 4):
        data = DATA * 12 if number == 2 else DATA
        service.held[key(number)] = Copy(BlockId(1, key(number)), bytearray(data), digest_of(data))
    caller.ask(0.0, *(caller.get_any(str(n), n, most=len(DATA)) for n in (1, 2, 3)))
    connection = caller.connected()
    converse(caller, connection, serve(service), piece=piece, direct=direct)
    assert caller.outcomes == [("1", "done"), ("2", "no_room"), ("3", "done")]
    assert caller.rooms == {"1": bytearray(DATA), "3": bytearray(DATA)}
    assert not connection.closed
    assert caller.metrics.bulk_failures_total == 0


def test_much_for_which_there_is_no_room_costs_the_connection() -> None:
    caller = Caller()
    caller.ask(0.0, caller.get("get"))
    connection = caller.connected()
    connection.bytes_to_send(0.0, 1000)
    connection.received(0.0, said(BulkBlocks([BlockHeader(bulk.DONE, (1 << 20) + 1, 1)])))
    caller.act()
    assert connection.closed
    assert caller.outcomes == [("get", "no_room")]
    assert caller.metrics.bulk_failures_total == 0


def test_a_get_that_is_not_wanted_any_more_is_not_made_when_its_turn_comes() -> None:
    caller = Caller(replace(OPTIONS, connections_per_peer=1))
    wanted = {"a": True, "b": True, "c": True}
    calls = [caller.get_any(name, n) for n, name in enumerate(wanted, 1)]
    for number, (name, call) in enumerate(zip(wanted, calls, strict=True)):
        call.wanted = functools.partial(wanted.__getitem__, name)
        call.deadline += 10.0 * number  # not alike: none goes together with another
    caller.ask(0.0, *calls)
    connection = caller.connected()
    wanted["b"] = False
    service = Service()
    service.held.update(blocks_of(range(1, 4)))
    converse(caller, connection, serve(service))
    assert sorted(caller.outcomes) == [("a", "done"), ("b", UNWANTED), ("c", "done")]
    assert caller.metrics.bulk_failures_total == 0


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("other_wanted", [False, True])
def test_what_is_not_wanted_any_more_costs_the_connection_where_much_of_it_is_coming(
    long: bool, other_wanted: bool
) -> None:
    caller = Caller()
    wanted = [True, True]
    calls = [caller.get_any(str(number), number) for number in (0, 1)]
    for number, call in enumerate(calls):
        call.wanted = functools.partial(wanted.__getitem__, number)
    caller.ask(0.0, *calls)
    connection = caller.connected()
    connection.bytes_to_send(0.0, 1000)
    size_bytes = MAX_SKIPPED_BYTES if long else 1000
    headers = [BlockHeader(bulk.DONE, size, 1) for size in (size_bytes, 500)]
    connection.received(0.0, said(BulkBlocks(headers)) + bytes(10))
    caller.core.end_unwanted(0.0)
    assert not connection.closed
    wanted[:] = False, other_wanted
    caller.core.end_unwanted(0.0)
    caller.act()
    assert connection.closed == (long and not other_wanted)
    assert caller.outcomes == ([("0", UNWANTED), ("1", UNWANTED)] if connection.closed else [])
    assert caller.metrics.bulk_failures_total == 0


def test_nobody_is_told_anything_before_it_is_known_who_is_there() -> None:
    caller = Caller()
    caller.ask(0.0, caller.put("put"))
    connection = caller.wanted.pop()
    assert connection.bytes_to_send(0.0, 1000) == b""
    connection.wrong_peer(0.0, "node-3 answers where node-2 should")
    caller.act()
    assert connection.bytes_to_send(0.0, 1000) == b""
    assert caller.outcomes == [("put", UNREACHABLE)]
    assert caller.metrics.bulk_wrong_peers_total == 1


def test_a_namespaces_call_goes_by_the_connection_that_its_calls_had_last() -> None:
    caller = BulkCaller("node-1", OPTIONS, Metrics(), lambda copy: memoryview(copy.data))
    caller.use_nodes(0.0, {2: NODE})
    drops = {}
    for namespace in (1, 2):
        caller.ask(0.0, DropCall(2, namespace, key(1), 100.0, lambda *_: None))
        (made,) = (each.connection for each in caller.instructions() if isinstance(each, Connect))
        made.connected(0.0)
        made.bytes_to_send(0.0, 1 << 16)
        drops[namespace] = made
    for made in drops.values():
        made.received(0.0, said(BulkDone(bulk.DONE)))
    for namespace in (1, 2, 3):  # the third has had none, and takes what was used last
        caller.ask(0.0, DropCall(2, namespace, key(1), 100.0, lambda *_: None))
        taken = [one for one in drops.values() if one.calls]
        assert taken == [drops[min(namespace, 2)]]
        taken[0].bytes_to_send(0.0, 1 << 16)
        taken[0].received(0.0, said(BulkDone(bulk.DONE)))
    caller.check()


def test_what_is_idle_towards_a_node_that_has_left_is_closed() -> None:
    caller = Caller()
    caller.ask(0.0, caller.drop("call"))
    connection = caller.connected()
    converse(caller, connection, serve(Service()))
    caller.core.use_nodes(1.0, {2: NODE})
    assert not connection.closed
    caller.core.use_nodes(1.0, {})
    caller.act()
    assert connection.closed
    caller.ask(1.0, caller.drop("to nobody"))
    assert caller.outcomes[-1] == ("to nobody", UNREACHABLE)


def test_the_end_ends_every_call_once() -> None:
    caller = Caller()
    for n in range(5):
        caller.ask(0.0, caller.drop(str(n)))
    connection = caller.connected()
    caller.core.close(0.0)
    caller.act()
    assert sorted(caller.outcomes) == [(str(n), UNREACHABLE) for n in range(5)]
    assert connection.closed
    caller.ask(0.0, caller.drop("after"))
    assert caller.outcomes[-1] == ("after", UNREACHABLE)


# --- many blocks in one request ---------------------------------------------------------------


def blocks_of(numbers: Iterable[int], size: int = 700) -> dict[bytes, Copy]:
    """Different blocks of nearly the same size."""
    held = {}
    for number in numbers:
        data = random.Random(number).randbytes(size + number)
        held[key(number)] = Copy(BlockId(1, key(number)), bytearray(data), digest_of(data))
    return held


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_gets_that_wait_together_are_one_request_answered_in_order(
    piece: int, direct: bool
) -> None:
    caller, service = Caller(BulkOptions()), Service(blocks_of(range(1, 101)))
    del service.held[key(50)]
    caller.ask(0.0, *(caller.get_any(str(n), n) for n in range(1, 101)))
    assert len(caller.wanted) == 1
    connection = caller.connected()
    callee = serve(service)
    converse(caller, connection, callee, piece=piece, direct=direct)
    outcomes = dict(caller.outcomes)
    assert outcomes.pop("50") == "not_found"
    assert set(outcomes.values()) == {"done"}
    assert all(caller.rooms[name] == service.held[key(int(name))].data for name in outcomes)
    assert service.out == []
    assert callee._counters.bulk_requests_served_total == 1


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_puts_that_wait_together_are_one_request(piece: int, direct: bool) -> None:
    caller, service = Caller(), Service(blocks_of([2]))
    calls = [caller.put(str(n), number=n) for n in (1, 2, 3)]
    caller.ask(0.0, *calls, caller.put("evicted", number=4, held=False))
    connection = caller.connected()
    callee = serve(service)
    converse(caller, connection, callee, piece=piece, direct=direct)
    assert dict(caller.outcomes) == {
        "evicted": EVICTED, "1": "done", "2": "held", "3": "done"
    }  # fmt: skip
    assert service.held[key(1)].data == service.held[key(3)].data == DATA
    assert callee._counters.bulk_requests_served_total == 1
    assert caller.metrics.payload_bytes_sent_bulk_put_total == 2 * len(DATA)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_bytes_of_a_put_follow_at_once_until_some_are_not_wanted(piece: int, direct: bool) -> None:
    caller, service = Caller(BulkOptions(connections_per_peer=1)), Service(blocks_of([2]))
    before = bytes(service.held[key(2)].data)
    callee = serve(service)
    connection = None
    sent = []
    for numbers in ([1, 3], [4, 2, 5], [2], [6], [7, 8]):
        already = caller.metrics.payload_bytes_sent_bulk_put_total
        caller.ask(0.0, *(caller.put(str(n), number=n, at_once=True) for n in numbers))
        connection = connection or caller.connected()
        converse(caller, connection, callee, piece=piece, direct=direct)
        sent.append(caller.metrics.payload_bytes_sent_bulk_put_total - already)
    assert caller.outcomes == [
        ("1", "done"), ("3", "done"),
        ("4", "done"), ("2", "held"), ("5", "done"),
        ("2", "held"), ("6", "done"), ("7", "done"), ("8", "done"),
    ]  # fmt: skip
    # All three of the second put; after it the callee was asked first, and wanted nothing, then 6.
    assert sent == [2 * len(DATA), 3 * len(DATA), 0, len(DATA), 2 * len(DATA)]
    assert all(service.held[key(n)].data == DATA for n in (1, 3, 4, 5, 6, 7, 8))
    assert service.held[key(2)].data == before
    assert service.out == service.aborted == []


def test_a_put_that_is_refused_is_read_to_its_end_and_the_connection_kept() -> None:
    caller, service = Caller(), Service()
    refused = [caller.put(str(n), number=n, at_once=True, namespace=FOREIGN) for n in (1, 2)]
    caller.ask(0.0, *refused)
    connection, callee = caller.connected(), serve(service)
    converse(caller, connection, callee)
    assert caller.outcomes == [("1", bulk.FORBIDDEN), ("2", bulk.FORBIDDEN)]
    caller.ask(0.0, caller.put("3", number=3, at_once=True))
    converse(caller, connection, callee)
    assert caller.outcomes[2:] == [("3", "done")]
    assert list(service.held) == [key(3)]
    assert not callee.closed


def test_a_long_put_is_asked_for_first() -> None:
    long = bytes(MAX_FOLLOWING_BYTES + 1)
    caller, service = Caller(), Service()
    caller.ask(0.0, caller.put("long", data=long, at_once=True))
    connection = caller.connected()
    hello_and_put = connection.bytes_to_send(0.0, 1 << 20)
    assert not connection.sending_block
    callee = serve(service)
    callee.received(0.0, hello_and_put)
    assert heard(callee) == [GO]


def test_a_long_put_that_follows_unasked_breaks_the_rules() -> None:
    liar = serve(Service())
    header = PutHeader(key(1), MAX_FOLLOWING_BYTES + 1, 1)
    liar.received(0.0, said(HELLO, BulkPut(1, 3, 9, [header], follows=True)))
    assert liar.closed
    assert "too long" in liar.problem


def test_what_followed_and_was_not_whole_is_given_back() -> None:
    service = Service(blocks_of([2]))
    callee = serve(service)
    headers = [PutHeader(key(n), len(DATA), DIGEST) for n in (2, 1)]
    callee.received(0.0, said(HELLO, BulkPut(1, 3, 9, headers, follows=True)) + DATA + DATA[:99])
    assert service.out == [key(1)]
    callee.lost(1.0)
    assert (service.out, service.aborted) == ([], [key(1)])


def test_who_waits_for_a_connection_waits_no_longer_than_its_deadline() -> None:
    """A node that says nothing more holds its only connection until the first call's deadline."""
    caller = Caller(BulkOptions(connections_per_peer=1))
    caller.ask(0.0, caller.put("first"))
    caller.connected()
    assert caller.core.get_timer() is None, "nobody waits"
    second, third = caller.put("second"), caller.drop("third", 5.01)
    second.deadline = 5.0
    fourth, last = caller.get("fourth", deadline=8.0), caller.put("last")
    caller.ask(1.0, second, third, fourth, last)
    assert caller.core.get_timer() == 5.0
    caller.core.handle_timer(4.9)
    caller.act()
    assert caller.outcomes == []
    caller.core.handle_timer(5.0)
    caller.act()
    assert caller.outcomes == [("second", UNREACHABLE)]
    # Not for each of many that come up one after the other.
    when = caller.core.get_timer()
    assert when == 5.0 + OVERDUE_S
    fourth.wanted = lambda: False
    for now in (when, 8.0):
        caller.core.handle_timer(now)
        caller.act()
    ends = [("second", UNREACHABLE), ("third", UNREACHABLE), ("fourth", UNWANTED)]
    assert caller.outcomes == ends
    assert caller.core.get_timer() == 100.0
    caller.core.close(9.0)
    caller.act()
    assert sorted(caller.outcomes[3:]) == [("first", UNREACHABLE), ("last", UNREACHABLE)]
    assert caller.core.get_timer() is None


def test_who_is_to_ask_again_waits_no_longer_than_its_deadline() -> None:
    """What did not fit into an answer waits for the end of that, which may not come."""
    caller = Caller(BulkOptions(connections_per_peer=1))
    later = caller.get_any("later", 2)
    caller.ask(0.0, caller.get_any("1", 1), later)
    connection = caller.connected()
    assert connection.bytes_to_send(0.0, 1 << 20), "the request"
    headers = [BlockHeader(bulk.DONE, len(DATA), DIGEST), BlockHeader(bulk.LATER)]
    connection.received(1.0, said(BulkBlocks(headers)))
    caller.act()
    assert caller.core.get_timer() == later.deadline
    caller.core.handle_timer(later.deadline)
    caller.act()
    assert caller.outcomes == [("later", UNREACHABLE)]


def test_calls_that_are_not_alike_are_requests_of_their_own() -> None:
    caller = Caller(BulkOptions(connections_per_peer=1, assured_per_peer=0))
    late = caller.get_any("late", 4)
    late.deadline = 200.0
    other = caller.get_any("2", 2, namespace=2)
    caller.ask(0.0, caller.get_any("1", 1), other, caller.put("3"), late)
    callee = serve(Service())
    converse(caller, caller.connected(), callee)
    assert callee._counters.bulk_requests_served_total == 4
    assert caller.outcomes == [
        ("1", "not_found"), ("2", "not_found"), ("3", "done"), ("late", "not_found")
    ]  # fmt: skip


def test_one_request_is_bounded_in_blocks_and_bytes() -> None:
    caller = Caller(BulkOptions(connections_per_peer=1))
    caller.ask(0.0, *(caller.get_any(str(n), n) for n in range(MAX_BULK_BLOCKS + 1)))
    callee = serve(Service())
    converse(caller, caller.connected(), callee)
    assert callee._counters.bulk_requests_served_total == 2
    assert len(caller.outcomes) == MAX_BULK_BLOCKS + 1
    # The second of two large ones comes with the next answer.
    caller = Caller(BulkOptions(connections_per_peer=1))
    service = Service(blocks_of((1, 2, 3), MAX_BULK_BYTES // 2))
    caller.ask(0.0, *(caller.get_any(str(n), n) for n in (1, 2, 3)))
    connection, callee = caller.connected(), serve(service)
    converse(caller, connection, callee, piece=1 << 30, direct=True, at_most=1 << 30)
    assert callee._counters.bulk_requests_served_total == 3
    assert caller.outcomes == [("1", "done"), ("2", "done"), ("3", "done")]
    assert all(caller.rooms[str(n)] == service.held[key(n)].data for n in (1, 2, 3))
    # So much is not set aside for one put.
    size = MAX_BULK_BYTES // 2 + 1
    callee = serve(Service())
    put = BulkPut(1, 3, 9, [PutHeader(key(n), size, 5) for n in (1, 2)])
    callee.received(0.0, said(HELLO, put))
    assert heard(callee) == [BulkGo([bulk.WANTED, bulk.NO_ROOM])]


def test_the_rest_of_a_block_is_checked_with_its_beginning() -> None:
    for start, outcome in ((DATA[:4096], "done"), (bytes(4096), "wrong_digest")):
        caller, service = Caller(), Service()
        service.held[key(1)] = Copy(BlockId(1, key(1)), bytearray(DATA))
        caller.ask(0.0, caller.get_any("rest", 1, start=start))
        callee = serve(service)
        converse(caller, caller.connected(), callee)
        assert caller.outcomes == [("rest", outcome)]
        assert caller.rooms["rest"] == start + DATA[4096:]
        assert callee._counters.payload_bytes_sent_bulk_get_total == len(DATA) - 4096


def test_a_rest_that_a_block_does_not_have_is_not_there() -> None:
    service = Service(blocks_of([1], 99))
    callee = serve(service)
    callee.received(0.0, said(HELLO, BulkGet(1, [WantedBlock(key(1), 0, 100)])))
    assert heard(callee) == [BulkBlocks([BlockHeader(bulk.NOT_FOUND)])]
    assert service.out == []


def test_a_request_in_a_foreign_namespace_is_refused_as_a_whole() -> None:
    caller, service = Caller(), Service(blocks_of([1, 2]))
    caller.ask(0.0, *(caller.get_any(str(n), n, namespace=FOREIGN) for n in (1, 2)))
    converse(caller, caller.connected(), serve(service))
    assert caller.outcomes == [("1", "forbidden"), ("2", "forbidden")]
    assert service.out == []


@pytest.mark.parametrize(
    "answer",
    [
        said(BulkBlocks([BlockHeader(bulk.NOT_FOUND)])),
        said(BulkBlocks([BlockHeader(bulk.NOT_FOUND)] * 3)),
        said(BulkBlocks([BlockHeader(bulk.LATER), BlockHeader(bulk.NOT_FOUND)])),
        said(BulkBlocks([BlockHeader(bulk.DONE, 0, 1), BlockHeader(bulk.NOT_FOUND)])),
        said(BulkBlocks([BlockHeader(bulk.DONE, 4096, 1), BlockHeader(bulk.NOT_FOUND)])),
        said(BulkDone(bulk.DONE)),
        said(GO),
    ],
)
def test_an_answer_that_lies_about_blocks_ends_the_connection_and_the_gets(answer: bytes) -> None:
    caller = Caller()
    caller.ask(0.0, caller.get_any("1", 1, start=bytes(4096)), caller.get_any("2", 2))
    connection = caller.connected()
    connection.bytes_to_send(0.0, 1 << 20)
    connection.received(0.0, answer)
    caller.act()
    assert connection.closed
    assert caller.outcomes == [("1", UNREACHABLE), ("2", UNREACHABLE)]
    assert caller.metrics.bulk_protocol_errors_total == 1


@pytest.mark.parametrize("connections", [1, 2])
def test_what_is_for_later_is_asked_for_as_soon_as_a_connection_is_free(connections: int) -> None:
    caller = Caller(BulkOptions(connections_per_peer=connections))
    caller.ask(0.0, caller.get_any("1", 1), caller.get_any("2", 2))
    connection = caller.connected()
    connection.bytes_to_send(0.0, 1 << 20)
    connection.received(
        0.0, said(BulkBlocks([BlockHeader(bulk.DONE, 4096, 1), BlockHeader(bulk.LATER)]))
    )
    caller.act()
    assert len(connection.calls) == 1
    assert len(caller.wanted) == connections - 1
    connection.received(0.0, bytes(4096))
    caller.act()
    assert [name for name, _ in caller.outcomes] == ["1"]
    (call,) = caller.connected().calls if caller.wanted else connection.calls
    assert isinstance(call, GetCall)
    assert call.block.key == key(2)


@pytest.mark.parametrize("may_read", [True, False])
def test_a_long_answer_goes_on_over_another_connection_before_its_first_is_idle(
    may_read: bool,
) -> None:
    """Every half a second a message passes, or a block."""
    caller = Caller(BulkOptions(connections_per_peer=2))
    service = Service(blocks_of(range(9), OPTIONS.part_bytes))
    calls = [caller.get_any(str(number), number) for number in range(9)]
    for call in calls:
        call.may_read = may_read
    caller.ask(0.0, *calls)
    first, callee = caller.connected(), serve(service)
    now, is_under_way = 0.0, False
    while data := first.bytes_to_send(now, 1 << 20) or callee.bytes_to_send(now, 1 << 20):
        (first if now else callee).received(now, data)
        now += 0.5
        caller.act()
        is_under_way |= bool(first.calls and caller.wanted)
    assert is_under_way == may_read
    assert service.waiting == service.out == []
    if may_read:
        # A part is one block, and takes a second: the seventh begins after 6 s, and is the last.
        assert [name for name, _ in caller.outcomes] == ["0", "1", "2", "3", "4", "5", "6"]
        converse(caller, caller.connected(now), serve(service), now=now, at_most=1 << 20)
    assert caller.outcomes == [(str(number), bulk.DONE) for number in range(9)]
    assert not caller.wanted


class _Disk(Service):
    """Brings what lies below to whoever waits, in whatever order."""

    def __init__(self, held: dict[bytes, Copy], below: Iterable[bytes]) -> None:
        super().__init__(held)
        self.below = {key: self.held.pop(key) for key in below}
        self.comes: list[Callable[[], None]] = []

    def bring(self, now: float, get: BulkGet, then: Callable[[float], None]) -> bool:
        waits = super().bring(now, get, then)
        if waits:
            assert self.brought is not None
            self.comes.append(self.brought)
        return waits


@pytest.mark.parametrize("seed", range(100))
def test_every_get_ends_once_however_its_answer_is_parted(seed: int) -> None:
    """Over several connections at once, some of which break; with blocks that are not there, that
    lie below, and that others want, too."""
    rng = random.Random(seed)
    options = BulkOptions(
        connections_per_peer=rng.choice((1, 2, 4)),
        part_bytes=rng.choice((1, 2_000, 1 << 20)),
        connection_s=rng.choice((0.0, 0.5, 100.0)),
        silence_s=1e6,
        transfer_timeout_s=1e6,
        idle_s=1e6,
    )
    breaks = rng.choice((0.0, 0.05))
    names = {number: str(number) for number in range(30)}
    blocks = blocks_of((n for n in names if rng.random() < 0.9), rng.choice((700, 5_000)))
    service = _Disk(dict(blocks), [k for k in blocks if rng.random() < rng.choice((0, 0.3))])
    service.met = {key(n) for n in names if rng.random() < rng.choice((0, 0, 0.3))}
    caller = Caller(options)
    calls = [caller.get_any(name, number) for number, name in names.items()]
    for call in calls:
        call.may_read, call.deadline = True, 1e6
    caller.ask(0.0, *calls)
    pairs: list[tuple[BulkConnection, BulkCallee[Copy]]] = []
    now, broken = 0.0, False
    for _ in range(20_000):
        if len(caller.outcomes) == len(calls):
            break
        now += 0.02
        if caller.wanted and rng.random() < 0.3:
            callee = BulkCallee(now, service, options, Metrics())
            pairs.append((caller.connected(now), callee))
        if service.comes and rng.random() < 0.3:
            service.comes.pop(rng.randrange(len(service.comes)))()
        for link, other in (rng.choice(pairs), rng.choice(pairs)[::-1]) if pairs else ():
            if not other.closed and not link.closed:
                deliver(other, link.bytes_to_send(now, rng.choice((100, 9_000))), now, direct=True)
        caller.act()
        if len(pairs) > 1 and rng.random() < breaks * 0.02:
            broken = True
            for link in rng.choice(pairs):
                link.lost(now)
            caller.act()
    assert sorted(name for name, _ in caller.outcomes) == sorted(names.values())
    for name, outcome in caller.outcomes:
        place = key(int(name))
        if outcome == bulk.DONE:
            assert caller.rooms[name] == blocks[place].data
        elif outcome == bulk.COMPANY:
            assert service.met
        elif outcome == bulk.NOT_FOUND:
            assert place not in blocks
        else:
            assert (outcome, broken) == (UNREACHABLE, True)
    assert all(callee.closed or not callee.busy for _, callee in pairs)
    assert service.waiting == service.out == []


def test_wrong_bytes_among_right_ones_are_told_apart() -> None:
    caller, service = Caller(), Service(blocks_of([1, 2, 3]))
    service.held[key(2)].data[0] ^= 1
    caller.ask(0.0, *(caller.get_any(str(n), n) for n in (1, 2, 3)))
    converse(caller, caller.connected(), serve(service))
    assert caller.outcomes == [("1", "done"), ("2", "wrong_digest"), ("3", "done")]


def test_a_callee_that_closes_half_way_leaves_what_has_come() -> None:
    caller, service = Caller(), Service(blocks_of([1, 2, 3]))
    caller.ask(0.0, *(caller.get_any(str(n), n) for n in (1, 2, 3)))
    connection, callee = caller.connected(), serve(service)
    callee.received(0.0, connection.bytes_to_send(0.0, 1 << 20))
    connection.received(0.0, callee.bytes_to_send(0.0, 1000))
    connection.received(0.0, callee.bytes_to_send(0.0, 1000))
    connection.received(0.0, callee.bytes_to_send(0.0, 100))
    connection.lost(0.0)
    caller.act()
    assert caller.outcomes == [("1", "done"), ("2", UNREACHABLE), ("3", UNREACHABLE)]
    assert connection.destinations() == []


def test_what_waits_is_made_again_where_a_kept_connection_has_died() -> None:
    caller, service = Caller(), Service(blocks_of([2, 3]))
    caller.ask(0.0, caller.drop("first"))
    kept = caller.connected()
    converse(caller, kept, serve(service))
    caller.ask(9.0, caller.get_any("2", 2), caller.get_any("3", 3))
    kept.lost(9.0)
    caller.act()
    converse(caller, caller.connected(9.0), serve(service), now=9.0)
    assert caller.outcomes[1:] == [("2", "done"), ("3", "done")]


def test_pieces_are_not_copied_and_count_when_they_are_taken() -> None:
    service = Service(blocks_of([1, 2]))
    callee = serve(service)
    callee.received(0.0, said(HELLO, BulkGet(1, [WantedBlock(key(1)), WantedBlock(key(2))])))
    header, first, second = callee.pieces_to_send(0.0)
    assert isinstance(first, memoryview)
    assert first.obj is service.held[key(1)].data
    callee.sent(0.0, len(header) + 100)
    assert callee.pieces_to_send(0.0) == [first[100:], second]
    assert service.out == [key(1), key(2)]
    callee.sent(0.0, len(first) - 100 + len(second))
    assert callee.pieces_to_send(0.0) == []
    assert service.out == []
    callee.check()


# --- the callee -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [BulkHello(BULK_PROTOCOL_VERSION + 1, "node-1"), GET])
def test_a_caller_of_another_version_is_cut_off(first: CallerMessage) -> None:
    service = Service()
    service.held[key(1)] = Copy(BlockId(1, key(1)), bytearray(DATA))
    callee = serve(service)
    callee.received(0.0, said(first, GET))
    assert callee.closed
    assert heard(callee) == []
    assert service.out == []


def test_a_caller_is_who_its_certificate_names() -> None:
    for certified, let_in in (("node-1", True), ("node-3", False), (None, True)):
        callee = serve(Service(), certified)
        callee.received(0.0, said(HELLO, GET))
        assert callee.closed == (not let_in)
        absent = BulkBlocks([BlockHeader(bulk.NOT_FOUND)])
        assert heard(callee) == ([absent] if let_in else [])


def test_a_caller_that_is_silent_is_closed_and_half_a_message_is_silence() -> None:
    callee = serve(Service())
    callee.received(1.0, said(HELLO))
    assert callee.get_timer() == 61.0
    callee.received(50.0, said(GET)[:10])
    assert callee.get_timer() == 61.0
    callee.handle_timer(61.0)
    assert callee.closed


def test_room_for_a_block_that_does_not_come_in_time_is_given_back() -> None:
    for how in ("late", "lost"):
        service = Service()
        callee = serve(service)
        callee.received(0.0, said(HELLO, PUT))
        assert heard(callee, 1.0) == [GO]
        callee.received(20.0, DATA[:5000])
        assert callee.get_timer() == OPTIONS.transfer_timeout_s, "a trickle puts nothing off"
        assert service.out == [key(1)]
        if how == "late":
            callee.handle_timer(30.0)
        else:
            callee.lost(20.0)
        assert callee.closed
        assert callee.destination() is None
        assert (service.out, service.aborted) == ([], [key(1)])


def test_a_block_is_held_until_its_last_byte_is_taken_and_no_longer() -> None:
    for taken, lost in ((1000, True), (len(DATA), False)):
        service = Service()
        service.held[key(1)] = Copy(BlockId(1, key(1)), bytearray(DATA))
        callee = serve(service)
        callee.received(0.0, said(HELLO, GET))
        assert heard(callee) == [BLOCK]
        for _ in range(taken // 1000):
            assert service.out == [key(1)]
            callee.bytes_to_send(0.0, 1000)
        if lost:
            callee.lost(0.0)
        else:
            callee.bytes_to_send(0.0, 1000)
            assert callee.get_timer() == OPTIONS.idle_s
        assert service.out == []


def test_a_get_waits_for_what_lies_below_and_for_the_rest_it_is_asked_again() -> None:
    caller, service = Caller(), Service(at_once=2)
    for number in (1, 2, 3, 4):
        copy = Copy(BlockId(1, key(number)), bytearray(DATA), digest_of(DATA))
        (service.held if number == 2 else service.below)[key(number)] = copy
    caller.ask(0.0, *(caller.get_any(f"get {number}", number) for number in (1, 2, 3, 4)))
    connection, callee = caller.connected(), serve(service)
    woken: list[bool] = []
    callee.wake = lambda: woken.append(True)
    converse(caller, connection, callee)
    assert caller.outcomes == []
    assert callee.busy
    assert not callee.wants_bytes
    assert service.brought is not None
    service.brought()
    assert woken == [True]
    converse(caller, connection, callee)
    assert [name for name, _ in caller.outcomes] == ["get 1", "get 2", "get 3"]
    again, callee = caller.connected(), serve(service)  # asked before the first was through
    converse(caller, again, callee)
    service.brought()
    converse(caller, again, callee)
    assert caller.outcomes == [(f"get {number}", bulk.DONE) for number in (1, 2, 3, 4)]
    assert all(caller.rooms[f"get {number}"] == DATA for number in (1, 2, 3, 4))
    assert service.out == []


def test_what_is_brought_for_a_caller_that_has_gone_is_not_sent() -> None:
    service = Service()
    service.below[key(1)] = Copy(BlockId(1, key(1)), bytearray(DATA), digest_of(DATA))
    callee = serve(service)
    get = BulkGet(1, [WantedBlock(key(1))])
    callee.received(0.0, said(BulkHello(BULK_PROTOCOL_VERSION, "node-1"), get))
    callee.handle_timer(OPTIONS.transfer_timeout_s)
    assert callee.closed
    assert service.brought is not None
    service.brought()
    callee.check()
    assert service.out == []


def test_requests_sent_ahead_are_answered_in_order_and_not_read_meanwhile() -> None:
    service = Service()
    callee = serve(service)
    ahead = said(HELLO, PUT) + DATA + said(GET, BulkExists(1, key(1)))
    callee.received(0.0, ahead)
    assert not callee.wants_bytes or callee.destination() is not None
    assert heard(callee) == [GO, BulkTaken([bulk.DONE]), BLOCK]
    assert not callee.wants_bytes
    block = b"".join(callee.bytes_to_send(0.0, 4000) for _ in range(3))
    assert block == DATA
    assert heard(callee) == [BulkHeld(b"\1")]
    assert callee.wants_bytes


def test_blocks_of_two_namespaces_leave_in_turns_on_connections_of_their_own() -> None:
    shared = Departures(4e6)  # bytes a second: a turn is of 8 KiB
    service = Service({key(n): Copy(BlockId(n, key(n)), bytearray(1 << 20)) for n in (1, 2)})
    callees = {n: BulkCallee(0.0, service, OPTIONS, Metrics(), None, shared) for n in (1, 2)}
    for namespace, callee in callees.items():
        get = BulkGet(namespace, [WantedBlock(key(namespace))])
        callee.received(0.0, said(HELLO, get))
        (answer,) = heard(callee)
        assert isinstance(answer, BulkBlocks), "what is no block waits for nothing"
    for namespace in callees:
        shared.sent_by_reads(0.0, namespace, 1)  # so both are there
    sent = Counter[int]()
    now = 0.0
    while now < 0.25 and not all(sent[n] == 1 << 20 for n in callees):
        for namespace, callee in callees.items():
            while data := callee.bytes_to_send(now, 1 << 16):
                sent[namespace] += len(data)
            assert callee.pieces_to_send(now) == []
            callee.check()
        due = [at for callee in callees.values() if (at := callee.get_timer()) is not None]
        assert min(due) > now
        now = min(due)
        for callee in callees.values():
            callee.handle_timer(now)
            at = callee.get_timer()
            assert at is None or at > now, "nothing is due twice"
    assert sum(sent.values()) == pytest.approx(departures.PACE * 4e6 * now, rel=0.1)
    assert abs(sent[1] - sent[2]) <= 2 * shared.turn_bytes
    callees[1].lost(now)
    while data := callees[2].bytes_to_send(now + LATELY_S + 0.1, 1 << 16):
        sent[2] += len(data)
    assert sent[2] == 1 << 20, "alone it goes at once"
    assert service.out == []


class Downlink:
    """A home to which blocks are put on many connections, whose bytes are always there to be read,
    but no faster than the link carries them."""

    RATE = 4e6
    """Bytes a second."""

    def __init__(self, weights: dict[int, float]) -> None:
        self.now = 0.0
        self.shared = Departures(self.RATE, weights.__getitem__)
        for namespace in weights:
            self.shared.sent_by_reads(0.0, namespace, 1)  # so all are there
        self.came = Counter[int]()
        self.callees: list[tuple[int, BulkCallee[Copy]]] = []
        self._service = Service()
        self._numbers = count(1)

    def put(self, namespace: int, size_bytes: int) -> BulkCallee[Copy]:
        """A put of one block begins, on a connection of its own."""
        callee = BulkCallee(0.0, self._service, OPTIONS, Metrics(), None, None, self.shared)
        block = PutHeader(key(next(self._numbers)), size_bytes, 1)
        callee.received(self.now, said(HELLO, BulkPut(namespace, 3, 9, [block])))
        assert heard(callee) == [GO]
        self.callees.append((namespace, callee))
        return callee

    def run(self, until: float) -> None:
        """Read, in no order, what may be read, as time goes on."""
        while self.now < until:
            carried = Counter[int]()
            for namespace, callee in self.callees:
                while callee.rooms and callee.wants_bytes:
                    size_bytes = min(callee.receivable_bytes(self.now), callee.least_bytes)
                    if size_bytes:
                        callee.filled(self.now, size_bytes)
                        carried[namespace] += size_bytes
                    callee.check()
            self.came += carried
            due = [at for _, one in self.callees if (at := one.get_timer()) is not None]
            self.now = max(self.now + carried.total() / self.RATE, min(due, default=until))
            for _, callee in self.callees:
                callee.handle_timer(self.now)


def test_puts_of_two_namespaces_are_read_by_weight_however_many_connections_they_have() -> None:
    link = Downlink({1: 1.0, 2: 3.0})
    for namespace, connections in ((1, 12), (2, 2)):
        for _ in range(connections):
            link.put(namespace, 30 << 20)
    link.run(1.0)
    link.came.clear()
    link.run(6.0)
    assert link.came[2] / link.came[1] == pytest.approx(3.0, rel=0.1)
    assert link.came.total() == pytest.approx(departures.PACE * link.RATE * 5.0, rel=0.1)


@pytest.mark.slow
def test_a_put_of_who_puts_little_is_read_at_once() -> None:
    link = Downlink({1: 1.0, 2: 1.0})
    for _ in range(12):
        link.put(1, 60 << 20)
    link.put(2, 100)
    link.run(2.0)
    for number in range(1, 6):
        quiet = link.put(2, 100_000)
        while quiet.rooms:
            before = link.came[1]
            link.run(link.now + 1e-6)
        if number > 1:  # before the first it had saved nothing
            assert link.came[1] - before <= 2 * link.shared.turn_bytes
        link.run(2.0 + 0.2 * number)


def test_the_puts_of_one_namespace_alone_are_read_as_they_come() -> None:
    link = Downlink({1: 1.0})
    callee = link.put(1, 50 << 20)
    assert callee.receivable_bytes(0.0) > 50 << 20
    callee.filled(0.0, 50 << 20)
    assert heard(callee) == [BulkTaken([bulk.WRONG_DIGEST])]
    assert callee.get_timer() == OPTIONS.idle_s


def test_puts_of_two_namespaces_leave_in_turns_with_what_others_get() -> None:
    shared = Departures(4e6)
    metrics = Metrics()
    caller = BulkCaller("node-1", OPTIONS, metrics, lambda c: memoryview(c.data), departures=shared)
    caller.use_nodes(0.0, {2: NODE})
    for namespace in (1, 2):
        copy = Copy(BlockId(namespace, key(namespace)), bytearray(1 << 20), 1)
        caller.ask(0.0, PutCall(2, copy, 3, 9, 100.0, lambda: True, lambda *_: None))
    connections = [each.connection for each in caller.instructions() if isinstance(each, Connect)]
    for namespace, connection in enumerate(connections, 1):
        connection.connected(0.0)
        connection.bytes_to_send(0.0, 1000)
        connection.received(0.0, said(GO))
        shared.sent_by_reads(0.0, namespace, 1)  # so both are there
    sent = [0, 0]
    now = 0.0
    while now < 0.25 and min(sent) < 1 << 20:
        for place, connection in enumerate(connections):
            while data := connection.bytes_to_send(now, 1 << 16):
                sent[place] += len(data)
            connection.check()
        due = [at for connection in connections if (at := connection.get_timer()) is not None]
        assert min(due) > now
        now = min(due)
        for connection in connections:
            connection.handle_timer(now)
    assert sum(sent) == pytest.approx(departures.PACE * 4e6 * now, rel=0.1)
    assert abs(sent[0] - sent[1]) <= 2 * shared.turn_bytes
    connections[0].lost(now)
    while data := connections[1].bytes_to_send(now + LATELY_S + 0.1, 1 << 16):
        sent[1] += len(data)
    assert sent[1] == 1 << 20, "alone it goes at once"


@pytest.mark.parametrize("wrong", [HELLO, BulkDone(bulk.DONE), BulkExists(1, key(1)[1:])])
def test_what_is_no_request_ends_the_connection(wrong: CallerMessage) -> None:
    callee = serve(Service())
    callee.received(0.0, said(HELLO, wrong))
    assert callee.closed
    assert callee.problem


def test_a_tenant_that_asks_for_much_does_not_keep_another_waiting() -> None:
    """One tenant's 600 blocks of 64 KiB wait when another's one comes, which is in the next
    request."""
    service = Service({key(n): Copy(BlockId(1, key(n)), bytearray(1 << 16)) for n in range(700)})
    caller = Caller(
        replace(OPTIONS, connections_per_peer=1, assured_per_peer=0, queue_per_peer=2000)
    )
    caller.ask(0.0, *[caller.get_any("much", number) for number in range(600)])
    caller.ask(0.0, caller.get_any("little", 650, namespace=2))
    connection = caller.connected()
    converse(caller, connection, serve(service), at_most=1 << 16)
    place = [name for name, _ in caller.outcomes].index("little")
    assert place <= MAX_BULK_BLOCKS
    assert len(caller.outcomes) == 601


def test_a_namespace_without_a_connection_does_not_wait_for_those_that_others_have() -> None:
    caller = Caller(BulkOptions(connections_per_peer=2, assured_per_peer=2))
    for number in range(3):
        caller.ask(0.0, caller.drop(f"loud {number}"))
        caller.ask(0.0, caller.exists(f"loud too {number}", []))
    assert len(caller.wanted) == 2, "one namespace has no more than it would have alone"
    for namespace in (2, 3, 4):
        caller.ask(0.0, caller.get_any(f"quiet {namespace}", 9, namespace=namespace))
    asked = [connection.calls[0] for connection in caller.wanted]
    assert len(asked) == 4, "and the last of them waits"
    assert {call.block.namespace for call in asked if isinstance(call, GetCall)} == {2, 3}
    quiet = caller.wanted[2]
    caller.ask(0.0, caller.get_any("quiet again", 9, namespace=2))
    assert len(caller.wanted) == 4, "it has one"
    caller.wanted.remove(quiet)
    quiet.connected(0.0)
    converse(caller, quiet, serve(Service()))
    assert {name for name, _ in caller.outcomes} == {"quiet 2", "quiet 4", "quiet again"}
    assert len(caller.wanted) == 3


def test_two_tenants_that_both_ask_for_much_share_by_weight() -> None:
    service = Service({key(n): Copy(BlockId(1, key(n)), bytearray(1 << 16)) for n in range(1600)})
    caller = Caller(
        replace(OPTIONS, connections_per_peer=1, assured_per_peer=0, queue_per_peer=2000),
        {1: 1.0, 2: 3.0}.__getitem__,
    )
    for namespace in (1, 2):
        many = [
            caller.get_any(str(namespace), 800 * (namespace - 1) + number, namespace=namespace)
            for number in range(700)
        ]
        caller.ask(0.0, *many)
    connection = caller.connected()
    converse(caller, connection, serve(service), at_most=1 << 16)
    # The first request was made before anybody else asked; then both wait for more.
    shared = [name for name, _ in caller.outcomes][MAX_BULK_BLOCKS : 3 * MAX_BULK_BLOCKS]
    assert 2.3 <= shared.count("2") / shared.count("1") <= 4.5


def test_who_is_given_the_turn_of_a_connection_that_broke_finds_nothing_half_done() -> None:
    shared = Departures(4e6)
    caller = Caller()
    caller.core = BulkCaller(
        "node-1", OPTIONS, Metrics(), lambda copy: memoryview(copy.data), departures=shared
    )
    caller.core.use_nodes(0.0, {2: NODE})
    caller.ask(0.0, caller.put("broken", data=bytes(1 << 20)))
    connection = caller.connected()
    connection.bytes_to_send(0.0, 1000)
    shared.sent_by_reads(0.0, 3, 1)
    shared.sent(0.0, 3, 4 << 20)  # so its namespace is not alone, and the next
    connection.received(0.0, said(GO))
    while connection.bytes_to_send(0.0, 1 << 16):
        pass
    woken: list[str] = []

    def goes_on() -> None:
        caller.core.check()
        woken.append("beside")

    assert shared.may_send(0.0, 3, "beside", goes_on) == 0
    connection.lost(0.0)
    assert woken == ["beside"]
    caller.act()
    assert caller.outcomes == [("broken", "unreachable")]
