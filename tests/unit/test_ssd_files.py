"""The SSD tier's files: their format, what is refused, what fsck finds and mends, and the threads
that read and write them. Files lie on whatever file system the test's folder is on.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kvcast.cli import fsck as command
from kvcast.hostagent.tiers.arena import ArenaError
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.kept import KeptOptions, open_kept
from kvcast.hostagent.tiers.ssd import files, layout
from kvcast.hostagent.tiers.ssd.files import (
    TOGETHER_BESIDE_READS_BYTES,
    TOGETHER_BYTES,
    Disk,
    SsdFile,
    open_files,
)
from kvcast.hostagent.tiers.ssd.fsck import check_ssd
from kvcast.hostagent.tiers.ssd.layout import (
    ENTRIES_PER_PAGE,
    ENTRY_BYTES,
    PAGE_BYTES,
    Cut,
    Entry,
    Formatted,
    SsdError,
    SsdInUseError,
    cut_of,
    head_of,
    open_formatted,
    pack_entry,
    scan,
    unpack_entry,
)
from kvcast.hostagent.tiers.ssd.orders import DONE, Kind, Order
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.simulation.disk import SimDisk

MOST_PIECES = os.sysconf("SC_IOV_MAX")
UNIT, SLAB = 4096, 32 * 4096
CUT = cut_of("node a of cluster b", 20 * SLAB, UNIT, SLAB)


def made(path: Path, cut: Cut = CUT) -> tuple[SsdFile, Formatted]:
    (file,), (formatted,) = open_files([str(path)], [cut], lambda: 7)
    return file, formatted


def entry(unit: int, data: bytes, number: int = 1, order: int = 1) -> Entry:
    block = BlockId(3, number.to_bytes(16, "big"))
    return Entry(unit, block, len(data), digest_of(data), 9, order, 1e9, b"p" * 16, 4)


def store(medium: layout.Medium, formatted: Formatted, one: Entry, data: bytes) -> None:
    """Write a block, and its entry."""
    at = formatted.cut.blocks_offset + one.unit * UNIT
    medium.pwrite(data.ljust(-(-len(data) // PAGE_BYTES) * PAGE_BYTES, b"\0"), at)
    page = PAGE_BYTES + one.unit // ENTRIES_PER_PAGE * PAGE_BYTES
    table = bytearray(medium.pread(PAGE_BYTES, page))
    place = one.unit % ENTRIES_PER_PAGE * ENTRY_BYTES
    table[place : place + ENTRY_BYTES] = pack_entry(one, formatted.identity)
    medium.pwrite(bytes(table), page)


def test_an_entry_says_again_what_it_was_told_and_nothing_when_any_bit_is_another() -> None:
    one = entry(5, b"x" * 5000)
    data = pack_entry(one, 7)
    assert len(data) == ENTRY_BYTES
    assert unpack_entry(data, 7, 5) == one
    assert unpack_entry(data, 8, 5) is None, "of another file"
    assert unpack_entry(data, 7, 6) is None, "at another place"
    for bit in range(8 * ENTRY_BYTES):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        assert unpack_entry(bytes(wrong), 7, 5) is None


def test_a_table_that_ends_in_the_middle_of_an_entry_is_read_up_to_there() -> None:
    disk = SimDisk(random.Random(1))
    formatted = open_formatted(disk, CUT, 7)
    for unit in (0, 1):
        one = entry(unit, b"x" * 5000, number=unit)
        disk.pwrite(pack_entry(one, 7), PAGE_BYTES + unit * ENTRY_BYTES)
    for length, found in ((2, 2), (1.99, 1), (1, 1), (0.5, 0), (0, 0)):
        disk.truncate(PAGE_BYTES + int(length * ENTRY_BYTES))
        cut = replace(formatted, whole_bytes=disk.size_bytes())
        assert sum(len(piece.entries) for piece in scan(disk, cut)) == found
        assert check_ssd(disk, cut).truncated == found


@pytest.mark.parametrize("size", [0, 1, SLAB, SLAB + 2 * PAGE_BYTES - 1])
def test_a_file_that_is_too_small_is_refused(size: int) -> None:
    with pytest.raises(SsdError, match="too few"):
        cut_of("x", size, UNIT, SLAB)
    with pytest.raises(SsdError, match="cannot be cut"):
        cut_of("x", 1 << 30, 5000, 16 * 5000)


def test_a_file_is_made_found_again_and_refused_to_others(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    file, formatted = made(path)
    assert not formatted.found
    assert path.stat().st_size == CUT.file_bytes <= 20 * SLAB
    assert path.stat().st_blocks * 512 >= CUT.file_bytes, "its room is taken"
    with pytest.raises(SsdInUseError):
        made(path)
    file.close()
    file, again = made(path)
    assert again == replace(formatted, found=True)
    file.close()
    for other, text in (
        (replace(CUT, owner="node c of cluster b"), "is of node a of cluster b"),
        (replace(CUT, slabs=CUT.slabs - 1), "state its size"),
        (replace(CUT, unit_bytes=2 * UNIT), "state its size"),
    ):
        with pytest.raises(SsdError, match=text):
            made(path, other)
    os.chmod(path, 0o644)
    with pytest.raises(SsdError, match="not this user's alone"):
        made(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(SsdError):
        made(path)


def test_a_path_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "nowhere/ssd"):
        with pytest.raises(SsdError):
            made(tmp_path / name)


def test_a_full_disk_is_an_error_at_the_start() -> None:
    disk = SimDisk(random.Random(1), room_bytes=1000)
    with pytest.raises(OSError, match="No space"):
        layout.open_formatted(disk, CUT, 7)


def test_a_damaged_head_begins_anew_and_a_foreign_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    file, formatted = made(path)
    store(file, formatted, entry(1, b"a"), b"a")
    file.close()
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    file, formatted = made(path)
    assert not formatted.found
    assert [piece for piece in scan(file, formatted) if piece.entries or piece.refused] == []
    file.close()
    path.write_bytes(b"\x7fELF" + bytes(100_000))
    with pytest.raises(SsdError, match="no SSD file of kvcast"):
        made(path)
    assert path.read_bytes() == b"\x7fELF" + bytes(100_000)


def test_a_format_of_another_release_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ssd"
    with monkeypatch.context() as patch:
        patch.setattr(layout, "FORMAT", 9)
        made(path)[0].close()
    with pytest.raises(SsdError, match="has format 9, and this release 1"):
        made(path)


@pytest.mark.parametrize("size", [1, 511, 512, 4096, 4097, 100_000])
@pytest.mark.parametrize("shift", [0, 512, 1024, 8])
def test_orders_read_what_orders_wrote_however_it_is_aligned(
    tmp_path: Path, size: int, shift: int
) -> None:
    file, _ = made(tmp_path / "ssd")
    ended: queue.Queue[tuple[Order, str, int]] = queue.Queue()
    disk = Disk([file], lambda *of: ended.put(of), threads=2)
    data = random.Random(size).randbytes(size)
    room = memoryview(bytearray(300_000))
    at = CUT.blocks_offset + SLAB
    out, back = room[shift : shift + size], room[150_000 + shift : 150_000 + shift + size]
    out[:] = data
    for kind, view in ((Kind.WRITE, out), (Kind.FLUSH, memoryview(b"")), (Kind.READ, back)):
        order = Order(kind, 0, lambda *_: None, at, view)
        disk.do([order])
        assert ended.get(timeout=10)[:2] == (order, DONE)
    assert bytes(back) == data
    disk.do([Order(Kind.READ, 0, lambda *_: None, at, back)])
    assert ended.get(timeout=10)[2] == digest_of(data)
    beyond = Order(Kind.READ, 0, lambda *_: None, CUT.file_bytes, back)
    disk.do([beyond])
    order, error, _ = ended.get(timeout=10)
    assert order is beyond
    assert error
    assert disk.close(10)
    file.close()


class _Calls:
    """A file whose system calls are remembered, as kind and number of orders, and may fail."""

    def __init__(self, file: SsdFile, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, int]] = []
        self.fails_at: set[int] = set()
        self.fails_together = self.falls_short = False
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(file, name, partial(self._call, name, getattr(file, name)))

    def _call(
        self,
        name: str,
        call: Callable[[Sequence[memoryview], int], int],
        views: Sequence[memoryview],
        offset: int,
    ) -> int:
        self.made.append((name[1], len(views)))
        ends = range(offset, offset + sum(map(len, views)))
        if any(at in ends for at in self.fails_at) or (self.fails_together and len(views) > 1):
            raise OSError(errno.EIO, "no")
        short = self.falls_short and len(views) > 1
        return call(views[:-1] if short else views, offset)


def done_by(file: SsdFile, orders: Sequence[Order]) -> dict[Order, tuple[str, int]]:
    """Have a disk of one thread do these at once; error and digest of each."""
    ended: queue.Queue[tuple[Order, str, int]] = queue.Queue()
    disk = Disk([file], lambda *of: ended.put(of), threads=1)
    disk.do(orders)
    assert disk.close(10)
    found = {}
    while not ended.empty():
        order, *of = ended.get()
        assert order not in found, "told once"
        found[order] = tuple(of)
    assert found.keys() == {*orders}
    return found  # type: ignore[return-value]


def in_pages(
    kind: Kind, places: Sequence[int], room: memoryview, *, hurried: bool = False
) -> list[Order]:
    """An order for each of these pages, from and to that page of the room."""
    return [
        Order(
            kind, 0, lambda *_: None, CUT.blocks_offset + at * PAGE_BYTES,
            room[at * PAGE_BYTES : (at + 1) * PAGE_BYTES], hurried,
        )
        for at in places
    ]  # fmt: skip


@pytest.fixture
def pages() -> memoryview:
    """Memory for 640 pages, aligned as the disk wants it; each page has bytes of its own."""
    memory = memoryview(mmap.mmap(-1, 640 * PAGE_BYTES))
    memory[:] = random.Random(1).randbytes(len(memory))
    return memory


def test_orders_that_follow_each_other_in_the_file_share_a_call(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = made(tmp_path / "ssd")
    calls = _Calls(file, monkeypatch)
    places = [*range(10), *range(20, 23), 40, 39, *range(50, 351)]
    monkeypatch.setattr(files, "TOGETHER_BYTES", 290 * PAGE_BYTES)
    done_by(file, in_pages(Kind.WRITE, places, pages))
    assert calls.made == [("w", row) for row in (10, 3, 1, 1, 290, 11)]
    calls.made.clear()
    together = TOGETHER_BESIDE_READS_BYTES // PAGE_BYTES
    rows = [10, 3, 1, 1, together, 301 - together]
    back = memoryview(mmap.mmap(-1, len(pages)))
    orders = in_pages(Kind.READ, places, back)
    for order, (error, digest) in done_by(file, orders).items():
        assert (error, digest) == (DONE, digest_of(order.view))
    assert calls.made == [("r", row) for row in rows]
    for at in places:
        page = slice(at * PAGE_BYTES, (at + 1) * PAGE_BYTES)
        assert back[page] == pages[page]
    file.close()


def test_while_somebody_reads_writes_take_no_longer_than_they_must(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = made(tmp_path / "ssd")
    begun, may_go_on = threading.Event(), threading.Event()
    done: queue.SimpleQueue[Kind] = queue.SimpleQueue()

    class Slow(SsdFile):
        def preadv(self, views: Sequence[memoryview], offset: int) -> int:
            begun.set()
            may_go_on.wait(10)
            return super().preadv(views, offset)

    file.__class__ = Slow
    calls = _Calls(file, monkeypatch)
    disk = Disk([file], lambda order, _error, _digest: done.put(order.kind), threads=1)
    disk.do(in_pages(Kind.READ, [0], pages))
    assert begun.wait(10)
    disk.do(in_pages(Kind.WRITE, range(1, 301), pages))
    may_go_on.set()
    assert [done.get(timeout=10) for _ in range(301)] == [Kind.READ, *[Kind.WRITE] * 300]
    disk.do(in_pages(Kind.WRITE, range(1, 301), pages))
    assert disk.close(10)
    together = TOGETHER_BESIDE_READS_BYTES // PAGE_BYTES
    assert together < 300 < TOGETHER_BYTES // PAGE_BYTES <= MOST_PIECES
    assert [row for name, row in calls.made if name == "w"] == [together, 300 - together, 300]
    file.close()


def test_orders_of_different_kinds_or_for_which_there_are_threads_enough_share_no_call(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = made(tmp_path / "ssd")
    calls = _Calls(file, monkeypatch)
    done_by(file, [
        *in_pages(Kind.WRITE, [0, 1], pages),
        *in_pages(Kind.WRITE, [2, 3, 4], pages, hurried=True),
        *in_pages(Kind.READ, [5], pages),
        Order(Kind.FLUSH, 0, lambda *_: None, CUT.blocks_offset + 6 * PAGE_BYTES),
        *in_pages(Kind.WRITE, [6], pages),
    ])  # fmt: skip
    assert sorted(calls.made) == [("r", 1), ("w", 1), ("w", 2), ("w", 3)]
    calls.made.clear()
    done_by(file, [
        *in_pages(Kind.WRITE, [0, 1], pages),
        *in_pages(Kind.READ, [2, 3], pages),
        *in_pages(Kind.WRITE, [4], pages),
    ])  # fmt: skip
    assert sorted(calls.made) == [("r", 2), ("w", 1), ("w", 2)]
    calls.made.clear()
    disk = Disk([file], lambda *_of: None, threads=4)
    disk.do(in_pages(Kind.WRITE, range(4), pages))
    disk.do(in_pages(Kind.WRITE, range(10, 16), pages))
    assert disk.close(10)
    assert sorted(calls.made) == [("w", 1)] * 4 + [("w", 2)] * 3
    file.close()


def test_flushes_and_orders_for_different_files_share_no_call(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [made(tmp_path / name)[0] for name in ("one", "two")]
    flushed: list[int] = []
    monkeypatch.setattr(files[0], "flush", lambda: flushed.append(0))
    orders = in_pages(Kind.WRITE, range(4), pages)
    for order in orders[2:]:
        order.file = 1
    disk = Disk(files, lambda *_of: None, threads=1)
    disk.do([*orders, *(Order(Kind.FLUSH, 0, lambda *_: None) for _ in range(3))])
    assert disk.close(10)
    assert flushed == [0] * 3
    for order in orders:
        assert files[order.file].pread(PAGE_BYTES, order.offset) == order.view
    for file in files:
        file.close()


@pytest.mark.parametrize("why", ["one fails", "only together", "falls short", "not aligned"])
def test_orders_that_cannot_share_a_call_are_done_each_by_itself(
    tmp_path: Path, pages: memoryview, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    file, _ = made(tmp_path / "ssd")
    calls = _Calls(file, monkeypatch)
    calls.fails_together, calls.falls_short = why == "only together", why == "falls short"
    if why == "one fails":
        calls.fails_at = {CUT.blocks_offset + 3 * PAGE_BYTES}
    room = pages[8:] if why == "not aligned" else pages
    orders = in_pages(Kind.WRITE, range(6), room)
    found = done_by(file, orders)
    bad = {orders[3]} if why == "one fails" else set()
    assert {order for order, (error, _) in found.items() if error} == bad
    calls.fails_at, calls.fails_together, calls.falls_short = set(), False, False
    back = memoryview(mmap.mmap(-1, len(pages)))
    for order in done_by(file, in_pages(Kind.READ, range(6), back)):
        at = order.offset - CUT.blocks_offset
        if orders[at // PAGE_BYTES] not in bad:
            assert order.view == room[at : at + PAGE_BYTES]
    file.close()


def test_reads_take_turns_with_writes_and_what_is_hurried_goes_first(tmp_path: Path) -> None:
    file, _ = made(tmp_path / "ssd")
    begun, may_go_on = threading.Event(), threading.Event()
    done: list[str] = []
    ends: list[str] = []

    def note(kind: str) -> None:
        done.append(kind)
        begun.set()
        may_go_on.wait(10)

    def ended(order: Order, error: str, _digest: int) -> None:
        assert error == DONE
        ends.append("f" if order.kind is Kind.FLUSH else order.kind.value[0])

    class Watched(SsdFile):
        def preadv(self, views: Sequence[memoryview], offset: int) -> int:
            note("r")
            return super().preadv(views, offset)

        def pwritev(self, views: Sequence[memoryview], offset: int) -> int:
            note("w")
            return super().pwritev(views, offset)

        def flush(self) -> None:
            note("f")

    file.__class__ = Watched
    disk = Disk([file], ended, threads=1)
    room = memoryview(bytearray(UNIT))
    at = CUT.blocks_offset

    def order(kind: Kind, *, hurried: bool = False) -> Order:
        view = memoryview(b"") if kind is Kind.FLUSH else room
        return Order(kind, 0, lambda *_: None, at, view, hurried)

    disk.do([order(Kind.WRITE)])
    assert begun.wait(10), "the one thread is held up now"
    disk.do([order(Kind.WRITE) for _ in range(5)])
    disk.do([order(Kind.READ) for _ in range(3)])
    disk.do([order(Kind.FLUSH, hurried=True)])
    may_go_on.set()
    assert disk.close(10)
    assert "".join(done) in ("wfwrwrwrww", "wwfwrwrwrw")  # whose turn it was
    assert sorted(ends) == sorted(done)
    file.close()


@pytest.mark.parametrize("simulated", [False, True], ids=["file", "simulated"])
def test_a_file_that_somebody_has_shortened_grows_again_where_it_is_written(
    tmp_path: Path, *, simulated: bool
) -> None:
    """A write beyond the end is none that fails: no tier tries it again for ever."""
    medium: layout.Medium
    if simulated:
        medium = disk = SimDisk(random.Random(1))
        formatted = layout.open_formatted(disk, CUT, 7)
        disk.truncate(CUT.blocks_offset)
    else:
        medium, formatted = made(tmp_path / "ssd")
        os.truncate(tmp_path / "ssd", CUT.blocks_offset)
    data = random.Random(2).randbytes(UNIT)
    store(medium, formatted, entry(40, data), data)
    at = CUT.blocks_offset + 40 * UNIT
    assert medium.size_bytes() == at + UNIT
    assert medium.pread(UNIT, at) == data
    assert medium.pread(UNIT, at - UNIT) == bytes(UNIT)
    if isinstance(medium, SsdFile):
        medium.close()


def damaged_disk() -> tuple[SimDisk, Formatted]:
    """Four whole blocks, and one of each kind that is not."""
    disk = SimDisk(random.Random(1))
    formatted = layout.open_formatted(disk, CUT, 7)
    for number in range(4):
        data = random.Random(number).randbytes(3000 + number)
        store(disk, formatted, entry(number, data, number, number + 10), data)
    data = b"d" * 5000
    store(disk, formatted, entry(40, data, 40, 40), b"D" * 5000)  # damaged
    store(disk, formatted, entry(1, data[:3000], 41, 5), data[:3000])  # in place of block 1
    again = random.Random(1).randbytes(3001)
    store(disk, formatted, entry(64, again, 1, 60), again)
    store(disk, formatted, entry(65, again, 1, 59), again)  # the same block, older
    disk.pwrite(b"?" * ENTRY_BYTES, PAGE_BYTES + 3 * PAGE_BYTES)  # an entry that proves nothing
    last = CUT.units - 1
    store(disk, formatted, entry(last, b"e", 50, 50), b"e")
    return disk, formatted


def test_fsck_finds_and_mends_what_is_not_whole() -> None:
    disk, formatted = damaged_disk()
    disk.truncate(CUT.file_bytes - UNIT)
    formatted = head_of(disk)
    found = check_ssd(disk, formatted)
    assert [block.key[-1] for block in found.damaged] == [40]
    assert (found.overlapping, found.truncated, found.refused) == (1, 1, 1)
    assert (found.blocks, found.repaired, found.is_clean) == (5, 0, False)
    mended = check_ssd(disk, formatted, repair=True)
    assert mended.repaired == 4
    after = check_ssd(disk, formatted)
    assert after.is_clean
    assert after.blocks == 5


def test_fsck_goes_on_where_the_disk_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, formatted = damaged_disk()
    bad = {PAGE_BYTES, CUT.blocks_offset + 64 * UNIT}
    pread = disk.pread

    def failing(size_bytes: int, offset: int) -> bytes:
        if any(offset <= at < offset + size_bytes for at in bad):
            raise OSError(5, "Input/output error")
        return pread(size_bytes, offset)

    monkeypatch.setattr(disk, "pread", failing)
    found = check_ssd(disk, formatted)
    assert found.unreadable_pages == 1
    assert {block.key[-1] for block in found.damaged} == {1, 40}
    assert check_ssd(disk, formatted, repair=True).repaired
    bad.clear()
    assert check_ssd(disk, formatted).is_clean


def test_the_command_tells_of_files_and_of_kept_arenas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "ssd", tmp_path / "report.json"
    file, formatted = made(path)
    data = b"x" * 5000
    store(file, formatted, entry(2, data), data)
    assert command.main(["--ssd", str(path)]) == 1
    assert "belongs to a running agent" in capsys.readouterr().err
    file.close()
    assert command.main(["--ssd", str(path)]) == 0
    assert "1 blocks whole, 5000 bytes" in capsys.readouterr().out
    file, _ = made(path)
    store(file, formatted, entry(4, data, 2), b"y" * 5000)
    file.close()
    assert command.main(["--ssd", str(path), "--json", str(report)]) == 1
    (plain,) = json.loads(report.read_text())
    assert plain["damaged"] == [{"namespace": 3, "key": (2).to_bytes(16, "big").hex()}]
    assert not plain["clean"]
    assert command.main(["--ssd", str(path), "--repair"]) == 0
    assert "mended: 1" in capsys.readouterr().out
    assert command.main(["--ssd", str(path)]) == 0
    assert command.main([]) == 2
    assert command.main(["--ssd", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()


def test_the_command_looks_at_kept_arenas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arena_bytes, slab = 1 << 20, 65536
    path = str(tmp_path / "arena")
    options = KeptOptions("node a", path, path + ".index", arena_bytes, slab)
    kept = open_kept(options, 5)
    index = Index(kept.index.memory, arena_bytes, 5)
    for number in range(4):
        data = bytes([number]) * 1000
        offset = number * slab
        kept.arena.memory[offset : offset + 1000] = data
        block = BlockId(1, number.to_bytes(16, "big"))
        index.publish(block, offset, 1000, 1024, digest_of(data))
    index.publish(BlockId(1, b"o" * 16), 3 * slab, 1000, 1024, 9)  # where another lies
    kept.arena.memory[slab] ^= 1
    arguments = ["--arena-path", path]
    assert command.main(arguments) == 1
    assert "belongs to a running agent" in capsys.readouterr().err
    index.close()
    kept.close()
    head = (tmp_path / "arena.index").read_bytes()[:64]
    assert command.main(arguments) == 1
    out = capsys.readouterr().out
    assert "of node a" in out
    assert "1 where another lies" in out
    assert command.main([*arguments, "--repair"]) == 0
    assert (tmp_path / "arena.index").read_bytes()[:64] == head
    assert command.main(arguments) == 0
    (tmp_path / "arena.index").write_bytes(b"no index")
    assert command.main(arguments) == 1
    with pytest.raises(ArenaError):
        open_kept(replace(options, owner="x"), 5)
    assert buckets_for(arena_bytes) > 0
