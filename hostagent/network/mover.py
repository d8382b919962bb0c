"""The mover: the system calls around frames, in compiled code.

Owns: the buffers that datagrams are received into, how frames become datagrams (headers written in
place, payloads taken from the arena by the kernel), and the queue of those that the socket did not
take. Must not know: what a frame means, nodes and maps beyond their addresses, time, or the event
loop. What is received goes to `kvcast.protocol.placement`.

In: a round is one recvmmsg into buffers of 64 KiB, each of which the kernel may fill with a run of
datagrams of one length (UDP_GRO). How many messages it asks for follows from how many frames the
last round brought, so that a round is about `ROUND_FRAMES`.

Out: an `Answer` is chunks of one segment. Their frames are made `BATCH` at a time: the header in a
slot, the payload where the block lies. Where runs may be sent in one piece (UDP_SEGMENT) they are;
else each is a message of its own, and one sendmmsg takes the batch. READs that differ in segment
and tag alone (`ReadFrames`) are made from one of them. Frames that the socket does not take are
copied into a ring of `WAITING_FRAMES` and go before all that comes later; beyond that they are
dropped and counted.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, NamedTuple

from kvcast.native.linux import (
    EAGAIN,
    EINTR,
    MSG_DONTWAIT,
    SOL_UDP,
    UDP_GRO,
    UDP_SEGMENT,
    IoVec,
    MsgHdr,
    SegmentMessage,
    SockAddrIn,
    error_number,
    recvmmsg,
    sendmmsg,
)
from kvcast.native.subset import (
    I32,
    U8,
    U32,
    U64,
    Inline,
    Library,
    Ptr,
    Struct,
    address_of,
    bytes_at,
    copy,
    ctypes_of,
    native,
    size_of,
    unsigned,
)
from kvcast.protocol.lane import JOB, OFFER_CODE, Job
from kvcast.protocol.messages.ethernet import FRAME_OVERHEAD_BYTES, Encapsulation
from kvcast.protocol.messages.offsets import CHUNK_AT, FLAGS_AT, SEGMENT_AT, TAG_AT
from kvcast.protocol.messages.wire import (
    CHUNK_BYTES,
    CHUNKINGS,
    CHUNKS_PER_SEGMENT,
    FLAG_LAST,
    HEADER_BYTES,
    MAX_DATAGRAM_BYTES,
    OFFER_BYTES,
    Frame,
    encode,
    header_of,
)
from kvcast.protocol.placement import Piece, address_of_buffer
from kvcast.protocol.requester import ReadFrames
from kvcast.protocol.responder import Answer

ROUND_FRAMES: Final = 256
"""Frames of a round, about; one message more may come with the last of them."""
BATCH: Final = 64
"""Frames that are made before they are sent."""
WAITING_FRAMES: Final = 1024
_MESSAGES: Final = 64
_MESSAGE_BYTES: Final = 65_536
_PIECE_FRAMES: Final = 60  # the kernel's UDP_MAX_SEGMENTS was 64 for long
_PIECE_BYTES: Final = 64_000
"""What is sent in one piece: IPv4's 65,535 bytes, less headers and some."""
_LEAD: Final = FRAME_OVERHEAD_BYTES
_LEAD_ROOM: Final = 48
_SLOT_BYTES: Final = 128
"""Room for a frame's headers."""
_FLAGS_LOW_AT: Final = FLAGS_AT + 1
_RAW_BYTES: Final = BATCH * (_LEAD + MAX_DATAGRAM_BYTES)

# errno.h: what says that the kernel, or the interface, has no UDP_SEGMENT
_EIO: Final = 5
_EINVAL: Final = 22
_ENOPROTOOPT: Final = 92
_EOPNOTSUPP: Final = 95


class Peer(Struct):
    """A node that can be sent to."""

    known: U32
    padding: U32
    address: Annotated[Ptr[SockAddrIn], Inline(1)]
    leads: Annotated[Ptr[U8], Inline(240)]
    """By code of the chunks, and for an OFFER, 48 bytes: what goes in front of such a datagram, if
    frames are wrapped."""


class Made(Struct):
    """A frame that is ready to be sent."""

    node: U32
    length: U32
    vector: U32
    """The first of its parts,"""
    vectors: U32
    """and how many."""


class Moves(Struct):
    """The state of one mover."""

    fd: I32
    joins: U32
    """Whether runs of frames are sent in one piece."""
    connected: U32
    """Whether the socket has one peer, which all frames go to."""
    padding: U32
    lead: U64
    """Bytes in front of each datagram."""
    frame_bytes: U64
    """Of the longest frame."""
    received: Ptr[MsgHdr]
    pieces: Ptr[Piece]
    at_once: U64
    drained: U64
    """Whether the last round brought all that was there."""
    peers: Ptr[Peer]
    peer_count: U64
    jobs: Ptr[Job]
    made: Ptr[Made]
    made_count: U64
    vectors: Ptr[IoVec]
    vector_count: U64
    headers: U64
    zeros: U64
    messages: Ptr[MsgHdr]
    controls: Ptr[SegmentMessage]
    joined: Ptr[U64]
    """By message, its frames."""
    waiting: Ptr[Made]
    """A ring; of each only node and length count."""
    waiting_bytes: U64
    """By place of the ring, `frame_bytes` bytes."""
    waiting_first: U64
    waiting_count: U64
    sent: U64
    dropped: U64
    left: U64
    """Frames for nodes that are not known."""
    errors: U64


# --- in ---------------------------------------------------------------------------------------


@native
def receive(m: Moves) -> U32:
    """One round: how many pieces have come; 0 also after an error, which is counted."""
    m.drained = 1
    arrived = recvmmsg(m.fd, m.received, m.at_once, MSG_DONTWAIT, 0)
    if arrived < 0:
        error = error_number()
        if error not in (EAGAIN, EINTR):
            m.errors += 1
        return 0
    count = unsigned(arrived)
    m.drained = 1 if count < m.at_once else 0
    frames = 0
    for i in range(count):
        message = m.received[i]
        piece = m.pieces[i]
        piece.length = message.length
        piece.stride = 0
        if message.control_length >= size_of(SegmentMessage) - 4:
            control = SegmentMessage.at(message.control)
            if control.level == SOL_UDP and control.kind == UDP_GRO:
                piece.stride = control.length
        sender = SockAddrIn.at(message.name)
        b = bytes_at(address_of(sender) + 4)
        piece.sender = (b[0] << 24) | (b[1] << 16) | (b[2] << 8) | b[3]
        message.name_length = size_of(SockAddrIn)
        message.control_length = size_of(SegmentMessage)
        frames += 1
        if piece.stride != 0:
            frames += piece.length // piece.stride
    if frames > ROUND_FRAMES:
        m.at_once = (m.at_once + 1) // 2
    elif count == m.at_once and count < _MESSAGES:
        m.at_once = 2 * count
    return count


# --- out --------------------------------------------------------------------------------------


@native
def part(m: Moves, address: U64, length: U64) -> None:
    """Add a part to the frame that is being made."""
    vector = m.vectors[m.vector_count]
    vector.base = address
    vector.length = length
    m.vector_count += 1
    made = m.made[m.made_count]
    made.vectors += 1
    made.length += length


@native
def begin_frame(m: Moves, node: U64) -> None:
    made = m.made[m.made_count]
    made.node = node
    made.length = 0
    made.vector = m.vector_count
    made.vectors = 0


@native
def end_frame(m: Moves) -> None:
    m.made_count += 1
    if m.made_count == BATCH:
        send_or_keep(m)


@native
def make_data(m: Moves, job: Job, chunk: U64, last: U64) -> None:
    """Make the frame of one chunk."""
    at = m.headers + m.made_count * _SLOT_BYTES
    header = at + m.lead
    if m.lead != 0:
        copy(at, address_of(m.peers[job.node].leads) + job.chunk_code * _LEAD_ROOM, _LEAD)
    copy(header, address_of(job.header), HEADER_BYTES)
    b = bytes_at(header)
    b[CHUNK_AT] = chunk
    if last != 0:
        b[_FLAGS_LOW_AT] = b[_FLAGS_LOW_AT] | FLAG_LAST
    chunk_bytes = CHUNK_BYTES << job.chunk_code
    start = chunk * chunk_bytes
    length = job.length - start
    if length > chunk_bytes:
        length = 0 + chunk_bytes
    begin_frame(m, job.node)
    part(m, at, m.lead + HEADER_BYTES)
    part(m, job.address + start, length)
    if length < chunk_bytes:
        part(m, m.zeros, chunk_bytes - length)
    end_frame(m)


@native
def make_offer(m: Moves, job: Job) -> None:
    """Make the frame of an OFFER, whose payload lies where the job says."""
    at = m.headers + m.made_count * _SLOT_BYTES
    if m.lead != 0:
        copy(at, address_of(m.peers[job.node].leads) + OFFER_CODE * _LEAD_ROOM, _LEAD)
    copy(at + m.lead, address_of(job.header), HEADER_BYTES)
    copy(at + m.lead + HEADER_BYTES, job.address, OFFER_BYTES)
    begin_frame(m, job.node)
    part(m, at, m.lead + HEADER_BYTES + OFFER_BYTES)
    end_frame(m)


@native
def send(m: Moves, count: U32) -> None:
    """Send what `count` jobs say, and what was made before, or let it wait."""
    make(m, count)
    send_or_keep(m)


@native
def make_reads(
    m: Moves, node: U64, datagram: U64, length: U64, numbers: Ptr[U32], count: U64
) -> None:
    """Make READs that are as this datagram is but for their segments and tags, of which there are
    `count` pairs of numbers."""
    known = node < m.peer_count
    if known:
        known = m.peers[node].known != 0
    if not known:
        m.left += count
        return
    size = m.lead + HEADER_BYTES
    for i in range(count):
        at = m.headers + m.made_count * _SLOT_BYTES
        copy(at, datagram, size)
        b = bytes_at(at + m.lead)
        segment = 0 + numbers[2 * i]
        tag = 0 + numbers[2 * i + 1]
        b[SEGMENT_AT] = segment >> 8
        b[SEGMENT_AT + 1] = segment & 0xFF
        for j in range(4):
            b[TAG_AT + j] = (tag >> (24 - 8 * j)) & 0xFF
        begin_frame(m, node)
        part(m, at, size)
        if length > size:
            part(m, m.zeros, length - size)  # its padding
        end_frame(m)


@native
def make(m: Moves, count: U32) -> None:
    """Make the frames of `count` jobs, to be sent with what follows."""
    for i in range(count):
        job = m.jobs[i]
        known = job.node < m.peer_count
        if known:
            known = m.peers[job.node].known != 0
        if job.chunks == 0:
            if not known:
                m.left += 1
            elif job.chunk_code == OFFER_CODE:
                make_offer(m, job)
            else:
                begin_frame(m, job.node)
                part(m, job.address, job.length)
                end_frame(m)
        chunks = 0 + job.chunks
        for chunk in range(CHUNKS_PER_SEGMENT):
            bit = 1 << chunk
            if chunks & bit:
                chunks ^= bit
                if known:
                    make_data(m, job, chunk, job.last if chunks == 0 else 0)
                else:
                    m.left += 1


@native
def send_or_keep(m: Moves) -> None:
    """Be done with the frames that were made: what the socket does not take waits, and so does
    everything while something waits."""
    done = 0
    if m.waiting_count == 0:
        done = push(m)
    for i in range(done, m.made_count):
        keep(m, m.made[i])
    m.made_count = 0
    m.vector_count = 0


@native
def keep(m: Moves, frame: Made) -> None:
    if m.waiting_count == WAITING_FRAMES:
        m.dropped += 1
        return
    place = (m.waiting_first + m.waiting_count) % WAITING_FRAMES
    m.waiting_count += 1
    m.waiting[place].node = frame.node
    m.waiting[place].length = frame.length
    to = m.waiting_bytes + place * m.frame_bytes
    for i in range(frame.vectors):
        vector = m.vectors[frame.vector + i]
        copy(to, vector.base, vector.length)
        to += vector.length


@native
def send_waiting(m: Moves) -> None:
    """Send what waits, up to a batch, as far as the socket takes it."""
    while m.made_count < BATCH and m.made_count < m.waiting_count:
        place = (m.waiting_first + m.made_count) % WAITING_FRAMES
        waiting = m.waiting[place]
        known = waiting.node < m.peer_count
        if known:
            known = m.peers[waiting.node].known != 0
        if not known:
            if m.made_count != 0:
                break
            m.left += 1
            m.waiting_first = (m.waiting_first + 1) % WAITING_FRAMES
            m.waiting_count -= 1
        else:
            begin_frame(m, waiting.node)
            part(m, m.waiting_bytes + place * m.frame_bytes, waiting.length)
            m.made_count += 1
    done = push(m)
    m.waiting_first = (m.waiting_first + done) % WAITING_FRAMES
    m.waiting_count -= done
    m.made_count = 0
    m.vector_count = 0


@native
def messages_from(m: Moves, first: U64, alone: U64) -> U64:
    """Make messages of the frames from `first` on; those before `alone` are not joined."""
    count = 0
    at = 0 + first
    while at < m.made_count:
        frame = m.made[at]
        end = at + 1
        if m.joins != 0 and at >= alone:
            most = _PIECE_BYTES // frame.length
            if most > _PIECE_FRAMES:
                most = 0 + _PIECE_FRAMES
            while end < m.made_count and end - at < most:
                other = m.made[end]
                same = other.node == frame.node or m.connected != 0
                if not same or other.length != frame.length:
                    break
                end += 1
        behind = m.made[end - 1]
        message = m.messages[count]
        message.iov = address_of(m.vectors) + frame.vector * size_of(IoVec)
        message.iov_length = behind.vector + behind.vectors - frame.vector
        message.name = 0
        message.name_length = 0
        if m.connected == 0:
            message.name = address_of(m.peers[frame.node].address)
            message.name_length = size_of(SockAddrIn)
        message.control = 0
        message.control_length = 0
        if end - at > 1:
            control = m.controls[count]
            control.size = size_of(SegmentMessage) - 6  # CMSG_LEN of a u16
            control.level = SOL_UDP
            control.kind = UDP_SEGMENT
            control.length = frame.length
            message.control = address_of(control)
            message.control_length = size_of(SegmentMessage)
        m.joined[count] = end - at
        count += 1
        at = end
    return count


@native
def push(m: Moves) -> U64:
    """Send the frames that were made until the socket takes no more; how many are dealt with."""
    done = 0
    alone = 0
    while done < m.made_count:
        count = messages_from(m, done, alone)
        taken = sendmmsg(m.fd, m.messages, count, MSG_DONTWAIT)
        if taken > 0:
            for i in range(unsigned(taken)):
                done += m.joined[i]
                m.sent += m.joined[i]
        else:
            error = error_number()
            if error == EAGAIN:
                return done
            if error != EINTR:
                if m.joined[0] > 1:
                    if error in (_EIO, _EINVAL, _ENOPROTOOPT, _EOPNOTSUPP):
                        m.joins = 0
                    else:
                        m.errors += 1
                    # An error of an earlier datagram (ICMP) is reported once: most will go.
                    alone = done + m.joined[0]
                else:
                    m.errors += 1
                    done += 1
    return done


# --- Python's side ----------------------------------------------------------------------------

assert _LEAD + HEADER_BYTES + OFFER_BYTES <= _SLOT_BYTES


class Moved(NamedTuple):
    """Frames since the last time."""

    sent: int
    dropped: int
    """For want of room in the queue."""
    left: int
    """For nodes that are not known any more."""
    errors: int
    """System calls that failed."""


class _Compiled(NamedTuple):
    receive: Callable[[int], int]
    make: Callable[[int, int], None]
    make_reads: Callable[[int, int, int, int, int, int], None]
    send: Callable[[int, int], None]
    send_waiting: Callable[[int], None]


@cache
def _compiled() -> _Compiled:
    functions = (receive, make, make_reads, send, send_waiting)
    library = Library(*functions)
    return _Compiled(*(library.call(function) for function in functions))


class Mover:
    """Moves the frames of one socket, which is not blocking."""

    def __init__(self, sock: socket.socket, *, connected: bool, joins: bool) -> None:
        """`connected`: the socket has one peer, and datagrams are wrapped as Ethernet frames;
        `joins`: runs of frames may be sent in one piece."""
        self._code = _compiled()
        self._kept: list[Any] = []
        self._moves: Any = ctypes_of(Moves)()
        self.address = ctypes.addressof(self._moves)
        """Where the state lies, for compiled code that calls `receive` and `send`."""
        self._wraps: dict[int, Encapsulation] = {}
        self.maps = 0
        """How often `know` was called."""
        moves = self._moves
        moves.fd = sock.fileno()
        moves.connected = connected
        moves.joins = joins
        moves.lead = _LEAD if connected else 0
        moves.frame_bytes = _LEAD + MAX_DATAGRAM_BYTES
        self._make_receiver(moves)
        moves.made = self._array(Made, BATCH)
        moves.vectors = self._array(IoVec, 3 * BATCH)
        moves.headers = self._bytes(BATCH * _SLOT_BYTES)
        moves.zeros = self._bytes(CHUNKINGS[-1].chunk_bytes)
        moves.messages = self._array(MsgHdr, BATCH)
        moves.controls = self._array(SegmentMessage, BATCH)
        joined = (ctypes.c_uint64 * BATCH)()
        self._kept.append(joined)
        moves.joined = ctypes.addressof(joined)
        moves.waiting = self._array(Made, WAITING_FRAMES)
        moves.waiting_bytes = self._bytes(WAITING_FRAMES * moves.frame_bytes)
        self._raw = bytearray(_RAW_BYTES)
        self._raw_address = address_of_buffer(self._raw)
        self._jobs = bytearray(JOB.size * BATCH)
        self._jobs_address = moves.jobs = address_of_buffer(self._jobs)
        self.know({}, {})

    def _array(self, struct_type: type[Struct], count: int) -> int:
        array = (ctypes_of(struct_type) * count)()
        self._kept.append(array)
        return ctypes.addressof(array)

    def _bytes(self, count: int) -> int:
        """Zeros, which take no memory until they are written to."""
        memory = mmap.mmap(-1, count)
        self._kept.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def _make_receiver(self, moves: Any) -> None:
        messages = (ctypes_of(MsgHdr) * _MESSAGES)()
        self._kept.append(messages)
        vectors = self._array(IoVec, _MESSAGES)
        names = self._array(SockAddrIn, _MESSAGES)
        controls = self._array(SegmentMessage, _MESSAGES)
        buffers = self._bytes(_MESSAGES * _MESSAGE_BYTES)
        for number, message in enumerate(messages):
            vector_at = vectors + number * ctypes.sizeof(ctypes_of(IoVec))
            vector = ctypes_of(IoVec).from_address(vector_at)
            vector.base = buffers + number * _MESSAGE_BYTES
            vector.length = _MESSAGE_BYTES
            message.iov, message.iov_length = vector_at, 1
            message.name = names + number * ctypes.sizeof(ctypes_of(SockAddrIn))
            message.name_length = ctypes.sizeof(ctypes_of(SockAddrIn))
            message.control = controls + number * ctypes.sizeof(ctypes_of(SegmentMessage))
            message.control_length = ctypes.sizeof(ctypes_of(SegmentMessage))
        pieces = (ctypes_of(Piece) * _MESSAGES)()
        for piece, message in zip(pieces, messages, strict=True):
            piece.address = ctypes_of(IoVec).from_address(message.iov).base
        self._kept.append(pieces)
        self.pieces = ctypes.addressof(pieces)
        """Where the pieces of a round lie."""
        moves.received = ctypes.addressof(messages)
        moves.pieces = self.pieces
        moves.at_once = 4

    def know(
        self, addresses: Mapping[int, tuple[str, int]], wraps: Mapping[int, Encapsulation]
    ) -> None:
        """The nodes that can be sent to: their addresses, or, of a connected socket, what their
        frames are wrapped in."""
        indices = [*addresses, *wraps]
        peers = (ctypes_of(Peer) * (max(indices, default=-1) + 1))()
        for index, (host, port) in addresses.items():
            peers[index].known = 1
            address = peers[index].address[0]
            address.family = socket.AF_INET
            address.port = socket.htons(port)
            address.address = int.from_bytes(socket.inet_aton(host), "little")
        for index, wrap in wraps.items():
            peers[index].known = 1
            leads = ctypes.addressof(peers[index].leads)
            for chunking in CHUNKINGS:
                lead = wrap.wrap(bytes(HEADER_BYTES + chunking.chunk_bytes))[:_LEAD]
                ctypes.memmove(leads + chunking.code * _LEAD_ROOM, lead, _LEAD)
            lead = wrap.wrap(bytes(HEADER_BYTES + OFFER_BYTES))[:_LEAD]
            ctypes.memmove(leads + OFFER_CODE * _LEAD_ROOM, lead, _LEAD)
        self.maps += 1
        self._peers = peers
        self._wraps = dict(wraps)
        self._moves.peers = ctypes.addressof(peers)
        self._moves.peer_count = len(peers)

    def leads_of(self, length: int) -> tuple[bytearray, int]:
        """By node, what goes in front of datagrams of that length which are not DATA, and how many
        bytes that is: none where the kernel does it."""
        leads = bytearray(max(1, self._moves.lead * len(self._peers)))
        for index, wrap in self._wraps.items():
            leads[index * _LEAD : (index + 1) * _LEAD] = wrap.wrap(bytes(length))[:_LEAD]
        return leads, self._moves.lead

    def receive(self) -> int:
        """One round: how many pieces lie at `pieces` now. 0: there is nothing, or the socket has an
        error (the peer's port is closed, the interface is down), which is counted."""
        return self._code.receive(self.address)

    def send(self, answers: Sequence[tuple[int, Frame | Answer | ReadFrames]]) -> None:
        """Send frames to their nodes, or let them wait; nothing of them is needed afterwards."""
        views = []  # stay until all is sent
        raw = count = 0
        pack, jobs = JOB.pack_into, self._jobs
        for node, answer in answers:
            if count == BATCH or raw + _LEAD + MAX_DATAGRAM_BYTES > _RAW_BYTES:
                self._code.send(self.address, count)
                raw = count = 0
            if isinstance(answer, Frame):
                datagram = self._wrapped(node, answer)
                self._raw[raw : raw + len(datagram)] = datagram
                at = self._raw_address + raw
                pack(jobs, count * JOB.size, b"", node, at, len(datagram), 0, 0, 0)
                raw += len(datagram)
            elif isinstance(answer, ReadFrames):
                if count:  # they come before these
                    self._code.make(self.address, count)
                    count = 0
                datagram, numbers = self._wrapped(node, answer.first), array("I", answer.numbers)
                self._raw[raw : raw + len(datagram)] = datagram
                self._code.make_reads(
                    *(self.address, node, self._raw_address + raw, len(datagram)),
                    *(numbers.buffer_info()[0], answer.how_many),
                )
                continue
            else:
                segment = answer.segment
                views.append(segment)
                pack(
                    jobs,
                    count * JOB.size,
                    header_of(answer.frame),
                    node,
                    address_of_buffer(segment),
                    len(segment),
                    answer.chunks,
                    answer.last,
                    answer.chunking.code,
                )
            count += 1
        self._code.send(self.address, count)

    def _wrapped(self, node: int, frame: Frame) -> bytes:
        datagram = encode(frame)
        if node in self._wraps and self._moves.connected:
            return self._wraps[node].wrap(datagram)
        return datagram

    def send_jobs(self, jobs: int, count: int) -> None:
        """Send the frames of so many jobs (`kvcast.protocol.lane.Job`), at most `BATCH`, which lie
        at an address, or let them wait; nothing of them is needed afterwards."""
        moves = self._moves
        moves.jobs = jobs
        self._code.send(self.address, count)
        moves.jobs = self._jobs_address

    def send_waiting(self) -> None:
        """Send some of what waits, as far as the socket takes it."""
        self._code.send_waiting(self.address)

    @property
    def drained(self) -> bool:
        """Whether the last round brought all that was there."""
        return bool(self._moves.drained)

    @property
    def waiting(self) -> int:
        """Frames that wait for the socket."""
        count: int = self._moves.waiting_count
        return count

    @property
    def joins(self) -> bool:
        """Whether runs of frames are sent in one piece; not any more once the kernel refused."""
        return bool(self._moves.joins)

    def take_counts(self) -> Moved:
        """Frames since the last time."""
        moves = self._moves
        counts = Moved(moves.sent, moves.dropped, moves.left, moves.errors)
        moves.sent = moves.dropped = moves.left = moves.errors = 0
        return counts
