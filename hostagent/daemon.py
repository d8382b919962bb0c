"""`kvcast agent`: the agent as a process.

Owns: the ready line, signals, and the optional metrics endpoint. Must not know: anything that
another program embedding an agent would need too (`agent`), or flags (`flags`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvcast.hostagent.agent import Agent
from kvcast.hostagent.core.arena import ArenaError
from kvcast.hostagent.flags import Setup, options_of, parse
from kvcast.hostagent.network.local_server import SocketInUseError
from kvcast.service.addresses import format_host_port
from kvcast.service.logs import setup_logging
from kvcast.service.readiness import announce_ready, reload_on_hangup, stop_event
from kvcast.service.tls import Credentials

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("kvcast.hostagent")

_METRICS_CLIENTS: Final = 16
"""Who asks for metrics at once; one more is hung up on."""
_METRICS_TIMEOUT_S: Final = 10.0


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


async def run(setup: Setup) -> int:
    """Run an agent until a signal; the exit status."""
    flags = setup.flags
    stop = stop_event(asyncio.get_running_loop())
    if setup.credentials is not None:
        reload_on_hangup(asyncio.get_running_loop(), setup.credentials.refresh)
    agent = Agent(options_of(setup))
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
            "bulk": format_host_port(agent.bulk_address),
            "arena": agent.arena.path,
            "arena_bytes": agent.arena.size_bytes,
        }
        if agent.tunnel_address is not None:
            facts["tunnel"] = format_host_port(agent.tunnel_address)
        if flags.metrics_addr is not None:
            host, port = flags.metrics_addr
            port, stop_metrics = serve_metrics(agent, host, port, setup.credentials)
            facts["metrics"] = format_host_port((host, port))
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
    setup = parse(argv)
    setup_logging(setup.flags.log_level, setup.flags.log_format)
    return asyncio.run(run(setup))


if __name__ == "__main__":
    sys.exit(main())
