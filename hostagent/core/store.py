"""What blocks this node holds in DRAM: the index, pins, quotas and eviction.

Owns: every block's state (reserved, committed, doomed), who pins it, the namespaces' bytes, the
LRU order, and so the choice of a victim. Must not know: sockets, the wire, clocks, homes of
buckets (whoever commits a copy says whether it is a home's).

A copy is first **reserved** (bytes set aside, unseen by lookups), then **committed** (whole,
with its digest, immutable) or aborted. The first committed copy of a block wins: engines that
compute the same block get bytes that differ in the last bits, and whoever reads one copy must
not find another half way. Pins keep a copy's bytes where they are; a pinned copy that is dropped
is **doomed**: gone from the index at once, its bytes free when the last pin goes.

Others may find and pin committed copies by themselves (`PinnedElsewhere`). The store learns of such
pins before it looks for victims, and once more when it takes a copy away; one that was pinned in
between is doomed, and its bytes stay.

Eviction is least-recently-used over unpinned committed copies, of the namespace where its quota
is what lacks, else of all. Where the victim's slab is cut for another size, the slab's other
copies go with it, since one free slot of the wrong size helps nobody; so a slab in which anything
is pinned or being written is passed over. What cannot succeed evicts nothing: before the first
victim is chosen, it is known that some victims make the room (unless somebody pins them meanwhile).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, BlockId

RESERVED: Final = 0
COMMITTED: Final = 1
DOOMED: Final = 2

MAX_EVICTED_KNOWN: Final = 4096
"""Blocks of which this node was a home and evicted its copy, whose digests are remembered."""

_VICTIMS_TRIED: Final = 256
"""Candidates looked at, the least recently used first, for one that frees something; then it is one
of the right size, or a whole slab, however lately used."""


class StoreError(Exception):
    """A copy cannot be stored; each subclass says why."""


class NoRoomError(StoreError):
    """Everything that could be evicted is pinned, or the block exceeds the arena."""


class QuotaError(StoreError):
    """The namespace's quota is smaller than the block, or taken by pinned copies."""


class StaleReservationError(StoreError):
    """The namespace was dropped while the copy was being written; its bytes are given back."""


class Copy:
    """One copy of a block in the arena. `reserved_bytes` is what it takes, `size_bytes` what it
    is; `home` whether this node held it as one of the block's homes when it was committed; `cell`
    by which name others can pin it, 0 where they cannot."""

    __slots__ = (
        "block",
        "cell",
        "digest",
        "generation",
        "home",
        "offset",
        "pins",
        "reserved_bytes",
        "size_bytes",
        "state",
    )

    def __init__(
        self,
        block: BlockId,
        size_bytes: int,
        offset: int,
        reserved_bytes: int,
        generation: int,
    ) -> None:
        self.block = block
        self.size_bytes = size_bytes
        self.offset = offset
        self.reserved_bytes = reserved_bytes
        self.generation = generation
        self.cell = 0
        self.digest = 0
        self.home = False
        self.pins = 0
        self.state = RESERVED

    def __repr__(self) -> str:
        state = ("reserved", "committed", "doomed")[self.state]
        return f"<Copy {self.block} {self.size_bytes} B at {self.offset} {state} pins={self.pins}>"


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


class Recovery(Protocol):
    """What is still to be had of the copies that another agent has left in the arena."""

    def look(self, block: BlockId, copy: Copy | None) -> Copy | None:
        """The copy of a block, which the store has or has not, once its bytes are known to be
        right; None where there is none."""
        ...

    def finish(self) -> None:
        """Let the store have all copies that it has not yet."""
        ...


class _NobodyElse:
    """The store's copies are found through the store alone."""

    def publish(self, copy: Copy) -> None:
        pass

    def withdraw(self, copies: Iterable[Copy]) -> None:
        pass

    def refresh(self) -> None:
        pass


@dataclass(slots=True)
class _Namespace:
    """A namespace's unpinned copies in LRU order, and its bytes (reserved and doomed included)."""

    used_bytes: int = 0
    copies: int = 0
    evictable: OrderedDict[BlockId, Copy] = field(default_factory=OrderedDict)


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
    evictions: int = 0
    evicted_bytes: int = 0
    drops: int = 0
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
        self._evicted: BoundedMap[BlockId, int] = BoundedMap(MAX_EVICTED_KNOWN)
        self._generation = 0
        self._dropped_in: dict[int, int] = {}  # namespace to generation; one a namespace at most

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

    def namespace_bytes(self, namespace: int) -> int:
        """Bytes of arena that a namespace takes."""
        state = self._namespaces.get(namespace)
        return state.used_bytes if state is not None else 0

    def peek(self, block: BlockId) -> Copy | None:
        """The committed copy of a block, without touching the LRU order."""
        copy = self._index.get(block)
        return copy if self.recovery is None else self.recovery.look(block, copy)

    def lying_at(self, offset: int) -> Copy | None:
        """The copy, of whatever state, whose bytes begin there."""
        return self._by_offset.get(offset)

    def known(self, block: BlockId) -> Copy | None:
        """As `peek`, of what the store has by now, whether or not its bytes are right."""
        return self._index.get(block)

    def holds(self, namespace: int, keys: Iterable[bytes]) -> list[bool]:
        """Which blocks have a committed copy, without touching the LRU order."""
        if self.recovery is not None:
            return [self.peek(BlockId(namespace, key)) is not None for key in keys]
        # A pair is as good as a BlockId here, and quicker made.
        pairs = zip(itertools.repeat(namespace), keys, strict=False)
        return list(map(self._index.__contains__, pairs))

    def get(self, block: BlockId) -> Copy | None:
        """The committed copy of a block, now the most recently used."""
        copy = self.peek(block)
        if copy is not None and copy.pins == 0:
            self._evictable.move_to_end(block)
            self._namespaces[block.namespace].evictable.move_to_end(block)
        return copy

    def evicted_digest(self, block: BlockId) -> int:
        """The digest of the copy that was evicted here while this node was its home; 0 if that is
        not known."""
        return self._evicted.get(block, 0)

    def blocks(self) -> list[BlockId]:
        """All committed blocks, in no order."""
        return list(self._index)

    # --- a copy's life --------------------------------------------------------------------

    def reserve(self, block: BlockId, size_bytes: int) -> Copy:
        """Set bytes aside for a copy, evicting if need be; StoreError where that is not enough.

        Several reservations of one block may exist; the first to be committed wins.
        """
        if not 0 < size_bytes <= MAX_BLOCK_BYTES:
            raise NoRoomError(f"a block of {size_bytes} bytes is outside 1..{MAX_BLOCK_BYTES}")
        if self.recovery is not None:
            self.recovery.finish()  # until then nobody knows which bytes are free
        reserved_bytes = self.allocator.extent_bytes(size_bytes)
        state = self._namespaces.get(block.namespace)
        if state is None:
            state = self._namespaces[block.namespace] = _Namespace()
        try:
            self._respect_quota(block.namespace, state, reserved_bytes)
            offset = self._allocate(size_bytes)
        except StoreError:
            self._forget_if_empty(block.namespace, state)
            raise
        copy = Copy(block, size_bytes, offset, reserved_bytes, self._generation)
        self._by_offset[offset] = copy
        self._note(copy, stuck=1)
        # Evicting the namespace's last copy may have made it forget the namespace.
        state = self._namespaces.setdefault(block.namespace, state)
        state.used_bytes += reserved_bytes
        state.copies += 1
        return copy

    def commit(self, copy: Copy, digest: int, *, home: bool) -> Copy:
        """Make a reserved copy visible; returns the copy in force, which is an older one where
        the block was held already (the new one's bytes are then free again). Raises
        StaleReservationError where the namespace was dropped meanwhile."""
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
            return held
        copy.state = COMMITTED
        copy.digest = digest
        copy.home = home
        self._index[copy.block] = copy
        self._evicted.pop(copy.block, None)
        self._make_evictable(copy)
        self.counters.commits += 1
        self.elsewhere.publish(copy)
        return copy

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

    def drop(self, block: BlockId) -> bool:
        """Forget a block; whether it was held."""
        self._evicted.pop(block, None)
        copy = self.peek(block)
        if copy is None:
            return False
        self.counters.drops += 1
        self._remove(copy)
        return True

    def drop_namespace(self, namespace: int) -> int:
        """Forget every block of a namespace, and what is being written to it; how many blocks
        there were."""
        if self.recovery is not None:
            self.recovery.finish()
        self._generation += 1
        self._dropped_in[namespace] = self._generation
        for block in [block for block in self._evicted if block.namespace == namespace]:
            del self._evicted[block]
        gone = [copy for block, copy in self._index.items() if block.namespace == namespace]
        self.elsewhere.withdraw(gone)
        for copy in gone:
            self.drop(copy.block)
        return len(gone)

    # --- what another agent has left ------------------------------------------------------

    def adopt(
        self, block: BlockId, size_bytes: int, offset: int, state: int, digest: int = 0
    ) -> Copy | None:
        """Take over a copy whose bytes lie in the arena already: COMMITTED, or, for a client that
        has outlived its agent, RESERVED, or DOOMED and pinned once. None where that cannot be: no
        extent of ours lies there, it is another's, or the block is held."""
        if state == COMMITTED and block in self._index:
            return None
        if not self.allocator.claim(offset, size_bytes):
            return None
        reserved_bytes = self.allocator.extent_bytes(size_bytes)
        copy = Copy(block, size_bytes, offset, reserved_bytes, self._generation)
        self._by_offset[offset] = copy
        self._note(copy, stuck=1)
        used = self._namespaces.setdefault(block.namespace, _Namespace())
        used.used_bytes += reserved_bytes
        used.copies += 1
        copy.state = state
        copy.digest = digest
        if state == COMMITTED:
            self._index[block] = copy
            self._make_evictable(copy)
        elif state == DOOMED:
            copy.pins = 1
        return copy

    def give_up(self, copy: Copy) -> None:
        """A committed copy's bytes are wrong: nobody finds it any more."""
        assert copy.state == COMMITTED, copy
        self._remove(copy)

    # --- inside ---------------------------------------------------------------------------

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

    def _remove(self, copy: Copy) -> None:
        """Out of the index; the bytes go now, or with the last pin."""
        self.elsewhere.withdraw((copy,))
        del self._index[copy.block]
        if copy.pins:
            copy.state = DOOMED
            return
        self._make_unevictable(copy)
        self._release_bytes(copy)

    def _release_bytes(self, copy: Copy) -> None:
        copy.state = DOOMED
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

    def _evict(self, copy: Copy) -> None:
        self.counters.evictions += 1
        self.counters.evicted_bytes += copy.reserved_bytes
        if copy.home:
            self._evicted[copy.block] = copy.digest
        self._remove(copy)

    def _respect_quota(self, namespace: int, state: _Namespace, more_bytes: int) -> None:
        quota = self._quotas.get(namespace, self._default_quota)
        if quota == 0:
            return
        if more_bytes > quota:
            self.counters.over_quota += 1
            raise QuotaError(f"{more_bytes} bytes exceed namespace {namespace}'s quota of {quota}")
        if state.used_bytes + more_bytes > quota:
            self.elsewhere.refresh()
        while state.used_bytes + more_bytes > quota:
            if not state.evictable:
                self.counters.over_quota += 1
                raise QuotaError(f"namespace {namespace}'s quota of {quota} bytes is all pinned")
            self._evict(next(iter(state.evictable.values())))

    def _allocate(self, size_bytes: int) -> int:
        offset = self.allocator.allocate(size_bytes)
        if offset is not None:
            return offset
        self.elsewhere.refresh()
        offset = self.allocator.allocate(size_bytes)
        if offset is None and not self._room_can_be_made(size_bytes):
            raise self._no_room(size_bytes)
        while offset is None:
            more = self._make_room(self.allocator.extent_bytes(size_bytes))
            # Where there is nothing left to evict, the room is there, if hard to find; or what was
            # to go has been pinned elsewhere since it was chosen.
            offset = self.allocator.allocate(size_bytes, thorough=not more)
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
        takes several slabs, where it is as many steps as there are slabs with something stuck."""
        slab_bytes = self.allocator.slab_bytes
        wanted_bytes = self.allocator.extent_bytes(size_bytes)
        if wanted_bytes <= slab_bytes:
            return bool(self._clear_slabs) or wanted_bytes in self._evictable_of_size
        end = 0
        for index in sorted(i for i, use in self._slabs.items() if use.stuck):
            if (index - end) * slab_bytes >= wanted_bytes:
                return True
            copy = self._by_offset.get(index * slab_bytes)
            taken = copy.reserved_bytes if copy is not None else 0
            end = index + max(1, -(-taken // slab_bytes))
        return (self.allocator.slab_count - end) * slab_bytes >= wanted_bytes

    def _make_room(self, wanted_bytes: int) -> bool:
        """Evict a copy of the size that is wanted, or all copies of a slab; False where there is
        neither. Each call frees at least one copy, so the work is O(1) amortised over the copies
        stored."""
        slab_bytes = self.allocator.slab_bytes
        for victim in itertools.islice(self._evictable.values(), _VICTIMS_TRIED):
            if victim.reserved_bytes == wanted_bytes:
                self._evict(victim)
                return True
            index = victim.offset // slab_bytes
            if index in self._clear_slabs:
                self._clear_out(index)
                return True
        of_size = self._evictable_of_size.get(wanted_bytes)
        if of_size:
            self._evict(next(iter(of_size.values())))
        elif self._clear_slabs:
            self._clear_out(next(iter(self._clear_slabs)))
        else:
            return False
        return True

    def _clear_out(self, index: int) -> None:
        """Evict all copies of a slab in which nothing is stuck."""
        offsets = self.allocator.neighbours(index * self.allocator.slab_bytes)
        victims = [self._by_offset[offset] for offset in offsets]
        self.elsewhere.withdraw(victims)
        for victim in victims:
            self._evict(victim)

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
            assert dict(state.evictable) == mine
        assert sum(used.values()) == self.allocator.used_bytes
