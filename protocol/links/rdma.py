"""What both ends of the RDMA link share: what they order of a network card, and who carries it out.

Owns: the orders, the interface of a card (`Verbs`), the bounds and the counters. Must not know:
which card it is (`kvcast.hostagent.network.verbs` has real ones), or why something is ordered.

Memory is safe by two rules, which the ends keep by the order of what they do: bytes of ours that
the other side may read or write are ours again only after their window is closed, or the pair is;
and bytes that our own card was told to fill are ours again only after it said that it has, or the
pair is closed. A card does nothing for a pair that is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvcast.protocol.messages.rdma import MAX_RDMA_BLOCKS, MAX_RDMA_REQUESTS, Endpoint

MAX_WINDOWS: Final = MAX_RDMA_REQUESTS * MAX_RDMA_BLOCKS
"""Open at once for one pair, at most."""


class VerbsError(Exception):
    """The card, or its driver, does not do what was ordered; the message says what and why."""


@dataclass(frozen=True)
class RdmaOptions:
    """Bounds of the RDMA link."""

    max_pairs: int = 64
    """Queue pairs of each of this node's cards, in both roles together."""
    queue_per_peer: int = 8192
    """Calls to one node that wait for their turn; one more goes by TCP."""
    posted: int = 64
    """READs and WRITEs of one pair that the card has at once."""
    connect_timeout_s: float = 2.0
    """How long a connection and its pair may take to be made."""
    idle_s: float = 60.0
    """How long a pair without a request is kept."""
    lease_s: float = 30.0
    """How long windows stay open for one request."""
    grant_bytes: int = 64 << 20
    """While several namespaces want windows of a node, so much is open for others at once, and one
    request more: a card of 400 Gb/s moves as much in the time in which windows are opened."""
    grant_wait_s: float = 0.5
    """How long a request waits for its windows while others have their turn; well below the
    `silence_s` of its caller, who then goes another way."""
    silence_s: float = 2.0
    """How long a get may wait for an answer, or for its next bytes; there is another way."""
    retry_s: float = 1.0
    """How long a node is asked by TCP after RDMA failed with it; doubled each time it fails
    again, up to `retry_max_s`."""
    retry_max_s: float = 60.0


class RdmaCounters(Protocol):
    """What the link counts, by the names of the agent's metrics."""

    rdma_requests_sent_total: int
    rdma_requests_served_total: int
    rdma_requests_held_total: int
    rdma_requests_late_total: int
    rdma_blocks_read_total: int
    rdma_blocks_written_total: int
    rdma_bytes_read_total: int
    rdma_bytes_written_total: int
    rdma_pairs_made_total: int
    rdma_pairs_broken_total: int
    rdma_refused_total: int
    rdma_calls_moved_total: int
    rdma_fallbacks_total: int
    rdma_protocol_errors_total: int
    bulk_connections_refused_total: int
    bulk_wrong_peers_total: int


# --- what an end orders of its pair ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MakePair:
    """Make this side's half."""


@dataclass(frozen=True, slots=True)
class JoinPair:
    """Connect it to the other half."""

    remote: Endpoint


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Fill `room` with what lies at that address of the other side."""

    token: int
    room: memoryview
    address: int
    key: int


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Write `data` to that address of the other side."""

    token: int
    data: memoryview
    address: int
    key: int


@dataclass(frozen=True, slots=True, eq=False)
class OpenWindow:
    """Let the other half of this pair read these bytes of ours, or write them."""

    token: int
    memory: memoryview
    writable: bool


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Let it no longer; `window`: the token of its OpenWindow."""

    token: int
    window: int


@dataclass(frozen=True, slots=True)
class ClosePair:
    """End the pair, with its windows, at once: when it is carried out, it is done."""


Work = Read | Write | OpenWindow | CloseWindow
Order = MakePair | JoinPair | Work | ClosePair


@dataclass(frozen=True, slots=True)
class Completed:
    """The card's word on one piece of work; `address` and `key` of an OpenWindow. After one that
    failed the pair does nothing more."""

    token: int
    problem: str = ""
    address: int = 0
    key: int = 0


class Pair(Protocol):
    """This side's half of a queue pair."""

    @property
    def endpoint(self) -> Endpoint: ...

    def join(self, remote: Endpoint) -> None:
        """Connect; VerbsError."""

    def post(self, work: Sequence[Work]) -> None:
        """Begin all of it, in this order; VerbsError."""

    def close(self) -> None:
        """End; never fails, and may be repeated."""


class PairMaker(Protocol):
    """Whoever chooses a network card for a pair."""

    def make_pair(self, completed: Callable[[list[Completed]], None]) -> Pair:
        """One more half; VerbsError where there are no more."""


class Verbs(PairMaker, Protocol):
    """A network card, and the memory that it has been given: all orders are about parts of it."""

    @property
    def max_transfer_bytes(self) -> int:
        """The most that one Read or Write can carry."""


class PairUser(Protocol):
    """One end of the link, as far as it has a pair."""

    def take_orders(self) -> list[Order]: ...

    def pair_made(self, now: float, endpoint: Endpoint | None) -> None:
        """The order MakePair was carried out; None = there is none to be had."""

    def completed(self, now: float, done: list[Completed]) -> None: ...

    def broken(self, now: float, problem: str) -> None:
        """The card refused an order."""

    def pair_closed(self, now: float) -> None:
        """The order ClosePair was carried out."""


class PairHolder:
    """Carries out one end's orders. `changed` is called after the card reported something."""

    def __init__(
        self,
        user: PairUser,
        verbs: PairMaker,
        time: Callable[[], float],
        changed: Callable[[], Any],
    ) -> None:
        self._user = user
        self._verbs = verbs
        self._time = time
        self._changed = changed
        self._pair: Pair | None = None

    def carry_out(self) -> bool:
        """Do what has been ordered, and what follows from that; whether there was anything."""
        any_orders = False
        while orders := self._user.take_orders():
            any_orders = True
            try:
                self._carry_out(orders)
            except VerbsError as error:
                self._user.broken(self._time(), str(error))
        return any_orders

    def _carry_out(self, orders: list[Order]) -> None:
        work: list[Work] = []
        for order in orders:
            match order:
                case MakePair():
                    self._user.pair_made(self._time(), self._made())
                case JoinPair(remote=remote):
                    if self._pair is not None:
                        self._pair.join(remote)
                case ClosePair():
                    self.close()
                    self._user.pair_closed(self._time())
                    return
                case _:
                    work.append(order)
        if work and self._pair is not None:
            self._pair.post(work)

    def _made(self) -> Endpoint | None:
        try:
            self._pair = self._verbs.make_pair(self._completed)
        except VerbsError:
            return None
        return self._pair.endpoint

    def _completed(self, done: list[Completed]) -> None:
        if self._pair is not None:
            self._user.completed(self._time(), done)
            self._changed()

    def close(self) -> None:
        """End the pair, if there is one."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()
