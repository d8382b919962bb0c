"""DATA of a block, as a home would send it."""

from __future__ import annotations

from kvcast.protocol.messages import wire
from kvcast.protocol.messages.wire import BlockId, Frame, digest_of


def data_frame(
    block: BlockId, content: bytes, index: int, chunk: int, *, flags: int = 0, tag: int = 0
) -> Frame:
    """A chunk of a segment, in the smallest chunks."""
    start = index * wire.SEGMENT_BYTES + chunk * wire.CHUNK_BYTES
    return Frame(
        wire.OP_DATA,
        *block,
        segment=index,
        flags=flags,
        digest=digest_of(content),
        size=len(content),
        chunk=chunk,
        tag=tag,
        payload=content[start : start + wire.CHUNK_BYTES],
    )
