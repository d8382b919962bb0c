"""The data plane as package data: compiled artefacts and what each target of them can hold.

Owns: where the artefacts are (the profiles of the targets are targets.py's). Must not know: how a
controller uses them. A user needs no P4 compiler: `kvcast.p4.build` makes the artefacts, they are
committed, and a test ties them to their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from .targets import TargetProfile, profiles

__all__ = ["Artefact", "TargetProfile", "artefact", "profiles"]


@dataclass(frozen=True)
class Artefact:
    """A compiled program: its P4Info, and what the device loads (BMv2 JSON for v1model).

    `json` is None where the device's configuration is not in the package (a Tofino's); `resources`
    is the report of what the program takes of the hardware, None for software switches.
    """

    json: Path | None
    p4info: Path
    resources: Path | None = None


def artefact(target: str) -> Artefact:
    """The compiled program of a target; KeyError for a target that has no profile."""
    profile = profiles[target]
    folder = Path(str(files(__package__))) / "generated" / profile.program
    p4info = folder / "kvcast.p4info.txtpb"
    if profile.brings_device_config:
        return Artefact(folder / "kvcast.json", p4info)
    return Artefact(None, p4info, folder / "resources.json")
