"""simple_switch_grpc with the data plane, in a network namespace of its own with a veth a host.

The switch and both ends of every veth live in the namespace; the tests' sockets are made there by
a thread that enters it. P4Runtime comes out of it by a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import finsy as fy
from kvcast.p4 import artefact
from kvcast.topologies.namespaces import CLONE_NEWNET
from pool_switch import DECISIONS, FILLS, Entry, pool_entries, pool_groups

_SOL_PACKET, _PACKET_IGNORE_OUTGOING = 263, 23
_ETH_P_ALL = 3
START_TIMEOUT_S = 30.0
FRAME_TIMEOUT_S = 5.0


def find_bmv2() -> str | None:
    return shutil.which(os.environ.get("KVCAST_SIMPLE_SWITCH_GRPC", "simple_switch_grpc"))


def packet_sockets(namespace: str, interfaces: Sequence[str]) -> list[socket.socket]:
    """An AF_PACKET socket on each interface of a namespace."""
    made: list[socket.socket] = []

    def make() -> None:
        with open(f"/run/netns/{namespace}") as target:
            if ctypes.CDLL(None).setns(target.fileno(), CLONE_NEWNET) != 0:
                return
        for interface in interfaces:
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            sock.bind((interface, _ETH_P_ALL))
            made.append(sock)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(made) == len(interfaces), "cannot enter the namespace"
    return made


MARKER_MAC = 0x026B76FFFFFF
MARKER = MARKER_MAC.to_bytes(6, "big") + bytes(6) + b"\x88\xb5" + bytes(46)
"""A frame of an EtherType for experiments (IEEE 802), to a port of its own."""


class Bmv2Pool:
    """BMv2 with hosts 1 to N on ports 1 to N, and on port N + 1 a listener for markers.

    BMv2 reads its ports each in a thread of its own, so two frames on two ports may overtake each
    other. A marker behind each frame, on the same port, says when the frame has been processed.
    """

    def __init__(self, client: fy.Switch, sockets: Sequence[socket.socket]) -> None:
        self.client = client
        self.marker_port = len(sockets)
        self.sockets = dict(enumerate(sockets, start=1))
        self.marker_entry = Entry(
            "l2_forward", (MARKER_MAC,), "to_port", (self.marker_port, 1 << (self.marker_port - 1))
        )

    async def add(self, entries: Iterable[Entry]) -> None:
        await self.client.write([+self.entry(entry) for entry in entries])

    async def delete(self, entry: Entry) -> None:
        await self.client.write([-self.entry(entry)])

    async def set_group(self, group: int, replicas: Sequence[tuple[int, int]]) -> None:
        await self.client.write([+fy.P4MulticastGroupEntry(group, replicas=list(replicas))])

    async def set_settings(self, enabled: int, lease_ticks: int, heat_threshold: int) -> None:
        action = fy.P4TableAction(
            "set_settings",
            enabled=enabled,
            lease_ticks=lease_ticks,
            heat_threshold=heat_threshold,
        )
        await self.client.write(
            [~fy.P4TableEntry("settings", action=action, is_default_action=True)]
        )

    def entry(self, entry: Entry) -> fy.P4TableEntry:
        table = self.client.p4info.tables[entry.table]
        action = self.client.p4info.actions[entry.action]
        fields = [field.alias for field in table.match_fields]
        params = [param.name for param in action.params]
        return fy.P4TableEntry(
            entry.table,
            match=fy.P4TableMatch(dict(zip(fields, entry.key, strict=True))),
            action=fy.P4TableAction(entry.action, **dict(zip(params, entry.params, strict=True))),
        )

    def exchange(self, port: int, frame: bytes, expected: dict[int, int]) -> dict[int, list[bytes]]:
        """Send a frame into a port; take as many frames out of each port as are expected."""
        self.sockets[port].send(frame)
        self.sockets[port].send(MARKER)
        assert self.receive(self.marker_port, 1) == [MARKER]
        return {out: self.receive(out, count) for out, count in expected.items()}

    def receive(self, port: int, count: int) -> list[bytes]:
        sock = self.sockets[port]
        sock.settimeout(FRAME_TIMEOUT_S)
        frames: list[bytes] = []
        with contextlib.suppress(TimeoutError):
            while len(frames) < count:
                frames.append(sock.recv(16_384))
        return frames

    def stray(self) -> dict[int, bytes]:
        """A frame that nobody took, by port."""
        time.sleep(0.3)
        left = {}
        for port, sock in self.sockets.items():
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                left[port] = sock.recv(16_384)
        return left

    async def counts(self, table: str) -> dict[str, int]:
        """Packets by name, of `decisions` or `fills`."""
        (field,) = self.client.p4info.tables[table].match_fields
        names = {
            code: name for name, code in {"decisions": DECISIONS, "fills": FILLS}[table].items()
        }
        counts = {}
        query = fy.P4TableEntry(table, counter_data=fy.P4CounterData())
        async for entry in self.client.read(query):
            assert isinstance(entry, fy.P4TableEntry)
            assert entry.match is not None
            assert entry.counter_data is not None
            code = entry.match[field.alias]
            assert isinstance(code, int)
            counts[names[code]] = entry.counter_data.packet_count
        return counts

    async def hits(self, slot: int) -> int:
        async for entry in self.client.read(fy.P4CounterEntry("resident_hits", index=slot)):
            assert isinstance(entry, fy.P4CounterEntry)
            return entry.packet_count
        raise AssertionError("no such counter")


@contextlib.contextmanager
def _namespace(ports: int) -> Iterator[str]:
    """A network namespace with a veth for each port: sN for the switch, hN for who is there."""
    name = f"kvcast-p4-{secrets.token_hex(4)}"
    inside = ("ip", "-n", name)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(
            ["ip", "netns", "exec", name, "sysctl", "-qw",
             "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"],
            check=True,
        )  # fmt: skip
        subprocess.run([*inside, "link", "set", "lo", "up"], check=True)
        for port in range(1, ports + 1):
            subprocess.run(
                [*inside, "link", "add", f"s{port}", "type", "veth", "peer", "name", f"h{port}"],
                check=True,
            )
            for interface in (f"s{port}", f"h{port}"):
                subprocess.run([*inside, "link", "set", interface, "up", "mtu", "9000"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@contextlib.asynccontextmanager
async def bmv2_pool(folder: Path, hosts: int) -> AsyncIterator[Bmv2Pool]:
    """BMv2 with the data plane loaded, `pool_entries` written and the switch program off."""
    program = find_bmv2()
    assert program is not None
    with _namespace(hosts + 1) as namespace:
        sockets = packet_sockets(namespace, [f"h{port}" for port in range(1, hosts + 2)])
        address = f"unix:{folder / 'p4runtime'}"
        ports = [flag for host in range(1, hosts + 2) for flag in ("-i", f"{host}@s{host}")]
        with (folder / "bmv2.log").open("w") as log:
            process = await asyncio.create_subprocess_exec(
                *("ip", "netns", "exec", namespace, program, "--no-p4", "--device-id", "1"),
                *(*ports, "--", "--grpc-server-addr", address, "--cpu-port", "255"),
                stdout=log,
                stderr=log,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not (folder / "p4runtime").exists():
                    assert process.returncode is None, (folder / "bmv2.log").read_text()[-2000:]
                    await asyncio.sleep(0.05)
            async with _connected(address) as client:
                pool = Bmv2Pool(client, sockets)
                await pool.add([*pool_entries(hosts), pool.marker_entry])
                for group, replicas in pool_groups(hosts).items():
                    await pool.set_group(group, replicas)
                yield pool
            assert process.returncode is None, (folder / "bmv2.log").read_text()[-2000:]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            for sock in sockets:
                sock.close()


@contextlib.asynccontextmanager
async def _connected(address: str) -> AsyncIterator[fy.Switch]:
    program = artefact("bmv2")
    ready = asyncio.Event()

    async def is_ready(_: fy.Switch) -> None:
        ready.set()

    options = fy.SwitchOptions(p4info=program.p4info, p4blob=program.json, ready_handler=is_ready)
    async with fy.Switch("bmv2", address, options) as client:
        await asyncio.wait_for(ready.wait(), START_TIMEOUT_S)
        yield client
