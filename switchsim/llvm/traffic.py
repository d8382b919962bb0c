"""The way of a frame through the switch, in IR: what `reference.switch` does there.

Ingress, the decision after it (clone, digest, resubmit, multicast, drop, unicast, in this order),
replication, egress, and the ways back. Copies wait in two queues, linked lists in the arena that a
frame's run starts empty: of packets that go to egress (with all their replicas), and of packets
that go to ingress again. A packet that nothing waits in front of goes to egress at once.

Replicas of one packet run egress in the same PHV one after the other; between two of them only what
egress can change is put back: the head, and the headers that it writes.
"""

from __future__ import annotations

from kvcast.native.writer import FALSE, NULL, TRUE, Function, Module, Value, i64, integer
from kvcast.switchsim.llvm.abi import MAX_FRAME_BYTES
from kvcast.switchsim.llvm.actions import Toolbox
from kvcast.switchsim.llvm.control import PipelineWriter, ProgramPlan, written_headers
from kvcast.switchsim.llvm.layout import (
    NATIVE_BITS,
    REG_CHECKSUM_ERROR,
    REG_CLONE_LIST,
    REG_CLONE_SESSION,
    REG_INGRESS_LENGTH,
    REG_LEARN_LIST,
    REG_NOW,
    REG_PACKET_LENGTH,
    REG_PARSER_ERROR,
    REG_RECIRCULATE_LIST,
    REG_RESUBMIT_LIST,
    REG_TRUNCATE,
    align,
    stored_bytes,
)
from kvcast.switchsim.llvm.parser import FRAME, POINTERS, DeparserWriter, ParserWriter
from kvcast.switchsim.llvm.scope import Scope, Shared
from kvcast.switchsim.semantics import (
    EGRESS_CLONE,
    INGRESS_CLONE,
    MAX_PASSES,
    NORMAL,
    RECIRCULATED,
    REPLICATION,
    RESUBMITTED,
    SESSION_MASK,
    TIMESTAMP_MASK,
    UNLIMITED,
    Errors,
)

REPLICA_SETS = 1 << 16
"""Multicast groups and clone sessions have an array of addresses each. What such an address leads
to: uint64 length to cut to (0: none), uint64 count, then uint32 port and uint32 rid of each."""

# Elements of the queues: to egress (next, phv, frame, length, at, replicas or null, count, port),
# and to ingress (next, frame, length, unused, head of the PHV or all of it).
_EGRESS_BYTES = 64
_INGRESS_BYTES = 64

# What several functions take; unlike `POINTERS` and `FRAME`, these promise nothing of aliases.
_CONTEXT = ("ptr", "context")
_PACKET = [_CONTEXT, ("ptr", "phv"), ("ptr", "frame"), ("i64", "length")]
_PROCESS = [
    _CONTEXT,
    ("ptr", "frame"),
    ("i32", "length"),
    ("i32", "port"),
    ("i64", "now"),
    ("ptr", "out"),
]


def digest_offsets(widths: tuple[int, ...]) -> tuple[list[int], int]:
    """Where a digest's fields lie in a slot of the ring, and the end."""
    at, offsets = 8, []
    for width in widths:
        offsets.append(at)
        at += align(stored_bytes(width), 8)
    return offsets, at


def digest_slot_bytes(widths: dict[int, tuple[int, ...]]) -> int:
    """A slot of the ring: uint32 number of the learn list, its fields as stored, from 8 on."""
    sizes = [digest_offsets(w)[1] for w in widths.values()]
    return align(max(sizes, default=8), 64)


class TrafficWriter:
    def __init__(
        self,
        module: Module,
        shared: Shared,
        tools: Toolbox,
        plan: ProgramPlan,
        digest_queue: int,
        learn_widths: dict[int, tuple[int, ...]],
    ) -> None:
        self.module = module
        self.shared = shared
        self.tools = tools
        self.plan = plan
        self.program = shared.program
        self.layout = shared.layout
        self.digest_queue = digest_queue
        self.learn_widths = learn_widths
        lists = self.program.field_lists
        headers = self.program.headers
        metadata_only = all(headers[r.header].metadata for fl in lists for r in fl.fields)
        self.kept_bytes = self.layout.head_bytes if metadata_only else self.layout.bytes
        """What of a PHV has to be remembered for another pass of ingress."""

    def write(self) -> Function:
        called: dict[int, Function] = {}
        pipelines = PipelineWriter(self.module, self.shared, self.tools, self.plan, called)
        self.parse = ParserWriter(self.module, self.shared, self.tools).write()
        self.ingress_control = pipelines.write("ingress.control", self.program.ingress)
        pipelines = PipelineWriter(self.module, self.shared, self.tools, self.plan, called)
        self.egress_control = pipelines.write("egress.control", self.program.egress)
        deparser = DeparserWriter(self.module, self.shared, self.tools)
        self.prepare, self.size, self.emit = deparser.prepare(), deparser.size(), deparser.emit()
        self.new_packet = self._new_packet()
        self.keep = self._keep()
        self.next_pass = self._next_pass()
        self.enqueue = self._enqueue()
        self.clone_egress = self._clone_egress()
        self.egress = self._egress()
        self.replicate = self._replicate()
        self.clone_ingress = self._clone_ingress()
        self.digest = self._digest()
        self.ingress = self._ingress()
        self.drain = self._drain()
        process = self._process()
        self._process_guarded(process)
        return process

    # --- small things -----------------------------------------------------------------------

    def _scope(self, f: Function, phv: Value) -> Scope:
        return Scope(self.shared, f, f.arguments[0], phv)

    def _set(self, scope: Scope, name: str, value: Value) -> None:
        """Set an intrinsic field, if the program has it."""
        ref = self.program.intrinsic_field(name)
        if ref is not None:
            scope.store_field(self.layout.place(ref), value)

    def _get(self, scope: Scope, name: str, bits: int) -> Value:
        """An intrinsic field as `bits` bits; 0 if the program does not have it."""
        ref = self.program.intrinsic_field(name)
        if ref is None:
            return integer(bits, 0)
        return scope.f.resize(scope.load_field(self.layout.place(ref)).value, bits)

    def _append(self, scope: Scope, queue: str, element: Value) -> None:
        f = scope.f
        f.store(NULL, element, 8)
        last = f.load_pointer(scope.word(f"{queue}_last"))
        empty = f.compare("eq", f.load_pointer(scope.word(f"{queue}_first")), NULL)
        link = f.select(empty, scope.word(f"{queue}_first"), last)
        f.store(element, link, 8)
        f.store(element, scope.word(f"{queue}_last"), 8)

    def _leave_if(self, scope: Scope, condition: Value, counter: str) -> None:
        """The function counts and returns if the condition holds."""
        f = scope.f
        with f.when(condition):
            scope.count(counter)
            f.ret(FALSE if f.result == "i1" else None)

    def _take_pass(self, scope: Scope, word: str) -> None:
        """Count in a word of the context; the function returns, and counts a drop, at the bound."""
        f = scope.f
        taken = f.add(f.load(64, scope.word(word), 8), i64(1))
        f.store(taken, scope.word(word), 8)
        over = f.compare("uge", taken, i64(MAX_PASSES))
        self._leave_if(scope, over, "dropped_recirculation_bound")

    def _room(self, scope: Scope, size: Value) -> Value:
        """Memory from the arena; the function returns if there is none, and the drop is counted."""
        f = scope.f
        pointer = self.tools.runtime.allocate(scope, size)
        self._leave_if(scope, f.compare("eq", pointer, NULL), "dropped_recirculation_bound")
        return pointer

    def _new_packet(self) -> Function:
        """A packet with nothing valid and all zero, but for its length and the time."""
        f = self.module.function(
            "packet.new", "void", [*POINTERS, ("i64", "length"), ("i64", "bytes")]
        )
        context, phv, length, bytes_ = f.arguments
        del context
        scope = self._scope(f, phv)
        f.fill(phv, 0, bytes_)
        scope.set_register(REG_NOW, f.load(64, scope.word("now"), 8))
        scope.set_register(REG_PACKET_LENGTH, length)
        scope.set_register(REG_INGRESS_LENGTH, length)
        scope.set_register(REG_TRUNCATE, i64(UNLIMITED))
        self._set(scope, "standard_metadata.packet_length", length)
        f.ret()
        return f

    def _keep(self) -> Function:
        """Reset the metadata of a copy, but for the fields of the list."""
        f = self.module.function(
            "packet.keep",
            "void",
            [_CONTEXT, ("ptr", "copy"), ("ptr", "phv"), ("i32", "list"), ("i32", "instance")],
        )
        _, copy, phv, number, instance = f.arguments
        to, from_ = self._scope(f, copy), self._scope(f, phv)
        start, end = self.layout.metadata_start, self.layout.metadata_end
        f.fill(f.at(copy, start), 0, end - start)
        # Of two lists with one number the last counts.
        lists = {fl.id: fl for fl in self.program.field_lists}
        for field_list in f.cases(number, lists.items()):
            for ref in field_list.fields:
                place = self.layout.place(ref)
                if place.native or (place.width > NATIVE_BITS and place.whole_bytes):
                    size = place.end - place.offset
                    f.copy(to.slot(place.offset), from_.slot(place.offset), size)
                else:
                    to.store_field(place, from_.load_field(place).value)
        self._set(to, "standard_metadata.instance_type", instance)
        f.ret()
        return f

    def _next_pass(self) -> Function:
        """Queue an element for ingress, if the frame has not had its share."""
        f = self.module.function("next_pass", "void", [_CONTEXT, ("ptr", "element")])
        scope = self._scope(f, NULL)
        self._take_pass(scope, "passes")
        self._append(scope, "ingress", f.arguments[1])
        f.ret()
        return f

    def _again(
        self, scope: Scope, frame: Value, length: Value, list_: Value, instance: int, stat: str
    ) -> None:
        """Send a frame to ingress with the metadata of a field list."""
        f = scope.f
        element = self._room(scope, i64(_INGRESS_BYTES + self.kept_bytes))
        f.store(frame, f.at(element, 8), 8)
        f.store(length, f.at(element, 16), 8)
        copy = f.at(element, _INGRESS_BYTES)
        f.call(self.new_packet, [scope.context, copy, length, i64(self.kept_bytes)])
        f.call(self.keep, [scope.context, copy, scope.phv, list_, integer(32, instance)])
        self._set(self._scope(f, copy), "standard_metadata.packet_length", length)
        scope.count(stat)
        f.call(self.next_pass, [scope.context, element])

    # --- replication ------------------------------------------------------------------------

    def _enqueue(self) -> Function:
        """Queue a packet for egress: all replicas of it, or (null) one for `port`."""
        f = self.module.function(
            "enqueue",
            "void",
            [*_PACKET, ("i64", "at"), ("ptr", "replicas"), ("i64", "count"), ("i64", "port")],
        )
        context, phv, frame, length, at, replicas, count, port = f.arguments
        del context
        scope = self._scope(f, phv)
        element = self._room(scope, i64(_EGRESS_BYTES))
        for n, value in enumerate((phv, frame, length, at, replicas, count, port), 1):
            f.store(value, f.at(element, 8 * n), 8)
        self._append(scope, "egress", element)
        f.ret()
        return f

    def _has_priority(self, scope: Scope) -> Value:
        return scope.f.compare(
            "ne", self._get(scope, "intrinsic_metadata.priority", 32), integer(32, 0)
        )

    def _replicate(self) -> Function:
        """Run egress for every replica of a packet, now."""
        f = self.module.function(
            "replicate",
            "void",
            [*POINTERS, *FRAME, ("i64", "at"), ("ptr readonly", "replicas"), ("i64", "count")],
        )
        context, phv, frame, length, at, replicas, count = f.arguments
        scope = self._scope(f, phv)
        scope.set_register(REG_RECIRCULATE_LIST, integer(32, 0))
        with f.when(self._has_priority(scope)):
            f.increment(scope.word("stats.dropped_priority"), count)
            f.ret()
        saved_at = f.alloca(8, 8)
        f.store(NULL, saved_at, 8)
        headers = written_headers(self.program, self.plan, self.program.egress)
        parts = [(0, self.layout.head_bytes)] + [self.layout.block[h] for h in sorted(headers)]
        with f.when(f.compare("ugt", count, i64(1))):
            saved = self._room(scope, i64(self.layout.bytes))
            f.store(saved, saved_at, 8)
            for start, size in parts:
                f.copy(f.at(saved, start), f.at(phv, start), size)
        with f.times(count) as n:
            with f.when(f.compare("ne", n, i64(0))):
                saved = f.load_pointer(saved_at)
                for start, size in parts:
                    f.copy(f.at(phv, start), f.at(saved, start), size)
            replica = f.at(replicas, f.shl(n, 3))
            port = f.load(32, replica, 4)
            self._set(scope, "intrinsic_metadata.egress_rid", f.load(32, f.at(replica, 4), 4))
            f.call(self.egress, [context, phv, frame, length, at, port])
        f.ret()
        return f

    def _take_session(self, scope: Scope) -> tuple[Value, Value]:
        """(replica set or null, field list) of the clone that was asked for."""
        f = scope.f
        number = f.and_(scope.register(REG_CLONE_SESSION), integer(32, SESSION_MASK))
        field_list = scope.register(REG_CLONE_LIST)
        scope.set_register(REG_CLONE_SESSION, integer(32, 0))
        scope.set_register(REG_CLONE_LIST, integer(32, 0))
        sessions = f.load_pointer(scope.word("sessions"))
        session = f.acquire_pointer(f.at(sessions, f.shl(f.zext(number, 64), 3)))
        self._leave_if(scope, f.compare("eq", session, NULL), "unknown_clone_session")
        scope.count("cloned")
        return session, field_list

    def _send_clone(
        self, copy: Scope, session: Value, frame: Value, length: Value, at: Value
    ) -> None:
        f = copy.f
        limit = f.load(64, session, 8)
        with f.when(f.compare("ne", limit, i64(0))):
            copy.set_register(REG_TRUNCATE, limit)
        count = f.load(64, f.at(session, 8), 8)
        replicas = f.at(session, 16)
        f.call(
            self.enqueue,
            [copy.context, copy.phv, frame, length, at, replicas, count, i64(0)],
        )

    def _clone_egress(self) -> Function:
        f = self.module.function("clone.egress", "void", [*_PACKET, ("i64", "at")])
        context, phv, frame, length, at = f.arguments
        scope = self._scope(f, phv)
        session, field_list = self._take_session(scope)
        self._take_pass(scope, "clones")
        copy = self._room(scope, i64(self.layout.bytes))
        f.copy(copy, phv, self.layout.bytes)
        f.call(self.keep, [context, copy, phv, field_list, integer(32, EGRESS_CLONE)])
        copied = self._scope(f, copy)
        copied.set_register(REG_TRUNCATE, i64(UNLIMITED))
        self._send_clone(copied, session, frame, length, at)
        f.ret()
        return f

    def _clone_ingress(self) -> Function:
        """True: the parser gave the packet up."""
        f = self.module.function("clone.ingress", "i1", _PACKET)
        context, phv, frame, length = f.arguments
        scope = self._scope(f, phv)
        session, field_list = self._take_session(scope)
        copy = self._room(scope, i64(self.layout.bytes))
        f.call(self.new_packet, [context, copy, length, i64(self.layout.bytes)])
        copied = self._scope(f, copy)
        port = f.load(64, scope.word("port"), 8)
        self._set(copied, "standard_metadata.ingress_port", port)
        at = f.call(self.parse, [context, copy, frame, length])
        with f.when(f.compare("slt", at, i64(0))):
            f.ret(TRUE)
        f.call(self.keep, [context, copy, phv, field_list, integer(32, INGRESS_CLONE)])
        self._send_clone(copied, session, frame, length, at)
        f.ret(FALSE)
        return f

    # --- ingress ----------------------------------------------------------------------------

    def _digest(self) -> Function:
        f = self.module.function("digest", "void", POINTERS)
        scope = self._scope(f, f.arguments[1])
        number = scope.register(REG_LEARN_LIST)
        scope.set_register(REG_LEARN_LIST, integer(32, 0))
        lists = {item.id: item for item in self.program.learn_lists}
        none, some = f.new_block("none"), f.new_block("some")
        f.switch(number, none, [(n, some) for n in lists])
        f.start(none)
        f.ret()
        f.start(some)
        head = f.load(64, scope.word("digests"), 8)
        tail = f.acquire(64, scope.word("digest_tail"))
        full = f.compare("uge", f.sub(head, tail), i64(self.digest_queue))
        self._leave_if(scope, full, "digests_overflowed")
        scope.count("digests")
        slots = 1 << max(0, self.digest_queue - 1).bit_length()
        size = digest_slot_bytes(self.learn_widths)
        ring = f.load_pointer(scope.word("digest_ring"))
        slot = f.at(ring, f.mul(f.and_(head, i64(slots - 1)), i64(size)))
        f.store(number, slot, 4)
        for item in f.cases(number, lists.items()):
            offsets, _ = digest_offsets(self.learn_widths[item.id])
            for ref, offset in zip(item.fields, offsets, strict=True):
                place = self.layout.place(ref)
                if place.width == 0:
                    continue
                to = f.at(slot, offset)
                if place.width > NATIVE_BITS and place.whole_bytes:
                    f.copy(to, scope.slot(place.offset), stored_bytes(place.width))
                else:
                    scope.store_stored(scope.load_field(place).value, to, place.width)
        f.release(f.add(head, i64(1)), scope.word("digests"))
        f.ret()
        return f

    def _ingress(self) -> Function:
        f = self.module.function("ingress", "void", [*POINTERS, *FRAME])
        context, phv, frame, length = f.arguments
        scope = self._scope(f, phv)
        scope.count("ingress_passes")
        abandoned = f.new_block("abandoned")
        at = f.call(self.parse, [context, phv, frame, length])
        f.leave_if(f.compare("slt", at, i64(0)), abandoned)
        error = scope.register(REG_PARSER_ERROR)
        no_error = integer(32, Errors(self.program).no_error)
        with f.when(f.compare("ne", error, no_error)):
            scope.count("parser_errors")
        self._set(scope, "standard_metadata.parser_error", error)
        wrong = scope.register(REG_CHECKSUM_ERROR)
        with f.when(f.compare("ne", wrong, integer(32, 0))):
            scope.count("checksum_errors")
        self._set(scope, "standard_metadata.checksum_error", wrong)

        f.leave_if(f.call(self.ingress_control, [context, phv]), abandoned)
        with f.when(f.compare("ne", scope.register(REG_CLONE_SESSION), integer(32, 0))):
            f.leave_if(f.call(self.clone_ingress, [context, phv, frame, length]), abandoned)
        with f.when(f.compare("ne", scope.register(REG_LEARN_LIST), integer(32, 0))):
            f.call(self.digest, [context, phv])
        resubmit = scope.register(REG_RESUBMIT_LIST)
        with f.when(f.compare("ne", resubmit, integer(32, 0))):
            self._again(scope, frame, length, resubmit, RESUBMITTED, "resubmitted")
            f.ret()
        group = self._get(scope, "intrinsic_metadata.mcast_grp", 64)
        with f.when(f.compare("ne", group, i64(0))):
            self._set(scope, "standard_metadata.instance_type", integer(32, REPLICATION))
            self._multicast(scope, frame, length, at, group)
        port = self._get(scope, "standard_metadata.egress_spec", 32)
        dropped = f.compare("eq", port, integer(32, self.shared.drop_port))
        self._leave_if(scope, dropped, "dropped_ingress")
        self._set(scope, "standard_metadata.instance_type", integer(32, NORMAL))
        self._leave_if(scope, self._has_priority(scope), "dropped_priority")
        with f.when(self._waiting(scope)):
            arguments = [context, phv, frame, length, at, NULL, i64(1), f.zext(port, 64)]
            f.call(self.enqueue, arguments)
            f.ret()
        f.call(self.egress, [context, phv, frame, length, at, port])
        f.ret()
        f.start(abandoned)
        scope.count("dropped_abandoned")
        f.ret()
        return f

    def _waiting(self, scope: Scope) -> Value:
        first = scope.f.load_pointer(scope.word("egress_first"))
        return scope.f.compare("ne", first, NULL)

    def _multicast(
        self, scope: Scope, frame: Value, length: Value, at: Value, group: Value
    ) -> None:
        """Ends in a return."""
        f = scope.f
        self._leave_if(scope, f.compare("uge", group, i64(REPLICA_SETS)), "dropped_unknown_group")
        groups = f.load_pointer(scope.word("groups"))
        replicas = f.acquire_pointer(f.at(groups, f.shl(group, 3)))
        self._leave_if(scope, f.compare("eq", replicas, NULL), "dropped_unknown_group")
        # Copies of a multicast lose what was requested for the packet, truncation included.
        scope.set_register(REG_TRUNCATE, i64(UNLIMITED))
        count = f.load(64, f.at(replicas, 8), 8)
        first = f.at(replicas, 16)
        with f.when(self._waiting(scope)):
            arguments = [scope.context, scope.phv, frame, length, at, first, count, i64(0)]
            f.call(self.enqueue, arguments)
            f.ret()
        f.call(self.replicate, [scope.context, scope.phv, frame, length, at, first, count])
        f.ret()

    # --- egress -----------------------------------------------------------------------------

    def _egress(self) -> Function:
        f = self.module.function(
            "egress", "void", [*POINTERS, *FRAME, ("i64", "at"), ("i32", "port")]
        )
        context, phv, frame, length, at, port = f.arguments
        scope = self._scope(f, phv)
        scope.count("egress_passes")
        now = f.load(64, scope.word("now"), 8)
        stamp = f.and_(now, i64(TIMESTAMP_MASK))
        self._set(scope, "intrinsic_metadata.egress_global_timestamp", stamp)
        self._set(scope, "queueing_metadata.enq_timestamp", f.and_(stamp, i64(0xFFFFFFFF)))
        self._set(scope, "standard_metadata.egress_port", port)
        # Something else than the drop port, which would drop the packet.
        other = integer(32, (self.shared.drop_port + 1) & 0x1FF)
        self._set(scope, "standard_metadata.egress_spec", other)
        packet_length = scope.register(REG_PACKET_LENGTH)
        self._set(scope, "standard_metadata.packet_length", packet_length)

        abandoned = f.new_block("abandoned")
        f.leave_if(f.call(self.egress_control, [context, phv]), abandoned)
        with f.when(f.compare("ne", scope.register(REG_CLONE_SESSION), integer(32, 0))):
            f.call(self.clone_egress, [context, phv, frame, length, at])
        spec = self._get(scope, "standard_metadata.egress_spec", 32)
        dropped = f.compare("eq", spec, integer(32, self.shared.drop_port))
        self._leave_if(scope, dropped, "dropped_egress")
        f.leave_if(f.call(self.prepare, [context, phv, frame, length, at]), abandoned)
        headers = f.call(self.size, [context, phv])
        payload = f.sub(length, at)
        again = scope.register(REG_RECIRCULATE_LIST)
        with f.when(f.compare("ne", again, integer(32, 0))):
            total = f.add(headers, payload)
            out = self._room(scope, f.add(total, i64(8)))
            behind = f.call(self.emit, [context, phv, out, f.at(out, total)])
            f.copy(behind, f.at(frame, at), payload)
            self._again(scope, out, total, again, RECIRCULATED, "recirculated")
            f.ret()
        self._send(scope, port, headers, f.at(frame, at), payload)
        f.ret()
        f.start(abandoned)
        scope.count("dropped_abandoned")
        f.ret()
        return f

    def _send(
        self, scope: Scope, port: Value, headers: Value, payload_at: Value, payload: Value
    ) -> None:
        """Append a frame to the outbox (`llvm.abi.Outbox`, `Desc`)."""
        f = scope.f
        out = f.load_pointer(scope.word("out"))
        total, limit = f.add(headers, payload), scope.register(REG_TRUNCATE)
        length = f.select(f.compare("ult", total, limit), total, limit)
        rest = f.sub(length, headers)
        rest = f.select(f.compare("ugt", length, headers), rest, i64(0))
        used, capacity = f.load(64, f.at(out, 16), 8), f.load(64, f.at(out, 8), 8)
        end = f.add(used, f.add(headers, rest))
        count, most = f.load(32, f.at(out, 36), 4), f.load(32, f.at(out, 32), 4)
        fits = f.and_(f.compare("ule", end, capacity), f.compare("ult", count, most))
        with f.when(f.not_(fits)):
            f.increment(f.at(out, 40))
            f.ret()
        bytes_ = f.load_pointer(out)
        to, last = f.at(bytes_, used), f.at(bytes_, end)
        behind = f.call(self.emit, [scope.context, scope.phv, to, last])
        f.copy(scope.guard(behind, rest, to, last), payload_at, rest)
        desc = f.at(f.load_pointer(f.at(out, 24)), f.mul(f.zext(count, 64), i64(24)))
        f.store(used, desc, 8)
        f.store(f.trunc(length, 32), f.at(desc, 8), 4)
        f.store(port, f.at(desc, 12), 4)
        f.store(i64(0), f.at(desc, 16), 8)
        f.store(f.add(count, integer(32, 1)), f.at(out, 36), 4)
        padded = f.and_(f.add(f.add(used, length), i64(7)), i64(-8))
        f.store(padded, f.at(out, 16), 8)
        scope.count("frames_out")
        f.increment(scope.word("stats.bytes_out"), length)

    def _drain(self) -> Function:
        """Run egress for all that waits for it."""
        f = self.module.function("drain", "void", [_CONTEXT])
        scope = self._scope(f, NULL)
        head, done = f.new_block("head"), f.new_block("done")
        f.branch(head)
        f.start(head)
        element = f.load_pointer(scope.word("egress_first"))
        f.leave_if(f.compare("eq", element, NULL), done)
        f.store(f.load_pointer(element), scope.word("egress_first"), 8)
        phv, frame = f.load_pointer(f.at(element, 8)), f.load_pointer(f.at(element, 16))
        length, at = f.load(64, f.at(element, 24), 8), f.load(64, f.at(element, 32), 8)
        replicas = f.load_pointer(f.at(element, 40))
        with f.when(f.compare("eq", replicas, NULL)):
            port = f.trunc(f.load(64, f.at(element, 56), 8), 32)
            f.call(self.egress, [scope.context, phv, frame, length, at, port])
            f.branch(head)
        count = f.load(64, f.at(element, 48), 8)
        f.call(self.replicate, [scope.context, phv, frame, length, at, replicas, count])
        f.branch(head)
        f.start(done)
        f.ret()
        return f

    # --- the way in ---------------------------------------------------------------------------

    def _process(self) -> Function:
        f = self.module.function("process", "i32", _PROCESS, exported=True)
        context, frame, length32, port, now, out = f.arguments
        phv = f.at(context, self.shared.context.phv)
        scope = self._scope(f, phv)
        length = f.zext(length32, 64)
        scope.count("frames_in")
        f.increment(scope.word("stats.bytes_in"), length)
        with f.when(f.compare("ugt", length32, integer(32, MAX_FRAME_BYTES))):
            scope.count("dropped_abandoned")
            f.ret(integer(32, 0))
        before = f.load(32, f.at(out, 36), 4)
        port = f.zext(f.and_(port, integer(32, 0x1FF)), 64)
        f.store(out, scope.word("out"), 8)
        f.store(now, scope.word("now"), 8)
        f.store(port, scope.word("port"), 8)
        for name in ("passes", "clones", "arena_at", "ingress_first", "egress_first"):
            f.store(i64(0), scope.word(name), 8)
        f.call(self.new_packet, [context, phv, length, i64(self.layout.bytes)])
        self._set(scope, "standard_metadata.ingress_port", port)
        stamp = f.and_(now, i64(TIMESTAMP_MASK))
        self._set(scope, "intrinsic_metadata.ingress_global_timestamp", stamp)
        f.call(self.ingress, [context, phv, frame, length])
        head, done = f.new_block("head"), f.new_block("done")
        f.branch(head)
        f.start(head)
        f.call(self.drain, [context])
        element = f.load_pointer(scope.word("ingress_first"))
        f.leave_if(f.compare("eq", element, NULL), done)
        f.store(f.load_pointer(element), scope.word("ingress_first"), 8)
        f.fill(phv, 0, self.layout.bytes)
        f.copy(phv, f.at(element, _INGRESS_BYTES), self.kept_bytes)
        next_length = f.load(64, f.at(element, 16), 8)
        next_frame = self._compact(scope, f.load_pointer(f.at(element, 8)), next_length)
        f.call(self.ingress, [context, phv, next_frame, next_length])
        f.branch(head)
        f.start(done)
        f.ret(f.sub(f.load(32, f.at(out, 36), 4), before))
        return f

    def _compact(self, scope: Scope, frame: Value, length: Value) -> Value:
        """Where nothing else waits, the frame (if it is in the arena) moves to its beginning, and
        what is behind it is free: a packet that goes round and round needs room for one frame."""
        f = scope.f
        moved = f.variable(64)
        start = f.address(frame)
        f.store(start, moved, 8)
        others = f.compare("ne", f.load_pointer(scope.word("ingress_first")), NULL)
        with f.when(f.not_(f.or_(others, self._waiting(scope)))):
            f.store(i64(0), scope.word("arena_at"), 8)
            arena = f.load(64, scope.word("arena"), 8)
            size = f.load(64, scope.word("arena_end"), 8)
            with f.when(f.compare("ult", f.sub(start, arena), size)):
                f.move(f.load_pointer(scope.word("arena")), frame, length)
                f.store(f.and_(f.add(length, i64(127)), i64(-64)), scope.word("arena_at"), 8)
                f.store(arena, moved, 8)
        return f.pointer(f.load(64, moved, 8))

    def _process_guarded(self, process: Function) -> None:
        """`process` for callers without a loop: the epoch moves on here, and rests afterwards."""
        f = self.module.function(
            "process_guarded", "i32", [*_PROCESS, ("i64", "epoch")], exported=True
        )
        word = f.at(f.arguments[0], self.shared.context["epoch"])
        old = f.raw("i64", f"atomicrmw xchg {word}, {f.arguments[6]} seq_cst, align 8")
        sent = f.call(process, f.arguments[:6])
        f.raw("i64", f"atomicrmw xchg {word}, {old} seq_cst, align 8")
        f.ret(sent)
