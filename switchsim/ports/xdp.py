"""AF_XDP ports: frames taken from an interface before the kernel's network stack sees them.

Owns: the socket, its shared memory and rings, and the few eBPF instructions that send an
interface's frames there. Must not know: P4; how the rings are worked (`loop.xdp_rings`, in compiled
code, which is why only the compiled loop has such ports).

Copy mode, so it works on any driver, veth included; in the driver where that can, else generic.
The program is attached by a link that the kernel removes with its descriptor: a switch that is
killed leaves nothing behind. Needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF.

What a program at this place does not get: a tag or checksum that the sender left to hardware is
missing (on veth, switch off tx-checksum and tx-vlan offload at the far end), and only the first
receive queue is heard, so an interface with more is refused.

Kernel documentation: networking/af_xdp.rst; structures from linux/if_xdp.h and linux/bpf.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcast.switchsim.ports.ports import Port, PortError, PortOptions

CHUNK_SIZES: Final = (2048, 4096)
"""Room for one frame; the kernel keeps KERNEL_HEADROOM of it."""
KERNEL_HEADROOM: Final = 256
RING_ENTRIES: Final = 4096
"""Of each ring; as many chunks receive, and as many send."""

_AF_XDP: Final = 44
_SOL_XDP: Final = 283
_MMAP_OFFSETS, _RX_RING, _TX_RING, _UMEM_REG, _FILL_RING, _COMPLETION_RING, _STATISTICS = range(
    1, 8
)
_MAX_TX_BUDGET: Final = 9  # Linux 6.17
_COPY: Final = 1 << 1
_PAGE_OFFSETS: Final = {
    _RX_RING: 0,
    _TX_RING: 0x8000_0000,
    _FILL_RING: 0x1_0000_0000,
    _COMPLETION_RING: 0x1_8000_0000,
}
_BPF_SYSCALL: Final = {"x86_64": 321, "AMD64": 321, "aarch64": 280, "arm64": 280, "riscv64": 280}
_MAP_CREATE, _MAP_UPDATE, _PROG_LOAD, _LINK_CREATE = 0, 2, 5, 28
_MAP_TYPE_XSKMAP: Final = 17
_PROG_TYPE_XDP: Final = 6
_ATTACH_XDP: Final = 37
_SIOCGIFMTU: Final = 0x8921


@dataclass(frozen=True, slots=True)
class RingAddresses:
    """One mapped ring."""

    producer: int
    consumer: int
    entries: int


class XdpPort(Port):
    """A network interface, by AF_XDP; only the compiled loop serves it."""

    kind = "xdp"

    def __init__(self, number: int, interface: str, options: PortOptions | None = None) -> None:
        super().__init__(number, options or PortOptions())
        self.interface = interface
        self._descriptors: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[Any] = []
        try:
            self._socket = socket.socket(_AF_XDP, socket.SOCK_RAW, 0)
        except OSError as error:
            raise PortError(f"port {number}: xdp:{interface}: {error}") from error
        try:
            self._open(interface)
        except (OSError, PortError) as error:
            self.close()
            raise PortError(f"port {number}: xdp:{interface}: {error}") from error

    def _open(self, interface: str) -> None:
        index = socket.if_nametoindex(interface)
        queues = list(Path(f"/sys/class/net/{interface}/queues").glob("rx-*"))
        if len(queues) > 1:
            raise PortError(f"{len(queues)} receive queues; ethtool -L {interface} combined 1")
        with socket.socket(type=socket.SOCK_DGRAM) as asking:  # AF_XDP knows no such request
            request = struct.pack("16si12x", interface.encode(), 0)
            reply = fcntl.ioctl(asking, _SIOCGIFMTU, request)
        self.max_frame_bytes: int = struct.unpack_from("16si", reply)[1] + 18
        fitting = [c for c in CHUNK_SIZES if c - KERNEL_HEADROOM >= self.max_frame_bytes]
        if not fitting:
            raise PortError(f"frames of {self.max_frame_bytes} bytes do not fit a chunk")
        self.chunk_bytes = fitting[0]
        self._open_memory()
        self._bind(index)
        self._attach(index)

    def _open_memory(self) -> None:
        packets = self._socket
        size = 2 * RING_ENTRIES * self.chunk_bytes
        self.memory = self._map(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        # struct xdp_umem_reg: addr, len, chunk_size, headroom, flags, tx_metadata_len
        register = struct.pack("=QQIIII", self.memory, size, self.chunk_bytes, 0, 0, 0)
        packets.setsockopt(_SOL_XDP, _UMEM_REG, register)
        for ring in _PAGE_OFFSETS:
            packets.setsockopt(_SOL_XDP, ring, struct.pack("=I", RING_ENTRIES))
        try:
            packets.setsockopt(_SOL_XDP, _MAX_TX_BUDGET, struct.pack("=I", RING_ENTRIES))
        except OSError:
            pass  # An older kernel sends 32 frames a call; it is asked again.
        # struct xdp_mmap_offsets: producer, consumer, desc, flags of rx, tx, fill, completion
        offsets = struct.unpack("=16Q", packets.getsockopt(_SOL_XDP, _MMAP_OFFSETS, 128))
        places = {
            ring: offsets[4 * at : 4 * at + 3]
            for at, ring in enumerate((_RX_RING, _TX_RING, _FILL_RING, _COMPLETION_RING))
        }
        self.receive_ring = self._ring(_RX_RING, places[_RX_RING], 16)
        self.send_ring = self._ring(_TX_RING, places[_TX_RING], 16)
        self.fill_ring = self._ring(_FILL_RING, places[_FILL_RING], 8)
        self.completion_ring = self._ring(_COMPLETION_RING, places[_COMPLETION_RING], 8)

    def _ring(self, ring: int, places: tuple[int, ...], entry_bytes: int) -> RingAddresses:
        producer, consumer, entries = places
        base = self._map(
            mmap.mmap(
                self._socket.fileno(),
                entries + RING_ENTRIES * entry_bytes,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                offset=_PAGE_OFFSETS[ring],
            )
        )
        return RingAddresses(base + producer, base + consumer, base + entries)

    def _map(self, pages: mmap.mmap) -> int:
        view = (ctypes.c_uint8 * len(pages)).from_buffer(pages)
        self._maps.append(pages)
        self._views.append(view)
        return ctypes.addressof(view)

    def _bind(self, index: int) -> None:
        # struct sockaddr_xdp: family, flags, ifindex, queue_id, shared_umem_fd
        address = struct.pack("=HHIII", _AF_XDP, _COPY, index, 0, 0)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.bind(self._socket.fileno(), address, len(address)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _attach(self, index: int) -> None:
        sockets = self._bpf(_MAP_CREATE, struct.pack("=IIII", _MAP_TYPE_XSKMAP, 4, 4, 1))
        key, value = ctypes.c_uint32(0), ctypes.c_uint32(self._socket.fileno())
        update = (sockets, 0, ctypes.addressof(key), ctypes.addressof(value), 0)
        self._bpf(_MAP_UPDATE, struct.pack("=IIQQQ", *update))
        code = ctypes.create_string_buffer(redirect_program(sockets))
        license_ = ctypes.create_string_buffer(b"Apache-2.0")
        load = (_PROG_TYPE_XDP, (len(code) - 1) // 8, ctypes.addressof(code))
        program = self._bpf(_PROG_LOAD, struct.pack("=IIQQ", *load, ctypes.addressof(license_)))
        self._bpf(_LINK_CREATE, struct.pack("=IIII", program, index, _ATTACH_XDP, 0))

    def _bpf(self, command: int, attributes: bytes) -> int:
        """bpf(2); a descriptor that comes back is closed with the port."""
        number = _BPF_SYSCALL.get(platform.machine())
        if number is None:
            raise PortError(f"bpf() has no known number on {platform.machine()}")
        buffer = ctypes.create_string_buffer(attributes, 128)
        libc = ctypes.CDLL(None, use_errno=True)
        result = int(libc.syscall(number, command, buffer, len(buffer)))
        if result < 0:
            raise OSError(ctypes.get_errno(), f"bpf: {os.strerror(ctypes.get_errno())}")
        if command != _MAP_UPDATE:
            self._descriptors.append(result)
        return result

    def fileno(self) -> int | None:
        return self._socket.fileno()

    def drain(self) -> int:
        return 0

    def _send(self, frame: bytes) -> bool:
        raise NotImplementedError("only the compiled loop serves AF_XDP ports")

    def read_counters(self) -> dict[str, int]:
        # struct xdp_statistics: rx_dropped, rx_invalid_descs, tx_invalid_descs, rx_ring_full, ...
        stats = struct.unpack_from("=4Q", self._socket.getsockopt(_SOL_XDP, _STATISTICS, 48))
        self.counters.rx_kernel_drops = stats[0] + stats[3]
        return super().read_counters()

    def describe(self) -> str:
        return f"xdp:{self.interface}"

    def close(self) -> None:
        super().close()
        # The link first: no frame may be sent to a socket that is gone.
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._socket.close()
        self._views.clear()
        self._maps.clear()


def redirect_program(sockets: int) -> bytes:
    """eBPF: give the frame to the socket of its receive queue, or to the stack if there is none."""

    def instruction(code: int, to: int, source: int, offset: int, number: int) -> bytes:
        return struct.pack("=BBhi", code, source << 4 | to, offset, number)

    return b"".join(
        (
            instruction(0x61, 2, 1, 16, 0),  # r2 = xdp_md.rx_queue_index
            instruction(0x18, 1, 1, 0, sockets),  # r1 = the map of that descriptor
            instruction(0x00, 0, 0, 0, 0),
            instruction(0xB7, 3, 0, 0, 2),  # r3 = XDP_PASS
            instruction(0x85, 0, 0, 0, 51),  # r0 = bpf_redirect_map(r1, r2, r3)
            instruction(0x95, 0, 0, 0, 0),  # return r0
        )
    )
