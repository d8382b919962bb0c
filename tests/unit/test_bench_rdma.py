"""What `kvcast.bench.rdma` writes down of a run that was cut off. Rounds here are made up: what is
measured needs emulated machines."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvcast.bench import rdma, rdma_picture, rdma_shared
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network.cards import Cards
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.links.bulk import GetCall
from kvcast.protocol.links.rdma import RdmaOptions
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.wire import digest_of


def made_up(egress: float, cpu: float) -> dict[str, float]:
    names = ("wrong_bytes", "missed", "blocks", "blocks_by_rdma", "icrc_dropped")
    times = ("agent", "agent_busy", "machine", "processor")
    return (
        dict.fromkeys(names, 0.0)
        | {f"{name}_s_per_byte": cpu for name in times}
        | {"home_egress_ratio": egress}
    )


def test_a_report_is_there_after_each_part_and_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = rdma.Report(["one", "two"], path)
    report.add({"one": 1})
    assert json.loads(path.read_text()) == {"one": 1, "missing": ["two"]}
    report.add({"one": 3, "two": 2})
    assert json.loads(path.read_text()) == {"one": 3, "two": 2, "missing": []}
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_figures_need_the_rounds_that_they_are_made_of_and_no_others() -> None:
    rounds = {"2 by RDMA": made_up(1.0, 1.0)}
    assert not set(rdma_shared.figures(rounds)) & set(rdma_shared.PROMISED)
    rounds["3 by RDMA"] = made_up(1.25, 1.0)
    assert rdma_shared.figures(rounds)["shared_home_egress_ratio"] == 1.25
    rounds["long 0 by RDMA"] = made_up(1.0, 3.0)
    assert "reader_cpu_over_udp" not in rdma_shared.figures(rounds)
    rounds["long 0 by DATA"] = made_up(1.0, 8.0)
    rounds["long 1 by RDMA"] = made_up(1.0, 2.0)
    assert rdma_shared.figures(rounds)["reader_cpu_over_udp"] == 0.25
    rounds["bare 0, counted"] = made_up(1.0, 1.0)
    rounds["bare 0, checked"], rounds["bare 1, checked"] = made_up(1.0, 4.0), made_up(1.0, 2.0)
    assert rdma_shared.figures(rounds)["reader_cpu_bare_counted_over_udp"] == 0.125
    assert rdma_shared.figures(rounds)["reader_cpu_bare_checked_over_udp"] == 0.25
    rounds["3 with loss"] = made_up(1.5, 1.0)
    assert set(rdma_shared.PROMISED) <= set(rdma_shared.figures(rounds))


def test_the_picture_shows_the_rounds_that_there_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "rdma.png"
    rounds = {name: made_up(1.0, 1e-8) for name in ("1 by RDMA", "2 by RDMA", "1 by plain TCP")}
    rdma_picture.draw({"shared_rounds": rounds}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def reader() -> AgentCore:
    size_bytes = 2 * rdma.BLOCKS * rdma.BLOCK_BYTES
    store = Store(Allocator(size_bytes, rdma.SLAB_BYTES))
    memory = memoryview(bytearray(size_bytes))
    return AgentCore(AgentOptions("node-1"), store, memory, random.Random(1))


class Calls:
    """Makes some calls and gives up: then it leaves what it is given, or gives back what is under
    way and says so (`says`), as `RdmaCalls` does."""

    says = False
    enough = rdma.BLOCKS + 2

    def __init__(self, core: AgentCore, _options: Any, _cards: Any, told: Callable[[], None]):
        self._calls, self._told = core.outbox.calls, told
        self.made = 0

    def take(self) -> None:
        if self.made < self.enough or self.says:
            taken = [call for call in self._calls if isinstance(call, GetCall)]
            self._calls.clear()
            asyncio.get_running_loop().call_soon(self._end, taken)

    def _end(self, taken: list[GetCall]) -> None:
        for call in taken:
            if self.made < self.enough:
                self.made += 1
                call.ended(0.0, bulk.DONE)
            else:
                self._calls.append(call)
        self._told()


@pytest.mark.parametrize("says", [False, True])
async def test_lone_reads_end_with_an_error_where_the_link_gives_up_later(
    monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    monkeypatch.setattr(Calls, "says", says)
    monkeypatch.setattr(rdma, "RdmaCalls", Calls)
    core = reader()
    reads = rdma.Reads(core, RdmaOptions(), Cards([]))
    async with asyncio.timeout(10.0):
        with pytest.raises(RuntimeError, match="gave up"):
            await reads.read(1.0)
    assert reads.calls.made == Calls.enough  # in the middle of the round that counts


def test_lone_reads_can_be_made_without_digests() -> None:
    """The link has them made by what is replaced, and knows no difference."""
    core = reader()
    reads = rdma.Reads(core, RdmaOptions(), Cards([]))
    block = rdma._block(1)
    wrong = memoryview(block[:16] + bytes(rdma.BLOCK_BYTES - 16))
    said: list[list[int]] = []
    for _ in range(2):
        with rdma.without_digests(core):
            reads.calls._link._make_digests(
                0.0, [wrong, memoryview(bytes(20))], lambda _now, digests: said.append(digests)
            )
    assert said == [[digest_of(block), 0]] * 2
    reads.calls._link._make_digests(0.0, [wrong], lambda _now, digests: said.append(digests))
    assert said[2] == [digest_of(wrong)]
