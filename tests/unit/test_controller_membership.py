"""Membership: who is taken in, who is refused and why, and when buckets come and go.

Oracle: the table in the module's text, played with an invented clock, and nodes that were spoilt by
hand. Cannot see: connections, and the table of standings (tests/unit/test_controller_node.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from kvcast.controller.core.membership import MAX_LIVE_NODES, Membership, RegistrationError
from kvcast.controller.core.node import Standing
from kvcast.protocol.messages.control import CONTROL_PROTOCOL_VERSION
from registering import register

LEASE_S, STABLE_S = 3.0, 2.0


def new() -> Membership:
    return Membership(lease_s=LEASE_S, rebalance_after_s=STABLE_S)


def placed(membership: Membership) -> set[str]:
    membership.check()
    return {n.node_id for n in membership.nodes.values() if n.placed}


def test_a_new_node_is_placed_at_the_next_advance() -> None:
    membership = new()
    node, changed = membership.register(register(1), 1, 0.0)
    assert changed
    assert node.index == 1
    assert not node.placed
    assert membership.advance(0.0)
    assert placed(membership) == {"node-1"}
    assert not membership.advance(0.1)


def test_where_homes_are_named_no_other_node_is_placed() -> None:
    def restored(*homes: str) -> Membership:
        return Membership.restore(
            list(membership.views.saved),
            10.0,
            lease_s=LEASE_S,
            rebalance_after_s=STABLE_S,
            homes=frozenset(homes),
        )

    membership = Membership(
        lease_s=LEASE_S, rebalance_after_s=STABLE_S, homes=frozenset({"node-2"})
    )
    membership.register(register(1), 1, 0.0)
    assert not membership.advance(0.0)
    assert not membership.advance(STABLE_S)
    assert membership.next_deadline() == LEASE_S  # and not at once, again and again
    membership.register(register(2), 2, STABLE_S)
    assert membership.advance(STABLE_S)
    assert placed(membership) == {"node-2"}
    assert membership.nodes["node-1"].live
    assert membership.views.readers == {"node-1"}
    assert placed(restored("node-2")) == {"node-2"}
    assert placed(restored("node-1")) == set()


def test_a_lease_that_runs_out_unplaces_the_node_but_keeps_its_index() -> None:
    membership = new()
    membership.register(register(1), 1, 0.0)
    membership.register(register(2), 2, 0.0)
    membership.advance(0.0)
    membership.renew(membership.nodes["node-1"], 2.0)
    assert membership.advance(LEASE_S)
    assert placed(membership) == {"node-1"}
    assert membership.nodes["node-2"].index == 2


def test_a_node_that_comes_back_gets_buckets_only_when_it_is_stable() -> None:
    membership = new()
    for number in (1, 2):
        membership.register(register(number), number, 0.0)
    membership.advance(0.0)
    membership.renew(membership.nodes["node-1"], 10.0)
    membership.advance(10.0)
    assert placed(membership) == {"node-1"}
    membership.register(register(2, incarnation=2), 3, 10.0)
    membership.advance(10.0 + STABLE_S / 2)
    assert placed(membership) == {"node-1"}
    assert membership.next_deadline() == 10.0 + STABLE_S
    membership.advance(10.0 + STABLE_S)
    assert placed(membership) == {"node-1", "node-2"}
    assert membership.nodes["node-2"].index == 2


def test_the_last_node_standing_need_not_wait() -> None:
    membership = new()
    membership.register(register(1), 1, 0.0)
    membership.advance(0.0)
    membership.advance(5.0)
    assert placed(membership) == set()
    membership.register(register(1, incarnation=2), 2, 6.0)
    membership.advance(6.0)
    assert placed(membership) == {"node-1"}


def test_time_in_which_nobody_could_be_heard_is_nobodys_silence() -> None:
    membership = new()
    membership.register(register(1), 1, 0.0)
    membership.advance(0.0)
    membership.excuse(10.0)
    assert not membership.advance(LEASE_S + 5.0)
    assert membership.advance(LEASE_S + 10.0)


def test_leaving_moves_the_buckets_at_once() -> None:
    membership = new()
    node, _ = membership.register(register(1), 1, 0.0)
    membership.advance(0.0)
    assert membership.leave(node, 0.5)
    assert placed(membership) == set()
    assert not membership.leave(node, 0.6)


def test_the_same_incarnation_may_reconnect_and_changes_nothing() -> None:
    membership = new()
    membership.register(register(1), 1, 0.0)
    membership.advance(0.0)
    node, changed = membership.register(register(1), 2, 1.0)
    assert not changed
    assert node.connection == 2
    assert node.placed
    membership.disconnected(node, 1)
    assert node.connection == 2


def test_another_incarnation_is_refused_while_the_first_is_connected() -> None:
    membership = new()
    node, _ = membership.register(register(1), 1, 0.0)
    with pytest.raises(RegistrationError, match="already connected"):
        membership.register(register(1, incarnation=2), 2, 0.0)
    membership.disconnected(node, 1)
    again, _ = membership.register(register(1, incarnation=2), 2, 0.0)
    assert again.incarnation == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": CONTROL_PROTOCOL_VERSION + 1}, "version"),
        ({"ip": "10.77.0.300"}, "not an IPv4 address"),
        ({"ip": "224.0.0.1"}, "not a host's address"),
        ({"ip": "0.0.0.0"}, "not a host's address"),
        ({"ip": "::1"}, "not an IPv4 address"),
        ({"mac": "02:6b:76:00:00"}, "not a host's address"),
        ({"mac": "01:00:5e:00:00:01"}, "not a host's address"),
        ({"mac": "ff:ff:ff:ff:ff:ff"}, "not a host's address"),
        ({"mac": "02:6b:76:00:00:01\n"}, "not a host's address"),
        ({"switch_port": 0}, "outside 1..32"),
        ({"switch_port": 33}, "outside 1..32"),
        ({"udp_port": 0}, "udp port 0"),
        ({"ip": "10.77.0.1"}, "ip 10.77.0.1 is taken by node-1"),
        ({"mac": "02:6B:76:00:00:01"}, "mac 02:6b:76:00:00:01 is taken by node-1"),
        ({"switch_port": 1}, "switch port 1 is taken by node-1"),
    ],
)
def test_what_no_node_can_have_is_refused_with_its_reason(
    changes: dict[str, object], reason: str
) -> None:
    membership = new()
    membership.register(register(1), 1, 0.0)
    with pytest.raises(RegistrationError, match=reason):
        membership.register(register(2, **changes), 2, 0.0)
    assert set(membership.nodes) == {"node-1"}


def test_a_dead_nodes_address_may_be_taken_over() -> None:
    membership = new()
    membership.register(register(1), 1, 0.0)
    membership.advance(LEASE_S)
    membership.register(register(2, ip="10.77.0.1", switch_port=1), 2, LEASE_S)
    assert set(membership.nodes) == {"node-2"}


def test_the_pool_takes_32_live_nodes_and_forgets_dead_ones_beyond_its_bound() -> None:
    membership = new()
    for number in range(1, MAX_LIVE_NODES + 1):
        membership.register(register(number), number, 0.0)
    with pytest.raises(RegistrationError, match=r"taken|full"):
        membership.register(register(33), 33, 0.0)
    for round_ in range(1, 6):
        now = round_ * 10.0
        membership.advance(now)
        for number in range(1, MAX_LIVE_NODES + 1):
            message = register(
                number, node_id=f"round-{round_}-{number}", ip=f"10.78.{round_}.{number}"
            )
            membership.register(message, number, now)
        assert len(membership.nodes) <= 64
        indices = [n.index for n in membership.nodes.values()]
        assert len(set(indices)) == len(indices)


def test_a_restarted_controller_gives_its_nodes_time_to_come_back() -> None:
    membership = new()
    for number in (1, 2):
        membership.register(register(number), number, 0.0)
    membership.advance(0.0)
    restored = Membership.restore(
        list(membership.views.saved), 100.0, lease_s=LEASE_S, rebalance_after_s=STABLE_S
    )
    assert not restored.advance(100.0)
    assert placed(restored) == {"node-1", "node-2"}
    _, changed = restored.register(register(1), 1, 101.0)
    assert not changed
    restored.renew(restored.nodes["node-1"], 105.0)
    assert restored.advance(100.0 + 2 * LEASE_S)
    assert placed(restored) == {"node-1"}


def test_after_a_restart_who_comes_waits_until_the_others_have_said_what_they_hold() -> None:
    before = new()
    before.register(register(1), 1, 0.0)
    before.advance(0.0)
    membership = Membership.restore(
        list(before.views.saved), 100.0, lease_s=LEASE_S, rebalance_after_s=STABLE_S
    )
    membership.register(register(2), 2, 100.0)
    membership.advance(100.0)
    assert placed(membership) == {"node-1"}, "who knows what it holds"
    assert membership.views.coming == {"node-1", "node-2"}
    membership.register(register(1), 1, 100.0)
    membership.nodes["node-1"].unheard = False
    membership.register(register(3), 3, 101.0)
    membership.advance(101.0)
    assert placed(membership) == {"node-1", "node-3"}, "it holds nothing"


def test_a_newcomer_that_was_to_be_drained_is_still_one() -> None:
    membership = new()
    node, _ = membership.register(register(1), 1, 0.0)
    membership.drain("node-1")
    assert not membership.advance(0.0)
    assert membership.next_deadline() == LEASE_S
    membership.undrain("node-1", 1.0)
    assert membership.next_deadline() == 1.0
    assert membership.advance(1.0)
    assert node.placed


def test_a_drained_node_that_is_wanted_back_waits_like_one_that_comes_back() -> None:
    membership = Scene().membership
    membership.drain("node-1")
    assert membership.settle() == ["node-1"]
    assert placed(membership) == {"node-2", "node-3"}
    membership.undrain("node-1", 1.0)
    assert not membership.advance(1.0)
    for node in membership.nodes.values():
        membership.renew(node, 1.0 + STABLE_S)
    assert membership.advance(1.0 + STABLE_S)
    assert membership.nodes["node-1"].joining


def test_who_joins_and_is_to_be_drained_joins_no_more_and_who_dies_does_not_either() -> None:
    for end in (
        lambda membership: membership.drain("node-3"),
        lambda membership: membership.leave(membership.nodes["node-3"], 0.0),
    ):
        membership = Scene().membership
        assert membership.views.coming == {"node-1", "node-2", "node-3"}
        assert end(membership)
        assert membership.is_settled
        assert placed(membership) == {"node-1", "node-2"}


def test_a_node_that_is_drained_stays_so_when_it_dies_but_not_when_it_starts_anew() -> None:
    membership = Scene().membership
    node = membership.nodes["node-1"]
    membership.drain("node-1")
    membership.leave(node, 1.0)
    assert (node.standing, node.draining) == (Standing.DEAD, True)
    membership.register(register(1), 7, 1.0)
    assert (node.standing, node.draining) == (Standing.WAITING, True)
    membership.disconnected(node, 7)
    membership.register(register(1, incarnation=2), 8, 1.0)
    assert (node.standing, node.draining) == (Standing.WAITING, False)
    membership.check()


# --- a look at oneself ------------------------------------------------------------------------


class Scene:
    """Two nodes that hold blocks, one that joins them, and one that is dead; all four are known."""

    def __init__(self) -> None:
        self.membership = new()
        for number in (1, 2, 4):
            self.membership.register(register(number), number, 0.0)
        self.nodes = self.membership.nodes
        self.membership.leave(self.nodes["node-4"], 0.0)
        self.membership.advance(0.0)
        for node in self.nodes.values():
            node.blocks = 1
        self.membership.register(register(3), 3, 0.0)
        self.membership.advance(0.0)
        assert self.membership.views


def test_the_scene_is_in_order() -> None:
    scene = Scene()
    scene.membership.check()
    standings = [node.standing.name for node in scene.nodes.values()]
    assert standings == ["PLACED", "PLACED", "DEAD", "JOINING"]


# Each of these spoils one thing; its text is a part of what the check says of it.


def spoil_name(scene: Scene) -> None:
    """node-9, PLACED: known as another"""
    scene.nodes["node-9"] = scene.nodes.pop("node-1")


def spoil_joining(scene: Scene) -> None:
    """node-3, JOINING: to be drained"""
    scene.nodes["node-3"].draining = True


def spoil_home(scene: Scene) -> None:
    """node-1, PLACED: and no home"""
    scene.membership._homes = frozenset({"node-2", "node-3"})


def spoil_home_to_be(scene: Scene) -> None:
    """node-3, JOINING: and no home"""
    scene.membership._homes = frozenset({"node-1", "node-2"})


def spoil_zone(scene: Scene) -> None:
    """node-4, DEAD: a card may write there"""
    node = scene.nodes["node-4"]
    node.address = replace(node.address, zone_key=1)


def spoil_queue_pair(scene: Scene) -> None:
    """node-4, DEAD: a card may write there"""
    node = scene.nodes["node-4"]
    node.address = replace(node.address, zone_queue_pair=1)


def spoil_index(scene: Scene) -> None:
    """two nodes have one index"""
    scene.nodes["node-4"].index = 1


def spoil_ip(scene: Scene) -> None:
    """two nodes have one ip"""
    node = scene.nodes["node-4"]
    node.address = replace(node.address, ip="10.77.0.1")


def spoil_mac(scene: Scene) -> None:
    """two nodes have one mac"""
    node = scene.nodes["node-4"]
    node.address = replace(node.address, mac="02:6b:76:00:00:01")


def spoil_port(scene: Scene) -> None:
    """two nodes have one switch port"""
    node = scene.nodes["node-4"]
    node.address = replace(node.address, switch_port=1)


def spoil_number(scene: Scene) -> None:
    """4 nodes are known"""
    scene.membership._max_nodes = 1


def spoil_number_that_lives(scene: Scene) -> None:
    """too many nodes live"""
    scene.membership._max_nodes = 2


def spoil_views(scene: Scene) -> None:
    """the views are old"""
    scene.nodes["node-1"].draining = True


def spoil_standing(scene: Scene) -> None:
    """the views are old"""
    scene.nodes["node-3"].standing = Standing.WAITING


SPOILERS = [value for name, value in sorted(globals().items()) if name.startswith("spoil_")]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: str(spoil.__name__)[6:])
def test_what_contradicts_itself_is_found(spoil: Callable[[Scene], None]) -> None:
    scene = Scene()
    spoil(scene)
    assert spoil.__doc__ is not None
    with pytest.raises(AssertionError, match=re.escape(spoil.__doc__)):
        scene.membership.check()
