"""For how long answers wait for readers behind, one rule at a time.

Oracle: the rules in `catchup`'s description, worked out by hand. Cannot see: whether copies are
saved (tests/property/test_protocol_network_property.py).
"""

from __future__ import annotations

import pytest
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.responder.catchup import CatchUp, CatchUpConfig, CopyTime

FIRST, SECOND, THIRD = 1, 2, 3
DEAR_S = 0.02
"""What a copy takes: so long that two are worth any distance below."""


def block(number: int) -> BlockId:
    return BlockId(1, number.to_bytes(16, "big"))


class Stream:
    """Readers of blocks 0, 1, 2 ... that pause for `pause_s` after each answer."""

    def __init__(self, pause_s: float = 0.01, copy_s: float = DEAR_S, **config: float) -> None:
        self.core = CatchUp(CatchUpConfig(**config))  # type: ignore[arg-type]
        self.pause_s = pause_s
        self.copy_s = copy_s
        self.now = 100.0

    def read(self, reader: int, number: int, segment: int = 0, left: int = 1) -> bool:
        return self.core.read(
            self.now, reader, block(number), segment, copy_s=self.copy_s, left=left
        )

    def first(self, number: int) -> None:
        """The reader in front asks, a pause after the last answer, and is answered."""
        self.now += self.pause_s
        assert not self.read(FIRST, number)
        self.core.sent(self.now)

    def second(self, number: int, reader: int = SECOND) -> bool:
        return self.read(reader, number)


def with_two_behind(**config: float) -> Stream:
    stream = Stream(**config)
    for number in range(40):
        stream.first(number)
    stream.now += 0.005
    assert stream.second(38)
    assert stream.second(39)
    return stream


def test_answers_wait_as_long_as_the_second_reader_is_behind_and_a_little() -> None:
    stream = Stream()
    for number in range(40):
        stream.first(number)
    stream.now += 0.005
    assert stream.second(39)
    assert stream.core.hold_s == 0.0  # one READ may be anything
    assert stream.second(38)  # asked for first 15 ms ago
    assert stream.core.hold_s == pytest.approx(1.25 * 0.015)


def test_the_same_reader_and_what_was_asked_for_long_ago_are_not_behind() -> None:
    stream = Stream(max_hold_s=0.1, copy_s=0.1)
    for number in range(40):
        stream.first(number)
    assert not stream.read(FIRST, 39)
    assert not stream.second(28)  # 110 ms
    assert stream.second(31)
    assert not stream.read(SECOND, 39, segment=1)


def test_a_third_reader_is_behind_the_first_not_the_second() -> None:
    stream = with_two_behind()
    stream.now += 0.01
    assert stream.second(39, THIRD)
    assert stream.core.hold_s == pytest.approx(1.25 * 0.015)


def test_who_shares_nothing_waits_only_once_many_are_behind_and_until_few_are() -> None:
    stream = with_two_behind(after_reads_alone=4)
    assert stream.core.hold_s > 0.0
    assert stream.core.hold_alone_s == 0.0
    assert stream.second(37)
    assert stream.second(36)
    assert stream.core.hold_alone_s == stream.core.hold_s
    for number in range(100, 180):
        stream.first(number)
    assert stream.core.hold_s > 0.0
    assert stream.core.hold_alone_s == 0.0


def test_a_hold_is_no_longer_than_the_readers_pauses_allow() -> None:
    stream = with_two_behind(pause_s=0.001, max_slowdown=2.0)  # 6 ms behind, at 1 ms an answer
    assert stream.core.hold_s == pytest.approx(0.002, rel=0.05)


def test_a_reader_is_waited_for_once_it_has_cost_what_waiting_will() -> None:
    stream = Stream(copy_s=0.004)
    behind = []
    for number in range(6):
        stream.first(number)
        stream.now += 0.011
        behind.append(stream.second(number))
    assert behind == [False, False, True, True, True, True]  # three copies take 12 ms
    assert stream.core.hold_s == pytest.approx(1.25 * 0.011)


def test_of_a_block_of_many_segments_half_is_worth_waiting_for_at_once() -> None:
    stream = Stream(copy_s=0.001)
    for segment in range(2):
        assert not stream.read(FIRST, 0, segment, left=20 - segment)
    stream.now += 0.009
    assert stream.read(SECOND, 0, 0, left=20)
    stream.now += 0.002
    assert not stream.read(SECOND, 0, 1, left=19)  # 11 ms, for 9.5 at most


def test_nobody_is_waited_for_while_nobody_knows_what_a_copy_takes() -> None:
    stream = Stream(copy_s=0.0)
    for number in range(40):
        stream.first(number)
    stream.now += 0.005
    assert not stream.second(38)
    assert not stream.second(39)
    assert stream.core.hold_s == 0.0


def test_only_those_wait_whom_others_follow() -> None:
    stream = with_two_behind()
    hold_s = stream.core.hold_s
    assert hold_s > 0
    assert stream.core.hold_of(FIRST, gathers=True) == hold_s
    assert stream.core.hold_of(FIRST, gathers=False) == 0.0
    assert stream.core.hold_of(SECOND, gathers=True) == 0.0
    assert stream.core.hold_of(THIRD, gathers=True) == 0.0


def test_what_a_copy_takes_is_measured_while_more_waits_than_the_link_takes() -> None:
    times = CopyTime()
    times.took(1.0, 8, more=False)
    times.took(2.0, 8, more=True)  # a pause of a second is no measure
    assert times.frame_s == 0.0
    times.took(2.008, 8, more=True)
    assert times.frame_s == pytest.approx(0.001)
    times.took(2.008, 8, more=True)  # at the same time: as if 16 at once
    times.took(2.040, 8, more=False)
    assert times.frame_s == pytest.approx(0.001 + 0.001 / 8)
    times.took(9.0, 8, more=False)
    assert times.frame_s == pytest.approx(0.001 + 0.001 / 8)


def test_a_hold_is_no_longer_than_the_longest() -> None:
    stream = with_two_behind(max_hold_s=0.016)
    assert stream.core.hold_s == 0.016


def test_without_anybody_behind_the_hold_halves_until_it_is_none() -> None:
    stream = with_two_behind()
    holds = [stream.core.hold_s]
    for number in range(100, 300):
        stream.first(number)
        if stream.core.hold_s != holds[-1]:
            holds.append(stream.core.hold_s)
    assert holds[1] == holds[0] / 2
    assert holds[2] == holds[0] / 4
    assert holds[-1] == 0.0


def test_who_stays_behind_all_the_same_is_not_waited_for() -> None:
    stream = with_two_behind(patience=2, rest=4.0)
    held = []
    for number in range(100, 400):
        stream.first(number)
        stream.now += 0.005
        assert stream.second(number)
        assert stream.second(number, THIRD)
        held.append(stream.core.hold_s > 0)
    assert held[0]
    assert not all(held)
    gave_up = held.index(False)
    assert any(held[gave_up:])  # and tried once more, later
    assert held.count(False) > held.count(True) / 2


def test_nothing_is_held_back_when_told_so() -> None:
    stream = Stream(max_hold_s=0.0)
    for number in range(10):
        stream.first(number)
        assert not stream.second(number)
        assert not stream.second(number, THIRD)
    assert stream.core.hold_s == 0.0


def test_what_is_remembered_is_bounded() -> None:
    core = CatchUp(CatchUpConfig(max_segments=16))
    for number in range(1000):
        core.read(1.0, FIRST, block(number), 0, copy_s=DEAR_S, left=1)
    assert len(core._asked) == 16
    assert core.read(1.0, SECOND, block(999), 0, copy_s=DEAR_S, left=1)
    assert not core.read(1.0, SECOND, block(900), 0, copy_s=DEAR_S, left=1)
    for reader in range(3, 1000):
        assert core.read(1.0, reader, block(999), 0, copy_s=DEAR_S, left=1)
    assert len(core._followed) == 16


def test_after_a_long_rest_nobody_is_waited_for() -> None:
    stream = with_two_behind()
    assert stream.core.hold_of(FIRST, gathers=True) > 0
    stream.now += 3600.0
    stream.first(1000)
    assert stream.core.hold_of(FIRST, gathers=True) == 0.0
