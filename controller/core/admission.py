"""Admission: what a block is worth in the switch, and which blocks should be there.

Owns: the decayed counts behind a value, the value, and the choice of whom to admit and whom to
evict for it. Must not know: slots' numbers, tables, agents; time is given.

    value = expected reads in the next horizon × fan-out factor × bytes a read ÷ cells taken

*Reads* are READs of single segments. They are counted in two places, by the switch (heat digests
for what misses, `resident_hits` for what it serves) and by the home (its reports); the two see
the same reads, so the larger decayed count is taken, not their sum. A count S that halves every
`half_life_s` stands for a rate of S·ln 2/half_life. *Fan-out* is the number of readers seen
waiting at once, f: the factor 1 + log2(f)/2 says that a block that many want at once is worth
more than the same count from one (they wait for one link). Of equal values the shallower block in
its prefix goes first: it is of use to more prompts, and without it the deeper ones are of none.

*Hysteresis*: a block must be expected to be read `min_reads` times to be given free slots, and
`displace_reads` times to displace others, of which it must be worth `margin` times the sum; and a
resident stays for `min_stay_s`. A free slot costs nothing, so one read is enough to be given one:
each of a few nodes reads a block once and then has it, and the third of them can only be served if
the first was reason enough.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvcast.protocol.messages.wire import CHUNKS_PER_SEGMENT, SEGMENT_BYTES, BlockId, segments_of

MAX_CANDIDATES = 4096
"""Blocks whose heat is remembered; beyond it the least valuable eighth is forgotten."""


@dataclass(frozen=True)
class ValueOptions:
    """How heat becomes value.

    `half_life_s`: after which a read counts half; `horizon_s`: how far ahead reads are expected;
    `min_reads`, `displace_reads`: reads of a segment expected within the horizon, below which a
    block is not given free slots, or not those of others; `margin`: by how much a
    block must beat its victims; `keep_value`: bytes saved a cell from which an evicted block is
    made sure to live in DRAM; `min_stay_s`: how long a resident is safe from displacement.
    """

    half_life_s: float = 20.0
    horizon_s: float = 30.0
    min_reads: float = 0.9
    displace_reads: float = 2.0
    margin: float = 1.25
    keep_value: float = 1024.0
    min_stay_s: float = 5.0


@dataclass
class Heat:
    """What is known of one block's reads, as of `at`."""

    at: float
    switch_reads: float = 0.0
    home_reads: float = 0.0
    fan_out: float = 1.0
    depth: int = 0
    segments: int = 1
    size_bytes: int = 0


@dataclass(frozen=True)
class Holder:
    """A resident as far as its value matters."""

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
class Choice:
    """What to do now: evict these for a later admission, admit these into free slots.

    `refused` says of the others why they stay out.
    """

    admit: list[tuple[Contender, str]] = field(default_factory=list)
    evict: list[tuple[BlockId, str]] = field(default_factory=list)
    refused: list[tuple[Contender, str]] = field(default_factory=list)


class HeatMap:
    """Decayed read counts by block, bounded."""

    def __init__(self, options: ValueOptions, limit: int = MAX_CANDIDATES) -> None:
        self._options = options
        self._limit = limit
        self._heat: dict[BlockId, Heat] = {}
        self.forgotten = 0
        """Blocks dropped at the bound."""

    def __len__(self) -> int:
        return len(self._heat)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._heat

    def seen_by_switch(
        self, block: BlockId, *, segment: int, reads: float, fan_out: int, now: float
    ) -> None:
        """The switch counted `reads` READs of one segment, `fan_out` ports waiting at once."""
        heat = self._touch(block, now)
        heat.switch_reads += reads
        heat.fan_out = max(heat.fan_out, float(fan_out))
        heat.segments = max(heat.segments, segment + 1)

    def seen_by_home(
        self,
        block: BlockId,
        *,
        reads: float,
        readers: int,
        depth: int,
        size_bytes: int,
        now: float,
    ) -> None:
        """The home answered `reads` READs from `readers` nodes."""
        heat = self._touch(block, now)
        heat.home_reads += reads
        heat.fan_out = max(heat.fan_out, float(readers))
        heat.depth = depth or heat.depth
        heat.size_bytes = size_bytes
        heat.segments = segments_of(size_bytes)

    def served(self, block: BlockId, reads: float, now: float) -> None:
        """The switch served `reads` READs from a resident."""
        self._touch(block, now).switch_reads += reads

    def described(self, block: BlockId, size_bytes: int, now: float) -> None:
        """The block's true size."""
        heat = self._touch(block, now)
        heat.size_bytes, heat.segments = size_bytes, segments_of(size_bytes)

    def forget(self, namespaces: Collection[int]) -> None:
        """Know nothing of these namespaces' blocks."""
        self._heat = {b: heat for b, heat in self._heat.items() if b.namespace not in namespaces}

    def _touch(self, block: BlockId, now: float) -> Heat:
        heat = self._heat.get(block)
        if heat is None:
            if len(self._heat) >= self._limit:
                self._forget(now)
            heat = self._heat[block] = Heat(at=now)
        decay = self._decay(heat, now)
        heat.switch_reads *= decay
        heat.home_reads *= decay
        heat.fan_out = 1 + (heat.fan_out - 1) * decay
        heat.at = max(heat.at, now)
        return heat

    def _decay(self, heat: Heat, now: float) -> float:
        return float(0.5 ** (max(0.0, now - heat.at) / self._options.half_life_s))

    def _forget(self, now: float) -> None:
        worst = sorted(self._heat, key=lambda block: self.value(block, now))
        for block in worst[: max(1, self._limit // 8)]:
            del self._heat[block]
            self.forgotten += 1

    def expected_reads(self, block: BlockId, now: float) -> float:
        """READs of the block's segments within the horizon; 0 for an unknown block."""
        heat = self._heat.get(block)
        if heat is None:
            return 0.0
        count = max(heat.switch_reads, heat.home_reads) * self._decay(heat, now)
        return count * math.log(2) / self._options.half_life_s * self._options.horizon_s

    def value(self, block: BlockId, now: float) -> float:
        """Bytes saved a cell over the horizon; 0 for an unknown block."""
        heat = self._heat.get(block)
        if heat is None:
            return 0.0
        expected = self.expected_reads(block, now)
        fan_out = 1 + (heat.fan_out - 1) * self._decay(heat, now)
        bytes_a_read = heat.size_bytes / heat.segments if heat.size_bytes else SEGMENT_BYTES
        cells = heat.segments * CHUNKS_PER_SEGMENT
        return expected * (1 + math.log2(max(fan_out, 1.0)) / 2) * bytes_a_read / cells

    def depth(self, block: BlockId) -> int:
        heat = self._heat.get(block)
        return heat.depth if heat else 0

    def best(self, count: int, now: float, *, without: Iterable[BlockId]) -> list[BlockId]:
        """The `count` most valuable blocks that are worth admitting, best first."""
        excluded = set(without)
        valued = [
            (-self.value(block, now), heat.depth, block)
            for block, heat in self._heat.items()
            if block not in excluded and self.expected_reads(block, now) >= self._options.min_reads
        ]
        valued.sort()
        return [block for _, _, block in valued[:count]]


def choose(
    contenders: Sequence[Contender],
    holders: Sequence[Holder],
    *,
    free: int,
    coming_free: int,
    heat: HeatMap,
    options: ValueOptions,
    now: float,
) -> Choice:
    """Whom to admit now and whom to evict for later; all segments of a block or none.

    `free`: slots that can be taken now; `coming_free`: slots that will be free by themselves
    (they are counted before anybody is evicted, so that one wish evicts once).
    """
    choice = Choice()
    victims = sorted(
        (h for h in holders if not h.pinned),
        key=lambda h: (heat.value(h.block, now), -heat.depth(h.block), h.block),
    )
    order = sorted(
        contenders,
        key=lambda c: (not c.pinned, -heat.value(c.block, now), heat.depth(c.block), c.block),
    )
    for contender in order:
        wanted = segments_of(contender.size_bytes)
        value = heat.value(contender.block, now)
        reads = heat.expected_reads(contender.block, now)
        if not contender.pinned and reads < options.min_reads:
            choice.refused.append(
                (contender, f"{reads:.1f} reads expected, fewer than {options.min_reads:g}")
            )
            continue
        if wanted <= free:
            free -= wanted
            why = "pinned" if contender.pinned else f"value {value:.0f}, free slots"
            choice.admit.append((contender, why))
            continue
        if wanted <= free + coming_free:
            coming_free -= wanted - free
            free = 0
            choice.refused.append((contender, "waits for slots to drain"))
            continue
        if not contender.pinned and reads < options.displace_reads:
            choice.refused.append(
                (contender, f"{reads:.1f} reads expected, too few to displace others")
            )
            continue
        chosen: list[Holder] = []
        gained = free + coming_free
        for victim in victims:
            if gained >= wanted:
                break
            if contender.pinned or now - victim.admitted_at >= options.min_stay_s:
                chosen.append(victim)
                gained += victim.slots
        if gained < wanted:
            choice.refused.append((contender, f"needs {wanted} slots, {gained} can be had"))
            continue
        price = sum(heat.value(v.block, now) * v.slots for v in chosen)
        if not contender.pinned and value * wanted < options.margin * price:
            choice.refused.append(
                (contender, f"value {value * wanted:.0f} < {options.margin:g} × {price:.0f}")
            )
            continue
        for victim in chosen:
            victims.remove(victim)
            reason = "for a pinned block" if contender.pinned else (
                f"value {heat.value(victim.block, now):.0f}, displaced by {value:.0f}"
            )  # fmt: skip
            choice.evict.append((victim.block, reason))
        coming_free = gained - wanted
        free = 0
        choice.refused.append((contender, "waits for its victims' slots"))
    return choice
