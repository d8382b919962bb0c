"""The part of Linux's C interface that compiled code uses: structures, functions, constants.

Owns: their layouts and values, for 64-bit little-endian machines. Must not know: what they are
used for. The declarations follow the headers named beside them.
"""

from __future__ import annotations

import platform

from kvcast.native.subset import I32, I64, U16, U32, U64, Ptr, Struct, external, native

# errno.h
EINTR = 4
EAGAIN = 11
EMSGSIZE = 90
ENOBUFS = 105
ECONNREFUSED = 111

# bits/socket.h, sys/epoll.h, linux/if_packet.h
MSG_TRUNC = 0x20
MSG_DONTWAIT = 0x40
MSG_NOSIGNAL = 0x4000
MSG_WAITFORONE = 0x10000
SOL_SOCKET = 1
SO_ERROR = 4
SOL_PACKET = 263
PACKET_AUXDATA = 8
CLOCK_MONOTONIC = 1
POLLIN = 1
EPOLLIN = 1
SO_RCVLOWAT = 18

# linux/udp.h
SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
TFD_TIMER_ABSTIME = 1

# linux/virtio_net.h
VNET_NEEDS_CSUM = 1
VNET_HEADER_BYTES = 10

# linux/if_packet.h
TP_STATUS_KERNEL = 0
TP_STATUS_USER = 1
TP_STATUS_COPY = 1 << 1
TP_STATUS_VLAN_VALID = 1 << 4
TP_STATUS_VLAN_TPID_VALID = 1 << 6


class IoVec(Struct):
    """struct iovec"""

    base: U64
    length: U64


class MsgHdr(Struct):
    """struct mmsghdr: struct msghdr, and the bytes received or sent"""

    name: U64
    name_length: U32
    iov: U64
    iov_length: U64
    control: U64
    control_length: U64
    flags: U32
    length: U64
    """unsigned int msg_len and its padding; the latter stays 0."""


class SockAddrIn(Struct):
    """struct sockaddr_in; port and address in network order"""

    family: U16
    port: U16
    address: U32
    zero: U64


class AuxMessage(Struct):
    """struct cmsghdr and, behind it, struct tpacket_auxdata"""

    size: U64
    level: U32
    kind: U32
    status: U32
    frame_length: U32
    snapped: U32
    mac: U16
    net: U16
    vlan_tci: U16
    vlan_tpid: U16


class SegmentMessage(Struct):
    """struct cmsghdr and, behind it, the length of a segment: u16 to UDP_SEGMENT, int from
    UDP_GRO; the bytes between are 0 here."""

    size: U64
    level: U32
    kind: U32
    length: U32
    padding: U32


class TpacketHeader(Struct):
    """struct tpacket2_hdr"""

    status: U32
    length: U32
    snapped: U32
    mac: U16
    net: U16
    seconds: U32
    nanoseconds: U32
    vlan_tci: U16
    vlan_tpid: U16
    padding: U32


class TimeSpec(Struct):
    """struct timespec"""

    seconds: U64
    nanoseconds: U64


class PollFd(Struct):
    """struct pollfd"""

    fd: I32
    events: U16
    happened: U16


class TimerSpec(Struct):
    """struct itimerspec"""

    interval_seconds: U64
    interval_nanoseconds: U64
    seconds: U64
    nanoseconds: U64


if platform.machine() in ("x86_64", "AMD64"):

    class EpollEvent(Struct):
        """struct epoll_event, which is packed on this processor"""

        events: U32
        data: U32
        data_high: U32

else:

    class EpollEvent(Struct):  # type: ignore[no-redef]
        """struct epoll_event"""

        events: U32
        padding: U32
        data: U32
        data_high: U32


@external
def recvmmsg(fd: I32, messages: Ptr[MsgHdr], count: U32, flags: I32, timeout: U64) -> I32:
    raise NotImplementedError


@external
def sendmmsg(fd: I32, messages: Ptr[MsgHdr], count: U32, flags: I32) -> I32:
    raise NotImplementedError


@external
def epoll_wait(fd: I32, events: Ptr[EpollEvent], count: I32, timeout_ms: I32) -> I32:
    raise NotImplementedError


@external
def sched_yield() -> I32:
    raise NotImplementedError


@external
def timerfd_settime(fd: I32, flags: I32, new: TimerSpec, old: U64) -> I32:
    raise NotImplementedError


@external
def clock_gettime(clock: I32, time: TimeSpec) -> I32:
    raise NotImplementedError


@external
def read(fd: I32, buffer: U64, size: U64) -> I64:
    raise NotImplementedError


@external
def write(fd: I32, buffer: U64, size: U64) -> I64:
    raise NotImplementedError


@external
def recv(fd: I32, buffer: U64, size: U64, flags: I32) -> I64:
    raise NotImplementedError


@external
def ppoll(fds: PollFd, count: U64, timeout: TimeSpec, signals: U64) -> I32:
    raise NotImplementedError


@external
def setsockopt(fd: I32, level: I32, name: I32, value: U64, size: U32) -> I32:
    raise NotImplementedError


@external
def getsockopt(fd: I32, level: I32, name: I32, value: U64, size: U64) -> I32:
    raise NotImplementedError


@external
def malloc(size: U64) -> U64:
    raise NotImplementedError


@external
def free(address: U64) -> None:
    raise NotImplementedError


@external
def __errno_location() -> Ptr[I32]:
    raise NotImplementedError


@native
def error_number() -> I64:
    """errno, of the call before."""
    return __errno_location()[0]


@native
def swap16(value: U64) -> U64:
    """A 16-bit number between network and this machine's order."""
    return ((value & 0xFF) << 8) | ((value >> 8) & 0xFF)
