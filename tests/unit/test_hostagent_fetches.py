"""Which way a block takes to this node: the table, each way of it as gets take it, and the look
that gets take at themselves.

Oracle: the table itself (what it does not name must raise), which ways one node takes when it is
led there by hand, and states that were spoilt by hand. Cannot see: whether a way is a good one;
that is what the other tests of gets are for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from kvcast.hostagent.core import fetches
from kvcast.hostagent.core.fetches import Fetch, GetBatch, GetItem, Source, Way, WayEvent
from kvcast.hostagent.core.reads import FEW_FOLLOWERS
from kvcast.hostagent.core.store import Copy
from kvcast.protocol.links.bulk import UNREACHABLE, GetCall
from kvcast.protocol.messages import bulk, local
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.protocol.requester import ImpossibleEventError
from test_hostagent_core import Node, exchange, key, pool_map

MANY = range(1, FEW_FOLLOWERS + 3)
"""One block that probes, and more that follow it than are READ where the home lacks it."""


class Tier:
    """A tier below DRAM that has `held`; what is read there ends when the test says so."""

    tier = "ssd"
    patience_s = 0.3

    def __init__(self, *held: int, is_shared: bool = False) -> None:
        self.held = {BlockId(1, key(number)) for number in held}
        self.is_shared = is_shared
        self.asked = 0
        self.reads = True
        """Whether it takes a read; else it says so at once."""
        self.room_for: Callable[[BlockId], None] = lambda _block: None
        """Called when the room for a block is made."""
        self.begin: Callable[[int], memoryview | None] = lambda _size: None
        self.ended: Callable[[float, str, int, float], None] = lambda *_: None

    def holds(self, block: BlockId) -> bool:
        return block in self.held

    def read(
        self,
        block: BlockId,
        begin: Callable[[int], memoryview | None],
        ended: Callable[[float, str, int, float], None],
    ) -> bool:
        self.asked += 1
        self.room_for(block)
        self.begin, self.ended = begin, ended
        return self.reads

    def give(self, now: float, data: bytes) -> None:
        room = self.begin(len(data))
        assert room is not None
        room[:] = data
        self.ended(now, "", digest_of(data), 0.0)

    def promoted(self, copy: Copy) -> None:
        pass


class Scene:
    """Node 1, which reads, and node 2, a home; node 3 does not answer."""

    def __init__(self, homes: list[int] | None = None, *sources: Source) -> None:
        self.reader, self.home = (Node(n, slabs=32, lone_reads_by_tcp=True) for n in (1, 2))
        for node in (self.reader, self.home):
            node.take_map(pool_map(homes or [2]))
        self.reads = self.reader.core.reads
        self.reads.sources += sources

    def get(self, *numbers: int) -> tuple[GetBatch, list[GetItem]]:
        """Start a get; the list fills when it ends."""
        items: list[GetItem] = []

        def answered(batch: GetBatch) -> None:
            items.extend(item for item in batch.items if item is not None)

        keys = [key(number) for number in numbers]
        now = self.reader.now
        return self.reads.get(now, 1, keys, now + 5.0, answered), items

    def fetch(self, number: int) -> Fetch:
        self.reads.check()
        return self.reads._fetches[BlockId(1, key(number))]

    def calls(self) -> list[GetCall]:
        calls = [call for call in self.reader.calls() if isinstance(call, GetCall)]
        self.reads.check()
        return calls

    def wait(self, seconds: float) -> None:
        self.reader.now += seconds
        self.reader.core.handle_timer(self.reader.now)
        self.reads.check()

    def exchange(self) -> None:
        exchange(self.reader, self.home)
        self.reads.check()

    def convey(self) -> GetCall:
        """The first block's home lacks it, so that the others are asked for over the bulk link: the
        call for the last of them."""
        self.get(*MANY)
        self.exchange()
        assert self.fetch(MANY[-1]).way is Way.CONVEYED
        return self.calls()[-1]


# --- the table --------------------------------------------------------------------------------


def test_every_pair_leads_where_the_table_says_or_raises() -> None:
    refused = 0
    for way, event in itertools.product(Way, WayEvent):
        fetch = Fetch(BlockId(1, key(1)), 1.0, 0.0, way)
        if event in fetches.TRANSITIONS[way]:
            fetch.happen(event)
            assert fetch.way is fetches.TRANSITIONS[way][event]
        else:
            refused += 1
            with pytest.raises(ImpossibleEventError, match=f"is {way.name}: no {event.name}"):
                fetch.happen(event)
            assert fetch.way is way
    assert refused > len(Way)


def test_whatever_is_on_its_way_can_end_and_nothing_begins_twice() -> None:
    table = fetches.TRANSITIONS
    assert set(table) == set(Way)
    assert {way for way in Way if WayEvent.END in table[way]} == set(Way) - {Way.NEW, Way.ENDED}
    assert Way.NEW not in {after for row in table.values() for after in row.values()}
    assert not table[Way.ENDED]


# --- each way, as gets take it ----------------------------------------------------------------


def read() -> Iterator[Way]:
    scene = Scene()
    scene.home.hold(1, b"from its home")
    _, items = scene.get(1)
    yield scene.fetch(1).way
    scene.exchange()
    assert [scene.reader.bytes_of(item) for item in items] == [b"from its home"]
    yield Way.ENDED


def recall() -> Iterator[Way]:
    scene = Scene([1])
    kept: list[bool] = []
    scene.reads.keep(scene.reader.now, BlockId(1, key(1)), 0, 77, kept.append)
    yield scene.fetch(1).way
    scene.wait(0.1)
    assert kept == [False]
    yield Way.ENDED


def asked_of_a_disk(*further: Tier) -> tuple[Tier, Scene, list[GetItem]]:
    """A get of a block that lies on the disk, and may lie with its home."""
    disk = Tier(1)
    scene = Scene([2], disk, *further)
    _, items = scene.get(1)
    return disk, scene, items


def the_disk_gives_it() -> Iterator[Way]:
    disk, scene, _ = asked_of_a_disk()
    yield scene.fetch(1).way
    disk.give(scene.reader.now, b"from the disk")
    scene.reads.check()
    yield Way.ENDED


def the_disk_fails() -> Iterator[Way]:
    disk, scene, _ = asked_of_a_disk()
    yield scene.fetch(1).way
    disk.ended(scene.reader.now, "damaged", 0, 0.0)
    scene.reads.check()
    yield scene.fetch(1).way


def the_disk_is_slow_and_gives_it() -> Iterator[Way]:
    disk, scene, _ = asked_of_a_disk()
    yield scene.fetch(1).way
    scene.wait(0.4)
    yield scene.fetch(1).way
    disk.give(scene.reader.now, b"from the disk")
    scene.reads.check()
    yield Way.ENDED


def the_disk_is_slow_and_fails() -> Iterator[Way]:
    disk, scene, _ = asked_of_a_disk()
    yield scene.fetch(1).way
    scene.wait(0.4)
    yield scene.fetch(1).way
    disk.ended(scene.reader.now, "damaged", 0, 0.0)
    scene.reads.check()
    yield scene.fetch(1).way


def the_disk_is_slow_and_nobody_else_has_it() -> Iterator[Way]:
    disk, scene, items = asked_of_a_disk()
    yield scene.fetch(1).way
    scene.wait(0.4)
    yield scene.fetch(1).way
    scene.exchange()
    assert items == []
    yield scene.fetch(1).way
    disk.give(scene.reader.now, b"from the disk")
    scene.reads.check()
    assert [scene.reader.bytes_of(item) for item in items] == [b"from the disk"]
    yield Way.ENDED


def the_disk_is_slow_and_fails_and_only_a_store_has_it() -> Iterator[Way]:
    cold = Tier(1, is_shared=True)
    disk, scene, items = asked_of_a_disk(cold)
    yield scene.fetch(1).way
    scene.wait(0.4)
    yield scene.fetch(1).way
    scene.exchange()
    yield scene.fetch(1).way
    disk.ended(scene.reader.now, "damaged", 0, 0.0)
    yield scene.fetch(1).way
    scene.exchange()
    assert scene.fetch(1).way is Way.LAST
    cold.give(scene.reader.now, b"from the store")
    scene.reads.check()
    assert [scene.reader.bytes_of(item) for item in items] == [b"from the store"]
    yield Way.ENDED


def the_disk_is_slow_and_time_is_up() -> Iterator[Way]:
    disk, scene, items = asked_of_a_disk()
    yield scene.fetch(1).way
    scene.wait(0.4)
    yield scene.fetch(1).way
    scene.wait(60.0)
    assert [item.status for item in items] == [local.MISS]
    disk.ended(scene.reader.now, "too late", 0, 0.0)
    scene.reads.check()
    yield Way.ENDED


def no_home_has_it() -> Iterator[Way]:
    cold = Tier(1, is_shared=True)
    scene = Scene([2], cold)
    scene.get(1)
    scene.exchange()
    yield scene.fetch(1).way
    cold.ended(scene.reader.now, "gone", 0, 0.0)
    scene.reads.check()
    yield Way.ENDED


def it_is_given_up_while_it_follows() -> Iterator[Way]:
    scene = Scene()
    batch, _ = scene.get(1, 2)
    yield scene.fetch(2).way
    scene.reads.give_up(scene.reader.now, batch)
    scene.reads.check()
    yield Way.ENDED


def the_probe_is_a_miss() -> Iterator[Way]:
    scene = Scene()
    scene.get(1, 2)
    yield scene.fetch(2).way
    while scene.fetch(2).way is Way.FOLLOWING:
        for _, frame in scene.reader.frames():
            scene.home.core.receive(scene.home.now, 1, frame)
        for _, frame in scene.home.frames():
            scene.reader.core.receive(scene.reader.now, 2, frame)
        scene.reader.core.after_receiving(scene.reader.now)
    scene.reads.check()
    yield scene.fetch(2).way


def homes_lack_it_by_the_bulk_link() -> Iterator[Way]:
    scene = Scene([2])
    call = scene.convey()
    yield Way.FOLLOWING
    yield scene.fetch(MANY[-1]).way
    call.ended(scene.reader.now, bulk.NOT_FOUND)
    scene.reads.check()
    yield Way.ENDED


def the_next_home_is_asked_by_the_bulk_link() -> Iterator[Way]:
    scene = Scene([2])
    call = scene.convey()
    scene.reader.take_map(pool_map([2, 3], epoch=2))
    yield Way.FOLLOWING
    yield scene.fetch(MANY[-1]).way
    call.ended(scene.reader.now, bulk.NOT_FOUND)
    yield scene.fetch(MANY[-1]).way
    (call,) = scene.calls()
    assert call.node == 3
    call.ended(scene.reader.now, UNREACHABLE)
    scene.reads.check()
    yield scene.fetch(MANY[-1]).way


WALKS: list[Callable[[], Iterator[Way]]] = [
    read,
    recall,
    the_disk_gives_it,
    the_disk_fails,
    the_disk_is_slow_and_gives_it,
    the_disk_is_slow_and_fails,
    the_disk_is_slow_and_nobody_else_has_it,
    the_disk_is_slow_and_fails_and_only_a_store_has_it,
    the_disk_is_slow_and_time_is_up,
    no_home_has_it,
    it_is_given_up_while_it_follows,
    the_probe_is_a_miss,
    homes_lack_it_by_the_bulk_link,
    the_next_home_is_asked_by_the_bulk_link,
]
W = Way
WAYS: list[list[Way]] = [
    [W.READ, W.ENDED],
    [W.RECALLED, W.ENDED],
    [W.ON_DISK, W.ENDED],
    [W.ON_DISK, W.READ],
    [W.ON_DISK, W.RACING, W.ENDED],
    [W.ON_DISK, W.RACING, W.READ],
    [W.ON_DISK, W.RACING, W.ON_DISK, W.ENDED],
    [W.ON_DISK, W.RACING, W.ON_DISK, W.READ, W.ENDED],
    [W.ON_DISK, W.RACING, W.ENDED],
    [W.LAST, W.ENDED],
    [W.FOLLOWING, W.ENDED],
    [W.FOLLOWING, W.READ],
    [W.FOLLOWING, W.CONVEYED, W.ENDED],
    [W.FOLLOWING, W.CONVEYED, W.CONVEYED, W.READ],
]


@pytest.mark.parametrize(("walk", "ways"), list(zip(WALKS, WAYS, strict=True)))
def test_a_block_takes_its_way(walk: Callable[[], Iterator[Way]], ways: list[Way]) -> None:
    assert list(walk()) == ways


def test_the_table_names_these_steps_and_no_others() -> None:
    steps = {step for ways in WAYS for step in itertools.pairwise([Way.NEW, *ways])}
    named = {(way, to) for way, row in fetches.TRANSITIONS.items() for to in row.values()}
    assert named == steps


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_prefetched_is_asked_for_elsewhere_as_well_where_the_disk_does_not_give_it(
    fails: bool,
) -> None:
    disk = Tier(1)
    scene = Scene([2], disk)
    scene.home.hold(1, b"from its home")
    now = scene.reader.now
    assert scene.reads.prefetch(now, 1, [key(1)], now + 5.0) == 1
    if fails:
        disk.ended(now, "damaged", 0, 0.0)
    else:
        scene.wait(0.4)
    assert scene.fetch(1).way is (Way.READ if fails else Way.RACING)
    scene.exchange()
    assert scene.reads.waiting == 0
    copy = scene.reader.core.store.peek(BlockId(1, key(1)))
    assert copy is not None
    assert copy.digest == digest_of(b"from its home")


# --- what an event may bring about in between -------------------------------------------------


@pytest.mark.parametrize("how", ["get", "prefetch"])
def test_what_leaves_the_disk_before_it_is_read_is_asked_of_its_home(how: str) -> None:
    disk = Tier(1, 2)
    scene = Scene([2], disk)
    scene.home.hold(2, b"from its home")
    # Room for one copy is made by others' going down, and these send others away.
    disk.room_for = lambda _block: disk.held.discard(BlockId(1, key(2)))
    if how == "prefetch":
        scene.reads.prefetch(scene.reader.now, 1, [key(1), key(2)], scene.reader.now + 5.0)
    else:
        scene.get(1, 2)
    scene.reads.check()
    scene.exchange()
    assert scene.reader.core.store.peek(BlockId(1, key(2))) is not None
    disk.give(scene.reader.now, b"from the disk")
    assert scene.reads.waiting == 0


def test_another_node_may_wait_for_what_no_home_has_and_a_tier_gives() -> None:
    cold = Tier(1, is_shared=True)
    scene = Scene([2], cold)
    scene.get(1)
    scene.exchange()
    assert scene.fetch(1).way is Way.LAST
    told: list[str] = []
    assert scene.reads.recall(scene.reader.now, BlockId(1, key(1)), lambda: told.append("there"))
    assert scene.fetch(1).way is Way.LAST
    assert (cold.asked, told) == (1, [])
    cold.give(scene.reader.now, b"stored")
    assert told == ["there"]
    assert scene.reads.waiting == 0


def test_nothing_follows_a_probe_that_has_ended() -> None:
    disk = Tier(2)
    disk.reads = False
    scene = Scene([2], disk)
    # There is no time left, so the probe ends at once: as soon as the disk has refused the second.
    scene.reads.prefetch(scene.reader.now, 1, [key(1), key(2), key(3)], scene.reader.now)
    scene.reads.check()
    assert scene.reads.waiting == 0


# --- a look at oneself ------------------------------------------------------------------------


SPOILT: dict[str, tuple[Callable[[Scene], object], str]] = {
    "a number of the requester's": (lambda s: setattr(s.fetch(2), "fetch_id", 5), "number 5"),
    "no number": (lambda s: setattr(s.fetch(1), "fetch_id", -1), "number -1"),
    "another's number": (lambda s: setattr(s.fetch(1), "fetch_id", 999), "the requester's of"),
    "a fetch that is forgotten": (
        lambda s: s.reads._fetches.pop(BlockId(1, key(1))),
        "the requester reads more than",
    ),
    "a block under another's name": (
        lambda s: s.reads._fetches.update({BlockId(1, key(9)): s.fetch(2)}),
        "is kept as",
    ),
    "nobody to follow": (lambda s: s.fetch(1).followers.clear(), "do not follow one probe each"),
    "two to follow": (
        lambda s: s.fetch(1).followers.append(s.fetch(2)),
        "do not follow one probe each",
    ),
    "a follower that follows": (lambda s: s.fetch(2).followers.append(s.fetch(2)), "1 follow"),
    "a follower that probes": (lambda s: setattr(s.fetch(2), "home", 2), "probes home 2"),
    "no tier": (lambda s: setattr(s.fetch(3), "source", None), "tier of"),
    "a tier": (lambda s: setattr(s.fetch(2), "source", Tier()), "tier of"),
    "no way": (lambda s: setattr(s.fetch(2), "way", Way.NEW), "way of"),
    "the end": (lambda s: setattr(s.fetch(2), "way", Way.ENDED), "way of"),
    "another node that waits": (lambda s: s.fetch(1).recallers.append(print), "recallers of"),
    "a home that lacks it": (lambda s: setattr(s.fetch(3), "lacked_by", (2,)), "homes without"),
    "another's waiter": (
        lambda s: s.fetch(2).waiters.append((s.fetch(1).waiters[0][0], 0)),
        "waiter 0 of",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_cannot_be_is_seen(what: str) -> None:
    scene = Scene([2], Tier(3))
    scene.get(1, 2, 3)
    assert [scene.fetch(n).way for n in (1, 2, 3)] == [Way.READ, Way.FOLLOWING, Way.ON_DISK]
    scene.reads.check()
    spoil, match = SPOILT[what]
    spoil(scene)
    with pytest.raises(AssertionError, match=match):
        scene.reads.check()
