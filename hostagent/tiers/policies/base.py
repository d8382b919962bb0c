"""What an eviction policy is: told what happens to a namespace's blocks, it says which one goes.

Owns: the interface, and the queue that most policies are made of. Must not know: the store, copies,
offsets, pins, quotas. A policy orders names with sizes; whoever asks it says of each block that it
proposes whether it may go (`Verdict`), and checks the answer. So no policy, however wrong, can
evict what is pinned or of another namespace; at worst it chooses badly.

What a policy hears, for one namespace:

| call | when |
|---|---|
| `advance` | time goes on; before anything else that happens then |
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

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
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
    """Blocks with sizes, the first to go first. Those that stand aside count, but are passed
    over."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Of all, those aside included."""
        self._order: OrderedDict[K, int] = OrderedDict()
        self._aside: dict[K, int] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._order or block in self._aside

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)

    def __iter__(self) -> Iterator[K]:
        """Those that do not stand aside, the first to go first."""
        return iter(self._order)

    @property
    def head(self) -> K | None:
        """The first to go of those that do not stand aside."""
        return next(iter(self._order), None)

    def push(self, block: K, size_bytes: int) -> None:
        """Add a block that is not in the queue: the last to go."""
        assert block not in self
        self._order[block] = size_bytes
        self.size_bytes += size_bytes

    def remove(self, block: K) -> int:
        """Take a block out; its size."""
        size_bytes = self._order.pop(block, None)
        if size_bytes is None:
            size_bytes = self._aside.pop(block)
        self.size_bytes -= size_bytes
        return size_bytes

    def pop(self) -> K:
        """Take out the first to go."""
        block, size_bytes = self._order.popitem(last=False)
        self.size_bytes -= size_bytes
        return block

    def to_end(self, block: K) -> None:
        """A block is the last to go now, wherever it was."""
        size_bytes = self._aside.pop(block, None)
        if size_bytes is None:
            self._order.move_to_end(block)
        else:
            self._order[block] = size_bytes

    def set_aside(self, block: K) -> None:
        """Pass this block over until `restore`."""
        self._aside[block] = self._order.pop(block)

    def restore(self, block: K) -> None:
        """A block that stood aside is the first to go again; others stay where they are."""
        size_bytes = self._aside.pop(block, None)
        if size_bytes is not None:
            self._order[block] = size_bytes
            self._order.move_to_end(block, last=False)

    def choose(self, search: Search[K]) -> K | None:
        """The first block that may go; those found pinned on the way stand aside from now on."""
        pinned: list[K] = []
        chosen = None
        for block in self._order:
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

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.now = 0.0

    def advance(self, now: float) -> None:
        """It is `now`, in seconds; never less than before."""
        self.now = max(self.now, now)

    def expected(self, block: K, size_bytes: int) -> None:
        """Room is needed for a block that is not held; it may never come."""

    def inserted(self, block: K, size_bytes: int, parent: K | None = None, depth: int = 0) -> None:
        """A block is held. `parent`: the block before it in its prefix, if that is held, too;
        `depth`: how many blocks are before it, 0 where that is not known."""
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

    def descendants(self, block: K) -> list[K]:
        """Held blocks that are of no use without this one, those nearest to it first."""
        return []


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
