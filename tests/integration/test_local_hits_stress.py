"""Clients at full speed, in processes of their own, while their agent evicts and clients are
killed.

Each client gets random blocks, checks every byte of what it got, also after it has held it for a
while, and puts more than the arena holds. Some are killed in the middle, others take their place.
Oracle: a block's bytes follow from its key; and when all clients are gone nothing stays pinned. It
runs on real processors with real barriers; how their steps interleave is up to them
(tests/property/ test_shared_index_property.py chooses).
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hostagent_harness import running_pool, until
from kvcast.hostagent import membarrier

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not membarrier.available(), reason="no membarrier(2), or not x86-64"),
]

SECONDS = 10.0
KEYS = 150
"""Some 6 MiB of blocks, where the arena has 4."""
CLIENTS = 3

CLIENT = textwrap.dedent(
    """
    import random, sys, time
    from kvcast.hostagent.client import Client, PutError
    path, seed, seconds, keys = sys.argv[1], *map(int, sys.argv[2:])
    rng = random.Random(seed)

    def content(key):
        return random.Random(key).randbytes(1 + int.from_bytes(key, "big") * 541 % 80_000)

    contents = {}
    def expected(key):
        if key not in contents:
            contents[key] = content(key)
        return contents[key]

    def wrong(blocks):
        for block in blocks:
            if block.data != expected(block.key):
                print("WRONG", block.key.hex(), flush=True)
                sys.exit(3)

    end = time.monotonic() + seconds
    gets = local = held = 0
    with Client(path, name="stress", read_only=False) as client:
        print("ready", flush=True)
        kept = []
        while time.monotonic() < end:
            names = [rng.randrange(keys).to_bytes(16, "big") for _ in range(rng.randint(1, 6))]
            blocks = [b for b in client.get(1, names, deadline_s=0.0) if b is not None]
            gets += len(names)
            local += sum(b.tier == "local" for b in blocks)
            wrong(blocks)
            kept.append(blocks)
            if len(kept) > rng.randrange(6):
                old = kept.pop(0)
                wrong(old)
                for block in old:
                    block.release()
            if rng.random() < 0.2:
                key = rng.randrange(keys).to_bytes(16, "big")
                try:
                    client.put(1, {key: expected(key)})
                except PutError:
                    held += 1
            client.exists(1, names)
    print("done", gets, local, held, flush=True)
    """
)


@pytest.mark.timeout(150)
async def test_no_client_ever_reads_other_bytes_and_the_dead_leave_nothing_pinned(
    tmp_path: Path,
) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    async with running_pool(tmp_path, 1) as pool:
        core = pool.agents[1].core
        loop = asyncio.get_running_loop()

        def start(number: int) -> subprocess.Popen[str]:
            socket = str(tmp_path / "1.sock")
            arguments = [socket, str(seed + number), str(int(SECONDS)), str(KEYS)]
            return subprocess.Popen(
                [sys.executable, "-c", CLIENT, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        started = CLIENTS
        running = [start(number) for number in range(CLIENTS)]
        said: list[str] = []
        killed = 0

        def much_has_happened() -> bool:
            counters = core.counters()
            hits, evictions = counters["index_hits_total"], counters["store_evictions_total"]
            return killed > 4 and hits > 1000 and evictions > 100

        try:
            deadline = loop.time() + SECONDS
            while loop.time() < deadline - 3.0 or not much_has_happened():
                await asyncio.sleep(rng.uniform(0.3, 1.2))
                victim = running.pop(rng.randrange(len(running)))
                victim.send_signal(signal.SIGKILL)
                said.append((await asyncio.to_thread(victim.communicate))[0])
                killed += 1
                running.append(start(started))
                started += 1
                core.store.check()
            await asyncio.sleep(1.0)
        finally:
            said += [(await asyncio.to_thread(p.communicate))[0] for p in running]
        where = f"seed {seed}: {said}"
        assert not [text for text in said if "WRONG" in text or "Traceback" in text], where
        assert [p.returncode for p in running] == [0] * CLIENTS, where
        server = pool.agents[1]._local_server
        await until(lambda: len(server._clients) == 1)  # the harness's own
        assert much_has_happened(), where
        counters = core.counters()
        assert counters["index_offences_total"] == 0
        assert counters["local_protocol_errors_total"] == 0
        assert not any(copy.pins for copy in core.store._by_offset.values())
        assert core.store.held_bytes == 0
        core.store.check()
