"""What the processes of a pool take: memory, descriptors and threads, sampled over their lives.

Owns: which samples belong to one life of a part. Must not know: pools, faults, or what growth
is too much.
"""

from __future__ import annotations

import tempfile
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcast.bench.usage import Usage, usage


@dataclass
class Life:
    """One process of a part, from its start to its end."""

    part: str
    number: int
    """1 for the first."""
    at_s: array[float] = field(default_factory=lambda: array("d"))
    """When each sample was taken, seconds of the soak."""
    memory_mib: array[float] = field(default_factory=lambda: array("d"))
    descriptors: array[float] = field(default_factory=lambda: array("d"))
    threads: array[float] = field(default_factory=lambda: array("d"))

    def add(self, at_s: float, sample: Usage) -> None:
        """A further sample."""
        self.at_s.append(round(at_s, 1))
        self.memory_mib.append(round(sample.memory_mib, 2))
        self.descriptors.append(sample.descriptors)
        self.threads.append(sample.threads)

    @property
    def name(self) -> str:
        return f"{self.part}, life {self.number}"

    @property
    def length_s(self) -> float:
        """From the first sample to the last."""
        return self.at_s[-1] - self.at_s[0] if self.at_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "life": self.number,
            "length_s": round(self.length_s, 1),
            "at_s": list(self.at_s),
            "memory_mib": list(self.memory_mib),
            "descriptors": [int(n) for n in self.descriptors],
            "threads": [int(n) for n in self.threads],
        }


class Watch:
    """The lives of some parts."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self._current: dict[str, tuple[int, Life]] = {}

    def sample(self, at_s: float, pids: dict[str, int | None]) -> None:
        """Look at every process that runs; another process id begins another life."""
        for part, pid in pids.items():
            if pid is None:
                continue
            taken = usage(pid)
            if taken is None:
                continue
            known_pid, life = self._current.get(part, (None, None))
            if life is None or known_pid != pid:
                life = Life(part, 1 if life is None else life.number + 1)
                self.lives.append(life)
                self._current[part] = (pid, life)
            life.add(at_s, taken)

    def present(self, part: str) -> Life | None:
        """The part's life at the last sample."""
        found = self._current.get(part)
        return None if found is None else found[1]


def leftovers(*marks: str) -> list[str]:
    """Files in shared memory and the temporary folders whose names contain one of these marks."""
    folders = {Path("/dev/shm"), Path("/tmp"), Path(tempfile.gettempdir())}
    return sorted(
        str(path)
        for folder in folders
        if folder.is_dir()
        for path in folder.glob("kvcast-*")
        if any(mark in path.name for mark in marks)
    )
