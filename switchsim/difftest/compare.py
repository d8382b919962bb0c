"""The engines against each other: the same frames and table writes, everything compared.

    python -m kvcast.switchsim.difftest --packets N --seed S [--json FILE]
        [--program FILE.json] [--stf FILE_OR_FOLDER] [--generated] [--checked]

Work comes in chunks; each is made from (seed, number of the chunk) alone, on two fresh switches: a
random set-up of everything that the control plane can set, then frames, some of them between
further writes. Frames walk the program's parser, with field values that its tables know; where
there are STF scenarios, one of them gives the set-up and, told over and over, half of the frames,
and all of them give frames to damage; a few frames are noise of 0 to 9216 bytes. What is compared:
the frames that leave, after each frame; what each write answers; after each chunk the statistics,
entries with their counters, registers, counters and digests. Meters show in their colours only.

With --json the file is written after every chunk, and a run with the same seed and program goes on
where the file says that the last one stopped. Random programs (--generated) are those of
`difftest_programs`, a new one for each chunk.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvcast.switchsim import ir, loader, stf
from kvcast.switchsim.control_plane.externs import ExternError, Rate
from kvcast.switchsim.control_plane.switch import ReplicationError
from kvcast.switchsim.control_plane.tables import Table, TableError
from kvcast.switchsim.difftest import programs
from kvcast.switchsim.engine import Engine
from kvcast.switchsim.ir import (
    Exact,
    Lpm,
    MatchValue,
    Program,
    ProgramError,
    Range,
    Ternary,
    UnsupportedConstruct,
)
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference.switch import Switch

MAX_FRAME = 9216
PORTS = 10
GROUPS = 6
REFUSALS = (TableError, ReplicationError, ExternError)

_T = TypeVar("_T")


class Difference(AssertionError):  # noqa: N818 - it is the result, not an error
    """The engines did not do the same."""


class Unusable(Exception):  # noqa: N818 - a program to leave out
    """The program does not load, as it should not."""


# --- values -------------------------------------------------------------------------------------


class Pools:
    """Numbers that are likely to mean something to the program."""

    def __init__(self, rng: random.Random, program: Program) -> None:
        self.rng = rng
        known: dict[int, set[int]] = {}
        for table in program.tables():
            for entry in table.entries:
                for value, key in zip(entry.key, table.key, strict=True):
                    match value:
                        case Exact(number) | Lpm(number, _) | Ternary(number, _):
                            known.setdefault(key.width, set()).add(number)
                        case Range(low, high):
                            known.setdefault(key.width, set()).update((low, high))
        self._known = {width: sorted(values) for width, values in known.items()}
        self._made: dict[int, list[int]] = {}

    def number(self, width: int) -> int:
        """A number of `width` bits."""
        rng = self.rng
        if width == 0:
            return 0
        full = (1 << width) - 1
        if width not in self._made:
            self._made[width] = [rng.getrandbits(width) for _ in range(3)] + [0, 1, full]
        roll = rng.random()
        if roll < 0.1:
            return rng.getrandbits(width)
        if roll < 0.35 and width <= 32:
            return min(full, rng.randrange(8))
        if roll < 0.6 and width in self._known:
            return rng.choice(self._known[width])
        return rng.choice(self._made[width])


# --- frames -------------------------------------------------------------------------------------


class Frames:
    """Makes frames for a program."""

    def __init__(
        self,
        rng: random.Random,
        program: Program,
        pools: Pools,
        story: Sequence[tuple[int, bytes]],
        corpus: Sequence[tuple[int, bytes]],
    ) -> None:
        """(port, frame) of the scenario that the set-up is from, in order, and of all."""
        self.rng = rng
        self.program = program
        self.pools = pools
        self.story = story
        self.corpus = corpus
        self._next = 0

    def frame(self) -> tuple[int, bytes]:
        """(port, frame)"""
        rng = self.rng
        port = rng.choice((rng.randrange(PORTS), rng.randrange(PORTS), rng.randrange(512)))
        roll = rng.random()
        if self.story and roll < 0.45:
            # Mostly as it is told, so that what builds on what went before is reached.
            port, data = self.story[self._next % len(self.story)]
            self._next += rng.choice((1, 1, 1, 1, 1, 0, 2))
            if rng.random() < 0.8:
                return port, data
        elif self.corpus and roll < 0.75:
            port, data = rng.choice(self.corpus)
            if rng.random() < 0.2:
                port = rng.randrange(PORTS)
        elif roll < 0.97:
            data = self.walk()
        else:
            size = rng.choice((0, 1, 13, 60, 1500, rng.randrange(MAX_FRAME + 1)))
            return port, rng.randbytes(size)
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4))):
            data = self.damage(data)
        return port, data[:MAX_FRAME]

    def damage(self, data: bytes) -> bytes:
        rng = self.rng
        if not data:
            return rng.randbytes(rng.randrange(4))
        near = min(len(data), 128)
        at = rng.randrange(near)
        match rng.randrange(8):
            case 0:
                return data[: rng.randrange(len(data) + 1)]
            case 1:
                return data + rng.randbytes(rng.choice((1, 7, 64, 2000, MAX_FRAME - near)))
            case 2 | 3:
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 4:
                value = rng.choice((0, 1, 2, 3, 4, 0x10, 0x7F, 0x80, 0xFF, rng.randrange(256)))
                return data[:at] + bytes([value]) + data[at + 1 :]
            case 5:
                return data[:at] + rng.randbytes(1) + data[at:]
            case 6:
                return data[:at] + data[at + 1 :]
            case _:
                other = rng.choice(self.corpus)[1] if self.corpus else self.walk()
                return data[:at] + other[at:]

    def walk(self) -> bytes:
        """A frame that takes a random path through the parser, if its fields decide on it."""
        rng, parser = self.rng, self.program.parser
        bits: list[int] = []
        forced: dict[int, int] = {}
        """Bits ahead that a lookahead has asked for."""
        starts: dict[int, int] = {}
        state_number = parser.start
        for _ in range(rng.randrange(1, 40)):
            if state_number is None or len(bits) > 8 * 1600:
                break
            state = parser.states[state_number]
            for op in state.ops:
                header: int | None = None
                varbit: ir.DataExpr | None = None
                match op:
                    case ir.Extract(header, varbit, _):
                        pass
                    case ir.ExtractNext(stack, varbit, _):
                        header = self.program.stacks[stack].headers[0]
                    case ir.ExtractNextUnion(union_stack, member, varbit, _):
                        union = self.program.union_stacks[union_stack].unions[0]
                        header = self.program.unions[union].headers[member]
                    case ir.Advance():
                        bits += [rng.getrandbits(1) for _ in range(8 * rng.randrange(4))]
                    case _:
                        pass
                if header is not None:
                    starts[header] = len(bits)
                    self._header_bits(bits, header, varbit is not None)
            for at, bit in forced.items():
                if at < len(bits):
                    bits[at] = bit
            state_number = self._step(state, bits, starts, forced)
        for at in sorted(forced):
            while at >= len(bits):
                bits.append(rng.getrandbits(1))
            bits[at] = forced[at]
        whole = bits[: len(bits) // 8 * 8]
        data = int("".join(map(str, whole)) or "0", 2).to_bytes(len(whole) // 8)
        return data + rng.randbytes(rng.choice((0, 0, 1, 20, 100, 1024)))

    def _header_bits(self, bits: list[int], header: int, varbit: bool) -> None:
        for f in self.program.headers[header].fields:
            width = f.width
            if f.varbit:
                width = 8 * self.rng.randrange(min(12, width // 8) + 1) if varbit else 0
            value = self.pools.number(width)
            bits += [value >> n & 1 for n in range(width - 1, -1, -1)]

    def _step(
        self,
        state: ir.ParserState,
        bits: list[int],
        starts: dict[int, int],
        forced: dict[int, int],
    ) -> int | None:
        rng = self.rng
        if not state.transitions or rng.random() < 0.15:
            return state.default
        t = rng.choice(state.transitions)
        left = sum(8 * ((w + 7) // 8) for w in state.key_widths)
        for part, width in zip(state.key, state.key_widths, strict=True):
            left -= 8 * ((width + 7) // 8)
            value, mask = t.value >> left, t.mask >> left
            at = None
            if isinstance(part, ir.Lookahead):
                at = len(bits) + part.offset
            elif isinstance(part, ir.FieldRef) and part.header in starts and part.field >= 0:
                fields = self.program.headers[part.header].fields
                at = starts[part.header] + sum(
                    f.width for f in fields[: part.field] if not f.varbit
                )
            elif isinstance(part, ir.LastField):
                header = self.program.stacks[part.stack].headers[0]
                fields = self.program.headers[header].fields
                if header in starts and part.field >= 0:
                    at = starts[header] + sum(f.width for f in fields[: part.field])
            if at is None:
                continue
            for n in range(width):
                shift = width - 1 - n
                if not mask >> shift & 1:
                    continue
                if at + n < len(bits):
                    bits[at + n] = value >> shift & 1
                else:
                    forced[at + n] = value >> shift & 1
        return t.next_state


# --- two switches -------------------------------------------------------------------------------


class Pair:
    """A reference and a compiled switch with the same program, written to alike."""

    def __init__(self, program: Program, seed: int, *, checked: bool, cache: bool) -> None:
        self.program = program
        self.reference = Switch(seed=seed)
        self.compiled = CompiledSwitch(seed=seed, checked=checked, use_cache=cache)
        try:
            self.reference.load(program)
        except ProgramError as error:
            try:
                self.compiled.load(program)
            except ProgramError as other:
                raise Unusable(str(other)) from other
            raise Difference(f"only the reference engine refuses the program: {error}") from error
        try:
            self.compiled.load(program)
        except UnsupportedConstruct as error:
            raise Unusable(str(error)) from error

    def both(self, what: str, action: Callable[[Engine], _T]) -> _T | None:
        """Do the same to both; a refusal must be the same, too."""
        results: list[tuple[str, object]] = []
        value: _T | None = None
        for switch in (self.reference, self.compiled):
            try:
                value = action(switch)
                results.append(("ok", value))
            except REFUSALS as error:
                results.append((type(error).__name__, str(error)))
        if results[0] != results[1]:
            raise Difference(f"{what}: {results[0]} and {results[1]}")
        return value if results[0][0] == "ok" else None

    def process(self, port: int, frame: bytes, now_us: int) -> int:
        """Gives how many frames left."""
        expected = self.reference.process(port, frame, now_us)
        actual = self.compiled.process(port, frame, now_us)
        if expected != actual:
            raise Difference(
                f"frame {frame.hex()} on port {port} at {now_us}: "
                f"{_spell(expected)} and {_spell(actual)}"
            )
        return len(actual)

    def compare(self) -> None:
        """All state that can be read."""
        a, b = self.reference, self.compiled
        if a.stats.as_dict() != b.stats.as_dict():
            mine, theirs = b.stats.as_dict(), a.stats.as_dict()
            odd = {k: (theirs[k], mine[k]) for k in theirs if theirs[k] != mine[k]}
            raise Difference(f"statistics (reference, compiled): {odd}")
        if b.traps:
            raise Difference(f"{b.traps} accesses out of bounds")
        digests = a.take_digests(), b.take_digests()
        if digests[0] != digests[1]:
            raise Difference(f"digests: {digests[0]} and {digests[1]}")
        for name, table in a.tables.items():
            rows = [_rows(table), _rows(b.tables[name])]
            if rows[0] != rows[1]:
                raise Difference(f"table {name}: {rows[0]} and {rows[1]}")
        for name, register in a.registers.items():
            cells = list(register.cells), list(b.registers[name].cells)
            if cells[0] != cells[1]:
                odd_cells = [n for n, (x, y) in enumerate(zip(*cells, strict=True)) if x != y]
                n = odd_cells[0]
                raise Difference(f"{name}[{n}]: {cells[0][n]:#x} and {cells[1][n]:#x}")
        for name, counter in a.counters.items():
            other = b.counters[name]
            for n in range(len(counter)):
                if counter.read(n) != other.read(n):
                    raise Difference(f"{name}[{n}]: {counter.read(n)} and {other.read(n)}")


def _spell(sent: Sequence[tuple[int, bytes]]) -> str:
    return "[" + ", ".join(f"{port}: {frame.hex()}" for port, frame in sent) + "]"


def _rows(table: Table) -> list[tuple[object, ...]]:
    return [
        (
            e.handle,
            e.key,
            e.priority,
            None if e.action is None else (e.action.name, e.action.arguments),
            e.member,
            e.group,
            e.packets,
            e.bytes,
            e.last_hit_us,
        )
        for e in table
    ]


# --- the control plane --------------------------------------------------------------------------


class Writer:
    """Random writes to everything that a program has."""

    def __init__(self, rng: random.Random, pair: Pair, pools: Pools) -> None:
        self.rng = rng
        self.pair = pair
        self.pools = pools
        self.program = pair.program
        self.tables = [t.name for t in self.program.tables()]
        self.loose = [t.name for t in self.program.tables() if not t.key]
        self.keyed = [t.name for t in self.program.tables() if t.key and not t.const_entries]

    def set_up(self) -> None:
        for _ in range(2):
            self.replication()
        for profile in self.pair.reference.action_profiles:
            for _ in range(4):
                self.profile(profile)
        for name in self.keyed:
            for _ in range(self.rng.choice((0, 1, 2, 4, 12))):
                self.add(name)
        for name in self.tables:
            if self.rng.random() < 0.3:
                self.default(name)
        for _ in range(4):
            self.extern()

    def write(self) -> None:
        """One random write."""
        roll = self.rng.random()
        if roll < 0.15:
            self.replication()
        elif roll < 0.25:
            self.extern()
        elif roll < 0.3 and self.tables:
            self.default(self.rng.choice(self.tables))
        elif roll < 0.4 and self.pair.reference.action_profiles:
            self.profile(self.rng.choice(list(self.pair.reference.action_profiles)))
        elif self.keyed:
            name = self.rng.choice(self.keyed)
            self.rng.choice((self.add, self.add, self.change, self.remove))(name)

    def replication(self) -> None:
        rng = self.rng
        number = rng.randrange(1, GROUPS)
        replicas = [
            (rng.randrange(PORTS), rng.choice((0, 1, 2, 255)))
            for _ in range(rng.choice((0, 1, 2, 3, 8)))
        ]
        if rng.random() < 0.1:
            self.pair.both("delete group", lambda s: s.delete_multicast_group(number))
        else:
            self.pair.both("group", lambda s: s.set_multicast_group(number, replicas))
        length = rng.choice((0, 0, 20, 100))
        if rng.random() < 0.1:
            self.pair.both("delete session", lambda s: s.delete_clone_session(number))
        else:
            self.pair.both("session", lambda s: s.set_clone_session(number, replicas, length))

    def match(self, key: ir.KeyField) -> MatchValue:
        rng, width = self.rng, key.width
        full, value = (1 << width) - 1, self.pools.number(width)
        match key.match:
            case "exact":
                return Exact(value)
            case "lpm":
                return Lpm(value, rng.choice((0, width, width // 2, rng.randrange(width + 1))))
            case "ternary":
                mask = rng.choice((0, full, full & ~1, self.pools.number(width)))
                return Ternary(value, mask)
            case _:
                other = self.pools.number(width)
                return Range(min(value, other), max(value, other))

    def action(self, table: Table) -> tuple[str, list[int]]:
        spec = self.program.actions[self.rng.choice(table.spec.actions)]
        return spec.name, [self.argument(p.width) for p in spec.parameters]

    def argument(self, width: int) -> int:
        rng = self.rng
        if width == 9:
            return rng.choice((rng.randrange(PORTS), rng.randrange(PORTS), 511))
        if width == 16 and rng.random() < 0.5:
            return rng.randrange(GROUPS)
        return self.pools.number(width)

    def add(self, name: str) -> None:
        table = self.pair.reference.tables[name]
        if not table.spec.actions:
            return
        key = [self.match(k) for k in table.spec.key]
        priority = self.rng.randrange(6)
        if table.profile is not None:
            profile = table.profile
            number = self.rng.randrange(6)
            if profile.has_selector and self.rng.random() < 0.6:
                self.pair.both(name, lambda s: s.tables[name].add_group(key, priority, number))
            else:
                self.pair.both(name, lambda s: s.tables[name].add_member(key, priority, number))
            return
        action, arguments = self.action(table)
        self.pair.both(
            f"add to {name}", lambda s: s.tables[name].add(key, priority, action, arguments)
        )

    def _handle(self, name: str) -> int | None:
        entries = list(self.pair.reference.tables[name].entries)
        return self.rng.choice(entries) if entries else None

    def change(self, name: str) -> None:
        handle, rng = self._handle(name), self.rng
        table = self.pair.reference.tables[name]
        if handle is None or not table.spec.actions:
            return
        packets, bytes_ = rng.randrange(100), rng.randrange(10000)
        if table.has_counters and rng.random() < 0.3:
            self.pair.both(
                f"counter of {name}",
                lambda s: s.tables[name].write_counter(handle, packets, bytes_),
            )
        if table.has_meters and rng.random() < 0.5:
            rates = self._rates(2)
            self.pair.both(
                f"meter of {name}", lambda s: s.tables[name].configure_meter(handle, rates)
            )
        if table.profile is not None:
            number = rng.randrange(6)
            if table.profile.has_selector and rng.random() < 0.6:
                self.pair.both(name, lambda s: s.tables[name].modify_group(handle, number))
            else:
                self.pair.both(name, lambda s: s.tables[name].modify_member(handle, number))
            return
        action, arguments = self.action(table)
        self.pair.both(
            f"change in {name}", lambda s: s.tables[name].modify(handle, action, arguments)
        )

    def remove(self, name: str) -> None:
        if self.rng.random() < 0.03:
            self.pair.both(f"clear {name}", lambda s: s.tables[name].clear())
            return
        handle = self._handle(name)
        if handle is not None:
            self.pair.both(f"delete from {name}", lambda s: s.tables[name].delete(handle))

    def default(self, name: str) -> None:
        table = self.pair.reference.tables[name]
        if not table.spec.actions:
            return
        action, arguments = self.action(table)
        if self.rng.random() < 0.2:
            self.pair.both(f"reset {name}", lambda s: s.tables[name].reset_default())
        else:
            self.pair.both(
                f"default of {name}", lambda s: s.tables[name].set_default(action, arguments)
            )

    def profile(self, name: str) -> None:
        rng, pair = self.rng, self.pair
        profile = pair.reference.action_profiles[name]
        users = [
            t for t in pair.reference.tables.values() if t.profile is profile and t.spec.actions
        ]
        if not users:
            return
        member = rng.randrange(6)
        action, arguments = self.action(rng.choice(users))

        def on(run: Callable[[Any], None]) -> None:
            pair.both(f"profile {name}", lambda s: run(s.action_profiles[name]))

        match rng.randrange(6):
            case 0 | 1:
                on(lambda p: p.add_member(member, action, arguments))
            case 2:
                on(lambda p: p.modify_member(member, action, arguments))
            case 3:
                on(lambda p: p.delete_member(member))
            case 4:
                known = list(profile.members)
                members = [rng.choice(known) for _ in range(rng.randrange(5))] if known else []
                on(lambda p: p.set_group(member, members))
            case _:
                on(lambda p: p.delete_group(member))

    def extern(self) -> None:
        rng, pair = self.rng, self.pair
        if self.program.registers:
            spec = rng.choice(self.program.registers)
            if spec.size:
                index = rng.randrange(min(spec.size, 8))
                value = self.pools.number(spec.width)
                pair.both(spec.name, lambda s: s.registers[spec.name].write(index, value))
        names = list(pair.reference.counters)
        if names:
            name = rng.choice(names)
            number = rng.randrange(max(1, min(8, len(pair.reference.counters[name]))))
            pair.both(name, lambda s: s.counters[name].write(number, 7, 700))
        meters = list(pair.reference.meters)
        if meters:
            meter = rng.choice(meters)
            count = pair.reference.meters[meter].rate_count
            rates = self._rates(count)
            at = rng.randrange(max(1, min(8, len(pair.reference.meters[meter]))))
            if rng.random() < 0.2:
                pair.both(meter, lambda s: s.meters[meter].clear(at))
            else:
                pair.both(meter, lambda s: s.meters[meter].configure(at, rates))

    def _rates(self, count: int) -> list[Rate]:
        rng = self.rng
        speeds = sorted(rng.choice((0.0, 0.001, 0.01, 0.5, 3.7)) for _ in range(count))
        return [Rate(speed, rng.choice((0, 1, 5, 300))) for speed in speeds]


# --- chunks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What is tested."""

    program: Program | None
    """None: a generated one for each chunk."""
    scenarios: tuple[Path, ...] = ()
    chunk_packets: int = 1000
    checked: bool = False


def frames_of(scenario: Path) -> list[tuple[int, bytes]]:
    """(port, frame) of all that goes in, in order."""
    frames: list[tuple[int, bytes]] = []
    for line in scenario.read_text().splitlines():
        words = line.split()
        if words and words[0] == "packet":
            frames.append((int(words[1]), bytes.fromhex("".join(words[2:]))))
    return frames


def setup_of(scenario: Path) -> str:
    """The scenario without what goes in and comes out."""
    lines = [line for line in scenario.read_text().splitlines() if line.split()]
    left_out = ("packet", "expect", "check_counter", "wait", "remove")
    return "\n".join(line for line in lines if line.split()[0] not in left_out)


@dataclass
class ChunkResult:
    packets: int = 0
    frames_out: int = 0
    writes: int = 0
    refused: str = ""


def run_chunk(work: Work, seed: int, number: int) -> ChunkResult:
    """Raises Difference."""
    rng = random.Random(f"{seed}.{number}")
    result = ChunkResult()
    program = work.program
    cache = program is not None
    if program is None:
        source = programs.generate(random.Random(f"{seed}.{number}.program"))
        program = loader.load(json.dumps(source), f"generated {seed}.{number}")
    try:
        pair = Pair(program, seed, checked=work.checked, cache=cache)
    except Unusable as error:
        result.refused = str(error)
        return result
    pools = Pools(rng, program)
    writer = Writer(rng, pair, pools)
    story: list[tuple[int, bytes]] = []
    if work.scenarios:
        scenario = rng.choice(work.scenarios)
        story = frames_of(scenario)
        stf.Scenario(pair.reference).run(setup_of(scenario))
        stf.Scenario(pair.compiled).run(setup_of(scenario))
        if rng.random() < 0.4:
            writer.set_up()
        elif rng.random() < 0.4:
            for name in writer.loose:
                writer.default(name)
    else:
        writer.set_up()
    corpus = [one for path in work.scenarios for one in frames_of(path)]
    frames = Frames(rng, program, pools, story, corpus)
    now_us = rng.randrange(1 << 40)
    writing = rng.choice((0.0, 0.02, 0.2))
    for _ in range(work.chunk_packets):
        if rng.random() < writing:
            writer.write()
            result.writes += 1
        now_us = max(0, now_us + rng.choice((0, 1, 10, 1000, 100_000, -5)))
        result.frames_out += pair.process(*frames.frame(), now_us)
        result.packets += 1
    pair.compare()
    return result


@dataclass
class Progress:
    """What the file says."""

    program: str
    seed: int
    chunk_packets: int
    checked: bool
    chunks: int = 0
    packets: int = 0
    frames_out: int = 0
    writes: int = 0
    refused: int = 0
    seconds: float = 0.0
    differences: list[dict[str, object]] = field(default_factory=list)

    def same_work(self, other: Progress) -> bool:
        mine = (self.program, self.seed, self.chunk_packets, self.checked)
        return mine == (other.program, other.seed, other.chunk_packets, other.checked)


def run(work: Work, progress: Progress, packets: int, save: Callable[[], None]) -> None:
    """Go on until so many packets are compared."""
    reported = time.monotonic()
    while progress.packets < packets:
        started = time.monotonic()
        try:
            result = run_chunk(work, progress.seed, progress.chunks)
            progress.packets += result.packets
            progress.frames_out += result.frames_out
            progress.writes += result.writes
            progress.refused += bool(result.refused)
            if work.program is not None and result.refused:
                raise ProgramError(result.refused)
        except Difference as difference:
            text = str(difference)
            progress.differences.append({"chunk": progress.chunks, "what": text[:4000]})
            progress.packets += work.chunk_packets
            print(f"chunk {progress.chunks}: {text[:2000]}", flush=True)
        progress.chunks += 1
        progress.seconds += time.monotonic() - started
        save()
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(
                f"{progress.packets} packets, {progress.frames_out} frames out, "
                f"{len(progress.differences)} differences, "
                f"{progress.packets / progress.seconds:.0f} packets/s",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.switchsim.difftest",
        description="Run the compiled engine against the reference engine on random packets.",
    )
    parser.add_argument("--packets", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=1000, help="packets of one set-up")
    parser.add_argument("--first-chunk", type=int, default=0, help="start here, to repeat one")
    parser.add_argument("--program", type=Path, help="a compiled program (BMv2 JSON)")
    parser.add_argument("--stf", type=Path, help="scenarios that give set-ups and frames")
    parser.add_argument("--generated", action="store_true", help="a new program for every chunk")
    parser.add_argument("--checked", action="store_true", help="with bounds checks compiled in")
    parser.add_argument("--json", type=Path, help="write results here, and go on from them")
    options = parser.parse_args(argv)
    if options.generated == (options.program is not None):
        parser.error("give --program or --generated")
    program = None if options.program is None else loader.load_file(options.program)
    scenarios = () if options.stf is None else tuple(stf.find_scenarios(options.stf))
    work = Work(program, scenarios, options.chunk, options.checked)
    name = "generated" if options.program is None else str(options.program.name)
    progress = Progress(name, options.seed, options.chunk, options.checked, options.first_chunk)
    if options.json is not None and options.json.exists():
        old = Progress(**json.loads(options.json.read_text()))
        if old.same_work(progress):
            progress = old

    def save() -> None:
        if options.json is not None:
            text = json.dumps(progress.__dict__, indent=2) + "\n"
            temporary = options.json.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.replace(options.json)

    run(work, progress, options.packets, save)
    print(
        f"{progress.packets} packets in {progress.chunks} chunks, {progress.frames_out} frames "
        f"out, {progress.writes} writes, {progress.refused} programs refused, "
        f"{len(progress.differences)} differences, {progress.seconds:.0f} s"
    )
    return 1 if progress.differences else 0
