"""The control link: what an agent and the controller say to each other.

Owns: the messages' types. One TCP connection an agent, framed by
`kvcast.protocol.messages.framing`; the agent connects, registers, and renews its lease; the
controller pushes the bucket map and asks. Must not know: who sends when (the agent's and the
controller's cores decide that).

A connection that breaks is made anew by the agent, which registers again under the same node id
with the same incarnation; the controller then repeats the map. Every message may be repeated
without harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import inf
from typing import Annotated

import msgspec
from kvcast.protocol.messages.ethernet import ETHERNET_MTU_BYTES
from kvcast.protocol.node_ids import NODE_ID_PATTERN
from msgspec import Meta, Struct

CONTROL_PROTOCOL_VERSION = 4

U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
U24 = Annotated[int, Meta(ge=0, le=0xFFFFFF)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
U64 = Annotated[int, Meta(ge=0)]
Mtu = Annotated[int, Meta(ge=1280, le=65535)]
MAX_RESIDENTS = 4096
"""Blocks in the switch, at most; it has fewer slots."""
MAX_WRONG_RESIDENTS = 16
"""Blocks that one report says came wrong from the switch, at most."""
MAX_REPLICATED = 4096
"""Blocks that nodes answer for beside those of the bucket map, at most."""
MAX_REPLICAS = 32
"""Nodes that do so for one block, at most."""
MAX_COUNTERS = 1024
"""Numbers that one report gives, at most: what is beyond is not looked at. An agent with every tier
there is has some 600. They take up to 80 KiB of a message, and 5 MB for all nodes of a pool."""
MAX_COUNTER_CHARS = 64
"""Of a number's name."""
Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
NodeId = Annotated[str, Meta(max_length=64, pattern=rf"\A{NODE_ID_PATTERN}\Z")]
Text = Annotated[str, Meta(max_length=256)]


class BlockRef(Struct, frozen=True, array_like=True):
    """Names a block: namespace and 128-bit key."""

    namespace: U16
    key: Key


class NodeInfo(Struct, frozen=True):
    """Where a node can be reached.

    `index` is the node's place in bucket lists (stable for its lifetime); `mac` as
    "02:6b:76:00:00:01"; `ip` its address behind the switch; `switch_port` the switch's port
    number that it is attached to; `udp_port` of its READ/DATA socket; `bulk_host`/`bulk_port`
    of its TCP bulk listener; `rdma_port`, on the same host, of its RDMA link's (0 = it has none);
    `zone_queue_pair` and `zone_key` of its landing zone (0 and 0 = it has none).
    """

    index: U16
    node_id: NodeId
    ip: Text
    mac: Text
    switch_port: U16
    udp_port: U16
    bulk_host: Text
    bulk_port: U16
    rdma_port: U16 = 0
    zone_queue_pair: U24 = 0
    zone_key: U32 = 0


POLICIES = ("lru", "lfu", "fifo", "arc", "s3fifo", "ttl", "value")
"""Eviction policies that a namespace can have (`kvcast.hostagent.tiers.policies`)."""
PREFIX_POLICIES = ("value",)
"""Those of them that keep no block of a prefix without the blocks before it."""
TIERS = ("dram", "arena", "ssd")
"""Tiers of an agent; of each a namespace can be assured a share."""
QUOTA_TIERS = (*TIERS, "switch", "cold")
"""Tiers that a namespace can have a quota of."""
MEDIA = ("dram", "ssd", "switch", "cold")
"""What a namespace's blocks may lie on; dram always."""

Quota = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Operators say it in JSON, which knows larger numbers than a map can tell agents."""
Shares = Annotated[
    dict[Annotated[str, Meta(pattern=rf"\A({'|'.join(TIERS)})\Z")], Quota], Meta(max_length=8)
]
Quotas = Annotated[
    dict[Annotated[str, Meta(pattern=rf"\A({'|'.join(QUOTA_TIERS)})\Z")], Quota],
    Meta(max_length=8),
]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
OnOff = Annotated[str, Meta(pattern=r"\A(on|off|)\Z")]
"""Empty: as the controller sees fit."""


class NamespaceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator says of a namespace. What is 0, "" or empty is not limited, or as the
    agents' own options say.

    `policy`: one of `POLICIES`; `quota_bytes` by tier (`QUOTA_TIERS`; arena: of each further one),
    on each node, of the switch's memory, where a block takes whole segments, and of the object
    store, of all nodes together; `assured_bytes` (`TIERS`): what other namespaces cannot take from
    it, on each node; `operations_per_s`
    (keys of gets and puts) and `bytes_per_s`, on each node; `weight`: its share of transfers that
    wait for the same way, as against other namespaces'; `ttl_s`: how long a block lives (with the
    policy ttl after its last use, else after it was stored); `media`: of `MEDIA`, empty = all;
    `gathering`, `residence`: "on" or "off", whatever the controller sees that they bring
    (`kvcast.controller.core.adaptive`)."""

    policy: Annotated[str, Meta(pattern=rf"\A({'|'.join(POLICIES)}|)\Z")] = ""
    quota_bytes: Quotas = {}
    assured_bytes: Shares = {}
    operations_per_s: Rate = 0.0
    bytes_per_s: Rate = 0.0
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    ttl_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    media: Annotated[
        list[Annotated[str, Meta(pattern=rf"\A({'|'.join(MEDIA)})\Z")]], Meta(max_length=8)
    ] = []
    gathering: OnOff = ""
    residence: OnOff = ""

    @property
    def of_prefixes(self) -> bool:
        """Whether its policy knows which block is before which in a prefix, if it is told."""
        return self.policy in PREFIX_POLICIES

    def allows(self, medium: str) -> bool:
        """Whether blocks may lie on that of `MEDIA`."""
        if not self.media:
            return medium != "cold"
        return medium in self.media or medium == "dram"


class NamespaceInfo(Struct, frozen=True):
    """A namespace and what it stands for; `nodes` empty = every node may use it. `has_secret`:
    keys on the wire are derived (`kvcast.protocol.namespace_secrets`), and only those nodes are
    given the secret."""

    namespace: U16
    tenant: Text
    model: Text
    version: Text
    layout: Text
    nodes: list[NodeId] = []
    has_secret: bool = False
    settings: NamespaceSettings = NamespaceSettings()


def hash_of_names(purpose: bytes, names: Sequence[str], before: bytes = b"") -> int:
    """64 bits of BLAKE2b of some names, told apart by their lengths; `purpose` (at most 16 bytes)
    keeps one use from another."""
    digest = blake2b(before, digest_size=8, person=purpose)
    for name in names:
        encoded = name.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return int.from_bytes(digest.digest(), "big")


def number_of(tenant: str, model: str, version: str, layout: str) -> int:
    """The number (1..65535) that a namespace gets unless that is another's, or was a deleted one's:
    BLAKE2b of its parts."""
    return 1 + hash_of_names(b"kvcast-namespace", (tenant, model, version, layout)) % 0xFFFF


AT_END = 0xFFFFFFFF
"""How far a node is that has read all."""


class GroupInfo(Struct, frozen=True):
    """A reader group: its members get every DATA that any member's grouped READ causes. `at`, in
    the answer to a node that joins a company: how far the first of the others is."""

    namespace: U16
    group: U16
    nodes: list[NodeId]
    at: U32 = 0


# --- agent to controller ------------------------------------------------------------------


class Register(Struct, frozen=True, tag="register"):
    """First message on a connection.

    `incarnation` changes with every start of the agent (its arena is empty again), not with
    every connection. `mtu_bytes`: the longest IPv4 packet that the node sends and takes.
    `link_bits_per_s`: what its link to the switch carries each way (0 = not known).
    """

    version: U16
    node_id: NodeId
    incarnation: U64
    ip: Text
    mac: Text
    switch_port: U16
    udp_port: U16
    bulk_host: Text
    bulk_port: U16
    arena_bytes: U64
    mtu_bytes: Mtu = ETHERNET_MTU_BYTES
    rdma_port: U16 = 0
    link_bits_per_s: U64 = 0
    zone_queue_pair: U24 = 0
    zone_key: U32 = 0


class HotBlock(Struct, frozen=True, array_like=True):
    """What a home saw of a block since its last report.

    `reads`: READs answered; `readers`: distinct readers; `depth`: blocks before it in its
    prefix (0 if unknown); `size_bytes` and `digest` of the copy held.
    """

    namespace: U16
    key: Key
    reads: U64
    readers: U32
    depth: U32
    size_bytes: U64
    digest: U64


class NamespaceReads(Struct, frozen=True, array_like=True):
    """Blocks of a namespace that a node got from elsewhere since its incarnation began: all of
    them, those whose answer went to other readers too, and those from switch memory."""

    namespace: U16
    remote: U64
    shared: U64
    switch: U64


class Renew(Struct, frozen=True, tag="renew"):
    """Keeps the lease and reports; sent every lease/3.

    `counters` are totals since the incarnation began, and present values, by name (the agent's
    metric names), at most `MAX_COUNTERS`;
    `hot` the most-read blocks that this home answered for, at most 256, since the last report;
    `reads` by namespace, at most 256; `wrong`: the blocks (namespace, key, digest) that came from
    switch memory since the last report, and had not the digest under which they are kept there.
    """

    counters: dict[str, float]
    hot: list[HotBlock]
    arena_used_bytes: U64
    blocks: U64
    epoch: U64
    reads: list[NamespaceReads] = []
    wrong: Annotated[list[tuple[U16, Key, U64]], Meta(max_length=MAX_WRONG_RESIDENTS)] = []


class Described(Struct, frozen=True, tag="described"):
    """Answer to Describe: of the blocks asked for, those held: (namespace, key, size, digest)."""

    request: U64
    blocks: list[tuple[U16, Key, U64, U64]]


class Kept(Struct, frozen=True, tag="kept"):
    """Answer to Keep: `held` says whether the block is now in this node's DRAM tier."""

    request: U64
    namespace: U16
    key: Key
    held: bool


class HandedOver(Struct, frozen=True, tag="handed_over"):
    """How far this node is with handing over what the map of `epoch` moves: `left` blocks of
    `total` that it has begun with; `failed` of them could not be handed over. `no_room`: those that
    are left, and found no room when they were last tried: in this node's DRAM, to which the disk
    was to give them, or where they go."""

    epoch: U64
    left: U64
    total: U64
    failed: U64
    no_room: U64 = 0


class NamespaceRequest(Struct, frozen=True, tag="namespace_request"):
    """Find or make the namespace of this (tenant, model, version, layout)."""

    request: U64
    tenant: Text
    model: Text
    version: Text
    layout: Text


class GroupRequest(Struct, frozen=True, tag="group_request"):
    """Find or make the reader group of these nodes in this namespace; at most 31 nodes.

    With `at`, and no nodes: this node reads all blocks of the namespace, and is so far in the order
    in which all do. The group is that of all nodes that say so, and have said so lately (group 0 =
    there are no others). It is to be asked for again every second at least, and with `AT_END` in
    the end."""

    request: U64
    namespace: U16
    nodes: list[NodeId]
    at: U32 | None = None


class Leave(Struct, frozen=True, tag="leave"):
    """A clean shutdown: move this node's buckets now, do not wait for the lease."""


# --- controller to agent ------------------------------------------------------------------


class Registered(Struct, frozen=True, tag="registered"):
    """Answer to Register.

    `index`: the node's index in bucket lists; `lease_s`: a node that has not renewed for so long
    is dead; `read_padding_bytes`: bytes of zero padding that every READ must carry (the switch
    target's profile; 0 where none is needed); `read_lease_s`: after a READ without an answer the
    switch holds others of its segment back for so long.
    """

    version: U16
    index: U16
    lease_s: float
    read_padding_bytes: U16
    read_lease_s: float = inf


class Refused(Struct, frozen=True, tag="refused"):
    """The controller does not take this agent or request, and why; `request` 0 = the register."""

    reason: Text
    request: U64 = 0


class PoolMap(Struct, frozen=True, tag="map"):
    """The pool as of `epoch`; pushed whole at registration and whenever it changes.

    `buckets[b]` lists node indices, home first, then replicas in the order in which they take
    over; its length is `kvcast.protocol.messages.wire.BUCKETS`. `chunk_bytes`: READs are for
    chunks of so many bytes, which all live nodes' networks take (1024, 2048, 4096 or 8192).
    `rdma_address`: where homes send what the switch writes into landing zones, "" = nowhere.
    `deleted`: namespaces that an operator has deleted: their blocks are to be dropped, and no other
    has their numbers. One that is in neither list was lost, not deleted. `alone`: namespaces whose
    reads gather for nobody, since too few are shared.
    `settled`: of each bucket's list, so many hold its blocks; those behind them (there are none
    where it is 0) are to take over, and are handed the blocks by the others. They are homes like
    others, the last to be asked. `leaving`: nodes, by index, that will hold nothing then. Where
    nobody takes over from them, the homes that stay are handed their blocks: a replica may lack
    one.
    """

    epoch: U64
    nodes: list[NodeInfo]
    buckets: list[list[U16]]
    namespaces: list[NamespaceInfo]
    groups: list[GroupInfo]
    chunk_bytes: U16 = 1024
    deleted: list[U16] = []
    alone: list[U16] = []
    settled: U16 = 0
    rdma_address: Text = ""
    leaving: list[U16] = []


class Residents(Struct, frozen=True, tag="residents"):
    """The blocks that the switch holds, or is to hold when they next pass: these are read by READs
    for chunks of 1024 bytes, as its memory has them, and not by TCP. All of them, each time that
    they change."""

    blocks: Annotated[list[BlockRef], Meta(max_length=MAX_RESIDENTS)]


class Replica(Struct, frozen=True, array_like=True):
    """A block and the nodes, by index, that answer for it beside those of the bucket map."""

    namespace: U16
    key: Key
    nodes: Annotated[list[U16], Meta(min_length=1, max_length=MAX_REPLICAS)]


class Replicas(Struct, frozen=True, tag="replicas"):
    """The blocks that further nodes answer for, since their homes are read too much. All of them,
    each time that they change; a node that is not named any more forgets what it was given."""

    blocks: Annotated[list[Replica], Meta(max_length=MAX_REPLICATED)]


class Loads(Struct, frozen=True, tag="loads"):
    """How much of what their links carry nodes send: node index and percent. Nodes that are not
    named have little to do."""

    percents: Annotated[list[tuple[U16, U16]], Meta(max_length=256)]


class NamespaceSecret(Struct, frozen=True, array_like=True):
    """The secret of a namespace: a secret, which no log shows."""

    namespace: U16
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        return f"NamespaceSecret({self.namespace}, …)"


class NamespaceSecrets(Struct, frozen=True, tag="secrets"):
    """The secrets of the namespaces that the node may use; before a map that names them."""

    secrets: list[NamespaceSecret]


class Describe(Struct, frozen=True, tag="describe"):
    """Ask which of these blocks the node holds in DRAM, with size and digest."""

    request: U64
    blocks: list[BlockRef]


class Credit(Struct, frozen=True, tag="credit"):
    """Switch hits since the last credit: (namespace, key, hits). Touch them in the policy."""

    hits: list[tuple[U16, Key, U64]]


class Keep(Struct, frozen=True, tag="keep"):
    """Make sure that this block lives in the node's DRAM: recall it from the switch or a
    replica if it must be (READs for its own block, addressed to the home as usual). A node that is
    no home of it is to be a replica, as soon as `Replicas` says so."""

    request: U64
    namespace: U16
    key: Key
    size_bytes: U64
    digest: U64


class NamespaceReply(Struct, frozen=True, tag="namespace_reply"):
    request: U64
    info: NamespaceInfo


class GroupReply(Struct, frozen=True, tag="group_reply"):
    request: U64
    info: GroupInfo


AgentMessage = (
    Register | Renew | Described | Kept | HandedOver | NamespaceRequest | GroupRequest | Leave
)
ControllerMessage = (
    Registered
    | Refused
    | PoolMap
    | Residents
    | Replicas
    | Loads
    | NamespaceSecrets
    | Describe
    | Credit
    | Keep
    | NamespaceReply
    | GroupReply
)

__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, msgspec.Struct)
] + ["AgentMessage", "ControllerMessage"]
