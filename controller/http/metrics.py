"""Metrics: the controller's state in Prometheus' text form.

Owns: the names and labels. Must not know: how anything is counted; it reads one status, as the
HTTP API shows it, at each scrape. What the agents count is not here: each serves its own numbers
(`kvcast agent --metrics-addr`), and Prometheus adds them up, which it can because they are counters
and histograms of single processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvcast.controller.core.node_report import STATES
from kvcast.protocol.messages.wire import SEGMENT_BYTES
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

_PREFIX = "kvcast_controller"


def metrics_of(status: dict[str, Any]) -> Iterable[Metric]:
    """The metrics of a status, as /v1/status has it."""
    switch, driver = status["switch"], status["controller"]
    nodes = status["nodes"]
    gauges = (
        ("epoch", "Epoch of the bucket map", status["epoch"]),
        ("nodes_known", "Nodes that the controller knows", len(nodes)),
        ("nodes_alive", "Nodes whose lease runs", sum(n["alive"] for n in nodes)),
        ("nodes_placed", "Nodes that hold buckets", sum(n["placed"] for n in nodes)),
        ("residents", "Blocks in the switch", len(status["residents"])),
        ("slots_free", "Segment slots of the switch in use by nobody", status["slots"]["free"]),
        ("candidates", "Blocks whose heat is remembered", status["candidates"]),
        ("port_sets", "Recurring port sets with a group", status["port_sets"]),
        ("switch_connected", "1 while the switch is connected", switch["connected"]),
        ("switch_primary", "1 while this controller may write", switch["primary"]),
        ("switch_programmed", "1 while the switch holds what it should", switch["programmed"]),
        ("agent_connections", "Control links open", driver["agent_connections"]),
        ("tick_seconds", "Duration of the last tick", driver["tick_s"]),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"{_PREFIX}_{name}", text, value=float(value))
    states = GaugeMetricFamily(f"{_PREFIX}_nodes", "Nodes in a state", labels=["state"])
    yield _filled(states, {state: sum(n["state"] == state for n in nodes) for state in STATES})
    buckets = GaugeMetricFamily(
        f"{_PREFIX}_node_buckets", "Buckets that the node is home of", labels=["node"]
    )
    yield _filled(buckets, {n["node_id"]: n["buckets"] for n in nodes})
    taken = GaugeMetricFamily(
        f"{_PREFIX}_namespace_slots",
        "Segment slots of the switch that the namespace's blocks take",
        labels=["namespace"],
    )
    yield _filled(taken, status["slots"]["taken"])
    quotas = GaugeMetricFamily(
        f"{_PREFIX}_namespace_quota_slots",
        "Segment slots of the switch that the namespace's blocks may take, where it has a quota",
        labels=["namespace"],
    )
    said = {n["namespace"]: n["settings"]["quota_bytes"] for n in status["namespaces"]}
    allowed = {number: quota["switch"] for number, quota in said.items() if quota.get("switch")}
    yield _filled(quotas, {number: size // SEGMENT_BYTES for number, size in allowed.items()})
    adaptive = GaugeMetricFamily(
        f"{_PREFIX}_adaptive",
        "1 while it is on for the namespace: gathering, or residence in the switch",
        labels=["namespace", "thing"],
    )
    for row in status["adaptive"]:
        adaptive.add_metric([str(row["namespace"]), row["thing"]], float(row["on"]))
    yield adaptive
    counters = (
        ("switch_decisions", "Packets by the switch program's decision", "decision",
         status["decisions"]),
        ("switch_fills", "Chunks offered to the switch's memory, by outcome", "outcome",
         status["fills"]),
        ("switch_operations", "P4Runtime operations", "operation", switch["counts"]),
        ("pool_events", "What happened in the pool", "event", status["counts"]),
        ("link_events", "What happened on control links", "event", driver["link_counts"]),
        ("controller_events", "What happened in the controller", "event", driver["counts"]),
        ("http_events", "What happened at the HTTP API", "event", driver["http_counts"]),
        ("reloads", "Changed files that were taken into use", "file", driver["reloads"]),
        ("failed_reloads", "Changed files that could not be used: the old ones stay in force",
         "file", driver["failed_reloads"]),
    )  # fmt: skip
    for name, text, label, values in counters:
        yield _filled(CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=[label]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: dict[str, Any]) -> Metric:
    for key, value in values.items():
        family.add_metric([str(key)], float(value))
    return family
