"""Agents that keep their arena, as processes: killed, stopped, replaced, while clients go on.

Oracle: the bytes that were put, and which process serves them. Cannot see: damage of what is kept
(tests/unit/test_hostagent_recovery.py), and how long it takes (`kvcast.bench.restart`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from hostagent_harness import MiniController, PlainSwitch, mac_of, until
from kvcast.bench.usage import agents_of, children_of
from kvcast.hostagent import membarrier
from kvcast.hostagent.client import AgentGoneError, AsyncClient, Client, UnavailableError
from kvcast.hostagent.client.conversation import Ack
from kvcast.hostagent.flags import options_of, parse
from kvcast.hostagent.private_pages import make_private_pages_own
from kvcast.hostagent.supervisor import _AGENT_HEAP_BYTES, GIVE_UP_AFTER, _question_of
from kvcast.protocol.messages import local
from kvcast.protocol.messages.framing import MessageCodec
from test_hostagent_daemon import command, start

BLOCK_BYTES = 200_000
NAMESPACE = 1


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def standby_of(supervisor: int) -> int | None:
    """The agent that comes after the one that serves; None while there is none."""
    others = set(children_of(supervisor)) - set(agents_of(supervisor))
    return next(iter(others), None)


class Node:
    """One node whose agent keeps its arena."""

    def __init__(
        self, folder: Path, controller: MiniController, switch: PlainSwitch, number: int = 1
    ) -> None:
        self.words = [*command(number, controller, switch, folder), "--arena-keep"]
        self.socket = str(folder / f"{number}.sock")
        self.process: Process
        self.started: list[Process] = []
        self._switch = switch
        self._number = number

    async def start(self, *more: str) -> None:
        self.process, ready = await start([*self.words, *more])
        self.started.append(self.process)
        host, port = str(ready["tunnel"]).split(":")
        self._switch.attach(self._number, mac_of(self._number), (host, int(port)))

    def agent(self) -> int:
        """The process that serves."""
        return agents_of(self.process.pid)[0]

    async def standby(self) -> int:
        """The process that comes after it, once there is one."""
        await until(lambda: standby_of(self.process.pid) is not None)
        pid = standby_of(self.process.pid)
        assert pid is not None
        return pid

    async def kill_agent(self) -> None:
        """SIGKILL to it, and only to it; returns when its memory is gone, too."""
        # Clients find blocks by themselves, so they may not have waited for the one before.
        await until(lambda: len(agents_of(self.process.pid)) == 1)
        pid = self.agent()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{pid}").exists())


@contextlib.asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    async with nodes(folder, 1) as (one,):
        yield one


@contextlib.asynccontextmanager
async def nodes(folder: Path, count: int) -> AsyncIterator[list[Node]]:
    """The last of them is the home of all blocks."""
    controller, switch = MiniController(), PlainSwitch()
    controller.add_namespace(NAMESPACE)
    await controller.start()
    all_of_them = [Node(folder, controller, switch, number + 1) for number in range(count)]
    try:
        for one in all_of_them:
            await one.start()
        await until(lambda: len(controller.renewals) == count)
        controller.homes_of = lambda _bucket: [f"node-{count}"]
        controller.publish()
        yield all_of_them
    finally:
        for process in [process for one in all_of_them for process in one.started]:
            if process.returncode is None:
                process.terminate()
            _, said = await asyncio.wait_for(process.communicate(), 60)
            assert b"Traceback" not in said, said.decode()
        await controller.stop()
        switch.close()


async def put(client: AsyncClient, *numbers: int) -> None:
    for number in numbers:
        await client.put(NAMESPACE, {key(number): content(number)})


async def check(client: AsyncClient, *numbers: int) -> None:
    for number in numbers:
        (block,) = await client.get(NAMESPACE, [key(number)], 10.0)
        assert block is not None, number
        with block:
            assert bytes(block.data) == content(number)


async def test_an_agent_that_is_killed_is_followed_by_one_that_serves_the_same(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(20))
        before = one.agent()
        (held,) = await client.get(NAMESPACE, [key(3)], 10.0)
        assert held is not None
        for _ in range(3):
            await one.kill_agent()
            await check(client, *range(20))
        await until(lambda: agents_of(one.process.pid) not in ([], [before]))
        assert bytes(held.data) == content(3)
        # What is held is kept where it lies, whatever comes.
        await put(client, *range(100, 160))
        assert bytes(held.data) == content(3)
        assert held.verify()
        stats = await client.stats()
        assert stats["arena_held_bytes"] > 0
        held.release()
        await until_released(client)


async def test_the_agent_that_stands_by_serves_those_who_came_after_it_was_forked(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(5))
        async with await AsyncClient.connect(one.socket) as gone:
            await gone.pin(NAMESPACE, [key(4)])
            standby = await one.standby()
        (held,) = await client.get(NAMESPACE, [key(3)], 10.0)
        assert held is not None
        async with await AsyncClient.connect(one.socket) as later:
            assert await later.pin(NAMESPACE, [key(1), key(2)]) == 2
            for _ in range(2):
                await one.kill_agent()
                await check(client, *range(5))
                await client.stats()  # clients find blocks without it
                assert one.agent() == standby
                standby = await one.standby()
            # What it does not know of would be taken for nobody's.
            await put(client, *range(100, 160))
            assert bytes(held.data) == content(3)
            assert await later.unpin(NAMESPACE, [key(1), key(2)]) == 2
        held.release()
        await until_released(client)


async def test_who_stands_by_holds_nothing_of_clients_and_ends_with_its_supervisor(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as one, contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(await AsyncClient.connect(one.socket))
        agent, standby = one.agent(), await one.standby()
        assert len(_sockets(one.process.pid)) > 20
        # What listens, and its half of a pair. The name comes before each has closed the other's.
        await until(lambda: len(_sockets(standby) & _sockets(one.process.pid)) <= 4)
        await until(lambda: len(_sockets(standby) - _sockets(one.process.pid)) == 1)
        one.process.kill()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (agent, standby)))
        await one.start()


def _sockets(pid: int) -> set[str]:
    links = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was open for a moment
            links.add(os.readlink(path))
    return {link for link in links if link.startswith("socket:")}


async def test_who_stands_by_has_memory_of_its_own(tmp_path: Path) -> None:
    """What it shares, it would have to copy while clients wait; and what it lacks, to ask for."""
    if not make_private_pages_own(os.eventfd(0)):
        pytest.skip("the kernel cannot populate memory (Linux 5.14)")
    async with node(tmp_path) as one:
        standby = await one.standby()
        await until(lambda: _memory(standby)["Private_Dirty"] > 0.8 * _memory(standby)["Anonymous"])
        here = _memory(one.process.pid)["Anonymous"]
        await until(lambda: _memory(standby)["Anonymous"] > here + _AGENT_HEAP_BYTES // 2)


def _memory(pid: int) -> dict[str, int]:
    """In bytes, by the kernel's names for it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) << 10 for name, value in (x.split(":") for x in lines)}


async def test_one_that_stands_by_and_dies_is_replaced_and_nobody_else_notices(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(5))
        agent, standby = one.agent(), await one.standby()
        os.kill(standby, signal.SIGSTOP)  # it dies at the moment that it is called
        os.kill(agent, signal.SIGKILL)
        await until(lambda: agent not in children_of(one.process.pid))
        os.kill(standby, signal.SIGKILL)
        await client.stats()  # the next one serves
        await check(client, *range(5))
        agent, standby = one.agent(), await one.standby()
        os.kill(standby, signal.SIGKILL)
        await check(client, *range(5))
        await until(lambda: standby_of(one.process.pid) not in (None, standby))
        assert one.agent() == agent


async def test_nothing_of_a_node_that_is_stopped_or_upgraded_runs_on(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        old, before = one.process, [one.agent(), await one.standby()]
        await one.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 60) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)
        now = [one.agent(), await one.standby()]
        assert children_of(one.process.pid) == now
        one.process.terminate()
        assert await asyncio.wait_for(one.process.wait(), 60) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in now)


async def until_it_serves(client: AsyncClient) -> None:
    async def serves() -> bool:
        with contextlib.suppress(UnavailableError):
            await client.exists(NAMESPACE, [key(1)], 5.0)
            return True
        return False

    await until(serves)


async def until_released(client: AsyncClient) -> None:
    async def free() -> bool:
        stats = await client.stats()
        return stats["arena_held_bytes"] == stats["arena_ready_bytes"]

    await until(free)


async def test_a_client_that_is_killed_with_its_agent_holds_nothing_any_more(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(5))
        other = await AsyncClient.connect(one.socket)
        assert await other.pin(NAMESPACE, [key(1), key(2)]) == 2
        os.kill(one.agent(), signal.SIGSTOP)  # it does not see the other go
        await other.close()
        await one.kill_agent()
        await check(client, *range(5))
        await until_released(client)


async def test_who_guesses_a_token_is_a_new_client(tmp_path: Path) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, 1, 2)
        assert await client.pin(NAMESPACE, [key(1), key(2)]) == 2
        before = one.agent()
        os.kill(one.process.pid, signal.SIGSTOP)  # nobody starts another yet
        guesser = asyncio.create_task(asyncio.to_thread(_guess, one.socket))
        os.kill(before, signal.SIGKILL)
        await asyncio.sleep(0.1)
        os.kill(one.process.pid, signal.SIGCONT)
        welcome = await guesser
        assert not welcome.resumed
        assert await client.unpin(NAMESPACE, [key(1), key(2)]) == 2


def _guess(path: str) -> local.Welcome:
    """Say Hello with a token that nobody was given, to the agent that comes."""
    codec: MessageCodec[local.ServerMessage] = MessageCodec(local.ServerMessage)
    resume = local.Resume(bytes(16), [])
    for _ in range(1000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect(path)
            sock.sendall(
                codec.encode(local.Hello(local.LOCAL_PROTOCOL_VERSION, "guess", resume=resume))
            )
            data, fds, _, _ = socket.recv_fds(sock, 65536, 4)
            for fd in fds:
                os.close(fd)
            if data:
                (welcome,) = codec.feed(data)
                assert isinstance(welcome, local.Welcome)
                return welcome
    raise AssertionError("no agent came")


async def test_a_get_and_a_put_that_are_under_way_end_at_the_next_agent(tmp_path: Path) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, 1)
        reservation = await client.reserve(NAMESPACE, {key(7): BLOCK_BYTES})
        os.kill(one.agent(), signal.SIGSTOP)
        asked = [
            asyncio.create_task(client.exists(NAMESPACE, [key(1)], 10.0)),
            asyncio.create_task(client.stats()),
        ]
        await asyncio.sleep(0.05)
        reservation.views[key(7)][:1000] = content(7)[:1000]
        await one.kill_agent()
        assert await asked[0] == 1
        await asked[1]
        reservation.views[key(7)][1000:] = content(7)[1000:]
        await client.commit(reservation, ack="local")
        await check(client, 1, 7)
        await until_released(client)


def _use_blocking(path: str, kill: list[int]) -> None:
    with Client(path) as client:
        client.put(NAMESPACE, {key(number): content(number) for number in range(4)}, ack="local")
        held = client.get(NAMESPACE, [key(0), key(1)])
        os.kill(kill[0], signal.SIGKILL)
        with client.reserve(NAMESPACE, {key(9): BLOCK_BYTES}) as reservation:
            reservation.views[key(9)][:] = content(9)
            client.commit(reservation, ack="local")
        for number, outcome in client.get_each(NAMESPACE, [key(n) for n in (0, 1, 2, 3, 9)], 10.0):
            assert outcome.block is not None
            assert bytes(outcome.block.data) == content((0, 1, 2, 3, 9)[number])
            outcome.block.release()
        for number, block in enumerate(held):
            assert block is not None
            assert bytes(block.data) == content(number)
            block.release()


async def test_the_blocking_client_comes_back_by_itself(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        await asyncio.to_thread(_use_blocking, one.socket, [one.agent()])


async def test_an_agent_is_replaced_under_load_and_nothing_fails(tmp_path: Path) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(10))
        (held,) = await client.get(NAMESPACE, [key(3)], 10.0)
        assert held is not None
        stop = asyncio.Event()

        async def load() -> int:
            turns = 0
            while not stop.is_set():
                await check(client, turns % 10)
                await put(client, 100 + turns % 5)
                turns += 1
            return turns

        loads = [asyncio.create_task(load()) for _ in range(3)]
        old = one.process
        await one.start("--takeover")
        assert await asyncio.wait_for(old.wait(), 60) == 0
        await asyncio.sleep(0.1)
        stop.set()
        assert min(await asyncio.gather(*loads)) > 0
        assert bytes(held.data) == content(3)
        held.release()
        await check(client, *range(10))
        assert one.agent() in agents_of(one.process.pid)


async def test_a_takeover_by_who_wants_another_arena_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, 1)
        before = one.agent()
        other = await asyncio.create_subprocess_exec(
            *[word for word in one.words if not word.startswith("--arena-bytes")],
            "--arena-bytes=16M",
            "--takeover",
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(other.communicate(), 60)
        assert other.returncode == 1
        assert b"cannot start" in said
        assert one.agent() == before
        await check(client, 1)


async def test_a_takeover_whose_new_side_dies_is_given_up(tmp_path: Path) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(5))
        before = one.agent()
        options = options_of(parse(one.words[5:]))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(f"{one.socket}.takeover")
            peer.send(msgspec.msgpack.encode(_question_of(options)))
            assert peer.recv(65536)  # what stands, with its descriptors: it takes none of them
        await check(client, *range(5))
        await until(lambda: agents_of(one.process.pid) not in ([], [before]))
        await check(client, *range(5))
        await one.start("--takeover")
        await check(client, *range(5))


async def test_a_release_that_cannot_serve_leaves_the_node_to_the_old_one(tmp_path: Path) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(5))
        held = await client.get(NAMESPACE, [key(1), key(2)], 10.0)
        assert await client.pin(NAMESPACE, [key(3)]) == 1
        held_bytes = (await client.stats())["arena_held_bytes"]
        metrics = socket.socket()  # the new one cannot listen there
        metrics.bind(("127.0.0.1", 0))
        metrics.listen()
        words = [word for word in one.words if not word.startswith("--metrics-addr")]
        taken = f"--metrics-addr=127.0.0.1:{metrics.getsockname()[1]}"
        new = await asyncio.create_subprocess_exec(
            *words, taken, "--takeover", stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(new.communicate(), 60)
        metrics.close()
        assert new.returncode == 1
        assert b"cannot serve metrics" in said
        await check(client, *range(5))
        assert (await client.stats())["arena_held_bytes"] == held_bytes
        for number, block in zip((1, 2), held, strict=True):
            assert block is not None
            assert bytes(block.data) == content(number)
            block.release()
        assert await client.unpin(NAMESPACE, [key(3)]) == 1
        async with await AsyncClient.connect(one.socket) as another:
            await check(another, *range(5))
        await one.start("--takeover")
        await check(client, *range(5))


async def test_a_stopped_agents_blocks_are_there_when_it_is_started_again(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        async with await AsyncClient.connect(one.socket) as client:
            await put(client, *range(10))
        one.process.terminate()
        assert await asyncio.wait_for(one.process.wait(), 60) == 0
        assert not Path(one.socket).exists()
        await one.start()
        async with await AsyncClient.connect(one.socket) as client:
            await check(client, *range(10))


async def test_a_stopped_agents_blocks_are_there_for_clients_that_held_none(tmp_path: Path) -> None:
    async with node(tmp_path) as one, await AsyncClient.connect(one.socket) as client:
        await put(client, *range(10))
        await check(client, *range(10))
        one.process.terminate()
        assert await asyncio.wait_for(one.process.wait(), 60) == 0
        await one.start()
        await until_it_serves(client)
        await check(client, *range(10))
        # One that holds something keeps the arena, and the next begins anew.
        (held,) = await client.get(NAMESPACE, [key(3)], 10.0)
        assert held is not None
        one.process.terminate()
        assert await asyncio.wait_for(one.process.wait(), 60) == 0
        await one.start()
        await until_it_serves(client)
        assert await client.get(NAMESPACE, [key(4)], 0.5) == [None]
        with held:
            assert bytes(held.data) == content(3)


async def test_whoever_maps_the_arena_when_everything_dies_keeps_its_bytes(tmp_path: Path) -> None:
    """Without a supervisor nobody knows what a client pins, so nothing of it may be used again."""
    async with node(tmp_path) as one:
        client = await AsyncClient.connect(one.socket)
        await put(client, *range(10))
        (held,) = await client.get(NAMESPACE, [key(3)], 10.0)
        assert held is not None
        agent = one.agent()
        one.process.kill()
        await one.process.wait()
        await until(lambda: not Path(f"/proc/{agent}").exists())
        await one.start()
        await until_it_serves(client)
        await put(client, *range(20, 40))  # it is back, at an agent with an empty arena
        await check(client, *range(20, 40))
        assert await client.get(NAMESPACE, [key(4)], 0.5) == [None]
        assert bytes(held.data) == content(3)
        held.release()
        await client.close()


async def test_agents_that_die_at_once_are_not_started_for_ever(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        killed: set[int] = set()
        while one.process.returncode is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for pid in set(agents_of(one.process.pid)) - killed:
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        assert one.process.returncode == 1
        assert len(killed) >= GIVE_UP_AFTER  # more, where one lived for a second by chance


async def test_an_agent_ends_when_nobody_watches_over_it(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        agent = one.agent()
        one.process.kill()
        await one.process.wait()
        await until(lambda: not Path(f"/proc/{agent}").exists())


async def test_an_agent_that_never_keeps_is_not_waited_for(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        words = [word for word in one.words if word != "--arena-keep"]
        one.process.terminate()
        await one.process.wait()
        for path in tmp_path.glob("1.arena*"):
            path.unlink()
        process, _ = await start(words)
        client = await AsyncClient.connect(one.socket)
        process.kill()
        await process.communicate()
        begun = time.monotonic()
        with pytest.raises(AgentGoneError):
            await client.exists(NAMESPACE, [key(1)], 20.0)
        assert time.monotonic() - begun < 10
        await client.close()


# --- what compiled code gives ---------------------------------------------------------------------

SMALL_BYTES = 20_000
with_a_courier = pytest.mark.skipif(
    not membarrier.available(), reason="no membarrier(2), or not x86-64"
)


def small(number: int) -> bytes:
    return random.Random(-1 - number).randbytes(SMALL_BYTES)


async def given(client: AsyncClient) -> float:
    return (await client.stats())["courier_given_total"]


@with_a_courier
async def test_what_the_courier_gave_is_held_at_the_next_agent(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2) as (one, home):
        async with await AsyncClient.connect(home.socket) as writer:
            await writer.put(NAMESPACE, {key(number): small(number) for number in range(340)})
        async with await AsyncClient.connect(one.socket) as client:
            held = []
            for life in range(4):
                first = 80 * life
                for number in range(first, first + 80):
                    # Until the agent knows of what size blocks are, its courier leaves them to it.
                    (block,) = await client.get(NAMESPACE, [key(number)], 10.0)
                    assert block is not None
                    assert bytes(block.data) == small(number)
                    if number % 16 < 15:
                        block.release()
                        continue
                    held.append((number, block))
                    if number == first + 79 and life < 3:
                        break
                assert held[-1][0] == first + 79
                if life < 3:
                    pid = one.agent()
                    os.kill(pid, signal.SIGKILL)  # mostly before it has written that down
                    await until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
                    await until_it_serves(client)
                    assert await given(client) == 0
            assert await given(client) > 0, "there is a courier at the last agent, too"
            # All of DRAM is used anew, but for what is held.
            for turn in range(3):
                await client.put(
                    NAMESPACE,
                    {key(1000 + 200 * turn + n): small(1000 + n) for n in range(200)},
                    ack="local",
                )
            for number, block in held:
                assert bytes(block.data) == small(number), number
                block.release()
            await until_released(client)


def _read_and_kill(path: str, kill: Callable[[], None]) -> int:
    """Whoever is answered by the courier kills the agent at once; how often it was answered so."""
    lives = 0
    held = []
    with Client(path) as client:
        for number in range(300):
            (block,) = client.get(NAMESPACE, [key(number)], 10.0)
            assert block is not None
            if block.tier == "home" and client._conversation.has_courier and number % 50 == 49:
                kill()
                lives += 1
                held.append((number, block))
                continue
            assert bytes(block.data) == small(number)
            block.release()
        blocks = {key(1000 + n): small(1000 + n) for n in range(300)}
        for _ in range(2):
            client.put(NAMESPACE, blocks, ack="local")
        for number, block in held:
            assert bytes(block.data) == small(number), number
            block.release()
    return lives


@with_a_courier
async def test_an_agent_that_dies_in_the_moment_of_an_answer_leaves_word_of_it(
    tmp_path: Path,
) -> None:
    async with nodes(tmp_path, 2) as (one, home):
        async with await AsyncClient.connect(home.socket) as writer:
            await writer.put(NAMESPACE, {key(number): small(number) for number in range(300)})

        def kill() -> None:
            pid = one.agent()
            os.kill(pid, signal.SIGKILL)
            while pid in agents_of(one.process.pid):
                time.sleep(0.01)

        assert await asyncio.to_thread(_read_and_kill, one.socket, kill) == 6
        async with await AsyncClient.connect(one.socket) as client:
            await until_released(client)


@with_a_courier
async def test_large_blocks_come_by_the_conveyor_of_a_home_that_keeps_its_arena_and_dies(
    tmp_path: Path,
) -> None:
    async with (
        nodes(tmp_path, 2) as (one, home),
        await AsyncClient.connect(home.socket) as writer,
        await AsyncClient.connect(one.socket) as client,
    ):
        await put(writer, *range(30))

        async def conveyed() -> bool:
            await client.drop(NAMESPACE, [key(number) for number in range(100, 110)])
            await put(writer, *range(100, 110))
            await check(client, *range(100, 110))
            return (await client.stats())["courier_conveyed_bytes_total"] > before

        before = 0.0
        await check(client, *range(10))
        await until(conveyed)
        await home.kill_agent()
        await check(client, *range(10, 20))
        before = (await client.stats())["courier_conveyed_bytes_total"]
        await until(conveyed)


def _put_and_kill(path: str, dies: Node, ack: Ack, together: int, lives: int) -> int:
    """Whoever was told that its blocks are put kills an agent at once, mostly before that has
    heard of them; how many there are."""
    count = 0
    with Client(path) as client:

        def put_some() -> None:
            nonlocal count
            numbers = range(count, count + together)
            client.put(NAMESPACE, {key(number): small(number) for number in numbers}, ack=ack)
            count += together

        for _ in range(lives):
            before = client.stats()["courier_put_total"]
            while client.stats()["courier_put_total"] == before:
                if count >= 300:  # more than the arena has room for
                    return 0
                put_some()
                time.sleep(0.1)
            pid = dies.agent()
            put_some()
            os.kill(pid, signal.SIGKILL)
            while pid in children_of(dies.process.pid):
                time.sleep(0.01)
    return count


@with_a_courier
@pytest.mark.parametrize(("ack", "together"), [("home", 1), ("home", 2), ("local", 2)])
async def test_what_was_put_in_the_moment_of_death_is_there(
    tmp_path: Path, ack: Ack, together: int
) -> None:
    """By compiled code: at the home that was pushed it, or at the node whose client has put it."""
    async with nodes(tmp_path, 2) as (one, home):
        dies = home if ack == "home" else one
        count = await asyncio.to_thread(_put_and_kill, one.socket, dies, ack, together, 4)
        assert count, "compiled code puts blocks, whatever has died"
        async with await AsyncClient.connect(dies.socket) as client:
            await until_it_serves(client)
            for number in range(count):
                (block,) = await client.get(NAMESPACE, [key(number)], 10.0)
                assert block is not None, number
                with block:
                    assert bytes(block.data) == small(number)
                    assert block.tier == "local", "it was acknowledged here"
            await until_released(client)
