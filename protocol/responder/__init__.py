"""The responder: answers READs for the blocks that a node holds (`responder`; `catchup` says how
long an answer waits for readers behind). What needs no decision `kvcast.protocol.lane` answers.
"""

from kvcast.protocol.responder.responder import (
    READ_OUTCOMES,
    Answer,
    HeldBlock,
    Responder,
    ResponderConfig,
)

__all__ = [
    "READ_OUTCOMES",
    "Answer",
    "HeldBlock",
    "Responder",
    "ResponderConfig",
]
