"""What belongs in the switch's memory: the controller's policy beside others.

Owns: a stream of reads as the switch sees it, who holds what when, and the bytes that hits are
worth. Must not know: links or queues. What runs as `value` is the controller's own code
(`kvcast.controller.core.tiers`), told what it is told in a pool, and as late: homes' reports once a
renewal, hits and decisions once a tick, and a block that was let in answers from the read after the
one whose DATA fills it. The others see every read at once and fill in no time, which favours them.

The optimum knows the future. For blocks of one size it is Belady's rule (IBM Systems Journal 1966)
with the right to let a block pass by, which nothing can beat. For blocks of several sizes it is the
bound of PFOO-U (Berger, Beckmann, Harchol-Balter, SIGMETRICS 2018), which no policy can reach.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from kvcast.controller.core.admission import ValueOptions
from kvcast.controller.core.requests import Outgoing
from kvcast.controller.core.residency import Residency
from kvcast.controller.core.tiers import AdmitMode, Tiers
from kvcast.protocol.messages.control import Credit, Describe, Described, HotBlock, Keep, Kept
from kvcast.protocol.messages.wire import CELLS, SEGMENT_BYTES, BlockId
from kvcast.simulation.flows.demand import NS, Demand
from kvcast.simulation.flows.networks import Ints
from numpy.typing import NDArray

TICK_S = 0.5
RENEWAL_S = 1.0
"""How often the controller decides, and how often agents report (a third of their lease)."""
AT_ONCE_S = 0.05
"""Either, where we ask how much of a gap is the control loop's."""
_QUIET_TICKS = 8
"""Ticks without a read after which the next ones are left out."""
_SPAN = 1 << 48
"""Nanoseconds (78 hours) that a stream may span."""
_HOME = "home"
Hits = NDArray[np.bool_]


@dataclass(frozen=True)
class Stream:
    """READs of blocks in order of time: shape (reads,) each, but `block_bytes` (blocks,)."""

    at: Ints
    block: Ints
    node: Ints
    block_bytes: Ints

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
            on = after < ends
            begins, ends = after[on], ends[on]
        return Stream(self.at[keep], self.block[keep], self.node[keep], self.block_bytes)

    @property
    def bytes(self) -> Ints:
        return self.block_bytes[self.block]


def value(
    stream: Stream,
    slots: int,
    options: ValueOptions | None = None,
    *,
    tick_s: float = TICK_S,
    renewal_s: float = RENEWAL_S,
) -> Hits:
    """Which reads the switch would answer with the controller's policy, `slots` of 64 KiB."""
    options = options or ValueOptions()
    tiers = Tiers(
        AdmitMode.AUTO,
        Residency(slots, first_generation=1, drain_s=0.2),
        options,
        lambda _block: (_HOME,),
        refresh_s=1e9,
    )
    hits = np.zeros(len(stream.at), bool)
    ids = [BlockId(1, int(block).to_bytes(16, "big")) for block in range(len(stream.block_bytes))]
    sizes = stream.block_bytes.tolist()
    filled: set[BlockId] = set()
    served: Counter[int] = Counter()
    """Slot to READs served from it."""
    reads: Counter[int] = Counter()
    readers: defaultdict[int, set[int]] = defaultdict(set)
    reported = 0.0
    tick = 0.0
    at_s = (stream.at / NS).tolist()
    blocks, nodes = stream.block.tolist(), stream.node.tolist()

    def answer(outgoing: Outgoing, now: float) -> None:
        while outgoing:
            node, message = outgoing.pop()
            if isinstance(message, Describe):
                held = [
                    (ref.namespace, ref.key, sizes[int.from_bytes(ref.key, "big")], 1)
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

    def advance(now: float) -> None:
        nonlocal reported
        if now - reported >= renewal_s:
            reported = now
            for block, count in reads.most_common(256):
                name, size = ids[block], sizes[block]
                tiers.heard_report(
                    HotBlock(1, name.key, count, len(readers[block]), 0, size, 1), now
                )
            reads.clear()
            readers.clear()
        if tiers.residency.residents:
            answer(tiers.heard_hits({slot: served[slot] for slot in range(slots)}, now), now)
        answer(tiers.advance(now), now)
        tiers.residency.deleted(tiers.residency.waiting_for_deletion(), now)
        filled.intersection_update(tiers.residency.residents)

    for index, now in enumerate(at_s):
        quiet = 0
        while tick + tick_s <= now:
            tick += tick_s
            advance(tick)
            quiet += 1
            if quiet >= _QUIET_TICKS:  # nothing is heard: nothing is decided until the next read
                tick = max(tick, now - now % tick_s - tick_s)
        name = ids[blocks[index]]
        resident = tiers.residency.residents.get(name)
        if resident is not None and name in filled:
            hits[index] = True
            for slot in resident.slots:
                served[slot] += 1
            continue
        if resident is not None:
            filled.add(name)
        reads[blocks[index]] += CELLS.segments_of(sizes[blocks[index]])
        readers[blocks[index]].add(nodes[index])
    return hits


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


def compared(stream: Stream, slots: int) -> dict[str, int]:
    """Bytes of hits of every policy, by name; `optimum` and `static` need the future."""
    capacity = slots * SEGMENT_BYTES
    size = stream.bytes
    soon = value(stream, slots, tick_s=AT_ONCE_S, renewal_s=AT_ONCE_S)
    results = {
        "none": 0,
        "value": int(size[value(stream, slots)].sum()),
        "value, told at once": int(size[soon].sum()),
    }
    for name in others():
        results[name] = int(size[other(name)(stream, capacity)].sum())
    results["static"] = static_bytes(stream, capacity)
    results["optimum"] = optimum_bytes(stream, capacity)
    return results
