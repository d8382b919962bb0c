"""Whose blocks leave a node by TCP, in virtual time.

Oracle: what each namespace's connections were let send, beside its weight and what the link
carries. Cannot see: the kernel and the network, in which what was let go may still wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby

import pytest
from kvcast.protocol.links import departures
from kvcast.protocol.links.departures import LATELY_S, PACE, Departures, Turn
from kvcast.simulation.world import World

RATE = 1e6
"""Bytes a second."""


class Link(World):
    """Connections that have something to send, and ask whenever they are to."""

    def __init__(self, rate: float = RATE, weights: dict[int, float] | None = None) -> None:
        super().__init__(1)
        self.departures = Departures(rate, lambda namespace: (weights or {}).get(namespace, 1.0))
        self.sent: Counter[int] = Counter()
        self.asked = 0
        """Times that a connection has asked."""

    def send(self, namespace: int, size_bytes: int, then: Callable[[], None]) -> None:
        """One connection sends so much, and then does something else."""
        left = size_bytes
        who = object()
        timer = 0

        def due(number: int) -> None:
            if number == timer:
                go_on()

        def go_on() -> None:
            nonlocal left, timer
            timer += 1
            while left:
                self.asked += 1
                allowed = self.departures.may_send(self.now, namespace, who, go_on)
                if not allowed:
                    self.at(self.departures.ready_at(self.now, who), partial(due, timer))
                    return
                part = min(allowed, left, 50_000)
                left -= part
                self.sent[namespace] += part
                self.departures.sent(self.now, namespace, part)
            then()

        go_on()

    def greedy(self, namespace: int, connections: int) -> None:
        """So many connections always have something to send."""

        def again() -> None:  # what it has sent takes a moment to leave
            self.at(self.now + 0.02, lambda: self.send(namespace, 20_000, again))

        for _ in range(connections):
            again()


def test_connections_do_not_count_but_weights_do() -> None:
    link = Link(weights={1: 1.0, 2: 3.0})
    link.greedy(1, 12)
    link.greedy(2, 3)
    link.run(2.0)
    before = dict(link.sent)
    link.run(12.0)
    first, second = (link.sent[namespace] - before[namespace] for namespace in (1, 2))
    assert first + second == pytest.approx(PACE * RATE * 10, rel=0.05)
    assert second / first == pytest.approx(3.0, rel=0.05)


def test_those_who_wait_do_not_ask_all_the_while() -> None:
    link = Link(10 * RATE)
    for namespace in (1, 2):
        link.greedy(namespace, 10)
    link.run(2.0)
    before = link.asked
    link.run(4.0)
    turns = 2.0 * PACE * 10 * RATE / link.departures.turn_bytes
    now_and_then = 2.0 * 20 / departures.MOST_WAIT_S
    assert turns < link.asked - before < 6 * turns + now_and_then


@pytest.mark.parametrize("connections", [1, 12])
def test_a_turn_that_is_not_used_up_is_the_next_ones_at_once(connections: int) -> None:
    link = Link(1000 * RATE)  # a turn is 1.8 MB, of which each takes 20 kB at a time
    for namespace in range(4):
        link.greedy(namespace, connections)
    link.run(1.0)
    before = link.sent.total()
    link.run(2.0)
    share = (link.sent.total() - before) / (PACE * 1000 * RATE)
    most = 4 * connections * 20_000 / 0.02 / (PACE * 1000 * RATE)
    assert share == pytest.approx(min(1.0, most), rel=0.1)


def test_who_takes_less_than_its_share_waits_for_nobody() -> None:
    link = Link()
    link.greedy(1, 12)
    took_s = []

    def quiet() -> None:
        begun = link.now

        def done() -> None:
            took_s.append(link.now - begun)
            link.at(link.now + 0.2, quiet)

        link.send(2, 30_000, done)

    link.at(1.0, quiet)
    link.run(2.0)
    before = link.sent[1] + link.sent[2]
    link.run(12.0)
    assert len(took_s) > 40
    assert max(took_s[1:]) == 0.0, "it goes out at once, and the others wait for the link"
    assert took_s[0] < 2 * 30_000 / (PACE * RATE), "the first time nothing was saved"
    in_all = link.sent[1] + link.sent[2] - before
    assert in_all == pytest.approx(PACE * RATE * 10, rel=0.05), "the others made up for it"


def test_what_is_about_to_come_holds_others_back_as_far_as_it_was_saved() -> None:
    link = Link()
    link.greedy(1, 12)
    quiet = Turn(link.departures, lambda: None)
    link.at(0.9, lambda: link.departures.sent(link.now, 2, 1000))  # it is there
    link.run(2.0)
    half = 0.5 * PACE * RATE  # of a second
    quiet.begin(link.now, 2, 2 * int(half))
    taken_bytes = quiet.allowed(link.now, 2)
    assert taken_bytes == pytest.approx(half, rel=0.05), "what it has saved, and no more"
    before = link.sent[1]
    link.run(2.0 + 0.4)  # nothing of it has come yet
    assert link.sent[1] - before <= 2 * link.departures.turn_bytes
    quiet.moved(link.now, 2, taken_bytes)
    assert quiet.allowed(link.now, 2) in (0, link.departures.turn_bytes), "the rest is by turns"
    link.run(5.0)
    in_all = link.sent[1] - before + taken_bytes
    assert in_all == pytest.approx(PACE * RATE * 3.0, rel=0.05)


def saver(link: Link) -> Turn:
    """A connection whose namespace has saved half a second of the link, beside a greedy one."""
    link.greedy(1, 12)
    link.at(0.9, lambda: link.departures.sent(link.now, 2, 1000))  # it is there
    link.run(2.0)
    return Turn(link.departures, lambda: None)


def test_others_wait_until_what_was_taken_ahead_has_come_but_not_for_ever() -> None:
    link = Link()
    size_bytes = 100_000
    in_time_s = size_bytes / (PACE * RATE)
    two_turns = 2 * link.departures.turn_bytes
    quiet = saver(link)
    for late in (1.45, 3.0):
        begun_at, before = link.now, link.sent[1]
        quiet.begin(begun_at, 2, size_bytes)
        link.run(begun_at + 1.2 * in_time_s)
        assert link.sent[1] - before <= two_turns, "it is on the link, which it has to itself"
        link.run(begun_at + late * in_time_s)
        sent_bytes = link.sent[1] - before
        if late < departures.PATIENCE:
            assert sent_bytes <= two_turns
        else:
            in_vain_s = departures.PATIENCE * in_time_s
            rest_s = late * in_time_s - in_vain_s
            assert sent_bytes == pytest.approx(rest_s * PACE * RATE, rel=0.3)
        assert quiet.allowed(link.now, 2) == size_bytes
        before = link.sent[1]
        quiet.moved(link.now, 2, size_bytes)
        at_once_s = 0.002 if late < departures.PATIENCE else 0.02
        link.run(link.now + at_once_s)
        assert link.sent[1] > before, "once it is there, others go on"
        link.run(link.now + 1.0)


def test_who_asks_while_what_was_taken_ahead_is_on_its_way_waits_for_it() -> None:
    shared = Departures(RATE)
    shared.sent(0.0, 2, 1)
    for _ in range(2):
        shared.sent(0.0, 1, 200_000)
    assert shared.take_ahead(1.0, 2, 100_000) == 100_000
    now = 1.0 + 1.3 * 100_000 / (PACE * RATE)
    assert shared.may_send(now, 1, "late") == 0, "the link could have carried it, but has not"
    shared.came(100_000)
    assert shared.may_send(now, 1, "late") > 0


def test_what_was_taken_ahead_by_a_connection_that_is_over_is_not_waited_for() -> None:
    link = Link()
    quiet = saver(link)
    begun_at, before = link.now, link.sent[1]
    quiet.begin(begun_at, 2, 100_000)
    assert quiet.leave()
    quiet.pass_on()
    in_time_s = 100_000 / (PACE * RATE)
    link.run(begun_at + 1.3 * in_time_s)
    assert link.sent[1] - before > 0.1 * 100_000


def test_of_one_namespace_what_began_first_comes_first_for_a_spell() -> None:
    shared = Departures(100 * RATE)
    turns = [Turn(shared, lambda: None) for _ in range(3)]
    now = 0.0
    for number, turn in enumerate(turns):
        turn.begin(number * 1e-6, 1, 2 * departures.SPELL_BYTES)
    shared.sent_by_reads(0.0, 2, 1)  # so somebody else is there
    shared.sent(0.0, 1, 10 * shared.turn_bytes)  # and all have to wait
    came = []
    left = [2 * departures.SPELL_BYTES] * len(turns)
    while any(left):
        shared.sent_by_reads(now, 2, 1)
        for number in reversed(range(len(turns))):
            if left[number] and (allowed := turns[number].allowed(now, 1)):
                part = min(allowed, left[number])
                left[number] -= part
                turns[number].moved(now, 1, part)
                came.append(number)
        now += departures.TURN_S / 4
    in_order = [number for number, _ in groupby(came)]
    assert in_order == [0, 1, 2, 0, 1, 2]


def test_nothing_is_taken_ahead_where_nobody_else_is_there_or_nothing_was_saved() -> None:
    for rate, others in ((0.0, True), (RATE, False)):
        one = Departures(rate)
        if others:
            one.sent(0.0, 2, 1)
        assert one.take_ahead(0.0, 1, 1 << 20) == 0
        turn = Turn(one, lambda: None)
        turn.begin(0.0, 1, 1 << 20)
        assert turn.allowed(0.0, 1) == turn.ahead_bytes == sys.maxsize
    fresh = Departures(RATE)
    fresh.sent(0.0, 2, 100_000)
    assert fresh.take_ahead(0.0, 1, 1 << 20) == 0, "it was not there before"


def test_one_namespace_alone_and_a_link_of_unknown_rate_are_not_held_back() -> None:
    alone, unknown = Departures(RATE), Departures(0.0)
    for number in range(100):
        assert alone.may_send(0.0, 1, number) == sys.maxsize
        alone.sent(0.0, 1, 1 << 20)
        assert unknown.may_send(0.0, number, number) == sys.maxsize
        unknown.sent(0.0, number, 1 << 20)
    assert alone.may_send(0.0, 2, "other") > 0, "what was sent alone is not to be made up for"
    assert alone.may_send(0.0, 1, 0) < sys.maxsize
    later = LATELY_S + 0.1
    assert alone.may_send(later, 1, 0) == sys.maxsize, "the other is gone"


def test_who_does_not_ask_again_is_not_waited_for() -> None:
    link = Link()
    link.greedy(1, 2)
    link.run(1.0)
    # Each of these waits, and then its connection takes nothing more.
    for number in range(200):
        link.departures.may_send(link.now, 2, number)
    before = link.sent[1]
    link.run(3.0)
    assert link.sent[1] - before > 0.8 * PACE * RATE * 2
    link.departures.may_send(link.now, 2, "closed")
    assert link.departures.leave("closed")
    assert not link.departures.leave("closed")


def test_reads_are_left_what_they_take_but_for_a_quarter() -> None:
    def left(read_bytes_per_s: float) -> float:
        link = Link()

        def read() -> None:
            link.departures.sent_by_reads(link.now, 3, int(read_bytes_per_s / 100))
            link.at(link.now + 0.01, read)

        read()
        link.greedy(1, 12)
        link.run(5.0)
        before = link.sent[1]
        link.run(15.0)
        return (link.sent[1] - before) / 10 / (PACE * RATE)

    assert left(0.4 * PACE * RATE) == pytest.approx(0.6, abs=0.05)
    assert left(2.0 * PACE * RATE) == pytest.approx(departures.LEFT, abs=0.03)


def test_namespaces_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "MAX_NAMESPACES", 8)
    held = Departures(RATE)
    for namespace in range(100):
        held.may_send(0.0, namespace, "one")
        held.sent_by_reads(0.0, namespace + 100, 1)
    assert len(held._there) == 8
    assert len(held._waiting) <= 1, "a connection waits for one namespace"


def test_a_link_is_tight_while_more_goes_out_than_it_carries_and_for_a_while_after() -> None:
    one, two = Departures(RATE), Departures(RATE)
    for now in (0.0, 0.1, 0.2):
        one.sent(now, 1, 500_000)
        two.sent(now, 1, 10_000)
        two.sent(now, 2, 10_000)
        assert not one.is_tight(now), "nobody competes"
        assert not two.is_tight(now), "the link carries it"
    two.sent(0.2, 1, 100_000)
    assert two.is_tight(0.2)
    assert two.is_tight(0.2 + LATELY_S - 0.1)
    assert not two.is_tight(0.2 + LATELY_S)
    assert not Departures(0.0).is_tight(0.0)
