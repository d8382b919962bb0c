"""Bytes of a pool's blocks changed where they lie, as a broken memory would.

Owns: finding them. Must not know: who asks for them afterwards.
"""

from __future__ import annotations

import mmap

from kvcast.hostagent.client import AsyncClient
from kvcast.hostagent.connectors.naming import keys_of
from kvcast.topologies.pool import Pool


async def corrupt(pool: Pool, model: str, block_hash: bytes, part: int = 0) -> int:
    """Change one byte of a part of an engine's block, by vLLM's hash of it, on all nodes that hold
    it; on how many that was. The model has one namespace."""
    key = keys_of(block_hash, part + 1)[part]
    places = 0
    for node, socket in pool.sockets.items():
        async with await AsyncClient.connect(str(socket)) as client:
            names = (await client.describe()).namespaces
            [namespace] = [one.namespace for one in names if one.model == model]
            if not (await client.describe(namespace, [key])).held:
                continue
            [block] = await client.get(namespace, [key])
            assert block is not None
            with block:
                data = bytes(block.data)
        [path] = [one for one in pool.arenas if one.name.endswith(f"-{node}.arena")]
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            at = arena.find(data)
            assert at >= 0
            arena[at] ^= 1
        places += 1
    return places
