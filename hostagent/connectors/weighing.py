"""Whether blocks come sooner from the pool than the engine computes them.

Owns: what both have taken of late, how much of a chain is loaded, when a load that is under way is
cut short, and when one is tried although computing seems sooner. Must not know: engines, clocks,
sockets, requests.

Times are seconds of one clock, blocks are the engine's. With `wait` for the blocks that others load
over the same link, and `busy` for the time in which the engine computes for others first,

    load k of n:  max(busy, latency + (wait + k) * load_block) + (n - k * came) * compute_block
    compute all:  busy + n * compute_block

`came` is the share of blocks that came of those that were asked for, so loads that fail cost what
they cost. As this is linear between the points where its form changes, three k are looked at: none,
all, and what comes while the engine computes for others anyway.

Nothing is known at first: then all is loaded, as if nobody weighed, and what the first blocks take
says whether to go on (`cut`). A pool shall cost nobody time: so loading is left when computing is
sooner, and taken up again when it is sooner by `MARGIN` of computing it all. While nothing is
loaded nothing is learned: so now and then a few blocks are loaded all the same, ever more seldom.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvcast.protocol.links.backoff import Pauses

MARGIN: Final = 0.15
"""By how much of computing it all loading must be better to be taken up again, and computing for a
load to be cut short."""
TRIED: Final = 0.25
"""A load is not judged before it has taken this share of the time that computing it would take."""
TRIED_LEAST_S: Final = 0.05
FIRST_BLOCKS: Final = 8
"""Blocks that are fetched ahead before it is known how fast they come."""
PROBE_BLOCKS: Final = 4
PROBE_S: Final = 5.0
PROBE_MOST_S: Final = 80.0
MEMORY_BLOCKS: Final = 256
"""What was seen counts half as much when so many blocks have been seen since, or asked for."""
MEMORY_TOKENS: Final = 16_384
PROBE_PATIENCE: Final = 2.0
"""A probe may take so many times longer than computing its blocks would."""
_LEAST_S: Final = 1e-9
TELLING_TOKENS: Final = 64
"""Of prompts: a step of fewer says little of what a token costs."""
WINDOW_FIRST: Final = 8
"""Parts that are asked for at once before it is known how fast they come."""
WINDOW_LEAST: Final = 4
WINDOW_MOST: Final = 1 << 16
WINDOW_S: Final = (0.1, 0.4)
"""Half a window that comes sooner than the first makes it larger, later than the second smaller."""
LATENCY_STEP: Final = 0.25
"""Weight of one observation of how long the first block of a load took."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a worker has seen of its loads: `blocks` that came within `seconds`, each since the one
    before; how often and how long a first one was waited for; for how long nothing has come. What
    this node's memory held is not counted."""

    blocks: float = 0.0
    seconds: float = 0.0
    starts: int = 0
    start_s: float = 0.0
    silent_s: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        """Of two workers, or of two spans of time."""
        return Pace(
            self.blocks + other.blocks,
            self.seconds + other.seconds,
            self.starts + other.starts,
            self.start_s + other.start_s,
            max(self.silent_s, other.silent_s),
        )


class Meter:
    """Takes the pace of one worker's loads, however many are under way. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._last = 0.0
        self._first = True
        self._seen = Pace()

    def opened(self, now: float) -> None:
        """A load begins."""
        with self._lock:
            if not self._open:
                self._last, self._first = now, True
            self._open += 1

    def closed(self) -> None:
        """A load is over."""
        with self._lock:
            self._open -= 1

    def came(self, now: float, blocks: float, *, near: bool) -> None:
        """So much of a block came. `near`: out of this node's memory, so it took no time that
        counts."""
        with self._lock:
            if not self._open:
                return
            since_s, self._last = max(0.0, now - self._last), now
            if near:
                return
            if self._first:
                self._first = False
                self._seen += Pace(starts=1, start_s=since_s)
            else:
                self._seen += Pace(blocks, since_s)

    def take(self, now: float) -> Pace | None:
        """What was seen since the last call; None: there is nothing to say."""
        with self._lock:
            seen, self._seen = self._seen, Pace()
            if self._open:
                seen += Pace(silent_s=max(0.0, now - self._last))
        return None if seen == Pace() else seen


class Steps:
    """How long an engine's steps take that compute prompts. `depth`: so many are under way at once,
    and one begins when the one `depth` before it has ended."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._tokens: deque[int] = deque()
        """Of prompts, of the steps under way; 0 where a step tells nothing."""
        self._since = 0.0
        """When the last step began; so the oldest under way is computed since then, at most."""

    def began(self, now: float, prompt_tokens: int, tokens: int) -> tuple[int, float] | None:
        """A step begins that computes `tokens`, so many of them of prompts. Of the step that has
        therefore ended: prompts' tokens, and seconds; None where it tells nothing."""
        told = self.ended(now) if len(self._tokens) >= self._depth else None
        telling = prompt_tokens >= TELLING_TOKENS and 2 * prompt_tokens >= tokens
        self._tokens.append(prompt_tokens if telling else 0)
        self._since = now
        return told

    def ended(self, now: float) -> tuple[int, float] | None:
        """The oldest step has ended, if one was under way; as `began`."""
        if not self._tokens:
            return None
        tokens, since, self._since = self._tokens.popleft(), self._since, now
        return (tokens, now - since) if tokens else None

    @property
    def single(self) -> bool:
        """Whether whatever the engine asks or tells says that its step has ended."""
        return self._depth == 1

    def rests(self) -> None:
        """The engine has nothing to do; what passes until its next step is nobody's time."""
        self._tokens.clear()


class Window:
    """How many parts of blocks to have asked for at once: what the link brings in a moment. What
    was asked for comes, wanted or not, and keeps what is asked for later from coming; so on a slow
    link little is, and a load can still be cut short."""

    def __init__(self) -> None:
        self.parts = WINDOW_FIRST

    def came(self, parts: int, seconds: float) -> None:
        """So many parts that were asked for together came within so many seconds."""
        if seconds < WINDOW_S[0] and 2 * parts >= self.parts // 2:
            self.parts = min(2 * self.parts, WINDOW_MOST)
        elif seconds > WINDOW_S[1]:
            self.parts = max(self.parts // 2, WINDOW_LEAST)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many blocks to load, and why not more or less."""

    blocks: int
    why: str
    """One of these words:

    - `unmeasured`: it is not known yet what loading or computing takes;
    - `sooner`: loading all of it is sooner;
    - `part`: so much comes while the engine is busy anyway;
    - `probe`: computing is sooner; a few blocks, to see whether that is still so;
    - `slower`: computing is sooner;
    - `failing`: computing is sooner, since too few of the blocks come that are asked for;
    - `deadline`: no more comes before the deadline;
    - `near`: what is not in this node's memory is computed sooner.
    """


@dataclass(frozen=True, slots=True)
class Weighed:
    """Of prefixes that the pool held, how many were loaded as a whole, in part, and not at all."""

    whole: int = 0
    part: int = 0
    computed: int = 0

    @classmethod
    def of(cls, held: int, came: int) -> Weighed:
        """One of which so many blocks were held, and so many loaded."""
        return cls(int(came >= held), int(0 < came < held), int(came <= 0 < held))

    def __add__(self, other: Weighed) -> Weighed:
        return Weighed(
            self.whole + other.whole, self.part + other.part, self.computed + other.computed
        )

    @property
    def outcome(self) -> str:
        """Of one: the name of what became of it."""
        return "whole" if self.whole else "part" if self.part else "computed"


@dataclass(slots=True)
class Loading:
    """A load under way: `left` of its `count` blocks have not come; it began at `since`. `probe`:
    it was begun to see how fast it is."""

    number: int
    count: int
    left: int
    since: float
    probe: bool = False


@dataclass(slots=True)
class _Quotient:
    """Of two sums, in which what is long past counts little."""

    memory: float
    over: float = 0.0
    under: float = 0.0

    def add(self, over: float, under: float, *, rare: bool) -> None:
        """`rare`: there are few observations, so that one counts as much as all before it."""
        weight = min(1.0, under / self.under) if rare and self.under else 1.0
        self.over = self.over * weight + over
        self.under = self.under * weight + under
        if self.under > self.memory:
            self.over /= 2
            self.under /= 2


class Weighing:
    """One scheduler's. `block_tokens`: tokens of a block; `whole`: less than a whole chain is of no
    use to the engine; `keeps`: of a load that is cut, the engine uses what came."""

    def __init__(self, block_tokens: int, *, whole: bool = False, keeps: bool = True) -> None:
        self._block_tokens = block_tokens
        self._whole = whole
        self._keeps = keeps and not whole
        self._load = _Quotient(MEMORY_BLOCKS)
        self._compute = _Quotient(MEMORY_TOKENS)
        self._came = _Quotient(MEMORY_BLOCKS)
        self._latency_s = 0.0
        self._silent_s = 0.0
        self.loads = True
        """Whether loading was found to be worth it when that was last looked at."""
        self._probes = Pauses(PROBE_S, PROBE_MOST_S)

    # --- what is seen ---------------------------------------------------------------------------

    def heard(self, pace: Pace) -> None:
        """What the workers have seen of their loads since they last said so."""
        if pace.blocks:
            self._load.add(pace.seconds, pace.blocks, rare=not self.loads)
        if pace.starts:
            sample = pace.start_s / pace.starts
            known = self._latency_s
            self._latency_s = known + LATENCY_STEP * (sample - known) if known else sample
        self._silent_s = pace.silent_s

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of prompts in so many seconds."""
        if tokens > 0 and seconds > 0:
            self._compute.add(seconds, tokens, rare=False)

    def ended(self, asked: int, came: int) -> None:
        """A load has ended of which nothing was cut."""
        self._came.add(came, asked, rare=not self.loads)

    # --- what that means ------------------------------------------------------------------------

    @property
    def measured(self) -> bool:
        """Whether both ways are known, so that one of them can be left."""
        return bool(self._load.under and self._compute.under)

    @property
    def load_block_s(self) -> float:
        """What a block of a load takes that is under way; 0: not known."""
        return max(_LEAST_S, self._load.over / self._load.under) if self._load.under else 0.0

    @property
    def compute_block_s(self) -> float:
        """What it takes to compute a block; 0: not known."""
        known = self._compute
        return self._block_tokens * known.over / known.under if known.under else 0.0

    @property
    def came_share(self) -> float:
        """Of the blocks that were asked for, how many came."""
        return self._came.over / self._came.under if self._came.under else 1.0

    @property
    def shown(self) -> dict[str, float]:
        """What was measured, by the names of `counters.GAUGES`; empty before it was."""
        if not self.measured:
            return {}
        return {
            "load_block_seconds": self.load_block_s,
            "compute_block_seconds": self.compute_block_s,
            "load_came_share": self.came_share,
        }

    @property
    def paces(self) -> tuple[float, float]:
        """Tokens a second that come, and that are computed; 0: not known."""
        tokens = self._block_tokens
        load_s, compute_s = self.load_block_s, self.compute_block_s
        return tokens / load_s if load_s else 0.0, tokens / compute_s if compute_s else 0.0

    def ahead(self, blocks: int, wait: int, busy_tokens: int) -> int:
        """How many blocks to fetch ahead for a request that has just arrived, which the engine will
        ask for later. Arguments as those of `take`."""
        if not self._load.under:
            return min(blocks, max(0, FIRST_BLOCKS - wait))
        return self._weighed(blocks, wait, busy_tokens).blocks

    def take(self, now: float, blocks: int, wait: int, busy_tokens: int, left_s: float) -> Verdict:
        """How many of these to load, from the first. `wait`: blocks that other requests load;
        `busy_tokens`: tokens that the engine computes before; `left_s`: when the load must have
        ended."""
        if not self.measured:
            return Verdict(blocks, "unmeasured")
        verdict = self._weighed(blocks, wait, busy_tokens)
        if verdict.blocks or self.loads:
            self._probes.worked()
            self._probes.failed(now)
        self.loads = verdict.blocks > 0
        if self.loads:
            room = max(0, int((left_s - self._latency_s) / self.load_block_s) - wait)
            if room < verdict.blocks:
                return Verdict(0 if self._whole else room, "deadline")
            return verdict
        if wait or not self._probes.may_try(now):
            return verdict
        self._probes.failed(now)
        return Verdict(blocks if self._whole else min(blocks, PROBE_BLOCKS), "probe")

    def _weighed(self, blocks: int, wait: int, busy_tokens: int) -> Verdict:
        if not self.measured:
            return Verdict(blocks, "unmeasured")
        load_s, compute_s = self.load_block_s, self.compute_block_s
        busy_s = busy_tokens * compute_s / self._block_tokens
        came = self.came_share

        def cost_s(k: int, share: float = came) -> float:
            ready_s = self._latency_s + (wait + k) * load_s if k else 0.0
            return max(busy_s, ready_s) + (blocks - k * share) * compute_s

        meanwhile = max(0, min(blocks, int((busy_s - self._latency_s) / load_s) - wait))
        best = meanwhile if meanwhile and not self._whole else blocks
        best = min(best, blocks, key=cost_s)
        margin_s = 0.0 if self.loads else MARGIN * blocks * compute_s
        if cost_s(best) <= cost_s(0) - margin_s:
            return Verdict(best, "sooner" if best == blocks else "part")
        return Verdict(0, "failing" if cost_s(blocks, 1.0) <= cost_s(0) else "slower")

    def cut(self, now: float, loading: Sequence[Loading], busy_tokens: int) -> dict[int, int]:
        """Loads under way that are to be cut short, by number, and how many of the blocks that have
        not come are still to come of each. `loading`: in the order in which they began."""
        load_s, compute_s = self._load_now_s(), self.compute_block_s
        if not (compute_s and load_s and loading):
            return {}
        # Where nothing comes although something should, nothing will for as long again.
        silent_s = min(self._silent_s, now - min(one.since for one in loading))
        late_s = max(0.0, silent_s - self._latency_s - self.load_block_s)
        cuts: dict[int, int] = {}
        busy_s = busy_tokens * compute_s / self._block_tokens
        before = sum(one.left for one in loading)
        for one in reversed(loading):
            before -= one.left
            patience = PROBE_PATIENCE if one.probe else TRIED
            if now - one.since < max(TRIED_LEAST_S, patience * one.count * compute_s):
                continue
            by_load_s = max(busy_s, late_s + (before + one.left) * load_s)
            lost = one.left if self._keeps else one.count
            if by_load_s <= (busy_s + lost * compute_s) * (1 + MARGIN):
                continue
            kept = max(0, min(one.left, int(busy_s / load_s) - before)) if self._keeps else 0
            if kept < one.left:
                cuts[one.number] = kept
                busy_s += (lost - kept) * compute_s
        return cuts

    def _load_now_s(self) -> float:
        """What a block takes, where the silence since the last one says something, too: half of it,
        since blocks may be under way side by side."""
        silent_s = max(0.0, self._silent_s - self._latency_s) / 2
        known = self._load
        return max(self.load_block_s, (known.over + silent_s) / (known.under + 1))
