"""What an operator says of namespaces, in an agent: rules, rates, deletion, and what is counted.

Oracle: docs/operations.md. Cores without I/O, told of the controller's messages by hand; `Node` is
that of test_hostagent_core.py. Cannot see: HTTP, the control link (test_controller_namespaces.py,
tests/integration/test_pool_tenants.py).
"""

from __future__ import annotations

from math import inf

import msgspec
from equipped_agent import equipped_core
from kvcast.hostagent.core.cold import ColdRules, ColdTier, Errand
from kvcast.hostagent.core.namespace_metrics import COLD, EVICTED_DRAM, EXPIRED
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.store import PART_BLOCKS, PAUSE_S
from kvcast.hostagent.core.writes import PutBatch
from kvcast.hostagent.network.metrics_server import metrics_of
from kvcast.hostagent.tiers import policies
from kvcast.protocol.digests import Digested
from kvcast.protocol.messages import local
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    POLICIES,
    PREFIX_POLICIES,
    AgentMessage,
    NamespaceReply,
    NamespaceRequest,
    NamespaceSettings,
    PoolMap,
    Refused,
    Registered,
)
from kvcast.protocol.messages.wire import BUCKETS, BlockId, digest_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from test_hostagent_core import SLAB, Node, key, pool_map

DATA = bytes(SLAB)


def told(
    settings: NamespaceSettings | None, epoch: int = 1, deleted: list[int] | None = None
) -> PoolMap:
    """A map of a pool of one home, with or without namespace 1."""
    message = pool_map([1], epoch, (1,) if settings is not None else ())
    infos = [msgspec.structs.replace(info, settings=settings) for info in message.namespaces]
    return msgspec.structs.replace(message, namespaces=infos, deleted=deleted or [])


def node_with(settings: NamespaceSettings, slabs: int = 8) -> Node:
    node = Node(1, slabs)
    node.take_map(told(settings))
    return node


def ask(node: Node, request: local.Request) -> local.AgentReply:
    replies: list[local.AgentReply] = []
    session = Session(node.core, replies.append)
    session.handle(node.now, request)
    session.close()
    (reply,) = replies
    return reply


def test_every_policy_that_can_be_named_is_there() -> None:
    assert set(POLICIES) == policies.BY_NAME.keys()
    assert set(PREFIX_POLICIES) == {n for n, kind in policies.BY_NAME.items() if kind.PREFIXES}


def test_settings_of_the_map_are_in_force_and_change_with_the_next() -> None:
    node = node_with(NamespaceSettings(policy="fifo", quota_bytes={"dram": 2 * SLAB}))
    for number in (1, 2):
        node.hold(number, DATA)
    node.core.store.get(BlockId(1, key(1)))
    node.hold(3, DATA)
    assert node.core.store.peek(BlockId(1, key(1))) is None, "the first in is the first out"
    assert len(node.core.store) == 2
    node.take_map(told(NamespaceSettings(quota_bytes={"dram": SLAB}), 2))
    assert len(node.core.store) == 1
    node.take_map(told(NamespaceSettings(assured_bytes={"dram": 2 * SLAB}), 3))
    assert node.core.store.assured_bytes(1) == 2 * SLAB
    for number in range(10, 17):
        node.hold(number, DATA)
    assert len(node.core.store) == 8


def test_another_time_to_live_leaves_a_policy_what_it_knows() -> None:
    node = node_with(NamespaceSettings(policy="lfu"), slabs=3)
    began = node.now
    for number in (1, 2, 3):
        node.hold(number, DATA)
    for _ in range(3):
        node.now += 1.0
        node.core.store.advance(node.now)
        node.core.store.get(BlockId(1, key(1)))
    for ttl_s, epoch in ((100.0, 2), (0.0, 3), (50.0, 4)):
        node.take_map(told(NamespaceSettings(policy="lfu", ttl_s=ttl_s), epoch))
    for number in (4, 5, 6):
        node.hold(number, DATA)
    store = node.core.store
    assert store.peek(BlockId(1, key(1))) is not None, "it was used most"
    assert store.next_expiry() == began + 50.0
    store.check()


def test_the_policy_of_times_to_live_goes_by_the_new_one() -> None:
    node = node_with(NamespaceSettings(policy="ttl", ttl_s=100.0))
    node.hold(1, DATA)
    node.take_map(told(NamespaceSettings(policy="ttl", ttl_s=7.0), 2))
    assert node.core.store.next_expiry() == node.now + 7.0


def test_a_namespace_that_is_found_brings_its_settings_before_the_next_map() -> None:
    node = Node(1, 8)
    node.take_map(told(None))
    (info,) = told(NamespaceSettings(quota_bytes={"dram": SLAB})).namespaces
    node.core.control_message(node.now, NamespaceReply(1, info))
    for number in range(3):
        node.hold(number, DATA)
    assert len(node.core.store) == 1


def test_a_deleted_namespaces_space_is_free_at_once_and_it_is_not_asked_for_again() -> None:
    node = node_with(NamespaceSettings())
    said: list[AgentMessage] = []
    node.core.control_connected(said.append)
    for number in range(4):
        node.hold(number, DATA)
    node.take_map(told(None, 2, deleted=[1]))
    assert node.core.store.used_bytes == 0
    assert not [message for message in said if isinstance(message, NamespaceRequest)]
    reply = ask(node, local.Get(1, 1, [key(1)], 1.0))
    assert isinstance(reply, local.Failed)
    assert reply.status == local.UNKNOWN_NAMESPACE


def test_a_large_namespace_that_is_deleted_is_gone_at_once_and_its_blocks_by_and_by() -> None:
    node = node_with(NamespaceSettings(), slabs=64)
    for number in range(3 * PART_BLOCKS):
        node.hold(number, bytes(256))
    node.take_map(told(None, 2, deleted=[1]))
    reply = ask(node, local.Get(1, 1, [key(1)], 1.0))
    assert isinstance(reply, local.Failed)
    assert reply.status == local.UNKNOWN_NAMESPACE
    assert len(node.core.store) == 2 * PART_BLOCKS
    for left in (1, 0):
        when = node.core.get_timer(node.now)
        assert when is not None
        assert node.now < when <= node.now + PAUSE_S
        node.now = when
        node.core.handle_timer(when)
        assert len(node.core.store) == left * PART_BLOCKS
    assert node.core.store.used_bytes == 0


def test_a_large_namespace_whose_number_means_something_else_is_gone_at_once() -> None:
    node = node_with(NamespaceSettings(), slabs=64)
    for number in range(3 * PART_BLOCKS):
        node.hold(number, bytes(256))
    other = told(NamespaceSettings(), 2)
    other.namespaces[0] = msgspec.structs.replace(other.namespaces[0], version="another")
    node.take_map(other)
    assert len(node.core.store) == 0


def test_a_namespace_that_the_controller_only_lost_is_kept_and_asked_for() -> None:
    node = node_with(NamespaceSettings(policy="lfu"))
    said: list[AgentMessage] = []
    node.core.control_connected(said.append)
    node.hold(1, DATA)
    node.take_map(told(None, 2))
    assert len(node.core.store) == 1
    assert [message for message in said if isinstance(message, NamespaceRequest)]


def test_what_the_controller_only_lost_keeps_its_settings() -> None:
    rules = NamespaceSettings(
        "lfu", quota_bytes={"dram": 4 * SLAB}, assured_bytes={"dram": 2 * SLAB}, ttl_s=5.0
    )
    node = node_with(rules)
    node.hold(1, DATA)
    node.take_map(told(None, 2))
    store = node.core.store
    assert (store.quota_of(1), store.assured_bytes(1)) == (4 * SLAB, 2 * SLAB)
    assert store.next_expiry() == node.now + 5.0


def test_of_a_number_that_changes_its_meaning_only_the_old_one_leaves_the_object_store() -> None:
    settings = NamespaceSettings(media=["dram", "cold"])
    node = node_with(settings)
    cold = ColdTier(ColdRules(), node.core.store, node.memory, "cluster", epoch_s=1e9)
    node.core.use_cold(cold)
    before = told(settings)
    other = [msgspec.structs.replace(info, model="other") for info in before.namespaces]
    node.take_map(msgspec.structs.replace(before, epoch=2, namespaces=other))
    told_to = [(task.errand, task.name) for task in cold.take_tasks(node.now)]
    was, now = (f"cluster/{meaning_of(*of):016x}/" for of in (before.namespaces, other))
    assert told_to == [(Errand.LIST, was), (Errand.DELETE_ALL, was), (Errand.LIST, now)]


def test_what_a_namespace_has_in_the_object_store_outlives_a_refusal_to_one_node() -> None:
    settings = NamespaceSettings(media=["dram", "cold"])
    node = node_with(settings)
    said: list[AgentMessage] = []
    node.core.control_connected(said.append)
    cold = ColdTier(ColdRules(), node.core.store, node.memory, "cluster", epoch_s=1e9)
    node.core.use_cold(cold)
    before = told(settings)
    (info,) = before.namespaces
    # The controller has lost its state, and is asked for the namespace.
    node.take_map(msgspec.structs.replace(before, epoch=2, namespaces=[]))
    asked = next(message for message in said if isinstance(message, NamespaceRequest))
    node.core.control_message(node.now, Refused("not for this node", asked.request))
    node.take_map(msgspec.structs.replace(before, epoch=3))
    tasks = cold.take_tasks(node.now)
    assert Errand.DELETE_ALL not in {task.errand for task in tasks}
    prefix = f"cluster/{meaning_of(info):016x}/"
    cold.found(prefix, [(f"{prefix}{key(1).hex()}", 100)])
    assert cold.holds(BlockId(info.namespace, key(1)))


def test_blocks_that_outlived_their_time_are_not_served_and_counted_as_expired() -> None:
    node = node_with(NamespaceSettings(ttl_s=5.0))
    node.hold(1, DATA)
    due = node.core.get_timer(node.now)
    assert due == node.now + 5.0
    node.now += 5.0
    node.core.handle_timer(node.now)
    assert node.core.store.used_bytes == 0
    (item,) = node.get(1)
    assert item.status == local.MISS
    assert node.core.namespace_metrics()[1].misses == {EXPIRED: 1}


def test_requests_beyond_a_rate_are_busy_and_counted_until_time_passes() -> None:
    node = node_with(NamespaceSettings(operations_per_s=4.0))
    node.hold(1, DATA)
    assert isinstance(ask(node, local.Get(1, 1, [key(1)] * 4, 1.0)), local.Got)
    refused = ask(node, local.Get(2, 1, [key(1)] * 2, 1.0))
    assert isinstance(refused, local.Failed)
    assert refused.status == local.BUSY
    assert "rate" in refused.reason
    mine = node.core.namespace_metrics()[1]
    assert (mine.rate_limited, mine.gets) == (2, 4)
    assert node.core.metrics.local_rate_limited_total == 1
    node.now += 1.0
    assert isinstance(ask(node, local.Get(3, 1, [key(1)], 1.0)), local.Got)


def test_bytes_that_were_moved_are_paid_off_before_more_are() -> None:
    node = node_with(NamespaceSettings(bytes_per_s=SLAB / 2))
    node.hold(1, DATA)
    assert isinstance(ask(node, local.Get(1, 1, [key(1)], 1.0)), local.Got)
    assert isinstance(ask(node, local.Alloc(2, 1, [key(2)], [100])), local.Failed)
    node.now += 0.9
    assert isinstance(ask(node, local.Get(3, 1, [key(1)], 1.0)), local.Failed)
    node.now += 0.2
    assert isinstance(ask(node, local.Alloc(4, 1, [key(2)], [100])), local.Allocated)


def test_misses_are_explained_by_what_the_store_remembers() -> None:
    node = node_with(NamespaceSettings(quota_bytes={"dram": SLAB}))
    node.hold(1, DATA)
    node.hold(2, DATA)
    for number in (1, 3):
        node.get(number)
        node.now += 2.0
        node.core.handle_timer(node.now)
    assert node.core.namespace_metrics()[1].misses == {EVICTED_DRAM: 1, COLD: 1}


def test_a_put_says_what_is_before_its_blocks_and_value_keeps_no_end_without_it() -> None:
    node = node_with(NamespaceSettings(policy="value", quota_bytes={"dram": 3 * SLAB}))
    session = Session(node.core, lambda reply: replies.append(reply))
    replies: list[local.AgentReply] = []
    keys = [key(number) for number in range(3)]
    for depth, one in enumerate(keys):
        parent = keys[depth - 1] if depth else b""
        session.handle(node.now, local.Alloc(1, 1, [one], [SLAB], [parent], [depth]))
        allocated = replies.pop()
        assert isinstance(allocated, local.Allocated)
        session.handle(node.now, local.Commit(2, [allocated.extents[0].ticket], "local"))
        replies.clear()
    session.handle(node.now, local.Alloc(3, 1, [key(9)], [SLAB]))
    assert {block.key for block in node.core.store.blocks()} == set(keys[:2])
    session.close()


def test_parents_that_do_not_fit_their_keys_are_refused() -> None:
    node = node_with(NamespaceSettings())
    for parents, depths in (([b""], [0, 0]), ([b"short", b""], []), ([], [1])):
        for asked in (
            local.Alloc(1, 1, [key(1), key(2)], [10, 10], parents, depths),
            local.Get(1, 1, [key(1), key(2)], 1.0, parents=parents, depths=depths),
            local.Prefetch(1, 1, [key(1), key(2)], 1.0, parents=parents, depths=depths),
        ):
            reply = ask(node, asked)
            assert isinstance(reply, local.Failed)
            assert reply.status == local.INVALID
    assert node.core.metrics.gets_total == 0


class _Collected:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def test_prometheus_is_told_of_each_namespace() -> None:
    node = node_with(NamespaceSettings(quota_bytes={"dram": 4 * SLAB}))
    node.hold(1, DATA)
    ask(node, local.Get(1, 1, [key(1)], 1.0))
    registry = CollectorRegistry()
    registry.register(_Collected(list(metrics_of(node.core))))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    labels = 'model="m",namespace="1",tenant="t"'
    for line in (
        f'kvcast_namespace_gets_total{{{labels},version="1"}} 1.0',
        f'kvcast_namespace_hits_total{{{labels},tier="local",version="1"}} 1.0',
        f'kvcast_namespace_held_bytes{{{labels},version="1"}} {float(SLAB)}',
        f'kvcast_namespace_quota_bytes{{{labels},version="1"}} {4.0 * SLAB}',
        f'kvcast_namespace_get_seconds_count{{{labels},version="1"}} 1.0',
        f'kvcast_namespace_tier_bytes{{{labels},tier="dram",version="1"}} {float(SLAB)}',
        f'kvcast_namespace_tier_quota_bytes{{{labels},tier="dram",version="1"}} {4.0 * SLAB}',
    ):
        assert line in text, line


def test_prometheus_is_told_of_the_quotas_of_every_tier_that_has_some() -> None:
    core = equipped_core(further_arenas=2)
    while core.recover():
        pass
    quotas = {"dram": 5, "arena": 6, "ssd": 7, "cold": 8 * BUCKETS}
    settings = NamespaceSettings(quota_bytes=quotas, media=["dram", "ssd", "cold"])
    core.control_message(0.0, Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0, inf))
    core.control_message(0.0, told(settings))

    def by_tier(name: str) -> dict[str, float]:
        (family,) = [f for f in metrics_of(core) if f.name == f"kvcast_namespace_{name}"]
        return {sample.labels["tier"]: sample.value for sample in family.samples}

    allowed = {"dram": 5, "arena1": 6, "arena2": 6, "ssd": 7, "cold": 8 * BUCKETS}
    assert by_tier("tier_quota_bytes") == allowed
    assert by_tier("tier_bytes") == dict.fromkeys(allowed, 0)


def test_the_time_of_a_put_runs_from_a_whole_block_to_its_acknowledgement() -> None:
    node = node_with(NamespaceSettings())
    times = node.core.metrics.by_namespace.of(1).put_time
    waiting: list[tuple[Digested, list[int]]] = []

    def later(_now: float, blocks: list[memoryview], then: Digested) -> None:
        waiting.append((then, [digest_of(each) for each in blocks]))

    node.core.make_digests = later  # as threads make those of large blocks
    batches: list[PutBatch] = []
    room = node.core.store.reserve(BlockId(1, key(1)), len(DATA))
    node.core.writes.commit(5.0, [room], batches.append, "local")
    assert times.buckets()[-1][1] == 0, "it is not acknowledged yet"
    then, digests = waiting.pop()
    then(7.0, digests)
    assert batches
    assert (times.sum, times.buckets()[-1][1]) == (2.0, 1)
    # What compiled code has put counts, too, as long as that took.
    room = node.core.store.reserve(BlockId(1, key(2)), len(DATA))
    node.core.writes.put(8.0, room, digest_of(DATA), (), 0.5)
    assert (times.sum, times.buckets()[-1][1]) == (2.5, 2)


def test_metrics_of_namespaces_that_are_gone_are_forgotten() -> None:
    node = node_with(NamespaceSettings())
    node.hold(1, DATA)
    node.get(1)
    assert 1 in node.core.namespace_metrics()
    node.take_map(told(None, 2, deleted=[1]))
    assert node.core.namespace_metrics() == {}
