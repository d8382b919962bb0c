"""The courier before hostile clients and nodes: whatever they say, in whatever order.

Owns: an agent with a courier and two clients of it, without sockets, and what must hold of every
answer. Must not know: how the courier goes about a question. The property test drives the same
stand.

An input is a run of steps, a byte each and what the step takes: a message of a client, a datagram,
time that passes, something that Python does meanwhile.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import msgspec
from kvcast.bench.fuzz.engine import Harness
from kvcast.bench.fuzz.entry_points import check_store
from kvcast.bench.fuzz.targets import entry_point, pool_map
from kvcast.hostagent.core import courier as core_courier
from kvcast.hostagent.core.agent import AgentCore, AgentOptions
from kvcast.hostagent.core.courier import Courier, given_lately
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.shared_index import SharedIndex
from kvcast.hostagent.core.store import Store, StoreError
from kvcast.hostagent.network.lander import hashing
from kvcast.hostagent.tiers.arena import Allocator
from kvcast.hostagent.tiers.index import Index, buckets_for
from kvcast.hostagent.tiers.ledger import LEDGER_BYTES, MOMENT_BYTES, Ledger, Row
from kvcast.protocol.conveyor import COUNTED as REPLY_COUNTED
from kvcast.protocol.conveyor import GIVEN_HERE, NOT_HERE, READ_IT, REPLY, REQUEST
from kvcast.protocol.courier import CLIENT_HERE, MOST_REPAIRS
from kvcast.protocol.messages import local, shared
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.control import (
    CONTROL_PROTOCOL_VERSION,
    BlockRef,
    Registered,
    Residents,
)
from kvcast.protocol.messages.questions import (
    ANSWER,
    ASK_AGENT,
    COUNTED,
    EXISTS,
    GET,
    GET_MANY,
    GIVEN,
    KEY,
    MAX_CHAIN,
    MAX_DEADLINE_MS,
    MAX_MANY,
    QUESTION,
    RELEASE,
    TIERS,
)
from kvcast.protocol.messages.wire import (
    CELLS,
    CHUNKINGS,
    FLAG_LAST,
    FLAG_PARTIAL,
    FLAG_SHARED,
    FULL_SEGMENT,
    HEADER_BYTES,
    KEY_BYTES,
    MISS_NOT_FOUND,
    OFFER_TCP,
    OP_DATA,
    OP_MISS,
    OP_OFFER,
    SEGMENT_BYTES,
    BlockId,
    Chunking,
    Frame,
    Offer,
    chunking_of,
    decode,
    digest_of,
    encode,
    encode_offer,
)
from kvcast.protocol.placement import address_of_buffer

NAMESPACE: Final = 1
BLOCKS: Final = 16
LARGE: Final = 12
"""From this number on blocks are of more than one segment."""
HOME: Final = 2
"""The node that is asked for every block,"""
HOME_IP: Final = 0x0A4D0002
"""and its address."""
_SLAB: Final = 64 * 1024
_SLABS: Final = 48
_LEDGER_LOOK: Final = 64 * 1024
"""As much of the ledger is more than two clients use."""
_STEP: Final = struct.Struct("<BBB")
_EXISTS: Final = struct.pack("=H", EXISTS)
_LARGE_BYTES: Final = 180_000
_SIZES: Final = (20_000, 30_000, 30_000, 30_000, 65_536, 9_000)


@cache
def content_of(number: int) -> bytes:
    """The bytes of a block; most are about as large as the first."""
    if number >= LARGE:
        return random.Random(number).randbytes(_LARGE_BYTES - number)
    return random.Random(number).randbytes(_SIZES[number % len(_SIZES)] - number)


def key_of(number: int) -> bytes:
    """The key of a block."""
    return (number + 1 << 10 | number % 3).to_bytes(KEY_BYTES, "big")


def frame_of(number: int, chunk: int, *, code: int = 0, flags: int = 0, spoil: int = 0) -> bytes:
    """DATA of a chunk of a block; `spoil` 1: of other bytes, 2: of a copy with another digest."""
    content, chunking = content_of(number), CHUNKINGS[code]
    payload = content[chunk * chunking.chunk_bytes :][: chunking.chunk_bytes]
    if spoil == 1:
        payload = bytes(len(payload))
    digest = digest_of(content) ^ (2 if spoil == 2 else 0)
    frame = Frame(
        *(OP_DATA, NAMESPACE, key_of(number), chunking.number(0), flags),
        digest=digest,
        size=len(content),
        chunk=chunk,
        payload=payload,
    )
    return encode(frame)


def offer_of(number: int) -> bytes:
    """The home of a block offers another way to the rest of it."""
    content = content_of(number)
    return encode(
        Frame(
            *(OP_OFFER, NAMESPACE, key_of(number)),
            digest=digest_of(content),
            size=len(content),
            payload=encode_offer(Offer(OFFER_TCP, 9, HOME_IP, 0, 0)),
        )
    )


class Wanted(NamedTuple):
    """What was asked for on a conveyor."""

    number: int
    key: bytes
    digest: int
    start: int


@dataclass(eq=False)
class Chain:
    """A client asks how many of these blocks there are, counted from the first."""

    keys: list[bytes]
    here: frozenset[int]
    """The places in it of those that lie on this node,"""
    asked: int | None = None
    """of so many others the home was asked,"""
    home_has: int | None = None
    """and has said that it has so many; None: it has said nothing,"""
    certain: bool = True
    """and whether it certainly has not the one behind them."""

    @property
    def elsewhere(self) -> list[int]:
        """The places of those that the home is asked about."""
        return [place for place in range(len(self.keys)) if place not in self.here]

    @property
    def count(self) -> int:
        """How many there are, as far as anybody has said."""
        missing = self.elsewhere[self.home_has or 0 :]
        return missing[0] if missing else len(self.keys)


def requests_in(said: bytes) -> Iterator[Wanted | tuple[int, int, list[bytes]]]:
    """What is asked for on a conveyor: a block of NAMESPACE, or how many of these keys there are,
    with its number and namespace."""
    at = 0
    while at < len(said):
        number, key, digest, start, namespace, kind = REQUEST.unpack_from(said, at)
        at += REQUEST.size
        if not kind:
            assert namespace == NAMESPACE
            yield Wanted(number, key, digest, start)
            continue
        assert (kind, key, digest) == (1, bytes(KEY_BYTES), 0)
        further = said[at : at + start * KEY_BYTES]
        at += start * KEY_BYTES
        yield number, namespace, [each for (each,) in KEY.iter_unpack(further)]
    assert at == len(said)


class Stand:
    """An agent with a courier, and two clients. AssertionError where something is not as it
    should be."""

    def __init__(self) -> None:
        size_bytes = _SLABS * _SLAB
        self.memory = memoryview(bytearray(size_bytes))
        self._index_memory = memoryview(bytearray(shared.index_bytes(buckets_for(size_bytes))))
        index = Index(self._index_memory, size_bytes, 1)
        self.store = Store(Allocator(size_bytes, _SLAB))
        self.ledger_memory = memoryview(bytearray(LEDGER_BYTES))
        self._written = b""
        self._left_behind: dict[tuple[int, int], Row] = {}
        """What the ledger said when that was written in it."""
        ledger = Ledger(self.ledger_memory)
        self.core = AgentCore(
            *(AgentOptions(node_id="node-1"), self.store, self.memory, random.Random(1)),
            SharedIndex(index, self.store, lambda: None, ledger),
            ledger=ledger,
        )
        self.now = 0.0
        self._epoch = 3
        self.core.registered(Registered(CONTROL_PROTOCOL_VERSION, 1, 3.0, 0))
        self.new_map()
        functions = hashing()
        assert functions is not None
        self.courier = Courier(
            *(
                self.store,
                self.core.requester,
                self.core.outbox,
                self.core.spread,
                self.core.metrics,
            ),
            index_address=address_of_buffer(self._index_memory),
            index_bits=index.bits,
            arena_address=address_of_buffer(self.memory),
            most_bytes=size_bytes // 2,
            hashing=functions,
            ledger=ledger,
        )
        self.core.reads.courier = self.courier
        self.core.requester.placement.before_python = self._before_python
        self.reads: list[bytes] = []
        """READs that the courier has sent."""
        self.sessions: list[Session] = []
        self._sessions = 0
        """How many there have been."""
        self.numbers: list[int] = []
        self._regions: list[memoryview] = []
        self.asked: list[dict[int, list[int]]] = []
        """By client, the questions without an answer: the blocks of each, -1 = nobody's."""
        self.chains: list[dict[int, Chain]] = []
        """By client, the questions how many blocks there are, without an answer."""
        self._chain: Chain | None = None
        """The one that was asked last."""
        self.counted = 0
        """Answers that said how many."""
        self.held: list[dict[int, tuple[int, int, int]]] = []
        """By client, what it was given by handle: block, offset and size."""
        self.given = 0
        self.handed_over = 0
        self.courier.takes_conveyors = True
        self.conveyor: int | None = None
        """The conveyor from HOME, if there is one,"""
        self.wanted: list[Wanted | tuple[int, Chain]] = []
        """and what was asked for on it and has not come; of a chain, with its number."""
        self.conveyed = 0
        """Replies that were right."""
        for _ in range(2):
            self._join()
        self._next = 1

    def new_map(
        self,
        *,
        version: str | None = None,
        homes: tuple[int, ...] = (HOME,),
        chunking: Chunking = CELLS,
    ) -> None:
        """A map says that everything is at HOME, or at several; `version`: the namespace means
        another thing."""
        found = pool_map()
        (namespace,) = found.namespaces
        if version is not None:
            namespace = type(namespace)(
                *(namespace.namespace, namespace.tenant, namespace.model, version),
                namespace.layout,
            )
        self.meaning = meaning_of(namespace)
        self._epoch += 1
        other = msgspec.structs.replace(
            found.nodes[-1], index=HOME + 1, node_id="node-3", ip="10.77.0.3"
        )
        changed = msgspec.structs.replace(
            found,
            epoch=self._epoch,
            nodes=[*found.nodes, other],
            buckets=[list(homes)] * len(found.buckets),
            namespaces=[namespace],
            chunk_bytes=chunking.chunk_bytes,
        )
        self.core.control_message(self.now, changed)
        self.core.requester.placement.know({HOME_IP: HOME, HOME_IP + 1: HOME + 1})

    def _join(self) -> None:
        self._sessions += 1
        session = Session(self.core, lambda _reply: None, number=self._sessions)
        region = memoryview(bytearray(shared.REGION_BYTES))
        session.share(region, lambda _reason: None)
        number = self.courier.join(session)
        assert number is not None
        self.sessions.append(session)
        self._regions.append(region)
        self.numbers.append(number)
        self.asked.append({})
        self.chains.append({})
        self.held.append({})

    def _before_python(self, why: int) -> bool:
        mine = self.courier.frames_came(why, self.now)
        self.settle()
        return mine

    # --- steps ------------------------------------------------------------------------------------

    def settle(self) -> None:
        """What the courier has done is booked, and its clients hear of it."""
        self.courier.check()
        self._hear_conveyor()
        known = self.left_behind()
        self.courier.book(self.now)
        for number, answer in self.courier.take_answers():
            self._told(self.numbers.index(number), answer)
        self.courier.check()
        now_known = self.left_behind()
        for found in (known,) if now_known is known else (known, now_known):
            for session, held in zip(self.sessions, self.held, strict=True):
                for handle, (block, offset, _) in held.items():
                    row = found.get((session.number, handle))
                    assert row is not None, "nobody would know who holds it"
                    assert (row.block, row.offset) == (BlockId(NAMESPACE, key_of(block)), offset)
                    copy, space = self.store.lying_at(offset), self.store.allocator
                    if copy is not None:  # else its client has just gone
                        assert space.extent_bytes(row.size_bytes) == copy.reserved_bytes

    def left_behind(self) -> dict[tuple[int, int], Row]:
        """What an agent would find that came after one which died now: who holds which block, by
        session and handle."""
        parts = slice(_LEDGER_LOOK), slice(-MOMENT_BYTES, None)
        written = b"".join(self.ledger_memory[part] for part in parts)
        if written != self._written:
            memory = memoryview(bytearray(LEDGER_BYTES))
            for part in parts:
                memory[part] = self.ledger_memory[part]
            ledger = Ledger(memory)
            rows = [*(row for _, row in ledger.found()), *given_lately(ledger)]
            self._left_behind = {(row.session, row.number): row for row in rows}
            self._written = written
        return self._left_behind

    def _told(self, client: int, answer: bytes) -> None:
        told = list(ANSWER.iter_unpack(answer))
        number = told[0][3]
        if number in self.chains[client]:
            (only,) = told
            self._check_count(self.chains[client].pop(number), only)
            return
        blocks = self.asked[client].pop(number, None)
        assert blocks is not None, f"an answer to no question: {answer.hex()}"
        if len(told) == 1 and told[0][0] == ASK_AGENT:
            self.handed_over += 1
            return
        for block, each in zip(blocks, told, strict=True):
            status, tier, rest, of, handle, offset, size_bytes, digest = each
            assert of == number
            assert not rest
            assert tier < len(TIERS)
            if status == ASK_AGENT:
                self.handed_over += 1
                continue
            assert status == GIVEN
            assert handle not in self.held[client]
            assert block >= 0, "what nobody has was given"
            self.given += 1
            self.held[client][handle] = block, offset, size_bytes
            assert digest == digest_of(content_of(block))
            self._look(client, handle)

    def _check_count(self, chain: Chain, told: tuple[int, ...]) -> None:
        """The answer to a question how many there are."""
        status, more, _, _, _, _, count, _ = told
        if status == ASK_AGENT:
            assert not any(told[4:])
            self.handed_over += 1
            return
        assert status == COUNTED
        assert chain.home_has is not None or not chain.elsewhere, "nobody has said so"
        assert count == chain.count
        settled = count == len(chain.keys) or (chain.certain and self.store.is_all_in_index)
        assert more == (not settled)
        assert count or settled, "that says nothing"
        self.counted += 1

    def _look(self, client: int, handle: int) -> None:
        block, offset, size_bytes = self.held[client][handle]
        held = bytes(self.memory[offset : offset + size_bytes])
        assert held == content_of(block), f"client {client} holds other bytes than block {block}"

    def say(self, client: int, message: bytes) -> None:
        """A client says something."""
        self.courier.prepare(self.now)
        number = self.numbers[client]
        if self.courier.state_of(number) != CLIENT_HERE:
            return
        if message[:2] == _EXISTS:
            self._ask_how_many(client, message)
            return
        wanted: set[tuple[int, bytes]] = set()
        more, rest = divmod(len(message) - QUESTION.size, KEY_BYTES)
        if 0 <= more < MAX_MANY and not rest:
            kind, namespace, deadline_ms, asked, key, _ = QUESTION.unpack_from(message)
            if kind == RELEASE and not more and asked in self.held[client]:
                self._look(client, asked)
                del self.held[client][asked]
            keys = [key, *(k for (k,) in KEY.iter_unpack(message[QUESTION.size :]))]
            wanted = {(namespace, each) for each in keys}
            names = {(NAMESPACE, key_of(each)): each for each in range(BLOCKS)}
            blocks = [names.get((namespace, each), -1) for each in keys]
            if kind == (GET_MANY if more else GET) and deadline_ms <= 3_600_000:
                if asked in self.asked[client] or asked in self.chains[client]:
                    return  # a client that cannot tell its own questions apart: no answer is wrong
                self.asked[client][asked] = blocks
        for node, datagram in self.courier.hear(number, message, self.now):
            assert node == HOME
            frame = decode(datagram)
            assert (frame.namespace, frame.key) in wanted
            self.reads.append(datagram)
        self.settle()

    def _ask_how_many(self, client: int, message: bytes) -> None:
        more, rest = divmod(len(message) - QUESTION.size, KEY_BYTES)
        well_formed = 0 <= more < MAX_CHAIN and not rest
        if well_formed:
            _, namespace, deadline_ms, asked, key, _ = QUESTION.unpack_from(message)
            well_formed = deadline_ms <= MAX_DEADLINE_MS
        if well_formed:
            if asked in self.asked[client] or asked in self.chains[client]:
                return  # as of others
            keys = [key, *(k for (k,) in KEY.iter_unpack(message[QUESTION.size :]))]
            copies = [self.store.peek(BlockId(namespace, each)) for each in keys]
            here = frozenset(n for n, copy in enumerate(copies) if copy is not None)
            self._chain = self.chains[client][asked] = self._begin_chain(keys, here)
        number = self.numbers[client]
        assert self.courier.lookups.hear(number, message, self.now) == well_formed
        self.settle()
        if not well_formed:  # it is cut off for that
            self.leave(client)

    def _begin_chain(self, keys: list[bytes], here: frozenset[int]) -> Chain:
        return Chain(keys, here)

    def ask_how_many(
        self, client: int, blocks: Sequence[int], *, namespace: int = NAMESPACE
    ) -> None:
        """A client asks how many of these there are, counted from the first."""
        self._next += 1
        first, *rest = map(key_of, blocks)
        meaning = self.meaning if namespace == NAMESPACE else 0
        question = QUESTION.pack(EXISTS, namespace, 1000, self._next, first, meaning)
        self.say(client, question + b"".join(rest))

    def ask(self, client: int, block: int, *, deadline_ms: int = 1000) -> None:
        """A client asks for a block."""
        self._next += 1
        self.say(
            client,
            QUESTION.pack(GET, NAMESPACE, deadline_ms, self._next, key_of(block), self.meaning),
        )

    def ask_many(self, client: int, blocks: Sequence[int]) -> None:
        """A client asks for several at once."""
        self._next += 1
        first, *rest = map(key_of, blocks)
        question = QUESTION.pack(GET_MANY, NAMESPACE, 1000, self._next, first, self.meaning)
        self.say(client, question + b"".join(rest))

    def give_back(self, client: int, handle: int) -> None:
        """A client releases what it holds, or says so."""
        self.say(client, QUESTION.pack(RELEASE, 0, 0, handle, bytes(KEY_BYTES), 0))

    def give_up(self, client: int) -> None:
        """A client gives up the last of its questions."""
        for question in list(self.asked[client])[-1:]:
            self.sessions[client].handle(self.now, local.Release([], [question]))
            self.settle()
            assert question not in self.asked[client], "a question that was given up goes on"

    def receive(self, datagram: bytes, sender: int = HOME_IP) -> None:
        """A datagram comes."""
        self.core.requester.placement.place_bytes(
            datagram,
            lambda arrivals: self.core.placed(self.now, arrivals),
            lambda source, frame: self.core.receive(self.now, source, decode(frame)),
            sender=sender,
        )
        self.core.after_receiving(self.now)
        self._send_nothing()
        self.settle()

    def _send_nothing(self) -> None:
        self.core.answers_to_send(self.now, 64)
        for call in list(self.core.outbox.calls):
            call.ended(self.now, "unreachable")
        self.core.outbox.calls.clear()

    def hold(self, blocks: Sequence[int]) -> None:
        """A switch holds these blocks, and no others."""
        refs = [BlockRef(NAMESPACE, key_of(block)) for block in blocks]
        self.core.control_message(self.now, Residents(refs))

    def bring(self, block: int, *, flags: int = 0) -> None:
        """A READ for a block is answered, in order and whole, by DATA that all have these flags; it
        is cut as the courier has asked for it last, or as its home sends it."""
        asked = [read for read in map(decode, self.reads) if read.key == key_of(block)]
        code = self.core.pool.chunking.code if self.core.pool is not None else 0
        if asked:
            code = chunking_of(asked[-1].segment).code
        count = CHUNKINGS[code].chunks_of(len(content_of(block)), 0)
        for chunk in range(count):
            last = FLAG_LAST if chunk == count - 1 else 0
            self.receive(frame_of(block, chunk, code=code, flags=flags | last))

    def begin_conveyor(self) -> None:
        """There is a conveyor from HOME."""
        if self.conveyor is None:
            self.conveyor = self.courier.conveyor_stands(HOME)
            self.wanted = []

    def expect_large(self) -> None:
        """A large block was fetched: the next will be about as large."""
        self.courier.learn(self.now, BlockId(NAMESPACE, key_of(LARGE)), len(content_of(LARGE)))

    def end_conveyor(self) -> None:
        """The conveyor is gone."""
        if self.conveyor is not None:
            self.courier.conveyor_gone(self.now, self.conveyor)
            self.conveyor, self.wanted = None, []
            self.settle()

    def _hear_conveyor(self) -> None:
        if self.conveyor is not None:
            for wanted in requests_in(self.courier.requests_to_send(self.conveyor)):
                if isinstance(wanted, Wanted):
                    assert wanted.start in (0, SEGMENT_BYTES)
                    self.wanted.append(wanted)
                    continue
                number, namespace, keys = wanted
                chain = self._chain
                assert chain is not None
                assert chain.asked is None, "of a chain it is asked once"
                assert namespace == NAMESPACE, "clients may look up no other"
                assert keys == [chain.keys[place] for place in chain.elsewhere]
                chain.asked = len(keys)
                self.wanted.append((number, chain))
            if self.conveyor in self.courier.take_cut_off():
                self.courier.conveyor_gone(self.now, self.conveyor)
                self.conveyor, self.wanted = None, []

    def brought(self, data: bytes) -> None:
        """The conveyor brings something."""
        if self.conveyor is not None:
            self.courier.brought(self.conveyor, data, self.now)
            self.settle()

    def reply(self, *, spoil: int = 0, pieces: int = 1, counted: int = 0) -> None:
        """The home says what was asked for next; `spoil` 1: other bytes, 2: of another copy, 3: of
        another size, 4: it has nothing, 5: to another request, 6: what there is not, 7: to READ.
        `counted`: what it says of a chain."""
        if not self.wanted:
            return
        wanted = self.wanted.pop(0)
        if not isinstance(wanted, Wanted):
            self._reply_to_chain(*wanted, spoil=spoil, pieces=pieces, counted=counted)
            return
        (block,) = (n for n in range(BLOCKS) if key_of(n) == wanted.key)
        content = content_of(block)
        status = {4: NOT_HERE, 6: 9, 7: READ_IT}.get(spoil, GIVEN_HERE)
        header = REPLY.pack(
            wanted.number + (spoil == 5),
            digest_of(content) ^ (spoil == 2),
            len(content) + (spoil == 3),
            status,
        )
        rest = content[wanted.start :] + bytes(spoil == 3)
        if spoil == 1:
            rest = bytes(len(rest))
        said = header if status in (NOT_HERE, READ_IT) else header + rest
        self.conveyed += spoil == 0
        self._brought_in(pieces, said)

    def _brought_in(self, pieces: int, said: bytes) -> None:
        size = -(-len(said) // pieces)
        for at in range(0, len(said), size):
            self.brought(said[at : at + size])

    def _reply_to_chain(
        self, number: int, chain: Chain, *, spoil: int, pieces: int, counted: int
    ) -> None:
        """The home says how many it has, as `reply` does; `spoil` 1: more than it was asked about,
        2: many more, 3: their bytes follow."""
        assert chain.asked is not None
        count, certain = counted % (chain.asked + 1), counted & 1
        status = {3: GIVEN_HERE, 4: NOT_HERE, 6: 9, 7: READ_IT}.get(spoil, REPLY_COUNTED)
        if spoil in (1, 2):
            count = chain.asked + 1 if spoil == 1 else 0xFFFF_FFFF
        right = spoil in (0, 4)
        if right:
            chain.home_has, chain.certain = (0, False) if spoil == 4 else (count, bool(certain))
        self._brought_in(pieces, REPLY.pack(number + (spoil == 5), certain, count, status))
        assert right == (self.conveyor is not None), "who says such things is left"
        assert not right or all(chain not in each.values() for each in self.chains)

    def miss(self, block: int, *, flags: int = 0, another: int = 0, home: int = HOME_IP) -> None:
        """A home says that it has no such block, to the last READ; or to one of `another` tag."""
        frame = decode(self.reads[-1]) if self.reads else None
        tag = (frame.tag if frame is not None else 0) ^ another
        self.receive(
            encode(
                Frame(
                    *(OP_MISS, NAMESPACE, key_of(block)),
                    flags=flags,
                    chunk=MISS_NOT_FOUND,
                    tag=tag,
                )
            ),
            home,
        )

    def pass_time(self, seconds: float) -> None:
        """Time goes by, and what is due is done."""
        self.now += seconds
        self.courier.prepare(self.now)
        self.courier.lookups.expire(self.now)
        self.courier.expire(self.now)
        for node, datagram in self.courier.reads_to_send():
            frame = decode(datagram)
            assert node == HOME
            assert frame.flags == FLAG_PARTIAL
            assert 0 < frame.wanted < FULL_SEGMENT
            self.reads.append(datagram)
        self.settle()
        self.core.handle_timer(self.now)
        self._send_nothing()
        self.settle()

    def fetch(self, block: int) -> None:
        """Python fetches a block."""
        keys = [key_of(block)]
        self.core.reads.prefetch(self.now, NAMESPACE, keys, self.now + 0.5)
        self._send_nothing()
        self.settle()

    def put(self, block: int) -> None:
        """A block is put here."""
        content = content_of(block)
        try:
            copy = self.store.reserve(BlockId(NAMESPACE, key_of(block)), len(content))
        except StoreError:
            return
        self.memory[copy.offset : copy.offset + len(content)] = content
        self.store.commit(copy, digest_of(content), home=False)

    def leave(self, client: int) -> None:
        """A client goes, and another comes."""
        self.courier.leave(self.numbers[client])
        self.sessions[client].close()
        self.settle_without(client)
        for each in (self.sessions, self._regions, self.numbers, self.asked, self.held):
            each.pop(client)
        self.chains.pop(client)
        self._join()

    def settle_without(self, client: int) -> None:
        """As `settle`; nothing is for a client that has left."""
        self.courier.book(self.now)
        for number, answer in self.courier.take_answers():
            assert number != self.numbers[client], "an answer to a client that has left"
            self._told(self.numbers.index(number), answer)

    def end(self) -> None:
        """Everybody goes; AssertionError where something is still held then, or unanswered."""
        self.pass_time(0.2)
        for _ in range(MOST_REPAIRS + 1):
            self.pass_time(4.0)
        self.end_conveyor()
        assert not any(self.asked), f"without an answer: {self.asked}"
        self.courier.lookups.expire(self.now)
        self.settle()
        assert not any(self.chains), f"without an answer: {self.chains}"
        for client in range(2):
            for handle in self.held[client]:
                self._look(client, handle)
        for number, session in zip(self.numbers, self.sessions, strict=True):
            self.courier.leave(number)
            session.close()
        self.held = [{}, {}]
        assert not self.courier.in_flight
        assert not self.courier.lookups.native.in_flight
        self.courier.give_room_back()
        self.pass_time(10.0)
        check_store(self.store)
        assert not any(self.courier.fetching), "what Python fetches is counted wrongly"


@entry_point(
    "courier",
    "what clients say to the courier, nodes to its questions, and homes on conveyors",
    core_courier,
)
class CourierHarness(Harness):
    """Steps of three bytes: which, of whom or what, and how; some take what follows, too."""

    def corpus(self) -> list[bytes]:
        whole = bytes([6, 1, 0]) + bytes([9, 1, 0]) + bytes([1, 0, 2]) + bytes([8, 2, 0])
        both = bytes([1, 0, 3]) + bytes([1, 1, 3]) + bytes([8, 3, 0]) + bytes([4, 0, 1])
        data = b"".join(bytes([2, 2, chunk]) for chunk in range(30))
        raw = bytes([0, 0, QUESTION.size]) + QUESTION.pack(GET, 1, 9, 9, key_of(5), 0)
        frame = frame_of(3, 0)
        datagram = bytes([3, len(frame) >> 8, len(frame) & 255]) + frame
        first = bytes([14, 0, 0]) + bytes([14, 0, 90])
        ask = bytes([1, 0, 13]) + bytes([15, 0, 1]) + bytes([8, 13, 0])
        large = first + ask + bytes([12, 0, 4]) + bytes([1, 1, 14, 8, 14, 0, 15, 0, 2])
        wrong = bytes([1, 0, 15, 15, 0, 3, 8, 15, 0])
        many = bytes([6, 1, 0, 9, 1, 0, 14, 0, 90, 15, 6, 130, 8, 2, 0]) + bytes([12, 0, 3]) * 7
        conveyed = [many, large + bytes([13, 1, 1]), first + wrong + bytes([13, 0, 5])]
        chain = bytes([7, 3, 0]) + first + bytes([16, 6, 0, 12, 7, 2, 16, 6, 0, 13, 3, 1])
        chains = bytes([14, 0, 90, 16, 40, 2]) + ask + bytes([12, 9, 2, 16, 6, 255, 14, 0, 150])
        longest = QUESTION.pack(EXISTS, 1, 9, 9, key_of(5), 0) + key_of(6) * 7
        conveyed += [chain, chains, bytes([14, 0, 90, 0, 0, len(longest)]) + longest]
        small = [whole, whole + both, whole + bytes([1, 0, 2]) + data, whole + raw + datagram]
        return [*conveyed, *small]

    def run(self, data: bytes) -> None:
        stand = Stand()
        at = 0
        while at + _STEP.size <= len(data):
            step, what, how = _STEP.unpack_from(data, at)
            at += _STEP.size
            client, block = what % 2, how % BLOCKS
            match step % 17:
                case 0:
                    stand.say(client, data[at : at + how])
                    at += how
                case 1:
                    stand.ask(client, block, deadline_ms=1000 if what < 200 else what - 200)
                case 2:
                    chunk, spoil = how % 64, how // 64 % 3
                    if chunk * 1024 < len(content_of(what % BLOCKS)):
                        flags = FLAG_SHARED if what > 200 else FLAG_LAST if what > 128 else 0
                        stand.receive(
                            frame_of(what % BLOCKS, chunk, flags=flags, spoil=spoil),
                            HOME_IP + what // 64 % 2,
                        )
                case 3:
                    length = (what << 8 | how) % (HEADER_BYTES + 2048)
                    stand.receive(data[at : at + length])
                    at += length
                case 4 if what >= 128:
                    stand.give_up(client)
                case 4:
                    held = list(stand.held[client])
                    stand.give_back(client, held[how % len(held)] if held else how)
                case 5:
                    stand.pass_time(how / 1000)
                case 6:
                    stand.fetch(what % BLOCKS)
                case 7:
                    stand.put(what % BLOCKS)
                case 8:
                    stand.bring(what % BLOCKS)
                case 9:
                    stand.bring(what % BLOCKS)
                    stand.store.drop(BlockId(NAMESPACE, key_of(what % BLOCKS)))
                case 10:
                    stand.leave(client)
                case 12:
                    stand.begin_conveyor()
                    stand.reply(pieces=1 + how % 7, counted=what)
                case 13:
                    stand.reply(spoil=how % 8, pieces=1 + what % 5, counted=what)
                case 14:
                    if how < 50:
                        stand.expect_large()
                    elif how < 100:
                        stand.begin_conveyor()
                    elif how < 200:
                        stand.end_conveyor()
                    else:
                        stand.brought(data[at : at + what])
                        at += what
                case 15 if how >= 128:
                    count = 2 + what % 12
                    step_by = 1 + what // 64
                    stand.ask_many(client, [(how + n * step_by) % BLOCKS for n in range(count)])
                case 15:
                    stand.receive(offer_of(LARGE + how % (BLOCKS - LARGE)))
                case 16:
                    count = MAX_CHAIN + how % 2 if what > 250 else 1 + what // 2 % 32
                    blocks = [(how + n) % BLOCKS for n in range(count)]
                    stand.ask_how_many(client, blocks, namespace=NAMESPACE + how // 250)
                case _:
                    if how < 200:
                        shared_too = FLAG_SHARED if how > 100 else 0
                        stand.miss(what % BLOCKS, flags=shared_too, home=HOME_IP + what // 64 % 2)
                    elif how < 230:
                        stand.sessions[client].handle(
                            stand.now,
                            local.Get(how, NAMESPACE, [key_of(what % BLOCKS)], 0.1),
                        )
                        stand.settle()
                    elif how < 245:
                        stand.hold([block for block in range(BLOCKS) if what >> block % 8 & 1])
                    else:
                        homes = (HOME, HOME + 1) if what > 128 else (HOME,)
                        chunking = CHUNKINGS[what % len(CHUNKINGS)]
                        stand.new_map(version=str(what), homes=homes, chunking=chunking)
                        stand.settle()
        stand.end()
