"""The TNA program's behaviour is v1model's, as far as a model can tell (tna_model.py says what it
takes from the compiler's output, and what not).

Oracle: the STF scenarios and the tests of tests/p4, which were written for v1model; where the two
targets differ on purpose, a test here says how. Blind to placement, gateways, timing, and whatever
only hardware does.
"""

from __future__ import annotations

import functools
import inspect
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import test_p4_chunks
import test_p4_coalesce
import test_p4_forwarding
import test_p4_groups
import test_p4_guards
import test_p4_heat
import test_p4_resident
import test_p4_writes
from kvcast.p4 import artefact, profiles
from kvcast.p4.definitions import Decision, Fill, Match
from kvcast.p4.figures import Target
from kvcast.protocol.messages import ethernet, wire
from pool_switch import KEY, NAMESPACE, PoolSwitch, content_of, endpoint, ports
from tna_mau import ALU_OPERATIONS, PARTIAL_WRITES, Mau, StatefulAlu, behaviour_of
from tna_model import TnaModel, run_stf
from tna_pool import TnaPool

TARGETS = ("tofino1", "tofino2")
SCENARIOS = {
    path.stem: path for path in (Path(__file__).parents[1] / "stf" / "kvcast").glob("*.stf")
}
CONTENT = content_of(6 * wire.CHUNK_BYTES)
SHORT = content_of(3 * wire.CHUNK_BYTES - 100)
MODULES = (
    test_p4_chunks,
    test_p4_coalesce,
    test_p4_forwarding,
    test_p4_groups,
    test_p4_guards,
    test_p4_heat,
    test_p4_resident,
    test_p4_writes,
)
UNSEEN = "a Tofino's ingress sees no frame length, and its parser drops what is cut uncounted"
FORGED = "forges a collision in v1model's hash; test_tenants_share_no_entry has TNA's"
PADDED = "a padded READ is answered by the home: nothing here would take the padding off"
SLOTS = "uses a slot that a Tofino has not; test_every_slot_has_cells_of_its_own has those it has"
DIFFERENT = {
    ("test_a_malformed_frame_is_dropped_and_counted", "cut in the header"): UNSEEN,
    ("test_a_malformed_frame_is_dropped_and_counted", "cut in the chunk"): UNSEEN,
    ("test_a_malformed_frame_is_dropped_and_counted", "bytes behind the datagram"): UNSEEN,
    ("test_a_plain_switch_passes_anything_on", "cut in the header"): UNSEEN,
    ("test_tenants_never_share_an_entry", ""): FORGED,
    ("test_two_slots_keep_apart", ""): SLOTS,
    ("test_a_read_is_served_once_data_has_filled_the_slot", "padded-short"): PADDED,
    ("test_a_read_is_served_once_data_has_filled_the_slot", "padded-whole"): PADDED,
}
"""Tests of MODULES that do not hold on TNA (with the case's id), and why."""


# --- the scenarios --------------------------------------------------------------------------------


def without_hidden_lengths(text: str) -> str:
    """Leave out the two frames whose length disagrees with their headers in a way that a Tofino's
    ingress cannot see (test_lengths_behind_the_headers_are_not_seen)."""
    lines, skipped = text.splitlines(), ("# READ with a byte behind it", "# DATA cut in its chunk")
    kept = (line for before, line in pairwise(["", *lines]) if before not in skipped)
    return "\n".join(kept)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_scenario_passes(name: str, target: str) -> None:
    text = without_hidden_lengths(SCENARIOS[name].read_text())
    assert run_stf(TnaModel(target), text) == []


def test_a_scenario_can_fail() -> None:
    text = SCENARIOS["coalescing_join"].read_text().replace("expect 4", "expect 3", 1)
    assert run_stf(TnaModel("tofino1"), text)


# --- the tests of v1model -------------------------------------------------------------------------


@dataclass(frozen=True)
class Borrowed:
    """A test of another module: its case's id, its arguments, and what its fixture is asked for."""

    module: Any
    name: str
    case: str
    arguments: dict[str, Any]
    wanted: Any

    @property
    def label(self) -> str:
        return "-".join(filter(None, (self.module.__name__, self.name, self.case)))


def cases_of(function: Any) -> list[tuple[str, dict[str, Any]]]:
    """Its parametrizations, as pytest would name them."""
    cases: list[tuple[str, dict[str, Any]]] = [("", {})]
    for mark in getattr(function, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        named = mark.args[0]
        names = [n.strip() for n in named.split(",")] if isinstance(named, str) else list(named)
        values = list(mark.args[1])
        ids = list(mark.kwargs.get("ids") or range(len(values)))
        cases = [
            (
                f"{case}-{label}".strip("-"),
                {**known, **dict(zip(names, value if len(names) > 1 else (value,), strict=True))},
            )
            for case, known in cases
            for label, value in zip(ids, values, strict=True)
        ]
    return cases


def borrowed() -> list[Borrowed]:
    """Every test of MODULES."""
    found = []
    for module in MODULES:
        fixture = vars(module).get("pool")
        wants = getattr(getattr(fixture, "_fixture_function_marker", None), "params", None)
        for name, function in sorted(vars(module).items()):
            if not name.startswith("test_") or not callable(function):
                continue
            takes_pool = "pool" in inspect.signature(function).parameters
            for case, arguments in cases_of(function):
                for wanted in (wants or (None,)) if takes_pool else (None,):
                    label = case if wanted is None else f"{case} {wanted}".strip()
                    found.append(Borrowed(module, name, label, arguments, wanted))
    return found


class Tofino2Pool(TnaPool):
    device = "tofino2"


class HeatPool(TnaPool):
    """Ticks of 64 us, as the windows of the heat tests are counted."""

    ticks_a_lease = 15625


class Tofino2HeatPool(HeatPool):
    device = "tofino2"


POOLS = {"tofino1": (TnaPool, HeatPool), "tofino2": (Tofino2Pool, Tofino2HeatPool)}
"""The pool of a target, and for the heat tests."""


@dataclass(frozen=True)
class Request:
    """What a fixture with parameters takes."""

    param: Any


@functools.cache
def colliding_keys() -> tuple[bytes, bytes]:
    """Two keys with KEY's set in the pending interest table, and other fingerprints."""
    mau = Mau("tofino1")

    def hashed(key: bytes) -> tuple[int, int]:
        name = NAMESPACE.to_bytes(2, "big") + key + bytes(2)
        index = mau.crc("local_metadata.index", name)
        return index & 0x7FFF, index >> 15 | mau.crc("local_metadata.print", name) & ~3

    wanted, *prints = hashed(KEY)
    keys = []
    for number in range(1 << 18):
        key = number.to_bytes(16, "big")
        found, fingerprint = hashed(key)
        if found == wanted and fingerprint not in prints:
            prints.append(fingerprint)
            keys.append(key)
            if len(keys) == 2:
                return keys[0], keys[1]
    raise AssertionError("no collision")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("test", borrowed(), ids=lambda test: test.label)
def test_holds_on_tna_too(test: Borrowed, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (test.name, test.case) in DIFFERENT:
        pytest.skip(DIFFERENT[test.name, test.case])
    pool = POOLS[target][test.module is test_p4_heat]
    monkeypatch.setattr(test.module, "PoolSwitch", pool)
    monkeypatch.setattr(test_p4_coalesce, "colliding_keys", colliding_keys)
    function = vars(test.module)[test.name]
    arguments = dict(test.arguments)
    for name in inspect.signature(function).parameters:
        if name not in arguments:
            fixture = vars(test.module)[name]
            plain = getattr(fixture, "__wrapped__", fixture)
            arguments[name] = plain() if test.wanted is None else plain(Request(test.wanted))
    function(**arguments)


def test_what_is_said_to_differ_exists() -> None:
    assert set(DIFFERENT) <= {(test.name, test.case) for test in borrowed()}


# --- where TNA differs ----------------------------------------------------------------------------


def send(pool: TnaPool, port: int, raw: bytes) -> list[int]:
    return [out for out, _ in pool.switch.process(port, raw, pool.now_us)]


def test_lengths_behind_the_headers_are_not_seen() -> None:
    """Such a frame goes on, and moves state; its receiver refuses it."""
    pool = TnaPool()
    read = wire.Frame(wire.OP_READ, NAMESPACE, KEY, wanted=wire.FULL_SEGMENT)
    frame = ethernet.Encapsulation(endpoint(2), endpoint(1)).wrap(wire.encode(read))
    assert send(pool, 2, frame + b"\0") == [1]
    assert send(pool, 2, frame[:-1]) == [], "the parser finds it cut"
    assert pool.decided("new") == 1


def test_a_cut_chunk_never_becomes_part_of_a_slot() -> None:
    pool = TnaPool()
    pool.make_resident(KEY, SHORT)
    payload = SHORT[: wire.CHUNK_BYTES]
    data = wire.Frame(
        wire.OP_DATA, NAMESPACE, KEY, digest=wire.digest_of(SHORT), size=len(SHORT), payload=payload
    )
    frame = ethernet.Encapsulation(endpoint(1), endpoint(2)).wrap(wire.encode(data))
    send(pool, 1, frame[:-40])
    assert ports(pool.read(3, wanted=1, flags=wire.FLAG_PARTIAL)) == [1]
    send(pool, 1, frame)
    assert ports(pool.read(3, wanted=1, flags=wire.FLAG_PARTIAL)) == [3]


def test_a_padded_read_goes_to_the_home() -> None:
    pool = TnaPool()
    pool.make_resident(KEY, SHORT)
    pool.answer(2, SHORT)
    assert ports(pool.read(3, flags=wire.FLAG_PADDED)) == [1]


def test_tenants_share_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash the same, only the namespace tells them apart."""

    def crc(_mau: Mau, _target: str, _data: bytes) -> int:
        return 0x1234

    monkeypatch.setattr(Mau, "crc", crc)
    pool = TnaPool()
    assert ports(pool.read(2)) == [1]
    for tenant in (NAMESPACE + 1, NAMESPACE + 2):
        pool.add("namespace_guard", (3, tenant), "allow")
        other = wire.Frame(wire.OP_READ, tenant, KEY, wanted=wire.FULL_SEGMENT)
        assert ports(pool.send(3, 1, other)) == [1]
    assert (pool.decided("new"), pool.decided("collide")) == (2, 1)
    assert ports(pool.data(2, CONTENT, 0)) == [2]


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_chunk_takes_the_passes_of_the_profile(target: str) -> None:
    class Pool(TnaPool):
        device = target

    pool = Pool()
    pool.make_resident(KEY, SHORT)
    pool.answer(2, SHORT)
    rows = profiles[target].passes_per_chunk
    before = pool.model.passes
    out = pool.read(3)
    assert [r.frame.chunk for r in out] == [0, 1, 2]
    assert b"".join(bytes(r.frame.payload) for r in out)[: len(SHORT)] == SHORT
    # The READ itself comes by once for each chunk, and each chunk once for each row.
    assert pool.model.passes - before == 3 + 3 * rows


@pytest.mark.parametrize("target", TARGETS)
def test_the_bytes_that_go_round_are_those_of_the_figures(target: str) -> None:
    class Pool(TnaPool):
        device = target

    figures = Target.load(target)
    pool = Pool()
    pool.make_resident(KEY, SHORT)
    pool.data(2, CONTENT, 0)
    pool.model.rounds.clear()
    pool.data(2, SHORT, 0)
    assert sorted(pool.model.rounds) == sorted(figures.stored_frames)
    pool.data(2, SHORT, 1)
    pool.model.rounds.clear()
    pool.read(3, wanted=0b11, flags=wire.FLAG_PARTIAL)
    # Behind the last chunk there is none to go on to.
    assert sorted([*pool.model.rounds, figures.header_bytes]) == sorted(2 * figures.served_frames)


@pytest.mark.parametrize("slot", [0, 63, -1])
@pytest.mark.parametrize("target", TARGETS)
def test_every_slot_has_cells_of_its_own(target: str, slot: int) -> None:
    class Pool(TnaPool):
        device = target

    slots = profiles[target].slots
    pool = Pool()
    neighbours = {slot % slots: KEY, (slot + 1) % slots: bytes(16), (slot + 64) % slots: KEY[::-1]}
    content = {key: content_of(wire.SEGMENT_BYTES, seed=key[0] + 1) for key in neighbours.values()}
    chunks = (0, 1, 31, 32, 63)
    for place, key in neighbours.items():
        pool.make_resident(key, content[key], slot=place)
        for chunk in chunks:
            pool.data(2, content[key], chunk, key=key)
    for key, expected in content.items():
        # All at once, and each alone: the last chunk of a READ begins its round another way.
        for some in (chunks, *((chunk,) for chunk in chunks)):
            wanted = sum(1 << chunk for chunk in some)
            out = pool.read(3, key=key, wanted=wanted, flags=wire.FLAG_PARTIAL)
            assert [(r.port, r.frame.chunk) for r in out] == [(3, chunk) for chunk in some]
            for r in out:
                at = r.frame.chunk * wire.CHUNK_BYTES
                assert bytes(r.frame.payload) == expected[at : at + wire.CHUNK_BYTES]


def test_an_eviction_sends_the_rest_to_the_home() -> None:
    pool = TnaPool()
    handle = pool.make_resident(KEY, CONTENT)
    pool.answer(2, CONTENT)
    # After the READ has passed twice: chunks 0 and 1 are being gathered.
    pool.model.between[pool.model.passes + 3] = lambda: pool.table("resident").delete(handle)
    out = pool.read(3, tag=5)
    (rest,) = [r for r in out if r.frame.op == wire.OP_READ]
    assert (rest.port, rest.destination) == (1, endpoint(1))
    assert rest.frame.flags == wire.FLAG_PARTIAL
    assert rest.frame.digest == wire.digest_of(CONTENT)
    assert (rest.frame.tag, rest.frame.size, rest.frame.chunk) == (5, 0, 0)
    served = [r for r in out if r.frame.op == wire.OP_DATA]
    assert served == [], "a chunk of which not all rows were gathered is dropped, and read again"
    assert rest.frame.wanted in (0b111110, 0b111100)


def test_a_new_generation_stops_what_is_being_stored() -> None:
    pool = TnaPool()
    handle = pool.make_resident(KEY, SHORT, slot=3, generation=1)

    def admit_anew() -> None:
        pool.table("resident").delete(handle)
        pool.make_resident(KEY, SHORT, slot=3, generation=2)

    pool.model.between[pool.model.passes + 4] = admit_anew
    pool.data(2, SHORT, 0)
    assert ports(pool.read(3, wanted=1, flags=wire.FLAG_PARTIAL)) == [1]


# --- the stateful ALUs, against the rules ---------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_pending_alus_follow_the_rules(target: str) -> None:
    """What each instruction sequence of the assembly does to an entry, for all there can be."""
    model = TnaModel(target)
    mine, other, now = 0x70001, 0x70003, 1 << 20
    for name in model.interests:
        part = name.rsplit("interest_step", 1)[1]
        alu = model.alus[f"pending.pending_interest{part}"]
        for fingerprint in (0, mine, other):
            for age in (0, 16, 17, now):
                stale, is_mine = age > 16, fingerprint == mine
                expected = {
                    "ask": (mine, now) if stale else (fingerprint, now - age),
                    "ask_again": (mine, now) if stale or is_mine else (fingerprint, now - age),
                    "answer": (fingerprint, now if is_mine else now - age),
                    "end": (0, 0) if is_mine else (fingerprint, now - age),
                }
                for step, entry in expected.items():
                    alu.memory[5] = {"lo": fingerprint, "hi": now - age}
                    fields = {"local_metadata.fingerprint": mine, "local_metadata.clock": now}
                    phv = defaultdict(int, fields)
                    said = alu.execute(f"pending_{step}{part}", 5, phv)
                    found = alu.memory[5]
                    assert (found["lo"], found["hi"]) == entry, (step, fingerprint, age)
                    whose = "MINE" if is_mine else "OTHER"
                    expected_match = Match[f"{whose}_{'STALE' if stale else 'FRESH'}"]
                    assert said == expected_match, (step, fingerprint, age)


@pytest.mark.parametrize("target", TARGETS)
def test_port_alus_follow_the_rules(target: str) -> None:
    model = TnaModel(target)
    fields = {"local_metadata.port_bits": 0b0110, "local_metadata.waiting": 0b10000}
    phv = defaultdict(int, fields)
    for part in ("first", "second"):
        alu = model.alus[f"pending.pending_ports_{part}"]
        for step, said, left in (
            ("join", 0b1110, 0b1110),
            ("open", 0b1010, 0b0110),
            ("read", 0b11010, 0b1010),
            ("take", 0b11010, 0),
        ):
            alu.memory[9] = {"lo": 0b1010, "hi": 0}
            assert alu.execute(f"pending_{step}_ports_{part}", 9, phv) == said, step
            assert alu.memory[9]["lo"] == left, step


@pytest.mark.parametrize("target", TARGETS)
def test_validity_alus_follow_the_rules(target: str) -> None:
    model = TnaModel(target)
    for half, shift in (("low", 0), ("high", 32)):
        alu: StatefulAlu = model.alus[f"slot_validity.valid_{half}"]
        fields = {"local_metadata.generation": 4, "local_metadata.chunk_bit": 0b100 << shift}
        phv = defaultdict(int, fields)
        alu.memory[1] = {"lo": 3, "hi": 0b1011}
        assert alu.execute(f"slot_validity_read_{half}", 1, phv) == 0, "another generation's"
        alu.execute(f"slot_validity_store_{half}", 1, phv)
        assert alu.memory[1] == {"lo": 4, "hi": 0b100}
        phv["local_metadata.chunk_bit"] = 0b1 << shift
        alu.execute(f"slot_validity_store_{half}", 1, phv)
        assert alu.execute(f"slot_validity_read_{half}", 1, phv) == 0b101


@pytest.mark.parametrize("target", TARGETS)
def test_heat_alus_follow_the_rules(target: str) -> None:
    model = TnaModel(target)
    for row in range(3):
        alu = model.alus[f"heat.heat_row{row}"]
        phv = defaultdict(int, {"local_metadata.heat_window": 6})
        counts = [alu.execute(f"heat_count_row{row}", 2, phv) for _ in range(3)]
        assert counts == [1, 2, 3]
        phv["local_metadata.heat_window"] = 7
        assert alu.execute(f"heat_count_row{row}", 2, phv) == 1
        alu.memory[2]["hi"] = 0xFFFF
        assert alu.execute(f"heat_count_row{row}", 2, phv) == 0xFFFF, "it saturates"


@pytest.mark.parametrize("lease", [1, 16, 17, 32, 33, 100, 312, 16384, 32768, 1 << 31])
def test_a_lease_is_rounded_up_to_a_power_of_two(lease: int) -> None:
    model = TnaModel("tofino1")
    phv = defaultdict(int, {"local_metadata.lease_ticks": lease})
    shift = int(model.mau.const("lease_scale", phv)[0].removeprefix("shift_"))
    assert 16 << shift >= min(lease, profiles["tofino1"].longest_lease_ticks)
    assert shift == 0 or 16 << (shift - 1) < lease


# --- what the model takes on trust ----------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_slices_that_the_compiler_does_not_place_are_known(target: str) -> None:
    """A new write of a part of a field must be looked at, and its place put down in tna_mau.py."""
    mau = Mau(target)
    found = set()
    cleared = {(action, field) for action, field, _ in PARTIAL_WRITES}
    for name, table in mau.tables.items():
        if name.startswith("egresshdr."):
            continue
        for action, compiled in table["actions"].items():
            for operation, field, *rest in compiled["does"]:
                whole = (1 << mau.widths.get(field, 64)) - 1
                if operation not in ALU_OPERATIONS or rest[0] in (0, whole):
                    continue
                if str(rest[1]).startswith("KvcastIngress.pending."):
                    continue  # a Tofino 1's ALU hands over four bits of eight
                if rest[1:] == [0] and (action, field) not in cleared:
                    continue  # what the compiler writes when a container changes hands
                # A statement of `apply` has the name of its file and line.
                found.add((re.sub(r"^[a-z_]+\d+$", "", action), field, rest[0]))
    assert found == PARTIAL_WRITES


@pytest.mark.parametrize("target", TARGETS)
def test_every_table_and_register_of_the_model_is_placed(target: str) -> None:
    """The steps, the tables and the resource report name the same things."""
    mau = Mau(target)
    steps = [*mau.compiled_steps("ingress"), *mau.compiled_steps("egress")]
    assert {step["table"] for step in steps if "table" in step} == set(mau.tables)
    path = artefact(target).resources
    assert path is not None
    report = json.loads(path.read_bytes())
    registers = {
        name.removesuffix(" (stateful)").removeprefix("KvcastIngress.")
        for name in report["tables"]
        if name.endswith("(stateful)")
    }
    assert registers == set(mau.alus)
    executed = {
        primitive[1].removeprefix("KvcastIngress.")
        for table in mau.tables.values()
        for action in table["actions"].values()
        for primitive in action["does"]
        if primitive[0] == "Execute"
    }
    assert executed == registers


# --- mutation -------------------------------------------------------------------------------------


def _does(compiled: dict[str, Any], table: str, action: str) -> list[Any]:
    does: list[Any] = compiled["tables"][table]["actions"][action]["does"]
    return does


def _forget(table: str, action: str, field: str) -> Callable[[dict[str, Any]], None]:
    """An action that does not assign a field."""

    def plant(compiled: dict[str, Any]) -> None:
        does = _does(compiled, table, action)
        kept = [primitive for primitive in does if primitive[1] != field]
        assert len(kept) < len(does)
        does[:] = kept

    return plant


def _condition(was: str, becomes: str) -> Callable[[dict[str, Any]], None]:
    """A gateway that asks for something else."""

    def plant(compiled: dict[str, Any]) -> None:
        steps = [*compiled["ingress"], *compiled["egress"]]
        found = [step for step in steps if step.get("condition") == was]
        assert found
        for step in found:
            step["condition"] = becomes

    return plant


def _instruction(
    register: str, action: str, was: str, becomes: str | None
) -> Callable[[dict[str, Any]], None]:
    """A stateful ALU with another instruction, or with one less."""

    def plant(compiled: dict[str, Any]) -> None:
        changed = 0
        for name, program in compiled["stateful"].items():
            for called, lines in program["actions"].items():
                if (
                    re.sub("_(whole|lower|upper|first|second)$", "", name).endswith(register)
                    and action in called
                ):
                    changed += sum(was in line for line in lines)
                    lines[:] = [
                        line.replace(was, becomes or "")
                        for line in lines
                        if was not in line or becomes is not None
                    ]
        assert changed

    return plant


def _swapped(table: str, one: int, other: int) -> Callable[[dict[str, Any]], None]:
    """Two constant entries in the wrong order."""

    def plant(compiled: dict[str, Any]) -> None:
        entries = compiled["tables"][table]["entries"]
        entries[one], entries[other] = entries[other], entries[one]

    return plant


def _selects_nothing(gress: str) -> Callable[[dict[str, Any]], None]:
    """A parser that takes each state's first transition, as a compiler once made them."""

    def plant(compiled: dict[str, Any]) -> None:
        for state in compiled["parsers"][gress]["states"].values():
            state["match"] = []
            for row in state["rows"]:
                row["pattern"] = ""

    return plant


def _extracts_early(field: str) -> Callable[[dict[str, Any]], None]:
    """A field that is taken from a byte before its place, wherever ingress extracts it."""

    def plant(compiled: dict[str, Any]) -> None:
        found = 0
        for state in compiled["parsers"]["ingress"]["states"].values():
            for row in state["rows"]:
                for extract in row["extract"]:
                    if extract[2] == field:
                        extract[:2] = extract[0] - 8, extract[1] - 8
                        found += 1
        assert found

    return plant


def scenario(name: str) -> Callable[[str, dict[str, Any]], None]:
    def check(target: str, compiled: dict[str, Any]) -> None:
        text = without_hidden_lengths(SCENARIOS[name].read_text())
        assert run_stf(TnaModel(target, compiled), text) == []

    return check


def a_slot_of_one_chunk(target: str, compiled: dict[str, Any]) -> None:
    """The last slot serves a segment of one chunk."""

    class Pool(TnaPool):
        device = target

    Pool.compiled = compiled
    pool = Pool()
    content = content_of(wire.CHUNK_BYTES)
    pool.make_resident(KEY, content, slot=profiles[target].slots - 1)
    pool.make_resident(KEY[::-1], CONTENT, slot=profiles[target].slots // 2 - 1)
    pool.answer(2, content)
    (received,) = pool.read(3)
    assert bytes(received.frame.payload) == content


def a_read_after_the_end_is_new(target: str, compiled: dict[str, Any]) -> None:
    class Pool(TnaPool):
        device = target

    Pool.compiled = compiled
    pool = Pool()
    for _ in range(2):
        pool.read(2)
        pool.answer(2, SHORT)
    assert (pool.decided("new"), pool.decided("expired")) == (2, 0)


PLANTS: dict[
    str, tuple[Callable[[dict[str, Any]], None], Callable[[str, dict[str, Any]], None]]
] = {
    "ingress selects nothing": (_selects_nothing("ingress"), scenario("forwarding")),
    "egress selects nothing": (_selects_nothing("egress"), scenario("forwarding")),
    "a field is extracted early": (_extracts_early("hdr.kvcast.op"), scenario("coalescing_join")),
    "joiners are not remembered": (
        _instruction("pending_ports", "join_ports", "or lo,", "alu_a lo,"),
        scenario("coalescing_join"),
    ),
    "the end leaves who waited": (
        _instruction("pending_ports", "take_ports", "alu_a lo, 0", None),
        a_read_after_the_end_is_new,
    ),
    "the end leaves the entry": (
        _instruction("pending_interest", "end", ", lo, 0", None),
        scenario("coalescing_join"),
    ),
    "no repeat goes on": (_swapped("coalescing", 8, 11), scenario("coalescing_retry")),
    "answers are not shared": (
        _condition("(local_metadata.is_answer == 1)", "(local_metadata.is_answer == 0)"),
        scenario("port_set"),
    ),
    "a copy keeps its header": (
        _forget("tbl_fill_fill", "fill", "hdr.round.again"),
        scenario("serving"),
    ),
    "nothing is refused": (
        _forget("gate", "refuse", "local_metadata.refused"),
        scenario("port_guard"),
    ),
    "a stale slot serves": (
        _instruction("valid_low", "read_low", "output cmp", "output !cmp"),
        scenario("serving_validity"),
    ),
    "a served READ keeps its op": (
        _forget("tbl_served_data_become_data", "become_data", "hdr.kvcast.op"),
        scenario("serving"),
    ),
    "copies are not filtered": (
        _condition("(local_metadata.member == 0)", "(local_metadata.member == 77)"),
        scenario("coalescing_join"),
    ),
    "the last row is the first": (
        _forget("departure", "split_last", "hdr.round.row"),
        a_slot_of_one_chunk,
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str, target: str) -> None:
    plant, check = PLANTS[name]
    check(target, {})
    compiled = behaviour_of(target)
    plant(compiled)
    with pytest.raises((AssertionError, wire.WireError)):
        check(target, compiled)


def test_a_forgotten_bank_is_found() -> None:
    """As it was once, in the source: only a Tofino 2 has a second bank."""
    compiled = behaviour_of("tofino2")
    _forget("departure", "split_last", "hdr.round.bank")(compiled)
    with pytest.raises(AssertionError):
        a_slot_of_one_chunk("tofino2", compiled)


# --- both at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("target", TARGETS)
def test_both_targets_do_the_same(target: str, seed: int) -> None:
    """One random history on both: what comes out, where, and what is counted."""

    class Pool(TnaPool):
        device = target
        ticks_a_lease = 15625  # ticks of 64 us, as v1model's

    chance = random.Random(seed)
    lease = 1024
    one, two = PoolSwitch(lease_ticks=lease), Pool(lease_ticks=lease)
    keys = [bytes([number]) * 16 for number in range(4)]
    contents = [content_of(wire.CHUNK_BYTES * size, seed=size) for size in (1, 2, 3, 5)]
    generation = 0
    handles: dict[int, list[int]] = {}
    for step in range(120):
        number = chance.randrange(4)
        key, content = keys[number], contents[number]
        reader = chance.choice((2, 3, 4))
        kind = chance.choices(
            ("read", "data", "miss", "admit", "evict", "wait"), (9, 6, 1, 1, 1, 1)
        )[0]
        now = one.now_us + 64
        if kind == "wait":
            now += chance.choice((0, 2 * lease)) * 64
        one.now_us = two.now_us = now
        out: list[Any] = []
        flags = chance.choice((0, 0, 0, wire.FLAG_RETRY, wire.FLAG_PARTIAL))
        wanted = chance.randrange(1, 8) if flags == wire.FLAG_PARTIAL else wire.FULL_SEGMENT
        chunk = chance.randrange(wire.CELLS.chunks_of(len(content), 0))
        last = chance.choice((0, wire.FLAG_LAST))
        digest = chance.choice((None, None, None, 7))
        if kind == "admit" and number not in handles:
            generation += 1
            handles[number] = [
                pool.make_resident(key, content, slot=number, generation=generation)
                for pool in (one, two)
            ]
        elif kind == "evict" and number in handles:
            for pool, handle in zip((one, two), handles.pop(number), strict=True):
                pool.table("resident").delete(handle)
        for pool in (one, two):
            if kind == "read":
                out.append(pool.read(reader, key=key, flags=flags, wanted=wanted))
            elif kind == "data":
                out.append(pool.data(reader, content, chunk, key=key, flags=last, digest=digest))
            elif kind == "miss":
                out.append(pool.send(1, reader, wire.Frame(wire.OP_MISS, NAMESPACE, key, chunk=1)))
        if out:
            assert sorted(out[0], key=repr) == sorted(out[1], key=repr), (seed, step, kind)
    for decision in Decision.counted():
        counted = [pool._count("decisions", decision) for pool in (one, two)]
        assert counted[0] == counted[1], (seed, decision)
    for fill in Fill.counted():
        assert one._count("fills", fill) == two._count("fills", fill)
