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
    """A compiled program.

    `device_config`: what the device loads (BMv2 JSON for v1model), None where that is not in the
    package (a Tofino's); `resources`: the report of what the program takes of the hardware, None
    for software switches.
    """

    target: str
    p4info: Path
    device_config: Path | None
    resources: Path | None

    @property
    def json(self) -> Path:
        """The BMv2 JSON, which a software switch loads."""
        if self.device_config is None:
            raise ValueError(f"{self.target}: there is no BMv2 JSON; no software switch runs it")
        return self.device_config


def artefact(target: str) -> Artefact:
    """The compiled program of a target; KeyError for a target that has no profile."""
    profile = profiles[target]
    folder = Path(str(files(__package__))) / "generated" / profile.program
    p4info = folder / "kvcast.p4info.txtpb"
    if profile.brings_device_config:
        return Artefact(target, p4info, folder / "kvcast.json", None)
    return Artefact(target, p4info, None, folder / "resources.json")
