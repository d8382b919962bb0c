"""Who asks for what of a folder, as others fetch it too.

Oracle: a pool that gives what it holds, and writes down what it was asked. Cannot see: how answers
reach several hosts (`tests/integration/test_pool_models.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvcast.hostagent.client import AsyncClient, BusyError, KvcastError
from kvcast.hostagent.models import fetching
from kvcast.hostagent.models.fetching import AT_ONCE, Fetcher, FetchError
from kvcast.hostagent.models.manifest import FORMAT, FolderFile, Manifest, key_of
from kvcast.protocol.messages.control import AT_END

BLOCK_BYTES = 100
BLOCKS = [bytes([number]) * BLOCK_BYTES for number in range(1, 31)]
KEYS = [key_of(block) for block in BLOCKS]
MANIFEST = Manifest(FORMAT, BLOCK_BYTES, [FolderFile("f", 30 * BLOCK_BYTES, b"".join(KEYS))])


class _Block:
    tier = "home"

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)

    def __len__(self) -> int:
        return len(self.data)

    def __enter__(self) -> _Block:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class FakePool:
    """Gives every block. `company`: what it says of others, one after the other, the last for
    ever; an error is raised. `comes`: blocks that come to this node with each look."""

    company_says: list[tuple[int, int] | KvcastError]
    comes: list[list[int]] = field(default_factory=list)
    failing: int = 0
    """Gets that end with nothing, of those that expect."""
    held: list[int] = field(default_factory=list)
    asked: list[tuple[int, int, bool]] = field(default_factory=list)
    """Block, group, whether it was expected."""
    said: list[int] = field(default_factory=list)

    async def company(self, _namespace: int, at: int) -> tuple[int, int]:
        self.said.append(at)
        answer = self.company_says.pop(0) if len(self.company_says) > 1 else self.company_says[0]
        if isinstance(answer, KvcastError):
            raise answer
        return answer

    async def describe(self, _namespace: int, keys: Sequence[bytes]) -> Any:
        if self.comes:
            self.held += self.comes.pop(0)
        held = [SimpleNamespace(key=KEYS[n]) for n in self.held if KEYS[n] in keys]
        return SimpleNamespace(held=held)

    async def get_outcomes(
        self, _namespace: int, keys: list[bytes], _deadline_s: float, **how: Any
    ) -> list[Any]:
        (key,) = keys
        number = KEYS.index(key)
        if number not in self.held:
            self.asked.append((number, how["group"], how["expect"]))
        if how["expect"]:
            while self.comes:
                await fetching.asyncio.sleep(0.01)
            if self.failing:
                self.failing -= 1
                return [SimpleNamespace(block=None, reason="timed_out", status="miss")]
        return [SimpleNamespace(block=_Block(BLOCKS[number]), reason="", status="ok")]


async def _fetch(pool: FakePool, to: Path, group: int = 0) -> Fetcher:
    fetcher = Fetcher(cast(AsyncClient, pool), 7, MANIFEST, to, patience_s=1.0, group=group)
    await fetcher.fetch(lambda _size_bytes, _there: None)
    assert (to / "f").read_bytes() == b"".join(BLOCKS)
    assert fetcher.fetched_bytes == 30 * BLOCK_BYTES
    return fetcher


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEETING_S", "COMPANY_PERIOD_S", "_LOOK_PERIOD_S"):
        monkeypatch.setattr(fetching, name, 0.01)


async def test_who_is_alone_asks_for_itself_and_says_when_it_is_through(tmp_path: Path) -> None:
    for says in ((0, 3), KvcastError("this pool knows of no company")):
        pool = FakePool([says])
        await _fetch(pool, tmp_path / str(says))
        assert pool.asked == [(number, 0, False) for number in range(30)]
        assert pool.said[:2] == [0, 0]
        assert pool.said[-1] == AT_END


async def test_those_who_begin_together_ask_as_a_group_in_one_order(tmp_path: Path) -> None:
    pool = FakePool([(0, 0), (5, 0)])
    await _fetch(pool, tmp_path)
    assert pool.asked == [(number, 5, False) for number in range(30)]


async def test_who_is_told_of_the_others_looks_for_none(tmp_path: Path) -> None:
    pool = FakePool([(5, 9)])
    await _fetch(pool, tmp_path, group=3)
    assert not pool.said
    assert pool.asked == [(number, 3, False) for number in range(30)]


async def test_who_comes_late_asks_only_for_what_it_has_missed(tmp_path: Path) -> None:
    # The others have asked for ten, and alone; then for the rest, of which one is lost on the way.
    comes: list[list[int]] = [[], [], [10, 12], [], [11, *range(13, 20)], list(range(21, 30))]
    pool = FakePool([(5, 10), (5, 10), (5, 12)], comes, failing=1)
    await _fetch(pool, tmp_path)
    expected = [one for one in pool.asked if one[2]]
    asked = [one for one in pool.asked if not one[2]]
    assert expected[0] == (0, 5, True)
    assert asked == [(number, 5, False) for number in (*range(asked[0][0], 10), 20)]
    assert asked[0][0] <= 1


async def test_who_comes_late_waits_for_nobody_who_has_gone(tmp_path: Path) -> None:
    pool = FakePool([(5, 10), (5, 10), (0, 0)])
    await _fetch(pool, tmp_path)
    assert pool.asked == [(0, 0, True), *((number, 0, False) for number in range(1, 30))]


async def test_a_group_in_which_nothing_comes_is_left(tmp_path: Path) -> None:
    pool = FakePool([(5, 0)])
    given = pool.get_outcomes

    async def get(namespace: int, keys: list[bytes], deadline_s: float, **how: Any) -> list[Any]:
        if how["group"]:
            pool.asked.append((KEYS.index(keys[0]), how["group"], False))
            return [SimpleNamespace(block=None, reason="timed_out", status="miss")]
        return await given(namespace, keys, deadline_s, **how)

    pool.get_outcomes = get  # type: ignore[method-assign]
    await _fetch(pool, tmp_path)
    assert sum(group == 5 for _, group, _ in pool.asked) <= AT_ONCE


async def test_nothing_is_read_of_a_file_of_which_nothing_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    right_pieces = fetching._right_pieces

    def look(path: Path, parts: Any) -> Any:
        read.append(path.name)
        return right_pieces(path, parts)

    monkeypatch.setattr(fetching, "_right_pieces", look)
    await _fetch(FakePool([(0, 0)]), tmp_path)
    assert read == []
    (tmp_path / "f").write_bytes(b"x" * 30 * BLOCK_BYTES)
    await _fetch(FakePool([(0, 0)]), tmp_path)
    assert read == ["f"], "what is there, of which nothing was taken"
    (tmp_path / "f").write_bytes(BLOCKS[0] + b"x" * 29 * BLOCK_BYTES)
    pool = FakePool([(0, 0)])
    fetcher = Fetcher(cast(AsyncClient, pool), 7, MANIFEST, tmp_path, patience_s=1.0)
    await fetcher.fetch(lambda _size_bytes, _there: None)
    assert (tmp_path / "f").read_bytes() == b"".join(BLOCKS)
    assert read == ["f", "f", "f"], "what is there, and what was taken of it"
    assert len(pool.asked) == 29


async def test_a_folder_without_room_is_told_of_before_anything_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=29, f_frsize=BLOCK_BYTES))
    pool = FakePool([(0, 0)])
    with pytest.raises(FetchError, match="3,000 bytes are missing, and 2,900 are free"):
        await _fetch(pool, tmp_path)
    assert pool.asked == []


async def test_two_do_not_fetch_into_one_folder(tmp_path: Path) -> None:
    class Slow(FakePool):
        async def company(self, _namespace: int, _at: int) -> tuple[int, int]:
            going_on.set()
            await may_go_on.wait()
            return 0, 0

    going_on, may_go_on = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(_fetch(Slow([]), tmp_path))
    await going_on.wait()
    with pytest.raises(FetchError, match="somebody else"):
        await _fetch(FakePool([(0, 0)]), tmp_path)
    may_go_on.set()
    await first


async def test_an_agent_that_is_busy_is_asked_again_for_as_long_as_one_would_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(FakePool):
        turns = 0

        async def get_outcomes(self, *words: Any, **how: Any) -> list[Any]:
            self.turns += 1
            if self.turns % 3:
                raise BusyError("namespace 7 is over its rate")
            return await super().get_outcomes(*words, **how)

    monkeypatch.setattr(fetching, "BUSY_WAIT_S", 0.0)
    await _fetch(Busy([(0, 0)]), tmp_path / "one")
    monkeypatch.setattr(fetching, "BUSY_WITHIN_S", 0.0)
    with pytest.raises(BusyError, match="over its rate"):
        await _fetch(Busy([(0, 0)]), tmp_path / "another")
