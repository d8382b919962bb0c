"""What the controller says of a node: one word for its state, and what its tiers hold.

Oracle: docs/operations.md. Cannot see: how the words are shown (test_cli_commands.py,
tests/integration/test_controller_page.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from equipped_agent import TIER_BYTES, equipped_core
from kvcast.controller.core.node import Address, Node, Standing
from kvcast.controller.core.node_report import STATES, TIERS, state_of, tiers_of

NODE = Node(
    *("node-1", 1, 7, Address("10.0.0.1", "02:6b:76:00:00:01", 1, 1, "10.0.0.1", 1)),
    arena_bytes=100,
    standing=Standing.PLACED,
    connection=1,
    arena_used_bytes=40,
)


@pytest.mark.parametrize(
    ("facts", "programmed", "state"),
    [
        ({}, True, "alive"),
        ({}, False, "joining"),
        ({"standing": Standing.JOINING}, True, "joining"),
        ({"draining": True}, True, "draining"),
        ({"draining": True, "standing": Standing.WAITING}, False, "drained"),
        ({"draining": True, "connection": None}, True, "silent"),
        ({"draining": True, "standing": Standing.DEAD}, True, "dead"),
    ],
)
def test_a_node_has_one_word_for_its_state(
    facts: dict[str, object], programmed: bool, state: str
) -> None:
    assert state_of(replace(NODE, **facts), programmed=programmed) == state  # type: ignore[arg-type]
    assert state in STATES


def test_each_tier_that_an_agent_has_is_told_and_its_further_arenas_as_one() -> None:
    assert tiers_of(NODE, {}) == {"dram": {"used_bytes": 40, "size_bytes": 100}}
    core = equipped_core(further_arenas=2)
    counters = core.counters() | {
        "arena1_used_bytes": 3.0, "arena2_used_bytes": 4.0, "ssd_used_bytes": 5.0, "cold_bytes": 6.0
    }  # fmt: skip
    tiers = tiers_of(NODE, counters)
    assert tuple(tiers) == TIERS
    assert tiers["dram"] == {"used_bytes": 40, "size_bytes": 100}
    one = core.tiers[0].capacity_bytes
    assert 0 < one <= TIER_BYTES
    assert tiers["arena"] == {"used_bytes": 7, "size_bytes": 2 * one}
    assert tiers["ssd"] == {"used_bytes": 5, "size_bytes": one}
    assert tiers["cold"] == {"used_bytes": 6}
