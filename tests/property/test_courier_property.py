"""The courier, in compiled code, told anything in any order, beside what must hold of every answer.

Oracle: the bytes of every block, and the stand's own books: each question is answered once, what a
client holds stays as it is until it lets go, and at the end nothing is held. Cannot see: sockets,
and the wait in which the courier runs (`test_hostagent_courier_pool`).
"""

from __future__ import annotations

import random

import pytest
from kvcast.bench.fuzz.courier import BLOCKS, LARGE, CourierHarness, Stand
from making import remembered
from seeds import seeds

SEEDS, LARGE_SEEDS = seeds(24, quick=3), seeds(24, quick=1)


def _steps(rng: random.Random, count: int, *, large: bool = False) -> bytes:
    """Mostly questions and whole answers, so that much is given; the rest is anything. `large`:
    most are about blocks that conveyors bring."""
    steps = bytearray([6, 1, 0, 9, 1, 0])
    if large:
        steps = bytearray([14, 0, 0, 14, 0, 90])
    for _ in range(count):
        if large and rng.random() < 0.5:  # a block that a conveyor brings the end of
            block = rng.choice([12, 13, 14, 15])
            steps += bytes([1, rng.randrange(200), block])
            steps += bytes([15, 0, block - LARGE]) * (rng.random() < 0.9)
            steps += bytes([8, block, 0]) * (rng.random() < 0.9)
            steps += bytes([5, 0, 1]) * (rng.random() < 0.2)
            if rng.random() < 0.8:
                steps += bytes([12, 0, rng.randrange(7)])
            steps += bytes([9, block, 0]) * (rng.random() < 0.8)
            continue
        if large and rng.random() < 0.2:  # how many there are
            steps += bytes([16, rng.randrange(256), rng.randrange(256)])
            if rng.random() < 0.4:
                steps += bytes([1, rng.randrange(200), 13, 15, 0, 1, 8, 13, 0])
            if rng.random() < 0.9:
                spoil = rng.choice([0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7])
                steps += bytes([13, rng.randrange(256), spoil])
            steps += bytes([14, 0, 90])
            continue
        if large and rng.random() < 0.2:  # several in one question
            steps += bytes([15, rng.randrange(256), 128 + rng.randrange(128)])
            steps += bytes([8, rng.randrange(BLOCKS), 0]) * 2 + bytes([12, 0, 2]) * rng.randrange(9)
            continue
        if large and rng.random() < 0.3:
            how = rng.choice([0, 90, 90, 90, 150])
            steps += bytes(rng.choice([[13, rng.randrange(256), rng.randrange(8)], [14, 0, how]]))
            continue
        if rng.random() < 0.4:  # a block of the size that is expected, and then it is forgotten
            block = rng.choice([1, 2, 3, 7, 8, 9])
            steps += bytes([1, rng.randrange(200), block, 9, block, 0])
            continue
        block = rng.randrange(BLOCKS)
        kind = rng.choice([1, 1, 1, 1, 2, 2, 4, 5, 6, 7, 8, 8, 8, 9, 10, 11])
        if kind in (1,):
            steps += bytes([1, rng.randrange(256), block])
        elif kind == 2:
            steps += bytes([2, block, rng.randrange(32) | rng.randrange(3) << 6])
        elif kind == 5:
            steps += bytes([5, 0, rng.choice([0, 1, 2, 60])])
        else:
            steps += bytes([kind, block, rng.randrange(256)])
    return bytes(steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_every_question_is_answered_once_and_by_the_right_bytes(
    seed: int,
) -> None:
    CourierHarness().run(_steps(random.Random(seed), 120))


@pytest.mark.slow
@pytest.mark.parametrize("seed", LARGE_SEEDS)
def test_the_same_of_large_blocks_and_conveyors(seed: int) -> None:
    CourierHarness().run(_steps(random.Random(seed), 80, large=True))


@pytest.mark.slow
def test_the_steps_of_the_tests_above_bring_blocks_by_the_courier_and_hand_questions_over() -> None:
    with remembered(Stand) as stands:
        CourierHarness().run(_steps(random.Random(0), 120))
        CourierHarness().run(_steps(random.Random(0), 80, large=True))
    small, large = stands
    assert small.given > 10
    assert small.handed_over > 10
    assert large.conveyed > 4
    assert large.counted > 2
