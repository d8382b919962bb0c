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
