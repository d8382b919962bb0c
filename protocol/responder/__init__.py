"""The responder: answers READs for the blocks that a node holds."""

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
