"""Every eviction policy against a plain model of its definition.

Oracle: models that keep lists and look through all of them, written from the papers. Pins, blocks
whose room is of no use just now, drops and credits come in between. Cannot see: whether a policy is
any good (`kvcast.bench.policies`), or what the store makes of its choices
(tests/property/test_store_property.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.policies.base import Policy, Search, Verdict
from kvcast.hostagent.tiers.policies.value import TWICE_AT_BLOCKS

CAPACITY = 12
TTL_S = 5.0

May = Callable[[int], bool]


class Model:
    """A policy's definition, in plain terms: `held` in order, the first to go first."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.sizes: dict[int, int] = {}
        self.now = 0.0

    def expected(self, block: int, size: int) -> None:
        pass

    def inserted(self, block: int, size: int, parent: int | None) -> None:
        self.held.append(block)
        self.sizes[block] = size

    def hit(self, block: int, times: int) -> None:
        pass

    def freed(self, block: int) -> None:
        pass

    def removed(self, block: int) -> None:
        self.held.remove(block)
        del self.sizes[block]

    def evicted(self, block: int) -> None:
        self.removed(block)

    def choose(self, may: May) -> int | None:
        return next((block for block in self.held if may(block)), None)

    def expired(self) -> int | None:
        return None

    def bytes_of(self, blocks: list[int]) -> int:
        return sum(self.sizes[block] for block in blocks)


class Recency(Model):
    def hit(self, block: int, times: int) -> None:
        self.held.remove(block)
        self.held.append(block)

    def freed(self, block: int) -> None:
        self.hit(block, 0)


class Lifetime(Recency):
    """In the order of the last uses; to be freed is none."""

    def freed(self, block: int) -> None:
        pass

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, float] = {}

    def inserted(self, block: int, size: int, parent: int | None) -> None:
        super().inserted(block, size, parent)
        self.used[block] = self.now

    def hit(self, block: int, times: int) -> None:
        super().hit(block, times)
        self.used[block] = self.now

    def expired(self) -> int | None:
        return next((b for b in self.held if self.used[b] + TTL_S <= self.now), None)


class Frequency(Model):
    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[int, int] = {}

    def inserted(self, block: int, size: int, parent: int | None) -> None:
        super().inserted(block, size, parent)
        self.uses[block] = 1

    def hit(self, block: int, times: int) -> None:
        if times:
            self.uses[block] += times
            self.held.remove(block)
            self.held.append(block)

    def choose(self, may: May) -> int | None:
        # min() takes the first of several: `held` has them in the order of their last uses.
        return min(filter(may, self.held), key=lambda b: self.uses[b], default=None)


class Adaptive(Model):
    """Figure 4 of the ARC paper, with sizes; at the front of each list what goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0
        self.back: set[int] = set()
        self.case = ""
        self.coming = 0

    def expected(self, block: int, size: int) -> None:
        self.case, self.coming = "IV", size
        b1, b2 = self.bytes_of(self.b1), self.bytes_of(self.b2)
        if block in self.b1:
            self.case = "II"
            self.p = min(self.p + size * max(1.0, b2 / b1), CAPACITY)
            self.b1.remove(block)
        elif block in self.b2:
            self.case = "III"
            self.p = max(self.p - size * max(1.0, b1 / b2), 0.0)
            self.b2.remove(block)
        if self.case != "IV":
            self.back.add(block)

    def inserted(self, block: int, size: int, parent: int | None) -> None:
        self.held.append(block)
        self.sizes[block] = size
        (self.t2 if block in self.back else self.t1).append(block)
        self.back.discard(block)
        self.case, self.coming = "IV", 0

    def hit(self, block: int, times: int) -> None:
        if block in self.t1 and not times:
            self.t1.remove(block)
            self.t1.append(block)
            return
        (self.t1 if block in self.t1 else self.t2).remove(block)
        self.t2.append(block)

    def _l1_full(self) -> bool:
        return self.bytes_of(self.t1) + self.bytes_of(self.b1) + self.coming > CAPACITY

    def choose(self, may: May) -> int | None:
        t1 = self.bytes_of(self.t1)
        replace = t1 > self.p or (t1 == self.p and self.case == "III")
        alone = self.case == "IV" and self._l1_full() and not self.b1
        first, second = (self.t1, self.t2) if self.t1 and (replace or alone) else (self.t2, self.t1)
        return next((block for block in (*first, *second) if may(block)), None)

    def removed(self, block: int) -> None:
        self.held.remove(block)
        (self.t1 if block in self.t1 else self.t2).remove(block)

    def evicted(self, block: int) -> None:
        ghost = True
        if self.case == "IV":
            if self._l1_full():
                ghost = bool(self.b1) or block in self.t2
                del self.b1[:1]
            elif sum(map(self.bytes_of, (self.t1, self.t2, self.b1, self.b2))) >= 2 * CAPACITY:
                del self.b2[:1]
        ghosts = self.b1 if block in self.t1 else self.b2
        self.removed(block)
        if ghost:
            ghosts.append(block)
        while self.bytes_of(self.b1) > CAPACITY:
            del self.b1[0]
        rest = 2 * CAPACITY - sum(map(self.bytes_of, (self.t1, self.t2, self.b1)))
        while self.b2 and self.bytes_of(self.b2) > rest:
            del self.b2[0]


class ThreeQueues(Model):
    """Algorithm 1 of the S3-FIFO paper, and the simulator's way to begin."""

    def __init__(self) -> None:
        super().__init__()
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}
        self.back: set[int] = set()
        self.full = False

    def expected(self, block: int, size: int) -> None:
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.back.add(block)

    def inserted(self, block: int, size: int, parent: int | None) -> None:
        self.held.append(block)
        self.sizes[block] = size
        early = not self.full and self.bytes_of(self.small) >= CAPACITY // 10
        (self.main if block in self.back or early else self.small).append(block)
        self.back.discard(block)
        self.uses[block] = 0

    def hit(self, block: int, times: int) -> None:
        self.uses[block] = min(3, self.uses[block] + times)

    def choose(self, may: May) -> int | None:
        from_small = False
        while True:
            small = [b for b in self.small if may(b) or self.uses[b] >= 2]
            main = [b for b in self.main if may(b) or self.uses[b]]
            if not small and not main:
                return None
            over = self.bytes_of(self.main) > CAPACITY - CAPACITY // 10
            from_small = bool(small) and (from_small or not (main and over))
            block = small[0] if from_small else main[0]
            if from_small and self.uses[block] >= 2:
                self.uses[block] = 0
                self.small.remove(block)
                self.main.append(block)
            elif not from_small and self.uses[block]:
                self.uses[block] -= 1
                self.main.remove(block)
                self.main.append(block)
            else:
                return block

    def removed(self, block: int) -> None:
        self.held.remove(block)
        (self.small if block in self.small else self.main).remove(block)

    def evicted(self, block: int) -> None:
        self.full = True
        ghost = block in self.small
        self.removed(block)
        if ghost:
            self.ghosts.append(block)
        while self.bytes_of(self.ghosts) > int(CAPACITY * 0.9):
            del self.ghosts[0]


class Worth(Model):
    def __init__(self) -> None:
        super().__init__()
        self.parent: dict[int, int | None] = {}
        self.uses: dict[int, int] = {}
        self.base: dict[int, float] = {}
        self.level = 0.0

    def inserted(self, block: int, size: int, parent: int | None) -> None:
        super().inserted(block, size, parent)
        self.parent[block] = parent
        self.uses[block], self.base[block] = 1, self.level

    def hit(self, block: int, times: int) -> None:
        self.uses[block] += times
        self.base[block] = self.level

    def depth(self, block: int) -> int:
        return block % 4

    def value(self, block: int) -> float:
        return self.base[block] + self.uses[block] * (1.0 + self.depth(block) / TWICE_AT_BLOCKS)

    def ends(self) -> list[int]:
        return [b for b in self.held if b not in self.parent.values()]

    def choose(self, may: May) -> int | None:
        return min(filter(may, self.ends()), key=self.value, default=None)

    def removed(self, block: int) -> None:
        super().removed(block)
        del self.parent[block]

    def evicted(self, block: int) -> None:
        self.level = max(self.level, self.value(block))
        self.removed(block)


MODELS: dict[str, type[Model]] = {
    "lru": Recency,
    "fifo": Model,
    "lfu": Frequency,
    "ttl": Lifetime,
    "arc": Adaptive,
    "s3fifo": ThreeQueues,
    "value": Worth,
}


@dataclass
class Run:
    """One policy and its model, told the same, asked the same."""

    policy: Policy[int]
    model: Model
    sizes: dict[int, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    unsuitable: set[int] = field(default_factory=set)

    def may(self, block: int) -> bool:
        return block not in self.pinned and block not in self.unsuitable

    def verdict(self, block: int) -> Verdict:
        assert block in self.sizes, "it proposes a block that is not held"
        if block in self.pinned:
            return Verdict.PINNED
        return Verdict.UNSUITABLE if block in self.unsuitable else Verdict.GO

    def used(self) -> int:
        return sum(self.sizes.values())

    def make_room(self, size: int) -> bool:
        while self.used() + size > CAPACITY:
            chosen = self.policy.choose(Search(self.verdict))
            wanted = self.model.choose(self.may)
            if isinstance(self.model, Worth):
                # Of several ends of one value any may go.
                assert (chosen is None) == (wanted is None)
                if chosen is not None and wanted is not None:
                    assert chosen in self.model.ends()
                    assert self.may(chosen)
                    assert self.model.value(chosen) == pytest.approx(self.model.value(wanted))
            else:
                assert chosen == wanted
            if chosen is None:
                return False
            self.lose(chosen, evicted=True)
        return True

    def lose(self, block: int, *, evicted: bool) -> None:
        for who in (self.policy, self.model):
            (who.evicted if evicted else who.removed)(block)
        del self.sizes[block]
        self.pinned.discard(block)

    def use(self, block: int, size: int) -> None:
        if block in self.sizes:
            self.policy.hit(block)
            self.model.hit(block, 1)
            return
        parent = block - 1 if block % 4 else None
        self.policy.expected(block, size)
        self.model.expected(block, size)
        pins = parent is not None and parent in self.sizes and parent not in self.pinned
        if pins:
            self.pinned.add(parent)
        room = self.make_room(size)
        if room:
            self.sizes[block] = size
            self.policy.inserted(block, size, parent, block % 4)
            self.model.inserted(block, size, parent)
        if pins:
            self.free(parent)

    def free(self, block: int) -> None:
        self.pinned.discard(block)
        self.policy.freed(block)
        self.model.freed(block)


BLOCK = st.integers(0, 23)
STEP = st.one_of(
    st.tuples(st.just("use"), BLOCK, st.integers(1, 3)),
    st.tuples(st.just("use"), BLOCK, st.integers(1, 3)),
    st.tuples(st.just("use"), BLOCK, st.integers(1, 3)),
    st.tuples(st.just("hit"), BLOCK, st.integers(0, 4)),
    st.tuples(st.just("pin"), BLOCK, st.just(0)),
    st.tuples(st.just("free"), BLOCK, st.just(0)),
    st.tuples(st.just("drop"), BLOCK, st.just(0)),
    st.tuples(st.just("unsuitable"), BLOCK, st.just(0)),
    st.tuples(st.just("wait"), st.just(0), st.integers(1, 3)),
)


def play(name: str, steps: list[tuple[str, int, int]]) -> Run:
    policy: Policy[int] = policies.make(name, CAPACITY, TTL_S)
    run = Run(policy, MODELS[name]())
    now = 0.0
    for what, block, number in steps:
        held = block in run.sizes
        if what == "use":
            # A block has the same size each time, or two requests would not be of one block.
            run.use(block, 1 + block % number)
        elif what == "wait":
            now += number
            policy.advance(now)
            run.model.now = now
        elif what == "hit" and held:
            policy.credited(block, number)
            run.model.hit(block, number)
        elif what == "pin" and held:
            run.pinned.add(block)
        elif what == "free" and block in run.pinned:
            run.free(block)
        elif what == "drop" and held:
            run.lose(block, evicted=False)
        elif what == "unsuitable":
            run.unsuitable ^= {block}
        assert policy.expired() == run.model.expired()
        assert run.used() <= CAPACITY
    return run


@pytest.mark.parametrize("name", sorted(policies.BY_NAME))
@given(steps=st.lists(STEP, max_size=120))
@settings(max_examples=150, deadline=None)
def test_policy_does_what_its_plain_model_does(
    name: str, steps: list[tuple[str, int, int]]
) -> None:
    play(name, steps)


@given(steps=st.lists(STEP, max_size=120))
@settings(max_examples=150, deadline=None)
def test_value_holds_no_block_whose_ancestor_went_after_it_came(
    steps: list[tuple[str, int, int]],
) -> None:
    """Drops apart, which are an operator's: what was chosen never had anything behind it, whichever
    of the two had come first."""
    run = Run(policies.make("value", CAPACITY), Worth())
    behind: set[int] = set()
    for what, block, number in steps:
        if what != "use":
            continue
        run.use(block, 1 + block % number)
        behind = {child for child in behind if child in run.sizes}
        assert all(child - 1 in run.sizes for child in behind)
        behind = {child for child in run.sizes if child % 4 and child - 1 in run.sizes}


def test_what_comes_before_an_ancestor_is_behind_it_from_then_on_and_again() -> None:
    policy: Policy[int] = policies.make("value", 100)
    policy.inserted(3, 1, 2, 2)
    policy.inserted(2, 1, 1, 1)
    assert policy.descendants(2) == [3]
    policy.inserted(1, 1, None, 0)
    assert policy.descendants(1) == [2, 3]
    policy.removed(2)
    assert policy.descendants(1) == []
    policy.removed(1)
    policy.inserted(2, 1, 1, 1)
    policy.inserted(1, 1, None, 0)
    assert policy.descendants(1) == [2, 3]
    policy.removed(3)
    policy.removed(2)
    policy.inserted(2, 1, 1, 1)
    assert policy.descendants(1) == [2]


@pytest.mark.parametrize(
    "told",
    [
        [(1, 2, 1), (2, 1, 1)],
        [(1, 2, 1), (2, 1, 2)],
        [(1, 2, 2), (2, 1, 1)],
        [(1, 1, 5)],
    ],
)
def test_no_block_is_behind_itself_whatever_is_said(told: list[tuple[int, int, int]]) -> None:
    """Else none of them would ever be chosen."""
    policy: Policy[int] = policies.make("value", 100)
    for block, parent, depth in told:
        policy.inserted(block, 1, parent, depth)
    for _ in told:
        chosen = policy.choose(Search(lambda _: Verdict.GO))
        assert chosen is not None
        policy.evicted(chosen)
    assert not policy.blocks()


def test_descendants_of_a_value_are_all_behind_it() -> None:
    policy: Policy[int] = policies.make("value", 100)
    for block, parent, depth in ((1, None, 0), (2, 1, 1), (3, 2, 2), (4, 2, 2), (5, None, 0)):
        policy.inserted(block, 1, parent, depth)
    assert policy.descendants(1) == [2, 3, 4]
    assert policy.descendants(5) == []


def test_pinned_blocks_are_looked_at_once_however_many_they_are() -> None:
    for name in policies.BY_NAME:
        policy: Policy[int] = policies.make(name, 10_000)
        for block in range(1_000):
            policy.inserted(block, 1)
        looks = 0

        def look(block: int) -> Verdict:
            nonlocal looks
            looks += 1
            return Verdict.PINNED if block < 900 else Verdict.GO

        for _ in range(100):
            chosen = policy.choose(Search(look))
            assert chosen is not None
            assert chosen >= 900
            policy.evicted(chosen)
        assert looks <= 1_000, name


def test_a_search_is_given_up_at_its_bound() -> None:
    for name in policies.BY_NAME:
        policy: Policy[int] = policies.make(name, 10_000)
        for block in range(1_000):
            policy.inserted(block, 1)
        looks: list[int] = []

        def look(block: int, looks: list[int] = looks) -> Verdict:
            looks.append(block)
            return Verdict.UNSUITABLE

        assert policy.choose(Search(look, most=50)) is None
        assert len(looks) == 50, name
        assert policy.choose(Search(lambda _: Verdict.GO)) == looks[0], name
