"""What blocks this node holds in DRAM: the index, pins, quotas and eviction.

Owns: every block's state (reserved, committed, doomed), who pins it, the namespaces' bytes and
rules, how long blocks live, and which of them may be evicted. Must not know: sockets, the wire,
clocks (`advance` says what time it is), homes of buckets (whoever commits a copy says whether it is
a home's), or how a policy chooses (`kvcast.hostagent.tiers.policies`).

A copy is first **reserved** (bytes set aside, unseen by lookups), then **committed** (whole,
with its digest, immutable) or aborted. The first committed copy of a block wins: engines that
compute the same block get bytes that differ in the last bits, and whoever reads one copy must
not find another half way. Pins keep a copy's bytes where they are; a pinned copy that is dropped
is **doomed**: gone from the index at once, its bytes free when the last pin goes.

Others may find and pin committed copies by themselves (`PinnedElsewhere`). The store learns of such
pins before it looks for victims, and once more when it takes a copy away; one that was pinned in
between is doomed, and its bytes stay.

Evicted are committed copies that nobody pins. Where a namespace's quota is what lacks, it pays
itself; where the arena is full, the namespace pays that has the least recently used of all. Which
of its blocks goes, that namespace's policy says; what it says is checked, and where it is wrong or
finds nothing, the least recently used goes, and a wrong answer is counted. Where the victim's slab
is cut for another size, the slab's other copies go with it, since one free slot of the wrong size
helps nobody; so a slab in which anything is pinned or being written is passed over. Of the slabs of
those that would go first, the one goes in which nothing has been used for the longest: what was
just put stays, and no more than one slab goes; for a block of several, as many that lie side by
side. What cannot succeed evicts nothing: before the first victim is chosen, it is known that some
victims make the room (unless somebody pins them meanwhile).

A namespace may have a share that is assured to it: as long as it takes no more, none of its copies
goes for the sake of another. What is assured to all together is nine tenths of the arena at most;
where an operator says more, each has less in proportion. What its own quota, its time to live or
its own puts evict goes all the same. Where shares are assured, a block of several slabs may not
have its room though it could be made.

A policy may know of blocks that are of no use without another (`Policy.descendants`): with that one
they go, too, pinned ones as soon as they can. A copy that is being written pins the block before it
in its prefix, if that is held, so that it cannot come after its ancestor has gone.

What a deleted namespace or a smaller quota gives up may be a million blocks, so it goes a part at a
time (`PART_BLOCKS`), with `advance`. A namespace *leaves* meanwhile, or *shrinks*.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

import msgspec
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.policies import Policy, Search, Verdict
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.chains import bits_of, count_of, keys_of, mask_of
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, BlockId

RESERVED: Final = 0
COMMITTED: Final = 1
DOOMED: Final = 2

_VICTIMS_TRIED: Final = 256
"""Candidates looked at, in a policy's order or the least recently used first, for one that frees
something; then it is one of the right size, or a whole slab, however lately used."""
_SLABS_TRIED: Final = 8
"""Slabs of those that would go first, of which one is emptied for another size."""
_CLEAN: Final = 32
"""Candidates looked at for one that lies below, too, where the first does not."""
_NAMESPACES_ASKED: Final = 4
"""Namespaces whose policies are asked for one victim, at most."""
ONE_USE_S: Final = 0.1
"""Lookups of a block that are so close are one use of it: it is read segment by segment."""
MAX_PLACES_KNOWN: Final = 65_536
"""Blocks that are asked for of which the place in their prefix is known."""
MAX_GONE_KNOWN: Final = 16384
"""Blocks of which it is remembered why they went, and the digest if this node was their home."""
_EXPIRED: Final = -1
EVICTED: Final = "evicted"
EXPIRED: Final = "expired"
NO_ROOM: Final = "no room in DRAM"
"""What a read from a lower tier ends with where there was none."""


MOST_ASSURED: Final = 0.9
"""Of an arena, what can be assured to all namespaces together."""
_NOT_SPARE: Final = 0.9
"""Of an arena, what may be in use while there is room to spare."""
PART_BLOCKS: Final = 256
"""Blocks that go together, of a namespace that is deleted, or has more than its quota."""
PAUSE_S: Final = 0.005
"""Then others have their turn. A million blocks take half a minute."""


class StoreError(Exception):
    """A copy cannot be stored; each subclass says why."""


class NoRoomError(StoreError):
    """Everything that could be evicted is pinned, or the block exceeds the arena."""


class QuotaError(StoreError):
    """The namespace's quota is smaller than the block, or taken by pinned copies."""


@dataclass(frozen=True)
class StoreRules:
    """What an operator says of a namespace's blocks here. `policy`: a name of
    `kvcast.hostagent.tiers.policies`; `quota_bytes` of arena, None = the store's default, 0 = no
    limit; `ttl_s`: a block is gone so long after it was committed (with the policy ttl, after its
    last use); 0 = it stays; `assured_bytes`: of arena, that others cannot take."""

    policy: str = policies.DEFAULT
    quota_bytes: int | None = None
    ttl_s: float = 0.0
    assured_bytes: int = 0


class StaleReservationError(StoreError):
    """The namespace was dropped while the copy was being written; its bytes are given back."""


class Copy(msgspec.Struct, eq=False, gc=False):
    """One copy of a block in the arena. `reserved_bytes` is what it takes, `size_bytes` what it
    is; `home` whether this node held it as one of the block's homes when it was committed; `cell`
    by which name others can pin it, 0 where they cannot; `parent` the key of the block before it in
    its prefix, b"" if there is none or it is not known, and `depth` how many are before it.

    There may be millions, none of them in a cycle: the garbage collector does not look at them."""

    block: BlockId
    size_bytes: int
    offset: int
    reserved_bytes: int
    generation: int
    cell: int = 0
    digest: int = 0
    home: bool = False
    pins: int = 0
    state: int = RESERVED
    parent: bytes = b""
    depth: int = 0
    committed_at: float = 0.0
    used_at: float = 0.0
    waits_on: Copy | None = None
    """The parent's copy, pinned while this one is being written."""

    def __repr__(self) -> str:
        state = ("reserved", "committed", "doomed")[self.state]
        return f"<Copy {self.block} {self.size_bytes} B at {self.offset} {state} pins={self.pins}>"


_DEFAULT_RULES: Final = StoreRules()


class PinnedElsewhere(Protocol):
    """Who finds and pins committed copies without asking the store. Its methods may pin, unpin and
    get copies of the store, and nothing else of it."""

    def publish(self, copy: Copy) -> None:
        """A copy was committed, and may be found."""
        ...

    def withdraw(self, copies: Iterable[Copy]) -> None:
        """These are not to be found any more. Those that are pinned elsewhere have been pinned in
        the store when this returns, and nobody else can pin them."""
        ...

    def refresh(self) -> None:
        """Pin in the store what is pinned elsewhere now, and unpin what is not any more."""
        ...

    def held(self, namespace: int, chain: bytes) -> tuple[int, int]:
        """Which blocks of a chain can be found, as bits (`kvcast.protocol.chains`); and how many
        of the store's copies can be."""
        ...


class Recovery(Protocol):
    """What is still to be had of the copies that another agent has left in the arena."""

    def look(self, block: BlockId, copy: Copy | None) -> Copy | None:
        """The copy of a block, which the store has or has not, once its bytes are known to be
        right; None where there is none."""
        ...

    def finish(self) -> None:
        """Let the store have all copies that it has not yet."""
        ...


class Below(Protocol):
    """The tier to which copies go before they leave the store, and from which they come back. It
    may pin, unpin and evict copies of the store, but not while the store calls it."""

    @property
    def is_counted(self) -> bool:
        """Whether all that it may have is in a filter that compiled code looks into."""
        ...

    def holds(self, block: BlockId) -> bool:
        """Whether it has the block."""
        ...

    def size_of(self, block: BlockId) -> int:
        """How many bytes a block has there; 0 if it is not there."""
        ...

    def place_of(self, block: BlockId) -> tuple[bytes, int]:
        """(`parent`, `depth`) of a block, as in `Store.reserve`, if it is there, and known."""
        ...

    def advance(self, now: float) -> None:
        """As `Store.advance`."""
        ...

    def committed(self, copy: Copy) -> None:
        """A copy was committed here."""
        ...

    def evicting(self, copy: Copy) -> None:
        """A copy leaves the store for want of room; its bytes are still there."""
        ...

    def drop(self, block: BlockId) -> bool:
        """Forget a block; whether it was held."""
        ...

    def drop_namespace(self, namespace: int, *, at_once: bool) -> None:
        """Forget all blocks of a namespace; `at_once` as in `Store.drop_namespace`."""
        ...

    def why_gone(self, block: BlockId) -> str:
        """As `Store.why_gone`, of a block that was there."""
        ...


class Beyond(Protocol):
    """Where copies lie besides the store and what is below it."""

    def holds(self, block: BlockId) -> bool:
        """Whether it is known to have the block."""
        ...

    def committed(self, copy: Copy) -> None:
        """A copy was committed here. The store may not be changed now."""
        ...

    def drop(self, block: BlockId) -> bool:
        """Forget a block; whether it was known."""
        ...

    def drop_namespace(self, namespace: int, *, deleted: bool = True) -> None:
        """Forget all blocks of a namespace. `deleted`: nobody shall find them again; else others
        may go on using them."""
        ...


class PrefixesElsewhere(Protocol):
    """What a node's tiers know of each other's prefixes."""

    @property
    def orphans(self) -> Collection[tuple[BlockId, BlockId]]:
        """What left, and who was behind it, until `settle`."""
        ...

    def keeps(self, block: BlockId, store: Store) -> bool:
        """Whether others are to leave this tier first, since another has blocks behind this one."""
        ...

    def left(self, block: BlockId) -> None:
        """A block is not in some tier any more. No tier is changed now."""
        ...

    def settle(self, store: Store) -> None:
        """Let go what is behind blocks that have left all tiers, if this is the first of them."""
        ...

    def pin(self, block: BlockId, store: Store) -> Copy | None:
        """Pin a block in a tier below this one; None where it lies in none."""
        ...

    def unpin(self, copy: Copy) -> None:
        """Undo `pin`."""
        ...


class _OneTier:
    """There are no others."""

    orphans: Final = ()

    def keeps(self, block: BlockId, store: Store) -> bool:
        return False

    def left(self, block: BlockId) -> None:
        pass

    def settle(self, store: Store) -> None:
        pass

    def pin(self, block: BlockId, store: Store) -> Copy | None:
        return None

    def unpin(self, copy: Copy) -> None:
        pass


class _NothingBelow:
    """What leaves the store is gone."""

    is_counted: Final = True

    def holds(self, block: BlockId) -> bool:
        return False

    def size_of(self, block: BlockId) -> int:
        return 0

    def place_of(self, block: BlockId) -> tuple[bytes, int]:
        return b"", 0

    def advance(self, now: float) -> None:
        pass

    def committed(self, copy: Copy) -> None:
        pass

    def evicting(self, copy: Copy) -> None:
        pass

    def drop(self, block: BlockId) -> bool:
        return False

    def drop_namespace(self, namespace: int, *, at_once: bool) -> None:
        pass

    def why_gone(self, block: BlockId) -> str:
        return ""


class _NobodyElse:
    """The store's copies are found through the store alone."""

    def publish(self, copy: Copy) -> None:
        pass

    def withdraw(self, copies: Iterable[Copy]) -> None:
        pass

    def refresh(self) -> None:
        pass

    def held(self, namespace: int, chain: bytes) -> tuple[int, int]:
        return 0, 0


@dataclass(slots=True)
class _Namespace:
    """A namespace's unpinned copies, its bytes (reserved and doomed included), and what it asks
    which of its blocks is to go."""

    rules: StoreRules
    policy: Policy[BlockId]
    used_bytes: int = 0
    copies: int = 0
    evictable: dict[BlockId, Copy] = field(default_factory=dict)
    ages: dict[BlockId, float] = field(default_factory=dict)
    """When its blocks were committed; empty where they do not age so."""
    by_age: list[tuple[float, BlockId]] = field(default_factory=list)
    """A heap of the same, the oldest first, and of some that are gone."""

    @property
    def ages_blocks(self) -> bool:
        """Whether blocks are gone some time after they were committed, whatever the policy."""
        return self.rules.ttl_s > 0 and not self.policy.AGES

    def oldest(self) -> tuple[float, BlockId] | None:
        """When the oldest of its blocks that age was committed, and which that is."""
        while self.by_age:
            at, block = self.by_age[0]
            if self.ages.get(block) == at:
                return at, block
            heapq.heappop(self.by_age)
        return None

    def next_expiry(self) -> float | None:
        """When the oldest of them has outlived its time."""
        oldest = self.oldest()
        return None if oldest is None else oldest[0] + self.rules.ttl_s

    def note_age(self, block: BlockId, at: float) -> None:
        """A block was committed then."""
        self.ages[block] = at
        if len(self.by_age) > 2 * len(self.ages) + 64:  # most of it is gone
            self.by_age = [(since, one) for one, since in self.ages.items()]
            heapq.heapify(self.by_age)
        else:
            heapq.heappush(self.by_age, (at, block))


@dataclass(slots=True)
class _SlabUse:
    """How many copies lie in a slab (of several slabs, in the first) that can be evicted now, and
    how many cannot."""

    stuck: int = 0
    evictable: int = 0


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start."""

    commits: int = 0
    duplicates: int = 0
    """Commits of a block that was held already, with the same bytes."""
    conflicts: int = 0
    """Commits of a block that was held already, with other bytes; the first copy stayed."""
    taken_bytes: int = 0
    """Room that was taken for blocks, those that did not come included."""
    evictions: int = 0
    evicted_bytes: int = 0
    drops: int = 0
    expired: int = 0
    """Blocks whose time was over."""
    orphaned: int = 0
    """Evictions for that a block's beginning had gone, among the others."""
    policy_faults: int = 0
    """Choices of a policy that could not go; others went in their stead."""
    no_room: int = 0
    over_quota: int = 0


class Store:
    """The blocks in one arena. `default_quota_bytes` 0 = namespaces without a quota of their own
    may fill the arena; `quotas` by namespace, in bytes of arena."""

    def __init__(
        self,
        allocator: Allocator,
        *,
        default_quota_bytes: int = 0,
        quotas: dict[int, int] | None = None,
    ) -> None:
        self.allocator = allocator
        self.elsewhere: PinnedElsewhere = _NobodyElse()
        self.recovery: Recovery | None = None
        """Set while there is something left to recover."""
        self.below: Below = _NothingBelow()
        self.beyond: Beyond | None = None
        self.prefixes_elsewhere: PrefixesElsewhere = _OneTier()
        self.when_freed: Callable[[], None] | None = None
        """Called when a copy has no pins any more, once: whoever waits for another says so anew."""
        self.counters = StoreCounters()
        self._default_quota = default_quota_bytes
        self._quotas = dict(quotas or {})
        self._index: dict[BlockId, Copy] = {}
        self._evictable: OrderedDict[BlockId, Copy] = OrderedDict()
        self._evictable_bytes = 0
        self._evictable_of_size: dict[int, dict[BlockId, Copy]] = {}
        self._slabs: dict[int, _SlabUse] = {}
        self._clear_slabs: dict[int, None] = {}
        """Those in which nothing is stuck, and something can be evicted."""
        self._by_offset: dict[int, Copy] = {}
        self._namespaces: dict[int, _Namespace] = {}
        self._rules: dict[int, StoreRules] = {}
        self._assured: dict[int, int] = {}
        """By namespace, the bytes that are assured to it."""
        self._passed_over: set[int] = set()
        """Slabs that were looked at already, while room is made."""
        self._room_for: int | None = None
        """The namespace that room is made for; None: what goes is not for one of them."""
        self._now = 0.0
        self._leaving: dict[int, list[BlockId]] = {}
        """What is still to be dropped, of namespaces in which nobody looks for anything."""
        self._shrinking: dict[int, None] = {}
        """Namespaces that have more than their quota, as long as something of them can go."""
        self._next_part_at = 0.0
        self._aging: dict[int, _Namespace] = {}
        self._prefixed: dict[int, _Namespace] = {}
        self._gone: BoundedMap[BlockId, int] = BoundedMap(MAX_GONE_KNOWN)
        """`_EXPIRED`, or evicted: then the digest, if this node was a home, else 0."""
        self._places: BoundedMap[BlockId, tuple[bytes, int]] = BoundedMap(MAX_PLACES_KNOWN)
        """(`parent`, `depth`) of blocks that may come, as in `reserve`."""
        self._generation = 0
        self._dropped_in: dict[int, int] = {}  # namespace to generation; one a namespace at most

    # --- rules and time -------------------------------------------------------------------

    def configure(self, rules: dict[int, StoreRules]) -> None:
        """State the rules of all namespaces; those that are not named have the default's. A policy
        that changed begins with the blocks that are here, the least recently used first; what
        exceeds a quota now goes, as far as it can, a part at a time."""
        for namespace in rules.keys() & self._leaving.keys():
            self._drop_some(namespace, len(self._leaving[namespace]))  # the number is used again
        self._rules = dict(rules)
        assured = {n: min(rule.assured_bytes, self.quota_of(n) or rule.assured_bytes)
                   for n, rule in rules.items() if rule.assured_bytes > 0}  # fmt: skip
        most_bytes = int(MOST_ASSURED * self.allocator.capacity_bytes)
        part = min(1.0, most_bytes / max(1, sum(assured.values())))
        self._assured = {namespace: int(part * of_it) for namespace, of_it in assured.items()}
        for namespace, state in list(self._namespaces.items()):
            if namespace not in self._leaving:
                self._apply(namespace, state)
        self._expire()

    def _apply(self, namespace: int, state: _Namespace) -> None:
        rules = self._rules_of(namespace)
        old, state.rules = state.rules, rules
        if (old.policy, old.ttl_s) != (rules.policy, rules.ttl_s):
            mine = [c for c in self._index.values() if c.block.namespace == namespace]
            if old.policy != rules.policy or state.policy.AGES:
                state.policy = self._make_policy(namespace, rules)
                mine.sort(key=lambda c: c.used_at)
                for copy in mine:
                    self._tell_policy(state, copy)
            state.by_age = [(c.committed_at, c.block) for c in mine] if state.ages_blocks else []
            heapq.heapify(state.by_age)
            state.ages = {block: at for at, block in state.by_age}
            self._note_kind(namespace, state)
        quota = self.quota_of(namespace)
        if quota and state.used_bytes > quota:
            self._shrinking[namespace] = None
            self._shrink(namespace)

    def _rules_of(self, namespace: int) -> StoreRules:
        return self._rules.get(namespace, _DEFAULT_RULES)

    def quota_of(self, namespace: int) -> int:
        """Bytes of arena that a namespace may take; 0 = no limit."""
        quota = self._rules_of(namespace).quota_bytes
        if quota is not None:
            return quota
        return self._quotas.get(namespace, self._default_quota)

    def _make_policy(self, namespace: int, rules: StoreRules) -> Policy[BlockId]:
        policy: Policy[BlockId] = policies.make(
            rules.policy, self.quota_of(namespace) or self.allocator.capacity_bytes, rules.ttl_s
        )
        policy.advance(self._now)
        return policy

    def _tell_policy(self, state: _Namespace, copy: Copy) -> None:
        """The namespace's policy hears of a copy that is committed."""
        parent = BlockId(copy.block.namespace, copy.parent) if copy.parent else None
        state.policy.inserted(copy.block, copy.reserved_bytes, parent, copy.depth)

    def _note_kind(self, namespace: int, state: _Namespace | None) -> None:
        """Know which namespaces' blocks age, and which are prefixes to their policy."""
        for kept, wanted in (
            (self._aging, state is not None and (state.ages_blocks or state.policy.AGES)),
            (self._prefixed, state is not None and state.policy.PREFIXES),
        ):
            if wanted:
                assert state is not None
                kept[namespace] = state
            else:
                kept.pop(namespace, None)

    def advance(self, now: float) -> None:
        """It is `now`; what has outlived its time is gone."""
        if now > self._now:
            self._now = now
            self.below.advance(now)
            self._expire()
            if self._next_part_at <= now and self._leaving:
                self._drop_some(next(iter(self._leaving)))
            elif self._next_part_at <= now and self._shrinking:
                self._shrink(next(iter(self._shrinking)))
        self.prefixes_elsewhere.settle(self)

    def _shrink(self, namespace: int) -> None:
        """A part of what exceeds a namespace's quota goes."""
        quota, state = self.quota_of(namespace), self._namespaces.get(namespace)
        self._next_part_at = self._now + PAUSE_S
        self._room_for = namespace
        self.elsewhere.refresh()
        for _ in range(PART_BLOCKS):
            exceeds = state is not None and 0 < quota < state.used_bytes
            victim = self._victim_of(state) if state is not None and exceeds else None
            if victim is None:
                del self._shrinking[namespace]
                return
            self._evict(victim)

    def _expire(self) -> None:
        now = self._now
        for state in list(self._aging.values()):
            state.policy.advance(now)
            while (block := self._outlived(state)) is not None:
                self.counters.expired += 1
                self._remove(self._index[block])
                self._gone[block] = _EXPIRED

    def _outlived(self, state: _Namespace) -> BlockId | None:
        oldest = state.oldest()
        if oldest is not None and oldest[0] + state.rules.ttl_s <= self._now:
            return oldest[1]
        return state.policy.expired()

    def next_expiry(self) -> float | None:
        """When `advance` will find the next block that has outlived its time, or has another part
        of something to do; None = it cannot."""
        if self._leaving or self._shrinking:
            return self._next_part_at
        times = [
            at
            for state in self._aging.values()
            for at in (
                state.next_expiry(),
                state.policy.next_expiry(),
            )
            if at is not None
        ]
        return min(times, default=None)

    def why_gone(self, block: BlockId) -> str:
        """EVICTED or EXPIRED, EVICTED and the tier if it was evicted below, if this node had the
        block and remembers; else ""."""
        gone = self._gone.get(block)
        below = self.below.why_gone(block)
        if below or gone is None:
            return below
        return EXPIRED if gone == _EXPIRED else EVICTED

    # --- lookups --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of arena taken, in extents."""
        return self.allocator.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of arena that cannot be evicted now: pinned, or being written."""
        return self.allocator.used_bytes - self._evictable_bytes

    def assured_bytes(self, namespace: int) -> int:
        """Bytes of arena that are assured to a namespace."""
        return self._assured.get(namespace, 0)

    def namespace_bytes(self, namespace: int) -> int:
        """Bytes of arena that a namespace takes."""
        state = self._namespaces.get(namespace)
        return state.used_bytes if state is not None else 0

    def peek(self, block: BlockId) -> Copy | None:
        """The committed copy of a block, which is not a use of it."""
        copy = self._index.get(block)
        return copy if self.recovery is None else self.recovery.look(block, copy)

    def lying_at(self, offset: int) -> Copy | None:
        """The copy, of whatever state, whose bytes begin there."""
        return self._by_offset.get(offset)

    def known(self, block: BlockId) -> Copy | None:
        """As `peek`, of what the store has by now, whether or not its bytes are right."""
        return self._index.get(block)

    def holds(self, namespace: int, chain: bytes) -> int:
        """Which blocks of a chain have a committed copy, here or below, as bits
        (`kvcast.protocol.chains`); which is not a use of them."""
        if self.recovery is not None:
            blocks = [BlockId(namespace, key) for key in keys_of(chain)]
            return bits_of(
                self.peek(block) is not None or self.lies_below(block) for block in blocks
            )
        only_here = isinstance(self.below, _NothingBelow) and self.beyond is None
        if only_here and namespace not in self._namespaces:
            return 0
        held, findable = self.elsewhere.held(namespace, chain)
        if held == mask_of(count_of(chain)) or (only_here and findable == len(self._index)):
            return held
        if only_here:
            # A pair is as good as a BlockId here, and quicker made.
            pairs = zip(itertools.repeat(namespace), keys_of(chain), strict=False)
            return bits_of(map(self._index.__contains__, pairs))
        blocks = [BlockId(namespace, key) for key in keys_of(chain)]
        return bits_of(block in self._index or self.lies_below(block) for block in blocks)

    @property
    def is_all_in_index(self) -> bool:
        """Whether the index in shared memory has every block that the store has, and a filter all
        that lie elsewhere on this node."""
        if self.recovery is not None or self.beyond is not None or not self.below.is_counted:
            return False
        return self.elsewhere.held(0, b"")[1] == len(self._index)

    def lies_below(self, block: BlockId) -> bool:
        """Whether a block can be had from where copies go."""
        return self.below.holds(block) or (self.beyond is not None and self.beyond.holds(block))

    def get(self, block: BlockId) -> Copy | None:
        """The committed copy of a block, now the most recently used."""
        copy = self.peek(block)
        if copy is None:
            return None
        if copy.pins == 0:
            self._evictable.move_to_end(block)
        now = self._now
        again = now - copy.used_at >= ONE_USE_S
        if again:
            copy.used_at = now
        self._namespaces[block.namespace].policy.hit(block, int(again))
        return copy

    def credit(self, block: BlockId, hits: int) -> None:
        """The switch has answered so many reads of a block, if it is held."""
        copy = self._index.get(block)
        if copy is not None and hits > 0:
            if copy.pins == 0:
                self._evictable.move_to_end(block)
            copy.used_at = self._now
            self._namespaces[block.namespace].policy.credited(block, hits)

    def evicted_digest(self, block: BlockId) -> int:
        """The digest of the copy that was evicted here while this node was its home; 0 if that is
        not known."""
        return max(0, self._gone.get(block, 0))

    def blocks(self) -> list[BlockId]:
        """All committed blocks, in no order."""
        return list(self._index)

    # --- a copy's life --------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The present time, as last told."""
        return self._now

    def has_spare_room(self, namespace: int, size_bytes: int) -> bool:
        """Whether a block of that size would displace nothing, with a tenth of the arena left."""
        reserved_bytes = self.allocator.extent_bytes(size_bytes)
        quota = self.quota_of(namespace)
        return self.used_bytes + reserved_bytes <= self.allocator.capacity_bytes * _NOT_SPARE and (
            not quota or self.namespace_bytes(namespace) + reserved_bytes <= quota
        )

    def could_hold(self, namespace: int, size_bytes: int) -> bool:
        """Whether a block of that size fits into the arena, and into the namespace's quota, if
        nothing else is there."""
        reserved_bytes = self.allocator.extent_bytes(size_bytes)
        quota = self.quota_of(namespace) or reserved_bytes
        return reserved_bytes <= min(quota, self.allocator.capacity_bytes)

    def note_place(self, block: BlockId, parent: bytes, depth: int) -> None:
        """A block may come whose place in its prefix is this one (as in `reserve`)."""
        kind = policies.BY_NAME[self._rules_of(block.namespace).policy]
        if kind.PREFIXES and block not in self._index:
            self._places[block] = parent, depth

    def reserve(
        self, block: BlockId, size_bytes: int, *, parent: bytes = b"", depth: int = 0
    ) -> Copy:
        """Set bytes aside for a copy, evicting if need be; StoreError where that is not enough.
        `parent`: the key of the block before it in its prefix, if there is one and the engine said
        so; `depth`: how many blocks are before it. Where nothing is said, what was said before
        (`note_place`) or is known below holds.

        Several reservations of one block may exist; the first to be committed wins.
        """
        if not 0 < size_bytes <= MAX_BLOCK_BYTES:
            raise NoRoomError(f"a block of {size_bytes} bytes is outside 1..{MAX_BLOCK_BYTES}")
        if self.recovery is not None:
            self.recovery.finish()  # until then nobody knows which bytes are free
        reserved_bytes = self.allocator.extent_bytes(size_bytes)
        state = self._state_of(block.namespace)
        self._room_for = block.namespace
        if not parent and not depth:
            parent, depth = self._places.get(block) or self.below.place_of(block)
        above = self._pin_parent(BlockId(block.namespace, parent), state) if parent else None
        try:
            if block not in self._index:
                state.policy.expected(block, reserved_bytes)
            self._respect_quota(block.namespace, state, reserved_bytes)
            offset = self._allocate(size_bytes)
        except StoreError:
            if above is not None:
                self._unpin_parent(above)
            self._forget_if_empty(block.namespace, state)
            raise
        copy = Copy(block, size_bytes, offset, reserved_bytes, self._generation)
        copy.parent, copy.depth, copy.waits_on = parent, depth, above
        self._by_offset[offset] = copy
        self._note(copy, stuck=1)
        # Evicting the namespace's last copy may have made it forget the namespace.
        if block.namespace not in self._namespaces:
            self._namespaces[block.namespace] = state
            self._note_kind(block.namespace, state)
        state.used_bytes += reserved_bytes
        self.counters.taken_bytes += reserved_bytes
        state.copies += 1
        return copy

    def commit(
        self,
        copy: Copy,
        digest: int,
        *,
        home: bool,
        pinned: bool = False,
        since: float | None = None,
    ) -> Copy:
        """Make a reserved copy visible; returns the copy in force, which is an older one where
        the block was held already (the new one's bytes are then free again), and which is pinned
        once more if so asked. `since`: when the block was committed, if that was in another tier.
        Raises StaleReservationError where the namespace was dropped meanwhile."""
        assert copy.state == RESERVED, copy
        if copy.generation < self._dropped_in.get(copy.block.namespace, 0):
            self._release_bytes(copy)
            raise StaleReservationError(f"namespace {copy.block.namespace} was dropped")
        held = self.peek(copy.block)
        if held is not None:
            if held.digest == digest:
                self.counters.duplicates += 1
            else:
                self.counters.conflicts += 1
            held.home = held.home or home
            self._release_bytes(copy)
            if pinned:
                self.pin(held)
            return held
        copy.state = COMMITTED
        copy.digest = digest
        copy.home = home
        self._index[copy.block] = copy
        self._gone.pop(copy.block, None)
        if pinned:
            copy.pins = 1
        else:
            self._make_evictable(copy)
        self._begins(copy, self._namespaces[copy.block.namespace], since)
        if copy.waits_on is not None:
            self._let_parent_go(copy)
        self.counters.commits += 1
        self.elsewhere.publish(copy)
        self.below.committed(copy)
        if self.beyond is not None:
            self.beyond.committed(copy)
        return copy

    def name(self, copy: Copy, block: BlockId) -> None:
        """A reserved copy whose block was not known (its key was b"") is of this one."""
        assert copy.state == RESERVED, copy
        assert copy.block == BlockId(block.namespace, b""), copy
        copy.block = block

    def land(
        self, copy: Copy, block: BlockId, size_bytes: int, digest: int, *, home: bool = False
    ) -> Copy:
        """As `commit`, pinned once, of a block that was not known when room was made for it, or for
        a larger one, and whose reader has been told where it lies. So where the block is held
        already, or the namespace was dropped, its bytes stay for that reader alone."""
        assert copy.state == RESERVED, copy
        assert copy.block.namespace == block.namespace, copy
        assert size_bytes <= copy.size_bytes, copy
        copy.block, copy.size_bytes = block, size_bytes
        stale = copy.generation < self._dropped_in.get(block.namespace, 0)
        held = None if stale else self.peek(block)
        if not stale and held is None:
            return self.commit(copy, digest, home=home, pinned=True)
        if held is not None:
            held.home = held.home or home
        self.counters.duplicates += 1
        copy.state = DOOMED
        copy.digest = digest
        copy.pins = 1
        return copy

    @property
    def generation(self) -> int:
        """How often namespaces have been dropped."""
        return self._generation

    def abort(self, copy: Copy) -> None:
        """Give a reserved copy's bytes back."""
        assert copy.state == RESERVED, copy
        self._release_bytes(copy)

    def pin(self, copy: Copy) -> None:
        """Keep a committed copy's bytes where they are; pins are counted."""
        assert copy.state != RESERVED, copy
        if copy.pins == 0 and copy.state == COMMITTED:
            self._make_unevictable(copy)
        copy.pins += 1

    def unpin(self, copy: Copy) -> None:
        """Undo one pin; a copy without pins is the most recently used one."""
        assert copy.pins > 0, copy
        copy.pins -= 1
        if copy.pins == 0:
            if copy.state == DOOMED:
                self._release_bytes(copy)
            else:
                self._make_evictable(copy)
                self._namespaces[copy.block.namespace].policy.freed(copy.block)
                if self.when_freed is not None:
                    told, self.when_freed = self.when_freed, None
                    told()

    def drop(self, block: BlockId) -> bool:
        """Forget a block, below, too; whether it was held."""
        self._gone.pop(block, None)
        below = self.below.drop(block)
        if self.beyond is not None:
            below = self.beyond.drop(block) or below
        copy = self.peek(block)
        if copy is None:
            return below
        self.counters.drops += 1
        self._remove(copy)
        return True

    def drop_namespace(self, namespace: int, *, deleted: bool = True, at_once: bool = True) -> int:
        """Forget every block of a namespace, and what is being written to it; how many blocks
        there were. `deleted`: as `Beyond.drop_namespace`; not `at_once`: since nobody looks for
        any of them, they go a part at a time, but before all others where room is wanted."""
        if self.recovery is not None:
            self.recovery.finish()
        self._generation += 1
        self._dropped_in[namespace] = self._generation
        for block in [block for block in self._gone if block.namespace == namespace]:
            del self._gone[block]
        self.below.drop_namespace(namespace, at_once=at_once)
        if self.beyond is not None:
            self.beyond.drop_namespace(namespace, deleted=deleted)
        gone = [block for block in self._index if block.namespace == namespace]
        count = len(gone)
        self._leaving[namespace] = gone
        self._drop_some(namespace, count if at_once else None)
        return count

    def _drop_some(self, namespace: int, most: int | None = None) -> None:
        """Forget so many of the blocks of a namespace that leaves; None: a part."""
        most = PART_BLOCKS if most is None else most
        self._next_part_at = self._now + PAUSE_S
        blocks = self._leaving[namespace]
        part = [copy for b in blocks[-most:] if (copy := self._index.get(b)) is not None]
        del blocks[-most:]
        if not blocks:
            del self._leaving[namespace]
        self.elsewhere.withdraw(part)
        for copy in part:
            if self._index.get(copy.block) is copy:  # it did not go with an ancestor
                self.counters.drops += 1
                self._remove(copy)

    @property
    def is_leaving(self) -> bool:
        """Whether there is something that nobody looks for, and that goes by and by."""
        return bool(self._leaving)

    # --- what goes below ------------------------------------------------------------------

    def next_to_leave(
        self, may: Callable[[Copy], bool], namespace: int | None = None
    ) -> Copy | None:
        """The copy that would be evicted next, of those that `may` leave; of this namespace, or, if
        it is None, of the one that is to pay next."""
        asked: set[int] = set()
        self._room_for = namespace
        if namespace is not None:
            state = self._namespaces.get(namespace)
            return self._ask(state, 0, may) if state is not None else None
        if self._assured:
            return self._of_who_pays(lambda state: self._ask(state, 0, may))
        for block in itertools.islice(self._evictable, _VICTIMS_TRIED):
            if block.namespace not in asked:
                asked.add(block.namespace)
                chosen = self._ask(self._namespaces[block.namespace], 0, may)
                if chosen is not None:
                    return chosen
                if len(asked) >= _NAMESPACES_ASKED:
                    break
        return None

    def namespaces(self) -> list[int]:
        """Those that take bytes of the arena."""
        return list(self._namespaces)

    def evict(self, copy: Copy, for_namespace: int | None = None) -> None:
        """A committed copy that nobody pins goes, since it lies below, unless it is of a share that
        is assured; `for_namespace`: for the sake of whose quota it goes."""
        assert copy.state == COMMITTED, copy
        assert copy.pins == 0, copy
        self._room_for = for_namespace
        if self._can_go(copy):
            self._evict(copy)

    # --- what another agent has left ------------------------------------------------------

    def adopt(
        self,
        block: BlockId,
        size_bytes: int,
        offset: int,
        state: int,
        digest: int = 0,
        since: float | None = None,
        *,
        room_bytes: int = 0,
        parent: bytes = b"",
        depth: int = 0,
    ) -> Copy | None:
        """Take over a copy whose bytes lie in the arena already: COMMITTED, or, for a client that
        has outlived its agent, RESERVED, or DOOMED and pinned once; `room_bytes`: of the block for
        which the room was made where it landed, if that is a larger one; `parent` and `depth` as in
        `reserve`. None where that cannot be: no extent of ours lies there, it is another's, or the
        block is held."""
        room_bytes = room_bytes or size_bytes
        if state == COMMITTED and block in self._index:
            return None
        if not self.allocator.claim(offset, room_bytes):
            return None
        reserved_bytes = self.allocator.extent_bytes(room_bytes)
        copy = Copy(block, size_bytes, offset, reserved_bytes, self._generation)
        self._by_offset[offset] = copy
        self._note(copy, stuck=1)
        used = self._state_of(block.namespace)
        used.used_bytes += reserved_bytes
        used.copies += 1
        copy.state = state
        copy.digest = digest
        copy.parent, copy.depth = parent, depth
        if state == COMMITTED:
            self._index[block] = copy
            self._make_evictable(copy)
            self._begins(copy, used, since)
        elif state == DOOMED:
            copy.pins = 1
        return copy

    def give_up(self, copy: Copy) -> None:
        """A committed copy's bytes are wrong: nobody finds it any more."""
        assert copy.state == COMMITTED, copy
        self._remove(copy)

    def behind(self, block: BlockId) -> Collection[BlockId]:
        """Committed blocks right behind this one in their prefixes, where it is not here itself;
        none where the policy does not look at prefixes."""
        state = self._prefixed.get(block.namespace)
        return () if state is None else state.policy.behind(block)

    def orphan(self, copy: Copy) -> None:
        """A committed copy goes, since the block before it has gone."""
        self.counters.orphaned += 1
        self._remove(copy)
        self._gone[copy.block] = 0

    # --- inside ---------------------------------------------------------------------------

    def _state_of(self, namespace: int) -> _Namespace:
        """What is known of a namespace; made where there is nothing of it yet."""
        state = self._namespaces.get(namespace)
        if state is None:
            rules = self._rules_of(namespace)
            state = _Namespace(rules, self._make_policy(namespace, rules))
            self._namespaces[namespace] = state
            self._note_kind(namespace, state)
        return state

    def _begins(self, copy: Copy, state: _Namespace, since: float | None = None) -> None:
        """A copy is committed here from now on: its age begins, unless the block is older, and its
        policy hears of it."""
        copy.used_at = self._now
        copy.committed_at = self._now if since is None else min(since, self._now)
        self._tell_policy(state, copy)
        if state.ages_blocks:
            state.note_age(copy.block, copy.committed_at)

    def _make_evictable(self, copy: Copy) -> None:
        self._evictable[copy.block] = copy
        self._namespaces[copy.block.namespace].evictable[copy.block] = copy
        self._evictable_bytes += copy.reserved_bytes
        self._evictable_of_size.setdefault(copy.reserved_bytes, {})[copy.block] = copy
        self._note(copy, stuck=-1, evictable=1)

    def _make_unevictable(self, copy: Copy) -> None:
        del self._evictable[copy.block]
        of_size = self._evictable_of_size[copy.reserved_bytes]
        del of_size[copy.block]
        if not of_size:
            del self._evictable_of_size[copy.reserved_bytes]
        self._note(copy, stuck=1, evictable=-1)
        del self._namespaces[copy.block.namespace].evictable[copy.block]
        self._evictable_bytes -= copy.reserved_bytes

    def _note(self, copy: Copy, *, stuck: int, evictable: int = 0) -> None:
        """A copy more or less in a slab that is stuck, or can be evicted."""
        index = copy.offset // self.allocator.slab_bytes
        use = self._slabs.get(index)
        if use is None:
            use = self._slabs[index] = _SlabUse()
        use.stuck += stuck
        use.evictable += evictable
        if use.stuck == 0 and use.evictable:
            self._clear_slabs[index] = None
            return
        self._clear_slabs.pop(index, None)
        if use.stuck == 0:
            del self._slabs[index]

    def _pin_parent(self, block: BlockId, state: _Namespace) -> Copy | None:
        above = self._index.get(block)
        if above is not None:
            self.pin(above)
        elif state.policy.PREFIXES:
            return self.prefixes_elsewhere.pin(block, self)
        return above

    def _unpin_parent(self, above: Copy) -> None:
        if self._by_offset.get(above.offset) is above:
            self.unpin(above)
        else:
            self.prefixes_elsewhere.unpin(above)

    def _let_parent_go(self, copy: Copy) -> None:
        above, copy.waits_on = copy.waits_on, None
        assert above is not None
        self._unpin_parent(above)

    def _remove(self, copy: Copy, *, evicted: bool = False) -> None:
        """Out of the index, with what is of no use without it; the bytes go now, or with the last
        pin."""
        state = self._namespaces[copy.block.namespace]
        if state.policy.PREFIXES:
            for block in reversed(state.policy.descendants(copy.block)):
                self.counters.orphaned += 1
                self._remove_one(self._index[block], state, evicted=evicted)
                self.prefixes_elsewhere.left(block)
        self._remove_one(copy, state, evicted=evicted)
        if state.policy.PREFIXES:
            self.prefixes_elsewhere.left(copy.block)

    def _remove_one(self, copy: Copy, state: _Namespace, *, evicted: bool) -> None:
        self.elsewhere.withdraw((copy,))
        del self._index[copy.block]
        if state.ages:
            state.ages.pop(copy.block, None)
        if evicted:
            self.below.evicting(copy)
            self.counters.evictions += 1
            self.counters.evicted_bytes += copy.reserved_bytes
            self._gone[copy.block] = copy.digest if copy.home else 0
            state.policy.evicted(copy.block)
        else:
            state.policy.removed(copy.block)
        if copy.pins:
            copy.state = DOOMED
            return
        self._make_unevictable(copy)
        self._release_bytes(copy)

    def _release_bytes(self, copy: Copy) -> None:
        copy.state = DOOMED
        if copy.waits_on is not None:
            self._let_parent_go(copy)
        del self._by_offset[copy.offset]
        self._note(copy, stuck=-1)
        self.allocator.free(copy.offset)
        namespace = copy.block.namespace
        state = self._namespaces[namespace]
        state.used_bytes -= copy.reserved_bytes
        state.copies -= 1
        self._forget_if_empty(namespace, state)

    def _forget_if_empty(self, namespace: int, state: _Namespace) -> None:
        if state.copies == 0:
            self._namespaces.pop(namespace, None)
            self._note_kind(namespace, None)

    def _evict(self, copy: Copy) -> None:
        self._remove(copy, evicted=True)

    def _ask_policy(self, state: _Namespace, wanted_bytes: int) -> Copy | None:
        """What a namespace gives up: what its policy names, or, where that would be lost and not
        far behind it something lies below, that."""
        chosen = self._ask(state, wanted_bytes)
        if chosen is None or isinstance(self.below, _NothingBelow):
            return chosen
        if self.below.holds(chosen.block):
            return chosen
        below = self._ask(state, wanted_bytes, lambda copy: self.below.holds(copy.block), _CLEAN)
        return below or chosen

    def _ask(
        self,
        state: _Namespace,
        wanted_bytes: int,
        may: Callable[[Copy], bool] | None = None,
        most: int = _VICTIMS_TRIED,
    ) -> Copy | None:
        """What a namespace's policy gives up for an extent of so many bytes (0 = of any size), of
        those that `may` go; None where it names nothing, or nothing that could go."""
        # Where others share the arena, what is here now is all that fits.
        state.policy.capacity_bytes = max(1, state.used_bytes)

        evictable = state.evictable

        def look(block: BlockId) -> Verdict:
            copy = evictable.get(block)
            if copy is None:
                return Verdict.PINNED
            suits = self._frees(copy, wanted_bytes) and (may is None or may(copy))
            if suits and state.policy.PREFIXES:
                suits = not self.prefixes_elsewhere.keeps(block, self)
            return Verdict.GO if suits else Verdict.UNSUITABLE

        block = state.policy.choose(Search(look, most))
        if block is None:
            return None
        copy = evictable.get(block)
        if copy is None or not self._frees(copy, wanted_bytes):
            self.counters.policy_faults += 1
            return None
        return copy

    def _frees(self, copy: Copy, wanted_bytes: int) -> bool:
        """Whether evicting it, or its slab, makes room for an extent of that size."""
        if (self._prefixed or self._assured) and not self._can_go(copy):
            return False
        slab = copy.offset // self.allocator.slab_bytes
        if slab in self._passed_over:
            return False
        return wanted_bytes in (0, copy.reserved_bytes) or self._can_clear(slab)

    def _can_go(self, copy: Copy) -> bool:
        """Whether a copy can go now, and everything that goes with it."""
        state = self._prefixed.get(copy.block.namespace)
        if state is not None and any(
            b not in state.evictable for b in state.policy.descendants(copy.block)
        ):
            return False
        return not self._assured or self._can_spare((copy,))

    def _can_spare(self, copies: Iterable[Copy]) -> bool:
        """Whether all of these, with what goes with them, can go without that others take what is
        assured to somebody."""
        going: dict[int, dict[BlockId, int]] = {}
        for copy in copies:
            namespace = copy.block.namespace
            if namespace == self._room_for or namespace not in self._assured:
                continue
            of_it = going.setdefault(namespace, {})
            of_it[copy.block] = copy.reserved_bytes
            if (state := self._prefixed.get(namespace)) is not None:
                for block in state.policy.descendants(copy.block):
                    of_it[block] = self._index[block].reserved_bytes
        return all(
            self._namespaces[namespace].used_bytes - sum(of_it.values()) >= self._assured[namespace]
            for namespace, of_it in going.items()
        )

    def _payers(self) -> list[_Namespace]:
        """Those of which something can go, where shares are assured. Who wants the room is among
        them if it has more than its share, or nobody else has."""
        payers = [
            state
            for namespace, state in self._namespaces.items()
            if state.used_bytes > self._assured.get(namespace, 0)
        ]
        mine = self._namespaces.get(self._room_for) if self._room_for is not None else None
        return payers or ([mine] if mine is not None else [])

    def _of_who_pays(self, ask: Callable[[_Namespace], Copy | None]) -> Copy | None:
        """Of what those who pay give up when they are asked, the least recently used."""
        chosen = [copy for state in self._payers() if (copy := ask(state)) is not None]
        return min(chosen, key=lambda copy: copy.used_at, default=None)

    def _any_of_who_pays(self, wanted_bytes: int, most: int | None = None) -> Copy | None:
        """Something of theirs that makes room, of so many of each at `most`; or else of whoever
        wants the room."""
        states = self._payers()
        if self._room_for in self._namespaces:
            states.append(self._namespaces[self._room_for])
        return next(
            (
                copy
                for state in states
                for copy in itertools.islice(state.evictable.values(), most)
                if self._frees(copy, wanted_bytes)
            ),
            None,
        )

    def _can_clear(self, index: int) -> bool:
        """Whether all copies of a slab can go now."""
        if index not in self._clear_slabs:
            return False
        if not self._prefixed and not self._assured:
            return True
        offsets = self.allocator.neighbours(index * self.allocator.slab_bytes)
        copies = [self._by_offset[offset] for offset in offsets]
        return all(map(self._can_go, copies)) and self._can_spare(copies)

    def _respect_quota(self, namespace: int, state: _Namespace, more_bytes: int) -> None:
        quota = self.quota_of(namespace)
        if quota == 0:
            return
        if more_bytes > quota:
            self.counters.over_quota += 1
            raise QuotaError(f"{more_bytes} bytes exceed namespace {namespace}'s quota of {quota}")
        if namespace in self._shrinking:  # the rest goes by and by
            quota = max(quota, state.used_bytes)
        if state.used_bytes + more_bytes > quota:
            self.elsewhere.refresh()
        while state.used_bytes + more_bytes > quota:
            victim = self._victim_of(state)
            if victim is None:
                self.counters.over_quota += 1
                raise QuotaError(f"namespace {namespace}'s quota of {quota} bytes is all pinned")
            self._evict(victim)

    def _victim_of(self, state: _Namespace) -> Copy | None:
        """What a namespace gives up: its policy's choice, or else what could be evicted first."""
        return self._ask_policy(state, 0) or next(
            (copy for copy in state.evictable.values() if self._can_go(copy)), None
        )

    def _allocate(self, size_bytes: int) -> int:
        offset = self.allocator.allocate(size_bytes)
        if offset is not None:
            return offset
        self.elsewhere.refresh()
        offset = self.allocator.allocate(size_bytes, thorough=True)
        while offset is None and self._leaving:
            self._drop_some(next(iter(self._leaving)))
            offset = self.allocator.allocate(size_bytes, thorough=True)
        if offset is None and not self._room_can_be_made(size_bytes):
            raise self._no_room(size_bytes)
        while offset is None:
            more = self._make_room(self.allocator.extent_bytes(size_bytes))
            # The room may be there, if hard to find; or what was to go has been pinned elsewhere
            # since it was chosen.
            offset = self.allocator.allocate(size_bytes, thorough=True)
            if offset is None and not more:
                raise self._no_room(size_bytes)
        return offset

    def _no_room(self, size_bytes: int) -> NoRoomError:
        self.counters.no_room += 1
        return NoRoomError(
            f"no room for {size_bytes} bytes: {self.held_bytes} of "
            f"{self.allocator.capacity_bytes} bytes are pinned or being written"
        )

    def _room_can_be_made(self, size_bytes: int) -> bool:
        """Whether evicting can make room for an extent that does not fit now: O(1), but for what
        takes several slabs, where it is as many steps as there are slabs with something stuck, and
        where shares are assured: then some copies of each namespace are looked at."""
        slab_bytes = self.allocator.slab_bytes
        wanted_bytes = self.allocator.extent_bytes(size_bytes)
        if wanted_bytes <= slab_bytes and self._assured:
            return self._any_of_who_pays(wanted_bytes, _VICTIMS_TRIED) is not None
        if wanted_bytes <= slab_bytes:
            return bool(self._clear_slabs) or wanted_bytes in self._evictable_of_size
        return self._clear_run(wanted_bytes) is not None

    def _clear_run(self, wanted_bytes: int) -> int | None:
        """The first of so many bytes of whole slabs in which nothing is stuck."""
        slab_bytes = self.allocator.slab_bytes
        end = 0
        stuck = {i for i, use in self._slabs.items() if use.stuck}
        if self._assured:
            stuck.update(i for i in self._clear_slabs if not self._can_clear(i))
        for index in sorted(stuck | self.allocator.retired):
            if (index - end) * slab_bytes >= wanted_bytes:
                return end
            copy = self._by_offset.get(index * slab_bytes)
            taken = copy.reserved_bytes if copy is not None else 0
            end = index + max(1, -(-taken // slab_bytes))
        return end if (self.allocator.slab_count - end) * slab_bytes >= wanted_bytes else None

    def _make_room(self, wanted_bytes: int) -> bool:
        """Evict a copy of the size that is wanted, or as many as lie in the slabs that are needed;
        False where there is neither. Each call frees at least one copy, and looks at the slabs of
        some, so the work is O(1) amortised over the copies stored."""
        victim = self._choose(wanted_bytes)
        if victim is not None and victim.reserved_bytes == wanted_bytes:
            self._evict(victim)
            return True
        victims = self._unused_longest(victim, wanted_bytes) or self._anywhere(wanted_bytes)
        if not victims:
            return False
        self.elsewhere.withdraw(victims)
        for copy in victims:
            if self._index.get(copy.block) is copy:  # it did not go with an ancestor
                self._evict(copy)
        return True

    def _unused_longest(self, victim: Copy | None, wanted_bytes: int) -> list[Copy]:
        """What makes room together, around the first to go or one of those that would go next:
        where nothing has been used for the longest. So what was just put stays, though old copies
        lie in the same slab. Empty where nothing does."""
        victims: list[Copy] = []
        last_use = inf
        while victim is not None and victim.used_at < last_use:
            slab = victim.offset // self.allocator.slab_bytes
            if slab in self._passed_over or len(self._passed_over) == _SLABS_TRIED:
                break
            self._passed_over.add(slab)
            together = self._together_with(victim, wanted_bytes)
            used_at = max((copy.used_at for copy in together), default=inf)
            if used_at < last_use:
                victims, last_use = together, used_at
            victim = self._choose(wanted_bytes)
        self._passed_over.clear()
        return victims

    def _together_with(self, copy: Copy, wanted_bytes: int) -> list[Copy]:
        """What has to go where this copy lies to make room: it alone, if it has the size; else all
        copies of its slab, and, if several are needed, of slabs beside it, on the side that has
        been unused for longer. Empty where something is in the way."""
        if copy.reserved_bytes == wanted_bytes:
            return [copy]
        piece = self.allocator.piece(copy.offset // self.allocator.slab_bytes)
        together = self._if_it_can_go(piece)
        if piece is None or together is None:
            return []
        left, right = piece.start, piece.stop
        while (right - left) * self.allocator.slab_bytes < wanted_bytes:
            best: tuple[float, range, list[Copy]] | None = None
            for index in (left - 1, right):
                piece = self.allocator.piece(index)
                more = self._if_it_can_go(piece)
                if piece is None or more is None:
                    continue
                used_at = max((copy.used_at for copy in more), default=0.0)
                if best is None or used_at < best[0]:
                    best = used_at, piece, more
            if best is None:
                return []
            _, piece, more = best
            together += more
            left, right = min(left, piece.start), max(right, piece.stop)
        return together if not self._assured or self._can_spare(together) else []

    def _if_it_can_go(self, piece: range | None) -> list[Copy] | None:
        """The copies in some slabs (`Allocator.piece`), which may be free; None where one is
        stuck."""
        if piece is None:
            return None
        if piece.start not in self._slabs:
            return []
        if not self._can_clear(piece.start):
            return None
        offsets = self.allocator.neighbours(piece.start * self.allocator.slab_bytes)
        return [self._by_offset[offset] for offset in offsets]

    def _anywhere(self, wanted_bytes: int) -> list[Copy]:
        """What makes room together, wherever that is; empty where nothing does."""
        if wanted_bytes <= self.allocator.slab_bytes:
            index = next(filter(self._can_clear, self._clear_slabs), None)
        else:
            index = self._clear_run(wanted_bytes)
        together: list[Copy] = []
        slabs = -(-wanted_bytes // self.allocator.slab_bytes)
        while index is not None and slabs > 0:
            piece = self.allocator.piece(index)
            more = self._if_it_can_go(piece)
            if piece is None or more is None:
                return []
            together += more
            slabs -= len(piece)
            index = piece.stop
        return together if not self._assured or self._can_spare(together) else []

    def _choose(self, wanted_bytes: int) -> Copy | None:
        """The policy's choice of the namespace with the least recently used copy, or, where that
        has none, of the next; without any of theirs the least recently used that makes room, or
        else any of the size. Where shares are assured, all who can pay are asked."""
        if self._assured:
            return self._of_who_pays(
                lambda state: self._ask_policy(state, wanted_bytes)
            ) or self._any_of_who_pays(wanted_bytes)
        for copy in self._evictable.values():
            chosen = self._ask_policy(self._namespaces[copy.block.namespace], wanted_bytes)
            if chosen is not None:
                return chosen
            break
        asked = {copy.block.namespace} if self._evictable else set()
        fallback: Copy | None = None
        for copy in itertools.islice(self._evictable.values(), _VICTIMS_TRIED):
            namespace = copy.block.namespace
            if namespace not in asked and len(asked) < _NAMESPACES_ASKED:
                asked.add(namespace)
                chosen = self._ask_policy(self._namespaces[namespace], wanted_bytes)
                if chosen is not None:
                    return chosen
            if fallback is None and self._frees(copy, wanted_bytes):
                fallback = copy
        of_size = self._evictable_of_size.get(wanted_bytes)
        return fallback or next(filter(self._can_go, (of_size or {}).values()), None)

    def check(self) -> None:
        """Assert every invariant of the store and its allocator; for tests."""
        self.allocator.check()
        evictable = {b: c for b, c in self._index.items() if c.pins == 0}
        assert dict(self._evictable) == evictable
        assert sum(c.reserved_bytes for c in evictable.values()) == self._evictable_bytes
        assert {
            block: copy for some in self._evictable_of_size.values() for block, copy in some.items()
        } == evictable
        slabs: dict[int, _SlabUse] = {}
        for copy in self._by_offset.values():
            use = slabs.setdefault(copy.offset // self.allocator.slab_bytes, _SlabUse())
            if copy.state == COMMITTED and copy.pins == 0:
                use.evictable += 1
            else:
                use.stuck += 1
        assert slabs == self._slabs
        assert self._clear_slabs.keys() == {i for i, use in slabs.items() if not use.stuck}
        used: dict[int, int] = {}
        count: dict[int, int] = {}
        spans = sorted((c.offset, c.offset + c.reserved_bytes) for c in self._by_offset.values())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "copies overlap"
        for copy in self._by_offset.values():
            namespace = copy.block.namespace
            used[namespace] = used.get(namespace, 0) + copy.reserved_bytes
            count[namespace] = count.get(namespace, 0) + 1
            assert copy.size_bytes <= copy.reserved_bytes
            if copy.state == COMMITTED:
                assert self._index[copy.block] is copy
            elif copy.state == DOOMED:
                assert copy.pins > 0
                assert self._index.get(copy.block) is not copy
        assert set(used) == set(self._namespaces)
        for namespace, state in self._namespaces.items():
            assert state.used_bytes == used[namespace]
            assert state.copies == count[namespace]
            mine = {b: c for b, c in evictable.items() if b.namespace == namespace}
            assert state.evictable == mine
            self._check_policy(state, {b for b in self._index if b.namespace == namespace})
        assert sum(used.values()) == self.allocator.used_bytes
        assert all(self._leaving.values())

    def _check_policy(self, state: _Namespace, blocks: set[BlockId]) -> None:
        """A policy knows exactly the namespace's blocks, and what ages is here."""
        assert set(state.policy.blocks()) == blocks
        assert set(state.ages) == (blocks if state.ages_blocks else set())
        assert {(at, block) for block, at in state.ages.items()} <= set(state.by_age)
        for at in state.ages.values():
            assert at + state.rules.ttl_s > self._now, "a block has outlived its time"
        assert state.policy.expired() is None
