"""The requester: fetches blocks from their homes, READ by READ, until they are whole or missed.

Owns: what to ask whom next, when to ask again, and when to stop. Must not know: sockets, clocks,
global randomness (time and a random source are handed in), tiers, or what an arena is. Follows
DESIGN sections 3 and 4; the shape (events in, instructions out) is that of aioquic's core.

A caller does three things: it starts fetches (`fetch`), passes on what it receives (`receive`)
and calls `handle_timer` when `get_timer` says so; after each of them it takes `frames_to_send`
and drains `next_event`. Every fetch ends in exactly one `Fetched` or `Missed`, at its deadline at
the latest.

A fetch asks one home at a time. Its life, from top to bottom as far as it must go:

1. (`expect` only) wait for the DATA that somebody else of the reader group asks for;
2. READ full segments, as many at once as the home's window and the agent's credit allow; the
   first DATA pins the copy (digest and size), chunks of other copies are dropped from then on;
3. a gap at the LAST chunk, or silence, is answered by a READ of the missing chunks (PARTIAL), or of
   the whole segment again (RETRY) where nothing of it came;
4. a home that stays silent, or has not got the block, is left for the next one; if the pinned copy
   is nowhere any more, the assembly starts anew with whatever copy there is;
5. with all homes tried: the bulk way (TCP), if there is one; else a miss that says why.

The assembled bytes must have the pinned digest. If they do not, somebody lied or a bit flipped:
everything is thrown away, the next home is asked, and from then on only the home asked is
listened to.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from math import inf
from typing import Final

from kvcast.protocol.messages.wire import (
    CHUNKS_PER_SEGMENT,
    FLAG_PADDED,
    FLAG_PARTIAL,
    FLAG_RESIDENT,
    FLAG_RETRY,
    FLAG_SHARED,
    FULL_SEGMENT,
    MISS_DIGEST_GONE,
    MISS_NOT_FOUND,
    MISS_NOT_HOME,
    MISS_OVERLOADED,
    OP_DATA,
    OP_MISS,
    OP_OFFER,
    OP_READ,
    BlockId,
    DataRun,
    Frame,
    Offer,
    WireError,
    decode_offer,
    digest_of,
    segments_of,
    single,
)
from kvcast.protocol.pacing import RttEstimator, Window
from kvcast.protocol.requester.assembly import Assembly
from kvcast.protocol.requester.events import (
    BULK_MAY_HELP,
    WORST_FIRST,
    Allocate,
    BulkCopy,
    Discard,
    DuplicateFetchError,
    Event,
    Fetched,
    FetchReport,
    Missed,
    MissReason,
    OfferReceived,
    RequesterConfig,
    RequesterCounters,
    TryBulk,
)
from kvcast.protocol.timers import Timer, TimerQueue

__all__ = [
    "Allocate",
    "BulkCopy",
    "Discard",
    "DuplicateFetchError",
    "Event",
    "FetchReport",
    "Fetched",
    "MissReason",
    "Missed",
    "OfferReceived",
    "Requester",
    "RequesterConfig",
    "RequesterCounters",
    "TryBulk",
]


_SIZE_GUESSES: Final = 256
"""Namespaces of which a block size is remembered."""
_SHARED_GAIN: Final = 1 / 4
_SHARED_MOSTLY: Final = 0.5
"""From this part of the answers on, READs gather."""
_CONGESTION_CHUNKS: Final = CHUNKS_PER_SEGMENT // 8
"""So many chunks missing in an answer that has ended are no sign of congestion yet."""


class _State(enum.Enum):
    IDLE = 0
    """Not asked for."""
    FLYING = 1
    """Asked for, or arriving unasked; a timer runs."""
    DONE = 2


class _Flight(Timer):
    """What is being done about one segment of a fetch."""

    __slots__ = (
        "again_at",
        "asked",
        "awaiting",
        "base_at",
        "fetch",
        "gap_at",
        "gather_s",
        "home",
        "index",
        "patience_s",
        "put_off",
        "recovering",
        "sent_at",
        "state",
        "tag",
        "tries",
        "wait_s",
    )

    def __init__(self, fetch: _Fetch, index: int) -> None:
        super().__init__()
        self.fetch = fetch
        self.index = index
        self.state = _State.IDLE
        self.home = -1
        self.asked = False  # a READ of this segment has been sent
        self.awaiting = False  # and nothing has come since
        self.put_off = False  # the home is overloaded, and no READ of it is out
        self.recovering = False  # its answer has ended, and what was lost is asked for
        self.tag = -1  # of the READ that a round trip is being measured for
        self.sent_at = 0.0
        self.gather_s = 0.0
        self.base_at = 0.0  # the last READ or progress; the retry comes wait_s later,
        self.wait_s = 0.0
        self.patience_s = 0.0  # or so much later still, while the home sends other segments
        self.gap_at = inf  # when to ask for a known gap
        self.again_at = inf  # when to repeat a READ whose home still gathers
        self.tries = 0


class _Deadline(Timer):
    __slots__ = ("fetch",)

    def __init__(self, fetch: _Fetch) -> None:
        super().__init__()
        self.fetch = fetch


class _Expectation(Timer):
    __slots__ = ("fetch",)

    def __init__(self, fetch: _Fetch) -> None:
        super().__init__()
        self.fetch = fetch


class _Home:
    """What is known of one home, and the fetches that wait for its window."""

    __slots__ = ("awaited", "in_flight", "index", "queue", "rtt", "suspect_until", "window")

    def __init__(self, index: int, config: RequesterConfig) -> None:
        self.index = index
        self.rtt = RttEstimator(config.rto_initial_s, config.rto_min_s, config.rto_max_s)
        self.window = Window(config.window_initial, config.window_max, config.queueing_target_s)
        self.in_flight = 0
        self.awaited: dict[_Flight, None] = {}  # of which nothing has come, as they were asked for
        self.suspect_until = -inf
        self.queue: list[tuple[int, int, _Fetch]] = []  # a heap, by fetch id and ticket


class _Fetch:
    __slots__ = (
        "assembly",
        "block",
        "bulk_tried",
        "contributors",
        "deadline",
        "expect_digest",
        "expect_size",
        "expectation",
        "flights",
        "gather_ms",
        "gone",
        "group",
        "home",
        "homes",
        "id",
        "idle",
        "in_bulk",
        "offer",
        "offers_usable",
        "others",
        "progress_at",
        "queued_at",
        "report",
        "saw_shared",
        "sources",
        "started_at",
        "strict",
        "timer",
        "verdicts",
    )

    def __init__(self, fetch_id: int, block: BlockId, homes: tuple[int, ...], now: float) -> None:
        self.id = fetch_id
        self.block = block
        self.homes = homes
        self.home = homes[0]
        self.sources = frozenset(homes)  # listened to
        self.strict = False  # only the home asked is listened to
        self.verdicts: dict[int, MissReason] = {}  # homes not worth asking, and why
        self.gone: set[int] = set()  # homes that have another copy than the pinned one
        self.others: set[int] = set()  # sources that sent DATA of another copy
        self.contributors: set[int] = set()
        self.started_at = now
        self.progress_at = now
        self.deadline = now
        self.timer = _Deadline(self)
        self.expectation: _Expectation | None = None  # set while the group's DATA is awaited
        self.expect_size: int | None = None
        self.expect_digest = 0
        self.group = 0
        self.gather_ms = 0
        self.assembly: Assembly | None = None
        self.flights: list[_Flight] = []
        self.idle: deque[int] = deque()  # segments that may be IDLE, in order
        self.queued_at = -1  # the home in whose queue this fetch stands
        self.saw_shared = False
        self.offer: Offer | None = None
        self.offers_usable = False
        self.in_bulk = False
        self.bulk_tried = False
        self.report = FetchReport()

    @property
    def pinned_digest(self) -> int:
        """The digest of the copy that is being put together, or expected; 0 = any will do."""
        return self.expect_digest if self.assembly is None else self.assembly.digest


class Requester:
    """See the module's description. All times are seconds on one monotonic clock of the
    caller's; nodes are indices as in the pool map."""

    def __init__(
        self,
        config: RequesterConfig,
        *,
        allocate: Allocate,
        discard: Discard,
        rng: random.Random,
    ) -> None:
        self.config = config
        self.counters = RequesterCounters()
        self._allocate = allocate
        self._discard = discard
        self._rng = rng
        self._fetches: dict[int, _Fetch] = {}
        self._by_block: dict[tuple[int, bytes], _Fetch] = {}
        self._homes: dict[int, _Home] = {}
        self._waiting: dict[int, _Home] = {}  # homes with a queue, in the order of their turns
        self._timers = TimerQueue()
        self._outbox: list[tuple[int, Frame]] = []
        self._outbox_max = 4 * config.credit_segments
        self._events: deque[Event] = deque()  # at most three a fetch
        self._in_flight = 0
        self._recovering = 0
        self._next_id = 1
        self._next_ticket = 0
        self._next_tag = rng.getrandbits(32)
        self._shared_until = -inf
        self._answered_at = -inf
        self._shared_part = 0.0  # of the answers of late, smoothed
        # By namespace, the size of the block fetched last: a guess for the next, since an
        # engine's blocks are of one size. It saves a round trip, and lets readers of the same
        # blocks ask in the same order from the start.
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._heard_at: dict[int, float] = {}  # by home: the last DATA taken from it

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
        gather_ms: int | None = None,
        group: int = 0,
        expect: bool = False,
    ) -> int:
        """Start fetching `block` from the first of `homes` that works; returns the fetch's id.

        `homes` lists node indices in the order of preference; DATA from other nodes is not
        taken. `deadline` is a time on the clock of `now`. With `expect_size` (bytes) the first
        round trip already asks for several segments, and copies of another size are refused.
        With `expect_digest` (not 0) no copy but that one is taken.
        With `expect`, nothing is asked for until the reader group's DATA fails to come. Where
        the fetch cannot start (no home, too many fetches, deadline over), its `Missed` is the
        next event.

        Raises DuplicateFetchError if the block is being fetched, and ValueError for arguments
        out of range.
        """
        if block in self._by_block:
            raise DuplicateFetchError(f"{block} is being fetched")
        gather_ms = self.config.gather_ms if gather_ms is None else gather_ms
        if not 0 <= gather_ms <= 0xFF or not 0 <= group <= 0xFFFF:
            raise ValueError(f"gather of {gather_ms} ms or group {group} is out of range")
        if expect_size is not None and expect_size < 1:
            raise ValueError(f"expected size {expect_size} is not positive")
        fetch_id = self._next_id
        self._next_id += 1
        self.counters.fetches += 1
        refusal = self._refusal(now, homes, deadline, expect_size)
        if refusal is not None:
            self._count_missed(refusal)
            self._events.append(Missed(fetch_id, block, refusal, FetchReport()))
            return fetch_id
        fetch = _Fetch(fetch_id, block, tuple(dict.fromkeys(homes)), now)
        fetch.deadline = deadline
        fetch.expect_size = expect_size
        fetch.expect_digest = expect_digest
        fetch.gather_ms = gather_ms
        fetch.group = group
        fetch.offers_usable = bool(self.config.usable_offer_kinds)
        fetch.home = next(
            (home for home in fetch.homes if self._home(home).suspect_until <= now), fetch.home
        )
        self._fetches[fetch_id] = fetch
        self._by_block[block] = fetch
        self._timers.arm(fetch.timer, deadline)
        if expect:
            fetch.expectation = _Expectation(fetch)
            self._timers.arm(fetch.expectation, now + self.config.expect_wait_s)
        self._plan(fetch)
        self._pump(now)
        return fetch_id

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
            self._miss(now, fetch, MissReason.CANCELLED)
            self._pump(now)

    def forget(self, now: float, indices: Collection[int]) -> None:
        """These indices stand for no node any more, or for others: ask and hear none of them.

        A fetch goes on with its other homes; one that has none left ends as `Missed`
        (UNREACHABLE), or when its bulk call does.
        """
        for fetch in list(self._fetches.values()):
            gone = [home for home in fetch.homes if home in indices]
            if not gone:
                continue
            fetch.homes = tuple(home for home in fetch.homes if home not in gone)
            fetch.sources = fetch.sources.difference(gone)
            for home in gone:
                fetch.verdicts[home] = MissReason.UNREACHABLE
            if fetch.in_bulk:
                continue
            if not fetch.homes:
                self._miss(now, fetch, MissReason.UNREACHABLE)
            elif fetch.home in gone:
                self._next_home(now, fetch)
        self._pump(now)

    def receive(self, now: float, source: int, frame: Frame) -> None:
        """Take a frame, as `wire.decode` made it, that came from node `source`."""
        if frame.op == OP_DATA:
            self.receive_run(now, source, single(frame))
            return
        fetch = self._by_block.get((frame.namespace, frame.key))
        if fetch is None:
            self.counters.unsolicited += 1
        elif source not in fetch.sources:
            self.counters.wrong_source += 1
        elif frame.op == OP_MISS:
            self._receive_miss(now, source, frame, fetch)
        elif frame.op == OP_OFFER:
            self._receive_offer(now, source, frame, fetch)
        else:
            self.counters.unexpected_op += 1

    def receive_run(self, now: float, source: int, run: DataRun) -> None:
        """Take DATA frames that came from node `source`, one after the other."""
        frame = run.frame
        fetch = self._by_block.get((frame.namespace, frame.key))
        if fetch is None:
            self.counters.unsolicited += len(run.chunks)
        elif source not in fetch.sources:
            self.counters.wrong_source += len(run.chunks)
        else:
            self._receive_data(now, source, run, fetch)

    def bulk_done(self, now: float, fetch_id: int, copy: BulkCopy | None) -> bool:
        """Tell how a TryBulk or OfferReceived went; None = it failed.

        True if `copy.buffer` was taken, and comes back in `Fetched`; else it stays the caller's
        (the fetch ended meanwhile, or the bytes have not the digest, or not the expected size).
        """
        fetch = self._fetches.get(fetch_id)
        if fetch is None or not fetch.in_bulk:
            return False
        fetch.in_bulk = False
        if copy is not None:
            size = copy.buffer.nbytes
            if not self._size_allowed(fetch, size):
                self.counters.wrong_size += 1
            elif fetch.expect_digest not in (0, copy.digest):
                self.counters.other_copy += 1
            elif digest_of(copy.buffer) != copy.digest:
                self.counters.corrupt_blocks += 1
            else:
                fetch.report.bulk = True
                self._end(now, fetch)
                self.counters.fetched += 1
                self._events.append(
                    Fetched(fetch_id, fetch.block, copy.buffer, size, copy.digest, fetch.report)
                )
                return True
        if fetch.bulk_tried or not fetch.homes:
            self._miss(now, fetch, self._worst_verdict(fetch))
        else:  # an offer that led nowhere: go on with READs
            fetch.offers_usable = False
            if fetch.home not in fetch.homes:
                fetch.home = fetch.homes[0]
            self._plan(fetch)
        self._pump(now)
        return False

    def get_timer(self) -> float | None:
        """When `handle_timer` must be called next; None = nothing is pending. It may come up
        with nothing to do."""
        return self._timers.next_at()

    def handle_timer(self, now: float) -> None:
        """Do what has become due by `now`."""
        while (timer := self._timers.pop_due(now)) is not None:
            if isinstance(timer, _Flight):
                self._flight_timer(now, timer)
            elif isinstance(timer, _Deadline):
                if timer.fetch.deadline > now:
                    self._timers.arm(timer, timer.fetch.deadline)
                else:
                    self._miss(now, timer.fetch, MissReason.DEADLINE)
            else:
                assert isinstance(timer, _Expectation)
                self._expectation_timer(now, timer)
        self._pump(now)

    def frames_to_send(self) -> list[tuple[int, Frame]]:
        """READs to send now, each with the node it goes to."""
        frames, self._outbox = self._outbox, []
        return frames

    def next_event(self) -> Event | None:
        """The oldest event not taken yet; None if there is none."""
        return self._events.popleft() if self._events else None

    @property
    def fetches_under_way(self) -> int:
        """Fetches that have not ended."""
        return len(self._fetches)

    @property
    def segments_in_flight(self) -> int:
        """Segments asked for, or arriving, and not whole."""
        return self._in_flight + self._recovering

    def rto_s(self, home: int) -> float:
        """The present retransmission time-out towards `home`, without back-off."""
        return self._home(home).rtt.rto_s

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

    def _home(self, index: int) -> _Home:
        home = self._homes.get(index)
        if home is None:
            home = self._homes[index] = _Home(index, self.config)
        return home

    def _plan(self, fetch: _Fetch) -> None:
        """Begin the assembly anew: nothing is pinned, nothing asked for."""
        assert fetch.assembly is None
        size = fetch.expect_size or self._sizes.get(fetch.block.namespace, 1)
        count = 1 if fetch.offers_usable else segments_of(size)
        fetch.flights = [_Flight(fetch, index) for index in range(count)]
        fetch.idle = deque(range(count))
        fetch.contributors.clear()
        fetch.gone.clear()
        fetch.others.clear()
        fetch.offer = None
        self._enqueue(fetch)

    def _enqueue(self, fetch: _Fetch) -> None:
        """Let the fetch wait for its home's window, if it has something to ask for."""
        if fetch.idle and fetch.queued_at != fetch.home:
            fetch.queued_at = fetch.home
            home = self._home(fetch.home)
            self._next_ticket += 1
            heapq.heappush(home.queue, (fetch.id, self._next_ticket, fetch))
            self._waiting[home.index] = home

    def _land(self, flight: _Flight, state: _State) -> None:
        """Take a segment out of flight."""
        if flight.state is _State.FLYING:
            if flight.recovering:
                flight.recovering = False
                self._recovering -= 1
            else:
                self._homes[flight.home].in_flight -= 1
                self._in_flight -= 1
            self._homes[flight.home].awaited.pop(flight, None)
            self._timers.cancel(flight)
        flight.state = state

    def _recover(self, flight: _Flight) -> None:
        """Do not let this segment keep the next one from being asked for: its answer has ended and
        only losses are outstanding, or the answers that others share have left it behind.

        A reader that waited here would fall out of step with the others, ask for the following
        segments alone, and be answered alone. At most `credit_segments` recover beside those in
        flight.
        """
        if not flight.recovering and self._recovering < self.config.credit_segments:
            flight.recovering = True
            self._recovering += 1
            self._homes[flight.home].in_flight -= 1
            self._in_flight -= 1

    def _throw_away(self, fetch: _Fetch) -> None:
        """Forget what has arrived, and stop asking."""
        for flight in fetch.flights:
            self._land(flight, _State.DONE)
        fetch.flights = []
        fetch.idle.clear()
        if fetch.assembly is not None:
            self._discard(fetch.block, fetch.assembly.buffer)
            fetch.assembly = None

    def _end(self, now: float, fetch: _Fetch) -> None:
        self._throw_away(fetch)
        self._timers.cancel(fetch.timer)
        self._expect_no_more(fetch)
        del self._fetches[fetch.id]
        del self._by_block[fetch.block]
        fetch.report.elapsed_s = now - fetch.started_at

    def _expect_no_more(self, fetch: _Fetch) -> None:
        if fetch.expectation is not None:
            self._timers.cancel(fetch.expectation)
            fetch.expectation = None

    def _miss(self, now: float, fetch: _Fetch, reason: MissReason) -> None:
        self._end(now, fetch)
        self._count_missed(reason)
        self._events.append(Missed(fetch.id, fetch.block, reason, fetch.report))

    def _count_missed(self, reason: MissReason) -> None:
        missed = self.counters.missed
        missed[reason.value] = missed.get(reason.value, 0) + 1

    # --- asking ---------------------------------------------------------------------------

    def _pump(self, now: float) -> None:
        """Ask for idle segments, one home after the other, while credit and windows last."""
        blocked = 0  # homes in a row that had nothing to ask for now
        while self._waiting and blocked < len(self._waiting):
            if self._in_flight >= self.config.credit_segments:
                return
            index, home = next(iter(self._waiting.items()))
            del self._waiting[index]
            if home.in_flight >= self._window(now, home):
                self._waiting[index] = home
                blocked += 1
                continue
            flight = self._next_idle(home)
            if flight is not None:
                self._take_off(now, flight)
                self._ask(now, flight)
                blocked = 0
            if home.queue:
                self._waiting[index] = home

    def _window(self, now: float, home: _Home) -> int:
        """How many segments may be in flight from `home`.

        While answers are shared it is the same number for every reader, whatever each of them
        has lost or waited for: one stream serves all, so more readers mean no more load, and a
        reader whose window were smaller would ask for what the others have had already.
        """
        if now < self._shared_until:
            return self.config.window_shared
        return int(home.window.size)

    def _next_idle(self, home: _Home) -> _Flight | None:
        """The next segment to ask `home` for.

        Fetches come in the order in which they started: the blocks of a prefix are worth nothing
        without those before, and readers of one prefix share answers if they go the same way.
        """
        queue = home.queue
        while queue:
            fetch = queue[0][2]
            if fetch.queued_at == home.index and fetch.expectation is None:
                while fetch.idle:
                    segment = fetch.idle.popleft()
                    if segment < len(fetch.flights):  # else a guess was too high
                        flight = fetch.flights[segment]
                        if flight.state is _State.IDLE:
                            return flight
            heapq.heappop(queue)
            if fetch.queued_at == home.index:
                fetch.queued_at = -1
        return None

    def _take_off(self, now: float, flight: _Flight) -> None:
        """Put a segment in flight: it is being asked for, or has begun to arrive unasked."""
        home = self._home(flight.fetch.home)
        flight.state = _State.FLYING
        flight.home = home.index
        flight.tag = -1
        flight.sent_at = now
        flight.gather_s = 0.0
        flight.gap_at = inf
        flight.again_at = inf
        flight.tries = 0
        home.in_flight += 1
        self._in_flight += 1

    def _jittered(self, seconds: float) -> float:
        return seconds * (1 + self.config.retry_jitter * self._rng.random())

    def _await(self, now: float, flight: _Flight, *, patient: bool) -> None:
        """Set the time-out of the READ that was sent just now."""
        config = self.config
        rto_s = self._homes[flight.home].rtt.rto_s
        backoff = min(1 << min(flight.tries, 16), config.backoff_max)
        flight.awaiting = True
        if not flight.recovering:
            self._homes[flight.home].awaited[flight] = None
        flight.base_at = now
        flight.wait_s = self._jittered(min(rto_s * backoff, config.rto_max_s)) + flight.gather_s
        flight.patience_s = 0.0
        if patient:
            shared = now < self._shared_until
            flight.patience_s = (config.patience - 1) * flight.wait_s
            flight.patience_s = config.patience_shared_s if shared else flight.patience_s
        self._timers.arm(flight, self._due_at(flight))

    def _begun(self, now: float, flight: _Flight) -> None:
        """Something of the segment has come: from now on its time-out is the shorter one."""
        self._overtake(now, flight)
        flight.awaiting = False
        flight.gap_at = inf
        flight.again_at = inf
        flight.base_at = now
        srtt_s = self._homes[flight.home].rtt.srtt_s or 0.0
        flight.wait_s = self._jittered(max(self.config.quiet_s, srtt_s))
        flight.patience_s = 0.0
        self._timers.arm(flight, self._due_at(flight))

    def _overtake(self, now: float, flight: _Flight) -> None:
        """Of what was asked for before `flight`, which has begun to come, nothing has.

        Shared answers come in the order in which the first of the readers asked. So those READs
        missed the answer that the others had, by being late, and get one of their own. If they
        took part of the window meanwhile, this reader would ask for as many of the next
        segments too late again, and so on to the end.
        """
        awaited = self._homes[flight.home].awaited
        if flight not in awaited:
            return
        late = []
        if now < self._shared_until:
            late = list(itertools.takewhile(lambda other: other is not flight, awaited))
        for other in late:
            del awaited[other]
            self.counters.overtaken += 1
            self._recover(other)
        del awaited[flight]
        if late:
            self._pump(now)

    def _due_at(self, flight: _Flight) -> float:
        """When to ask again for what a segment lacks.

        A home answers in order, so while it sends other segments this one's turn may only not
        have come; the time-out of a full READ starts again with everything that the home sends,
        up to a bound, since the READ may be lost all the same. Where it is known when to ask again,
        nothing else is waited for.
        """
        if flight.gap_at != inf:
            return flight.gap_at
        heard_at = self._heard_at.get(flight.home, -inf)
        base_at = max(flight.base_at, min(heard_at, flight.base_at + flight.patience_s))
        return min(flight.again_at, base_at + flight.wait_s)

    def _ask(self, now: float, flight: _Flight) -> None:
        """Send a READ for what the segment lacks."""
        fetch = flight.fetch
        assembly = fetch.assembly
        counters = self.counters
        config = self.config
        flags = FLAG_PADDED if config.read_padding else 0
        wanted = FULL_SEGMENT
        gather_ms = 0
        first_wave = False
        missing = FULL_SEGMENT if assembly is None else assembly.missing[flight.index]
        if assembly is not None and missing != assembly.whole(flight.index):
            flags |= FLAG_PARTIAL
            wanted = missing
            counters.reads_partial += 1
            fetch.report.retries += 1
        elif flight.asked:
            flags |= FLAG_RETRY
            counters.reads_retry += 1
            fetch.report.retries += 1
        else:
            first_wave = self._is_first_wave(now, fetch)
            gather_ms = fetch.gather_ms if first_wave else 0
            if fetch.saw_shared or self._shares(now):
                srtt_s = self._homes[flight.home].rtt.srtt_s
                if srtt_s is None:  # all answers yet were gathered ones
                    srtt_s = fetch.gather_ms / 1000
                auto_ms = min(int(srtt_s * 250), config.auto_gather_max_ms)
                gather_ms = max(gather_ms, auto_ms)
        counters.reads += 1
        fetch.report.reads += 1
        flight.asked = True
        flight.put_off = False
        flight.gap_at = inf
        flight.sent_at = now
        flight.gather_s = gather_ms / 1000
        flight.again_at = inf
        if first_wave and gather_ms >= config.repeat_from_gather_ms:
            flight.again_at = now + flight.gather_s / 3
        flight.tag = self._next_tag
        self._next_tag = (self._next_tag + 1) & 0xFFFFFFFF
        self._await(now, flight, patient=not flags & FLAG_PARTIAL)
        self._send_read(flight, flags, wanted, gather_ms)

    @staticmethod
    def _is_first_wave(now: float, fetch: _Fetch) -> bool:
        """Whether the fetch has just begun, when all who take part in a storm ask, and the home
        had better wait for them. What is asked for later waits in the home's queue anyway, for
        longer than readers that share answers are apart; to hold it back would leave the link
        idle. Nor is it asked for twice: a READ that comes after the answer would fetch it again.
        """
        return now - fetch.started_at <= fetch.gather_ms / 4000

    def _ask_again(self, now: float, flight: _Flight) -> None:
        """Send the READ once more while its home gathers. If the first was lost, this one still
        joins the others; if not, it is dropped on the way, or the home has the same job already.
        Lost for good, a READ would cost the home the whole segment once more."""
        flight.again_at = inf
        self.counters.reads_again += 1
        flags = FLAG_PADDED if self.config.read_padding else 0
        left_ms = round((flight.sent_at + flight.gather_s - now) * 1000)
        self._send_read(flight, flags, FULL_SEGMENT, max(0, left_ms))
        self._timers.arm(flight, self._due_at(flight))

    def _send_read(self, flight: _Flight, flags: int, wanted: int, gather_ms: int) -> None:
        if len(self._outbox) >= self._outbox_max:
            self.counters.outbox_dropped += 1
            return
        fetch = flight.fetch
        self._outbox.append(
            (
                flight.home,
                Frame(
                    OP_READ,
                    fetch.block.namespace,
                    fetch.block.key,
                    flight.index,
                    flags,
                    fetch.group,
                    fetch.pinned_digest,
                    gather=gather_ms,
                    wanted=wanted,
                    tag=flight.tag,
                ),
            )
        )

    def _flight_timer(self, now: float, flight: _Flight) -> None:
        due_at = self._due_at(flight)
        if due_at > now:
            self._timers.arm(flight, due_at)
            return
        if flight.gap_at <= now:
            self._ask(now, flight)
            return
        if flight.again_at <= now:
            self._ask_again(now, flight)
            return
        self.counters.timeouts += 1
        self._setback(now, flight)
        if flight.tries < self.config.tries_per_home:
            if flight.fetch.assembly is not None and not flight.awaiting:
                self._recover(flight)
            self._ask(now, flight)
            return
        fetch = flight.fetch
        if flight.home in fetch.others:  # it answers, but with another copy than the pinned one
            fetch.gone.add(flight.home)
            self._next_home(now, fetch)
            return
        self._homes[flight.home].suspect_until = now + self.config.suspect_s
        self._leave_home(now, fetch, MissReason.UNREACHABLE)

    def _setback(self, now: float, flight: _Flight) -> None:
        """A READ was not answered, or not with DATA, or the end of an answer is lost."""
        flight.tries += 1
        assembly = flight.fetch.assembly
        if assembly is not None:
            self._lost(now, flight, assembly.missing[flight.index].bit_count())
        else:
            self._homes[flight.home].window.lost(now, flight.sent_at)

    def _lost(self, now: float, flight: _Flight, chunks: int) -> None:
        """A few lost chunks are bad luck; a queue that overflows takes many. Only then the window
        shrinks: readers that share answers should keep step, and each of them loses others."""
        if chunks > _CONGESTION_CHUNKS:
            self._homes[flight.home].window.lost(now, flight.sent_at)

    def _expectation_timer(self, now: float, timer: _Expectation) -> None:
        fetch = timer.fetch
        due = fetch.progress_at + self.config.expect_wait_s
        if due > now:
            self._timers.arm(timer, due)
            return
        fetch.expectation = None
        self._enqueue(fetch)

    # --- another home, another way ----------------------------------------------------------

    def _leave_home(self, now: float, fetch: _Fetch, verdict: MissReason) -> None:
        """Do not ask this fetch's home again; ask the next one, or find another way."""
        self.counters.homes_left += 1
        fetch.verdicts[fetch.home] = verdict
        self._next_home(now, fetch)

    def _next_home(self, now: float, fetch: _Fetch) -> None:
        untried = [home for home in fetch.homes if home not in fetch.verdicts]
        for home in untried:
            if home not in fetch.gone:
                self._move(fetch, home)
                return
        if untried:  # they live, but none has the pinned copy
            self._restart(now, fetch, untried[0], MissReason.DIVERGED)
            return
        if self._try_bulk(fetch):
            return
        corrupt = [home for home in fetch.homes if fetch.verdicts[home] is MissReason.CORRUPT]
        if corrupt and fetch.report.restarts < self.config.max_restarts:
            # It may have been a flipped bit on the way; UDP's checksum is not in use.
            del fetch.verdicts[corrupt[0]]
            self._restart(now, fetch, corrupt[0], MissReason.CORRUPT)
            return
        self._miss(now, fetch, self._worst_verdict(fetch))

    def _worst_verdict(self, fetch: _Fetch) -> MissReason:
        verdicts = set(fetch.verdicts.values())
        return next(reason for reason in WORST_FIRST if reason in verdicts)

    def _move(self, fetch: _Fetch, home: int) -> None:
        """Go on with the same assembly at another home."""
        fetch.home = home
        if fetch.strict:
            fetch.sources = frozenset((home,))
        for flight in fetch.flights:
            self._land(flight, _State.DONE if flight.state is _State.DONE else _State.IDLE)
        wanted = fetch.flights[:1] if fetch.offers_usable else fetch.flights
        fetch.idle = deque(flight.index for flight in wanted if flight.state is _State.IDLE)
        self._enqueue(fetch)

    def _restart(self, now: float, fetch: _Fetch, home: int, why: MissReason) -> None:
        """Throw the assembly away and begin anew, with any copy, at `home`; at the bound, give
        up on READs because of `why`."""
        if fetch.report.restarts >= self.config.max_restarts:
            fetch.verdicts[home] = why
            if not self._try_bulk(fetch):
                self._miss(now, fetch, self._worst_verdict(fetch))
            return
        fetch.report.restarts += 1
        self.counters.restarts += 1
        self._throw_away(fetch)
        fetch.home = home
        if fetch.strict:
            fetch.sources = frozenset((home,))
        self._plan(fetch)

    def _try_bulk(self, fetch: _Fetch) -> bool:
        """The last resort, if there is one: once a fetch, at a home that may have the block."""
        for home in fetch.homes:
            if self.config.bulk_available and fetch.verdicts.get(home) in BULK_MAY_HELP:
                fetch.bulk_tried = True
                self._start_bulk(fetch)
                self._events.append(TryBulk(fetch.id, fetch.block, home))
                return True
        return False

    def _start_bulk(self, fetch: _Fetch) -> None:
        self._throw_away(fetch)
        self._expect_no_more(fetch)
        fetch.in_bulk = True
        self.counters.bulk_tries += 1

    # --- what arrives -----------------------------------------------------------------------

    def _receive_data(self, now: float, source: int, run: DataRun, fetch: _Fetch) -> None:
        frame = run.frame
        count = len(run.chunks)
        assembly = fetch.assembly
        counters = self.counters
        if assembly is None:
            assembly = self._pin(now, source, frame, count, fetch)
            if assembly is None:
                return
        elif assembly.digest != frame.digest or assembly.size != frame.size:
            counters.other_copy += count
            fetch.others.add(source)
            if run.last:
                self._swallowed(now, source, frame, fetch)
            return
        index = frame.segment
        added = assembly.add_run(run)
        new = added.bit_count()
        counters.duplicates += count - new
        if not new:
            return
        flags = frame.flags
        report = fetch.report
        counters.data += new
        fetch.progress_at = now
        self._heard_at[source] = now
        fetch.contributors.add(source)
        if flags & FLAG_SHARED:
            self._note_sharing(now, fetch)
            counters.data_shared += new
        if flags & FLAG_RESIDENT:
            report.chunks_resident += new
            counters.data_resident += new
        elif flags & FLAG_SHARED:
            report.chunks_shared += new
        else:
            report.chunks_plain += new
        flight = fetch.flights[index]
        if flight.state is _State.IDLE:
            self._take_off(now, flight)
            self._begun(now, flight)
        elif flight.awaiting:
            if not flags & FLAG_PARTIAL:
                self._note_answer(now, bool(flags & FLAG_SHARED))
            self._begun(now, flight)
        flight.base_at = now
        flight.tries = 0
        if frame.tag == flight.tag:
            self._sample(now, source, flags, flight)
        missing = assembly.missing[index]
        if not missing:
            self._segment_whole(now, fetch, flight, assembly)
        elif run.last and added >> run.chunks[-1] & 1:
            self._gap(now, flight, missing.bit_count())

    def _note_sharing(self, now: float, fetch: _Fetch) -> None:
        fetch.saw_shared = True
        self._shared_until = now + self.config.sharing_memory_s

    def _note_answer(self, now: float, shared: bool) -> None:
        """The answer to a READ has begun to come."""
        if now >= self._answered_at + self.config.sharing_memory_s:
            self._shared_part = float(shared)
        else:
            self._shared_part += (shared - self._shared_part) * _SHARED_GAIN
        self._answered_at = now

    def _shares(self, now: float) -> bool:
        """Whether most answers of late went to others too, so that it pays to wait for them."""
        return now < self._shared_until and self._shared_part >= _SHARED_MOSTLY

    def _sample(self, now: float, source: int, flags: int, flight: _Flight) -> None:
        flight.tag = -1
        home = self._homes[flight.home]
        # An answer from the switch's memory says nothing about the way to the home.
        if source == home.index and not flags & FLAG_RESIDENT:
            home.suspect_until = -inf
            rtt_s = now - flight.sent_at - flight.gather_s
            if rtt_s >= 0.0:  # or we joined others, for whom the home had gathered for a while
                home.rtt.sample(rtt_s)
                home.window.sample(now, rtt_s)

    def _pin(
        self, now: float, source: int, frame: Frame, count: int, fetch: _Fetch
    ) -> Assembly | None:
        """The first DATA of an assembly, the first of `count` alike, decides which copy it is
        of."""
        if fetch.in_bulk:
            self.counters.duplicates += count
            return None
        if fetch.expect_digest not in (0, frame.digest):
            self.counters.other_copy += count
            fetch.others.add(source)
            return None
        if not self._size_allowed(fetch, frame.size):
            self.counters.wrong_size += count
            self._judge(now, fetch, source, MissReason.WRONG_SIZE)
            return None
        buffer = self._allocate(fetch.block, frame.size)
        if buffer is None:
            self.counters.no_memory += count
            self._miss(now, fetch, MissReason.NO_MEMORY)
            self._pump(now)
            return None
        assembly = Assembly(fetch.block, frame.size, frame.digest, buffer)
        fetch.assembly = assembly
        if frame.flags & FLAG_SHARED:  # known before the next READs are made
            self._note_sharing(now, fetch)
        if fetch.report.first_byte_s is None:
            fetch.report.first_byte_s = now - fetch.started_at
        known = len(fetch.flights)
        count = len(assembly.missing)
        for flight in fetch.flights[count:]:
            self._land(flight, _State.DONE)
        del fetch.flights[count:]
        fetch.flights += [_Flight(fetch, index) for index in range(known, count)]
        if not fetch.offers_usable:
            fetch.idle.extend(range(known, count))
            self._enqueue(fetch)
            self._pump(now)
        return assembly

    def _size_allowed(self, fetch: _Fetch, size: int) -> bool:
        expected = fetch.expect_size
        return 0 < size <= self.config.max_block_bytes and expected in (None, size)

    def _segment_whole(
        self, now: float, fetch: _Fetch, flight: _Flight, assembly: Assembly
    ) -> None:
        self._homes[flight.home].window.completed()
        self._land(flight, _State.DONE)
        if assembly.segments_left == 0:
            self._block_whole(now, fetch, assembly)
        elif fetch.offers_usable and flight.index == 0:
            self._after_first_segment(now, fetch, assembly)
        self._pump(now)

    def _gap(self, now: float, flight: _Flight, chunks: int) -> None:
        """The answer has ended and chunks are missing: ask for them, unless they are only late."""
        self.counters.gaps += 1
        self._lost(now, flight, chunks)
        srtt_s = self._homes[flight.home].rtt.srtt_s or 0.0
        delay = max(self.config.reorder_min_s, min(srtt_s / 4, self.config.quiet_s))
        flight.gap_at = now + delay
        self._timers.arm(flight, flight.gap_at)
        self._recover(flight)
        self._pump(now)

    def _block_whole(self, now: float, fetch: _Fetch, assembly: Assembly) -> None:
        fetch.report.payload_bytes += assembly.size
        self.counters.data_bytes += assembly.size
        if not assembly.verified():
            self._corrupt(now, fetch)
            return
        fetch.assembly = None  # its buffer is the caller's now
        self._end(now, fetch)
        self._sizes[fetch.block.namespace] = assembly.size
        self._sizes.move_to_end(fetch.block.namespace)
        if len(self._sizes) > _SIZE_GUESSES:
            self._sizes.popitem(last=False)
        self.counters.fetched += 1
        self._events.append(
            Fetched(
                fetch.id,
                fetch.block,
                assembly.buffer,
                assembly.size,
                assembly.digest,
                fetch.report,
            )
        )

    def _corrupt(self, now: float, fetch: _Fetch) -> None:
        """The bytes are not those of the digest. With one contributor we know who is to blame;
        with several, the next assembly tells, since it listens to one home only."""
        self.counters.corrupt_blocks += 1
        if len(fetch.contributors) == 1:
            (culprit,) = fetch.contributors
            fetch.verdicts[culprit] = MissReason.CORRUPT
        fetch.strict = True
        self._throw_away(fetch)
        untried = [home for home in fetch.homes if home not in fetch.verdicts]
        if untried:
            self._restart(now, fetch, untried[0], MissReason.CORRUPT)
        else:
            self._next_home(now, fetch)

    def _receive_miss(self, now: float, source: int, frame: Frame, fetch: _Fetch) -> None:
        reason = frame.chunk
        pinned = fetch.pinned_digest
        if fetch.in_bulk:
            self.counters.other_copy += 1
            return
        if reason == MISS_NOT_HOME:
            self.counters.misses += 1
            self._wait_ended(now, source, frame, fetch)
            self._judge(now, fetch, source, MissReason.NOT_HOME)
            return
        if frame.digest not in (0, pinned):
            self.counters.other_copy += 1
            self._swallowed(now, source, frame, fetch)
            return
        beyond = frame.segment >= len(fetch.flights) or (frame.segment > 0 and not pinned)
        if reason == MISS_NOT_FOUND and beyond:
            self.counters.beyond += 1  # only the segment is not there, or the first will tell
        elif reason == MISS_NOT_FOUND:
            self.counters.misses += 1
            self._wait_ended(now, source, frame, fetch)
            self._judge(now, fetch, source, MissReason.NOT_FOUND)
        elif reason == MISS_OVERLOADED:
            self.counters.misses += 1
            self.counters.overloaded += 1
            self._overloaded(now, source, frame, fetch)
        elif reason == MISS_DIGEST_GONE and frame.digest:
            self.counters.misses += 1
            self._wait_ended(now, source, frame, fetch)
            fetch.gone.add(source)
            if source == fetch.home:
                self._next_home(now, fetch)
                self._pump(now)
        else:
            self.counters.unexpected_op += 1

    def _judge(self, now: float, fetch: _Fetch, source: int, verdict: MissReason) -> None:
        """`source` cannot serve this fetch. If it is the home being asked, ask another."""
        if source == fetch.home:
            self._leave_home(now, fetch, verdict)
            self._pump(now)
        else:
            fetch.verdicts.setdefault(source, verdict)

    def _wait_ended(self, now: float, source: int, frame: Frame, fetch: _Fetch) -> None:
        """A MISS has ended the wait for a segment, at every switch on its way.

        So our next READ finds no wait of ours, and is a first READ again and not a repeat: a
        repeat is always sent on, and all who waited with us ask at this moment. If the MISS came
        from the home that we asked, that is true of the fetch's other segments too, since the home
        has answered all of them alike. If it came from another, our READ had joined the wait that
        it ended, and must be sent again; but not for ever.
        """
        if frame.flags & FLAG_PARTIAL or frame.segment >= len(fetch.flights):
            return
        flight = fetch.flights[frame.segment]
        if flight.state is not _State.FLYING or not flight.awaiting:
            return
        if flight.home == source:
            for asked in fetch.flights:
                if asked.awaiting and asked.home == source:
                    asked.asked = False
        elif self._may_have_joined(flight) and flight.tries + 1 < self.config.tries_per_home:
            flight.asked = False
            self._postpone(now, flight, self.config.reorder_min_s)

    def _swallowed(self, now: float, source: int, frame: Frame, fetch: _Fetch) -> None:
        """A MISS or LAST about another copy ended a wait, and our READ may have joined that
        wait at a switch: ask again soon, but not for ever."""
        flight = self._flying(source, frame, fetch)
        if flight is None or not self._may_have_joined(flight):
            return
        if flight.tries + 1 < self.config.tries_per_home:
            self._postpone(now, flight, self.config.swallowed_pause_s)

    def _may_have_joined(self, flight: _Flight) -> bool:
        """Whether a READ is out that may have joined somebody else's wait at a switch: not one of
        missing chunks, nor one that the home has put off."""
        assembly = flight.fetch.assembly
        if not flight.awaiting or flight.put_off or flight.gap_at != inf:
            return False
        return assembly is None or assembly.missing[flight.index] == assembly.whole(flight.index)

    def _postpone(self, now: float, flight: _Flight, pause_s: float) -> None:
        """Ask again soon, and do nothing else before."""
        flight.tries += 1
        flight.gap_at = now + self._jittered(pause_s)
        flight.again_at = inf
        self._timers.arm(flight, flight.gap_at)

    def _overloaded(self, now: float, source: int, frame: Frame, fetch: _Fetch) -> None:
        """The home is there, and asks for patience: ask again after a longer pause."""
        flight = self._flying(source, frame, fetch)
        if flight is None:
            return
        self._setback(now, flight)
        if flight.tries < self.config.tries_per_home:
            flight.gap_at = inf
            flight.again_at = inf
            flight.put_off = True
            self._await(now, flight, patient=False)
        else:
            self._leave_home(now, fetch, MissReason.OVERLOADED)
            self._pump(now)

    def _flying(self, source: int, frame: Frame, fetch: _Fetch) -> _Flight | None:
        """The segment that `frame` is about, if it is in flight from `source`."""
        if frame.segment >= len(fetch.flights):
            return None
        flight = fetch.flights[frame.segment]
        return flight if flight.state is _State.FLYING and flight.home == source else None

    # --- offers -----------------------------------------------------------------------------

    def _receive_offer(self, now: float, source: int, frame: Frame, fetch: _Fetch) -> None:
        """Keep the offer until the first segment is whole: until then sharing may show."""
        assembly = fetch.assembly
        try:
            offer = decode_offer(frame.payload)
        except WireError:
            self.counters.unexpected_op += 1
            return
        self.counters.offers_received += 1
        if (
            not fetch.offers_usable
            or offer.kind not in self.config.usable_offer_kinds
            or source != fetch.home
            or (assembly is not None and not assembly.is_of(frame.size, frame.digest))
            or not self._size_allowed(fetch, frame.size)
            or fetch.in_bulk
        ):
            self.counters.offers_ignored += 1
            return
        fetch.offer = offer

    def _after_first_segment(self, now: float, fetch: _Fetch, assembly: Assembly) -> None:
        """Take the rest the way offered, if nobody shares the reads; else by READs."""
        offer = fetch.offer
        fetch.offers_usable = False
        if offer is not None and not fetch.saw_shared:
            self.counters.offers += 1
            event = OfferReceived(
                fetch.id, fetch.block, fetch.home, offer, assembly.size, assembly.digest
            )
            self._start_bulk(fetch)
            self._events.append(event)
            return
        if offer is not None:
            self.counters.offers_ignored += 1
        fetch.idle.extend(range(1, len(assembly.missing)))
        self._enqueue(fetch)
