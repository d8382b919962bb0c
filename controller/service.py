"""The controller at work: the pool's core between a switch, agents, a state file and HTTP.

Owns: the control loop (one task that plans, writes, and publishes), the clock, and the order in
which the adapters are used. Must not know: what is decided (`pool.py`), flags (`daemon.py`).

The loop wakes on events and at deadlines. It alone writes to the switch and to the state file;
agents' messages change the pool at once and are answered at once where no write is needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcast.protocol.control import AgentMessage
from kvcast.protocol.framing import FramingError
from kvcast.protocol.wire import BlockId

from .agents import AgentLink
from .http_api import ApiError, HttpApi
from .metrics import Metrics
from .pool import Action, Close, Plan, Pool, PoolOptions, Send
from .program import BROADCAST_MAC, L2_FORWARD, mac_number, resident_entries
from .reconcile import SwitchState, diff
from .store import Store, StoreError
from .switch import SwitchError, SwitchLink
from .tiers import HeatSample, PinError

log = logging.getLogger("kvcast.controller")

GATHER_EVENTS_S = 0.02
"""After a first event the loop waits so long for others, so that a start of 32 agents is a few
epochs and not 32."""
RETRY_SWITCH_S = 1.0
SWITCH_GRACE_S = 3.0
"""While the switch has been away for less than this, changes wait for it, so that agents are not
told of what the switch does not let through yet; after that they are told all the same."""
BEAT_S = 0.1
STALL_S = 0.3
"""Waking so much later than planned means that the process was starved or stopped."""
STUCK_AFTER_S = 60.0
"""A loop that has not come round for so long makes /healthz fail."""

DECISION_NAMES = {
    1: "hit",
    2: "join",
    3: "new",
    4: "collide",
    5: "expired",
    6: "retry",
    7: "partial",
    8: "shared",
    9: "unicast",
    10: "guarded",
    11: "dropped",
    12: "forwarded",
    13: "serving",
}
"""The `decisions` table's constant entries; a number that is not here shows as itself."""
FILL_NAMES = {1: "filled", 2: "wrong_digest", 3: "no_chunk"}


@dataclass(frozen=True)
class ServiceOptions:
    """Where things are. Addresses as (host, port); port 0 = pick one."""

    switch: str
    device_id: int
    election_id: int
    p4info: Path
    p4blob: Path
    agents_addr: tuple[str, int]
    http_addr: tuple[str, int]
    tick_s: float


class ControllerService:
    """One controller process; `run` until `stop` is set."""

    def __init__(self, options: ServiceOptions, pool_options: PoolOptions, store: Store) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self.decision_counts: dict[str, int] = {}
        self.fill_counts: dict[str, int] = {}
        self._store = store
        self._pool = Pool(
            pool_options,
            store.load(),
            time.monotonic(),
            # Numbers that no earlier controller can have used, even if the state file is lost:
            # generations grow by one an admission, and admissions are rarer than seconds.
            first_generation=int(time.time()) & 0xFFFFFFFF,
        )
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._programmed = False
        self._not_before = 0.0
        self._held: SwitchState | None = None
        """The plan's state that the switch holds exactly; None if it may hold another."""
        self._hold_until = 0.0
        self._ticked_at = 0.0
        self._tick_took_s = 0.0
        self._loop_at = time.monotonic()
        self._beat_at = self._loop_at
        """When this process was last seen to run."""
        self._lost_at: float | None = self._loop_at
        """Since when the switch has not been writable; None while it is."""
        self._switch = SwitchLink(
            options.switch,
            device_id=options.device_id,
            election_id=options.election_id,
            p4info=options.p4info,
            p4blob=options.p4blob,
            on_ready=self._switch_changed,
            on_heat=self._heat,
        )
        self._agents = AgentLink(
            idle_s=3 * pool_options.lease_s,
            received=self._received,
            disconnected=self._disconnected,
        )
        self._http = HttpApi(self)
        self._metrics = Metrics(self.status)
        self.agents_address = options.agents_addr
        self.http_address = options.http_addr

    async def start(self) -> None:
        """Open the listeners; OSError if an address cannot be had."""
        self.agents_address = await self._agents.start(*self.options.agents_addr)
        self.http_address = await self._http.start(*self.options.http_addr)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`. The switch keeps what it holds: traffic goes on."""
        tasks = [
            asyncio.create_task(self._switch.run(), name="switch"),
            asyncio.create_task(self._control(), name="control"),
            asyncio.create_task(self._beat(), name="beat"),
        ]
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.wait([*tasks, stopping])
            await self._http.stop()
            await self._agents.stop()
            self._store.close()

    # --- the control loop -------------------------------------------------------------------

    async def _control(self) -> None:
        while True:
            await self._sleep()
            try:
                await self._round()
            except Exception:
                # A mistake of ours: one round is lost, not the pool. If every round is, the
                # health check says so.
                log.exception("a round of the control loop failed")
                self.counts["round_errors"] += 1
                self._held = None
                await asyncio.sleep(RETRY_SWITCH_S)

    async def _round(self) -> None:
        """What is due, the tick if it is time, and then the switch and the agents."""
        self._excuse_stall()
        started = time.monotonic()
        self._do(self._pool.advance(started))
        if started - self._ticked_at >= self.options.tick_s:
            self._ticked_at = started
            await self._count()
        await self._converge()
        now = time.monotonic()
        self._loop_at, self._tick_took_s = now, now - started
        self.counts["rounds"] += 1

    async def _sleep(self) -> None:
        """Until an event, a deadline of the pool, or the next tick."""
        now = time.monotonic()
        until = min(now, self._ticked_at) + self.options.tick_s
        deadline = self._pool.next_deadline()
        if deadline is not None:
            until = min(until, deadline)
        try:
            async with asyncio.timeout(max(0.0, until - now)):
                await self._wake.wait()
            await asyncio.sleep(GATHER_EVENTS_S)
            self._wake.clear()
        except TimeoutError:
            pass

    async def _beat(self) -> None:
        """Show, several times a second, that this process runs."""
        while True:
            self._excuse_stall()
            await asyncio.sleep(BEAT_S)

    def _excuse_stall(self) -> None:
        """Where this process did not run for a while, wherever it was then, renewals may lie unread
        in its sockets: the time that it slept is nobody's silence."""
        now = time.monotonic()
        late_s = now - self._beat_at - BEAT_S
        self._beat_at = now
        if late_s > STALL_S:
            self._pool.membership.excuse(late_s)
            self.counts["stalls"] += 1
            log.warning("the controller did not run for %.1f s", late_s)

    async def _count(self) -> None:
        """Read the switch's counters; without the switch the last values stand."""
        if not self._switch.primary or not self._programmed:
            return
        try:
            decisions = await self._switch.table_counters("decisions")
            fills = await self._switch.table_counters("fills")
            hits: dict[int, int] = {}
            if self._pool.tiers.hits_matter:
                hits = await self._switch.indexed_counters("resident_hits")
        except SwitchError as error:
            self._switch_failed("counters", error)
            return
        self.decision_counts = _named(decisions, DECISION_NAMES)
        former = self.fill_counts.get("wrong_digest", 0)
        self.fill_counts = _named(fills, FILL_NAMES)
        if self.fill_counts.get("wrong_digest", 0) > former:
            self._pool.tiers.wrong_digests_seen()
        self._do(self._pool.hits(hits, time.monotonic()))

    async def _converge(self) -> None:
        """Plan, save, write, publish, clean up."""
        switch = self._switch
        usable = switch.primary and time.monotonic() >= self._not_before
        if usable and switch.mirror is None:
            self._programmed, self._held = False, None
            try:
                self._pool.found(await switch.read())
                if strangers := self._strangers():
                    self._hold_until = time.monotonic() + 2 * self._pool.options.lease_s
                    self.counts["takeovers"] += 1
                    log.warning("the switch serves %d unknown nodes: waiting", len(strangers))
            except SwitchError as error:
                self._switch_failed("read", error)
                usable = False
        if usable:
            self._lost_at = None
        elif self._waits_for_switch():
            return
        if usable and self._waits_for_strangers():
            return
        plan = self._pool.plan()
        self._save()
        try:
            if usable and switch.mirror is not None:
                await self._write(plan)
        finally:
            # Whatever became of the switch, agents are told: they go on without it.
            self._do(self._pool.published(plan))
        if usable and self._programmed:
            await self._clean_up(plan)
        self._settled.set()
        self._settled = asyncio.Event()

    def _strangers(self) -> frozenset[int]:
        """MACs that the switch forwards to and this controller does not know.

        There are some where the state file was lost, and where a backup has just taken over. To
        program the switch would cut off nodes that are well, so they are given two leases to
        register first.
        """
        mirror = self._switch.mirror
        served = mirror.entries if mirror is not None else {}
        macs = {match[0] for table, match in served if table == L2_FORWARD}
        known = {mac_number(n.address.mac) for n in self._pool.membership.nodes.values()}
        router = self._pool.options.settings.router_mac
        known |= {BROADCAST_MAC} | ({mac_number(router)} if router else set())
        return frozenset(mac for mac in macs if isinstance(mac, int)) - known

    def _waits_for_strangers(self) -> bool:
        return time.monotonic() < self._hold_until and bool(self._strangers())

    def _waits_for_switch(self) -> bool:
        """Whether the switch is away, but not for so long that agents must go on without it."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        return now - self._lost_at < SWITCH_GRACE_S

    async def _write(self, plan: Plan) -> None:
        assert self._switch.mirror is not None
        if self._held is plan.desired:
            return
        self._held = None
        changes = diff(self._switch.mirror, plan.desired)
        try:
            await self._switch.write(changes.upserts)
        except SwitchError as error:
            self._switch_failed("write", error)
            return
        self._programmed = True

    async def _clean_up(self, plan: Plan) -> None:
        """Delete what should not be; then the switch holds exactly the plan."""
        if self._switch.mirror is None:
            return
        if self._held is not plan.desired:
            changes = diff(self._switch.mirror, plan.desired)
            try:
                await self._switch.write([*changes.upserts, *changes.deletes])
            except SwitchError as error:
                self._switch_failed("write", error)
                return
            self._held = plan.desired
        self._pool.programmed(plan, time.monotonic())

    def _switch_failed(self, what: str, error: SwitchError) -> None:
        log.warning("switch %s failed: %s", what, error)
        self._held = None
        self.counts[f"switch_{what}_errors"] += 1
        self._programmed = False
        self._pool.unprogrammed()
        self._not_before = time.monotonic() + RETRY_SWITCH_S

    def _save(self) -> None:
        try:
            if self._store.save(self._pool.saved()):
                self.counts["state_writes"] += 1
        except StoreError as error:
            # The pool goes on; what a restart would find is the last state that was saved.
            log.error("state not saved: %s", error)
            self.counts["state_errors"] += 1

    # --- events -----------------------------------------------------------------------------

    def _received(self, connection: int, message: AgentMessage) -> None:
        if self._is_backup:
            reason = f"backup controller: election id {self._switch.primary_id} is primary"
            self._do(self._pool.refuse_all(connection, reason))
            return
        self._do(self._pool.received(connection, message, time.monotonic()))
        self._wake.set()

    def _disconnected(self, connection: int) -> None:
        self._pool.disconnected(connection)
        self._wake.set()

    def _heat(self, samples: list[HeatSample]) -> None:
        self._pool.heat(samples, time.monotonic())

    def _switch_changed(self) -> None:
        if not self._switch.primary:
            self._programmed = False
            self._pool.unprogrammed()
        self._not_before = 0.0
        self._wake.set()

    @property
    def _is_backup(self) -> bool:
        return self._switch.connected and not self._switch.primary

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(connection, message):
                    try:
                        self._agents.send(connection, message)
                    except FramingError as error:
                        self.counts["messages_too_long"] += 1
                        log.error("not sent: %s", error)
                case Close(connection, reason):
                    self._agents.close(connection, reason)

    # --- what HTTP asks ---------------------------------------------------------------------

    def health(self) -> str | None:
        """Why the controller is not well; None if it is."""
        silent_s = time.monotonic() - self._loop_at
        if silent_s > STUCK_AFTER_S:
            return f"the control loop has not come round for {silent_s:.0f} s"
        return None

    def status(self) -> dict[str, Any]:
        """/v1/status."""
        link = self._switch
        return {
            **self._pool.status(time.monotonic()),
            "switch": {
                "address": link.address,
                "connected": link.connected,
                "primary": link.primary,
                "primary_election_id": link.primary_id,
                "programmed": self._programmed,
                "last_error": link.last_error,
                "counts": dict(sorted(link.counts.items())),
            },
            "decisions": self.decision_counts,
            "fills": self.fill_counts,
            "controller": {
                "tick_s": round(self._tick_took_s, 6),
                "agent_connections": self._agents.connections,
                "counts": dict(sorted(self.counts.items())),
                "link_counts": dict(sorted(self._agents.counts.items())),
                "http_counts": dict(sorted(self._http.counts.items())),
            },
        }

    def decisions(self) -> list[dict[str, Any]]:
        """/v1/decisions."""
        return self._pool.decisions(time.monotonic())

    def metrics(self) -> bytes:
        """/metrics."""
        return self._metrics.render()

    async def pin(self, block: BlockId, wait_s: float) -> dict[str, Any]:
        """Pin the block and wait until the switch holds its entries; ApiError with why not."""
        pool = self._pool
        if block.namespace not in pool.names.namespaces:
            raise ApiError(404, f"namespace {block.namespace} does not exist")
        if not pool.options.settings.enabled:
            raise ApiError(409, "the switch is used as a plain switch (--plain)")
        if self._is_backup:
            raise ApiError(503, "backup controller")
        try:
            pool.tiers.pin(block)
        except PinError as error:
            raise ApiError(409, str(error)) from error
        deadline = time.monotonic() + wait_s
        self._wake.set()
        while True:
            settled = self._settled
            resident = pool.tiers.residency.residents.get(block)
            if resident is not None and self._holds(block):
                return {
                    "resident": True,
                    "slots": list(resident.slots),
                    "generation": resident.generation,
                    "digest": f"{resident.digest:016x}",
                    "size_bytes": resident.size_bytes,
                }
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await settled.wait()
            except TimeoutError:
                reason = (
                    "the switch has not been programmed yet"
                    if resident is not None
                    else pool.tiers.why_not(block)
                )
                # The pin stays: the block is admitted as soon as it can be.
                raise ApiError(503, f"pinned, but not resident yet: {reason}") from None

    def _holds(self, block: BlockId) -> bool:
        """Whether the switch has all entries of this resident."""
        mirror = self._switch.mirror
        resident = self._pool.tiers.residency.residents.get(block)
        if mirror is None or resident is None:
            return False
        entries = resident_entries(resident)
        return all(mirror.entries.get(key) == action for key, action in entries.items())

    def unpin(self, block: BlockId) -> bool:
        """Let the block stand by its value again; whether it was pinned."""
        return self._pool.tiers.unpin(block)


def _named(counters: dict[int, int], names: dict[int, str]) -> dict[str, int]:
    return {names.get(number, str(number)): count for number, count in sorted(counters.items())}
