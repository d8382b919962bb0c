"""DRAM of sixteen blocks, above whatever a test puts below it."""

from __future__ import annotations

from typing import Final

from kvcast.hostagent.core.store import Copy, Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages.wire import BlockId, digest_of

SIZE: Final = 4096
ARENA: Final = 16 * SIZE


def block(number: int, namespace: int = 1) -> BlockId:
    return BlockId(namespace, number.to_bytes(16, "big"))


class Dram:
    """A store and its memory. `work`: what lies below does all that it is to do."""

    def __init__(self, arena_bytes: int = ARENA) -> None:
        self.memory = memoryview(bytearray(arena_bytes))
        self.store = Store(Allocator(arena_bytes, 8192))

    def work(self) -> None:
        raise NotImplementedError

    def put(self, number: int, data: bytes = b"", namespace: int = 1) -> Copy:
        data = data or bytes([number]) * SIZE
        copy = self.store.reserve(block(number, namespace), len(data))
        self.memory[copy.offset : copy.offset + len(data)] = data
        return self.store.commit(copy, digest_of(data), home=True)

    def fill(self, numbers: range, namespace: int = 1) -> None:
        for number in numbers:
            self.put(number, namespace=namespace)
            self.work()
