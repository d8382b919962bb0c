"""An entry point of the file system: what lies where an agent wants to make its arena.

Owns: what a predecessor may have left there (a dead agent's file of any bytes, a live one's, a
link, a pipe, a folder), and what must hold of the arena that is made, or is not. Must not know:
how the arena goes about it.

An input's first byte says what was left, the second who still has hold of it, the third in which
mode, the fourth how large the new arena is; the rest are the predecessor's bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import shutil
import socket
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from kvcast.bench.fuzz.engine import Harness
from kvcast.bench.fuzz.targets import entry_point
from kvcast.bench.hostile_bytes import mutate
from kvcast.hostagent.tiers import arena
from kvcast.hostagent.tiers.arena import ArenaError, ArenaFile, ArenaInUseError

_UNIT: Final = 4096
_LOCKED: Final = 1
_MAPPED: Final = 2
_SPARSE: Final = 4


def _left(kind: str, path: Path, content: bytes, beside: Path) -> None:
    """Leave something of that kind at the path; `beside` is another's file."""
    match kind:
        case "file":
            path.write_bytes(content)
        case "hard link":
            beside.write_bytes(content)
            os.link(beside, path)
        case "symbolic link":
            beside.write_bytes(content)
            path.symlink_to(beside)
        case "dangling link":
            path.symlink_to(beside)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
            (path / "within").write_bytes(content)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))


_FILES: Final = ("file", "hard link")
"""What a new arena may take the place of."""
_NOTHING: Final = "nothing"
_KINDS: Final = (
    *_FILES, "symbolic link", "dangling link", "pipe", "folder", "socket", _NOTHING,
)  # fmt: skip


@entry_point("arena", "what lies where an agent makes its arena", arena)
class ArenaHarness(Harness):
    """Makes an arena where something lies already."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvcast-fuzz-"))
        self._runs = 0

    def corpus(self) -> list[bytes]:
        kinds = range(len(_KINDS))
        ghosts = (0, _MAPPED, _SPARSE, _LOCKED)
        return [bytes((kind, ghost, 0, 3)) + b"left" * 9 for kind in kinds for ghost in ghosts]

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return bytes(rng.randrange(256) for _ in range(4)) + data[4:]
        return mutate(data, rng)

    def close(self) -> None:
        shutil.rmtree(self._folder)

    def run(self, data: bytes) -> None:
        head, content = data[:4].ljust(4, b"\0"), data[4:]
        self._runs += 1
        with ExitStack() as stack:
            self._run(stack, head, content)

    def _run(self, stack: ExitStack, head: bytes, content: bytes) -> None:
        left = _KINDS[head[0] % len(_KINDS)]
        path, beside = self._folder / f"{self._runs}.arena", self._folder / f"{self._runs}.other"
        _left(left, path, content, beside)
        files = [file for file in (path, beside) if file.is_file()]
        locked = bool(head[1] & _LOCKED) and left in _FILES
        ghost: mmap.mmap | None = None
        if left in _FILES:
            ghost = self._keep_hold(stack, path, head)
        elif beside.exists():
            beside.chmod(0o600 | (head[2] << 1 & 0o777))
        before = {file: (os.lstat(file).st_ino, file.stat().st_size) for file in files}
        size = _UNIT * (1 + head[3])
        try:
            made = ArenaFile(size, str(path), reserve=bool(head[3] & 1))
        except ArenaInUseError:
            assert locked, "nobody had it"
        except ArenaError:
            assert left not in (*_FILES, _NOTHING), "a dead agent's file keeps the next one out"
        else:
            assert not locked, "the arena of a live agent was taken"
            assert left in (*_FILES, _NOTHING), f"an arena was made over a {left}"
            self._check(made, path, size, ghost)
            made.close()
            assert not os.path.lexists(path), "the file outlives its agent"
        for file, (inode, length) in before.items():
            if file == beside or locked or left not in _FILES:
                assert os.lstat(file).st_ino == inode, "another's file was replaced"
                assert file.stat().st_size == length, "another's file was cut"
                if left != "file" and not head[1] & _SPARSE:
                    assert file.read_bytes() == content, "another's bytes were changed"
        self._tidy(path, beside)

    def _keep_hold(self, stack: ExitStack, path: Path, head: bytes) -> mmap.mmap | None:
        """The predecessor's file, whose maker may not be quite dead."""
        file = stack.enter_context(path.open("r+b"))
        if head[1] & _SPARSE:
            file.truncate(1 << 36)
        path.chmod(0o600 | (head[2] << 1 & 0o777))
        if head[1] & _LOCKED:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if head[1] & _MAPPED and path.stat().st_size:
            return stack.enter_context(mmap.mmap(file.fileno(), min(path.stat().st_size, _UNIT)))
        return None

    @staticmethod
    def _check(made: ArenaFile, path: Path, size: int, ghost: mmap.mmap | None) -> None:
        status = os.lstat(path)
        assert stat.S_ISREG(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600, "others may open it"
        assert (status.st_nlink, status.st_size) == (1, size)
        assert not any(made.memory), "it does not begin empty"
        if ghost is not None:
            was = bytes(ghost[:4])
            made.memory[:4] = bytes(255 - byte for byte in was.ljust(4, b"\0"))
            assert bytes(ghost[:4]) == was, "the predecessor sees it"
            ghost[:1] = bytes([ghost[0] ^ 255])
            assert bytes(made.memory[:1]) == bytes([255 - was[0]]), "the predecessor writes to it"
            ghost[:1] = was[:1]

    @staticmethod
    def _tidy(path: Path, beside: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
