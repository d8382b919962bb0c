"""Everything in examples/, run: the walk through three nodes, the chat behind a real router, and
prefill and decode apart.

Oracle: what the examples print and answer. Cannot see: a model (the engines behind the router are
fake ones), or a browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import FakeEngine, fake_engines
from kvcast.hostagent.connectors.options import handover_of
from kvcast.routing.core.router import Router, RouterOptions
from kvcast.routing.engines import Engines
from kvcast.routing.options import EngineAddress, HealthOptions, ProxyOptions
from kvcast.routing.proxy import Proxy

EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = EXAMPLES / "chat/chat.py"


def test_every_example_is_listed_and_run_here() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {"three-nodes/walk.sh", "chat/chat.py", "prefill-decode/ask.py"}
    folders = {"three-nodes", "chat", "prefill-decode"}
    assert {path.name for path in EXAMPLES.iterdir()} == {"README.md", *folders}


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has just now. The example has fixed ports, so
    that its reader can type them; they are chosen from `base` on here. Somebody may take one before
    it does: hardly by chance, since Linux gives out ports from 32,768 up."""
    for base in range(24100, 60000, 50):
        with contextlib.ExitStack() as stack:
            try:
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    for port in range(base, base + count):
                        one = stack.enter_context(socket.socket(socket.AF_INET, kind))
                        one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise AssertionError("no free ports")


@pytest.mark.slow
async def test_the_walk_through_three_nodes() -> None:
    environment = os.environ | {
        "KVCAST": str(Path(sys.executable).with_name("kvcast")),
        "KVCAST_BASE_PORT": str(free_ports(12)),
    }
    process = await asyncio.create_subprocess_exec(
        str(EXAMPLES / "three-nodes/walk.sh"), stdout=PIPE, stderr=PIPE, env=environment
    )
    try:
        told, errors = await asyncio.wait_for(process.communicate(), 150)
    finally:
        if process.returncode is None:
            process.terminate()  # it stops what it has started
            await process.communicate()
    text = told.decode()
    assert process.returncode == 0, text + errors.decode()
    assert text.count("the same bytes") == 3
    assert '"tier": "local"' in text
    assert "node-3" in text
    assert text.endswith("done\n")


# --- the chat -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def route(fakes: list[FakeEngine]) -> AsyncIterator[str]:
    router = Router(RouterOptions())
    addresses = [EngineAddress(fake.name, fake.url) for fake in fakes]
    engines = Engines(addresses, router, HealthOptions(interval_s=0.2))
    proxy = Proxy(router, engines, ProxyOptions())
    await engines.start()
    try:
        await engines.checked.wait()
        host, port = await proxy.start("127.0.0.1", 0)
        yield f"http://{host}:{port}"
    finally:
        await proxy.stop()
        await engines.close()


def chat_module() -> Any:
    spec = importlib.util.spec_from_file_location("chat", CHAT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.asynccontextmanager
async def front_end(server: str) -> AsyncIterator[str]:
    app = chat_module().app_of(server, "", (EXAMPLES / "chat/system.txt").read_text())
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def turn(session: aiohttp.ClientSession, url: str, messages: list[Any]) -> list[Any]:
    async with session.post(f"{url}/turn", json={"messages": messages}) as answer:
        assert answer.status == 200
        return [json.loads(line) for line in (await answer.text()).splitlines()]


async def test_conversations_of_the_chat_share_their_system_prompt_and_so_their_engine() -> None:
    async with (
        fake_engines("a", "b") as fakes,
        route(fakes) as server,
        front_end(server) as url,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(url) as page:
            assert "<title>Chat</title>" in await page.text()
        engines = set()
        for question in ("May dogs come?", "When does the steam engine run?"):
            *words, last = await turn(session, url, [{"role": "user", "content": question}])
            assert [each["word"] for each in words] == ["one", "two", "three"]
            assert last["first_s"] >= 0
            engines.add(last["engine"])
        assert len(engines) == 1
        (engine,) = [fake for fake in fakes if fake.name in engines]
        first, second = (request["messages"] for request in engine.requests)
        assert first[0] == second[0]
        assert first[0]["role"] == "system"
        assert len(first[0]["content"]) > 1000


async def test_the_chat_says_what_is_wrong() -> None:
    async with (
        fake_engines("a") as fakes,
        route(fakes) as server,
        front_end(server) as url,
        aiohttp.ClientSession() as session,
    ):
        fakes[0].behaviour.status = 500
        (only,) = await turn(session, url, [{"role": "user", "content": "x"}])
        assert "no engine answered" in only["error"]
        fakes[0].behaviour.status = 200
        fakes[0].behaviour.dies_after_words = 1
        *_, last = await turn(session, url, [{"role": "user", "content": "x"}])
        assert "broke off" in last["error"]
        for wrong in (b"{", b"[]", b'{"messages": []}', b'{"messages": [{"role": "system"}]}'):
            async with session.post(f"{url}/turn", data=wrong) as answer:
                assert answer.status == 400


async def test_the_chat_answers_on_the_terminal() -> None:
    async with fake_engines("a") as fakes, route(fakes) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(CHAT), "--server", server, "--ask", "May dogs come?"),
            stdout=PIPE,
            stderr=PIPE,
        )
        told, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, errors.decode()
        assert told.decode() == "onetwothree\n" or told.decode() == "onetwothree"
        assert "from a" in errors.decode()


# --- prefill and decode apart -------------------------------------------------------------------


async def test_one_engine_is_asked_to_compute_and_the_others_told_to_wait(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("Once upon a time")
    async with fake_engines("a", "b", "c") as fakes:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / "prefill-decode/ask.py"), "--model", "m"),
            *("--prefill", fakes[0].url, "--decode", fakes[1].url, fakes[2].url),
            *("--nodes", "node-2", "node-3", "--prompt-file", str(tmp_path / "prompt")),
            stdout=PIPE,
            stderr=PIPE,
        )
        told, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, errors.decode()
        answers = [json.loads(line) for line in told.splitlines()]
        assert [answer["server"] for answer in answers] == [fake.url for fake in fakes]
        asked = [fake.requests[0] for fake in fakes]
    assert {each["prompt"] for each in asked} == {"Once upon a time"}
    assert (asked[0]["max_tokens"], "kv_transfer_params" in asked[0]) == (1, False)
    for each in asked[1:]:
        assert handover_of(each["kv_transfer_params"]) == (True, ("node-2", "node-3"))
