"""The simulated bulk link: the product's own conversations (`kvcast.protocol.links`) over simulated
streams.

Owns: what `kvcast.hostagent.network.bulk_link` owns, without sockets. Must not know: what is said,
why a call is made, or what a request deserves. A further transport joins beside it, as `rdma` has:
it makes `GetCall`s and `PutCall`s some other way, and reports the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.serving import Serving
from kvcast.hostagent.core.store import Copy
from kvcast.protocol.links.bulk import BulkOptions
from kvcast.protocol.links.bulk_callee import BulkCallee
from kvcast.protocol.links.bulk_caller import BulkCaller, BulkConnection, Complete, Connect
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import BulkPut, PutHeader, WantedBlock
from kvcast.protocol.messages.wire import BlockId
from kvcast.simulation.streams import Process, StreamDriver, StreamEnd
from kvcast.simulation.world import Alarm, World

CONNECTIONS: Final = (1, 2, 4)
"""Connections to one node in a run, one of these: with few, calls wait for each other."""


def bulk_options(world: World) -> BulkOptions:
    """The product's bounds, but time-outs that come up within a run."""
    return BulkOptions(
        connections_per_peer=world.stream("bulk").choice(CONNECTIONS),
        connect_timeout_s=1.0,
        idle_s=6.0,
        transfer_timeout_s=1.5,
        silence_s=0.8,
    )


class Lie(NamedTuple):
    """What a home says of a copy that it sends, and what it sends."""

    copy: Copy
    size_bytes: int
    digest: int
    data: bytes


class Watched:
    """A `Serving` whose acknowledgements are known to the model, and that may lie about copies."""

    def __init__(self, serving: Serving, acknowledged: Callable[[int, bytes], None]) -> None:
        self._serving = serving
        self._acknowledged = acknowledged
        self.lie: Callable[[Copy, bytes], Lie] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    def begin_put(self, put: BulkPut, block: PutHeader) -> Copy | str:
        room = self._serving.begin_put(put, block)
        if room == bulk.HELD:
            self._acknowledged(put.namespace, block.key)
        return room

    def end_put(self, put: BulkPut, block: PutHeader, copy: Copy, digest: int) -> str:
        namespace = copy.block.namespace
        status = self._serving.end_put(put, block, copy, digest)
        if status in bulk.LANDED:
            self._acknowledged(namespace, block.key)
        return status

    def pushed(self, block: BlockId, size_bytes: int) -> None:
        self._serving.pushed(block, size_bytes)
        self._acknowledged(block.namespace, block.key)

    def get(self, caller: str, namespace: int, block: WantedBlock) -> Copy | Lie | str:
        copy = self._serving.get(caller, namespace, block)
        if self.lie is None or isinstance(copy, str):
            return copy
        return self.lie(copy, bytes(self._serving.view(copy)))

    def view(self, copy: Copy | Lie) -> memoryview:
        if isinstance(copy, Lie):
            return memoryview(copy.data)
        return self._serving.view(copy)

    def end_get(self, copy: Copy | Lie) -> None:
        self._serving.end_get(copy.copy if isinstance(copy, Lie) else copy)


class BulkSide:
    """One agent's calls to others, and others' calls to it. `open_stream` begins a connection to
    a node; `pump` is called after every event; `acknowledged` hears of puts that were taken."""

    def __init__(
        self,
        world: World,
        process: Process,
        core: AgentCore,
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
        self._options = bulk_options(world)
        self._link = BulkCaller(
            *(core.options.node_id, self._options, core.metrics, core.serving.view),
            *(core.weight_of, core.departures),
        )
        self.served = Watched(core.serving, acknowledged)
        self.listens = True
        self.give_to: Callable[[StreamEnd, str], None] | None = None
        """Takes a stream that a node asks on by itself from now on;"""
        self.take_from: Callable[[StreamEnd, str], None] | None = None
        """and one that it pushes on."""
        self._pool: Pool | None = None
        self._calling: dict[BulkConnection, StreamDriver] = {}
        self._alarm = Alarm(world, lambda: process.when_running(self._wake))
        self._serving: dict[StreamDriver, None] = {}

    def die(self, *, machine: bool) -> None:
        """The process is gone, and the kernel resets its connections; or the machine is."""
        for driver in self._calling.values():
            driver.end.stream.reset(by=0, machine=machine)
        for driver in self._serving:
            driver.end.stream.reset(by=1, machine=machine)

    # --- calls ------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Start the calls that wait in the outbox."""
        core, now = self._core, self._process.now
        if core.pool is not self._pool and core.pool is not None:
            self._pool = core.pool
            self._link.use_nodes(now, core.pool.nodes)
        calls = list(core.outbox.calls)
        core.outbox.calls.clear()
        self._link.ask(now, *calls)
        if core.outbox.unwanted:
            core.outbox.unwanted = False
            self._link.end_unwanted(now)
        self._world.after(0.0, lambda: self._process.when_running(self._act))

    def _act(self) -> None:
        """Do what the link wants done."""
        for instruction in self._link.instructions():
            match instruction:
                case Complete(call=call, outcome=outcome):
                    call.ended(self._process.now, outcome)
                case Connect(connection=connection):
                    self._connect(connection)
                case _ if (driver := self._calling.get(instruction.connection)) is not None:
                    driver.flush()
        self._link.check()
        if (when := self._link.get_timer()) is not None:
            self._alarm.set(max(self._process.world_time(when), self._world.now) + 1e-7)
        self._pump()

    def _wake(self) -> None:
        self._link.handle_timer(self._process.now)
        self._act()

    def _connect(self, connection: BulkConnection) -> None:
        driver = self._calling[connection] = StreamDriver(
            self._world,
            self._process,
            self._open_stream(connection.node.node_id),
            connection,
            opened=lambda: connection.connected(self._process.now),
            changed=self._act,
            over=lambda: self._forget(connection),
        )
        driver.flush()

    def _forget(self, connection: BulkConnection) -> None:
        del self._calling[connection]

    # --- requests ---------------------------------------------------------------------------

    def accept(self, end: StreamEnd) -> bool:
        """Another agent has connected."""
        if not self.listens or len(self._serving) >= self._options.max_connections:
            return False
        now, metrics = self._process.now, self._core.metrics
        link: BulkCallee[Copy] = BulkCallee(
            now,
            cast(Serving, self.served),
            self._options,
            metrics,
            departures=self._core.departures,
            arrivals=self._core.arrivals,
        )

        def changed() -> None:
            caller = link.conveys
            if caller:
                driver.detach()
                link.end(self._process.now)
                self._gone(driver)
                take = self.take_from if link.pushes else self.give_to
                assert take is not None
                take(end, caller)
            self._pump()

        driver = StreamDriver(
            self._world,
            self._process,
            end,
            link,
            changed=changed,
            over=lambda: self._gone(driver),
        )
        self._serving[driver] = None
        driver.accept()
        return True

    def _gone(self, driver: StreamDriver) -> None:
        del self._serving[driver]
