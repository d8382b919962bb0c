"""The question: does the switch's memory stay flat over a hundred million packets?

    kvcast bench soak --what switch --frames 100000000 --json FILE

Owns: the mixture of frames, and what is watched. Must not know: the switch's insides. One switch
process, kvcast's program, nine hosts behind UDP tunnels. Host 1 sends what goes to host 2; every
turn also brings READs of all hosts, DATA that several wait for, a segment served from the switch,
and damaged frames of up to 9,216 bytes. Resident memory is read from /proc after the first
hundredth and then a hundred times; the packets are those that the switch says it has processed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcast.bench import switch, traffic
from kvcast.bench import switch_programs as programs
from kvcast.bench.hostile_bytes import mutate
from kvcast.bench.soak.options import SwitchSoakOptions
from kvcast.bench.switch import BenchError
from kvcast.service import provenance

GROWTH_LIMIT_MIB = 8.0
FRAMES_AT_LEAST = 1000
_PROGRESS_S = 10.0
_TURN_S = 1.0
_SETTLE_S = 0.3
"""So that the flood has gone, and the few frames behind it are not lost in its queue."""
_DAMAGED_A_TURN = 200
_FRAME_BYTES = 128
_TURNS_AT_LEAST = 3
"""A segment that fills the switch in one turn is served from it in the next."""


def damaged(rng: random.Random) -> programs.Arrival:
    """A frame that nobody meant: mutated, or noise of any length."""
    meant = programs.reads(programs.KEY, programs.READERS) + programs.data(
        programs.KEY, range(2), last=False
    )
    host, frame = rng.choice(meant)
    if rng.randrange(3) == 0:
        return host, rng.randbytes(rng.choice((0, 1, 13, 14, 60, 1500, 9216)))
    return host, mutate(frame, rng)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 2)


async def run(
    options: SwitchSoakOptions, tell: Callable[[str], None], so_far: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send until the switch has processed that many frames; the report, whose samples are in
    `so_far` all the time. `tell` gets a line every ten seconds. BenchError if the switch dies."""
    frames = options.frames
    if frames < FRAMES_AT_LEAST:
        raise BenchError(f"send at least {FRAMES_AT_LEAST:,} frames")
    rng = random.Random(options.seed)
    processors = switch.Processors.of_this_machine()
    samples: list[tuple[int, float]] = []
    report = {} if so_far is None else so_far
    report |= {"bench": "soak", "provenance": provenance.provenance(), "samples": samples}
    start_s = time.monotonic()
    next_line_s = start_s + _PROGRESS_S
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcast-soak-")))
        hosts = {}
        for host in range(1, programs.HOSTS + 1):
            endpoint = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            endpoint.bind(("127.0.0.1", 0))
            hosts[host] = endpoint
        ours = dict(zip(hosts, switch.free_udp_ports(len(hosts)), strict=True))
        flags = [
            f"{host}=udp:127.0.0.1:{ours[host]}:127.0.0.1:{endpoint.getsockname()[1]}"
            for host, endpoint in hosts.items()
        ]
        stats = folder / "stats.json"
        command = switch.switch_command(flags, "--stats-json", str(stats))
        process = stack.enter_context(switch.started(command, processors.switch))
        await switch.program_switch(process.ready()["grpc"], programs.kvcast())
        for host, endpoint in hosts.items():
            endpoint.connect(("127.0.0.1", ours[host]))
        ordinary = [frame for _, frame in programs.ordinary(4 * switch.JOINED, _FRAME_BYTES)]
        resident = programs.RESIDENT_KEY
        few = [
            *programs.reads(programs.KEY, programs.READERS),
            *programs.data(programs.KEY, range(64), last=True),
            *programs.reads(resident, programs.READERS[:1]),
            *programs.data(resident, range(64), last=True),
            *programs.reads(resident, programs.READERS),
        ]
        processed = turns = 0
        while processed < frames or turns < _TURNS_AT_LEAST:
            turns += 1
            with traffic.Sender(hosts[1], ordinary, 0, processors.sender, switch.JOINED):
                await asyncio.sleep(_TURN_S)
            await asyncio.sleep(_SETTLE_S)
            hosts[1].setsockopt(traffic.SOL_UDP, traffic.UDP_SEGMENT, 0)
            for host, frame in few + [damaged(rng) for _ in range(_DAMAGED_A_TURN)]:
                with contextlib.suppress(OSError):
                    hosts[host].send(frame)
            if process.process.poll() is not None:
                raise BenchError(process.failure())
            counted = json.loads(stats.read_text())
            processed = counted["loop"]["processed"]
            if not samples or processed - samples[-1][0] >= frames // 100:
                samples.append((processed, resident_mib(process.process.pid)))
            if time.monotonic() >= next_line_s:
                next_line_s += _PROGRESS_S
                tell(f"{processed:,} of {frames:,} frames: {samples[-1][1]} MiB")
        await asyncio.sleep(1.5)
        counted = json.loads(stats.read_text())
    early = next(mib for count, mib in samples if count >= frames // 100)
    return report | {
        "frames": counted["loop"]["processed"],
        "frames_out": counted["switch"]["frames_out"],
        "seconds": round(time.monotonic() - start_s, 1),
        "resident_mib_early": early,
        "resident_mib_last": samples[-1][1],
        "growth_mib": round(samples[-1][1] - early, 2),
        "switch": counted["switch"],
    }
