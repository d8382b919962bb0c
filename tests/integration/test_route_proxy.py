"""`kvcast route` against fake engines (no models): streams, failures, retries, deadlines, events.

Oracle: what the fake engines were asked, and what the client got. Cannot see: a real engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import Behaviour, FakeEngine, FakePublisher, fake_engines, removed, stored
from kvcast.cli import certs
from kvcast.routing.core.costs import CostModel
from kvcast.routing.core.hashing import token_chain
from kvcast.routing.core.router import Choice, Prompt, Router, RouterOptions
from kvcast.routing.engines import Engines
from kvcast.routing.options import EngineAddress, HealthOptions, ProxyOptions
from kvcast.routing.proxy import DEADLINE_HEADER, ENGINE_HEADER, Proxy
from kvcast.service.http import HttpServer, json_answer
from kvcast.service.identity import identity_of
from kvcast.service.tls import Credentials
from patience import PATIENCE_S

log = logging.getLogger(__name__)

BLOCK = 16
LONG = "the same beginning of many prompts, " * 4
HEALTH = HealthOptions(interval_s=0.05, timeout_s=1.0, failures=2, tokenize_timeout_s=1.0)
COSTS = CostModel(prefill_s_per_token=1e-3)


@dataclass
class Served:
    url: str
    router: Router
    engines: Engines
    proxy: Proxy
    session: aiohttp.ClientSession

    async def ask(self, prompt: Any = LONG, **more: Any) -> tuple[int, Any, str]:
        """Status, body and engine of a completion that is not streamed."""
        headers = more.pop("headers", {})
        body = {"model": "m", "prompt": prompt, **more}
        async with self.session.post(
            f"{self.url}/v1/completions", json=body, headers=headers
        ) as answer:
            return answer.status, await answer.json(), answer.headers.get(ENGINE_HEADER, "")

    async def stream(self, prompt: Any = LONG, **more: Any) -> tuple[list[Any], str]:
        """The events of a streamed completion, and its engine."""
        body = {"model": "m", "prompt": prompt, "stream": True, **more}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return events_of(await answer.text()), answer.headers[ENGINE_HEADER]


def events_of(text: str) -> list[Any]:
    found: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@contextlib.asynccontextmanager
async def routed(
    addresses: list[EngineAddress],
    proxy_options: ProxyOptions | None = None,
    *,
    health: HealthOptions = HEALTH,
    router_options: RouterOptions | None = None,
    tokenizes: bool = True,
) -> AsyncIterator[Served]:
    router = Router(router_options or RouterOptions(costs=COSTS))
    engines = Engines(addresses, router, health)
    proxy = Proxy(router, engines, proxy_options or ProxyOptions(), tokenizes=tokenizes)
    await engines.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        try:
            await engines.checked.wait()
            host, port = await proxy.start("127.0.0.1", 0)
            yield Served(f"http://{host}:{port}", router, engines, proxy, session)
        finally:
            await proxy.stop()
            await engines.close()


def at(*fakes: FakeEngine) -> list[EngineAddress]:
    return [EngineAddress(fake.name, fake.url) for fake in fakes]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- answers as they come -----------------------------------------------------------------------


async def test_a_stream_comes_word_by_word_and_a_whole_answer_whole() -> None:
    async with fake_engines("a") as fakes, routed(at(*fakes)) as served:
        fakes[0].behaviour.goes_on = goes_on = asyncio.Event()
        body = {"model": "m", "prompt": LONG, "stream": True, "temperature": 0.5}
        async with served.session.post(f"{served.url}/v1/completions", json=body) as answer:
            said = b""
            async with asyncio.timeout(PATIENCE_S):  # the first word waits for no other
                while b"one" not in said:
                    said += await answer.content.readany()
            goes_on.set()
            assert b"three" in await answer.read()
        assert fakes[0].requests == [body], "as the client said it"
        status, whole, engine = await served.ask()
        assert (status, whole["text"], engine) == (200, "one two three", "a")


async def test_chat_and_headers_go_through() -> None:
    async with fake_engines("a") as fakes, routed(at(*fakes)) as served:
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
        headers = {"Authorization": "Bearer k", "X-Request-Id": "mine", "Connection": "close"}
        async with served.session.post(
            f"{served.url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            assert (await answer.json())["engine"] == "a"
        assert fakes[0].requests == [body]
        assert fakes[0].headers[0]["authorization"] == "Bearer k"
        assert fakes[0].headers[0].getall("x-request-id") == ["mine"]


async def test_what_connection_names_is_for_one_connection_alone() -> None:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            asked.append(line)
            length = 0
            while (header := await reader.readline()) not in (b"\r\n", b""):
                asked.append(header)
                if header.lower().startswith(b"content-length:"):
                    length = int(header.partition(b":")[2])
            await reader.readexactly(length)
            body = b'{"data": [{"id": "m"}]}'
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: X-Hop, keep-alive\r\n"
                b"X-Hop: 1\r\nX-Far: 2\r\n\r\n%s" % (len(body), body)
            )
        writer.close()

    asked: list[bytes] = []
    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, routed([EngineAddress("a", url)], tokenizes=False) as served:
        asked.clear()
        headers = {"Connection": "X-Mine , Keep-Alive", "X-Mine": "1", "X-Theirs": "2"}
        async with served.session.post(
            f"{served.url}/v1/completions", json={"model": "m", "prompt": LONG}, headers=headers
        ) as answer:
            assert answer.status == 200
            assert "X-Hop" not in answer.headers
            assert answer.headers["X-Far"] == "2"
        assert b"X-Theirs: 2\r\n" in asked
        assert not [line for line in asked if line.lower().startswith(b"x-mine")]


async def test_no_request_goes_by_a_connection_that_its_engine_may_be_closing() -> None:
    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        idle_since = time.monotonic()
        while line := await reader.readline():
            if time.monotonic() - idle_since > 4.0:
                break  # uvicorn closes after 5 s, and what is on its way then is lost
            length = 0
            while (header := await reader.readline()) not in (b"\r\n", b""):
                if header.lower().startswith(b"content-length:"):
                    length = int(header.partition(b":")[2])
            await reader.readexactly(length)
            if line.startswith(b"POST"):
                posts.append(line)
            body = b'{"data": [{"id": "m"}]}'
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            idle_since = time.monotonic()
        writer.close()

    posts: list[bytes] = []
    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    seldom = replace(HEALTH, interval_s=3600.0)
    async with server, routed([EngineAddress("a", url)], health=seldom, tokenizes=False) as served:
        await asyncio.sleep(4.2)
        status, _, _ = await served.ask()
        assert status == 200
        assert len(posts) == 1


async def test_an_engines_own_error_goes_through_and_is_not_tried_again() -> None:
    async with fake_engines("a", "b") as fakes, routed(at(*fakes)) as served:
        for fake in fakes:
            fake.behaviour.status = 400
        status, body, _ = await served.ask()
        assert (status, body["error"]["message"]) == (400, "so it is")
        assert sum(len(fake.requests) for fake in fakes) == 1


async def test_models_health_status_and_metrics() -> None:
    async with (
        fake_engines("a", models={"m": None, "adapter": "m"}) as fakes,
        routed(at(*fakes)) as served,
    ):
        await served.ask()
        async with served.session.get(f"{served.url}/v1/models") as answer:
            models = (await answer.json())["data"]
        assert [each["id"] for each in models] == ["adapter", "m"]
        async with served.session.get(f"{served.url}/v1/route/status") as answer:
            status = await answer.json()
        assert status["engines"][0]["up"] is True
        assert status["counts"]["routed_total"] == 1
        async with served.session.get(f"{served.url}/metrics") as answer:
            text = await answer.text()
        assert "kvcast_route_routed_total 1.0" in text
        assert 'kvcast_route_engine_up{engine="a"} 1.0' in text
        fakes[0].behaviour.healthy = False
        await until(lambda: not served.router.is_up("a"))
        async with served.session.get(f"{served.url}/healthz") as answer:
            assert answer.status == 503
        status_code, body, _ = await served.ask()
        assert (status_code, body["error"]["code"]) == (503, "no_engine")
        fakes[0].behaviour.healthy = True
        await until(lambda: served.router.is_up("a"))
        assert (await served.ask())[0] == 200


# --- engines that fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(dies_before_headers=True),
        Behaviour(dies_before_first_word=True),
        Behaviour(status=500),
        Behaviour(status=503),
        Behaviour(status=429),
        Behaviour(delay_s=30.0),
        Behaviour(say=("", "late"), word_delay_s=30.0),
    ],
    ids=["gone", "gone-before-a-word", "500", "503", "429", "hangs", "hangs-before-a-word"],
)
async def test_a_request_whose_answer_has_not_begun_goes_to_another_engine(
    behaviour: Behaviour,
) -> None:
    async with fake_engines("a", "b") as fakes:
        options = ProxyOptions(first_byte_timeout_s=0.5)
        async with routed(at(*fakes), options, health=replace(HEALTH, failures=5)) as served:
            fakes[0].behaviour = behaviour
            events, engine = await served.stream()
            assert engine == "b"
            assert events[-1] == "[DONE]"
            assert len(fakes[0].requests) == 1
            assert len(fakes[1].requests) == 1
            assert not served.router.load_of("a").in_flight
            assert not served.router.load_of("b").in_flight


async def test_a_stream_that_has_begun_is_never_repeated_and_says_that_it_broke() -> None:
    async with fake_engines("a", "b") as fakes, routed(at(*fakes)) as served:
        for fake in fakes:
            fake.behaviour.dies_after_words = 2
        events, _ = await served.stream()
        assert [event["word"] for event in events[:2]] == ["one", "two"]
        assert events[2]["error"]["code"] == "engine_failed"
        assert "[DONE]" not in events
        assert sum(len(fake.requests) for fake in fakes) == 1
        assert served.proxy.counts["answers_broken_off_total"] == 1


async def test_a_stream_that_stops_in_the_middle_is_ended() -> None:
    async with (
        fake_engines("a") as fakes,
        routed(at(*fakes), ProxyOptions(idle_timeout_s=0.3)) as served,
    ):
        fakes[0].behaviour.stops_after_words = 1
        events, _ = await served.stream()
        assert events[0]["word"] == "one"
        assert events[1]["error"]["code"] == "engine_failed"
        await until(lambda: fakes[0].abandoned == 1)


async def test_when_all_fail_the_client_is_told_after_so_many_tries() -> None:
    async with fake_engines("a", "b", "c") as fakes:
        options = ProxyOptions(tries=2)
        async with routed(at(*fakes), options, health=replace(HEALTH, failures=9)) as served:
            for fake in fakes:
                fake.behaviour.status = 500
            status, body, _ = await served.ask()
            assert (status, body["error"]["code"]) == (502, "engine_failed")
            assert sum(len(fake.requests) for fake in fakes) == 2
            for fake in fakes:
                fake.behaviour.status = 429
            assert (await served.ask())[0] == 429
            assert all(served.router.is_up(fake.name) for fake in fakes), "busy is not ill"


async def test_a_request_on_which_every_engine_fails_makes_none_of_them_ill() -> None:
    health = replace(HEALTH, interval_s=60.0)
    async with fake_engines("a", "b") as fakes, routed(at(*fakes), health=health) as served:
        for fake in fakes:
            fake.behaviour.status = 500
        for _ in range(health.failures):
            assert (await served.ask())[0] == 502
        fakes[1].behaviour.status = 200  # what only one of them fails on says something of it
        for number in range(100):
            assert (await served.ask(f"{number}"))[::2] == (200, "b")
            if not served.router.is_up("a"):
                break
        assert not served.router.is_up("a")


async def test_an_engine_that_is_gone_is_left_at_once_and_found_again() -> None:
    async with (
        fake_engines("a", "b") as fakes,
        routed(at(*fakes), health=replace(HEALTH, interval_s=0.3)) as served,
    ):
        port = fakes[0].port
        await fakes[0].__aexit__()
        for _ in range(3):
            assert (await served.ask())[2] == "b"
        assert not served.router.is_up("a")
        async with FakeEngine("a", port=port):
            await until(lambda: served.router.is_up("a"))


async def test_a_client_that_does_not_read_the_end_of_its_answer_keeps_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Proxy._request

    def with_small_buffers(
        self: Proxy, message: Any, payload: Any, protocol: Any, *more: Any
    ) -> Any:
        sock = protocol.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return made(self, message, payload, protocol, *more)

    monkeypatch.setattr(Proxy, "_request", with_small_buffers)
    options = ProxyOptions(idle_timeout_s=0.3, max_requests=1)
    async with fake_engines("a") as fakes, routed(at(*fakes), options) as served:
        # The first 64 KiB fit, the rest is written without a look at whether anybody reads.
        fakes[0].behaviour.say = ("x" * 60_000,)
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
            body = json.dumps({"model": "m", "prompt": LONG, "stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
            await loop.sock_sendall(client, head % len(body) + body)
            await until(lambda: fakes[0].finished == 1)
            await until(lambda: not served.router.load_of("a").in_flight)
        assert (await served.ask())[0] == 200


async def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    async with fake_engines("a") as fakes, routed(at(*fakes)) as served:
        fakes[0].behaviour.word_delay_s = 5.0
        asking = asyncio.create_task(served.stream())
        await until(lambda: len(fakes[0].requests) == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: fakes[0].abandoned == 1)
        await until(lambda: not served.router.load_of("a").in_flight)


# --- where requests go --------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizes", [True, False])
async def test_prompts_with_one_beginning_meet_at_one_engine(tokenizes: bool) -> None:
    async with (
        fake_engines("a", "b", "c") as fakes,
        routed(at(*fakes), tokenizes=tokenizes) as served,
    ):
        went = {(await served.stream(LONG + str(number)))[1] for number in range(6)}
        assert len(went) == 1
        others = {(await served.stream(f"{n} other " * 20))[1] for n in range(3)}
        assert len(went | others) == 3
        named = served.proxy.prompts.counts
        assert bool(named["by_tokens_total"]) is tokenizes
        assert bool(named["by_text_total"]) is not tokenizes


@pytest.mark.parametrize(
    "behaviour", [Behaviour(tokenizes=False), Behaviour(tokenize_delay_s=5.0)], ids=["none", "slow"]
)
async def test_without_an_answer_from_the_tokenizer_the_text_is_used(behaviour: Behaviour) -> None:
    async with fake_engines("a", "b") as fakes:
        health = replace(HEALTH, tokenize_timeout_s=0.1)
        async with routed(at(*fakes), health=health) as served:
            for fake in fakes:
                fake.behaviour = replace(behaviour)
            went = {(await served.stream(LONG + str(number)))[1] for number in range(4)}
            assert len(went) == 1
            assert served.proxy.prompts.counts["tokenize_failed_total"] == 4


async def test_token_ids_need_no_tokenizer_and_a_prompt_seen_before_neither() -> None:
    async with fake_engines("a", "b") as fakes, routed(at(*fakes)) as served:
        ids = list(range(64))
        assert (await served.ask(ids))[0] == 200
        assert sum(fake.tokenized for fake in fakes) == 0
        await served.ask(LONG)
        await served.ask(LONG)
        assert sum(fake.tokenized for fake in fakes) == 1
        assert served.proxy.prompts.counts["remembered_total"] == 1


async def test_a_model_goes_to_an_engine_that_serves_it() -> None:
    async with (
        FakeEngine("a") as first,
        FakeEngine("b", models={"n": None, "l": "n"}) as second,
        routed(at(first, second)) as served,
    ):
        assert (await served.ask(model="n"))[2] == "b"
        assert (await served.ask(model="l"))[2] == "b"
        assert (await served.ask(model="m"))[2] == "a"
        status, body, _ = await served.ask(model="x")
        assert (status, body["error"]["code"]) == (404, "model_not_found")


# --- KV events ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def publishing(folder: Path, **options: Any) -> AsyncIterator[tuple[FakePublisher, str, str]]:
    publisher = FakePublisher(**options)
    endpoints = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    await publisher.start(*endpoints)
    try:
        yield publisher, *endpoints
    finally:
        await publisher.close()


def tokens(text: str) -> list[int]:
    return list(text.encode())[: len(text) // BLOCK * BLOCK]


async def test_events_send_a_request_where_its_prefix_is_held(tmp_path: Path) -> None:
    ids = tokens(LONG)
    hashes: list[int | bytes] = [f"{n:032}".encode() for n in range(len(ids) // BLOCK)]
    async with fake_engines("a", "b") as fakes, publishing(tmp_path) as (publisher, *ends):
        await publisher.publish(stored(hashes[:2], ids[:32]))  # before anybody listens
        addresses = [
            *at(fakes[0]),
            EngineAddress("b", fakes[1].url, events=ends[0], replay=ends[1]),
        ]
        async with routed(addresses) as served:
            chain = token_chain(ids, BLOCK, seed=served.engines.names_of("m").seed)
            index = served.router.index
            await until(lambda: len(index.runs(chain[:2], 0.0)) == 1)
            # One is lost on the way, and the next shows it.
            await publisher.publish(stored(hashes[2:4], ids[32:64], parent=hashes[1]), lost=True)
            await publisher.publish(stored(hashes[4:], ids[64:], parent=hashes[3]))
            await until(lambda: sum(run.blocks for run in index.runs(chain, 0.0)) == len(chain))
            assert publisher.replays == 2
            assert (await served.ask())[2] == "b"
            estimate = served.proxy.counts["engine_tokens_total"]
            assert estimate == len(ids) - 1, "the last token is always computed"
            assert served.engines.pool_key(chain[0]) == (f"{0:032}".encode())[:16]
            await publisher.publish(removed(hashes))
            await until(lambda: not index.runs(chain, 0.0))


async def test_an_endpoint_that_cannot_be_is_told_and_requests_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_engines("a") as fakes:
        address = EngineAddress("a", fakes[0].url, events="tcp://nowhere")
        async with routed([address]) as served:
            assert (await served.ask())[0] == 200
            async with served.session.get(f"{served.url}/v1/route/status") as answer:
                engine = (await answer.json())["engines"][0]
            assert engine["events"] == {"streams_failed_total": 1}
    assert "not heard any more" in caplog.text


async def test_an_engine_that_was_down_is_asked_anew_what_it_holds(tmp_path: Path) -> None:
    ids = tokens(LONG)[:32]
    async with fake_engines("a") as fakes, publishing(tmp_path, as_maps=True) as (publisher, *ends):
        address = EngineAddress("a", fakes[0].url, events=ends[0], replay=ends[1])
        async with routed([address]) as served:
            chain = token_chain(ids, BLOCK, seed=served.engines.names_of("m").seed)
            index = served.router.index
            await publisher.publish(stored([1, 2], ids))
            await until(lambda: bool(index.runs(chain, 0.0)))
            fakes[0].behaviour.healthy = False
            await until(lambda: not served.router.is_up("a"))
            assert not index.runs(chain, 0.0)
            fakes[0].behaviour.healthy = True
            await until(lambda: served.router.is_up("a"))
            await publisher.publish(removed([9]))
            await until(lambda: bool(index.runs(chain, 0.0)))


# --- prefetch -----------------------------------------------------------------------------------


async def test_what_the_pool_holds_is_prefetched_by_the_engines_agent(tmp_path: Path) -> None:
    ids = tokens(LONG)
    hashes: list[int | bytes] = [f"{n:032}".encode() for n in range(len(ids) // BLOCK)]
    asked: list[Any] = []

    async def prefetch(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"held": 3})

    app = web.Application()
    app.add_routes([web.post("/v1/prefetch", prefetch)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    agent = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with fake_engines("a", "b") as fakes, publishing(tmp_path) as (publisher, *ends):
            addresses = [
                EngineAddress("a", fakes[0].url, agent=agent, namespace=7),
                EngineAddress("b", fakes[1].url, events=ends[0], replay=ends[1]),
            ]
            async with routed(addresses) as served:
                in_pool = {**stored(hashes, ids), "medium": "kvcast"}
                await publisher.publish(in_pool)
                chain = token_chain(ids, BLOCK, seed=served.engines.names_of("m").seed)
                index = served.router.index
                await until(lambda: bool(index.runs(chain, 0.0)))
                served.router.set_up("b", False)
                assert (await served.ask())[2] == "a"
                await until(lambda: served.proxy.prefetches.counts["prefetches_total"] == 1)
                assert asked == [{"namespace": 7, "keys": [h[:16].hex() for h in hashes]}]
                # The pool holds three of them: the router learns it.
                pool = [run for run in index.runs(chain, 1e9) if run.holders]
                assert sum(run.blocks for run in pool) == 3
    finally:
        await runner.cleanup()


async def test_an_agent_that_does_not_answer_delays_nothing(tmp_path: Path) -> None:
    ids = tokens(LONG)
    hashes: list[int | bytes] = [f"{n:032}".encode() for n in range(len(ids) // BLOCK)]
    async with fake_engines("a") as fakes, publishing(tmp_path) as (publisher, *ends):
        address = EngineAddress(
            "a",
            fakes[0].url,
            events=ends[0],
            replay=ends[1],
            agent="http://127.0.0.1:1",
            namespace=7,
        )
        async with routed([address]) as served:
            await publisher.publish({**stored(hashes, ids), "medium": "kvcast"})
            chain = token_chain(ids, BLOCK, seed=served.engines.names_of("m").seed)
            await until(lambda: bool(served.router.index.runs(chain, 0.0)))
            assert (await served.ask())[0] == 200
            await until(lambda: served.proxy.prefetches.counts["prefetches_failed_total"] == 1)


# --- deadlines, bounds, nonsense ----------------------------------------------------------------


async def test_what_cannot_meet_its_deadline_is_refused_before_any_engine_sees_it() -> None:
    async with fake_engines("a") as fakes, routed(at(*fakes)) as served:
        too_long = await served.ask("x" * 1000, headers={DEADLINE_HEADER: "500"})
        assert (too_long[0], too_long[1]["error"]["code"]) == (503, "too_long")
        assert not fakes[0].requests
        fakes[0].behaviour.delay_s = 1.0
        slow = asyncio.create_task(served.stream("y" * 3000))
        await until(lambda: len(fakes[0].requests) == 1)
        body = {"model": "m", "prompt": "short"}
        async with served.session.post(
            f"{served.url}/v1/completions", json=body, headers={DEADLINE_HEADER: "400"}
        ) as answer:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["code"] == "overloaded"
        assert len(fakes[0].requests) == 1
        await slow
        fakes[0].behaviour.delay_s = 0.0
        assert (await served.ask("short", headers={DEADLINE_HEADER: "400"}))[0] == 200


async def test_requests_at_once_are_bounded() -> None:
    async with (
        fake_engines("a") as fakes,
        routed(at(*fakes), ProxyOptions(max_requests=2)) as served,
    ):
        fakes[0].behaviour.delay_s = 1.0
        asking = [asyncio.create_task(served.ask(f"{n}")) for n in range(2)]
        await until(lambda: len(fakes[0].requests) == 2)
        status, body, _ = await served.ask("more")
        assert status == 429
        assert body["error"]["code"] == "too_many_requests"
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200, 200]
        assert (await served.ask("again"))[0] == 200


async def test_engines_that_are_full_refuse_more() -> None:
    async with fake_engines("a") as fakes:
        options = RouterOptions(costs=COSTS, max_in_flight=1)
        async with routed(at(*fakes), router_options=options) as served:
            fakes[0].behaviour.delay_s = 0.5
            first = asyncio.create_task(served.ask("1"))
            await until(lambda: len(fakes[0].requests) == 1)
            status, body, _ = await served.ask("2")
            assert status == 429
            assert body["error"]["code"] == "full"
            assert (await first)[0] == 200


@pytest.mark.parametrize(
    ("raw", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[1]", {}, 400),
        (b"\xff", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"prompt": "x"}', {}, 400),
        (b'{"model": 5, "prompt": "x"}', {}, 400),
        (b'{"model": "m"}', {}, 400),
        (b'{"model": "m", "prompt": [1, "x"]}', {}, 400),
        (b'{"model": "m", "prompt": [-1]}', {}, 400),
        (b'{"model": "m", "prompt": [4294967296]}', {}, 400),
        (b'{"model": "m", "prompt": []}', {}, 400),
        (b'{"model": "m", "messages": []}', {}, 400),
        (b'{"model": "m", "messages": [5]}', {}, 400),
        (b'{"model": "m", "prompt": "x", "cache_salt": 5}', {}, 400),
        (b'{"model": "m", "prompt": "x"}', {DEADLINE_HEADER: "soon"}, 400),
        (b'{"model": "m", "prompt": "x"}', {DEADLINE_HEADER: "-1"}, 400),
        (b'{"model": "m", "prompt": "x"}', {DEADLINE_HEADER: "nan"}, 400),
        (b'{"model": "m", "prompt": "\\ud800"}', {}, 400),
    ],
)
async def test_what_is_no_request_is_refused_with_a_reason(
    raw: bytes, headers: dict[str, str], status: int
) -> None:
    async with fake_engines("a") as fakes:
        limit = ProxyOptions(max_body_bytes=200_000 if raw.startswith(b"[[") else 4096)
        async with routed(at(*fakes), limit) as served:
            async with served.session.post(
                f"{served.url}/v1/completions", data=raw, headers=headers
            ) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["message"]
            assert not fakes[0].requests
            assert (await served.ask())[0] == 200


async def test_a_request_that_is_too_long_is_refused() -> None:
    async with (
        fake_engines("a") as fakes,
        routed(at(*fakes), ProxyOptions(max_body_bytes=4096)) as served,
    ):
        status, body, _ = await served.ask("x" * 5000)
        assert status == 413, body
        assert not fakes[0].requests


async def test_a_client_that_waits_for_leave_to_send_its_body_is_given_it() -> None:
    async with fake_engines("a") as fakes, routed(at(*fakes)) as served:
        port = int(served.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"model": "m", "prompt": LONG}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_body_that_came_packed_is_not_said_to_be_packed_any_more() -> None:
    async with fake_engines("a") as fakes, routed(at(*fakes)) as served:
        body = gzip.compress(json.dumps({"model": "m", "prompt": LONG}).encode())
        async with served.session.post(
            f"{served.url}/v1/completions", data=body, headers={"Content-Encoding": "gzip"}
        ) as answer:
            assert answer.status == 200, await answer.text()
        assert "Content-Encoding" not in fakes[0].headers[0]


async def test_other_paths_and_methods_are_refused() -> None:
    async with fake_engines("a") as fakes, routed(at(*fakes)) as served:
        for path in ("/", "/v1/embeddings", "/v1/completions/..%2f..", "/shutdown"):
            async with served.session.post(served.url + path) as answer:
                assert answer.status == 404
        async with served.session.get(f"{served.url}/v1/completions") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with fake_engines("a") as fakes:
        options = ProxyOptions(first_request_timeout_s=0.2)
        async with routed(at(*fakes), options) as served:
            port = int(served.url.rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/comp")
            try:
                async with asyncio.timeout(PATIENCE_S):
                    ended = await reader.read() == b""
            except ConnectionError:
                ended = True
            except TimeoutError:
                ended = False
            writer.close()
            assert ended
            assert served.proxy.counts["connections_silent_total"] == 1


@pytest.mark.parametrize(
    "models",
    [
        b"{}",
        b"[]",
        b'{"data": []}',
        b'{"data": [{"id": 5}]}',
        b"x" * 100,
        b'{"x": ' + b"[" * 100_000,
    ],
    ids=["empty", "list", "none", "number", "noise", "deep"],
)
async def test_an_engine_that_makes_no_sense_is_down(models: bytes) -> None:
    said = [models]

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=said[-1])

    app = web.Application()
    app.add_routes([web.get("/health", answer), web.get("/v1/models", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with routed([EngineAddress("a", url)]) as served:
            assert not served.router.is_up("a")
            assert (await served.ask())[0] == 503
            said.append(b'{"data": [{"id": "m"}]}')
            await until(lambda: served.router.is_up("a"))
    finally:
        await runner.cleanup()


# --- TLS ------------------------------------------------------------------------------------------


async def test_clients_need_no_certificate_and_agents_see_the_routers(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert certs.main(["init", str(folder), "--controller=127.0.0.1", "--node=node-1"]) == 0
    credentials = Credentials.of_folder(folder / "controller")
    seen: list[Any] = []

    async def prefetch(request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        seen.append(request.transport.get_extra_info("peercert"))
        return json_answer({"held": 1})

    agent = HttpServer(
        {"/v1/prefetch": {"POST": prefetch}}, Credentials.of_folder(folder / "node-1"), log=log
    )
    host, port = await agent.start("127.0.0.1", 0)
    router = Router(RouterOptions(costs=COSTS))
    chain = token_chain(list(range(BLOCK * 2)), BLOCK)
    async with fake_engines("a") as fakes:
        address = EngineAddress("a", fakes[0].url, agent=f"https://{host}:{port}", namespace=1)
        engines = Engines([address], router, HEALTH, credentials)
        proxy = Proxy(router, engines, ProxyOptions(), credentials)
        await engines.start()
        try:
            await engines.checked.wait()
            host, port = await proxy.start("127.0.0.1", 0)
            trusting = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            async with aiohttp.ClientSession() as session:
                body = {"model": "m", "prompt": LONG}
                url = f"https://{host}:{port}/v1/completions"
                async with session.post(url, json=body, ssl=trusting) as answer:
                    assert answer.status == 200
                with pytest.raises(aiohttp.ClientError):
                    await session.post(url.replace("https", "http"), json=body)
            router.pooled(chain)
            engines._keep_key(chain[0], b"k" * 32)
            choice = router.route("r", Prompt(chain, 33, BLOCK), 0.0)
            assert isinstance(choice, Choice)
            proxy.prefetches.send(choice, Prompt(chain, 33, BLOCK))
            await until(lambda: proxy.prefetches.counts["prefetches_total"] == 1)
            assert identity_of(seen[0]).role == "controller"
        finally:
            await proxy.stop()
            await engines.close()
            await agent.stop()


# --- the daemon ---------------------------------------------------------------------------------


async def test_the_daemon_serves_says_that_it_is_ready_and_stops_cleanly() -> None:
    async with fake_engines("a", "b") as fakes:
        words = [sys.executable, "-W", "error", "-m", "kvcast.routing.daemon"]
        words += ["--listen=127.0.0.1:0", *(f"--engine={f.name}={f.url}" for f in fakes)]
        process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE)
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), 20)
            ready = json.loads(line)
            assert ready["service"] == "route"
            async with aiohttp.ClientSession() as session:
                body = {"model": "m", "prompt": LONG}
                url = f"http://{ready['listen']}/v1/completions"
                async with session.post(url, json=body) as answer:
                    assert (await answer.json())["text"] == "one two three"
            os.kill(process.pid, signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), 120)
            assert process.returncode == 0, errors.decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
