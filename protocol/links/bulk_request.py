"""One request on a connection of the bulk link, as its caller sees it: what has been said.

Owns: what can happen to it in which state (`TRANSITIONS`), and what the callee may say when
(`ANSWERS`). Must not know: which calls it is for, or what they want.

A connection has one request at a time, and begins another when that has ended. That it is closed is
no state of the request's: whoever closes it ends the calls.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from kvcast.protocol.messages.bulk import BulkBlocks, BulkDone, BulkGo, BulkHeld, BulkTaken


class RequestState(Enum):
    """Where a request stands."""

    CONNECTING = "connecting"
    """Its connection is being made."""
    IDLE = "idle"
    """There is none."""
    ASKED = "asked"
    """The callee has said nothing yet."""
    FOLLOWED = "followed"
    """The same, of a put whose blocks follow it unasked."""
    SENT = "sent"
    """A put whose blocks were wanted, and have been sent."""
    ANSWERED = "answered"
    """A get, of which some blocks are not there."""
    GIVEN = "given"
    """A get, of which some blocks have come, or are coming."""


class RequestEvent(Enum):
    """What can happen to a request."""

    ASK = "ask"
    PUT_AHEAD = "put ahead"
    """Ask, and send the blocks unasked."""
    GO = "go"
    """The callee wants blocks of a put, or none of them."""
    REFUSE = "refuse"
    """It gives none of the blocks that it answers for."""
    GIVE = "give"
    END = "end"
    """All calls have ended well enough for the connection to be kept."""


_S, _E = RequestState, RequestEvent

TRANSITIONS: Final[dict[RequestState, dict[RequestEvent, RequestState]]] = {
    _S.CONNECTING: {_E.ASK: _S.ASKED, _E.PUT_AHEAD: _S.FOLLOWED},
    _S.IDLE: {_E.ASK: _S.ASKED, _E.PUT_AHEAD: _S.FOLLOWED},
    _S.ASKED: {
        _E.GO: _S.SENT,
        _E.REFUSE: _S.ANSWERED,
        _E.GIVE: _S.GIVEN,
        _E.END: _S.IDLE,
    },
    _S.FOLLOWED: {_E.END: _S.IDLE},
    _S.SENT: {_E.END: _S.IDLE},
    _S.ANSWERED: {_E.REFUSE: _S.ANSWERED, _E.GIVE: _S.GIVEN, _E.END: _S.IDLE},
    _S.GIVEN: {_E.REFUSE: _S.GIVEN, _E.GIVE: _S.GIVEN, _E.END: _S.IDLE},
}

UNANSWERED: Final = frozenset({_S.ASKED, _S.FOLLOWED})
"""The callee may never have had the request: it can be made again elsewhere."""

ANSWERS: Final[dict[RequestState, tuple[type[Any], ...]]] = {
    _S.CONNECTING: (),
    _S.IDLE: (),
    _S.ASKED: (BulkDone, BulkGo, BulkHeld, BulkBlocks),
    _S.FOLLOWED: (BulkDone, BulkTaken),
    _S.SENT: (BulkTaken,),
    _S.ANSWERED: (BulkDone, BulkBlocks),
    _S.GIVEN: (BulkDone, BulkBlocks),
}
"""Which of them are answers to what was asked is for the conversation to say."""
