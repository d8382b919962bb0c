"""`kvcast route`: the router as a process.

Owns: that flags are read and logs set up before anything else is imported. Must not know: what runs
(`service`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from kvcast.routing.flags import parse
from kvcast.service.logs import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kvcast route`."""
    setup = parse(argv)
    setup_logging(setup.flags.log_level, setup.flags.log_format)
    # Imported here: it takes most of the start-up time, and --help needs none of it.
    from kvcast.routing.service import run

    return asyncio.run(run(setup))


if __name__ == "__main__":
    sys.exit(main())
