"""What a pool decides before it starts anything, and what it clears up of earlier ones.

Oracle: the options' own descriptions. Cannot see: a pool at work (tests/integration/test_pool_*).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvcast.topologies.pool import (
    DATA_FRAME_BYTES,
    Pool,
    PoolError,
    PoolOptions,
    arena_folder,
    find_simple_switch,
    patience_flags,
    remove_leftovers,
    what_is_missing,
)
from kvcast.topologies.star import Star


def _dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_what_a_killed_pool_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    here = os.stat("/proc/self/ns/pid").st_ino
    dead, alive = f"{here}-{_dead_pid()}", f"{here}-{os.getpid()}"
    elsewhere = f"{here + 1}-{_dead_pid()}"  # another container's: it may well live
    gone = [f"kvcast-run-{dead}-ab_1", f"kvcast-s-{dead}-xyz", f"kvcast-s-{dead}-q-node-1.arena"]
    gone.append(f"{gone[-1]}.index")
    stays = [
        f"kvcast-run-{alive}-ab_1",
        f"kvcast-s-{alive}-xyz-node-1.arena",
        f"kvcast-run-{elsewhere}-ab_1",
        f"kvcast-{dead}-mine",
        f"kvcast-s-{dead}",
        "kvcast-notes",
    ]
    for name in (*gone, *stays):
        if name.endswith(".arena"):
            (tmp_path / name).write_bytes(b"x")
        else:
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_bytes(b"x")
    remove_leftovers(tmp_path, tmp_path / "no such folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)


def test_arenas_go_where_all_of_them_fit_or_are_refused(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    too_much = status.f_blocks * status.f_frsize + 1
    assert arena_folder(1 << 20, tmp_path / "none", tmp_path) == tmp_path
    with pytest.raises(PoolError, match=r"no room .*none cannot be written, .* has \d+ MiB"):
        arena_folder(too_much, tmp_path / "none", tmp_path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (PoolOptions(switch="bmv2"), "needs network interfaces"),
        (PoolOptions(switch="bmv2", runner="namespaces", loss=0.1), "neither loss"),
        (PoolOptions(switch="bmv2", runner="namespaces", switch_flags=("--x",)), "neither loss"),
        (PoolOptions(switch="bmv2", runner="namespaces", link_rate_bits_per_s=1e6), "no rate"),
        (PoolOptions(link_rate_bits_per_s=-1.0), "no such rate"),
        (PoolOptions(link_rate_bits_per_s=float("nan")), "no such rate"),
        (PoolOptions(loss=1.0), "no probability"),
        (PoolOptions(loss=-0.1), "no probability"),
    ],
)
async def test_options_that_contradict_each_other_start_nothing(
    options: PoolOptions, complaint: str
) -> None:
    pool = Pool(Star.of(2), options)
    with pytest.raises(PoolError, match=complaint):
        async with pool:
            pass
    assert pool.parts == {}


async def test_bmv2_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCAST_SIMPLE_SWITCH_GRPC", "/no/such/simple_switch_grpc")
    assert find_simple_switch() is None
    with pytest.raises(PoolError, match="KVCAST_SIMPLE_SWITCH_GRPC does not name it"):
        async with Pool(Star.of(2), PoolOptions(switch="bmv2", runner="namespaces")):
            pass


@pytest.mark.slow
async def test_a_part_that_cannot_start_ends_the_others_and_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(Star.of(2), PoolOptions(controller_flags=("--no-such-flag",)), tmp_path)
    with pytest.raises(PoolError, match=r"(?s)controller: ended before it was ready.*no-such-flag"):
        async with pool:
            pass
    assert pool.parts["switch"].starts == 1
    assert all(pid is None for pid in pool.pids.values())


def _node(name: str, **facts: bool) -> dict[str, object]:
    return {
        "node_id": name,
        **({"alive": True, "connected": True, "placed": True, "programmed": True} | facts),
    }


@pytest.mark.parametrize(
    ("nodes", "missing"),
    [
        ([_node("a"), _node("b")], ""),
        ([_node("a")], "the registration of b"),
        ([_node("a", programmed=False), _node("b")], "a to be programmed"),
        ([_node("a"), _node("b", alive=False)], "b to be alive"),
        ([_node("a"), _node("b"), _node("c", alive=False)], ""),
    ],
)
def test_a_pool_is_ready_when_every_node_it_wants_is(
    nodes: list[dict[str, object]], missing: str
) -> None:
    assert what_is_missing({"nodes": nodes}, {"a", "b"}) == missing


async def test_a_rate_of_links_reaches_the_switch_both_ways_and_every_agent(
    tmp_path: Path,
) -> None:
    """No agent starts: only the commands are looked at."""
    flags = ("--no-such-flag",)
    pool = Pool(
        Star.of(2), PoolOptions(link_rate_bits_per_s=10e6, controller_flags=flags), tmp_path
    )
    with pytest.raises(PoolError, match="no-such-flag"):
        async with pool:
            pass
    assert {"--port-rate=1e+07", "--uplink-rate=1e+07"} <= set(pool.parts["switch"].command)
    assert "nice" not in pool.parts["switch"].command  # it is the links' clock
    for node in ("node-1", "node-2"):
        command = pool.parts[node].command
        (pace,) = (word for word in command if word.startswith("--responder-rate="))
        assert float(pace.partition("=")[2]) * 8 * DATA_FRAME_BYTES == pytest.approx(10e6, rel=1e-3)


def test_slow_links_make_nodes_more_patient() -> None:
    for slow, fast in zip(patience_flags(8, 1e6), patience_flags(8, 10e6), strict=True):
        assert float(slow.partition("=")[2]) > float(fast.partition("=")[2]) > 0.15


def test_more_nodes_on_one_machine_are_more_patient() -> None:
    def seconds(nodes: int) -> list[float]:
        return [float(flag.partition("=")[2]) for flag in patience_flags(nodes)]

    assert all(few <= many for few, many in zip(seconds(2), seconds(31), strict=True))
    assert seconds(2) != seconds(31)


def test_commands_name_every_port_and_tell_the_agents_the_switchs_end() -> None:
    pool = Pool(Star.of(3), PoolOptions(loss=0.01, plain=True))
    switch = pool._switch_command()
    assert [word for word in switch if word.startswith("--port=")] == [
        f"--port={i}=udp:127.0.0.1:{20000 + i}:127.0.0.1:{21000 + i}" for i in (1, 2, 3)
    ]
    assert "--loss=0.01" in switch
    assert "--plain" in pool._controller_command()


async def test_two_pools_do_not_share_a_folder(tmp_path: Path) -> None:
    first = Pool(Star.of(1), PoolOptions(), tmp_path)
    first._make_folders()
    log = tmp_path / "switch.log"
    log.write_text("of the first")
    with pytest.raises(PoolError, match="another pool runs there"):
        async with Pool(Star.of(1), PoolOptions(), tmp_path):
            pass
    assert log.read_text() == "of the first"
    first._close_now()
    second = Pool(Star.of(1), PoolOptions(), tmp_path)
    second._make_folders()
    second._close_now()
