"""What `kvcast controller` can be told, and the options of the cores that it becomes.

Owns: the flags, what must go together, and the files that flags name. Must not know: what runs.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from kvcast.controller.core.adaptive import AdaptiveOptions
from kvcast.controller.core.admission import ValueOptions
from kvcast.controller.core.namespaces import SecretMode, TenantRules
from kvcast.controller.core.pool import PoolOptions
from kvcast.controller.core.program import COALESCE_LEASE_S, Settings
from kvcast.controller.core.replicas import ReplicaOptions
from kvcast.controller.core.tiers import AdmitMode
from kvcast.controller.http.tokens import TokensError, TokensFile
from kvcast.controller.switch.connection import SwitchTls
from kvcast.p4 import TargetProfile, artefact, profiles
from kvcast.p4.targets import MAX_PORTS
from kvcast.protocol.messages.control import MAX_REPLICAS
from kvcast.protocol.messages.ethernet import unicast_mac
from kvcast.protocol.messages.wire import CHUNKINGS
from kvcast.service.addresses import AGENTS_PORT, HTTP_PORT, P4RUNTIME_PORT, is_loopback
from kvcast.service.options import (
    CommonOptions,
    OptionsError,
    address,
    bare,
    choice,
    count,
    either,
    file,
    many,
    option,
    read_options,
    seconds,
)
from kvcast.service.tls import Credentials
from kvcast.service.tls_options import TlsOptions, credentials_of, refuse_open_addresses
from kvcast.service.values import TextError, number, parse_name, parse_node_id, whole_number

log = logging.getLogger("kvcast.controller")


def _tenant(text: str) -> tuple[str, frozenset[str]]:
    name, equals, nodes = text.partition("=")
    parse_name(name)
    listed = nodes.split(",") if equals else []
    return name, frozenset(parse_node_id(node.strip()) for node in listed)


def _ipv4(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise TextError(f"{text!r} is no IPv4 address") from None


def _device_ports(text: str) -> tuple[int, ...]:
    """A comma-separated list of distinct 9-bit device ports, one for each host port."""
    try:
        ports = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TextError(f"{text!r} is no list of port numbers") from None
    if len(set(ports)) != len(ports) or not all(0 <= port < 512 for port in ports):
        raise TextError("device ports must differ and lie within 0..511")
    if len(ports) != MAX_PORTS:
        raise TextError(
            f"{len(ports)} ports, not {MAX_PORTS}; host ports without a host may be any others"
        )
    return ports


@dataclass(frozen=True, kw_only=True)
class SwitchFlags:
    """switch"""

    switch: tuple[str, int] = address(
        "P4Runtime address of the switch", default=("127.0.0.1", P4RUNTIME_PORT)
    )
    switch_tls: bool | None = either(
        "speak TLS with the switch, by the files of --tls; by default where it is beyond loopback",
        default=None,
    )
    switch_name: str = option(
        "whose certificate the switch must show, where that is not the host of --switch",
        default="",
        parse=str,
        metavar="HOST",
    )
    device_id: int = option(
        "P4Runtime device", default=1, parse=whole_number(1, 2**64 - 1), metavar="N"
    )
    election_id: int = option(
        "of several controllers the one with the highest id programs the switch",
        default=10,
        parse=whole_number(1, 2**63),
        metavar="N",
    )
    target: str = choice(
        "what kind of switch it is; sets slots, padding of READs, ticks, and ports",
        default="v1model",
        choices=sorted(profiles),
    )
    device_config: Path | None = file(
        "what the switch is to load, where the package does not hold it (a Tofino's, as the "
        "vendor's tools make it for P4Runtime)"
    )
    device_ports: tuple[int, ...] = option(
        "what the switch calls host port 1, 2, ... (default: as the target's profile says)",
        default=(),
        parse=_device_ports,
        metavar="N,N,...",
    )
    plain: bool = bare("forwarding only: the switch treats kvcast's frames like any others")
    coalesce_lease_s: float = seconds(
        "how long a READ waits in the switch for its DATA before it may be taken over; two to "
        "three times the round trip's 99th percentile",
        default=COALESCE_LEASE_S,
        low=0.001,
        high=3600,
    )
    heat_threshold: int = count(
        "READs of a segment in a window that make the switch report it",
        default=3,
        unit="READs",
        low=1,
        high=2**32 - 1,
    )
    rdma_address: str | None = option(
        "an IPv4 address of the pool's network that no host has, to which homes send what the "
        "switch writes into the memory of all who wait; without it shared answers never go by RDMA",
        default=None,
        parse=_ipv4,
        metavar="IP",
    )
    router_mac: str | None = option(
        "address to which hosts send what is to be routed; without it nothing is",
        default=None,
        parse=unicast_mac,
        metavar="MAC",
    )


@dataclass(frozen=True, kw_only=True)
class PoolFlags:
    """pool"""

    agents_addr: tuple[str, int] = address(
        "where agents connect; port 0 = pick one", default=("127.0.0.1", AGENTS_PORT)
    )
    state: Path = option(
        "SQLite file of what must outlive the controller; one controller a file",
        default=Path("kvcast-controller.sqlite"),
        parse=Path,
    )
    lease_s: float = seconds(
        "an agent that has not renewed for so long is dead, and its buckets move",
        default=PoolOptions.lease_s,
        low=0.1,
        high=3600,
    )
    rebalance_after_s: float = seconds(
        "an agent that was dead gets buckets again when it has lived for so long",
        default=PoolOptions.rebalance_after_s,
        high=3600,
    )
    replicas: int = count(
        "nodes that a bucket lists after its home, in the order in which they take over",
        default=PoolOptions.replicas,
        unit="nodes",
        high=3,
    )
    hot_replicas: bool = either(
        "have further nodes answer for blocks whose homes are read too much, and take them back "
        "when they are not any more",
        default=ReplicaOptions.enabled,
    )
    hot_copies: int = count(
        "nodes that may so hold a block beside those of its bucket",
        default=ReplicaOptions.max_copies,
        unit="nodes",
        low=1,
        high=MAX_REPLICAS,
    )
    homes: tuple[str, ...] = many(
        "a node that keeps blocks for others; where any are named, the others only read and put",
        parse=parse_node_id,
        metavar="NODE",
        flag="home",
    )
    max_chunk_bytes: int = choice(
        "READs are for chunks of at most so many bytes; at most what the nodes' MTUs take (1500: "
        "1024, 9000: 8192). Lower it where a switch on the way takes less than the nodes do",
        default=PoolOptions.max_chunk_bytes,
        choices=tuple(chunking.chunk_bytes for chunking in CHUNKINGS),
    )
    tenant: tuple[tuple[str, frozenset[str]], ...] = many(
        "a tenant, and the nodes that its namespaces are for (none = all); where any are named, "
        "there are no others",
        parse=_tenant,
        metavar="NAME[=NODE,…]",
    )
    namespace_secrets: SecretMode = choice(
        "secrets that keep tenants from naming each other's blocks; auto: as soon as there are two "
        "tenants, or --tenant is given",
        default=SecretMode.AUTO,
        choices=SecretMode,
    )
    tick_s: float = seconds("period of counters and of admission", default=0.5, low=0.05, high=60)


@dataclass(frozen=True, kw_only=True)
class HttpFlags:
    """HTTP API"""

    http_addr: tuple[str, int] = address(
        "where the HTTP API is served; port 0 = pick one", default=("127.0.0.1", HTTP_PORT)
    )
    tokens: Path | None = file(
        "tokens of those who may use the HTTP API, as `kvcast tokens add` writes it; without it, "
        "everybody may on loopback, and elsewhere only who has an operator's certificate"
    )
    http_client_certs: bool = bare(
        "let nobody use the HTTP API, with or without a token, who has no certificate of the "
        "cluster"
    )
    http_rate_per_s: float = option(
        "requests that one client may make over HTTP; 0 = no limit",
        default=100.0,
        parse=number(0, 1e6),
        unit="requests/s",
        flag="http-rate",
    )


@dataclass(frozen=True, kw_only=True)
class AdmissionFlags:
    """admission to the switch's memory"""

    admit: AdmitMode = choice(
        "auto: by value; pin: only what is pinned over HTTP; off: nothing",
        default=PoolOptions.admit,
        choices=AdmitMode,
    )
    adapt: bool = either(
        "turn off by namespace, and on again, what does not pay there: gathering where reads are "
        "not shared, residence where memory answers nothing",
        default=True,
    )
    half_life_s: float = seconds(
        "after which a read counts half, where reads are few: it does so after as many as there "
        "are slots",
        default=ValueOptions.half_life_s,
        low=0.1,
        high=86400,
    )
    least_half_life_s: float = seconds(
        "how soon at most it counts half, however many reads there are",
        default=ValueOptions.least_half_life_s,
        low=0.1,
        high=86400,
    )
    horizon_s: float = seconds(
        "how far ahead reads are expected", default=ValueOptions.horizon_s, low=0.1, high=86400
    )
    min_reads: float = option(
        "reads of a block expected over the horizon below which it is not given free slots",
        default=ValueOptions.min_reads,
        parse=number(0, 1e18),
        unit="reads",
    )
    displace_reads: float = option(
        "reads of a block expected over the horizon below which it does not displace others (half "
        "as many, where blocks that are read twice are usually read on)",
        default=ValueOptions.displace_reads,
        parse=number(0, 1e18),
        unit="reads",
    )
    margin: float = option(
        "by how many times a block must beat those that it displaces",
        default=ValueOptions.margin,
        parse=number(1, 1000),
        unit="times",
        metavar="FACTOR",
    )
    keep_value: float = option(
        "value, in bytes that the home is spared for each cell, from which an evicted block is "
        "made sure to live in its home's memory",
        default=ValueOptions.keep_value,
        parse=number(0, 1e18),
        unit="bytes",
    )
    min_stay_s: float = seconds(
        "how long a resident is safe from displacement", default=ValueOptions.min_stay_s, high=86400
    )
    recirculation_wait_s: float = seconds(
        "how long an evicted block's slots rest before another block gets them",
        default=PoolOptions.drain_s,
        high=60,
    )


@dataclass(frozen=True, kw_only=True)
class ControllerFlags(SwitchFlags, PoolFlags, HttpFlags, AdmissionFlags, TlsOptions, CommonOptions):
    """What `kvcast controller` can be told."""

    PROGRAM: ClassVar[str] = "kvcast controller"
    DESCRIPTION: ClassVar[str] = """\
The controller of a kvcast pool: programs the switch over P4Runtime, keeps track of the agents,
tells them which nodes answer for which bucket, and decides which blocks live in the switch's
memory.

It may stop at any time: the switch keeps what it was given, and reads go on. When it starts
again it reads what the switch holds and writes only what differs.

  kvcast controller --switch 127.0.0.1:9559 --state /var/lib/kvcast/controller.sqlite
"""


@dataclass(frozen=True)
class Setup:
    """Checked flags, and what they name, opened."""

    flags: ControllerFlags
    credentials: Credentials | None
    switch_credentials: SwitchTls | None
    """How the switch is spoken to; None = plainly."""
    tokens: TokensFile | None

    @property
    def authenticates(self) -> bool:
        """Whether the HTTP API asks who somebody is: wherever there is a way to tell."""
        return self.tokens is not None or self.credentials is not None


def parse(argv: Sequence[str] | None) -> Setup:
    """Flags and file, checked, with the files that they name opened; exits with status 2 and a
    message on an error."""
    return read_options(ControllerFlags, argv, _settle)


def _settle(flags: ControllerFlags) -> Setup:
    named = (
        ("--agents-addr", flags.agents_addr),
        ("--http-addr", flags.http_addr),
        ("--switch", flags.switch),
    )
    refuse_open_addresses(flags, [(flag, host) for flag, (host, _port) in named])
    switch_host = flags.switch[0]
    switch_tls = flags.switch_tls
    if switch_tls is None:
        switch_tls = flags.tls is not None and not is_loopback(switch_host)
    elif switch_tls and flags.tls is None:
        raise OptionsError("--switch-tls needs --tls DIR")
    elif not (switch_tls or is_loopback(switch_host) or flags.insecure):
        raise OptionsError(
            f"--switch {switch_host} is not loopback: --no-switch-tls needs --insecure"
        )
    if flags.http_client_certs and flags.tls is None:
        raise OptionsError("--http-client-certs needs --tls DIR")
    credentials = credentials_of(flags.tls)
    switch_credentials = None
    if switch_tls:
        assert credentials is not None
        switch_credentials = SwitchTls(credentials.files, flags.switch_name)
    try:
        tokens = None if flags.tokens is None else TokensFile(flags.tokens)
    except TokensError as error:
        raise OptionsError(f"--tokens {error}") from error
    if flags.device_config is None and artefact(flags.target).device_config is None:
        raise OptionsError(f"--target {flags.target} needs --device-config")
    profile = profiles[flags.target]
    if profile.loop_groups and len({port >> 7 for port in flags.device_ports}) > 1:
        raise OptionsError(f"--device-ports: {flags.target} keeps a pool in one pipe (port / 128)")
    return Setup(flags, credentials, switch_credentials, tokens)


def pool_options(flags: ControllerFlags) -> PoolOptions:
    """The core's options from the flags and the target's profile."""
    profile = profiles[flags.target]
    lease_ticks = _lease_ticks(flags.coalesce_lease_s, profile)
    return PoolOptions(
        settings=Settings(
            enabled=not flags.plain,
            lease_ticks=lease_ticks,
            heat_threshold=flags.heat_threshold,
            router_mac=flags.router_mac,
            device_ports=flags.device_ports or profile.device_ports,
            serve_goes_round=profile.serve_goes_round,
            loop_groups=tuple(sorted(profile.loop_groups.items())),
            rdma_address=flags.rdma_address,
        ),
        slots=profile.slots,
        read_padding_bytes=profile.read_padding_bytes,
        read_lease_s=lease_ticks * profile.tick_us / 1e6,
        lease_s=flags.lease_s,
        rebalance_after_s=flags.rebalance_after_s,
        replicas=flags.replicas,
        hot=ReplicaOptions(enabled=flags.hot_replicas, max_copies=flags.hot_copies),
        homes=frozenset(flags.homes),
        max_chunk_bytes=flags.max_chunk_bytes,
        admit=flags.admit,
        value=ValueOptions(
            **{each.name: getattr(flags, each.name) for each in fields(ValueOptions)}
        ),
        adaptive=AdaptiveOptions(enabled=flags.adapt),
        drain_s=flags.recirculation_wait_s,
        tenants=TenantRules(dict(flags.tenant), flags.namespace_secrets),
    )


def _lease_ticks(lease_s: float, profile: TargetProfile) -> int:
    """The lease in the target's ticks, within what the target can count."""
    ticks = max(1, round(lease_s * 1e6 / profile.tick_us))
    longest = profile.longest_lease_ticks
    if longest and ticks > longest:
        log.warning("%s: a lease of %d ticks is cut to %d", profile.name, ticks, longest)
        return longest
    return ticks
