"""`kvcast load` and `kvcast fetch` on a running pool.

Oracle: the bytes of the files that went in. Cannot see: how fast it is (`kvcast.bench.folders`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.models.fetching import find
from kvcast.hostagent.models.manifest import (
    FORMAT,
    PARTIAL,
    FolderFile,
    key_of,
    manifest_key,
    pieces,
)
from kvcast.protocol.messages.control import AT_END
from kvcast.service.addresses import format_host_port
from pool_harness import eventually, keys_for, put, running_pool
from test_pool_commands import kvcast

SIZES = {
    "model-00001.safetensors": 1_500_001,
    "model-00002.safetensors": 700_000,
    "config.json": 300,
    "empty": 0,
    "sub/tokenizer.json": 65_536,
}
BLOCKS = ["--block-size", "64KiB"]


def _write(folder: Path, seed: int = 1) -> None:
    rng = random.Random(seed)
    for name, size_bytes in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(rng.randbytes(size_bytes))


def _read(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


async def _fetch(socket: Path, to: Path, *more: str) -> dict[str, Any]:
    words = ("fetch", "--socket", socket, "--model", "m", "--to", to, "--json", *more)
    code, out, error = await kvcast(*words)
    assert (code, error) == (0, "")
    return dict(json.loads(out))


async def test_a_folder_comes_out_as_it_went_in(tmp_path: Path) -> None:
    _write(tmp_path / "m")
    (tmp_path / "m" / "config.json").chmod(0o755)
    whole = _read(tmp_path / "m")
    async with running_pool(tmp_path / "pool", 3, replicas=0) as (pool, _links):
        one, two = pool.sockets["node-1"], pool.sockets["node-2"]
        load = ("load", "--socket", one, "--model", tmp_path / "m", *BLOCKS)
        code, out, error = await kvcast(*load)
        assert (code, error) == (0, "")
        name = out.decode().split()[-1]
        assert "5 files, 2,265,837 bytes" in out.decode()

        # Again: nothing is new. Another folder of that name and version is refused.
        code, out, _ = await kvcast(*load, "--json")
        assert (code, json.loads(out)["put_blocks"], json.loads(out)["identity"]) == (0, 0, name)
        _write(tmp_path / "other", seed=2)
        other = ("load", "--socket", one, "--model", tmp_path / "other", "--name", "m", *BLOCKS)
        code, _, error = await kvcast(*other)
        assert code == 1
        assert "give this one a version of its own" in error
        assert (await kvcast(*other, "--model-version", "2"))[0] == 0

        # Two nodes at once.
        both = await asyncio.gather(
            _fetch(two, tmp_path / "copy2", "--id", name),
            _fetch(pool.sockets["node-3"], tmp_path / "copy3", "--gather-ms", "20"),
        )
        for fetched, copy in zip(both, ("copy2", "copy3"), strict=True):
            assert _read(tmp_path / copy) == whole
            assert fetched["fetched_bytes"] == sum(SIZES.values())
            assert not (tmp_path / copy / PARTIAL).exists()
        assert os.access(tmp_path / "copy2" / "config.json", os.X_OK)

        # What is right is not fetched again; what is wrong is.
        assert (await _fetch(two, tmp_path / "copy2"))["fetched_bytes"] == 0
        damaged = tmp_path / "copy2" / "model-00001.safetensors"
        with damaged.open("r+b") as file:
            file.seek(70_000)
            file.write(b"damage")
        (tmp_path / "copy2" / "model-00002.safetensors").write_bytes(b"too short")
        (tmp_path / "copy2" / "empty").write_bytes(b"too long")
        again = await _fetch(two, tmp_path / "copy2")
        assert again["fetched_bytes"] == 65_536 + 700_000
        assert _read(tmp_path / "copy2") == whole

        # An unfinished fetch goes on where it was.
        unfinished = tmp_path / "copy4" / PARTIAL / "model-00001.safetensors"
        unfinished.parent.mkdir(parents=True)
        unfinished.write_bytes(whole["model-00001.safetensors"][:1_000_000])
        went_on = await _fetch(two, tmp_path / "copy4")
        assert went_on["fetched_bytes"] == sum(SIZES.values()) - 1_000_000 // 65_536 * 65_536
        assert _read(tmp_path / "copy4") == whole

        # Another identity, another name, and a place that cannot be written.
        to = ("fetch", "--socket", two, "--to", tmp_path / "copy5", "--model")
        code, _, error = await kvcast(*to, "m", "--id", "0" * 32)
        assert code == 1
        assert f"is {name}, not 000" in error
        code, _, error = await kvcast(*to, "none")
        assert code == 3
        assert "nothing of tenant 'models', model 'none', version '1'" in error
        (tmp_path / "copy5").write_bytes(b"a file")
        code, _, error = await kvcast(*to, "m")
        assert code == 1
        assert "copy5" in error


async def test_hosts_that_know_of_each_other_fetch_as_a_group(tmp_path: Path) -> None:
    _write(tmp_path / "m")
    whole = _read(tmp_path / "m")
    async with running_pool(tmp_path / "pool", 5, replicas=0) as (pool, _links):
        load = ("load", "--socket", pool.sockets["node-1"], "--model", tmp_path / "m", *BLOCKS)
        assert (await kvcast(*load))[0] == 0

        async def fetch(number: int, after_s: float) -> None:
            await asyncio.sleep(after_s)
            hosts = ("--hosts", "node-2,node-3,node-4,node-5")  # node-5 does not come
            to = tmp_path / f"copy{number}"
            await _fetch(pool.sockets[f"node-{number}"], to, *hosts)
            assert _read(to) == whole

        # One comes late, and gets what it has missed.
        await asyncio.gather(fetch(2, 0.0), fetch(3, 0.0), fetch(4, 0.5))
        for hosts, why in (("node-2,node-9", "no such node: node-9"), ("node-2,,", "no list of")):
            words = ("fetch", "--socket", pool.sockets["node-2"], "--model", "m", "--to")
            code, _, error = await kvcast(*words, tmp_path / "none", "--hosts", hosts)
            assert code != 0
            assert why in error
            assert not (tmp_path / "none").exists()


async def test_a_host_that_comes_late_takes_what_the_others_ask_for(tmp_path: Path) -> None:
    _write(tmp_path / "m")
    whole = _read(tmp_path / "m")
    async with running_pool(tmp_path / "pool", 3, replicas=0) as (pool, links):
        one, two = pool.sockets["node-1"], pool.sockets["node-2"]
        load = ("load", "--socket", one, "--model", tmp_path / "m", *BLOCKS)
        assert (await kvcast(*load))[0] == 0
        async with await AsyncClient.connect(str(two)) as early:
            namespace = await early.namespace("models", "m", "1", "folder")
            manifest, _ = await find(early, namespace, "m", "1")
            assert await early.company(namespace, 1) == (0, 1)
            copy = tmp_path / "copy"
            late = asyncio.create_task(_fetch(pool.sockets["node-3"], copy))
            group = at = 0
            while not group:
                await asyncio.sleep(0.1)
                group, _ = await early.company(namespace, 1)
            for at, piece in enumerate(pieces(manifest), start=2):
                (block,) = await early.get(namespace, [piece.key], 10.0, group=group)
                assert block is not None
                block.release()
                await early.company(namespace, at)
            assert (await early.company(namespace, AT_END))[0] == 0
            assert (await late)["fetched_bytes"] == sum(SIZES.values())
            assert _read(copy) == whole
        last = await links[2].client()
        assert (await last.stats())["overheard_total"] > 0
        # Nobody is left, and whoever comes now begins at once.
        assert await last.company(namespace, 0) == (0, 0)


async def test_what_is_missing_or_a_lie_is_told_and_never_written(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool", 2, replicas=0) as (pool, _links):
        one, two = pool.sockets["node-1"], pool.sockets["node-2"]
        right, wrong, absent = b"r" * 1000, b"w" * 1000, b"a" * 1000

        async def publish(name: str, files: list[FolderFile], block_bytes: int = 1000) -> int:
            namespace = await client.namespace("models", name, "1", "folder")
            manifest = {"format": FORMAT, "block_bytes": block_bytes, "files": files}
            data = msgspec.msgpack.encode(manifest)
            await client.put(namespace, {manifest_key(name, "1"): data})
            return namespace

        async with await AsyncClient.connect(str(one)) as client:
            keys = {data: key_of(data) for data in (right, wrong, absent)}
            files = [FolderFile("f", 3000, keys[right] + keys[wrong] + keys[absent])]
            namespace = await publish("m", files)
            await client.put(namespace, {keys[right]: right, keys[wrong]: b"x" * 1000})
            await publish("evil", [FolderFile("../out", 0, b"")])

        to = tmp_path / "copy"
        words = ("fetch", "--socket", two, "--model", "m", "--to", to, "--patience", "0.5")
        code, _, error = await kvcast(*words)
        assert code == 3
        assert "2 blocks (2,000 bytes) are not in the pool" in error
        assert "other bytes than their keys say" in error
        assert not (to / "f").exists(), "a file that is not whole has no name"
        assert (to / PARTIAL / "f").read_bytes() == right + bytes(2000)

        code, _, error = await kvcast("fetch", "--socket", two, "--model", "evil", "--to", to)
        assert code == 1
        assert "not to be trusted" in error
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("assured", [True, False])
async def test_a_folder_that_is_assured_of_room_stays_whatever_else_is_put(
    tmp_path: Path, assured: bool
) -> None:
    (tmp_path / "m").mkdir()
    _write(tmp_path / "m")
    async with running_pool(tmp_path / "pool", 1, replicas=0, arena_bytes=16 << 20) as (
        pool,
        links,
    ):
        socket = pool.sockets["node-1"]
        words: list[str | Path] = ["load", "--socket", socket, "--model", tmp_path / "m", *BLOCKS]
        if assured:
            words += ["--assure", "--http", format_host_port(pool.network.http_address)]
        # The second tenant comes first: it empties the pool once.
        client = await links[0].client()
        namespace = await client.namespace("tests", "others", "1", "bytes")
        code, out, error = await kvcast(*words)
        assert (code, error) == (0, "")
        assert (b"assured as namespace" in out) == assured
        if assured:
            number = int(out.split(b"namespace ")[1].split()[0])

            async def told() -> bool:
                known = (await client.describe()).namespaces
                return {n.namespace for n in known if n.settings.assured_bytes} == {number}

            await eventually(
                "the agent knows that the folder is assured of room, and nothing else", told
            )
        for turn in range(4):
            await put(links[0], namespace, keys_for(turn, 64), 128 << 10)
        fetch = ("fetch", "--socket", socket, "--model", "m", "--to", tmp_path / "copy")
        code, _, error = await kvcast(*fetch)
        assert code == (0 if assured else 3), error
        if assured:
            assert _read(tmp_path / "copy") == _read(tmp_path / "m")


async def test_a_folder_that_is_refused_is_assured_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    _write(tmp_path / "m")
    async with running_pool(tmp_path / "pool", 1, replicas=0) as (pool, _):
        http = ["--http", format_host_port(pool.network.http_address)]
        load = ["load", "--socket", pool.sockets["node-1"], "--model", str(tmp_path / "m")]
        assert (await kvcast(*load, *BLOCKS))[0] == 0

        async def shares() -> dict[str, int]:
            _, out, _ = await kvcast("namespace", "list", *http, "--json")
            (info,) = json.loads(out)["namespaces"]
            return dict(info["settings"]["assured_bytes"])

        code, _, error = await kvcast(*load, "--assure", *http)
        assert code == 1
        assert "holds another" in error
        assert await shares() == {}
        (info,) = json.loads((await kvcast("namespace", "list", *http, "--json"))[1])["namespaces"]
        assured = ["--assured", "dram=64KiB", "--assured", "ssd=1MiB"]
        await kvcast("namespace", "set", str(info["namespace"]), *http, *assured)
        before = await shares()
        assert (await kvcast(*load, "--assure", *http))[0] == 1
        assert await shares() == before == {"dram": 64 << 10, "ssd": 1 << 20}
        assert (await kvcast(*load, *BLOCKS, "--assure", *http))[0] == 0
        after = await shares()
        assert after["dram"] >= sum(SIZES.values())
        assert after["ssd"] == 1 << 20
        assert (await kvcast(*load, "--assure", *http))[0] == 1
        assert await shares() == after


async def test_only_an_operator_has_a_folder_assured_of_room(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    _write(tmp_path / "m")
    async with running_pool(tmp_path / "pool", 1, replicas=0) as (pool, _):
        words = ("load", "--socket", pool.sockets["node-1"], "--model", tmp_path / "m", "--assure")
        code, _, error = await kvcast(*words, "--http", "http://127.0.0.1:1")
        assert code == 1
        assert "no controller answers" in error


async def test_a_folder_that_is_too_large_for_the_pool_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "f").write_bytes(os.urandom(40 << 20))
    async with running_pool(tmp_path / "pool", 1, replicas=0, arena_bytes=32 << 20) as (pool, _):
        socket = pool.sockets["node-1"]
        code, _, error = await kvcast("load", "--socket", socket, "--model", tmp_path / "m")
        assert code == 1
        assert "it has no room for 0.04 GiB" in error
        words = ("fetch", "--socket", socket, "--model", "m", "--to", tmp_path / "copy")
        assert (await kvcast(*words))[0] == 3, "it is not there at all"


async def test_a_folder_that_only_dram_and_a_disk_can_hold_together_is_loaded_whole(
    tmp_path: Path,
) -> None:
    """Blocks come faster than the disk takes them."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "f").write_bytes(os.urandom(60 << 20))
    disk = (f"--ssd={tmp_path}/node-1.ssd", "--ssd-bytes=128MiB")
    async with running_pool(
        tmp_path / "pool", 1, replicas=0, arena_bytes=32 << 20, agent_flags=disk
    ) as (pool, _):
        socket = pool.sockets["node-1"]
        words = ("load", "--socket", socket, "--model", tmp_path / "m", "--block-size", "1MiB")
        code, _, error = await kvcast(*words)
        assert (code, error) == (0, "")
        await _fetch(socket, tmp_path / "copy")
    assert _read(tmp_path / "copy") == _read(tmp_path / "m")
