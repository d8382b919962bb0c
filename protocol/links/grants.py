"""Whose windows are opened next: what a node lets the cards of others move, shared by weights.

Owns: how many bytes lie in windows that are open for others, by namespace, and who waits for
windows (`fair_queue`), on all connections of a node together. Must not know: how a window is
opened, cards, or what is asked for.

A card answers READs and takes WRITEs without its node's knowledge, but the node decides when
windows are opened: while several namespaces have some open or wait for some, no more once the open
ones cover `bound_bytes` (`BoundedQueue` says it exactly), and weights say whose are next. Take two
namespaces that wait all the while, and divide the bytes that each was granted by its weight: the
two results differ by no more than one request of each, so divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcast.protocol.fair_queue import BoundedQueue


@dataclass(slots=True, eq=False)
class Grant:
    """One request for windows. `begin` opens them, and says how many bytes they cover, which nobody
    knows before; `wake` (one for each connection) is called after that, unless the connection
    itself was asking, or ended something."""

    namespace: int
    begin: Callable[[float], int]
    wake: Callable[[], None]
    size_bytes: int = 0
    """In its windows."""


class Grants:
    """See the module's text. Who waits is bounded by who asks: each connection has so many requests
    at most."""

    def __init__(
        self, bound_bytes: int, weight_of: Callable[[int], float] = lambda _namespace: 1.0
    ) -> None:
        # Each costs something when it is taken, and the rest once it has begun.
        self._waiting: BoundedQueue[Grant] = BoundedQueue(
            bound_bytes, lambda grant: grant.namespace, lambda _grant: 1.0, weight_of
        )

    @property
    def open_bytes(self) -> int:
        """In windows that are open."""
        return self._waiting.used

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def ask(self, now: float, grant: Grant) -> None:
        """Let it begin, now or in its turn. Until when it waits is the caller's to say."""
        self._waiting.push(grant)
        self._pass_on(now, grant.wake)

    def end(self, now: float, *grants: Grant) -> None:
        """These, of one connection, wait no more, or their windows are closed."""
        if not grants:
            return
        if self._waiting:
            self._waiting.remove(set(grants).__contains__)
        for grant in grants:
            self._waiting.use(grant.namespace, -grant.size_bytes)
            grant.size_bytes = 0
        self._pass_on(now, grants[0].wake)

    def _pass_on(self, now: float, by: Callable[[], None]) -> None:
        woken: dict[Callable[[], None], None] = {}
        while (namespace := self._waiting.free_flow()) is not None:
            grant = self._waiting.take(namespace)
            grant.size_bytes = grant.begin(now)
            self._waiting.charge(namespace, grant.size_bytes - 1.0)
            self._waiting.use(namespace, grant.size_bytes)
            woken[grant.wake] = None
        woken.pop(by, None)
        for wake in woken:
            wake()  # which may come by here again

    def check(self, open_bytes: int) -> None:
        """AssertionError if this contradicts itself, or other than so many are in open windows."""
        self._waiting.check(open_bytes)
        assert self._waiting.free_flow() is None, "somebody waits for nothing"
