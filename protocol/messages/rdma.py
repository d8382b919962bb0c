"""The RDMA link: what agents say to each other over TCP about bytes that their network cards move.

Owns: the messages' types, their bounds, and the order of a conversation. Must not know: verbs,
sockets, the arena. Blocks, statuses and what a request must say are those of the bulk link
(`kvcast.protocol.messages.bulk`); only the blocks' bytes do not come this way.

The caller opens the connection and says who it is and where its half of the queue pair is; the
callee makes the other half. Then the caller makes requests, each with a number of its own, at most
`MAX_RDMA_REQUESTS` of which are open at once:

    RdmaHello -> RdmaWelcome, or RdmaRefusal and the end
    RdmaGet -> RdmaWindows;  the caller READs;   RdmaFinished -> RdmaTaken
    RdmaPut -> RdmaWindows;  the caller WRITEs;  RdmaFinished -> RdmaTaken

A window lets this queue pair, and nothing else, read (or write) the bytes of one block, until
RdmaFinished or the end of the connection; where no block has a window, the request ends with
RdmaWindows. What has been written is committed after its window is closed, and if it has the digest
that was promised. Of a get, the windows begin behind the bytes that the caller has already.
"""

from __future__ import annotations

from typing import Annotated, Final

from kvcast.protocol.messages.bulk import PutHeader, WantedBlock
from kvcast.protocol.messages.control import U16, U24, U32, U64, NodeId
from msgspec import Meta, Struct

RDMA_PROTOCOL_VERSION: Final = 1
MAX_RDMA_REQUESTS: Final = 8
"""Open at once on one connection: while the bytes of some move, windows are opened for others."""
MAX_RDMA_BLOCKS: Final = 32
"""Blocks of one request."""
MAX_RDMA_MESSAGE_BYTES: Final = 1 << 14


class Endpoint(Struct, frozen=True, array_like=True):
    """One half of a queue pair. `gid`: of its card's port; `psn`: of the first packet that it
    sends; `mtu_bytes`: of the longest that it takes; `reads`: so many READs it answers at once."""

    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    queue_pair: U24
    psn: U24
    mtu_bytes: Annotated[int, Meta(ge=256, le=4096)]
    reads: Annotated[int, Meta(ge=1, le=255)]


class RdmaHello(Struct, frozen=True, tag="hello"):
    """First message of a caller."""

    version: U16
    node_id: NodeId
    endpoint: Endpoint


class RdmaWelcome(Struct, frozen=True, tag="welcome"):
    """Answer to RdmaHello: the other half."""

    endpoint: Endpoint


class RdmaRefusal(Struct, frozen=True, tag="refusal"):
    """Answer to RdmaHello: no more queue pairs can be had here."""


class RdmaGet(Struct, frozen=True, tag="get"):
    """Let me read these blocks."""

    request: U32
    namespace: U16
    blocks: Annotated[list[WantedBlock], Meta(min_length=1, max_length=MAX_RDMA_BLOCKS)]


class RdmaPut(Struct, frozen=True, tag="put"):
    """Let me write these blocks; the rest as in BulkPut."""

    request: U32
    namespace: U16
    epoch: U64
    meaning: U64
    blocks: Annotated[list[PutHeader], Meta(min_length=1, max_length=MAX_RDMA_BLOCKS)]


class Window(Struct, frozen=True, array_like=True):
    """What may be done with one block: with status DONE (of a get: size and digest are the whole
    block's) or WANTED (of a put) at this address with this key; with any other, nothing. Status
    "unreachable": it was not the request's turn in time, and there is another way."""

    status: str
    size_bytes: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)] = 0
    digest: U64 = 0
    address: U64 = 0
    key: U32 = 0


class RdmaWindows(Struct, frozen=True, tag="windows"):
    """Answer to RdmaGet and RdmaPut, one window a block."""

    request: U32
    windows: Annotated[list[Window], Meta(min_length=1, max_length=MAX_RDMA_BLOCKS)]


class RdmaFinished(Struct, frozen=True, tag="finished"):
    """Everything was read, or written: close the windows."""

    request: U32


class RdmaTaken(Struct, frozen=True, tag="taken"):
    """Answer to RdmaFinished: the request's windows are closed; of a put, one status for each block
    that was WANTED."""

    request: U32
    statuses: Annotated[list[str], Meta(max_length=MAX_RDMA_BLOCKS)]


RdmaCallerMessage = RdmaHello | RdmaGet | RdmaPut | RdmaFinished
RdmaCalleeMessage = RdmaWelcome | RdmaRefusal | RdmaWindows | RdmaTaken
