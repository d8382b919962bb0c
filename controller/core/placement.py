"""Placement: which nodes are a bucket's home and replicas, in the order in which they take over.

Owns: the mapping of the live nodes to bucket lists, by rendezvous hashing (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", 1998): every node draws a score
for every bucket, and the bucket's list is the nodes by falling score. So a node that goes takes
nothing with it but its own places, each bucket passes to the next in its own order, and a node
that comes takes buckets from the others only for itself. Must not know: epochs, leases, indices.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash
from kvcast.protocol.messages.wire import BUCKETS

Placement = tuple[tuple[str, ...], ...]
"""For each bucket the node ids, home first; `BUCKETS` of them."""


def score(node_id: str, bucket: int) -> int:
    """The node's 64-bit draw for the bucket; depends on nothing else, so it never changes."""
    return int(xxhash.xxh3_64_intdigest(b"%d:%s" % (bucket, node_id.encode())))


def place(node_ids: Iterable[str], homes: int) -> Placement:
    """Bucket lists over these nodes, `homes` long (shorter with fewer nodes).

    The order in which `node_ids` come does not matter. No nodes: every list is empty.
    """
    if homes < 1:
        raise ValueError("a bucket needs at least one home")
    nodes = sorted(set(node_ids))
    return tuple(
        tuple(sorted(nodes, key=lambda node: (score(node, bucket), node), reverse=True)[:homes])
        for bucket in range(BUCKETS)
    )
