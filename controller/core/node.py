"""One node that the pool knows: where it stands, and what was last said of it.

Owns: what can happen to a node in which standing (`TRANSITIONS`), and what of it outlives a
controller (`SavedNode`). Must not know: when any of that happens (`membership`).

Two rules. A node's standing changes in `Node.happen` and nowhere else. What the table does not
name cannot happen: it raises, and the mistake is ours, since `membership` looks at the standing
before.

Three facts stand beside it, and do not follow from it:

    draining    what an operator wants. It outlives a death and a controller, and ends with the
                node's incarnation. PLACED and draining: its blocks are being handed over; in any
                other standing: it holds none, and is to hold none. Only JOINING excludes it.
    connection  a live node may have lost it, and one whose lease has run out may still have it.
    unheard     a former controller knew the node, and it has not said since what it holds: it may
                die meanwhile, and come back, and be placed anew.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvcast.protocol.impossible import after
from kvcast.protocol.messages.control import NodeInfo
from kvcast.protocol.messages.ethernet import ETHERNET_MTU_BYTES


class Standing(Enum):
    """Where a node stands: whether its lease runs, and whether buckets may name it."""

    DEAD = "dead"
    """Its lease has run out, or it has left."""
    NEWCOMER = "newcomer"
    """It lives and has never been seen before: gets its first buckets without waiting to prove
    itself."""
    WAITING = "waiting"
    """It lives, and was dead or drained before: gets buckets when it is stable."""
    JOINING = "joining"
    """It is being handed what is to be its own, and no bucket is its own yet."""
    PLACED = "placed"
    """Buckets may name it."""


class NodeEvent(Enum):
    """What can happen to a node."""

    COME = "come"
    """It registers, and was dead."""
    PLACE = "place"
    """Its time has come, and nobody has anything to hand over."""
    JOIN = "join"
    """Its time has come, and others hold what is to be its own."""
    TAKE_OVER = "take over"
    """It has been handed all of that."""
    HAND_OVER = "hand over"
    """Others have been handed all that it held."""
    DRAIN = "drain"
    """It is to hold nothing. That it takes back is no event: its time may come again."""
    DIE = "die"
    """Its lease runs out, or it leaves."""


_S, _E = Standing, NodeEvent

TRANSITIONS: Final[dict[Standing, dict[NodeEvent, Standing]]] = {
    _S.DEAD: {_E.COME: _S.WAITING, _E.DRAIN: _S.DEAD},
    _S.NEWCOMER: {
        _E.PLACE: _S.PLACED,
        _E.JOIN: _S.JOINING,
        _E.DRAIN: _S.NEWCOMER,
        _E.DIE: _S.DEAD,
    },
    _S.WAITING: {
        _E.PLACE: _S.PLACED,
        _E.JOIN: _S.JOINING,
        _E.DRAIN: _S.WAITING,
        _E.DIE: _S.DEAD,
    },
    _S.JOINING: {_E.TAKE_OVER: _S.PLACED, _E.DRAIN: _S.WAITING, _E.DIE: _S.DEAD},
    _S.PLACED: {_E.HAND_OVER: _S.WAITING, _E.DRAIN: _S.PLACED, _E.DIE: _S.DEAD},
}

OUTSIDE: Final = frozenset({_S.NEWCOMER, _S.WAITING})
"""It lives, and is not on the way to any bucket. Who is to be no home stays here."""


@dataclass(frozen=True)
class Address:
    """Where a node is, as registered: `mac` as 02:6b:76:00:00:01, `switch_port` 1..32."""

    ip: str
    mac: str
    switch_port: int
    udp_port: int
    bulk_host: str
    bulk_port: int
    rdma_port: int = 0
    zone_queue_pair: int = 0
    zone_key: int = 0


@dataclass
class SavedNode:
    """What outlives the controller of a node. Of its standing that is only whether it was placed:
    the next controller can rely on nothing else."""

    node_id: str
    index: int
    incarnation: int
    address: Address
    arena_bytes: int
    placed: bool
    draining: bool = False
    """It is to be placed no more, until it is told otherwise or begins another incarnation."""


@dataclass
class Node:
    """One known node. Times are on the caller's clock, in seconds."""

    node_id: str
    index: int
    incarnation: int
    address: Address
    arena_bytes: int
    standing: Standing
    draining: bool = False
    """As in `SavedNode`."""
    mtu_bytes: int = ETHERNET_MTU_BYTES
    """The longest IPv4 packet that its network takes; of one that has not registered with us yet
    the least is assumed."""
    link_bits_per_s: int = 0
    """What its link carries each way; 0 = not known."""
    connection: int | None = None
    lease_until: float = 0.0
    live_since: float = 0.0
    """Since when it has lived, or an operator has wanted it back."""
    handed_epoch: int = 0
    """The epoch of the map by which it last said how much it has to hand over: `handed_left` blocks
    of `handed_total`, `handed_no_room` of them for want of room, beside `handed_failed` that it
    could not."""
    handed_left: int = 0
    handed_total: int = 0
    handed_failed: int = 0
    handed_no_room: int = 0
    arena_used_bytes: int = 0
    blocks: int = 0
    unheard: bool = False
    """A former controller knew it, and it has not said since what it holds."""
    epoch: int = 0
    """The epoch of the map that the node last said it uses."""

    @property
    def live(self) -> bool:
        """Whether its lease runs."""
        return self.standing is not Standing.DEAD

    @property
    def joining(self) -> bool:
        """Whether it is being handed what is to be its own."""
        return self.standing is Standing.JOINING

    @property
    def placed(self) -> bool:
        """Whether buckets may name it."""
        return self.standing is Standing.PLACED

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(index=self.index, node_id=self.node_id, **dataclasses.asdict(self.address))

    @property
    def saved(self) -> SavedNode:
        """What outlives this controller."""
        return SavedNode(
            *(self.node_id, self.index, self.incarnation, self.address, self.arena_bytes),
            *(self.placed, self.draining),
        )

    def happen(self, event: NodeEvent) -> None:
        """Go to where the table leads; ImpossibleEventError if it leads nowhere."""
        self.standing = after(TRANSITIONS, self.standing, event, self.node_id)
