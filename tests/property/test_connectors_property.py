"""Random engines beside random pools: the planner's and the loads' promises hold whatever happens.

Oracle: a plain model of what lies where: a block's "bytes" are its hash, an engine's memory maps
block ids to them. Cannot see: the adapters.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.loads import LoadTable
from kvcast.hostagent.connectors.naming import group_sizes, keys_of
from kvcast.hostagent.connectors.planner import Planner, PlannerOptions
from kvcast.hostagent.connectors.weighing import Pace, Weighing

DEADLINE_S, LOOKUP_S, SAVE_S = 2.0, 0.25, 3.0
MOST_SAVING = 12


class Engine:
    """Requests of chains with common prefixes, a memory of blocks with reference counts, and a pool
    that answers late, wrongly short, or not at all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        workers = self.random.choice((1, 1, 2))
        self.planner = Planner(
            PlannerOptions(
                deadline_s=DEADLINE_S,
                lookup_s=LOOKUP_S,
                save_s=SAVE_S,
                most_saving=MOST_SAVING,
                workers=workers,
            ),
            Counters(),
            Weighing(16) if self.random.random() < 0.6 else None,
        )
        self.workers = [LoadTable() for _ in range(workers)]
        self.memory: dict[int, bytes] = {}
        self.references: dict[int, int] = {}
        self.pool: set[bytes] = set()
        self.sick = self.random.random() < 0.3
        self.next_id = 1
        self.failures: dict[str, int] = {}
        self.unreported: list[tuple[int, dict[int, bytes]]] = []

    def allocate(self, count: int) -> list[int]:
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        for one in ids:
            self.references[one] = 1
        return ids

    def release(self, ids: Iterable[int]) -> None:
        for one in ids:
            self.references[one] -= 1
            assert self.references[one] >= 0
            if not self.references[one]:
                self.memory[one] = b"something else"  # it is used again at once

    def step(self) -> None:
        self.now += self.random.choice((0.001, 0.01, 0.1, 0.3, 1.0))
        out = self.planner.out
        while out.lookups:
            lookup = out.lookups.popleft()
            held = 0
            while held < len(lookup.hashes) and lookup.hashes[held] in self.pool:
                held += 1
            if self.random.random() < (0.8 if self.sick else 0.1):
                if self.random.random() < 0.5:
                    self.planner.answered(self.now, lookup.request, lookup.number, None)
            else:
                self.planner.answered(self.now, lookup.request, lookup.number, held)
        while out.saves:
            save = out.saves.popleft()
            assert self.planner.saving_blocks <= MOST_SAVING
            for one, block_hash in zip(save.block_ids[0], save.hashes, strict=True):
                assert self.memory[one] == block_hash, "what is saved is what was computed"
                if not self.sick or self.random.random() < 0.5:
                    self.pool.add(block_hash)
            held = dict(zip(save.block_ids[0], save.hashes, strict=True))
            self.unreported += [(save.number, held)] * len(self.workers)
        while self.unreported and self.random.random() < 0.7:
            at = self.random.randrange(len(self.unreported))
            number, held = self.unreported.pop(at)
            for one, block_hash in held.items():
                assert self.memory[one] == block_hash, "nor does it change while it is read"
            self.planner.saved(number)
        while out.let_go:
            _, block_ids = out.let_go.popleft()
            self.release(block_ids[0])
        if self.pool and self.random.random() < 0.2:
            self.pool.discard(self.random.choice(sorted(self.pool)))

    def load(self, name: str, hashes: list[bytes], ids: list[int]) -> int:
        """Carry out the planned load; how many blocks vLLM may count on."""
        [plan] = self.planner.out.loads
        self.planner.out.loads.clear()
        assert plan.left_s <= DEADLINE_S + 1e-9
        began = self.now
        least = len(plan.hashes)
        cuts: list[tuple[int, int]] = []
        for table in self.workers:
            opened = table.begin(plan, 2, began)
            late = self.random.random() < 0.2
            parts = list(range(2 * len(plan.hashes)))
            self.random.shuffle(parts)
            came: dict[int, set[int]] = {}

            def copy(part: int, came: dict[int, set[int]] = came) -> None:
                came.setdefault(part // 2, set()).add(part % 2)

            for part in parts:
                if late and self.random.random() < 0.3:
                    self.now = max(self.now, opened.deadline)
                if self.random.random() < 0.1:
                    cuts += self.weigh(name, plan.number, opened.whole)
                for cut in cuts:
                    table.cut(*cut)
                if plan.hashes[part // 2] in self.pool and self.random.random() < 0.95:
                    opened.write(part, lambda part=part: copy(part))  # type: ignore[misc]
                else:
                    opened.missed(part, "not_found")
            if not late:
                table.end(opened, "")
            if plan.by_layers:  # the engine's step is over
                for group in range(2):
                    if not opened.wait_for(group, 0.0):
                        opened.stop("deadline")
                table.conclude(opened, "not_awaited")
            self.now = max(self.now, opened.deadline if late else self.now)
            [ended] = table.take(self.now)
            for at in range(ended.came):
                assert came[at] == {0, 1}, "a block that counts is whole"
            assert not opened.write(0, lambda: None)
            least = min(least, ended.came)
            self.planner.loaded(self.now, name, plan.number, ended.came, hashes, ended.reason)
        assert self.now <= began + max(plan.left_s, 0) + 1e-6
        for at in range(least):
            self.memory[ids[plan.first + at]] = plan.hashes[at]
        if least < len(plan.hashes):
            self.failures[name] = self.failures.get(name, 0) + 1
        return plan.first + least

    def weigh(self, name: str, number: int, whole: int) -> list[tuple[int, int]]:
        """Some news of how fast blocks come and are computed, and what is cut short for it."""
        planner = self.planner
        seconds = self.random.choice((0.0, 0.001, 0.1, 2.0))
        planner.paced(Pace(self.random.random() * 4, seconds, 1, 0.01, seconds))
        if planner._weighing is not None:
            planner._weighing.computed(self.random.randint(0, 200), self.random.random())
        planner.progressed(name, number, whole)
        planner.review(self.now, self.random.choice((0, 0, 500)))
        cuts = list(planner.out.cuts)
        planner.out.cuts.clear()
        for cut in cuts:
            assert cut[0] == number, "only what is under way is cut"
            assert cut[1] >= 0
        return cuts

    def computed(
        self, name: str, hashes: list[bytes], done: int, ids: list[int], here: int
    ) -> None:
        """What is to be saved is kept from reuse from here on."""
        save = self.planner.computed(self.now, name, hashes, done, [ids], here=here)
        if save is not None:
            for one in save.block_ids[0]:
                self.references[one] += 1

    def play(self, name: str, hashes: list[bytes]) -> None:
        """One request, from arrival to end."""
        self.planner.arrived(self.now, name, hashes)
        self.step()
        ids: list[int] = []
        done = 0
        asked_since = None
        while True:
            most = len(hashes) - 1
            count = self.planner.matched(self.now, name, hashes, 0, most)
            asked_since = self.now if asked_since is None else asked_since
            if count is None:
                assert self.now - asked_since <= LOOKUP_S + 1.0, "it is held up"
                self.step()
                continue
            assert 0 <= count <= most
            if count == 0:
                break
            by_layers = self.random.random() < 0.4
            ids = self.allocate(len(hashes) if by_layers else count)
            self.planner.allocated(self.now, name, hashes, count, [ids], by_layers=by_layers)
            if by_layers:  # the rest is computed on top of what has not come
                for at in range(count, len(hashes)):
                    self.memory[ids[at]] = b"who knows"
                self.computed(name, hashes, len(hashes), ids, 0)
                assert not self.planner.out.saves
            done = self.load(name, hashes, ids)
            if by_layers and done == count:
                done = len(hashes)
                for at in range(count, done):
                    self.memory[ids[at]] = hashes[at]
            if done or by_layers:  # vLLM asks no more for one that it has begun to compute
                break
            self.release(ids)  # nothing came: vLLM asks once more
            ids = []
            assert self.failures[name] == 1, "no failure makes a loop"
        here = done
        while done < len(hashes):
            until = min(len(hashes), done + self.random.randint(1, 7))
            ids += self.allocate(max(0, until - len(ids)))
            for at in range(done, until):
                self.memory[ids[at]] = hashes[at]
            done = until
            for at in range(done):
                assert self.memory[ids[at]] == hashes[at], "the engine reads its own blocks"
            self.computed(name, hashes, done, ids, here)
            self.step()
        self.computed(name, hashes, done, ids, here)
        self.step()
        self.planner.finished(name)
        self.release(ids)


def _chain(system: random.Random, trunks: list[list[bytes]]) -> list[bytes]:
    trunk = system.choice(trunks)
    shared = trunk[: system.randint(0, len(trunk))]
    return [*shared, *(system.randbytes(32) for _ in range(system.randint(1, 6)))]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_an_engine_is_never_held_up_never_loops_and_saves_what_it_computed(seed: int) -> None:
    engine = Engine(seed)
    system = random.Random(seed + 1)
    trunks = [[system.randbytes(32) for _ in range(20)] for _ in range(2)]
    for number in range(8):
        engine.play(f"r{number}", _chain(system, trunks))
    while engine.unreported:
        engine.step()
    engine.step()
    assert engine.planner.saving_blocks == 0
    assert not engine.planner.asking or engine.planner._lookups_out == {}
    assert not any(engine.references.values()), "every block can be used again"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32))
def test_a_healthy_pool_brings_all_that_was_saved(seed: int) -> None:
    system = random.Random(seed)
    hashes = [system.randbytes(32) for _ in range(system.randint(2, 30))]
    counters = Counters()
    planner = Planner(PlannerOptions(most_saving=1000), counters)
    planner.arrived(0.0, "a", hashes)
    planner.answered(0.0, "a", planner.out.lookups.pop().number, 0)
    pool: set[bytes] = set()
    done = 0
    while done < len(hashes):
        done = min(len(hashes), done + system.randint(1, 5))
        planner.computed(0.0, "a", hashes, done, [list(range(1, len(hashes) + 1))])
    for save in planner.out.saves:
        assert not pool & set(save.hashes), "nothing is saved twice"
        pool |= set(save.hashes)
    assert pool == set(hashes)


@given(st.lists(st.integers(1, 1 << 20), max_size=80), st.integers(1, 1 << 22))
def test_all_layers_are_in_one_group_each(page_bytes: list[int], aim_bytes: int) -> None:
    sizes = group_sizes(page_bytes, aim_bytes)
    assert sum(sizes) == len(page_bytes)
    assert all(size > 0 for size in sizes)


@given(st.sets(st.binary(min_size=16, max_size=32), min_size=1, max_size=40), st.integers(1, 64))
def test_keys_of_different_hashes_and_groups_differ(hashes: set[bytes], groups: int) -> None:
    firsts = {one[:16] for one in hashes}
    # But where two hashes differ in nothing but the bits that tell groups apart.
    firsts = {one[:14]: one for one in firsts}.values()  # type: ignore[assignment]
    keys = [key for one in firsts for key in keys_of(one, groups)]
    assert len(set(keys)) == len(keys)
