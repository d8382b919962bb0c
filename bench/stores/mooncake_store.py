"""Mooncake Store over TCP: zero-copy puts and gets between registered memory and a segment.

Owns: which calls of `mooncake.store` an operation is. Must not know: how the master runs.

Every client contributes a segment, and every put says by name which segment it wants; so what the
holder has is remote for a reader, and what a reader has put into its own segment is local.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcast.bench.stores.client import (
    LOCAL,
    REMOTE,
    Buffer,
    Memory,
    StoreClient,
    StoreError,
    Where,
)


class MooncakeClient(StoreClient):
    """A client at the address `options["host"]`, of the master at `options["master"]`, with a
    segment of `options["segment_bytes"]` and registered memory of `options["memory_bytes"]`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        mooncake: Any = importlib.import_module("mooncake.store")
        self._store = mooncake.MooncakeDistributedStore()
        _checked(
            "setup",
            self._store.setup(
                options["host"],
                "P2PHANDSHAKE",
                options["segment_bytes"],
                options["memory_bytes"],
                "tcp",
                "",
                options["master"],
            ),
        )
        self._memory = Memory(options["memory_bytes"])
        _checked(
            "register_buffer",
            self._store.register_buffer(self._memory.address, self._memory.size_bytes),
        )
        self._origins: set[str] = set()
        self.introduction = {"segment": self._store.get_hostname()}
        self._here = _config(mooncake, self.introduction["segment"])
        self._there = _config(mooncake, options.get("holder", self.introduction)["segment"])
        self._endpoint = self._endpoint_of_this_client()

    def putter(self, key: bytes, data: bytes, where: Where, *, local: bool) -> Callable[[], None]:
        address, size_bytes, name = self._take(len(data), data), len(data), key.hex()
        config = self._here if local else self._there
        return lambda: _checked("put_from", self._store.put_from(name, address, size_bytes, config))

    def getter(
        self, keys: Sequence[bytes], size_bytes: int, where: Where
    ) -> Callable[[], Sequence[Buffer | None]]:
        names = [key.hex() for key in keys]
        addresses = [self._take(size_bytes) for _ in keys]
        sizes = [size_bytes] * len(keys)
        self._see(names)

        def get() -> Sequence[Buffer | None]:
            if len(names) == 1:
                came = [self._store.get_into(names[0], addresses[0], size_bytes)]
            else:
                came = self._store.batch_get_into(names, addresses, sizes)
            return [
                self._at(address, size_bytes) if count == size_bytes else None
                for address, count in zip(addresses, came, strict=True)
            ]

        return get

    def asker(self, keys: Sequence[bytes]) -> Callable[[], int]:
        names = [key.hex() for key in keys]
        return lambda: sum(found == 1 for found in self._store.batch_is_exist(names))

    def origins(self) -> set[str]:
        return set(self._origins)

    def release(self) -> None:
        self._memory.take_back()
        self._origins.clear()

    def drop(self, keys: Sequence[bytes]) -> None:
        # By force: otherwise what was read lately could not be removed.
        self._store.batch_remove([key.hex() for key in keys], True)

    def close(self) -> None:
        self._store.close()

    def _take(self, size_bytes: int, data: bytes = b"") -> int:
        """The address of registered memory, with these bytes in it."""
        offset = self._memory.take(size_bytes)
        self._memory.view[offset : offset + len(data)] = data
        return self._memory.address + offset

    def _at(self, address: int, size_bytes: int) -> memoryview:
        offset = address - self._memory.address
        return self._memory.view[offset : offset + size_bytes]

    def _see(self, names: list[str]) -> None:
        """Note in whose segment these blocks lie."""
        for endpoint in self._endpoints(names):
            self._origins.add(LOCAL if endpoint == self._endpoint else REMOTE)

    def _endpoints(self, names: list[str]) -> list[str]:
        """Of the clients that hold these blocks."""
        replicas = self._store.batch_get_replica_desc(names).values()
        found = [each.get_memory_descriptor() for of_one in replicas for each in of_one]
        return [each.buffer_descriptor.transport_endpoint for each in found]

    def _endpoint_of_this_client(self) -> str:
        """What replicas in our segment are said to lie at; the store tells it of replicas only."""
        key = os.urandom(16)
        self.putter(key, b"here", {}, local=True)()
        (endpoint,) = self._endpoints([key.hex()])
        self.release()
        self.drop([key])
        return endpoint


def _config(mooncake: Any, segment: str) -> Any:
    config = mooncake.ReplicateConfig()
    config.replica_num = 1
    config.preferred_segment = segment
    return config


def _checked(what: str, code: int) -> None:
    if code != 0:
        raise StoreError(f"mooncake: {what} failed with {code}")
