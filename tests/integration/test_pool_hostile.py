"""Hostile frames and bytes into every entry point of a pool; `kvcast bench hostile` does it at
length.

Oracle: the processes' ids, memory, that blocks are still right afterwards, and the attacker's own
book of what it sent, against what the kernel and the parts count. Cannot see: an attacker with a
valid place in the pool (test_pool_wrong_bytes.py is about that one).
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from kvcast.bench.balance import Balance
from kvcast.bench.hostile import HostileOptions, run
from kvcast.bench.hostile_bytes import mutate

FRAMES = 2500


@pytest.mark.long
async def test_no_entry_point_breaks_and_everything_is_accounted_for(tmp_path: Path) -> None:
    report = await run(HostileOptions(frames=FRAMES, run_dir=tmp_path))
    assert report["problems"] == []
    assert report["passed"]
    entry_points = {
        entry_point["entry_point"]: entry_point for entry_point in report["entry_points"]
    }
    assert set(entry_points) == {"switch port", "agent port", "local socket", "http"}
    for frame_entry_point in ("switch port", "agent port"):
        assert entry_points[frame_entry_point]["sent"] == FRAMES
    for stream_entry_point in ("local socket", "http"):
        assert (
            entry_points[stream_entry_point]["sent_bytes"]
            >= entry_points["agent port"]["sent_bytes"]
        )
    # That the sums come out says little unless something came to every end that matters.
    assert_ends(
        entry_points["switch port"],
        {"received", "dropped at the port: runts", "decided new", "decided guarded"}
        | {"decided dropped", "decided forwarded", "copies frames"},
    )
    assert_ends(
        entry_points["agent port"],
        {"malformed", "misaddressed", "forbidden", "reads_answered", "misses", "unsolicited"},
    )
    assert_ends(
        entry_points["local socket"],
        {"protocol errors", "refused", "left", "replied to", "without a reply"}
        | {"received: Failed invalid", "received: Stats done"},
    )
    assert_ends(entry_points["http"], {"accepted", "answered 200", "answered 400", "answered 404"})


def assert_ends(entry_point: dict[str, Any], ends: set[str]) -> None:
    found = {name for balance in entry_point["balances"] for name in balance["found"]}
    assert ends <= found, ends - found
    assert all(balance["unaccounted"] == 0 for balance in entry_point["balances"])


def test_a_balance_that_does_not_come_out_is_a_problem() -> None:
    good = Balance("frames", {"sent": 1500}, {"received": 1499, "lost": 1, "late": 0})
    assert good.problem is None
    assert str(good) == "1,500 sent = 1,499 received + 1 lost"
    bad = Balance("frames", {"sent": 3}, {"received": 2})
    assert bad.problem == "frames do not add up by 1: 3 sent = 2 received"
    assert bad.as_dict()["unaccounted"] == 1


def test_the_same_seed_makes_the_same_hostile_bytes() -> None:
    message = bytes(range(200))
    one, other = Random(9), Random(9)
    mutated = [mutate(message, one) for _ in range(200)]
    assert mutated == [mutate(message, other) for _ in range(200)]
    assert len(set(mutated)) > 150
