"""An arena and its index as files: who may take them over, and what becomes of all others.

Oracle: the files themselves (inode, length, bytes), and locks of other descriptors. Cannot see:
what is recovered from them (test_hostagent_recovery.py), processes (tests/integration).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from kvcast.hostagent.standing import KeptMap, index_beside
from kvcast.hostagent.tiers.arena import ArenaError, ArenaFile, ArenaInUseError, may_be_made
from kvcast.hostagent.tiers.index import Index
from kvcast.hostagent.tiers.kept import Kept, KeptOptions, from_descriptors, open_kept
from kvcast.hostagent.tiers.ledger import MOMENT_BYTES, Ledger
from kvcast.hostagent.tiers.ssd.layout import SsdError
from kvcast.hostagent.tiers.ssd.mapped import open_arena
from kvcast.protocol.messages import shared
from kvcast.protocol.messages.control import PoolMap, Registered

ARENA_BYTES = 1 << 20
REGISTERED = Registered(1, 1, 3.0, 0)
MAP = PoolMap(3, [], [[1]], [], [])


@pytest.fixture
def options(tmp_path: Path) -> KeptOptions:
    return KeptOptions(
        "node node-1 of cluster east",
        str(tmp_path / "arena"),
        str(tmp_path / "arena.index"),
        ARENA_BYTES,
        65536,
    )


def made(options: KeptOptions, incarnation: int = 7) -> Kept:
    """What an agent with these options has."""
    kept = open_kept(options, incarnation)
    Index(kept.index.memory, ARENA_BYTES, incarnation).close()
    return kept


def test_the_next_agent_finds_the_same_bytes_and_is_the_same_node(options: KeptOptions) -> None:
    first = made(options, 7)
    assert not first.found
    first.arena.memory[1000:1004] = b"here"
    inode = os.stat(options.arena_path).st_ino
    first.close()
    second = open_kept(options, 8)
    assert second.found
    assert second.incarnation == 7
    assert bytes(second.arena.memory[1000:1004]) == b"here"
    assert os.stat(options.arena_path).st_ino == inode
    second.close()
    for path in (options.arena_path, options.index_path):
        assert os.stat(path).st_mode & 0o777 == 0o600


def test_nothing_is_made_in_the_place_of_a_device_that_is_missing(options: KeptOptions) -> None:
    """A file in /dev would take the machine's memory."""
    path = f"/dev/kvcast-{os.getpid()}"
    assert not may_be_made(path)
    assert not may_be_made("/dev/../dev/dax0.0")
    assert may_be_made("/dev/shm/a")
    assert may_be_made("dax0.0")
    with pytest.raises(ArenaError, match=path):
        open_kept(replace(options, arena_path=path), 7)
    with pytest.raises(ArenaError, match=path):
        ArenaFile(ARENA_BYTES, path)
    with pytest.raises(SsdError, match=path):
        open_arena(path, 64 << 20)
    assert not os.path.exists(path)


def test_a_running_agents_arena_is_not_taken(options: KeptOptions) -> None:
    first = made(options)
    with pytest.raises(ArenaInUseError, match="running agent"):
        open_kept(options, 8)
    first.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"owner": "node node-2 of cluster east"}, "is of node node-1 of cluster east"),
        ({"owner": "node node-1 of cluster west"}, "is of node node-1 of cluster east"),
        ({"arena_bytes": 2 * ARENA_BYTES}, "of an arena of 1048576 bytes"),
        ({"slab_bytes": 131072}, "in slabs of 65536"),
    ],
)
def test_what_another_has_kept_is_refused_by_name_and_stays_as_it_is(
    options: KeptOptions, change: dict[str, object], said: str
) -> None:
    made(options).close()
    before = Path(options.index_path).read_bytes()
    with pytest.raises(ArenaError, match=said):
        open_kept(replace(options, **change), 8)  # type: ignore[arg-type]
    assert Path(options.index_path).read_bytes() == before


def test_the_index_of_an_arena_on_huge_pages_lies_elsewhere_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arena = str(tmp_path / "arena")
    assert index_beside(arena) == f"{arena}.index"
    # hugetlbfs's blocks are huge pages; here every file system's are taken for such.
    monkeypatch.setattr("kvcast.hostagent.standing._HUGE_PAGE_BYTES", 1)
    elsewhere = index_beside(arena)
    assert Path(elsewhere).parent == Path("/dev/shm")
    assert elsewhere != index_beside(f"{arena}2")


def test_an_index_of_another_format_is_refused(options: KeptOptions) -> None:
    kept = made(options)
    kept.index.memory.cast("Q")[1] = shared.INDEX_LAYOUT + 1
    kept.close()
    with pytest.raises(ArenaError, match="format"):
        open_kept(options, 8)


@pytest.mark.parametrize("content", [b"#!/bin/sh\n", b"x" * 5000, bytes(100), bytes(10_000)])
def test_a_file_that_is_none_of_ours_is_refused_and_not_touched(
    options: KeptOptions, content: bytes
) -> None:
    Path(options.index_path).write_bytes(content)
    os.chmod(options.index_path, 0o600)
    with pytest.raises(ArenaError, match="no index"):
        open_kept(options, 8)
    assert Path(options.index_path).read_bytes() == content


def test_a_file_that_others_may_write_is_not_believed(options: KeptOptions) -> None:
    made(options).close()
    os.chmod(options.index_path, 0o660)
    with pytest.raises(ArenaError, match="alone"):
        open_kept(options, 8)


def test_links_pipes_and_sockets_are_refused(options: KeptOptions, tmp_path: Path) -> None:
    path = Path(options.index_path)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArenaError):
        open_kept(options, 8)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArenaError):
        open_kept(options, 8)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    with pytest.raises(ArenaError):
        open_kept(options, 8)


@pytest.mark.parametrize("word", [2, 3, 4, 8, 9, 10, 11])
def test_a_damaged_head_begins_anew_or_changes_nothing(options: KeptOptions, word: int) -> None:
    kept = made(options)
    kept.arena.memory[:4] = b"left"
    kept.index.memory.cast("Q")[word] ^= 1 << 40
    kept.close()
    again = open_kept(options, 8)
    if word == 2:  # that of the last agent to write, which nobody needs
        assert again.found
        assert bytes(again.arena.memory[:4]) == b"left"
    else:
        assert not again.found
        assert not any(again.arena.memory)
    again.close()


def test_an_arena_that_was_cut_short_begins_anew(options: KeptOptions) -> None:
    made(options).close()
    os.truncate(options.arena_path, ARENA_BYTES // 2)
    kept = open_kept(options, 8)
    assert not kept.found
    assert kept.incarnation == 8
    kept.arena.memory[ARENA_BYTES - 1] = 1
    kept.close()


def test_what_was_being_made_when_its_maker_died_is_made_anew(options: KeptOptions) -> None:
    kept = open_kept(options, 7)  # no index was written
    kept.close()
    again = open_kept(options, 8)
    assert not again.found
    again.close()


def test_an_arena_without_an_index_loses_its_name_and_not_its_bytes(
    options: KeptOptions, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"somebody's" * 1000)
    os.chmod(other, 0o600)
    os.link(other, options.arena_path)
    kept = open_kept(options, 7)
    assert not any(kept.arena.memory)
    kept.close()
    assert other.read_bytes() == b"somebody's" * 1000


def test_whoever_still_maps_the_arena_keeps_it_and_finds_nothing_new(options: KeptOptions) -> None:
    first = made(options)
    first.arena.memory[:4] = b"mine"
    fd = first.arena.open_for_client()
    mapped = mmap.mmap(fd, ARENA_BYTES)
    os.close(fd)
    index_fd = first.index.open_for_client(read_only=True)
    index = mmap.mmap(index_fd, first.index.size_bytes, prot=mmap.PROT_READ)
    os.close(index_fd)
    first.close()
    second = made(options, 8)
    assert not second.found
    second.arena.memory[:4] = b"new!"
    assert mapped[:4] == b"mine"
    incarnation = index[16:24]
    assert incarnation == bytes(8), "who looks there finds no agent"
    mapped.close()
    second.close()
    third = open_kept(options, 9)
    assert third.found
    third.close()


def test_what_is_handed_over_is_what_it_is_said_to_be(options: KeptOptions) -> None:
    first = made(options)
    fds = [os.dup(fd) for fd in (first.arena.fd, first.index.fd, first.ledger_fd)]
    with pytest.raises(ArenaError):
        from_descriptors(replace(options, owner="node x of cluster y"), *fds)
    second = from_descriptors(options, *fds)
    first.arena.memory[5] = 77
    assert second.arena.memory[5] == 77
    first.close()
    with pytest.raises(ArenaInUseError):
        open_kept(options, 9)
    second.close()


def test_a_ledger_of_a_release_that_had_a_smaller_one_is_taken_over(options: KeptOptions) -> None:
    first = made(options)
    first.ledger[64:70] = b"a row."
    ledger_fd = os.memfd_create("older")
    os.write(ledger_fd, first.ledger[:-MOMENT_BYTES])
    fds = [os.dup(first.arena.fd), os.dup(first.index.fd), ledger_fd]
    second = from_descriptors(options, *fds)
    assert bytes(second.ledger[64:70]) == b"a row."
    assert not any(Ledger(second.ledger).moment)
    first.close()
    second.close()


def test_a_client_holds_a_lock_of_the_arena_as_long_as_it_maps_it(options: KeptOptions) -> None:
    kept = made(options)
    fd = kept.arena.open_for_client(read_only=True)
    with open(options.arena_path, "rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    kept.close()


def test_the_last_map_is_kept_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "map"
    kept = KeptMap(str(path))
    assert kept.read() is None
    kept.write(REGISTERED, MAP)
    assert kept.read() == (REGISTERED, MAP)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    assert kept.read() is None
    path.write_bytes(b"")
    assert kept.read() is None
    kept.write(REGISTERED, MAP)
    os.chmod(path, 0o644)
    assert kept.read() is None
    assert list(tmp_path.iterdir()) == [path]
