"""What an eviction policy is: told what happens to a namespace's blocks, it says which one goes.

Owns: the interface, and the queue that most policies are made of. Must not know: the store, copies,
offsets, pins, quotas. A policy orders names with sizes; whoever asks it says of each block that it
proposes whether it may go (`Verdict`), and checks the answer. So no policy, however wrong, can
evict what is pinned or of another namespace; at worst it chooses badly.

What a policy hears, for one namespace:

| call | when |
|---|---|
| `advance` | time goes on (`AGES`); before anything else that happens then |
| `expected` | room is needed for this block, which is not held |
| `choose` | a block must go: which? asked again until there is room; nothing is gone yet |
| `evicted` | this block went for want of room, whether the policy chose it or not |
| `inserted` | this block is held now |
| `hit` | it was used; `times` 0: the use before this one goes on (a block's further segments) |
| `credited` | the switch answered so many reads of it, which nobody here saw |
| `freed` | nobody pins it any more |
| `removed` | it is gone for another reason: dropped, expired |

Between `inserted` and `evicted` or `removed` a block is held, and only then is it hit, credited or
freed. A choice takes as many steps as there are blocks that must not go just now and stand in
front, but those found pinned stand aside until they are freed, and of others a search looks at 256.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from enum import Enum
from typing import ClassVar, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_CREDIT = 1 << 20
"""Uses that one credit counts for, at most."""


class Verdict(Enum):
    """What the asker says of a block that a policy would give up."""

    GO = "go"
    PINNED = "pinned"
    """Not before it is freed."""
    UNSUITABLE = "unsuitable"
    """Not this time: its room is of no use."""


class Search(Generic[K]):
    """One search for a victim. `look`: what the asker says of a block; `most`: how many unsuitable
    ones are looked at before the search is given up."""

    def __init__(self, look: Callable[[K], Verdict], most: int = 256) -> None:
        self._look = look
        self._left = most

    @property
    def given_up(self) -> bool:
        return self._left <= 0

    def verdict(self, block: K) -> Verdict:
        """Whether this block may go."""
        verdict = self._look(block)
        if verdict is Verdict.UNSUITABLE:
            self._left -= 1
        return verdict


class Queue(Generic[K]):
    """Blocks with sizes, the first to go first. Those that stand aside count, but are passed over;
    each keeps its place."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Of all, those aside included."""
        self._entries: dict[K, tuple[int, int]] = {}
        """Each block's place, which only grows along the queue, and its size."""
        self._order: OrderedDict[K, int] = OrderedDict()
        self._aside: set[K] = set()
        self._restored: list[int] = []
        """Places of those that stood aside and do not any more, ascending: they are not in
        `_order`, which takes new ones at its end alone. Few, since they are in front."""
        self._at_place: dict[int, K] = {}
        self._next_place = 0

    def __contains__(self, block: object) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """Those that do not stand aside, the first to go first."""
        restored = iter(self._restored)
        place = next(restored, None)
        for block, its_place in self._order.items():
            while place is not None and place < its_place:
                yield self._at_place[place]
                place = next(restored, None)
            yield block
        while place is not None:
            yield self._at_place[place]
            place = next(restored, None)

    def blocks(self) -> Collection[K]:
        """All, those aside included."""
        return self._entries.keys()

    @property
    def head(self) -> K | None:
        """The first to go of those that do not stand aside."""
        return next(iter(self), None)

    def push(self, block: K, size_bytes: int) -> None:
        """Add a block that is not in the queue: the last to go."""
        assert block not in self._entries
        self._entries[block] = self._next_place, size_bytes
        self._order[block] = self._next_place
        self._next_place += 1
        self.size_bytes += size_bytes

    def remove(self, block: K) -> int:
        """Take a block out; its size."""
        place, size_bytes = self._entries.pop(block)
        self.size_bytes -= size_bytes
        if self._order.pop(block, None) is None:
            if block in self._aside:
                self._aside.remove(block)
            else:
                del self._restored[bisect_left(self._restored, place)]
                del self._at_place[place]
        return size_bytes

    def pop(self) -> K:
        """Take out the first to go."""
        block = next(iter(self))
        self.remove(block)
        return block

    def to_end(self, block: K) -> None:
        """A block is the last to go now, wherever it was."""
        if block not in self._order:
            self.push(block, self.remove(block))
            return
        place = self._next_place
        self._next_place = place + 1
        self._entries[block] = place, self._entries[block][1]
        self._order[block] = place
        self._order.move_to_end(block)

    def set_aside(self, block: K) -> None:
        """Pass this block over until `restore`."""
        entry = self._entries[block]
        self.size_bytes += self.remove(block)
        self._entries[block] = entry
        self._aside.add(block)

    def restore(self, block: K) -> None:
        """A block that stood aside, or did not, is passed over no more."""
        if block in self._aside:
            self._aside.remove(block)
            place = self._entries[block][0]
            insort(self._restored, place)
            self._at_place[place] = block

    def choose(self, search: Search[K]) -> K | None:
        """The first block that may go; those found pinned on the way stand aside from now on."""
        pinned: list[K] = []
        chosen = None
        for block in self:
            verdict = search.verdict(block)
            if verdict is Verdict.PINNED:
                pinned.append(block)
            elif verdict is Verdict.GO:
                chosen = block
                break
            elif search.given_up:
                break
        for block in pinned:
            self.set_aside(block)
        return chosen


class Policy(Generic[K]):
    """One namespace's policy; see the module's description. `capacity_bytes`: what its blocks take
    together when there is no room for more, which the asker states anew when that changes."""

    NAME: ClassVar[str]
    AGES: ClassVar[bool] = False
    """Whether blocks outlive their time. Only such a policy needs to be told of time that
    passes."""
    PREFIXES: ClassVar[bool] = False
    """Whether it may name `descendants`."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.now = 0.0

    def advance(self, now: float) -> None:
        """It is `now`, in seconds; never less than before."""
        self.now = max(self.now, now)

    def expected(self, block: K, size_bytes: int) -> None:
        """Room is needed for a block that is not held; it may never come."""

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        """A block is held. `parent`: the block before it in its prefix, held or not, if that is
        known; `depth`: how many blocks are before it, 0 where that is not known."""
        raise NotImplementedError

    def hit(self, block: K, times: int = 1) -> None:
        """A held block was used."""
        raise NotImplementedError

    def credited(self, block: K, hits: int) -> None:
        """A held block was read in the switch."""
        self.hit(block, min(hits, MAX_CREDIT))

    def freed(self, block: K) -> None:
        """Nobody pins a held block any more."""
        raise NotImplementedError

    def removed(self, block: K) -> None:
        """A held block is gone, and not for want of room."""
        raise NotImplementedError

    def evicted(self, block: K) -> None:
        """A held block is gone for want of room."""
        self.removed(block)

    def choose(self, search: Search[K]) -> K | None:
        """A held block that may go; None = there is none among those looked at."""
        raise NotImplementedError

    def expired(self) -> K | None:
        """A held block that is not to be served any more; None = there is none."""
        return None

    def next_expiry(self) -> float | None:
        """When, in seconds, the next block will have expired; None = none will."""
        return None

    def blocks(self) -> Collection[K]:
        """All held blocks, for checks."""
        raise NotImplementedError

    def descendants(self, block: K) -> list[K]:
        """Held blocks that are of no use without this one, those nearest to it first."""
        return []

    def behind(self, block: K) -> Collection[K]:
        """Held blocks right behind this one, which is not held."""
        return ()


class QueuePolicy(Policy[K]):
    """Whatever keeps its blocks in one queue: what is inserted goes last."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.queue: Queue[K] = Queue()

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        self.queue.push(block, size_bytes)

    def hit(self, block: K, times: int = 1) -> None:
        pass

    def freed(self, block: K) -> None:
        self.queue.restore(block)

    def removed(self, block: K) -> None:
        self.queue.remove(block)

    def choose(self, search: Search[K]) -> K | None:
        return self.queue.choose(search)

    def blocks(self) -> Collection[K]:
        return self.queue.blocks()
