"""What the simulation judges of what a host holds, at moments that the test chooses.

Oracle: by hand. Cannot see: whether stores keep to it (`test_simulation_seeds.py`), or whether all
is found that should be (`test_simulation_planted_bugs.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages.control import NamespaceSettings
from kvcast.protocol.messages.wire import BlockId
from kvcast.simulation.held import Held
from kvcast.simulation.model import ViolationError

FIRST, SECOND = (BlockId(1, bytes([number]) * 16) for number in (1, 2))


class Host:
    """A store of one namespace, whose policy the test says; its operator looks on."""

    def __init__(self) -> None:
        self.store = Store(Allocator(1 << 16, 8192))
        host = SimpleNamespace(number=1, world=SimpleNamespace(now=1.0), stalled_until=0.0)
        self.held = Held(cast(Any, SimpleNamespace(now=1.0, host=host)))

    def put(self, block: BlockId, parent: bytes = b"") -> None:
        copy = self.store.reserve(block, 100, parent=parent)
        self.store.commit(copy, 7, home=True)

    def look(self, policy: str, *, changed: bool = False) -> None:
        self.held._settings = {1: NamespaceSettings(policy=policy)}
        self.held._look_at_store("dram", self.store, {1} if changed else set())


@pytest.fixture
def host() -> Host:
    """It has a block, and then one that follows it."""
    host = Host()
    host.look("value", changed=True)
    host.put(FIRST)
    host.look("value")
    host.put(SECOND, parent=FIRST.key)
    host.look("value")
    return host


def test_a_block_that_stays_without_the_one_before_it_is_a_violation(host: Host) -> None:
    host.store.drop(FIRST)
    with pytest.raises(ViolationError, match="without the one before it"):
        host.look("value")


def test_another_policy_may_keep_what_it_likes_and_is_not_held_against_the_next(host: Host) -> None:
    host.look("lru", changed=True)
    host.store.drop(FIRST)
    host.look("lru")
    host.look("value", changed=True)
    host.look("value")
    assert host.store.known(SECOND) is not None


def test_what_lay_there_when_the_policy_came_back_may_have_come_in_any_order(host: Host) -> None:
    """A block that begins a prefix of its own to the policy goes its own way."""
    host.look("lru", changed=True)
    host.look("value", changed=True)
    host.store.drop(FIRST)
    host.look("value")
    assert host.store.known(SECOND) is not None
