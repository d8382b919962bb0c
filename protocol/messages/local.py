"""The local API: what an engine's process and the agent on its node say to each other.

Owns: the messages' types and bounds. One Unix stream socket a client, framed by
`kvcast.protocol.messages.framing`. Must not know: what the agent does with a request, or asyncio.

The client sends `Hello`; the agent answers `Welcome`, and with its first byte passes a file
descriptor of the arena (SCM_RIGHTS), and where the client may find blocks by itself two more: of
the index, to be read, and of a region of the client's own (`kvcast.protocol.messages.shared`); and,
as Welcome says, a fourth: of a socket for questions to the courier (`kvcast.protocol.courier`).
From then on the client sends requests with numbers of its own choice, as many at once as
`MAX_REQUESTS_IN_FLIGHT`, and the agent answers each exactly once, in any order, by a reply with
the same number or by `Failed`. `Release` has no answer.

An agent that may be followed by another says so in its Welcome, by a token. When its connection
breaks, the client connects anew and says the token, and what it still holds (`Resume`): an agent
that has taken over arena and clients answers that it has `resumed`, and passes nothing. Handles,
tickets and the region are then as they were, and what was asked and not answered is asked again.

A block that a get returns is pinned in the arena, and named by a handle, until the client
releases the handle or disconnects. Bytes to put are written by the client itself into the
extent that `Allocated` names, and become a block by `Commit`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from kvcast.protocol.messages.control import (
    U16,
    U32,
    U64,
    GroupInfo,
    Key,
    NamespaceInfo,
    NodeId,
    NodeInfo,
    Text,
)
from kvcast.protocol.messages.wire import KEY_BYTES
from msgspec import Meta, Struct

LOCAL_PROTOCOL_VERSION: Final = 5

MAX_KEYS: Final = 4096
"""Keys in one request."""
MAX_REQUESTS_IN_FLIGHT: Final = 256
"""Unanswered requests of one client; more are answered by `Failed` "busy"."""
MAX_HANDLES: Final = 65_536
"""Handles (pinned blocks) and open allocations of one client; more end as "busy"."""
MAX_LOCAL_MESSAGE_BYTES: Final = 1 << 20
"""Longest message either way; 4096 results of a get take 400 KiB at most."""

# Statuses of one key, or of a request that failed as a whole.
OK: Final = "ok"
MISS: Final = "miss"
"""No copy could be had in time; the result's reason is a `requester.MissReason` value."""
BUSY: Final = "busy"
"""A bound was met (handles, requests, fetches waiting); try again later."""
NO_ROOM: Final = "no_room"
"""The arena is full of pinned blocks, or the block is larger than the arena."""
QUOTA: Final = "quota"
"""The namespace's quota is full of pinned blocks, or smaller than the block."""
UNKNOWN_NAMESPACE: Final = "unknown_namespace"
FORBIDDEN: Final = "forbidden"
"""The namespace is not this node's to use."""
UNAVAILABLE: Final = "unavailable"
"""The agent has never reached a controller, or no home of the block took the put."""
INVALID: Final = "invalid"
"""The request names something that does not exist (an unknown ticket, group, …)."""

Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Parent = Annotated[bytes, Meta(max_length=16)]
Parents = Annotated[list[Parent], Meta(max_length=MAX_KEYS)]
Depths = Annotated[list[U32], Meta(max_length=MAX_KEYS)]
Handles = Annotated[list[U64], Meta(max_length=MAX_KEYS)]
Seconds = Annotated[float, Meta(ge=0.0, le=3600.0)]
Millis = Annotated[int, Meta(ge=0, le=255)]
Size = Annotated[int, Meta(ge=1, le=0xFFFFFFFF)]
Rate = Annotated[float, Meta(ge=0.0, le=1e12)]
PutAck = Literal["", "home", "replicas", "local"]

LOCAL_TIER: Final = "local"
TIERS: Final = (LOCAL_TIER, "arena", "ssd", "cold", "switch", "shared", "home", "bulk")
"""Where a block that was got came from, the nearest first: this node's arena, a further arena, its
disk, an object store; at least partly the switch's memory, an answer that several readers got, one
that only this node got, and TCP or RDMA."""

# --- client to agent ----------------------------------------------------------------------


class Resume(Struct, frozen=True):
    """A client comes back: the token of its Welcome, and the handles and tickets that it knows of;
    what else the agent holds for it is nobody's."""

    token: Annotated[bytes, Meta(max_length=64)]
    held: Annotated[list[U64], Meta(max_length=MAX_HANDLES)]


class Hello(Struct, frozen=True, tag="hello"):
    """First message on a connection; `client` is a name for logs. `read_only`: it will not put,
    and gets an arena that it cannot write. `index`: it can find and pin blocks by itself (it has
    registered for the agent's barriers)."""

    version: U16
    client: Text
    read_only: bool = False
    index: bool = False
    resume: Resume | None = None


class Get(Struct, frozen=True, tag="get"):
    """Fetch blocks into the arena and pin them.

    `deadline_s` from now; `gather_ms`: how long a home may hold its answer for joiners; `group`:
    reader group of the namespace, 0 = none; `expect`: another member of the group reads these
    blocks, so wait for its answer before asking for what is missing; `parents` and `depths` as in
    `Alloc`.
    """

    request: U64
    namespace: U16
    keys: Keys
    deadline_s: Seconds
    gather_ms: Millis = 0
    group: U16 = 0
    expect: bool = False
    parents: Parents = []
    depths: Depths = []


class Prefetch(Struct, frozen=True, tag="prefetch"):
    """Fetch blocks into the arena without pinning them; answered by Ack at once."""

    request: U64
    namespace: U16
    keys: Keys
    deadline_s: Seconds
    gather_ms: Millis = 0
    group: U16 = 0
    expect: bool = False
    parents: Parents = []
    depths: Depths = []


class Alloc(Struct, frozen=True, tag="alloc"):
    """Set bytes aside for blocks to put: keys and, beside them, sizes in bytes. Beside them, too,
    or empty where the engine does not say: the key of the block before each in its prefix (b"" = it
    is the first), and how many blocks are before it."""

    request: U64
    namespace: U16
    keys: Keys
    sizes: Annotated[list[Size], Meta(max_length=MAX_KEYS)]
    parents: Parents = []
    depths: Depths = []


class Commit(Struct, frozen=True, tag="commit"):
    """The bytes of these tickets are written: make them blocks and send them to their homes.
    `ack`: what is waited for: "home", the first of the homes; "replicas", all of them; "local",
    nobody; or "", what the agent was started with. `again`: another block of this namespace and
    size follows, so that room for it may come with the answer."""

    request: U64
    tickets: Handles
    ack: PutAck = ""
    again: bool = False


class Put(Struct, frozen=True, tag="put"):
    """What is written in a room that was given ahead (`Committed.room`) is this block: as Commit,
    and another room may come with the answer. `keys`: the one."""

    request: U64
    namespace: U16
    keys: Annotated[list[Key], Meta(min_length=1, max_length=1)]
    ticket: U64
    ack: PutAck = ""


class Abort(Struct, frozen=True, tag="abort"):
    """Give these tickets' bytes back; those that are not there any more are passed over."""

    request: U64
    tickets: Handles


class Release(Struct, frozen=True, tag="release"):
    """Let go of handles that gets returned. Not answered; unknown handles are counted. `given_up`:
    the numbers of gets whose blocks nobody waits for any more; those that have no answer yet have
    it at once, with what has come."""

    handles: Handles
    given_up: Handles = []


class Exists(Struct, frozen=True, tag="exists"):
    """How many of these blocks, counted from the first without a gap, the pool holds. `keys`: one
    after the other, 16 bytes each."""

    request: U64
    namespace: U16
    keys: Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]
    deadline_s: Seconds = 1.0


class Drop(Struct, frozen=True, tag="drop"):
    """Forget blocks here and at their homes."""

    request: U64
    namespace: U16
    keys: Keys


class Pin(Struct, frozen=True, tag="pin"):
    """Keep blocks that this node holds in its DRAM until `Unpin` or the client disconnects."""

    request: U64
    namespace: U16
    keys: Keys


class Unpin(Struct, frozen=True, tag="unpin"):
    """Undo one `Pin` of each block."""

    request: U64
    namespace: U16
    keys: Keys


class GetStats(Struct, frozen=True, tag="stats"):
    """Ask for the agent's counters."""

    request: U64


class FindNamespace(Struct, frozen=True, tag="find_namespace"):
    """Find or make a namespace; the agent asks the controller."""

    request: U64
    tenant: Text
    model: Text
    version: Text
    layout: Text


class FindGroup(Struct, frozen=True, tag="find_group"):
    """Find or make a reader group of nodes; the agent asks the controller. `at`: as in the
    controller's `GroupRequest`."""

    request: U64
    namespace: U16
    nodes: Annotated[list[NodeId], Meta(max_length=32)]
    at: U32 | None = None


class Weighed(Struct, frozen=True, tag="weighed"):
    """What an engine has made of prefixes that the pool held, since it last said so: how many it
    has loaded whole, a part of, or nothing of. And what it has found that loading and computing
    take, in tokens a second (0: not known). Answered by Ack."""

    request: U64
    whole: U32 = 0
    part: U32 = 0
    computed: U32 = 0
    load_tokens_per_s: Rate = 0.0
    compute_tokens_per_s: Rate = 0.0


class DescribePool(Struct, frozen=True, tag="describe_pool"):
    """Ask what the agent knows of the pool, and which of `keys` this node holds."""

    request: U64
    namespace: U16 = 0
    keys: Keys = []


# --- agent to client ----------------------------------------------------------------------


class Welcome(Struct, frozen=True, tag="welcome"):
    """Answer to Hello; with it comes the arena's file descriptor, `arena_bytes` long. With
    `index_bytes` above 0 come the index, so long, and a region, and `pinned_bytes` is how much of
    the arena the client may pin there. `token`: to come back with; empty where that is no use.
    `resumed`: the client is known, and no descriptors come. `courier`: so does
    the courier's socket."""

    version: U16
    node_id: Text
    arena_bytes: U64
    index_bytes: U64 = 0
    pinned_bytes: U64 = 0
    token: bytes = b""
    resumed: bool = False
    courier: bool = False


class Rejected(Struct, frozen=True, tag="rejected"):
    """Instead of Welcome, before the agent closes the connection."""

    reason: Text


class GotBlock(Struct, frozen=True, array_like=True):
    """One key of a Get. With status "ok": `handle` to release, and where the bytes lie in the
    arena. `tier`: one of `TIERS`. Else `reason` says why not."""

    status: str
    reason: str = ""
    tier: str = ""
    handle: U64 = 0
    offset: U64 = 0
    size_bytes: U64 = 0
    digest: U64 = 0


class Got(Struct, frozen=True, tag="got"):
    """Answer to Get: one entry a key, in order."""

    request: U64
    blocks: list[GotBlock]


class Extent(Struct, frozen=True, array_like=True):
    """One key of an Alloc. With status "ok": the ticket, and where to write."""

    status: str
    ticket: U64 = 0
    offset: U64 = 0


class Allocated(Struct, frozen=True, tag="allocated"):
    """Answer to Alloc: one entry a key, in order."""

    request: U64
    extents: list[Extent]


class PutBlock(Struct, frozen=True, array_like=True):
    """One ticket of a Commit. With status "ok": `copies` of homes that acknowledged (this node
    included, where it is one), and the digest of the copy in force here."""

    status: str
    copies: int = 0
    digest: U64 = 0


class Committed(Struct, frozen=True, tag="committed"):
    """Answer to Commit and Put: one entry a ticket, in order. `room`: for the next block of this
    namespace and size, given ahead; its ticket is for Put or Abort."""

    request: U64
    blocks: list[PutBlock]
    room: Extent | None = None


class Ack(Struct, frozen=True, tag="ack"):
    """Answer to Prefetch, Abort, Exists, Drop, Pin, Unpin and Weighed: how many keys, tickets or
    prefixes it did (for Exists: the length of the prefix that exists)."""

    request: U64
    count: U64


class Stats(Struct, frozen=True, tag="stats_reply"):
    """Answer to GetStats: totals since the agent's start and present values, by name."""

    request: U64
    counters: dict[str, float]


class FoundNamespace(Struct, frozen=True, tag="found_namespace"):
    request: U64
    info: NamespaceInfo


class FoundGroup(Struct, frozen=True, tag="found_group"):
    request: U64
    info: GroupInfo


class HeldBlock(Struct, frozen=True, array_like=True):
    """A block in this node's DRAM; `home`: held as one of its homes, not merely cached."""

    key: Key
    size_bytes: U64
    digest: U64
    home: bool


class PoolDescription(Struct, frozen=True, tag="pool"):
    """Answer to DescribePool. `index` -1 and `epoch` 0: the agent has not reached a controller.
    `homes`: for each key that was asked about, the node that answers for it, "" for none."""

    request: U64
    node_id: Text
    index: int
    epoch: U64
    connected: bool
    nodes: list[NodeInfo]
    namespaces: list[NamespaceInfo]
    groups: list[GroupInfo]
    held: list[HeldBlock]
    homes: list[Text] = []


class Failed(Struct, frozen=True, tag="failed"):
    """The request failed as a whole, by one of the statuses above."""

    request: U64
    status: str
    reason: Text


Numbered = (
    Get
    | Prefetch
    | Alloc
    | Commit
    | Put
    | Abort
    | Exists
    | Drop
    | Pin
    | Unpin
    | GetStats
    | FindNamespace
    | FindGroup
    | Weighed
    | DescribePool
)
"""Requests that are answered."""
Request = Numbered | Release
ClientMessage = Hello | Request
AgentReply = (
    Got
    | Allocated
    | Committed
    | Ack
    | Stats
    | FoundNamespace
    | FoundGroup
    | PoolDescription
    | Failed
)
ServerMessage = Welcome | Rejected | AgentReply
