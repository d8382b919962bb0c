"""`python -m kvcast.switchsim.difftest`: see `kvcast.switchsim.difftest.compare`."""

import sys

from kvcast.switchsim.difftest.compare import main

sys.exit(main())
