"""Files of lower tiers that cannot be opened, for whatever reason, while their agent runs.

Oracle: what the core is told. Cannot see: files (test_ssd_files.py).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvcast.hostagent.options import SsdOptions
from kvcast.hostagent.ssd import SsdOfAgent


async def test_whatever_keeps_the_files_from_being_opened_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    core: Any = SimpleNamespace(
        awaits_tiers=False, await_tiers_no_more=lambda: told.append("no more")
    )

    def broken(_self: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(SsdOfAgent, "_open", broken)
    tiers = SsdOfAgent(core, cast(SsdOptions, None), "node-1", lambda: None)
    tiers.start(patient=True)
    assert core.awaits_tiers
    opening = tiers._opening
    assert opening is not None
    await asyncio.wait([opening])
    await tiers.close()
    assert told == ["no more"]
