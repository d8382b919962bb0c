"""The cache of compiled code.

Oracle: what the loaded function returns, and the files on disk.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kvcast.native import jit
from kvcast.native.writer import Module, integer
from kvcast.switchsim.llvm.memory import Region


class Source:
    """A module with one function that returns a number; it counts how often it is compiled."""

    def __init__(self, number: int) -> None:
        self.compiled = 0
        self._number = number

    def text(self, triple: str, layout: str) -> str:
        self.compiled += 1
        module = Module()
        f = module.function("answer", "i64", [], exported=True)
        f.ret(integer(64, self._number))
        return module.text(triple, layout)


def answer(library: jit.Library) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(library.addresses["answer"])())


def load(folder: Path | None, source: Source, key: str = "key") -> int:
    return answer(jit.load(key, source.text, ["answer"], folder))


def test_second_load_takes_the_code_from_disk(tmp_path: Path) -> None:
    source = Source(41)
    assert [load(tmp_path, source), load(tmp_path, source)] == [41, 41]
    assert source.compiled == 1
    assert load(tmp_path, Source(42), "another key") == 42
    assert len(list(tmp_path.glob("*.o"))) == 2


def test_code_for_a_named_processor_is_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(7)
    monkeypatch.setenv(jit.PROCESSOR_VARIABLE, "nehalem")
    assert [load(tmp_path, source), load(tmp_path, source)] == [7, 7]
    assert source.compiled == 1
    monkeypatch.setenv(jit.PROCESSOR_VARIABLE, "westmere")
    assert load(tmp_path, source) == 7
    assert source.compiled == 2
    assert len(list(tmp_path.glob("*.o"))) == 2


def test_without_a_folder_nothing_is_kept() -> None:
    source = Source(3)
    assert [load(None, source), load(None, source)] == [3, 3]
    assert source.compiled == 2


def test_files_and_folder_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    load(folder, Source(1))
    (file,) = folder.glob("*.o")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        lambda data: data[:-5],
        lambda data: b"",
        lambda data: b"x" + data,
        lambda data: data * 2,
    ],
    ids=["bit flipped", "cut", "empty", "shifted", "doubled"],
)
def test_damaged_file_is_compiled_anew(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    source = Source(7)
    load(tmp_path, source)
    (file,) = tmp_path.glob("*.o")
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert load(tmp_path, source) == 7
    assert source.compiled == 2
    assert file.read_bytes()[:16] == good[:16]
    assert load(tmp_path, source) == 7
    assert source.compiled == 2


def test_right_sum_over_what_is_no_object_code_is_compiled_anew(tmp_path: Path) -> None:
    import hashlib

    source = Source(8)
    load(tmp_path, source)
    (file,) = tmp_path.glob("*.o")
    nonsense = b"not an object file"
    file.write_bytes(jit.MAGIC + hashlib.sha256(nonsense).digest() + nonsense)
    assert load(tmp_path, source) == 8
    assert source.compiled == 2


def test_file_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    source = Source(9)
    load(tmp_path, source)
    (file,) = tmp_path.glob("*.o")
    file.chmod(0o666)
    assert load(tmp_path, source) == 9
    assert source.compiled == 2


def test_folder_that_cannot_be_made_only_costs_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    source = Source(2)
    assert [load(blocked / "cache", source) for _ in range(2)] == [2, 2]


def age(folder: Path) -> None:
    """Let ten seconds pass."""
    for file in folder.glob("*.o"):
        info = file.stat()
        os.utime(file, (info.st_atime - 10, info.st_mtime - 10))


def test_the_least_recently_used_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MAX_CACHED", 2)
    sources = [Source(number) for number in range(4)]
    for number, source in enumerate(sources):
        load(tmp_path, source, f"key {number}")
        age(tmp_path)
        load(tmp_path, sources[0], "key 0")
    load(tmp_path, sources[3], "key 3")
    assert [source.compiled for source in sources] == [1, 1, 1, 1]
    assert len(list(tmp_path.glob("*.o"))) == 2


def test_files_that_another_process_takes_away_meanwhile_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone.o").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(jit, "MAX_CACHED", 1)
    assert load(tmp_path, Source(5)) == 5
    assert [file.is_symlink() for file in tmp_path.glob("*.o")] == [False]
    assert not caplog.records


def test_cache_is_in_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.default_cache() == tmp_path / "kvcast" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jit.default_cache() == tmp_path / ".cache" / "kvcast" / "native"


def constants(triple: str, layout: str) -> str:
    """A function that reads a table of constants, which lies in a section of its own."""
    module = Module()
    f = module.function("answer", "i64", [("i64", "n")], exported=True)
    table = module.words([n * n for n in range(100)], 64)
    f.ret(f.load(64, f.at(table, f.shl(f.arguments[0], 3)), 8))
    return module.text(triple, layout)


def test_code_finds_its_constants_in_an_address_space_full_of_large_regions() -> None:
    kept: list[object] = []
    for _ in range(12):
        kept.append(Region(1 << 30))
        library = jit.load("", constants, ["answer"], None)
        kept.append(library)
        call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(library.addresses["answer"])
        assert call(9) == 81
