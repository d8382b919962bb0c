"""`kvcast controller`: files and signals around `ControllerService`.

Owns: the order of start and stop. Must not know: anything that is decided, or flags (`flags`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from kvcast.controller.flags import Setup, parse, pool_options
from kvcast.controller.http.api import HttpOptions
from kvcast.controller.service import ControllerService, ServiceOptions
from kvcast.controller.store import Store
from kvcast.controller.switch.connection import OneLineErrors
from kvcast.controller.switch.control_loop import StoreError
from kvcast.p4 import artefact
from kvcast.service.addresses import format_host_port
from kvcast.service.garbage import spare_what_stays
from kvcast.service.logs import setup_logging
from kvcast.service.readiness import announce_ready, reload_on_hangup, stop_event

log = logging.getLogger("kvcast.controller")


async def run(setup: Setup) -> int:
    """Serve until a signal; the exit status."""
    flags = setup.flags
    program = artefact(flags.target)
    device_config = flags.device_config or program.device_config
    assert device_config is not None  # parse() asks for it
    switch_address = format_host_port(flags.switch)
    try:
        store = Store(flags.state)
        service = ControllerService(
            ServiceOptions(
                switch=switch_address,
                device_id=flags.device_id,
                election_id=flags.election_id,
                p4info=program.p4info,
                p4blob=device_config,
                agents_addr=flags.agents_addr,
                http_addr=flags.http_addr,
                tick_s=flags.tick_s,
                credentials=setup.credentials,
                switch_tls=setup.switch_credentials,
                http=HttpOptions(
                    tokens=setup.tokens,
                    client_certificates=flags.http_client_certs,
                    authenticated=setup.authenticates,
                    rate_per_s=flags.http_rate_per_s,
                ),
            ),
            pool_options(flags),
            store,
        )
        await service.start()
    except (StoreError, OSError) as error:
        print(f"kvcast controller: {error}", file=sys.stderr)
        return 1
    loop = asyncio.get_running_loop()
    stop = stop_event(loop)
    files = [file.refresh for file in (setup.credentials, setup.tokens) if file is not None]
    if files:
        reload_on_hangup(loop, *files)
    spare_what_stays()
    announce_ready(
        agents_addr=format_host_port(service.agents_address),
        http_addr=format_host_port(service.http_address),
        switch=switch_address,
        target=flags.target,
        plain=flags.plain,
    )
    await service.run(stop)
    log.info("stopped; the switch keeps what it holds")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`kvcast controller`."""
    setup = parse(argv)
    setup_logging(setup.flags.log_level, setup.flags.log_format)
    for library in ("finsy", "grpc", "asyncio", "aiohttp"):
        # At "debug" finsy prints every entity that it reads or writes.
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("finsy").addFilter(OneLineErrors())
    return asyncio.run(run(setup))


if __name__ == "__main__":
    sys.exit(main())
