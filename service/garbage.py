"""The garbage collector of a process that serves.

A daemon holds hundreds of thousands of objects (blocks, heat, a switch's entries), hardly any of
them in a cycle. A full collection looks at all of them, for a tenth of a second and longer, while
everybody waits, and finds nothing.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 700
_MIDDLE: Final = 10
"""The interpreter's own: what is young is looked at as often as ever."""
_FULL: Final = 100
"""Collections of the second generation before one of all; the interpreter's own is 10. So a cycle
that has grown old and is lost waits until 700,000 objects more have come than gone, at most."""


def spare_what_stays() -> None:
    """What is there now is not looked at any more, and what comes and stays seldom is."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _FULL)
