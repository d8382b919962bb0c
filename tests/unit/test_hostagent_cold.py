"""The cold tier's decisions, against a store that does what a test says.

Oracle: what was put, and the bounds that the rules state.
"""

from __future__ import annotations

import math

from kvcast.hostagent.core.cold import (
    AGAIN_S,
    DAMAGED,
    DONE,
    GONE,
    HEAD,
    MAGIC,
    ColdRules,
    ColdTier,
    Errand,
    Task,
)
from kvcast.hostagent.core.store import Copy, Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages.wire import BUCKETS, BlockId, bucket_of, digest_of

ARENA = 1 << 20
PREFIX = f"cluster/{77:016x}/"


class Bench:
    def __init__(self, rules: ColdRules | None = None) -> None:
        self.memory = memoryview(bytearray(ARENA))
        self.store = Store(Allocator(ARENA, 65536))
        self.tier = ColdTier(rules or ColdRules(), self.store, self.memory, "cluster", epoch_s=1e9)
        self.tier.meaning_of = lambda namespace: 76 + namespace
        self.store.beyond = self.tier
        self.now = 0.0
        self.objects: dict[str, bytes] = {}
        self.listings_fail = False
        self.deletions_fail = False
        self.got: list[tuple[str, bytes]] = []

    def put(self, number: int, data: bytes = b"some bytes", namespace: int = 1) -> Copy:
        copy = self.store.reserve(block(number, namespace), len(data))
        self.memory[copy.offset : copy.offset + len(data)] = data
        return self.store.commit(copy, digest_of(data), home=True)

    def do(self, task: Task) -> None:
        error, data = DONE, None
        match task.errand:
            case Errand.STORE:
                assert task.data is not None
                self.objects[task.name] = b"".join(task.data)
            case Errand.FETCH:
                found = self.objects.get(task.name)
                error, data = (GONE, None) if found is None else (DONE, memoryview(found))
            case Errand.DELETE | Errand.DELETE_ALL if self.deletions_fail:
                error = "it does not answer"
            case Errand.DELETE:
                self.objects.pop(task.name, None)
            case Errand.DELETE_ALL:
                for name in [name for name in self.objects if name.startswith(task.name)]:
                    del self.objects[name]
            case Errand.LIST:
                if self.listings_fail:
                    error = "it does not answer"
                else:
                    self.tier.found(task.name, self.listed(task.name))
        task.ended(self.now, error, data)

    def listed(self, prefix: str) -> list[tuple[str, int]]:
        return [(name, len(data)) for name, data in self.objects.items() if name.startswith(prefix)]

    def work(self) -> list[Errand]:
        done = []
        while tasks := self.tier.take_tasks(self.now):
            for task in tasks:
                self.do(task)
                done.append(task.errand)
        return done

    def read(self, number: int) -> str:
        rooms: list[memoryview] = []
        errors: list[str] = []

        def begin(size_bytes: int) -> memoryview:
            rooms.append(memoryview(bytearray(size_bytes)))
            return rooms[0]

        def ended(_now: float, error: str, _digest: int, _since: float) -> None:
            errors.append(error)

        if not self.tier.read(block(number), begin, ended):
            return GONE
        self.work()
        if not errors[0]:
            self.got.append((name(number), bytes(rooms[0])))
        return errors[0]


def block(number: int, namespace: int = 1) -> BlockId:
    return BlockId(namespace, number.to_bytes(16, "big"))


def name(number: int) -> str:
    return f"{PREFIX}{block(number).key.hex()}"


def packed(number: int, data: bytes, meaning: int = 77, since: float = 1e9) -> bytes:
    head = HEAD.pack(MAGIC, meaning, block(number).key, len(data), digest_of(data), since)
    return head + data


def test_a_listing_that_fails_is_tried_again_later_and_not_for_a_namespace_that_went() -> None:
    bench = Bench()
    bench.objects[name(1)] = packed(1, b"from before")
    bench.listings_fail = True
    bench.tier.configure({1: 0.0, 2: 0.0})
    assert bench.work() == [Errand.LIST, Errand.LIST]
    assert bench.tier.get_timer() == AGAIN_S
    assert not bench.tier.holds(block(1))
    assert bench.work() == []
    bench.tier.drop_namespace(2)
    bench.work()
    bench.listings_fail = False
    bench.now = AGAIN_S
    assert bench.work() == [Errand.LIST]
    assert bench.tier.get_timer() is None
    assert bench.read(1) == DONE
    assert bench.got == [(name(1), b"from before")]


def test_what_is_dropped_while_the_store_is_listed_is_deleted_and_not_found() -> None:
    bench = Bench()
    for number in (1, 2):
        bench.objects[name(number)] = packed(number, b"from before")
    bench.tier.configure({1: 0.0})
    (listing,) = bench.tier.take_tasks(bench.now)
    names = bench.listed(listing.name)
    bench.store.drop(block(1))
    assert bench.work() == [Errand.DELETE]
    bench.tier.found(listing.name, names)
    listing.ended(bench.now, DONE, None)
    assert (bench.tier.holds(block(1)), bench.tier.holds(block(2))) == (False, True)
    assert list(bench.objects) == [name(2)]
    bench.store.drop(block(3))
    assert bench.work() == [], "there is no such object, as is known by now"


def test_what_could_not_be_deleted_is_deleted_later_and_not_if_it_is_stored_anew() -> None:
    bench = Bench()
    bench.tier.configure({1: 0.0})
    for number in (1, 2, 3):
        bench.put(number)
    bench.work()
    bench.deletions_fail = True
    for number in (1, 2):
        bench.store.drop(block(number))
    assert bench.work() == [Errand.DELETE] * 2
    assert bench.tier.get_timer() == AGAIN_S
    bench.put(2)
    assert bench.work() == [Errand.STORE]
    bench.deletions_fail = False
    bench.now = AGAIN_S
    assert bench.work() == [Errand.DELETE]
    assert sorted(bench.objects) == [name(2), name(3)]
    bench.deletions_fail = True
    bench.store.drop_namespace(1)
    assert bench.work() == [Errand.DELETE_ALL]
    bench.deletions_fail = False
    bench.now = 2 * AGAIN_S
    assert bench.work() == [Errand.DELETE_ALL]
    assert bench.objects == {}
    assert bench.tier.get_timer() is None


def test_a_namespace_that_is_made_again_is_listed_when_all_that_it_held_is_deleted() -> None:
    bench = Bench()
    bench.objects[name(1)] = packed(1, b"from before")
    bench.tier.configure({1: 0.0})
    (listing,) = bench.tier.take_tasks(bench.now)
    bench.tier.drop_namespace(1)
    bench.deletions_fail = True
    assert bench.work() == [Errand.DELETE_ALL]
    bench.tier.configure({1: 0.0})
    bench.tier.found(listing.name, bench.listed(listing.name))
    listing.ended(bench.now, DONE, None)
    assert bench.work() == []
    assert not bench.tier.holds(block(1)), "it was dropped"
    bench.deletions_fail = False
    bench.now = AGAIN_S
    (emptying,) = bench.tier.take_tasks(bench.now)
    bench.do(emptying)
    bench.objects[name(2)] = packed(2, b"of another node")
    bench.store.drop(block(2))
    bench.objects[name(3)] = packed(3, b"of another node")
    assert bench.work() == [Errand.DELETE, Errand.LIST]
    held = [bench.tier.holds(block(number)) for number in (1, 2, 3)]
    assert held == [False, False, True]
    assert list(bench.objects) == [name(3)]


def test_listings_that_take_long_hold_up_neither_readers_nor_what_is_stored() -> None:
    bench = Bench(ColdRules(max_errands=4))
    bench.tier.configure({1: 0.0, **dict.fromkeys(range(2, 10), 0.0)})
    listings = bench.tier.take_tasks(bench.now)
    assert [task.errand for task in listings] == [Errand.LIST] * 2
    bench.objects[name(1)] = packed(1, b"from before")
    bench.tier.found(PREFIX, [(name(1), 9)])
    bench.put(2)
    assert bench.tier.read(block(1), lambda size: memoryview(bytearray(size)), lambda *_: None)
    assert bench.work() == [Errand.FETCH, Errand.STORE]
    for listing in listings:
        bench.do(listing)
    assert bench.work() == [Errand.LIST] * 7


def test_what_a_store_gives_back_is_believed_if_it_says_what_it_should() -> None:
    bench = Bench()
    bench.tier.configure({1: 50.0})
    whole = packed(1, b"bytes")
    wrong = {
        "of another cluster's namespace": packed(1, b"bytes", meaning=78),
        "another block": packed(2, b"bytes"),
        "a bit is wrong": whole[:-1] + bytes([whole[-1] ^ 1]),
        "cut": whole[:-1],
        "longer": whole + b"?",
        "no head": b"bytes",
        "nothing": b"",
    }
    for number, (what, data) in enumerate(wrong.items(), start=1):
        bench.objects[name(1)] = data
        bench.tier.found(PREFIX, [(name(1), 9)])
        bench.work()
        bench.tier.found(PREFIX, [(name(1), 9)])
        assert bench.read(1) == DAMAGED, what
        assert bench.tier.counters.damaged == number
        assert name(1) not in bench.objects, "and is deleted"
        assert not bench.tier.holds(block(1))
    for since, error in ((1e9, DONE), (1e9 - 51, GONE), (1e18, DONE), (math.nan, DONE)):
        bench.objects[name(1)] = packed(1, b"bytes", since=since)
        bench.tier.found(PREFIX, [(name(1), 9)])
        assert bench.read(1) == error, since
    assert bench.got == [(name(1), b"bytes")] * 3


def test_what_has_outlived_its_time_does_not_count_as_held() -> None:
    bench = Bench()
    bench.objects[name(1)] = packed(1, b"from before")
    bench.tier.configure({1: 50.0, 2: 0.0})
    bench.put(2)
    bench.put(3, namespace=2)
    bench.work()
    blocks = [block(1), block(2), block(3, namespace=2)]
    bench.store.advance(49.0)
    assert [bench.tier.holds(each) for each in blocks] == [True, True, True]
    bench.tier.found(PREFIX, [(name(2), 100)])  # listed anew, it is no younger
    bench.store.advance(50.0)
    assert [bench.tier.holds(each) for each in blocks] == [False, False, True]
    assert bench.read(2) == GONE


def test_names_that_are_none_of_ours_are_passed_over() -> None:
    bench = Bench()
    bench.tier.configure({1: 0.0})
    bench.work()
    key = "0" * 32
    names = [f"{PREFIX}{key}x", f"{PREFIX}x", f"other/{key}", "", f"{PREFIX}{key}"]
    bench.tier.found(PREFIX, [(name, 9) for name in names])
    assert bench.tier.values()["cold_blocks_known"] == 1
    bench.tier.found("other/", [(f"other/{key}", 9)])
    assert bench.tier.values()["cold_blocks_known"] == 1


def test_what_nodes_say_that_they_have_there_adds_up_to_what_is_there() -> None:
    of_one = frozenset(range(BUCKETS // 2))
    shares = [of_one, frozenset(range(BUCKETS)) - of_one]
    here, there = benches = [Bench(), Bench()]
    there.objects = here.objects
    for bench, buckets in zip(benches, shares, strict=True):
        bench.tier.configure({1: 0.0}, {}, buckets)
        bench.work()

    def told() -> float:
        return sum(bench.tier.values()["cold_bytes"] for bench in benches)

    for number in range(9):
        data = bytes(100 + number)
        key = number << 64 | number  # one of either half's buckets
        next(
            bench for bench, buckets in zip(benches, shares, strict=True)
            if bucket_of(block(key).key) in buckets
        ).put(key, data)  # fmt: skip
    for bench in benches:
        bench.work()
    assert told() == sum(map(len, here.objects.values())) > 900
    # What another has stored is known, and counts once; so does what is stored again.
    listing = here.listed(PREFIX)
    for bench in benches:
        bench.tier.found(PREFIX, listing)
    assert here.tier.values()["cold_blocks_known"] == 9
    assert told() == sum(map(len, here.objects.values()))
    for bench, buckets in zip(benches, reversed(shares), strict=True):  # another map
        bench.tier.configure({1: 0.0}, {}, buckets)
        bench.work()
    assert told() == sum(map(len, here.objects.values()))
    for bench in benches:
        bench.tier.drop_namespace(1)
    assert told() == 0


def test_what_is_no_more_known_does_not_count() -> None:
    bench = Bench(ColdRules(max_known=4))
    bench.tier.configure({1: 0.0}, {}, frozenset(range(BUCKETS)))
    bench.work()
    bench.tier.found(PREFIX, [(name(number), 10 + number) for number in range(6)])
    assert bench.tier.values()["cold_bytes"] == 12 + 13 + 14 + 15
    bench.tier.drop(block(5))
    assert bench.read(4) == GONE
    assert bench.tier.values()["cold_bytes"] == 12 + 13


def test_what_waits_and_what_is_known_is_bounded() -> None:
    bench = Bench(ColdRules(max_errands=2, max_waiting=3, max_known=4))
    bench.tier.configure({1: 0.0})
    bench.work()
    for number in range(5):
        bench.put(number)
    assert bench.tier.counters.left_out == 2
    assert len(bench.tier.take_tasks(0.0)) == 2
    assert bench.tier.take_tasks(0.0) == []
    bench.tier.found(PREFIX, [(name(number), 9) for number in range(100, 110)])
    assert bench.tier.values()["cold_blocks_known"] == 4
    reads = [
        bench.tier.read(block(number), lambda _size: None, lambda *_: None)
        for number in range(106, 110)
    ]
    assert reads == [True, True, True, False]
    assert bench.tier.counters.fetches_refused == 1
