"""What the compiled packet loop keeps: its ports, queues, rings and buffers, as C structures.

Owns: the layout that Python and compiled code share. Must not know: what is done with it. Python
allocates these (as the ctypes mirrors of `native.subset.ctypes_of`) and sets them up before the
loop runs; from then on the loop writes them, and Python reads the counters. The exceptions are the
fields that say "set by Python", and the rings, which have one writer and one reader each.

Times are nanoseconds of the loop's clock, which starts at 0 with the switch.
"""

from __future__ import annotations

from typing import Annotated

from kvcast.native.linux import (
    EpollEvent,
    IoVec,
    MsgHdr,
    SegmentMessage,
    SockAddrIn,
    TimerSpec,
)
from kvcast.native.subset import I32, U32, U64, Inline, Ptr, Struct
from kvcast.switchsim.llvm.abi import Outbox

PRIORITIES = 8
"""Strict-priority queues of a port with a rate; 7 leaves first, as in simple_switch."""

SEGMENTS_AT_MOST = 60
SEGMENTS_BYTES = 64_000
"""What one message to a tunnel holds at most, for the kernel to split."""

PORT_NUMBERS = 512
RECEIVE_BATCH = 64
"""Frames that one system call receives at most."""

DATAGRAMS_AT_ONCE = 16
"""Messages from a tunnel that one system call receives at most: each may hold many frames."""

SEND_BATCH = 256
"""Frames of one port that wait for one system call at most."""

HEADROOM_BYTES = 64
"""Before every received frame: room to put back a VLAN tag that the kernel took off."""

FLUSH_BYTES = 256 * 1024
FLUSH_FRAMES = 1024
"""What the outbox may hold before it is sent, so that it stays in the cache."""

OUTBOX_BYTES = 16 << 20
OUTBOX_FRAMES = 16_384
"""What one frame may cause beyond that."""

NEVER = (1 << 64) - 1
"""A time that does not come; the epoch of a loop that sleeps."""

KIND_RING, KIND_UDP, KIND_UDP_LEARNING, KIND_PACKET = range(4)


class Record(Struct):
    """The head of a frame in a ring; its bytes follow, and padding up to a multiple of 8."""

    length: U32
    port: U32
    time_ns: U64


class Ring(Struct):
    """Frames between two threads: one pushes, one pops. Offsets only grow."""

    data: U64
    capacity: U64
    """Bytes; a power of two."""
    max_frames: U64
    tail: U64
    pushed: U64
    spacing: Annotated[Ptr[U64], Inline(8)]
    """Keeps what one thread writes out of the other's cache line."""
    head: U64
    popped: U64


class QueuedFrame(Struct):
    """The head of a frame that waits for its port's rate; its bytes follow."""

    next: U64
    arrival_ns: U64
    length: U64


class Queue(Struct):
    first: U64
    last: U64
    frames: U64


class PortCounters(Struct):
    """What happened at one port since it was opened; the statistics have it by these names."""

    rx_frames: U64
    rx_bytes: U64
    rx_loss: U64
    """Received frames dropped by injected loss."""
    rx_queue_drops: U64
    """Received frames that found the queue of an uplink full, or of frames from Python."""
    rx_kernel_drops: U64
    """Frames that the kernel dropped because its buffer was full."""
    rx_runts: U64
    """Received frames shorter than an Ethernet header."""
    rx_oversize: U64
    """Received frames above MAX_FRAME_BYTES."""
    rx_unsplit: U64
    """Received segments that the sender left to hardware to split (offloaded super-packets)."""
    rx_foreign: U64
    """Datagrams from somebody who is not the tunnel's peer."""
    rx_errors: U64
    tx_frames: U64
    tx_bytes: U64
    tx_loss: U64
    """Frames to send dropped by injected loss."""
    tx_queue_drops: U64
    """Frames to send that found a queue of a port with a rate full, or that of frames to Python."""
    tx_no_peer: U64
    """Frames to send before the tunnel's peer was heard of."""
    tx_too_long: U64
    """Frames that the interface or socket refused for their length (EMSGSIZE)."""
    tx_busy: U64
    """Frames dropped because the kernel's send buffer was full."""
    tx_refused: U64
    """Times that the kernel said that nobody listens at the peer's address (ICMP unreachable);
    the frames in question are among `tx_frames`."""
    tx_errors: U64


class Port(PortCounters):
    """One port."""

    number: U64
    kind: U64
    receive_fd: I32
    send_fd: I32

    local_address: U32
    """Network order, as all addresses here."""
    peer: Annotated[Ptr[SockAddrIn], Inline(1)]
    """Address 0: not known yet."""

    loss_threshold: U64
    """Loss times 2^53."""
    rx_random: U64
    tx_random: U64

    ps_per_byte: U64
    """Picoseconds a byte takes at the port's rate; 0 = no rate."""
    remainder_ps: U64
    free_at_ns: U64
    """When the frame in service has left."""
    in_service: U64
    """The frame (QueuedFrame) that the wire is taking; 0 = none."""
    depth: U64
    """Frames that each of the queues holds."""
    waiting: U64
    """Frames in all queues, the one in service included."""
    quantum_ns: U64
    """How long frames that have left may be kept to be handed over together."""
    departed: Annotated[Ptr[Queue], Inline(1)]
    """Frames that have left, and are kept for that."""
    queues: Annotated[Ptr[Queue], Inline(PRIORITIES)]

    uplink_ps_per_byte: U64
    """Picoseconds a byte takes on its way in; 0 = no rate."""
    uplink_remainder_ps: U64
    uplink_free_at_ns: U64
    """When the last of `arriving` will be here."""
    arriving: Annotated[Ptr[Queue], Inline(1)]
    """Frames on their way in; their `arrival_ns` is when the last bit will be here. At most `depth`
    of them."""

    receive_messages: Ptr[MsgHdr]
    receive_at_once: U64
    """Messages of the next receive: fewer where each holds many frames."""
    send_messages: Ptr[MsgHdr]
    send_controls: Ptr[SegmentMessage]
    segments: U64
    """1 while the kernel splits a message of a tunnel into frames of one length for us."""
    send_vectors: Ptr[IoVec]
    pending: U64
    """Frames in `send_messages` that are not sent yet."""

    packet_ring: U64
    """The mapped receive ring of an interface; 0 = none."""
    packet_ring_frames: U64
    packet_ring_stride: U64
    packet_ring_at: U64


class Loop(Struct):
    """The loop, and everything it owns."""

    processed: U64
    """Frames given to the program."""
    emitted: U64
    """Frames that the program sent to a port that exists."""
    no_such_port: U64
    no_program: U64
    """Frames that came while there was none."""
    process_errors: U64
    """Frames lost because the program failed."""
    slices: U64
    """Turns of the loop that had work."""
    busy_ns: U64

    process: U64
    context: U64
    epoch_address: U64
    """The running program (native_entry); 0 = none."""
    epoch: U64
    digests_address: U64
    digests_seen: U64

    next_process: U64
    next_context: U64
    next_epoch_address: U64
    next_digests_address: U64
    """Set by Python before it increments `swap_wanted`."""
    swap_wanted: U64
    swap_done: U64
    stop: U64
    """Set by Python."""

    now_ns: U64
    """Virtual clock; in real time, of the turn in progress."""
    clock_base_ns: U64
    """CLOCK_MONOTONIC when the loop's clock was 0."""
    timer_ns: U64
    """What the timer is set to."""

    batch: U64
    """Frames of one port in one turn, about."""
    outbox: Outbox
    ports: Ptr[Port]
    port_count: U64
    by_number: Annotated[Ptr[U32], Inline(PORT_NUMBERS)]
    """Index of a port, plus 1; 0 = there is none."""
    backlog: U64
    """Ports at which frames wait for their rate."""
    busy_uplinks: U64
    """Ports with `arriving` frames."""
    handover_ns: U64
    """When `departed` frames of some port must be handed over; NEVER = there are none."""
    pending: U64
    """1 while ports may have `pending` frames."""
    garbage: U64
    """Queued frames that can be freed once everything pending is sent."""

    inject: Ring
    """Frames from Python: packet-outs, and what comes in at in-process ports."""
    punt: Ring
    """Frames to Python: packet-ins, and what leaves at in-process ports."""

    epoll_fd: I32
    wake_fd: I32
    timer_fd: I32
    notify_fd: I32
    notified: U64
    """1 while Python has been told and has not looked yet."""
    news: U64
    """Something that Python should be told of."""
    events: Ptr[EpollEvent]
    max_events: U64
    timer: TimerSpec
    scratch: U64
    """Address of 16 bytes for system calls to write to."""
