"""From the program to the wire: injected loss, queues, rates, and the system calls that send.

Owns: when a frame leaves its port, and the count of every frame that does not. Must not know: the
program; where frames came from.

A port without a rate hands its frames to the kernel in batches, straight from the outbox. A port
with a rate is an emulated link: eight strict-priority queues of `depth` frames before a wire that
takes one frame at a time, each for length x 8 / rate. A frame is delivered when its last bit has
left. Starts and ends of transmission follow from the frames' arrivals alone: a loop that wakes
late catches up, and a virtual clock gives the same result as an exact real one. In real time
frames are handed over up to a quantum late, so that those of a link leave in one piece and the
loop is not woken for each; when they left is reckoned without it.
"""

from __future__ import annotations

from kvcast.native.linux import (
    EAGAIN,
    ECONNREFUSED,
    EINTR,
    EMSGSIZE,
    ENOBUFS,
    MSG_DONTWAIT,
    SOL_UDP,
    UDP_SEGMENT,
    IoVec,
    MsgHdr,
    SegmentMessage,
    error_number,
    free,
    malloc,
    sendmmsg,
)
from kvcast.native.subset import U64, address_of, copy, native, size_of, unsigned
from kvcast.switchsim.loop.rings import ring_push
from kvcast.switchsim.loop.state import (
    KIND_RING,
    KIND_UDP_LEARNING,
    NEVER,
    PRIORITIES,
    SEGMENTS_AT_MOST,
    SEGMENTS_BYTES,
    SEND_BATCH,
    Loop,
    Port,
    Queue,
    QueuedFrame,
)


@native
def mixed(state: U64) -> U64:
    """The output of splitmix64 (Steele, Lea, Flood 2014) for a state."""
    value = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@native
def lost(threshold: U64, state: U64) -> bool:
    """Whether the draw of this state means loss."""
    return (mixed(state) >> 11) < threshold


@native
def transmit(loop: Loop, port: Port, frame: U64, length: U64, priority: U64, now_ns: U64) -> None:
    """The program sends a frame to a port."""
    if port.loss_threshold != 0:
        port.tx_random += 0x9E3779B97F4A7C15
        if lost(port.loss_threshold, port.tx_random):
            port.tx_loss += 1
            return
    if port.ps_per_byte == 0:
        send(loop, port, frame, length, now_ns)
    else:
        enqueue(loop, port, frame, length, priority & (PRIORITIES - 1), now_ns)


@native
def send(loop: Loop, port: Port, frame: U64, length: U64, now_ns: U64) -> None:
    """Hand a frame over, or gather it for the next system call; it must stay until `flush`."""
    if port.kind == KIND_RING:
        if ring_push(loop.punt, port.number, now_ns, frame, length):
            port.tx_frames += 1
            port.tx_bytes += length
            loop.news = 1
        else:
            port.tx_queue_drops += 1
        return
    if port.kind == KIND_UDP_LEARNING and port.peer[0].address == 0:
        port.tx_no_peer += 1
        return
    vector = port.send_vectors[port.pending]
    vector.base = frame
    vector.length = length
    port.pending += 1
    loop.pending = 1
    if port.pending == SEND_BATCH:
        flush_port(port)


@native
def flush_port(port: Port) -> None:
    """Send what is gathered. What the kernel does not take is dropped and counted."""
    frame = 0
    while frame < port.pending:
        frame = send_messages(port, frame, pack(port, frame))
    port.pending = 0


@native
def pack(port: Port, first: U64) -> U64:
    """Messages of all gathered frames from `first` on; how many. For a tunnel whose kernel
    splits messages, neighbours of one length go together, and a shorter one may end them."""
    messages = 0
    at = 0 + first
    while at < port.pending:
        length = port.send_vectors[at].length
        end = at + 1
        if port.segments != 0:
            size = 0 + length
            while (
                end < port.pending
                and end - at < SEGMENTS_AT_MOST
                and port.send_vectors[end].length <= length
                and size + length <= SEGMENTS_BYTES
            ):
                size += port.send_vectors[end].length
                end += 1
                if port.send_vectors[end - 1].length < length:
                    break
        message = port.send_messages[messages]
        message.iov = address_of(port.send_vectors) + at * size_of(IoVec)
        message.iov_length = end - at
        message.control_length = 0
        if end - at > 1:
            control = port.send_controls[messages]
            control.size = size_of(SegmentMessage) - 6  # CMSG_LEN of a u16
            control.level = SOL_UDP
            control.kind = UDP_SEGMENT
            control.length = length
            message.control = address_of(control)
            message.control_length = size_of(SegmentMessage)
        messages += 1
        at = end
    return messages


@native
def send_messages(port: Port, first: U64, count: U64) -> U64:
    """Send `count` messages, whose frames begin with `first`; the first frame not dealt with."""
    at = 0
    frame = 0 + first
    refused = 0
    while at < count:
        messages = MsgHdr.array(address_of(port.send_messages) + at * size_of(MsgHdr))
        sent = sendmmsg(port.send_fd, messages, count - at, MSG_DONTWAIT)
        if sent > 0:
            for i in range(unsigned(sent)):
                frames = messages[i].iov_length
                for j in range(frames):
                    port.tx_bytes += port.send_vectors[frame + j].length
                port.tx_frames += frames
                frame += frames
            at += unsigned(sent)
            refused = 0
            continue
        error = error_number()
        frames_lost = messages[0].iov_length
        if error == EINTR:
            continue
        if error == ECONNREFUSED:
            # The error belongs to an earlier frame; this one has not been sent yet.
            port.tx_refused += 1
            if refused == 0:
                refused = 1
                continue
            port.tx_refused += frames_lost - 1
        elif error in (EAGAIN, ENOBUFS):
            port.tx_busy += frames_lost
        elif frames_lost > 1:
            # This kernel, device or path cannot split messages: one by one from now on.
            port.segments = 0
            return frame
        elif error == EMSGSIZE:
            port.tx_too_long += 1
        else:
            port.tx_errors += 1
        at += 1
        frame += frames_lost
        refused = 0
    return frame


@native
def flush(loop: Loop) -> None:
    """Send everything that is gathered, and empty the outbox."""
    if loop.pending != 0:
        loop.pending = 0
        for i in range(loop.port_count):
            flush_port(loop.ports[i])
    loop.outbox.used = 0
    loop.outbox.count = 0
    while loop.garbage != 0:
        frame = loop.garbage
        loop.garbage = QueuedFrame.at(frame).next
        free(frame)


@native
def enqueue(loop: Loop, port: Port, frame: U64, length: U64, priority: U64, now_ns: U64) -> None:
    """A frame arrives at a port with a rate."""
    release(loop, port, now_ns)
    queue = port.queues[priority]
    if queue.frames >= port.depth:
        port.tx_queue_drops += 1
        return
    address = malloc(size_of(QueuedFrame) + length)
    if address == 0:
        port.tx_queue_drops += 1
        return
    queued = QueuedFrame.at(address)
    queued.next = 0
    queued.arrival_ns = now_ns
    queued.length = length
    copy(address + size_of(QueuedFrame), frame, length)
    append(queue, address)
    if port.waiting == 0:
        loop.backlog += 1
    port.waiting += 1
    if port.in_service == 0:
        start_service(port)


@native
def start_service(port: Port) -> bool:
    """Let the wire take the next frame; False where none waits."""
    earliest = NEVER
    for i in range(PRIORITIES):
        first = port.queues[i].first
        if first != 0 and QueuedFrame.at(first).arrival_ns < earliest:
            earliest = QueuedFrame.at(first).arrival_ns
    if earliest == NEVER:
        return False
    start = port.free_at_ns if port.free_at_ns > earliest else earliest
    priority = PRIORITIES - 1
    while port.queues[priority].first == 0 or (
        QueuedFrame.at(port.queues[priority].first).arrival_ns > start
    ):
        priority -= 1
    queue = port.queues[priority]
    frame = QueuedFrame.at(queue.first)
    port.in_service = queue.first
    queue.first = frame.next
    queue.frames -= 1
    duration_ps = frame.length * port.ps_per_byte + port.remainder_ps
    port.free_at_ns = start + duration_ps // 1000
    port.remainder_ps = duration_ps % 1000
    return True


@native
def release(loop: Loop, port: Port, now_ns: U64) -> None:
    """Deliver every frame whose last bit has left by now."""
    while port.in_service != 0 and port.free_at_ns <= now_ns:
        address = port.in_service
        if port.quantum_ns == 0:
            hand_over(loop, port, address, port.free_at_ns)
        else:
            keep(loop, port, address)
        port.in_service = 0
        port.waiting -= 1
        if port.waiting == 0:
            loop.backlog -= 1
        start_service(port)


@native
def hand_over(loop: Loop, port: Port, address: U64, left_ns: U64) -> None:
    """Send a queued frame; it is freed once it is sent."""
    frame = QueuedFrame.at(address)
    send(loop, port, address + size_of(QueuedFrame), frame.length, left_ns)
    frame.next = loop.garbage
    loop.garbage = address


@native
def keep(loop: Loop, port: Port, address: U64) -> None:
    """A frame has left: keep it until its quantum is over, and others may go with it."""
    frame = QueuedFrame.at(address)
    frame.next = 0
    frame.arrival_ns = port.free_at_ns
    queue = port.departed[0]
    if queue.first == 0 and port.free_at_ns + port.quantum_ns < loop.handover_ns:
        loop.handover_ns = port.free_at_ns + port.quantum_ns
    append(queue, address)


@native
def hand_over_due(loop: Loop, now_ns: U64) -> None:
    """When a quantum is over, hand over everything that has left."""
    if loop.handover_ns > now_ns:
        return
    loop.handover_ns = NEVER
    for i in range(loop.port_count):
        port = loop.ports[i]
        queue = port.departed[0]
        while queue.first != 0:
            address = queue.first
            queue.first = QueuedFrame.at(address).next
            hand_over(loop, port, address, QueuedFrame.at(address).arrival_ns)
        queue.frames = 0


@native
def release_all(loop: Loop, now_ns: U64) -> U64:
    """Deliver what is due at all ports; when there will be more to deliver, or NEVER."""
    earliest = NEVER
    if loop.backlog != 0:
        for i in range(loop.port_count):
            port = loop.ports[i]
            if port.in_service != 0:
                release(loop, port, now_ns)
                if port.in_service != 0 and port.free_at_ns + port.quantum_ns < earliest:
                    earliest = port.free_at_ns + port.quantum_ns
    hand_over_due(loop, now_ns)
    return loop.handover_ns if loop.handover_ns < earliest else earliest


@native
def next_release(loop: Loop) -> U64:
    """When the next frame will have left, or NEVER."""
    earliest = NEVER
    if loop.backlog != 0:
        for i in range(loop.port_count):
            port = loop.ports[i]
            if port.in_service != 0 and port.free_at_ns < earliest:
                earliest = port.free_at_ns
    return earliest


@native
def append(queue: Queue, address: U64) -> None:
    """A frame is the last of a queue; its `next` is 0."""
    if queue.first == 0:
        queue.first = address
    else:
        QueuedFrame.at(queue.last).next = address
    queue.last = address
    queue.frames += 1


@native
def discard(queue: Queue) -> None:
    """Free all frames of a queue."""
    while queue.first != 0:
        address = queue.first
        queue.first = QueuedFrame.at(address).next
        free(address)
    queue.frames = 0


@native
def discard_queues(loop: Loop) -> None:
    """Free all frames that still wait; the loop ends."""
    for i in range(loop.port_count):
        port = loop.ports[i]
        if port.in_service != 0:
            free(port.in_service)
            port.in_service = 0
        for j in range(PRIORITIES):
            discard(port.queues[j])
        port.waiting = 0
        discard(port.departed[0])
    loop.backlog = 0
    flush(loop)


@native
def prepare_send(port: Port) -> None:
    """What does not change in the send messages."""
    for i in range(SEND_BATCH):
        message = port.send_messages[i]
        if port.kind == KIND_UDP_LEARNING:
            message.name = address_of(port.peer)
            message.name_length = 16
