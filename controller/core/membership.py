"""Membership: which nodes the pool knows, which of them live, and which hold buckets.

Owns: registration (one incarnation of a node id at a time, no two live nodes with one address),
leases, and when a node gets or loses its buckets. Must not know: what a bucket is, connections
(an opaque number stands for one), the switch, sockets, clocks: every call is given `now`.

A node is *live* while its lease runs, and *placed* while buckets may name it; `node` has all the
places where it may stand, and which of them follow one another:

| event                            | live | placed                                      |
|----------------------------------|------|---------------------------------------------|
| registers, never seen before     | yes  | at the next `advance`; see below            |
| registers again within its lease | yes  | stays                                       |
| lease runs out, or it leaves     | no   | no, at once                                 |
| registers after that             | yes  | after `rebalance_after_s` of life; as above |
| is to be drained                 | yes  | until others have its blocks (`settle`)     |

Where placed nodes hold blocks, a node that comes is *joining* first: it is among the `coming`, who
will be placed when they have been handed what is theirs (`settle`). A node that is to be *drained*
is placed until then, and not among the coming. Where one of the coming begins another incarnation
meanwhile, all is handed over anew.

So a node that comes and goes moves its buckets away once, and back only when it is stable. A dead
node stays known (its forwarding stays, its index stays) until its address is wanted by another
node or the bound is reached.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import NamedTuple

from kvcast.controller.core.node import OUTSIDE, Address, Node, NodeEvent, SavedNode, Standing
from kvcast.p4.targets import MAX_PORTS
from kvcast.protocol.messages.control import CONTROL_PROTOCOL_VERSION, Register
from kvcast.protocol.messages.ethernet import unicast_mac

MAX_LIVE_NODES = MAX_PORTS
"""As many again may be known that are dead; beyond that the one that is dead for longest is
forgotten."""


class RegistrationError(ValueError):
    """A node cannot join; the text says why, to the node's operator."""


class Views(NamedTuple):
    """The nodes, by index."""

    saved: tuple[SavedNode, ...]
    """What `Membership.restore` needs."""
    addresses: tuple[tuple[str, Address], ...]
    """Every known node's."""
    placed: frozenset[str]
    """Those that buckets may name."""
    readers: frozenset[str]
    """Live ones that are no homes, and never will be."""
    coming: frozenset[str]
    """Those that buckets will name when all is handed over; as `placed` where nothing is."""


class DrainError(ValueError):
    """A node cannot be drained; the text says why, to the operator."""


def checked_address(message: Register, max_port: int) -> Address:
    """The registered address in canonical form; RegistrationError if no host can have it."""
    try:
        ip = ipaddress.IPv4Address(message.ip)
    except ValueError:
        raise RegistrationError(f"ip {message.ip!r} is not an IPv4 address") from None
    if ip.is_multicast or ip.is_unspecified or ip == ipaddress.IPv4Address("255.255.255.255"):
        raise RegistrationError(f"ip {ip} is not a host's address")
    try:
        mac = unicast_mac(message.mac)
    except ValueError:
        raise RegistrationError(f"mac {message.mac!r} is not a host's address") from None
    if not 1 <= message.switch_port <= max_port:
        raise RegistrationError(f"switch port {message.switch_port} is outside 1..{max_port}")
    if not message.udp_port:
        raise RegistrationError("udp port 0")
    return Address(
        ip=str(ip),
        mac=mac,
        switch_port=message.switch_port,
        udp_port=message.udp_port,
        bulk_host=message.bulk_host,
        bulk_port=message.bulk_port,
        rdma_port=message.rdma_port,
        zone_queue_pair=message.zone_queue_pair,
        zone_key=message.zone_key,
    )


class Membership:
    """The nodes by id. Methods return whether the pool's map changed by them."""

    def __init__(
        self,
        *,
        lease_s: float,
        rebalance_after_s: float,
        max_nodes: int = MAX_LIVE_NODES,
        homes: frozenset[str] = frozenset(),
    ) -> None:
        """`max_nodes`: live ones, and the switch's ports for them. `homes`: the nodes that are ever
        placed; all, if none is named."""
        self._max_nodes = max_nodes
        self._homes = homes
        self._lease_s = lease_s
        self._rebalance_after_s = rebalance_after_s
        self.nodes: dict[str, Node] = {}
        self._views: Views | None = None
        self._begins_anew = False
        """Whether a map is due in which nothing moves, so that nodes forget what they have handed
        over to one that has lost it."""

    @classmethod
    def restore(
        cls,
        saved: list[SavedNode],
        now: float,
        *,
        lease_s: float,
        rebalance_after_s: float,
        max_nodes: int = MAX_LIVE_NODES,
        homes: frozenset[str] = frozenset(),
    ) -> Membership:
        """The membership as a former controller left it.

        Placed nodes are given two leases to find the new controller, so that its start moves no
        bucket.
        """
        membership = cls(
            lease_s=lease_s,
            rebalance_after_s=rebalance_after_s,
            max_nodes=max_nodes,
            homes=homes,
        )
        for one in saved:
            placed = one.placed and membership._may_be_home(one.node_id)
            membership.nodes[one.node_id] = Node(
                *(one.node_id, one.index, one.incarnation, one.address, one.arena_bytes),
                standing=Standing.PLACED if placed else Standing.DEAD,
                draining=one.draining,
                live_since=now,
                lease_until=now + 2 * lease_s,
                unheard=placed,
            )
        return membership

    @property
    def views(self) -> Views:
        """The nodes as others want them; the same object until something of it changes."""
        if self._views is None:
            self._views = self._seen()
        return self._views

    def _seen(self) -> Views:
        known = sorted(self.nodes.values(), key=lambda n: n.index)
        placed = frozenset(n.node_id for n in known if n.placed)
        coming = frozenset(
            n.node_id
            for n in known
            if not self._begins_anew and (n.joining or (n.placed and not n.draining))
        )
        return Views(
            saved=tuple(n.saved for n in known),
            addresses=tuple((n.node_id, n.address) for n in known),
            placed=placed,
            coming=coming or placed,  # nobody is left to take anything over, or not now
            readers=frozenset(
                n.node_id for n in known if n.live and not self._may_be_home(n.node_id)
            ),
        )

    def register(self, message: Register, connection: int, now: float) -> tuple[Node, bool]:
        """Take a node in; RegistrationError, and nothing changed, if it cannot join."""
        if message.version != CONTROL_PROTOCOL_VERSION:
            raise RegistrationError(
                f"control protocol version {message.version}, expected {CONTROL_PROTOCOL_VERSION}"
            )
        address = checked_address(message, self._max_nodes)
        node = self.nodes.get(message.node_id)
        if (
            node is not None
            and node.live
            and node.connection is not None
            and node.connection != connection
            and node.incarnation != message.incarnation
        ):
            raise RegistrationError(f"{message.node_id} is already connected")
        rivals = [n for n in self.nodes.values() if n.node_id != message.node_id]
        taken = [(n, what) for n in rivals if (what := _conflict(n.address, address))]
        for rival, what in taken:
            if rival.live:
                raise RegistrationError(f"{what} is taken by {rival.node_id}")
        if node is None and sum(n.live for n in rivals) >= self._max_nodes:
            raise RegistrationError(f"the pool is full ({self._max_nodes} nodes)")
        takes_over = not self.is_settled and message.node_id in self.views.coming
        for rival, _ in taken:
            del self.nodes[rival.node_id]
        self._views = None
        changed = False
        if node is None:
            node = self._new_node(message, address, now)
            changed = True
        else:
            changed = not node.live or node.address != address
            changed |= node.mtu_bytes != message.mtu_bytes
            if not node.live:
                node.happen(NodeEvent.COME)
                node.live_since = now
            if node.incarnation != message.incarnation:
                changed |= node.draining and node.placed
                node.draining = False
                if takes_over:
                    self._begins_anew = changed = True  # what it was handed is gone
            node.incarnation = message.incarnation
            node.address = address
        node.arena_bytes = message.arena_bytes
        node.mtu_bytes = message.mtu_bytes
        node.link_bits_per_s = message.link_bits_per_s
        node.connection = connection
        node.lease_until = now + self._lease_s
        return node, changed

    def _new_node(self, message: Register, address: Address, now: float) -> Node:
        if len(self.nodes) >= 2 * self._max_nodes:
            dead = [n for n in self.nodes.values() if not n.live]
            del self.nodes[min(dead, key=lambda n: n.lease_until).node_id]
        used = {n.index for n in self.nodes.values()}
        index = next(i for i in range(1, 2 * self._max_nodes + 2) if i not in used)
        node = Node(
            node_id=message.node_id,
            index=index,
            incarnation=message.incarnation,
            address=address,
            arena_bytes=message.arena_bytes,
            standing=Standing.NEWCOMER,
            live_since=now,
        )
        self.nodes[node.node_id] = node
        return node

    def renew(self, node: Node, now: float) -> None:
        """The node has just spoken."""
        node.lease_until = now + self._lease_s

    def excuse(self, seconds: float) -> None:
        """Nobody could be heard for so long: every running lease is longer by it."""
        for node in self.nodes.values():
            if node.live:
                node.lease_until += seconds

    def await_all(self, now: float) -> None:
        """Nobody is listened to now: whoever lives has two leases from now on to be heard again, as
        after a restart."""
        for node in self.nodes.values():
            if node.live:
                node.lease_until = now + 2 * self._lease_s

    def disconnected(self, node: Node, connection: int) -> None:
        """The node's connection is gone; its lease runs on."""
        if node.connection == connection:
            node.connection = None

    def leave(self, node: Node, now: float) -> bool:
        """The node says that it stops: its buckets move now."""
        node.lease_until = now
        return self._die(node)

    def advance(self, now: float) -> bool:
        """Let leases run out, and place the nodes whose time has come."""
        changed = False
        for node in self.nodes.values():
            if node.standing is Standing.PLACED and now < node.lease_until:
                continue  # as nearly all are
            if node.live and now >= node.lease_until:
                changed |= self._die(node)
            elif self._waits(node) and self._may_be_placed(node, now):
                holders = (n for n in self.nodes.values() if n.placed and (n.blocks or n.unheard))
                node.happen(NodeEvent.JOIN if any(holders) else NodeEvent.PLACE)
                self._views = None
                changed = True
        return changed

    def _may_be_home(self, node_id: str) -> bool:
        return not self._homes or node_id in self._homes

    def _waits(self, node: Node) -> bool:
        """Whether a node is to be placed, and not on the way to it."""
        wanted = not node.draining and self._may_be_home(node.node_id)
        return wanted and node.standing in OUTSIDE

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be handed over."""
        return self.views.placed == self.views.coming

    def settle(self) -> list[str]:
        """All is handed over: place those that were coming, and nobody else; the node ids of those
        that are not placed any more."""
        coming = self.views.coming
        drained = [n.node_id for n in self.nodes.values() if n.placed and n.node_id not in coming]
        for node in self.nodes.values():
            if node.joining:
                node.happen(NodeEvent.TAKE_OVER)
            elif node.node_id in drained:
                node.happen(NodeEvent.HAND_OVER)
        self._views = None
        return drained

    def mapped(self) -> bool:
        """There is a map of what is; whether another is due."""
        again, self._begins_anew = self._begins_anew, False
        if again:
            self._views = None
        return again

    def drain(self, node_id: str) -> bool:
        """Have a node's blocks handed over; DrainError."""
        node = self.nodes.get(node_id)
        if node is None:
            raise DrainError(f"there is no node {node_id}")
        if node.draining:
            return False
        if node.placed and self.views.coming == {node_id}:
            raise DrainError(f"no node could take over what {node_id} holds")
        node.happen(NodeEvent.DRAIN)
        node.draining = True
        self._views = None
        return True

    def undrain(self, node_id: str, now: float) -> bool:
        """Have a node hold blocks again, or on; DrainError."""
        node = self.nodes.get(node_id)
        if node is None:
            raise DrainError(f"there is no node {node_id}")
        if not node.draining:
            return False
        node.draining, node.live_since = False, now
        self._views = None
        return True

    def _may_be_placed(self, node: Node, now: float) -> bool:
        return (
            node.standing is Standing.NEWCOMER
            or now >= node.live_since + self._rebalance_after_s  # as in `next_deadline`
            or not any(n.placed for n in self.nodes.values())
        )

    def _die(self, node: Node) -> bool:
        was_live = node.live
        if was_live:
            node.happen(NodeEvent.DIE)
        self._views = None
        # Its card's memory may be anybody's by now.
        node.address = dataclasses.replace(node.address, zone_queue_pair=0, zone_key=0)
        return was_live

    def next_deadline(self) -> float | None:
        """When `advance` will next have something to do; None if only after an event."""
        times = [n.lease_until for n in self.nodes.values() if n.live]
        times += [
            n.live_since + (0.0 if n.standing is Standing.NEWCOMER else self._rebalance_after_s)
            for n in self.nodes.values()
            if self._waits(n)
        ]
        return min(times, default=None)

    def check(self) -> None:
        """That the nodes agree with themselves, with one another, and with the views."""
        nodes = list(self.nodes.values())
        for node_id, node in self.nodes.items():
            where = f"{node_id}, {node.standing.name}"
            assert node.node_id == node_id, f"{where}: known as another"
            assert not node.draining or not node.joining, f"{where}: to be drained"
            if not self._may_be_home(node_id):
                assert node.standing in (*OUTSIDE, Standing.DEAD), f"{where}: and no home"
            if not node.live:
                # Its card's memory may be anybody's by now.
                zone = node.address.zone_queue_pair, node.address.zone_key
                assert zone == (0, 0), f"{where}: a card may write there"
        for what, values in (
            ("index", [n.index for n in nodes]),
            ("ip", [n.address.ip for n in nodes]),
            ("mac", [n.address.mac for n in nodes]),
            ("switch port", [n.address.switch_port for n in nodes]),
        ):
            assert len(set(values)) == len(values), f"two nodes have one {what}: {values}"
        assert len(nodes) <= 2 * self._max_nodes, f"{len(nodes)} nodes are known"
        assert sum(n.live for n in nodes) <= self._max_nodes, "too many nodes live"
        assert self._views is None or self._views == self._seen(), "the views are old"


def _conflict(theirs: Address, ours: Address) -> str | None:
    """What two nodes cannot both have, in words; None if they can live side by side."""
    if theirs.ip == ours.ip:
        return f"ip {ours.ip}"
    if theirs.mac == ours.mac:
        return f"mac {ours.mac}"
    if theirs.switch_port == ours.switch_port:
        return f"switch port {ours.switch_port}"
    return None
