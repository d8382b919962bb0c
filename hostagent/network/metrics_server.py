"""The agent's metrics over HTTP: GET /metrics, for Prometheus.

Owns: how the agent's numbers become metrics, and what is said of each: the text below the field
that counts it, or its name as words. Must not know: who counts them, or how a client is bounded
(`kvcast.service.http`). Imported only where metrics are asked for: aiohttp and
prometheus_client would be most of an agent's start-up time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from aiohttp import web
from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.courier import CourierCounters
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.pushing import PushCounters
from kvcast.hostagent.core.ssd import SsdCounters
from kvcast.protocol.links.cards import CardCounters
from kvcast.protocol.requester import MissReason
from kvcast.service.attribute_texts import texts_of, words_of
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
    texts_of_agent(core)  # the first time takes some 0.06 s, which no scrape need wait for

    async def metrics(_request: web.BaseRequest) -> web.Response:
        return metrics_answer([*metrics_of(core), *_metrics_of_files(credentials)])

    routes = {"/metrics": {"GET": metrics}}
    return HttpServer(routes, credentials, rate_per_s=SCRAPES_PER_S, log=log)


_PRESENT: Final = {
    "arena_bytes": "Size of the arena, in bytes",
    "arena_used_bytes": "Bytes of the arena that blocks take",
    "arena_held_bytes": "Bytes of the arena that somebody holds: they cannot be evicted",
    "arena_ready_bytes": "Bytes of the arena kept ready for blocks to come",
    "blocks": "Blocks in the arena",
    "fetches_waiting": "Blocks on their way here",
    "segments_in_flight": "Segments asked for, or arriving, and not complete",
    "answers_waiting": "Answers to READs that wait to be sent",
    "replications_waiting": "Copies that wait to be sent to further replicas",
    "handover_left": "Blocks that other nodes are still to be sent, or that may be among them",
    "replicas_here": "Blocks that are here as hot replicas",
    "epoch": "Epoch of the bucket map in force; 0: there is none yet",
    "connected": "1 while the controller's connection stands",
    "misses_total": "Gets that ended without a block",
    "payload_bytes_sent_udp_total": "Bytes of blocks, headers not counted, sent in answer to READs",
    "retries_total": "READs sent again, for whole segments or for the chunks that were missing",
    "wrong_digest_total": "Blocks that came with bytes which had not their digest; nobody got them",
    "prefixes_load_tokens_per_s": "Mean pace at which engines here load, in tokens a second",
    "prefixes_compute_tokens_per_s": "Mean pace at which engines here compute, in tokens a second",
}
"""What is said of numbers that are no field of a class."""
_PRESENT_COLD: Final = {
    "cold_blocks_known": "Objects that this node knows to be in the object store",
    "cold_bytes": "Bytes of objects of the buckets whose first home this node is: over all nodes, "
    "what the store holds",
}
"""Likewise, where there is an object store."""


def texts_of_agent(core: AgentCore) -> dict[str, str]:
    """What is said of the agent's numbers, by name, where anything is."""
    texts = _PRESENT | texts_of(Metrics)
    if core.cold is not None:
        texts |= _PRESENT_COLD
    texts["fetch_seconds"] = texts.pop("fetch_time", "")
    reasons = texts_of(MissReason)
    for reason in MissReason:
        why = reasons.get(reason.name, "")
        texts[f"misses_{reason.value}_total"] = (
            f"Gets that ended without a block: {reason.value.replace('_', ' ')}. {why}".strip()
        )
    for prefix, kind in (
        *((prefix, type(counters)) for prefix, counters in core.counted()),
        *((tier.name, SsdCounters) for tier in core.tiers),
        ("courier", CourierCounters),
        ("courier_put", PushCounters),
    ):
        texts |= {f"{prefix}_{name}_total": text for name, text in texts_of(kind).items()}
    texts["courier_put_total"] = texts.pop("courier_put_put_total", "")
    return texts


def metrics_of(core: AgentCore) -> Iterator[Metric]:
    """The agent's numbers as metrics."""
    texts = texts_of_agent(core)
    for name, value in core.values().items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        text = texts.get(name) or words_of(name.removesuffix("_total"))
        yield kind(f"kvcast_agent_{name}", text, value=value)
    for name, histogram in core.metrics.histograms().items():
        text = texts.get(name) or words_of(name)
        yield HistogramMetricFamily(
            f"kvcast_agent_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum
        )
    yield from _metrics_by_card(core)
    yield from _metrics_by_namespace(core)


def _metrics_of_files(credentials: Credentials | None) -> Iterator[Metric]:
    if credentials is not None:
        yield CounterMetricFamily(
            "kvcast_agent_tls_reloads_total",
            "Changed certificates that were taken into use",
            value=credentials.reloads,
        )
        yield CounterMetricFamily(
            "kvcast_agent_tls_failed_reloads_total",
            "Changed certificates that could not be used: the old ones stay in force",
            value=credentials.failed_reloads,
        )


def _metrics_by_card(core: AgentCore) -> Iterator[Metric]:
    """What there is to say of each RDMA card."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    said = texts_of(CardCounters)
    for card, numbers in core.cards().items():
        for name, value in numbers.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = families.get(name)
            if family is None:
                counted = name.removesuffix("_total")
                text = said.get(counted) or words_of(counted)
                full = f"kvcast_agent_rdma_card_{name}"
                family = families[name] = kind(full, text, labels=["card"])
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
        "kvcast_namespace_cold_quota_bytes",
        "the bytes of that part, where there is one",
        labels=_LABELS,
    )
    quota = GaugeMetricFamily(
        "kvcast_namespace_quota_bytes", "bytes of arena allowed, 0 = no limit", labels=_LABELS
    )
    seconds = HistogramMetricFamily(
        "kvcast_namespace_get_seconds", "seconds from a get to its block", labels=_LABELS
    )
    put_seconds = HistogramMetricFamily(
        "kvcast_namespace_put_seconds",
        "seconds from a whole block to the acknowledgement of its put",
        labels=_LABELS,
    )
    by_tier = GaugeMetricFamily(
        "kvcast_namespace_tier_bytes",
        "bytes taken of each tier that has quotas",
        labels=(*_LABELS, "tier"),
    )
    most_by_tier = GaugeMetricFamily(
        "kvcast_namespace_tier_quota_bytes",
        "bytes of it allowed, 0 = no limit; cold: this node's part",
        labels=(*_LABELS, "tier"),
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
        for tier, taken_bytes, most_bytes in _by_tier(core, number):
            by_tier.add_metric([*labels, tier], taken_bytes)
            most_by_tier.add_metric([*labels, tier], most_bytes)
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
        put_seconds.add_metric(labels, mine.put_time.buckets(), mine.put_time.sum)
    yield from (gets, hits, misses, home_misses, puts, got_bytes, put_bytes, limited)
    yield from (held, on_disk, further, in_store, in_store_most, quota, by_tier, most_by_tier)
    yield from (seconds, put_seconds)


def _by_tier(core: AgentCore, namespace: int) -> Iterator[tuple[str, int, int]]:
    """Each tier of which the namespace can have a quota, and has one if it is the object store: its
    name, bytes taken, and bytes allowed (0 = no limit)."""
    yield "dram", core.store.namespace_bytes(namespace), core.store.quota_of(namespace)
    for tier in core.tiers:
        shelf = tier.shelf
        yield tier.name, shelf.namespace_bytes(namespace), shelf.quota_of(namespace)
    share = core.cold.shares.get(namespace) if core.cold is not None else None
    if share is not None:
        yield "cold", share.taken_bytes, share.most_bytes
