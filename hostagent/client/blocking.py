"""The blocking client: a `Conversation` over a Unix socket, for threads.

Owns: the socket, its time-outs, and that threads take turns. Must not know: what is said
(`conversation`).
"""

from __future__ import annotations

import functools
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Concatenate, Final, ParamSpec, TypeVar

from kvcast.hostagent.client.conversation import (
    READ_BYTES,
    Arrived,
    Ask,
    Call,
    Conversation,
    Prefix,
)
from kvcast.hostagent.client.errors import AgentGoneError, KvcastError
from kvcast.protocol.messages import local
from kvcast.protocol.messages.questions import COURIER_BYTES

_NOBODYS: Final = 0
"""A number that no request has."""

P = ParamSpec("P")
T = TypeVar("T")


def has_ended(descriptor: int) -> bool:
    """Whether the other end of a socket is closed; no bytes are taken from it."""
    watched = select.poll()
    try:
        watched.register(descriptor, select.POLLRDHUP)
    except ValueError:  # ours is closed
        return True
    return bool(watched.poll(0))


def _blocking(
    call: Callable[Concatenate[Conversation, P], Call[T]],
) -> Callable[Concatenate[Client, P], T]:
    """A call of the conversation as a method that waits for it."""

    @functools.wraps(call)
    def method(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(call(client._conversation, *args, **kwargs))

    return method


class Client:
    """A blocking client of the agent at `socket_path`.

    May be used from several threads; they take turns, a whole request each. `timeout_s` is how
    long to wait for the agent's Welcome; a client that is `read_only` cannot put, and cannot write
    what it reads either. Blocks that this node holds are got and released without a message, where
    the agent shares its index; nothing else changes by it. A client does not outlast a fork: in
    the child, its calls raise AgentGoneError. Raises AgentGoneError where no agent listens, and
    AgentRejectedError where it does not let us in.
    """

    def __init__(
        self, socket_path: str, *, name: str = "", timeout_s: float = 5.0, read_only: bool = False
    ) -> None:
        self._lock = threading.Lock()
        self._path = socket_path
        self._conversation = Conversation(self._post, read_only=read_only)
        self._replies: deque[local.AgentReply] = deque()
        self._awaited: dict[int, tuple[local.Request, local.AgentReply | None]] = {}
        """What `get_each` has asked, and the answers that have come for it."""
        self._posted: deque[local.Request] = deque()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._patience_s = -1.0
        self._courier: socket.socket | None = None
        self._courier_patience_s = -1.0
        self._conversation.is_cut = lambda: has_ended(self._socket.fileno())
        try:
            self._shake_hands(self._socket, self._conversation.hello(name), timeout_s)
        except OSError as error:
            self.close()
            raise AgentGoneError(f"{socket_path}: {error}") from error
        except BaseException:
            self.close()
            raise
        self.node_id = self._conversation.node_id

    @property
    def arena_bytes(self) -> int:
        """The size of the agent's arena."""
        return self._conversation.arena_bytes

    @property
    def arena(self) -> memoryview:
        """As `AsyncClient.arena`."""
        return self._conversation.arena

    def near(self, namespace: int, keys: Sequence[bytes]) -> int:
        """As `AsyncClient.near`."""
        return self._conversation.near(namespace, keys)

    def of_prefixes(self, namespace: int) -> bool:
        """As `AsyncClient.of_prefixes`."""
        return self._conversation.of_prefixes(namespace)

    def _shake_hands(self, sock: socket.socket, hello: bytes, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        sock.connect(self._path)
        sock.sendall(hello)
        while not self._conversation.welcomed(*socket.recv_fds(sock, READ_BYTES, 4)[:2]):
            pass
        self._take_courier()

    def _take_courier(self) -> None:
        """The courier's socket that came with the Welcome, instead of the one before."""
        self._leave_courier()
        descriptor, self._conversation.courier_fd = self._conversation.courier_fd, -1
        if descriptor >= 0:
            self._courier = socket.socket(fileno=descriptor)
            self._courier_patience_s = -1.0
            self._conversation.has_courier = True

    def _leave_courier(self) -> None:
        """Ask the courier no more, and hear no more of it."""
        if self._courier is not None:
            self._courier.close()
        self._courier, self._conversation.has_courier = None, False

    def _ask_courier(self, ask: Ask, end: float) -> Ask | local.AgentReply:
        """Ask the courier; its answer, or what the agent is to be asked."""
        courier, conversation = self._courier, self._conversation
        if courier is None or not ask.courier:
            return ask
        try:
            self._send_posted()
            if ask.patience_s != self._courier_patience_s:
                seconds, part = divmod(ask.patience_s, 1)
                courier.setsockopt(
                    *(socket.SOL_SOCKET, socket.SO_RCVTIMEO),
                    struct.pack("@ll", int(seconds), int(part * 1e6)),
                )
                self._courier_patience_s = ask.patience_s
            courier.send(ask.courier, socket.MSG_DONTWAIT)
            while answer := courier.recv(COURIER_BYTES):
                number, got = conversation.heard_of_courier(answer)
                if number == ask.request.request:
                    return got or conversation.handed_over(ask, end - time.monotonic())
                if got is not None:
                    conversation.give_back(got)
        except TimeoutError as error:  # the agent, not the courier
            raise AgentGoneError(f"the agent does not answer: {error}") from error
        except OSError:  # also: no answer in time
            pass
        self._leave_courier()
        return ask

    def _reconnect(self, end: float, why: Exception) -> None:
        """Connect to the agent that comes after, until `end`; else AgentGoneError. To be called
        with the lock."""
        self._leave_courier()
        while self._replies:
            self._conversation.forget(self._replies.popleft())
        pauses = self._conversation.pauses()
        # The old connection stays open meanwhile: by its end the agent would know that we are gone.
        with self._socket:
            while True:
                left_s = end - time.monotonic()
                if self._closed or not self._conversation.may_resume or left_s <= 0:
                    raise AgentGoneError(f"the agent does not answer: {why}") from why
                fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    self._shake_hands(fresh, self._conversation.hello_again(), left_s)
                except (OSError, AgentGoneError) as error:
                    fresh.close()
                    why = error
                    time.sleep(min(pauses.next_pause_s(), left_s))
                except BaseException:
                    fresh.close()
                    raise
                else:
                    break
        self._socket = fresh
        self._patience_s = -1.0

    def _run(self, call: Call[T]) -> T:
        self._conversation.check()
        ask: Ask | None = None
        try:
            ask = next(call)
            while True:
                ask = call.send(self._exchange(ask))
        except StopIteration as end:
            value: T = end.value
            return value
        except AgentGoneError:
            with self._lock:  # also where it is the answer that makes no sense
                self._socket.close()
            raise
        except KvcastError:
            raise
        except BaseException:
            if ask is not None:  # an interrupt, most likely while it was waited for
                self._conversation.give_up([ask.request])
            raise
        finally:
            call.close()

    def _exchange(self, ask: Ask) -> local.AgentReply:
        """Ask, and wait for the answer."""
        end = time.monotonic() + ask.patience_s
        with self._lock:
            if ask.courier:
                told = self._ask_courier(ask, end)
                if not isinstance(told, Ask):
                    return told
                ask = told
            patience_s = ask.patience_s
            while True:
                try:
                    self._be_patient(patience_s)
                    self._send_posted()
                    self._send(ask.request)
                    while (reply := self._reply_to(ask.request.request)) is None:
                        self._replies += self._conversation.replies(self._socket.recv(READ_BYTES))
                    return reply
                except TimeoutError as error:
                    self._socket.close()
                    raise AgentGoneError(f"the agent does not answer: {error}") from error
                except (OSError, AgentGoneError) as error:
                    self._reconnect(end, error)
                    self._ask_awaited_again()
                    patience_s = max(end - time.monotonic(), 0.001)

    def _ask_awaited_again(self) -> None:
        """The answers that `get_each` waits for come from the agent that came after."""
        for request, reply in self._awaited.values():
            if reply is None:
                self._posted.append(request)

    def _be_patient(self, patience_s: float) -> None:
        """How long the socket is waited for from now on; a system call, if that is another time."""
        if patience_s != self._patience_s:
            self._socket.settimeout(patience_s)
            self._patience_s = patience_s

    def _reply_to(self, number: int) -> local.AgentReply | None:
        """The answer to request `number`, if it is there. Answers to requests that an interrupt
        abandoned are undone on the way."""
        while self._replies:
            reply = self._replies.popleft()
            if reply.request == number:
                return reply
            if reply.request in self._awaited:
                request, _ = self._awaited[reply.request]
                self._awaited[reply.request] = request, reply
                continue
            self._conversation.give_back(reply)
        return None

    def get_each(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
        prefix: Prefix = (),
    ) -> Iterator[Arrived]:
        """As `get_outcomes`, each as soon as it is there: pairs of a key's position in `keys` and
        its outcome; first those that this node holds. Blocks are the caller's once it has them; of
        an iterator that is given up (`close`), the rest are released."""
        conversation = self._conversation
        conversation.check()
        here, parts = conversation.get_parts(
            namespace, keys, deadline_s, gather_ms, group, expect, prefix
        )
        arrived = deque(here)
        end = time.monotonic() + max((part.ask.patience_s for part in parts.values()), default=0)
        try:
            with self._lock:
                for number, part in parts.items():
                    self._awaited[number] = part.ask.request, None
                self._say([part.ask.request for part in parts.values()], end)
            while arrived or parts:
                while arrived:
                    yield arrived.popleft()
                if parts:
                    reply = self._next_awaited(parts, end)
                    arrived += conversation.part_outcomes(parts.pop(reply.request), reply)
        finally:
            for _, outcome in arrived:
                if outcome.block is not None:
                    outcome.block.release()
            missing: list[local.Numbered] = []
            with self._lock:
                for number, part in parts.items():
                    _, late = self._awaited.pop(number, (None, None))
                    if late is not None:
                        conversation.give_back(late)
                    else:
                        missing.append(part.ask.request)
            conversation.give_up(missing)

    def _say(self, requests: list[local.Numbered], end: float) -> None:
        try:
            self._send_posted()
            for request in requests:
                self._send(request)
        except TimeoutError as error:
            self._socket.close()
            raise AgentGoneError(f"the agent does not answer: {error}") from error
        except OSError as error:
            self._reconnect(end, error)
            self._ask_awaited_again()

    def _next_awaited(self, numbers: Iterable[int], end: float) -> local.AgentReply:
        """The next answer to one of these; AgentGoneError where none comes until `end`."""
        with self._lock:
            while True:
                try:
                    self._reply_to(_NOBODYS)
                    for number in numbers:
                        _, reply = self._awaited[number]
                        if reply is not None:
                            del self._awaited[number]
                            return reply
                    self._be_patient(max(end - time.monotonic(), 0.001))
                    self._send_posted()
                    self._replies += self._conversation.replies(self._socket.recv(READ_BYTES))
                except TimeoutError as error:
                    self._socket.close()
                    raise AgentGoneError(f"the agent does not answer: {error}") from error
                except (OSError, AgentGoneError) as error:
                    self._reconnect(end, error)
                    self._ask_awaited_again()

    def _post(self, message: local.Request) -> None:
        # deque.append is atomic; a garbage collector may call this in the middle of _exchange.
        self._posted.append(message)
        if self._lock.acquire(blocking=False):
            try:
                self._send_posted()
            except OSError:
                pass  # the agent is gone, and our pins with it
            finally:
                self._lock.release()

    def _send_posted(self) -> None:
        self._conversation.post_released()
        while self._posted:
            # An agent that comes after hears from `_held` what was released.
            message = self._posted.popleft()
            released = self._conversation.courier_release(message)
            if released and self._courier is not None:
                try:
                    self._courier.send(released, socket.MSG_DONTWAIT)
                    continue
                except OSError:
                    pass  # it is full, or gone: the agent knows what the courier has given
            self._send(message)

    def _send(self, message: local.ClientMessage) -> None:
        data = self._conversation.encode(message)
        sent = self._socket.send(data)
        if sent < len(data):
            try:
                self._socket.sendall(memoryview(data)[sent:])
            except BaseException:  # whatever came next would be taken for the rest of it
                self._socket.close()
                raise

    get = _blocking(Conversation.get)
    get_outcomes = _blocking(Conversation.get_outcomes)
    prefetch = _blocking(Conversation.prefetch)
    put = _blocking(Conversation.put)
    reserve = _blocking(Conversation.reserve)
    commit = _blocking(Conversation.commit)
    exists = _blocking(Conversation.exists)
    drop = _blocking(Conversation.drop)
    pin = _blocking(Conversation.pin)
    unpin = _blocking(Conversation.unpin)
    stats = _blocking(Conversation.stats)
    namespace = _blocking(Conversation.namespace)
    group = _blocking(Conversation.group)
    company = _blocking(Conversation.company)
    weighed = _blocking(Conversation.weighed)
    describe = _blocking(Conversation.describe)

    def close(self) -> None:
        """Disconnect; the agent unpins all that this client held. Its blocks are useless."""
        self._closed = True
        self._socket.close()
        if self._courier is not None:
            self._courier.close()
        self._conversation.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
