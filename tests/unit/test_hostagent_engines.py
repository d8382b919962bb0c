"""What engines tell their agent of prefixes, and what the agent makes of it.

Oracle: sums and means worked out by hand. Cannot see: engines, or who shows it.
"""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.engines import Engines
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.protocol.messages import local

SLAB_BYTES = 64 * 1024


def paces(engines: Engines) -> tuple[float, float]:
    values = engines.values()
    return values["prefixes_load_tokens_per_s"], values["prefixes_compute_tokens_per_s"]


def test_counts_add_up_and_paces_are_the_means_of_the_engines_that_know_theirs() -> None:
    engines = Engines()
    assert set(engines.values().values()) == {0.0}
    assert engines.told("one", local.Weighed(1, 3, 2, 1, 8000.0, 0.0)) == 6
    assert engines.told("other", local.Weighed(1, 1, 0, 4, 4000.0, 500.0)) == 5
    assert engines.told("third", local.Weighed(1, 1)) == 1
    values = engines.values()
    totals = [values[f"prefixes_{what}_total"] for what in ("whole", "part", "computed")]
    assert totals == [5, 2, 5]
    assert paces(engines) == (6000.0, 500.0)
    engines.told("one", local.Weighed(2, 0, 0, 0, 6000.0, 300.0))
    assert paces(engines) == (5000.0, 400.0)


def test_the_pace_of_an_engine_that_is_gone_is_forgotten_and_what_it_did_is_not() -> None:
    engines = Engines()
    engines.told("one", local.Weighed(1, 3, 0, 0, 8000.0, 100.0))
    engines.left("one")
    engines.left("nobody")
    assert paces(engines) == (0.0, 0.0)
    assert engines.values()["prefixes_whole_total"] == 3


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_pace_that_is_no_number_changes_nothing(wrong: float) -> None:
    engines = Engines()
    engines.told("one", local.Weighed(1, 1, 0, 0, 8000.0, 100.0))
    engines.told("one", local.Weighed(2, 1, 0, 0, wrong, 100.0))
    assert paces(engines) == (8000.0, 100.0)


@pytest.mark.parametrize(
    ("counts", "pace"), [((-1, 0, 0), 1.0), ((0, 1 << 32, 0), 1.0), ((1, 0, 0), -1.0)]
)
def test_what_cannot_be_is_no_message(counts: tuple[int, int, int], pace: float) -> None:
    data = msgspec.msgpack.encode(local.Weighed(1, *counts, pace, 1.0))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=local.Weighed)


def test_a_client_tells_its_agent_whoever_it_is_and_takes_its_pace_away_with_it() -> None:
    memory = memoryview(bytearray(8 * SLAB_BYTES))
    store = Store(Allocator(len(memory), SLAB_BYTES))
    core = AgentCore(AgentOptions("node-1"), store, memory, random.Random(1))
    replies: list[local.AgentReply] = []
    session = Session(core, replies.append, frozenset({"acme"}))
    session.handle(0.0, local.Weighed(7, 2, 1, 0, 900.0, 30.0))
    assert replies == [local.Ack(7, 3)]
    assert session.in_flight == 0
    values = core.counters()
    assert (values["prefixes_whole_total"], values["prefixes_load_tokens_per_s"]) == (2.0, 900.0)
    session.close()
    assert core.values()["prefixes_load_tokens_per_s"] == 0.0
    core.close()
