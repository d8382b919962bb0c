"""What `kvcast.bench.rdma` says of shared answers: one home, two and three readers of the same
blocks at once, in a pool of emulated machines on kvcast's own switch.

Owns: the rounds, and the engines that play them. Each byte that the home's network card sends
during a round is counted by its kernel, RDMA's included; processor time is that of the readers'
agents. All READs of a round are out before the home answers the first: what is shown is what the
switch and the cards make of shared answers, not how well emulated processors keep step. A round by
DATA, in the same boot, reads other blocks of the same sizes: its READs name a
reader group that nobody made, which makes no group, and answers to groups never go by RDMA.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from kvcast.controller.core.placement import place
from kvcast.protocol.messages.roce import SHARED_CHUNKING, SLOT_BYTES, ZONE_SLOTS, place_of
from kvcast.protocol.messages.wire import SEGMENT_BYTES, bucket_of
from kvcast.topologies.machines import (
    RDMA_ADDRESS,
    WINDOW_SEGMENTS,
    Job,
    MachineNetwork,
)
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star

BLOCK_BYTES: Final = SEGMENT_BYTES + 7 * SLOT_BYTES
"""1.8 MiB: eight segments."""
BLOCKS: Final = WINDOW_SEGMENTS * SEGMENT_BYTES // SLOT_BYTES // 8
"""Of a round: so many that all their segments are asked for at once."""
LONG_ROUNDS: Final = 3
LONG_BLOCKS: Final = 12
"""Of a round that shows what a byte costs: what a read costs beside is little then."""
_FIRST: Final = itertools.count(1000, 100_000)
"""Numbers of blocks that no round has had."""
NO_GROUP: Final = 999
"""A reader group that nobody made."""
_COMMAND_S: Final = 150.0
_LAST_S: Final = 60.0
_AGENT: Final = 1
"""The processor of each machine that its agent has to itself."""


def options(**more: Any) -> PoolOptions:
    """Of the pool of machines."""
    return PoolOptions(
        runner="machines",
        replicas=0,
        lease_s=60.0,
        arena_bytes=64 << 20,
        start_timeout_s=300.0,
        admit="off",
        controller_flags=(f"--rdma-address={RDMA_ADDRESS}", "--no-hot-replicas"),
        **more,
    )


def keys_at(
    home: str, nodes: Sequence[str], first: int, count: int, fits: Callable[[int], bool]
) -> list[int]:
    """Numbers of blocks, from `first` on, whose home that node is and that fit."""
    homes = place(nodes, 1)
    numbers: list[int] = []
    while len(numbers) < count:
        if homes[bucket_of(first.to_bytes(16, "big"))][0] == home and fits(first):
            numbers.append(first)
        first += 1
    return numbers


class _Player:
    """A process in a machine that plays engines."""

    def __init__(self, network: MachineNetwork, node: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"player-{node}-", dir=network.folder))
        words = [sys.executable, "-m", "kvcast.bench.rdma_player", str(self._folder)]
        self._job = network.machines[node].begin(words, network.environment)
        self._asked = 0

    def ask(
        self, what: str, group: int = 0, numbers: Sequence[int] = (), size_bytes: int = 0
    ) -> _Answer:
        """Have it do that next."""
        base = self._folder / str(self._asked)
        self._asked += 1
        base.with_suffix(".new").write_text(json.dumps([what, group, list(numbers), size_bytes]))
        base.with_suffix(".new").rename(base.with_suffix(".ask"))
        return _Answer(self._job, base)


class _Answer:
    """What a player says of one thing that it was asked."""

    def __init__(self, job: Job, base: Path) -> None:
        self._job = job
        self._base = base

    async def file(self, kind: str) -> str:
        """What it writes there."""
        path = self._base.with_suffix(f".{kind}")
        end = time.monotonic() + _COMMAND_S
        while not path.exists():
            if self._job.status() is not None or time.monotonic() > end:
                raise RuntimeError(f"an engine has ended, or is stuck:\n{self._job.output()}")
            await asyncio.sleep(0.02)
        return path.read_text()

    def go(self, what: str = "go") -> None:
        """Let it begin, or go on."""
        self._base.with_suffix(f".{what}").touch()

    async def said(self) -> dict[str, Any]:
        """Its answer, at its end."""
        said: dict[str, Any] = json.loads(await self.file("said"))
        return said


class Bed:
    """A pool of machines that is up; its first node is the home."""

    def __init__(self, pool: Pool, nodes: Sequence[str]) -> None:
        assert isinstance(pool.network, MachineNetwork)
        self.network = pool.network
        self.nodes = list(nodes)
        self.home = self.nodes[0]
        self._pool = pool
        self._namespace = 0
        self._next = next(_FIRST)
        self._players = [_Player(self.network, node) for node in nodes]
        self._idle_s_per_s = dict.fromkeys(nodes, 0.0)

    async def wait_for_zones(self) -> None:
        """Until shared answers go by RDMA at every node."""
        end = time.monotonic() + 60.0
        logs = [self.network.machines[node].folder / "0.out" for node in self.nodes]
        while not all("go by RDMA" in path.read_text() for path in logs):
            if time.monotonic() > end:
                raise RuntimeError("no landing zones")
            await asyncio.sleep(0.2)
        # By the end of this the map says so, too.
        for answer in [player.ask("connect") for player in self._players]:
            self._namespace = (await answer.said())["namespace"]

    async def bind(self) -> None:
        """From now on every agent has a processor to itself; and what it takes when nothing is
        asked of it is known, and none of a byte's cost."""
        answers = [player.ask("bind") for player in self._players]
        for node, answer in zip(self.nodes, answers, strict=True):
            said = await answer.said()
            self._idle_s_per_s[node] = said["agent_s"]

    def end(self) -> None:
        """Let the players end."""
        for player in self._players:
            player.ask("end")

    async def keep_last(self) -> None:
        """Power all machines off but the last, and end what runs there."""
        await self._players[-1].ask("unbind").said()
        self.end()
        last = self.network.machines[self.nodes[-1]]
        words = ["pkill", "-9", "-f", "kvcast.hostagent.daemon"]
        await asyncio.to_thread(last.run, words, 20.0)
        for node in self.nodes[:-1]:
            self.network.machines[node].ask_to_end()
        for node in self.nodes[:-1]:
            await asyncio.to_thread(self.network.machines[node].end, 20.0)

    async def lose(self, loss: float) -> None:
        """From now on the switch, which is started anew for it, loses frames with that
        probability each time one crosses a link."""
        switch = self._pool.parts["switch"]
        await self._pool.kill("switch")
        switch.command = [word for word in switch.command if not word.startswith("--loss=")]
        switch.command.append(f"--loss={loss}")
        await self._pool.restart("switch")
        await self._pool.wait_programmed(60.0)

    async def round(
        self,
        readers: int,
        *,
        by_data: bool = False,
        blocks: int = BLOCKS,
        block_bytes: int = BLOCK_BYTES,
    ) -> dict[str, float]:
        """`readers` nodes read the same blocks at once; what came of it. Where there are slots for
        all segments each has its own, so that none is asked for only after another's end."""
        segments = range(SHARED_CHUNKING.segments_of(block_bytes))
        apart = blocks * len(segments) <= ZONE_SLOTS // 2
        taken: set[int] = set()

        def fits(number: int) -> bool:
            key = number.to_bytes(16, "big")
            names = (SHARED_CHUNKING.number(index) for index in segments)
            slots = {place_of(self._namespace, key, name).slot for name in names}
            if apart and taken & slots:
                return False
            taken.update(slots)
            return True

        numbers = self._new_keys(blocks, fits)
        group = NO_GROUP if by_data else 0
        home, others = self._players[0], self._players[1:][:readers]
        await home.ask("put", 0, numbers, block_bytes).said()
        before = await home.ask("counts").said()
        answers = [player.ask("get", group, numbers, block_bytes) for player in others]
        for answer in answers:
            await answer.file("ready")
        # Emulated readers are further apart than homes wait for. So the home stands still until
        # all have asked for everything.
        await home.ask("stop").said()
        machines = [self.network.machines[node] for node in self.nodes[1:][:readers]]
        before_s = sum(machine.processor_s(_AGENT) for machine in machines)
        for answer in answers:
            answer.go()
        for answer in answers:
            await answer.file("asked")
        await home.ask("go on").said()
        for answer in answers:
            await answer.file("got")
        processor_s = sum(machine.processor_s(_AGENT) for machine in machines) - before_s
        for answer in answers:
            answer.go("on")
        said = [await answer.said() for answer in answers]
        after = await home.ask("counts").said()
        sent = {name: after[name] - before.get(name, 0.0) for name in after}
        total = blocks * block_bytes

        def of_readers(name: str) -> float:
            return float(sum(each[name] for each in said))

        result = {
            "home_egress_ratio": sent["sent_bytes"] / total,
            "blocks_by_rdma": of_readers("requester_blocks_by_write_total"),
            "blocks": float(blocks * readers),
            "chunks_sent": sent["writing_chunks_total"],
            "arrived": of_readers("arrived"),
            "icrc_dropped": of_readers("arrived") - of_readers("card_packets"),
            "not_reported": of_readers("card_packets") - of_readers("landing_chunks_total"),
            "wrong_bytes": of_readers("wrong_bytes"),
            "missed": of_readers("missed"),
            "repairs": of_readers("requester_reads_partial_total"),
            "repeats": of_readers("requester_reads_retry_total"),
        }
        for what in ("agent", "agent_system", "machine", "softirq"):
            result[f"{what}_s_per_byte"] = of_readers(f"{what}_s") / (readers * total)
        result["processor_s_per_byte"] = processor_s / (readers * total)
        idle_s = sum(
            said_of_one["elapsed_s"] * self._idle_s_per_s[node]
            for said_of_one, node in zip(said, self.nodes[1:], strict=False)
        )
        result["agent_idle_s_per_byte"] = idle_s / (readers * total)
        result["agent_busy_s_per_byte"] = result["agent_s_per_byte"] - idle_s / (readers * total)
        return result

    def _new_keys(self, count: int, fits: Callable[[int], bool]) -> list[int]:
        numbers = keys_at(self.home, self.nodes, self._next, count, fits)
        self._next = numbers[-1] + 1
        return numbers

    async def bare(self, *, checks: bool) -> dict[str, float]:
        """What a reader would take that does next to nothing: WRITEs come, as many as in a long
        round, and a process of their own counts them. `checks`: and it copies them, and makes
        digests."""
        home, reader = (self.network.machines[node].host.ip for node in self.nodes[:2])
        segments = range(LONG_BLOCKS * SHARED_CHUNKING.segments_of(BLOCK_BYTES))
        taking = self._players[1].ask(f"bare take {reader} {home}", int(checks), segments)
        where = await taking.file("ready")
        await self._players[0].ask(f"bare send {home} {reader} {where}", 0, segments).said()
        return await taking.said()

    async def plain(self, way: str, readers: int) -> dict[str, float]:
        """The same where no answer is shared, one reader after the other: "RDMA", by READs of the
        agents' RDMA link; "TCP", without kvcast."""
        numbers = self._new_keys(BLOCKS, lambda _: True)
        home, others = self._players[0], self.nodes[1:][:readers]
        if way == "RDMA":
            await home.ask("put", 0, numbers, BLOCK_BYTES).said()
        before = await home.ask("counts").said()
        what = "get alone"
        if way == "TCP":
            serving = home.ask("serve", readers, numbers, BLOCK_BYTES)
            await serving.file("ready")
            what = f"fetch {self.network.machines[self.home].host.ip}"
        processor_s = busy_s = wrong_bytes = missed = 0.0
        for number, node in enumerate(others, 1):
            answer = self._players[number].ask(what, 0, numbers, BLOCK_BYTES)
            await answer.file("ready")
            before_s = self.network.machines[node].processor_s(_AGENT)
            answer.go()
            await answer.file("got")
            processor_s += self.network.machines[node].processor_s(_AGENT) - before_s
            answer.go("on")
            said = await answer.said()
            busy_s += said["agent_s"] - said["elapsed_s"] * self._idle_s_per_s[node]
            wrong_bytes += said["wrong_bytes"]
            missed += said["missed"]
        if way == "TCP":
            await serving.said()
        after = await home.ask("counts").said()
        total = BLOCKS * BLOCK_BYTES
        return {
            "home_egress_ratio": (after["sent_bytes"] - before["sent_bytes"]) / total,
            "processor_s_per_byte": processor_s / (readers * total),
            "agent_busy_s_per_byte": busy_s / (readers * total),
            "wrong_bytes": wrong_bytes,
            "missed": missed,
        }


async def measure(
    end: float, add: Callable[[dict[str, Any]], None], alone: Callable[[Bed], None]
) -> None:
    """All rounds, in one boot of four machines, as far as they end before the time `end`
    (`time.monotonic`); `add` is given the numbers by name after each. Then `alone` is called, when
    only the last machine is up and its agent has ended."""
    star = Star.of(4)
    nodes = [host.node_id for host in star.hosts]
    rounds: dict[str, dict[str, float]] = {}
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {what}", file=sys.stderr, flush=True)

    async def note(name: str, coming: Awaitable[dict[str, float]]) -> None:
        rounds[name] = await coming
        say(f"{name}: {json.dumps(rounds[name])}")
        add(figures(rounds))

    async def play(bed: Bed) -> None:
        await bed.wait_for_zones()
        await bed.bind()
        await bed.round(3)  # so that all is where it is needed
        for readers in (1, 2, 3):
            await note(f"{readers} by RDMA", bed.round(readers))
            await note(f"{readers} by DATA", bed.round(readers, by_data=True))
        for number in range(LONG_ROUNDS):
            for way in ("RDMA", "DATA"):
                long = bed.round(1, by_data=way == "DATA", blocks=LONG_BLOCKS)
                await note(f"long {number} by {way}", long)
            for checks in (False, True):
                name = f"bare {number}, {'checked' if checks else 'counted'}"
                await note(name, bed.bare(checks=checks))
        for way in ("TCP", "RDMA"):
            for readers in (1, 2, 3):
                await note(f"{readers} by plain {way}", bed.plain(way, readers))
        await bed.lose(0.01)
        await note("3 with loss", bed.round(3))

    async with Pool(star, options()) as pool:
        say("the machines are up")
        bed = Bed(pool, nodes)
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                await play(bed)
        except TimeoutError:
            say("there was no time for more of these")
        try:
            async with asyncio.timeout(_LAST_S):
                await bed.keep_last()
        except TimeoutError:
            say("the machines do not come to rest: no lone reads")
            return
        say("one machine is left")
        await asyncio.to_thread(alone, bed)
        say("lone reads have ended")


PROMISED: Final = (
    *("shared_home_egress_ratio", "shared_blocks_by_rdma", "shared_blocks", "shared_icrc_dropped"),
    *("shared_loss_egress_ratio", "reader_cpu_over_udp"),
    *("reader_cpu_bare_counted_over_udp", "reader_cpu_bare_checked_over_udp"),
)
"""What a whole run gives."""


def figures(rounds: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The numbers by name, as far as the rounds that they are made of have ended."""
    found: dict[str, Any] = {
        "shared_wrong_bytes": sum(each["wrong_bytes"] for each in rounds.values()),
        "shared_missed": sum(each["missed"] for each in rounds.values()),
        "shared_rounds": rounds,
    }
    if "3 by RDMA" in rounds:
        shared = [rounds[f"{readers} by RDMA"] for readers in (2, 3)]
        found |= {
            "shared_home_egress_ratio": max(each["home_egress_ratio"] for each in shared),
            "shared_blocks_by_rdma": sum(each["blocks_by_rdma"] for each in shared),
            "shared_blocks": sum(each["blocks"] for each in shared),
            "shared_icrc_dropped": sum(each["icrc_dropped"] for each in shared),
        }
    if "3 with loss" in rounds:
        found["shared_loss_egress_ratio"] = rounds["3 with loss"]["home_egress_ratio"]
    long = {
        way: [each for name, each in rounds.items() if name.startswith("long") and way in name]
        for way in ("RDMA", "DATA")
    }

    def over(name: str) -> float:
        """RDMA's over DATA's in the long rounds; of each the least, since whatever else the
        machine does only makes it more."""
        least = {way: min(each[name] for each in long[way]) for way in long}
        return least["RDMA"] / least["DATA"]

    if all(long.values()):
        found |= {
            "reader_cpu_over_udp": over("agent_busy_s_per_byte"),
            "reader_cpu_over_udp_with_idle": over("agent_s_per_byte"),
            "reader_processor_over_udp": over("processor_s_per_byte"),
            "reader_machine_cpu_over_udp": over("machine_s_per_byte"),
            "reader_long_rounds": min(map(len, long.values())),
        }
        by_data = min(each["agent_busy_s_per_byte"] for each in long["DATA"])
        for what in ("counted", "checked"):
            bare = [
                each["agent_busy_s_per_byte"]
                for name, each in rounds.items()
                if name.startswith("bare") and what in name
            ]
            if bare:
                found[f"reader_cpu_bare_{what}_over_udp"] = min(bare) / by_data
    return found
