"""The part of `kvcast.bench.rdma_shared` that shows what a card alone costs a reader: one process
that has WRITEs come into a landing zone of its own, and no agent, and one that sends them.

Owns: both ends, without READs, WRITTEN, sockets or events: whoever takes looks every so often,
counts what the card reports, and gives it room for as many again. Must not know: blocks, or a pool.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import time
from collections.abc import Callable
from typing import Final

from kvcast.bench.rdma_cards import card_of
from kvcast.hostagent.network.landing_zone import LandingZone
from kvcast.protocol.messages.roce import POOL_KEY, POOL_QUEUE_PAIR, SLOT_BYTES, Place
from kvcast.protocol.messages.wire import CHUNKS_PER_SEGMENT, FULL_SEGMENT, digest_of
from kvcast.protocol.requester.landing import LandingCounters

SLOTS: Final = 8
"""That WRITEs come into, one after the other."""
_PACE_S: Final = 0.02
"""Between segments: nobody asks for them one by one, and an emulated network loses what comes too
fast."""
_LOOK_S: Final = 0.02
"""A card's receives are enough for many times what comes meanwhile."""
_SILENCE_S: Final = 3.0
"""After so long the rest is lost."""
_BEGIN_S: Final = 30.0


def _segment() -> bytes:
    return random.Random(1).randbytes(SLOT_BYTES)


def _failed(why: str) -> None:
    raise RuntimeError(why)


def _place(number: int) -> Place:
    return Place.of(0, 0, number % SLOTS)


def _open(
    own: str, peer: str, memory: memoryview, to: tuple[int, int] = (POOL_QUEUE_PAIR, POOL_KEY)
) -> LandingZone:
    device, gid_index = card_of(own)
    return LandingZone(
        *(device, 1, gid_index, peer, memory),
        landed=lambda _segments: None,
        changed=lambda: None,
        failed=_failed,
        counters=LandingCounters(),
        to=to,
    )


async def send(own: str, peer: str, queue_pair: int, key: int, segments: int) -> None:
    """Write so many segments into the zone that has this queue pair and key."""
    memory = memoryview(mmap.mmap(-1, SLOT_BYTES))
    memory[:] = _segment()
    zone = _open(own, peer, memory, (queue_pair, key))
    sent = asyncio.Queue[bool]()
    try:
        for number in range(segments):
            zone.write(_place(number), memory, FULL_SEGMENT, sent.put_nowait)
            await asyncio.sleep(_PACE_S)
        for _ in range(segments):
            if not await sent.get():
                raise RuntimeError("the card did not send")
    finally:
        zone.close()


async def take(
    own: str, peer: str, ready: Callable[[str], object], segments: int, *, checks: bool
) -> dict[str, float]:
    """Have so many segments come, of which `ready` is told where to; what a byte of them took.
    `checks`: copy each, too, and make digests, as whoever hands blocks on must."""
    zone = _open(own, peer, memoryview(mmap.mmap(-1, SLOT_BYTES)))
    try:
        for number in range(SLOTS):
            zone.landing.claim(_place(number), None)
        processors = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {1})
        ready(f"{zone.queue_pair} {zone.key}")
        try:
            return _take(zone, segments, checks=checks)
        finally:
            os.sched_setaffinity(0, processors)
    finally:
        zone.close()


def _take(zone: LandingZone, segments: int, *, checks: bool) -> dict[str, float]:
    room = memoryview(bytearray(SLOTS * SLOT_BYTES))
    right = digest_of(_segment() * SLOTS)
    wanted, came, put, wrong_bytes = segments * CHUNKS_PER_SEGMENT, 0, 0, 0
    start_s = time.process_time()
    last = time.monotonic() + _BEGIN_S
    while came < wanted and time.monotonic() < last + _SILENCE_S:
        time.sleep(_LOOK_S)
        zone.look()
        now = zone.landing.counters.chunks
        if now > came:
            came, last = now, time.monotonic()
        while checks and put < came // CHUNKS_PER_SEGMENT:
            at = put % SLOTS * SLOT_BYTES
            room[at : at + SLOT_BYTES] = zone.landing.view(_place(put))
            put += 1
            if put % SLOTS == 0 and digest_of(room) != right:
                wrong_bytes += len(room)
    took_s = time.process_time() - start_s
    came_bytes = came * (SLOT_BYTES // CHUNKS_PER_SEGMENT)
    return {
        "agent_busy_s_per_byte": took_s / max(1, came_bytes),
        "chunks": float(came),
        "wrong_bytes": float(wrong_bytes),
        "missed": 0.0,
    }
