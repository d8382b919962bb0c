"""The rings of AF_XDP ports, worked in compiled code.

Owns: which chunk of the shared memory holds what: received frames and the places for them go
round between the receive and the fill ring, chunks to send from between `xdp_free`, the send ring
and the completion ring. Must not know: the program.

The kernel takes what is in the send ring when it is called; a frame counts as sent once it is
there. If the kernel stops half-way, `kick` is called again until everything has gone.
"""

from __future__ import annotations

from kvcast.switchsim.loop.compiler import (
    U64,
    atomic_load,
    atomic_store,
    copy,
    native,
    size_of,
    u32_at,
    u64_at,
)
from kvcast.switchsim.loop.linux import (
    EAGAIN,
    EBUSY,
    EINTR,
    ENOBUFS,
    MSG_DONTWAIT,
    error_number,
    sendto,
)
from kvcast.switchsim.loop.state import Loop, Port, XdpDesc, XdpRing

_FRUITLESS_KICKS = 8


@native
def produced(ring: XdpRing) -> U64:
    """Entries of a ring that we consume, ready to be read."""
    return (atomic_load(u32_at(ring.producer)[0]) - ring.position) & 0xFFFF_FFFF


@native
def reclaim(port: Port) -> None:
    """Take back the chunks that the kernel has sent."""
    ring = port.xdp_completion
    count = produced(ring)
    for i in range(count):
        port.xdp_free[port.xdp_free_count] = u64_at(ring.entries)[(ring.position + i) & ring.mask]
        port.xdp_free_count += 1
    ring.position += count
    atomic_store(u32_at(ring.consumer)[0], ring.position)


@native
def gather_xdp(loop: Loop, port: Port, frame: U64, length: U64) -> None:
    """Put a frame into the send ring; the kernel hears of it at `kick`."""
    if length > port.longest:
        port.tx_too_long += 1
        return
    if port.xdp_free_count == 0:
        reclaim(port)
        if port.xdp_free_count == 0:
            kick(port)
            if port.xdp_free_count == 0:
                port.tx_busy += 1
                return
    port.xdp_free_count -= 1
    chunk = port.xdp_free[port.xdp_free_count]
    copy(port.xdp_memory + chunk, frame, length)
    ring = port.xdp_send
    desc = XdpDesc.at(ring.entries + (ring.position & ring.mask) * size_of(XdpDesc))
    desc.address = chunk
    desc.length = length
    desc.options = 0
    ring.position += 1
    port.tx_frames += 1
    port.tx_bytes += length
    port.pending = 1
    loop.pending_ports = 1


@native
def kick(port: Port) -> None:
    """Let the kernel send what is in the ring; `pending` stays where it could not take all."""
    ring = port.xdp_send
    atomic_store(u32_at(ring.producer)[0], ring.position)
    left = (ring.position - atomic_load(u32_at(ring.consumer)[0])) & 0xFFFF_FFFF
    fruitless = 0
    while left != 0 and fruitless < _FRUITLESS_KICKS:
        result = sendto(port.send_fd, 0, 0, MSG_DONTWAIT, 0, 0)
        before = left
        left = (ring.position - atomic_load(u32_at(ring.consumer)[0])) & 0xFFFF_FFFF
        if left == before:
            fruitless += 1
        if result < 0:
            error = error_number()
            if error not in (EAGAIN, EBUSY, ENOBUFS, EINTR):
                # The interface is down: what waits here goes when it is up again.
                port.tx_errors += 1
                left = 0
        reclaim(port)
    port.pending = 1 if left != 0 else 0


@native
def return_chunk(port: Port, index: U64, address: U64) -> None:
    """Give a received frame's place back to the kernel."""
    ring = port.xdp_fill
    chunk = address & ~(port.xdp_chunk_bytes - 1)
    u64_at(ring.entries)[(ring.position + index) & ring.mask] = chunk


@native
def prepare_xdp(port: Port, chunks: U64) -> None:
    """Half of the chunks wait for frames, the other half can be sent from."""
    fill = port.xdp_fill
    for i in range(chunks):
        u64_at(fill.entries)[i] = i * port.xdp_chunk_bytes
        port.xdp_free[i] = (chunks + i) * port.xdp_chunk_bytes
    fill.position = 0 + chunks
    atomic_store(u32_at(fill.producer)[0], fill.position)
    port.xdp_free_count = 0 + chunks
