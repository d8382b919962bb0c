"""The entry points that have an event loop: sockets' protocols and services, told hostile things.

Owns: standing before each entry point without the network where that is possible, with the real
one where it is not (HTTP). Must not know: how inputs are found. Imported, it registers its
targets.

After every input an entry point is asked whether it is whole: an agent's store and a controller's
slots add up, nothing that a client held is still held, no request failed by an error of the entry
point's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import finsy as fy
import grpc
import msgspec
from finsy.proto import p4i, p4r
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from kvcast.bench import switch_programs
from kvcast.bench.fuzz.engine import Harness
from kvcast.bench.fuzz.shapes import framed, frames_of, spoil_proto
from kvcast.bench.fuzz.targets import (
    KEY,
    StreamHarness,
    agent_messages,
    callee_messages,
    caller_messages,
    client_messages,
    controller_messages,
    entry_point,
    pool_map,
    stream_of,
)
from kvcast.bench.hostile_bytes import encapsulation, http_stream, mutate, seed_datagrams
from kvcast.controller.core import membership, tiers
from kvcast.controller.core import namespaces as names
from kvcast.controller.core import pool as controller_pool
from kvcast.controller.core.program import Settings
from kvcast.controller.core.reconcile import SwitchState, diff
from kvcast.controller.http import api as http_api
from kvcast.controller.switch.connection import update_of
from kvcast.hostagent.core import agent as core
from kvcast.hostagent.core import pool as agent_pool
from kvcast.hostagent.core import sessions
from kvcast.hostagent.core.access import Tenants
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.fetches import GetBatch
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network import local_server
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.p4 import artefact
from kvcast.protocol import lane
from kvcast.protocol.lane import datagrams_of
from kvcast.protocol.links import bulk_callee, bulk_caller, control_callee, control_caller, stream
from kvcast.protocol.links.bulk import (
    BulkCall,
    BulkOptions,
    DropCall,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.stream import LinkStream
from kvcast.protocol.messages import local, wire
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    AgentMessage,
    ControllerMessage,
    NamespaceInfo,
    NamespaceSecret,
    NamespaceSecrets,
    Register,
    Registered,
)
from kvcast.protocol.messages.ethernet import (
    FRAME_OVERHEAD_BYTES,
    Endpoint,
    parse_ip,
    parse_mac,
    unwrap,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.shared import index_bytes
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.protocol.requester import requester
from kvcast.protocol.responder import responder
from kvcast.service import http
from kvcast.switchsim.p4runtime import entities as p4runtime_entities
from kvcast.switchsim.p4runtime import service as p4runtime
from kvcast.switchsim.p4runtime import tables as p4runtime_tables
from kvcast.switchsim.p4runtime import values as p4runtime_values
from kvcast.switchsim.reference.switch import Switch
from kvcast.topologies.star import Star

SLAB: Final = 64 * 1024
SLABS: Final = 32


class LoopHarness(Harness):
    """An entry point on an event loop of its own. What its loop complains of is a find."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._problems: list[BaseException] = []
        self.loop.set_exception_handler(self._complain)

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._problems.append(error or RuntimeError(str(context.get("message"))))

    def complete(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it to its end, and whatever became ready by it."""
        self.loop.run_until_complete(work)
        self.loop.run_until_complete(asyncio.sleep(0))
        if self._problems:
            raise self._problems.pop()

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


class _Transport(asyncio.Transport):
    """Takes what is written, and never blocks."""

    closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def agent_of_two() -> AgentCore:
    """An agent's core with a map of two nodes and one namespace."""
    memory = memoryview(bytearray(SLABS * SLAB))
    store = Store(Allocator(SLABS * SLAB, SLAB))
    index = memoryview(bytearray(index_bytes(buckets_for(len(memory)))))
    shared = SharedIndex(Index(index, len(memory), 1), store, barrier=lambda: None)
    agent = AgentCore(*(AgentOptions(node_id="node-1"), store, memory, random.Random(1), shared))
    agent.registered(Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0))
    agent.control_message(0.0, pool_map())
    return agent


def hold(agent: AgentCore, key: bytes, data: bytes) -> None:
    copy = agent.store.reserve(BlockId(1, key), len(data))
    agent.memory[copy.offset : copy.offset + len(data)] = data
    agent.store.commit(copy, digest_of(data), home=True)


def _send_nothing(agent: AgentCore, now: float) -> None:
    """What the adapters would do: drop what is to be sent, and answer no call."""
    agent.answers_to_send(now, 64)
    for call in list(agent.outbox.calls):
        call.ended(now, "unreachable")
    agent.outbox.calls.clear()


def check_store(store: Store) -> None:
    """The store adds up, and nothing is held for a client or a link that is gone."""
    store.check()
    copies = [(block, store.peek(block)) for block in store.blocks()]
    pinned = [block for block, copy in copies if copy is None or copy.pins]
    assert not pinned, f"still pinned by a client that left: {pinned}"


# --- the data port --------------------------------------------------------------------------------


@entry_point(
    "data-port",
    "what reaches an agent's data port, while it fetches one block and serves another",
    core,
    requester,
    responder,
    lane,
)
class DataPortHarness(Harness):
    """An agent that asks for one block and holds another, as datagrams reach it through a tunnel;
    those of one length in a row come in one piece. Python counts what is malformed, too."""

    def __init__(self) -> None:
        self._now = 0.0
        self._agent = agent_of_two()
        self._held = b"h" * (3 * SLAB)
        hold(self._agent, _HELD_KEY, self._held)
        host, other = Star.of(2).hosts
        self._capsule = encapsulation(other, host)
        self._placement = self._agent.requester.placement
        self._own = Endpoint(parse_mac(host.mac), parse_ip(host.ip), host.udp_port)
        self._placement.unwrap_for(self._own)
        pool = self._agent.pool
        assert pool is not None
        self._placement.know(pool.index_by_ip)
        self._good = [
            self._capsule.wrap(datagram)
            for key in (KEY, _HELD_KEY)
            for datagram in (*seed_datagrams(1, key), *self._plain_reads(key))
        ]
        assert self._agent.lane is not None
        self._lane = self._agent.lane
        self._lane.send = self._check_lane

    def corpus(self) -> list[bytes]:
        answer = [frame for frame in self._good if len(frame) > wire.CHUNK_BYTES]
        many = [*answer, *answer, *self._good]
        return [b"".join(map(framed, some)) for some in (answer, many, self._good)]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        frames = frames_of(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(frames)) if frames else 0
            draw = rng.random()
            if not frames or draw < 0.3:
                frames.insert(rng.randint(at, len(frames)), rng.choice(self._good))
            elif draw < 0.8:
                frames[at] = self._spoil_frame(frames[at], rng)
            elif draw < 0.9:
                frames[at:at] = [frames[at]] * rng.choice((1, 3, 70))
            else:
                del frames[at]
        return b"".join(map(framed, frames))

    def _spoil_frame(self, frame: bytes, rng: random.Random) -> bytes:
        """Mostly what is behind Ethernet, IPv4 and UDP, which else would hardly be reached."""
        if rng.random() < 0.2:
            return mutate(frame, rng)
        header = frame[FRAME_OVERHEAD_BYTES : FRAME_OVERHEAD_BYTES + wire.HEADER_BYTES]
        behind = frame[FRAME_OVERHEAD_BYTES + wire.HEADER_BYTES :]
        datagram = mutate(header, rng) + behind
        return self._capsule.wrap(datagram[: wire.MAX_DATAGRAM_BYTES])

    def run(self, data: bytes) -> None:
        self._now += 1.0
        now, agent = self._now, self._agent
        ended: list[GetBatch] = []
        agent.reads.get(now, 1, [KEY], now + 0.5, ended.append)
        agent.answers_to_send(now, 64)
        malformed = 0
        for length, frames in itertools.groupby(frames_of(data), len):
            some = list(frames)
            malformed += sum(map(self._is_malformed, some))
            agent.open_lane(now, 256)
            self._placement.place_bytes(
                b"".join(some),
                lambda arrivals: agent.placed(now, arrivals),
                lambda source, datagram: agent.receive(now, source, wire.decode(datagram)),
                stride=length,
                instead=self._lane.place,
            )
            agent.after_receiving(now)
            agent.requester.check()
            agent.reads.check()
            agent.answers_to_send(now, 64)
        assert self._placement.take_counts().malformed == malformed
        agent.handle_timer(now + 0.6)
        for call in list(agent.outbox.calls):
            call.ended(now + 0.6, "unreachable")
        agent.outbox.calls.clear()
        assert len(ended) == 1, "a get has not ended, or twice"
        for item in ended[0].items:
            if item is not None and item.copy is not None:
                agent.store.unpin(item.copy)
        agent.responder.close()
        agent.store.drop(BlockId(1, KEY))
        agent.store.check()
        held = agent.store.peek(BlockId(1, _HELD_KEY))
        assert held is not None
        assert agent.serving.view(held) == self._held, "the bytes of another block have changed"
        assert len(self._placement) == agent.requester.fetches_in_flight == 0

    def _plain_reads(self, key: bytes) -> list[bytes]:
        """READs that need no decision."""
        read = wire.Frame(wire.OP_READ, 1, key, wanted=wire.FULL_SEGMENT)
        segments = (0, 1, wire.CHUNKINGS[3].number(0), wire.CHUNKINGS[1].number(1))
        return [
            wire.encode(msgspec.structs.replace(read, segment=segment, flags=flags))
            for segment, flags in zip(segments, (0, wire.FLAG_SHARED) * 2, strict=True)
        ]

    def _check_lane(self, jobs: int, count: int) -> None:
        """What compiled code answers is of a block that is held, and of nothing else."""
        for node, datagram in datagrams_of(jobs, count):
            frame = wire.decode(datagram)
            held = self._agent.store.peek(frame.block)
            assert held is not None, "a block that is not held was sent"
            assert node == 2
            assert (frame.size, frame.digest) == (held.size_bytes, held.digest)
            if frame.op == wire.OP_DATA:
                chunking = wire.chunking_of(frame.segment)
                at = chunking.start_of(wire.segment_index(frame.segment))
                at += frame.chunk * chunking.chunk_bytes
                view = self._agent.serving.view(held)[at : at + chunking.chunk_bytes]
                sent = bytes(frame.payload)
                assert sent == bytes(view).ljust(len(sent), b"\0"), "other bytes were sent"

    def _is_malformed(self, frame: bytes) -> bool:
        try:
            outer = unwrap(frame)
            if outer.dst == self._own:
                wire.decode(outer.payload)
        except wire.WireError:
            return True
        return False

    def close(self) -> None:
        self._agent.close()


_HELD_KEY: Final = bytes(15) + b"h"


# --- the local socket -----------------------------------------------------------------------------


@entry_point(
    "local-socket", "the agent's local API, behind the handshake", local_server, sessions, core
)
class LocalSocketHarness(LoopHarness, StreamHarness):
    """One client after another, before one agent, which holds a block. One whose input has an odd
    length may use one tenant's namespaces only; namespace 2 is another's, and 3 has a secret."""

    good = client_messages

    def __init__(self) -> None:
        super().__init__()
        self._agent = agent_of_two()
        hold(self._agent, KEY, b"x" * 5000)
        self._agent.control_message(0.0, NamespaceSecrets([NamespaceSecret(3, bytes(32))]))
        namespaces = [
            NamespaceInfo(number, tenant, "m", "1", "l", [], number != 1)
            for number, tenant in ((1, "t"), (2, "other"), (3, "t"))
        ]
        self._agent.control_message(0.0, pool_map(namespaces))
        self._server = local_server.LocalServer(
            self._agent, cast(Any, None), local_server.LocalOptions(""), self._after
        )

    def _after(self) -> None:
        _send_nothing(self._agent, self.loop.time())

    def corpus(self) -> list[bytes]:
        messages = client_messages()
        return [stream_of(messages[1:]), *(stream_of([message]) for message in messages)]

    def run(self, data: bytes) -> None:
        self.complete(self._tell(data))

    async def _tell(self, data: bytes) -> None:
        codec = MessageCodec[Any](local.ClientMessage, max_message_bytes=1 << 20)
        tenants: Tenants = frozenset({"t"}) if len(data) % 2 else None
        client = local_server._Client(self._server, self._agent, codec, self._after, tenants)
        transport = _Transport()
        client.connection_made(transport)
        half = len(data) // 2
        for piece in (data[:half], data[half:]):
            if not transport.closing:
                client.data_received(piece)
        client.connection_lost(None)
        now = self.loop.time()
        self._agent.handle_timer(now + 4000.0)
        self._after()
        if self._agent.store.get(BlockId(1, KEY)) is None:  # dropped, as a client may
            hold(self._agent, KEY, b"x" * 5000)
        check_store(self._agent.store)


# --- the bulk link --------------------------------------------------------------------------------


def _pour(link: LinkStream[Any], data: bytes, now: float) -> float:
    """Give a connection's core the bytes in pieces, straight to where it wants them if the input
    is even, and take what it has to say; the time then."""
    direct = len(data) % 2 == 0
    left = data
    while left and not link.closed:
        rooms = link.destinations() if direct else []
        if rooms:
            size = 0
            for room in rooms:
                part = left[size : size + len(room)]
                room[: len(part)] = part
                size += len(part)
            link.filled(now, size)
        elif link.wants_bytes:
            size = min(len(left), 1000)
            link.received(now, left[:size])
        else:
            size = 0
        left = left[size:]
        while link.bytes_to_send(now, 1000):
            link.check()
        link.check()
        now += 0.001
    return now


@entry_point("bulk-link", "what other agents say to an agent over TCP", bulk_callee, stream)
class BulkLinkHarness(StreamHarness):
    """Another agent calls; the bytes of blocks are behind their messages."""

    good = caller_messages

    def __init__(self) -> None:
        self._agent = agent_of_two()
        hold(self._agent, KEY[::-1], b"y" * 3000)

    def corpus(self) -> list[bytes]:
        hello, put, *others = caller_messages()
        return [
            stream_of([hello, put]) + b"hello" + stream_of(others),
            *(stream_of([hello, one]) for one in others),
        ]

    def run(self, data: bytes) -> None:
        agent = self._agent
        link = bulk_callee.BulkCallee(0.0, agent.serving, BulkOptions(), agent.metrics)
        now = _pour(link, data, 0.0)
        if len(data) % 3:
            link.lost(now)
        while (when := link.get_timer()) is not None:
            link.handle_timer(when)
        assert link.closed
        check_store(agent.store)

    def close(self) -> None:
        self._agent.close()


@entry_point(
    "bulk-link-caller", "what other agents answer to an agent's calls over TCP", bulk_caller, stream
)
class BulkCallerHarness(StreamHarness):
    """Another agent answers our calls: some of each kind; those that are alike go together,
    and some wait their turn."""

    good = callee_messages

    def corpus(self) -> list[bytes]:
        done, go, taken, blocks, held = callee_messages()
        return [
            stream_of([go, taken, blocks]) + b"hello" + stream_of([done, held, done, done]),
            *(stream_of([one]) for one in callee_messages()),
        ]

    def run(self, data: bytes) -> None:
        ends: list[str] = []
        room = bytearray(5)
        node = pool_map().nodes[1]
        link = bulk_caller.BulkCaller(
            "node-1", BulkOptions(connections_per_peer=1), Metrics(), lambda copy: copy.data
        )
        link.use_nodes(0.0, {2: node})
        copy = _Copy(BlockId(1, KEY), 5, 77, memoryview(b"hello"))

        def ended(_now: float, outcome: str) -> None:
            ends.append(outcome)

        def begin(size_bytes: int, _digest: int) -> memoryview | None:
            return memoryview(room) if size_bytes == len(room) else None

        calls: list[BulkCall] = [
            PutCall(2, copy, 3, 9, 50.0, lambda: True, ended),
            PutCall(2, copy, 3, 9, 50.0, lambda: True, ended),
            GetCall(2, BlockId(1, KEY), 0, 50.0, begin, ended),
            GetCall(2, BlockId(1, KEY), 0, 50.0, begin, ended, 2),
            ExistsCall(2, 1, KEY, 50.0, lambda bits: ends.append(f"bits {bits:#x}"), ended),
            DropCall(2, 1, [KEY], 50.0, ended),
            DropCall(2, 1, [KEY], 0.0, ended),
        ]
        link.ask(-1.0, *calls)
        left, now, connections = data, 0.0, 0
        while instructions := link.instructions():
            for instruction in instructions:
                if isinstance(instruction, bulk_caller.Complete):
                    instruction.call.ended(now, instruction.outcome)
                elif isinstance(instruction, bulk_caller.Connect):
                    connection = instruction.connection
                    connections += 1
                    connection.connected(now)
                    # The first gets half of the input, and is lost then.
                    half = len(data) // 2 if connections == 1 else len(left)
                    now = _pour(connection, left[:half], now)
                    left = left[half:]
                    connection.lost(now)
            link.check()
        assert len([end for end in ends if not end.endswith("bits")]) == len(calls), ends


class _Copy(NamedTuple):
    """What a put sends."""

    block: BlockId
    size_bytes: int
    digest: int
    data: memoryview
    parent: bytes = b""
    depth: int = 0


# --- the control link -----------------------------------------------------------------------------


@entry_point(
    "control-link", "what agents say to the controller",
    controller_pool, membership, names, tiers, control_callee, stream,
)  # fmt: skip
class ControlLinkHarness(StreamHarness):
    """Agents talk to the controller's core: connection 1 what the input says, and connection 2 is
    a good one whose node must stay."""

    good = agent_messages

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.now = 0.0
        self._connection = 1
        options = controller_pool.PoolOptions(
            Settings(
                enabled=True, lease_ticks=1, heat_threshold=3,  router_mac=None
            ),
            slots=64, read_padding_bytes=0, lease_s=3600.0,
            tenants=names.TenantRules(secrets=names.SecretMode.AUTO),
        )  # fmt: skip
        self.pool = controller_pool.Pool(
            options, controller_pool.SavedState(), 0.0, first_generation=1
        )

    def corpus(self) -> list[bytes]:
        messages = agent_messages()
        return [stream_of(messages), *(stream_of([messages[0], one]) for one in messages[1:])]

    def run(self, data: bytes) -> None:
        if len(self.pool.namespaces.by_number) > 100 or len(self.pool.membership.nodes) > 60:
            self._begin()
        self.now += 1.0
        self._connection += 1

        def received(message: AgentMessage) -> None:
            actions = self.pool.received(self._connection, message, self.now)
            if any(
                isinstance(action, controller_pool.Close) and action.connection == self._connection
                for action in actions
            ):
                link.end(self.now)
            self._encode(actions)
            self._encode(self.pool.advance(self.now))

        link = control_callee.ControlCallee(self.now, 9.0, received, Counter())
        _pour(link, data, self.now)
        self.pool.disconnected(self._connection)
        plan = self.pool.plan()
        self._encode(self.pool.published(plan))
        self.pool.programmed(plan, self.now)
        self.pool.saved()
        self.pool.status(self.now)
        self.pool.decisions(self.now)
        self.pool.tiers.residency.check()

    def _encode(self, actions: list[controller_pool.Action]) -> None:
        """What is said can be said: it fits the protocol's own types."""
        for action in actions:
            if isinstance(action, controller_pool.Send):
                codec = MessageCodec[ControllerMessage](ControllerMessage)
                assert len(list(codec.feed(codec.encode(action.message)))) == 1


@entry_point(
    "control-link-agent", "what the controller says to an agent", core, agent_pool, control_caller
)
class ControlLinkAgentHarness(StreamHarness):
    """A controller talks to an agent's core."""

    good = controller_messages

    def __init__(self) -> None:
        self._agent = agent_of_two()
        self.now = 0.0

    def corpus(self) -> list[bytes]:
        messages = controller_messages()
        has_secret = NamespaceInfo(1, "t", "m", "1", "l", [], True)
        return [
            stream_of(messages),
            stream_of([messages[0], messages[3], pool_map([has_secret]), *messages[4:]]),
            *(stream_of([messages[0], one]) for one in messages),
        ]

    def run(self, data: bytes) -> None:
        self.now += 1.0
        agent = self._agent
        options = control_caller.ControlOptions("controller", 0)
        me = agent_messages()[0]
        assert isinstance(me, Register)
        link = control_caller.ControlCaller(
            agent, options, me, random.Random(1), agent.metrics, lambda: None
        )
        link.start(self.now)
        (attempt,) = link.attempts()
        attempt.connection.connecting(self.now)
        attempt.connection.connected(self.now)
        _pour(attempt.connection, data, self.now)
        attempt.connection.lost(self.now)
        (again,) = link.attempts()
        assert again.when > self.now
        assert not agent.connected
        agent.renewal()
        agent.reads.get(self.now, 1, [KEY], self.now + 0.5, lambda _batch: None)
        agent.handle_timer(self.now + 0.6)
        _send_nothing(agent, self.now + 0.6)
        agent.store.check()

    def close(self) -> None:
        self._agent.close()


# --- HTTP -----------------------------------------------------------------------------------------


async def _pinned(_block: BlockId, _wait_s: float) -> dict[str, Any]:
    return {"resident": True}


_SERVICE: Final = cast(
    http_api.Service,
    SimpleNamespace(
        health=lambda: None,
        status=lambda: {"nodes": []},
        decisions=list,
        worth=dict,
        metrics=list,
        derived=lambda block: block,
        pin=_pinned,
        unpin=lambda _block: True,
        namespaces=lambda: [NamespaceInfo(1, "t", "m", "1", "l")],
        make_namespace=lambda body: (
            NamespaceInfo(1, body.tenant, body.model, body.version, body.layout),
            True,
        ),
        change_namespace=lambda body: NamespaceInfo(body.namespace, "t", "m", "1", "l"),
        delete_namespace=lambda _namespace: None,
        drain=lambda _node_id: None,
        undrain=lambda _node_id: None,
    ),
)
"""A controller that has nothing to say."""


@entry_point("http", "the controller's HTTP API", http_api, http)
class HttpHarness(LoopHarness):
    """The API on a real socket: aiohttp's parser takes nothing less. Authentication is on, and the
    inputs bring a token that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self._api = http_api.HttpApi(
            _SERVICE, http_api.HttpOptions(authenticated=True), sleep=_no_sleep
        )
        self._open = http_api.HttpApi(_SERVICE)
        self._addresses = [
            self.loop.run_until_complete(api.start("127.0.0.1", 0))
            for api in (self._api, self._open)
        ]

    def corpus(self) -> list[bytes]:
        body = f'{{"namespace": 1, "key": "{KEY.hex()}"}}'
        head = "HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer kvcast_x\r\nConnection: close\r\n"
        paths = ("/healthz", "/v1/status", "/v1/decisions", "/v1/worth", "/metrics", "/v1/pin")
        requests = [f"GET {path} {head}\r\n" for path in paths]
        for method, said in (("POST", body), ("DELETE", body), ("POST", body[:-1])):
            requests.append(f"{method} /v1/pin {head}Content-Length: {len(said)}\r\n\r\n{said}")
        parts = '"tenant": "t", "model": "m", "version": "1", "layout": "l"'
        for method, said in (
            ("GET", ""),
            ("POST", f'{{{parts}, "settings": {{"policy": "arc", "weight": 2}}}}'),
            ("PATCH", '{"namespace": 1, "settings": {"ttl_s": 1, "quota_bytes": {"dram": 9}}}'),
            ("DELETE", '{"namespace": 1}'),
        ):
            size = f"Content-Length: {len(said)}"
            requests.append(f"{method} /v1/namespaces {head}{size}\r\n\r\n{said}")
        for method, said in (("POST", '{"node_id": "node-1"}'), ("DELETE", '{"node_id": ""}')):
            size = f"Content-Length: {len(said)}"
            requests.append(f"{method} /v1/drain {head}{size}\r\n\r\n{said}")
        chunk = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
        requests.append(f"POST /v1/pin {head}Transfer-Encoding: chunked\r\n\r\n{chunk}")
        return [request.encode() for request in requests]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return http_stream(rng, 1, KEY)
        lines = data.split(b"\r\n")
        if rng.random() < 0.5:
            at = rng.randrange(len(lines))
            lines[at] = rng.choice((mutate(lines[at], rng), lines[at] * 2, b""))
            return b"\r\n".join(lines)
        return mutate(data, rng)

    def run(self, data: bytes) -> None:
        for address in self._addresses:
            self.complete(self._ask(address, data))
        for api in (self._api, self._open):
            failed = {name: n for name, n in api.counts.items() if name in ("answers_500",)}
            assert not failed, f"an answer of 500: {failed}"
            api.counts.clear()

    async def _ask(self, address: tuple[str, int], data: bytes) -> None:
        reader, writer = await asyncio.open_connection(*address)
        try:
            with contextlib.suppress(OSError):
                writer.write(data)
                writer.write_eof()
                answer = await reader.read()
                assert not answer or answer.startswith(b"HTTP/1."), answer[:80]
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def close(self) -> None:
        for api in (self._api, self._open):
            self.loop.run_until_complete(api.stop())
        super().close()


async def _no_sleep(_seconds: float) -> None:
    pass


# --- P4Runtime ------------------------------------------------------------------------------------


class _AbortedError(Exception):
    """An RPC ended with a status: what the service is allowed to say."""


class _Context:
    """What the service sees of gRPC."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "fuzz"

    def set_trailing_metadata(self, _metadata: Any) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, message: str) -> None:
        assert isinstance(code, grpc.StatusCode)
        assert isinstance(message, str)
        raise _AbortedError(f"{code}: {message}")

    async def write(self, message: Any) -> None:
        assert isinstance(message, p4r.StreamMessageResponse)


_REQUESTS: Final[tuple[type[Message], ...]] = (
    p4r.WriteRequest,
    p4r.ReadRequest,
    p4r.SetForwardingPipelineConfigRequest,
    p4r.GetForwardingPipelineConfigRequest,
    p4r.StreamMessageRequest,
)


@entry_point(
    "p4runtime", "the P4Runtime server's requests and stream messages",
    p4runtime, p4runtime_entities, p4runtime_tables, p4runtime_values,
)  # fmt: skip
class P4RuntimeHarness(LoopHarness):
    """The service with kvcast's program on the reference engine; the first byte of an input says
    which request it is. Stream messages come from the primary; a push is verified, and not
    committed, since what is pushed is the JSON loader's to judge."""

    def __init__(self) -> None:
        super().__init__()
        program = artefact("v1model")
        self._p4info = p4i.P4Info()
        text_format.Parse(program.p4info.read_text(encoding="utf-8"), self._p4info)
        self.service = p4runtime.P4RuntimeService(
            new_switch=Switch,
            device_id=1, cpu_port=255, drop_port=511, packet_out=lambda _frame: True,
            now_us=lambda: 0,
        )  # fmt: skip
        self.service.load(self._p4info, program.json.read_bytes())
        self._said: asyncio.Queue[p4r.StreamMessageRequest] = asyncio.Queue()
        self._stream: asyncio.Task[None] | None = None
        self.loop.run_until_complete(self._become_primary())

    async def _become_primary(self) -> None:
        if self._stream is not None and not self._stream.done():
            return
        if self._stream is not None:
            with contextlib.suppress(_AbortedError):
                self._stream.result()
        self._stream = self.loop.create_task(
            self.service.StreamChannel(self._messages(), _Context())
        )
        self._said.put_nowait(_arbitration())
        for _ in range(5):
            await asyncio.sleep(0)

    async def _messages(self) -> AsyncIterator[p4r.StreamMessageRequest]:
        while True:
            yield await self._said.get()

    def corpus(self) -> list[bytes]:
        changes = diff(SwitchState(), switch_programs.kvcast().state).upserts
        schema = fy.P4Schema(self._p4info)
        inputs: list[Message] = []
        for change in {change.kind: change for change in changes}.values():
            write = _write()
            write.updates.append(update_of(change, schema).encode_update(schema))
            inputs.append(write)
        for table in self._p4info.tables:
            read = p4r.ReadRequest(device_id=1)
            read.entities.add().table_entry.table_id = table.preamble.id
            inputs.append(read)
        inputs += _other_writes(self._p4info)
        everything = p4r.ReadRequest(device_id=1)
        everything.entities.add().table_entry.SetInParent()
        inputs.append(everything)
        push = p4r.SetForwardingPipelineConfigRequest(
            device_id=1, action=p4r.SetForwardingPipelineConfigRequest.VERIFY
        )
        push.election_id.low = 1
        push.config.p4_device_config = b"{}"
        inputs += [push, p4r.GetForwardingPipelineConfigRequest(device_id=1), _arbitration()]
        packet = p4r.StreamMessageRequest()
        packet.packet.payload = bytes(64)
        inputs.append(packet)
        return [
            bytes([_REQUESTS.index(type(message))]) + message.SerializeToString()
            for message in inputs
        ]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        kind = (data[0] if data else 0) % len(_REQUESTS)
        message = _REQUESTS[kind]()
        try:
            message.ParseFromString(data[1:])
        except DecodeError:
            return bytes([kind]) + mutate(data[1:], rng)
        if rng.random() < 0.1:
            return bytes([kind]) + mutate(data[1:], rng)
        try:
            spoil_proto(message, rng)
            if isinstance(message, p4r.WriteRequest) and rng.random() < 0.7:
                message.device_id = 1
                message.election_id.CopyFrom(_write().election_id)
            return bytes([kind]) + message.SerializeToString()
        except (ValueError, TypeError):
            return bytes([kind]) + mutate(data[1:], rng)

    def run(self, data: bytes) -> None:
        kind = (data[0] if data else 0) % len(_REQUESTS)
        message = _REQUESTS[kind]()
        try:
            message.ParseFromString(data[1:])
        except DecodeError:
            return  # gRPC ends such a call
        self.complete(self._call(message))
        errors = self.service.counters.internal_errors
        self.service.counters.internal_errors = 0
        assert not errors, "an internal error was counted"

    async def _call(self, message: Message) -> None:
        context = _Context()
        service = self.service
        with contextlib.suppress(_AbortedError):
            match message:
                case p4r.WriteRequest():
                    await service.Write(message, context)
                case p4r.ReadRequest():
                    answers = service.Read(message, context)
                    # All cells of all registers are hundreds of messages, and other calls go on
                    # between them.
                    for _ in range(20):
                        answer = await anext(answers, None)
                        if answer is None:
                            break
                        answer.SerializeToString()
                    else:
                        await cast(AsyncGenerator[Any, None], answers).aclose()
                case p4r.SetForwardingPipelineConfigRequest():
                    message.action = p4r.SetForwardingPipelineConfigRequest.VERIFY
                    await service.SetForwardingPipelineConfig(message, context)
                case p4r.GetForwardingPipelineConfigRequest():
                    await service.GetForwardingPipelineConfig(message, context)
                case p4r.StreamMessageRequest():
                    self._said.put_nowait(message)
                    for _ in range(5):
                        await asyncio.sleep(0)
                    await self._become_primary()
        for frame in (bytes(64), b"\xff" * 60):
            service.switch.process(1, frame, 0)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self.loop.run_until_complete(asyncio.gather(self._stream, return_exceptions=True))
        super().close()


def _arbitration() -> p4r.StreamMessageRequest:
    message = p4r.StreamMessageRequest()
    message.arbitration.device_id = 1
    message.arbitration.election_id.low = 1
    return message


def _write() -> p4r.WriteRequest:
    write = p4r.WriteRequest(device_id=1)
    write.election_id.low = 1
    return write


_SESSION: Final = (
    "packet_replication_engine_entry { clone_session_entry {"
    " session_id: 9 replicas { egress_port: 1 instance: 1 } } }"
)
_ENTITIES_OF: Final = {
    "digests": "digest_entry { digest_id: %d config { max_list_size: 8 } }",
    "counters": "counter_entry { counter_id: %d index { index: 1 } data { packet_count: 5 } }",
    "meters": "meter_entry { meter_id: %d index { index: 1 } }",
    "registers": r'register_entry { register_id: %d index { index: 1 } data { bitstring: "\1" } }',
}
"""By field of P4Info: what is written of each that there is."""


def _other_writes(p4info: Any) -> list[Message]:
    """A session, digests, counters, meters, registers."""
    inserted = [(p4r.Update.INSERT, _SESSION)]
    modified = [
        (p4r.Update.MODIFY, entity % each.preamble.id)
        for field, entity in _ENTITIES_OF.items()
        for each in getattr(p4info, field)
    ]
    writes: list[Message] = []
    for verb, entity in inserted + modified:
        write = _write()
        text_format.Parse(entity, write.updates.add(type=verb).entity)
        writes.append(write)
    return writes
