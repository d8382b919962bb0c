"""log_msg in compiled code: messages go through a ring to Python, which writes them.

Owns the ring's layout, what compiled code writes there, and how it is read. A slot holds the number
of the message (uint64; the program's messages are numbered in the order of `messages_of`), then its
arguments as signed integers of ARGUMENT_BITS. Nothing is written while nobody listens; what finds
the ring full is lost, as lines of a log are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from kvcast.native.writer import integer
from kvcast.switchsim import ir
from kvcast.switchsim.ir import UnsupportedConstruct
from kvcast.switchsim.llvm.expressions import Expressions
from kvcast.switchsim.llvm.memory import Region
from kvcast.switchsim.semantics import filled, format_pieces

log = logging.getLogger("kvcast.switchsim.ir")

ARGUMENT_BITS = 2112
SLOTS = 1024


def messages_of(program: ir.Program) -> list[ir.LogMessage]:
    def statements() -> Iterator[ir.Statement]:
        for action in program.actions:
            yield from action.body
        for state in program.parser.states:
            yield from (op.statement for op in state.ops if isinstance(op, ir.Run))
        yield from program.deparser.statements

    return list(dict.fromkeys(s for s in statements() if isinstance(s, ir.LogMessage)))


def slot_bytes(messages: Sequence[ir.LogMessage]) -> int:
    most = max((len(m.arguments) for m in messages), default=0)
    return 8 + most * ARGUMENT_BITS // 8


def write_message(expressions: Expressions, message: ir.LogMessage) -> None:
    """Write a message to the ring, if somebody listens and there is room."""
    scope, f = expressions.scope, expressions.f
    messages = messages_of(scope.program)
    on = f.compare("ne", f.load(64, scope.word("log_on"), 8), integer(64, 0))
    with f.when(on):
        head = f.load(64, scope.word("log_head"), 8)
        tail = f.acquire(64, scope.word("log_tail"))
        with f.when(f.compare("ult", f.sub(head, tail), integer(64, SLOTS))):
            size = slot_bytes(messages)
            ring = f.load_pointer(scope.word("log_ring"))
            offset = f.mul(f.and_(head, integer(64, SLOTS - 1)), integer(64, size))
            slot = f.at(ring, offset)
            f.store(integer(64, messages.index(message)), slot)
            for n, argument in enumerate(message.arguments):
                number = expressions.exact(argument)
                if number.value.bits >= ARGUMENT_BITS:
                    raise UnsupportedConstruct("log_msg of a wide number", message.format)
                wide = expressions.extend(number, ARGUMENT_BITS)
                f.store(wide, f.at(slot, 8 + n * ARGUMENT_BITS // 8))
            f.release(f.add(head, integer(64, 1)), scope.word("log_head"))


class LogReader:
    """The Python side of the ring."""

    def __init__(self, program: ir.Program) -> None:
        self._messages = messages_of(program)
        self._pieces = [format_pieces(m.format) for m in self._messages]
        self._bytes = slot_bytes(self._messages)
        self.region = Region(SLOTS * self._bytes if self._messages else 1)

    def __bool__(self) -> bool:
        """Does the program log anything?"""
        return bool(self._messages)

    def write_out(self, tail: int, head: int) -> None:
        for number in range(tail, head):
            at = number % SLOTS * self._bytes
            message = self.region.u64(at)
            values: list[str] = []
            for n in range(len(self._messages[message].arguments)):
                start = at + 8 + n * ARGUMENT_BITS // 8
                data = self.region.read(start, ARGUMENT_BITS // 8)
                values.append(str(int.from_bytes(data, "little", signed=True)))
            log.info("%s", filled(self._pieces[message], values))
