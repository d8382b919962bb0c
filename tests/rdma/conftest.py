"""Tests that need RDMA verbs: they run in virtual machines with Soft-RoCE, all in one boot, and
skip elsewhere. `make test-rdma` runs `test_rdma_machines.py` here, which boots, and has all others
run inside.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

BED = os.environ.get("KVCAST_RDMA_BED", "")
""" "boot": these tests may boot machines; "inside": they are in one, and may change its
addresses."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in (item for item in items if item.path.is_relative_to(here)):
        needs = "boot" if item.path.name == "test_rdma_machines.py" else "inside"
        if needs != BED:
            item.add_marker(pytest.mark.skip(reason="needs RDMA verbs: make test-rdma has them"))


@pytest.fixture(scope="session", autouse=True)
def addresses() -> None:
    """One card with an address for each of a few agents of one process."""
    if BED == "inside":
        for number in range(1, 4):
            subprocess.run(
                ["ip", "address", "replace", f"10.78.0.{number}/24", "dev", "eth0"], check=True
            )
