"""The responder: answers READs for the blocks that a node holds.

Owns: which answer goes out next, and how fast. Must not know: sockets, clocks, where a block's
bytes lie (a lookup is handed in), or whether a switch is on the way. Follows docs/architecture.md,
"On the path, never in the way".

A caller passes on READs (`receive`), and takes what is to be sent (`answers_to_send`) whenever
`get_timer` says so: DATA not as frames but as `Answer`s, each many chunks of one segment, since
whoever sends them can make the frames faster. A READ becomes a *job*: the chunks of one segment,
for one reader, with the block held until the last of them is out. Jobs of one reader go in order,
repairs (PARTIAL) before all others; a token bucket sets the pace; and a job whose READ allows
gathering waits for its joiners first. Namespaces share what goes out by weight, and who has taken
less than its share of late goes first (`fair_queue.Shares`); within one, readers take turns.

Readers that want the same blocks, a moment apart, cost a copy each: when the second asks, the
answer has passed the switch, and they stay a moment apart until both are done. So answers to READs
that a switch has marked wait for as long as such readers are apart (`catchup`), those to readers
behind go first, and the second catches up.

What is asked for twice is sent once as long as the first answer has not gone out: a READ adds to
a job of the same reader and segment only those chunks that the job no longer has before it.
So a reader that is impatient with a busy home does not make it busier. Nor does one of a reader
group whose answer went out a moment ago: it is sent the end of that answer once more. A READ of a
full segment that a switch has marked SHARED comes from a reader to which that switch copies the
answer; so READs thus marked are answered together, whoever sent them, until the answer is out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

from kvcast.protocol.bounded_map import BoundedMap
from kvcast.protocol.fair_queue import Shares
from kvcast.protocol.lane import Answered
from kvcast.protocol.messages.roce import place_of
from kvcast.protocol.messages.wire import (
    CELLS,
    CHUNKINGS,
    CHUNKS_PER_SEGMENT,
    FLAG_LAST,
    FLAG_PARTIAL,
    FLAG_RETRY,
    FLAG_SHARED,
    FLAG_WRITE,
    MISS_CHUNK_SIZE,
    MISS_DIGEST_GONE,
    MISS_NO_WRITE,
    MISS_NOT_FOUND,
    MISS_NOT_HOME,
    MISS_OVERLOADED,
    OP_DATA,
    OP_MISS,
    OP_OFFER,
    OP_READ,
    BlockId,
    Frame,
    Offer,
    chunking_of,
    encode_offer,
    segment_index,
)
from kvcast.protocol.pacing import TokenBucket
from kvcast.protocol.responder.catchup import CatchUp, CatchUpConfig, CopyTime
from msgspec.structs import replace


class HeldBlock(Protocol):
    """A block that stays where it is until it is released."""

    @property
    def data(self) -> memoryview:
        """All bytes of the block."""

    @property
    def digest(self) -> int:
        """`wire.digest_of` of the bytes."""

    def release(self) -> None:
        """The home is done with it; called exactly once a lookup."""


_ASSURED_PART: Final = 64
_MOST_GROUP_ANSWERS: Final = 4096
"""Answers to reader groups of which it is known that they went out; of older ones repeats are
answered in full."""
_MAX_FRAMES_PER_JOB: Final = CHUNKS_PER_SEGMENT + 1  # the chunks, and an OFFER

Lookup: TypeAlias = Callable[[BlockId], HeldBlock | None]
"""The block, held, or None if the node has not got it."""
MakeOffer: TypeAlias = Callable[[BlockId, HeldBlock], Offer | None]
"""Another way to fetch the block, or None."""


@dataclass(frozen=True)
class ResponderConfig:
    """Tunables of the home."""

    rate_frames_per_s: float = 0.0
    """Frames a second to all readers together; 0 = no limit but the caller's budget."""
    burst_frames: int = 128
    """Frames that may go out at once after a pause; two segments."""
    saved_s: float = 0.5
    """A namespace that has taken less than its share goes first for as much as goes out in so long
    (at `rate_frames_per_s`; without a rate, for `saved_frames`)."""
    saved_frames: int = 4096
    turn_frames: int = 8
    """Frames to one reader before the next reader's turn."""
    max_bypass: int = 8
    """How many turns in a row may go to readers that are further behind in the same block."""
    max_jobs: int = 4096
    """Segments waiting to be sent; a READ beyond is answered by MISS OVERLOADED. So that no tenant
    takes the room of another, a 64th of it is assured to each namespace; of all together at most as
    many again."""
    max_jobs_per_reader: int = 256
    """Of them for one reader; above a reader's credit, or its READs are refused."""
    max_replies: int = 1024
    """MISSes waiting to be sent; one more is dropped, and the reader's timer takes its place."""
    max_chunk_bytes: int = CHUNKINGS[-1].chunk_bytes
    """A READ for larger chunks is answered by MISS CHUNK_SIZE: they would not leave the node."""
    repeated_s: float = 5.0
    """For so long a reader group's READ that its reader repeats is taken for impatient, and not for
    lost, once it was answered."""
    on_its_way_s: float = 0.5
    """For so long an answer to a reader group may be on its way to any of its members, whoever of
    them asks for it, and whether for the first time or not."""
    max_gather_ms: int = 255
    """Longest time for which an answer is held for joiners, whatever the READ allows."""
    heat_blocks: int = 4096
    """Blocks whose reads are counted; the one not read for longest gives way."""
    catch_up: CatchUpConfig = field(default_factory=CatchUpConfig)
    """When, and for how long, readers are held back for others to catch up."""


@dataclass(slots=True)
class ResponderCounters:
    """Totals since the home was made."""

    reads: int = 0
    """READs received. Each is answered, merged, collapsed, or ends as one of `misses` or
    `replies_dropped`."""
    reads_retry: int = 0
    reads_partial: int = 0
    reads_answered: int = 0
    """READs that got an answer of their own to be sent."""
    reads_by_lane: int = 0
    """READs that compiled code answered (`kvcast.protocol.lane`)."""
    reads_beyond_lane: int = 0
    """READs that compiled code left, since it had sent as much as may go out in one round."""
    reads_collapsed: int = 0
    """READs that asked only for what was already waiting to be sent to the same reader."""
    reads_merged: int = 0
    """READs marked by a switch that were answered together with another reader's."""
    reads_repeated: int = 0
    """READs of a reader group, among those answered, that got the last chunk alone, since all went
    out a moment ago."""
    reads_behind: int = 0
    """READs of full segments that went out to another reader a moment ago."""
    segments_held_back: int = 0
    """Answers that waited for readers behind to catch up."""
    data_frames: int = 0
    payload_bytes: int = 0
    """Block bytes sent, without headers and the last chunk's padding."""
    segments_full: int = 0
    """Answers to READs of a full segment that went out whole."""
    offers: int = 0
    misses: int = 0
    """MISS frames queued, all reasons."""
    misses_not_found: int = 0
    misses_digest_gone: int = 0
    misses_overloaded: int = 0
    misses_not_home: int = 0
    misses_chunk_size: int = 0
    misses_no_write: int = 0
    """READs that asked for RDMA where this home has none, or no switch had marked them."""
    misses_beyond: int = 0
    """MISSes for segments that a block which is here does not have."""
    replies_dropped: int = 0
    """MISSes not sent, for want of room."""
    unexpected_op: int = 0
    """Frames that are no READ."""


READ_OUTCOMES: Final = (
    "reads_answered",
    "reads_merged",
    "reads_collapsed",
    "misses",
    "replies_dropped",
)
"""The counters of which every READ received moves exactly one."""


class BlockHeat(NamedTuple):
    """How much a block was read since heat was last taken."""

    block: BlockId
    reads: int
    """READs of full segments that were answered."""
    readers: int
    """Distinct readers among them."""
    size: int
    digest: int


class Answer:
    """DATA frames of one answer, or of part of it: those of `chunks`, in order."""

    __slots__ = ("_job", "chunking", "chunks", "frame", "last", "segment")

    def __init__(self, job: _Job) -> None:
        size = job.held.data.nbytes
        self._job = job
        self.frame = Frame(
            OP_DATA,
            job.block.namespace,
            job.block.key,
            job.segment,
            job.flags | FLAG_SHARED if job.awaited else job.flags,
            job.group,
            job.held.digest,
            size,
            tag=job.tag,
        )
        """All frames, but for chunk, payload, and the last one's FLAG_LAST."""
        self.chunking = job.chunking
        """How long the chunks are."""
        index = segment_index(job.segment)
        start = job.chunking.start_of(index)
        self.segment = job.held.data[start : start + job.chunking.bytes_of(size, index)]
        """The segment's bytes, of which the caller must have made use when its thread does
        something else."""
        self.chunks = 0
        """A bitmap."""
        self.last = False
        """Whether the last frame carries FLAG_LAST."""

    def is_of(self, job: _Job) -> bool:
        """Whether chunks of this job can be added."""
        return self._job is job

    def frames(self) -> Iterator[Frame]:
        """The frames; their payloads are views of `segment`."""
        chunks, frame = self.chunks, self.frame
        while chunks:
            lowest = chunks & -chunks
            chunks ^= lowest
            chunk = lowest.bit_length() - 1
            flags = frame.flags | FLAG_LAST if self.last and not chunks else frame.flags
            start = chunk * self.chunking.chunk_bytes
            payload = self.segment[start : start + self.chunking.chunk_bytes]
            yield replace(frame, chunk=chunk, flags=flags, payload=payload)


class _Job:
    """One segment, or part of it, on its way to one reader."""

    __slots__ = (
        "awaited",
        "behind",
        "block",
        "chunking",
        "flags",
        "group",
        "held",
        "key",
        "marked",
        "offer",
        "remaining",
        "segment",
        "tag",
        "whole",
    )

    def __init__(
        self, key: _JobKey, block: BlockId, held: HeldBlock, frame: Frame, remaining: int
    ) -> None:
        self.key = key
        self.block = block
        self.held = held
        self.segment = frame.segment
        self.flags = frame.flags & (FLAG_PARTIAL | FLAG_WRITE)
        self.group = frame.group
        self.tag = frame.tag
        self.chunking = chunking_of(frame.segment)
        self.remaining = remaining  # chunks to send, as a bitmap
        self.offer: Frame | None = None  # sent before the first chunk
        self.marked = bool(frame.flags & FLAG_SHARED)
        self.awaited = False  # another node is about to READ the block
        self.behind = False  # another reader was sent the segment a moment ago
        self.whole = True  # not only its end


_JobKey: TypeAlias = tuple[int, BlockId, int, int]  # reader, block, segment, a job's flags


class _Reader:
    __slots__ = ("jobs", "queues")

    def __init__(self) -> None:
        self.queues: dict[int, deque[_Job]] = {}  # ready to be sent, by namespace
        self.jobs = 0  # ready or gathering


class _Heat:
    __slots__ = ("digest", "readers", "reads", "size")

    def __init__(self) -> None:
        self.reads = 0
        self.readers = 0  # bit i = node i has read
        self.size = 0
        self.digest = 0


class Responder:
    """See the module's description. Times are seconds on one monotonic clock of the caller's;
    readers are node indices as in the pool map."""

    def __init__(
        self,
        config: ResponderConfig,
        *,
        lookup: Lookup,
        is_home: Callable[[BlockId], bool] | None = None,
        make_offer: MakeOffer | None = None,
        is_awaited: Callable[[float, BlockId, int], bool] = lambda *_: False,
        weight_of: Callable[[int], float] = lambda _namespace: 1.0,
    ) -> None:
        """`is_home`: whether this node is a home of a block by its own pool map; with it, a READ
        that went astray is told from one for a block that is not there. `weight_of`: a
        namespace's share, as against others'. `is_awaited`: whether another node than this one is
        about to READ a block: then the answer says that it is shared, and offers no other way."""
        self._is_awaited = is_awaited
        self.config = config
        self.counters = ResponderCounters()
        self._lookup = lookup
        self._is_home = is_home
        self._make_offer = make_offer
        self._bucket = TokenBucket(config.rate_frames_per_s, config.burst_frames)
        self._replies: deque[tuple[int, Frame]] = deque()
        self._jobs: dict[_JobKey, _Job] = {}
        self._shared_jobs: dict[tuple[BlockId, int, int], _Job] = {}  # by block, segment and flags
        self.was_sent: Callable[[float, int, int], None] = lambda _now, _namespace, _bytes: None
        """Told when, and how many bytes of a namespace's blocks have gone out."""
        self.can_write = False
        """Whether answers with FLAG_WRITE, which a READ asked for, can be sent."""
        self._job_count = 0
        self._jobs_of: dict[int, int] = {}  # the same by namespace, of those that have some
        self._readers: dict[int, _Reader] = {}
        # By namespace, the readers with something of it in their queue; each has some.
        self._turns: dict[int, deque[int]] = {}
        self._shares = Shares(self._saved_frames(config.rate_frames_per_s), weight_of)
        self._ready = 0  # jobs in queues
        self._gathering: list[tuple[float, int, int, _Job]] = []  # until, sequence, reader, job
        self._sequence = 0
        self._bypassed = 0  # how often in a row the first of the turns has waited
        self._group_answers: BoundedMap[tuple[int, BlockId, int], tuple[float, int, bool]] = (
            BoundedMap(_MOST_GROUP_ANSWERS)
        )
        """When a group's READ of a segment was answered, which reader's it was, and whether a
        switch had marked it, so that the answer went to all of the group."""
        self._heat: BoundedMap[BlockId, _Heat] = BoundedMap(config.heat_blocks)
        self._catch_up = CatchUp(config.catch_up)
        self._copy_time = CopyTime()

    def receive(self, now: float, reader: int, frame: Frame) -> None:
        """Take a READ, as `wire.decode` made it, that came from node `reader`."""
        counters = self.counters
        if frame.op != OP_READ:
            counters.unexpected_op += 1
            return
        partial = frame.flags & FLAG_PARTIAL
        counters.reads += 1
        if partial:
            counters.reads_partial += 1
        elif frame.flags & FLAG_RETRY:
            counters.reads_retry += 1
        block = frame.block
        held = self._lookup(block)
        if held is None:
            astray = self._is_home is not None and not self._is_home(block)
            self._miss(reader, frame, MISS_NOT_HOME if astray else MISS_NOT_FOUND)
            return
        taken = False
        try:
            taken = self._answer(now, reader, frame, block, held)
        finally:
            if not taken:
                held.release()

    def frames_to_send(self, now: float, budget: int) -> list[tuple[int, Frame]]:
        """As `answers_to_send`, frame by frame."""
        frames: list[tuple[int, Frame]] = []
        for reader, answer in self.answers_to_send(now, budget):
            if isinstance(answer, Frame):
                frames.append((reader, answer))
            else:
                frames += [(reader, frame) for frame in answer.frames()]
        return frames

    def answers_to_send(self, now: float, budget: int) -> list[tuple[int, Frame | Answer]]:
        """At most `budget` frames to send now, each or many together with the node they go to.

        Answers hold views of the held blocks, which may be gone once the caller's thread does
        something else: send or copy them first.
        """
        self._end_gathering(now)
        waiting = len(self._replies) + _MAX_FRAMES_PER_JOB * self._ready
        allowed = self._bucket.available(now, min(budget, waiting))
        answers: list[tuple[int, Frame | Answer]] = []
        while self._replies and len(answers) < allowed:
            answers.append(self._replies.popleft())
        left = allowed - len(answers)
        while self._turns and left > 0:
            before_bytes = self.counters.payload_bytes
            namespace = self._shares.next_of(self._turns)
            turns = self._turns[namespace]
            index = self._whose_turn(namespace, turns)
            queues = self._readers[index].queues
            # Whoever is alone has one turn after the other.
            alone = not turns and len(self._turns) == 1
            turn = left if alone else min(self.config.turn_frames, left)
            count = self._take_turn(now, index, queues[namespace], turn, answers)
            self._shares.took(namespace, count)
            self.was_sent(now, namespace, self.counters.payload_bytes - before_bytes)
            left -= count
            if queues[namespace]:
                turns.append(index)
            else:
                del queues[namespace]
                if not turns:
                    del self._turns[namespace]
        self._bucket.take(allowed - left)
        self._copy_time.took(now, allowed - left, more=self._ready > 0)
        return answers

    def get_timer(self, now: float) -> float | None:
        """When `frames_to_send` will have something; None = when more READs have come."""
        times = []
        if self._replies or self._ready:
            some = min(len(self._replies) + self._ready, self.config.turn_frames)
            times.append(self._bucket.ready_at(now, some))
        if self._gathering:
            times.append(self._gathering[0][0])
        return min(times, default=None)

    def set_rate(self, now: float, rate_frames_per_s: float) -> None:
        """Go on at another pace; 0 = no limit."""
        self._bucket.set_rate(now, rate_frames_per_s)
        self._shares.credit = self._saved_frames(rate_frames_per_s)

    def sent_otherwise(self, size_bytes: int) -> None:
        """So many bytes of blocks have gone out another way over the same link: where that has a
        rate, answers make room for them. Who sends more than the link carries fills its queue for
        good, and loses whole answers there."""
        self._bucket.owe(size_bytes / CELLS.chunk_bytes)

    def _saved_frames(self, rate_frames_per_s: float) -> float:
        return self.config.saved_s * rate_frames_per_s or self.config.saved_frames

    def drop_reader(self, reader: int) -> None:
        """Forget what waits to be sent to a node that has left."""
        gone = [job for job in self._all_jobs() if job.key[0] == reader]
        for job in gone:
            self._finish(job)
        if reader in self._readers:
            self._ready -= sum(map(len, self._readers.pop(reader).queues.values()))
        for namespace, turns in list(self._turns.items()):
            if reader in turns:
                turns.remove(reader)
            if not turns:
                del self._turns[namespace]
        self._gathering = [entry for entry in self._gathering if entry[2] != reader]
        heapq.heapify(self._gathering)
        self._replies = deque(reply for reply in self._replies if reply[0] != reader)

    def close(self) -> None:
        """Forget everything that waits to be sent, and release the blocks held for it."""
        for reader in list(self._readers):
            self.drop_reader(reader)
        self._replies.clear()

    # --- the lane ---------------------------------------------------------------------------

    def lane_frames(self, now: float, budget: int) -> int:
        """How many frames, up to `budget`, may be sent by now for READs that this never sees (see
        `kvcast.protocol.lane`): none while anything waits here."""
        if self._job_count or self._replies:
            return 0
        return self._bucket.available(now, budget)

    @property
    def holds_back(self) -> bool:
        """Whether answers to marked READs wait for readers behind."""
        return self._catch_up.hold_s > 0 or self._catch_up.hold_alone_s > 0

    def answered(
        self, now: float, block: BlockId, size: int, digest: int, answered: Answered
    ) -> None:
        """A READ of a whole segment of this copy was answered by the lane."""
        counters = self.counters
        counters.reads += 1
        counters.reads_answered += 1
        counters.reads_by_lane += 1
        counters.segments_full += 1
        counters.data_frames += answered.frames
        counters.payload_bytes += answered.payload_bytes
        counters.offers += answered.offers
        self._bucket.take(answered.frames + answered.offers)
        self._shares.took(block.namespace, answered.frames + answered.offers)
        self.was_sent(now, block.namespace, answered.payload_bytes)
        cells = CELLS.segments_of(answered.payload_bytes)
        self.note_heat(answered.reader, block, size, digest, cells)
        if answered.marked:
            self._is_behind(now, answered.reader, block, answered.segment, answered.frames, size)
        self._catch_up.sent(now)

    @property
    def segments_waiting(self) -> int:
        """Answers that have not gone out, gathering ones included."""
        return self._job_count

    def take_heat(self, limit: int) -> list[BlockHeat]:
        """The `limit` blocks of which each segment was read most since the last call, most-read
        first; counting starts anew."""

        def reads_a_segment(item: tuple[BlockId, _Heat]) -> float:
            return item[1].reads / CELLS.segments_of(item[1].size)

        hottest = heapq.nlargest(limit, self._heat.items(), key=reads_a_segment)
        self._heat.clear()
        return [
            BlockHeat(block, heat.reads, heat.readers.bit_count(), heat.size, heat.digest)
            for block, heat in hottest
        ]

    def note_heat(
        self, reader: int, block: BlockId, size: int, digest: int, segments: int = 1
    ) -> None:
        """Count that `reader` was given so many segments (of the smallest chunks, as the switch
        keeps them) of a block, by READs or another way."""
        heat = self._heat[block] = self._heat.get(block) or _Heat()
        heat.reads += segments
        heat.readers |= 1 << reader
        heat.size = size
        heat.digest = digest

    # --- taking READs -----------------------------------------------------------------------

    def _answer(
        self, now: float, reader: int, frame: Frame, block: BlockId, held: HeldBlock
    ) -> bool:
        """Queue the answer to a READ of a block that is here; True if a job keeps `held`."""
        if frame.digest not in (0, held.digest):
            self._miss(reader, frame, MISS_DIGEST_GONE)
            return False
        size = held.data.nbytes
        chunking, index = chunking_of(frame.segment), segment_index(frame.segment)
        if chunking.chunk_bytes > self.config.max_chunk_bytes:
            self._miss(reader, frame, MISS_CHUNK_SIZE)
            return False
        write = frame.flags & FLAG_WRITE
        if write and not self._may_write(frame):
            self._miss(reader, frame, MISS_NO_WRITE)
            return False
        wanted = frame.wanted & chunking.bitmap(size, index)
        if not wanted:  # beyond the block: the reader thought that it was larger
            self._miss(reader, frame, MISS_NOT_FOUND, beyond=True)
            return False
        partial = frame.flags & FLAG_PARTIAL
        if not partial:
            cells = CELLS.segments_of(chunking.bytes_of(size, index))
            self.note_heat(reader, block, size, held.digest, cells)
        if partial:
            wanted = self._not_yet_coming(reader, frame, block, held, wanted)
        marked = not partial and frame.flags & FLAG_SHARED
        repeated = not partial and self._was_answered(now, reader, frame, block)
        shared = (block, frame.segment, write) if marked and not repeated else None
        if shared is not None:
            job = self._shared_jobs.get(shared)
            if job is not None and job.held.digest == held.digest:
                self.counters.reads_merged += 1
                return False
        key = (reader, block, frame.segment, partial | write)
        job = self._jobs.get(key)
        if not wanted or (job is not None and job.held.digest == held.digest):
            if job is not None and partial:
                job.remaining |= wanted
            self.counters.reads_collapsed += 1
            return False
        state = self._readers.get(reader)
        jobs_of_reader = 0 if state is None else state.jobs
        if jobs_of_reader >= self.config.max_jobs_per_reader or not self._has_room(block.namespace):
            self._miss(reader, frame, MISS_OVERLOADED)
            return False
        if state is None:
            state = self._readers[reader] = _Reader()
        if repeated:
            self.counters.reads_repeated += 1
            wanted = 1 << wanted.bit_length() - 1
        job = _Job(key, block, held, frame, wanted)
        job.whole = not repeated
        if not partial and not repeated and index == 0:
            job.awaited = not write and self._is_awaited(now, block, reader)
            # Who looks for company takes no offer (`Requester.fetch`), and would be woken for it.
            if not (job.awaited or frame.gather or frame.group):
                job.offer = self._offer(frame, block, held)
        self._jobs[key] = job
        if shared is not None:
            self._shared_jobs[shared] = job
        self._job_count += 1
        self._jobs_of[block.namespace] = self._jobs_of.get(block.namespace, 0) + 1
        self.counters.reads_answered += 1
        state.jobs += 1
        if partial:
            self._make_ready(reader, state, job)
            return True
        hold_s = min(frame.gather, self.config.max_gather_ms) / 1000
        if shared is not None and not frame.flags & FLAG_RETRY:
            job.behind = self._is_behind(
                now, reader, block, frame.segment, wanted.bit_count(), size
            )
            if not job.behind:
                until_together_s = self._catch_up.hold_of(reader, gathers=frame.gather > 0)
                if until_together_s > hold_s:
                    self.counters.segments_held_back += 1
                    hold_s = until_together_s
        if hold_s:
            self._sequence += 1
            heapq.heappush(self._gathering, (now + hold_s, self._sequence, reader, job))
        else:
            self._make_ready(reader, state, job)
        return True

    def _was_answered(self, now: float, reader: int, frame: Frame, block: BlockId) -> bool:
        """Whether a reader group's READ is asked although all of the answer has gone out: its
        reader repeats it, or it has crossed the answer to another member's.

        Where nothing comes for a while that answer is more likely to be on its way, through queues
        and past processors that have much to do, than lost as a whole. Its last chunk comes behind
        it, and ends it: what the reader lacks by then, it asks for. So impatience costs a frame,
        and not a copy for all of the group.
        """
        if not frame.group:
            return False
        answer = self._group_answers.get((frame.group, block, frame.segment))
        if answer is None:
            return False
        sent_at, asked_by, marked = answer
        if asked_by == reader and frame.flags & FLAG_RETRY:
            return now - sent_at < self.config.repeated_s
        return marked and now - sent_at < self.config.on_its_way_s

    def _has_room(self, namespace: int) -> bool:
        """Whether another segment of a namespace may wait."""
        config = self.config
        if self._job_count < config.max_jobs:
            return True
        few = self._jobs_of.get(namespace, 0) < config.max_jobs // _ASSURED_PART
        return few and self._job_count < 2 * config.max_jobs

    def _is_behind(
        self, now: float, reader: int, block: BlockId, segment: int, frames: int, size: int
    ) -> bool:
        """Whether a marked READ, whose answer is of so many frames, is behind another reader's."""
        frame_s = 1 / self._bucket.rate if self._bucket.rate else self._copy_time.frame_s
        behind = self._catch_up.read(
            now,
            reader,
            block,
            segment,
            copy_s=frame_s * frames,
            left=chunking_of(segment).segments_of(size) - segment_index(segment),
        )
        self.counters.reads_behind += behind
        return behind

    def _not_yet_coming(
        self, reader: int, frame: Frame, block: BlockId, held: HeldBlock, wanted: int
    ) -> int:
        """Of the chunks wanted, those that no full answer to the same reader still has to send."""
        for flags in (0, FLAG_WRITE):
            full = self._jobs.get((reader, block, frame.segment, flags))
            if full is not None and full.held.digest == held.digest:
                wanted &= ~full.remaining
        return wanted

    def _may_write(self, frame: Frame) -> bool:
        """Whether a switch waits for the answer to this READ, in the place that is the segment's:
        to be written, it must reach nobody else."""
        if not self.can_write or not frame.flags & FLAG_SHARED:
            return False
        return frame.tag == place_of(frame.namespace, frame.key, frame.segment).tag

    def _make_ready(self, reader: int, state: _Reader, job: _Job) -> None:
        namespace = job.block.namespace
        queue = state.queues.get(namespace)
        if queue is None:
            queue = state.queues[namespace] = deque()
            self._turns.setdefault(namespace, deque()).append(reader)
        if job.flags & FLAG_PARTIAL:  # a repair is short, and a whole segment waits for it
            queue.appendleft(job)
        else:
            queue.append(job)
        self._ready += 1

    def _end_gathering(self, now: float) -> None:
        gathering = self._gathering
        while gathering and gathering[0][0] <= now:
            _until, _sequence, reader, job = heapq.heappop(gathering)
            self._make_ready(reader, self._readers[reader], job)

    def _offer(self, frame: Frame, block: BlockId, held: HeldBlock) -> Frame | None:
        """An OFFER for a block of which there is more than the segment asked for."""
        size = held.data.nbytes
        if self._make_offer is None or chunking_of(frame.segment).segments_of(size) == 1:
            return None
        offer = self._make_offer(block, held)
        if offer is None:
            return None
        return Frame(
            OP_OFFER,
            block.namespace,
            block.key,
            frame.segment,
            group=frame.group,
            digest=held.digest,
            size=size,
            tag=frame.tag,
            payload=encode_offer(offer),
        )

    def _miss(self, reader: int, frame: Frame, reason: int, *, beyond: bool = False) -> None:
        counters = self.counters
        if len(self._replies) >= self.config.max_replies:
            counters.replies_dropped += 1
            return
        counters.misses += 1
        if beyond:
            counters.misses_beyond += 1
        elif reason == MISS_NOT_FOUND:
            counters.misses_not_found += 1
        elif reason == MISS_DIGEST_GONE:
            counters.misses_digest_gone += 1
        elif reason == MISS_NOT_HOME:
            counters.misses_not_home += 1
        elif reason == MISS_CHUNK_SIZE:
            counters.misses_chunk_size += 1
        elif reason == MISS_NO_WRITE:
            counters.misses_no_write += 1
        else:
            counters.misses_overloaded += 1
        miss = Frame(
            OP_MISS,
            frame.namespace,
            frame.key,
            frame.segment,
            frame.flags & (FLAG_PARTIAL | FLAG_WRITE),
            frame.group,
            frame.digest,
            chunk=reason,
            tag=frame.tag,
        )
        self._replies.append((reader, miss))

    # --- sending ----------------------------------------------------------------------------

    def _whose_turn(self, namespace: int, turns: deque[int]) -> int:
        """The reader of a namespace that is served next, taken out of its turns.

        Readers take turns, but of those that read the same block the one that is furthest behind
        goes first. So readers that began at different times come to want the same segments at
        the same time, and a switch on the way answers them together: in simulation, eight
        readers that begin within 2 ms of each other cost the home 1.1 instead of 2.2 copies of
        four 2 MiB blocks. Without a switch the total stays as it is. Whoever's turn it is waits
        for at most `max_bypass` others.
        """
        index = turns[0]
        if self._bypassed < self.config.max_bypass:
            head = self._readers[index].queues[namespace][0]
            for other in turns:
                job = self._readers[other].queues[namespace][0]
                if (job.segment < head.segment and job.block == head.block) or (
                    job.behind and not head.behind
                ):
                    index, head = other, job
        self._bypassed = self._bypassed + 1 if index != turns[0] else 0
        turns.remove(index)
        return index

    def _take_turn(
        self,
        now: float,
        index: int,
        queue: deque[_Job],
        turn: int,
        answers: list[tuple[int, Frame | Answer]],
    ) -> int:
        """Add up to `turn` frames of one reader's jobs; returns how many."""
        counters = self.counters
        left = turn
        while left and queue:
            job = queue[0]
            if job.offer is not None:
                answers.append((index, job.offer))
                job.offer = None
                counters.offers += 1
                left -= 1
                continue
            chunks = _lowest(job.remaining, left)
            job.remaining ^= chunks
            count = chunks.bit_count()
            left -= count
            answer = answers[-1][1] if answers else None
            if not isinstance(answer, Answer) or not answer.is_of(job):
                answer = Answer(job)
                answers.append((index, answer))
            answer.chunks |= chunks
            counters.data_frames += count
            chunk_bytes = job.chunking.chunk_bytes
            beyond = chunks.bit_length() * chunk_bytes - len(answer.segment)
            counters.payload_bytes += count * chunk_bytes - max(0, beyond)
            if not job.remaining:
                answer.last = True
                queue.popleft()
                self._ready -= 1
                if not job.flags & FLAG_PARTIAL:
                    counters.segments_full += job.whole
                    self._catch_up.sent(now)
                    if job.group and job.whole:
                        self._group_answers[job.group, job.block, job.segment] = (
                            now,
                            index,
                            job.marked,
                        )
                self._finish(job)
        return turn - left

    def _finish(self, job: _Job) -> None:
        """A job has left its queue: let go of its block."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        shared = (job.block, job.segment, job.flags)
        if self._shared_jobs.get(shared) is job:
            del self._shared_jobs[shared]
        self._job_count -= 1
        left = self._jobs_of[job.block.namespace] - 1
        if left:
            self._jobs_of[job.block.namespace] = left
        else:
            del self._jobs_of[job.block.namespace]
        reader = job.key[0]
        state = self._readers[reader]
        state.jobs -= 1
        if not state.jobs and not any(state.queues.values()):
            del self._readers[reader]
        job.held.release()

    def _all_jobs(self) -> list[_Job]:
        ready = [
            job
            for reader in self._readers.values()
            for queue in reader.queues.values()
            for job in queue
        ]
        return ready + [entry[3] for entry in self._gathering]


def _lowest(bitmap: int, count: int) -> int:
    """The `count` lowest of the bits that are set, or all."""
    if bitmap.bit_count() <= count:
        return bitmap
    rest = bitmap
    for _ in range(count):
        rest &= rest - 1
    return bitmap ^ rest
