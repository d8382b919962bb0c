"""What all daemons share: flags over a TOML file, log lines, addresses, signals.

Oracle: argparse's own parse of the same words. Cannot see: any one daemon's options.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
from pathlib import Path

import pytest
from kvcast.service import options as service


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("thing", formatter_class=service.HelpFormatter)
    parser.add_argument("--grpc-addr", default="127.0.0.1:1")
    parser.add_argument("--port", action="append", default=[])
    parser.add_argument("--tick", type=float, default=0.5)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--strict", action=argparse.BooleanOptionalAction, default=True)
    service.add_common_options(parser)
    return parser


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "thing.toml"
    path.write_text(text)
    return f"--config={path}"


def test_a_files_values_are_taken_and_flags_win(tmp_path: Path) -> None:
    config = _file(
        tmp_path,
        'grpc_addr = "1.2.3.4:5"\nport = ["1=a", "2=b"]\ntick = 2\nplain = true\nstrict = false\n',
    )
    options = service.parse_with_config(_parser(), [config, "--tick", "7"])
    assert options.grpc_addr == "1.2.3.4:5"
    assert options.port == ["1=a", "2=b"]
    assert options.tick == 7.0
    assert options.plain is True
    assert options.strict is False


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("colour = 1", "unknown key 'colour'"),
        ("tick = 'soon'", "--tick: invalid float value"),
        ("plain = 3", "plain must be true or false"),
        ("[tick]\nx = 1", "tick must not be a table"),
        ("tick = ", "not TOML"),
        ("config = 'x'", "unknown key 'config'"),
        ("log_level = 'loud'", "invalid choice"),
    ],
)
def test_a_bad_file_ends_with_its_reason(
    tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        service.parse_with_config(_parser(), [_file(tmp_path, text)])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        service.parse_with_config(_parser(), ["--config", "/no/such.toml"])
    assert "No such file" in capsys.readouterr().err


def test_log_lines_as_json_and_as_text() -> None:
    record = logging.LogRecord("kvcast.x", logging.INFO, "f", 1, "hello %s", ("you",), None)
    record.node = "node-1"
    line = json.loads(service.JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("info", "kvcast.x", "hello you")
    assert line["node"] == "node-1"
    assert service.TextFormatter().format(record).endswith("kvcast.x hello you node=node-1")


def test_a_log_line_is_one_line_whatever_a_peer_had_put_into_it() -> None:
    forged = "\n12:00:00.000 error   kvcast.agent all is lost\r\x1b[2J\x00\u2028\x85"
    record = logging.LogRecord("kvcast.x", logging.INFO, "f", 1, "no message: %s", (forged,), None)
    record.peer = "a\nb"
    line = service.TextFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert r"\n12:00:00.000 error" in line
    assert r"peer=a\nb" in line
    umlauts = logging.LogRecord("kvcast.x", logging.INFO, "f", 1, "für Ω", (), None)
    assert service.TextFormatter().format(umlauts).endswith("kvcast.x für Ω")
    try:
        raise ValueError("one\ntwo")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    traced = logging.LogRecord("kvcast.x", logging.ERROR, "f", 1, "it broke", (), info)
    assert "Traceback (most recent call last)" in service.TextFormatter().format(traced)


def test_the_ready_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    service.announce_ready(port=7)
    assert json.loads(capsys.readouterr().out) == {"event": "ready", "port": 7}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("1.2.3.4:5", ("1.2.3.4", 5)),
        (":80", ("127.0.0.1", 80)),
        ("80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert service.parse_host_port(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:70000", "host:-1", "host:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        service.parse_host_port(text)


def test_loopback_is_known_by_name_and_number() -> None:
    assert all(service.is_loopback(host) for host in ("localhost", "127.64.3.1", "::1"))
    assert not any(service.is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "example.org"))


async def test_signals_set_the_stop_event() -> None:
    loop = asyncio.get_running_loop()
    event = service.stop_event(loop)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(event.wait(), 10)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
