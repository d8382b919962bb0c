"""A part of a pool killed in the middle of a replay, and what that did to the reads.

Owns: when the part is killed and started again, which requests count as before, during and after.
Must not know: how a replay or a pool is made.

hit rate = blocks that came / blocks that a pool which loses nothing would have held for the same
requests (`replay.ideal_reads`). A request whose own agent is down gets nothing, and counts so;
what comes beyond, because a later request was quicker to write it, does not count.
Before: ended before the kill. After: started after the part was back and the controller had
programmed the whole pool again. During: all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvcast.bench.replay import Replay, Tally, Turn
from kvcast.service.statistics import ratio
from kvcast.topologies.pool import Pool

PARTS: Final = ("controller", "switch", "agent")
"""What can be named; `agent` is the pool's second node, or its only one."""

RECOVERED_SHARE: Final = 0.9
"""The hit rate has recovered if it is at least so much of the one before."""

_DOWN_S: Final = 2.0
_PROGRAMMED_WITHIN_S: Final = 60.0


@dataclass(frozen=True)
class Outage:
    """Times in seconds since the replay's start."""

    part: str
    killed_s: float
    restarted_s: float
    """The part runs again."""
    restored_s: float
    """The controller knows every node and has programmed the switch."""


@dataclass(frozen=True)
class Phase:
    """What some of the requests came to together."""

    requests: int
    failed_requests: int
    wanted: int
    came: int
    missed: int

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> Phase:
        """The sum of these requests."""
        some = list(turns)
        return cls(
            len(some),
            sum(turn.failed for turn in some),
            sum(turn.wanted for turn in some),
            sum(min(turn.came, turn.wanted) for turn in some),
            sum(turn.missed for turn in some),
        )

    @property
    def hit_rate(self) -> float | None:
        """See the module's text; None if nothing was to be had."""
        return self.came / self.wanted if self.wanted else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "failed_requests": self.failed_requests,
            "blocks_wanted": self.wanted,
            "blocks_came": self.came,
            "misses": self.missed,
            "hit_rate": ratio(self.came, self.wanted),
        }


@dataclass(frozen=True)
class Phases:
    """A replay, cut at an outage."""

    before: Phase
    during: Phase
    after: Phase

    @classmethod
    def of(cls, tally: Tally, outage: Outage) -> Phases:
        """Cut a replay's requests."""
        before = [t for t in tally.turns if t.ended_s < outage.killed_s]
        after = [t for t in tally.turns if t.started_s > outage.restored_s]
        apart = {*map(id, before), *map(id, after)}
        during = [t for t in tally.turns if id(t) not in apart]
        return cls(Phase.of(before), Phase.of(during), Phase.of(after))

    @property
    def recovered(self) -> bool:
        """Whether the hit rate came back. Not, where no request was left to show it."""
        before, after = self.before.hit_rate, self.after.hit_rate
        return before is None or (after is not None and after >= RECOVERED_SHARE * before)


def name_of(pool: Pool, part: str) -> str:
    """The pool's name of the part that `PARTS` names."""
    if part != "agent":
        return part
    hosts = pool.star.hosts
    return hosts[min(1, len(hosts) - 1)].node_id


async def strike(pool: Pool, replay: Replay, part: str, after: int) -> Outage:
    """Kill a part when so many requests have ended, start it again two seconds later, and wait
    until the pool is whole. PoolError if it does not become so."""
    name = name_of(pool, part)
    await replay.when_ended(after).wait()
    killed_s = replay.elapsed()
    await pool.kill(name)
    await asyncio.sleep(_DOWN_S)
    await pool.restart(name)
    restarted_s = replay.elapsed()
    await pool.wait_programmed(_PROGRAMMED_WITHIN_S)
    return Outage(name, killed_s, restarted_s, replay.elapsed())


async def play_with_outage(
    pool: Pool, replay: Replay, part: str, after: int
) -> tuple[Tally, Outage]:
    """Run the replay, and the outage in the middle of it."""
    tasks = (
        asyncio.create_task(replay.run()),
        asyncio.create_task(strike(pool, replay, part, after)),
    )
    try:
        tally, outage = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return tally, outage
