"""Hostile frames and bytes into every door of a pool; `kvcast bench hostile` does it at length.

Oracle: the processes' ids, memory, counters, and that blocks are still right afterwards. Cannot
see: an attacker with a valid place in the pool (test_pool_wrong_bytes.py is about that one).
"""

from __future__ import annotations

from pathlib import Path

from kvcast.bench.hostile import HostileOptions, Mutator, run


async def test_no_door_breaks_and_everything_is_counted(tmp_path: Path) -> None:
    report = await run(HostileOptions(frames=1500, run_dir=tmp_path))
    assert report["problems"] == []
    assert report["passed"]
    doors = {door["door"]: door for door in report["doors"]}
    assert set(doors) == {"switch port", "agent port", "local socket", "http"}
    assert doors["switch port"]["sent"] >= 1500
    assert doors["agent port"]["sent"] >= 1500
    assert doors["agent port"]["counters"]["frames_malformed_total"] > 0
    assert doors["local socket"]["counters"]["local_protocol_errors_total"] > 0
    assert all(door["counted"] > 0 for door in doors.values())


def test_the_same_seed_makes_the_same_hostile_bytes() -> None:
    message = bytes(range(200))
    one, other = Mutator(9), Mutator(9)
    assert [one.mutate(message) for _ in range(200)] == [other.mutate(message) for _ in range(200)]
    assert len({one.mutate(message) for _ in range(200)}) > 150
