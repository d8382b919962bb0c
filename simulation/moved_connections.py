"""Simulated connections on which compiled code moves blocks: what conveyors and pushes have in
common.

Owns: how one is begun with another node, what ends it, and which there are, by the product's own
`Ends`. Must not know: what is said on them (`conveyor`, `pushing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.connection_ends import Ends, Table
from kvcast.protocol.links.convey import ConveyCall
from kvcast.simulation.streams import Process, StreamDriver, StreamEnd
from kvcast.simulation.world import World

PIECE_BYTES: Final = 16 * 1024
_CONNECT_S: Final = 1.0

Moved = Callable[[int, StreamEnd], None]
"""Bytes have come on the connection of that number, or may go."""


class MovedEnd(StreamDriver):
    """What a stream's end tells once compiled code moves its bytes."""

    def __init__(self, process: Process, end: StreamEnd, move: Moved, over: Callable[[int], None]):
        self.end = end
        self.number = -1
        self._process = process
        self._move = move
        self._when_gone = over
        self._is_over = False
        end.driver = self

    def connected(self) -> None:
        pass

    def moved(self) -> None:
        self._process.when_running(self._moved)

    def gone(self, why: str) -> None:
        self._process.when_running(self._gone)

    def _gone(self) -> None:
        if not self._is_over:
            self._when_gone(self.number)

    def _moved(self) -> None:
        if not self._is_over:
            self._move(self.number, self.end)

    def close(self) -> None:
        """Nothing is moved any more."""
        self._is_over = True
        self.end.close()


class MovedSide:
    """One agent's connections of one kind. `ours`: the product's table of those that we begin, by
    `move_ours`, and `theirs` of those that other nodes begin, by `move_theirs`. `open_stream`
    begins a connection to a node; `settled` is called when something has come, and does what
    follows."""

    def __init__(
        self,
        world: World,
        process: Process,
        core: AgentCore,
        *,
        ours: Table,
        theirs: Table,
        open_stream: Callable[[str], StreamEnd],
        settled: Callable[[], None],
        pushes: bool,
    ) -> None:
        self._world = world
        self._process = process
        self._core = core
        self._open_stream = open_stream
        self._settled = settled
        self._pushes_blocks = pushes

        def gone(number: int) -> None:
            ours.gone(number)
            settled()

        self._ours: Ends[MovedEnd] = Ends(
            ours._replace(gone=gone), begin=_number, end=_close, begun_here=True
        )
        self._theirs: Ends[MovedEnd] = Ends(theirs, begin=_number, end=_close, begun_here=False)
        self._asking: dict[str, StreamDriver] = {}

    def move_ours(self, number: int, end: StreamEnd) -> None:
        """Move what there is on a connection that we have begun."""
        raise NotImplementedError

    def move_theirs(self, number: int, end: StreamEnd) -> None:
        """The same of one that another node has begun."""
        raise NotImplementedError

    def failed(self, now: float, node: int) -> None:
        """No connection was to be had to that node."""
        raise NotImplementedError

    def die(self, *, machine: bool) -> None:
        """The process is gone."""
        for by, ends in enumerate((self._ours, self._theirs)):
            for _, moved in ends.items():
                moved.end.stream.reset(by=by, machine=machine)
        for driver in self._asking.values():
            driver.end.stream.reset(by=0, machine=machine)

    def follow(self) -> None:
        """The map may have changed."""
        pool = self._core.pool
        assert pool is not None
        index_of = {node_id: node.index for node_id, node in pool.nodes_by_id.items()}
        self._theirs.follow(index_of)
        self._ours.follow(index_of)

    def begin(self, wished: int | None) -> None:
        """Make the connection that is wished for, if any is."""
        pool = self._core.pool
        if wished is None or pool is None or wished not in pool.nodes:
            return
        node = pool.nodes[wished]
        if node.node_id in self._asking:
            return
        until = self._process.now + _CONNECT_S
        call = ConveyCall(self._core.options.node_id, node, until, pushes=self._pushes_blocks)

        def changed() -> None:
            if call.agreed and not call.closed:
                end = driver.detach()
                call.end(self._process.now)
                del self._asking[node.node_id]
                self._move(self._ours, end, self.move_ours, wished, node.node_id)

        def over() -> None:
            if self._asking.pop(node.node_id, None) is not None:
                self.failed(self._process.now, wished)

        driver = self._asking[node.node_id] = StreamDriver(
            *(self._world, self._process, self._open_stream(node.node_id), call),
            opened=call.connected,
            changed=changed,
            over=over,
        )
        driver.flush()

    def accept(self, end: StreamEnd, node_id: str) -> None:
        """A node has begun this one."""
        pool = self._core.pool
        node = pool.nodes_by_id.get(node_id) if pool is not None else None
        if node is None:
            end.close()
        else:
            self._move(self._theirs, end, self.move_theirs, node.index, node_id)

    def _move(
        self, ends: Ends[MovedEnd], end: StreamEnd, move: Moved, node: int, node_id: str
    ) -> None:
        moved = MovedEnd(self._process, end, move, ends.close)
        if ends.add(moved, node, node_id):
            if ends is self._ours:
                kind = "push" if self._pushes_blocks else "conveyor"
                self._world.counts[f"{kind}.connections"] += 1
            moved.moved()
        else:
            moved.close()


def _number(number: int, end: MovedEnd) -> bool:
    end.number = number
    return True


def _close(_number: int, end: MovedEnd) -> None:
    end.close()
