"""`kvcast agent`: the agent as a process.

Owns: the ready line, signals, and the optional ends for metrics, hints and traces. Must not know:
anything that another program embedding an agent would need too (`agent`), or flags (`flags`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcast.hostagent.agent import Agent
from kvcast.hostagent.core.tracing import Traces
from kvcast.hostagent.flags import AgentFlags, Setup, options_of, parse
from kvcast.hostagent.network.courier import CourierLoop
from kvcast.hostagent.network.local_server import SocketInUseError
from kvcast.hostagent.object_stores import ColdError
from kvcast.hostagent.supervisor import Place, supervise
from kvcast.hostagent.tiers.arena import ArenaError
from kvcast.hostagent.tiers.ssd.layout import SsdError
from kvcast.hostagent.time_slice import take_long_slices
from kvcast.service.addresses import format_host_port
from kvcast.service.garbage import spare_what_stays
from kvcast.service.logs import setup_logging
from kvcast.service.readiness import announce_ready, reload_on_hangup, stop_event

if TYPE_CHECKING:
    from kvcast.hostagent.network.otlp import SpanSink
    from kvcast.service.http import HttpServer

log = logging.getLogger("kvcast.hostagent")


def trace_gets(agent: Agent, flags: AgentFlags) -> SpanSink:
    """Have gets traced, as the flags say; OSError where the library is missing."""
    try:
        # Imported here: most agents do without.
        from kvcast.hostagent.network.otlp import SpanSink
    except ImportError as error:
        raise OSError(f"--otlp-endpoint needs pip install 'kvcast[otel]' ({error})") from error
    assert flags.otlp_endpoint is not None
    sink = SpanSink(flags.otlp_endpoint, flags.node_id, now=asyncio.get_running_loop().time)
    reads = agent.core.reads
    traces = Traces(
        flags.trace_share, flags.trace_slow_s, random.Random(), reads.requester.stories, sink
    )
    reads.watch = traces.ended
    return sink


async def run(setup: Setup, place: Place | None = None) -> int:
    """Run an agent until a signal; the exit status. `place`: what stands already, and whoever
    watches over it."""
    flags = setup.flags
    take_long_slices()
    stop = stop_event(asyncio.get_running_loop())
    if setup.credentials is not None:
        reload_on_hangup(asyncio.get_running_loop(), setup.credentials.refresh)
    agent = Agent(options_of(setup), place.standing if place is not None else None)
    try:
        await agent.start()
    except (ArenaError, ColdError, SsdError, SocketInUseError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    servers: list[HttpServer] = []
    spans: SpanSink | None = None
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
            # Imported here: they take most of an agent's start-up time.
            from kvcast.hostagent.network.metrics_server import metrics_server

            servers.append(metrics_server(agent.core, setup.credentials))
            facts["metrics"] = format_host_port(await servers[-1].start(*flags.metrics_addr))
        if flags.otlp_endpoint is not None:
            spans = trace_gets(agent, flags)
            facts["otlp"] = flags.otlp_endpoint
        if flags.hints_addr is not None:
            from kvcast.hostagent.network.hints_server import hints_server

            pump = agent.transport.pump
            servers.append(hints_server(agent.core, pump, setup.credentials))
            facts["hints"] = format_host_port(await servers[-1].start(*flags.hints_addr))
        spare_what_stays()
        if place is None:
            announce_ready(**facts)
        else:
            await place.ready(
                *(facts, agent.let_clients_in, agent.rest, stop.set), card=agent.cards is not None
            )
        await stop.wait()
        log.info("stopping")
        return 0
    except OSError as error:
        log.error("cannot serve metrics or hints, or trace gets: %s", error)
        return 1
    finally:
        for server in servers:
            await server.stop()
        if spans is not None:
            await asyncio.to_thread(spans.close)
        if place is None or place.served:  # else clients are the next agent's, as they are
            await agent.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kvcast agent`."""
    setup = parse(argv)
    setup_logging(setup.flags.log_level, setup.flags.log_format)
    if setup.flags.arena_keep:
        return supervise(options_of(setup), lambda place: run(setup, place), setup.flags.takeover)
    with asyncio.Runner(loop_factory=CourierLoop) as runner:
        return runner.run(run(setup))


if __name__ == "__main__":
    sys.exit(main())
