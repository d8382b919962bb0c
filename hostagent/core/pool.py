"""The pool as this node knows it: the last bucket map, turned into answers.

Owns: checking a `PoolMap` before anything relies on it, and the questions asked of it: a block's
homes, a node's addresses, who may use a namespace. Must not know: how maps arrive.
"""

from __future__ import annotations

import sys
from array import array
from ipaddress import AddressValueError, IPv4Address
from typing import Final

from kvcast.protocol.chains import NOBODY
from kvcast.protocol.links.stream import LinkError
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.control import GroupInfo, NamespaceInfo, NodeInfo, PoolMap
from kvcast.protocol.messages.ethernet import parse_mac
from kvcast.protocol.messages.wire import BUCKETS, CHUNKINGS, KEY_BYTES, BlockId, bucket_of

NO_NODE: Final = -1


class PoolMapError(LinkError):
    """A map that contradicts itself; the agent keeps the one that it has."""


class Pool:
    """One epoch of the pool, seen from the node `index`."""

    def __init__(self, pool_map: PoolMap, index: int, node_id: str) -> None:
        if len(pool_map.buckets) != BUCKETS:
            raise PoolMapError(f"{len(pool_map.buckets)} buckets, not {BUCKETS}")
        self.epoch = pool_map.epoch
        chunkings = [c for c in CHUNKINGS if c.chunk_bytes == pool_map.chunk_bytes]
        if not chunkings:
            raise PoolMapError(f"there are no chunks of {pool_map.chunk_bytes} bytes")
        self.chunking = chunkings[0]
        """How the pool's networks let blocks be cut."""
        self.index = index
        self.node_id = node_id
        self.nodes: dict[int, NodeInfo] = {}
        self.index_by_ip: dict[int, int] = {}
        for node in pool_map.nodes:
            if node.index in self.nodes:
                raise PoolMapError(f"node index {node.index} twice")
            try:
                ip = int(IPv4Address(node.ip))
                parse_mac(node.mac)
            except (AddressValueError, ValueError) as error:
                raise PoolMapError(f"node {node.node_id}: {error}") from error
            if ip in self.index_by_ip:
                raise PoolMapError(f"two nodes have the address {node.ip}")
            self.nodes[node.index] = node
            self.index_by_ip[ip] = node.index
        # Lists that are alike are one object, so that they are quickly compared.
        alike: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._buckets = [alike.setdefault(homes, homes) for homes in map(tuple, pool_map.buckets)]
        for number, bucket in enumerate(self._buckets):
            if not self.nodes.keys() >= set(bucket):
                raise PoolMapError(f"bucket {number} names a node that is not in the map")
        self._homes_in_round: dict[int, array[int]] = {}
        self._settled = pool_map.settled
        self._leaving = frozenset(pool_map.leaving)
        # By the last 16 bits of a key, of which `bucket_of` takes the lowest.
        self._homes_by_word = self._buckets * ((1 << 16) // BUCKETS)
        self.namespaces: dict[int, NamespaceInfo] = {n.namespace: n for n in pool_map.namespaces}
        self.deleted = frozenset(pool_map.deleted)
        """Namespaces that operators have deleted."""
        self.alone = frozenset(pool_map.alone)
        """Namespaces whose reads gather for nobody."""
        self.groups: dict[tuple[int, int], GroupInfo] = {
            (g.namespace, g.group): g for g in pool_map.groups
        }
        self.nodes_by_id = {node.node_id: node for node in self.nodes.values()}

    def homes_of(self, block: BlockId) -> tuple[int, ...]:
        """The block's home and replicas, in order; node indices."""
        return self._buckets[bucket_of(block.key)]

    def homes_of_bucket(self, bucket: int) -> tuple[int, ...]:
        """As `homes_of`, of the blocks of a bucket."""
        return self._buckets[bucket]

    def homes_in_round(self, number: int) -> array[int]:
        """By bucket the node that is its home of that number, from 0 on; NOBODY where it has not so
        many."""
        if number not in self._homes_in_round:
            homes = (nodes[number] if number < len(nodes) else NOBODY for nodes in self._buckets)
            self._homes_in_round[number] = array("H", homes)
        return self._homes_in_round[number]

    def homes_of_all(self, keys: list[bytes]) -> list[tuple[int, ...]]:
        """As `homes_of`, of many blocks of one namespace."""
        words = array("H", b"".join(keys))
        if sys.byteorder == "little":
            words.byteswap()
        last = KEY_BYTES // words.itemsize
        return list(map(self._homes_by_word.__getitem__, words[last - 1 :: last]))

    # --- who holds a bucket's blocks, and who is to take them over; node ids ---

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be handed over."""
        return self._settled == 0

    def all_of(self, bucket: int) -> tuple[str, ...]:
        """All nodes of a bucket."""
        return tuple(self.nodes[index].node_id for index in self._buckets[bucket])

    def holders_of(self, bucket: int) -> tuple[str, ...]:
        """Those that hold its blocks."""
        nodes = self.all_of(bucket)
        return nodes[: self._settled] if self._settled else nodes

    def heirs(self, bucket: int) -> tuple[int, ...]:
        """Those that are to have what others hold of it, by index: who is to take it over, or,
        where nobody is and a holder leaves, who holds it and stays."""
        nodes = self._buckets[bucket]
        if self._settled == 0:
            return ()
        stay = tuple(index for index in nodes if index not in self._leaving)
        return nodes[self._settled :] or (stay if len(stay) < len(nodes) else ())

    def heirs_of(self, bucket: int) -> tuple[str, ...]:
        """Those that are to have what this node holds of it."""
        heirs = self.heirs(bucket)
        return () if self.index in heirs else tuple(self.nodes[index].node_id for index in heirs)

    def held_buckets(self) -> list[int]:
        """The buckets that this node holds."""
        return [
            bucket
            for bucket, nodes in enumerate(self._buckets)
            if self.index in (nodes[: self._settled] if self._settled else nodes)
        ]

    def first_buckets(self) -> frozenset[int]:
        """The buckets whose first home this node is."""
        return frozenset(b for b, nodes in enumerate(self._buckets) if nodes[:1] == (self.index,))

    def other_homes_of(self, block: BlockId) -> list[int]:
        """The block's homes without this node."""
        return [node for node in self.homes_of(block) if node != self.index]

    def is_home(self, block: BlockId) -> bool:
        """Whether this node is one of the block's homes."""
        return self.index in self.homes_of(block)

    def is_node(self, index: int, node_id: str) -> bool:
        """Whether an index stands for this node."""
        node = self.nodes.get(index)
        return node is not None and node.node_id == node_id

    def may_use(self, namespace: int, node_id: str) -> bool | None:
        """Whether a node may use a namespace; None if there is no such namespace."""
        info = self.namespaces.get(namespace)
        if info is None:
            return None
        return not info.nodes or node_id in info.nodes

    def nodes_of(self, info: NamespaceInfo) -> list[int]:
        """The indices of the nodes that a namespace is for, where it names some."""
        return [self.nodes_by_id[node].index for node in info.nodes if node in self.nodes_by_id]

    def meaning_of(self, namespace: int) -> int | None:
        """What a namespace means (`bulk.meaning_of`); None if there is no such namespace."""
        info = self.namespaces.get(namespace)
        return None if info is None else meaning_of(info)

    def another_node(self) -> int:
        """A node other than this one, the same for a given map; NO_NODE if there is none."""
        others = sorted(index for index in self.nodes if index != self.index)
        if not others:
            return NO_NODE
        return next((index for index in others if index > self.index), others[0])
