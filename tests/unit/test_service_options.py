"""Options: one dataclass makes parser, file and checks.

Oracle: written cases, and argparse's own words for what is wrong. Cannot see: any one daemon's
options.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from kvcast.service.addresses import parse_host_port
from kvcast.service.options import (
    CommonOptions,
    OptionsError,
    add_options,
    bare,
    choice,
    count,
    either,
    made_of,
    many,
    option,
    parse_options,
    read_options,
    required,
    seconds,
)
from kvcast.service.values import parse_size


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Ports:
    """where it listens"""

    grpc_addr: tuple[str, int] = option("address", default=("127.0.0.1", 1), parse=parse_host_port)
    ports: tuple[str, ...] = many("a port", parse=str, metavar="N=SPEC", flag="port")


@dataclass(frozen=True, kw_only=True)
class Rest:
    """the rest"""

    tick_s: float = option("period, 100% of it", default=0.5, parse=float, unit="s", flag="tick")
    size: int = option("memory", default=1 << 20, parse=parse_size)
    wait_s: float = seconds("patience", default=0.0, high=9)
    tries: int = count("attempts", default=3, unit="tries", low=1)
    plain: bool = bare("no frills")
    strict: bool = either("by the book", default=True)
    auto: bool | None = either("by itself", default=None)
    colour: Colour = choice("paint", default=Colour.RED, choices=Colour)


@dataclass(frozen=True, kw_only=True)
class Thing(Ports, Rest, CommonOptions):
    """A thing."""

    PROGRAM: ClassVar[str] = "kvcast thing"
    DESCRIPTION: ClassVar[str] = "Does things."


@dataclass(frozen=True, kw_only=True)
class Named(Thing):
    """name"""

    name: str = required("what it is called", parse=str)


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "thing.toml"
    path.write_text(text)
    return f"--config={path}"


def test_without_flags_every_option_has_its_default() -> None:
    assert parse_options(Thing, []) == Thing()


def test_flags_say_what_fields_become() -> None:
    words = ["--grpc-addr", "[::1]:7", "--port=a", "--port=b", "--tick=2", "--size=1.5KiB"]
    words += ["--plain", "--no-strict", "--auto", "--colour=blue"]
    assert parse_options(Thing, words) == Thing(
        grpc_addr=("::1", 7),
        ports=("a", "b"),
        tick_s=2.0,
        size=1536,
        plain=True,
        strict=False,
        auto=True,
        colour=Colour.BLUE,
    )


def test_a_files_values_are_taken_and_flags_win(tmp_path: Path) -> None:
    config = _file(
        tmp_path,
        'grpc_addr = "1.2.3.4:5"\nport = ["1=a", "2=b"]\ntick = 2\nplain = true\nstrict = false\n'
        'colour = "blue"\nsize = "2M"\n',
    )
    options = parse_options(Thing, [config, "--tick", "7", "--port=3=c"])
    assert options.grpc_addr == ("1.2.3.4", 5)
    assert options.ports == ("1=a", "2=b", "3=c")
    assert options.tick_s == 7.0
    assert options.plain is True
    assert options.strict is False
    assert options.auto is None
    assert options.colour is Colour.BLUE
    assert options.size == 2 << 20
    assert parse_options(Thing, [config, "--strict"]).strict is True


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("colour_of = 1", "unknown key 'colour_of' (is it 'colour'?)"),
        ("zzz = 1", "unknown key 'zzz'"),
        ("tick_s = 1", "unknown key 'tick_s'"),
        ("tick = 'soon'", "--tick: invalid float value"),
        ("wait = 10", "--wait: 10 is outside 0 to 9"),
        ("tries = 0", "--tries: 0 must be a number, 1 or more"),
        ("tries = 1.5", "--tries: '1.5' is not an integer"),
        ("size = 'lots'", "--size: 'lots' is no size"),
        ("plain = 3", "plain must be true or false"),
        ("strict = 'yes'", "strict must be true or false"),
        ("[tick]\nx = 1", "tick must not be a table"),
        ("port = [{}]", "port must not be a table"),
        ("tick = [1, 2]", "tick must be one value, not a list"),
        ("tick = ", "not TOML"),
        ("config = 'x'", "unknown key 'config'"),
        ("help = true", "unknown key 'help'"),
        ("log_level = 'loud'", "invalid choice"),
    ],
)
def test_a_bad_file_ends_with_its_name_and_the_reason(
    tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _file(tmp_path, text)
    with pytest.raises(SystemExit) as ended:
        read_options(Thing, [config], lambda options: options)
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("usage: kvcast thing")
    assert said[1].startswith(f"kvcast thing: error: --config {tmp_path}/thing.toml: ")
    assert complaint in said[1]
    assert len(said) == 2


def test_a_missing_file_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(Thing, ["--config", "/no/such.toml"], lambda options: options)
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--tick=soon"], "argument --tick: invalid float value: 'soon'"),
        (["--size=lots"], "argument --size: 'lots' is no size like"),
        (["--fly"], "unrecognized arguments: --fly"),
        (["--colour=green"], "invalid choice: 'green'"),
    ],
)
def test_a_bad_flag_is_named_without_a_file(words: list[str], complaint: str) -> None:
    with pytest.raises(OptionsError) as error:
        parse_options(Thing, words)
    assert complaint in str(error.value)
    assert "--config" not in str(error.value)


def test_what_has_no_default_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="--name is required"):
        parse_options(Named, [])
    assert parse_options(Named, ["--name=n"]).name == "n"
    assert parse_options(Named, [_file(tmp_path, "name = 'f'")]).name == "f"


def test_what_does_not_go_together_ends_as_a_bad_flag_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def settle(options: Thing) -> int:
        raise OptionsError("--plain and --strict quarrel")

    with pytest.raises(SystemExit) as ended:
        read_options(Thing, ["--plain"], settle)
    assert ended.value.code == 2
    assert "kvcast thing: error: --plain and --strict quarrel" in capsys.readouterr().err
    assert read_options(Thing, ["--tick=3"], lambda options: options.tick_s) == 3.0


def test_help_shows_groups_units_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(Named, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = " ".join(text.split())
    assert "Does things." in text
    titles = ["name:", "where it listens:", "the rest:", "common:"]
    assert sorted(titles, key=text.index) == titles
    for shown in (
        "--name NAME what it is called (required)",
        "--grpc-addr HOST:PORT address (default: 127.0.0.1:1)",
        "--port N=SPEC a port (repeatable)",
        "--tick SECONDS period, 100% of it (default: 0.5 s)",
        "--size SIZE memory (default: 1 MiB)",
        "--wait SECONDS patience (default: 0 s)",
        "--tries TRIES attempts (default: 3 tries)",
        "--plain no frills",
        "--strict, --no-strict by the book (default: yes)",
        "--auto, --no-auto by itself",
        "--colour {red,blue} paint (default: red)",
    ):
        assert shown in lines


def test_options_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Thing().plain = True  # type: ignore[misc]


@dataclass(frozen=True)
class Base:
    """base"""

    seed: int = option("seeds it", default=1, parse=int)


@dataclass(frozen=True)
class Run(Base):
    """A run."""

    loss: float = option("losses", default=0.5, parse=float, metavar="P")
    size_bytes: int = option("memory", default=1 << 20, parse=parse_size, flag="size")
    colour: Colour = choice("paint", default=Colour.RED, choices=Colour)
    inside: int = 3


def test_a_parser_of_its_own_takes_a_classs_flags_without_its_bases() -> None:
    parser = argparse.ArgumentParser()
    assert add_options(parser, Run) == ["loss", "size", "colour"]
    assert add_options(parser, Base) == ["seed"]
    given = vars(parser.parse_args(["--size", "2KiB", "--colour", "blue", "--seed", "7"]))
    assert given == {"size": 2048, "colour": "blue", "seed": 7}
    assert made_of(Run, given | {"other": 1}) == Run(7, 0.5, 2048, Colour.BLUE)
    assert "--loss P" in parser.format_help()
    assert "losses (default: 0.5)" in parser.format_help()
