"""The RDMA link's adapters: TCP between agents for what is said, and cards for the bytes.

Owns: sockets, TLS, who is at their other ends, and which calls go this way. Must not know: what is
said on a connection, or until when (`kvcast.protocol.links` does), or which cards there are.

With credentials the link's TCP is TLS, as the bulk link's is, so that a queue pair is made with
nobody but the node that the certificate names. What the cards carry is not encrypted, nor are READ
and DATA.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.store import Copy
from kvcast.hostagent.network.cards import Cards
from kvcast.protocol.links.bulk import BulkCall, BulkOptions
from kvcast.protocol.links.cards import LinkCard
from kvcast.protocol.links.carriers import Carriers
from kvcast.protocol.links.grants import Grants
from kvcast.protocol.links.rdma import Completed, Pair, PairHolder, RdmaOptions
from kvcast.protocol.links.rdma_callee import RdmaCallee
from kvcast.protocol.links.rdma_caller import (
    Complete,
    Connect,
    Failed,
    RdmaCaller,
    RdmaConnection,
)
from kvcast.service.identity import NODE
from kvcast.service.link_driver import PIECE_BYTES, ConnectingDriver, LinkDriver
from kvcast.service.listener import Bounds, Listener
from kvcast.service.tls import Credentials, PeerError, expect_peer

log = logging.getLogger(__name__)


class RdmaCalls:
    """Makes those of the cores' calls that RDMA can make; the others it hands on."""

    def __init__(
        self,
        core: AgentCore,
        options: RdmaOptions,
        cards: Cards,
        core_told: Callable[[], None],
        credentials: Credentials | None = None,
    ) -> None:
        self._core = core
        self._cards = cards
        self._core_told = core_told  # a core was told something: do what that has caused
        self._credentials = credentials
        self._carriers = Carriers(options, core.metrics)
        self._link = RdmaCaller(
            core.options.node_id,
            options,
            core.metrics,
            core.serving.view,
            cards.links,
            core.weight_of,
            core.digest,
        )
        self._link.wake = self._act_soon
        self._pool: Pool | None = None
        self._drivers: dict[RdmaConnection, tuple[ConnectingDriver, PairHolder]] = {}
        self._scratch = memoryview(bytearray(PIECE_BYTES))
        self._soon = False
        """Whether `_act` is about to be called, or at work, and sees what there is to do."""

    def take(self) -> None:
        """Take the calls that are ours out of the cores' outbox, and start them."""
        loop = asyncio.get_running_loop()
        pool, outbox = self._core.pool, self._core.outbox
        if pool is not self._pool and pool is not None:
            self._pool = pool
            self._carriers.use_nodes(pool.nodes)
            self._link.use_nodes(loop.time(), pool.nodes)
        ours, others = self._carriers.choose(loop.time(), list(outbox.calls))
        outbox.calls.clear()
        outbox.calls.extend(others)
        self._link.ask(loop.time(), *ours)
        # Whoever called is in the middle of an event of the cores, and may not be told of ends now.
        self._act_soon()

    def card_changed(self, card: LinkCard) -> None:
        """A card is of no use any more, or is again."""
        if card.problem:
            self._link.card_failed(asyncio.get_running_loop().time(), card)
            self._act_soon()

    def _act_soon(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        """Do what the link wants done, and what those who are told of ends want then."""
        self._soon = True
        now = asyncio.get_running_loop().time()
        told = False
        try:
            while instructions := self._link.instructions():
                for instruction in instructions:
                    match instruction:
                        case Complete(call=call, outcome=outcome):
                            call.ended(now, outcome)
                            told = True
                        case Connect(connection=connection):
                            self._connect(connection)
                        case Failed(node_id=node_id, problem=problem):
                            self._carriers.failed(now, node_id, problem)
                        case _ if (entry := self._drivers.get(instruction.connection)) is not None:
                            driver, holder = entry
                            holder.carry_out()
                            driver.flush()
        finally:
            self._soon = False
        again: list[BulkCall] = self._carriers.take_again()
        self._core.outbox.calls.extend(again)
        for news in (*self._link.take_news(), *self._carriers.take_news()):
            log.warning("%s", news)
        if told:
            self._core_told()

    def _connect(self, connection: RdmaConnection) -> None:
        node = connection.node
        loop = asyncio.get_running_loop()

        def opened(transport: asyncio.Transport) -> RdmaConnection:
            if self._credentials is not None:
                expect_peer(transport, NODE, node.node_id)
            connection.connected(loop.time())
            return connection

        def over() -> None:
            holder.carry_out()  # the end of its pair, before its calls are told
            del self._drivers[connection]
            if connection.problem:
                log.warning("rdma: %s: %s", node.node_id, connection.problem)

        # The card reports when nobody else is at work.
        verbs = self._cards.calling(connection.card)
        holder = PairHolder(connection, verbs, loop.time, self._act)
        driver = ConnectingDriver(
            connection,
            self._scratch,
            opened,
            changed=self._act_soon,
            refused=lambda error: connection.wrong_peer(loop.time(), str(error)),
            over=over,
        )
        self._drivers[connection] = driver, holder
        driver.connect(node.bulk_host, node.rdma_port, self._credentials)

    async def close(self) -> None:
        """End all calls, and close all connections and pairs."""
        self._link.close(asyncio.get_running_loop().time())
        self._act()


class _Across:
    """Makes one caller's half of a pair, on the card that it is to meet."""

    def __init__(self, cards: Cards, link: RdmaCallee[Copy]) -> None:
        self._cards = cards
        self.link = link
        self.card: LinkCard | None = None

    def make_pair(self, completed: Callable[[list[Completed]], None]) -> Pair:
        assert self.link.remote is not None
        self.card = self._cards.across(self.link.remote)
        return self._cards.make_pair(self.card, completed)


class RdmaServer:
    """Lets other agents read and write what the cores allow."""

    def __init__(
        self,
        core: AgentCore,
        options: RdmaOptions,
        bulk: BulkOptions,
        cards: Cards,
        credentials: Credentials | None = None,
    ) -> None:
        self._core = core
        self._options = options
        self._grants = Grants(options.grant_bytes, core.weight_of)
        self._cards = cards
        self._credentials = credentials
        self._drivers: dict[LinkDriver, PairHolder | None] = {}
        self._across: dict[LinkDriver, _Across] = {}
        self._scratch = memoryview(bytearray(PIECE_BYTES))
        self._listener = Listener(
            self.protocol,
            Bounds(bulk.max_connections, bulk.max_connections_per_address),
            credentials,
            count=self._count,
        )

    def _count(self, name: str) -> None:
        if name != "connections":
            self._core.metrics.bulk_connections_refused_total += 1

    async def start(self, host: str) -> int:
        """Listen; the port."""
        _, port = await self._listener.start(host, 0)
        return port

    def card_changed(self, card: LinkCard) -> None:
        """A card is of no use any more: its callers hear of it at once, by the end of their
        connections."""
        now = asyncio.get_running_loop().time()
        for driver, across in list(self._across.items()):
            holder = self._drivers[driver]
            if across.card is card and holder is not None and card.problem:
                across.link.broken(now, f"{card.name}: {card.problem}")
                holder.carry_out()
                driver.flush()

    async def close(self) -> None:
        """Stop listening, end all conversations, and close their pairs."""
        await self._listener.close()
        for driver in list(self._drivers):
            driver.lost("")

    def protocol(self) -> LinkDriver:
        """The protocol of one more connection."""
        loop = asyncio.get_running_loop()

        def opened(transport: asyncio.Transport) -> RdmaCallee[Copy]:
            credentials = self._credentials
            named = None if credentials is None else expect_peer(transport, NODE).name
            core = self._core
            link = RdmaCallee(
                *(loop.time(), core.serving, self._options, core.metrics, self._grants, named)
            )
            across = self._across[driver] = _Across(self._cards, link)
            self._drivers[driver] = PairHolder(link, across, loop.time, driver.flush)
            return link

        def changed() -> None:
            holder = self._drivers.get(driver)
            if holder is not None and holder.carry_out():
                driver.flush()  # what came of it may have something to send

        def refused(error: PeerError) -> None:
            self._core.metrics.bulk_connections_refused_total += 1
            log.warning("rdma: a caller was refused: %s", error)

        def over() -> None:
            holder = self._drivers.pop(driver)
            if holder is not None:
                holder.carry_out()
            self._across.pop(driver, None)
            if driver.link is not None and driver.link.problem:
                log.warning("rdma: a caller was cut off: %s", driver.link.problem)

        driver = LinkDriver(self._scratch, opened, changed=changed, refused=refused, over=over)
        self._drivers[driver] = None
        return driver
