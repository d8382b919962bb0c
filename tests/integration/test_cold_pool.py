"""Blocks of a namespace in an object store: a folder, and moto's S3 server; and in Mooncake Store,
the real one, where it is installed.

The oracle is what was put, and the folder's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hostagent_harness import MIB, Pool, key_of, running_pool, until
from kvcast.hostagent.core.cold import HEAD, ColdTier
from kvcast.hostagent.network.metrics_server import metrics_of
from kvcast.hostagent.object_stores import ColdError, open_store
from kvcast.hostagent.options import Options
from kvcast.protocol.messages.control import NamespaceSettings

NEEDS_OBSTORE = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None,
    reason="obstore is not installed (pip install 'kvcast[cold]')",
)

COUNT = 40


def with_cold(url: str, *nodes: int) -> Callable[[Options], Options]:
    def change(options: Options) -> Options:
        cold = url if options.network.switch_port in nodes else ""
        return replace(options, arena=replace(options.arena, size_bytes=MIB), cold=cold)

    return change


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(48_000 + number)


def kept_cold(pool: Pool) -> None:
    """Namespace 1 may lie in the object store, and its home is node 1; namespace 2 is as it was."""
    info = pool.controller.namespaces[0]
    pool.controller.namespaces[0] = msgspec.structs.replace(
        info, settings=NamespaceSettings(media=["dram", "cold"])
    )
    pool.controller.homes_of = lambda _bucket: ["node-1"]
    pool.controller.publish()


def tier_at(pool: Pool, node: int) -> ColdTier:
    cold = pool.agents[node].cold
    assert cold is not None
    return cold.tier


async def put(pool: Pool, numbers: range, namespace: int = 1) -> None:
    """Put blocks on node 1, no faster than they are stored."""
    tier = tier_at(pool, 1)
    for number in numbers:
        await pool.clients[1].put(namespace, {key_of(number): data_of(number)})
        await until(lambda: not tier.values()["cold_stores_waiting"] and not tier._errands)


async def tier_of(pool: Pool, node: int, number: int, namespace: int = 1) -> str:
    (block,) = await pool.clients[node].get(namespace, [key_of(number)], deadline_s=10.0)
    if block is None:
        return ""
    with block:
        assert bytes(block.data) == data_of(number)
        return block.tier


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def all_of_it(tmp_path: Path, url: str) -> None:
    """What leaves DRAM comes back, here and at another node; and so it does for the next agent."""
    async with running_pool(tmp_path, 2, with_cold(url, 1)) as pool:
        kept_cold(pool)
        await pool.settled()
        await put(pool, range(COUNT))
        assert tier_at(pool, 1).counters.stored == COUNT
        tiers = [await tier_of(pool, 1, number) for number in reversed(range(COUNT))]
        assert set(tiers) == {"local", "cold"}
        assert "" not in [await tier_of(pool, 2, number) for number in range(10)]
        assert await pool.clients[2].exists(1, [key_of(n) for n in range(COUNT)]) == COUNT
        await pool.kill(1)
        await pool.start_agent(1, with_cold(url, 1))
        await pool.settled()
        await pool.client(1)
        tier = tier_at(pool, 1)
        await until(lambda: tier.values()["cold_blocks_known"] == COUNT)
        assert await tier_of(pool, 1, 25) == "cold"


@NEEDS_OBSTORE
async def test_blocks_come_back_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    await all_of_it(tmp_path, f"file://{folder}")
    assert len(files(folder)) == COUNT


@NEEDS_OBSTORE
async def test_two_nodes_and_who_comes_after_them_keep_to_one_quota(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    quota_bytes = 20 * (HEAD.size + len(data_of(COUNT)))
    change = with_cold(f"file://{folder}", 1, 2)

    def taken_bytes() -> int:
        return sum(path.stat().st_size for path in files(folder))

    async def put_and_wait(pool: Pool, numbers: range) -> None:
        for number in numbers:
            await pool.clients[1].put(1, {key_of(number, number % 2): data_of(number)})
            for node in (1, 2):
                tier = tier_at(pool, node)
                await until(lambda tier=tier: not tier.stores_waiting and not tier._errands)
            assert taken_bytes() <= quota_bytes

    async with running_pool(tmp_path, 2, change) as pool:
        pool.controller.homes_of = lambda bucket: [f"node-{1 + bucket % 2}"]
        info = pool.controller.namespaces[0]
        pool.controller.namespaces[0] = msgspec.structs.replace(
            info,
            settings=NamespaceSettings(media=["dram", "cold"], quota_bytes={"cold": quota_bytes}),
        )
        pool.controller.publish()
        await pool.settled()
        await put_and_wait(pool, range(2 * COUNT))
        of_each = {
            sum(p.stat().st_size for p in files(folder) if int(p.name, 16) % 2 == node)
            for node in (0, 1)
        }
        assert all(quota_bytes // 2 - 50_000 < taken <= quota_bytes // 2 for taken in of_each)
        full = files(folder)
        shown = {m.name: m.samples[0].value for m in metrics_of(pool.agents[1].core) if m.samples}
        assert shown["kvcast_namespace_cold_bytes"] in of_each
        assert shown["kvcast_namespace_cold_quota_bytes"] == quota_bytes // 2
        await pool.kill(1)
        await pool.start_agent(1, change)
        await pool.settled()
        await pool.client(1)
        await put_and_wait(pool, range(2 * COUNT, 3 * COUNT))
        assert files(folder) == full
        assert tier_at(pool, 1).counters.left_out_quota > 0


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket at an S3 server on this machine."""
    import boto3  # these take a second, in every worker
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "somebody"),
        ("AWS_SECRET_ACCESS_KEY", "something"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT", f"http://{host}:{port}"),
        ("AWS_ALLOW_HTTP", "true"),
    ):
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="blocks")
    yield "s3://blocks"
    running.stop()


@NEEDS_OBSTORE
@pytest.mark.filterwarnings("default")
async def test_blocks_come_back_from_an_s3_server(tmp_path: Path, s3: str) -> None:
    await all_of_it(tmp_path, s3)


class MooncakeHere:
    """A master of Mooncake Store, and a client of it with memory for objects."""

    def __init__(self, folder: Path) -> None:
        reason = "Mooncake Store is not installed (pip install 'kvcast[cold-mooncake]')"
        library = pytest.importorskip("mooncake.store", reason=reason, exc_type=ImportError)
        program = Path(library.__file__).parent / "mooncake_master"
        if not os.access(program, os.X_OK):
            pytest.skip(f"{program} is not there")
        self.port, self.http = free_port(), free_port()
        command = [str(program), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={self.http}"]
        log = (folder / "master.log").open("wb")
        self.master = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        self.url = f"mooncake://127.0.0.1:{self.port}?metrics={self.http}&buffer_mib=16"
        self.store = library.MooncakeDistributedStore()
        until_s = time.monotonic() + 60
        while not self.answers():
            assert self.master.poll() is None, (folder / "master.log").read_text()
            assert time.monotonic() < until_s, "the master does not answer"
            time.sleep(0.1)
        setup = ("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "")
        assert self.store.setup(*setup, f"127.0.0.1:{self.port}") == 0

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            return isinstance(self.names(), list)
        return False

    def names(self) -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/get_all_keys") as answer:
            return sorted(answer.read().decode().split())

    def close(self) -> None:
        self.store.close()
        self.master.terminate()
        self.master.wait(30)


def free_port() -> int:
    """One that nobody has just now. Mooncake's master is to be told its ports, and does not say
    which it got: so another program may take one before it does."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeHere]:
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    here = MooncakeHere(tmp_path)
    yield here
    here.close()


async def test_blocks_come_back_from_mooncake_store(tmp_path: Path, mooncake: MooncakeHere) -> None:
    await all_of_it(tmp_path, mooncake.url)
    assert len(mooncake.names()) == COUNT


async def test_what_mooncake_store_holds_is_named_by_namespace_and_believed_by_its_digest(
    tmp_path: Path, mooncake: MooncakeHere
) -> None:
    mooncake.store.put("somebody/else", b"x")
    async with running_pool(tmp_path, 1, with_cold(mooncake.url, 1)) as pool:
        kept_cold(pool)
        await pool.settled()
        await put(pool, range(5), namespace=2)
        assert mooncake.names() == ["somebody/else"]
        await put(pool, range(COUNT))
        by_number = {key_of(n).hex(): n for n in range(COUNT)}
        name_of = {by_number[n[-32:]]: n for n in mooncake.names() if n[-32:] in by_number}
        objects = {n: bytes(mooncake.store.get(name_of[n])) for n in range(3)}
        damaged = bytearray(objects[0])
        damaged[HEAD.size + 100] ^= 1
        for number, data in ((0, bytes(damaged)), (1, objects[2]), (3, b"short")):
            assert mooncake.store.remove(name_of[number], True) == 0
            assert mooncake.store.put(name_of[number], data) == 0
        assert mooncake.store.remove(name_of[4], True) == 0  # as Mooncake evicts
        tier = tier_at(pool, 1)
        for number in (0, 1, 3, 4):
            assert await tier_of(pool, 1, number) == ""
        assert tier.counters.damaged == 3
        assert tier.counters.fetch_errors == 1
        assert await tier_of(pool, 1, 2) == "cold"
        await until(lambda: not {name_of[n] for n in (0, 1, 3)} & set(mooncake.names()))
        pool.agents[1].core.store.drop_namespace(1)
        await until(lambda: mooncake.names() == ["somebody/else"])


@NEEDS_OBSTORE
async def test_only_what_may_lies_there_and_what_is_dropped_goes(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    async with running_pool(tmp_path, 1, with_cold(f"file://{folder}", 1)) as pool:
        kept_cold(pool)
        await pool.settled()
        await put(pool, range(5), namespace=2)
        assert files(folder) == []
        await put(pool, range(5))
        assert len(files(folder)) == 5
        await pool.clients[1].drop(1, [key_of(3)])
        await until(lambda: len(files(folder)) == 4)
        assert await tier_of(pool, 1, 3) == ""
        pool.agents[1].core.store.drop_namespace(1)
        await until(lambda: not files(folder))
        assert await tier_of(pool, 1, 1) == ""


@NEEDS_OBSTORE
async def test_objects_that_are_not_what_they_should_be_are_not_served(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    async with running_pool(tmp_path, 1, with_cold(f"file://{folder}", 1)) as pool:
        kept_cold(pool)
        await pool.settled()
        await put(pool, range(COUNT))
        names = {key_of(n).hex(): n for n in range(COUNT)}
        by_number = {names[path.name]: path for path in files(folder)}
        tier = tier_at(pool, 1)
        damaged = bytearray(by_number[0].read_bytes())
        damaged[HEAD.size + 100] ^= 1
        by_number[0].write_bytes(damaged)
        by_number[1].write_bytes(by_number[2].read_bytes())
        by_number[3].write_bytes(b"short")
        by_number[4].write_bytes(by_number[4].read_bytes() + b"?")
        by_number[5].unlink()
        for number in (0, 1, 3, 4):
            assert await tier_of(pool, 1, number) == ""
        assert tier.counters.damaged == 4
        assert await tier_of(pool, 1, 5) == ""
        assert tier.counters.fetch_errors == 1
        await until(lambda: not {by_number[n] for n in (0, 1, 3, 4)} & set(files(folder)))
        assert await tier_of(pool, 1, 2) == "cold"
        assert await pool.clients[1].exists(1, [key_of(5)]) == 0


@NEEDS_OBSTORE
async def test_a_store_that_does_not_answer_costs_nobody_what_is_here(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    async with running_pool(tmp_path, 1, with_cold(f"file://{folder}", 1)) as pool:
        kept_cold(pool)
        await pool.settled()
        tier = tier_at(pool, 1)
        tier.rules = replace(tier.rules, max_waiting=4)
        agent = pool.agents[1]
        assert agent.cold is not None
        hangs = asyncio.Event()

        async def never(_task: object) -> None:
            await hangs.wait()

        agent.cold._errand = never  # type: ignore[method-assign, assignment]
        for number in range(30):
            await pool.clients[1].put(1, {key_of(number): data_of(number)})
        assert tier.counters.left_out > 0
        assert await tier_of(pool, 1, 29) == "local"
        hangs.set()
        await until(lambda: not tier._errands)


@NEEDS_OBSTORE
def test_an_agent_says_why_it_cannot_use_a_store(tmp_path: Path) -> None:
    for url in ("nothing://x", "no url"):
        with pytest.raises(ColdError):
            open_store(url)
