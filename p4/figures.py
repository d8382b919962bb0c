"""What the Tofino reports mean: docs/tofino.md's tables (`python -m kvcast.p4.figures --write`).

Owns: the arithmetic from the committed reports and the wire format to tokens, bytes that go round,
and rates. Must not know: how to compile. Nothing here was measured.
The tables stand in the document between `<!-- figures: NAME -->` and `<!-- end -->`; a test says
when they are not current.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcast.p4 import artefact
from kvcast.p4.definitions import ROUND
from kvcast.protocol.messages import wire

FOLDER = Path(__file__).resolve().parent
DOCUMENT = FOLDER.parent / "docs" / "tofino.md"
TARGETS = {"tofino1": "Tofino 1", "tofino2": "Tofino 2"}
HOST_HEADERS = (wire.ETHERNET, wire.IPV4, wire.UDP, wire.KVCAST)
KIB = 1024
TOKEN_KIB = {
    "DeepSeek-V3 (MLA), fp8": 34.3,
    "DeepSeek-V3 (MLA), bf16": 68.6,
    "Llama-3-8B, fp8": 64.0,
    "Llama-3-8B, bf16": 128.0,
    "Llama-3-70B, fp8": 160.0,
    "Llama-3-70B, bf16": 320.0,
}
"""KV bytes of one token in all layers, in KiB; of the whole model, whatever each rank holds."""
RECIRCULATION_GBPS = {"tofino1": 100, "tofino2": 400}
"""Taken for a pipe's own recirculation port; to be measured before anything rests on it."""
HOME_GBPS = (25, 100, 400)
READERS = (1, 8, 32)


@dataclass(frozen=True)
class Target:
    """One target's report, and what follows from it."""

    name: str
    report: dict[str, Any]

    @classmethod
    def load(cls, name: str) -> Target:
        path = artefact(name).resources
        assert path is not None
        return cls(name, json.loads(path.read_bytes()))

    @property
    def header_bytes(self) -> int:
        """What a frame that goes round carries besides its chunk."""
        return ROUND.size_bytes + sum(header.size_bytes for header in HOST_HEADERS)

    @property
    def rows(self) -> list[int]:
        """Bytes of a chunk that each pass of it reads, in order: the short row first."""
        passes, row = self.report["passes_per_chunk"], self.report["bytes_per_pass"]
        return [wire.CHUNK_BYTES - (passes - 1) * row, *[row] * (passes - 1)]

    @property
    def served_frames(self) -> list[int]:
        """Bytes of each frame that goes round to serve a chunk: one that gathers it, growing, and
        the READ on its way to the next chunk."""
        gathering = [self.header_bytes + sum(self.rows[:n]) for n in range(len(self.rows))]
        return [*gathering, self.header_bytes]

    @property
    def stored_frames(self) -> list[int]:
        """Bytes of each frame that goes round to store a chunk: the copy of DATA, shrinking."""
        rows = self.rows[::-1]
        whole = self.header_bytes + wire.CHUNK_BYTES
        return [whole - sum(rows[:n]) for n in range(len(rows))]

    def chunk_gbps(self, frames: Sequence[int], port_gbps: float) -> float:
        """Chunks' bytes a second, when a recirculation port is full."""
        return port_gbps * wire.CHUNK_BYTES / sum(frames)

    @property
    def serving_gbps(self) -> float:
        return self.chunk_gbps(self.served_frames, RECIRCULATION_GBPS[self.name])

    @property
    def filling_gbps(self) -> float:
        return self.chunk_gbps(self.stored_frames, RECIRCULATION_GBPS[self.name])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fits(targets: Sequence[Target]) -> str:
    """What the program takes, as compiled."""
    reports = [target.report for target in targets]

    def of_budget(report: dict[str, Any], kind: str) -> str:
        most = report["budget_by_stage"][kind] * report["stages"]
        return f"{report['totals'][kind]} of {most}"

    def containers(report: dict[str, Any]) -> str:
        found = report["containers"]
        return f"{found['ingress']['bits']:,} and {found['egress']['bits']:,}"

    def mebibytes(report: dict[str, Any]) -> str:
        return f"{report['value_bytes_per_pipe'] / KIB / KIB:g} MiB"

    figures: dict[str, Callable[[dict[str, Any]], str]] = {
        "stages": lambda r: str(r["stages"]),
        "stages of ingress, of egress": lambda r: f"{r['ingress_stages']}, {r['egress_stages']}",
        "bytes of values a pipe": mebibytes,
        "segments of 64 KiB that can be resident": lambda r: str(r["slots"]),
        "pending entries": lambda r: f"{r['pending_entries']:,}",
        "hosts forwarded by MAC": lambda r: f"{r['forwarded_hosts']:,}",
        "IPv4 routes": lambda r: f"{r['ipv4_routes']:,}",
        "passes for a chunk of 1 KiB": lambda r: str(r["passes_per_chunk"]),
        "bytes a pass": lambda r: str(r["bytes_per_pass"]),
        "SRAM blocks of the stages used": lambda r: of_budget(r, "sram"),
        "map RAMs": lambda r: of_budget(r, "map_ram"),
        "TCAM blocks": lambda r: of_budget(r, "tcam"),
        "stateful ALUs": lambda r: of_budget(r, "stateful_alus"),
        "bits of containers, ingress and egress": containers,
    }
    return _table(
        ["compiled", *(TARGETS[target.name] for target in targets)],
        ([name, *map(figure, reports)] for name, figure in figures.items()),
    )


def tokens(targets: Sequence[Target]) -> str:
    """How many tokens of which model fit, and how fast they can be fetched from there."""
    head = ["model", "KV bytes a token"]
    for target in targets:
        name = TARGETS[target.name]
        mib = target.report["value_bytes_per_pipe"] / KIB / KIB
        head += [f"tokens in a {name} pipe ({mib:g} MiB)", "tokens a second, at most"]
    rows = []
    for model, size in TOKEN_KIB.items():
        row = [model, f"{size:g} KiB"]
        for target in targets:
            row.append(str(int(target.report["value_bytes_per_pipe"] / (size * KIB))))
            row.append(f"{target.serving_gbps * 1e9 / 8 / (size * KIB):,.0f}")
        rows.append(row)
    return _table(head, rows)


def rounds(targets: Sequence[Target]) -> str:
    """What going round costs."""
    rows = []
    for target in targets:
        port = RECIRCULATION_GBPS[target.name]
        for what, frames, rate in (
            ("serving", target.served_frames, target.serving_gbps),
            ("filling", target.stored_frames, target.filling_gbps),
        ):
            rows.append([
                f"{TARGETS[target.name]}, {what}", str(len(frames)), f"{sum(frames):,}",
                f"{port} Gb/s", f"{_number(rate)} Gb/s",
            ])  # fmt: skip
    return _table(
        ["", "frames a chunk", "bytes for 1,024", "recirculation port", "chunks, at most"], rows
    )


def worth(targets: Sequence[Target]) -> str:
    """What each of N readers gets of one block, by what answers."""
    head = ["link of the home", "readers", "each alone", "coalesced"]
    for target in targets:
        head += [f"{TARGETS[target.name]}, together", "in turn"]
    rows = []
    for home in HOME_GBPS:
        for readers in READERS:
            row = [f"{home} Gb/s", str(readers), _number(home / readers), _number(home)]
            for target in targets:
                row += [_number(target.serving_gbps), _number(target.serving_gbps / readers)]
            rows.append(row)
    return _table(head, rows)


FIGURES = {"fits": fits, "tokens": tokens, "rounds": rounds, "worth": worth}
_SPAN = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(document: str) -> str:
    """The document with its tables made anew; KeyError for one that does not exist."""
    targets = [Target.load(name) for name in TARGETS]
    return _SPAN.sub(lambda m: f"{m[1]}{FIGURES[m[2]](targets)}\n{m[4]}", document)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcast.p4.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="bring docs/tofino.md up to date")
    options = parser.parse_args(argv)
    if options.write:
        DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    targets = [Target.load(name) for name in TARGETS]
    print("\n\n".join(f"{name}\n\n{make(targets)}" for name, make in FIGURES.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
