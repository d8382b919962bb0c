"""The runner of plain processes: addresses that no two runs share.

Oracle: the kernel, which lets nobody bind what is bound. Cannot see: what the pool does there.
"""

from __future__ import annotations

import random

import pytest
from kvcast.topologies.network import NetworkError
from kvcast.topologies.processes import TunnelNetwork
from kvcast.topologies.star import Star


class _SameNumbers(random.Random):
    """Takes the place of the system's random numbers: every run draws the same addresses."""

    def __init__(self) -> None:
        super().__init__(7)


def test_two_runs_that_draw_one_address_do_not_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.SystemRandom", _SameNumbers)
    first, second, third = (TunnelNetwork(Star.of(2)) for _ in range(3))
    first.up()
    second.up()
    assert second.address != first.address
    first.down()
    third.up()
    assert third.address == first.address
    second.down()
    third.down()


def test_without_a_free_address_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TunnelNetwork, "_is_free", lambda _self, _address: False)
    with pytest.raises(NetworkError, match="no loopback address"):
        TunnelNetwork(Star.of(2)).up()
