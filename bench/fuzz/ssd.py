"""An entry point of the file system: what anybody left in a file of the SSD tier.

Owns: how a file may be damaged, or forged by who knows its identity, and what must hold of what an
agent then has of it. Must not know: how it is checked.

An input is a list of changes, of ten bytes each, to a file in which an agent has kept some blocks:
bits, words of other entries, entries that prove themselves and say something else (where, how
large, of what namespace, in which order, since when), a head that proves itself and cuts the file
in another way, the file's length. Then an agent takes it over, and fsck looks at it and mends it.
What is read is what was put under that name, and the tier goes on storing. Where the file is
refused, an SsdError says so.
"""

from __future__ import annotations

import random
import struct
from typing import Final

import xxhash
from kvcast.bench.fuzz.targets import ChangesHarness, entry_point
from kvcast.hostagent.core import ssd
from kvcast.hostagent.core.ssd import SsdRules, SsdTier
from kvcast.hostagent.core.store import Copy, Store, StoreError
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.ssd import fsck, layout
from kvcast.hostagent.tiers.ssd.layout import Entry, Formatted, SsdError
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, BlockId, digest_of
from kvcast.simulation.disk import SimDisk

_UNIT: Final = 4096
_SLAB: Final = 32 * _UNIT
_ARENA_BYTES: Final = 16 * 8192
_BLOCKS: Final = 24
_CHANGE_BYTES: Final = 10
_MEANING: Final = 77
_EPOCH_S: Final = 1e9
_CUT: Final = layout.cut_of("node node-1 of cluster fuzz", 5 * _SLAB, _UNIT, _SLAB)
_EVERYTHING: Final = SsdRules(0.0, 0.0, batch_share=0.25)
_TIMES: Final = (0.0, _EPOCH_S, 1e18, -1e300, float("inf"), float("nan"))
_SIZES: Final = (1, _UNIT, _UNIT + 1, _SLAB, _SLAB + 1, 4 * _SLAB, MAX_BLOCK_BYTES, 2**63)


def _block(number: int) -> BlockId:
    return BlockId(1, number.to_bytes(16, "big"))


def _content(number: int) -> bytes:
    return random.Random(number).randbytes(300 + 491 * number)


class _Agent:
    """A store and its tier over a disk; whatever is to be done is done at once."""

    def __init__(self, disk: SimDisk, formatted: Formatted) -> None:
        self.disk = disk
        self.memory = memoryview(bytearray(_ARENA_BYTES))
        self.store = Store(Allocator(_ARENA_BYTES, 16384))
        self.tier = SsdTier(_EVERYTHING, self.store, self.memory, [formatted], _EPOCH_S)
        self.tier.meaning_of = lambda namespace: _MEANING if namespace == 1 else None
        self.store.below = self.tier
        if formatted.found:
            for piece in layout.scan(disk, formatted):
                self.tier.found(0, piece)
            self.tier.scanned()
        self.tier.begin()
        self.work()

    def work(self) -> None:
        while orders := self.tier.take_orders(0.0):
            for order in orders:
                error, digest = self.disk.do(order)
                order.ended(0.0, error, digest)
        assert not self.tier.is_behind, "the tier does not come to rest"
        self.tier.check()
        self.store.check()

    def put(self, number: int) -> None:
        data = _content(number)
        copy = self.store.reserve(_block(number), len(data))
        self.memory[copy.offset : copy.offset + len(data)] = data
        self.store.commit(copy, digest_of(data), home=True)
        self.work()

    def read(self, number: int) -> bytes | None:
        """The bytes that a reader gets; None where there are none."""
        rooms: list[Copy] = []
        got: list[bytes] = []

        def begin(size_bytes: int) -> memoryview | None:
            try:
                rooms.append(self.store.reserve(_block(number), size_bytes))
            except StoreError:
                return None
            return self.memory[rooms[0].offset : rooms[0].offset + size_bytes]

        def ended(_now: float, error: str, _digest: int, _since: float) -> None:
            for room in rooms:
                if not error:
                    at = room.offset
                    got.append(bytes(self.memory[at : at + room.size_bytes]))
                self.store.abort(room)

        self.tier.read(_block(number), begin, ended)
        self.work()
        return got[0] if got else None


@entry_point("ssd", "a file of the SSD tier that anybody left", ssd, layout, fsck)
class SsdHarness(ChangesHarness):
    """Takes over a file that was damaged, or forged."""

    change_bytes = _CHANGE_BYTES

    def __init__(self) -> None:
        disk = SimDisk(random.Random(1))
        agent = _Agent(disk, layout.open_formatted(disk, _CUT, 7))
        for number in range(_BLOCKS):
            agent.put(number)
        assert len(agent.tier.shelf) == _BLOCKS
        self._clean = disk.picture()
        formatted = layout.head_of(disk)
        self._entries = [entry for piece in layout.scan(disk, formatted) for entry in piece.entries]
        table = self._clean[: _CUT.blocks_offset]
        self._written = [at for at in range(0, len(table), 8) if any(table[at : at + 8])]

    def run(self, data: bytes) -> None:
        disk = SimDisk(random.Random(1))
        picture = bytearray(self._clean)
        for at in range(0, len(data) - _CHANGE_BYTES + 1, _CHANGE_BYTES)[:64]:
            self._change(data[at : at + _CHANGE_BYTES], picture)
        if data and data[0] % 16 == 15:
            self._look(picture)
        disk.restore(bytes(picture))
        try:
            formatted = layout.open_formatted(disk, _CUT, 8)
        except SsdError:
            return
        agent = _Agent(disk, formatted)
        for number in range(_BLOCKS):
            found = agent.read(number)
            assert found in (None, _content(number)), "wrong bytes were served"
        assert set(agent.tier.shelf.blocks()) <= {_block(number) for number in range(_BLOCKS)}
        agent.put(_BLOCKS)
        assert agent.read(_BLOCKS) == _content(_BLOCKS), "nothing can be stored any more"

    @staticmethod
    def _look(picture: bytearray) -> None:
        """fsck, and fsck again: what was mended is clean."""
        disk = SimDisk(random.Random(1))
        disk.restore(bytes(picture))
        try:
            formatted = layout.head_of(disk)
        except SsdError:
            return
        if formatted.cut != _CUT:
            return  # what another owner's file holds is not looked at by an agent
        fsck.check_ssd(disk, formatted, repair=formatted.whole_bytes == _CUT.file_bytes)
        if formatted.whole_bytes == _CUT.file_bytes:
            assert fsck.check_ssd(disk, formatted).is_clean, "it was mended, and is not clean"

    def _change(self, change: bytes, picture: bytearray) -> None:
        kind, how, where = change[0] % 8, change[1], int.from_bytes(change[2:6], "little")
        if kind == 7:
            del picture[where % (len(picture) + 1) :]
        elif kind == 6:
            if len(picture) > _CUT.blocks_offset:
                blocks = len(picture) - _CUT.blocks_offset
                picture[_CUT.blocks_offset + where % blocks] ^= how or 1
        elif kind == 5:
            self._forge_head(change, picture)
        elif kind >= 3:
            self._forge_entry(change, picture)
        else:
            at = self._written[where % len(self._written)]
            if kind == 2:  # of another entry, perhaps
                other = self._written[how * 131 % len(self._written)]
                picture[at : at + 8] = self._clean[other : other + 8]
            elif at + 8 <= len(picture):
                for place, byte in enumerate(change[2:]):
                    picture[at + place] ^= byte

    def _forge_entry(self, change: bytes, picture: bytearray) -> None:
        """An entry that proves itself, of a block that was put, and says something else of it."""
        entry = self._entries[change[1] % len(self._entries)]
        unit = (entry.unit, change[2] * 257 % _CUT.units)[change[3] & 1]
        size = (entry.size_bytes, _SIZES[change[4] % len(_SIZES)])[change[3] >> 1 & 1]
        forged = Entry(
            unit,
            (entry.block, BlockId(change[5], entry.block.key))[change[3] >> 2 & 1],
            size,
            entry.digest,
            (_MEANING, change[6])[change[3] >> 3 & 1],
            (entry.order, change[7], 2**64 - 1)[change[7] % 3],
            _TIMES[change[8] % len(_TIMES)],
            (b"", entry.block.key, b"p" * 16)[change[9] % 3],
            (0, 2**32 - 1)[change[9] & 1],
        )
        at = layout.PAGE_BYTES + unit * layout.ENTRY_BYTES
        if at + layout.ENTRY_BYTES <= len(picture):
            picture[at : at + layout.ENTRY_BYTES] = layout.pack_entry(forged, 7)

    @staticmethod
    def _forge_head(change: bytes, picture: bytearray) -> None:
        """A head that proves itself, with one word that is another."""
        head = bytearray(picture[: layout.PAGE_BYTES])
        if len(head) < layout.PAGE_BYTES:
            return
        words = layout._HEAD
        end = words.size + len(_CUT.owner.encode())
        at = 8 + change[1] % (end - 8)
        head[at] ^= change[2] or 1
        struct.pack_into("<Q", head, end, xxhash.xxh3_64_intdigest(head[:end]))
        picture[: layout.PAGE_BYTES] = head
