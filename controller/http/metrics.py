"""Metrics: the controller's state in Prometheus' text form.

Owns: the names and labels. Must not know: how anything is counted; it reads one status, as the
HTTP API shows it, at each scrape. Its registry is its own, so that nothing of the process's
default registry appears and tests do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Status = dict[str, Any]


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        switch, driver = status["switch"], status["controller"]
        nodes = status["nodes"]
        yield _gauge("epoch", "Epoch of the bucket map", status["epoch"])
        yield _gauge("nodes_known", "Nodes that the controller knows", len(nodes))
        yield _gauge("nodes_alive", "Nodes whose lease runs", sum(n["alive"] for n in nodes))
        yield _gauge("nodes_placed", "Nodes that hold buckets", sum(n["placed"] for n in nodes))
        yield _labelled_gauge(
            "node_buckets",
            "Buckets that the node is home of",
            "node",
            {n["node_id"]: n["buckets"] for n in nodes},
        )
        yield _gauge("residents", "Blocks in the switch", len(status["residents"]))
        yield _gauge(
            "slots_free", "Segment slots of the switch in use by nobody", status["slots"]["free"]
        )
        yield _gauge("candidates", "Blocks whose heat is remembered", status["candidates"])
        yield _gauge("port_sets", "Recurring port sets with a group", status["port_sets"])
        yield _gauge("switch_connected", "1 while the switch is connected", switch["connected"])
        yield _gauge("switch_primary", "1 while this controller may write", switch["primary"])
        yield _gauge(
            "switch_programmed", "1 while the switch holds what it should", switch["programmed"]
        )
        yield _gauge("agent_connections", "Control links open", driver["agent_connections"])
        yield _gauge("tick_seconds", "Duration of the last tick", driver["tick_s"])
        yield _counter(
            "switch_decisions",
            "Packets by the switch program's decision",
            "decision",
            status["decisions"],
        )
        yield _counter(
            "switch_fills",
            "Chunks offered to the switch's memory, by outcome",
            "outcome",
            status["fills"],
        )
        yield _counter("switch_operations", "P4Runtime operations", "operation", switch["counts"])
        yield _counter("pool_events", "What happened in the pool", "event", status["counts"])
        yield _counter(
            "link_events", "What happened on control links", "event", driver["link_counts"]
        )
        yield _counter(
            "controller_events", "What happened in the controller", "event", driver["counts"]
        )
        yield _counter(
            "http_events", "What happened at the HTTP API", "event", driver["http_counts"]
        )
        totals: dict[str, float] = {}
        for counters in status["agents"].values():
            for name, value in counters.items():
                totals[name] = totals.get(name, 0.0) + value
        yield _labelled_gauge("agent_total", "Agents' counters, summed over the live agents",
                              "name", totals)  # fmt: skip


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvcast_controller_{name}", text, value=float(value))


def _labelled_gauge(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    family = GaugeMetricFamily(f"kvcast_controller_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], float(value))
    return family


def _counter(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    family = CounterMetricFamily(f"kvcast_controller_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], float(value))
    return family


class Metrics:
    """Renders a status, as `status()` returns it, for a scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_StatusCollector(status))

    def render(self) -> bytes:
        return generate_latest(self._registry)
