"""The simulated client: an engine that puts, reads and lets go, through the agent's local API.

Owns: what a client does with the answers, and telling the model of all of it. Must not know: what
is right (`model.py`). It talks to the real `Session`, and reads and writes the arena in
place. What its host holds it finds and pins itself, by the client library's own `LocalBlocks`;
some pins it writes late, when what they name may be gone, as a client does that was stopped in the
middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from kvcast.hostagent.client.local_blocks import Found, LocalBlocks
from kvcast.hostagent.core.access import ALL_TENANTS
from kvcast.hostagent.core.sessions import Session
from kvcast.hostagent.core.writes import ACK_LOCAL
from kvcast.protocol.messages import local, shared
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.questions import (
    ACKS,
    ANSWER,
    COUNTED,
    EXISTS,
    FIRST_HANDLE,
    GET,
    GET_MANY,
    GIVEN,
    MAX_MANY,
    PUT,
    PUT_HOME,
    PUT_QUESTION,
    QUESTION,
    RELEASE,
    ROOM,
    TIERS,
)
from kvcast.protocol.messages.wire import KEY_BYTES, BlockId
from kvcast.protocol.requester.events import MissReason
from kvcast.simulation.model import Model, Name, ViolationError
from kvcast.simulation.plan import PARTS

if TYPE_CHECKING:
    from kvcast.simulation.agent import SimAgent
    from kvcast.simulation.namespaces import Operator

PUT_BOUND_S: Final = 8.0
"""By when a put ends: the homes' time-outs one after the other, and more."""

PATIENT_S: Final = 3.0
"""A get that waits less may miss a block because of a few time-outs."""

_FINDS_AGAIN: Final = 0.6
"""How often a client that hears that a namespace is not known asks for it by what it stands for."""

_HOLDS_LONG: Final = 0.3
"""How often a client that may outlive its agent holds what it gets for long."""

_LATE_PINS: Final = 0.1
"""How often a client that lets go of a block pins it once more, too late."""

Owed = Callable[[int, Name], frozenset[tuple[int, int]]]
"""(reader, name): the copies, by host and identity, of which one must be readable now, and counted
by `exists`; none if nothing is owed."""


_HANDED_OVER: Final = local.GotBlock("handed_over")
"""What the courier has left to the agent."""


class _Room(NamedTuple):
    """What a client was given to write, and has written."""

    name: Name
    content: bytes
    ticket: int


class Client:
    """One client of one life of an agent."""

    def __init__(
        self,
        agent: SimAgent,
        model: Model,
        owed: Owed,
        before: Callable[[Name], tuple[bytes, int]],
        operator: Operator,
    ) -> None:
        """`before`: which block is before another in its prefix, and how many are; `operator`: who
        may delete namespaces."""
        self._operator = operator
        self._numbers: dict[int, int] = {}
        """By number of the plan, what this client was told to stand for it, if it has asked."""
        self._finding: set[int] = set()
        self.agent = agent
        self._host = agent.host
        self._model = model
        self._owed = owed
        self._before = before
        self.keeps = agent.host.options.keeps
        """Whether it goes on with the agent that comes after."""
        self.number = first = 0
        if self.keeps:
            agent.host.clients += 1
            self.number = agent.host.clients
            first = agent.rng.getrandbits(30) << 32
        self._lives = 0
        """How many agents it has come back to."""
        self._held: set[int] = set()
        """Handles and tickets that an agent holds for it, as `Conversation` knows them."""
        self._questions: dict[int, local.Request] = {}
        """Those without an answer."""
        self._session = Session(
            agent.core, self._replied, number=self.number, first_handle=first | 1
        )
        self._pins = memoryview(bytearray(shared.REGION_BYTES))
        self._session.share(self._pins, self._cut_off)
        self._words = self._pins.cast("Q")
        self._local = LocalBlocks(
            agent.host.index,
            agent.host.index.cast("Q"),
            self._words,
            arena_bytes=agent.host.options.arena_bytes,
            max_bytes=self._session.max_pinned_bytes,
        )
        self._rng = agent.host.world.stream(f"pins/{agent.host.number}/{agent.host.lives}")
        self._holds = agent.host.world.stream(f"holds/{agent.host.number}/{agent.host.lives}")
        self._finds = agent.host.world.stream(f"finds/{agent.host.number}/{agent.host.lives}")
        self._waiting: dict[int, Callable[[local.AgentReply], None]] = {}
        self._next = 1
        self._asked_courier: dict[int, Callable[[local.Got | None], None]] = {}
        self._asked_to_put: dict[int, Callable[[list[local.PutBlock | None]], None]] = {}
        self._asked_how_many: dict[int, Callable[[int, bool], None]] = {}
        self._courier: int | None = None
        self._join_courier()
        self.closed = False
        self.outlives = False
        """Whether it goes on although its agent dies now."""
        agent.on_death.append(self._died)
        if self.keeps:
            agent.host.survivors[self.number] = self._pins

    def _join_courier(self) -> None:
        agent = self.agent
        self._courier = None
        if agent.courier is not None:
            self._courier = agent.courier.join(self._session)
            if self._courier is not None:
                agent.courier_told[self._courier] = self._courier_told

    def resume(self, agent: SimAgent) -> None:
        """Go on with the agent that has come after; all that has no answer is asked again."""
        host = self._host
        host.world.counts["clients_resumed"] += 1
        host.world.counts["clients_resumed_holding"] += bool(self._held)
        self.agent = agent
        self._lives += 1
        agent.on_death.append(self._died)
        self._session = agent.waiting_sessions.pop(self.number)
        self._session.resume(self._replied, ALL_TENANTS, self._cut_off, list(self._held))
        self._join_courier()
        self._local.resumed()
        self._model.asked_again(host.number)
        questions = list(self._questions.items())
        for _, request in questions:
            self._session.handle(agent.now, request)
        agent.pump()
        asked, self._asked_courier = self._asked_courier, {}
        for told in asked.values():
            told(None)
        put, self._asked_to_put = self._asked_to_put, {}
        for was_put in put.values():
            was_put([None])

    @property
    def asks(self) -> bool:
        """Whether it waits for an answer."""
        return bool(self._waiting or self._asked_courier or self._asked_to_put)

    def _cut_off(self, reason: str) -> None:
        raise ViolationError(0, f"host {self._host.number} cut an honest client off: {reason}")

    def _died(self) -> None:
        if self.closed:
            return
        if self.outlives:
            self.outlives = False
            self._model.orphaned(self._host.number)
        else:
            self._model.voided(self._host.number)

    def _whenever(self, action: Callable[[], None]) -> None:
        """Do what needs no agent, now or when the process runs again; without the agent that it
        went with, only a client that outlives it does."""
        if self.agent.dead and self.keeps and not self.closed:
            action()
        else:
            self._host.when_running(self.agent, action)

    def _replied(self, reply: local.AgentReply) -> None:
        if not self.agent.dead:
            assert not isinstance(reply, local.Welcome | local.Rejected)
            self._questions.pop(reply.request, None)
            self._held.update(_given_by(reply))
            self._waiting.pop(reply.request)(reply)

    def _ask(
        self, request: local.Request, number: int, then: Callable[[local.AgentReply], None]
    ) -> None:
        self._waiting[number] = then
        if self.keeps:
            self._questions[number] = request
        if not self.agent.dead:
            self._session.handle(self.agent.now, request)
            self.agent.pump()

    def _number(self) -> int:
        self._next += 1
        return self._next

    # --- namespaces -------------------------------------------------------------------------

    def known(self, name: Name) -> Name:
        """A block of the plan, as this client names it."""
        return self._numbers.get(name[0], name[0]), name[1]

    def _is_unknown(self, number: int) -> None:
        """The agent does not know a namespace: find it by what it stands for, as engines do."""
        planned = self._operator.planned(number)
        if not self._operator.acts or planned in self._finding or planned not in PARTS:
            return
        if self._finds.random() >= _FINDS_AGAIN:
            return
        self._finding.add(planned)
        request = self._number()

        def found(reply: local.AgentReply) -> None:
            self._finding.discard(planned)
            if isinstance(reply, local.FoundNamespace):
                self._host.world.counts["namespaces_found_again"] += 1
                self._numbers[planned] = reply.info.namespace
                self._local.told(reply.info.namespace, meaning_of(reply.info))

        self._ask(local.FindNamespace(request, *PARTS[planned]), request, found)

    # --- gets -------------------------------------------------------------------------------

    def get(
        self,
        names: list[Name],
        deadline_s: float,
        *,
        hold_s: float,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
        gives_up_s: float | None = None,
        then: Callable[[Name, bool], None] | None = None,
    ) -> None:
        """Get blocks of one namespace, look at their bytes, hold them for a while, look again. Or
        wait no longer than `gives_up_s` for what the agent itself was asked for."""
        host, model = self._host, self._model
        namespace = names[0][0]
        due = host.world.now + deadline_s / host.options.clock_rate
        patient = deadline_s >= PATIENT_S and gives_up_s is None
        tokens = [
            model.begins(
                host.number,
                name,
                "get",
                due,
                self._owed(host.number, name) if patient else frozenset(),
                alone=len(names) == 1,
            )
            for name in names
        ]
        if self.keeps and self._holds.random() < _HOLDS_LONG:
            hold_s = self._holds.uniform(0.3, 3.0)
        gone = self._operator.is_gone(self.agent, namespace)
        keys = [key for _, key in names]
        asked: list[tuple[Name, int]] = []
        here = self._local.take(namespace, keys)
        for name, token, found in zip(names, tokens, here, strict=True):
            if found is None:
                asked.append((name, token))
            else:
                world = host.world
                world.counts["get.without_a_message"] += 1
                self._take(name, token, _as_got(found), hold_s, found, gone=gone)
                if then is not None:
                    then(name, True)
        if not asked:
            return
        number = self._number()
        numbers = [number]

        gave_up = False

        def give_up() -> None:
            nonlocal gave_up
            if not self.closed:
                gave_up = True
                self._session.handle(self.agent.now, local.Release([], numbers))
                self.agent.pump()

        if gives_up_s is not None:
            host.world.after(gives_up_s, lambda: host.when_running(self.agent, give_up))

        def answered(reply: local.AgentReply) -> None:
            blocks: list[local.GotBlock]
            if isinstance(reply, local.Got):
                blocks = reply.blocks
            else:
                assert isinstance(reply, local.Failed), reply
                blocks = [local.GotBlock(reply.status, reply.reason)] * len(asked)
            for (name, token), block in zip(asked, blocks, strict=True):
                self._take(name, token, block, hold_s, None, gone=gone)
                if then is not None:
                    then(name, block.status == local.OK)

        keys = [key for (_, key), _ in asked]
        request = local.Get(
            *(number, namespace, keys, deadline_s, gather_ms, group, expect),
            *self._places([name for name, _ in asked]),
        )
        meaning = self._local.meaning(namespace)
        few = len(keys) <= MAX_MANY and not (gather_ms or group or expect)
        if self._courier is None or not few or meaning is None:
            self._ask(request, number, answered)
            return

        def partly(by_courier: local.Got) -> None:
            """Ask the agent for what the courier has left to it."""
            blocks = by_courier.blocks
            places = [at for at, block in enumerate(blocks) if block.status == _HANDED_OVER.status]
            if gave_up:
                for at in places:
                    blocks[at] = local.GotBlock(local.MISS, MissReason.GIVEN_UP.value)
            if gave_up or not places:
                answered(by_courier)
                return
            rest = self._number()
            numbers.append(rest)
            left_s = max(0.0, deadline_s - (self.agent.now - began))

            def merged(reply: local.AgentReply) -> None:
                if isinstance(reply, local.Got):
                    came = reply.blocks
                else:
                    assert isinstance(reply, local.Failed), reply
                    came = [local.GotBlock(reply.status, reply.reason)] * len(places)
                for at, block in zip(places, came, strict=True):
                    blocks[at] = block
                answered(local.Got(number, blocks))

            wanted = [keys[at] for at in places]
            self._ask(local.Get(rest, namespace, wanted, left_s), rest, merged)

        def told(by_courier: local.Got | None) -> None:
            if by_courier is None and gave_up:
                by_courier = local.Got(number, [_HANDED_OVER] * len(keys))
            if by_courier is not None:
                partly(by_courier)
                return
            left_s = max(0.0, deadline_s - (self.agent.now - began))
            self._ask(msgspec.structs.replace(request, deadline_s=left_s), number, answered)

        self._asked_courier[number] = told
        began = self.agent.now
        kind = GET if len(keys) == 1 else GET_MANY
        question = QUESTION.pack(kind, namespace, int(deadline_s * 1000), number, keys[0], meaning)
        self.agent.ask_courier(self._courier, question + b"".join(keys[1:]))

    def _courier_told(self, answer: bytes) -> None:
        blocks = []
        number: int = ANSWER.unpack_from(answer)[3]
        if number in self._asked_to_put:
            self._was_put(number, answer)
            return
        if number in self._asked_how_many:
            status, more, _, _, _, _, count, _ = ANSWER.unpack(answer)
            counted = self._asked_how_many.pop(number)
            if not self.closed:
                counted(count, status != COUNTED or more != 0)
            return
        for status, tier, _, _, *found in ANSWER.iter_unpack(answer):
            if status == GIVEN:
                self._host.world.counts["get.by_the_courier"] += 1
                self._host.world.counts["kept.get_by_the_courier"] += self._lives > 0
                self._held.add(found[0])
                blocks.append(local.GotBlock(local.OK, "", TIERS[tier], *found))
            else:
                blocks.append(_HANDED_OVER)
        then = self._asked_courier.pop(number)
        if not self.closed:
            refused = all(block is _HANDED_OVER for block in blocks)
            then(None if refused else local.Got(number, blocks))

    def _take(
        self,
        name: Name,
        token: int,
        block: local.GotBlock,
        hold_s: float,
        found: Found | None,
        *,
        gone: bool,
    ) -> None:
        host, model, world = self._host, self._model, self._host.world
        request = model.ends(token)
        world.counts[f"get.{block.status}"] += 1
        world.note(128 + host.number, f"{name[0]} {name[1].hex()} {block.status}".encode())
        if block.status != local.OK:
            if block.reason:
                world.counts[f"miss.{block.reason}"] += 1
            if block.status == local.UNKNOWN_NAMESPACE:
                self._is_unknown(name[0])
            still = self._owed(host.number, name) & request.held
            if block.status == local.MISS and still:
                raise ViolationError(
                    3,
                    f"host {host.number} was told that {name[0]}/{name[1].hex()} is not to be had "
                    f"({block.reason}), which host {min(still)[0]} acknowledged and holds",
                )
            return
        content = self._bytes(block)
        model.got(host.number, name, content, block.tier, gone=gone)

        def look_again() -> None:
            if self.closed:
                return
            if self._bytes(block) != content:
                raise ViolationError(
                    1, f"bytes that host {host.number} holds of {name[1].hex()} have changed"
                )
            if found is None:
                self._held.discard(block.handle)
                if self.agent.dead:
                    world.counts["kept.released_without_an_agent"] += 1
                    return  # the one that comes after hears of it by what is still held
            if found is None and block.handle >= FIRST_HANDLE and self._courier is not None:
                release = QUESTION.pack(RELEASE, 0, 0, block.handle, bytes(KEY_BYTES), 0)
                self.agent.ask_courier(self._courier, release)
                return
            if found is None:
                self._session.handle(self.agent.now, local.Release([block.handle]))
                self.agent.pump()
                return
            cell = self._words[shared.CELLS_WORD + found.pin]
            self._local.release(found.pin, found.reserved_bytes)
            if self._rng.random() < _LATE_PINS:
                self._pin_late(cell)

        world.after(hold_s, lambda: self._whenever(look_again))

    def _pin_late(self, cell: int) -> None:
        """Write a pin of what was found a while ago, look (it is gone, or may be: a client would
        look at the index again), and take it back later."""
        at = shared.CELLS_WORD + shared.PIN_CELLS - 1

        def write(value: int) -> None:
            if not self.closed:
                self._words[shared.CELLS_USED_WORD] = shared.PIN_CELLS
                self._words[at] = value

        world = self._host.world
        world.counts["fault.late_pin"] += 1
        world.after(self._rng.uniform(0.0, 2.0), lambda: write(cell))
        world.after(2.0 + self._rng.uniform(0.0, 1.0), lambda: write(0))

    def _bytes(self, block: local.GotBlock) -> bytes:
        return bytes(self._host.memory[block.offset : block.offset + block.size_bytes])

    # --- puts -------------------------------------------------------------------------------

    def put(
        self,
        name: Name,
        content: bytes,
        *,
        give_up: bool = False,
        then: Callable[[str], None] | None = None,
    ) -> None:
        """Put a block; `give_up`: write half of it, and never commit."""
        self._put([name], [content], "", give_up=give_up, then=then)

    def put_many(self, names: list[Name], contents: list[bytes], ack: local.PutAck) -> None:
        """Put blocks of one namespace together; `ack` as `local.Commit` has it."""
        self._put(names, contents, ack)

    def _put(
        self,
        names: list[Name],
        contents: list[bytes],
        ack: local.PutAck,
        *,
        give_up: bool = False,
        then: Callable[[str], None] | None = None,
    ) -> None:
        number = self._number()
        world = self._host.world

        def allocated(reply: local.AgentReply) -> None:
            if isinstance(reply, local.Failed):
                world.counts[f"put.{reply.status}"] += len(names)
                if reply.status == local.UNKNOWN_NAMESPACE:
                    self._is_unknown(names[0][0])
                return
            assert isinstance(reply, local.Allocated)
            rooms = []
            for name, content, extent in zip(names, contents, reply.extents, strict=True):
                if extent.status != local.OK:
                    world.counts[f"put.{extent.status}"] += 1
                    continue
                length = len(content) // 2 if give_up else len(content)
                self._host.memory[extent.offset : extent.offset + length] = content[:length]
                rooms.append(_Room(name, content, extent.ticket))
            if rooms and not give_up:
                self._commit(rooms, ack, then)

        alloc = local.Alloc(
            *(number, names[0][0], [key for _, key in names], list(map(len, contents))),
            *self._places(names),
        )
        self._ask(alloc, number, allocated)

    def _commit(
        self, rooms: list[_Room], ack: local.PutAck, then: Callable[[str], None] | None
    ) -> None:
        host, model, world = self._host, self._model, self._host.world
        for name, content, _ in rooms:
            model.put_begins(name, content)
        due = world.now + PUT_BOUND_S
        tokens = {
            room.ticket: model.begins(host.number, room.name, "put", due, frozenset())
            for room in rooms
        }
        core = self.agent.core
        sure = (ack or core.options.writes.put_ack) != ACK_LOCAL

        def ended(rooms: list[_Room], reply: local.AgentReply) -> None:
            if isinstance(reply, local.Failed):
                blocks = [local.PutBlock(reply.status)] * len(rooms)
            else:
                assert isinstance(reply, local.Committed)
                blocks = reply.blocks
            for room, result in zip(rooms, blocks, strict=True):
                self._held.discard(room.ticket)
                model.ends(tokens[room.ticket])
                world.counts[f"put.{result.status}"] += 1
                ok = result.status == local.OK
                model.put_ended(
                    *(host.number, room.name, ok and sure),
                    copies=result.copies if ok else 0,
                    digest=result.digest if ok else 0,
                )
                if then is not None and not isinstance(reply, local.Failed):
                    then(result.status)

        def is_home(room: _Room) -> bool:
            core = self.agent.core
            return core.pool is not None and core.pool.is_home(BlockId(*room.name))

        def at_home(rooms: list[_Room]) -> None:
            """What a commit does here makes this host one of those that have the block."""
            for room in rooms:
                if is_home(room):
                    model.acknowledged(host.number, host.memory_lives, room.name)

        def by_a_message(rooms: list[_Room]) -> None:
            at_home(rooms)
            number, life = self._number(), self._lives
            tickets = [room.ticket for room in rooms]

            def committed(reply: local.AgentReply) -> None:
                host.committing.remove(told)
                if self._lives != life and isinstance(reply, local.Committed):
                    at_home(rooms)  # another agent has done it, by a later map
                ended(rooms, reply)
                if self.keeps and (self._lives != life or isinstance(reply, local.Failed)):
                    # They were named to an agent that came after, perhaps as not put yet.
                    abort = self._number()
                    self._ask(local.Abort(abort, tickets), abort, _ignore)

            def told() -> None:
                if not self.closed:
                    at_home(rooms)

            host.committing.append(told)
            self._ask(local.Commit(number, tickets, ack), number, committed)

        namespace, key = rooms[0].name
        meaning = self._local.meaning(namespace)
        if self._courier is None or meaning is None:
            by_a_message(rooms)
            return
        was_home = set(filter(is_home, rooms))

        def by_the_courier(put: list[local.PutBlock | None]) -> None:
            if len(put) != len(rooms) and put != [None]:
                raise ViolationError(2, f"{len(rooms)} blocks were put, and {len(put)} answered")
            if len(put) < len(rooms):
                put = [None] * len(rooms)
            left = []
            for room, result in zip(rooms, put, strict=True):
                if result is None:
                    left.append(room)
                    continue
                if room in was_home or is_home(room):
                    model.acknowledged(host.number, host.memory_lives, room.name)
                ended([room], local.Committed(number, [result]))
            if left:
                by_a_message(left)

        number = self._number()
        self._asked_to_put[number] = by_the_courier
        question = PUT_QUESTION.pack(
            *(PUT, namespace, ACKS.index(ack), number, key, meaning, rooms[0].ticket)
        )
        further = b"".join(ROOM.pack(room.name[1], room.ticket) for room in rooms[1:])
        self.agent.ask_courier(self._courier, question + further)

    def _was_put(self, number: int, answer: bytes) -> None:
        """The courier's answer to a put."""
        then = self._asked_to_put.pop(number)
        if self.closed:
            return
        put: list[local.PutBlock | None] = []
        for status, _, _, of, _, _, copies, digest in ANSWER.iter_unpack(answer):
            if status != PUT_HOME:
                put.append(None)
                continue
            if of != number:
                raise ViolationError(2, f"host {self._host.number}: answers of two puts are one")
            put.append(local.PutBlock(local.OK, copies, digest))
        counts = self._host.world.counts
        counts["kept.put_by_the_courier"] += (len(put) - put.count(None)) * (self._lives > 0)
        counts["put.by_the_courier"] += len(put) - put.count(None)
        counts["put.together_by_the_courier"] += (len(put) - put.count(None)) * (len(put) > 1)
        then(put)

    # --- the rest ---------------------------------------------------------------------------

    def prefetch(self, names: list[Name], deadline_s: float) -> None:
        """Have blocks fetched that nobody waits for."""
        number = self._number()
        keys = [key for _, key in names]
        parents, depths = self._places(names)
        prefetch = local.Prefetch(
            *(number, names[0][0], keys, deadline_s), parents=parents, depths=depths
        )
        self._ask(prefetch, number, _ignore)

    def _places(self, names: list[Name]) -> tuple[list[bytes], list[int]]:
        """The keys before these in their prefix, and how many are before each."""
        before = [self._before(name) for name in names]
        return [parent for parent, _ in before], [depth for _, depth in before]

    def exists(self, names: list[Name]) -> None:
        """Ask how long a prefix the pool holds."""
        host, model = self._host, self._model
        keys = [key for _, key in names]
        namespace = names[0][0]
        owed = [self._owed(host.number, name) for name in names]

        def told(count: int) -> None:
            """So many are there, and certainly no more."""
            model.exist(host.number, names[:count])
            if count == len(names):
                return
            still = owed[count] & self._owed(host.number, names[count])
            if still:
                raise ViolationError(
                    3,
                    f"host {host.number} was told that {namespace}/{keys[count].hex()} is not "
                    f"there, which host {min(still)[0]} acknowledged and holds",
                )

        here = self._local.prefix(namespace, b"".join(keys))
        if here == len(names):
            told(here)
            return
        token = model.begins(host.number, names[0], "exists", host.world.now + 10.0, frozenset())

        def ask_agent(here: int) -> None:
            model.exist(host.number, names[:here])

            def answered(reply: local.AgentReply) -> None:
                model.ends(token)
                if isinstance(reply, local.Ack):
                    told(here + reply.count)

            number = self._number()
            self._ask(local.Exists(number, namespace, b"".join(keys[here:]), 1.0), number, answered)

        def counted(count: int, more: bool) -> None:
            host.world.counts["exists.by_the_courier"] += not more
            if more:
                ask_agent(here + count)
            else:
                told(here + count)
                model.ends(token)

        meaning = self._local.meaning(namespace)
        if self._courier is None or meaning is None:
            ask_agent(here)
            return
        number = self._number()
        self._asked_how_many[number] = counted
        question = QUESTION.pack(EXISTS, namespace, 1000, number, keys[here], meaning)
        self.agent.ask_courier(self._courier, question + b"".join(keys[here + 1 :]))

    def drop(self, name: Name) -> None:
        """Have the pool forget a block."""
        number = self._number()
        self._model.dropped(name)
        self._ask(local.Drop(number, name[0], [name[1]]), number, _ignore)

    def find_group(
        self,
        namespace: int,
        hosts: list[str],
        then: Callable[[int], None],
        at: int | None = None,
    ) -> None:
        """Make a reader group of these hosts, or, `at` that place, of whoever reads just now."""
        number = self._number()

        def found(reply: local.AgentReply) -> None:
            if isinstance(reply, local.FoundGroup):
                then(reply.info.group)

        self._ask(local.FindGroup(number, namespace, hosts, at), number, found)

    def close(self) -> None:
        """Disconnect, and leave whatever is held to the agent."""
        self.closed = True
        self._host.survivors.pop(self.number, None)
        if self._courier is not None:
            assert self.agent.courier is not None
            self.agent.courier.leave(self._courier)
            del self.agent.courier_told[self._courier]
        self._session.close()


def _as_got(found: Found) -> local.GotBlock:
    return local.GotBlock(local.OK, "", "local", 0, found.offset, found.size_bytes, found.digest)


def _given_by(reply: local.AgentReply) -> list[int]:
    """Handles and tickets that an answer gives."""
    if isinstance(reply, local.Got):
        return [got.handle for got in reply.blocks if got.status == local.OK]
    if isinstance(reply, local.Allocated):
        return [extent.ticket for extent in reply.extents if extent.status == local.OK]
    return []


def _ignore(_reply: local.AgentReply) -> None:
    pass
