"""Frames that reach deep into a program: numbers that its tables know, walks through its parser.

Must not know the engines, or what comes of a frame.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvcast.switchsim import ir
from kvcast.switchsim.ir import Exact, Lpm, Program, Range, Ternary

MAX_FRAME = 9216
PORTS = 10


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
                    case ir.ExtractNext(_, headers, varbit, _):
                        header = headers[0]
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
                header = part.headers[0]
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
