"""How large a pool can one controller watch over?

Measures the controller's own work, in processor time of one core: its cores, control loop, links
and state file are those of the daemon; the switches and the agents are simulated, and their own
time is not counted. A pool of a million blocks, which are asked for as Zipf's law has it, is
reported by 32 agents, as many as a switch has ports for, and by 1,024, which is what the
controller's work would be if there were a switch of so many ports.

    python -m kvcast.bench.controller --json FILE

Events come as fast as they are taken, so this is the load at which the controller is busy all the
time: agents' reports (`Renew` with up to 256 hot blocks, as bytes), heat digests of the switch (as
P4Runtime's bytes, decoded by finsy; one in ten events), hits of residents, and answers to what it
asks. Rounds come when the daemon would make them. What it takes to encode writes for a switch over
P4Runtime is not in it.

Fields, each of the size of pool where it is worst:

- `controller_events_per_s`: blocks in reports and digests, each an event, a second of processor
  time, rounds included;
- `tick_ms`: the 99th percentile of a round;
- `takeover_ms`: from a saved state, read from its file, to the end of the first round, which reads
  what the switch holds and writes what differs;
- `memory_mib`: what the process has grown by since all agents registered.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import ipaddress
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import finsy as fy
import msgspec
import numpy as np
from finsy.proto import p4r
from kvcast.bench.usage import anonymous_mib
from kvcast.controller.core import program
from kvcast.controller.core.placement import draws
from kvcast.controller.core.pool import Pool, PoolOptions
from kvcast.controller.core.program import Settings
from kvcast.controller.core.reconcile import Change, SwitchState, apply
from kvcast.controller.service import GATHER_EVENTS_S
from kvcast.controller.store import Store
from kvcast.controller.switch.connection import heat_samples
from kvcast.controller.switch.control_loop import ControlLoop
from kvcast.p4 import artefact, profiles
from kvcast.protocol.links.control_callee import ControlCallee, EncodedOnce
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    Describe,
    Described,
    HotBlock,
    Keep,
    Kept,
    NamespaceReply,
    NamespaceRequest,
    Register,
    Renew,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import bucket_of
from kvcast.service import provenance
from kvcast.service.garbage import spare_what_stays
from kvcast.service.reports import add_json, in_the_making, report_to

AGENTS: Final = (32, 1024)
BLOCKS: Final = 1_000_000
SIZE_BYTES: Final = 2 << 20
HOT: Final = 256
"""Blocks of a report, at most."""
DIGESTS: Final = 64
"""Of a list, as the controller has the switch gather them."""
REPORTS_A_LIST: Final = 3
"""Agents' reports between two lists of digests."""
COUNTERS: Final = 120
"""What an agent's report says of itself, about."""
NAMESPACES: Final = 16
READS_A_SECOND: Final = 2000
"""Blocks that the pool asks of each agent, on average."""
PERIODS_EVENTS: Final = 400_000
"""Events that are made beforehand, about; then they come again."""
_SKEW: Final = 0.9
_FOREVER_S: Final = 1e6


class Stopwatch:
    """Processor time of what runs under `running`, and a clock that moves by nothing else.

    The clock moves when that has run: to ask for processor time is a system call, which costs ten
    times what it costs the daemon to read its clock.
    """

    def __init__(self) -> None:
        self.taken_s = 0.0

    def now(self) -> float:
        return self.taken_s

    @contextmanager
    def running(self) -> Iterator[None]:
        since_s = time.process_time()
        try:
            yield
        finally:
            self.taken_s += time.process_time() - since_s


class SimulatedSwitch:
    """Holds what is written, and counts hits of residents."""

    connected = primary = True
    primary_id = 1

    def __init__(self, holds: SwitchState | None = None) -> None:
        self._holds = holds or SwitchState()
        self.mirror: SwitchState | None = None
        self._hits = 0

    async def read(self) -> SwitchState:
        self.mirror = self._holds.copy()
        return self.mirror

    async def write(self, changes: Sequence[Change]) -> None:
        assert self.mirror is not None
        for change in changes:
            apply(self.mirror, change)

    async def table_counters(self, table: str) -> dict[int, int]:
        return dict.fromkeys(range(8), len(table))

    async def indexed_counters(self, counter: str) -> dict[int, int]:
        self._hits += 7
        return dict.fromkeys(range(profiles["v1model"].slots), self._hits)


class SimulatedAgents:
    """The agents' ends of the controller's links: they say what they are made to, and answer."""

    def __init__(self, count: int, clock: Stopwatch) -> None:
        self._clock = clock
        self._codec: MessageCodec[Any] = MessageCodec(Register)
        self._links: dict[int, ControlCallee] = {}
        self._encoded = EncodedOnce()
        self._heard: list[tuple[int, msgspec.Struct]] = []
        self.replies: list[NamespaceReply] = []
        self.count = count

    def connect(self, received: Callable[[int, Any], None]) -> None:
        """Connect them all."""
        counts: Counter[str] = Counter()
        for number in range(self.count):
            self._links[number] = ControlCallee(
                0.0, _FOREVER_S, functools.partial(received, number), counts
            )

    def send(self, connection: int, message: msgspec.Struct) -> None:
        link = self._links[connection]
        link.send(self._clock.now(), self._encoded(message))
        link.sent(self._clock.now(), sum(map(len, link.pieces_to_send(self._clock.now()))))
        self._heard.append((connection, message))

    def close(self, connection: int, reason: str) -> None:
        raise AssertionError(f"agent {connection} was sent away: {reason}")

    def encoded(self, message: msgspec.Struct) -> bytes:
        return self._codec.encode(message)

    def say(self, number: int, data: bytes) -> None:
        """One agent's bytes reach the controller."""
        with self._clock.running():
            self._links[number].received(self._clock.now(), data)
        assert not self._links[number].closed, self._links[number].problem

    def answer(self) -> None:
        """Answer what the controller has asked."""
        heard, self._heard = self._heard, []
        for number, message in heard:
            match message:
                case Describe(request, blocks):
                    held = [(b.namespace, b.key, SIZE_BYTES, 1 + b.key[0]) for b in blocks]
                    self.say(number, self.encoded(Described(request=request, blocks=held)))
                case Keep(request, namespace, key):
                    kept = Kept(request=request, namespace=namespace, key=key, held=True)
                    self.say(number, self.encoded(kept))
                case NamespaceReply():
                    self.replies.append(message)


def _registration(number: int) -> Register:
    return Register(
        version=CONTROL_PROTOCOL_VERSION,
        node_id=f"node-{number}",
        incarnation=1,
        ip=str(ipaddress.IPv4Address("10.0.0.0") + number + 1),
        mac=":".join(f"{b:02x}" for b in (0x02_6B_76_00_00_00 + number).to_bytes(6, "big")),
        switch_port=number + 1,
        udp_port=9000,
        bulk_host="10.0.0.1",
        bulk_port=9001,
        arena_bytes=64 << 30,
    )


class Rig:
    """A controller without sockets, and what is simulated around it."""

    def __init__(self, agents: int, state: Path, switch: SwitchState | None = None) -> None:
        self.clock = Stopwatch()
        self.agents = SimulatedAgents(agents, self.clock)
        self.rounds_s: list[float] = []
        self._rounded_at = 0.0
        profile = profiles["v1model"]
        settings = Settings(
            enabled=True,
            lease_ticks=1563,
            heat_threshold=4,
            device_ports=tuple(range(1, agents + 1)),
        )
        with self.clock.running():
            self.store = Store(state)
            self.pool = Pool(
                PoolOptions(
                    settings=settings,
                    slots=profile.slots,
                    read_padding_bytes=0,
                    lease_s=_FOREVER_S,
                    max_nodes=agents,
                ),
                self.store.load(),
                0.0,
                first_generation=1,
            )
            self.loop = ControlLoop(
                self.pool,
                self.store,
                tick_s=0.5,
                clock=self.clock.now,
                wake=lambda: None,
                on_settled=lambda: None,
            )
        self.switch = SimulatedSwitch(switch)
        self.loop.use(self.switch, self.agents)
        self.agents.connect(self.loop.received)

    def round(self) -> None:
        """One round of the control loop; what it asks is answered."""
        with self.clock.running():
            begun_s = time.process_time()
            coroutine = self.loop.round()
            try:
                coroutine.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("the simulated switch never waits")
            self.rounds_s.append(time.process_time() - begun_s)
        self._rounded_at = self.clock.taken_s
        self.agents.answer()

    def round_if_due(self) -> None:
        """A round, if the daemon would make one: events have come for long enough."""
        if self.clock.taken_s >= self._rounded_at + GATHER_EVENTS_S:
            self.round()

    def register(self) -> None:
        """Have all agents register."""
        for number in range(self.agents.count):
            self.agents.say(number, self.agents.encoded(_registration(number)))
            self.round_if_due()
        self.round()

    def namespaces(self, count: int) -> list[int]:
        """Have the pool make so many namespaces."""
        for number in range(count):
            request = NamespaceRequest(
                request=number + 1, tenant="t", model=f"m{number}", version="1", layout="l"
            )
            self.agents.say(0, self.agents.encoded(request))
        self.round()
        return [reply.info.namespace for reply in self.agents.replies]

    def close(self) -> None:
        self.store.close()


class Events:
    """What happens in the pool, made beforehand: agents' reports, and lists of digests."""

    def __init__(self, rig: Rig, namespaces: list[int], blocks: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        keys = self._random.bytes(16 * blocks)
        self._keys = [keys[at : at + 16] for at in range(0, len(keys), 16)]
        self._namespaces = namespaces
        popularity = np.arange(1, blocks + 1, dtype=np.float64) ** -_SKEW
        self._popularity = popularity / popularity.sum()
        number_of = {f"node-{number}": number for number in range(rig.agents.count)}
        homes = np.array([number_of[homes[0]] for homes in rig.pool.placement])
        home_of = homes[[bucket_of(key) for key in self._keys]]
        self._by_home = [np.flatnonzero(home_of == n) for n in range(rig.agents.count)]
        self._counters = {f"counter_{number}_total": 1.5 * number for number in range(COUNTERS)}
        self.reports: list[tuple[int, bytes, int]] = []
        """Agent, its message, and how many blocks it reports."""
        total = 0
        while total < PERIODS_EVENTS:
            asked = READS_A_SECOND * rig.agents.count * self._popularity
            reads = self._random.poisson(asked)
            for number, mine in enumerate(self._by_home):
                report = self._report(mine, reads[mine])
                self.reports.append((number, rig.agents.encoded(report), len(report.hot)))
                total += len(report.hot)
        self.digests = [self._digest_list(rig.agents.count) for _ in range(256)]

    def _name(self, block: int) -> tuple[int, bytes]:
        return self._namespaces[block % len(self._namespaces)], self._keys[block]

    def _report(self, mine: Any, reads: Any) -> Renew:
        """What a home says of the blocks of its that were read most."""
        hottest = np.argsort(-reads, kind="stable")[:HOT]
        hot = [
            HotBlock(*self._name(block), count, min(count, 8), block % 64, SIZE_BYTES, 1)
            for block, count in zip(mine[hottest].tolist(), reads[hottest].tolist(), strict=True)
            if count
        ]
        return Renew(
            counters=self._counters, hot=hot, arena_used_bytes=1 << 35, blocks=1 << 14, epoch=1
        )

    def _digest_list(self, ports: int) -> bytes:
        """Heat of segments, as P4Runtime carries it."""
        schema = _schema().digests[program.HEAT_DIGEST]
        digests = p4r.DigestList(digest_id=schema.id, list_id=1)
        blocks = self._random.choice(len(self._keys), DIGESTS, p=self._popularity)
        for block in blocks.tolist():
            namespace, key = self._name(block)
            bits = 1 << int(self._random.integers(min(ports, 32)))
            data: Any = {
                "namespace": namespace,
                "key": int.from_bytes(key, "big"),
                "segment": int(self._random.integers(32)),
                "port_bits": bits | 1,
                "reader_bit": bits,
                "count": 4,
            }
            digests.data.append(schema.type_spec.encode_data(data))
        return digests.SerializeToString()


@functools.cache
def _schema() -> fy.P4Schema:
    return fy.P4Schema(artefact("v1model").p4info)


def _hear_digests(rig: Rig, data: bytes) -> None:
    with rig.clock.running():
        message = p4r.StreamMessageResponse(digest=p4r.DigestList.FromString(data))
        rig.loop.heat(heat_samples(fy.P4DigestList.decode(message, _schema())))


def saturate(rig: Rig, events: Events, seconds: float) -> int:
    """Let events come as fast as they are taken, for so much of the controller's time; how many
    came."""
    until_s = rig.clock.taken_s + seconds
    taken = turn = 0
    while rig.clock.taken_s < until_s:
        number, report, blocks = events.reports[turn % len(events.reports)]
        rig.agents.say(number, report)
        taken += blocks
        if turn % REPORTS_A_LIST == 0:
            at = turn // REPORTS_A_LIST % len(events.digests)
            _hear_digests(rig, events.digests[at])
            taken += DIGESTS
        rig.round_if_due()
        turn += 1
    return taken


def measure(agents: int, blocks: int, seconds: float, seed: int) -> dict[str, Any]:
    """All figures of a pool of so many agents."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.db"
        rig = Rig(agents, state)
        rig.register()
        registered_s = rig.clock.taken_s
        events = Events(rig, rig.namespaces(NAMESPACES), blocks, seed)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        gc.freeze()  # what has been made up is none of the controller's
        before_mib = anonymous_mib("self")
        saturate(rig, events, seconds / 4)
        rig.rounds_s.clear()
        begun_s = rig.clock.taken_s
        taken = saturate(rig, events, seconds)
        taken_s = rig.clock.taken_s - begun_s
        rounds_ms = np.array(rig.rounds_s) * 1e3
        result = {
            "agents": agents,
            "blocks": blocks,
            "events": taken,
            "processor_s": taken_s,
            "events_per_s": taken / taken_s,
            "rounds": len(rounds_ms),
            "round_p50_ms": float(np.percentile(rounds_ms, 50)),
            "round_p99_ms": float(np.percentile(rounds_ms, 99)),
            "round_max_ms": float(rounds_ms.max()),
            "in_rounds": float(rounds_ms.sum() / 1e3 / taken_s),
            "memory_mib": anonymous_mib("self") - before_mib,
            "candidates": len(rig.pool.tiers.heat),
            "residents": len(rig.pool.tiers.residency.residents),
            "admissions": rig.pool.tiers.counts["admissions"],
            "register_all_ms": registered_s * 1e3,
        }
        assert rig.pool.tiers.residency.residents, "nothing was admitted"
        holds = rig.switch.mirror
        rig.close()
        for remembered in (
            *(draws, program.ip_number, program.mac_number),
            *(program.homes_of_bucket, program.users_of, program.copies_to),
        ):
            remembered.cache_clear()  # the heir is another process
        heir = Rig(agents, state, holds)
        heir.round()
        result["takeover_ms"] = heir.clock.taken_s * 1e3
        heir.register()
        result["takeover_registered_ms"] = heir.clock.taken_s * 1e3
        assert heir.pool.tiers.residency.residents, "the heir knows nothing"
        heir.close()
        gc.unfreeze()
    return result


def show(report: dict[str, Any]) -> None:
    for size in report["sizes"]:
        print(
            f"{size['agents']:5} agents: {size['events_per_s']:9,.0f} events/s of processor time;"
            f" round p50 {size['round_p50_ms']:.1f} ms, p99 {size['round_p99_ms']:.1f} ms,"
            f" longest {size['round_max_ms']:.1f} ms ({size['in_rounds']:.0%} of the time);"
            f" {size['memory_mib']:.0f} MiB; take-over {size['takeover_ms']:.0f} ms,"
            f" with all agents {size['takeover_registered_ms']:.0f} ms"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.controller",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(parser)
    parser.add_argument(
        "--agents", type=int, nargs="+", default=AGENTS, help="sizes of the pool (%(default)s)"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="in the pool (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of the controller's time, a size (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if min(options.agents) < 1 or options.blocks < max(options.agents) or options.seconds <= 0:
        parser.error("--agents and --seconds from 1 on, and at least one block an agent")
    spare_what_stays()  # as the daemon does
    with in_the_making(options.json) as report:
        report |= {"provenance": provenance.provenance(), "seed": options.seed, "sizes": []}
        for agents in options.agents:
            print(f"{agents} agents, {options.blocks:,} blocks ...", file=sys.stderr, flush=True)
            report["sizes"].append(measure(agents, options.blocks, options.seconds, options.seed))
        sizes = report["sizes"]
        report |= {
            "controller_events_per_s": min(size["events_per_s"] for size in sizes),
            "tick_ms": max(size["round_p99_ms"] for size in sizes),
            "takeover_ms": max(size["takeover_ms"] for size in sizes),
            "memory_mib": max(size["memory_mib"] for size in sizes),
        }
    report_to(options.json, report, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
