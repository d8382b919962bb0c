"""What stands while one agent of a node gives way to the next: the arena, the sockets, the clients.

Owns: how all of it is opened once, and what an agent that comes after finds. Must not know:
processes (`supervisor`), or what an agent does with it (`agent`).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass, field
from typing import Final

import msgspec
import xxhash
from kvcast.hostagent.network.datagrams import open_tunnel, open_udp
from kvcast.hostagent.network.local_server import listen_locally
from kvcast.hostagent.network.survivors import NOBODY, Keeper, Survivor
from kvcast.hostagent.options import NetworkOptions, Options
from kvcast.hostagent.tiers.arena import is_ours_alone
from kvcast.hostagent.tiers.kept import Kept, KeptOptions, open_kept
from kvcast.hostagent.tiers.memory_placement import preferring
from kvcast.protocol.messages.control import PoolMap, Registered
from kvcast.service.listener import listening_sockets

log = logging.getLogger(__name__)

_HUGE_PAGE_BYTES: Final = 2 << 20


@dataclass
class Standing:
    """`frames`: the socket for READs and DATA, with its receive buffer in bytes; `bulk`: those
    that other agents connect to; `local`: that of the clients; `survivors`: clients of the agent
    before, by number; `keeper`: who keeps the clients of this one."""

    kept: Kept
    frames: socket.socket
    buffer_bytes: int
    bulk: list[socket.socket]
    local: socket.socket
    survivors: dict[int, Survivor] = field(default_factory=dict)
    keeper: Keeper = NOBODY

    def close(self) -> None:
        """Let go of all of it; files stay where they are."""
        self.kept.close()
        for sock in (self.frames, *self.bulk, self.local):
            sock.close()


def kept_options(options: Options) -> KeptOptions:
    """Which files an agent with these options keeps."""
    arena = options.arena
    assert arena.path is not None
    return KeptOptions(
        *(options.owner, arena.path, index_path_of(options), arena.size_bytes, arena.slab_bytes),
        reserve=arena.reserve,
    )


def index_path_of(options: Options) -> str:
    """Where the index of a kept arena lies."""
    assert options.arena.path is not None
    return options.arena.index_path or index_beside(options.arena.path)


def index_beside(arena_path: str) -> str:
    """Where the index of an arena lies, unless told: beside it, or, where the arena lies on
    hugetlbfs, in /dev/shm under a name made of its path. The arena need not exist yet."""
    path = f"{arena_path}.index"
    if os.statvfs(os.path.dirname(arena_path) or ".").f_bsize >= _HUGE_PAGE_BYTES:
        # A file there is a whole number of huge pages, which the index is not.
        return f"/dev/shm/kvcast{os.path.abspath(path).replace('/', '-')}"
    return path


def stand_up(options: Options) -> Standing:
    """Open everything, and take over the files of a former agent. ArenaError, SocketInUseError,
    OSError; on failure nothing is left open."""
    with preferring(options.arena.numa_node):
        kept = open_kept(kept_options(options), secrets.randbits(62) + 1)
    opened: list[socket.socket] = []
    try:
        frames, buffer_bytes = open_frames(options.network)
        opened.append(frames)
        bulk = listening_sockets(options.network.bulk_host, options.network.bulk_port)
        opened += bulk
        return Standing(kept, frames, buffer_bytes, bulk, listen_locally(options.local))
    except BaseException:
        for sock in opened:
            sock.close()
        kept.close()
        raise


def open_frames(network: NetworkOptions) -> tuple[socket.socket, int]:
    """The socket for READs and DATA, and its receive buffer in bytes."""
    if network.tunnel is None:
        return open_udp(network.ip, network.udp_port, network.buffer_bytes)
    return open_tunnel(*network.tunnel, network.buffer_bytes)


class KeptMap:
    """The last map of the pool, in a file beside the index: an agent that comes after serves by it
    until the controller sends another. It is written anew whole, and proves itself by a digest."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, registered: Registered, pool_map: PoolMap) -> None:
        """Keep this one; a file that cannot be written is only a slower start."""
        data = msgspec.msgpack.encode((registered, pool_map))
        try:
            fd, name = tempfile.mkstemp(dir=os.path.dirname(self._path) or ".")
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(xxhash.xxh3_64_digest(data) + data)
                os.replace(name, self._path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            log.warning("the pool's map is not kept: %s", error)

    def read(self) -> tuple[Registered, PoolMap] | None:
        """The last one; None where there is none that can be used."""
        try:
            with open(self._path, "rb") as file:
                if not is_ours_alone(os.fstat(file.fileno())):
                    return None
                data = file.read()
        except OSError:
            return None
        digest, data = data[:8], data[8:]
        if xxhash.xxh3_64_digest(data) != digest:
            log.error("%s is damaged: the controller's next map is waited for", self._path)
            return None
        try:
            return msgspec.msgpack.decode(data, type=tuple[Registered, PoolMap])
        except msgspec.MsgspecError:
            return None
