"""Blocks that are checked beside the thread that has them copied.

Oracle: what was added, by hand; threads are played, and end their checks when the test says so.
Cannot see: how long checks take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from kvcast.hostagent.client import Block
from kvcast.hostagent.connectors import checks
from kvcast.hostagent.connectors.checks import Checkers, Checks
from kvcast.protocol.messages.wire import digest_of

SIZE = checks.LEAST_BYTES


class Threads(Executor):
    """Checks at once; their results can be had as soon as they are asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def submit(self, check: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked += 1
        future: Future[Any] = Future()
        try:
            future.set_result(check(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Landing:
    """What has landed, and which blocks were released."""

    def __init__(self, *, verify: bool = True, fails_at: int = -1) -> None:
        self.landed: list[tuple[int, bool]] = []
        self.released: list[int] = []
        self.fails_at = fails_at
        self.checkers = Checkers()
        self.threads = self.checkers.threads = Threads()
        self.checks = Checks(self.checkers, self._land, verify=verify)

    def _land(self, place: int, block: Block, right: bool) -> None:
        assert len(block.data) == block.size_bytes, "not released yet"
        if place == self.fails_at:
            raise RuntimeError("the device is lost")
        self.landed.append((place, right))

    def add(self, place: int, *, size_bytes: int = SIZE, right: bool = True) -> None:
        data = memoryview(bytes([place]) * size_bytes)
        digest = digest_of(data) + (not right)
        block = Block(
            b"%16d" % place,
            size_bytes,
            digest,
            "local",
            data,
            lambda: self.released.append(place),
            lambda _: True,
            (),
        )
        self.checks.add(place, block)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "THREADS", 2)


async def test_some_are_checked_ahead_and_all_land_in_order() -> None:
    landing = Landing()
    for place in range(7):
        landing.add(place, right=place != 3)
        assert len(landing.landed) == max(0, place + 1 - 4)
        assert landing.released == [one for one, _ in landing.landed]
    landing.checks.finish()
    assert landing.landed == [(place, place != 3) for place in range(7)]
    assert landing.released == list(range(7))
    assert landing.threads.asked == 7


async def test_what_nothing_comes_after_lands_at_once() -> None:
    landing = Landing()
    for place in range(3):
        landing.add(place)
        await asyncio.sleep(0)
        assert landing.released == list(range(place + 1))


async def test_small_blocks_and_those_that_nobody_checks_go_to_no_thread() -> None:
    landing = Landing()
    landing.add(1, size_bytes=SIZE - 1)
    landing.add(2, size_bytes=SIZE - 1, right=False)
    assert landing.landed == [(1, True), (2, False)]
    unchecked = Landing(verify=False)
    unchecked.add(1, right=False)
    assert unchecked.landed == [(1, True)]
    closed = Landing()
    closed.checkers.close()
    closed.add(1, right=False)
    assert closed.landed == [(1, False)]
    assert landing.threads.asked == unchecked.threads.asked == closed.threads.asked == 0


@pytest.mark.parametrize("told", ["at the end", "with the next", "by the log"])
async def test_a_copy_that_fails_is_told_and_the_rest_is_released(
    told: str, caplog: pytest.LogCaptureFixture
) -> None:
    landing = Landing(fails_at=1)
    for place in range(4):
        landing.add(place)
    if told == "at the end":
        with pytest.raises(RuntimeError, match="the device is lost"):
            landing.checks.finish()
    else:
        await asyncio.sleep(0)
    if told == "with the next":
        with pytest.raises(RuntimeError, match="the device is lost"):
            landing.add(4)
    landing.checks.close()
    assert landing.landed == [(0, True)]
    assert sorted(landing.released) == list(range(5 if told == "with the next" else 4))
    assert caplog.messages == (["a block could not be copied"] if told == "by the log" else [])


async def test_a_load_that_is_given_up_releases_what_has_not_landed() -> None:
    landing = Landing()
    for place in range(3):
        landing.add(place)
    landing.checks.close()
    await asyncio.sleep(0)
    assert landing.landed == []
    assert landing.released == [0, 1, 2]
