"""Memory that several processors share, one access at a time, in an order that a seed decides.

Actors are threads of which one runs at once; before every access to memory another may go on. A
store stays in its actor's buffer for as long as the seed likes (others do not see it, the actor
does), and buffers empty in order: total store order, as on x86-64. `barrier` empties all buffers,
as membarrier(2) does. What is read or written as a slice is read or written word by word, in no
order.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import deque
from collections.abc import Callable

WORD_BYTES = 8
_PATIENCE_S = 20.0


class Stopped(BaseException):
    """The actor is killed where it stands."""


class Machine:
    """The actors, and who runs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.steps = 0
        self.errors: list[BaseException] = []
        self._actors: list[Actor] = []
        self._back = threading.Semaphore(0)

    def actor(self, name: str) -> Actor:
        actor = Actor(self, name)
        self._actors.append(actor)
        return actor

    def barrier(self) -> None:
        for actor in self._actors:
            actor.flush()

    def run(self) -> None:
        """Let the actors run, one access each, until all have ended; AssertionErrors of theirs are
        raised here."""
        for actor in self._actors:
            actor.start()
        while alive := [actor for actor in self._actors if not actor.ended]:
            self.steps += 1
            # Some run for a while before another goes on, since some races need that.
            actor = self.rng.choice(alive)
            for _ in range(self.rng.choice((1, 1, 2, 5, 30))):
                if not actor.ended:
                    self._resume(actor)
            for other in self._actors:
                if self.rng.random() < 0.3:
                    other.flush(self.rng.randrange(12))
        for actor in self._actors:
            actor.join()
        if self.errors:
            raise self.errors[0]

    def _resume(self, actor: Actor) -> None:
        actor.go.release()
        assert self._back.acquire(timeout=_PATIENCE_S), f"{actor.name} hangs"

    def waits(self, actor: Actor) -> None:
        """Called in the actor's thread: let another run."""
        self._back.release()
        actor.go.acquire()
        if actor.killed:
            raise Stopped

    def ends(self, actor: Actor) -> None:
        actor.ended = True
        self._back.release()


class Actor:
    """One processor with its store buffer."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.name = name
        self.machine = machine
        self.go = threading.Semaphore(0)
        self.ended = False
        self.killed = False
        self.what: Callable[[], None] = lambda: None
        self._stores: deque[tuple[array[int], int, int]] = deque()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self.name)
        self._thread.start()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self.go.acquire()
        try:
            self.what()
        except Stopped:
            pass
        except BaseException as error:
            self.machine.errors.append(error)
        finally:
            self.machine.ends(self)

    def step(self) -> None:
        if threading.current_thread() is self._thread:
            self.machine.waits(self)

    def flush(self, count: int = 1 << 30) -> None:
        while self._stores and count > 0:
            words, at, value = self._stores.popleft()
            words[at] = value
            count -= 1

    def load(self, words: array[int], at: int) -> int:
        self.step()
        for where, place, value in reversed(self._stores):
            if where is words and place == at:
                return value
        return words[at]

    def store(self, words: array[int], at: int, value: int) -> None:
        self.step()
        self._stores.append((words, at, value))


class Words:
    """Shared words, as one actor sees them."""

    def __init__(self, words: array[int], actor: Actor) -> None:
        self._words = words
        self._actor = actor

    def __getitem__(self, at: int | slice) -> int | array[int]:
        if isinstance(at, slice):
            places = list(range(*at.indices(len(self._words))))
            found = dict.fromkeys(places, 0)
            for place in self._actor.machine.rng.sample(places, len(places)):
                found[place] = self._actor.load(self._words, place)
            return array("Q", [found[place] for place in places])
        return self._actor.load(self._words, at)

    def __setitem__(self, at: int, value: int) -> None:
        self._actor.store(self._words, at, value)

    def release(self) -> None:
        pass


class Bytes:
    """The same memory by bytes, in slices of whole words."""

    def __init__(self, words: array[int], actor: Actor) -> None:
        self._words = words
        self._actor = actor

    def __len__(self) -> int:
        return len(self._words) * WORD_BYTES

    def cast(self, _format: str) -> Words:
        return Words(self._words, self._actor)

    def __getitem__(self, at: slice) -> bytes:
        start, stop, _ = at.indices(len(self))
        read = Words(self._words, self._actor)[start // WORD_BYTES : stop // WORD_BYTES]
        assert isinstance(read, array)
        return read.tobytes()

    def __setitem__(self, at: slice, data: bytes) -> None:
        start, _, _ = at.indices(len(self))
        values = array("Q", data)
        places = list(range(len(values)))
        for place in self._actor.machine.rng.sample(places, len(places)):
            self._actor.store(self._words, start // WORD_BYTES + place, values[place])
