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
        keys: list[bytes],
        deadline: float,
        found: Callable[[int], None],
    ) -> None:
        """Call `found` once with the length of the prefix of `keys` that exists."""
        _Exists(self._store, self._outbox, namespace, keys, deadline, found).start()

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
        keys: list[bytes],
        deadline: float,
        found: Callable[[int], None],
    ) -> None:
        self._outbox = outbox
        self._namespace = namespace
        self._keys = keys
        self._deadline = deadline
        self._found = found
        self._held = store.holds(namespace, keys)
        self._round = 0
        self._left = 0

    def start(self) -> None:
        """Ask the next home of every block not found yet; answer where none is left to ask."""
        pool = self._outbox.pool
        while pool is not None and False in self._held:
            by_node: dict[int, list[int]] = {}
            missing = list(range(len(self._held)))
            if True in self._held:
                missing = [position for position in missing if not self._held[position]]
            homes = pool.homes_of_all(self._keys_at(missing))
            any_home_left = False
            if homes.count(homes[0]) == len(homes):  # as in small pools: no need to look at each
                here = homes[0][self._round : self._round + 1]
                any_home_left = bool(here)
                by_node = {node: missing for node in here if node != pool.index}
            else:
                # What lies behind a gap that can no longer be filled is not asked for.
                for position, nodes in zip(missing, homes, strict=True):
                    if self._round >= len(nodes):
                        break
                    any_home_left = True
                    node = nodes[self._round]
                    if node in by_node:
                        by_node[node].append(position)
                    elif node != pool.index:
                        by_node[node] = [position]
            self._round += 1
            if by_node:
                self._left = len(by_node)
                for node, positions in by_node.items():
                    self._ask(node, positions)
                return
            if not any_home_left:
                break
        self._found(self._held.index(False) if False in self._held else len(self._held))

    def _keys_at(self, positions: list[int]) -> list[bytes]:
        if len(positions) == len(self._keys):
            return self._keys
        return [self._keys[position] for position in positions]

    def _ask(self, node: int, positions: list[int]) -> None:
        def answer(held: list[bool]) -> None:
            if len(held) == len(self._held):
                self._held = held  # all were asked of one node
                return
            for position, is_held in zip(positions, held, strict=True):
                if is_held:
                    self._held[position] = True

        def ended(_now: float, _outcome: str) -> None:
            self._left -= 1
            if self._left == 0:
                self.start()

        keys = self._keys_at(positions)
        self._outbox.calls.append(
            ExistsCall(node, self._namespace, keys, self._deadline, answer, ended)
        )
