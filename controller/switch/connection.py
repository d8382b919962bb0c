"""The switch, over P4Runtime: the adapter between `SwitchState`s and a finsy `Switch`.

Owns: the connection (made again when it breaks), arbitration, the pipeline push (by finsy: only
where the switch's cookie differs, since a push clears everything), how entries, groups and digest
configurations are encoded, and the reading of tables, counters and digests. Must not know: what
the entries mean, or what should be written.

Only what BMv2's P4Runtime server also offers is used: tables, counters, multicast groups, digests
(no register access, no wildcard over all tables' counters).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import finsy as fy
from finsy.p4client import P4ClientError
from kvcast.controller.core import program
from kvcast.controller.core.reconcile import (
    SETTINGS,
    ActionCall,
    Change,
    DigestChange,
    DigestConfig,
    EntryChange,
    EntryKey,
    GroupChange,
    MatchValue,
    Replica,
    SwitchState,
    Verb,
    apply,
)
from kvcast.controller.core.tiers import HeatSample
from kvcast.controller.switch.control_loop import WRITE_BATCH, SwitchError
from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.messages.wire import KEY_BYTES, BlockId
from kvcast.service.tls import TlsFiles

log = logging.getLogger("kvcast.controller.switch.connection")

T = TypeVar("T")

CONNECT_TIMEOUT_S = 30.0
"""For connection, arbitration and pipeline push together."""
RETRY_FIRST_S = 0.2
RETRY_MOST_S = 2.0
DIGEST_QUEUE = 1024
"""Digest lists waiting here at most; finsy drops and logs what comes beyond."""


class OneLineErrors(logging.Filter):
    """For finsy's logger: a failed task is one line, not a traceback at every retry.

    And no word, at every connection, of gNMI, which neither switchsim nor BMv2 has.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if "gNMI is not implemented" in str(record.msg):
            return False
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = _brief(error) if isinstance(error, P4ClientError) else repr(error)
            record.msg, record.args = f"{record.getMessage()}: {text}", None
            record.exc_info = record.exc_text = None
        return True


@dataclass(frozen=True)
class SwitchTls:
    """How the switch is spoken to over TLS. `name`: whose certificate it must show, where that is
    not the host of its address."""

    files: TlsFiles
    name: str = ""


def _channel_credentials(tls: SwitchTls) -> fy.GRPCCredentialsTLS:
    # finsy reads the files at every connection, so a renewed certificate is used at the next.
    return fy.GRPCCredentialsTLS(
        cacert=tls.files.ca,
        cert=tls.files.cert,
        private_key=tls.files.key,
        target_name_override=tls.name,
    )


class SwitchLink:
    """One switch. `run` keeps the connection; everything else works while `primary` is true.

    `switch_changed` is told when the switch must be read anew: after every connection, and when
    this controller becomes primary or backup. `heat_counted` gets every list of heat digests.
    """

    def __init__(
        self,
        address: str,
        *,
        device_id: int,
        election_id: int,
        p4info: Path,
        p4blob: Path,
        switch_changed: Callable[[], None],
        heat_counted: Callable[[list[HeatSample]], None],
        tls: SwitchTls | None = None,
    ) -> None:
        self.address = address
        self.mirror: SwitchState | None = None
        """What the switch holds, as far as known; None when it must be read."""
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._options = fy.SwitchOptions(
            p4info=p4info,
            p4blob=p4blob,
            device_id=device_id,
            initial_election_id=election_id,
            channel_credentials=None if tls is None else _channel_credentials(tls),
        )
        self._switch: fy.Switch | None = None
        self._switch_changed = switch_changed
        self._heat_counted = heat_counted

    @property
    def connected(self) -> bool:
        """The stream is up and arbitration is settled."""
        return self._switch is not None

    @property
    def primary(self) -> bool:
        """This controller may write."""
        return self._switch is not None and self._switch.is_up and self._switch.is_primary

    @property
    def primary_id(self) -> int | None:
        """The election id of the switch's primary controller; None while not connected."""
        return self._switch.primary_id if self._switch is not None else None

    # --- connection -------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while True:
            # A task of its own: finsy answers a failed push by cancelling its tasks, and that
            # cancellation comes out of `__aenter__`.
            session = asyncio.create_task(self._session(), name="switch session")
            try:
                await asyncio.wait([session])
            finally:
                if not session.done():
                    session.cancel()
                    await asyncio.wait([session])
            if session.cancelled():
                self._failed("the connection was given up before it worked")
            elif (error := session.exception()) is not None:
                # finsy lets grpc's, protobuf's and its own errors through; whatever it was, the
                # answer is the same: note it, and begin again with a new connection.
                self._failed(error)
            elif session.result():
                backoff.worked()
            await asyncio.sleep(backoff.next_pause_s())

    async def _session(self) -> bool:
        """One connection, until it breaks; whether it ever worked."""
        switch = fy.Switch("switch", self.address, self._options)
        self.counts["connects"] += 1
        down = asyncio.Event()
        switch.ee.on(fy.SwitchEvent.CHANNEL_DOWN, lambda _: down.set())
        switch.ee.on(fy.SwitchEvent.CHANNEL_READY, lambda _: self._ready())
        tasks: list[asyncio.Task[Any]] = []
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await switch.__aenter__()
        except TimeoutError:
            self._failed("no answer to connection, arbitration or pipeline push")
            return False
        try:
            self._switch = switch
            self._ready()
            reader = asyncio.create_task(self._read_digests(switch))
            log.info("switch connected", extra={"address": self.address, "primary": self.primary})
            broken = asyncio.create_task(down.wait())
            tasks = [broken, reader]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._failed("connection lost" if broken.done() else reader.exception())
        finally:
            self._switch = None
            self.mirror = None
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await switch.__aexit__(None, None, None)
            self._switch_changed()
        return True

    def _ready(self) -> None:
        self.mirror = None
        self._switch_changed()

    def _failed(self, error: object) -> None:
        text = (str(error) or repr(error)).splitlines()[0][:300]
        if text != self.last_error:
            log.warning("switch: %s", text, extra={"address": self.address})
        self.last_error = text
        self.counts["connection_errors"] += 1

    async def _read_digests(self, switch: fy.Switch) -> None:
        async for digests in switch.read_digests(program.HEAT_DIGEST, queue_size=DIGEST_QUEUE):
            self.counts["digest_lists"] += 1
            samples = heat_samples(digests)
            self.counts["digests_malformed"] += len(digests) - len(samples)
            self._heat_counted(samples)
            if switch.is_primary:
                with suppress(P4ClientError, AssertionError):
                    await switch.write([digests.ack()])

    # --- reading and writing ----------------------------------------------------------------

    async def read(self) -> SwitchState:
        """Everything that the controller owns, as the switch holds it; also sets `mirror`."""
        wanted: list[Any] = [fy.P4TableEntry(t) for t in program.OWNED_TABLES]
        wanted.append(fy.P4TableEntry(SETTINGS, is_default_action=True))
        wanted.append(fy.P4MulticastGroupEntry())

        async def reading(switch: fy.Switch) -> SwitchState:
            state = SwitchState()
            async for entity in _read(switch, wanted):
                _note(state, entity, switch.p4info)
            state.digests.update(await _digest_configs(switch))
            return state

        state = await self._guarded(reading)
        self.counts["reads"] += 1
        self.mirror = state
        return state.copy()

    async def write(self, changes: Sequence[Change]) -> None:
        """Make these changes, in order; `mirror` follows. SwitchError: read before the next."""
        for start in range(0, len(changes), WRITE_BATCH):
            batch = changes[start : start + WRITE_BATCH]

            async def writing(switch: fy.Switch, batch: Sequence[Change] = batch) -> None:
                await switch.write([update_of(change, switch.p4info) for change in batch])

            try:
                await self._guarded(writing)
            except SwitchError:
                self.mirror = None
                raise
            for change in batch:
                self.counts[f"{change.verb.value} {change.kind}"] += 1
                if self.mirror is not None:
                    apply(self.mirror, change)
            self.counts["writes"] += len(batch)

    async def table_counters(self, table: str) -> dict[int, int]:
        """A table's direct packet counters by the value of its one exact key."""
        counters: dict[int, int] = {}
        for counter in await self._read_all(
            fy.P4DirectCounterEntry(table_entry=fy.P4TableEntry(table))
        ):
            if counter.table_entry is not None and counter.table_entry.match:
                (key,) = counter.table_entry.match.values()
                counters[int(key)] = counter.packet_count
        return counters

    async def indexed_counters(self, counter: str) -> dict[int, int]:
        """An indirect packet counter's values by index."""
        entries = await self._read_all(fy.P4CounterEntry(counter))
        return {entry.index: entry.packet_count for entry in entries if entry.index is not None}

    async def _read_all(self, wanted: Any) -> list[Any]:
        async def reading(switch: fy.Switch) -> list[Any]:
            return [entity async for entity in _read(switch, wanted)]

        return await self._guarded(reading)

    async def _guarded(self, work: Callable[[fy.Switch], Awaitable[T]]) -> T:
        """Do it on the present connection; every way to fail is a SwitchError."""
        switch = self._switch
        if switch is None or not switch.is_up:
            raise SwitchError("not connected")
        try:
            return await work(switch)
        except P4ClientError as error:
            self.counts["rpc_errors"] += 1
            raise SwitchError(_brief(error)) from error
        except asyncio.CancelledError as error:
            # A call that is in flight when its channel is closed ends so too (grpc.aio), although
            # nobody has cancelled this task.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self.counts["rpc_errors"] += 1
            raise SwitchError("connection lost during a call") from error
        except (AssertionError, AttributeError, RuntimeError) as error:
            # finsy asserts that its client is open, which ends under our hands when the
            # connection breaks between two awaits.
            if self._switch is switch and switch.is_up:
                raise
            raise SwitchError("connection lost") from error


def _read(switch: fy.Switch, entities: Any) -> AsyncIterator[Any]:
    """`switch.read`, whose annotation in finsy 0.30 says that it must be awaited first."""
    reading: Any = switch.read
    answers: AsyncIterator[Any] = reading(entities)
    return answers


def _brief(error: P4ClientError) -> str:
    """One line of an error that may carry hundreds of per-update details."""
    details = sorted(error.details.items())
    text = f"{error.code.name}: {error.message}"
    if details:
        index, first = details[0]
        text += (
            f"; {len(details)} updates failed, first #{index}: "
            f"{first.canonical_code.name} {first.message} {str(first.subvalue)[:200]}"
        )
    return " ".join(text.split())


def heat_samples(digests: fy.P4DigestList) -> list[HeatSample]:
    """Those of a list of digests that are of the shape that the program declares."""
    return [sample for data in digests if (sample := _heat_sample(data)) is not None]


def _heat_sample(data: Any) -> HeatSample | None:
    """A decoded digest; None if it is not of the shape that the program declares."""
    try:
        return HeatSample(
            block=BlockId(int(data["namespace"]), int(data["key"]).to_bytes(KEY_BYTES, "big")),
            segment=int(data["segment"]),
            port_bits=int(data["port_bits"]),
            count=int(data["count"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _note(state: SwitchState, entity: Any, schema: fy.P4Schema) -> None:
    """Enter a read entity into the state."""
    match entity:
        case fy.P4TableEntry(action=fy.P4TableAction() as action):
            table = schema.tables[entity.table_id]
            key: EntryKey = (entity.table_id, ())
            if not entity.is_default_action:
                matches: dict[str, Any] = entity.match or {}
                key = (entity.table_id, tuple(matches[f.alias] for f in table.match_fields))
            params = tuple(int(action.args[p.name]) for p in table.actions[action.name].params)
            state.entries[key] = ActionCall(action.name, params)
        case fy.P4MulticastGroupEntry():
            replicas: set[Replica] = set()
            for replica in entity.replicas:
                copy: Any = replica  # a bare port number where the replication id is 0
                replicas.add((copy, 0) if isinstance(copy, int) else (copy.port, copy.instance))
            state.groups[entity.multicast_group_id] = frozenset(replicas)


async def _digest_configs(switch: fy.Switch) -> dict[str, DigestConfig]:
    """The configured digests; a switch may answer NOT_FOUND for one that is not configured."""
    configs: dict[str, DigestConfig] = {}
    try:
        async for entry in _read(switch, fy.P4DigestEntry(program.HEAT_DIGEST)):
            # BMv2 answers for an unconfigured digest with the zeros of an empty message.
            if entry.digest_id and (entry.max_list_size or entry.max_timeout_ns):
                configs[entry.digest_id] = DigestConfig(
                    entry.max_list_size, entry.max_timeout_ns, entry.ack_timeout_ns
                )
    except P4ClientError as error:
        if error.code != fy.GRPCStatusCode.NOT_FOUND:
            raise
    return configs


def update_of(change: Change, schema: fy.P4Schema) -> Any:
    """The change as a finsy update."""
    entity: Any
    match change:
        case EntryChange(verb, (table_name, match), action):
            table = schema.tables[table_name]
            params = table.actions[action.name].params
            named = {p.name: v for p, v in zip(params, action.params, strict=True)}
            entity = fy.P4TableEntry(
                table_name,
                match=_match(table, match) if match else None,
                action=fy.P4TableAction(action.name, **named) if verb is not Verb.DELETE else None,
                is_default_action=not match,
            )
        case GroupChange(verb, group, replicas):
            entity = fy.P4MulticastGroupEntry(group, replicas=sorted(replicas))
        case DigestChange(verb, name, config):
            entity = fy.P4DigestEntry(
                name,
                max_list_size=config.max_list_size,
                max_timeout_ns=config.max_timeout_ns,
                ack_timeout_ns=config.ack_timeout_ns,
            )
    return {Verb.INSERT: lambda e: +e, Verb.MODIFY: lambda e: ~e, Verb.DELETE: lambda e: -e}[verb](
        entity
    )


def _match(table: Any, values: Iterable[MatchValue]) -> fy.P4TableMatch:
    fields = [field.alias for field in table.match_fields]
    return fy.P4TableMatch(dict(zip(fields, values, strict=True)))
