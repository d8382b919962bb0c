"""Log lines: one object in JSON, or one line for people, on standard error.

Owns: the shape of a log line, and that what a peer sent cannot forge one. Must not know: who logs.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (s since the epoch), level, logger, message, and extras."""

    _standard = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in vars(record).items() if k not in self._standard})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _printable(text: str) -> str:
    """The text with everything escaped that is no printable character: messages quote what peers
    sent, which must not become a line of its own, or speak to a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 info kvcast.agent message key=value …`, for people; one line, but for the
    trace of an exception, whose lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = "".join(
            f" {k}={v}" for k, v in vars(record).items() if k not in JsonFormatter._standard
        )
        text = _printable(
            f"{stamp}.{int(record.msecs):03d} {record.levelname.lower():7} {record.name} "
            f"{record.getMessage()}{extras}"
        )
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            text += "".join(f"\n  {_printable(line)}" for line in lines)
        return text


def setup_logging(level: str, shape: str) -> None:
    """Send the process's logs to standard error in the given shape ("text" or "json")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if shape == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
