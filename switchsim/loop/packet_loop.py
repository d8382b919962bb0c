"""The packet loop beside asyncio, as the daemon runs it.

Owns: the life of the loop as a task, and what becomes of punted frames and digests on the event
loop. Must not know: how frames are moved; P4Runtime.

A compiled program runs in a thread of its own. An interpreted one runs in the event loop's: a frame
of each port, and then it is the control plane's turn, so neither needs locks. Frames for the CPU
port are handed to `packet_in` here, on the event loop; what it refuses counts among that port's
tx_queue_drops, as does what the ring between the threads had no room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvcast.switchsim.loop.runner import NativeLoop
from kvcast.switchsim.loop.state import RECEIVE_BATCH
from kvcast.switchsim.ports.port import MAX_FRAME_BYTES, MIN_FRAME_BYTES, Port
from kvcast.switchsim.ports.udp_tunnel import UdpTunnelPort

log = logging.getLogger("kvcast.switchsim.loop.packet_loop")

# Frames handed to the controller between two looks at everything else.
_PUNTS_A_TURN = 64


class PacketLoop:
    """Serves `ports` until cancelled."""

    def __init__(
        self,
        ports: Sequence[Port],
        *,
        cpu_port: int | None,
        packet_in: Callable[[bytes], bool],
        after_frames: Callable[[], None],
        clock_base_ns: int,
        queue_depth: int,
        threaded: bool,
    ) -> None:
        """`packet_in` takes a frame that left by the CPU port, and says whether it did;
        `after_frames` is called when the program may have left something to be collected.
        `threaded` where programs are compiled. `native`, which moves the frames, is there for
        programs, counters, and to be closed."""
        self._threaded = threaded
        self._cpu_port = cpu_port
        self._packet_in = packet_in
        self._after_frames = after_frames
        self._cpu_counts: Counter[str] = Counter()
        """What is to be added to the CPU port's counters."""
        self._peers: dict[int, tuple[str, int] | None] = {}
        self._learning = [
            port.number for port in ports if isinstance(port, UdpTunnelPort) and not port.fixed_peer
        ]
        self.native = NativeLoop(
            ports,
            clock_base_ns=clock_base_ns,
            inject_frames=queue_depth,
            punt_frames=queue_depth,
            batch_frames=RECEIVE_BATCH if threaded else 1,
        )
        self._event_loop: asyncio.AbstractEventLoop | None = None

    def packet_out(self, port: Port, frame: bytes) -> bool:
        """A frame comes in at the CPU port; False where it cannot be taken."""
        assert port.number == self._cpu_port
        if len(frame) < MIN_FRAME_BYTES:
            self._cpu_counts["rx_runts"] += 1
            return False
        if len(frame) > MAX_FRAME_BYTES:
            self._cpu_counts["rx_oversize"] += 1
            return False
        taken = self.native.inject(port.number, frame)
        self.native.wake()
        return taken

    async def run(self) -> None:
        """Move frames for ever; cancel the task to stop. Closes no port."""
        loop = self._event_loop = asyncio.get_running_loop()
        native = self.native
        loop.add_reader(native.notify_descriptor, self._collect)
        if self._threaded:
            native.start()
        else:
            loop.add_reader(native.epoll_descriptor, native.turn)
        try:
            await asyncio.Event().wait()
        finally:
            # The loop answers between two batches: this does not block for long.
            native.stop()
            loop.remove_reader(native.epoll_descriptor)
            loop.remove_reader(native.notify_descriptor)
            self._collect()
            self._event_loop = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While this is entered, frames wait in the kernel's buffers."""
        if self._event_loop is None or not self._threaded:
            yield
            return
        self.native.stop()
        try:
            yield
        finally:
            self.native.start()

    def _collect(self) -> None:
        self.native.heed()
        self._after_frames()
        for number in self._learning:
            peer = self.native.peer(number)
            if peer != self._peers.get(number):
                self._peers[number] = peer
                text = "" if peer is None else f"{peer[0]}:{peer[1]}"
                log.info("port peer learned", extra={"port": number, "peer": text})
        emitted = self.native.take(_PUNTS_A_TURN)
        for one in emitted:
            if one.port != self._cpu_port or not self._packet_in(one.frame):
                self._cpu_counts.update(tx_frames=-1, tx_bytes=-len(one.frame), tx_queue_drops=1)
        if len(emitted) == _PUNTS_A_TURN and self._event_loop is not None:
            self._event_loop.call_soon(self._collect)

    def read_counters(self, port: Port) -> dict[str, int]:
        """All counters of a port, by name."""
        counts = self.native.read_counters(port.number)
        if port.number == self._cpu_port:
            for name, count in self._cpu_counts.items():
                counts[name] += count
        return counts
