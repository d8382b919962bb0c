"""The controller's page in a real browser (headless Chromium): what a pool says is what it shows.

Oracle: the numbers of /v1/status of the same pool, the words that a service was made to say, the
browser's own errors. Cannot see: whether the page is beautiful. What needs the browser skips where
there is none.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvcast.controller.core import node_report
from kvcast.controller.core.node_report import STATES
from kvcast.controller.http import api
from kvcast.controller.http.api import HttpApi, HttpOptions
from kvcast.controller.http.tokens import (
    VIEWER,
    Token,
    TokensFile,
    digest_of_token,
    new_token,
    write,
)
from kvcast.protocol.messages.local import TIERS
from kvcast.service.addresses import format_host_port
from playwright.async_api import Page, async_playwright, expect
from pool_harness import get, keys_for, namespace_of, put, running_pool

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, _NAMES) if path), None)
in_a_browser = pytest.mark.skipif(
    not CHROMIUM or not ctypes.util.find_library("atomic"),  # playwright's own Node.js wants that
    reason="needs Chromium and libatomic (Debian: chromium libatomic1)",
)

GOT_SIX = """() => [...document.querySelectorAll("#nodes tbody tr")].every((row) => {
    const byTier = [...row.cells].slice(6, 11).map((cell) => Number(cell.textContent));
    return byTier.reduce((sum, hits) => sum + hits, 0) === 6;
})"""
"""Whether every node's row has six blocks got, from wherever."""
HOSTILE = "<img src=x onerror=alert(1)>"
"""What a tenant may call itself, and a switch its error."""


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Page, list[str]]]:
    """The page at `url`, and what went wrong in the browser while it is open."""
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            page = await browser.new_page(viewport={"width": 1400, "height": 1500})
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
            await page.goto(url)
            yield page, complaints
        finally:
            await browser.close()


class FakeService:
    """A controller of one dead node, whose tenant and switch have names that are markup."""

    def health(self) -> str | None:
        return None

    def status(self) -> dict[str, Any]:
        node = {
            "node_id": HOSTILE, "switch_port": 1, "state": "dead", "alive": False,
            "connected": False, "programmed": False, "buckets": 0, "blocks": 0, "load": 0.25,
            "link_bits_per_s": 1_000_000_000, "arena_bytes": 1 << 20, "arena_used_bytes": 0,
            "tiers": {
                "dram": {"used_bytes": 0, "size_bytes": 1 << 20},
                "ssd": {"used_bytes": 3 << 20, "size_bytes": 8 << 20},
                "cold": {"used_bytes": 5 << 20},
            },
        }  # fmt: skip
        settings = {
            "policy": HOSTILE, "weight": 1.0, "operations_per_s": 0.0, "bytes_per_s": 0.0,
            "ttl_s": 0.0,
        }  # fmt: skip
        names = dict.fromkeys(("tenant", "model", "version"), HOSTILE)
        switch = {"address": HOSTILE, "connected": False, "last_error": HOSTILE}
        return {
            "epoch": 7, "plain": False, "admit": "auto", "nodes": [node], "agents": {},
            "namespaces": [{"namespace": 1, **names, "settings": settings}],
            "slots": {"total": 8, "free": 8}, "switch": switch, "residents": [],
        }  # fmt: skip

    def decisions(self) -> list[dict[str, Any]]:
        return [{"age_s": 1.0, "decision": "refused", "key": "00" * 16, "reason": HOSTILE}]

    def worth(self) -> dict[str, Any]:
        return {"advice": "wait", "why": HOSTILE, "received_bytes": 0}


@contextlib.asynccontextmanager
async def fake_controller(options: HttpOptions | None = None) -> AsyncIterator[tuple[HttpApi, str]]:
    """An API of `FakeService`, and its address."""
    api = HttpApi(FakeService(), options)  # type: ignore[arg-type]
    address = await api.start("127.0.0.1", 0)
    try:
        yield api, f"http://{format_host_port(address)}/"
    finally:
        await api.stop()


@in_a_browser
async def test_the_page_shows_the_nodes_hits_and_namespaces_of_a_running_pool(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, 3, replicas=0) as (pool, links):
        namespace = await namespace_of(links[0], "shown")
        keys = keys_for("page", 6)
        await put(links[0], namespace, keys)
        for link in links:
            came, wrong, _ = await get(link, await namespace_of(link, "shown"), keys)
            assert (came, wrong) == (6, 0)
        address = format_host_port(pool.network.http_address)
        async with opened(f"http://{address}/") as (page, complaints):
            await expect(page.locator("#tiles")).to_contain_text("3 of 3")
            rows = page.locator("#nodes tbody tr")
            await expect(rows).to_have_count(3)
            await expect(page.locator("#namespaces")).to_contain_text("shown")
            # Every node got its six blocks from somewhere; agents report every second or so.
            for row in range(3):
                await expect(rows.nth(row)).to_contain_text(f"node-{row + 1}")
                await expect(rows.nth(row)).to_contain_text("alive")
            head = page.locator("#nodes thead")
            await expect(head).to_contain_text("localswitchsharedhomebulkmissed")
            await page.wait_for_function(GOT_SIX, timeout=20_000)
            blocks = {node["node_id"]: node["blocks"] for node in (await pool.status())["nodes"]}
            for row in range(3):
                await expect(rows.nth(row).locator("td").nth(4)).to_have_text(
                    str(blocks[f"node-{row + 1}"]), timeout=20_000
                )
            await pool.http("POST", "/v1/drain", {"node_id": "node-3"})
            await expect(rows.nth(2)).to_contain_text("drained", timeout=20_000)
            assert complaints == []


@in_a_browser
async def test_names_that_are_markup_are_shown_as_text() -> None:
    async with fake_controller() as (_, url), opened(url) as (page, complaints):
        await expect(page.locator("#nodes tbody tr")).to_contain_text(HOSTILE)
        for place in ("#summary", "#namespaces", "#decisions", "#worth"):
            await expect(page.locator(place)).to_contain_text(HOSTILE)
        await expect(page.locator("#nodes tbody tr")).to_contain_text("dead")
        head = page.locator("#nodes thead")
        await expect(head).to_contain_text("DRAM MiBSSD MiBcold MiB")
        await expect(head).to_contain_text("localssdcoldswitchsharedhomebulkmissed")
        for told in ("3 / 8", "25 %"):
            await expect(page.locator("#nodes tbody tr")).to_contain_text(told)
        assert await page.locator("img").count() == 0
        assert complaints == []


@in_a_browser
async def test_the_page_asks_for_a_token_and_keeps_asking_after_a_wrong_one(
    tmp_path: Path,
) -> None:
    viewer = new_token()
    write(tmp_path / "tokens", [Token("viewer", VIEWER, digest_of_token(viewer))])
    options = HttpOptions(TokensFile(tmp_path / "tokens"), authenticated=True)
    async with fake_controller(options) as (_, url), opened(url) as (page, complaints):
        await expect(page.locator("#login")).to_be_visible()
        await expect(page.locator("#main")).to_be_hidden()
        for token, shown in (("wrong", False), (viewer, True)):
            await page.fill("#token", token)
            await page.click("#login button")
            if not shown:
                await expect(page.locator("#problem")).to_contain_text("refuses this token")
        await expect(page.locator("#main")).to_be_visible()
        await expect(page.locator("#login")).to_be_hidden()
        assert viewer not in page.url
        assert complaints == []


@in_a_browser
async def test_a_controller_that_stops_answering_is_said_and_the_last_view_stays() -> None:
    async with fake_controller() as (api, url), opened(url) as (page, _):
        await expect(page.locator("#summary")).to_contain_text("epoch 7")
        await api.stop()
        await expect(page.locator("#problem")).to_contain_text("does not answer", timeout=20_000)
        await expect(page.locator("#summary")).to_contain_text("epoch 7")
        await page.click("#pause")
        await expect(page.locator("#pause")).to_have_text("Go on")


def test_the_page_knows_every_tier_that_a_block_comes_from() -> None:
    files = Path(api.__file__).parent / "files"
    script, style = ((files / name).read_text() for name in ("page.js", "page.css"))
    said = re.search(r"^const TIERS = (\[.*?\]);", script, re.M)
    assert said is not None
    assert tuple(json.loads(said[1])) == TIERS
    for tier in TIERS:
        assert f"{tier}: " in script.partition("const MEANING")[2].partition("};")[0]
        assert f"--{tier}: " in style


def test_the_page_knows_every_state_and_every_memory_of_a_node() -> None:
    script = (Path(api.__file__).parent / "files/page.js").read_text()
    for name, known in (("STYLES", STATES), ("MEMORIES", node_report.TIERS)):
        said = re.search(rf"^const {name} = \{{(.*?)\}};", script, re.M | re.S)
        assert said is not None
        assert set(re.findall(r"(\w+): \"", said[1])) == set(known)
    for fact in ("alive", "connected", "draining", "joining", "placed", "programmed"):
        assert f"node.{fact}" not in script.replace("nodes.filter((node) => node.alive)", "")


async def test_the_files_of_the_page_may_only_ask_their_controller(
    tmp_path: Path,
) -> None:
    write(tmp_path / "tokens", [])
    options = HttpOptions(TokensFile(tmp_path / "tokens"), authenticated=True)
    async with fake_controller(options) as (_, url), aiohttp.ClientSession() as session:
        for path, kind in (("", "html"), ("page.css", "css"), ("page.js", "javascript")):
            async with session.get(url + path) as answer:
                assert (answer.status, answer.content_type) == (200, f"text/{kind}")
                policy = answer.headers.get("Content-Security-Policy", "")
                assert policy.startswith("default-src 'none'; script-src 'self';")
                assert "unsafe" not in policy
        async with session.get(url + "v1/status") as answer:
            assert answer.status == 401
        async with session.get(url + "api.py") as answer:
            assert answer.status == 404
