"""Digests that may take a while: how a core asks for them, and hears of them.

Owns: what whoever makes digests is asked. Must not know: whether a thread makes them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcast.protocol.messages.wire import digest_of

Digested = Callable[[float, list[int]], None]
"""Is told what time it is, and the digests."""
MakeDigests = Callable[[float, list[memoryview], Digested], None]
"""Makes digests of blocks' bytes, which nobody changes meanwhile, and tells them then or later."""


def digests_at_once(now: float, blocks: list[memoryview], then: Digested) -> None:
    """As `MakeDigests`, here and now."""
    then(now, list(map(digest_of, blocks)))
