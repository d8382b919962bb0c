"""The garbage collector of a process that serves.

A daemon holds hundreds of thousands of objects (blocks, heat, a switch's entries), hardly any of
them in a cycle. A full collection looks at all of them, for a tenth of a second and longer, while
everybody waits, and finds nothing.
"""

from __future__ import annotations

import gc
from typing import Any, Final

_YOUNG: Final = 700
_MIDDLE: Final = 10
"""The interpreter's own: what is young is looked at as often as ever."""
_OLDEST: Final = 2
_FULL: Final = 100
"""Collections of the second generation before one of all; the interpreter's own is 10. So a cycle
that has grown old and is lost waits until 700,000 objects more have come than gone, at most. One
that was still in use when that many had come is not freed at all: a few sessions and connections,
as against looking at millions of blocks each time."""


def spare_what_stays() -> None:
    """What is there now is not looked at any more, and what comes and stays seldom is."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _FULL)
    if _spare_the_rest not in gc.callbacks:
        gc.callbacks.append(_spare_the_rest)


def _spare_the_rest(phase: str, info: dict[str, Any]) -> None:
    """What a full collection has left is not looked at by the next."""
    if phase == "stop" and info["generation"] == _OLDEST:
        gc.freeze()
