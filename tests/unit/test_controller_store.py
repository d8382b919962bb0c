"""The state file keeps what was saved, whole, and belongs to one controller.

Oracle: what is loaded equals what was saved. Cannot see: power failures.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from kvcast.controller.core.namespaces import Group
from kvcast.controller.core.node import Address, SavedNode
from kvcast.controller.core.pool import SavedState
from kvcast.controller.core.residency import SavedResident
from kvcast.controller.store import Store
from kvcast.controller.switch.control_loop import StoreError
from kvcast.protocol.messages.control import NamespaceInfo
from kvcast.protocol.messages.wire import BlockId

STATE = SavedState(
    epoch=7,
    nodes=(
        SavedNode(
            "node-1", 1, 2**64 - 1, Address("10.0.0.1", "02:00:00:00:00:01", 1, 2, "h", 3),
            2**63, True,
        ),
        SavedNode(
            "node-2", 2, 7, Address("10.0.0.2", "02:00:00:00:00:02", 2, 2, "h", 3), 5, True, True
        ),
        SavedNode(
            "node-3", 3, 8, Address("10.0.0.3", "02:00:00:00:00:03", 3, 2, "h", 3), 5, False, True
        ),
    ),
    namespaces=(NamespaceInfo(1, "t", "m", "v", "ü layout", ["node-1", "node-2"]),),
    groups=(Group(1, 1, ("node-1", "node-2"), 0),),
    residents=(SavedResident(BlockId(1, b"k" * 16), (3, 9), 2**32 - 1, 2**64 - 1, 2**17, True),),
    pins=(BlockId(1, b"k" * 16), BlockId(2, b"\0" * 16)),
)  # fmt: skip


def test_a_new_file_holds_the_empty_state(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    assert store.load() == SavedState()
    store.close()


def test_what_was_saved_is_loaded_by_the_next_controller(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    assert store.save(STATE)
    assert not store.save(STATE), "nothing changed, so nothing is written"
    store.close()
    store = Store(tmp_path / "s")
    assert store.load() == STATE
    assert store.save(SavedState(epoch=8))
    assert store.load() == SavedState(epoch=8)
    store.close()


def test_a_second_controller_cannot_open_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    with pytest.raises(StoreError, match="locked"):
        Store(tmp_path / "s")
    store.close()


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store(tmp_path / "s")


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="version 99"):
        Store(tmp_path / "s")
