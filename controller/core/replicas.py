"""Hot replicas: which blocks further nodes answer for, because their homes are read too much.

Owns: every node's load (what it sends, over what its link carries), how much of it each block is,
which nodes are given a copy of which block, and when they are taken back. Must not know:
connections, epochs, the switch (its guard follows from `guarded`), clocks.

A node is *loaded* from `high_load` on. Then its most-read blocks are given to the nodes that have
least to do, until what it would have left is `aim_load`; each is asked to fetch the block (Keep),
and answers for it as soon as it has said that it has it (Kept). A block that was read but once of
late is given to nobody, however loaded its home: of what is gone through once (a model that is
loaded) a copy costs that home the same again, and nobody reads it. What a node was given is taken
back

- when the home could bear all that its replicas send as well, with `low_load`, for `calm_s`;
- when the block is hardly read any more, for `calm_s`: what is hot has moved on;
- when the replica does not hold it any more, dies, leaves, or may not use the namespace.

`high_load` is above `low_load`, and a block rests for `settle_s` after it was given once, since
what that has brought shows only in later reports. So a load that stands still moves nothing.

Bounds: `MAX_REPLICATED` blocks; `max_copies` nodes a block; `arena_share` of a node's arena as far
as that is free, and `displaced_share` where it is full, as that of a node is that has run for long:
what is hot displaces what its policy would evict next; `copy_share` of the loaded node's link for
copying; so many entries as the switch's guard has left. At a bound nothing more is given.

A reader that has not heard of a change yet may still ask a node that has just been relieved, so the
guard lets that one answer for `rest_s` more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from kvcast.controller.core.requests import DESCRIBE_BATCH, OpenRequests, Outgoing
from kvcast.protocol.messages.control import (
    MAX_REPLICATED,
    BlockRef,
    Describe,
    Described,
    HotBlock,
    Keep,
    Kept,
)
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, SEGMENT_BYTES, BlockId, bucket_of

FIRST_REQUEST: Final = 1 << 40
"""Questions of this module are numbered from here, and so told from those of `tiers`."""
REQUEST_TIMEOUT_S: Final = 5.0
MAX_BLOCKS_A_NODE: Final = 1024
"""Blocks of which it is remembered how much a node sends, and up to a half more until the
least-read are forgotten."""
_NOTHING_BYTES_PER_S: Final = 1.0
_LEAST_SCALE: Final = 1e-100
"""Below, rates are written down anew, long before a number is too small for a float."""
_READ_AGAIN: Final = 1.5
"""Of a block's size: more was sent of it, and it was read again. Repairs of one read are less."""
_AT_ONCE: Final = 16
"""Blocks that one node is asked to fetch at a time."""
_DECISIONS_KEPT: Final = 256


@dataclass(frozen=True)
class ReplicaOptions:
    """Loads are shares of a link's rate; times in seconds."""

    enabled: bool = True
    high_load: float = 0.6
    low_load: float = 0.3
    aim_load: float = 0.45
    max_copies: int = 4
    """Nodes that may hold a block beside those that the bucket map names."""
    arena_share: float = 0.25
    displaced_share: float = 1 / 16
    copy_share: float = 0.5
    half_life_s: float = 1.5
    """After which what was sent counts half."""
    settle_s: float = 3.0
    calm_s: float = 10.0
    idle_share: float = 0.01
    """A block that makes less of its home's link than this is hardly read any more."""
    rest_s: float = 2.0
    period_s: float = 0.5
    """How often it is looked whether something should change."""
    refresh_s: float = 10.0
    """How often the holders are asked whether they still hold the same bytes."""


@dataclass(frozen=True)
class NodeView:
    """What there is to know of a live node that has a connection."""

    node_id: str
    link_bytes_per_s: float
    """0: not known; then nobody can say how loaded it is."""
    arena_bytes: int
    arena_used_bytes: int


class _Sent(msgspec.Struct, gc=False):
    """How much a node sends of a block, in its `_Load`'s scale, and which copy it has. There are
    hundreds of thousands, of which the garbage collector need not know."""

    scaled: float
    size_bytes: int
    digest: int
    in_all_bytes: int
    """Sent since it is remembered, or read again after a long time."""

    @property
    def was_read_again(self) -> bool:
        return self.in_all_bytes > _READ_AGAIN * self.size_bytes


@dataclass
class _Load:
    """What a node sends, in all and by block.

    All blocks' rates fade alike: so what fades is `scale`, and a report costs what it says, not
    what is remembered. A rate in bytes a second is `scaled` times that."""

    total_bytes: float
    """Its counter, as last reported."""
    heard_at: float
    bytes_per_s: float = 0.0
    blocks: dict[BlockId, _Sent] = field(default_factory=dict)
    scale: float = 1.0

    def rate(self, block: BlockId) -> float:
        """Bytes of it that the node sends a second."""
        sent = self.blocks.get(block)
        return self.scale * sent.scaled if sent is not None else 0.0

    def fade(self, kept: float) -> None:
        """Count so much of every block's rate from now on."""
        self.scale *= kept
        if self.scale < _LEAST_SCALE:
            for sent in self.blocks.values():
                sent.scaled *= self.scale
            self.scale = 1.0

    def most_read(self) -> list[BlockId]:
        """Blocks, the most read first."""
        return sorted(self.blocks, key=lambda block: self.blocks[block].scaled, reverse=True)

    def prune(self) -> None:
        """Forget what is hardly read, and the least read beyond the bound."""
        self.blocks = {
            block: self.blocks[block]
            for block in self.most_read()[:MAX_BLOCKS_A_NODE]
            if self.rate(block) > _NOTHING_BYTES_PER_S
        }


@dataclass
class _Replicated:
    """One block that further nodes hold."""

    size_bytes: int
    digest: int
    given_at: float
    hot_at: float
    """When it was last read enough to be worth it."""
    holders: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReplicaDecision:
    """What was given or taken back, and why."""

    at: float
    verb: str
    block: BlockId
    node_id: str
    reason: str

    @property
    def text(self) -> str:
        return f"{self.node_id}: {self.reason}"


Homes = Callable[[BlockId], Sequence[str]]
"""The node ids that the bucket map names for a block, home first."""
Listed = Mapping[BlockId, tuple[str, ...]]
"""By block: the nodes that answer for it beside those of the bucket map."""


class HotReplicas:
    """See the module's text."""

    def __init__(
        self, options: ReplicaOptions, homes: Homes, may_use: Callable[[int, str], bool]
    ) -> None:
        """`may_use`: whether a node may use a namespace."""
        self.options = options
        self.counts: Counter[str] = Counter()
        self.decisions: deque[ReplicaDecision] = deque(maxlen=_DECISIONS_KEPT)
        self._homes = homes
        self._may_use = may_use
        self._requests = OpenRequests(first=FIRST_REQUEST)
        self._asked_for: dict[int, tuple[int, int]] = {}
        """By open Keep: size and digest of what is to be fetched."""
        self._nodes: dict[str, NodeView] = {}
        self._loads: dict[str, _Load] = {}
        self._blocks: dict[BlockId, _Replicated] = {}
        self._resting: dict[tuple[int, str], float] = {}
        """By bucket and node: until when the guard lets it answer all the same."""
        self._calm_since: dict[str, float] = {}
        """By home: since when it could bear everything itself."""
        self._looked_at = float("-inf")
        self._refreshed_at = float("-inf")
        self._listed: Listed | None = {}
        self._guarded: frozenset[tuple[int, str]] | None = frozenset()

    @property
    def listed(self) -> Listed:
        """Who answers for which block; another object when it has changed."""
        if self._listed is None:
            self._listed = {block: tuple(r.holders) for block, r in self._blocks.items()}
        return self._listed

    @property
    def guarded(self) -> frozenset[tuple[int, str]]:
        """Buckets, and nodes that may answer for them beside those of the bucket map; another
        object when it has changed."""
        if self._guarded is None:
            self._guarded = frozenset(self._resting).union(
                (bucket_of(block.key), node_id)
                for block, holders in self.listed.items()
                for node_id in holders
            )
        return self._guarded

    # --- what is heard ------------------------------------------------------------------------

    def heard(
        self,
        node_id: str,
        sent_bytes: float,
        hot: Iterable[tuple[BlockId, HotBlock]],
        now: float,
    ) -> None:
        """A node's report: its total of bytes sent, and of which blocks they were since the last
        report."""
        load = self._loads.get(node_id)
        if load is None or sent_bytes < load.total_bytes:  # another incarnation
            self._loads[node_id] = _Load(sent_bytes, now)
            return
        took_s = now - load.heard_at
        if took_s <= 0:
            return
        kept: float = 0.5 ** (took_s / self.options.half_life_s)
        grown = sent_bytes - load.total_bytes
        load.total_bytes, load.heard_at = sent_bytes, now
        load.bytes_per_s = kept * load.bytes_per_s + (1 - kept) * grown / took_s
        load.fade(kept)
        per_s = (1 - kept) / took_s / load.scale
        for block, report in hot:
            size_bytes, digest = report.size_bytes, report.digest
            if not 0 < size_bytes <= MAX_BLOCK_BYTES or not 0 < digest < 1 << 64:
                continue
            read_bytes = report.reads * min(size_bytes, SEGMENT_BYTES)
            sent = per_s * read_bytes
            each = load.blocks.get(block)
            if each is None:
                load.blocks[block] = _Sent(sent, size_bytes, digest, read_bytes)
            else:
                if each.scaled * load.scale < _NOTHING_BYTES_PER_S:  # that was long ago
                    each.in_all_bytes = 0
                each.scaled += sent
                each.in_all_bytes += read_bytes
                each.size_bytes, each.digest = size_bytes, digest
        if len(load.blocks) > MAX_BLOCKS_A_NODE * 3 // 2:
            load.prune()

    def kept(self, message: Kept, node_id: str, now: float) -> None:
        """A node's answer to a Keep of ours."""
        request = self._requests.answered(message.request, node_id)
        if request is None or request.attempt is None:
            self.counts["replica_answers_unexpected"] += 1
            return
        size_bytes, digest = self._asked_for.pop(request.number)
        block = request.blocks[0]
        if not message.held:
            self.counts["replicas_not_kept"] += 1
            return
        if node_id in self._homes(block) or node_id not in self._nodes:
            return  # the map has changed since
        replicated = self._blocks.get(block)
        if replicated is None:
            if len(self._blocks) >= MAX_REPLICATED:
                self.counts["replicas_at_bound"] += 1
                return
            replicated = self._blocks[block] = _Replicated(size_bytes, digest, now, now)
        if node_id not in replicated.holders:
            replicated.holders.append(node_id)
            replicated.given_at = replicated.hot_at = now
            self._changed()
            self._log("give", block, node_id, "it has fetched the block", now)

    def described(self, message: Described, node_id: str, now: float) -> None:
        """A holder's answer to a Describe of ours: it answers for what it holds."""
        request = self._requests.answered(message.request, node_id)
        if request is None or request.attempt is not None:
            self.counts["replica_answers_unexpected"] += 1
            return
        held = {BlockId(namespace, key) for namespace, key, _size, _digest in message.blocks}
        for block in request.blocks:
            if block not in held:
                self._take(block, node_id, "it does not hold the block any more", now)

    def forget(self, namespaces: Iterable[int], now: float, reason: str) -> None:
        """Nobody answers for blocks of these namespaces but their homes."""
        gone = frozenset(namespaces)
        for block in [block for block in self._blocks if block.namespace in gone]:
            self._take_all(block, reason, now)

    def load_of(self, node_id: str) -> float:
        """What a node sends, over what its link carries; 0 where that is not known."""
        load, node = self._loads.get(node_id), self._nodes.get(node_id)
        if load is None or node is None or not node.link_bytes_per_s:
            return 0.0
        return load.bytes_per_s / node.link_bytes_per_s

    def loads(self) -> dict[str, float]:
        """The loads that are known."""
        return {node_id: self.load_of(node_id) for node_id in self._nodes}

    # --- time ---------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Whether `advance` may have something to do by now."""
        if now >= self._looked_at + self.options.period_s:
            return True
        return bool(self._blocks or self._resting or len(self._requests))

    def advance(self, nodes: Iterable[NodeView], guard_room: int, now: float) -> Outgoing:
        """Everything that is due. `nodes`: those that live and can be asked; `guard_room`: entries
        that the switch's guard has for replicas."""
        self._nodes = {node.node_id: node for node in nodes}
        for request in self._requests.expired(now):
            self._asked_for.pop(request.number, None)
            self.counts["replica_requests_expired"] += 1
        for node_id in self._loads.keys() - self._nodes.keys():
            del self._loads[node_id]
        for pair in [pair for pair, until in self._resting.items() if until <= now]:
            del self._resting[pair]
            self._changed()
        self._take_from_those_that_may_not(now)
        if now < self._looked_at + self.options.period_s:
            return []
        self._looked_at = now
        self._take_what_is_not_needed(now)
        while self._blocks and len(self.guarded) > guard_room:
            self._take_all(next(iter(self._blocks)), "the switch's guard is full", now)
            self._resting.clear()
            self._changed()
        return [*self._give(guard_room, now), *self._refresh(now)] if self.options.enabled else []

    def next_deadline(self) -> float | None:
        """When `advance` has something to do without an event; None if nothing is out."""
        times = [*self._resting.values()]
        if (asked := self._requests.next_deadline()) is not None:
            times.append(asked)
        return min(times, default=None)

    # --- taking back --------------------------------------------------------------------------

    def _take_from_those_that_may_not(self, now: float) -> None:
        for block, replicated in list(self._blocks.items()):
            homes = self._homes(block)
            for node_id in list(replicated.holders):
                if node_id in homes:  # it answers all the same, and need not rest
                    self._take(block, node_id, "the bucket map names it", now)
                elif node_id not in self._nodes:
                    self._take(block, node_id, "it is gone", now)
                elif not self._may_use(block.namespace, node_id):
                    self._take(block, node_id, "it may not use the namespace", now)

    def _take_what_is_not_needed(self, now: float) -> None:
        options = self.options
        by_home: dict[str, list[BlockId]] = {}
        for block in self._blocks:
            homes = self._homes(block)
            by_home.setdefault(homes[0] if homes else "", []).append(block)
        self._calm_since = {h: at for h, at in self._calm_since.items() if h in by_home}
        for home, blocks in by_home.items():
            node = self._nodes.get(home)
            link = node.link_bytes_per_s if node is not None else 0.0
            elsewhere = 0.0
            for block in blocks:
                replicated = self._blocks[block]
                rates = [self._rate(holder, block) for holder in replicated.holders]
                elsewhere += sum(rates)
                if sum(rates) + self._rate(home, block) > options.idle_share * link:
                    replicated.hot_at = now
                elif now >= replicated.hot_at + options.calm_s:
                    self._take_all(block, "it is hardly read any more", now)
            load = self._loads.get(home)
            mine = load.bytes_per_s if load is not None else 0.0
            if not link or mine + elsewhere >= options.low_load * link:
                self._calm_since.pop(home, None)
            elif now >= self._calm_since.setdefault(home, now) + options.calm_s:
                for block in blocks:
                    self._take_all(block, "its home can bear its load", now)

    def _take_all(self, block: BlockId, reason: str, now: float) -> None:
        if block in self._blocks:
            for node_id in list(self._blocks[block].holders):
                self._take(block, node_id, reason, now)

    def _take(self, block: BlockId, node_id: str, reason: str, now: float) -> None:
        replicated = self._blocks.get(block)
        if replicated is None or node_id not in replicated.holders:
            return
        replicated.holders.remove(node_id)
        if not replicated.holders:
            del self._blocks[block]
        self._resting[bucket_of(block.key), node_id] = now + self.options.rest_s
        self._changed()
        self._log("take", block, node_id, reason, now)

    # --- giving -------------------------------------------------------------------------------

    def _give(self, guard_room: int, now: float) -> Outgoing:
        """Have loaded nodes' most-read blocks fetched by those that have least to do."""
        options = self.options
        out: Outgoing = []
        coming = dict.fromkeys(self._nodes, 0.0)
        """What nodes will have to send more, in bytes a second."""
        held: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for replicated in self._blocks.values():
            for node_id in replicated.holders:
                held[node_id] += replicated.size_bytes
        for number, (size_bytes, _digest) in self._asked_for.items():
            request = self._requests.open(number)
            held[request.node_id] += size_bytes
            waiting[request.node_id] += 1
        asked = self._requests.asked_about()
        entries = len(self.guarded) + len(self._asked_for)
        loaded = [n for n in self._nodes if self.load_of(n) >= options.high_load]
        for node_id in sorted(loaded, key=self.load_of, reverse=True):
            link = self._nodes[node_id].link_bytes_per_s
            load = self._loads[node_id]
            left = load.bytes_per_s
            budget = options.copy_share * link * options.period_s
            for block in load.most_read():
                sent, rate = load.blocks[block], load.rate(block)
                small = rate <= options.idle_share * link / 4
                if left <= options.aim_load * link or budget <= 0 or small:
                    break
                if block in asked or not sent.was_read_again:
                    continue
                if not self._may_have_another(block, now):
                    continue
                target = self._target(block, sent.size_bytes, coming, held, waiting)
                if target is None or entries >= guard_room:
                    self.counts["replicas_no_room"] += 1
                    continue
                message = self._ask(block, sent, target, now)
                if message is None:
                    return out
                out.append((target, message))
                asked.add(block)
                entries += 1
                answering = 1 + len(self.listed.get(block, ()))
                moved = rate / (answering + 1)
                coming[target] += moved
                held[target] += sent.size_bytes
                waiting[target] += 1
                left -= moved
                budget -= sent.size_bytes
        return out

    def _may_have_another(self, block: BlockId, now: float) -> bool:
        replicated = self._blocks.get(block)
        if replicated is None:
            return len(self._blocks) + len(self._asked_for) < MAX_REPLICATED
        return (
            len(replicated.holders) < self.options.max_copies
            and now >= replicated.given_at + self.options.settle_s
        )

    def _target(
        self,
        block: BlockId,
        size_bytes: int,
        coming: Mapping[str, float],
        held: Mapping[str, int],
        waiting: Mapping[str, int],
    ) -> str | None:
        """The node that has least to do, and room; None if there is none."""
        replicated = self._blocks.get(block)
        taken = {*self._homes(block), *(replicated.holders if replicated else ())}
        best: tuple[float, int, str] | None = None
        for node_id, node in self._nodes.items():
            if node_id in taken or not node.link_bytes_per_s or waiting[node_id] >= _AT_ONCE:
                continue
            load = self.load_of(node_id) + coming[node_id] / node.link_bytes_per_s
            free = node.arena_bytes - node.arena_used_bytes - waiting[node_id] * size_bytes
            displaced = int(node.arena_bytes * self.options.displaced_share) - held[node_id]
            most = int(node.arena_bytes * self.options.arena_share) - held[node_id]
            if load >= self.options.aim_load or min(most, max(free, displaced)) < size_bytes:
                continue
            if self._may_use(block.namespace, node_id):
                best = min(best or (load, held[node_id], node_id), (load, held[node_id], node_id))
        return best[2] if best is not None else None

    def _ask(self, block: BlockId, sent: _Sent, node_id: str, now: float) -> Keep | None:
        request = self._requests.ask(node_id, [block], now + REQUEST_TIMEOUT_S, 0)
        if request is None:
            self.counts["replica_requests_at_bound"] += 1
            return None
        self._asked_for[request.number] = sent.size_bytes, sent.digest
        return Keep(request.number, block.namespace, block.key, sent.size_bytes, sent.digest)

    def _refresh(self, now: float) -> Outgoing:
        """Ask the holders whether they still hold what they answer for."""
        if now < self._refreshed_at + self.options.refresh_s:
            return []
        self._refreshed_at = now
        by_holder: dict[str, list[BlockId]] = {}
        for block, replicated in self._blocks.items():
            for node_id in replicated.holders:
                by_holder.setdefault(node_id, []).append(block)
        out: Outgoing = []
        for node_id, blocks in by_holder.items():
            for start in range(0, len(blocks), DESCRIBE_BATCH):
                batch = blocks[start : start + DESCRIBE_BATCH]
                request = self._requests.ask(node_id, batch, now + REQUEST_TIMEOUT_S)
                if request is None:
                    return out
                refs = [BlockRef(block.namespace, block.key) for block in batch]
                out.append((node_id, Describe(request=request.number, blocks=refs)))
        return out

    # --- the rest -----------------------------------------------------------------------------

    def _rate(self, node_id: str, block: BlockId) -> float:
        load = self._loads.get(node_id)
        return load.rate(block) if load is not None else 0.0

    def _changed(self) -> None:
        self._listed = self._guarded = None

    def _log(self, verb: str, block: BlockId, node_id: str, reason: str, now: float) -> None:
        self.counts[f"replicas_{'given' if verb == 'give' else 'taken'}"] += 1
        self.decisions.append(ReplicaDecision(now, verb, block, node_id, reason))
