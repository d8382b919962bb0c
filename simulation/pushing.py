"""The simulated puts by compiled code: the product's both ends (`kvcast.protocol.pushing`) over
simulated streams.

Owns: what `kvcast.hostagent.network.pushing` and `bulk_link` own of them, without sockets. Must not
know: what is pushed or taken. Bytes are damaged as those of other bulk transfers are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.pushing import Pushes
from kvcast.protocol.links.convey import ConveyCall
from kvcast.simulation.conveyor import PIECE_BYTES, MovedEnd
from kvcast.simulation.streams import Process, StreamDriver, StreamEnd
from kvcast.simulation.world import World

_CONNECT_S: Final = 1.0


class PushSide:
    """One agent's connections on which blocks are pushed, both ways. `open_stream` begins a
    connection to a node; `settled` is called when something has come, and does what follows."""

    def __init__(
        self,
        world: World,
        process: Process,
        core: AgentCore,
        pushes: Pushes,
        *,
        open_stream: Callable[[str], StreamEnd],
        settled: Callable[[], None],
    ) -> None:
        self._world = world
        self._process = process
        self._core = core
        self._pushes = pushes
        self._open_stream = open_stream
        self._settled = settled
        self._pushers: dict[int, MovedEnd] = {}
        self._pusher_nodes: dict[int, str] = {}
        self._receivers: dict[str, tuple[int, MovedEnd]] = {}
        self._asking: dict[str, StreamDriver] = {}
        pushes.connects = True
        core.serving.takes_pushes = pushes.takes

    def die(self, *, machine: bool) -> None:
        """The process is gone."""
        for end in self._pushers.values():
            end.end.stream.reset(by=0, machine=machine)
        for _, end in self._receivers.values():
            end.end.stream.reset(by=1, machine=machine)
        for driver in self._asking.values():
            driver.end.stream.reset(by=0, machine=machine)

    def follow(self) -> None:
        """The map may have changed."""
        pool = self._core.pool
        assert pool is not None
        index_of = {node_id: node.index for node_id, node in pool.nodes_by_id.items()}
        for node_id, (number, end) in list(self._receivers.items()):
            if node_id not in index_of:
                end.close()
            else:
                self._pushes.receiver(number).node = index_of[node_id]
        for number, end in list(self._pushers.items()):
            if index_of.get(self._pusher_nodes[number]) != self._pushes.pusher(number).node:
                end.close()

    def expire(self) -> float | None:
        """Close what stands still; when that may be of something else."""
        still = self._pushes.still(self._process.now)
        for number, end in list(self._receivers.values()):
            if number in still:
                end.close()
        return self._pushes.expire(self._process.now)

    # --- pushing ----------------------------------------------------------------------------

    def act(self) -> None:
        """Push what there is, close what is over, and make a connection that is wished for."""
        if self._pushes.cut_off:
            pushers, receivers = self._pushes.take_cut_off()
            for number in pushers:
                self._pushers[number].close()
            for number, end in list(self._receivers.values()):
                if number in receivers:
                    end.close()
        for number in list(self._pushers):
            self._send(number)
        wished = self._pushes.take_wish(self._process.now)
        pool = self._core.pool
        if wished is None or pool is None or wished not in pool.nodes:
            return
        node = pool.nodes[wished]
        if node.node_id in self._asking:
            return
        until = self._process.now + _CONNECT_S
        call = ConveyCall(self._core.options.node_id, node, until, pushes=True)

        def changed() -> None:
            if call.agreed and not call.closed:
                end = driver.detach()
                call.end(self._process.now)
                del self._asking[node.node_id]
                self._push_to(end, wished, node.node_id)

        def over() -> None:
            if self._asking.pop(node.node_id, None) is not None:
                self._pushes.pusher_failed(self._process.now, wished)

        driver = self._asking[node.node_id] = StreamDriver(
            *(self._world, self._process, self._open_stream(node.node_id), call),
            opened=call.connected,
            changed=changed,
            over=over,
        )
        driver.flush()

    def _send(self, number: int) -> None:
        end = self._pushers[number].end
        while end.takes_more:
            data, of_block = self._pushes.piece_to_send(number, PIECE_BYTES, self._process.now)
            if not data:
                return
            end.write(data, of_block=of_block)

    def _push_to(self, end: StreamEnd, node: int, node_id: str) -> None:
        number = self._pushes.pusher_stands(node)
        if number is None:
            end.close()
            return
        self._world.counts["push.connections"] += 1

        def moved() -> None:
            self._send(number)
            data = end.read(PIECE_BYTES)
            if data:
                self._pushes.heard_verdicts(number, data, self._process.now)
                self._settled()

        def over() -> None:
            del self._pushers[number], self._pusher_nodes[number]
            self._pushes.pusher_gone(self._process.now, number)
            self._settled()

        self._pusher_nodes[number] = node_id
        made = self._pushers[number] = MovedEnd(self._process, end, moved, over)
        made.moved()

    # --- a home's end -----------------------------------------------------------------------

    def take_from(self, end: StreamEnd, node_id: str) -> None:
        """A node pushes by this stream from now on."""
        pool = self._core.pool
        if node_id in self._receivers:
            self._receivers[node_id][1].close()
        node = pool.nodes_by_id.get(node_id) if pool is not None else None
        number = self._pushes.receiver_stands(node.index) if node is not None else None
        if number is None:
            end.close()
            return

        def moved() -> None:
            data = end.read(PIECE_BYTES)
            while data:
                verdicts = self._pushes.brought(number, data, self._process.now)
                if verdicts:
                    end.write(verdicts, of_block=False)
                data = end.read(PIECE_BYTES) if end.inbox else b""
            self._settled()

        def over() -> None:
            self._pushes.receiver_gone(number)
            if self._receivers.get(node_id, (-1, None))[0] == number:
                del self._receivers[node_id]

        made = MovedEnd(self._process, end, moved, over)
        self._receivers[node_id] = number, made
        made.moved()
