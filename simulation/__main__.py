"""`python -m kvcast.simulation`: see `kvcast.simulation.command`."""

import sys

from kvcast.simulation.command import main

sys.exit(main())
