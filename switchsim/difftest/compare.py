"""Two engines with the same program: do the same to both, and compare all that can be read.

Owns: what a difference is. Must not know: what is done to them, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcast.switchsim.control_plane.externs import ExternError
from kvcast.switchsim.control_plane.tables import Table, TableError
from kvcast.switchsim.engine import Engine, ReplicationError
from kvcast.switchsim.ir import Program, ProgramError, UnsupportedConstruct
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference.switch import Switch

REFUSALS = (TableError, ReplicationError, ExternError)

_T = TypeVar("_T")


class Difference(AssertionError):  # noqa: N818 - it is the result, not an error
    """The engines did not do the same."""


class Unusable(Exception):  # noqa: N818 - a program to leave out
    """The program does not load, as it should not."""


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
