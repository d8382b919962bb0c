"""Moving on to another home: which one, and what is left when there is none.

Owns: what one fetch knows of each of its homes (`TRANSITIONS`), to whom it listens, and the choice
of the next step. Must not know: segments, timers, frames; it says what to do, and
`lifecycle` does it. The order in which a fetch falls back:

1. the next home that has not been asked, with the assembly as it is;
2. a home that lives and has another copy than the chosen one: the assembly starts anew;
3. the bulk way, if there is one, from a home that may have the block;
4. a home whose bytes were wrong once more, since a bit may have flipped on the way (UDP's checksum
   is not in use);
5. a miss, for the worst of the reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from kvcast.protocol.impossible import ImpossibleEventError
from kvcast.protocol.requester.events import BULK_MAY_HELP, WORST_FIRST, MissReason
from kvcast.protocol.requester.story import Story


class Standing(IntEnum):
    """What a fetch thinks of one home."""

    UNTRIED = 0
    """Not asked yet, or not since the assembly started anew."""
    ASKED = 1
    """The home that is being asked; one at a time."""
    OTHER_COPY = 2
    """It lives, and has not the copy that is chosen."""
    LEFT = 3
    """Not worth asking; the verdict says why."""
    FORGOTTEN = 4
    """Its number stands for no node any more, or for another."""


class HomeEvent(IntEnum):
    """What can happen to a home in the eyes of a fetch."""

    ASK = 0
    """The fetch goes on at this home."""
    LACKS_COPY = 1
    """It has shown that it has not the chosen copy."""
    JUDGE = 2
    """It has shown that it cannot serve the fetch."""
    RESTART = 3
    """The assembly starts anew, with whatever copy there is."""
    FORGIVE = 4
    """Its bytes were wrong, and it gets a second chance."""
    YIELD = 6
    """Others who read the same are answered by another home: go on there."""
    FORGET = 5
    """It is no home of the block any more."""


_S, _E = Standing, HomeEvent

TRANSITIONS: Final[dict[Standing, dict[HomeEvent, Standing]]] = {
    _S.UNTRIED: {
        _E.ASK: _S.ASKED,
        _E.LACKS_COPY: _S.OTHER_COPY,
        _E.JUDGE: _S.LEFT,
        _E.RESTART: _S.UNTRIED,
        _E.FORGET: _S.FORGOTTEN,
    },
    _S.ASKED: {
        _E.YIELD: _S.UNTRIED,
        _E.LACKS_COPY: _S.OTHER_COPY,
        _E.JUDGE: _S.LEFT,
        _E.RESTART: _S.UNTRIED,
        _E.FORGET: _S.FORGOTTEN,
    },
    _S.OTHER_COPY: {
        _E.LACKS_COPY: _S.OTHER_COPY,
        _E.JUDGE: _S.LEFT,
        _E.RESTART: _S.UNTRIED,
        _E.FORGET: _S.FORGOTTEN,
    },
    _S.LEFT: {
        _E.LACKS_COPY: _S.LEFT,
        _E.JUDGE: _S.LEFT,
        _E.RESTART: _S.LEFT,
        _E.FORGIVE: _S.UNTRIED,
        _E.FORGET: _S.FORGOTTEN,
    },
    _S.FORGOTTEN: {_E.JUDGE: _S.FORGOTTEN, _E.RESTART: _S.FORGOTTEN},
}


class Move(NamedTuple):
    """Go on with the same assembly at another home."""

    home: int


class Restart(NamedTuple):
    """Throw the assembly away and begin anew, with any copy, at `home`."""

    home: int


class LastResort(NamedTuple):
    """Try the bulk way, beginning with `home`."""

    home: int


class GiveUp(NamedTuple):
    """Nobody is left."""

    reason: MissReason


Step: TypeAlias = Move | Restart | LastResort | GiveUp


class Candidates:
    """The homes of one fetch."""

    __slots__ = (
        "contributors",
        "current",
        "order",
        "other_copies",
        "sources",
        "standing",
        "story",
        "strict",
        "verdicts",
    )

    def __init__(self, order: Sequence[int], first: int, now: float, story: Story) -> None:
        self.order = tuple(dict.fromkeys(order))
        self.story = story
        self.standing = dict.fromkeys(self.order, Standing.UNTRIED)
        self.verdicts: dict[int, MissReason] = {}
        """Why homes are LEFT or FORGOTTEN."""
        self.sources: frozenset[int] = frozenset(self.order)
        """The nodes that are listened to."""
        self.strict = False
        """Whether only the home asked is listened to."""
        self.contributors: set[int] = set()
        """Whose chunks are in the assembly."""
        self.other_copies: set[int] = set()
        """Who has sent DATA of another copy than the chosen one."""
        self.current = first
        self.ask(now, first)

    def happen(self, now: float, home: int, event: HomeEvent) -> None:
        """Go to where the table leads; the one place where a standing changes."""
        before = self.standing[home]
        standing = TRANSITIONS[before].get(event)
        if standing is None:
            raise ImpossibleEventError(
                f"home {home} is {before.name}: no {event.name}\n{self.story}"
            )
        self.standing[home] = standing
        if standing is not before:
            self.story.tell((now, "home", home, event, standing))

    def ask(self, now: float, home: int) -> None:
        """Go on at `home`."""
        self.happen(now, home, HomeEvent.ASK)
        self.current = home
        if self.strict:
            self.sources = frozenset((home,))

    def yield_to(self, now: float, home: int) -> None:
        """Go on at `home` rather than where the fetch is now, which stays good for later."""
        self.happen(now, self.current, HomeEvent.YIELD)
        self.ask(now, home)

    def judge(self, now: float, home: int, verdict: MissReason) -> None:
        """`home` cannot serve this fetch."""
        self.happen(now, home, HomeEvent.JUDGE)
        self.verdicts[home] = verdict

    def lacks_copy(self, now: float, home: int) -> None:
        """`home` lives, and has not the chosen copy."""
        self.happen(now, home, HomeEvent.LACKS_COPY)

    def forget(self, now: float, home: int) -> None:
        """`home` is none any more."""
        self.happen(now, home, HomeEvent.FORGET)
        self.verdicts[home] = MissReason.UNREACHABLE
        self.order = tuple(other for other in self.order if other != home)
        self.sources -= {home}

    def restart(self, now: float) -> None:
        """No copy is chosen any more; what homes have not got of the old copy does not matter."""
        for home in self.standing:
            self.happen(now, home, HomeEvent.RESTART)
        self.contributors.clear()
        self.other_copies.clear()

    def wrong_bytes(self, now: float) -> None:
        """The assembled bytes are not those of the digest. With one contributor we know who is to
        blame; with several, the next assembly tells, since it listens to one home only."""
        if len(self.contributors) == 1:
            (culprit,) = self.contributors
            self.judge(now, culprit, MissReason.CORRUPT)
        self.strict = True

    def next_untried(self) -> int | None:
        """A home to ask: the present one if possible, else the first; None if there is none."""
        for home in (self.current, *self.order):
            if self.standing[home] is Standing.UNTRIED:
                return home
        return None

    # --- the next step ------------------------------------------------------------------------

    def next_step(self, now: float, *, may_restart: bool, bulk: bool) -> Step:
        """What to do now that the present home is of no use."""
        living = self._living()
        untried = self.next_untried()
        if untried is not None:
            return Move(untried)
        if living:
            return self._anew(now, living[0], MissReason.DIVERGED, may_restart, bulk)
        step = self._without_reads(bulk)
        if isinstance(step, GiveUp) and may_restart:
            for home in self.order:
                if self.verdicts[home] is MissReason.CORRUPT:
                    self.happen(now, home, HomeEvent.FORGIVE)
                    del self.verdicts[home]
                    return Restart(home)
        return step

    def step_after_wrong_bytes(self, now: float, *, may_restart: bool, bulk: bool) -> Step:
        """What to do now that the assembly has turned out worthless."""
        living = self._living()
        if living:
            return self._anew(now, living[0], MissReason.CORRUPT, may_restart, bulk)
        return self.next_step(now, may_restart=may_restart, bulk=bulk)

    def worst_verdict(self) -> MissReason:
        """Why the fetch ends without the block."""
        verdicts = set(self.verdicts.values())
        return next(reason for reason in WORST_FIRST if reason in verdicts)

    def _living(self) -> list[int]:
        return [home for home in self.order if home not in self.verdicts]

    def _anew(self, now: float, home: int, why: MissReason, may_restart: bool, bulk: bool) -> Step:
        """Begin anew at `home`; at the bound, give up on READs because of `why`."""
        if may_restart:
            return Restart(home)
        self.judge(now, home, why)
        return self._without_reads(bulk)

    def _without_reads(self, bulk: bool) -> LastResort | GiveUp:
        for home in self.order:
            if bulk and self.verdicts.get(home) in BULK_MAY_HELP:
                return LastResort(home)
        return GiveUp(self.worst_verdict())

    def check(self, asking: Collection[int] | None) -> None:
        """That all agrees; `asking`: the homes of segments in flight, None where the block comes
        another way."""
        for home, standing in self.standing.items():
            out = standing in (Standing.LEFT, Standing.FORGOTTEN)
            assert out == (home in self.verdicts), f"{standing.name} and the verdict of {home}"
            assert (standing is Standing.FORGOTTEN) == (home not in self.order), home
        assert self.sources <= set(self.order), f"listens to {self.sources - set(self.order)}"
        asked = [h for h, s in self.standing.items() if s is Standing.ASKED]
        if asking is not None:
            assert asked == [self.current], f"asks {self.current}, and {asked} are asked"
            assert set(asking) <= {self.current}, f"READs are out to {asking}"
