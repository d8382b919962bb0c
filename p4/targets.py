"""What each target of the data plane holds and needs: one profile a target.

Owns: every capacity and limit that a controller must know of a switch and that differs by target.
Must not know: how a controller uses them. What the program's P4Info says too (slots, ports) is
compared with it by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcast.p4.definitions import LOOP_GROUP

MAX_PORTS = 32
"""Hosts of one pool behind one switch: bits of a port bitmap."""


@dataclass(frozen=True)
class TargetProfile:
    """What a target holds and needs.

    `program`: which artefact it loads; `slots`: segments that can be resident;
    `read_padding_bytes`: padding that every READ must carry (BMv2 cannot grow a packet by more
    than 512 bytes); `tick_us`: length of a time-stamp tick, in µs.

    `device_ports`: the device's number of host port 1, 2, …; `serve_goes_round`: whether the group
    that a READ is served to also holds the copy that goes round again; `loop_groups`: multicast
    groups of nothing but that copy, and their device ports; `passes_per_chunk`: passes through the
    pipeline for one chunk from switch memory; `digest_bytes`: most that one digest holds, 0 = no
    limit that matters; `longest_lease_ticks`: a longer lease of a pending entry is cut to this, 0 =
    no limit; `brings_device_config`: whether the package holds what the switch loads (else the
    vendor's tools make it from the compiler's output, and the controller is told where it lies).
    """

    name: str
    program: str
    slots: int
    read_padding_bytes: int
    tick_us: float
    device_ports: tuple[int, ...] = tuple(range(1, MAX_PORTS + 1))
    serve_goes_round: bool = True
    loop_groups: Mapping[int, int] = field(default_factory=dict)
    passes_per_chunk: int = 1
    digest_bytes: int = 0
    longest_lease_ticks: int = 0
    brings_device_config: bool = True


def _tofino(
    name: str,
    *,
    slots: int,
    passes_per_chunk: int,
    device_ports: tuple[int, ...],
    recirculation_port: int,
) -> TargetProfile:
    """A Tofino: pool ports in one pipe, whose recirculation port the frames go round by.

    A loop group for each of four pipes; a tick is 2^16 ns.
    """
    return TargetProfile(
        name=name,
        program=name,
        slots=slots,
        read_padding_bytes=0,
        tick_us=65.536,
        device_ports=device_ports,
        serve_goes_round=False,
        loop_groups={LOOP_GROUP + pipe: pipe * 128 + recirculation_port for pipe in range(4)},
        passes_per_chunk=passes_per_chunk,
        digest_bytes=48,
        longest_lease_ticks=16 << 12,
        brings_device_config=False,
    )


profiles: dict[str, TargetProfile] = {
    profile.name: profile
    for profile in (
        TargetProfile("v1model", "v1model", 256, 0, 64),
        TargetProfile("bmv2", "bmv2", 256, 608, 64),
        # Pipe 0 has 64 lanes, device ports 0 to 63: here as 32 ports of two lanes.
        _tofino(
            "tofino1",
            slots=64,
            passes_per_chunk=11,
            device_ports=tuple(range(0, 64, 2)),
            recirculation_port=68,
        ),
        # Pipe 0 has device ports 8 to 71: here as 32 ports of two lanes.
        _tofino(
            "tofino2",
            slots=128,
            passes_per_chunk=11,
            device_ports=tuple(range(8, 72, 2)),
            recirculation_port=6,
        ),
    )
}
