"""What stands beside every number: machine, commit, versions; and percentiles.

Owns: how a report says where it was measured. Must not know: what was measured.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("kvcast", "finsy", "grpcio", "llvmlite", "numpy", "msgspec", "xxhash")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": cores,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The checkout's commit, with "+" if files differ from it; "unknown" outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        ran = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return ran.stdout.strip() if ran.returncode == 0 else "unknown"


def versions() -> dict[str, str]:
    """The packages whose versions matter to a measurement."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance() -> dict[str, Any]:
    """When, where, and of which commit: part of every report."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "machine": machine(),
        "commit": commit(),
        "versions": versions(),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile (share 0 to 1); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered), max(1, math.ceil(share * len(ordered)))) - 1]


def summary_ms(values_ms: Sequence[float]) -> dict[str, float | None]:
    """p50, p99 and max of milliseconds, to a hundredth."""
    return summary(values_ms)


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p99 and max, to a hundredth."""
    picked = {
        "p50": percentile(values, 0.50),
        "p99": percentile(values, 0.99),
        "max": max(values, default=None),
    }
    return {name: None if value is None else round(value, 2) for name, value in picked.items()}


def ratio(part: float, whole: float) -> float | None:
    """part ÷ whole to a ten-thousandth; None where there is no whole."""
    return round(part / whole, 4) if whole else None


def report_to(
    path: str | Path | None, report: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> None:
    """Write a report where --json says, if it does, and show it to people unless standard output
    has it already."""
    if path:
        write_json(path, report)
    if str(path) != "-":
        show(report)


def write_json(path: str | Path, report: Mapping[str, Any]) -> None:
    """Write a report where --json says; "-" is standard output."""
    text = json.dumps(report, indent=2, default=str) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None
