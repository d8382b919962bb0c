"""The picture of shared answers by RDMA: what readers of the same blocks cost their home's link,
and what a byte costs their processors.

Owns: how the rounds in the report (plain data) of `kvcast.bench.rdma` are drawn. Must not know: how
they were measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcast.bench.plotting import drawn

_WAYS = (
    ("plain TCP", "plain TCP", "#8a94a6"),
    ("plain RDMA", "RDMA READ, each for itself", "#7c3aed"),
    ("RDMA", "kvcast", "#0f7b6c"),
)
"""Name among the rounds, label, colour."""


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw it as a PNG, as far as there are rounds."""
    rounds = report["shared_rounds"]

    def fill(figure: Any) -> None:
        egress, processors = figure.subplots(1, 2)
        for name, label, colour in _WAYS:
            counts = [n for n in range(1, 33) if f"{n} by {name}" in rounds]
            mine = [rounds[f"{n} by {name}"] for n in counts]
            for axes, values in (
                (egress, [each["home_egress_ratio"] for each in mine]),
                (processors, [each["agent_busy_s_per_byte"] * 2**20 * 1e3 for each in mine]),
            ):
                axes.plot(counts, values, color=colour, linewidth=2.2, marker="o", label=label)
        egress.set_title("What left the home, in copies of the blocks")
        processors.set_title("Processor time of a reader, ms a MiB (emulated)")
        for axes in (egress, processors):
            axes.set_xlabel("readers of the same blocks")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_ylim(bottom=0)
        egress.legend(frameon=False, loc="upper left")

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(drawn(fill, (10, 3.8), dpi=130))
