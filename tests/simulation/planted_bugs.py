"""Planted bugs: mistakes that somebody might make in a core, the controller or the P4 program.

Each is planted for as long as a `with` lasts, and gives the product to simulate. Those of the
program edit the compiled JSON, by the names of tables and actions, as another compiler or another
hand might have produced it; the rest replace a function by one that is almost right.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import p4_edits
from kvcast.controller.core import pool as controller_pool
from kvcast.controller.core.membership import Membership
from kvcast.controller.core.namespaces import Namespaces
from kvcast.controller.core.placement import Placement
from kvcast.controller.core.residency import Residency
from kvcast.hostagent.core import agent as agent_core_module
from kvcast.hostagent.core import cold as cold_module
from kvcast.hostagent.core import queries
from kvcast.hostagent.core import ssd as ssd_module
from kvcast.hostagent.core.agent import AgentCore
from kvcast.hostagent.core.fetches import GetBatch
from kvcast.hostagent.core.handover import Handover
from kvcast.hostagent.core.pool import Pool
from kvcast.hostagent.core.prefix_closure import PrefixClosure
from kvcast.hostagent.core.rdma_answers import Writing
from kvcast.hostagent.core.reads import Reads
from kvcast.hostagent.core.recovery import Recovery
from kvcast.hostagent.core.serving import Serving
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.ssd import SsdTier
from kvcast.hostagent.core.store import COMMITTED, Copy, Store
from kvcast.hostagent.core.writes import ACK_LOCAL, Writes
from kvcast.hostagent.tiers import index as index_module
from kvcast.hostagent.tiers.policies.value import Value
from kvcast.hostagent.tiers.ssd import layout
from kvcast.native.subset import U64, native, size_of
from kvcast.p4 import artefact
from kvcast.p4.definitions import Kind
from kvcast.protocol import pushing
from kvcast.protocol.courier import Answer, Courier
from kvcast.protocol.lane import Lane
from kvcast.protocol.links import stream
from kvcast.protocol.links.bulk_callee import BulkCallee
from kvcast.protocol.links.bulk_caller import BulkConnection
from kvcast.protocol.links.control_caller import ControlCaller
from kvcast.protocol.links.departures import Departures
from kvcast.protocol.links.rdma_callee import RdmaCallee
from kvcast.protocol.links.rdma_caller import RdmaCall, RdmaCaller
from kvcast.protocol.messages import bulk
from kvcast.protocol.messages.control import HandedOver
from kvcast.protocol.messages.shared import WORD_BYTES
from kvcast.protocol.messages.wire import FLAG_LAST, FLAG_RETRY, OP_DATA, BlockId
from kvcast.protocol.requester import requester
from kvcast.protocol.requester.asking import Asker
from kvcast.protocol.requester.assembly import Assembly
from kvcast.protocol.requester.failover import Candidates
from kvcast.protocol.requester.landing import Landing
from kvcast.protocol.responder import responder
from kvcast.simulation.cluster import Product
from kvcast.simulation.faults import DAMAGED, TORN
from kvcast.simulation.model import pending_set_of
from kvcast.simulation.plan import Mask, Plan
from kvcast.simulation.switch import EngineMaker, product_program
from kvcast.switchsim import loader
from kvcast.switchsim.ir import Program
from msgspec.structs import replace as replace_field
from p4_edits import Json

Plant = Callable[[EngineMaker], AbstractContextManager[Product]]


@dataclass(frozen=True)
class Bug:
    """`name` says what is wrong; `invariants`: which of docs/architecture.md it may violate;
    `faults`: it cannot show without one of these (`a+b`: without both), if there are any."""

    name: str
    invariants: frozenset[int]
    plant: Plant
    faults: frozenset[str] = frozenset()
    only: Callable[[Plan], bool] = lambda _plan: True
    """What else a plan must have for it to show."""
    features: frozenset[str] = frozenset()
    """What runs have that show it, whatever their seeds draw."""

    @property
    def mask(self) -> Mask:
        """With which seeds are run to show it."""
        return Mask(features=self.features)

    def may_show(self, plan: Plan) -> bool:
        """Whether it can show in a run of this plan."""
        if not self.only(plan):
            return False
        there = {fault.kind for fault in plan.faults}
        return not self.faults or any(set(need.split("+")) <= there for need in self.faults)


BUGS: dict[str, Bug] = {}


def bug(
    name: str,
    *invariants: int,
    faults: Iterable[str] = (),
    only: Callable[[Plan], bool] = lambda _plan: True,
    features: Iterable[str] = (),
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a context manager that plants a bug into a class of the product."""

    def register(patch: Callable[[], Any]) -> Callable[[], Any]:
        @contextmanager
        def plant(engine: EngineMaker) -> Iterator[Product]:
            with patch():
                yield Product(engine, product_program())

        BUGS[name] = Bug(
            name, frozenset(invariants), plant, frozenset(faults), only, frozenset(features)
        )
        return patch

    return register


def p4_bug(
    name: str,
    *invariants: int,
    faults: Iterable[str] = (),
    only: Callable[[Plan], bool] = lambda _plan: True,
) -> Callable[[Callable[[Json], None]], Any]:
    """Register an edit of the compiled program."""

    def register(edit: Callable[[Json], None]) -> Any:
        @functools.cache
        def program() -> Program:
            data = copy.deepcopy(_compiled())
            before = json.dumps(data)
            edit(data)
            after = json.dumps(data)
            assert before != after, "the program has changed so that this bug cannot be planted"
            return loader.load(after.encode(), "kvcast")

        @contextmanager
        def plant(engine: EngineMaker) -> Iterator[Product]:
            yield Product(engine, program())

        BUGS[name] = Bug(name, frozenset(invariants), plant, frozenset(faults), only)
        return edit

    return register


ANSWERERS = ["hostile_forger", "hostile_spoofer", "hostile_tenant"]
FORGERS = ["hostile_forger"]
LIARS = ["hostile_liar"]
TENANTS = ["hostile_tenant"]
CUT_OFF = ["control_cut", "controller_crash", "controller_wiped", "controller_failover"]
WIPED = ["controller_wiped+hostile_forger"]


def _meets_in_a_set(plan: Plan) -> bool:
    """Two blocks share a set of the switch's pending interest table."""
    sets = [pending_set_of(namespace, key, 0) for namespace, key in {b.name for b in plan.blocks}]
    return len(set(sets)) < len(sets)


def _damaged(plan: Plan) -> bool:
    """An agent finds the memory of the one before damaged."""
    return any(fault.kind == "agent_crash" and fault.amount < DAMAGED for fault in plan.faults)


def _torn(plan: Plan) -> bool:
    """An agent finds an index at which the one before died."""
    return any(
        fault.kind == "agent_crash" and DAMAGED <= fault.amount < TORN for fault in plan.faults
    )


def _replicates(plan: Plan) -> bool:
    """Hosts say that their links carry little, so that they give out replicas."""
    return plan.replicates


def _writes(plan: Plan) -> bool:
    """Shared answers come by RDMA."""
    return plan.zones and not plan.plain


def _puts_together(plan: Plan) -> bool:
    """Clients put several blocks at once."""
    return bool(plan.more)


def _ages_on_disk(plan: Plan) -> bool:
    """Blocks that lie on a disk live for a time after they were stored."""
    ages = any(said.ttl_s and said.policy != "ttl" for said in plan.settings.values())
    return bool(plan.disks) and ages


def _has_shares(plan: Plan) -> bool:
    """Something is assured to some namespace."""
    return any(said.assured_bytes for said in plan.settings.values())


def _has_quotas(plan: Plan) -> bool:
    """Some namespace has a quota of memory."""
    return any(said.quota_bytes for said in plan.settings.values())


def _has_prefixes(plan: Plan) -> bool:
    """Some namespace's blocks are prefixes to its policy."""
    return any(said.policy == "value" for said in plan.settings.values())


def _plain(plan: Plan) -> bool:
    """No switch program keeps others from answering."""
    return plan.plain


def _alone(plan: Plan) -> bool:
    """Nor has a block a second home."""
    return plan.plain and plan.replicas == 0


# --- requester and assembly ---------------------------------------------------------------------


@bug("the reader does not compare the digest of the whole block", 1)
def _digest_not_checked() -> Any:
    return mock.patch.object(Assembly, "verified", return_value=True)


@bug("the reader takes DATA from any node", 1, 5, faults=ANSWERERS)
def _any_source() -> Any:
    class Everybody(frozenset[int]):
        def __contains__(self, _node: object) -> bool:
            return True

    original = Candidates.__init__

    def init(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.sources = Everybody()

    return mock.patch.object(Candidates, "__init__", init)


@bug("a READ that is not answered is never repeated", 3)
def _no_retransmission() -> Any:
    def came_up(self: Any, now: float, _fetch: Any, segment: Any) -> bool:
        self._timers.arm(segment, now + 1e6)
        return True

    return mock.patch.object(Asker, "came_up", came_up)


@bug("a repeated READ is not marked as one, and joins its own wait", 2, 3)
def _retry_not_marked() -> Any:
    original = Asker._send_read

    def send(self: Any, fetch: Any, segment: Any, flags: int, *rest: Any) -> None:
        original(self, fetch, segment, flags & ~FLAG_RETRY, *rest)

    return mock.patch.object(Asker, "_send_read", send)


@bug("a MISS sends all who waited on with READs marked as repeats", 4)
def _miss_keeps_asked() -> Any:
    return mock.patch.object(requester.Requester, "_wait_ended", return_value=None)


@bug("a segment counts as complete when its last chunk is there", 1, 3)
def _last_means_complete() -> Any:
    took, arrived_ = Assembly.took, requester.Requester._arrived

    def takes(self: Assembly, arrived: Any) -> int:
        if arrived.last:
            arrived = arrived._replace(missing=0)
        return took(self, arrived)

    def arrives(self: Any, now: float, fetch: Any, arrived: Any) -> None:
        if not fetch.assembly.missing[arrived.segment]:  # what comes late is a duplicate
            arrived = arrived._replace(added=0)
        arrived_(self, now, fetch, arrived)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Assembly, "took", takes))
    stack.enter_context(mock.patch.object(requester.Requester, "_arrived", arrives))
    stack.enter_context(mock.patch.object(Assembly, "verified", return_value=True))
    return stack


# --- home --------------------------------------------------------------------------------------


@bug("the home sends chunks that begin one byte too early", 1)
def _chunk_off_by_one() -> Any:
    original = responder.Answer.frames

    def frames(self: responder.Answer) -> Iterator[Any]:
        for frame in original(self):
            start = frame.chunk * 1024
            payload = self.segment[start - 1 : start - 1 + len(frame.payload)]
            yield replace_field(frame, payload=payload) if frame.chunk else frame

    return mock.patch.object(responder.Answer, "frames", frames)


@bug("the home does not mark the end of its answers", 2)
def _last_not_marked() -> Any:
    original = AgentCore.frames_to_send

    def send(self: Any, now: float, budget: int) -> Any:
        out = []
        for to, frame in original(self, now, budget):
            if frame.op == OP_DATA and frame.flags & FLAG_LAST and frame.size > 2048:
                frame = replace_field(frame, flags=frame.flags & ~FLAG_LAST)
            out.append((to, frame))
        return out

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(AgentCore, "frames_to_send", send))
    stack.enter_context(mock.patch.object(Lane, "open"))  # else compiled code answers most READs
    return stack


@bug("a block may be evicted while its answer waits to be sent", 0, 1)
def _held_not_pinned() -> Any:
    class Unpinned(agent_core_module._Held):
        def __init__(self, store: Store, copy_: Copy, data: memoryview) -> None:
            super().__init__(store, copy_, data)
            store.unpin(copy_)

        def release(self) -> None:
            self.data.release()

    return mock.patch.object(agent_core_module, "_Held", Unpinned)


@bug("a home answers for the block of another namespace that has the same key", 1)
def _namespaces_confused() -> Any:
    original = AgentCore._lookup

    def lookup(self: AgentCore, block: BlockId) -> Any:
        for other in self.store.blocks():
            if other.key == block.key:
                return original(self, other)
        return None

    return mock.patch.object(AgentCore, "_lookup", lookup)


# --- agent --------------------------------------------------------------------------------------


@bug("eviction does not look at pins", 0, 1)
def _pins_ignored() -> Any:
    def pin(self: Store, copy_: Copy) -> None:
        copy_.pins += 1

    def unpin(self: Store, copy_: Copy) -> None:
        copy_.pins -= 1

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Store, "pin", pin))
    stack.enter_context(mock.patch.object(Store, "unpin", unpin))

    def remove(self: Store, copy_: Copy, *, evicted: bool = False) -> None:
        del self._index[copy_.block]
        state = self._namespaces[copy_.block.namespace]
        state.ages.pop(copy_.block, None)
        state.policy.removed(copy_.block)
        self._make_unevictable(copy_)
        self._release_bytes(copy_)

    stack.enter_context(mock.patch.object(Store, "_remove", remove))
    stack.enter_context(mock.patch.object(Store, "check", return_value=None))
    return stack


@bug("what has outlived its time is kept", 0)
def _nothing_expires() -> Any:
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Store, "_outlived", return_value=None))
    stack.enter_context(mock.patch.object(Store, "next_expiry", return_value=None))
    return stack


@bug("an agent evicts without a look at what clients pin by themselves", 0, 1)
def _regions_ignored() -> Any:
    original = SharedIndex.withdraw

    def withdraw(self: SharedIndex, copies: Any) -> None:
        regions, self._regions = self._regions, {}
        original(self, copies)
        self._regions = regions

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(SharedIndex, "withdraw", withdraw))
    stack.enter_context(mock.patch.object(SharedIndex, "refresh", return_value=None))
    return stack


@bug("what is evicted stays in the index that clients read", 0, 1)
def _not_withdrawn() -> Any:
    def withdraw(self: SharedIndex, copies: Any) -> None:
        for copy_ in copies:
            copy_.cell = 0

    return mock.patch.object(SharedIndex, "withdraw", withdraw)


@bug(
    "bytes that came by TCP are stored under the digest that was promised",
    1,
    faults=["bulk_corruption"],
)
def _put_not_verified() -> Any:
    original = Serving.end_put

    def end(self: Serving, put: Any, header: Any, copy_: Copy, _digest: int) -> Any:
        return original(self, put, header, copy_, header.digest)

    return mock.patch.object(Serving, "end_put", end)


@native
def _any_bytes(_receiver: pushing.Receiver, _digest: U64) -> bool:
    return True


@bug("what is pushed home is not compared with its digest", 1, faults=["bulk_corruption"])
def _push_not_verified() -> Any:
    return _pushing_with("has_digest", _any_bytes)


@native
def _backwards(courier: Courier, number: U64, place: U64) -> U64:
    batch = courier.batches[number]
    size = size_of(Answer) - WORD_BYTES
    return batch.answers + (batch.count - 1 - place) * size - WORD_BYTES


@bug("of blocks that are put together the last is answered first", 1, 3, only=_puts_together)
def _put_answers_backwards() -> Any:
    return _pushing_with("answer_in", _backwards)


@contextmanager
def _pushing_with(function: str, mistake: Any) -> Iterator[None]:
    """Puts by compiled code, with one of their functions replaced."""
    compiled = functools.cache(pushing.compiled.__wrapped__)
    with (
        mock.patch.object(pushing, function, mistake),
        mock.patch.object(pushing, "compiled", compiled),
    ):
        yield


@bug("what comes from the object store is not compared with its digest", 1, faults=["cold_lies"])
def _cold_not_verified() -> Any:
    return mock.patch.object(cold_module, "digest_of", return_value=mock.ANY)


@bug("what came by RDMA is not compared with its digest", 1, faults=["rdma_flips"])
def _rdma_not_verified() -> Any:
    def read(self: RdmaCaller, now: float, call: RdmaCall, *_: Any) -> None:
        self.ended(call, bulk.DONE)

    return mock.patch.object(RdmaCaller, "read", read)


@bug(
    "what an RDMA connection held when it broke is never given back",
    0,
    faults=["rdma_errors", "rdma_windows_lost", "rdma_no_windows", "rdma_card_gone"],
)
def _rdma_not_given_back() -> Any:
    return mock.patch.object(RdmaCallee, "pair_closed")


@bug("TCP requests are served whatever their namespace", 5, faults=TENANTS)
def _bulk_rights_not_checked() -> Any:
    return mock.patch.object(Serving, "_may_use", return_value=True)


@bug("READs are answered whatever their namespace", 5, faults=TENANTS)
def _read_rights_not_checked() -> Any:
    original = AgentCore.receive

    def receive(self: AgentCore, now: float, source: int, frame: Any) -> None:
        if frame.op == 1:
            self.responder.receive(now, source, frame)
        else:
            original(self, now, source, frame)

    return mock.patch.object(AgentCore, "receive", receive)


@bug("an agent keeps the first complete map that it gets", 2, 3, 4)
def _stale_map() -> Any:
    original = AgentCore._new_map

    def new_map(self: AgentCore, now: float, message: Any) -> None:
        if self.pool is None or len(self.pool.nodes) < len(message.nodes):
            original(self, now, message)

    return mock.patch.object(AgentCore, "_new_map", new_map)


@bug(
    "reads go on when the controller gives a node's number to another",
    5,
    faults=WIPED,
    only=_plain,
)
def _renumbering_ignored() -> Any:
    return mock.patch.object(requester.Requester, "forget", return_value=None)


@bug("the only home of a block believes whoever it asks for it", 5, faults=FORGERS, only=_alone)
def _recall_believes_all() -> Any:
    original = requester.Requester.fetch

    def fetch(self: Any, *arguments: Any, **rest: Any) -> int:
        return original(self, *arguments, **(rest | {"expect_digest": 0}))

    return mock.patch.object(requester.Requester, "fetch", fetch)


@bug("a put is acknowledged before any home has it", 3)
def _acknowledged_early() -> Any:
    original = Writes.__init__

    def init(self: Any, options: Any, *rest: Any) -> None:
        original(self, replace(options, put_ack=ACK_LOCAL), *rest)

    return mock.patch.object(Writes, "__init__", init)


def _asks_how_many(plan: Plan) -> bool:
    """Whether a client asks for a prefix while nothing is wrong."""
    return any(op.kind == "exists" and op.phase != 1 for op in plan.ops)


@bug("what homes say that they hold is not counted", 3, only=_asks_how_many)
def _homes_not_counted() -> Any:
    return mock.patch.object(queries, "merged", lambda held, _count, _part, _more: held)


@bug("a get waits for the fetch that it joined, beyond its own deadline", 2)
def _batch_deadline_ignored() -> Any:
    def handle(self: Reads, now: float) -> None:
        self._now = now
        self.requester.handle_timer(now)
        self.drain(now)
        while (due := self._timers.pop_due(now)) is not None:
            if not isinstance(due, GetBatch):
                self._out_of_patience(now, due.fetch)

    return mock.patch.object(Reads, "handle_timer", handle)


@bug("a restarted agent believes its old index without looking at the bytes", 1, only=_damaged)
def _unverified_arena() -> Any:
    def is_right(self: Recovery, copy: Copy) -> bool:
        del self._doubtful[copy]
        return copy.state == COMMITTED

    return mock.patch.object(Recovery, "_is_right", is_right)


@bug("a restarted agent believes entries that do not prove themselves", 0, 1, 3, only=_torn)
def _unproven_entries() -> Any:
    return mock.patch.object(index_module, "_check_of", return_value=0)


# --- links --------------------------------------------------------------------------------------


@bug("what a connection held when it broke is never given back", 0)
def _held_for_ever() -> Any:
    return mock.patch.object(BulkCallee, "_over", return_value=None)


@bug("the second piece of a block that comes by TCP is written over the first", 1, 2, 3)
def _pieces_overlap() -> Any:
    def first(self: Any, at_most: int) -> memoryview:
        length = min(at_most, self.size - self.there)
        return bytearray(length) if self.block is None else self.block[:length]

    return mock.patch.object(stream.Room, "next", first)


@bug("what a lone reader gets by TCP is taken for what was promised", 1, faults=["bulk_liar"])
def _bulk_read_not_verified() -> Any:
    original = BulkConnection._block_came

    def came(self: BulkConnection, now: float, _digest: int | None) -> None:
        original(self, now, self._promised[0])

    return mock.patch.object(BulkConnection, "_block_came", came)


@bug("an agent that has lost the controller does not come back", 2, 3, 4, faults=CUT_OFF)
def _never_back() -> Any:
    def over(self: ControlCaller, _now: float, _connection: Any) -> None:
        self.connection = None
        self.agent.control_lost()

    return mock.patch.object(ControlCaller, "over", over)


# --- controller ---------------------------------------------------------------------------------


@bug("a node's lease never runs out", 2, 3, faults=["host_gone"])
def _lease_for_ever() -> Any:
    original = Membership.advance

    def advance(self: Membership, now: float) -> bool:
        for node in self.nodes.values():
            if node.live:
                node.lease_until = max(node.lease_until, now + 10.0)
        return original(self, now)

    return mock.patch.object(Membership, "advance", advance)


@bug("a slot is given to the next block under the same generation", 1)
def _same_generation() -> Any:
    original = Residency.admit

    def admit(self: Residency, block: BlockId, **rest: Any) -> Any:
        resident = original(self, block, **rest)
        self.generation = 7
        resident.generation = 7
        return resident

    return mock.patch.object(Residency, "admit", admit)


@bug(
    "the controller tells the switch that every port may answer for every bucket",
    5,
    faults=ANSWERERS,
)
def _everybody_answers() -> Any:
    original = controller_pool.program.membership_state

    def desired(settings: Any, hosts: Any, responders: Any, *rest: Any) -> Any:
        return original(settings, hosts, [[h.node_id for h in hosts] for _ in responders], *rest)

    return mock.patch.object(controller_pool.program, "membership_state", desired)


@bug("the controller lets every port read every namespace", 5, faults=TENANTS)
def _everybody_reads() -> Any:
    original = controller_pool.program.membership_state

    def desired(settings: Any, hosts: Any, responders: Any, namespaces: Any, *rest: Any) -> Any:
        import msgspec

        namespaces = [msgspec.structs.replace(info, nodes=[]) for info in namespaces]
        return original(settings, hosts, responders, namespaces, *rest)

    return mock.patch.object(controller_pool.program, "membership_state", desired)


# --- the P4 program -----------------------------------------------------------------------------


@functools.cache
def _compiled() -> Json:
    data: Json = json.loads(artefact("v1model").json.read_bytes())
    return data


@p4_bug("the switch lets a repeated READ join the wait that it repeats", 2, 3)
def _own_bit_joined(data: Json) -> None:
    p4_edits.redirect(data, "coalescing", {"refresh": "join"})


@p4_bug("the switch clears the waiting ports, and the fingerprint not", 2, 4)
def _half_cleared(data: Json) -> None:
    p4_edits.forget(data, "end_alone", "fingerprint")
    p4_edits.forget(data, "share_and_end", "fingerprint")


@p4_bug("a MISS does not end the wait", 2, 4)
def _miss_does_not_clear(data: Json) -> None:
    changes = {"share_and_end": "share", "end_alone": "continue_alone"}
    p4_edits.redirect(data, "coalescing", changes, Kind.MISS)


@p4_bug("the last chunk does not end the wait", 2, 4)
def _last_does_not_clear(data: Json) -> None:
    changes = {"share_and_end": "share", "end_alone": "continue_alone"}
    p4_edits.redirect(data, "coalescing", changes, Kind.LAST_DATA)


@p4_bug("the first chunk ends the wait", 2, 3, 4)
def _first_clears(data: Json) -> None:
    changes = {"share": "share_and_end", "continue_alone": "end_alone"}
    p4_edits.redirect(data, "coalescing", changes, Kind.DATA)


@p4_bug("a READ waits for ever for an answer that does not come", 2, 3, 4)
def _lease_never_expires(data: Json) -> None:
    p4_edits.redirect(data, "coalescing", {"ask_again": "join", "take_over": "collide"})


@p4_bug("no READ joins another", 4)
def _never_joins(data: Json) -> None:
    p4_edits.redirect(data, "coalescing", {"join": "refresh"})


@p4_bug("a READ joins the wait for whatever has the same hash", 2, 3, 4, only=_meets_in_a_set)
def _fingerprint_ignored(data: Json) -> None:
    p4_edits.redirect(data, "coalescing", {"collide": "join", "take_over": "join"})


@p4_bug("an answer looks at the first entry of its set alone", 2, 4, only=_meets_in_a_set)
def _second_entry_forgotten(data: Json) -> None:
    p4_edits.never(data, "pending_second_fingerprint")


@p4_bug("the switch does not check who answers for a bucket", 5, faults=ANSWERERS)
def _home_not_checked(data: Json) -> None:
    p4_edits.default(data, "bucket_home", "home")


@p4_bug("the switch does not check who may read a namespace", 5, faults=TENANTS)
def _namespace_not_checked(data: Json) -> None:
    p4_edits.default(data, "namespace_guard", "allow")


@p4_bug("the switch does not check source addresses", 5, faults=["hostile_spoofer"])
def _source_not_checked(data: Json) -> None:
    p4_edits.ignore_key(data, "gate", "admitted")


@bug("nodes say that they have handed all over before they have", 3, faults=["node_drained"])
def _handed_over_early() -> Any:
    report = Handover.report

    def early(self: Handover, now: float) -> HandedOver | None:
        told = report(self, now)
        return None if told is None else replace_field(told, left=0)

    return mock.patch.object(Handover, "report", early)


@bug("the controller does not wait until all is handed over", 3, faults=["node_drained"])
def _settles_at_once() -> Any:
    def settle(self: controller_pool.Pool, _now: float) -> None:
        if not self.membership.is_settled and self._map is not None and not self._map_changed:
            self.membership.settle()
            self._map_changed = True

    return mock.patch.object(controller_pool.Pool, "_settle", settle)


@bug(
    "who replicates a block may answer for every bucket",
    5,
    faults=ANSWERERS,
    only=lambda plan: _replicates(plan) and not plan.plain,
)
def _replicas_answer_for_all() -> Any:
    original = controller_pool.Pool.answering.fget
    assert original is not None

    @functools.lru_cache(maxsize=2)
    def widened(right: Placement, nodes: frozenset[str]) -> Placement:
        return tuple((*bucket, *sorted(nodes.difference(bucket))) for bucket in right)

    def answering(self: controller_pool.Pool) -> Placement:
        nodes = {node for _, node in self.hot.guarded if node in self.membership.nodes}
        return widened(original(self), frozenset(nodes)) if nodes else original(self)

    return mock.patch.object(controller_pool.Pool, "answering", property(answering))


@bug(
    "a controller that knows nothing begins with the generations of the one before",
    1,
    faults=["controller_wiped", "controller_failover"],
)
def _generations_begin_anew() -> Any:
    original = Residency.__init__

    def init(self: Residency, slots: int, *, first_generation: int, drain_s: float) -> None:
        del first_generation
        original(self, slots, first_generation=1, drain_s=drain_s)

    return mock.patch.object(Residency, "__init__", init)


# --- shared answers by RDMA -----------------------------------------------------------------------


@bug(
    "what was written by RDMA is not compared with its digest",
    1,
    faults=["rdma_flips", "rdma_strays"],
    only=_writes,
)
def _written_not_verified() -> Any:
    put, verified = Assembly.put_written, Assembly.verified
    by_write: dict[int, Assembly] = {}

    def put_written(self: Assembly, *arguments: Any, **rest: Any) -> Any:
        by_write[id(self)] = self  # and kept, so that no other has its id
        return put(self, *arguments, **rest)

    def is_right(self: Assembly) -> bool:
        return id(self) in by_write or verified(self)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Assembly, "put_written", put_written))
    stack.enter_context(mock.patch.object(Assembly, "verified", is_right))
    return stack


@bug("a slot is given to a segment before the one that has it has ended", 0, 1, only=_writes)
def _slot_given_twice() -> Any:
    original = Landing.claim

    def claim(self: Landing, place: Any, owner: object) -> bool:
        had = self._owners.pop(place.slot, None)
        given = original(self, place, owner)
        if not given and had is not None:
            self._owners[place.slot] = had
        return given

    return mock.patch.object(Landing, "claim", claim)


@bug("a block may be evicted while the card still writes it to others", 0, 1, only=_writes)
def _written_not_pinned() -> Any:
    original = Writing.write

    def write(self: Writing, reader: int, answer: Any) -> None:
        lookup = self._lookup

        def unpinned(block: BlockId) -> Any:
            held = lookup(block)
            if held is not None:
                held._store.unpin(held._copy)
                held.release = held.data.release
            return held

        self._lookup = unpinned
        try:
            original(self, reader, answer)
        finally:
            self._lookup = lookup

    class Unpinned(agent_core_module._Held):
        """May be changed, as one with slots may not."""

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(agent_core_module, "_Held", Unpinned))
    stack.enter_context(mock.patch.object(Writing, "write", write))
    return stack


@p4_bug(
    "RDMA to a landing zone is ordinary traffic to the switch", 5, faults=ANSWERERS, only=_writes
)
def _zone_not_guarded(data: Json) -> None:
    p4_edits.forget(data, "to_zone", "kind")


@p4_bug("a WRITE is copied to the queue pair that it came for", 1, 2, only=_writes)
def _queue_pair_not_rewritten(data: Json) -> None:
    p4_edits.forget(data, "readdress", "queue_pair")


# --- below DRAM, and by the settings of namespaces ------------------------------------------------


@bug(
    "what is damaged on a disk is given all the same",
    1,
    faults=["disk_damaged", "disk_flips", "disk_shrunk", "disk_stale", "disk_truncated"],
)
def _disk_not_verified() -> Any:
    return mock.patch.object(ssd_module, "DAMAGED", "")


@bug("a file of another cluster is believed", 1, faults=["disk_of_another_cluster"])
def _owner_ignored() -> Any:
    original = layout._identity_of

    def identity_of(path: str, head: bytes, cut: layout.Cut) -> int | None:
        said = layout._said_by(head)
        return original(path, head, cut if said is None else replace(cut, owner=said[0].owner))

    return mock.patch.object(layout, "_identity_of", identity_of)


@bug("an arena of another cluster is believed", 1, faults=["arena_of_another_cluster"])
def _meanings_ignored() -> Any:
    original = Recovery.begin

    def begin(self: Recovery, pool: Pool) -> None:
        original(self, pool)
        self._meant = {n: pool.meaning_of(n) or 0 for n in pool.namespaces}

    return mock.patch.object(Recovery, "begin", begin)


@bug("a block is as old as the wall clock says, be it stored tomorrow", 0, only=_ages_on_disk)
def _age_by_wall_clock() -> Any:
    claim, begins = SsdTier._claim, Store._begins

    def claimed(self: SsdTier, block: BlockId) -> None:
        now, self._now = self._now, 1e18
        claim(self, block)
        self._now = now

    def begin(self: Store, copy_: Copy, state: Any, since: float | None = None) -> None:
        now = self._now
        self._now = now if since is None else max(now, since)
        begins(self, copy_, state, since)
        self._now = now

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(SsdTier, "_claim", claimed))
    stack.enter_context(mock.patch.object(Store, "_begins", begin))
    return stack


@bug("a namespace may exceed its quota by the block that comes", 0, only=_has_quotas)
def _quota_exceeded() -> Any:
    original = Store._respect_quota

    def respect(self: Store, namespace: int, state: Any, _more_bytes: int) -> None:
        original(self, namespace, state, 0)

    return mock.patch.object(Store, "_respect_quota", respect)


@bug("what is assured to a namespace is everybody's", 0, only=_has_shares)
def _shares_are_everybodys() -> Any:
    return mock.patch.object(Store, "_can_spare", return_value=True)


@bug("a prefix stays when its beginning goes", 0, only=_has_prefixes)
def _rest_of_prefix_stays() -> Any:
    return mock.patch.object(Value, "descendants", return_value=[])


@bug("a prefix stays in other tiers when its beginning goes", 0, only=_has_prefixes)
def _rest_of_prefix_stays_elsewhere() -> Any:
    return mock.patch.object(PrefixClosure, "left", return_value=None)


@bug("a block that came before its ancestor stays when that goes", 0, only=_has_prefixes)
def _prefix_in_order_only() -> Any:
    inserted = Value.inserted

    def insert(self: Value[Any], block: Any, size: int, parent: Any = None, depth: int = 0) -> None:
        inserted(self, block, size, parent if parent in self._blocks else None, depth)

    return mock.patch.object(Value, "inserted", insert)


@bug("weights of namespaces count for nothing between nodes", 0, faults=["tenants_blast"])
def _weights_ignored() -> Any:
    original = Departures.__init__

    def init(self: Departures, rate_bytes_per_s: float, _weight_of: Any = None) -> None:
        original(self, rate_bytes_per_s)

    return mock.patch.object(Departures, "__init__", init)


@p4_bug("a chunk of another copy is stored under the resident's digest", 1, faults=LIARS)
def _fill_ignores_digest(data: Json) -> None:
    p4_edits.ignore_key(data, "fill_verdict", "digest_difference")


@p4_bug("the switch serves the chunk after the one that it says", 1, 3)
def _serves_next_cell(data: Json) -> None:
    for entry in p4_edits.table(data, "lowest_chunk")["entries"]:
        arguments = entry["action_entry"]["action_data"]
        if int(arguments[0], 16) == 1:
            arguments[0] = "0x02" if len(arguments[0]) > 3 else "0x2"


@p4_bug("shared answers go to every port", 5)
def _filter_ignored(data: Json) -> None:
    p4_edits.forget(data, "no_host", "member")
    for spec in data["actions"]:
        if spec["name"].split(".")[-1] != "rewrite":
            continue
        for primitive in spec["primitives"]:
            if primitive["op"] == "assign" and "member" in str(primitive["parameters"][0]):
                primitive["parameters"][1] = {"type": "runtime_data", "value": 3}


@p4_bug("shared answers keep the address of one reader", 2, 4)
def _address_not_rewritten(data: Json) -> None:
    p4_edits.forget(data, "rewrite", "dst")


__all__ = ["BUGS", "COMMITTED", "Bug"]


# --- what an operator does ----------------------------------------------------------------------


@bug(
    "a namespace that is made again is the one that was deleted",
    1,
    faults=["namespace_deleted"],
    features=["operator"],
)
def _number_given_again() -> Any:
    original = Namespaces.namespace

    def namespace(self: Any, *arguments: Any) -> Any:
        deleted, self.deleted = self.deleted, {}
        info, made = original(self, *arguments)
        deleted.pop(info.namespace, None)
        self.deleted = deleted
        return info, made

    return mock.patch.object(Namespaces, "namespace", namespace)


@bug("agents keep what is deleted", 0, faults=["namespace_deleted"], features=["operator"])
def _deleted_kept() -> Any:
    return mock.patch.object(Store, "drop_namespace", return_value=0)


@bug(
    "what exceeds a quota that becomes smaller stays",
    0,
    faults=["namespace_set"],
    features=["operator"],
)
def _excess_kept() -> Any:
    original = Store._apply

    def apply(self: Any, namespace: int, state: Any) -> None:
        with mock.patch.object(Store, "quota_of", return_value=0):
            original(self, namespace, state)

    return mock.patch.object(Store, "_apply", apply)


# --- clients that outlive their agent -----------------------------------------------------------

KILLED = ["agent_killed"]


@bug(
    "what clients hold of a former agent is anybody's room",
    *(0, 1),
    faults=[*KILLED, "agent_upgraded"],
    features=["kept"],
)
def _survivors_hold_nothing() -> Any:
    original = Session.restore

    def restore(self: Any, rows: Any, region: Any) -> None:
        for at, _ in rows:
            self._core.ledger.strike(at)
        original(self, [], region)

    return mock.patch.object(Session, "restore", restore)


@bug("what clients have given back stays in the ledger", 0, 1, features=["kept"])
def _rows_stay() -> Any:
    return mock.patch.object(Session, "_strike", return_value=None)


# --- further arenas -----------------------------------------------------------------------------


@bug(
    "what is damaged in a further arena is given all the same",
    1,
    faults=["arena_damaged", "arena_flips"],
    only=lambda plan: not plan.disks,
    features=["arenas"],
)
def _arena_not_verified() -> Any:
    return mock.patch.object(ssd_module, "DAMAGED", "")


@bug(
    "what exceeds a namespace's quota of further arenas stays there",
    0,
    only=lambda plan: any(said.quota_bytes.get("arena") for said in plan.settings.values()),
    features=["arenas"],
)
def _arena_quota_ignored() -> Any:
    original = SsdTier.configure

    def configure(self: Any, rules: Any, forbidden: Any) -> None:
        unlimited = {number: replace(rule, quota_bytes=0) for number, rule in rules.items()}
        original(self, unlimited, forbidden)

    return mock.patch.object(SsdTier, "configure", configure)
