"""The loop that moves frames: ports to program, program to ports.

Owns: the order in which frames are taken, and how the loop shares its thread with the control
plane. Must not know: P4Runtime, how a frame is processed, what a port is made of.

One thread runs everything. The kernel's receive buffers are small (208 KiB unless privileged) and
a frame takes the interpreter up to milliseconds, so before every frame all sockets that are
readable are emptied into the ports' own queues. Then one frame of each port in turn is processed:
READs must not wait behind the DATA that they want to share.
After SLICE_S the loop yields to asyncio, where gRPC lives; with nothing to do it sleeps until a
socket is readable, `wake` is called, or a paced port may send again.

An exception from the program is a bug, not a reason to stop forwarding: the frame is counted
(`process_errors`) and dropped.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvcast.switchsim.loop.counters import LoopCounters
from kvcast.switchsim.ports.port import Port

log = logging.getLogger("kvcast.switchsim.loop.interpreted")

# Longest stretch for which the control plane waits while frames are queued. An RPC takes about ten
# turns of the event loop; a turn costs some 15 us.
SLICE_S = 0.0003
# A program that fails on every frame must not fill the disk with tracebacks.
LOGGED_ERRORS = 10

Process = Callable[[int, bytes, int], list[tuple[int, bytes]]]


class PacketLoop:
    """Serves `ports` until cancelled. Construct and run it on one event loop."""

    def __init__(
        self,
        ports: Iterable[Port],
        process: Process,
        after_frame: Callable[[], None],
        now_us: Callable[[], int],
    ) -> None:
        """`process(port, frame, now_us())` returns what to send; `after_frame` is called behind
        each frame, for whatever the program left to be collected (digests)."""
        self._ports = list(ports)
        self._turns = deque(self._ports)
        self._by_number = {port.number: port for port in self._ports}
        if len(self._by_number) != len(self._ports):
            raise ValueError("two ports have the same number")
        self._process = process
        self._after_frame = after_frame
        self._now_us = now_us
        self._clock = time.monotonic
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, Port] = {}
        for port in self._ports:
            descriptor = port.fileno()
            if descriptor is not None:
                self._by_descriptor[descriptor] = port
                self._epoll.register(descriptor, select.EPOLLIN)
        self._wakeup = asyncio.Event()
        self.counters = LoopCounters()

    @property
    def ports(self) -> list[Port]:
        return self._ports

    def wake(self) -> None:
        """A frame was queued by other means than a socket (packet-out, a test)."""
        self._wakeup.set()

    def backlog(self) -> int:
        """Frames that wait in ingress queues."""
        return sum(len(port.ingress) for port in self._ports)

    async def run(self) -> None:
        """Move frames for ever; cancel the task to stop. Closes no port."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._epoll.fileno(), self._wakeup.set)
        try:
            while True:
                self._wakeup.clear()
                started = self._clock()
                more = self._slice(started + SLICE_S)
                self.counters.busy_us += int((self._clock() - started) * 1e6)
                if more:
                    self.counters.slices += 1
                    await asyncio.sleep(0)
                else:
                    await self._sleep(loop)
        finally:
            loop.remove_reader(self._epoll.fileno())

    def close(self) -> None:
        self._epoll.close()

    def read_counters(self, port: Port) -> dict[str, int]:
        """All counters of a port, by name."""
        return port.read_counters()

    def ingress_backlog(self, port: Port) -> int:
        """Frames of a port that wait for the program."""
        return len(port.ingress)

    def egress_backlog(self, port: Port) -> int:
        """Frames that wait for a port's rate."""
        return port.egress_backlog

    def packet_out(self, port: Port, frame: bytes) -> bool:
        """A frame comes in at an in-process port; False where it was dropped."""
        if not port.receive(frame):
            return False
        self.wake()
        return True

    def run_until_idle(self, max_frames: int = 1_000_000) -> int:
        """Process everything that is queued or readable now, without an event loop's help; for
        tests and in-process runs. Returns the number of frames processed."""
        before = self.counters.processed
        while self._slice(float("inf")) and self.counters.processed - before < max_frames:
            pass
        return self.counters.processed - before

    async def _sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        release_s = self._release()
        if release_s is None:
            await self._wakeup.wait()
            return
        timer = loop.call_later(max(0.0, release_s - self._clock()), self._wakeup.set)
        try:
            await self._wakeup.wait()
        finally:
            timer.cancel()

    def _release(self) -> float | None:
        """Let paced ports send; returns when the next one may."""
        now_s = self._clock()
        times = [port.release(now_s) for port in self._ports]
        return min((t for t in times if t is not None), default=None)

    def _drain(self) -> bool:
        """Empty every readable socket; True where that brought something."""
        arrived = 0
        for descriptor, _events in self._epoll.poll(0):
            arrived += self._by_descriptor[descriptor].drain()
        return arrived > 0

    def _slice(self, until_s: float) -> bool:
        """Process frames until there are none or the time is up; True where some may be left.

        The turns go on where the last slice ended: a slice may be over after one frame, and a
        port with a long queue would have all of them.
        """
        clock = self._clock
        drained = self._drain()
        turns = self._turns
        without = 0  # ports in a row that had nothing
        while without < len(turns):
            port = turns[0]
            turns.rotate(-1)
            if not port.ingress:
                without += 1
                continue
            without = 0
            self._one(port.number, port.ingress.popleft())
            drained = self._drain()
            if clock() >= until_s:
                self._release()
                return True
        return drained

    def _one(self, number: int, frame: bytes) -> None:
        counters = self.counters
        counters.processed += 1
        try:
            outputs = self._process(number, frame, self._now_us())
        except Exception:
            counters.process_errors += 1
            if counters.process_errors <= LOGGED_ERRORS:
                log.exception("program failed", extra={"port": number, "bytes": len(frame)})
            return
        if outputs:
            now_s = self._clock()
            for out, data in outputs:
                port = self._by_number.get(out)
                if port is None:
                    counters.no_such_port += 1
                else:
                    counters.emitted += 1
                    port.transmit(data, now_s)
        self._after_frame()
