"""Tables for people, as all commands print them.

Owns: their look. Must not know: what stands in them. rich is imported when a table is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def table_of(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    left: Sequence[str] = ("",),
) -> Table:
    """Columns are aligned right, but for those that `left` names. What is too wide goes on below;
    nothing is cut off."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    return table
