"""Store: the controller's durable state, in SQLite.

Owns: the tables and how a `SavedState` is written and read. Must not know: what the rows mean to
the pool. All of it is small (tens of nodes, hundreds of residents), so a table that changed is
written whole, in one transaction with all others that changed: a crash leaves the state of before
or after, never between. It holds the namespaces' secrets, so it is 0600.

One controller a file: the file is locked while it is open, so that a second controller fails
instead of overwriting the first one's numbers.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from kvcast.controller.core.namespaces import Group
from kvcast.controller.core.node import Address, SavedNode
from kvcast.controller.core.pool import SavedState
from kvcast.controller.core.residency import SavedResident
from kvcast.controller.switch.control_loop import StoreError
from kvcast.protocol.messages.control import NamespaceInfo, NamespaceSettings
from kvcast.protocol.messages.wire import BlockId
from kvcast.protocol.namespace_secrets import SECRET_BYTES

SCHEMA_VERSION = 3
_SCHEMA = """
CREATE TABLE epoch (epoch INTEGER NOT NULL) STRICT;
CREATE TABLE nodes (
    node_id TEXT PRIMARY KEY, node_index INTEGER NOT NULL, incarnation TEXT NOT NULL,
    ip TEXT NOT NULL, mac TEXT NOT NULL, switch_port INTEGER NOT NULL, udp_port INTEGER NOT NULL,
    bulk_host TEXT NOT NULL, bulk_port INTEGER NOT NULL, arena_bytes TEXT NOT NULL,
    placed INTEGER NOT NULL
) STRICT;
CREATE TABLE namespaces (
    namespace INTEGER PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL,
    version TEXT NOT NULL, layout TEXT NOT NULL, nodes TEXT NOT NULL
) STRICT;
CREATE TABLE groups (
    namespace INTEGER NOT NULL, reader_group INTEGER NOT NULL, ordinal INTEGER NOT NULL,
    nodes TEXT NOT NULL, PRIMARY KEY (namespace, reader_group)
) STRICT;
CREATE TABLE residents (
    namespace INTEGER NOT NULL, key BLOB NOT NULL, slots TEXT NOT NULL,
    generation INTEGER NOT NULL, digest TEXT NOT NULL, size_bytes INTEGER NOT NULL,
    pinned INTEGER NOT NULL, PRIMARY KEY (namespace, key)
) STRICT;
CREATE TABLE pins (
    namespace INTEGER NOT NULL, key BLOB NOT NULL, PRIMARY KEY (namespace, key)
) STRICT;
"""
_SINCE_VERSION_2 = """
CREATE TABLE secrets (namespace INTEGER PRIMARY KEY, secret BLOB NOT NULL) STRICT;
"""
_SINCE_VERSION_3 = """
CREATE TABLE settings (namespace INTEGER PRIMARY KEY, settings TEXT NOT NULL) STRICT;
CREATE TABLE deleted (ordinal INTEGER PRIMARY KEY, namespace INTEGER NOT NULL) STRICT;
"""
# Numbers of 64 bits without a sign do not fit SQLite's INTEGER: incarnation, digest and
# arena_bytes are TEXT, in decimal. Lists are TEXT, joined by spaces (node ids hold none). A node's
# `placed` is 1 where it is placed, and 2 more where it is to be drained.

Row = tuple[Any, ...]
_TABLES: dict[str, Callable[[SavedState], list[Row]]] = {
    "epoch": lambda s: [(s.epoch,)],
    "nodes": lambda s: [
        (
            n.node_id, n.index, str(n.incarnation), n.address.ip, n.address.mac,
            n.address.switch_port, n.address.udp_port, n.address.bulk_host, n.address.bulk_port,
            str(n.arena_bytes), int(n.placed) | int(n.draining) << 1,
        )
        for n in s.nodes
    ],
    "namespaces": lambda s: [
        (i.namespace, i.tenant, i.model, i.version, i.layout, " ".join(i.nodes))
        for i in s.namespaces
    ],
    "groups": lambda s: [(g.namespace, g.group, g.ordinal, " ".join(g.nodes)) for g in s.groups],
    "residents": lambda s: [
        (
            r.block.namespace, r.block.key, " ".join(map(str, r.slots)), r.generation,
            str(r.digest), r.size_bytes, int(r.pinned),
        )
        for r in s.residents
    ],
    "pins": lambda s: [(b.namespace, b.key) for b in s.pins],
    "secrets": lambda s: list(s.secrets),
    "settings": lambda s: [
        (i.namespace, msgspec.json.encode(i.settings).decode())
        for i in s.namespaces
        if i.settings != NamespaceSettings()
    ],
    "deleted": lambda s: list(enumerate(s.deleted)),
}  # fmt: skip
_PARTS = {"settings": "namespaces"}
"""Of tables, the part of the state that they come from, where it has another name."""


class Store:
    """An open state file. Every method raises StoreError where SQLite fails."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._written: dict[str, list[Row]] = {}
        self._saved: SavedState | None = None
        _make_private(self._path)
        try:
            self._db = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("BEGIN EXCLUSIVE")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            scripts = {
                0: _SCHEMA + _SINCE_VERSION_2 + _SINCE_VERSION_3,
                1: _SINCE_VERSION_2 + _SINCE_VERSION_3,
                2: _SINCE_VERSION_3,
            }
            if version in scripts:
                for statement in scripts[version].split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._db.close()
            raise StoreError(f"{self._path}: {error}") from error
        if version not in (*scripts, SCHEMA_VERSION):
            self._db.close()
            raise StoreError(
                f"{self._path}: state of version {version}, this controller reads {SCHEMA_VERSION}"
            )

    def load(self) -> SavedState:
        """What was saved last; the empty state of a new file."""
        try:
            epochs = self._rows("SELECT epoch FROM epoch")
            nodes = self._rows("SELECT * FROM nodes ORDER BY node_index")
            namespaces = self._rows("SELECT * FROM namespaces ORDER BY namespace")
            groups = self._rows(
                "SELECT namespace, reader_group, ordinal, nodes FROM groups ORDER BY 1, 2"
            )
            residents = self._rows("SELECT * FROM residents ORDER BY generation")
            pins = self._rows("SELECT * FROM pins ORDER BY namespace, key")
            secrets = self._rows("SELECT namespace, secret FROM secrets ORDER BY namespace")
            settings: dict[int, str] = dict(self._rows("SELECT namespace, settings FROM settings"))
            deleted = self._rows("SELECT namespace FROM deleted ORDER BY ordinal")
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error
        try:
            state = SavedState(
                epoch=epochs[0][0] if epochs else 0,
                nodes=tuple(
                    SavedNode(
                        r[0], r[1], int(r[2]), Address(*r[3:9]), int(r[9]), bool(r[10] & 1),
                        bool(r[10] & 2),
                    )
                    for r in nodes
                ),
                namespaces=tuple(
                    NamespaceInfo(
                        r[0], r[1], r[2], r[3], r[4], r[5].split(),
                        settings=_settings(settings.get(r[0])),
                    )
                    for r in namespaces
                ),
                groups=tuple(Group(r[0], r[1], tuple(r[3].split()), r[2]) for r in groups),
                residents=tuple(
                    SavedResident(
                        BlockId(r[0], r[1]), tuple(map(int, r[2].split())), r[3], int(r[4]),
                        r[5], bool(r[6]),
                    )
                    for r in residents
                ),
                pins=tuple(BlockId(*r) for r in pins),
                secrets=tuple((r[0], _secret(r[1])) for r in secrets),
                deleted=tuple(r[0] for r in deleted),
            )  # fmt: skip
        except (TypeError, ValueError, IndexError) as error:
            raise StoreError(f"{self._path}: unreadable row: {error}") from error
        self._written = {table: rows_of(state) for table, rows_of in _TABLES.items()}
        if not epochs:
            del self._written["epoch"]
        return state

    def save(self, state: SavedState) -> bool:
        """Make `state` durable; whether anything had to be written."""
        changed = {
            table: rows
            for table, rows_of in _TABLES.items()
            if not self._has_saved(_PARTS.get(table, table), state)
            if (rows := rows_of(state)) != self._written.get(table)
        }
        if not changed:
            self._saved = state
            return False
        try:
            self._db.execute("BEGIN")
            for table, rows in changed.items():
                self._db.execute(f"DELETE FROM {table}")
                if rows:
                    marks = ", ".join("?" * len(rows[0]))
                    self._db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise StoreError(f"{self._path}: {error}") from error
        self._written.update(changed)
        self._saved = state
        return True

    def _has_saved(self, part: str, state: SavedState) -> bool:
        """Whether that part is the very one that was saved last, which spares looking into it."""
        return self._saved is not None and getattr(state, part) is getattr(self._saved, part)

    def close(self) -> None:
        self._db.close()

    def _rows(self, query: str) -> list[Row]:
        return self._db.execute(query).fetchall()


def _settings(text: str | None) -> NamespaceSettings:
    """ValueError if it is none (msgspec's error is one)."""
    if text is None:
        return NamespaceSettings()
    return msgspec.json.decode(text, type=NamespaceSettings)


def _secret(value: bytes) -> bytes:
    if len(value) != SECRET_BYTES:
        raise ValueError(f"a secret of {len(value)} bytes")
    return value


def _make_private(path: str) -> None:
    """Have the file be its owner's alone, from before anything is in it."""
    if path == ":memory:":
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return  # SQLite will say why
    try:
        os.fchmod(descriptor, 0o600)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
