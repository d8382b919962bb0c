"""How busy the processors and the links were while a pool worked: which of them was the limit?

Owns: reading what the kernel counts of a pool's processes, and what the switch counts at its ports.
Must not know: what the pool was doing.

Definitions:
- processors_busy: processor time of the pool's processes and of this one (the engines), divided by
  the time of all processors that this process may use. machine_busy: of whatever else ran, too.
- A link's share: bytes of frames that crossed it in one direction, divided by what its rate allows
  in the time. up: from a node to the switch; down: from the switch to a node. The mean is over the
  whole time, of the busiest node; the peak is over about a second (the switch writes its counters
  once in that time), of any node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcast.bench.processor_time import machine_time, processor_time_s
from kvcast.service.statistics import percentile, rounded
from kvcast.topologies.pool import Pool

_SAMPLE_S = 0.5


class _Processors(NamedTuple):
    """Seconds: on the clock, of the pool's processes, of the whole machine."""

    at_s: float
    pool_s: float
    machine_s: float


class _Links(NamedTuple):
    """Bytes by switch port since the switch started."""

    at_s: float
    up: dict[str, int]
    down: dict[str, int]


@dataclass
class Load:
    """What was measured. See the module's text."""

    link_rate_bits_per_s: float
    """0: the links have no rate, and no share."""
    ports: frozenset[str]
    processors: int
    samples: list[_Processors] = field(default_factory=list)
    links: list[_Links] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """The numbers as plain data; None where there is nothing to tell."""
        pool = self._busy("pool_s")
        return {
            "processors": self.processors,
            "processors_busy": _mean_of(self.samples, "pool_s", self.processors),
            "processors_busy_p95": rounded(percentile(pool, 0.95)),
            "machine_busy": _mean_of(self.samples, "machine_s", self.processors),
            "uplink_busiest": self._busiest("up"),
            "uplink_peak": self._peak("up"),
            "downlink_busiest": self._busiest("down"),
            "downlink_peak": self._peak("down"),
        }

    def _busy(self, whose: str) -> list[float]:
        pairs = zip(self.samples, self.samples[1:], strict=False)
        return [_busy_between(a, b, whose, self.processors) for a, b in pairs]

    def _busiest(self, way: str) -> float | None:
        if len(self.links) < 2 or not self.link_rate_bits_per_s:
            return None
        return rounded(self._share(self.links[0], self.links[-1], way))

    def _peak(self, way: str) -> float | None:
        pairs = list(zip(self.links, self.links[1:], strict=False))
        if not pairs or not self.link_rate_bits_per_s:
            return None
        return rounded(max(self._share(a, b, way) for a, b in pairs))

    def _share(self, first: _Links, last: _Links, way: str) -> float:
        """The largest share of any link between two readings."""
        before, after = getattr(first, way), getattr(last, way)
        allowed = self.link_rate_bits_per_s / 8 * (last.at_s - first.at_s)
        # A switch that was started again counts from 0.
        moved = [max(0, after[port] - before.get(port, 0)) for port in self.ports & after.keys()]
        return float(max(moved)) / allowed


def _busy_between(a: _Processors, b: _Processors, whose: str, processors: int) -> float:
    return max(0.0, float(getattr(b, whose) - getattr(a, whose))) / (processors * (b.at_s - a.at_s))


def _mean_of(samples: list[_Processors], whose: str, processors: int) -> float | None:
    if len(samples) < 2:
        return None
    return rounded(_busy_between(samples[0], samples[-1], whose, processors))


@contextlib.asynccontextmanager
async def measured(pool: Pool) -> AsyncIterator[Load]:
    """Measure while this is entered; afterwards the load has everything."""
    load = Load(
        pool.options.link_rate_bits_per_s,
        frozenset(str(host.switch_port) for host in pool.star.hosts),
        len(os.sched_getaffinity(0)),
    )
    task = asyncio.create_task(_sample(pool, load))
    try:
        yield load
    finally:
        task.cancel()
        await asyncio.wait([task])
        _read(pool, load)


async def _sample(pool: Pool, load: Load) -> None:
    while True:
        _read(pool, load)
        await asyncio.sleep(_SAMPLE_S)


def _read(pool: Pool, load: Load) -> None:
    pool_s = time.process_time() + sum(processor_time_s(pid) for pid in pool.pids.values() if pid)
    load.samples.append(_Processors(time.monotonic(), pool_s, machine_time().busy_s))
    links = read_links(pool.switch_stats_path)
    if links is not None and (not load.links or links.at_s > load.links[-1].at_s):
        load.links.append(links)


def read_links(stats: Path) -> _Links | None:
    """What the switch wrote of its ports last; None if it writes nothing."""
    try:
        written = json.loads(stats.read_text())
    except (OSError, ValueError):
        return None
    ports = written["ports"]
    return _Links(
        written["time_s"],
        {number: port["rx_bytes"] for number, port in ports.items()},
        {number: port["tx_bytes"] for number, port in ports.items()},
    )
