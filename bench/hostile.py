"""The question: does anything break when every door of a pool gets bytes that nobody meant?

Owns: the mutations, the doors, what is watched. Must not know: how any part defends itself.

Four doors, one after the other, on one running pool of separate processes:
- `switch port`: frames into a port of the switch, as its own node (whose agent was killed);
- `agent port`: frames into an agent's data port, from the switch's address (the switch is killed
  for this, and started again);
- `local socket`: bytes into an agent's Unix socket;
- `http`: bytes into the controller's HTTP API.

Half of what is sent is a well-formed message with a few bits, bytes, or lengths changed, the rest
is noise or cut short. After each door: every part still runs as the same process, answers a block
that was put before and one that is put then with the right bytes, and has not grown. `counted` is
what the part itself says it dropped or refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvcast.bench import content, facts
from kvcast.bench.replay import NodeLink, links_to
from kvcast.bench.workloads import chain
from kvcast.protocol import ethernet, framing, local, wire
from kvcast.topologies.pool import Pool, PoolError, PoolOptions
from kvcast.topologies.processes import TunnelNetwork
from kvcast.topologies.star import Host, Star

BLOCK_BYTES = 16 * 1024
GROWTH_LIMIT_MIB = 24.0
"""How much a part's resident memory may grow at a door, after the first tenth of what is sent."""

_BYTES_A_CONNECTION = 600
_CONNECTIONS_AT_ONCE = 16
_ANSWER_S = 0.5
"""How long a hostile client waits for an answer before it hangs up."""
_PACE_S = 0.02


@dataclass(frozen=True)
class HostileOptions:
    """One run."""

    frames: int = 100_000
    """Frames into each of the two data-plane doors; the stream doors get as many messages in
    bytes: `frames` times a mean of some 40 bytes."""
    nodes: int = 3
    seed: int = 1
    run_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.frames < 100:
            raise PoolError("send at least 100 frames, so that memory can be compared")
        if not 3 <= self.nodes <= 32:
            raise PoolError("the pool needs 3 to 32 nodes: one is the attacker's")


@dataclass
class Door:
    """What happened at one door."""

    door: str
    part: str
    sent: int = 0
    sent_bytes: int = 0
    counted: int = 0
    rss_before_mib: float = 0.0
    rss_after_mib: float = 0.0
    rss_growth_mib: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)


class Mutator:
    """Makes hostile bytes from well-formed ones; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def mutate(self, message: bytes) -> bytes:
        """`message` with something wrong about it (now and then nothing)."""
        rng = self.rng
        data = bytearray(message)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            kind = rng.randrange(8)
            if not data or kind == 0:
                data += rng.randbytes(rng.choice((1, 7, 64, 600)))
            elif kind == 1:
                del data[rng.randrange(len(data)) :]
            elif kind == 2:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif kind == 3:
                data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 4:
                at = rng.randrange(len(data))
                width = rng.choice((2, 4, 8))
                data[at : at + width] = rng.choice((b"\x00", b"\xff")) * width
            elif kind == 5:
                at = rng.randrange(len(data))
                data[at:at] = data[at : at + rng.randrange(1, 32)]
            elif kind == 6:
                at = rng.randrange(len(data))
                del data[at : at + rng.randrange(1, 32)]
            else:
                at = rng.randrange(len(data))
                data[at : at + 8] = rng.randbytes(8)
        return bytes(data[:1900])


def encapsulation(me: Host, other: Host) -> ethernet.Encapsulation:
    """What wraps datagrams from one host to another."""
    ends = [
        ethernet.Endpoint(ethernet.parse_mac(h.mac), ethernet.parse_ip(h.ip), h.udp_port)
        for h in (me, other)
    ]
    return ethernet.Encapsulation(*ends)


def seed_datagrams(namespace: int, key: bytes) -> list[bytes]:
    """Well-formed kvcast datagrams about one block: every operation, with many flags."""
    data = content.block_bytes(key, BLOCK_BYTES)
    digest = wire.digest_of(data)
    frames = [
        wire.Frame(wire.OP_READ, namespace, key, wanted=wire.FULL_SEGMENT, tag=7, gather=20),
        wire.Frame(wire.OP_READ, namespace, key, flags=wire.FLAG_RETRY, wanted=wire.FULL_SEGMENT),
        wire.Frame(wire.OP_READ, namespace, key, flags=wire.FLAG_PARTIAL, wanted=0b1010, tag=9),
        wire.Frame(wire.OP_READ, namespace, key, digest=digest, wanted=wire.FULL_SEGMENT, group=1),
        wire.Frame(wire.OP_MISS, namespace, key, chunk=wire.MISS_NOT_FOUND),
        wire.Frame(
            wire.OP_OFFER,
            namespace,
            key,
            digest=digest,
            size=len(data),
            payload=wire.encode_offer(wire.Offer(wire.OFFER_TCP, 9, 0x0A4D0001, 1, 0)),
        ),
    ]
    chunks = len(data) // wire.CHUNK_BYTES
    for chunk in (0, chunks // 2, chunks - 1):
        part = data[chunk * wire.CHUNK_BYTES : (chunk + 1) * wire.CHUNK_BYTES]
        flags = wire.FLAG_LAST if chunk == chunks - 1 else 0
        frames.append(
            wire.Frame(
                wire.OP_DATA,
                namespace,
                key,
                flags=flags,
                digest=digest,
                size=len(data),
                chunk=chunk,
                payload=bytes(len(part)),  # not the block's bytes: must never be delivered
            )
        )
    return [wire.encode(frame) for frame in frames]


def foreign_frames(me: Host) -> list[bytes]:
    """Ethernet frames that are none of ours."""
    source = ethernet.parse_mac(me.mac)
    broadcast = b"\xff" * 6 + source
    return [broadcast + b"\x08\x06" + bytes(46), broadcast + b"\x86\xdd" + bytes(60)]


class FrameSource:
    """Hostile frames between two hosts, both ways, about some blocks."""

    def __init__(
        self, mutator: Mutator, me: Host, other: Host, namespace: int, keys: Sequence[bytes]
    ) -> None:
        self._mutator = mutator
        self._wraps = [encapsulation(me, other), encapsulation(other, me)]
        self._datagrams = [each for key in keys for each in seed_datagrams(namespace, key)]
        self._frames = [w.wrap(each) for w in self._wraps for each in self._datagrams]
        self._frames += foreign_frames(me)

    def frame(self) -> bytes:
        """One frame: noise, a well-formed one, a mutated one, or one whose datagram is mutated
        and whose Ethernet, IPv4 and UDP headers are right."""
        rng = self._mutator.rng
        draw = rng.random()
        if draw < 0.05:
            return rng.randbytes(rng.randrange(1, 1500))
        if draw < 0.15:
            return rng.choice(self._frames)
        if draw < 0.5:
            return self._mutator.mutate(rng.choice(self._frames))
        datagram = self._mutator.mutate(rng.choice(self._datagrams))
        return rng.choice(self._wraps).wrap(datagram[: wire.MAX_DATAGRAM_BYTES])


def tracebacks(pool: Pool) -> list[str]:
    """Which parts logged an exception that nobody expected."""
    return [
        f"{name} logged a traceback: {part.log_path}"
        for name, part in pool.parts.items()
        if b"Traceback (most recent call last)" in part.log_path.read_bytes()
    ]


def resident_mib(pid: int) -> float:
    """The process's resident memory, without what it shares with others."""
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        fields[name] = rest.split()
    return int(fields["RssAnon"][0]) / 1024


async def run(options: HostileOptions) -> dict[str, Any]:
    """Attack a pool at every door; the report, whose `passed` says whether all held."""
    pool = Pool(
        Star.of(options.nodes),
        PoolOptions(lease_s=600.0, arena_bytes=32 << 20, log_level="warning"),
        options.run_dir,
    )
    problems: list[str] = []
    async with pool, links_to([pool.sockets[h.node_id] for h in pool.star.hosts]) as links:
        attack = _Attack(pool, links, options)
        await attack.prepare()
        doors = []
        for door in (
            attack.switch_port,
            attack.agent_port,
            attack.local_socket,
            attack.http,
        ):
            doors.append(await door())
            problems += await attack.aftermath(doors[-1])
        problems += tracebacks(pool)
    for door_report in doors:
        if door_report.rss_growth_mib > GROWTH_LIMIT_MIB:
            problems.append(
                f"{door_report.part} grew by {door_report.rss_growth_mib:.1f} MiB "
                f"at the door {door_report.door}"
            )
        if not door_report.counted:
            problems.append(f"{door_report.part} counted nothing at the door {door_report.door}")
    return {
        "bench": "hostile",
        "passed": not problems,
        "problems": problems,
        "doors": [asdict(door) for door in doors],
        "parameters": {
            "frames": options.frames,
            "nodes": options.nodes,
            "seed": options.seed,
            "growth_limit_mib": GROWTH_LIMIT_MIB,
        },
        **facts.provenance(),
    }


class _Attack:
    """One pool under attack: its last node is the attacker's."""

    def __init__(self, pool: Pool, links: list[NodeLink], options: HostileOptions) -> None:
        self.pool = pool
        self.links = links
        self.options = options
        self.mutator = Mutator(options.seed)
        self.namespace = 0
        self.keys = [chain(b"hostile", number) for number in range(4)]
        self._fresh = 0
        self._pids: dict[str, int | None] = {}

    async def prepare(self) -> None:
        client = await self.links[0].client()
        self.namespace = await client.namespace("bench", "hostile", "1", f"{BLOCK_BYTES} bytes")
        await self._put(0, self.keys)
        attacker = self.pool.star.hosts[-1].node_id
        await self.pool.kill(attacker)
        self._pids = self.pool.pids

    # --- doors --------------------------------------------------------------------------------

    async def switch_port(self) -> Door:
        me, other = self.pool.star.hosts[-1], self.pool.star.hosts[0]
        network = self._network()
        door = Door("switch port", "switch")
        before = self._switch_drops()
        with _bound(*network.node_side(me), peer=network.switch_side(me)) as attacker:
            await self._send_frames(door, attacker, me, other)
        await asyncio.sleep(2.5)  # the switch rewrites its statistics every second
        after = self._switch_drops()
        door.counters = {name: after[name] - before.get(name, 0) for name in after}
        door.counted = int(sum(door.counters.values()))
        return door

    async def agent_port(self) -> Door:
        me, other = self.pool.star.hosts[-1], self.pool.star.hosts[0]
        network = self._network()
        door = Door("agent port", other.node_id)
        before = await self._agent_counters(0)
        await self.pool.kill("switch")
        with _bound(*network.switch_side(other), peer=network.node_side(other)) as attacker:
            await self._send_frames(door, attacker, me, other)
        await asyncio.sleep(0.5)
        after = await self._agent_counters(0)
        door.counters = _grown(before, after, ("frames_", "requester_", "owner_"))
        door.counted = int(sum(door.counters.get(name, 0.0) for name in _AGENT_DROPS))
        await self.pool.restart("switch")
        self._pids["switch"] = self.pool.pids["switch"]
        await self.pool.wait_programmed(60, without=frozenset({me.node_id}))
        return door

    async def local_socket(self) -> Door:
        host = self.pool.star.hosts[0]
        path = str(self.pool.sockets[host.node_id])
        door = Door("local socket", host.node_id)
        before = await self._agent_counters(0)
        await self._send_streams(
            door, lambda: asyncio.open_unix_connection(path), self._local_stream
        )
        after = await self._agent_counters(0)
        door.counters = _grown(before, after, ("local_",))
        door.counted = int(sum(v for k, v in door.counters.items() if "requests" not in k))
        return door

    async def http(self) -> Door:
        host, port = self.pool.network.http_address
        door = Door("http", "controller")
        answers: Counter[str] = Counter()

        def note(answer: bytes) -> None:
            words = answer.split(b" ", 2)
            known = len(words) == 3 and words[0].startswith(b"HTTP/") and words[1].isdigit()
            answers[f"answered {words[1].decode()}" if known else "not answered"] += 1

        await self._send_streams(
            door, lambda: asyncio.open_connection(host, port), self._http_stream, note
        )
        door.counters = {name: float(count) for name, count in sorted(answers.items())}
        door.counted = sum(n for name, n in answers.items() if name != "answered 200")
        return door

    # --- afterwards ---------------------------------------------------------------------------

    async def aftermath(self, door: Door) -> list[str]:
        """What does not work any more."""
        problems = []
        for name, pid in self.pool.pids.items():
            if pid != self._pids[name]:
                problems.append(f"after {door.door}: {name} does not run any more")
        try:
            self._fresh += 1
            fresh = [chain(b"hostile-fresh", (self._fresh, number)) for number in range(2)]
            await asyncio.wait_for(self._put(0, fresh), 30)
            for key in self.keys + fresh:
                client = await self.links[1].client()
                (block,) = await client.get(self.namespace, [key], deadline_s=20.0)
                if block is None:
                    problems.append(f"after {door.door}: block {key.hex()} cannot be read")
                    continue
                with block:
                    if content.wrong_bytes(key, BLOCK_BYTES, block.data):
                        problems.append(f"after {door.door}: block {key.hex()} has wrong bytes")
            # The next door shall not find the old blocks in the reader's own memory.
            status = await self.pool.http("GET", "/healthz")
            if status != {"ok": True}:
                problems.append(f"after {door.door}: /healthz says {status}")
        except (OSError, TimeoutError, RuntimeError) as error:
            problems.append(f"after {door.door}: {type(error).__name__}: {error}")
        return problems

    async def _put(self, node: int, keys: Sequence[bytes]) -> None:
        client = await self.links[node].client()
        await client.put(
            self.namespace, {key: content.block_bytes(key, BLOCK_BYTES) for key in keys}
        )

    # --- sending ------------------------------------------------------------------------------

    async def _send_frames(
        self, door: Door, attacker: socket.socket, me: Host, other: Host
    ) -> None:
        """Send frames no faster than the part takes them, and watch its memory."""
        source = FrameSource(self.mutator, me, other, self.namespace, self.keys)
        pid = self.pool.pids[door.part]
        assert pid is not None
        inode_queue = _ReceiveQueue(attacker.getpeername())
        while door.sent < self.options.frames:
            for _ in range(32):
                frame = source.frame()
                try:
                    attacker.send(frame)
                except (BlockingIOError, ConnectionRefusedError):
                    continue
                door.sent += 1
                door.sent_bytes += len(frame)
                if door.sent == self.options.frames // 10:
                    door.rss_before_mib = resident_mib(pid)
            while inode_queue.bytes_waiting() > 200_000:
                await asyncio.sleep(_PACE_S)
                if self.pool.pids[door.part] is None:
                    raise self.pool.parts[door.part].failure(f"died at the door {door.door}")
            _discard(attacker)
            await asyncio.sleep(0)
        await asyncio.sleep(1.0)
        self._weigh(door, pid)

    async def _send_streams(
        self,
        door: Door,
        connect: Callable[[], Any],
        make: Callable[[], bytes],
        note: Callable[[bytes], None] = lambda answer: None,
    ) -> None:
        """Connection after connection, each with some hundred bytes, a few at once."""
        pid = self.pool.pids[door.part]
        assert pid is not None
        total = self.options.frames * 40

        async def one() -> None:
            payload = make()
            try:
                reader, writer = await asyncio.wait_for(connect(), 10)
            except (OSError, TimeoutError):
                return
            answer = b""
            try:
                writer.write(payload)
                await asyncio.wait_for(writer.drain(), 10)
                answer = await asyncio.wait_for(reader.read(65536), _ANSWER_S)
            except (OSError, TimeoutError):
                pass
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            note(answer)
            door.sent += 1
            door.sent_bytes += len(payload)

        while door.sent_bytes < total:
            if self.pool.pids[door.part] is None:
                raise self.pool.parts[door.part].failure(f"died at the door {door.door}")
            await asyncio.gather(*(one() for _ in range(_CONNECTIONS_AT_ONCE)))
            if not door.rss_before_mib and door.sent_bytes >= total // 10:
                door.rss_before_mib = resident_mib(pid)
        self._weigh(door, pid)

    def _weigh(self, door: Door, pid: int) -> None:
        door.rss_after_mib = round(resident_mib(pid), 2)
        door.rss_before_mib = round(door.rss_before_mib, 2)
        door.rss_growth_mib = round(door.rss_after_mib - door.rss_before_mib, 2)

    def _local_stream(self) -> bytes:
        """What a hostile client says: a good greeting or none, then mutated requests."""
        rng = self.mutator.rng
        codec: framing.MessageCodec[Any] = framing.MessageCodec(local.ClientMessage)
        hello = codec.encode(local.Hello(local.LOCAL_PROTOCOL_VERSION, "hostile"))
        number = rng.randrange(1 << 32)
        requests = [
            local.Get(number, self.namespace, [self.keys[0], rng.randbytes(16)], 0.2),
            local.Exists(number, self.namespace, self.keys, 0.2),
            local.Alloc(number, self.namespace, [rng.randbytes(16)], [rng.randrange(1, 1 << 30)]),
            local.Commit(number, [rng.randrange(1 << 16)]),
            local.Abort(number, [rng.randrange(1 << 16)]),
            local.Release([rng.randrange(1 << 16)]),
            local.Drop(number, self.namespace, [rng.randbytes(16)]),
            local.GetStats(number),
            local.DescribePool(number, self.namespace, self.keys),
        ]
        stream = hello if rng.random() < 0.8 else self.mutator.mutate(hello)
        while len(stream) < _BYTES_A_CONNECTION:
            draw = rng.random()
            if draw < 0.3:
                stream += codec.encode(rng.choice(requests))
            elif draw < 0.6:  # a right length, and wrong bytes in it
                body = self.mutator.mutate(codec.encode(rng.choice(requests))[4:])
                stream += struct.pack("!I", len(body)) + body
            elif draw < 0.9:
                stream += self.mutator.mutate(codec.encode(rng.choice(requests)))
            else:
                stream += rng.randbytes(rng.randrange(1, 512))
        return stream

    def _http_stream(self) -> bytes:
        """A mutated HTTP request, or a well-formed one with a mutated body."""
        rng = self.mutator.rng
        body = json.dumps({"namespace": self.namespace, "key": self.keys[0].hex()}).encode()
        if rng.random() < 0.5:
            body = self.mutator.mutate(body)
        method = rng.choice(("GET", "POST", "DELETE", "PUT", "BREW"))
        path = rng.choice(("/healthz", "/v1/status", "/v1/pin", "/v1/decisions", "/metrics", "/x"))
        path += rng.choice(("", "?" + "a" * rng.randrange(2000), "/../" * rng.randrange(20)))
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode()
        request = head + body
        return self.mutator.mutate(request) if rng.random() < 0.7 else request

    # --- what the parts say -------------------------------------------------------------------

    def _network(self) -> TunnelNetwork:
        assert isinstance(self.pool.network, TunnelNetwork)
        return self.pool.network

    async def _agent_counters(self, node: int) -> dict[str, float]:
        return dict(await (await self.links[node].client()).stats())

    def _switch_drops(self) -> dict[str, float]:
        """Everything that the switch counted as not forwarded, over its ports and its program."""
        try:
            stats = json.loads(self.pool.switch_stats_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        counted: dict[str, float] = {}
        for port in stats["ports"].values():
            for name, value in port.items():
                if isinstance(value, int) and name not in _NOT_DROPS:
                    counted[f"port {name}"] = counted.get(f"port {name}", 0) + value
        for name, value in stats["switch"].items():
            if isinstance(value, int) and ("drop" in name or "error" in name):
                counted[name] = value
        return counted


_AGENT_DROPS = (
    "frames_malformed_total",
    "frames_misaddressed_total",
    "frames_unknown_source_total",
    "frames_forbidden_total",
    "requester_unsolicited_total",
    "owner_misses_total",
)
_NOT_DROPS = frozenset(
    {"number", "rx_frames", "rx_bytes", "tx_frames", "tx_bytes"}
    | {"ingress_backlog", "egress_backlog"}
)


class _ReceiveQueue:
    """How many bytes wait in the receive buffer of the UDP socket at that address."""

    def __init__(self, address: tuple[str, int]) -> None:
        host, port = address
        self._wanted = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"

    def bytes_waiting(self) -> int:
        for line in Path("/proc/net/udp").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[1] == self._wanted:
                return int(words[4].partition(":")[2], 16)
        return 0


def _bound(host: str, port: int, *, peer: tuple[str, int]) -> socket.socket:
    """A UDP socket that stands at an address and talks to a peer."""
    attacker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        attacker.bind((host, port))
        attacker.connect(peer)
        attacker.setblocking(False)
    except OSError:
        attacker.close()
        raise
    return attacker


def _discard(attacker: socket.socket) -> None:
    """Throw away what came back."""
    with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
        while True:
            attacker.recv(2048)


def _grown(
    before: dict[str, float], after: dict[str, float], prefixes: tuple[str, ...]
) -> dict[str, float]:
    return {
        name: after[name] - before.get(name, 0.0)
        for name in sorted(after)
        if name.startswith(prefixes) and after[name] > before.get(name, 0.0)
    }
