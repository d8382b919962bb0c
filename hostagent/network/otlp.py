"""Traces of gets as OpenTelemetry spans, sent by OTLP over HTTP.

Owns: names and attributes of spans, and the exporter. Must not know: which gets are traced
(`core.tracing`). A batch of gets is a span `kvcast.get`; each key that was not local is a span
`kvcast.fetch` below it, with the steps of its fetch as events. Export runs in a thread of the
library's own; what it cannot send in time it drops. Imported only where traces are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvcast.hostagent.core.tracing import GetTrace, KeyTrace
from kvcast.protocol.messages.local import LOCAL_TIER
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

SEND_TIMEOUT_S: Final = 5.0
_STOP_TIMEOUT_MS: Final = 2000
_PATH: Final = "/v1/traces"


class SpanSink:
    """Makes spans of traces, and sends them in the background until `close`."""

    def __init__(
        self,
        endpoint: str,
        node_id: str,
        *,
        exporter: SpanExporter | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoint`: the collector's base URL (http or https); spans go to its /v1/traces.
        `now`: the clock of the traces, in seconds."""
        resource = Resource.create({"service.name": "kvcast-agent", "service.instance.id": node_id})
        url = endpoint.rstrip("/")
        if not url.endswith(_PATH):
            url += _PATH
        exporter = exporter or OTLPSpanExporter(endpoint=url, timeout=SEND_TIMEOUT_S)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("kvcast")
        self._now = now

    def __call__(self, trace: GetTrace) -> None:
        """Make the spans of one trace; returns at once."""
        epoch_ns = time.time_ns() - round(self._now() * 1e9)

        def at(seconds: float) -> int:
            return epoch_ns + round(seconds * 1e9)

        attributes: dict[str, str | int] = {
            "kvcast.namespace": trace.namespace,
            "kvcast.keys": trace.keys,
        }
        for tier, count in trace.hits.items():
            attributes[f"kvcast.hits.{tier}" if tier else "kvcast.misses"] = count
        span = self._tracer.start_span(
            "kvcast.get",
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=at(trace.started_at),
        )
        for key in trace.told:
            if key.tier != LOCAL_TIER:
                self._fetch(span, key, at)
        span.end(at(trace.ended_at))

    def _fetch(self, parent: Span, key: KeyTrace, at: Callable[[float], int]) -> None:
        span = self._tracer.start_span(
            "kvcast.fetch",
            context=set_span_in_context(parent),
            kind=SpanKind.CLIENT,
            attributes={
                "kvcast.key": key.block.key.hex(),
                "kvcast.tier": key.tier,
                "kvcast.bytes": key.size_bytes,
            },
            start_time=at(key.started_at),
        )
        for when, what in key.steps:
            span.add_event(what, timestamp=at(when))
        if not key.tier:
            # A miss is an answer, too; what failed is said.
            span.set_attribute("kvcast.status", key.status)
            span.set_status(StatusCode.ERROR, key.reason or key.status)
        span.end(at(key.ended_at))

    def close(self) -> None:
        """Send what waits, for a moment at most."""
        self._processor.force_flush(_STOP_TIMEOUT_MS)
        self._provider.shutdown()
