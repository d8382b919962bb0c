"""What runs a program, as everybody else sees it: frames in, frames out, and a control plane.

Owns: the interface that packet loops, the P4Runtime server, STF, the differential test and the
simulation use. Must not know: the engines. There are two: `reference.switch.Switch` interprets, and
is the oracle of `llvm.switch.CompiledSwitch`, which runs machine code; neither knows the other.

An engine opens nothing and reads no clock: `process` takes the present time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from kvcast.switchsim.control_plane.externs import CounterArray, MeterArray, RegisterArray
from kvcast.switchsim.control_plane.switch import CloneSession, Digest, SwitchStats
from kvcast.switchsim.control_plane.tables import Profile, Table
from kvcast.switchsim.ir import Program

EngineName: TypeAlias = Literal["llvm", "reference"]


class Engine(Protocol):
    """A switch without ports or clock."""

    drop_port: int
    program: Program | None
    tables: dict[str, Table]
    counters: dict[str, CounterArray]
    """Indirect counters; direct ones are in the entries of their tables."""
    meters: dict[str, MeterArray]
    registers: dict[str, RegisterArray]
    action_profiles: dict[str, Profile]
    multicast_groups: dict[int, list[tuple[int, int]]]
    """(port, replication id) of each group; change it with the methods below."""
    clone_sessions: dict[int, CloneSession]
    stats: SwitchStats
    """Counts since the switch was made."""

    # --- the control plane ------------------------------------------------------------------

    def load(self, program: Program) -> None:
        """Run this program from now on; all state of the one before is gone.

        If the program cannot be run, an error says so and the present one stays.
        """

    def set_multicast_group(self, group: int, replicas: Sequence[tuple[int, int]]) -> None:
        """Create or replace a group. Copies leave in the order given: (port, rid)."""

    def delete_multicast_group(self, group: int) -> None: ...

    def set_clone_session(
        self, session: int, replicas: Sequence[tuple[int, int]], packet_length_bytes: int = 0
    ) -> None:
        """Create or replace a session: where clones go, and how much of them (0: all)."""

    def delete_clone_session(self, session: int) -> None: ...

    def take_digests(self) -> list[Digest]:
        """All digests since the last call, oldest first."""

    # --- the data plane ---------------------------------------------------------------------

    def process(self, port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        """Run one frame to completion, with all clones, copies and further passes.

        Gives (port, frame) for what leaves, in order. Never raises for what is in a frame.
        """
