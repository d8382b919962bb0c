"""Further arenas that can only be mapped: devices and huge pages.

Oracle: the bytes that were written, and what the kernel says of its huge pages. A device is played
by /dev/zero, of which every mapping is memory of its own, and by a folder in place of /sys. Cannot
see: a real memory device, or what of it outlives a power cut.
"""

from __future__ import annotations

import os
import queue
import random
from pathlib import Path

import pytest
from huge_pages import PAGE, huge_pages
from kvcast.cli import fsck as command
from kvcast.hostagent.tiers.arena import ArenaError, ArenaFile
from kvcast.hostagent.tiers.huge_pages import huge_page_bytes_of
from kvcast.hostagent.tiers.kept import KeptOptions, open_kept
from kvcast.hostagent.tiers.ssd.files import Disk, SsdFile, open_files
from kvcast.hostagent.tiers.ssd.layout import SsdError, SsdInUseError, cut_of
from kvcast.hostagent.tiers.ssd.mapped import MappedFile, must_be_mapped, open_arena
from kvcast.hostagent.tiers.ssd.orders import DONE, NOTHING, Kind, Order

UNIT, SLAB = 4096, 32 * 4096
CUT = cut_of("node a of cluster b", 40 * SLAB, UNIT, SLAB)
PAGES = -(-CUT.file_bytes // PAGE)
DEVICE = "/dev/zero"


@pytest.fixture
def own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device were this test's alone: others, in other processes, play with it, too."""
    monkeypatch.setattr("kvcast.hostagent.tiers.ssd.files.try_lock", lambda _fd: True)


def sysfs(folder: Path, size: str = str(8 * PAGE), align: str = str(PAGE)) -> Path:
    """What the kernel would say if the device were a DAX device."""
    number = os.stat(DEVICE).st_rdev
    device = folder / "dev" / "char" / f"{os.major(number)}:{os.minor(number)}"
    device.mkdir(parents=True)
    (folder / "bus" / "dax").mkdir(parents=True)
    (device / "subsystem").symlink_to(folder / "bus" / "dax")
    for name, value in (("size", size), ("align", align)):
        if value:
            (device / name).write_text(f"{value}\n")
    return folder


def comes_back(file: SsdFile) -> None:
    """Orders bring what orders have written, wherever that lies, and none goes beyond the end."""
    ended: queue.Queue[tuple[Order, str, int]] = queue.Queue()
    disk = Disk([file], lambda *of: ended.put(of), threads=2)
    rng = random.Random(1)
    room = memoryview(bytearray(300_000))

    def do(kind: Kind, offset: int, view: memoryview) -> str:
        disk.do([Order(kind, 0, lambda *_: None, offset, view)])
        return ended.get(timeout=30)[1]

    last = CUT.blocks_offset + CUT.slabs * SLAB
    for offset, size in ((CUT.blocks_offset, 1), (PAGE - 5000, 100_003), (last - 4097, 4097)):
        data = rng.randbytes(size)
        room[:size] = data
        assert do(Kind.WRITE, offset, room[:size]) == DONE
        assert do(Kind.WRITE, offset, memoryview(data)) == DONE, "from memory that is read-only"
        assert do(Kind.FLUSH, 0, NOTHING) == DONE
        assert do(Kind.READ, offset, room[150_000 : 150_000 + size]) == DONE
        assert bytes(room[150_000 : 150_000 + size]) == data
        assert bytes(file.map(offset, size)) == data, "as the tier below sees it"
    beyond = -(-CUT.file_bytes // PAGE) * PAGE
    # Several parts of memory in one call, as orders that follow each other make it.
    parts = [rng.randbytes(size) for size in (5, 4096, 77)]
    assert file.pwritev([memoryview(bytearray(part)) for part in parts], last - 4178) == 4178
    rooms = [memoryview(bytearray(len(part))) for part in parts]
    assert file.preadv(rooms, last - 4178) == 4178
    assert list(map(bytes, rooms)) == parts
    with pytest.raises(OSError, match="the file ends there"):
        file.preadv(rooms, beyond - 4177)
    assert do(Kind.READ, beyond - 10, room[:11]) == "the file ends there"
    assert do(Kind.WRITE, beyond - 10, room[:11]) == "the file ends there"
    assert disk.close(10)


@pytest.mark.usefixtures("own_device")
def test_a_device_is_used_by_its_mapping(tmp_path: Path) -> None:
    system = sysfs(tmp_path)
    (file,), (formatted,) = open_files(
        *([DEVICE], [CUT], lambda: 7),
        direct=False,
        opened=lambda path, size_bytes: MappedFile(path, size_bytes, sysfs=system),
    )
    assert not formatted.found
    assert file.size_bytes() == 8 * PAGE
    comes_back(file)
    file.close()


@pytest.mark.usefixtures("own_device")
def test_a_device_that_does_not_say_its_alignment_is_taken_for_one_of_2_mib(
    tmp_path: Path,
) -> None:
    file = MappedFile(DEVICE, 5000, sysfs=sysfs(tmp_path, align=""))
    assert len(file.map(0, 4096)) == 4096
    assert file.pread(8 * PAGE + 1, PAGE - 1) == bytes(7 * PAGE + 1), "up to the device's end"
    with pytest.raises(OSError, match="No space"):
        file.extend(9 * PAGE)
    with pytest.raises(OSError, match="No space"):
        file.pwrite(b"12", 8 * PAGE - 1)
    file.close()


@pytest.mark.usefixtures("own_device")
@pytest.mark.parametrize(
    ("size", "text"),
    [(str(PAGE), f"has {PAGE} bytes, and"), ("", "its size is not known"), ("much", "not known")],
)
def test_a_device_that_is_too_small_or_does_not_say_its_size_is_refused(
    tmp_path: Path, size: str, text: str
) -> None:
    with pytest.raises(SsdError, match=text):
        MappedFile(DEVICE, CUT.file_bytes, sysfs=sysfs(tmp_path, size))


def test_another_device_is_refused(tmp_path: Path) -> None:
    assert must_be_mapped(DEVICE)
    with pytest.raises(SsdError, match="no memory device"):
        open_arena(DEVICE, CUT.file_bytes)


def test_what_lies_on_hugetlbfs_is_known_by_its_mount(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    path = str(tmp_path / "new")
    for kind, wanted in (("hugetlbfs", True), ("tmpfs", False)):
        number = f"{os.major(device)}:{os.minor(device)}"
        mounts.write_text(
            f"1 2 99:98 / / rw shared:1 - hugetlbfs x rw\n3 1 {number} / /m rw - {kind} none rw\n"
        )
        assert (huge_page_bytes_of(path, mounts) > 0) is wanted
    assert not huge_page_bytes_of(str(tmp_path / "none" / "new"))
    assert not huge_page_bytes_of(path, tmp_path / "none")
    assert not must_be_mapped(path)
    file = open_arena(path)
    assert not isinstance(file, MappedFile)
    file.close()


def test_a_file_of_huge_pages_is_made_found_again_and_checked(tmp_path: Path) -> None:
    with huge_pages(tmp_path / "huge", PAGES) as folder:
        made_found_again_and_checked(str(folder / "arena"))


def made_found_again_and_checked(path: str) -> None:
    def made() -> tuple[SsdFile, bool]:
        (file,), (formatted,) = open_files(
            [path], [CUT], lambda: 7, direct=False, opened=open_arena
        )
        return file, formatted.found

    file, found = made()
    assert isinstance(file, MappedFile)
    assert not found
    assert os.stat(path).st_size == PAGES * PAGE
    assert os.statvfs(path).f_bfree == 0, "all of it is taken at the start"
    comes_back(file)
    with pytest.raises(SsdInUseError):
        made()
    file.close()
    assert command.main(["--ssd", path]) == 0
    file, found = made()
    assert found
    file.close()
    os.truncate(path, PAGE)
    file, found = made()
    assert found
    assert os.stat(path).st_size == PAGES * PAGE, "what it has lost is taken again"
    file.close()


def test_where_too_few_huge_pages_are_free_it_is_said_and_none_is_kept(tmp_path: Path) -> None:
    cut = cut_of("x", (PAGES + 1) * PAGE + SLAB, UNIT, SLAB)
    size = (PAGES + 1) * PAGE
    says = r"huge pages of 2097152 bytes are wanted, and \d+ are free.*vm\.nr_hugepages"
    with huge_pages(tmp_path / "huge", PAGES) as folder:
        path, index = str(folder / "arena"), str(tmp_path / "index")
        for _ in range(2):
            with pytest.raises(SsdError, match=says):
                open_files([path], [cut], lambda: 7, direct=False, opened=open_arena)
            assert os.statvfs(folder).f_bfree == PAGES
        for reserve in (True, False):
            with pytest.raises(ArenaError, match=says):
                ArenaFile(size, path + "2", reserve=reserve)
            with pytest.raises(ArenaError, match=says):
                open_kept(KeptOptions("a", path + "3", index, size, 65536, reserve), 5)
        with pytest.raises(ArenaError, match="multiples of 2097152 bytes"):
            ArenaFile(PAGE + 1, path + "2")
        arena = ArenaFile(PAGES * PAGE, path + "2")
        arena.close()
