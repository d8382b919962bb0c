"""The pool: one object that hears all events and says all that is to be done.

Owns: the wiring of the cores (membership, placement, namespaces, tiers, multicast groups), the
epoch, and when agents may be told of a change: after the switch holds it. Must not know: sockets,
gRPC, SQLite, clocks; time is given, connections are numbers, and what should be done is returned.

A change passes through three steps, which the driver (`control_loop.py`) takes in this order:

1. `plan()` freezes what should be: the switch's state, the map of a new epoch if it changed, and
   the answers that wait for it. The driver saves `saved()`, then writes what the switch lacks.
2. `published(plan)` gives the maps and answers to send: whoever reads them may rely on the switch.
3. The driver deletes what the switch should no longer hold; `programmed(plan)` then frees slots.

If the switch cannot be reached, the map is published all the same: agents go on by themselves.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec
from kvcast.controller.core import program
from kvcast.controller.core.adaptive import Adaptive, AdaptiveOptions
from kvcast.controller.core.admission import ValueOptions
from kvcast.controller.core.companies import Companies
from kvcast.controller.core.membership import MAX_LIVE_NODES, Membership, RegistrationError
from kvcast.controller.core.multicast_groups import MulticastGroups
from kvcast.controller.core.namespaces import Group, NamespaceError, Namespaces, TenantRules
from kvcast.controller.core.node import Node, SavedNode
from kvcast.controller.core.node_report import state_of, tiers_of
from kvcast.controller.core.placement import Placement, place
from kvcast.controller.core.reconcile import PORT_SET, SwitchState, joined
from kvcast.controller.core.replicas import (
    FIRST_REQUEST,
    HotReplicas,
    Listed,
    NodeView,
    ReplicaOptions,
)
from kvcast.controller.core.requests import Outgoing
from kvcast.controller.core.residency import Residency, SavedResident
from kvcast.controller.core.tiers import AdmitMode, HeatSample, Tiers
from kvcast.controller.core.worth import judge
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    MAX_COUNTER_CHARS,
    MAX_COUNTERS,
    MAX_RESIDENTS,
    AgentMessage,
    BlockRef,
    Described,
    GroupReply,
    GroupRequest,
    HandedOver,
    HotBlock,
    Kept,
    Leave,
    Loads,
    NamespaceInfo,
    NamespaceReply,
    NamespaceRequest,
    NamespaceSecrets,
    NamespaceSettings,
    PoolMap,
    Refused,
    Register,
    Registered,
    Renew,
    Replica,
    Replicas,
    Residents,
)
from kvcast.protocol.messages.roce import SHARED_CHUNKING
from kvcast.protocol.messages.wire import (
    BUCKETS,
    CELLS,
    CHUNKINGS,
    SEGMENT_BYTES,
    BlockId,
    bucket_of,
    chunking_for,
)
from kvcast.protocol.namespace_secrets import SECRET_BYTES, KeyDerivation

MAX_CHUNK_BYTES = CHUNKINGS[-1].chunk_bytes
MAX_COUNT = 2.0**63
"""Of an agent's counter: beyond it, sums and rates would be infinite before long."""
MAX_HOT = 256
MAX_NAMESPACES = 256
"""Of which a node's report says what it read."""
MAX_WAITING_REPLIES = 1024
GUARD_ENTRIES = 8192
"""Of the switch's table of who may answer for which bucket (BUCKET_HOMES in p4/sizes.p4)."""
SENT_COUNTERS = "payload_bytes_sent_"
"""How the agents' totals of what they send begin."""
TOLD_LOAD_PERCENT = 20
"""Readers are told of loads from here on: below, it does not matter whom they ask."""
LOADS_PERIOD_S = 0.5


@dataclass(frozen=True)
class PoolOptions:
    """What the operator chose. Times in seconds.

    `replicas`: nodes after the home that a bucket lists; `slots`: segment slots of the switch
    target; `drain_s`: how long a deleted entry's slot rests; `refresh_s`: how often the homes of
    residents are asked whether they still hold the same bytes.
    """

    settings: program.Settings
    slots: int
    read_padding_bytes: int
    read_lease_s: float = inf
    """`settings.lease_ticks`, in seconds."""
    lease_s: float = 3.0
    rebalance_after_s: float = 2.0
    replicas: int = 2
    admit: AdmitMode = AdmitMode.AUTO
    value: ValueOptions = field(default_factory=ValueOptions)
    adaptive: AdaptiveOptions = field(default_factory=AdaptiveOptions)
    drain_s: float = 0.2
    refresh_s: float = 10.0
    handover_timeout_s: float = 600.0
    """How long nodes that join wait for their blocks, before they are placed all the same."""
    port_sets: int = 64
    tenants: TenantRules = field(default_factory=TenantRules)
    hot: ReplicaOptions = field(default_factory=ReplicaOptions)
    max_chunk_bytes: int = CHUNKINGS[-1].chunk_bytes
    """READs are for chunks of at most so many bytes, whatever the nodes' networks take."""
    max_nodes: int = MAX_LIVE_NODES
    """Live nodes; no switch has ports for more than the default."""
    homes: frozenset[str] = frozenset()
    """The nodes that keep blocks for others; all, if none is named."""


@dataclass(frozen=True)
class SavedState:
    """What outlives the controller."""

    epoch: int = 0
    nodes: tuple[SavedNode, ...] = ()
    namespaces: tuple[NamespaceInfo, ...] = ()
    groups: tuple[Group, ...] = ()
    residents: tuple[SavedResident, ...] = ()
    pins: tuple[BlockId, ...] = ()
    secrets: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    """Namespace and secret."""
    deleted: tuple[int, ...] = ()
    """Namespaces that were deleted."""


@dataclass(frozen=True)
class Send:
    """Say this on that connection."""

    connection: int
    message: msgspec.Struct


@dataclass(frozen=True)
class Close:
    """End that connection, after what was sent on it has gone out."""

    connection: int
    reason: str


Action = Send | Close


@dataclass(frozen=True)
class Plan:
    """What should be, frozen; see the module's text. Plans of one state share `desired`."""

    desired: SwitchState
    map: PoolMap
    map_to: frozenset[int]
    replies: tuple[Send, ...]
    nodes: frozenset[str]
    namespaces: frozenset[int]
    groups: frozenset[Group]
    draining: frozenset[int]
    residents: tuple[BlockId, ...]
    replicas: Listed


def _random_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


class Pool:
    """See the module's text. One thread; no call blocks."""

    def __init__(
        self,
        options: PoolOptions,
        saved: SavedState,
        now: float,
        *,
        first_generation: int,
        new_secret: Callable[[], bytes] = _random_secret,
    ) -> None:
        self.options = options
        self.epoch = saved.epoch
        self.counts: Counter[str] = Counter()
        self.membership = Membership.restore(
            list(saved.nodes),
            now,
            lease_s=options.lease_s,
            rebalance_after_s=options.rebalance_after_s,
            max_nodes=options.max_nodes,
            homes=options.homes,
        )
        self.namespaces = Namespaces(
            {info.namespace: info for info in saved.namespaces},
            {(group.namespace, group.group): group for group in saved.groups},
            dict(saved.secrets),
            options.tenants,
            dict.fromkeys(saved.deleted),
            new_secret,
        )
        self.companies = Companies(self.namespaces)
        residency = Residency(
            options.slots, first_generation=first_generation, drain_s=options.drain_s
        )
        if options.settings.enabled:
            self.counts["residents_not_restored"] = residency.restore(saved.residents, now)
        self.adaptive = Adaptive(options.adaptive, self._settings_of)
        self.tiers = Tiers(
            options.admit,
            residency,
            options.value,
            self._homes,
            refresh_s=options.refresh_s,
            may_hold=lambda n: self.may_be_resident(n) and self.adaptive.resides(n),
            may_pin=self.may_be_pinned,
            quotas=self._switch_quotas,
        )
        self.tiers.pins.update(saved.pins)
        self.hot = HotReplicas(
            options.hot, lambda block: self.placement[bucket_of(block.key)], self._may_use
        )
        self._map_changed = self.namespaces.apply_rules()
        # Nodes may have handed over already what the former controller's last map moved, which is
        # not quite what this one's first would: who was joining then is not known.
        self._map_changed |= not self.membership.is_settled
        self._forget_has_secret(now)
        self.multicast_groups = MulticastGroups(options.port_sets)
        self.agent_counters: dict[str, dict[str, float]] = {}
        self._placement_of: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        self._moves_of = self._placement_of
        """Who was placed, and who was coming, in the last map."""
        self._moves_epoch = 0
        """Since which epoch that has been so."""
        self._moves_since = self._now = now
        self._placement: Placement = place((), 1)
        self._desired = joined(SwitchState(), SwitchState())
        self._desired_for: tuple[object, object] = None, None
        """What `_desired` was computed from; the plan of a quiet pool costs next to nothing."""
        self._map: PoolMap | None = None
        self._map_due: set[int] = set()
        self._replies: list[Send] = []
        self._nodes_of: dict[int, str] = {}
        """Connection to the node that registered on it."""
        self.programmed_nodes: frozenset[str] = frozenset()
        self._published_namespaces: frozenset[int] = frozenset()
        self._published_groups: frozenset[Group] = frozenset()
        self._published_residents: tuple[BlockId, ...] = ()
        self._published_replicas: Listed = {}
        self._answering: Placement = self._placement
        self._answering_of: tuple[object, object] | None = None
        self._told_loads: list[tuple[int, int]] = []
        self._loads_at = 0.0

    # --- agents -----------------------------------------------------------------------------

    def received(self, connection: int, message: AgentMessage, now: float) -> list[Action]:
        """An agent's message; the first on a connection must be Register."""
        if isinstance(message, Register):
            return self._register(connection, message, now)
        node = self._node(connection)
        if node is None:
            return [Close(connection, "not registered")]
        self.membership.renew(node, now)
        match message:
            case Renew():
                return self._renew(node, message, connection, now)
            case Described() if message.request >= FIRST_REQUEST:
                self.hot.described(message, node.node_id, now)
                return []
            case Kept() if message.request >= FIRST_REQUEST:
                self.hot.kept(message, node.node_id, now)
                return []
            case Described():
                self.tiers.described(message, node.node_id, now)
                return []
            case Kept():
                return self._to_nodes(self.tiers.kept(message, node.node_id, now))
            case HandedOver() if message.epoch > self.epoch:
                return []  # by a map of another controller, which had come further
            case HandedOver():
                node.handed_epoch, node.handed_left = message.epoch, message.left
                node.handed_total, node.handed_failed = message.total, message.failed
                node.handed_no_room = message.no_room
                return []
            case NamespaceRequest():
                return self._namespace(connection, message, now)
            case GroupRequest():
                return self._group(connection, message, node, now)
            case Leave():
                self._map_changed |= self.membership.leave(node, now)
                return [Close(connection, "left")]

    def disconnected(self, connection: int) -> None:
        """The connection is gone; its node's lease runs on."""
        node = self._node(connection)
        self._nodes_of.pop(connection, None)
        self._map_due.discard(connection)
        if node is not None:
            self.membership.disconnected(node, connection)

    def refuse_all(self, connection: int, reason: str) -> list[Action]:
        """Answer to any registration while this controller must not take agents."""
        self.counts["registrations_refused"] += 1
        return [Send(connection, Refused(reason=reason[:256])), Close(connection, reason)]

    def _node(self, connection: int) -> Node | None:
        node = self.membership.nodes.get(self._nodes_of.get(connection, ""))
        return node if node is not None and node.connection == connection else None

    def _register(self, connection: int, message: Register, now: float) -> list[Action]:
        bound = self._nodes_of.get(connection)
        if bound is not None and bound != message.node_id:
            return self.refuse_all(connection, f"this connection is {bound}'s")
        former = self.membership.nodes.get(message.node_id)
        former_connection = former.connection if former else None
        try:
            node, changed = self.membership.register(message, connection, now)
        except RegistrationError as error:
            return self.refuse_all(connection, str(error))
        self._map_changed |= changed
        self._nodes_of[connection] = node.node_id
        self._map_due.add(connection)
        actions: list[Action] = []
        if former_connection is not None and former_connection != connection:
            self._nodes_of.pop(former_connection, None)
            actions.append(Close(former_connection, "registered again on another connection"))
        answer = Registered(
            version=CONTROL_PROTOCOL_VERSION,
            index=node.index,
            lease_s=self.options.lease_s,
            read_padding_bytes=self.options.read_padding_bytes,
            read_lease_s=self.options.read_lease_s,
        )
        return [*actions, Send(connection, answer)]

    def _renew(self, node: Node, message: Renew, connection: int, now: float) -> list[Action]:
        if not node.live:
            return [Close(connection, "lease ran out: register again")]
        node.arena_used_bytes, node.blocks = message.arena_used_bytes, message.blocks
        node.unheard = False
        node.epoch = message.epoch
        counters = {
            name: value
            for name, value in message.counters.items()
            if len(name) <= MAX_COUNTER_CHARS and abs(value) <= MAX_COUNT
        }
        if len(counters) != len(message.counters) or len(counters) > MAX_COUNTERS:
            self.counts["agent_counters_ignored"] += 1
            counters = dict(list(counters.items())[:MAX_COUNTERS])
        self.agent_counters[node.node_id] = counters
        self.adaptive.heard_reads(
            node.node_id,
            [
                reads
                for reads in message.reads[:MAX_NAMESPACES]
                if self._may_use(reads.namespace, node.node_id)
            ],
            now,
        )
        for namespace, key, digest in message.wrong:
            if self._may_use(namespace, node.node_id):
                self.tiers.found_wrong(BlockId(namespace, key), digest, now)
        self.counts["reports_ignored"] += max(0, len(message.hot) - MAX_HOT)
        answered_for = self._heard_hot(node.node_id, message.hot[:MAX_HOT], now)
        sent_bytes = sum(v for name, v in counters.items() if name.startswith(SENT_COUNTERS))
        self.hot.heard(node.node_id, sent_bytes, answered_for, now)
        return []

    def _heard_hot(
        self, node_id: str, reports: Sequence[HotBlock], now: float
    ) -> list[tuple[BlockId, HotBlock]]:
        """What a node says of blocks that were read of it: those for which it answers, since of
        others its word does not count."""
        placement, listed, heat = self.placement, self.hot.listed, self.tiers.heat
        sums: dict[int, list[int]] = {}
        """By namespace that there is: reads, and of them those of blocks that several nodes read,
        and of blocks that were reported before."""
        may_be_resident: dict[int, bool] = {}
        answered_for: list[tuple[BlockId, HotBlock]] = []
        counted: dict[BlockId, HotBlock] = {}
        for report in reports:
            namespace = report.namespace
            mine = sums.get(namespace)
            if mine is None:
                if namespace not in self.namespaces.by_number:
                    continue
                mine = sums[namespace] = [0, 0, 0]
                may_be_resident[namespace] = self.may_be_resident(namespace)
            block = BlockId(namespace, report.key)
            if not self._answers_for(node_id, block, placement, listed):
                continue
            answered_for.append((block, report))
            if not report.size_bytes or not may_be_resident[namespace]:
                continue
            reads = report.reads
            mine[0] += reads
            mine[1] += reads if report.readers > 1 else 0
            mine[2] += reads if block in heat else 0
            counted[block] = report
        self.tiers.heard_reports(counted, now)
        self.counts["reports_ignored"] += len(reports) - len(counted)
        for namespace, (reads, shared, again) in sums.items():
            if reads:
                self.adaptive.heard_hot(namespace, reads, shared=shared, again=again, now=now)
        return answered_for

    @staticmethod
    def _answers_for(node_id: str, block: BlockId, placement: Placement, listed: Listed) -> bool:
        """Whether a node's word counts on how much the block is read."""
        return node_id in placement[bucket_of(block.key)] or node_id in listed.get(block, ())

    def _namespace(self, connection: int, message: NamespaceRequest, now: float) -> list[Action]:
        try:
            info, made = self.namespaces.namespace(
                message.tenant,
                message.model,
                message.version,
                message.layout,
                self._nodes_of[connection],
            )
        except NamespaceError as error:
            return [Send(connection, Refused(reason=str(error)[:256], request=message.request))]
        self._map_changed |= made
        self._forget_has_secret(now)
        reply = Send(connection, NamespaceReply(request=message.request, info=info))
        return self._reply(reply, info.namespace in self._published_namespaces)

    def _forget_has_secret(self, now: float) -> None:
        """What was known of a namespace before it had a secret names nothing any more."""
        self.hot.forget(self.namespaces.newly_secret, now, "the namespace was given a secret")
        self.tiers.forget(self.namespaces.newly_secret, now, "the namespace was given a secret")
        self.namespaces.newly_secret.clear()

    # --- operators --------------------------------------------------------------------------

    def make_namespace(
        self, tenant: str, model: str, version: str, layout: str, now: float
    ) -> tuple[NamespaceInfo, bool]:
        """The namespace that stands for these, and whether it had to be made; NamespaceError."""
        info, made = self.namespaces.namespace(tenant, model, version, layout, None)
        self._map_changed |= made
        self._forget_has_secret(now)
        return self.namespaces.by_number[info.namespace], made

    def configure_namespace(
        self, namespace: int, settings: NamespaceSettings, now: float
    ) -> NamespaceInfo:
        """Change a namespace's settings; agents are told with the next map. NamespaceError."""
        info = self.namespaces.configure(namespace, settings)
        self._map_changed = True
        if not settings.allows("switch"):
            self.tiers.forget((namespace,), now, "the namespace may not be in the switch")
        elif not self.may_be_pinned(namespace):
            self.tiers.forget((namespace,), now, "an operator turned residence off")
        return info

    def delete_namespace(self, namespace: int, now: float) -> None:
        """Have nothing of a namespace anywhere; NamespaceError."""
        self.namespaces.delete(namespace)
        self.companies.forget(namespace)
        self._map_changed = True
        self.tiers.forget((namespace,), now, "the namespace was deleted")
        self.hot.forget((namespace,), now, "the namespace was deleted")
        waiting, self._replies = self._replies, []
        for reply in waiting:
            self._keep_waiting(reply, namespace, now)

    def _keep_waiting(self, reply: Send, deleted: int, now: float) -> None:
        """An answer that waits for the switch goes on waiting. If it names what has just been
        deleted, the question is answered anew: an engine that asks makes the namespace again."""
        said_of = (NamespaceReply, GroupReply)
        answer = reply.message if isinstance(reply.message, said_of) else None
        if answer is None or answer.info.namespace != deleted:
            self._replies.append(reply)
        elif isinstance(answer, GroupReply):
            refused = Refused(f"namespace {deleted} was deleted", answer.request)
            self._replies.append(Send(reply.connection, refused))
        elif reply.connection in self._nodes_of:
            said = answer.info
            parts = (said.tenant, said.model, said.version, said.layout)
            question = NamespaceRequest(answer.request, *parts)
            answers = self._namespace(reply.connection, question, now)
            self._replies += [action for action in answers if isinstance(action, Send)]

    def _may_use(self, namespace: int, node_id: str) -> bool:
        """Whether a node may use a namespace."""
        info = self.namespaces.by_number.get(namespace)
        return info is not None and (not info.nodes or node_id in info.nodes)

    def _settings_of(self, namespace: int) -> NamespaceSettings | None:
        info = self.namespaces.by_number.get(namespace)
        return None if info is None else info.settings

    def may_be_resident(self, namespace: int) -> bool:
        """Whether a namespace's blocks may be in the switch."""
        info = self.namespaces.by_number.get(namespace)
        return info is not None and info.settings.allows("switch")

    def may_be_pinned(self, namespace: int) -> bool:
        """Whether a namespace's blocks may be in the switch for an operator's sake, even where that
        does not pay."""
        said = self._settings_of(namespace)
        return said is not None and said.allows("switch") and said.residence != "off"

    def _switch_quotas(self) -> dict[int, int]:
        """Of namespaces that have a quota of the switch's memory: how many slots that is."""
        return {
            number: quota // SEGMENT_BYTES
            for number, info in self.namespaces.by_number.items()
            if (quota := info.settings.quota_bytes.get("switch"))
        }

    def _group(
        self, connection: int, message: GroupRequest, node: Node, now: float
    ) -> list[Action]:
        known = frozenset(self.membership.nodes)
        at = 0
        try:
            if not self._may_use(message.namespace, node.node_id):
                raise NamespaceError(f"namespace {message.namespace} is not for {node.node_id}")
            if message.at is None:
                group, made = self.namespaces.group(message.namespace, message.nodes, known)
            else:
                company, at, made = self._company(message, message.at, node, now)
                group = company or Group(message.namespace, 0, (node.node_id,), 0)
        except NamespaceError as error:
            return [Send(connection, Refused(reason=str(error)[:256], request=message.request))]
        self._map_changed |= made
        info = msgspec.structs.replace(group.info, at=at)
        reply = Send(connection, GroupReply(request=message.request, info=info))
        return self._reply(reply, not group.group or group in self._published_groups)

    def _company(
        self, message: GroupRequest, at: int, node: Node, now: float
    ) -> tuple[Group | None, int, bool]:
        if message.nodes:
            raise NamespaceError("a company is of whoever comes, and of no nodes that are named")
        if not self.options.settings.enabled:  # nobody would send an answer to all of them
            return None, at, False
        return self.companies.join(now, message.namespace, node.node_id, at)

    def _reply(self, reply: Send, at_once: bool) -> list[Action]:
        """Answer now if the switch holds what the answer names, else with the next plan."""
        if at_once:
            return [reply]
        if len(self._replies) >= MAX_WAITING_REPLIES:
            self.counts["replies_at_bound"] += 1
            return [Close(reply.connection, "too many requests wait for the switch")]
        self._replies.append(reply)
        return []

    # --- the switch -------------------------------------------------------------------------

    def found(self, actual: SwitchState) -> None:
        """What a switch was read to hold: adopt its port sets, and rest slots it has in use."""
        for (table, match), action in actual.entries.items():
            if table == PORT_SET and action.name == "set_group":
                (bits,) = match
                place_ = action.params[0] - program.PORT_SET_BASE
                if isinstance(bits, int):
                    self.multicast_groups.adopt(bits, place_)
        there = {
            match: action.params[0]
            for (table, match), action in actual.entries.items()
            if table == program.RESIDENT and action.params
        }
        ours = {
            match: (action.params[0], resident.block)
            for resident in self.tiers.residency.residents.values()
            for (_, match), action in program.resident_entries(resident).items()
        }
        strange = {
            slot: namespace
            for match, slot in there.items()
            if (match not in ours or ours[match][0] != slot)
            and isinstance(namespace := match[0], int)
        }
        lacking = {block for match, (slot, block) in ours.items() if there.get(match) != slot}
        self.tiers.found_in_use(strange, lacking, self._now)

    def heat(self, samples: Iterable[HeatSample], now: float) -> None:
        """Heat digests of the switch."""
        for sample in samples:
            if not self.may_be_resident(sample.block.namespace):
                self.counts["heat_ignored"] += 1
                continue
            self.counts["heat_digests"] += 1
            self.tiers.heard_heat(sample, now)
            self.multicast_groups.seen(sample.port_bits)

    def hits(self, hits: Mapping[int, int], now: float) -> list[Action]:
        """Readings of `resident_hits`, by slot."""
        return self._to_nodes(self.tiers.heard_hits(hits, now))

    # --- time and plans ---------------------------------------------------------------------

    def advance(self, now: float) -> list[Action]:
        """All that is due by `now`. Call it after every event and at `next_deadline`."""
        self._now = now
        self._map_changed |= self.membership.advance(now)
        self._map_changed |= self.companies.advance(now)
        self._settle(now)
        for node_id in self.agent_counters.keys() - self.membership.nodes.keys():
            del self.agent_counters[node_id]
            self.adaptive.node_left(node_id)
        actions: list[Action] = []
        if self.hot.is_due(now):
            actions += self._to_nodes(self.hot.advance(self._views(), self._guard_room, now))
        actions += self._tell_loads(now)
        if not self.options.settings.enabled:
            return actions
        return actions + self._to_nodes([*self._adapt(now), *self.tiers.advance(now)])

    def _views(self) -> list[NodeView]:
        """The nodes that could be given replicas."""
        return [
            NodeView(n.node_id, n.link_bits_per_s / 8, n.arena_bytes, n.arena_used_bytes)
            for n in self.membership.nodes.values()
            if n.placed and n.connection is not None
        ]

    @property
    def _guard_room(self) -> int:
        """How many entries the switch's guard has left for replicas."""
        if not self.options.settings.enabled:
            return GUARD_ENTRIES
        return GUARD_ENTRIES - sum(map(len, self.placement))

    def _tell_loads(self, now: float) -> list[Action]:
        """Readers choose among a block's holders by what these have to do."""
        if now < self._loads_at + LOADS_PERIOD_S:
            return []
        self._loads_at = now
        percents = {n: min(200, round(100 * load)) for n, load in self.hot.loads().items()}
        nodes = self.membership.nodes
        told = sorted(
            (nodes[n].index, percent)
            for n, percent in percents.items()
            if percent >= TOLD_LOAD_PERCENT and n in nodes
        )
        if told == self._told_loads:
            return []
        self._told_loads = told
        return [Send(connection, Loads(told)) for connection in sorted(self._nodes_of)]

    def _adapt(self, now: float) -> Outgoing:
        """Turn off what does not pay, and on what may; agents hear of it with the next map."""
        out: Outgoing = []
        for namespace, thing in sorted(self.adaptive.advance(now)):
            on = self.adaptive.gathers(namespace)
            if thing == "residence":
                on = self.adaptive.resides(namespace)
            else:
                self._map_changed = True
            self.counts[f"{thing}_turned_{'on' if on else 'off'}"] += 1
        for namespace in sorted({b.namespace for b in self.tiers.residency.residents}):
            if not self.adaptive.resides(namespace):
                out += self.tiers.let_go(namespace, "residence does not pay here", now)
        return out

    def next_deadline(self) -> float | None:
        """When `advance` has something to do without an event."""
        times = (
            self.membership.next_deadline(),
            self.companies.next_deadline(),
            self.tiers.next_deadline(),
            self.hot.next_deadline(),
        )
        return min((t for t in times if t is not None), default=None)

    @property
    def placement(self) -> Placement:
        """The bucket lists, by node id, over the placed nodes; while blocks are handed over, those
        that are to take over stand behind those that hold the blocks."""
        views = self.membership.views
        of = (views.placed, views.coming)
        if of != self._placement_of:
            homes = self.options.replicas + 1
            self._placement = place(views.placed, homes)
            if views.coming != views.placed:
                self._placement = tuple(
                    (*now, *(node_id for node_id in then if node_id not in now))
                    for now, then in zip(self._placement, place(views.coming, homes), strict=True)
                )
            self._placement_of = of
        return self._placement

    def _settle(self, now: float) -> None:
        """When all nodes have handed over what the map moves, it has been moved."""
        if self.membership.is_settled or self._map is None or self._map_changed:
            return
        live = [n for n in self.membership.nodes.values() if n.live]
        if any(n.handed_epoch < self._moves_epoch or n.handed_left for n in live):
            late = now >= self._moves_since + self.options.handover_timeout_s
            if not late or any(n.draining and n.placed for n in live):
                return
            self.counts["handovers_timed_out"] += 1
        self.counts["handovers"] += 1
        self.counts["nodes_drained"] += len(self.membership.settle())
        self._map_changed = True

    def drain(self, node_id: str) -> None:
        """Have a node's blocks handed over to others; DrainError."""
        self._map_changed |= self.membership.drain(node_id)

    def undrain(self, node_id: str, now: float) -> None:
        """Have a node hold blocks again, or on; DrainError."""
        self._map_changed |= self.membership.undrain(node_id, now)

    @property
    def answering(self) -> Placement:
        """For each bucket, who may answer for it: its homes, and who replicates a block of it."""
        of = (self.placement, self.hot.guarded)
        if self._answering_of is None or any(
            a is not b for a, b in zip(of, self._answering_of, strict=True)
        ):
            self._answering_of = of
            lists = list(self.placement)
            for bucket, node_id in sorted(self.hot.guarded):
                if node_id not in lists[bucket] and node_id in self.membership.nodes:
                    lists[bucket] = (*lists[bucket], node_id)
            self._answering = tuple(lists)
        return self._answering

    def plan(self) -> Plan:
        """What should be now; begins a new epoch if the map changed."""
        pool_map, new_map = self._map, self._map is None or self._map_changed
        if pool_map is None or self._map_changed:
            if self._map_changed:
                self.epoch += 1
            pool_map = self._map = self._build_map()
            self._map_due.update(self._nodes_of)
        views = self.membership.views
        residents = self.tiers.residency.residents.values()
        settings = self.options.settings
        members = (
            views.addresses,
            self.answering,
            frozenset((n, tuple(info.nodes)) for n, info in self.namespaces.by_number.items()),
            frozenset(self.namespaces.groups.values()),
        )
        traffic_of = (
            tuple((resident.block, resident.generation) for resident in residents),
            self.multicast_groups.places,
        )
        if (members, traffic_of) != self._desired_for:
            assert self._desired.parts is not None
            membership, traffic = self._desired.parts
            if members != self._desired_for[0]:
                membership = program.membership_state(
                    settings,
                    [program.Host(node_id, address) for node_id, address in views.addresses],
                    self.answering,
                    self.namespaces.by_number.values(),
                    self.namespaces.groups.values(),
                )
            if traffic_of != self._desired_for[1]:
                traffic = program.traffic_state(settings, residents, self.multicast_groups.places)
            self._desired = joined(membership, traffic)
            self._desired_for = members, traffic_of
        if new_map:  # what the switch is to hold is what this map says, and not the next one
            self._map_changed = self.membership.mapped()
        plan = Plan(
            desired=self._desired,
            map=pool_map,
            map_to=frozenset(self._map_due),
            replies=tuple(self._replies),
            nodes=views.placed | views.coming | views.readers,
            namespaces=frozenset(self.namespaces.by_number),
            groups=frozenset(self.namespaces.groups.values()),
            draining=self.tiers.residency.waiting_for_deletion(),
            residents=tuple(sorted(resident.block for resident in residents)),
            replicas=self.hot.listed,
        )
        self._map_due.clear()
        self._replies.clear()
        return plan

    def published(self, plan: Plan) -> list[Action]:
        """The maps and answers that may go out now that the plan's insertions are written. Before
        its map, each node is given the secrets that it may have."""
        self._published_namespaces = plan.namespaces
        self._published_groups = plan.groups
        actions: list[Action] = []
        for connection in sorted(plan.map_to):
            secrets = self.namespaces.secrets_for(self._nodes_of.get(connection, ""))
            if secrets:
                actions.append(Send(connection, NamespaceSecrets(secrets)))
            actions.append(Send(connection, plan.map))
        told = [*self._tell_residents(plan), *self._tell_replicas(plan)]
        return [*actions, *told, *plan.replies]

    def _tell_residents(self, plan: Plan) -> list[Action]:
        """Who would ask for these blocks by TCP, or for larger chunks than the switch keeps, must
        know that the switch keeps them."""
        if not self.options.settings.enabled:
            return []
        changed = plan.residents != self._published_residents
        self._published_residents = plan.residents
        told = self._nodes_of.keys() if changed else plan.map_to
        if not told:
            return []
        message = Residents([BlockRef(*block) for block in plan.residents[:MAX_RESIDENTS]])
        return [Send(connection, message) for connection in sorted(told)]

    def _tell_replicas(self, plan: Plan) -> list[Action]:
        """Who answers for a block beside its homes, now that the switch lets it."""
        changed = plan.replicas != self._published_replicas
        self._published_replicas = plan.replicas
        told = self._nodes_of.keys() if changed else plan.map_to if plan.replicas else ()
        news: list[Action] = []
        if self._told_loads:
            loads = Loads(self._told_loads)
            news += [Send(connection, loads) for connection in sorted(plan.map_to)]
        if not told:
            return news
        index = {n.node_id: n.index for n in self.membership.nodes.values()}
        message = Replicas(
            [
                Replica(block.namespace, block.key, [index[n] for n in nodes if n in index])
                for block, nodes in plan.replicas.items()
                if any(n in index for n in nodes)
            ]
        )
        return news + [Send(connection, message) for connection in sorted(told)]

    def derived(self, block: BlockId) -> BlockId:
        """An engine's block as the pool knows it: secret, where the namespace is."""
        secret = self.namespaces.secrets.get(block.namespace)
        return (
            block
            if secret is None
            else BlockId(block.namespace, KeyDerivation(secret).key(block.key))
        )

    def programmed(self, plan: Plan, now: float) -> None:
        """The switch holds exactly the plan's state."""
        self.programmed_nodes = plan.nodes
        self.tiers.residency.deleted(plan.draining, now)

    def unprogrammed(self) -> None:
        """The switch is lost, or holds nobody knows what."""
        self.programmed_nodes = frozenset()

    def saved(self) -> SavedState:
        """What must outlive the controller."""
        return SavedState(
            epoch=self.epoch,
            nodes=self.membership.views.saved,
            namespaces=tuple(
                self.namespaces.by_number[n] for n in sorted(self.namespaces.by_number)
            ),
            groups=tuple(
                group for _, group in sorted(self.namespaces.groups.items()) if not group.company
            ),
            residents=tuple(self.tiers.residency.saved()),
            pins=tuple(sorted(self.tiers.pins)),
            secrets=tuple(sorted(self.namespaces.secrets.items())),
            deleted=tuple(self.namespaces.deleted),
        )

    def _build_map(self) -> PoolMap:
        live = [n for n in self.membership.nodes.values() if n.live]
        views = self.membership.views
        if (views.placed, views.coming) != self._moves_of:
            self._moves_of = (views.placed, views.coming)
            self._moves_epoch, self._moves_since = self.epoch, self._now
        settled = min(self.options.replicas + 1, len(views.placed))
        index = {n.node_id: n.index for n in live}
        zones = sum(n.address.zone_queue_pair > 0 for n in live)
        return PoolMap(
            epoch=self.epoch,
            nodes=[n.info for n in sorted(live, key=lambda n: n.index)],
            buckets=[[index[node_id] for node_id in homes] for homes in self.placement],
            namespaces=[self.namespaces.by_number[n] for n in sorted(self.namespaces.by_number)],
            groups=[self.namespaces.groups[key].info for key in sorted(self.namespaces.groups)],
            chunk_bytes=min(
                chunking_for(min((n.mtu_bytes for n in live), default=0)).chunk_bytes,
                self.options.max_chunk_bytes,
                # Longer ones would fit no packet of RDMA.
                SHARED_CHUNKING.chunk_bytes if zones > 1 else MAX_CHUNK_BYTES,
            ),
            rdma_address=self.options.settings.rdma_address or "",
            deleted=list(self.namespaces.deleted),
            alone=[n for n in sorted(self.namespaces.by_number) if not self.adaptive.gathers(n)],
            settled=0 if self.membership.is_settled else settled,
            leaving=sorted(index[node_id] for node_id in views.placed - views.coming),
        )

    def _homes(self, block: BlockId) -> list[str]:
        """Who answers for the block and can be asked, home first."""
        nodes = self.membership.nodes
        return [
            node_id
            for node_id in self.placement[bucket_of(block.key)]
            if nodes[node_id].connection is not None
        ]

    def _to_nodes(self, outgoing: Outgoing) -> list[Action]:
        nodes = self.membership.nodes
        return [
            Send(connection, message)
            for node_id, message in outgoing
            if node_id in nodes and (connection := nodes[node_id].connection) is not None
        ]

    # --- what is shown ----------------------------------------------------------------------

    def status(self, now: float) -> dict[str, Any]:
        """The pool as JSON-ready values; see docs of the HTTP API for the fields."""
        homes = Counter(homes[0] for homes in self.placement if homes)
        residency = self.tiers.residency
        return {
            "epoch": self.epoch,
            "buckets": BUCKETS,
            "chunk_bytes": self._map.chunk_bytes if self._map is not None else CELLS.chunk_bytes,
            "settled": self.membership.is_settled,
            "plain": not self.options.settings.enabled,
            "admit": self.options.admit.value,
            "nodes": [
                {
                    **msgspec.to_builtins(node.info),
                    "incarnation": node.incarnation,
                    "state": state_of(node, programmed=node.node_id in self.programmed_nodes),
                    "alive": node.live,
                    "connected": node.connection is not None,
                    "placed": node.placed,
                    "joining": node.joining,
                    "draining": node.draining,
                    "handover": {
                        "epoch": node.handed_epoch,
                        "left": node.handed_left,
                        "total": node.handed_total,
                        "failed": node.handed_failed,
                        "no_room": node.handed_no_room,
                    },
                    "programmed": node.node_id in self.programmed_nodes,
                    "buckets": homes.get(node.node_id, 0),
                    "epoch": node.epoch,
                    "lease_left_s": round(max(0.0, node.lease_until - now), 3),
                    "mtu_bytes": node.mtu_bytes,
                    "load": round(self.hot.load_of(node.node_id), 3),
                    "link_bits_per_s": node.link_bits_per_s,
                    "arena_bytes": node.arena_bytes,
                    "arena_used_bytes": node.arena_used_bytes,
                    "tiers": tiers_of(node, self.agent_counters.get(node.node_id, {})),
                    "blocks": node.blocks,
                }
                for node in sorted(self.membership.nodes.values(), key=lambda n: n.index)
            ],
            "namespaces": [
                msgspec.to_builtins(self.namespaces.by_number[n])
                for n in sorted(self.namespaces.by_number)
            ],
            "groups": [
                msgspec.to_builtins(self.namespaces.groups[k].info)
                for k in sorted(self.namespaces.groups)
            ],
            "residents": [
                {
                    "namespace": r.block.namespace,
                    "key": r.block.key.hex(),
                    "digest": f"{r.digest:016x}",
                    "size_bytes": r.size_bytes,
                    "slots": list(r.slots),
                    "generation": r.generation,
                    "pinned": r.pinned,
                    "leaving": r.leaving,
                    "hits": r.hits,
                    "value": round(self.tiers.heat.value(r.block, now), 1),
                    "age_s": round(now - r.admitted_at, 3),
                }
                for r in residency.residents.values()
            ],
            "replicas": [
                {"namespace": b.namespace, "key": b.key.hex(), "nodes": list(nodes)}
                for b, nodes in self.hot.listed.items()
            ],
            "pins": [
                {"namespace": b.namespace, "key": b.key.hex()} for b in sorted(self.tiers.pins)
            ],
            "slots": {
                "total": residency.capacity,
                "free": residency.free,
                "coming_free": residency.coming_free,
                "taken": {str(n): slots for n, slots in sorted(residency.taken().items())},
            },
            "adaptive": self.adaptive.report(now),
            "candidates": len(self.tiers.heat),
            "port_sets": len(self.multicast_groups.places),
            "counts": dict(sorted((self.counts + self.tiers.counts + self.hot.counts).items())),
            "agents": self.agent_counters,
        }

    def worth(self, now: float) -> dict[str, Any]:
        """What the switch has brought so far, and what of it is on; see `worth` and `adaptive`."""
        totals: Counter[str] = Counter()
        for counters in self.agent_counters.values():
            totals.update(counters)
        return {
            **judge(totals, groups=len(self.namespaces.groups)),
            "adaptive": self.adaptive.report(now),
        }

    def decisions(self, now: float) -> list[dict[str, Any]]:
        """The last decisions, newest first, with reasons; `age_s` in seconds."""
        made = [(d.at, d.verb, d.block, d.value, d.reason) for d in self.tiers.decisions]
        made += [
            (d.at, f"{d.verb} replica", d.block, self.tiers.heat.value(d.block, now), d.text)
            for d in self.hot.decisions
        ]
        return [
            {
                "age_s": round(now - at, 3),
                "decision": verb,
                "namespace": block.namespace,
                "key": block.key.hex(),
                "value": round(value, 1),
                "reason": reason,
            }
            for at, verb, block, value, reason in sorted(made, key=lambda d: -d[0])
        ]
