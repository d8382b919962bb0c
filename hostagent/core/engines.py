"""What engines report of prefixes that the pool held: how many they loaded, whole or in
part, and how many they computed.

Owns: the sums, and the paces (how fast they load and compute) of the engines that are connected.
Must not know: how an engine weighs (`connectors/weighing`), or who tells of it (`sessions`).
"""

from __future__ import annotations

import math
import statistics

from kvcast.protocol.messages.local import Weighed


class Engines:
    """Those of one agent. Who tells is any object, one for each engine."""

    def __init__(self) -> None:
        self._whole = self._part = self._computed = 0
        self._paces: dict[object, tuple[float, float]] = {}
        """Tokens a second that an engine loads, and computes; 0 where it does not know."""

    def told(self, engine: object, weighed: Weighed) -> int:
        """An engine has said so; of how many prefixes."""
        self._whole += weighed.whole
        self._part += weighed.part
        self._computed += weighed.computed
        paces = weighed.load_tokens_per_s, weighed.compute_tokens_per_s
        if _are_numbers(paces) and any(paces):
            self._paces[engine] = paces
        return weighed.whole + weighed.part + weighed.computed

    def left(self, engine: object) -> None:
        """An engine is gone, if it was there, and so is its pace."""
        self._paces.pop(engine, None)

    def values(self) -> dict[str, float]:
        """By name: totals since the start, and the mean paces of those that know theirs (0: none
        does)."""
        loads, computes = zip(*self._paces.values(), strict=True) if self._paces else ((), ())
        return {
            "prefixes_whole_total": float(self._whole),
            "prefixes_part_total": float(self._part),
            "prefixes_computed_total": float(self._computed),
            "prefixes_load_tokens_per_s": _mean(loads),
            "prefixes_compute_tokens_per_s": _mean(computes),
        }


def _are_numbers(paces: tuple[float, ...]) -> bool:
    return all(map(math.isfinite, paces))


def _mean(paces: tuple[float, ...]) -> float:
    known = [pace for pace in paces if pace]
    return statistics.fmean(known) if known else 0.0
