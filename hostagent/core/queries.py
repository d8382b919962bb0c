"""Questions and orders about many blocks at once: `exists` and `drop`.

Owns: which node is asked about which block, in which round. Must not know: sockets or clients.

`exists` counts the longest prefix that the pool holds: what lies here is known; of the rest,
every block's first home is asked, all homes at once, one request a node; then the next home of
those not found, and so on. A home that does not answer counts as one without the block: a miss
costs a recomputation, a wrong hit costs the engine its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.store import Store
from kvcast.protocol.chains import Part, count_of, mask_of, merged, parted, prefix_of
from kvcast.protocol.links.bulk import DropCall, ExistsCall
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.wire import BlockId


class Queries:
    """Makes `exists` and `drop` out of bulk requests."""

    def __init__(
        self,
        store: Store,
        outbox: BulkOutbox,
        replicas_of: Callable[[BlockId], Iterable[int]] = lambda _block: (),
    ) -> None:
        """`replicas_of`: who answers for a block beside its homes."""
        self._store = store
        self._outbox = outbox
        self._replicas_of = replicas_of

    def exists(
        self,
        namespace: int,
        chain: bytes,
        deadline: float,
        found: Callable[[int], None],
    ) -> None:
        """Call `found` once with how long a prefix of `chain` (keys in a row) there is."""
        _Exists(self._store, self._outbox, namespace, chain, deadline, found).start()

    def drop(
        self,
        namespace: int,
        keys: list[bytes],
        deadline: float,
        forgotten: Callable[[int], None],
    ) -> None:
        """Forget blocks here and at their homes; `forgotten` gets how many now are, by
        every one of their homes."""
        pool = self._outbox.pool
        by_node: dict[int, list[bytes]] = {}
        for key in keys:
            block = BlockId(namespace, key)
            self._store.drop(block)
            if pool is not None:
                for node in {*pool.homes_of(block), *self._replicas_of(block)} - {pool.index}:
                    by_node.setdefault(node, []).append(key)
        kept: set[bytes] = set()
        left = len(by_node)
        if not left:
            forgotten(len(keys))
            return

        def answered_by(asked: list[bytes]) -> Callable[[float, str], None]:
            def ended(_now: float, outcome: str) -> None:
                nonlocal left
                if outcome != bulk.DONE:
                    kept.update(asked)
                left -= 1
                if left == 0:
                    forgotten(sum(key not in kept for key in keys))

            return ended

        for node, asked in by_node.items():
            self._outbox.calls.append(
                DropCall(node, namespace, asked, deadline, answered_by(asked))
            )


class _Exists:
    """One question, from round to round."""

    def __init__(
        self,
        store: Store,
        outbox: BulkOutbox,
        namespace: int,
        chain: bytes,
        deadline: float,
        found: Callable[[int], None],
    ) -> None:
        self._outbox = outbox
        self._namespace = namespace
        self._chain = chain
        self._count = count_of(chain)
        self._deadline = deadline
        self._found = found
        self._held = store.holds(namespace, chain)
        self._round = 0
        self._left = 0

    def start(self) -> None:
        """Ask the next home of every block not found yet; answer where none is left to ask."""
        pool = self._outbox.pool
        while pool is not None and self._held != mask_of(self._count):
            # What lies behind a gap that can no longer be filled is not asked for.
            parts = parted(self._chain, self._held, pool.homes_in_round(self._round))
            self._round += 1
            mine = parts.pop(pool.index, None)
            if parts:
                self._left = len(parts)
                for node, part in parts.items():
                    self._ask(node, part)
                return
            if mine is None:
                break
        self._found(prefix_of(self._held))

    def _ask(self, node: int, part: Part) -> None:
        def answer(held: int) -> None:
            self._held = merged(self._held, self._count, part, held)

        def ended(_now: float, _outcome: str) -> None:
            self._left -= 1
            if self._left == 0:
                self.start()

        self._outbox.calls.append(
            ExistsCall(node, self._namespace, part.keys, self._deadline, answer, ended)
        )
