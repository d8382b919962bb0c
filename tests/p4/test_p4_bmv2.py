"""The compiled data plane on BMv2, beside each of our engines.

Oracle: each is the other's. The same frames go into both; what comes out must be the same, byte
for byte and in order on each port, and the counters must agree at the end. Blind to: leases and
heat windows (the clocks differ; our engines alone are tested there).
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bmv2_pool import MARKER, Bmv2Pool, bmv2_pool, find_bmv2
from kvcast.p4.definitions import RECIRCULATE_RID
from kvcast.protocol.messages import wire
from p4_frames import random_frames, wrap
from pool_engine import both_engines  # noqa: F401 - an autouse fixture
from pool_switch import (
    DECISIONS,
    FILLS,
    KEY,
    NAMESPACE,
    Entry,
    PoolSwitch,
    content_of,
    ports_of,
    resident_entry,
)

pytestmark = [
    pytest.mark.root,
    pytest.mark.bmv2,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(find_bmv2() is None, reason="no simple_switch_grpc on PATH or in "
                       "KVCAST_SIMPLE_SWITCH_GRPC"),
]  # fmt: skip

HOSTS = 5
LEASE_TICKS = 0x7FFFFFFF  # no lease runs out, so that the clocks do not matter
PADDED = wire.FLAG_PADDED
WHOLE = content_of(wire.SEGMENT_BYTES)
SHORT = content_of(3 * wire.CHUNK_BYTES - 100, seed=3)


class Pair:
    """BMv2 and an engine of ours, kept in step."""

    def __init__(self, bmv2: Bmv2Pool, ours: PoolSwitch) -> None:
        self.bmv2 = bmv2
        self.ours = ours

    async def add(self, entry: Entry) -> None:
        await self.bmv2.add([entry])
        self.ours.add(entry.table, entry.key, entry.action, *entry.params)

    async def set_group(self, group: int, replicas: list[tuple[int, int]]) -> None:
        await self.bmv2.set_group(group, replicas)
        self.ours.switch.set_multicast_group(group, replicas)

    def send(self, port: int, frame: bytes) -> list[tuple[int, bytes]]:
        """What both put out for a frame; fails if they differ."""
        expected: dict[int, list[bytes]] = {}
        out = self.ours.switch.process(port, frame, self.ours.now_us)
        for out_port, data in out:
            expected.setdefault(out_port, []).append(data)
        counts = {out_port: len(frames) for out_port, frames in expected.items()}
        assert self.bmv2.exchange(port, frame, counts) == expected
        marked = self.ours.switch.process(port, MARKER, self.ours.now_us)
        assert marked == [(self.bmv2.marker_port, MARKER)]
        return out

    def read(self, reader: int, *, key: bytes = KEY, flags: int = 0, wanted: int = 0,
             group: int = 0) -> list[tuple[int, bytes]]:  # fmt: skip
        frame = wire.Frame(
            wire.OP_READ, NAMESPACE, key, flags=flags, group=group,
            wanted=wanted or wire.FULL_SEGMENT,
        )  # fmt: skip
        return self.send(reader, wrap(reader, 1, frame))

    def answer(self, reader: int, content: bytes, key: bytes = KEY) -> list[tuple[int, bytes]]:
        """The home's answer to a READ of segment 0."""
        out = []
        chunks = wire.CELLS.chunks_of(len(content), 0)
        for chunk in range(chunks):
            frame = wire.Frame(
                wire.OP_DATA, NAMESPACE, key, digest=wire.digest_of(content), size=len(content),
                chunk=chunk, flags=wire.FLAG_LAST if chunk == chunks - 1 else 0,
                payload=content[chunk * wire.CHUNK_BYTES : (chunk + 1) * wire.CHUNK_BYTES],
            )  # fmt: skip
            out += self.send(1, wrap(1, reader, frame))
        return out

    async def check_counters(self) -> None:
        assert self.bmv2.stray() == {}
        decisions = {name: self.ours.decided(name) for name in DECISIONS}
        assert await self.bmv2.counts("decisions") == decisions
        fills = {name: self.ours.fills(name) for name in FILLS}
        assert await self.bmv2.counts("fills") == fills


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with bmv2_pool(folder, HOSTS) as bmv2:
        await bmv2.set_settings(1, LEASE_TICKS, 0)
        reference = PoolSwitch(HOSTS, target="bmv2", lease_ticks=LEASE_TICKS)
        marker = bmv2.marker_entry
        reference.add(marker.table, marker.key, marker.action, *marker.params)
        yield Pair(bmv2, reference)


async def test_readers_join_and_share_one_answer(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        assert ports_of(both.read(2)) == [1]
        for reader in (3, 4, 5):
            assert both.read(reader) == []
        assert ports_of(both.answer(2, SHORT)) == sorted([2, 3, 4, 5] * 3)
        await both.check_counters()


async def test_a_segment_is_filled_in_passing_and_served(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        await both.add(resident_entry(KEY, WHOLE, slot=3, generation=1))
        both.read(2, flags=PADDED)
        both.answer(2, WHOLE)
        assert ports_of(both.read(3, flags=PADDED)) == [3] * 64
        assert ports_of(both.read(4, flags=PADDED | wire.FLAG_PARTIAL, wanted=5)) == [4, 4]
        assert await both.bmv2.hits(3) == 2
        await both.check_counters()


async def test_a_reader_group_is_served_together(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        await both.set_group(1024, [(2, 0), (3, 0), (4, 0), (4, RECIRCULATE_RID)])
        await both.add(Entry("reader_group", (NAMESPACE, 9), "set_reader_group", (0b1110, 1024)))
        await both.add(resident_entry(KEY, SHORT, slot=255, generation=7))
        both.read(3, flags=PADDED, group=9)
        assert ports_of(both.answer(3, SHORT)) == sorted([2, 3, 4] * 3)
        assert ports_of(both.read(2, flags=PADDED, group=9)) == sorted([2, 3, 4] * 3)
        assert ports_of(both.read(5, flags=PADDED, group=9)) == [5] * 3, "no member"
        await both.check_counters()


async def test_a_read_without_padding_cannot_stop_the_switch(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        await both.add(resident_entry(KEY, SHORT, slot=0, generation=1))
        both.read(2, flags=PADDED)
        both.answer(2, SHORT)
        assert ports_of(both.read(3)) == [1]
        assert ports_of(both.read(4, flags=PADDED)) == [4] * 3
        await both.check_counters()


@pytest.mark.slow
async def test_random_frames_come_out_alike(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    contents = {KEY: SHORT, b"w" * 16: WHOLE, b"n" * 16: content_of(5000, seed=1)}
    async with pair(tmp_path) as both:
        await both.set_group(1024, [(2, 0), (4, 0), (4, RECIRCULATE_RID)])
        await both.set_group(2048, [(2, 0), (3, 0)])
        await both.add(Entry("reader_group", (NAMESPACE, 5), "set_reader_group", (0b1010, 1024)))
        await both.add(Entry("port_set", (0b110,), "set_group", (2048,)))
        await both.add(resident_entry(KEY, SHORT, slot=1, generation=1))
        await both.add(resident_entry(b"w" * 16, WHOLE, slot=2, generation=1))
        for port, frame in random_frames(rng, HOSTS, contents, 2000):
            both.send(port, frame)
        await both.check_counters()
        assert both.ours.decided("hit") > 0
