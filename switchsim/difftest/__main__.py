"""`python -m kvcast.switchsim.difftest`: see `kvcast.switchsim.difftest.run`."""

import sys

from kvcast.switchsim.difftest.run import main

sys.exit(main())
