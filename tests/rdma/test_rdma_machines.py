"""A pool of three emulated machines on kvcast's own switch, and in one of them all tests that need
RDMA verbs.

Oracle: bytes that both sides make from a block's number; the agents' counts; pytest's exit status
inside. Cannot see: real cards, and times.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kvcast.bench import rdma_shared
from kvcast.topologies.machines import SOCKET, MachineNetwork
from kvcast.topologies.pool import Pool
from kvcast.topologies.star import Star

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # A slow machine takes minutes to boot the pool, which has limits of its own.
    pytest.mark.timeout(240, func_only=True),
]

ENGINE = """
import asyncio, json, random, sys, time
from kvcast.hostagent.client import AsyncClient

def data_of(number):
    return random.Random(number).randbytes(900_000 + number)

async def main(socket, what, first, last):
    client = await AsyncClient.connect(socket)
    namespace = await client.namespace("t", "m", "1", "l")
    blocks = {n.to_bytes(16, "big"): n for n in range(int(first), int(last))}
    before = await client.stats()
    said = {}
    if what == "put":
        await client.put(namespace, {k: data_of(n) for k, n in blocks.items()})
    else:
        print("asking", flush=True)
        start = time.monotonic()
        outcomes = await client.get_outcomes(namespace, list(blocks), deadline_s=12)
        said["took_s"] = time.monotonic() - start
        said["right"] = said["wrong"] = said["missed"] = 0
        for outcome, number in zip(outcomes, blocks.values(), strict=True):
            block = outcome.block
            kind = "missed" if block is None else (
                "right" if bytes(block.data) == data_of(number) else "wrong")
            said[kind] += 1
            if block is not None:
                block.release()
    stats = await client.stats()
    kinds = ("rdma", "hits", "payload")
    said |= {k: v - before[k] for k, v in stats.items() if k.startswith(kinds)}
    print(json.dumps(said), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Bed:
    """The pool, and engines in its machines."""

    def __init__(self, pool: Pool, network: MachineNetwork) -> None:
        self.pool = pool
        self.network = network
        self._script = network.folder / "engine.py"
        self._script.write_text(ENGINE)

    async def run(self, node: str, *command: str, timeout_s: float = 90.0, **more: str) -> Any:
        """Run a command in a machine; its exit status and what it printed."""
        machine = self.network.machines[node]
        environment = {**self.network.environment, **more}
        return await asyncio.to_thread(machine.run, command, timeout_s, environment)

    def asked(self, node: str) -> int:
        """How many engines there have begun to get."""
        folder = self.network.machines[node].folder
        return sum("asking" in path.read_text() for path in folder.glob("*.out"))

    def wait_until_asked(self, node: str, times: int) -> None:
        """Wait until so many engines there have begun to get."""
        while self.asked(node) < times:
            time.sleep(0.02)

    async def engine(self, node: str, what: str, first: int, last: int) -> dict[str, Any]:
        """What an engine says that puts, or gets, the blocks of these numbers; counts are what the
        agent counted meanwhile."""
        words = (sys.executable, str(self._script), SOCKET, what, str(first), str(last))
        done = await self.run(node, *words)
        assert done.status == 0, done.output
        said: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed() -> AsyncIterator[Bed]:
    async with Pool(Star.of(3), rdma_shared.options()) as pool:
        assert isinstance(pool.network, MachineNetwork)
        yield Bed(pool, pool.network)


@pytest_asyncio.fixture(loop_scope="module")
async def shared(bed: Bed) -> AsyncIterator[rdma_shared.Bed]:
    shared = rdma_shared.Bed(bed.pool, ["node-1", "node-2", "node-3"])
    await shared.wait_for_zones()
    yield shared
    shared.end()


async def test_blocks_cross_the_switch_by_rdma(bed: Bed) -> None:
    # A slow machine may not make its first pair with another in time: then TCP takes over, and the
    # pair is tried again.
    for first in range(0, 32, 8):
        put = await bed.engine("node-1", "put", first, first + 8)
        got = await bed.engine("node-2", "get", first, first + 8)
        assert (got["right"], got["wrong"], got["missed"]) == (8, 0, 0)
        # What node 2 is home of was written into its memory; it reads the rest from node 1's.
        by_rdma = got["rdma_blocks_read_total"] + got["hits_local_total"]
        if put["payload_bytes_sent_bulk_put_total"] == 0 and by_rdma == 8:
            break
    assert (put["payload_bytes_sent_bulk_put_total"], by_rdma) == (0, 8)
    assert (put["rdma_fallbacks_total"], got["rdma_fallbacks_total"]) == (0, 0)


async def test_shared_blocks_are_written_once_into_the_memory_of_all_who_wait(
    shared: rdma_shared.Bed,
) -> None:
    """Blocks of one segment, which all readers have asked for before the home answers: what is
    sent more often than once then was no matter of time."""
    for readers in (1, 2):
        done = await shared.round(readers, blocks=8, block_bytes=60_000)
        assert (done["wrong_bytes"], done["missed"]) == (0, 0)
        assert done["icrc_dropped"] == 0, "a card refused a copy"
        assert done["blocks_by_rdma"] == done["blocks"]
        assert done["home_egress_ratio"] <= 1.05
    done = await shared.round(2, by_data=True, blocks=8, block_bytes=60_000)
    assert (done["wrong_bytes"], done["missed"], done["blocks_by_rdma"]) == (0, 0, 0)
    done = await shared.round(2)
    assert (done["wrong_bytes"], done["missed"], done["icrc_dropped"]) == (0, 0, 0)


async def test_shared_blocks_come_right_where_packets_are_lost(shared: rdma_shared.Bed) -> None:
    await shared.lose(0.01)
    done = await shared.round(2)
    assert (done["wrong_bytes"], done["missed"]) == (0, 0)
    await shared.lose(0.0)


async def test_a_home_that_is_killed_in_the_middle_of_reads_costs_no_wrong_byte(bed: Bed) -> None:
    await bed.engine("node-1", "put", 100, 124)
    asked = bed.asked("node-2")
    reading = asyncio.create_task(bed.engine("node-2", "get", 100, 124))
    await asyncio.to_thread(bed.wait_until_asked, "node-2", asked + 1)
    await bed.run("node-1", "pkill", "-9", "-f", "kvcast.hostagent.daemon", timeout_s=20.0)
    got = await reading
    assert got["wrong"] == 0
    assert got["right"] + got["missed"] == 24
    assert got["took_s"] < 20


@pytest.mark.timeout(600, func_only=True)
async def test_all_that_needs_verbs_in_one_process_passes_inside(bed: Bed) -> None:
    """The last one: the other machines are powered off, so that this has their processors."""
    for node in ("node-1", "node-3"):
        bed.network.machines[node].ask_to_end()
        await asyncio.to_thread(bed.network.machines[node].end, 20.0)
    here = Path(__file__).parent
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["--timeout=240", "--rootdir", str(here.parents[1]), str(here)]
    done = await bed.run("node-2", *words, timeout_s=540.0, KVCAST_RDMA_BED="inside")
    print(done.output)
    assert done.status == 0, done.output
