"""From the wire to the program: the system calls that receive, and what is put right on the way.

Owns: batches of received frames, learned tunnel peers, checksums and tags that AF_PACKET hands over
unfinished, and the count of every frame that goes no further. Must not know: the program; queues.

A frame's way ends in `accept`, which gives it to the program at once: there is no queue before
the program but the kernel's buffer, which drops when it is full (rx_kernel_drops). A port with an
uplink rate is the exception: it is an emulated link towards the switch, which takes one frame at a
time, each for length x 8 / rate, and holds `depth` of them (rx_queue_drops). A frame has arrived
when its last bit has; in real time, frames are given to the program up to a quantum late.
"""

from __future__ import annotations

from kvcast.native.linux import (
    EAGAIN,
    ECONNREFUSED,
    EINTR,
    MSG_DONTWAIT,
    PACKET_AUXDATA,
    SO_ERROR,
    SOL_PACKET,
    SOL_SOCKET,
    SOL_UDP,
    TP_STATUS_COPY,
    TP_STATUS_KERNEL,
    TP_STATUS_USER,
    TP_STATUS_VLAN_TPID_VALID,
    TP_STATUS_VLAN_VALID,
    UDP_GRO,
    VNET_HEADER_BYTES,
    VNET_NEEDS_CSUM,
    AuxMessage,
    IoVec,
    MsgHdr,
    SegmentMessage,
    SockAddrIn,
    TpacketHeader,
    error_number,
    free,
    getsockopt,
    malloc,
    recvmmsg,
    swap16,
)
from kvcast.native.subset import (
    I32,
    U32,
    U64,
    atomic_load,
    atomic_store,
    bytes_at,
    copy,
    indirect,
    move,
    native,
    size_of,
    u16_at,
    u32_at,
    unsigned,
)
from kvcast.switchsim.llvm.abi import Outbox
from kvcast.switchsim.loop.egress import flush, lost, transmit
from kvcast.switchsim.loop.state import (
    DATAGRAMS_AT_ONCE,
    FLUSH_BYTES,
    FLUSH_FRAMES,
    KIND_PACKET,
    KIND_UDP_LEARNING,
    NEVER,
    PORT_NUMBERS,
    Loop,
    Port,
    QueuedFrame,
)
from kvcast.switchsim.ports.port import MAX_FRAME_BYTES, MIN_FRAME_BYTES


@indirect
def call_program(
    address: U64, context: U64, frame: U64, length: U32, port: U32, now_us: U64, out: Outbox
) -> I32:
    raise NotImplementedError


@native
def accept(loop: Loop, port: Port, frame: U64, length: U64, now_ns: U64) -> None:
    """A frame has arrived at a port, complete as on a wire."""
    if length < MIN_FRAME_BYTES:
        port.rx_runts += 1
        return
    if length > MAX_FRAME_BYTES:
        port.rx_oversize += 1
        return
    if port.loss_threshold != 0:
        port.rx_random += 0x9E3779B97F4A7C15
        if lost(port.loss_threshold, port.rx_random):
            port.rx_loss += 1
            return
    if port.uplink_ps_per_byte == 0:
        enter(loop, port, frame, length, now_ns)
    else:
        put_on_uplink(loop, port, frame, length, now_ns)


@native
def enter(loop: Loop, port: Port, frame: U64, length: U64, now_ns: U64) -> None:
    """A frame is in the switch."""
    port.rx_frames += 1
    port.rx_bytes += length
    run_program(loop, port.number, frame, length, now_ns)


@native
def put_on_uplink(loop: Loop, port: Port, frame: U64, length: U64, now_ns: U64) -> None:
    """A host sends a frame: it is here once the frames before it, and then its own bits, are."""
    queue = port.arriving[0]
    if queue.frames >= port.depth:
        port.rx_queue_drops += 1
        return
    address = malloc(size_of(QueuedFrame) + length)
    if address == 0:
        port.rx_queue_drops += 1
        return
    start = port.uplink_free_at_ns if port.uplink_free_at_ns > now_ns else now_ns
    duration_ps = length * port.uplink_ps_per_byte + port.uplink_remainder_ps
    port.uplink_free_at_ns = start + duration_ps // 1000
    port.uplink_remainder_ps = duration_ps % 1000
    queued = QueuedFrame.at(address)
    queued.next = 0
    queued.arrival_ns = port.uplink_free_at_ns
    queued.length = length
    copy(address + size_of(QueuedFrame), frame, length)
    if queue.first == 0:
        queue.first = address
        loop.busy_uplinks += 1
    else:
        QueuedFrame.at(queue.last).next = address
    queue.last = address
    queue.frames += 1


@native
def take_arrived(loop: Loop, now_ns: U64) -> U64:
    """Process the frames that have come over uplinks by now, of each port a quantum's at a time;
    when there will be more, or NEVER."""
    earliest = NEVER
    if loop.busy_uplinks != 0:
        for i in range(loop.port_count):
            port = loop.ports[i]
            queue = port.arriving[0]
            if queue.first != 0 and (
                QueuedFrame.at(queue.first).arrival_ns + port.quantum_ns <= now_ns
            ):
                while queue.first != 0 and QueuedFrame.at(queue.first).arrival_ns <= now_ns:
                    address = queue.first
                    frame = QueuedFrame.at(address)
                    queue.first = frame.next
                    queue.frames -= 1
                    enter(loop, port, address + size_of(QueuedFrame), frame.length, now_ns)
                    free(address)
                if queue.first == 0:
                    loop.busy_uplinks -= 1
            if queue.first != 0:
                due_ns = QueuedFrame.at(queue.first).arrival_ns + port.quantum_ns
                if due_ns < earliest:
                    earliest = 0 + due_ns
    return earliest


@native
def next_arrived(loop: Loop) -> U64:
    """When the next frame will have come over an uplink, or NEVER."""
    earliest = NEVER
    if loop.busy_uplinks != 0:
        for i in range(loop.port_count):
            first = loop.ports[i].arriving[0].first
            if first != 0 and QueuedFrame.at(first).arrival_ns < earliest:
                earliest = QueuedFrame.at(first).arrival_ns
    return earliest


@native
def discard_arriving(loop: Loop) -> None:
    """Free the frames that are on their way; the loop ends."""
    for i in range(loop.port_count):
        queue = loop.ports[i].arriving[0]
        while queue.first != 0:
            address = queue.first
            queue.first = QueuedFrame.at(address).next
            free(address)
        queue.frames = 0
    loop.busy_uplinks = 0


@native
def run_program(loop: Loop, number: U64, frame: U64, length: U64, now_ns: U64) -> None:
    """Process one frame, and hand what it became to the ports."""
    loop.processed += 1
    if loop.process == 0:
        loop.no_program += 1
        return
    outbox = loop.outbox
    at = 0 + outbox.count
    now_us = now_ns // 1000
    if call_program(loop.process, loop.context, frame, length, number, now_us, outbox) < 0:
        loop.process_errors += 1
    while at < outbox.count:
        out = outbox.descs[at]
        at += 1
        index = 0
        if out.port < PORT_NUMBERS:
            index = loop.by_number[out.port]
        if index == 0:
            loop.no_such_port += 1
        else:
            loop.emitted += 1
            transmit(
                loop,
                loop.ports[index - 1],
                outbox.data + out.offset,
                out.length,
                out.priority,
                now_ns,
            )
    if outbox.used > FLUSH_BYTES or outbox.count > FLUSH_FRAMES:
        flush(loop)


@native
def receive(loop: Loop, port: Port, now_ns: U64) -> U64:
    """Take one batch from a socket; returns how many frames came."""
    if port.packet_ring != 0:
        return receive_mapped(loop, port, now_ns)
    arrived = recvmmsg(
        port.receive_fd, port.receive_messages, port.receive_at_once, MSG_DONTWAIT, 0
    )
    if arrived < 0:
        error = error_number()
        if error == ECONNREFUSED:
            # An earlier frame found nobody at the peer's address; the socket stays usable.
            port.tx_refused += 1
        elif error not in (EAGAIN, EINTR):
            port.rx_errors += 1
        return 0
    messages = unsigned(arrived)
    if port.kind == KIND_PACKET:
        for i in range(messages):
            accept_from_interface(loop, port, port.receive_messages[i], now_ns)
        return messages
    frames = 0
    for i in range(messages):
        frames += accept_datagrams(loop, port, port.receive_messages[i], now_ns)
    # The turn of one port is about a batch of frames, however they come.
    if frames > loop.batch:
        port.receive_at_once = (port.receive_at_once + 1) // 2
    elif messages == port.receive_at_once and messages < DATAGRAMS_AT_ONCE:
        port.receive_at_once = 2 * messages
    return frames


@native
def accept_datagrams(loop: Loop, port: Port, message: MsgHdr, now_ns: U64) -> U64:
    """A message from a tunnel: one frame, or several of one length that the kernel has put
    together, of which the last may be shorter. Returns how many."""
    length = message.length
    segment = 0 + length
    if message.control_length >= size_of(SegmentMessage) - 4:
        control = SegmentMessage.at(message.control)
        if control.level == SOL_UDP and control.kind == UDP_GRO and control.length != 0:
            segment = 0 + control.length
    believed = True
    if port.kind == KIND_UDP_LEARNING:
        believed = is_peer(loop, port, SockAddrIn.at(message.name))
        message.name_length = size_of(SockAddrIn)
    message.control_length = size_of(SegmentMessage)
    frame = IoVec.at(message.iov).base
    frames = 0
    while True:
        if segment > length:
            segment = length
        if believed:
            accept(loop, port, frame, segment, now_ns)
        else:
            port.rx_foreign += 1
        frames += 1
        frame += segment
        length -= segment
        if length == 0:
            break
    return frames


@native
def receive_mapped(loop: Loop, port: Port, now_ns: U64) -> U64:
    """Take one batch from an interface's mapped ring; returns how many frames came."""
    arrived = 0
    while arrived < loop.batch:
        base = port.packet_ring + port.packet_ring_at * port.packet_ring_stride
        header = TpacketHeader.at(base)
        status = atomic_load(header.status)
        if (status & TP_STATUS_USER) == 0:
            break
        tci = 0
        tpid = 0
        if status & TP_STATUS_VLAN_VALID:
            tci = 0x10000 | header.vlan_tci
            tpid = 0x8100
            if status & TP_STATUS_VLAN_TPID_VALID:
                tpid = 0 + header.vlan_tpid
        frame = base + header.mac
        if status & TP_STATUS_COPY:
            accept_copy(loop, port, now_ns)
        elif header.snapped < header.length:
            port.rx_kernel_drops += 1  # the socket had no room for the copy
        else:
            accept_unfinished(
                loop, port, frame - VNET_HEADER_BYTES, frame, header.length, tci, tpid, now_ns
            )
        # What the program made of the frame is in the outbox: the kernel may have the place back.
        atomic_store(header.status, TP_STATUS_KERNEL)
        port.packet_ring_at += 1
        if port.packet_ring_at == port.packet_ring_frames:
            port.packet_ring_at = 0
        arrived += 1
    if arrived == 0:
        take_error(loop, port)
    return arrived


@native
def take_error(loop: Loop, port: Port) -> None:
    """A socket is readable without a frame: an error is pending (the interface went down)."""
    u32_at(loop.scratch)[2] = 4  # sizeof(int)
    getsockopt(port.receive_fd, SOL_SOCKET, SO_ERROR, loop.scratch, loop.scratch + 8)
    if u32_at(loop.scratch)[0] != 0:
        port.rx_errors += 1


@native
def accept_copy(loop: Loop, port: Port, now_ns: U64) -> None:
    """A frame that is longer than the ring's places, which were made for a smaller MTU: the
    socket holds all of it, in the ring's order (PACKET_COPY_THRESH)."""
    arrived = recvmmsg(port.receive_fd, port.receive_messages, 1, MSG_DONTWAIT, 0)
    if arrived < 0:
        port.rx_errors += 1  # an error that was pending comes first, once
        arrived = recvmmsg(port.receive_fd, port.receive_messages, 1, MSG_DONTWAIT, 0)
    if arrived == 1:
        accept_from_interface(loop, port, port.receive_messages[0], now_ns)
    else:
        port.rx_kernel_drops += 1


@native
def is_peer(loop: Loop, port: Port, sender: SockAddrIn) -> bool:
    """Whether a datagram is believed: its sender is the peer, or on this machine and so becomes
    it."""
    peer = port.peer[0]
    if sender.address == peer.address and sender.port == peer.port:
        return True
    # The first byte of the address is the lowest here: 127.0.0.0/8 is loopback.
    if sender.address != port.local_address and (sender.address & 0xFF) != 127:
        return False
    peer.family = sender.family
    peer.port = sender.port
    peer.address = sender.address
    loop.news = 1
    return True


@native
def accept_from_interface(loop: Loop, port: Port, message: MsgHdr, now_ns: U64) -> None:
    """A frame from AF_PACKET's recvmmsg: the virtio header, the frame, and auxiliary data."""
    vectors = IoVec.array(message.iov)
    header = vectors[0].base
    frame = vectors[1].base
    length = message.length - VNET_HEADER_BYTES
    tci = 0
    tpid = 0
    if message.control_length >= size_of(AuxMessage) - 4:
        aux = AuxMessage.at(message.control)
        ours = aux.level == SOL_PACKET and aux.kind == PACKET_AUXDATA
        if ours and (aux.status & TP_STATUS_VLAN_VALID) != 0:
            tci = 0x10000 | aux.vlan_tci
            tpid = 0x8100
            if aux.status & TP_STATUS_VLAN_TPID_VALID:
                tpid = 0 + aux.vlan_tpid
    message.control_length = size_of(AuxMessage)
    accept_unfinished(loop, port, header, frame, length, tci, tpid, now_ns)


@native
def accept_unfinished(
    loop: Loop,
    port: Port,
    header: U64,
    frame: U64,
    length: U64,
    tci: U64,
    tpid: U64,
    now_ns: U64,
) -> None:
    """A frame as a network driver has it: complete its checksum, put back its tag (`tci` with
    bit 16 set, and the four bytes before `frame` free), and drop a segment not split yet."""
    flags = bytes_at(header)
    numbers = u16_at(header)
    # struct virtio_net_hdr: u8 flags, gso_type; u16 hdr_len, gso_size, csum_start, csum_offset
    if flags[1] != 0:
        port.rx_unsplit += 1
        return
    if flags[0] & VNET_NEEDS_CSUM:
        complete_checksum(frame, length, numbers[3], numbers[4])
    if tci != 0 and length >= 12:
        move(frame - 4, frame, 12)
        frame -= 4
        length += 4
        tag = u16_at(frame + 12)
        tag[0] = swap16(tpid)
        tag[1] = swap16(tci)
    accept(loop, port, frame, length, now_ns)


@native
def complete_checksum(frame: U64, length: U64, start: U64, offset: U64) -> None:
    """Do what the sender left to the hardware: the Internet checksum (RFC 1071) of everything
    from `start`, where the field at `start + offset` holds the pseudo-header's sum. A frame that
    is too short for its own instructions stays as it is."""
    if start + offset + 2 > length:
        return
    total = 0
    words = u16_at(frame + start)
    count = (length - start) // 2
    for i in range(count):
        total += words[i]
    if (length - start) & 1:
        total += bytes_at(frame)[length - 1]
    # The sum of 16-bit words in either byte order is the checksum in that order.
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    checksum = total ^ 0xFFFF
    if checksum == 0 and offset == 6:
        checksum = 0xFFFF  # UDP: 0 would mean "no checksum" (RFC 768)
    u16_at(frame + start + offset)[0] = checksum
