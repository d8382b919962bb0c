"""Incast on a whole pool of processes: N nodes read the same blocks at the same moment.

Oracle: the home's own count of what it sent, bytes that follow from keys, and what frames take on
a wire. Cannot see: how long anything takes on other machines; no test asserts that it is fast, only
that no emulated link is faster than its rate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from kvcast.bench import incast
from kvcast.bench.incast import IncastOptions, run
from kvcast.bench.replay import NodeLink
from kvcast.protocol.messages.wire import CHUNK_BYTES
from kvcast.topologies.pool import DATA_FRAME_BYTES, PoolError

pytestmark = pytest.mark.in_step  # it measures what processes do at once


async def test_each_byte_leaves_its_home_once_and_n_times_through_a_plain_switch(
    tmp_path: Path,
) -> None:
    report = await run(IncastOptions(readers=3, blocks=3, run_dir=tmp_path))
    assert report["home_egress_ratio"] <= 1.10
    assert report["plain_home_egress_ratio"] >= 2.9
    assert report["gets"] == 9
    assert report["misses"] == 0
    assert report["wrong_bytes"] == 0
    assert report["hits"]["shared"] == 9
    assert set(report["fetch_ms"]) == {"kvcast", "plain"}
    assert {"p50", "p99", "max"} == set(report["fetch_ms"]["kvcast"])
    decisions = report["runs"]["kvcast"]["switch"]["decisions"]
    assert decisions["new"] >= 3
    assert decisions["join"] + decisions["new"] >= 9
    assert report["commit"]
    assert report["machine"]["cores"] >= 1


async def test_lost_frames_cost_only_their_repeats(tmp_path: Path) -> None:
    report = await run(IncastOptions(readers=3, blocks=12, loss=0.01, seed=5, run_dir=tmp_path))
    assert report["misses"] == 0
    assert report["wrong_bytes"] == 0
    assert 1.0 <= report["home_egress_ratio"] <= 1.35
    assert report["runs"]["plain"]["misses"] == 0


async def test_links_of_a_rate_carry_no_more_in_either_direction(tmp_path: Path) -> None:
    """The home's way out carries both readers' copies, one after the other; each reader's way in
    one copy. Both by the same rate, so the plain readers cannot both be done before two copies'
    time, and nobody before one's."""
    rate, blocks, size = 5e6, 2, 128 * 1024
    options = IncastOptions(
        readers=2, blocks=blocks, block_bytes=size, link_rate=rate, run_dir=tmp_path
    )
    report = await run(options)
    copy_ms = 1e3 * blocks * size / CHUNK_BYTES * DATA_FRAME_BYTES * 8 / rate
    assert report["fetch_ms"]["one_reader"]["max"] >= copy_ms
    assert report["fetch_ms"]["kvcast"]["p50"] >= copy_ms
    assert report["fetch_ms"]["plain"]["max"] >= 2 * copy_ms
    assert report["misses"] == report["wrong_bytes"] == 0
    stats = json.loads((tmp_path / "plain" / "switch-stats.json").read_text())
    assert stats["ports"]["1"]["rx_bytes"] >= 2 * blocks * size  # all of it came over the link


async def test_a_resident_block_is_served_while_its_home_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[tuple[object, list[bytes]]] = []
    read_before = incast._read_before

    async def noted(link: NodeLink, namespace: int, keys: list[bytes], options: Any) -> None:
        before.append((link, keys))
        await read_before(link, namespace, keys, options)

    monkeypatch.setattr(incast, "_read_before", noted)
    report = await run(IncastOptions(readers=2, blocks=2, resident=True, run_dir=tmp_path))
    (_, measured), *firsts = before
    assert len(measured) == 2, "one node fills the switch"
    assert len({link for link, _ in firsts}) == len(firsts) == 2, "and each reader has read before"
    assert all(len(keys) == 1 and not set(keys) & set(measured) for _, keys in firsts)
    assert report["home_egress_bytes"] == 0
    assert report["home_egress_ratio"] == 0
    assert report["hits"]["switch"] == report["gets"] == 4
    assert report["misses"] == 0
    assert report["wrong_bytes"] == 0


async def test_of_blocks_of_which_the_switch_holds_a_part_the_home_sends_the_others(
    tmp_path: Path,
) -> None:
    options = IncastOptions(
        readers=3, blocks=9, resident=True, resident_part=1 / 3, queue=512, run_dir=tmp_path
    )
    report = await run(options)
    assert report["misses"] == report["wrong_bytes"] == 0
    assert report["hits"]["switch"] == 3 * 3
    assert report["distinct_bytes"] == 6 * options.block_bytes
    assert report["home_egress_bytes"] >= report["distinct_bytes"]
    assert report["parameters"]["queue_frames"] == 512


async def test_a_read_that_is_not_measured_has_to_bring_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(*_: object) -> list[None]:
        return [None]

    monkeypatch.setattr(incast, "_get", nothing)
    with pytest.raises(PoolError, match="before the one that is measured failed"):
        await incast._read_before(cast(NodeLink, None), 1, [bytes(16)], IncastOptions())


def test_readers_of_what_the_switch_holds_are_not_gathered_unless_that_is_asked_for() -> None:
    assert IncastOptions(resident=True).gather_allowed_ms == 0
    assert IncastOptions(resident=True, gather_ms=30).gather_allowed_ms == 30
    assert IncastOptions(resident=True, resident_part=0.5).gather_allowed_ms == 100
    assert IncastOptions(readers=8).gather_allowed_ms == 100


@pytest.mark.parametrize(("queue", "flags"), [(0, ()), (512, ("--queue-depth=512",))])
def test_the_switch_is_told_how_long_its_queues_are(queue: int, flags: tuple[str, ...]) -> None:
    assert incast._pool(IncastOptions(queue=queue), 2, "one").options.switch_flags == flags


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"readers": 0}, "1 to 31"),
        ({"readers": 32}, "1 to 31"),
        ({"readers": 31, "resident": True}, "1 to 30"),
        ({"blocks": 0}, "blocks"),
        ({"gather_ms": 256}, "gather"),
        ({"block_bytes": 0}, "256 MiB"),
        ({"rounds": 0}, "round"),
        ({"rounds": 2, "resident": True}, "one round"),
        ({"resident_part": 1.1, "resident": True}, "0 to 1"),
        ({"resident_part": 0.5}, "resident question only"),
        ({"queue": -1}, "queue"),
        ({"queue": 9, "switch": "bmv2"}, "queues"),
    ],
)
def test_impossible_incasts_are_refused(wrong: dict[str, int], complaint: str) -> None:
    with pytest.raises(PoolError, match=complaint):
        IncastOptions(**wrong)  # type: ignore[arg-type]


async def test_bmv2_without_interfaces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="namespaces or mininet"):
        await run(IncastOptions(readers=2, switch="bmv2", run_dir=tmp_path))
