"""Where an arena's memory is wanted, and where the kernel says that it is."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import pytest
from kvcast.hostagent.tiers import memory_placement
from kvcast.hostagent.tiers.arena import ArenaFile
from kvcast.hostagent.tiers.memory_placement import gather_pages, placement_of, preferring

MAPS = """\
7f00 prefer:1 file=/dev/shm/a\\040b.arena dirty=3 mapmax=2 N0=1 N1=2 kernelpagesize_kB=4
7f01 default file=/dev/shm/other dirty=9 N0=9 kernelpagesize_kB=4
7f02 default file=/mnt/huge/arena huge dirty=4 N1=4 kernelpagesize_kB=2048
7f03 default
7f04 default file=/dev/shm/a\\040b.arena dirty=1 N1=1 kernelpagesize_kB=4
"""


def test_pages_and_nodes_are_those_of_the_file(tmp_path: Path) -> None:
    maps = tmp_path / "numa_maps"
    maps.write_text(MAPS)
    small = placement_of("/dev/shm/a b.arena", str(maps))
    assert (small.page_bytes, small.bytes_by_node) == (4096, {0: 4096, 1: 3 * 4096})
    huge = placement_of("/mnt/huge/arena", str(maps))
    assert huge.values() == {"arena_node1_bytes": 4 * 2097152.0, "arena_page_bytes": 2097152.0}


def test_pages_are_gathered_without_a_byte_changing_or_it_is_said_that_they_are_not(
    tmp_path: Path,
) -> None:
    arena = ArenaFile(6 << 20)
    try:
        data = random.Random(1).randbytes(arena.size_bytes)
        arena.memory[:] = data
        fd = arena.open_for_client()
        asked = iter([True, False])
        some = gather_pages(fd, arena.size_bytes, lambda: next(asked))
        every = gather_pages(fd, arena.size_bytes)
        os.close(fd)
        assert some <= every <= arena.size_bytes
        assert arena.memory == data
    finally:
        arena.close()
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(4 << 20)
        assert gather_pages(file.fileno(), 4 << 20) == 0  # not memory


def test_a_kernel_without_huge_pages_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_placement, "_HUGE_PAGE", tmp_path / "none")
    arena = ArenaFile(4 << 20)
    fd = arena.open_for_client()
    assert gather_pages(fd, arena.size_bytes) == 0  # a kernel that has none
    os.close(fd)
    arena.close()


def test_where_the_kernel_does_not_say_nothing_is_said(tmp_path: Path) -> None:
    nothing = placement_of("/dev/shm/arena", str(tmp_path / "none"))
    assert nothing.values() == {"arena_page_bytes": 0.0}


def test_an_arena_on_a_node_that_there_is_lies_there(tmp_path: Path) -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel does not say where memory is")
    with preferring(0):
        arena = ArenaFile(1 << 20, str(tmp_path / "arena"))
    try:
        found = placement_of(arena.path)
        assert found.page_bytes in (4096, 16384, 65536)
        assert sum(found.bytes_by_node.values()) == 1 << 20
        assert 0 in found.bytes_by_node
    finally:
        arena.close()


def test_a_node_that_there_is_not_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), preferring(memory_placement.MAX_NODE):
        arena = ArenaFile(1 << 20, str(tmp_path / "arena"))
    arena.memory[5] = 1
    arena.close()
    assert "memory is not placed" in caplog.text


def test_where_it_is_not_known_how_nothing_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "toaster")
    with caplog.at_level(logging.WARNING), preferring(0):
        pass
    assert "not known how on toaster" in caplog.text
