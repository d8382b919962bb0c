"""The bytes of every block of a bench: made from its key alone, so that each can be checked.

Owns: the function from a key to bytes, and the comparison. Must not know: pools, clients.

Philox is a counter-based generator whose 128-bit key is the block's key, and whose raw stream
numpy promises never to change; 64 KiB take some 50 microseconds.
"""

from __future__ import annotations

import numpy as np


def block_bytes(key: bytes, size_bytes: int) -> bytes:
    """The `size_bytes` (at least 1) that the block of this 16-byte key holds in every bench."""
    if len(key) != 16:
        raise ValueError(f"a key has 16 bytes, not {len(key)}")
    if size_bytes < 1:
        raise ValueError("a block has at least one byte")
    words = np.random.Philox(key=int.from_bytes(key, "big")).random_raw((size_bytes + 7) // 8)
    return words.astype("<u8", copy=False).tobytes()[:size_bytes]


def wrong_bytes(key: bytes, size_bytes: int, got: bytes | memoryview) -> int:
    """How many bytes of `got` differ from the block's; missing and surplus bytes count too."""
    wanted = block_bytes(key, size_bytes)
    if got == wanted:
        return 0
    common = min(len(wanted), len(got))
    left = np.frombuffer(wanted, np.uint8, common)
    right = np.frombuffer(got, np.uint8, common)
    return int(np.count_nonzero(left != right)) + abs(len(wanted) - len(got))
