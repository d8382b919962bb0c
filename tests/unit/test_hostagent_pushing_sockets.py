"""A home's end of a connection on which blocks are pushed, over a real socket.

Oracle: the verdict, by hand. Cannot see: the event loop around it (`test_hostagent_pushing_pool`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from kvcast.bench.fuzz.courier import key_of
from kvcast.bench.fuzz.pushing import NAMESPACE, PUTTER, Pair
from kvcast.hostagent.network.lander import hashing
from kvcast.hostagent.network.pushing import TURN_BYTES, PushSockets, take_pushes
from kvcast.native.subset import Library
from kvcast.protocol.pushing import HAS_IT_NOT, PUSH, VERDICT

PATIENCE_MS = 20_000
SO_RCVBUFFORCE = 33


class Roles:
    """Who waits for a socket: the test."""

    def push_to(self, descriptor: int, number: int) -> bool:
        return True

    def take_pushes(self, descriptor: int, number: int) -> bool:
        return True

    def forget(self, descriptor: int) -> None:
        pass


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends; the second has room for all that is sent, if the kernel lets it."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        size_bytes = 8 * TURN_BYTES
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size_bytes)
        ours = opened.enter_context(socket.create_connection(listener.getsockname()))
        theirs = opened.enter_context(listener.accept()[0])
        yield ours, theirs


@pytest.mark.parametrize("more", [1, 1000, 64_000, 100_000, 200_000])
def test_what_a_turn_leaves_behind_is_taken_in_the_next(more: int) -> None:
    """It may be less than what the socket was to wait for before it says that it can be read."""
    code = Library(take_pushes).call(take_pushes)
    functions = hashing()
    assert functions is not None
    pair = Pair()
    ends = PushSockets(pair.home.pushes, functions, Roles())
    with connection() as (ours, theirs):
        ends.take_from(theirs, PUTTER, "node")
        poll = select.poll()
        poll.register(theirs, select.POLLIN)

        def take() -> None:
            assert poll.poll(PATIENCE_MS), "what lies in the socket is not heard of"
            code(ends.address, 0, time.monotonic_ns())

        size_bytes = TURN_BYTES + more
        # Nobody here wants it (it is of no meaning): it is read to its end all the same.
        header = PUSH.pack(7, key_of(2), 1, bytes(16), size_bytes, 0, NAMESPACE, 0, 0)
        ours.sendall(header + b"b")
        take()  # and from now on it waits for a good part of the rest
        rest = threading.Thread(target=ours.sendall, args=(bytes(size_bytes - 1 + 8),), daemon=True)
        rest.start()
        rest.join(0.5)  # where the kernel has room for all of it
        ours.settimeout(0.0)
        while True:
            take()
            with contextlib.suppress(BlockingIOError):
                assert VERDICT.unpack(ours.recv(VERDICT.size)) == (7, HAS_IT_NOT)
                break
        rest.join(PATIENCE_MS / 1000)
        ends.close()
