"""Puts one copy of a block together from chunks.

Owns: the first invariant, that no reader gets bytes that are not one whole copy of the block it
named. An `Assembly` is made for one size and one digest; chunks of any other copy are refused by
its caller before they come here, every chunk is written once, and `verified` compares the
digest of all bytes with the chosen one. Must not know: who asked for what, timers, the network.
"""

from __future__ import annotations

from kvcast.protocol.messages.wire import (
    BlockId,
    Chunking,
    DataRun,
    digest_of,
    segment_index,
)


class Assembly:
    """One copy of `block`, as far as it has arrived. `buffer` is writable and holds `size`
    bytes."""

    __slots__ = (
        "_all_of_last",
        "block",
        "buffer",
        "chunking",
        "digest",
        "missing",
        "segments_left",
        "size",
    )

    def __init__(
        self, block: BlockId, size: int, digest: int, buffer: memoryview, chunking: Chunking
    ) -> None:
        if buffer.readonly or buffer.nbytes != size or buffer.itemsize != 1:
            raise ValueError(f"not a writable view of {size} bytes")
        self.block = block
        self.size = size
        self.digest = digest
        self.buffer = buffer
        self.chunking = chunking
        self.missing = [chunking.bitmap(size, i) for i in range(chunking.segments_of(size))]
        """By segment, the chunks that have not arrived."""
        self.segments_left = len(self.missing)
        self._all_of_last = self.missing[-1]

    def is_of(self, size: int, digest: int) -> bool:
        """Whether chunks that say `size` and `digest` belong to this copy."""
        return self.digest == digest and self.size == size

    def all_chunks(self, segment: int) -> int:
        """Every chunk of `segment`, as a bitmap."""
        return self._all_of_last if segment == len(self.missing) - 1 else (1 << 64) - 1

    def add_run(self, run: DataRun) -> int:
        """Put the chunks of a run in their places; returns those that were not there, as a bitmap.

        The caller has checked `is_of` and how the run is cut, and the codec that the chunks lie
        within the size.
        """
        segment = segment_index(run.frame.segment)
        chunk_bytes = self.chunking.chunk_bytes
        missing = before = self.missing[segment]
        start_of_segment = segment * self.chunking.segment_bytes
        buffer, size = self.buffer, self.size
        at, data, stride = run.at, run.data, run.stride
        for chunk in run.chunks:
            bit = 1 << chunk
            if missing & bit:
                missing ^= bit
                start = start_of_segment + chunk * chunk_bytes
                # Not by `min`: this runs for every chunk that a node receives.
                length = chunk_bytes if start + chunk_bytes <= size else size - start
                buffer[start : start + length] = data[at : at + length]
            at += stride
        if missing != before:
            self.missing[segment] = missing
            if not missing:
                self.segments_left -= 1
        return missing ^ before

    def verified(self) -> bool:
        """Whether the bytes, all of them there, are those that the digest was made of."""
        assert self.segments_left == 0
        return digest_of(self.buffer) == self.digest
