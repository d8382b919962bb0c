"""What is said of a node, to people and scripts: one word for its state, and what its tiers hold.

Owns: which word, and which of an agent's numbers say how full a tier is. Must not know: how anybody
shows it. `kvcast status` and the page show what stands here, and conclude nothing themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvcast.controller.core.node import Node

DEAD, SILENT, DRAINING, DRAINED = "dead", "silent", "draining", "drained"
JOINING, ALIVE = "joining", "alive"
STATES: Final = (DEAD, SILENT, DRAINING, DRAINED, JOINING, ALIVE)
TIERS: Final = ("dram", "arena", "ssd", "cold")
"""Those of a node; `arena` is all its further ones together."""

_SIZE: Final = re.compile(r"(arena|ssd)[0-9]*_bytes")


def state_of(node: Node, *, programmed: bool) -> str:
    """One of `STATES`: the first of them that is so. `programmed`: whether the switch has it."""
    if not node.live:
        return DEAD
    if node.connection is None:
        return SILENT
    if node.draining:
        return DRAINING if node.placed else DRAINED
    return JOINING if node.joining or not programmed else ALIVE


def tiers_of(node: Node, counters: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """By tier that the node has, of `TIERS`: `used_bytes` of `size_bytes`. `counters`: what its
    agent last said. Of an object store nobody knows the size; what nodes say that they have of it
    adds up to what it holds."""
    tiers = {"dram": {"used_bytes": node.arena_used_bytes, "size_bytes": node.arena_bytes}}
    for name, value in counters.items():
        found = _SIZE.fullmatch(name)
        if found is None or name == "arena_bytes":  # that is DRAM
            continue
        used = counters.get(f"{name.removesuffix('_bytes')}_used_bytes", 0.0)
        tier = tiers.setdefault(found[1], {"used_bytes": 0, "size_bytes": 0})
        tier["used_bytes"] += int(used)
        tier["size_bytes"] += int(value)
    if "cold_bytes" in counters:
        tiers["cold"] = {"used_bytes": int(counters["cold_bytes"])}
    return tiers
