"""Metrics: the controller's state in Prometheus' text form.

Owns: the names and labels. Must not know: how anything is counted; it reads one status, as the
HTTP API shows it, at each scrape. What the agents count is not here: each serves its own numbers
(`kvcast agent --metrics-addr`), and Prometheus adds them up, which it can because they are counters
and histograms of single processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


def metrics_of(status: dict[str, Any]) -> Iterable[Metric]:
    """The metrics of a status, as /v1/status has it."""
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
    yield _counter("link_events", "What happened on control links", "event", driver["link_counts"])
    yield _counter(
        "controller_events", "What happened in the controller", "event", driver["counts"]
    )
    yield _counter("http_events", "What happened at the HTTP API", "event", driver["http_counts"])


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
