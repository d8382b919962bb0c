"""What a replay tells agents of a request: who gathers, and who waits for whom.

Oracle: the requests themselves. Cannot see: agents (tests/integration/test_pool_commands.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvcast.bench.replay import NodeLink, Player, Reads, ReplayOptions
from kvcast.workloads.generators import Request

KEYS = (b"a" * 16, b"b" * 16)


class Agent:
    """An agent that holds nothing and knows of everything, and remembers how it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.groups: list[list[str]] = []

    async def client(self) -> Agent:
        return self

    async def namespace(self, *_names: str) -> int:
        return 7

    async def group(self, _namespace: int, members: list[str]) -> int:
        self.groups.append(members)
        return 3

    async def exists(self, _namespace: int, keys: Sequence[bytes]) -> int:
        return len(keys)

    async def put(self, _namespace: int, _blocks: dict[bytes, bytes]) -> None:
        pass

    async def get_outcomes(self, _namespace: int, keys: Sequence[bytes], **how: Any) -> list[Any]:
        self.asked.append(how)
        return [SimpleNamespace(block=None, reason="", status="miss") for _ in keys]


async def _played(options: ReplayOptions) -> list[Agent]:
    agents = [Agent() for _ in range(3)]
    player = Player(cast("list[NodeLink]", agents), ["n1", "n2", "n3"], options)
    request = Request(0, 0.0, 1, KEYS, "tp-mla", group=(1, 0, 2), gather_ms=40)
    await player.prepare([request])
    await player.play(request, Reads())
    return agents


async def test_ranks_that_name_their_group_wait_for_what_the_first_asks_for() -> None:
    agents = await _played(ReplayOptions())
    assert agents[0].groups == [["n2", "n1", "n3"]]
    told = [(how["group"], how["expect"], how["gather_ms"]) for a in agents for how in a.asked]
    assert told == [(3, True, 40), (3, False, 40), (3, True, 40)]


@pytest.mark.parametrize("gather", [True, False])
async def test_ranks_without_a_group_all_ask_and_nobody_gathers_where_that_is_off(
    gather: bool,
) -> None:
    agents = await _played(ReplayOptions(reader_groups=False, gather=gather))
    assert all(agent.groups == [] for agent in agents)
    for agent in agents:
        (how,) = agent.asked
        assert (how["group"], how["expect"]) == (0, False)
        assert how["gather_ms"] == (40 if gather else 0)
