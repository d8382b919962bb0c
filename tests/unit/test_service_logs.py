"""Log lines. Oracle: JSON's own parser, and str.isprintable. Cannot see: who logs what."""

from __future__ import annotations

import json
import logging

from kvcast.service.logs import JsonFormatter, TextFormatter


def test_log_lines_as_json_and_as_text() -> None:
    record = logging.LogRecord("kvcast.x", logging.INFO, "f", 1, "hello %s", ("you",), None)
    record.node = "node-1"
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("info", "kvcast.x", "hello you")
    assert line["node"] == "node-1"
    assert TextFormatter().format(record).endswith("kvcast.x hello you node=node-1")


def test_a_log_line_is_one_line_whatever_a_peer_had_put_into_it() -> None:
    forged = "\n12:00:00.000 error   kvcast.agent all is lost\r\x1b[2J\x00\u2028\x85"
    record = logging.LogRecord("kvcast.x", logging.INFO, "f", 1, "no message: %s", (forged,), None)
    record.peer = "a\nb"
    line = TextFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert r"\n12:00:00.000 error" in line
    assert r"peer=a\nb" in line
    umlauts = logging.LogRecord("kvcast.x", logging.INFO, "f", 1, "für Ω", (), None)
    assert TextFormatter().format(umlauts).endswith("kvcast.x für Ω")
    try:
        raise ValueError("one\n12:00:00.000 error all is lost\x1b[2J")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    traced = logging.LogRecord("kvcast.x", logging.ERROR, "f", 1, "it broke", (), info)
    assert "Traceback (most recent call last)" in TextFormatter().format(traced)
    _, *trace = TextFormatter().format(traced).splitlines()
    assert all(line.startswith("  ") and line.isprintable() for line in trace)
    assert trace[-1] == r"  12:00:00.000 error all is lost\x1b[2J"
