"""State tables: where an event leads, and the error where it leads nowhere.

Must not know: any state or event. The requester's tables tell their story with the error, and so
look up by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class ImpossibleEventError(AssertionError):
    """Something happened in a state in which it cannot. Whatever a peer sends, this is a mistake
    of ours."""


def after(transitions: Mapping[S, Mapping[E, S]], state: S, event: E, who: object) -> S:
    """Where the table leads; ImpossibleEventError, which names `who`, if it leads nowhere."""
    found = transitions[state].get(event)
    if found is None:
        raise ImpossibleEventError(f"{who} is {state.name}: no {event.name}")
    return found
