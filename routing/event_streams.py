"""Engines' KV events over ZeroMQ: a SUB socket each, and a DEALER for what was missed.

Owns: the sockets, their bounds, and when a replay is asked for. Must not know: what events mean
(`core.kv_events`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import zmq
import zmq.asyncio
from kvcast.routing.core.kv_events import END_OF_REPLAY, EngineEvents, EventError

log = logging.getLogger(__name__)

QUEUED_MESSAGES: Final = 10_000
"""Of one engine; beyond, ZeroMQ drops, and the gap is replayed."""
MAX_MESSAGE_BYTES: Final = 64 << 20
REPLAY_TIMEOUT_S: Final = 5.0
"""For the next batch of a replay."""
_REPLAYED_BATCHES: Final = 100_000
_BATCHES_AT_ONCE: Final = 64
"""Between two looks at what else there is to do: a replay must not hold up requests."""
_RETRY_REPLAY_S: Final = 10.0


class EventStream:
    """Feeds one engine's events into its `EngineEvents`, between `start` and `close`."""

    def __init__(self, events: EngineEvents, publisher: str, replay: str | None) -> None:
        self.events = events
        self._publisher = publisher
        self._replay = replay
        self._no_replay_until = 0.0
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen; the engine need not be there yet."""
        self._context = zmq.asyncio.Context()
        self._task = asyncio.create_task(self._listen())
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.events.counts["streams_failed_total"] += 1
            log.error("events of %s are not heard any more: %s", self._publisher, error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _listen(self) -> None:
        assert self._context is not None
        socket = self._context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.LINGER, 0)
        socket.connect(self._publisher)
        socket.subscribe(b"")
        try:
            # What the engine did before we came is in its replay, if anywhere.
            await self._catch_up()
            number = 0
            while True:
                await self._heard(await socket.recv_multipart())
                number += 1
                if number % _BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            socket.close()

    async def _heard(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self.events.counts["malformed_total"] += 1
            return
        sequence = int.from_bytes(frames[1], "big", signed=True)
        if sequence < 0:
            self.events.counts["malformed_total"] += 1
            return
        if not self._take(sequence, frames[2]):
            await self._catch_up()
            if not self._take(sequence, frames[2]):
                self.events.skip_to(sequence)
                self._take(sequence, frames[2])

    def _take(self, sequence: int, payload: bytes) -> bool:
        """Hand a batch on; False if earlier ones are missing."""
        try:
            return self.events.heard(sequence, payload) != "gap"
        except EventError as error:
            log.debug("a batch of %s: %s", self._publisher, error)
            return True

    async def _catch_up(self) -> None:
        """Ask for all batches from the next one on, if there is somebody to ask."""
        loop = asyncio.get_running_loop()
        if self._replay is None or loop.time() < self._no_replay_until:
            return
        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            socket.connect(self._replay)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", self.events.next_sequence.to_bytes(8, "big")])
            for number in range(_REPLAYED_BATCHES):
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    break
                sequence = int.from_bytes(frames[1], "big", signed=True)
                if sequence == END_OF_REPLAY:
                    self.events.counts["replays_total"] += 1
                    return
                if not self._take(sequence, frames[2]):
                    # The engine's buffer begins later than what we want.
                    self.events.skip_to(sequence)
                    self._take(sequence, frames[2])
                if number % _BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except (TimeoutError, zmq.ZMQError) as error:
            log.debug("replay from %s: %s", self._replay, error)
        finally:
            socket.close()
        self.events.counts["replays_failed_total"] += 1
        self._no_replay_until = loop.time() + _RETRY_REPLAY_S
