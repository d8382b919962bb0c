"""An arena whose pages are locked for a GPU, as CUDA's runtime is told of it.

Oracle: a stand-in for that runtime, which knows what is locked, and at which address. Cannot see:
what a GPU copies (tests/engines/test_torch_memory.py does, where there is one).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import types
from typing import Any

import numpy as np
import pytest
from kvcast.hostagent.connectors import torch_memory
from kvcast.hostagent.connectors.torch_memory import _Device, _in_one_piece, _LockedPages

PIECE = 1 << 20
BYTES = 7 * PIECE // 2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_memory, "_PIECE_BYTES", PIECE)


class Runtime:
    """What of torch is used. `most`: how many pieces can be locked."""

    def __init__(self, most: int = 100) -> None:
        self.locked: dict[int, int] = {}
        self.most = most
        self.cuda = types.SimpleNamespace(
            cudart=lambda: self,
            device=lambda _: contextlib.nullcontext(),
            Stream=lambda _: object(),
        )

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        assert size_bytes > 0
        if len(self.locked) == self.most:
            return 2
        assert address not in self.locked
        self.locked[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    @property
    def bytes_locked(self) -> set[tuple[int, int]]:
        """Ranges of addresses, those that touch each other as one; no piece is larger than a
        piece may be, nor lies over its border."""
        ranges: list[list[int]] = []
        for address, size_bytes in sorted(self.locked.items()):
            assert address // PIECE == (address + size_bytes - 1) // PIECE
            if ranges and ranges[-1][1] == address:
                ranges[-1][1] += size_bytes
            else:
                ranges.append([address, address + size_bytes])
        return {(begin, end) for begin, end in ranges}


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def use(pages: _LockedPages, arena: memoryview) -> None:
    pages.use(arena)
    assert pages._thread is not None
    pages._thread.join(30)


def arena_of() -> tuple[mmap.mmap, memoryview]:
    mapped = mmap.mmap(-1, BYTES)
    return mapped, memoryview(mapped).toreadonly()


def range_of(view: memoryview) -> tuple[int, int]:
    return address_of(view), address_of(view) + BYTES


def test_one_arena_is_locked_and_stays_mapped_until_it_is_not_any_more() -> None:
    runtime = Runtime()
    pages: Any = _LockedPages(runtime, "cuda:1")
    first, first_view = arena_of()
    use(pages, first_view)
    assert runtime.bytes_locked == {range_of(first_view)}
    thread = pages._thread
    use(pages, first_view)
    assert pages._thread is thread, "it is locked once"

    first_view.release()  # as its client does that is closed
    with pytest.raises(BufferError):
        first.close()
    second, second_view = arena_of()
    use(pages, second_view)
    assert runtime.bytes_locked == {range_of(second_view)}
    first.close()
    second_view.release()
    with pytest.raises(BufferError):
        second.close()


def test_an_arena_that_cannot_be_locked_is_said_and_used_as_far_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = Runtime(most=2)
    pages: Any = _LockedPages(runtime, "cuda:0")
    _, view = arena_of()
    with caplog.at_level(logging.INFO, "kvcast.connector"):
        use(pages, view)
    [said] = caplog.messages
    left = BYTES - sum(runtime.locked.values())
    assert f"of the arena's 3 MiB, the last {left >> 20} cannot be page-locked" in said
    assert "CUDA error 2" in said
    runtime.most = 100
    _, other = arena_of()
    use(pages, other)
    assert runtime.bytes_locked == {range_of(other)}, "what was locked of the first is not"


@pytest.mark.parametrize(
    ("kind", "lock_pages", "locks"),
    [("cuda", True, True), ("cuda", False, False), ("xpu", True, False)],
)
def test_pages_are_locked_for_a_gpu_unless_the_operator_says_no(
    kind: str, lock_pages: bool, locks: bool
) -> None:
    runtime = Runtime()
    device: Any = _Device(runtime, types.SimpleNamespace(type=kind), lock_pages=lock_pages)
    _, view = arena_of()
    device.use_arena(view)
    if locks:
        device._pages._thread.join(30)
    assert runtime.bytes_locked == ({range_of(view)} if locks else set())


def test_what_lies_in_two_pieces_is_known() -> None:
    class Tensor:
        def __init__(self, first: int, nbytes: int) -> None:
            self.nbytes = nbytes
            self.data_ptr = lambda: first

    assert _in_one_piece(Tensor(5 * PIECE, PIECE))
    assert _in_one_piece(Tensor(6 * PIECE - 1, 1))
    assert not _in_one_piece(Tensor(6 * PIECE - 1, 2))
    assert not _in_one_piece(Tensor(5 * PIECE, PIECE + 1))
