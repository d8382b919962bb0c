"""First in, first out: what was stored first goes first, however often it is used."""

from __future__ import annotations

from typing import ClassVar

from kvcast.hostagent.tiers.policies.base import K, QueuePolicy


class Fifo(QueuePolicy[K]):
    """See the module's description."""

    NAME: ClassVar[str] = "fifo"
