"""How long tests wait for what comes at once, but on a busy machine: for ever, as it were. Where a
defence is taken out (`mutation_runner`) they are to fail, and soon."""

import os

PATIENCE_S = 4.0 if "KVCAST_TESTS_ARE_TO_FAIL" in os.environ else 60.0
