"""Answers for engines that ask about a block again and again until they are told whether the pool
has it (vLLM's tier, `vllm_tier`).

Owns: which blocks are to be asked about, what was answered, and that a block that could not be
loaded is not promised again to who asked for it. Must not know: engines, sockets, clocks.

An answer is kept as long as a request that asked for it is there: a promise that is broken and
then repeated makes an engine go round in a circle. That a block is not there holds for those alone
who were told so; who comes later has it asked about anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Question:
    """A block to be asked about: the number goes with its answer, the chain and the position in it
    say what it stands behind."""

    name: bytes
    number: int
    chain: str
    position: int


@dataclass(slots=True)
class _Known:
    held: bool | None = None
    generation: int = 0
    requests: set[str] = field(default_factory=set)
    without: set[str] = field(default_factory=set)
    """Those of them for whom it is not there, whatever is answered later."""


class Found:
    """Answers by block name. One thread calls it."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self._names: dict[str, set[bytes]] = {}
        self._to_ask: list[Question] = []
        self._generation = 0

    def __len__(self) -> int:
        return len(self._known)

    def ask(self, request: str, name: bytes, chain: str = "", position: int = 0) -> bool | None:
        """Whether the pool holds a block; None as long as that is not known."""
        known = self._known.setdefault(name, _Known())
        if not known.requests or (known.held is False and request not in known.requests):
            known.without |= known.requests
            known.held = None
            self._generation += 1
            known.generation = self._generation
            self._to_ask.append(Question(name, known.generation, chain, position))
        known.requests.add(request)
        self._names.setdefault(request, set()).add(name)
        return False if request in known.without else known.held

    def take_questions(self) -> list[Question]:
        """What is to be asked, each chain's blocks in order."""
        questions, self._to_ask = self._to_ask, []
        return sorted(
            (one for one in questions if self._is_open(one.name, one.number)),
            key=lambda one: (one.chain, one.position),
        )

    def _is_open(self, name: bytes, number: int) -> bool:
        known = self._known.get(name)
        return known is not None and known.generation == number and known.held is None

    def answered(self, name: bytes, number: int, held: bool) -> None:
        """The answer to a question; the first word holds, and nobody may wait for it any more."""
        if self._is_open(name, number):
            self._known[name].held = held

    def failed(self, names: Iterable[bytes]) -> None:
        """These could not be loaded: they are not there for those who have asked."""
        for name in names:
            if name in self._known:
                self._known[name].held = False

    def finished(self, request: str) -> None:
        """A request has ended; what only it has asked for is forgotten."""
        for name in self._names.pop(request, ()):
            known = self._known[name]
            known.requests.discard(request)
            known.without.discard(request)
            if not known.requests:
                del self._known[name]
