"""kvcast as a user asks it: the blocking client on each side's agent.

Owns: which calls of `kvcast.hostagent.client` an operation is. Must not know: how the pool runs.

A get returns a view of the agent's arena, pinned until `release`. A block says by its tier whether
it came from this node's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcast.bench.stores.client import LOCAL, REMOTE, WAIT_S, Buffer, StoreClient, Where
from kvcast.hostagent.client import Block, Client


class KvcastClient(StoreClient):
    """A client of the agent behind the Unix socket `options["socket"]`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._client = Client(options["socket"], name="bench")
        self._namespace = self._client.namespace("bench", "store", "1", "bytes")
        self._held: list[Block | None] = []

    def putter(self, key: bytes, data: bytes, where: Where, *, local: bool) -> Callable[[], None]:
        blocks = {key: data}
        return lambda: self._client.put(self._namespace, blocks)

    def placer(self, key: bytes, data: bytes) -> Callable[[], None]:
        room = self._client.reserve(self._namespace, {key: len(data)})
        if key in room.views:
            room.views[key][:] = data
        return lambda: self._client.commit(room)

    def getter(
        self, keys: Sequence[bytes], size_bytes: int, where: Where
    ) -> Callable[[], Sequence[Buffer | None]]:
        def get() -> Sequence[Buffer | None]:
            blocks = self._client.get(self._namespace, keys, WAIT_S)
            self._held += blocks
            return [None if block is None else block.data for block in blocks]

        return get

    def asker(self, keys: Sequence[bytes]) -> Callable[[], int]:
        return lambda: self._client.exists(self._namespace, keys, WAIT_S)

    def origins(self) -> set[str]:
        tiers = {block.tier for block in self._held if block is not None}
        return {LOCAL if tier == "local" else REMOTE for tier in tiers}

    def release(self) -> None:
        held, self._held = self._held, []
        for block in held:
            if block is not None:
                block.release()

    def drop(self, keys: Sequence[bytes]) -> None:
        self._client.drop(self._namespace, keys)

    def close(self) -> None:
        self._client.close()
