"""The cold tier: blocks of some namespaces lie in an object store, too.

Owns: which blocks are written there, which are known to be there, what is believed of an object
that comes back, and how much waits. Must not know: object stores or their addresses (an adapter
does the errands), or what a get does with a block (`reads`).

Only namespaces whose `media` name `cold` are kept here. A block that was committed at one of its
homes is written in the background, some at a time, as one object; what waits is bounded, and what
is beyond is left out and counted. A copy that has left DRAM before its turn is left out, too.
Where a namespace has a quota, `cold_share` says which node stores a block, and if there is room.
Blocks are asked for here when neither DRAM nor the disk has them, by whoever knows that they are
here: who wrote them, and who has listed at its start what lies under the namespaces' meanings.

An object is a head and the block's bytes. Its name says cluster, meaning and key; its head the
same again, with size, digest and time. What does not say what it should, or has not the digest that
it says, is not served, and is deleted.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvcast.hostagent.core.cold_known import KnownObjects
from kvcast.hostagent.core.cold_share import ColdShare
from kvcast.hostagent.core.store import COMMITTED, NO_ROOM, Copy, Store
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, BlockId, digest_of

HEAD: Final = struct.Struct("<8sQ16sQQd")
"""Magic, meaning, key, size, digest, when it was committed (seconds since 1970)."""
MAGIC: Final = b"kvcold\r\n"
AGAIN_S: Final = 10.0
"""After a listing or a deletion that failed, before the next try."""
DONE: Final = ""
GONE: Final = "not in the object store"
DAMAGED: Final = "not what was stored"


@dataclass(frozen=True)
class ColdRules:
    """How much is done at once."""

    max_errands: int = 8
    """Objects on their way, either way; and listings and deletions of all of a namespace, which may
    take long, up to half as many."""
    max_waiting: int = 4096
    """Blocks that wait to be written, and as many that wait to be read; more are left out."""
    max_known: int = 1 << 20
    """Blocks that are known to be there; those known for longest are forgotten first."""
    patience_s: float = 2.0
    """How long a read may take before the block is asked for elsewhere."""


@dataclass(slots=True)
class ColdCounters:
    """Totals since the start."""

    stored: int = 0
    stored_bytes: int = 0
    left_out: int = 0
    """Blocks that were not written: too many waited, or they had left DRAM."""
    left_out_quota: int = 0
    """Blocks that were not written since their namespace's quota had no room."""
    store_errors: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    fetch_errors: int = 0
    fetches_refused: int = 0
    damaged: int = 0
    """Objects that were not what their names said; nobody got them."""
    deleted: int = 0


class Errand(Enum):
    """What an adapter is to do with an object."""

    STORE = "store"
    FETCH = "fetch"
    DELETE = "delete"
    DELETE_ALL = "delete all"
    """Whatever has a name that begins so."""
    LIST = "list"
    """Tell of all whose names begin so, by `ColdTier.found`."""


@dataclass(slots=True, eq=False)
class Task:
    """One errand. `data`: what to store, head first; `ended(now, error, object)` is called once."""

    errand: Errand
    name: str
    ended: Callable[[float, str, memoryview | None], None]
    data: tuple[bytes, memoryview] | None = None


@dataclass(slots=True, eq=False)
class _Fetch:
    block: BlockId
    begin: Callable[[int], memoryview | None]
    ended: Callable[[float, str, int, float], None]


class ColdTier:
    """See the module's description. It is the store's `Beyond`. `take_tasks` is to be called after
    `wake`, and when `get_timer` says so."""

    tier: Final = "cold"
    is_shared: Final = True

    def __init__(
        self, rules: ColdRules, store: Store, memory: memoryview, cluster: str, epoch_s: float
    ) -> None:
        """`cluster`: only what was stored under this name is seen; `epoch_s`: what is to be added
        to the caller's clock to have seconds since 1970."""
        self.rules = rules
        self.counters = ColdCounters()
        self.wake: Callable[[], None] = lambda: None
        """Called when there are tasks to take: soon, but not at once."""
        self.meaning_of: Callable[[int], int | None] = lambda _namespace: None
        self._store = store
        self._memory = memory
        self._cluster = cluster
        self.epoch_s = epoch_s
        self._ttl_s: dict[int, float] = {}
        """Of the namespaces that are kept here; 0 = for ever."""
        self.shares: dict[int, ColdShare] = {}
        """Of those of them that have a quota."""
        self._known = KnownObjects(rules.max_known)
        self._buckets: frozenset[int] = frozenset()
        """Those whose first home this node is."""
        self._to_store: deque[tuple[Copy, int]] = deque()
        self._to_fetch: deque[_Fetch] = deque()
        self._others: deque[Task] = deque()
        self._long: deque[Task] = deque()
        """Listings, and deletions of all of a namespace,"""
        self._long_errands = 0
        """of which so many are under way."""
        self._listed: dict[str, int] = {}
        """Prefixes that were listed, and their namespaces."""
        self._again: dict[tuple[Errand, str], tuple[float, Task]] = {}
        """What has failed, and when it is tried again."""
        self._emptying: dict[str, Task] = {}
        """Prefixes under which everything is to go, and is not gone yet: what is listed there now
        was dropped."""
        self._unlisted: set[str] = set()
        """Those whose listing has not come to its end,"""
        self._dropped: set[BlockId] = set()
        """and blocks that were dropped meanwhile, which it may still name."""
        self._sending: dict[BlockId, int] = {}
        """Objects on their way there, and their sizes in bytes."""
        self._errands = 0
        self._now = 0.0

    @property
    def patience_s(self) -> float:
        """As `ColdRules`."""
        return self.rules.patience_s

    # --- the store's side ---------------------------------------------------------------------

    def holds(self, block: BlockId) -> bool:
        """Whether a block is known to be there, and may not have outlived its time."""
        since, ttl_s = self._known.since(block), self._ttl_s.get(block.namespace)
        if since is None or ttl_s is None:
            return False
        return not ttl_s or since + ttl_s > max(self._now, self._store.now)

    def committed(self, copy: Copy) -> None:
        """A copy was committed in DRAM: if it is a home's, it is stored."""
        block = copy.block
        if not copy.home or block.namespace not in self._ttl_s or block in self._known:
            return
        share = self.shares.get(block.namespace)
        if share is not None and not share.answers_for(block):
            return
        if self.stores_waiting >= self.rules.max_waiting:
            self.counters.left_out += 1
            return
        to_store = self._to_store if share is None or share.is_known else share.waiting
        to_store.append((copy, copy.digest))
        self.wake()

    @property
    def stores_waiting(self) -> int:
        """Blocks that wait to be written."""
        return len(self._to_store) + sum(len(share.waiting) for share in self.shares.values())

    def drop(self, block: BlockId) -> bool:
        """Forget a block; whether it was known."""
        known = self._known.remove(block)
        unlisted = self._prefix_of(block.namespace) in self._unlisted
        if unlisted and len(self._dropped) < self.rules.max_waiting:
            self._dropped.add(block)
        if known or block in self._dropped:
            self._delete(block)
        return known

    def drop_namespace(self, namespace: int, *, deleted: bool = True) -> None:
        """Forget all blocks of a namespace; and if it is `deleted`, delete them."""
        for block in [b for b in self._known if b.namespace == namespace]:
            self._known.remove(block)
        for prefix in [p for p, number in self._listed.items() if number == namespace]:
            del self._listed[prefix]
            self._unlisted.discard(prefix)
            for errand in (Errand.LIST, Errand.DELETE_ALL):
                self._again.pop((errand, prefix), None)
            if deleted:
                self._emptying[prefix] = self._empty_task(prefix)
                self._long.append(self._emptying[prefix])
        if share := self.shares.pop(namespace, None):
            self.counters.left_out += len(share.waiting)
        self.wake()

    def configure(
        self,
        ttl_s: Mapping[int, float],
        quotas: Mapping[int, int] | None = None,
        buckets: frozenset[int] = frozenset(),
    ) -> None:
        """State the namespaces that are kept here, and how long their blocks live; the `quotas` of
        those that have one, in bytes of all nodes together; and whose first home this node is."""
        self._ttl_s = dict(ttl_s)
        self._buckets = buckets
        quotas = quotas or {}
        for namespace in self.shares.keys() - quotas.keys():
            self._to_store.extend(self.shares.pop(namespace).waiting)
        listings = set()
        for namespace, quota_bytes in quotas.items():
            share = self.shares.get(namespace)
            if share is None:
                under_way = {b: n for b, n in self._sending.items() if b.namespace == namespace}
                share = self.shares[namespace] = ColdShare(self.rules.max_known, under_way)
            if share.configure(quota_bytes, buckets):
                listings.add(namespace)
        for namespace in self._ttl_s:
            prefix = self._prefix_of(namespace)
            if prefix is not None and (
                self._listed.get(prefix) != namespace or namespace in listings
            ):
                self._list(namespace, prefix)
        self.wake()

    def _list(self, namespace: int, prefix: str) -> None:
        self._listed[prefix] = namespace
        self._unlisted.add(prefix)
        if prefix not in self._emptying:
            self._long.append(self._list_task(prefix))

    def _list_task(self, prefix: str) -> Task:
        def share() -> ColdShare | None:
            return self.shares.get(self._listed.get(prefix, 0))

        def ended(now: float, error: str, data: memoryview | None) -> None:
            mine = share()
            if prefix in self._emptying:
                pass  # it is listed when that is done
            elif mine is not None and not mine.awaits(task):
                pass  # another has begun since, which will tell
            elif error and prefix in self._listed:
                self._try_again(now, self._list_task(prefix))
            elif not error:
                self._unlisted.discard(prefix)
                if not self._unlisted:
                    self._dropped.clear()
                if mine is not None:
                    mine.listed()
                    self._to_store.extend(mine.waiting)
                    mine.waiting.clear()
            self._long_errands -= 1
            self._other_ended(now, error, data)

        task = Task(Errand.LIST, prefix, ended)
        if (mine := share()) is not None:
            mine.begin_listing(task, self._now)
        return task

    def _empty_task(self, prefix: str) -> Task:
        def ended(now: float, error: str, data: memoryview | None) -> None:
            if self._emptying.get(prefix) is task:  # it was not dropped once more meanwhile
                if error not in (DONE, GONE):
                    self._try_again(now, task)
                else:
                    del self._emptying[prefix]
                    if prefix in self._listed:
                        self._long.append(self._list_task(prefix))
            self._long_errands -= 1
            self._other_ended(now, error, data)

        task = Task(Errand.DELETE_ALL, prefix, ended)
        return task

    def _delete_task(self, block: BlockId, name: str) -> Task:
        def ended(now: float, error: str, data: memoryview | None) -> None:
            share = self.shares.get(block.namespace)
            if share is not None and error in (DONE, GONE) and block not in self._known:
                share.gone(block)
            room = len(self._again) < self.rules.max_waiting
            if error not in (DONE, GONE) and block not in self._known and room:
                self._try_again(now, task)
            self._other_ended(now, error, data)

        task = Task(Errand.DELETE, name, ended)
        return task

    def _try_again(self, now: float, task: Task) -> None:
        self._again[task.errand, task.name] = now + AGAIN_S, task

    def advance(self, now: float) -> None:
        """It is `now`."""
        self._now = max(self._now, now)

    # --- names --------------------------------------------------------------------------------

    def _prefix_of(self, namespace: int) -> str | None:
        meaning = self.meaning_of(namespace)
        return None if meaning is None else f"{self._cluster}/{meaning:016x}/"

    def _name_of(self, block: BlockId) -> str | None:
        prefix = self._prefix_of(block.namespace)
        return None if prefix is None else f"{prefix}{block.key.hex()}"

    def found(self, prefix: str, objects: Iterable[tuple[str, int]]) -> None:
        """Objects that are there, and their sizes in bytes; names that are none of ours are passed
        over."""
        namespace = self._listed.get(prefix)
        if namespace is None or prefix in self._emptying:
            return
        share = self.shares.get(namespace)
        for name, size_bytes in objects:
            text = name.removeprefix(prefix)
            if len(text) == 32 and not set(text) - set("0123456789abcdef"):
                block = BlockId(namespace, bytes.fromhex(text))
                if block not in self._dropped and not self.holds(block):
                    self._known.add(block, self._now, size_bytes)
                if share is not None:
                    share.found(block, size_bytes)

    # --- errands ------------------------------------------------------------------------------

    def take_tasks(self, now: float) -> list[Task]:
        """What is to be done now."""
        self.advance(now)
        for which in [which for which, (at, _) in self._again.items() if at <= now]:
            _, failed = self._again.pop(which)
            (self._others if failed.errand is Errand.DELETE else self._long).append(failed)
        tasks: list[Task] = []
        while self._errands + len(tasks) < self.rules.max_errands:
            task = self._next()
            if task is None:
                break
            tasks.append(task)
        self._errands += len(tasks)
        return tasks

    def get_timer(self) -> float | None:
        """When `take_tasks` is to be called in any case; None = when something happens."""
        return min((at for at, _ in self._again.values()), default=None)

    def _next(self) -> Task | None:
        """Readers first; then what is to be forgotten; then what is to be stored."""
        while self._to_fetch:
            fetch = self._to_fetch.popleft()
            name = self._name_of(fetch.block)
            if name is not None and self.holds(fetch.block):
                return Task(Errand.FETCH, name, self._fetched_by(fetch))
            fetch.ended(self._now, GONE, 0, 0.0)
        if self._others:
            return self._others.popleft()
        if long := self._next_long():
            return long
        while self._to_store:
            copy, digest = self._to_store.popleft()
            name = self._name_of(copy.block)
            if name is None or copy.state != COMMITTED or copy.digest != digest:
                self.counters.left_out += 1
                continue
            share = self.shares.get(copy.block.namespace)
            if share is None or self._has_room(share, copy, digest):
                return self._store_task(copy, name)
        return self._next_long()  # a quota may have asked for a listing

    def _next_long(self) -> Task | None:
        if not self._long or self._long_errands >= max(1, self.rules.max_errands // 2):
            return None
        self._long_errands += 1
        return self._long.popleft()

    def _has_room(self, share: ColdShare, copy: Copy, digest: int) -> bool:
        """Whether a block may be written by its namespace's quota; it may have to wait for a
        listing to tell."""
        block = copy.block
        if not share.answers_for(block) or block in self._known:
            return False
        if share.is_known:
            if share.has_room(block, HEAD.size + copy.size_bytes):
                return True
            if not share.wants_listing(self._now):
                self.counters.left_out_quota += 1
                return False
            prefix = self._prefix_of(block.namespace)
            assert prefix is not None
            self._list(block.namespace, prefix)
        share.waiting.append((copy, digest))
        return False

    def _store_task(self, copy: Copy, name: str) -> Task:
        meaning = self.meaning_of(copy.block.namespace)
        assert meaning is not None
        head = HEAD.pack(
            *(MAGIC, meaning, copy.block.key, copy.size_bytes, copy.digest),
            copy.committed_at + self.epoch_s,
        )
        view = self._memory[copy.offset : copy.offset + copy.size_bytes]
        self._store.pin(copy)
        self._sending[copy.block] = size_bytes = HEAD.size + copy.size_bytes
        share = self.shares.get(copy.block.namespace)
        if share is not None:
            share.sending(copy.block, size_bytes)

        def ended(now: float, error: str, _data: memoryview | None) -> None:
            self._errand_ended(now)
            self._sending.pop(copy.block, None)
            share = self.shares.get(copy.block.namespace)  # there may be another by now
            if share is not None:
                share.sent(copy.block)
            view.release()
            dropped = copy.state != COMMITTED
            self._store.unpin(copy)
            if error:
                self.counters.store_errors += 1
                return
            self.counters.stored += 1
            self.counters.stored_bytes += copy.size_bytes
            if dropped:
                self._others.append(self._delete_task(copy.block, name))
            else:
                self._known.add(copy.block, copy.committed_at, size_bytes)
                self._again.pop((Errand.DELETE, name), None)

        return Task(Errand.STORE, name, ended, (head, view))

    def _delete(self, block: BlockId) -> None:
        name = self._name_of(block)
        if name is not None:
            self.counters.deleted += 1
            self._others.append(self._delete_task(block, name))
            self.wake()

    def _other_ended(self, now: float, error: str, _data: memoryview | None) -> None:
        self._errand_ended(now)
        self.counters.store_errors += error not in (DONE, GONE)

    def _errand_ended(self, now: float) -> None:
        self.advance(now)
        self._errands -= 1
        self.wake()

    # --- back ---------------------------------------------------------------------------------

    def read(
        self,
        block: BlockId,
        begin: Callable[[int], memoryview | None],
        ended: Callable[[float, str, int, float], None],
    ) -> bool:
        """As `SsdTier.read`."""
        if not self.holds(block):
            return False
        if len(self._to_fetch) >= self.rules.max_waiting:
            self.counters.fetches_refused += 1
            return False
        self._to_fetch.append(_Fetch(block, begin, ended))
        self.wake()
        return True

    def promoted(self, copy: Copy) -> None:
        """A block that was read is in DRAM now."""

    def _fetched_by(self, fetch: _Fetch) -> Callable[[float, str, memoryview | None], None]:
        def ended(now: float, error: str, data: memoryview | None) -> None:
            self._errand_ended(now)
            if error or data is None:
                self.counters.fetch_errors += 1
                if error == GONE:
                    self._known.remove(fetch.block)
                    if (share := self.shares.get(fetch.block.namespace)) is not None:
                        share.gone(fetch.block)
                fetch.ended(now, error or GONE, 0, 0.0)
                return
            if not self.holds(fetch.block):  # it was dropped meanwhile
                fetch.ended(now, GONE, 0, 0.0)
                return
            self._take(now, fetch, data)

        return ended

    def _take(self, now: float, fetch: _Fetch, data: memoryview) -> None:
        """An object has come: is it what it should be?"""
        block = fetch.block
        said = HEAD.unpack_from(data) if len(data) > HEAD.size else None
        body = data[HEAD.size :]
        right = (
            said is not None
            and said[:3] == (MAGIC, self.meaning_of(block.namespace), block.key)
            and said[3] == len(body) <= MAX_BLOCK_BYTES
            and digest_of(body) == said[4]
        )
        if said is None or not right:
            self.counters.damaged += 1
            self.drop(block)
            fetch.ended(now, DAMAGED, 0, 0.0)
            return
        since = said[5] - self.epoch_s
        if not since <= now:  # nor is it a number at all
            since = now
        ttl_s = self._ttl_s[block.namespace]
        if ttl_s and since + ttl_s <= now:
            self.drop(block)
            fetch.ended(now, GONE, 0, 0.0)
            return
        room = fetch.begin(len(body))
        if room is None:
            fetch.ended(now, NO_ROOM, 0, 0.0)
            return
        room[:] = body
        self.counters.fetched += 1
        self.counters.fetched_bytes += len(body)
        fetch.ended(now, DONE, said[4], since)

    def values(self) -> dict[str, float]:
        """Present values by name."""
        return {
            "cold_blocks_known": float(len(self._known)),
            "cold_bytes": float(self._known.bytes_in(self._buckets)),
            "cold_stores_waiting": float(self.stores_waiting),
            "cold_fetches_waiting": float(len(self._to_fetch)),
        }
