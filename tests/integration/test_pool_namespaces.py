"""The same incast over veth pairs in network namespaces, on switchsim, BMv2, and in Mininet.

Oracle: as test_pool_incast.py; and the list of namespaces, of which none may remain.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvcast.bench.incast import IncastOptions, run
from kvcast.topologies import mininet_bmv2, namespaces
from kvcast.topologies.namespaces import NamespaceNetwork
from kvcast.topologies.pool import Runner, Switch, find_simple_switch
from kvcast.topologies.star import Star

pytestmark = [
    pytest.mark.in_step,  # it measures what processes do at once
    pytest.mark.root,
    pytest.mark.skipif(
        namespaces.why_not() is not None, reason=namespaces.why_not() or "can be made"
    ),
]
_NO_BMV2 = "simple_switch_grpc is neither on the PATH nor named by KVCAST_SIMPLE_SWITCH_GRPC"
_NO_MININET = None if os.geteuid() != 0 else mininet_bmv2.why_not()


def _namespaces_of_this_process() -> list[str]:
    folder = namespaces.NETNS_FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [name for name in names if name.startswith(f"kvc{os.getpid()}x")]


async def _incast(tmp_path: Path, runner: Runner, switch: Switch, readers: int) -> None:
    report = await run(
        IncastOptions(readers=readers, blocks=2, runner=runner, switch=switch, run_dir=tmp_path)
    )
    assert report["home_egress_ratio"] <= 1.10
    assert report["plain_home_egress_ratio"] >= readers - 0.1
    assert report["wrong_bytes"] == 0
    assert report["misses"] == 0
    assert _namespaces_of_this_process() == []


async def test_each_byte_leaves_its_home_once_over_veth_pairs(tmp_path: Path) -> None:
    await _incast(tmp_path, "namespaces", "switchsim", 3)


@pytest.mark.bmv2
@pytest.mark.skipif(find_simple_switch() is None, reason=_NO_BMV2)
async def test_each_byte_leaves_its_home_once_on_bmv2(tmp_path: Path) -> None:
    await _incast(tmp_path, "namespaces", "bmv2", 4)


@pytest.mark.bmv2
@pytest.mark.skipif(find_simple_switch() is None, reason=_NO_BMV2)
@pytest.mark.skipif(_NO_MININET is not None, reason=_NO_MININET or "Mininet is here")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Mininet leaves its shells' pipes open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_each_byte_leaves_its_home_once_in_mininet(tmp_path: Path) -> None:
    await _incast(tmp_path, "mininet", "bmv2", 2)


def test_two_networks_at_once_do_not_meet_and_leave_nothing_behind() -> None:
    networks = [NamespaceNetwork(Star.of(2)), NamespaceNetwork(Star.of(2))]
    try:
        for network in networks:
            network.up()
        assert len(_namespaces_of_this_process()) == 6
    finally:
        for network in networks:
            network.down()
    assert _namespaces_of_this_process() == []


def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    code = (
        "import os\n"
        "from kvcast.topologies.namespaces import NamespaceNetwork\n"
        "from kvcast.topologies.star import Star\n"
        "network = NamespaceNetwork(Star.of(1)); network.up(); print(network.tag, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    tag = killed.stdout.strip()
    assert (namespaces.NETNS_FOLDER / f"{tag}-sw").exists()
    network = NamespaceNetwork(Star.of(1))
    try:
        network.up()
        assert not (namespaces.NETNS_FOLDER / f"{tag}-sw").exists()
    finally:
        network.down()
