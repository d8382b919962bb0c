"""The life of a fetch: how it begins, goes on elsewhere, and ends.

Owns: the fetches in flight, their way from one home to the next and to the bulk way as `failover`
chooses it, and the events that tell how they end. Must not know: frames, or what an answer means.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from typing import Final

from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.messages.wire import CELLS, BlockId
from kvcast.protocol.requester.asking import Asker
from kvcast.protocol.requester.events import (
    Event,
    Fetched,
    FetchReport,
    Missed,
    MissReason,
    ProbeEnded,
    RequesterConfig,
    RequesterCounters,
    Reservation,
    TryBulk,
)
from kvcast.protocol.requester.failover import GiveUp, LastResort, Move, Restart, Step
from kvcast.protocol.requester.fetch import Fetch, FetchEvent, FetchState
from kvcast.protocol.requester.segment import SegmentEvent
from kvcast.protocol.requester.story import Story
from kvcast.protocol.timers import TimerQueue

_SIZE_GUESSES: Final = 256
"""Namespaces of which a block size is remembered."""
_STORIES: Final = 64
"""Fetches that have ended and whose stories are kept."""

_logger = logging.getLogger(__name__)


class Lifecycle:
    """All fetches of one requester."""

    def __init__(
        self, config: RequesterConfig, counters: RequesterCounters, rng: random.Random
    ) -> None:
        self.fetches: dict[int, Fetch] = {}
        self.by_block: dict[tuple[int, bytes], Fetch] = {}
        self.by_serial: dict[int, Fetch] = {}
        """Those of which a copy is being put together, by its assembly's serial."""
        self.timers = TimerQueue()
        self.asker = Asker(config, counters, self.fetches, self.timers, rng)
        self.events: deque[Event] = deque()  # a few a fetch
        self._counters = counters
        # By namespace, the size of the block fetched last: a guess for the next, since an
        # engine's blocks are of one size. It saves a round trip, and lets readers of the same
        # blocks ask in the same order from the start.
        self._sizes: BoundedMap[int, int] = BoundedMap(_SIZE_GUESSES)
        self._ended: deque[Story] = deque(maxlen=_STORIES)

    # --- beginning and ending -----------------------------------------------------------------

    def refuse(self, fetch_id: int, block: BlockId, reason: MissReason) -> None:
        """A fetch cannot begin."""
        self._count_missed(reason)
        self.events.append(Missed(fetch_id, block, reason, FetchReport()))

    def begin(self, now: float, fetch: Fetch, *, expect: bool) -> None:
        """Read, or wait for what others ask for."""
        self.fetches[fetch.id] = fetch
        self.by_block[fetch.block] = fetch
        self.timers.arm(fetch.deadline_timer, fetch.deadline)
        if expect:
            fetch.happen(now, FetchEvent.EXPECT)
            wait_s = fetch.expect_waits * self.asker.config.expect_wait_s
            self.timers.arm(fetch.expectation_timer, now + wait_s)
        else:
            fetch.start_reading(now)
        self.plan(fetch)

    def note_size(self, fetch: Fetch, size: int) -> None:
        """Remember what the size of a namespace's blocks is."""
        self._sizes[fetch.block.namespace] = size

    def plan(self, fetch: Fetch) -> None:
        """Begin the assembly: no copy is chosen, nothing asked for."""
        size = fetch.expect_size or self._sizes.get(fetch.block.namespace, 1)
        fetch.plan(1 if fetch.may_probe else fetch.chunking.segments_of(size))
        self.asker.enqueue(fetch)

    def fetched(
        self, now: float, fetch: Fetch, reservation: Reservation, size: int, digest: int
    ) -> None:
        """The block is there; `reservation` is none of the fetch's any more."""
        self._end(now, fetch, "fetched")
        self._counters.fetched += 1
        self.events.append(Fetched(fetch.id, fetch.block, reservation, size, digest, fetch.report))

    def miss(self, now: float, fetch: Fetch, reason: MissReason) -> None:
        """The block does not come."""
        self._end(now, fetch, f"missed, {reason.value}")
        self._count_missed(reason)
        self.events.append(Missed(fetch.id, fetch.block, reason, fetch.report))
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("%s", fetch.story)

    def _count_missed(self, reason: MissReason) -> None:
        missed = self._counters.missed
        missed[reason.value] = missed.get(reason.value, 0) + 1

    def _throw_away(self, now: float, fetch: Fetch) -> None:
        """Forget what has arrived, and stop asking."""
        self.asker.land_all(now, fetch.segments, SegmentEvent.DROP)
        fetch.segments = []
        fetch.idle.clear()
        assembly, fetch.assembly = fetch.assembly, None
        if assembly is not None:
            del self.by_serial[assembly.serial]
            assembly.leave()
        if fetch.reservation is not None:
            reservation, fetch.reservation = fetch.reservation, None
            reservation.abort()

    def _end(self, now: float, fetch: Fetch, outcome: str) -> None:
        self._throw_away(now, fetch)
        self.timers.cancel(fetch.deadline_timer)
        self.timers.cancel(fetch.expectation_timer)
        del self.fetches[fetch.id]
        del self.by_block[fetch.block]
        fetch.happen(now, FetchEvent.END)
        fetch.report.elapsed_s = now - fetch.started_at
        fetch.story.outcome = outcome
        self._ended.append(fetch.story)

    # --- another home, another way ------------------------------------------------------------

    def judge(self, now: float, fetch: Fetch, source: int, verdict: MissReason) -> None:
        """`source` cannot serve this fetch. If it is the home being asked, ask another."""
        if source == fetch.homes.current:
            self.leave_home(now, fetch, verdict)
            self.asker.pump(now)
        elif source not in fetch.homes.verdicts:
            fetch.homes.judge(now, source, verdict)

    def leave_home(self, now: float, fetch: Fetch, verdict: MissReason) -> None:
        """Do not ask this fetch's home again; ask the next one, or find another way."""
        self._counters.homes_left += 1
        fetch.homes.judge(now, fetch.homes.current, verdict)
        self.next_home(now, fetch)

    def next_home(self, now: float, fetch: Fetch) -> None:
        """The present home is of no use any more."""
        may_restart, bulk = self._may_restart(fetch), self.asker.config.bulk_available
        self._go(now, fetch, fetch.homes.next_step(now, may_restart=may_restart, bulk=bulk))

    def use_cells(self, now: float, fetch: Fetch) -> None:
        """This fetch's home does not send chunks as large as were asked for."""
        self._counters.chunks_reduced += 1
        home = fetch.homes.current
        self.asker.use_cells(now, home)
        fetch.chunking = CELLS
        if self._may_restart(fetch):
            self._restart(now, fetch, home)
        else:
            self.leave_home(now, fetch, MissReason.NOT_FOUND)

    def start_anew(self, now: float, fetch: Fetch) -> None:
        """The assembled bytes are not those of the digest."""
        self._counters.corrupt_blocks += 1
        homes = fetch.homes
        homes.wrong_bytes(now)
        may_restart, bulk = self._may_restart(fetch), self.asker.config.bulk_available
        self._go(now, fetch, homes.step_after_wrong_bytes(now, may_restart=may_restart, bulk=bulk))

    def _go(self, now: float, fetch: Fetch, step: Step) -> None:
        match step:
            case Move(home):
                self._move(now, fetch, home)
            case Restart(home):
                self._restart(now, fetch, home)
            case LastResort(home):
                self.leave_reads(now, fetch, FetchEvent.GIVE_UP_READS)
                self.events.append(TryBulk(fetch.id, fetch.block, home))
            case GiveUp(reason):
                self.miss(now, fetch, reason)

    def end_probe(self, fetch: Fetch) -> None:
        """Nobody should wait any longer for what its probe shows."""
        if fetch.may_probe:
            verdict = fetch.homes.verdicts.get(fetch.homes.current)
            lacked = verdict is MissReason.NOT_FOUND
            self.events.append(ProbeEnded(fetch.id, fetch.block, lacked))

    def _move(self, now: float, fetch: Fetch, home: int) -> None:
        """Go on with the same assembly at another home."""
        self.end_probe(fetch)
        fetch.happen(now, FetchEvent.MOVE)
        fetch.homes.ask(now, home)
        fetch.listen()
        self.asker.land_all(now, fetch.segments, SegmentEvent.LEAVE)
        fetch.plan_idle()
        self.asker.enqueue(fetch)

    def _restart(self, now: float, fetch: Fetch, home: int) -> None:
        """Throw the assembly away and begin anew, with any copy, at `home`."""
        fetch.report.restarts += 1
        self._counters.restarts += 1
        self.end_probe(fetch)
        fetch.happen(now, FetchEvent.RESTART)
        self._throw_away(now, fetch)
        fetch.homes.restart(now)
        fetch.homes.ask(now, home)
        self.plan(fetch)

    def leave_reads(self, now: float, fetch: Fetch, event: FetchEvent) -> None:
        """Let the block come another way."""
        self._throw_away(now, fetch)
        self.timers.cancel(fetch.expectation_timer)
        fetch.happen(now, event)
        self._counters.bulk_tries += 1

    def read_after_all(self, now: float, fetch: Fetch) -> None:
        """An offer has led nowhere: READ from the same home, or from the next."""
        homes = fetch.homes
        homes.restart(now)
        home = homes.next_untried()
        if home is None:
            self.next_home(now, fetch)
            return
        homes.ask(now, home)
        fetch.happen(now, FetchEvent.READ_ALL)
        self.plan(fetch)

    def _may_restart(self, fetch: Fetch) -> bool:
        return fetch.report.restarts < self.asker.config.max_restarts

    # --- what there is to see -----------------------------------------------------------------

    def stories(self) -> list[Story]:
        """What happened to the fetches that ended last and to those in flight."""
        return [*self._ended, *(fetch.story for fetch in self.fetches.values())]

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        by_block = {fetch.block: fetch for fetch in self.fetches.values()}
        assert by_block == self.by_block, f"fetches by block: {self.by_block}"
        by_serial = {f.assembly.serial: f for f in self.fetches.values() if f.assembly}
        assert by_serial == self.by_serial, f"fetches by serial: {self.by_serial}"
        for fetch in self.fetches.values():
            try:
                fetch.check()
            except AssertionError as error:
                raise AssertionError(f"{error}\n{fetch.story}") from None
        self.asker.check()
        segments = sum(s.in_flight for f in self.fetches.values() for s in f.segments)
        expecting = sum(f.state is FetchState.EXPECTING for f in self.fetches.values())
        timers = len(self.fetches) + segments + expecting
        assert len(self.timers) == timers, f"{len(self.timers)} timers run, not {timers}"
