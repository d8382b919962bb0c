"""`kvcast controller`: flags, files and signals around `ControllerService`.

Owns: the command line. Must not know: anything that is decided.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcast.controller.core.admission import ValueOptions
from kvcast.controller.core.namespaces import SecretMode, TenantRules
from kvcast.controller.core.pool import PoolOptions
from kvcast.controller.core.program import Settings
from kvcast.controller.core.tiers import AdmitMode
from kvcast.controller.http.api import HttpOptions
from kvcast.controller.http.tokens import TokensError, TokensFile
from kvcast.controller.service import ControllerService, ServiceOptions
from kvcast.controller.store import Store
from kvcast.controller.switch.connection import OneLineErrors, SwitchTls
from kvcast.controller.switch.control_loop import StoreError
from kvcast.p4 import TargetProfile, artefact, profiles
from kvcast.p4.targets import MAX_PORTS
from kvcast.service.options import (
    HelpFormatter,
    add_common_options,
    announce_ready,
    is_loopback,
    parse_host_port,
    parse_with_config,
    setup_logging,
    stop_event,
)
from kvcast.service.tls import (
    add_tls_option,
    credentials_of,
    refuse_open_addresses,
    reload_on_hangup,
)

log = logging.getLogger("kvcast.controller")

DESCRIPTION = """\
The controller of a kvcast pool: programs the switch over P4Runtime, keeps track of the agents,
tells them who owns which bucket, and decides which blocks live in the switch's memory.

It may stop at any time: the switch keeps what it was given, and reads go on. When it starts
again it reads what the switch holds and writes only what differs.

  kvcast controller --switch 127.0.0.1:9559 --state /var/lib/kvcast/controller.sqlite
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(
        prog="kvcast controller", description=DESCRIPTION, formatter_class=HelpFormatter
    )
    defaults = ValueOptions()
    switch = parser.add_argument_group("switch")
    switch.add_argument(
        "--switch",
        metavar="HOST:PORT",
        default="127.0.0.1:9559",
        help="P4Runtime address of the switch",
    )
    switch.add_argument(
        "--switch-tls",
        action=argparse.BooleanOptionalAction,
        help="speak TLS with the switch, by the files of --tls; by default where it is beyond "
        "loopback",
    )
    switch.add_argument(
        "--switch-name",
        metavar="HOST",
        default="",
        help="whose certificate the switch must show, where that is not the host of --switch",
    )
    switch.add_argument("--device-id", type=_int(1, 2**64 - 1), default=1, help="P4Runtime device")
    switch.add_argument(
        "--election-id",
        type=_int(1, 2**63),
        default=10,
        help="of several controllers the one with the highest id programs the switch",
    )
    switch.add_argument(
        "--target",
        choices=sorted(profiles),
        default="v1model",
        help="what kind of switch it is; sets slots, padding of READs, ticks, and ports",
    )
    switch.add_argument(
        "--device-config",
        metavar="FILE",
        type=Path,
        help="what the switch is to load, where the package does not hold it (a Tofino's, as the "
        "vendor's tools make it for P4Runtime)",
    )
    switch.add_argument(
        "--device-ports",
        metavar="N,N,...",
        type=_device_ports,
        help="what the switch calls host port 1, 2, ... (default: as the target's profile says)",
    )
    switch.add_argument(
        "--plain",
        action="store_true",
        help="forwarding only: the switch treats kvcast's frames like any others",
    )
    switch.add_argument(
        "--coalesce-lease",
        metavar="SECONDS",
        type=_seconds(0.001, 3600),
        default=4.0,
        help="how long a READ waits in the switch for its DATA before it may be taken over; two "
        "to three times the round trip's 99th percentile",
    )
    switch.add_argument(
        "--heat-threshold",
        metavar="READS",
        type=_int(1, 2**32 - 1),
        default=3,
        help="READs of a segment in a window that make the switch report it",
    )
    switch.add_argument(
        "--router-mac",
        metavar="MAC",
        type=_mac,
        help="address to which hosts send what is to be routed; without it nothing is",
    )

    pool = parser.add_argument_group("pool")
    pool.add_argument(
        "--agents-addr",
        metavar="HOST:PORT",
        type=parse_host_port,
        default="127.0.0.1:9600",
        help="where agents connect; port 0 = pick one",
    )
    pool.add_argument(
        "--http-addr",
        metavar="HOST:PORT",
        type=parse_host_port,
        default="127.0.0.1:9601",
        help="where the HTTP API is served; port 0 = pick one",
    )
    pool.add_argument(
        "--tokens",
        metavar="FILE",
        type=Path,
        help="tokens of those who may use the HTTP API, as `kvcast tokens add` writes it; without "
        "it, everybody may on loopback, and elsewhere only who has an operator's certificate",
    )
    pool.add_argument(
        "--http-client-certs",
        action="store_true",
        help="let nobody use the HTTP API, with or without a token, who has no certificate of the "
        "cluster",
    )
    pool.add_argument(
        "--http-rate",
        metavar="REQUESTS",
        type=_number(0, 1e6),
        default=100.0,
        help="requests a second that one client may make over HTTP; 0 = no limit",
    )
    add_tls_option(pool.add_argument)
    pool.add_argument(
        "--state",
        metavar="FILE",
        type=Path,
        default="kvcast-controller.sqlite",
        help="SQLite file of what must outlive the controller; one controller a file",
    )
    pool.add_argument(
        "--lease",
        metavar="SECONDS",
        type=_seconds(0.1, 3600),
        default=3.0,
        help="an agent that has not renewed for so long is dead, and its buckets move",
    )
    pool.add_argument(
        "--rebalance-after",
        metavar="SECONDS",
        type=_seconds(0, 3600),
        default=2.0,
        help="an agent that was dead gets buckets again when it has lived for so long",
    )
    pool.add_argument(
        "--replicas",
        metavar="N",
        type=_int(0, 3),
        default=2,
        help="nodes that a bucket lists after its home, in the order in which they take over",
    )
    pool.add_argument(
        "--tenant",
        metavar="NAME[=NODE,…]",
        type=_tenant,
        action="append",
        default=[],
        help="a tenant, and the nodes that its namespaces are for (none = all); where any are "
        "named, there are no others (repeatable)",
    )
    pool.add_argument(
        "--namespace-secrets",
        choices=[mode.value for mode in SecretMode],
        default=SecretMode.AUTO.value,
        help="secrets that keep tenants from naming each other's blocks; auto: as soon as there "
        "are two tenants, or --tenant is given",
    )
    pool.add_argument(
        "--tick",
        metavar="SECONDS",
        type=_seconds(0.05, 60),
        default=0.5,
        help="period of counters and of admission",
    )

    admission = parser.add_argument_group("admission to the switch's memory")
    admission.add_argument(
        "--admit",
        choices=[mode.value for mode in AdmitMode],
        default=AdmitMode.AUTO.value,
        help="auto: by value; pin: only what is pinned over HTTP; off: nothing",
    )
    admission.add_argument(
        "--half-life",
        metavar="SECONDS",
        type=_seconds(0.1, 86400),
        default=defaults.half_life_s,
        help="after which a read counts half",
    )
    admission.add_argument(
        "--horizon",
        metavar="SECONDS",
        type=_seconds(0.1, 86400),
        default=defaults.horizon_s,
        help="how far ahead reads are expected",
    )
    admission.add_argument(
        "--min-reads",
        metavar="READS",
        type=_number(0, 1e18),
        default=defaults.min_reads,
        help="reads expected over the horizon below which a block is not given free slots",
    )
    admission.add_argument(
        "--displace-reads",
        metavar="READS",
        type=_number(0, 1e18),
        default=defaults.displace_reads,
        help="reads expected over the horizon below which a block does not displace others",
    )
    admission.add_argument(
        "--margin",
        metavar="FACTOR",
        type=_number(1, 1000),
        default=defaults.margin,
        help="by how much a block must beat those that it displaces",
    )
    admission.add_argument(
        "--keep-value",
        metavar="BYTES",
        type=_number(0, 1e18),
        default=defaults.keep_value,
        help="value from which an evicted block is made sure to live in its home's memory",
    )
    admission.add_argument(
        "--min-stay",
        metavar="SECONDS",
        type=_seconds(0, 86400),
        default=defaults.min_stay_s,
        help="how long a resident is safe from displacement",
    )
    admission.add_argument(
        "--recirculation-wait",
        metavar="SECONDS",
        type=_seconds(0, 60),
        default=0.2,
        help="how long an evicted block's slots rest before another block gets them",
    )
    add_common_options(parser)
    return parser


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low:g}..{high:g}")
        return value

    return parse


_seconds = _number


def _int(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low}..{high}")
        return value

    return parse


def _tenant(text: str) -> tuple[str, frozenset[str]]:
    name, equals, nodes = text.partition("=")
    names = frozenset(node.strip() for node in nodes.split(",")) if equals else frozenset()
    if not 1 <= len(name) <= 256 or "" in names:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=NODE,…")
    if wrong := sorted(node for node in names if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", node)):
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no node's name")
    return name, names


def _mac(text: str) -> str:
    mac = text.lower()
    if not re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", mac) or int(mac[:2], 16) & 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a unicast MAC address")
    return mac


def _device_ports(text: str) -> tuple[int, ...]:
    """A comma-separated list of distinct 9-bit device ports, one for each host port."""
    try:
        ports = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of port numbers") from None
    if len(set(ports)) != len(ports) or not all(0 < port < 512 for port in ports):
        raise argparse.ArgumentTypeError("device ports must differ and lie within 1..511")
    if len(ports) != MAX_PORTS:
        raise argparse.ArgumentTypeError(
            f"{len(ports)} ports, not {MAX_PORTS}; host ports without a host may be any others"
        )
    return ports


def _lease_ticks(lease_s: float, profile: TargetProfile) -> int:
    """The lease in the target's ticks, within what the target can count."""
    ticks = max(1, round(lease_s * 1e6 / profile.tick_us))
    longest = profile.longest_lease_ticks
    if longest and ticks > longest:
        log.warning("%s: a lease of %d ticks is cut to %d", profile.name, ticks, longest)
        return longest
    return ticks


def pool_options(options: argparse.Namespace) -> PoolOptions:
    """The core's options from the parsed flags and the target's profile."""
    profile = profiles[options.target]
    return PoolOptions(
        settings=Settings(
            enabled=not options.plain,
            lease_ticks=_lease_ticks(options.coalesce_lease, profile),
            heat_threshold=options.heat_threshold,
            recirculate_rid=profile.recirculate_rid,
            router_mac=options.router_mac,
            device_ports=options.device_ports or profile.device_ports,
            serve_goes_round=profile.serve_goes_round,
            loop_groups=tuple(sorted(profile.loop_groups.items())),
        ),
        slots=profile.slots,
        read_padding_bytes=profile.read_padding_bytes,
        lease_s=options.lease,
        rebalance_after_s=options.rebalance_after,
        replicas=options.replicas,
        admit=AdmitMode(options.admit),
        value=ValueOptions(
            half_life_s=options.half_life,
            horizon_s=options.horizon,
            min_reads=options.min_reads,
            displace_reads=options.displace_reads,
            margin=options.margin,
            keep_value=options.keep_value,
            min_stay_s=options.min_stay,
        ),
        drain_s=options.recirculation_wait,
        tenants=TenantRules(dict(options.tenant), SecretMode(options.namespace_secrets)),
    )


async def run(options: argparse.Namespace) -> int:
    """Serve until a signal; the exit status."""
    program = artefact(options.target)
    device_config = options.device_config or program.device_config
    assert device_config is not None  # main() asks for it
    try:
        store = Store(options.state)
        service = ControllerService(
            ServiceOptions(
                switch=options.switch,
                device_id=options.device_id,
                election_id=options.election_id,
                p4info=program.p4info,
                p4blob=device_config,
                agents_addr=options.agents_addr,
                http_addr=options.http_addr,
                tick_s=options.tick,
                credentials=options.credentials,
                switch_tls=options.switch_credentials,
                http=HttpOptions(
                    tokens=options.tokens_file,
                    client_certificates=options.http_client_certs,
                    authenticated=authenticates(options),
                    rate_per_s=options.http_rate,
                ),
            ),
            pool_options(options),
            store,
        )
        await service.start()
    except (StoreError, OSError) as error:
        print(f"kvcast controller: {error}", file=sys.stderr)
        return 1
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    files = [f.refresh for f in (options.credentials, options.tokens_file) if f is not None]
    if files:
        reload_on_hangup(loop, *files)
    announce_ready(
        agents_addr=_joined(service.agents_address),
        http_addr=_joined(service.http_address),
        switch=options.switch,
        target=options.target,
        plain=options.plain,
    )
    await service.run(stop)
    log.info("stopped; the switch keeps what it holds")
    return 0


def _joined(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def authenticates(options: argparse.Namespace) -> bool:
    """Whether the HTTP API asks who somebody is: wherever there is a way to tell."""
    return options.tokens is not None or options.tls is not None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags and file, checked, with the files that they name opened; exits with status 2 and a
    message on an error."""
    parser = build_parser()
    options = parse_with_config(parser, argv)
    switch_host = options.switch.rpartition(":")[0].strip("[]") or "127.0.0.1"
    refuse_open_addresses(
        parser,
        options,
        [
            ("--agents-addr", options.agents_addr[0]),
            ("--http-addr", options.http_addr[0]),
            ("--switch", switch_host),
        ],
    )
    if options.switch_tls is None:
        options.switch_tls = options.tls is not None and not is_loopback(switch_host)
    elif options.switch_tls and options.tls is None:
        parser.error("--switch-tls needs --tls DIR")
    elif not (options.switch_tls or is_loopback(switch_host) or options.insecure):
        parser.error(f"--switch {switch_host} is not loopback: --no-switch-tls needs --insecure")
    if options.http_client_certs and options.tls is None:
        parser.error("--http-client-certs needs --tls DIR")
    options.credentials = credentials_of(parser, options.tls)
    options.switch_credentials = None
    if options.switch_tls:
        assert options.credentials is not None
        options.switch_credentials = SwitchTls(options.credentials.files, options.switch_name)
    options.tokens_file = None
    if options.tokens is not None:
        try:
            options.tokens_file = TokensFile(options.tokens)
        except TokensError as error:
            parser.error(f"--tokens {error}")
    if options.device_config is None and artefact(options.target).device_config is None:
        parser.error(f"--target {options.target} needs --device-config")
    profile = profiles[options.target]
    if profile.loop_groups and len({port >> 7 for port in options.device_ports or ()}) > 1:
        parser.error(f"--device-ports: {options.target} keeps a pool in one pipe (port / 128)")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """`kvcast controller`."""
    options = parse(argv)
    setup_logging(options.log_level, options.log_format)
    for library in ("finsy", "grpc", "asyncio", "aiohttp"):
        # At "debug" finsy prints every entity that it reads or writes.
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("finsy").addFilter(OneLineErrors())
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
