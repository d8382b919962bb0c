"""docs/evaluation.md and its pictures, from a report of `kvcast.bench.evaluate`.

Owns: which numbers are shown, and how. Must not know: how they came about; it reads the report
(plain data) alone. What the first page says is chosen by the numbers, not written beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcast.bench.plotting import drawn
from kvcast.service.values import format_size
from kvcast.simulation.flows.plan import MODEL_ERROR, worth_it

Numbers = dict[str, Any]
_PLAIN, _KVCAST, _OTHER = "#8a94a6", "#0f7b6c", "#d97706"
_COMPRESSED_TOO_FAR = 10.0
_BELIEVED = 0.01
"""Share of pieces that may not have settled in a simulation whose times are believed."""
_ALIKE, _ALIKE_P50, _ALIKE_P99 = 0.01, 0.08, 0.18
"""By how much each get, medians, and 99th percentiles of two plain pools differ (`--parts adaptive
--plain-twice`: 0.986, 0.922 and 0.819). The range of a run does not have that in it."""
_OWN_TERMS = ("recomputation", "single flight at hosts of 4", "prefix-aware routing")
"""Ways that change what is asked for, and are not compared in the picture."""
_KINDS = {
    "tp-mla": "the ranks of an MLA model, on several hosts, read every block together",
    "rollout": "many samples of one prompt start at once on different nodes",
    "fan-out": "an agent's sub-agents go on from its context on other nodes",
    "storm": "cold nodes want the hot prefixes at the same moment",
    "prompt-rollout": "all nodes want a new system prompt, each with its next user's turn",
    "model-load": "cold nodes want all of a model's weights at once",
    "prefill-decode": "a prompt is handed to a decode engine of four ranks",
    "chat": "independent conversations",
}
"""What each workload is, in a few words."""


def write(report: Numbers, folder: Path) -> None:
    """Write evaluation.md and the pictures of the parts that were run into that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = [_first_page(report)]
    pictures = {
        "calibration": (_calibration, _calibration_picture),
        "adaptive": (_adaptive, None),
        "alternatives": (_alternatives, _alternatives_picture),
        "sizes": (_sizes, _sizes_picture),
        "frontier": (_frontier, _frontier_picture),
        "memory": (_memory, _memory_picture),
        "layers": (_layers, None),
        "sensitivity": (_sensitivity, _sensitivity_picture),
        "scale": (_scale, None),
    }
    for part, (text, picture) in pictures.items():
        if not report.get(part):
            continue
        sections.append(text(report))
        if picture is not None:
            name = f"evaluation-{part}.png"
            (folder / name).write_bytes(picture(report))
            sections.append(f"![{part}]({name})")
    sections.append(_how(report))
    (folder / "evaluation.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _ways(report: Numbers) -> dict[str, dict[str, Numbers]]:
    """Workload to way to numbers."""
    found: dict[str, dict[str, Numbers]] = {}
    for row in report.get("alternatives", []):
        found.setdefault(row["workload"], {})[row["way"]] = row
    return found


def _at_their_pace(report: Numbers) -> dict[str, dict[str, Numbers]]:
    """Without traces whose time had to be compressed so far that they are other loads by now."""
    return {
        workload: ways
        for workload, ways in _ways(report).items()
        if ways["kvcast"]["time_compression"] <= _COMPRESSED_TOO_FAR
    }


def _error(report: Numbers) -> float:
    """Of a simulated time, as this run's calibration has it."""
    return report.get("calibration_error_max_virtual") or MODEL_ERROR


def beaten(report: Numbers) -> list[tuple[str, str, float]]:
    """(workload, way, times as fast as kvcast) where a way that serves the same demand has a mean
    at least 5 % below kvcast's, best first in each workload."""
    found = []
    for workload, ways in _at_their_pace(report).items():
        ours = ways["kvcast"]["mean_ms"]
        better = [
            (workload, way, ours / row["mean_ms"])
            for way, row in ways.items()
            if way not in (*_OWN_TERMS, "kvcast")
            and row["unsettled"] < _BELIEVED
            and 0 < row["mean_ms"] < 0.95 * ours
        ]
        found += sorted(better, key=lambda item: -item[2])
    return found


def pays(report: Numbers) -> tuple[list[str], list[str]]:
    """Workloads in which kvcast is clearly faster than the plain pool, and those in which not; the
    greatest gain first."""
    yes: list[tuple[float, str]] = []
    no: list[tuple[float, str]] = []
    for workload, ways in _at_their_pace(report).items():
        gain = ways["plain pool"]["mean_ms"] / max(1e-9, ways["kvcast"]["mean_ms"])
        sent = ways["kvcast"]["home_egress_ratio"] / max(
            1e-9, ways["plain pool"]["home_egress_ratio"]
        )
        kind = f": {_KINDS[workload]}" if workload in _KINDS else ""
        told = f"- `{workload}` ({gain:.2f} times; homes send {sent:.2f} of the bytes){kind}"
        (yes if gain >= worth_it(_error(report)) else no).append((gain, told))
    best_first = [[told for _, told in sorted(some, reverse=True)] for some in (yes, no)]
    return best_first[0], best_first[1]


def _first_page(report: Numbers) -> str:
    lines = [
        "# When a pool in the network pays",
        "",
        "Through kvcast, a home sends a block once to all nodes that read it at the same moment. "
        "So it pays where reads of one block meet. This page says for whom, and how much.",
        "",
        "All figures are simulated, unless they are called *measured*. "
        "`python -m kvcast.bench.evaluate --docs docs` writes this page. Before it simulates "
        "anything it compares its simulator with frames and with a real pool.",
    ]
    if report.get("alternatives"):
        if better := beaten(report):
            first: dict[str, tuple[str, float]] = {}
            for workload, way, times in better:
                first.setdefault(workload, (way, times))
            told = "; ".join(
                f"in `{workload}` {way}, {times:.2f} times as fast"
                for workload, (way, times) in first.items()
            )
            lines += [
                "",
                "**Where something else is faster than kvcast** ([the ways](#the-alternatives)): "
                f"{told}.",
            ]
        yes, no = pays(report)
        lines += [
            "",
            "**For whom it pays**, on 32 hosts of 100 Gb/s. In brackets: how many times as fast "
            "the mean get is as in a plain pool, and what homes send of a plain pool's bytes.",
            "",
            *(yes or ["- nobody"]),
            *_from_which_size(report),
            "",
            "**For whom it does not:**",
            "",
            *(no or ["- nobody"]),
            *_what_it_costs(report),
            "",
            f"*Pays* means {worth_it(_error(report)):.2f} times as fast or more. A simulated time "
            f"may be wrong by {_error(report):.0%}. Even if both times are, a gain of that size is "
            "not made of their errors alone.",
            "",
            "## What else decides",
        ]
        dense = [
            f"`{workload}` {ways['kvcast']['time_compression']:,.0f} times"
            for workload, ways in _ways(report).items()
            if ways["kvcast"]["time_compression"] > _COMPRESSED_TOO_FAR
        ]
        if dense:
            lines += [
                "",
                "**How full the links are.** Chats and traces as they are leave such links nearly "
                "idle, and their reads hardly ever meet (the table of ten thousand hosts below): "
                "nothing is gained. The traces' tables below are compressed in time "
                f"({'; '.join(dense)}). They say what such prompts would do to full links, and not "
                "what they do.",
            ]
    return "\n".join([*lines, *_what_else(report)])


def _what_it_costs(report: Numbers) -> list[str]:
    """What those pay whom it brings nothing, as measured."""
    rows = report.get("adaptive")
    if not rows:
        return []
    slower = [
        f"`{r['stream']}` ({name})"
        for r in rows
        for found, point, name, alike in (
            (r.get("alone"), "p50", "p50, alone", _ALIKE),
            (r.get("alone"), "p99", "p99, alone", _ALIKE),
            (r, "p50", "p50", _ALIKE_P50),
            (r, "p99", "p99", _ALIKE_P99),
            (r, "each", "each get", _ALIKE),
        )
        if found and found[f"{point}_over_plain_low"] > 1 + alike
    ]
    return [
        "",
        "**What it costs them**, measured, in times of a plain pool's get (in brackets: the range "
        "in which each figure is in 19 of 20 cases). *Alone*: one request after the other. Where "
        "others ask meanwhile, who waits for whom is chance, and each get beside the same get in "
        "the other pool tells a small cost sooner than percentiles do:",
        "",
        *(
            f"- `{r['stream']}` {_alone(r)}among others each get {_within(r, 'each')}, p50 "
            f"{_within(r, 'p50')}, p99 {_within(r, 'p99')}"
            for r in rows
        ),
        "",
        (
            f"So it costs {', '.join(slower)} something."
            if slower
            else "No range lies above 1 by more than two plain pools differ, so no cost can be "
            "told from chance."
        ),
    ]


def _from_which_size(report: Numbers) -> list[str]:
    lines: list[str] = []
    if frontier := report.get("frontier"):
        joint, pays_from = frontier["spread_by_group"], worth_it(_error(report))
        close = [r for r in joint if r["spread_us"] <= 10 and r["speedup"] >= pays_from]
        if close:
            size = min(r["group"] for r in close)
            widest = {
                g: max(
                    (r["spread_us"] for r in joint if r["group"] == g and r["speedup"] >= 1.5),
                    default=0.0,
                )
                for g in sorted({r["group"] for r in joint})
            }
            apart = {f"{group}": f"{us:,.0f} µs" for group, us in widest.items() if us}
            lines += [
                "",
                f"**From which size on:** from groups of {size} readers on, if they start within "
                "10 µs. The size of the cluster decides nothing. What decides is how far apart the "
                "readers of one block start, beside the time that the block takes on a link (2 MiB "
                "at 100 Gb/s: 0.17 ms). The table has the largest of the distances tried at which "
                "gets are still one and a half times as fast:",
                "",
                table(("readers of a block", *apart), [("apart, at most", *apart.values())]),
            ]
    return lines


def _what_else(report: Numbers) -> list[str]:
    lines: list[str] = []
    if sensitivity := report.get("sensitivity"):
        cases = {r["case"]: r for r in sensitivity}
        one, many = cases["as in the text"], cases["gets of 16 blocks"]
        lines += [
            "",
            "**Gets of many blocks gain less.** Eight readers of one block are "
            f"{one['speedup']:.1f} times as fast. Eight readers of sixteen blocks that lie on as "
            f"many homes are {many['speedup']:.2f} times as fast, since each reader's own link is "
            f"the limit then. What homes send falls all the same (to {many['egress']:.2f} of it).",
        ]
    if layers := report.get("layers"):
        first = max(
            (r for r in layers if r["what"].startswith("first")), key=lambda r: r["reads_answered"]
        )
        whole = next(
            r
            for r in layers
            if r["what"] == "whole blocks"
            and (r["trace"], r["slots"]) == (first["trace"], first["slots"])
        )
        lines += [
            "",
            f"**Early layers are what fits.** On `{first['trace']}` the {first['what']} of blocks "
            f"in {first['slots']} slots would begin {first['reads_answered']:.0%} of all reads "
            f"from the switch. Whole blocks in the same memory answer "
            f"{whole['reads_answered']:.1%}. (The switch keeps whole blocks today.)",
        ]
    if memory := report.get("memory"):
        lines += ["", _memory_in_short(memory)]
    return lines


def _memory_in_short(memory: Sequence[Numbers]) -> str:
    """What the controller's policy makes of switch memory, of the middle size, where the optimum
    is more than a bound."""
    memory = [r for r in memory if r["optimum_is_exact"]]
    slots = sorted({row["slots"] for row in memory})
    middle = slots[len(slots) // 2]
    rows = [r for r in memory if r["slots"] == middle and sum(r["optimum_segments"].values())]
    if not rows:
        return "**The switch's memory** answers nothing here: no block is read again."
    told = ", ".join(
        f"`{r['stream']}` {r['hit_share']['value']:.1%} of {r['hit_share']['optimum']:.1%}"
        for r in rows
    )
    parts = {
        part: sum(r["optimum_segments"][part] for r in rows) for part in rows[0]["optimum_segments"]
    }
    whole = sum(parts.values())
    return (
        f"**The switch's memory** ({middle} slots) answers a part of what an optimum that knows "
        f"the future would, in shares of all bytes read: {told}.\n\n"
        "Of all that such optima answer here:\n\n"
        f"- {parts['value'] / whole:.0%}: the controller's policy answers it, too;\n"
        f"- {parts['before the fill'] / whole:.0%}: reads that come before any controller beside "
        "the switch can have the block filled;\n"
        f"- {parts['the future'] / whole:.0%}: nobody answers it who does not know the future;\n"
        f"- {parts['another rule'] / whole:.0%}: other rules would answer it, if they were told of "
        "each read at once;\n"
        f"- {parts['the control loop'] / whole:.0%}: our rule would answer it, if it were told of "
        "each read at once."
    )


def _calibration(report: Numbers) -> str:
    rows = [*report["calibration"], *report.get("pool", [])]
    text = [
        "## How right the simulation is",
        "",
        "The simulator moves *flows*: it computes when each piece of a block passes each link, and "
        "sends no frames. The table compares it with two things that do:",
        "",
        "- *packets, virtual time*: the real requester and responder cores, P4 program and "
        "frames;",
        "- *real pool, emulated links*: agents, controller and software switch as processes, links "
        "of 5 Mb/s, one home for each block and no hot replicas (which are alternatives of their "
        "own below). Workloads that gather do so behind kvcast alone.",
        "",
        "*Egress* is the home egress ratio, *get* the mean time of a get. *Chats on idle links* "
        "are compared with the coarser flows by which the hour of ten thousand hosts is simulated.",
        "",
        "All processes of the real pool share this machine's processors with whoever plays the "
        "workload. What those take is measured and given to the flows: when each get in fact "
        "began, and by how much a get alone took longer than its links do, before and after each "
        f"workload ({_home_ms(report)}).",
        "",
        f"**Largest error:** {report.get('calibration_error_max')} (virtual time alone: "
        f"{report.get('calibration_error_max_virtual')}; real pool alone: "
        f"{report.get('calibration_error_max_pool')}, at a load of "
        f"{report.get('load', {}).get('pool')}). There are two things that the flows do not know: "
        "what processors take while many gets meet, and frames that are asked for again because an "
        "answer is late for that.",
        "",
        table(
            ("workload", "switch", "against", "egress: packets", "flows", "error",
             "get, ms: packets", "flows", "error"),
            (
                (
                    r["workload"], r["switch"], r["against"], f"{r['packet_egress']:.3f}",
                    f"{r['flow_egress']:.3f}", f"{r['egress_error']:+.1%}",
                    f"{r['packet_fetch_ms']:.4g}", f"{r['flow_fetch_ms']:.4g}",
                    f"{r['fetch_error']:+.1%}",
                )
                for r in rows
            ),
        ),
    ]  # fmt: skip
    return "\n".join(text)


def _home_ms(report: Numbers) -> str:
    """What lone gets took longer in each of the real pools."""
    took: dict[str, list[float]] = {}
    for row in report.get("pool") or ():
        took.setdefault(row["switch"], []).append(row["home_us"] / 1000)
    told = (f"{switch} {min(ms):.1f} to {max(ms):.1f} ms" for switch, ms in took.items())
    return ", ".join(told) or "not measured"


def _calibration_picture(report: Numbers) -> bytes:
    rows = [*report["calibration"], *report.get("pool", [])]

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, 2)
        for axes, what, title in (
            (panels[0], "egress_error", "Error of home egress, %"),
            (panels[1], "fetch_error", "Error of the time of a get, %"),
        ):
            names = list(dict.fromkeys(r["workload"] for r in rows))
            for against, colour, marker in (
                ("packets, virtual time", _KVCAST, "o"),
                ("real pool, emulated links", _OTHER, "s"),
            ):
                mine = [r for r in rows if r["against"] == against]
                for switch, filled in (("plain", False), ("kvcast", True)):
                    chosen = [r for r in mine if r["switch"] == switch]
                    axes.scatter(
                        [100 * r[what] for r in chosen],
                        [names.index(r["workload"]) for r in chosen],
                        color=colour,
                        facecolor=colour if filled else "none",
                        marker=marker,
                        label=f"{against}: {switch}" if chosen else None,
                    )
            axes.axvspan(-10, 10, color=_KVCAST, alpha=0.08, label="within 10 %")
            axes.axvline(0, color=_PLAIN, linewidth=0.8)
            axes.set_yticks(range(len(names)), names)
            axes.set_title(title)
        panels[0].legend(frameon=False, fontsize=8)

    return drawn(fill, (12, 4.6), dpi=110)


def _within(row: Numbers, point: str) -> str:
    """A ratio, and the range that it is in."""
    low, high = (row[f"{point}_over_plain_{end}"] for end in ("low", "high"))
    return f"{row[f'{point}_over_plain']:.3f} ({low:.3f} to {high:.3f})"


def _alone(row: Numbers) -> str:
    """Of requests that follow each other, if any of them had something to fetch."""
    found = row.get("alone")
    return f"alone p50 {_within(found, 'p50')}, p99 {_within(found, 'p99')}; " if found else ""


def _adaptive(report: Numbers) -> str:
    rows = report["adaptive"]
    text = [
        "## What it costs those whom it brings nothing",
        "",
        "Measured, not simulated. Real agents and a software switch serve each stream over links "
        "of 10 Mb/s, behind a plain switch and behind kvcast with all of it on. The controller "
        "turns gathering and residence off where they do not pay "
        "(`kvcast.controller.core.adaptive`). Times are milliseconds of a get. *Each get* is the "
        "median of what a get took behind kvcast over what the same get took behind the plain "
        "switch. Behind each ratio stands the range in which it would be in 19 of 20 cases, were "
        "other gets drawn from these. The machine's load was "
        f"{report.get('load', {}).get('adaptive')}.",
        "",
        "**One request after the other**, in both pools at once, so that nobody waits for "
        "another's bytes. By then kvcast has judged what pays for these tenants:",
        "",
        _beside_plain({r["stream"]: r["alone"] for r in rows if "alone" in r}),
        "",
        "**At a stream's own times**, so that 0.3 or less of the links is in use; both pools play "
        "one piece of a stream after the other. Two runs of one stream, even behind the same "
        "switch, differ here: who asks a moment earlier makes another wait (`--parts adaptive "
        "--plain-twice` measures that: of each get, two plain pools differed by up to "
        f"{_ALIKE:.0%}, in p50 by {_ALIKE_P50:.0%}, and in p99 by {_ALIKE_P99:.0%}).",
        "",
        _beside_plain({r["stream"]: r for r in rows}),
    ]
    return "\n".join(text)


def _beside_plain(rows: Mapping[str, Numbers]) -> str:
    return table(
        ("stream", "gets", "each get", "p50", "plain", "ratio", "p99", "plain", "ratio"),
        (
            (
                stream, r["gets"], _within(r, "each"),
                f"{r['p50_ms']:.1f}", f"{r['plain_p50_ms']:.1f}", _within(r, "p50"),
                f"{r['p99_ms']:.1f}", f"{r['plain_p99_ms']:.1f}", _within(r, "p99"),
            )
            for stream, r in rows.items()
        ),
    )  # fmt: skip


def _alternatives(report: Numbers) -> str:
    text = [
        "## The alternatives",
        "",
        "Each table below serves the same requests in several ways: 32 hosts of 100 Gb/s on one "
        "switch, DeepSeek-V3's latent KV in fp8, blocks of 64 tokens (2.1 MiB), the plain pool's "
        "links 30 % full.",
        "",
        "- *plain pool*: each reader gets each block from its home, by itself.",
        "- *kvcast*: joining (and gathering) alone. In a pool, the controller's hot replicas and "
        "the switch's memory come on top; here they are a way and a section of their own.",
        "- *hot replicas*: three homes of every block, of which a reader's is chosen by hash. What "
        "it costs to write them is left out.",
        "- *switch that only routes*: the same three homes, of which the switch chooses in turn.",
        "- *peers' chain*, *peers' tree*: who has read a block passes it on, to one other or to "
        "two.",
        "- *single flight at hosts of 4*: four engines to a host, whose card is four times as "
        "fast; one of them fetches.",
        "- *prefix-aware routing* (chats and traces): a prompt goes to the node that served its "
        "prefix before.",
        "- *recomputation*: nothing is fetched; a node computes 20,000 tokens a second.",
        "",
        "*Egress* counts how often a distinct byte leaves its home (and, for peers, another node). "
        "Traces are compressed in time, by the factor said, until they fill links as far. So they "
        "are far denser here than they were. *Unsettled* is the share of times that were still "
        f"moving when the simulation ended. Times of {_BELIEVED:.0%} or more are not to be "
        "believed, and are left out of the picture.",
    ]
    for workload, ways in _ways(report).items():
        compression = next(iter(ways.values()))["time_compression"]
        told = f" (compressed {compression:,.0f} times)" if compression != 1 else ""
        text += [
            "",
            f"### {workload}{told}",
            "",
            table(
                ("way", "mean, ms", "p50", "p99", "home egress", "peers' egress", "", "unsettled"),
                (
                    (
                        way, f"{r['mean_ms']:.3g}", f"{r['p50_ms']:.3g}", f"{r['p99_ms']:.3g}",
                        f"{r['home_egress_ratio']:.2f}", f"{r['peer_egress_ratio']:.2f}",
                        r["note"], f"{r['unsettled']:.1%}",
                    )
                    for way, r in ways.items()
                ),
            ),
        ]  # fmt: skip
    return "\n".join(text)


def _alternatives_picture(report: Numbers) -> bytes:
    found = _ways(report)
    names = [way for way in next(iter(found.values())) if way not in (*_OWN_TERMS, "plain pool")]

    def fill(figure: Any) -> None:
        axes = figure.subplots(1, 1)
        width = 0.8 / len(names)
        for place, way in enumerate(names):
            gains = [
                ways["plain pool"]["mean_ms"] / max(1e-9, ways[way]["mean_ms"])
                if ways[way]["unsettled"] < _BELIEVED
                else 0.0
                for ways in found.values()
            ]
            axes.bar(
                [x + place * width for x in range(len(found))],
                gains,
                width=width,
                label=way,
                color=_KVCAST if way == "kvcast" else None,
                alpha=1.0 if way == "kvcast" else 0.55,
            )
        axes.axhline(1, color=_PLAIN, linewidth=1)
        axes.set_xticks([x + 0.3 for x in range(len(found))], list(found), rotation=20, ha="right")
        axes.set_title("Times as fast as a plain pool (mean of a get); below 1: slower")
        axes.legend(frameon=False, fontsize=8, ncols=3)

    return drawn(fill, (12, 4.6), dpi=110)


def _sizes(report: Numbers) -> str:
    return "\n".join(
        [
            "## Workloads at real sizes",
            "",
            "32 hosts, blocks of 2.1 MiB, prefixes of about eight blocks, links of several rates. "
            "The jitter between readers is the workload's own, in milliseconds, on all of them. A "
            "get of many blocks comes from many homes, and its reader's own link is the limit "
            "then. So gets gain less here than homes.",
            "",
            table(
                ("workload", "Gb/s", "times as fast", "p99", "bytes that homes send", "gathers"),
                (
                    (
                        r["workload"],
                        r["gbps"],
                        f"{r['speedup']:.2f}",
                        f"{r['p99_speedup']:.2f}",
                        f"{r['egress']:.2f}",
                        "yes" if r["gathers"] else "",
                    )
                    for r in report["sizes"]
                ),
            ),
        ]
    )


def _sizes_picture(report: Numbers) -> bytes:
    rows = report["sizes"]

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, 2)
        names = list(dict.fromkeys(r["workload"] for r in rows))
        rates = sorted({r["gbps"] for r in rows})
        for axes, what, title, limits in (
            (panels[0], "speedup", "Times as fast as a plain pool", (0, 2)),
            (panels[1], "egress", "Bytes that homes send, of a plain pool's", (1, 0)),
        ):
            grid = [
                [next(r[what] for r in rows if (r["workload"], r["gbps"]) == (n, g)) for g in rates]
                for n in names
            ]
            low, high = min(limits), max(limits)
            colours = "BrBG" if limits[0] < limits[1] else "BrBG_r"
            axes.imshow(grid, cmap=colours, vmin=low, vmax=high, aspect="auto")
            for j, line in enumerate(grid):
                for i, value in enumerate(line):
                    axes.text(i, j, f"{value:.2f}", ha="center", va="center", fontsize=9)
            axes.set_xticks(range(len(rates)), [f"{rate} Gb/s" for rate in rates])
            axes.set_yticks(range(len(names)), names)
            axes.set_title(title)

    return drawn(fill, (12, 4.6), dpi=110)


def _layers(report: Numbers) -> str:
    return "\n".join(
        [
            "### Whole blocks, compressed ones, or first layers",
            "",
            "What would fit into the switch's memory, of DeepSeek-V3's latent KV in fp8, with "
            "blocks as the traces have them and the controller's policy? *Reads answered* begin at "
            "once, or are whole. *Bytes saved* are of all that is read. With the first layers in "
            "the switch, the others stream while the engine computes.",
            "",
            table(
                ("trace", "tokens", "what", "KiB", "slots", "fit", "reads answered", "bytes saved"),
                (
                    (
                        r["trace"],
                        r["block_tokens"],
                        r["what"],
                        r["bytes"] >> 10,
                        r["slots"],
                        r["blocks_that_fit"],
                        f"{r['reads_answered']:.1%}",
                        f"{r['bytes_saved']:.1%}",
                    )
                    for r in report["layers"]
                ),
            ),
        ]
    )


def _frontier(report: Numbers) -> str:
    frontier = report["frontier"]
    text = [
        "## The frontier",
        "",
        "Groups of nodes read one block of 2 MiB at about the same time. There are 64 hosts of "
        "100 Gb/s on one switch, and links are 30 % full; each table says what it changes.",
        "",
        "*Times as fast* is the mean of a get, plain over kvcast (with the gather time where one "
        "is said, if that is faster). *Bytes* is what homes send, of the plain pool's.",
        "",
        "Clusters and topologies (with all switches joining):",
        "",
        table(
            ("hosts", "topology", "readers", "times as fast", "p99", "bytes"),
            (
                (r["hosts"], r["topology"], r["group"], r["speedup"], r["p99_speedup"], r["egress"])
                for r in frontier["cluster"]
            ),
        ),
        "",
        "Share of reads that have company, by load:",
        "",
        table(
            ("joint reads", "load", "times as fast", "bytes"),
            (
                (f"{r['correlated']:.0%}", r["load"], r["speedup"], r["egress"])
                for r in frontier["correlation"]
            ),
        ),
        "",
        "Readers 100 µs apart, by block and link; 1 ms is the shortest time to gather:",
        "",
        table(
            ("Gb/s", "block, KiB", "may gather, ms", "times as fast", "bytes"),
            (
                (r["gbps"], r["block_bytes"] >> 10, r["gather_ms"], r["speedup"], r["egress"])
                for r in frontier["block_by_link"]
            ),
        ),
    ]
    return "\n".join(text)


def _frontier_picture(report: Numbers) -> bytes:
    frontier = report["frontier"]

    def heat(axes: Any, rows: list[Numbers], x: str, y: str, title: str, labels: Any) -> None:
        xs, ys = sorted({r[x] for r in rows}), sorted({r[y] for r in rows})
        grid = [[0.0] * len(xs) for _ in ys]
        for r in rows:
            grid[ys.index(r[y])][xs.index(r[x])] = r["speedup"]
        axes.imshow(grid, origin="lower", cmap="BrBG", vmin=-2, vmax=4, aspect="auto")
        for j, line in enumerate(grid):
            for i, value in enumerate(line):
                shade = "white" if value > 3 else "black"
                axes.text(i, j, f"{value:.1f}", ha="center", va="center", fontsize=9, color=shade)
        axes.set_xticks(range(len(xs)), [labels[0](v) for v in xs])
        axes.set_yticks(range(len(ys)), [labels[1](v) for v in ys])
        axes.set_title(title)

    def fill(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        heat(
            left,
            frontier["spread_by_group"],
            "spread_us",
            "group",
            "Times as fast as a plain pool: a block of 2 MiB at 100 Gb/s;\n"
            "readers, and how far apart they start",
            (lambda v: f"{v:g} µs", lambda v: f"{v} readers"),
        )
        heat(
            right,
            [r for r in frontier["block_by_link"] if r["gather_ms"] == 0],
            "gbps",
            "block_bytes",
            "Times as fast as a plain pool: 8 readers 100 µs apart;\nlinks, and sizes of the block",
            (lambda v: f"{v} Gb/s", format_size),
        )

    return drawn(fill, (12, 4.4), dpi=110)


def _memory(report: Numbers) -> str:
    rows = report["memory"]
    names = list(rows[0]["hit_share"])
    again = [r for r in rows if sum(r["optimum_segments"].values())]
    never = [
        f"`{name}`"
        for name in dict.fromkeys(r["stream"] for r in rows)
        if name not in {r["stream"] for r in again}
    ]
    parts = list(rows[0]["optimum_segments"])
    filled = [
        1 - r["optimum_segments"]["before the fill"] / sum(r["optimum_segments"].values())
        for r in again
    ]
    others = any(r["value_over_best_online"] is not None for r in rows)
    return "\n".join(
        [
            "## What belongs in the switch's memory",
            "",
            "Here 16 nodes each keep what they have read, and read blocks of one segment, or of 1, "
            "2, 4 and 8 (*sizes mixed*). Reads that share an answer anyway (within 100 ms) are "
            "left out. *value* is the controller's code, with its reports, digests and fills. The "
            "*optimum* knows the future: it is Belady's rule with the right to let blocks pass. "
            "Where sizes are mixed it is a bound that no policy reaches (PFOO-U: Berger, Beckmann, "
            "Harchol-Balter, SIGMETRICS 2018), so ratios are lower there than they should be.",
            "",
            "The first table says what becomes of the optimum's hits, in segments read:",
            "",
            "- *value*: the controller answers them, too;",
            "- *the control loop*: our code would answer them, if it were told of each read within "
            "50 ms and not by homes' reports once a second;",
            "- *another rule*: the best of the other policies would answer them beyond that, if it "
            "were told of each read at once, and what it lets in were filled by the next read that "
            "passes, as in the switch;",
            "- *the future*: nobody has them who does not know it;",
            "- *before the fill*: a switch's memory is filled by an answer that passes. So a block "
            "that is let in after its first read is filled by its second, and answers the third. "
            "These reads come before that; no controller beside the switch can have them."
            + (
                f" So one that knew the future would reach {min(filled):.2f} to {max(filled):.2f} "
                "of the optimum."
                if filled
                else ""
            ),
            "",
            table(
                ("stream", "slots", "segments", "optimum", *parts, "value/optimum",
                 "best online/optimum", "value/best online", "value/best as a switch fills",
                 "value/best told as late",
                 "value/reachable optimum"),
                (
                    (
                        r["stream"],
                        r["slots"],
                        r["segments"],
                        sum(r["optimum_segments"].values()),
                        *r["optimum_segments"].values(),
                        *(
                            _ratio(r[ratio])
                            for ratio in (
                                "value_over_optimum",
                                "best_online_over_optimum",
                                "value_over_best_online",
                                "value_over_best_as_a_switch_fills",
                                "value_over_best_told_as_late",
                                "value_over_reachable_optimum",
                            )
                        ),
                    )
                    for r in again
                ),
            ),
            "",
            "The last columns are ratios:",
            "",
            "- *Best online* is the best of all policies that do not know the future, if it hears "
            "of each read and fills in no time, which no switch does.",
            "- *Best as a switch fills* is the best of the others, told of each read at once. What "
            "it lets in is filled by the next read.",
            "- *Best told as late* is the same, told when our controller is; its slots rest as "
            "long before another block has them. Neither is a bound: *value* has other rules, and "
            "its ratio is above 1 where it does better.",
            "- The *reachable optimum* knows the future, but lets in only what a home or the "
            "switch has told of by then, as late as they do, and fills as a switch does."
            + (
                ""
                if others
                else " (The other policies are libCacheSim's, which was not installed: what they "
                "would have is not known.)"
            ),
            *(
                (
                    "",
                    f"In {', '.join(never)} no block is read again by anybody who does not share "
                    "an answer: nothing is there for a memory.",
                )
                if never
                else ()
            ),
            "",
            "The second table has all policies, as shares of the bytes read. *Static* is the best "
            "fixed set, which takes knowing the future, too. A home could be ordered to send each "
            "block that is let in once more, for its second reader. *Best, filled by order* is "
            "what that saves in all, less what it sends. Where this is below what is saved by the "
            "fills that cost nothing, orders cost more than they bring.",
            "",
            table(
                ("stream", "slots", *names),
                (
                    (r["stream"], r["slots"], *(f"{r['hit_share'][n]:.3f}" for n in names))
                    for r in again
                ),
            ),
        ]
    )  # fmt: skip


def _ratio(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


_PART_COLOURS = {
    "value": _KVCAST,
    "the control loop": "#5eb3a6",
    "another rule": _OTHER,
    "the future": "#c3c9d4",
    "before the fill": _PLAIN,
}


def _memory_picture(report: Numbers) -> bytes:
    rows = [r for r in report["memory"] if sum(r["optimum_segments"].values())]

    def fill(figure: Any) -> None:
        axes = figure.subplots(1, 1)
        below = [0.0] * len(rows)
        for part, colour in _PART_COLOURS.items():
            shares = [
                100 * r["optimum_segments"][part] / sum(r["optimum_segments"].values())
                for r in rows
            ]
            label = "value (the controller's policy)" if part == "value" else part
            axes.bar(range(len(rows)), shares, bottom=below, color=colour, label=label)
            below = [x + y for x, y in zip(below, shares, strict=True)]
        axes.set_xticks(
            range(len(rows)),
            [f"{r['stream']}\n{r['slots']} slots" for r in rows],
            rotation=30,
            ha="right",
            fontsize=8,
        )
        axes.set_ylabel("% of the optimum's hits")
        axes.set_title("What becomes of the hits of an optimum that knows the future")
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))

    return drawn(fill, (12, 4.8), dpi=110)


def _sensitivity(report: Numbers) -> str:
    return "\n".join(
        [
            "## What it depends on",
            "",
            "In the middle case 8 of 64 hosts read 2 MiB within 10 µs, at 100 Gb/s, with links "
            "30 % full. Each row changes one thing:",
            "",
            table(
                ("case", "times as fast", "p99", "bytes"),
                (
                    (r["case"], r["speedup"], r["p99_speedup"], r["egress"])
                    for r in report["sensitivity"]
                ),
            ),
        ]
    )


def _sensitivity_picture(report: Numbers) -> bytes:
    rows = report["sensitivity"]
    middle = rows[0]["speedup"]
    changed = sorted(rows[1:], key=lambda r: r["speedup"])

    def fill(figure: Any) -> None:
        axes = figure.subplots(1, 1)
        axes.barh(
            [r["case"] for r in changed],
            [r["speedup"] - middle for r in changed],
            left=middle,
            color=[_KVCAST if r["speedup"] >= middle else _OTHER for r in changed],
        )
        axes.axvline(middle, color=_PLAIN)
        axes.axvline(1, color="#c2410c", linestyle=":")
        axes.set_xlabel("times as fast as a plain pool; dotted: no gain")
        axes.set_title(f"What the middle case ({middle:.2f} times as fast) depends on")

    return drawn(fill, (9, 4.6), dpi=110)


def _scale(report: Numbers) -> str:
    s = report["scale"]
    return "\n".join(
        [
            "## Ten thousand hosts",
            "",
            f"{s['hosts']:,} hosts of 100 Gb/s stand behind leaves of 32 and eight spines. Each is "
            "as busy as one of 16 hosts with the trace alone. "
            f"{s['simulated_s']:,.0f} s were simulated in {s['took_s']:,.0f} s"
            + (
                ""
                if not s["extrapolated"]
                else f", the time that there was; an hour would take {s['seconds_per_hour']:,.0f} s"
            )
            + f" ({s['processor_seconds_per_hour']:,.0f} s of one processor's time an hour).",
            "",
            table(
                ("", ""),
                (
                    ("requests", f"{s['requests']:,}"),
                    ("blocks read", f"{s['reads']:,}"),
                    ("of them joined", f"{s['joined']:,}"),
                    ("bytes that homes sent", f"{s['home']:,}"),
                    ("frames into switches", f"{s['passes']:,}"),
                    ("pending segments at once, busiest switch", f"{s['pending_peak']:,}"),
                    ("collisions of pending entries", f"{s['collisions']:,}"),
                    ("busiest link", f"{s['busiest_link']:.1%}"),
                    ("control messages", f"{s['control_messages']:,}"),
                    ("controllers' processor time, s", f"{s['controller_ms'] / 1000:,.0f}"),
                    (
                        "agents' processor time, all hosts, s: as homes, as readers",
                        f"{s['homes_ms'] / 1000:,.0f}, {s['readers_ms'] / 1000:,.0f}",
                    ),
                    ("busiest host's agent, of one core", f"{s['busiest_host']:.1%}"),
                    ("mean of a get, ms", s["kvcast_mean_ms"]),
                    (
                        "the same, first slice: plain, kvcast",
                        f"{s['plain_mean_ms']}, {s['kvcast_first_slice_mean_ms']}",
                    ),
                ),
            ),
        ]
    )


def _how(report: Numbers) -> str:
    machine = report.get("machine", {})
    took = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in report["took_s"].items())
    failed = [f"**{part} failed:** {why}." for part, why in report.get("failed", {}).items()]
    return "\n".join(
        [
            "## How it was made",
            "",
            f"Parts: {took}. Machine: {machine.get('processor')}, {machine.get('cores')} cores, "
            f"load {machine.get('load')}. Traces: {', '.join(report['traces']) or 'none'}.",
            "",
            *failed,
            *([""] if failed else []),
            "What the simulation leaves out:",
            "",
            "- losses;",
            "- homes that hold answers back for readers behind (`protocol/responder/catchup.py`);",
            "- hot replicas given while it runs;",
            "- waiting for processors beyond what `FlowOptions` says (their work is counted by "
            "unit costs, `simulation/flows/processors.py`);",
            "- what a node evicts.",
            "",
            "Trees of switches and stars of more than 32 hosts are simulated, not built.",
        ]
    )
