"""Eviction policies: which of a namespace's blocks goes when there is no room.

Owns: their names. `base` has the interface; each policy is a class in a module of its own.
"""

from __future__ import annotations

from typing import Any, Final

from kvcast.hostagent.tiers.policies.arc import Arc
from kvcast.hostagent.tiers.policies.base import K, Policy, Search, Verdict
from kvcast.hostagent.tiers.policies.fifo import Fifo
from kvcast.hostagent.tiers.policies.lfu import Lfu
from kvcast.hostagent.tiers.policies.lru import Lru
from kvcast.hostagent.tiers.policies.s3fifo import S3Fifo
from kvcast.hostagent.tiers.policies.ttl import Ttl
from kvcast.hostagent.tiers.policies.value import Value

__all__ = ["BY_NAME", "DEFAULT", "Policy", "Search", "Ttl", "Verdict", "make"]

BY_NAME: Final[dict[str, type[Policy[Any]]]] = {
    policy.NAME: policy for policy in (Lru, Lfu, Fifo, Arc, S3Fifo, Ttl, Value)
}
DEFAULT: Final = Lru.NAME


def make(name: str, capacity_bytes: int, ttl_s: float = 0.0) -> Policy[K]:
    """A policy of that name; KeyError where there is none. `ttl_s`: for `Ttl` alone, 0 = its
    own."""
    policy: Policy[K] = BY_NAME[name](capacity_bytes)
    if isinstance(policy, Ttl) and ttl_s:
        policy.ttl_s = ttl_s
    return policy
