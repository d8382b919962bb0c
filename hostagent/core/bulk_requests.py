"""Requests to other agents over the bulk link: what the agent's cores ask of its adapters.

Owns: the outbox that the cores share. Must not know: how a call is made (`kvcast.protocol.links`)
or why (the cores).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvcast.hostagent.core.pool import Pool
from kvcast.protocol.links.bulk import BulkCall


@dataclass(slots=True)
class BulkOutbox:
    """What the cores share: the present pool, and the calls that wait to be made."""

    pool: Pool | None = None
    calls: deque[BulkCall] = field(default_factory=deque)
    unwanted: bool = False
    """Whether gets among the calls that were made before are not `wanted` any more."""

    @property
    def waits(self) -> bool:
        """Whether there is anything for the adapters."""
        return bool(self.calls) or self.unwanted
