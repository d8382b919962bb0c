"""Whom a read asks: the rules of `spread.py`, with a seeded source of random numbers."""

from __future__ import annotations

import random
from collections import Counter

from kvcast.hostagent.core.spread import Spread
from kvcast.protocol.messages.control import MAX_REPLICATED, Loads, Replica, Replicas
from kvcast.protocol.messages.wire import BlockId

HOT = BlockId(1, bytes(16))
COLD = BlockId(1, bytes(15) + b"\1")
ME = 9


def spread(loads: dict[int, int] | None = None, holders: tuple[int, ...] = (3, 4)) -> Spread:
    made = Spread(random.Random(1))
    made.loads_are(Loads(list((loads or {}).items())))
    made.replicas_are(Replicas([Replica(HOT.namespace, HOT.key, list(holders))]), ME)
    return made


def firsts(of: Spread, block: BlockId, homes: tuple[int, ...], reads: int = 2000) -> Counter[int]:
    return Counter(of.order(block, homes, company=False)[0] for _ in range(reads))


def test_a_home_with_little_to_do_is_asked_first_and_alone_of_its_block() -> None:
    assert list(spread({1: 40}).order(COLD, (1, 2), company=False)) == [1, 2]


def test_reads_of_a_replicated_block_go_to_all_who_hold_it() -> None:
    counts = firsts(spread(), HOT, (1,))
    assert counts.keys() == {1, 3, 4}
    assert min(counts.values()) > 500


def test_the_less_a_node_has_to_do_the_more_it_is_asked() -> None:
    counts = firsts(spread({1: 100, 3: 50, 4: 0}), HOT, (1,))
    assert counts[4] > 1.5 * counts[3] > 2 * counts[1] > 0


def test_the_maps_own_replicas_share_the_reads_of_a_loaded_home() -> None:
    counts = firsts(spread({1: 90}), COLD, (1, 2))
    assert counts[2] > counts[1] > 0


def test_every_holder_is_asked_in_the_end() -> None:
    order = spread().order(HOT, (1, 2), company=False)
    assert sorted(order) == [1, 2, 3, 4]


def test_who_looks_for_company_goes_where_everybody_goes() -> None:
    of = spread({1: 100})
    assert {tuple(of.order(HOT, (1,), company=True)) for _ in range(50)} == {(1, 3, 4)}


def test_a_node_does_not_ask_itself() -> None:
    of = spread(holders=(3, ME))
    assert sorted(of.order(HOT, (1,), company=False)) == [1, 3]


def test_only_what_was_given_and_listed_is_taken_back() -> None:
    of = spread(holders=(ME,))
    of.given_one(HOT)
    of.given_one(COLD)  # the controller has not listed it yet
    assert of.replicas_are(Replicas([]), ME) == [HOT]
    assert of.given == 1
    assert of.replicas_are(Replicas([]), ME) == []


def test_what_was_here_before_is_not_taken_back() -> None:
    assert spread(holders=(ME,)).replicas_are(Replicas([]), ME) == []


def test_another_controller_knows_of_no_replicas() -> None:
    of = spread({1: 100}, holders=(3, ME))
    of.given_one(HOT)
    of.reset()
    assert list(of.order(HOT, (1,), company=False)) == [1]
    assert of.replicas_are(Replicas([]), ME) == []


def test_nodes_that_are_gone_are_not_asked() -> None:
    of = spread({1: 100, 3: 10})
    of.keep_nodes({1: None, 4: None}, set())
    assert sorted(of.order(HOT, (1,), company=False)) == [1, 4]
    of.keep_nodes({1: None, 4: None}, {4})
    assert sorted(of.order(HOT, (1,), company=False)) == [1]


def test_what_is_given_is_bounded() -> None:
    of = spread()
    for number in range(MAX_REPLICATED + 10):
        of.given_one(BlockId(2, number.to_bytes(16, "big")))
    assert of.given == MAX_REPLICATED


def test_only_what_changes_whom_a_lone_read_may_ask_is_a_revision() -> None:
    of = spread({1: 40, 2: 60})
    before = of.revision
    of.loads_are(Loads([(2, 90), (3, 49)]))
    of.replicas_are(Replicas([Replica(HOT.namespace, HOT.key, [5])]), ME)
    of.keep_nodes({1: None, 2: None, 5: None}, set())
    assert of.revision == before, "the same homes are busy, and the same blocks replicated"
    changes = [
        lambda: of.loads_are(Loads([(2, 90), (3, 50)])),
        lambda: of.loads_are(Loads([(2, 90)])),
        lambda: of.keep_nodes({1: None, 5: None}, set()),
        lambda: of.keep_nodes({1: None, 5: None}, {5}),
        lambda: of.replicas_are(Replicas([Replica(COLD.namespace, COLD.key, [5])]), ME),
        of.reset,
    ]
    for number, change in enumerate(changes):
        before = of.revision
        change()
        assert of.revision != before, f"change {number}"
    assert not of.is_busy(2)
    assert not list(of.blocks())
