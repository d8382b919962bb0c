"""A small pool for the agent's tests: agents in this process, a plain switch, a tiny controller.

The switch forwards Ethernet frames by destination MAC between UDP tunnels and nothing else; it
can be told to lose frames. The controller takes registrations and pushes bucket maps, and does
nothing by itself. Neither shares code with the product's switch or controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
from kvcast.hostagent.agent import Agent
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.core.agent import AgentOptions
from kvcast.hostagent.network.local_server import LocalOptions
from kvcast.hostagent.options import ArenaOptions, NetworkOptions, Options
from kvcast.protocol.links.control_caller import ControlOptions
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    AgentMessage,
    Described,
    GroupInfo,
    GroupReply,
    GroupRequest,
    Kept,
    Leave,
    NamespaceInfo,
    NamespaceReply,
    NamespaceRequest,
    NodeInfo,
    PoolMap,
    Refused,
    Register,
    Registered,
    Renew,
)
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import BUCKETS, BlockId
from kvcast.protocol.requester import RequesterConfig

MIB = 1 << 20


def mac_of(number: int) -> str:
    return f"02:6b:76:00:00:{number:02x}"


def ip_of(number: int) -> str:
    return f"10.77.0.{number}"


def key_of(number: int, bucket: int = 0) -> bytes:
    """A key in the given bucket."""
    return ((number << 10) | bucket).to_bytes(16, "big")


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    """Wait for a condition; the test's own time limit is the only one."""
    while True:
        holds = condition()
        if await holds if isinstance(holds, Awaitable) else holds:
            return
        await asyncio.sleep(0.005)


class PlainSwitch:
    """Forwards frames by destination MAC; `lose(in_port, frame)` true = the frame is lost."""

    def __init__(self) -> None:
        self.lose: Callable[[int, bytes], bool] = lambda _port, _frame: False
        self.frames = 0
        self._sockets: dict[int, socket.socket] = {}
        self._peers: dict[int, tuple[str, int]] = {}
        self._port_by_mac: dict[bytes, int] = {}

    def add_port(self, port: int) -> tuple[str, int]:
        """Make a port; the address that its agent sends to."""
        if port in self._sockets:
            return self._sockets[port].getsockname()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        sock.bind(("127.0.0.1", 0))
        self._sockets[port] = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._receive, port)
        return sock.getsockname()

    def attach(self, port: int, mac: str, peer: tuple[str, int]) -> None:
        self._peers[port] = peer
        self._port_by_mac[bytes.fromhex(mac.replace(":", ""))] = port

    def inject(self, port: int, frame: bytes) -> None:
        """Send a frame out of a port, as if it had come from the network."""
        self._sockets[port].sendto(frame, self._peers[port])

    def _receive(self, port: int) -> None:
        for _ in range(64):
            try:
                frame = self._sockets[port].recv(4096)
            except OSError:
                return
            self.frames += 1
            out = self._port_by_mac.get(frame[:6])
            if out is not None and out in self._peers and not self.lose(port, frame):
                with contextlib.suppress(OSError):
                    self._sockets[out].sendto(frame, self._peers[out])

    def close(self) -> None:
        for sock in self._sockets.values():
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()


class MiniController:
    """Takes agents, numbers them in the order in which they come, and pushes maps.

    `homes_of(bucket)` names the nodes of a bucket in order; by default the first two nodes that
    registered, and for bucket 1 the other way round.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.nodes: dict[str, NodeInfo] = {}
        self.homes_of: Callable[[int], list[str]] | None = None
        self.namespaces: list[NamespaceInfo] = []
        self.groups: list[GroupInfo] = []
        self.renewals: dict[str, Renew] = {}
        self.answers: list[Described | Kept] = []
        self.left: list[str] = []
        self.refuse = ""
        self.refused = 0
        self.lease_s = 0.6
        self.address = ("127.0.0.1", 0)
        self.tls: ssl.SSLContext | None = None
        self._indices: dict[str, int] = {}
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._codec = MessageCodec[AgentMessage](AgentMessage)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, *self.address, ssl=self.tls)
        self.address = self._server.sockets[0].getsockname()[:2]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers.values()):
            writer.transport.abort()
        await self._server.wait_closed()
        for _ in range(3):
            await asyncio.sleep(0)

    def add_namespace(self, number: int, nodes: list[str] | None = None) -> None:
        self.namespaces.append(NamespaceInfo(number, "t", "m", str(number), "l", nodes or []))

    def send(self, node_id: str, message: msgspec.Struct) -> None:
        self._writers[node_id].write(self._codec.encode(message))

    def pool_map(self) -> PoolMap:
        order = sorted(self.nodes.values(), key=lambda node: node.index)
        buckets = []
        for bucket in range(BUCKETS):
            if self.homes_of is not None:
                buckets.append([self._indices[n] for n in self.homes_of(bucket)])
            else:
                pair = [node.index for node in order[:2]]
                buckets.append(pair[::-1] if bucket == 1 else pair)
        return PoolMap(self.epoch, order, buckets, self.namespaces, self.groups)

    def publish(self) -> None:
        self.epoch += 1
        for node_id in list(self._writers):
            self.send(node_id, self.pool_map())

    def forget(self, node_id: str) -> None:
        """Declare a node dead."""
        del self.nodes[node_id]
        self._writers.pop(node_id, None)
        self.publish()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        codec = MessageCodec[AgentMessage](AgentMessage)
        node_id = ""
        try:
            while data := await reader.read(65536):
                for message in codec.feed(data):
                    if isinstance(message, Register):
                        node_id = message.node_id
                        if self.refuse:
                            self.refused += 1
                            writer.write(codec.encode(Refused(self.refuse)))
                            continue
                        self._register(message, writer)
                    elif isinstance(message, Renew):
                        self.renewals[node_id] = message
                    elif isinstance(message, NamespaceRequest):
                        self._namespace(node_id, message)
                    elif isinstance(message, GroupRequest):
                        number = len(self.groups) + 1
                        group = GroupInfo(message.namespace, number, message.nodes)
                        self.groups.append(group)
                        self.send(node_id, GroupReply(message.request, group))
                        self.publish()
                    elif isinstance(message, Leave):
                        self.left.append(node_id)
                    else:
                        self.answers.append(message)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            if self._writers.get(node_id) is writer:
                del self._writers[node_id]
            writer.close()

    def _register(self, message: Register, writer: asyncio.StreamWriter) -> None:
        index = self._indices.setdefault(message.node_id, len(self._indices) + 1)
        self.nodes[message.node_id] = NodeInfo(
            index,
            message.node_id,
            message.ip,
            message.mac,
            message.switch_port,
            message.udp_port,
            message.bulk_host,
            message.bulk_port,
            message.rdma_port,
        )
        self._writers[message.node_id] = writer
        self.send(message.node_id, Registered(CONTROL_PROTOCOL_VERSION, index, self.lease_s, 0))
        self.publish()

    def _namespace(self, node_id: str, message: NamespaceRequest) -> None:
        wanted = (message.tenant, message.model, message.version, message.layout)
        for info in self.namespaces:
            if (info.tenant, info.model, info.version, info.layout) == wanted:
                break
        else:
            if message.tenant == "nobody":
                self.send(node_id, Refused("no such tenant", message.request))
                return
            info = NamespaceInfo(100 + len(self.namespaces), *wanted)
            self.namespaces.append(info)
        self.send(node_id, NamespaceReply(message.request, info))
        self.publish()


class Pool:
    """Agents node-1 … node-n on a plain switch, with one client each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.switch = PlainSwitch()
        self.controller = MiniController()
        self.agents: dict[int, Agent] = {}
        self.clients: dict[int, AsyncClient] = {}

    @property
    def sockets(self) -> dict[str, Path]:
        """Where each node's agent is reached."""
        return {f"node-{number}": self.folder / f"{number}.sock" for number in self.agents}

    def options(self, number: int) -> Options:
        """What agent `number` is started with; tests replace what they need."""
        return Options(
            agent=AgentOptions(
                node_id=f"node-{number}",
                requester=RequesterConfig(rto_initial_s=0.05, rto_max_s=0.2),
            ),
            network=NetworkOptions(
                ip=ip_of(number),
                mac=mac_of(number),
                switch_port=number,
                tunnel=(("127.0.0.1", 0), self.switch.add_port(number)),
            ),
            control=ControlOptions(*self.controller.address, retry_min_s=0.02, retry_max_s=0.1),
            local=LocalOptions(str(self.folder / f"{number}.sock")),
            arena=ArenaOptions(4 * MIB, str(self.folder / f"{number}.arena"), slab_bytes=65536),
            seed=number,
        )

    async def start_agent(
        self, number: int, change: Callable[[Options], Options] = lambda options: options
    ) -> Agent:
        agent = Agent(change(self.options(number)))
        await agent.start()
        if agent.tunnel_address is not None:
            self.switch.attach(number, mac_of(number), agent.tunnel_address)
        self.agents[number] = agent
        await agent.ready.wait()
        return agent

    async def client(self, number: int) -> AsyncClient:
        if number not in self.clients:
            self.clients[number] = await AsyncClient.connect(str(self.folder / f"{number}.sock"))
        return self.clients[number]

    async def settled(self) -> None:
        """Wait until every agent has the controller's present map."""

        def have_it() -> bool:
            return all(
                agent.core.pool is not None and agent.core.pool.epoch == self.controller.epoch
                for agent in self.agents.values()
            )

        await until(have_it)

    async def holds(self, number: int, *keys: bytes, namespace: int = 1) -> None:
        """Wait until node `number` holds these blocks."""

        async def held() -> bool:
            described = await self.clients[number].describe(namespace, keys)
            return len(described.held) == len(keys)

        await until(held)

    def drop_here(self, number: int, key: bytes, namespace: int = 1) -> None:
        """Make node `number` forget its copy, without telling anybody."""
        assert self.agents[number].core.store.drop(BlockId(namespace, key))

    async def kill(self, number: int) -> None:
        """End an agent abruptly: no goodbye, and nobody is told."""
        client = self.clients.pop(number, None)
        if client is not None:
            await client.close()
        agent = self.agents.pop(number)
        agent.core.control_lost()
        agent._control._writer = None
        await agent.close()

    async def stop(self) -> None:
        for client in self.clients.values():
            await client.close()
        for agent in self.agents.values():
            await agent.close()
            agent.core.store.check()
            agent.core.reads.check()
            assert not agent.core.store.used_bytes or agent.core.store.blocks()
        await self.controller.stop()
        self.switch.close()


@contextlib.asynccontextmanager
async def running_pool(
    folder: Path,
    count: int,
    change: Callable[[Options], Options] = lambda options: options,
    *,
    controller_tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Pool]:
    """A pool of `count` agents with namespaces 1 and 2, and a client on each."""
    pool = Pool(folder)
    pool.controller.tls = controller_tls
    pool.controller.add_namespace(1)
    pool.controller.add_namespace(2)
    await pool.controller.start()
    try:
        for number in range(1, count + 1):
            await pool.start_agent(number, change)
        await pool.settled()
        for number in range(1, count + 1):
            await pool.client(number)
        yield pool
    finally:
        await pool.stop()
