"""Which of this node's network cards carry what goes between it and another node.

Owns: the cards' order, and which of them are left out, and for how long. Must not know: what goes
by them, verbs, or who named them.

Cards that are equally near to the arena's memory share the work; those farther off stand in when
none of the nearer ones works. A card with which something failed towards a node is left out there
for `retry_s`, twice as long after each failure that follows, at most `retry_max_s`; one that itself
says that it is of no use, towards all nodes, until it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcast.protocol.links.backoff import Pauses
from kvcast.protocol.links.rdma import RdmaOptions

NEAR: Final = 10
"""The kernel's distance between a NUMA node and itself."""


@dataclass(slots=True)
class CardCounters:
    """What is counted for each card by itself, of what this node orders."""

    pairs_made: int = 0
    failures: int = 0
    """Connections that did not do what they were made for, or broke while they did."""
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(slots=True, eq=False)
class LinkCard:
    """One card, as far as the link must know it. `distance`: from the arena's memory; `problem`:
    why it cannot be used, "" = it can; `blocks`: of requests that are open, on all its pairs;
    `turn`: of the last of these, among all cards'."""

    max_transfer_bytes: int
    name: str = ""
    distance: int = NEAR
    problem: str = ""
    blocks: int = 0
    turn: int = 0
    counters: CardCounters = field(default_factory=CardCounters)


class CardsToPeer:
    """The cards that there are towards one node."""

    def __init__(self, cards: Sequence[LinkCard], options: RdmaOptions) -> None:
        self._cards = cards
        self._options = options
        self._troubles: dict[LinkCard, Pauses] = {}
        self._told: set[LinkCard] = set()
        """Those of them whose trouble was news."""

    def usable(self, now: float) -> list[LinkCard]:
        """The nearest of those that work."""
        works = [card for card in self._cards if not card.problem and self._rested(now, card)]
        nearest = min((card.distance for card in works), default=0)
        return [card for card in works if card.distance == nearest]

    def _rested(self, now: float, card: LinkCard) -> bool:
        pauses = self._troubles.get(card)
        return pauses is None or pauses.may_try(now)

    def on_trial(self, card: LinkCard) -> bool:
        """Whether it is tried again after a failure: with one call."""
        return card in self._troubles

    def failed(self, now: float, card: LinkCard) -> bool:
        """Something failed by this card; whether that is to be told, which the card does itself
        where it knows of a problem."""
        if card not in self._troubles:
            self._troubles[card] = Pauses(self._options.retry_s, self._options.retry_max_s)
        self._troubles[card].failed(now)
        is_news = card not in self._told and not card.problem
        if is_news:
            self._told.add(card)
        return is_news

    def worked(self, card: LinkCard) -> bool:
        """Something was done by it; whether that is to be told."""
        was_told = card in self._told
        self._troubles.pop(card, None)
        self._told.discard(card)
        return was_told

    def forget(self) -> None:
        """Let all be tried when the node is tried again."""
        self._troubles.clear()
        self._told.clear()
