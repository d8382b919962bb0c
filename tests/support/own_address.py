"""A loopback address of this process's own, for daemons whose port must be known before they start.

A port that was free a moment ago may be taken by whoever runs beside: another suite, another
worker of this one. All of 127.0.0.0/8 is this machine's, and a process id is nobody else's; so is,
then, an address made of it. Its ports are given out in order, below the ephemeral range, from
which the kernel serves whoever asks for any port.
"""

from __future__ import annotations

import itertools
import os

_FIRST_PORT, _LAST_PORT = 10_000, 32_000
_ports = itertools.cycle(range(_FIRST_PORT, _LAST_PORT))


def own_address() -> str:
    """The address: 127.128.0.0/10 with the process id (at most 22 bits) in it."""
    pid = os.getpid()
    return f"127.{128 | pid >> 16}.{pid >> 8 & 255}.{pid & 255}"


def own_port() -> int:
    """A port of `own_address()` that this process has not given out before."""
    return next(_ports)


def own_endpoint() -> str:
    """HOST:PORT at which one daemon of this process's may listen, and come back."""
    return f"{own_address()}:{own_port()}"
