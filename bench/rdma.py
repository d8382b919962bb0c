"""The question: how near do lone reads by RDMA come to what `ib_read_bw` gets from the same card?

Owns: one home and one reader, each a process with the agent's cores, its card and its RDMA link,
and nothing else; and beside them, in the same run and on the same card, perftest's `ib_read_bw`
with messages of a block's length, once with polling and once with events: the better one counts.

    python -m kvcast.bench.rdma --json rdma.json          # in an emulated machine, booted for it
    python -m kvcast.bench.rdma --here 10.0.0.1,10.0.0.2   # on this machine's card

`read_over_ib_read_bw` = bytes a second of blocks that are asked for and read, with all that the
link does for them but one: digests are not made, as `ib_read_bw` makes none either.
`checked_read_over_ib_read_bw` is the same with digests, as agents always have it. In an emulated
machine the two are further apart: xxh3 makes 0.5 GB/s there at best, and above 10 GB/s on real
processors (`digest_bytes_per_s` is what this processor makes). Rounds alternate, and of each kind
the fastest counts, since whatever else the machine does only makes one slower. In the emulated
machine both sides share its two processors. So the ratios say what the link costs beside the card's
own work there, and no rate says anything of a real card. After each round the bytes of all blocks
are compared one by one (`wrong_bytes`).

Before that, in the same boot, shared answers are measured (`rdma_shared`):

- `shared_home_egress_ratio`: bytes that the home's card sent over the blocks' bytes; the worse of
  two and of three readers. All readers have asked for everything before the home answers.
- `shared_loss_egress_ratio`: the same for three readers, with 1 % loss on each link.
- `shared_blocks_by_rdma` of `shared_blocks`: those that came by RDMA WRITE to their last chunk.
- `shared_icrc_dropped`: RoCE packets that reached these readers, and that their cards did not take.

Then what a byte costs a reader's processor, over what it costs by DATA; each is the least of some
long rounds:

- `reader_cpu_over_udp`: the agent's process alone, system calls included, without what an idle
  agent takes. Interrupts are kept off its processor: for RDMA they are the work of the card, which
  Soft-RoCE does, and for UDP the kernel's. The machine counts this time. It counts it as the
  agent's, too, when its host runs something else, so other load makes it more.
- `reader_cpu_over_udp_with_idle`: the same with what an idle agent takes.
- `reader_machine_cpu_over_udp`: all that the machine does.
- `reader_processor_over_udp`: what the emulated processor of the agent takes of the real ones, idle
  or not.
- `reader_cpu_bare_counted_over_udp`: a process that only counts the WRITEs that its card reports.
  `reader_cpu_bare_checked_over_udp`: one that also copies them and makes digests (`rdma_bare`). No
  reader comes below that on such a card.

`shared_rounds` has all of it, and beside it rounds without shared answers: by the agents' own RDMA
link, and by TCP without kvcast. `--picture FILE` draws them.

The report is written after each round, with what is known by then; `missing` names the figures that
are not. A run ends after `--limit` seconds at the latest, wherever it is then, and says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kvcast.bench import rdma_picture, rdma_shared
from kvcast.bench.rdma_cards import card_of
from kvcast.bench.sides import hear, running, tell
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network.cards import Cards
from kvcast.hostagent.network.rdma_link import RdmaCalls, RdmaServer
from kvcast.hostagent.network.verbs import Card
from kvcast.hostagent.tiers.arena import SLAB_BYTES, Allocator, ArenaFile
from kvcast.protocol.digests import Digested
from kvcast.protocol.links.bulk import BulkOptions, GetCall
from kvcast.protocol.links.rdma import RdmaOptions
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.control import NamespaceInfo, NodeInfo, PoolMap
from kvcast.protocol.messages.wire import BUCKETS, BlockId, digest_of
from kvcast.service import provenance
from kvcast.topologies.machines import DEVICE
from kvcast.topologies.network import NetworkError
from kvcast.topologies.pool import PoolError

NAMESPACE: Final = 1
HOME, READER = 0, 1
BLOCK_BYTES: Final = 2 << 20
BLOCKS: Final = 8
"""Asked for at once."""
ROUNDS: Final = 5
PATIENCE_S: Final = 60.0
LIMIT_S: Final = 600.0
LONE_S: Final = 150.0
"""Of that, what is kept for lone reads beside `ib_read_bw`."""
LONE: Final = ("read_over_ib_read_bw", "checked_read_over_ib_read_bw", "wrong_bytes")
PROMISED: Final = (*rdma_shared.PROMISED, *LONE)
"""The figures of a whole report."""
_EMULATED: Final = ("10.78.0.1", "10.78.0.2")


def _key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _block(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


async def _side(index: int, ips: Sequence[str]) -> None:
    """One process. The home says its port, and serves; the reader is told it, and reads."""
    arena = ArenaFile(2 * BLOCKS * BLOCK_BYTES, None, reserve=True)
    store = Store(Allocator(arena.size_bytes, SLAB_BYTES))
    core = AgentCore(AgentOptions(f"node-{index}"), store, arena.memory, random.Random(index))
    options = RdmaOptions(connect_timeout_s=PATIENCE_S, silence_s=PATIENCE_S)
    cards = Cards([Card(ips[index], arena.memory, options)])
    lines = asyncio.Queue[str]()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: lines.put_nowait(sys.stdin.readline()))
    reads = Reads(core, options, cards)
    server = RdmaServer(core, options, BulkOptions(), cards)
    try:
        _say({"port": await server.start("127.0.0.1")})
        port = int(await lines.get())
        nodes = [
            NodeInfo(n, f"node-{n}", ips[n], f"02:00:00:00:00:0{n}", n + 1, 1, "127.0.0.1", 1, port)
            for n in (HOME, READER)
        ]
        info = NamespaceInfo(NAMESPACE, "bench", "m", "1", "l", [])
        core._index = index
        core.control_message(0.0, PoolMap(1, nodes, [[HOME]] * BUCKETS, [info], []))
        if index == HOME:
            for number in range(BLOCKS):
                data = _block(number)
                copy = store.reserve(BlockId(NAMESPACE, _key(number)), len(data))
                arena.memory[copy.offset : copy.offset + len(data)] = data
                store.commit(copy, digest_of(data), home=True)
        _say({"ready": True})
        while line := (await lines.get()).strip():
            if index == READER:
                seconds, checked = json.loads(line)
                with contextlib.nullcontext() if checked else without_digests(core):
                    _say(await reads.read(seconds))
    finally:
        await reads.calls.close()
        await server.close()
        cards.close()


@contextlib.contextmanager
def without_digests(core: AgentCore) -> Iterator[None]:
    """The core takes each block for the one that it begins like; the rest is looked at later."""
    digests = {_block(number)[:16]: digest_of(_block(number)) for number in range(BLOCKS)}

    def known(now: float, blocks: list[memoryview], then: Digested) -> None:
        then(now, [digests.get(bytes(view[:16]), 0) for view in blocks])

    with mock.patch.object(core, "make_digests", known):
        yield


class Reads:
    """The reader's calls, by its RDMA link. What the link leaves to TCP nobody makes here, so that
    ends the reading."""

    def __init__(self, core: AgentCore, options: RdmaOptions, cards: Cards) -> None:
        self._core = core
        self._rooms = [core.memory[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES] for n in range(BLOCKS)]
        self._idle = asyncio.Event()
        self._gave_up = False
        self._until = 0.0
        self._read = self._not_read = self._under_way = 0
        self.calls = RdmaCalls(core, options, cards, self._look)

    async def read(self, seconds: float) -> dict[str, Any]:
        """Every block again and again for so long, all the time `BLOCKS` of them at once, and then
        each of them once more; RuntimeError where the link gives up."""
        await self._read_all()  # the pair is made
        self._read = 0
        start = time.perf_counter()
        self._until = start + seconds
        await self._read_all()
        elapsed_s = time.perf_counter() - start
        size_bytes = self._read * BLOCK_BYTES
        self._until = 0.0
        await self._read_all()
        wrong_bytes = sum(
            sum(a != b for a, b in zip(room, _block(number), strict=True))
            for number, room in enumerate(self._rooms)
            if room != _block(number)
        )
        return {
            "bytes_per_s": size_bytes / elapsed_s,
            "wrong_bytes": wrong_bytes,
            "not_read": self._not_read,
        }

    async def _read_all(self) -> None:
        self._idle.clear()
        for number in range(BLOCKS):
            self._ask(number)
        self._take()
        await self._idle.wait()
        if self._gave_up:
            raise RuntimeError("the RDMA link gave up, and there is no TCP here")

    def _ask(self, number: int) -> None:
        room = self._rooms[number]
        room[-1] = room[-1] ^ 0xFF  # so that what is there already is not what was read

        def ended(now: float, outcome: str) -> None:
            self._under_way -= 1
            self._read += outcome == bulk.DONE
            self._not_read += outcome != bulk.DONE
            if outcome == bulk.DONE and time.perf_counter() < self._until:
                self._ask(number)
                self._take()
            elif not self._under_way:
                self._idle.set()

        self._under_way += 1
        block = BlockId(NAMESPACE, _key(number))
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        call = GetCall(HOME, block, 0, deadline, lambda *_: room, ended)
        self._core.outbox.calls.append(call)

    def _take(self) -> None:
        self.calls.take()
        self._look()

    def _look(self) -> None:
        """The link has chosen which calls it makes, or given some back."""
        if self._core.outbox.calls:
            self._gave_up = True
            self._idle.set()


# --- the peer ---------------------------------------------------------------------------------


def ib_read_bw(device: str, gid_index: int, port: int, ip: str, *, events: bool) -> float:
    """Bytes a second by perftest, with READs of a block's length on one queue pair; RuntimeError
    with what it says where it fails."""
    command = ["ib_read_bw", "-d", device, "-x", str(gid_index), "-s", str(BLOCK_BYTES)]
    command += ["-n", "60", "-F", "-p", str(port), *(["-e"] if events else [])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(20):
                time.sleep(0.5)
                done = subprocess.run([*command, ip], capture_output=True, text=True, timeout=90)
                if done.returncode == 0:
                    break
        finally:
            server.kill()
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == str(BLOCK_BYTES):
            return float(words[3]) * (1 << 20)
    raise RuntimeError(f"ib_read_bw: {done.stdout}{done.stderr}")


# --- both -------------------------------------------------------------------------------------


def _process(index: int, ips: Sequence[str]) -> AbstractContextManager[subprocess.Popen[str]]:
    return running("kvcast.bench.rdma", "--side", str(index), "--here", ",".join(ips))


class Report:
    """The figures so far, in a file from the first one on."""

    def __init__(self, promised: Sequence[str], path: Path | None) -> None:
        self.figures: dict[str, Any] = {}
        self._promised = promised
        self._path = path

    def add(self, figures: dict[str, Any]) -> None:
        """Some more, or some anew."""
        self.figures |= figures
        self.figures["missing"] = [name for name in self._promised if name not in self.figures]
        if self._path is not None:
            new = self._path.with_name(f"{self._path.name}.new")
            new.write_text(json.dumps(self.figures, indent=1) + "\n")
            new.rename(self._path)  # whoever reads it meanwhile reads a whole one


def measure(
    ips: Sequence[str], seconds: float, end: float, add: Callable[[dict[str, Any]], None]
) -> None:
    """Both, in turns, until the time `end` (`time.monotonic`) at the latest; the numbers by name,
    after each round."""
    with _process(HOME, ips) as home, _process(READER, ips) as reader:
        port = [hear(side)["port"] for side in (home, reader)][HOME]
        for side in (home, reader):
            tell(side, port)
        for side in (home, reader):
            assert hear(side)["ready"]
        device, gid_index = card_of(ips[HOME])
        reads: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        peers: dict[bool, list[float]] = {False: [], True: []}
        took_s = 0.0
        for number in range(ROUNDS):
            began = time.monotonic()
            if began + took_s > end:
                return
            for checked, rounds in reads.items():
                tell(reader, [seconds, checked])
                rounds.append(hear(reader))
            for events, rates in peers.items():
                rates.append(
                    ib_read_bw(device, gid_index, 18_600 + number, ips[HOME], events=events)
                )
            add(_figures(reads, peers))
            took_s = time.monotonic() - began


def _figures(
    reads: dict[bool, list[dict[str, Any]]], peers: dict[bool, list[float]]
) -> dict[str, Any]:
    ours = {
        checked: max(read["bytes_per_s"] for read in rounds) for checked, rounds in reads.items()
    }
    theirs = {events: max(rates) for events, rates in peers.items()}
    best = max(theirs.values())
    everything = reads[False] + reads[True]
    return {
        "read_over_ib_read_bw": ours[False] / best,
        "checked_read_over_ib_read_bw": ours[True] / best,
        "wrong_bytes": sum(read["wrong_bytes"] for read in everything),
        "not_read": sum(read["not_read"] for read in everything),
        "read_bytes_per_s": ours[False],
        "checked_read_bytes_per_s": ours[True],
        "ib_read_bw_bytes_per_s": theirs[False],
        "ib_read_bw_events_bytes_per_s": theirs[True],
        "digest_bytes_per_s": _digest_bytes_per_s(),
        "block_bytes": BLOCK_BYTES,
        "blocks_at_once": BLOCKS,
        "lone_rounds": len(reads[False]),
    }


def _digest_bytes_per_s() -> float:
    data, start = _block(0), time.perf_counter()
    for _ in range(8):
        digest_of(data)
    return 8 * BLOCK_BYTES / (time.perf_counter() - start)


def _in_machine(bed: rdma_shared.Bed, seconds: float, limit_s: float) -> dict[str, Any]:
    """The same in an emulated machine, where nothing else runs; what it has written by then."""
    network = bed.network
    machine = network.machines[bed.nodes[-1]]
    for ip in _EMULATED:
        machine.run(["ip", "address", "replace", f"{ip}/24", "dev", "eth0"], 20.0)
    path = network.folder / "report.json"
    command = [sys.executable, "-m", "kvcast.bench.rdma", "--here", ",".join(_EMULATED)]
    command += ["--seconds", str(seconds), "--limit", str(0.8 * limit_s), "--json", str(path)]
    problem = ""
    try:
        done = machine.run(command, limit_s, network.environment)
        problem = done.output if done.status else ""
    except NetworkError as error:
        problem = str(error)
    if problem:
        print(f"lone reads: {problem}", file=sys.stderr, flush=True)
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return result | {"card": f"Soft-RoCE ({DEVICE}) in an emulated machine"}


def _measure_in_machines(report: Report, seconds: float, end: float) -> None:
    """Everything, in one boot."""

    def alone(bed: rdma_shared.Bed) -> None:
        result = _in_machine(bed, seconds, end - time.monotonic())
        wrong_bytes = result.get("wrong_bytes")
        if wrong_bytes is not None:
            result["wrong_bytes"] = wrong_bytes + report.figures["shared_wrong_bytes"]
        report.add(result)

    asyncio.run(rdma_shared.measure(end - LONE_S, report.add, alone))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcast.bench.rdma")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of our rounds")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything")
    parser.add_argument("--picture", metavar="FILE", help="draw the shared rounds there, as a PNG")
    parser.add_argument("--here", metavar="HOMEIP,READERIP", help="this machine's card")
    parser.add_argument("--side", type=int, choices=(HOME, READER), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    path = Path(options.json) if options.json else None
    end = time.monotonic() + options.limit
    status = 0
    if options.here is None:
        report = Report(PROMISED, path)
    else:
        report = Report(LONE, path)
        ips = options.here.split(",")
        if options.side is not None:
            asyncio.run(_side(options.side, ips))
            return 0
    try:
        if options.here is None:
            report.add({"provenance": provenance.provenance()})
            _measure_in_machines(report, options.seconds, end)
        else:
            measure(ips, options.seconds, end, report.add)
    except (NetworkError, PoolError, RuntimeError) as error:
        print(error, file=sys.stderr)
        status = 1
    report.add({})
    print(json.dumps(report.figures, indent=1))
    if options.picture and "shared_rounds" in report.figures:
        rdma_picture.draw(report.figures, Path(options.picture))
    if report.figures["missing"]:
        print(f"missing: {', '.join(report.figures['missing'])}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
