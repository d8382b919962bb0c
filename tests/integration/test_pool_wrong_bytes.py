"""A home that lies: it answers READs with bytes that are not the block.

The liar takes the place of an agent that was killed: it stands at its end of the tunnel, with its
addresses, so that every guard of the switch lets it through. Oracle: bytes that follow from keys;
and the readers' counters, which must say that they saw the lie. Cannot see: a home that lies
about the digest too (nobody but the writer knows the right one); then the bytes are whole and
consistent, which is all that a digest can promise.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcast.bench.hostile_bytes import encapsulation
from kvcast.bench.incast import home_keys
from kvcast.protocol.messages import ethernet, wire
from kvcast.topologies.pool import Pool
from kvcast.topologies.processes import TunnelNetwork
from kvcast.workloads import content
from pool_harness import BLOCK_BYTES, eventually, get, namespace_of, put, running_pool

LIAR = "node-1"


class Liar:
    """Answers every READ with chunks of the right form, size and digest, and wrong bytes."""

    def __init__(self, pool: Pool) -> None:
        assert isinstance(pool.network, TunnelNetwork)
        self._star = pool.star
        self._me = pool.star.host(LIAR)
        self.reads = 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(pool.network.node_side(self._me))
        self.socket.connect(pool.network.switch_side(self._me))
        self.socket.setblocking(False)

    def answer_what_waits(self) -> None:
        while True:
            try:
                frame = self.socket.recv(2048)
            except (BlockingIOError, ConnectionRefusedError):
                return
            with contextlib.suppress(wire.WireError):
                datagram = ethernet.unwrap(frame)
                read = wire.decode(datagram.payload)
                if read.op == wire.OP_READ:
                    self.reads += 1
                    self._lie(datagram.src.ip, read)

    def _lie(self, reader_ip: int, read: wire.Frame) -> None:
        reader = next(h for h in self._star.hosts if ethernet.parse_ip(h.ip) == reader_ip)
        wrap = encapsulation(self._me, reader)
        truth = content.block_bytes(bytes(read.key), BLOCK_BYTES)
        chunks = [i for i in range(BLOCK_BYTES // wire.CHUNK_BYTES) if read.wanted >> i & 1]
        for chunk in chunks:
            part = bytearray(truth[chunk * wire.CHUNK_BYTES : (chunk + 1) * wire.CHUNK_BYTES])
            part[chunk % 7] ^= 0x01
            flags = read.flags & wire.FLAG_PARTIAL
            if chunk == chunks[-1]:
                flags |= wire.FLAG_LAST
            data = wire.Frame(
                wire.OP_DATA,
                read.namespace,
                bytes(read.key),
                segment=read.segment,
                flags=flags,
                group=read.group,
                digest=wire.digest_of(truth),
                size=BLOCK_BYTES,
                chunk=chunk,
                tag=read.tag,
                payload=bytes(part),
            )
            with contextlib.suppress(BlockingIOError):
                self.socket.send(wrap.wrap(wire.encode(data)))


@contextlib.contextmanager
def lying(pool: Pool) -> Iterator[Liar]:
    """A liar that answers while the loop runs."""
    liar = Liar(pool)
    loop = asyncio.get_running_loop()
    loop.add_reader(liar.socket, liar.answer_what_waits)
    try:
        yield liar
    finally:
        loop.remove_reader(liar.socket)
        liar.socket.close()


@pytest.mark.parametrize("plain", [False, True])
async def test_wrong_bytes_are_never_delivered_and_the_replica_answers(
    tmp_path: Path, plain: bool
) -> None:
    async with running_pool(tmp_path, 4, lease_s=600.0, plain=plain) as (pool, links):
        namespace = await namespace_of(links[0])
        keys = home_keys(pool, LIAR, 4, "lies")
        await put(links[0], namespace, keys)

        async def replicated() -> bool:
            held: set[bytes] = set()
            for link in links[1:]:
                held |= {
                    b.key for b in (await (await link.client()).describe(namespace, keys)).held
                }
            return held == set(keys)

        await eventually("every block has a second home", replicated)
        await pool.kill(LIAR)
        with lying(pool) as liar:
            results = await asyncio.gather(
                *(get(link, namespace, keys, gather_ms=30) for link in links[1:])
            )
        assert liar.reads > 0
        for came, wrong, _ in results:
            assert wrong == 0
            assert came == len(keys)
        counters = [await (await link.client()).stats() for link in links[1:]]
        assert sum(each["requester_corrupt_blocks_total"] for each in counters) > 0


async def test_without_another_copy_a_lie_ends_as_a_miss(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3, lease_s=600.0, replicas=0) as (pool, links):
        namespace = await namespace_of(links[0])
        keys = home_keys(pool, LIAR, 2, "lies")
        await put(links[0], namespace, keys)
        await pool.kill(LIAR)
        with lying(pool) as liar:
            results = await asyncio.gather(
                *(get(link, namespace, keys, deadline_s=4.0) for link in links[1:])
            )
        assert liar.reads > 0
        assert [came for came, _, _ in results] == [0, 0]


async def test_a_lie_does_not_get_into_the_switch_for_good(tmp_path: Path) -> None:
    """Pinned while the liar answers: whatever the switch serves, no reader takes wrong bytes."""
    async with running_pool(tmp_path, 4, lease_s=600.0, admit="pin") as (pool, links):
        namespace = await namespace_of(links[0])
        (key,) = home_keys(pool, LIAR, 1, "pinned lie")
        await put(links[0], namespace, [key])
        await pool.http("POST", "/v1/pin", {"namespace": namespace, "key": key.hex()})
        await pool.kill(LIAR)
        with lying(pool):
            results = [await get(link, namespace, [key], deadline_s=8.0) for link in links[1:]]
        assert all(wrong == 0 for _, wrong, _ in results)
