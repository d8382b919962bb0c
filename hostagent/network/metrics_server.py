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
