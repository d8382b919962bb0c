"""The model: what must be true of a pool, whatever happens to it (docs/architecture.md,
"Invariants").

Owns: the invariants, and everything that they are judged by: which bytes were put under which key
and by whom, who acknowledged what, who has rights to which namespace, and what was seen to be
delivered to clients, sent by hosts, and let through by the switch. Must not know: any of the
product's code. It reads frames by their offsets and keeps its own tables, so that a mistake in a
core or in the codec cannot hide itself here.

1. A reader gets one whole copy of the block that it named, bit for bit: judged by a get's answer,
   and again when the client lets go of it. An honest home sends only true chunks of the copy that
   it names (its cable). The switch changes no chunk, and serves only what passed it under that
   name and digest (its ports).
2. Every get and put ends by its deadline (the clock). A READ is held back only while its answer
   is in flight, and all of the answer that follows goes to its reader too (the switch's ports).
3. An acknowledged put is held by somebody. It is readable while a home of it that acknowledged it
   lives and keeps it and nothing is wrong (gets in calm times; `exists` counts it then).
4. A segment leaves its home once a coalescing window, and once more for every frame lost (the
   home's cable).
5. Nothing of a namespace reaches a host that has no right to it, nor what `exists` counts of it.
   Answers pass only from ports of nodes that answer for the bucket, and frames only from the
   address that belongs to the port (the switch's ports, and clients).

Invariants 2 (held back), 4 and 5 are the switch program's only while it is enabled; the others hold
always, which is invariant 6.
"""

from __future__ import annotations

import heapq
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import xxhash
from kvcast.simulation.model_writes import (
    CHUNK_BYTES,
    Place,
    is_roce,
    look_write,
)
from kvcast.simulation.world import World

Name = tuple[int, bytes]
"""Namespace and key."""
Segment = tuple[int, bytes, int]
Copy = tuple[int, bytes, int]
"""Namespace, key and digest."""

_HEADER_AT: Final = 42
_HEADER: Final = struct.Struct("!BBHHH16sQIHBBQI")
_PAYLOAD_AT: Final = _HEADER_AT + _HEADER.size
_READ, _DATA, _MISS, _OFFER, _WRITTEN = 1, 2, 3, 4, 5
_PARTIAL, _LAST, _RESIDENT, _WRITE = 0x2, 0x4, 0x20, 0x40
_BY_WRITE: Final = 16
"""Above this bit of a segment's number stand 1 and the tag, where its answer is to be written by
RDMA: such READs wait apart, in the place that the tag says."""
_CELL: Final = 1024
_INDEX_BITS: Final = 14
"""Of a segment's number; above them stands how often a chunk is twice a cell."""
_WHOLE: Final = (1 << 64) - 1

LOSSES_COUNT_S: Final = 6.0
"""For so long a lost frame excuses the home's sending a segment again: longer than all time-outs
of a requester together."""
REPEAT_S: Final = 0.04
"""A reader that asks again after so long, or half of its time-out, does it because nothing came:
less than its shortest time-out, more than the longest pause in which it repeats a READ for safety.
Sooner, another of its gets may have taken the block over, which is no repetition."""
GRACE_S: Final = 0.05
"""How late a get may end: less than any pause that its reader makes on purpose."""


class ViolationError(Exception):
    """An invariant does not hold. `number` is that of docs/architecture.md; 0 = the product failed
    in a way of its own (an exception, a leak)."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"invariant {number}: {text}")
        self.number = number
        self.text = text


class Seen(NamedTuple):
    """A kvcast frame as it looks from outside."""

    op: int
    flags: int
    namespace: int
    group: int
    key: bytes
    digest: int
    size: int
    segment: int
    chunk: int
    wanted: int
    tag: int
    source_ip: int

    @property
    def where(self) -> Segment:
        place = (self.tag << 1 | 1) << _BY_WRITE if self.flags & _WRITE else 0
        return self.namespace, self.key, self.segment | place

    @property
    def place(self) -> Place:
        """Of the READ of which the answer is written."""
        return self.namespace, self.tag & 0xFFFF, self.tag >> 18 & 0x7F

    @property
    def chunk_bytes(self) -> int:
        """How long the block's chunks are, by this frame."""
        return _CELL << (self.segment >> _INDEX_BITS)

    @property
    def before(self) -> int:
        """How many of the block's bytes lie before the segment: the first is of 64 KiB."""
        index = self.segment & (1 << _INDEX_BITS) - 1
        return 64 * (_CELL + (index - 1) * self.chunk_bytes) if index else 0

    @property
    def longest(self) -> int:
        """How many bytes the segment has at most."""
        return 64 * (self.chunk_bytes if self.before else _CELL)

    @property
    def full(self) -> bool:
        """Whether it is part of the way of a whole segment: what the switch may coalesce."""
        return not self.flags & _PARTIAL


def look(frame: bytes) -> Seen | None:
    """What a frame says; None if it is no kvcast frame that anybody would take."""
    if len(frame) < _PAYLOAD_AT or frame[12:14] != b"\x08\x00" or frame[14] != 0x45:
        return None
    if frame[23] != 17 or frame[36:38] != b"\x4b\x56" or frame[20] & 0x3F or frame[21]:
        return None  # not UDP, another port, or a fragment
    if int.from_bytes(frame[14:34], "big") % 0xFFFF:
        return None  # a damaged IPv4 header
    fields = _HEADER.unpack_from(frame, _HEADER_AT)
    version, op, flags, namespace, group, key, digest, size, segment, chunk = fields[:10]
    wanted, tag = fields[11:13]
    if version != 1 or not _READ <= op <= _WRITTEN:
        return None
    source_ip = int.from_bytes(frame[26:30], "big")
    seen = Seen(
        op, flags, namespace, group, key, digest, size, segment, chunk, wanted, tag, source_ip
    )  # fmt: skip
    return None if op == _DATA and len(frame) != _PAYLOAD_AT + seen.chunk_bytes else seen


@dataclass
class _Window:
    """A segment's answer is in flight: from the READ that went to the home to the answer's end."""

    opened_at: float
    used_at: float
    """When the switch last sent on a READ or an answer of it."""
    ports: set[int] = field(default_factory=set)
    read_at: dict[int, tuple[float, bytes]] = field(default_factory=dict)
    """When each port last asked, and whom."""
    first_read_at: dict[int, float] = field(default_factory=dict)
    """When each port last asked for a get that had just begun, while another waited for long."""
    held: set[int] = field(default_factory=set)
    """Ports of which a READ was held back for this answer."""
    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    """How often each host has sent each chunk."""


@dataclass
class Request:
    """A client's get or put of one block."""

    number: int
    host: int
    name: Name
    what: str
    due: float
    started_at: float
    alone: bool
    waited_s: float = 0.0
    """How long it may take from when it is asked again; 0: it is not to be."""
    held: frozenset[tuple[int, int]] = frozenset()


class Rules(NamedTuple):
    """What the model may not find out for itself: set by whoever builds the pool."""

    rights: dict[int, frozenset[int]]
    """Hosts that may use a namespace; one that is not here is nobody's."""
    ip_of_port: dict[int, int]
    lease_s: float
    """How long the switch lets a READ wait."""
    pool_ip: int = 0
    """Where homes send what the switch writes into landing zones."""


class Model:
    """See the module's text. Hosts are numbered as the switch's ports."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._rules = rules
        self.enabled: Callable[[], bool] = lambda: False
        """Whether the switch program acts at present."""
        self.known_mac: Callable[[bytes], bool] = lambda _mac: False
        """Whether the control plane has told the switch where a host is."""
        self.known_zone: Callable[[int, int], bool] = lambda _ip, _queue_pair: False
        """Whether the control plane has told the switch of a landing zone."""
        self.patience_s: Callable[[int, int], float] = lambda _host, _ip: 0.0
        """How long a host waits for an answer from an address before it takes it for lost."""
        self.dishonest: set[int] = set()
        self.delivered = 0
        self.delivered_by_tier: dict[str, int] = defaultdict(int)
        # what was put
        self._versions: dict[Name, dict[bytes, None]] = defaultdict(dict)
        self._by_digest: dict[Copy, bytes] = {}
        self._deleted: set[int] = set()  # namespaces, until they are made again
        self._retired: dict[Name, set[bytes]] = defaultdict(set)  # put before they were
        self._forged: dict[Copy, tuple[int, bytes]] = {}  # by whom, and the bytes
        self._passed_on: set[Copy] = set()  # forgeries that nothing has stopped on their way
        self._invented: set[Copy] = set()  # forgeries that count as copies now
        self._holders: dict[Name, dict[int, int]] = defaultdict(dict)  # host -> its life
        self._acknowledged: dict[Name, set[int]] = defaultdict(set)  # hosts, ever
        self._acknowledged_at: dict[Name, float] = {}
        self._ever_home: dict[int, set[int]] = defaultdict(set)  # bucket -> hosts
        self._now_home: list[list[int]] = []  # by bucket
        # what is in flight
        self._requests: dict[int, Request] = {}
        self._due: list[tuple[float, int]] = []
        self._next = 1
        # the switch
        self._windows: dict[Segment, _Window] = {}
        self._losses: dict[Segment, list[tuple[float, int]]] = defaultdict(list)
        self._used: dict[int, dict[Segment, float]] = defaultdict(dict)
        self._passed: dict[tuple[int, bytes, int, int, int], set[bytes]] = defaultdict(set)
        self._disturbed_at = -1e9
        # answers by RDMA
        self._zones: dict[int, set[int]] = defaultdict(set)  # host -> its queue pairs, ever
        self._read_by_write: dict[Place, Segment] = {}

    # --- what is told -----------------------------------------------------------------------

    def put_begins(self, name: Name, content: bytes) -> None:
        """From now on these bytes are one copy of the block."""
        self._versions[name][content] = None
        if name in self._retired:
            self._retired[name].discard(content)
        digest = int(xxhash.xxh3_64_intdigest(content)) or 1
        self._by_digest[(*name, digest)] = content

    def forged(self, host: int, name: Name, content: bytes, *, by_tcp: bool = False) -> None:
        """A hostile host is about to send these bytes, of which nobody must get a copy: under a
        name whose bucket is not its own, or in a namespace that is not."""
        copy = (*name, int(xxhash.xxh3_64_intdigest(content)) or 1)
        self._forged[copy] = host, content
        if by_tcp:
            self._passed_on.add(copy)  # no switch looks at it

    def acknowledged(self, host: int, life: int, name: Name) -> None:
        """A home has said that it holds the block."""
        if name[0] not in self._deleted:
            self._holders[name][host] = life
        self._acknowledged[name].add(host)
        self._acknowledged_at[name] = self._world.now

    def put_ended(
        self, host: int, name: Name, ok: bool, *, copies: int = 0, digest: int = 0
    ) -> None:
        """The pool has answered a put. `ok`: that a home has it; `copies`: that so many have;
        `digest`: of which bytes, 0 = it does not say."""
        there = len(self._acknowledged.get(name, ()))
        if ok and not there:
            raise ViolationError(
                3, f"a put of {_show(name)} at host {host} was acknowledged, and no home has it"
            )
        if copies > there:
            raise ViolationError(
                3,
                f"host {host} was told of {copies} copies of {_show(name)} at homes, of which "
                f"{there} have acknowledged one",
            )
        if digest and (*name, digest) not in self._by_digest:
            raise ViolationError(
                1, f"host {host} was told of a put of {_show(name)} with another's digest"
            )

    def exist(self, host: int, names: list[Name]) -> None:
        """A client was told that the pool holds these."""
        for name in names:
            if not self.may_use(host, name[0]):
                raise ViolationError(
                    5, f"host {host} was told of {_show(name)}, to which it has no right"
                )
            if not self._versions[name]:
                raise ViolationError(1, f"host {host} was told of {_show(name)}, which nobody put")

    def zone_made(self, host: int, queue_pair: int) -> None:
        """A host's card takes what is written to its landing zone by this queue pair."""
        self._zones[host].add(queue_pair)

    def dropped(self, name: Name) -> None:
        """A client has asked the pool to forget the block."""
        self._holders.pop(name, None)

    def deleted(self, namespace: int) -> None:
        """An operator has deleted a namespace: nothing of it is owed to anybody."""
        self._deleted.add(namespace)
        for name in self._holders:
            if name[0] == namespace:
                self._holders[name].clear()

    def retire(self, namespace: int) -> None:
        """Whoever knows of the deletion is not to be given what was put until now. What is being
        put may be of either time."""
        being_put = {r.name for r in self._requests.values() if r.what == "put"}
        for name, versions in self._versions.items():
            if name[0] == namespace and name not in being_put:
                self._retired[name].update(versions)

    def lets_use(self, namespace: int, hosts: frozenset[int]) -> None:
        """A namespace is there, for these hosts."""
        self._deleted.discard(namespace)
        self._rules.rights[namespace] = hosts

    def homes_are(self, buckets: list[list[int]]) -> None:
        """The controller has published a map: for every bucket the hosts that are its homes."""
        before, self._now_home = self._now_home, buckets
        for bucket, hosts in enumerate(buckets):
            if not before or hosts != before[bucket]:
                self._ever_home[bucket].update(hosts)
        for copy in list(self._passed_on):
            self._perhaps_excused(copy)

    def may_answer(self, bucket: int, host: int) -> None:
        """The controller lets a host answer for a bucket without being its home."""
        self._ever_home[bucket].add(host)

    def homes_of(self, name: Name) -> list[int]:
        return self._now_home[_bucket(name[1])] if self._now_home else []

    def was_home(self, host: int, key: bytes) -> bool:
        return host in self._ever_home[_bucket(key)]

    def may_use(self, host: int, namespace: int) -> bool:
        return host in self._rules.rights.get(namespace, frozenset())

    def disturbed(self) -> None:
        """Something happened that may cost frames, copies or rounds that nobody can count."""
        self._disturbed_at = self._world.now
        self._windows.clear()

    # --- clients ----------------------------------------------------------------------------

    def begins(
        self,
        host: int,
        name: Name,
        what: str,
        due: float,
        held: frozenset[tuple[int, int]],
        *,
        alone: bool = False,
    ) -> int:
        """A client asks; the answer must come by `due`. `held`: which homes hold the block now,
        as (host, copy); `alone`: it does not wait for other blocks too."""
        number = self._next
        self._next += 1
        now = self._world.now
        request = Request(number, host, name, what, due + GRACE_S, now, alone, held=held)
        self._requests[number] = request
        heapq.heappush(self._due, (request.due, number))
        return number

    def voided(self, host: int) -> None:
        """A host's agent died, and its clients' requests with it."""
        for number in [n for n, r in self._requests.items() if r.host == host]:
            del self._requests[number]

    def orphaned(self, host: int) -> None:
        """A host's agent died, and a client that outlives it waits for the next."""
        for request in self._requests.values():
            if request.host == host and not request.waited_s:
                request.waited_s = request.due - request.started_at
                request.due = float("inf")

    def asked_again(self, host: int) -> None:
        """It is back, and asks for all that it has no answer to."""
        for request in self._requests.values():
            if request.host == host and request.waited_s:
                request.due = self._world.now + request.waited_s
                request.waited_s = 0.0
                heapq.heappush(self._due, (request.due, request.number))

    def postponed(self, host: int, seconds: float) -> None:
        """A host's agent stood still for so long."""
        for request in self._requests.values():
            if request.host == host:
                request.due += seconds
                heapq.heappush(self._due, (request.due, request.number))

    def ends(self, number: int) -> Request:
        """A request has been answered."""
        request = self._requests.pop(number, None)
        if request is None:
            raise ViolationError(2, "a request was answered twice")
        return request

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def check_clock(self) -> None:
        """No request is overdue."""
        due, now = self._due, self._world.now
        while due and due[0][0] < now:
            _, number = heapq.heappop(due)
            request = self._requests.get(number)
            if request is not None and request.due < now:
                raise ViolationError(
                    2,
                    f"a {request.what} of {_show(request.name)} by host {request.host}, begun at "
                    f"{request.started_at:.3f} s, should have ended by {request.due:.3f} s",
                )

    def got(self, host: int, name: Name, content: bytes, tier: str, *, gone: bool = False) -> None:
        """A client was given these bytes. `gone`: its agent knew, when it was asked, that nothing
        is left of what was put before the namespace was deleted."""
        if not self.may_use(host, name[0]):
            raise ViolationError(5, f"host {host} got {_show(name)}, to which it has no right")
        self.is_copy(host, name, content, "got")
        if gone and content in self._retired[name]:
            raise ViolationError(
                1, f"host {host} got of {_show(name)} what was put before it was deleted ({tier})"
            )
        self.delivered += 1
        self.delivered_by_tier[tier] += 1

    def is_copy(self, host: int, name: Name, content: bytes, verb: str) -> None:
        """The bytes are those of one put of the block."""
        if content in self._versions[name]:
            return
        digest = int(xxhash.xxh3_64_intdigest(content)) or 1
        forgery = self._forged.get((*name, digest))
        if forgery is not None:
            raise ViolationError(
                5, f"host {host} {verb} of {_show(name)} what host {forgery[0]} has forged"
            )
        raise ViolationError(1, f"host {host} {verb} bytes of {_show(name)} that nobody has put")

    def _perhaps_excused(self, copy: Copy, *, spoofed: bool = False) -> None:
        """A forgery that has passed the network counts as a copy if nothing tells it from one any
        more: it came under another's address, or whoever sent it is a home of the block (by now:
        frames wait on links and in sockets, and homes are believed, see docs/security.md)."""
        namespace, key, _ = copy
        forger, content = self._forged[copy]
        if spoofed or self.was_home(forger, key):
            del self._forged[copy]
            self._passed_on.discard(copy)
            self._versions[namespace, key][content] = None
            self._by_digest[copy] = content
            self._invented.add(copy)

    def acknowledged_at(self, name: Name) -> float:
        """When a home said so last."""
        return self._acknowledged_at[name]

    def holders(self, name: Name) -> dict[int, int]:
        """The hosts that have acknowledged the block, and in which life of their memory."""
        return self._holders[name]

    # --- the hosts' cables ------------------------------------------------------------------

    def sent(self, host: int, frame: bytes) -> None:
        """A host's agent, or its card, puts a frame on its cable."""
        if is_roce(frame):
            self._write_sent(host, frame)
            return
        seen = look(frame)
        if seen is None or seen.op != _DATA or host in self.dishonest:
            return
        content = self._by_digest.get((seen.namespace, seen.key, seen.digest))
        if content is None:
            forged = (seen.namespace, seen.key, seen.digest) in self._forged
            number, what = (5, "that was forged") if forged else (1, "that nobody has put")
            raise ViolationError(number, f"host {host} sends a copy of {_show(seen)} {what}")
        if seen.chunk * seen.chunk_bytes >= seen.longest:
            raise ViolationError(2, f"host {host} sends chunk {seen.chunk} of {_show(seen)}")
        at = seen.before + seen.chunk * seen.chunk_bytes
        chunk = content[at : at + seen.chunk_bytes]
        if frame[_PAYLOAD_AT : _PAYLOAD_AT + len(chunk)] != chunk or seen.size != len(content):
            raise ViolationError(
                1, f"host {host} sends wrong bytes as chunk {seen.chunk} of {_show(seen)}"
            )
        if seen.full:
            end = min(seen.longest, len(content) - seen.before)
            last = seen.chunk == (end - 1) // seen.chunk_bytes
            if last != bool(seen.flags & _LAST):
                raise ViolationError(
                    2,
                    f"host {host} sends chunk {seen.chunk} of {_show(seen)} "
                    + ("without saying" if last else "saying wrongly")
                    + " that its answer ends",
                )
            self._count_sent(host, seen.where, seen.chunk)

    def _write_sent(self, host: int, frame: bytes) -> None:
        """A host's card writes a chunk for whoever waits."""
        seen = look_write(frame)
        where = self._read_by_write.get(seen.place) if seen is not None else None
        if seen is None or host in self.dishonest:
            return
        if where is None:
            raise ViolationError(4, f"host {host} writes to place {seen.place}, which nobody read")
        namespace, key, number = where
        index = number & (1 << _INDEX_BITS) - 1
        before = 64 * (_CELL + (index - 1) * CHUNK_BYTES) if index else 0
        end = before + 64 * (CHUNK_BYTES if index else _CELL)
        at = before + seen.chunk * CHUNK_BYTES
        chunks = [v[at : min(at + CHUNK_BYTES, end)] for v in self._versions[namespace, key]]
        if seen.payload not in chunks:
            raise ViolationError(
                1, f"host {host} writes wrong bytes as chunk {seen.chunk} of {_show(where)}"
            )
        self._count_sent(host, where, seen.chunk)

    def _count_sent(self, host: int, where: Segment, chunk: int) -> None:
        window = self._windows.get(where)
        if window is None or not self.enabled() or not self.was_home(host, where[1]):
            return  # a home's recall may be answered by one that is none, whose answer goes nowhere
        window.sent[host, chunk] += 1
        times = window.sent[host, chunk]
        if times > 1 and self._countable(where) and times > 1 + self._lost(where):
            raise ViolationError(
                4,
                f"host {host} sent chunk {chunk} of {_show(where)} {times} times in one "
                f"window, open since {window.opened_at:.6f} s, and {self._lost(where)} "
                "frames of it were lost",
            )

    def _countable(self, where: Segment) -> bool:
        """Whether the home's sendings can be held against it: not where its readers may have asked
        again for reasons that no single frame shows."""
        return (
            self._world.now - self._disturbed_at > LOSSES_COUNT_S
            and len(self._versions[where[0], where[1]]) == 1
            and not self.dishonest
            and not self._met_in_its_set(where)
        )

    def _lost(self, where: Segment) -> int:
        since = self._world.now - LOSSES_COUNT_S
        return sum(weight for at, weight in self._losses[where] if at >= since)

    def lost(self, frame: bytes) -> None:
        """A frame will not arrive once, whole, in order and in time."""
        if is_roce(frame):
            write = look_write(frame)
            where = self._read_by_write.get(write.place) if write is not None else None
        else:
            seen = look(frame)
            where = seen.where if seen is not None else None
        if where is not None:
            window = self._windows.get(where)
            weight = max(1, len(window.ports)) if window is not None else 1
            self._losses[where].append((self._world.now, weight))

    # --- the switch -------------------------------------------------------------------------

    def switch_reset(self) -> None:
        """The switch has forgotten everything."""
        self._passed.clear()
        self._used.clear()
        self.disturbed()

    def all_is_well(self) -> None:
        """Nothing that happened so far can show from now on."""
        self._disturbed_at = -1e9

    def crossed(self, port: int, frame: bytes, sent: list[tuple[int, bytes]]) -> None:
        """A frame came into the switch by `port`, and these went out."""
        if is_roce(frame):
            self._write_crossed(port, frame, sent)
            return
        seen = look(frame)
        if seen is None:
            return
        enabled = self.enabled()
        if enabled:
            self._guarded(port, seen, sent)
        if seen.op == _DATA and enabled and self._true_home(port, seen):
            # What it may keep, under the name that it saw.
            name = (seen.namespace, seen.key, seen.digest, seen.segment, seen.chunk)
            self._passed[name].add(frame[_PAYLOAD_AT:])
        ports = set()
        for to, out in sent:
            if to in ports and not (seen.op == _READ):
                raise ViolationError(4, f"port {to} got two copies of one frame of {_show(seen)}")
            ports.add(to)
            self._left(frame, seen, to, out)
        if enabled:
            self._follow(port, frame, seen, sent)
        copy = (seen.namespace, seen.key, seen.digest)
        if seen.op == _DATA and sent and copy in self._forged:
            self._passed_on.add(copy)
            spoofed = seen.source_ip != self._rules.ip_of_port[port]
            self._perhaps_excused(copy, spoofed=spoofed)

    def _write_crossed(self, port: int, frame: bytes, sent: list[tuple[int, bytes]]) -> None:
        """A packet for a card came into the switch, and these went out."""
        rules, seen = self._rules, look_write(frame)
        if not sent or seen is None or not self.enabled():
            return  # what no card takes, or nobody keeps out
        if seen.target_ip != rules.pool_ip and not self.known_zone(seen.target_ip, seen.queue_pair):
            return  # other RDMA
        if seen.source_ip != rules.ip_of_port[port] or seen.target_ip != rules.pool_ip:
            raise ViolationError(5, f"RDMA of host {port} passed to others past those who wait")
        namespace = seen.place[0]
        where = self._read_by_write.get(seen.place)
        if where is not None:
            self._note_use(where)
            if where in self._windows:
                self._windows[where].used_at = self._world.now
        for to, out in sent:
            after = look_write(out)
            if after is None:
                raise ViolationError(1, f"the switch sends host {to} a WRITE that no card takes")
            if (after.payload, after.address, after.immediate) != (
                *(seen.payload, seen.address, seen.immediate),
            ):
                raise ViolationError(1, f"the switch changed a chunk written to host {to}")
            mine = after.target_ip == rules.ip_of_port[to] and after.queue_pair in self._zones[to]
            if not mine:
                raise ViolationError(2, f"a WRITE went to host {to}, but not to its landing zone")
            if not self.may_use(to, namespace) and (
                where is None or not self.was_home(to, where[1])
            ):
                raise ViolationError(
                    5, f"a WRITE of namespace {namespace} went to host {to}, without a right"
                )

    def _true_home(self, port: int, seen: Seen) -> bool:
        mine = seen.source_ip == self._rules.ip_of_port[port]
        return mine and self.was_home(port, seen.key)

    def _guarded(self, port: int, seen: Seen, sent: list[tuple[int, bytes]]) -> None:
        if not sent:
            return
        if seen.source_ip != self._rules.ip_of_port[port]:
            raise ViolationError(5, f"a frame from port {port} passed under another's address")
        if seen.op == _READ:
            if not self.may_use(port, seen.namespace) and not self.was_home(port, seen.key):
                raise ViolationError(
                    5, f"a READ of {_show(seen)} by host {port} passed, which has no right to it"
                )
        elif not self.was_home(port, seen.key):
            raise ViolationError(
                5, f"an answer about {_show(seen)} passed from host {port}, not a home of it"
            )

    def _left(self, frame: bytes, seen: Seen, to: int, out: bytes) -> None:
        after = look(out)
        if after is None or after.op != _DATA:
            return
        copy = (after.namespace, after.key, after.digest)
        if (
            not self.may_use(to, after.namespace)
            and not self.was_home(to, after.key)
            and copy in self._by_digest
            and copy not in self._invented
        ):
            raise ViolationError(5, f"DATA of {_show(after)} went to host {to}, without a right")
        if seen.op == _READ:
            name = (after.namespace, after.key, after.digest, after.segment, after.chunk)
            if out[_PAYLOAD_AT:] not in self._passed.get(name, ()):
                raise ViolationError(
                    1,
                    f"the switch served as chunk {after.chunk} of {_show(after)} what never "
                    "passed it under that name and digest",
                )
        elif out[_PAYLOAD_AT:] != frame[_PAYLOAD_AT:] or after.where != seen.where:
            raise ViolationError(1, f"the switch changed a chunk of {_show(seen)}")

    def _follow(self, port: int, frame: bytes, seen: Seen, sent: list[tuple[int, bytes]]) -> None:
        """Keep account of windows."""
        if not seen.full or seen.op == _OFFER:
            return
        where = seen.where
        if seen.op == _READ:
            self._follow_read(port, frame, seen, sent)
        elif sent:
            if seen.flags & _WRITE:
                # Who waits is found by the place alone: the rest of the tag may be damaged.
                where = self._read_by_write.get(seen.place, where)
            self._note_use(where)
            self._check_shared(port, seen, where, sent)
            if seen.op in (_MISS, _WRITTEN) or seen.flags & _LAST:
                self._windows.pop(where, None)
            elif where in self._windows:
                self._windows[where].used_at = self._world.now

    def _check_shared(
        self, port: int, seen: Seen, where: Segment, sent: list[tuple[int, bytes]]
    ) -> None:
        """Whoever was held back for an answer gets it, under its own address."""
        window = self._windows.get(where)
        if window is None or not self._true_home(port, seen) or self._crowded_out(where):
            return
        ip_of_port = self._rules.ip_of_port
        to = {n for n, out in sent if int.from_bytes(out[30:34], "big") == ip_of_port[n]}
        forgotten = window.held - to - {port}
        if forgotten and self._world.now - self._disturbed_at > LOSSES_COUNT_S:
            raise ViolationError(
                2,
                f"an answer about {_show(seen)} did not go to host {min(forgotten)}, whose READ "
                "was held back for it",
            )

    def _follow_read(
        self, port: int, frame: bytes, seen: Seen, sent: list[tuple[int, bytes]]
    ) -> None:
        where = seen.where
        if seen.flags & _WRITE and (
            # Where no block has bytes, nothing is written: the READ may be a damaged one.
            seen.place not in self._read_by_write
            or any(len(v) > seen.before for v in self._versions.get((seen.namespace, seen.key), ()))
        ):
            self._read_by_write[seen.place] = where
        served = any((after := look(out)) is not None and after.op == _DATA for _, out in sent)
        if served:
            return
        now = self._world.now
        window = self._windows.get(where)
        if window is not None and now - window.used_at > self._rules.lease_s + 0.01:
            window = None  # whoever waits now may ask again for all
        if sent:
            if window is None:
                window = self._windows[where] = _Window(now, now)
            window.used_at = now
            self._note_use(where)
        elif self._may_read_here(port, frame, seen):
            if window is None:
                raise ViolationError(
                    2, f"a READ of {_show(seen)} by host {port} was held back; no answer comes"
                )
            # Who asks another home had an answer, and found it wrong; that is no repetition.
            asked_at, asked = window.read_at.get(port, (now, frame[30:34]))
            name = seen.namespace, seen.key
            window.held.add(port)
            if (
                asked == frame[30:34]
                and now - max(asked_at, window.used_at)
                > max(REPEAT_S, self.patience_s(port, int.from_bytes(asked, "big")) / 2)
                and self._waits_since(port, name, asked_at)
            ):
                since = max(asked_at, window.first_read_at.get(port, 0.0))
                if not self._just_begun(port, name, since):
                    raise ViolationError(
                        2,
                        f"host {port} repeats a READ of {_show(seen)} since nothing has come, and "
                        "the switch holds it back",
                    )
                window.first_read_at[port] = now
                return  # which leaves the get that waits for long where it was
        if window is not None:
            window.ports.add(port)
            window.read_at[port] = now, frame[30:34]

    def _waits_since(self, host: int, name: Name, since: float) -> bool:
        """Whether a client of the host has waited for the block all the time since then, so that
        it is one and the same reader that asks again."""
        return any(
            r.host == host and r.name == name and r.alone and r.started_at <= since
            for r in self._requests.values()
        )

    def _just_begun(self, host: int, name: Name, since: float) -> bool:
        """Whether another get of the block has begun there since then, and just now: the courier
        may ask for it by a first READ while the one that waits for long, which a new map has taken
        from the courier, is on its way to the agent. The agent's READ is the repeat."""
        since = max(since, self._world.now - REPEAT_S)
        return any(
            r.host == host and r.name == name and r.what == "get" and r.started_at > since
            for r in self._requests.values()
        )

    def _may_read_here(self, port: int, frame: bytes, seen: Seen) -> bool:
        """Whether there is no other reason than another READ for holding this one back."""
        return (
            self._world.now - self._disturbed_at > LOSSES_COUNT_S
            and seen.wanted == _WHOLE
            and _well_formed_read(frame)
            and self.may_use(port, seen.namespace)
            and seen.source_ip == self._rules.ip_of_port[port]
            and self.known_mac(frame[0:6])
            and not self._crowded_out(seen.where)
        )

    def _note_use(self, where: Segment) -> None:
        self._used[_set_of(where)][where] = self._world.now

    def _others_in_its_set(self, where: Segment) -> int:
        """How many other segments may hold an entry of the segment's set in the switch's table."""
        since = self._world.now - self._rules.lease_s - 0.1
        users = self._used.get(_set_of(where), {})
        return sum(other != where and at > since for other, at in users.items())

    def _met_in_its_set(self, where: Segment) -> bool:
        """Whether another segment may have moved this one to its set's second entry: then the
        switch may send on one READ more, when the first is free again."""
        return self._others_in_its_set(where) > 0

    def _crowded_out(self, where: Segment) -> bool:
        """Whether other segments may hold both entries of its set."""
        return self._others_in_its_set(where) > 1


def _well_formed_read(frame: bytes) -> bool:
    """Whether the switch would take it for a READ and not for a broken frame."""
    length = len(frame) - 14
    return (
        int.from_bytes(frame[16:18], "big") == length
        and int.from_bytes(frame[38:40], "big") == length - 20
        and length == 20 + 8 + _HEADER.size
        and int.from_bytes(frame[14:34], "big") % 0xFFFF == 0
        and not frame[20] & 0x20
        and _may_wait(int.from_bytes(frame[44:46], "big") & ~0x9, frame[78] >> 6)
        and frame[80] == 0
    )


def _may_wait(flags: int, chunk_code: int) -> bool:
    """Whether a READ with these flags, beside those of a repeat and of the switch, is one that the
    switch may hold back."""
    return not flags or (flags == _WRITE and _CELL << chunk_code == CHUNK_BYTES)


def _set_of(where: Segment) -> int:
    namespace, key, segment = where
    if segment >> _BY_WRITE:
        return segment >> (_BY_WRITE + 1) & 0x7FFF
    return zlib.crc32(namespace.to_bytes(2, "big") + key + segment.to_bytes(2, "big")) & 0x7FFF


def pending_set_of(namespace: int, key: bytes, segment: int) -> int:
    """The set of two entries of the switch's pending interest table that a segment uses."""
    return _set_of((namespace, key, segment))


def _bucket(key: bytes) -> int:
    return int.from_bytes(key, "big") % 1024


def bucket_of_key(key: bytes) -> int:
    """The bucket of a key."""
    return _bucket(key)


def _show(what: Seen | Iterable[object]) -> str:
    if isinstance(what, Seen):
        return f"{what.namespace}/{what.key.hex()[:8]}…{what.key.hex()[-4:]}#{what.segment}"
    namespace, key, *_ = what
    assert isinstance(key, bytes)
    return f"{namespace}/{key.hex()[:8]}…{key.hex()[-4:]}"
