"""One contract for both clients: every test here runs over `Client` and over `AsyncClient`.

Oracle: a small agent that counts what its client holds (handles, tickets, pins), answers by the
local API, and refuses or garbles the n-th request when told to. Cannot see: what a real agent
decides (tests/integration/test_hostagent_pool.py), and cancellation, which only asyncio has
(test_hostagent_client.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvcast.hostagent.client import (
    AgentGoneError,
    AgentRejectedError,
    AsyncClient,
    BusyError,
    Client,
    ForbiddenError,
    InvalidRequestError,
    KvcastError,
    NoRoomError,
    PutError,
    QuotaError,
    UnavailableError,
    UnknownNamespaceError,
)
from kvcast.hostagent.client import blocks as client_blocks
from kvcast.hostagent.client.conversation import Ask
from kvcast.protocol.messages import local
from kvcast.protocol.messages.control import GroupInfo, NamespaceInfo
from kvcast.protocol.messages.framing import MessageCodec
from kvcast.protocol.messages.wire import digest_of

ARENA_BYTES = 1 << 20
KEYS = [number.to_bytes(16, "big") for number in range(2 * local.MAX_KEYS + 1)]
CALLS = ("commit", "company", "describe", "drop", "exists", "get", "get_outcomes", "group",
         "namespace", "pin", "prefetch", "put", "reserve", "stats", "unpin", "weighed")  # fmt: skip

Answer = Callable[[Any], Any]


class CountingAgent:
    """Serves one client in a thread, and keeps account of what that client holds."""

    def __init__(self, path: Path) -> None:
        self.heard: list[Any] = []
        self.handles: set[int] = set()
        self.tickets: set[int] = set()
        self.rooms: list[local.Extent] = []
        self.pins: Counter[bytes] = Counter()
        self.answers: dict[type, Answer] = {}
        """Instead of the agent's own answer to such a request; None: as usual."""
        self.welcome: Any = local.Welcome(local.LOCAL_PROTOCOL_VERSION, "node-1", ARENA_BYTES)
        self.arena = os.memfd_create("arena")
        os.ftruncate(self.arena, ARENA_BYTES)
        self._codec: MessageCodec[Any] = MessageCodec(local.ClientMessage)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._numbers = iter(range(1, 1 << 30))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # nobody came
        with peer, contextlib.suppress(ConnectionError):  # it may leave without hearing us out
            welcomed = False
            while data := peer.recv(1 << 16):
                for message in self._codec.feed(data):
                    if not welcomed:
                        fds = [self.arena] if isinstance(self.welcome, local.Welcome) else []
                        socket.send_fds(peer, [self._codec.encode(self.welcome)], fds)
                        welcomed = True
                        continue
                    self.heard.append(message)
                    answer = self.answers.get(type(message), lambda _: None)(message)
                    answer = answer or self._answer(message)
                    if answer is not None:
                        peer.sendall(self._codec.encode(answer))
        self.handles.clear()  # the client left
        self.tickets.clear()
        self.pins.clear()

    def _room(self) -> local.Extent:
        """Room that is given ahead, each behind the last."""
        room = local.Extent(local.OK, next(self._numbers), 1000 + 100 * len(self.rooms))
        self.rooms.append(room)
        self.tickets.add(room.ticket)
        return room

    def _answer(self, message: Any) -> Any:
        if isinstance(message, local.Release):
            self.handles -= set(message.handles)
            return None
        number = message.request
        if isinstance(message, local.Get):
            blocks = [
                local.GotBlock(
                    local.OK, "", "home", next(self._numbers), 0, 8, digest_of(b"\0" * 8)
                )
                for _ in message.keys
            ]
            self.handles |= {block.handle for block in blocks}
            return local.Got(number, blocks)
        if isinstance(message, local.Alloc):
            extents = []
            offset = 0
            for size_bytes in message.sizes:
                extents.append(local.Extent(local.OK, next(self._numbers), offset))
                offset += size_bytes
            self.tickets |= {extent.ticket for extent in extents}
            return local.Allocated(number, extents)
        if isinstance(message, (local.Commit, local.Abort)):
            self.tickets -= set(message.tickets)
            if isinstance(message, local.Abort):
                return local.Ack(number, len(message.tickets))
            room = self._room() if message.again else None
            puts = [local.PutBlock(local.OK, 1) for _ in message.tickets]
            return local.Committed(number, puts, room)
        if isinstance(message, local.Put):
            self.tickets.remove(message.ticket)
            return local.Committed(number, [local.PutBlock(local.OK, 1)], self._room())
        if isinstance(message, local.Pin):
            self.pins.update(message.keys)
        if isinstance(message, local.Unpin):
            self.pins -= Counter(message.keys)
        if isinstance(message, local.GetStats):
            return local.Stats(number, {"gets_total": 3.0})
        if isinstance(message, local.FindNamespace):
            return local.FoundNamespace(number, NamespaceInfo(7, "t", "m", "v", "l"))
        if isinstance(message, local.FindGroup):
            return local.FoundGroup(number, GroupInfo(7, 9, ["node-1", "node-2"], 4))
        if isinstance(message, local.DescribePool):
            return local.PoolDescription(number, "node-1", 0, 1, True, [], [], [], [])
        if isinstance(message, local.Exists):
            return local.Ack(number, len(message.keys) // 16)
        if isinstance(message, local.Weighed):
            return local.Ack(number, message.whole + message.part + message.computed)
        return local.Ack(number, len(message.keys))

    @property
    def held(self) -> int:
        """What it keeps for its client."""
        return len(self.handles) + len(self.tickets) + self.pins.total()

    def asked(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive()
        os.close(self.arena)


class InAThread:
    """An AsyncClient whose methods wait, its loop in a thread."""

    def __init__(self, path: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self._client = self._wait(AsyncClient.connect(path))
        except BaseException:
            self._end()
            raise

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if name == "get_each":
            return lambda *args, **kwargs: self._each(value(*args, **kwargs))
        if name not in CALLS:
            return value
        return lambda *args, **kwargs: self._wait(value(*args, **kwargs))

    def _each(self, iterator: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._wait(anext(iterator))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(iterator.aclose())

    def close(self) -> None:
        self._wait(self._client.close())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[CountingAgent]:
    agent = CountingAgent(tmp_path / "agent.sock")
    yield agent
    agent.close()


@pytest.fixture(params=[Client, InAThread], ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    return lambda: request.param(str(tmp_path / "agent.sock"))


@pytest.fixture
def client(agent: CountingAgent, connect: Callable[[], Any]) -> Iterator[Any]:
    client = connect()
    yield client
    client.close()


def given_up_to(agent: CountingAgent) -> list[int]:
    """The gets that its client has told it that it does not wait for."""
    return [number for release in agent.asked(local.Release) for number in release.given_up]


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_both_clients_offer_the_same() -> None:
    for client in (Client, AsyncClient):
        public = {name for name in vars(client) if not name.startswith("_")}
        assert set(CALLS) <= public
        assert public - set(CALLS) <= {
            "arena",
            "arena_bytes",
            "close",
            "connect",
            "connected",
            "get_each",
            "near",
            "node_id",
            "of_prefixes",
        }
    for name in CALLS:
        blocking, asynchronous = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(blocking) == inspect.signature(asynchronous)
        assert blocking.__doc__
        assert inspect.iscoroutinefunction(asynchronous)
        assert not inspect.iscoroutinefunction(blocking)


def test_every_call_asks_and_returns_what_it_says(client: Any, agent: CountingAgent) -> None:
    keys = KEYS[:3]
    assert client.node_id == "node-1"
    blocks = client.get(7, keys, 0.5, gather_ms=4, group=9, expect=True)
    assert [block.key for block in blocks] == keys
    assert all(block.verify() and block.tier == "home" and len(block) == 8 for block in blocks)
    (asked,) = agent.asked(local.Get)
    assert asked == local.Get(asked.request, 7, keys, 0.5, 4, 9, True)
    assert agent.held == 3
    for block in blocks:
        block.release()
        block.release()
    assert until(lambda: agent.held == 0)
    assert [len(release.handles) for release in agent.asked(local.Release)] == [3]
    first, *others = client.get(7, keys, 0.5)
    first.release()
    assert agent.held == 3, "the others are held"
    client.stats()
    assert until(lambda: agent.held == 2), "before anything else is said"
    for block in others:
        block.release()
    assert until(lambda: agent.held == 0)
    client.put(7, {keys[0]: b"ab", keys[1]: bytearray(b"cde")})
    assert os.pread(agent.arena, 5, 0) == b"abcde"
    assert agent.asked(local.Alloc)[0].sizes == [2, 3]
    assert client.prefetch(7, keys, 0.5, gather_ms=4, group=9, expect=True) == 3
    (asked,) = agent.asked(local.Prefetch)
    assert asked == local.Prefetch(asked.request, 7, keys, 0.5, 4, 9, True)
    assert (client.exists(7, keys), client.drop(7, keys)) == (3, 3)
    assert (client.pin(7, keys), agent.held) == (3, 3)
    assert (client.unpin(7, keys), agent.held) == (3, 0)
    assert client.stats() == {"gets_total": 3.0}
    assert client.namespace("t", "m", "v", "l") == 7
    assert client.group(7, ["node-1", "node-2"]) == 9
    assert client.company(7, 5) == (9, 4)
    assert [(asked.nodes, asked.at) for asked in agent.asked(local.FindGroup)] == [
        (["node-1", "node-2"], None),
        ([], 5),
    ]
    assert client.weighed(4, 2, 1, 9e3, 5e2) == 7
    (asked,) = agent.asked(local.Weighed)
    assert asked == local.Weighed(asked.request, 4, 2, 1, 9e3, 5e2)
    assert client.describe(7, keys).node_id == "node-1"
    numbers = [m.request for m in agent.heard if not isinstance(m, local.Release)]
    assert sorted(set(numbers)) == numbers


@pytest.mark.parametrize(("call", "kind"), [("get", local.Get), ("exists", local.Exists)])
def test_one_deadline_holds_for_all_messages_of_a_call(
    client: Any, agent: CountingAgent, call: str, kind: type
) -> None:
    agent.answers[kind] = lambda _: time.sleep(0.2)
    result = getattr(client, call)(7, KEYS, deadline_s=0.3)
    if call == "get":
        for block in result:
            block.release()
    first, second, third = (message.deadline_s for message in agent.asked(kind))
    assert first == 0.3
    assert second <= 0.1
    assert third == 0.0


def test_more_keys_than_a_message_takes_are_asked_for_in_several(
    client: Any, agent: CountingAgent
) -> None:
    blocks = client.get(7, KEYS)
    assert len(blocks) == len(KEYS)
    for block in blocks:
        block.release()
    assert [len(get.keys) for get in agent.asked(local.Get)] == [local.MAX_KEYS, local.MAX_KEYS, 1]
    for call in (client.prefetch, client.exists, client.drop, client.pin, client.unpin):
        assert call(7, KEYS) == len(KEYS)
    client.put(7, dict.fromkeys(KEYS, b"x"))
    assert [len(alloc.keys) for alloc in agent.asked(local.Alloc)] == [4096, 4096, 1]
    # An eighth of the arena at once.
    client.put(7, dict.fromkeys(KEYS[:9], bytes(ARENA_BYTES // 16)))
    assert [len(alloc.keys) for alloc in agent.asked(local.Alloc)[3:]] == [2, 2, 2, 2, 1]
    assert agent.tickets == set()


def test_a_prefix_ends_where_it_ends(client: Any, agent: CountingAgent) -> None:
    agent.answers[local.Exists] = lambda asked: local.Ack(asked.request, 5)
    assert client.exists(7, KEYS) == 5
    assert len(agent.asked(local.Exists)) == 1


MULTI = {
    "get": (local.Get, KEYS),
    "get_outcomes": (local.Get, KEYS),
    "put": (local.Alloc, dict.fromkeys(KEYS, b"x")),
    "exists": (local.Exists, KEYS),
    "prefetch": (local.Prefetch, KEYS),
    "drop": (local.Drop, KEYS),
    "pin": (local.Pin, KEYS),
    "unpin": (local.Unpin, KEYS),
}


@pytest.mark.parametrize("name", MULTI)
def test_a_call_whose_later_message_is_refused_leaves_nothing_held(
    name: str, client: Any, agent: CountingAgent
) -> None:
    kind, argument = MULTI[name]

    def refuse_the_last(asked: Any) -> Any:
        if len(agent.asked(kind)) == 3:
            return local.Failed(asked.request, local.BUSY, "too many")
        return None

    agent.answers[kind] = refuse_the_last
    with pytest.raises(BusyError, match="too many"):
        getattr(client, name)(7, argument)
    assert len(agent.asked(kind)) == 3
    assert until(lambda: agent.held == 0), f"{agent.held} are held"
    agent.answers.clear()
    assert client.exists(7, KEYS[:1]) == 1


def test_a_pin_that_was_there_before_outlives_one_that_is_refused(
    client: Any, agent: CountingAgent
) -> None:
    before = [KEYS[0], KEYS[local.MAX_KEYS]]  # one of the first message, one of the second
    assert client.pin(7, before) == 2
    agent.answers[local.Pin] = lambda asked: (
        local.Failed(asked.request, local.BUSY, "") if len(agent.asked(local.Pin)) == 3 else None
    )
    with pytest.raises(BusyError):
        client.pin(7, KEYS)
    client.stats()  # by its answer the agent has heard all that was said before
    assert agent.pins == Counter(before)


def test_a_put_that_fails_while_it_writes_gives_its_room_back(
    client: Any, agent: CountingAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("no page")

    monkeypatch.setattr(client_blocks.Arena, "room", fails)
    with pytest.raises(MemoryError):
        client.put(7, {KEYS[0]: b"ab", KEYS[1]: b"c"})
    assert until(lambda: bool(agent.asked(local.Abort)) and agent.held == 0)
    assert client.exists(7, KEYS[:1]) == 1


# --- blocks that are dropped --------------------------------------------------------------------


def test_a_block_that_is_dropped_unread_is_released_with_the_next_call(
    client: Any, agent: CountingAgent
) -> None:
    for keys in (KEYS[:1], KEYS[:3]):
        blocks = client.get(7, keys, 0.5)
        assert all(block.verify() for block in blocks), "which shows nobody the bytes"
        count = len(blocks)
        with pytest.warns(ResourceWarning, match=r"^<Block .*> was not released$") as warned:
            blocks.clear()
        assert len(warned) == count
        assert agent.held == count
        assert not agent.asked(local.Release), "nothing is said in a finaliser"
        client.stats()
        assert until(lambda: agent.held == 0)
        agent.heard.clear()


@pytest.mark.parametrize(
    "view_of",
    [lambda data: data, lambda data: data[2:5], lambda data: data.cast("H"), bytes],
    ids=["itself", "part", "cast", "copy"],
)
def test_a_block_whose_bytes_were_asked_for_stays_pinned_where_it_is_dropped(
    connect: Callable[[], Any], agent: CountingAgent, view_of: Callable[[memoryview], Any]
) -> None:
    client = connect()
    blocks = client.get(7, KEYS[:1], 0.5)
    view = view_of(blocks[0].data)
    with pytest.warns(ResourceWarning, match="it stays pinned until its client closes"):
        blocks.clear()
    client.stats()
    client.stats()
    assert agent.held == 1, "other bytes would appear under the view"
    assert not any(bytes(view))
    client.close()
    assert until(lambda: agent.held == 0)


def test_of_blocks_that_came_together_each_may_end_in_another_way(
    client: Any, agent: CountingAgent
) -> None:
    released, last, *dropped = client.get(7, KEYS[:4], 0.5)
    assert dropped[0].data.readonly
    released.release()
    with pytest.warns(ResourceWarning) as warned:
        dropped.clear()
    assert len(warned) == 2
    last.release()
    client.stats()
    assert until(lambda: agent.held == 1)


def test_a_block_may_be_dropped_by_a_thread_that_is_not_its_clients(
    client: Any, agent: CountingAgent
) -> None:
    blocks = client.get(7, KEYS[:2], 0.5)

    def drop() -> None:
        thread = threading.Thread(target=blocks.clear)
        thread.start()
        thread.join()

    with pytest.warns(ResourceWarning) as warned:
        drop()
    assert len(warned) == 2
    client.stats()
    assert until(lambda: agent.held == 0)


def test_a_block_that_is_part_of_a_cycle_is_released_by_the_garbage_collector(
    client: Any, agent: CountingAgent
) -> None:
    cycle: list[Any] = client.get(7, KEYS[:1], 0.5)
    cycle.append(cycle)
    del cycle
    with pytest.warns(ResourceWarning):
        gc.collect()
    client.stats()
    assert until(lambda: agent.held == 0)


@pytest.mark.usefixtures("agent")
def test_nobody_is_warned_of_blocks_that_outlive_their_client(connect: Callable[[], Any]) -> None:
    client = connect()
    blocks = client.get(7, KEYS[:2], 0.5)
    client.close()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del blocks
    assert warned == []


def test_a_block_that_is_left_at_the_end_of_its_process_ends_it_well(
    agent: CountingAgent, tmp_path: Path
) -> None:
    script = (
        "from kvcast.hostagent.client import Client\n"
        f"client = Client({str(tmp_path / 'agent.sock')!r})\n"
        "kept, dropped = client.get(7, [bytes(16), bytes(16)])\n"
        "view = kept.data\n"
    )
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "Exception ignored" not in ended.stderr, ended.stderr
    assert until(lambda: agent.held == 0)


def test_a_block_that_was_never_made_is_dropped_in_silence() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(TypeError):
            client_blocks.Block(b"k" * 16)  # type: ignore[call-arg]
    assert warned == []


def test_results_are_taken_as_they_come_and_each_has_its_place(
    client: Any, agent: CountingAgent
) -> None:
    keys = KEYS[:200]
    places = []
    for place, outcome in client.get_each(7, keys, 0.5):
        assert outcome.block.key == keys[place]
        places.append(place)
        outcome.block.release()
    assert sorted(places) == list(range(200))
    asked = agent.asked(local.Get)
    assert 1 < len(asked) <= 64
    assert [key for request in asked for key in request.keys] == keys
    client.stats()
    assert agent.held == 0
    assert list(client.get_each(7, [])) == []


def test_who_gives_up_an_iterator_keeps_what_it_was_given_and_nothing_else(
    client: Any, agent: CountingAgent
) -> None:
    iterator = client.get_each(7, KEYS[:100], 0.5)
    _, first = next(iterator)
    iterator.close()
    assert client.exists(7, KEYS[:1]) == 1
    assert until(lambda: client.exists(7, KEYS[:1]) == 1 and agent.held == 1)
    assert set(given_up_to(agent)) <= {asked.request for asked in agent.asked(local.Get)}
    first.block.release()
    client.stats()
    assert agent.held == 0


def test_a_part_that_is_refused_ends_the_iteration_and_leaves_nothing(
    client: Any, agent: CountingAgent
) -> None:
    agent.answers[local.Get] = lambda asked: (
        local.Failed(asked.request, local.BUSY, "no") if asked.keys[0] == KEYS[50] else None
    )

    def release_all() -> None:
        for _, outcome in client.get_each(7, KEYS[:64], 0.5):
            outcome.block.release()

    with pytest.raises(BusyError):
        release_all()
    assert until(lambda: client.exists(7, KEYS[:1]) == 1 and agent.held == 0)


def test_an_agent_that_dies_ends_the_iteration(client: Any, agent: CountingAgent) -> None:
    agent.answers[local.Get] = lambda asked: local.Welcome(9, "x", 1)  # no reply at all
    with pytest.raises(AgentGoneError):
        list(client.get_each(7, KEYS[:3], 0.1))


def test_blocks_of_one_size_are_put_by_one_question_each_from_the_third_on(
    client: Any, agent: CountingAgent
) -> None:
    for number, key in enumerate(KEYS[:5]):
        client.put(7, {key: bytes([number]) * 90}, ack="local")
    assert [len(agent.asked(kind)) for kind in (local.Alloc, local.Commit, local.Put)] == [2, 2, 3]
    assert [commit.again for commit in agent.asked(local.Commit)] == [False, True]
    for number, (asked, room) in enumerate(zip(agent.asked(local.Put), agent.rooms, strict=False)):
        assert (asked.namespace, asked.keys, asked.ack) == (7, [KEYS[2 + number]], "local")
        assert asked.ticket == room.ticket
        assert os.pread(agent.arena, 90, room.offset) == bytes([2 + number]) * 90
    assert agent.held == 1, "room for the next"
    # Of another size, another namespace, or a prefix: in the old way, and the room stays.
    client.put(7, {KEYS[5]: b"x"})
    client.put(8, {KEYS[6]: b"x" * 90})
    client.put(7, {KEYS[7]: b"x" * 90}, prefix=[KEYS[7]])
    client.put(7, {KEYS[8]: b"x" * 90, KEYS[9]: b"x" * 90})
    assert len(agent.asked(local.Put)) == 3
    assert agent.held == 1
    client.put(7, {KEYS[10]: b"y" * 90})
    assert len(agent.asked(local.Put)) == 4
    # Two of another size in a row: their room takes its place.
    for key in KEYS[11:14]:
        client.put(7, {key: b"z" * 40})
    assert agent.asked(local.Put)[-1].keys == [KEYS[13]]
    client.stats()
    assert [asked.tickets for asked in agent.asked(local.Abort)] == [[agent.rooms[4].ticket]]
    assert agent.held == 1


def test_a_put_that_is_refused_gives_its_room_back(client: Any, agent: CountingAgent) -> None:
    for key in KEYS[:2]:
        client.put(7, {key: b"x" * 90})
    agent.answers[local.Put] = lambda asked: local.Failed(asked.request, local.BUSY, "no")
    with pytest.raises(BusyError):
        client.put(7, {KEYS[2]: b"x" * 90})
    client.stats()
    assert agent.held == 0
    client.put(7, {KEYS[3]: b"x" * 90})
    results = [local.PutBlock(local.UNAVAILABLE)]
    agent.answers[local.Put] = lambda asked: local.Committed(asked.request, results)
    with pytest.raises(PutError) as error:
        client.put(7, {KEYS[4]: b"x" * 90})
    assert error.value.failed == {KEYS[4]: local.UNAVAILABLE}


def test_what_is_written_into_a_reservation_is_committed_where_it_lies(
    client: Any, agent: CountingAgent
) -> None:
    reservation = client.reserve(7, {KEYS[0]: 3, KEYS[1]: 5})
    assert agent.held == 2
    reservation.views[KEYS[0]][:] = b"abc"
    reservation.views[KEYS[1]][:] = b"defgh"
    assert os.pread(agent.arena, 8, 0) == b"abcdefgh"
    client.commit(reservation, ack="local")
    (committed,) = agent.asked(local.Commit)
    assert len(committed.tickets) == 2
    assert committed.ack == "local"
    assert agent.held == 0
    assert reservation.views == {}
    reservation.abort()
    client.stats()
    assert agent.asked(local.Abort) == []


def test_a_reservation_that_is_left_uncommitted_is_given_back(
    client: Any, agent: CountingAgent
) -> None:
    with client.reserve(7, {KEYS[0]: 3}) as reservation:
        assert list(reservation.views) == [KEYS[0]]
        assert agent.held == 1
    client.stats()
    assert agent.held == 0
    with pytest.raises(ValueError, match="at least one byte"):
        client.reserve(7, {KEYS[0]: 0})


def test_blocks_without_room_are_named_when_the_others_are_committed(
    client: Any, agent: CountingAgent
) -> None:
    def half(asked: Any) -> Any:
        agent.tickets.add(1)
        extents = [local.Extent(local.OK, 1, 0), local.Extent(local.NO_ROOM)]
        return local.Allocated(asked.request, extents)

    agent.answers[local.Alloc] = half
    with client.reserve(7, {KEYS[0]: 3, KEYS[1]: 5}) as reservation:
        assert list(reservation.views) == [KEYS[0]]
        assert reservation.failed == {KEYS[1]: local.NO_ROOM}
        with pytest.raises(PutError) as raised:
            client.commit(reservation)
    assert raised.value.failed == {KEYS[1]: local.NO_ROOM}
    assert agent.held == 0


def test_a_commit_that_is_refused_gives_its_room_back(client: Any, agent: CountingAgent) -> None:
    agent.answers[local.Commit] = lambda asked: local.Failed(asked.request, local.BUSY, "no")
    reservation = client.reserve(7, {KEYS[0]: 3})
    with pytest.raises(BusyError):
        client.commit(reservation)
    assert until(lambda: agent.held == 0)


@pytest.mark.parametrize("name", ["get", "put"])
def test_what_comes_for_a_blocking_call_that_was_interrupted_is_given_back(
    name: str, agent: CountingAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Cancelled calls of the asyncio client: test_hostagent_client.py.)"""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Client(str(tmp_path / "agent.sock")) as client:
        with monkeypatch.context() as patched:
            patched.setattr(client, "_reply_to", interrupt)  # what comes first after sending
            with pytest.raises(KeyboardInterrupt):
                getattr(client, name)(7, dict.fromkeys(KEYS[:3], b"x"))
        assert until(lambda: agent.held == 3)
        assert until(lambda: name != "get" or bool(given_up_to(agent)))
        assert given_up_to(agent) == [asked.request for asked in agent.asked(local.Get)]
        client.stats()  # reads what came for the other call
        client.stats()  # sends what there was to say about it
        assert agent.held == 0


def test_what_a_put_could_not_place_is_named(client: Any, agent: CountingAgent) -> None:
    extents = [
        local.Extent(local.OK, 1, 0),
        local.Extent(local.QUOTA),
        local.Extent(local.OK, 2, 8),
    ]
    agent.answers[local.Alloc] = lambda asked: local.Allocated(asked.request, extents)
    results = [local.PutBlock(local.UNAVAILABLE), local.PutBlock(local.OK)]
    agent.answers[local.Commit] = lambda asked: local.Committed(asked.request, results)
    with pytest.raises(PutError, match="2 blocks were not put: quota, unavailable") as error:
        client.put(7, dict.fromkeys(KEYS[:3], b"x"))
    assert error.value.failed == {KEYS[0]: local.UNAVAILABLE, KEYS[1]: local.QUOTA}


def test_a_miss_says_why(client: Any, agent: CountingAgent) -> None:
    agent.answers[local.Get] = lambda asked: local.Got(
        asked.request, [local.GotBlock(local.MISS, "not_found")]
    )
    assert client.get(7, KEYS[:1]) == [None]
    (outcome,) = client.get_outcomes(7, KEYS[:1])
    assert (outcome.block, outcome.status, outcome.reason) == (None, local.MISS, "not_found")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (local.BUSY, BusyError),
        (local.NO_ROOM, NoRoomError),
        (local.QUOTA, QuotaError),
        (local.UNKNOWN_NAMESPACE, UnknownNamespaceError),
        (local.FORBIDDEN, ForbiddenError),
        (local.UNAVAILABLE, UnavailableError),
        (local.INVALID, InvalidRequestError),
        ("new in a later version", KvcastError),
    ],
)
def test_a_refusal_is_an_error_by_its_status(
    status: str, error: type[KvcastError], client: Any, agent: CountingAgent
) -> None:
    agent.answers[local.Get] = lambda asked: local.Failed(asked.request, status, "why")
    with pytest.raises(KvcastError, match="why") as raised:
        client.get(7, KEYS[:1])
    assert type(raised.value) is error


@pytest.mark.parametrize("keys", [[b"short"], [KEYS[0], b""]])
def test_what_is_no_key_is_not_sent(client: Any, agent: CountingAgent, keys: list[bytes]) -> None:
    for name in ("get", "get_outcomes", "exists", "prefetch", "drop", "pin", "unpin", "describe"):
        with pytest.raises(ValueError, match="a key is 16 bytes"):
            getattr(client, name)(7, keys)
    with pytest.raises(ValueError, match="a key is 16 bytes"):
        client.put(7, dict.fromkeys(keys, b"x"))
    with pytest.raises(ValueError, match="at least one byte"):
        client.put(7, {KEYS[0]: b""})
    assert agent.heard == []


NONSENSE: dict[str, tuple[str, type, Answer]] = {
    "fewer blocks than keys": ("get", local.Get, lambda a: local.Got(a.request, [])),
    "another answer": ("get", local.Get, lambda a: local.Ack(a.request, 1)),
    "bytes outside the arena": (
        "get",
        local.Get,
        lambda a: local.Got(a.request, [local.GotBlock(local.OK, "", "", 1, ARENA_BYTES, 1)]),
    ),
    "a second welcome": (
        "exists",
        local.Exists,
        lambda a: local.Welcome(local.LOCAL_PROTOCOL_VERSION, "node-1", 1),
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_an_answer_without_sense_ends_the_connection(
    what: str, client: Any, agent: CountingAgent
) -> None:
    name, kind, answer = NONSENSE[what]
    agent.answers[kind] = answer
    with pytest.raises(AgentGoneError):
        getattr(client, name)(7, KEYS[:1])
    with pytest.raises(AgentGoneError):
        client.stats()
    assert agent.asked(local.GetStats) == []


@pytest.mark.parametrize(
    ("welcome", "error"),
    [
        (local.Rejected("not you"), AgentRejectedError),
        (local.Ack(1, 1), AgentGoneError),
        (local.Welcome(local.LOCAL_PROTOCOL_VERSION, "node-1", 2 * ARENA_BYTES), AgentGoneError),
    ],
)
def test_a_client_that_is_not_let_in_keeps_nothing_open(
    welcome: Any, error: type[KvcastError], agent: CountingAgent, connect: Callable[[], Any]
) -> None:
    agent.welcome = welcome
    with pytest.raises(error):
        connect()
    assert until(lambda: not agent._thread.is_alive())


def test_where_nobody_listens_there_is_no_agent(connect: Callable[[], Any]) -> None:
    with pytest.raises(AgentGoneError, match=r"agent\.sock"):
        connect()


@pytest.mark.parametrize("courier", [False, True], ids=["posted", "before the courier is asked"])
def test_nothing_is_sent_after_half_a_message(tmp_path: Path, courier: bool) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen(1)
    goes_on = threading.Event()
    codec: MessageCodec[Any] = MessageCodec(local.ClientMessage)
    heard = bytearray()

    def agent() -> None:
        peer, _ = listener.accept()
        with peer, os.fdopen(os.memfd_create("arena"), "wb") as arena:
            arena.truncate(ARENA_BYTES)
            peer.recv(4096)
            welcome = local.Welcome(local.LOCAL_PROTOCOL_VERSION, "node-1", ARENA_BYTES)
            socket.send_fds(peer, [codec.encode(welcome)], [arena.fileno()])
            goes_on.wait()  # it is stopped, or busy
            while data := peer.recv(1 << 16):
                heard.extend(data)

    thread = threading.Thread(target=agent, daemon=True)
    thread.start()
    long = local.Release(list(range(1 << 32, (1 << 32) + 100_000)), [])  # 900 KB
    with Client(str(tmp_path / "agent.sock"), timeout_s=0.2) as client:
        if courier:
            client._courier, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client._posted.append(long)
            threading.Timer(0.5, goes_on.set).start()
            ask = Ask(local.Exists(1, 1, KEYS[0], 0.1), 5.0, b"what it is asked")
            with other, pytest.raises(AgentGoneError):
                client._exchange(ask)
        else:
            client._post(long)
            goes_on.set()
            with pytest.raises(AgentGoneError):
                client.exists(1, KEYS[:1], deadline_s=0.1)
    thread.join()
    listener.close()
    assert 0 < len(heard) < 900_000
    assert codec.encode(long).startswith(heard)
