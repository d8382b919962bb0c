"""Further arenas between DRAM and the disk: what goes down, comes up, and is forgotten.

Oracle: what was put under each name. Files are simulated disks; the second tier reads the first
one's blocks as an agent does, from the same bytes.
"""

from __future__ import annotations

import contextlib
import random
from unittest import mock

import pytest
from dram import SIZE, Dram, block
from kvcast.hostagent.core.lower_tiers import put_below
from kvcast.hostagent.core.namespace_metrics import explained
from kvcast.hostagent.core.ssd import DAMAGED, HEAT_S, SsdRules, SsdTier
from kvcast.hostagent.core.store import Copy, NoRoomError, StoreRules
from kvcast.hostagent.flags import options_of, parse
from kvcast.hostagent.tiers.ssd.layout import Cut, cut_of, open_formatted, scan
from kvcast.hostagent.tiers.ssd.orders import Kind, Order
from kvcast.protocol.messages.wire import digest_of
from kvcast.simulation.disk import SimDisk
from seeds import seeds

UNIT, SLAB = 4096, 32 * 4096
RULES = SsdRules(0.75, 0.5)
NEAR, FAR = cut_of("node", 2 * SLAB, UNIT, SLAB), cut_of("node", 9 * SLAB, UNIT, SLAB)


class Bench(Dram):
    """DRAM of 16 blocks, a further arena of 32, and a disk of 256."""

    def __init__(self, disks: list[SimDisk] | None = None, far: Cut = FAR) -> None:
        super().__init__()
        self.disks = disks or [SimDisk(random.Random(n)) for n in (1, 2)]
        self.tiers: list[SsdTier] = []
        store, memory = self.store, self.memory
        for number, (disk, cut) in enumerate(zip(self.disks, (NEAR, far), strict=True)):
            formatted = open_formatted(disk, cut, 7 + number)
            tier = SsdTier(RULES, store, memory, [formatted], 1e9, "arena", f"arena{number + 1}")
            tier.meaning_of = lambda namespace: 70 + namespace
            if formatted.found:
                for piece in scan(disk, formatted):
                    tier.found(0, piece)
                tier.scanned()
            tier.begin()
            store, memory = tier.shelf, memoryview(disk._seen)[cut.blocks_offset :]
            self.tiers.append(tier)
        self.below = put_below(self.store, self.tiers)
        self.now = 0.0
        self.fails: set[int] = set()

    def work(self) -> None:
        waiting: list[tuple[int, Order]] = []
        while True:
            for number, tier in enumerate(self.tiers):
                waiting += [(number, order) for order in tier.take_orders(self.now)]
            if not waiting:
                break
            number, order = waiting.pop(0)
            fails = number in self.fails and order.kind is Kind.WRITE
            error, digest = ("an error", 0) if fails else self.disks[number].do(order)
            order.ended(self.now, error, digest)
        for tier in self.tiers:
            tier.check()
        self.store.check()

    def where(self, number: int, namespace: int = 1) -> str:
        """Where a block lies: in DRAM, in the near tier, in the far one."""
        name = block(number, namespace)
        found = "d" if self.store.known(name) is not None else ""
        return found + "".join("nf"[i] for i, tier in enumerate(self.tiers) if tier.holds(name))

    def read(self, number: int) -> str:
        """As gets do: from the first tier that has it."""
        name = block(number)
        tier = next((tier for tier in self.tiers if tier.holds(name)), None)
        if tier is None:
            return "not there"
        rooms: list[Copy] = []
        errors: list[str] = []

        def begin(size_bytes: int) -> memoryview | None:
            try:
                rooms.append(self.store.reserve(name, size_bytes))
            except NoRoomError:
                return None
            return self.memory[rooms[0].offset : rooms[0].offset + size_bytes]

        def ended(_now: float, error: str, digest: int, committed_at: float) -> None:
            errors.append(error)
            if error:
                for room in rooms:
                    self.store.abort(room)
                return
            room = rooms[0]
            assert bytes(self.memory[room.offset : room.offset + SIZE]) == bytes([number]) * SIZE
            tier.promoted(self.store.commit(room, digest, home=True, since=committed_at))

        assert tier.read(name, begin, ended)
        self.work()
        return errors[0]


def test_blocks_go_down_a_tier_at_a_time_and_each_comes_back_whole() -> None:
    bench = Bench()
    bench.fill(range(100))
    places = {number: bench.where(number) for number in range(100)}
    assert "" not in places.values()
    assert places[99] == "d"
    assert places[0] == "f"
    assert {place[-1] for place in places.values()} == {"d", "n", "f"}
    assert sorted(places, key=lambda n: "dnf".index(places[n][-1]), reverse=True) == sorted(places)
    near, far = (tier.values() for tier in bench.tiers)
    assert near["arena1_demotions_room_total"] > far["arena2_demotions_room_total"] > 0
    assert near["arena1_left_unwritten_total"] == far["arena2_left_unwritten_total"] == 0
    for number in range(100):
        if bench.where(number)[0] != "d":
            assert bench.read(number) == ""
    assert bench.tiers[0].counters.promotions > 0
    assert bench.tiers[1].counters.promotions > 0


def test_what_comes_up_from_any_of_them_is_behind_what_was_before_it_in_its_prefix() -> None:
    bench = Bench()
    for number in range(1, 60):
        parent = block(number - 1).key if number > 1 else b""
        copy = bench.store.reserve(block(number), SIZE, parent=parent, depth=number - 1)
        bench.memory[copy.offset : copy.offset + SIZE] = bytes([number]) * SIZE
        bench.store.commit(copy, digest_of(bytes([number]) * SIZE), home=True)
        bench.work()
    assert {bench.where(number)[-1] for number in range(1, 60)} == {"d", "n", "f"}
    for number in range(1, 60):
        if bench.where(number)[0] != "d":
            room = bench.store.reserve(block(number), SIZE)  # as a get does
            parent = block(number - 1).key if number > 1 else b""
            assert (room.parent, room.depth) == (parent, number - 1)
            bench.store.abort(room)


def test_one_filter_has_what_lies_in_any_of_them() -> None:
    bench = Bench()
    bench.fill(range(30))
    of_all = bench.below.counted()
    bench.fill(range(30, 100))
    for number in range(100):
        assert of_all.may_hold(block(number)) == bool(set(bench.where(number)) - {"d"})
    assert bench.read(0) == ""
    for number in range(100):
        bench.store.drop(block(number))
    bench.work()
    assert not any(of_all.memory)


def test_it_is_known_how_large_a_block_is_wherever_it_lies() -> None:
    bench = Bench()
    bench.fill(range(60))
    bench.put(60, b"short")
    bench.fill(range(61, 80))
    assert {bench.where(number)[-1] for number in range(80)} == {"d", "n", "f"}
    for number in range(80):
        below = bench.where(number) != "d"
        assert bench.below.size_of(block(number)) == below * (5 if number == 60 else SIZE)
    assert bench.where(60) != "d"


def test_what_is_read_once_from_the_far_tier_passes_and_what_comes_again_stays() -> None:
    bench = Bench()
    bench.fill(range(60))
    assert bench.where(0) == "f"
    bench.now += 1.0
    assert bench.read(0) == ""
    assert bench.where(0) == "df"
    bench.fill(range(60, 64))
    assert bench.where(0) == "f", "it has passed, and was not written again"
    assert bench.tiers[0].counters.passed == 1
    bench.now += HEAT_S / 2
    assert bench.read(0) == ""
    bench.fill(range(64, 68))
    assert bench.where(0)[0] == "d"
    bench.fill(range(68, 90))
    assert bench.where(0)[-2:] == "nf", "it is nearer than it was"


def test_every_tier_is_told_that_a_namespace_may_leave_by_and_by() -> None:
    bench = Bench()
    for at_once in (False, True):
        with contextlib.ExitStack() as stack:
            told = [
                stack.enter_context(mock.patch.object(tier.shelf, "drop_namespace"))
                for tier in bench.tiers
            ]
            bench.store.drop_namespace(1, at_once=at_once)
        assert [call.call_args.kwargs for call in told] == [{"at_once": at_once}] * 2


def test_what_is_dropped_is_gone_from_every_tier() -> None:
    bench = Bench()
    bench.fill(range(60))
    far, near = 0, next(n for n in range(60) if bench.where(n) == "n")
    for number in (far, near, 59):
        assert bench.store.drop(block(number))
        assert bench.where(number) == ""
        assert not bench.store.drop(block(number))
    bench.fill(range(30), namespace=2)
    bench.store.drop_namespace(1)
    bench.work()
    assert not any(bench.where(number) for number in range(60))
    assert all(bench.where(number, 2) for number in range(30))
    again = Bench(bench.disks)
    again.work()
    assert not any(again.where(number) for number in range(60))


def test_a_block_that_is_put_with_other_bytes_is_not_served_as_it_was_from_any_tier() -> None:
    bench = Bench()
    bench.fill(range(60))
    assert bench.where(0) == "f"
    bench.put(0, b"other" * 100)
    assert bench.where(0) == "d"
    assert bench.tiers[1].counters.superseded == 1


def test_both_tiers_are_found_again_by_the_next_process() -> None:
    bench = Bench()
    bench.fill(range(60))
    lay = {number: bench.where(number).replace("d", "") for number in range(60)}
    again = Bench(bench.disks)
    again.work()
    # What had just moved further down may be found in either, since both say the truth.
    for number, places in lay.items():
        assert set(places) <= set(again.where(number))
        if places:
            assert again.read(number) == ""


def test_damage_in_the_near_tier_is_found_out_in_the_far_one_too() -> None:
    bench = Bench()
    bench.fill(range(40))
    near = [n for n in range(40) if bench.where(n) == "n"]
    for number in near:
        copy = bench.tiers[0].shelf.known(block(number))
        assert copy is not None
        bench.disks[0]._seen[NEAR.blocks_offset + copy.offset] ^= 1
    assert bench.read(near[-1]) == DAMAGED
    bench.fill(range(100, 130))
    below = [n for n in near if "f" in bench.where(n)]
    assert below
    for number in below:
        if bench.where(number) == "f":
            assert bench.read(number) == DAMAGED
            assert bench.where(number) == ""


@pytest.mark.parametrize("which", [0, 1])
def test_a_tier_that_cannot_be_written_costs_blocks_and_no_put(which: int) -> None:
    bench = Bench()
    bench.fails = {which}
    for number in range(80):
        bench.put(number)
        bench.work()
        bench.now += 1.0
        for tier in (bench.store, *bench.tiers):
            tier.advance(bench.now)
    assert bench.tiers[which].counters.write_errors > 0
    assert bench.tiers[which].counters.left_unwritten > 0
    assert bench.where(79) == "d"
    reason = explained(bench.store.why_gone(block(0)))
    assert reason == ("evicted_dram" if which == 0 else "evicted_arena")


def test_time_to_live_is_over_in_every_tier() -> None:
    bench = Bench()
    rules = {1: StoreRules(ttl_s=100.0)}
    bench.store.configure(rules)
    for tier in bench.tiers:
        tier.configure(rules, set())
    bench.fill(range(60))
    bench.now = 101.0
    bench.store.advance(bench.now)
    bench.work()
    assert not any(bench.where(number) for number in range(60))
    assert bench.store.why_gone(block(0)) == "expired"


REQUIRED = ["--node-id=n", "--controller=127.0.0.1:1", "--ip=10.0.0.1", "--mac=02:00:00:00:00:01"]


def given(*words: str) -> tuple[tuple[str, int], ...]:
    flags = ["--transport", "udp", "--switch-port", "1", "--socket", "s", *words]
    try:
        return options_of(parse([*REQUIRED, *flags])).ssd.arenas
    except SystemExit:
        return (("refused", 0),)


def test_further_arenas_are_given_by_path_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    near, far = ("--further-arena", "/a=b=64m"), ("--further-arena", "/b=1g")
    assert given(*near, *far) == (("/a=b", 64 << 20), ("/b", 1 << 30))
    for wrong, why in (
        (("--further-arena", "/a"), "is not FILE=SIZE"),
        (("--further-arena", "=64m"), "is not FILE=SIZE"),
        (("--further-arena", "/a=1m"), "too few"),
        ((*near, *near), "names a file twice"),
        ((*far, "--ssd", "/b"), "names a file twice"),
        (tuple(w for n in range(10) for w in ("--further-arena", f"/{n}=64m")), "9 at most"),
    ):
        assert given(*wrong) == (("refused", 0),), wrong
        assert why in capsys.readouterr().err


def test_a_filter_tells_all_once_every_tier_knows_what_it_has() -> None:
    bench = Bench()
    assert not bench.below.is_counted, "nobody has asked for a filter"
    bench.below.counted()
    assert bench.below.is_counted
    with mock.patch.object(SsdTier, "is_ready", False):
        assert not bench.below.is_counted
        assert not bench.store.is_all_in_index


class Prefixes(Bench):
    """As `Bench`, with a disk of 64 blocks, in a namespace whose blocks are of prefixes: block n is
    behind n - 1, unless n is a multiple of LENGTH. Looks at all tiers after each event."""

    LENGTH = 12

    def __init__(self, ttl_s: float = 0.0) -> None:
        super().__init__(far=cut_of("node", 2 * SLAB, UNIT, SLAB))
        rules = {1: StoreRules(policy="value", ttl_s=ttl_s)}
        self.store.configure(rules)
        for tier in self.tiers:
            tier.configure(rules, set())
        self.before: set[int] = set()
        self.left = 0

    def put(self, number: int, data: bytes = b"", namespace: int = 1) -> Copy:
        data = data or bytes([number]) * SIZE
        depth = number % self.LENGTH
        parent = block(number - 1).key if depth else b""
        copy = self.store.reserve(block(number), len(data), parent=parent, depth=depth)
        self.memory[copy.offset : copy.offset + len(data)] = data
        return self.store.commit(copy, digest_of(data), home=True)

    def held(self) -> set[int]:
        return {number for number in range(256) if self.where(number)}

    def look(self) -> None:
        """No block has left this node but with all that were behind it."""
        self.now += 0.01
        self.store.advance(self.now)
        self.work()
        self.store.advance(self.now)
        held = self.held()
        for number in self.before - held:
            behind = number + 1
            self.left += 1
            assert not behind % self.LENGTH or behind not in held, (number, self.where(behind))
        self.before = held

    def lose(self, number: int) -> None:
        """Its bytes change on the disk."""
        for tier, disk in zip(self.tiers, self.disks, strict=True):
            copy = tier.shelf.known(block(number))
            if copy is not None:
                disk._seen[tier._files[0].formatted.cut.blocks_offset + copy.offset] ^= 1


@pytest.mark.parametrize("seed", seeds(6, quick=1))
def test_a_block_leaves_a_node_only_with_all_that_are_behind_it(seed: int) -> None:
    """Whatever makes it leave, and in whatever tiers they lie."""
    rng = random.Random(seed)
    bench = Prefixes(ttl_s=9.0 if seed % 2 else 0.0)
    for _ in range(900):
        prefix = rng.randrange(16) * bench.LENGTH
        number = prefix + rng.randrange(bench.LENGTH)
        with contextlib.suppress(NoRoomError):
            match rng.choices(("prefix", "block", "read", "drop", "lose"), (4, 4, 12, 1, 1))[0]:
                case "prefix":
                    for each in range(prefix, number + 1):
                        if bench.where(each) == "":
                            bench.put(each)
                            bench.look()
                case "block":
                    bench.put(number)
                case "read":
                    bench.read(number)
                case "drop":
                    bench.store.drop(block(number))
                case "lose":
                    bench.lose(number)
                    if bench.where(number)[:1] in ("n", "f"):
                        assert bench.read(number) == DAMAGED
        bench.look()
    stores = [bench.store, *(tier.shelf for tier in bench.tiers)]
    assert bench.left > 300
    assert sum(store.counters.orphaned for store in stores) > 50
