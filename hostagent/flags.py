"""What `kvcast agent` can be told, and the options of the agent that it becomes.

Owns: the flags, and what must go together. Must not know: what runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Final
from urllib.parse import urlsplit

from kvcast.hostagent.core.access import AccessRules, Tenants, parse_rule
from kvcast.hostagent.core.agent import AgentOptions
from kvcast.hostagent.core.handover import HandoverOptions
from kvcast.hostagent.core.writes import ACKS, WriteOptions
from kvcast.hostagent.network.local_server import LocalOptions
from kvcast.hostagent.options import (
    RDMA_AUTO,
    RDMAS,
    ArenaOptions,
    NetworkOptions,
    Options,
    SsdOptions,
)
from kvcast.hostagent.tiers.arena import GRAIN_BYTES, LEAST_SLAB_BYTES
from kvcast.hostagent.tiers.memory_placement import MAX_NODE
from kvcast.hostagent.tiers.ssd.layout import SsdError, cut_of
from kvcast.protocol.links.control_caller import ControlOptions
from kvcast.protocol.messages.ethernet import parse_ip, unicast_mac
from kvcast.protocol.messages.wire import MAX_BLOCK_BYTES
from kvcast.protocol.requester import RequesterConfig
from kvcast.protocol.responder import ResponderConfig
from kvcast.service.addresses import AGENTS_PORT, parse_host_port
from kvcast.service.options import (
    CommonOptions,
    OptionsError,
    address,
    choice,
    count,
    either,
    many,
    option,
    read_options,
    required,
    seconds,
    size,
)
from kvcast.service.tls import Credentials
from kvcast.service.tls_options import TlsOptions, credentials_of, refuse_open_addresses
from kvcast.service.values import (
    TextError,
    bit_rate,
    format_size,
    number,
    parse_node_id,
    parse_size,
    whole_number,
)


def _tunnel(text: str) -> tuple[tuple[str, int], tuple[str, int]]:
    parts = text.split(":")
    if len(parts) != 4:
        raise TextError(f"{text!r} is not LOCALIP:LPORT:PEERIP:PPORT")
    return parse_host_port(":".join(parts[:2])), parse_host_port(":".join(parts[2:]))


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TextError(f"{text!r} is not http://HOST:PORT or https://HOST:PORT")
    return text


def _ip(text: str) -> str:
    parse_ip(text)
    return text


def _device(text: str) -> str:
    if re.fullmatch(r"[\w.-]{1,63}", text) is None:
        raise TextError(f"{text!r} is no name of an RDMA card")
    return text


MAX_FURTHER_ARENAS: Final = 9


def _further_arena(text: str) -> tuple[str, int]:
    path, mark, size = text.rpartition("=")
    if not mark or not path:
        raise TextError(f"{text!r} is not FILE=SIZE")
    return path, parse_size(size)


def _quota(text: str) -> tuple[int, int]:
    namespace, _, size = text.partition("=")
    if not namespace.isascii() or not namespace.isdigit() or not 0 <= int(namespace) <= 0xFFFF:
        raise TextError(f"{text!r} is not NAMESPACE=SIZE")
    return int(namespace), parse_size(size)


@dataclass(frozen=True, kw_only=True)
class IdentityFlags:
    """identity"""

    node_id: str = required("name of this node in the pool", parse=parse_node_id)
    controller: tuple[str, int] = address(
        "the controller's address for agents", default=("127.0.0.1", AGENTS_PORT)
    )


@dataclass(frozen=True, kw_only=True)
class NetworkFlags:
    """network"""

    transport: str = choice("see above", default="tunnel", choices=("tunnel", "udp"))
    tunnel: tuple[tuple[str, int], tuple[str, int]] | None = option(
        "this end and the switch's end of the tunnel (--transport tunnel)",
        default=None,
        parse=_tunnel,
        metavar="LOCALIP:LPORT:PEERIP:PPORT",
    )
    ip: str = required("this node's IPv4 address behind the switch", parse=_ip)
    mac: str = required("this node's MAC address", parse=unicast_mac)
    switch_port: int = required(
        "the switch's port that this node is at, 1 to 32", parse=whole_number(1, 32), metavar="N"
    )
    udp_port: int = option(
        "port for READ and DATA",
        default=NetworkOptions.udp_port,
        parse=whole_number(0, 65535),
        metavar="N",
    )
    mtu_bytes: int = option(
        "longest IPv4 packet on the way to the other nodes, 1280 to 65535; READs are for chunks of "
        "up to 8192 bytes if all nodes' take them (default: the MTU of the interface that has "
        "--ip; 1500 with --transport tunnel)",
        default=NetworkOptions.mtu_bytes,
        parse=whole_number(1280, 65535),
        metavar="BYTES",
    )
    link_rate_bits_per_s: int = option(
        "what the link to the switch carries each way, by which it is told how loaded this node"
        " is; 0 = as the interface that has --ip says; where that does not know, this node's blocks"
        " are not replicated for being read much",
        default=NetworkOptions.link_bits_per_s,
        parse=bit_rate(0, 10**13),
        metavar="BITS",
        unit="bits/s",
        flag="link-rate",
    )
    udp_segments: bool = either(
        "let the kernel or the card split runs of frames (--transport udp), as it does over"
        " loopback: less work, but a switch in software that takes frames off a veth pair would"
        " get them unsplit",
        default=NetworkOptions.udp_segments,
    )
    busy_poll: bool = either(
        "never sleep while nothing is to be done: gets and puts that go to other nodes take less"
        " time, and the agent takes a processor of its own",
        default=NetworkOptions.polls,
    )
    bulk_addr: tuple[str, int] = address(
        "where other agents reach this one by TCP; a concrete address; port 0 = pick one",
        default=(NetworkOptions.bulk_host, NetworkOptions.bulk_port),
    )
    bulk_link_rate_bits_per_s: int = option(
        "what the link that --bulk-addr is on carries each way: while several namespaces' blocks"
        " leave by TCP, they are kept a little below it, and share it by weight; 0 = as --link-rate"
        " where it has the same address, else as its interface says; not shared where that does not"
        " know",
        default=NetworkOptions.bulk_link_bits_per_s,
        parse=bit_rate(0, 10**13),
        metavar="BITS",
        unit="bits/s",
        flag="bulk-link-rate",
    )
    rdma: str = choice(
        "blocks by RDMA where the other node has it, too: if a card has --ip (RoCE version 2), not"
        " at all, or do not start without",
        default=RDMA_AUTO,
        choices=RDMAS,
    )
    rdma_device: tuple[str, ...] = many(
        "an RDMA card to use, by its name (mlx5_0), or `all` that have an address of IPv4; by"
        " default the one that has --ip. Those nearest to the arena's NUMA node share what this"
        " node reads and writes elsewhere, and others stand in for them; shared answers go by the"
        " one that has --ip",
        parse=_device,
        metavar="NAME",
    )
    socket_buffer_bytes: int = size(
        "socket buffers to ask the kernel for",
        default=NetworkOptions.buffer_bytes,
        flag="socket-buffer",
    )


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """memory"""

    arena_bytes: int = size("size of the DRAM tier", default=ArenaOptions.size_bytes)
    arena_path: str | None = option(
        "the arena's file; by default one in /dev/shm, or in the temporary directory",
        default=None,
        parse=str,
        metavar="FILE",
    )
    arena_keep: bool = either(
        "keep the arena when the agent ends or dies, and take over what the one before has kept at "
        "--arena-path; a small process stays behind and starts a new agent at once where one dies",
        default=ArenaOptions.keep,
    )
    index_path: str | None = option(
        "the index of a kept arena; by default FILE.index beside it, or in /dev/shm where the "
        "arena is on hugetlbfs (needed where it is a device)",
        default=None,
        parse=str,
        metavar="FILE",
    )
    cluster: str = option(
        "name of the cluster: an arena that another one's agent has kept is refused",
        default=ArenaOptions.cluster,
        parse=parse_node_id,
        metavar="NAME",
    )
    takeover: bool = either(
        "take over from the agent that runs with the same --socket and --arena-keep, or start "
        "where there is none",
        default=False,
    )
    arena_reserve: bool = either(
        "take the arena's memory at the start, not when it is first used",
        default=ArenaOptions.reserve,
    )
    arena_huge_pages: bool = either(
        "have the kernel put the arena's pages into huge ones, in the background (Linux 6.1, tmpfs,"
        " and a reserved arena); on hugetlbfs they are",
        default=ArenaOptions.huge_pages,
    )
    numa_node: int | None = option(
        "NUMA node whose memory the arena should take, best that of the network card",
        default=None,
        parse=whole_number(0, MAX_NODE),
        metavar="N",
    )
    slab_bytes: int = size("unit of the arena's allocator", default=ArenaOptions.slab_bytes)
    namespace_quota_bytes: int = size(
        "arena bytes that each namespace may take; 0 = no limit",
        default=ArenaOptions.default_quota_bytes,
        flag="namespace-quota",
    )
    quota: tuple[tuple[int, int], ...] = many(
        "quota of one namespace", parse=_quota, metavar="NAMESPACE=SIZE"
    )


@dataclass(frozen=True, kw_only=True)
class SsdFlags:
    """disk"""

    further_arena: tuple[tuple[str, int], ...] = many(
        "a file for blocks that leave the arena before they go to the disk, on other memory than "
        "the arena's (persistent memory, a hugetlbfs, a tmpfs bound to the NUMA node of a CXL "
        "device), or a memory device (/dev/dax0.0); several are filled in their order; made, and "
        "found again, as those of --ssd",
        parse=_further_arena,
        metavar="FILE=SIZE",
    )
    ssd: tuple[str, ...] = many(
        "a file for blocks that leave DRAM; made, and taken whole, at the start, and found again "
        "by the next agent of this node and cluster",
        parse=str,
        metavar="FILE",
    )
    ssd_bytes: int = size("size of each file of --ssd", default=SsdOptions.size_bytes)
    cold: str = option(
        "an object store (s3://, gs://, az://, file:///) for blocks of namespaces whose media name "
        "cold; credentials come from the environment; or Mooncake Store (mooncake://HOST:PORT of "
        "its master)",
        default="",
        parse=str,
        metavar="URL",
    )


@dataclass(frozen=True, kw_only=True)
class LocalFlags:
    """local API"""

    socket: str = required("path of the Unix socket for engines", parse=str, metavar="PATH")
    allow_uid: tuple[tuple[int, Tenants], ...] = many(
        "user that may connect besides this process's own and root; with tenants, for their "
        "namespaces only",
        parse=parse_rule,
        metavar="UID[=TENANT,…]",
    )
    allow_gid: tuple[tuple[int, Tenants], ...] = many(
        "the same for the members of a group", parse=parse_rule, metavar="GID[=TENANT,…]"
    )
    max_clients: int = count("clients at once", default=LocalOptions.max_clients, unit="clients")
    client_share: float = option(
        "share of the arena that one client may hold pinned or reserved, above 0 and at most 1",
        default=AgentOptions.client_share,
        parse=number(0, 1),
        unit="of the arena",
        metavar="SHARE",
    )
    metrics_addr: tuple[str, int] | None = option(
        "serve the counters for Prometheus here", default=None, parse=parse_host_port
    )
    otlp_endpoint: str | None = option(
        "send traces of gets to an OpenTelemetry collector: its address for OTLP over HTTP, such "
        "as http://127.0.0.1:4318 (needs the extra otel)",
        default=None,
        parse=_url,
        metavar="URL",
    )
    trace_share: float = option(
        "share of the gets that are traced, 0 to 1",
        default=0.01,
        parse=number(0, 1),
        unit="of the gets",
        metavar="SHARE",
    )
    trace_slow_s: float = seconds(
        "gets that took longer are traced, whatever the share", default=1.0
    )
    hints_addr: tuple[str, int] | None = option(
        "take hints of a router here (`kvcast route`): what to fetch before an engine asks",
        default=None,
        parse=parse_host_port,
    )


@dataclass(frozen=True, kw_only=True)
class PutFlags:
    """puts"""

    put_ack: str = choice(
        "what a put waits for by default: its first home, this node only, or all its homes",
        default=WriteOptions.put_ack,
        choices=ACKS,
    )
    replicate_timeout_s: float = seconds(
        "longest for one copy to one home", default=WriteOptions.replicate_timeout_s
    )


@dataclass(frozen=True, kw_only=True)
class HandoverFlags:
    """handing over (to nodes that join, from a node that is drained, after the loss of a node)"""

    handover_rate_bytes: int = size(
        "bytes of blocks a second, at most; and at most a quarter of --link-rate",
        default=int(HandoverOptions.rate_bytes_per_s),
        flag="handover-rate",
    )


@dataclass(frozen=True, kw_only=True)
class ReadFlags:
    """reads"""

    max_block_bytes: int = size(
        "largest block", default=RequesterConfig.max_block_bytes, flag="max-block"
    )
    max_fetches: int = count(
        "blocks on their way", default=RequesterConfig.max_fetches, unit="blocks", low=1
    )
    credit_segments: int = count(
        "segments in flight to this node, without those that come by RDMA; lowered to what the "
        "receive buffer holds",
        default=RequesterConfig.credit_segments,
        unit="segments",
        low=1,
    )
    window_initial: int = count(
        "segments in flight from one home at first",
        default=RequesterConfig.window_initial,
        unit="segments",
        low=1,
    )
    window_shared: int = count(
        "segments in flight from one home while readers keep step",
        default=RequesterConfig.window_shared,
        unit="segments",
        low=1,
    )
    rto_initial_s: float = seconds(
        "time-out towards a home before its first answer", default=RequesterConfig.rto_initial_s
    )
    rto_min_s: float = seconds("shortest time-out", default=RequesterConfig.rto_min_s)
    rto_max_s: float = seconds("longest time-out", default=RequesterConfig.rto_max_s)
    quiet_s: float = seconds(
        "how long no further chunk comes until a segment's end counts as lost",
        default=RequesterConfig.quiet_s,
    )
    tries_per_home: int = count(
        "time-outs in a row before another home is asked",
        default=RequesterConfig.tries_per_home,
        unit="time-outs",
        low=1,
    )
    gather_ms: int = count(
        "how long homes may hold answers for joiners, 0 to 255 ms, unless a get says otherwise",
        default=RequesterConfig.gather_ms,
        unit="ms",
        high=255,
    )
    gather_max_ms: int = count(
        "how long they may at most while readers keep step with others, 0 to 255 ms",
        default=RequesterConfig.auto_gather_max_ms,
        unit="ms",
        high=255,
    )
    lone_reads: str = choice(
        "how blocks come that nobody else reads just then: by TCP, or by READs as the others do",
        default="tcp" if AgentOptions.lone_reads_by_tcp else "reads",
        choices=("tcp", "reads"),
    )
    expect_wait_s: float = seconds(
        "how long a get waits for its group's answer before it asks itself; for ten times as long a"
        " home takes an answer to a group to be on its way",
        default=RequesterConfig.expect_wait_s,
    )


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """answers"""

    responder_rate_per_s: float = option(
        "frames to all readers together; 0 = no limit",
        default=ResponderConfig.rate_frames_per_s,
        parse=number(0),
        unit="frames/s",
        flag="responder-rate",
    )
    responder_burst: int = count(
        "frames at once after a pause", default=ResponderConfig.burst_frames, unit="frames"
    )
    responder_jobs: int = count(
        "segments that wait to be sent; more are refused as overload",
        default=ResponderConfig.max_jobs,
        unit="segments",
    )


@dataclass(frozen=True, kw_only=True)
class AgentFlags(
    IdentityFlags,
    NetworkFlags,
    TlsOptions,
    MemoryFlags,
    SsdFlags,
    LocalFlags,
    PutFlags,
    HandoverFlags,
    ReadFlags,
    AnswerFlags,
    CommonOptions,
):
    """What `kvcast agent` can be told."""

    PROGRAM: ClassVar[str] = "kvcast agent"
    DESCRIPTION: ClassVar[str] = """\
The kvcast agent: runs on every inference node, keeps blocks in a shared-memory arena, answers
other nodes' reads, and serves engines on this node through a Unix socket.

Two transports:
  --transport tunnel   Ethernet frames in UDP datagrams to a port of `kvcast switch`; no root
  --transport udp      the kernel's UDP on --ip, for a real or virtual network

Example (a software switch's port 1 at 127.0.0.1:20001, its peer at 127.0.0.1:21001):
  kvcast agent --node-id node-1 --controller 127.0.0.1:9600 --transport tunnel \\
    --tunnel 127.0.0.1:21001:127.0.0.1:20001 --ip 10.77.0.1 --mac 02:6b:76:00:00:01 \\
    --switch-port 1 --socket /tmp/kvcast-node-1.sock
"""


@dataclass(frozen=True)
class Setup:
    """Checked flags, and the certificates that they name."""

    flags: AgentFlags
    credentials: Credentials | None


def parse(argv: Sequence[str] | None) -> Setup:
    """Flags and file, checked; exits with status 2 and a message on an error."""
    return read_options(AgentFlags, argv, _settle)


def _settle(flags: AgentFlags) -> Setup:
    if flags.transport == "tunnel" and flags.tunnel is None:
        raise OptionsError("--transport tunnel needs --tunnel")
    if flags.transport == "udp" and flags.tunnel is not None:
        raise OptionsError("--tunnel goes with --transport tunnel")
    if flags.transport == "tunnel" and flags.udp_segments:
        raise OptionsError("--udp-segments goes with --transport udp; a tunnel always has them")
    if flags.bulk_addr[0] in ("0.0.0.0", "::", ""):
        raise OptionsError("--bulk-addr must be an address that other agents can connect to")
    addresses = [("--controller", flags.controller[0]), ("--bulk-addr", flags.bulk_addr[0])]
    if flags.metrics_addr is not None:
        addresses.append(("--metrics-addr", flags.metrics_addr[0]))
    if flags.hints_addr is not None:
        addresses.append(("--hints-addr", flags.hints_addr[0]))
    refuse_open_addresses(flags, addresses)
    if not flags.handover_rate_bytes:
        raise OptionsError("--handover-rate must be above 0: blocks have to be handed over")
    if flags.slab_bytes < LEAST_SLAB_BYTES or flags.slab_bytes % GRAIN_BYTES:
        least, grain = format_size(LEAST_SLAB_BYTES), format_size(GRAIN_BYTES)
        raise OptionsError(f"--slab-bytes must be a multiple of {grain}, and {least} at least")
    if not 0 < flags.max_block_bytes <= MAX_BLOCK_BYTES:
        raise OptionsError(f"--max-block must be from 1 to {format_size(MAX_BLOCK_BYTES)}")
    if flags.arena_bytes < flags.slab_bytes:
        raise OptionsError("--arena-bytes is smaller than a slab")
    if flags.arena_keep and flags.arena_path is None:
        raise OptionsError("--arena-keep needs --arena-path")
    if flags.takeover and not flags.arena_keep:
        raise OptionsError("--takeover goes with --arena-keep")
    if flags.index_path is not None and not flags.arena_keep:
        raise OptionsError("--index-path goes with --arena-keep")
    paths = (*(path for path, _ in flags.further_arena), *flags.ssd)
    if len({os.path.abspath(path) for path in paths}) < len(paths):
        raise OptionsError("--ssd, or --further-arena, names a file twice")
    if len(flags.further_arena) > MAX_FURTHER_ARENAS:
        raise OptionsError(f"--further-arena: {MAX_FURTHER_ARENAS} at most")
    for path, size_bytes in flags.further_arena:
        try:
            cut_of("", size_bytes)
        except SsdError as error:
            raise OptionsError(f"--further-arena {path}: {error}") from error
    if flags.ssd:
        try:
            cut_of("", flags.ssd_bytes)
        except SsdError as error:
            raise OptionsError(f"--ssd-bytes: {error}") from error
    if not flags.client_share:
        raise OptionsError("--client-share must be above 0 and at most 1")
    return Setup(flags, credentials_of(flags.tls))


_ON_ITS_WAY_WAITS: Final = 10
"""An answer to a reader group may be on its way for so many times as long as a member waits for
more of it before it asks: where links have queues, both wait in them. At the default that is
`ResponderConfig.on_its_way_s`."""


def options_of(setup: Setup) -> Options:
    """The agent's options from its flags."""
    flags = setup.flags
    requester = RequesterConfig(
        max_fetches=flags.max_fetches,
        max_block_bytes=min(flags.max_block_bytes, flags.arena_bytes),
        credit_segments=flags.credit_segments,
        window_initial=flags.window_initial,
        window_shared=flags.window_shared,
        rto_initial_s=flags.rto_initial_s,
        rto_min_s=flags.rto_min_s,
        quiet_s=flags.quiet_s,
        rto_max_s=flags.rto_max_s,
        tries_per_home=flags.tries_per_home,
        gather_ms=flags.gather_ms,
        auto_gather_max_ms=flags.gather_max_ms,
        expect_wait_s=flags.expect_wait_s,
    )
    responder = ResponderConfig(
        rate_frames_per_s=flags.responder_rate_per_s,
        burst_frames=flags.responder_burst,
        max_jobs=flags.responder_jobs,
        on_its_way_s=_ON_ITS_WAY_WAITS * flags.expect_wait_s,
    )
    return Options(
        agent=AgentOptions(
            node_id=flags.node_id,
            requester=requester,
            responder=responder,
            writes=WriteOptions(
                put_ack=flags.put_ack, replicate_timeout_s=flags.replicate_timeout_s
            ),
            handover=HandoverOptions(
                rate_bytes_per_s=min(
                    flags.handover_rate_bytes, flags.link_rate_bits_per_s / 8 / 4 or inf
                )
            ),
            lone_reads_by_tcp=flags.lone_reads == "tcp",
            client_share=flags.client_share,
        ),
        network=NetworkOptions(
            ip=flags.ip,
            mac=flags.mac,
            switch_port=flags.switch_port,
            udp_port=flags.udp_port,
            tunnel=flags.tunnel,
            udp_segments=flags.udp_segments,
            polls=flags.busy_poll,
            buffer_bytes=flags.socket_buffer_bytes,
            mtu_bytes=flags.mtu_bytes,
            link_bits_per_s=flags.link_rate_bits_per_s,
            bulk_host=flags.bulk_addr[0],
            bulk_port=flags.bulk_addr[1],
            bulk_link_bits_per_s=flags.bulk_link_rate_bits_per_s,
            rdma=flags.rdma,
            rdma_devices=flags.rdma_device,
        ),
        control=ControlOptions(*flags.controller),
        local=LocalOptions(
            socket_path=flags.socket,
            access=AccessRules(dict(flags.allow_uid), dict(flags.allow_gid)),
            max_clients=flags.max_clients,
        ),
        arena=ArenaOptions(
            size_bytes=flags.arena_bytes // flags.slab_bytes * flags.slab_bytes,
            path=flags.arena_path,
            reserve=flags.arena_reserve,
            keep=flags.arena_keep,
            index_path=flags.index_path,
            cluster=flags.cluster,
            slab_bytes=flags.slab_bytes,
            default_quota_bytes=flags.namespace_quota_bytes,
            quotas=dict(flags.quota),
            huge_pages=flags.arena_huge_pages,
            numa_node=flags.numa_node,
        ),
        ssd=SsdOptions(arenas=flags.further_arena, paths=flags.ssd, size_bytes=flags.ssd_bytes),
        cold=flags.cold,
        credentials=setup.credentials,
    )
