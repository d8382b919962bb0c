"""What a home says of one block that it answers READs of."""

from __future__ import annotations

from kvcast.controller.core.admission import HeatMap
from kvcast.protocol.messages.control import HotBlock
from kvcast.protocol.messages.wire import SEGMENT_BYTES, BlockId


def home_reports(
    heat: HeatMap,
    block: BlockId,
    *,
    reads: int,
    now: float,
    readers: int = 1,
    depth: int = 0,
    size_bytes: int = SEGMENT_BYTES,
) -> None:
    """A home's report of one block."""
    report = HotBlock(block.namespace, block.key, reads, readers, depth, size_bytes, 1)
    heat.seen_by_home({block: report}, now)
