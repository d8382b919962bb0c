"""How a card is given its orders: at once while that is quick, by a thread once it was slow, in
their order either way; that what it says of a pair that is gone is told to no other, and what it
says of itself to whoever leaves it out.

Oracle: what a function in the driver's place was called with. Cannot see: real cards (tests/rdma).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kvcast.hostagent.network import calling_card
from kvcast.hostagent.network.calling_card import CallingCard, Poster
from kvcast.hostagent.network.libverbs import (
    COMPLETION_WORDS,
    DEVICE_FATAL,
    NUMBER,
    PORT_ACTIVE,
    PORT_ERROR,
    STATUS,
    Send,
)
from kvcast.native.subset import ctypes_of
from kvcast.protocol.links.rdma import Completed, Read

_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
PAIR, OTHER = 0x1000, 0x2000
WHOSE = 7


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
        self.poster = Poster(address, lambda number, code: self.failed.append((number, code)))

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
        assert driver.poster.order(PAIR, first, WHOSE) == 0
        assert driver.calls[-1] == (PAIR, first)
    driver.codes[9] = -12
    assert driver.poster.order(PAIR, 9, WHOSE) == 12
    assert set(driver.threads) == {threading.get_ident()}
    assert not driver.poster.is_slow


async def test_after_a_slow_one_a_thread_gives_them_in_their_order(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    orders = [(PAIR if first % 3 else OTHER, first) for first in range(1, 30)]
    for pair, first in orders:
        assert driver.poster.order(pair, first, WHOSE) == 0
    assert driver.poster.is_slow
    driver.poster.settle()
    assert driver.calls == orders
    assert driver.threads[0] == threading.get_ident()
    assert threading.get_ident() not in driver.threads[1:]


async def test_what_the_thread_cannot_give_is_told_of(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    driver.codes = {2: 12, 4: -22}
    for first in range(1, 6):
        assert driver.poster.order(PAIR, first, WHOSE if first < 4 else WHOSE + 1) == 0
    driver.poster.settle()
    for _ in range(1000):
        if len(driver.failed) == 2:
            break
        await asyncio.sleep(0.01)
    assert driver.failed == [(WHOSE, 12), (WHOSE + 1, 22)]
    assert len(driver.calls) == 5


async def test_the_end_waits_for_what_was_ordered_and_ends_the_thread(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    for first in range(1, 6):
        driver.poster.order(PAIR, first, WHOSE)
    thread = driver.poster._thread
    assert thread is not None
    assert thread.is_alive()
    driver.poster.close()
    driver.poster.close()
    assert len(driver.calls) == 5
    assert not thread.is_alive()


async def test_more_than_the_thread_is_told_of_at_once_is_refused(driver: Driver) -> None:
    driver.takes_s = 2 * calling_card.SLOW_S
    driver.poster.order(PAIR, 1, WHOSE)
    driver.takes_s = 0.3
    codes = [driver.poster.order(PAIR, first, WHOSE) for first in range(2, 5000)]
    driver.takes_s = 0.0
    refused = next(n for n, code in enumerate(codes) if code)
    assert codes[refused] == 11  # EAGAIN
    driver.poster.settle()
    assert [first for _, first in driver.calls[: refused + 1]] == list(range(1, refused + 2))


class SoftCard:
    """A card in software, in `OpenCard`'s place: what it has to say of an order it keeps, whether
    the pair is still there or not, and a new pair lies where the last one lay."""

    ends = (None,)
    notify = staticmethod(lambda _queue, _solicited: 0)
    problem = staticmethod(lambda status: f"status {status}" if status else "")

    def __init__(self, _name: str) -> None:
        self.descriptor, self._other = os.pipe()
        self.events, self._tells = os.pipe()
        self._happened: list[tuple[int, int]] = []
        self.said: list[tuple[int, int]] = []
        """By the orders' numbers, their statuses."""
        self.code = 0
        self.takes_s = 0.0
        self._function = _POST(self._post)
        self.send_address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _post(self, _pair: int, first: int, _refused: int) -> int:
        time.sleep(self.takes_s)
        if not self.code:
            self.said.append((ctypes_of(Send).from_address(first).number, 0))
        return self.code

    def register(self, _memory: memoryview, _access: int) -> tuple[int, int]:
        return 1, 2

    def make_completions(self, _entries: int) -> int:
        return 3

    def make_pair(self, _options: Any) -> int:
        return PAIR

    def modify(self, *_: Any) -> None: ...

    def end_pair(self, _pair: int) -> int:
        return 0

    def poll(self, _queue: int, most: int, address: int) -> int:
        taken, self.said = self.said[:most], self.said[most:]
        words = (ctypes.c_uint32 * (most * COMPLETION_WORDS)).from_address(address)
        for at, (number, status) in enumerate(taken):
            words[at * COMPLETION_WORDS + NUMBER] = number
            words[at * COMPLETION_WORDS + STATUS] = status
        return len(taken)

    def tell(self, *happened: tuple[int, int]) -> None:
        """Say what has happened to the card, and to which port."""
        self._happened += happened
        os.write(self._tells, b"x")

    def take_happened(self) -> list[tuple[int, int]]:
        os.read(self.events, 1)
        happened, self._happened = self._happened, []
        return happened

    def close(self) -> None:
        for descriptor in (self._other, self.descriptor, self._tells, self.events):
            os.close(descriptor)


class OnePort:
    """The port of a card that has room for any number of pairs. `told`: the card's problems."""

    name, port, max_transfer_bytes = "soft", 1, 1 << 20

    def __init__(self) -> None:
        self.told: list[str] = []

    def happened(self, problem: str) -> None:
        self.told.append(problem)

    def admit(self, pair: object) -> None: ...

    def forget(self, pair: object) -> None: ...


@pytest.fixture
async def soft(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[CallingCard, SoftCard]]:
    made: list[SoftCard] = []

    def open_card(name: str) -> SoftCard:
        made.append(SoftCard(name))
        return made[-1]

    monkeypatch.setattr(calling_card, "OpenCard", open_card)
    port: Any = OnePort()
    card = CallingCard(port, memoryview(bytearray(4096)), 4, 64)
    yield card, made[0]
    card.close()


def read_of(token: int) -> Read:
    return Read(token, memoryview(bytearray(8)), 0x7000, 9)


async def test_what_a_card_still_says_of_a_pair_that_is_gone_is_not_said_of_the_next(
    soft: tuple[CallingCard, SoftCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling_card, "SLOW_S", 3600.0)
    card, below = soft
    told: list[Completed] = []
    gone = card.make_pair(told.extend)
    gone.post([read_of(1)])
    gone.close()
    pair = card.make_pair(told.extend)
    pair.post([read_of(2)])
    assert len(below.said) == 2
    [_, later] = below.said
    del below.said[1]
    card._poll()
    assert told == []
    below.said = [later]
    card._poll()
    assert told == [Completed(2)]


async def test_what_could_not_be_ordered_of_a_pair_that_is_gone_is_not_told_to_the_next(
    soft: tuple[CallingCard, SoftCard],
) -> None:
    card, below = soft
    told: list[Completed] = []
    gone = card.make_pair(told.extend)
    below.takes_s = 2 * calling_card.SLOW_S
    gone.post([read_of(1)])
    assert card.poster.is_slow
    below.code = 12
    gone.post([read_of(2)])
    gone.close()
    below.code = 0
    pair = card.make_pair(told.extend)
    pair.post([read_of(3)])
    card.poster.settle()
    await asyncio.sleep(0.05)
    assert told == []
    below.code = 12
    pair.post([read_of(4)])
    card.poster.settle()
    for _ in range(1000):
        if told:
            break
        await asyncio.sleep(0.01)
    assert {one.token for one in told} == {3, 4}
    assert all(one.problem for one in told)


async def test_what_happens_to_a_card_s_port_is_told_and_a_lost_card_stays_lost(
    soft: tuple[CallingCard, SoftCard],
) -> None:
    card, below = soft
    port: Any = card.port
    down, up = (PORT_ERROR, 1), (PORT_ACTIVE, 1)
    for happened, said in (
        ([down], ["its port is down"]),
        ([up], [""]),
        ([(PORT_ERROR, 2), (PORT_ACTIVE, 2), (1, 1)], []),
        ([(DEVICE_FATAL, 0), up], ["the card is lost until the agent starts again"]),
        ([down, up], []),
    ):
        port.told.clear()
        below.tell(*happened)
        await asyncio.sleep(0.01)
        assert port.told == said
