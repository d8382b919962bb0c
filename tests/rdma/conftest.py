"""Tests that need RDMA verbs: they run in a virtual machine with Soft-RoCE, all in one boot
(`make test-rdma`), and skip elsewhere.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

IN_BED = "KVCAST_RDMA_BED"
"""Set in the machine: the tests may change its addresses."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(IN_BED) != "1":
        here = Path(__file__).parent
        for item in (item for item in items if item.path.is_relative_to(here)):
            item.add_marker(pytest.mark.skip(reason="needs RDMA verbs: make test-rdma has them"))


@pytest.fixture(scope="session", autouse=True)
def addresses() -> None:
    """One card with an address for each of a few agents of one process."""
    if os.environ.get(IN_BED) == "1":
        for number in range(1, 4):
            subprocess.run(
                ["ip", "address", "replace", f"10.78.0.{number}/24", "dev", "eth0"], check=True
            )
