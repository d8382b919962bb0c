"""The parts of the P4Runtime server that do no I/O: arbitration, digest lists, values, controller
headers, error details.

Oracle: the specification's tables and pseudo-code, worked by hand. Cannot see: gRPC, the switch.
"""

from __future__ import annotations

import pytest
from finsy.proto import U128, p4r, rpc_code, rpc_status
from hypothesis import given
from hypothesis import strategies as st
from kvcast.switchsim import ir
from kvcast.switchsim.p4runtime.arbitration import Arbiter, Notification
from kvcast.switchsim.p4runtime.digest import (
    MAX_CACHED_SAMPLES,
    MAX_LIST_SAMPLES,
    DigestBuffer,
    DigestConfig,
    SampleList,
)
from kvcast.switchsim.p4runtime.errors import (
    MAX_DETAILS_BYTES,
    P4RuntimeError,
    batch_status,
    invalid_argument,
)
from kvcast.switchsim.p4runtime.packetio import ControllerHeader
from kvcast.switchsim.p4runtime.values import (
    MatchKind,
    decode_bytes,
    decode_match,
    encode_bytes,
    encode_match,
)


def refused(code: int) -> pytest.RaisesExc[P4RuntimeError]:
    return pytest.RaisesExc(P4RuntimeError, check=lambda error: error.code == code)


# --- arbitration --------------------------------------------------------------------------------


def hello(election_id: int | None, device_id: int = 1) -> p4r.MasterArbitrationUpdate:
    update = p4r.MasterArbitrationUpdate(device_id=device_id)
    if election_id is not None:
        update.election_id.CopyFrom(U128.encode(election_id))
    return update


def told(notifications: list[Notification]) -> dict[int, tuple[str, int]]:
    """stream -> (status, election id)"""
    return {
        n.stream: (
            rpc_code.Code.Name(rpc_code.Code.ValueType(n.update.status.code)),
            U128.decode(n.update.election_id),
        )
        for n in notifications
    }


def test_the_highest_election_id_is_primary() -> None:
    arbiter = Arbiter(1)
    assert told(arbiter.update(10, hello(5))) == {10: ("OK", 5)}
    assert told(arbiter.update(11, hello(3))) == {11: ("ALREADY_EXISTS", 5)}
    assert arbiter.primary == 10
    takeover = arbiter.update(12, hello(9))
    assert told(takeover) == {
        10: ("ALREADY_EXISTS", 9),
        11: ("ALREADY_EXISTS", 9),
        12: ("OK", 9),
    }
    assert takeover[-1].stream == 12  # the new primary hears last
    assert arbiter.is_primary(U128.encode(9))
    assert not arbiter.is_primary(U128.encode(5))
    assert not arbiter.is_primary(None)


def test_the_next_highest_takes_over_when_the_primary_goes() -> None:
    arbiter = Arbiter(1)
    for stream, election_id in ((1, 5), (2, 7), (3, 6)):
        arbiter.update(stream, hello(election_id))
    assert told(arbiter.disconnect(2)) == {1: ("ALREADY_EXISTS", 6), 3: ("OK", 6)}
    assert arbiter.disconnect(1) == []
    assert arbiter.disconnect(3) == []
    assert arbiter.primary is None
    assert arbiter.disconnect(3) == []


def test_election_ids_are_128_bits_wide() -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, hello((1 << 64) - 1))
    assert told(arbiter.update(2, hello(1 << 64)))[2] == ("OK", 1 << 64)
    assert told(arbiter.update(3, hello((1 << 128) - 1)))[3] == ("OK", (1 << 128) - 1)


def test_a_controller_without_an_election_id_is_never_primary() -> None:
    arbiter = Arbiter(1)
    first = arbiter.update(1, hello(None))
    assert told(first) == {1: ("NOT_FOUND", 0)}
    assert not first[0].update.HasField("election_id")
    assert told(arbiter.update(2, hello(None))) == {2: ("NOT_FOUND", 0)}
    assert told(arbiter.update(3, hello(0))) == {
        1: ("ALREADY_EXISTS", 0),
        2: ("ALREADY_EXISTS", 0),
        3: ("OK", 0),
    }
    # With the primary gone, the backups learn the highest id ever seen.
    assert told(arbiter.disconnect(3)) == {1: ("NOT_FOUND", 0), 2: ("NOT_FOUND", 0)}


def test_an_election_id_in_use_is_refused_and_changes_nothing() -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, hello(5))
    arbiter.update(2, hello(4))
    with refused(rpc_code.INVALID_ARGUMENT):
        arbiter.update(3, hello(5))
    with refused(rpc_code.INVALID_ARGUMENT):
        arbiter.update(2, hello(5))
    assert arbiter.primary == 1
    assert arbiter.streams == 2


def test_a_primary_can_step_down_and_a_backup_up() -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, hello(5))
    arbiter.update(2, hello(4))
    assert told(arbiter.update(1, hello(3))) == {1: ("ALREADY_EXISTS", 4), 2: ("OK", 4)}
    assert told(arbiter.update(1, hello(8))) == {1: ("OK", 8), 2: ("ALREADY_EXISTS", 8)}
    # Saying the same again is answered, and disturbs nobody else.
    assert told(arbiter.update(1, hello(8))) == {1: ("OK", 8)}
    assert told(arbiter.update(1, hello(9))) == {1: ("OK", 9), 2: ("ALREADY_EXISTS", 9)}


def test_devices_roles_and_crowds_are_refused_by_name() -> None:
    arbiter = Arbiter(1, max_streams=2)
    with refused(rpc_code.NOT_FOUND):
        arbiter.update(1, hello(1, device_id=2))
    arbiter.update(1, hello(1))
    with refused(rpc_code.FAILED_PRECONDITION):
        arbiter.update(1, hello(1, device_id=2))
    role = hello(2)
    role.role.name = "monitor"
    with refused(rpc_code.UNIMPLEMENTED):
        arbiter.update(2, role)
    arbiter.update(2, hello(2))
    with refused(rpc_code.RESOURCE_EXHAUSTED):
        arbiter.update(3, hello(3))
    assert arbiter.streams == 2


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["say", "leave"]), st.integers(0, 6)),
        max_size=40,
    )
)
def test_there_is_one_primary_and_everybody_knows_it(events: list[tuple[int, str, int]]) -> None:
    """Whatever happens, the primary is the highest connected id, and the last status that each
    stream was sent agrees with it."""
    arbiter = Arbiter(1)
    ids: dict[int, int] = {}
    status: dict[int, int] = {}
    for stream, what, election_id in events:
        if what == "leave":
            notifications = arbiter.disconnect(stream)
            ids.pop(stream, None)
            status.pop(stream, None)
        else:
            try:
                notifications = arbiter.update(stream, hello(election_id))
            except P4RuntimeError:
                assert election_id in [i for s, i in ids.items() if s != stream]
                continue
            ids[stream] = election_id
        status.update({n.stream: n.update.status.code for n in notifications})
        primary = max(ids, key=lambda s: ids[s]) if ids else None
        assert arbiter.primary == primary
        assert status == {s: rpc_code.OK if s == primary else rpc_code.ALREADY_EXISTS for s in ids}


# --- digest lists -------------------------------------------------------------------------------


def test_a_list_is_sent_when_it_is_full_or_its_oldest_sample_is_old() -> None:
    buffer = DigestBuffer(DigestConfig(max_timeout_ns=100, max_list_size=3, ack_timeout_ns=0))
    assert buffer.offer((1,), 0) is None
    assert buffer.offer((2,), 90) is None
    assert buffer.next_deadline_ns() == 100
    assert buffer.poll(99) is None
    assert buffer.poll(100) == SampleList(1, ((1,), (2,)))
    assert buffer.next_deadline_ns() is None
    assert [buffer.offer((i,), 200) for i in (1, 2, 3)] == [
        None,
        None,
        SampleList(2, ((1,), (2,), (3,))),
    ]


def test_duplicates_are_dropped_within_a_list_and_until_it_is_acknowledged() -> None:
    buffer = DigestBuffer(DigestConfig(max_timeout_ns=0, max_list_size=1, ack_timeout_ns=1000))
    assert buffer.offer((7, 7), 0) == SampleList(1, ((7, 7),))
    assert buffer.offer((7, 7), 1) is None
    assert buffer.duplicates == 1
    assert not buffer.acknowledge(99)
    assert buffer.offer((7, 7), 2) is None
    assert buffer.acknowledge(1)
    assert not buffer.acknowledge(1)
    assert buffer.offer((7, 7), 3) == SampleList(2, ((7, 7),))


def test_an_unacknowledged_list_is_forgotten_after_the_timeout() -> None:
    buffer = DigestBuffer(DigestConfig(max_timeout_ns=0, max_list_size=1, ack_timeout_ns=1000))
    buffer.offer((1,), 0)
    assert buffer.offer((1,), 999) is None
    assert buffer.offer((1,), 1000) is not None


def test_another_primary_hears_what_was_not_acknowledged() -> None:
    buffer = DigestBuffer(DigestConfig(max_timeout_ns=0, max_list_size=1, ack_timeout_ns=10**12))
    buffer.offer((1,), 0)
    buffer.forget_unacknowledged()
    assert buffer.offer((1,), 1) is not None


def test_lists_and_caches_are_bounded() -> None:
    endless = DigestBuffer(DigestConfig(max_timeout_ns=10**18, max_list_size=0, ack_timeout_ns=0))
    lists = [endless.offer((i,), 0) for i in range(MAX_LIST_SAMPLES + 1)]
    assert [i for i, one in enumerate(lists) if one is not None] == [MAX_LIST_SAMPLES - 1]
    silent = DigestBuffer(DigestConfig(max_timeout_ns=0, max_list_size=1, ack_timeout_ns=10**18))
    for i in range(MAX_CACHED_SAMPLES + 10):
        silent.offer((i,), 0)
    assert len(silent._cached) == MAX_CACHED_SAMPLES
    assert silent.forgotten_lists == 10


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans()), max_size=60),
    st.integers(0, 40),
    st.integers(0, 3),
    st.integers(0, 60),
)
def test_a_sample_is_never_in_flight_twice(
    events: list[tuple[int, int, bool]], max_timeout_ns: int, max_list: int, ack_ns: int
) -> None:
    """Against a model that keeps the sets of the specification's pseudo-code in plain lists."""
    buffer = DigestBuffer(DigestConfig(max_timeout_ns, max_list, ack_ns))
    now_ns = 0
    sent: list[tuple[int, SampleList]] = []
    for value, step_ns, acknowledge in events:
        now_ns += step_ns
        if acknowledge and sent:
            buffer.acknowledge(sent.pop(0)[1].list_id)
        for ready in (buffer.poll(now_ns), buffer.offer((value,), now_ns)):
            if ready is None:
                continue
            live = {s for at, one in sent if now_ns - at < ack_ns for s in one.samples}
            assert not live & set(ready.samples)
            assert len(set(ready.samples)) == len(ready.samples)
            assert not max_list or len(ready.samples) <= max_list
            sent.append((now_ns, ready))
    deadline_ns = buffer.next_deadline_ns()
    assert deadline_ns is None or deadline_ns <= now_ns + max_timeout_ns


# --- values -------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 160))
def test_bytestrings_are_shortest_and_come_back(value: int) -> None:
    data = encode_bytes(value)
    assert decode_bytes(data, 200, "x") == value
    assert len(data) == 1 or data[0] != 0


def test_bytestrings_may_be_padded_but_must_fit() -> None:
    assert decode_bytes(b"\0\0\0\1", 9, "x") == 1
    assert decode_bytes(b"\x01\xff", 9, "x") == 511
    for data, width in ((b"", 9), (b"\x02\x00", 9), (b"\xff", 7), (bytes(2000), 9)):
        with refused(rpc_code.INVALID_ARGUMENT):
            decode_bytes(data, width, "x")


def match(**kind: object) -> p4r.FieldMatch:
    return p4r.FieldMatch(field_id=1, **kind)  # type: ignore[arg-type]


GOOD_MATCHES = [
    (MatchKind.EXACT, match(exact={"value": b"\x05"}), ir.Exact(5)),
    (MatchKind.OPTIONAL, match(optional={"value": b"\x05"}), ir.Ternary(5, 0xFFFF)),
    (MatchKind.LPM, match(lpm={"value": b"\x12\x00", "prefix_len": 8}), ir.Lpm(0x1200, 8)),
    (MatchKind.LPM, match(lpm={"value": b"\x12\x34", "prefix_len": 16}), ir.Lpm(0x1234, 16)),
    (MatchKind.TERNARY, match(ternary={"value": b"\x01", "mask": b"\x0f"}), ir.Ternary(1, 15)),
    (MatchKind.RANGE, match(range={"low": b"\x01", "high": b"\x0f"}), ir.Range(1, 15)),
    (MatchKind.RANGE, match(range={"low": b"\x00", "high": b"\xff\xfe"}), ir.Range(0, 0xFFFE)),
]


@pytest.mark.parametrize(("kind", "message", "value"), GOOD_MATCHES)
def test_matches_are_decoded_and_come_back(
    kind: MatchKind, message: p4r.FieldMatch, value: ir.MatchValue
) -> None:
    assert decode_match(message, kind, 16, "x") == value
    assert encode_match(1, kind, 16, value) == message


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MatchKind.EXACT, match()),
        (MatchKind.EXACT, match(exact={})),
        (MatchKind.EXACT, match(exact={"value": b"\x01\x00\x00"})),
        (MatchKind.EXACT, match(ternary={"value": b"\x01", "mask": b"\x01"})),
        (MatchKind.LPM, match(lpm={"value": b"\x00", "prefix_len": 0})),
        (MatchKind.LPM, match(lpm={"value": b"\x12\x34", "prefix_len": 8})),
        (MatchKind.LPM, match(lpm={"value": b"\x12\x34", "prefix_len": 17})),
        (MatchKind.LPM, match(lpm={"value": b"\x12\x34", "prefix_len": -1})),
        (MatchKind.TERNARY, match(ternary={"value": b"\x00", "mask": b"\x00"})),
        (MatchKind.TERNARY, match(ternary={"value": b"\x03", "mask": b"\x01"})),
        (MatchKind.TERNARY, match(ternary={"value": b"\x01"})),
        (MatchKind.RANGE, match(range={"low": b"\x02", "high": b"\x01"})),
        (MatchKind.RANGE, match(range={"low": b"\x00", "high": b"\xff\xff"})),
        (MatchKind.OPTIONAL, match(exact={"value": b"\x01"})),
        (MatchKind.EXACT, match(other={"type_url": "x"})),
    ],
)
def test_matches_in_any_other_form_are_refused(kind: MatchKind, message: p4r.FieldMatch) -> None:
    with refused(rpc_code.INVALID_ARGUMENT):
        decode_match(message, kind, 16, "x")


def test_wildcards_are_left_out() -> None:
    assert encode_match(1, MatchKind.TERNARY, 16, ir.Ternary(0, 0)) is None
    assert encode_match(1, MatchKind.LPM, 16, ir.Lpm(0, 0)) is None
    assert encode_match(1, MatchKind.RANGE, 16, ir.Range(0, 0xFFFF)) is None
    assert encode_match(1, MatchKind.OPTIONAL, 16, ir.Ternary(0, 0)) is None


# --- controller headers -------------------------------------------------------------------------

# 9 + 1 + 6 bits, as in programs/everything.p4
HEADER = ControllerHeader([(1, "port", 9), (2, "bypass", 1), (3, "pad", 6)])


def packet_out(**values: int) -> p4r.PacketOut:
    ids = {"port": 1, "bypass": 2, "pad": 3, "other": 4}
    packet = p4r.PacketOut(payload=b"frame")
    for name, value in values.items():
        packet.metadata.add(metadata_id=ids[name], value=encode_bytes(value))
    return packet


def test_fields_are_packed_from_the_highest_bit_whatever_their_order() -> None:
    expected = bytes([0b10000000, 0b11000001]) + b"frame"
    assert HEADER.build(packet_out(pad=1, bypass=1, port=257)) == expected


@given(st.integers(0, 511), st.integers(0, 1), st.integers(0, 63), st.binary(max_size=40))
def test_a_header_that_is_built_can_be_parsed(
    port: int, bypass: int, pad: int, payload: bytes
) -> None:
    packet = packet_out(port=port, bypass=bypass, pad=pad)
    packet.payload = payload
    parsed = HEADER.parse(HEADER.build(packet))
    assert parsed is not None
    assert parsed.payload == payload
    assert parsed.metadata == packet.metadata


@pytest.mark.parametrize(
    "packet",
    [
        packet_out(port=1, bypass=0),
        packet_out(port=512, bypass=0, pad=0),
        packet_out(port=1, bypass=0, pad=0, other=0),
        p4r.PacketOut(metadata=[{"metadata_id": 1, "value": b""}]),
        p4r.PacketOut(metadata=[{"metadata_id": i, "value": b"\1"} for i in (1, 1, 2, 3)]),
    ],
)
def test_a_packet_out_that_does_not_fill_its_header_is_refused(packet: p4r.PacketOut) -> None:
    with refused(rpc_code.INVALID_ARGUMENT):
        HEADER.build(packet)


def test_a_frame_shorter_than_the_header_is_no_packet_in() -> None:
    assert HEADER.parse(b"\1") is None


def test_without_a_controller_header_the_frame_is_the_payload() -> None:
    none = ControllerHeader([])
    parsed = none.parse(b"frame")
    assert parsed is not None
    assert (parsed.payload, len(parsed.metadata)) == (b"frame", 0)
    assert none.build(p4r.PacketOut(payload=b"frame")) == b"frame"


# --- error details ------------------------------------------------------------------------------


def unpack(status: rpc_status.Status) -> list[p4r.Error]:
    errors = []
    for detail in status.details:
        error = p4r.Error()
        assert detail.Unpack(error)
        errors.append(error)
    return errors


def test_a_batch_reports_one_error_for_each_update() -> None:
    status = batch_status([None, invalid_argument("bad mask"), None])
    assert status.code == rpc_code.UNKNOWN
    assert "bad mask" in status.message
    errors = unpack(status)
    assert [e.canonical_code for e in errors] == [
        rpc_code.OK,
        rpc_code.INVALID_ARGUMENT,
        rpc_code.OK,
    ]
    assert errors[1].message == "bad mask"


def test_the_details_of_a_large_batch_fit_a_header() -> None:
    wordy = batch_status([invalid_argument("x" * 200)] * 500)
    assert wordy.ByteSize() <= MAX_DETAILS_BYTES
    assert len(unpack(wordy)) == 500
    huge = batch_status([invalid_argument("x")] * 20_000)
    assert huge.ByteSize() <= MAX_DETAILS_BYTES
    assert "20000 of 20000" in huge.message
