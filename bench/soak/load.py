"""The load of a soak: a workload's requests without end, as fast as the pool takes them.

Owns: how many requests are in flight, windows of time and what the load came to in each, gets that
hang. Must not know: faults, processes.

The loop is closed: as soon as a request has ended, the next one starts (its `time_s` is ignored;
that it comes after another one, and its jitter, are not). The pool's arenas are small, so blocks
are evicted all the time, and the hit rate is below 1 without any fault.

A get hangs if its agent, which was neither killed nor stopped meanwhile, has not answered when the
client library gives up, five seconds behind the get's own deadline; a request hangs if it has not
ended after `_STUCK_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvcast.bench.replay import IdealPool, NodeLink, Player, Reads, ReplayOptions, Tally, Turn
from kvcast.bench.soak.verdict import Window
from kvcast.hostagent.client import KvcastError
from kvcast.service.statistics import percentile
from kvcast.workloads.generators import Request

_STUCK_S = 240.0
"""Longer than everything that one request does may take by the client library's own bounds."""
_REMEMBERED_BLOCKS = 60_000
"""Some minutes of writing: nothing older is asked for again."""
_RECENT_BLOCKS = 64
_FEWER = 4
"""While blocks move, the most requests in flight are so many times fewer."""
_PAUSE_S = 0.02


class Load:
    """Plays requests until it is stopped.

    `undisturbed(node, since)`: whether that node's agent has run without a pause since then (of
    time.monotonic). `moving()`: whether blocks are handed over; then fewer requests are in flight,
    for on a machine that has nothing to spare blocks would come faster than they are handed over.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        links: Sequence[NodeLink],
        node_ids: Sequence[str],
        options: ReplayOptions,
        undisturbed: Callable[[int, float], bool],
        moving: Callable[[], bool],
    ) -> None:
        self.recent: deque[tuple[int, bytes]] = deque(maxlen=_RECENT_BLOCKS)
        """Namespaces and keys of blocks that were asked for lately."""
        self.hung: list[str] = []
        self.hits: Counter[str] = Counter()
        self.miss_reasons: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        """What ended a request and should not have: a fault of the bench, or of the client."""
        self._requests = iter(requests)
        self._options = options
        self._undisturbed = undisturbed
        self._moving = moving
        self._player = Player(links, node_ids, options)
        self._ideal = IdealPool(_REMEMBERED_BLOCKS)
        self._slots = asyncio.Semaphore(options.in_flight)
        self._under_way: dict[int, tuple[asyncio.Task[None], float]] = {}
        self._began = 0.0
        self._window_s = 0.0

    async def prepare(self, requests: Iterable[Request]) -> None:
        """Have the namespaces and groups of these requests made, while nothing is broken."""
        await self._player.prepare(requests)

    @property
    def namespaces(self) -> list[int]:
        """The numbers of those that were made, in this order."""
        return self._player.namespaces

    def begin(self, now: float) -> None:
        """The soak's clock starts at `now` (of time.monotonic)."""
        self._began = now

    async def run(self) -> None:
        """Play until cancelled; then let what is in flight end."""
        try:
            while True:
                await self._slots.acquire()
                while self._is_too_much():  # noqa: ASYNC110 - ends with any of many requests
                    await asyncio.sleep(_PAUSE_S)
                request = next(self._requests)
                task = asyncio.create_task(self._play(request, self._ideal.reads(request)))
                self._under_way[request.number] = (task, time.monotonic())
                task.add_done_callback(partial(self._ended, request.number))
        finally:
            tasks = [task for task, _ in self._under_way.values()]
            if tasks:
                _, late = await asyncio.wait(tasks, timeout=_STUCK_S)
                self.hung += [f"a request, for more than {_STUCK_S:g} s" for _ in late]
                for task in late:
                    task.cancel()

    def _is_too_much(self) -> bool:
        return self._moving() and _FEWER * len(self._under_way) >= self._options.in_flight

    def cut(self) -> Window:
        """End a window and begin the next one."""
        now_s = time.monotonic() - self._began
        tally, self._player.tally = self._player.tally, Tally()
        self._judge(tally)
        self.hits.update(tally.hits)
        self.miss_reasons.update(tally.miss_reasons)
        window = Window(
            began_s=round(self._window_s, 2),
            ended_s=round(now_s, 2),
            requests=len(tally.turns),
            failed_requests=tally.failed_requests,
            wanted=sum(turn.wanted for turn in tally.turns),
            came=sum(min(turn.came, turn.wanted) for turn in tally.turns),
            gets=tally.gets,
            delivered=tally.gets - tally.misses,
            missed=tally.misses,
            wrong_bytes=tally.wrong_bytes,
            put_blocks=tally.put_blocks,
            put_failures=tally.put_failures,
            fetch_p50_ms=percentile(tally.fetch_ms, 0.50),
            fetch_p99_ms=percentile(tally.fetch_ms, 0.99),
        )
        self._window_s = now_s
        return window

    def _judge(self, tally: Tally) -> None:
        for node, began in tally.overdue:
            if self._undisturbed(node, began):
                self.hung.append(f"a get at node {node}, {began - self._began:.0f} s into the soak")
        now = time.monotonic()
        for number, (_, began) in self._under_way.items():
            stuck = f"request {number}, {began - self._began:.0f} s into the soak"
            if now - began > _STUCK_S and stuck not in self.hung:
                self.hung.append(stuck)

    async def _play(self, request: Request, wanted: int) -> None:
        started_s, failed, reads = time.monotonic() - self._began, False, Reads()
        try:
            earlier = self._under_way.get(-1 if request.after is None else request.after)
            if earlier is not None:
                await asyncio.wait([earlier[0]])
            if request.jitter_s:
                await asyncio.sleep(request.jitter_s)
            started_s = time.monotonic() - self._began
            await self._player.prepare([request])
            await self._player.play(request, reads)
            namespace = self._player.namespace(request.namespace)
            self.recent.append((namespace, request.keys[-1]))
        except (KvcastError, OSError):
            failed = True
            self._player.tally.failed_requests += 1
        finally:
            self._player.tally.turns.append(
                Turn(
                    request.group or (request.node,),
                    started_s,
                    time.monotonic() - self._began,
                    wanted,
                    reads.came,
                    reads.missed,
                    failed,
                )
            )

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._under_way[number]
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)
