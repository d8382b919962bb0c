"""What only the asyncio client has, cancellation and many calls at once, against an agent that
reads and answers when the test says so. (What both have: test_hostagent_client_contract.py.)

Oracle: what the agent is sent. Cannot see: a real agent (tests/integration/test_hostagent_pool.py).
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
from kvcast.hostagent.client import AgentGoneError, AsyncClient, BusyError, Client
from kvcast.hostagent.client.blocks import Reservation
from kvcast.hostagent.client.conversation import RETRY_S, SMALL_BYTES, Conversation
from kvcast.hostagent.client.local_blocks import Found
from kvcast.protocol.links.backoff import Backoff
from kvcast.protocol.messages import local
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.questions import ANSWER, ASK_AGENT, GIVEN, PUT_HOME
from patience import PATIENCE_S

ARENA_BYTES = 1 << 20
_SILENCE_S = 60.0
"""After which nothing more comes."""
KEYS = [number.to_bytes(16, "big") for number in range(1000)]


class SlowAgent:
    """Says Welcome, and from then on only what it is told to."""

    def __init__(self, path: Path) -> None:
        self._codec: MessageCodec[Any] = MessageCodec(local.ClientMessage)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None

    async def accept(self) -> Any:
        """Hear a client's Hello."""
        loop = asyncio.get_running_loop()
        self._peer, _ = await loop.sock_accept(self._listener)
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._peer.setblocking(False)
        (hello,) = self._codec.feed(await loop.sock_recv(self._peer, 4096))
        return hello

    async def welcome(self, token: bytes = b"") -> None:
        await self.accept()
        assert self._peer is not None
        arena = os.memfd_create("arena")
        try:
            os.ftruncate(arena, ARENA_BYTES)
            welcome = local.Welcome(
                local.LOCAL_PROTOCOL_VERSION, "node-1", ARENA_BYTES, token=token
            )
            socket.send_fds(self._peer, [self._codec.encode(welcome)], [arena])
        finally:
            os.close(arena)

    async def hear(self, kind: type) -> list[Any]:
        """Read on until a message of that kind comes; all that came until then."""
        assert self._peer is not None
        messages: list[Any] = []
        while not any(isinstance(message, kind) for message in messages):
            coming = asyncio.get_running_loop().sock_recv(self._peer, 1 << 20)
            data = await asyncio.wait_for(coming, _SILENCE_S)
            assert data, f"the client left; until then it said {messages}"
            messages += self._codec.feed(data)
        return messages

    async def say(self, message: Any) -> None:
        assert self._peer is not None
        await asyncio.get_running_loop().sock_sendall(self._peer, self._codec.encode(message))

    def die(self) -> None:
        """The connection ends; another may be made."""
        assert self._peer is not None
        self._peer.close()

    def close(self) -> None:
        self._listener.close()
        if self._peer is not None:
            self._peer.close()


@pytest_asyncio.fixture
async def agent_and_client(tmp_path: Path) -> AsyncIterator[tuple[SlowAgent, AsyncClient]]:
    agent = SlowAgent(tmp_path / "agent.sock")
    welcoming = asyncio.create_task(agent.welcome())
    client = await AsyncClient.connect(str(tmp_path / "agent.sock"))
    await welcoming
    yield agent, client
    await client.close()
    agent.close()


async def _stuffed(client: AsyncClient) -> list[asyncio.Task[Any]]:
    """Gets that the agent does not read, until the client has to wait before it can send more."""
    tasks = []
    for _ in range(40):  # 16 KiB each: beyond what sockets and the client's buffer hold
        tasks.append(asyncio.create_task(client.get(1, KEYS, deadline_s=0.1)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    return tasks


async def test_what_comes_for_a_get_that_gave_up_while_it_was_sent_is_released(
    agent_and_client: tuple[SlowAgent, AsyncClient],
) -> None:
    agent, client = agent_and_client
    tasks = await _stuffed(client)
    tasks[-1].cancel()  # as the time-out does, or an engine that ends
    await asyncio.wait([tasks[-1]])
    messages = []
    while len(messages) < len(tasks):
        messages += await agent.hear(local.Get)
    while not isinstance(messages[-1], local.Release):
        messages += await agent.hear(local.Release)
    *_, last, given_up = messages
    assert given_up == local.Release([], [last.request])
    block = local.GotBlock(local.OK, handle=77, offset=0, size_bytes=10, digest=1, tier="local")
    await agent.say(local.Got(last.request, [block]))
    (release,) = [m for m in await agent.hear(local.Release) if isinstance(m, local.Release)]
    assert release.handles == [77]
    for task in tasks[:-1]:
        task.cancel()
    await asyncio.wait(tasks)


async def test_an_agent_hears_of_gets_that_are_given_up_and_of_nothing_else(
    agent_and_client: tuple[SlowAgent, AsyncClient],
) -> None:
    agent, client = agent_and_client
    getting = asyncio.create_task(client.get(1, KEYS[:1]))
    (request,) = await agent.hear(local.Get)
    pinning = asyncio.create_task(client.pin(1, KEYS[:1]))
    await agent.hear(local.Pin)
    for task in (pinning, getting):
        task.cancel()
        await asyncio.wait([task])
    *_, release = await agent.hear(local.Release)
    assert release == local.Release([], [request.request])


async def test_what_comes_at_the_moment_a_get_is_cancelled_is_released(
    agent_and_client: tuple[SlowAgent, AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, client = agent_and_client
    getting = asyncio.create_task(client.get(1, KEYS[:1]))
    (request,) = await agent.hear(local.Get)
    answered = client._answered

    def answered_and_cancelled(reply: local.AgentReply) -> None:
        answered(reply)  # this wakes the get up; before it runs, it is cancelled
        getting.cancel()

    monkeypatch.setattr(client, "_answered", answered_and_cancelled)
    block = local.GotBlock(local.OK, handle=78, offset=0, size_bytes=10, digest=1, tier="local")
    await agent.say(local.Got(request.request, [block]))
    (release,) = await agent.hear(local.Release)
    assert release.handles == [78]
    await asyncio.wait([getting])
    assert getting.cancelled()


async def test_an_agent_that_dies_under_a_full_client_ends_every_get_and_leaves_nothing_unseen(
    agent_and_client: tuple[SlowAgent, AsyncClient],
) -> None:
    agent, client = agent_and_client
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    tasks = await _stuffed(client)
    agent.close()
    while client.connected:  # some are made after the socket broke, and before the client knows
        tasks += [asyncio.create_task(client.get(1, KEYS[:1])) for _ in range(2)]
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, AgentGoneError) for outcome in outcomes)
    assert not client.connected
    del tasks, outcomes
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


async def test_what_is_released_while_a_client_comes_back_is_heard_of(tmp_path: Path) -> None:
    agent = SlowAgent(tmp_path / "agent.sock")
    welcoming = asyncio.create_task(agent.welcome(b"token"))
    client = await AsyncClient.connect(str(tmp_path / "agent.sock"))
    await welcoming
    getting = asyncio.create_task(client.get(1, KEYS[:1]))
    (request,) = await agent.hear(local.Get)
    given = local.GotBlock(local.OK, handle=77, offset=0, size_bytes=10, digest=1, tier="local")
    await agent.say(local.Got(request.request, [given]))
    (block,) = await getting
    assert block is not None
    agent.die()
    hello = await agent.accept()
    assert hello.resume.held == [77]
    block.release()
    version, resumed = local.LOCAL_PROTOCOL_VERSION, True
    await agent.say(local.Welcome(version, "node-1", 0, token=b"token", resumed=resumed))
    *_, release = await agent.hear(local.Release)
    assert release.handles == [77]
    await client.close()
    agent.close()


@pytest.mark.parametrize("blocks", [False, True], ids=["asynchronous", "blocking"])
async def test_an_agent_that_is_away_is_looked_for_after_ever_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    waits: list[float] = []
    longer = Backoff.next_pause_s

    def next_pause_s(backoff: Backoff) -> float:
        waits.append(longer(backoff))
        return waits[-1]

    monkeypatch.setattr(Backoff, "next_pause_s", next_pause_s)
    path = tmp_path / "agent.sock"
    agent = SlowAgent(path)
    welcoming = asyncio.create_task(agent.welcome(b"token"))
    client: Client | AsyncClient
    if blocks:
        client = await asyncio.to_thread(Client, str(path))
        calling = asyncio.create_task(asyncio.to_thread(client.stats))
    else:
        client = await AsyncClient.connect(str(path))
        calling = asyncio.create_task(client.stats())
    await welcoming
    agent.close()
    path.unlink()
    end = asyncio.get_running_loop().time() + PATIENCE_S
    while len(waits) < 4:
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.01)
    agent = SlowAgent(path)
    hello = await agent.accept()
    assert hello.resume is not None
    version, resumed = local.LOCAL_PROTOCOL_VERSION, True
    await agent.say(local.Welcome(version, "node-1", 0, token=b"token", resumed=resumed))
    *_, asked = await agent.hear(local.GetStats)
    await agent.say(local.Stats(asked.request, {"blocks": 3.0}))
    assert await calling == {"blocks": 3.0}
    assert waits[:4] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S]
    if isinstance(client, Client):
        client.close()
    else:
        await client.close()
    agent.close()


async def test_blocks_of_the_first_message_are_released_where_the_second_fails(
    agent_and_client: tuple[SlowAgent, AsyncClient],
) -> None:
    agent, client = agent_and_client
    keys = [number.to_bytes(16, "big") for number in range(local.MAX_KEYS + 1)]
    getting = asyncio.create_task(client.get(1, keys, deadline_s=5.0))
    (first,) = await agent.hear(local.Get)
    block = local.GotBlock(local.OK, handle=77, offset=0, size_bytes=10, digest=1, tier="local")
    miss = local.GotBlock(local.MISS)
    await agent.say(local.Got(first.request, [block] + [miss] * (local.MAX_KEYS - 1)))
    (second,) = await agent.hear(local.Get)
    await agent.say(local.Failed(second.request, local.BUSY, "too many"))
    (release,) = await agent.hear(local.Release)
    assert release.handles == [77]
    with pytest.raises(BusyError):
        await getting


def _held(conversation: Conversation) -> set[int]:
    """What an agent that comes after is told is held."""
    codec: MessageCodec[Any] = MessageCodec(local.ClientMessage)
    (hello,) = codec.feed(conversation.hello_again())
    return set(hello.resume.held)


@pytest.mark.parametrize("dies", [True, False])
def test_rooms_that_were_put_are_nobodys_at_an_agent_that_took_them_for_ours(dies: bool) -> None:
    posted: list[local.Request] = []
    conversation = Conversation(posted.append)
    reservation = Reservation(conversation._abort, 1)
    reservation.tickets |= {8: KEYS[1], 9: KEYS[2]}
    call = conversation.commit(reservation)
    request = next(call).request
    conversation.lives += dies
    blocks = [local.PutBlock(local.OK, 1, 5), local.PutBlock(local.OK, 1, 6)]
    with pytest.raises(StopIteration):
        call.send(local.Committed(request.request, blocks))
    assert posted == ([local.Abort(request.request + 1, [8, 9])] if dies else [])


def test_what_an_answer_gives_is_held_before_anybody_has_taken_it() -> None:
    codec: MessageCodec[Any] = MessageCodec(local.ServerMessage)
    posted: list[local.Request] = []
    conversation = Conversation(posted.append)
    (got,) = conversation.replies(
        codec.encode(local.Got(1, [local.GotBlock(local.OK, "", "home", 7, 0, 10, 5)]))
    )
    conversation.replies(codec.encode(local.Allocated(2, [local.Extent(local.OK, 8, 0)])))
    _, given = conversation.heard_of_courier(ANSWER.pack(GIVEN, 0, 0, 3, 9, 0, 10, 5))
    assert given is not None
    assert _held(conversation) == {7, 8, 9}
    conversation.give_back(got)
    conversation.forget(given)
    assert _held(conversation) == {8}
    assert posted == [local.Release([7])]


@pytest.mark.parametrize("of_puts", [[PUT_HOME], [ASK_AGENT, PUT_HOME]])
def test_an_answer_that_is_of_a_get_and_of_a_put_is_not_understood(of_puts: list[int]) -> None:
    conversation = Conversation(lambda _: None)
    answer = b"".join(ANSWER.pack(of, 0, 0, 3, 9, 0, 10, 5) for of in [GIVEN, *of_puts])
    with pytest.raises(AgentGoneError, match="not understood"):
        conversation.heard_of_courier(answer)


def test_an_answer_that_leaves_all_to_the_agent_is_none() -> None:
    conversation = Conversation(lambda _: None)
    answer = ANSWER.pack(ASK_AGENT, 0, 0, 3, 0, 0, 0, 0)
    assert conversation.heard_of_courier(answer) == (3, None)
    assert conversation.heard_of_courier(2 * answer) == (3, None)


def _ask_courier(call: Any) -> int:
    """Have a call ask the courier; the number of its question."""
    with mock.patch.object(Conversation, "_for_courier", return_value=b"a question"):
        number: int = next(call).request.request
    return number


def _bring(call: Any, answer: Any) -> Any:
    """What a call that waits for an answer returns with it."""
    with pytest.raises(StopIteration) as ended:
        call.send(answer)
    return ended.value.value


def _with_arena(posted: list[local.Request]) -> tuple[Conversation, bytes]:
    """A conversation whose courier may be asked, and the bytes of its agent's arena."""
    conversation = Conversation(posted.append)
    conversation.has_courier = True
    content = bytes(range(200)) * 5
    conversation._arena = mock.Mock(
        read_each=lambda offsets, sizes: [
            memoryview(content)[at : at + size] for at, size in zip(offsets, sizes, strict=True)
        ]
    )
    return conversation, content


def test_of_many_blocks_the_courier_gives_some_and_the_agent_is_asked_for_the_others() -> None:
    posted: list[local.Request] = []
    conversation, content = _with_arena(posted)
    call = conversation.get_outcomes(1, KEYS[:5])
    number = _ask_courier(call)
    given = [(0, 0, 5), (2, 40, 7), (1, 100, 300)]  # tier, offset, size
    answers = [
        ANSWER.pack(GIVEN, tier, 0, number, 70 + at, offset, size, 500 + at)
        for at, (tier, offset, size) in enumerate(given)
    ]
    answers[1:1] = 2 * [ANSWER.pack(ASK_AGENT, 0, 0, number, 0, 0, 0, 0)]
    told, got = conversation.heard_of_courier(b"".join(answers))
    assert (told, _held(conversation)) == (number, {70, 71, 72})
    rest = call.send(got).request
    assert isinstance(rest, local.Get)
    assert rest.keys == KEYS[1:3]
    from_agent = local.GotBlock(local.OK, "", "ssd", 9, 20, 6, 11)
    missing = local.GotBlock(local.BUSY, "so many")
    outcomes = _bring(call, local.Got(rest.request, [missing, from_agent]))
    assert outcomes[1] == (None, local.BUSY, "so many")
    blocks = [outcome.block for outcome in outcomes if outcome.block is not None]
    assert [(block.key, block.tier, block.digest) for block in blocks] == [
        (KEYS[0], "home", 500),
        (KEYS[2], "ssd", 11),
        (KEYS[3], "switch", 501),
        (KEYS[4], "shared", 502),
    ]
    wanted = [content[:5], content[20:26], content[40:47], content[100:400]]
    assert [bytes(block.data) for block in blocks] == wanted
    assert [block.size_bytes for block in blocks] == list(map(len, wanted))
    for block in blocks[::-1]:
        block.release()
    # What came together goes back together.
    assert posted == [local.Release([9]), local.Release([72, 71, 70])]


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_of_blocks_that_came_together_one_that_is_dropped_is_released_with_what_is_said_next(
    dropped: int,
) -> None:
    posted: list[local.Request] = []
    conversation, _ = _with_arena(posted)
    call = conversation.get(1, KEYS[:3])
    number = _ask_courier(call)
    answer = b"".join(ANSWER.pack(GIVEN, 0, 0, number, 70 + at, 0, 9, 5) for at in range(3))
    blocks = _bring(call, conversation.heard_of_courier(answer)[1])
    for at in range(3):
        if at == dropped:
            with pytest.warns(ResourceWarning, match="not released"):
                blocks[at] = None
        else:
            blocks[at].release()
    if dropped == 2:
        assert posted == []
        conversation.post_released()
    assert posted == [local.Release([70, 71, 72])]


def test_blocks_of_which_one_is_large_are_given_back_each_by_itself() -> None:
    posted: list[local.Request] = []
    conversation, _ = _with_arena(posted)
    call = conversation.get(1, KEYS[:2])
    number = _ask_courier(call)
    sizes = [9, SMALL_BYTES + 1]
    answer = [ANSWER.pack(GIVEN, 0, 0, number, 70 + at, 0, sizes[at], 5) for at in range(2)]
    for block in _bring(call, conversation.heard_of_courier(b"".join(answer))[1]):
        block.release()
    assert posted == [local.Release([70]), local.Release([71])]


@pytest.mark.parametrize(("asked", "answered"), [(1, 2), (2, 1), (3, 4), (4, 3)])
def test_an_answer_to_more_or_fewer_than_were_asked_for_is_not_understood(
    asked: int, answered: int
) -> None:
    conversation, _ = _with_arena([])
    call = conversation.get(1, KEYS[:asked])
    number = _ask_courier(call)
    answer = b"".join(ANSWER.pack(GIVEN, 0, 0, number, 70 + at, 0, 9, 5) for at in range(answered))
    got = conversation.heard_of_courier(answer)[1]
    with pytest.raises(AgentGoneError, match=f"answered {answered} of {asked}"):
        call.send(got)


@pytest.mark.parametrize("tier", [3, 9, 1 << 15])
def test_an_answer_of_a_tier_that_there_is_not_is_not_understood(tier: int) -> None:
    conversation = Conversation(lambda _: None)
    answers = [ANSWER.pack(GIVEN, of, 0, 3, 9, 0, 10, 5) for of in (tier, 0)]
    for answer in (answers[0], b"".join(answers), b"".join(answers[::-1])):
        with pytest.raises(AgentGoneError, match="not understood"):
            conversation.heard_of_courier(answer)
    assert _held(conversation) == set()


def _holds(conversation: Conversation, keys: list[bytes]) -> mock.Mock:
    """Have an agent's index hold these blocks."""
    index = mock.Mock(given_up=True, LOCAL_TIER="local")
    found = Found(pin=1, offset=0, size_bytes=9, reserved_bytes=9, digest=5)
    index.prefix.side_effect = lambda _, key: int(key in keys)
    index.take.side_effect = lambda _, wanted: [found if key in keys else None for key in wanted]
    conversation._local = index
    conversation._arena = mock.Mock(read=lambda _, size: memoryview(bytes(size)))
    return index


@pytest.mark.parametrize(("here", "asked"), [({0}, 4), ({4}, 4), ({2}, 5), (set(), 5), ({0, 4}, 3)])
def test_of_many_blocks_the_others_are_looked_up_first_if_the_first_or_the_last_is_here(
    here: set[int], asked: int
) -> None:
    conversation, _ = _with_arena([])
    index = _holds(conversation, [KEYS[at] for at in here])
    with mock.patch.object(Conversation, "_for_courier", return_value=b"a question"):
        ask = next(conversation.get(1, KEYS[:5]))
    assert len(ask.request.keys) == asked
    assert index.take.called == (asked < 5)


def test_many_blocks_of_which_the_courier_is_not_asked_this_time_are_looked_up_first() -> None:
    conversation, _ = _with_arena([])
    _holds(conversation, [KEYS[2]])
    conversation._passes[1] = 1
    assert next(conversation.get(1, KEYS[:5])).request.keys == [*KEYS[:2], *KEYS[3:5]]


def test_what_the_courier_hands_over_is_looked_up_before_the_agent_is_asked() -> None:
    conversation, _ = _with_arena([])
    _holds(conversation, [KEYS[2]])
    call = conversation.get_outcomes(1, KEYS[:5])
    number = _ask_courier(call)
    conversation._arena = mock.Mock(read_each=lambda offsets, _: [memoryview(b"9")] * len(offsets))
    given = ANSWER.pack(GIVEN, 0, 0, number, 70, 0, 1, 5)
    left = ANSWER.pack(ASK_AGENT, 0, 0, number, 0, 0, 0, 0)
    answer = conversation.heard_of_courier(given + given + left + given + left)[1]
    conversation._arena.read = lambda _, size: memoryview(bytes(size))
    rest = call.send(answer).request
    assert rest.keys == KEYS[4:5]
    outcomes = _bring(call, local.Got(rest.request, [local.GotBlock(local.MISS)]))
    assert [outcome.block and outcome.block.tier for outcome in outcomes] == [
        *("home", "home", "local", "home", None)
    ]
    for outcome in outcomes[:4]:
        outcome.block.release()


def test_what_is_said_of_a_get_of_one_block_is_said_to_the_agent_alone() -> None:
    conversation = Conversation(lambda _: None)
    with mock.patch.object(Conversation, "_for_courier", return_value=b"a question"):
        said: dict[str, Any]
        for said in ({"gather_ms": 5}, {"group": 3}, {"group": 3, "expect": True}):
            ask = next(conversation.get(1, KEYS[1:2], **said))
            assert ask.courier == b""
            assert {name: getattr(ask.request, name) for name in said} == said


def test_of_what_is_said_to_be_of_a_prefix_the_agent_is_asked_who_remembers_that() -> None:
    conversation = Conversation(lambda _: None)
    with mock.patch.object(Conversation, "_for_courier", return_value=b"a question"):
        assert next(conversation.get(1, KEYS[1:2])).courier == b"a question"
        ask = next(conversation.get(1, KEYS[1:2], prefix=KEYS[:2]))
    assert ask.courier == b""
    assert isinstance(ask.request, local.Get)
    assert (ask.request.parents, ask.request.depths) == (KEYS[:1], [1])
