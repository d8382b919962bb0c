"""How all pictures look: fonts, colours of axes, and a figure made into a PNG.

Must not know: what is drawn. matplotlib is imported when something is drawn, not before.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


def drawn(
    fill: Callable[[Any], None],
    size: tuple[float, float],
    *,
    dpi: int,
    font_size: float = 10,
    title_size: float = 11,
) -> bytes:
    """A figure of that size (inches), once `fill` has drawn in it, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": font_size,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#94a3b8",
            "axes.titlesize": title_size,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "xtick.color": "#475569",
            "ytick.color": "#475569",
            "axes.labelcolor": "#475569",
        }
    ):
        figure = Figure(figsize=size, dpi=dpi, layout="constrained")
        fill(figure)
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": "kvcast"})
        return out.getvalue()
