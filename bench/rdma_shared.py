"""What `kvcast.bench.rdma` says of shared answers: one home, two and three readers of the same
blocks at once, in a pool of emulated machines on kvcast's own switch.

Owns: the rounds, and the engines that play them. Each byte that the home's network card sends
during a round is counted by its kernel, RDMA's included; processor time is that of the readers'
agents. A round by DATA, in the same boot, reads other blocks of the same sizes: its READs name a
reader group that nobody made, which makes no group, and answers to groups never go by RDMA.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvcast.controller.core.placement import place
from kvcast.hostagent.client import AsyncClient
from kvcast.protocol.messages.roce import SHARED_CHUNKING
from kvcast.protocol.messages.wire import bucket_of
from kvcast.topologies.machines import RDMA_ADDRESS, SOCKET, MachineNetwork
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import Star

BLOCK_BYTES: Final = 2 << 20
BLOCKS: Final = 4
"""Of a round."""
GATHER_MS: Final = 250
NO_GROUP: Final = 999
"""A reader group that nobody made."""
DEADLINE_S: Final = 90.0
_COMMAND_S: Final = 150.0


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


def keys_at(home: str, nodes: Sequence[str], first: int, count: int) -> list[int]:
    """Numbers of blocks, from `first` on, whose home that node is."""
    homes = place(nodes, 1)
    numbers: list[int] = []
    while len(numbers) < count:
        if homes[bucket_of(first.to_bytes(16, "big"))][0] == home:
            numbers.append(first)
        first += 1
    return numbers


# --- in a machine -----------------------------------------------------------------------------


def _block(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def _agent_pid() -> int:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if b"kvcast.hostagent.daemon" in entry.read_bytes():
            return int(entry.parent.name)
    raise RuntimeError("there is no agent")


def _counts(stats: dict[str, Any]) -> dict[str, float]:
    """What the agent, its process and its machine have counted."""
    fields = Path(f"/proc/{_agent_pid()}/stat").read_text().rsplit(")", 1)[1].split()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    machine = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    busy = sum(map(int, machine)) - int(machine[3]) - int(machine[4])
    network = Path("/sys/class/net/eth0/statistics")
    wanted = ("writing_", "landing_", "requester_", "responder_")
    counts = {name: value for name, value in stats.items() if name.startswith(wanted)}
    return counts | {
        "sent_bytes": float((network / "tx_bytes").read_text()),
        "agent_s": (int(fields[11]) + int(fields[12])) * tick_s,
        "machine_s": busy * tick_s,
    }


async def _engine(what: str, go: str, group: int, numbers: list[int]) -> dict[str, Any]:
    client = await AsyncClient.connect(SOCKET)
    # Of one tenant in a pool, so that no secret changes where keys belong.
    namespace = await client.namespace("t", "m", "1", "l")
    if what == "put":
        for number in numbers:
            await client.put(namespace, {number.to_bytes(16, "big"): _block(number)})
        return {}
    if what == "counts":
        return _counts(await client.stats())
    wanted = {number: _block(number) for number in numbers}
    print("ready", flush=True)
    for _ in range(3000):
        if Path(go).exists():
            break
        await asyncio.sleep(0.02)
    before = _counts(await client.stats())
    outcomes = await client.get_outcomes(
        namespace,
        [number.to_bytes(16, "big") for number in numbers],
        deadline_s=DEADLINE_S,
        gather_ms=GATHER_MS,
        group=group,
    )
    after = _counts(await client.stats())
    wrong_bytes = missed = 0
    for outcome, (number, data) in zip(outcomes, wanted.items(), strict=True):
        if outcome.block is None:
            missed += 1
            continue
        got = bytes(outcome.block.data)
        if got != data:
            wrong_bytes += sum(a != b for a, b in zip(got, data, strict=True))
        outcome.block.release()
        del number
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    return moved | {"wrong_bytes": wrong_bytes, "missed": missed}


# --- outside ----------------------------------------------------------------------------------


class Bed:
    """A pool of machines that is up; its first node is the home."""

    def __init__(self, pool: Pool, nodes: Sequence[str]) -> None:
        assert isinstance(pool.network, MachineNetwork)
        self.network = pool.network
        self.nodes = list(nodes)
        self.home = self.nodes[0]
        self._rounds = 0
        self._next = 1000

    def _begin(self, node: str, what: str, go: Path, group: int, numbers: list[int]) -> Any:
        words = [sys.executable, "-m", "kvcast.bench.rdma_shared", what, str(go), str(group)]
        machine = self.network.machines[node]
        return machine.begin([*words, *map(str, numbers)], self.network.environment)

    async def _said(self, job: Any) -> dict[str, Any]:
        done = await asyncio.to_thread(job.wait, _COMMAND_S)
        if done.status:
            raise RuntimeError(done.output)
        said: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        return said

    async def wait_for_zones(self) -> None:
        """Until shared answers go by RDMA at every node."""
        end = time.monotonic() + 60.0
        while time.monotonic() < end:
            logs = [self.network.machines[node].folder / "0.out" for node in self.nodes]
            if all("go by RDMA" in path.read_text() for path in logs):
                await asyncio.sleep(2.0)  # the map that says so
                return
            await asyncio.sleep(0.2)
        raise RuntimeError("no landing zones")

    async def round(self, readers: int, *, by_data: bool = False) -> dict[str, float]:
        """`readers` nodes read the same blocks at once; what came of it."""
        self._rounds += 1
        numbers = keys_at(self.home, self.nodes, self._next, BLOCKS)
        self._next = numbers[-1] + 1
        folder = self.network.folder
        go = folder / f"go-{self._rounds}"
        group = NO_GROUP if by_data else 0
        await self._said(self._begin(self.home, "put", go, 0, numbers))
        before = await self._said(self._begin(self.home, "counts", go, 0, []))
        jobs = [self._begin(node, "get", go, group, numbers) for node in self.nodes[1:][:readers]]
        end = time.monotonic() + 60.0
        while not all("ready" in job.output() for job in jobs):
            if time.monotonic() > end:
                raise RuntimeError("engines are not ready: " + "; ".join(j.output() for j in jobs))
            await asyncio.sleep(0.1)
        go.touch()
        said = [await self._said(job) for job in jobs]
        after = await self._said(self._begin(self.home, "counts", go, 0, []))
        sent = {name: after[name] - before.get(name, 0.0) for name in after}
        total = BLOCKS * BLOCK_BYTES
        landed = sum(each["landing_chunks_total"] for each in said)
        return {
            "home_egress_ratio": sent["sent_bytes"] / total,
            "blocks_by_rdma": sum(each["requester_blocks_by_write_total"] for each in said),
            "blocks": float(BLOCKS * readers),
            "chunks_sent": sent["writing_chunks_total"],
            "not_taken": readers * sent["writing_chunks_total"] - landed,
            "home_ratio_of_chunks": (
                sent["writing_chunks_total"] * SHARED_CHUNKING.chunk_bytes
                + sent["responder_payload_bytes_total"] * by_data
            )
            / total,
            "wrong_bytes": sum(each["wrong_bytes"] for each in said),
            "missed": sum(each["missed"] for each in said),
            "agent_s_per_byte": sum(each["agent_s"] for each in said) / (readers * total),
            "machine_s_per_byte": sum(each["machine_s"] for each in said) / (readers * total),
            "repairs": sum(each["requester_reads_partial_total"] for each in said),
        }


async def measure() -> dict[str, Any]:
    """All rounds, in a boot of four machines, and one with loss in another; the numbers by name."""
    star = Star.of(4)
    nodes = [host.node_id for host in star.hosts]
    rounds: dict[str, dict[str, float]] = {}
    async with Pool(star, options()) as pool:
        bed = Bed(pool, nodes)
        await bed.wait_for_zones()
        for readers in (1, 2, 3):
            rounds[f"{readers} by RDMA"] = await bed.round(readers)
            rounds[f"{readers} by DATA"] = await bed.round(readers, by_data=True)
    async with Pool(star, options(loss=0.01)) as pool:
        bed = Bed(pool, nodes)
        await bed.wait_for_zones()
        rounds["3 with loss"] = await bed.round(3)
    shared = [rounds[f"{readers} by RDMA"] for readers in (2, 3)]
    by_data = [rounds[f"{readers} by DATA"] for readers in (2, 3)]

    def over(name: str) -> float:
        return sum(each[name] for each in shared) / sum(each[name] for each in by_data)

    return {
        "shared_home_egress_ratio": max(each["home_egress_ratio"] for each in shared),
        "shared_blocks_by_rdma": sum(each["blocks_by_rdma"] for each in shared),
        "shared_blocks": sum(each["blocks"] for each in shared),
        "shared_icrc_dropped": sum(each["not_taken"] for each in shared),
        "shared_loss_egress_ratio": rounds["3 with loss"]["home_egress_ratio"],
        "reader_cpu_over_udp": over("agent_s_per_byte"),
        "reader_machine_cpu_over_udp": over("machine_s_per_byte"),
        "shared_wrong_bytes": sum(each["wrong_bytes"] for each in rounds.values()),
        "shared_missed": sum(each["missed"] for each in rounds.values()),
        "shared_rounds": rounds,
    }


def main(argv: Sequence[str]) -> int:
    """An engine, in a machine."""
    what, go, group, *numbers = argv
    print(json.dumps(asyncio.run(_engine(what, go, int(group), list(map(int, numbers))))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
