"""The SSD tier on a simulated disk that dies anywhere.

The oracle is `kvcast.simulation.crashes`' own: every block that was put, and what was safe. Planted
mistakes show that it sees what it should.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvcast.hostagent.core import ssd
from kvcast.hostagent.core.ssd import SsdTier
from kvcast.hostagent.tiers.ssd import layout
from kvcast.simulation import crashes
from kvcast.simulation.crashes import CrashError, Found, run
from kvcast.simulation.disk import SimDisk


@pytest.mark.parametrize("seed", range(8))
def test_after_a_crash_anywhere_every_block_is_whole_or_gone(seed: int) -> None:
    found = Found()
    run(seed, 10, found)
    assert found.crashes == 10
    assert found.blocks_verified > 20
    assert found.wrong_bytes == 0
    if seed % 5 != 4:
        assert found.damaged == 0
        assert found.kept > 0


def run_all(*seeds: int) -> None:
    for seed in seeds:
        run(seed, 10, Found())


def forget_to_flush(self: SsdTier, orders: list[ssd.Order]) -> None:
    for order in orders:
        if order.kind is ssd.Kind.FLUSH:
            order.ended(self._now, ssd.DONE, 0)
    self.orders += [order for order in orders if order.kind is not ssd.Kind.FLUSH]
    self._wake()


def clears_are_safe(self: ssd._Table, unit: int) -> None:
    self.dirty[unit - unit % layout.ENTRIES_PER_PAGE] = None


@pytest.mark.parametrize(
    ("where", "name", "mistake"),
    [
        (SsdTier, "_give", forget_to_flush),
        (ssd._Table, "overwrite", clears_are_safe),
        (SimDisk, "flush", lambda _self: None),
    ],
)
def test_a_mistake_in_the_order_of_writes_is_found(
    where: type, name: str, mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = crashes.open_formatted

    def open_safely(disk: SimDisk, *rest: object) -> layout.Formatted:
        formatted = opened(disk, *rest)  # type: ignore[arg-type]
        disk._safe[:] = disk._seen
        return formatted

    monkeypatch.setattr(crashes, "open_formatted", open_safely)
    monkeypatch.setattr(where, name, mistake)
    with pytest.raises(CrashError, match=r"damaged|was safe"):
        run_all(0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13)


def test_wrong_bytes_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd, "DAMAGED", "")
    with pytest.raises(CrashError, match="is not what was put"):
        run_all(4, 9, 14, 19, 24, 29)


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert crashes.main(["--crashes", "3", "--seed", "1"]) == 0
    assert "crashes=3" in capsys.readouterr().out
