"""The agent's metrics over HTTP: GET /metrics, for Prometheus.

Owns: how the agent's numbers become metrics. Must not know: who counts them, or how a client is
bounded (`kvcast.service.http`). Imported only where metrics are asked for: aiohttp and
prometheus_client would be most of an agent's start-up time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from aiohttp import web
from kvcast.hostagent.core.agent import AgentCore
from kvcast.service.http import HttpServer, metrics_answer
from kvcast.service.tls import Credentials
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

log = logging.getLogger(__name__)

SCRAPES_PER_S: Final = 10.0
"""Of one client. A scrape takes the agent's event loop for a millisecond or two."""


def metrics_server(core: AgentCore, credentials: Credentials | None) -> HttpServer:
    """A server of this agent's numbers; with credentials over TLS, to whoever has a certificate of
    the cluster."""

    async def metrics(_request: web.BaseRequest) -> web.Response:
        return metrics_answer(metrics_of(core))

    routes = {"/metrics": {"GET": metrics}}
    return HttpServer(routes, credentials, rate_per_s=SCRAPES_PER_S, log=log)


def metrics_of(core: AgentCore) -> Iterator[Metric]:
    """The agent's numbers as metrics."""
    for name, value in core.values().items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        yield kind(f"kvcast_agent_{name}", name, value=value)
    for name, histogram in core.metrics.histograms().items():
        yield HistogramMetricFamily(
            f"kvcast_agent_{name}", name, buckets=histogram.buckets(), sum_value=histogram.sum
        )
    yield from _metrics_by_card(core)
    yield from _metrics_by_namespace(core)


def _metrics_by_card(core: AgentCore) -> Iterator[Metric]:
    """What there is to say of each RDMA card."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for card, numbers in core.cards().items():
        for name, value in numbers.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = families.get(name)
            if family is None:
                full = f"kvcast_agent_rdma_card_{name}"
                family = families[name] = kind(full, f"{name}, by RDMA card", labels=["card"])
            family.add_metric([card], value)
    yield from families.values()


_LABELS: Final = ("namespace", "tenant", "model", "version")


def _metrics_by_namespace(core: AgentCore) -> Iterator[Metric]:
    """What each namespace's blocks and requests come to, by what the namespace stands for."""

    def counter(name: str, text: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"kvcast_namespace_{name}", text, labels=(*_LABELS, *more))

    gets = counter("gets", "keys that clients asked for")
    hits = counter("hits", "gets that found their block, by tier", "tier")
    misses = counter("misses", "gets that found none, by reason", "reason")
    home_misses = counter("home_misses", "other nodes' lookups that found none here", "reason")
    puts = counter("puts", "blocks put")
    got_bytes = counter("got_bytes", "bytes of blocks got")
    put_bytes = counter("put_bytes", "bytes of blocks put")
    limited = counter("rate_limited", "keys of requests beyond the rate")
    held = GaugeMetricFamily("kvcast_namespace_held_bytes", "bytes of arena taken", labels=_LABELS)
    on_disk = GaugeMetricFamily("kvcast_namespace_ssd_bytes", "bytes of disk taken", labels=_LABELS)
    further = GaugeMetricFamily(
        "kvcast_namespace_arena_bytes", "bytes of further arenas taken", labels=_LABELS
    )
    in_store = GaugeMetricFamily(
        "kvcast_namespace_cold_bytes",
        "bytes of objects that count for this node's part of a quota of the object store",
        labels=_LABELS,
    )
    in_store_most = GaugeMetricFamily(
        "kvcast_namespace_cold_quota_bytes", "that part, where there is one", labels=_LABELS
    )
    quota = GaugeMetricFamily(
        "kvcast_namespace_quota_bytes", "bytes of arena allowed, 0 = no limit", labels=_LABELS
    )
    seconds = HistogramMetricFamily(
        "kvcast_namespace_get_seconds", "from a get to its block", labels=_LABELS
    )
    known = core.pool.namespaces if core.pool is not None else {}
    counted = core.namespace_metrics()
    for number, info in sorted(known.items()):
        labels = [str(number), info.tenant, info.model, info.version]
        held.add_metric(labels, core.store.namespace_bytes(number))
        quota.add_metric(labels, core.store.quota_of(number))
        if core.ssd is not None:
            on_disk.add_metric(labels, core.ssd.shelf.namespace_bytes(number))
        arenas = [tier.shelf for tier in core.tiers if tier is not core.ssd]
        if arenas:
            further.add_metric(labels, sum(shelf.namespace_bytes(number) for shelf in arenas))
        share = core.cold.shares.get(number) if core.cold is not None else None
        if share is not None:
            in_store.add_metric(labels, share.taken_bytes)
            in_store_most.add_metric(labels, share.most_bytes)
        mine = counted.get(number)
        if mine is None:
            continue
        for family, value in (
            (gets, mine.gets),
            (puts, mine.puts),
            (got_bytes, mine.got_bytes),
            (put_bytes, mine.put_bytes),
            (limited, mine.rate_limited),
        ):
            family.add_metric(labels, value)
        for labelled, counts in (
            (hits, mine.hits),
            (misses, mine.misses),
            (home_misses, mine.home_misses),
        ):
            for name, value in sorted(counts.items()):
                labelled.add_metric([*labels, name], value)
        seconds.add_metric(labels, mine.get_time.buckets(), mine.get_time.sum)
    yield from (gets, hits, misses, home_misses, puts, got_bytes, put_bytes, limited)
    yield from (held, on_disk, further, in_store, in_store_most, quota, seconds)
