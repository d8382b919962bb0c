"""Whole simulated pools: that they keep their invariants, and that a run can be repeated.

Oracle: `kvcast.simulation.model`, which shares no code with the cores; that it finds what it should
is the subject of `test_simulation_planted_bugs`. Cannot see: what the model does not look for,
times, the adapters' sockets. Many more seeds run by `python -m kvcast.simulation`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kvcast.hostagent.core import handover, store
from kvcast.hostagent.core.courier import Courier
from kvcast.hostagent.core.handover import Handover
from kvcast.hostagent.core.store import Store
from kvcast.simulation import command
from kvcast.simulation.cluster import Product
from kvcast.simulation.faults import FAULTS
from kvcast.simulation.plan import FEATURES, Mask, features_of
from kvcast.simulation.run import Outcome, plan_of, run_seed
from kvcast.simulation.shrink import shrink
from kvcast.simulation.switch import ENGINES, product_program
from planted_bugs import BUGS

ENGINE = next(iter(ENGINES))
CLEAN_SEEDS = frozenset(range(1, 25))
ONCE_FAILED = frozenset(
    {100439, 101615, 210318, 300972, 301550, 301628, 400206, 433284}
    | {440446, 443230, 443572, 443954, 446090, 770210, 781572, 781867}
    | {800677, 820718, 825138, 830220, 1200157, 1211983, 1250590}
    | {1260413, 1261585, 1404833, 1540797, 1640621, 1681191, 1722063}
    | {1772838, 1772965, 1906453}
)
"""What the product, or the simulation itself, once did wrong (docs/simulation.md)."""
FAILED_WITH = {
    **dict.fromkeys((1300015, 1300016, 1300193, 1300442, 1723144), ("operator",)),
    **dict.fromkeys((1262566, 1300441, 1540905), ("kept", "operator")),
    1550296: ("arenas",),
    1660497: ("arenas", "kept"),
    1608991: ("kept",),
    **dict.fromkeys((2511000, 2511035), ("digests", "kept")),
}
"""The same, in runs with these features."""


@pytest.fixture(scope="module")
def product() -> Product:
    return Product(ENGINES[ENGINE], product_program())


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed <= 2 else pytest.mark.slow)
        for seed in sorted(CLEAN_SEEDS | ONCE_FAILED)
    ],
)
def test_no_invariant_is_violated(product: Product, seed: int) -> None:
    mask = Mask(features=frozenset()) if seed in ONCE_FAILED else Mask()
    outcome = run_seed(seed, product, mask)
    repeat = command.command_for(seed, mask, ENGINE)
    assert outcome.violation is None, f"{outcome.violation}; repeat with: {repeat}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(FAILED_WITH))
def test_no_invariant_is_violated_with_a_feature(product: Product, seed: int) -> None:
    outcome = run_seed(seed, product, Mask(features=frozenset(FAILED_WITH[seed])))
    assert outcome.violation is None, outcome.violation


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1795000, 1795005, 1795007])
def test_blocks_are_handed_over_a_part_at_a_time(
    product: Product, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real agents have millions of blocks, simulated ones a handful; so parts are small here."""
    in_the_middle = 0
    new_map = Handover.new_map

    def count(self: Handover, *map_: Any, **known: bool) -> None:
        nonlocal in_the_middle
        in_the_middle += bool(self._scans)
        new_map(self, *map_, **known)

    monkeypatch.setattr(handover, "PART_BLOCKS", 2)
    monkeypatch.setattr(Handover, "new_map", count)
    outcome = run_seed(seed, product, Mask())
    assert outcome.violation is None, outcome.violation
    assert in_the_middle, "no map came while blocks were looked at"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1796017, 1796023, 1796086])
def test_namespaces_leave_and_shrink_a_part_at_a_time(
    product: Product, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the test above."""
    leaving = shrinking = 0
    advance = Store.advance

    def count(self: Store, now: float) -> None:
        nonlocal leaving, shrinking
        leaving += bool(self._leaving)
        shrinking += bool(self._shrinking)
        advance(self, now)

    monkeypatch.setattr(store, "PART_BLOCKS", 1)
    monkeypatch.setattr(Store, "advance", count)
    outcome = run_seed(seed, product, Mask(features=frozenset(("operator",))))
    assert outcome.violation is None, outcome.violation
    assert leaving
    assert shrinking or seed == 1796017  # in which a node was to hand over what leaves


def test_every_run_looks_at_the_couriers_tables(product: Product) -> None:
    with mock.patch.object(Courier, "check", side_effect=AssertionError("it looks")):
        outcome = run_seed(1, product)
    assert outcome.violation == (0, "AssertionError: it looks")


@pytest.mark.slow
def test_a_seed_is_the_same_run_every_time(product: Product) -> None:
    first, second = run_seed(9, product), run_seed(9, product)
    assert first.trace == second.trace
    assert first.counts == second.counts
    assert run_seed(10, product).trace != first.trace


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_another_process(product: Product) -> None:
    code = (
        "from kvcast.simulation import command; from kvcast.simulation.run import run_seed;"
        f"print(run_seed(9, command.product({ENGINE!r})).trace)"
    )
    traces = set()
    for hash_seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        traces.add(done.stdout.strip())
    assert traces == {run_seed(9, product).trace}


def test_blocks_are_put_together_in_every_way_and_by_compiled_code(product: Product) -> None:
    """Of one question some are pushed, some end here, and some are the agent's."""
    plans = [plan_of(seed, Mask()) for seed in range(1, 61)]
    puts = [(plan, op) for plan in plans for op in plan.ops if op.kind == "put_many"]
    assert {op.ack for _, op in puts} == {"", "home", "replicas", "local"}
    assert any(op.leaves_after_s is not None for _, op in puts)
    assert any(len(op.blocks) == 128 for _, op in puts)
    assert any(len(set(op.blocks)) < len(op.blocks) for _, op in puts)
    assert any(min(op.blocks) < len(plan.blocks) for plan, op in puts)
    assert run_seed(5, product).counts["put.together_by_the_courier"] > 0


def test_features_leave_the_rest_of_a_plan_as_it_is() -> None:
    """What is drawn for one comes from a source of its own, and behind all else."""
    without = plan_of(9, Mask(features=frozenset()))
    for feature in FEATURES:
        plan = plan_of(9, Mask(features=frozenset({feature})))
        assert plan.features == {feature}
        assert plan.ops[: len(without.ops)] == without.ops
        assert plan.faults[: len(without.faults)] == without.faults
        assert plan.blocks == without.blocks
    drawn = [features_of(seed) for seed in range(600)]
    for feature in FEATURES:
        assert 60 < sum(feature in features for features in drawn) < 140


@pytest.mark.slow
def test_an_operator_makes_changes_and_deletes_namespaces(product: Product) -> None:
    outcome = run_seed(1300015, product, Mask(features=frozenset({"operator"})))
    for what in ("namespace_made", "namespace_set", "namespace_deleted"):
        assert outcome.faults[what]
    assert outcome.counts["namespaces_deleted"]
    assert outcome.counts["namespaces_found_again"]


@pytest.mark.slow
def test_clients_outlive_their_agents_and_go_on_by_compiled_code(product: Product) -> None:
    counts = run_seed(1300008, product, Mask(features=frozenset({"kept"}))).counts
    for what in (
        *("clients_resumed", "clients_resumed_holding", "kept.get_by_the_courier"),
        *("kept.released_without_an_agent", "kept.died_in_the_moment", "kept.told_in_the_moment"),
    ):
        assert counts[what], what


def test_blocks_go_to_further_arenas_and_come_back(product: Product) -> None:
    counts = run_seed(8, product, Mask(features=frozenset({"arenas"}))).counts
    assert counts["arena.write"]
    assert counts["arena.read"]


def test_what_a_mask_leaves_out_moves_nothing_else() -> None:
    seed = next(s for s in range(1, 50) if len(plan_of(s, Mask()).faults) > 2)
    whole = plan_of(seed, Mask())
    part = plan_of(seed, Mask(ops=frozenset({0, 3}), faults=frozenset({1}), hosts=3))
    assert part.faults == tuple(f for f in whole.faults if f.number != 1)
    assert part.ops == tuple(op for op in whole.ops if op.number not in (0, 3))
    assert part.blocks == whole.blocks
    assert part.hosts == whole.hosts[:3]


@pytest.mark.parametrize("text", ["", "hosts=3", "o1-4,o9,f2", "hosts=2,o0,f0-1"])
def test_a_mask_reads_what_it_writes(text: str) -> None:
    assert str(Mask.parse(text)) == text


@pytest.mark.parametrize("text", ["x", "o", "hosts=", "f1-", "o-3"])
def test_what_is_no_mask_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is none of"):
        Mask.parse(text)


@pytest.mark.slow
def test_a_failure_is_made_smaller_and_still_fails() -> None:
    bug = BUGS["eviction does not look at pins"]
    with bug.plant(ENGINES[ENGINE]) as broken:
        seed = next(s for s in range(1, 30) if run_seed(s, broken).violation)

        def fails(mask: Mask) -> bool:
            violation = run_seed(seed, broken, mask).violation
            return violation is not None and violation[0] in bug.invariants

        mask, _ = shrink(seed, fails, budget=60)
        assert fails(mask)
    whole, small = plan_of(seed, Mask()), plan_of(seed, mask)
    assert len(small.ops) < len(whole.ops) / 2


@pytest.mark.slow
def test_the_command_reports_what_it_ran(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert command.main(["--first-seed", "9", "--seeds", "2", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["seeds"] == 2
    assert report["violations"] == []
    assert report["blocks_delivered"] > 0
    assert report["seeds_per_minute"] > 0
    assert set(report["faults"]) <= {*FAULTS, *BESIDE}


@pytest.mark.slow
def test_an_interrupted_run_reports_the_seeds_that_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_whole_seed = command.run_seed

    def run_two_seeds(seed: int, product: Product, mask: Mask) -> Outcome:
        if seed == 11:
            raise KeyboardInterrupt
        return run_whole_seed(seed, product, mask)

    monkeypatch.setattr(command, "run_seed", run_two_seeds)
    monkeypatch.setattr(command, "PROGRESS_S", 0.0)
    file = tmp_path / "report.json"
    assert command.main(["--first-seed", "9", "--seeds", "50", "--json", str(file)]) == 130
    report = json.loads(file.read_text())
    assert (report["seeds"], report["incomplete"]) == (2, "interrupted")
    assert "2 of 50 seeds" in capsys.readouterr().err


BESIDE = {
    "clock_skew", "arena_without_room", "different_bytes_of_one_block", "queue_overflow",
    "socket_overflow", "late_pin",
}  # fmt: skip
