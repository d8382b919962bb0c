"""What `kvcast.bench.ttft` reports: its figures, of what was measured in one run or in several.

Owns: cases, the figures at the top, how reports of parts become one. Must not know: engines,
networks, how anything is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from kvcast.bench.engines.ways import WAYS
from kvcast.service.commands import CommandError
from kvcast.service.statistics import ratio

LINKS_LIMIT: Final = 0.75
"""From this share of the busiest link's rate on, links were a case's limit."""
PROCESSORS_LIMIT: Final = 0.9
RECOMPUTE: Final = "recompute"
_ALIKE: Final = ("link_rate_bits_per_s", "connector", "own_tokens", "homes", "lone_reads")
"""What reports must have alike that are merged."""
_PARTS: Final = ("mla_", "storm_")
"""How fields begin that a part measures for itself."""


class Case:
    """Some engines asked at once for a prefix, by one way; all rounds together."""

    _EACH = ("cached_shares", "processors_busy", "link_busy", "link_bytes")

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cached_shares: list[float] = []
        self.processors_busy: list[float] = []
        self.link_busy: list[float] = []
        self.link_bytes: list[int] = []

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def report(self) -> dict[str, Any]:
        return {
            "median_s": round(self.median_s, 4),
            "seconds": [round(one, 4) for one in self.seconds],
            "cached_share": round(min(self.cached_shares), 4),
            "processors_busy": round(statistics.median(self.processors_busy), 3),
            "link_busy": round(statistics.median(self.link_busy), 3),
            "busiest_link_bytes": round(statistics.median(self.link_bytes)),
            "limit": self.limit,
            "each": {name: getattr(self, name) for name in self._EACH},
        }

    @classmethod
    def of(cls, report: dict[str, Any]) -> Case:
        """The case of which this was reported."""
        case = cls()
        case.seconds = list(report["seconds"])
        for name in cls._EACH:
            setattr(case, name, list(report["each"][name]))
        return case

    def add(self, other: Case) -> None:
        """Further rounds."""
        for name in ("seconds", *self._EACH):
            getattr(self, name).extend(getattr(other, name))

    @property
    def limit(self) -> str:
        """What took most of the time."""
        if statistics.median(self.link_busy) >= LINKS_LIMIT:
            return "links"
        if statistics.median(self.processors_busy) >= PROCESSORS_LIMIT:
            return "processors"
        return "waiting"


class Found:
    """What was measured, by way, prefix and number of engines."""

    def __init__(self) -> None:
        self.cases: dict[tuple[str, int, int], Case] = {}
        self.wrong_outputs: dict[str, int] = {}

    def take(self, report: dict[str, Any]) -> None:
        """Add what a report of another run says."""
        for one in report.get("cases", ()):
            key = (one["way"], one["prefix_tokens"], one["engines"])
            self.cases.setdefault(key, Case()).add(Case.of(one))
        for name, wrong in report.get("ways_wrong_outputs", {}).items():
            self.wrong_outputs[name] = self.wrong_outputs.get(name, 0) + wrong

    def report(self) -> dict[str, Any]:
        """The numbers as plain data, in seconds."""
        medians = {case: found.median_s for case, found in self.cases.items()}
        own = {key: case for key, case in self.cases.items() if key[0] == WAYS[0].NAME}
        ways = list(dict.fromkeys(name for name, _, _ in medians if name != RECOMPUTE))
        prefixes = sorted({prefix for _, prefix, _ in medians})
        counts = sorted({count for _, _, count in medians})

        def over_best(prefix: int, count: int) -> float | None:
            peers = [medians.get((name, prefix, count)) for name in ways if name != WAYS[0].NAME]
            there = [one for one in peers if one is not None]
            ours = medians.get((WAYS[0].NAME, prefix, count))
            return None if ours is None or not there else ratio(ours, min(there))

        def growth(name: str, prefix: int) -> float | None:
            one, four = medians.get((name, prefix, 1)), medians.get((name, prefix, 4))
            return None if one is None or four is None else ratio(four, one)

        over = {(prefix, n): over_best(prefix, n) for prefix in prefixes for n in counts}
        grown = {(name, prefix): growth(name, prefix) for name in ways for prefix in prefixes}
        return {
            "ttft_over_best_peer_n1": worst(over.get((prefix, 1)) for prefix in prefixes),
            "ttft_over_best_peer_n4": worst(over.get((prefix, 4)) for prefix in prefixes),
            "growth_1_to_4": worst(grown.get((WAYS[0].NAME, prefix)) for prefix in prefixes),
            "wrong_outputs": self.wrong_outputs.get(WAYS[0].NAME, 0),
            "not_all_cached": {
                name: sum(
                    share < 1
                    for key, case in self.cases.items()
                    if key[0] == name
                    for share in case.cached_shares
                )
                for name in ways
            },
            "ways_wrong_outputs": dict(self.wrong_outputs),
            "cases_limited_by_links": ratio(
                sum(case.limit == "links" for case in own.values()), len(own)
            ),
            "processors_busy": _median(self.cases, "processors_busy"),
            "link_busy": _median(self.cases, "link_busy"),
            "ttft_over_best_peer": {
                f"{prefix} tokens, {n} engines": found
                for (prefix, n), found in over.items()
                if found is not None
            },
            "growth": {
                f"{name}, {prefix} tokens": found
                for (name, prefix), found in grown.items()
                if found is not None
            },
            "ttft_over_recompute": {
                f"{prefix} tokens, {n} engines": ratio(ours, medians[RECOMPUTE, prefix, n])
                for (name, prefix, n), ours in medians.items()
                if name == WAYS[0].NAME and (RECOMPUTE, prefix, n) in medians
            },
            "cases": [
                {"way": name, "prefix_tokens": prefix, "engines": n, **found.report()}
                for (name, prefix, n), found in self.cases.items()
            ],
        }


def whole(found: Found, parts: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """The report. `parts`: what loads that fail and groups of ranks have shown; `facts`: under
    which conditions, and what is missing."""
    report = found.report() | parts
    for name in ("mla_wrong_blocks", "storm_wrong_outputs"):
        report["wrong_outputs"] += parts.get(name, 0)
    return report | facts


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of several, each of which has measured a part; CommandError if they were measured
    under other conditions. Of a part that several have, the last counts; rounds of one case add
    up."""
    found = Found()
    parts: dict[str, Any] = {}
    for report in reports:
        differ = [name for name in _ALIKE if report.get(name) != reports[0].get(name)]
        if differ:
            raise CommandError(f"the reports differ in {', '.join(differ)}")
        found.take(report)
        parts |= {name: value for name, value in report.items() if name.startswith(_PARTS)}
    measured = {name for name, _, _ in found.cases}
    skipped = {name: why for report in reports for name, why in report.get("skipped", {}).items()}
    not_reached = {one for report in reports for one in report.get("not_reached", ())}
    cases = {case_name(*key) for key in found.cases}
    facts = {name: reports[0].get(name) for name in _ALIKE} | {
        "skipped": {name: why for name, why in skipped.items() if name not in measured},
        "not_reached": sorted(not_reached - cases),
        "took_s": round(sum(report.get("took_s", 0) for report in reports), 1),
        "merged": [report.get("provenance") for report in reports],
    }
    return whole(found, parts, facts)


def case_name(way: str, prefix_tokens: int, engines: int) -> str:
    """What a case is called where it is only named."""
    return f"{way}, {prefix_tokens} tokens, {engines} engines"


def worst(found: Any) -> float | None:
    return max((one for one in found if one is not None), default=None)


def _median(cases: dict[tuple[str, int, int], Case], what: str) -> float | None:
    """Over all cases of kvcast."""
    found = [
        v for key, case in cases.items() if key[0] == WAYS[0].NAME for v in getattr(case, what)
    ]
    return round(statistics.median(found), 3) if found else None
