"""A host whose processor costs nothing: its cores, and a card that sends one frame after the other.

Owns: when the cores are asked what is to be sent, and that a home's answers wait for the card. Must
not know: what is read and when, or what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvcast.protocol.messages.ethernet import Encapsulation, Endpoint
from kvcast.protocol.messages.wire import Frame, encode
from kvcast.protocol.requester import Fetched, Missed, Requester
from kvcast.protocol.responder import Responder
from kvcast.simulation.network import Link, LinkOptions
from kvcast.simulation.world import Alarm, World
from kvcast.topologies.pool import PoolError

_CARD_FRAMES: Final = 8
"""What a card takes of the home's answers at once."""


class CardHost:
    """See the module's text. `index`: of the host among `endpoints`; `to_switch` takes what its
    cable, which is like `link`, brings to the switch; `ended` is told of gets that have ended."""

    def __init__(
        self,
        world: World,
        index: int,
        endpoints: Sequence[Endpoint],
        to_switch: Callable[[bytes], None],
        link: LinkOptions,
        requester: Requester,
        responder: Responder,
        ended: Callable[[Fetched | Missed], None],
    ) -> None:
        self.index = index
        self.requester = requester
        self.responder = responder
        self._world = world
        self._ended = ended
        self._wraps = {
            other: Encapsulation(endpoints[index], endpoint)
            for other, endpoint in enumerate(endpoints)
            if other != index
        }
        self._card = Link(
            world,
            f"{index} to switch",
            to_switch,
            lambda _link, _frame, kind: self._overrun(kind),
            link,
        )
        self._alarm = Alarm(world, self.turn)

    def turn(self) -> None:
        """Something is to be done: do it."""
        self.work()

    def work(self) -> None:
        """Let the cores decide, and give the card what it can send now."""
        now = self._world.now
        if (due := self.requester.get_timer()) is not None and due <= now:
            self.requester.handle_timer(now)
        self._send(self.requester.frames_to_send())
        if self._card.free_at <= now:
            self._send(self.responder.frames_to_send(now, _CARD_FRAMES))
        while (event := self.requester.next_event()) is not None:
            if isinstance(event, Fetched | Missed):
                self._ended(event)
        self._alarm.set(self.requester.get_timer())
        if (ready := self.responder.get_timer(now)) is not None:
            self._alarm.set(max(ready, self._card.free_at))

    def _send(self, frames: Sequence[tuple[int, Frame]]) -> None:
        for node, frame in frames:
            self._card.send(self._wraps[node].wrap(encode(frame)))

    def _overrun(self, kind: str) -> None:
        if kind == "queue_overflow":
            raise PoolError("a host sends more than its card can take: a bug")
