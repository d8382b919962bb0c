"""A block on its way here: which way it takes, and who waits for it.

Owns: what can happen to a fetch on which way (`TRANSITIONS`), and what must be true of it there
(`Fetch.check`). Must not know: why a fetch takes a way, or who carries the bytes (`reads`).

Two rules, as in `kvcast.protocol.requester.segment`. A fetch changes its way in `Fetch.happen` and
nowhere else. What the table does not name cannot happen: it raises, and the mistake is ours. A
fetch ends on its own way: ENDED tells no more which one that was.

| way | who knows of it | what moves it on |
|---|---|---|
| FOLLOWING | the probe, in its `followers` | what the probe shows, or its end |
| CONVEYED | the bulk link, by one call | the end of that call |
| READ, RECALLED | the requester, by `fetch_id` | its `Fetched` or `Missed` |
| ON_DISK, LAST | the tier `source` | the end of its read, or of our patience with it |
| RACING | both of these | whichever gives the block; what fails leaves it to the other |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from kvcast.hostagent.core.store import Copy
from kvcast.protocol.impossible import after
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.timers import Timer


class Way(IntEnum):
    """Which way a block takes."""

    NEW = 0
    """None yet."""
    FOLLOWING = 1
    """It waits for what the probe of its home shows."""
    CONVEYED = 2
    """A home is asked for it over the bulk link."""
    READ = 3
    """The requester reads it from its homes."""
    RECALLED = 4
    """Only a switch can have it: the requester asks for no longer than `recall_probe_s`, however
    long the waiters have."""
    ON_DISK = 5
    """It is read in a tier below this node's DRAM."""
    RACING = 6
    """That takes long, so the requester reads it from its homes as well."""
    LAST = 7
    """No home has given it, so it is read in a tier below: a store that all share, mostly."""
    ENDED = 8
    """It is not on its way any more."""


class WayEvent(IntEnum):
    """What can happen to a fetch."""

    FOLLOW = 0
    """A probe of its home is out already."""
    CONVEY = 1
    """A home is asked over the bulk link, the first one or the next."""
    ASK_HOMES = 2
    """The requester is to read it, and nothing else is waited for."""
    ASK_SWITCH = 3
    """The requester is to read it from a node that has it not, past a switch that may."""
    ASK_TIER = 4
    """A tier below holds it."""
    ASK_HOMES_TOO = 5
    """The tier takes long."""
    TIER_FAILED = 6
    """The tier has not given it, and others are being asked."""
    HOMES_LACK = 7
    """No home has given it, and the tier may still."""
    ASK_LAST_TIER = 8
    """A tier below holds it, and no home has given it."""
    END = 9
    """It is there, or nobody has given it, or nobody wants it."""


_W, _E = Way, WayEvent

TRANSITIONS: Final[dict[Way, dict[WayEvent, Way]]] = {
    _W.NEW: {
        _E.FOLLOW: _W.FOLLOWING,
        _E.ASK_HOMES: _W.READ,
        _E.ASK_SWITCH: _W.RECALLED,
        _E.ASK_TIER: _W.ON_DISK,
        _E.ASK_LAST_TIER: _W.LAST,
    },
    _W.FOLLOWING: {_E.CONVEY: _W.CONVEYED, _E.ASK_HOMES: _W.READ, _E.END: _W.ENDED},
    _W.CONVEYED: {_E.CONVEY: _W.CONVEYED, _E.ASK_HOMES: _W.READ, _E.END: _W.ENDED},
    _W.READ: {_E.END: _W.ENDED},
    _W.RECALLED: {_E.END: _W.ENDED},
    _W.ON_DISK: {_E.ASK_HOMES: _W.READ, _E.ASK_HOMES_TOO: _W.RACING, _E.END: _W.ENDED},
    _W.RACING: {_E.TIER_FAILED: _W.READ, _E.HOMES_LACK: _W.ON_DISK, _E.END: _W.ENDED},
    _W.LAST: {_E.END: _W.ENDED},
    _W.ENDED: {},
}

BY_REQUESTER: Final = frozenset({_W.READ, _W.RECALLED, _W.RACING})
"""The requester has a number for it."""
FROM_TIER: Final = frozenset({_W.ON_DISK, _W.RACING, _W.LAST})
"""A tier below is asked."""
ONLY_FROM_TIER: Final = FROM_TIER - BY_REQUESTER
"""Nobody else is."""


class Source(Protocol):
    """A tier below DRAM, as far as blocks are read from it."""

    @property
    def tier(self) -> str: ...

    @property
    def patience_s(self) -> float: ...

    @property
    def is_shared(self) -> bool:
        """Whether all nodes can read it: the object store."""
        ...

    def holds(self, block: BlockId) -> bool: ...

    def read(
        self,
        block: BlockId,
        begin: Callable[[int], memoryview | None],
        ended: Callable[[float, str, int, float], None],
    ) -> bool:
        """See `SsdTier.read`."""

    def promoted(self, copy: Copy) -> None: ...


class GetItem(NamedTuple):
    """How the get of one key ended. `copy` is pinned once, for whoever takes the batch."""

    status: str
    reason: str = ""
    tier: str = ""
    copy: Copy | None = None


class GetBatch(Timer):
    """Several gets with one deadline. `answered` is called once, when every item is known."""

    __slots__ = ("answered", "blocks", "deadline", "items", "left", "started_at")

    def __init__(
        self,
        blocks: list[BlockId],
        now: float,
        deadline: float,
        answered: Callable[[GetBatch], None],
    ) -> None:
        super().__init__()
        count = len(blocks)
        self.blocks = blocks
        self.items: list[GetItem | None] = [None] * count
        self.left = count
        self.started_at = now
        self.deadline = deadline
        self.answered = answered


@dataclass(slots=True, eq=False)
class Fetch:
    """A block on its way here, and who waits for it."""

    block: BlockId
    deadline: float
    started_at: float
    way: Way = Way.NEW
    fetch_id: int = -1
    """The requester's number of it; -1 = it has none."""
    waiters: list[tuple[GetBatch, int]] = field(default_factory=list)
    keeps: list[Callable[[bool], None]] = field(default_factory=list)
    followers: list[Fetch] = field(default_factory=list)
    """Fetches that wait for what this one's probe of their home shows; some may have ended."""
    home: int | None = None
    """The home that is probed."""
    recallers: list[Callable[[], None]] = field(default_factory=list)
    """Called when the disk has answered, or has taken too long."""
    source: Source | None = None
    """Which tier below was asked last; None = none yet."""
    for_later: bool = False
    """Whether it goes on though nobody waits for it."""
    lacked_by: tuple[int, ...] = ()
    """Homes that have said over the bulk link that they have not the block."""

    @property
    def is_on(self) -> bool:
        """Whether it has not ended yet."""
        return self.way is not Way.ENDED

    @property
    def is_for_us(self) -> bool:
        """Whether it is for this node itself, now or later, and not for another that asked."""
        return bool(self.waiters or self.keeps) or self.for_later

    def happen(self, event: WayEvent) -> None:
        """Go to where the table leads; ImpossibleEventError if it leads nowhere."""
        self.way = after(TRANSITIONS, self.way, event, self)

    def check(self) -> None:
        """That a fetch that is on its way agrees with itself."""
        way = self.way
        assert way not in (Way.NEW, Way.ENDED), f"way of {self}"
        assert (way in BY_REQUESTER) == (self.fetch_id >= 0), f"number {self.fetch_id} of {self}"
        if way is not Way.READ:  # a tier may have been asked before
            assert (way in FROM_TIER) == (self.source is not None), f"tier of {self}"
            assert self.home is None, f"{self} probes home {self.home}"
            assert not self.followers, f"{len(self.followers)} follow {self}"
        assert way in ONLY_FROM_TIER or not self.recallers, f"recallers of {self}"
        assert way in (Way.CONVEYED, Way.READ) or not self.lacked_by, f"homes without {self}"
        for batch, position in self.waiters:
            assert batch.blocks[position] == self.block, f"waiter {position} of {self}"

    def __repr__(self) -> str:
        block = f"{self.block.namespace}/{self.block.key.hex()}"
        return f"<fetch {self.fetch_id} of {block}: {self.way.name}>"


class Patience(Timer):
    """How long a fetch waits for the disk alone."""

    __slots__ = ("fetch",)

    def __init__(self, fetch: Fetch) -> None:
        super().__init__()
        self.fetch = fetch


class Probes:
    """The probes of one batch: by the home that each asks, and by all homes of its followers."""

    __slots__ = ("by_home", "by_homes")

    def __init__(self) -> None:
        self.by_home: dict[int, Fetch] = {}
        self.by_homes: dict[tuple[int, ...], Fetch] = {}
