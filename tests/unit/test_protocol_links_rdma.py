"""The RDMA link's two ends, and the choice between RDMA and TCP, without a network.

Oracle: bytes, outcomes, and the order in which things happen, written out here. The cards are the
simulation's, which move bytes between the two memories piece by piece, whatever the ends believe.
Cannot see: TLS, sockets, real cards (`tests/rdma` has them).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from kvcast.hostagent.core.metrics import Metrics
from kvcast.protocol.digests import Digested, digests_at_once
from kvcast.protocol.links import bulk_caller, call_queue, rdma_caller
from kvcast.protocol.links.bulk import (
    EVICTED,
    UNREACHABLE,
    UNWANTED,
    BulkCall,
    BulkOptions,
    ExistsCall,
    GetCall,
    PutCall,
)
from kvcast.protocol.links.bulk_caller import BulkCaller
from kvcast.protocol.links.cards import LinkCard
from kvcast.protocol.links.carriers import Carriers
from kvcast.protocol.links.grants import Grant, Grants
from kvcast.protocol.links.rdma import PairHolder, RdmaOptions
from kvcast.protocol.links.rdma_callee import RdmaCallee
from kvcast.protocol.links.rdma_caller import (
    Complete,
    Connect,
    Failed,
    RdmaCall,
    RdmaCaller,
    RdmaConnection,
)
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.bulk import BulkGet, BulkPut, PutHeader, WantedBlock
from kvcast.protocol.messages.control import NodeInfo
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.rdma import (
    MAX_RDMA_BLOCKS,
    MAX_RDMA_MESSAGE_BYTES,
    MAX_RDMA_REQUESTS,
    RDMA_PROTOCOL_VERSION,
    Endpoint,
    RdmaCalleeMessage,
    RdmaCallerMessage,
    RdmaFinished,
    RdmaGet,
    RdmaHello,
    RdmaPut,
    RdmaRefusal,
    RdmaTaken,
    RdmaWelcome,
    RdmaWindows,
    Window,
)
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.simulation.verbs import Fabric, SimulatedCard
from kvcast.simulation.world import World

OPTIONS = RdmaOptions(
    queue_per_peer=400,
    grant_wait_s=0.2,
    silence_s=0.5,
    idle_s=10.0,
    lease_s=3.0,
    connect_timeout_s=1.0,
)
NODE = NodeInfo(2, "node-2", "10.0.0.2", "02:00:00:00:00:02", 2, 20000, "host-2", 7000, 7001)
FOREIGN = 9
"""A namespace that the caller may not use."""
SIZE = 20_000
"""Three READs' worth."""


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data_of(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


@dataclass(frozen=True)
class Copy:
    """A block's bytes in one of the two memories."""

    block: BlockId
    view: memoryview
    digest: int

    @property
    def size_bytes(self) -> int:
        return len(self.view)


@dataclass
class Service:
    """The home. `out`: what it has given out and did not get back."""

    memory: memoryview
    held: dict[bytes, Copy] = field(default_factory=dict)
    out: list[bytes] = field(default_factory=list)
    aborted: list[bytes] = field(default_factory=list)
    forbidden: set[int] = field(default_factory=lambda: {FOREIGN})
    used: int = 0

    def room(self, size: int) -> memoryview:
        self.used += size
        return self.memory[self.used - size : self.used]

    def hold(self, number: int, data: bytes) -> Copy:
        view = self.room(len(data))
        view[:] = data
        copy = self.held[key(number)] = Copy(BlockId(1, key(number)), view, digest_of(data))
        return copy

    def view(self, copy: Copy) -> memoryview:
        return copy.view

    def refuse_put(self, _caller: str, put: BulkPut) -> str | None:
        return bulk.FORBIDDEN if put.namespace in self.forbidden else None

    def begin_put(self, put: BulkPut, block: PutHeader) -> Copy | str:
        if block.key in self.held:
            return bulk.HELD
        self.out.append(block.key)
        return Copy(BlockId(put.namespace, block.key), self.room(block.size_bytes), block.digest)

    def end_put(self, put: BulkPut, block: PutHeader, copy: Copy, digest: int) -> str:
        self.out.remove(block.key)
        if digest != block.digest:
            return bulk.WRONG_DIGEST
        self.held[block.key] = copy
        return bulk.DONE

    def abort_put(self, copy: Copy) -> None:
        self.out.remove(copy.block.key)
        self.aborted.append(copy.block.key)

    def refuse_get(self, _caller: str, get: BulkGet) -> str | None:
        return bulk.FORBIDDEN if get.namespace in self.forbidden else None

    def get(self, _caller: str, _namespace: int, block: WantedBlock) -> Copy | str:
        copy = self.held.get(block.key)
        if copy is None or block.digest not in (0, copy.digest):
            return bulk.NOT_FOUND
        self.out.append(block.key)
        return copy

    def end_get(self, copy: Copy) -> None:
        self.out.remove(copy.block.key)

    def drop(self, *_: object) -> bulk.BulkDone:
        raise AssertionError

    exists = drop  # type: ignore[assignment]


class Bench:
    """A caller and the callee that it finds. `distances`: of the caller's cards from its memory;
    each card meets one of its own at the home."""

    def __init__(
        self,
        options: RdmaOptions = OPTIONS,
        *distances: int,
        weights: dict[int, float] | None = None,
    ) -> None:
        self.world = World(1)
        fabric = Fabric(self.world)
        fabric.rate_bytes_per_s = 1e9
        self.options = options
        ours, theirs = memoryview(bytearray(8 << 20)), memoryview(bytearray(8 << 20))

        def deliver(action: Callable[[], None]) -> None:
            action()

        def cards(memory: memoryview) -> list[SimulatedCard]:
            return [SimulatedCard(fabric, memory, options, deliver) for _ in distances or range(1)]

        self.cards, self.home_cards = cards(ours), cards(theirs)
        self.card, self.home_card = self.cards[0], self.home_cards[0]
        self.link_cards = [
            LinkCard(self.card.max_transfer_bytes, f"card-{number}", distance)
            for number, distance in enumerate(distances or (10,))
        ]
        self.service = Service(theirs)
        self.memory = Service(ours)
        self.metrics, self.home_metrics = Metrics(), Metrics()
        self.caller = RdmaCaller(
            *("node-1", options, self.metrics, lambda copy: copy.view, self.link_cards),
            lambda namespace: (weights or {}).get(namespace, 1.0),
            self.make_digests,
        )
        self.digests_wait = False
        self.digests_waiting: list[Callable[[], None]] = []
        self.caller.use_nodes(0.0, {2: NODE})
        self.outcomes: dict[int, str] = {}
        self.failures: list[str] = []
        self.unreachable = False
        self.connects = 0
        self.grants = Grants(options.grant_bytes)
        self.pairs_open_at_ends: list[int] = []
        """How many pairs of ours were open when a call was told its end as unreachable."""
        self.links: list[tuple[RdmaConnection, PairHolder, RdmaCallee[Copy], PairHolder]] = []

    @property
    def now(self) -> float:
        return self.world.now

    # --- calls --------------------------------------------------------------------------------

    def get(
        self,
        number: int,
        namespace: int = 1,
        start: int = 0,
        deadline: float = 9.0,
        size: int = SIZE,
    ) -> memoryview:
        """Ask for a block; where its bytes will be."""
        room = self.memory.room(size)
        room[:start] = data_of(number, size)[:start]

        def begin(size_bytes: int, _digest: int) -> memoryview | None:
            return room if size_bytes == len(room) else None

        call = GetCall(
            2, BlockId(namespace, key(number)), 0, deadline, begin, self.ended(number), start
        )
        self.caller.ask(self.now, call)
        self.move()
        return room

    def put(self, number: int, namespace: int = 1, there: bool = True, digest: int = 0) -> None:
        view = self.memory.room(SIZE)
        view[:] = data_of(number)
        block = BlockId(namespace, key(number))
        copy = Copy(block, view, digest or digest_of(view))
        call = PutCall(2, copy, 1, 0, 9.0, lambda: there, self.ended(number))
        self.caller.ask(self.now, call)
        self.move()

    def make_digests(self, now: float, blocks: list[memoryview], then: Digested) -> None:
        if self.digests_wait:
            self.digests_waiting.append(lambda: digests_at_once(self.now, blocks, then))
        else:
            digests_at_once(now, blocks, then)

    def ended(self, number: int) -> Callable[[float, str], None]:
        def ended(_now: float, outcome: str) -> None:
            assert number not in self.outcomes, "told twice"
            self.outcomes[number] = outcome

        return ended

    # --- what moves ---------------------------------------------------------------------------

    def move(self) -> None:
        """Do what the ends want, and carry their bytes, until there is nothing."""
        while instructions := self.caller.instructions():
            for instruction in instructions:
                match instruction:
                    case Complete(call=call, outcome=outcome):
                        if outcome == UNREACHABLE:
                            self.pairs_open_at_ends.append(len(self.card.pairs))
                        call.ended(self.now, outcome)
                    case Failed(problem=problem):
                        self.failures.append(problem)
                    case Connect(connection=connection):
                        self.connect(connection)
                    case _:
                        self.carry()
            self.caller.check()

    def connect(self, connection: RdmaConnection) -> None:
        self.connects += 1
        if self.unreachable:
            connection.lost(self.now, "nobody is there")
            return
        callee = RdmaCallee(self.now, self.service, self.options, self.home_metrics, self.grants)
        callee.wake = lambda: self.world.after(0.0, self.settle)
        clock = lambda: self.now  # noqa: E731
        number = self.link_cards.index(connection.card)
        holder = PairHolder(connection, self.cards[number], clock, self.move)
        theirs = PairHolder(callee, self.home_cards[number], clock, self.settle)
        self.links.append((connection, holder, callee, theirs))
        connection.connected(self.now)

    def settle(self) -> None:
        self.carry()
        self.move()

    def carry(self) -> None:
        for connection, holder, callee, theirs in self.links:
            moved = True
            while moved:
                holder.carry_out()
                theirs.carry_out()
                moved = False
                if data := connection.bytes_to_send(self.now, 1 << 20):
                    callee.received(self.now, data)
                    moved = True
                theirs.carry_out()
                if data := callee.bytes_to_send(self.now, 1 << 20):
                    connection.received(self.now, data)
                    moved = True
                if callee.closed and not connection.closed:
                    connection.lost(self.now, "closed by the other side")
                    moved = True
                if connection.closed and not callee.closed:
                    callee.lost(self.now)
                    moved = True
                callee.check()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self.world.run(min(end, self.now + 0.05))
            for connection, _, callee, _ in self.links:
                for link in (connection, callee):
                    link.handle_timer(self.now)
            self.settle()


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- what works -----------------------------------------------------------------------------------


def test_a_block_is_read_into_its_place_and_given_back(bench: Bench) -> None:
    bench.service.hold(1, data_of(1))
    room = bench.get(1)
    bench.run(0.1)
    assert bench.outcomes == {1: bulk.DONE}
    assert bytes(room) == data_of(1)
    assert bench.service.out == []
    assert bench.metrics.rdma_bytes_read_total == SIZE


def test_what_is_there_already_is_not_read_again_but_counts_for_the_digest(bench: Bench) -> None:
    bench.service.hold(1, data_of(1))
    room = bench.get(1, start=12_345)
    bench.run(0.1)
    assert bench.outcomes == {1: bulk.DONE}
    assert bytes(room) == data_of(1)
    assert bench.metrics.rdma_bytes_read_total == SIZE - 12_345


def test_a_put_is_written_and_committed_after_its_window_is_closed(bench: Bench) -> None:
    bench.put(1)
    bench.run(0.1)
    assert bench.outcomes == {1: bulk.DONE}
    assert bytes(bench.service.held[key(1)].view) == data_of(1)
    (_, _, callee, _) = bench.links[0]
    assert [len(pair.windows) for pair in bench.home_card.pairs] == [0]
    assert callee.take_orders() == []


def test_many_calls_take_turns_on_one_pair_within_the_bounds(bench: Bench) -> None:
    count = MAX_RDMA_REQUESTS * MAX_RDMA_BLOCKS + 20
    for number in range(count):
        bench.service.hold(number, data_of(number, 1000))
    rooms = {}
    for number in range(count):
        rooms[number] = bench.get(number, size=1000)
    most = 0
    for _ in range(40):
        bench.run(0.01)
        most = max([most, *(len(pair.windows) for pair in bench.home_card.pairs)])
    assert set(bench.outcomes.values()) == {bulk.DONE}
    assert all(bytes(room) == data_of(number, 1000) for number, room in rooms.items())
    assert len(bench.links) == 1
    assert 1 < most <= MAX_RDMA_REQUESTS * MAX_RDMA_BLOCKS


def test_while_much_moves_blocks_are_asked_for_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all come, one request after the other; with little to move none waits for others."""
    count = 24
    for number in range(2 * count):
        bench.service.hold(number, data_of(number))
    requests = []
    for much_bytes in (1, 1 << 30):
        monkeypatch.setattr(rdma_caller, "_MUCH_BYTES", much_bytes)
        before = bench.home_metrics.rdma_requests_served_total
        ended, first = len(bench.outcomes), len(bench.outcomes)
        asked = first
        while ended < first + count:  # eight at once, and one more when one has ended
            while asked < first + count and asked - ended < 8:
                bench.get(asked)
                asked += 1
            bench.run(0.0001)
            ended = len(bench.outcomes)
            assert bench.now < 60.0, "somebody waits for ever"
        requests.append(bench.home_metrics.rdma_requests_served_total - before)
    assert set(bench.outcomes.values()) == {bulk.DONE}
    together, alone = requests
    assert together < alone * 2 / 3


def test_what_is_refused_ends_with_its_reason_and_the_pair_lives_on(bench: Bench) -> None:
    bench.service.hold(1, data_of(1))
    bench.service.hold(2, data_of(2))
    bench.put(2)
    bench.get(3)
    bench.get(4, namespace=FOREIGN)
    bench.put(5, namespace=FOREIGN)
    bench.put(6, there=False)
    bench.put(7, digest=5)
    room = bench.get(1)
    bench.service.hold(8, data_of(8))
    bench.get(8, size=SIZE + 1)  # there is no room for a block of its size
    bench.run(0.5)
    assert bench.outcomes == {
        1: bulk.DONE,
        2: bulk.HELD,
        3: bulk.NOT_FOUND,
        4: bulk.FORBIDDEN,
        5: bulk.FORBIDDEN,
        6: EVICTED,
        7: bulk.WRONG_DIGEST,
        8: bulk.NO_ROOM,
    }
    assert bytes(room) == data_of(1)
    assert len(bench.links) == 1
    assert bench.service.out == []


def test_an_idle_pair_is_closed_and_the_next_call_makes_another(bench: Bench) -> None:
    bench.service.hold(1, data_of(1))
    bench.service.hold(2, data_of(2))
    bench.get(1)
    bench.run(OPTIONS.idle_s / 2 + 0.5)
    assert (len(bench.card.pairs), len(bench.home_card.pairs)) == (0, 0)
    assert bench.failures == []
    bench.get(2, deadline=20.0)
    bench.run(0.1)
    assert bench.outcomes == {1: bulk.DONE, 2: bulk.DONE}


# --- what breaks ----------------------------------------------------------------------------------


def test_bytes_that_are_not_the_promised_ones_are_not_taken(bench: Bench) -> None:
    bench.service.hold(1, data_of(1)).view[777] ^= 4
    bench.get(1)
    bench.run(0.1)
    assert bench.outcomes == {1: bulk.WRONG_DIGEST}


@pytest.mark.parametrize("outcome", [bulk.DONE, bulk.WRONG_DIGEST])
@pytest.mark.parametrize("cards", [1, 2])
def test_a_get_ends_when_its_digest_is_known_whatever_becomes_of_its_pairs(
    cards: int, outcome: str, cut_small: None
) -> None:
    bench = ready(*[10] * cards)
    bench.digests_wait = True
    held = bench.service.hold(1, data_of(1, LARGE))
    held.view[777] ^= outcome == bulk.WRONG_DIGEST
    room = bench.get(1, size=LARGE)
    bench.run(0.1)
    assert len(bench.digests_waiting) == 1
    assert min(bytes_read(bench)) > 0
    assert bytes(room) == bytes(held.view)
    for number in range(cards):
        bench.cards[number].die()
    for connection, _, callee, _ in bench.links:
        callee.lost(bench.now)
        connection.lost(bench.now, "gone")
    bench.move()
    assert bench.outcomes == {}
    bench.digests_waiting.pop()()
    bench.move()
    assert bench.outcomes == {1: outcome}


def test_a_bit_that_flips_on_the_way_of_a_put_is_found_by_the_home(bench: Bench) -> None:
    bench.card.faults.flips = bench.home_card.faults.flips = 1.0
    bench.put(1)
    bench.run(0.1)
    assert bench.outcomes == {1: bulk.WRONG_DIGEST}
    assert bench.service.held == {}


def test_silence_ends_a_get_after_its_pair_is_closed(bench: Bench) -> None:
    bench.service.hold(1, data_of(1))
    bench.service.hold(2, data_of(2))
    bench.get(1)
    bench.run(0.1)
    bench.home_card.fabric.pairs.clear()  # nobody answers, and nobody says so
    bench.get(2)
    bench.run(OPTIONS.silence_s + 0.2)
    assert bench.outcomes == {1: bulk.DONE, 2: UNREACHABLE}
    assert bench.pairs_open_at_ends == [0], "the card might still have filled the room"
    assert bench.failures == ["silence"]
    assert bench.service.out == []


def test_a_window_that_is_gone_breaks_the_pair_and_ends_all_its_calls(bench: Bench) -> None:
    for number in range(3):
        bench.service.hold(number, data_of(number))
    bench.home_card.faults.lost_windows = 1.0
    for number in range(3):
        bench.get(number)
    bench.run(0.5)
    assert bench.outcomes == {0: UNREACHABLE, 1: UNREACHABLE, 2: UNREACHABLE}
    assert set(bench.pairs_open_at_ends) == {0}
    assert bench.metrics.rdma_pairs_broken_total == 1
    assert bench.service.out == []
    # With windows that last, a new pair works.
    bench.home_card.faults.lost_windows = 0.0
    bench.service.hold(9, data_of(9))
    bench.get(9)
    bench.run(0.5)
    assert bench.outcomes[9] == bulk.DONE
    assert len(bench.links) == 2


def test_a_put_whose_pair_breaks_is_aborted_at_the_home(bench: Bench) -> None:
    bench.home_card.faults.lost_windows = 1.0
    bench.put(1)
    bench.run(0.5)
    assert bench.outcomes == {1: UNREACHABLE}
    assert (bench.service.out, bench.service.aborted) == ([], [key(1)])
    assert bench.service.held == {}


def test_windows_that_cannot_be_opened_end_the_calls(bench: Bench) -> None:
    bench.service.hold(1, data_of(1))
    bench.home_card.faults.no_windows = 1.0
    bench.get(1)
    bench.run(0.2)
    assert bench.outcomes == {1: UNREACHABLE}
    assert bench.service.out == []


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_without_a_queue_pair_calls_end_at_once(whose: str) -> None:
    bench = Bench()
    (bench.card if whose == "ours" else bench.home_card).faults.gone = True
    bench.service.hold(1, data_of(1))
    bench.get(1)
    bench.run(0.01)
    assert bench.outcomes == {1: UNREACHABLE}
    assert (bench.metrics.rdma_refused_total, bench.home_metrics.rdma_refused_total) == (
        (1, 0) if whose == "ours" else (0, 1)
    )
    assert (len(bench.card.pairs), len(bench.home_card.pairs)) == (0, 0)


def test_a_deadline_ends_a_call_whatever_the_card_does(bench: Bench) -> None:
    bench.card.faults.late = 1.0
    bench.put(1)
    bench.service.hold(2, data_of(2))
    bench.get(2, deadline=0.2)
    bench.run(0.35)
    assert bench.outcomes[2] == UNREACHABLE
    assert set(bench.pairs_open_at_ends) == {0}


def test_windows_do_not_outlast_their_lease() -> None:
    bench = Bench(replace(OPTIONS, silence_s=60.0, lease_s=0.5))
    bench.service.hold(1, data_of(1))
    bench.card.faults.late = 1.0
    bench.get(1)
    bench.run(2.0)
    assert bench.outcomes == {1: UNREACHABLE}
    assert bench.service.out == []


def test_too_many_waiting_calls_end_at_once() -> None:
    bench = Bench(replace(OPTIONS, queue_per_peer=3))
    bench.home_card.faults.late = 1.0
    for number in range(MAX_RDMA_REQUESTS + 10):
        bench.service.hold(number, data_of(number, 10))
        bench.get(number, size=10)
    assert UNREACHABLE in bench.outcomes.values()
    bench.run(5.0)
    assert len(bench.outcomes) == MAX_RDMA_REQUESTS + 10


# --- several namespaces ---------------------------------------------------------------------------

MODEL, OTHER = 1, 2
"""Namespaces."""


class Asker:
    """One of a home's callers, played by hand."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.windows: dict[int, list[str]] = {}
        """The statuses that each request was answered with."""
        self.taken: list[int] = []
        self.callee = RdmaCallee(
            *(home.now, home.service, home.options, home.metrics, home.grants, None)
        )
        self.holder = PairHolder(self.callee, home.card, lambda: home.now, self.flush)
        self.callee.wake = self.flush
        self._codec = MessageCodec[RdmaCallerMessage](
            RdmaCallerMessage, max_message_bytes=MAX_RDMA_MESSAGE_BYTES
        )
        self._said = MessageCodec[RdmaCalleeMessage](
            RdmaCalleeMessage, max_message_bytes=MAX_RDMA_MESSAGE_BYTES
        )
        self.say(HELLO)

    def say(self, message: RdmaCallerMessage) -> None:
        self.callee.received(self.home.now, self._codec.encode(message))
        self.flush()

    def get(self, request: int, namespace: int, *numbers: int) -> None:
        """Ask for blocks, and wait for as long as windows take to be opened."""
        wanted = [WantedBlock(key(number)) for number in numbers]
        self.say(RdmaGet(request, namespace, wanted))
        self.home.run(0.001)

    def put(self, request: int, namespace: int, *numbers: int) -> None:
        headers = [PutHeader(key(number), SIZE, digest_of(data_of(number))) for number in numbers]
        self.say(RdmaPut(request, namespace, 1, 0, headers))
        self.home.run(0.001)

    def finish(self, request: int) -> None:
        """Say that all was moved, and wait for as long as windows take to be closed."""
        self.say(RdmaFinished(request))
        self.home.run(0.001)

    def lose(self) -> None:
        """The connection is gone; nobody has told the card yet."""
        self.callee.lost(self.home.now)

    def flush(self) -> None:
        """What a driver does after every event."""
        self.holder.carry_out()
        buffer = bytearray(self.callee.bytes_to_send(self.home.now, 1 << 20))
        while (message := self._said.take(buffer)) is not None:
            if isinstance(message, RdmaWindows):
                self.windows[message.request] = [window.status for window in message.windows]
            elif isinstance(message, RdmaTaken):
                self.taken.append(message.request)
        self.callee.check()


class Home:
    """A home, whose windows are opened for `SIZE` bytes at once, and a request more, while several
    namespaces want some. Block n has `SIZE` bytes."""

    def __init__(
        self,
        weights: dict[int, float] | None = None,
        wait_s: float = 0.4,
        lease_s: float = OPTIONS.lease_s,
    ) -> None:
        self.world = World(1)
        memory = memoryview(bytearray(8 << 20))
        self.options = replace(OPTIONS, grant_bytes=SIZE, grant_wait_s=wait_s, lease_s=lease_s)
        self.card = SimulatedCard(Fabric(self.world), memory, self.options, lambda act: act())
        self.service = Service(memory)
        for number in range(40):
            self.service.hold(number, data_of(number))
        self.metrics = Metrics()
        self.grants = Grants(SIZE, (weights or {MODEL: 1.0, OTHER: 1.0}).__getitem__)
        self.askers: list[Asker] = []

    @property
    def now(self) -> float:
        return self.world.now

    @property
    def open_windows(self) -> int:
        return sum(len(pair.windows) for pair in self.card.pairs)

    def asker(self) -> Asker:
        self.askers.append(Asker(self))
        return self.askers[-1]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.world.run(min(end, self.now + 0.05))
            for asker in self.askers:
                asker.callee.handle_timer(self.now)
                asker.flush()
        self.grants.check(sum(asker.callee.open_bytes for asker in self.askers))


DONE = [bulk.DONE]


def test_one_namespace_alone_has_as_many_windows_as_it_asks_for() -> None:
    home = Home()
    woken: list[None] = []
    for asker in (home.asker(), home.asker()):
        asker.callee.wake = lambda: woken.append(None)
        for request in range(MAX_RDMA_REQUESTS):
            asker.get(request, MODEL, request)
        assert list(asker.windows.values()) == [DONE] * MAX_RDMA_REQUESTS
    assert woken == [], "a driver was called in the middle of its own event"
    assert home.grants.open_bytes == 2 * MAX_RDMA_REQUESTS * SIZE
    assert home.metrics.rdma_requests_held_total == 0


@pytest.mark.parametrize("ask", [Asker.get, Asker.put])
def test_a_namespace_does_not_wait_for_what_another_has_open_but_that_one_does(
    ask: Callable[..., None],
) -> None:
    """On whichever connections."""
    home = Home()
    model, other = home.asker(), home.asker()
    new = 100 if ask is Asker.put else 0
    answer = [bulk.WANTED if new else bulk.DONE]
    for request in range(4):
        ask(model, request, MODEL, new + request)
    ask(other, 1, OTHER, new + 10)
    assert other.windows == {1: answer}
    ask(model, 4, MODEL, new + 4)
    assert 4 not in model.windows
    assert key(new + 4) not in home.service.out, "something was set aside for who waits"
    assert home.metrics.rdma_requests_held_total == 1
    other.finish(1)
    assert model.windows[4] == answer, "nobody is there any more who could want a share"
    assert home.metrics.rdma_requests_late_total == 0


def test_what_namespaces_are_granted_is_by_weight_whatever_their_requests_and_callers() -> None:
    """One asks for three blocks at a time on two connections, one for one on one, all the while."""
    weights = {MODEL: 1.0, OTHER: 3.0}
    home = Home(weights, wait_s=1000.0, lease_s=1000.0)
    plan = [(home.asker(), MODEL, 3), (home.asker(), MODEL, 3), (home.asker(), OTHER, 1)]
    granted = {MODEL: 0.0, OTHER: 0.0}
    seen: set[tuple[int, int]] = set()
    asked = [0, 0, 0]
    for turn in range(300):
        for place, (asker, namespace, blocks) in enumerate(plan):
            while len(asker.callee._requests) < MAX_RDMA_REQUESTS:
                asker.get(asked[place], namespace, *range(place * 10, place * 10 + blocks))
                asked[place] += 1
        if turn == 0:
            granted = {MODEL: 0.0, OTHER: 0.0}  # who came first was alone
        opened = [
            (place, request)
            for place, (asker, _, _) in enumerate(plan)
            for request in asker.windows
            if (place, request) not in seen
        ]
        seen.update(opened)
        for place, _ in opened if turn else []:
            _, namespace, blocks = plan[place]
            granted[namespace] += blocks * SIZE
        shares = [granted[namespace] / weights[namespace] for namespace in (MODEL, OTHER)]
        assert abs(shares[0] - shares[1]) <= 2 * 3 * SIZE  # one request, at both ends of the time
        for place, request in opened:
            plan[place][0].finish(request)
    assert granted[MODEL] > 20 * 3 * SIZE


def starved(home: Home) -> tuple[Asker, Asker]:
    """The other namespace's request 2 waits: it has a window, and the model's fill the bound."""
    model, other = home.asker(), home.asker()
    for request in range(3):
        model.get(request, MODEL, request)
    other.get(1, OTHER, 10)
    other.get(2, OTHER, 11)
    assert list(other.windows) == [1]
    return model, other


def test_who_waits_too_long_is_sent_another_way_and_keeps_what_it_has() -> None:
    home = Home()
    _, other = starved(home)
    home.run(0.3)
    assert list(other.windows) == [1]
    home.run(0.2)
    assert other.windows[2] == [UNREACHABLE]
    assert home.metrics.rdma_requests_late_total == 1
    assert len(home.grants) == 0
    other.finish(1)
    assert other.taken == [1]
    other.get(3, OTHER, 12)
    assert other.windows[3] == DONE


def test_a_lease_begins_with_the_windows() -> None:
    home = Home(lease_s=0.5)
    model, other = starved(home)
    home.run(0.3)
    for request in range(3):
        model.finish(request)
    other.finish(1)
    assert other.windows[2] == DONE
    home.run(0.4)
    assert not other.callee.closed, "its lease began when it asked"
    home.run(0.2)
    assert other.callee.closed
    assert home.grants.open_bytes == 0


def test_windows_that_take_long_to_open_are_not_late_for_a_turn_that_came_in_time() -> None:
    home = Home()
    model, other = starved(home)
    home.run(0.3)
    model.finish(0)
    model.finish(1)
    model.say(RdmaFinished(2))
    home.card.faults.late = 1.0  # from what begins next on
    home.run(0.3)
    assert 2 not in other.windows
    assert not other.callee.closed
    home.run(0.3)
    assert other.windows[2] == DONE


def test_a_connection_that_ends_does_not_wait_and_lets_others_go_on() -> None:
    home = Home()
    model, other = home.asker(), home.asker()
    for request in range(2):
        model.get(request, MODEL, request)
    other.get(1, OTHER, 10)
    model.get(2, MODEL, 2)
    other.get(2, OTHER, 11)
    assert len(home.grants) == 2
    other.lose()
    assert len(home.grants) == 1, "who is gone waits"
    assert home.grants.open_bytes == 3 * SIZE, "its window is not closed yet"
    assert 2 not in model.windows
    other.flush()
    home.run(0.001)
    assert model.windows[2] == DONE
    assert key(11) not in home.service.out


def test_what_was_granted_counts_until_its_window_is_closed() -> None:
    home = Home()
    model, other = starved(home)
    for request in range(3):
        model.say(RdmaFinished(request))
    other.say(RdmaFinished(1))
    assert home.open_windows == 4
    assert home.grants.open_bytes == 4 * SIZE
    assert len(home.grants) == 1
    home.run(0.001)
    assert home.open_windows == 1
    assert other.windows[2] == DONE


def test_a_namespace_that_is_deleted_meanwhile_gets_nothing_and_holds_nobody_up() -> None:
    home = Home()
    model, other = starved(home)
    home.service.forbidden.add(OTHER)
    model.get(3, MODEL, 3)
    assert 3 not in model.windows
    for request in range(3):
        model.finish(request)
    other.finish(1)
    assert other.windows[2] == [bulk.FORBIDDEN]
    assert key(11) not in home.service.out
    assert model.windows[3] == DONE


def test_who_waits_for_windows_cannot_be_finished_with_them() -> None:
    home = Home()
    _, other = starved(home)
    other.say(RdmaFinished(2))
    assert other.callee.closed
    assert home.metrics.rdma_protocol_errors_total == 1


def test_a_call_that_waits_too_long_ends_as_unreachable_and_its_pair_lives_on(
    bench: Bench,
) -> None:
    """So TCP makes it, and RDMA the next one."""
    open_for_ever = Grant(OTHER, lambda _now: 2 * bench.options.grant_bytes, lambda: None)
    bench.grants.ask(0.0, open_for_ever)
    bench.grants.ask(0.0, Grant(1, lambda _now: 1, lambda: None))
    bench.service.hold(1, data_of(1))
    bench.get(1)
    bench.run(0.1)
    assert bench.outcomes == {}
    bench.run(OPTIONS.silence_s / 2)
    assert bench.outcomes == {1: UNREACHABLE}
    assert bench.failures == []
    bench.grants.end(bench.now, open_for_ever)
    bench.service.hold(2, data_of(2))
    bench.get(2)
    bench.run(0.1)
    assert bench.outcomes[2] == bulk.DONE
    assert len(bench.links) == 1


# --- several namespaces at a caller ---------------------------------------------------------------


def ask_for(
    bench: Bench, namespace: int, numbers: Sequence[int], size: int = SIZE, **wishes: Any
) -> None:
    """Gets of blocks, which the home has, all at once, of a namespace."""
    calls = []
    for number in numbers:
        bench.service.hold(number, data_of(number, size))
        room = bench.memory.room(size)
        begin = lambda _size, _digest, room=room: room  # noqa: E731
        block = BlockId(namespace, key(number))
        call = GetCall(2, block, 0, bench.now + 9.0, begin, bench.ended(number), **wishes)
        calls.append(call)
    bench.caller.ask(bench.now, *calls)
    bench.move()


def few_posted(weights: dict[int, float] | None = None) -> Bench:
    """A caller whose card has eight READs at once, with a pair that stands; the queue is long."""
    bench = Bench(replace(OPTIONS, posted=8), weights=weights)
    bench.home_card.fabric.rate_bytes_per_s = 1e8
    ask_for(bench, MODEL, [999])
    bench.run(0.1)
    assert bench.outcomes.pop(999) == bulk.DONE
    return bench


def test_a_tenant_that_asks_for_much_by_rdma_does_not_keep_another_waiting() -> None:
    """Neither for its calls that wait, nor for those whose windows are open."""
    bench = few_posted()
    ask_for(bench, MODEL, range(120))
    while not bench.outcomes:
        bench.run(0.0001)
    before = len(bench.outcomes)
    ask_for(bench, OTHER, [500])
    bench.run(0.5)
    assert set(bench.outcomes.values()) == {bulk.DONE}
    assert len(bench.outcomes) == 121
    assert list(bench.outcomes).index(500) < before + 20, "it waited behind what was not posted"


def test_what_tenants_get_by_rdma_from_one_home_is_by_weight() -> None:
    bench = few_posted({MODEL: 1.0, OTHER: 3.0})
    ask_for(bench, MODEL, range(80))
    ask_for(bench, OTHER, range(100, 180))
    bench.run(1.0)
    assert set(bench.outcomes.values()) == {bulk.DONE}
    order = [MODEL if number < 100 else OTHER for number in bench.outcomes]
    assert len(order) == 160
    beside = order[8 : 8 + 80]  # what was posted before both were there is the first one's
    assert 2.3 <= beside.count(OTHER) / beside.count(MODEL) <= 3.7


def test_a_get_by_rdma_costs_its_namespace_what_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody knows that when it is asked for: blocks of one are twenty times as large."""
    monkeypatch.setattr(call_queue, "PRESUMED_BYTES", 1000)
    monkeypatch.setattr(rdma_caller, "MAX_RDMA_BLOCKS", 1)
    bench = few_posted()
    ask_for(bench, MODEL, range(60))
    ask_for(bench, OTHER, range(100, 160), size=1000)
    bench.run(1.0)
    assert set(bench.outcomes.values()) == {bulk.DONE}
    order = list(bench.outcomes)
    large = [number for number in order[: order.index(159)] if number < 100]
    assert len(large) < 20, "it was given as many blocks, and not as many bytes"


def test_requests_that_wait_for_their_namespaces_turn_leave_some_to_others() -> None:
    bench = few_posted()
    elsewhere = Grant(OTHER, lambda _now: 2 * bench.options.grant_bytes, lambda: None)
    bench.grants.ask(0.0, elsewhere)
    bench.grants.ask(0.0, Grant(MODEL, lambda _now: 1, lambda: None))
    for number in range(MAX_RDMA_REQUESTS + 2):  # each is a request of its own, and held
        ask_for(bench, MODEL, [number])
    assert bench.home_metrics.rdma_requests_held_total == MAX_RDMA_REQUESTS - rdma_caller.ASSURED
    quiet = [100, 101]
    for namespace, number in zip((3, 4), quiet, strict=True):
        ask_for(bench, namespace, [number])
    bench.run(0.01)
    assert bench.outcomes == dict.fromkeys(quiet, bulk.DONE)
    bench.run(OPTIONS.grant_wait_s + 0.1)
    assert [bench.outcomes[number] for number in range(6)] == [UNREACHABLE] * 6


def test_while_tenants_compete_the_card_has_so_many_bytes_ahead_and_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rdma_caller, "AHEAD_BYTES", 2 * SIZE)
    monkeypatch.setattr(rdma_caller, "PART_BYTES", SIZE // 4)
    bench = Bench()
    ask_for(bench, MODEL, range(100))
    ask_for(bench, OTHER, range(100, 200))
    most = 0
    while len(bench.outcomes) < 200:
        bench.world.run(bench.now + 0.00001)
        ((connection, _, _, _),) = bench.links
        ahead = [part.end - part.start for part in connection._posted.values()]
        assert max(ahead, default=0) <= SIZE // 4
        others_come = any(number >= 100 for number in bench.outcomes)
        if others_come and {1, 2} <= {part.request.namespace for part in connection._waiting}:
            most = max(most, sum(ahead))
        bench.settle()
        assert bench.now < 9.0
    assert SIZE < most < 2 * SIZE + SIZE // 4
    assert set(bench.outcomes.values()) == {bulk.DONE}


@pytest.mark.parametrize("then", ["windows", "nothing"])
def test_a_get_that_has_less_time_than_its_windows_take_ends_alone(bench: Bench, then: str) -> None:
    elsewhere = Grant(OTHER, lambda _now: 2 * bench.options.grant_bytes, lambda: None)
    bench.grants.ask(0.0, elsewhere)
    bench.grants.ask(0.0, Grant(1, lambda _now: 1, lambda: None))
    bench.service.hold(1, data_of(1))
    bench.get(1, deadline=0.1)
    bench.run(0.15)
    assert bench.outcomes == {1: UNREACHABLE}
    if then == "windows":
        bench.grants.end(bench.now, elsewhere)
    bench.run(0.3)
    assert bench.failures == []
    assert bench.service.out == [], "its window is open"
    assert bench.metrics.rdma_bytes_read_total == 0
    if then == "nothing":
        bench.grants.end(bench.now, elsewhere)
    bench.service.hold(2, data_of(2))
    bench.get(2)
    bench.run(0.1)
    assert bench.outcomes[2] == bulk.DONE
    assert len(bench.links) == 1


def test_a_get_that_nobody_wants_any_more_is_not_made(bench: Bench) -> None:
    wanted = True
    ask_for(bench, MODEL, [999])
    bench.run(0.1)
    ask_for(bench, MODEL, range(MAX_RDMA_REQUESTS * MAX_RDMA_BLOCKS))
    ask_for(bench, MODEL, [500], wanted=lambda: wanted)
    wanted = False
    bench.run(0.5)
    assert bench.outcomes[500] == UNWANTED
    assert bench.metrics.rdma_blocks_read_total == MAX_RDMA_REQUESTS * MAX_RDMA_BLOCKS + 1


def test_a_piece_of_a_call_that_went_on_by_another_card_does_not_go_on_again(bench: Bench) -> None:
    block = BlockId(1, key(1))
    call = GetCall(2, block, 0, 9.0, lambda *_: None, bench.ended(1), moved=True)
    piece = rdma_caller._Striped(bench.caller, call, memoryview(bytes(10)), 0, 2).piece(0, 5)
    assert piece.moved
    assert not piece.may_read


# --- liars ----------------------------------------------------------------------------------------


def endpoint(number: int = 5) -> Endpoint:
    return Endpoint(bytes(16), number, 0, 4096, 16)


def callee_told(bench: Bench, *messages: RdmaCallerMessage) -> RdmaCallee[Copy]:
    callee = RdmaCallee(0.0, bench.service, OPTIONS, bench.home_metrics, bench.grants)
    holder = PairHolder(callee, bench.home_card, lambda: bench.now, lambda: None)
    codec = MessageCodec[RdmaCalleeMessage](
        RdmaCalleeMessage, max_message_bytes=MAX_RDMA_MESSAGE_BYTES
    )
    for message in messages:
        callee.received(0.0, codec.encode(message))
        holder.carry_out()
    return callee


HELLO = RdmaHello(RDMA_PROTOCOL_VERSION, "node-1", endpoint())
GET = RdmaGet(1, 1, [WantedBlock(key(1))])


@pytest.mark.parametrize(
    "messages",
    [
        [RdmaHello(RDMA_PROTOCOL_VERSION + 1, "node-1", endpoint())],
        [GET],
        [HELLO, HELLO],
        [HELLO, RdmaFinished(1)],
        [HELLO, GET, GET],
        [HELLO, GET, RdmaFinished(1)],  # its windows are not open yet
    ],
)
def test_a_caller_that_breaks_the_rules_is_cut_off(
    bench: Bench, messages: list[RdmaCallerMessage]
) -> None:
    bench.service.hold(1, data_of(1))
    callee = callee_told(bench, *messages)
    assert callee.closed
    assert bench.home_metrics.rdma_protocol_errors_total == 1
    assert bench.service.out == []
    assert bench.home_card.pairs == []


def test_a_caller_has_so_many_requests_open_and_no_more(bench: Bench) -> None:
    bench.service.hold(1, data_of(1))
    gets = [RdmaGet(n, 1, [WantedBlock(key(1))]) for n in range(MAX_RDMA_REQUESTS + 1)]
    assert not callee_told(bench, HELLO, *gets[:-1]).closed
    assert callee_told(bench, HELLO, *gets).closed


def caller_told(bench: Bench, *messages: RdmaCalleeMessage, put: bool = False) -> None:
    """A caller with one call, whose callee says all this."""
    room = bench.memory.room(SIZE)
    call: RdmaCall = GetCall(
        2, BlockId(1, key(1)), 0, 9.0, lambda *_: room, bench.ended(1), start_bytes=100
    )
    if put:
        room[:] = data_of(1)
        copy = Copy(BlockId(1, key(1)), room, digest_of(room))
        call = PutCall(2, copy, 1, 0, 9.0, lambda: True, bench.ended(1))
    bench.caller.ask(0.0, call)
    (connect,) = bench.caller.instructions()
    assert isinstance(connect, Connect)
    connection = connect.connection
    holder = PairHolder(connection, bench.card, lambda: bench.now, lambda: None)
    connection.connected(0.0)
    holder.carry_out()
    codec = MessageCodec[RdmaCallerMessage](
        RdmaCallerMessage, max_message_bytes=MAX_RDMA_MESSAGE_BYTES
    )
    for message in messages:
        connection.received(0.0, codec.encode(message))
        holder.carry_out()
    assert connection.closed
    assert bench.card.pairs == []
    for instruction in bench.caller.instructions():
        if isinstance(instruction, Complete):
            instruction.call.ended(0.0, instruction.outcome)


WELCOME = RdmaWelcome(endpoint())
WINDOW = Window(bulk.DONE, SIZE, 1, 0, 7)


@pytest.mark.parametrize(
    "messages",
    [
        [RdmaWindows(1, [WINDOW])],
        [WELCOME, WELCOME],
        [WELCOME, RdmaRefusal()],
        [WELCOME, RdmaWindows(2, [WINDOW])],
        [WELCOME, RdmaWindows(1, [WINDOW, WINDOW])],
        [WELCOME, RdmaWindows(1, [Window(bulk.WANTED, SIZE, 1, 0, 7)])],
        [WELCOME, RdmaWindows(1, [Window(bulk.DONE, 100, 1, 0, 7)])],
        [WELCOME, RdmaWindows(1, [WINDOW]), RdmaWindows(1, [WINDOW])],
        [WELCOME, RdmaTaken(1, [])],
    ],
)
def test_a_callee_that_breaks_the_rules_is_left_and_the_call_ends(
    bench: Bench, messages: list[RdmaCalleeMessage]
) -> None:
    caller_told(bench, *messages)
    assert bench.metrics.rdma_protocol_errors_total == 1
    assert bench.outcomes == {1: UNREACHABLE}


def test_a_put_is_not_done_by_a_window_of_a_get(bench: Bench) -> None:
    caller_told(bench, WELCOME, RdmaWindows(1, [WINDOW]), put=True)
    assert bench.outcomes == {1: UNREACHABLE}


# --- several cards --------------------------------------------------------------------------------

LARGE = 600_000


@pytest.fixture
def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut as if cards were slower."""
    monkeypatch.setattr(rdma_caller, "_MUCH_BYTES", 100_000)
    monkeypatch.setattr(rdma_caller, "_PIECE_BYTES", 50_000)


def ready(*distances: int) -> Bench:
    """A caller whose cards stand in connection with the home already."""
    bench = Bench(OPTIONS, *distances)
    bench.service.hold(99, data_of(99))
    bench.get(99)
    bench.run(0.1)
    assert bench.outcomes.pop(99) == bulk.DONE
    for card in bench.link_cards:
        card.counters.bytes_read = 0
    bench.metrics.rdma_bytes_read_total = bench.metrics.rdma_blocks_read_total = 0
    return bench


def get_together(bench: Bench, numbers: Sequence[int], size: int) -> list[memoryview]:
    """Ask for blocks, which the home has, all at once; where their bytes will be."""
    calls, rooms = [], []
    for number in numbers:
        bench.service.hold(number, data_of(number, size))
        rooms.append(bench.memory.room(size))
        block, deadline = BlockId(1, key(number)), bench.now + 9.0
        begin = lambda _size, _digest, room=rooms[-1]: room  # noqa: E731
        calls.append(GetCall(2, block, 0, deadline, begin, bench.ended(number)))
    bench.caller.ask(bench.now, *calls)
    bench.move()
    return rooms


def bytes_read(bench: Bench) -> list[int]:
    return [card.counters.bytes_read for card in bench.link_cards]


def test_blocks_are_spread_over_the_cards_that_are_nearest() -> None:
    bench = ready(21, 10, 10)
    for number in range(24):
        bench.service.hold(number, data_of(number))
    rooms = [bench.get(number) for number in range(24)]
    bench.run(0.5)
    assert set(bench.outcomes.values()) == {bulk.DONE}
    assert [bytes(room) for room in rooms] == [data_of(number) for number in range(24)]
    far, *near = bytes_read(bench)
    assert (far, sum(near)) == (0, 24 * SIZE)
    assert min(near) >= 8 * SIZE
    assert len(bench.cards[0].pairs) == 0


def test_one_request_for_many_blocks_is_shared_out() -> None:
    bench = ready(10, 10)
    get_together(bench, range(8), SIZE)
    bench.run(0.5)
    assert bytes_read(bench) == [4 * SIZE, 4 * SIZE]


def test_a_large_block_is_read_by_several_cards_each_byte_once(cut_small: None) -> None:
    bench = ready(10, 10, 10, 21)
    bench.service.hold(1, data_of(1, LARGE))
    room = bench.get(1, start=1000, size=LARGE)
    bench.run(0.5)
    assert bench.outcomes == {1: bulk.DONE}
    assert bytes(room) == data_of(1, LARGE)
    far, *near = sorted(bytes_read(bench))
    assert (far, sum(near)) == (0, LARGE - 1000)
    left = LARGE - 1000 - 100_000
    assert [share // 10 for share in near] == [left // 30, left // 30, left // 30 + 10_000]
    assert bench.metrics.rdma_bytes_read_total == LARGE - 1000
    assert bench.metrics.rdma_blocks_read_total == 1
    assert bench.service.out == []


def test_a_large_block_is_not_cut_where_other_blocks_keep_the_cards_busy(cut_small: None) -> None:
    bench = ready(10, 10)
    for number in range(2):
        bench.service.hold(number, data_of(number, LARGE))
        bench.get(number, size=LARGE)
    bench.run(0.5)
    assert set(bench.outcomes.values()) == {bulk.DONE}
    assert bytes_read(bench) == [LARGE, LARGE]
    assert bench.home_metrics.rdma_requests_served_total == 3


def test_a_piece_is_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though other cards have done their parts when the window of the one in the middle comes."""
    monkeypatch.setattr(rdma_caller, "_MUCH_BYTES", 1000)
    monkeypatch.setattr(rdma_caller, "_PIECE_BYTES", 50_000)
    bench = ready(10, 10, 10)
    bench.home_cards[2].faults.late = 1.0
    (room,) = get_together(bench, [1], LARGE)
    bench.run(0.3)
    assert bench.outcomes == {}
    assert bytes_read(bench)[2] == 0
    assert [card.blocks for card in bench.link_cards] == [0, 0, 1], "the others are not done"
    bench.run(2.0)
    assert bench.outcomes == {1: bulk.DONE}
    assert bytes(room) == data_of(1, LARGE)
    assert min(bytes_read(bench)) > 0


def test_all_large_blocks_of_a_request_are_cut_for_cards_that_have_nothing_to_do(
    cut_small: None,
) -> None:
    """The first card whose connection stands has taken them all."""
    bench = Bench(OPTIONS, 10, 10)
    rooms = get_together(bench, range(2), LARGE)
    bench.run(0.5)
    assert [bytes(room) for room in rooms] == [data_of(0, LARGE), data_of(1, LARGE)]
    assert set(bench.outcomes.values()) == {bulk.DONE}
    assert bytes_read(bench) == [LARGE + 100_000, LARGE - 100_000]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_bit_that_flips_in_any_piece_is_found(cut_small: None, wrong: int) -> None:
    bench = ready(10, 10)
    bench.home_cards[wrong].faults.flips = 1.0
    bench.service.hold(1, data_of(1, LARGE))
    bench.get(1, size=LARGE)
    bench.run(0.5)
    assert bench.outcomes == {1: bulk.WRONG_DIGEST}


@pytest.mark.parametrize("gone", [0, 1])
def test_a_card_that_is_taken_away_in_the_middle_of_a_block_is_left_out(
    cut_small: None, gone: int
) -> None:
    bench = ready(10, 10)
    bench.service.hold(1, data_of(1, LARGE))
    room = bench.get(1, size=LARGE)
    bench.run(0.0001)
    bench.cards[gone].go()
    assert bench.outcomes == {}, "it is over already"
    bench.run(OPTIONS.silence_s + 0.5)
    assert bench.outcomes == {1: bulk.DONE}
    assert bytes(room) == data_of(1, LARGE)
    assert bench.failures == [], "the node was given up"
    assert bench.metrics.rdma_calls_moved_total == 1
    assert bench.link_cards[gone].counters.failures == 1
    (news,) = bench.caller.take_news()
    assert news == f"RDMA with node-2 by card-{gone} failed, other cards go on: silence"
    assert len(bench.cards[gone].pairs) == 0
    assert bench.service.out == []


def test_without_any_card_left_a_cut_block_ends_once_and_after_all_pairs(cut_small: None) -> None:
    bench = ready(10, 10)
    bench.service.hold(1, data_of(1, LARGE))
    bench.get(1, size=LARGE)
    bench.run(0.0001)
    for card in bench.cards:
        card.go()
    bench.run(2 * OPTIONS.silence_s + 1.5)
    assert bench.outcomes == {1: UNREACHABLE}
    assert bench.failures == ["the card is gone"]
    assert [len(card.pairs) for card in bench.cards] == [0, 0]


@pytest.mark.parametrize("then", [bulk.NOT_FOUND, bulk.NO_ROOM])
def test_a_piece_of_no_block_or_another_ends_the_block(cut_small: None, then: str) -> None:
    bench = ready(10, 10)
    other = bench.service.hold(2, data_of(2, LARGE))
    bench.service.hold(1, data_of(1, LARGE))
    give = bench.service.get
    asked = []

    def once(caller: str, namespace: int, block: WantedBlock) -> Copy | str:
        asked.append(block.start_bytes)
        if len(asked) == 1:
            return give(caller, namespace, block)
        if then == bulk.NOT_FOUND:
            return then
        bench.service.out.append(other.block.key)
        return other

    bench.service.get = once  # type: ignore[method-assign]
    bench.get(1, size=LARGE)
    bench.run(0.5)
    assert bench.outcomes == {1: then}
    assert len(asked) == 2
    assert bench.service.out == []


def test_a_card_comes_back_after_a_pause_that_grows_with_one_call_at_first() -> None:
    bench = ready(10, 10)
    second = bench.link_cards[1]
    bench.home_cards[1].faults.lost_windows = 1.0
    number, pauses = 0, []
    for _ in range(3):
        failures, began = second.counters.failures, bench.now
        while second.counters.failures == failures:
            assert bench.now < began + 9.0, "it is never tried again"
            bench.service.hold(number, data_of(number))
            bench.get(number, deadline=bench.now + 9.0)
            bench.run(0.1)
            number += 1
        pauses.append(round(bench.now - began))
        assert second.counters.failures == failures + 1
    assert pauses == [0, 1, 2]
    assert set(bench.outcomes.values()) == {bulk.DONE}
    assert bench.metrics.rdma_calls_moved_total == 3
    bench.home_cards[1].faults.lost_windows = 0.0
    bench.run(4.5)
    before = second.counters.bytes_read
    for more in range(number, number + 20):
        bench.service.hold(more, data_of(more))
        bench.get(more, deadline=bench.now + 9.0)
    bench.run(0.5)
    assert second.counters.bytes_read > before
    assert len(bench.caller.take_news()) == 2, "told more than once"


def test_a_call_goes_on_by_another_card_once() -> None:
    bench = ready(10, 10, 10)
    for card in bench.home_cards:
        card.faults.lost_windows = 1.0
    bench.service.hold(1, data_of(1))
    bench.get(1)
    bench.run(0.5)
    assert bench.outcomes == {1: UNREACHABLE}
    assert bench.metrics.rdma_calls_moved_total == 1
    assert bench.failures == [], "the third still works, for all that is known"


def test_a_card_on_trial_is_given_one_call() -> None:
    bench = ready(10, 10)
    bench.home_cards[1].faults.lost_windows = 1.0
    get_together(bench, range(8), SIZE)
    bench.run(OPTIONS.retry_s + 0.5)
    assert bench.metrics.rdma_calls_moved_total == 4
    get_together(bench, range(8, 16), SIZE)  # its connection is made meanwhile
    bench.run(0.3)
    get_together(bench, range(16, 24), SIZE)
    bench.run(0.3)
    assert bench.metrics.rdma_calls_moved_total == 4 + 1
    assert set(bench.outcomes.values()) == {bulk.DONE}


def test_cards_farther_off_stand_in_and_give_way_again() -> None:
    bench = ready(10, 21)
    near = bench.link_cards[0]
    bench.service.hold(1, data_of(1))
    bench.get(1)
    near.problem = "its port is down"
    bench.caller.card_failed(bench.now, near)
    bench.move()
    assert [len(card.pairs) for card in bench.cards] == [0, 1], "the pair is not closed"
    bench.run(0.5)
    assert bench.outcomes == {1: bulk.DONE}
    assert bytes_read(bench) == [0, SIZE]
    assert bench.caller.take_news() == [], "who knows that the port is down says so, once"
    near.problem = ""
    bench.run(OPTIONS.retry_s)
    bench.service.hold(2, data_of(2))
    bench.get(2)
    bench.run(0.1)
    assert bytes_read(bench) == [0, 2 * SIZE], "it waited for the connection by the nearer one"
    for number in range(3, 7):
        bench.service.hold(number, data_of(number))
        bench.get(number)
        bench.run(0.1)
    assert set(bench.outcomes.values()) == {bulk.DONE}
    assert bytes_read(bench) == [4 * SIZE, 2 * SIZE]
    assert bench.failures == bench.caller.take_news() == []


def test_without_a_card_that_works_calls_end_at_once() -> None:
    bench = Bench(OPTIONS, 10, 10)
    for card in bench.link_cards:
        card.problem = "its port is down"
    bench.get(1)
    assert bench.outcomes == {1: UNREACHABLE}
    assert bench.failures == ["no card of this node works"]


def test_a_node_that_is_not_reached_at_all_is_no_card_s_fault() -> None:
    bench = Bench(OPTIONS, 10, 21)
    bench.unreachable = True
    bench.get(1)
    assert bench.outcomes == {1: UNREACHABLE}
    assert bench.failures == ["nobody is there"]
    assert bench.connects == 1, "each card was tried"


def test_a_put_goes_on_by_another_card() -> None:
    bench = ready(10, 10)
    bench.put(1)
    bench.put(2)
    bench.run(0.00001)
    bench.cards[1].go()
    bench.run(8.0)
    assert bench.outcomes[1] == bulk.DONE
    assert bench.service.out == []


# --- RDMA or TCP ----------------------------------------------------------------------------------


class Choice:
    """The carriers, and what came of a call."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.carriers = Carriers(RdmaOptions(retry_s=1.0, retry_max_s=4.0), self.metrics)
        self.carriers.use_nodes({2: NODE, 3: replace_node(3, rdma_port=0)})
        self.outcomes: list[str] = []
        self.rooms_asked = 0

    def get(self, node: int = 2, deadline: float = 100.0) -> GetCall:
        def begin(size_bytes: int, _digest: int) -> memoryview:
            self.rooms_asked += 1
            return memoryview(bytearray(size_bytes))

        return GetCall(
            node, BlockId(1, key(1)), 0, deadline, begin, lambda _, what: self.outcomes.append(what)
        )

    def goes_by_rdma(self, now: float, call: BulkCall) -> bool:
        ours, others = self.carriers.choose(now, [call])
        assert len(ours) + len(others) == 1
        return bool(ours)


def replace_node(number: int, rdma_port: int) -> NodeInfo:
    return NodeInfo(
        number, f"node-{number}", "10.0.0.3", "02:00:00:00:00:03", 3, 1, "host-3", 1, rdma_port
    )


def test_blocks_go_by_rdma_to_nodes_that_have_it_and_all_else_by_tcp() -> None:
    choice = Choice()
    assert choice.goes_by_rdma(0.0, choice.get())
    assert not choice.goes_by_rdma(0.0, choice.get(node=3))
    assert not choice.goes_by_rdma(0.0, choice.get(node=77))
    question = ExistsCall(2, 1, key(1), 9.0, lambda _: None, lambda *_: None)
    assert not choice.goes_by_rdma(0.0, question)


def test_what_rdma_cannot_do_tcp_does_in_the_same_room() -> None:
    choice = Choice()
    ((call,), _) = choice.carriers.choose(0.0, [choice.get()])
    assert isinstance(call, GetCall)
    room = call.begin(10, 5)
    choice.carriers.failed(0.1, "node-2", "silence")
    call.ended(0.1, UNREACHABLE)
    (again,) = choice.carriers.take_again()
    assert isinstance(again, GetCall)
    assert again.begin(10, 5) is room
    assert again.begin(11, 5) is None, "another copy does not fit into its room"
    assert choice.rooms_asked == 1
    again.ended(0.2, bulk.DONE)
    assert choice.outcomes == [bulk.DONE]
    assert choice.metrics.rdma_fallbacks_total == 1


def test_what_rdma_had_no_place_for_goes_by_tcp_although_rdma_works() -> None:
    choice = Choice()
    copy = Copy(BlockId(1, key(1)), memoryview(b"bytes"), 1)
    put = PutCall(2, copy, 1, 0, 9.0, lambda: True, lambda _, what: choice.outcomes.append(what))
    for call in (choice.get(), put):
        ((ours,), _) = choice.carriers.choose(0.0, [call])
        ours.ended(0.1, UNREACHABLE)
        (again,) = choice.carriers.take_again()
        assert not choice.goes_by_rdma(0.1, again)
        again.ended(0.2, bulk.DONE)
    assert choice.outcomes == [bulk.DONE] * 2
    assert choice.goes_by_rdma(0.3, choice.get())


@pytest.mark.parametrize("is_put", [True, False], ids=["put", "get"])
def test_what_rdma_could_not_do_goes_to_the_same_node_however_nodes_are_numbered_by_then(
    is_put: bool,
) -> None:
    # A controller that has lost its state numbers the nodes anew.
    choice = Choice()
    copy = Copy(BlockId(1, key(1)), memoryview(b"bytes"), 1)
    put = PutCall(2, copy, 1, 0, 9.0, lambda: True, lambda _, what: choice.outcomes.append(what))
    ((ours,), _) = choice.carriers.choose(0.0, [put if is_put else choice.get()])
    ours.ended(0.1, UNREACHABLE)
    other, same = replace_node(3, rdma_port=1), msgspec.structs.replace(NODE, index=4)
    choice.carriers.use_nodes({2: msgspec.structs.replace(other, index=2), 4: same})
    (_, (again,)) = choice.carriers.choose(0.1, choice.carriers.take_again())
    assert again.node == 4
    assert choice.outcomes == []


def test_what_rdma_could_not_do_goes_to_nobody_once_its_node_is_gone() -> None:
    choice = Choice()
    ((ours,), _) = choice.carriers.choose(0.0, [choice.get()])
    ours.ended(0.1, UNREACHABLE)
    nodes = {2: msgspec.structs.replace(replace_node(3, rdma_port=1), index=2)}
    choice.carriers.use_nodes(nodes)
    (_, others) = choice.carriers.choose(0.1, choice.carriers.take_again())
    tcp = BulkCaller("node-1", BulkOptions(), choice.metrics, lambda _: memoryview(b""))
    tcp.use_nodes(0.1, nodes)
    tcp.ask(0.1, *others)
    (instruction,) = tcp.instructions()
    assert isinstance(instruction, bulk_caller.Complete)
    instruction.call.ended(0.1, instruction.outcome)
    assert choice.outcomes == [UNREACHABLE]


def test_a_node_with_which_rdma_failed_is_asked_by_tcp_for_longer_each_time_and_told_once() -> None:
    choice = Choice()
    now, waits = 0.0, []
    for _ in range(4):
        choice.carriers.failed(now, "node-2", "an error")
        choice.carriers.failed(now, "node-2", "the same, of another call")
        start = now
        while not choice.goes_by_rdma(now, choice.get()):
            now += 0.25
        waits.append(now - start)
    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert choice.carriers.take_news() == ["RDMA with node-2 failed, TCP takes over: an error"]
    ((call,), _) = choice.carriers.choose(now, [choice.get()])
    call.ended(now, bulk.DONE)
    assert choice.carriers.take_news() == ["RDMA with node-2 works again"]
    choice.carriers.failed(now, "node-2", "once more")
    assert not choice.goes_by_rdma(now + 0.9, choice.get())
    assert choice.goes_by_rdma(now + 1.0, choice.get())


@pytest.mark.parametrize("outcome", [EVICTED, UNWANTED])
def test_a_call_that_was_not_made_does_not_say_that_rdma_works(outcome: str) -> None:
    choice = Choice()
    ((call,), _) = choice.carriers.choose(0.0, [choice.get()])
    choice.carriers.failed(0.1, "node-2", "silence")
    choice.carriers.take_news()
    call.ended(0.2, outcome)
    assert choice.outcomes == [outcome]
    assert choice.carriers.take_news() == []
    assert not choice.goes_by_rdma(0.3, choice.get())


def test_a_call_whose_time_is_over_is_not_made_again() -> None:
    choice = Choice()
    ((call,), _) = choice.carriers.choose(0.0, [choice.get(deadline=1.0)])
    call.ended(1.0, UNREACHABLE)
    assert choice.carriers.take_again() == []
    assert choice.outcomes == [UNREACHABLE]
