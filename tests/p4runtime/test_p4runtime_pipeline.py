"""Pipelines, arbitration, refusals and malformed requests, in raw messages.

Oracle: the specification's status codes; BMv2 where the same holds there. Cannot see: what a
client library makes of the errors (test_p4runtime_service does).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from conftest import BLOB_PATH, DEVICE_ID, RawStream, Target, load_p4info
from finsy.proto import U128, p4i, p4r, p4r_grpc, rpc_code, rpc_status
from google.protobuf import text_format

on_one_loop = pytest.mark.asyncio(loop_scope="session")

Set = p4r.SetForwardingPipelineConfigRequest
Get = p4r.GetForwardingPipelineConfigRequest
ELECTION_ID = 10
P4INFO = load_p4info()
BLOB = BLOB_PATH.read_bytes()


def id_of(name: str) -> int:
    """The P4Info id of anything, by its alias."""
    for group in (
        P4INFO.tables,
        P4INFO.actions,
        P4INFO.action_profiles,
        P4INFO.counters,
        P4INFO.direct_counters,
        P4INFO.meters,
        P4INFO.direct_meters,
        P4INFO.registers,
        P4INFO.digests,
    ):
        for item in group:
            if item.preamble.alias == name:
                return item.preamble.id
    raise KeyError(name)


@dataclass
class Peer:
    """A primary that speaks raw P4Runtime."""

    target: Target
    stub: p4r_grpc.P4RuntimeStub
    stream: RawStream

    async def push(
        self,
        action: Set.Action.ValueType = Set.VERIFY_AND_COMMIT,
        *,
        p4info: p4i.P4Info = P4INFO,
        blob: bytes = BLOB,
        cookie: int | None = None,
    ) -> None:
        request = Set(device_id=DEVICE_ID, action=action)
        request.election_id.CopyFrom(U128.encode(ELECTION_ID))
        if action != Set.COMMIT:
            request.config.p4info.CopyFrom(p4info)
            request.config.p4_device_config = blob
            if cookie is not None:
                request.config.cookie.cookie = cookie
        await self.stub.SetForwardingPipelineConfig(request)

    async def write(
        self,
        *updates: p4r.Update,
        atomicity: p4r.WriteRequest.Atomicity.ValueType = p4r.WriteRequest.CONTINUE_ON_ERROR,
        election_id: int | None = ELECTION_ID,
        device_id: int = DEVICE_ID,
    ) -> None:
        request = p4r.WriteRequest(device_id=device_id, updates=updates, atomicity=atomicity)
        if election_id is not None:
            request.election_id.CopyFrom(U128.encode(election_id))
        await self.stub.Write(request)

    async def codes(self, *updates: p4r.Update, **options: int) -> list[int]:
        """The code of each update of a batch."""
        try:
            await self.write(*updates, **options)  # type: ignore[arg-type]
        except grpc.aio.AioRpcError as error:
            refusal = error
        else:
            return [rpc_code.OK] * len(updates)
        assert refusal.code() == grpc.StatusCode.UNKNOWN, refusal
        details = dict(refusal.trailing_metadata() or ())["grpc-status-details-bin"]
        status = rpc_status.Status.FromString(details)  # type: ignore[arg-type]
        codes = []
        for detail in status.details:
            one = p4r.Error()
            assert detail.Unpack(one)
            codes.append(one.canonical_code)
        assert len(codes) == len(updates)
        return codes

    async def read(self, *entities: p4r.Entity, device_id: int = DEVICE_ID) -> list[p4r.Entity]:
        request = p4r.ReadRequest(device_id=device_id, entities=entities)
        return [e async for response in self.stub.Read(request) for e in response.entities]


@pytest_asyncio.fixture(loop_scope="session")
async def peer(target: Target, stub: p4r_grpc.P4RuntimeStub) -> AsyncIterator[Peer]:
    one = Peer(target, stub, await _primary(stub))
    await one.push()
    yield one
    await one.stream.close()


async def _primary(stub: p4r_grpc.P4RuntimeStub) -> RawStream:
    """A stream that is primary, once the server has seen the end of the last test's."""
    async with asyncio.timeout(60):
        while True:
            stream = RawStream(stub)
            await stream.say(ELECTION_ID)
            with contextlib.suppress(AssertionError, grpc.aio.AioRpcError):
                assert await stream.status() == (rpc_code.OK, ELECTION_ID)
                return stream
            await stream.close()
            await asyncio.sleep(0.01)


class Fails:
    """`async with Fails(code, ...)`: the RPC inside ends with one of these codes."""

    def __init__(self, *codes: grpc.StatusCode, message: str = "") -> None:
        self._codes = codes
        self._message = message

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: object, error: object, trace: object) -> bool:
        assert isinstance(error, grpc.aio.AioRpcError), f"not refused: {error!r}"
        assert error.code() in self._codes, error
        assert self._message in (error.details() or "")
        return True


INVALID = grpc.StatusCode.INVALID_ARGUMENT
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
NOT_FOUND = grpc.StatusCode.NOT_FOUND
UNKNOWN = grpc.StatusCode.UNKNOWN
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def insert(**entity: object) -> p4r.Update:
    return p4r.Update(type=p4r.Update.INSERT, entity=p4r.Entity(**entity))  # type: ignore[arg-type]


def modify(**entity: object) -> p4r.Update:
    return p4r.Update(type=p4r.Update.MODIFY, entity=p4r.Entity(**entity))  # type: ignore[arg-type]


def delete(**entity: object) -> p4r.Update:
    return p4r.Update(type=p4r.Update.DELETE, entity=p4r.Entity(**entity))  # type: ignore[arg-type]


def forward_entry(dst: int, port: int = 1) -> p4r.TableEntry:
    entry = p4r.TableEntry(table_id=id_of("forward"))
    entry.match.add(field_id=1).exact.value = dst.to_bytes(6, "big")
    entry.action.action.action_id = id_of("set_port")
    entry.action.action.params.add(param_id=1, value=port.to_bytes(2, "big"))
    return entry


# --- pipelines ----------------------------------------------------------------------------------


@on_one_loop
async def test_capabilities_name_the_version(stub: p4r_grpc.P4RuntimeStub) -> None:
    reply = await stub.Capabilities(p4r.CapabilitiesRequest())
    assert reply.p4runtime_api_version.startswith("1.")


@on_one_loop
async def test_a_config_is_given_back_as_asked(peer: Peer) -> None:
    await peer.push(cookie=99)
    for kind, has_p4info, has_blob in (
        (Get.ALL, True, True),
        (Get.COOKIE_ONLY, False, False),
        (Get.P4INFO_AND_COOKIE, True, False),
        (Get.DEVICE_CONFIG_AND_COOKIE, False, True),
    ):
        request = Get(device_id=DEVICE_ID, response_type=kind)
        config = (await peer.stub.GetForwardingPipelineConfig(request)).config
        assert config.cookie.cookie == 99
        assert config.HasField("p4info") == has_p4info
        assert config.p4_device_config == (BLOB if has_blob else b"")
        if has_p4info:
            assert config.p4info == P4INFO
    await peer.push()
    config = (await peer.stub.GetForwardingPipelineConfig(Get(device_id=DEVICE_ID))).config
    assert not config.HasField("cookie")


@on_one_loop
async def test_a_push_clears_all_state(peer: Peer) -> None:
    await peer.write(insert(table_entry=forward_entry(1)))
    await peer.push()
    assert await peer.read(p4r.Entity(table_entry=p4r.TableEntry(table_id=id_of("forward")))) == []


@on_one_loop
async def test_a_refused_config_changes_nothing(peer: Peer) -> None:
    if peer.target.is_bmv2:
        pytest.skip("BMv2 drops the pipeline that it has when a new one is malformed")
    await peer.write(insert(table_entry=forward_entry(1)))
    for blob in (b"", b"not JSON", b"{}", b"[]", BLOB[:1000], b"\xff\xfe"):
        async with Fails(INVALID):
            await peer.push(blob=blob)
    other = p4i.P4Info()
    other.CopyFrom(P4INFO)
    other.tables[0].preamble.name = "nowhere"
    async with Fails(INVALID, message="nowhere"):
        await peer.push(p4info=other)
    assert len(await peer.read(key_of(forward_entry(1)))) == 1


def change_width(p4info: p4i.P4Info) -> None:
    p4info.tables[0].match_fields[0].bitwidth = 47


def change_kind(p4info: p4i.P4Info) -> None:
    p4info.tables[0].match_fields[0].match_type = p4i.MatchField.LPM


def drop_field(p4info: p4i.P4Info) -> None:
    del p4info.tables[0].match_fields[:]


def forget_action(p4info: p4i.P4Info) -> None:
    p4info.tables[0].action_refs[0].id = 4711


def repeat_id(p4info: p4i.P4Info) -> None:
    p4info.tables[0].preamble.id = p4info.tables[1].preamble.id


def zero_id(p4info: p4i.P4Info) -> None:
    p4info.counters[0].preamble.id = 0


def rename_counter(p4info: p4i.P4Info) -> None:
    p4info.counters[0].preamble.name = "other"


def change_param(p4info: p4i.P4Info) -> None:
    next(a for a in p4info.actions if a.params).params[0].bitwidth += 1


def change_digest(p4info: p4i.P4Info) -> None:
    members = p4info.type_info.structs["seen_t"].members
    members[0].type_spec.bitstring.bit.bitwidth = 3


def dangling_profile(p4info: p4i.P4Info) -> None:
    p4info.action_profiles[0].table_ids.append(4711)


def dangling_resource(p4info: p4i.P4Info) -> None:
    p4info.tables[0].direct_resource_ids.append(4711)


def widthless_header(p4info: p4i.P4Info) -> None:
    for metadata in p4info.controller_packet_metadata[0].metadata:
        metadata.bitwidth = 0


@pytest.mark.parametrize(
    "damage",
    [
        change_width,
        change_kind,
        drop_field,
        forget_action,
        repeat_id,
        zero_id,
        rename_counter,
        change_param,
        change_digest,
        dangling_profile,
        dangling_resource,
        widthless_header,
    ],
)
@on_one_loop
async def test_p4info_that_does_not_fit_the_program_is_refused(
    peer: Peer, damage: Callable[[p4i.P4Info], None]
) -> None:
    if peer.target.is_bmv2:
        pytest.skip("BMv2 believes the P4Info it is given")
    p4info = p4i.P4Info()
    p4info.CopyFrom(P4INFO)
    damage(p4info)
    for action in (Set.VERIFY, Set.VERIFY_AND_COMMIT):
        async with Fails(INVALID):
            await peer.push(action, p4info=p4info)


@on_one_loop
async def test_a_translation_to_strings_is_refused_by_name(peer: Peer) -> None:
    if peer.target.is_bmv2:
        pytest.skip("BMv2 ignores translations")
    p4info = p4i.P4Info()
    p4info.CopyFrom(P4INFO)
    field = p4info.tables[0].match_fields[0]
    field.type_name.name = "mac_t"
    new_type = p4info.type_info.new_types["mac_t"]
    new_type.translated_type.uri = "example.org/mac"
    new_type.translated_type.sdn_string.SetInParent()
    async with Fails(UNIMPLEMENTED, message="example.org/mac"):
        await peer.push(p4info=p4info)
    # A translation to another width only changes which values fit.
    new_type.translated_type.sdn_bitwidth = 64
    field.bitwidth = 64
    await peer.push(p4info=p4info)
    entry = forward_entry(1)
    assert await peer.codes(insert(table_entry=entry)) == [rpc_code.OK]
    entry.match[0].exact.value = b"\x01" + bytes(6)
    assert await peer.codes(insert(table_entry=entry)) == [rpc_code.INVALID_ARGUMENT]


@on_one_loop
async def test_verify_leaves_the_pipeline_alone(peer: Peer) -> None:
    await peer.push(cookie=1)
    await peer.write(insert(table_entry=forward_entry(1)))
    await peer.push(Set.VERIFY, cookie=2)
    config = (await peer.stub.GetForwardingPipelineConfig(Get(device_id=DEVICE_ID))).config
    assert config.cookie.cookie == 1
    assert len(await peer.read(key_of(forward_entry(1)))) == 1


@on_one_loop
async def test_a_saved_pipeline_runs_when_it_is_committed(peer: Peer) -> None:
    """Between save and commit, writes go to the new pipeline and frames through the old one."""
    await peer.write(insert(table_entry=to_cpu_entry()))
    await peer.push(Set.VERIFY_AND_SAVE)
    assert await peer.read(key_of(to_cpu_entry())) == []
    if not peer.target.is_bmv2:
        assert (await probe(peer)).metadata[1].value == b"\x05"
    entry = to_cpu_entry(reason=6)
    await peer.write(insert(table_entry=entry))
    await peer.push(Set.COMMIT)
    assert (await probe(peer)).metadata[1].value == b"\x06"
    if not peer.target.is_bmv2:
        async with Fails(NOT_FOUND):
            await peer.push(Set.COMMIT)


@on_one_loop
async def test_malformed_set_requests_are_refused(peer: Peer) -> None:
    async with Fails(INVALID):
        await peer.push(Set.UNSPECIFIED)
    if peer.target.is_bmv2:
        return
    async with Fails(INVALID):
        await peer.push(17)  # type: ignore[arg-type]
    request = Set(device_id=DEVICE_ID, action=Set.VERIFY_AND_COMMIT)
    request.election_id.CopyFrom(U128.encode(ELECTION_ID))
    async with Fails(INVALID, message="config"):
        await peer.stub.SetForwardingPipelineConfig(request)
    request.action = Set.COMMIT
    request.config.p4_device_config = b"x"
    async with Fails(INVALID, message="config"):
        await peer.stub.SetForwardingPipelineConfig(request)
    async with Fails(INVALID):
        await peer.stub.GetForwardingPipelineConfig(
            Get(device_id=DEVICE_ID, response_type=9)  # type: ignore[arg-type]
        )


@on_one_loop
async def test_reconciliation_keeps_state(peer: Peer) -> None:
    if peer.target.is_bmv2:
        pytest.skip("BMv2 cannot reconcile a program that has counters")
    member = p4r.ActionProfileMember(action_profile_id=id_of("profile"), member_id=1)
    member.action.action_id = id_of("set_select")
    member.action.params.add(param_id=1, value=b"\x05")
    picked = p4r.TableEntry(table_id=id_of("picked"))
    picked.match.add(field_id=1).exact.value = b"\x07"
    picked.action.action_profile_member_id = 1
    counted = forward_entry(1)
    counted.counter_data.packet_count = 5
    counted.counter_data.byte_count = 500
    default = p4r.TableEntry(table_id=id_of("route"), is_default_action=True)
    default.action.action.action_id = id_of("set_lpm")
    default.action.action.params.add(param_id=1, value=b"\x09")
    group = p4r.MulticastGroupEntry(multicast_group_id=3, replicas=[{"egress_port": 1}])
    cell = p4r.CounterEntry(counter_id=id_of("cells"), index={"index": 2})
    cell.data.packet_count = 8
    meter = p4r.MeterEntry(meter_id=id_of("policer"), index={"index": 1})
    meter.config.CopyFrom(p4r.MeterConfig(cir=1, cburst=2, pir=3, pburst=4))
    digest = p4r.DigestEntry(digest_id=id_of("seen_t"), config={"max_list_size": 4})
    await peer.write(
        insert(action_profile_member=member),
        insert(table_entry=picked),
        insert(table_entry=counted),
        modify(table_entry=default),
        insert(packet_replication_engine_entry={"multicast_group_entry": group}),
        modify(counter_entry=cell),
        modify(meter_entry=meter),
        insert(digest_entry=digest),
    )
    if not peer.target.is_strict:
        word = p4r.RegisterEntry(register_id=id_of("words"), index={"index": 3})
        word.data.bitstring = b"\x63"
        await peer.write(modify(register_entry=word))
    everything = state_request(registers=not peer.target.is_strict)
    before = await peer.read(*everything)
    await peer.push(Set.RECONCILE_AND_COMMIT, cookie=5)
    after = await peer.read(*everything)
    assert after == before
    other = p4i.P4Info()
    other.CopyFrom(P4INFO)
    del other.tables[:]
    del other.action_profiles[:]
    async with Fails(INVALID, message="preserved"):
        await peer.push(Set.RECONCILE_AND_COMMIT, p4info=other)
    assert await peer.read(*everything) == before


def state_request(*, registers: bool) -> list[p4r.Entity]:
    """Everything that can be read."""
    table = p4r.TableEntry()
    table.counter_data.SetInParent()
    table.meter_config.SetInParent()
    default = p4r.TableEntry(is_default_action=True)
    multicast, clone = p4r.Entity(), p4r.Entity()
    multicast.packet_replication_engine_entry.multicast_group_entry.SetInParent()
    clone.packet_replication_engine_entry.clone_session_entry.SetInParent()
    request = [
        p4r.Entity(table_entry=table),
        p4r.Entity(table_entry=default),
        p4r.Entity(action_profile_member=p4r.ActionProfileMember()),
        p4r.Entity(action_profile_group=p4r.ActionProfileGroup()),
        p4r.Entity(counter_entry=p4r.CounterEntry()),
        p4r.Entity(meter_entry=p4r.MeterEntry()),
        p4r.Entity(digest_entry=p4r.DigestEntry(digest_id=id_of("seen_t"))),
        multicast,
        clone,
    ]
    if registers:
        request.append(p4r.Entity(register_entry=p4r.RegisterEntry()))
    return request


def key_of(entry: p4r.TableEntry) -> p4r.Entity:
    """Asks for one entry."""
    return p4r.Entity(table_entry={"table_id": entry.table_id, "match": entry.match})


def to_cpu_entry(reason: int = 5) -> p4r.TableEntry:
    entry = p4r.TableEntry(table_id=id_of("forward"))
    entry.match.add(field_id=1).exact.value = b"\x01"
    entry.action.action.action_id = id_of("to_cpu")
    entry.action.action.params.add(param_id=1, value=bytes([reason]))
    return entry


def packet_out(payload: bytes, **values: int) -> p4r.StreamMessageRequest:
    message = p4r.StreamMessageRequest()
    message.packet.payload = payload
    ids = {"egress_port": 1, "bypass": 2, "pad": 3}
    for name, value in ({"egress_port": 0, "bypass": 0, "pad": 0} | values).items():
        data = value.to_bytes(2, "big").lstrip(b"\0") or b"\0"
        message.packet.metadata.add(metadata_id=ids[name], value=data)
    return message


async def probe(peer: Peer) -> p4r.PacketIn:
    """Send a frame to address 1 through the pipeline and get it back."""
    frame = bytes([0, 0, 0, 0, 0, 1]) + bytes(6) + b"\x08\x00" + b"hello"
    await peer.stream.send(packet_out(frame))
    message = await peer.stream.receive()
    assert message.WhichOneof("update") == "packet", message
    assert message.packet.payload == frame
    return message.packet


# --- who may do what ----------------------------------------------------------------------------


@on_one_loop
async def test_only_the_primary_writes(peer: Peer) -> None:
    update = insert(table_entry=forward_entry(1))
    for election_id in (None, ELECTION_ID - 1, ELECTION_ID + 1):
        async with Fails(DENIED):
            await peer.write(update, election_id=election_id)
        request = Set(device_id=DEVICE_ID, action=Set.VERIFY)
        if election_id is not None:
            request.election_id.CopyFrom(U128.encode(election_id))
        async with Fails(DENIED):
            await peer.stub.SetForwardingPipelineConfig(request)
    # Reading needs no election.
    assert await peer.read(key_of(forward_entry(1))) == []


@on_one_loop
async def test_a_takeover_is_announced_and_enforced(peer: Peer) -> None:
    second = RawStream(peer.stub)
    await second.say(ELECTION_ID + 5)
    assert await second.status() == (rpc_code.OK, ELECTION_ID + 5)
    assert await peer.stream.status() == (rpc_code.ALREADY_EXISTS, ELECTION_ID + 5)
    async with Fails(DENIED):
        await peer.write(insert(table_entry=forward_entry(1)))
    await peer.write(insert(table_entry=forward_entry(1)), election_id=ELECTION_ID + 5)
    await second.close()
    assert await peer.stream.status() == (rpc_code.OK, ELECTION_ID)
    await peer.write(delete(table_entry=forward_entry(1)))


@on_one_loop
async def test_a_backup_hears_who_is_primary_and_no_packets(peer: Peer) -> None:
    backup = RawStream(peer.stub)
    await backup.say(ELECTION_ID - 1)
    assert await backup.status() == (rpc_code.ALREADY_EXISTS, ELECTION_ID)
    await peer.write(insert(table_entry=to_cpu_entry()))
    await probe(peer)
    # A backup's packet-out goes nowhere; the primary gets only what came of its own.
    await backup.send(packet_out(bytes(20), bypass=1, egress_port=255))
    if not peer.target.is_bmv2:
        error = (await backup.receive()).error
        assert error.canonical_code == rpc_code.PERMISSION_DENIED
        assert error.HasField("packet_out")
    await probe(peer)
    await backup.close()


@on_one_loop
async def test_an_election_id_can_be_held_once(peer: Peer) -> None:
    rival = RawStream(peer.stub)
    await rival.say(ELECTION_ID)
    assert await rival.ended() == INVALID
    await peer.stream.say(ELECTION_ID + 1)
    assert (await peer.stream.status())[0] == rpc_code.OK
    await peer.stream.say(ELECTION_ID)
    assert (await peer.stream.status())[0] == rpc_code.OK


@on_one_loop
async def test_a_stream_for_another_device_ends(peer: Peer) -> None:
    await peer.stream.say(ELECTION_ID, device_id=77)
    assert await peer.stream.ended() == PRECONDITION
    if not peer.target.is_bmv2:  # which makes any device that it is asked for
        stranger = RawStream(peer.stub)
        await stranger.say(1, device_id=77)
        assert await stranger.ended() == NOT_FOUND


@on_one_loop
async def test_other_devices_and_roles_are_refused(peer: Peer) -> None:
    if peer.target.is_bmv2:
        pytest.skip("BMv2 makes any device that it is asked for, and ignores roles")
    async with Fails(NOT_FOUND):
        await peer.write(insert(table_entry=forward_entry(1)), device_id=2)
    async with Fails(NOT_FOUND):
        await peer.read(p4r.Entity(table_entry=forward_entry(1)), device_id=2)
    async with Fails(NOT_FOUND):
        await peer.stub.GetForwardingPipelineConfig(Get(device_id=2))
    request = p4r.WriteRequest(device_id=DEVICE_ID, role="monitor")
    request.election_id.CopyFrom(U128.encode(ELECTION_ID))
    async with Fails(UNIMPLEMENTED, message="role"):
        await peer.stub.Write(request)
    stream = RawStream(peer.stub)
    message = p4r.StreamMessageRequest()
    message.arbitration.device_id = DEVICE_ID
    message.arbitration.role.name = "monitor"
    await stream.send(message)
    assert await stream.ended() == UNIMPLEMENTED


@on_one_loop
async def test_without_a_pipeline_nothing_can_be_asked_of_it(switchsim: Target) -> None:
    async with grpc.aio.insecure_channel(switchsim.address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        stream = RawStream(stub)
        await stream.say(ELECTION_ID)
        await stream.status()
        bare = Peer(switchsim, stub, stream)
        # finsy looks for these words.
        words = "No forwarding pipeline config"
        async with Fails(PRECONDITION, message=words):
            await bare.write(insert(table_entry=forward_entry(1)))
        async with Fails(PRECONDITION, message=words):
            await bare.read(p4r.Entity(table_entry=p4r.TableEntry()))
        async with Fails(PRECONDITION, message=words):
            await stub.GetForwardingPipelineConfig(Get(device_id=DEVICE_ID))
        async with Fails(NOT_FOUND):
            await bare.push(Set.COMMIT)
        await stream.send(packet_out(bytes(20)))
        assert (await stream.receive()).error.canonical_code == rpc_code.FAILED_PRECONDITION
        await stream.close()


@on_one_loop
async def test_more_controllers_than_a_device_takes_are_turned_away(switchsim: Target) -> None:
    async with grpc.aio.insecure_channel(switchsim.address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        streams = [RawStream(stub) for _ in range(17)]
        for number, stream in enumerate(streams[:16]):
            await stream.say(100 - number)
            await stream.status()
        await streams[16].say(1)
        assert await streams[16].ended() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams[:16]:
            await stream.close()


# --- what only BMv2 lacks -----------------------------------------------------------------------


@on_one_loop
async def test_registers_can_be_read_and_written_outside_strict_mode(peer: Peer) -> None:
    register_id = id_of("words")
    write = p4r.RegisterEntry(register_id=register_id, index={"index": 3})
    write.data.bitstring = b"\x12\x34"
    if peer.target.is_strict:
        assert await peer.codes(modify(register_entry=write)) == [rpc_code.UNIMPLEMENTED]
        async with Fails(UNIMPLEMENTED):
            await peer.read(p4r.Entity(register_entry=write))
        return
    await peer.write(modify(register_entry=write))
    [one] = await peer.read(
        p4r.Entity(register_entry={"register_id": register_id, "index": {"index": 3}})
    )
    assert one.register_entry.data.bitstring == b"\x12\x34"
    cells = await peer.read(p4r.Entity(register_entry={"register_id": register_id}))
    assert [c.register_entry.index.index for c in cells] == list(range(16))
    write.ClearField("index")
    write.data.bitstring = b"\x07"
    await peer.write(modify(register_entry=write))
    cells = await peer.read(p4r.Entity(register_entry={"register_id": register_id}))
    assert {c.register_entry.data.bitstring for c in cells} == {b"\x07"}

    def bad(**changes: object) -> p4r.Update:
        entry = p4r.RegisterEntry(register_id=register_id, index={"index": 3})
        entry.data.bitstring = b"\x01"
        for name, value in changes.items():
            if name == "index":
                entry.index.index = value  # type: ignore[assignment]
            elif name == "bits":
                entry.data.bitstring = value  # type: ignore[assignment]
            elif name == "flag":
                entry.data.bool = True
            else:
                entry.register_id = value  # type: ignore[assignment]
        return modify(register_entry=entry)

    assert await peer.codes(
        bad(index=-1),
        bad(index=16),
        bad(bits=b"\x01\0\0\0\0"),
        bad(flag=True),
        bad(register_id=5),
        insert(register_entry=write),
    ) == [
        rpc_code.INVALID_ARGUMENT,
        rpc_code.OUT_OF_RANGE,
        rpc_code.INVALID_ARGUMENT,
        rpc_code.INVALID_ARGUMENT,
        rpc_code.INVALID_ARGUMENT,
        rpc_code.INVALID_ARGUMENT,
    ]


@pytest.mark.parametrize(
    "atomicity", [p4r.WriteRequest.ROLLBACK_ON_ERROR, p4r.WriteRequest.DATAPLANE_ATOMIC]
)
@on_one_loop
async def test_an_atomic_batch_is_all_or_nothing(
    peer: Peer, atomicity: p4r.WriteRequest.Atomicity.ValueType
) -> None:
    if peer.target.is_strict:
        async with Fails(UNIMPLEMENTED):
            await peer.write(insert(table_entry=forward_entry(1)), atomicity=atomicity)
        return
    member = p4r.ActionProfileMember(action_profile_id=id_of("profile"), member_id=1)
    member.action.action_id = id_of("set_select")
    member.action.params.add(param_id=1, value=b"\x05")
    picked = p4r.TableEntry(table_id=id_of("picked"))
    picked.match.add(field_id=1).exact.value = b"\x07"
    picked.action.action_profile_member_id = 1
    oneshot = p4r.TableEntry(table_id=id_of("spread"))
    oneshot.match.add(field_id=1).exact.value = b"\x01"
    action = oneshot.action.action_profile_action_set.action_profile_actions.add(weight=2)
    action.action.CopyFrom(member.action)
    acl = p4r.TableEntry(table_id=id_of("acl"), priority=9)
    acl.match.add(field_id=2).exact.value = b"\x01"
    acl.action.action.action_id = id_of("set_ternary")
    acl.action.action.params.add(param_id=1, value=b"\x03")
    acl.meter_config.CopyFrom(p4r.MeterConfig(cir=1, cburst=1, pir=2, pburst=2))
    acl.counter_data.packet_count = 4
    counted = forward_entry(1)
    counted.counter_data.packet_count = 5
    counted.counter_data.byte_count = 6
    counted.metadata = b"m"
    group = p4r.MulticastGroupEntry(multicast_group_id=3, replicas=[{"egress_port": 1}])
    session = p4r.CloneSessionEntry(session_id=3, replicas=[{"egress_port": 1}])
    digest = p4r.DigestEntry(digest_id=id_of("seen_t"), config={"max_list_size": 4})
    await peer.write(
        insert(action_profile_member=member),
        insert(table_entry=picked),
        insert(table_entry=oneshot),
        insert(table_entry=acl),
        insert(table_entry=counted),
        insert(packet_replication_engine_entry={"multicast_group_entry": group}),
        insert(packet_replication_engine_entry={"clone_session_entry": session}),
        insert(digest_entry=digest),
    )
    request = state_request(registers=True)
    before = await peer.read(*request)

    changed = forward_entry(1, port=9)
    changed.counter_data.packet_count = 99
    default = p4r.TableEntry(table_id=id_of("route"), is_default_action=True)
    default.action.action.action_id = id_of("set_lpm")
    default.action.action.params.add(param_id=1, value=b"\x09")
    other_oneshot = p4r.TableEntry()
    other_oneshot.CopyFrom(oneshot)
    other_oneshot.action.action_profile_action_set.action_profile_actions[0].weight = 1
    plain_acl = p4r.TableEntry()
    plain_acl.CopyFrom(acl)
    plain_acl.ClearField("meter_config")
    cell = p4r.CounterEntry(counter_id=id_of("cells"), data={"packet_count": 8})
    meter = p4r.MeterEntry(meter_id=id_of("policer"), index={"index": 1})
    meter.config.CopyFrom(p4r.MeterConfig(cir=1, cburst=2, pir=3, pburst=4))
    word = p4r.RegisterEntry(register_id=id_of("words"))
    word.data.bitstring = b"\x63"
    direct_counter = p4r.DirectCounterEntry(
        table_entry={"table_id": acl.table_id, "priority": 9, "match": acl.match},
        data={"packet_count": 70},
    )
    direct_meter = p4r.DirectMeterEntry(
        table_entry={"table_id": acl.table_id, "priority": 9, "match": acl.match}
    )
    member2 = p4r.ActionProfileMember()
    member2.CopyFrom(member)
    member2.action.params[0].value = b"\x08"
    member3 = p4r.ActionProfileMember()
    member3.CopyFrom(member)
    member3.member_id = 3
    wide_group = p4r.MulticastGroupEntry(multicast_group_id=3, replicas=[{"egress_port": 2}])
    changes = [
        insert(table_entry=forward_entry(2)),
        modify(table_entry=changed),
        delete(table_entry=forward_entry(2)),
        modify(table_entry=default),
        modify(table_entry=other_oneshot),
        delete(table_entry=other_oneshot),
        modify(table_entry=plain_acl),
        modify(direct_meter_entry=direct_meter),
        modify(direct_counter_entry=direct_counter),
        delete(table_entry=acl),
        delete(table_entry=picked),
        modify(action_profile_member=member2),
        delete(action_profile_member=member),
        insert(action_profile_member=member3),
        modify(counter_entry=cell),
        modify(meter_entry=meter),
        modify(register_entry=word),
        modify(packet_replication_engine_entry={"multicast_group_entry": wide_group}),
        delete(packet_replication_engine_entry={"clone_session_entry": session}),
        modify(digest_entry={"digest_id": digest.digest_id, "config": {"max_list_size": 1}}),
        delete(digest_entry=digest),
        delete(table_entry=forward_entry(1)),
    ]
    last = insert(table_entry=p4r.TableEntry(table_id=4711))
    codes = await peer.codes(*changes, last, atomicity=atomicity)
    assert codes == [rpc_code.ABORTED] * len(changes) + [rpc_code.INVALID_ARGUMENT]
    assert by_text(await peer.read(*request)) == by_text(before)
    # Without the bad one, all of it happens.
    assert await peer.codes(*changes, atomicity=atomicity) == [rpc_code.OK] * len(changes)
    assert await peer.read(key_of(forward_entry(1))) == []


def by_text(entities: list[p4r.Entity]) -> list[str]:
    return sorted(text_format.MessageToString(entity) for entity in entities)


@on_one_loop
async def test_strict_mode_refuses_what_bmv2_lacks(peer: Peer) -> None:
    """Each of these works, or is at least accepted, outside strict mode."""
    clone = p4r.CloneSessionEntry(
        session_id=3, replicas=[{"egress_port": 1}], packet_length_bytes=64
    )
    meter = p4r.MeterEntry(meter_id=id_of("policer"))
    meter.config.CopyFrom(p4r.MeterConfig(cir=1, cburst=2, pir=3, pburst=4))
    updates = [
        modify(counter_entry={"counter_id": id_of("cells"), "data": {"packet_count": 1}}),
        modify(meter_entry=meter),
        insert(packet_replication_engine_entry={"clone_session_entry": clone}),
    ]
    codes = await peer.codes(*updates)
    if peer.target.is_bmv2:
        assert codes == [rpc_code.UNIMPLEMENTED, rpc_code.UNIMPLEMENTED, rpc_code.UNKNOWN]
    else:
        expected = rpc_code.UNIMPLEMENTED if peer.target.is_strict else rpc_code.OK
        assert codes == [expected] * 3
    wildcards = [
        p4r.Entity(direct_counter_entry={"table_entry": {}}),
        p4r.Entity(direct_meter_entry={"table_entry": {}}),
        p4r.Entity(digest_entry={}),
    ]
    for entity in wildcards:
        if peer.target.is_strict:
            async with Fails(UNIMPLEMENTED):
                await peer.read(entity)
        else:
            await peer.read(entity)


@on_one_loop
async def test_value_sets_and_externs_are_refused_everywhere(peer: Peer) -> None:
    codes = await peer.codes(insert(value_set_entry={}), insert(extern_entry={}))
    assert codes == [rpc_code.UNIMPLEMENTED] * 2
    async with Fails(UNIMPLEMENTED):
        await peer.read(p4r.Entity(value_set_entry={}))


# --- malformed requests -------------------------------------------------------------------------


@on_one_loop
async def test_entities_that_do_not_exist_are_refused(peer: Peer) -> None:
    bad = [
        insert(table_entry={"table_id": 4711}),
        insert(table_entry={}),
        modify(counter_entry={"counter_id": 4711, "index": {}}),
        modify(counter_entry={"counter_id": id_of("forward_counter"), "index": {}}),
        modify(meter_entry={"meter_id": 4711, "index": {}}),
        insert(action_profile_member={"action_profile_id": 4711}),
        insert(action_profile_group={"action_profile_id": 4711}),
        modify(direct_counter_entry={}),
        modify(direct_meter_entry={}),
        insert(packet_replication_engine_entry={}),
        p4r.Update(type=p4r.Update.INSERT),
        p4r.Update(entity={"table_entry": forward_entry(1)}),
        insert(digest_entry={"digest_id": 4711}),
    ]
    codes = await peer.codes(*bad)
    assert codes[:10] == [rpc_code.INVALID_ARGUMENT] * 10
    assert codes[10] in (rpc_code.INVALID_ARGUMENT, rpc_code.UNKNOWN)
    assert codes[11:] == [rpc_code.INVALID_ARGUMENT, rpc_code.NOT_FOUND]


@on_one_loop
async def test_entries_of_the_wrong_shape_are_refused(peer: Peer) -> None:
    def entry(**changes: object) -> p4r.Update:
        message = forward_entry(1)
        action = message.action.action
        match changes:
            case {"match": data}:
                message.match[0].exact.value = data  # type: ignore[assignment]
            case {"field": number}:
                message.match[0].field_id = number  # type: ignore[assignment]
            case {"twice": _}:
                message.match.append(message.match[0])
            case {"no_match": _}:
                del message.match[:]
            case {"priority": number}:
                message.priority = number  # type: ignore[assignment]
            case {"action": number}:
                action.action_id = number  # type: ignore[assignment]
            case {"param": number}:
                action.params[0].param_id = number  # type: ignore[assignment]
            case {"value": data}:
                action.params[0].value = data  # type: ignore[assignment]
            case {"no_params": _}:
                del action.params[:]
            case {"two_params": _}:
                action.params.append(action.params[0])
            case {"no_action": _}:
                message.ClearField("action")
            case {"member": number}:
                message.action.action_profile_member_id = number  # type: ignore[assignment]
            case {"timeout": number}:
                message.idle_timeout_ns = number  # type: ignore[assignment]
            case {"meter": _}:
                message.meter_config.cir = 1
            case {"hit": _}:
                message.time_since_last_hit.elapsed_ns = 1
        return insert(table_entry=message)

    bad = [
        entry(match=b"\x01" + bytes(6)),
        entry(field=2),
        entry(twice=True),
        entry(no_match=True),
        entry(priority=1),
        entry(action=4711),
        entry(action=id_of("set_lpm")),
        entry(param=2),
        entry(value=b"\x02\x00"),
        entry(no_params=True),
        entry(two_params=True),
        entry(no_action=True),
        entry(member=1),
        entry(timeout=1),
        entry(timeout=-1),
        entry(meter=True),
        entry(hit=True),
    ]
    assert await peer.codes(*bad) == [rpc_code.INVALID_ARGUMENT] * len(bad)
    assert await peer.read(key_of(forward_entry(1))) == []


@on_one_loop
async def test_indices_and_ids_out_of_range_are_refused(peer: Peer) -> None:
    def cell(index: int) -> p4r.Update:
        return modify(
            counter_entry={
                "counter_id": id_of("cells"),
                "index": {"index": index},
                "data": {"packet_count": 1},
            }
        )

    codes = await peer.codes(cell(-1), cell(16))
    assert codes[0] == rpc_code.INVALID_ARGUMENT
    assert codes[1] == (rpc_code.UNKNOWN if peer.target.is_bmv2 else rpc_code.OUT_OF_RANGE)
    if peer.target.is_bmv2:
        return
    meter = p4r.MeterEntry(meter_id=id_of("policer"), index={"index": 1})

    def with_config(**config: int) -> p4r.Update:
        one = p4r.MeterEntry()
        one.CopyFrom(meter)
        one.config.CopyFrom(p4r.MeterConfig(**config))
        return modify(meter_entry=one)

    replicas = [{"egress_port": 512}, {"port": b""}, {"port": b"\x01" + bytes(4)}, {"instance": 1}]
    groups = [
        insert(
            packet_replication_engine_entry={
                "multicast_group_entry": {"multicast_group_id": 1, "replicas": [replica]}
            }
        )
        for replica in [*replicas, {"egress_port": 1, "instance": 65536}]
    ]
    updates = [
        with_config(cir=-1, pir=1),
        with_config(cir=5, pir=1),
        with_config(cir=1, pir=1, eburst=1),
        modify(
            counter_entry={"counter_id": id_of("cells"), "index": {}, "data": {"byte_count": -1}}
        ),
        *groups,
    ]
    assert await peer.codes(*updates) == [rpc_code.INVALID_ARGUMENT] * len(updates)


@on_one_loop
async def test_bytestrings_are_accepted_padded_and_given_back_short(peer: Peer) -> None:
    entry = forward_entry(1)
    entry.match[0].exact.value = bytes(10) + b"\x01"
    entry.action.action.params[0].value = b"\x00\x00\x00\x01\x00"
    await peer.write(insert(table_entry=entry))
    [seen] = await peer.read(p4r.Entity(table_entry=p4r.TableEntry(table_id=entry.table_id)))
    assert seen.table_entry.match[0].exact.value == b"\x01"
    assert seen.table_entry.action.action.params[0].value == b"\x01\x00"


@on_one_loop
async def test_packet_outs_that_do_not_fit_the_header_are_reported(peer: Peer) -> None:
    if peer.target.is_bmv2:
        pytest.skip("BMv2 reports stream errors only where its server configuration asks for it")
    message = packet_out(bytes(20))
    del message.packet.metadata[2]
    await peer.stream.send(message)
    error = (await peer.stream.receive()).error
    assert error.canonical_code == rpc_code.INVALID_ARGUMENT
    assert "pad" in error.message
    ack = p4r.StreamMessageRequest(digest_ack={"digest_id": 4711, "list_id": 1})
    await peer.stream.send(ack)
    error = (await peer.stream.receive()).error
    assert error.HasField("digest_list_ack")
    await peer.stream.send(p4r.StreamMessageRequest())
    assert (await peer.stream.receive()).error.canonical_code == rpc_code.UNIMPLEMENTED


@on_one_loop
async def test_filters_select_entries(peer: Peer) -> None:
    if peer.target.is_bmv2:
        pytest.skip("BMv2 ignores filters other than the match")

    def acl(priority: int, action: str, metadata: bytes) -> p4r.TableEntry:
        entry = p4r.TableEntry(table_id=id_of("acl"), priority=priority, metadata=metadata)
        entry.match.add(field_id=2).exact.value = bytes([priority])
        entry.action.action.action_id = id_of(action)
        if action == "set_ternary":
            entry.action.action.params.add(param_id=1, value=b"\x01")
        return entry

    await peer.write(
        *(
            insert(table_entry=acl(*one))
            for one in ((1, "deny", b"a"), (2, "set_ternary", b"a"), (3, "deny", b"b"))
        )
    )

    async def selected(**wanted: object) -> list[int]:
        entity = p4r.Entity(table_entry={"table_id": id_of("acl"), **wanted})
        return [e.table_entry.priority for e in await peer.read(entity)]

    assert await selected() == [1, 2, 3]
    if peer.target.is_strict:
        for wanted in ({"priority": 2}, {"metadata": b"a"}):
            async with Fails(UNIMPLEMENTED):
                await selected(**wanted)
        return
    assert await selected(priority=2) == [2]
    assert await selected(metadata=b"a") == [1, 2]
    assert await selected(action={"action": {"action_id": id_of("deny")}}) == [1, 3]
    async with Fails(INVALID):
        await selected(action={"action": {"action_id": 4711}})


@on_one_loop
async def test_a_large_read_comes_in_chunks(switchsim: Target, tmp_path: Path) -> None:
    """All of a big table arrives, in messages below the 4 MiB that a client accepts."""
    async with grpc.aio.insecure_channel(switchsim.address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        stream = RawStream(stub)
        await stream.say(ELECTION_ID)
        await stream.status()
        one = Peer(switchsim, stub, stream)
        blob = BLOB.replace(b'"max_size" : 64', b'"max_size" : 70000')
        assert blob != BLOB
        await one.push(blob=blob)
        entries = [insert(table_entry=forward_entry(i)) for i in range(5000)]
        for entry in entries:
            entry.entity.table_entry.metadata = bytes(900)
        await one.write(*entries)
        request = p4r.ReadRequest(device_id=DEVICE_ID)
        request.entities.add().table_entry.table_id = id_of("forward")
        chunks = [chunk async for chunk in stub.Read(request)]
        assert len(chunks) > 10
        assert max(chunk.ByteSize() for chunk in chunks) < 1 << 20
        assert sum(len(chunk.entities) for chunk in chunks) == 5000
        await stream.close()


@on_one_loop
async def test_a_controller_that_does_not_read_loses_packets_not_the_switch(
    switchsim: Target,
) -> None:
    async with grpc.aio.insecure_channel(switchsim.address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        stream = RawStream(stub)
        await stream.say(ELECTION_ID)
        await stream.status()
        one = Peer(switchsim, stub, stream)
        await one.push()
        await one.write(insert(table_entry=to_cpu_entry()))
        frame = bytes([0, 0, 0, 0, 0, 1]) + bytes(6) + b"\x08\x00" + bytes(1400)
        for _ in range(4000):
            await stream.send(packet_out(frame))
        for _ in range(100):
            if switchsim.stats()["p4runtime"]["packet_in_drops"]:
                break
            await asyncio.sleep(0.1)
        stats = switchsim.stats()["p4runtime"]
        assert stats["packet_in_drops"] > 0
        # The control plane is as well as ever, and so is the stream once somebody reads it.
        await one.write(delete(table_entry=to_cpu_entry()))
        assert (await stream.receive()).packet.payload == frame
        await stream.close()


def test_the_committed_programs_are_what_p4c_makes_of_their_source(tmp_path: Path) -> None:
    p4c = os.environ.get("KVCAST_P4C") or shutil.which("p4c-bm2-ss")
    if p4c is None:
        pytest.skip("no p4c (KVCAST_P4C or PATH)")
    blob, p4info = tmp_path / "everything.json", tmp_path / "everything.p4info.txtpb"
    subprocess.run(
        [p4c, "--p4runtime-files", str(p4info), "-o", str(blob), "everything.p4"],
        cwd=BLOB_PATH.parent,
        check=True,
        capture_output=True,
    )
    assert json.loads(blob.read_text()) == json.loads(BLOB)
    assert text_format.Parse(p4info.read_text(), p4i.P4Info()) == P4INFO
