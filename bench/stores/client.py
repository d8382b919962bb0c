"""What a process that asks a store can be told to do, whichever store it is.

Owns: the interface. Must not know: any store, what is measured, or when.

A timed operation is prepared first and run later: `putter`, `getter` and `asker` do what a user
would have done long before (the name of a key, memory that is registered, a list of descriptors)
and return a call without arguments, which is all that the clock sees.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from kvcast.workloads import content

Buffer: TypeAlias = bytes | memoryview
Where: TypeAlias = Mapping[str, Any]
"""By key in hex: where the holder keeps a block; empty for a store that finds it by its key."""

LOCAL, REMOTE = "local", "remote"
WAIT_S = 30.0
"""How long one operation may take before it counts as failed."""


class StoreError(Exception):
    """A store does not do what it was asked; the message says which."""


class StoreClient(ABC):
    """One process's client of one store. A *reader* asks; the one *holder* of a store puts what
    readers get, on the other side of the link, and looks at what they have put.

    `options` say how to reach the store; a reader's contain the holder's `introduction` under
    "holder".
    """

    def __init__(self) -> None:
        self.introduction: dict[str, Any] = {}
        """What readers need to know of this holder."""

    @abstractmethod
    def putter(self, key: bytes, data: bytes, where: Where, *, local: bool) -> Callable[[], None]:
        """A call that puts a block at the holder, or with `local` into memory of this side."""

    def placer(self, key: bytes, data: bytes) -> Callable[[], None]:
        """As `putter`, at the holder, of a block that lies in the store's own memory from now on;
        StoreError where there is no such way."""
        raise StoreError("it has no way to put what lies in its memory")

    @abstractmethod
    def getter(
        self, keys: Sequence[bytes], size_bytes: int, where: Where
    ) -> Callable[[], Sequence[Buffer | None]]:
        """A call that gets blocks of one size, all at once; None for each that is missing. The
        bytes stay as they are until `release`."""

    @abstractmethod
    def asker(self, keys: Sequence[bytes]) -> Callable[[], int]:
        """A call that tells how many of these blocks the store has."""

    @abstractmethod
    def origins(self) -> set[str]:
        """Whence the gets since the last `release` were answered: LOCAL or REMOTE."""

    def release(self) -> None:  # noqa: B027 - most have nothing to do
        """What the gets returned is not needed any more."""

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks, wherever they are."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store."""

    def reserve(self, keys: Sequence[bytes], size_bytes: int) -> dict[str, Any]:
        """At the holder: where these blocks may be put."""
        return {}

    def place(self, keys: Sequence[bytes], size_bytes: int, *, local: bool) -> dict[str, Any]:
        """Put the blocks that belong to these keys; where they are."""
        for key, block in blocks_of(keys, size_bytes).items():
            self.putter(key, block, {}, local=local)()
            self.release()
        return {}

    def look(self, keys: Sequence[bytes], size_bytes: int) -> tuple[int, int]:
        """At the holder: (wrong bytes, missing blocks) of what readers have put."""
        wrong = missing = 0
        for key in keys:
            wrong_here, missing_here = compared(
                blocks_of([key], size_bytes), self.getter([key], size_bytes, {})()
            )
            wrong += wrong_here
            missing += missing_here
            self.release()
        return wrong, missing


def blocks_of(keys: Sequence[bytes], size_bytes: int) -> dict[bytes, bytes]:
    """The blocks that belong to these keys."""
    return {key: content.block_bytes(key, size_bytes) for key in keys}


def compared(wanted: Mapping[bytes, bytes], got: Sequence[Buffer | None]) -> tuple[int, int]:
    """(wrong bytes, missing blocks) of what came, in the order of what is wanted."""
    wrong = missing = 0
    for (key, block), data in zip(wanted.items(), got, strict=True):
        if data is None:
            missing += 1
        elif not np.array_equal(np.frombuffer(data, np.uint8), np.frombuffer(block, np.uint8)):
            wrong += content.wrong_bytes(key, len(block), data)
    return wrong, missing


class Memory:
    """Memory that a store registers, given out from the start and taken back all at once."""

    def __init__(self, size_bytes: int) -> None:
        self._array = np.zeros(size_bytes, np.uint8)
        self._array[:: os.sysconf("SC_PAGE_SIZE")] = 1  # every page is there before it is used
        self.address = int(self._array.ctypes.data)
        self.size_bytes = size_bytes
        self.view = self._array.data
        self._used = 0

    def take(self, size_bytes: int) -> int:
        """The offset of memory that nobody else has; StoreError if there is none."""
        offset = self._used
        if offset + size_bytes > self.size_bytes:
            raise StoreError(f"{size_bytes} bytes do not fit into the registered memory")
        self._used += size_bytes
        return offset

    def take_back(self) -> None:
        """All of it is free again."""
        self._used = 0
