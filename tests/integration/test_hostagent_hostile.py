"""Hostile bytes at every entry point of an agent: its datagram port, its Unix socket, its bulk
port.

Oracle: the agent goes on serving right bytes, its counters account for every frame, its books
balance, and its memory does not grow. Cannot see: attacks by a client of the same user, which
can write the arena (see LIMITATIONS).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import struct
import tracemalloc
from pathlib import Path

from hostagent_harness import Pool, ip_of, key_of, mac_of, running_pool, until
from kvcast.hostagent.core.agent import AgentCore
from kvcast.protocol.messages import bulk, local
from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint, parse_ip, parse_mac
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import (
    FLAG_LAST,
    FULL_SEGMENT,
    OP_DATA,
    OP_MISS,
    OP_READ,
    BlockId,
    Frame,
    digest_of,
    encode,
)

FRAMES = 10_000


def valid_frames(rng: random.Random) -> list[bytes]:
    """Frames from node 2 to node 1, of each kind that the protocol has."""
    wrap = Encapsulation(
        Endpoint(parse_mac(mac_of(2)), parse_ip(ip_of(2))),
        Endpoint(parse_mac(mac_of(1)), parse_ip(ip_of(1))),
    )
    datagrams = []
    for number in range(8):
        key = key_of(number)
        datagrams += [
            encode(Frame(OP_READ, 1, key, wanted=FULL_SEGMENT, tag=rng.getrandbits(32))),
            encode(
                Frame(
                    OP_DATA,
                    1,
                    key,
                    flags=FLAG_LAST,
                    digest=rng.getrandbits(64) | 1,
                    size=rng.randrange(1, 100_000),
                    payload=rng.randbytes(1024),
                )
            ),
            encode(Frame(OP_MISS, 1, key, chunk=rng.randrange(1, 5))),
        ]
    return [wrap.wrap(datagram) for datagram in datagrams]


def mutate(rng: random.Random, frame: bytes) -> bytes:
    mutated = bytearray(frame)
    how = rng.randrange(5)
    if how == 0:
        return bytes(mutated[: rng.randrange(len(mutated))])
    if how == 1:
        return bytes(mutated) + rng.randbytes(rng.randrange(1, 300))
    if how == 2:
        return rng.randbytes(rng.randrange(0, 1400))
    for _ in range(rng.randrange(1, 8)):
        low = 42 if how == 3 else 0  # spare the outer headers, so that the inner ones are read
        mutated[rng.randrange(low, min(len(mutated), 42 + 52))] = rng.randrange(256)
    return bytes(mutated)


async def serves_right_bytes(pool: Pool) -> None:
    data = random.Random(1).randbytes(100_000)
    key = key_of(random.Random().getrandbits(60))
    await pool.clients[1].put(1, {key: data})
    (block,) = await pool.clients[3].get(1, [key], deadline_s=20)
    assert block is not None
    assert bytes(block.data) == data
    block.release()


async def test_ten_thousand_mutated_frames_are_all_accounted_for(tmp_path: Path) -> None:
    seed = 20_000
    rng = random.Random(seed)
    async with running_pool(tmp_path, 3) as pool:
        await pool.clients[1].put(1, {key_of(n): rng.randbytes(3000) for n in range(4)})
        await until(lambda: pool.agents[1].core.writes.replications == 0)
        pool.switch.lose = lambda port, _frame: port == 1  # what agent 1 answers goes nowhere
        core = pool.agents[1].core
        # Two fetches are in flight all the time, so that DATA and MISS meet open ones.
        getting = [
            asyncio.create_task(pool.clients[1].get(2, [key_of(n)], deadline_s=60)) for n in (5, 6)
        ]
        await asyncio.sleep(0.05)
        frames = valid_frames(rng)
        first = core.metrics.frames_received_total
        counted = sum_of_fates(core)
        sent = 0
        while sent < FRAMES:
            for _ in range(50):
                pool.switch.inject(1, mutate(rng, rng.choice(frames)))
            sent += 50
            await until(lambda: core.metrics.frames_received_total - first >= sent)  # noqa: B023
            if sent == 2000:
                gc.collect()
                tracemalloc.start()
                before = tracemalloc.get_traced_memory()[0]
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert sum_of_fates(core) - counted == sent, f"seed {seed}"
        assert grown < 1_000_000, f"{grown} bytes more after {FRAMES - 2000} frames"
        for task in getting:
            task.cancel()
        pool.switch.lose = lambda _port, _frame: False
        await serves_right_bytes(pool)
        for agent in pool.agents.values():
            agent.core.store.check()


def sum_of_fates(core: AgentCore) -> int:
    """Frames by what became of them: each is counted exactly once."""
    metrics = core.metrics
    return (
        metrics.frames_malformed_total
        + metrics.frames_misaddressed_total
        + metrics.frames_unknown_source_total
        + metrics.frames_forbidden_total
        + metrics.frames_answers_total
        + core.responder.counters.reads
    )


async def test_data_of_a_liar_never_becomes_a_block(tmp_path: Path) -> None:
    """A node that is a home of the block sends DATA with a digest that its bytes have not."""
    async with running_pool(tmp_path, 3) as pool:
        data = random.Random(1).randbytes(1000)
        await pool.clients[1].put(1, {key_of(1): data})
        wrap = Encapsulation(
            Endpoint(parse_mac(mac_of(2)), parse_ip(ip_of(2))),
            Endpoint(parse_mac(mac_of(3)), parse_ip(ip_of(3))),
        )
        lie = Frame(
            OP_DATA, 1, key_of(1), flags=FLAG_LAST, digest=77, size=1000, payload=bytes(1024)
        )
        pool.switch.lose = lambda port, _frame: port == 1  # the honest home is silent at first
        getting = asyncio.create_task(pool.clients[3].get(1, [key_of(1)], deadline_s=100))
        while not getting.done() and not (await pool.clients[3].stats())["wrong_digest_total"]:
            pool.switch.inject(3, wrap.wrap(encode(lie)))
            await asyncio.sleep(0.002)
        pool.switch.lose = lambda _port, _frame: False
        (block,) = await getting
        assert block is not None
        assert bytes(block.data) == data
        assert (await pool.clients[3].stats())["wrong_digest_total"] >= 1


async def test_random_bytes_into_the_unix_socket(tmp_path: Path) -> None:
    rng = random.Random(3)
    async with running_pool(tmp_path, 3) as pool:
        codec = MessageCodec[local.ClientMessage](local.ClientMessage)
        hello = codec.encode(local.Hello(local.LOCAL_PROTOCOL_VERSION, "hostile"))
        get = codec.encode(local.Get(1, 1, [key_of(1)], 0.01))
        metrics = pool.agents[1].core.metrics
        cut = metrics.local_protocol_errors_total
        for round_ in range(300):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "1.sock"))
            if round_ % 3 == 0:
                writer.write(rng.randbytes(rng.randrange(4, 500)))
            elif round_ % 3 == 1:
                writer.write(hello + struct.pack("!I", rng.randrange(1, 50)) + rng.randbytes(60))
            else:
                broken = bytearray(get)
                for _ in range(3):
                    broken[rng.randrange(len(broken))] = rng.randrange(256)
                writer.write(hello + bytes(broken))
            writer.write_eof()
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        assert metrics.local_protocol_errors_total > cut + 100
        await until(lambda: len(pool.agents[1]._local_server._clients) == 1)
        await serves_right_bytes(pool)


async def test_a_client_that_never_reads_its_answers_is_bounded(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        codec = MessageCodec[local.ClientMessage](local.ClientMessage)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(tmp_path / "1.sock"))
        await loop.sock_sendall(
            sock, codec.encode(local.Hello(local.LOCAL_PROTOCOL_VERSION, "deaf"))
        )
        stats = codec.encode(local.GetStats(1)) * 1000
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                while True:
                    await loop.sock_sendall(sock, stats)
        for client in pool.agents[1]._local_server._clients:
            if client._transport is not None:
                assert client._transport.get_write_buffer_size() < 17 << 20
        sock.close()
        await serves_right_bytes_between(pool, 1, 2)


async def serves_right_bytes_between(pool: Pool, writer: int, reader: int) -> None:
    await pool.clients[writer].put(1, {key_of(5): b"fine"})
    (block,) = await pool.clients[reader].get(1, [key_of(5)], deadline_s=10)
    assert block is not None
    with block:
        assert bytes(block.data) == b"fine"


async def test_more_requests_than_the_bound_are_busy(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        pool.switch.lose = lambda _port, _frame: True
        client = pool.clients[1]
        gets = [
            asyncio.create_task(client.get_outcomes(1, [key_of(n)], deadline_s=0.3))
            for n in range(local.MAX_REQUESTS_IN_FLIGHT + 20)
        ]
        results = await asyncio.gather(*gets, return_exceptions=True)
        busy = [r for r in results if isinstance(r, Exception)]
        assert len(busy) == 20
        assert {getattr(r, "status", "") for r in busy} == {"busy"}
        assert pool.agents[1].core.metrics.local_busy_total == 20


async def test_a_client_that_dies_in_the_middle_of_a_put_leaves_no_bytes(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 2) as pool:
        codec = MessageCodec[local.ClientMessage](local.ClientMessage)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "1.sock"))
        writer.write(codec.encode(local.Hello(local.LOCAL_PROTOCOL_VERSION, "dying")))
        keys = [key_of(n) for n in range(20)]
        writer.write(codec.encode(local.Alloc(1, 1, keys, [60_000] * 20)))
        store = pool.agents[1].core.store
        await until(lambda: store.used_bytes == 20 * 65536)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        del reader
        await until(lambda: store.used_bytes == 0)
        store.check()


async def test_random_bytes_into_the_bulk_port(tmp_path: Path) -> None:
    rng = random.Random(4)
    async with running_pool(tmp_path, 3) as pool:
        host, port = pool.agents[1].bulk_address
        metrics = pool.agents[1].core.metrics
        for round_ in range(200):
            reader, writer = await asyncio.open_connection(host, port)
            if round_ % 2:
                writer.write(rng.randbytes(rng.randrange(4, 500)))
            else:
                writer.write(struct.pack("!I", rng.randrange(1, 40)) + rng.randbytes(60))
            writer.write_eof()
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        assert metrics.bulk_protocol_errors_total > 100
        await serves_right_bytes(pool)


async def test_bulk_puts_of_wrong_bytes_or_foreign_blocks_are_refused(tmp_path: Path) -> None:
    async with running_pool(tmp_path, 3) as pool:
        pool.controller.add_namespace(9, ["node-2"])
        pool.controller.publish()
        await pool.settled()
        codec = MessageCodec[bulk.CalleeMessage](bulk.CalleeMessage)
        reader, writer = await asyncio.open_connection(*pool.agents[1].bulk_address)
        writer.write(codec.encode(bulk.BulkHello(bulk.BULK_PROTOCOL_VERSION, "node-3")))

        async def ask(message: bulk.CallerMessage) -> bulk.CalleeMessage:
            writer.write(codec.encode(message))
            return await answer()

        async def answer() -> bulk.CalleeMessage:
            length = int.from_bytes(await reader.readexactly(4), "big")
            return codec.decode(await reader.readexactly(length))

        epoch = pool.controller.epoch
        means = {info.namespace: bulk.meaning_of(info) for info in pool.controller.namespaces}
        data = b"y" * 5000

        def put_of(
            namespace: int, key: bytes, size: int, digest: int, epoch: int, meaning: int
        ) -> bulk.BulkPut:
            return bulk.BulkPut(namespace, epoch, meaning, [bulk.PutHeader(key, size, digest)])

        go = bulk.BulkGo([bulk.WANTED])
        assert await ask(put_of(1, key_of(1), 5000, 1234, epoch, means[1])) == go
        writer.write(data)
        assert await answer() == bulk.BulkTaken(["wrong_digest"])
        put = put_of(9, key_of(1), 5000, digest_of(data), epoch, means[9])
        assert await ask(put) == bulk.BulkDone("forbidden")
        put = put_of(77, key_of(1), 5000, digest_of(data), epoch, 0)
        assert await ask(put) == bulk.BulkDone("forbidden")
        put = put_of(1, key_of(1), 5000, digest_of(data), epoch, means[2])
        assert await ask(put) == bulk.BulkDone("stale")
        put = put_of(1, key_of(1), 50_000_000, 1, epoch, means[1])
        assert await ask(put) == bulk.BulkGo(["no_room"])
        pool.controller.homes_of = lambda _bucket: ["node-2"]
        pool.controller.publish()
        await pool.settled()
        put = put_of(1, key_of(1), 5000, digest_of(data), epoch, means[1])
        assert await ask(put) == bulk.BulkGo(["not_home"])
        get = bulk.BulkGet(1, [bulk.WantedBlock(key_of(1))])
        assert await ask(get) == bulk.BulkBlocks([bulk.BlockHeader("not_found")])
        assert pool.agents[1].core.store.peek(BlockId(1, key_of(1))) is None
        # Half a block, and then nothing: its room is given back.
        newer = pool.controller.epoch + 1
        put = put_of(1, key_of(2), 5000, digest_of(data), newer, means[1])
        assert await ask(put) == go
        writer.write(data[:100])
        assert pool.agents[1].core.store.used_bytes > 0
        writer.close()
        await until(lambda: pool.agents[1].core.store.used_bytes == 0)
