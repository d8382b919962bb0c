"""What runs a program, as everybody else sees it: frames in, frames out, and a control plane.

Owns: the interface that packet loops, the P4Runtime server, STF, the differential test and the
simulation use, and what a switch keeps for its controller beside tables and externs: multicast
groups, clone sessions, digests as messages, counts, and their bounds. Must not know: how packets
are processed. There are two engines: `reference.switch.Switch` interprets, and is the oracle of
`llvm.switch.CompiledSwitch`, which runs machine code; neither knows the other.

An engine opens nothing and reads no clock: `process` takes the present time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from kvcast.switchsim.control_plane.externs import CounterArray, MeterArray, RegisterArray
from kvcast.switchsim.control_plane.tables import Profile, Table
from kvcast.switchsim.ir import Program

EngineName: TypeAlias = Literal["llvm", "reference"]

MAX_GROUP = 32767
"""Highest multicast group and clone session, as in BMv2."""

MAX_PORT = 511
"""A port is a bit<9>."""
MAX_REPLICAS = 4096
"""Replicas of one group or session."""


class ReplicationError(ValueError):
    """A multicast group or clone session that the switch refuses."""


@dataclass(frozen=True, slots=True)
class Digest:
    """One message of the data plane to the control plane.

    `name` is the learn list's in the JSON file; `fields` and `widths` (bits) are parallel.
    """

    name: str
    fields: tuple[int, ...]
    widths: tuple[int, ...]


@dataclass
class SwitchStats:
    """Counts since the switch was made. `dropped_*` are frames that went no further."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    dropped_no_program: int = 0
    dropped_ingress: int = 0
    dropped_egress: int = 0
    dropped_recirculation_bound: int = 0
    dropped_unknown_group: int = 0
    dropped_priority: int = 0
    dropped_abandoned: int = 0
    dropped_unknown_port: int = 0
    """For the ports' adapter to count: the program chose a port that does not exist."""
    parser_errors: int = 0
    checksum_errors: int = 0
    unknown_clone_session: int = 0
    index_out_of_range: int = 0
    ingress_passes: int = 0
    egress_passes: int = 0
    resubmitted: int = 0
    recirculated: int = 0
    cloned: int = 0
    digests: int = 0
    digests_overflowed: int = 0

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class CloneSession:
    replicas: tuple[tuple[int, int], ...]
    packet_length_bytes: int
    """0: the whole packet."""


class Engine(ABC):
    """A switch without ports or clock."""

    def __init__(self, *, drop_port: int, digest_queue_size: int) -> None:
        self.drop_port = drop_port
        self.program: Program | None = None
        self.stats = SwitchStats()
        self.tables: dict[str, Table] = {}
        self.counters: dict[str, CounterArray] = {}
        """Indirect counters; direct ones are in the entries of their tables."""
        self.meters: dict[str, MeterArray] = {}
        self.registers: dict[str, RegisterArray] = {}
        self.action_profiles: dict[str, Profile] = {}
        self.multicast_groups: dict[int, list[tuple[int, int]]] = {}
        """(port, replication id) of each group; change it with the methods below."""
        self.clone_sessions: dict[int, CloneSession] = {}
        self._digest_queue_size = digest_queue_size

    @abstractmethod
    def load(self, program: Program) -> None:
        """Run this program from now on; all state of the one before is gone.

        If the program cannot be run, an error says so and the present one stays.
        """

    @abstractmethod
    def take_digests(self) -> list[Digest]:
        """All digests since the last call, oldest first."""

    @abstractmethod
    def process(self, port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        """Run one frame to completion, with all clones, copies and further passes.

        Gives (port, frame) for what leaves, in order. Never raises for what is in a frame.
        """

    def _adopt(
        self,
        program: Program,
        tables: Mapping[str, Table],
        registers: Sequence[RegisterArray],
        counters: Sequence[CounterArray | None],
        meters: Sequence[MeterArray | None],
        profiles: Sequence[Profile],
    ) -> None:
        """The control plane is this program's from now on; of the one before nothing stays.
        Direct counters and meters (None) are in the entries of their tables."""
        self.program = program
        self.tables = dict(tables)
        self.counters = {c.name: c for c in counters if c is not None}
        self.meters = {m.name: m for m in meters if m is not None}
        self.registers = {r.name: r for r in registers}
        self.action_profiles = {a.name: a for a in profiles}
        self.multicast_groups = {}
        self.clone_sessions = {}

    def set_multicast_group(self, group: int, replicas: Sequence[tuple[int, int]]) -> None:
        """Create or replace a group. Copies leave in the order given: (port, rid)."""
        if not 1 <= group <= MAX_GROUP:
            raise ReplicationError(f"multicast group {group} is not in 1..{MAX_GROUP}")
        self.multicast_groups[group] = _replicas(replicas)
        self._group_changed(group)

    def delete_multicast_group(self, group: int) -> None:
        if group not in self.multicast_groups:
            raise ReplicationError(f"there is no multicast group {group}")
        del self.multicast_groups[group]
        self._group_changed(group)

    def set_clone_session(
        self, session: int, replicas: Sequence[tuple[int, int]], packet_length_bytes: int = 0
    ) -> None:
        """Create or replace a session: where clones go, and how much of them (0: all)."""
        if not 0 <= session <= MAX_GROUP:
            raise ReplicationError(f"clone session {session} is not in 0..{MAX_GROUP}")
        if packet_length_bytes < 0:
            raise ReplicationError(f"a clone cannot have {packet_length_bytes} bytes")
        self.clone_sessions[session] = CloneSession(tuple(_replicas(replicas)), packet_length_bytes)
        self._session_changed(session)

    def delete_clone_session(self, session: int) -> None:
        if session not in self.clone_sessions:
            raise ReplicationError(f"there is no clone session {session}")
        del self.clone_sessions[session]
        self._session_changed(session)

    def _group_changed(self, group: int) -> None:  # noqa: B027
        """For an engine that keeps groups elsewhere, too."""

    def _session_changed(self, session: int) -> None:  # noqa: B027
        """For an engine that keeps sessions elsewhere, too."""


def _replicas(replicas: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(replicas) > MAX_REPLICAS:
        raise ReplicationError(f"{len(replicas)} replicas; at most {MAX_REPLICAS} are possible")
    for port, rid in replicas:
        if not 0 <= port <= 0x1FF or not 0 <= rid <= 0xFFFF:
            raise ReplicationError(f"a replica cannot be (port {port}, rid {rid})")
    return [(port, rid) for port, rid in replicas]
