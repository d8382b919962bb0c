"""A port without a socket, for tests, simulation and the controller's packets.

Owns: nothing but its two queues. Must not know: who puts frames in or takes them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcast.switchsim.ports.port import Port, PortOptions


class InProcessPort(Port):
    """A port without a socket: `receive` puts frames in, `on_transmit` takes them out."""

    kind = "inprocess"

    def __init__(
        self,
        number: int,
        options: PortOptions | None = None,
        on_transmit: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`on_transmit` returns whether it took the frame; without it, frames pile up in `sent`,
        which is bounded like any other queue."""
        super().__init__(number, options or PortOptions())
        self._on_transmit = on_transmit
        self.sent: deque[bytes] = deque()

    def fileno(self) -> int | None:
        return None

    def drain(self) -> int:
        return 0

    def describe(self) -> str:
        return self.kind

    def _send(self, frame: bytes) -> bool:
        if self._on_transmit is not None:
            taken = self._on_transmit(frame)
        else:
            taken = len(self.sent) < self.options.queue_depth
            if taken:
                self.sent.append(frame)
        if not taken:
            self.counters.tx_queue_drops += 1
        return taken
