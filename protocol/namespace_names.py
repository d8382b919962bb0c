"""What a namespace may stand for: the texts that name its tenant, model, version and layout.

Owns: the one rule. Whoever makes a namespace holds to it; it keeps a name whole in a line of text.
What an older controller has made under another name keeps it.
"""

from __future__ import annotations

from typing import Final

MAX_NAME_CHARS: Final = 256
NAME_RULE: Final = f"1 to {MAX_NAME_CHARS} printable characters"


def is_name(text: str) -> bool:
    """Whether a tenant, model, version or layout may be called so; printable is what Unicode, and
    so `str.isprintable`, takes for that: letters of all scripts and the plain space, no control
    characters, no line ends, no surrogates."""
    return 1 <= len(text) <= MAX_NAME_CHARS and text.isprintable()
