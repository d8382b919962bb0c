"""The part of `kvcast.bench.rdma_shared` that runs in a machine: a process that plays engines
there, as files ask it to.

Owns: what an engine does in a round, and what it counts of its machine meanwhile. Must not know:
what the counts mean. It imports little, since that takes an emulated processor long.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, Final

from kvcast.bench.processor_time import machine_time
from kvcast.hostagent.client import AsyncClient
from kvcast.native.linux import SOL_PACKET
from kvcast.protocol.messages.roce import ROCE_UDP_PORT
from kvcast.protocol.messages.wire import digest_of
from kvcast.topologies.machines import DEVICE, SOCKET

GATHER_MS: Final = 250
TCP_PORT: Final = 18_700
DEADLINE_S: Final = 90.0
_SETTLED_S: Final = 0.5
_IDLE_S: Final = 4.0


def _block(number: int, size_bytes: int) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def _agent_pid() -> int:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        if b"--node-id=" in entry.read_bytes():
            return int(entry.parent.name)
    raise RuntimeError("there is no agent")


def _bind(agents: set[int], others: set[int]) -> None:
    """Which processors the agent has, and which whatever else runs here; what comes for the network
    card keeps to the first of these."""
    for name in Path("/proc/irq").glob("[0-9]*/smp_affinity"):
        with contextlib.suppress(OSError):  # a timer's, say
            name.write_text(str(1 << min(others)))
    agent = _agent_pid()
    for task in Path("/proc").glob("[0-9]*/task/*"):
        mine = task.parts[2] == str(agent)
        with contextlib.suppress(OSError):  # a kernel's thread of one processor, or it has ended
            os.sched_setaffinity(int(task.name), agents if mine else others)


class _Times:
    """Processor time so far of the agent, and of its machine: all of it, and what its kernel does
    for the network (softirq), in place of a card's RDMA, too."""

    def __init__(self) -> None:
        self._agent = Path(f"/proc/{_agent_pid()}/stat")

    def now(self) -> dict[str, float]:
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        agent = self._agent.read_text().rsplit(")", 1)[1].split()
        machine = machine_time()
        return {
            "agent_s": (int(agent[11]) + int(agent[12])) * tick_s,
            "agent_system_s": int(agent[12]) * tick_s,
            "machine_s": machine.busy_s,
            "softirq_s": machine.softirq_s,
        }


async def _idle() -> dict[str, float]:
    """What the agent takes a second when nothing is asked of it."""
    times = _Times()
    before, began = times.now(), time.monotonic()
    await asyncio.sleep(_IDLE_S)
    after = times.now()
    elapsed_s = time.monotonic() - began
    return {name: (value - before[name]) / elapsed_s for name, value in after.items()}


class _Arrivals:
    """Counts the RoCE packets that reach this machine's network card, refused ones included."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        # Classic BPF on an Ethernet frame: UDP (23 = 17), not a later fragment (20), port (36).
        program = (
            (0x30, 0, 0, 23), (0x15, 0, 5, 17),
            (0x28, 0, 0, 20), (0x45, 3, 0, 0x1FFF),
            (0x28, 0, 0, 36), (0x15, 0, 1, ROCE_UDP_PORT),
            (0x06, 0, 0, 1), (0x06, 0, 0, 0),
        )  # fmt: skip
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
        self._code = ctypes.create_string_buffer(code, len(code))
        words = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(self._code))
        self._socket.setsockopt(socket.SOL_SOCKET, 26, words)  # SO_ATTACH_FILTER
        self._socket.bind(("eth0", 0x0800))

    def count(self) -> int:
        """Since it was made, or asked last. What finds the socket full is counted too."""
        packets, _ = struct.unpack("=II", self._socket.getsockopt(SOL_PACKET, 6, 8))
        return int(packets)


def _datagrams_sent() -> int:
    """UDP's, of this machine so far: READs, since everything else of an agent's goes by TCP."""
    names, numbers = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Udp:" in line
    )
    return int(numbers[names.index("OutDatagrams")])


def _counts(stats: dict[str, Any]) -> dict[str, float]:
    """What the agent and its machine's card have counted."""
    card = Path(f"/sys/class/infiniband/{DEVICE}/ports/1/hw_counters")
    wanted = ("writing_", "landing_", "requester_", "responder_")
    counts = {name: value for name, value in stats.items() if name.startswith(wanted)}
    return counts | {
        "sent_bytes": float(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text()),
        "card_packets": float((card / "rcvd_pkts").read_text()),
    }


async def _play(folder: Path) -> None:
    """Do what the files there ask for, one after the other, and write beside them what came."""
    client: AsyncClient | None = None
    for number in itertools.count():
        ask = folder / f"{number}.ask"
        while not ask.exists():  # noqa: ASYNC110  # files are what both sides see
            await asyncio.sleep(0.05)
        what, group, numbers, size_bytes = json.loads(ask.read_text())
        if what == "end":
            return
        said: dict[str, Any] = {}
        if what == "bind":
            _bind({1}, {0})
            said = await _idle()
        elif what == "unbind":
            _bind({0, 1}, {0, 1})
        elif what in ("stop", "go on"):
            os.kill(_agent_pid(), signal.SIGSTOP if what == "stop" else signal.SIGCONT)
        elif what == "connect":
            client = await AsyncClient.connect(SOCKET)
            said = {"namespace": await _namespace(client)}
        elif what == "serve":
            _serve(ask.with_suffix(".ready"), group, numbers, size_bytes)
        elif what.startswith("bare "):
            said = await _bare(what.split()[1:], ask, group, len(numbers))
        elif what.startswith("fetch "):
            said = await _fetch(what.split()[1], folder / f"{number}.go", numbers, size_bytes)
        else:
            assert client is not None
            go = folder / f"{number}.go"
            said = await _engine(client, what, go, group, numbers, size_bytes)
        file = folder / f"{number}.new"
        file.write_text(json.dumps(said))
        file.rename(folder / f"{number}.said")


async def _namespace(client: AsyncClient) -> int:
    """Of one tenant in a pool, so that no secret changes where keys belong."""
    return await client.namespace("t", "m", "1", "l")


def _serve(ready: Path, readers: int, numbers: list[int], size_bytes: int) -> None:
    """What a store without kvcast does: send so many readers the blocks, each by its own TCP."""
    blocks = [_block(number, size_bytes) for number in numbers]
    with socket.create_server(("", TCP_PORT)) as server:
        ready.touch()
        for _ in range(readers):
            connection, _address = server.accept()
            with connection:
                for block in blocks:
                    connection.sendall(block)


async def _fetch(ip: str, go: Path, numbers: list[int], size_bytes: int) -> dict[str, Any]:
    """Read the blocks from there, and make their digests, on the agent's processor."""
    rooms = [bytearray(size_bytes) for _ in numbers]
    await _hand_over(go, "ready", "go")
    os.sched_setaffinity(0, {1})
    start_s = time.process_time()
    with socket.create_connection((ip, TCP_PORT)) as connection:
        for room in rooms:
            view = memoryview(room)
            while view:
                got = connection.recv_into(view)
                if not got:
                    raise RuntimeError("the other end has closed")
                view = view[got:]
            digest_of(room)
    took_s = time.process_time() - start_s
    os.sched_setaffinity(0, {0})
    await _hand_over(go, "got", "on")
    wrong = [n for n, r in zip(numbers, rooms, strict=True) if r != _block(n, size_bytes)]
    return {
        "wrong_bytes": len(wrong) * size_bytes,
        "missed": 0,
        "agent_s": took_s,
        "elapsed_s": 0.0,
    }


async def _bare(words: list[str], ask: Path, checks: int, segments: int) -> dict[str, float]:
    """One end of WRITEs without agents: "take" from whom, or "send" to whom, and where to."""
    from kvcast.bench import rdma_bare  # others need none of it

    what, own, peer, *whose = words
    if what == "send":
        await rdma_bare.send(own, peer, int(whose[0]), int(whose[1]), segments)
        return {}

    def ready(where: str) -> None:
        file = ask.with_suffix(".where")
        file.write_text(where)
        file.rename(ask.with_suffix(".ready"))

    return await rdma_bare.take(own, peer, ready, segments, checks=bool(checks))


async def _hand_over(go: Path, here: str, there: str) -> None:
    """Say that we are so far, and wait for the other side."""
    go.with_suffix(f".{here}").touch()
    while not go.with_suffix(f".{there}").exists():  # noqa: ASYNC110  # both sides see files
        await asyncio.sleep(0.005)


async def _engine(
    client: AsyncClient, what: str, go: Path, group: int, numbers: list[int], size_bytes: int
) -> dict[str, Any]:
    namespace = await _namespace(client)
    if what == "put":
        for number in numbers:
            await client.put(namespace, {number.to_bytes(16, "big"): _block(number, size_bytes)})
        return {}
    if what == "counts":
        return _counts(await client.stats())
    wanted = {number: _block(number, size_bytes) for number in numbers}
    before, times, arrivals = _counts(await client.stats()), _Times(), _Arrivals()
    await _hand_over(go, "ready", "go")
    start = time.monotonic()
    began, first = times.now(), _datagrams_sent()
    sent = first
    getting = asyncio.create_task(
        client.get_outcomes(
            namespace,
            [number.to_bytes(16, "big") for number in numbers],
            deadline_s=DEADLINE_S,
            gather_ms=0 if what == "get alone" else GATHER_MS,
            group=group,
        )
    )
    while (
        what != "get alone" and not getting.done()
    ):  # until it has asked for something, and then for nothing more
        await asyncio.sleep(_SETTLED_S)
        sent, earlier = _datagrams_sent(), sent
        if sent == earlier != first:
            break
    go.with_suffix(".asked").touch()
    outcomes = await getting
    ended, elapsed_s = times.now(), time.monotonic() - start
    await _hand_over(go, "got", "on")
    after = _counts(await client.stats())
    after["arrived"] = float(arrivals.count())
    wrong_bytes = missed = 0
    for outcome, data in zip(outcomes, wanted.values(), strict=True):
        if outcome.block is None:
            missed += 1
            continue
        got = bytes(outcome.block.data)
        if got != data:
            wrong_bytes += sum(a != b for a, b in zip(got, data, strict=True))
        outcome.block.release()
    after |= {name: value - began[name] for name, value in ended.items()}
    moved = {name: after[name] - before.get(name, 0.0) for name in after}
    return moved | {"wrong_bytes": wrong_bytes, "missed": missed, "elapsed_s": elapsed_s}


if __name__ == "__main__":
    asyncio.run(_play(Path(sys.argv[1])))
