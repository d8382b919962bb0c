"""Every test of the data plane that makes a `PoolSwitch` runs on both engines."""

from __future__ import annotations

import pool_switch
import pytest
from kvcast.switchsim.llvm_switch import CompiledSwitch


@pytest.fixture(params=["reference", "llvm"], autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "llvm":
        monkeypatch.setattr(pool_switch, "Switch", CompiledSwitch)
    return str(request.param)
