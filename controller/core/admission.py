"""Admission: what a block is worth in the switch, and which blocks should be there.

Owns: the decayed counts behind a value, the value, and the choice of whom to admit and whom to
evict for it. Must not know: slots' numbers, tables, agents; time is given.

    value = expected reads in the next horizon × fan-out factor × bytes a read ÷ cells taken

*Reads* are READs of single segments. Two parts count them: the switch (heat digests for those that
miss, `resident_hits` for those that it serves) and the home (its reports). Both see the same reads.
So the larger of the two decayed counts is taken, not their sum. A count S that halves every
half-life stands for a rate of S·ln 2/half_life.

*Half-life*: counts halve after as many reads as the switch has slots, since a block that was not
among so many reads is hardly wanted any more. This takes at least `least_half_life_s`, because
homes report in turns, and a report is not worth more for coming last. It takes at most
`half_life_s`.

*Fan-out* is f, the number of readers that were seen waiting at once. They wait for one link, so a
block that many want at once is worth more than one with the same count from one reader. The factor
is 1 + log2(f)/2.

*Depth*: of two blocks of equal value, the one with fewer blocks before it in its prefix goes first.
It is of use to more prompts, and without it the deeper ones are of no use.

One of two *rules* holds; `ghosts` finds out which.

- `value` has hysteresis. A block is given free slots if `min_reads` reads of it are expected (READs
  of each of its segments: a large block takes more of them). It displaces others if
  `displace_reads` are expected, and if it is worth `margin` times the sum of their values. A
  resident is safe for `min_stay_s`.
- `recent` has none. The block that was read last is worth the most, and displaces those that were
  read before it.

By default one read is enough for free slots, since these cost nothing. When a few nodes read a
block once each, the first read lets it in and the second fills it, so the third can be served. To
displace others takes six reads in short order: what it costs is a fill, and time in which the slots
answer nobody. Three are enough (half of `displace_reads`) where that pays: where blocks that were
read twice are read `EAGER_FROM` times more, on average, by what `reuse` has learned.

*Quotas*: a namespace may have a `Room` of its own, in slots. If it is full, a contender displaces
blocks of its own namespace, by the same rules. It displaces others only for the slots that it still
lacks.

*Dead* blocks have had their last read. Their counts are low, but so are those of blocks that are
read seldom. So under `value` a block may displace a resident for a second reason: by what `reuse`
has learned, it is `DEAD_MARGIN` times as likely to be read twice more as the resident is to be read
once more. (Twice, because the first of these reads only fills.)
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from kvcast.controller.core.ghosts import Rule, Standing
from kvcast.controller.core.reuse import COUNTS, Floats, Reuse, times_of
from kvcast.protocol.messages.control import HotBlock
from kvcast.protocol.messages.wire import (
    CELLS,
    CHUNKS_PER_SEGMENT,
    MAX_BLOCK_BYTES,
    SEGMENT_BYTES,
    BlockId,
)

Rows: TypeAlias = npt.NDArray[np.intp] | slice

_segments_of = functools.lru_cache(maxsize=1024)(CELLS.segments_of)
"""Cached, since the blocks of a pool have few sizes."""

MAX_CANDIDATES = 65_536
"""Blocks whose heat is remembered; beyond it the least valuable eighth is forgotten."""

BEST_WITH_QUOTA = 16
"""How many blocks `HeatMap.best` names, at most, of one namespace that has a quota."""
DEAD_MARGIN = 2.0
"""A block displaces a resident if its chance of being read twice more is so many times the
resident's chance of being read once more."""
EAGER_FROM = 2.5
"""Reads that a block must have on average, after its second, for half of `displace_reads` to be
enough. (Independent chats have 1.7, tensor-parallel engines 0.5, long shared prompts 4 to 7.)"""
REUSE_BLOCKS = 2048
"""From how many of the blocks whose heat is remembered `reuse` learns."""
REUSE_PERIOD_S = 0.5
"""How often the chances are computed anew from them."""

LEAST_FADE_READS = 64
"""Reads after which counts halve, at least. In a switch of fewer slots, one block's own reads would
make all counts fade."""


@dataclass(frozen=True)
class ValueOptions:
    """How heat becomes value.

    - `half_life_s`, `least_half_life_s`: the time after which a read counts half; the least such
      time, where many reads are heard of.
    - `horizon_s`: how far ahead reads are expected. It is for `half_life_s`, and shrinks with the
      half-life.
    - `min_reads`, `displace_reads`: READs of each of the block's segments that must be expected
      within the horizon to be given free slots, or the slots of others; of the latter, half may do
      (see the module's text).
    - `margin`: by what factor a block must be worth more than its victims.
    - `keep_value`: in bytes saved a cell. Of an evicted block that is worth as much, the controller
      makes sure that it lives in DRAM.
    - `min_stay_s`: how long a resident is safe from displacement.
    """

    half_life_s: float = 20.0
    least_half_life_s: float = 1.0
    horizon_s: float = 30.0
    min_reads: float = 0.9
    displace_reads: float = 4.0
    margin: float = 1.25
    keep_value: float = 1024.0
    min_stay_s: float = 1.0


@dataclass(frozen=True)
class Holder:
    """A resident, as far as the choice needs to know it."""

    block: BlockId
    slots: int
    pinned: bool
    admitted_at: float


@dataclass(frozen=True)
class Contender:
    """A block that is to be admitted, described by its home; `pinned` outranks every value."""

    block: BlockId
    size_bytes: int
    digest: int
    pinned: bool


@dataclass
class Room:
    """What a namespace's quota leaves it, in slots.

    `most`: the quota; `free`: what it may take now (below 0 if the quota was made smaller);
    `coming_free`: what will be free by itself.
    """

    most: int
    free: int
    coming_free: int

    def reserve(self, wanted: int) -> int:
        """Take `wanted` slots; returns how many of them must come free first."""
        late = min(wanted, max(0, wanted - self.free))
        self.free -= wanted - late
        self.coming_free -= late
        return late


@dataclass
class Choice:
    """What to do now, each with its reason.

    `admit`: into free slots; `evict`: for a later admission; `refused`: why the others stay out.
    """

    admit: list[tuple[Contender, str]] = field(default_factory=list)
    evict: list[tuple[BlockId, str]] = field(default_factory=list)
    refused: list[tuple[Contender, str]] = field(default_factory=list)


class Look(NamedTuple):
    """What is known of one block at one time."""

    value: float
    """Bytes that each cell saves within the horizon."""
    expected_reads: float
    """READs of each of the block's segments that are expected within the horizon."""
    depth: int
    """Blocks before it in its prefix."""


_UNKNOWN = Look(0.0, 0.0, 0)
_ALL = slice(None)


class HeatMap:
    """Decayed read counts by block, bounded.

    Each block has a row; counts, fan-out and time are columns. So an event changes a few numbers,
    and a look at all blocks is a few operations on whole columns. An unused row has no reads.

    `rule` says how blocks are compared. The method `value` always goes by the rule `value`.
    `slots`: how many the switch has. Counts halve after as many reads; if 0, with time alone.
    """

    def __init__(
        self, options: ValueOptions, limit: int = MAX_CANDIDATES, *, slots: int = 0
    ) -> None:
        self._options = options
        self._slots = slots
        self._now = -inf
        self._aged = 0.0
        """Half-lives since the beginning."""
        self._owed = 0.0
        """Half-lives, at most one, that reads have earned, and that count only as time passes (see
        `least_half_life_s`)."""
        self._limit = limit
        self.rule = Rule.VALUE
        self._rows: dict[BlockId, int] = {}
        self._blocks: list[BlockId | None] = []
        self._free: list[int] = []
        self._at = array("d")
        """When the row was last brought up to date, in half-lives since the beginning."""
        self._switch_reads = array("d")
        self._home_reads = array("d")
        self._read_at = array("d")
        self._heard_at = array("d")
        """When a home or the switch last reported answered reads of the block."""
        self._times_read = array("b")
        """Answered reads of the whole block that were reported; COUNTS if more."""
        self._reuse = Reuse()
        self._chances = np.zeros((COUNTS, 0))
        self._chances_at = -inf
        self._fan_out = array("d")
        self._depth = array("q")
        self._segments = array("q")
        self._size_bytes = array("q")
        self._namespace = array("q")
        self._reads_a_count = math.log(2) / options.half_life_s * options.horizon_s
        self.forgotten = 0
        """Blocks that were dropped because there are `limit` already."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._rows

    def seen_by_switch(
        self, block: BlockId, *, segment: int, reads: float, fan_out: int, now: float
    ) -> None:
        """The switch counted `reads` READs of one segment, `fan_out` ports waiting at once."""
        row = self._touch(block, now)
        self._switch_reads[row] += reads
        self._read_at[row] = now
        self._fan_out[row] = max(self._fan_out[row], fan_out)
        self._segments[row] = max(self._segments[row], segment + 1)

    def seen_by_home(self, reports: Mapping[BlockId, HotBlock], now: float) -> None:
        """The home answered READs of these blocks. (All rows at once, since homes report hundreds
        of blocks at a time, and that is most of what a controller hears.)"""
        blocks, at_once = list(reports), max(1, self._limit // 8)
        for first in range(0, len(blocks), at_once):
            self._seen_by_home(blocks[first : first + at_once], reports, now)

    def _seen_by_home(
        self, blocks: Sequence[BlockId], reports: Mapping[BlockId, HotBlock], now: float
    ) -> None:
        """Of no more blocks than are forgotten at once, so that there is room for all."""
        heard = [reports[block] for block in blocks]
        reads = np.array([report.reads for report in heard], np.float64)
        sizes = [min(report.size_bytes, MAX_BLOCK_BYTES) for report in heard]
        rows = self._touch_all(blocks, now)
        self._heard(float(reads.sum()))
        np.frombuffer(self._home_reads)[rows] += reads
        np.frombuffer(self._read_at)[rows] = now
        fan_out, depth = np.frombuffer(self._fan_out), np.frombuffer(self._depth, np.int64)
        fan_out[rows] = np.maximum(fan_out[rows], [report.readers for report in heard])
        depth[rows] = [
            report.depth or was for report, was in zip(heard, depth[rows].tolist(), strict=True)
        ]
        np.frombuffer(self._size_bytes, np.int64)[rows] = sizes
        np.frombuffer(self._segments, np.int64)[rows] = [_segments_of(size) for size in sizes]
        times, told = np.frombuffer(self._times_read, np.int8), rows < REUSE_BLOCKS
        times[rows[~told]] = np.minimum(times[rows[~told]] + 1, COUNTS)
        for place in np.flatnonzero(told).tolist():
            self._answered(int(rows[place]), heard[place].reads, now)

    def served(self, block: BlockId, reads: float, now: float) -> None:
        """The switch served `reads` READs from a resident."""
        row = self._touch(block, now)
        self._heard(reads)
        self._switch_reads[row] += reads
        self._read_at[row] = now
        if row < REUSE_BLOCKS:
            self._answered(row, reads, now)
        elif self._times_read[row] < COUNTS:
            self._times_read[row] += 1

    def _answered(self, row: int, reads: float, now: float) -> None:
        """Note that the row's block was read again, for `reuse`."""
        before = self._times_read[row]
        times = before + max(1, round(reads / self._segments[row]))
        if before:
            self._reuse.read_again(before - 1, now - self._heard_at[row])
        for so_far in range(before + 1, min(times, COUNTS)):
            self._reuse.read_again(so_far - 1, 0.0)
        if (further := times - max(before + 1, COUNTS)) > 0:
            self._reuse.read_again(COUNTS - 1, 0.0, further)
        self._times_read[row] = min(times, COUNTS)
        self._heard_at[row] = now

    def segments(self, block: BlockId) -> int:
        """How many segments a known block has."""
        return self._segments[self._rows[block]]

    def standings(self, block: BlockId, now: float) -> dict[Rule, Standing]:
        """How each rule ranks a block that was just read (`seen_by_home`, `served`)."""
        row, options = self._rows[block], self.options_under(Rule.VALUE)
        count = max(self._switch_reads[row], self._home_reads[row])
        rank = math.log2(count / self._segments[row]) if count > 0 else -inf
        rank += self._age(now)
        enough = count / self._segments[row] * self._reads_a_count >= options.displace_reads
        displaces = rank - math.log2(options.margin) if enough else -inf
        return {Rule.VALUE: Standing(rank, displaces), Rule.RECENT: Standing(now, now)}

    def options_under(self, rule: Rule) -> ValueOptions:
        """The options in force under a rule, as things are."""
        options = self._options
        if rule is Rule.RECENT:
            return replace(options, min_reads=0.0, displace_reads=0.0, margin=1.0, min_stay_s=0.0)
        if self._reuse.reads_after_second() < EAGER_FROM:
            return options
        return replace(options, displace_reads=options.displace_reads / 2)

    def described(self, block: BlockId, size_bytes: int, now: float) -> None:
        """Note the block's true size."""
        row = self._touch(block, now)
        self._size_bytes[row] = size_bytes
        self._segments[row] = _segments_of(size_bytes)

    def forget(self, namespaces: Collection[int]) -> None:
        """Forget the blocks of these namespaces."""
        self._drop([block for block in self._rows if block.namespace in namespaces])

    def _age(self, now: float) -> float:
        """How many half-lives have passed by now."""
        options = self._options
        since_s = now - self._now
        if since_s > 0:
            if since_s < inf:
                at_least = since_s / options.half_life_s
                at_most = since_s / min(options.least_half_life_s, options.half_life_s)
                paid = min(self._owed, at_most - at_least)
                self._owed -= paid
                self._aged += at_least + paid
            self._now = now
        return self._aged

    def _heard(self, reads: float) -> None:
        if self._slots and self._owed < 1.0:
            self._owed = min(1.0, self._owed + reads / max(self._slots, LEAST_FADE_READS))

    def _touch(self, block: BlockId, now: float) -> int:
        """The block's row, brought up to date. (Of one block: a ninth of what arrays take.)"""
        row = self._rows.get(block)
        if row is None:
            if len(self._rows) >= self._limit:
                self._forget(now)
            self._new([block], now)
            return self._rows[block]
        aged = self._age(now)
        if aged > self._at[row]:
            decay = 0.5 ** (aged - self._at[row])
            self._switch_reads[row] *= decay
            self._home_reads[row] *= decay
            self._fan_out[row] = 1 + (self._fan_out[row] - 1) * decay
            self._at[row] = aged
        return row

    def _touch_all(self, blocks: Sequence[BlockId], now: float) -> npt.NDArray[np.intp]:
        """The blocks' rows, brought up to date; no more than are forgotten at once."""
        new = [block for block in blocks if block not in self._rows]
        if len(self._rows) + len(new) > self._limit:
            self._forget(now)
            new = [block for block in blocks if block not in self._rows]
        if new:
            self._new(new, now)
        rows = np.array([self._rows[block] for block in blocks], np.intp)
        at, aged = np.frombuffer(self._at), self._age(now)
        decays = np.exp2(at[rows] - aged)
        for reads in (self._switch_reads, self._home_reads):
            np.frombuffer(reads)[rows] *= decays
        fan_out = np.frombuffer(self._fan_out)
        fan_out[rows] = 1 + (fan_out[rows] - 1) * decays
        at[rows] = aged
        return rows

    def _new(self, blocks: Sequence[BlockId], now: float) -> None:
        """Give these blocks rows."""
        lacking = len(blocks) - len(self._free)
        if lacking > 0:
            first = len(self._blocks)
            self._free += range(first + lacking - 1, first - 1, -1)
            self._blocks += [None] * lacking
            for column in (self._at, self._switch_reads, self._home_reads, self._fan_out):
                column.extend([0.0] * lacking)
            for time in (self._read_at, self._heard_at):
                time.extend([-inf] * lacking)
            self._times_read.extend([0] * lacking)
            for number in (self._depth, self._segments, self._size_bytes, self._namespace):
                number.extend([0] * lacking)
        aged = self._age(now)
        for block in blocks:
            row = self._rows[block] = self._free.pop()
            self._blocks[row] = block
            self._namespace[row] = block.namespace
            self._at[row] = aged
            self._fan_out[row] = 1.0
            self._segments[row] = 1

    def _forget(self, now: float) -> None:
        count = max(1, self._limit // 8)
        values = self._values(now, _ALL, Rule.VALUE)  # a free row is worth nothing
        rows = np.argpartition(values, count - 1)[:count].tolist()
        blocks = [block for row in rows if (block := self._blocks[row]) is not None]
        self._drop(blocks)
        self.forgotten += len(blocks)

    def _drop(self, blocks: Sequence[BlockId]) -> None:
        rows = [self._rows.pop(block) for block in blocks]
        self._free += rows
        for row in rows:
            self._blocks[row] = None
        for reads in (self._switch_reads, self._home_reads):
            np.frombuffer(reads)[rows] = 0.0
        np.frombuffer(self._read_at)[rows] = -inf
        np.frombuffer(self._times_read, np.int8)[rows] = 0
        for number in (self._depth, self._size_bytes):
            np.frombuffer(number, np.int64)[rows] = 0

    def _decays(self, now: float, rows: Rows) -> Floats:
        decays: Floats = np.exp2(np.frombuffer(self._at)[rows] - self._age(now))
        return decays

    def _expected(self, now: float, rows: Rows, rule: Rule) -> Floats:
        """READs of each segment of each row's block that are expected within the horizon. Under
        `recent`: inf for a block that was read within the last horizon, else 0."""
        if rule is Rule.RECENT:
            recent = now - np.frombuffer(self._read_at)[rows] <= self._options.horizon_s
            return np.where(recent, inf, 0.0)
        counts = np.maximum(
            np.frombuffer(self._switch_reads)[rows], np.frombuffer(self._home_reads)[rows]
        )
        segments = np.frombuffer(self._segments, np.int64)[rows]
        return counts / segments * self._decays(now, rows) * self._reads_a_count

    def _values(self, now: float, rows: Rows, rule: Rule) -> Floats:
        """Bytes that each cell saves within the horizon, of each row's block. Under `recent`: a
        number that falls with the time since the last read."""
        if rule is Rule.RECENT:
            return 1.0 / (1.0 + np.maximum(0.0, now - np.frombuffer(self._read_at)[rows]))
        fan_out = 1 + (np.frombuffer(self._fan_out)[rows] - 1) * self._decays(now, rows)
        segments = np.frombuffer(self._segments, np.int64)[rows]
        size_bytes = np.frombuffer(self._size_bytes, np.int64)[rows]
        bytes_a_read = np.where(size_bytes > 0, size_bytes / segments, SEGMENT_BYTES)
        factor = 1 + np.log2(np.maximum(fan_out, 1.0)) / 2
        return self._expected(now, rows, rule) * factor * bytes_a_read / CHUNKS_PER_SEGMENT

    def look_at(self, blocks: Iterable[BlockId], now: float) -> dict[BlockId, Look]:
        """What is known of each block; an unknown one has value, reads and depth 0."""
        looks = dict.fromkeys(blocks, _UNKNOWN)
        known = [block for block in looks if block in self._rows]
        if known:
            rows = np.array([self._rows[block] for block in known], np.intp)
            rule = self.rule
            columns = self._values(now, rows, rule), self._expected(now, rows, rule)
            depths = np.frombuffer(self._depth, np.int64)[rows]
            for block, *look in zip(known, *(c.tolist() for c in (*columns, depths)), strict=True):
                looks[block] = Look(*look)
        return looks

    def chances(self, blocks: Iterable[BlockId], now: float) -> dict[BlockId, tuple[float, float]]:
        """How likely each block is to be read once more, and twice more; 0 for an unknown one."""
        found = dict.fromkeys(blocks, (0.0, 0.0))
        known = [block for block in found if block in self._rows]
        if not known:
            return found
        if now - self._chances_at >= REUSE_PERIOD_S:
            times = np.frombuffer(self._times_read, np.int8)[:REUSE_BLOCKS].astype(np.intp)
            told = np.flatnonzero(times)
            waiting_s = now - np.frombuffer(self._heard_at)[told]
            self._chances = self._reuse.chances(times[told] - 1, waiting_s)
            self._chances_at = now
        rows = np.array([self._rows[block] for block in known], np.intp)
        classes = np.maximum(np.frombuffer(self._times_read, np.int8)[rows], 1).astype(np.intp) - 1
        once = self._chances[classes, times_of(now - np.frombuffer(self._read_at)[rows])]
        twice = once * self._chances[np.minimum(classes + 1, COUNTS - 1), 0]
        found.update(zip(known, zip(once.tolist(), twice.tolist(), strict=True), strict=True))
        return found

    def value(self, block: BlockId, now: float) -> float:
        """Bytes that each cell saves within the horizon; 0 for an unknown block."""
        row = self._rows.get(block)
        if row is None:
            return 0.0
        return float(self._values(now, np.array([row], np.intp), Rule.VALUE)[0])

    def best(
        self,
        count: int,
        now: float,
        *,
        without: Iterable[BlockId],
        quotas: Mapping[int, int] | None = None,
    ) -> list[BlockId]:
        """The `count` most valuable blocks that are worth admitting and fit the switch, best first.

        Namespaces with `quotas` (in slots) do not take part in that. Otherwise their blocks, which
        may find no room by the quota, would keep others out. The best of each such namespace
        follow behind, at most `BEST_WITH_QUOTA` of them.
        """
        if not self._blocks:
            return []
        expected = self._expected(now, _ALL, self.rule)
        worth = expected >= max(self._options.min_reads, 1e-9)
        if self._slots:
            worth &= np.frombuffer(self._segments, np.int64) <= self._slots
        worth[[self._rows[block] for block in without if block in self._rows]] = False
        rows = np.flatnonzero(worth)
        if not rows.size:
            return []
        values = self._values(now, rows, self.rule)
        if not quotas:
            return self._best_of(rows, values, count)
        namespaces = np.frombuffer(self._namespace, np.int64)[rows]
        segments = np.frombuffer(self._segments, np.int64)[rows]
        others = np.isin(namespaces, list(quotas), invert=True)
        best = self._best_of(rows[others], values[others], count)
        for namespace, slots in quotas.items():
            own = (namespaces == namespace) & (segments <= slots)
            best += self._best_of(rows[own], values[own], min(count, BEST_WITH_QUOTA))
        return best

    def _best_of(self, rows: npt.NDArray[np.intp], values: Floats, count: int) -> list[BlockId]:
        if rows.size > count:
            good = values >= np.partition(values, -count)[-count]
            rows, values = rows[good], values[good]
        depths = np.frombuffer(self._depth, np.int64)[rows]
        order = np.lexsort((rows, depths, -values))[:count]
        return [block for row in rows[order].tolist() if (block := self._blocks[row]) is not None]


def choose(
    contenders: Sequence[Contender],
    holders: Sequence[Holder],
    *,
    free: int,
    coming_free: int,
    heat: HeatMap,
    options: ValueOptions,
    now: float,
    rooms: Mapping[int, Room] | None = None,
) -> Choice:
    """Which blocks to admit now, and which to evict for later: whole blocks only.

    `free`: slots that can be taken now; `coming_free`: slots that will be free by themselves. Both
    are used before anything is evicted, so that no contender evicts twice. `rooms`: the `Room` of
    each namespace that has a quota; they are counted down here.
    """
    choice = Choice()
    looks = heat.look_at([*(c.block for c in contenders), *(h.block for h in holders)], now)
    victims = sorted(
        (h for h in holders if not h.pinned),
        key=lambda h: (looks[h.block].value, -looks[h.block].depth, h.block),
    )
    chances = heat.chances(looks, now) if heat.rule is Rule.VALUE else {}
    likely = [(chances[h.block][0], h) for h in victims] if chances else []
    likely.sort(key=lambda each: each[0])
    order = sorted(
        contenders,
        key=lambda c: (not c.pinned, -looks[c.block].value, looks[c.block].depth, c.block),
    )
    everywhere = Room(free + coming_free, free, coming_free)
    for contender in order:
        wanted = CELLS.segments_of(contender.size_bytes)
        namespace = contender.block.namespace
        own = (rooms or {}).get(namespace)
        value, reads, _ = looks[contender.block]
        if not contender.pinned and reads < options.min_reads:
            choice.refused.append(
                (contender, f"{reads:.1f} reads expected, fewer than {options.min_reads:g}")
            )
            continue
        if own is not None and wanted > own.most:
            choice.refused.append(
                (contender, f"needs {wanted} slots, its namespace's quota is {own.most}")
            )
            continue
        of_own = 0 if own is None else wanted - own.free
        if wanted <= everywhere.free and of_own <= 0:
            _reserve(everywhere, own, wanted)
            why = "pinned" if contender.pinned else f"value {value:.0f}, free slots"
            choice.admit.append((contender, why))
            continue
        of_own -= 0 if own is None else own.coming_free
        of_any = wanted - everywhere.free - everywhere.coming_free
        if of_any <= 0 and of_own <= 0:
            _reserve(everywhere, own, wanted)
            choice.refused.append((contender, "waits for slots to drain"))
            continue
        enough = 0.0 if contender.pinned or not chances else chances[contender.block][1]
        dead = [holder for chance, holder in likely if DEAD_MARGIN * chance < enough]
        reason = f"hardly read again, displaced by {value:.0f}"
        stay_s = options.min_stay_s
        chosen, lacks_own, lacks = _find(dead, namespace, of_own, of_any, now - stay_s)
        if lacks_own > 0 or lacks > 0:
            if not contender.pinned and reads < options.displace_reads:
                choice.refused.append(
                    (contender, f"{reads:.1f} reads expected, too few to displace others")
                )
                continue
            reason = "for a pinned block" if contender.pinned else f"displaced by {value:.0f}"
            until = inf if contender.pinned else now - stay_s
            chosen, lacks_own, lacks = _find(victims, namespace, of_own, of_any, until)
            if lacks_own > 0:
                assert own is not None
                choice.refused.append(
                    (contender, f"needs {wanted} slots, {wanted - lacks_own} can be had by its "
                     f"namespace's quota of {own.most}")
                )  # fmt: skip
                continue
            if lacks > 0:
                choice.refused.append(
                    (contender, f"needs {wanted} slots, {wanted - lacks} can be had")
                )
                continue
            price = sum(looks[v.block].value * v.slots for v in chosen)
            if not contender.pinned and value * wanted < options.margin * price:
                choice.refused.append(
                    (contender, f"value {value * wanted:.0f} < {options.margin:g} × {price:.0f}")
                )
                continue
        for victim in chosen:
            victims.remove(victim)
            choice.evict.append((victim.block, f"value {looks[victim.block].value:.0f}, {reason}"))
            everywhere.coming_free += victim.slots
            its_own = (rooms or {}).get(victim.block.namespace)
            if its_own is not None:
                its_own.coming_free += victim.slots
        likely = [each for each in likely if each[1] not in chosen]
        _reserve(everywhere, own, wanted)
        choice.refused.append((contender, "waits for its victims' slots"))
    return choice


def _find(
    victims: Sequence[Holder], namespace: int, of_own: int, of_any: int, until: float
) -> tuple[list[Holder], int, int]:
    """Victims, the first first, that together have `of_own` slots of the namespace's own and
    `of_any` slots in all. Only those that were admitted before `until` count. Also returns how
    many slots of the namespace's own, and in all, are still lacking (0 or less: none)."""
    chosen: list[Holder] = []
    if of_own > 0:
        mine = (v for v in victims if v.block.namespace == namespace)
        chosen = _slots_of((v for v in mine if v.admitted_at <= until), of_own)
    gained = sum(v.slots for v in chosen)
    rest = (v for v in victims if not chosen or v not in chosen)
    chosen += _slots_of((v for v in rest if v.admitted_at <= until), of_any - gained)
    return chosen, of_own - gained, of_any - sum(v.slots for v in chosen)


def _slots_of(victims: Iterable[Holder], wanted: int) -> list[Holder]:
    """The first victims that together have `wanted` slots, or all of them if they have fewer."""
    chosen: list[Holder] = []
    for victim in victims:
        if wanted <= 0:
            break
        chosen.append(victim)
        wanted -= victim.slots
    return chosen


def _reserve(everywhere: Room, own: Room | None, wanted: int) -> None:
    """Count so many slots as taken. A contender that waits for slots of its own namespace takes
    slots that come free, and leaves the free ones to others."""
    late = 0 if own is None else own.reserve(wanted)
    everywhere.reserve(wanted - late)
    everywhere.coming_free -= late
