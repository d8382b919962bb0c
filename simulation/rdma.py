"""The simulated RDMA link: the product's own conversations over simulated streams, and simulated
cards for the bytes.

Owns: what `kvcast.hostagent.network.rdma_link` owns, without sockets. Must not know: what is said
on a connection, or how a card moves bytes (`verbs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.serving import Serving
from kvcast.hostagent.core.store import Copy
from kvcast.protocol.links.cards import LinkCard
from kvcast.protocol.links.carriers import Carriers
from kvcast.protocol.links.grants import Grants
from kvcast.protocol.links.rdma import PairHolder, RdmaOptions
from kvcast.protocol.links.rdma_callee import RdmaCallee
from kvcast.protocol.links.rdma_caller import (
    Complete,
    Connect,
    Failed,
    RdmaCaller,
    RdmaConnection,
)
from kvcast.simulation.bulk import Watched
from kvcast.simulation.streams import Process, StreamDriver, StreamEnd
from kvcast.simulation.verbs import Fabric, SimulatedCard
from kvcast.simulation.world import World

OPTIONS: Final = RdmaOptions(
    grant_bytes=1 << 10,
    grant_wait_s=0.15,
    connect_timeout_s=1.0,
    idle_s=6.0,
    lease_s=1.2,
    silence_s=0.6,
    retry_s=0.3,
    retry_max_s=1.0,
)
"""The product's bounds, but such as a run's blocks meet, and time-outs that come up within it."""
PAIRS: Final = (2, 64, 64, 64)
"""Queue pairs of a node in a run, one of these: with few, some nodes' calls go by TCP."""


class RdmaSide:
    """One agent's calls to others by RDMA, and others' calls to it. `open_stream` begins a
    connection to a node; `pump` is called after every event; `acknowledged` hears of puts that
    were taken."""

    def __init__(
        self,
        world: World,
        process: Process,
        core: AgentCore,
        fabric: Fabric,
        *,
        open_stream: Callable[[str], StreamEnd],
        pump: Callable[[], None],
        acknowledged: Callable[[int, bytes], None],
    ) -> None:
        self._world = world
        self._process = process
        self._core = core
        self._open_stream = open_stream
        self._pump = pump
        self._options = replace(OPTIONS, max_pairs=world.stream("rdma pairs").choice(PAIRS))
        self.card = SimulatedCard(fabric, core.memory, self._options, process.when_running)
        self._carriers = Carriers(self._options, core.metrics)
        self._link = RdmaCaller(
            core.options.node_id,
            self._options,
            core.metrics,
            core.serving.view,
            [LinkCard(self.card.max_transfer_bytes)],
            core.weight_of,
            core.digest,
        )
        self._link.wake = self._act_soon
        self._served = Watched(core.serving, acknowledged)
        self._pool: Pool | None = None
        self._calling: dict[RdmaConnection, tuple[StreamDriver, PairHolder]] = {}
        self._serving: dict[StreamDriver, PairHolder] = {}
        self._grants = Grants(self._options.grant_bytes, core.weight_of)
        self._soon = False

    def die(self, *, machine: bool) -> None:
        """The process is gone, and the kernel resets its connections and closes its pairs; or the
        machine is."""
        self.card.die()
        for driver, _ in self._calling.values():
            driver.end.stream.reset(by=0, machine=machine)
        for driver in self._serving:
            driver.end.stream.reset(by=1, machine=machine)

    # --- calls ------------------------------------------------------------------------------

    def take(self) -> None:
        """Take the calls that are ours out of the outbox, and start them."""
        core, now = self._core, self._process.now
        if core.pool is not self._pool and core.pool is not None:
            self._pool = core.pool
            self._carriers.use_nodes(core.pool.nodes)
            self._link.use_nodes(now, core.pool.nodes)
        ours, others = self._carriers.choose(now, list(core.outbox.calls))
        core.outbox.calls.clear()
        core.outbox.calls.extend(others)
        self._link.ask(now, *ours)
        self._act_soon()

    def _act_soon(self) -> None:
        if not self._soon:
            self._soon = True
            self._world.after(0.0, lambda: self._process.when_running(self._act))

    def _act(self) -> None:
        """Do what the link wants done."""
        self._soon = False
        now = self._process.now
        while instructions := self._link.instructions():
            for instruction in instructions:
                match instruction:
                    case Complete(call=call, outcome=outcome):
                        call.ended(now, outcome)
                    case Connect(connection=connection):
                        self._connect(connection)
                    case Failed(node_id=node_id, problem=problem):
                        self._carriers.failed(now, node_id, problem)
                    case _ if (entry := self._calling.get(instruction.connection)) is not None:
                        driver, holder = entry
                        holder.carry_out()
                        driver.flush()
        self._link.check()
        for news in self._carriers.take_news():
            self._world.counts["rdma works again" if "again" in news else "rdma given up"] += 1
        self._core.outbox.calls.extend(self._carriers.take_again())
        self._pump()

    def _connect(self, connection: RdmaConnection) -> None:
        process = self._process
        holder = PairHolder(connection, self.card, lambda: process.now, self._act_soon)

        def over() -> None:
            holder.carry_out()
            del self._calling[connection]

        driver = StreamDriver(
            self._world,
            process,
            self._open_stream(connection.node.node_id),
            connection,
            opened=lambda: connection.connected(process.now),
            changed=self._act_soon,
            over=over,
        )
        self._calling[connection] = driver, holder
        driver.flush()

    # --- requests ---------------------------------------------------------------------------

    def accept(self, end: StreamEnd) -> bool:
        """Another agent has connected."""
        process, core = self._process, self._core
        link: RdmaCallee[Copy] = RdmaCallee(
            *(process.now, cast(Serving, self._served), self._options, core.metrics, self._grants)
        )

        def changed() -> None:
            if holder.carry_out():
                driver.flush()
            link.check()
            callees = (cast(RdmaCallee[Copy], driver.link) for driver in self._serving)
            self._grants.check(sum(callee.open_bytes for callee in callees))
            self._pump()

        def over() -> None:
            holder.carry_out()
            del self._serving[driver]

        driver = StreamDriver(self._world, process, end, link, changed=changed, over=over)
        holder = PairHolder(link, self.card, lambda: process.now, driver.flush)
        self._serving[driver] = holder
        driver.accept()
        return True
