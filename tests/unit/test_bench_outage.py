"""What an outage did to the reads: which requests count where, and what is said about it.

Oracle: the definitions in kvcast.bench.outage and replay. Cannot see: a pool whose part really dies
(tests/integration/test_pool_kills.py).
"""

from __future__ import annotations

import pytest
from kvcast.bench.demo import outage_report
from kvcast.bench.outage import Outage, Phases
from kvcast.bench.replay import Tally, Turn, ideal_reads
from kvcast.cli.demo import main, what_it_cost
from kvcast.workloads.generators import Request

OUTAGE = Outage("switch", killed_s=10.0, restarted_s=12.0, restored_s=13.0)


def turn(started_s: float, ended_s: float, came: int, *, wanted: int = 10, **more: int) -> Turn:
    missed, failed = more.get("missed", 0), bool(more.get("failed", 0))
    return Turn((0,), started_s, ended_s, wanted, came, missed, failed)


def request(number: int, keys: str, **more: object) -> Request:
    blocks = tuple(key.encode() for key in keys)
    return Request(number, float(number), 0, blocks, "test", **more)  # type: ignore[arg-type]


def test_a_request_wants_the_longest_prefix_that_was_written_before_on_every_rank() -> None:
    requests = [
        request(0, "abc"),
        request(1, "abd", group=(0, 1, 2)),
        request(2, "xabc", writes=False),
        request(3, "x"),
        request(4, "abdc"),
        request(5, "abc", namespace="another"),
    ]
    assert ideal_reads(requests) == {0: 0, 1: 6, 2: 0, 3: 0, 4: 4, 5: 0}


def test_requests_are_cut_at_the_kill_and_at_the_restored_pool() -> None:
    tally = Tally(
        turns=[
            turn(1.0, 2.0, 10),
            turn(9.0, 9.9, 9),
            turn(9.5, 10.5, 4, missed=6),  # in flight when the part died
            turn(11.0, 11.1, 0, failed=1),
            turn(12.5, 12.6, 10),  # the part was back, the pool not yet
            turn(13.5, 14.0, 10),
            turn(15.0, 16.0, 8),
            turn(15.0, 16.0, 3, wanted=0),  # somebody was quicker than planned
        ]
    )
    phases = Phases.of(tally, OUTAGE)
    assert [p.requests for p in (phases.before, phases.during, phases.after)] == [2, 3, 3]
    assert phases.before.hit_rate == 0.95
    assert phases.during.hit_rate == pytest.approx(14 / 30)
    assert (phases.during.missed, phases.during.failed_requests) == (6, 1)
    assert phases.after.hit_rate == 0.9
    assert phases.recovered


@pytest.mark.parametrize(
    ("after", "recovered"),
    [([turn(14.0, 15.0, 9)], True), ([turn(14.0, 15.0, 8)], False), ([], False)],
)
def test_a_hit_rate_that_stays_low_or_is_not_seen_has_not_recovered(
    after: list[Turn], recovered: bool
) -> None:
    tally = Tally(turns=[turn(1.0, 2.0, 10), *after])
    report = outage_report(tally, OUTAGE)
    assert report["recovered"] is recovered
    text = what_it_cost(report, 0)
    assert "switch was killed at 10.0 s, ran again at 12.0 s" in text
    assert "Hit rate: 100.0 % before, nothing read until then" in text
    assert ("The hit rate recovered." in text) is recovered
    assert ("has NOT recovered" in text) is not recovered


def test_a_kill_needs_time_to_recover_in(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kill", "switch", "--seconds-budget", "30"])
    assert "--kill needs a --seconds-budget of at least 40" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--kill", "everything"])
    assert "invalid choice" in capsys.readouterr().err
