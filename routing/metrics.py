"""The router's numbers for Prometheus.

Owns: their names. Must not know: who counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvcast.routing.core.router import Router
from kvcast.routing.engines import Engines
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def metrics_text(router: Router, engines: Engines, numbers: Mapping[str, int]) -> tuple[bytes, str]:
    """The answer to a scrape, and its content type."""

    class Families(Collector):
        def collect(self) -> Iterable[Metric]:
            return _families(router, engines, numbers)

    return generate_latest(Families()), CONTENT_TYPE_LATEST


def _families(router: Router, engines: Engines, numbers: Mapping[str, int]) -> Iterable[Metric]:
    for name, value in numbers.items():
        yield CounterMetricFamily(f"kvcast_route_{name}", name, value=value)
    index = router.index
    yield GaugeMetricFamily("kvcast_route_index_blocks", "blocks in the index", value=len(index))
    yield CounterMetricFamily(
        "kvcast_route_index_forgotten_total", "held blocks forgotten", value=index.forgotten_total
    )
    described = engines.describe()
    for name in ("up", "queued", "decoding", "pace", "blocks_known"):
        family = GaugeMetricFamily(f"kvcast_route_engine_{name}", name, labels=["engine"])
        for each in described:
            family.add_metric([each["name"]], float(each[name]))
        yield family
    events = CounterMetricFamily(
        "kvcast_route_events_total", "KV events, and what became of them", labels=["engine", "what"]
    )
    for each in described:
        for what, value in each["events"].items():
            events.add_metric([each["name"], what.removesuffix("_total")], value)
    yield events
