"""`python -m kvcast.simulation`: see `kvcast.simulation.command`."""

import signal
import sys

from kvcast.simulation.command import main

signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.exit(main())
