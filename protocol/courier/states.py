"""Where a question stands, and what may come after that.

Owns: the states, the table of their changes (`TRANSITIONS`), and the only function that makes one
(`become`). Must not know: why a state changes.

A question waits, until `Asked.until_ns`, and then:

| state | waits for | if it waits in vain |
|---|---|---|
| ASKED | anything, as long as its home may take | it is handed over: SILENCE |
| RECEIVING | more, as long | what is missing is asked for, `MOST_REPAIRS` times; then GAP |
| GAPPED | chunks that are late, a moment | the same |
| UNOFFERED | an OFFER that is late, a moment | NOT_OFFERED |
| FOLLOWING | the first of its batch | it ends as that one does |
| ORDERED, CONVEYED | the conveyor (`Taker.until_ns`) | all that it was to bring: CUT_OFF |
| JOINED | the question that it waits with | it ends as that one does |

Nothing waits longer than its client does: DEADLINE.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, Final

from kvcast.native.subset import U64, native
from kvcast.protocol.courier.structures import Asked, Courier


class AskedState(IntEnum):
    """Where a question stands."""

    FREE = 0
    """There is none of this number."""
    ASKED = 1
    """Its READ is out, or about to leave, and nothing has come."""
    RECEIVING = 2
    """Some of the block's first segment is there, and the end of the answer is not."""
    GAPPED = 3
    """The answer has ended, and chunks are missing, unless they are only late."""
    UNOFFERED = 4
    """The first segment is there, nobody shares it, and no other way to the rest was offered."""
    FOLLOWING = 5
    """It waits for what the first of its batch from the same home finds out."""
    ORDERED = 6
    """A conveyor is to bring all of it; how much that is, and so where it goes, is not known."""
    CONVEYED = 7
    """A conveyor is to bring the rest of it, or all, to its landing place."""
    JOINED = 8
    """It waits for another's answer."""


_S = AskedState
TRANSITIONS: Final[dict[AskedState, frozenset[AskedState]]] = {
    _S.FREE: frozenset({_S.ASKED, _S.FOLLOWING, _S.JOINED}),
    _S.ASKED: frozenset({_S.RECEIVING, _S.FREE}),
    _S.RECEIVING: frozenset({_S.RECEIVING, _S.GAPPED, _S.UNOFFERED, _S.CONVEYED, _S.FREE}),
    _S.GAPPED: frozenset({_S.RECEIVING, _S.GAPPED, _S.UNOFFERED, _S.CONVEYED, _S.FREE}),
    _S.UNOFFERED: frozenset({_S.CONVEYED, _S.FREE}),
    _S.FOLLOWING: frozenset({_S.ORDERED, _S.FREE}),
    _S.ORDERED: frozenset({_S.CONVEYED, _S.FREE}),
    _S.CONVEYED: frozenset({_S.FREE}),
    _S.JOINED: frozenset({_S.FREE}),
}
"""Which states may come after which. All end as FREE: answered, or handed over."""


@native
def become(courier: Courier, asked: Asked, state: U64) -> None:
    """A question's state changes. What TRANSITIONS does not name is a mistake of ours: Python hears
    of it (`impossible`)."""
    if (courier.may_become[asked.state] >> state) & 1 == 0:
        courier.impossible = (1 << 16) | (asked.state << 8) | state
    asked.state = state


@native
def has_copy(asked: Asked) -> bool:
    """Whether DATA of its block is put in its place."""
    return asked.state in (AskedState.RECEIVING, AskedState.GAPPED, AskedState.UNOFFERED)


@native
def is_conveyed(asked: Asked) -> bool:
    """Whether a conveyor is to bring its block."""
    return asked.state in (AskedState.ORDERED, AskedState.CONVEYED)


def transition_bits() -> Any:
    """TRANSITIONS as `Courier.may_become` has them."""
    rows = (sum(1 << after for after in TRANSITIONS[state]) for state in AskedState)
    return (ctypes.c_uint32 * len(AskedState))(*rows)
