"""The asyncio client: a `Conversation` over a Unix socket, for many calls at once.

Owns: the stream, which call waits for which reply, cancellation and time-outs. Must not know: what
is said (`conversation`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from kvcast.hostagent.client.blocking import has_ended
from kvcast.hostagent.client.conversation import (
    READ_BYTES,
    RECONNECT_S,
    Arrived,
    Ask,
    Call,
    Conversation,
    Prefix,
)
from kvcast.hostagent.client.errors import AgentGoneError, KvcastError
from kvcast.protocol.messages import local
from kvcast.protocol.messages.questions import COURIER_BYTES

P = ParamSpec("P")
T = TypeVar("T")


def _asynchronous(
    call: Callable[Concatenate[Conversation, P], Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A call of the conversation as a coroutine method."""

    @functools.wraps(call)
    async def method(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._run(call(client._conversation, *args, **kwargs))

    return method


class AsyncClient:
    """A client for asyncio; many requests may be in flight at once, on one connection.

    ``async with await AsyncClient.connect(path) as pool: ...``. Methods, results and errors are
    those of `Client`; cancelling a call forgets its answer (blocks that come all the same are
    released).
    """

    def __init__(self, *, read_only: bool = False) -> None:
        """For `connect`, which is how a client is made."""
        self._conversation = Conversation(self._post, read_only=read_only)
        self._waiting: dict[int, asyncio.Future[local.AgentReply]] = {}
        self._asked: dict[int, local.Numbered] = {}
        """What those that wait have asked, for the agent that comes after."""
        self._path = ""
        self._cut = False
        """The connection is gone, and is being made anew."""
        self._unsaid: list[local.Request] = []
        """What was posted meanwhile."""
        self._courier: socket.socket | None = None
        self._courier_waiting: dict[int, asyncio.Future[local.AgentReply | None]] = {}
        """Questions to the courier; None is told where the agent is to be asked."""
        self._gone = ""
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._task: asyncio.Task[None]

    @property
    def connected(self) -> bool:
        """False once the agent is gone or the client was closed; then make a new client."""
        return not self._gone

    @property
    def node_id(self) -> str:
        """The name of the agent's node."""
        return self._conversation.node_id

    @property
    def arena_bytes(self) -> int:
        """The size of the agent's arena."""
        return self._conversation.arena_bytes

    @property
    def arena(self) -> memoryview:
        """The agent's arena, in which all blocks lie, read-only, shape (arena_bytes,), format "B";
        the same view until another agent's arena takes its place."""
        return self._conversation.arena

    def near(self, namespace: int, keys: Sequence[bytes]) -> int:
        """How many of `keys`, counted from the first without a gap, this node's memory holds; 0
        also where that is not known without asking the agent. In any thread."""
        return self._conversation.near(namespace, keys)

    def of_prefixes(self, namespace: int) -> bool:
        """Whether it is worth saying `prefix` in gets and puts there, by what was known when
        `namespace` found this number: its policy looks at it."""
        return self._conversation.of_prefixes(namespace)

    @classmethod
    async def connect(
        cls,
        socket_path: str,
        *,
        name: str = "",
        timeout_s: float = 5.0,
        read_only: bool = False,
    ) -> AsyncClient:
        """Connect to the agent at `socket_path`; arguments and errors as for `Client`."""
        client = cls(read_only=read_only)
        client._path = socket_path
        try:
            await client._shake_hands(client._conversation.hello(name), timeout_s)
        except BaseException as error:
            client._conversation.close()
            if isinstance(error, OSError):  # TimeoutError is one
                raise AgentGoneError(f"{socket_path}: {str(error) or 'no answer'}") from error
            raise
        client._task = asyncio.create_task(client._read())
        return client

    async def _shake_hands(self, hello: bytes, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, self._path)
                await loop.sock_sendall(sock, hello)
                while not self._conversation.welcomed(*await _receive_fds(loop, sock)):
                    pass
            self._reader, self._writer = await asyncio.open_unix_connection(sock=sock)
            self._conversation.is_cut = lambda: has_ended(sock.fileno())
        except BaseException:
            sock.close()
            raise
        self._leave_courier()
        descriptor, self._conversation.courier_fd = self._conversation.courier_fd, -1
        if descriptor >= 0:
            self._courier = socket.socket(fileno=descriptor)
            self._courier.setblocking(False)
            self._conversation.has_courier = True
            loop.add_reader(descriptor, self._courier_readable)

    def _leave_courier(self) -> None:
        """Ask the courier no more."""
        courier, self._courier = self._courier, None
        self._conversation.has_courier = False
        if courier is not None:
            asyncio.get_running_loop().remove_reader(courier.fileno())
            courier.close()
        waiting, self._courier_waiting = self._courier_waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)

    def _courier_readable(self) -> bool:
        """Hear an answer of the courier; whether there was one."""
        assert self._courier is not None
        try:
            number, got = self._conversation.heard_of_courier(self._courier.recv(COURIER_BYTES))
        except BlockingIOError:
            return False
        except (OSError, AgentGoneError):  # also: the agent does not want us there
            self._leave_courier()
            return False
        future = self._courier_waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result(got)
        elif got is not None:
            self._conversation.give_back(got)
        return True

    async def _ask_courier(self, ask: Ask) -> Ask | local.AgentReply:
        """Ask the courier; its answer, or what the agent is to be asked."""
        loop = asyncio.get_running_loop()
        if self._courier is None:
            return ask
        end = loop.time() + ask.patience_s
        number = ask.request.request
        future: asyncio.Future[local.AgentReply | None] = loop.create_future()
        try:
            self._courier.send(ask.courier)
        except OSError:  # it is full, or gone
            return ask
        self._courier_waiting[number] = future
        got: local.AgentReply | None = None
        taken = False
        try:
            async with asyncio.timeout(ask.patience_s):
                got = await future
            taken = True
            return got or self._conversation.handed_over(ask, end - loop.time())
        except TimeoutError:
            raise AgentGoneError(f"the agent did not answer within {ask.patience_s} s") from None
        finally:
            self._courier_waiting.pop(number, None)
            if future.cancelled():
                self._conversation.give_up([ask.request])
            elif not taken and future.done():
                late = future.result()  # it came at the moment at which we were cancelled
                if late is not None:
                    self._conversation.give_back(late)

    async def _read(self) -> None:
        while True:
            try:
                while True:
                    for reply in self._conversation.replies(await self._reader.read(READ_BYTES)):
                        self._answered(reply)
            except AgentGoneError as error:
                reason = str(error)
            except OSError as error:
                reason = f"the connection to the agent broke: {error}"
            try:
                await self._reconnect(reason)
            except KvcastError as error:
                self._end(str(error))
                return

    async def _reconnect(self, why: str) -> None:
        """Connect to the agent that comes after, and ask again what is not answered; KvcastError
        where none comes for `RECONNECT_S`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + RECONNECT_S
        self._cut = True
        while self._courier is not None and self._courier_readable():
            pass  # what the agent still said: a put may have been done, which is done once
        self._leave_courier()
        pauses = self._conversation.pauses()
        old = self._writer  # open meanwhile: by its end the agent would know that we are gone
        while True:
            left_s = end - loop.time()
            if self._gone or not self._conversation.may_resume or left_s <= 0:
                raise AgentGoneError(why)
            try:
                await self._shake_hands(self._conversation.hello_again(), left_s)
            except (OSError, AgentGoneError) as error:
                why = f"the agent does not come back: {error}"
                await asyncio.sleep(pauses.next_pause_s())
            else:
                break
        old.close()
        self._cut = False
        unsaid, self._unsaid = self._unsaid, []
        for request in [*unsaid, *self._asked.values()]:
            self._writer.write(self._conversation.encode(request))

    def _answered(self, reply: local.AgentReply) -> None:
        future = self._waiting.pop(reply.request, None)
        if future is not None and not future.done():
            future.set_result(reply)
        else:
            self._conversation.give_back(reply)

    def _end(self, reason: str) -> None:
        self._gone = self._gone or reason
        self._writer.close()
        self._leave_courier()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(AgentGoneError(reason))

    async def _run(self, call: Call[T]) -> T:
        self._conversation.check()
        with contextlib.closing(call):
            try:
                ask = next(call)
                while True:
                    reply = await self._exchange(ask)
                    try:
                        ask = call.send(reply)
                    except AgentGoneError as error:  # the answer makes no sense
                        self._end(str(error))
                        raise
            except StopIteration as end:
                return cast(T, end.value)

    async def _exchange(self, ask: Ask) -> local.AgentReply:
        """Ask, and wait for the answer."""
        if self._gone:
            raise AgentGoneError(self._gone)
        self._conversation.post_released()
        if ask.courier:
            told = await self._ask_courier(ask)
            if not isinstance(told, Ask):
                return told
            ask = told
        number = ask.request.request
        future: asyncio.Future[local.AgentReply] = asyncio.get_running_loop().create_future()
        data = self._conversation.encode(ask.request)
        self._waiting[number] = future
        self._asked[number] = ask.request
        if not self._cut:
            self._writer.write(data)
        reply: local.AgentReply | None = None
        try:
            async with asyncio.timeout(ask.patience_s):
                try:
                    await self._writer.drain()
                except ConnectionError:
                    if not self._conversation.may_resume:
                        raise
                reply = await future
            return reply
        except TimeoutError:
            raise AgentGoneError(f"the agent did not answer within {ask.patience_s} s") from None
        except OSError as error:
            raise AgentGoneError(f"the connection to the agent broke: {error}") from error
        finally:
            # Nobody waits for the answer any more. If it still comes, what it holds is given back.
            self._asked.pop(number, None)
            if self._waiting.get(number) is future:
                del self._waiting[number]
            if future.cancel() or future.cancelled():
                self._conversation.give_up([ask.request])  # it did not come
            elif future.exception() is None and reply is None:
                # It came at the moment at which we were cancelled.
                self._conversation.give_back(future.result())

    async def get_each(
        self,
        namespace: int,
        keys: Sequence[bytes],
        deadline_s: float = 1.0,
        *,
        gather_ms: int = 0,
        group: int = 0,
        expect: bool = False,
        prefix: Prefix = (),
    ) -> AsyncGenerator[Arrived, None]:
        """As `get_outcomes`, each as soon as it is there: pairs of a key's position in `keys` and
        its outcome; first those that this node holds. Blocks are the caller's once it has them; of
        an iterator that is given up (`aclose`), the rest are released."""
        conversation = self._conversation
        conversation.check()
        here, parts = conversation.get_parts(
            namespace, keys, deadline_s, gather_ms, group, expect, prefix
        )
        arrived = deque(here)
        asked = {asyncio.create_task(self._exchange(part.ask)) for part in parts.values()}
        try:
            while arrived or asked:
                while arrived:
                    yield arrived.popleft()
                if asked:
                    done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                    failed: BaseException | None = None
                    for task in done:  # all of them, whatever becomes of one: they hold blocks
                        try:
                            reply = task.result()
                            arrived += conversation.part_outcomes(parts[reply.request], reply)
                        except Exception as error:
                            failed = error
                    if failed is not None:
                        raise failed
        finally:
            for task in asked:
                task.cancel()
            for task in asked:
                with contextlib.suppress(BaseException):
                    conversation.give_back(await task)
            for _, outcome in arrived:
                if outcome.block is not None:
                    outcome.block.release()

    def _post(self, message: local.Request) -> None:
        if self._gone:
            return
        if self._cut:  # our Hello may have been sent, and may have named what this gives back
            self._unsaid.append(message)
            return
        if self._writer.is_closing():  # the next agent hears in our Hello what we hold
            return
        released = self._conversation.courier_release(message)
        try:
            if not released or self._courier is None:
                raise BlockingIOError
            self._courier.send(released)
        except OSError:  # the courier is full, or none: the agent knows what it has given
            self._writer.write(self._conversation.encode(message))

    get = _asynchronous(Conversation.get)
    get_outcomes = _asynchronous(Conversation.get_outcomes)
    prefetch = _asynchronous(Conversation.prefetch)
    put = _asynchronous(Conversation.put)
    reserve = _asynchronous(Conversation.reserve)
    commit = _asynchronous(Conversation.commit)
    exists = _asynchronous(Conversation.exists)
    drop = _asynchronous(Conversation.drop)
    pin = _asynchronous(Conversation.pin)
    unpin = _asynchronous(Conversation.unpin)
    stats = _asynchronous(Conversation.stats)
    namespace = _asynchronous(Conversation.namespace)
    group = _asynchronous(Conversation.group)
    company = _asynchronous(Conversation.company)
    weighed = _asynchronous(Conversation.weighed)
    describe = _asynchronous(Conversation.describe)

    async def close(self) -> None:
        """Disconnect; the agent unpins all that this client held. Its blocks are useless."""
        self._end("the client was closed")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._writer.wait_closed()
        except OSError:
            pass
        self._conversation.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _receive_fds(
    loop: asyncio.AbstractEventLoop, sock: socket.socket
) -> tuple[bytes, list[int]]:
    """Bytes, and the descriptors that came with them."""
    while True:
        readable = asyncio.Event()
        loop.add_reader(sock.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(sock.fileno())
        with contextlib.suppress(BlockingIOError):
            return socket.recv_fds(sock, READ_BYTES, 4)[:2]
