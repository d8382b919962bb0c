"""What a scheduler asks the pool for, loads and saves: decisions without I/O.

Owns: every request that the engine knows, from its arrival to its end: what the pool holds of its
chain, how long it may wait for that, which blocks are loaded and which are saved, what failed and
is not tried again, and the bounds of all that. Must not know: engines, clocks, sockets, or bytes.

Times are seconds of one clock, blocks are counted from a prompt's first. Events come in by methods
with the present time; what is to be done is left in `lookups`, `loads`, `saves` and `let_go`, for
the adapter to take.

A request goes through

    NEW ──arrived──► ASKED ──answered──► KNOWN ──matched, allocated──► LOADING ──loaded──► DONE
                       └── no answer in time, pool left alone, failure ─────────────────► DONE

and never back from DONE, but for a request that the engine threw out and takes again (`matched` of
one that is DONE without failure, with another `preemptions`): so no failure makes a loop.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcast.hostagent.connectors.counters import Counters
from kvcast.hostagent.connectors.health import Health
from kvcast.hostagent.connectors.weighing import Loading, Pace, Verdict, Weighed, Weighing
from kvcast.protocol.bounded_map import BoundedMap

MOST_MISSING: Final = 16_384
"""Blocks that are remembered as not to be had."""
AWAIT_STEP_S: Final = 0.02
"""How soon the pool is asked again for what is being computed elsewhere."""
MOST_LOOKUPS: Final = 128
"""Questions without an answer; a request beyond them is computed (counted)."""


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Bounds of what is decided; seconds and blocks as in `ConnectorOptions`."""

    deadline_s: float = 2.0
    lookup_s: float = 0.25
    fresh_s: float = 0.5
    await_s: float = 0.0
    retry_s: float = 5.0
    save_s: float = 10.0
    least_blocks: int = 0
    most_saving: int = 1024
    """Blocks that may be kept from reuse at once because they are being saved."""
    workers: int = 1
    """How many report each load and save."""
    load: bool = True
    save: bool = True
    whole: bool = False
    """Whether the engine cannot compute several tokens behind a prefix that it has not computed:
    then only prompts are loaded of which all but one token come."""
    keeps: bool = True
    """Whether the engine uses what came of a load of which something is missing."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """To be asked: how much of this chain the pool holds. `prefetch_from`: from there on, the
    engine lacks the blocks, and before `prefetch_until` they are worth fetching ahead."""

    request: str
    number: int
    hashes: tuple[bytes, ...]
    prefetch_from: int
    left_s: float
    readers: tuple[str, ...] = ()
    """The nodes that want the chain at the same time, if more than this one do."""
    awaited: bool = False
    """Whether another engine is computing it: then parts of blocks are worth fetching, too."""
    prefetch_until: int | None = None
    """None: all that the pool holds."""


@dataclass(frozen=True, slots=True)
class Load:
    """To be loaded within `left_s`: the request's blocks `first`, `first` + 1, … into the engine's
    memory; `block_ids`: for each of the engine's cache groups, where each block goes. `by_layers`:
    the engine computes the request's other tokens meanwhile, and waits before each layer. `before`:
    the hash of the block before the first, b"" where there is none."""

    request: str
    number: int
    first: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[tuple[int, ...], ...]
    left_s: float
    by_layers: bool = False
    before: bytes = b""


@dataclass(frozen=True, slots=True)
class Save:
    """To be saved; fields as those of `Load`."""

    number: int
    request: str
    first: int
    hashes: tuple[bytes, ...]
    block_ids: tuple[tuple[int, ...], ...]
    left_s: float
    before: bytes = b""


class Stage(enum.Enum):
    """Where a request stands (see the module's text)."""

    NEW = "new"
    ASKED = "asked"
    KNOWN = "known"
    LOADING = "loading"
    DONE = "done"


@dataclass(slots=True, eq=False)
class _Request:
    stage: Stage = Stage.NEW
    lookup: int = 0
    """The number of the last question about it."""
    asked_at: float = 0.0
    answered_at: float = 0.0
    preemptions: int = 0
    """How often the engine had thrown it out when the pool was last asked for that reason."""
    wanted_since: float | None = None
    """Since when the engine waits for us: the deadline counts from here."""
    held: int = 0
    """How many of its blocks the pool held, from the first."""
    awaits: bool = False
    """Whether another engine is computing its prompt."""
    readers: tuple[str, ...] = ()
    known: bool = False
    """Whether `held` was answered at all."""
    here: int = 0
    """How many of its blocks the engine held itself when it last asked."""
    near: int = 0
    """How many of its blocks, beyond those, this node's memory held."""
    ahead: int = 0
    """How many of its blocks are fetched ahead, beyond those."""
    verdict: Verdict | None = None
    """What weighing a load has said, if that was asked."""
    offered: int = 0
    """How many blocks could be loaded when it was asked."""
    loading: tuple[int, int, int] = (0, 0, 0)
    """A load's number, its first block, and how many."""
    since: float = 0.0
    """When that load began."""
    left: int = 0
    """How many of its blocks have not come."""
    is_cut: bool = False
    reports: int = 0
    came: int = 0
    """Of the load, what the worker with the least has."""
    reason: str = ""
    failed: bool = False
    saved: int | None = None
    """How many of its blocks need not be saved any more; None until that is known."""


@dataclass(slots=True, eq=False)
class _Saving:
    request: str
    hashes: tuple[bytes, ...]
    block_ids: tuple[tuple[int, ...], ...]
    reports: int = 0


@dataclass(slots=True)
class _Doubt:
    """A load by layers that has not ended: what is computed now may rest on blocks that never come.
    There is one at a time."""

    number: int
    count: int
    reports: int = 0
    well: bool = True


@dataclass(slots=True)
class Outbox:
    """What the adapter is to do."""

    lookups: deque[Lookup] = field(default_factory=deque)
    loads: deque[Load] = field(default_factory=deque)
    saves: deque[Save] = field(default_factory=deque)
    cuts: deque[tuple[int, int]] = field(default_factory=deque)
    """Loads of which only so many blocks, from their first, are still to be loaded."""
    let_go: deque[tuple[int, tuple[tuple[int, ...], ...]]] = field(default_factory=deque)
    """Saves that have ended, and the blocks that may be used again."""
    weighed: Weighed = field(default_factory=Weighed)
    """What became of prefixes that the pool held."""


class Planner:
    """All requests of one scheduler. One thread at a time. `weighing`: what says how much of a
    chain is loaded; None: all of it."""

    def __init__(
        self, options: PlannerOptions, counters: Counters, weighing: Weighing | None = None
    ) -> None:
        self._options = options
        self._keeps = options.keeps and not options.whole
        self._counters = counters
        self._requests: dict[str, _Request] = {}
        self._missing: BoundedMap[bytes, float] = BoundedMap(MOST_MISSING)
        """Blocks that could not be had, and until when they count as not there."""
        self._saving: dict[int, _Saving] = {}
        self._in_save: set[bytes] = set()
        self._saving_blocks = 0
        self._doubt: _Doubt | None = None
        self._held_back: list[Save] = []
        """Saves of what was computed while there was a doubt."""
        self._numbers = 0
        self._lookups_out: dict[int, str] = {}
        self._weighing = weighing
        self.health = Health()
        self.out = Outbox()

    # --- what the adapter may want to know ------------------------------------------------------

    @property
    def asking(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._lookups_out)

    @property
    def saving(self) -> int:
        """Saves that have not ended."""
        return len(self._saving)

    @property
    def saving_blocks(self) -> int:
        """Blocks that are kept from reuse."""
        return self._saving_blocks

    def has_from_pool(self, name: str) -> int | None:
        """How many of a request's blocks, from the first, need not be computed since a load brings
        them; None as long as that is open."""
        request = self._requests.get(name)
        if request is None or request.stage in (Stage.ASKED, Stage.KNOWN):
            return None
        if request.stage is not Stage.LOADING:
            return 0
        return sum(request.loading[1:])

    # --- a request's way ------------------------------------------------------------------------

    def arrived(
        self,
        now: float,
        name: str,
        hashes: Sequence[bytes],
        here: int = 0,
        *,
        near: int = 0,
        busy_tokens: int = 0,
        awaits: bool = False,
        readers: Sequence[str] = (),
    ) -> None:
        """The engine has a new request. `hashes`: its full blocks'; `here`: how many of them the
        engine holds itself, from the first; `near`: how many of the next this node's memory holds.
        `busy_tokens`: what the engine has to compute for others. `awaits`: another engine is
        computing the prompt; `readers`: the nodes whose engines wait for that, this one's among
        them."""
        request = self._requests[name] = _Request(near=near)
        if self._options.await_s:
            request.awaits, request.readers = awaits, tuple(readers)
        if self._options.load and hashes:
            self._ask(now, name, request, hashes, here, busy_tokens)

    def answered(self, now: float, name: str, number: int, held: int | None) -> None:
        """The pool holds the first `held` blocks of a chain; None: it did not say."""
        self._lookups_out.pop(number, None)
        if held is None:
            self.health.failed(now)
        else:
            self.health.succeeded()
        request = self._requests.get(name)
        if request is None or request.lookup != number or request.stage is not Stage.ASKED:
            return
        if held is None:
            if not request.awaits or not self.health.well:
                self._give_up(request, "unavailable")
                return
            held = request.held  # there is time to ask again
        request.stage = Stage.KNOWN
        request.answered_at = now
        request.held = held
        request.ahead = min(request.ahead, held)
        request.known = True

    def matched(
        self,
        now: float,
        name: str,
        hashes: Sequence[bytes],
        here: int,
        most: int,
        rest_tokens: int = 1,
        *,
        near: int = 0,
        busy_tokens: int = 0,
        preemptions: int = 0,
    ) -> int | None:
        """How many blocks beyond the first `here` the pool will bring, of the first `most` at
        most; None: not known yet, ask again. `rest_tokens`: tokens behind those; `near` and
        `busy_tokens` as in `arrived`; `preemptions`: how often the engine has thrown it out."""
        options = self._options
        request = self._requests.setdefault(name, _Request())
        if self._doubt is not None:
            return None  # the engine's own cache may have given it blocks that have not come
        if not options.load or most <= here:
            return 0
        # An engine without room for it asks at each step: it has its answer, and `None` would let
        # those behind it go first.
        again = request.stage is Stage.DONE and preemptions != request.preemptions
        if (request.stage is Stage.NEW or again) and not request.failed:
            request.preemptions = preemptions
            request.wanted_since = None
            self._ask(now, name, request, hashes, here, busy_tokens)
        if request.wanted_since is None:
            request.wanted_since = now
        if request.awaits:
            if self._awaited(now, name, request, hashes, here, most):
                return None
            request.awaits = False
            request.wanted_since = now  # what is a load's time has not begun before
        late = now - request.wanted_since
        if request.stage is Stage.ASKED:
            if late < options.lookup_s:
                return None
            self._give_up(request, "lookup_deadline")
        elif request.stage is Stage.KNOWN:
            stale = request.held < most and now - request.answered_at > options.fresh_s
            if stale and late < options.lookup_s:
                self._ask(now, name, request, hashes, here, busy_tokens)
                return 0 if request.failed else None
        if request.stage is not Stage.KNOWN:
            return 0
        request.here = here
        count = self._there(now, hashes, here, min(request.held, most)) - here
        if options.whole and (here + count < most or rest_tokens != 1):
            count = 0
        if count <= 0 or here + count < options.least_blocks:
            self._counters.add("miss_blocks", max(0, most - here), reason="not_held")
            request.stage = Stage.DONE
            return 0
        return self._weighed(now, name, request, count, near, busy_tokens)

    def _weighed(
        self, now: float, name: str, request: _Request, count: int, near: int, busy_tokens: int
    ) -> int:
        """How many of these blocks to load, which the pool holds."""
        request.offered = count
        if self._weighing is None:
            return count
        began = now if request.wanted_since is None else request.wanted_since
        near = min(near, count)
        verdict = Verdict(0, "near")
        if near < count:
            left_s = began + self._options.deadline_s - now
            wait = self._wait(name)
            verdict = self._weighing.take(now, count - near, wait, busy_tokens, left_s)
        taken = near + verdict.blocks
        if self._options.whole and taken < count:
            taken = 0
        request.verdict = verdict
        if not taken:
            self._counters.add("weighed", verdict=verdict.why)
            self._counters.add("miss_blocks", count, reason="slower")
            self._became(count, 0)
            request.stage = Stage.DONE
        return taken

    def _became(self, held: int, came: int) -> None:
        """So many blocks of a prefix were held, and so many came."""
        weighed = Weighed.of(held, came)
        self.out.weighed += weighed
        self._counters.add("prefixes", outcome=weighed.outcome)

    def _wait(self, but: str) -> int:
        """Blocks that other requests load, or have fetched ahead."""
        return sum(
            one.left if one.stage is Stage.LOADING else one.ahead
            for name, one in self._requests.items()
            if name != but and one.stage is not Stage.DONE
        )

    def allocated(
        self,
        now: float,
        name: str,
        hashes: Sequence[bytes],
        count: int,
        block_ids: Sequence[Sequence[int]],
        *,
        by_layers: bool = False,
    ) -> None:
        """The engine has made room for `count` of the blocks that `matched` has promised, where
        `block_ids` (the request's, by cache group, from its first block) says. `by_layers`: it
        computes the rest at once. Until such a load has ended nothing more is promised, and what
        is computed is not saved."""
        request = self._requests.get(name)
        if request is None or count <= 0:
            return
        here = request.here
        request.stage = Stage.LOADING
        began = now if request.wanted_since is None else request.wanted_since
        self._numbers += 1
        request.loading = (self._numbers, here, count)
        request.reports, request.came, request.reason = 0, count, ""
        request.since, request.left, request.is_cut = now, count, False
        self._counters.add("loads")
        if request.verdict is not None:
            self._counters.add("weighed", verdict=request.verdict.why)
            self._counters.add("miss_blocks", max(0, request.offered - count), reason="slower")
        self.out.loads.append(
            Load(
                name,
                self._numbers,
                here,
                tuple(hashes[here : here + count]),
                tuple(tuple(ids[here : here + count]) for ids in block_ids),
                max(0.0, began + self._options.deadline_s - now),
                by_layers,
                hashes[here - 1] if here else b"",
            )
        )
        if by_layers:
            self._counters.add("loads_by_layers")
            self._doubt = _Doubt(self._numbers, count)

    def paced(self, pace: Pace) -> None:
        """The workers have seen this of their loads."""
        if self._weighing is not None:
            self._weighing.heard(pace)

    def progressed(self, name: str, number: int, came: int) -> None:
        """So many of a load's blocks, from its first, are there at every worker."""
        request = self._requests.get(name)
        if request is not None and request.loading[0] == number:
            _, _, count = request.loading
            if not request.is_cut:
                request.left = max(0, count - came)

    def review(self, now: float, busy_tokens: int) -> None:
        """Whether loads under way are worth going on with; `busy_tokens` as in `arrived`, of all
        requests."""
        if self._weighing is None or self._doubt is not None:
            return
        under_way = {
            request.loading[0]: request
            for request in self._requests.values()
            if request.stage is Stage.LOADING and not request.is_cut
        }
        loading = [
            Loading(
                number,
                request.loading[2],
                request.left,
                request.since,
                request.verdict is not None and request.verdict.why == "probe",
            )
            for number, request in sorted(under_way.items())
        ]
        if not loading:
            return
        for number, kept in self._weighing.cut(now, loading, busy_tokens).items():
            request = under_way[number]
            _, first, count = request.loading
            until = count - request.left + kept if self._keeps else 0
            request.is_cut, request.left = True, kept
            request.loading = (number, first, until)
            self._counters.add("weighed", verdict="cut")
            self.out.cuts.append((number, until))

    def loaded(
        self, now: float, name: str, number: int, came: int, hashes: Sequence[bytes], reason: str
    ) -> None:
        """A load has ended at one worker: the first `came` of its blocks are there; `reason`: why
        not the next one, and "" if all are. It has ended when all workers have said so."""
        self._heard_of(number, came)
        request = self._requests.get(name)
        if request is None or request.loading[0] != number or request.stage is not Stage.LOADING:
            return
        _, first, count = request.loading
        request.reports += 1
        if came < request.came:
            request.came, request.reason = came, reason
        if request.reports < self._options.workers:
            return
        came, reason = request.came, request.reason
        request.stage = Stage.DONE
        used = came if came >= count or self._keeps else 0
        self._became(request.offered, used)
        if self._weighing is not None and not request.is_cut:
            self._weighing.ended(count, used)
        if came >= count:
            request.failed = request.is_cut  # so the rest is not asked for again
            self.health.succeeded()
            return
        # What is recomputed is saved again; what is bad in the pool is then replaced.
        request.failed = True
        request.saved = min(request.held if request.saved is None else request.saved, first + came)
        self._counters.add("failed_loads", reason=reason)
        if first + came < len(hashes):
            self._missing[hashes[first + came]] = now + self._options.retry_s
        if came == 0 and reason in ("deadline", "unavailable"):
            self.health.failed(now)

    def finished(self, name: str) -> None:
        """The engine is done with a request. Its saves go on."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._lookups_out.pop(request.lookup, None)

    # --- saves ----------------------------------------------------------------------------------

    def unsaved(self, name: str, full: int) -> bool:
        """Whether `computed` may have something to save; costs nothing, so to be asked first."""
        request = self._requests.get(name)
        return (
            request is not None
            and self._options.save
            and (request.saved is None or request.saved < full)
        )

    def computed(
        self,
        now: float,
        name: str,
        hashes: Sequence[bytes],
        full: int,
        block_ids: Sequence[Sequence[int]],
        *,
        here: int = 0,
    ) -> Save | None:
        """After this step, the first `full` blocks of a request are computed; `block_ids` as in
        `allocated`. `here`: how many the engine held when it took the request up. What to save now,
        which is also left in `saves`; what is beyond the bound waits for the next call."""
        options = self._options
        request = self._requests.get(name)
        if request is None or not self.unsaved(name, full) or not self.health.well:
            return None
        if request.stage is Stage.LOADING and self._doubt is None:
            return None  # the engine ends it: what it counts as computed has not come yet
        if request.saved is None:
            # What the engine held, it has saved when it was computed; where the pool was asked,
            # it has said what it holds, and what it has lost is brought again.
            request.saved = request.held if request.known else here
        first = request.saved
        while first < full and hashes[first] in self._in_save:
            first += 1
        until = min(full, first + options.most_saving - self._saving_blocks)
        for at in range(first, until):
            if hashes[at] in self._in_save:
                until = at
                break
        request.saved = first
        if until <= first:
            if first < full:
                self._counters.add("saves_delayed")
            return None
        request.saved = until
        self._numbers += 1
        save = Save(
            self._numbers,
            name,
            first,
            tuple(hashes[first:until]),
            tuple(tuple(ids[first:until]) for ids in block_ids),
            options.save_s,
            hashes[first - 1] if first else b"",
        )
        self._saving[save.number] = _Saving(name, save.hashes, save.block_ids)
        self._in_save.update(save.hashes)
        self._saving_blocks += len(save.hashes)
        if self._doubt is not None:
            self._held_back.append(save)
        else:
            self.out.saves.append(save)
        return save

    def saved(self, number: int, reports: int = 1) -> tuple[bytes, ...]:
        """Workers are done with a save, well or not. Its hashes, where it has now ended: only then
        may its blocks be used again, however long that takes, since a worker may still read them.
        """
        saving = self._saving.get(number)
        if saving is None:
            return ()
        saving.reports += reports
        if saving.reports < self._options.workers:
            return ()
        self._end_save(number, saving)
        return saving.hashes

    def forget(self) -> None:
        """Forget what was learned of the pool."""
        self._missing.clear()
        self.health = Health()

    def _heard_of(self, number: int, came: int) -> None:
        """A load has ended at one worker. With a load by layers, so has the doubt of what was
        computed on top of it, once all workers have said so."""
        doubt = self._doubt
        if doubt is None or doubt.number != number:
            return
        doubt.reports += 1
        doubt.well = doubt.well and came >= doubt.count
        if doubt.reports < self._options.workers:
            return
        self._doubt = None
        held_back, self._held_back = self._held_back, []
        for save in held_back:
            if doubt.well:
                self.out.saves.append(save)
                continue
            self._end_save(save.number, self._saving[save.number])
            request = self._requests.get(save.request)
            if request is not None and request.saved is not None:
                request.saved = min(request.saved, save.first)

    def _end_save(self, number: int, saving: _Saving) -> None:
        del self._saving[number]
        self._in_save.difference_update(saving.hashes)
        self._saving_blocks -= len(saving.hashes)
        self.out.let_go.append((number, saving.block_ids))

    # --- parts ----------------------------------------------------------------------------------

    def _ask(
        self,
        now: float,
        name: str,
        request: _Request,
        hashes: Sequence[bytes],
        here: int,
        busy_tokens: int = 0,
    ) -> None:
        if len(self._lookups_out) >= MOST_LOOKUPS:
            self._give_up(request, "busy")
            return
        if not self.health.may_ask(now):
            self._give_up(request, "left_alone")
            return
        self._numbers += 1
        self._lookups_out.pop(request.lookup, None)
        request.lookup = self._numbers
        request.stage = Stage.ASKED
        request.asked_at = now
        self._lookups_out[self._numbers] = name
        self._counters.add("lookups")
        until = None
        if self._weighing is not None and not request.awaits:
            begin = min(len(hashes), here + request.near)
            wait = self._wait(name)
            request.ahead = self._weighing.ahead(len(hashes) - begin, wait, busy_tokens)
            until = begin + request.ahead
        self.out.lookups.append(
            Lookup(
                name,
                self._numbers,
                tuple(hashes),
                here,
                self._options.lookup_s,
                request.readers,
                request.awaits,
                until,
            )
        )

    def _awaited(
        self,
        now: float,
        name: str,
        request: _Request,
        hashes: Sequence[bytes],
        here: int,
        most: int,
    ) -> bool:
        """Whether to wait on for what another engine computes. What comes to be held is fetched
        meanwhile, since each question says what was held at the last one."""
        assert request.wanted_since is not None
        if request.stage is Stage.ASKED:
            return now - request.asked_at < self._options.lookup_s
        if request.stage is not Stage.KNOWN or request.held >= most:
            return False
        if now - request.wanted_since >= self._options.await_s:
            self._counters.add("awaits_failed")
            return False
        if now - request.answered_at >= AWAIT_STEP_S:
            self._ask(now, name, request, hashes, max(here, request.held))
        return request.stage in (Stage.ASKED, Stage.KNOWN)

    def _give_up(self, request: _Request, reason: str) -> None:
        """This request is computed, as if there were no pool."""
        self._lookups_out.pop(request.lookup, None)
        request.stage = Stage.DONE
        request.failed = True
        self._counters.add("lookups_failed", reason=reason)

    def _there(self, now: float, hashes: Sequence[bytes], here: int, until: int) -> int:
        """How far the blocks from `here` reach before one that could not be had of late."""
        if not self._missing:
            return until
        for at in range(here, min(until, len(hashes))):
            again_at = self._missing.get(hashes[at])
            if again_at is not None:
                if now < again_at:
                    self._counters.add("miss_blocks", until - at, reason="failed_of_late")
                    return at
                del self._missing[hashes[at]]
        return until
