"""What either packet loop says of itself, for the statistics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LoopCounters:
    """What the loop did since it was made."""

    processed: int = 0
    """Frames given to the program."""
    emitted: int = 0
    """Frames that the program sent to a port that exists."""
    no_such_port: int = 0
    """Frames that the program sent to a port that does not."""
    process_errors: int = 0
    """Frames lost because the program failed with an exception."""
    slices: int = 0
    """Times that the loop yielded to the control plane while it had work."""
    busy_us: int = 0
    """Time spent moving and processing frames."""
