"""Traces of gets: what a collector of OpenTelemetry is sent by agents of a running pool.

Oracle: the protocol's own messages (opentelemetry-proto), what the client was answered. Cannot see:
what a viewer of traces shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kvcast.hostagent.core.fetches import GetBatch, GetItem
from kvcast.hostagent.core.tracing import MOST_KEYS, GetTrace, Traces
from kvcast.hostagent.flags import parse
from kvcast.hostagent.network.otlp import SpanSink
from kvcast.protocol.messages import local
from kvcast.protocol.messages.wire import BlockId
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pool_harness import eventually, get, keys_for, namespace_of, put, running_pool


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[Any]]]:
    """A collector of OTLP over HTTP: its address, and the spans that have come, each with the name
    of the node that sent it."""
    spans: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            facts = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert facts["service.name"] == "kvcast-agent"
            for scope in resource.scope_spans:
                spans.extend((facts["service.instance.id"], span) for span in scope.spans)
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", spans
    finally:
        await runner.cleanup()


def attributes(span: Any) -> dict[str, str | int]:
    return {
        a.key: a.value.int_value if a.value.HasField("int_value") else a.value.string_value
        for a in span.attributes
    }


async def test_a_get_is_a_span_and_each_fetch_a_span_below_it_with_its_steps(
    tmp_path: Path,
) -> None:
    keys = keys_for("traced", 12)
    async with collector() as (url, spans):
        flags = (f"--otlp-endpoint={url}", "--trace-share=1", "--lone-reads=reads")
        async with running_pool(tmp_path, 2, replicas=0, agent_flags=flags) as (_, links):
            namespace = await namespace_of(links[0])
            await put(links[0], namespace, keys)
            before_ns = time.time_ns()
            client = await links[1].client()
            blocks = await client.get(await namespace_of(links[1]), keys, deadline_s=20.0)
            fetched = sum(block is not None and block.tier != "local" for block in blocks)
            assert None not in blocks
            missing = await get(links[1], namespace, keys_for("never put", 1), deadline_s=1.0)
            after_ns = time.time_ns()

            async def all_came() -> bool:
                return sum(span.name == "kvcast.fetch" for _, span in spans) > fetched

            # Exported in batches, every five seconds.
            await eventually("spans of all fetches came", all_came)
    assert missing[0] == 0
    gets = {span.span_id: (node, span) for node, span in spans if span.name == "kvcast.get"}
    fetches = [(node, span) for node, span in spans if span.name == "kvcast.fetch"]
    for node, span in fetches:
        at_node, parent = gets[span.parent_span_id]
        assert (node, span.trace_id) == (at_node, parent.trace_id)
        assert before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= after_ns
        assert parent.start_time_unix_nano <= span.start_time_unix_nano
    came = [attributes(span) for _, span in fetches if attributes(span)["kvcast.tier"]]
    assert {entry["kvcast.key"] for entry in came} <= {key.hex() for key in keys}
    assert len(came) == fetched > 0
    assert {entry["kvcast.bytes"] for entry in came} == {16 * 1024}
    steps = [event.name for _, span in fetches for event in span.events]
    assert any(step.startswith("segment 0: ") for step in steps), steps
    (missed,) = [span for _, span in fetches if not attributes(span)["kvcast.tier"]]
    assert attributes(missed)["kvcast.status"] == local.MISS
    totals = [attributes(span) for _, span in gets.values()]
    assert sum(int(entry.get("kvcast.misses", 0)) for entry in totals) == 1


async def test_a_collector_that_is_not_there_costs_no_get(tmp_path: Path) -> None:
    flags = ("--otlp-endpoint=http://127.0.0.1:9", "--trace-share=1")
    async with running_pool(tmp_path, 2, replicas=0, agent_flags=flags) as (_, links):
        keys = keys_for("untold", 20)
        await put(links[0], await namespace_of(links[0]), keys)
        for link in links:
            assert (await get(link, await namespace_of(link), keys))[:2] == (20, 0)


def batch(count: int, took_s: float, tier: str = "") -> GetBatch:
    blocks = [BlockId(1, number.to_bytes(16, "big")) for number in range(count)]
    made = GetBatch(blocks, 10.0, 20.0, lambda _: None)
    made.items = [GetItem(local.MISS, "not_found", tier) for _ in blocks]
    return made


def traces(share: float, slow_s: float) -> tuple[Traces, list[GetTrace]]:
    told: list[GetTrace] = []
    return Traces(share, slow_s, random.Random(1), list, told.append), told


def test_a_share_of_gets_is_told_and_every_slow_one() -> None:
    chosen, told = traces(0.25, 0.5)
    for _ in range(400):
        chosen.ended(10.1, batch(1, 0.1))
    assert 60 <= len(told) <= 140
    told.clear()
    nothing, told = traces(0.0, 0.5)
    nothing.ended(10.4, batch(1, 0.4))
    assert told == []
    nothing.ended(10.6, batch(1, 0.6))
    assert [trace.ended_at for trace in told] == [10.6]


def test_a_trace_tells_of_so_many_keys_and_counts_the_others() -> None:
    everything, told = traces(1.0, 1.0)
    everything.ended(10.1, batch(MOST_KEYS + 36, 0.1))
    (trace,) = told
    assert (trace.keys, len(trace.told), trace.hits) == (MOST_KEYS + 36, MOST_KEYS, {"": 100})


def test_spans_that_nobody_takes_are_dropped_and_never_waited_for() -> None:
    class Stuck(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            time.sleep(60)

    sink = SpanSink("http://127.0.0.1:9", "node", exporter=Stuck())
    everything = Traces(1.0, 1.0, random.Random(1), list, sink)
    began = time.thread_time()
    for _ in range(5000):  # more than the exporter's queue holds
        everything.ended(10.1, batch(1, 0.1))
    assert time.thread_time() - began < 60  # it came back at all


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://host", "http://", "x"])
def test_what_is_no_collectors_address_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(["--otlp-endpoint", url])
    assert refused.value.code == 2
    assert "is not http://HOST:PORT" in capsys.readouterr().err


async def test_without_the_library_an_agent_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from kvcast.hostagent.daemon import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    flags = [
        "--node-id=n", "--controller=127.0.0.1:9", "--transport=tunnel", "--switch-port=1",
        "--tunnel=127.0.0.1:0:127.0.0.1:9", "--ip=10.0.0.1", "--mac=02:00:00:00:00:01",
        "--socket=/tmp/kvcast-no-such-socket.sock", "--arena-bytes=1MiB",
        "--otlp-endpoint=http://127.0.0.1:4318",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *flags, stderr=asyncio.subprocess.PIPE
    )
    _, error = await process.communicate()
    assert process.returncode == 1
    assert b"pip install 'kvcast[otel]'" in error
