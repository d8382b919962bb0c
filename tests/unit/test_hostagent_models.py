"""Which manifests are believed.

Oracle: a manifest is MessagePack of a plain list; what is wrong with each is made wrong on purpose.
Cannot see: the pool, and what is written (`tests/integration/test_pool_models.py`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.client import BusyError
from kvcast.hostagent.models import fetching, loading
from kvcast.hostagent.models.loading import LoadError, Source, most_room, sources
from kvcast.hostagent.models.manifest import (
    FORMAT,
    PARTIAL,
    FolderFile,
    Manifest,
    ManifestError,
    decode,
    encode,
    identity,
    key_of,
    manifest_key,
    pieces,
)
from kvcast.hostagent.tiers.arena import Allocator

BLOCK = 100


def file(path: str, size_bytes: int = 0) -> FolderFile:
    return FolderFile(path, size_bytes, b"k" * 16 * -(-size_bytes // BLOCK))


def manifest(*files: FolderFile, block_bytes: int = BLOCK, format_: int = FORMAT) -> Manifest:
    return Manifest(format_, block_bytes, list(files))


NAMES = st.text("abc.-_ ü0", min_size=1, max_size=6).filter(lambda name: name not in (".", ".."))


@given(
    sizes=st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.integers(0, 350), max_size=8
    )
)
def test_a_folder_is_cut_into_pieces_that_are_its_files(sizes: dict[tuple[str, ...], int]) -> None:
    paths = sorted(p for p in sizes if not any(p[:n] in sizes for n in range(1, len(p))))
    data = encode(manifest(*(file("/".join(path), sizes[path]) for path in paths)))
    found = decode(data)
    assert [tuple(f.path.split("/")) for f in found.files] == paths
    covered = dict.fromkeys(range(len(paths)), 0)
    for piece in pieces(found):
        assert piece.offset == covered[piece.file], "no gap and no overlap"
        assert 0 < piece.size_bytes <= BLOCK
        covered[piece.file] += piece.size_bytes
    assert covered == {number: sizes[path] for number, path in enumerate(paths)}
    assert encode(found) == data


@pytest.mark.parametrize(
    "path",
    [
        "", "/etc/passwd", "..", "a/../b", "a//b", "./a", "a/", "a\0b", "a\nb", "a\x7f", "a\\b",
        "x" * 256, "/".join(["x" * 200] * 6), f"{PARTIAL}/a", "a\u202eb",
    ],
)  # fmt: skip
def test_a_path_that_should_not_be_written_is_refused(path: str) -> None:
    data = msgspec.msgpack.encode(manifest(file(path)))
    with pytest.raises(ManifestError):
        decode(data)


@pytest.mark.parametrize(
    "wrong",
    [
        manifest(file("a", 250), format_=2),
        manifest(FolderFile("a", 250, b"k" * 32)),
        manifest(FolderFile("a", 0, b"k" * 16)),
        manifest(FolderFile("a", 50, b"k" * 15)),
        manifest(file("b"), file("a")),
        manifest(file("a"), file("a")),
        manifest(file("a"), file("a/b")),
        manifest(file("a"), block_bytes=0),
        manifest(file("a"), block_bytes=1 << 31),
        manifest(FolderFile("a", -1, b"")),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(wrong: Manifest) -> None:
    with pytest.raises(ManifestError):
        decode(msgspec.msgpack.encode(wrong))


@given(data=st.binary(max_size=60))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    try:
        decode(data)
    except ManifestError:
        return
    pytest.fail("believed")


@given(at=st.integers(0), change=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_the_identity(at: int, change: int) -> None:
    good = encode(manifest(file("a", 250), file("b/c", 10)))
    bad = bytearray(good)
    bad[at % len(good)] ^= change
    assert identity(bad) != identity(good)
    try:
        decode(bytes(bad))
    except ManifestError:
        pass


def test_keys_are_told_apart() -> None:
    assert manifest_key("ab", "c") != manifest_key("a", "bc")
    assert manifest_key("a", "1") != key_of(b"1:a1")


class Displacing:
    """A pool of which DRAM takes so many blocks, and loses the oldest where more are put; a disk
    below it takes so many of them whenever somebody asks for all blocks."""

    def __init__(self, dram: int, written: int) -> None:
        self._dram = dram
        self._written = written
        self._above: dict[bytes, None] = {}
        self._below: set[bytes] = set()
        self.manifests: list[bytes] = []
        self.puts = 0
        self.gets = 0

    def held(self) -> set[bytes]:
        return self._below | self._above.keys()

    async def exists(self, _namespace: int, keys: list[bytes], _deadline_s: float = 0.0) -> int:
        if len(keys) > 1:
            for key in list(self._above)[: self._written]:
                del self._above[key]
                self._below.add(key)
        return next((n for n, key in enumerate(keys) if key not in self.held()), len(keys))

    async def put(self, _namespace: int, blocks: dict[bytes, memoryview]) -> None:
        for key, data in blocks.items():
            if bytes(data[:16]).startswith(b"part"):
                self.puts += 1
                self._above[key] = None
            else:
                self.manifests.append(bytes(data))
        while len(self._above) > self._dram:
            del self._above[next(iter(self._above))]

    async def get(self, _namespace: int, _keys: list[bytes], _deadline_s: float) -> list[None]:
        self.gets += 1
        if self.gets == 1:
            raise BusyError("namespace 1 is over its rate")
        return [None]


def _folder_of_blocks(folder: Path, count: int) -> list[Source]:
    (folder / "f").write_bytes(b"".join(b"part%096d" % number for number in range(count)))
    return sources(folder)


async def test_what_was_displaced_before_a_disk_had_it_is_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SETTLE_S", 0.0)
    monkeypatch.setattr(fetching, "BUSY_WAIT_S", 0.0)
    pool, told = Displacing(dram=10, written=8), []
    found = _folder_of_blocks(tmp_path, 40)
    loader = loading.Loader(cast(Any, pool), 1, BLOCK)
    loaded = await loader.load(found, "m", "1", told.append)
    assert {found[0].keys[number] for number in range(40)} <= pool.held()
    assert len(pool.manifests) == 1
    assert (loaded.blocks, loaded.put_blocks, sum(told)) == (40, 40, 40 * BLOCK)
    assert pool.puts > 40


async def test_a_pool_that_keeps_no_more_each_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SETTLE_S", 0.0)
    pool = Displacing(dram=10, written=0)
    loader = loading.Loader(cast(Any, pool), 1, BLOCK)
    with pytest.raises(LoadError, match="keeps only 10 of 40 blocks"):
        await loader.load(_folder_of_blocks(tmp_path, 40), "m", "1", lambda _: None)
    assert pool.manifests == []
    assert pool.puts <= 2 * 40


def test_a_folders_files_are_those_of_a_model(tmp_path: Path) -> None:
    for name in ("b.safetensors", "config.json", "sub/c", ".git/x", ".cache/y", f"{PARTIAL}/z"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "b.safetensors")
    (tmp_path / "config.json").chmod(0o755)
    found: list[dict[str, Any]] = [dataclasses.asdict(source) for source in sources(tmp_path)]
    assert [source["path"] for source in found] == [
        "b.safetensors", "config.json", "link.safetensors", "sub/c",
    ]  # fmt: skip
    assert [source["executable"] for source in found] == [False, True, False, False]
    assert {source["size_bytes"] for source in found} == {5}


@given(
    sizes=st.lists(st.integers(0, 9 << 20), min_size=1, max_size=6),
    block_kib=st.integers(64, 5000),
    slab_bytes=st.sampled_from([1 << 18, 1 << 20, 1 << 22]),
)
@settings(max_examples=60, deadline=None)
def test_no_arena_gives_a_folder_more_room_than_is_asked_for_it(
    sizes: list[int], block_kib: int, slab_bytes: int
) -> None:
    block_bytes = block_kib << 10
    found = [Source(f"f{n}", Path(), size, 0, False) for n, size in enumerate(sizes)]
    files = [
        FolderFile(s.path, s.size_bytes, b"k" * 16 * len(s.blocks(block_bytes))) for s in found
    ]
    extents = Allocator(64 << 20, slab_bytes)
    blocks = [min(block_bytes, n - at) for n in sizes for at in range(0, n, block_bytes)]
    manifest_bytes = len(encode(Manifest(FORMAT, block_bytes, files)))
    taken = [extents.extent_bytes(n) for n in (*blocks, manifest_bytes)]
    assert sum(taken) <= most_room(found, block_bytes) <= 2 * sum(taken) + (1 << 18)


def test_a_folder_that_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds no files"):
        sources(tmp_path)
    with pytest.raises(LoadError, match="No such file"):
        sources(tmp_path / "none")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="dangling"):
        sources(tmp_path)


@pytest.mark.parametrize("name", [b"caf\xe9.bin", b"two\nlines", b"back\\slash"])
def test_a_file_that_could_not_be_fetched_is_told_of_before_anything_is_put(
    tmp_path: Path, name: bytes
) -> None:
    (tmp_path / os.fsdecode(name)).write_bytes(b"12345")
    with pytest.raises(LoadError, match="has characters that no file's name should have"):
        sources(tmp_path)
