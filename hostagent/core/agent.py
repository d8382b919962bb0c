"""The agent's decisions, put together: one object that the adapters talk to.

Owns: which core gets which event, the pool's membership as the controller states it, and the
agent's report. Must not know: sockets, tasks, clocks; every method that needs the time is given
it. After any call an adapter sends `frames_to_send` and makes the calls in `outbox.calls`, and
it calls `handle_timer` when `get_timer` says so.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from ipaddress import AddressValueError, IPv4Address
from typing import Any, Final

import msgspec
from kvcast.hostagent.core.bulk_requests import BulkOutbox
from kvcast.hostagent.core.cold import ColdTier
from kvcast.hostagent.core.engines import Engines
from kvcast.hostagent.core.handover import Handover, HandoverOptions
from kvcast.hostagent.core.limits import Limits, RateLimit
from kvcast.hostagent.core.lower_tiers import put_below
from kvcast.hostagent.core.metrics import Metrics
from kvcast.hostagent.core.namespace_metrics import NamespaceMetrics, explained
from kvcast.hostagent.core.pool import Pool, PoolMapError
from kvcast.hostagent.core.queries import Queries
from kvcast.hostagent.core.rdma_answers import WriteCard, Writing
from kvcast.hostagent.core.reads import ReadOptions, Reads
from kvcast.hostagent.core.recovery import Recovery
from kvcast.hostagent.core.reservations import Reservations
from kvcast.hostagent.core.serving import Serving
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.spread import Spread
from kvcast.hostagent.core.ssd import ARENA, SSD, SsdTier
from kvcast.hostagent.core.store import Copy, Store, StoreRules
from kvcast.hostagent.core.writes import WriteOptions, Writes
from kvcast.hostagent.tiers import policies
from kvcast.hostagent.tiers.ledger import Ledger
from kvcast.protocol.chains import keys_of
from kvcast.protocol.conveyor import Given
from kvcast.protocol.digests import Digested, MakeDigests, digests_at_once
from kvcast.protocol.lane import Answered, Lane
from kvcast.protocol.links.departures import Departures
from kvcast.protocol.meetings import Meetings
from kvcast.protocol.messages import local
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    AgentMessage,
    ControllerMessage,
    Credit,
    Describe,
    Described,
    GroupInfo,
    GroupReply,
    GroupRequest,
    HotBlock,
    Keep,
    Kept,
    Loads,
    NamespaceInfo,
    NamespaceReads,
    NamespaceReply,
    NamespaceRequest,
    NamespaceSecrets,
    PoolMap,
    Refused,
    Registered,
    Renew,
    Replicas,
    Residents,
)
from kvcast.protocol.messages.wire import (
    FLAG_LAST,
    FLAG_WRITE,
    OFFER_TCP,
    OP_DATA,
    OP_MISS,
    OP_READ,
    READ_PADDING_BYTES,
    BlockId,
    Chunking,
    Frame,
    Offer,
    encode_offer,
)
from kvcast.protocol.namespace_secrets import KeyDerivation
from kvcast.protocol.placement import Arrived, Placement
from kvcast.protocol.requester import ReadFrames, Requester, RequesterConfig
from kvcast.protocol.requester.landing import Landing, LandingCounters
from kvcast.protocol.responder import Answer, HeldBlock, Responder, ResponderConfig

_OFFERS: Final = frozenset({OFFER_TCP})
MAX_HOT_BLOCKS: Final = 256
MAX_NAMESPACES_REPORTED: Final = 256
_LEAST_WINDOW: Final = 2
"""Segments in flight at least: while one arrives, the next is asked for."""
MAX_PARKED: Final = 4096
"""READs that wait for this node's disk; one more is dropped, and its reader asks again."""
MAX_ASKED: Final = 1024
"""Questions to the controller without an answer yet; one more is "busy"."""


@dataclass(frozen=True)
class AgentOptions:
    """Everything tunable about the agent's decisions."""

    node_id: str
    requester: RequesterConfig = field(default_factory=RequesterConfig)
    responder: ResponderConfig = field(default_factory=ResponderConfig)
    reads: ReadOptions = field(default_factory=ReadOptions)
    writes: WriteOptions = field(default_factory=WriteOptions)
    handover: HandoverOptions = field(default_factory=HandoverOptions)
    lone_reads_by_tcp: bool = True
    """Whether this node, as a reader, takes what nobody else reads just then by TCP."""
    client_share: float = 0.5
    """Share of the arena that one client may hold pinned or reserved; more is "busy"."""
    bulk_link_bits_per_s: float = 0.0
    """What the link carries by which other nodes get blocks by TCP; 0 = not known."""
    reads_share_bulk_link: bool = True
    """Whether READs are answered by the same link."""
    placement_seed: int = 0
    """64 bits that nobody else knows; see `Placement`."""


class MissingSecretError(Exception):
    """The controller has not given this node the secret of a namespace that has one."""


class _Held:
    """A block held for the home while it is sent (the responder's `HeldBlock`)."""

    __slots__ = ("_copy", "_store", "data", "digest")

    def __init__(self, store: Store, copy: Copy, data: memoryview) -> None:
        self._store = store
        self._copy = copy
        self.data = data
        self.digest = copy.digest

    def release(self) -> None:
        self.data.release()
        self._store.unpin(self._copy)


Found = Callable[[NamespaceInfo | GroupInfo | None, str, str], None]
"""(info, status, reason): the controller's answer to a question, or why there is none."""


class AgentCore:
    """See the module's description."""

    def __init__(
        self,
        options: AgentOptions,
        store: Store,
        memory: memoryview,
        rng: random.Random,
        shared: SharedIndex | None = None,
        *,
        recovery: Recovery | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self.shared = shared
        """What clients find without asking; None = they ask for everything."""
        self.recovery = recovery
        """What a former agent has left here, as long as some of it may be in doubt."""
        self.recovery_counters = recovery.counters if recovery is not None else None
        self.ledger = ledger
        """Where it is written down what clients hold, for the agent that comes after."""
        self.keep_map: Callable[[Registered, PoolMap], None] = lambda _registered, _map: None
        """Told of every map that is in force, for the agent that comes after."""
        self._registered: Registered | None = None
        self._last_map: PoolMap | None = None
        self.memory = memory
        self.metrics = Metrics()
        self.engines = Engines()
        self.limits = Limits()
        self.ahead_bytes = 0
        """How much of the arena clients were given for blocks that they have not named yet."""
        self.outbox = BulkOutbox()
        self.make_digests: MakeDigests = digests_at_once
        """Who makes digests for `digest`; an adapter may have threads for that."""
        self.writes = Writes(options.writes, store, memory, self.outbox, self.metrics, self.digest)
        self.spread = Spread(rng)
        self.queries = Queries(store, self.outbox, self.spread.replicas_of)
        self.meetings = Meetings()
        self.responder = Responder(
            options.responder,
            lookup=self._lookup,
            make_offer=self._make_offer,
            is_awaited=self.meetings.reads,
            weight_of=self.weight_of,
        )
        self.departures = Departures(options.bulk_link_bits_per_s / 8, self.weight_of)
        """Of what leaves over the bulk link,"""
        self.arrivals = Departures(options.bulk_link_bits_per_s / 8, self.weight_of)
        """and of what is put here by it."""
        self.stop_conveying: Callable[[], None] = lambda: None
        """Ends all conveyors on which blocks leave: they pass `departures` by;"""
        self.stop_pushing: Callable[[], object] = lambda: None
        """all connections on which blocks are pushed to others, likewise;"""
        self.stop_taking: Callable[[], object] = lambda: None
        """and those on which they are pushed here, which pass `arrivals` by."""
        if options.reads_share_bulk_link:
            self.responder.was_sent = self.departures.sent_by_reads
            self.departures.was_sent = self.responder.sent_otherwise
        self.writing = Writing(self._lookup)
        self.landing_counters = LandingCounters()
        self.serving = Serving(
            *(store, memory, self.outbox, self.metrics, self.responder.note_heat, self._recall),
            meetings=self.meetings,
        )
        self.serving.is_tight = lambda pushes: self._way_in(pushes).is_tight(store.now)
        self.serving.was_pushed = self._was_pushed_here
        self.writes.was_pushed = self._was_pushed
        self.tiers: list[SsdTier] = []
        self.awaits_tiers = False
        """Whether there will be tiers, whose files another agent of this node still has."""
        self.ssd: SsdTier | None = None
        self.cold: ColdTier | None = None
        self.facts: dict[str, float] = {}
        """What an adapter has found out about this node, by name: among `values`."""
        self.cards: Callable[[], dict[str, dict[str, float]]] = dict
        """What there is to say of each RDMA card, by its name."""
        self._parked = 0
        """READs that wait for the disk."""
        self.handover = Handover(options.handover, store, self.outbox)
        self.handover.progressed = self._report_handover
        self.serving.came = self.handover.came
        self.writes.hand_on = self.handover.hand_on
        self.writes.replicate_late = self.handover.replicate
        reservations = Reservations(store, memory)
        self.requester = Requester(
            replace(
                options.requester,
                bulk_available=True,
                usable_offer_kinds=_OFFERS if options.lone_reads_by_tcp else frozenset(),
            ),
            allocate=reservations.reserve,
            rng=rng,
            placement=Placement(seed=options.placement_seed),
        )
        self._now = 0.0
        self.lane: Lane | None = None
        """Answers READs that need no decision; None where there is no index to find blocks in."""
        if shared is not None:
            self.lane = Lane(
                *(shared.memory, memory),
                max_chunk_bytes=options.responder.max_chunk_bytes,
                meetings=self.meetings,
            )
            self.lane.told = self._answered
        self.requester.weigh(self.weight_of)
        self.reads = Reads(
            options.reads,
            options.node_id,
            store,
            reservations,
            self.requester,
            self.outbox,
            self.metrics,
            self.spread,
        )
        self.connected = False
        self.rdma_address = ""
        """Where homes send what the switch writes into landing zones; "" = nowhere."""
        self.lease_s = 3.0
        self._secrets: dict[int, KeyDerivation] = {}
        self._index = -1
        self._tell: Callable[[AgentMessage], None] | None = None
        self._missing: dict[int, NamespaceInfo] = {}
        """Namespaces that the controller's maps no longer name: it has lost its state."""
        self._rules: dict[int, StoreRules] = {}
        self._rules_below: dict[str, dict[int, StoreRules]] = {ARENA: {}, SSD: {}}
        """By tier below DRAM and namespace."""
        self._kept_off_ssd: set[int] = set()
        self._cold_ttl_s: dict[int, float] = {}
        self._cold_quotas: dict[int, int] = {}
        self._asked_again: set[int] = set()
        """Those of them for which it was asked on this connection."""
        self._asked: dict[int, Found] = {}
        self._next_question = 1

    def digest(self, now: float, blocks: list[memoryview], then: Digested) -> None:
        """As `MakeDigests`, of what is put here by a message, and of what comes by RDMA."""
        self.make_digests(now, blocks, then)

    @property
    def pool(self) -> Pool | None:
        """The pool as the controller last stated it; None before the first time."""
        return self.outbox.pool

    # --- frames -------------------------------------------------------------------------------

    def receive(self, now: float, source: int, frame: Frame) -> None:
        """A frame that came from node `source` of the present map."""
        self.store.advance(now)
        if frame.op == OP_READ:
            if self.lane is not None:
                self.lane.close()  # what comes after it in this round may meet it in its queue
            pool = self.outbox.pool
            assert pool is not None  # there are no node indices without it
            if pool.may_use(frame.namespace, pool.nodes[source].node_id):
                if not self.reads.sources or not self._park(now, source, frame):
                    self.responder.receive(now, source, frame)
            else:
                self.metrics.frames_forbidden_total += 1
            return
        self.metrics.frames_answers_total += 1
        block = BlockId(frame.namespace, frame.key)
        if self.reads.courier is not None and (frame.flags & FLAG_LAST or frame.op == OP_MISS):
            self.reads.courier.was_answered(block)
        if frame.group and frame.op == OP_DATA:
            self.reads.overhear(now, source, block, frame.group)
        self.requester.receive(now, source, frame)

    def choose(self, now: float, source: int, frame: Frame) -> bool:
        """As `Requester.choose`."""
        self.store.advance(now)
        refused = self.requester.choose(now, source, frame)
        self.metrics.frames_answers_total += refused
        return refused

    def open_lane(self, now: float, budget: int) -> Lane | None:
        """A round of frames comes: the lane, which may answer READs among them by up to `budget`
        frames, if there is nothing to decide about these. It is closed by the first that goes to
        `receive`, and in `after_receiving`."""
        lane = self.lane
        if lane is not None:
            self.store.advance(now)
            self._now = now
            # Of what a former agent has left, only Python knows what is right.
            self.meetings.at(now)
            frames = self.responder.lane_frames(now, budget) if self.recovery is None else 0
            lane.open(frames, takes_marked=not self.responder.holds_back)
        return lane

    def after_lane(self, now: float) -> bool:
        """Hear of what the lane has answered since it was opened, and close it; whether there is
        any that was not told before."""
        if self.lane is None:
            return False
        self._now = now
        told = self.lane.tell()
        self.lane.close()
        self.responder.counters.reads_beyond_lane += self.lane.take_full()
        return told

    def _answered(self, answered: list[Answered]) -> None:
        """The lane has answered these READs, and sent the answers."""
        assert self.shared is not None
        for each in answered:
            copy = self.shared.copy_of(each.cell)
            if copy is not None:
                self.store.get(copy.block)
                self.responder.answered(self._now, copy.block, copy.size_bytes, copy.digest, each)

    def conveyed(self, given: list[Given], sent_bytes: int) -> None:
        """Compiled code has given these by conveyors, and so many bytes of blocks have left."""
        self.metrics.payload_bytes_sent_bulk_get_total += sent_bytes
        if self.options.reads_share_bulk_link:
            self.responder.sent_otherwise(sent_bytes)
        for each in given:
            assert self.shared is not None
            copy = self.shared.copy_of(each.cell)
            if copy is not None:
                self.serving.given(copy, each.node, each.start_bytes)
                size_bytes = copy.size_bytes - each.start_bytes
                self.departures.sent(self._now, copy.block.namespace, size_bytes)
        if self.departures.is_tight(self._now):
            self.stop_conveying()

    def _way_in(self, pushes: bool) -> Departures:
        """What shares the way on which a connection is to bring blocks, as seen from here."""
        return self.arrivals if pushes else self.departures

    def _was_pushed(self, namespace: int, size_bytes: int) -> None:
        """A block has left in compiled code."""
        self.departures.sent(self.store.now, namespace, size_bytes)
        if self.departures.is_tight(self.store.now):
            self.stop_pushing()

    def _was_pushed_here(self, namespace: int, size_bytes: int) -> None:
        """One has come so."""
        self.arrivals.sent(self.store.now, namespace, size_bytes)
        if self.arrivals.is_tight(self.store.now):
            self.stop_taking()

    # --- the disk -----------------------------------------------------------------------------

    def use_tiers(self, tiers: Sequence[SsdTier]) -> None:
        """Have blocks lie in these, too, from now on: further arenas, the nearest first, and the
        disk."""
        self.tiers = list(tiers)
        self.ssd = next((tier for tier in tiers if tier.tier == SSD), None)
        self.reads.sources[:0] = tiers
        below = put_below(self.store, tiers)
        self.handover.lower = below.blocks
        self.handover.recall = self._recall
        if self.reads.courier is not None:
            counted = below.counted()
            self.reads.courier.use_below(counted)
            if self.lane is not None:
                self.lane.use_below(counted.memory, counted.bits)
        for tier in tiers:
            tier.meaning_of = self._meaning_of
            tier.became_ready = self._hand_over_found
        self._state_rules_below()
        if self.pool is not None:
            self._begin_tiers()
        self.await_tiers_no_more()

    def await_tiers_no_more(self) -> None:
        """They are there, or there will be none."""
        self.awaits_tiers = False
        self._hand_over_found()

    def _begin_tiers(self) -> None:
        for tier in self.tiers:
            tier.begin()

    def use_cold(self, cold: ColdTier) -> None:
        """Have blocks lie in an object store, too, from now on."""
        self.cold = self.store.beyond = cold
        self.reads.sources.append(cold)
        cold.meaning_of = self._meaning_of
        self._configure_cold()

    def _configure_cold(self) -> None:
        if self.cold is not None:
            buckets = self.pool.first_buckets() if self.pool is not None else frozenset[int]()
            self.cold.configure(self._cold_ttl_s, self._cold_quotas, buckets)

    def _meaning_of(self, namespace: int) -> int | None:
        return self.pool.meaning_of(namespace) if self.pool is not None else None

    def _state_rules_below(self) -> None:
        for tier in self.tiers:
            kept_off = self._kept_off_ssd if tier is self.ssd else set()
            tier.configure(self._rules_below[tier.tier], kept_off)

    def _recall(self, now: float, block: BlockId, then: Callable[[], None]) -> bool:
        """Bring a block from the disk for another node; see `Reads.recall`."""
        if not self.reads.sources or self.store.peek(block) is not None:
            return False
        return self.reads.recall(now, block, then)

    def _park(self, now: float, source: int, frame: Frame) -> bool:
        """Let a READ of a block that lies on the disk wait for it; False where it does not."""
        if self._parked >= MAX_PARKED:
            if not self.store.lies_below(frame.block):
                return False
            if self.store.peek(frame.block) is not None:
                return False
            self.metrics.ssd_reads_dropped_total += 1
            return True  # its reader asks again
        pool = self.outbox.pool
        assert pool is not None
        node_id = pool.nodes[source].node_id
        waits = True

        def brought() -> None:
            nonlocal waits
            if not waits:
                return
            waits = False
            self._parked -= 1
            present = self.outbox.pool
            node = present.nodes_by_id.get(node_id) if present is not None else None
            if node is not None:  # by now it may have another index, or have left
                self.responder.receive(self.reads.now, node.index, frame)

        self._parked += 1
        # What can be known at once is known when this returns.
        if not self._recall(now, frame.block, brought):
            waits = False
            self._parked -= 1
            return False
        return True

    # --- frames that answer -------------------------------------------------------------------

    def placed(self, now: float, arrivals: list[Arrived]) -> None:
        """DATA that `requester.placement` has put in place."""
        self.metrics.frames_answers_total += sum(arrived.frames for arrived in arrivals)
        self.requester.placed(now, arrivals)

    def after_receiving(self, now: float, *, heard: bool = True) -> None:
        """Act on what the frames since the last call have brought about. `heard`: whether
        `receive` or `placed` was told of any; else nothing is to be sent, or done."""
        self.after_lane(now)
        if not heard:
            return
        self.store.advance(now)
        self.reads.drain(now)

    def answers_to_send(
        self, now: float, budget: int
    ) -> list[tuple[int, Frame | Answer | ReadFrames]]:
        """READs, and answers of up to `budget` frames; send or copy them before anything else
        happens, since they are views of the arena."""
        answers: list[tuple[int, Frame | Answer | ReadFrames]] = [*self.requester.reads_to_send()]
        answers += self.writing.take_frames()
        if budget > 0 and not self.writing.full:
            for reader, answer in self.responder.answers_to_send(now, budget):
                if isinstance(answer, Answer) and answer.frame.flags & FLAG_WRITE:
                    self.writing.write(reader, answer)
                else:
                    answers.append((reader, answer))
        return answers

    def frames_to_send(self, now: float, budget: int) -> list[tuple[int, Frame]]:
        """The same, frame by frame."""
        frames: list[tuple[int, Frame]] = []
        for node, answer in self.answers_to_send(now, budget):
            if isinstance(answer, Frame):
                frames.append((node, answer))
            else:
                frames += [(node, frame) for frame in answer.frames()]
        return frames

    def get_timer(self, now: float) -> float | None:
        """When `handle_timer` and `frames_to_send` must be called next; None = no need."""
        timers = (
            self.reads.get_timer(),
            self.responder.get_timer(now),
            self.store.next_expiry(),
            self.handover.get_timer(),
        )
        return min((at for at in timers if at is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Do what has become due by `now`."""
        self.store.advance(now)
        self.reads.handle_timer(now)
        self.handover.advance(now)
        self._report_handover(now)

    def _lookup(self, block: BlockId) -> _Held | None:
        copy = self.store.get(block)
        if copy is None:
            why = explained(self.store.why_gone(block))
            self.metrics.by_namespace.of(block.namespace).home_misses[why] += 1
            return None
        self.store.pin(copy)
        return _Held(self.store, copy, self.memory[copy.offset : copy.offset + copy.size_bytes])

    def _make_offer(self, _block: BlockId, _held: HeldBlock) -> Offer | None:
        """The bulk link. It needs no token, since it asks every caller who it is, and what it may
        use; and readers connect to where the map says, whatever is written here."""
        pool = self.outbox.pool
        return None if pool is None else self._offer_of(pool)

    @staticmethod
    def _offer_of(pool: Pool) -> Offer | None:
        node = pool.nodes.get(pool.index)
        if node is None:
            return None
        try:
            ipv4 = int(IPv4Address(node.bulk_host))
        except AddressValueError:  # a name, or IPv6
            ipv4 = 0
        return Offer(OFFER_TCP, node.bulk_port, ipv4, 0, 0)

    # --- answers by RDMA ----------------------------------------------------------------------

    def use_zone(self, landing: Landing | None, card: WriteCard | None) -> None:
        """From now on answers to this node may be written into these slots, and its own by this
        card; without, neither."""
        self.requester.use_landing(landing)
        self.writing.card = card
        self.responder.can_write = card is not None

    def landed(self, now: float, segments: list[object]) -> None:
        """Chunks of these segments lie in the landing zone."""
        self.requester.landed(now, segments)

    # --- the controller -----------------------------------------------------------------------

    def control_connected(self, tell: Callable[[AgentMessage], None]) -> None:
        """A connection to the controller stands, and took our registration; `tell` sends."""
        self._tell = tell
        self.connected = True
        self.spread.reset()
        self._asked_again.clear()

    def control_lost(self) -> None:
        """The connection is gone: open questions end, the last map stays in force."""
        self._tell = None
        self.connected = False
        asked, self._asked = self._asked, {}
        for found in asked.values():
            found(None, local.UNAVAILABLE, "the connection to the controller was lost")

    def control_message(self, now: float, message: ControllerMessage) -> None:
        """Anything that the controller says after it took the registration."""
        self.store.advance(now)
        if isinstance(message, PoolMap):
            self._new_map(now, message)
        elif isinstance(message, Credit):
            for namespace, key, hits in message.hits:
                self.metrics.credits_total += hits
                self.store.credit(BlockId(namespace, key), hits)
        elif isinstance(message, NamespaceSecrets):
            self._new_secrets(message)
        elif isinstance(message, Residents):
            self.reads.reside(frozenset(BlockId(b.namespace, b.key) for b in message.blocks))
        elif isinstance(message, Replicas):
            self._replicas_are(message)
        elif isinstance(message, Loads):
            self.spread.loads_are(message)
        elif isinstance(message, Describe):
            self._describe(message)
        elif isinstance(message, Keep):
            self._keep(now, message)
        elif isinstance(message, Registered):
            self.registered(message)
        elif isinstance(message, Refused):
            self._found(message.request, None, local.INVALID, message.reason)
        elif isinstance(message, NamespaceReply):
            if self.pool is not None and message.info.namespace in self.pool.deleted:
                reason = f"namespace {message.info.namespace} was deleted meanwhile"
                self._found(message.request, None, local.UNAVAILABLE, reason)
                return
            if self.pool is not None:
                self.pool.namespaces.setdefault(message.info.namespace, message.info)
                self._apply_settings(self.pool)
            self._found(message.request, message.info, local.OK, "")
            if self.pool is not None:
                self._state_namespace(self.pool, message.info.namespace)
                self._state_lane(self.pool)
                self._keep_map(self.pool)
        else:
            assert isinstance(message, GroupReply)
            self._found(message.request, message.info, local.OK, "")

    def registered(self, message: Registered) -> None:
        """The controller took us: by which index, and with which profile of the network."""
        if message.version != CONTROL_PROTOCOL_VERSION:
            raise PoolMapError(f"controller speaks version {message.version}")
        if not 0.1 <= message.lease_s <= 3600.0:
            raise PoolMapError(f"a lease of {message.lease_s} s is outside 0.1..3600")
        if message.read_padding_bytes not in (0, READ_PADDING_BYTES):
            raise PoolMapError(f"READs cannot carry {message.read_padding_bytes} bytes of padding")
        if not message.read_lease_s > 0:
            raise PoolMapError(f"READs are not held back for {message.read_lease_s} s")
        self._index = message.index
        self._registered = message
        self.lease_s = message.lease_s
        if self.reads.courier is not None:
            self.reads.courier.read_lease_s = message.read_lease_s
        self.requester.config = replace(
            self.requester.config, read_padding=message.read_padding_bytes > 0
        )

    def _new_map(self, now: float, message: PoolMap) -> None:
        try:
            pool = Pool(message, self._index, self.options.node_id)
        except PoolMapError:
            self.metrics.maps_refused_total += 1
            raise
        old = self.outbox.pool
        self.outbox.pool = pool
        self._last_map = message
        self._use_chunking(pool.chunking)
        self.requester.use_writers(
            frozenset(index for index, node in pool.nodes.items() if node.zone_queue_pair)
        )
        self.rdma_address = message.rdma_address
        if old is not None:
            self._hide_namespaces(old, pool)
            self._leave_old_pool(now, old, pool)
        # Those that the map has lost keep theirs; what has changed is dropped as what it was.
        self._apply_settings(pool)
        if self.recovery is not None and not self.recovery.begun:
            self.recovery.begin(pool)
        if old is None:
            self._begin_tiers()
        for namespace in pool.namespaces:
            self._state_namespace(pool, namespace)
        self._state_lane(pool)
        self._keep_map(pool)
        self._hand_over(now, old, pool)

    def _state_lane(self, pool: Pool) -> None:
        """Who may have which namespaces' blocks without asking us."""
        if self.lane is not None:
            offer = self._offer_of(pool)
            self.lane.use(
                {
                    namespace: pool.nodes_of(info) if info.nodes else None
                    for namespace, info in pool.namespaces.items()
                },
                b"" if offer is None else encode_offer(offer),
            )

    def _hand_over(self, now: float, old: Pool | None, pool: Pool) -> None:
        self.handover.new_map(old, pool, all_known=self._all_known)
        self.handover.advance(now)
        self._report_handover(now)

    @property
    def _all_known(self) -> bool:
        """Whether it is known what a former agent has left here, in DRAM and below."""
        if self.recovery is not None or self.awaits_tiers:
            return False
        return all(tier.is_ready for tier in self.tiers)

    def _hand_over_found(self) -> None:
        """More is known of what is here than when the map came."""
        if self.pool is not None and self._all_known:
            self._hand_over(self.store.now, None, self.pool)

    def _report_handover(self, now: float) -> None:
        """Say how much is left; not before it is known what is here."""
        if self._tell is not None and self._all_known:
            news = self.handover.report(now)
            if news is not None:
                self._tell(news)

    def restore_map(self, now: float, registered: Registered, pool_map: PoolMap) -> None:
        """Go on by the map that a former agent went by, until the controller sends one. LinkError
        where it cannot be used."""
        self.store.advance(now)  # blocks that are taken over begin to age now
        self.registered(registered)
        self._new_map(now, pool_map)

    def _keep_map(self, pool: Pool) -> None:
        if self._registered is not None and self._last_map is not None:
            # What the controller has told us of since is not in its map.
            namespaces = list(pool.namespaces.values())
            self.keep_map(
                self._registered, msgspec.structs.replace(self._last_map, namespaces=namespaces)
            )

    def recover(self) -> bool:
        """Do a little of what is left to do for what a former agent has left; whether there is
        more. To be called again and again from the first map on, with other work in between."""
        recovery = self.recovery
        if recovery is None or not recovery.begun:
            return False
        if recovery.step():
            return True
        self.recovery = None
        pool = self.pool
        assert pool is not None
        for namespace in pool.namespaces:
            self._state_namespace(pool, namespace)
        self._hand_over_found()
        return False

    def weight_of(self, namespace: int) -> float:
        """A namespace's share of what transfers wait for, as against the others'."""
        pool = self.outbox.pool
        info = pool.namespaces.get(namespace) if pool is not None else None
        return info.settings.weight if info is not None else 1.0

    def _apply_settings(self, pool: Pool) -> None:
        """What operators say of namespaces is in force."""
        rules: dict[int, StoreRules] = {}
        below: dict[str, dict[int, StoreRules]] = {ARENA: {}, SSD: {}}
        kept_off: set[int] = set()
        cold: dict[int, float] = {}
        cold_quotas: dict[int, int] = {}
        limits: dict[int, RateLimit] = {}
        for namespace, info in {**self._missing, **pool.namespaces}.items():
            said = info.settings
            rules[namespace] = StoreRules(
                policy=said.policy or policies.DEFAULT,
                quota_bytes=said.quota_bytes.get("dram"),
                ttl_s=said.ttl_s,
                assured_bytes=said.assured_bytes.get("dram", 0),
            )
            for tier, of_it in below.items():
                of_it[namespace] = replace(
                    rules[namespace],
                    quota_bytes=said.quota_bytes.get(tier, 0),
                    assured_bytes=said.assured_bytes.get(tier, 0),
                )
            if not said.allows("ssd"):
                kept_off.add(namespace)
            if said.allows("cold"):
                cold[namespace] = said.ttl_s
                if quota_bytes := said.quota_bytes.get("cold"):
                    cold_quotas[namespace] = quota_bytes
            limits[namespace] = RateLimit(said.operations_per_s, said.bytes_per_s)
        if rules != self._rules:
            self._rules = rules
            self.store.configure(rules)
        if (below, kept_off) != (self._rules_below, self._kept_off_ssd):
            self._rules_below, self._kept_off_ssd = below, kept_off
            self._state_rules_below()
        self._cold_ttl_s, self._cold_quotas = cold, cold_quotas
        self._configure_cold()
        self.limits.configure(limits)
        self.metrics.by_namespace.keep(rules.keys())

    def _hide_namespaces(self, old: Pool, pool: Pool) -> None:
        """Clients look nothing up in a namespace that means something else now, until what it meant
        before is dropped: nobody shall find that under its new meaning."""
        for namespace in old.namespaces:
            if self.shared is not None and old.meaning_of(namespace) != pool.meaning_of(namespace):
                self.shared.state_namespace(namespace, 0, readable=False)

    def _state_namespace(self, pool: Pool, namespace: int) -> None:
        """Let clients look up what they would get by asking. Where there is a secret, they must
        ask: only the agent can tell the pool's keys from an engine's."""
        if self.shared is not None:
            info = pool.namespaces[namespace]
            allowed = (
                bool(pool.may_use(namespace, self.options.node_id))
                and not info.has_secret
                and not self.limits.is_limited(namespace)  # nobody counts what is taken there
                and self.recovery is None  # nobody may read what is in doubt
            )
            meaning = meaning_of(info)
            if self.recovery is not None and not self.recovery.takes_over(namespace, meaning):
                meaning = 0  # what has another meaning there is not cleared away yet
            self.shared.state_namespace(namespace, meaning, readable=allowed)

    def _leave_old_pool(self, now: float, old: Pool, pool: Pool) -> None:
        # An index may come to stand for another node: a controller that has lost its state
        # numbers them anew, and a node that is forgotten leaves its own to the next.
        gone = {
            index
            for index, node in old.nodes.items()
            if index not in pool.nodes or pool.nodes[index].node_id != node.node_id
        }
        self.spread.keep_nodes(pool.nodes, gone)
        if gone:
            for index in sorted(gone):
                self.responder.drop_reader(index)
            self.requester.forget(now, gone)
            self.reads.drain(now)
        self._compare_namespaces(now, {**self._missing, **old.namespaces}, pool)

    def _use_chunking(self, chunking: Chunking) -> None:
        """Credit and windows are set for segments of the smallest chunks, of which larger ones are
        several."""
        base = self.options.requester

        def scaled(segments: int) -> int:
            return max(_LEAST_WINDOW, segments >> chunking.code)

        self.requester.config = replace(
            self.requester.config,
            credit_segments=scaled(base.credit_segments),
            window_initial=scaled(base.window_initial),
            window_max=scaled(base.window_max),
            window_shared=scaled(base.window_shared),
        )

    def _compare_namespaces(self, now: float, before: dict[int, NamespaceInfo], pool: Pool) -> None:
        """A number that now means something else must not serve what it meant before. One that
        means nothing any more, and was not deleted, belonged to a controller that has lost its
        state: whoever has it now is asked for the namespace again, and until the answer its blocks
        are left alone."""
        deleted = pool.deleted & before.keys()
        missing = {
            n: info
            for n, info in before.items()
            if n not in pool.namespaces and n not in pool.deleted
        }
        changed = {
            namespace
            for namespace, info in before.items()
            if namespace in pool.namespaces
            and meaning_of(pool.namespaces[namespace]) != meaning_of(info)
        }
        self._missing = missing
        if missing or changed or deleted:
            self.reads.forget_namespaces(now, missing.keys() | changed | deleted)
        for namespace in changed | deleted:
            self.store.drop_namespace(namespace, at_once=namespace in changed)
        for namespace, info in missing.items():
            mine = not info.nodes or self.options.node_id in info.nodes
            if mine and namespace not in self._asked_again:
                self._ask_again(info)

    def _ask_again(self, info: NamespaceInfo) -> None:
        namespace = info.namespace
        self._asked_again.add(namespace)

        def found(again: NamespaceInfo | GroupInfo | None, status: str, _reason: str) -> None:
            if status in (local.UNAVAILABLE, local.BUSY):
                self._asked_again.discard(namespace)
                return
            if self._missing.pop(namespace, None) is None:
                return  # a map has said meanwhile what the number means
            same = (
                isinstance(again, NamespaceInfo)
                and again.namespace == namespace
                and meaning_of(again) == meaning_of(info)
            )
            if not same:
                # One that is refused to this node may be there for others.
                self.store.drop_namespace(namespace, deleted=isinstance(again, NamespaceInfo))

        parts = (info.tenant, info.model, info.version, info.layout)
        self.ask_controller(lambda number: NamespaceRequest(number, *parts), found)

    def _new_secrets(self, message: NamespaceSecrets) -> None:
        for given in message.secrets:
            old = self._secrets.get(given.namespace)
            if old is not None and old.is_made_of(given.secret):
                continue
            self._secrets[given.namespace] = KeyDerivation(given.secret)
            if old is not None:
                # Nobody can name what was kept by the old one.
                self.store.drop_namespace(given.namespace)

    def pool_keys(self, namespace: int, keys: list[bytes]) -> list[bytes]:
        """The pool's keys of an engine's; the same list where the namespace has no secret.
        MissingSaltError where it has one that this node was not given."""
        pool = self.outbox.pool
        info = pool.namespaces.get(namespace) if pool is not None else None
        if info is None or not info.has_secret:
            return keys
        secret = self._secrets.get(namespace)
        if secret is None:
            raise MissingSecretError(
                f"the controller has not sent the secret of namespace {namespace}"
            )
        return secret.keys(keys)

    def pool_chain(self, namespace: int, chain: bytes) -> bytes:
        """As `pool_keys`, of keys in a row."""
        pool = self.outbox.pool
        info = pool.namespaces.get(namespace) if pool is not None else None
        if info is None or not info.has_secret:
            return chain
        return b"".join(self.pool_keys(namespace, keys_of(chain)))

    def _say(self, message: AgentMessage) -> None:
        if self._tell is not None:
            self._tell(message)

    def _describe(self, message: Describe) -> None:
        held = []
        for reference in message.blocks:
            copy = self.store.peek(BlockId(reference.namespace, reference.key))
            if copy is not None:
                held.append((reference.namespace, reference.key, copy.size_bytes, copy.digest))
        self._say(Described(message.request, held))

    def _replicas_are(self, message: Replicas) -> None:
        """What was given here and is taken back makes room at once; but what has become this node's
        own stays."""
        pool = self.pool
        for block in self.spread.replicas_are(message, self._index):
            copy = self.store.peek(block)
            if copy is not None and not copy.home and not (pool and pool.is_home(block)):
                self.store.drop(block)

    def _keep(self, now: float, message: Keep) -> None:
        self.metrics.keeps_total += 1
        new = self.store.peek(BlockId(message.namespace, message.key)) is None

        def kept(held: bool) -> None:
            self.metrics.keeps_failed_total += not held
            if held and new and self.pool is not None and not self.pool.is_home(block):
                self.spread.given_one(block)
            self._say(Kept(message.request, message.namespace, message.key, held))

        block = BlockId(message.namespace, message.key)
        self.reads.keep(now, block, message.size_bytes, message.digest, kept)

    def ask_controller(
        self, make: Callable[[int], NamespaceRequest | GroupRequest], found: Found
    ) -> None:
        """Put a question to the controller; `found` is called once, perhaps at once."""
        if self._tell is None:
            found(None, local.UNAVAILABLE, "there is no connection to the controller")
            return
        if len(self._asked) >= MAX_ASKED:
            found(None, local.BUSY, f"{MAX_ASKED} questions wait for the controller")
            return
        number = self._next_question
        self._next_question += 1
        self._asked[number] = found
        self._tell(make(number))

    def _found(
        self, request: int, info: NamespaceInfo | GroupInfo | None, status: str, reason: str
    ) -> None:
        found = self._asked.pop(request, None)
        if found is not None:
            found(info, status, reason)

    # --- reports ------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """All numbers by name: `values`, and the histograms' samples."""
        values = self.values()
        for name, histogram in self.metrics.histograms().items():
            values |= histogram.samples(name)
        return values

    def card_numbers(self) -> dict[str, float]:
        """What there is to say of RDMA cards, by Prometheus' sample names: for clients, not for the
        controller, which takes only so many numbers (`control.MAX_COUNTERS`)."""
        return {
            f'rdma_card_{name}{{card="{card}"}}': value
            for card, numbers in self.cards().items()
            for name, value in numbers.items()
        }

    def counted(self) -> Iterator[tuple[str, Any]]:
        """Dataclasses that count beside `metrics`, each with what the names of its fields begin
        with."""
        if self.shared is not None:
            yield "index", self.shared.counters
        if self.recovery_counters is not None:
            yield "recovery", self.recovery_counters
        if self.cold is not None:
            yield "cold", self.cold.counters
        yield "requester", self.requester.counters
        yield "responder", self.responder.counters
        yield "store", self.store.counters
        yield "handover", self.handover.counters
        yield "writing", self.writing.counters
        yield "landing", self.landing_counters

    def values(self) -> dict[str, float]:
        """Totals since the start, and present values, by name."""
        self.store.elsewhere.refresh()
        values = self.metrics.snapshot()
        if self.shared is not None:
            # Nobody asked for these, and they were gets and hits all the same.
            values["gets_total"] += self.shared.counters.hits
            values["hits_local_total"] += self.shared.counters.hits
        for tier in self.tiers:
            values |= tier.values()
        if self.cold is not None:
            values |= self.cold.values()
        values["reads_met_total"] = float(self.meetings.met)
        values["bulk_departures_held_total"] = float(self.departures.waits_total)
        values["payload_bytes_sent_udp_total"] = float(self.responder.counters.payload_bytes)
        for prefix, counters in self.counted():
            for item in fields(counters):
                value = getattr(counters, item.name)
                if isinstance(value, int):
                    values[f"{prefix}_{item.name}_total"] = float(value)
        if self.recovery_counters is not None:
            values["recovery_left"] = values.pop("recovery_left_total")  # it shrinks
        values["wrong_digest_total"] = float(
            self.requester.counters.corrupt_blocks + self.metrics.bulk_wrong_digest_total
        )
        values["retries_total"] = float(
            self.requester.counters.reads_retry + self.requester.counters.reads_partial
        )
        ready_bytes = self.ahead_bytes
        if self.reads.courier is not None:
            values |= self.reads.courier.values()
            ready_bytes += self.reads.courier.ready_bytes
        values["arena_ready_bytes"] = float(ready_bytes)
        values |= self.engines.values()
        values |= self.facts
        values["arena_bytes"] = float(self.store.allocator.capacity_bytes)
        values["arena_used_bytes"] = float(self.store.used_bytes)
        values["arena_held_bytes"] = float(self.store.held_bytes)
        values["blocks"] = float(len(self.store))
        values["fetches_waiting"] = float(self.reads.waiting)
        values["segments_in_flight"] = float(self.requester.segments_in_flight)
        values["answers_waiting"] = float(self.responder.segments_waiting)
        values["replications_waiting"] = float(self.writes.replications)
        values["handover_left"] = float(self.handover.left)
        values["replicas_here"] = float(self.spread.given)
        values["epoch"] = float(self.pool.epoch if self.pool is not None else 0)
        values["connected"] = float(self.connected)
        return values

    def namespace_metrics(self) -> dict[int, NamespaceMetrics]:
        """What is counted for each namespace by itself, up to now."""
        self.store.elsewhere.refresh()
        if self.shared is not None:
            for namespace, hits in self.shared.take_hits().items():
                mine = self.metrics.by_namespace.of(namespace)
                mine.gets += hits
                mine.hits["local"] += hits
        return self.metrics.by_namespace.all()

    def renewal(self) -> Renew:
        """The report that keeps the lease; begins a new period of heat."""
        hot = []
        for heat in self.responder.take_heat(MAX_HOT_BLOCKS):
            copy = self.store.known(heat.block)
            depth = 0 if copy is None else copy.depth
            hot.append(
                HotBlock(
                    *(heat.block.namespace, heat.block.key, heat.reads, heat.readers),
                    *(depth, heat.size, heat.digest),
                )
            )
        return Renew(
            counters=self.counters(),
            hot=hot,
            arena_used_bytes=self.store.used_bytes,
            blocks=len(self.store),
            epoch=self.pool.epoch if self.pool is not None else 0,
            reads=self._reads_by_namespace(),
            wrong=self.reads.take_wrong_residents(),
        )

    def _reads_by_namespace(self) -> list[NamespaceReads]:
        """Of those that read most from elsewhere."""
        reads = []
        for namespace, metrics in self.metrics.by_namespace.all().items():
            remote = sum(count for tier, count in metrics.hits.items() if tier != "local")
            if remote:
                hits = metrics.hits
                reads.append(NamespaceReads(namespace, remote, hits["shared"], hits["switch"]))
        return heapq.nlargest(MAX_NAMESPACES_REPORTED, reads, key=lambda r: r.remote)

    def close(self) -> None:
        """Let go of everything that is held for others."""
        if self.lane is not None:
            self.lane.shut()
        if self.shared is not None:
            self.shared.close()
        self.control_lost()
        self.responder.close()
