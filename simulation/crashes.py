"""Crashes of the SSD tier: a workload on a simulated disk, cut anywhere, and what is found after.

Owns: the workload, the cut, and what must be true after it. Must not know: whole pools (the
simulation of those has the tier, too, with other faults at the same time).

Oracle: the bytes that were put under each key, and, for a disk that keeps to flushes, what was on
the shelf when a flush ended. A run is one of puts, reads, drops and dropped namespaces over a
small arena and a small disk. Orders are carried out one by one, in any order; at a random point
the machine dies, in the middle of whatever is being written. Another tier is made over what the
disk has kept, every block is read and compared, and so is the file by fsck; then the workload
goes on, to the next crash.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvcast.hostagent.core.ssd import SsdRules, SsdTier
from kvcast.hostagent.core.store import COMMITTED, Copy, Store, StoreError
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.ssd.fsck import check_ssd
from kvcast.hostagent.tiers.ssd.layout import cut_of, head_of, open_formatted, scan
from kvcast.hostagent.tiers.ssd.orders import DONE, Order
from kvcast.protocol.messages.wire import BlockId, digest_of
from kvcast.simulation.disk import SimDisk

UNIT_BYTES: Final = 4096
SLAB_BYTES: Final = 32 * UNIT_BYTES
ARENA_BYTES: Final = 8 * 16384
SLABS_ON_DISK: Final = 6
STEPS: Final = 120
KEYS: Final = 40
NAMESPACES: Final = (1, 2)
RULES: Final = SsdRules(0.7, 0.5, batch_share=0.25, max_reads=3, max_reads_waiting=8)


class CrashError(Exception):
    """Something was found after a crash that must not be."""


@dataclass
class Found:
    """Totals of some runs. `damaged`: blocks that were found, and given up, since their bytes were
    not whole: on disks that lie only."""

    crashes: int = 0
    blocks_verified: int = 0
    wrong_bytes: int = 0
    damaged: int = 0
    kept: int = 0
    """Blocks that had to be there, and were."""
    orders: int = 0


@dataclass
class Run:
    """One disk, and one life after another of what uses it."""

    seed: int
    lies: bool = False
    found: Found = field(default_factory=Found)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.disk = SimDisk(self.rng)
        self.put: dict[BlockId, set[bytes]] = {}
        """All bytes that were ever put under a key."""
        self.dropped: set[BlockId] = set()
        """Blocks that nobody may read, until they are put again."""
        self.safe: dict[BlockId, Copy] = {}
        """What was on the shelf when the last flush ended."""
        self.now = 0.0
        self.waiting: list[Order] = []
        self.start()
        self.disk.lies = self.lies  # what it said before is true

    def start(self) -> None:
        """A new process: it believes of the disk what proves itself."""
        self.memory = memoryview(bytearray(ARENA_BYTES))
        self.store = Store(Allocator(ARENA_BYTES, 16384))
        cut = cut_of("node of cluster", (SLABS_ON_DISK + 1) * SLAB_BYTES, UNIT_BYTES, SLAB_BYTES)
        formatted = open_formatted(self.disk, cut, self.rng.getrandbits(63) | 1)
        self.tier = SsdTier(RULES, self.store, self.memory, [formatted], epoch_s=1e9)
        self.tier.meaning_of = lambda namespace: 77 + namespace
        self.store.below = self.tier
        self.waiting = []
        self.tier.advance(self.now)
        self.tier.begin()
        if formatted.found:
            for piece in scan(self.disk, formatted):
                self.tier.found(0, piece)
            self.tier.scanned()

    # --- the disk ---------------------------------------------------------------------------------

    def take(self) -> None:
        """What the tier wants done waits."""
        self.waiting += self.tier.take_orders(self.now)

    def do_one(self) -> None:
        """One of the orders that wait is done."""
        order = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        self.found.orders += 1
        error, digest = self.disk.do(order)
        if order.kind.value == "flush" and not error:
            shelf = self.tier.shelf
            copies = [shelf.peek(block) for block in shelf.blocks()]
            self.safe = {copy.block: copy for copy in copies if copy is not None}
        order.ended(self.now, error, digest)
        self.take()

    def settle(self) -> None:
        """Everything that waits is done."""
        self.take()
        while self.waiting:
            self.do_one()

    # --- the workload -----------------------------------------------------------------------------

    def step(self) -> None:
        """Somebody does something, and the disk some of what it is to do."""
        rng = self.rng
        self.now += 0.01
        self.store.advance(self.now)
        block = BlockId(rng.choice(NAMESPACES), rng.randrange(KEYS).to_bytes(16, "big"))
        what = rng.random()
        if what < 0.55:
            self.put_one(block)
        elif what < 0.85:
            self.read_one(block)
        elif what < 0.97:
            self.store.drop(block)
            self.dropped.add(block)
        else:
            self.store.drop_namespace(block.namespace)
            self.dropped |= {other for other in self.put if other.namespace == block.namespace}
        self.take()
        for _ in range(rng.randrange(4)):
            if self.waiting:
                self.do_one()
        self.tier.check()
        self.store.check()

    def put_one(self, block: BlockId) -> None:
        rng = self.rng
        size = rng.choice((100, 4096, 5000, 12000, 16384, 30000))
        data = rng.randbytes(size)
        try:
            copy = self.store.reserve(block, size)
        except StoreError:
            return
        self.memory[copy.offset : copy.offset + size] = data
        if self.store.commit(copy, digest_of(data), home=True) is copy:
            self.put.setdefault(block, set()).add(data)
            self.dropped.discard(block)

    def read_one(self, block: BlockId) -> None:
        copy = self.store.get(block)
        if copy is not None:
            self.verify(block, bytes(self.memory[copy.offset : copy.offset + copy.size_bytes]))
            return
        room: Copy | None = None

        def begin(size_bytes: int) -> memoryview | None:
            nonlocal room
            try:
                room = self.store.reserve(block, size_bytes)
            except StoreError:
                return None
            return self.memory[room.offset : room.offset + size_bytes]

        def ended(_now: float, error: str, digest: int, committed_at: float) -> None:
            if room is None:
                return
            if error != DONE:
                self.store.abort(room)
                return
            self.verify(block, bytes(self.memory[room.offset : room.offset + room.size_bytes]))
            try:
                held = self.store.commit(room, digest, home=True, since=committed_at)
            except StoreError:
                return
            if held.state == COMMITTED:
                self.tier.promoted(held)

        self.tier.read(block, begin, ended)

    def verify(self, block: BlockId, data: bytes) -> None:
        """What a reader got is what was put under that name, once."""
        self.found.blocks_verified += 1
        if data not in self.put.get(block, ()):
            self.found.wrong_bytes += 1
            raise CrashError(f"seed {self.seed}: {block} is not what was put")
        if block in self.dropped:
            raise CrashError(f"seed {self.seed}: {block} was dropped, and is read")

    # --- the crash --------------------------------------------------------------------------------

    def crash(self) -> None:
        """The machine dies, in the middle of a write; then another process looks at the disk."""
        self.found.crashes += 1
        rng = self.rng
        expected = {
            block: copy.digest
            for block, copy in self.safe.items()
            if self.tier.shelf.known(block) is copy
        }
        for order in self.waiting:
            if rng.random() < 0.5:
                self.disk.tear(order)
        if rng.random() < 0.8:
            self.disk.lose_power()
        self.safe = {}
        self.dropped = set()  # what was dropped a moment ago may be there again
        report = check_ssd(self.disk, head_of(self.disk))
        if not self.lies and (report.damaged or report.overlapping or report.truncated):
            raise CrashError(f"seed {self.seed}: {report}")
        self.start()
        self.settle()
        shelf = self.tier.shelf
        if not self.tier.is_ready:
            raise CrashError(f"seed {self.seed}: what was found was not gone through")
        for block, digest in expected.items() if not self.lies else ():
            held = shelf.peek(block)
            if held is None or held.digest != digest:
                raise CrashError(f"seed {self.seed}: {block} was safe, and is not there")
            self.found.kept += 1
        for block in shelf.blocks():
            self.read_one(block)
            self.settle()
            self.tier.check()
            self.store.check()
        self.found.damaged += self.tier.counters.damaged
        if self.tier.counters.damaged and not self.lies:
            raise CrashError(f"seed {self.seed}: {self.tier.counters.damaged} blocks are damaged")


def run(seed: int, crashes: int, found: Found) -> None:
    """A workload with so many crashes, each at a random point; CrashError. One disk in five lies
    about its flushes."""
    run = Run(seed, lies=seed % 5 == 4, found=found)
    for _ in range(crashes):
        for _ in range(run.rng.randrange(1, STEPS)):
            run.step()
        run.crash()
    run.settle()
    if run.tier.orders:
        raise CrashError(f"seed {seed}: the tier does not come to rest")


def run_many(crashes: int, first_seed: int, found: Found) -> None:
    """So many crashes, from a seed on, ten each; CrashError says how to repeat a failure."""
    seed = first_seed
    while found.crashes < crashes:
        try:
            run(seed, min(10, crashes - found.crashes), found)
        except CrashError as error:
            again = f"python -m kvcast.simulation.crashes --seed {seed} --crashes 10"
            raise CrashError(f"{error}\nagain: {again}") from error
        seed += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: so many crashes, from a seed on."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.simulation.crashes", description=__doc__
    )
    parser.add_argument("--crashes", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first (default: 0)")
    arguments = parser.parse_args(argv)
    found = Found()
    try:
        run_many(arguments.crashes, arguments.seed, found)
    except CrashError as error:
        print(error)
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
