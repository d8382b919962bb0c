"""How a card is given its orders: at once while that is quick, by a thread once it was slow, in
their order either way.

Oracle: what a function in the driver's place was called with. Cannot see: real cards (tests/rdma).
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import AsyncIterator

import pytest
from kvcast.hostagent.network import calling_card
from kvcast.hostagent.network.calling_card import Poster

_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
PAIR, OTHER = 0x1000, 0x2000


class Driver:
    """What stands where a driver's function would."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.threads: list[int] = []
        self.takes_s = 0.0
        self.codes: dict[int, int] = {}
        """What it says of an order, by where that lies."""
        self.failed: list[tuple[int, int]] = []
        self._function = _POST(self._post)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        self.poster = Poster(address, lambda pair, code: self.failed.append((pair, code)))

    def _post(self, pair: int, first: int, _refused: int) -> int:
        time.sleep(self.takes_s)
        self.calls.append((pair, first))
        self.threads.append(threading.get_ident())
        return self.codes.get(first, 0)


@pytest.fixture
async def driver() -> AsyncIterator[Driver]:
    driver = Driver()
    yield driver
    driver.poster.close()


async def test_orders_that_take_no_time_are_given_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling_card, "SLOW_S", 3600.0)
    for first in range(1, 4):
        assert driver.poster.order(PAIR, first) == 0
        assert driver.calls[-1] == (PAIR, first)
    driver.codes[9] = -12
    assert driver.poster.order(PAIR, 9) == 12
    assert set(driver.threads) == {threading.get_ident()}
    assert not driver.poster.is_slow


async def test_after_a_slow_one_a_thread_gives_them_in_their_order(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    orders = [(PAIR if first % 3 else OTHER, first) for first in range(1, 30)]
    for pair, first in orders:
        assert driver.poster.order(pair, first) == 0
    assert driver.poster.is_slow
    driver.poster.settle()
    assert driver.calls == orders
    assert driver.threads[0] == threading.get_ident()
    assert threading.get_ident() not in driver.threads[1:]


async def test_what_the_thread_cannot_give_is_told_of(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    driver.codes = {2: 12, 4: -22}
    for first in range(1, 6):
        assert driver.poster.order(PAIR if first < 4 else OTHER, first) == 0
    driver.poster.settle()
    for _ in range(1000):
        if len(driver.failed) == 2:
            break
        await asyncio.sleep(0.01)
    assert driver.failed == [(PAIR, 12), (OTHER, 22)]
    assert len(driver.calls) == 5


async def test_the_end_waits_for_what_was_ordered_and_ends_the_thread(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    for first in range(1, 6):
        driver.poster.order(PAIR, first)
    thread = driver.poster._thread
    assert thread is not None
    assert thread.is_alive()
    driver.poster.close()
    driver.poster.close()
    assert len(driver.calls) == 5
    assert not thread.is_alive()


async def test_more_than_the_thread_is_told_of_at_once_is_refused(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    driver.poster.order(PAIR, 1)
    driver.takes_s = 0.3
    codes = [driver.poster.order(PAIR, first) for first in range(2, 5000)]
    driver.takes_s = 0.0
    refused = next(n for n, code in enumerate(codes) if code)
    assert codes[refused] == 11  # EAGAIN
    driver.poster.settle()
    assert [first for _, first in driver.calls[: refused + 1]] == list(range(1, refused + 2))
