"""Adaptive: which namespaces gather, and which may have blocks in the switch, by what it brings.

Owns: the evidence by namespace, and the rule that turns each of the two *things* off and on. Must
not know: who counts, connections, slots; time is given.

- *Gathering* lets a home hold an answer for joiners, and keeps a reader from faster ways, which
  nobody can join. It pays if reads are shared (an answer went to other readers, too).
- *Residence* pays if reads come from switch memory.

Both begin on, and nothing is judged before `enough_reads`. A thing is turned off if it pays for
less than `low` of the namespace's reads, at least `dwell_s` after it was turned on. It is turned on
again in one of two cases:

- `high` of the reads are shared although gathering is off (readers meet by themselves at the
  switch). Residence has no such case: nothing comes from a memory that holds nothing.
- `rest_s` is over, and a *hint* says that it might pay. For gathering, the homes report that `hint`
  of the reads were of blocks that several nodes read within one report's time; for residence, that
  `hint` of them were of blocks that were reported before. A hint is no proof, so this is a trial.
  Each trial that fails makes the next rest twice as long, up to `longest_rest_s`.

Between `low` and `high` nothing changes: that is the hysteresis. Counts halve every `half_life_s`.
What an operator has set for a namespace (`NamespaceSettings`) goes before all this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.messages.control import NamespaceReads, NamespaceSettings

Thing = Literal["gathering", "residence"]
THINGS: Final[tuple[Thing, ...]] = ("gathering", "residence")
PERIOD_S: Final = 0.5


@dataclass(frozen=True)
class AdaptiveOptions:
    """When a thing is turned off and on; see the module's text. Shares are of remote reads."""

    enabled: bool = True
    """False: all namespaces gather and may be resident."""
    enough_reads: float = 200.0
    """Reads, decayed, before which nothing is judged."""
    low: float = 0.02
    high: float = 0.05
    hint: float = 0.2
    dwell_s: float = 10.0
    """How long a thing that was turned on stays on at least."""
    rest_s: float = 60.0
    longest_rest_s: float = 3600.0
    half_life_s: float = 30.0


class _Share:
    """A share of decayed counts: `part` of `all`."""

    def __init__(self) -> None:
        self.all = self.part = 0.0
        self._at = 0.0

    def add(self, now: float, all_: float, part: float, half_life_s: float) -> None:
        decay = 0.5 ** (max(0.0, now - self._at) / half_life_s)
        self.all, self.part, self._at = self.all * decay + all_, self.part * decay + part, now

    @property
    def share(self) -> float:
        return self.part / self.all if self.all else 0.0


@dataclass
class _Choice:
    """Whether one thing of one namespace is on, and why."""

    since: float
    rests: Backoff
    """How long it stays off before a trial."""
    on: bool = True
    why: str = "not judged yet"
    pays: _Share = field(default_factory=_Share)
    hint: _Share = field(default_factory=_Share)

    def decide(self, options: AdaptiveOptions, now: float) -> bool:
        """Judge it; returns whether it was turned off or on."""
        share, enough = self.pays.share, self.pays.all >= options.enough_reads
        if not enough:
            return False
        said = f"{share:.1%} of reads"
        if share >= options.high:
            self.rests.worked()
            self.why = f"it pays: {said}"
        if self.on and share < options.low and now - self.since >= options.dwell_s:
            return self._turn(now, f"it does not pay: {said}")
        if self.on:
            return False
        if share >= options.high:
            return self._turn(now, f"it would pay: {said} as it is")
        if self.hint.share >= options.hint and now - self.since >= self.rests.pause_s:
            self.rests.next_pause_s()
            return self._turn(now, f"a trial: it might pay {self.hint.share:.1%} of reads")
        return False

    def _turn(self, now: float, why: str) -> bool:
        self.on, self.since, self.why = not self.on, now, why
        self.pays = _Share()  # what comes next is judged by itself
        return True


@dataclass
class _Namespace:
    gathering: _Choice
    residence: _Choice

    def of(self, thing: Thing) -> _Choice:
        return self.gathering if thing == "gathering" else self.residence


class Adaptive:
    """See the module's text. `said`: an operator's settings of a namespace; None if there is no
    such namespace."""

    def __init__(
        self, options: AdaptiveOptions, said: Callable[[int], NamespaceSettings | None]
    ) -> None:
        self.options = options
        self._said = said
        self._namespaces: dict[int, _Namespace] = {}
        self._totals: dict[str, dict[int, NamespaceReads]] = {}
        """The last report of each node."""
        self._judged_at = -PERIOD_S

    # --- what is heard ----------------------------------------------------------------------

    def heard_reads(self, node_id: str, reads: Iterable[NamespaceReads], now: float) -> None:
        """Take a node's totals. Totals that fell count from zero: the node has started anew."""
        before = self._totals.get(node_id, {})
        totals = self._totals[node_id] = {
            r.namespace: r for r in reads if self._said(r.namespace) is not None
        }
        for namespace, total in totals.items():
            old = before.get(namespace)
            if old is None or old.remote > total.remote:
                old = NamespaceReads(namespace, 0, 0, 0)
            remote = total.remote - old.remote
            if not remote:
                continue
            mine = self._of(namespace, now)
            half = self.options.half_life_s
            shared = min(remote, max(0, total.shared - old.shared))
            switch = min(remote, max(0, total.switch - old.switch))
            mine.gathering.pays.add(now, remote, shared, half)
            mine.residence.pays.add(now, remote, switch, half)

    def heard_hot(self, namespace: int, reads: int, *, shared: int, again: int, now: float) -> None:
        """Take what a home reports of a namespace: its reads, how many of them were of blocks
        that several nodes read (`shared`), and how many of blocks reported before (`again`)."""
        if self._said(namespace) is None:
            return
        mine, half = self._of(namespace, now), self.options.half_life_s
        mine.gathering.hint.add(now, reads, shared, half)
        mine.residence.hint.add(now, reads, again, half)

    def node_left(self, node_id: str) -> None:
        """Forget a node's totals: they begin anew if it comes back."""
        self._totals.pop(node_id, None)

    def _of(self, namespace: int, now: float) -> _Namespace:
        found = self._namespaces.get(namespace)
        if found is None:
            new = [
                _Choice(now, Backoff(self.options.rest_s, self.options.longest_rest_s))
                for _ in THINGS
            ]
            found = self._namespaces[namespace] = _Namespace(*new)
        return found

    # --- what follows -----------------------------------------------------------------------

    def advance(self, now: float) -> set[tuple[int, Thing]]:
        """Judge everything, once in PERIOD_S; returns what has changed, as (namespace, thing)."""
        changed: set[tuple[int, Thing]] = set()
        if now < self._judged_at + PERIOD_S:
            return changed
        self._judged_at = now
        for namespace in [n for n in self._namespaces if self._said(n) is None]:
            del self._namespaces[namespace]
        if self.options.enabled:
            for namespace, mine in self._namespaces.items():
                for thing in THINGS:
                    if mine.of(thing).decide(self.options, now):
                        changed.add((namespace, thing))
        return changed

    def gathers(self, namespace: int) -> bool:
        """Whether reads of this namespace's blocks may gather."""
        return self._is_on(namespace, "gathering")

    def resides(self, namespace: int) -> bool:
        """Whether this namespace's blocks may enter the switch, as far as this module decides."""
        return self._is_on(namespace, "residence")

    def _known(self) -> list[int]:
        return [n for n in self._namespaces if self._said(n) is not None]

    def _ordered(self, namespace: int, thing: Thing) -> str:
        """What the operator has set: "on", "off", or "" for whatever pays."""
        said = self._said(namespace)
        return "" if said is None else getattr(said, thing)

    def _is_on(self, namespace: int, thing: Thing) -> bool:
        ordered = self._ordered(namespace, thing)
        if ordered:
            return ordered == "on"
        mine = self._namespaces.get(namespace)
        return mine is None or not self.options.enabled or mine.of(thing).on

    def report(self, now: float) -> list[dict[str, Any]]:
        """What is on and off, and why: a row for each namespace and thing, ready for JSON."""
        rows = []
        for namespace in sorted(self._known()):
            for thing in THINGS:
                choice = self._namespaces[namespace].of(thing)
                ordered = self._ordered(namespace, thing)
                rows.append(
                    {
                        "namespace": namespace,
                        "thing": thing,
                        "on": self._is_on(namespace, thing),
                        "why": f"an operator said {ordered}" if ordered else choice.why,
                        "since_s": round(now - choice.since, 1),
                        "pays_share": round(choice.pays.share, 4),
                        "hint_share": round(choice.hint.share, 4),
                    }
                )
        return rows
