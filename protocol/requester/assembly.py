"""Puts one copy of a block together from chunks.

Owns: the first invariant, that no reader gets bytes that are not one whole copy of the block it
named. An `Assembly` is made for one size and one digest; `kvcast.protocol.placement` puts each
chunk of that copy in its place, once, and refuses those of any other; and `verified` compares the
digest of all bytes with the chosen one. Must not know: who asked for what, timers, the network.
"""

from __future__ import annotations

from collections.abc import Collection

from kvcast.protocol.messages.wire import BlockId, Chunking, Frame, digest_of, encode
from kvcast.protocol.placement import Arrived, Placement


class Assembly:
    """One copy of `block`, as far as it has arrived. `buffer` is writable, holds `size` bytes, and
    stays where it is until `leave`."""

    __slots__ = (
        "_all_of_first",
        "_all_of_last",
        "_number",
        "_placement",
        "block",
        "buffer",
        "digest",
        "missing",
        "resident",
        "segments_left",
        "serial",
        "size",
    )

    def __init__(
        self,
        placement: Placement,
        block: BlockId,
        size: int,
        digest: int,
        buffer: memoryview,
        chunking: Chunking,
        sources: Collection[int],
    ) -> None:
        """`sources`: the nodes that chunks are taken from."""
        if buffer.readonly or buffer.nbytes != size or buffer.itemsize != 1:
            raise ValueError(f"not a writable view of {size} bytes")
        self.block = block
        self.size = size
        self.digest = digest
        self.buffer = buffer
        self._placement = placement
        number, serial, missing = placement.enter(block, size, digest, buffer, chunking, sources)
        self._number = number
        self.serial = serial
        """What arrivals of this assembly are known by."""
        self.missing = missing
        """By segment, the chunks of which `took` has not heard. Some may be in their places: what
        came in one piece is told one thing after the other."""
        self.segments_left = len(missing)
        self.resident = False
        """Whether some of it has come from the switch's memory."""
        self._all_of_first = missing[0]
        self._all_of_last = missing[-1]

    def leave(self) -> None:
        """Nothing is written to the buffer any more."""
        self._placement.leave(self._number)

    def is_of(self, size: int, digest: int) -> bool:
        """Whether chunks that say `size` and `digest` belong to this copy."""
        return self.digest == digest and self.size == size

    def all_chunks(self, segment: int) -> int:
        """Every chunk of `segment`, as a bitmap."""
        if segment == len(self.missing) - 1:
            return self._all_of_last
        return (1 << 64) - 1 if segment else self._all_of_first

    @property
    def sources(self) -> frozenset[int]:
        """The nodes that chunks are taken from."""
        return self._placement.listens_to(self._number)

    def listen(self, sources: Collection[int]) -> None:
        """Take chunks from these nodes."""
        self._placement.listen(self._number, sources)

    def put(self, frame: Frame, source: int) -> Arrived:
        """Put the chunk of a DATA of this copy, which the caller has decided to take, in its
        place."""
        arrived = self._placement.put(self._number, encode(frame), source)
        assert arrived is not None, f"{frame} is not of {self.block}"
        return arrived

    def put_written(
        self,
        index: int,
        chunks: int,
        slot: memoryview,
        flags: int,
        tag: int,
        source: int,
        *,
        last: bool,
    ) -> Arrived:
        """Put chunks of a segment, which lie in a slot of the landing zone, in their places;
        `last`: they end an answer."""
        return self._placement.put_written(
            self._number, index, chunks, slot, flags, tag, source, last=last
        )

    def took(self, arrived: Arrived) -> int:
        """Note that chunks are there; returns those of their segment that were missing then."""
        self.missing[arrived.segment] = arrived.missing
        if not arrived.missing:
            self.segments_left -= 1
        return arrived.missing

    def took_whole(self, arrivals: Collection[Arrived]) -> None:
        """Note that as many segments are there, all of each."""
        for arrived in arrivals:
            assert not arrived.missing
            self.missing[arrived.segment] = 0
        self.segments_left -= len(arrivals)

    def verified(self) -> bool:
        """Whether the bytes, all of them there, are those that the digest was made of."""
        assert self.segments_left == 0
        return digest_of(self.buffer) == self.digest
