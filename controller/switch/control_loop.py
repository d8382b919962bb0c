"""The control loop: plans, writes, publishes, between the pool's core and its adapters.

Owns: the order in which the switch, the state file and the agents are used, and what follows when
one of them fails. Must not know: what is decided (`pool.py`), tasks, sockets, or where the time
comes from: the switch, the state, the agents' links and the clock are handed in. So the same loop
runs in the daemon and under a simulator's virtual clock.

`round` is the only coroutine, and it awaits nothing but the switch. It alone writes to the switch
and to the state; agents' messages change the pool at once, and are answered at once where no
write is needed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvcast.controller.core import program
from kvcast.controller.core.pool import Action, Close, Plan, Pool, SavedState, Send
from kvcast.controller.core.program import BROADCAST_MAC, L2_FORWARD, mac_number
from kvcast.controller.core.reconcile import Change, SwitchState, changes_since
from kvcast.controller.core.tiers import HeatSample
from kvcast.p4.definitions import Decision, Fill
from kvcast.protocol.messages.control import AgentMessage
from kvcast.protocol.messages.framing import FramingError

log = logging.getLogger("kvcast.controller")

WRITE_BATCH = 200
"""Updates in one WriteRequest."""
RETRY_SWITCH_S = 1.0
SWITCH_GRACE_S = 3.0
HEAT_PAUSE_S = 0.05
"""While the switch has been away for less than this, changes wait for it, so that agents are not
told of what the switch does not let through yet; after that they are told all the same."""


class SwitchError(Exception):
    """The switch could not be read or written; what it holds is unknown until it is read."""


class StoreError(Exception):
    """The state cannot be read or saved; the text says why."""


class SwitchPort(Protocol):
    """A switch, as the loop uses it; every coroutine may raise SwitchError."""

    mirror: SwitchState | None

    @property
    def connected(self) -> bool: ...

    @property
    def primary(self) -> bool: ...

    @property
    def primary_id(self) -> int | None: ...

    async def read(self) -> SwitchState: ...

    async def write(self, changes: Sequence[Change]) -> None: ...

    async def table_counters(self, table: str) -> dict[int, int]: ...

    async def indexed_counters(self, counter: str) -> dict[int, int]: ...


class StatePort(Protocol):
    """What makes the pool's state durable; StoreError where it cannot."""

    def save(self, state: SavedState) -> bool: ...


class AgentsPort(Protocol):
    """The agents' connections."""

    def send(self, connection: int, message: Any) -> None: ...

    def close(self, connection: int, reason: str) -> None: ...


class ControlLoop:
    """See the module's text. `on_settled` is called when a round has come to its end; `wake` when
    an event wants a round soon."""

    def __init__(
        self,
        pool: Pool,
        state: StatePort,
        *,
        tick_s: float,
        clock: Callable[[], float],
        wake: Callable[[], None],
        on_settled: Callable[[], None],
    ) -> None:
        self.pool = pool
        self.counts: Counter[str] = Counter()
        self.decision_counts: dict[str, int] = {}
        self.fill_counts: dict[str, int] = {}
        self.tick_s = tick_s
        self.clock = clock
        self.tick_took_s = 0.0
        self.rounded_at = clock()
        self.programmed = False
        self._state = state
        self._wake = wake
        self._on_settled = on_settled
        self._not_before = 0.0
        self._held: SwitchState | None = None
        """The plan's state that the switch holds exactly; None if it may hold another."""
        self._obsolete: Sequence[Change] = ()
        """What is still to be deleted, once agents have been told."""
        self._macs: frozenset[int] = frozenset()
        self._macs_of: SwitchState | None = None
        """The part of a plan that these are of."""
        self._stranger_macs: frozenset[int] = frozenset()
        self._strangers_of: tuple[object, object] = None, None
        """The MACs and addresses that these were found in."""
        self._hold_until = 0.0
        self._ticked_at = 0.0
        self._lost_at: float | None = self.rounded_at
        """Since when the switch has not been writable; None while it is."""
        self._was_refused = False
        """Whether the switch would not take what it was written last."""

    def use(self, switch: SwitchPort, agents: AgentsPort) -> None:
        """Work with these, which may have been made with this object's methods as callbacks."""
        self.switch = switch
        self.agents = agents

    # --- rounds -----------------------------------------------------------------------------

    def next_round_at(self) -> float:
        """When the next round is due if nothing happens before."""
        until = min(self.clock(), self._ticked_at) + self.tick_s
        deadline = self.pool.next_deadline()
        return until if deadline is None else min(until, deadline)

    async def round(self) -> None:
        """What is due, the tick if it is time, and then the switch and the agents."""
        started = self.clock()
        if self.is_backup:  # the nodes speak to the primary, and may have to come back to us
            self.pool.membership.await_all(started)
        self._do(self.pool.advance(started))
        if started >= self._ticked_at + self.tick_s:  # as in `next_round_at`, or it may never be
            self._ticked_at = started
            await self._count()
        await self._converge()
        now = self.clock()
        self.rounded_at, self.tick_took_s = now, now - started
        self.counts["rounds"] += 1

    def round_failed(self) -> None:
        """A mistake of ours ended a round half way: believe nothing of the switch."""
        self.counts["round_errors"] += 1
        self._held = None

    async def _count(self) -> None:
        """Read the switch's counters; without the switch the last values stand."""
        if not self.switch.primary or not self.programmed:
            return
        try:
            decisions = await self.switch.table_counters(program.DECISIONS)
            fills = await self.switch.table_counters(program.FILLS)
            hits: Mapping[int, int] = {}
            if self.pool.tiers.hits_matter:
                hits = await self.switch.indexed_counters(program.RESIDENT_HITS)
        except SwitchError as error:
            self._switch_failed("counters", error)
            return
        self.decision_counts = _named(decisions, Decision.counted())
        former = self.fill_counts.get(Fill.WRONG_DIGEST.label, 0)
        self.fill_counts = _named(fills, Fill.counted())
        if self.fill_counts.get(Fill.WRONG_DIGEST.label, 0) > former:
            self.pool.tiers.wrong_digests_seen()
        self._do(self.pool.hits(hits, self.clock()))

    async def _converge(self) -> None:
        """Plan, save, write, publish, clean up."""
        switch = self.switch
        usable = switch.primary and self.clock() >= self._not_before
        if usable and switch.mirror is None:
            self.programmed, self._held = False, None
            try:
                self.pool.found(await switch.read())
                if strangers := self._strangers():
                    self._hold_until = self.clock() + 2 * self.pool.options.lease_s
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
        plan = self.pool.plan()
        self.save()
        try:
            if usable and switch.mirror is not None:
                await self._write(plan)
        finally:
            # Whatever became of the switch, agents are told: they go on without it.
            self._do(self.pool.published(plan))
        if usable and self.programmed:
            await self._clean_up(plan)
        self._on_settled()

    def _strangers(self) -> frozenset[int]:
        """MACs that the switch forwards to and this controller does not know.

        There are some where the state file was lost, and where a backup has just taken over. To
        program the switch would cut off nodes that are well, so they are given two leases to
        register first. The leases begin with the first node that does: while none comes, all may be
        with a controller that has lost nothing but the switch.
        """
        of = self._served_macs(), self.pool.membership.views.addresses
        if of[0] is not self._strangers_of[0] or of[1] is not self._strangers_of[1]:
            router = self.pool.options.settings.router_mac
            known = {BROADCAST_MAC} | ({mac_number(router)} if router else set())
            self._stranger_macs = of[0] - known.union(mac_number(a.mac) for _, a in of[1])
            self._strangers_of = of
        return self._stranger_macs

    def _served_macs(self) -> frozenset[int]:
        """MACs that the switch forwards to; found again for each plan that changes them."""
        held = self._held.parts[0] if self._held is not None and self._held.parts else None
        if held is None or held is not self._macs_of:
            mirror = self.switch.mirror
            served = mirror.entries if mirror is not None else {}
            macs = (match[0] for table, match in served if table == L2_FORWARD)
            self._macs = frozenset(mac for mac in macs if isinstance(mac, int))
            self._macs_of = held
        return self._macs

    def _waits_for_strangers(self) -> bool:
        if not self._strangers():
            return False
        if not any(node.live for node in self.pool.membership.nodes.values()):
            self._hold_until = self.clock() + 2 * self.pool.options.lease_s
        return self.clock() < self._hold_until

    def _waits_for_switch(self) -> bool:
        """Whether the switch is away, but not for so long that agents must go on without it."""
        now = self.clock()
        if self._lost_at is None:
            self._lost_at = now
        return now - self._lost_at < SWITCH_GRACE_S

    async def _write(self, plan: Plan) -> None:
        assert self.switch.mirror is not None
        before = self._held
        if before is plan.desired:
            return
        self._held = None
        changes = changes_since(before or self.switch.mirror, plan.desired)
        # A table may be too small for what is there and what comes. Agents have been told by now,
        # so nothing speaks for that order any more.
        first = changes.deletes if self._was_refused else ()
        self._obsolete = () if first else changes.deletes
        self.programmed = await self._wrote([*first, *changes.upserts])
        self._was_refused = not self.programmed and self.switch.primary

    async def _clean_up(self, plan: Plan) -> None:
        """Delete what should not be; then the switch holds exactly the plan."""
        if self.switch.mirror is None:
            return
        if self._held is not plan.desired:
            if not await self._wrote(self._obsolete):
                return
            self._held = plan.desired
        self.pool.programmed(plan, self.clock())

    async def _wrote(self, changes: Sequence[Change]) -> bool:
        """Write them; whether that went."""
        try:
            await self.switch.write(changes)
        except SwitchError as error:
            self._switch_failed("write", error)
            return False
        return True

    def _switch_failed(self, what: str, error: SwitchError) -> None:
        log.warning("switch %s failed: %s", what, error)
        self._held = None
        self.counts[f"switch_{what}_errors"] += 1
        self.programmed = False
        self.pool.unprogrammed()
        self._not_before = self.clock() + RETRY_SWITCH_S

    def save(self) -> bool:
        """Make what must outlive this process durable; whether that went."""
        try:
            if self._state.save(self.pool.saved()):
                self.counts["state_writes"] += 1
        except StoreError as error:
            # The pool goes on; what a restart would find is the last state that was saved.
            log.error("state not saved: %s", error)
            self.counts["state_errors"] += 1
            return False
        return True

    # --- events -----------------------------------------------------------------------------

    def received(self, connection: int, message: AgentMessage) -> None:
        """An agent's message."""
        if self.is_backup:
            reason = f"backup controller: election id {self.switch.primary_id} is primary"
            self._do(self.pool.refuse_all(connection, reason))
            return
        self._do(self.pool.received(connection, message, self.clock()))
        self._wake()

    def disconnected(self, connection: int) -> None:
        """An agent's connection is gone."""
        self.pool.disconnected(connection)
        self._wake()

    def heat(self, samples: list[HeatSample]) -> None:
        """Heat digests of the switch: a burst is soon over, so they are not left to the next tick.
        A flood of them wakes no round before the last one is HEAT_PAUSE_S old; what it brings is
        heard with the next list."""
        now = self.clock()
        self.pool.heat(samples, now)
        if now - self.rounded_at >= HEAT_PAUSE_S:
            self._wake()

    def switch_changed(self) -> None:
        """The connection to the switch was made or lost, or who is primary has changed."""
        if not self.switch.primary:
            self.programmed = False
            self.pool.unprogrammed()
        self._not_before = 0.0
        self._wake()

    def stalled(self, seconds: float) -> None:
        """This process did not run for so long. Renewals may lie unread in its sockets, so the
        time that it slept is nobody's silence."""
        self.pool.membership.excuse(seconds)
        self.counts["stalls"] += 1
        log.warning("the controller did not run for %.1f s", seconds)

    @property
    def is_backup(self) -> bool:
        """Whether another controller is the switch's primary."""
        return self.switch.connected and not self.switch.primary

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(connection, message):
                    try:
                        self.agents.send(connection, message)
                    except FramingError as error:
                        self.counts["messages_too_long"] += 1
                        log.error("not sent: %s", error)
                case Close(connection, reason):
                    self.agents.close(connection, reason)


def _named(counters: Mapping[int, int], names: Mapping[int, str]) -> dict[str, int]:
    return {names.get(number, str(number)): count for number, count in sorted(counters.items())}
