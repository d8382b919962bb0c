"""What belongs in the switch's memory: the controller's policy beside others.

Owns: a stream of reads as the switch sees it, who holds what when, and the bytes that hits are
worth. Must not know: links or queues. What runs as `value` is the controller's own code
(`kvcast.controller.core.tiers`), told what it is told in a pool, and as late (`ControlLoop`):
homes' reports once a renewal, the switch's digests of heat, hits once a tick; and a block that was
let in answers from the read after the one whose DATA fills it. The others see every read at once
and fill in no time, which favours them.

The optimum knows the future. For blocks of one size it is Belady's rule (IBM Systems Journal 1966)
with the right to let a block pass by, which nothing can beat. For blocks of several sizes it is the
bound of PFOO-U (Berger, Beckmann, Harchol-Balter, SIGMETRICS 2018), which no policy can reach.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvcast.controller.core.admission import ValueOptions
from kvcast.controller.core.pool import PoolOptions
from kvcast.controller.core.requests import Outgoing
from kvcast.controller.core.residency import Residency
from kvcast.controller.core.tiers import AdmitMode, HeatSample, Tiers
from kvcast.protocol.messages.control import Credit, Describe, Described, HotBlock, Keep, Kept
from kvcast.protocol.messages.wire import CELLS, SEGMENT_BYTES, BlockId
from kvcast.simulation.flows.demand import NS, Demand
from kvcast.simulation.flows.networks import Ints
from numpy.typing import NDArray

_QUIET_TICKS = 8
"""Ticks without a read after which the next ones are left out."""
_SPAN = 1 << 48
"""Nanoseconds (78 hours) that a stream may span."""
_NEVER = 1 << 62
"""Of nanoseconds."""
_HOME = "home"
Hits = NDArray[np.bool_]


@dataclass(frozen=True)
class Stream:
    """READs of blocks in order of time: shape (reads,) each, but `block_bytes` (blocks,)."""

    at: Ints
    block: Ints
    node: Ints
    block_bytes: Ints
    joined: Ints | None = None
    """By how many others each read is joined; None = by nobody."""

    @property
    def together(self) -> Ints:
        """How many nodes share the answer to each read."""
        return np.ones(len(self.at), np.int64) if self.joined is None else 1 + self.joined

    @classmethod
    def of(cls, demand: Demand) -> Stream:
        """As requests begin, were all fetches instant."""
        start = demand.request_at.copy()
        for request in np.flatnonzero(demand.request_after >= 0):
            start[request] = max(start[request], start[demand.request_after[request]])
        start += demand.request_jitter
        at = start[demand.read_request]
        order = np.argsort(at, kind="stable")
        return cls(at[order], demand.read_block[order], demand.read_node[order], demand.block_bytes)

    def without_joins(self, within_ns: int) -> Stream:
        """Without the reads that come within so much of one of the same block that goes on to its
        home: those share its answer, with or without memory."""
        order = np.argsort(self.block, kind="stable")
        keep = np.zeros(len(order), bool)
        joined = np.zeros(len(order), np.int64)
        block, at = self.block[order], self.at[order]
        begins = np.flatnonzero(np.r_[True, block[1:] != block[:-1]]) if len(order) else order
        ends = np.r_[begins[1:], len(order)].astype(np.int64)
        rank = np.zeros(len(order), np.int64)
        rank[begins] = 1
        key = (np.cumsum(rank) - 1) * _SPAN + at
        following = np.searchsorted(key, key + within_ns, side="left")
        while len(begins):
            keep[order[begins]] = True
            after = following[begins]
            joined[order[begins]] = np.minimum(after, ends) - begins - 1
            on = after < ends
            begins, ends = after[on], ends[on]
        return Stream(
            self.at[keep], self.block[keep], self.node[keep], self.block_bytes, joined[keep]
        )

    @property
    def bytes(self) -> Ints:
        return self.block_bytes[self.block]


@dataclass(frozen=True)
class ControlLoop:
    """How soon the controller hears of reads, and acts. Times in seconds."""

    tick_s: float = 0.5
    """How often it reads the counters of hits."""
    renewal_s: float = 1.0
    """How often each home reports what it answered (a third of its lease); they take turns."""
    homes: int = 16
    heat_threshold: int = 3
    """READs of a segment in one window of the switch, joined ones too, that raise a digest."""
    window_s: float = (1 << 14) * 64e-6
    digest_s: float = 0.06
    """From then until the controller has it: it comes in a list that waits for others."""
    write_s: float = 0.01
    """From a decision until the switch holds the entries: questions to a home, and writes."""
    drain_s: float = PoolOptions.drain_s
    """How long an evicted block's slots rest before another one has them."""

    def reported_at(self, now: float, block: int) -> float:
        """When the home of a block that is read now reports it."""
        phase = self.renewal_s * (block % self.homes) / self.homes
        return now + self.renewal_s - (now - phase) % self.renewal_s


AT_ONCE = ControlLoop(tick_s=0.05, renewal_s=0.05, heat_threshold=1, digest_s=0.0, write_s=0.0)
"""Where we ask how much of a gap is the control loop's."""


class _Heat:
    """READs of blocks as the switch counts them, window by window."""

    def __init__(self, loop: ControlLoop) -> None:
        self._loop = loop
        self._counts: dict[int, tuple[int, int]] = {}
        """By block: the window, and READs of each of its segments in it."""

    def read(self, now: float, block: int, together: int) -> bool:
        """So many READs at once; whether they raise a digest."""
        window = int(now / self._loop.window_s)
        before = self._counts.get(block, (window, 0))
        count = together + (before[1] if before[0] == window else 0)
        self._counts[block] = window, count
        return count >= self._loop.heat_threshold > count - together


class _Switch:
    """The controller's own code, told of a stream's reads as it is in a pool."""

    def __init__(
        self, stream: Stream, slots: int, options: ValueOptions, loop: ControlLoop
    ) -> None:
        self._loop, self._slots = loop, slots
        self._tiers = Tiers(
            AdmitMode.AUTO,
            Residency(slots, first_generation=1, drain_s=loop.drain_s),
            options,
            lambda _block: (_HOME,),
            refresh_s=1e9,
        )
        self._sizes = stream.block_bytes.tolist()
        self._ids = [BlockId(1, n.to_bytes(16, "big")) for n in range(len(self._sizes))]
        self._events: list[tuple[float, str, int]] = []
        """When, what, and whose: a home's report, a block's digest, or a tick."""
        self._due: set[tuple[str, int]] = set()
        self._reads: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """By home: READs by block since the last report."""
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        self._heat = _Heat(loop)
        self._together: dict[int, int] = {}
        """By block: ports that waited for it at once, the last time."""
        self._served: Counter[int] = Counter()
        self._usable: dict[BlockId, float] = {}
        """From when on the switch holds a resident's entries."""
        self._filled: set[BlockId] = set()
        self._quiet = 0

    def read(self, now: float, block: int, node: int, together: int) -> bool:
        """A READ, and those that join it; whether the switch answers."""
        while self._events and self._events[0][0] <= now:
            self._happen(*heapq.heappop(self._events))
        name, loop = self._ids[block], self._loop
        self._quiet = 0
        self._plan("tick", 0, now - now % loop.tick_s + loop.tick_s)
        resident = self._tiers.residency.residents.get(name)
        if resident is not None and name in self._filled:
            for slot in resident.slots:
                self._served[slot] += together
            return True
        if resident is not None and now >= self._usable.get(name, now):
            self._filled.add(name)
        home = block % loop.homes
        self._reads[home][block] += CELLS.segments_of(self._sizes[block])
        self._readers[block].add(node)
        self._plan("report", home, loop.reported_at(now, block))
        self._together[block] = together
        if self._heat.read(now, block, together):
            self._plan("digest", block, now + loop.digest_s)
        return False

    def _plan(self, what: str, whose: int, at: float) -> None:
        if (what, whose) not in self._due:
            self._due.add((what, whose))
            heapq.heappush(self._events, (at, what, whose))

    def _happen(self, now: float, what: str, whose: int) -> None:
        self._due.discard((what, whose))
        tiers = self._tiers
        if what == "report":
            reports = {}
            for block, count in self._reads.pop(whose, Counter()).most_common(256):
                name, size = self._ids[block], self._sizes[block]
                readers = len(self._readers.pop(block))
                reports[name] = HotBlock(1, name.key, count, readers, 0, size, 1)
            tiers.heard_reports(reports, now)
        elif what == "digest":
            together, count = self._together[whose], self._loop.heat_threshold
            for segment in range(CELLS.segments_of(self._sizes[whose])):
                ports = (1 << together) - 1
                tiers.heard_heat(HeatSample(self._ids[whose], segment, ports, count), now)
        elif what == "tick":
            self._quiet += 1
            if self._quiet < _QUIET_TICKS:
                self._plan("tick", 0, now + self._loop.tick_s)
            if tiers.residency.residents:
                hits = {slot: self._served[slot] for slot in range(self._slots)}
                self._answer(tiers.heard_hits(hits, now), now)
        self._advance(now)

    def _advance(self, now: float) -> None:
        tiers = self._tiers
        self._answer(tiers.advance(now), now)
        tiers.residency.deleted(tiers.residency.waiting_for_deletion(), now)
        residents = tiers.residency.residents
        self._filled.intersection_update(residents)
        for name in self._usable.keys() - residents.keys():
            del self._usable[name]
        for name in residents.keys() - self._usable.keys():
            self._usable[name] = now + self._loop.write_s
        free_at = tiers.residency.next_deadline()
        if free_at is not None:
            self._plan("drained", 0, free_at)

    def _answer(self, outgoing: Outgoing, now: float) -> None:
        tiers = self._tiers
        while outgoing:
            node, message = outgoing.pop()
            if isinstance(message, Describe):
                held = [
                    (ref.namespace, ref.key, self._sizes[int.from_bytes(ref.key, "big")], 1)
                    for ref in message.blocks
                ]
                tiers.described(Described(message.request, held), node, now)
                # What follows from it is decided in the control loop's next round, which is soon.
                outgoing += tiers.advance(now)
            elif isinstance(message, Keep):
                outgoing += tiers.kept(
                    Kept(message.request, message.namespace, message.key, True), node, now
                )
            else:
                assert isinstance(message, Credit)


def value(
    stream: Stream,
    slots: int,
    options: ValueOptions | None = None,
    *,
    loop: ControlLoop = ControlLoop(),
) -> Hits:
    """Which reads the switch would answer with the controller's policy, `slots` of 64 KiB."""
    switch = _Switch(stream, slots, options or ValueOptions(), loop)
    rows = zip(
        (stream.at / NS).tolist(),
        stream.block.tolist(),
        stream.node.tolist(),
        stream.together.tolist(),
        strict=True,
    )
    return np.array([switch.read(*row) for row in rows], bool)


def next_use(block: Ints) -> Ints:
    """For each read the index of the next read of the same block, or the number of reads."""
    following = np.full(len(block), len(block), np.int64)
    order = np.argsort(block, kind="stable")
    same = block[order][1:] == block[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    return following


def belady(stream: Stream, capacity_bytes: int) -> Hits:
    """The optimum of blocks of one size: keep what is wanted soonest, and let pass what is wanted
    later than all that is kept."""
    hits = np.zeros(len(stream.at), bool)
    if not len(hits):
        return hits
    room = capacity_bytes // int(stream.bytes.max())
    following = next_use(stream.block).tolist()
    kept: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    blocks = stream.block.tolist()
    for index, block in enumerate(blocks):
        if kept.pop(block, None) is not None:
            hits[index] = True
        again = following[index]
        if again == len(blocks) or not room:
            continue
        kept[block] = again
        heapq.heappush(latest, (-again, block))
        while len(kept) > room:
            when, victim = heapq.heappop(latest)
            if kept.get(victim) == -when:
                del kept[victim]
    return hits


def after_its_fill(stream: Stream, delay_s: float) -> Stream:
    """Without the reads of each block that no controller outside the switch can have answered: up
    to the first one that comes so long after the block's first, and which fills. The first read of
    what is left is that one."""
    first_at = np.full(len(stream.block_bytes), _NEVER, np.int64)
    np.minimum.at(first_at, stream.block, stream.at)
    return _from(stream, first_at + round(delay_s * NS))


def after_it_is_heard_of(stream: Stream, loop: ControlLoop) -> Stream:
    """The same, where the controller hears of reads as in a pool: of the first by its home's report
    or by the switch's digest, whichever comes before the other."""
    heat = _Heat(loop)
    heard: dict[int, float] = {}
    rows = zip(
        (stream.at / NS).tolist(), stream.block.tolist(), stream.together.tolist(), strict=True
    )
    for now, block, together in rows:
        at = heard.setdefault(block, loop.reported_at(now, block))
        if now < at and heat.read(now, block, together):
            heard[block] = min(at, now + loop.digest_s)
    held_from = np.full(len(stream.block_bytes), _NEVER, np.int64)
    for block, at in heard.items():
        held_from[block] = round((at + loop.write_s) * NS)
    return _from(stream, held_from)


def _from(stream: Stream, begins: Ints) -> Stream:
    """The reads of each block from a time on, by block; its first read is before that."""
    keep = stream.at >= begins[stream.block]
    joined = None if stream.joined is None else stream.joined[keep]
    return Stream(
        stream.at[keep], stream.block[keep], stream.node[keep], stream.block_bytes, joined
    )


def bound_bytes(stream: Stream, capacity_bytes: int) -> int:
    """Bytes of hits that no policy can exceed, whatever the blocks' sizes (PFOO-U)."""
    following = next_use(stream.block)
    here = np.arange(len(following))
    used_again = (following < len(following)) & (stream.bytes <= capacity_bytes)
    size = stream.bytes[used_again].astype(np.float64)
    cost = (following - here)[used_again]
    # The most bytes for the room they take, size × time; of a byte of each that is the time.
    order = np.argsort(cost, kind="stable")
    taken = np.cumsum(size[order] * cost[order])
    budget = float(capacity_bytes) * len(following)
    whole = int(np.searchsorted(taken, budget, side="right"))
    got = float(size[order][:whole].sum())
    if whole < len(order):
        left = budget - (taken[whole - 1] if whole else 0.0)
        got += left / float(cost[order][whole])
    return int(got)


def optimum_bytes(stream: Stream, capacity_bytes: int) -> int:
    """Bytes of hits of the offline optimum: exact for blocks of one size, else a bound."""
    if not len(stream.at):
        return 0
    if len(np.unique(stream.bytes)) == 1:
        return int(stream.bytes[belady(stream, capacity_bytes)].sum())
    return bound_bytes(stream, capacity_bytes)


def static_bytes(stream: Stream, capacity_bytes: int) -> int:
    """Bytes of hits if the best set of blocks were there from its second read on, for good."""
    count = np.bincount(stream.block, minlength=len(stream.block_bytes))
    order = np.argsort(-(count - 1), kind="stable")
    fits = np.cumsum(stream.block_bytes[order]) <= capacity_bytes
    chosen = order[fits]
    return int((np.maximum(0, count[chosen] - 1) * stream.block_bytes[chosen]).sum())


OTHERS = ("LRU", "LFU", "ARC", "S3FIFO", "WTinyLFU", "Random")


def others() -> tuple[str, ...]:
    """The other policies that can be run: libCacheSim's, where it is installed."""
    try:
        import libcachesim  # noqa: F401
    except ImportError:
        return ()
    return OTHERS


def other(name: str) -> Callable[[Stream, int], Hits]:
    """A policy of libCacheSim by its name there: (stream, bytes) to hits."""

    def run(stream: Stream, capacity_bytes: int) -> Hits:
        import libcachesim

        hits = np.zeros(len(stream.at), bool)
        if not len(hits) or capacity_bytes < int(stream.bytes.min()):
            return hits
        cache = getattr(libcachesim, name)(cache_size=capacity_bytes, hashpower=16)
        request = libcachesim.Request()
        at, block, size = stream.at.tolist(), stream.block.tolist(), stream.bytes.tolist()
        for index in range(len(hits)):
            request.obj_id, request.obj_size = block[index] + 1, size[index]
            request.clock_time = at[index] // NS
            hits[index] = cache.get(request)
        return hits

    return run


def as_a_switch_fills(stream: Stream, hits: Hits) -> Hits:
    """What is left of a policy's hits where a block that is let in is filled by its next read, and
    answers from the one after: those whose block's read before was a hit, too."""
    order = np.argsort(stream.block, kind="stable")
    block, hit = stream.block[order], hits[order]
    left = np.zeros(len(hits), bool)
    left[order[1:]] = hit[1:] & hit[:-1] & (block[1:] == block[:-1])
    return left


def told_as_late(name: str) -> Callable[[Stream, int, ControlLoop], Hits]:
    """A policy of libCacheSim as the switch's: (stream, bytes, loop) to hits. It hears of reads as
    late as our controller, by homes' reports, digests of heat and counters of hits; entries take as
    long to be written, and slots to drain; a block that it has let in is filled by the next read
    from then on."""

    def run(stream: Stream, capacity_bytes: int, loop: ControlLoop) -> Hits:
        import libcachesim

        hits = np.zeros(len(stream.at), bool)
        if not len(hits) or capacity_bytes < int(stream.bytes.min()):
            return hits
        cache = getattr(libcachesim, name)(cache_size=capacity_bytes, hashpower=16)
        request = libcachesim.Request()
        sizes = stream.block_bytes.tolist()
        heat = _Heat(loop)
        untold: defaultdict[tuple[float, str], list[int]] = defaultdict(list)
        """By when and what they are told by: blocks, once for each read."""
        due: list[tuple[float, str]] = []
        filled: set[int] = set()
        fills_from: dict[int, float] = {}

        def about(block: int) -> Any:
            request.obj_id, request.obj_size = block + 1, sizes[block]
            return request

        def tell(block: int, at: float, what: str) -> None:
            if (at, what) not in untold:
                heapq.heappush(due, (at, what))
            untold[at, what].append(block)

        rows = zip(
            (stream.at / NS).tolist(), stream.block.tolist(), stream.together.tolist(), strict=True
        )
        for index, (now, block, together) in enumerate(rows):
            while due and due[0][0] <= now:
                at, what = heapq.heappop(due)
                for one in untold.pop((at, what)):
                    if what == "digest" and cache.find(about(one), False) is not None:
                        continue  # its home reports the same reads
                    request.clock_time = int(at)
                    grown = cache.get_occupied_byte() + sizes[one]
                    if not cache.get(about(one)):
                        filled.discard(one)
                        rests_s = loop.drain_s if cache.get_occupied_byte() < grown else 0.0
                        fills_from[one] = at + rests_s + loop.write_s
            held = cache.find(about(block), False) is not None
            if held and block in filled:
                hits[index] = True
                tell(block, now - now % loop.tick_s + loop.tick_s, "hits")
                continue
            if held and now >= fills_from[block]:
                filled.add(block)
            tell(block, loop.reported_at(now, block), f"report of {block % loop.homes}")
            if heat.read(now, block, together):
                tell(block, now + loop.digest_s, "digest")
        return hits

    return run


def compared(stream: Stream, slots: int) -> dict[str, int]:
    """Bytes of hits of every policy, by name; `optimum` and `static` need the future.

    *As a switch fills*: the best of the others, if what they let in were filled by the next read
    that passes, as in the switch; *told as late*: the same, if they hear of reads when our
    controller does, and slots rest as long. Neither is a bound: ours is another rule, and can have
    more. *Filled by order*: their hits, less what it takes if each block is sent once more when it
    is let in, so that the second read is answered already. *After the fill*: of the reads alone
    that a controller beside the switch can have answered; *reachable*: the same, if it hears of
    blocks no sooner than in a pool. Both take a slot to be free for another block at once, which it
    is after a drain's 0.2 s.
    """
    capacity = slots * SEGMENT_BYTES
    size = stream.bytes
    soon = value(stream, slots, loop=AT_ONCE)
    results = {
        "none": 0,
        "value": int(size[value(stream, slots)].sum()),
        "value, told at once": int(size[soon].sum()),
    }
    filling, late, ordered = [0], [0], [0]
    for name in others():
        hits = other(name)(stream, capacity)
        results[name] = int(size[hits].sum())
        filling.append(int(size[as_a_switch_fills(stream, hits)].sum()))
        hits_late = told_as_late(name)(stream, capacity, ControlLoop())
        late.append(int(size[hits_late].sum()))
        ordered.append(results[name] - int(size[~hits].sum()))
    results["best, as a switch fills"] = max(filling)
    results["best, told as late"] = max(late)
    results["best, filled by order"] = max(ordered)
    after_fill = after_its_fill(stream, ControlLoop.write_s)
    results["optimum, after the fill"] = optimum_bytes(after_fill, capacity)
    heard = after_it_is_heard_of(stream, ControlLoop())
    results["reachable optimum"] = optimum_bytes(heard, capacity)
    results["static"] = static_bytes(stream, capacity)
    results["optimum"] = optimum_bytes(stream, capacity)
    return results


def parts_of_optimum(hits: dict[str, int]) -> dict[str, int]:
    """What becomes of the optimum's hits, in bytes, from what `compared` says; the parts sum up to
    them. `before the fill`: of reads that no controller beside the switch can have answered;
    `the future`: what the best of all that do not know it still lacks; `another rule`: what the
    best of them has more than ours; `the control loop`: what ours would have if it were told of
    reads at once; `value`: what ours has.
    """
    told = hits["value, told at once"]
    best = max(hits["best, as a switch fills"], told, hits["value"])
    late = max(0, told - hits["value"])
    after_fill = max(best, hits["optimum, after the fill"])
    return {
        "value": hits["value"],
        "the control loop": late,
        "another rule": best - hits["value"] - late,
        "the future": after_fill - best,
        "before the fill": hits["optimum"] - after_fill,
    }
