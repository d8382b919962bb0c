"""What a supervisor has ready before it forks an agent: all that agents run compiled.

Oracle: the caches of every function that compiles, in a process of its own. Cannot see: what that
saves (`python -m kvcast.bench.restart`).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
from kvcast.hostagent import daemon
from kvcast.hostagent.supervisor import warm_up
from kvcast.native.subset import Struct, ctypes_of

warm_up(cards=CARDS)
worked_out = ctypes_of.cache_info().misses
for structure in Struct.__subclasses__():
    ctypes_of(structure)
assert worked_out == ctypes_of.cache_info().misses, "structures are left for the agent"
makers = {
    name: maker
    for name, module in list(sys.modules.items())
    if name.startswith("kvcast.")
    for maker in (getattr(module, "compiled", None), getattr(module, "_compiled", None))
    if hasattr(maker, "cache_info")
}
assert len(makers) > 10, makers
print(*sorted(name for name, maker in makers.items() if not maker.cache_info().currsize))
"""
WITHOUT_SOCKETS = "kvcast.protocol.conveyor"
"""What it compiles by itself is for tests and the simulation."""
OF_CARDS = [
    "kvcast.hostagent.network.calling_card",
    "kvcast.hostagent.network.landing_zone",
    "kvcast.protocol.requester.landing",
]


@pytest.mark.parametrize("cards", [False, True])
def test_nothing_is_left_for_the_agent_to_compile(*, cards: bool) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("CARDS", str(cards))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    left = [] if cards else OF_CARDS
    assert run.stdout.split() == sorted([*left, WITHOUT_SOCKETS])
