"""Which of a block's holders to read from: by what they have to do, not by their order.

Owns: who answers for a block beside its homes, and how loaded nodes are, as the controller last
said; the order in which a read asks; which copies lie here only because the controller gave them.
Must not know: READs, or how any of this is decided (`kvcast.controller.core.replicas`).

A read asks the block's home, as long as that has little to do and nobody else answers for the
block: at one place reads meet, and the home surely has it. Else it asks a node that it draws, the
likelier the less the node has to do, and after that the others; readers that all chose the least
loaded would only make it the most loaded. Whoever looks for company (a reader group, a home that
gathers, answers that are mostly shared of late) asks the home in any case, so that reads of the
same moment go to one place.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvcast.protocol.messages.control import MAX_REPLICATED, Loads, Replicas
from kvcast.protocol.messages.wire import BlockId

BUSY_PERCENT: Final = 50
"""A home that is loaded so far is not the only one to be asked."""
_EASE: Final = 25.0
"""Added to every load, so that readers that have heard the same loads do not all turn round at
once: a node's share changes by less than its load does."""


class Spread:
    """See the module's text."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.revision = 0
        """How often what `is_busy` or `blocks` say has changed."""
        self._busy: frozenset[int] = frozenset()
        self._percents: dict[int, int] = {}
        self._replicas: dict[BlockId, tuple[int, ...]] = {}
        """By block: the other nodes that answer for it beside its homes."""
        self._mine: set[BlockId] = set()
        """Blocks that this node answers for without being their home."""
        self._given: set[BlockId] = set()
        """Blocks that were fetched here to be replicas, listed as such or not yet."""

    def is_busy(self, node: int) -> bool:
        """Whether a home is loaded so far that others had better be asked, too."""
        return node in self._busy

    def blocks(self) -> Iterable[BlockId]:
        """Blocks that further nodes answer for."""
        return self._replicas

    @property
    def replicated(self) -> int:
        """Blocks that further nodes answer for."""
        return len(self._replicas)

    @property
    def given(self) -> int:
        """Blocks that are here as replicas."""
        return len(self._given)

    # --- what the controller says ---------------------------------------------------------------

    def loads_are(self, message: Loads) -> None:
        """How much nodes have to do."""
        self._loads(dict(message.percents))

    def replicas_are(self, message: Replicas, index: int) -> list[BlockId]:
        """Who answers for what; the blocks that this node, `index`, was given and that are taken
        back."""
        before, self._mine = self._mine, set()
        blocks_before = self._replicas.keys()
        self._replicas = {}
        for replica in message.blocks:
            block = BlockId(replica.namespace, replica.key)
            if index in replica.nodes:
                self._mine.add(block)
            self._replicas[block] = tuple(node for node in replica.nodes if node != index)
        self.revision += self._replicas.keys() != blocks_before
        taken = sorted(block for block in self._given & before if block not in self._mine)
        self._given.difference_update(taken)
        return taken

    def given_one(self, block: BlockId) -> None:
        """This node has fetched a block to be its replica. Beyond the bound nobody takes it back:
        then it is a cached copy like others."""
        if len(self._given) < MAX_REPLICATED:
            self._given.add(block)

    def reset(self) -> None:
        """Another controller may speak now, which knows of no replicas: what was given is a cached
        copy like others."""
        self.revision += bool(self._replicas)
        self._loads({})
        self._replicas = {}
        self._mine.clear()
        self._given.clear()

    def keep_nodes(self, nodes: Mapping[int, object], changed: set[int]) -> None:
        """A new map: indices that are not among `nodes`, or that have `changed` hands, stand for
        nobody that was meant."""
        if any(n not in nodes or n in changed for n in self._percents):
            self._loads(
                {n: p for n, p in self._percents.items() if n in nodes and n not in changed}
            )
        if self._replicas:
            blocks_before = self._replicas.keys()
            self._replicas = {
                block: kept
                for block, holders in self._replicas.items()
                if (kept := tuple(n for n in holders if n in nodes and n not in changed))
            }
            self.revision += self._replicas.keys() != blocks_before

    def _loads(self, percents: dict[int, int]) -> None:
        busy = frozenset(node for node, percent in percents.items() if percent >= BUSY_PERCENT)
        self.revision += busy != self._busy
        self._percents, self._busy = percents, busy

    # --- what a read asks -----------------------------------------------------------------------

    def replicas_of(self, block: BlockId) -> tuple[int, ...]:
        """Who answers for a block beside its homes."""
        return self._replicas.get(block, ())

    def order(self, block: BlockId, homes: Sequence[int], *, company: bool) -> Sequence[int]:
        """Whom a read of a block asks, one after the other. `homes`: as the map has them, without
        this node; `company`: it looks for other readers."""
        if not self._replicas and not self._percents:
            return homes
        replicas = self._replicas.get(block, ())
        if not homes or (not replicas and not self.is_busy(homes[0])):
            return homes
        holders = [*homes, *(node for node in replicas if node not in homes)]
        if company or len(holders) < 2:
            return holders
        weights = [1.0 / (_EASE + self._percents.get(node, 0)) for node in holders]
        (first,) = self._rng.choices(holders, weights)
        return [first, *(node for node in holders if node != first)]
