"""A fixture for test modules that make a `PoolSwitch`: each test runs on both engines.

Import it (``from pool_engine import both_engines``); it applies itself.
"""

from __future__ import annotations

import pool_switch
import pytest
from kvcast.switchsim.llvm.switch import CompiledSwitch


@pytest.fixture(params=["reference", "llvm"], autouse=True)
def both_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "llvm":
        monkeypatch.setattr(pool_switch, "Switch", CompiledSwitch)
    return str(request.param)
