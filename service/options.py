"""What every kvcast daemon does the same way: flags over a TOML file, logs, readiness, signals.

Owns: how options are merged, the shape of a log line, the ready line, the stop event. Must not
know: any one daemon's options; each builds its own `argparse` parser and hands it over.

A configuration file is TOML whose keys are the long flags with underscores
(``--grpc-addr`` is ``grpc_addr``). Flags given on the command line win. An unknown key is an
error, so that a typo does not silently become a default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's line breaks and prints the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        default = action.default
        if not action.option_strings or default in (None, False, argparse.SUPPRESS) or not text:
            return text
        if default == [] or "%(default)" in text:
            return text
        if isinstance(default, tuple):  # (host, port)
            return f"{text} (default: {':'.join(map(str, default))})"
        return f"{text} (default: %(default)s)"


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options that every daemon takes: --config, --log-level, --log-format."""
    group = parser.add_argument_group("common")
    group.add_argument(
        "--config", metavar="FILE", help="TOML file; keys are the long flags with underscores"
    )
    group.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="least severe log line that is printed",
    )
    group.add_argument(
        "--log-format", choices=["text", "json"], default="text", help="shape of a log line"
    )


def parse_with_config(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse flags over the file that --config names; exits with status 2 and a clear message.

    A file's values go through the same `type` and `choices` as the flags do; lists stand for
    repeatable flags, true and false for switches.
    """
    first, _ = parser.parse_known_args(argv)
    path = getattr(first, "config", None)
    if path is None:
        return parser.parse_args(argv)
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"--config {path}: {error.strerror or error}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        parser.error(f"--config {path}: not TOML: {error}")
    return parser.parse_args(_as_flags(parser, path, values) + list(argv or sys.argv[1:]))


def _as_flags(parser: argparse.ArgumentParser, path: str, values: dict[str, Any]) -> list[str]:
    """The file's values as command-line words, to stand before the real ones."""
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    words: list[str] = []
    for key, value in values.items():
        action = actions.get(key)
        if action is None or key in ("config", "help"):
            parser.error(f"--config {path}: unknown key {key!r}")
        flag = action.option_strings[-1]
        if isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                parser.error(f"--config {path}: {key} must be true or false")
            # Its words are "--x" and "--no-x", in that order.
            words.append(action.option_strings[0] if value else flag)
        elif action.nargs == 0:
            if not isinstance(value, bool):
                parser.error(f"--config {path}: {key} must be true or false")
            if value:
                words.append(flag)
        elif isinstance(value, dict):
            parser.error(f"--config {path}: {key} must not be a table")
        else:
            for item in value if isinstance(value, list) else [value]:
                words.append(f"{flag}={item}")
    return words


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
    trace of an exception."""

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
            text += "\n" + self.formatException(record.exc_info)
        return text


def setup_logging(level: str, shape: str) -> None:
    """Send the process's logs to standard error in the given shape ("text" or "json")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if shape == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def announce_ready(**facts: Any) -> None:
    """Print the ready line: one JSON object on standard output, flushed."""
    print(json.dumps({"event": "ready", **facts}), flush=True)


def stop_event(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, on the running loop."""
    event = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def parse_host_port(text: str, *, default_host: str = "127.0.0.1") -> tuple[str, int]:
    """ "HOST:PORT", ":PORT" or "PORT" as (host, port); argparse.ArgumentTypeError otherwise."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or default_host
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a bind address stays on this machine."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
