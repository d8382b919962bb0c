"""Placement: which nodes are a bucket's home and replicas, in the order in which they take over.

Owns: the mapping of the live nodes to bucket lists, by rendezvous hashing (Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", 1998): every node draws a score
for every bucket, and the bucket's list is the nodes by falling score. So a node that goes takes
nothing with it but its own places, each bucket passes to the next in its own order, and a node
that comes takes buckets from the others only for itself. Must not know: epochs, leases, indices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash
from kvcast.protocol.messages.wire import BUCKETS

Placement = tuple[tuple[str, ...], ...]
"""For each bucket the node ids, home first; `BUCKETS` of them."""


_PREFIXES = [b"%d:" % bucket for bucket in range(BUCKETS)]


def score(node_id: str, bucket: int) -> int:
    """The node's 64-bit draw for the bucket; depends on nothing else, so it never changes."""
    return int(xxhash.xxh3_64_intdigest(_PREFIXES[bucket] + node_id.encode()))


@functools.lru_cache(maxsize=2048)
def draws(node_id: str) -> npt.NDArray[np.uint64]:
    """The node's draws for all buckets."""
    return np.array([score(node_id, bucket) for bucket in range(BUCKETS)], np.uint64)


def place(node_ids: Iterable[str], homes: int) -> Placement:
    """Bucket lists over these nodes, `homes` long (shorter with fewer nodes).

    The order in which `node_ids` come does not matter. No nodes: every list is empty.
    """
    if homes < 1:
        raise ValueError("a bucket needs at least one home")
    nodes = sorted(set(node_ids))
    if not nodes:
        return ((),) * BUCKETS
    scores = np.stack([draws(node) for node in nodes])
    best = np.arange(len(nodes))[:, None].repeat(BUCKETS, axis=1)
    if homes < len(nodes):
        best = np.argpartition(scores, -homes, axis=0)[-homes:]
    # Sorted by draw and then by name: numpy's sort keeps the order of equals.
    best = np.sort(best, axis=0)[::-1]
    falling = np.argsort(~np.take_along_axis(scores, best, axis=0), axis=0, kind="stable")
    best = np.take_along_axis(best, falling, axis=0)
    return tuple(tuple(nodes[index] for index in bucket) for bucket in best.T.tolist())
