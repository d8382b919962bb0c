"""The local API's short way: what a client asks the courier, and what it is told, byte by byte.

Owns: the layout of both messages. One message each on a socket of the client's own
(SOCK_SEQPACKET), which Welcome passes. Must not know: who reads them (`kvcast.protocol.courier`
does, compiled, and says what it takes). Numbers are in the machine's own order."""

from __future__ import annotations

import struct
from typing import Final

QUESTION: Final = struct.Struct("=HHIQ16sQ")
"""GET: namespace, deadline in ms, a number of the client's choice, key, and what the namespace was
said to mean (0: nothing was said). RELEASE: its number is the handle, and all else is 0."""
GET: Final = 1
RELEASE: Final = 2
MAX_DEADLINE_MS: Final = 3_600_000

ANSWER: Final = struct.Struct("=HHI5Q")
"""GIVEN: tier (of `TIERS`), 0, the question's number, handle, offset in the arena, size in bytes,
digest. ASK_AGENT: the number; all else is 0."""
GIVEN: Final = 1
ASK_AGENT: Final = 2
TIERS: Final = ("home", "shared", "switch")
COURIER_BYTES: Final = 2 * ANSWER.size
"""For who reads an answer: more than one has."""
FIRST_HANDLE: Final = 1 << 62
"""Handles of what the courier gives count from here on; those of the socket from below."""
