"""The RDMA cards of this node: which are used, how near they are to the arena, and which of them a
caller meets.

Owns: the choice of cards by name, what the kernel says of NUMA nodes, and that a card which says
that it is of no use is left out. Must not know: how a card is driven (`verbs`), or what goes by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final

from kvcast.hostagent.network.interfaces import interface_network
from kvcast.hostagent.network.verbs import Card, devices
from kvcast.protocol.links.cards import NEAR, LinkCard
from kvcast.protocol.links.rdma import Pair, RdmaOptions, Verbs, VerbsError
from kvcast.protocol.messages.rdma import Endpoint

log = logging.getLogger(__name__)

ALL: Final = "all"
"""In place of names: all cards that have an address."""
_SYSFS: Final = Path("/sys")
_MOST: Final = 0.75
"""An arena is on a node that has so much of it."""


def distance_of(card: str, arena_node: int | None, sysfs: Path = _SYSFS) -> int:
    """How far the card of that name is from a NUMA node, as the kernel says: 10 within the node.
    What nobody knows counts as near, so that no card is left aside for it."""
    try:
        node = int((sysfs / f"class/infiniband/{card}/device/numa_node").read_text())
    except (OSError, ValueError):
        return NEAR
    if arena_node is None:
        return NEAR
    nodes = sysfs / "devices/system/node"
    try:
        # One for each node that there is, in their order.
        distances = map(int, (nodes / f"node{arena_node}/distance").read_text().split())
        numbers = sorted(int(path.name[4:]) for path in nodes.glob("node[0-9]*"))
        return dict(zip(numbers, distances, strict=True)).get(node, NEAR)
    except (OSError, ValueError):
        return NEAR


def node_of_most(bytes_by_node: dict[int, int]) -> int | None:
    """The NUMA node on which an arena is; None where it is on several."""
    most = max(bytes_by_node, key=lambda node: bytes_by_node[node], default=None)
    if most is None or bytes_by_node[most] < _MOST * sum(bytes_by_node.values()):
        return None
    return most


class Cards:
    """All that are used. `distances`: of each; as far as they are not given, all are near."""

    def __init__(self, cards: Sequence[Card], distances: dict[str, int] | None = None) -> None:
        self._of: dict[LinkCard, Card] = {}
        self._networks: dict[Card, IPv4Network] = {}
        self.changed: Callable[[LinkCard], None] = lambda _card: None
        """Told of a card whose `problem` has changed, after it was noted there."""
        for card in cards:
            most_bytes = card.calling.max_transfer_bytes
            distance = (distances or {}).get(card.name, NEAR)
            link = LinkCard(most_bytes, card.name, distance, card.problem)
            self._of[link] = card
            self._networks[card] = interface_network(card.ip)
            card.changed = lambda link=link: self._changed(link)  # type: ignore[misc]
            log.info("RDMA card %s: %s, distance %d from the arena", card.name, card.ip, distance)
            if card.problem:
                log.warning("RDMA card %s is left out: %s", card.name, card.problem)

    @property
    def links(self) -> list[LinkCard]:
        """As the link knows them."""
        return list(self._of)

    def calling(self, link: LinkCard) -> Verbs:
        """For what this node orders by that card."""
        return self._of[link].calling

    def card_with(self, ip: str) -> Card | None:
        """The one that has this address."""
        return next((card for card in self._of.values() if card.ip == ip), None)

    def _changed(self, link: LinkCard) -> None:
        link.problem = self._of[link].problem
        if link.problem:
            log.warning("RDMA card %s is left out: %s", link.name, link.problem)
        else:
            log.warning("RDMA card %s is back", link.name)
        self.changed(link)

    def across(self, caller: Endpoint) -> LinkCard:
        """The card that a caller's half of a pair is to meet: in the caller's network, if there is
        one (others may not reach it); of those that work the nearest; and then the one that has
        fewest pairs."""
        address = IPv4Address(caller.gid[-4:])

        def order(link: LinkCard) -> tuple[bool, bool, int, int]:
            card = self._of[link]
            elsewhere = address not in self._networks[card]
            return bool(link.problem), elsewhere, link.distance, card.pairs

        return min(self._of, key=order)

    def make_pair(self, link: LinkCard, completed: Callable[..., None]) -> Pair:
        """A half for a caller, on that card; VerbsError where there are no more, or it is of no
        use."""
        if link.problem:
            raise VerbsError(link.problem)
        return self._of[link].make_pair(completed)

    def values(self) -> dict[str, dict[str, float]]:
        """What there is to say of each card, by its name; totals end in `_total`."""
        return {
            link.name: {
                "works": float(not link.problem),
                "distance": float(link.distance),
                "pairs": float(card.pairs),
                "pairs_made_total": float(link.counters.pairs_made),
                "failures_total": float(link.counters.failures),
                "bytes_read_total": float(link.counters.bytes_read),
                "bytes_written_total": float(link.counters.bytes_written),
            }
            for link, card in self._of.items()
        }

    def close(self) -> None:
        """Give everything back."""
        for card in self._of.values():
            card.close()


def open_cards(
    ip: str,
    names: Sequence[str],
    memory: memoryview,
    options: RdmaOptions,
    arena_node: int | None = None,
) -> Cards:
    """Open the cards of these names, without any the one that has the address `ip`; VerbsError
    where there is none of them. `arena_node`: the NUMA node that the arena is on, if any."""
    if not names:
        return Cards([Card(ip, memory, options)])
    wanted = devices() if ALL in names else list(dict.fromkeys(names))
    cards: list[Card] = []
    problems = []
    for name in wanted:
        try:
            cards.append(Card(ip, memory, options, name))
        except VerbsError as error:
            problems.append(f"{name}: {error}")
            log.warning("RDMA card %s is not used: %s", name, error)
    if not cards:
        raise VerbsError("; ".join(problems))
    return Cards(cards, {card.name: distance_of(card.name, arena_node) for card in cards})
