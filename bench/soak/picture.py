"""The picture of a soak: what its processes took, how the load fared, and what struck when.

Owns: how a soak's report (plain data) is drawn. Must not know: how it was measured.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcast.bench.plotting import drawn
from kvcast.bench.soak import plan

_SWITCH, _CONTROLLER, _BENCH = "#d97706", "#7c3aed", "#94a3b8"
_SPARED, _MORTAL = "#0f7b6c", "#7cc4b8"
_HITS, _RATE = "#0f7b6c", "#2563eb"
_DOTS_A_ROW = 400
"""More faults of one kind than this are drawn thinned: the marks would cover each other."""


def draw(report: dict[str, Any], folder: Path) -> Path:
    """Draw the report as soak.png in that folder; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "soak.png"
    path.write_bytes(_figure(report))
    return path


def _figure(report: dict[str, Any]) -> bytes:
    def fill(figure: Any) -> None:
        rows = figure.subplots(6, 1, sharex=True, height_ratios=[1.5, 1, 0.8, 1, 0.8, 2.1])
        memory, descriptors, threads, rate, speed, faults = rows
        _draw_lives(memory, report, "memory_mib", "Own memory, MiB")
        _draw_lives(descriptors, report, "descriptors", "Open descriptors")
        _draw_lives(threads, report, "threads", "Threads")
        _legend(memory)
        _draw_rate(rate, report)
        _draw_speed(speed, report)
        _draw_faults(faults, report)
        faults.set_xlabel("minutes")
        faults.set_xlim(0, report["seconds"] / 60)
        figure.suptitle(_headline(report), x=0.01, ha="left", fontsize=12)

    return _few_colours(drawn(fill, (11.5, 11), dpi=100, font_size=9, title_size=10))


def _few_colours(picture: bytes) -> bytes:
    """The same picture in a palette: a third of the bytes."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(64).save(out, "png", optimize=True)
    return out.getvalue()


def _minutes(seconds: Sequence[float]) -> list[float]:
    return [second / 60 for second in seconds]


def _colour(part: str, report: dict[str, Any]) -> str:
    named = {"switch": _SWITCH, "controller": _CONTROLLER, "bench": _BENCH}
    if part in named:
        return named[part]
    node = int(part.rpartition("-")[2]) - 1
    return _SPARED if node < plan.spared(report["parameters"]["nodes"]) else _MORTAL


def _draw_lives(axes: Any, report: dict[str, Any], what: str, title: str) -> None:
    """A line for each life of each part; a part's lives have its colour."""
    for life in report["lives"]:
        axes.plot(
            _minutes(life["at_s"]),
            life[what],
            color=_colour(life["part"], report),
            linewidth=0.9,
        )
    axes.set_title(title)
    axes.set_ylim(bottom=0)


def _legend(axes: Any) -> None:
    for label, colour in (
        ("switch", _SWITCH),
        ("controller", _CONTROLLER),
        ("agents never killed", _SPARED),
        ("agents killed now and then", _MORTAL),
        ("the bench itself", _BENCH),
    ):
        axes.plot([], [], color=colour, label=label, linewidth=2)
    axes.legend(frameon=False, loc="lower right", ncols=5, bbox_to_anchor=(1, 1), fontsize=8.5)


def _middles(report: dict[str, Any]) -> list[float]:
    return [(w["began_s"] + w["ended_s"]) / 120 for w in report["windows"]]


def _draw_rate(axes: Any, report: dict[str, Any]) -> None:
    rates = [
        float("nan") if w["hit_rate"] is None else 100 * w["hit_rate"] for w in report["windows"]
    ]
    axes.plot(_middles(report), rates, color=_HITS, linewidth=1.4)
    axes.set_ylim(0, 100)
    axes.set_title("Hit rate by window, % (eviction and failed requests keep it below 100)")


def _draw_speed(axes: Any, report: dict[str, Any]) -> None:
    speeds = [w["blocks_per_s"] for w in report["windows"]]
    axes.plot(_middles(report), speeds, color=_RATE, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_title("Blocks delivered and put, a second")


def _draw_faults(axes: Any, report: dict[str, Any]) -> None:
    """A row for each planned kind; what takes a part away is drawn as long as it lasted."""
    kinds = list(plan.PLANNED)
    for row, kind in enumerate(kinds):
        struck = [s for s in report["strikes"] if s["kind"] == kind]
        struck = struck[:: max(1, len(struck) // _DOTS_A_ROW)]
        colour = "#c2410c" if kind in plan.DISRUPTIVE else "#64748b"
        for strike in struck:
            axes.plot(
                [strike["began_s"] / 60, strike["ended_s"] / 60],
                [row, row],
                color=colour,
                linewidth=3.5,
                solid_capstyle="butt",
            )
        axes.plot(
            _minutes([s["began_s"] for s in struck]),
            [row] * len(struck),
            linestyle="none",
            marker="|",
            color=colour,
            markersize=5,
        )
    axes.set_yticks(
        range(len(kinds)),
        [f"{kind} ({report['faults'][kind]:,})" for kind in kinds],
        fontsize=8,
    )
    axes.invert_yaxis()
    lost = report["faults"][plan.LOST_FRAMES]
    axes.set_title(f"Faults; and all the time, {lost:,} frames lost")


def _headline(report: dict[str, Any]) -> str:
    return (
        f"kvcast: {report['seconds'] / 60:.0f} minutes under faults, "
        f"{report['parameters']['nodes']} nodes. {report['blocks_delivered']:,} blocks delivered, "
        f"{report['wrong_bytes']} wrong bytes: {'passed' if report['passed'] else 'FAILED'}"
    )
