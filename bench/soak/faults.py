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
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from kvcast.bench.soak.witness import Witness
from kvcast.bench.usage import children_of, has_ended
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
_GONE_WITHIN_S = 10.0
_OPERATORS_PATIENCE_S = 60.0
_LAPSE_S = 2.0
"""An agent that is away for so long may count as dead: it renews its lease about once a second."""
_RECOVERED_WITHIN_S = 30.0
_CLIENT_READY_S = 20.0


@dataclass(frozen=True)
class Strike:
    """One fault that struck. Times are seconds of the soak."""

    kind: str
    target: str
    began_s: float
    ended_s: float


def moves_of(strikes: Sequence[Strike]) -> dict[str, dict[str, Any]]:
    """By kind of move, how many there were and how long they took in seconds, with the looks at
    what became of the blocks."""
    took_s = {
        kind: sorted(s.ended_s - s.began_s for s in strikes if s.kind == kind)
        for kind in kinds.MOVES
    }
    return {
        kind: {
            "count": len(times),
            "median_s": round(times[len(times) // 2], 1) if times else None,
            "longest_s": round(times[-1], 1) if times else None,
        }
        for kind, times in took_s.items()
    }


class Faults:
    """The faults of one soak. `recent()` gives namespaces and keys of blocks that are being read,
    the latest last; `patient` are links of the witness's own; `files` by node id are what it has
    below its DRAM. `moved()` is called when a node or an agent has gone or come, before the next
    does, so that a process is seen however shortly it lives."""

    def __init__(
        self,
        pool: Pool,
        links: Sequence[NodeLink],
        attacker: Host,
        seed: int,
        recent: Callable[[], Sequence[tuple[int, bytes]]],
        patient: Sequence[NodeLink],
        files: Mapping[str, Sequence[Path]],
        moved: Callable[[], None],
    ) -> None:
        assert isinstance(pool.network, TunnelNetwork)
        self._moved = moved
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
        self.claimed: set[str] = set()
        """Agents that one fault has for itself at the moment."""
        self._pool = pool
        self._network = pool.network
        self._links = list(links)
        self._hosts = list(pool.star.hosts[: len(links)])
        self._attacker = attacker
        self._hostile_rng = random.Random(seed)
        self._rng = random.Random(f"faults/{seed}")
        self._recent = recent
        self._files = files
        self._went: dict[str, float] = {}
        self._returned: dict[str, float] = {}
        self._lapsed_at = -float("inf")
        """When an agent was last away for `_LAPSE_S`."""
        self.witness = Witness(pool, patient, self._hosts, seed, self.undisturbed, self.lapsed)
        self._began = 0.0
        self._clients = 0

    # --- what others ask ----------------------------------------------------------------------

    def undisturbed(self, part: str, since: float) -> bool:
        """Whether that part was neither dead nor stopped since then (of time.monotonic)."""
        return part not in self.away and self._returned.get(part, 0.0) < since

    def lapsed(self, since: float) -> bool:
        """Whether an agent may have counted as dead since then (of time.monotonic)."""
        now = time.monotonic()
        agents = [host.node_id for host in self._hosts if host.node_id in self.away]
        return self._lapsed_at >= since or any(
            now - self._went[node] >= _LAPSE_S for node in agents
        )

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
            kinds.DRAIN_NODE: (self._drain, self._hosts[fault.node].node_id),
            kinds.JOIN_NODE: (self._leave_and_join, self._hosts[fault.node].node_id),
            kinds.TAKE_OVER: (self._take_over, self._hosts[fault.node].node_id),
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
        if target in self.away or target in self.claimed:
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
            return fault.kind in kinds.MOVES  # which it was given time enough to do
        if not counted:  # there was nothing to do it to
            self.left_out[fault.kind] += 1
            return False
        self.counts[fault.kind] += counted
        if fault.kind in kinds.MOVES:
            self._moved()
        strike = Strike(fault.kind, target, round(began_s, 2), round(self.elapsed(), 2))
        self.strikes.append(strike)
        return True

    # --- parts --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _without(self, part: str, *, drained: bool = False) -> AsyncIterator[None]:
        """`drained`: others have its blocks, and nothing is lost with it."""
        self._went[part] = float("inf") if drained else time.monotonic()
        self.away.add(part)
        try:
            yield
        finally:
            self.away.discard(part)
            now = self._returned[part] = time.monotonic()
            if now - self._went[part] >= _LAPSE_S and part not in ("switch", "controller"):
                self._lapsed_at = now

    async def _kill(self, fault: Fault, part: str) -> int:
        async with self._without(part):
            children = self._children(part)
            await self._pool.kill(part)
            for child in children:  # of an agent that keeps its arena
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            await self._gone(part, children)
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
            children = self._children(part)
            self._pool.pause(part)
            self._signal(children, signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                self._pool.resume(part)
                self._signal(children, signal.SIGCONT)
        return 1

    def _children(self, part: str) -> list[int]:
        """The processes that a part has started: of an agent that keeps its arena, the agent,
        and the one that stands by."""
        pid = self._pool.parts[part].pid
        return [] if pid is None else children_of(pid)

    def _signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _gone(self, part: str, children: Sequence[int]) -> None:
        until = time.monotonic() + _GONE_WITHIN_S
        while not all(has_ended(child) for child in children):
            if time.monotonic() > until:
                raise PoolError(f"{part}: what it has started lives after it")
            await asyncio.sleep(0.02)

    # --- what moves ---------------------------------------------------------------------------

    async def _drain(self, fault: Fault, node: str) -> int:
        """Others have a node's blocks, and then the node has them again."""
        async with self.witness.while_moving(f"{fault.kind} ({node})") as watched:
            async with self._drained(node):
                await watched.look()
                await asyncio.sleep(fault.lasts_s)
            await watched.look()
        return 1

    @contextlib.asynccontextmanager
    async def _drained(self, node: str) -> AsyncIterator[None]:
        """At first a node is drained; at the end it has its buckets again."""
        try:
            await self._ask("POST", "/v1/drain", {"node_id": node})
            await self.witness.settled(node, placed=False)
            for each in (await self._ask("GET", "/v1/status"))["nodes"]:
                if each["node_id"] == node and each["handover"]["failed"]:
                    raise PoolError(f"blocks could not be handed over: {each['handover']}")
            yield
        except Exception:
            await self._ask("DELETE", "/v1/drain", {"node_id": node})
            raise
        await self._ask("DELETE", "/v1/drain", {"node_id": node})
        await self.witness.settled(node)

    @contextlib.asynccontextmanager
    async def _claim(self, node: str) -> AsyncIterator[None]:
        """No other fault touches that agent until the end."""
        while node in self.away:  # noqa: ASYNC110 - whose end nobody announces
            await asyncio.sleep(0.05)
        self.claimed.add(node)
        try:
            yield
        finally:
            self.claimed.discard(node)

    async def _leave_and_join(self, fault: Fault, node: str) -> int:
        """A drained node goes for good, and one of its name comes that has nothing."""
        async with self.witness.while_moving(f"{fault.kind} ({node})") as watched:
            async with (
                self._drained(node),
                self._claim(node),
                self._without(node, drained=True),
            ):
                children = self._children(node)
                await self._pool.parts[node].stop()
                await self._gone(node, children)
                for path in self._files_of(node):
                    path.unlink(missing_ok=True)
                try:
                    await watched.look()
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    await self._pool.restart(node, _RESTART_S)
                await self.witness.has_map(node)
            await watched.look()
        return 1

    def _files_of(self, node: str) -> list[Path]:
        arenas = [path for path in self._pool.arenas if f"-{node}.arena" in path.name]
        return [*arenas, *self._files.get(node, ())]

    async def _take_over(self, fault: Fault, node: str) -> int:
        """Another agent serves what is in the arena, and nobody notices."""
        async with self.witness.while_moving(f"{fault.kind} ({node})") as watched:
            async with self._claim(node), watched.kept_by(node):
                await self._pool.take_over(node, _RESTART_S)
                await self._recovered(node)
            await watched.look()
        return 1

    async def _recovered(self, node: str) -> None:
        """Wait until an agent has checked what it found in its arena."""
        until = time.monotonic() + _RECOVERED_WITHIN_S
        while (await self.witness.counters(node))["recovery_left"]:
            if time.monotonic() > until:
                raise PoolError(f"not all is checked after {_RECOVERED_WITHIN_S:g} s")
            await asyncio.sleep(0.1)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """As an operator, who tries again while the controller is stopped or has too much to do."""
        until = time.monotonic() + _OPERATORS_PATIENCE_S
        while True:
            try:
                return await self._pool.http(method, path, body)
            except (OSError, PoolError):
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(_AGAIN_S)

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
