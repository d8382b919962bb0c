"""How the supervisor learns that an agent is dead before the kernel has taken its memory apart.

Owns: a robust mutex in memory that a process shares with its child. Must not know: what is done
about the death. Of a process that is killed, the kernel first stops what it runs, then gives up the
robust mutexes it holds (get_robust_list(2)), and then unmaps its memory: of an arena in pages of
4 KiB that takes 15 to 30 ms a GiB. Only after that is it seen by its parent, by pidfd or SIGCHLD.

A process of one thread, or whose other threads touch nothing shared: the mutex is its main
thread's.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from typing import Final

_MUTEX_BYTES: Final = 128
"""At least what pthread_mutex_t and its attributes take on any of Linux's machines."""
_PROCESS_SHARED: Final = 1
_ROBUST: Final = 1


class DeathWatch:
    """Made by the parent before the fork; `hold` in the child, `start` in the parent once the child
    has said that it does. `fd` becomes readable at the child's death. OSError where the C library
    has no such mutex."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._memory = mmap.mmap(-1, 2 * _MUTEX_BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._mutex = ctypes.c_void_p(self._base)
        attributes = ctypes.c_void_p(self._base + _MUTEX_BYTES)
        _check(_LIBC.pthread_mutexattr_init(attributes))
        _check(_LIBC.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_LIBC.pthread_mutex_init(self._mutex, attributes))
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        """In the child's main thread: from now on its death is seen."""
        _check(_LIBC.pthread_mutex_lock(self._mutex))

    def start(self) -> None:
        """In the parent: watch."""
        self._thread = threading.Thread(target=self._wait, name="death-watch", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        if _LIBC.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD:
            _LIBC.pthread_mutex_consistent(self._mutex)
            _LIBC.pthread_mutex_unlock(self._mutex)
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """The child is dead, and nobody watches any more."""
        if self._thread is not None:
            self._thread.join()
        os.close(self.fd)


def _check(status: int) -> None:
    if status:
        raise OSError(status, os.strerror(status))


_LIBC: Final = ctypes.CDLL(None)
