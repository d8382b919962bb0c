"""The simulated conveyors: the product's compiled ends (`kvcast.protocol.conveyor`, `courier`) over
simulated streams.

Owns: what `kvcast.hostagent.network.conveyor` and `bulk_link` own of them, without sockets. Must
not know: what is asked for or granted. Bytes are damaged as those of other bulk transfers are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.courier import Courier
from kvcast.hostagent.core.shared_index import Region
from kvcast.protocol.conveyor import REPLY, REQUESTS, Givers
from kvcast.protocol.links.convey import ConveyCall
from kvcast.protocol.messages.shared import REGION_BYTES
from kvcast.simulation.streams import Process, StreamDriver, StreamEnd
from kvcast.simulation.world import World

PIECE_BYTES: Final = 16 * 1024
_CONNECT_S: Final = 1.0


class MovedEnd(StreamDriver):
    """What a stream's end tells once it is a conveyor's. `move` is called when bytes have come or
    may go, and is to be had called once more by `moved` for what has come before; `over` once."""

    def __init__(
        self, process: Process, end: StreamEnd, move: Callable[[], None], over: Callable[[], None]
    ) -> None:
        self.end = end
        self._process = process
        self._move = move
        self._over = over
        self._is_over = False
        end.driver = self

    def connected(self) -> None:
        pass

    def moved(self) -> None:
        self._process.when_running(self._moved)

    def gone(self, why: str) -> None:
        self._process.when_running(self.close)

    def _moved(self) -> None:
        if not self._is_over:
            self._move()

    def close(self) -> None:
        """The connection is over, or we end it."""
        if not self._is_over:
            self._is_over = True
            self.end.close()
            self._over()


class ConveyorSide:
    """One agent's conveyors, both ways. `open_stream` begins a connection to a node; `settled` is
    called when conveyors have brought something, and does what follows."""

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
        self._world = world
        self._process = process
        self._core = core
        self._courier = courier
        self._open_stream = open_stream
        self._settled = settled
        self._takers: dict[int, MovedEnd] = {}
        self._taker_nodes: dict[int, str] = {}
        self._gives: dict[str, tuple[int, MovedEnd]] = {}
        self._asking: dict[str, StreamDriver] = {}
        self._givers: Givers | None = None
        courier.takes_conveyors = core.options.lone_reads_by_tcp
        core.stop_conveying = self.stop_giving
        if core.lane is not None and core.shared is not None:
            pins = memoryview(bytearray(REGION_BYTES))
            capacity_bytes = core.store.allocator.capacity_bytes
            core.shared.join(Region(pins, capacity_bytes, _offended))
            self._givers = Givers(core.lane.address, pins)
            core.serving.conveys = True

    def stop_giving(self) -> None:
        """All connections end on which blocks leave."""
        for _, end in list(self._gives.values()):
            end.close()

    def die(self, *, machine: bool) -> None:
        """The process is gone."""
        for end in self._takers.values():
            end.end.stream.reset(by=0, machine=machine)
        for _, end in self._gives.values():
            end.end.stream.reset(by=1, machine=machine)
        for driver in self._asking.values():
            driver.end.stream.reset(by=0, machine=machine)

    def follow(self) -> None:
        """The map may have changed."""
        pool = self._core.pool
        assert pool is not None
        index_of = {node_id: node.index for node_id, node in pool.nodes_by_id.items()}
        for node_id, (number, end) in list(self._gives.items()):
            if node_id not in index_of:
                end.close()
            else:
                assert self._givers is not None
                self._givers.givers[number].node = index_of[node_id]
        for number, end in list(self._takers.items()):
            if index_of.get(self._taker_nodes[number]) != self._courier.taker(number).node:
                end.close()

    # --- taking -----------------------------------------------------------------------------

    def act(self) -> None:
        """Say what is to be asked for, close what is over, and make a conveyor that is wished
        for."""
        if self._courier.cut_off:
            for number in self._courier.take_cut_off():
                if number in self._takers:
                    self._takers[number].close()
        for number, end in self._takers.items():
            said = self._courier.requests_to_send(number)
            if said:
                end.end.write(said, of_block=False)
        wished = self._courier.take_wish(self._process.now)
        pool = self._core.pool
        if wished is None or pool is None or wished not in pool.nodes:
            return
        node = pool.nodes[wished]
        if node.node_id in self._asking:
            return
        until = self._process.now + _CONNECT_S
        call = ConveyCall(self._core.options.node_id, node, until)

        def changed() -> None:
            if call.agreed and not call.closed:
                end = driver.detach()
                call.end(self._process.now)
                del self._asking[node.node_id]
                self._take_from(end, wished, node.node_id)

        def over() -> None:
            if self._asking.pop(node.node_id, None) is not None:
                self._courier.conveyor_failed(self._process.now, wished)

        driver = self._asking[node.node_id] = StreamDriver(
            *(self._world, self._process, self._open_stream(node.node_id), call),
            opened=call.connected,
            changed=changed,
            over=over,
        )
        driver.flush()

    def _take_from(self, end: StreamEnd, node: int, node_id: str) -> None:
        number = self._courier.conveyor_stands(node)
        if number is None:
            end.close()
            return
        self._world.counts["conveyor.stands"] += 1

        def moved() -> None:
            data = end.read(PIECE_BYTES)
            while data:
                self._courier.brought(number, data, self._process.now)
                data = end.read(PIECE_BYTES) if end.inbox else b""
            self._settled()

        def over() -> None:
            del self._takers[number], self._taker_nodes[number]
            self._courier.conveyor_gone(self._process.now, number)
            self._settled()

        self._taker_nodes[number] = node_id
        made = self._takers[number] = MovedEnd(self._process, end, moved, over)
        made.moved()

    # --- giving -----------------------------------------------------------------------------

    def give_to(self, end: StreamEnd, node_id: str) -> None:
        """A node asks by this stream from now on."""
        givers, pool = self._givers, self._core.pool
        assert givers is not None
        if node_id in self._gives:
            self._gives[node_id][1].close()
        node = pool.nodes_by_id.get(node_id) if pool is not None else None
        number = givers.begin(node.index) if node is not None else None
        if number is None:
            end.close()
            return

        def moved() -> None:
            while end.inbox and (room_bytes := givers.room_bytes(number)):
                givers.hear(number, end.read(min(room_bytes, REQUESTS * REPLY.size)))
                send()
            send()

        def send() -> None:
            while end.takes_more:
                data = givers.bytes_to_send(number, PIECE_BYTES)
                given, sent_bytes = givers.take_given()
                self._core.conveyed(given, sent_bytes)
                self._world.counts["conveyor.given"] += len(given)
                if not data:
                    return
                end.write(data, of_block=sent_bytes > 0)

        def over() -> None:
            givers.end(number)
            if self._gives.get(node_id, (-1, None))[0] == number:
                del self._gives[node_id]

        made = MovedEnd(self._process, end, moved, over)
        self._gives[node_id] = number, made
        made.moved()


def _offended(why: str) -> None:
    raise AssertionError(f"what leaves by conveyors: {why}")
