"""Redis, by redis-py with hiredis: SET, GET, MGET, EXISTS over one TCP connection a client.

Owns: which commands an operation is. Must not know: how the server runs.

EXISTS of many keys answers with a number, which is less than kvcast tells; it is the fastest that
Redis has to offer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcast.bench.stores.client import REMOTE, WAIT_S, Buffer, StoreClient, Where


class RedisClient(StoreClient):
    """A connection to the server at `options["host"]`, `options["port"]`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        redis: Any = importlib.import_module("redis")
        self._redis = redis.Redis(options["host"], options["port"], socket_timeout=WAIT_S)
        self._redis.ping()

    def putter(self, key: bytes, data: bytes, where: Where, *, local: bool) -> Callable[[], None]:
        return lambda: self._redis.set(key, data)

    def getter(
        self, keys: Sequence[bytes], size_bytes: int, where: Where
    ) -> Callable[[], Sequence[Buffer | None]]:
        if len(keys) == 1:
            (key,) = keys
            return lambda: [self._redis.get(key)]
        return lambda: self._redis.mget(keys)

    def asker(self, keys: Sequence[bytes]) -> Callable[[], int]:
        return lambda: self._redis.exists(*keys)

    def origins(self) -> set[str]:
        return {REMOTE}

    def drop(self, keys: Sequence[bytes]) -> None:
        self._redis.delete(*keys)

    def close(self) -> None:
        self._redis.close()
