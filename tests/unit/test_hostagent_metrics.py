"""The agent's numbers as Prometheus reads them, and quantiles of one agent's and of many's fetches.

Oracle: prometheus_client's own parser, and the sorted observations themselves. Cannot see: a
Prometheus server.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.cold import ColdCounters
from kvcast.hostagent.core.metrics import FETCH_BOUNDS_S, Histogram, added, quantile
from kvcast.hostagent.core.recovery import RecoveryCounters
from kvcast.hostagent.core.shared_index import SharedCounters
from kvcast.hostagent.core.ssd import SsdCounters
from kvcast.hostagent.core.store import Store
from kvcast.hostagent.network.metrics_server import (
    SCRAPES_PER_S,
    metrics_of,
    metrics_server,
    texts_of_agent,
)
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.service.attribute_texts import texts_of
from kvcast.service.http import metrics_answer
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

SLAB_BYTES = 64 * 1024


def core_of(fetches_s: Sequence[float]) -> AgentCore:
    """An agent that has fetched blocks in these times."""
    memory = memoryview(bytearray(8 * SLAB_BYTES))
    store = Store(Allocator(len(memory), SLAB_BYTES))
    core = AgentCore(AgentOptions("node-1"), store, memory, random.Random(1))
    for seconds in fetches_s:
        core.metrics.fetch_time.add(seconds)
    return core


def times_s(seed: int, count: int) -> list[float]:
    """Fetch times between 10 us and 30 s, all decades alike."""
    rng = random.Random(seed)
    return [10 ** rng.uniform(-5, 1.5) for _ in range(count)]


@asynccontextmanager
async def served(core: AgentCore) -> AsyncIterator[str]:
    server = metrics_server(core, None)
    host, port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://{host}:{port}"
    finally:
        await server.stop()


async def scraped(core: AgentCore) -> dict[str, tuple[str, list[Sample]]]:
    """(type, samples) of each metric, by name."""
    async with (
        served(core) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/metrics") as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/plain"
        families = text_string_to_metric_families(await answer.text())
        return {family.name: (family.type, family.samples) for family in families}


def buckets_of(samples: list[Sample]) -> dict[float, float]:
    return {float(s.labels["le"]): s.value for s in samples if s.name.endswith("_bucket")}


async def test_fetch_times_are_a_histogram_whose_buckets_sum_and_count_agree() -> None:
    observed = times_s(1, 500)
    kind, samples = (await scraped(core_of(observed)))["kvcast_agent_fetch_seconds"]
    assert kind == "histogram"
    buckets = buckets_of(samples)
    assert list(buckets) == sorted(buckets)
    assert list(buckets) == pytest.approx([*FETCH_BOUNDS_S, math.inf])
    assert (min(buckets), sorted(buckets)[-2]) == (50e-6, 10.0)
    for bound, count in buckets.items():
        assert count == sum(seconds <= bound for seconds in observed)
    values = {s.name.removeprefix("kvcast_agent_fetch_seconds"): s.value for s in samples}
    assert values["_count"] == buckets[math.inf] == 500
    assert values["_sum"] == pytest.approx(sum(observed))


async def test_every_number_is_exported_once_and_none_is_a_quantile() -> None:
    core = core_of([0.1])
    families = await scraped(core)
    exported = {sample.name for _, samples in families.values() for sample in samples}
    named = {f"kvcast_agent_{re.sub('{.*', '', name)}" for name in core.counters()}
    assert exported == named
    assert families["kvcast_agent_gets"][0] == "counter"
    assert families["kvcast_agent_arena_used_bytes"][0] == "gauge"
    assert not [name for name in exported if re.search("_p[0-9]+$|_max$|quantile|_ms(_|$)", name)]


async def test_two_agents_histograms_add_up_to_the_pools() -> None:
    mine, others = times_s(1, 300), times_s(2, 700)
    parts = [
        buckets_of((await scraped(core_of(observed)))["kvcast_agent_fetch_seconds"][1])
        for observed in (mine, others)
    ]
    _, whole = (await scraped(core_of(mine + others)))["kvcast_agent_fetch_seconds"]
    assert {le: parts[0][le] + parts[1][le] for le in parts[0]} == buckets_of(whole)
    # And so do the reports that the controller shows.
    together = added([core_of(mine).counters(), core_of(others).counters()])
    expected = core_of(mine + others).counters()
    assert {name: together[name] for name in together} == pytest.approx(
        {name: expected[name] for name in together}
    )
    assert "arena_bytes" not in together
    assert "epoch" not in together
    for q in (0.1, 0.5, 0.9, 0.99):
        assert quantile(together, "fetch_seconds", q) == quantile(expected, "fetch_seconds", q)


@pytest.mark.parametrize("q", [0.01, 0.25, 0.5, 0.75, 0.9])
def test_a_quantile_lies_in_the_bucket_of_the_real_one(q: float) -> None:
    observed = sorted(times_s(3, 999))
    exact = observed[math.ceil(q * len(observed)) - 1]
    bounds = [0.0, *FETCH_BOUNDS_S]
    below = max(bound for bound in bounds if bound < exact)
    above = min(bound for bound in bounds if bound >= exact)
    told = quantile(core_of(observed).counters(), "fetch_seconds", q)
    assert told is not None
    assert below <= told <= above


def test_a_quantile_of_nothing_is_none_and_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile({}, "fetch_seconds", 0.5) is None
    histogram = Histogram((1.0, 2.0))
    assert quantile(histogram.samples("x"), "x", 0.5) is None
    histogram.add(7.0)
    assert quantile(histogram.samples("x"), "x", 0.99) == 2.0
    for _ in range(9):
        histogram.add(2.0)  # a bound belongs to its own bucket
    assert histogram.buckets() == [("1.0", 0.0), ("2.0", 9.0), ("+Inf", 10.0)]
    assert quantile(histogram.samples("x"), "x", 0.45) == 1.5


async def test_the_agents_server_has_the_bounds_of_all_our_servers() -> None:
    async with served(core_of([])) as url, aiohttp.ClientSession() as session:
        for method, path, status in (("GET", "/", 404), ("POST", "/metrics", 405)):
            async with session.request(method, url + path) as answer:
                assert answer.status == status
                assert "error" in await answer.json()
        statuses = []
        for _ in range(int(3 * SCRAPES_PER_S)):
            async with session.head(f"{url}/metrics") as answer:
                statuses.append(answer.status)
        assert statuses[:10] == [200] * 10
        assert 429 in statuses


# --- what Prometheus is told of each --------------------------------------------------------------


def described() -> dict[str, str]:
    """By name, what an agent with a card says of its metrics, as Prometheus reads it."""
    core = core_of([])
    core.cards = lambda: {"rocep1": {"pairs_made_total": 1.0, "failures_total": 2.0}}
    text = metrics_answer(metrics_of(core)).body
    assert isinstance(text, bytes)
    lines = text.decode().splitlines()
    helps = [line for line in lines if line.startswith("# HELP ")]
    families = list(text_string_to_metric_families(text.decode()))
    assert len(helps) == len(families)
    return {family.name: family.documentation for family in families}


def test_each_metric_says_what_its_field_says() -> None:
    helps = described()
    for name, text in {
        "gets_joined": "Gets that waited for a fetch that another get had begun.",
        "requester_gaps": "Segments whose LAST chunk came while others were missing.",
        "landing_stray": "WRITEs of no segment that is known.",
        "misses_diverged": "Gets that ended without a block: diverged. The homes' copies differed, "
        "or changed, more often than a fetch may start anew.",
        "misses_deadline": "Gets that ended without a block: deadline.",
        "fetch_seconds": "Seconds from a fetch's beginning to its block; what ended without one is "
        "not in it.",
        "arena_bytes": "Size of the arena, in bytes",
        "rdma_card_failures": "Connections that did not do what they were made for, or broke while "
        "they did.",
    }.items():
        assert helps[f"kvcast_agent_{name}"] == text


def test_metrics_whose_fields_say_nothing_have_their_names_as_words() -> None:
    helps = described()
    assert helps["kvcast_agent_requester_reads_retry"] == "Requester reads retry"
    assert helps["kvcast_agent_rdma_card_pairs_made"] == "Pairs made"


def test_what_is_said_of_a_metric_can_be_read_by_itself() -> None:
    """A field's text that leans on the one before it makes no sense as HELP."""
    parts = (SsdCounters, ColdCounters, SharedCounters, RecoveryCounters)
    of_parts = {f"{part.__name__} {k}": v for part in parts for k, v in texts_of(part).items()}
    assert len(of_parts) > 20
    for name, text in (described() | of_parts).items():
        assert text, name
        assert text != name.removeprefix("kvcast_agent_")
        assert text == " ".join(text.split()), name
        assert not text[0].islower() or name.startswith("kvcast_namespace_"), f"{name}: {text}"
        assert not re.match(r"(Of (them|these)|Those|Such|Whose|For|By|From)\b", text), text
        assert not text.endswith((";", ",")), text


def test_no_text_is_of_a_metric_that_there_is_not() -> None:
    core = core_of([])
    known = core.values().keys() | core.metrics.histograms().keys()
    assert core.reads.courier is None
    said = {name for name in texts_of_agent(core) if not name.startswith("courier_")}
    # Two dictionaries, which are told by their keys.
    assert said - known == {"misses", "requester_missed_total"}
