"""Requests that no good client sends: random bytes, damaged messages, random messages.

Oracle: the server still answers, counts no internal error, and a refused or undone update leaves
the readable state as it was. Cannot see: whether a refusal has the best code. A failure prints the
seed that repeats it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from conftest import BLOB_PATH, DEVICE_ID, RawStream, Target, load_p4info
from finsy.proto import U128, p4r, p4r_grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from kvcast.switchsim.loader import load
from kvcast.switchsim.p4runtime.entities import EntityStore
from kvcast.switchsim.p4runtime.errors import P4RuntimeError
from kvcast.switchsim.p4runtime.schema import build_schema
from kvcast.switchsim.reference.switch import Switch

P4INFO = load_p4info()
BLOB = BLOB_PATH.read_bytes()
PROGRAM = load(BLOB)
SERVICE = "/p4.v1.P4Runtime/"

on_one_loop = pytest.mark.asyncio(loop_scope="session")

IDS = {
    "table_id": [t.preamble.id for t in P4INFO.tables],
    "action_id": [a.preamble.id for a in P4INFO.actions],
    "action_profile_id": [p.preamble.id for p in P4INFO.action_profiles],
    "counter_id": [c.preamble.id for c in P4INFO.counters],
    "meter_id": [m.preamble.id for m in P4INFO.meters],
    "register_id": [r.preamble.id for r in P4INFO.registers],
    "digest_id": [d.preamble.id for d in P4INFO.digests],
}
WIDTHS = {(t.preamble.id, f.id): f.bitwidth for t in P4INFO.tables for f in t.match_fields}


class Generator:
    """Random messages of any type, with a weakness for what is almost right."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def fill(self, message: Message, depth: int = 0) -> Message:
        chance = 0.75 if depth < 5 else 0.3
        for field in message.DESCRIPTOR.fields:
            if field.containing_oneof is not None or self.random.random() > chance:
                continue
            self._set(message, field, depth)
        for oneof in message.DESCRIPTOR.oneofs:
            if self.random.random() < 0.9:
                self._set(message, self.random.choice(list(oneof.fields)), depth)
        return message

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.full_name.endswith("Any"):
            return
        if field.is_repeated:
            if field.message_type is not None:
                for _ in range(self.random.choice([1, 1, 2, 3])):
                    self.fill(getattr(message, field.name).add(), depth + 1)
            return
        if field.message_type is not None:
            self.fill(getattr(message, field.name), depth + 1)
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        kinds = FieldDescriptor
        if field.cpp_type == kinds.CPPTYPE_STRING:
            if field.type == kinds.TYPE_STRING:
                return ""
            size = self.random.choice([0, 1, 1, 1, 2, 4, 6, 6, 40])
            return bytes(self.random.choice([0, 1, 2, 5, 255]) for _ in range(size))
        if field.cpp_type == kinds.CPPTYPE_BOOL:
            return self.random.random() < 0.3
        if field.enum_type is not None:
            return self.random.choice([0, 1, 2, 3, 7])
        known = IDS.get(field.name)
        if known is not None and self.random.random() < 0.9:
            return self.random.choice([0, *known])
        signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
        bits = 64 if field.cpp_type in (kinds.CPPTYPE_INT64, kinds.CPPTYPE_UINT64) else 32
        extremes = [(1 << (bits - 1)) - 1, -(1 << (bits - 1)), -1] if signed else [(1 << bits) - 1]
        return self.random.choice([0, 1, 1, 1, 2, 3, 8, 16, 255, *extremes])

    def update(self) -> p4r.Update:
        """One update: wild, or one that might well be accepted."""
        update = p4r.Update()
        if self.random.random() < 0.3:
            self.fill(update)
            update.type = self.random.choice([1, 1, 2, 2, 3, 3, 0, 9])  # type: ignore[assignment]
            return update
        pick = self.random.choice
        entity = update.entity
        update.type = p4r.Update.MODIFY
        small = pick([1, 2, 3])
        match pick(["table"] * 6 + ["member", "group", "cell", "meter", "word", "copy", "digest"]):
            case "table":
                self._plausible(entity.table_entry)
                update.type = pick([1, 1, 1, 2, 3])  # type: ignore[assignment]
                if entity.table_entry.is_default_action:
                    update.type = p4r.Update.MODIFY
            case "member":
                member = entity.action_profile_member
                member.action_profile_id = pick(IDS["action_profile_id"])
                member.member_id = small
                member.action.action_id = next(
                    a.preamble.id for a in P4INFO.actions if a.preamble.alias == "set_select"
                )
                member.action.params.add(param_id=1, value=bytes([small]))
                update.type = pick([1, 1, 2, 3])  # type: ignore[assignment]
            case "group":
                group = entity.action_profile_group
                group.action_profile_id = pick(IDS["action_profile_id"])
                group.group_id = small
                group.members.add(member_id=pick([1, 2, 3]), weight=pick([1, 2]))
                update.type = pick([1, 1, 2, 3])  # type: ignore[assignment]
            case "cell":
                entity.counter_entry.counter_id = pick(IDS["counter_id"])
                entity.counter_entry.index.index = small
                entity.counter_entry.data.packet_count = pick([0, 5, 1 << 40])
            case "meter":
                entity.meter_entry.meter_id = pick(IDS["meter_id"])
                entity.meter_entry.index.index = small
                entity.meter_entry.config.cir = 1
                entity.meter_entry.config.pir = small
            case "word":
                entity.register_entry.register_id = pick(IDS["register_id"])
                entity.register_entry.index.index = small
                entity.register_entry.data.bitstring = bytes([small])
            case "copy":
                replication = entity.packet_replication_engine_entry
                update.type = pick([1, 1, 2, 3])  # type: ignore[assignment]
                if pick([True, False]):
                    replication.multicast_group_entry.multicast_group_id = small
                    replication.multicast_group_entry.replicas.add(egress_port=small)
                else:
                    replication.clone_session_entry.session_id = small
                    replication.clone_session_entry.replicas.add(port=bytes([small]))
            case _:
                entity.digest_entry.digest_id = pick(IDS["digest_id"])
                entity.digest_entry.config.max_list_size = small
                update.type = pick([1, 2, 3])  # type: ignore[assignment]
        return update

    def _plausible(self, entry: p4r.TableEntry) -> None:
        """Most random entries fail at once; let this one get further."""
        table = self.random.choice(list(P4INFO.tables))
        entry.Clear()
        entry.table_id = table.preamble.id
        if self.random.random() < 0.1:
            entry.is_default_action = True
        else:
            for field in table.match_fields:
                match = entry.match.add(field_id=field.id)
                value = bytes([self.random.choice([1, 2, 3])])
                name = field.MatchType.Name(field.match_type).lower()
                target = getattr(match, name)
                match name:
                    case "exact" | "optional":
                        target.value = value
                    case "lpm":
                        target.value, target.prefix_len = value, field.bitwidth
                    case "ternary":
                        target.value = target.mask = value
                    case "range":
                        target.low, target.high = value, b"\x09"
            if any(f.match_type in (4, 5, 6) for f in table.match_fields):
                entry.priority = self.random.choice([1, 2])
        chosen_id = self.random.choice(list(table.action_refs)).id
        action = next(a for a in P4INFO.actions if a.preamble.id == chosen_id)
        if table.implementation_id and self.random.random() < 0.5:
            which = self.random.choice(["action_profile_member_id", "action_profile_group_id"])
            setattr(entry.action, which, self.random.choice([1, 2, 3]))
            return
        if table.implementation_id:
            one = entry.action.action_profile_action_set.action_profile_actions.add(
                weight=self.random.choice([1, 2, 0])
            )
            chosen = one.action
        else:
            chosen = entry.action.action
        chosen.action_id = action.preamble.id
        for param in action.params:
            chosen.params.add(param_id=param.id, value=b"\x03")
        if self.random.random() < 0.3:
            entry.counter_data.packet_count = 4
        if self.random.random() < 0.3:
            entry.meter_config.CopyFrom(p4r.MeterConfig(cir=1, cburst=1, pir=2, pburst=2))
        if self.random.random() < 0.2:
            entry.idle_timeout_ns = 10**9
        if self.random.random() < 0.3:
            entry.metadata = b"m"


def new_store(*, strict: bool) -> EntityStore:
    switch = Switch()
    switch.load(PROGRAM)
    return EntityStore(build_schema(P4INFO, PROGRAM), switch, strict=strict, now_us=lambda: 0)


def readable(store: EntityStore) -> list[bytes]:
    """All state that can be read, in an order that does not depend on when it was written."""
    table = p4r.TableEntry()
    table.counter_data.SetInParent()
    table.meter_config.SetInParent()
    wanted = [
        p4r.Entity(table_entry=table),
        p4r.Entity(table_entry=p4r.TableEntry(is_default_action=True)),
        p4r.Entity(action_profile_member={}),
        p4r.Entity(action_profile_group={}),
        p4r.Entity(counter_entry={}),
        p4r.Entity(meter_entry={}),
        p4r.Entity(register_entry={}),
        p4r.Entity(digest_entry={}),
        p4r.Entity(packet_replication_engine_entry={"multicast_group_entry": {}}),
        p4r.Entity(packet_replication_engine_entry={"clone_session_entry": {}}),
    ]
    return sorted(e.SerializeToString(deterministic=True) for e in store.read(wanted))


@pytest.mark.parametrize("seed", range(6))
def test_random_updates_are_refused_or_undone_without_trace(seed: int) -> None:
    """Apply a random update; undo every other one; refused and undone updates leave no trace."""
    generator = Generator(seed)
    store = new_store(strict=False)
    before = readable(store)
    accepted = 0
    for step in range(250):
        update = generator.update()
        inverse = store.inverse(update)
        try:
            store.write(update)
        except P4RuntimeError:
            assert readable(store) == before, (seed, step, update)
            continue
        accepted += 1
        if generator.random.random() < 0.6:
            for step in inverse:
                store.write(step)
            assert readable(store) == before, (seed, step, update)
        else:
            before = readable(store)
    assert accepted > 50


def test_an_entry_that_matches_everything_is_put_back_and_no_other() -> None:
    """Its key is empty, which in a read means all entries."""
    route = next(t for t in P4INFO.tables if t.preamble.alias == "route")
    action = next(a for a in P4INFO.actions if a.preamble.alias == "set_lpm")
    anything = p4r.TableEntry(table_id=route.preamble.id)
    anything.action.action.action_id = action.preamble.id
    anything.action.action.params.add(param_id=1, value=b"\x03")
    other = p4r.TableEntry()
    other.CopyFrom(anything)
    other.match.add(field_id=1).lpm.CopyFrom(
        p4r.FieldMatch.LPM(value=b"\x01", prefix_len=WIDTHS[route.preamble.id, 1])
    )
    entities = [p4r.Entity(table_entry=entry) for entry in (anything, other)]
    store = new_store(strict=False)
    for entity in entities:
        store.write(p4r.Update(type=p4r.Update.INSERT, entity=entity))
    before = readable(store)
    delete = p4r.Update(type=p4r.Update.DELETE, entity=entities[0])
    (inverse,) = store.inverse(delete)
    store.write(delete)
    assert len(readable(store)) == len(before) - 1
    store.write(inverse)
    assert readable(store) == before


@pytest.mark.parametrize("seed", range(3))
def test_whatever_was_accepted_can_be_replayed(seed: int) -> None:
    """A fresh pipeline that is told `replay` reads the same (registers are adopted)."""
    generator = Generator(100 + seed)
    store = new_store(strict=False)
    for _ in range(400):
        try:
            store.write(generator.update())
        except P4RuntimeError:
            pass
    copy = new_store(strict=False)
    for update in store.replay():
        copy.write(update)
    copy.adopt_registers(store)
    assert readable(copy) == readable(store)


@pytest.mark.parametrize("seed", range(3))
def test_random_reads_are_answered_or_refused(seed: int) -> None:
    generator = Generator(200 + seed)
    store = new_store(strict=False)
    for _ in range(200):
        try:
            store.write(generator.update())
        except P4RuntimeError:
            pass
    for _ in range(300):
        entity = p4r.Entity()
        generator.fill(entity)
        try:
            for answer in store.read([entity]):
                assert answer.WhichOneof("entity") == entity.WhichOneof("entity")
        except P4RuntimeError:
            pass


@pytest.mark.parametrize("seed", range(3))
def test_frames_survive_any_configuration(seed: int) -> None:
    """Whatever the control plane was told, the data plane processes frames."""
    generator = Generator(300 + seed)
    switch = Switch()
    switch.load(PROGRAM)
    store = EntityStore(build_schema(P4INFO, PROGRAM), switch, strict=False, now_us=lambda: 0)
    probe = bytes(5) + b"\x01" + bytes(6) + b"\x88\xb5"
    for step in range(300):
        try:
            store.write(generator.update())
        except P4RuntimeError:
            pass
        frame = probe + bytes(generator.random.choice([0, 1, 2, 3]) for _ in range(40))
        switch.process(generator.random.choice([1, 255]), frame[: 14 + step % 41], step)
        switch.take_digests()


# --- over the wire ------------------------------------------------------------------------------


def damaged(data: bytes, generator: random.Random) -> bytes:
    """A copy with a few bytes changed, cut, or repeated."""
    mutant = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 5])):
        at = generator.randrange(len(mutant) + 1)
        match generator.randrange(4):
            case 0 if at < len(mutant):
                mutant[at] = generator.randrange(256)
            case 1:
                del mutant[at : at + generator.randrange(1, 9)]
            case 2:
                mutant[at:at] = generator.randbytes(generator.randrange(1, 9))
            case _:
                mutant[at:at] = mutant[at : at + generator.randrange(1, 40)]
    return bytes(mutant)


def requests(generator: Generator) -> Iterator[tuple[str, bytes]]:
    """(method, bytes) of requests that are random, damaged, or well-formed nonsense."""
    election_id = U128.encode(10)
    write = p4r.WriteRequest(device_id=DEVICE_ID, election_id=election_id)
    read = p4r.ReadRequest(device_id=DEVICE_ID)
    push = p4r.SetForwardingPipelineConfigRequest(
        device_id=DEVICE_ID, election_id=election_id, action=1
    )
    push.config.p4info.CopyFrom(P4INFO)
    push.config.p4_device_config = BLOB
    pushed = push.SerializeToString()
    kinds: list[Callable[[], tuple[str, bytes]]] = [
        lambda: ("Write", write.SerializeToString()),
        lambda: ("Read", read.SerializeToString()),
        lambda: ("Write", damaged(write.SerializeToString(), generator.random)),
        lambda: ("Read", damaged(read.SerializeToString(), generator.random)),
        lambda: ("Write", generator.random.randbytes(generator.random.randrange(200))),
        lambda: ("Capabilities", generator.random.randbytes(20)),
        lambda: ("GetForwardingPipelineConfig", generator.random.randbytes(10)),
    ]
    for step in range(200):
        del write.updates[:], read.entities[:]
        write.updates.extend(generator.update() for _ in range(generator.random.randrange(6)))
        write.atomicity = generator.random.choice([0, 0, 1, 2, 9])  # type: ignore[assignment]
        read.entities.extend(generator.update().entity for _ in range(2))
        yield generator.random.choice(kinds)()
        if step % 25 == 0:
            yield "SetForwardingPipelineConfig", damaged(pushed, generator.random)


@pytest.mark.parametrize("seed", [1, 2])
@on_one_loop
async def test_the_server_outlives_nonsense(switchsim: Target, seed: int) -> None:
    generator = Generator(seed)
    async with grpc.aio.insecure_channel(switchsim.address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        stream = RawStream(stub)
        await stream.say(10)
        await stream.status()
        push = p4r.SetForwardingPipelineConfigRequest(
            device_id=DEVICE_ID, election_id=U128.encode(10), action=3
        )
        push.config.p4info.CopyFrom(P4INFO)
        push.config.p4_device_config = BLOB
        await stub.SetForwardingPipelineConfig(push)
        for method, data in requests(generator):
            call: Any
            try:
                if method == "Read":
                    call = channel.unary_stream(SERVICE + method)(data, timeout=20)
                    async for _ in call:
                        pass
                else:
                    await channel.unary_unary(SERVICE + method)(data, timeout=20)
            except grpc.aio.AioRpcError as error:
                # INTERNAL is gRPC's word for bytes that are no message; ours never say it.
                refused = error
                assert refused.code() not in (
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    grpc.StatusCode.UNAVAILABLE,
                ), (seed, method, data)
                assert "see the switch's log" not in (refused.details() or "")
        await stub.SetForwardingPipelineConfig(push)
        request = p4r.ReadRequest(device_id=DEVICE_ID, entities=[{"table_entry": {}}])
        assert [e async for r in stub.Read(request) for e in r.entities]
        await stream.close()


@pytest.mark.parametrize("seed", [1, 2])
@on_one_loop
async def test_streams_of_nonsense_end_or_are_ignored(switchsim: Target, seed: int) -> None:
    generator = Generator(seed)
    async with grpc.aio.insecure_channel(switchsim.address) as channel:
        for _ in range(20):
            call: Any = channel.stream_stream(SERVICE + "StreamChannel")()
            try:
                for _ in range(generator.random.randrange(1, 8)):
                    message = p4r.StreamMessageRequest()
                    generator.fill(message)
                    data = message.SerializeToString()
                    if generator.random.random() < 0.4:
                        data = damaged(data, generator.random)
                    await call.write(data)
                await asyncio.sleep(0.01)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            call.cancel()
        stub = p4r_grpc.P4RuntimeStub(channel)
        stream = RawStream(stub)
        await stream.say((1 << 128) - 2)
        code, _ = await stream.status()
        assert code in (0, 6)
        await stream.close()


@pytest.mark.parametrize("kind", ["table_entry", "direct_counter_entry", "direct_meter_entry"])
def test_what_is_deleted_while_it_is_read_is_left_out(kind: str) -> None:
    store = new_store(strict=False)
    direct = P4INFO.direct_meters[0].direct_table_id  # it has counters, too
    [table] = [each for each in P4INFO.tables if each.preamble.id == direct]
    [action] = [each for each in P4INFO.actions if each.preamble.id == table.action_refs[0].id]
    entries = []
    for number in (1, 2, 3):
        entry = p4r.TableEntry(table_id=direct, priority=number)
        for field in table.match_fields:
            if field.match_type == field.EXACT:
                entry.match.add(field_id=field.id).exact.value = bytes([number])
        entry.action.action.action_id = action.preamble.id
        for param in action.params:
            entry.action.action.params.add(param_id=param.id, value=b"\x01")
        store.write(p4r.Update(type=p4r.Update.INSERT, entity=p4r.Entity(table_entry=entry)))
        entries.append(entry)
    wanted = p4r.Entity()
    if kind == "table_entry":
        wanted.table_entry.table_id = direct
    else:
        getattr(wanted, kind).table_entry.table_id = direct
    reading = store.read([wanted])
    next(reading)
    store.write(p4r.Update(type=p4r.Update.DELETE, entity=p4r.Entity(table_entry=entries[1])))
    assert len(list(reading)) == 1
