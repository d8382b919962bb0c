"""Options: one frozen dataclass states each flag, and makes parser, file and checks.

Owns: how flags and a file become one object, and how the help shows them. Must not know: any one
daemon's options.

    @dataclass(frozen=True, kw_only=True)
    class Reads:
        \"\"\"reads\"\"\"                                            # the title in --help
        rto_min_s: float = seconds("shortest time-out", default=0.05)

    @dataclass(frozen=True, kw_only=True)
    class ThingFlags(Reads, CommonOptions): ...

A class is one group of flags, and a daemon's options inherit its groups. `--rto-min` is then a
flag, rto_min a key of the TOML file that `--config` names, and `.rto_min_s` the value. Flags win
over the file; a repeatable flag adds to the file's list. An unknown key is an error, so that a typo
does not silently become a default. What does not go together is found by the daemon, which raises
OptionsError as well.

A command that has a parser of its own takes a dataclass's flags into it: `add_options`, `made_of`.
Fields that are no options have no flag there.

Looked at before this was written: cyclopts 5.4, tyro 1.0, jsonargparse 4.53, pydantic-settings 2.16
and simple-parsing 0.1.9. cyclopts came nearest: typed, alive, it reads TOML and names file and key
in most errors. But there a flag replaces the file's list, an error of a converter of ours does not
say which file it came from, help and errors come in boxes, and each part of a pool would need five
packages more and 0.15 s to start. tyro reads no file. jsonargparse keeps the underscores in flags,
takes what they say for YAML (`--quota 7=8` is a table there), and does not name the file.
pydantic-settings and simple-parsing end a wrong file in a traceback. argparse, which starts in
0.02 s and speaks as our users know it, does what is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import inspect
import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn, TypeVar, cast

from kvcast.service.addresses import format_host_port, parse_host_port
from kvcast.service.values import format_size, number, parse_size, whole_number

T = TypeVar("T")
S = TypeVar("S")

LOG_LEVELS: Final = ("debug", "info", "warning", "error")


class OptionsError(Exception):
    """Options that cannot be used; the text says which and why, in one line."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description's line breaks and prints the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if not action.option_strings or default in (None, False, argparse.SUPPRESS) or not text:
            return text
        if default == [] or "%(default)" in text:
            return text
        if isinstance(default, tuple):  # (host, port)
            return f"{text} (default: {format_host_port(default)})"
        return f"{text} (default: %(default)s)"


# --- how a field says that it is an option -------------------------------------------------------

_KEY: Final = "option"
_UNIT_METAVARS: Final = {"s": "SECONDS"}
_METAVARS: Final[Mapping[Any, str]] = {
    parse_size: "SIZE",
    parse_host_port: "HOST:PORT",
    Path: "FILE",
    int: "N",
    float: "X",
}


@dataclass(frozen=True)
class _Option:
    """What a field's metadata holds."""

    text: str
    parse: Callable[[str], Any]
    kind: Literal["one", "many", "bare", "either"] = "one"
    metavar: str | None = None
    unit: str = ""
    choices: Mapping[str, Any] | None = None
    flag: str | None = None

    def shown(self, default: object) -> str:
        """The default as the help prints it; "" where there is nothing to say."""
        if default is dataclasses.MISSING:
            return "required"
        if default is None or default is False or default in ("", ()):
            return ""
        return f"default: {self._text(default)}"

    def _text(self, value: object) -> str:
        if value is True:
            return "yes"
        if self.parse is parse_size and isinstance(value, int):
            return format_size(value)
        if isinstance(value, tuple):
            return format_host_port(value)
        text = f"{value:g}" if isinstance(value, float) else _word(value)
        return f"{text} {self.unit}".rstrip()


def option(
    text: str,
    *,
    default: T,
    parse: Callable[[str], T],
    unit: str = "",
    metavar: str | None = None,
    flag: str | None = None,
) -> T:
    """An option with one value. `text`: what the help says; `unit`: of the value, shown there;
    `flag`: its name, where that is not the field's."""
    return cast(T, _field(_Option(text, parse, "one", metavar, unit, flag=flag), default))


def required(text: str, *, parse: Callable[[str], T], metavar: str | None = None) -> T:
    """An option without a default."""
    return cast(T, _field(_Option(text, parse, "one", metavar), dataclasses.MISSING))


def seconds(text: str, *, default: float, low: float = 0, high: float = math.inf) -> float:
    """A time. The field's name ends in `_s`, the flag's does not."""
    return option(text, default=default, parse=number(low, high), unit="s")


def count(text: str, *, default: int, unit: str, low: int = 0, high: float = math.inf) -> int:
    """How many of something."""
    return option(text, default=default, parse=whole_number(low, high), unit=unit)


def size(text: str, *, default: int, flag: str | None = None) -> int:
    """Bytes, with the units of `parse_size`."""
    return option(text, default=default, parse=parse_size, flag=flag)


def address(text: str, *, default: tuple[str, int]) -> tuple[str, int]:
    """HOST:PORT."""
    return option(text, default=default, parse=parse_host_port)


def file(text: str, *, metavar: str = "FILE") -> Path | None:
    """A file or folder, if one is named."""
    return option(text, default=None, parse=Path, metavar=metavar)


def choice(text: str, *, default: T, choices: Iterable[T]) -> T:
    """One of several words, or of an enumeration whose values are words."""
    words = {_word(value): value for value in choices}
    return cast(T, _field(_Option(text, str, choices=words), default))


def many(text: str, *, parse: Callable[[str], T], metavar: str, flag: str = "") -> tuple[T, ...]:
    """A repeatable option; a list in the file."""
    stated = _Option(f"{text} (repeatable)", parse, "many", metavar, flag=flag)
    return cast(tuple[T, ...], _field(stated, ()))


def bare(text: str) -> bool:
    """A flag without a value: off, unless it is given."""
    return cast(bool, _field(_Option(text, str, "bare"), False))


def either(text: str, *, default: T) -> T:
    """`--x` and `--no-x`; `default` is True, False, or None for "it depends"."""
    return cast(T, _field(_Option(text, str, "either"), default))


def _field(stated: _Option, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: stated})


def _word(value: object) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """common"""

    PROGRAM: ClassVar[str]
    """As what it is called: "kvcast agent"."""
    DESCRIPTION: ClassVar[str]
    EXAMPLES: ClassVar[str] = ""

    config: Path | None = file("TOML file; keys are the long flags with underscores")  # noqa: RUF009

    log_level: str = choice(
        "least severe log line that is printed", default="info", choices=LOG_LEVELS
    )
    log_format: str = choice("shape of a log line", default="text", choices=("text", "json"))


O = TypeVar("O", bound=CommonOptions)  # noqa: E741


# --- from words and a file to options ------------------------------------------------------------


def read_options(kind: type[O], argv: Sequence[str] | None, settle: Callable[[O], S]) -> S:
    """What `settle` makes of the options; ends with status 2 and a message where they are wrong.

    `settle` checks what must go together, and opens what the options name.
    """
    try:
        return settle(parse_options(kind, sys.argv[1:] if argv is None else argv))
    except OptionsError as error:
        print(f"usage: {_usage(kind)}; --help lists them", file=sys.stderr)
        print(f"{kind.PROGRAM}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def parse_options(kind: type[O], argv: Sequence[str]) -> O:
    """The options that these words say, over the file that --config names; OptionsError else.

    A file's values go through the same parsers as the flags'; lists stand for repeatable flags,
    true and false for switches.
    """
    options = _options_of(kind)
    parser = _make_parser(kind, options)
    given = vars(parser.parse_args(argv))
    if "config" in given:
        for dest, value in _read_file(parser, options, given["config"]).items():
            if isinstance(value, list):
                given[dest] = value + given.get(dest, [])
            else:
                given.setdefault(dest, value)
    for dest, (_, field, _) in options.items():
        if dest not in given and field.default is dataclasses.MISSING:
            raise OptionsError(f"{_flag_of(dest)} is required")
    return made_of(kind, given)


def add_options(parser: argparse._ActionsContainer, kind: type) -> list[str]:
    """Give a parser the flags of those options that the class states itself, without its bases'.
    Returns their names (argparse's `dest`); the parser's result has those that were given."""
    own = {dest: one for dest, one in _options_of(kind).items() if one.owner is kind}
    for dest, stated in own.items():
        _add(parser, dest, stated.field.default, stated.option)
    return list(own)


def made_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """A dataclass of the flags that were given, by argparse's `dest`; of the others, the defaults.
    Names that are none of its options are passed over."""
    values: dict[str, Any] = {}
    for dest, (stated, field, _) in _options_of(kind).items():
        if dest in given:
            value = given[dest]
            value = stated.choices[value] if stated.choices is not None else value
            values[field.name] = tuple(value) if stated.kind == "many" else value
    return kind(**values)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would exit."""

    source = ""

    def error(self, message: str) -> NoReturn:
        raise OptionsError(self.source + message)


class _Stated(NamedTuple):
    """An option, where it is stated."""

    option: _Option
    field: dataclasses.Field[Any]
    owner: type


_Options = dict[str, _Stated]
"""By key of the file, which is argparse's `dest`."""


def _options_of(kind: type) -> _Options:
    """All options, in the order in which the class lists its groups."""
    fields = {field.name: field for field in dataclasses.fields(kind) if _KEY in field.metadata}
    found: _Options = {}
    for group in kind.__mro__:
        for name in inspect.get_annotations(group):
            if name in fields:
                option = fields[name].metadata[_KEY]
                plain = name.removesuffix("_s") if option.unit == "s" else name
                dest = (option.flag or plain).replace("-", "_")
                found[dest] = _Stated(option, fields[name], group)
    return found


def _flag_of(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"


def _usage(kind: type[CommonOptions]) -> str:
    return f"{kind.PROGRAM} [FLAGS]"


def _make_parser(kind: type[CommonOptions], options: _Options) -> _Parser:
    parser = _Parser(
        kind.PROGRAM,
        usage=_usage(kind),
        description=kind.DESCRIPTION,
        epilog=kind.EXAMPLES,
        formatter_class=HelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for dest, (option, field, owner) in options.items():
        title = owner.__doc__ or ""
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], dest, field.default, option)
    return parser


def _add(group: argparse._ActionsContainer, dest: str, default: object, stated: _Option) -> None:
    shown = "" if "(default: " in stated.text else stated.shown(default)
    text = f"{stated.text} ({shown})" if shown else stated.text
    text = text.replace("%", "%%")
    flag = _flag_of(dest)
    if stated.kind == "bare":
        group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
    elif stated.kind == "either":
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
    else:
        metavar = stated.metavar or _METAVARS.get(stated.parse)
        if stated.unit:
            metavar = stated.metavar or _UNIT_METAVARS.get(stated.unit, stated.unit.upper())
        group.add_argument(
            flag,
            type=_shown_by_argparse(stated.parse),
            action="append" if stated.kind == "many" else "store",
            choices=None if stated.choices is None else list(stated.choices),
            metavar=None if stated.choices is not None else metavar,
            default=argparse.SUPPRESS,
            help=text,
        )


def _shown_by_argparse(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser, with a message for what it cannot take: argparse shows its own kind of error as
    it is, and hides the others' texts."""
    if parse in (int, float, str, Path):
        return parse  # argparse says "invalid int value"

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _read_file(parser: _Parser, options: _Options, path: Path) -> dict[str, Any]:
    """A file's values by `dest`, as the parser would give them."""
    place = f"--config {path}"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionsError(f"{place}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise OptionsError(f"{place}: not TOML: {error}") from error
    parser.source = f"{place}: "
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in options or key == "config":
            near = difflib.get_close_matches(key, [name for name in options if name != "config"], 1)
            hint = f" (is it {near[0]!r}?)" if near else ""
            raise OptionsError(f"{place}: unknown key {key!r}{hint}")
        stated = options[key].option
        if stated.kind in ("bare", "either"):
            if not isinstance(value, bool):
                raise OptionsError(f"{place}: {key} must be true or false")
            found[key] = value
            continue
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            raise OptionsError(f"{place}: {key} must not be a table")
        if isinstance(value, list) and stated.kind != "many":
            raise OptionsError(f"{place}: {key} must be one value, not a list")
        words = [f"{_flag_of(key)}={item}" for item in items]
        found.update(vars(parser.parse_args(words)))
    parser.source = ""
    return found
