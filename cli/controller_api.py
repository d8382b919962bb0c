"""The controller's HTTP API, as commands of operators use it.

Owns: where it is and who asks, as options, and a question and its answer. Must not know: what is
asked.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from kvcast.service.addresses import HTTP_PORT
from kvcast.service.commands import CommandError, add_log_level, run_command
from kvcast.service.tls import Credentials, TlsError

TOKEN_VARIABLE: Final = "KVCAST_TOKEN"
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Access:
    """By what this command may read: a token, and for https the cluster's authority, perhaps with a
    certificate of its own."""

    token: str = field(default="", repr=False)
    context: ssl.SSLContext | None = None


def access_of(tls: Path | None, token_file: Path | None) -> Access:
    """What the flags and the environment give; CommandError if a file cannot be used."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    context = None
    try:
        if token_file is not None:
            token = token_file.read_text(encoding="ascii").strip()
        if tls is not None:
            context = Credentials.of_folder(tls).client()
            context.check_hostname = True
    except (OSError, UnicodeDecodeError, TlsError) as error:
        raise CommandError(str(error)) from error
    return Access(token, context)


class ControllerApi(Protocol):
    """Asks the controller; CommandError if it does not answer, or says why not."""

    def __call__(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Awaitable[dict[str, Any]]: ...


def add_api_options(parser: argparse.ArgumentParser, token: str = "an operator's token") -> None:
    """Where the controller is, and who asks, by which `token` at least; and --log-level."""
    add_controller_options(parser, token)
    add_log_level(parser)


def add_controller_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, token: str = "an operator's token"
) -> None:
    """As `add_api_options`, where there is a --log-level already."""
    parser.add_argument(
        "--http",
        default=f"http://127.0.0.1:{HTTP_PORT}",
        metavar="URL",
        help="the controller's HTTP address (kvcast controller --http-addr)",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="folder with an operator's certificate and the cluster's authority, for an https:// "
        "address (kvcast certs init)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file with {token} (kvcast tokens add); else ${TOKEN_VARIABLE}",
    )


def check_api_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Complete the address, or end with what is wrong with it."""
    if "://" not in options.http:
        options.http = f"http://{options.http}"
    if not options.http.startswith(("http://", "https://")):
        parser.error("--http must be an http:// or https:// address")
    if options.tls is not None and not options.http.startswith("https://"):
        parser.error("--tls goes with an https:// address")


def run_for_operator(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, int]],
    *,
    wrong: Callable[[argparse.Namespace], str] = lambda _options: "",
) -> int:
    """Do what a command line with these options says; `wrong` tells what else is wrong with it. 1
    with a line of why if it cannot be done."""
    options = parser.parse_args(argv)
    check_api_options(parser, options)
    if complaint := wrong(options):
        parser.error(complaint)
    return run_command(lambda: run(options), log_level=options.log_level)


def controller_api(options: argparse.Namespace) -> ControllerApi:
    """What asks the controller that the options name."""
    access = access_of(options.tls, options.token_file)

    async def ask(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await asyncio.to_thread(ask_controller, options.http, access, method, path, body)

    return ask


def ask_controller(
    url: str, access: Access, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The controller's answer to a question at that address; CommandError if it is none, or says
    why not."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}{path}", data=data, method=method)
    request.add_header("Content-Type", "application/json")
    if access.token:
        # Not sent on to where an answer redirects.
        request.add_unredirected_header("Authorization", f"Bearer {access.token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=access.context) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise CommandError(f"{url}: {_reason(error)}") from error
    except urllib.error.URLError as error:
        raise CommandError(f"{url}: no controller answers: {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CommandError(f"{url}: {error}") from error
    if not isinstance(found, dict):
        raise CommandError(f"{url}: this is no kvcast controller")
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    hint = f"; give --token-file, ${TOKEN_VARIABLE} or --tls" if error.code == 401 else ""
    try:
        said = json.load(error)
        return f"{said['error']} ({error.code}{hint})"
    except (OSError, ValueError, KeyError, TypeError):
        return f"the controller answers {error.code} {error.reason}{hint}"
