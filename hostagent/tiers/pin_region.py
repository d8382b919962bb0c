"""The memory in which one client says what it pins: made by the agent, written by the client.

Owns: that memory, which has no name in any file system. Must not know: what is written there
(`kvcast.protocol.messages.shared`). The client can write it, and nothing else with it: its length
is sealed, since an agent that reads beyond the end of a file is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from kvcast.protocol.messages.shared import REGION_BYTES


class PinRegion:
    """`fd` is for the client; close it when it is sent. `found`: a region that a former agent made,
    and whose descriptor is ours now; OSError where it is none."""

    def __init__(self, found: int | None = None) -> None:
        if found is not None:
            self.fd = found
            if not fcntl.fcntl(found, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("a region without its seal")
            self._map = mmap.mmap(found, REGION_BYTES)
            self.memory = memoryview(self._map)
            return
        self.fd = os.memfd_create("kvcast-pins", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, REGION_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self.fd, REGION_BYTES)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Unmap it here; the client's mapping stays its own."""
        self.memory.release()
        self._map.close()
