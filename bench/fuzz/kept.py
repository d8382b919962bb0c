"""An entry point of the file system: what a former agent, or anybody, left of a kept arena.

Owns: how the files that an agent takes over may be damaged, and what must hold of what it then has.
Must not know: how they are checked.

An input is a list of changes, of eight bytes each: of which file, where (as a share of what was
ever written there), and by what. They are made to files in which an agent has kept some blocks;
then another opens them, and takes over what it believes. What it has afterwards is what was put
under that name, and it goes on storing. Where it refuses the files, it says so by an ArenaError.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Final

from kvcast.bench.fuzz.targets import ChangesHarness, entry_point
from kvcast.hostagent.core import recovery
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.recovery import Recovery
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers import kept as kept_files
from kvcast.hostagent.tiers.arena import Allocator, ArenaError
from kvcast.hostagent.tiers.index import Index
from kvcast.hostagent.tiers.kept import Kept, KeptOptions, open_kept
from kvcast.hostagent.tiers.ledger import Ledger, Row
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    NamespaceInfo,
    NodeInfo,
    PoolMap,
    Registered,
)
from kvcast.protocol.messages.wire import BUCKETS, BlockId, digest_of

_ARENA_BYTES: Final = 1 << 20
_SLAB_BYTES: Final = 65536
_BLOCKS: Final = 24
_CHANGE_BYTES: Final = 8
_MAP: Final = PoolMap(
    1,
    [NodeInfo(1, "node-1", "10.0.0.1", "02:00:00:00:00:01", 1, 4791, "127.0.0.1", 1)],
    [[1]] * BUCKETS,
    [NamespaceInfo(1, "t", "m", "1", "l")],
    [],
)
_REGISTERED: Final = Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0)


def _block(number: int) -> BlockId:
    return BlockId(1, number.to_bytes(16, "big"))


def _content(number: int) -> bytes:
    return random.Random(number).randbytes(500 + 211 * number)


@entry_point(
    "kept", "an arena, an index and a ledger that a former agent left", kept_files, recovery
)
class KeptHarness(ChangesHarness):
    """Takes over what was kept, and damaged since."""

    change_bytes = _CHANGE_BYTES

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvcast-fuzz-"))
        self._options = KeptOptions(
            "node node-1 of cluster fuzz",
            arena_path=str(self._folder / "arena"),
            index_path=str(self._folder / "index"),
            arena_bytes=_ARENA_BYTES,
            slab_bytes=_SLAB_BYTES,
            reserve=False,
        )
        kept = open_kept(self._options, 7)
        core = self._agent(kept, 1)
        for number in range(_BLOCKS):
            self._put(core, kept, number)
        assert core.ledger is not None
        for number in range(3):
            core.ledger.write(Row(1, number + 1, _block(number), number * 4096, 500, 5, number + 1))
        core.close()
        self._ledger = bytes(kept.ledger)
        self._clean = {
            path: Path(path).read_bytes()
            for path in (self._options.arena_path, self._options.index_path)
        }
        kept.close()
        index = self._clean[self._options.index_path]
        self._written = [at for at in range(0, len(index), 8) if any(index[at : at + 8])]

    @staticmethod
    def _agent(kept: Kept, incarnation: int) -> AgentCore:
        store = Store(Allocator(_ARENA_BYTES, _SLAB_BYTES))
        ledger = Ledger(kept.ledger)
        index = Index(kept.index.memory, _ARENA_BYTES, incarnation)
        shared = SharedIndex(index, store, lambda: None, ledger)
        found = Recovery(index, store, shared, kept.arena.memory) if kept.found else None
        core = AgentCore(
            *(AgentOptions("node-1"), store, kept.arena.memory, random.Random(1), shared),
            recovery=found,
            ledger=ledger,
        )
        core.restore_map(0.0, _REGISTERED, _MAP)
        return core

    @staticmethod
    def _put(core: AgentCore, kept: Kept, number: int) -> None:
        data = _content(number)
        copy = core.store.reserve(_block(number), len(data))
        kept.arena.memory[copy.offset : copy.offset + len(data)] = data
        core.store.commit(copy, digest_of(data), home=False)

    def close(self) -> None:
        shutil.rmtree(self._folder)

    def run(self, data: bytes) -> None:
        for path, content in self._clean.items():
            Path(path).unlink(missing_ok=True)
            Path(path).touch(0o600)
            Path(path).write_bytes(content)
        ledger = bytearray(self._ledger)
        for at in range(0, len(data) - _CHANGE_BYTES + 1, _CHANGE_BYTES):
            self._change(data[at : at + _CHANGE_BYTES], ledger)
        try:
            kept = open_kept(self._options, 8)
        except ArenaError:
            return
        kept.ledger[:] = ledger
        core = self._agent(kept, 2)
        assert core.ledger is not None
        for at, row in core.ledger.found():
            assert row.session == 1, "a row that nobody wrote"
            core.ledger.strike(at)
        for number in data[:4]:
            core.store.get(_block(number % _BLOCKS))
        while core.recover():
            pass
        core.store.check()
        for number in range(_BLOCKS):
            copy = core.store.peek(_block(number))
            if copy is not None:
                found = kept.arena.memory[copy.offset : copy.offset + copy.size_bytes]
                assert bytes(found) == _content(number), "wrong bytes were taken over"
        assert set(core.store.blocks()) <= {_block(number) for number in range(_BLOCKS)}
        self._put(core, kept, _BLOCKS)
        core.close()
        kept.close()

    def _change(self, change: bytes, ledger: bytearray) -> None:
        """Change a word where something was written, or a byte of the arena, or a file's length."""
        kind, how, where = change[0] % 8, change[1], int.from_bytes(change[2:5], "little")
        arena, index = self._options.arena_path, self._options.index_path
        if kind == 7:
            with open((arena, index)[how & 1], "r+b") as file:
                file.truncate(where * 64 % (2 * _ARENA_BYTES))
            return
        if kind == 6:
            ledger[where % 4096] ^= how or 1
            return
        path = arena if kind == 5 else index
        at = where % _ARENA_BYTES if kind == 5 else self._written[where % len(self._written)]
        with open(path, "r+b") as file:
            file.seek(at)
            word = file.read(_CHANGE_BYTES)
            if kind < 3:
                word = bytes(byte ^ other for byte, other in zip(word, change, strict=False))
            elif kind == 3:  # of another entry, perhaps
                file.seek(self._written[how * 131 % len(self._written)])
                word = file.read(_CHANGE_BYTES)
            else:
                word = bytes([word[0] ^ (how or 1)]) + word[1:] if word else b""
            file.seek(at)
            file.write(word)
        assert os.stat(path).st_mode & 0o777 == 0o600
