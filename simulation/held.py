"""What a host may hold, by what the operator has said of namespaces: quotas, ages, whole prefixes.

Owns: these rules, judged from outside by what lies in a store and on its shelf at one moment after
the other. Must not know: how a store keeps to them, or which policy chooses what.

- **Quota.** The extents of a namespace's copies in DRAM, and on the disk, are never more than its
  quota there, not by one block. Where one becomes smaller, what can go has gone at once, or goes
  part by part, and to what cannot nothing is added.
- **Deletion.** Of a namespace that the agent knows to be deleted nothing is there, but what is
  still to go.
- **Share.** What is assured to a namespace there does not go for the sake of another.
- **Age.** A copy of a namespace whose blocks live for a time after they were stored is gone when it
  has been there for so long, by the host's own clock, whatever the wall clock says.
- **Bounds.** What waits in an agent is never more than its options say.
- **Prefix.** Where the policy is `value`, a block that was in DRAM together with the block before
  it in its prefix does not stay there without it, nor on the host, in whichever tiers the two lie,
  once that has left all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvcast.hostagent.core.agent import MAX_PARKED
from kvcast.hostagent.core.store import COMMITTED, Copy, Store, StoreRules
from kvcast.protocol.messages.control import NamespaceSettings
from kvcast.protocol.messages.wire import BlockId
from kvcast.simulation.agent import SimAgent
from kvcast.simulation.model import ViolationError

LATE_S: Final = {"dram": 0.02, "arena": 0.5, "ssd": 0.5}
"""What has outlived its time is gone so soon; from a disk when something else happens there."""


class _Shelf:
    """What was seen in one store of an agent."""

    def __init__(self) -> None:
        self.copies: dict[BlockId, Copy] = {}
        self.since: dict[BlockId, float] = {}
        """When a copy was seen first, by the host's clock."""
        self.behind: dict[BlockId, Copy] = {}
        """The copy that was there, too, and before one in its prefix."""

    def note(self, now: dict[BlockId, Copy], at: float) -> None:
        """This lies there; remember what has come."""
        for block in self.copies.keys() - now.keys():
            del self.since[block]
            self.behind.pop(block, None)
        for block, copy in now.items():
            if self.copies.get(block) is not copy:
                self.since[block] = at
                self.behind.pop(block, None)
            if copy.parent and block not in self.behind:
                above = now.get(BlockId(block.namespace, copy.parent))
                if above is not None:
                    self.behind[block] = above
        self.copies = now

    def begin_anew(self, namespaces: set[int]) -> None:
        """Another policy may rule these, which need not know what is behind what."""
        for block in [b for b in self.behind if b.namespace in namespaces]:
            del self.behind[block]


class Held:
    """What one life of an agent was seen to hold."""

    def __init__(self, process: SimAgent) -> None:
        self._process = process
        self._shelves = {tier: _Shelf() for tier in LATE_S}
        self._settings: dict[int, NamespaceSettings] = {}
        self._excess: dict[tuple[int, str], int] = {}
        """Quotas that have become smaller than what lay there then: how much that was."""
        self._watched: set[Store] = set()
        self._together: set[tuple[BlockId, Copy]] = set()
        """Copies of blocks that are behind others which this host has, each with that one."""

    def look(self) -> None:
        """Look at everything; ViolationError."""
        core = self._process.core
        self._look_at_queues()
        if core.pool is None or core.recovery is not None:
            return
        settings = {n: info.settings for n, info in core.pool.namespaces.items()}
        changed = {n for n in settings if settings[n] != self._settings.get(n)}
        self._settings = settings
        self._look_at_store("dram", core.store, changed)
        for below in core.tiers:
            self._look_at_store(below.tier, below.shelf, changed)
        stores = [core.store, *(below.shelf for below in core.tiers)]
        self._look_at_prefixes(stores, changed)
        for store in stores:
            gone = {b for b in store.blocks() if b.namespace in core.pool.deleted}
            for block in gone.difference(*store._leaving.values()):
                raise ViolationError(
                    0,
                    f"host {self._process.host.number} holds a block of namespace "
                    f"{block.namespace}, and knows that it was deleted",
                )

    def _look_at_store(self, tier: str, store: Store, changed: set[int]) -> None:
        self._watch_shares(tier, store)
        self._look_at_quotas(tier, store, changed)
        shelf = self._shelves[tier]
        copies = {block: store.known(block) for block in store.blocks()}
        shelf.note({b: c for b, c in copies.items() if c is not None}, self._process.now)
        shelf.begin_anew(changed)
        for block in shelf.copies:
            said = self._settings.get(block.namespace)
            if said is not None and block.namespace not in changed:
                self._look_at_age(tier, block, said)
                if tier == "dram" and said.policy == "value":
                    self._look_at_prefix(block)

    def _look_at_queues(self) -> None:
        core = self._process.core
        requester, responder = core.requester.config, core.options.responder
        waiting = [
            ("fetches", core.requester.fetches_in_flight, requester.max_fetches),
            ("answers", core.responder.segments_waiting, 2 * responder.max_jobs),
            ("READs of what lies below", core._parked, MAX_PARKED),
        ]
        for below in core.tiers:
            waiting.append(("reads", len(below._reads), below.rules.max_reads_waiting))
        if core.cold is not None:
            most = core.cold.rules.max_waiting
            waiting.append(("objects to store", core.cold.stores_waiting, most))
            waiting.append(("objects to fetch", len(core.cold._to_fetch), most))
        for what, count, most in waiting:
            if count > most:
                raise ViolationError(
                    0, f"host {self._process.host.number}: {count} {what} wait, {most} at most"
                )

    def _look_at_quotas(self, tier: str, store: Store, changed: set[int]) -> None:
        used: Counter[int] = Counter()
        for copy in store._by_offset.values():
            used[copy.block.namespace] += copy.reserved_bytes
        for namespace, said in self._settings.items():
            quota = said.quota_bytes.get(tier, 0)
            before = self._excess.pop((namespace, tier), 0)
            if not quota or used[namespace] <= quota:
                continue
            if namespace in changed or used[namespace] <= before:
                self._excess[namespace, tier] = used[namespace]
            else:
                raise ViolationError(
                    0,
                    f"host {self._process.host.number} holds {used[namespace]} bytes of namespace "
                    f"{namespace} in {tier}, and its quota is {quota}",
                )

    def _watch_shares(self, tier: str, store: Store) -> None:
        """From now on, look at every copy that a store evicts."""
        if store in self._watched:
            return
        self._watched.add(store)
        evict = store._evict

        def watched(copy: Copy) -> None:
            namespace, before = copy.block.namespace, store.namespace_bytes(copy.block.namespace)
            evict(copy)
            kept = min(before, store.assured_bytes(namespace))
            if store.namespace_bytes(namespace) < kept and store._room_for != namespace:
                raise ViolationError(
                    0,
                    f"host {self._process.host.number} evicts {copy.block} from {tier} for another,"
                    f" of {before} bytes of which {kept} are assured",
                )

        store._evict = watched  # type: ignore[method-assign]
        configure = store.configure

        def configured(rules: dict[int, StoreRules]) -> None:
            configure(rules)
            for namespace, rule in rules.items():
                if rule.policy != "value":  # which keeps what is before a pinned block
                    self._look_at_excess(tier, store, namespace)

        store.configure = configured  # type: ignore[method-assign]

    def _look_at_excess(self, tier: str, store: Store, namespace: int) -> None:
        quota, used = store.quota_of(namespace), store.namespace_bytes(namespace)
        if not quota or used <= quota or namespace in store._shrinking:
            return
        for copy in store._by_offset.values():
            mine = copy.block.namespace == namespace and copy.state == COMMITTED
            if mine and not copy.pins and store._can_go(copy):
                raise ViolationError(
                    0,
                    f"host {self._process.host.number} goes on holding {copy.block} in {tier}, of "
                    f"{used} bytes, when the quota becomes {quota}",
                )

    def _look_at_age(self, tier: str, block: BlockId, said: NamespaceSettings) -> None:
        host = self._process.host
        held_s = self._process.now - self._shelves[tier].since[block]
        runs = host.world.now > host.stalled_until + LATE_S[tier]
        if said.ttl_s and said.policy != "ttl" and runs and held_s > said.ttl_s + LATE_S[tier]:
            raise ViolationError(
                0,
                f"host {host.number} has held a block of namespace {block.namespace} in {tier} for "
                f"{held_s:.2f} s, which lives for {said.ttl_s:g} s",
            )

    def _look_at_prefix(self, block: BlockId) -> None:
        shelf = self._shelves["dram"]
        above = shelf.behind.get(block)
        if above is not None and shelf.copies.get(above.block) is not above:
            raise ViolationError(
                0,
                f"host {self._process.host.number} holds a block of namespace {block.namespace} "
                "without the one before it, which it had together with that block",
            )

    def _look_at_prefixes(self, stores: Sequence[Store], changed: set[int]) -> None:
        """In all tiers together."""
        core = self._process.core
        copies = [copy for store in stores for b in store.blocks() if (copy := store.known(b))]
        held = {copy.block for copy in copies}
        going = {block for _, block in core.store.prefixes_elsewhere.orphans}
        together = set()
        for copy in copies:
            block, above = copy.block, BlockId(copy.block.namespace, copy.parent)
            said = self._settings.get(block.namespace)
            if not copy.parent or said is None or said.policy != "value":
                continue
            if above in held:
                together.add((above, copy))
                continue
            beyond = core.store.beyond is not None and core.store.beyond.holds(above)
            was = (above, copy) in self._together and block.namespace not in changed
            if was and not beyond and block not in going:
                raise ViolationError(
                    0,
                    f"host {self._process.host.number} holds {block} in some tier, and the one "
                    f"before it in none any more",
                )
        self._together = together
