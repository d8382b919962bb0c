"""An engine's KV memory as parts of blocks that can be copied to and from an arena.

Owns: what bytes a part consists of, and in which order. Must not know: pools, or which engine.

A cache tensor of one layer has the block as its first dimension; what is behind it is opaque, and
may be strided in any way, since layers may share one allocation. The bytes of a block go into the
pool in the order in which they lie in memory, which `layout` tells with shapes and types, so that
it is part of the namespace. Layers at equal distances in one allocation are copied at once.

Tensors on the CPU are copied by numpy. Others are copied by torch on a stream of their own, which
waits for what the engine had begun. A GPU reads and writes the arena itself once that is
page-locked, which a thread of its own sees to; until then, and where it cannot be, the driver
copies through memory of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, Final

_INTEGERS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""The types by which opaque elements of so many bytes are moved."""


_PORTABLE: Final = 1
"""cudaHostRegisterPortable: for all of the process's contexts."""
_PIECE_BYTES: Final = 64 << 20
"""Pages are locked in pieces that end at multiples of this, in some hundredths of a second each."""

_log = logging.getLogger("kvcast.connector")


class LayoutError(ValueError):
    """Cache tensors that cannot be cut into blocks."""


class _Layers:
    """Layers whose blocks are copied at once: `view` has dimensions layer, block, then opaque."""

    def __init__(self, view: Any, part_bytes: int) -> None:
        self.view = view
        self.bytes = part_bytes


def _ordered(tensor: Any, blocks: int) -> Any:
    """A layer's cache with the block first, and the rest in the order of memory."""
    if tensor.shape[0] != blocks:
        # Some backends cut the manager's blocks into smaller ones.
        if blocks < 1 or tensor.shape[0] % blocks:
            raise LayoutError(f"{tensor.shape[0]} blocks are no multiple of {blocks}")
        tensor = tensor.unflatten(0, (blocks, -1))
    order = sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))
    return tensor.permute(0, *order)


class TorchMemory:
    """An engine's cache. `groups`: for each of the engine's cache groups, its layers' tensors in
    order, first dimension the block. `sizes`: how many layers go into each part, by group.
    `lock_pages`: whether the arena may be page-locked for a GPU.

    Is an `EngineMemory` (`kvcast.hostagent.connectors.link`). Raises LayoutError.
    """

    null_block: int

    def __init__(
        self,
        groups: Sequence[Sequence[Any]],
        sizes: Sequence[Sequence[int]],
        *,
        blocks: int,
        null_block: int,
        lock_pages: bool = True,
    ) -> None:
        import torch

        self.null_block = null_block
        self.part_bytes: list[int] = []
        self.cache_group: list[int] = []
        self._parts: list[list[_Layers]] = []
        words = []
        device = None
        for number, (tensors, counts) in enumerate(zip(groups, sizes, strict=True)):
            ordered = []
            for tensor in tensors:
                device = tensor.device
                integer = getattr(torch, _INTEGERS[tensor.element_size()])
                one = _ordered(tensor, blocks).view(integer)
                ordered.append(one)
                words.append(f"{tensor.dtype}{list(one.shape[1:])}{_axes(tensor, blocks)}")
            begin = 0
            for count in counts:
                runs = _runs(ordered[begin : begin + count])
                begin += count
                self._parts.append(runs)
                self.part_bytes.append(sum(run.bytes for run in runs))
                self.cache_group.append(number)
            if begin != len(ordered):
                raise LayoutError(f"{len(ordered)} layers, and parts for {begin}")
        self.layout = f"{words} in {list(map(list, sizes))}"
        self._device: _Device | None = None
        if device is not None and device.type != "cpu":
            self._device = _Device(torch, device, lock_pages=lock_pages)
        else:
            for runs in self._parts:
                for run in runs:
                    run.view = run.view.numpy()

    def write(self, part: int, block_id: int, data: memoryview) -> None:
        begin = 0
        for run in self._parts[part]:
            piece = data[begin : begin + run.bytes]
            begin += run.bytes
            if self._device is not None:
                self._device.copy(run.view[:, block_id], piece, into_engine=True)
            else:
                target = run.view[:, block_id]
                target[...] = _array(piece, target)

    def read(self, part: int, block_id: int, room: memoryview) -> None:
        begin = 0
        for run in self._parts[part]:
            piece = room[begin : begin + run.bytes]
            begin += run.bytes
            if self._device is not None:
                self._device.copy(run.view[:, block_id], piece, into_engine=False)
            else:
                source = run.view[:, block_id]
                _array(piece, source)[...] = source

    def settle(self) -> None:
        if self._device is not None:
            self._device.settle()

    def use_arena(self, arena: memoryview) -> None:
        if self._device is not None:
            self._device.use_arena(arena)

    def mark(self) -> Any:
        """A moment in what the engine has begun; to be given to `wait_for`."""
        return None if self._device is None else self._device.mark()

    def wait_for(self, mark: Any) -> None:
        """Let copies wait until the engine has done what it had begun at that moment."""
        if self._device is not None:
            self._device.wait_for(mark)


def _axes(tensor: Any, blocks: int) -> list[int]:
    """In which order the opaque dimensions lie in memory."""
    whole = tensor if tensor.shape[0] == blocks else tensor.unflatten(0, (blocks, -1))
    return sorted(range(1, whole.dim()), key=lambda axis: -whole.stride(axis))


def _runs(tensors: Sequence[Any]) -> list[_Layers]:
    """As few runs of layers as there may be, each at equal distances in one allocation."""
    runs: list[_Layers] = []
    begin = 0
    while begin < len(tensors):
        first = tensors[begin]
        part_bytes = first[0].numel() * first.element_size()
        until = begin + 1
        step = 0
        while until < len(tensors):
            one = tensors[until]
            gap = one.storage_offset() - tensors[until - 1].storage_offset()
            if (
                one.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
                or one.shape != first.shape
                or one.stride() != first.stride()
                or one.dtype != first.dtype
                or gap <= 0
                or (step and gap != step)
            ):
                break
            step = gap
            until += 1
        count = until - begin
        view = first.as_strided(
            (count, *first.shape), (step or 1, *first.stride()), first.storage_offset()
        )
        runs.append(_Layers(view, count * part_bytes))
        begin = until
    return runs


def _array(piece: memoryview, like: Any) -> Any:
    import numpy

    return numpy.frombuffer(piece, like.dtype).reshape(like.shape)


class _Device:
    """Copies between an accelerator and the arena."""

    def __init__(self, torch: Any, device: Any, *, lock_pages: bool) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pages = _LockedPages(torch, device) if self._stream and lock_pages else None

    def use_arena(self, arena: memoryview) -> None:
        if self._pages is not None:
            self._pages.use(arena)

    def copy(self, engine: Any, piece: memoryview, *, into_engine: bool) -> None:
        torch = self._torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # blocks are read-only, and are only read
            host = torch.frombuffer(piece, dtype=engine.dtype).reshape(engine.shape)
        whole = self._pages is None or _in_one_piece(host)
        later = self._stream is not None  # else nobody would wait for it
        with self._on_stream():
            if into_engine:
                engine.copy_(host if whole else host.clone(), non_blocking=later)
            elif whole:
                host.copy_(engine, non_blocking=later)
            else:
                host.copy_(engine.cpu())

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._torch.cuda.stream(self._stream)
        return context

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def mark(self) -> Any:
        if self._stream is None:
            return None
        event = self._torch.cuda.Event()
        event.record()
        return event

    def wait_for(self, mark: Any) -> None:
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)


class _LockedPages:
    """The arena's pages, locked for a GPU's own reads and writes: a piece after the other, since
    the driver does nothing else for this process meanwhile.

    As long as they are, the arena stays mapped, though its client may be gone: whatever was mapped
    at its addresses then, the GPU would read and write these pages. `use` is called when no copy
    is under way.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._arena: memoryview | None = None
        self._thread: threading.Thread | None = None
        self._mapped: Any = None
        """An array over the arena some of whose pages are locked."""
        self._locked: list[int] = []
        """The addresses of its pieces that are."""

    def use(self, arena: memoryview) -> None:
        if arena is self._arena or (self._thread is not None and self._thread.is_alive()):
            return
        import numpy

        while self._locked:
            self._torch.cuda.cudart().cudaHostUnregister(self._locked.pop())
        self._arena = arena
        # A view of our own: the client's ends with the client.
        self._mapped = numpy.frombuffer(memoryview(arena), numpy.uint8)
        self._thread = threading.Thread(target=self._lock, name="kvcast-pages", daemon=True)
        self._thread.start()

    def _lock(self) -> None:
        runtime = self._torch.cuda.cudart()
        began = time.monotonic()
        at, error = self._mapped.ctypes.data, 0
        end = at + self._mapped.size
        with self._torch.cuda.device(self._device):
            while at < end and not error:
                size_bytes = min(end, at - at % _PIECE_BYTES + _PIECE_BYTES) - at
                error = int(runtime.cudaHostRegister(at, size_bytes, _PORTABLE))
                if not error:
                    self._locked.append(at)
                    at += size_bytes
        if error:
            _log.warning(
                "kvcast: of the arena's %d MiB, the last %d cannot be page-locked (CUDA error %d); "
                "copies to and from the GPU are slower",
                self._mapped.size >> 20,
                (end - at) >> 20,
                error,
            )
        else:
            _log.info(
                "kvcast: the arena's %d MiB are page-locked, after %.2f s",
                self._mapped.size >> 20,
                time.monotonic() - began,
            )


def _in_one_piece(memory: Any) -> bool:
    """Whether a tensor in the arena's memory lies in one piece that is locked at once. Of others
    CUDA would copy nothing."""
    first = memory.data_ptr()
    return bool(first // _PIECE_BYTES == (first + memory.nbytes - 1) // _PIECE_BYTES)
