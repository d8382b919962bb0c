"""What a client says to its agent and what the answers mean, for both clients, without I/O.

Owns: the handshake, every call (a generator of questions that is sent their answers and returns the
call's result), what is answered without a question (`local_blocks`), batches of keys and of bytes,
and that a call which fails leaves nothing held. Must not know: sockets, threads, event loops
(`blocking` and `asynchronous` are those), or anything of the agent but the local API
(`kvcast.protocol.messages.local`).

A driver encodes and sends each `Ask`, and sends the generator the reply of the same number; where
none comes it closes the generator, which undoes what it can. What needs no answer is given to
`post`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeAlias, TypeVar, cast

import msgspec
from kvcast.hostagent import membarrier
from kvcast.hostagent.client.blocks import Arena, Block, Buffer, Outcome, Reservation
from kvcast.hostagent.client.errors import (
    ERROR_BY_STATUS,
    AgentGoneError,
    AgentRejectedError,
    KvcastError,
    PutError,
)
from kvcast.hostagent.client.local_blocks import LocalBlocks, map_shared
from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.messages import local
from kvcast.protocol.messages.bulk import meaning_of
from kvcast.protocol.messages.framing import FramingError, MessageCodec
from kvcast.protocol.messages.local import LOCAL_PROTOCOL_VERSION, MAX_KEYS, MAX_LOCAL_MESSAGE_BYTES
from kvcast.protocol.messages.questions import (
    ACKS,
    ANSWER,
    ASK_AGENT,
    COUNTED,
    EXISTS,
    FIRST_HANDLE,
    GET,
    GET_MANY,
    GIVEN,
    HANDLE,
    MAX_CHAIN,
    MAX_DEADLINE_MS,
    MAX_MANY,
    PUT,
    PUT_HOME,
    PUT_QUESTION,
    QUESTION,
    RELEASE,
    ROOM,
    TIERS,
)
from kvcast.protocol.messages.shared import NAMESPACES
from kvcast.protocol.messages.wire import KEY_BYTES

READ_BYTES: Final = 256 * 1024
"""How much a driver reads at once."""
PUT_BATCH_BYTES: Final = 16 << 20
PUT_BATCH_SHARE: Final = 8
"""A put writes this many bytes, or an eighth of the arena, before it commits them, so that a large
put needs no large part of the arena at once."""
GRACE_S: Final = 5.0
"""Beyond a request's own deadline, how long the agent may take to answer."""
SLOW_REQUEST_S: Final = 60.0
"""How long the agent may take to answer requests without a deadline of their own."""
MOST_PARTS: Final = 64
"""Questions of one get whose results are taken as they come."""
FREE_REFUSALS: Final = 4
"""Gets of a namespace that the courier may hand over, one after the other, and yet be asked for the
next: it learns from them."""
MOST_PASSES: Final = 64
"""Gets that pass it by, at most, after one more that it has handed over."""
SMALL_BYTES: Final = 256 * 1024
"""Blocks up to this size may wait for others before the agent hears that they were released: a
message of its own costs more than their room."""
RECONNECT_S: Final = 60.0
"""How long an agent that comes after is waited for, where calls have no shorter deadline."""
RETRY_S: Final = 0.005
MAX_RETRY_S: Final = 0.25
"""Between two attempts to connect to it: at first, and at most."""
_MAX_NAME_CHARS: Final = 256


class Ask(msgspec.Struct, frozen=True):
    """A question to the agent, and how long its answer may take."""

    request: local.Numbered
    patience_s: float
    courier: bytes = b""
    """The same for the courier, which may be asked first; `heard_of_courier` hears the answer."""
    about: int = 0
    """The namespace of such a question, or of a put or an exists `_puts_to` or `_looks_in` it."""


class _Counted(local.Ack, frozen=True, tag="counted"):
    """What the courier has counted, where only the agent knows of the blocks behind those."""


class _Given(local.Got, frozen=True, tag="given"):
    """What the courier has given: an ANSWER for each key, as it was said, and no `blocks`. Of a
    hundred blocks that come together an object more for each would take longer than all else."""

    answers: bytes
    are_given: list[bool]
    """Of each key, whether its block is; empty where all are."""

    def words(self, at: int) -> list[int]:
        """The `at`th words of those answers that give a block."""
        words = _words(self.answers, at)
        return list(itertools.compress(words, self.are_given)) if self.are_given else words


def _halves(answers: bytes, at: int) -> list[int]:
    """The `at`th 16 bits of each ANSWER."""
    return memoryview(answers).cast("H")[at :: ANSWER.size // 2].tolist()


def _words(answers: bytes, at: int) -> list[int]:
    """The `at`th 64 bits of each ANSWER."""
    return memoryview(answers).cast("Q")[at :: ANSWER.size // 8].tolist()


@dataclass(frozen=True, slots=True)
class Part:
    """Some keys of a get, and where they stand in it."""

    ask: Ask
    places: list[int]
    keys: list[bytes]


_HANDED_OVER: Final = Outcome(None, "handed_over", "")
"""What the courier has left to the agent,"""
_NOT_PUT: Final = local.PutBlock(_HANDED_OVER.status)
"""the same of a block that is put."""
_HANDLE, _OFFSET, _SIZE, _DIGEST = range(2, 6)
"""Words of an ANSWER."""
_Result: TypeAlias = Block | Outcome
"""What came of a key: the block, or an outcome without one."""
Arrived: TypeAlias = tuple[int, Outcome]
"""Where a key stands in a get, and what came of it."""
Ack: TypeAlias = local.PutAck
Prefix: TypeAlias = Sequence[bytes] | Mapping[bytes, tuple[bytes, int]]
"""See `Conversation.reserve`."""
T = TypeVar("T")
R = TypeVar("R", bound=local.AgentReply)
Call: TypeAlias = Generator[Ask, local.AgentReply, T]
"""A call in flight: yields questions, is sent their answers, returns the result."""


class Conversation:
    """One connection's conversation. `post` sends a message whose answer nobody waits for, at once
    or before the next question, and never raises; blocks call it when they are released, from
    whatever thread or garbage collector that is. A conversation does not outlast a fork: in the
    child, `check` raises, and blocks let go of nothing, since what is held is the parent's."""

    def __init__(self, post: Callable[[local.Request], None], *, read_only: bool = False) -> None:
        self._send = post
        self._read_only = read_only
        self._forked = False
        self._closed = False
        self._local: LocalBlocks | None = None
        self._of_prefixes: dict[int, bool] = {}
        self._codec = MessageCodec[local.ServerMessage](
            local.ServerMessage, max_message_bytes=MAX_LOCAL_MESSAGE_BYTES
        )
        self._numbers = itertools.count(1)
        self._name = ""
        self._token = b""
        self._held: set[int] = set()
        """Handles and tickets that the agent holds for us: from the moment at which we hear of
        them, since an agent that comes after takes back what we do not name."""
        self._released: deque[int] = deque()
        """Handles that the agent has not heard are released (see `_results`)."""
        self.lives = 0
        """How many connections there have been."""
        self._fds: list[int] = []
        self.courier_fd = -1
        """The courier's socket, where there is one; the driver's to take and to close."""
        self._refused: dict[int, int] = {}
        """By namespace (or `_puts_to`, `_looks_in` it), how many questions in a row the courier has
        handed over,"""
        self._passes: dict[int, int] = {}
        """and how many it is therefore not asked for."""
        self.is_cut: Callable[[], bool] = lambda: False
        """Whether the connection has ended, which nobody need have heard yet; set by the driver."""
        self.has_courier = False
        """Whether the courier may be asked; set by a driver that does."""
        self._arena: Arena | None = None
        self._rooms: dict[tuple[int, int], local.Extent] = {}
        """Given ahead: room for the next block of a namespace and size."""
        self._put_last = (-1, 0)
        """Namespace and size of the block that was put last, into no such room."""
        self.node_id = ""

    # --- the connection -------------------------------------------------------------------------

    def hello(self, name: str) -> bytes:
        """What to send first. `name` of this client is for the agent's log."""
        self._name = (name or f"pid {os.getpid()}")[:_MAX_NAME_CHARS]
        _watch_forks(self)
        return self._hello(None)

    @property
    def may_resume(self) -> bool:
        """Whether an agent may come after the one that is gone: worth to connect anew for."""
        return bool(self._token) and not self._forked

    @staticmethod
    def pauses() -> Backoff:
        """How long a driver waits between two attempts to connect anew."""
        return Backoff(RETRY_S, MAX_RETRY_S)

    def hello_again(self) -> bytes:
        """What to send first on a connection that is made anew; `welcomed` hears the answer. Before
        it, the courier's socket is to be closed, since nothing is to be heard there any more; and
        then all questions without an answer are to be asked again."""
        self._codec = MessageCodec[local.ServerMessage](
            local.ServerMessage, max_message_bytes=MAX_LOCAL_MESSAGE_BYTES
        )
        while self._fds:
            os.close(self._fds.pop())
        return self._hello(local.Resume(self._token, list(self._held)))

    def _hello(self, resume: local.Resume | None) -> bytes:
        index = membarrier.register()
        return self.encode(
            local.Hello(LOCAL_PROTOCOL_VERSION, self._name, self._read_only, index, resume)
        )

    def welcomed(self, data: bytes, fds: Sequence[int]) -> bool:
        """Hear the first bytes of the agent, and the descriptors that came with them, which are
        ours from now on; whether the handshake is over."""
        self._fds += fds
        messages = self._heard(data)
        if not messages:
            return False
        welcome = messages[0]
        if isinstance(welcome, local.Rejected):
            raise AgentRejectedError(welcome.reason)
        if not isinstance(welcome, local.Welcome):
            raise AgentGoneError(f"the agent began with {type(welcome).__name__}")
        expected = 0 if welcome.resumed else 3 if welcome.index_bytes else 1
        expected += int(welcome.courier)
        if len(self._fds) != expected or len(messages) != 1:
            raise AgentGoneError("the agent's welcome is not understood")
        if welcome.resumed and (not self._token or welcome.token != self._token):
            raise AgentGoneError("the agent takes us for another client")
        self.lives += 1
        self._token = welcome.token
        if welcome.courier:
            self.courier_fd = self._fds.pop()
        if welcome.resumed:
            if self._local is not None:
                self._local.resumed()
            return True
        self._held.clear()  # of a former agent, if there was one: nobody holds it any more
        self._rooms.clear()
        self._local = None
        if welcome.index_bytes:
            self._local = map_shared(
                *(self._fds.pop(1), self._fds.pop(1)),
                index_bytes=welcome.index_bytes,
                arena_bytes=welcome.arena_bytes,
                max_bytes=welcome.pinned_bytes,
            )
        self._arena = Arena(self._fds.pop(), welcome.arena_bytes, read_only=self._read_only)
        self.node_id = welcome.node_id
        return True

    def check(self) -> None:
        """To be called before any call: AgentGoneError in a process that was forked from ours."""
        if self._forked:
            raise AgentGoneError("this client was made before a fork: make one in this process")

    def leave_to_parent(self) -> None:
        """This process is a fork: what is held is held by another."""
        self._forked = True
        if self._local is not None:
            self._local.given_up = True

    def _post(self, message: local.Request) -> None:
        if not self._forked:
            self._send(message)

    def replies(self, data: bytes) -> list[local.AgentReply]:
        """The replies that these bytes complete."""
        replies: list[local.AgentReply] = []
        for message in self._heard(data):
            if isinstance(message, (local.Welcome, local.Rejected)):
                raise AgentGoneError(f"the agent answered with {type(message).__name__}")
            self._held.update(_given_by(message))
            replies.append(message)
        return replies

    def _heard(self, data: bytes) -> list[local.ServerMessage]:
        if not data:
            raise AgentGoneError("the agent closed the connection")
        try:
            return list(self._codec.feed(data))
        except FramingError as error:
            raise AgentGoneError(f"the agent is not understood: {error}") from error

    def encode(self, message: local.ClientMessage) -> bytes:
        """A message as bytes."""
        return self._codec.encode(message)

    def close(self) -> None:
        """Let go of the arena, and of descriptors that came without a welcome."""
        self._closed = True
        while self._fds:
            os.close(self._fds.pop())
        if self.courier_fd >= 0:
            os.close(self.courier_fd)
            self.courier_fd = -1
        if self._local is not None:
            self._local.close()
        if self._arena is not None:
            self._arena.close()

    # --- the courier ----------------------------------------------------------------------------

    def _for_courier(
        self, number: int, namespace: int, keys: list[bytes], deadline_s: float
    ) -> bytes:
        """The question for the courier, if it is one for it."""
        if not self.has_courier or len(keys) > MAX_MANY or self._local is None:
            return b""
        meaning = self._local.meaning(namespace)
        if meaning is None or not self._is_to_be_asked(namespace):
            return b""
        deadline_ms = min(int(deadline_s * 1000), MAX_DEADLINE_MS)
        kind = GET if len(keys) == 1 else GET_MANY
        question = QUESTION.pack(kind, namespace, deadline_ms, number, keys[0], meaning)
        return question + b"".join(keys[1:])

    def _ask_to_put(
        self, request: local.Put | local.Commit, namespace: int, rooms: list[tuple[int, bytes]]
    ) -> Ask:
        """Ask that what is written in rooms, by their tickets, becomes these blocks: the courier,
        if it can do that."""
        question = b""
        about = _puts_to(namespace)
        if self.has_courier and self._local is not None and request.ack in ACKS:
            meaning = self._local.meaning(namespace)
            if meaning is not None and self._is_to_be_asked(about):
                (ticket, key), *further = rooms
                ack = ACKS.index(request.ack)
                question = PUT_QUESTION.pack(
                    *(PUT, namespace, ack, request.request, key, meaning, ticket)
                ) + b"".join([ROOM.pack(key, ticket) for ticket, key in further])
        return Ask(request, SLOW_REQUEST_S, question, about)

    def _is_to_be_asked(self, what: int) -> bool:
        """Whether the courier is asked this time (see `handed_over`)."""
        passes = self._passes.get(what, 0)
        if passes:
            self._passes[what] = passes - 1
        return not passes

    def heard_of_courier(
        self, answer: bytes
    ) -> tuple[int, local.Got | local.Committed | local.Ack | None]:
        """What the courier has said: to which question, and the answer; None = the agent is to be
        asked. An answer that nobody waits for is to be given back."""
        if not answer or len(answer) % ANSWER.size:
            raise AgentGoneError("the courier is not understood")
        status, tier, _, number, handle, _, count, _ = ANSWER.unpack_from(answer)
        if status == GIVEN and tier < len(TIERS) and len(answer) == ANSWER.size:
            self._held.add(handle)
            self._refused.clear()
            return number, _Given(number, [], answer, [])
        each, tiers = _halves(answer, 0), _halves(answer, 1)
        statuses = set(each)
        heard: local.Got | local.Committed | local.Ack
        if statuses == {ASK_AGENT}:
            return number, None
        if statuses <= {GIVEN, ASK_AGENT} and max(tiers) < len(TIERS):
            given = [status == GIVEN for status in each] if ASK_AGENT in statuses else []
            heard = _Given(number, [], answer, given)
            self._held.update(heard.words(_HANDLE))
        elif statuses <= {PUT_HOME, ASK_AGENT}:
            heard = _committed(number, answer)
        elif statuses == {COUNTED} and len(tiers) == 1:
            heard = (_Counted if tier else local.Ack)(number, count)
        else:
            raise AgentGoneError("the courier is not understood")
        self._refused.clear()
        return number, heard

    def handed_over(self, ask: Ask, left_s: float) -> Ask:
        """What the agent is to be asked where the courier has no answer, and so much is left of the
        patience. Where that goes on, the courier is asked for fewer and fewer gets of the
        namespace, until it has an answer again."""
        request, about = ask.request, ask.about
        refused = self._refused.get(about, 0)
        self._refused[about] = refused + 1
        self._passes[about] = min(max(0, refused + 1 - FREE_REFUSALS) ** 2, MOST_PASSES)
        if not isinstance(request, (local.Get, local.Exists)):
            return Ask(request, max(left_s, 0.001))
        deadline_s = max(0.0, request.deadline_s - (ask.patience_s - left_s))
        return Ask(msgspec.structs.replace(request, deadline_s=deadline_s), max(left_s, 0.001))

    def courier_release(self, message: local.Request) -> bytes:
        """A Release as the courier takes it; nothing if it is none of what the courier gave."""
        if not self.has_courier or not isinstance(message, local.Release):
            return b""
        handles = message.handles
        if not 0 < len(handles) <= MAX_MANY or min(handles) < FIRST_HANDLE:
            return b""
        further = b"".join(map(HANDLE.pack, handles[1:]))
        return QUESTION.pack(RELEASE, 0, 0, handles[0], bytes(KEY_BYTES), 0) + further

    def give_back(self, reply: local.AgentReply) -> None:
        """Nobody takes this answer: let the agent have back what it holds."""
        self.forget(reply)
        if isinstance(reply, local.Got):
            handles = _given_by(reply)
            if handles:
                self._post(local.Release(handles))
        elif isinstance(reply, local.Allocated):
            self._abort([e.ticket for e in reply.extents if e.status == local.OK])
        elif isinstance(reply, local.Committed) and reply.room is not None:
            self._abort([reply.room.ticket])

    def forget(self, reply: local.AgentReply) -> None:
        """Nobody takes this answer of an agent that is gone: the one that comes after takes back
        what it holds."""
        self._held.difference_update(_given_by(reply))

    def give_up(self, requests: Iterable[local.Numbered]) -> None:
        """Nobody waits for the answers to these questions any more: the agent need not have the
        blocks come. It answers all the same."""
        gets = [request.request for request in requests if isinstance(request, local.Get)]
        if gets:
            self._post(local.Release([], gets))

    @property
    def arena_bytes(self) -> int:
        """The size of the arena, as far as it is known: 0 before the welcome."""
        return self._arena.size_bytes if self._arena is not None else 0

    @property
    def arena(self) -> memoryview:
        """The arena as it is mapped now, read-only, shape (arena_bytes,), format "B"."""
        return self._memory.memory

    def _abort(self, tickets: list[int]) -> None:
        self._held.difference_update(tickets)
        if tickets:
            self._post(local.Abort(next(self._numbers), tickets))

    # --- parts of calls -------------------------------------------------------------------------

    @property
    def _memory(self) -> Arena:
        assert self._arena is not None
        return self._arena

    def _ask(self, request: local.Numbered, kind: type[R], patience_s: float) -> Call[R]:
        return self._checked((yield Ask(request, patience_s)), kind)

    def _checked(self, reply: local.AgentReply, kind: type[R]) -> R:
        if isinstance(reply, local.Failed):
            error = ERROR_BY_STATUS.get(reply.status, KvcastError)
            raise error(reply.reason or reply.status)
        if not isinstance(reply, kind):
            raise AgentGoneError(f"the agent answered with {type(reply).__name__}")
        return reply

    def _count(self, request: local.Numbered, patience_s: float) -> Call[int]:
        return (yield from self._ask(request, local.Ack, patience_s)).count

    def _results(self, keys: list[bytes], got: local.Got) -> list[_Result]:
        """What came of keys."""
        if isinstance(got, _Given):
            tiers = _halves(got.answers, 1)
            given = got.are_given or [True] * len(tiers)
            missing: Iterator[Outcome] = itertools.repeat(_HANDED_OVER)
            names: Iterable[str] = map(TIERS.__getitem__, itertools.compress(tiers, given))
            columns = [got.words(at) for at in (_HANDLE, _OFFSET, _SIZE, _DIGEST)]
        else:
            given = [one.status == local.OK for one in got.blocks]
            missing = (
                Outcome(None, one.status, one.reason)
                for one in got.blocks
                if one.status != local.OK
            )
            here = list(itertools.compress(got.blocks, given))
            names = [one.tier for one in here]
            fields = "handle", "offset", "size_bytes", "digest"
            columns = [list(map(attrgetter(field), here)) for field in fields]
        of = itertools.compress(keys, _one_each(keys, given))
        blocks = self._blocks(of, names, *columns)
        if len(blocks) == len(keys):
            return cast(list[_Result], blocks)
        coming = iter(blocks)
        return [next(coming) if is_given else next(missing) for is_given in given]

    def _blocks(
        self,
        keys: Iterable[bytes],
        tiers: Iterable[str],
        handles: list[int],
        offsets: list[int],
        sizes: list[int],
        digests: list[int],
    ) -> list[Block]:
        """Blocks that came together. If all are small they are given back by one message, with the
        last of them, or with whatever is said next, or so many at a time."""
        release, dropped = self._release, self._dropped
        if len(handles) > 1 and max(sizes) <= SMALL_BYTES:
            gone = itertools.count(1)

            def release(handle: int) -> None:
                self._held.discard(handle)
                self._released.append(handle)
                if next(gone) == len(handles) or len(self._released) >= MAX_MANY:
                    self.post_released()

            def dropped(may_release: bool, handle: int) -> bool:
                next(gone)
                return self._dropped(may_release, handle)

        data = self._memory.read_each(offsets, sizes)
        held_by = itertools.repeat(release), itertools.repeat(dropped), zip(handles, strict=True)
        return list(map(Block, keys, sizes, digests, tiers, data, *held_by))

    def _release(self, handle: int) -> None:
        self._held.discard(handle)
        self._post(local.Release([handle]))

    def _dropped(self, may_release: bool, handle: int) -> bool:
        """A block was dropped, in whatever thread: where it may be released, that is said before
        the next call says anything. Whether it was held until then."""
        if self._forked or self._closed:
            return False
        if may_release:
            self._held.discard(handle)
            self._released.append(handle)
        return True

    def post_released(self) -> None:
        """Post what was released and waits for more of its kind; to be called before anything is
        said."""
        if not self._released:
            return
        handles = []
        while self._released:
            with contextlib.suppress(IndexError):  # another thread was quicker
                handles.append(self._released.popleft())
        for part in _parts(handles, MAX_MANY):
            self._post(local.Release(part))

    def _local_results(self, namespace: int, keys: list[bytes]) -> list[_Result | None]:
        """What is here, pinned without a message; None for the rest."""
        if self._local is None:
            return [None] * len(keys)
        found = self._local.take(namespace, keys)
        if not any(found):
            return [None] * len(keys)
        results: list[_Result | None] = []
        for key, one in zip(keys, found, strict=True):
            if one is None:
                results.append(None)
                continue
            pin, offset, size_bytes, reserved_bytes, digest = one
            data = self._memory.read(offset, size_bytes)
            held_by = self._local.release, self._local.dropped, (pin, reserved_bytes)
            results.append(Block(key, size_bytes, digest, local.LOCAL_TIER, data, *held_by))
        return results

    # --- what both clients offer ----------------------------------------------------------------

    def get(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
        prefix: Prefix = (),
    ) -> Call[list[Block | None]]:
        """Get blocks, pinned in the arena; None for each that could not be had in time.

        Waits at most `deadline_s` for the slowest of them. `gather_ms` (0 to 255): how long a
        home may hold its answer so that others can join; worth it where many nodes read the same
        at about the same time. `group`: a reader group of `namespace` (see `group`), all of whose
        members get the answer; with `expect`, another member is known to read these blocks, and
        this node only asks for what then is missing. `prefix`: as in `reserve`, for this node's own
        copies; what is asked for with it does not come by the courier.

        Raises UnknownNamespaceError, ForbiddenError or UnavailableError for the namespace;
        BusyError, NoRoomError or QuotaError never: such a block counts as a miss, and
        `get_outcomes` says why. A call that fails leaves nothing pinned.
        """
        if len(keys) == 1 and not (gather_ms or group or expect or prefix):
            return self._get_one(namespace, keys, deadline_s)
        return self._blocks_of(
            self._get(namespace, keys, deadline_s, gather_ms, group, expect, prefix)
        )

    def _get_one(
        self, namespace: int, keys: Sequence[bytes], deadline_s: float
    ) -> Call[list[Block | None]]:
        """`get` of one block, in few steps: they take longer than a block of 64 KiB does, once
        other work has had the processor's caches."""
        checked = _check_keys(keys)
        (result,) = self._local_results(namespace, checked)
        if result is None:
            number = next(self._numbers)
            request = local.Get(number, namespace, checked, deadline_s)
            courier = self._for_courier(number, namespace, checked, deadline_s)
            got = self._checked(
                (yield Ask(request, deadline_s + GRACE_S, courier, namespace)), local.Got
            )
            if isinstance(got, _Given) and len(got.answers) == ANSWER.size:
                _, tier, _, _, handle, offset, size_bytes, digest = ANSWER.unpack(got.answers)
                data = self._memory.read(offset, size_bytes)
                held_by = self._release, self._dropped, (handle,)
                return [Block(checked[0], size_bytes, digest, TIERS[tier], data, *held_by)]
            (result,) = self._results(checked, got)
        return [result if isinstance(result, Block) else None]

    def _blocks_of(self, call: Call[list[_Result]]) -> Call[list[Block | None]]:
        results = yield from call
        return [result if type(result) is Block else None for result in results]

    def get_outcomes(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
        prefix: Prefix = (),
    ) -> Call[list[Outcome]]:
        """As `get`, with the reason for every block that is missing."""
        results = yield from self._get(
            namespace, keys, deadline_s, gather_ms, group, expect, prefix
        )
        return list(map(_as_outcome, results))

    def _get(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float,
        gather_ms: int,
        group: int,
        expect: bool,
        prefix: Prefix,
    ) -> Call[list[_Result]]:
        checked = _check_keys(keys)
        plain = not (gather_ms or group or expect or prefix)
        results: list[_Result | None] = [None] * len(checked)
        if not (plain and self._are_away(namespace, checked)):
            results = self._local_results(namespace, checked)
        if None not in results:
            return cast(list[_Result], results)
        missing = [position for position, result in enumerate(results) if result is None]
        before = _before(prefix)
        end = time.monotonic() + deadline_s
        try:
            for part, places in enumerate(_parts(missing, MAX_KEYS)):
                if part:  # they are asked one after the other, within one deadline
                    deadline_s = max(0.0, end - time.monotonic())
                batch = (
                    checked if len(places) == len(checked) else [checked[place] for place in places]
                )
                number = next(self._numbers)
                request = local.Get(
                    *(number, namespace, batch, deadline_s, gather_ms, group, expect),
                    *_stated(before, batch),
                )
                courier = b""
                if plain:
                    courier = self._for_courier(number, namespace, batch, deadline_s)
                ask = Ask(request, deadline_s + GRACE_S, courier, namespace)
                got = self._checked((yield ask), local.Got)
                for place, result in zip(places, self._results(batch, got), strict=True):
                    results[place] = result
                if isinstance(got, _Given):
                    left_s = max(0.0, end - time.monotonic())
                    yield from self._get_rest(namespace, checked, results, left_s)
        except BaseException:
            for given in results:
                if isinstance(given, Block):
                    given.release()
            raise
        return cast(list[_Result], results)

    def _are_away(self, namespace: int, keys: list[bytes]) -> bool:
        """Whether the courier may be asked for all of these blocks before they are looked up, since
        the first and the last are not here: so the others hardly are, and it hands over those that
        may be. To look a hundred up takes a twentieth of the time in which they come."""
        if not (self.has_courier and self._local is not None and 1 < len(keys) <= MAX_MANY):
            return False
        if self._passes.get(namespace, 0):
            return False
        return not any(self._local.prefix(namespace, key) for key in (keys[0], keys[-1]))

    def _get_rest(
        self,
        namespace: int,
        keys: list[bytes],
        results: list[_Result | None],
        deadline_s: float,
    ) -> Call[None]:
        """Get what the courier has handed over: here, or from the agent."""
        places = [at for at, result in enumerate(results) if result is _HANDED_OVER]
        if not places:
            return
        found = self._local_results(namespace, [keys[at] for at in places])
        for place, result in zip(places, found, strict=True):
            results[place] = result
        places = [at for at in places if results[at] is None]
        if not places:
            return
        batch = [keys[at] for at in places]
        request = local.Get(next(self._numbers), namespace, batch, deadline_s)
        got = self._checked((yield Ask(request, deadline_s + GRACE_S)), local.Got)
        for place, result in zip(places, self._results(batch, got), strict=True):
            results[place] = result

    def get_parts(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float,
        gather_ms: int,
        group: int,
        expect: bool,
        prefix: Prefix,
    ) -> tuple[list[Arrived], dict[int, Part]]:
        """A get whose results are taken as they come: what is here, and questions about the rest,
        by number, that are to be asked at once; their answers are for `part_outcomes`."""
        checked = _check_keys(keys)
        results = self._local_results(namespace, checked)
        here = [(at, _as_outcome(one)) for at, one in enumerate(results) if one is not None]
        missing = [at for at, one in enumerate(results) if one is None]
        parts = {}
        before = _before(prefix)
        # As few keys in a question as there may be, so that none waits for another.
        for places in _parts(missing, min(MAX_KEYS, -(-len(missing) // MOST_PARTS) or 1)):
            batch = [checked[place] for place in places]
            request = local.Get(
                *(next(self._numbers), namespace, batch, deadline_s, gather_ms, group, expect),
                *_stated(before, batch),
            )
            parts[request.request] = Part(Ask(request, deadline_s + GRACE_S), places, batch)
        return here, parts

    def part_outcomes(self, part: Part, reply: local.AgentReply) -> list[Arrived]:
        """What came of a part."""
        got = self._checked(reply, local.Got)
        results = self._results(part.keys, got)
        return list(zip(part.places, map(_as_outcome, results), strict=True))

    def prefetch(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 10.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
        prefix: Prefix = (),
    ) -> Call[int]:
        """Have blocks fetched into the arena, without waiting and without pinning them; returns
        how many of them were not there yet."""
        count = 0
        before = _before(prefix)
        for batch in _batches(keys):
            request = local.Prefetch(
                *(next(self._numbers), namespace, batch, deadline_s, gather_ms, group, expect),
                *_stated(before, batch),
            )
            count += yield from self._count(request, GRACE_S)
        return count

    def put(
        self,
        namespace: int,
        blocks: Mapping[bytes, Buffer],
        *,
        ack: Ack = "",
        prefix: Prefix = (),
    ) -> Call[None]:
        """Put blocks (16-byte key to bytes) into the pool. Returns when each is at its home (`ack`
        "home"), at its home and all replicas ("replicas"), or on this node ("local"); by default
        as the agent's `--put-ack` says. `prefix`: as in `reserve`.

        The bytes are copied once, into the arena. Raises PutError if some were not taken, and
        what `get` raises for the namespace.
        """
        if len(blocks) == 1 and not prefix:
            ((key, data),) = blocks.items()
            yield from self._put_one(namespace, key, _as_bytes(data), ack)
            return
        failed: dict[bytes, str] = {}
        batch_bytes = min(PUT_BATCH_BYTES, self._memory.size_bytes // PUT_BATCH_SHARE)
        _check_keys(list(blocks))
        for batch in _put_batches(blocks, batch_bytes):
            sizes = {key: len(view) for key, view in batch}
            with (yield from self.reserve(namespace, sizes, prefix=prefix)) as reservation:
                for key, view in batch:
                    if key in reservation.views:
                        reservation.views[key][:] = view
                try:
                    yield from self.commit(reservation, ack=ack)
                except PutError as error:
                    failed |= error.failed
        if failed:
            raise PutError(failed)

    def _put_one(self, namespace: int, key: bytes, view: memoryview, ack: Ack) -> Call[None]:
        """Put one block: where one of this namespace and size was put before, into room that came
        with the answer to that, so that the agent is asked once."""
        _check_keys([key])
        like = (namespace, len(view))
        room = self._rooms.pop(like, None)
        if room is None:
            # An agent that keeps its arena gives no room ahead.
            again, self._put_last = self._put_last == like and not self._token, like
            if again:
                while self._rooms:  # the agent gives one
                    self._abort([self._rooms.popitem()[1].ticket])
            with (yield from self.reserve(namespace, {key: len(view)})) as reservation:
                for place in reservation.views.values():
                    place[:] = view
                yield from self._commit(reservation, ack, like if again else None)
            return
        try:
            self._memory.room(room.offset, len(view))[:] = view
            request = local.Put(next(self._numbers), namespace, [key], room.ticket, ack)
            ask = self._ask_to_put(request, namespace, [(room.ticket, key)])
            committed = self._checked((yield ask), local.Committed)
        except BaseException:
            self._abort([room.ticket])
            raise
        self._held.discard(room.ticket)
        self._take_room(like, committed)
        (result,) = _one_each([key], committed.blocks)
        if result.status != local.OK:
            raise PutError({key: result.status})

    def _take_room(self, like: tuple[int, int], committed: local.Committed) -> None:
        """Keep the room that came for the next block of a namespace and size."""
        if committed.room is not None:
            self._rooms[like] = committed.room

    def reserve(
        self, namespace: int, sizes: Mapping[bytes, int], *, prefix: Prefix = ()
    ) -> Call[Reservation]:
        """Room in the arena for blocks (16-byte key to size in bytes), to be written in place: put
        without a copy. Write every byte of the result's `views`, then call `commit`; used as a
        context manager, it gives back what was not committed. It counts towards what this client
        may hold. Blocks for which there is no room are in the result's `failed`; raises what `get`
        raises for the namespace.

        `prefix`: all keys of the prefix that the blocks are of, from its beginning and in order,
        those that are stored already included; or by key, where the blocks are of several, the
        key before it (b"" for the first) and how many are before it. A namespace with the policy
        value then holds none of them without those before it, and keeps longer what costs more to
        compute again.
        """
        _check_keys(list(sizes))
        before = _before(prefix)
        if any(not 0 < size_bytes < 1 << 32 for size_bytes in sizes.values()):
            raise ValueError("a block has at least one byte, and less than 4 GiB")
        reservation = Reservation(self._abort, namespace)
        try:
            for part in _parts(list(sizes.items()), MAX_KEYS):
                keys = [key for key, _ in part]
                alloc = local.Alloc(
                    next(self._numbers),
                    namespace,
                    keys,
                    [size_bytes for _, size_bytes in part],
                    *_stated(before, keys),
                )
                allocated = yield from self._ask(alloc, local.Allocated, GRACE_S)
                self._enter(reservation, part, allocated)
        except BaseException:
            reservation.abort()
            raise
        return reservation

    def _enter(
        self,
        reservation: Reservation,
        part: list[tuple[bytes, int]],
        allocated: local.Allocated,
    ) -> None:
        rooms: list[tuple[bytes, int, memoryview]] = []
        try:
            extents = _one_each(part, allocated.extents)
            for (key, size_bytes), extent in zip(part, extents, strict=True):
                if extent.status == local.OK:
                    room = self._memory.room(extent.offset, size_bytes)
                    rooms.append((key, extent.ticket, room))
                else:
                    reservation.failed[key] = extent.status
        except BaseException:
            self.give_back(allocated)
            raise
        for key, ticket, room in rooms:
            reservation.views[key] = room
            reservation.tickets[ticket] = key

    def commit(self, reservation: Reservation, *, ack: Ack = "") -> Call[None]:
        """Make what was written into a reservation blocks of the pool; `ack` as in `put`. Raises
        PutError if some were not taken, also those for which there was no room. The views are
        not to be used any more."""
        yield from self._commit(reservation, ack, None)

    def _commit(
        self, reservation: Reservation, ack: Ack, again: tuple[int, int] | None
    ) -> Call[None]:
        """`again`: of which namespace and size another block follows."""
        failed = dict(reservation.failed)
        tickets = reservation.take()
        left = dict.fromkeys(tickets)
        asked: set[int] = set()
        try:
            # What the courier hands over is put behind the rest.
            parts = deque(_parts(list(left), MAX_MANY if self.has_courier else MAX_KEYS))
            while parts:
                part = parts.popleft()
                commit = local.Commit(next(self._numbers), part, ack, again is not None)
                ask = Ask(commit, SLOW_REQUEST_S)
                if again is None and not asked.intersection(part):
                    rooms = [(ticket, tickets[ticket]) for ticket in part]
                    ask = self._ask_to_put(commit, reservation.namespace, rooms)
                life = self.lives
                committed = self._checked((yield ask), local.Committed)
                if again is not None:
                    self._take_room(again, committed)
                handed_over = []
                for ticket, result in zip(part, _one_each(part, committed.blocks), strict=True):
                    if result.status == _NOT_PUT.status:
                        handed_over.append(ticket)
                        continue
                    del left[ticket]
                    self._held.discard(ticket)
                    if result.status != local.OK:
                        failed[tickets[ticket]] = result.status
                if handed_over:
                    asked.update(handed_over)
                    parts.append(handed_over)
                if self.lives != life:
                    # We have named them to an agent that came after, perhaps as not put yet.
                    self._abort([ticket for ticket in part if ticket not in left])
        except BaseException:
            self._abort(list(left))
            raise
        if failed:
            raise PutError(failed)

    def exists(self, namespace: int, keys: Sequence[bytes], deadline_s: float = 1.0) -> Call[int]:
        """How many of `keys`, counted from the first without a gap, the pool holds now."""
        chain = b"".join(keys)
        if list(map(len, keys)) != [KEY_BYTES] * len(keys):
            _check_keys(keys)  # says which is wrong
        total = 0
        # The index of an agent that was killed stays as it was, and says nothing of the pool.
        if self._local is not None and not self.is_cut():
            total = self._local.prefix(namespace, chain)
        end = time.monotonic() + deadline_s
        courier = self.has_courier
        while total < len(keys):
            number = next(self._numbers)
            question = b""
            batch = chain[total * KEY_BYTES : (total + MAX_CHAIN) * KEY_BYTES]
            if courier:
                question = self._ask_how_many(number, namespace, batch, deadline_s)
            if not question:
                batch = chain[total * KEY_BYTES : (total + MAX_KEYS) * KEY_BYTES]
            request = local.Exists(number, namespace, batch, deadline_s)
            ask = Ask(request, deadline_s + GRACE_S, question, _looks_in(namespace))
            counted = self._checked((yield ask), local.Ack)
            total += counted.count
            deadline_s = max(0.0, end - time.monotonic())
            if isinstance(counted, _Counted):
                courier = False
            elif counted.count * KEY_BYTES < len(batch):
                break
        return total

    def _ask_how_many(self, number: int, namespace: int, chain: bytes, deadline_s: float) -> bytes:
        """The question for the courier, if it is one for it."""
        if self._local is None:
            return b""
        meaning = self._local.meaning(namespace)
        if meaning is None or not self._is_to_be_asked(_looks_in(namespace)):
            return b""
        deadline_ms = min(int(deadline_s * 1000), MAX_DEADLINE_MS)
        first, further = chain[:KEY_BYTES], chain[KEY_BYTES:]
        return QUESTION.pack(EXISTS, namespace, deadline_ms, number, first, meaning) + further

    def near(self, namespace: int, keys: Sequence[bytes]) -> int:
        """How many of `keys`, counted from the first without a gap, this node's memory holds; 0
        also where that is not known without asking the agent."""
        if self._local is None or self.is_cut():
            return 0
        return self._local.prefix(namespace, b"".join(keys))

    def drop(self, namespace: int, keys: Sequence[bytes]) -> Call[int]:
        """Forget blocks here and at their homes; returns how many are now forgotten by every
        one of their homes. Copies that other nodes or the switch have cached stay until they are
        evicted: a key is never to be used again for other bytes."""
        count = 0
        for batch in _batches(keys):
            request = local.Drop(next(self._numbers), namespace, batch)
            count += yield from self._count(request, SLOW_REQUEST_S)
        return count

    def pin(self, namespace: int, keys: Sequence[bytes]) -> Call[int]:
        """Keep blocks that are in this node's arena there, until `unpin` or `close`; returns how
        many were there and within this client's bounds. A call that fails leaves nothing pinned.
        """
        count = 0
        asked: list[list[bytes]] = []
        try:
            for batch in _batches(keys):
                asked.append(batch)
                request = local.Pin(next(self._numbers), namespace, batch)
                count += yield from self._count(request, GRACE_S)
        except BaseException as error:
            if isinstance(error, KvcastError):
                asked.pop()  # that one was refused; one that was given up is done all the same
            for batch in asked:
                self._post(local.Unpin(next(self._numbers), namespace, batch))
            raise
        return count

    def unpin(self, namespace: int, keys: Sequence[bytes]) -> Call[int]:
        """Undo one `pin` of each block; returns how many there were."""
        count = 0
        for batch in _batches(keys):
            request = local.Unpin(next(self._numbers), namespace, batch)
            count += yield from self._count(request, GRACE_S)
        return count

    def stats(self) -> Call[dict[str, float]]:
        """The agent's counters and present values, by name (`kvcast.hostagent.core.metrics`)."""
        request = local.GetStats(next(self._numbers))
        return (yield from self._ask(request, local.Stats, GRACE_S)).counters

    def namespace(self, tenant: str, model: str, version: str, layout: str) -> Call[int]:
        """The namespace's number, made by the controller if it is new. `layout` must say all
        that decides what the bytes mean (dtype, block size, and the parallel rank where ranks
        hold different bytes). Raises UnavailableError without a controller."""
        request = local.FindNamespace(next(self._numbers), tenant, model, version, layout)
        found = yield from self._ask(request, local.FoundNamespace, SLOW_REQUEST_S)
        if self._local is not None:
            self._local.told(found.info.namespace, meaning_of(found.info))
        self._of_prefixes[found.info.namespace] = found.info.settings.of_prefixes
        return found.info.namespace

    def of_prefixes(self, namespace: int) -> bool:
        """Whether it is worth saying `prefix` in gets and puts, so far as that was known when
        `namespace` found this one."""
        return self._of_prefixes.get(namespace, False)

    def group(self, namespace: int, nodes: Sequence[str]) -> Call[int]:
        """The number of the reader group of these nodes (node ids), made if it is new."""
        request = local.FindGroup(next(self._numbers), namespace, list(nodes))
        return (yield from self._ask(request, local.FoundGroup, SLOW_REQUEST_S)).info.group

    def company(self, namespace: int, at: int) -> Call[tuple[int, int]]:
        """Say that all blocks of the namespace are read here in an order that other nodes follow,
        too, and that those before the ordinal `at` have been asked for (`AT_END`: all are here).
        Returns the number of the reader group of all nodes that say so now, 0 while there are no
        others, and how far the first of the others is. To be said again every second at least,
        since nodes come and go."""
        request = local.FindGroup(next(self._numbers), namespace, [], at)
        info = (yield from self._ask(request, local.FoundGroup, SLOW_REQUEST_S)).info
        return info.group, info.at

    def weighed(
        self,
        whole: int,
        part: int,
        computed: int,
        load_tokens_per_s: float = 0.0,
        compute_tokens_per_s: float = 0.0,
    ) -> Call[int]:
        """Have the agent know of how many prefixes that the pool held an engine has loaded all, a
        part and nothing since it last said so, and what both ways take it, in tokens a second (0:
        not known). What the pool's operators see of it are sums and means."""
        request = local.Weighed(
            *(next(self._numbers), whole, part, computed),
            *(load_tokens_per_s, compute_tokens_per_s),
        )
        return (yield from self._count(request, GRACE_S))

    def describe(
        self, namespace: int = 0, keys: Sequence[bytes] = ()
    ) -> Call[local.PoolDescription]:
        """What the agent knows of the pool, and which of `keys` this node holds."""
        request = local.DescribePool(next(self._numbers), namespace, _check_keys(keys))
        return (yield from self._ask(request, local.PoolDescription, GRACE_S))


def _puts_to(namespace: int) -> int:
    """As which number the courier's answers to puts of a namespace are remembered."""
    return -1 - namespace


def _looks_in(namespace: int) -> int:
    """The same of `exists` in a namespace."""
    return -1 - NAMESPACES - namespace


def _watch_forks(conversation: Conversation) -> None:
    """From now on, a fork of this process leaves the conversation to its parent."""
    if not _conversations:
        os.register_at_fork(after_in_child=_leave_all_to_parent)
        _conversations.append(weakref.WeakSet())
    _conversations[0].add(conversation)


def _leave_all_to_parent() -> None:
    for conversation in list(_conversations[0]):
        conversation.leave_to_parent()


_conversations: list[weakref.WeakSet[Conversation]] = []
"""All of this process that have begun; empty until one has."""


def _committed(number: int, answers: bytes) -> local.Committed:
    """What the courier says of blocks that are put."""
    put: list[local.PutBlock] = []
    room = None
    for status, _, _, _, ticket, offset, homes, digest in ANSWER.iter_unpack(answers):
        if status == PUT_HOME:
            room = local.Extent(local.OK, ticket, offset) if ticket else None
            put.append(local.PutBlock(local.OK, homes, digest))
        else:
            put.append(_NOT_PUT)
    return local.Committed(number, put, room)


def _as_outcome(result: _Result) -> Outcome:
    return Outcome(result, local.OK, "") if isinstance(result, Block) else result


def _check_keys(keys: Sequence[bytes]) -> list[bytes]:
    if len(keys) == 1 and type(keys[0]) is bytes and len(keys[0]) == KEY_BYTES:
        return [keys[0]]
    checked = list(keys) if set(map(type, keys)) <= {bytes} else list(map(bytes, keys))
    if not set(map(len, checked)) <= {KEY_BYTES}:
        wrong = next(len(key) for key in checked if len(key) != KEY_BYTES)
        raise ValueError(f"a key is {KEY_BYTES} bytes, not {wrong}")
    return checked


def _before(prefix: Prefix) -> Mapping[bytes, tuple[bytes, int]]:
    """By key, the key before it and how many are before it."""
    if isinstance(prefix, Mapping):
        _check_keys([*prefix, *(above for above, _ in prefix.values() if above)])
        if any(not 0 <= depth < 1 << 32 for _, depth in prefix.values()):
            raise ValueError("how many keys are before one is 0 or more, and less than 2^32")
        return prefix
    keys = _check_keys(prefix)
    return {key: (keys[at - 1] if at else b"", at) for at, key in enumerate(keys)}


def _stated(
    before: Mapping[bytes, tuple[bytes, int]], keys: list[bytes]
) -> tuple[list[bytes], list[int]]:
    """What a question says is before its keys; nothing where nothing is known."""
    if not before:
        return [], []
    found = [before.get(key, (b"", 0)) for key in keys]
    return [parent for parent, _ in found], [depth for _, depth in found]


def _batches(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    return _parts(_check_keys(keys), MAX_KEYS)


def _parts(items: list[T], most: int) -> Iterator[list[T]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _put_batches(
    blocks: Mapping[bytes, Buffer], batch_bytes: int
) -> Iterator[list[tuple[bytes, memoryview]]]:
    batch: list[tuple[bytes, memoryview]] = []
    size_bytes = 0
    for key, data in blocks.items():
        view = _as_bytes(data)
        if batch and (len(batch) == MAX_KEYS or size_bytes + len(view) > batch_bytes):
            yield batch
            batch, size_bytes = [], 0
        batch.append((key, view))
        size_bytes += len(view)
    if batch:
        yield batch


def _as_bytes(data: Buffer) -> memoryview:
    view = memoryview(data)
    if view.nbytes == 0:
        raise ValueError("a block has at least one byte")
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def _given_by(reply: local.AgentReply) -> list[int]:
    """Handles and tickets that an answer gives."""
    if isinstance(reply, _Given):
        return reply.words(_HANDLE)
    if isinstance(reply, local.Got):
        return [got.handle for got in reply.blocks if got.status == local.OK]
    if isinstance(reply, local.Allocated):
        return [extent.ticket for extent in reply.extents if extent.status == local.OK]
    if isinstance(reply, local.Committed) and reply.room is not None:
        return [reply.room.ticket]
    return []


def _one_each(asked: Sequence[object], answered: list[T]) -> list[T]:
    if len(asked) != len(answered):
        raise AgentGoneError(f"the agent answered {len(answered)} of {len(asked)} keys")
    return answered
