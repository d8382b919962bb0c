"""Where readers of one block meet at its home, who do not meet at the switch.

Owns: which blocks nodes have asked this home for by TCP and are still to be given, and who of them
had better READ instead, since another node wants the block, too. Must not know: sockets, clocks,
what was asked before or comes after, or how a READ is answered.

A node asks by TCP for what nobody else seemed to want, and then does not look whether anybody does.
Another node may ask for the same block, by TCP or by a READ, before the first one's turn has come.
Then both are told (`COMPANY`), and both READ it, since the switch joins READs. What has begun to
leave is not called back. A node that was told does not ask by TCP again for that fetch, so each
changes its way once at most. If the other has gone away meanwhile, READs bring the block all the
same.

The table has `WISHES` places, and a block has one by a hash of its name. Of two blocks with the
same place the first is forgotten; its readers then do not meet. Compiled code and Python use the
same table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from kvcast.native.subset import U32, U64, Library, Ptr, Struct, ctypes_of, native
from kvcast.protocol.messages.shared import MULTIPLIERS
from kvcast.protocol.messages.wire import BlockId

WISHES_BITS: Final = 12
WISHES: Final = 1 << WISHES_BITS
WAITS_NS: Final = 30_000_000_000
"""A wish is forgotten after so long: a connection that has stood still for as long is over."""
READ_NS: Final = 2_000_000_000
"""After a block was told of to all who had asked, and READ, who asks later still finds others'
answers on their way for so long."""

_ALONE: Final = 0
_MET: Final = 1
"""Another wants it, too; who asked first has not been told yet."""
_TOLD: Final = 2

_SPREAD, _, _BY_LOW, _BY_NAMESPACE = MULTIPLIERS


class Wish(Struct):
    """A block that a node has asked for."""

    block: U64
    """The hash of its name."""
    until_ns: U64
    node: U32
    """Who asked first."""
    state: U32


class NativeMeetings(Struct):
    """All wishes; the time is set by whoever calls."""

    wishes: Ptr[Wish]
    now_ns: U64
    met: U64
    """Blocks for which a node was told to READ."""


@native
def name_of(namespace: U64, key: U64, rest_of_key: U64) -> U64:
    """A block's hash; the key in two halves, as they lie in memory."""
    return (key + rest_of_key * _BY_LOW + namespace * _BY_NAMESPACE) * _SPREAD


@native
def is_wished(m: NativeMeetings, wish: Wish, block: U64) -> bool:
    return wish.block == block and wish.until_ns > m.now_ns


@native
def asks(m: NativeMeetings, block: U64, node: U64) -> None:
    """A node has asked by TCP for a block, and its turn is to come."""
    wish = m.wishes[block >> (64 - WISHES_BITS)]
    if not is_wished(m, wish, block):
        wish.block = block
        wish.node = node
        wish.state = _ALONE
    elif wish.node != node and wish.state == _ALONE:
        wish.state = _MET
    wish.until_ns = m.now_ns + WAITS_NS


@native
def is_met(m: NativeMeetings, block: U64) -> bool:
    """Whether several nodes want a block."""
    wish = m.wishes[block >> (64 - WISHES_BITS)]
    return is_wished(m, wish, block) and wish.state != _ALONE


@native
def told(m: NativeMeetings, block: U64, node: U64) -> None:
    """A node that has asked for a block is told to READ it."""
    wish = m.wishes[block >> (64 - WISHES_BITS)]
    if is_wished(m, wish, block) and wish.node == node:
        wish.state = _TOLD
    m.met += 1


@native
def reads(m: NativeMeetings, block: U64, node: U64) -> bool:
    """A node READs the first segment of a block: whether another is about to."""
    wish = m.wishes[block >> (64 - WISHES_BITS)]
    if not is_wished(m, wish, block):
        return False
    if wish.state == _TOLD:
        if wish.until_ns > m.now_ns + READ_NS:
            wish.until_ns = m.now_ns + READ_NS
        return False
    if wish.node != node:
        wish.state = _MET
        return True
    return False


@native
def leaves(m: NativeMeetings, block: U64, node: U64) -> None:
    """A node that has asked for a block waits no more: it begins to come, or will not."""
    wish = m.wishes[block >> (64 - WISHES_BITS)]
    if is_wished(m, wish, block) and wish.node == node:
        if wish.state == _ALONE:
            wish.until_ns = 0
        else:
            wish.state = _TOLD


class _Compiled(NamedTuple):
    asks: Callable[[int, int, int], None]
    is_met: Callable[[int, int], bool]
    told: Callable[[int, int, int], None]
    reads: Callable[[int, int, int], bool]
    leaves: Callable[[int, int, int], None]
    name_of: Callable[[int, int, int], int]


@cache
def _compiled() -> _Compiled:
    functions = (asks, is_met, told, reads, leaves, name_of)
    library = Library(*functions)
    return _Compiled(*(library.call(function) for function in functions))


class Meetings:
    """The table of one home. Times are seconds on the monotonic clock that compiled code reads,
    too; nodes are indices as in the pool map."""

    def __init__(self) -> None:
        self._code = _compiled()
        self._wishes = (ctypes_of(Wish) * WISHES)()
        self.native: Any = ctypes_of(NativeMeetings)()
        self.native.wishes = ctypes.addressof(self._wishes)
        self.address = ctypes.addressof(self.native)
        """For compiled code."""

    def at(self, now: float) -> None:
        """It is so late, for compiled code that does not say."""
        self.native.now_ns = int(now * 1e9)

    def _at(self, now: float, block: BlockId) -> int:
        self.at(now)
        key = block.key
        return self._code.name_of(
            block.namespace, int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
        )

    def asks(self, now: float, block: BlockId, node: int) -> None:
        """A node has asked by TCP for a block, and its turn is to come."""
        self._code.asks(self.address, self._at(now, block), node)

    def is_met(self, now: float, block: BlockId) -> bool:
        """Whether several nodes want a block."""
        return self._code.is_met(self.address, self._at(now, block))

    def told(self, now: float, block: BlockId, node: int) -> None:
        """A node that has asked for a block is told to READ it."""
        self._code.told(self.address, self._at(now, block), node)

    def reads(self, now: float, block: BlockId, node: int) -> bool:
        """A node READs the first segment of a block: whether another is about to READ it, too."""
        return self._code.reads(self.address, self._at(now, block), node)

    def leaves(self, now: float, block: BlockId, node: int) -> None:
        """A node that has asked for a block waits no more: it begins to come, or will not."""
        self._code.leaves(self.address, self._at(now, block), node)

    @property
    def met(self) -> int:
        """Blocks, in all, for which a node was told to READ."""
        met: int = self.native.met
        return met
