"""The compiled engine where it is more than a second engine: the native entry, memory, threads.

Oracle: the rules of `llvm.abi`, and the reference engine for what leaves the switch.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kvcast.native.subset import ctypes_of, size_of
from kvcast.p4 import artefact
from kvcast.switchsim import loader
from kvcast.switchsim.engine import Engine, SwitchStats
from kvcast.switchsim.ir import Exact, Lpm, Program, ProgramError, UnsupportedConstruct
from kvcast.switchsim.llvm.abi import EPOCH_IDLE, MAX_FRAME_BYTES, PROCESS, Desc, Outbox
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference.switch import Switch

PROGRAMS = Path(__file__).resolve().parents[1] / "stf" / "programs"


def program(name: str) -> Program:
    return loader.load_file(PROGRAMS / f"{name}.json")


def loaded(name: str) -> CompiledSwitch:
    switch = CompiledSwitch()
    switch.load(program(name))
    return switch


def pool_switch() -> CompiledSwitch:
    switch = CompiledSwitch()
    switch.load(loader.load_file(artefact("v1model").json))
    return switch


class Caller:
    """Calls the native entry as a packet loop does."""

    def __init__(self, switch: CompiledSwitch, capacity: int = 1 << 20, frames: int = 64) -> None:
        self.entry = switch.native_entry
        self.process = PROCESS(self.entry.process)
        self.bytes = ctypes.create_string_buffer(capacity)
        self.descs: Any = (ctypes_of(Desc) * frames)()
        self.out: Any = ctypes_of(Outbox)(
            ctypes.addressof(self.bytes), capacity, 0, ctypes.addressof(self.descs), frames, 0, 0
        )

    def run(self, port: int, frame: bytes, now_us: int = 0) -> int:
        return self.process(
            self.entry.context, frame, len(frame), port, now_us, ctypes.byref(self.out)
        )

    def frames(self) -> list[tuple[int, bytes]]:
        return [
            (d.port, self.bytes.raw[d.offset : d.offset + d.length])
            for d in self.descs[: self.out.count]
        ]


# --- the native entry -------------------------------------------------------------------------


def test_outbox_structures_have_the_sizes_of_the_interface() -> None:
    assert (size_of(Desc), size_of(Outbox)) == (24, 48)


def test_frames_are_appended_at_multiples_of_eight_one_call_after_another() -> None:
    switch = loaded("replication")
    switch.set_multicast_group(5, [(3, 0), (1, 0), (3, 1)])
    caller = Caller(switch)
    frame = bytes([1, 0]) + b"xyz"
    first = caller.run(1, frame)
    second = caller.run(2, frame)
    assert first > 1
    assert caller.out.count == first + second
    assert all(d.offset % 8 == 0 and d.priority == 0 for d in caller.descs[: caller.out.count])
    reference = Switch()
    reference.load(program("replication"))
    reference.set_multicast_group(5, [(3, 0), (1, 0), (3, 1)])
    assert caller.frames() == reference.process(1, frame, 0) + reference.process(2, frame, 0)


@pytest.mark.parametrize(("capacity", "frames"), [(16, 64), (1 << 20, 1), (0, 0)])
def test_what_does_not_fit_is_dropped_and_counted(capacity: int, frames: int) -> None:
    switch = loaded("replication")
    switch.set_multicast_group(5, [(n, 0) for n in range(1, 6)])
    roomy, tight = Caller(switch), Caller(switch, max(1, capacity), max(1, frames))
    tight.out.capacity, tight.out.max_descs = capacity, frames
    wanted = roomy.run(1, bytes([1, 0]))
    sent = tight.run(1, bytes([1, 0]))
    assert sent == tight.out.count < wanted
    assert tight.out.overflows == wanted - sent
    assert tight.frames() == roomy.frames()[:sent]


def test_frame_that_is_too_long_is_dropped_and_counted() -> None:
    switch = loaded("forwarding")
    caller = Caller(switch)
    assert caller.run(1, bytes(MAX_FRAME_BYTES + 1)) == 0
    assert switch.process(1, bytes(MAX_FRAME_BYTES + 1), 0) == []
    assert switch.stats.dropped_abandoned == 2
    assert switch.stats.frames_in == 2
    caller.run(1, bytes(MAX_FRAME_BYTES))
    assert switch.stats.ingress_passes == 1


def test_entry_lives_on_when_another_program_is_loaded() -> None:
    switch = loaded("forwarding")
    switch.process(1, bytes(60), 0)
    caller = Caller(switch)
    before = caller.entry
    switch.load(program("headers"))
    gc.collect()
    assert switch.native_entry.context != before.context
    caller.run(1, bytes(60))  # of the old program, whose memory is still there
    assert switch.stats.frames_in == 1


def test_without_a_program_there_is_no_entry() -> None:
    switch = CompiledSwitch()
    with pytest.raises(ProgramError, match="no program"):
        _ = switch.native_entry
    with pytest.raises(ProgramError, match="no program"):
        switch.set_multicast_group(1, [])


def test_digest_counter_moves_with_each_digest() -> None:
    switch = loaded("externs")
    entry = switch.native_entry
    pending = ctypes.c_uint64.from_address(entry.digest_pending_address)
    assert pending.value == 0
    digest_op = next(
        op for op in range(32) if _raises_digest(switch, bytes([op, 5]) + bytes(9), pending)
    )
    before = pending.value
    switch.process(1, bytes([digest_op, 5]) + bytes(9), 0)
    assert pending.value == before + 1
    assert len(switch.take_digests()) == pending.value
    assert switch.take_digests() == []


def _raises_digest(switch: CompiledSwitch, frame: bytes, pending: ctypes.c_uint64) -> bool:
    before = pending.value
    switch.process(1, frame, 0)
    return pending.value > before


def test_slow_way_leaves_the_epoch_as_it_was() -> None:
    switch = loaded("forwarding")
    epoch = ctypes.c_uint64.from_address(switch.native_entry.epoch_address)
    assert epoch.value == EPOCH_IDLE
    switch.process(1, bytes(60), 0)
    assert epoch.value == EPOCH_IDLE


# --- loading ----------------------------------------------------------------------------------


def test_statistics_go_on_over_loads() -> None:
    switch = loaded("forwarding")
    switch.process(1, bytes(60), 0)
    switch.load(program("headers"))
    switch.process(1, bytes(60), 0)
    assert switch.stats.frames_in == 2
    assert switch.stats.as_dict()["frames_in"] == 2
    assert isinstance(switch.stats, SwitchStats)


def test_program_that_cannot_be_compiled_leaves_the_present_one(tmp_path: Path) -> None:
    source = json.loads((PROGRAMS / "externs.json").read_text())
    for calculation in source["calculations"]:
        calculation["algo"] = "round_robin_consistent"
    refused = loader.load(json.dumps(source))
    switch = loaded("forwarding")
    with pytest.raises(UnsupportedConstruct, match="round_robin_consistent"):
        switch.load(refused)
    assert switch.program is not None
    assert switch.program.name == program("forwarding").name
    switch.process(1, bytes(60), 0)
    assert switch.stats.frames_in == 1


def test_const_entries_that_are_twice_the_same_are_refused() -> None:
    source = json.loads(Path(artefact("v1model").json).read_text())
    for pipeline in source["pipelines"]:
        for table in pipeline["tables"]:
            if table["name"].endswith("decisions"):
                table["entries"].append(table["entries"][0])
                table["max_size"] += 1
    with pytest.raises(ProgramError, match="this key already"):
        CompiledSwitch(use_cache=False).load(loader.load(json.dumps(source)))


# --- tables -----------------------------------------------------------------------------------


def l2_frame(mac: int) -> bytes:
    return mac.to_bytes(6, "big") + bytes(6) + b"\x12\x34" + bytes(46)


def ports_of(switch: Engine, macs: Sequence[int]) -> list[int]:
    """Where frames to these addresses go; -1: nowhere."""
    return [sent[0][0] if (sent := switch.process(9, l2_frame(mac), 0)) else -1 for mac in macs]


def to_port(switch: Engine, mac: int, port: int) -> int:
    return switch.tables["l2_forward"].add([Exact(mac)], 0, _ACTION, [port, 0])


_ACTION = "KvcastIngress.l2_forward.to_port"


@pytest.fixture(autouse=True)
def _name_of_the_action() -> None:
    global _ACTION
    spec = loader.load_file(artefact("v1model").json)
    (_ACTION,) = [
        a.name
        for a in spec.actions
        if a.name.endswith("to_port") and [p.name for p in a.parameters] == ["port", "port_bit"]
    ]


def test_hash_table_grows_shrinks_and_finds_what_is_there() -> None:
    switch, rng = pool_switch(), random.Random(4)
    present: dict[int, tuple[int, int]] = {}
    for step in range(6000):
        if present and rng.random() < (0.35 if step < 3000 else 0.7):
            mac = rng.choice(list(present)) if step % 10 == 0 else next(iter(present))
            switch.tables["l2_forward"].delete(present.pop(mac)[0])
        else:
            mac, port = rng.getrandbits(48), rng.randrange(1, 9)
            if mac not in present:
                present[mac] = (to_port(switch, mac, port), port)
    some = rng.sample(sorted(present), min(200, len(present)))
    assert ports_of(switch, some) == [present[mac][1] for mac in some]
    absent = [rng.getrandbits(48) for _ in range(100)]
    assert ports_of(switch, absent) == [-1] * 100
    switch.tables["l2_forward"].clear()
    assert ports_of(switch, some) == [-1] * len(some)


def test_table_takes_entries_up_to_its_size_again_and_again() -> None:
    switch = pool_switch()
    table = switch.tables["egress_host"]
    name = switch.program.actions[table.spec.actions[0]].name if switch.program else ""
    for _ in range(5):
        for port in range(table.size):
            table.add([Exact(port)], 0, name, [port, 0, 0, 0])
        assert len(table) == table.size
        table.clear()


def test_longest_prefix_wins_in_whatever_order_prefixes_come() -> None:
    switch = pool_switch()
    reference = Switch()
    assert switch.program is not None
    reference.load(switch.program)
    rng = random.Random(3)
    lengths = list(range(33))
    rng.shuffle(lengths)
    name = next(
        switch.program.actions[n].name
        for n in switch.tables["ipv4_route"].spec.actions
        if switch.program.actions[n].parameters
    )
    for one in (switch, reference):
        table = one.tables["ipv4_route"]
        for length in lengths:
            table.add([Lpm(0x0A0B0C0D, length)], 0, name, [1, 0, 0, 0])
        for length in lengths[:16]:
            table.delete(table.find([Lpm(0x0A0B0C0D, length)]).handle)
    rows = [[(e.key, e.handle) for e in one.tables["ipv4_route"]] for one in (switch, reference)]
    assert rows[0] == rows[1]


def test_direct_counter_outlives_a_change_and_is_kept_behind_the_removal() -> None:
    switch = loaded("forwarding")
    name, table = next((n, t) for n, t in switch.tables.items() if t.has_counters and t.spec.key)
    assert switch.program is not None
    del name
    spec = switch.program.actions[table.spec.actions[0]]
    key = [_any(k.match, k.width) for k in table.spec.key]
    handle = table.add(key, 1, spec.name, [0] * len(spec.parameters))
    table.write_counter(handle, 5, 600)
    table.modify(handle, spec.name, [0] * len(spec.parameters))
    entry = table.get(handle)
    assert (entry.packets, entry.bytes) == (5, 600)
    table.delete(handle)
    assert (entry.packets, entry.bytes) == (5, 600)
    again = table.add(key, 1, spec.name, [0] * len(spec.parameters))
    assert table.read_counter(again) == (0, 0)


def _any(kind: str, width: int) -> Exact | Lpm:
    from kvcast.switchsim.ir import Range, Ternary

    return {  # type: ignore[return-value]
        "exact": Exact(0),
        "lpm": Lpm(0, 0),
        "ternary": Ternary(0, 0),
        "range": Range(0, (1 << width) - 1),
    }[kind]


# --- threads ----------------------------------------------------------------------------------


class Loop(threading.Thread):
    """Runs frames through the native entry as fast as it can, in batches."""

    def __init__(self, switch: CompiledSwitch, frames: Sequence[bytes]) -> None:
        super().__init__(daemon=True)
        self.caller = Caller(switch)
        self.given = frames
        self.stop = False
        self.batches = 0
        self.seen: set[tuple[int, ...]] = set()

    def run(self) -> None:
        epoch = ctypes.c_uint64.from_address(self.caller.entry.epoch_address)
        out = self.caller.out
        number = 0
        while not self.stop:
            number += 1
            epoch.value = number
            for frame in self.given:
                out.used = out.count = 0
                self.caller.run(9, frame)
                self.seen.add(tuple(d.port for d in self.caller.descs[: out.count]))
            self.batches += 1
        epoch.value = EPOCH_IDLE


@pytest.mark.slow
def test_a_packet_sees_an_entry_whole_or_not_at_all_while_tables_change() -> None:
    """Entries send to (p, p, p); a half-written group or entry would mix numbers."""
    switch = pool_switch()
    macs = [0x020000000000 + n for n in range(64)]
    assert switch.program is not None
    flood = next(a for a in switch.program.actions if a.name.endswith("flood") and not a.parameters)
    switch.set_multicast_group(1, [(1, 0)] * 3)
    switch.tables["l2_forward"].add([Exact(macs[0])], 0, flood.name, [])
    loop = Loop(switch, [l2_frame(mac) for mac in macs])
    loop.start()
    rng = random.Random(1)
    deadline = time.monotonic() + 1.5
    present: dict[int, int] = {}
    writes = 0
    while time.monotonic() < deadline:
        writes += 1
        port = rng.randrange(2, 9)
        switch.set_multicast_group(1, [(port, 0)] * 3)
        mac = rng.choice(macs[1:])
        if mac not in present:
            present[mac] = to_port(switch, mac, port)
        elif rng.random() < 0.5:
            switch.tables["l2_forward"].delete(present.pop(mac))
        else:
            switch.tables["l2_forward"].modify(present[mac], _ACTION, [port, 0])
    loop.stop = True
    loop.join(10)
    assert not loop.is_alive()
    assert loop.batches > 0
    assert writes > 100
    # Nothing, one port, or three times the same.
    assert all(len(set(ports)) <= 1 and len(ports) in (0, 1, 3) for ports in loop.seen)
    instance = switch._instance
    assert instance is not None
    instance.reclaimer.collect()
    assert len(instance.reclaimer) == 0
    assert len(instance.heap) < 200, "blocks that were replaced are freed"


def test_memory_stays_while_a_batch_is_under_way() -> None:
    switch = pool_switch()
    epoch = ctypes.c_uint64.from_address(switch.native_entry.epoch_address)
    epoch.value = 1
    instance = switch._instance
    assert instance is not None
    switch.set_multicast_group(1, [(1, 0)])
    before = len(instance.heap)
    for _ in range(10):
        switch.set_multicast_group(1, [(1, 0)])
    assert len(instance.heap) == before + 10
    epoch.value = 3
    switch.set_multicast_group(1, [(2, 0)])
    instance.reclaimer.collect()
    assert len(instance.heap) == before + 1
    epoch.value = EPOCH_IDLE


def test_registers_and_counters_are_the_memory_that_packets_see() -> None:
    switch = pool_switch()
    register = next(r for r in switch.registers.values() if r.width == 2048)
    register.write(5, (1 << 2048) - 2)
    assert register.read(5) == (1 << 2048) - 2
    assert list(register.cells[4:7]) == [0, (1 << 2048) - 2, 0]
    register.reset()
    assert register.read(5) == 0
    (counter,) = switch.counters.values()
    counter.write(3, 4, 500)
    assert counter.read(3) == (4, 500)
    assert struct.unpack("<QQ", counter.region.read(48, 16)) == (4, 500)  # type: ignore[attr-defined]
