"""The local API's short way: what a client asks the courier, and what it is told, byte by byte.

Owns: the layout of both messages. One message each on a socket of the client's own
(SOCK_SEQPACKET), which Welcome passes. Must not know: who reads them (`kvcast.protocol.courier`
does, compiled, and says what it takes). Numbers are in the machine's own order."""

from __future__ import annotations

import struct
from typing import Final

QUESTION: Final = struct.Struct("=HHIQ16sQ")
"""GET: namespace, deadline in ms, a number of the client's choice, key, and what the namespace was
said to mean (0: nothing was said). RELEASE: its number is the handle, all else is 0, and behind it
may stand further handles, a `HANDLE` each: `MAX_MANY` at most."""
GET: Final = 1
RELEASE: Final = 2
GET_MANY: Final = 3
"""As GET, and behind it further keys: blocks of one namespace, `MAX_MANY` at most. The answer is
one message with an ANSWER for each, in their order, all with the question's number; or a single
one that says ASK_AGENT: for all of them."""
MAX_MANY: Final = 128
KEY: Final = struct.Struct("=16s")
HANDLE: Final = struct.Struct("=Q")
PUT: Final = 4
"""What the client has written into room that it was given is this block (`PUT_QUESTION`: a
QUESTION, in which one of `ACKS` stands instead of a deadline, and the room's ticket behind it). The
answer is PUT_HOME, or ASK_AGENT. Further rooms and blocks of the namespace may follow, a `ROOM`
each: `MAX_MANY` at most. Then the answer is one message, as to GET_MANY."""
PUT_QUESTION: Final = struct.Struct("=HHIQ16sQQ")
ROOM: Final = struct.Struct("=16sQ")
"""Key and ticket."""
ACKS: Final = ("", "home", "local", "replicas")
"""What is to be waited for, as `local.Put` says it; the first: as the agent does."""
ACK_BY_DEFAULT, ACK_HOME, ACK_LOCAL, ACK_REPLICAS = range(len(ACKS))
EXISTS: Final = 5
"""How many of these blocks are there, counted from the first without a gap? As GET_MANY, with up to
`MAX_CHAIN` keys. The answer is COUNTED, or ASK_AGENT."""
MAX_CHAIN: Final = 1024
MAX_DEADLINE_MS: Final = 3_600_000

ANSWER: Final = struct.Struct("=HHI5Q")
"""GIVEN: tier (of `TIERS`), 0, the question's number, handle, offset in the arena, size in bytes,
digest. ASK_AGENT: the number; all else is 0. PUT_HOME: 0, 0, the number, ticket and offset of the
room for the next block of this namespace and size (0: there is none), how many homes have the
block, as far as that was waited for, its digest. COUNTED: 1 where only the agent knows of the
blocks behind those that were counted, else 0; 0, the number, 0, 0, how many are there, 0."""
GIVEN: Final = 1
ASK_AGENT: Final = 2
PUT_HOME: Final = 3
COUNTED: Final = 4
TIERS: Final = ("home", "shared", "switch")
COURIER_BYTES: Final = (MAX_MANY + 1) * ANSWER.size
"""For who reads an answer: more than one has."""
FIRST_HANDLE: Final = 1 << 62
"""Handles of what the courier gives count from here on; those of the socket from below."""
