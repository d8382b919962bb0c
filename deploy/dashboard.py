"""Makes the Grafana dashboard of a pool: deploy/grafana/kvcast.json.

    python deploy/dashboard.py            # write
    python deploy/dashboard.py --check    # say whether what is there is what this makes

Owns: which questions the dashboard answers, and by which metrics. Made with Grafana's own
grafana-foundation-sdk (it comes with the test tools). The metrics are those that the controller
(`kvcast controller --http-addr`), the agents (`--metrics-addr`), the router and vLLM with the
connector export; a test looks every name up there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableHide,
    VariableOption,
    VariableRefresh,
)
from kvcast.protocol.messages.local import TIERS

FILE = Path(__file__).resolve().parent / "grafana" / "kvcast.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
AGENT = 'instance=~"$agent"'
"""Picks the agents that the viewer chose."""
NAMED = 'instance=~"$agent",tenant=~"$tenant"'
HALF, THIRD, SIXTH = 12, 8, 4
"""Widths, of the 24 columns."""

Queries = Sequence[tuple[str, str]]
"""(PromQL, legend) each."""


def grown(metric: str, labels: str = "", by: str = "") -> str:
    """By how much counters grow a second, added up (by labels)."""
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile_of(histogram: str, q: float, labels: str = "", by: str = "") -> str:
    """A quantile of all observations of the histograms together (by labels)."""
    keys = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {grown(f'{histogram}_bucket', labels, keys)})"


HITS = " + ".join(grown(f"kvcast_agent_hits_{tier}_total", AGENT) for tier in TIERS)


class Board:
    """A dashboard in the making, filled from left to right, row by row."""

    def __init__(self) -> None:
        self.made = dashboard.Dashboard("kvcast").uid("kvcast-pool").tags(["kvcast"])
        self.made.description(
            "An in-network memory pool for KV caches: where blocks come from, what leaves the "
            "homes, what the switch decides, what each tenant gets."
        )
        self.made.refresh("10s").time("now-1h", "now").timezone("browser").readonly()
        self.made.with_variable(
            dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus")
        )
        self._choice("agent", "label_values(kvcast_agent_gets_total, instance)", "node")
        self._choice("tenant", "label_values(kvcast_namespace_gets_total, tenant)", "tenant")

    def _choice(self, name: str, query: str, label: str) -> None:
        choice = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(query)
        choice.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True)
        choice.current(VariableOption(selected=True, text="All", value="$__all"))
        self.made.with_variable(choice.hide(VariableHide.DONT_HIDE))

    def row(self, title: str) -> None:
        self.made.with_row(dashboard.Row(title))

    def number(self, title: str, query: str, unit: str, text: str) -> None:
        """One number of now."""
        panel = stat.Panel().title(title).description(text).unit(unit).datasource(SOURCE)
        panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        panel.with_target(_target(query, "", 0)).height(4).span(SIXTH)
        self.made.with_panel(panel)

    def graph(
        self, title: str, queries: Queries, unit: str, text: str, span: int = HALF, *,
        stacked: bool = False,
    ) -> None:  # fmt: skip
        """Lines over time."""
        panel = timeseries.Panel().title(title).description(text).unit(unit).datasource(SOURCE)
        panel.height(8).span(span).min(0).fill_opacity(30 if stacked else 8)
        panel.legend(common.VizLegendOptions().show_legend(True))
        panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        if stacked:
            panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
        for number, (query, legend) in enumerate(queries):
            panel.with_target(_target(query, legend, number))
        self.made.with_panel(panel)

    def json(self) -> str:
        return JSONEncoder(sort_keys=True, indent=2).encode(self.made.build()) + "\n"


def _target(query: str, legend: str, number: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query).datasource(SOURCE).ref_id(chr(ord("A") + number))
    return target.legend_format(legend) if legend else target


def board() -> Board:
    """The dashboard."""
    made = Board()
    _pool(made)
    _tenants(made)
    _switch(made)
    _nodes(made)
    _tiers(made)
    _engines(made)
    return made


def _pool(to: Board) -> None:
    misses = grown("kvcast_agent_misses_total", AGENT)
    sent = (
        f"{grown('kvcast_agent_payload_bytes_sent_udp_total', AGENT)}"
        f" + {grown('kvcast_agent_payload_bytes_sent_bulk_get_total', AGENT)}"
    )
    received = (
        f"{grown('kvcast_agent_payload_bytes_received_udp_total', AGENT)}"
        f" + {grown('kvcast_agent_payload_bytes_received_bulk_get_total', AGENT)}"
    )
    fetch = "kvcast_agent_fetch_seconds"
    to.row("The pool")
    to.number("Nodes alive", "max(kvcast_controller_nodes_alive)", "none", "Whose lease runs.")
    to.number("Blocks got", HITS, "ops", "Gets of engines that found their block, by key.")
    to.number("Hit rate", f"({HITS}) / ({HITS} + {misses})", "percentunit", "Of gets, by key.")
    to.number("Homes send", sent, "Bps", "Bytes of blocks that leave the homes for readers.")
    to.number(
        "Spared", f"1 - ({sent}) / ({received})", "percentunit",
        "Of the bytes that readers received: those that no home had to send (multicast and "
        "switch memory).",
    )  # fmt: skip
    to.number("Fetch p99", quantile_of(fetch, 0.99, AGENT), "s", "Of blocks that came from afar.")
    to.graph(
        "Blocks got, by where they came from",
        [(grown(f"kvcast_agent_hits_{tier}_total", AGENT), tier) for tier in TIERS],
        "ops",
        "local: the node's own memory; arena: further arenas; ssd: its disk; cold: an object "
        "store; switch: its SRAM; shared: one multicast for several; home: its READs; bulk: its "
        "bulk transfer.",
        stacked=True,
    )
    to.graph(
        "Misses, by reason",
        [(grown("kvcast_namespace_misses_total", NAMED, "reason"), "{{reason}}")],
        "ops",
        "cold: nobody ever had it; evicted; expired; timed_out; failed; no_room; given_up.",
        stacked=True,
    )
    to.graph(
        "Time of a fetch",
        [(quantile_of(fetch, q, AGENT), f"p{100 * q:g}") for q in (0.5, 0.9, 0.99)],
        "s",
        "From a fetch's beginning to its block.",
    )
    to.graph(
        "Bytes: what readers receive, what homes send",
        [(received, "received"), (sent, "sent by homes")],
        "Bps",
        "The gap between the lines is what the switch spared the homes' links.",
    )


def _tenants(to: Board) -> None:
    of = "kvcast_namespace"
    keys = "tenant, model, version"
    legend = "{{tenant}} {{model}} {{version}}"
    to.row("Namespaces")
    for title, query, unit, text in (
        ("Gets", grown(f"{of}_gets_total", NAMED, keys), "ops", "Keys asked for."),
        (
            "Hit rate",
            f"{grown(f'{of}_hits_total', NAMED, keys)} / {grown(f'{of}_gets_total', NAMED, keys)}",
            "percentunit",
            "Of keys asked for.",
        ),
        (
            "p99 of a get",
            quantile_of(f"{of}_get_seconds", 0.99, NAMED, keys),
            "s",
            "From a get to its block; misses are not in it.",
        ),
        (
            "p99 of a put",
            quantile_of(f"{of}_put_seconds", 0.99, NAMED, keys),
            "s",
            "From a whole block to the acknowledgement; puts that failed are not in it.",
        ),
        (
            "DRAM held",
            f"sum by ({keys}) ({of}_held_bytes{{{NAMED}}})",
            "bytes",
            "Of all arenas.",
        ),
        (
            "Quota in use",
            f"max by ({keys}, tier) ({of}_tier_bytes{{{NAMED}}}"
            f" / ({of}_tier_quota_bytes{{{NAMED}}} > 0))",
            "percentunit",
            "Of each tier, on the fullest node, where there is a quota.",
        ),
        (
            "Refused for the rate",
            grown(f"{of}_rate_limited_total", NAMED, keys),
            "ops",
            "Keys of requests beyond operations or bytes a second.",
        ),
    ):
        shown = f"{legend} {{{{tier}}}}" if "tier)" in query else legend
        to.graph(title, [(query, shown)], unit, text, THIRD)


def _switch(to: Board) -> None:
    of = "kvcast_controller"
    to.row("Switch and controller")
    to.number("Connected", f"min({of}_switch_connected)", "bool", "The controller to its switch.")
    to.number("Programmed", f"min({of}_switch_programmed)", "bool", "It holds what it should.")
    to.number("Blocks in it", f"max({of}_residents)", "none", "Resident in switch memory.")
    to.number("Slots free", f"max({of}_slots_free)", "none", "Segment slots of switch memory.")
    to.number("Epoch", f"max({of}_epoch)", "none", "Of the bucket map: grows as nodes come and go.")
    to.number("Tick", f"max({of}_tick_seconds)", "s", "Duration of the controller's last round.")
    to.graph(
        "Packets, by the switch program's decision",
        [(grown(f"{of}_switch_decisions_total", "", "decision"), "{{decision}}")],
        "pps",
        "hit: answered from switch memory; join: waits for another's answer; new: sent to the "
        "home; shared: DATA multicast; guarded, dropped: refused.",
        stacked=True,
    )
    to.graph(
        "What the controller heard and did",
        [
            (grown(f"{of}_pool_events_total", "", "event"), "{{event}}"),
            (grown(f"{of}_controller_events_total", "", "event"), "{{event}}"),
        ],
        "ops",
        "Admissions, evictions, joins, leaves; rounds that failed.",
    )
    to.graph(
        "Chunks offered to switch memory",
        [(grown(f"{of}_switch_fills_total", "", "outcome"), "{{outcome}}")],
        "pps",
        "wrong_digest: bytes that are not the block's, refused.",
    )
    to.graph(
        "At the HTTP API",
        [(grown(f"{of}_http_events_total", "", "event"), "{{event}}")],
        "ops",
        "Requests, answers by status, failed authentications.",
    )


def _nodes(to: Board) -> None:
    used = f"kvcast_agent_arena_used_bytes{{{AGENT}}} / kvcast_agent_arena_bytes{{{AGENT}}}"
    by = "instance"

    def each(*names: str) -> Queries:
        found = [(grown(f"kvcast_agent_{name}_total", AGENT, by), name) for name in names]
        return [(query, f"{{{{instance}}}} {name.replace('_', ' ')}") for query, name in found]

    to.row("Nodes")
    to.graph("DRAM in use", [(used, "{{instance}}")], "percentunit", "Of each arena.", THIRD)
    to.graph(
        "Sent to readers",
        each("payload_bytes_sent_udp", "payload_bytes_sent_bulk_get"),
        "Bps",
        "By a home: DATA frames, and bulk transfers.",
        THIRD,
    )
    to.graph("Evicted", each("store_evictions"), "ops", "Blocks that left DRAM for others.", THIRD)
    to.graph(
        "Asked again",
        each("requester_reads_again", "requester_timeouts", "requester_gaps"),
        "ops",
        "READs repeated, silences, gaps: loss on the network.",
        THIRD,
    )
    to.graph(
        "Refused frames",
        each(
            "frames_malformed", "frames_misaddressed", "frames_unknown_source", "frames_forbidden"
        ),
        "pps",
        "None of them should be there.",
        THIRD,
    )
    to.graph(
        "Wrong bytes found, and failures",
        each("requester_corrupt_blocks", "bulk_wrong_digest", "bulk_failures", "puts_failed"),
        "ops",
        "Found by digests, never delivered; bulk calls and puts that failed.",
        THIRD,
    )


def _tiers(to: Board) -> None:
    of = "kvcast_agent"
    by = "instance"
    # Of further arenas the first, by which all others get what they have.
    below = {"ssd": "disk", "arena1": "further arena"}

    def used(tier: str) -> str:
        return f"{of}_{tier}_used_bytes{{{AGENT}}} / {of}_{tier}_bytes{{{AGENT}}}"

    def moved(*names: str) -> Queries:
        return [
            (grown(f"{of}_{tier}_{name}_total", AGENT), f"{title}: {name.replace('_', ' ')}")
            for tier, title in below.items()
            for name in names
        ]

    to.row("Tiers")
    to.graph(
        "Disks and further arenas in use",
        [(used(tier), f"{{{{instance}}}} {title}") for tier, title in below.items()],
        "percentunit",
        "Of each node's disks, and of its first further arena. DRAM is among the nodes.",
        THIRD,
    )
    to.graph(
        "Held, by tier",
        [
            (f'sum by (tier) (kvcast_namespace_tier_bytes{{{NAMED},tier!="cold"}})', "{{tier}}"),
            (f"sum ({of}_cold_bytes{{{AGENT}}})", "object store"),
        ],
        "bytes",
        "Of all chosen nodes; of the object store what they are the first homes of.",
        THIRD,
        stacked=True,
    )
    to.graph(
        "Moved down",
        [
            *moved("demotions_room", "demotions_quota", "demotions_clean"),
            (grown(f"{of}_cold_stored_total", AGENT), "object store: stored"),
        ],
        "ops",
        "Blocks that went below DRAM for want of room or by a quota; clean: they lay there "
        "already. Those of the object store stay in DRAM, too.",
        THIRD,
    )
    to.graph(
        "Brought back",
        [
            *moved("promotions"),
            (grown(f"{of}_cold_fetched_total", AGENT), "object store: fetched"),
        ],
        "ops",
        "Blocks that were read, and came to DRAM for that.",
        THIRD,
    )
    to.graph(
        "Lost for want of time or room",
        [
            *moved("left_unwritten", "demotions_refused"),
            (grown(f"{of}_cold_left_out_total", AGENT), "object store: left out"),
            (grown(f"{of}_cold_left_out_quota_total", AGENT), "object store: no quota left"),
        ],
        "ops",
        "left unwritten: DRAM needed the room before the disk had the block; refused: no room "
        "there that the namespace may take.",
        THIRD,
    )
    to.graph(
        "Hand-over and drain",
        [
            (f"sum by ({by}) ({of}_handover_left{{{AGENT}}})", "{{instance}} left"),
            (
                'max by (state) (kvcast_controller_nodes{state=~"joining|draining|drained"})',
                "nodes {{state}}",
            ),
        ],
        "none",
        "Blocks that a node still hands over to others, and the nodes that it is for.",
        THIRD,
    )
    to.graph(
        "Hot replicas",
        [(f"sum by ({by}) ({of}_replicas_here{{{AGENT}}})", "{{instance}}")],
        "none",
        "Blocks that a node answers for since their own homes' links are busy.",
        HALF,
    )


def _engines(to: Board) -> None:
    of = "vllm:kvcast"
    to.row("Engines and router")
    to.graph(
        "vLLM: blocks loaded, by tier",
        [(grown(f"{of}_load_blocks_total", "", "tier"), "{{tier}}")],
        "ops",
        "Engine blocks that came from the pool, by the slowest tier of each.",
        THIRD,
        stacked=True,
    )
    to.graph(
        "vLLM: not loaded, failed",
        [
            (grown(f"{of}_miss_blocks_total", "", "reason"), "miss: {{reason}}"),
            (grown(f"{of}_failed_loads_total", "", "reason"), "failed: {{reason}}"),
        ],
        "ops",
        "What was computed instead.",
        THIRD,
    )
    to.graph(
        "vLLM: time of a load",
        [(quantile_of(f"{of}_load_seconds", q), f"p{100 * q:g}") for q in (0.5, 0.99)],
        "s",
        "From the scheduler's order to the blocks in the engine.",
        THIRD,
    )
    to.graph(
        "Router: engines up, requests queued",
        [
            ("sum(kvcast_route_engine_up)", "up"),
            ("sum by (engine) (kvcast_route_engine_queued)", "queued {{engine}}"),
        ],
        "none",
        "kvcast route's view of its engines.",
        HALF,
    )
    to.graph(
        "Router: KV events",
        [(grown("kvcast_route_events_total", "", "what"), "{{what}}")],
        "ops",
        "Events of engines, and what became of them.",
        HALF,
    )


def main(arguments: Sequence[str]) -> int:
    """Write the dashboard or, with --check, compare it."""
    made = board().json()
    if "--check" in arguments:
        same = FILE.is_file() and FILE.read_text() == made
        print(f"{FILE.name}: {'as it should be' if same else 'old: python deploy/dashboard.py'}")
        return 0 if same else 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(made)
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
