"""A client of the local API: what it may do, and what it holds.

Owns: a client's handles, tickets and pins, their bounds, and their end when it disconnects; which
namespaces it may use; and that its keys become the pool's where a namespace has a secret. Must not
know: sockets or framing; replies go out through a function.

The bounds, per client: `MAX_REQUESTS_IN_FLIGHT` requests without an answer, `MAX_HANDLES`
handles, tickets and pins together, and `AgentOptions.client_share` of the arena in the bytes
that they hold. What exceeds one of them ends as "busy", and is counted. What a client pins without
a message (`shared_index`) counts towards its share, too.

Where there is a ledger, everything that a client is told of stands there first; and a later agent
makes the session anew from it (`restore`), and gives it to the client when that comes back
(`resume`). Until then it holds what the client may still read or write; if the client does not
come, whoever knows that it is gone closes the session, as any other.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from kvcast.hostagent.core.access import ALL_TENANTS, Tenants
from kvcast.hostagent.core.agent import AgentCore, MissingSecretError
from kvcast.hostagent.core.courier import Rooms, given_lately
from kvcast.hostagent.core.fetches import GetBatch
from kvcast.hostagent.core.shared_index import Region
from kvcast.hostagent.core.store import RESERVED, Copy, QuotaError, StoreError
from kvcast.hostagent.core.writes import PutBatch
from kvcast.hostagent.tiers import ledger as ledgers
from kvcast.hostagent.tiers.ledger import NO_ROW, Ledger, Row
from kvcast.protocol.messages import local
from kvcast.protocol.messages.control import (
    GroupInfo,
    GroupRequest,
    NamespaceInfo,
    NamespaceRequest,
)
from kvcast.protocol.messages.questions import FIRST_HANDLE, MAX_MANY
from kvcast.protocol.messages.wire import KEY_BYTES, BlockId

_DROP_TIMEOUT_S = 5.0
AHEAD_OF_ARENA = 16
"""Rooms given ahead take such a part of the arena at most, all together."""
AHEAD_OF_QUOTA = 32
"""One takes such a part of its namespace's quota at most."""
_WHY_REFUSED = {
    local.UNAVAILABLE: "namespace {}: this node has no map of the pool yet",
    local.UNKNOWN_NAMESPACE: "the pool has no namespace {}",
    local.FORBIDDEN: "this node may not use namespace {}",
}

_RATED = local.Get | local.Prefetch | local.Alloc | local.Put
_ListRequest = _RATED | local.Drop | local.Pin | local.Unpin
_KeyRequest = _ListRequest | local.Exists


class Session:
    """One client. `send` takes replies, in any order, until `close`. A client that is `read_only`
    puts nothing, since it cannot write the arena."""

    def __init__(
        self,
        core: AgentCore,
        send: Callable[[local.AgentReply], None],
        tenants: Tenants = ALL_TENANTS,
        *,
        read_only: bool = False,
        number: int = 0,
        first_handle: int = 1,
    ) -> None:
        """`number`: in the ledger; `first_handle`: numbers of handles and tickets count from
        here, so that no other session's are taken for them."""
        self._core = core
        self._send = send
        self._tenants = tenants
        self._read_only = read_only
        self.number = number
        self._rows: dict[int, int] = {}
        """Where in the ledger handles and tickets stand."""
        self._pin_rows: dict[BlockId, list[int]] = {}
        self._region: Region | None = None
        self._tell_courier: Callable[[int], None] = lambda _held_bytes: None
        self._give_up_there: Callable[[int], None] = lambda _question: None
        self._closed = False
        self._in_flight = 0
        self._gets: dict[int, GetBatch] = {}
        """Those without an answer yet, by the number of the request."""
        self._told: dict[int, tuple[str, str, str, str]] = {}
        """Namespaces that this client was given by what they stood for, and what that was."""
        self._next_handle = first_handle
        self._handles: dict[int, Copy] = {}
        self._tickets: dict[int, Copy] = {}
        self._ahead = 0
        """The ticket of the room that was given ahead; 0: there is none."""
        self._spare = 0
        """The same of the one that it is given after that, which it does not know of yet."""
        self._rooms: Rooms | None = None
        """Where rooms stand that it may put without a message."""
        self._pins: dict[BlockId, list[Copy]] = {}
        self._pin_count = 0
        self._held: dict[Copy, int] = {}  # how many handles, tickets and pins name a copy
        self._held_bytes = 0
        self._max_held_bytes = int(core.options.client_share * core.store.allocator.capacity_bytes)

    # --- a client that outlives its agent ---------------------------------------------------------

    def restore(self, rows: list[tuple[int, Row]], region: memoryview | None) -> None:
        """Hold what the ledger says that this client held of a former agent, and what its region
        says that it pins. Before anything else is stored."""
        recovery, store, shared = self._core.recovery, self._core.store, self._core.shared
        assert recovery is not None
        by_itself: dict[int, Copy] = {}
        places: dict[int, int] = {}
        for at, row in rows:
            if row.kind == ledgers.TICKET and recovery.is_free(row.block, row.offset):
                copy = store.adopt(row.block, row.size_bytes, row.offset, RESERVED)
            else:
                copy = recovery.hold(row.block, row.offset, row.size_bytes, row.digest)
            if copy is None:
                assert self._core.ledger is not None
                self._core.ledger.strike(at)
                continue
            if row.kind == ledgers.BY_ITSELF:
                by_itself[row.number] = copy
                places[row.number] = at
                continue
            self._hold(copy)
            if row.kind == ledgers.PIN:
                self._pins.setdefault(row.block, []).append(copy)
                self._pin_rows.setdefault(row.block, []).append(at)
                self._pin_count += 1
                continue
            is_ticket = row.kind in (ledgers.TICKET, ledgers.PUT)
            (self._tickets if is_ticket else self._handles)[row.number] = copy
            self._rows[row.number] = at
            if row.number < FIRST_HANDLE:
                self._next_handle = max(self._next_handle, row.number + 1)
        if region is None:
            return
        assert shared is not None
        self._region = Region(region, self._max_held_bytes, lambda _: None, self.number)
        for cell in memoryview(self._region.cells()).cast("Q"):
            if cell and cell not in by_itself:
                copy = recovery.hold_cell(cell)
                if copy is not None:
                    by_itself[cell] = copy
        self._region.rows = places
        for cell, copy in by_itself.items():
            shared.restore(self._region, cell, copy)
        shared.join(self._region)

    def resume(
        self,
        send: Callable[[local.AgentReply], None],
        tenants: Tenants,
        offended: Callable[[str], None],
        held: list[int],
    ) -> None:
        """The client is back, and holds `held`: handles and tickets of which it does not know were
        in answers that it never got."""
        self._send = send
        self._tenants = tenants
        if self._region is not None:
            self._region.offended = offended
        known = set(held)
        for number in [n for n in self._handles if n not in known]:
            self._give_back(number)
        for number in [n for n in self._tickets if n not in known]:
            self._give_back_room(self._tickets.pop(number))
            self._strike(number)

    def _note(self, number: int, kind: int, copy: Copy, *, leave: int = ledgers.MOMENT_ROWS) -> int:
        """Write down what the client is about to be told of; where."""
        ledger = self._core.ledger
        if ledger is None:
            return NO_ROW
        return ledger.write(self._row(number, kind, copy), leave=leave)

    def _row(self, number: int, kind: int, copy: Copy) -> Row:
        # A block may have landed in larger room than it takes; room for one has its size.
        size_bytes = copy.size_bytes if kind == ledgers.TICKET else copy.reserved_bytes
        return Row(self.number, number, copy.block, copy.offset, size_bytes, copy.digest, kind)

    def _has_row(self, number: int, kind: int, copy: Copy) -> bool:
        """As `_note`, of a handle or ticket; False where there is no room to write it down."""
        if self._core.ledger is None:
            return True
        row = self._note(number, kind, copy)
        if row == NO_ROW:
            self._core.metrics.local_busy_total += 1
            return False
        self._rows[number] = row
        return True

    def _strike(self, number: int) -> None:
        ledger = self._core.ledger
        if ledger is not None:
            ledger.strike(self._rows.pop(number, NO_ROW))

    def _give_back(self, handle: int) -> None:
        copy = self._handles.pop(handle)
        self._let_go(copy)
        self._strike(handle)
        self._core.store.unpin(copy)

    def _give_back_room(self, copy: Copy) -> None:
        self._let_go(copy)
        if copy.state == RESERVED:
            self._core.store.abort(copy)
        else:
            self._core.store.unpin(copy)  # a former agent had committed it

    @property
    def region(self) -> bool:
        """Whether this client pins blocks by itself."""
        return self._region is not None

    @property
    def in_flight(self) -> int:
        """Requests without an answer yet."""
        return self._in_flight

    @property
    def max_pinned_bytes(self) -> int:
        """How much of the arena this client may pin by itself: half of what it may hold. For the
        agent reads pins while the client changes them, and may take for held at once what was held
        one after the other: so much before, and so much after."""
        return self._max_held_bytes // 2

    @property
    def may_share(self) -> bool:
        """Whether this client may read the index: it names the blocks of all tenants, so a client
        that is let in for some of them asks the agent for every block."""
        return self._core.shared is not None and self._tenants is ALL_TENANTS

    def share(self, memory: memoryview, offended: Callable[[str], None]) -> None:
        """This client may read the index, and pins what it finds in `memory`; `offended` is told
        why it is to be cut off, if it is."""
        assert self.may_share
        assert self._core.shared is not None
        self._region = Region(memory, self._max_held_bytes, offended, self.number)
        self._core.shared.join(self._region)

    def close(self) -> bool:
        """The client is gone: unpin and give back all that it held; whether that was anything."""
        self._closed = True
        self._core.engines.left(self)
        reads = self._core.reads
        for batch in list(self._gets.values()):
            reads.give_up(reads.now, batch)
        held = bool(self._handles or self._tickets or self._pins)
        if self._region is not None:
            assert self._core.shared is not None
            self._core.shared.leave(self._region)
            held |= any(self._region.cells())  # from now on it pins nothing there
            self._region.words.release()
            self._region = None
        store = self._core.store
        for copy in self._handles.values():
            store.unpin(copy)
        for ticket in (self._ahead, self._spare):
            self._is_ahead_no_more(ticket)
        for copy in list(self._tickets.values()):
            self._give_back_room(copy)
        for pins in self._pins.values():
            for copy in pins:
                store.unpin(copy)
        for number in list(self._rows):
            self._strike(number)
        if self._core.ledger is not None:
            for places in self._pin_rows.values():
                for place in places:
                    self._core.ledger.strike(place)
        self._handles.clear()
        self._tickets.clear()
        self._pins.clear()
        self._pin_rows.clear()
        self._held.clear()
        self._held_bytes = 0
        return held

    def handle(self, now: float, request: local.Request) -> None:
        """Do what the client asks; its reply may be sent before this returns."""
        self._core.metrics.local_requests_total += 1
        self._core.store.advance(now)
        if isinstance(request, local.Release):
            self._core.metrics.local_releases_total += 1
            self._release(request)
            for number in request.given_up:
                self._give_up_there(number)
                if (batch := self._gets.get(number)) is not None:
                    self._core.reads.give_up(now, batch)
            return
        if self._in_flight >= local.MAX_REQUESTS_IN_FLIGHT:
            self._core.metrics.local_busy_total += 1
            reason = f"{self._in_flight} requests wait for their answers"
            self._send(local.Failed(request.request, local.BUSY, reason))
            return
        self._in_flight += 1
        if isinstance(request, local.Commit):
            self._commit(now, request)
        elif isinstance(request, local.Abort):
            self._abort(request)
        elif isinstance(request, local.GetStats):
            if self._tenants is not ALL_TENANTS:
                # Hits and misses of all tenants: whose prompts were asked for can be told from it.
                self._forbid(request.request, "counters are for clients that may use everything")
                return
            numbers = self._core.counters() | self._core.card_numbers()
            self._reply(local.Stats(request.request, numbers))
        elif isinstance(request, local.FindNamespace):
            self._find_namespace(request)
        elif isinstance(request, local.FindGroup):
            self._find_group(request)
        elif isinstance(request, local.Weighed):
            self._reply(local.Ack(request.request, self._core.engines.told(self, request)))
        elif isinstance(request, local.DescribePool):
            self._describe(request)
        else:
            refusal = self._core.reads.refusal(request.namespace)
            if refusal is not None:
                self._refuse(request, refusal, _WHY_REFUSED[refusal].format(request.namespace))
                return
            if not self._may_use(request.namespace):
                self._core.metrics.local_forbidden_total += 1
                self._refuse(request, local.FORBIDDEN, _not_for(request.namespace))
                return
            if self._stands_for_another(request.namespace):
                reason = f"namespace {request.namespace} stands for another one now: find it again"
                self._refuse(request, local.UNKNOWN_NAMESPACE, reason)
                return
            if isinstance(request, _RATED) and not self._admit(now, request):
                return
            try:
                if isinstance(request, local.Exists):
                    self._exists(now, request)
                    return
                keys = self._core.pool_keys(request.namespace, request.keys)
            except MissingSecretError as error:
                self._refuse(request, local.UNAVAILABLE, str(error))
                return
            if keys is not request.keys:
                request = msgspec.structs.replace(request, keys=keys)
            self._handle_keys(now, request)

    def _admit(
        self, now: float, request: local.Get | local.Prefetch | local.Alloc | local.Put
    ) -> bool:
        """Whether the namespace's rate allows a request now; if not, it is refused."""
        namespace, count = request.namespace, len(request.keys)
        if self._core.limits.admit(now, namespace, count):
            return True
        self._core.metrics.local_rate_limited_total += 1
        self._core.metrics.by_namespace.of(namespace).rate_limited += count
        self._refuse(request, local.BUSY, f"namespace {namespace} is over its rate")
        return False

    def _may_use(self, namespace: int) -> bool:
        """Whether the rule that let this client in allows it the namespace."""
        if self._tenants is ALL_TENANTS:
            return True
        pool = self._core.pool
        info = pool.namespaces.get(namespace) if pool is not None else None
        return info is not None and info.tenant in self._tenants

    def _stands_for_another(self, namespace: int) -> bool:
        """Whether a number is not any more what this client was told that it is."""
        told = self._told.get(namespace)
        pool = self._core.pool
        info = pool.namespaces.get(namespace) if pool is not None else None
        return told is not None and info is not None and told != _parts_of(info)

    def _refuse(self, request: _KeyRequest, status: str, reason: str) -> None:
        if isinstance(request, local.Get):
            self._core.metrics.gets_refused_total += len(request.keys)
        self._fail(request.request, status, reason)

    def _forbid(self, request: int, reason: str) -> None:
        self._core.metrics.local_forbidden_total += 1
        self._fail(request, local.FORBIDDEN, reason)

    def _handle_keys(self, now: float, request: _ListRequest) -> None:
        core = self._core
        number = request.request
        if isinstance(request, (local.Get, local.Prefetch)) and not self._note_places(request):
            return
        if isinstance(request, local.Get):
            self._get(now, request)
        elif isinstance(request, local.Prefetch):
            count = core.reads.prefetch(
                now,
                request.namespace,
                request.keys,
                now + request.deadline_s,
                gather_ms=request.gather_ms,
                group=request.group,
                expect=request.expect,
            )
            self._reply(local.Ack(number, count))
        elif isinstance(request, local.Alloc):
            self._alloc(request)
        elif isinstance(request, local.Put):
            self._put(now, request)
        elif isinstance(request, local.Drop):
            core.queries.drop(
                request.namespace,
                request.keys,
                now + _DROP_TIMEOUT_S,
                lambda count: self._reply(local.Ack(number, count)),
            )
        elif isinstance(request, local.Pin):
            self._pin(request)
        else:
            self._unpin(request)

    def _exists(self, now: float, request: local.Exists) -> None:
        number = request.request
        if len(request.keys) % KEY_BYTES:
            self._fail(number, local.INVALID, f"a chain of {len(request.keys)} bytes")
            return
        self._core.queries.exists(
            request.namespace,
            self._core.pool_chain(request.namespace, request.keys),
            now + request.deadline_s,
            lambda count: self._reply(local.Ack(number, count)),
        )

    # --- replies ------------------------------------------------------------------------------

    def _reply(self, reply: local.AgentReply) -> None:
        self._in_flight -= 1
        if self._closed:
            self._core.metrics.local_replies_dropped_total += 1
        else:
            self._send(reply)

    def _fail(self, request: int, status: str, reason: str) -> None:
        self._reply(local.Failed(request, status, reason[:256]))

    # --- what a client holds ------------------------------------------------------------------

    def _may_hold(self, copy: Copy | None, reserved_bytes: int) -> bool:
        """Whether one more handle, ticket or pin is within bounds; a copy's bytes count once."""
        count = len(self._handles) + len(self._tickets) + self._pin_count
        held_bytes = self._held_bytes + (0 if copy in self._held else reserved_bytes)
        if self._region is not None:
            held_bytes += self._region.held_bytes
        fits = count < local.MAX_HANDLES and held_bytes <= self._max_held_bytes
        if not fits:
            self._core.metrics.local_busy_total += 1
        return fits

    def _hold(self, copy: Copy) -> None:
        times = self._held.get(copy, 0)
        self._held[copy] = times + 1
        if times == 0:
            self._held_bytes += copy.reserved_bytes
            self._tell_courier(self._held_bytes)

    def _let_go(self, copy: Copy) -> None:
        times = self._held[copy]
        if times > 1:
            self._held[copy] = times - 1
        else:
            del self._held[copy]
            self._held_bytes -= copy.reserved_bytes
            self._tell_courier(self._held_bytes)

    # --- the courier's `Holder` ------------------------------------------------------------------

    def may_be_given(self) -> tuple[int, int]:
        """(bytes that it holds, bytes up to which the courier may give it more): half of its share,
        since the other half may be pinned without a message."""
        count = len(self._handles) + len(self._tickets) + self._pin_count
        most = self._max_held_bytes // 2 if count < local.MAX_HANDLES // 2 else 0
        return self._held_bytes, most

    def given(self, handle: int, copy: Copy) -> None:
        """It was told that it holds this copy, which is pinned once for it."""
        self._handles[handle] = copy
        self._hold(copy)
        if self._core.ledger is not None:
            row = self._note(handle, ledgers.HANDLE, copy, leave=0)
            assert row != NO_ROW, "others leave rows for what the courier gives"
            self._rows[handle] = row

    def returned(self, handle: int) -> None:
        """It does not need this handle any more."""
        if handle in self._handles:
            self._give_back(handle)
        else:
            self._core.metrics.local_unknown_handles_total += 1

    def on_the_courier(self, tell: Callable[[int], None], give_up: Callable[[int], None]) -> None:
        """`tell` the courier how many bytes this client holds, whenever that changes; and `give_up`
        there what it gives up, by the question's number."""
        self._tell_courier, self._give_up_there = tell, give_up

    def _number(self) -> int:
        number = self._next_handle
        self._next_handle += 1
        return number

    def _get(self, now: float, request: local.Get) -> None:
        number = request.request

        def answered(batch: GetBatch) -> None:
            self._gets.pop(number, None)
            self._reply(local.Got(number, self._take(batch)))

        batch = self._core.reads.get(
            now,
            request.namespace,
            request.keys,
            now + request.deadline_s,
            answered,
            gather_ms=request.gather_ms,
            group=request.group,
            expect=request.expect,
        )
        if batch.left:
            self._gets[number] = batch

    def _look(self) -> None:
        """See what the client pins by itself, before it is given more to hold."""
        if self._region is not None:
            assert self._core.shared is not None
            self._core.shared.look(self._region)

    def _take(self, batch: GetBatch) -> list[local.GotBlock]:
        """Turn a finished batch's pins into handles of this client."""
        self._look()
        blocks = []
        for item in batch.items:
            assert item is not None
            copy = item.copy
            if copy is None:
                blocks.append(local.GotBlock(item.status, item.reason))
                continue
            handle = self._number()
            if (
                self._closed
                or not self._may_hold(copy, copy.reserved_bytes)
                or not self._has_row(handle, ledgers.HANDLE, copy)
            ):
                self._core.store.unpin(copy)
                blocks.append(local.GotBlock(local.BUSY))
                continue
            self._core.limits.moved(copy.block.namespace, copy.size_bytes)
            self._handles[handle] = copy
            self._hold(copy)
            blocks.append(
                local.GotBlock(
                    local.OK, "", item.tier, handle, copy.offset, copy.size_bytes, copy.digest
                )
            )
        return blocks

    def _release(self, request: local.Release) -> None:
        for handle in request.handles:
            self.returned(handle)

    def _alloc(self, request: local.Alloc) -> None:
        if self._read_only:
            self._forbid(request.request, "this client reads only")
            return
        if len(request.sizes) != len(request.keys):
            reason = f"{len(request.keys)} keys and {len(request.sizes)} sizes"
            self._fail(request.request, local.INVALID, reason)
            return
        places = self._places(request)
        if places is None:
            return
        self._look()
        extents = [
            self._alloc_one(
                *(BlockId(request.namespace, key), size_bytes, parent, depth),
                few=len(places) <= MAX_MANY,
            )
            for key, size_bytes, (parent, depth) in zip(
                request.keys, request.sizes, places, strict=True
            )
        ]
        self._reply(local.Allocated(request.request, extents))

    def _places(
        self, request: local.Alloc | local.Get | local.Prefetch
    ) -> list[tuple[bytes, int]] | None:
        """By key, what the client says of its place in a prefix: the key before it, by the pool's
        names, and how many are before it. None where that is nonsense: it is told so."""
        count = len(request.keys)
        parents = request.parents or [b""] * count
        depths = request.depths or [0] * count
        if {len(parents), len(depths)} != {count} or any(len(p) not in (0, 16) for p in parents):
            self._fail(request.request, local.INVALID, "parents or depths do not fit the keys")
            return None
        known = [parent for parent in parents if parent]
        derived = iter(self._core.pool_keys(request.namespace, known))
        above = [next(derived) if parent else b"" for parent in parents]
        return list(zip(above, depths, strict=True))

    def _note_places(self, request: local.Get | local.Prefetch) -> bool:
        """Have the store know where in a prefix these blocks are; whether they can be there."""
        if not request.parents and not request.depths:
            return True
        places = self._places(request)
        if places is None:
            return False
        for key, (parent, depth) in zip(request.keys, places, strict=True):
            self._core.store.note_place(BlockId(request.namespace, key), parent, depth)
        return True

    def _alloc_one(
        self, block: BlockId, size_bytes: int, parent: bytes, depth: int, *, few: bool
    ) -> local.Extent:
        store = self._core.store
        if size_bytes > min(
            store.allocator.capacity_bytes, self._core.options.requester.max_block_bytes
        ):
            return local.Extent(local.NO_ROOM)
        if not self._may_hold(None, store.allocator.extent_bytes(size_bytes)):
            return local.Extent(local.BUSY)
        try:
            copy = store.reserve(block, size_bytes, parent=parent, depth=depth)
        except QuotaError:
            return local.Extent(local.QUOTA)
        except StoreError:
            return local.Extent(local.NO_ROOM)
        ticket = self._number()
        if not self._has_row(ticket, ledgers.TICKET, copy):
            store.abort(copy)
            return local.Extent(local.BUSY)
        self._core.limits.moved(block.namespace, size_bytes)
        self._tickets[ticket] = copy
        self._hold(copy)
        if few and self._rooms is not None:
            self._rooms.lend(ticket, copy)
        return local.Extent(local.OK, ticket, copy.offset)

    def _take_tickets(self, tickets: list[int]) -> list[Copy] | None:
        """The reserved copies of these tickets, no longer the client's; None if one is unknown
        or named twice, and then all stay as they are."""
        if len(set(tickets)) != len(tickets) or any(t not in self._tickets for t in tickets):
            return None
        if self._rooms is not None and not self._rooms.take_back(tickets):
            return None  # one is being put, by a question to the courier
        for ticket in tickets:
            self._is_ahead_no_more(ticket)
        copies = [self._tickets.pop(ticket) for ticket in tickets]
        for copy in copies:
            self._let_go(copy)
        return copies

    def _commit(self, now: float, request: local.Commit) -> None:
        # What was given ahead has no name yet.
        ahead = {self._ahead, self._spare}.intersection(request.tickets)
        copies = None if ahead else self._take_tickets(request.tickets)
        if copies is None:
            self._fail(request.request, local.INVALID, "unknown ticket")
            return

        store, ledger = self._core.store, self._core.ledger
        # Some were committed by a former agent that did not live to say so, and are pinned.
        put = [copy for copy in copies if copy.state != RESERVED]
        is_room = [copy.state == RESERVED for copy in copies]

        def answered(batch: PutBatch) -> None:
            for ticket in request.tickets:
                self._strike(ticket)
            for copy in put:
                store.unpin(copy)
            results = [result for result in batch.results if result is not None]
            room = self._room_ahead(copies[0]) if request.again and len(copies) == 1 else None
            self._reply(local.Committed(request.request, results, room))

        def committed(batch: PutBatch, positions: range) -> None:
            if ledger is None or not batch.left or self._closed:
                return
            # The room may be free, for others. An agent that comes after must not take what they
            # wrote there for this block: what the rows say stays where it is until the client is
            # answered.
            for position in positions:
                if not is_room[position]:
                    continue
                ticket, copy = request.tickets[position], store.known(copies[position].block)
                if copy is None:
                    self._strike(ticket)  # it was refused
                    continue
                store.pin(copy)
                put.append(copy)
                ledger.rewrite(self._rows[ticket], self._row(ticket, ledgers.PUT, copy))

        self._core.writes.commit(now, copies, answered, request.ack, committed)

    # --- room that is given ahead -------------------------------------------------------------

    def _put(self, now: float, request: local.Put) -> None:
        copy = self._tickets.get(request.ticket)
        if request.ticket != self._ahead or copy is None:
            self._fail(request.request, local.INVALID, "unknown ticket")
            return
        if copy.block.namespace != request.namespace:
            # Its bytes were taken from another namespace's quota.
            self._fail(request.request, local.INVALID, "the room is another namespace's")
            return
        if self._take_tickets([request.ticket]) is None:
            self._fail(request.request, local.INVALID, "the room is being put")
            return
        self._core.store.name(copy, BlockId(request.namespace, request.keys[0]))
        self._core.limits.moved(request.namespace, copy.size_bytes)

        def answered(batch: PutBatch) -> None:
            results = [result for result in batch.results if result is not None]
            room = self._room_ahead(copy)
            self._reply(local.Committed(request.request, results, room))

        self._core.writes.commit(now, [copy], answered, request.ack)

    def _room_ahead(self, like: Copy) -> local.Extent | None:
        """Room for a block of the namespace and size of that one, before its name is known: of the
        arena and of the namespace's quota a small part. Nobody can take it back while the client
        lives, who may be writing there; so none where there is a ledger: whoever always has some
        keeps the arena when its agent is stopped. One a client; and one more that it is given after
        that, where it may put it without a message."""
        if self._ahead:
            return None
        spare = self._tickets.get(self._spare)
        if spare is not None and not _are_alike(spare, like):
            self._drop_spare()
        if self._spare:
            self._ahead, self._spare = self._spare, 0
            if self._rooms is not None:
                self._rooms.give_spare(self._ahead)
        else:
            self._ahead = self._reserve_ahead(like, spare=False)
        if not self._ahead:
            return None
        self._have_spare(like)
        return local.Extent(local.OK, self._ahead, self._tickets[self._ahead].offset)

    def _drop_spare(self) -> None:
        """Give the room back that the client does not know of."""
        copies = self._take_tickets([self._spare])
        assert copies is not None
        self._core.store.abort(copies[0])

    def _have_spare(self, like: Copy) -> None:
        """Have a room for after the one that the client has, if it may put that by a question."""
        if self._rooms is not None and self._ahead and not self._spare:
            self._spare = self._reserve_ahead(like, spare=True)

    def _reserve_ahead(self, like: Copy, *, spare: bool) -> int:
        """Reserve a room like that; its ticket, 0 where there is none to be had."""
        store, core = self._core.store, self._core
        namespace, reserved_bytes = like.block.namespace, like.reserved_bytes
        quota = store.quota_of(namespace)
        most_bytes = min(
            store.allocator.capacity_bytes // AHEAD_OF_ARENA - core.ahead_bytes,
            quota // AHEAD_OF_QUOTA if quota else reserved_bytes,
        )
        if self._closed or core.ledger is not None or reserved_bytes > most_bytes:
            return 0
        held_bytes, most_bytes = self.may_be_given()
        if held_bytes + reserved_bytes > most_bytes:
            return 0
        try:
            copy = store.reserve(BlockId(namespace, b""), like.size_bytes)
        except StoreError:
            return 0
        ticket = self._number()
        core.ahead_bytes += reserved_bytes
        self._tickets[ticket] = copy
        self._hold(copy)
        if self._rooms is not None:
            self._rooms.lend(ticket, copy, spare=spare)
        return ticket

    def _is_ahead_no_more(self, ticket: int) -> None:
        """A ticket's room is used, or given back: if it was given ahead, there may be another."""
        if ticket and ticket in (self._ahead, self._spare):
            self._core.ahead_bytes -= self._tickets[ticket].reserved_bytes
            if ticket == self._spare:
                self._spare = 0
            else:
                self._ahead = 0

    # --- the courier's `Holder`, of rooms -----------------------------------------------------

    def put_on_the_courier(self, rooms: Rooms | None) -> None:
        """Room that it is given to put may be put by a question, if it is lent to `rooms`; None =
        from now on none may."""
        self._rooms = rooms

    def was_put(self, ticket: int) -> None:
        """The block in that room is at home; and if the client had it ahead, it has the next."""
        copy, was_ahead = self._tickets[ticket], ticket == self._ahead
        self.leaves_behind(ticket)
        if was_ahead:
            self._ahead, self._spare = self._spare, 0
            self._have_spare(copy)

    def leaves_behind(self, ticket: int) -> None:
        """This room is not the session's any more."""
        self._is_ahead_no_more(ticket)
        self._let_go(self._tickets.pop(ticket))
        self._strike(ticket)

    def _abort(self, request: local.Abort) -> None:
        # Of those that a client named to a former agent, that one may have put some.
        tickets = [ticket for ticket in request.tickets if ticket in self._tickets]
        copies = self._take_tickets(tickets) if tickets else None
        if copies is None:
            self._fail(request.request, local.INVALID, "unknown ticket")
            return
        for ticket, copy in zip(tickets, copies, strict=True):
            if copy.state == RESERVED:
                self._core.store.abort(copy)
            else:
                self._core.store.unpin(copy)
            self._strike(ticket)
        self._reply(local.Ack(request.request, len(copies)))

    def _pin(self, request: local.Pin) -> None:
        count = 0
        self._look()
        for key in request.keys:
            block = BlockId(request.namespace, key)
            copy = self._core.store.get(block)
            if copy is None or not self._may_hold(copy, copy.reserved_bytes):
                continue
            row = self._note(request.request, ledgers.PIN, copy)
            if row == NO_ROW and self._core.ledger is not None:
                self._core.metrics.local_busy_total += 1
                continue
            self._core.store.pin(copy)
            self._pin_rows.setdefault(block, []).append(row)
            self._pins.setdefault(block, []).append(copy)
            self._pin_count += 1
            self._hold(copy)
            count += 1
        self._reply(local.Ack(request.request, count))

    def _unpin(self, request: local.Unpin) -> None:
        count = 0
        for key in request.keys:
            block = BlockId(request.namespace, key)
            pins = self._pins.get(block)
            if not pins:
                continue
            copy = pins.pop()
            row = self._pin_rows[block].pop()
            if self._core.ledger is not None:
                self._core.ledger.strike(row)
            if not pins:
                del self._pins[block]
                del self._pin_rows[block]
            self._pin_count -= 1
            self._let_go(copy)
            self._core.store.unpin(copy)
            count += 1
        self._reply(local.Ack(request.request, count))

    # --- the pool -----------------------------------------------------------------------------

    def _find_namespace(self, request: local.FindNamespace) -> None:
        if self._tenants is not ALL_TENANTS and request.tenant not in self._tenants:
            self._forbid(request.request, f"this client may not use tenant {request.tenant}")
            return

        parts = (request.tenant, request.model, request.version, request.layout)

        def found(info: NamespaceInfo | GroupInfo | None, status: str, reason: str) -> None:
            if info is None and status == local.UNAVAILABLE:
                info = self._in_last_map(parts)  # as all that needs the controller for nothing new
            if isinstance(info, NamespaceInfo):
                self._told[info.namespace] = _parts_of(info)
                self._reply(local.FoundNamespace(request.request, info))
            else:
                self._fail(request.request, status, reason)

        def make(number: int) -> NamespaceRequest:
            return NamespaceRequest(number, *parts)

        self._core.ask_controller(make, found)

    def _in_last_map(self, parts: tuple[str, str, str, str]) -> NamespaceInfo | None:
        """The namespace of that meaning, where the pool had it when the controller last spoke."""
        pool = self._core.pool
        known = pool.namespaces.values() if pool is not None else ()
        return next((info for info in known if _parts_of(info) == parts), None)

    def _find_group(self, request: local.FindGroup) -> None:
        if not self._may_use(request.namespace):
            self._forbid(request.request, _not_for(request.namespace))
            return

        def found(info: NamespaceInfo | GroupInfo | None, status: str, reason: str) -> None:
            if isinstance(info, GroupInfo):
                self._reply(local.FoundGroup(request.request, info))
            else:
                self._fail(request.request, status, reason)

        def make(number: int) -> GroupRequest:
            return GroupRequest(number, request.namespace, request.nodes, request.at)

        self._core.ask_controller(make, found)

    def _describe(self, request: local.DescribePool) -> None:
        core = self._core
        pool = core.pool
        held = []
        keys: list[bytes] = []
        if request.keys:
            if not self._may_use(request.namespace):
                self._forbid(request.request, _not_for(request.namespace))
                return
            try:
                keys = core.pool_keys(request.namespace, request.keys)
            except MissingSecretError as error:
                self._fail(request.request, local.UNAVAILABLE, str(error))
                return
        for key, pool_key in zip(request.keys, keys, strict=True):
            copy = core.store.peek(BlockId(request.namespace, pool_key))
            if copy is not None:
                held.append(local.HeldBlock(key, copy.size_bytes, copy.digest, copy.home))
        homes = [""] * len(keys)
        if pool is not None:
            first = [of_one[0] if of_one else -1 for of_one in pool.homes_of_all(keys)]
            homes = [pool.nodes[one].node_id if one in pool.nodes else "" for one in first]
        self._reply(
            local.PoolDescription(
                request.request,
                core.options.node_id,
                pool.index if pool is not None else -1,
                pool.epoch if pool is not None else 0,
                core.connected,
                list(pool.nodes.values()) if pool is not None else [],
                [n for n in pool.namespaces.values() if self._may_use(n.namespace)]
                if pool is not None
                else [],
                [g for g in pool.groups.values() if self._may_use(g.namespace)]
                if pool is not None
                else [],
                held,
                homes,
            )
        )


def rows_left(ledger: Ledger) -> dict[int, list[tuple[int, Row]]]:
    """What clients hold of a former agent, by session: rows with their places, those included that
    its compiled code had given and that it did not live to write down."""
    rows: dict[int, list[tuple[int, Row]]] = {}
    for at, row in ledger.found():
        rows.setdefault(row.session, []).append((at, row))
    for row in given_lately(ledger):
        of_one = rows.setdefault(row.session, [])
        if row.number not in [known.number for _, known in of_one]:
            of_one.append((ledger.write(row), row))
    return rows


def _not_for(namespace: int) -> str:
    return f"this client may not use namespace {namespace}"


def _parts_of(info: NamespaceInfo) -> tuple[str, str, str, str]:
    return info.tenant, info.model, info.version, info.layout


def _are_alike(one: Copy, other: Copy) -> bool:
    return (one.block.namespace, one.size_bytes) == (other.block.namespace, other.size_bytes)
