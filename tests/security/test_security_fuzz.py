"""Every entry point is told some hundreds of hostile things; and the engine finds what there is to
find.

Oracle: the entry points' named errors; for the engine, entry points of this file with faults of
their own. The command `python -m kvcast.bench.fuzz` goes on for as long as one likes.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kvcast.bench.fuzz import command
from kvcast.bench.fuzz.engine import Options, Target, fuzz, tell
from kvcast.bench.fuzz.targets import TARGETS, FunctionHarness, register

INPUTS = {
    "courier": 120,
    "pushing": 120,
    "index": 150,
    "pin-region": 150,
    "json-loader": 60,
    "kept": 60,
    "ssd": 60,
    "config": 80,
    "http": 80,
    "control-link": 120,
    "trace": 150,
}


def test_the_entry_points_are_those_that_there_are() -> None:
    assert sorted(TARGETS) == [
        "arena",
        "bulk-departures",
        "bulk-link",
        "bulk-link-caller",
        "codec",
        "config",
        "control-link",
        "control-link-agent",
        "courier",
        "data-port",
        "http",
        "index",
        "json-loader",
        "kept",
        "kv-events",
        "local-socket",
        "p4runtime",
        "pin-region",
        "pushing",
        "rdma-link",
        "route-request",
        "ssd",
        "tokens",
        "trace",
    ]


# These name no errors: what they do not take, they hand over.
@pytest.mark.parametrize("name", sorted(TARGETS.keys() - {"courier", "pushing"}))
def test_an_entry_point_takes_hostile_inputs_well(name: str) -> None:
    _takes_hostile_inputs_well(name)


def test_the_courier_takes_hostile_inputs_well() -> None:
    _takes_hostile_inputs_well("courier")


def test_pushing_takes_hostile_inputs_well() -> None:
    _takes_hostile_inputs_well("pushing")


def _takes_hostile_inputs_well(name: str) -> None:
    options = Options(seed=1, inputs=INPUTS.get(name, 400), limit_s=20.0, most_finds=1)
    report = fuzz(TARGETS[name], options)
    assert [(find.kind, find.text) for find in report.finds] == []
    assert report.inputs == INPUTS.get(name, 400)
    assert report.coverage > 10  # it did get somewhere
    assert report.corpus > report.begun_with  # and further than it began


# --- the engine -----------------------------------------------------------------------------------


def entry_point(function: Callable[[bytes], object], *, guided: bool = False) -> Target:
    return Target(
        "test",
        "",
        lambda: FunctionHarness(function, [b"begin"], (ValueError,)),
        (sys.modules[__name__],) if guided else (),
    )


def locked(data: bytes) -> None:
    """Opens one byte after the other."""
    if data[:1] != b"\xff":
        return
    if data[1:2] != b"\x7f":
        return
    if data[2:3] != b"\x80":
        return
    raise KeyError("opened")


def test_an_error_that_is_not_the_entry_points_own_is_found_and_made_small() -> None:
    def function(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("boom")
        raise ValueError("named")

    report = fuzz(entry_point(function), Options(inputs=3000, most_finds=1))
    (find,) = report.finds
    assert (find.kind, find.data) == ("KeyError", b"\xff")
    assert "test_security_fuzz.py:" in find.text


def test_a_guided_search_finds_what_a_blind_one_does_not() -> None:
    options = Options(inputs=4000, most_finds=1)
    assert fuzz(entry_point(locked, guided=True), options).finds
    assert not fuzz(entry_point(locked, guided=True), replace(options, guided=False)).finds


def test_an_input_that_takes_too_long_is_found_though_the_entry_point_swallows_the_alarm() -> None:
    def function(data: bytes) -> None:
        if data != b"begin":
            try:
                while True:
                    pass
            except Exception:
                pass

    report = fuzz(entry_point(function), Options(inputs=10, limit_s=0.05, most_finds=1))
    assert [find.kind for find in report.finds] == ["HangError"]


def test_memory_that_grows_is_found() -> None:
    kept: list[mmap.mmap] = []

    def function(_data: bytes) -> None:
        # Pages of its own: the heap may have room that earlier tests left, and would not grow.
        kept.append(mmap.mmap(-1, 50_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        kept[-1].write(b"x" * 50_000)

    report = fuzz(entry_point(function), Options(inputs=3000, growth_mib=16.0))
    assert [find.kind for find in report.finds] == ["GrowthError"]


def test_a_traceback_in_the_log_is_found() -> None:
    def function(data: bytes) -> None:
        try:
            if data != b"begin":
                raise KeyError("hidden")
        except KeyError:
            logging.getLogger("kvcast.entry_point").exception("went wrong")

    report = fuzz(entry_point(function), Options(inputs=10, most_finds=1))
    assert [find.kind for find in report.finds] == ["LoggedError"]
    assert "went wrong: KeyError('hidden')" in report.finds[0].text


def test_one_seed_gives_one_run() -> None:
    options = Options(seed=5, inputs=200)
    one, two = (fuzz(TARGETS["codec"], options) for _ in range(2))
    assert (one.corpus, one.coverage) == (two.corpus, two.coverage)
    heard: list[bytes] = []
    fuzz(entry_point(heard.append), Options(seed=5, inputs=50))
    again: list[bytes] = []
    fuzz(entry_point(again.append), Options(seed=5, inputs=50))
    assert heard == again
    other: list[bytes] = []
    fuzz(entry_point(other.append), Options(seed=6, inputs=50))
    assert heard != other


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="there is a target codec already"):
        register(TARGETS["codec"])


def test_the_command_writes_a_find_and_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def function(data: bytes) -> None:
        if len(data) > 5:
            raise KeyError("too long")

    monkeypatch.setitem(TARGETS, "test", entry_point(function))
    words = ["--target", "test", "--inputs", "200", f"--finds={tmp_path}/finds"]
    assert command.main([*words, f"--json={tmp_path}/report.json"]) == 1
    assert "KeyError: 'too long'" in capsys.readouterr().out
    (find,) = (tmp_path / "finds").iterdir()
    assert len(find.read_bytes()) == 6
    assert command.main(["--target", "test", "--replay", str(find)]) == 1
    find.write_bytes(b"short")
    assert command.main(["--target", "test", "--replay", str(find)]) == 0


# --- what was found once --------------------------------------------------------------------------


def test_a_port_of_thousands_of_digits_is_a_wrong_port() -> None:
    harness = TARGETS["config"].harness()
    try:
        assert tell(harness, b'grpc_addr = "127.0.0.1:' + b"9" * 5000 + b'"\n', 20.0) is None
    finally:
        harness.close()
