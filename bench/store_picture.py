"""The picture of a store comparison: times with one client, and what several move together.

Owns: how the report (plain data) of `kvcast.bench.store` is drawn. Must not know: how it was
measured. matplotlib is imported when something is drawn, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcast.service.values import format_size

_COLOURS = {"kvcast": "#0f7b6c", "redis": "#c2410c", "mooncake": "#7c3aed", "nixl": "#2563eb"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the report as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#94a3b8",
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
        }
    ):
        figure = Figure(figsize=(13, 7.6), dpi=130, layout="constrained")
        panels = figure.subplots(2, 2).flat
        alone = [one for one in report["figures"] if one["clients"] == 1]
        several = [one for one in report["figures"] if one["clients"] > 1]
        times: dict[str, list[Any]] = {"get": [], "put": [], "other": []}
        for one in alone:
            kind = one["operation"].partition(" ")[0]
            times[kind if kind in times else "other"].append(one)
        _bars(next(panels), "get from the other side, one client", times["get"], _micros)
        _bars(next(panels), "put to the other side, one client", times["put"], _micros)
        _bars(next(panels), "local gets, batches, 1,000 keys", times["other"], _micros)
        remote = [one for one in several if not one["operation"].startswith("local")]
        clients = max((one["clients"] for one in several), default=0)
        _bars(next(panels), f"{clients} clients together", remote, _gigabytes)
        machine = report["provenance"]["machine"]
        figure.suptitle(
            f"over {report['link']}, {machine['cores']} cores, commit "
            f"{report['provenance']['commit']}: medians",
            x=0.01,
            ha="left",
        )
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper right", ncols=len(labels) or 1, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", metadata={"Software": "kvcast"})


def _micros(one: dict[str, Any]) -> float | None:
    return one["p50_us"]  # type: ignore[no-any-return]


def _gigabytes(one: dict[str, Any]) -> float | None:
    return one["bytes_per_s"] / 1e9 if one["bytes_per_s"] else None


def _bars(axes: Any, title: str, figures: list[dict[str, Any]], value: Any) -> None:
    """Groups of bars, a group for each thing asked and a bar for each store."""
    groups = list(dict.fromkeys(_group(one) for one in figures))
    stores = [name for name in _COLOURS if any(one["store"] == name for one in figures)]
    width = 0.8 / max(1, len(stores))
    for number, store in enumerate(stores):
        mine = {_group(one): value(one) for one in figures if one["store"] == store}
        places = [place for place, group in enumerate(groups) if mine.get(group) is not None]
        heights = [mine[groups[place]] for place in places]
        left = [place + (number - (len(stores) - 1) / 2) * width for place in places]
        bars = axes.bar(left, heights, width, color=_COLOURS[store], label=store)
        axes.bar_label(bars, [_label(height) for height in heights], fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    if value is _micros:
        axes.set_yscale("log")
        axes.set_ylabel("us (log scale)")
    else:
        axes.set_ylabel("GB/s")
    axes.margins(y=0.12)
    axes.set_title(title)


def _label(height: float) -> str:
    return f"{height:,.0f}" if height >= 100 else f"{height:.3g}"


def _group(one: dict[str, Any]) -> str:
    operation: str = one["operation"]
    if "exists" in operation:
        return operation
    count = f"{one['keys']} x " if one["keys"] > 1 else ""
    return f"{operation}\n{count}{format_size(one['size_bytes'])}"
