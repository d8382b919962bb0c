"""What is turned off and on by namespace, one rule at a time.

Oracle: the rules in `adaptive`'s description, worked out by hand. Cannot see: what agents and the
switch make of it (tests/unit/test_controller_pool.py, test_hostagent_core.py).
"""

from __future__ import annotations

from kvcast.controller.core.adaptive import Adaptive, AdaptiveOptions
from kvcast.protocol.messages.control import NamespaceReads, NamespaceSettings

CHAT, RANKS = 1, 2


class Load:
    """Nodes that report once a second what they read of two namespaces."""

    def __init__(self, **options: float) -> None:
        self.settings = {CHAT: NamespaceSettings(), RANKS: NamespaceSettings()}
        self.core = Adaptive(AdaptiveOptions(**options), self.settings.get)  # type: ignore[arg-type]
        self.now = 0.0
        self.totals = {n: [0, 0, 0] for n in self.settings}
        self.turned: list[tuple[float, int, str, bool]] = []

    def seconds(
        self,
        count: int,
        namespace: int = CHAT,
        *,
        remote: int = 100,
        shared: int = 0,
        switch: int = 0,
        readers: int = 1,
        before: bool = False,
    ) -> None:
        for _ in range(count):
            self.now += 1.0
            for place, more in enumerate((remote, shared, switch)):
                self.totals[namespace][place] += more
            reads = [NamespaceReads(n, *totals) for n, totals in self.totals.items()]
            self.core.heard_reads("node-1", reads, self.now)
            many, again = remote * (readers > 1), remote * before
            self.core.heard_hot(namespace, remote, shared=many, again=again, now=self.now)
            for changed, thing in self.core.advance(self.now):
                on = self.core.gathers(changed)
                on = self.core.resides(changed) if thing == "residence" else on
                self.turned.append((self.now, changed, thing, on))


def test_what_brings_nothing_is_off_once_enough_was_seen_for_long_enough() -> None:
    load = Load(enough_reads=1000, dwell_s=5)
    load.seconds(9)
    assert not load.turned
    load.seconds(30)
    assert sorted(load.turned, key=lambda t: t[2]) == [
        (load.turned[0][0], CHAT, "gathering", False),
        (load.turned[0][0], CHAT, "residence", False),
    ]
    assert not load.core.gathers(CHAT)
    assert load.core.gathers(RANKS)  # of which nothing was seen


def test_what_pays_one_namespace_stays_on_there_alone() -> None:
    load = Load()
    for _ in range(100):
        load.seconds(1, CHAT, switch=30)
        load.seconds(1, RANKS, shared=80)
    assert not load.core.gathers(CHAT)
    assert load.core.resides(CHAT)
    assert load.core.gathers(RANKS)
    assert not load.core.resides(RANKS)


def test_between_the_bounds_all_stays_as_it_is() -> None:
    load = Load(low=0.02, high=0.05)
    load.seconds(200, shared=3, switch=3)
    assert not load.turned
    load.seconds(100)
    assert not load.core.gathers(CHAT)
    turned = len(load.turned)
    load.seconds(400, shared=3, switch=3)
    assert len(load.turned) == turned


def test_gathering_is_on_again_when_readers_meet_without_it() -> None:
    load = Load()
    load.seconds(100)
    assert not load.core.gathers(CHAT)
    load.seconds(20, shared=60)
    assert load.core.gathers(CHAT)


def test_a_hint_is_worth_a_trial_after_a_rest_that_doubles_with_each_failure() -> None:
    load = Load(rest_s=60, longest_rest_s=200, dwell_s=10)
    load.seconds(1500, readers=3)
    tries = [at for at, _, thing, on in load.turned if thing == "gathering" and on]
    rests = [
        at - max(t for t, _, thing, on in load.turned if thing == "gathering" and t < at and not on)
        for at in tries
    ]
    assert rests[:4] == [60, 120, 200, 200]
    assert all(thing != "residence" or not on for _, _, thing, on in load.turned)


def test_a_trial_that_pays_ends_the_rests() -> None:
    load = Load(rest_s=60)
    load.seconds(60, before=True)
    assert not load.core.resides(CHAT)
    while not load.core.resides(CHAT):
        load.seconds(1, before=True)
    load.seconds(60, before=True, switch=50)
    assert load.core.resides(CHAT)
    load.seconds(400)  # another load: nothing is read twice
    assert not load.core.resides(CHAT)
    off = load.now
    while not load.core.resides(CHAT):
        load.seconds(1, before=True)
    assert load.now - off <= 61


def test_without_a_hint_nothing_is_tried() -> None:
    load = Load(rest_s=10)
    load.seconds(1000)
    assert {on for *_, on in load.turned} == {False}


def test_a_pool_that_rests_is_not_judged() -> None:
    load = Load(enough_reads=200)
    load.seconds(1000, remote=1)
    assert not load.turned


def test_what_an_operator_says_holds() -> None:
    load = Load()
    load.settings[CHAT] = NamespaceSettings(gathering="on", residence="on")
    load.seconds(200)
    assert load.core.gathers(CHAT)
    assert load.core.resides(CHAT)
    load.settings[RANKS] = NamespaceSettings(gathering="off")
    load.seconds(1, RANKS, shared=100)
    assert not load.core.gathers(RANKS)
    assert {(r["namespace"], r["thing"]): r["on"] for r in load.core.report(load.now)} == {
        (CHAT, "gathering"): True,
        (CHAT, "residence"): True,
        (RANKS, "gathering"): False,
        (RANKS, "residence"): True,
    }


def test_an_operator_is_heard_before_the_first_read() -> None:
    load = Load()
    load.settings[CHAT] = NamespaceSettings(gathering="off")
    assert not load.core.gathers(CHAT)


def test_turned_off_as_a_whole_it_changes_nothing() -> None:
    load = Load(enabled=False)
    load.seconds(200)
    assert not load.turned
    assert load.core.gathers(CHAT)
    assert load.core.resides(CHAT)


def test_totals_that_fell_count_from_zero_and_a_namespace_that_is_gone_not_at_all() -> None:
    load = Load()
    load.seconds(50, shared=100)
    load.totals[CHAT] = [0, 0, 0]  # the agent was started anew
    load.seconds(50, shared=100)
    assert load.core.gathers(CHAT)
    rows = {(r["namespace"], r["thing"]): r for r in load.core.report(load.now)}
    assert rows[CHAT, "gathering"]["pays_share"] == 1.0
    del load.settings[CHAT]
    load.core.heard_hot(CHAT, 5, shared=0, again=0, now=load.now)
    load.core.advance(load.now)
    assert {r["namespace"] for r in load.core.report(load.now)} <= {RANKS}
    load.core.node_left("node-1")
    load.core.heard_reads("node-1", [NamespaceReads(RANKS, 7, 7, 0)], load.now)
    (row, _) = load.core.report(load.now)
    assert (row["namespace"], row["pays_share"]) == (RANKS, 1.0)
