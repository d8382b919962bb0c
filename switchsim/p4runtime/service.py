"""The P4Runtime service: one device, served over gRPC to several controllers.

Owns: the RPCs, the stream of each controller, which pipeline is loaded and which one runs. Must
not know: sockets and ports (a frame leaves through the CPU port into `packet_in`, and a
packet-out goes to the callback it was given), nor how entries are kept (`p4runtime.entities`) or
primaries are chosen (`p4runtime.arbitration`).

Everything runs on one event loop with the packet loop; nothing here blocks it for long: writes
yield between updates, reads between chunks, and a program is compiled in a thread.

A push makes a new engine beside the running one and puts it in its place when it is complete,
so that a refused config changes nothing, and VERIFY_AND_SAVE has a place to write to.

Specification: P4Runtime 1.4. Where it leaves a choice, as BMv2's server (p4lang/PI) does it;
in strict mode, what that server does not implement is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import grpc
from finsy.proto import p4i, p4r, p4r_grpc, rpc_code
from kvcast.switchsim import ir
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.loader import load as load_program
from kvcast.switchsim.p4runtime.arbitration import Arbiter, Notification
from kvcast.switchsim.p4runtime.digest import SampleList
from kvcast.switchsim.p4runtime.entities import EntityStore
from kvcast.switchsim.p4runtime.errors import (
    STATUS_DETAILS_KEY,
    P4RuntimeError,
    aborted,
    batch_status,
    failed_precondition,
    invalid_argument,
    not_found,
    permission_denied,
    resource_exhausted,
    unimplemented,
)
from kvcast.switchsim.p4runtime.schema import Schema, build_schema
from kvcast.switchsim.p4runtime.state import copied
from kvcast.switchsim.p4runtime.tls import admit

log = logging.getLogger("kvcast.switchsim.p4runtime.service")

API_VERSION = "1.4.0"

# Messages that wait for a controller that reads slowly; more packet-ins and digests are dropped
# and counted, more of anything else ends the stream.
STREAM_QUEUE = 1024
STREAM_QUEUE_LIMIT = 2 * STREAM_QUEUE
# A ReadResponse is sent when it holds this much; clients accept 4 MiB by default.
READ_CHUNK_BYTES = 256 * 1024
READ_CHUNK_ENTITIES = 512
# Updates and entities between two looks at the packet loop.
YIELD_EVERY = 32
# Shortest sleep of the timers, and so the accuracy of digest and idle timeouts.
TIMER_STEP_S = 0.002
# Entries in one idle notification.
IDLE_ENTRIES = 256
# Largest request: a device config with room to spare (as in BMv2's server).
MAX_REQUEST_BYTES = 256 << 20


class NewSwitch(Protocol):
    """Makes an engine."""

    def __call__(self, *, drop_port: int, seed: int) -> Engine: ...


_Config = p4r.ForwardingPipelineConfig
_SetRequest = p4r.SetForwardingPipelineConfigRequest
_GetRequest = p4r.GetForwardingPipelineConfigRequest


@dataclass(slots=True)
class ServiceCounters:
    """What the service did since it was made."""

    writes: int = 0
    updates: int = 0
    update_errors: int = 0
    reads: int = 0
    pushes: int = 0
    packets_in: int = 0
    packets_out: int = 0
    packet_in_drops: int = 0
    """Packet-ins without a primary, or with a primary that reads too slowly."""
    packet_in_short: int = 0
    """Frames to the CPU port shorter than the packet_in header."""
    packet_out_refused: int = 0
    """Packet-outs that were malformed, from a backup, or found the CPU port's queue full."""
    digests: int = 0
    digest_drops: int = 0
    """Samples of digests that no controller enabled, and lists that nobody could take."""
    digest_acks: int = 0
    idle_notifications: int = 0
    stream_overflows: int = 0
    """Streams ended because their controller did not read."""
    refused_callers: int = 0
    """Requests of parts whose certificate does not let them program switches."""
    internal_errors: int = 0
    """Requests that failed by a bug here; the log has the traceback."""


@dataclass(slots=True)
class Pipeline:
    """One pushed configuration, and the switch that holds its state."""

    switch: Engine
    schema: Schema
    store: EntityStore
    p4info: p4i.P4Info
    device_config: bytes
    cookie: p4r.ForwardingPipelineConfig.Cookie | None


@dataclass(slots=True)
class _Stream:
    """One controller's stream: what waits to be sent, and how it ends."""

    id: int
    peer: str
    outbox: asyncio.Queue[p4r.StreamMessageResponse] = field(default_factory=asyncio.Queue)
    arbitrated: bool = False
    overflow: asyncio.Event = field(default_factory=asyncio.Event)


class P4RuntimeService(p4r_grpc.P4RuntimeServicer):
    """The P4Runtime service of one device."""

    def __init__(
        self,
        *,
        device_id: int,
        cpu_port: int | None,
        drop_port: int,
        packet_out: Callable[[bytes], bool],
        strict: bool = False,
        seed: int = 0,
        now_us: Callable[[], int],
        new_switch: NewSwitch,
        adopt: Callable[[Engine], None] | None = None,
        pause: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`packet_out` injects a frame at the CPU port and returns whether it was taken;
        `now_us` is the clock that `process` is called with; `new_switch` makes an engine.
        `adopt` is told of the switch that runs from now on, and returns when no frame is in the
        one before any more. While `pause()` is entered, no frame is processed."""
        self.device_id = device_id
        self.strict = strict
        self.counters = ServiceCounters()
        self._cpu_port = cpu_port
        self._drop_port = drop_port
        self._seed = seed
        self._inject = packet_out
        self._now_us = now_us
        self._arbiter = Arbiter(device_id)
        self._streams: dict[int, _Stream] = {}
        self._next_stream = 1
        self._write_lock = asyncio.Lock()
        self._running: Pipeline | None = None
        self._saved: Pipeline | None = None
        self._timer_changed = asyncio.Event()
        self._make_switch = new_switch
        self._adopt = adopt
        self._pause = pause
        # What the switches before this one counted: the counts are the device's.
        self._earlier_stats: Counter[str] = Counter()
        self.switch = self._new_switch()

    # --- what the packet loop calls -----------------------------------------------------------

    def after_frame(self) -> None:
        """Collect the digests that the last frame raised."""
        digests = self.switch.take_digests()
        if digests:
            now_ns = self._now_us() * 1000
            for digest in digests:
                self._offer_digest(digest.name, digest.fields, now_ns)

    def packet_in(self, frame: bytes) -> bool:
        """A frame left through the CPU port: send it to the primary; False where that failed."""
        pipeline = self._running
        stream = self._primary_stream()
        if pipeline is None or stream is None:
            self.counters.packet_in_drops += 1
            return False
        packet = pipeline.schema.packet_in.parse(frame)
        if packet is None:
            self.counters.packet_in_short += 1
            return False
        if not self._offer(stream, p4r.StreamMessageResponse(packet=packet)):
            self.counters.packet_in_drops += 1
            return False
        self.counters.packets_in += 1
        return True

    # --- timers -------------------------------------------------------------------------------

    async def run_timers(self) -> None:
        """Send digest lists and idle notifications that are due; cancel the task to stop."""
        loop = asyncio.get_running_loop()
        while True:
            self._timer_changed.clear()
            deadline_us = self._poll_timers(self._now_us())
            timer = None
            if deadline_us is not None:
                wait_s = max(TIMER_STEP_S, (deadline_us - self._now_us()) / 1e6)
                timer = loop.call_later(wait_s, self._timer_changed.set)
            try:
                await self._timer_changed.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _poll_timers(self, now_us: int) -> int | None:
        """Do what is due; returns when something else will be."""
        pipeline = self._running
        if pipeline is None:
            return None
        deadlines: list[int] = []
        for digest_id, buffer in pipeline.store.digests.items():
            ready = buffer.poll(now_us * 1000)
            if ready is not None:
                self._send_digest(digest_id, ready)
            deadline_ns = buffer.next_deadline_ns()
            if deadline_ns is not None:
                deadlines.append(-(-deadline_ns // 1000))
        expired = pipeline.store.expired_entries(now_us)
        for start in range(0, len(expired), IDLE_ENTRIES):
            self._send_idle(expired[start : start + IDLE_ENTRIES])
        expiry_us = pipeline.store.next_expiry_us()
        if expiry_us is not None:
            deadlines.append(expiry_us)
        return min(deadlines, default=None)

    def _send_idle(self, expired: list[p4r.TableEntry]) -> None:
        message = p4r.StreamMessageResponse()
        message.idle_timeout_notification.table_entry.extend(expired)
        message.idle_timeout_notification.timestamp = time.time_ns()
        stream = self._primary_stream()
        if stream is not None and self._offer(stream, message):
            self.counters.idle_notifications += len(expired)

    # --- RPCs ---------------------------------------------------------------------------------

    async def Capabilities(  # noqa: N802 - gRPC names
        self, request: p4r.CapabilitiesRequest, context: Any
    ) -> p4r.CapabilitiesResponse:
        async with self._answering(context, "Capabilities"):
            return p4r.CapabilitiesResponse(p4runtime_api_version=API_VERSION)

    async def Write(  # noqa: N802
        self, request: p4r.WriteRequest, context: Any
    ) -> p4r.WriteResponse:
        async with self._answering(context, "Write"), self._write_lock:
            self._check_writer(request)
            pipeline = self._target()
            self.counters.writes += 1
            errors = await self._apply(pipeline, request)
        failed = sum(error is not None for error in errors)
        self.counters.updates += len(errors)
        self.counters.update_errors += failed
        self._timer_changed.set()
        if failed:
            status = batch_status(errors)
            context.set_trailing_metadata(((STATUS_DETAILS_KEY, status.SerializeToString()),))
            await context.abort(grpc.StatusCode.UNKNOWN, status.message)
        return p4r.WriteResponse()

    async def Read(  # noqa: N802
        self, request: p4r.ReadRequest, context: Any
    ) -> AsyncIterator[p4r.ReadResponse]:
        async with self._answering(context, "Read"):
            self._check_device(request.device_id)
            self._check_role(request.role, 0)
            pipeline = self._target()
            self.counters.reads += 1
            for chunk in _chunks(pipeline.store.read(request.entities)):
                yield chunk
                await asyncio.sleep(0)

    async def SetForwardingPipelineConfig(  # noqa: N802
        self, request: _SetRequest, context: Any
    ) -> p4r.SetForwardingPipelineConfigResponse:
        async with self._answering(context, "SetForwardingPipelineConfig"), self._write_lock:
            self._check_writer(request)
            await self._set_pipeline(request)
        self._timer_changed.set()
        return p4r.SetForwardingPipelineConfigResponse()

    async def GetForwardingPipelineConfig(  # noqa: N802
        self, request: _GetRequest, context: Any
    ) -> p4r.GetForwardingPipelineConfigResponse:
        async with self._answering(context, "GetForwardingPipelineConfig"):
            self._check_device(request.device_id)
            return p4r.GetForwardingPipelineConfigResponse(
                config=self._get_pipeline(request.response_type)
            )
        raise AssertionError("an RPC ends in an answer or an error")

    async def StreamChannel(  # type: ignore[override]  # noqa: N802 - grpc.aio takes both forms
        self, request_iterator: AsyncIterator[p4r.StreamMessageRequest], context: Any
    ) -> None:
        await self._admit(context)
        stream = _Stream(self._next_stream, str(context.peer()))
        self._next_stream += 1
        self._streams[stream.id] = stream
        tasks = [
            asyncio.create_task(self._stream_reader(stream, request_iterator)),
            asyncio.create_task(self._stream_writer(stream, context)),
            asyncio.create_task(stream.overflow.wait()),
        ]
        reader, _, overflow = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if overflow.done():
                self.counters.stream_overflows += 1
                await _abort(context, resource_exhausted("the controller does not read"))
            if reader.done() and not reader.cancelled():
                error = reader.exception()
                if isinstance(error, P4RuntimeError):
                    await _abort(context, error)
        finally:
            # First what must not be lost: gRPC may cancel this task at any await.
            del self._streams[stream.id]
            self._disconnect(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- pre-loading, statistics --------------------------------------------------------------

    def load(self, p4info: p4i.P4Info, device_config: bytes) -> None:
        """Commit a pipeline without a controller (`--program`); P4RuntimeError says why not.

        With an empty `p4info` it only runs: to P4Runtime there is no pipeline yet, as with BMv2.
        """
        config = p4r.ForwardingPipelineConfig(p4info=p4info, p4_device_config=device_config)
        self._commit(self._build(config))

    @property
    def has_pipeline(self) -> bool:
        return self._running is not None

    def switch_stats(self) -> dict[str, int]:
        """The data plane's counters."""
        return {
            name: count + self._earlier_stats[name]
            for name, count in self.switch.stats.as_dict().items()
        }

    @property
    def controllers(self) -> int:
        """Controllers that have said an election id (or that they have none)."""
        return self._arbiter.streams

    # --- checks every request begins with -----------------------------------------------------

    def _check_device(self, device_id: int) -> None:
        if device_id != self.device_id:
            raise not_found(f"device {device_id} is not here; this is {self.device_id}")

    def _check_role(self, role: str, role_id: int) -> None:
        if role or role_id:
            raise unimplemented("roles other than the default are not supported")

    def _check_writer(self, request: p4r.WriteRequest | _SetRequest) -> None:
        self._check_device(request.device_id)
        self._check_role(request.role, request.role_id)
        election_id = request.election_id if request.HasField("election_id") else None
        if not self._arbiter.is_primary(election_id):
            raise permission_denied("Not primary")

    def _target(self) -> Pipeline:
        """The pipeline that reads and writes refer to: the last one pushed, saved or committed."""
        pipeline = self._saved or self._running
        if pipeline is None or not pipeline.p4info.ByteSize():
            # The wording is what clients look for (finsy: "no .* forwarding pipeline config").
            raise failed_precondition("No forwarding pipeline config set for this device")
        return pipeline

    # --- writes -------------------------------------------------------------------------------

    async def _apply(
        self, pipeline: Pipeline, request: p4r.WriteRequest
    ) -> list[P4RuntimeError | None]:
        if request.atomicity == p4r.WriteRequest.CONTINUE_ON_ERROR:
            errors: list[P4RuntimeError | None] = []
            for index, update in enumerate(request.updates):
                if index % YIELD_EVERY == YIELD_EVERY - 1:
                    await asyncio.sleep(0)
                    try:
                        self._check_writer(request)  # who is primary by now writes alone
                    except P4RuntimeError as error:
                        return errors + [error] * (len(request.updates) - index)
                errors.append(self._apply_one(pipeline, update))
            return errors
        if self.strict:
            raise unimplemented("atomic write modes are not implemented (strict)")
        if request.atomicity not in (
            p4r.WriteRequest.ROLLBACK_ON_ERROR,
            p4r.WriteRequest.DATAPLANE_ATOMIC,
        ):
            raise invalid_argument(f"atomicity {request.atomicity}")
        # No await from here on, and the packet loop pauses if it has a thread of its own: no frame
        # is processed before the batch is complete or undone.
        with self._pause():
            return self._apply_all_or_none(pipeline, request)

    def _apply_all_or_none(
        self, pipeline: Pipeline, request: p4r.WriteRequest
    ) -> list[P4RuntimeError | None]:
        done: list[p4r.Update] = []
        for index, update in enumerate(request.updates):
            inverse = pipeline.store.inverse(update)
            error = self._apply_one(pipeline, update)
            if error is not None:
                for step in reversed(done):
                    pipeline.store.write(step)
                rolled_back = aborted(f"rolled back because update #{index} failed")
                return [
                    error if position == index else rolled_back
                    for position in range(len(request.updates))
                ]
            done += inverse
        return [None] * len(request.updates)

    def _apply_one(self, pipeline: Pipeline, update: p4r.Update) -> P4RuntimeError | None:
        try:
            pipeline.store.write(update)
        except P4RuntimeError as error:
            return error
        except Exception:
            self.counters.internal_errors += 1
            log.exception("update failed")
            return _internal_error()
        return None

    # --- pipelines ----------------------------------------------------------------------------

    def _new_switch(self) -> Engine:
        return self._make_switch(drop_port=self._drop_port, seed=self._seed)

    def _build(self, config: _Config) -> Pipeline:
        """A pipeline with no entries but its own, not yet running."""
        if not config.p4_device_config:
            raise invalid_argument("p4_device_config is empty; it should hold BMv2 JSON")
        try:
            program = load_program(config.p4_device_config)
        except ir.UnsupportedConstruct as error:
            raise unimplemented(str(error)) from error
        except ir.ProgramError as error:
            raise invalid_argument(f"p4_device_config: {error}") from error
        schema = build_schema(config.p4info, program)
        switch = self._new_switch()
        switch.load(program)
        return Pipeline(
            switch=switch,
            schema=schema,
            store=EntityStore(schema, switch, strict=self.strict, now_us=self._now_us),
            p4info=copied(config.p4info),
            device_config=config.p4_device_config,
            cookie=copied(config.cookie) if config.HasField("cookie") else None,
        )

    async def _set_pipeline(self, request: _SetRequest) -> None:
        action = request.action
        if action == _SetRequest.COMMIT:
            if request.HasField("config"):
                raise invalid_argument("COMMIT takes no config")
            if self._saved is None:
                raise not_found("no config was saved")
            self._commit(self._saved)
            return
        if action not in (
            _SetRequest.VERIFY,
            _SetRequest.VERIFY_AND_SAVE,
            _SetRequest.VERIFY_AND_COMMIT,
            _SetRequest.RECONCILE_AND_COMMIT,
        ):
            raise invalid_argument(f"action {action}")
        if not request.HasField("config"):
            raise invalid_argument("config is missing")
        pipeline = await asyncio.to_thread(self._build, request.config)
        self._check_writer(request)  # that took time, in which another may have become primary
        if action == _SetRequest.VERIFY_AND_SAVE:
            self._saved = pipeline
        elif action == _SetRequest.VERIFY_AND_COMMIT:
            self._commit(pipeline)
        elif action == _SetRequest.RECONCILE_AND_COMMIT:
            if self._running is not None:
                self._reconcile(self._running, pipeline)
            self._commit(pipeline)

    def _reconcile(self, old: Pipeline, new: Pipeline) -> None:
        """Carry the old pipeline's state over, or say which part of it does not fit."""
        for update in old.store.replay():
            try:
                new.store.write(update)
            except P4RuntimeError as error:
                raise invalid_argument(f"state cannot be preserved: {error.message}") from error
        new.store.adopt_registers(old.store)

    def _commit(self, pipeline: Pipeline) -> None:
        if self._adopt is not None:
            self._adopt(pipeline.switch)
        self.after_frame()  # what the old program had still to say
        self._earlier_stats.update(self.switch.stats.as_dict())
        self._running = pipeline
        self._saved = None
        self.switch = pipeline.switch
        self.counters.pushes += 1
        log.info(
            "pipeline committed",
            extra={"tables": len(pipeline.schema.tables), "bytes": len(pipeline.device_config)},
        )

    def _get_pipeline(self, response_type: int) -> _Config:
        pipeline = self._target()
        config = p4r.ForwardingPipelineConfig()
        if response_type not in _GetRequest.ResponseType.values():
            raise invalid_argument(f"response_type {response_type}")
        if response_type in (_GetRequest.ALL, _GetRequest.P4INFO_AND_COOKIE):
            config.p4info.CopyFrom(pipeline.p4info)
        if response_type in (_GetRequest.ALL, _GetRequest.DEVICE_CONFIG_AND_COOKIE):
            config.p4_device_config = pipeline.device_config
        if pipeline.cookie is not None:
            config.cookie.CopyFrom(pipeline.cookie)
        return config

    # --- streams ------------------------------------------------------------------------------

    async def _stream_reader(
        self, stream: _Stream, requests: AsyncIterator[p4r.StreamMessageRequest]
    ) -> None:
        async for request in requests:
            which = request.WhichOneof("update")
            if which == "arbitration":
                self._arbitrate(stream, request.arbitration)
                if not stream.arbitrated:
                    stream.arbitrated = True
                    log.info("controller connected", extra={"peer": stream.peer})
            elif which == "packet":
                self._packet_out(stream, request.packet)
            elif which == "digest_ack":
                self._digest_ack(stream, request.digest_ack)
            else:
                error = p4r.StreamError(
                    canonical_code=rpc_code.UNIMPLEMENTED,
                    message=f"stream message {which or 'without content'}",
                )
                error.other.SetInParent()
                self._offer(stream, p4r.StreamMessageResponse(error=error))

    async def _stream_writer(self, stream: _Stream, context: Any) -> None:
        while True:
            await context.write(await stream.outbox.get())

    def _arbitrate(self, stream: _Stream, request: p4r.MasterArbitrationUpdate) -> None:
        before = self._arbiter.primary
        self._notify(self._arbiter.update(stream.id, request), before)

    def _disconnect(self, stream: _Stream) -> None:
        before = self._arbiter.primary
        self._notify(self._arbiter.disconnect(stream.id), before)
        if stream.arbitrated:
            log.info("controller gone", extra={"peer": stream.peer})

    def _notify(self, notifications: list[Notification], before: int | None) -> None:
        """Tell the streams who is primary; `before`: who it was."""
        if self._arbiter.primary != before and self._running is not None:
            # The new primary must hear again what the old one may not have acted on.
            for buffer in self._running.store.digests.values():
                buffer.forget_unacknowledged()
        for notification in notifications:
            stream = self._streams.get(notification.stream)
            if stream is None:
                continue
            if stream.outbox.qsize() >= STREAM_QUEUE_LIMIT:
                stream.overflow.set()
            else:
                stream.outbox.put_nowait(p4r.StreamMessageResponse(arbitration=notification.update))

    def _primary_stream(self) -> _Stream | None:
        primary = self._arbiter.primary
        return None if primary is None else self._streams.get(primary)

    def _offer(self, stream: _Stream, message: p4r.StreamMessageResponse) -> bool:
        """Queue a message that may be lost; False where the queue is full."""
        if stream.outbox.qsize() >= STREAM_QUEUE:
            return False
        stream.outbox.put_nowait(message)
        return True

    # --- packets and digests ------------------------------------------------------------------

    def _packet_out(self, stream: _Stream, packet: p4r.PacketOut) -> None:
        try:
            if self._arbiter.primary != stream.id:
                raise permission_denied("packet-out from a controller that is not primary")
            if self._running is None:
                raise failed_precondition("packet-out without a pipeline")
            if self._cpu_port is None:
                raise failed_precondition("packet-out on a switch without a CPU port")
            if not self._inject(self._running.schema.packet_out.build(packet)):
                raise resource_exhausted("the CPU port refused the frame")
        except P4RuntimeError as error:
            self.counters.packet_out_refused += 1
            message = p4r.StreamError(canonical_code=error.code, message=error.message)
            message.packet_out.packet_out.metadata.extend(packet.metadata)
            self._offer(stream, p4r.StreamMessageResponse(error=message))
        else:
            self.counters.packets_out += 1

    def _offer_digest(self, name: str, sample: tuple[int, ...], now_ns: int) -> None:
        pipeline = self._running
        digest_id = None if pipeline is None else pipeline.store.digest_ids.get(name)
        buffer = None
        if pipeline is not None and digest_id is not None:
            buffer = pipeline.store.digests.get(digest_id)
        if buffer is None or digest_id is None:
            self.counters.digest_drops += 1
            return
        was_empty = buffer.buffered == 0
        ready = buffer.offer(sample, now_ns)
        if ready is not None:
            self._send_digest(digest_id, ready)
        elif was_empty:
            self._timer_changed.set()

    def _send_digest(self, digest_id: int, ready: SampleList) -> None:
        assert self._running is not None
        stream = self._primary_stream()
        buffer = self._running.store.digests[digest_id]
        message = p4r.StreamMessageResponse()
        message.digest.digest_id = digest_id
        message.digest.list_id = ready.list_id
        message.digest.timestamp = time.time_ns()
        encode = self._running.schema.digests[digest_id].data_type.encode
        message.digest.data.extend(encode(sample) for sample in ready.samples)
        if stream is None or not self._offer(stream, message):
            # Nobody has seen it, so it must not keep its samples from being reported again.
            self.counters.digest_drops += len(ready.samples)
            buffer.acknowledge(ready.list_id)
        else:
            self.counters.digests += len(ready.samples)

    def _digest_ack(self, stream: _Stream, ack: p4r.DigestListAck) -> None:
        if self._arbiter.primary != stream.id or self._running is None:
            return
        if ack.digest_id not in self._running.schema.digests:
            error = p4r.StreamError(
                canonical_code=rpc_code.INVALID_ARGUMENT, message=f"digest {ack.digest_id}"
            )
            error.digest_list_ack.digest_list_ack.CopyFrom(ack)
            self._offer(stream, p4r.StreamMessageResponse(error=error))
            return
        buffer = self._running.store.digests.get(ack.digest_id)
        if buffer is not None and buffer.acknowledge(ack.list_id):
            self.counters.digest_acks += 1

    async def _admit(self, context: Any) -> None:
        """End the RPC of a caller whose certificate is not for this."""
        try:
            admit(context)
        except P4RuntimeError as error:
            self.counters.refused_callers += 1
            await _abort(context, error)

    @asynccontextmanager
    async def _answering(self, context: Any, what: str) -> AsyncIterator[None]:
        """An RPC of a caller who may make it; what goes wrong in it ends it with an error."""
        await self._admit(context)
        try:
            yield
        except P4RuntimeError as error:
            await _abort(context, error)
        except Exception:
            self.counters.internal_errors += 1
            log.exception("%s failed", what)
            await _abort(context, _internal_error())


def _internal_error() -> P4RuntimeError:
    return P4RuntimeError(rpc_code.INTERNAL, "internal error; see the switch's log")


_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


async def _abort(context: Any, error: P4RuntimeError) -> NoReturn:
    """End the RPC with an error that concerns all of it."""
    await context.abort(_STATUS_CODES[error.code], error.message)
    raise AssertionError("abort returned")


def _chunks(entities: Iterator[p4r.Entity]) -> Iterator[p4r.ReadResponse]:
    """Entities in messages of a size that any client accepts; at least one message."""
    response = p4r.ReadResponse()
    size_bytes = 0
    first = True
    for entity in entities:
        entity_bytes = entity.ByteSize()
        if response.entities and (
            size_bytes + entity_bytes > READ_CHUNK_BYTES
            or len(response.entities) >= READ_CHUNK_ENTITIES
        ):
            yield response
            first = False
            response, size_bytes = p4r.ReadResponse(), 0
        response.entities.append(entity)
        size_bytes += entity_bytes
    if response.entities or first:
        yield response
