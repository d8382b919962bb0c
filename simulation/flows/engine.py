"""The flow simulator: when every piece of every read passes every link.

Owns: queues of links, windows, coalescing, multicast and peers' trees, for whole arrays of reads
at once. Must not know: workloads, policies of the switch's memory, or what a report says.

**The model.** A read is cut into *pieces*: what a home sends in one turn, or, where `max_pieces`
says so, more. A reader asks a home for `window` segments and for the next one as each comes. A
home's link sends answers one after the other, readers in turn. READs wait behind what stands in
their way's queues. With coalescing, a READ for a segment that comes while the answer to another's
has not yet passed the switch joins it, and asks again for what has passed; the copies part as late
as the network lets them. Every other link is a queue, first come first served; a piece goes on as
its first frame arrives, not its last.

**How it is solved.** Every link's queue has a closed form (Lindley's recursion: a cumulative sum
and a running maximum), so all links are served in a few numpy passes, given when pieces come. When
they come depends on when others have gone; so the passes are repeated until nothing changes.
Nothing depends on its own future. So each repetition makes right, for good, at least what depends
only on what was right before: it ends, and what it ends with is what an event-by-event simulation
of the same model would say. `max_rounds` ends it earlier where reads are many;
`Outcome.unsettled` then says how many times were still moving.

Times are integers, nanoseconds; so results are the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from kvcast.protocol.messages.ethernet import FRAME_OVERHEAD_BYTES
from kvcast.protocol.messages.wire import CHUNKS_PER_SEGMENT, HEADER_BYTES
from kvcast.simulation.flows.demand import NS, Demand, mix
from kvcast.simulation.flows.networks import NONE, Fabric, Ints
from numpy.typing import NDArray

Way = Literal["plain", "coalesce", "peers"]
READ_BYTES = FRAME_OVERHEAD_BYTES + HEADER_BYTES
_SPAN = 1 << 42
"""Nanoseconds (73 minutes) that one run may span: above, group numbers are added to times."""


_SPAN_GROUPS = 1 << 20
"""Links, and blocks' pieces, at most: above times, in one integer."""
UNSETTLED_NS = 10_000
"""A piece is unsettled if the last round moved it by more."""


class SpanError(ValueError):
    """The reads take longer than one run may span."""


@dataclass(frozen=True)
class FlowOptions:
    """How pieces travel. Times in nanoseconds."""

    way: Way = "coalesce"
    """`plain`: every reader gets answers of its own. `coalesce`: switches join reads. `peers`:
    each reader passes on what it has to at most `fan_out` later ones; nothing joins."""
    fan_out: int = 2
    window: int = 8
    """Segments in flight from one home to one get."""
    chunk_bytes: int = 1024
    turn_frames: int = 8
    """Frames that a home sends to one reader before the next one's turn: a piece."""
    max_pieces: int = 1 << 30
    """Pieces that a read is cut into at most; fewer are faster to simulate, and less exact."""
    link_delay_ns: int = 500
    card_delay_ns: int = 250
    home_ns: int = 0
    """What a home's processor takes from a READ until its answer can go."""
    reader_ns: int = 0
    """What a reader's processor takes from a piece's arrival until it asks for the next, or hands
    over the block."""
    gathers: bool = True
    """Whether homes hold a request's first answers for as long as it allows."""
    copies_part_at_edges: bool = False
    """Spines are plain switches: what crosses them goes once for each edge switch that wants it,
    from the home's edge switch on."""
    pending_entries: int = 65536
    max_rounds: int = 10_000
    coarse: bool = False
    """Homes serve first come first served instead of readers in turn, and READs wait in no queue:
    for millions of reads on links that are mostly idle."""

    @property
    def segment_bytes(self) -> int:
        return self.chunk_bytes * CHUNKS_PER_SEGMENT


@dataclass
class Outcome:
    """What one run came to.

    `read_end`: (reads,), when each read was whole. `fetch_ns`: one for each get that had something
    to fetch (a request on a node), in order of request and node. `link_bytes`: frames' bytes on
    each link, (links,). Counters are totals.
    """

    request_start: Ints
    read_end: Ints
    fetch_ns: Ints
    link_bytes: Ints
    home_payload_bytes: int
    """With what is sent again, by estimate, for readers that joined a piece of several segments
    midway."""
    peer_payload_bytes: int
    reads_sent: int
    """READs of segments that reached a switch."""
    switch_passes: int
    """Frames into all switches' ingress pipelines."""
    joined_pieces: int
    pieces: int
    pending_peak: int
    """Segments waited for at once, at the busiest home's switch."""
    collisions: int
    """Pieces that met another piece's entry in their place of the pending interest table."""
    rounds: int
    unsettled: float
    """Share of the pieces that the last round moved by more than UNSETTLED_NS."""

    @property
    def fetch_ms(self) -> NDArray[np.float64]:
        return self.fetch_ns / 1e6


@dataclass
class _Pieces:
    """The reads cut up; arrays of shape (pieces,) unless said otherwise."""

    read: Ints
    number: Ints
    """Within the read."""
    place: Ints
    """Within the stream: what one get wants of one home, in order."""
    before: Ints
    """The piece that must have come before this one is asked for, or -1."""
    payload: Ints
    frames: Ints
    first_of_read: Ints
    """(reads,): index of each read's first piece."""
    unit: Ints
    """Which unit each piece belongs to: what one READ asks for."""
    first_of_unit: Ints
    """(units,): index of each unit's first piece; its others follow."""

    @classmethod
    def of(cls, demand: Demand, options: FlowOptions) -> _Pieces:
        size = demand.read_bytes
        turn = options.turn_frames * options.chunk_bytes
        piece_bytes = np.full(len(size), turn, np.int64)
        while (big := -(-size // piece_bytes) > options.max_pieces).any():
            piece_bytes[big] *= 2
        count = np.maximum(1, -(-size // piece_bytes))
        total = int(count.sum())
        read = np.repeat(np.arange(len(size)), count)
        first = np.cumsum(count) - count
        number = np.arange(total) - first[read]
        payload = np.minimum(piece_bytes[read], size[read] - number * piece_bytes[read])
        # What a READ asks for: a segment, or where pieces are larger, a piece.
        per_unit = np.maximum(1, options.segment_bytes // piece_bytes)[read]
        stream_key = (demand.read_request * demand.nodes + demand.read_node) * demand.nodes + (
            demand.read_home
        )
        _, stream = np.unique(stream_key, return_inverse=True)
        order = np.argsort(stream[read], kind="stable")
        in_order = stream[read][order]
        begins = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
        lengths = np.diff(np.r_[begins, total])
        position = np.arange(total) - np.repeat(begins, lengths)
        new_unit = (number % per_unit == 0)[order].astype(np.int64)
        unit = np.cumsum(new_unit) - 1
        unit_begins = np.flatnonzero(new_unit)
        unit_of_stream = unit - np.repeat(unit[begins], lengths)
        unit_bytes = np.maximum(options.segment_bytes, piece_bytes)[read][order]
        window = np.maximum(2, options.window * options.segment_bytes // unit_bytes)
        # Asked for once the last piece of the unit `window` earlier has come.
        waits_for = unit_begins[np.maximum(0, unit - window + 1)] - 1
        in_first_window = unit_of_stream < window
        before = np.empty(total, np.int64)
        before[order] = np.where(in_first_window, NONE, order[waits_for])
        place = np.empty(total, np.int64)
        place[order] = np.where(in_first_window, position, np.arange(total) - unit_begins[unit])
        frames = -(-payload // options.chunk_bytes)
        first_of_unit = np.flatnonzero(number % per_unit == 0)
        whose = np.cumsum(number % per_unit == 0) - 1
        return cls(read, number, place, before, payload, frames, first, whose, first_of_unit)


def serve(link: Ints, ready: Ints, service: Ints, turn: Ints | None = None) -> tuple[Ints, Ints]:
    """Serve what comes to many queues: when each item's service starts and ends.

    All of one shape: the queue of each item, from when an item can be served, and how long that
    takes. First come first served (ties: as they stand), or by `turn`, and those of one turn as
    they come: then no item may have a lower turn than one whose service starts before it comes.
    """
    if turn is None:
        order = np.argsort(link * _SPAN + ready, kind="stable")
    else:
        order = np.lexsort((ready, turn, link))
    in_order, need = link[order], service[order]
    new = np.r_[True, in_order[1:] != in_order[:-1]] if len(order) else np.zeros(0, bool)
    group = np.cumsum(new) - 1
    done = np.cumsum(need)
    before = done - need
    before -= before[np.flatnonzero(new)][group]
    slack = ready[order] - before + group * _SPAN
    end_in_order = np.maximum.accumulate(slack) - group * _SPAN + before + need
    end = np.empty(len(link), np.int64)
    end[order] = end_in_order
    return end - service, end


class _Schedule:
    """What links served in the round before, to be looked up by link and time.

    `since`: by what it is found; `start` and `end` of its service, and whatever else is wanted.
    """

    def __init__(self, link: Ints, since: Ints, **columns: Ints) -> None:
        order = np.lexsort((since, link))
        self._link = link[order]
        self._key = self._link * _SPAN + since[order]
        self._columns = {name: column[order] for name, column in columns.items()}

    def last(self, link: Ints, at: Ints) -> tuple[NDArray[np.bool_], dict[str, Ints]]:
        """The last item of each link that was there before `at`: whether there is one, and it."""
        place = np.searchsorted(self._key, link * _SPAN + at, side="left") - 1
        found = np.maximum(place, 0)
        there = (place >= 0) & (self._link[found] == link)
        return there, {name: column[found] for name, column in self._columns.items()}


def _turns(
    flow: Ints, link: Ints, ready: Ints, place: Ints, service: Ints, before: _Schedule | None
) -> Ints:
    """Whose turn it is: start tags of start-time fair queueing (Goyal et al., SIGCOMM 1996).

    Items of one flow (a home's reader) have tags as far apart as they take; who comes while a link
    is busy starts at the tag that is served just then, else at the time. `before`: link, start, end
    and tag of what was served in the round before.
    """
    now = ready
    if before is not None:
        there, served = before.last(link, ready)
        now = np.where(there & (served["end"] > ready), served["tag"], ready)
    order = np.lexsort((place, ready, flow))
    need = service[order]
    begins, lengths = _runs(flow[order])
    done = np.cumsum(need)
    earlier = done - need
    earlier -= np.repeat(earlier[begins], lengths)
    group = np.repeat(np.arange(len(begins)), lengths) * _SPAN
    tag = np.empty(len(flow), np.int64)
    tag[order] = np.maximum.accumulate(now[order] - earlier + group) - group + earlier
    return tag


def _runs(in_order: Ints) -> tuple[Ints, Ints]:
    """Where each run of equal values begins, and how long it is."""
    begins = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]])
    return begins, np.diff(np.r_[begins, len(in_order)])


def _leaders(group: Ints, asked: Ints, until: Ints) -> Ints:
    """For each item the one whose answer it shares (itself, if it asks anew), by index.

    Items of one group are taken in order of `asked`. The first leads; an item joins the last
    leader, if it asks before that one's `until`, and leads otherwise.
    """
    count = len(group)
    order = np.argsort(group * _SPAN + asked, kind="stable")
    at, wait = asked[order], until[order]
    new = np.r_[True, group[order][1:] != group[order][:-1]]
    rank = np.cumsum(new) - 1
    key = rank * _SPAN + at
    following = np.searchsorted(key, rank * _SPAN + np.maximum(wait, at + 1), side="left")
    ends = np.r_[np.flatnonzero(new)[1:], count]
    leads = np.zeros(count, bool)
    current = np.flatnonzero(new)
    limit = ends
    while len(current):
        leads[current] = True
        after = following[current]
        on = after < limit
        current, limit = after[on], limit[on]
    last = np.maximum.accumulate(np.where(leads, np.arange(count), 0))
    leader = np.empty(count, np.int64)
    leader[order] = order[last]
    return leader


@dataclass
class _Run:
    """One run's arrays, fixed over all rounds."""

    demand: Demand
    fabric: Fabric
    options: FlowOptions
    pieces: _Pieces = field(init=False)

    def __post_init__(self) -> None:
        demand, fabric, options = self.demand, self.fabric, self.options
        if len(demand.read_block) >= _SPAN_GROUPS:
            raise SpanError(
                f"a run takes at most {_SPAN_GROUPS - 1} reads: simulate slices of time"
            )
        self.pieces = pieces = _Pieces.of(demand, options)
        read = pieces.read
        self.node, self.home = demand.read_node[read], demand.read_home[read]
        self.block = demand.read_block[read]
        self.request = demand.read_request[read]
        edge = fabric.edge
        self.home_edge, self.reader_edge = edge[self.home], edge[self.node]
        self.ns_per_byte = 8e9 / fabric.bits_per_s
        overhead = FRAME_OVERHEAD_BYTES + HEADER_BYTES
        self.wire = pieces.payload + pieces.frames * overhead
        self.frame = np.minimum(pieces.payload, options.chunk_bytes) + overhead
        self.source = fabric.up[self.home]
        self.sink = fabric.down[self.node]
        self.path_hash = mix(self.block)
        self.group = self._same_piece()
        self.need = self.service(self.source, self.wire)
        self.repairs = np.zeros(len(read), bool)
        self.gather = demand.request_gather[self.request] if options.gathers else None

    def _same_piece(self) -> Ints:
        """Equal for pieces that one answer can serve."""
        most = int(self.pieces.number.max()) + 1
        # Replicas of one block answer for themselves.
        key = (self.block * most + self.pieces.number) * self.demand.nodes + self.home
        group: Ints = np.unique(key, return_inverse=True)[1].astype(np.int64)
        return group

    def service(self, links: Ints, wire: Ints) -> Ints:
        need: Ints = np.maximum(1, np.rint(wire * self.ns_per_byte[links])).astype(np.int64)
        return need

    def solve(self) -> Outcome:
        demand, options, pieces = self.demand, self.options, self.pieces
        read_delay = options.link_delay_ns + np.rint(
            READ_BYTES * self.ns_per_byte[self.fabric.up[self.node]]
        ).astype(np.int64)
        hops = self.fabric.middle(self.home_edge, self.reader_edge, self.path_hash)
        extra_hops = sum((hop != NONE).astype(np.int64) for hop in hops) if hops else 0
        hop_delay = extra_hops * options.link_delay_ns
        done = np.zeros(len(pieces.read), np.int64)
        until = np.zeros(len(pieces.read), np.int64)
        start = demand.request_at + demand.request_jitter
        everybody = np.arange(len(pieces.read))
        leader, parent = everybody, np.full(len(everybody), NONE)
        changed = np.ones(0, bool)
        turns = changed.astype(np.int64)
        sent: _Schedule | None = None
        came: _Schedule | None = None
        rounds = 0
        for rounds in range(1, options.max_rounds + 1):
            begin = start[self.request]
            ask = np.where(pieces.before >= 0, done[pieces.before], begin) + read_delay
            if sent is not None and came is not None:  # not where it is coarse
                ask = self._read_leaves(ask, sent)
                ready = self._read_arrives(ask + hop_delay, came)
            else:
                ready = ask + hop_delay
            source = self.source
            ready = ready + options.link_delay_ns + options.card_delay_ns + options.home_ns
            if options.way == "coalesce":
                leader, ready = self._join(leader, ask, ready, until, done, rounds == 1)
            elif options.way == "peers":
                source, ready, parent = self._from_peers(ask, done, ready)
            if self.gather is not None and options.way == "coalesce":
                ready = ready + np.where((pieces.before < 0) & ~self.repairs, self.gather, 0)
            sends = np.flatnonzero(leader == everybody)
            link, need = source[sends], self.service(source[sends], self.wire[sends])
            flow = link * demand.nodes + self.node[sends]
            same_turns = True
            if options.coarse:
                sent_at, sent_by = serve(link, ready[sends], need)
            else:
                turn = _turns(flow, link, ready[sends], pieces.place[sends], need, sent)
                sent_at, sent_by = serve(link, ready[sends], need, turn)
                same_turns = np.array_equal(turn, turns)
                turns = turn
                sent = _Schedule(link, sent_at, end=sent_by, tag=turn)
            first = np.zeros(len(everybody), np.int64)
            last = first.copy()
            one = self.service(source[sends], self.frame[sends])
            first[sends] = sent_at + one + options.link_delay_ns
            last[sends] = sent_by + options.link_delay_ns
            until = last + hop_delay
            first, last = first[leader], last[leader]
            for hop in hops:
                first, last = self._cross(hop, leader, first, last)
            # Who joins midway gets nothing that passed before it asked.
            first = np.where(leader != everybody, np.maximum(first, ask), first)
            need = self.service(self.sink, self.wire)
            _, arrive_by = serve(self.sink, first, need)
            if not options.coarse:
                came = _Schedule(self.sink, first, first=first, last=last, need=need, end=arrive_by)
            arrive_by = np.maximum(arrive_by, last + self.service(self.sink, self.frame))
            now_done = arrive_by + options.link_delay_ns + options.card_delay_ns
            now_done = now_done + options.reader_ns
            now_start = self._starts(start, now_done)
            changed = np.abs(now_done - done) > UNSETTLED_NS
            same = np.array_equal(now_done, done)
            settled = same_turns and same and np.array_equal(now_start, start)
            done, start = now_done, now_start
            if done.max(initial=0) >= _SPAN:
                raise SpanError(f"a run spans at most {_SPAN / NS:.0f} s")
            if settled:
                break
        return self._outcome(
            leader, source, hops, ask, until, done, start, parent, rounds, float(changed.mean())
        )

    def _join(
        self, leader: Ints, ask: Ints, ready: Ints, until: Ints, done: Ints, first: bool
    ) -> tuple[Ints, Ints]:
        """Whose answer each piece comes with, and from when homes can send.

        A READ joins the wait for its segment until the last piece has passed. What has passed by
        then is asked for afterwards, by a READ for part of a segment, which nobody can join.
        """
        pieces = self.pieces
        everybody = np.arange(len(ask))
        begins, unit = pieces.first_of_unit, pieces.unit
        ends = np.r_[begins[1:], len(ask)] - 1
        asked = ask[begins]
        if first:
            gather = 0 if self.gather is None else self.gather[begins]
            hypothetical = ready[ends] + gather + self.need[begins] * (ends - begins + 1)
        else:
            leads = leader[ends] == ends
            hypothetical = np.where(leads, until[ends], asked + self.need[begins])
        group = self.group[begins]
        lead_unit = _leaders(group, asked, np.maximum(hypothetical, asked + 1))[unit]
        joined = lead_unit != unit
        leader = begins[lead_unit] + everybody - begins[unit]
        self.repairs = joined & (until[leader] <= ask)
        if first:
            self.repairs[:] = False
        leader = np.where(self.repairs, everybody, leader)
        again = np.maximum(ask, done[ends[unit]]) - ask + ready
        return leader, np.where(self.repairs, again, ready)

    def _read_leaves(self, ask: Ints, sent: _Schedule) -> Ints:
        """A READ waits for what its node's card is just sending: a turn at most."""
        link = self.fabric.up[self.node]
        there, served = sent.last(link, ask)
        frames = self.options.turn_frames * self.frame
        bound = ask + self.service(link, frames)
        return np.where(there & (served["end"] > ask), np.minimum(served["end"], bound), ask)

    def _read_arrives(self, ask: Ints, came: _Schedule) -> Ints:
        """A READ waits behind what stands in the queue of its home's link."""
        there, item = came.last(self.fabric.down[self.home], ask)
        not_here_yet = np.clip(item["last"] - ask, 0, None) / np.maximum(
            1, item["last"] - item["first"]
        )
        until = item["end"] - (item["need"] * np.minimum(1.0, not_here_yet)).astype(np.int64)
        return np.where(there, np.maximum(ask, until), ask)

    def _cross(self, hop: Ints, leader: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """One hop between switches: when each piece's copy has its first and last frame there."""
        crosses = np.flatnonzero(hop != NONE)
        if not len(crosses):
            return first, last
        unit = self._copies(hop, leader)[crosses]
        _, chosen, which = np.unique(unit, return_index=True, return_inverse=True)
        chosen = crosses[chosen]
        link = hop[chosen]
        started, ended = serve(link, first[chosen], self.service(link, self.wire[chosen]))
        delay = self.options.link_delay_ns
        one = self.service(link, self.frame[chosen])
        first, last_there = first.copy(), last.copy()
        ended = np.maximum(ended, last[chosen] + one)
        first[crosses] = (started + one + delay)[which]
        last_there[crosses] = (ended + delay)[which]
        return first, last_there

    def _copies(self, hop: Ints, leader: Ints) -> Ints:
        """Which copy each piece is on this link: one for each answer, or, where spines do not
        copy, one for each answer and edge switch of its readers."""
        links = len(self.ns_per_byte)
        unit = leader * links + hop
        if self.options.copies_part_at_edges:
            unit = unit * self.fabric.edges + self.reader_edge
        return unit

    def _starts(self, start: Ints, done: Ints) -> Ints:
        """When each request starts: at its time, or when the one before it has ended. One that
        reads nothing ends as it starts."""
        demand = self.demand
        ended = start.copy()
        np.maximum.at(ended, self.request, done)
        after = demand.request_after
        start = np.where(after >= 0, np.maximum(demand.request_at, ended[after]), demand.request_at)
        return start + demand.request_jitter

    def _from_peers(self, ask: Ints, done: Ints, ready: Ints) -> tuple[Ints, Ints, Ints]:
        """Each reader of a block but the first takes it from an earlier one."""
        demand, pieces, options = self.demand, self.pieces, self.options
        # A read's first piece is not always the first to be asked for: the one before it, for
        # which that waits, may come from another peer, and late.
        asked = np.minimum.reduceat(ask, pieces.first_of_read)
        order = np.lexsort((asked, demand.read_block))
        block = demand.read_block[order]
        new = np.flatnonzero(np.r_[True, block[1:] != block[:-1]])
        begins = np.repeat(new, np.diff(np.r_[new, len(block)]))
        rank = np.arange(len(block)) - begins
        parent_read = np.full(len(block), NONE, np.int64)
        parent_place = begins + (rank - 1) // options.fan_out
        parent_read[order] = np.where(rank > 0, order[np.maximum(parent_place, 0)], NONE)
        mine = parent_read[pieces.read]
        parent = np.where(mine >= 0, pieces.first_of_read[mine] + pieces.number, NONE)
        source = np.where(parent >= 0, self.fabric.up[self.node[parent]], self.source)
        ready = np.where(parent >= 0, np.maximum(ready, done[parent]), ready)
        return source, ready, parent

    def _outcome(
        self,
        leader: Ints,
        source: Ints,
        hops: list[Ints],
        ask: Ints,
        until: Ints,
        done: Ints,
        start: Ints,
        parent: Ints,
        rounds: int,
        unsettled: float,
    ) -> Outcome:
        demand, pieces, options, fabric = self.demand, self.pieces, self.options, self.fabric
        everybody = np.arange(len(pieces.read))
        sends = leader == everybody
        links = len(self.ns_per_byte)
        carried = np.bincount(source[sends], self.wire[sends], links)
        carried += np.bincount(self.sink, self.wire, links)
        passes = int(pieces.frames[sends].sum())
        for hop in hops:
            crosses = np.flatnonzero(hop != NONE)
            _, chosen = np.unique(self._copies(hop, leader)[crosses], return_index=True)
            chosen = crosses[chosen]
            carried += np.bincount(hop[chosen], self.wire[chosen], links)
            passes += int(pieces.frames[chosen].sum())
        # A READ is for a segment; of pieces that are less, the first of each asks for all.
        segments = np.zeros(len(everybody), np.int64)
        begins = pieces.first_of_unit
        segments[begins] = -(-pieces.payload[begins] // options.segment_bytes)
        reads_sent = int(segments.sum())
        carried += np.bincount(fabric.up[self.node], segments * READ_BYTES, links)
        to_home = fabric.down[self.home[sends]]
        carried += np.bincount(to_home, segments[sends] * READ_BYTES, links)
        begin_of_leader = (until - self.service(source, self.wire))[leader]
        share = (ask - begin_of_leader) / np.maximum(1, (until[leader] - begin_of_leader))
        late = np.floor(np.clip(share, 0, 1) * segments) * options.segment_bytes
        repaired = int(np.where(sends, 0, late).sum()) if options.way == "coalesce" else 0
        get = demand.read_request * demand.nodes + demand.read_node
        read_end = np.maximum.reduceat(done, pieces.first_of_read) if len(done) else done
        names, which = np.unique(get, return_inverse=True)
        ended = np.zeros(len(names), np.int64)
        np.maximum.at(ended, which, read_end)
        request = names // demand.nodes
        from_peer = parent >= 0
        ends = np.r_[begins[1:], len(everybody)] - 1
        leads = begins[sends[ends]]
        until[leads] = until[ends[sends[ends]]]
        peak, collisions = self._pending(leads, ask, until, segments)
        home_payload = int(pieces.payload[sends & ~from_peer].sum()) + repaired
        return Outcome(
            request_start=start,
            read_end=read_end,
            fetch_ns=ended - start[request],
            link_bytes=np.rint(carried).astype(np.int64),
            home_payload_bytes=home_payload,
            peer_payload_bytes=int(pieces.payload[from_peer].sum()),
            reads_sent=reads_sent,
            switch_passes=passes + reads_sent,
            joined_pieces=int((~sends).sum()),
            pieces=len(everybody),
            pending_peak=peak,
            collisions=collisions,
            rounds=rounds,
            unsettled=unsettled,
        )

    def _pending(self, chosen: Ints, ask: Ints, until: Ints, segments: Ints) -> tuple[int, int]:
        """Entries of the home's edge switch in use at once, and how often two pieces wanted the
        same one while it was in use."""
        if self.options.way != "coalesce" or not len(chosen):
            return 0, 0
        switch = self.home_edge[chosen]
        begin, end = ask[chosen], until[chosen]
        in_flight = np.minimum(segments[chosen], self.options.window)
        times = np.r_[begin, end]
        change = np.r_[in_flight, -in_flight]
        order = np.lexsort((change, times, np.r_[switch, switch]))
        new = np.r_[switch, switch][order]
        level = np.cumsum(change[order])
        first = np.r_[True, new[1:] != new[:-1]]
        peak = int((level - (level - change[order])[first][np.cumsum(first) - 1]).max())
        slot = mix(self.group[chosen]) % self.options.pending_entries
        place = switch * self.options.pending_entries + slot
        order = np.lexsort((begin, place))
        _, rank = np.unique(place[order], return_inverse=True)
        ends = np.maximum.accumulate(end[order] + rank * _SPAN) - rank * _SPAN
        same = np.r_[False, rank[1:] == rank[:-1]]
        busy = np.r_[False, begin[order][1:] < ends[:-1]]
        return peak, int((same & busy).sum())


def simulate(
    demand: Demand,
    fabric: Fabric,
    options: FlowOptions | None = None,
) -> Outcome:
    """Let all reads of a demand pass a network. SpanError if they last for longer than 73 minutes;
    ValueError for a demand of other hosts than the network's."""
    if demand.nodes != fabric.hosts:
        raise ValueError(f"{demand.nodes} nodes ask on a network of {fabric.hosts} hosts")
    if not len(demand.read_block):
        return _nothing(demand, fabric)
    return _Run(demand, fabric, options or FlowOptions()).solve()


def _nothing(demand: Demand, fabric: Fabric) -> Outcome:
    none = np.zeros(0, np.int64)
    links = np.zeros(len(fabric.bits_per_s), np.int64)
    start = demand.request_at + demand.request_jitter
    return Outcome(
        request_start=start,
        read_end=none,
        fetch_ns=none,
        link_bytes=links,
        home_payload_bytes=0,
        peer_payload_bytes=0,
        reads_sent=0,
        switch_passes=0,
        joined_pieces=0,
        pieces=0,
        pending_peak=0,
        collisions=0,
        rounds=0,
        unsettled=0.0,
    )
