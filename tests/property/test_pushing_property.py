"""Puts that go home in compiled code, whatever clients, nodes and Python do in whatever order.

Oracle: what `Pair` asserts of every answer (the home has the very bytes that were put, as a block
of its own), and that nothing is held for anybody at the end. Cannot see: sockets, and what single
cases mean (`test_hostagent_pushing`).
"""

from __future__ import annotations

import random

import pytest
from kvcast.bench.fuzz.courier import key_of
from kvcast.bench.fuzz.pushing import NAMESPACE, Pair, PushingHarness
from kvcast.protocol.messages.wire import BlockId
from making import remembered
from seeds import seeds

SEEDS = seeds(25, quick=12)
_WEIGHTS = (1, 2, 4, 2, 9, 12, 1, 0.5, 2, 0.5, 0, 0, 1, 1, 6, 0.3)
"""Of the harness's steps; what is no message at all is the fuzzer's."""


def _steps(rng: random.Random, count: int) -> bytes:
    begin = bytes([0, 0, 1, 0, 0, 13, 1, 0, 0])
    steps = [
        bytes([step, rng.randrange(256), rng.randrange(256)])
        for step in rng.choices(range(len(_WEIGHTS)), _WEIGHTS, k=count)
    ]
    return begin + b"".join(steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_what_is_acknowledged_is_at_home_and_nothing_is_lost(seed: int) -> None:
    PushingHarness().run(_steps(random.Random(seed), 120))


@pytest.mark.parametrize("seed", seeds(8, quick=2))
def test_clients_that_put_one_block_after_another_are_given_room_for_the_next(seed: int) -> None:
    """Two clients, each with room ahead, bytes that move in pieces, and connections that break."""
    rng = random.Random(seed)
    pair = Pair()
    pair.connect()
    tickets = [pair.room_ahead(guest, 1) for guest in range(2)]
    for _ in range(16):
        for side in pair.sides:
            side.store.drop(BlockId(NAMESPACE, key_of(1)))
        pair.expect(1)
        guest = rng.randrange(2)
        pair.connect()
        pair.write(guest, tickets[guest], 1)
        pair.put(guest, tickets[guest], 1)
        while pair.guests[guest].asked:
            if rng.random() < 0.03:
                pair.cut()
            pair.move(rng.randrange(1, 9000))
        if tickets[guest] in pair.guests[guest].rooms:
            pair.put_by_a_message(guest, tickets[guest], 1)
        (tickets[guest],) = pair.guests[guest].rooms
    assert pair.home_took > 3
    pair.end()


@pytest.mark.slow
def test_the_steps_of_the_first_test_put_blocks_and_hand_puts_over() -> None:
    with remembered(Pair) as pairs:
        for seed in range(12):
            PushingHarness().run(_steps(random.Random(seed), 120))
    assert sum(pair.home_took for pair in pairs) > 20
    assert sum(pair.handed_over for pair in pairs) > 20
    assert sum(pair.put_by_message for pair in pairs) > 20
