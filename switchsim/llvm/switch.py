"""The compiled engine: the program as machine code.

`CompiledSwitch` is an `Engine` and gives the results of the reference engine; a packet loop in
machine code calls `native_entry` instead of `process`. This module puts the parts together:
layouts and code (`layout` to `traffic`), and the state behind them (`memory` to
`entries`). It opens nothing and reads no clock.

The control plane may write while another thread runs packets through `native_entry`; two threads
must not write at once. What a program logs through `native_entry` is written out when digests are
taken.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvcast import native
from kvcast.native.jit import Library, default_cache, load
from kvcast.native.subset import ctypes_of, size_of
from kvcast.native.writer import Module
from kvcast.switchsim.engine import Digest, Engine
from kvcast.switchsim.ir import Program, ProgramError, UnsupportedConstruct
from kvcast.switchsim.llvm.abi import EPOCH_IDLE, MAX_FRAME_BYTES, Desc, NativeEntry, Outbox
from kvcast.switchsim.llvm.actions import Toolbox
from kvcast.switchsim.llvm.control import ProgramPlan
from kvcast.switchsim.llvm.entries import NativeProfile, NativeTable
from kvcast.switchsim.llvm.externs import RANDOM_WORDS, Runtime
from kvcast.switchsim.llvm.hashes import Hashes
from kvcast.switchsim.llvm.layout import ContextLayout, PhvLayout, stored_bytes, unpack_value
from kvcast.switchsim.llvm.log import LogReader, log
from kvcast.switchsim.llvm.memory import Heap, Reclaimer, Region
from kvcast.switchsim.llvm.records import Native
from kvcast.switchsim.llvm.scope import Shared
from kvcast.switchsim.llvm.state import (
    STATS,
    NativeCounters,
    NativeMeters,
    NativeRegisters,
    NativeStats,
)
from kvcast.switchsim.llvm.tables import write_table_functions
from kvcast.switchsim.llvm.traffic import (
    REPLICA_SETS,
    TrafficWriter,
    digest_offsets,
    digest_slot_bytes,
)
from kvcast.switchsim.semantics import check_ports

ARENA_BYTES = 256 << 20
"""Memory for the copies and further passes of one frame; pages are taken as they are needed."""

POPULATE_BYTES = 1 << 30
"""Most memory that a program's state takes when it is loaded, where that is asked for; beyond it,
pages are taken as they are needed."""

OUTBOX_BYTES = 256 << 20
OUTBOX_FRAMES = 1 << 16
"""Room for what one call of `process` may send."""

_EXPORTS = (
    "process",
    "process_guarded",
    "table_insert",
    "table_replace",
    "table_rehash",
    "native_fence",
)


@dataclass(slots=True)
class _Code:
    """Layouts and compiled code of a program."""

    plan: ProgramPlan
    phv: PhvLayout
    context: ContextLayout
    library: Library
    learn_widths: dict[int, tuple[int, ...]]


@cache
def _engine_version() -> str:
    """Changes whenever the sources do that decide on the code."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in ("ir.py", "semantics.py", "hashing.py"):
        digest.update((package / name).read_bytes())
    for folder in (Path(native.__file__).parent, package / "llvm"):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def compile_program(
    program: Program,
    *,
    drop_port: int,
    digest_queue_size: int,
    checked: bool,
    cache_folder: Path | None,
) -> _Code:
    """Compile a program, or find it in the cache; UnsupportedConstruct names what cannot be."""
    phv = PhvLayout(program)
    plan = ProgramPlan.of(program)
    context = ContextLayout(STATS, phv)
    for number in plan.tables:
        for part in ("records", "states", "version", "default"):
            context.add(f"table.{number}.{part}")
    for kind, count in (
        ("register", len(program.registers)),
        ("counter", len(program.counters)),
        ("meter", len(program.meters)),
        ("calculation", len(program.calculations)),
        ("selector", len(program.action_profiles)),
    ):
        for number in range(count):
            context.add(f"{kind}.{number}")
    for number in range(len(program.action_profiles)):
        for part in ("records", "slots", "groups"):
            context.add(f"profile.{number}.{part}")
    learn_widths = {
        item.id: tuple(phv.place(r).width for r in item.fields) for item in program.learn_lists
    }
    shared = Shared(program, phv, context, checked, drop_port)

    def text(triple: str, layout: str) -> str:
        module = Module()
        tools = Toolbox(Hashes(module), Runtime(module))
        TrafficWriter(module, shared, tools, plan, digest_queue_size, learn_widths).write()
        write_table_functions(module)
        return module.text(triple, layout)

    options = f"{drop_port} {digest_queue_size} {checked}"
    key = f"{_engine_version()}\n{options}\n{program!r}"
    try:
        library = load(key, text, _EXPORTS, cache_folder)
    except RuntimeError as error:
        raise UnsupportedConstruct(
            f"code that LLVM does not take: {error}", program.name
        ) from error
    return _Code(plan, phv, context, library, learn_widths)


class _Instance:
    """Compiled code with a context of its own; it lives while somebody runs packets through it."""

    def __init__(self, code: _Code, digest_queue_size: int) -> None:
        self.code = code
        self.context = Region(code.context.bytes)
        addresses = code.library.addresses
        i32, i64, pointer = ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p
        common = (pointer, pointer, i64, i64)
        self.process = ctypes.CFUNCTYPE(
            i32, pointer, pointer, ctypes.c_uint32, ctypes.c_uint32, i64, pointer, i64
        )(addresses["process_guarded"])
        # These are too short to let the interpreter lock go for them.
        insert = ctypes.PYFUNCTYPE(i32, *common, ctypes.c_uint32)(addresses["table_insert"])
        replace = ctypes.PYFUNCTYPE(None, *common, ctypes.c_uint32, ctypes.c_uint32)(
            addresses["table_replace"]
        )
        rehash = ctypes.PYFUNCTYPE(None, *common, pointer)(addresses["table_rehash"])
        fence = ctypes.PYFUNCTYPE(None)(addresses["native_fence"])
        epoch = code.context["epoch"]
        self.reclaimer = Reclaimer(lambda: self.context.u64(epoch), fence)
        self.heap = Heap(self.reclaimer)
        self.native = Native(
            self.context,
            code.context,
            code.plan,
            self.reclaimer,
            self.heap,
            insert,
            replace,
            rehash,
        )
        self.arena = Region(ARENA_BYTES)
        self.groups = Region(8 * REPLICA_SETS)
        self.sessions = Region(8 * REPLICA_SETS)
        self.random = Region(4 * RANDOM_WORDS)
        slots = 1 << max(0, digest_queue_size - 1).bit_length()
        self.digest_bytes = digest_slot_bytes(code.learn_widths)
        self.digest_mask = slots - 1
        self.ring = Region(slots * self.digest_bytes)
        self.log = LogReader(code.plan.program)
        self._outbox: tuple[Region, Region] | None = None
        self.kept: list[object] = []
        """What owns the memory of registers, tables and so on: it lives as long as the context."""
        for name, value in (
            ("epoch", EPOCH_IDLE),
            ("arena", self.arena.address),
            ("arena_end", ARENA_BYTES),
            ("groups", self.groups.address),
            ("sessions", self.sessions.address),
            ("random", self.random.address),
            ("digest_ring", self.ring.address),
            ("log_ring", self.log.region.address),
        ):
            self.native.publish(name, value)

    @property
    def outbox(self) -> tuple[Region, Region]:
        """Bytes and descriptors, for callers without a loop."""
        if self._outbox is None:
            self._outbox = Region(OUTBOX_BYTES), Region(OUTBOX_FRAMES * size_of(Desc))
        return self._outbox

    def word(self, name: str) -> int:
        return self.context.u64(self.code.context[name])

    def write_log(self) -> None:
        """Write out what the program has logged, and say whether to go on with it."""
        if not self.log:
            return
        tail, head = self.word("log_tail"), self.word("log_head")
        if head != tail:
            self.log.write_out(tail, head)
            self.native.publish("log_tail", head)
        self.native.publish("log_on", int(log.isEnabledFor(logging.INFO)))

    def set_replicas(
        self, region: Region, number: int, length: int, replicas: Sequence[tuple[int, int]] | None
    ) -> None:
        """Create, replace or (None) delete a set of replicas."""
        address = 0
        if replicas is not None:
            flat = [n for replica in replicas for n in replica]
            data = struct.pack(f"<QQ{len(flat)}I", length, len(replicas), *flat)
            address = self.heap.new(data)
        old = region.u64(8 * number)
        region.set_u64(8 * number, address)
        self.heap.retire(old)


class CompiledSwitch(Engine):
    """A switch without ports or clock whose program is machine code."""

    def __init__(
        self,
        *,
        drop_port: int = 511,
        seed: int = 0,
        digest_queue_size: int = 65536,
        checked: bool = False,
        cache_folder: Path | None = None,
        use_cache: bool = True,
        populate: bool = False,
    ) -> None:
        """`checked` compiles bounds checks into every access whose place is known at run time
        only, and counts in `traps` those that fail. Compiled code is kept in `cache_folder`
        (None: the user's cache) unless `use_cache` is false. `populate` takes the memory of
        registers, counters and the queue of digests (up to POPULATE_BYTES) when a program is
        loaded, and not page by page while packets wait for it."""
        super().__init__(drop_port=drop_port, digest_queue_size=digest_queue_size)
        self._rng = random.Random(seed)
        self.checked = checked
        self._cache_folder = (cache_folder or default_cache()) if use_cache else None
        self._populate = populate
        self._instance: _Instance | None = None
        self._calls = 0

    @property
    def traps(self) -> int:
        """Accesses out of bounds that the checked flavour has caught."""
        return 0 if self._instance is None else self._instance.word("traps")

    # --- the control plane ------------------------------------------------------------------

    def load(self, program: Program) -> None:
        check_ports(program)
        code = compile_program(
            program,
            drop_port=self.drop_port,
            digest_queue_size=self._digest_queue_size,
            checked=self.checked,
            cache_folder=self._cache_folder,
        )
        instance = _Instance(code, self._digest_queue_size)
        native = instance.native
        registers = [NativeRegisters(r) for r in program.registers]
        counters = [None if c.direct else NativeCounters(c) for c in program.counters]
        meters = [None if m.direct else NativeMeters(m, instance.heap) for m in program.meters]
        for kind, arrays in (("register", registers), ("counter", counters), ("meter", meters)):
            for number, one in enumerate(arrays):
                if one is not None:
                    native.publish(f"{kind}.{number}", one.region.address)
        if self._populate:
            left = POPULATE_BYTES
            regions = [one.region for one in (*registers, *counters) if one is not None]
            for region in (*regions, instance.ring):
                if region.size <= left:
                    left -= region.size
                    region.populate()
        profiles = [
            NativeProfile(number, program, native) for number in range(len(program.action_profiles))
        ]
        tables: dict[str, NativeTable] = {}
        for plan in code.plan.tables.values():
            spec = plan.spec
            profile = None if spec.action_profile is None else profiles[spec.action_profile]
            table = NativeTable(plan, native, program.actions, profile)
            table.fill()
            tables[spec.name] = table
        stats = NativeStats(instance.context, code.context[f"stats.{STATS[0]}"])
        for name in STATS:
            setattr(stats, name, getattr(self.stats, name))
        self._seed_random(instance)
        instance.kept += [*registers, *counters, *meters, *profiles, *tables.values()]
        # Nothing above touched the switch; from here on nothing can fail.
        self.stats = stats
        self._instance = instance
        self._adopt(program, tables, registers, counters, meters, profiles)

    def _seed_random(self, instance: _Instance) -> None:
        old = self._instance
        if old is not None:
            instance.random.write(0, old.random.read(0, 4 * RANDOM_WORDS))
            instance.native.publish("random_at", old.word("random_at"))
            return
        state = self._rng.getstate()[1]
        instance.random.write(0, struct.pack(f"<{RANDOM_WORDS}I", *state[:RANDOM_WORDS]))
        instance.native.publish("random_at", state[RANDOM_WORDS])

    def _loaded(self) -> _Instance:
        if self._instance is None:
            raise ProgramError("no program is loaded")
        return self._instance

    def _group_changed(self, group: int) -> None:
        instance = self._loaded()
        instance.set_replicas(instance.groups, group, 0, self.multicast_groups.get(group))

    def _session_changed(self, session: int) -> None:
        instance, made = self._loaded(), self.clone_sessions.get(session)
        length, replicas = (made.packet_length_bytes, made.replicas) if made else (0, None)
        instance.set_replicas(instance.sessions, session, length, replicas)

    def take_digests(self) -> list[Digest]:
        instance, program = self._instance, self.program
        if instance is None or program is None:
            return []
        instance.write_log()
        tail, head = instance.word("digest_tail"), instance.word("digests")
        if tail == head:
            return []
        taken: list[Digest] = []
        lists = {item.id: item for item in program.learn_lists}
        for number in range(tail, head):
            at = (number & instance.digest_mask) * instance.digest_bytes
            item = lists[instance.ring.u32(at)]
            widths = instance.code.learn_widths[item.id]
            offsets, _ = digest_offsets(widths)
            values = tuple(
                unpack_value(instance.ring.read(at + offset, stored_bytes(width)), width)
                for offset, width in zip(offsets, widths, strict=True)
            )
            taken.append(Digest(item.name, values, widths))
        instance.native.publish("digest_tail", head)
        return taken

    # --- the data plane ---------------------------------------------------------------------

    @property
    def native_entry(self) -> NativeEntry:
        """The way in for a packet loop in machine code; of the program that is loaded now."""
        instance = self._loaded()
        base, layout = instance.context.address, instance.code.context
        return NativeEntry(
            process=instance.code.library.addresses["process"],
            context=base,
            epoch_address=base + layout["epoch"],
            digest_pending_address=base + layout["digests"],
            home=(self, instance),
        )

    def process(self, port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        instance = self._instance
        if instance is None:
            self.stats.dropped_no_program += 1
        elif len(frame) > MAX_FRAME_BYTES:
            self.stats.dropped_abandoned += 1
        if instance is None or len(frame) > MAX_FRAME_BYTES:
            self.stats.frames_in += 1
            self.stats.bytes_in += len(frame)
            return []
        instance.write_log()
        data, descs = instance.outbox
        out = ctypes_of(Outbox)(data.address, OUTBOX_BYTES, 0, descs.address, OUTBOX_FRAMES, 0, 0)
        self._calls += 1
        count = instance.process(
            instance.context.address,
            frame,
            len(frame),
            port & 0x1FF,
            now_us & 0xFFFFFFFFFFFFFFFF,
            ctypes.byref(out),
            self._calls,
        )
        instance.write_log()
        sent: list[tuple[int, bytes]] = []
        for n in range(count):
            offset, length, to = struct.unpack("<QII", descs.read(24 * n, 16))
            sent.append((to, data.read(offset, length)))
        return sent
