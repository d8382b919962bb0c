"""The requester: fetches blocks from their homes, READ by READ, until they are complete or missed.

Owns: what each call, each frame and each timer means for a fetch. Must not know: sockets, clocks,
global randomness (time and a random source are handed in), tiers, or what an arena is. Follows
docs/architecture.md, "On the path, never in the way"; the shape (events in, instructions out) is
that of aioquic's core. It puts together what can be read apart:

    fetch      the states of a fetch          lifecycle  how a fetch begins, moves on, and ends
    segment    the states of a segment        asking     whom to ask for what, and when again
    failover   which home next                assembly   one copy, from chunks

A caller does three things: it starts fetches (`fetch`), passes on what it receives (`receive`)
and calls `handle_timer` when `get_timer` says so; after each of them it takes `frames_to_send`
and drains `next_event`. Every fetch ends in exactly one `Fetched` or `Missed`, at its deadline at
the latest.

A fetch asks one home at a time. Its life, from top to bottom as far as it must go:

1. (`expect` only) wait for the DATA that somebody else of the reader group asks for;
2. READ full segments, as many at once as the home's window and the agent's credit allow, and
   where a switch holds the block, the window of such answers; the first DATA decides which copy
   the fetch takes (digest and size); from then on chunks of other copies are dropped;
3. a gap at the LAST chunk, or silence, is answered by a READ of the missing chunks (PARTIAL), or of
   the full segment again (RETRY) where nothing of it came;
4. a home that stays silent, or has not got the block, is left for the next one; if the chosen copy
   is nowhere any more, the assembly starts anew with whatever copy there is;
5. with all homes tried: the bulk way (TCP), if there is one; else a miss that says why.

The assembled bytes must have the chosen digest. If they do not, somebody lied or a bit flipped:
everything is thrown away, the next home is asked, and from then on only the home asked is
listened to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Final

from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.messages.wire import (
    CELLS,
    FLAG_LAST,
    FLAG_PARTIAL,
    FLAG_RESIDENT,
    FLAG_SHARED,
    FLAG_WRITE,
    MISS_CHUNK_SIZE,
    MISS_DIGEST_GONE,
    MISS_NO_WRITE,
    MISS_NOT_FOUND,
    MISS_NOT_HOME,
    MISS_OVERLOADED,
    OP_DATA,
    OP_MISS,
    OP_OFFER,
    OP_WRITTEN,
    SEGMENT_BYTES,
    BlockId,
    Chunking,
    Frame,
    WireError,
    chunking_of,
    decode_offer,
    segment_index,
)
from kvcast.protocol.placement import Arrived, Placement
from kvcast.protocol.requester.assembly import Assembly
from kvcast.protocol.requester.events import (
    Allocate,
    BulkCopy,
    DuplicateFetchError,
    Event,
    MissReason,
    OfferReceived,
    ReadFrames,
    RequesterConfig,
    RequesterCounters,
    WrongResident,
)
from kvcast.protocol.requester.failover import Candidates, Standing
from kvcast.protocol.requester.fetch import (
    IN_BULK,
    Deadline,
    Expectation,
    Fetch,
    FetchEvent,
    FetchState,
)
from kvcast.protocol.requester.landing import Landing
from kvcast.protocol.requester.lifecycle import Lifecycle
from kvcast.protocol.requester.segment import AWAITING, Segment, SegmentEvent, SegmentState
from kvcast.protocol.requester.story import Story

MEETING_MS: Final = 1000
"""Who was told of another reader expects answers to be shared for so long, until some are."""
MOST_MET: Final = 4096
"""Blocks of which it is known that others want them, too."""
MOST_GROUPS: Final = 256
"""Reader groups of which it is known when their DATA came last."""
_ASKED: Final = SegmentState.ASKED
_RECEIVING: Final = SegmentState.RECEIVING
_GAPPED: Final = SegmentState.GAPPED


class Requester:
    """See the module's description. All times are seconds on one monotonic clock of the
    caller's; nodes are indices as in the pool map."""

    def __init__(
        self,
        config: RequesterConfig,
        *,
        allocate: Allocate,
        rng: random.Random,
        placement: Placement | None = None,
    ) -> None:
        self.counters = RequesterCounters()
        self.placement = Placement() if placement is None else placement
        """Where the copies that are being put together are known to whoever receives: what arrives
        of them is told to `placed`, everything else to `receive`."""
        self._allocate = allocate
        self._life = Lifecycle(config, self.counters, rng)
        self._group_heard_at: BoundedMap[int, float] = BoundedMap(MOST_GROUPS)
        self._fetches = self._life.fetches
        self._by_block = self._life.by_block
        self._timers = self._life.timers
        self._asker = self._life.asker
        self._next_id = 1
        self._met: BoundedMap[BlockId, float] = BoundedMap(MOST_MET)
        """Until when it is so."""

    @property
    def config(self) -> RequesterConfig:
        """The tunables in force; may be replaced at any time."""
        return self._asker.config

    @config.setter
    def config(self, config: RequesterConfig) -> None:
        self._asker.config = config

    # --- what the caller does -------------------------------------------------------------

    def fetch(
        self,
        now: float,
        block: BlockId,
        homes: Sequence[int],
        *,
        deadline: float,
        expect_size: int | None = None,
        expect_digest: int = 0,
        chunking: Chunking = CELLS,
        gather_ms: int | None = None,
        gathers: bool = True,
        group: int = 0,
        expect: bool = False,
        expect_waits: int = 1,
        probe: bool = True,
        resident: bool = False,
        repeat: bool = False,
    ) -> int:
        """Start fetching `block` from the first of `homes` that works; returns the fetch's id.

        `homes` lists node indices in the order of preference; DATA from other nodes is not
        taken. `deadline` is a time on the clock of `now`. With `expect_size` (bytes) the first
        round trip already asks for several segments, and copies of another size are refused.
        With `expect_digest` (not 0) no copy but that one is taken.
        READs are for chunks of `chunking`, unless the home is known to send no such ones.
        Without `probe` no offer is taken. Nor is one if a switch holds the block, or is to
        (`resident`); nor is a READ sent twice then, which a switch answers twice. Without
        `gathers` no READ gathers, whatever `gather_ms` or the configuration say, and however many
        answers are shared. `repeat`: its first segment was asked for past this, and nothing came.
        With `expect`, nothing is asked for until the reader group's DATA fails to come, be it of
        this block or of others, for `expect_waits` times the time that is configured. Where
        the fetch cannot start (no home, too many fetches, deadline over), its `Missed` is the
        next event.

        Raises DuplicateFetchError if the block is being fetched, and ValueError for arguments
        out of range.
        """
        if block in self._by_block:
            raise DuplicateFetchError(f"{block} is being fetched")
        if gather_ms is None:
            gather_ms = self.config.gather_ms
        if not 0 <= gather_ms <= 0xFF or not 0 <= group <= 0xFFFF:
            raise ValueError(f"gather of {gather_ms} ms or group {group} is out of range")
        if expect_size is not None and expect_size < 1:
            raise ValueError(f"expected size {expect_size} is not positive")
        fetch_id = self._next_id
        self._next_id += 1
        self.counters.fetches += 1
        refusal = self._refusal(now, homes, deadline, expect_size)
        if refusal is not None:
            self._life.refuse(fetch_id, block, refusal)
            return fetch_id
        story = Story(fetch_id, block, now)
        first = self.first_home(now, homes)
        fetch = Fetch(story, Candidates(homes, first, now, story), deadline)
        fetch.expect_size = expect_size
        fetch.expect_digest = expect_digest
        fetch.chunking = self._asker.chunking(now, first, chunking)
        fetch.gathers = gathers
        fetch.gather_ms = gather_ms if gathers else 0
        fetch.group = group
        fetch.expect_waits = expect_waits
        looks_for_company = fetch.gather_ms or group or expect
        fetch.report.met = self.has_met(now, block)
        fetch.may_probe = (
            probe and not (resident or looks_for_company or fetch.report.met)
        ) and self.may_probe(now)
        fetch.resident = resident
        self._asker.expect_company(now, fetch.gather_ms)
        self._life.begin(now, fetch, expect=expect)
        if repeat:
            fetch.segments[0].waits_at_switch = True
        self._asker.pump(now)
        return fetch_id

    def may_probe(self, now: float) -> bool:
        """Whether a fetch that begins now, and looks for no company, would take an offer."""
        return bool(self.config.usable_offer_kinds) and not self._asker.shares(now)

    def meet(self, now: float, block: BlockId) -> None:
        """A home that was asked for a block in another way says that another node wants it, too:
        it is READ, as many segments at once as while readers keep step, since both have just
        begun."""
        self.counters.met += 1
        self._met[block] = now + self.config.sharing_memory_s
        self._asker.expect_company(now, MEETING_MS)

    def has_met(self, now: float, block: BlockId) -> bool:
        """Whether a home said so of late."""
        return self._met.get(block, -inf) > now

    def weigh(self, weight_of: Callable[[int], float]) -> None:
        """Share windows and credit by weights of namespaces."""
        self._asker.fair.weight_of = weight_of

    def shares(self, now: float) -> bool:
        """Whether most answers of late went to others, too."""
        return self._asker.shares(now)

    def hears(self, now: float, group: int) -> bool:
        """Whether DATA that others of a reader group ask for comes just now."""
        return now - self._group_heard_at.get(group, -inf) < self.config.expect_wait_s

    def first_home(self, now: float, homes: Sequence[int]) -> int:
        """Which of these homes, of which there is at least one, a fetch would ask first."""
        known = [self._asker.home(home) for home in homes]
        return next((home.index for home in known if home.suspect_until <= now), homes[0])

    # --- what is read past this ----------------------------------------------------------

    def reads_alone(self, now: float) -> bool:
        """Whether a block may be read past this, as a lone one: READs ask nobody to wait."""
        return not self.config.gather_ms and not self._asker.shares(now)

    @property
    def reads_of_switch(self) -> int:
        """How many READs of what a switch holds may be out at once."""
        return int(self._asker.switch.window.size)

    def was_lost(self, now: float, sent_at: float) -> None:
        """Nothing came of such a READ, which was sent then."""
        self._asker.switch.window.lost(now, sent_at)

    def next_tag(self) -> int:
        """Where tags of such READs may begin."""
        return self._asker.next_tag()

    def was_read(
        self, now: float, home: int, rtt_s: float, *, chunks: int, shared: bool, resident: bool
    ) -> None:
        """A block of one segment was read past this, by one READ, after so long a round trip."""
        counters = self.counters
        counters.fetches += 1
        counters.reads += 1
        counters.data += chunks
        counters.data_shared += chunks if shared else 0
        counters.data_resident += chunks if resident else 0
        self._asker.was_read(now, home, rtt_s, shared=shared, resident=resident)

    def extend(self, fetch_id: int, deadline: float) -> None:
        """Give a fetch until `deadline`, if that is later than what it has; for another waiter
        that joined it. No effect on a fetch that has ended."""
        fetch = self._fetches.get(fetch_id)
        if fetch is not None:
            fetch.deadline = max(fetch.deadline, deadline)

    def cancel(self, now: float, fetch_id: int) -> None:
        """End a fetch as `Missed` (CANCELLED). No effect on one that has ended."""
        fetch = self._fetches.get(fetch_id)
        if fetch is not None:
            self._life.miss(now, fetch, MissReason.CANCELLED)
            self._asker.pump(now)

    def forget(self, now: float, indices: Collection[int]) -> None:
        """These indices stand for no node any more, or for others: ask and hear none of them.

        A fetch goes on with its other homes; one that has none left ends as `Missed`
        (UNREACHABLE), or when its bulk call does.
        """
        for fetch in list(self._fetches.values()):
            homes = fetch.homes
            gone = [home for home in homes.order if home in indices]
            for home in gone:
                homes.forget(now, home)
            fetch.listen()
            if not gone or fetch.state in IN_BULK:
                continue
            if not homes.order:
                self._life.miss(now, fetch, MissReason.UNREACHABLE)
            elif homes.current in gone:
                self._life.next_home(now, fetch)
        self._asker.pump(now)

    def receive(self, now: float, source: int, frame: Frame) -> None:
        """Take a frame, as `wire.decode` made it, that came from node `source`."""
        fetch = self._by_block.get((frame.namespace, frame.key))
        if fetch is None or chunking_of(frame.segment) is not fetch.chunking:
            self.counters.unsolicited += 1
        elif source not in fetch.homes.sources:
            self.counters.wrong_source += 1
        elif frame.op == OP_DATA:
            self._receive_data(now, source, frame, fetch)
        elif frame.op == OP_MISS:
            self._receive_miss(now, source, frame, fetch)
        elif frame.op == OP_WRITTEN:
            self._receive_written(now, source, frame, fetch)
        elif frame.op == OP_OFFER:
            self._receive_offer(source, frame, fetch)
        else:
            self.counters.unexpected_op += 1

    def placed(self, now: float, arrivals: Sequence[Arrived]) -> None:
        """Hear of DATA that `placement` has put in place, in the order in which it came."""
        by_serial = self._life.by_serial
        self._asker.more_comes = True
        done = 0
        while done < len(arrivals):
            arrived = arrivals[done]
            fetch = by_serial.get(arrived.serial)
            if fetch is None:  # an arrival before this one has ended the assembly
                self.counters.duplicates += arrived.frames
                done += 1
            elif whole := self._whole_from(fetch, arrivals, done):
                self._came_whole(now, fetch, whole)
                done += len(whole)
            else:
                self._arrived(now, fetch, arrived)
                done += 1
        if self._asker.landing is not None:
            self._asker.landing.count()
        self._asker.more_comes = False
        self._asker.pump(now)

    def bulk_done(
        self, now: float, fetch_id: int, copy: BulkCopy | None, *, no_room: bool = False
    ) -> bool:
        """Tell how a TryBulk or OfferReceived went; None = it failed, `no_room`: for lack of room
        at this node.

        True if `copy.reservation` was taken, and comes back in `Fetched`; else it stays the
        caller's (the fetch ended meanwhile, or this is not the copy, or of the size, expected).
        """
        fetch = self._fetches.get(fetch_id)
        if fetch is None or fetch.state not in IN_BULK:
            return False
        if copy is not None and self._bulk_copy_is_right(fetch, copy):
            fetch.report.bulk = True
            size = copy.reservation.view.nbytes
            self._life.fetched(now, fetch, copy.reservation, size, copy.digest)
            return True
        if fetch.state is FetchState.LAST_RESORT or not fetch.homes.order:
            self.counters.no_memory += no_room
            verdict = MissReason.NO_MEMORY if no_room else fetch.homes.worst_verdict()
            self._life.miss(now, fetch, verdict)
        else:  # an offer that led nowhere: go on with READs
            self._life.read_after_all(now, fetch)
        self._asker.pump(now)
        return False

    def get_timer(self) -> float | None:
        """When `handle_timer` must be called next; None = nothing is pending. It may come up
        with nothing to do."""
        return self._timers.next_at()

    def handle_timer(self, now: float) -> None:
        """Do what has become due by `now`."""
        while (timer := self._timers.pop_due(now)) is not None:
            if isinstance(timer, Segment):
                self._segment_timer(now, timer)
            elif isinstance(timer, Deadline):
                fetch = self._fetches[timer.fetch_id]
                if fetch.deadline > now:
                    self._timers.arm(timer, fetch.deadline)
                else:
                    self._life.miss(now, fetch, MissReason.DEADLINE)
            else:
                assert isinstance(timer, Expectation)
                self._expectation_timer(now, self._fetches[timer.fetch_id])
        self._asker.pump(now)

    def frames_to_send(self) -> list[tuple[int, Frame]]:
        """READs to send now, each with the node it goes to."""
        return [(home, frame) for home, reads in self.reads_to_send() for frame in reads.frames()]

    def reads_to_send(self) -> list[tuple[int, ReadFrames]]:
        """The same, as far as possible many together."""
        self.placement.ask_more(more=bool(self._asker.waiting))
        return self._asker.take_outbox()

    def next_event(self) -> Event | None:
        """The oldest event not taken yet; None if there is none."""
        events = self._life.events
        return events.popleft() if events else None

    @property
    def fetches_in_flight(self) -> int:
        """Fetches that have not ended."""
        return len(self._fetches)

    def block_of(self, fetch_id: int) -> BlockId | None:
        """The block of a fetch; None if there is none of this number, or it has ended."""
        fetch = self._fetches.get(fetch_id)
        return None if fetch is None else fetch.block

    @property
    def segments_in_flight(self) -> int:
        """Segments asked for, or arriving, and not complete."""
        asker = self._asker
        return asker.in_window + asker.beside + asker.landing_only

    def rto_s(self, home: int) -> float:
        """The present retransmission time-out towards `home`, without back-off."""
        return self._asker.home(home).rtt.rto_s

    def stories(self) -> list[Story]:
        """What happened to the fetches that ended last and to those in flight."""
        return self._life.stories()

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself. For tests and simulations, after
        any event; it looks at everything."""
        self._life.check()

    # --- starting and ending --------------------------------------------------------------

    def _refusal(
        self, now: float, homes: Sequence[int], deadline: float, expect_size: int | None
    ) -> MissReason | None:
        if not homes:
            return MissReason.NO_HOME
        if deadline <= now:
            return MissReason.DEADLINE
        if expect_size is not None and expect_size > self.config.max_block_bytes:
            return MissReason.WRONG_SIZE
        if len(self._fetches) >= self.config.max_fetches:
            return MissReason.QUEUE_FULL
        return None

    # --- time -------------------------------------------------------------------------------

    def _segment_timer(self, now: float, segment: Segment) -> None:
        if segment.place is not None and self._asker.landing is not None:
            self._asker.landing.look()  # some of it may have come, and not been reported
            if segment.in_flight and self._is_there(segment):
                self.landed(now, [segment])
            if not segment.in_flight:
                return
        fetch = self._fetches[segment.fetch_id]
        if self._asker.came_up(now, fetch, segment):
            return
        home = segment.home
        if home in fetch.homes.other_copies:  # it answers, but with another copy than the chosen
            fetch.homes.lacks_copy(now, home)
            self._life.next_home(now, fetch)
            return
        self._asker.home(home).suspect_until = now + self.config.suspect_s
        if fetch.chunking is not CELLS and fetch.assembly is None:
            self.counters.chunks_reduced += 1
            self._asker.use_cells(now, home)
        self._life.leave_home(now, fetch, MissReason.UNREACHABLE)

    def _expectation_timer(self, now: float, fetch: Fetch) -> None:
        # While the group's DATA flows, this block's may be yet to come.
        heard_at = max(fetch.progress_at, self._group_heard_at.get(fetch.group, fetch.progress_at))
        due = heard_at + fetch.expect_waits * self.config.expect_wait_s
        if due > now:
            self._timers.arm(fetch.expectation_timer, due)
            return
        fetch.start_reading(now)
        self._asker.enqueue(fetch)

    def _bulk_copy_is_right(self, fetch: Fetch, copy: BulkCopy) -> bool:
        view = copy.reservation.view
        if not self._size_allowed(fetch, view.nbytes):
            self.counters.wrong_size += 1
        elif fetch.expect_digest not in (0, copy.digest):
            self.counters.other_copy += 1
        else:
            return True
        return False

    # --- DATA -------------------------------------------------------------------------------

    def _receive_data(self, now: float, source: int, frame: Frame, fetch: Fetch) -> None:
        """DATA that needs a decision: no copy is chosen yet, or it may be of another copy."""
        assembly = fetch.assembly
        if assembly is None:
            assembly = self._choose_copy(now, source, frame, fetch)
            if assembly is None:
                return
        elif not assembly.is_of(frame.size, frame.digest):
            self.counters.other_copy += 1
            fetch.homes.other_copies.add(source)
            if frame.flags & FLAG_LAST:
                self._swallowed(now, source, frame, fetch)
            return
        self._arrived(now, fetch, assembly.put(frame, source))

    def _arrived(self, now: float, fetch: Fetch, arrived: Arrived) -> None:
        """Chunks of the chosen copy have come, and are in their places."""
        assembly = fetch.assembly
        assert assembly is not None
        counters = self.counters
        new = arrived.added.bit_count()
        counters.duplicates += arrived.frames - new
        if not new:
            return
        asker = self._asker
        flags, source = arrived.flags, arrived.source
        self._note_new(now, fetch, assembly, source, flags, new)
        segment = fetch.segments[arrived.segment]
        state = segment.state
        if state is not _RECEIVING and state is not _GAPPED:
            shared = None if flags & FLAG_PARTIAL else bool(flags & FLAG_SHARED)
            asker.begin(now, fetch, segment, shared=shared, whole=not arrived.missing)
        segment.base_at = now
        segment.tries = segment.silences = 0
        if arrived.tag == segment.tag:
            asker.sample(now, source, segment, resident=bool(flags & FLAG_RESIDENT))
        missing = assembly.took(arrived)
        if not missing:
            self._segment_complete(now, fetch, segment, assembly)
        elif arrived.ends_anew:
            asker.gap(now, segment, missing.bit_count())

    def _whole_from(self, fetch: Fetch, arrivals: Sequence[Arrived], at: int) -> list[Arrived]:
        """From there on, as far as they agree in copy, source and flags, those arrivals each of
        which is all of a segment that was asked for: nothing of it had come, and all has at once.
        None while an offer may be taken: there, more follows from it."""
        whole: list[Arrived] = []
        _, _, _, _, source, flags, _, _, _ = arrivals[at]
        if flags & FLAG_PARTIAL or fetch.may_probe:
            return whole
        serial, segments = arrivals[at].serial, fetch.segments
        for arrived in arrivals[at:] if at else arrivals:
            of, added, missing, index, sender, its_flags, _, _, _ = arrived
            if missing or not added or of != serial or segments[index].state is not _ASKED:
                break
            if sender != source or its_flags != flags:
                break
            whole.append(arrived)
        return whole

    def _came_whole(self, now: float, fetch: Fetch, whole: Sequence[Arrived]) -> None:
        """What `_arrived` does, for all of these together (`_whole_from`)."""
        assembly = fetch.assembly
        assert assembly is not None
        new = frames = 0
        for arrived in whole:
            new += arrived.added.bit_count()
            frames += arrived.frames
        assembly.took_whole(whole)
        self.counters.duplicates += frames - new
        flags, source = whole[0].flags, whole[0].source
        self._note_new(now, fetch, assembly, source, flags, new)
        shared, resident = bool(flags & FLAG_SHARED), bool(flags & FLAG_RESIDENT)
        self._asker.came_whole(now, fetch, whole, shared=shared, resident=resident)
        if assembly.segments_left == 0:
            self._block_complete(now, fetch, assembly)

    def _note_new(
        self, now: float, fetch: Fetch, assembly: Assembly, source: int, flags: int, new: int
    ) -> None:
        """So many chunks that were not there have come from a node."""
        counters = self.counters
        asker = self._asker
        report = fetch.report
        counters.data += new
        fetch.progress_at = now
        if fetch.group and fetch.state is FetchState.EXPECTING:
            self._group_heard_at[fetch.group] = now
        asker.heard_at[source] = now
        fetch.homes.contributors.add(source)
        if flags & FLAG_WRITE and asker.landing is not None:
            asker.landed_at[source] = now
            counters.data_by_write += new
            report.chunks_written += new
        if flags & FLAG_SHARED:
            asker.note_sharing(now, fetch)
            counters.data_shared += new
        if flags & FLAG_RESIDENT:
            assembly.resident = True
            report.chunks_resident += new
            counters.data_resident += new
        elif flags & FLAG_SHARED:
            report.chunks_shared += new
        else:
            report.chunks_plain += new

    # --- answers by RDMA --------------------------------------------------------------------

    def use_landing(self, landing: Landing | None) -> None:
        """From now on answers may come by RDMA, into these slots, or (None) not any more. What was
        to come into the slots before is asked for again when it is overdue."""
        for fetch in self._fetches.values():
            for segment in fetch.segments:
                self._asker.let_slot_go(segment)
        self._asker.use_landing(landing)
        self.placement.use_landing(*((0, 0) if landing is None else landing.in_place))

    def use_writers(self, homes: frozenset[int]) -> None:
        """The homes that can answer by RDMA."""
        self._asker.writers = homes

    def landed(self, now: float, segments: Sequence[object]) -> None:
        """The answers to the READs of these segments, which have claimed a slot, have ended: put
        what has come in its place."""
        asker = self._asker
        asker.more_comes = True
        for segment in segments:
            assert isinstance(segment, Segment)
            fetch = self._fetches.get(segment.fetch_id)
            if fetch is not None and fetch.assembly is not None and segment.place is not None:
                flags = FLAG_SHARED if fetch.saw_shared else 0
                self._take_landed(now, fetch, segment, fetch.assembly, flags, segment.home)
        asker.more_comes = False
        asker.pump(now)

    def choose(self, now: float, source: int, frame: Frame) -> bool:
        """The end of an answer by RDMA has come, maybe of a block of which no copy is chosen:
        choose the one that it is of. True = that cannot be, and all that follows from it is done;
        else it is for `placement` to take, or for `receive`."""
        fetch = self._by_block.get((frame.namespace, frame.key))
        if fetch is None or fetch.assembly is not None or source not in fetch.homes.sources:
            return False
        if chunking_of(frame.segment) is not fetch.chunking:
            return False
        segment = self._flying(source, frame, fetch)
        if segment is None or segment.place is None or segment.place.tag != frame.tag:
            return False
        return self._choose_copy(now, source, frame, fetch) is None

    def _receive_written(self, now: float, source: int, frame: Frame, fetch: Fetch) -> None:
        """The end of an answer by RDMA: what has come of it is in the landing zone."""
        segment = self._flying(source, frame, fetch)
        landing = self._asker.landing
        if segment is None or segment.place is None or segment.place.tag != frame.tag:
            self.counters.unsolicited += 1
            return
        assert landing is not None
        landing.look()  # the card may have more to say
        if not _expected(segment):
            return  # that has ended it
        assembly = fetch.assembly
        if assembly is None:
            assembly = self._choose_copy(now, source, frame, fetch)
            if assembly is None:
                return
        elif not assembly.is_of(frame.size, frame.digest):
            self.counters.other_copy += 1
            fetch.homes.other_copies.add(source)
            landing.take(segment.place)  # they are of the other copy
            self._swallowed(now, source, frame, fetch)
            return
        if not _expected(segment):
            return  # the block is shorter than was thought
        segment.written = True
        self._take_landed(now, fetch, segment, assembly, frame.flags, source)
        if _expected(segment) and self._tail_comes(segment, assembly, 0):
            index = segment.index
            last = 1 << (assembly.all_chunks(index).bit_length() - 1)
            landing.await_end(segment.place, assembly.missing[index], last)
            self._asker.await_chunks(now, segment)

    def _take_landed(
        self,
        now: float,
        fetch: Fetch,
        segment: Segment,
        assembly: Assembly,
        flags: int,
        source: int,
    ) -> None:
        """Put in place what has come. It ends the answer if both WRITTEN and the last chunk are
        there: WRITTEN goes another way through this host, and may pass chunks that the card still
        has to report."""
        landing, place = self._asker.landing, segment.place
        assert landing is not None
        assert place is not None
        chunks = landing.take(place)
        arrived = assembly.put_written(
            segment.index,
            chunks,
            landing.view(place),
            flags & FLAG_SHARED | FLAG_WRITE,
            place.tag,
            source,
            last=segment.written and not self._tail_comes(segment, assembly, chunks),
        )
        self._arrived(now, fetch, arrived)

    def _is_there(self, segment: Segment) -> bool:
        """Whether all that a segment lacks lies in the landing zone."""
        landing, assembly = self._asker.landing, self._fetches[segment.fetch_id].assembly
        if landing is None or assembly is None or segment.place is None:
            return False
        return not assembly.missing[segment.index] & ~landing.peek(segment.place)

    def _tail_comes(self, segment: Segment, assembly: Assembly, chunks: int) -> bool:
        """Whether, beside `chunks`, the last one of the segment is missing."""
        missing = assembly.missing[segment.index] & ~chunks
        return missing.bit_length() == assembly.all_chunks(segment.index).bit_length()

    def _choose_copy(self, now: float, source: int, frame: Frame, fetch: Fetch) -> Assembly | None:
        """The first DATA of an assembly decides which copy it is of."""
        if fetch.state in IN_BULK:
            self.counters.duplicates += 1
            return None
        if fetch.expect_digest not in (0, frame.digest):
            self.counters.other_copy += 1
            fetch.homes.other_copies.add(source)
            return None
        if not self._size_allowed(fetch, frame.size):
            self.counters.wrong_size += 1
            self._life.judge(now, fetch, source, MissReason.WRONG_SIZE)
            return None
        reservation = self._allocate(fetch.block, frame.size)
        if reservation is None:
            self.counters.no_memory += 1
            self._life.miss(now, fetch, MissReason.NO_MEMORY)
            self._asker.pump(now)
            return None
        fetch.happen(now, FetchEvent.CHOOSE_COPY)
        fetch.reservation = reservation
        assembly = fetch.assembly = Assembly(
            self.placement,
            fetch.block,
            frame.size,
            frame.digest,
            reservation.view,
            fetch.chunking,
            fetch.homes.sources,
        )
        self._life.by_serial[assembly.serial] = fetch
        if fetch.report.first_byte_s is None:
            fetch.report.first_byte_s = now - fetch.started_at
        known = len(fetch.segments)
        count = len(assembly.missing)
        self._asker.land_all(now, fetch.segments[count:], SegmentEvent.DROP)
        del fetch.segments[count:]
        fetch.segments += [Segment(index, fetch.story) for index in range(known, count)]
        if frame.flags & FLAG_SHARED:  # known before the next READs are made
            self._asker.note_sharing(now, fetch)
        if not fetch.may_probe:
            fetch.idle.extend(range(known, count))
            self._asker.enqueue(fetch)
            self._asker.pump(now)
        return assembly

    def _size_allowed(self, fetch: Fetch, size: int) -> bool:
        expected = fetch.expect_size
        return 0 < size <= self.config.max_block_bytes and expected in (None, size)

    def _segment_complete(
        self, now: float, fetch: Fetch, segment: Segment, assembly: Assembly
    ) -> None:
        self._asker.complete(fetch, self._asker.homes[segment.home], 1)
        self._asker.land(now, segment, SegmentEvent.COMPLETE)
        if assembly.segments_left == 0:
            self._block_complete(now, fetch, assembly)
        elif fetch.may_probe and segment.index == 0:
            self._after_first_segment(now, fetch, assembly)
        self._asker.pump(now)

    def _block_complete(self, now: float, fetch: Fetch, assembly: Assembly) -> None:
        fetch.report.payload_bytes += assembly.size
        self.counters.data_bytes += assembly.size
        if not assembly.verified():
            if assembly.resident:
                self._life.events.append(WrongResident(fetch.block, assembly.digest))
            self._life.start_anew(now, fetch)
            return
        report = fetch.report
        others = report.chunks_plain + report.chunks_shared + report.chunks_resident
        if report.chunks_written and report.chunks_written == others:
            self.counters.blocks_by_write += 1
        self._life.note_size(fetch, assembly.size)
        assert fetch.reservation is not None
        reservation, fetch.reservation = fetch.reservation, None
        self._life.fetched(now, fetch, reservation, assembly.size, assembly.digest)

    # --- MISSes -----------------------------------------------------------------------------

    def _receive_miss(self, now: float, source: int, frame: Frame, fetch: Fetch) -> None:
        reason = frame.chunk
        chosen = fetch.chosen_digest
        if fetch.state in IN_BULK:
            self.counters.other_copy += 1
            return
        if reason == MISS_NOT_HOME:
            self.counters.misses += 1
            self._wait_ended(now, source, frame, fetch)
            self._life.judge(now, fetch, source, MissReason.NOT_HOME)
            return
        if reason == MISS_NO_WRITE:
            self.counters.misses += 1
            self._asker.without_writes(now, source)
            self._wait_ended(now, source, frame, fetch)
            segment = self._flying(source, frame, fetch)
            if segment is not None:
                self._asker.swallowed(now, segment, 0.0)
            return
        if reason == MISS_CHUNK_SIZE:
            self.counters.misses += 1
            if source == fetch.homes.current and fetch.chunking is not CELLS:
                self._life.use_cells(now, fetch)
                self._asker.pump(now)
            return
        if frame.digest not in (0, chosen):
            self.counters.other_copy += 1
            self._swallowed(now, source, frame, fetch)
            return
        index = segment_index(frame.segment)
        beyond = index >= len(fetch.segments) or (index > 0 and not chosen)
        if reason == MISS_NOT_FOUND and beyond:
            self.counters.beyond += 1  # only the segment is not there, or the first will tell
        elif reason == MISS_NOT_FOUND:
            self.counters.misses += 1
            self._wait_ended(now, source, frame, fetch)
            self._life.judge(now, fetch, source, MissReason.NOT_FOUND)
        elif reason == MISS_OVERLOADED:
            self.counters.misses += 1
            self.counters.overloaded += 1
            self._overloaded(now, source, frame, fetch)
        elif reason == MISS_DIGEST_GONE and frame.digest:
            self.counters.misses += 1
            self._wait_ended(now, source, frame, fetch)
            fetch.homes.lacks_copy(now, source)
            if source == fetch.homes.current:
                self._life.next_home(now, fetch)
                self._asker.pump(now)
        else:
            self.counters.unexpected_op += 1

    def _wait_ended(self, now: float, source: int, frame: Frame, fetch: Fetch) -> None:
        """A MISS has ended the wait for a segment, at every switch on its way.

        So our next READ finds no wait of ours, and is a first READ again and not a repeat: a
        repeat is always sent on, and all who waited with us ask at this moment. If the MISS came
        from the home that we asked, that is true of the fetch's other segments too, since the home
        has answered all of them alike. If it came from another, our READ had joined the wait that
        it ended, and must be sent again; but not for ever.
        """
        index = segment_index(frame.segment)
        if frame.flags & FLAG_PARTIAL or index >= len(fetch.segments):
            return
        segment = fetch.segments[index]
        if segment.state not in AWAITING:
            return
        if segment.home == source:
            for asked in fetch.segments:
                if asked.state in AWAITING:
                    asked.waits_at_switch = False
        elif self._asker.swallowed(now, segment, self.config.reorder_min_s):
            segment.waits_at_switch = False

    def _swallowed(self, now: float, source: int, frame: Frame, fetch: Fetch) -> None:
        """A MISS or LAST about another copy ended a wait, and our READ may have joined that
        wait at a switch."""
        segment = self._flying(source, frame, fetch)
        if segment is not None:
            self._asker.swallowed(now, segment, self.config.swallowed_pause_s)

    def _overloaded(self, now: float, source: int, frame: Frame, fetch: Fetch) -> None:
        segment = self._flying(source, frame, fetch)
        if segment is None:
            return
        if not frame.flags & FLAG_PARTIAL:
            segment.waits_at_switch = False  # as `_wait_ended` says; all who waited ask again
        if not self._asker.overloaded(now, fetch, segment):
            self._life.leave_home(now, fetch, MissReason.OVERLOADED)
            self._asker.pump(now)

    def _flying(self, source: int, frame: Frame, fetch: Fetch) -> Segment | None:
        """The segment that `frame` is about, if it is in flight from `source`."""
        index = segment_index(frame.segment)
        if index >= len(fetch.segments):
            return None
        segment = fetch.segments[index]
        return segment if segment.in_flight and segment.home == source else None

    # --- offers -----------------------------------------------------------------------------

    def _receive_offer(self, source: int, frame: Frame, fetch: Fetch) -> None:
        """Keep the offer until the first segment is complete: until then sharing may show."""
        assembly = fetch.assembly
        try:
            offer = decode_offer(frame.payload)
        except WireError:
            self.counters.unexpected_op += 1
            return
        self.counters.offers_received += 1
        if (
            not fetch.may_probe
            or offer.kind not in self.config.usable_offer_kinds
            or source != fetch.homes.current
            or (assembly is not None and not assembly.is_of(frame.size, frame.digest))
            or not self._size_allowed(fetch, frame.size)
            or fetch.state in IN_BULK
        ):
            self.counters.offers_ignored += 1
            return
        fetch.offer = offer

    def _meet(self, now: float, fetch: Fetch) -> None:
        """Whoever shared the first segment goes on at the home that has answered it, so that the
        rest is shared, too, although each may have asked another home."""
        homes = fetch.homes
        if fetch.saw_shared and len(homes.contributors) == 1 and not homes.strict:
            (home,) = homes.contributors
            if home != homes.current and homes.standing.get(home) is Standing.UNTRIED:
                homes.yield_to(now, home)

    def _after_first_segment(self, now: float, fetch: Fetch, assembly: Assembly) -> None:
        """Take the rest the way offered, if nobody shares the reads; else by READs."""
        offer = fetch.offer
        if offer is not None and not fetch.saw_shared:
            fetch.may_probe = False
            self.counters.offers += 1
            self.counters.data_bytes += SEGMENT_BYTES
            fetch.report.payload_bytes += SEGMENT_BYTES
            reservation, fetch.reservation = fetch.reservation, None
            assert reservation is not None
            event = OfferReceived(
                fetch.id,
                fetch.block,
                fetch.homes.current,
                offer,
                assembly.size,
                assembly.digest,
                reservation,
                SEGMENT_BYTES,
            )
            self._life.leave_reads(now, fetch, FetchEvent.TAKE_OFFER)
            self._life.events.append(event)
            return
        if offer is not None:
            self.counters.offers_ignored += 1
        self._life.end_probe(fetch)
        self._meet(now, fetch)
        fetch.may_probe = False
        if fetch.state is FetchState.PROBING:
            fetch.happen(now, FetchEvent.READ_ALL)
        fetch.idle.extend(range(1, len(assembly.missing)))
        self._asker.enqueue(fetch)


def _expected(segment: Segment) -> bool:
    """Whether something of the segment may still come by RDMA."""
    return segment.place is not None
