"""The requester's vocabulary: how it is configured, what it is told, and what it tells.

Owns: the types that cross the border of `kvcast.protocol.requester`. Must not know: how a fetch
proceeds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

from kvcast.protocol.messages.wire import BlockId, Frame, Offer
from msgspec import structs


class Reservation(Protocol):
    """Room for one block. Whoever makes it decides what else it can do; in the end it is either
    handed on by `Fetched`, or given back by `abort`."""

    @property
    def view(self) -> memoryview:
        """The room: writable, and of exactly as many bytes as were asked for."""

    def abort(self) -> None:
        """Give the room back."""


Allocate: TypeAlias = Callable[[BlockId, int], Reservation | None]
"""Room of exactly so many bytes for a block that is about to arrive, or None."""


@dataclass(frozen=True)
class RequesterConfig:
    """Tunables of the requester."""

    max_fetches: int = 4096
    """Fetches in flight or waiting; one more is missed at once (QUEUE_FULL)."""
    max_block_bytes: int = 64 * 1024 * 1024
    """Largest block taken from the network."""
    credit_segments: int = 64
    """Segments in flight to this agent, from all homes together, without those by RDMA."""
    window_initial: int = 8
    """Segments in flight from one home, at first."""
    window_max: int = 64
    """Segments in flight from one home, at most."""
    window_shared: int = 32
    """Segments in flight from one home while readers keep step; the same for all of them.
    A reader that is held up for longer than the others take for so many falls behind for good,
    and costs a copy of each segment from then on; so it is large. What it costs: more segments
    that meet in an entry of the switch at the same time, and longer queues."""
    patience_shared_s: float = 10.0
    """While answers are shared and the home sends other segments, one of which nothing comes is
    asked for again only after so long; its turn has not come."""
    queueing_target_s: float = 0.02
    """The window stops growing while answers take so much longer than the fastest did. Within
    so much time of the first of several readers, the next ones still join its READs."""
    rto_initial_s: float = 0.15
    """Time-out before the first round-trip sample."""
    rto_min_s: float = 0.05
    """Shortest time-out; above the pauses that a home's scheduler makes."""
    rto_max_s: float = 4.0
    """Longest time-out, back-off included."""
    backoff_max: int = 4
    """A time-out doubles with each try in a row, up to so many times the first. Low, because a
    silent home should be left soon, and the window already slows a reader down."""
    patience: int = 6
    """While a home sends other segments, a segment of which nothing comes is given up to so many
    time-outs before it is asked for again; not where two of its READs were in vain already."""
    quiet_s: float = 0.05
    """A segment that has begun to arrive, and of which nothing comes for so long (or for a
    round-trip time, if that is longer), has lost its end. Longer than a home needs to serve all
    its readers in turn."""
    retry_jitter: float = 0.5
    """A time-out is stretched by a random 0 to this fraction of it. Of several readers that wait
    for one lost answer, the first then asks again, and the switch gives the answer to all."""
    reorder_min_s: float = 20e-6
    """A gap at the LAST chunk is asked for after the larger of this and a quarter of the
    round-trip time (the reordering window of RFC 8985), not at once; but within `quiet_s`."""
    swallowed_pause_s: float = 0.001
    """A READ whose wait was ended by an answer about another copy is sent again after so long."""
    tries_per_home: int = 4
    """Time-outs in a row, on one segment and without any progress, after which a home is left."""
    max_restarts: int = 3
    """How often a fetch may throw away what it has and start anew."""
    suspect_s: float = 2.0
    """For so long after a home was left for silence, new fetches start at another."""
    small_chunks_s: float = 60.0
    """For so long a home is asked for the smallest chunks only, after it said that it sends no
    larger ones, or after it was left for silence and nothing of larger ones had come: a network on
    the way may drop long frames without a word."""
    gather_ms: int = 0
    """`gather` of READs (docs/architecture.md), unless the fetch says otherwise."""
    auto_gather_max_ms: int = 20
    """Longest `gather` of READs of full segments while readers keep step. It is a
    quarter of the smoothed round-trip time, at least a millisecond, and nothing where that time is
    below half of one (before there is one, of what the fetch allows):
    readers that share answers are about as far apart as answers come late, microseconds on a fast
    network and tens of milliseconds on a crowded machine."""
    repeat_from_gather_ms: int = 10
    """A READ with which a fetch begins, and that lets its home gather for so long or longer, is
    sent twice, the second time while the home gathers: it costs a frame, and saves the segment
    that the home would have to send again for one lost READ."""
    sharing_memory_s: float = 5.0
    """Reads count as being shared for so long after a SHARED frame, in all fetches."""
    expect_wait_s: float = 0.05
    """How long a fetch that expects its group's DATA waits for some, again after each frame that
    the group gets."""
    read_padding: bool = False
    """Whether READs carry padding, as the network's profile says."""
    usable_offer_kinds: frozenset[int] = frozenset()
    """Kinds of OFFER that the caller can use. If there are any, a fetch that looks for no company
    (no gather, no group, and few answers of late were shared) reads only its first segment until
    it knows whether it gets an offer."""
    bulk_available: bool = False
    """Whether `TryBulk` may be raised."""


class MissReason(enum.Enum):
    """Why a fetch ended without the block."""

    NOT_FOUND = "not_found"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    NOT_HOME = "not_home"
    CORRUPT = "corrupt"
    WRONG_SIZE = "wrong_size"
    DIVERGED = "diverged"
    """The homes' copies differed, or changed, more often than a fetch may start anew."""
    NO_MEMORY = "no_memory"
    NO_HOME = "no_home"
    QUEUE_FULL = "queue_full"
    CANCELLED = "cancelled"
    GIVEN_UP = "given_up"
    """Of a get, and of no fetch: who asked does not wait any more."""


WORST_FIRST: Final = (
    MissReason.CORRUPT,
    MissReason.DIVERGED,
    MissReason.WRONG_SIZE,
    MissReason.UNREACHABLE,
    MissReason.OVERLOADED,
    MissReason.NOT_HOME,
    MissReason.NOT_FOUND,
)
"""Of what several homes did, the first of these is told."""

BULK_MAY_HELP: Final = frozenset(
    {
        MissReason.CORRUPT,
        MissReason.DIVERGED,
        MissReason.UNREACHABLE,
        MissReason.OVERLOADED,
    }
)


class DuplicateFetchError(ValueError):
    """The block is being fetched already; wait for that fetch (see `Requester.extend`)."""


@dataclass(slots=True)
class FetchReport:
    """How a fetch went."""

    chunks_resident: int = 0
    """Chunks that came from a switch's memory."""
    chunks_shared: int = 0
    """Chunks that came in answers to several readers."""
    chunks_plain: int = 0
    """Chunks that a home sent to this reader only."""
    chunks_written: int = 0
    """Of all of these, chunks that came by RDMA."""
    bulk: bool = False
    """The block came the bulk way, or all of it but the first segment."""
    met: bool = False
    """Its home was asked for it another way, and said that another node wants it, too."""
    reads: int = 0
    """READs sent, repeats included."""
    retries: int = 0
    """READs sent because something had not come."""
    restarts: int = 0
    """Times that the assembly was thrown away."""
    payload_bytes: int = 0
    """Bytes of blocks assembled, those thrown away for a wrong digest included."""
    first_byte_s: float | None = None
    """From the start to the first chunk."""
    elapsed_s: float = 0.0
    """From the start to the end."""

    @property
    def tier(self) -> str:
        """ "switch" if any chunk came from a switch's memory, else "shared" if any was shared,
        else "home"; "bulk" if the block came that way."""
        if self.bulk:
            return "bulk"
        if self.chunks_resident:
            return "switch"
        return "shared" if self.chunks_shared else "home"


class ReadFrames(NamedTuple):
    """READs that go to one node together, and differ in segment and tag alone."""

    first: Frame
    numbers: list[int]
    """What each says as its segment, and as its tag, the first one's included."""

    @property
    def how_many(self) -> int:
        """READs."""
        return len(self.numbers) // 2

    def frames(self) -> Iterator[Frame]:
        """Each of them."""
        for segment, tag in zip(self.numbers[::2], self.numbers[1::2], strict=True):
            yield structs.replace(self.first, segment=segment, tag=tag)


class Fetched(NamedTuple):
    """The block is complete and has its digest; `reservation` is the caller's from now on."""

    fetch_id: int
    block: BlockId
    reservation: Reservation
    size: int
    digest: int
    report: FetchReport

    @property
    def buffer(self) -> memoryview:
        """The block's bytes."""
        return self.reservation.view


class Missed(NamedTuple):
    """The fetch ended without the block."""

    fetch_id: int
    block: BlockId
    reason: MissReason
    report: FetchReport


class TryBulk(NamedTuple):
    """Fetch the block from `home` the bulk way, and call `Requester.bulk_done`. The fetch waits
    for that call, until its deadline."""

    fetch_id: int
    block: BlockId
    home: int


class OfferReceived(NamedTuple):
    """`home` offers the block, of which `digest` and `size` are chosen, another way, and nobody
    shares the reads. The first `start_bytes` of it are in `reservation`, which is the caller's from
    now on. Fetch the rest, and call `Requester.bulk_done`, as for TryBulk."""

    fetch_id: int
    block: BlockId
    home: int
    offer: Offer
    size: int
    digest: int
    reservation: Reservation
    start_bytes: int


class ProbeEnded(NamedTuple):
    """What the first segment shows says nothing of other blocks of the home, or not what was hoped
    for: others read the block too, or the home offers no other way to it, or another home is
    asked (`lacked`: since that one has not got the block)."""

    fetch_id: int
    block: BlockId
    lacked: bool = False


class WrongResident(NamedTuple):
    """A copy that came from switch memory, in part at least, has not the `digest` under which it is
    kept there. The fetch goes on."""

    block: BlockId
    digest: int


class BulkCopy(NamedTuple):
    """What came the bulk way: all bytes of the block, and their digest, which whoever received them
    has made."""

    reservation: Reservation
    digest: int


Event: TypeAlias = Fetched | Missed | TryBulk | OfferReceived | ProbeEnded | WrongResident


@dataclass(slots=True)
class RequesterCounters:
    """Totals since the requester was made."""

    reads: int = 0
    reads_retry: int = 0
    reads_again: int = 0
    """READs repeated while their home gathered, beside `reads`."""
    reads_partial: int = 0
    reads_by_write: int = 0
    """READs whose answer may come by RDMA."""
    overtaken: int = 0
    """Segments that missed the answer which other readers shared, and so left the window."""
    data: int = 0
    data_bytes: int = 0
    data_resident: int = 0
    data_shared: int = 0
    data_by_write: int = 0
    """Chunks that came by RDMA."""
    blocks_by_write: int = 0
    """Blocks of which all chunks came by RDMA."""
    duplicates: int = 0
    """DATA of a chunk that was there already."""
    unsolicited: int = 0
    """Frames about a block that is not being fetched."""
    wrong_source: int = 0
    """Frames from a node that is no home of the block, or not listened to any more."""
    other_copy: int = 0
    """DATA of another copy than the one chosen, and MISSes about another copy."""
    wrong_size: int = 0
    """DATA of a copy that is larger than allowed, or not of the size expected."""
    unexpected_op: int = 0
    """READs, which are not for a requester, and MISSes with a contradictory reason."""
    corrupt_blocks: int = 0
    """Assembled blocks whose bytes had not the chosen digest."""
    timeouts: int = 0
    gaps: int = 0
    """Segments whose LAST chunk came while others were missing."""
    misses: int = 0
    """MISS frames heeded."""
    beyond: int = 0
    """MISSes for segments that the block may not have; its size was only guessed."""
    chunks_reduced: int = 0
    """Homes that were found to send no chunks as large as were asked for."""
    overloaded: int = 0
    """MISS frames that asked for patience."""
    homes_left: int = 0
    restarts: int = 0
    no_memory: int = 0
    """DATA of blocks for which there was no room."""
    offers_received: int = 0
    """OFFERs of other ways to a block that is being fetched."""
    offers: int = 0
    """OFFERs that were taken."""
    offers_ignored: int = 0
    """OFFERs that were of no use, or not needed any more."""
    met: int = 0
    """Blocks asked for another way, of which a home said that another node wants them, too."""
    bulk_tries: int = 0
    outbox_dropped: int = 0
    """READs not sent because the caller did not take what was to be sent."""
    fetches: int = 0
    fetched: int = 0
    missed: dict[str, int] = field(default_factory=dict)
    """Missed fetches by MissReason value."""


ANSWER_OUTCOMES: Final = (
    "data",
    "duplicates",
    "unsolicited",
    "wrong_source",
    "other_copy",
    "wrong_size",
    "no_memory",
    "misses",
    "beyond",
    "offers_received",
    "unexpected_op",
)
"""The counters of which every frame received moves exactly one."""
