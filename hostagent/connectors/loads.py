"""Loads on a worker: which parts have come, and what may still be written.

Owns: each load from its start to its report, its deadline, how much of a prefix is whole, and that
nothing is written into the engine's memory once the load was reported. Must not know: engines,
sockets, clocks, bytes.

A load's parts are its blocks times the groups of layers that each consists of, in that order. A
prefix is worth what comes before its first gap; so a part that is not to be had ends all behind it.

A load by layers is reported when the engine's step is over. It counts only if the engine has waited
for every group of layers before it computed with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvcast.hostagent.connectors.planner import Load
from kvcast.hostagent.connectors.weighing import Meter


@dataclass(frozen=True, slots=True)
class Ended:
    """A load's report: how many of its blocks are whole, from the first; why not the next one (""
    if all are); which of the engine's block ids hold nothing of use."""

    load: Load
    came: int
    reason: str

    @property
    def bad_block_ids(self) -> set[int]:
        return {i for ids in self.load.block_ids for i in ids[self.came :]}


class OpenLoad:
    """One load under way. `groups`: parts of each block. Its methods may be called by several
    threads; `write` runs what it is given while no report can be made."""

    def __init__(self, load: Load, groups: int, now: float) -> None:
        self.load = load
        self.groups = groups
        self.started_at = now
        self.deadline = now + load.left_s
        self._left = [groups] * len(load.hashes)
        self._there = bytearray(len(load.hashes) * groups)
        self._gap = len(load.hashes) * groups
        self._reason = ""
        self._end_reason = ""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = False
        self._reported = False
        self._awaited: set[int] = set()
        self._whole = 0

    @property
    def gap(self) -> int:
        """The first part that will not come; all behind it are of no use."""
        return self._gap

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def complete(self) -> bool:
        """Whether everything before the gap has come."""
        return self.whole >= self._gap // self.groups

    @property
    def whole(self) -> int:
        """How many blocks, from the first, have come as a whole."""
        with self._lock:
            while self._whole < len(self._left) and not self._left[self._whole]:
                self._whole += 1
            return self._whole

    def write(self, part: int, copy: Callable[[], None]) -> bool:
        """Do `copy`, which writes this part into the engine's memory, unless the load was reported
        or the part is of no use; whether it was done."""
        with self._lock:
            if self._ended or part >= self._gap:
                return False
            copy()
            self._left[part // self.groups] -= 1
            self._there[part] = 1
            self._changed.notify_all()
            return True

    def missed(self, part: int, reason: str) -> None:
        """This part cannot be had."""
        with self._lock:
            if part < self._gap:
                self._gap = part
                self._reason = reason
                self._changed.notify_all()

    def wait_for(self, group: int, timeout_s: float) -> bool:
        """Wait, no longer than that, until this group's parts of all blocks before the gap have
        come, or nothing more will come; whether that is so."""
        with self._changed:
            self._awaited.add(group)
            return self._changed.wait_for(lambda: self._ended or self._has(group), timeout_s)

    def _has(self, group: int) -> bool:
        whole = self._gap // self.groups
        return 0 not in self._there[group : whole * self.groups : self.groups]

    def stop(self, reason: str) -> None:
        """From here on nothing is written. `reason`: why something is missing that no part's miss
        explains."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._end_reason = reason
                self._changed.notify_all()

    def end(self, reason: str) -> Ended | None:
        """Stop the load, and report it, now and once. None if it was reported before."""
        self.stop(reason)
        with self._lock:
            if self._reported:
                return None
            self._reported = True
            if self.load.by_layers and len(self._awaited) < self.groups:
                return Ended(self.load, 0, "not_awaited")
            came = 0
            while came < len(self._left) and self._left[came] == 0:
                came += 1
            if came == len(self._left):
                return Ended(self.load, came, "")
            explained = self._reason and came * self.groups <= self._gap < (came + 1) * self.groups
            return Ended(self.load, came, self._reason if explained else self._end_reason)


class LoadTable:
    """The loads of one worker, and the reports that are to be taken."""

    def __init__(self) -> None:
        self._open: dict[int, OpenLoad] = {}
        self._reports: list[Ended] = []
        self._changed = threading.Condition()
        self.meter = Meter()

    @property
    def waiting(self) -> bool:
        """Whether a load is under way."""
        return bool(self._open)

    def begin(self, load: Load, groups: int, now: float) -> OpenLoad:
        """A load begins."""
        opened = OpenLoad(load, groups, now)
        with self._changed:
            self._open[load.number] = opened
        self.meter.opened(now)
        return opened

    def end(self, opened: OpenLoad, reason: str) -> None:
        """A load is over, unless it was before. One by layers is only stopped: `conclude`."""
        if opened.load.by_layers:
            opened.stop(reason)
        else:
            self.conclude(opened, reason)

    def conclude(self, opened: OpenLoad, reason: str) -> None:
        """Report a load, unless it was reported before."""
        report = opened.end(reason)
        if report is not None:
            self.meter.closed()
            with self._changed:
                self._open.pop(opened.load.number, None)
                self._reports.append(report)
                self._changed.notify_all()

    def cut(self, number: int, blocks: int) -> None:
        """Of a load that is under way only so many blocks are wanted, from its first: the others
        are computed sooner."""
        opened = self._open.get(number)
        if opened is not None and not opened.load.by_layers:
            opened.missed(blocks * opened.groups, "slower")
            if opened.complete:
                self.end(opened, "")

    def progress(self) -> dict[str, tuple[int, int]]:
        """Of the requests with loads under way: each load's number, and how many of its blocks have
        come, from the first."""
        return {
            opened.load.request: (number, opened.whole)
            for number, opened in list(self._open.items())
        }

    def take(self, now: float) -> list[Ended]:
        """Reports since the last call; those whose time is over are among them."""
        for opened in [o for o in list(self._open.values()) if now >= o.deadline]:
            self.end(opened, "deadline")
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def wait(self, timeout_s: float) -> None:
        """Wait for a report, no longer than that."""
        with self._changed:
            if self._open and not self._reports:
                self._changed.wait(timeout_s)
