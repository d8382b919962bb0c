"""Whose windows are opened next: what a node lets the cards of others move, shared by weights.

Owns: how many bytes lie in windows that are open for others, by namespace, and who waits for
windows (`fair_queue`), on all connections of a node together. Must not know: how a window is
opened, cards, or what is asked for.

A card answers READs and takes WRITEs without its node's knowledge, but the node decides when
windows are opened. One namespace alone is not held back. While several have windows open or wait
for some, no more are opened once the open ones cover `bound_bytes`, and weights say whose are next.
Take two namespaces that wait all the while, and divide the bytes that each was granted by its
weight: the two results differ by no more than one request of each, so divided. A namespace that is
next and has nothing open does not wait for that bound. The others may have got much more when they
were alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcast.protocol.fair_queue import FairQueue


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
        self._bound_bytes = bound_bytes
        # Each costs something when it is taken, and the rest once it has begun.
        self._waiting: FairQueue[Grant] = FairQueue(
            lambda grant: grant.namespace, lambda _grant: 1.0, weight_of
        )
        self._open: dict[int, int] = {}
        """Bytes by namespace, of those that have any."""
        self.open_bytes = 0

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
            self._count(grant.namespace, -grant.size_bytes)
            grant.size_bytes = 0
        self._pass_on(now, grants[0].wake)

    def _pass_on(self, now: float, by: Callable[[], None]) -> None:
        woken: dict[Callable[[], None], None] = {}
        while (namespace := self._next()) is not None:
            grant = self._waiting.take(namespace)
            grant.size_bytes = grant.begin(now)
            self._waiting.charge(namespace, grant.size_bytes - 1.0)
            self._count(namespace, grant.size_bytes)
            woken[grant.wake] = None
        woken.pop(by, None)
        for wake in woken:
            wake()  # which may come by here again

    def _next(self) -> int | None:
        """The namespace that may begin one now; None = nobody may."""
        namespace = self._waiting.next_flow()
        if namespace is None or self.open_bytes < self._bound_bytes:
            return namespace
        alone = not self._waiting.is_contended and self._open.keys() <= {namespace}
        return namespace if alone or namespace not in self._open else None

    def _count(self, namespace: int, size_bytes: int) -> None:
        left = self._open.pop(namespace, 0) + size_bytes
        if left:
            self._open[namespace] = left
        self.open_bytes += size_bytes

    def check(self, open_bytes: int) -> None:
        """AssertionError if this contradicts itself, or other than so many are in open windows."""
        assert self.open_bytes == sum(self._open.values()) == open_bytes
        assert all(size_bytes > 0 for size_bytes in self._open.values())
        assert not self._waiting or self._next() is None, "somebody waits for nothing"
