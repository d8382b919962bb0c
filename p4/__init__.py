"""The data plane as package data: compiled artefacts and what each target of them can hold.

Owns: where the artefacts are, and the profile of every target. Must not know: how a controller
uses them. A user needs no P4 compiler: `kvcast.p4.build` makes the artefacts, they are committed,
and a test ties them to their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class TargetProfile:
    """What a target holds and needs.

    `program`: which artefact it loads; `slots`: segments that can be resident; `cells_per_slot`:
    chunks of 1024 bytes in each; `read_padding_bytes`: padding that every READ must carry (BMv2
    cannot grow a packet by more than 512 bytes); `tick_us`: length of a time-stamp tick, in µs;
    `max_ports`: host ports, numbered from 1; `recirculate_rid`: replication id of the copy that
    goes round again.
    """

    name: str
    program: str
    slots: int
    cells_per_slot: int
    read_padding_bytes: int
    tick_us: int
    max_ports: int
    recirculate_rid: int


profiles: dict[str, TargetProfile] = {
    profile.name: profile
    for profile in (
        TargetProfile("v1model", "v1model", 256, 64, 0, 64, 32, 255),
        TargetProfile("bmv2", "bmv2", 256, 64, 608, 64, 32, 255),
    )
}


@dataclass(frozen=True)
class Artefact:
    """A compiled program: the device configuration (BMv2 JSON for v1model) and its P4Info."""

    json: Path
    p4info: Path


def artefact(target: str) -> Artefact:
    """The compiled program of a target; KeyError for a target that has no profile."""
    folder = Path(str(files(__package__))) / "generated" / profiles[target].program
    return Artefact(folder / "kvcast.json", folder / "kvcast.p4info.txtpb")
