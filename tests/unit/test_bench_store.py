"""The store bench without stores: what is counted, what is compared, and what a failing peer does.

Oracle: figures computed by hand, and a store in memory that errs as it is told. Cannot see: real
stores, which tests/integration/test_pool_store_bench.py starts.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kvcast.bench import store as bench
from kvcast.bench.store import Case, Comparison, Figures, StoreOptions, summary, table
from kvcast.bench.stores import links
from kvcast.bench.stores.client import LOCAL, REMOTE, Memory, StoreClient, StoreError
from kvcast.bench.stores.links import STAR
from kvcast.bench.stores.process import WorkerProcess
from kvcast.bench.stores.worker import Worker
from kvcast.service.commands import CommandError

KIB, MIB = 1 << 10, 1 << 20
GET = Case("get", 64 * KIB, 1, 3)


class Dictionary(StoreClient):
    """A store in a dictionary; `options` say what goes wrong."""

    blocks: dict[bytes, bytes] = {}  # noqa: RUF012 - one for all clients

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.options = options

    def putter(self, key: bytes, data: bytes, where: Any, *, local: bool) -> Callable[[], None]:
        data = data[:-1] + bytes([data[-1] ^ 1]) if self.options.get("wrong") else data
        return lambda: None if self.options.get("forgets") else self.blocks.update({key: data})

    def placer(self, key: bytes, data: bytes) -> Callable[[], None]:
        return self.putter(key, data, {}, local=False)

    def getter(
        self, keys: Sequence[bytes], size_bytes: int, where: Any
    ) -> Callable[[], list[bytes | None]]:
        return lambda: [self.blocks.get(key) for key in keys]

    def asker(self, keys: Sequence[bytes]) -> Callable[[], int]:
        return lambda: sum(key in self.blocks for key in keys)

    def origins(self) -> set[str]:
        return {self.options.get("origin", REMOTE)}

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def close(self) -> None:
        pass


class InProcess:
    """A worker without a process."""

    def __init__(self, **options: Any) -> None:
        self.worker = Worker()
        self.worker.answer(
            json.dumps({"do": "open", "client": "test_bench_store:Dictionary", "options": options})
        )

    async def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        told = self.worker.answer(json.dumps({"do": what, **arguments}))
        if "error" in told:
            raise StoreError(told["error"])
        return told


class FakeStore:
    """What `Comparison` needs of a store."""

    HAS_LOCAL = HAS_EXISTS = HAS_PLACE = True

    def __init__(self, name: str, **options: Any) -> None:
        self.NAME = name
        self.holder = InProcess(**options)
        self.readers = [InProcess(**options) for _ in range(2)]
        self.stopped = False

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    async def stop(self) -> None:
        self.stopped = True


def _comparison(*stores: FakeStore) -> tuple[Comparison, dict[str, str]]:
    Dictionary.blocks.clear()
    skipped: dict[str, str] = {}
    pool: Any = SimpleNamespace(star=STAR, pids=dict.fromkeys(("node-1", "node-2")))
    made: list[Any] = list(stores)
    return Comparison(made, pool, skipped), skipped


async def test_a_store_may_take_processor_time_in_its_own_turns_alone() -> None:
    stores = [FakeStore("kvcast", origin=REMOTE), FakeStore("redis", origin=REMOTE)]
    comparison, _ = _comparison(*stores)
    running: set[str] = set()
    for store in stores:

        def resume(name: str = store.NAME) -> None:
            assert not running
            running.add(name)

        store.resume, store.pause = resume, running.clear  # type: ignore[method-assign]
    await comparison.measure(GET, rounds=2)
    assert not running
    assert all(len(figures.seconds) == 4 for figures in comparison.figures[GET].values())


@pytest.mark.parametrize(
    ("there", "parts"),
    [({0}, None), ({0, 1}, ([0], [1])), ({1, 3, 4, 6, 9}, ([1, 3], [4, 6, 9]))],
    ids=["one", "two", "five"],
)
def test_each_side_has_processors_of_its_own(
    there: set[int], parts: tuple[list[int], list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: there)
    assert links.halves() == parts
    link = links.LoopbackLink(links.halves())
    bound = [link.prefix(part) for part in ("node-1", "node-2", "controller")]
    if parts is None:
        assert bound == [[], [], []]
    else:
        near, far = (",".join(map(str, numbers)) for numbers in parts)
        assert [words[-1] for words in bound] == [near, far, far]
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert links.halves() is None


@pytest.mark.parametrize("case", bench.cases(2, quick=True), ids=lambda case: case.name)
async def test_every_case_counts_its_timed_calls_and_leaves_nothing_behind(case: Case) -> None:
    case = replace(case, size_bytes=min(case.size_bytes, 64 * KIB))  # what counts is that it counts
    origin = LOCAL if case.is_local else REMOTE
    comparison, skipped = _comparison(FakeStore("kvcast", origin=origin))
    await comparison.measure(case, rounds=2)
    figures = comparison.figures[case]["kvcast"]
    calls = case.units - 1 if case.clients == 1 else case.units * case.clients
    assert len(figures.seconds) == 2 * calls
    assert (figures.wrong_bytes, figures.misses, skipped) == (0, 0, {})
    if case.kind == "exists" or case.is_local:
        assert figures.moved_bytes == 0
    else:
        assert figures.moved_bytes == 2 * calls * case.keys * case.size_bytes
    assert Dictionary.blocks == {}


async def test_what_a_byte_costs_who_serves_it_is_the_homes_agent_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = {1: 0.0, 2: 0.0}  # of the reader's agent and the home's: both grow at each look

    def processor_time_s(pid: int) -> float:
        used[pid] += {1: 3e-6, 2: 1e-6}[pid]
        return used[pid]

    monkeypatch.setattr(bench, "processor_time_s", processor_time_s)
    monkeypatch.setattr(bench, "SIZES", (KIB, 64 * KIB))
    comparison, _ = _comparison(FakeStore("kvcast"), FakeStore("redis"))
    pool: Any = comparison._pool
    pool.pids = {"node-1": 1, "node-2": 2}
    for case in (Case("get", 64 * KIB, 1, 3), Case("get", KIB, 2, 3)):
        await comparison.measure(case, rounds=1)
    assert summary(comparison.figures)["serve_cpu_ns_per_byte"] is None
    await comparison.measure(Case("get", 64 * KIB, 2, 3), rounds=1)
    report = summary(comparison.figures)
    assert report["serve_cpu_ns_per_byte"] == pytest.approx(1e3 / (6 * 64 * KIB), rel=0.05)
    told = next(one for one in report["figures"] if "home_processor_ns_per_byte" in one)
    assert told["agents_processor_ns_per_byte"] == pytest.approx(
        4 * told["home_processor_ns_per_byte"], rel=0.2
    )


@pytest.mark.parametrize("operation", ["put", "put in place", "get"])
@pytest.mark.parametrize("clients", [1, 2])
async def test_every_wrong_byte_of_a_put_or_get_is_counted(operation: str, clients: int) -> None:
    case = Case(operation, 64 * KIB, clients, 3)
    comparison, _ = _comparison(FakeStore("kvcast"), FakeStore("redis", wrong=True))
    await comparison.measure(case, rounds=1)
    assert comparison.figures[case]["kvcast"].wrong_bytes == 0
    assert comparison.figures[case]["redis"].wrong_bytes == 3 * clients
    assert summary(comparison.figures)["wrong_bytes"] == 3 * clients


@pytest.mark.parametrize("case", [GET, Case("put", KIB, 2, 3), Case("exists", 64, 1, 2, 10)])
async def test_what_is_missing_is_counted_and_its_turn_has_no_times(case: Case) -> None:
    comparison, _ = _comparison(FakeStore("kvcast", forgets=True))
    await comparison.measure(case, rounds=1)
    figures = comparison.figures[case]["kvcast"]
    assert figures.misses == case.units * case.clients * case.keys
    assert figures.seconds == []
    report = summary(comparison.figures)
    assert report["misses"] == figures.misses
    assert "nothing came" in table(report | {"skipped": {}})


async def test_a_remote_get_from_local_memory_ends_the_bench_and_skips_a_peer() -> None:
    comparison, _ = _comparison(FakeStore("kvcast", origin=LOCAL))
    with pytest.raises(CommandError, match="kvcast answered from local memory"):
        await comparison.measure(GET, rounds=1)
    peer = FakeStore("redis", origin=LOCAL)
    comparison, skipped = _comparison(FakeStore("kvcast"), peer)
    await comparison.measure(GET, rounds=2)
    assert skipped == {"redis": "failed at get 64 KiB: redis answered from local memory"}
    assert peer.stopped
    assert len(comparison.figures[GET]["kvcast"].seconds) == 4


def test_ratios_are_of_medians_over_the_fastest_peer_with_one_client() -> None:
    figures: Any = defaultdict(lambda: defaultdict(Figures))
    two = Case("get", 2 * MIB, 1, 3)
    figures[two]["kvcast"].seconds = [3.0, 9.0, 4.0]
    figures[two]["redis"].seconds = [8.0]
    figures[two]["nixl"].seconds = [2.0, 1.0, 90.0]
    figures[Case("get", 2 * MIB, 8, 3)]["nixl"].seconds = [0.1]
    for size_bytes, seconds in ((64 * KIB, 10e-6), (2 * MIB, 30e-6), (16 * MIB, 20e-6)):
        figures[Case("local get", size_bytes, 1, 3)]["kvcast"].seconds = [seconds]
    report = summary(figures)
    assert report["remote_2m_over_best_peer"] == 2.0
    assert report["over_each_peer"]["remote_2m"] == {"redis": 0.5, "nixl": 2.0}
    assert report["remote_16m_over_best_peer"] is None
    assert report["local_get_us"] == 30.0
    assert "2.00" in table(report | {"skipped": {"mooncake": "no"}})


def test_a_worker_tells_what_its_store_raised_and_goes_on() -> None:
    worker = Worker()
    get = {"kind": "get", "size_bytes": 8, "units": [["00" * 16]], "where": {}}
    assert worker.answer(json.dumps({"do": "turn", **get})) == {"error": "no store is open"}
    opened = InProcess().worker
    lacking = opened.answer(json.dumps({"do": "turn", **get, "kind": "exists", "units": [["0"]]}))
    assert lacking["error"].startswith("ValueError: ")
    assert opened.answer(json.dumps({"do": "turn", **get}))["missing"] == 1


def test_registered_memory_ends() -> None:
    memory = Memory(4096)
    assert [memory.take(1000), memory.take(3096)] == [0, 1000]
    with pytest.raises(StoreError, match="do not fit"):
        memory.take(1)
    memory.take_back()
    assert memory.take(4096) == 0


async def test_a_worker_process_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    worker = WorkerProcess("redis 1", [], {}, tmp_path / "log")
    await worker.start()
    try:
        with pytest.raises(StoreError, match=r"redis 1: open: .*nowhere"):
            await worker.ask("open", client="nowhere:Client", options={})
        worker.resume()
        assert worker._process is not None
        worker._process.kill()
        (tmp_path / "log").write_text("the library aborted\n")
        with pytest.raises(StoreError, match=r"redis 1: ended at drop.*the library aborted"):
            await worker.ask("drop", keys=[])
    finally:
        await worker.stop()


@pytest.mark.parametrize("options", [{"rounds": 0}, {"clients": 1}, {"clients": 17}])
def test_what_cannot_be_measured_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(CommandError):
        StoreOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_read_path_is_measured_where_it_is_there_and_fails_with_wrong_blocks(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    measured = {"read_path_over_bare": 0.61234, "wrong_blocks": wrong, "missed": 0}
    fake: Any = ModuleType("kvcast.bench.read_path")
    fake.Settings = lambda **settings: settings
    fake.measure = lambda settings: measured | settings
    monkeypatch.setitem(sys.modules, "kvcast.bench.read_path", fake)
    report: dict[str, Any] = {}
    with pytest.raises(CommandError, match="1 wrong blocks") if wrong else nullcontext():
        bench._read_path(report, {}, quick=True)
    assert report == {"read_path_over_bare": 0.612, "read_path": measured | {"seconds": 0.3}}


def test_a_read_path_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr(bench.importlib, "import_module", absent)
    report: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    bench._read_path(report, skipped, quick=True)
    assert report == {}
    assert skipped == {"read_path_over_bare": "kvcast.bench.read_path is not there"}
