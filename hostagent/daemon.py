"""`kvcast agent`: the agent as a process.

Owns: flags, the ready line, signals, and the optional metrics endpoint. Must not know: anything
that another program embedding an agent would need too (`agent`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvcast.hostagent.agent import Agent, ArenaOptions, NetworkOptions, Options
from kvcast.hostagent.core.access import AccessRules, parse_rule
from kvcast.hostagent.core.agent import AgentOptions
from kvcast.hostagent.core.arena import SLAB_BYTES, ArenaError
from kvcast.hostagent.core.writes import ACK_HOME, ACK_LOCAL, WriteOptions
from kvcast.hostagent.network.local_server import LocalOptions, SocketInUseError
from kvcast.protocol.links.control_caller import ControlOptions
from kvcast.protocol.messages.ethernet import parse_ip, parse_mac
from kvcast.protocol.messages.wire import UDP_PORT
from kvcast.protocol.requester import RequesterConfig
from kvcast.protocol.responder import ResponderConfig
from kvcast.service.options import (
    HelpFormatter,
    add_common_options,
    announce_ready,
    parse_host_port,
    parse_with_config,
    setup_logging,
    stop_event,
)
from kvcast.service.tls import (
    Credentials,
    add_tls_option,
    credentials_of,
    refuse_open_addresses,
    reload_on_hangup,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("kvcast.hostagent")

_METRICS_CLIENTS: Final = 16
"""Who asks for metrics at once; one more is hung up on."""
_METRICS_TIMEOUT_S: Final = 10.0

_DESCRIPTION = """\
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


def _size(text: str) -> int:
    """ "268435456", "256M", "1.5GiB" as bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size (like 256M)")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _tunnel(text: str) -> tuple[tuple[str, int], tuple[str, int]]:
    parts = text.split(":")
    if len(parts) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOCALIP:LPORT:PEERIP:PPORT")
    return parse_host_port(":".join(parts[:2])), parse_host_port(":".join(parts[2:]))


def _ip(text: str) -> str:
    try:
        parse_ip(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _mac(text: str) -> str:
    try:
        parse_mac(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text.lower()


def _node_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise argparse.ArgumentTypeError("1 to 64 letters, digits, dots, dashes and underscores")
    return text


def _quota(text: str) -> tuple[int, int]:
    namespace, _, size = text.partition("=")
    if not namespace.isdigit() or int(namespace) > 0xFFFF:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE=SIZE")
    return int(namespace), _size(size)


def build_parser() -> argparse.ArgumentParser:
    """The agent's flags."""
    requester = RequesterConfig()
    responder = ResponderConfig()
    parser = argparse.ArgumentParser(
        "kvcast agent", description=_DESCRIPTION, formatter_class=HelpFormatter
    )
    add_common_options(parser)
    add = parser.add_argument_group("identity").add_argument
    add("--node-id", type=_node_id, help="name of this node in the pool (required)")
    add(
        "--controller",
        type=parse_host_port,
        default=("127.0.0.1", 9600),
        metavar="HOST:PORT",
        help="the controller's address for agents",
    )
    add = parser.add_argument_group("network").add_argument
    add("--transport", choices=["tunnel", "udp"], default="tunnel", help="see above")
    add(
        "--tunnel",
        type=_tunnel,
        metavar="LOCALIP:LPORT:PEERIP:PPORT",
        help="this end and the switch's end of the tunnel (--transport tunnel)",
    )
    add("--ip", type=_ip, help="this node's IPv4 address behind the switch (required)")
    add("--mac", type=_mac, help="this node's MAC address (required)")
    add("--switch-port", type=int, help="the switch's port that this node is at (required)")
    add("--udp-port", type=int, default=UDP_PORT, help="port for READ and DATA")
    add(
        "--bulk-addr",
        type=parse_host_port,
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="where other agents reach this one by TCP; a concrete address",
    )
    add_tls_option(add)
    add("--socket-buffer", type=_size, default="8M", help="socket buffers to ask the kernel for")
    add = parser.add_argument_group("memory").add_argument
    add("--arena-bytes", type=_size, default="256M", help="size of the DRAM tier")
    add(
        "--arena-path",
        help="the arena's file; by default one in /dev/shm, or in the temporary directory",
    )
    add(
        "--arena-reserve",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take the arena's memory at the start, not when it is first used",
    )
    add("--slab-bytes", type=_size, default=SLAB_BYTES, help="unit of the arena's allocator")
    add(
        "--namespace-quota",
        type=_size,
        default="0",
        help="arena bytes that each namespace may take; 0 = no limit",
    )
    add(
        "--quota",
        type=_quota,
        action="append",
        default=[],
        metavar="NAMESPACE=SIZE",
        help="quota of one namespace (repeatable)",
    )
    add = parser.add_argument_group("local API").add_argument
    add("--socket", help="path of the Unix socket for engines (required)")
    add(
        "--allow-uid",
        type=parse_rule,
        action="append",
        default=[],
        metavar="UID[=TENANT,…]",
        help="user that may connect besides this process's own and root; with tenants, for their "
        "namespaces only (repeatable)",
    )
    add(
        "--allow-gid",
        type=parse_rule,
        action="append",
        default=[],
        metavar="GID[=TENANT,…]",
        help="the same for the members of a group (repeatable)",
    )
    add("--max-clients", type=int, default=256, help="clients at once")
    add(
        "--client-share",
        type=float,
        default=0.5,
        help="share of the arena that one client may hold pinned or reserved",
    )
    add(
        "--metrics-addr",
        type=parse_host_port,
        metavar="HOST:PORT",
        help="serve the counters for Prometheus here",
    )
    add = parser.add_argument_group("puts").add_argument
    add(
        "--put-ack",
        choices=[ACK_HOME, ACK_LOCAL],
        default=ACK_HOME,
        help="what a put waits for: its first home, or this node only",
    )
    add("--replicate-timeout", type=float, default=10.0, help="seconds for one copy to one home")
    add = parser.add_argument_group("reads").add_argument
    add("--max-block", type=_size, default=requester.max_block_bytes, help="largest block")
    add("--max-fetches", type=int, default=requester.max_fetches, help="blocks on their way")
    add(
        "--credit-segments",
        type=int,
        default=requester.credit_segments,
        help="segments in flight to this node; lowered to what the receive buffer holds",
    )
    add(
        "--window-initial",
        type=int,
        default=requester.window_initial,
        help="segments in flight from one home at first",
    )
    add(
        "--rto-initial",
        type=float,
        default=requester.rto_initial_s,
        help="time-out towards a home before its first answer, seconds",
    )
    add("--rto-min", type=float, default=requester.rto_min_s, help="shortest time-out, seconds")
    add("--rto-max", type=float, default=requester.rto_max_s, help="longest time-out, seconds")
    add(
        "--quiet",
        type=float,
        default=requester.quiet_s,
        help="seconds without a further chunk after which a segment's end counts as lost",
    )
    add(
        "--tries-per-home",
        type=int,
        default=requester.tries_per_home,
        help="time-outs in a row before another home is asked",
    )
    add(
        "--gather-ms",
        type=int,
        default=requester.gather_ms,
        help="how long homes may hold answers for joiners, unless a get says otherwise",
    )
    add(
        "--expect-wait",
        type=float,
        default=requester.expect_wait_s,
        help="seconds that a get waits for its group's answer before it asks itself",
    )
    add = parser.add_argument_group("answers").add_argument
    add(
        "--responder-rate",
        type=float,
        default=responder.rate_frames_per_s,
        help="frames a second to all readers together; 0 = no limit",
    )
    add(
        "--responder-burst",
        type=int,
        default=responder.burst_frames,
        help="frames at once after a pause",
    )
    add(
        "--responder-jobs",
        type=int,
        default=responder.max_jobs,
        help="segments that wait to be sent; more are refused as overload",
    )
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags and file, checked; exits with status 2 and a message on an error."""
    parser = build_parser()
    flags = parse_with_config(parser, argv)
    for name in ("node_id", "ip", "mac", "switch_port", "socket"):
        if getattr(flags, name) is None:
            parser.error(f"--{name.replace('_', '-')} is required")
    if flags.transport == "tunnel" and flags.tunnel is None:
        parser.error("--transport tunnel needs --tunnel")
    if flags.transport == "udp" and flags.tunnel is not None:
        parser.error("--tunnel goes with --transport tunnel")
    if flags.bulk_addr[0] in ("0.0.0.0", "::", ""):
        parser.error("--bulk-addr must be an address that other agents can connect to")
    addresses = [("--controller", flags.controller[0]), ("--bulk-addr", flags.bulk_addr[0])]
    if flags.metrics_addr is not None:
        addresses.append(("--metrics-addr", flags.metrics_addr[0]))
    refuse_open_addresses(parser, flags, addresses)
    flags.credentials = credentials_of(parser, flags.tls)
    if not 1 <= flags.switch_port <= 32:
        parser.error("--switch-port must be 1 to 32")
    if flags.arena_bytes < flags.slab_bytes:
        parser.error("--arena-bytes is smaller than a slab")
    if not 0.0 < flags.client_share <= 1.0:
        parser.error("--client-share must be above 0 and at most 1")
    for name in ("max_fetches", "credit_segments", "window_initial", "tries_per_home"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= flags.gather_ms <= 255:
        parser.error("--gather-ms must be 0 to 255")
    return flags


def options_of(flags: argparse.Namespace) -> Options:
    """The agent's options from its flags."""
    requester = RequesterConfig(
        max_fetches=flags.max_fetches,
        max_block_bytes=min(flags.max_block, flags.arena_bytes),
        credit_segments=flags.credit_segments,
        window_initial=flags.window_initial,
        rto_initial_s=flags.rto_initial,
        rto_min_s=flags.rto_min,
        quiet_s=flags.quiet,
        rto_max_s=flags.rto_max,
        tries_per_home=flags.tries_per_home,
        gather_ms=flags.gather_ms,
        expect_wait_s=flags.expect_wait,
    )
    responder = ResponderConfig(
        rate_frames_per_s=flags.responder_rate,
        burst_frames=flags.responder_burst,
        max_jobs=flags.responder_jobs,
    )
    return Options(
        agent=AgentOptions(
            node_id=flags.node_id,
            requester=requester,
            responder=responder,
            writes=WriteOptions(put_ack=flags.put_ack, replicate_timeout_s=flags.replicate_timeout),
            client_share=flags.client_share,
        ),
        network=NetworkOptions(
            ip=flags.ip,
            mac=flags.mac,
            switch_port=flags.switch_port,
            udp_port=flags.udp_port,
            tunnel=flags.tunnel,
            buffer_bytes=flags.socket_buffer,
            bulk_host=flags.bulk_addr[0],
            bulk_port=flags.bulk_addr[1],
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
            slab_bytes=flags.slab_bytes,
            default_quota_bytes=flags.namespace_quota,
            quotas=dict(flags.quota),
        ),
        credentials=flags.credentials,
    )


def serve_metrics(
    agent: Agent, host: str, port: int, credentials: Credentials | None
) -> tuple[int, Callable[[], None]]:
    """Serve the agent's counters to Prometheus; returns the port and a function that stops. With
    credentials over TLS, to whoever has a certificate of the cluster.

    prometheus_client is imported only here: it would be a third of the agent's start-up time.
    """
    from wsgiref.simple_server import WSGIRequestHandler, make_server

    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.exposition import ThreadingWSGIServer
    from prometheus_client.registry import Collector

    class AgentCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            for name, value in agent.core.counters().items():
                family: Metric
                if name.endswith("_total"):
                    family = CounterMetricFamily(f"kvcast_agent_{name}", name, value=value)
                else:
                    family = GaugeMetricFamily(f"kvcast_agent_{name}", name, value=value)
                yield family

    class Handler(WSGIRequestHandler):
        timeout = _METRICS_TIMEOUT_S

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            pass

    class Server(ThreadingWSGIServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        slots = threading.BoundedSemaphore(_METRICS_CLIENTS)

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, address = super().get_request()
            if credentials is not None:
                # The handshake is made by the first read, in the client's own thread, and with
                # the certificate of the moment.
                connection = credentials.server().wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            return connection, address

        def process_request(self, request: Any, client_address: Any) -> None:
            if self.slots.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.slots.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            log.debug("metrics: %s was not served", client_address, exc_info=True)

    registry = CollectorRegistry()
    registry.register(AgentCollector())
    server = make_server(host, port, make_wsgi_app(registry), Server, handler_class=Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return server.server_port, stop


async def run(flags: argparse.Namespace) -> int:
    """Run an agent until a signal; the exit status."""
    stop = stop_event(asyncio.get_running_loop())
    if flags.credentials is not None:
        reload_on_hangup(asyncio.get_running_loop(), flags.credentials.refresh)
    agent = Agent(options_of(flags))
    try:
        await agent.start()
    except (ArenaError, SocketInUseError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    stop_metrics = None
    try:
        facts: dict[str, Any] = {
            "service": "agent",
            "node_id": flags.node_id,
            "pid": os.getpid(),
            "socket": flags.socket,
            "bulk": "{}:{}".format(*agent.bulk_address),
            "arena": agent.arena.path,
            "arena_bytes": agent.arena.size_bytes,
        }
        if agent.tunnel_address is not None:
            facts["tunnel"] = "{}:{}".format(*agent.tunnel_address)
        if flags.metrics_addr is not None:
            host, port = flags.metrics_addr
            port, stop_metrics = serve_metrics(agent, host, port, flags.credentials)
            facts["metrics"] = f"{host}:{port}"
        announce_ready(**facts)
        await stop.wait()
        log.info("stopping")
        return 0
    except OSError as error:
        log.error("cannot serve metrics: %s", error)
        return 1
    finally:
        if stop_metrics is not None:
            stop_metrics()
        await agent.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kvcast agent`."""
    flags = parse(argv)
    setup_logging(flags.log_level, flags.log_format)
    return asyncio.run(run(flags))


if __name__ == "__main__":
    sys.exit(main())
