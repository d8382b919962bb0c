"""A client of an agent that holds what it can until it dies: for a soak to kill.

    python -m kvcast.bench.soak.client SOCKET NAMESPACE KEY ...

Owns: what such a client holds: blocks that it got, pins, and blocks that it is putting, of which
some are reserved and not committed at any moment. It never ends by itself, and prints a ready line
once it holds something. Must not know: who kills it, and when.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from kvcast.bench.hostile_bytes import BLOCK_BYTES
from kvcast.hostagent.client import Client, KvcastError, PutError
from kvcast.service.readiness import announce_ready
from kvcast.workloads import content

_PUT_BLOCKS = 4
_PAUSE_S = 0.1
"""So that one such client does not empty the arena of what the others read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Hold blocks, pins and reservations until killed; 1 where the agent does not answer."""
    path, namespace, *keys = sys.argv[1:] if argv is None else argv
    try:
        with Client(path, name="soak client", timeout_s=20.0) as client:
            return _hold(client, int(namespace), [bytes.fromhex(key) for key in keys])
    except KvcastError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _hold(client: Client, namespace: int, keys: Sequence[bytes]) -> int:
    held = client.get(namespace, keys, deadline_s=2.0)
    pinned = client.pin(namespace, keys)
    announce_ready(held=sum(block is not None for block in held), pinned=pinned)
    while True:
        fresh = [os.urandom(16) for _ in range(_PUT_BLOCKS)]
        try:
            client.put(namespace, {key: content.block_bytes(key, BLOCK_BYTES) for key in fresh})
        except PutError:
            pass  # a home is dead, or the arena is held by others
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    raise SystemExit(main())
