"""The simulated puts by compiled code: the product's both ends (`kvcast.protocol.pushing`) over
simulated streams.

Owns: what `kvcast.hostagent.network.pushing` and `bulk_link` own of them, without sockets. Must not
know: what is pushed or taken. Bytes are damaged as those of other bulk transfers are.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.connection_ends import Table
from kvcast.hostagent.core.pushing import Pushes
from kvcast.simulation.moved_connections import PIECE_BYTES, MovedSide
from kvcast.simulation.streams import Process, StreamEnd
from kvcast.simulation.world import World


class PushSide(MovedSide):
    """One agent's connections on which blocks are pushed, both ways."""

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
        super().__init__(
            *(world, process, core),
            ours=Table(
                pushes.pusher_stands,
                lambda number: pushes.pusher_gone(process.now, number),
                pushes.pusher,
            ),
            theirs=Table(pushes.receiver_stands, pushes.receiver_gone, pushes.receiver),
            open_stream=open_stream,
            settled=settled,
            pushes=True,
        )
        self._pushes = pushes
        pushes.connects = True
        core.serving.takes_pushes = pushes.takes

        def soon(close: Callable[[], None]) -> None:  # not in the middle of what is heard now
            world.after(0.0, lambda: process.when_running(close))

        core.stop_pushing = lambda: soon(self._ours.close_all)
        core.stop_taking = lambda: soon(self._theirs.close_all)

    def failed(self, now: float, node: int) -> None:
        self._pushes.pusher_failed(now, node)

    def expire(self) -> float | None:
        """Close what stands still; when that may be of something else."""
        for number in self._pushes.still(self._process.now):
            self._theirs.close(number)
        return self._pushes.expire(self._process.now)

    def act(self) -> None:
        """Push what there is, close what is over, and make a connection that is wished for."""
        if self._pushes.cut_off:
            pushers, receivers = self._pushes.take_cut_off()
            for number in pushers:
                self._ours.close(number)
            for number in receivers:
                self._theirs.close(number)
        for number, moved in self._ours.items():
            self._send(number, moved.end)
        now = self._process.now
        wished = self._pushes.take_wish(now)
        if wished is not None and self._core.departures.is_tight(now):
            self.failed(now, wished)
        else:
            self.begin(wished)

    def _send(self, number: int, end: StreamEnd) -> None:
        while end.takes_more:
            data, of_block = self._pushes.piece_to_send(number, PIECE_BYTES, self._process.now)
            if not data:
                return
            end.write(data, of_block=of_block)

    def move_ours(self, number: int, end: StreamEnd) -> None:
        self._send(number, end)
        data = end.read(PIECE_BYTES)
        if data:
            self._pushes.heard_verdicts(number, data, self._process.now)
            self._settled()

    def move_theirs(self, number: int, end: StreamEnd) -> None:
        data = end.read(PIECE_BYTES)
        while data:
            verdicts = self._pushes.brought(number, data, self._process.now)
            if verdicts:
                end.write(verdicts, of_block=False)
            data = end.read(PIECE_BYTES) if end.inbox else b""
        self._settled()
