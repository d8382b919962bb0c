"""`kvcast tokens`: who may use the controller's HTTP API.

Owns: the command line. Must not know: the file's form (`kvcast.controller.http.tokens`).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcast.controller.http.tokens import (
    ROLES,
    VIEWER,
    Token,
    TokensError,
    TokensFile,
    digest_of_token,
    new_token,
    parse,
    write,
)
from kvcast.service.commands import EXIT_OK, build_subcommands, failed
from kvcast.service.values import whole_number

_DESCRIPTION = """\
Tokens for the controller's HTTP API. A token is shown once, when it is made; the file keeps only
its hash. A controller that runs with --tokens FILE takes changes into use by itself.

  viewer    may read: /v1/status, /v1/decisions, /v1/worth, /metrics
  operator  may also change: pin and unpin blocks
"""

_EXAMPLES = """\
examples:
  kvcast tokens add tokens prometheus                    a viewer's, for a year
  kvcast tokens add tokens alice --role operator --days 90
  kvcast tokens list tokens
  kvcast tokens remove tokens alice
  kvcast controller --tls certs/controller --http-addr 10.0.0.1:9601 --tokens tokens
  KVCAST_TOKEN=kvcast_… kvcast status --tls certs/operator --http https://10.0.0.1:9601"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `kvcast tokens`."""
    file = argparse.ArgumentParser(add_help=False)
    file.add_argument("file", type=Path, metavar="FILE", help="the tokens file")
    parser, command = build_subcommands("kvcast tokens", _DESCRIPTION, _EXAMPLES, file)

    add = command("add", "make a token, and print it")
    add.add_argument("name", metavar="NAME", help="whose token it is, for the file and the log")
    add.add_argument("--role", choices=ROLES, default=VIEWER, help="what it allows")
    add.add_argument(
        "--days",
        type=whole_number(0, 36500),
        default=365,
        metavar="DAYS",
        help="how long it is good for, up to 36500 days; 0 = until it is removed (default: "
        "%(default)s days)",
    )
    command("list", "list the names, roles and last days")
    remove = command("remove", "make a token useless")
    remove.add_argument("name", metavar="NAME", help="whose token")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; 1 with a line of why if it cannot be done."""
    options = build_parser().parse_args(argv)
    try:
        {"add": _add, "list": _list, "remove": _remove}[options.command](options)
    except TokensError as error:
        return failed(error, "kvcast tokens")
    return EXIT_OK


def _read(path: Path) -> list[Token]:
    TokensFile(path)  # refuses what a controller would refuse
    return parse(path.read_text(encoding="ascii"))


def _add(options: argparse.Namespace) -> None:
    tokens = _read(options.file) if options.file.exists() else []
    if any(token.name == options.name for token in tokens):
        raise TokensError(f"{options.name} has a token already: remove it first")
    today = datetime.datetime.now(datetime.UTC).date()
    expires = today + datetime.timedelta(days=options.days) if options.days else None
    secret = new_token()
    made = Token(options.name, options.role, digest_of_token(secret), expires)
    write(options.file, [*tokens, made])
    print(secret)
    until = "until it is removed" if expires is None else f"until {expires}"
    print(
        f"{options.name}, {options.role}, {until}; this is the only time that it is shown",
        file=sys.stderr,
    )


def _list(options: argparse.Namespace) -> None:
    for token in _read(options.file):
        print(f"{token.name:24} {token.role:10} {token.expires or 'never ends'}")


def _remove(options: argparse.Namespace) -> None:
    tokens = _read(options.file)
    left = [token for token in tokens if token.name != options.name]
    if len(left) == len(tokens):
        raise TokensError(f"{options.name} has no token")
    write(options.file, left)
