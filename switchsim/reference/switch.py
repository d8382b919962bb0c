"""The reference engine: a v1model switch that does what simple_switch does.

This module owns the way of a packet through the switch, from a frame on a port to frames on
ports: ingress, the decision after ingress (clone, digest, resubmit, multicast, drop, unicast, in
this order), replication, egress, and the ways back. It follows behavioral-model
targets/simple_switch/simple_switch.cpp; where that leaves things to threads, the order here is
fixed: all that a pass of ingress produced goes through egress, in order, before the next pass.

It opens nothing and reads no clock: `process` takes the present time. Nothing here is locked; a
switch belongs to one thread (or one event loop), data plane and control plane alike.

What a newcomer to simple_switch may find odd, and programs rely on:

- an unset egress_spec is port 0, the drop port (511) is only a number, and mark_to_drop also
  clears mcast_grp;
- neither a parser error nor a wrong checksum drops a packet;
- an ingress clone parses the original bytes anew, an egress clone keeps the parsed packet;
  both lose all metadata that their field list does not name, `ingress_port` included;
- resubmitted and recirculated packets lose metadata in the same way;
- egress starts with egress_spec = drop port + 1.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvcast.switchsim import ir
from kvcast.switchsim.control_plane.externs import CounterArray, RegisterArray
from kvcast.switchsim.engine import CloneSession, Digest, Engine
from kvcast.switchsim.ir import Program
from kvcast.switchsim.reference.actions import Actions, PacketAbandoned, Step
from kvcast.switchsim.reference.expressions import Expressions
from kvcast.switchsim.reference.externs import MeterArray
from kvcast.switchsim.reference.parser import Deparser, Parser
from kvcast.switchsim.reference.phv import (
    CHECKSUM_ERROR,
    CLONE_FIELD_LIST,
    CLONE_SESSION,
    EXIT,
    INGRESS_LENGTH,
    LEARN_LIST,
    NOW_US,
    PACKET_LENGTH,
    PARSER_ERROR,
    RECIRCULATE_LIST,
    RESUBMIT_LIST,
    TRUNCATE_TO,
    Layout,
    Phv,
)
from kvcast.switchsim.reference.tables import Profile, Table
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
    check_ports,
)

Node: TypeAlias = Callable[[Phv], int | None]
"""A control node: runs on a packet, and gives the number of the next one."""


class _Target(NamedTuple):
    """Slots of the metadata that simple_switch itself reads and writes; -1 where absent."""

    ingress_port: int
    egress_spec: int
    egress_port: int
    instance_type: int
    packet_length: int
    parser_error: int
    checksum_error: int
    ingress_global_timestamp: int
    egress_global_timestamp: int
    mcast_grp: int
    egress_rid: int
    priority: int
    enq_timestamp: int


@dataclass(slots=True)
class _Copy:
    """A packet on its way to egress: its PHV, and the frame whose payload starts at `at`."""

    port: int
    phv: Phv
    frame: bytes
    at: int


@dataclass(slots=True)
class _Pipeline:
    """Everything that belongs to one loaded program."""

    layout: Layout
    target: _Target
    parser: Parser
    deparser: Deparser
    nodes: list[Node]
    ingress: int | None
    """The number of its first node."""
    egress: int | None
    field_lists: dict[int, tuple[int, ...]]
    learn_lists: dict[int, tuple[str, tuple[int, ...], tuple[int, ...]]]
    drop: int


class Switch(Engine):
    """A switch without ports or clock: frames in, frames out."""

    def __init__(
        self,
        *,
        drop_port: int = 511,
        seed: int = 0,
        digest_queue_size: int = 65536,
    ) -> None:
        super().__init__(drop_port=drop_port, digest_queue_size=digest_queue_size)
        self._digests: deque[Digest] = deque()
        self._rng = random.Random(seed)
        self._pipeline: _Pipeline | None = None

    # --- the control plane ------------------------------------------------------------------

    def load(self, program: Program) -> None:
        layout = Layout(program)
        registers = [RegisterArray(r) for r in program.registers]
        counters = [None if c.direct else CounterArray(c) for c in program.counters]
        meters = [None if m.direct else MeterArray(m) for m in program.meters]
        actions = Actions(
            Expressions(layout, registers),
            registers,
            counters,
            meters,
            self.drop_port,
            self._rng,
            self.stats,
        )
        runs = [actions.action(a) for a in program.actions]
        profiles = [
            Profile(number, actions, runs) for number in range(len(program.action_profiles))
        ]
        tables: dict[str, Table] = {}
        nodes: list[Node] = []
        for node in program.nodes:
            match node:
                case ir.Table():
                    tables[node.name] = _table(node, actions, runs, profiles)
                    nodes.append(tables[node.name].apply)
                case ir.Conditional():
                    nodes.append(_branch(actions.expressions.boolean(node.condition), node))
                case ir.ActionCall():
                    nodes.append(_call(runs[node.action], node.next))
        field_lists = {
            f.id: tuple(layout.slot(ref) for ref in f.fields) for f in program.field_lists
        }
        pipeline = _Pipeline(
            layout=layout,
            target=_target(program, layout),
            parser=Parser(actions),
            deparser=Deparser(actions),
            nodes=nodes,
            ingress=program.ingress.start,
            egress=program.egress.start,
            field_lists=field_lists,
            learn_lists={
                item.id: (
                    item.name,
                    tuple(layout.slot(ref) for ref in item.fields),
                    tuple(layout.width(ref) for ref in item.fields),
                )
                for item in program.learn_lists
            },
            drop=self.drop_port,
        )
        # Nothing above touched the switch; from here on nothing can fail.
        self._adopt(program, tables, registers, counters, meters, profiles)
        self._pipeline = pipeline
        self._digests.clear()

    def take_digests(self) -> list[Digest]:
        taken = list(self._digests)
        self._digests.clear()
        return taken

    # --- the data plane ---------------------------------------------------------------------

    def process(self, port: int, frame: bytes, now_us: int) -> list[tuple[int, bytes]]:
        stats = self.stats
        stats.frames_in += 1
        stats.bytes_in += len(frame)
        pipeline = self._pipeline
        if pipeline is None:
            stats.dropped_no_program += 1
            return []
        run = _Run(self, pipeline, port & 0x1FF, now_us)
        run.frame(frame)
        stats.frames_out += len(run.sent)
        for _, sent in run.sent:
            stats.bytes_out += len(sent)
        return run.sent

    def push_digest(self, digest: Digest) -> None:
        if len(self._digests) >= self._digest_queue_size:
            self.stats.digests_overflowed += 1
        else:
            self.stats.digests += 1
            self._digests.append(digest)


class _Run:
    """The life of one frame and of everything that comes from it."""

    def __init__(self, switch: Switch, pipeline: _Pipeline, port: int, now_us: int) -> None:
        self.switch = switch
        self.port = port
        self.pipeline = pipeline
        self.stats = switch.stats
        self.now_us = now_us
        self.sent: list[tuple[int, bytes]] = []
        self.ingress_queue: deque[tuple[Phv, bytes]] = deque()
        self.egress_queue: deque[_Copy] = deque()
        self.passes = 0
        self.clones = 0

    def frame(self, frame: bytes) -> None:
        target, now = self.pipeline.target, self.now_us
        phv = self.new_packet(len(frame))
        phv[target.ingress_port] = self.port
        if target.ingress_global_timestamp >= 0:
            phv[target.ingress_global_timestamp] = now & TIMESTAMP_MASK
        self.ingress_queue.append((phv, frame))
        while self.ingress_queue:
            next_phv, next_frame = self.ingress_queue.popleft()
            try:
                self.ingress(next_phv, next_frame)
            except PacketAbandoned:
                self.stats.dropped_abandoned += 1
            while self.egress_queue:
                copy = self.egress_queue.popleft()
                try:
                    self.egress(copy)
                except PacketAbandoned:
                    self.stats.dropped_abandoned += 1

    def new_packet(self, length: int) -> Phv:
        phv = self.pipeline.layout.empty[:]
        phv[NOW_US] = self.now_us
        phv[PACKET_LENGTH] = phv[INGRESS_LENGTH] = length
        phv[self.pipeline.target.packet_length] = length
        return phv

    def apply(self, number: int | None, phv: Phv) -> None:
        """Run a control from this node on."""
        nodes = self.pipeline.nodes
        while number is not None:
            number = nodes[number](phv)
            if phv[EXIT]:
                phv[EXIT] = 0
                return

    # --- ingress ----------------------------------------------------------------------------

    def ingress(self, phv: Phv, frame: bytes) -> None:
        pipeline, stats = self.pipeline, self.stats
        target = pipeline.target
        stats.ingress_passes += 1
        # The program may change the length register; clones and resubmits start from here again.
        length = phv[PACKET_LENGTH]
        at = self.parse(phv, frame)
        self.apply(pipeline.ingress, phv)
        if phv[CLONE_SESSION]:
            self.clone_ingress(phv, frame, length)
        if phv[LEARN_LIST]:
            self.digest(phv)
        if phv[RESUBMIT_LIST]:
            stats.resubmitted += 1
            self.again(phv, frame, length, phv[RESUBMIT_LIST], RESUBMITTED)
            return
        if target.mcast_grp >= 0 and phv[target.mcast_grp]:
            phv[target.instance_type] = REPLICATION
            self.multicast(phv, frame, at, phv[target.mcast_grp])
            return
        egress_port = phv[target.egress_spec]
        if egress_port == pipeline.drop:
            stats.dropped_ingress += 1
            return
        phv[target.instance_type] = NORMAL
        self.enqueue(_Copy(egress_port, phv, frame, at))

    def parse(self, phv: Phv, frame: bytes) -> int:
        """Parse, and report errors the way simple_switch does."""
        target, parser = self.pipeline.target, self.pipeline.parser
        at = parser.parse(phv, frame)
        error = phv[PARSER_ERROR]
        if error != parser.errors.no_error:
            self.stats.parser_errors += 1
        if target.parser_error >= 0:
            phv[target.parser_error] = error
        if phv[CHECKSUM_ERROR]:
            self.stats.checksum_errors += 1
        if target.checksum_error >= 0:
            phv[target.checksum_error] = phv[CHECKSUM_ERROR]
        return at

    def clone_ingress(self, phv: Phv, frame: bytes, length: int) -> None:
        session, field_list = self.take_clone_session(phv)
        if session is None:
            return
        pipeline = self.pipeline
        copy = self.new_packet(length)
        copy[pipeline.target.ingress_port] = self.port  # parsers may branch on it
        at = pipeline.parser.parse(copy, frame)
        self.keep(copy, phv, field_list, INGRESS_CLONE)
        self.send_clone(session, copy, frame, at)

    def take_clone_session(self, phv: Phv) -> tuple[CloneSession | None, int]:
        """The session (None: unknown) and the field list of the clone that was asked for."""
        number, field_list = phv[CLONE_SESSION] & SESSION_MASK, phv[CLONE_FIELD_LIST]
        phv[CLONE_SESSION] = phv[CLONE_FIELD_LIST] = 0
        session = self.switch.clone_sessions.get(number)
        if session is None:
            self.stats.unknown_clone_session += 1
        else:
            self.stats.cloned += 1
        return session, field_list

    def send_clone(self, session: CloneSession, copy: Phv, frame: bytes, at: int) -> None:
        if session.packet_length_bytes:
            copy[TRUNCATE_TO] = session.packet_length_bytes
        self.replicate(copy, frame, at, session.replicas)

    def keep(self, copy: Phv, phv: Phv, field_list: int, instance_type: int) -> None:
        """Reset the metadata of a copy, but for the fields of the list."""
        pipeline = self.pipeline
        pipeline.layout.reset_metadata(copy)
        for slot in pipeline.field_lists.get(field_list, ()):
            copy[slot] = phv[slot]
        copy[pipeline.target.instance_type] = instance_type

    def digest(self, phv: Phv) -> None:
        found = self.pipeline.learn_lists.get(phv[LEARN_LIST])
        phv[LEARN_LIST] = 0
        if found is not None:
            name, slots, widths = found
            values = tuple(phv[s] & ((1 << w) - 1) for s, w in zip(slots, widths, strict=True))
            self.switch.push_digest(Digest(name, values, widths))

    def again(
        self, phv: Phv, frame: bytes, length: int, field_list: int, instance_type: int
    ) -> None:
        """Send a frame to ingress with the metadata of a field list."""
        copy = self.new_packet(length)
        self.keep(copy, phv, field_list, instance_type)
        copy[self.pipeline.target.packet_length] = length
        self.next_pass(copy, frame)

    def next_pass(self, phv: Phv, frame: bytes) -> None:
        self.passes += 1
        if self.passes >= MAX_PASSES:
            self.stats.dropped_recirculation_bound += 1
        else:
            self.ingress_queue.append((phv, frame))

    # --- replication ------------------------------------------------------------------------

    def multicast(self, phv: Phv, frame: bytes, at: int, group: int) -> None:
        replicas = self.switch.multicast_groups.get(group)
        if replicas is None:
            self.stats.dropped_unknown_group += 1
            return
        # Copies of a multicast lose what was requested for the packet, truncation included.
        phv[TRUNCATE_TO] = UNLIMITED
        self.replicate(phv, frame, at, replicas)

    def replicate(
        self, phv: Phv, frame: bytes, at: int, replicas: Sequence[tuple[int, int]]
    ) -> None:
        rid_slot = self.pipeline.target.egress_rid
        phv[RECIRCULATE_LIST] = 0
        for port, rid in replicas:
            copy = phv[:]
            if rid_slot >= 0:
                copy[rid_slot] = rid
            self.enqueue(_Copy(port, copy, frame, at))

    def enqueue(self, copy: _Copy) -> None:
        target = self.pipeline.target
        if target.priority >= 0 and copy.phv[target.priority]:
            # simple_switch has one queue a port unless it is told otherwise.
            self.stats.dropped_priority += 1
            return
        self.egress_queue.append(copy)

    # --- egress -----------------------------------------------------------------------------

    def egress(self, copy: _Copy) -> None:
        pipeline, stats, phv = self.pipeline, self.stats, copy.phv
        target = pipeline.target
        stats.egress_passes += 1
        now = self.now_us & TIMESTAMP_MASK
        if target.egress_global_timestamp >= 0:
            phv[target.egress_global_timestamp] = now
        if target.enq_timestamp >= 0:
            phv[target.enq_timestamp] = now & 0xFFFFFFFF
        phv[target.egress_port] = copy.port
        # Something else than the drop port, which would drop the packet.
        phv[target.egress_spec] = (pipeline.drop + 1) & 0x1FF
        phv[target.packet_length] = phv[PACKET_LENGTH]
        self.apply(pipeline.egress, phv)
        if phv[CLONE_SESSION]:
            self.clone_egress(copy)
        if phv[target.egress_spec] == pipeline.drop:
            stats.dropped_egress += 1
            return
        out = pipeline.deparser.deparse(phv, copy.frame, copy.at)
        if phv[RECIRCULATE_LIST]:
            stats.recirculated += 1
            self.again(phv, out, len(out), phv[RECIRCULATE_LIST], RECIRCULATED)
            return
        if phv[TRUNCATE_TO] < len(out):
            out = out[: phv[TRUNCATE_TO]]
        self.sent.append((copy.port, out))

    def clone_egress(self, original: _Copy) -> None:
        phv = original.phv
        session, field_list = self.take_clone_session(phv)
        if session is None:
            return
        self.clones += 1
        if self.clones >= MAX_PASSES:
            self.stats.dropped_recirculation_bound += 1
            return
        copy = phv[:]
        self.keep(copy, phv, field_list, EGRESS_CLONE)
        copy[TRUNCATE_TO] = UNLIMITED
        self.send_clone(session, copy, original.frame, original.at)


# --- construction -----------------------------------------------------------------------------


def _target(program: Program, layout: Layout) -> _Target:
    check_ports(program)
    slots = {name.split(".")[1]: layout.slot(ref) for name, ref in program.intrinsic}
    return _Target(*(slots.get(name, -1) for name in _Target._fields))


def _branch(condition: Callable[[Phv, Sequence[int]], bool], node: ir.Conditional) -> Node:
    yes, no = node.if_true, node.if_false
    return lambda phv: yes if condition(phv, ()) else no


def _call(run: Step, following: int | None) -> Node:
    def call(phv: Phv) -> int | None:
        run(phv, ())
        return following

    return call


def _table(
    spec: ir.Table, actions: Actions, runs: Sequence[Step], profiles: Sequence[Profile]
) -> Table:
    program, meter = actions.program, None
    if spec.meter is not None:
        array = program.meters[spec.meter]
        if array.target is not None:
            meter = array.unit, actions.setter(array.target)
    profile = None if spec.action_profile is None else profiles[spec.action_profile]
    table = Table(spec, actions.layout, program.actions, runs, profile, meter)
    table.fill()
    return table
