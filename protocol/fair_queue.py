"""Whose turn it is: what waits for one way, shared by weights.

Owns: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), of items (`FairQueue`), of
items that use something up until they end (`BoundedQueue`), and of whatever else waits (`Shares`).
Must not know: what waits, or what way it is.

Whatever waits belongs to a flow, and costs so much. Flows that have something waiting get shares of
what is taken, in cost, in the ratio of their weights: of any two that wait all the while, what each
was given, divided by its weight, differs by no more than one item of each so divided. A flow that
comes back after a pause gets no more for having paused. Within a flow the order is that of coming.

Each flow has a time of its own at which its next item starts, and who starts first is next; to be
given an item moves the flow's time on by cost / weight. The queue's time is the start of what was
taken last, and nobody starts before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_FLOWS: Final = 1024
"""Flows of which `Shares` remembers what they have had; beyond it, those with the least to be
remembered are forgotten."""

MAX_IDLE_FLOWS: Final = 1024
"""Flows without anything waiting whose times are remembered; beyond it, those of times that are
over are forgotten, and then that which has been idle for longest."""


class Shares:
    """What flows have had of a way, and who is next; what waits is the caller's to know.

    Unlike in a `FairQueue`, a flow that takes less than its share saves up: it may be behind by up
    to `credit` (of cost, for a weight of 1), and goes first until it has had that. So who asks for
    little is answered as if nobody else were there, and who asks for much waits for its turn; over
    any longer time, shares are by weight. A flow that was not there before has saved nothing.
    """

    def __init__(
        self, credit: float = 0.0, weight_of: Callable[[int], float] = lambda _flow: 1.0
    ) -> None:
        self.credit = credit
        self.weight_of = weight_of
        self._starts: dict[int, float] = {}
        self._now = 0.0

    def next_of(self, flows: Iterable[int]) -> int:
        """Of these flows, which all wait (there is at least one), whose turn it is."""
        return min(flows, key=self._start)

    def saved(self, flow: int) -> float:
        """How much a flow can be given until it has had its share, at most its `credit`."""
        return (self._now - self._start(flow)) * self.weight_of(flow)

    def took(self, flow: int, cost: float, count: int = 1) -> None:
        """A flow was given something; `count`: so many, of that cost each, one after the other."""
        start = self._start(flow)
        each = cost / self.weight_of(flow)
        self._now = max(self._now, start + (count - 1) * each)
        self._starts[flow] = start + count * each
        if len(self._starts) > MAX_FLOWS:
            last = sorted(self._starts, key=self._starts.__getitem__)
            self._starts = {flow: self._starts[flow] for flow in last[MAX_FLOWS // 2 :]}

    def _start(self, flow: int) -> float:
        return max(self._starts.get(flow, self._now), self._now - self.credit)


class _Flow(Generic[T]):
    __slots__ = ("items", "start")

    def __init__(self, start: float) -> None:
        self.items: deque[T] = deque()
        self.start = start


class FairQueue(Generic[T]):
    """See the module's text. `flow_of` and `cost_of` an item (above 0), `weight_of` a flow (above
    0), which is asked each time."""

    def __init__(
        self,
        flow_of: Callable[[T], int],
        cost_of: Callable[[T], float],
        weight_of: Callable[[int], float] = lambda _flow: 1.0,
    ) -> None:
        self._flow_of = flow_of
        self._cost_of = cost_of
        self._weight_of = weight_of
        self._waiting: dict[int, _Flow[T]] = {}
        self._idle: dict[int, float] = {}
        """The times of flows that have nothing waiting, the longest idle first."""
        self._now = 0.0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        """All that wait, flow by flow."""
        for flow in self._waiting.values():
            yield from flow.items

    @property
    def is_contended(self) -> bool:
        """Whether more than one flow waits."""
        return len(self._waiting) > 1

    def push(self, item: T) -> None:
        """This waits, too, after all others of its flow."""
        self._flow(self._flow_of(item)).items.append(item)
        self._length += 1

    def push_front(self, items: Iterable[T]) -> None:
        """These wait, in this order, before all others of their flows; they were taken before, and
        cost as much again."""
        for item in reversed(list(items)):
            self._flow(self._flow_of(item)).items.appendleft(item)
            self._length += 1

    def next_flow(self, but: Container[int] = ()) -> int | None:
        """The flow whose turn it is, `but` these; None if nothing of others waits."""
        # Some few flows: a heap would cost more than it saves.
        waiting = self._waiting
        flows = [flow for flow in waiting if flow not in but] if but else waiting
        return min(flows, key=lambda flow: waiting[flow].start, default=None)

    def count(self, flow: int) -> int:
        """How many a flow has waiting."""
        waiting = self._waiting.get(flow)
        return len(waiting.items) if waiting is not None else 0

    def head(self, flow: int) -> T | None:
        """What a flow has waiting first; None if it has nothing."""
        waiting = self._waiting.get(flow)
        return waiting.items[0] if waiting is not None else None

    def take(self, flow: int) -> T:
        """Take the first of a flow that has something waiting."""
        waiting = self._waiting[flow]
        item = waiting.items.popleft()
        self._length -= 1
        self._now = max(self._now, waiting.start)
        waiting.start += self._cost_of(item) / self._weight_of(flow)
        if not waiting.items:
            del self._waiting[flow]
            self._rest(flow, waiting.start)
        return item

    def remove(self, over: Callable[[T], bool]) -> list[T]:
        """Take out, at no cost, those of which `over` is true."""
        removed: list[T] = []
        for number, flow in list(self._waiting.items()):
            stay: deque[T] = deque()
            for item in flow.items:
                (removed if over(item) else stay).append(item)
            flow.items = stay
            if not flow.items:
                del self._waiting[number]
                self._rest(number, flow.start)
        self._length -= len(removed)
        return removed

    def charge(self, flow: int, cost: float) -> None:
        """What a flow was given has turned out to cost so much more (or less)."""
        more = cost / self._weight_of(flow)
        waiting = self._waiting.get(flow)
        if waiting is not None:
            waiting.start = max(min(self._now, waiting.start), waiting.start + more)
        elif flow in self._idle:
            self._idle[flow] += more

    def _flow(self, number: int) -> _Flow[T]:
        waiting = self._waiting.get(number)
        if waiting is None:
            start = max(self._now, self._idle.pop(number, 0.0))
            waiting = self._waiting[number] = _Flow(start)
        return waiting

    def _rest(self, number: int, start: float) -> None:
        self._idle[number] = start
        if len(self._idle) > MAX_IDLE_FLOWS:
            self._idle = {flow: at for flow, at in self._idle.items() if at > self._now}
        if len(self._idle) > MAX_IDLE_FLOWS:
            del self._idle[next(iter(self._idle))]


class BoundedQueue(FairQueue[T]):
    """A `FairQueue` to something that is used by what was taken from it, until that ends.

    One flow alone is not held back. While several wait or use some, nothing more is to be taken
    once `bound` is used. A flow that is next and uses nothing does not wait for that: the others
    may have got much more when they were alone. `use` is the caller's to tell.
    """

    def __init__(
        self,
        bound: int,
        flow_of: Callable[[T], int],
        cost_of: Callable[[T], float],
        weight_of: Callable[[int], float] = lambda _flow: 1.0,
    ) -> None:
        super().__init__(flow_of, cost_of, weight_of)
        self._bound = bound
        self._used: dict[int, int] = {}
        """By flow, of those that use some."""
        self.used = 0
        """By all."""

    def free_flow(self) -> int | None:
        """The flow whose turn it is, if something of it may be taken now."""
        flow = self.next_flow()
        if flow is None or self.used < self._bound:
            return flow
        alone = not self.is_contended and self._used.keys() <= {flow}
        return flow if alone or flow not in self._used else None

    def use(self, flow: int, amount: int) -> None:
        """A flow uses so much more, or less."""
        left = self._used.pop(flow, 0) + amount
        if left:
            self._used[flow] = left
        self.used += amount

    def check(self, used: int) -> None:
        """AssertionError if this contradicts itself, or other than so much is used."""
        assert self.used == sum(self._used.values()) == used
        assert all(amount > 0 for amount in self._used.values())
