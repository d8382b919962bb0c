"""The router as a service: its parts, from start to stop.

Owns: the ready line, signals, and the order in which parts start. Must not know: how flags are
read (`flags`).
"""

from __future__ import annotations

import asyncio
import logging
import os

from kvcast.routing.core.router import Router
from kvcast.routing.engines import Engines
from kvcast.routing.flags import Setup, health_options, proxy_options, router_options
from kvcast.routing.proxy import Proxy
from kvcast.service.addresses import format_host_port
from kvcast.service.readiness import announce_ready, reload_on_hangup, stop_event

log = logging.getLogger("kvcast.routing")


async def run(setup: Setup) -> int:
    """Run a router until a signal; the exit status."""
    flags = setup.flags
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    if setup.credentials is not None:
        reload_on_hangup(loop, setup.credentials.refresh)
    router = Router(router_options(flags))
    engines = Engines(flags.engine, router, health_options(flags), setup.credentials)
    proxy = Proxy(
        router,
        engines,
        proxy_options(flags),
        setup.credentials,
        tokenizes=flags.prompts == "tokenize",
    )
    await engines.start()
    try:
        # Who connects at once shall not be told that there is no engine.
        await asyncio.wait(
            {asyncio.create_task(engines.checked.wait()), asyncio.create_task(stop.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        listening = await proxy.start(*flags.listen)
        announce_ready(
            service="route",
            pid=os.getpid(),
            listen=format_host_port(listening),
            engines=[each.name for each in flags.engine],
        )
        await stop.wait()
        log.info("stopping")
        return 0
    except OSError as error:
        log.error("cannot start: %s", error)
        return 1
    finally:
        await proxy.stop()
        await engines.close()
