"""The question: how near do READs come to what two sockets on this machine can carry?

Owns: one home and one reader, each a process with the agent's cores and datagram adapter and
nothing else, over loopback; and beside them, in the same run, a bare pair: compiled code that sends
datagrams of the same length with the same offloads, and compiled code that takes them and looks at
nothing. Must not know: how either moves a frame.

    python -m kvcast.bench.read_path --path tunnel

`read_path_over_bare` = chunks a second that the reader put in place, over datagrams a second that
the bare receiver got. Every READ is answered by the home, every byte goes into the reader's arena,
and every block's digest is compared; the bytes of the last round are compared one by one.
`home_ns_a_byte` and `reader_ns_a_byte` are processor time, which a crowded machine changes less
than it changes the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from kvcast.bench.sides import hear, running, tell
from kvcast.bench.traffic import BATCH, SOL_UDP, UDP_GRO, Native, Sender, Traffic
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.fetches import GetBatch
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network.datagrams import (
    Transport,
    TunnelTransport,
    UdpTransport,
    open_udp,
)
from kvcast.hostagent.tiers.arena import SLAB_BYTES, Allocator, ArenaFile
from kvcast.native.linux import MSG_WAITFORONE, recvmmsg
from kvcast.native.subset import I32, Library, atomic_load, native, unsigned
from kvcast.protocol.messages.control import NamespaceInfo, NodeInfo, PoolMap
from kvcast.protocol.messages.ethernet import FRAME_OVERHEAD_BYTES, Endpoint, parse_ip, parse_mac
from kvcast.protocol.messages.wire import (
    BUCKETS,
    CHUNKINGS,
    HEADER_BYTES,
    UDP_PORT,
    BlockId,
    digest_of,
)
from kvcast.service import provenance

PATHS: Final = ("udp", "udp-joined", "tunnel")
NAMESPACE: Final = 1
HOME, READER = 0, 1
_IPS: Final = ("127.0.0.1", "127.0.0.2")
_MACS: Final = ("02:6b:76:00:00:01", "02:6b:76:00:00:02")
_BUFFER_BYTES: Final = 8 << 20
_PIECE_BYTES: Final = 61_000
"""What the bare sender hands over at once where the agent may, too."""


@dataclass(frozen=True)
class Settings:
    """One measurement."""

    path: str = "udp"
    """ "udp": kernel UDP, each datagram by itself; "udp-joined": in pieces (UDP_SEGMENT);
    "tunnel": Ethernet frames, in pieces."""
    block_bytes: int = 2 << 20
    blocks: int = 8
    """Asked for in one get."""
    seconds: float = 3.0
    """Of reading, and of the bare pair."""
    chunk_bytes: int = CHUNKINGS[-1].chunk_bytes
    """Of a chunk; the largest is what agents choose over loopback."""


# --- one side ---------------------------------------------------------------------------------


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _block(settings: Settings, number: int) -> bytes:
    return random.Random(number).randbytes(settings.block_bytes)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _pool(ports: Sequence[int], chunk_bytes: int) -> PoolMap:
    nodes = [
        NodeInfo(index, f"node-{index}", _IPS[index], _MACS[index], index, ports[index], _IPS[0], 0)
        for index in (HOME, READER)
    ]
    info = NamespaceInfo(NAMESPACE, "bench", "m", "1", "l", [])
    return PoolMap(1, nodes, [[HOME] for _ in range(BUCKETS)], [info], [], chunk_bytes)


async def _listen(lines: asyncio.Queue[str]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        await lines.put(line.decode())
    await lines.put("")


async def _side(index: int, settings: Settings) -> None:
    """One process: says its port, is told the other's, and then serves or reads."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    listening = asyncio.create_task(_listen(lines))
    size_bytes = max(64 << 20, 4 * settings.blocks * settings.block_bytes)
    arena = ArenaFile(size_bytes, None, reserve=True)
    store = Store(Allocator(size_bytes, SLAB_BYTES))
    agent = AgentOptions(f"node-{index}", lone_reads_by_tcp=False)
    core = AgentCore(agent, store, arena.memory, random.Random(index))
    sock, _ = open_udp(_IPS[index], 0, _BUFFER_BYTES)
    own_port = sock.getsockname()[1]
    _say({"port": own_port})
    ports = json.loads(await lines.get())
    transport: Transport
    if settings.path == "tunnel":
        sock.connect((_IPS[1 - index], ports[1 - index]))
        own = Endpoint(parse_mac(_MACS[index]), parse_ip(_IPS[index]), UDP_PORT)
        transport = TunnelTransport(core, sock, own)
        ports = [UDP_PORT, UDP_PORT]
    else:
        transport = UdpTransport(core, sock, joins=settings.path == "udp-joined")
    core._index = index
    core.control_message(0.0, _pool(ports, settings.chunk_bytes))
    transport.start()
    try:
        if index == HOME:
            for number in range(settings.blocks):
                data = _block(settings, number)
                copy = store.reserve(BlockId(NAMESPACE, _key(number)), len(data))
                arena.memory[copy.offset : copy.offset + len(data)] = data
                store.commit(copy, digest_of(data), home=True)
            before = time.process_time()
            _say({"ready": True})
            await lines.get()
            _say(_costs(before, core))
        else:
            _say({"ready": True})
            await lines.get()
            await _read(settings, core, transport)
    finally:
        transport.close()
        core.close()
        arena.close()
        listening.cancel()


async def _read(settings: Settings, core: AgentCore, transport: Transport) -> None:
    loop = asyncio.get_running_loop()
    keys = [_key(number) for number in range(settings.blocks)]
    blocks = missed = 0

    async def get() -> list[memoryview]:
        """All blocks, fetched anew; valid until the next call."""
        nonlocal blocks, missed
        for key in keys:
            core.store.drop(BlockId(NAMESPACE, key))
        answered: asyncio.Future[GetBatch] = loop.create_future()
        now = loop.time()
        core.reads.get(now, NAMESPACE, keys, now + 30.0, answered.set_result)
        transport.pump()
        batch = await answered
        views = []
        for item in batch.items:
            if item is None or item.copy is None:
                missed += 1
                continue
            blocks += 1
            copy = item.copy
            views.append(core.memory[copy.offset : copy.offset + copy.size_bytes])
            core.store.unpin(copy)
        return views

    await get()  # the window opens, code is loaded
    blocks = 0
    before = time.process_time()
    start = time.perf_counter()
    took_ms = []
    while (now := time.perf_counter()) < start + settings.seconds:
        await get()
        took_ms.append((time.perf_counter() - now) * 1e3)
    elapsed_s = time.perf_counter() - start
    costs = _costs(before, core)
    counted = blocks
    wrong = sum(bytes(view) != _block(settings, number) for number, view in enumerate(await get()))
    _say(
        costs
        | {
            "bytes": counted * settings.block_bytes,
            "elapsed_s": elapsed_s,
            "missed": missed,
            "wrong_blocks": wrong,
            "get_ms": sorted(took_ms)[len(took_ms) // 2],
        }
    )


def _costs(before: float, core: AgentCore) -> dict[str, Any]:
    values = core.values()
    return {
        "processor_s": time.process_time() - before,
        "drops": values["frames_dropped_receiving_total"],
        "retries": values["retries_total"],
    }


# --- the bare pair ----------------------------------------------------------------------------


@native
def take_all(traffic: Traffic, source: I32) -> None:
    """Take what arrives, all of its bytes, until `stop`; the socket has a timeout."""
    while atomic_load(traffic.stop) == 0:
        arrived = recvmmsg(source, traffic.messages, BATCH, MSG_WAITFORONE, 0)
        if arrived > 0:
            for i in range(unsigned(arrived)):
                traffic.received += traffic.messages[i].length


def bare_datagrams_per_s(settings: Settings) -> float:
    """What compiled code sends and takes on this machine: datagrams received a second."""
    length = HEADER_BYTES + settings.chunk_bytes
    length += FRAME_OVERHEAD_BYTES if settings.path == "tunnel" else 0
    joined = 1 if settings.path == "udp" else _PIECE_BYTES // length
    receiver, _ = open_udp(_IPS[READER], 0, _BUFFER_BYTES)
    sender, _ = open_udp(_IPS[HOME], 0, _BUFFER_BYTES)
    taken = Native(BATCH, [bytes(65_536)] * BATCH)
    with receiver, sender:
        sender.setblocking(True)
        receiver.setblocking(True)
        sender.connect(receiver.getsockname())
        receiver.setsockopt(SOL_UDP, UDP_GRO, 1)
        receiver.settimeout(None)
        timeout = (200_000).to_bytes(8, sys.byteorder)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(8) + timeout)
        library = Library(take_all)
        thread = threading.Thread(
            target=library.call(take_all), args=(taken.address, receiver.fileno()), daemon=True
        )
        frames = [bytes(length)] * (BATCH * joined)
        thread.start()
        try:
            with Sender(sender, frames, 0, os.sched_getaffinity(0), joined):
                time.sleep(0.2)
                before, start = int(taken.state.received), time.perf_counter()
                time.sleep(settings.seconds)
                received = int(taken.state.received) - before
                elapsed_s = time.perf_counter() - start
        finally:
            taken.state.stop = 1
            thread.join()
    return received / length / elapsed_s


# --- both -------------------------------------------------------------------------------------


def _process(index: int, settings: Settings) -> AbstractContextManager[subprocess.Popen[str]]:
    return running(
        *("kvcast.bench.read_path", "--side", str(index)),
        *("--path", settings.path, "--seconds", str(settings.seconds)),
        *("--blocks", str(settings.blocks), "--block-bytes", str(settings.block_bytes)),
        *("--chunk-bytes", str(settings.chunk_bytes)),
    )


def measure(settings: Settings) -> dict[str, Any]:
    """Read, then send bare, for `settings.seconds` each; the numbers by name. RuntimeError if a
    process ends early."""
    with _process(HOME, settings) as home, _process(READER, settings) as reader:
        ports = [hear(side)["port"] for side in (home, reader)]
        for side in (home, reader):
            tell(side, ports)
        for side in (home, reader):
            assert hear(side)["ready"]
        tell(reader, "go")
        read = hear(reader)
        tell(home, "over")
        served = hear(home)
    chunks_per_s = read["bytes"] / settings.chunk_bytes / read["elapsed_s"]
    bare_per_s = bare_datagrams_per_s(settings)
    # The home also served the rounds before and behind the reader's count.
    served_bytes = read["bytes"] + 2 * settings.blocks * settings.block_bytes
    return {
        "path": settings.path,
        "chunk_bytes": settings.chunk_bytes,
        "block_bytes": settings.block_bytes,
        "blocks": settings.blocks,
        "read_path_over_bare": chunks_per_s / bare_per_s,
        "chunks_per_s": chunks_per_s,
        "bare_datagrams_per_s": bare_per_s,
        "get_ms": read["get_ms"],
        "home_ns_a_byte": served["processor_s"] / served_bytes * 1e9,
        "reader_ns_a_byte": read["processor_s"] / read["bytes"] * 1e9,
        "missed": read["missed"],
        "wrong_blocks": read["wrong_blocks"],
        "retries": read["retries"],
        "dropped_by_kernel": read["drops"] + served["drops"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.read_path", description=(__doc__ or "").split("\n", 1)[0]
    )
    default = Settings()
    parser.add_argument("--path", choices=PATHS, default=default.path)
    parser.add_argument("--block-bytes", type=int, default=default.block_bytes)
    parser.add_argument("--blocks", type=int, default=default.blocks)
    parser.add_argument("--seconds", type=float, default=default.seconds)
    parser.add_argument(
        "--chunk-bytes",
        type=int,
        choices=[chunking.chunk_bytes for chunking in CHUNKINGS],
        default=default.chunk_bytes,
    )
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    settings = Settings(
        arguments.path,
        arguments.block_bytes,
        arguments.blocks,
        arguments.seconds,
        arguments.chunk_bytes,
    )
    if arguments.side is not None:
        asyncio.run(_side(arguments.side, settings))
        return 0
    print(json.dumps(measure(settings) | {"provenance": provenance.provenance()}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
