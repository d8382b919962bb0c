"""The question: does anything break when every entry point of a pool gets bytes that nobody meant?

Owns: the entry points, what is watched, and the sums that must come out. Must not know: how any
part defends itself. What is sent is in `hostile_bytes`, clients of streams are in
`hostile_streams`.

Four entry points, one after the other, on one running pool of separate processes:
- `switch port`: frames into a port of the switch, as its own node (whose agent was killed);
- `agent port`: frames into an agent's data port, from the switch's address (the switch is killed
  for this, and started again), while the agent fetches blocks of which the attacker is a home;
- `local socket`: as many bytes as those frames had, into an agent's Unix socket;
- `http`: as many bytes into the controller's HTTP API.

After each entry point: every part still runs as the same process, answers a block that was put
before and one that is put then with the right bytes, and has not grown. And everything that was
sent is accounted for: what the sender sent is, to the last frame, connection and answer, what the
kernel and the part say became of it (`balances`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvcast.bench.balance import Balance
from kvcast.bench.hostile_bytes import BLOCK_BYTES, hostile_frames, http_stream, local_stream
from kvcast.bench.hostile_streams import (
    CUT_OFF,
    IGNORED,
    REJECTED,
    TO_THE_END,
    HostileStream,
    LocalHostiles,
    http_hostiles,
)
from kvcast.bench.incast import home_keys
from kvcast.bench.replay import NodeLink, links_to
from kvcast.bench.usage import anonymous_mib
from kvcast.protocol.requester.events import ANSWER_OUTCOMES
from kvcast.protocol.responder import READ_OUTCOMES
from kvcast.service import provenance
from kvcast.service.options import file, option
from kvcast.topologies.pool import Pool, PoolError, PoolOptions
from kvcast.topologies.processes import TunnelNetwork
from kvcast.topologies.star import Host, Star
from kvcast.workloads import content
from kvcast.workloads.generators import chain

GROWTH_LIMIT_MIB = 24.0
"""How much a part's resident memory may grow at an entry point, after the first tenth of what is
sent."""

_CONNECTIONS_AT_ONCE = 32
_PACE_S = 0.02
_SETTLE_TRIES = 40
_SETTLE_S = 0.5


@dataclass(frozen=True)
class HostileOptions:
    """One run."""

    frames: int = option(
        "frames into each of the two data-plane entry points; each of the stream entry points "
        "gets as many bytes as the larger of these",
        default=100_000,
        parse=int,
    )
    nodes: int = option("nodes of the pool; one is the attacker's", default=3, parse=int)
    seed: int = option("seeds the mutations", default=1, parse=int)
    run_dir: Path | None = file("keep all logs there", metavar="DIR")

    def __post_init__(self) -> None:
        if self.frames < 100:
            raise PoolError("send at least 100 frames, so that memory can be compared")
        if not 3 <= self.nodes <= 32:
            raise PoolError("the pool needs 3 to 32 nodes: one is the attacker's")


@dataclass
class EntryPoint:
    """What happened at one entry point."""

    entry_point: str
    part: str
    sent: int = 0
    """Frames, or connections."""
    sent_bytes: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """Of connections and of answers, as the client saw them."""
    balances: list[Balance] = field(default_factory=list)
    rss_before_mib: float = 0.0
    rss_after_mib: float = 0.0
    rss_growth_mib: float = 0.0

    @property
    def problems(self) -> list[str]:
        """What is wrong with its numbers."""
        problems = [f"{self.entry_point}: {b.problem}" for b in self.balances if b.problem]
        if self.rss_growth_mib > GROWTH_LIMIT_MIB:
            problems.append(
                f"{self.entry_point}: {self.part} grew by {self.rss_growth_mib:.1f} MiB"
            )
        hung = self.outcomes.get("hung", 0)
        if hung:
            problems.append(f"{self.entry_point}: {hung} connections hung")
        return problems

    def as_dict(self) -> dict[str, Any]:
        balances = [balance.as_dict() for balance in self.balances]
        return {**asdict(self), "balances": balances}


def tracebacks(pool: Pool) -> list[str]:
    """Which parts logged an exception that nobody expected."""
    return [
        f"{name} logged a traceback: {part.log_path}"
        for name, part in pool.parts.items()
        if b"Traceback (most recent call last)" in part.log_path.read_bytes()
    ]


async def wrong_bytes_of(link: NodeLink, namespace: int, keys: Sequence[bytes]) -> list[int | None]:
    """How many bytes of each of these blocks are wrong; None of one that cannot be read."""
    client = await link.client()
    found: list[int | None] = []
    for key, block in zip(keys, await client.get(namespace, keys, deadline_s=20.0), strict=True):
        if block is None:
            found.append(None)
            continue
        with block:
            found.append(content.wrong_bytes(key, BLOCK_BYTES, block.data))
    return found


async def run(options: HostileOptions, so_far: dict[str, Any] | None = None) -> dict[str, Any]:
    """Attack a pool at every entry point; the report, whose `passed` says whether all held.
    `so_far` gets the entry points as they come."""
    pool = Pool(
        Star.of(options.nodes),
        PoolOptions(
            lease_s=600.0,
            arena_bytes=32 << 20,
            log_level="warning",
            controller_flags=("--http-rate=0",),  # every request shall reach what parses it
        ),
        options.run_dir,
    )
    problems: list[str] = []
    report = {} if so_far is None else so_far
    report |= {
        "bench": "hostile",
        "problems": problems,
        "entry_points": [],
        "parameters": {
            "frames": options.frames,
            "nodes": options.nodes,
            "seed": options.seed,
            "growth_limit_mib": GROWTH_LIMIT_MIB,
        },
        **provenance.provenance(),
    }
    async with pool, links_to([pool.sockets[h.node_id] for h in pool.star.hosts]) as links:
        attack = _Attack(pool, links, options)
        await attack.prepare()
        for attack_at in (
            attack.switch_port,
            attack.agent_port,
            attack.local_socket,
            attack.http,
        ):
            entry_point = await attack_at()
            problems += entry_point.problems
            problems += await attack.aftermath(entry_point)
            report["entry_points"].append(entry_point.as_dict())
        problems += tracebacks(pool)
    return report | {"passed": not problems}


class _Attack:
    """One pool under attack: its last node is the attacker's."""

    def __init__(self, pool: Pool, links: list[NodeLink], options: HostileOptions) -> None:
        self.pool = pool
        self.links = links
        self.options = options
        self.rng = random.Random(options.seed)
        self.namespace = 0
        self.keys = [chain(b"hostile", number) for number in range(4)]
        self.lies: list[str] = []
        """Blocks that were delivered although nobody had put them."""
        self._fresh = 0
        self._frame_bytes = 0
        self._stats_asked = 0
        self._pids: dict[str, int | None] = {}

    async def prepare(self) -> None:
        client = await self.links[0].client()
        self.namespace = await client.namespace("bench", "hostile", "1", f"{BLOCK_BYTES} bytes")
        await self._put(0, self.keys)
        attacker = self.pool.star.hosts[-1].node_id
        await self.pool.kill(attacker)
        self._pids = self.pool.pids

    # --- entry points ----------

    async def switch_port(self) -> EntryPoint:
        me, other = self.pool.star.hosts[-1], self.pool.star.hosts[0]
        network = self._network()
        entry_point = EntryPoint("switch port", "switch")
        before = await self._settled_switch()
        with bound_socket(*network.node_side(me), peer=network.switch_side(me)) as attacker:
            await self._send_frames(entry_point, attacker, me, other, self.keys, 0.5)
        for _ in range(_SETTLE_TRIES):
            after = await self._settled_switch()
            entry_point.balances = _switch_balances(entry_point.sent, me.switch_port, before, after)
            if not any(balance.unaccounted for balance in entry_point.balances):
                break  # else what the controller last read may be older than the file
        return entry_point

    async def agent_port(self) -> EntryPoint:
        me, other = self.pool.star.hosts[-1], self.pool.star.hosts[0]
        network = self._network()
        entry_point = EntryPoint("agent port", other.node_id)
        # Blocks of which the attacker is a home: what it says about them is listened to.
        mine = home_keys(self.pool, me.node_id, 3, "hostile-home")
        await self.pool.kill("switch")
        before = await self._settled_agent()
        with bound_socket(*network.switch_side(other), peer=network.node_side(other)) as attacker:
            async with self._reading(0, mine):
                await self._send_frames(entry_point, attacker, me, other, self.keys + mine, 0.1)
        after = await self._settled_agent()
        entry_point.balances = _agent_balances(entry_point.sent, _grown(before, after))
        await self.pool.restart("switch")
        self._pids["switch"] = self.pool.pids["switch"]
        await self.pool.wait_programmed(60, without=frozenset({me.node_id}))
        return entry_point

    async def local_socket(self) -> EntryPoint:
        host = self.pool.star.hosts[0]
        entry_point = EntryPoint("local socket", host.node_id)
        stream = partial(local_stream, self.rng, self.namespace, self.keys)
        hostiles = LocalHostiles(str(self.pool.sockets[host.node_id]), stream)
        before = await self._settled_agent()
        asked = self._stats_asked
        await self._send_streams(entry_point, hostiles)
        after = await self._settled_agent()
        own = hostiles.fences + self._stats_asked - asked
        entry_point.balances = _local_balances(hostiles, own, _grown(before, after))
        return entry_point

    async def http(self) -> EntryPoint:
        entry_point = EntryPoint("http", "controller")
        stream = partial(http_stream, self.rng, self.namespace, self.keys[0])
        hostiles = http_hostiles(self.pool.network.http_address, stream)
        before = await self._http_counts()
        await self._send_streams(entry_point, hostiles)
        after = await self._http_counts()
        entry_point.balances = _http_balances(hostiles, _grown(before, after))
        return entry_point

    # --- afterwards ---------------------------------------------------------------------------

    async def aftermath(self, entry_point: EntryPoint) -> list[str]:
        """What does not work any more."""
        problems = [f"block {key} was made up" for key in self.lies]
        self.lies.clear()
        for name, pid in self.pool.pids.items():
            if pid != self._pids[name]:
                problems.append(f"{name} does not run any more")
        try:
            self._fresh += 1
            fresh = [chain(b"hostile-fresh", (self._fresh, number)) for number in range(2)]
            async with asyncio.timeout(30):
                await self._put(0, fresh)
            keys = self.keys + fresh
            wrong = await wrong_bytes_of(self.links[1], self.namespace, keys)
            for key, count in zip(keys, wrong, strict=True):
                if count != 0:
                    what = "cannot be read" if count is None else "has wrong bytes"
                    problems.append(f"block {key.hex()} {what}")
            status = await self.pool.http("GET", "/healthz")
            if status != {"ok": True}:
                problems.append(f"/healthz says {status}")
        except (OSError, TimeoutError, RuntimeError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        return [f"after {entry_point.entry_point}: {problem}" for problem in problems]

    async def _put(self, node: int, keys: Sequence[bytes]) -> None:
        client = await self.links[node].client()
        await client.put(
            self.namespace, {key: content.block_bytes(key, BLOCK_BYTES) for key in keys}
        )

    @contextlib.asynccontextmanager
    async def _reading(self, node: int, keys: Sequence[bytes]) -> AsyncIterator[None]:
        """Meanwhile a node goes on asking for blocks that nobody has put: what comes is a lie."""

        async def ask() -> None:
            client = await self.links[node].client()
            while True:
                for key, block in zip(
                    keys, await client.get(self.namespace, keys, deadline_s=0.5), strict=True
                ):
                    if block is not None:
                        block.release()
                        self.lies.append(key.hex())
                await asyncio.sleep(0.05)

        asking = asyncio.create_task(ask())
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    # --- sending ------------------------------------------------------------------------------

    async def _send_frames(
        self,
        entry_point: EntryPoint,
        attacker: socket.socket,
        me: Host,
        other: Host,
        keys: Sequence[bytes],
        backward: float,
    ) -> None:
        """Send frames no faster than the part takes them, and watch its memory."""
        frames = hostile_frames(self.rng, me, other, self.namespace, keys, backward=backward)
        pid = self.pool.pids[entry_point.part]
        assert pid is not None
        while entry_point.sent < self.options.frames:
            for _ in range(min(32, self.options.frames - entry_point.sent)):
                frame = next(frames)
                try:
                    attacker.send(frame)
                except (BlockingIOError, ConnectionRefusedError):
                    continue
                entry_point.sent += 1
                entry_point.sent_bytes += len(frame)
                if entry_point.sent == self.options.frames // 10:
                    entry_point.rss_before_mib = anonymous_mib(pid)
            while bytes_waiting(attacker.getpeername()) > 200_000:
                await asyncio.sleep(_PACE_S)
                if self.pool.pids[entry_point.part] is None:
                    raise self.pool.parts[entry_point.part].failure(
                        f"died at the entry point {entry_point.entry_point}"
                    )
            discard(attacker)
            await asyncio.sleep(0)
        await asyncio.sleep(1.0)
        self._frame_bytes = max(self._frame_bytes, entry_point.sent_bytes)
        self._weigh(entry_point, pid)

    async def _send_streams(self, entry_point: EntryPoint, hostiles: HostileStream) -> None:
        """Connection after connection, some at once, until as many bytes are sent as the larger
        of the frame entry points got."""
        pid = self.pool.pids[entry_point.part]
        assert pid is not None
        while entry_point.sent_bytes < self._frame_bytes:
            if self.pool.pids[entry_point.part] is None:
                raise self.pool.parts[entry_point.part].failure(
                    f"died at the entry point {entry_point.entry_point}"
                )
            entry_point.sent_bytes += sum(
                await asyncio.gather(*(hostiles.one() for _ in range(_CONNECTIONS_AT_ONCE)))
            )
            if not entry_point.rss_before_mib and entry_point.sent_bytes >= self._frame_bytes // 10:
                entry_point.rss_before_mib = anonymous_mib(pid)
        entry_point.sent = sum(hostiles.outcomes.values())
        entry_point.outcomes = {
            **dict(sorted(hostiles.outcomes.items())),
            **{f"answer {name}": n for name, n in sorted(hostiles.answers.items())},
        }
        self._weigh(entry_point, pid)

    def _weigh(self, entry_point: EntryPoint, pid: int) -> None:
        entry_point.rss_after_mib = round(anonymous_mib(pid), 2)
        entry_point.rss_before_mib = round(entry_point.rss_before_mib, 2)
        entry_point.rss_growth_mib = round(
            entry_point.rss_after_mib - entry_point.rss_before_mib, 2
        )

    # --- what the parts say -------------------------------------------------------------------

    def _network(self) -> TunnelNetwork:
        assert isinstance(self.pool.network, TunnelNetwork)
        return self.pool.network

    async def _settled_agent(self) -> dict[str, int]:
        """The attacked agent's counters, once they stand still."""
        client = await self.links[0].client()
        seen = -1
        for _ in range(_SETTLE_TRIES):
            counters = {name: int(value) for name, value in (await client.stats()).items()}
            self._stats_asked += 1
            moving = sum(
                value
                for name, value in counters.items()
                if name.startswith(("frames_received", "frames_dropped_rec", "home_", "local_c"))
            )
            busy = counters["fetches_waiting"] + counters["answers_waiting"]
            if moving == seen and not busy:
                break
            seen = moving
            await asyncio.sleep(_SETTLE_S)
        return counters

    async def _settled_switch(self) -> dict[str, Any]:
        """The switch's statistics, once they stand still, with the program's decisions."""
        stats: dict[str, Any]
        seen: dict[str, Any] = {}
        for _ in range(_SETTLE_TRIES):
            with contextlib.suppress(OSError, ValueError):
                stats = json.loads(self.pool.switch_stats_path.read_text(encoding="utf-8"))
                stats["decisions"] = (await self.pool.status())["decisions"]
                quiet = not stats["loop"]["backlog"] and seen and stats["time_s"] > seen["time_s"]
                if quiet and _still(stats) == _still(seen):
                    return stats
                if not seen or stats["time_s"] > seen["time_s"]:
                    seen = stats
            await asyncio.sleep(_SETTLE_S)
        return seen

    async def _http_counts(self) -> dict[str, int]:
        """The HTTP API's own counts. This request is one of its connections already, and not yet
        one of its answers."""
        counts: dict[str, int] = (await self.pool.status())["controller"]["http_counts"]
        return counts


# --- sums ---------------------------------------------------------------------------------------


def _still(stats: dict[str, Any]) -> Any:
    return stats["switch"], stats["ports"], stats["decisions"]


def _switch_balances(
    sent: int, port: int, before: dict[str, Any], after: dict[str, Any]
) -> list[Balance]:
    """From the frame in the attacker's hand to the last copy that left the switch."""
    here = _grown(before["ports"][str(port)], after["ports"][str(port)])
    ports = [_grown(before["ports"][n], after["ports"][n]) for n in after["ports"]]
    engine = _grown(before["switch"], after["switch"])
    loop = _grown(before["loop"], after["loop"])
    decisions = _grown(before["decisions"], after["decisions"])
    at_the_port = (
        *("runts", "oversize", "unsplit", "loss", "foreign"),
        *("queue_drops", "kernel_drops", "errors"),
    )
    arrived = here.get("rx_frames", 0)
    others = sum(each.get("rx_frames", 0) for each in ports) - arrived
    rounds = engine.get("recirculated", 0) + engine.get("resubmitted", 0)
    undecided = (
        "dropped_no_program",
        "dropped_abandoned",
        "dropped_recirculation_bound",
    )
    egress = {
        f"copies {name.removeprefix('tx_')}": sum(each.get(name, 0) for each in ports)
        for name in _PORT_ENDS
    }
    return [
        Balance(
            "frames sent into the port",
            {"sent": sent},
            {"received": arrived}
            | {f"dropped at the port: {name}": here.get(f"rx_{name}", 0) for name in at_the_port},
        ),
        Balance(
            "frames through the program",
            {"received": arrived, "of other nodes": others, "for another round": rounds},
            {f"decided {name}": count for name, count in decisions.items()}
            | {name: engine.get(name, 0) for name in undecided}
            | {"process errors": loop.get("process_errors", 0)},
        ),
        Balance(
            "frames that ended in the program",
            {"dropped by the engine": engine.get("dropped_ingress", 0)},
            {f"decided {name}": decisions.get(name, 0) for name in ("join", "guarded", "dropped")},
        ),
        Balance(
            "copies behind the program",
            {"copies": engine.get("egress_passes", 0)},
            {
                "not for this port": engine.get("dropped_egress", 0),
                "for another round": engine.get("recirculated", 0),
                "to no such port": loop.get("no_such_port", 0),
                **egress,
            },
        ),
    ]


_PORT_ENDS = (
    "tx_frames",
    "tx_loss",
    "tx_queue_drops",
    "tx_no_peer",
    "tx_too_long",
    "tx_busy",
    "tx_errors",
)


def _agent_balances(sent: int, grown: dict[str, int]) -> list[Balance]:
    """From the frame in the attacker's hand to what an agent's cores made of it."""

    def of(prefix: str, names: Sequence[str]) -> dict[str, int]:
        return {name: grown.get(f"{prefix}_{name}_total", 0) for name in names}

    received = grown.get("frames_received_total", 0)
    refused = of("frames", ("malformed", "misaddressed", "unknown_source", "forbidden"))
    reads, answers = grown.get("responder_reads_total", 0), grown.get("frames_answers_total", 0)
    return [
        Balance(
            "frames sent into the port",
            {"sent": sent},
            {
                "received": received,
                "dropped by the kernel": grown.get("frames_dropped_receiving_total", 0),
            },
        ),
        Balance(
            "frames received",
            {"received": received},
            {**refused, "READs for the responder": reads, "answers for the requester": answers},
        ),
        Balance("READs", {"READs": reads}, of("responder", READ_OUTCOMES)),
        Balance("answers", {"answers": answers}, of("requester", ANSWER_OUTCOMES)),
    ]


def _local_balances(hostiles: LocalHostiles, own: int, grown: dict[str, int]) -> list[Balance]:
    """What the clients saw, and what the agent counted; `own` replies went to the bench itself."""

    def counted(name: str) -> int:
        return grown.get(f"local_{name}_total", 0)

    seen = hostiles.outcomes
    return [
        Balance(
            "connections",
            {"by hostile clients": hostiles.connections, "by the bench": hostiles.fences},
            {"accepted": counted("connections")},
        ),
        Balance(
            "clients refused",
            {"rejected": seen[REJECTED]},
            {"refused": counted("connections_refused")},
        ),
        Balance(
            "clients cut off",
            {CUT_OFF: seen[CUT_OFF]},
            {"protocol errors": counted("protocol_errors")},
        ),
        Balance(
            "clients that ended it themselves",
            {
                TO_THE_END: seen[TO_THE_END],
                IGNORED: seen[IGNORED],
                "of the bench": hostiles.fences,
            },
            {
                "left": counted("clients_left"),
                "left before their Hello": counted("handshakes_failed"),
            },
        ),
        Balance(
            "requests",
            {"taken": counted("requests")},
            {
                "replied to": counted("replies"),
                "without a reply": counted("releases"),
                "whose client had gone": counted("replies_dropped"),
            },
        ),
        Balance(
            "replies",
            {"sent": counted("replies")},
            {
                **{f"received: {name}": n for name, n in sorted(hostiles.answers.items())},
                "to the bench": own,
            },
        ),
    ]


def _http_balances(hostiles: HostileStream, grown: dict[str, int]) -> list[Balance]:
    """What the clients saw, and what the API counted; one connection and answer is the bench's."""
    prefix = "answers_"
    given = {n.removeprefix(prefix): c for n, c in grown.items() if n.startswith(prefix)}
    answered = dict(sorted(hostiles.answers.items()))
    by_status = [
        Balance(
            f"answers {status}",
            {"given": given.get(status, 0)},
            {"received": answered.get(status, 0), "by the bench": int(status == "200")},
        )
        for status in sorted({*given, *answered})
    ]
    return [
        Balance(
            "connections",
            {"by hostile clients": hostiles.connections, "by the bench": 1},
            {"accepted": grown.get("connections", 0)},
        ),
        *by_status,
        Balance(
            "requests",
            {"taken": grown.get("requests", 0), "no HTTP": grown.get("malformed", 0)},
            {
                **{f"answered {status}": count for status, count in sorted(given.items())},
                "whose client had gone": grown.get("undelivered", 0),
            },
        ),
    ]


def bytes_waiting(address: tuple[str, int]) -> int:
    """How many bytes wait in the receive buffer of the UDP socket at that address."""
    host, port = address
    wanted = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"
    for line in Path("/proc/net/udp").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        if words[1] == wanted:
            return int(words[4].partition(":")[2], 16)
    return 0


def bound_socket(host: str, port: int, *, peer: tuple[str, int]) -> socket.socket:
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


def discard(attacker: socket.socket) -> None:
    """Throw away what came back."""
    with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
        while True:
            attacker.recv(2048)


def _grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """By how much every number has grown."""
    return {
        name: value - before.get(name, 0)
        for name, value in after.items()
        if isinstance(value, int) and value != before.get(name, 0)
    }
