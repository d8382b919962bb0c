"""The picture of a demo: a PNG and a self-contained HTML page.

Owns: how two replays of one workload are drawn. Must not know: how they were measured; it reads
the demo's report (plain data) alone.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from kvcast.bench.plotting import drawn

_PLAIN, _KVCAST, _IDEAL = "#8a94a6", "#0f7b6c", "#d97706"
_TIERS = {
    "local": ("own memory", "#cbd5e1"),
    "switch": ("switch memory", "#0f7b6c"),
    "shared": ("one answer, several readers", "#34b39f"),
    "home": ("home, one reader", "#8a94a6"),
    "bulk": ("home, by TCP", "#5b6472"),
    "miss": ("miss", "#c2410c"),
}


def draw(report: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Draw the report as demo.png and demo.html in that folder; both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    png = _figure(report)
    png_path, html_path = folder / "demo.png", folder / "demo.html"
    png_path.write_bytes(png)
    html_path.write_text(_page(report, png), encoding="utf-8")
    return png_path, html_path


def _figure(report: dict[str, Any]) -> bytes:
    def fill(figure: Any) -> None:
        fetches, over_time, tiers = figure.subplots(1, 3, width_ratios=[1, 1.35, 1.15])
        _draw_egress(over_time, report)
        _draw_fetches(fetches, report)
        _draw_tiers(tiers, report)
        figure.suptitle(_headline(report), x=0.01, ha="left", fontsize=13)

    return drawn(fill, (13, 4.9), dpi=130)


def _draw_egress(axes: Any, report: dict[str, Any]) -> None:
    """Bytes that the homes' links carried, summed up over the replay."""
    for name, colour in (("plain", _PLAIN), ("kvcast", _KVCAST)):
        run = report["runs"][name]
        samples = [(0.0, 0), *run["egress_samples"]]
        times = [t for t, _ in samples]
        mebibytes = [sent / 2**20 for _, sent in samples]
        axes.plot(times, mebibytes, color=colour, linewidth=2.2, label=_LABELS[name])
        axes.fill_between(times, mebibytes, color=colour, alpha=0.12)
        axes.annotate(
            f"{mebibytes[-1]:.1f} MiB",
            (times[-1], mebibytes[-1]),
            xytext=(-4, 5),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontweight="bold",
        )
    distinct = report["runs"]["kvcast"]["distinct_bytes_fetched"] / 2**20
    axes.axhline(distinct, color=_IDEAL, linestyle=(0, (4, 3)), linewidth=1.2)
    axes.annotate(
        "each byte once",
        (0, distinct),
        xytext=(4, 4),
        textcoords="offset points",
        color=_IDEAL,
        fontsize=9,
    )
    axes.set_title("What the homes' links carried")
    axes.set_xlabel("seconds of the replay")
    axes.set_ylabel("MiB sent to readers, in total")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.legend(frameon=False, loc="upper left")


def _draw_fetches(axes: Any, report: dict[str, Any]) -> None:
    """How long engines waited for gets that were not answered by their own node alone."""
    shares = ("p50", "p99", "max")
    for shift, (name, colour) in ((-0.2, ("plain", _PLAIN)), (0.2, ("kvcast", _KVCAST))):
        values = [report["fetch_ms"][name][share] or 0.0 for share in shares]
        bars = axes.bar(
            [place + shift for place in range(len(shares))],
            values,
            width=0.38,
            color=colour,
            label=_LABELS[name],
        )
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=2, fontsize=9)
    axes.set_xticks(range(len(shares)), shares)
    axes.set_title("Time of one get, ms")
    axes.margins(y=0.12)


def _draw_tiers(axes: Any, report: dict[str, Any]) -> None:
    """Where the blocks came from."""
    rows = ("kvcast", "plain")
    left = [0.0, 0.0]
    for tier, (label, colour) in _TIERS.items():
        shares = []
        for name in rows:
            hits = report["runs"][name]["hits"]
            shares.append(100 * hits[tier] / max(1, sum(hits.values())))
        if not any(shares):
            continue
        axes.barh(rows, shares, left=left, color=colour, label=label, height=0.55)
        for row, share in enumerate(shares):
            if share >= 7:
                axes.text(
                    left[row] + share / 2,
                    row,
                    f"{share:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if tier not in ("local",) else "#334155",
                )
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(rows)), [_LABELS[name] for name in rows])
    axes.set_title("Where the blocks came from, %")
    axes.set_xlim(0, 100)
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8.5
    )


_LABELS = {"plain": "plain switch", "kvcast": "kvcast"}


def _headline(report: dict[str, Any]) -> str:
    plain, kvcast = report["plain_home_egress_ratio"], report["home_egress_ratio"]
    rate = report["link_rate_bps"]
    links = f", links of {rate / 1e6:g} Mb/s" if rate else ""
    before, now = report["plain_fetch_p99_ms"], report["fetch_p99_ms"]
    times = ""
    if rate and before and now and "outage" not in report:
        times = f"99 of 100 gets took at most {before:.0f} ms through a plain switch, {now:.0f} ms "
        times += "through kvcast.\n"
    return (
        f"{report['workload']['name']}, {report['parameters']['nodes']} nodes{links}. {times}"
        f"A fetched byte left its home {_times(plain)} through a plain switch, "
        f"{_times(kvcast)} through kvcast"
    )


def _times(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} times"


def _page(report: dict[str, Any], png: bytes) -> str:
    """The numbers and the picture in one file that loads nothing else."""
    rows = "\n".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(plain)}</td>"
        f"<td>{html.escape(kvcast)}</td></tr>"
        for name, plain, kvcast in table_rows(report)
    )
    facts = {
        "workload": report["workload"]["description"],
        "scaled": report["workload"]["scaling"],
        "machine": ", ".join(f"{k} {v}" for k, v in report["machine"].items()),
        "commit": report["commit"],
        "time": report["time"],
    }
    listed = "\n".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(text))}</dd>"
        for name, text in facts.items()
    )
    image = base64.b64encode(png).decode()
    return _TEMPLATE.format(
        headline=html.escape(_headline(report)), image=image, rows=rows, facts=listed
    )


def table_rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The demo's table: (what, through a plain switch, through kvcast)."""
    plain, kvcast = report["runs"]["plain"], report["runs"]["kvcast"]

    def mib(value: float) -> str:
        return f"{value / 2**20:.1f} MiB"

    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f} ms"

    def share(run: dict[str, Any], tier: str) -> str:
        total = sum(run["hits"].values())
        return f"{run['hits'][tier]} ({100 * run['hits'][tier] / total:.0f} %)" if total else "0"

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.0f} %"

    def loads(name: str) -> tuple[str, str]:
        return percent(plain["load"][name]), percent(kvcast["load"][name])

    rows = [
        *(
            (f"time of a get, {name}", ms(plain["fetch_ms"][name]), ms(kvcast["fetch_ms"][name]))
            for name in ("p50", "p99", "max")
        ),
        ("bytes that left their homes", *(mib(r["home_egress_bytes"]) for r in (plain, kvcast))),
        ("distinct bytes fetched", *(mib(r["distinct_bytes_fetched"]) for r in (plain, kvcast))),
        ("home egress ratio", *(number(r["home_egress_ratio"]) for r in (plain, kvcast))),
        *(
            [
                ("busiest link from a home", *loads("uplink_busiest")),
                ("the same in its busiest second", *loads("uplink_peak")),
            ]
            if report["link_rate_bps"]
            else []
        ),
        ("processors busy", *loads("processors_busy")),
        *(
            (f"blocks from {label}", share(plain, tier), share(kvcast, tier))
            for tier, (label, _) in _TIERS.items()
            if tier != "miss"
        ),
        ("blocks read", str(plain["gets"]), str(kvcast["gets"])),
        ("misses", str(plain["misses"]), str(kvcast["misses"])),
        ("wrong bytes", str(plain["wrong_bytes"]), str(kvcast["wrong_bytes"])),
        ("requests", str(plain["requests"]), str(kvcast["requests"])),
    ]
    return [(name, left, right) for name, left, right in rows]


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvcast demo</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; color: #1e293b; background: #f8fafc;
         max-width: 70rem; margin: 2.5rem auto; padding: 0 1.25rem; }}
  h1 {{ font-size: 1.45rem; line-height: 1.3; }}
  img {{ width: 100%; height: auto; background: white; border: 1px solid #e2e8f0;
        border-radius: 10px; }}
  table {{ border-collapse: collapse; margin: 1.5rem 0; width: 100%; background: white; }}
  th, td {{ padding: .45rem .9rem; border-bottom: 1px solid #e2e8f0; text-align: right;
           font-variant-numeric: tabular-nums; }}
  th:first-child, td:first-child {{ text-align: left; }}
  th {{ color: #475569; font-weight: 600; }}
  td:last-child {{ color: #0f7b6c; font-weight: 600; }}
  dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; color: #475569;
       font-size: .9rem; }}
  dt {{ font-weight: 600; }} dd {{ margin: 0; }}
</style>
</head>
<body>
<h1>{headline}</h1>
<img alt="Home bytes over time, fetch times, tiers" src="data:image/png;base64,{image}">
<table>
<thead><tr><th></th><th>plain switch</th><th>kvcast</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<dl>
{facts}
</dl>
</body>
</html>
"""
