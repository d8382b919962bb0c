"""Strikes a running pool with the faults of a plan.

Owns: how each kind of fault is done, on whom, what was done how often, and which part is away at
the moment. Must not know: what the load makes of it, or when which fault is due (plan.py).

One node of the star has no agent: it is the attacker's. Hostile frames come from its place, from
the place of an agent that is dead at the moment, and, while the switch is dead, from the switch's.
Hostile frames and bytes are about blocks that are being read at the moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvcast.bench.hostile import bound_socket, bytes_waiting, discard
from kvcast.bench.hostile_bytes import hostile_frames, http_stream, local_stream
from kvcast.bench.hostile_streams import (
    HostileStream,
    LocalHostiles,
    http_hostiles,
    noise_hostiles,
)
from kvcast.bench.replay import NodeLink
from kvcast.bench.soak import plan as kinds
from kvcast.bench.soak.plan import Fault
from kvcast.hostagent.client import KvcastError
from kvcast.topologies.part import Part, PartError
from kvcast.topologies.pool import Pool, PoolError
from kvcast.topologies.processes import TunnelNetwork
from kvcast.topologies.star import Host

_FRAMES = 250
"""Hostile frames at a time."""
_QUEUE_BYTES = 100_000
"""Hostile frames wait while so much waits at the port: floods are another bench's."""
_CONNECTIONS = 8
_KEYS = 4
_NAMES = 150
"""Names of namespaces that an operator asks for, over and over: more than there may be."""
_TRIES = 15
_AGAIN_S = 1.0
_RESTART_S = 90.0
_CLIENT_READY_S = 20.0


@dataclass(frozen=True)
class Strike:
    """One fault that struck. Times are seconds of the soak."""

    kind: str
    target: str
    began_s: float
    ended_s: float


class Faults:
    """The faults of one soak. `recent()` gives namespaces and keys of blocks that are being read,
    the latest last."""

    def __init__(
        self,
        pool: Pool,
        links: Sequence[NodeLink],
        attacker: Host,
        seed: int,
        recent: Callable[[], Sequence[tuple[int, bytes]]],
    ) -> None:
        assert isinstance(pool.network, TunnelNetwork)
        self.counts: Counter[str] = Counter()
        """How often each kind struck; of frames and connections, how many."""
        self.left_out: Counter[str] = Counter()
        """Faults that found their target dead or stopped, or nothing to do; tried again."""
        self.refused: Counter[str] = Counter()
        """Pins that the switch did not hold at once, by what the controller said."""
        self.strikes: list[Strike] = []
        self.problems: list[str] = []
        self.away: set[str] = set()
        """Parts that are dead or stopped on purpose."""
        self._pool = pool
        self._network = pool.network
        self._links = list(links)
        self._hosts = list(pool.star.hosts[: len(links)])
        self._attacker = attacker
        self._hostile_rng = random.Random(seed)
        self._rng = random.Random(f"faults/{seed}")
        self._recent = recent
        self._returned: dict[str, float] = {}
        self._began = 0.0
        self._clients = 0

    # --- what others ask ----------------------------------------------------------------------

    def undisturbed(self, part: str, since: float) -> bool:
        """Whether that part was neither dead nor stopped since then (of time.monotonic)."""
        return part not in self.away and self._returned.get(part, 0.0) < since

    def begin(self, now: float) -> None:
        """The soak's clock starts at `now` (of time.monotonic)."""
        self._began = now

    def elapsed(self) -> float:
        """Seconds of the soak."""
        return time.monotonic() - self._began

    # --- lanes --------------------------------------------------------------------------------

    async def run(self, plan: dict[str, list[Fault]], until_s: float) -> None:
        """Strike as planned, and begin nothing after `until_s`; what is taken away is given back
        before this returns."""
        async with asyncio.TaskGroup() as lanes:
            for faults in plan.values():
                lanes.create_task(self._lane(faults, until_s))

    async def _lane(self, faults: Sequence[Fault], until_s: float) -> None:
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s - self.elapsed()))
            for _ in range(_TRIES):
                if self.elapsed() >= until_s:
                    return
                if await self.strike(fault):
                    break
                await asyncio.sleep(_AGAIN_S)

    async def strike(self, fault: Fault) -> bool:
        """One fault, from its beginning to its end; whether it struck."""
        began_s = self.elapsed()
        act, target = {
            kinds.KILL_AGENT: (self._kill, self._hosts[fault.node].node_id),
            kinds.KILL_SWITCH: (self._kill, "switch"),
            kinds.KILL_CONTROLLER: (self._kill, "controller"),
            kinds.STOP_AGENT: (self._stop, self._hosts[fault.node].node_id),
            kinds.STOP_SWITCH: (self._stop, "switch"),
            kinds.STOP_CONTROLLER: (self._stop, "controller"),
            kinds.KILL_CLIENT: (self._client, self._hosts[fault.node].node_id),
            kinds.STOP_CLIENT: (self._client, self._hosts[fault.node].node_id),
            kinds.HOSTILE_FRAMES: (self._frames_to_switch, "switch"),
            kinds.HOSTILE_LOCAL: (self._bytes_to_socket, self._hosts[fault.node].node_id),
            kinds.HOSTILE_HTTP: (self._bytes_to_http, "controller"),
            kinds.HOSTILE_TCP: (self._bytes_to_port, self._hosts[fault.node].node_id),
            kinds.MAKE_NAMES: (self._make_names, self._hosts[fault.node].node_id),
            kinds.SET_PINS: (self._set_pins, "controller"),
            kinds.REMOVE_PINS: (self._remove_pins, "controller"),
            kinds.DROP_BLOCKS: (self._drop_blocks, self._hosts[fault.node].node_id),
        }[fault.kind]
        if target in self.away:
            self.left_out[fault.kind] += 1
            return False
        try:
            counted = await act(fault, target)
        except (KvcastError, PartError, OSError, TimeoutError, PoolError) as error:
            # What was attacked went away meanwhile, or refused; what must not happen is noted
            # where it happens.
            if fault.kind in kinds.DISRUPTIVE:
                self.problems.append(f"{fault.kind} ({target}): {error}")
            self.left_out[fault.kind] += 1
            return False
        if not counted:  # there was nothing to do it to
            self.left_out[fault.kind] += 1
            return False
        self.counts[fault.kind] += counted
        strike = Strike(fault.kind, target, round(began_s, 2), round(self.elapsed(), 2))
        self.strikes.append(strike)
        return True

    # --- parts --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _without(self, part: str) -> AsyncIterator[None]:
        self.away.add(part)
        try:
            yield
        finally:
            self.away.discard(part)
            self._returned[part] = time.monotonic()

    async def _kill(self, fault: Fault, part: str) -> int:
        async with self._without(part):
            await self._pool.kill(part)
            until = time.monotonic() + fault.lasts_s
            with contextlib.suppress(OSError):
                if part == "switch":
                    await self._frames_to_agents()
                elif part != "controller":
                    host = self._hosts[fault.node]
                    sent = await self._send(
                        self._network.node_side(host), self._network.switch_side(host), host
                    )
                    self.counts[kinds.HOSTILE_AS_DEAD] += sent
            await asyncio.sleep(max(0.0, until - time.monotonic()))
            await self._pool.restart(part, _RESTART_S)
        return 1

    async def revive(self, part: str) -> None:
        """Start a part again that died by itself."""
        async with self._without(part):
            await self._pool.restart(part, _RESTART_S)

    async def _stop(self, fault: Fault, part: str) -> int:
        async with self._without(part):
            self._pool.pause(part)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                self._pool.resume(part)
        return 1

    # --- clients ------------------------------------------------------------------------------

    async def _client(self, fault: Fault, node_id: str) -> int:
        """A process that holds blocks, pins and reservations is stopped, or not, and killed."""
        namespace, keys = self._target()
        self._clients += 1
        client = Part(
            f"client-{self._clients}",
            [
                *self._pool.parts["controller"].command[:1],
                "-m",
                "kvcast.bench.soak.client",
                str(self._pool.sockets[node_id]),
                str(namespace),
                *(key.hex() for key in keys),
            ],
            log_path=self._pool.folder / "clients.log",
        )
        await client.start()
        try:
            await client.wait_ready(_CLIENT_READY_S)
            if fault.kind == kinds.STOP_CLIENT:
                client.send_signal(signal.SIGSTOP)
            await asyncio.sleep(fault.lasts_s)
            if fault.kind == kinds.STOP_CLIENT:
                client.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.1)
        finally:
            await client.kill()
        return 1

    # --- frames -------------------------------------------------------------------------------

    async def _frames_to_switch(self, fault: Fault, target: str) -> int:
        me = self._attacker
        return await self._send(self._network.node_side(me), self._network.switch_side(me), me)

    async def _frames_to_agents(self) -> None:
        for host in self._hosts:
            if host.node_id in self.away:
                continue
            sent = await self._send(
                self._network.switch_side(host), self._network.node_side(host), self._attacker, host
            )
            self.counts[kinds.HOSTILE_TO_AGENTS] += sent

    async def _send(
        self, place: tuple[str, int], peer: tuple[str, int], me: Host, other: Host | None = None
    ) -> int:
        """Hostile frames from a place to its peer, as if from one host to another; how many."""
        if other is None:
            other = self._rng.choice([host for host in self._hosts if host is not me])
        namespace, keys = self._target()
        frames = hostile_frames(self._hostile_rng, me, other, namespace, keys, backward=0.3)
        sent = 0
        with bound_socket(*place, peer=peer) as attacker:
            while sent < _FRAMES:
                for _ in range(min(25, _FRAMES - sent)):
                    with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                        attacker.send(next(frames))
                    sent += 1
                discard(attacker)
                await asyncio.sleep(0.01)
                if bytes_waiting(peer) > _QUEUE_BYTES:
                    break
        return sent

    def _target(self) -> tuple[int, list[bytes]]:
        """A namespace and some of its blocks that are being read."""
        recent = list(self._recent())
        if not recent:
            return 1, [self._rng.randbytes(16)]
        namespace = recent[-1][0]
        return namespace, [key for place, key in recent if place == namespace][-_KEYS:]

    # --- streams ------------------------------------------------------------------------------

    async def _bytes_to_socket(self, fault: Fault, node_id: str) -> int:
        stream = partial(local_stream, self._hostile_rng, *self._target())
        hostiles = LocalHostiles(str(self._pool.sockets[node_id]), stream)
        return await self._stream(hostiles, node_id)

    async def _bytes_to_http(self, fault: Fault, target: str) -> int:
        namespace, keys = self._target()
        stream = partial(http_stream, self._hostile_rng, namespace, keys[0])
        hostiles = http_hostiles(self._pool.network.http_address, stream)
        return await self._stream(hostiles, target)

    async def _bytes_to_port(self, fault: Fault, node_id: str) -> int:
        bulk = self._pool.parts[node_id].ready["bulk"].rpartition(":")
        address, part = self._rng.choice(
            (
                ((bulk[0], int(bulk[2])), node_id),
                (self._pool.network.agents_address, "controller"),
                (self._pool.network.grpc_address, "switch"),
            )
        )
        return await self._stream(noise_hostiles(address, self._hostile_rng), part)

    async def _stream(self, hostiles: HostileStream, part: str) -> int:
        began = time.monotonic()
        ended = await asyncio.gather(
            *(hostiles.one() for _ in range(_CONNECTIONS)), return_exceptions=True
        )
        if self.undisturbed(part, began):
            self.problems += [
                f"a hostile connection to {part} hung" for _ in range(hostiles.outcomes["hung"])
            ]
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, OSError):
                raise error
        return hostiles.connections

    # --- an operator --------------------------------------------------------------------------

    async def _make_names(self, fault: Fault, node_id: str) -> int:
        """Ask for some, old ones and new ones, and in the end for more than there may be."""
        client = await self._links[fault.node].client()
        asked = 0
        for _ in range(4):
            number = self._rng.randrange(_NAMES)
            asked += 1
            with contextlib.suppress(KvcastError):  # all are taken, or there is no controller
                await client.namespace("bench", f"soak-{number}", "1", "bytes")
        namespace, _ = self._target()
        members = [host.node_id for host in self._hosts if self._rng.random() < 0.5]
        if len(members) > 1:
            asked += 1
            with contextlib.suppress(KvcastError):
                await client.group(namespace, members)
        return asked

    async def _set_pins(self, fault: Fault, target: str) -> int:
        namespace, keys = self._target()
        done = 0
        for key in keys[-2:]:
            body = {"namespace": namespace, "key": key.hex(), "wait_s": 3.0}
            try:
                await self._pool.http("POST", "/v1/pin", body)
                done += 1
            except PoolError as error:
                # Pinned all the same, or refused: the block is gone, or there is no room.
                done += "pinned, but" in str(error)
                self.refused[re.sub(r"[0-9a-f]{8,}|[0-9.]+", "…", str(error))] += 1
        return done

    async def _remove_pins(self, fault: Fault, target: str) -> int:
        """All of them, hostile clients' too, so that the switch's memory is not pinned for good."""
        done = 0
        for each in (await self._pool.status())["pins"]:
            body = {"namespace": each["namespace"], "key": each["key"]}
            with contextlib.suppress(PoolError):
                await self._pool.http("DELETE", "/v1/pin", body)
                done += 1
        return done

    async def _drop_blocks(self, fault: Fault, node_id: str) -> int:
        client = await self._links[fault.node].client()
        namespace, keys = self._target()
        return await client.drop(namespace, keys[:2])
