"""The simulated switch: the real program on a real engine, and the control plane's way to it.

Owns: the engine with its ports, its clock, its reboots, and `SwitchConnection`, which is to the
controller what its gRPC link is: it is made, it breaks, and a write may take effect of which the
answer is lost. Must not know: what the tables mean.

Entries are written to the engine's tables one by one, as P4Runtime's server does; what is there
is remembered by the controller's own names, so that it can be read back.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kvcast.controller.core.program import HEAT_DIGEST
from kvcast.controller.core.reconcile import (
    Change,
    EntryChange,
    EntryKey,
    GroupChange,
    SwitchState,
    Verb,
    apply,
)
from kvcast.controller.core.tiers import HeatSample
from kvcast.controller.switch.control_loop import WRITE_BATCH, SwitchError
from kvcast.p4 import artefact
from kvcast.protocol.messages.wire import KEY_BYTES, BlockId
from kvcast.simulation.network import Link
from kvcast.simulation.world import World
from kvcast.switchsim import loader
from kvcast.switchsim.control_plane.tables import Table
from kvcast.switchsim.ir import Exact, Lpm, Program
from kvcast.switchsim.llvm.switch import CompiledSwitch
from kvcast.switchsim.reference.switch import Switch

CROSSING_S: Final = 2e-6
RPC_S: Final = 400e-6
CONNECT_S: Final = 0.02
RETRY_S: Final = 0.2
DIGEST_S: Final = 0.02
_T = TypeVar("_T")


@functools.cache
def product_program() -> Program:
    """The program that the controller pushes."""
    return loader.load(artefact("v1model").json.read_bytes(), "kvcast")


EngineMaker: TypeAlias = type[CompiledSwitch] | type[Switch]

ENGINES: Final[dict[str, EngineMaker]] = {"llvm": CompiledSwitch, "reference": Switch}
"""By the names that the switch's daemon gives them, its default first."""


@dataclass(frozen=True)
class Pause(Awaitable[None]):
    """What a simulated coroutine awaits: to go on so much later."""

    seconds: float

    def __await__(self) -> Generator[Pause, None, None]:
        yield self


class Observer(Protocol):
    """Whoever watches the data plane."""

    def crossed(self, port: int, frame: bytes, sent: list[tuple[int, bytes]]) -> None: ...

    def switch_reset(self) -> None: ...


class SimSwitch:
    """One switch. `ports` are the links to the hosts, by port number."""

    def __init__(
        self, world: World, engine: EngineMaker, program: Program, clock_offset_s: float
    ) -> None:
        self.world = world
        self.up = True
        self.process_s = 0.0
        """Real time spent in the data plane; for measurements only."""
        self.ports: dict[int, Link] = {}
        self.observer: Observer | None = None
        self.connections: list[SwitchConnection] = []
        self._engine = engine
        self._product = program
        self._offset_s = clock_offset_s
        self._digest_due = False
        self._boot()

    # --- life -------------------------------------------------------------------------------

    def _boot(self) -> None:
        self.engine = self._engine(seed=0)
        self.holds = SwitchState()
        self.program: Program | None = None

    def crash(self) -> None:
        """Power is gone: no frame passes, every connection breaks, all state is lost."""
        self.up = False
        self._boot()
        self._reset()
        for connection in self.connections:
            connection.lost()

    def boot(self) -> None:
        """Power is back; there is no program until a controller pushes one."""
        self.up = True
        for connection in self.connections:
            connection.try_later(0.0)

    def reprogram(self) -> None:
        """The program is loaded anew under traffic, and so tables and registers are empty; the
        controllers are cut off, as by an operator who restarts the switch's software."""
        self._boot()
        self.push()
        for connection in self.connections:
            connection.lost()
            connection.try_later(CONNECT_S)

    def push(self) -> None:
        """Load the product's program, unless it runs."""
        if self.program is not self._product:
            self.engine.load(self._product)
            self.program = self._product
            self.holds = SwitchState()
            self._tables = {name.split(".")[-1]: t for name, t in self.engine.tables.items()}
            self._handles: dict[EntryKey, int] = {}
            self._reset()

    def _reset(self) -> None:
        if self.observer is not None:
            self.observer.switch_reset()

    # --- data plane -------------------------------------------------------------------------

    def receive(self, port: int, frame: bytes) -> None:
        """A frame has come by `port`."""
        if not self.up:
            self.world.counts["frames_at_dead_switch"] += 1
            sent: list[tuple[int, bytes]] = []
        else:
            now_us = int((self.world.now + self._offset_s) * 1e6)
            started = time.perf_counter()
            sent = self.engine.process(port, frame, now_us)
            self.process_s += time.perf_counter() - started
        self.world.counts["switch_frames_in"] += 1
        self.world.counts["switch_frames_out"] += len(sent)
        self.world.note(port, frame)
        assert self.observer is not None
        self.observer.crossed(port, frame, sent)
        for to, data in sent:
            link = self.ports.get(to)
            if link is not None:
                self.world.after(CROSSING_S, functools.partial(link.send, data))
        if not self._digest_due and self.up:
            self._digest_due = True
            self.world.after(DIGEST_S, self._digests)

    def _digests(self) -> None:
        self._digest_due = False
        samples = []
        for digest in self.engine.take_digests():
            namespace, segment, key, port_bits, _reader_bit, count = digest.fields
            block = BlockId(namespace, key.to_bytes(KEY_BYTES, "big"))
            samples.append(HeatSample(block, segment, port_bits, count))
        if samples and HEAT_DIGEST in self.holds.digests:
            for connection in self.connections:
                if connection.primary:
                    connection.heat_counted(samples)

    # --- control plane ----------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether the kvcast program acts, by what was written to it."""
        settings = self.holds.entries.get(("settings", ()))
        return settings is not None and settings.params[0] == 1

    def make(self, change: Change) -> bool:
        """One update; False if P4Runtime would refuse it."""
        match change:
            case EntryChange(verb, key, action):
                if not self._entry(verb, key, action.name, action.params):
                    return False
            case GroupChange(verb, group, replicas):
                present = group in self.holds.groups
                if present == (verb is Verb.INSERT):
                    return False
                if verb is Verb.DELETE:
                    self.engine.delete_multicast_group(group)
                else:
                    self.engine.set_multicast_group(group, sorted(replicas))
            case _:
                pass
        apply(self.holds, change)
        return True

    def _entry(self, verb: Verb, key: EntryKey, action: str, params: tuple[int, ...]) -> bool:
        name, match = key
        table = self._tables[name]
        if not match:
            table.set_default(_full_name(table, action), params)
            return True
        if (key in self.holds.entries) == (verb is Verb.INSERT):
            return False
        if verb is Verb.INSERT:
            values = [Lpm(*v) if isinstance(v, tuple) else Exact(v) for v in match]
            self._handles[key] = table.add(values, 0, _full_name(table, action), params)
        elif verb is Verb.MODIFY:
            table.modify(self._handles[key], _full_name(table, action), params)
        else:
            table.delete(self._handles.pop(key))
        return True

    def direct_counters(self, name: str) -> dict[int, int]:
        """Packets by the value of a table's one exact key."""
        table = self._tables[name]
        counters = {}
        for entry in table:
            (key,) = entry.key
            assert isinstance(key, Exact)
            counters[key.value] = table.read_counter(entry.handle)[0]
        return counters

    def indexed_counters(self, name: str, count: int) -> dict[int, int]:
        """Packets of the first `count` cells of an indirect counter."""
        (array,) = (c for n, c in self.engine.counters.items() if n.split(".")[-1] == name)
        return {index: array.read(index)[0] for index in range(count)}


def _full_name(table: Table, action: str) -> str:
    names = _action_names(table.spec.name, tuple(table._names))
    return names[action]


@functools.lru_cache(maxsize=64)
def _action_names(_table: str, names: tuple[str, ...]) -> dict[str, str]:
    return {name.split(".")[-1]: name for name in names}


class SwitchConnection:
    """One controller's connection to the switch: the control loop's `SwitchPort`."""

    def __init__(
        self,
        switch: SimSwitch,
        election_id: int,
        *,
        slots: int,
        switch_changed: Callable[[], None],
        heat_counted: Callable[[list[HeatSample]], None],
    ) -> None:
        self.mirror: SwitchState | None = None
        self.connected = False
        self.blocked = False
        """The management network between the two is cut."""
        self.heat_counted = heat_counted
        self.election_id = election_id
        self._switch = switch
        self._slots = slots
        self._switch_changed = switch_changed
        self._given_up = False
        switch.connections.append(self)
        self.try_later(CONNECT_S)

    # --- connection -------------------------------------------------------------------------

    def try_later(self, delay_s: float) -> None:
        self._switch.world.after(delay_s + CONNECT_S, self._try)

    def _try(self) -> None:
        if self.connected or self._given_up:
            return
        if not self._switch.up or self.blocked:
            if not self._switch.up:
                return  # `boot` will have it tried again
            self.try_later(RETRY_S)
            return
        self.connected = True
        if self.primary:
            self._switch.push()
        self._tell_all()

    def lost(self) -> None:
        """The connection is gone; another is made when that is possible."""
        if self.connected:
            self.connected = False
            self.mirror = None
            self._switch_changed()
            self._tell_all()
            self.try_later(RETRY_S)

    def block(self) -> None:
        """Cut the management network to the switch."""
        self.blocked = True
        self.lost()

    def unblock(self) -> None:
        self.blocked = False
        self.try_later(0.0)

    def close(self) -> None:
        """The controller's process has ended."""
        self._given_up = True
        self.connected = False
        self._switch.connections.remove(self)
        self._tell_all()

    def _tell_all(self) -> None:
        """Arbitration: everybody connected learns that the primary may be another."""
        for connection in self._switch.connections:
            if connection.connected:
                connection.mirror = None
                connection._switch_changed()

    @property
    def primary_id(self) -> int | None:
        """The highest election id of those connected."""
        if not self.connected:
            return None
        return max(c.election_id for c in self._switch.connections if c.connected)

    @property
    def primary(self) -> bool:
        return self.connected and self.primary_id == self.election_id

    # --- reading and writing ----------------------------------------------------------------

    async def _rpc(self, work: Callable[[], _T]) -> _T:
        """A request and its answer; either may be lost with the connection."""
        await self._there_and_back()
        done = work()
        await self._there_and_back()
        return done

    async def _there_and_back(self) -> None:
        if not self.connected:
            raise SwitchError("not connected")
        await Pause(RPC_S)
        if not self.connected:
            raise SwitchError("connection lost")

    async def read(self) -> SwitchState:
        """What the switch holds."""
        self.mirror = await self._rpc(self._switch.holds.copy)
        return self.mirror.copy()

    async def write(self, changes: Sequence[Change]) -> None:
        """Make these changes, in order; SwitchError, and nobody knows which were made."""
        for start in range(0, len(changes), WRITE_BATCH):
            batch = changes[start : start + WRITE_BATCH]
            try:
                refused = await self._rpc(lambda batch=batch: self._write(batch))  # type: ignore[misc]
                if refused:
                    raise SwitchError(refused)
            except SwitchError:
                self.mirror = None
                raise
            for change in batch:
                if self.mirror is not None:
                    apply(self.mirror, change)

    def _write(self, batch: Sequence[Change]) -> str:
        if not self.primary:
            return "not primary"
        failed = [change for change in batch if not self._switch.make(change)]
        self._switch.world.counts["switch_updates"] += len(batch) - len(failed)
        return f"{len(failed)} updates failed, first {failed[0]}" if failed else ""

    async def table_counters(self, table: str) -> dict[int, int]:
        return await self._rpc(lambda: self._switch.direct_counters(table))

    async def indexed_counters(self, counter: str) -> dict[int, int]:
        return await self._rpc(lambda: self._switch.indexed_counters(counter, self._slots))


def run_coroutine(
    world: World, coroutine: Any, finished: Callable[[BaseException | None], None]
) -> Callable[[], None]:
    """Drive a coroutine that awaits `Pause`s only. `finished` is told its error or None; the
    function returned abandons it where it stands."""
    alive = True

    def step() -> None:
        if not alive:
            return
        try:
            pause = coroutine.send(None)
        except StopIteration:
            finished(None)
        except Exception as error:  # what asyncio would hand to whoever awaits the task
            finished(error)
        else:
            assert isinstance(pause, Pause)
            world.after(pause.seconds, step)

    def abandon() -> None:
        nonlocal alive
        alive = False

    step()
    return abandon
