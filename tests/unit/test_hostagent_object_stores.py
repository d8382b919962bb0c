"""What Mooncake's library says, as a store of the cold tier: a double of the library says it here,
and tests/integration/test_cold_pool.py has the real one. And what `obstore` says of a folder.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from kvcast.hostagent import object_stores
from kvcast.hostagent.object_stores import ColdError, Listed, Mooncake, Threads, open_store


class LibraryDouble:
    """`MooncakeDistributedStore`, with a dictionary behind it."""

    objects: dict[str, bytes]
    setup_codes: list[int]
    calls_fail: int
    hangs: threading.Event | None

    @classmethod
    def reset(cls) -> None:
        cls.objects, cls.setup_codes, cls.calls_fail, cls.hangs = {}, [], 0, None

    def setup(self, *_arguments: object) -> int:
        return self.setup_codes.pop(0) if self.setup_codes else 0

    def put(self, name: str, data: bytes) -> int:
        if self.hangs is not None:
            self.hangs.wait(60)
        if not self.calls_fail:
            self.objects.setdefault(name, data)
        return self.calls_fail

    def get_buffer(self, name: str) -> bytes | None:
        return None if self.calls_fail else self.objects.get(name)

    def is_exist(self, name: str) -> int:
        return self.calls_fail or int(name in self.objects)

    def remove(self, name: str, _force: bool) -> int:
        return self.calls_fail or (0 if self.objects.pop(name, None) is not None else -704)

    def remove_by_regex(self, pattern: str, _force: bool) -> int:
        self.objects["pattern"] = pattern.encode()
        return self.calls_fail or 3

    def close(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LibraryDouble]]:
    LibraryDouble.reset()
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = LibraryDouble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(object_stores, "_CONNECT_AGAIN_S", 0.0)
    yield LibraryDouble
    if LibraryDouble.hangs is not None:
        LibraryDouble.hangs.set()


URL = "mooncake://127.0.0.1:50051"


async def test_objects_go_and_come(library: type[LibraryDouble]) -> None:
    store = open_store(URL)
    await store.put("a/b", b"bytes")
    assert bytes(await store.get("a/b")) == b"bytes"
    await store.delete("a/b")
    await store.delete("a/b")  # it is not there any more, which is as well
    with pytest.raises(FileNotFoundError):
        await store.get("a/b")
    await store.delete_all("a.b-c/12/")
    assert library.objects["pattern"] == b"^a[.]b[-]c/12/"
    await store.close()


async def test_what_fails_says_so_and_is_no_missing_object(library: type[LibraryDouble]) -> None:
    store = open_store(URL)
    library.calls_fail = -900
    for call in (
        store.put("a", b"b"),
        store.get("a"),
        store.delete("a"),
        store.delete_all("a"),
    ):
        with pytest.raises(OSError, match="Mooncake Store") as failure:
            await call
        assert not isinstance(failure.value, FileNotFoundError)
    await store.close()


async def test_a_master_that_does_not_answer_at_first_is_tried_again(
    library: type[LibraryDouble],
) -> None:
    library.setup_codes = [-1, -1]
    store = open_store(URL)
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:50051"):
            await store.put("a", b"b")
    await store.put("a", b"b")
    assert library.objects == {"a": b"b"}
    await store.close()


async def test_calls_that_hang_hold_up_nobody_else_and_those_not_begun_are_not_made(
    library: type[LibraryDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_stores, "_CLOSE_S", 0.01)
    store = open_store(URL)
    await store.put("first", b"")
    library.hangs = threading.Event()
    waiting = [
        asyncio.create_task(store.put(str(n), b"")) for n in range(object_stores.THREADS + 3)
    ]
    await asyncio.sleep(0)  # all are given to the threads
    for task in waiting:
        task.cancel()
    assert all(isinstance(e, asyncio.CancelledError) for e in await gathered(waiting))
    await store.close()  # though every thread waits
    library.hangs.set()
    assert isinstance(store, Mooncake)
    for thread in store._threads._threads:
        thread.join(60)
    assert len(library.objects) <= 1 + object_stores.THREADS


async def gathered(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_error_in_a_thread_is_the_callers() -> None:
    threads = Threads(1)

    def wrong() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.do(wrong)
    assert await threads.do(lambda: 7) == 7
    threads.close()


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://127.0.0.1",
        "mooncake://127.0.0.1:port",
        "mooncake://127.0.0.1:70000",
        "mooncake://127.0.0.1:1?metrics=0",
        "mooncake://127.0.0.1:1?metrics=x",
        "mooncake://127.0.0.1:1?buffer_mib=0",
        "mooncake://127.0.0.1:1?what=ever",
        "mooncake://127.0.0.1:1?what",
    ],
)
async def test_a_url_that_says_nothing_is_refused(url: str) -> None:
    with pytest.raises(ColdError, match="mooncake"):
        open_store(url)


async def test_a_folder_that_is_not_there_and_a_strange_scheme_are_told_in_a_line(
    tmp_path: Path,
) -> None:
    pytest.importorskip("obstore")
    for url in (f"file://{tmp_path}/nowhere", "ftp://host/folder"):
        with pytest.raises(ColdError) as told:
            open_store(url)
        assert url in str(told.value)
        assert "\n" not in str(told.value)
    with pytest.raises(ColdError, match=rf"there is no folder {tmp_path}/a b; make it first"):
        open_store(f"file://{tmp_path}/a%20b")
    (tmp_path / "a b").mkdir()
    await open_store(f"file://{tmp_path}/a%20b").close()


async def test_without_the_package_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ColdError, match="package"):
        open_store(URL)


async def test_all_of_a_prefix_is_deleted_although_others_delete_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    store = open_store(f"file://{tmp_path}")
    names = [f"c/all/{number:03}" for number in range(150)]
    for name in (*names, "c/other/0"):
        await store.put(name, b"x")
    list_objects = store.objects

    async def objects_of_which_others_take_some(prefix: str) -> AsyncIterator[Sequence[Listed]]:
        async for some in list_objects(prefix):
            (tmp_path / some[len(some) // 2][0]).unlink()
            yield some

    monkeypatch.setattr(store, "objects", objects_of_which_others_take_some)
    await store.delete_all("c/all/")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0"]
