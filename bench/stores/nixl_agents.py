"""NIXL over UCX and TCP: READ and WRITE between registered memory of two agents.

Owns: which calls of NIXL an operation is. Must not know: what else is measured.

NIXL moves bytes and has no names: where a block lies is told to the readers, which prepare their
descriptors before the clock starts. The holder's thread makes progress by itself; readers ask for
it while they wait, as their engine's loop would, and yield the processor in between.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcast.bench.stores.client import (
    REMOTE,
    WAIT_S,
    Buffer,
    Memory,
    StoreClient,
    StoreError,
    Where,
    blocks_of,
    compared,
)

_SPINS = 1000
"""How often a transfer is looked at between two looks at the clock."""


class NixlClient(StoreClient):
    """An agent with registered memory of `options["memory_bytes"]`; a reader knows the holder by
    the `introduction` in its options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        nixl: Any = importlib.import_module("nixl_cu12._api")
        holder = options.get("holder")
        self._agent = nixl.nixl_agent(
            f"{'reader' if holder else 'holder'}-{os.getpid()}",
            nixl.nixl_agent_config(enable_prog_thread=holder is None, backends=["UCX"]),
        )
        self._memory = Memory(options["memory_bytes"])
        memory = [(self._memory.address, self._memory.size_bytes, 0, "")]
        self._registered = self._agent.register_memory(memory, "DRAM")
        self.introduction = {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": self._memory.address,
        }
        self._offsets: dict[bytes, int] = {}
        self._prepared: list[Any] = []
        if holder:
            self._holder_address: int = holder["address"]
            self._holder = self._agent.add_remote_agent(base64.b64decode(holder["metadata"]))
            self._agent.make_connection(self._holder)

    def putter(self, key: bytes, data: bytes, where: Where, *, local: bool) -> Callable[[], None]:
        offset = self._memory.take(len(data))
        self._memory.view[offset : offset + len(data)] = data
        return self._transfer("WRITE", [offset], [where[key.hex()]], len(data))

    def getter(
        self, keys: Sequence[bytes], size_bytes: int, where: Where
    ) -> Callable[[], Sequence[Buffer | None]]:
        offsets = [self._memory.take(size_bytes) for _ in keys]
        transfer = self._transfer("READ", offsets, [where[key.hex()] for key in keys], size_bytes)
        views = [self._memory.view[offset : offset + size_bytes] for offset in offsets]

        def get() -> Sequence[Buffer | None]:
            transfer()
            return views

        return get

    def asker(self, keys: Sequence[bytes]) -> Callable[[], int]:
        raise StoreError("NIXL has no names to ask for")

    def origins(self) -> set[str]:
        return {REMOTE}

    def release(self) -> None:
        self._memory.take_back()
        prepared, self._prepared = self._prepared, []
        for handle in prepared:
            handle.release()

    def reserve(self, keys: Sequence[bytes], size_bytes: int) -> dict[str, Any]:
        self._offsets |= {key: self._memory.take(size_bytes) for key in keys}
        return {key.hex(): self._offsets[key] for key in keys}

    def place(self, keys: Sequence[bytes], size_bytes: int, *, local: bool) -> dict[str, Any]:
        where = self.reserve(keys, size_bytes)
        for key, block in blocks_of(keys, size_bytes).items():
            self._at(key, size_bytes)[:] = block
        return where

    def look(self, keys: Sequence[bytes], size_bytes: int) -> tuple[int, int]:
        return compared(blocks_of(keys, size_bytes), [self._at(key, size_bytes) for key in keys])

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._offsets.pop(key, None)
        if not self._offsets:
            self._memory.take_back()

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)

    def _at(self, key: bytes, size_bytes: int) -> memoryview:
        offset = self._offsets[key]
        return self._memory.view[offset : offset + size_bytes]

    def _transfer(
        self, operation: str, here: list[int], there: list[int], size_bytes: int
    ) -> Callable[[], None]:
        """A call that moves blocks between these offsets of our memory and of the holder's."""
        agent = self._agent
        ours = [(self._memory.address + offset, size_bytes, 0) for offset in here]
        theirs = [(self._holder_address + offset, size_bytes, 0) for offset in there]
        near = agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM")
        far = agent.prep_xfer_dlist(self._holder, theirs, "DRAM")
        self._prepared += [near, far]
        all_of_them = list(range(len(ours)))

        def transfer() -> None:
            deadline_s = time.monotonic() + WAIT_S
            handle = agent.make_prepped_xfer(operation, near, all_of_them, far, all_of_them)
            state = agent.transfer(handle)
            for spin in itertools.count(1):
                if state != "PROC":
                    break
                if spin % _SPINS == 0 and time.monotonic() > deadline_s:
                    raise StoreError(f"NIXL: {operation} is not over after {WAIT_S:g} s")
                time.sleep(0)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise StoreError(f"NIXL: {operation} ended as {state}")
            handle.release()

        return transfer
