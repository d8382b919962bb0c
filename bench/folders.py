"""How long do eight hosts take to fetch a model's files at once, over the time of one?

Owns: the bench of `kvcast load` and `kvcast fetch`, beside rsync. Must not know: how either moves a
byte.

A pool of network namespaces (root) whose links have one rate, at the ports of kvcast's switch. One
node loads a folder of random files; then one other node fetches it, and then N nodes at once fetch
another folder of the same size, through the switch program and through a plain switch. rsync moves
such files from one daemon, through the same ports of the same switch, to one node and to N at once.
Every file is compared with what it should be. The rate must be so low that the links, and not this
machine, are the limit: `processors_busy` says whether they were. With `--within S` the N hosts
begin one after the other within S seconds.

    python -m kvcast.bench.folders --json FILE

Fields: `fetch_n_over_1`, `group_fetch_n_over_1` (hosts that know of each other, `kvcast fetch
--hosts`), `plain_fetch_n_over_1`, `rsync_n_over_1` (times, of the last of N over one alone);
`home_egress_ratio`, `group_home_egress_ratio` (bytes that all homes sent, over the folder's, for
N); `wrong_files`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcast.bench import load
from kvcast.bench.replay import EgressMeter, links_to
from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.models.fetching import Fetcher, find
from kvcast.hostagent.models.loading import Loader, sources
from kvcast.service import provenance
from kvcast.service.commands import CommandError
from kvcast.service.reports import add_json, in_the_making, report_to, say
from kvcast.service.values import parse_size
from kvcast.topologies.namespaces import why_not
from kvcast.topologies.pool import Pool, PoolOptions
from kvcast.topologies.star import MAX_HOSTS, Star

LOADER: Final = 0
"""Index of the host that loads, and that rsync's daemon runs on."""
BLOCK_BYTES: Final = 1 << 20
_RSYNC_PORT: Final = 8873
_RSYNC_CONFIGURATION: Final = """\
use chroot = no
port = {port}
address = {address}
max connections = 0
[folder]
path = {folder}
read only = yes
"""


@dataclass(frozen=True)
class Options:
    """One run."""

    hosts: int
    """That fetch at once."""
    size_bytes: int
    """Of the folder."""
    link_rate: float
    """Bits a second of every link, each way."""
    rounds: int
    within_s: float
    """The hosts that fetch at once begin within so long."""


def make_folder(folder: Path, size_bytes: int) -> None:
    """Files as a model has them: some large ones, some small ones, nothing to compress."""
    folder.mkdir(parents=True)
    large = size_bytes // 4
    for number in range(4):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(large))
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes(os.urandom(2000))


def wrong_files(folder: Path, copy: Path) -> int:
    """How many files of a copy are not as they should be."""
    right = {path.relative_to(folder): path.read_bytes() for path in folder.iterdir()}
    return sum(
        not (copy / name).is_file() or (copy / name).read_bytes() != data
        for name, data in right.items()
    )


class Bench:
    """The pool of one kind of switch, and what is measured on it."""

    def __init__(self, pool: Pool, options: Options, place: Path) -> None:
        self._pool = pool
        self._options = options
        self._place = place
        self._made = 0
        self.wrong = 0

    def _new_folder(self) -> tuple[str, Path]:
        self._made += 1
        name = f"folder-{self._made}"
        make_folder(self._place / name, self._options.size_bytes)
        return name, self._place / name

    async def fetch(self, hosts: int, *, grouped: bool) -> tuple[float, float]:
        """Load a new folder, and have so many hosts fetch it at once: seconds until the last has
        it, and what all homes sent over the folder's size. `grouped`: they know of each other."""
        name, folder = self._new_folder()
        nodes = [host.node_id for host in self._pool.star.hosts]
        sockets = [str(self._pool.sockets[node]) for node in nodes]
        know = nodes[1 : 1 + hosts] if grouped else []
        async with await AsyncClient.connect(sockets[LOADER]) as client:
            namespace = await client.namespace("bench", name, "1", "folder")
            loader = Loader(client, namespace, BLOCK_BYTES)
            await loader.load(sources(folder), name, "1", lambda _: None)
        await asyncio.sleep(1.0)
        async with links_to(list(self._pool.sockets.values())) as links:
            meter = EgressMeter(links)
            before = await meter.read()
            begun = time.monotonic()
            copies = [self._place / f"{name}-{number}" for number in range(hosts)]
            await asyncio.gather(
                *(
                    self._fetch_one(
                        sockets[1 + number],
                        namespace,
                        name,
                        copy,
                        know,
                        self._options.within_s * number / hosts,
                    )
                    for number, copy in enumerate(copies)
                )
            )
            took_s = time.monotonic() - begun
            egress = (await meter.read() - before) / self._options.size_bytes
        self._compare(folder, copies)
        return took_s, egress

    async def _fetch_one(
        self,
        socket: str,
        namespace: int,
        name: str,
        copy: Path,
        know: list[str],
        wait_s: float,
    ) -> None:
        await asyncio.sleep(wait_s)
        async with await AsyncClient.connect(socket) as client:
            manifest, _ = await find(client, namespace, name, "1")
            group = await client.group(namespace, know) if know else 0
            fetcher = Fetcher(client, namespace, manifest, copy, patience_s=60.0, group=group)
            await fetcher.fetch(lambda _size_bytes, _there: None)

    def _compare(self, folder: Path, copies: Sequence[Path]) -> None:
        for copy in copies:
            self.wrong += wrong_files(folder, copy)
            shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(folder)

    async def rsync(self, hosts: int) -> float:
        """Have so many hosts copy a new folder by rsync at once: seconds until the last has it."""
        name, folder = self._new_folder()
        copies = [self._place / f"{name}-{number}" for number in range(hosts)]
        async with self._daemon(folder) as address:
            begun = time.monotonic()
            source = f"rsync://{address}:{_RSYNC_PORT}/folder/"
            copying = [
                await asyncio.create_subprocess_exec(
                    *self._pool.network.prefix(self._pool.star.hosts[1 + number].node_id),
                    *("rsync", "--archive", "--whole-file", "--timeout=60", source, f"{copy}/"),
                )
                for number, copy in enumerate(copies)
            ]
            codes = [await process.wait() for process in copying]
            took_s = time.monotonic() - begun
        if any(codes):
            raise CommandError(f"rsync ended with {codes}")
        self._compare(folder, copies)
        return took_s

    @asynccontextmanager
    async def _daemon(self, folder: Path) -> AsyncIterator[str]:
        host = self._pool.star.hosts[LOADER]
        configuration = self._place / "rsyncd.conf"
        configuration.write_text(
            _RSYNC_CONFIGURATION.format(port=_RSYNC_PORT, address=host.ip, folder=folder)
        )
        process = await asyncio.create_subprocess_exec(
            *self._pool.network.prefix(host.node_id),
            *("rsync", "--daemon", "--no-detach", f"--config={configuration}"),
            stderr=subprocess.DEVNULL,
        )
        try:
            await asyncio.sleep(0.5)
            yield host.ip
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


async def measure(options: Options, report: dict[str, Any]) -> None:
    """Everything, into the report."""
    missing = why_not()
    if missing is not None:
        raise CommandError(missing)
    with tempfile.TemporaryDirectory(prefix="kvcast-folders-") as place:
        for kind, plain in (("group_fetch", False), ("fetch", False), ("plain_fetch", True)):
            pool_options = PoolOptions(
                runner="namespaces",
                plain=plain,
                replicas=0,
                arena_bytes=4 * options.size_bytes + (64 << 20),
                link_rate_bits_per_s=options.link_rate,
            )
            async with Pool(Star.of(options.hosts + 1), pool_options) as pool:
                bench = Bench(pool, options, Path(place))
                async with load.measured(pool) as busy:
                    await _fetches(bench, options, kind, report)
                report[f"{kind}_load"] = busy.report()
                if kind == "fetch" and shutil.which("rsync"):
                    await _rsyncs(bench, options, report)
                report["wrong_files"] = report.get("wrong_files", 0) + bench.wrong
    if "rsync_1_s" not in report:
        report["rsync"] = "not installed: left out"


async def _fetches(bench: Bench, options: Options, kind: str, report: dict[str, Any]) -> None:
    for number in range(options.rounds):
        for hosts, which in ((1, "1"), (options.hosts, "n")):
            say(f"{kind}, {hosts} hosts, round {number + 1} of {options.rounds}")
            took_s, egress = await bench.fetch(hosts, grouped=kind == "group_fetch")
            report.setdefault(f"{kind}_{which}_s", []).append(took_s)
            report.setdefault(f"{kind}_{which}_egress", []).append(egress)


async def _rsyncs(bench: Bench, options: Options, report: dict[str, Any]) -> None:
    for number in range(options.rounds):
        for hosts, which in ((1, "1"), (options.hosts, "n")):
            say(f"rsync, {hosts} hosts, round {number + 1} of {options.rounds}")
            report.setdefault(f"rsync_{which}_s", []).append(await bench.rsync(hosts))


def conclude(report: dict[str, Any]) -> None:
    """The fields of the module's text, from medians of the rounds."""
    for kind in ("group_fetch", "fetch", "plain_fetch", "rsync"):
        if f"{kind}_1_s" in report:
            one, many = (sorted(report[f"{kind}_{which}_s"]) for which in "1n")
            report[f"{kind}_n_over_1"] = many[len(many) // 2] / one[len(one) // 2]
    for way in ("group_", ""):
        egress = sorted(report[f"{way}fetch_n_egress"])
        report[f"{way}home_egress_ratio"] = egress[len(egress) // 2]
    report["processors_busy"] = report["fetch_load"]["processors_busy"]


def show(report: dict[str, Any]) -> None:
    for kind, text in (
        ("group_fetch", "kvcast fetch --hosts"),
        ("fetch", "kvcast fetch"),
        ("plain_fetch", "kvcast fetch, plain switch"),
        ("rsync", "rsync"),
    ):
        if f"{kind}_n_over_1" in report:
            one, many = (sorted(report[f"{kind}_{which}_s"]) for which in "1n")
            print(
                f"{text:27} one host {one[len(one) // 2]:6.2f} s,"
                f" {report['hosts']} at once {many[len(many) // 2]:6.2f} s:"
                f" {report[f'{kind}_n_over_1']:.2f} times"
            )
    print(
        f"home egress ratio {report['group_home_egress_ratio']:.3f} with --hosts, else"
        f" {report['home_egress_ratio']:.3f}; wrong files {report['wrong_files']};"
        f" processors busy {report['processors_busy']:.0%}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvcast.bench.folders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_json(parser)
    parser.add_argument("--hosts", type=int, default=8, help="that fetch at once (%(default)s)")
    parser.add_argument(
        "--size", type=parse_size, default=16 << 20, metavar="SIZE", help="of a folder (16MiB)"
    )
    parser.add_argument(
        "--link-rate", type=float, default=50e6, help="bits/s of a link (%(default)g)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--within", type=float, default=0.0, metavar="S", help="seconds to begin in (%(default)g)"
    )
    given = parser.parse_args(arguments)
    if not 1 <= given.hosts < MAX_HOSTS or given.size < 4 * BLOCK_BYTES or given.rounds < 1:
        parser.error(f"1 to {MAX_HOSTS - 1} hosts, at least 4MiB, and at least one round")
    options = Options(given.hosts, given.size, given.link_rate, given.rounds, given.within)
    try:
        with in_the_making(given.json) as report:
            report |= {"provenance": provenance.provenance(), **vars(options)}
            asyncio.run(measure(options, report))
            conclude(report)
    except CommandError as error:
        print(f"kvcast: {error}", file=sys.stderr)
        return 1
    report_to(given.json, report, show)
    return int(report["wrong_files"] > 0)


if __name__ == "__main__":
    sys.exit(main())
