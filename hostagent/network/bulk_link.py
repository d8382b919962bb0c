"""The bulk link's adapters: TCP between agents.

Owns: sockets, TLS, and who is at their other ends. Must not know: what is said on a connection, or
until when (`kvcast.protocol.links` does), why a call is made, or what a request deserves.

As a callee: at most `max_connections` callers at once, one more is closed at once.

With credentials the link is TLS: a caller is the node that its certificate names, and bytes are
asked of, and sent to, nobody but the node that the certificate at the other end names.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import Copy
from kvcast.hostagent.network.conveyor import ConveyorSockets
from kvcast.hostagent.network.lander import Lander, available
from kvcast.hostagent.network.pushing import PushSockets
from kvcast.protocol.links.bulk import BulkOptions
from kvcast.protocol.links.bulk_callee import BulkCallee
from kvcast.protocol.links.bulk_caller import BulkCaller as CallerCore
from kvcast.protocol.links.bulk_caller import BulkConnection, Complete, Connect
from kvcast.protocol.links.convey import ConveyCall
from kvcast.service.identity import NODE
from kvcast.service.link_driver import PIECE_BYTES, ConnectingDriver, LinkDriver
from kvcast.service.listener import Bounds, Listener
from kvcast.service.tls import Credentials, PeerError, expect_peer

log = logging.getLogger(__name__)


class BulkCaller:
    """Makes the calls that the cores ask for."""

    def __init__(
        self,
        core: AgentCore,
        options: BulkOptions,
        core_told: Callable[[], None],
        credentials: Credentials | None = None,
    ) -> None:
        self._core = core
        self._credentials = credentials
        self._core_told = core_told  # a core was told something: do what that has caused
        self._link = CallerCore(
            *(core.options.node_id, options, core.metrics, core.serving.view),
            *(core.weight_of, core.departures),
        )
        self._pool: Pool | None = None
        self._drivers: dict[BulkConnection, ConnectingDriver] = {}
        self._scratch = memoryview(bytearray(PIECE_BYTES))
        self.conveyors: ConveyorSockets | None = None
        """Who takes conveyors; set by whoever assembles."""
        self.pushes: PushSockets | None = None
        """Who pushes blocks; set likewise."""
        self._conveying: dict[tuple[str, bool], ConveyCall] = {}
        """By node, and whether it is for pushing, the conveyor that is being made."""
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._dispatching = False
        self._ended: list[Complete] = []
        """Calls that have ended while the cores could not be told."""

    def dispatch(self) -> None:
        """Start the calls that wait in the outbox."""
        loop = asyncio.get_running_loop()
        pool = self._core.pool
        if pool is not self._pool and pool is not None:
            self._pool = pool
            self._link.use_nodes(loop.time(), pool.nodes)
        calls = list(self._core.outbox.calls)
        self._core.outbox.calls.clear()
        unwanted, self._core.outbox.unwanted = self._core.outbox.unwanted, False
        # Whoever called is in the middle of an event of the cores, and may not be told of ends now.
        self._dispatching = True
        try:
            self._link.ask(loop.time(), *calls)
            if unwanted:
                self._link.end_unwanted(loop.time())
            self._carry_out()
        finally:
            self._dispatching = False
        if self._ended:
            self._act_soon()

    def _act_soon(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        """Do what the link wants done, and tell of calls that have ended."""
        if self._dispatching:
            self._act_soon()
            return
        self._soon = False
        self._carry_out()
        ended, self._ended = self._ended, []
        for call, outcome in ended:
            call.ended(asyncio.get_running_loop().time(), outcome)
        if ended:
            self._core_told()

    def _carry_out(self) -> None:
        for instruction in self._link.instructions():
            match instruction:
                case Complete():
                    self._ended.append(instruction)
                case Connect(connection=connection):
                    self._connect(connection)
                case _ if (driver := self._drivers.get(instruction.connection)) is not None:
                    driver.flush()
        self._set_timer()

    def _set_timer(self) -> None:
        when = self._link.get_timer()
        if when is None or (self._timer is not None and self._timer.when() <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._link.handle_timer(asyncio.get_running_loop().time())
        self._act()

    def _connect(self, connection: BulkConnection) -> None:
        node = connection.node
        loop = asyncio.get_running_loop()

        def opened(transport: asyncio.Transport) -> BulkConnection:
            if self._credentials is not None:
                expect_peer(transport, NODE, node.node_id)
            connection.connected(loop.time())
            return connection

        def over() -> None:
            del self._drivers[connection]
            if connection.problem:
                log.warning("bulk: %s: %s", node.node_id, connection.problem)

        driver = self._drivers[connection] = ConnectingDriver(
            connection,
            self._scratch,
            opened,
            changed=self._act,
            refused=lambda error: connection.wrong_peer(loop.time(), str(error)),
            over=over,
            lander=Lander if available() else None,
        )
        driver.connect(node.bulk_host, node.bulk_port, self._credentials)

    def convey(self, index: int, *, pushes: bool = False) -> None:
        """Try to have a conveyor from that node, at whose end `conveyors` are told; or, with
        `pushes`, a connection to push blocks on, at whose end those are."""
        pool = self._core.pool
        node = pool.nodes.get(index) if pool is not None else None
        told = self.pushes if pushes else self.conveyors
        if node is None or told is None or (node.node_id, pushes) in self._conveying:
            return
        name = node.node_id, pushes
        loop = asyncio.get_running_loop()
        until = loop.time() + self._link.options.connect_timeout_s
        call = ConveyCall(self._core.options.node_id, node, until, pushes=pushes)
        self._conveying[name] = call

        def opened(_transport: asyncio.Transport) -> ConveyCall:
            call.connected()
            return call

        def changed() -> None:
            if call.agreed and not call.closed:
                sock = driver.detach()
                if isinstance(told, PushSockets):
                    told.push_to(sock, index, node.node_id)
                else:
                    told.take_from(sock, index, node.node_id)
                call.end(loop.time())
                driver.flush()
            elif call.closed and self._conveying.get(name) is call:
                del self._conveying[name]
                if not call.agreed:
                    told.failed(loop.time(), index)

        driver = ConnectingDriver(
            *(call, self._scratch, opened),
            changed=changed,
            refused=lambda _error: None,
        )
        driver.connect(node.bulk_host, node.bulk_port, None)

    async def close(self) -> None:
        """End all calls as unreachable, and close all connections."""
        self.conveyors = self.pushes = None
        for call in list(self._conveying.values()):
            call.end(asyncio.get_running_loop().time())
            call.wake()
        self._link.close(asyncio.get_running_loop().time())
        self._act()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BulkServer:
    """Answers other agents."""

    def __init__(
        self, core: AgentCore, options: BulkOptions, credentials: Credentials | None = None
    ) -> None:
        self._core = core
        self._options = options
        self._credentials = credentials
        self.conveyors: ConveyorSockets | None = None
        """Who gives by conveyors; set by whoever assembles."""
        self.pushes: PushSockets | None = None
        """Who takes what is pushed; likewise."""
        self._drivers: set[LinkDriver] = set()
        self._scratch = memoryview(bytearray(PIECE_BYTES))
        self._listener = Listener(
            self.protocol,
            Bounds(options.max_connections, options.max_connections_per_address),
            credentials,
            count=self._count,
        )

    def _count(self, name: str) -> None:
        if name != "connections":
            self._core.metrics.bulk_connections_refused_total += 1

    async def start(
        self, host: str, port: int, sockets: Sequence[socket.socket] = ()
    ) -> tuple[str, int]:
        """Listen, or take over sockets that do; returns the address, with the port chosen where 0
        was asked for."""
        return await self._listener.start(host, port, sockets)

    async def rest(self, patience_s: float) -> None:
        """Take no more callers, and wait until those that there are want nothing just now."""
        await self._listener.close()
        end = asyncio.get_running_loop().time() + patience_s
        while any(driver.link is not None and driver.link.busy for driver in self._drivers):
            if asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        """Stop listening and end all conversations."""
        await self._listener.close()
        await self.hang_up()

    async def hang_up(self) -> None:
        """End all conversations."""
        for driver in list(self._drivers):
            driver.lost("")

    def protocol(self) -> LinkDriver:
        """The protocol of one more connection."""

        def opened(transport: asyncio.Transport) -> BulkCallee[Copy]:
            credentials = self._credentials
            named = None if credentials is None else expect_peer(transport, NODE).name
            now = asyncio.get_running_loop().time()
            core = self._core
            return BulkCallee(
                *(now, core.serving, self._options, core.metrics, named),
                *(core.departures, core.arrivals),
            )

        def refused(error: PeerError) -> None:
            self._core.metrics.bulk_connections_refused_total += 1
            log.warning("bulk: a caller was refused: %s", error)

        def over() -> None:
            self._drivers.discard(driver)
            if driver.link is not None and driver.link.problem:
                log.warning("bulk: a caller was cut off: %s", driver.link.problem)

        def changed() -> None:
            link, pool = driver.link, self._core.pool
            if not isinstance(link, BulkCallee) or not link.conveys:
                return
            node = pool.nodes_by_id.get(link.conveys) if pool is not None else None
            if node is not None and link.pushes and self.pushes is not None:
                self.pushes.take_from(driver.detach(), node.index, node.node_id)
            elif node is not None and self.conveyors is not None and not link.pushes:
                self.conveyors.give_to(driver.detach(), node.index, node.node_id)
            link.end(asyncio.get_running_loop().time())
            driver.flush()

        driver = LinkDriver(
            self._scratch,
            opened,
            changed=changed,
            refused=refused,
            over=over,
            lander=Lander if available() else None,
        )
        self._drivers.add(driver)
        return driver
