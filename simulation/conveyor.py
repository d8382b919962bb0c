"""The simulated conveyors: the product's compiled ends (`kvcast.protocol.conveyor`, `courier`) over
simulated streams.

Owns: what `kvcast.hostagent.network.conveyor` and `bulk_link` own of them, without sockets. Must
not know: what is asked for or granted. Bytes are damaged as those of other bulk transfers are.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.connection_ends import Table
from kvcast.hostagent.core.courier import Courier
from kvcast.hostagent.core.shared_index import Region
from kvcast.protocol.conveyor import REPLY, REQUESTS, Givers
from kvcast.protocol.messages.shared import REGION_BYTES
from kvcast.simulation.moved_connections import PIECE_BYTES, MovedSide
from kvcast.simulation.streams import Process, StreamEnd
from kvcast.simulation.world import World


class ConveyorSide(MovedSide):
    """One agent's conveyors, both ways."""

    def __init__(
        self,
        world: World,
        process: Process,
        core: AgentCore,
        courier: Courier,
        *,
        open_stream: Callable[[str], StreamEnd],
        settled: Callable[[], None],
    ) -> None:
        pins = memoryview(bytearray(REGION_BYTES))
        lane = 0 if core.lane is None else core.lane.address
        givers = Givers(lane, pins, core.meetings, courier.lookups.knows_all_at)
        super().__init__(
            *(world, process, core),
            ours=Table(
                courier.conveyor_stands,
                lambda number: courier.conveyor_gone(process.now, number),
                courier.taker,
            ),
            theirs=Table(givers.begin, givers.end, lambda number: givers.givers[number]),
            open_stream=open_stream,
            settled=settled,
            pushes=False,
        )
        self._courier = courier
        self._givers = givers
        courier.takes_conveyors = core.options.lone_reads_by_tcp
        core.stop_conveying = self._theirs.close_all
        if core.lane is not None and core.shared is not None:
            capacity_bytes = core.store.allocator.capacity_bytes
            core.shared.join(Region(pins, capacity_bytes, _offended))
            core.serving.conveys = True

    def failed(self, now: float, node: int) -> None:
        self._courier.conveyor_failed(now, node)

    def act(self) -> None:
        """Say what is to be asked for, close what is over, and make a conveyor that is wished
        for."""
        if self._courier.cut_off:
            for number in self._courier.take_cut_off():
                self._ours.close(number)
        for number, moved in self._ours.items():
            said = self._courier.requests_to_send(number)
            if said:
                moved.end.write(said, of_block=False)
        self.begin(self._courier.take_wish(self._process.now))

    def move_ours(self, number: int, end: StreamEnd) -> None:
        data = end.read(PIECE_BYTES)
        while data:
            self._courier.brought(number, data, self._process.now)
            data = end.read(PIECE_BYTES) if end.inbox else b""
        self._settled()

    def move_theirs(self, number: int, end: StreamEnd) -> None:
        givers = self._givers
        while end.inbox and (room_bytes := givers.room_bytes(number)):
            givers.hear(number, end.read(min(room_bytes, REQUESTS * REPLY.size)))
            self._send(number, end)
        self._send(number, end)

    def _send(self, number: int, end: StreamEnd) -> None:
        while end.takes_more:
            self._core.meetings.at(self._process.now)
            data = self._givers.bytes_to_send(number, PIECE_BYTES)
            given, sent_bytes = self._givers.take_given()
            self._core.conveyed(given, sent_bytes)
            self._world.counts["conveyor.given"] += len(given)
            if not data:
                return
            end.write(data, of_block=sent_bytes > 0)


def _offended(why: str) -> None:
    raise AssertionError(f"what leaves by conveyors: {why}")
