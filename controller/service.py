"""The controller at work: the pool's core between a switch, agents, a state file and HTTP.

Owns: the tasks, the clock, when the control loop's rounds run, and what HTTP asks. Must not know:
what a round does (`control_loop.py`), what is decided (`pool.py`), flags (`flags.py`).

The loop wakes on events and at deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from kvcast.controller.agent_links import AgentLink
from kvcast.controller.core.membership import DrainError
from kvcast.controller.core.namespaces import NamespaceError, UnprintableError
from kvcast.controller.core.pool import Pool, PoolOptions
from kvcast.controller.core.program import resident_entries
from kvcast.controller.core.tiers import PinError
from kvcast.controller.http.api import HttpApi, HttpOptions, NamespaceBody, SettingsBody
from kvcast.controller.http.metrics import metrics_of
from kvcast.controller.store import Store
from kvcast.controller.switch.connection import SwitchLink, SwitchTls
from kvcast.controller.switch.control_loop import RETRY_SWITCH_S, ControlLoop
from kvcast.protocol.messages.control import NamespaceInfo, NamespaceSettings
from kvcast.protocol.messages.wire import BlockId
from kvcast.service.http import HttpError
from kvcast.service.tls import Credentials
from prometheus_client.metrics_core import Metric

log = logging.getLogger("kvcast.controller")

GATHER_EVENTS_S = 0.02
"""After a first event the loop waits so long for others, so that a start of 32 agents is a few
epochs and not 32."""
BEAT_S = 0.1
"""How often the process shows that it runs."""
STALL_S = 0.3
"""Waking so much later than planned means that the process was starved or stopped."""
STUCK_AFTER_S = 60.0
"""A loop that has not come round for so long makes /healthz fail."""


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
    credentials: Credentials | None = None
    """With them, the agents' link and the HTTP API are TLS; without, plain."""
    switch_tls: SwitchTls | None = None
    http: HttpOptions = field(default_factory=HttpOptions)


class ControllerService:
    """One controller process; `run` until `stop` is set."""

    def __init__(self, options: ServiceOptions, pool_options: PoolOptions, store: Store) -> None:
        self.options = options
        self._store = store
        self._pool = Pool(
            pool_options,
            store.load(),
            time.monotonic(),
            # A number from which on hardly any was used by an earlier controller, or by another
            # that stands by, even if the state file is lost, and whatever the clock says.
            first_generation=secrets.randbits(31),
        )
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._beat_at = time.monotonic()
        """When this process was last seen to run."""
        self._loop = ControlLoop(
            self._pool,
            store,
            tick_s=options.tick_s,
            clock=time.monotonic,
            wake=self._wake.set,
            on_settled=self._has_settled,
        )
        self._switch = SwitchLink(
            options.switch,
            device_id=options.device_id,
            election_id=options.election_id,
            p4info=options.p4info,
            p4blob=options.p4blob,
            switch_changed=self._loop.switch_changed,
            heat_counted=self._loop.heat,
            tls=options.switch_tls,
        )
        self._agents = AgentLink(
            idle_s=3 * pool_options.lease_s,
            received=self._loop.received,
            disconnected=self._loop.disconnected,
            credentials=options.credentials,
        )
        self._loop.use(self._switch, self._agents)
        self._http = HttpApi(self, options.http, options.credentials)
        files = {"certificates": options.credentials, "tokens": options.http.tokens}
        self._files = {what: file for what, file in files.items() if file is not None}
        """What is read again when it changes."""
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
            self._excuse_stall()
            try:
                await self._loop.round()
            except Exception:
                # A mistake of ours: one round is lost, not the pool. If every round is, the
                # health check says so.
                log.exception("a round of the control loop failed")
                self._loop.round_failed()
                await asyncio.sleep(RETRY_SWITCH_S)

    async def _sleep(self) -> None:
        """Until an event, a deadline of the pool, or the next tick."""
        now = time.monotonic()
        until = self._loop.next_round_at()
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
            self._loop.stalled(late_s)

    def _has_settled(self) -> None:
        self._settled.set()
        self._settled = asyncio.Event()

    # --- what HTTP asks ---------------------------------------------------------------------

    def health(self) -> str | None:
        """Why the controller is not well; None if it is."""
        silent_s = time.monotonic() - self._loop.rounded_at
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
                "programmed": self._loop.programmed,
                "last_error": link.last_error,
                "counts": dict(sorted(link.counts.items())),
            },
            "decisions": self._loop.decision_counts,
            "fills": self._loop.fill_counts,
            "controller": {
                "tick_s": round(self._loop.tick_took_s, 6),
                "agent_connections": self._agents.connections,
                "counts": dict(sorted(self._loop.counts.items())),
                "link_counts": dict(sorted(self._agents.counts.items())),
                "http_counts": dict(sorted(self._http.counts.items())),
                "reloads": {what: file.reloads for what, file in self._files.items()},
                "failed_reloads": {what: file.failed_reloads for what, file in self._files.items()},
            },
        }

    def worth(self) -> dict[str, Any]:
        """/v1/worth."""
        return self._pool.worth(time.monotonic())

    def decisions(self) -> list[dict[str, Any]]:
        """/v1/decisions."""
        return self._pool.decisions(time.monotonic())

    def metrics(self) -> Iterable[Metric]:
        """/metrics."""
        return metrics_of(self.status())

    def derived(self, block: BlockId) -> BlockId:
        """An engine's block as the pool knows it."""
        return self._pool.derived(block)

    async def pin(self, block: BlockId, wait_s: float) -> dict[str, Any]:
        """Pin the block and wait until the switch holds its entries; HttpError with why not."""
        pool = self._pool
        if block.namespace not in pool.namespaces.by_number:
            raise HttpError(404, f"namespace {block.namespace} does not exist")
        if not pool.may_be_pinned(block.namespace):
            raise HttpError(
                409, f"namespace {block.namespace} may not be in the switch (media, residence)"
            )
        if not pool.options.settings.enabled:
            raise HttpError(409, "the switch is used as a plain switch (--plain)")
        self._refuse_backup()
        try:
            pool.tiers.pin(block)
        except PinError as error:
            raise HttpError(409, str(error)) from error
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
                raise HttpError(503, f"pinned, but not resident yet: {reason}") from None

    def _holds(self, block: BlockId) -> bool:
        """Whether the switch has all entries of this resident."""
        mirror = self._switch.mirror
        resident = self._pool.tiers.residency.residents.get(block)
        if mirror is None or resident is None:
            return False
        entries = resident_entries(resident)
        return all(mirror.entries.get(key) == action for key, action in entries.items())

    def namespaces(self) -> list[NamespaceInfo]:
        """GET /v1/namespaces."""
        known = self._pool.namespaces.by_number
        return [known[number] for number in sorted(known)]

    def make_namespace(self, body: NamespaceBody) -> tuple[NamespaceInfo, bool]:
        """POST /v1/namespaces; HttpError."""
        self._refuse_backup()
        now = time.monotonic()
        try:
            info, made = self._pool.make_namespace(
                body.tenant, body.model, body.version, body.layout, now
            )
            if body.settings is not None:
                info = self._pool.configure_namespace(info.namespace, body.settings, now)
        except NamespaceError as error:
            status = 400 if isinstance(error, UnprintableError) else 409
            raise HttpError(status, str(error)) from error
        self._keep()
        return info, made

    def change_namespace(self, body: SettingsBody) -> NamespaceInfo:
        """PATCH /v1/namespaces; HttpError."""
        self._refuse_backup()
        info = self._pool.namespaces.by_number.get(body.namespace)
        if info is None:
            raise HttpError(404, f"namespace {body.namespace} does not exist")
        before = msgspec.to_builtins(info.settings)
        try:
            settings = msgspec.convert({**before, **body.settings}, NamespaceSettings)
        except msgspec.ValidationError as error:
            raise HttpError(400, f"settings: {error}") from error
        info = self._pool.configure_namespace(body.namespace, settings, time.monotonic())
        self._keep()
        return info

    def delete_namespace(self, namespace: int) -> None:
        """DELETE /v1/namespaces; HttpError."""
        self._refuse_backup()
        try:
            self._pool.delete_namespace(namespace, time.monotonic())
        except NamespaceError as error:
            raise HttpError(404, str(error)) from error
        self._keep()

    def drain(self, node_id: str) -> None:
        """POST /v1/drain; HttpError."""
        self._refuse_backup()
        try:
            self._pool.drain(node_id)
        except DrainError as error:
            raise HttpError(409, str(error)) from error
        self._keep()

    def undrain(self, node_id: str) -> None:
        """DELETE /v1/drain; HttpError."""
        self._refuse_backup()
        try:
            self._pool.undrain(node_id, time.monotonic())
        except DrainError as error:
            raise HttpError(409, str(error)) from error
        self._keep()

    def _keep(self) -> None:
        """What an operator has said outlives this process, before the answer says so; HttpError."""
        self._wake.set()
        if not self._loop.save():
            raise HttpError(500, "in force, but not saved: it is forgotten with this process")

    def _refuse_backup(self) -> None:
        if self._loop.is_backup:
            raise HttpError(503, "backup controller")

    def unpin(self, block: BlockId) -> bool:
        """Let the block stand by its value again; whether it was pinned."""
        return self._pool.tiers.unpin(block)
