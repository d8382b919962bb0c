"""STF: runs the P4 community's simple test framework files against the switch.

A scenario is three files side by side: NAME.json (the compiled program), NAME.p4info.txtpb
(not needed here) and NAME.stf. The grammar is that of p4c's tools/stf with the extensions of
backends/bmv2/bmv2stf.py; the meaning of each line is that of bmv2stf.py with
simple_switch_CLI. This module owns the grammar and the comparison; the switch is the one thing
that it exercises.

    python -m kvcast.switchsim.stf DIR_OR_FILE [--engine llvm|reference] [--json FILE]
                                   [--program FILE]

With --program, one compiled program serves all scenarios, such as those that p4testgen writes.

A scenario ends as *passed*, *refused* (the program uses a construct that the switch refuses by
name), *wrong* (a frame came out that should not have, or came out other than it should, or did
not come out) or *failed* (the scenario could not be carried out). It sees frames, counters and
registers; it does not see meters, digests or anything of P4Runtime.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from kvcast.switchsim import loader
from kvcast.switchsim.control_plane.externs import ExternError, Rate
from kvcast.switchsim.control_plane.tables import Table, TableError
from kvcast.switchsim.engine import Engine, EngineName, ReplicationError
from kvcast.switchsim.ir import (
    Exact,
    KeyField,
    Lpm,
    MatchValue,
    ProgramError,
    Range,
    Ternary,
    UnsupportedConstruct,
    anything,
)
from kvcast.switchsim.reference.switch import Switch

Outcome: TypeAlias = Literal["passed", "failed", "refused", "wrong"]

PRIORITY_BASE = 10000
"""STF says "higher wins", BMv2 "lower wins"; bmv2stf.py subtracts from this number."""


_RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_COMMANDS = {
    "add", "remove", "packet", "expect", "wait", "check_counter", "mirroring_add",
    "mirroring_add_mc", "mirroring_delete", "mc_mgrp_create", "mc_node_create", "mc_node_update",
    "mc_node_associate", "counter_write", "register_write", "register_reset", "meter_set_rates",
    "meter_array_set_rates", "setdefault",
}  # fmt: skip
"""Each is a method of `Scenario`."""
_WITHOUT_EFFECT = {
    "no_packet", "mirroring_get", "counter_read", "register_read", "meter_get_rates",
}  # fmt: skip


class StfError(ValueError):
    """The scenario is not one: bad syntax, or a name that the program does not have."""


@dataclass(frozen=True)
class Report:
    name: str
    outcome: Outcome
    reason: str = ""


# --- the language -----------------------------------------------------------------------------

_TOKEN = re.compile(r'"[^"]*"|[A-Za-z_$][A-Za-z_$0-9]*|0[xX][0-9a-fA-F*]+|0[bB][01*]+|[0-9]+|==|!='
                    r"|<=|>=|\S")  # fmt: skip


class _Line:
    """The tokens of one statement."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.tokens = [t.strip('"') if t.startswith('"') else t for t in _TOKEN.findall(text)]
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        n = self.at + ahead
        return self.tokens[n] if n < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise StfError(f"line {self.number}: {expected or 'more'} expected: {self.text}")
        self.at += 1
        return token

    def number_(self) -> int:
        return _integer(self.take())

    def numbers(self) -> list[int]:
        result: list[int] = []
        while self.peek():
            result.append(self.number_())
        return result

    def qualified_name(self) -> str:
        name = self.take()
        while self.peek() in (".", "["):
            if self.peek() == "[":
                self.take("[")
                name += f"[{self.take()}]"
                self.take("]")
            else:
                self.take(".")
                name += "." + self.take()
        return name

    def action(self) -> tuple[str, list[tuple[str, int]]]:
        name = self.qualified_name()
        self.take("(")
        arguments: list[tuple[str, int]] = []
        while self.peek() != ")":
            parameter = self.take()
            self.take(":")
            arguments.append((parameter, self.number_()))
            if self.peek() == ",":
                self.take(",")
        self.take(")")
        return name, arguments


def _integer(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        try:
            return int(text, 10)  # 007
        except ValueError:
            raise StfError(f"{text!r} is not a number") from None


# --- a scenario -------------------------------------------------------------------------------


class Scenario:
    """One run of one STF file on a switch that has its program loaded."""

    def __init__(self, switch: Engine) -> None:
        self.switch = switch
        self.now_us = 0
        self.sent: dict[int, list[bytes]] = defaultdict(list)
        self.expected: dict[int, list[str | None]] = defaultdict(list)
        """By port: hexadecimal with `*` for any digit and `$` for "ends here"; None: any frame."""
        self.nodes: dict[int, list[tuple[int, int]]] = {}
        self.groups: dict[int, list[int]] = {}
        self.entries: dict[str, tuple[Table, int]] = {}
        """Entries that the scenario gave a name: `add ... = NAME`."""
        self.problems: list[str] = []

    def run(self, text: str) -> list[str]:
        """Carry out the scenario; gives what was wrong, in words."""
        for number, raw in enumerate(text.splitlines(), 1):
            stripped = raw.split("#", 1)[0].strip()
            if not stripped:
                continue
            line = _Line(number, stripped)
            command = line.take().lower()
            if command in _COMMANDS:
                getattr(self, command)(line)
            elif command not in _WITHOUT_EFFECT:
                raise StfError(f"line {number}: no such command: {stripped}")
        return self.problems + self.compare()

    # --- frames -----------------------------------------------------------------------------

    def packet(self, line: _Line) -> None:
        words = line.text.split()[1:]
        port, data = int(words[0]), "".join(words[1:])
        try:
            frame = bytes.fromhex(data)
        except ValueError:
            raise StfError(f"line {line.number}: not a packet: {data}") from None
        self.now_us += 1000
        for out_port, out in self.switch.process(port, frame, self.now_us):
            self.sent[out_port].append(out)

    def expect(self, line: _Line) -> None:
        words = line.text.split()[1:]
        data = "".join(words[1:]).upper()
        self.expected[int(words[0])].append(data or None)

    def wait(self, line: _Line) -> None:
        self.now_us += 1_000_000

    def compare(self) -> list[str]:
        problems: list[str] = []
        for port in sorted(self.sent.keys() | self.expected.keys()):
            frames = self.sent.get(port, [])
            expected = self.expected.get(port, [])
            if expected and None in expected:
                if not frames:
                    problems.append(f"port {port}: no frame came, some were expected")
                continue
            if len(frames) != len(expected):
                problems.append(
                    f"port {port}: {len(frames)} frames came, {len(expected)} were expected"
                )
                continue
            for number, (wanted, frame) in enumerate(zip(expected, frames, strict=True)):
                assert wanted is not None
                difference = compare_frame(wanted, frame)
                if difference:
                    problems.append(f"port {port}, frame {number}: {difference}")
        return problems

    # --- tables -----------------------------------------------------------------------------

    def add(self, line: _Line) -> None:
        table = self.table(line.qualified_name())
        priority = 0
        if line.peek().isdigit() and line.peek(1) not in (":", ".", "["):
            priority = line.number_()
        given: dict[str, str] = {}
        while not self._at_action(line):
            name = line.qualified_name()
            line.take(":")
            value = line.take()
            if line.peek() == "/":
                line.take("/")
                value += "/" + line.take()
            given[name] = value
        action, arguments = self.action(table, line)
        # A field that the entry does not mention matches anything, or else 0.
        key = [anything(k.match, k.width) or Exact(0) for k in table.spec.key]
        for name, value in given.items():
            position = self.key_position(table, name)
            key[position] = _match_value(value, table.spec.key[position])
        handle = table.add(key, PRIORITY_BASE - priority, action, arguments)
        if line.peek() == "=":
            line.take("=")
            self.entries[line.take()] = (table, handle)

    @staticmethod
    def _at_action(line: _Line) -> bool:
        """An action's name is followed by "(", that of a key field by ":"."""
        at = line.at
        while at < len(line.tokens) and line.tokens[at] not in ("(", ":"):
            at += 1
        return at >= len(line.tokens) or line.tokens[at] == "("

    def remove(self, line: _Line) -> None:
        line.take("all")
        for table in self.switch.tables.values():
            if not table.is_const:
                table.clear()

    def setdefault(self, line: _Line) -> None:
        table = self.table(line.qualified_name())
        table.set_default(*self.action(table, line))

    def table(self, name: str) -> Table:
        return self.switch.tables[_choose(name, list(self.switch.tables), "table")]

    def action(self, table: Table, line: _Line) -> tuple[str, list[int]]:
        program = self.switch.program
        assert program is not None
        stf_name, given = line.action()
        choices = {program.actions[n].name: program.actions[n] for n in table.spec.actions}
        name = _choose(stf_name, list(choices), f"action of {table.name}")
        values = dict(given)
        parameters = [q.name for q in choices[name].parameters]
        if set(values) != set(parameters):
            raise StfError(f"line {line.number}: {name} takes {parameters}")
        return name, [values[q] for q in parameters]

    @staticmethod
    def key_position(table: Table, name: str) -> int:
        """bmv2stf.py's generous reading of a key field's name."""
        name = re.sub(r"\$([0-9]+)", r"[\1]", name)
        names = [k.name for k in table.spec.key]
        wanted = [name, f"{name}$", f"{name}.$valid$"]
        if name.endswith(".valid"):
            wanted.append(name.removesuffix("valid") + "$valid$")
        for candidate in wanted:
            if candidate in names:
                return names.index(candidate)
        found = None
        for position, known in enumerate(names):
            if known.endswith((f".{name}", f".{name}$")) or (
                name == "valid" and known.endswith("$valid$")
            ):
                found = position
        if found is None:
            raise StfError(f"{table.name} has no key field {name!r}, but {names}")
        return found

    # --- replication ------------------------------------------------------------------------

    def mirroring_add(self, line: _Line) -> None:
        session, port = line.number_(), line.number_()
        self.switch.set_clone_session(session, [(port, 0)])

    def mirroring_add_mc(self, line: _Line) -> None:
        session, group = line.number_(), line.number_()
        replicas = [r for node in self.groups.get(group, []) for r in self.nodes[node]]
        self.switch.set_clone_session(session, replicas)

    def mirroring_delete(self, line: _Line) -> None:
        self.switch.delete_clone_session(line.number_())

    def mc_mgrp_create(self, line: _Line) -> None:
        self._set_group(line.number_(), [])

    def mc_node_create(self, line: _Line) -> None:
        rid, *ports = line.numbers()
        self.nodes[len(self.nodes)] = [(port, rid) for port in sorted(ports)]

    def mc_node_update(self, line: _Line) -> None:
        node, *ports = line.numbers()
        if node not in self.nodes:
            raise StfError(f"line {line.number}: no node {node}")
        rid = self.nodes[node][0][1] if self.nodes[node] else 0
        self.nodes[node] = [(port, rid) for port in sorted(ports)]
        for group, members in self.groups.items():
            self._set_group(group, members)

    def mc_node_associate(self, line: _Line) -> None:
        group, node = line.number_(), line.number_()
        if group not in self.groups or node not in self.nodes:
            raise StfError(f"line {line.number}: no group {group} or no node {node}")
        self._set_group(group, [*self.groups[group], node])

    def _set_group(self, group: int, members: list[int]) -> None:
        self.groups[group] = members
        self.switch.set_multicast_group(group, [r for n in members for r in self.nodes[n]])

    # --- externs ----------------------------------------------------------------------------

    def check_counter(self, line: _Line) -> None:
        name = line.qualified_name()
        line.take("(")
        index = line.take()
        line.take(")")
        # Without a condition the counter is to be zero.
        unit = line.take() if line.peek() else "packets"
        relation, value = (line.take(), line.number_()) if line.peek() else ("==", 0)
        packets, bytes_ = self.read_counter(name, index)
        actual = packets if unit == "packets" else bytes_
        if relation not in _RELATIONS:
            raise StfError(f"line {line.number}: no such relation: {relation}")
        if not _RELATIONS[relation](actual, value):
            self.problems.append(f"line {line.number}: {name}({index}) has {actual} {unit}")

    def read_counter(self, name: str, index: str) -> tuple[int, int]:
        """(packets, bytes) of an indirect counter's cell or of a named entry ($NAME)."""
        if index.startswith("$"):
            if index[1:] not in self.entries:
                raise StfError(f"no entry is called {index[1:]}")
            table, handle = self.entries[index[1:]]
            return table.read_counter(handle)
        counters = self.switch.counters
        return counters[_choose(name, list(counters), "counter")].read(_integer(index))

    def counter_write(self, line: _Line) -> None:
        name = line.qualified_name()
        index, packets, bytes_ = line.numbers()
        name = _choose(name, list(self.switch.counters), "counter")
        self.switch.counters[name].write(index, packets, bytes_)

    def register_write(self, line: _Line) -> None:
        name = line.qualified_name()
        index, value = line.numbers()
        name = _choose(name, list(self.switch.registers), "register")
        self.switch.registers[name].write(index, value)

    def register_reset(self, line: _Line) -> None:
        name = _choose(line.qualified_name(), list(self.switch.registers), "register")
        self.switch.registers[name].reset()

    def meter_set_rates(self, line: _Line) -> None:
        name, index = line.qualified_name(), line.number_()
        name = _choose(name, list(self.switch.meters), "meter")
        self.switch.meters[name].configure(index, self._rates(line))

    def meter_array_set_rates(self, line: _Line) -> None:
        name = _choose(line.qualified_name(), list(self.switch.meters), "meter")
        rates = self._rates(line)
        meters = self.switch.meters[name]
        for index in range(len(meters)):
            meters.configure(index, rates)

    @staticmethod
    def _rates(line: _Line) -> list[Rate]:
        rates: list[Rate] = []
        while line.peek():
            text = line.take()
            if line.peek() == ".":
                line.take(".")
                text += "." + line.take()
            line.take(":")
            rates.append(Rate(float(text), line.number_()))
        return rates


def _choose(name: str, known: Sequence[str], what: str) -> str:
    """The name itself, or the only one that ends in it."""
    if name in known:
        return name
    found = [k for k in known if k.endswith(name)]
    if len(found) != 1:
        raise StfError(f"{'no' if not found else 'more than one'} {what} is called {name!r}")
    return found[0]


def _match_value(text: str, key: KeyField) -> MatchValue:
    match key.match:
        case "exact":
            return Exact(_integer(text))
        case "ternary":
            value, mask = _with_wildcards(text, key.width)
            return Ternary(value, mask)
        case "lpm":
            if "/" in text:
                value_text, length = text.split("/")
                return Lpm(_integer(value_text), _integer(length))
            bits_per_digit = {"0x": 4, "0b": 1}.get(text[:2].lower())
            if bits_per_digit is None:
                return Lpm(_integer(text), key.width)
            length_bits = (len(text) - 2 - text.count("*")) * bits_per_digit
            return Lpm(_integer(text.replace("*", "0")), min(length_bits, key.width))
        case _:
            value = _integer(text)
            return Range(value, value)


def _with_wildcards(text: str, width: int) -> tuple[int, int]:
    """(value, mask): each `*` is a digit that does not matter."""
    full = (1 << width) - 1
    base, bits = {"0x": (16, 4), "0b": (2, 1)}.get(text[:2].lower(), (10, 0))
    if base == 10:
        return _integer(text), full
    value = mask = 0
    for digit in text[2:]:
        value <<= bits
        mask <<= bits
        if digit != "*":
            value |= int(digit, base)
            mask |= (1 << bits) - 1
    return value & full, mask & full


def compare_frame(expected: str, frame: bytes) -> str:
    """Empty if the frame is as expected: a prefix of it, or all of it if `$` ends it."""
    exact = expected.endswith("$")
    wanted = expected.rstrip("$")
    actual = frame.hex().upper()
    if len(actual) < len(wanted) or (exact and len(actual) != len(wanted)):
        return f"{len(actual) // 2} bytes came, {len(wanted) // 2} were expected: {actual}"
    for at, (a, b) in enumerate(zip(wanted, actual, strict=False)):
        if a not in ("*", b):
            return f"byte {at // 2} is {actual[at & ~1 : (at & ~1) + 2]}: {actual}, not {wanted}"
    return ""


# --- running files ------------------------------------------------------------------------------


def make_switch(engine: EngineName) -> Engine:
    if engine == "llvm":
        # Only who asks for it pays for loading LLVM.
        from kvcast.switchsim.llvm.switch import CompiledSwitch

        return CompiledSwitch()
    return Switch()


def run_file(
    stf: Path, program_file: Path | None = None, engine: EngineName = "reference"
) -> Report:
    """One scenario on a fresh switch. The program is NAME.json unless it is named."""
    name = stf.stem
    try:
        program = loader.load_file(program_file or stf.with_suffix(".json"))
        switch = make_switch(engine)
        switch.load(program)
        problems = Scenario(switch).run(stf.read_text())
    except UnsupportedConstruct as refusal:
        return Report(name, "refused", str(refusal))
    except (ProgramError, StfError, TableError, ReplicationError, ExternError, OSError) as error:
        return Report(name, "failed", f"{type(error).__name__}: {error}")
    if problems:
        return Report(name, "wrong", "; ".join(problems))
    return Report(name, "passed")


def find_scenarios(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*.stf"))


def summary(reports: Sequence[Report]) -> dict[str, object]:
    counts = Counter(r.outcome for r in reports)
    outcomes = {outcome: counts[outcome] for outcome in get_args(Outcome)}
    return {**outcomes, "scenarios": [asdict(r) for r in reports]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.switchsim.stf",
        description="Run STF scenarios (NAME.stf with NAME.json beside it) on switchsim.",
    )
    parser.add_argument("path", type=Path, help="a .stf file, or a directory of them")
    parser.add_argument(
        "--engine",
        choices=["llvm", "reference"],
        default="llvm",
        help="which engine runs the program (default: %(default)s)",
    )
    parser.add_argument(
        "--program", type=Path, help="the compiled program of all of them, in place of NAME.json"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file, as JSON")
    options = parser.parse_args(argv)
    scenarios = find_scenarios(options.path)
    if not scenarios:
        print(f"no scenarios in {options.path}", file=sys.stderr)
        return 2
    reports = [run_file(s, options.program, options.engine) for s in scenarios]
    result = summary(reports)
    for report in reports:
        if report.outcome != "passed":
            print(f"{report.outcome:8}{report.name}: {report.reason}")
    print(
        f"{result['passed']} passed, {result['failed']} failed, "
        f"{result['refused']} refused, {result['wrong']} wrong"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if len(reports) == result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
