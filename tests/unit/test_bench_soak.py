"""The soak's plan, watch and verdict: what is planned, how processes are sampled, what fails.

Oracle: series made by hand, flat and noisy or with a planted leak; child processes that leak, or do
not. Cannot see: a pool (tests/integration/test_pool_soak.py).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvcast.bench.soak import plan as soak_plan
from kvcast.bench.soak.plan import allowed, keepers, lower_tiers, plan, settings_of, spared
from kvcast.bench.soak.pool import delete_oldest
from kvcast.bench.soak.verdict import (
    Bounds,
    Criterion,
    Growth,
    Window,
    growth_criteria,
    hit_rate_criterion,
    judged,
    none_of,
    some_of,
    theil_sen,
)
from kvcast.bench.soak.watch import Life, Watch
from kvcast.bench.usage import Usage, has_ended, usage
from kvcast.protocol.messages.control import POLICIES
from kvcast.workloads.generators import WorkloadOptions, generate

HOUR_S = 3600.0
BOUNDS = Bounds()


# --- verdict ------------------------------------------------------------------------------------


def life(
    memory: Callable[[float], float] = lambda at: 40.0,
    descriptors: Callable[[float], int] = lambda at: 50,
    threads: Callable[[float], int] = lambda at: 2,
    *,
    length_s: float = HOUR_S,
    part: str = "node-1",
) -> Life:
    """A life with a sample every three seconds."""
    made = Life(part, 1)
    for at in range(0, int(length_s), 3):
        made.add(at, Usage(memory(at), descriptors(at), threads(at)))
    return made


def noisy(seed: int, level: float, spread: float) -> Callable[[float], float]:
    """A level that jumps, with a warming up and rare high peaks."""
    rng = random.Random(seed)

    def at(time_s: float) -> float:
        warming = -0.3 * level * max(0.0, 1 - time_s / 100)
        peak = 3 * spread if rng.random() < 0.01 else 0.0
        return level + warming + rng.gauss(0, spread) + peak

    return at


def failed(criteria: list[Criterion]) -> set[str]:
    return {criterion.name for criterion in criteria if not criterion.holds}


@pytest.mark.parametrize("seed", range(20))
def test_noisy_flat_lives_hold(seed: int) -> None:
    rng = random.Random(seed)
    lives = [
        life(
            noisy(seed, 40.0, 2.0),
            lambda at: 50 + rng.choice((0, 0, 0, 1, 8, 16)),
            lambda at: 10 + (rng.random() < 0.05),
            length_s=length_s,
        )
        for length_s in (HOUR_S, 1200.0)
    ]
    assert len(judged(lives, BOUNDS)) == 2
    assert failed(growth_criteria(judged(lives, BOUNDS), BOUNDS)) == set()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mib_per_h", [14.0, 60.0])
def test_memory_that_grows_is_found_below_the_noise(seed: int, mib_per_h: float) -> None:
    level = noisy(seed, 40.0, 2.0)
    leaking = life(lambda at: level(at) + mib_per_h * at / HOUR_S, part="switch")
    criteria = growth_criteria(judged([life(), leaking], BOUNDS), BOUNDS)
    assert failed(criteria) == {"memory"}
    assert "switch, life 1" in criteria[0].found
    assert "node-1" not in criteria[0].found


def test_a_step_that_stays_is_no_growth_and_steps_without_end_are() -> None:
    once = life(lambda at: 40.0 + 5.0 * (at > 800))
    again = life(lambda at: 40.0 + 2.0 * (at // 300))
    assert failed(growth_criteria(judged([once], BOUNDS), BOUNDS)) == set()
    assert failed(growth_criteria(judged([again], BOUNDS), BOUNDS)) == {"memory"}


def test_tables_that_are_filled_once_are_no_growth_however_long_it_takes() -> None:
    filling = life(lambda at: 40.0 + 20.0 * min(1.0, at / 1800), part="switch")
    assert failed(growth_criteria(judged([filling], BOUNDS), BOUNDS)) == set()


def test_a_leaked_descriptor_every_ten_minutes_is_found() -> None:
    leaking = life(descriptors=lambda at: 50 + int(at // 600))
    assert failed(growth_criteria(judged([leaking], BOUNDS), BOUNDS)) == {"descriptors, median"}


def test_bursts_of_descriptors_that_become_higher_are_found() -> None:
    leaking = life(descriptors=lambda at: 50 + (int(at // 30) if at % 30 == 0 else 0))
    assert failed(growth_criteria(judged([leaking], BOUNDS), BOUNDS)) == {"descriptors, maximum"}


def test_leaked_threads_are_found() -> None:
    leaking = life(threads=lambda at: 2 + int(at // 300))
    criteria = growth_criteria(judged([leaking], BOUNDS), BOUNDS)
    assert failed(criteria) == {"threads, maximum", "threads, median"}


def test_a_leak_before_a_kill_is_found_in_that_life() -> None:
    leaking = life(lambda at: 40.0 + at / 60, length_s=1440.0)
    after = life(length_s=1500.0)
    after.number = 2
    criteria = growth_criteria(judged([leaking, after], BOUNDS), BOUNDS)
    assert failed(criteria) == {"memory"}
    assert "life 1" in criteria[0].found


def test_short_lives_are_not_judged_and_that_is_said() -> None:
    growths = judged([life(lambda at: at, length_s=BOUNDS.life_s - 10), Life("switch", 1)], BOUNDS)
    assert growths == []
    assert all(c.found == "no life was long enough" for c in growth_criteria(growths, BOUNDS))


def test_the_slope_is_that_of_the_line_whatever_a_few_samples_say() -> None:
    at = [float(x) for x in range(1000)]
    values = [0.5 * x + (1000.0 if x % 10 == 0 else 0.0) for x in at]
    assert theil_sen(at, values) == pytest.approx(0.5, abs=0.2)
    assert theil_sen([1.0], [5.0]) == 0.0
    assert Growth.of(life(lambda at: at / HOUR_S)).slope_mib_per_h == pytest.approx(1.0, abs=0.01)


def window(number: int, wanted: int, came: int) -> Window:
    return Window(30.0 * number, 30.0 * (number + 1), 10, 0, wanted, came, came, came, 0, 0, 5, 0,
                  1.0, 2.0)  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_a_hit_rate_that_jumps_holds_and_one_that_sinks_does_not(seed: int) -> None:
    rng = random.Random(seed)
    flat = [window(n, 1000, rng.randint(600, 800)) for n in range(120)]
    assert hit_rate_criterion(flat, BOUNDS).holds
    sinking = [window(n, 1000, rng.randint(600, 800) - 3 * n) for n in range(120)]
    assert not hit_rate_criterion(sinking, BOUNDS).holds


def test_no_reads_at_all_are_no_good_hit_rate() -> None:
    assert not hit_rate_criterion([], BOUNDS).holds
    assert not hit_rate_criterion([window(n, 0, 0) for n in range(10)], BOUNDS).holds
    dead_end = [window(n, 100 if n < 4 else 0, 90 if n < 4 else 0) for n in range(10)]
    assert not hit_rate_criterion(dead_end, BOUNDS).holds


def test_counts_that_must_be_zero_and_counts_that_must_not() -> None:
    assert none_of("wrong bytes", "none", 0).holds
    assert not none_of("wrong bytes", "none", 1).holds
    assert none_of("hangs", "none", []).holds
    assert none_of("hangs", "none", ["one", "two"]) == Criterion("hangs", "none", "one; two", False)
    assert some_of("eviction", "some", 5).holds
    assert not some_of("eviction", "some", 0).holds


# --- plan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("nodes", [2, 6, 31])
def test_an_hours_plan_has_every_kind_and_spares_who_has_to_live(seed: int, nodes: int) -> None:
    lanes = plan(seed, HOUR_S, nodes)
    faults = [fault for lane in lanes.values() for fault in lane]
    assert {fault.kind for fault in faults} == set(soak_plan.PLANNED)
    for fault in faults:
        assert 0 <= fault.at_s < HOUR_S
        assert 0 <= fault.node < nodes
        if fault.kind in (soak_plan.KILL_AGENT, soak_plan.JOIN_NODE, soak_plan.TAKE_OVER):
            assert fault.node >= spared(nodes)
        if fault.kind == soak_plan.TAKE_OVER:
            assert fault.node in keepers(seed, nodes)
        if fault.kind == soak_plan.KILL_SWITCH:
            assert fault.at_s < 720
        if fault.kind == soak_plan.KILL_CONTROLLER:
            assert 1440 <= fault.at_s < 2160
    for lane in lanes.values():
        assert all(a.at_s < b.at_s for a, b in itertools.pairwise(lane))
    # Faults go on to the end, and what is away is never away for long stretches.
    assert max(fault.at_s for fault in faults) > HOUR_S - 60
    assert max(fault.lasts_s for fault in faults) <= 10
    assert plan(seed, HOUR_S, nodes) == lanes
    assert plan(seed + 100, HOUR_S, nodes) != lanes


def test_soaks_draw_from_all_tiers_policies_and_keepers() -> None:
    seen: set[str] = set()
    for seed in range(20):
        tiers = lower_tiers(seed, 6)
        assert {*tiers} == {*soak_plan.LOWER}
        settings = settings_of(seed, 5)
        assert sum(s["policy"] == "ttl" and s["ttl_s"] > 0 for s in settings) == 1
        assert 0 < sum("cold" in s.get("media", ()) for s in settings) < 5
        seen |= {s["policy"] for s in settings}
        assert lower_tiers(seed, 6) == tiers
        assert settings_of(seed, 5) == settings
    assert seen == {*POLICIES}
    assert len({tuple(lower_tiers(seed, 6)) for seed in range(20)}) > 10


@pytest.mark.parametrize("nodes", [2, 3, 6, 31])
def test_some_keep_their_arena_and_one_of_them_may_be_replaced(nodes: int) -> None:
    for seed in range(20):
        kept = keepers(seed, nodes)
        assert kept == sorted({*kept})
        assert any(node >= spared(nodes) for node in kept)
        assert len(kept) < nodes


def test_switch_and_controller_have_long_lives_in_any_soak() -> None:
    for kind, first in ((soak_plan.KILL_SWITCH, 0), (soak_plan.KILL_CONTROLLER, 40)):
        times = [at for at in range(100) if allowed(kind, at, 100.0)]
        assert times == list(range(first, first + 20))
    assert all(allowed(soak_plan.KILL_AGENT, at, 100.0) for at in range(100))


# --- the object store ---------------------------------------------------------------------------


def test_the_oldest_objects_are_deleted_until_the_rest_fits(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / f"folder-{number % 2}" / f"object-{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (1000 + number, 1000 + number))
    assert delete_oldest(tmp_path, 600) == 0
    assert delete_oldest(tmp_path, 250) == 4
    assert {path.name for path in tmp_path.rglob("object-*")} == {"object-4", "object-5"}


# --- watch --------------------------------------------------------------------------------------

_LEAKING = """
import os, sys, threading, time
kept = []
while True:
    kept.append(bytearray(os.urandom(1 << 20)))
    kept.append(os.open(os.devnull, os.O_RDONLY))
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(0.02)
"""
_CALM = """
import os, time
while True:
    bytearray(os.urandom(1 << 20))
    time.sleep(0.02)
"""


def watched(script: str, samples: int = 100) -> list[Criterion]:
    """What is said about a process that runs that script."""
    watch, bounds = Watch(), Bounds(life_s=0.0, descriptors_max=2)
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            began = time.monotonic()
            while len(watch.lives) == 0 or len(watch.lives[0].at_s) < samples:
                watch.sample(time.monotonic() - began, {"part": process.pid, "gone": None})
                time.sleep(0.02)
        finally:
            process.kill()
    (only,) = watch.lives
    assert watch.present("part") is only
    assert watch.present("gone") is None
    return growth_criteria(judged([only], bounds), bounds)


@pytest.mark.slow
def test_a_process_that_leaks_is_found_and_a_calm_one_is_not() -> None:
    assert failed(watched(_LEAKING)) == {
        "memory",
        "descriptors, maximum",
        "descriptors, median",
        "threads, maximum",
        "threads, median",
    }
    assert failed(watched(_CALM)) == set()


def test_a_restarted_part_begins_another_life_and_a_dead_one_has_no_usage() -> None:
    watch = Watch()
    pids = []
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            while usage(process.pid) is None:
                time.sleep(0.01)
            watch.sample(float(len(pids)), {"node-1": process.pid})
            process.kill()
        pids.append(process.pid)
    assert usage(pids[0]) is None
    watch.sample(5.0, {"node-1": pids[1]})
    assert [(each.name, list(each.at_s)) for each in watch.lives] == [
        ("node-1, life 1", [0.0]),
        ("node-1, life 2", [1.0]),
    ]


_FIRST_THREAD_ENDS = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
exit_of = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
ctypes.CDLL(None).syscall(exit_of, 0)  # of this thread, not of the process
"""


def test_a_process_has_ended_with_the_last_of_its_threads_before_it_is_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", _FIRST_THREAD_ENDS]) as process:
        assert not has_ended(process.pid)
        while usage(process.pid) is not None:  # the first thread gives the memory back
            time.sleep(0.01)
        assert not has_ended(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        while not has_ended(process.pid):
            time.sleep(0.01)
        assert Path(f"/proc/{process.pid}").exists()
    assert has_ended(process.pid)


# --- the workload without end -------------------------------------------------------------------


def test_requests_of_an_endless_mix_do_not_become_longer() -> None:
    options = WorkloadOptions(nodes=6, seed=3)
    lengths = [len(r.keys) for r in itertools.islice(generate("mix", options), 30_000)]
    assert max(lengths) <= 12 * options.prefix_blocks
    early, late = sum(lengths[5_000:10_000]), sum(lengths[25_000:])
    assert late < 1.2 * early
