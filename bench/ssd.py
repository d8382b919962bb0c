"""The question: how much of a disk does the SSD tier use, and what is left after a crash?

Owns: an agent's store and its SSD tier on real files, filled and read through the same calls as in
the agent; beside them, in the same run and on the same file system, Debian's `fio` with blocks of
the same size, O_DIRECT, and as many at once; and crashes on a simulated disk.

    python -m kvcast.bench.ssd --json ssd.json --folder /nvme

`ssd_write_over_fio`: bytes a second of blocks that go down from DRAM, with the table, over those
of `fio --rw=write`, both with what makes them safe (fdatasync). `ssd_read_over_fio`: bytes a second
of blocks that are got from disk into the arena, with their digests made, over `fio --rw=randread`.
fio runs with `psync` in as many threads, and with `libaio` and `io_uring` in one; the best one
counts. fio's memory is in pages of 4 KiB, and an agent's arena in huge ones where the kernel makes
such (`arena_huge_bytes`), which on a virtual disk saves much. So `libaio` runs in huge pages, too,
in memory that it is given: `ssd_…_over_fio_huge` is over that. Both use the same file, in turns, a
new agent each time: where a file lies may make it half as fast again as another. Of each kind, and
of each of fio's, the median of the rounds counts: the fastest of many of fio's and of few of ours
depend on luck, and fio has more of it. Every block that is read is compared with what was put
(`wrong_bytes`).

`crash_points` crashes of `kvcast.simulation.crashes` follow: `crash_wrong_bytes` must be 0. The
exit status is 1 where a byte was wrong, or something could not be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.fetches import GetBatch
from kvcast.hostagent.core.ssd import SsdRules, SsdTier
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.options import SsdOptions
from kvcast.hostagent.ssd import SsdOfAgent
from kvcast.hostagent.tiers.arena import SLAB_BYTES, Allocator, ArenaError, ArenaFile
from kvcast.hostagent.tiers.memory_placement import gather_pages
from kvcast.hostagent.tiers.ssd.files import THREADS
from kvcast.hostagent.tiers.ssd.layout import PAGE_BYTES, SsdError
from kvcast.protocol.messages import local
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES, BlockId, digest_of
from kvcast.service import provenance
from kvcast.service.reports import add_json, report_to
from kvcast.service.values import TextError, parse_size, whole_number
from kvcast.simulation import crashes

NAMESPACE: Final = 1
ROUNDS: Final = 7
BATCH: Final = 32
"""Blocks of one get."""
ENGINES: Final = ("psync", "libaio", "io_uring")
HUGE: Final = "libaio_huge"
_TABLE_BYTES: Final = 64 << 20
"""What a file has beside its blocks, at most."""
_MOVES_WITHIN_S: Final = 60.0
"""Some block, while all are on their way."""
_EVERYTHING: Final = SsdRules(high_share=0.0, low_share=0.0)
"""All that nobody pins goes down."""


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Blocks:
    """What is put: each block has other bytes than all others, and takes no time to make."""

    def __init__(self, block_bytes: int) -> None:
        self._base = bytearray(random.Random(1).randbytes(block_bytes))

    def of(self, number: int) -> bytearray:
        """The bytes of a block, until the next call."""
        self._base[:16] = _key(number)
        return self._base


class Node:
    """A store, its disk, and nothing else of an agent. `start`, then `close`."""

    def __init__(self, path: str, arena_bytes: int, file_bytes: int) -> None:
        self.arena = ArenaFile(arena_bytes)
        fd = self.arena.open_for_client()
        self.huge_bytes = gather_pages(fd, arena_bytes)
        os.close(fd)
        self.store = Store(Allocator(arena_bytes, SLAB_BYTES))
        self.core = AgentCore(
            AgentOptions("bench"), self.store, self.arena.memory, random.Random(1)
        )
        options = SsdOptions((path,), file_bytes, rules=_EVERYTHING)
        self.ssd = SsdOfAgent(self.core, options, "bench", lambda: None)

    def start(self) -> SsdTier:
        self.ssd.start(patient=False)
        tier = self.ssd.tier
        assert tier is not None
        tier.meaning_of = lambda _namespace: 1
        tier.begin()
        return tier

    async def close(self) -> None:
        await self.ssd.close()
        self.core.close()
        self.arena.close()


def _forget(path: str) -> None:
    """Let a file, if there is one, be no agent's, and lie where it does."""
    if os.path.exists(path):
        with open(path, "r+b") as file:
            file.write(bytes(PAGE_BYTES))


async def _until(left: Callable[[], int]) -> None:
    """Wait until nothing is left; RuntimeError where it does not become less."""
    before, since = left(), time.monotonic()
    while before:
        await asyncio.sleep(0.002)
        if (now := left()) != before:
            before, since = now, time.monotonic()
        elif time.monotonic() > since + _MOVES_WITHIN_S:
            raise RuntimeError(f"{now} blocks do not move: is the disk full, or does it hang?")


def _version_of_fio() -> str:
    done = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


async def _write(node: Node, tier: SsdTier, blocks: Blocks, count: int, block_bytes: int) -> float:
    """Fill DRAM, then let all of it go down; bytes a second."""
    low, tier.rules = tier.rules, SsdRules(high_share=2.0, low_share=2.0)
    node.store.drop_namespace(NAMESPACE)
    await _until(lambda: int(tier.is_behind))
    for number in range(count):
        copy = node.store.reserve(BlockId(NAMESPACE, _key(number)), block_bytes)
        data = blocks.of(number)
        node.arena.memory[copy.offset : copy.offset + block_bytes] = data
        node.store.commit(copy, digest_of(data), home=True)
    tier.rules = low
    start = time.perf_counter()
    tier.look()
    await _until(lambda: count - len(tier.shelf))
    seconds = time.perf_counter() - start
    await _until(lambda: len(node.store))
    return count * block_bytes / seconds


async def _read(
    node: Node, tier: SsdTier, blocks: Blocks, count: int, block_bytes: int, seed: int
) -> tuple[float, int]:
    """Get all blocks from disk, in any order; bytes a second, and wrong blocks."""
    loop = asyncio.get_running_loop()
    tier.rules = SsdRules(high_share=2.0, low_share=2.0)
    order = list(range(count))
    random.Random(seed).shuffle(order)
    held: list[tuple[int, Any]] = []
    batches = [order[at : at + BATCH] for at in range(0, count, BATCH)]
    done = asyncio.Event()
    left = len(batches)

    def ask() -> None:
        if not batches:
            return
        numbers = batches.pop()

        def answered(batch: GetBatch) -> None:
            nonlocal left
            for number, item in zip(numbers, batch.items, strict=True):
                assert item is not None
                if item.status != local.OK or item.tier != "ssd":
                    raise RuntimeError(f"block {number}: {item}")
                held.append((number, item.copy))
            left -= 1
            if left:
                ask()
            else:
                done.set()

        now = loop.time()
        node.core.reads.get(now, NAMESPACE, [_key(n) for n in numbers], now + 60, answered)

    start = time.perf_counter()
    ask()
    ask()
    await done.wait()
    seconds = time.perf_counter() - start
    wrong = 0
    for number, copy in held:
        view = node.arena.memory[copy.offset : copy.offset + block_bytes]
        wrong += view != blocks.of(number)
        node.store.unpin(copy)
    tier.rules = _EVERYTHING
    tier.look()
    await _until(lambda: len(node.store))
    return count * block_bytes / seconds, wrong


def _fio(path: str, mode: str, engine: str, block_bytes: int, size_bytes: int) -> float:
    """Bytes a second that fio moves; 0 where it has no such engine, or memory."""
    deep = ["--numjobs=1", f"--iodepth={THREADS}", f"--size={size_bytes}"]
    huge = -1
    if engine == HUGE:
        memory_bytes = 4 * THREADS * block_bytes
        huge = os.memfd_create("kvcast-bench")
        os.posix_fallocate(huge, 0, memory_bytes)
        if not gather_pages(huge, memory_bytes):
            os.close(huge)
            return 0.0
        deep.append(f"--iomem=mmapshared:/proc/{os.getpid()}/fd/{huge}")
    if engine == "psync":
        share = size_bytes // THREADS // block_bytes * block_bytes
        deep = [
            f"--numjobs={THREADS}",
            "--thread",
            f"--size={share}",
            f"--offset_increment={share}",
        ]
    command = ["fio", "--name=peer", f"--filename={path}", f"--rw={mode}", f"--bs={block_bytes}"]
    command += ["--direct=1", f"--ioengine={engine.removesuffix('_huge')}", "--group_reporting"]
    command += ["--output-format=json", *deep]
    command += ["--end_fsync=1"] if mode == "write" else ["--norandommap=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if huge >= 0:
        os.close(huge)
    if done.returncode:
        return 0.0
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    part = job["write" if mode == "write" else "read"]
    return float(part["bw_bytes"])


async def measure(folder: str, block_bytes: int, size_bytes: int, seed: int = 0) -> dict[str, Any]:
    """All rounds; see the module's text. RuntimeError where a block does not come, or fio moves
    nothing. `seed`: of the order in which blocks are read."""
    count = size_bytes // block_bytes
    ours: dict[str, list[float]] = {"write": [], "read": []}
    peers: dict[str, dict[str, list[float]]] = {"write": {}, "read": {}}
    has_fio = shutil.which("fio") is not None
    blocks = Blocks(block_bytes)
    wrong = damaged = errors = 0
    direct, huge_bytes = True, []
    path = os.path.join(folder, "kvcast.ssd")
    room_bytes = 2 * size_bytes + SLAB_BYTES
    for number in range(ROUNDS):
        _forget(path)
        node = Node(path, room_bytes, room_bytes + _TABLE_BYTES)
        try:
            tier = node.start()
            ours["write"].append(await _write(node, tier, blocks, count, block_bytes))
            rate, bad = await _read(node, tier, blocks, count, block_bytes, seed + number)
            ours["read"].append(rate)
            wrong += bad
            damaged += tier.counters.damaged
            errors += tier.counters.read_errors + tier.counters.write_errors
            direct &= node.ssd.is_direct
            huge_bytes.append(node.huge_bytes)
        finally:
            await node.close()
        for mode, kind in (("write", "write"), ("randread", "read")) if has_fio else ():
            for engine in (*ENGINES, HUGE):
                rate = await asyncio.to_thread(_fio, path, mode, engine, block_bytes, size_bytes)
                peers[kind].setdefault(engine, []).append(rate)
    report: dict[str, Any] = {"is_direct": direct, "wrong_bytes": wrong, "blocks": count}
    report |= {"block_bytes": block_bytes, "rounds": ROUNDS, "arena_huge_bytes": min(huge_bytes)}
    report |= {f"ssd_{kind}_bytes_per_s": statistics.median(r) for kind, r in ours.items()}
    report |= {f"ssd_{kind}_rounds_bytes_per_s": rates for kind, rates in ours.items()}
    report |= {"damaged": damaged, "errors": errors}
    if has_fio:
        report["fio"] = await asyncio.to_thread(_version_of_fio)
        for kind, rounds in peers.items():
            medians = {engine: statistics.median(rates) for engine, rates in rounds.items()}
            best = max(medians[engine] for engine in ENGINES)
            if not best:
                raise RuntimeError(f"fio does not {kind} in {folder}: is the disk full?")
            report[f"fio_{kind}_bytes_per_s"] = medians
            report[f"fio_{kind}_rounds_bytes_per_s"] = rounds
            mine = report[f"ssd_{kind}_bytes_per_s"]
            report[f"ssd_{kind}_over_fio"] = mine / best
            if medians[HUGE]:
                report[f"ssd_{kind}_over_fio_huge"] = mine / medians[HUGE]
    else:
        report["fio"] = "not installed: apt install fio"
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcast.bench.ssd")
    add_json(parser)
    parser.add_argument("--folder", help="on the disk to measure (default: a temporary one)")
    parser.add_argument(
        "--block-bytes",
        type=_block_bytes,
        default=1 << 20,
        metavar="SIZE",
        help="a multiple of 4 KiB, for fio (default: 1 MiB)",
    )
    parser.add_argument(
        "--size-bytes", type=parse_size, default=1 << 30, metavar="SIZE", help="in all: 1 GiB"
    )
    parser.add_argument(
        "--crashes", type=whole_number(1), default=1000, metavar="N", help="default: 1000"
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="of the crashes, and of the order of reads (default: 0)",
    )
    options = parser.parse_args(argv)
    if options.size_bytes < BATCH * options.block_bytes:
        parser.error(f"--size-bytes must be {BATCH} blocks at least")
    found = crashes.Found()
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            report = asyncio.run(
                measure(folder, options.block_bytes, options.size_bytes, options.seed)
            )
            crashes.run_many(options.crashes, options.seed, found)
    except (OSError, SsdError, ArenaError, RuntimeError, crashes.CrashError) as error:
        print(f"kvcast: {error}", file=sys.stderr)
        return 1
    report |= {
        "crash_points": found.crashes,
        "crash_wrong_bytes": found.wrong_bytes,
        "crash_blocks_verified": found.blocks_verified,
        "crash_blocks_kept": found.kept,
        "seed": options.seed,
        "load_average": os.getloadavg()[0],
        "provenance": provenance.provenance(),
    }
    report_to(options.json, report)
    return int(any(report[name] for name in ("wrong_bytes", "damaged", "crash_wrong_bytes")))


def _block_bytes(text: str) -> int:
    size_bytes = parse_size(text)
    if not size_bytes or size_bytes % PAGE_BYTES or size_bytes > MAX_BLOCK_BYTES:
        raise TextError(f"{text[:80]!r} is no multiple of {PAGE_BYTES} bytes up to 1 GiB")
    return size_bytes


if __name__ == "__main__":
    sys.exit(main())
