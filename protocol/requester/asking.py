"""Asking: which segment is asked for next, of which home, and when again.

Owns: the windows of homes and the agent's credit, the turns of fetches and homes, the READs
themselves, and every time-out of a segment. Must not know: what answers mean for a fetch, which
home comes next (`failover`), or when a fetch ends.

A segment in flight counts in its home's window and the agent's credit, which keep the answers from
filling the receive buffer; or, once only losses of it are outstanding or others' answers have left
it behind, beside them (`_put_beside`); or, where its answer comes by RDMA, in neither, since it has
a slot of the landing zone to itself. Fetches wait in the queue of their home, in the order in which
they started; homes take turns.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import Final

from kvcast.protocol.fair_queue import Shares
from kvcast.protocol.messages.roce import SHARED_CHUNKING, ZONE_SLOTS, place_of
from kvcast.protocol.messages.wire import (
    CELLS,
    CHUNKS_PER_SEGMENT,
    FLAG_PADDED,
    FLAG_PARTIAL,
    FLAG_RETRY,
    FLAG_WRITE,
    FULL_SEGMENT,
    OP_READ,
    Chunking,
    Frame,
)
from kvcast.protocol.pacing import RttEstimator, Window
from kvcast.protocol.placement import Arrived
from kvcast.protocol.requester.events import ReadFrames, RequesterConfig, RequesterCounters
from kvcast.protocol.requester.fetch import Fetch, FetchState
from kvcast.protocol.requester.landing import Landing
from kvcast.protocol.requester.segment import (
    AWAITING,
    IN_FLIGHT,
    Segment,
    SegmentEvent,
    SegmentState,
)
from kvcast.protocol.timers import TimerQueue

_ASSURED: Final = 2
"""Segments that a namespace may have in flight, whatever others have: while one arrives, the next
is asked for."""
_SAVED: Final = 16.0
"""Segments for which a namespace that asks for little goes first."""
_ASSURED_IN_ALL: Final = 16
"""Segments beyond the credit, of all namespaces together, that are so asked for."""
_SHARED_GAIN: Final = 1 / 4
_SHARED_MOSTLY: Final = 0.5
"""From this part of the answers on, READs gather."""
_GATHERS_FROM_S: Final = 0.0005
"""From this round-trip time on READs gather for a millisecond, the least that they can say."""
_CONGESTION_CHUNKS: Final = CHUNKS_PER_SEGMENT // 8
"""So many chunks missing in an answer that has ended are no sign of congestion yet."""
_PATIENT_SILENCES: Final = 2
"""After so many time-outs in a row, it is not the segment's turn that has not come: its READs were
lost, as all are while a switch is away, and what the home sends meanwhile was asked for later."""
_IDLE: Final = SegmentState.IDLE
_SWITCH: Final = 1 << 16
"""No home's index: where fetches wait whose blocks a switch holds."""
_FIRST_NUMBER: Final = SHARED_CHUNKING.number(0)
"""What READs say of the first segment whose answers come by RDMA; the others' numbers follow."""


class Home:
    """What is known of one home, and the fetches that wait for its window."""

    __slots__ = (
        "awaited",
        "in_window",
        "index",
        "no_writes_until",
        "queues",
        "rtt",
        "small_until",
        "suspect_until",
        "window",
    )

    def __init__(self, index: int, config: RequesterConfig) -> None:
        self.index = index
        self.rtt = RttEstimator(config.rto_initial_s, config.rto_min_s, config.rto_max_s)
        self.window = Window(config.window_initial, config.window_max, config.queueing_target_s)
        self.in_window = 0
        """Segments that count in the window."""
        self.awaited: dict[Segment, None] = {}
        """Of them, those of which nothing has come, in the order in which they were asked for."""
        self.suspect_until = -inf
        self.small_until = -inf
        """Until then it is asked for the smallest chunks: its network seems to take no others."""
        self.no_writes_until = -inf
        """Until then it is not asked for answers by RDMA: it had none to give."""
        self.queues: dict[int, list[tuple[int, int]]] = {}
        """By namespace, a heap of fetches that have something to ask for: id and ticket; none is
        empty. An entry counts only while its fetch is `queued_at` this home."""


class Asker:
    """See the module's description. `fetches` is the requester's table of those in flight."""

    def __init__(
        self,
        config: RequesterConfig,
        counters: RequesterCounters,
        fetches: Mapping[int, Fetch],
        timers: TimerQueue,
        rng: random.Random,
    ) -> None:
        self.config = config
        self.homes: dict[int, Home] = {}
        self.fair = Shares(_SAVED)
        """Of the namespaces, in segments asked for."""
        self.flows: dict[int, int] = {}
        """By namespace, segments that count in some home's window."""
        self.waiting: dict[int, Home] = {}
        """Homes with a queue, in the order of their turns."""
        self.in_window = 0
        """Segments that count in some home's window; all together at most `credit_segments`."""
        self.beside = 0
        """Segments in flight beside the windows; as many again at most."""
        self.landing_only = 0
        """Segments in flight that count by their slots alone."""
        self.switch = self.homes[_SWITCH] = Home(_SWITCH, config)
        """What is known of answers from switches' memories. They come all at once, faster than the
        link to this host takes them. Their segments count in their homes' windows, too, since a
        switch may not have them yet."""
        self.heard_at: dict[int, float] = {}
        """By node, when new DATA came from it last."""
        self.more_comes = False
        """Whether more will be told of what came at the same time; only then is anything asked
        for, once for all of it."""
        self.landing: Landing | None = None
        """Where answers by RDMA come; None = nowhere."""
        self.writers: frozenset[int] = frozenset()
        """Homes that can answer by RDMA."""
        self.landed_at: dict[int, float] = {}
        """By home, when chunks that it has written were taken last."""
        self._outbox: list[tuple[int, ReadFrames]] = []
        self._outbox_frames = 0
        self._outbox_max = 4 * config.credit_segments
        self._counters = counters
        self._fetches = fetches
        self._timers = timers
        self._rng = rng
        self._next_ticket = 0
        self._next_tag = rng.getrandbits(32)
        self._shared_until = -inf
        self._in_step_until = -inf
        """Until then this agent's readers are taken to go along with others."""
        self._company_until = -inf
        """Until then answers are expected to be shared, since homes gather for them."""
        self._answered_at = -inf
        self._shared_part = 0.0  # of the answers of late, smoothed

    def home(self, index: int) -> Home:
        """What is known of a home."""
        home = self.homes.get(index)
        if home is None:
            home = self.homes[index] = Home(index, self.config)
        return home

    def chunking(self, now: float, home: int, largest: Chunking) -> Chunking:
        """How blocks are cut that are asked for at a home."""
        return CELLS if now < self.home(home).small_until else largest

    def use_cells(self, now: float, home: int) -> None:
        """Ask a home for the smallest chunks from now on, for a while."""
        self.home(home).small_until = now + self.config.small_chunks_s

    def use_landing(self, landing: Landing | None) -> None:
        """Answers come into these slots from now on. What could not be written into others says
        nothing about them."""
        self.landing = landing
        if landing is not None:
            for home in self.homes.values():
                home.no_writes_until = -inf

    def without_writes(self, now: float, home: int) -> None:
        """Ask a home for no answers by RDMA, for a while."""
        self.home(home).no_writes_until = now + self.config.small_chunks_s

    # --- answers by RDMA --------------------------------------------------------------------

    def _landing_of(self, now: float, fetch: Fetch, home: Home) -> Landing | None:
        """Where answers to a fetch's READs are written; None = they come by DATA. Who is in a
        reader group is answered unasked, and so without a slot."""
        if fetch.group or fetch.chunking is not SHARED_CHUNKING:
            return None
        return self._landing_from(now, home)

    def _landing_from(self, now: float, home: Home) -> Landing | None:
        """Where a home's answers are written; None where it does not, or this node cannot take
        that."""
        landing = self.landing
        if landing is None or not landing.usable or home.index not in self.writers:
            return None
        return landing if now >= home.no_writes_until else None

    def _claim(self, landing: Landing, fetch: Fetch, segment: Segment) -> bool:
        """Have the answer to a READ of the whole segment come by RDMA; False where its slot is
        another's just now: that one's end lets it go on."""
        place = place_of(*fetch.block, _FIRST_NUMBER | segment.index)
        if not landing.claim(place, segment):
            return False
        segment.place = place
        segment.written = False
        return True

    def let_slot_go(self, segment: Segment) -> None:
        """Nothing of the segment, which is in flight, is to come by RDMA any more."""
        if segment.place is not None:
            self._release(segment)
            if not segment.in_window:
                home = self.homes[segment.home]
                self.landing_only -= 1
                self._enter_window(segment, home)
                if segment.state in AWAITING and not segment.overtaken:
                    home.awaited[segment] = None

    def _release(self, segment: Segment) -> None:
        if segment.place is not None:
            assert self.landing is not None
            self.landing.release(segment.place)
            segment.place = None

    # --- turns ------------------------------------------------------------------------------

    def enqueue(self, fetch: Fetch) -> None:
        """Let the fetch wait for its home's window, if it has something to ask for."""
        current = _SWITCH if fetch.resident else fetch.homes.current
        if fetch.idle and fetch.queued_at != current:
            fetch.queued_at = current
            home = self.home(current)
            self._next_ticket += 1
            queue = home.queues.setdefault(fetch.block.namespace, [])
            heapq.heappush(queue, (fetch.id, self._next_ticket))
            self.waiting[current] = home

    def pump(self, now: float) -> None:
        """Ask for idle segments, one home after the other, while credit and windows last; a
        namespace that has next to nothing in flight need not wait until others' segments have
        come."""
        if self.more_comes:
            return
        waiting = self.waiting
        blocked = 0  # homes in a row that had nothing to ask for now
        while waiting and blocked < len(waiting):
            index, home = next(iter(waiting.items()))
            turn = None
            slots = self._free_slots(now, home)
            if slots:
                turn = self._next_idle(now, home, slots, by_write=True)
            if turn is None:
                credit = self.config.credit_segments - self.in_window
                if credit <= 0 and not self._more_than_credit():
                    return
                room = min(credit, self._window(now, home) - home.in_window)
                turn = self._next_idle(now, home, room)
            if turn is not None:
                fetch, segments = turn
                if segments[0].is_new:
                    self._ask_first(now, fetch, self.home(fetch.homes.current), segments)
                else:
                    self._take_off(now, fetch, segments[0])
                    self._ask(now, fetch, segments[0])
                blocked = 0
            elif home.queues:
                blocked += 1
            if not home.queues:
                del waiting[index]
            elif len(waiting) > 1:
                waiting[index] = waiting.pop(index)  # behind the others

    def _window(self, now: float, home: Home) -> int:
        """How many segments may be in flight from `home`.

        While readers keep step it is the same number for every one, whatever each of them has
        lost or waited for: one stream serves all, so more readers mean no more load, and a reader
        whose window were smaller would ask for what the others have had already. So it is while a
        fetch that gathers has just begun: what is asked for then, homes gather for longest. Who
        only happens to share keeps the window that keeps queues short, and so does who reads what a
        switch holds, of which each reader gets a stream of its own.
        """
        shares = now < self._in_step_until or now < self._company_until
        if shares and home is not self.switch:
            return self.config.window_shared
        return int(home.window.size)

    def _is_resident(self, segment: Segment) -> bool:
        """Whether a switch holds its block, or is to."""
        return self._fetches[segment.fetch_id].resident

    def _free_slots(self, now: float, home: Home) -> int:
        """How many segments may be asked of `home` that come by RDMA. Neither its window nor the
        credit counts: each lands in a slot of its own, so none waits in a buffer of this host; and
        who takes them is told of several at once, for which more must be on its way."""
        landing = self._landing_from(now, home)
        return 0 if landing is None else landing.room

    def _more_than_credit(self) -> bool:
        """Whether something may be asked for beyond the credit: what comes by RDMA, or for another
        namespace than that which has everything in flight."""
        if len(self.flows) > 1 or (self.landing is not None and self.landing.room):
            return True
        return any(not h.queues.keys() <= self.flows.keys() for h in self.waiting.values())

    def _next_idle(
        self, now: float, home: Home, room: int, *, by_write: bool = False
    ) -> tuple[Fetch, list[Segment]] | None:
        """The next segments to ask `home` for: as many of one fetch as there is `room` for, if
        nobody else waits for a turn, else one; where there is none, one of a namespace of which
        next to nothing is in flight, since others take it all. `by_write`: only if they come by
        RDMA."""
        full = room <= 0
        most = room if len(home.queues) == len(self.waiting) == 1 else 1
        if full and len(self.flows) == 1 and home.queues.keys() <= self.flows.keys():
            return None  # it has taken it all itself
        held: set[int] = set()  # what they have to ask for waits for slots
        while len(held) < len(home.queues):
            waiting: Collection[int] = home.queues
            if held:
                waiting = [namespace for namespace in home.queues if namespace not in held]
            if full:
                limit = self.config.credit_segments + _ASSURED_IN_ALL
                waiting = [
                    namespace
                    for namespace in waiting
                    if (mine := self.flows.get(namespace, 0)) < _ASSURED < self.in_window - mine
                    and self.in_window < limit
                ]
            if not waiting:
                return None
            namespace = self.fair.next_of(waiting) if len(waiting) > 1 else next(iter(waiting))
            queue = home.queues[namespace]
            found = self._next_of(now, home, queue, most, by_write=by_write)
            if not queue:
                del home.queues[namespace]
            if found is not None:
                self.fair.took(namespace, 1.0, len(found[1]))
                return found
            if queue:
                held.add(namespace)
        return None

    def _next_of(
        self, now: float, home: Home, queue: list[tuple[int, int]], most: int, *, by_write: bool
    ) -> tuple[Fetch, list[Segment]] | None:
        """The next segments of one namespace; None where they wait, and stay first of those.

        Fetches come in the order in which they started: the blocks of a prefix are worth nothing
        without those before, and readers of one prefix share answers if they go the same way.
        """
        while queue:
            fetch = self._fetches.get(queue[0][0])
            queued = fetch is not None and fetch.queued_at == home.index
            if fetch is not None and queued and fetch.state is not FetchState.EXPECTING:
                landing = self._landing_of(now, fetch, home)
                if by_write and landing is None:
                    return None
                found = self._take_idle(fetch, landing, most)
                if found:
                    if not fetch.idle:
                        heapq.heappop(queue)
                        fetch.queued_at = -1
                    return fetch, found
                if fetch.idle:
                    return None
            heapq.heappop(queue)
            if fetch is not None and queued:
                fetch.queued_at = -1
        return None

    def _take_idle(self, fetch: Fetch, landing: Landing | None, most: int) -> list[Segment]:
        """Take what a fetch has to ask for next: up to `most` segments, all of them new, or one
        that is not. Those that find no slot stay, in their order."""
        found: list[Segment] = []
        stay: list[int] = []
        idle, segments = fetch.idle, fetch.segments
        known = len(segments)
        while idle:
            index = idle.popleft()
            if index >= known:  # a guess was too high
                continue
            segment = segments[index]
            if segment.state is not _IDLE:
                continue
            is_new = segment.is_new
            if found and not is_new:
                stay.append(index)
                break
            if landing is None or self._claim(landing, fetch, segment):
                found.append(segment)
                if len(found) >= most or not is_new:
                    break
            else:
                stay.append(index)
                if not landing.room:
                    break
        if stay:
            idle.extendleft(reversed(stay))
        return found

    # --- into flight, beside the window, and out of flight ------------------------------------

    def _take_off(self, now: float, fetch: Fetch, segment: Segment) -> None:
        """Put a segment in flight: it is being asked for, or has begun to arrive unasked."""
        home = self.home(fetch.homes.current)
        self.switch.in_window += fetch.resident
        segment.home = home.index
        segment.tag = -1
        segment.sent_at = now
        segment.gather_s = 0.0
        segment.tries = segment.silences = 0
        if segment.place is None:
            self._enter_window(segment, home)
        else:
            self.landing_only += 1

    def _enter_window(self, segment: Segment, home: Home) -> None:
        segment.in_window = True
        home.in_window += 1
        self.in_window += 1
        namespace = segment.story.block.namespace
        self.flows[namespace] = self.flows.get(namespace, 0) + 1

    def land(self, now: float, segment: Segment, event: SegmentEvent) -> None:
        """Let a segment be complete, leave its home or be dropped: it is in flight no more."""
        segment.happen(now, event)
        self.switch.in_window -= self._is_resident(segment)
        if segment.in_window:
            home = self.homes[segment.home]
            self._leave_window(segment, home)
            home.awaited.pop(segment, None)
        elif segment.place is not None:
            self.landing_only -= 1
        else:
            self.beside -= 1
        segment.overtaken = False
        self._release(segment)
        self._timers.cancel(segment)

    def _leave_window(self, segment: Segment, home: Home) -> None:
        segment.in_window = False
        home.in_window -= 1
        self.in_window -= 1
        namespace = segment.story.block.namespace
        self.flows[namespace] -= 1
        if not self.flows[namespace]:
            del self.flows[namespace]

    def land_all(self, now: float, segments: Iterable[Segment], event: SegmentEvent) -> None:
        """The same for all of these that are in flight."""
        for segment in segments:
            if segment.state in IN_FLIGHT:
                self.land(now, segment, event)

    def _put_beside(self, segment: Segment) -> None:
        """Do not let this segment keep the next one from being asked for: its answer has ended and
        only losses are outstanding, or the answers that others share have left it behind.

        A reader that waited here would fall out of step with the others, ask for the following
        segments alone, and be answered alone. At most `credit_segments` are beside the window.
        """
        if not segment.in_window:
            return
        if segment.place is not None:
            self._leave_window(segment, self.homes[segment.home])
            self.landing_only += 1
        elif self.beside < self.config.credit_segments:
            self._leave_window(segment, self.homes[segment.home])
            self.beside += 1

    # --- answers ------------------------------------------------------------------------------

    def begin(
        self, now: float, fetch: Fetch, segment: Segment, *, shared: bool | None, whole: bool
    ) -> None:
        """Something of the segment has come: from now on its time-out is the shorter one.
        `shared`: whether the answer to a READ goes to others too; None = it is a repair. `whole`:
        nothing is missing, so that the caller lets it land at once."""
        if segment.state is _IDLE:
            self._take_off(now, fetch, segment)
        elif shared is not None:
            self._note_answers(now, shared, 1)
        self._overtake(now, segment)
        segment.happen(now, SegmentEvent.BEGIN)
        segment.overtaken = False
        segment.base_at = now
        srtt_s = self.homes[segment.home].rtt.srtt_s or 0.0
        segment.wait_s = self._jittered(max(self.config.quiet_s, srtt_s))
        segment.patience_s = 0.0
        if segment.place is not None:
            # What the card reports may lag far behind the end of the answer, which is in its order.
            segment.patience_s = (self.config.patience - 1) * segment.wait_s
        if not whole:
            self._arm(segment)

    def came_whole(
        self,
        now: float,
        fetch: Fetch,
        whole: Sequence[Arrived],
        *,
        shared: bool,
        resident: bool,
    ) -> None:
        """All of some segments of a fetch, each of which is ASKED, has come at once, from one node:
        what `begin`, `sample` and `land` do, one segment after the other."""
        segments = fetch.segments
        home = self.homes[fetch.homes.current]
        sampled_at = -inf
        self._note_answers(now, shared, len(whole))
        for arrived in whole:
            segment = segments[arrived.segment]
            if segment.in_window:
                self._overtake(now, segment)
            if arrived.tag == segment.tag and segment.sent_at != sampled_at:
                # What was asked for together tells of one round trip.
                sampled_at = segment.sent_at
                self.sample(now, arrived.source, segment, resident=resident)
            self.land(now, segment, SegmentEvent.COMPLETE)
        self.complete(fetch, home, len(whole))

    def complete(self, fetch: Fetch, home: Home, count: int) -> None:
        """So many segments of a fetch, which that home was asked for, are complete."""
        home.window.completed(count)
        if fetch.resident:
            self.switch.window.completed(count)

    def await_chunks(self, now: float, segment: Segment) -> None:
        """The answer by RDMA has ended, and the card has reported nothing of it: unless it does so
        soon, the READ has joined others' too late."""
        if segment.state is SegmentState.ASKED:
            srtt_s = self.homes[segment.home].rtt.srtt_s or 0.0
            segment.base_at = now
            segment.wait_s = self._jittered(max(self.config.quiet_s, srtt_s))
            segment.patience_s = (self.config.patience - 1) * segment.wait_s
            segment.repeat_at = inf
            self._arm(segment)

    def _overtake(self, now: float, segment: Segment) -> None:
        """Of what was asked for before `segment`, which has begun to come, nothing has.

        Shared answers come in the order in which the first of the readers asked. So those READs
        missed the answer that the others had, by being late, and get one of their own. If they
        took part of the window meanwhile, this reader would ask for as many of the next
        segments too late again, and so on to the end.
        """
        awaited = self.homes[segment.home].awaited
        if segment not in awaited:
            return
        late = []
        # What a switch holds comes at once, and says nothing of what its home was asked for.
        if now < self._shared_until and not self._is_resident(segment):
            late = list(itertools.takewhile(lambda other: other is not segment, awaited))
        for other in late:
            del awaited[other]
            other.overtaken = True
            self._counters.overtaken += 1
            self._put_beside(other)
        del awaited[segment]
        if late:
            self.pump(now)

    def gap(self, now: float, segment: Segment, chunks: int) -> None:
        """The answer has ended and chunks are missing: ask for them, unless they are only late."""
        self._counters.gaps += 1
        self._lost(now, segment, chunks)
        srtt_s = self.homes[segment.home].rtt.srtt_s or 0.0
        delay = max(self.config.reorder_min_s, min(srtt_s / 4, self.config.quiet_s))
        segment.happen(now, SegmentEvent.GAP)
        segment.ask_at = now + delay
        self._timers.arm(segment, segment.ask_at)
        self._put_beside(segment)
        self.pump(now)

    def swallowed(self, now: float, segment: Segment, pause_s: float) -> bool:
        """The wait that its READ may have joined has ended: ask again soon, but not for ever.
        READs of missing chunks join no wait, and a home that asks for patience holds none."""
        if segment.state is not SegmentState.ASKED:
            return False
        if segment.tries + 1 >= self.config.tries_per_home:
            return False
        segment.happen(now, SegmentEvent.SWALLOWED)
        segment.tries += 1
        segment.ask_at = now + self._jittered(pause_s)
        self._timers.arm(segment, segment.ask_at)
        return True

    def overloaded(self, now: float, fetch: Fetch, segment: Segment) -> bool:
        """The home is there, and asks for patience: ask again after a longer pause, or, at the
        bound, not (False)."""
        self._setback(now, fetch, segment)
        if segment.tries >= self.config.tries_per_home:
            return False
        segment.happen(now, SegmentEvent.OVERLOADED)
        self._await(now, segment, patient=False)
        return True

    def sample(self, now: float, source: int, segment: Segment, *, resident: bool) -> None:
        """The answer to this segment's last READ has begun to come: a round trip."""
        segment.tag = -1
        home = self.homes[segment.home]
        # An answer from the switch's memory says nothing about the way to the home.
        if source == home.index and not resident:
            home.suspect_until = -inf
            rtt_s = now - segment.sent_at - segment.gather_s
            if rtt_s >= 0.0:  # or we joined others, for whom the home had gathered for a while
                self._sample(now, home, rtt_s)
        elif resident:
            self._sample(now, self.switch, now - segment.sent_at)

    def next_tag(self) -> int:
        """A tag that no READ has had."""
        return self._rng.getrandbits(32)

    def was_read(
        self, now: float, index: int, rtt_s: float, *, shared: bool, resident: bool
    ) -> None:
        """A READ that was none of ours has been answered."""
        self.heard_at[index] = now
        self._note_answers(now, shared, 1)
        if shared:
            self._shared_until = now + self.config.sharing_memory_s
        if resident:
            self._sample(now, self.switch, rtt_s)
            self.switch.window.completed()
        else:
            home = self.home(index)
            home.suspect_until = -inf
            self._sample(now, home, rtt_s)

    @staticmethod
    def _sample(now: float, home: Home, rtt_s: float) -> None:
        home.rtt.sample(rtt_s)
        home.window.sample(now, rtt_s)

    # --- sharing ------------------------------------------------------------------------------

    def note_sharing(self, now: float, fetch: Fetch) -> None:
        """A frame of this fetch went to other readers, too."""
        fetch.saw_shared = True
        self._shared_until = until = now + self.config.sharing_memory_s
        if fetch.gathers and (fetch.gather_ms or fetch.group or len(fetch.segments) > 1):
            self._in_step_until = until

    def _note_answers(self, now: float, shared: bool, count: int) -> None:
        """The answers to so many READs have begun to come."""
        if now >= self._answered_at + self.config.sharing_memory_s:
            self._shared_part = float(shared)
        else:
            gain = 1 - (1 - _SHARED_GAIN) ** count
            self._shared_part += (shared - self._shared_part) * gain
        self._answered_at = now

    def expect_company(self, now: float, gather_ms: int) -> None:
        """A fetch begins whose READs let their home gather for so long."""
        self._company_until = max(self._company_until, now + gather_ms / 1000)

    def shares(self, now: float) -> bool:
        """Whether most answers of late went to others too."""
        return now < self._shared_until and self._shared_part >= _SHARED_MOSTLY

    def _keeps_step(self, now: float, fetch: Fetch) -> bool:
        """Whether others ask for the same as the fetch goes on, so that it pays to wait for them.

        That answers of one segment were shared says so only of those who looked for company:
        prompts that begin alike and come at the same time share what they have in common as they
        are, each at its own pace, and would wait for nobody."""
        if not fetch.gathers:
            return False
        return fetch.saw_shared or (now < self._in_step_until and self.shares(now))

    # --- READs --------------------------------------------------------------------------------

    def _gather(self, now: float, fetch: Fetch, home: Home) -> tuple[int, bool]:
        """How long (ms) a home may gather for the READ of a whole segment, and whether the READ is
        sent a second time meanwhile."""
        config = self.config
        first_wave = _is_first_wave(now, fetch)
        gather_ms = fetch.gather_ms if first_wave else 0
        if self._keeps_step(now, fetch):
            srtt_s = home.rtt.srtt_s
            if srtt_s is None:  # all answers yet were gathered ones
                srtt_s = fetch.gather_ms / 1000
            quarter_ms = max(1, int(srtt_s * 250)) if srtt_s >= _GATHERS_FROM_S else 0
            auto_ms = min(quarter_ms, config.auto_gather_max_ms)
            gather_ms = max(gather_ms, auto_ms)
        repeats = first_wave and not fetch.resident
        return gather_ms, repeats and gather_ms >= config.repeat_from_gather_ms

    def _ask_first(self, now: float, fetch: Fetch, home: Home, segments: Sequence[Segment]) -> None:
        """Put these segments, all of them new, in flight, and send their first READs: what
        `_take_off` and `_ask` do for others, but that what is the same for all is worked out
        once."""
        config, timers = self.config, self._timers
        gather_ms, repeats = self._gather(now, fetch, home)
        gather_s = gather_ms / 1000
        repeat_at = now + gather_s / 3 if repeats else inf
        rto_s = self.switch.rtt.rto_s if fetch.resident else home.rtt.rto_s
        wait_s = self._jittered(min(rto_s, config.rto_max_s)) + gather_s
        patience_s = (config.patience - 1) * wait_s
        if now < self._shared_until:
            patience_s = config.patience_shared_s
        if fetch.resident:
            patience_s = 0.0
            self.switch.in_window += len(segments)
        due_at = min(repeat_at, now + wait_s)
        zero, tag = fetch.chunking.number(0), self._next_tag
        numbers: list[int] = []
        for segment in segments:
            segment.happen(now, SegmentEvent.ASK)
            segment.home = home.index
            segment.waits_at_switch = True
            segment.sent_at = segment.base_at = now
            segment.gather_s = gather_s
            segment.repeat_at = repeat_at
            segment.wait_s = wait_s
            segment.patience_s = patience_s
            timers.arm(segment, due_at)
            place = segment.place
            if place is None:
                self._enter_window(segment, home)
                home.awaited[segment] = None
                segment.tag = tag
                tag = (tag + 1) & 0xFFFFFFFF
            else:
                segment.tag = place.tag
            numbers += (zero | segment.index, segment.tag)
        count = len(segments)
        self._next_tag = tag
        self._counters.reads += count
        fetch.report.reads += count
        flags = FLAG_PADDED if config.read_padding else 0
        if segments[0].place is not None:  # then all have one
            flags = FLAG_WRITE
            self._counters.reads_by_write += count
            self.landing_only += count
        self._send(
            home.index,
            ReadFrames(
                Frame(
                    *(OP_READ, *fetch.block, numbers[0], flags, fetch.group),
                    fetch.chosen_digest,
                    gather=gather_ms,
                    wanted=FULL_SEGMENT,
                    tag=numbers[1],
                ),
                numbers,
            ),
        )

    def _send(self, home: int, reads: ReadFrames) -> None:
        """Have READs sent; those for which there is no room are dropped."""
        room = self._outbox_max - self._outbox_frames
        if self.landing is not None:
            room += ZONE_SLOTS  # beyond the credit
        over = reads.how_many - room
        if over > 0:
            self._counters.outbox_dropped += over
            del reads.numbers[2 * room :]
        if reads.numbers:
            self._outbox_frames += reads.how_many
            self._outbox.append((home, reads))

    def take_outbox(self) -> list[tuple[int, ReadFrames]]:
        """READs to send now."""
        outbox, self._outbox = self._outbox, []
        self._outbox_frames = 0
        return outbox

    def _ask(self, now: float, fetch: Fetch, segment: Segment) -> None:
        """Send a READ for what the segment lacks."""
        assembly = fetch.assembly
        counters = self._counters
        config = self.config
        flags = FLAG_PADDED if config.read_padding else 0
        wanted = FULL_SEGMENT
        gather_ms, repeats = 0, False
        missing = FULL_SEGMENT if assembly is None else assembly.missing[segment.index]
        event = SegmentEvent.ASK
        if assembly is not None and missing != assembly.all_chunks(segment.index):
            event = SegmentEvent.REPAIR
            flags |= FLAG_PARTIAL
            wanted = missing
            counters.reads_partial += 1
            fetch.report.retries += 1
        elif segment.waits_at_switch:
            flags |= FLAG_RETRY
            counters.reads_retry += 1
            fetch.report.retries += 1
        else:
            gather_ms, repeats = self._gather(now, fetch, self.homes[segment.home])
        counters.reads += 1
        fetch.report.reads += 1
        if segment.state is SegmentState.IDLE:
            if event is SegmentEvent.REPAIR:
                self.let_slot_go(segment)
        elif event is SegmentEvent.ASK:
            landing = self._landing_of(now, fetch, self.homes[segment.home])
            if landing is None:
                self.let_slot_go(segment)
            elif segment.place is None:
                claimed = self._claim(landing, fetch, segment)
                if claimed and not segment.in_window:
                    self.beside -= 1
                    self.landing_only += 1
        segment.happen(now, event)
        segment.waits_at_switch = True
        segment.sent_at = now
        segment.gather_s = gather_ms / 1000
        if repeats:
            segment.repeat_at = now + segment.gather_s / 3
        if event is SegmentEvent.ASK and segment.place is not None:
            # A repeat has the same tag, so what it is answered to cannot be told.
            segment.tag = -1 if flags & FLAG_RETRY else segment.place.tag
            self._counters.reads_by_write += 1
        else:
            segment.tag = self._next_tag
            self._next_tag = (self._next_tag + 1) & 0xFFFFFFFF
        self._await(now, segment, patient=not flags & FLAG_PARTIAL)
        self._send_read(fetch, segment, flags, wanted, gather_ms)

    def _ask_twice(self, now: float, fetch: Fetch, segment: Segment) -> None:
        """Send the READ once more while its home gathers. If the first was lost, this one still
        joins the others; if not, it is dropped on the way, or the home has the same job already.
        Lost for good, a READ would cost the home the full segment once more."""
        segment.repeat_at = inf
        self._counters.reads_again += 1
        flags = FLAG_PADDED if self.config.read_padding else 0
        left_ms = round((segment.sent_at + segment.gather_s - now) * 1000)
        self._send_read(fetch, segment, flags, FULL_SEGMENT, max(0, left_ms))
        self._arm(segment)

    def _send_read(
        self, fetch: Fetch, segment: Segment, flags: int, wanted: int, gather_ms: int
    ) -> None:
        tag = segment.tag
        if segment.place is not None and not flags & FLAG_PARTIAL:
            flags = flags & ~FLAG_PADDED | FLAG_WRITE
            tag = segment.place.tag
        frame = Frame(
            OP_READ,
            fetch.block.namespace,
            fetch.block.key,
            fetch.chunking.number(segment.index),
            flags,
            fetch.group,
            fetch.chosen_digest,
            gather=gather_ms,
            wanted=wanted,
            tag=tag,
        )
        self._send(segment.home, ReadFrames(frame, [frame.segment, tag]))

    # --- time ---------------------------------------------------------------------------------

    def came_up(self, now: float, fetch: Fetch, segment: Segment) -> bool:
        """A segment's timer has come up: ask again, if that is due. False where the home has been
        silent for so long that it should be left."""
        due_at = segment.due_at(self.heard_at.get(segment.home, -inf))
        if due_at > now:
            self._timers.arm(segment, due_at)
            return True
        if segment.ask_at <= now or segment.state is SegmentState.DEFERRED:
            self._ask(now, fetch, segment)
            return True
        if segment.repeat_at <= now:
            self._ask_twice(now, fetch, segment)
            return True
        self._counters.timeouts += 1
        if segment.written and segment.state is SegmentState.ASKED:
            # Its answer has ended, and none of it has come. Once that is because others had it
            # before; twice, and nothing else has come meanwhile, because this card takes no WRITEs.
            if segment.tries and self.landed_at.get(segment.home, -inf) < segment.sent_at:
                self.without_writes(now, segment.home)
                landing = self.landing
                nothing = max(self.landed_at.values(), default=-inf) < segment.sent_at
                if landing is not None and landing.usable and nothing:
                    landing.doubt()
            segment.written = False
        segment.silences += 1
        segment.happen(now, SegmentEvent.SILENCE)
        self._setback(now, fetch, segment)
        if segment.tries >= self.config.tries_per_home:
            return False
        if segment.state is SegmentState.RECEIVING:
            self._put_beside(segment)
        self._ask(now, fetch, segment)
        return True

    def _await(self, now: float, segment: Segment, *, patient: bool) -> None:
        """Set the time-out of the READ that was sent just now."""
        config = self.config
        home = self.homes[segment.home]
        backoff = min(1 << min(segment.tries, 16), config.backoff_max)
        segment.overtaken = False
        if segment.in_window:
            home.awaited[segment] = None
        segment.base_at = now
        resident = self._is_resident(segment)
        # A switch answers at once, or not at all; else it may be that the home's turn comes.
        at_once = resident and segment.silences < _PATIENT_SILENCES
        rto_s = self.switch.rtt.rto_s if at_once else home.rtt.rto_s
        timeout_s = min(rto_s * backoff, config.rto_max_s)
        segment.wait_s = self._jittered(timeout_s) + segment.gather_s
        segment.patience_s = 0.0
        if patient and not at_once and segment.silences < _PATIENT_SILENCES + resident:
            shared = now < self._shared_until and not resident
            segment.patience_s = (config.patience - 1) * segment.wait_s
            segment.patience_s = config.patience_shared_s if shared else segment.patience_s
        self._arm(segment)

    def _arm(self, segment: Segment) -> None:
        self._timers.arm(segment, segment.due_at(self.heard_at.get(segment.home, -inf)))

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + self.config.retry_jitter * self._rng.random())

    def _setback(self, now: float, fetch: Fetch, segment: Segment) -> None:
        """A READ was not answered, or not with DATA, or the end of an answer is lost."""
        segment.tries += 1
        assembly = fetch.assembly
        missing = FULL_SEGMENT if assembly is None else assembly.missing[segment.index]
        self._lost(now, segment, missing.bit_count())

    def _lost(self, now: float, segment: Segment, chunks: int) -> None:
        """A few lost chunks are bad luck; a queue that overflows takes many. Only then the window
        shrinks: readers that share answers should keep step, and each of them loses others."""
        if chunks > _CONGESTION_CHUNKS:
            home = self.switch if self._is_resident(segment) else self.homes[segment.home]
            home.window.lost(now, segment.sent_at)

    # --- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """That counts, windows and queues agree with the segments and fetches in flight."""
        flying = [s for f in self._fetches.values() for s in f.segments if s.in_flight]
        in_window = [s for s in flying if s.in_window]
        assert self.in_window == len(in_window), f"{self.in_window} for {in_window}"
        resident = [s for s in flying if self._is_resident(s)]
        landing_only = [s for s in flying if not s.in_window and s.place is not None]
        assert self.landing_only == len(landing_only), f"{self.landing_only} for {landing_only}"
        beside = len(flying) - len(in_window) - len(landing_only)
        assert self.beside == beside, f"{self.beside} beside, of {flying}"
        assert self.beside <= self.config.credit_segments
        flows = Counter(s.story.block.namespace for s in in_window)
        assert self.flows == flows, f"{self.flows}, not {flows}"
        for home in self.homes.values():
            mine = [s for s in in_window if s.home == home.index]
            counted = resident if home is self.switch else mine
            count = home.in_window
            assert count == len(counted), f"{count} of home {home.index}: {counted}"
            awaited = {s for s in mine if s.state in AWAITING and not s.overtaken}
            assert set(home.awaited) == awaited, f"awaited of home {home.index}"
            assert not home.queues or home.index in self.waiting, f"turn of home {home.index}"
        claimed = [s.place for s in flying if s.place is not None]
        assert self.landing is None or self.landing.claims == len(claimed), f"slots of {claimed}"
        for fetch in self._fetches.values():
            queued_at = fetch.queued_at
            if queued_at >= 0:
                queue = self.homes[queued_at].queues.get(fetch.block.namespace, ())
                entries = [fetch_id for fetch_id, _ in queue]
                assert fetch.id in entries, f"{fetch} is not in the queue of home {queued_at}"
            if fetch.idle and fetch.state is not FetchState.EXPECTING:
                waits_for = _SWITCH if fetch.resident else fetch.homes.current
                assert queued_at == waits_for, f"{fetch} waits for home {queued_at}"


def _is_first_wave(now: float, fetch: Fetch) -> bool:
    """Whether the fetch has just begun, when all who take part in a storm ask, and the home had
    better wait for them. What is asked for later waits in the home's queue anyway, for longer than
    readers that share answers are apart; to hold it back would leave the link idle. Nor is it asked
    for twice: a READ that comes after the answer would fetch it again.
    """
    return now - fetch.started_at <= fetch.gather_ms / 4000
