"""The error of a state table: something happened that the table does not name.

Owns: the one name for it, for whoever keeps a state in a table. Must not know: any state or event.
"""

from __future__ import annotations


class ImpossibleEventError(AssertionError):
    """Something happened in a state in which it cannot. Whatever a peer sends, this is a mistake
    of ours."""
