"""The bulk link: what agents say to each other over TCP.

Owns: the messages' types, their bounds, and the order of a conversation. Must not know: who is
asked when, sockets, the arena. It carries what datagrams do not: puts to homes, questions about
many blocks, and blocks whose READs no answer reaches.

The caller opens the connection, sends `BulkHello`, and then makes one request after another; the
answer to each comes before the next is sent. Messages are framed by
`kvcast.protocol.messages.framing`; blocks' bytes follow their header unframed:

    BulkPut  -> BulkGo -> bytes -> BulkTaken     of those blocks that the BulkGo wants
    BulkPut  -> BulkGo                           it wants none
    BulkPut + bytes -> BulkTaken                 where `follows` says so
    BulkGet  -> BulkBlocks + bytes               of those blocks that are held
    BulkGet  -> (BulkBlocks + bytes) ...         the same, where `may_read` says so: some by some
    BulkDrop -> BulkDone;  BulkExists -> BulkHeld
    BulkConvey -> BulkDone                       done: the connection is a conveyor from now on

Any request may be refused as a whole by a BulkDone. A put and a get name many blocks, so that all
of them cost one round trip; the bytes of all blocks then follow each other without anything
between, in the order in which they were named, and a get may leave out the beginning of a block
that it has already. Who receives bytes compares each block's digest with the header's before
anybody sees them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Final

from kvcast.protocol.messages.control import (
    U16,
    U32,
    U64,
    Key,
    NamespaceInfo,
    NodeId,
    hash_of_names,
    number_of,
)
from kvcast.protocol.messages.wire import KEY_BYTES
from msgspec import Meta, Struct

BULK_PROTOCOL_VERSION: Final = 5
MAX_BULK_KEYS: Final = 4096
MAX_BULK_MESSAGE_BYTES: Final = 1 << 18
"""Longest framed message; 4096 keys take 80 KiB. A block's bytes are not framed."""

MAX_BULK_BLOCKS: Final = 256
"""Blocks of one put or get; their headers take 12 KiB."""
MAX_BULK_BYTES: Final = 32 << 20
"""Bytes of blocks in one put, or in the answer to one get, unless one block alone has more. So much
may be held, or set aside, for one connection."""

MAX_FOLLOWING_BYTES: Final = 4 << 20
"""Bytes of blocks of a put that follow without being asked for: what a round trip is worth, and
what may be sent in vain."""

Size = Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
Parent = Annotated[bytes, Meta(max_length=16)]
Keys = Annotated[list[Key], Meta(max_length=MAX_BULK_KEYS)]

# Statuses of requests and of blocks.
DONE: Final = "done"
WANTED: Final = "wanted"
"""BulkPut: the callee has room for the block and lacks it."""
LATER: Final = "later"
"""BulkGet: held, but the answer is long enough; ask again. Never of the first block held, of the
whole answer."""
HELD: Final = "held"
"""BulkPut: the callee holds a copy already; it stays as it is."""
LANDED: Final = frozenset({DONE, HELD})
"""BulkPut: the callee has a copy now."""
NOT_FOUND: Final = "not_found"
"""BulkGet: the callee has no such block."""
BELOW: Final = "below"
"""BulkGet: held in a tier below DRAM, from which it has not come in time; READ it."""
NOT_HOME: Final = "not_home"
"""BulkPut: by the callee's map the block is not its to hold."""
STALE: Final = "stale"
"""BulkPut: to the callee the namespace's number means something else, or its keys are made in
another way: one of the two has not heard of a change yet."""
COMPANY: Final = "company"
"""BulkGet: held, but another node wants it, too: READ it, so that both get it by one answer."""
NO_ROOM: Final = "no_room"
FORBIDDEN: Final = "forbidden"
"""The namespace is unknown to the callee, or not the caller's to use."""
WRONG_DIGEST: Final = "wrong_digest"


class BulkHello(Struct, frozen=True, tag="hello"):
    """First message of a caller: who it is."""

    version: U16
    node_id: NodeId


class PutHeader(Struct, frozen=True, array_like=True):
    """One block of a put. `parent`: the key of the block before it in its prefix, b"" where there
    is none or it is not known; `depth`: how many blocks are before it."""

    key: Key
    size_bytes: Size
    digest: U64
    parent: Parent = b""
    depth: U32 = 0


OLDEST_MAP: Final = 0
"""The epoch of a map that knows of no move."""


class BulkPut(Struct, frozen=True, tag="put"):
    """Hold these blocks. `epoch`: of the caller's map, by which the callee is one of their homes,
    and the caller sends them to all others; of an older map than the callee's, `OLDEST_MAP` for
    one, the callee hands them on if they are to be handed over. `meaning`: what the namespace means
    to the caller (`meaning_of`). `follows`: the bytes of all blocks, of `MAX_FOLLOWING_BYTES` at
    most, come at once; those that are not wanted are read and thrown away, and the answer says what
    became of each. `spare`: only if there is room to spare, so that nothing is evicted."""

    namespace: U16
    epoch: U64
    meaning: U64
    blocks: Annotated[list[PutHeader], Meta(min_length=1, max_length=MAX_BULK_BLOCKS)]
    follows: bool = False
    spare: bool = False


class WantedBlock(Struct, frozen=True, array_like=True):
    """One block of a get: the copy of `digest` (0 = any), without its first `start_bytes`."""

    key: Key
    digest: U64 = 0
    start_bytes: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 0


class BulkGet(Struct, frozen=True, tag="get"):
    """Send these blocks. `may_read`: the caller can READ them as well. Then the answer may be
    several, each of the next of the blocks, and what another node wants, too, before its turn has
    come, is COMPANY."""

    namespace: U16
    blocks: Annotated[list[WantedBlock], Meta(min_length=1, max_length=MAX_BULK_BLOCKS)]
    may_read: bool = False


class BulkDrop(Struct, frozen=True, tag="drop"):
    """Forget these blocks."""

    namespace: U16
    keys: Keys


class BulkExists(Struct, frozen=True, tag="exists"):
    """Which of these blocks do you hold? `keys`: one after the other, 16 bytes each."""

    namespace: U16
    keys: Annotated[bytes, Meta(max_length=MAX_BULK_KEYS * KEY_BYTES)]


class BulkConvey(Struct, frozen=True, tag="convey"):
    """Let this connection be a conveyor (`kvcast.protocol.conveyor`): nothing of what is said here
    is said on it any more. `pushes`: not for blocks to be asked for, but for the caller to push
    them (`kvcast.protocol.pushing`)."""

    version: U16
    pushes: bool = False


CONVEYOR_VERSION: Final = 4

Statuses = Annotated[list[str], Meta(min_length=1, max_length=MAX_BULK_BLOCKS)]


class BulkGo(Struct, frozen=True, tag="go"):
    """Answer to BulkPut, one status a block: send the bytes of those that are WANTED. The others
    are HELD, or refused."""

    statuses: Statuses


class BulkTaken(Struct, frozen=True, tag="taken"):
    """The bytes have come: one status for each block that was WANTED, or whose bytes followed."""

    statuses: Statuses


class BulkDone(Struct, frozen=True, tag="done"):
    """The request ended; `count`: blocks dropped."""

    status: str
    count: U64 = 0


class BlockHeader(Struct, frozen=True, array_like=True):
    """One block of an answer. With status DONE, its bytes from the get's `start_bytes` on follow;
    with any other there is nothing."""

    status: str
    size_bytes: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 0
    digest: U64 = 0


class BulkBlocks(Struct, frozen=True, tag="blocks"):
    """Answer to BulkGet, or part of it, one header a block; the bytes of all of them follow."""

    blocks: Annotated[list[BlockHeader], Meta(min_length=1, max_length=MAX_BULK_BLOCKS)]


class BulkHeld(Struct, frozen=True, tag="held"):
    """Answer to BulkExists: bit i of byte i // 8 (lowest first) stands for key i."""

    bitmap: Annotated[bytes, Meta(max_length=MAX_BULK_KEYS // 8)]


BulkRequest = BulkPut | BulkGet | BulkDrop | BulkExists | BulkConvey
CallerMessage = BulkHello | BulkRequest
CalleeMessage = BulkGo | BulkTaken | BulkDone | BulkBlocks | BulkHeld


def meaning_of(info: NamespaceInfo) -> int:
    """What a namespace stands for and whether its keys have a secret, as 64 bits of BLAKE2b: by it
    two nodes know that they name the same blocks. One that was made again after it was deleted, and
    so has another number, does not mean the same."""
    parts = (info.tenant, info.model, info.version, info.layout)
    return _meaning(info.namespace, parts, info.has_secret)


@lru_cache(maxsize=1024)
def _meaning(namespace: int, parts: tuple[str, str, str, str], has_secret: bool) -> int:
    more = b"" if namespace == number_of(*parts) else namespace.to_bytes(2, "big")
    return hash_of_names(b"kvcast-meaning", parts, bytes([has_secret]) + more)
