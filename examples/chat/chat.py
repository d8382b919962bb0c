#!/usr/bin/env python3
"""A chat with a shared system prompt, in the browser or on the terminal.

    python examples/chat/chat.py --server http://127.0.0.1:8000 --listen 127.0.0.1:8080
    python examples/chat/chat.py --server http://127.0.0.1:8000 --ask "What is a KV cache?"

`--server` is `kvcast route`, or any server that speaks OpenAI's API. It needs aiohttp, which
`pip install 'kvcast[route]'` brings.

Every conversation begins with the same system prompt (`--system FILE`): so all of them share a
prefix, which one engine computes once. `kvcast route` sends each turn where the conversation's own
prefix lies; behind each answer the page says which engine gave it, and when its first word came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

HERE = Path(__file__).parent
MAX_MESSAGES = 200
MAX_CHARS = 200_000
SESSION = web.AppKey("session", aiohttp.ClientSession)


class ServerError(Exception):
    """What the server says is wrong."""


async def answer(
    session: aiohttp.ClientSession,
    server: str,
    model: str,
    messages: list[dict[str, str]],
) -> AsyncIterator[dict[str, Any]]:
    """One turn: {"word": ...} as they come, then {"engine": ..., "first_s": ...}; ServerError."""
    body = {"model": model, "messages": messages, "stream": True}
    begun, first_s = time.monotonic(), None
    async with session.post(f"{server}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise ServerError(f"{response.status}: {reason_in(await response.text())}")
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise ServerError(event["error"].get("message", "the answer broke off"))
            choices = event.get("choices") or [{}]
            word = choices[0].get("delta", {}).get("content")
            if word:
                first_s = first_s or time.monotonic() - begun
                yield {"word": word}
        engine = response.headers.get("X-Kvcast-Engine", "")
        yield {"engine": engine, "first_s": round(first_s or 0.0, 3)}


def reason_in(text: str) -> str:
    """The message of an error in OpenAI's form, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


async def model_of(session: aiohttp.ClientSession, server: str) -> str:
    """The first model that the server has."""
    async with session.get(f"{server}/v1/models") as response:
        models = (await response.json()).get("data", [])
    if not models:
        raise ServerError("the server has no model yet")
    return str(models[0]["id"])


def checked(body: Any) -> list[dict[str, str]]:
    """The messages of a page's request, as far as they are such; web.HTTPBadRequest else."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise web.HTTPBadRequest(text="messages: between 1 and 200")
    found = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("user", "assistant") or not isinstance(content, str):
            raise web.HTTPBadRequest(text="a message is {role: user or assistant, content: text}")
        found.append({"role": role, "content": content})
    if sum(len(each["content"]) for each in found) > MAX_CHARS:
        raise web.HTTPBadRequest(text="the conversation is too long")
    return found


def app_of(server: str, model: str, system: str) -> web.Application:
    """The page, and what it asks."""
    system_message = {"role": "system", "content": system}

    async def with_session(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            app[SESSION] = session
            yield

    async def page(_request: web.Request) -> web.FileResponse:
        return web.FileResponse(HERE / "chat.html")

    async def turn(request: web.Request) -> web.StreamResponse:
        try:
            messages = checked(await request.json())
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"not JSON: {error}") from error
        out = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await out.prepare(request)
        session = request.app[SESSION]
        try:
            name = model or await model_of(session, server)
            async for each in answer(session, server, name, [system_message, *messages]):
                await out.write(json.dumps(each).encode() + b"\n")
        except (ServerError, aiohttp.ClientError, OSError, ValueError) as error:
            await out.write(json.dumps({"error": str(error)}).encode() + b"\n")
        await out.write_eof()
        return out

    app = web.Application(client_max_size=1 << 20)
    app.cleanup_ctx.append(with_session)
    app.add_routes([web.get("/", page), web.post("/turn", turn)])
    return app


async def ask(server: str, model: str, system: str, question: str) -> int:
    """One question on the terminal."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    async with aiohttp.ClientSession() as session:
        try:
            name = model or await model_of(session, server)
            async for each in answer(session, server, name, messages):
                if "word" in each:
                    print(each["word"], end="", flush=True)
                else:
                    where = f" from {each['engine']}" if each["engine"] else ""
                    print(f"\n[first word after {each['first_s']} s{where}]", file=sys.stderr)
        except (ServerError, aiohttp.ClientError, OSError, ValueError) as error:
            print(f"chat: {error}", file=sys.stderr)
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--model", default="", help="(default: the server's first)")
    parser.add_argument("--system", type=Path, default=HERE / "system.txt", metavar="FILE")
    parser.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT")
    parser.add_argument("--ask", metavar="TEXT", help="ask this, print the answer, and end")
    options = parser.parse_args()
    server, system = options.server.rstrip("/"), options.system.read_text(encoding="utf-8")
    if options.ask is not None:
        return asyncio.run(ask(server, options.model, system, options.ask))
    host, _, port = options.listen.rpartition(":")
    web.run_app(app_of(server, options.model, system), host=host, port=int(port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
