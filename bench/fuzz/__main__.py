"""`python -m kvcast.bench.fuzz`: see `kvcast.bench.fuzz.command`."""

import sys

from kvcast.bench.fuzz.command import main

sys.exit(main())
