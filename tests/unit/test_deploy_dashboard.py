"""The Grafana dashboard: made by Grafana's own builders, of metrics and labels that exist.

Oracle: a parser of PromQL, and what agent, controller, router and connector export. Cannot see:
Grafana itself, nor whether the graphs are worth looking at.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import promql_parser
import pytest
from equipped_agent import equipped_core
from kvcast.controller.http.metrics import metrics_of as controller_metrics_of
from kvcast.hostagent.connectors.counters import NAMES
from kvcast.hostagent.network.metrics_server import metrics_of as agent_metrics_of
from kvcast.protocol.messages import local
from kvcast.protocol.messages.control import NamespaceSettings
from kvcast.routing.metrics import metrics_text
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from test_hostagent_core import SLAB, key
from test_hostagent_namespaces import ask, node_with

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """deploy/dashboard.py, which is no package."""
    spec = importlib.util.spec_from_file_location("dashboard", DEPLOY / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module
    spec.loader.exec_module(module)
    return module


def panels() -> list[dict[str, Any]]:
    board = json.loads((DEPLOY / "grafana/kvcast.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    """(title of the panel, PromQL with Grafana's variables filled in, legend)."""
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m")
            yield panel["title"], query, target.get("legendFormat", "")


class Selectors:
    """The metrics that a query reads, and the labels that it names."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.labels: set[str] = set()

    def see(self, expression: Any) -> None:
        if isinstance(expression, promql_parser.VectorSelector):
            self.names.add(expression.name)
            self.labels |= {matcher.name for matcher in expression.matchers.matchers}
        if isinstance(expression, promql_parser.AggregateExpr) and expression.modifier is not None:
            self.labels |= set(expression.modifier.labels)
        for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
            inner = getattr(expression, name, None)
            if isinstance(inner, promql_parser.Expr):
                self.see(inner)
        for inner in getattr(expression, "args", ()):
            self.see(inner)


def exported_by(families: Iterable[Metric]) -> dict[str, set[str]]:
    """Sample names, and the labels of each, `instance` (Prometheus' own) among them."""
    found: dict[str, set[str]] = {}
    for family in families:
        names = {sample.name for sample in family.samples} or _empty(family)
        labels = {label for sample in family.samples for label in sample.labels}
        labels |= set(getattr(family, "_labelnames", ()))
        for name in names:
            found.setdefault(name, {"instance"}).update(labels)
    return found


def _empty(family: Metric) -> set[str]:
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {family.name + suffix for suffix in suffixes.get(family.type, ("",))}


class _Index:
    forgotten_total = 0

    def __len__(self) -> int:
        return 0


class _Engines:
    def describe(self) -> list[dict[str, Any]]:
        numbers = dict.fromkeys(("up", "queued", "decoding", "pace", "blocks_known"), 0)
        return [{"name": "one", **numbers, "events": {"applied_total": 1}}]


def exported() -> dict[str, set[str]]:
    node = node_with(NamespaceSettings(quota_bytes={"dram": 4 * SLAB}))
    node.hold(1, bytes(SLAB))
    for number in (1, 2):
        ask(node, local.Get(1, 1, [key(number)], 1.0))
    status = {
        "epoch": 1, "nodes": [], "namespaces": [], "residents": [],
        "slots": {"free": 1, "taken": {}},
        "candidates": 0, "port_sets": 0, "adaptive": [], "decisions": {}, "fills": {}, "counts": {},
        "switch": {"connected": True, "primary": True, "programmed": True, "counts": {}},
        "controller": {
            "agent_connections": 0, "tick_s": 0.0, "link_counts": {}, "counts": {},
            "http_counts": {}, "reloads": {}, "failed_reloads": {},
        },
    }  # fmt: skip
    router_text, _ = metrics_text(SimpleNamespace(index=_Index()), _Engines(), {})  # type: ignore[arg-type]
    return {
        **exported_by(agent_metrics_of(equipped_core(further_arenas=1))),
        **exported_by(agent_metrics_of(node.core)),
        **exported_by(controller_metrics_of(status)),
        **exported_by(text_string_to_metric_families(router_text.decode())),
        **{
            f"vllm:kvcast_{name}_total": {label} if label else set()
            for name, (label, _) in NAMES.items()
        },
        "vllm:kvcast_load_seconds_bucket": {"le"},
    }


def test_every_query_reads_metrics_and_labels_that_are_exported() -> None:
    known = exported()
    read: set[str] = set()
    for title, query, legend in queries():
        seen = Selectors()
        seen.see(promql_parser.parse(query))
        assert seen.names, (title, query)
        unknown = seen.names - known.keys()
        assert not unknown, f"{title}: nobody exports {unknown}"
        labels = set.union(*(known[name] for name in seen.names))
        assert seen.labels <= labels, f"{title}: no label {seen.labels - labels}"
        for name in legend.split("{{")[1:]:
            assert name.partition("}}")[0] in seen.labels, (title, legend)
        read |= seen.names
    # One of each who exports anything.
    for whose in ("kvcast_agent", "kvcast_namespace", "kvcast_controller", "kvcast_route", "vllm:"):
        assert any(name.startswith(whose) for name in read), whose


def test_there_is_a_row_of_tiers_which_shows_each_of_them() -> None:
    board = json.loads((DEPLOY / "grafana/kvcast.json").read_text())
    assert "Tiers" in [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    read = " ".join(query for _, query, _ in queries())
    for name in (
        "agent_ssd_used_bytes", "agent_arena1_used_bytes", "agent_cold_bytes",
        "agent_ssd_demotions_room_total", "agent_ssd_promotions_total",
        "agent_ssd_left_unwritten_total", "agent_handover_left", "controller_nodes",
        "agent_replicas_here", "namespace_tier_quota_bytes", "namespace_put_seconds_bucket",
    ):  # fmt: skip
        assert f"kvcast_{name}{{" in read, name


def test_counters_are_read_as_rates() -> None:
    for title, query, _ in queries():
        for part in query.split("_total")[1:]:
            assert part.lstrip("{").partition("}")[2].startswith("[1m])"), (title, query)


def test_panels_say_what_they_show_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["options"], panel["title"]
        at = panel["gridPos"]
        cells = {
            (at.get("x", 0) + x, at.get("y", 0) + y) for x in range(at["w"]) for y in range(at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_what_is_committed_is_what_the_builders_make(maker: ModuleType) -> None:
    assert maker.board().json() == (DEPLOY / "grafana/kvcast.json").read_text()
