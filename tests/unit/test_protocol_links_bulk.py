"""The bulk link's two ends, put before each other and before liars, without a network.

Oracle: a service that is a dict, and outcomes, times and bytes written out here. Cannot see: TLS,
sockets, and what the agents' own cores make of a request (`test_hostagent_core`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from kvcast.hostagent.core.metrics import Metrics
from kvcast.protocol.links.bulk import (
    EVICTED,
    UNREACHABLE,
    BulkCall,
    BulkOptions,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.bulk_callee import BulkCallee
from kvcast.protocol.links.bulk_caller import BulkCaller, BulkConnection, Complete, Connect
from kvcast.protocol.links.stream import LinkStream
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import (
    BULK_PROTOCOL_VERSION,
    BulkBlock,
    BulkDone,
    BulkDrop,
    BulkExists,
    BulkGet,
    BulkGo,
    BulkHeld,
    BulkHello,
    BulkPut,
    CalleeMessage,
    CallerMessage,
)
from kvcast.protocol.messages.control import NodeInfo
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import BlockId

OPTIONS = BulkOptions(
    connections_per_peer=2, queue_per_peer=3, connect_timeout_s=2.0, idle_s=60.0,
    transfer_timeout_s=30.0,
)  # fmt: skip
NODE = NodeInfo(2, "node-2", "10.0.0.2", "02:00:00:00:00:02", 2, 20000, "host-2", 7000)
DATA = bytes(range(256)) * 40


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Copy(NamedTuple):
    """A block's copy, on either side."""

    block: BlockId
    data: bytearray
    digest: int = 77

    @property
    def size_bytes(self) -> int:
        return len(self.data)


@dataclass
class Service:
    """Holds what it is given. `out`: what it has given out and did not get back."""

    held: dict[bytes, Copy] = field(default_factory=dict)
    out: list[bytes] = field(default_factory=list)
    aborted: list[bytes] = field(default_factory=list)

    def view(self, copy: Copy) -> memoryview:
        return memoryview(copy.data)

    def begin_put(self, _caller: str, put: BulkPut) -> Copy | BulkDone:
        if put.key in self.held:
            return BulkDone(bulk.HELD)
        self.out.append(put.key)
        return Copy(BlockId(put.namespace, put.key), bytearray(put.size_bytes), put.digest)

    def end_put(self, put: BulkPut, copy: Copy) -> BulkDone:
        self.out.remove(put.key)
        self.held[put.key] = copy
        return BulkDone(bulk.DONE)

    def abort_put(self, copy: Copy) -> None:
        self.out.remove(copy.block.key)
        self.aborted.append(copy.block.key)

    def get(self, _caller: str, get: BulkGet) -> Copy | BulkDone:
        if get.key not in self.held:
            return BulkDone(bulk.NOT_FOUND)
        self.out.append(get.key)
        return self.held[get.key]

    def end_get(self, copy: Copy) -> None:
        self.out.remove(copy.block.key)

    def drop(self, _caller: str, drop: BulkDrop) -> BulkDone:
        return BulkDone(bulk.DONE, sum(self.held.pop(k, None) is not None for k in drop.keys))

    def exists(self, _caller: str, exists: BulkExists) -> BulkHeld:
        return BulkHeld(bulk.pack_bitmap([k in self.held for k in exists.keys]))


class Caller:
    """The caller under test, its calls' outcomes, and the connections that it wants."""

    def __init__(self, options: BulkOptions = OPTIONS) -> None:
        self.metrics = Metrics()
        self.core = BulkCaller("node-1", options, self.metrics, lambda copy: memoryview(copy.data))
        self.core.use_nodes(0.0, {2: NODE})
        self.outcomes: list[tuple[str, str]] = []
        self.wanted: list[BulkConnection] = []
        self.room = bytearray(len(DATA))

    def act(self) -> None:
        for instruction in self.core.instructions():
            match instruction:
                case Complete(call=call, outcome=outcome):
                    call.ended(0.0, outcome)
                case Connect(connection=connection):
                    self.wanted.append(connection)
        self.core.check()

    def ask(self, now: float, call: BulkCall) -> None:
        self.core.ask(now, call)
        self.act()

    def connected(self, now: float = 0.0) -> BulkConnection:
        """The connection that was asked for first, made."""
        connection = self.wanted.pop(0)
        connection.connected(now)
        return connection

    def _done(self, name: str) -> Callable[[float, str], None]:
        return lambda _now, outcome: self.outcomes.append((name, outcome))

    def put(self, name: str, *, number: int = 1, held: bool = True) -> PutCall:
        copy = Copy(BlockId(1, key(number)), bytearray(DATA))
        return PutCall(2, copy, 3, 9, 100.0, lambda: held, self._done(name))

    def get(self, name: str, *, number: int = 1, deadline: float = 100.0) -> GetCall:
        def begin(size_bytes: int, _digest: int) -> memoryview | None:
            return memoryview(self.room) if size_bytes == len(self.room) else None

        return GetCall(2, BlockId(1, key(number)), 0, deadline, begin, self._done(name))

    def exists(self, name: str, keys: list[bytes]) -> ExistsCall:
        def answer(bits: list[bool]) -> None:
            self.outcomes.append((name, str(bits)))

        return ExistsCall(2, 1, keys, 100.0, answer, self._done(name))

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
    direct: bool = False, now: float = 0.0,
) -> None:  # fmt: skip
    """Carry bytes both ways until nobody has anything to say."""
    moved = True
    while moved:
        moved = False
        for source, sink in ((connection, callee), (callee, connection)):
            while not sink.closed and (data := source.bytes_to_send(now, 1000)):
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
PUT = BulkPut(1, key(1), len(DATA), 77, 3, 9)


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
        ("which", "[True, False]"),
        ("which", "done"),
        ("get", "done"),
        ("absent", "not_found"),
        ("drop", "done"),
        ("then", "[False, False]"),
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
    assert [each for each in caller.outcomes if each[1] != "[]"] == [
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
        assert connection.call is not None
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
    connection.received(0.0, said(BulkGo()))
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
    connection.received(1.0, said(BulkBlock(len(DATA), 77)) + DATA[:100])
    assert connection.get_timer() == 7.0
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
        said(BulkBlock(5, 1)),
        said(BulkGo(), BulkGo()),
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


def test_a_block_for_which_there_is_no_room_costs_the_connection() -> None:
    caller = Caller()
    caller.ask(0.0, caller.get("get"))
    connection = caller.connected()
    connection.bytes_to_send(0.0, 1000)
    connection.received(0.0, said(BulkBlock(5, 1)) + b"hello")
    caller.act()
    assert connection.closed
    assert caller.outcomes == [("get", "no_room")]
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


# --- the callee -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [BulkHello(BULK_PROTOCOL_VERSION + 1, "node-1"), BulkGet(1, key(1))]
)
def test_a_caller_of_another_version_is_cut_off(first: CallerMessage) -> None:
    service = Service()
    service.held[key(1)] = Copy(BlockId(1, key(1)), bytearray(DATA))
    callee = serve(service)
    callee.received(0.0, said(first, BulkGet(1, key(1))))
    assert callee.closed
    assert heard(callee) == []
    assert service.out == []


def test_a_caller_is_who_its_certificate_names() -> None:
    for certified, let_in in (("node-1", True), ("node-3", False), (None, True)):
        callee = serve(Service(), certified)
        callee.received(0.0, said(HELLO, BulkGet(1, key(1))))
        assert callee.closed == (not let_in)
        assert heard(callee) == ([BulkDone(bulk.NOT_FOUND)] if let_in else [])


def test_a_caller_that_is_silent_is_closed_and_half_a_message_is_silence() -> None:
    callee = serve(Service())
    callee.received(1.0, said(HELLO))
    assert callee.get_timer() == 61.0
    callee.received(50.0, said(BulkGet(1, key(1)))[:10])
    assert callee.get_timer() == 61.0
    callee.handle_timer(61.0)
    assert callee.closed


def test_room_for_a_block_that_does_not_come_in_time_is_given_back() -> None:
    for how in ("late", "lost"):
        service = Service()
        callee = serve(service)
        callee.received(0.0, said(HELLO, PUT))
        assert heard(callee, 1.0) == [BulkGo()]
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
        callee.received(0.0, said(HELLO, BulkGet(1, key(1))))
        assert heard(callee) == [BulkBlock(len(DATA), 77)]
        for _ in range(taken // 1000):
            assert service.out == [key(1)]
            callee.bytes_to_send(0.0, 1000)
        if lost:
            callee.lost(0.0)
        else:
            callee.bytes_to_send(0.0, 1000)
            assert callee.get_timer() == OPTIONS.idle_s
        assert service.out == []


def test_requests_sent_ahead_are_answered_in_order_and_not_read_meanwhile() -> None:
    service = Service()
    callee = serve(service)
    ahead = said(HELLO, PUT) + DATA + said(BulkGet(1, key(1)), BulkExists(1, [key(1)]))
    callee.received(0.0, ahead)
    assert not callee.wants_bytes or callee.destination() is not None
    assert heard(callee) == [BulkGo(), BulkDone(bulk.DONE), BulkBlock(len(DATA), 77)]
    assert not callee.wants_bytes
    block = b"".join(callee.bytes_to_send(0.0, 4000) for _ in range(3))
    assert block == DATA
    assert heard(callee) == [BulkHeld(b"\1")]
    assert callee.wants_bytes


@pytest.mark.parametrize("wrong", [HELLO, BulkDone(bulk.DONE)])
def test_what_is_no_request_ends_the_connection(wrong: CallerMessage) -> None:
    callee = serve(Service())
    callee.received(0.0, said(HELLO, wrong))
    assert callee.closed
    assert callee.problem
